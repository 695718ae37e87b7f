"""Faults of a forward-mode derivative: each is one changed block of `attn_spec.tangent_blocks`, told by its law."""

from __future__ import annotations

from torch import Tensor

from attn_spec.faults.behaviour import catalogue
from attn_spec.tangent_blocks import BLOCKS

fault = catalogue("gradients", BLOCKS)


@fault(
    "of_output",
    "the forward-mode derivative does not carry the tangent of the values on",
    sources=("raven-ml/raven#153",),
    advice="Add the weights times the tangent of the values.",
    told_by="forward-mode",
)
def value_tangent_dropped(p: Tensor, dp: Tensor, v: Tensor, dv: Tensor) -> Tensor:
    return dp @ v
