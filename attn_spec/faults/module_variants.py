"""Faults of variants inside modules: an argument of the constructor that is not used, slopes and sinks of its own.

They are told by laws that know the cause (`attn_spec.invariants.module_variants`). What the argument does once it is
used is attention, and the catalogue of attention names it as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.faults.behaviour import catalogue
from attn_spec.module_variant_blocks import RIGHT

fault = catalogue("modules", RIGHT)


@fault(
    "keep",
    "the softcap that the constructor takes is not used in forward",
    sources=("sgl-project/sglang#33915",),
    advice="Cap the scaled scores: `softcap * tanh(s / softcap)`.",
    told_by="softcap-unused",
)
def softcap_argument_unused(softcap: float | None, window: int | None) -> tuple[float | None, int | None]:
    return None, window


@fault(
    "weigh",
    "the softcap of the constructor is applied once keys are hidden, and brings them back",
    sources=("onnx/onnx#7867", "Dao-AILab/flash-attention#1025"),
    advice="Cap the scores before anything is hidden or added.",
    told_by="built-softcap-order",
)
def softcap_argument_after_mask(scores: Tensor, bias: Tensor, shown: Tensor, softcap: float | None) -> Tensor:
    logits = (scores + bias).masked_fill(~shown, -torch.inf)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@fault(
    "keep",
    "the window that the constructor takes is not used in forward",
    sources=("huggingface/transformers#29777", "jax-ml/jax#32300"),
    advice="Hide the keys that lie outside the window.",
    told_by="window-unused",
)
def window_argument_unused(softcap: float | None, window: int | None) -> tuple[float | None, int | None]:
    return softcap, None


@fault(
    "near",
    "the window of the constructor holds one key more than it says",
    sources=("huggingface/transformers#39408", "ml-explore/mlx-lm#390"),
    advice="A `sliding_window` of W keys counts the query's own: j > i - W.",
    told_by="convention:window",
)
def window_argument_one_more(i: Tensor, j: Tensor, window: int | None) -> Tensor:
    return (j <= i) if window is None else (j <= i) & (j >= i - window)


@fault(
    "lean",
    "ALiBi has the wrong sign: keys that are far away are favoured",
    sources=("meta-pytorch/attention-gym#86",),
    advice="Take the distance times the slope off the scores.",
    told_by="alibi-sign",
)
def alibi_inside_sign_flipped(slopes: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return slopes[:, None, None] * (i - j).abs()


@fault(
    "slopes",
    "the slopes of ALiBi are those of the heads in reverse",
    sources=("intel/intel-xpu-backend-for-triton#3632",),
    advice="The first head has the steepest slope.",
    told_by="alibi-heads",
)
def alibi_inside_heads_reversed(heads: int) -> Tensor:
    return 2.0 ** (-8 * torch.arange(heads, 0, -1) / heads)


@fault(
    "slopes",
    "the exponents of the slopes of ALiBi start at 0, so that each is a step too steep",
    sources=("paiml/aprender#2143",),
    advice="The exponents are -8 h / H for h = 1 ... H.",
    told_by="alibi-slopes",
)
def alibi_inside_from_zero(heads: int) -> Tensor:
    return 2.0 ** (-8 * torch.arange(heads) / heads)


@fault(
    "drain",
    "the sinks that are a parameter of the module are not used",
    sources=("NVIDIA/TransformerEngine#2541",),
    advice="Add the sink of each head to the softmax as one more logit, without a value.",
    told_by="sinks-unused",
)
def sinks_parameter_unused(logits: Tensor, sinks: Tensor | None) -> Tensor:
    return logits.softmax(-1)
