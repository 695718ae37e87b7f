"""The forward-mode derivative of attention as small blocks, each of which can be changed.

    ds = scale (dq k' + q dk')      dp = p o (ds - rowsum(p o ds))      do = dp v + p dv

q, k, v and their tangents dq, dk, dv are [B, H, S, D]; p are the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def of_logits(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, scale: float) -> Tensor:
    """The tangent of the scaled logits."""
    return (dq @ k.mT + q @ dk.mT) * scale


def of_weights(p: Tensor, ds: Tensor) -> Tensor:
    """The tangent of the weights; what a hidden key has does not count, for its weight is 0."""
    return p * (ds - (p * ds).sum(-1, keepdim=True))


def of_output(p: Tensor, dp: Tensor, v: Tensor, dv: Tensor) -> Tensor:
    """The tangent of the output: through the weights and through the values."""
    return dp @ v + p @ dv


BLOCKS: dict[str, Callable[..., Tensor]] = {"of_logits": of_logits, "of_weights": of_weights, "of_output": of_output}


def attention_with_tangents(changed: Mapping[str, Callable[..., Tensor]] | None = None) -> Callable[..., Tensor]:
    """A function of q, k and v that brings a forward-mode derivative of these blocks; some may be changed."""
    blocks = {**BLOCKS, **(changed or {})}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Tensor:
            return _weights(q, k, is_causal, scale) @ v

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.given = inputs

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> Tensor:
            q, k, v, is_causal, scale = ctx.given
            dq, dk, dv = (torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v), tangents[:3], strict=True))
            p = _weights(q, k, is_causal, scale)
            dp = blocks["of_weights"](p, blocks["of_logits"](q, k, dq, dk, scale))
            return blocks["of_output"](p, dp, v, dv)

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
        """[B, H, S, D] each, as many heads of k and v as of q."""
        out: Tensor = Attention.apply(q, k, v, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)  # type: ignore[no-untyped-call]
        return out

    return attention


def _weights(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    s = q @ k.mT * scale
    if is_causal:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
    return s.softmax(-1)
