"""Functions of packed sequences (`cu_seqlens_q`, as flash_attn_varlen_func) as functions of padded ones."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

OFFSETS = (("cu_seqlens_q", "cu_seqlens_k"), ("cu_seqlens",))  # of queries and of keys, or of both at once
PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "cu_seqlens", "max_seqlen")


def dense(function: Callable[..., Any]) -> Callable[..., Any]:
    """f(q [B, Sq, H, D], k, v [B, Sk, Hkv, D], packed_lengths=(queries, keys of each sample)) of a packed function.

    The samples are laid end to end [total, H, D], called with their offsets, and laid out again: 0 beyond their end,
    and -inf in a log-sum-exp that comes as [H, total]. A function that takes `cu_seqlens` for queries and keys alike is
    called where each sample has as many of the one as of the other; NotImplementedError says so elsewhere.
    """
    names = inspect.signature(getattr(function, "signature_of", function)).parameters

    def attention(q: Any, k: Any, v: Any, *args: Any, packed_lengths: Any = None, **others: Any) -> Any:
        n_q, n_k = packed_lengths or ([q.shape[1]] * len(q), [k.shape[1]] * len(k))
        rows, keys = (torch.arange(x.shape[1]) < torch.tensor(n)[:, None] for x, n in ((q, n_q), (k, n_k)))
        cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int().to(q.device) for n in (n_q, n_k))
        if "cu_seqlens" in names and list(n_q) != list(n_k):
            raise NotImplementedError("as many keys as queries: it takes one cu_seqlens for both")
        offsets = {
            "cu_seqlens_q": cu_q,
            "cu_seqlens_k": cu_k,
            "max_seqlen_q": max([0, *n_q]),
            "max_seqlen_k": max([0, *n_k]),
            "cu_seqlens": cu_q,
            "max_seqlen": max([0, *n_q]),
        }
        offsets = {name: value for name, value in offsets.items() if name in names}
        found = function(q[rows], k[keys], v[keys], *args, **offsets, **others)
        tensors = [found] if isinstance(found, torch.Tensor) else list(found)
        out = q.new_zeros(*q.shape[:2], *tensors[0].shape[1:])
        out[rows] = tensors[0]
        if len(tensors) > 1 and tensors[1].shape == (q.shape[2], sum(n_q)):
            lse = tensors[1].new_full((*q.shape[:2], q.shape[2]), -torch.inf)
            lse[rows] = tensors[1].mT
            tensors[1] = lse.mT
        return out if isinstance(found, torch.Tensor) else (out, *tensors[1:])

    return attention


def is_packed(function: Callable[..., Any]) -> bool:
    """Whether a function takes packed sequences: three tensors, and their offsets."""
    try:
        names = inspect.signature(getattr(function, "signature_of", function)).parameters
    except (TypeError, ValueError):
        return False
    offsets = any(all(name in names for name in some) for some in OFFSETS)
    return offsets and not any(name in PACKED for name in list(names)[:3])


def unpacked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A packed function as `dense` makes it, with the signature of the original but for the offsets."""
    own = inspect.signature(getattr(function, "signature_of", function)).parameters
    tensors = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in list(own.values())[:3]]
    others = [p.replace(kind=p.KEYWORD_ONLY) for p in list(own.values())[3:] if p.name not in PACKED]
    others = [p for p in others if p.name != "kwargs"]
    lengths = inspect.Parameter("packed_lengths", inspect.Parameter.KEYWORD_ONLY, default=None)
    made = dense(function)
    made.__signature__ = inspect.Signature([*tensors, *others, lengths])  # type: ignore[attr-defined]
    made.__name__ = getattr(function, "__name__", type(function).__name__)
    made.one_offset = "cu_seqlens" in own  # type: ignore[attr-defined]
    there = getattr(function, "perform", None)
    if there is not None:  # a procedure gets the dense function, where the packed one is
        made.perform = partial(there, f"{__name__}:performed")  # type: ignore[attr-defined]
    for name in ("disturbed", "close"):
        if hasattr(function, name):
            setattr(made, name, getattr(function, name))
    return made


def performed(function: Callable[..., Any], procedure: str, *args: Any, **kwargs: Any) -> Any:
    """Run a procedure, "module:function", on a packed function as `dense` makes it."""
    module, _, name = procedure.partition(":")
    return getattr(importlib.import_module(module), name)(dense(function), *args, **kwargs)


def source_of_dense() -> str:
    """The lines that make `impl` dense, for a reproducer."""
    imports = "import inspect\nfrom collections.abc import Callable\nfrom typing import Any"
    return f"{imports}\n{inspect.getsource(dense)}\nimpl = dense(impl)"
