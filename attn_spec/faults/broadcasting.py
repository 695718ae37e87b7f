"""Faults of a mask's axes: which sample, head, query and key an entry of the mask is taken for."""

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

# samples and heads ---------------------------------------------------------------------------------------------------


@fault(
    "arrange_mask",
    "the mask of the first sample is used for all, a key padding too",
    sources=("pytorch/pytorch#184180", "pytorch/pytorch#147460"),
    advice="Read the mask with its batch stride.",
)
def masks_of_first_sample(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask[:1] if mask.dim() == 4 or form == "key-padding" else mask


@fault(
    "arrange_mask",
    "the mask of the first sample is used for all",
    sources=("pytorch/pytorch#184180", "pytorch/pytorch#147460"),
    advice="Read the mask with its batch stride.",
)
def mask_of_first_sample(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask[:1] if mask.dim() == 4 else mask


@fault(
    "arrange_mask",
    "the key padding of the first sample is used for all",
    sources=("tenstorrent/tt-xla#4190", "pytorch/pytorch#147460"),
    advice="Give each sample its own padding.",
)
def padding_of_first_sample(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask[:1] if form == "key-padding" else mask


@fault(
    "arrange_mask",
    "the mask of the first head is used for all",
    sources=("lucidrains/long-short-transformer#2", "sgl-project/sgl-kernel-xpu#252"),
    advice="Read the mask with its head stride.",
)
def mask_of_first_head(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask[..., :1, :, :] if mask.dim() > 2 else mask


@fault(
    "arrange_mask",
    "the mask of query head h is read at its key/value head",
    sources=("intel/torch-xpu-ops#5090", "intel/intel-xpu-backend-for-triton#3632"),
    advice="Index the mask by the query head.",
)
def mask_by_kv_head(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    h = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    return mask[..., h, :, :] if mask.dim() > 2 and mask.shape[-3] > 1 else mask


@fault(
    "arrange_mask",
    "the mask of query head h is read at h modulo the group size",
    sources=("intel/intel-xpu-backend-for-triton#3632",),
    advice="Index the mask by the query head.",
)
def mask_by_head_in_group(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    h = torch.arange(q.shape[1]) % (q.shape[1] // k.shape[1])
    return mask[..., h, :, :] if mask.dim() > 2 and mask.shape[-3] > 1 else mask


@fault(
    "arrange_mask",
    "the mask of query head h is read at h modulo the key/value heads",
    sources=("intel/intel-xpu-backend-for-triton#3632",),
    advice="Index the mask by the query head.",
)
def mask_by_head_tiled(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    h = torch.arange(q.shape[1]) % k.shape[1]
    return mask[..., h, :, :] if mask.dim() > 2 and mask.shape[-3] > 1 else mask


@fault(
    "arrange_mask",
    "a key is seen by every head when the mask of one head lets it",
    sources=("pytorch/pytorch#97409",),
    advice="Keep the masks of the heads apart.",
)
def mask_any_head(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask.any(dim=-3, keepdim=True) if form == "bool" and mask.dim() > 2 else mask


@fault(
    "arrange_mask",
    "a key is hidden from every head when the mask of one head hides it",
    sources=("pytorch/pytorch#160064", "pytorch/pytorch#97409"),
    advice="Keep the masks of the heads apart.",
)
def mask_all_heads(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask.all(dim=-3, keepdim=True) if form == "bool" and mask.dim() > 2 else mask


@fault(
    "arrange_mask",
    "the additive masks of the heads are averaged",
    sources=("pytorch/pytorch#97409",),
    advice="Add to each head its own bias.",
)
def bias_averaged_over_heads(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask.mean(dim=-3, keepdim=True) if form == "additive" and mask.dim() > 2 else mask


@fault(
    "arrange_mask",
    "the batch and head axes of the mask are swapped",
    sources=("sooftware/attentions#4", "FudanNLP/fastNLP#254"),
    advice="The mask is [B, H, Sq, Sk]; a mask per sample is [B, 1, Sq, Sk].",
)
def mask_axes_swapped(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask.transpose(0, 1) if mask.dim() == 4 else mask


@fault(
    "arrange_mask",
    "a mask of three axes is read as one for each sample instead of one for each head where the sizes allow",
    sources=("pytorch/pytorch#97409",),
    advice="Broadcast from the right: [H, Sq, Sk] is one mask for each head.",
)
def mask_heads_as_samples(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask[:, None] if mask.dim() == 3 and len(mask) == len(q) else mask


@fault(
    "arrange_mask",
    "masks are repeated in the order (head, sample), while the data is in the order (sample, head)",
    sources=("sooftware/attentions#4", "pytorch/pytorch#184180"),
    advice="Repeat each sample's mask once for each of its heads: repeat_interleave, not repeat.",
)
def mask_repeated_in_wrong_order(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    if mask.dim() < 4 or mask.shape[1] > 1:
        return mask
    return mask.repeat(q.shape[1], 1, 1, 1).reshape(len(mask), q.shape[1], *mask.shape[2:])


# queries and keys ----------------------------------------------------------------------------------------------------


@fault(
    "arrange_mask",
    "the mask of the first query is used for all",
    sources=("pytorch/pytorch#187225", "ml-explore/mlx#2894", "FudanNLP/fastNLP#254"),
    advice="Read the mask with its query stride.",
)
def mask_of_first_query(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask[..., :1, :] if mask.dim() > 1 and form != "key-padding" else mask


@fault(
    "arrange_mask",
    "the mask of the last query is used for all",
    sources=("pytorch/pytorch#187225",),
    advice="Read the mask with its query stride.",
)
def mask_of_last_query(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask[..., -1:, :] if mask.dim() > 1 and form != "key-padding" else mask


@fault(
    "arrange_mask",
    "the mask is transposed: entry (i, j) is applied to query j and key i",
    sources=("NVIDIA/TransformerEngine#1069", "HomericIntelligence/Odyssey#5648"),
    advice="The mask is [..., Sq, Sk].",
)
def mask_transposed(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask.mT if mask.dim() > 1 and form != "key-padding" else mask


@fault(
    "arrange_mask",
    "a square mask is transposed: entry (i, j) is applied to query j and key i where the shape fits either way",
    sources=("lucidrains/x-transformers#174", "NVIDIA/TransformerEngine#1069"),
    advice="The mask is [..., Sq, Sk]; don't guess from its shape.",
)
def mask_transposed_when_square(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask.mT if form != "key-padding" and mask.dim() > 1 and mask.shape[-2] == mask.shape[-1] else mask


def _rows_wrapped(size: int) -> Fault:
    def arrange_mask(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
        if form == "key-padding" or mask.dim() < 2 or mask.shape[-2] == 1:
            return mask
        return mask[..., torch.arange(q.shape[2]) % size, :]

    return Fault(
        f"mask-rows-wrapped-{size}",
        f"query i is given row i modulo {size} of the mask",
        {"arrange_mask": arrange_mask},
        sources=("pytorch/pytorch#187225",),
        advice="Add the start of the query block to the mask's row.",
    )


for _size in (16, 32, 64, 128):
    add(_rows_wrapped(_size))


@fault(
    "read_mask",
    "the key padding is applied to the queries",
    sources=("lucidrains/x-transformers#174", "NVIDIA/TransformerEngine#1069"),
    advice="Give the padding the axis of the keys: [B, 1, 1, Sk].",
)
def padding_on_queries(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return mask[:, None, :, None], None
    if form == "bool":
        return mask, None
    return None, mask


@fault(
    "read_mask",
    "the key padding also empties the rows of padded positions",
    sources=("pytorch/pytorch#103749", "Biohub/esm#299"),
    advice="Hide padded keys alone; what padded queries give is the caller's to drop.",
)
def padding_on_both(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return mask[:, None, None, :] & mask[:, None, :, None], None
    if form == "bool":
        return mask, None
    return None, mask


@fault(
    "read_mask",
    "padded positions see each other",
    sources=("Biohub/esm#299",),
    advice="A key is seen when it is real, not when it is padded as the query is.",
)
def padding_sees_padding(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return mask[:, None, None, :] == mask[:, None, :, None], None
    if form == "bool":
        return mask, None
    return None, mask


@fault(
    "arrange_mask",
    "the key padding is turned into lengths, as if it were always on the right",
    sources=("pytorch/pytorch#147460", "NVIDIA-NeMo/Automodel#3704", "huggingface/transformers#29419"),
    advice="Use the padding itself, or gather the real keys first.",
)
def padding_taken_as_lengths(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    if form != "key-padding":
        return mask
    return torch.arange(mask.shape[1]) < mask.sum(dim=1, keepdim=True)
