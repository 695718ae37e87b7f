"""torch's flex_attention behind SDPA's signature, eager and compiled.

Masks and biases become a `score_mod`, so every mask that broadcasts to [B, H, Sq, Sk] can be judged.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> [B, H, Sq, Dv]; is_causal is aligned to the top left."""
    return _call(flex_attention, q, k, v, attn_mask, is_causal, scale, enable_gqa)


def flex_compiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `flex`, through torch.compile: about ten seconds of compilation for each new kind of problem on a CPU."""
    return _call(_compiled(), q, k, v, attn_mask, is_causal, scale, enable_gqa)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _call(
    attention: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    mask = None if attn_mask is None else attn_mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if mask is not None:
            entry = mask[b, h, i, j]
            score = torch.where(entry, score, -torch.inf) if mask.dtype == torch.bool else score + entry
        return torch.where(j <= i, score, -torch.inf) if is_causal else score

    plain = mask is None and not is_causal
    out: Tensor = attention(q, k, v, score_mod=None if plain else score_mod, scale=scale, enable_gqa=enable_gqa)
    return out
