"""Variants of a module: what its constructor builds it with, sinks that are its parameter, a softcap that stands."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules.constructor_names import CONFIGS, NAMES, VARIANTS
from attn_spec.adapters.signature import TargetError

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

SINKS = r"(attn_|attention_|learnable_|learned_)?(sinks?|sink_logits?|sinks?_bias|s_aux)"
# by which name a variant is asked for of the function of q, k and v that stands for a module
PARAMETERS = {"softcap": "softcap", "window": "window", "alibi": "slopes", "sinks": "sinks"}


def found(f: ModuleFunction) -> dict[str, str]:
    """Role -> the argument, or the parameter of the module, by which a variant is asked for; "" where none can be."""
    named: dict[str, str] = {}
    if f.constructor is not None and f.instance is None:
        named = {role: name for role, name in f.constructor.named.items() if role in VARIANTS}
    named = {role: name for role, name in named.items() if role not in f.forward.roles}
    module = f.module
    if "sinks" in named:
        try:
            module = f.built(replace(f.sizes, sinks=True), torch.float32)
        except TargetError:
            return {role: name for role, name in named.items() if role != "sinks"}
    names = sinks_of(module, f.sizes.heads)
    if "sinks" in named and not names:
        del named["sinks"]
    elif names and "sinks" not in f.forward.roles:
        named.setdefault("sinks", next(iter(names)))
    return named


def sinks_of(module: nn.Module, heads: int) -> dict[str, nn.Parameter]:
    """The parameters of a module that are a logit for each head, by name."""
    return {
        name: p
        for name, p in module.named_parameters()
        if re.fullmatch(SINKS, name.rpartition(".")[2]) and p.numel() == heads
    }


def without_sinks(module: nn.Module, heads: int) -> None:
    """Give a module sinks that take nothing of a row."""
    with torch.no_grad():
        for p in sinks_of(module, heads).values():
            p.fill_(-torch.inf)


@contextlib.contextmanager
def given_sinks(module: nn.Module, sinks: Tensor | None) -> Iterator[None]:
    """A module with these sinks [H] in the place of its own, so that gradients reach them; None: its own."""
    found = {} if sinks is None else sinks_of(module, len(sinks))
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in found}
    for name, p in found.items():
        assert sinks is not None
        del owners[name]._parameters[name.rpartition(".")[2]]
        setattr(owners[name], name.rpartition(".")[2], sinks.to(p.dtype).reshape(p.shape))
    try:
        yield
    finally:
        for name, p in found.items():
            delattr(owners[name], name.rpartition(".")[2])
            owners[name].register_parameter(name.rpartition(".")[2], p)


def taken_from(named: dict[str, Any], variants: Mapping[str, str]) -> tuple[dict[str, Any], Tensor | None]:
    """The fields of `Sizes` that the arguments of a call ask for, which are taken out of them; and the sinks."""
    asked: dict[str, Any] = {}
    sinks = named.pop(PARAMETERS["sinks"], None) if "sinks" in variants else None
    if sinks is not None:
        asked["sinks"] = True
    for role, field_ in (("softcap", "softcap"), ("window", "own_window"), ("alibi", "alibi")):
        value = named.pop(PARAMETERS[role], None) if role in variants else None
        if value is not None:
            asked[field_] = True if role == "alibi" else value
    return asked, sinks


# a softcap that no call can turn off ---------------------------------------------------------------------------------


def keep_what_it_needs(f: ModuleFunction, runs: Callable[[ModuleFunction], bool]) -> None:
    """Keep the default of a softcap without which the module does not run."""
    if f.constructor is None or not f.constructor.keeps("softcap") or runs(f):
        return
    f.constructor.kept.add("softcap")
    f.forget()
    if not runs(f):
        f.constructor.kept.discard("softcap")
        f.forget()


def standing_softcap(f: ModuleFunction) -> tuple[float, str] | None:
    """The softcap of each call and how it is known, where it is none of a call's; None where there is none."""
    kept = f.constructor is not None and "softcap" in f.constructor.kept
    if "softcap" in f.forward.roles or ("softcap" in f.variants and not kept):
        return None
    for name, given in _given(f.declared.get("construct") or {}):
        if name in NAMES["softcap"] and _is_cap(given):
            return float(given), f"construct: {name}"
    module = f.built(f.sizes, torch.float32)
    for owner in module.modules():
        for holder in (owner, *(getattr(owner, name, None) for name in CONFIGS)):
            for name in NAMES["softcap"]:
                value: Any = getattr(holder, name, None)
                if _is_cap(value):
                    return float(value), f"the attribute {name}"
    return _measured_cap(f)


def _given(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _given(value)
        else:
            yield name, value


def _is_cap(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _measured_cap(f: ModuleFunction) -> tuple[float, str] | None:
    """Where the source has a tanh: the one size that all logits have once q is very large."""
    from attn_spec.adapters.modules.expected import code_of
    from attn_spec.capture import capture

    if not f.projections.whole or "tanh" not in code_of(f.module):
        return None
    s, g = f.sizes, torch.Generator().manual_seed(37)
    q = torch.randn(2, s.heads, 4, s.head_dim, generator=g) * 1e6
    k, v = (torch.randn(2, s.kv_heads, 4, d, generator=g) for d in (s.head_dim, s.v_dim))
    with torch.no_grad():
        core = capture(f.core, q, k, v, {}).core
    masked = None if core is None else core.canonical("masked", 2)
    if masked is None:
        return None
    sizes = masked[masked > -9e3].double().abs()
    if not sizes.numel() or not bool((sizes / sizes[0] - 1).abs().max() < 1e-3) or not 0 < float(sizes[0]) < 1e3:
        return None
    return round(float(sizes[0]), 4), "the largest logit that there is"
