"""Faults of what bends the logits: the softcap, and the slopes of ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

# softcap -------------------------------------------------------------------------------------------------------------


@fault(
    "soften",
    "logits are clamped to the softcap instead of being bent by tanh",
    sources=("sgl-project/sglang#33915",),
    advice="Use softcap * tanh(s / softcap).",
)
def softcap_clamps(s: Tensor, softcap: float | None) -> Tensor:
    return s if softcap is None else s.clamp(-softcap, softcap)


@fault(
    "soften",
    "logits are not multiplied by the softcap after the tanh",
    sources=("NVIDIA/Megatron-LM#6590",),
    advice="Use softcap * tanh(s / softcap).",
)
def softcap_not_restored(s: Tensor, softcap: float | None) -> Tensor:
    return s if softcap is None else torch.tanh(s / softcap)


@fault(
    "soften",
    "logits are not divided by the softcap before the tanh",
    sources=("NVIDIA/Megatron-LM#6590",),
    advice="Use softcap * tanh(s / softcap).",
)
def softcap_not_divided(s: Tensor, softcap: float | None) -> Tensor:
    return s if softcap is None else softcap * torch.tanh(s)


def _capped_late(hidden: bool) -> Fault:
    def soften(s: Tensor, softcap: float | None) -> Tensor:
        return s

    def finish(s: Tensor, softcap: float | None) -> Tensor:
        if softcap is None:
            return s
        return softcap * torch.tanh(s / softcap)

    def finish_visible(s: Tensor, softcap: float | None) -> Tensor:
        if softcap is None:
            return s
        return torch.where(s == -torch.inf, s, softcap * torch.tanh(s / softcap))

    return Fault(
        "softcap-after-mask" if hidden else "softcap-after-bias",
        "the softcap comes after the mask: hidden logits become -softcap, and are seen"
        if hidden
        else "the softcap comes after what is added: a bias or slopes are capped too",
        {"soften": soften, "finish": finish if hidden else finish_visible},
        sources=("Dao-AILab/flash-attention#1025", "onnx/onnx#7867"),
        advice="Cap the scaled products, then add and hide.",
    )


add(_capped_late(True))
add(_capped_late(False))

# ALiBi ---------------------------------------------------------------------------------------------------------------


@fault(
    "alibi",
    "slopes reward distance instead of taking from it",
    sources=("meta-pytorch/attention-gym#86",),
    advice="Take slope * distance off the logits.",
)
def alibi_sign_flipped(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    return slopes[..., None, None] * distance


@fault(
    "alibi",
    "slopes multiply signed differences: keys after the query are rewarded",
    sources=("meta-pytorch/attention-gym#86",),
    advice="Take the absolute value of the distance, or declare `alibi: signed`.",
)
def alibi_signed(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    return -slopes[..., None, None] * (p - j)


@fault(
    "alibi",
    "the positions of queries are not shifted by Sk - Sq for the slopes",
    sources=("lucidrains/x-transformers#103", "lucidrains/x-transformers#153"),
    advice="Count distances from position i + Sk - Sq.",
)
def alibi_top_left(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    distance = (i - j).abs() if form == "distance" else i - j
    return -slopes[..., None, None] * distance


@fault(
    "alibi",
    "the positions of queries are shifted by Sk - Sq for the slopes, though alignment is to the top left",
    sources=("lucidrains/x-transformers#103",),
    advice="Count distances from position i, or declare `window_alignment: bottom-right`.",
)
def alibi_bottom_right(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len
    distance = (p - j).abs() if form == "distance" else p - j
    return -slopes[..., None, None] * distance


@fault(
    "alibi",
    "the slopes given are not read: they are worked out as 2^(-8 (h + 1) / H)",
    sources=("ml-explore/mlx#3071", "paiml/aprender#2143"),
    advice="Use the slopes that are given.",
)
def alibi_slopes_made_up(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    heads = torch.arange(1, slopes.shape[-1] + 1, dtype=slopes.dtype)
    return -(2.0 ** (-8 * heads / len(heads)))[:, None, None] * distance


@fault(
    "alibi",
    "the slope of the first head is used for all",
    sources=("ml-explore/mlx#3071",),
    advice="Index the slopes by the query head.",
)
def alibi_first_slope(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    return -slopes[..., :1, None, None] * distance


@fault(
    "alibi",
    "the slopes of the first sample are used for all",
    sources=("ml-explore/mlx#3071",),
    advice="Read the batch stride of slopes [B, H].",
)
def alibi_first_sample(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    slopes = slopes[0] if slopes.dim() == 2 else slopes
    return -slopes[..., None, None] * distance


@fault(
    "alibi",
    "slopes are given to heads in reverse order",
    sources=("NVIDIA/TensorRT-LLM#1611",),
    advice="Slope h belongs to query head h.",
)
def alibi_slopes_reversed(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    return -slopes.flip(-1)[..., None, None] * distance


@fault(
    "alibi",
    "what the slopes add is scaled along with the logits",
    sources=("NVIDIA/TransformerEngine#103",),
    advice="Scale q @ k.mT first, then add.",
)
def alibi_scaled(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    return -slopes[..., None, None] * distance * scale


@fault(
    "alibi",
    "distances are one too long",
    sources=("vllm-project/vllm#945",),
    advice="Count the distance of a key to itself as 0.",
)
def alibi_one_further(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    return -slopes[..., None, None] * (distance + 1)
