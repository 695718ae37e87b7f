"""A bias that a module adds to its scores by position, of which its caller says nothing: ALiBi, relative positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

LENGTH = 6
WHY = "adds a bias by position of its own, which no declaration says yet"


def is_own(f: ModuleFunction) -> bool:
    """Whether the weights under q = 0 depend on the distance of key and query, and are right in all else.

    All else: they sum to 1, are zero on the keys that causality hides and positive on all others, and are the same
    whatever k is. A mask that leaks or comes after the softmax is none of these.
    """
    from attn_spec.adapters.modules.expected import expectations

    causal = expectations(f)["causal"].value
    flag = "is_causal" if f.causal_by else f.forward.roles.get("causal", "")
    named = {flag: False} if causal == "flag" and flag else {}
    try:
        with torch.no_grad():
            first, second = (_weights(f, seed, dict(named)) for seed in (29, 31))
    except Exception:  # the user's own: the laws report it
        return False
    if first is None or second is None or not bool(((first - second).abs() < 1e-6).all()):
        return False
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    visible = visible.tril() if causal == "always" else visible
    if bool((first[..., ~visible] != 0).any()) or not bool((first[..., visible] > 0).all()):
        return False
    if not bool(((first.sum(-1) - 1).abs() < 1e-5).all()):
        return False
    added = first.log() - first.log().diagonal(dim1=-2, dim2=-1)[..., None]  # each row up to a number of its own
    past = torch.ones_like(visible).tril()
    if not bool((added[..., past].abs() > 1e-4).any()):
        return False
    moved = added[..., 1:, 1:] - added[..., :-1, :-1]
    return bool((moved[..., visible[1:, 1:]].abs() < 1e-3).all())


def _weights(f: ModuleFunction, seed: int, named: dict[str, object]) -> Tensor | None:
    """The weights [2, H, S, S] under q = 0 and random k, read off with a one-hot V; None where shapes are wrong."""
    s, g = f.sizes, torch.Generator().manual_seed(seed)
    q = torch.zeros(2, s.heads, LENGTH, s.head_dim)
    k = torch.randn(2, s.kv_heads, LENGTH, s.head_dim, generator=g)
    return weights_of(f, q, k, named)


def weights_of(f: ModuleFunction, q: Tensor, k: Tensor, named: dict[str, object]) -> Tensor | None:
    """The weights [2, H, S, S] that q and k [2, H, S, D] give, S = LENGTH; None where shapes are wrong."""
    s, columns = f.sizes, []
    for start in range(0, LENGTH, s.v_dim):
        v = torch.zeros(2, s.kv_heads, LENGTH, s.v_dim)
        for n in range(start, min(start + s.v_dim, LENGTH)):
            v[:, :, n, n - start] = 1.0
        out = f.core(q, k, v, dict(named))[0]
        if out.shape != (2, s.heads, LENGTH, s.v_dim):
            return None
        columns.append(out[..., : LENGTH - start])
    return torch.cat(columns, dim=-1).double()
