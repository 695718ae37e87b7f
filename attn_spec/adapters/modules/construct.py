"""From a module's class and the sizes of a problem to a module, by the names of the constructor's arguments."""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from attn_spec.adapters.implementation import described
from attn_spec.adapters.modules.configs import annotated, beside, field_names, imported
from attn_spec.adapters.modules.constructor_names import CONFIGS, NAMES, ROLE_OF, UNASKED, VARIANTS
from attn_spec.adapters.modules.usable import require_usable
from attn_spec.adapters.signature import TargetError


@dataclass(frozen=True)
class Sizes:
    """What a module is built for. hidden: channels of the hidden states; kv_hidden: of those that keys are made from.

    cross: whether keys are made from other states than queries, which then have a width of their own.
    reading: how sizes of which the names say too little are read, an index into `READINGS`.
    own_window: what a window of the module's own is said by; None: none, or as many keys as there are positions.
    softcap: of its own; None: none.  alibi, sinks: whether it is built with them.
    layer: which of several that share a cache.
    """

    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 8
    context: int = 128
    dropout: float = 0.0
    causal: bool | None = None
    cross: bool = False
    reading: int = 0
    own_window: Any = None
    layer: int = 0
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim + READINGS[self.reading][0]

    @property
    def kv_hidden(self) -> int:
        return self.hidden + 3 * self.cross

    @property
    def out(self) -> int:
        return self.head_dim * (self.heads if READINGS[self.reading][1] == "all heads" else 1)

    @property
    def channels(self) -> int:
        return self.head_dim

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def one(self) -> int:
        return 1

    @property
    def window(self) -> Any:
        return self.context if self.own_window is None else self.own_window

    @property
    def words(self) -> dict[str, Any]:
        """What `$hidden` and its like stand for in attn.yaml."""
        names = ("hidden", "heads", "kv_heads", "head_dim", "v_dim", "context", "kv_hidden", *VARIANTS)
        return {name: getattr(self, name) for name in names}

    def asks_for(self, role: str) -> bool:
        """Whether a variant is asked for."""
        return self.own_window is not None if role == "window" else bool(getattr(self, role))

    def of(self, role: str) -> Any:
        """The value of a constructor's argument of a role."""
        return self.head_dim if role == "qk_out" else True if role == "bias" else getattr(self, role)


# (channels of the hidden states beyond heads * head_dim, what an output size without more in its name counts)
READINGS = ((5, "all heads"), (0, "all heads"), (5, "one head"), (0, "one head"))


class _Named:
    """A config of which each field is answered by its name: attributes, items and `get`."""

    def __init__(self, sizes: Sizes, given: Mapping[str, Any], asked: dict[str, str], parameter: str) -> None:
        self.__dict__.update(given)
        self.__dict__["_attn_spec"] = (sizes, given, asked, parameter)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sizes, _, asked, parameter = self.__dict__["_attn_spec"]
        role = ROLE_OF.get(name, "")
        if not role or (role == "causal" and sizes.causal is None):
            asked[name] = parameter
            raise AttributeError(f"config has no {name}")
        asked.setdefault(f"+{role}", name)
        return sizes.of(role)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True, eq=False)
class Constructor:
    """How modules of a class (or from a factory) are built.

    make: the class or factory.  declared: the values of `construct:` in attn.yaml.  roles: which roles its arguments,
    or the fields of its config, have; what is not among them is the same for all sizes.
    """

    make: Callable[..., Any]
    name: str
    declared: Mapping[str, Any]
    kept: set[str] = field(default_factory=set)  # variants whose default is kept: the module does not run without

    def parameters(self) -> list[inspect.Parameter]:
        try:
            every = list(inspect.signature(self.make).parameters.values())
        except (TypeError, ValueError):
            raise TargetError(f"{self.name}: its constructor's signature can't be read; name a factory") from None
        return [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    def roles(self) -> set[str]:
        """The roles that can be asked for through the constructor."""
        return set(self.named)

    @cached_property
    def named(self) -> dict[str, str]:
        """Role -> the argument, or the field of a config, that it is asked for by."""
        found: dict[str, str] = {}
        for p in self.parameters():
            if p.name in self.declared and not _is_built(self.declared[p.name]):
                found |= {word: p.name for word in Sizes().words if f"${word}" == self.declared[p.name]}
                continue
            if p.name in CONFIGS or _is_built(self.declared.get(p.name)):
                given = self._given(p.name).items()
                found |= {word: name for word in Sizes().words for name, value in given if f"${word}" == value}
            if p.name in CONFIGS:
                found |= {role: name for role, name in self._config_roles(p).items() if role not in found}
            elif p.name in ROLE_OF and self._can_be_asked(p.name, p.default):
                found[ROLE_OF[p.name]] = p.name
        return found

    def may_be_without(self, role: str) -> bool:
        """Whether a variant is off unless it is asked for."""
        name = self.named.get(role, "")
        for p in self.parameters():
            kind = self._config_class(p) if p.name in CONFIGS else None
            if p.name == name or (kind is not None and name in field_names(kind)):
                default = p.default if p.name == name else _default(kind, name)  # type: ignore[arg-type]
                return default is None or default is False or default == 0
        return False

    def keeps(self, role: str) -> bool:
        """Whether a default that is kept would change what is built."""
        return role in self.named and role not in self.kept

    def _can_be_asked(self, name: str, default: Any) -> bool:
        """Whether an argument can be given by its role: of variants, those that have a value for none."""
        role = ROLE_OF[name]
        if role == "window":
            return not self._of_planes
        if role in ("alibi", "sinks"):
            return default is False
        return True

    def _is_asked(self, name: str, default: Any, sizes: Sizes) -> bool:
        """Whether an argument is given by its role: a variant where it is asked for, or would be there unasked."""
        role = ROLE_OF[name]
        if role not in VARIANTS:
            return True
        if not self._can_be_asked(name, default):
            return False
        unasked = isinstance(default, (int, float)) and not isinstance(default, bool) and default > 0
        return sizes.asks_for(role) or default is inspect.Parameter.empty or (unasked and role not in self.kept)

    @cached_property
    def _of_planes(self) -> bool:
        """Whether its window is one of a plane, with a table of relative positions."""
        from attn_spec.adapters.modules.expected import class_source

        try:
            source = class_source(self.make) if isinstance(self.make, type) else inspect.getsource(self.make)
            return "relative_position" in source
        except (OSError, TypeError):
            return False

    def _config_roles(self, p: inspect.Parameter) -> dict[str, str]:
        kind, given = self._config_class(p), self._given(p.name)
        if kind is not None:
            known = [
                name for name in field_names(kind) if ROLE_OF.get(name, "bias") not in ("bias", *_left_to_model(kind))
            ]
            free = [name for name in known if ROLE_OF[name] not in VARIANTS or name not in given]
            return {ROLE_OF[n]: n for n in reversed(free) if self._can_be_asked(n, _default(kind, n))}
        asked: dict[str, str] = {}  # what the constructor asks a config for
        sizes = Sizes(causal=False)
        with contextlib.suppress(TargetError):
            self._call({p.name: _Named(sizes, self._given(p.name), asked, p.name)}, sizes, asked)
        return {key[1:]: name for key, name in asked.items() if key.startswith("+")}

    def _given(self, parameter: str) -> dict[str, Any]:
        given = self.declared.get(parameter)
        return dict(given) if isinstance(given, Mapping) else {}

    def _config_class(self, p: inspect.Parameter) -> type | None:
        given = self._given(p.name).get("class")
        if given:
            return imported(str(given), f"{self.name}: construct: {p.name}: class")
        owner = self.make.__init__ if inspect.isclass(self.make) else self.make
        known = getattr(owner, "__globals__", {})
        named = [kind for kind in annotated(p.annotation, known) if field_names(kind)]
        if not named and p.annotation is p.empty and inspect.isclass(self.make):
            named = [kind for kind in beside(self.make.__name__, known) if field_names(kind)]
        whole = [kind for kind in named if any(ROLE_OF.get(field) == "heads" for field in field_names(kind))]
        return next(iter([*whole, *named]), None)  # one of parts, each with a config of its own, has no heads

    def build(self, sizes: Sizes) -> nn.Module:
        """A module for the sizes. Raises TargetError where the constructor needs what names can't give, or raises."""
        asked: dict[str, str] = {}
        values: dict[str, Any] = {}
        for p in self.parameters():
            required = p.default is p.empty
            if p.name in self.declared and not _is_built(self.declared[p.name]):
                values[p.name] = substituted(self.declared[p.name], sizes.words)
            elif p.name in CONFIGS and (required or _is_built(self.declared.get(p.name)) or self._config_class(p)):
                values[p.name] = self._config(p, sizes, asked)
            elif p.name in ROLE_OF and self._is_asked(p.name, p.default, sizes):
                role = ROLE_OF[p.name]
                if role == "bias" and not required:
                    continue
                if role == "kv_hidden" and not sizes.cross and not required:
                    continue
                if role == "causal" and sizes.causal is None:
                    if required:
                        values[p.name] = False
                    continue
                values[p.name] = sizes.of(role)
            elif required:
                known = {q.name for q in self.parameters()}
                raise TargetError(
                    f"{self.name}: its constructor requires {p.name!r}, whose meaning can't be told from the name (the "
                    f"arguments are {', '.join(sorted(known))}); give it in attn.yaml: `construct: {{{p.name}: ...}}`"
                )
        unknown = set(self.declared) - {p.name for p in self.parameters()}
        if unknown and not self._takes_any():
            word = sorted(unknown)[0]
            names = [p.name for p in self.parameters()]
            near = difflib.get_close_matches(word, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(names)}"
            raise TargetError(f"{self.name}: construct: {word!r} is no argument of its constructor; {hint}")
        values.update({name: substituted(self.declared[name], sizes.words) for name in unknown})
        return self._call(values, sizes, asked)

    def _takes_any(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.make).parameters.values())

    def _call(self, values: dict[str, Any], sizes: Sizes, asked: dict[str, str]) -> nn.Module:
        full = dict(values)
        if len(values) < len(self.parameters()):  # a trial of the config alone
            for p in self.parameters():
                if p.name not in full and p.default is p.empty and p.name in ROLE_OF:
                    full[p.name] = sizes.of(ROLE_OF[p.name])
        args = [full.pop(p.name) for p in self.parameters() if p.kind is p.POSITIONAL_ONLY]
        try:
            module = self.make(*args, **full)
        except Exception as error:
            missing = next((key for key in asked if not key.startswith("+")), None)
            if missing is not None and missing in str(error):
                raise TargetError(
                    f"{self.name}: its constructor asks {asked[missing]} for {missing!r}, whose meaning can't be told "
                    f"from the name; give it in attn.yaml: `construct: {{{asked[missing]}: {{{missing}: ...}}}}`"
                ) from error
            shown = ", ".join(f"{key}={_shown(value)}" for key, value in full.items() if not isinstance(value, _Named))
            raise TargetError(
                f"{self.name}: its constructor raises {described(error)} (called "
                f"with {shown or 'no argument'}); `construct:` in attn.yaml sets its arguments"
            ) from error
        if not isinstance(module, nn.Module):
            raise TargetError(f"{self.name}: gave a {type(module).__name__}, not an nn.Module")
        require_usable(module, self.name)
        return module

    def fields_of(self, parameter: str, kind: type, sizes: Sizes) -> dict[str, Any]:
        """The fields of a config class that are given by their roles."""
        given, values = self._given(parameter), {}
        for name in field_names(kind):
            role = ROLE_OF.get(name, "")
            if not role or name in given or (role == "causal" and sizes.causal is None):
                continue
            wanted = role in VARIANTS and role not in _left_to_model(kind) and sizes.asks_for(role)
            if role in UNASKED and not wanted:
                continue
            if role not in VARIANTS or self._is_asked(name, _default(kind, name), sizes):
                values[name] = sizes.of(role)
        return values

    def _config(self, p: inspect.Parameter, sizes: Sizes, asked: dict[str, str]) -> Any:
        kind, given = self._config_class(p), substituted(self._given(p.name), sizes.words)
        given.pop("class", None)
        if kind is None:
            return _Named(sizes, given, asked, p.name)
        values = {**given, **self.fields_of(p.name, kind, sizes)}
        try:
            return kind(**values)
        except Exception as error:
            raise TargetError(
                f"{self.name}: {kind.__name__} raises {type(error).__name__}: {' '.join(str(error).split())}; "
                f"`construct: {{{p.name}: {{...}}}}` in attn.yaml sets its fields"
            ) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"{type(value).__name__}(...)"


def _is_built(value: Any) -> bool:
    """Whether a declared value is a config to build rather than a plain value."""
    return isinstance(value, Mapping)


def _default(kind: type, name: str) -> Any:
    """What a field of a config class is where nothing is given; None where that can't be read."""
    try:
        parameter = inspect.signature(kind).parameters.get(name)
    except (TypeError, ValueError):
        parameter = None
    return getattr(kind, name, None) if parameter is None else parameter.default


def _left_to_model(kind: type) -> tuple[str, ...]:
    """Roles of which a module heeds nothing: a model of transformers brings windows and slopes into the mask."""
    return ("window", "alibi") if any(owner.__module__.startswith("transformers.") for owner in kind.__mro__) else ()


def substituted(value: Any, words: Mapping[str, Any]) -> Any:
    """A declared value in which `$hidden` and its like are the sizes in use."""
    if isinstance(value, str) and value.startswith("$") and value[1:] in words:
        return words[value[1:]]
    if isinstance(value, Mapping):
        return {key: substituted(item, words) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [substituted(item, words) for item in value]
    return value


def is_factory(target: Any) -> bool:
    """Whether a function reads as one that makes a module: by its annotation, or by arguments that are sizes."""
    if inspect.isclass(target) or not callable(target):
        return False
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return False
    kind = signature.return_annotation
    if inspect.isclass(kind) and issubclass(kind, nn.Module):
        return True
    if isinstance(kind, str) and "Module" in kind:
        return True
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    roles = [ROLE_OF.get(name, "") for name in required if len(name) > 1]
    if not required and getattr(target, "__name__", "").startswith(("make", "build", "create", "new", "get")):
        return True
    return bool(set(roles) & {"hidden", "heads"})


def sizes_of(module: nn.Module, names: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    """The sizes that an instance's attributes state: (role, value, attribute), the outermost module first."""
    for role in ("heads", "kv_heads", "head_dim", "hidden", "v_dim"):
        if role in names:
            yield role, names[role], "attn.yaml"
            continue
        for owner in (*module.modules(),):
            holders = (owner, *(getattr(owner, c, None) for c in CONFIGS))
            found = next(
                (
                    (value, name)
                    for holder in holders
                    if holder is not None
                    for name in NAMES[role]
                    if isinstance(value := getattr(holder, name, None), int) and not isinstance(value, bool)
                ),
                None,
            )
            if found is not None:
                yield role, *found
                break
