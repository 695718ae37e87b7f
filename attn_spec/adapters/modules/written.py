"""A module as source text: its import, the call of its constructor with sizes as numbers, and what forward gets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.implementation import import_source
from attn_spec.adapters.modules.construct import (
    Constructor,
    Sizes,
    _Named,
    substituted,
)
from attn_spec.adapters.modules.core import ModuleFunction

TAKEN = ("module", "impl", "torch", "F", "mock", "q", "k", "v", "x", "mask", "context", "draw", "run", "same", "Tensor")


class NotWritten(Exception):  # noqa: N818
    """What can't be said in a few words of plain Python."""


@dataclass
class Written:
    """imports: lines that bind the names.  names: the same bound here, to run the text.  module: an expression."""

    imports: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    module: str = ""


class _Recorded(_Named):
    """A config that notes which fields it is asked for, and how."""

    def __init__(self, sizes: Sizes, given: Mapping[str, Any], asked: dict[str, str], parameter: str) -> None:
        super().__init__(sizes, given, asked, parameter)
        self.__dict__["_fields"], self.__dict__["_ways"] = dict(given), {"attribute"} if given else set()

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        self.__dict__["_fields"][name] = value
        self.__dict__["_ways"].add("attribute")
        return value

    def __getitem__(self, name: str) -> Any:
        return self._item(name)

    def __contains__(self, name: str) -> bool:
        return self.get(name, self) is not self

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self._item(name)
        except KeyError:
            return default

    def _item(self, name: str) -> Any:
        given = self.__dict__["_attn_spec"][1]
        try:
            value = given[name] if name in given else super().__getattr__(name)
        except AttributeError:
            raise KeyError(name) from None
        self.__dict__["_fields"][name] = value
        self.__dict__["_ways"].add("item")
        return value


class Recording(Constructor):
    """A constructor that keeps what it was last called with."""

    values: dict[str, Any]

    def _call(self, values: dict[str, Any], sizes: Sizes, asked: dict[str, str]) -> nn.Module:
        kept = {
            name: _Recorded(*value.__dict__["_attn_spec"]) if type(value) is _Named else value
            for name, value in values.items()
        }
        object.__setattr__(self, "values", kept)
        return super()._call(kept, sizes, asked)


class Making:
    """A module built for some sizes; once it has run, the text that builds it again."""

    def __init__(self, f: ModuleFunction, sizes: Sizes, import_line: str) -> None:
        self.f, self.sizes, self.import_line = f, sizes, import_line
        self.constructor = None
        if f.constructor is not None:
            self.constructor = Recording(f.constructor.make, f.constructor.name, f.constructor.declared)

    def module(self) -> nn.Module:
        """A module as the text gives it, which also learns which fields of a config are asked for."""
        if self.constructor is None:
            import copy

            assert self.f.instance is not None
            return copy.deepcopy(self.f.instance)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.constructor.build(self.sizes)

    @property
    def seed(self) -> int:
        return self.sizes.heads * 1000 + self.sizes.head_dim

    def written(self) -> Written:
        """The text. Raises NotWritten where an argument of the constructor can't be written."""
        target = self.f.target
        name, imports = imported(target, self.import_line or import_source(target), self.f.__name__)
        if self.constructor is None:
            return Written(imports, {name: self.module()}, name)
        made = Written(imports, {name: target})
        positional = {p.name for p in self.constructor.parameters() if p.kind is p.POSITIONAL_ONLY}
        given = []
        for parameter, value in self.constructor.values.items():
            text = self._value(parameter, value, made)
            configured = isinstance(value, _Recorded) or len(self.constructor.values) == 1 and not _plain(value)
            given.append(text if parameter in positional or configured else f"{parameter}={text}")
        made.module = f"{name}({', '.join(given)})"
        return made

    def _value(self, parameter: str, value: Any, made: Written) -> str:
        if isinstance(value, _Recorded):
            return self._config(value, made)
        if _plain(value):
            return repr(value)
        return self._annotated(parameter, value, made)

    @staticmethod
    def _config(value: _Recorded, made: Written) -> str:
        fields, ways = value.__dict__["_fields"], value.__dict__["_ways"]
        text = ", ".join(f"{name}={item!r}" for name, item in fields.items())
        if ways == {"item"}:
            return f"dict({text})"
        if "item" not in ways:
            import types

            made.imports.insert(0, "from types import SimpleNamespace")
            made.names["SimpleNamespace"] = types.SimpleNamespace
            return f"SimpleNamespace({text})"
        made.imports.append("Config = type('Config', (dict,), {'__getattr__': dict.__getitem__})")
        made.names["Config"] = type("Config", (dict,), {"__getattr__": dict.__getitem__})
        return f"Config({text})"

    def _annotated(self, parameter: str, config: Any, made: Written) -> str:
        """A config of a class of the user's, with the fields that were set."""
        assert self.constructor is not None
        kind = type(config)
        given = substituted(self.constructor._given(parameter), self.sizes.words)
        fields = {name: value for name, value in given.items() if name != "class"}
        fields |= {name: getattr(config, name) for name in self.constructor.fields_of(parameter, kind, self.sizes)}
        if not all(map(_plain, fields.values())):
            raise NotWritten(f"the fields of {kind.__name__}")
        made.imports[:] = beside(kind, self.f.target, made.imports)
        made.names[kind.__name__] = kind
        return f"{kind.__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _plain(value: Any) -> bool:
    """Whether `repr` is Python that gives the value."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    if isinstance(value, Mapping):
        return type(value) is dict and all(_plain(item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


# imports -------------------------------------------------------------------------------------------------------------


def imported(target: Any, line: str, name: str) -> tuple[str, list[str]]:
    """The name that a target gets in a script, and the lines that bind it, from a line that binds it to `impl`."""
    own = str(getattr(target, "__name__", "")).strip() or name
    own = own if own.isidentifier() and own not in TAKEN else "Target"
    if not line:
        what = "nn.Module" if isinstance(target, nn.Module) else "class"
        return own, [f"{own} = ...  # your {what}"]
    *before, last = line.splitlines()
    plain = re.fullmatch(r"from (\S+) import (\w+) as impl", last)
    if plain is not None:
        same = plain[2] not in TAKEN
        name = plain[2] if same else "Target"
        return name, [*before, f"from {plain[1]} import {plain[2]}" + ("" if same else " as Target")]
    return own, [*before, re.sub(r"^impl = ", f"{own} = ", last)]


def beside(kind: type, target: Any, lines: list[str]) -> list[str]:
    """The lines with an import of a class too: from where the target comes from, if it lies there as well."""
    name, last = kind.__name__, lines[-1]
    if kind.__module__ != getattr(target, "__module__", None):
        return [*lines[:-1], f"from {kind.__module__} import {name}", last]
    if re.fullmatch(r"from \S+ import \w+", last):
        return [*lines[:-1], f"{last.rpartition(' ')[0]} {', '.join(sorted((name, last.rpartition(' ')[2])))}"]
    if re.fullmatch(r"\w+ = module\.\w+", last):
        return [*lines[:-1], f"{name} = module.{name}", last]
    return [
        *lines,
        f"{name} = ...  # your config class" if " = ..." in last else f"from {kind.__module__} import {name}",
    ]


# what forward gets ---------------------------------------------------------------------------------------------------


class Noted:
    """Stands for a module in a call, and keeps what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def __call__(self, **given: Any) -> Tensor:
        self.given = given
        return torch.zeros(1)


def text_of(value: Any, names: Mapping[str, Any]) -> str:
    """An argument of forward as an expression over `names` (mask and an input), tried out. Raises NotWritten."""
    if isinstance(value, tuple):
        return f"({', '.join(text_of(item, names) for item in value)})"
    if not isinstance(value, Tensor):
        if _plain(value):
            return repr(value)
        raise NotWritten(f"an argument of type {type(value).__name__}")
    for text in _expressions(value, names):
        try:
            got = eval(text, {"torch": torch, **names})
        except Exception:  # it does not fit these shapes
            continue
        if (
            isinstance(got, Tensor)
            and got.dtype == value.dtype
            and got.shape == value.shape
            and torch.equal(got, value)
        ):
            return text
    if value.numel() <= 64:
        return f"torch.tensor({value.tolist()}, dtype={value.dtype})"
    raise NotWritten(f"a tensor of shape {list(value.shape)}")


def _expressions(value: Tensor, names: Mapping[str, Any]) -> Iterator[str]:
    low, shape = f"torch.finfo({value.dtype}).min", tuple(value.shape)
    if isinstance(names.get("mask"), Tensor):
        masks = ["mask", "~mask"]
        for part in ("mask[b]", "mask[0]", "mask[b][0]", "mask[0][0]") if "b" in names else ():
            masks += [part, f"~{part}"]
        yield from masks
        if value.dim() == 1:
            yield "mask.sum(-1)"
        by_head = [
            f"({m}).expand({_batch(names)}, {names['heads']}, *mask.shape[-2:]).flatten(0, 1)" for m in masks[:2]
        ]
        yield from by_head
        if value.dim() >= 2:
            future = f"torch.ones{shape[-2:]}.triu(1).bool()"
            for m in (*masks[:2], *by_head):
                yield f"{m} | {future}"
                yield f"({m}).masked_fill({future}, -torch.inf)"
            added = ("mask", f"torch.zeros(mask.shape, dtype={value.dtype}).masked_fill(~mask, {low})")
            past = _past(shape[-2:])
            for m in added:
                yield m
                yield f"{m}.expand(*mask.shape[:-2], *{shape[-2:]}).masked_fill(~{past}, {low})"
    if value.numel() and bool((value == value.flatten()[0]).all()):
        one: Any = value.flatten()[0].item()
        made = "zeros" if one == 0 else "ones" if one == 1 else ""
        sizes = f"{_batch(names)}, {', '.join(map(str, shape[1:]))}" if len(shape) == 4 else ", ".join(map(str, shape))
        dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
        yield f"torch.{made}({sizes}{dtype})" if made else f"torch.full(({sizes},), {one!r}{dtype})"
    if value.dim() == 2:
        yield f"torch.arange({shape[1]})[None]"
        yield f"torch.ones{shape}.triu(1).bool()"
    if value.dim() == 4:
        start = f"torch.zeros({_batch(names)}, {', '.join(map(str, shape[1:]))}, dtype={value.dtype})"
        yield f"{start}.masked_fill(~{_past(shape[-2:])}, {low})"


def _past(shape: tuple[int, ...]) -> str:
    return f"torch.ones{tuple(shape)}.tril({shape[1] - shape[0] or ''}).bool()"


def _batch(names: Mapping[str, Any]) -> str:
    return "len(x)" if "x" in names else "len(q)"
