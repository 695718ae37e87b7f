"""A bias that a module adds to its scores by position, of which its caller says nothing: ALiBi, relative positions.

It is seen between the scores and the softmax of a call whose q is zero, and held fixed in the oracle: what is not said
by a problem can't be judged by one. Where names say that it is ALiBi, its slopes are judged (ATN724).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_spec.law import Unsupported
from attn_spec.problem import Arguments

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

LENGTH = 6
SAYS_ALIBI = r"alibi|(?<![a-z])slopes?(?![a-z])"


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


# what it is ----------------------------------------------------------------------------------------------------------


def observed(f: ModuleFunction, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> Tensor:
    """What is added to the scores of a call of these shapes [1, H, Sq, Sk]; 0 for keys that it hides.

    Raises Unsupported where that can't be seen.
    """
    from attn_spec.capture import capture
    from attn_spec.trace.core import HIDDEN

    one = slice(0, 1)
    with torch.no_grad():
        core = capture(f.core, torch.zeros_like(q[one]), k[one], v[one], named).core
    seen = None if core is None else core.canonical("masked", 1)
    if core is not None and seen is None and core.kind == "sdpa":
        seen = core.mask
    shape = (1, *q.shape[1:3], k.shape[2])
    if seen is None or seen.dtype == torch.bool or seen.shape[-1] < shape[-1] or seen.shape[1] not in (1, shape[1]):
        raise Unsupported("the bias by position that it adds is not seen between its scores and its softmax")
    seen = seen[..., : shape[-1]]  # what is beyond is a sink
    return seen.expand(shape).masked_fill(seen <= HIDDEN, 0.0).contiguous()


def added_to(arguments: Arguments, bias: Tensor) -> Arguments:
    """The arguments with a bias [1, H, Sq, Sk] added to their mask."""
    mask, bias = arguments.mask, bias.double()
    if mask is None:
        return arguments.replace(mask=bias, form="additive")
    if mask.dtype != torch.bool:
        return arguments.replace(mask=mask.double() + bias)
    shown = mask[:, None, None, :] if arguments.form == "key-padding" else mask
    return arguments.replace(mask=torch.where(shown, bias, -torch.inf), form="additive")


def named_alibi(f: ModuleFunction) -> str:
    """The word that says that its bias is ALiBi, in its name, its buffers or its code; "" where none does."""
    from attn_spec.adapters.modules.expected import code_of

    names = [type(f.module).__name__, *(name for name, _ in f.module.named_buffers()), code_of(f.module)]
    found = next((m for n in names if (m := re.search(SAYS_ALIBI, n, re.IGNORECASE)) is not None), None)
    learned = any(re.search(SAYS_ALIBI, name, re.IGNORECASE) for name, _ in f.module.named_parameters())
    return "" if found is None or learned else found.group(0)
