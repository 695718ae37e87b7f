"""Faults of decoding as implementations: a function, a function with a cache, and a module, each around the blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec.decoding_blocks import RIGHT, Asked, Cache, Decoding, empty, rotate_halves, step
from attn_spec.faults.behaviour import BehaviourFault


def pipeline_of(fault: BehaviourFault | None) -> Decoding:
    """The blocks with one of them changed."""
    return RIGHT if fault is None else Decoding(**fault.blocks)


def _asked(
    q: Tensor,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: Tensor | None,
    mask: Tensor | None,
) -> Asked:
    left, right = (None if n < 0 else n for n in window)
    bounds = None if left is None and right is None else (left, right)
    seen = mask if mask is not None and mask.dtype == torch.bool else None
    bias = mask if seen is None else None
    return Asked(causal, softmax_scale, bounds, slopes, softcap or None, seen, bias)


def planted_function(fault: BehaviourFault | None) -> Callable[..., Any]:
    """f(q, k, v, ...) under flash-attn's names, q [B, S, H, D], with a mask: keys are attended to as a cache is."""
    blocks = pipeline_of(fault)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax_lse: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Any:
        exact = torch.promote_types(q.dtype, torch.float32)
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = attn_mask.to(exact)
        asked = _asked(q, softmax_scale, causal, window_size, softcap, alibi_slopes, attn_mask)
        cache = Cache(k.to(exact), v.to(exact), torch.full((len(q),), k.shape[1]), begun=q.shape[1] < k.shape[1])
        out, lse = step(cache, q.transpose(1, 2).to(exact), None, None, asked, blocks)
        out = out.transpose(1, 2).to(q.dtype)
        return (out, lse) if return_softmax_lse else out

    return attention


def planted_cached(fault: BehaviourFault | None) -> Callable[..., Any]:
    """f(q, k_cache, v_cache, k, v, ...) as flash_attn_with_kvcache, of rows or of pages."""
    blocks = pipeline_of(fault)

    def attention_with_cache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax_lse: bool = False,
    ) -> Any:
        exact = torch.promote_types(q.dtype, torch.float32)
        asked = _asked(q, softmax_scale, causal, window_size, softcap, alibi_slopes, None)
        filled = torch.full((len(q),), k_cache.shape[1]) if cache_seqlens is None else cache_seqlens.long()
        rows, table = (None if x is None else x.long() for x in (cache_batch_idx, block_table))
        cache = Cache(k_cache, v_cache, filled, rows, table)
        new_k, new_v = (None if x is None else x.transpose(1, 2) for x in (k, v))
        out, lse = step(cache, q.transpose(1, 2).to(exact), new_k, new_v, asked, blocks)
        out = out.transpose(1, 2).to(q.dtype)
        return (out, lse) if return_softmax_lse else out

    return attention_with_cache


def planted_decoder(
    fault: BehaviourFault | None, *, rotates: bool = True, window: int | None = None
) -> type[nn.Module]:
    """A causal module that keeps its cache inside: `use_cache=True`, and `reset_cache()`; rotated by position or not.

    window: how many tokens before its own each sees; None: all.
    """
    blocks = pipeline_of(fault)

    class CausalDecoder(nn.Module):
        """x [B, S, hidden]; mask bool [B, 1, S, len(cache) + S], True = may be seen."""

        def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
            super().__init__()
            if hidden_size % num_heads or num_heads % num_kv_heads:
                raise ValueError(f"{hidden_size} channels, {num_heads} heads and {num_kv_heads} kv heads do not divide")
            self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, hidden_size // num_heads
            self.q_proj = nn.Linear(hidden_size, hidden_size)
            self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
            self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
            self.o_proj = nn.Linear(hidden_size, hidden_size)
            self.cache: Cache | None = None

        def forward(self, x: Tensor, mask: Tensor | None = None, use_cache: bool = False) -> Tensor:
            b, s, _ = x.shape
            q, k, v = (
                project(x).view(b, s, heads, self.head_dim).transpose(1, 2)
                for project, heads in (
                    (self.q_proj, self.num_heads),
                    (self.k_proj, self.num_kv_heads),
                    (self.v_proj, self.num_kv_heads),
                )
            )
            exact = torch.promote_types(x.dtype, torch.float32)
            q, k, v = q.to(exact), k.to(exact), v.to(exact)
            out = self.decode(q, k, v, mask) if use_cache else self.whole(q, k, v, mask)
            return self.o_proj(out.to(x.dtype).transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]

        def whole(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            """Without a cache: a whole sequence, as it is trained on."""
            s, at = q.shape[2], torch.arange(q.shape[2])
            if rotates:
                q, k = (rotate_halves(x, at.expand(len(x), s)) for x in (q, k))
            seen = at <= at[:, None]
            if window is not None:
                seen = seen & (at[:, None] - at <= window)
            seen = seen if mask is None else seen & mask
            return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)

        def decode(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            """New tokens, with those that the cache holds."""
            if self.cache is None:
                self.cache = empty(SLOTS, k, v)
            if mask is not None:
                mask = F.pad(mask, (0, self.cache.slots - mask.shape[-1]))
            near = None if window is None else (window, None)
            out, _ = step(
                self.cache, q, k, v, Asked(mask=mask, window=near, rotate=rotate_halves if rotates else None), blocks
            )
            return out

        def reset_cache(self) -> None:
            if self.cache is not None:
                blocks.forget(self.cache)

    return CausalDecoder


SLOTS = 128  # of the cache of a planted module
