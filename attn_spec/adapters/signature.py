"""Which parameter of a callable stands for what, read from its names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from attn_spec.conventions import ROLE_OF, ROLES

SDPA_PARAMETERS = ("query", "key", "value", "attn_mask=", "dropout_p=", "is_causal=", "scale=", "enable_gqa=")


class TargetError(ValueError):
    """A target that can't be judged: it does not exist, is not callable, or takes no q, k, v."""


@dataclass(frozen=True)
class Parameter:
    name: str
    required: bool
    positional: bool
    keyword: bool
    default: Any = None


@dataclass(frozen=True)
class Signature:
    """The parameters of a callable, each with the role its name gives it.

    source: where the signature was read.  not_understood: optional parameters whose name says nothing.
    near_misses: (given, known) where a name is nearly one that is known, as `is_casual` is.
    """

    parameters: tuple[Parameter, ...]
    roles: dict[str, str]  # role -> parameter name
    source: str
    not_understood: tuple[str, ...] = ()
    near_misses: tuple[tuple[str, str], ...] = ()
    positional_only: bool = False

    def has(self, role: str) -> bool:
        return role in self.roles

    def default(self, role: str) -> Any:
        """The default of the parameter of a role; None where it has none or it can't be read."""
        return next((p.default for p in self.parameters if p.name == self.roles.get(role)), None)

    def required(self, role: str) -> bool:
        return role in self._required

    @cached_property
    def _required(self) -> frozenset[str]:
        """The roles of the parameters without a default: asked for several times in each call."""
        names = {p.name for p in self.parameters if p.required}
        return frozenset(role for role, name in self.roles.items() if name in names)

    def call(self, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments for values by parameter name."""
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        last = max((n for n, p in enumerate(self.parameters) if p.name in values), default=-1)
        in_row = True
        for place, p in enumerate(self.parameters):
            in_row = in_row and p.positional and (p.name in values or (self.positional_only and place < last))
            if in_row and (self.positional_only or not p.keyword or p.name in self._tensors):
                args.append(values.get(p.name))
            elif p.name in values:
                kwargs[p.name] = values[p.name]
        kwargs.update({name: value for name, value in values.items() if name not in self._names})
        return args, kwargs

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters)

    @cached_property
    def _tensors(self) -> frozenset[str]:
        return frozenset(self.roles[role] for role in ("q", "k", "v"))

    def __str__(self) -> str:
        return f"({', '.join(p.name if p.required else p.name + '=' for p in self.parameters)})"


@dataclass
class _Raw:
    parameters: list[Parameter] = field(default_factory=list)
    source: str = ""
    positional_only: bool = False


def read(target: Callable[..., Any], name: str, renamed: dict[str, str] | None = None) -> Signature:
    """The signature of a callable. `renamed` maps roles to parameter names where names can't tell (attn.yaml).

    Raises TargetError where the callable takes no q, k and v, or requires what is not understood.
    """
    raw = _raw(target, name)
    renamed = renamed or {}
    by_name = {parameter: role for role, parameter in renamed.items()}
    names = [p.name for p in raw.parameters]
    for role, parameter in renamed.items():
        if parameter not in names:
            near = _nearest(parameter, names)
            raise TargetError(f"{name}: parameters: {role}: no parameter {parameter!r} in ({', '.join(names)}){near}")
    roles: dict[str, str] = {}
    for p in raw.parameters:
        role = by_name.get(p.name) or ROLE_OF.get(p.name, "")
        if role and role not in roles:
            roles[role] = p.name
    _find_tensors(raw, roles, name)
    taken = set(roles.values())
    unknown = [p for p in raw.parameters if p.name not in taken and ROLE_OF.get(p.name) is None]
    missing = [p.name for p in unknown if p.required]
    if missing:
        raise TargetError(
            f"{name}: requires {', '.join(missing)}, whose meaning can't be told from the name; give the value under "
            f"`fixed:` in attn.yaml, or say what it is under `parameters:`"
        )
    near_misses = []
    for p in unknown:
        close = difflib.get_close_matches(p.name, [n for n in ROLE_OF if len(n) > 3], n=1, cutoff=0.82)
        if close:
            near_misses.append((p.name, close[0]))
    return Signature(
        tuple(raw.parameters),
        roles,
        raw.source,
        tuple(p.name for p in unknown),
        tuple(near_misses),
        raw.positional_only,
    )


def _find_tensors(raw: _Raw, roles: dict[str, str], name: str) -> None:
    """q, k and v by their names; where none of them is known, the first three positional parameters."""
    known = [role for role in ("q", "k", "v") if role in roles]
    if len(known) == 3:
        return
    free = [p.name for p in raw.parameters if p.positional and p.name not in roles.values() and p.required]
    if not known and len(free) >= 3:
        roles.update(zip(("q", "k", "v"), free, strict=False))
        return
    listed = ", ".join(p.name for p in raw.parameters) or "nothing"
    raise TargetError(
        f"{name}: takes no q, k, v: its parameters are ({listed}); an attention function takes three tensors named "
        f"{'/'.join(ROLES['q'][:2])}, {'/'.join(ROLES['k'][:2])}, {'/'.join(ROLES['v'][:2])} or as its first three"
    )


def _raw(target: Callable[..., Any], name: str) -> _Raw:
    target = getattr(target, "signature_of", target)  # a function that stands in for another
    if target is F.scaled_dot_product_attention:
        return _Raw([_from_text(p) for p in SDPA_PARAMETERS], "torch's documentation")
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        parameters = list(inspect.signature(owner.forward).parameters.values())
        own = parameters if "setup_context" in vars(owner) else parameters[1:]
        return _Raw(_from_inspect(own), f"{owner.__name__}.forward", positional_only=True)
    schema = getattr(target, "_schema", None) or _packet_schema(target)
    if schema is not None:
        items = [Parameter(a.name, not a.has_default_value(), not a.kwarg_only, keyword=True) for a in schema.arguments]
        return _Raw(items, "the operator's schema")
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        raise TargetError(
            f"{name}: its signature can't be read; wrap it in a Python function `def f(q, k, v, ...)` that calls it"
        ) from None
    items = _from_inspect(signature.parameters.values())
    if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()) and not items:
        items = [Parameter(n, True, True, keyword=False) for n in ("q", "k", "v")]
    return _Raw(items, "its signature")


def _packet_schema(target: Any) -> Any:
    overloads = getattr(target, "overloads", None)
    if not isinstance(target, torch._ops.OpOverloadPacket) or overloads is None:
        return None
    names = overloads()
    return getattr(target, "default" if "default" in names else names[0])._schema


def _from_text(text: str) -> Parameter:
    return Parameter(text.rstrip("="), not text.endswith("="), positional=True, keyword=True)


def _from_inspect(parameters: Iterable[inspect.Parameter]) -> list[Parameter]:
    out = []
    for p in parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            continue
        positional = p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        default = None if p.default is p.empty else p.default
        out.append(Parameter(p.name, p.default is p.empty, positional, p.kind is not p.POSITIONAL_ONLY, default))
    return out


def _nearest(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
