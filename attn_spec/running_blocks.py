"""Attention as a function that runs in every way there is, as a row of small functions, each of which can be changed.

    heed -> cast -> remember -> read -> choose_scale, score -> visible -> add, fill -> normalise -> keep
         -> splits, order, gather -> deliver

What it computes is plain; the blocks are where the way it is run makes a difference: traced by a compiler, under
autocast, on tensors without data, mapped over, in several threads, bit for bit. q [B, H, Sq, D], k [B, H, Sk, D],
v [B, H, Sk, Dv], scores [B, H, Sq, Sk]. `kept` is what outlives a call: the attributes of a module.

Products are written as sums over elements, and keys are summed in splits of one size: so what a sample or a query gives
does not depend on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SPLIT = 4  # keys whose products are summed before they are added to the output


def heed(mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    """What of the request is heeded: all of it, however the call is run."""
    return mask, causal


def cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the dtype of autocast: an operator that is on no list of torch's casts by itself."""
    if q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def read(k: Tensor) -> Tensor:
    """The keys, by their strides."""
    return k


def choose_scale(scale: float | None, head_dim: int, kept: dict[str, Any]) -> float:
    """The scale of this call."""
    return head_dim**-0.5 if scale is None else scale


def remember(mask: Tensor | None, kept: dict[str, Any]) -> Callable[[], Tensor | None]:
    """The mask of this call, for when the scores are there."""
    return lambda: mask


def score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled products of queries and keys."""
    return (q[..., :, None, :] * k[..., None, :, :]).sum(-1) * scale


def visible(q_len: int, kv_len: int, causal: bool, device: torch.device, kept: dict[str, Any]) -> Tensor | None:
    """Which key each query may see [Sq, Sk], by its position; None: every one."""
    return torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril() if causal else None


def add(s: Tensor, bias: Tensor) -> Tensor:
    """Scores with an additive mask, whatever dtype it has."""
    return s + bias


def fill(s: Tensor, shown: Tensor) -> Tensor:
    """The scores of hidden keys out of the softmax, in any dtype."""
    return s.masked_fill(~shown, -torch.inf)


def normalise(s: Tensor) -> Tensor:
    """Weights that sum to 1 over the keys; 0 in a row with no visible key."""
    return torch.softmax(s.float(), dim=-1).masked_fill(s == -torch.inf, 0.0)


def keep(p: Tensor, kept: dict[str, Any]) -> Tensor:
    """The weights, for the product with the values."""
    return p


def splits(batch: int, kv_len: int) -> int:
    """How many keys are summed at once: the same for every batch."""
    return SPLIT


def order(number: int) -> Sequence[int]:
    """The order in which splits are added to the output."""
    return range(number)


def gather(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what the splits give, each in turn."""
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


def deliver(out: Tensor, q: Tensor) -> Tensor:
    """The output [B, H, Sq, Dv]."""
    return out


BLOCKS: dict[str, Callable[..., Any]] = {
    **{"heed": heed, "cast": cast, "read": read, "choose_scale": choose_scale, "remember": remember, "score": score},
    **{"visible": visible, "add": add, "fill": fill, "normalise": normalise, "keep": keep, "splits": splits},
    **{"order": order, "gather": gather, "deliver": deliver},
}


@dataclass(frozen=True, eq=False)
class Running:
    """The blocks as a function; `changed` stand in the place of the right ones."""

    changed: dict[str, Callable[..., Any]] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> [B, H, Sq, Dv]; attn_mask bool or additive."""
        b = {**BLOCKS, **self.changed}
        dtype, group = q.dtype, q.shape[1] // k.shape[1]
        mask, causal = b["heed"](attn_mask, is_causal)
        q, k, v = b["cast"](q, k, v)
        with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
            recalled = b["remember"](mask, self.kept)
            k = b["read"](k)
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
            s = b["score"](q, k, b["choose_scale"](scale, q.shape[-1], self.kept))
            shown = b["visible"](q.shape[2], k.shape[2], causal, q.device, self.kept)
            mask = recalled()
            if mask is not None and mask.dtype == torch.bool:
                shown = mask if shown is None else shown & mask
            elif mask is not None:
                s = b["add"](s, mask)
            if shown is not None:
                s = b["fill"](s, shown)
            p = b["keep"](b["normalise"](s).to(v.dtype), self.kept)
            size = b["splits"](q.shape[0], k.shape[2])
            cuts = list(zip(torch.split(p, size, dim=-1), torch.split(v, size, dim=-2), strict=True))
            parts = [(cuts[n][0][..., None] * cuts[n][1][..., None, :, :]).sum(-2) for n in b["order"](len(cuts))]
            return b["deliver"](b["gather"](parts), q).to(dtype)  # type: ignore[no-any-return]
