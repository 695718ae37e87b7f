"""Attention over packed sequences as small blocks, each of which can be changed: where samples lie, where rows go.

    queries, keys -> shift -> (attention of one sample) -> place, and on the way back: handed_back

q [total_q, H, D], k [total_k, Hkv, D] and v [total_k, Hkv, Dv] hold the samples end to end; the offsets are those of
flash_attn_varlen_func. A causal query i of a sample of n_q queries and n_k keys sees the keys j <= i + n_k - n_q.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Offsets:
    """Where each sample begins, with the end of the last; and the lengths of the longest ones."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    longest_q: int
    longest_k: int


# the blocks ----------------------------------------------------------------------------------------------------------


def queries(at: Offsets, n: int) -> slice:
    """The queries of sample n."""
    return slice(at.q[n], at.q[n + 1])


def keys(at: Offsets, n: int) -> slice:
    """The keys and values of sample n."""
    return slice(at.k[n], at.k[n + 1])


def shift(at: Offsets, n: int) -> int:
    """How many keys stand before those that the queries of sample n begin with."""
    return (at.k[n + 1] - at.k[n]) - (at.q[n + 1] - at.q[n])


def place(rows: slice) -> slice:
    """Where the output of these queries goes."""
    return rows


def handed_back(dk: Tensor, at: Offsets) -> Tensor:
    """The gradient of the keys or values [total_k, Hkv, D]: zero for a sample without queries."""
    return dk


BLOCKS: dict[str, Callable[..., Any]] = {
    "queries": queries,
    "keys": keys,
    "shift": shift,
    "place": place,
    "handed_back": handed_back,
}


# the whole -----------------------------------------------------------------------------------------------------------


class _HandedBack(torch.autograd.Function):
    """The keys or values as they are, and a block on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Offsets, block: Callable[..., Tensor]) -> Tensor:
        ctx.at, ctx.block = at, block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return ctx.block(given[0], ctx.at), None, None


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int | None) -> Tensor:
    """[n_q, H, D], [n_k, Hkv, D], [n_k, Hkv, Dv] -> [n_q, H, Dv]; without keys, and in rows that see none, zero."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    if offset is not None:
        hidden = ~torch.ones_like(hidden).tril(offset)
    empty = hidden.all(-1, keepdim=True)
    weights = logits.masked_fill(hidden & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v)


def packed_attention(changed: Mapping[str, Callable[..., Any]] | None = None) -> Callable[..., Tensor]:
    """A function of packed sequences with flash_attn_varlen_func's signature, of the blocks; some may be changed."""
    blocks = {**BLOCKS, **(changed or {})}

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        at = Offsets(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), max_seqlen_q, max_seqlen_k)
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        dtype, exact = q.dtype, torch.promote_types(q.dtype, torch.float32)
        q = q.to(exact)
        k, v = (_HandedBack.apply(x.to(exact), at, blocks["handed_back"]) for x in (k, v))  # type: ignore[no-untyped-call]
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
        for n in range(len(at.q) - 1):
            rows, cols = blocks["queries"](at, n), blocks["keys"](at, n)
            one = _attention(q[rows], k[cols], v[cols], scale, blocks["shift"](at, n) if causal else None)
            to = torch.arange(len(out))[blocks["place"](rows)]
            out = out.index_copy(0, to, one[: len(to)])
        return out.to(dtype)

    return attention
