"""In what order a module's projections hold the channels of q, k and v, and how heads are told apart in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_spec.adapters.modules.projections import Projections

if TYPE_CHECKING:
    from attn_spec.adapters.modules.inject import Inject

QKV = (
    *("|".join(p) for p in sorted(permutations("qkv"), key=lambda p: p != ("q", "k", "v"))),
    "per-head",
    "channel-last",
)
KV = ("k|v", "v|k", "per-head", "channel-last")
HEADS = ("hd", "dh")


@dataclass(frozen=True)
class Orders:
    """qkv, kv: how a fused projection lays out its parts: one after the other ("q|k|v"), by head ("per-head": the
    query heads of a group, its key, its value), or one channel after the other.  heads: "hd", head after head, or "dh".
    """

    qkv: str = "q|k|v"
    kv: str = "k|v"
    heads: str = "hd"

    def candidates(self, found: Projections) -> Iterator[Orders]:
        """The orders that are known for these projections, the usual one first."""
        roles = {p.role for p in found.found}
        qkv = QKV if "qkv" in roles else (self.qkv,)
        kv = KV if "kv" in roles else (self.kv,)
        for heads, one, other in product(HEADS, qkv, kv):
            yield replace(self, qkv=one, kv=other, heads=heads)

    def flat(self, x: Tensor) -> Tensor:
        """[B, H, S, D] -> [B, S, H * D]."""
        moved = x.transpose(1, 2)
        return (moved.mT if self.heads == "dh" else moved).flatten(2)

    def unflat(self, x: Tensor, heads: int) -> Tensor:
        """[B, S, H * D] -> [B, H, S, D]."""
        if self.heads == "dh":
            return x.reshape(*x.shape[:-1], -1, heads).permute(0, 3, 1, 2)
        return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)

    def fill(self, q: Tensor, k: Tensor, v: Tensor, found: Projections) -> dict[str, Tensor]:
        """What stands for the result of each projection, [B, S, width] by role ("q0" where each head has its own)."""
        parts = {"q": q, "k": k, "v": v}
        fill: dict[str, Tensor] = {}
        for p in found.found:
            if p.role == "o":
                continue
            if p.head is not None:
                one = {name: x[:, p.head : p.head + 1] for name, x in parts.items() if p.head < x.shape[1]}
                if len(one) == 3:
                    fill[f"{p.role}{p.head}"] = self._joined(p.role, one)
            else:
                if len(p.role) > 1:  # a packed matrix may also be used in parts
                    fill |= {f"{p.role}.{name}": self.flat(parts[name]) for name in p.role}
                if len({parts[name].shape[2] for name in p.role}) == 1:
                    fill[p.role] = self._joined(p.role, parts)
        return fill

    def part(self, role: str, fill: dict[str, Tensor], start: int, width: int) -> Tensor | None:
        """What stands for the columns of a packed projection from `start` on; None where they are no whole parts."""
        order = self.qkv if role == "qkv" else self.kv
        place, found = 0, []
        for name in order.split("|") if "|" in order else ():
            one = fill[f"{role}.{name}"]
            if start <= place and place + one.shape[-1] <= start + width:
                found.append(one)
            place += one.shape[-1]
        if sum(x.shape[-1] for x in found) != width or len({x.shape[1] for x in found}) != 1:
            return None
        return torch.cat(found, -1)

    def _joined(self, role: str, parts: dict[str, Tensor]) -> Tensor:
        if len(role) == 1:
            return self.flat(parts[role])
        order = self.qkv if role == "qkv" else self.kv
        if "|" in order:
            return torch.cat([self.flat(parts[name]) for name in order.split("|")], -1)
        rows = [parts[name].transpose(1, 2) for name in role]  # [B, S, H, D]
        groups = parts["k"].shape[1]
        by_group = [
            x.reshape(*x.shape[:2], groups, -1, x.shape[-1]) for x in rows
        ]  # [B, S, Hkv, heads of the group, D]
        if order == "per-head":
            return torch.cat([x.flatten(3) for x in by_group], -1).flatten(2)
        return torch.cat(by_group, 3).transpose(3, 4).flatten(2)

    def heads_of(self, merged: Tensor, meeting: Inject, sizes: tuple[int, int, int, int], layout: str) -> Tensor:
        """What reached the output projection as [B, H, S, Dv]; as it is where it has another size."""
        b, h, s, dv = sizes
        if merged.numel() != b * h * s * dv or merged.dim() < 2:
            return merged
        leading = merged.shape[:-1] if merged.shape[-1] == h * dv else merged.shape[:-2]
        rows = merged.reshape(b * s, h * dv)
        order = meeting.order.get(b * s)
        if tuple(leading) == (b, s) and b != s:
            out = rows.reshape(b, s, h * dv)
        elif tuple(leading) == (s, b) and b != s:
            out = rows.reshape(s, b, h * dv).transpose(0, 1)
        elif order is not None:
            place = torch.empty(b * s, dtype=torch.long)
            place[order[0] * s + order[1]] = torch.arange(b * s)
            out = rows[place].reshape(b, s, h * dv)
        else:
            out = rows.reshape(s, b, h * dv).transpose(0, 1) if layout == "SBD" else rows.reshape(b, s, h * dv)
        return self.unflat(out, h)

    def columns(self, role: str, heads: int, kv_heads: int, head_dim: int, v_dim: int) -> dict[str, Tensor]:
        """Which columns of a projection's result are those of q, k and v, in head after head."""
        count, ids = 0, {}
        for name, h, d in (("q", heads, head_dim), ("k", kv_heads, head_dim), ("v", kv_heads, v_dim)):
            if name in role:
                ids[name] = torch.arange(count, count + h * d)
                count += h * d
        shaped = {
            name: x.reshape(1, heads if name == "q" else kv_heads, 1, head_dim if name != "v" else v_dim)
            for name, x in ids.items()
        }
        joined = self._joined(role, shaped).flatten()
        place = torch.empty(count, dtype=torch.long)
        place[joined] = torch.arange(count)
        return {name: place[x] for name, x in ids.items()}
