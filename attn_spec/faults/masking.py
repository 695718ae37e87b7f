"""Faults of masking: which keys a mask hides, from whom, and with what."""

import torch
from torch import Tensor

from attn_spec.faults.fault import fault

# whether the mask is applied -----------------------------------------------------------------------------------------


@fault(
    "arrange_mask",
    "every mask is ignored",
    sources=("torch-spyre/torch-spyre#4526", "huggingface/transformers#30127"),
    advice="Hide what the mask hides.",
)
def mask_ignored(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return None


@fault(
    "arrange_mask",
    "masks of bools are ignored, key padding among them",
    sources=("torch-spyre/torch-spyre#4526", "yg211/bert_nli#3"),
    advice="Hide the keys where the mask is False.",
)
def masks_of_bools_ignored(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return None if form != "additive" else mask


@fault(
    "arrange_mask",
    "a bool mask is ignored",
    sources=("torch-spyre/torch-spyre#4526", "axolotl-ai-cloud/axolotl#3796"),
    advice="Hide the keys where the mask is False.",
)
def bool_mask_ignored(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return None if form == "bool" else mask


@fault(
    "arrange_mask",
    "an additive mask or bias is ignored",
    sources=("jax-ml/jax#28974", "pytorch/pytorch#191612"),
    advice="Add it to the scaled logits.",
)
def additive_mask_ignored(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return None if form == "additive" else mask


@fault(
    "arrange_mask",
    "the key padding is ignored",
    sources=("jingyaogong/minimind-v#76", "yg211/bert_nli#3", "turboderp/exllama#101"),
    advice="Hide the padded keys from every query.",
)
def padding_ignored(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return None if form == "key-padding" else mask


@fault(
    "arrange_mask",
    "the mask is ignored for a single query",
    sources=("OpenNMT/OpenNMT-py#2532", "rajveer43/VeloxQuant-MLX#463"),
    advice="Apply the mask for one query too.",
)
def mask_ignored_for_one_query(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return None if q.shape[2] == 1 else mask


@fault(
    "arrange_mask",
    "the mask is ignored unless the causal flag is set",
    sources=("AI4Bharat/IndicBERT#20",),
    advice="Apply the mask with and without the causal flag.",
)
def mask_only_when_causal(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask if flag else None


@fault(
    "arrange_mask",
    "the mask is ignored where query heads share key/value heads",
    sources=("intel/torch-xpu-ops#5090", "pytorch/pytorch#147460"),
    advice="Apply the mask on the grouped path too.",
)
def mask_ignored_with_groups(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask if q.shape[1] == k.shape[1] else None


# what the mask is taken for ------------------------------------------------------------------------------------------


@fault(
    "arrange_mask",
    "masks of bools are inverted, key padding among them: the keys that they let through are hidden",
    sources=("InseeFrLab/torchTextClassifiers#92", "rasbt/LLMs-from-scratch#1062"),
    advice="Hide what is hidden; if True is meant the other way, declare `polarity:` or `padding_polarity:`.",
)
def masks_inverted(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return ~mask if form != "additive" else mask


@fault(
    "arrange_mask",
    "a bool mask is inverted: the keys that it lets through are hidden",
    sources=("InseeFrLab/torchTextClassifiers#92", "rasbt/LLMs-from-scratch#1062"),
    advice="True means that the key may be seen, or declare `polarity: masked`.",
)
def bool_mask_inverted(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return ~mask if form == "bool" else mask


@fault(
    "arrange_mask",
    "the key padding is inverted: the real keys are hidden",
    sources=("zai-org/GLM-4-Voice#182", "kzl/decision-transformer#30"),
    advice="Hide the padded keys, not the real ones.",
)
def padding_inverted(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return ~mask if form == "key-padding" else mask


@fault(
    "arrange_mask",
    "the sign of an additive mask is flipped",
    sources=("zai-org/GLM-4-Voice#182", "meta-pytorch/attention-gym#86", "lucidrains/memory-compressed-attention#2"),
    advice="Add the mask, don't subtract it.",
)
def additive_sign_flipped(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return -mask if form == "additive" else mask


@fault(
    "read_mask",
    "masks of bools are added to the logits as 0 and 1, key padding among them",
    sources=("ml-explore/mlx#2626", "pytorch/pytorch#103963"),
    advice="Put -inf where a mask is False.",
)
def masks_added(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return None, mask[:, None, None, :] * 1.0
    return None, mask * 1.0


@fault(
    "read_mask",
    "a bool mask is added to the logits as 0 and 1",
    sources=("ml-explore/mlx#2626", "pytorch/pytorch#103963"),
    advice="Put -inf where a bool mask is False.",
)
def bool_mask_added(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return mask[:, None, None, :], None
    return None, mask * 1.0


@fault(
    "read_mask",
    "the key padding is added to the logits as 0 and 1",
    sources=("ml-explore/mlx#2626",),
    advice="Put -inf where a key is padding.",
)
def padding_added(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return None, mask[:, None, None, :] * 1.0
    if form == "bool":
        return mask, None
    return None, mask


@fault(
    "read_mask",
    "an additive mask is cast to bool: what is not zero counts as visible",
    sources=("ml-explore/mlx#2626", "pytorch/pytorch#191612"),
    advice="Add an additive mask to the logits.",
)
def additive_mask_as_bool(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return mask[:, None, None, :], None
    return mask != 0, None


@fault(
    "read_mask",
    "an additive mask hides keys, but its finite numbers are not added",
    sources=("jax-ml/jax#28974",),
    advice="Add an additive mask to the logits.",
)
def bias_lost(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return mask[:, None, None, :], None
    if form == "bool":
        return mask, None
    return mask > -torch.inf, None


# rows that see no key ------------------------------------------------------------------------------------------------


@fault(
    "settle",
    "a row that sees no key is NaN",
    sources=("pytorch/pytorch#103963", "ml-explore/mlx#2608", "pytorch/pytorch#81077"),
    advice="Give such rows the declared value, or declare `empty_rows: nan`.",
)
def empty_rows_nan(p: Tensor, s: Tensor, visible: Tensor | None, past: Tensor | None, empty_rows: str) -> Tensor:
    value = torch.nan
    return torch.where((s > -torch.inf).any(dim=-1, keepdim=True), p, value)


@fault(
    "settle",
    "a row that sees no key is the mean of V",
    sources=("ml-explore/mlx#2395", "pytorch/pytorch#103749"),
    advice="Give such rows the declared value, or declare `empty_rows: mean`.",
)
def empty_rows_mean(p: Tensor, s: Tensor, visible: Tensor | None, past: Tensor | None, empty_rows: str) -> Tensor:
    value = 1 / p.shape[-1]
    return torch.where((s > -torch.inf).any(dim=-1, keepdim=True), p, value)


@fault(
    "settle",
    "a row that sees no key is zero",
    sources=("ml-explore/mlx#2406", "huggingface/transformers#48748"),
    advice="Give such rows the declared value, or declare `empty_rows: zero`.",
)
def empty_rows_zero(p: Tensor, s: Tensor, visible: Tensor | None, past: Tensor | None, empty_rows: str) -> Tensor:
    return p
