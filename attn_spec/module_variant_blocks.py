"""An attention module with variants of its own, as a row of small functions, each of which can be changed alone.

    keep -> slopes -> lean -> near -> weigh -> drain

softcap and window are arguments of its constructor, ALiBi is another or fixed inside, sinks are a parameter. With every
block right it is what `attn_spec.invariants.module_variants` holds to be right; with one changed it is a fault.

Shapes: scores [B, H, S, S]; i [S, 1] and j [1, S] are positions; sinks [H].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def keep(softcap: float | None, window: int | None) -> tuple[float | None, int | None]:
    """What of the constructor's arguments is kept for forward: all of it."""
    return softcap, window


def slopes(heads: int) -> Tensor:
    """The slopes of ALiBi [H], of a number of heads that is a power of two: 2^(-8 h / H), h = 1 ... H."""
    return 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)


def lean(slopes: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """What is added to the scores [H, S, S]: less, the further away a key is."""
    return -slopes[:, None, None] * (i - j).abs()


def near(i: Tensor, j: Tensor, window: int | None) -> Tensor:
    """A query sees itself and the keys before it, `window` in all where there is one."""
    return (j <= i) if window is None else (j <= i) & (j > i - window)


def weigh(scores: Tensor, bias: Tensor, shown: Tensor, softcap: float | None) -> Tensor:
    """Logits: scores are capped, then the bias is added and keys are hidden."""
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return (scores + bias).masked_fill(~shown, -torch.inf)


def drain(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights, of whose sum a sink in each head takes a share."""
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]


RIGHT: dict[str, Callable[..., Any]] = {block.__name__: block for block in (keep, slopes, lean, near, weigh, drain)}


def module_of(blocks: Mapping[str, Callable[..., Any]], *, alibi: bool = False) -> type[nn.Module]:
    """A causal module of the blocks, the right ones where none is given: with ALiBi inside, or with sinks."""
    run = {**RIGHT, **blocks}

    class Decoder(nn.Module):
        """x [B, S, hidden] -> [B, S, hidden]."""

        def __init__(
            self,
            hidden_size: int,
            num_heads: int,
            attn_logit_softcapping: float | None = None,
            sliding_window: int | None = None,
        ) -> None:
            super().__init__()
            self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
            self.kept = run["keep"](attn_logit_softcapping, sliding_window)
            width = num_heads * self.head_dim
            self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
            self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
            self.sinks = None if alibi else nn.Parameter(torch.zeros(num_heads))
            if alibi:
                self.register_buffer("alibi_slopes", run["slopes"](num_heads))

        def forward(self, x: Tensor) -> Tensor:
            b, n, _ = x.shape
            q, k, v = (
                part(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
                for part in (self.q_proj, self.k_proj, self.v_proj)
            )
            i, j = torch.arange(n)[:, None], torch.arange(n)[None]
            softcap, window = self.kept
            bias = run["lean"](self.alibi_slopes, i, j) if alibi else torch.zeros(())
            logits = run["weigh"](
                q @ k.mT / math.sqrt(self.head_dim), bias.to(x.dtype), run["near"](i, j, window), softcap
            )
            out: Tensor = self.o_proj((run["drain"](logits, self.sinks) @ v).transpose(1, 2).flatten(2))
            return out

    return Decoder
