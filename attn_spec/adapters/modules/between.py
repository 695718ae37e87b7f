"""What a module does to q and k between its projections and their product: a rotation by position, a norm, or nothing.

Where it does, attention is judged on q and k as they arrive. Only what keeps each token and each head to itself is
taken for such a thing: heads that are mixed on the way, and a scale that is folded into q, are for the laws to judge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction


def arrived(f: ModuleFunction, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
    """q [B, H, S, D], k [B, Hkv, S, D] where they are multiplied, a scale that they hold taken off; None: not seen."""
    from attn_spec.capture import capture

    with torch.no_grad():
        core = capture(f.core, q, k, v, {}).core
    if core is None:
        return None
    seen_q, seen_k = core.canonical("q", len(q)), core.canonical("k", len(q))
    if seen_q is None or seen_k is None or seen_q.shape != q.shape or seen_k.shape[2:] != k.shape[2:]:
        return None
    if seen_k.shape[1] != k.shape[1]:  # heads are shared out already
        group = seen_k.shape[1] // k.shape[1]
        seen_k = seen_k[:, : k.shape[1]] if _tiled(f, seen_k, k.shape[1]) else seen_k[:, ::group]
    return _without_scale(seen_q, q), _without_scale(seen_k, k)


def _tiled(f: ModuleFunction, seen: Tensor, kv_heads: int) -> bool:
    """Whether kv heads are shared out one after the other again and again; where all look alike, what is declared."""
    b, heads = seen.shape[:2]
    turns = [
        seen.reshape(b, heads // kv_heads, kv_heads, *seen.shape[2:]),
        seen.reshape(b, kv_heads, heads // kv_heads, *seen.shape[2:]).transpose(1, 2),
    ]
    tiled, grouped = (bool((x == x[:, :1]).all()) for x in turns)
    return tiled if tiled != grouped else f.grouping == "tiled"


def _without_scale(seen: Tensor, given: Tensor) -> Tensor:
    """What was seen, without the number that multiplies all of it where lengths are kept but for that number."""
    ratio = seen.double().norm(dim=-1) / given.double().norm(dim=-1).clamp(min=1e-30)
    c = float(ratio.median()) if ratio.numel() else 1.0
    if c and bool(((ratio / c - 1).abs() < 1e-2).all()):
        return seen / c if abs(c - 1) > 1e-2 else seen
    return seen


def kind(f: ModuleFunction) -> str:
    """ "rotation", "norm", "norm over heads", or "" where none of them lies between projections and product."""
    at_once = False
    s, g = f.sizes, torch.Generator().manual_seed(23)
    length = 5
    q = torch.randn(2, s.heads, length, s.head_dim, generator=g) * (1 + torch.rand(2, 1, length, 1, generator=g))
    k = torch.randn(2, s.kv_heads, length, s.head_dim, generator=g) * (1 + torch.rand(2, 1, length, 1, generator=g))
    v = torch.randn(2, s.kv_heads, length, s.v_dim, generator=g)
    try:
        found = arrived(f, q, k, v)
        if found is None or (_alike(found[0], q) and _alike(found[1], k)):
            return ""
        changed_q, changed_k = q.clone(), k.clone()
        changed_q[0, 0, 1], changed_k[0, 0, 1] = 2 * q[0, 1 % s.heads, 3] + 1, k[0, 0, 2] - 1
        again = arrived(f, changed_q, changed_k, v)
    except Exception:  # the user's own: the laws report it
        return ""
    if again is None:
        return ""
    for before, after in zip(found, again, strict=True):
        moved = ((after - before).abs() > 1e-6 * before.abs().mean()).any(-1)
        expected = torch.zeros_like(moved)
        expected[0, 0, 1] = True
        if not bool((moved == expected).all()):
            if not _normed_at_once(before, after, moved):
                return ""  # a token or a head is not kept to itself
            at_once = True
    lengths = [x.norm(dim=-1) / y.norm(dim=-1) for x, y in zip(found, (q, k), strict=True)]
    kept = all(bool((ratio - 1).abs().max() < 1e-2) for ratio in lengths)
    return "norm over heads" if at_once else "rotation" if kept else "norm"


def _normed_at_once(before: Tensor, after: Tensor, moved: Tensor) -> bool:
    """Whether all heads of the changed token, and no others, moved as under one norm: by one factor and one shift."""
    expected = torch.zeros_like(moved)
    expected[0, :, 1] = True
    if moved.shape[1] < 2 or not bool((moved == expected).all()):
        return False
    x, y = (z[0, 1:, 1].flatten().double() for z in (before, after))
    sides = torch.stack((x, torch.ones_like(x)), dim=1)
    fitted = sides @ torch.linalg.lstsq(sides, y[:, None]).solution
    return bool(((fitted[:, 0] - y).abs() < 1e-4 * y.abs().mean()).all())


def _alike(seen: Tensor, given: Tensor) -> bool:
    room = 2e-2 * given.abs().clamp(min=float(given.abs().mean()))  # rounding to a half type is no rotation
    return bool(((seen - given).abs() < room).all())
