"""Attention with a cache as a row of small functions, each of which can be changed on its own.

    positions -> turned_by -> slot -> write -> slot -> read -> visible -> near -> heed -> distance -> part -> merge
    forget, between two sequences

With every block right a sequence in parts gives what the whole gives. With one block changed it is a fault: what a
decoding step computes that gets just this wrong.

Shapes: q [B, H, S, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv] of S new tokens; a cache holds k [R, N, Hkv, D] and
v [R, N, Hkv, Dv], R rows (or pages) of N slots; n is the number of slots that a sample can have.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FAR = 1 << 30  # the bound of a window that has none
SPLIT = 8  # slots that are attended to at once, and merged with the others


@dataclass(eq=False)
class Cache:
    """Keys and values, and how many slots of each sample are filled [B].

    rows: the row of each sample [B]; its own number where None.  table: the pages of each sample [B, pages], in order.
    begun: whether a call has been made since it was empty.
    """

    k: Tensor
    v: Tensor
    filled: Tensor
    rows: Tensor | None = None
    table: Tensor | None = None
    begun: bool = False

    @property
    def slots(self) -> int:
        """How many slots a sample can have."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])


def empty(slots: int, k: Tensor, v: Tensor) -> Cache:
    """A cache of zeros for k [B, Hkv, S, D] and v [B, Hkv, S, Dv]."""
    keys, values = (x.new_zeros(len(x), slots, x.shape[1], x.shape[3]) for x in (k, v))
    return Cache(keys, values, torch.zeros(len(k), dtype=torch.long))


# the blocks ----------------------------------------------------------------------------------------------------------


def positions(filled: Tensor, new: int) -> Tensor:
    """Where new tokens stand [B, S]: behind what is filled, of each sample its own."""
    return filled[:, None] + torch.arange(new)


def turned_by(at: Tensor) -> Tensor:
    """The positions by which q and k are rotated [B, S]: their own."""
    return at


def slot(cache: Cache, at: Tensor) -> tuple[Tensor, Tensor]:
    """The row (or page) and the slot in it of positions [B, S]."""
    size = cache.k.shape[1]
    if cache.table is not None:
        return cache.table.gather(1, at // size), at % size
    rows = torch.arange(len(at)) if cache.rows is None else cache.rows
    return rows[:, None].expand_as(at), at


def write(store: Tensor, new: Tensor, row: Tensor, place: Tensor) -> None:
    """New keys or values [B, Hkv, S, D] into their slots, and into no other."""
    store[row, place] = new.transpose(1, 2)


def read(store: Tensor, row: Tensor, place: Tensor) -> Tensor:
    """The keys or values of these slots [B, Hkv, n, D]."""
    return store[row, place].transpose(1, 2)


def heed(mask: Tensor | None, begun: bool) -> Tensor | None:
    """What is heeded of a mask [B, 1, S, n]: all of it, at every call."""
    return mask


def visible(at: Tensor, filled: Tensor, slots: int, causal: bool) -> Tensor:
    """The slots that the tokens at these positions see [B, S, n]: those that are filled, and lie in the past."""
    j = torch.arange(slots)
    seen = j < filled[:, None, None]
    return seen & (j <= at[..., None]) if causal else seen.expand(*at.shape, slots)


def near(at: Tensor, slots: int, left: int | None, right: int | None) -> Tensor:
    """The slots in the window of the tokens at these positions [B, S, n]."""
    gap = at[..., None] - torch.arange(slots)
    return (gap <= (FAR if left is None else left)) & (-gap <= (FAR if right is None else right))


def distance(at: Tensor, slots: int) -> Tensor:
    """How far each slot is from the tokens at these positions [B, S, n]."""
    return (at[..., None] - torch.arange(slots)).abs()


def part(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over some of the slots, s [B, H, S, m] and v [B, H, m, Dv], and its log-sum-exp; 0 if none is seen."""
    lse = torch.logsumexp(s, dim=-1)
    return torch.exp(s - lse.clamp(min=torch.finfo(s.dtype).min)[..., None]) @ v, lse


def merge(outs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Parts [P, B, H, S, Dv] by their log-sum-exps [P, B, H, S]; a part that saw nothing counts nothing."""
    lse = torch.logsumexp(sums, dim=0)
    shares = torch.exp(sums - lse.clamp(min=torch.finfo(sums.dtype).min))
    return (shares[..., None] * outs).sum(0), lse


def forget(cache: Cache) -> None:
    """Empty the cache for another sequence."""
    cache.filled = torch.zeros_like(cache.filled)
    cache.begun = False


# what a step may do besides -------------------------------------------------------------------------------------------


def rotate_halves(x: Tensor, at: Tensor) -> Tensor:
    """RoPE: q or k [B, H, S, D] turned by positions [B, S], the first half of the channels with the second."""
    half = x.shape[-1] // 2
    angles = at[:, None, :, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def rotate_pairs(x: Tensor, at: Tensor) -> Tensor:
    """The same with each channel and the next."""
    halves = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    a, b = rotate_halves(halves, at).chunk(2, dim=-1)
    return torch.stack([a, b], dim=-1).flatten(-2)


# a step --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """The blocks of a step; `Decoding()` is right, `Decoding(slot=...)` has that block changed."""

    positions: Callable[..., Any] = positions
    turned_by: Callable[..., Any] = turned_by
    slot: Callable[..., Any] = slot
    write: Callable[..., Any] = write
    read: Callable[..., Any] = read
    heed: Callable[..., Any] = heed
    visible: Callable[..., Any] = visible
    near: Callable[..., Any] = near
    distance: Callable[..., Any] = distance
    part: Callable[..., Any] = part
    merge: Callable[..., Any] = merge
    forget: Callable[..., Any] = forget


BLOCKS: dict[str, Callable[..., Any]] = {f.name: f.default for f in dataclasses.fields(Decoding)}  # type: ignore[misc]
RIGHT = Decoding()
Rotation = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Asked:
    """What one step is asked for, as `attn_spec.problem.Arguments` has it.

    mask: bool, True = seen, and bias: numbers to add; each broadcastable to [B, H, S, n].  rotate: how q and k are
    turned by positions; None: not at all.
    """

    causal: bool = True
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    slopes: Tensor | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    rotate: Rotation | None = None


def step(
    cache: Cache, q: Tensor, k: Tensor | None, v: Tensor | None, asked: Asked, blocks: Decoding = RIGHT
) -> tuple[Tensor, Tensor]:
    """One call: new tokens are written to the cache, and attend to it. Output [B, H, S, Dv] and log-sum-exp [B, H, S].

    k, v: of the new tokens; None where the cache holds them already, as its last ones.
    """
    new = q.shape[2]
    held = cache.filled if k is not None else cache.filled - new
    at = blocks.positions(held, new)
    if asked.rotate is not None:
        turn = blocks.turned_by(at)
        q, k = asked.rotate(q, turn), None if k is None else asked.rotate(k, turn)
    if k is not None and v is not None:
        row, place = blocks.slot(cache, at)
        blocks.write(cache.k, k, row, place)
        blocks.write(cache.v, v, row, place)
        cache.filled = cache.filled + new
    n = cache.slots
    row, place = blocks.slot(cache, torch.arange(n).expand(len(q), n))
    keys, values = (blocks.read(x, row, place).to(q.dtype) for x in (cache.k, cache.v))
    seen = blocks.visible(at, cache.filled, n, asked.causal)[:, None]
    if asked.window is not None:
        seen = seen & blocks.near(at, n, *asked.window)[:, None]
    mask = blocks.heed(asked.mask, cache.begun)
    if mask is not None:
        seen = seen & mask
    cache.begun = True
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    s = q @ keys.mT * (1 / math.sqrt(q.shape[-1]) if asked.scale is None else asked.scale)
    if asked.softcap is not None:
        s = asked.softcap * torch.tanh(s / asked.softcap)
    if asked.bias is not None:
        s = s + asked.bias
    if asked.slopes is not None:
        s = s - asked.slopes.to(s.dtype)[..., None, None] * blocks.distance(at, n)[:, None]
    s = s.masked_fill(~seen, -torch.inf)
    if not n:
        return q.new_zeros(*q.shape[:3], cache.v.shape[3]), q.new_full(q.shape[:3], -torch.inf)
    parts = [blocks.part(s[..., a : a + SPLIT], values[:, :, a : a + SPLIT]) for a in range(0, n, SPLIT)]
    out, lse = blocks.merge(torch.stack([o for o, _ in parts]), torch.stack([m for _, m in parts]))
    return out, lse
