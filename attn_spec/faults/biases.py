"""Faults of the bias: how an additive mask meets the logits."""

import math

from torch import Tensor

from attn_spec.faults.fault import fault


@fault(
    "add_bias",
    "the bias is scaled along with the logits",
    sources=("NVIDIA/TransformerEngine#103", "NVIDIA/OpenSeq2Seq#76", "tenstorrent/tt-metal#42891"),
    advice="Scale q @ k.mT first, then add the bias.",
)
def bias_scaled(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return s if bias is None else s + bias * scale


@fault(
    "add_bias",
    "the bias is divided by the scale",
    sources=("NVIDIA/TransformerEngine#103",),
    advice="Add the bias as it is to the scaled logits.",
)
def bias_divided_by_scale(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return s if bias is None else s + bias / scale


@fault(
    "add_bias",
    "the bias is not brought to base 2 as the logits are: it counts ln 2 times",
    sources=("tenstorrent/tt-metal#42891", "jax-ml/jax#25984"),
    advice="Where exp2 is used, multiply the bias by log2(e) too.",
)
def bias_in_base_two(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return s if bias is None else s + bias * math.log(2)


@fault(
    "add_bias",
    "the bias is added twice",
    sources=("huggingface/transformers#18185", "NVIDIA-NeMo/Automodel#2658"),
    advice="Add the bias once.",
)
def bias_twice(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return s if bias is None else s + bias + bias


@fault(
    "add_bias",
    "the logits are multiplied by the additive mask",
    sources=("georg-wolflein/good-features#1",),
    advice="Add the additive mask.",
)
def bias_multiplied(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return s if bias is None else s * bias
