"""Faults of causality: whether, where and for whom the future is hidden."""

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

# whether the causal mask is applied ----------------------------------------------------------------------------------


@fault(
    "use_causal",
    "the causal flag is ignored: every query sees the future",
    sources=("huggingface/transformers#48745", "keras-team/keras#23038", "facebookresearch/xformers#1185"),
    advice="Hide key j from query i where j > i.",
)
def causal_ignored(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return False


@fault(
    "use_causal",
    "causal whether asked for or not",
    sources=("ArcInstitute/state#227", "zhouhaoyi/Informer2020#38"),
    advice="Apply the causal mask when the flag is set, and only then.",
)
def causal_always(flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None) -> bool:
    return True


@fault(
    "use_causal",
    "the causal flag is ignored as soon as a mask is given",
    sources=("huggingface/transformers#48748", "FGA-DIKU/BONSAI#344"),
    advice="Combine the two: a key is seen when both let it.",
)
def causal_ignored_with_mask(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and mask is None


@fault(
    "use_causal",
    "the causal flag is ignored when a mask of bools is given, a key padding too",
    sources=("FGA-DIKU/BONSAI#344", "huggingface/transformers#48748"),
    advice="Combine the two: a key is seen when both let it.",
)
def causal_ignored_with_mask_of_bools(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and form not in ("bool", "key-padding")


@fault(
    "use_causal",
    "the causal flag is ignored when a bool mask is given",
    sources=("FGA-DIKU/BONSAI#344", "huggingface/transformers#48748"),
    advice="Combine the two: a key is seen when both let it.",
)
def causal_ignored_with_bool_mask(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and form != "bool"


@fault(
    "use_causal",
    "the causal flag is ignored when an additive mask or a bias is given",
    sources=("huggingface/transformers#48748",),
    advice="Hide the future as well as adding the bias.",
)
def causal_ignored_with_bias(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and form != "additive"


@fault(
    "use_causal",
    "the causal flag is ignored when a key padding is given",
    sources=("FGA-DIKU/BONSAI#344", "keras-team/keras#23038"),
    advice="Combine the two: a key is seen when both let it.",
)
def causal_ignored_with_padding(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and form != "key-padding"


@fault(
    "use_causal",
    "the causal flag has effect only when a mask is given too",
    sources=("facebookresearch/xformers#103", "facebookresearch/xformers#104"),
    advice="Build the causal mask without waiting for another one.",
)
def causal_only_with_mask(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and mask is not None


@fault(
    "use_causal",
    "the causal flag is ignored where query heads share key/value heads",
    sources=("huggingface/transformers#48745", "pytorch/pytorch#99282"),
    advice="Apply the causal mask on the grouped path too.",
)
def causal_ignored_with_groups(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and q.shape[1] == k.shape[1]


@fault(
    "use_causal",
    "the causal flag is ignored when a scale is given",
    sources=("pytorch/pytorch#99282",),
    advice="Apply the causal mask whatever the scale.",
)
def causal_ignored_with_scale(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and scale is None


@fault(
    "use_causal",
    "the causal flag is ignored where queries and keys differ in number",
    sources=("Dao-AILab/flash-attention#282", "lucidrains/x-transformers#187"),
    advice="Build the mask for Sq x Sk with the declared alignment.",
)
def causal_ignored_across(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and q.shape[2] == k.shape[2]


@fault(
    "use_causal",
    "the causal flag is ignored for a single query",
    sources=("huggingface/transformers#37807", "karpathy/nanochat#456"),
    advice="For one query too, hide what the declared alignment hides.",
)
def causal_ignored_for_one_query(
    flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None
) -> bool:
    return flag and q.shape[2] > 1


# what it hides -------------------------------------------------------------------------------------------------------


@fault(
    "causal",
    "each query also sees the key right after its own position",
    sources=("octo-models/octo#75", "RVC-Boss/GPT-SoVITS#965"),
    advice="Hide j > i: tril(diagonal=0), not 1.",
)
def causal_one_ahead(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return j <= i + offset + 1


@fault(
    "causal",
    "a query does not see the key at its own position",
    sources=("PaddlePaddle/flash-attention#48", "facebookresearch/fairseq#1495", "InfiniTensor/InfiniCore#279"),
    advice="Let the diagonal be seen: j <= i, not j < i.",
)
def causal_without_diagonal(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return j < i + offset


def _finite(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    return s if past is None else s + torch.zeros_like(s).masked_fill(~past, -1e9)


add(
    Fault(
        "causal-without-diagonal-finite",
        "a query does not see the key at its own position; -1e9 is added, so the first sees all",
        {"causal": causal_without_diagonal, "hide": _finite},
        sources=("facebookresearch/fairseq#1495", "InfiniTensor/InfiniCore#279"),
        advice="Let the diagonal be seen: triu(diagonal=1) hides the future, triu() the query's own key too.",
    )
)


@fault(
    "causal",
    "the causal mask is aligned to the top left instead of the bottom right",
    sources=("Dao-AILab/flash-attention#282", "lucidrains/x-transformers#187"),
    advice="Shift the diagonal by Sk - Sq, or declare `alignment: top-left`.",
)
def causal_top_left(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = 0
    return j <= i + offset


@fault(
    "causal",
    "the causal mask is aligned to the bottom right instead of the top left",
    sources=("Dao-AILab/flash-attention#282", "trymirai/lalamo#200"),
    advice="Leave the diagonal at 0, or declare `alignment: bottom-right`.",
)
def causal_bottom_right(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len
    return j <= i + offset


@fault(
    "causal",
    "the bottom-right diagonal is not shifted where there are more queries than keys",
    sources=("Dao-AILab/flash-attention#282", "ROCm/aiter#5556"),
    advice="Let the offset Sk - Sq be negative: the first queries then see no key.",
)
def causal_offset_clamped(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = max(kv_len - q_len, 0) if alignment == "bottom-right" else 0
    return j <= i + offset


@fault(
    "causal",
    "the causal mask is reversed: each query sees itself and the future",
    sources=("pytorch/pytorch#29546", "pytorch/examples#649", "rasbt/LLMs-from-scratch#1062"),
    advice="Keep the lower triangle: tril, not triu.",
)
def causal_reversed(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return j >= i + offset


@fault(
    "causal",
    "the causal mask is inverted: each query sees the future alone",
    sources=("rasbt/LLMs-from-scratch#1062", "hkproj/pytorch-transformer#19"),
    advice="True must mean what the mask's reader takes it for: seen.",
)
def causal_inverted(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return j > i + offset


@fault(
    "causal",
    "each query sees its own position alone",
    sources=("GenerelSchwerz/llama.cpp#48", "lucidrains/local-attention#5"),
    advice="Let all of the past be seen.",
)
def causal_diagonal_only(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return j == i + offset


@fault(
    "causal",
    "only the first head is causal",
    sources=("Xilinx/mlir-air#1428",),
    advice="Apply the causal mask to every head.",
)
def causal_first_head_only(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return (j <= i + offset) | (torch.arange(heads)[:, None, None] > 0)


@fault(
    "causal",
    "the upper half of the heads is not causal",
    sources=("Xilinx/mlir-air#1428",),
    advice="Apply the causal mask to every head.",
)
def causal_lower_heads_only(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return (j <= i + offset) | (torch.arange(heads)[:, None, None] >= heads / 2)


@fault(
    "causal",
    "in the upper half of the heads, each query also sees the key right after its own position",
    sources=("Xilinx/mlir-air#1428",),
    advice="Start the row counter anew for each head.",
)
def causal_one_ahead_in_upper_heads(
    i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int
) -> Tensor:
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return j <= i + offset + (torch.arange(heads)[:, None, None] >= heads / 2)


def _tail_without_diagonal(size: int) -> Fault:
    def causal(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
        offset = kv_len - q_len if alignment == "bottom-right" else 0
        whole = max(q_len // size, 1) * size
        return j <= i + offset - (i >= whole).long()

    return Fault(
        f"tail-queries-without-diagonal-{size}",
        f"the queries after the last whole block of {size} do not see the key at their own position",
        {"causal": causal},
        sources=("meta-pytorch/attention-gym#50",),
        advice="Use one causal bound in whole and in partial blocks: j <= i.",
    )


def _block_bound(size: int) -> Fault:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        bound = ((i // size + 1) * size).clamp(max=s.shape[-2]) + s.shape[-1] - s.shape[-2]
        for seen in (visible, past, j < bound):
            if seen is not None:
                s = s.masked_fill(~seen, -torch.inf)
        return s

    return Fault(
        f"causal-block-bound-{size}",
        f"keys beyond the diagonal's block of {size} are not visited, causal or not",
        {"hide": hide},
        sources=("triton-lang/triton#609",),
        advice="Cut the loop over keys short only when the causal flag is set.",
    )


def _block_bound_top_left(size: int) -> Fault:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        for seen in (visible, past, j < (i // size + 1) * size):
            if seen is not None:
                s = s.masked_fill(~seen, -torch.inf)
        return s

    return Fault(
        f"causal-block-bound-top-left-{size}",
        f"keys beyond the diagonal's block of {size} are not visited, causal or not; the diagonal starts at key 0",
        {"hide": hide},
        sources=("triton-lang/triton#609",),
        advice="Cut the loop over keys short only when the causal flag is set.",
    )


def _by_blocks(size: int) -> Fault:
    def causal(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
        offset = kv_len - q_len if alignment == "bottom-right" else 0
        return j // size <= (i + offset) // size

    return Fault(
        f"causal-by-blocks-{size}",
        f"the future is hidden by whole blocks of {size} keys, and seen within a block",
        {"causal": causal},
        sources=("triton-lang/triton#609",),
        advice="Mask element by element in the block on the diagonal.",
    )


for _size in (16, 32, 64, 128):
    for _family in (_by_blocks, _tail_without_diagonal, _block_bound, _block_bound_top_left):
        add(_family(_size))


# with another mask ---------------------------------------------------------------------------------------------------


@fault(
    "combine",
    "the causal mask replaces the mask that is given",
    sources=("NVIDIA/Megatron-LM#7039",),
    advice="Combine the two: visible & causal.",
)
def causal_replaces_mask(visible: Tensor | None, past: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return None, past


@fault(
    "combine",
    "a key is seen when the mask or causality lets it, instead of both",
    sources=("lucidrains/local-attention#5", "microsoft/onnxruntime#14363"),
    advice="Combine the two: visible & causal.",
)
def causal_or_mask(visible: Tensor | None, past: Tensor) -> tuple[Tensor | None, Tensor | None]:
    return None, past if visible is None else visible | past


@fault(
    "arrange_mask",
    "any mask is ignored when the causal flag is set",
    sources=("NVIDIA/Megatron-LM#7039", "huggingface/transformers#37807"),
    advice="Apply the mask as well as the causal flag.",
)
def mask_ignored_when_causal(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return None if flag else mask
