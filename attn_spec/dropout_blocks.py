"""Attention with dropout as a row of small pure functions, each of which can be changed on its own.

    heed -> choose_rate -> draw -> keep -> attend, and on the way back recall

    O = (M o P / (1 - p)) V,  P = softmax(scale q k' + mask),  M_ij = 1 with probability 1 - p, each for itself
    dV = (M o P / (1 - p))' dO,  dP = M o (dO V') / (1 - p),  dS = P o (dP - rowsum(dO o O))

`attend` is differentiated by torch with the mask of `recall` in the place of that of `keep`, as a kernel does that
draws its numbers again on the way back. Shapes as in `attn_spec.blocks`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# the blocks ----------------------------------------------------------------------------------------------------------


def heed(visible: Tensor | None, rate: float) -> Tensor | None:
    """What is hidden under dropout: what the mask and causality hide."""
    return visible


def choose_rate(rate: float) -> float:
    """The probability that a weight is dropped: the one that is given."""
    return rate


def draw(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    """A number in [0, 1) for each weight, from torch's generator."""
    return torch.rand(b, h, q_len, kv_len)


def keep(u: Tensor, rate: float) -> Tensor:
    """Which weights are kept."""
    return u >= rate


def attend(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    """The weights are dropped after the softmax, and those that are kept divided by 1 - rate."""
    p = torch.softmax(s, dim=-1)
    p = torch.where(kept, p / (1 - rate), 0.0)
    return p @ v


def recall(kept: Tensor, rate: float) -> tuple[Tensor, float]:
    """The mask and the rate of the backward pass: those of the forward pass."""
    return kept, rate


# the pass ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dropout:
    """The blocks of one attention with dropout; `Dropout()` is right."""

    heed: Callable[..., Any] = heed
    choose_rate: Callable[..., Any] = choose_rate
    draw: Callable[..., Any] = draw
    keep: Callable[..., Any] = keep
    attend: Callable[..., Any] = attend
    recall: Callable[..., Any] = recall


BLOCKS: dict[str, Callable[..., Any]] = {f.name: f.default for f in dataclasses.fields(Dropout)}  # type: ignore[misc]
RIGHT = Dropout()


class _Passes(torch.autograd.Function):
    """`attend` with one mask forwards and, where `recall` says so, another backwards."""

    @staticmethod
    def forward(ctx: Any, blocks: Dropout, s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Any:
        ctx.blocks, ctx.rate = blocks, rate
        ctx.save_for_backward(s, v, kept)
        return blocks.attend(s, v, kept, rate)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        s, v, kept = ctx.saved_tensors
        with torch.enable_grad():
            s, v = s.detach().requires_grad_(), v.detach().requires_grad_()
            output = ctx.blocks.attend(s, v, *ctx.blocks.recall(kept, ctx.rate))
            ds, dv = torch.autograd.grad(output, (s, v), cotangents[0], materialize_grads=True)
        return None, ds, dv, None, None


def attention(blocks: Dropout) -> Callable[..., Tensor]:
    """A function `f(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None)` that runs the blocks."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        b, h, q_len, d = q.shape
        kv_heads, kv_len = k.shape[1:3]
        k, v = (x.repeat_interleave(h // kv_heads, dim=1) for x in (k, v))
        rate = blocks.choose_rate(dropout_p)
        visible = torch.ones(q_len, kv_len, dtype=torch.bool).tril() if is_causal else None
        s = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(d))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            visible = attn_mask if visible is None else visible & attn_mask
        elif attn_mask is not None:
            s = s + attn_mask
        visible = blocks.heed(visible, rate)
        if visible is not None:
            s = s.masked_fill(~visible, -torch.inf)
        empty = (s == -torch.inf).all(-1, keepdim=True)
        s = s.masked_fill(empty, 0.0)
        if not rate:
            return (torch.softmax(s, -1) @ v).masked_fill(empty, 0.0)
        kept = blocks.keep(blocks.draw(b, h, kv_heads, q_len, kv_len), rate)
        output: Tensor = _Passes.apply(blocks, s, v, kept, rate)  # type: ignore[no-untyped-call]
        return output.masked_fill(empty, 0.0)

    return attend
