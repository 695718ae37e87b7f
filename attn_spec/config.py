"""attn.yaml: what names and measurement can't tell about an implementation, and how strictly it is judged.

    implementations:
      mine:
        target: mypkg.attention.fast_attention
        layout: BSHD                    # conventions: see attn_spec/conventions.py for the choices
        alignment: bottom-right
        parameters: {scale: temperature}  # what a parameter of another name stands for
        fixed: {deterministic: true}    # passed at each call
        precision: {scores: float32}
        require: [gqa, bfloat16]        # a refusal of these is red
        strict: true                    # so is bad input taken without complaint
        known_failures:
          - {check: ATN510, problem: "*bf16", reason: kernel gives NaN, link: "https://..."}

A file for a single implementation may leave out `implementations:` and the name, and write its keys at the top.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from attn_spec.conventions import CHOICES
from attn_spec.engine import KnownFailure, Policy
from attn_spec.reference import BUILTINS

DTYPE = Literal["float64", "float32", "bfloat16", "float16"]
LEDGER = Path(__file__).parent / "reference" / "ledger.yaml"


class ConfigError(ValueError):
    """A configuration file that can't be used: the file, the line, the key, what is wrong and what to write."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class PrecisionConfig(_Section):
    """The dtypes that scores, weights and sums are rounded to, for inputs of half precision."""

    scores: DTYPE | None = None
    weights: DTYPE | None = None
    accumulate: DTYPE | None = None


class KnownFailureConfig(_Section):
    """A check that is known to fail; the reason is mandatory."""

    check: str
    reason: str
    problem: str = "*"
    link: str = ""

    @field_validator("reason")
    @classmethod
    def _given(cls, reason: str) -> str:
        if not reason.strip():
            raise ValueError("is empty; say in a few words why the check fails")
        return reason


class ImplementationConfig(_Section):
    """What is declared for one implementation."""

    target: str | None = None
    layout: str | None = None
    layout_out: str | None = None
    mask_form: str | None = None
    polarity: str | None = None
    padding_polarity: str | None = None
    alignment: str | None = None
    causal: str | None = None
    empty_rows: str | None = None
    grouping: str | None = None
    window: str | None = None
    window_alignment: str | None = None
    softcap_order: str | None = None
    alibi: str | None = None
    lse_base: str | None = None
    lse_empty: str | None = None
    lse_sinks: str | None = None
    parameters: dict[str, str] = Field(default_factory=dict)
    fixed: dict[str, Any] = Field(default_factory=dict)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    require: list[str] = Field(default_factory=list)
    strict: bool = False
    known_failures: list[KnownFailureConfig] = Field(default_factory=list)

    @field_validator(*CHOICES, mode="before")
    @classmethod
    def _choice(cls, value: Any, info: Any) -> str | None:
        choices = CHOICES[info.field_name]
        if value is None or str(value) in choices:
            return None if value is None else str(value)
        near = difflib.get_close_matches(str(value), choices, n=1)
        raise ValueError(f"is not one of {', '.join(choices)}{f'; did you mean {near[0]}?' if near else ''}")

    def declared(self) -> dict[str, Any]:
        """The declarations as `adapt` takes them."""
        out: dict[str, Any] = {name: getattr(self, name) for name in CHOICES if getattr(self, name) is not None}
        precision = self.precision.model_dump(exclude_none=True)
        more = {"fixed": self.fixed, "parameters": self.parameters, "precision": precision}
        return out | {key: value for key, value in more.items() if value}

    def policy(self, shipped: tuple[KnownFailure, ...] = ()) -> Policy:
        """How strictly it is judged; `shipped` are the entries of our own ledger."""
        return Policy(self.strict, tuple(self.require), (*self.ledger(), *shipped))

    def ledger(self) -> tuple[KnownFailure, ...]:
        return tuple(KnownFailure(k.check, k.reason, k.problem, k.link) for k in self.known_failures)


class _File(_Section):
    implementations: dict[str, ImplementationConfig]


@dataclass(frozen=True, eq=False)
class Config:
    """A whole file: the implementations by name. `flat`: its single one stands at the top, without a name."""

    path: Path
    implementations: Mapping[str, ImplementationConfig]
    flat: bool = False

    def find(self, target: str, *, only: bool = True) -> tuple[str, ImplementationConfig] | None:
        """The entry whose name or target this is. A flat one without a target fits the `only` target of a run."""
        for name, entry in self.implementations.items():
            if entry.target is None and self.flat:
                return (name, entry) if only else None
            if target == name or (entry.target is not None and canonical(entry.target) == canonical(target)):
                return name, entry
        return None


def canonical(target: str) -> str:
    """One spelling for all spellings of a target, built-in names and paths included."""
    target = BUILTINS.get(target, target)
    path, colon, attribute = target.rpartition(":")
    if path.endswith(".py"):
        return f"{Path(path).resolve()}:{attribute}"
    return target.replace(":", ".") if colon else target


def load(path: str | Path) -> Config:
    """Read a configuration file. Raises ConfigError, naming file, line, key, what was given and what to do."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(f"{path}: can't be read: {reason}") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(_damaged(path, error)) from None
    if not isinstance(data, dict) or node is None:
        given = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{path}: holds {given}; write a mapping that begins with `implementations:`")
    for line, key in _repeated(node):
        raise ConfigError(f"{path}:{line}: {key}: is written twice in one mapping; keep one of them")
    flat = "implementations" not in data and bool(set(data) & set(ImplementationConfig.model_fields))
    prefix: tuple[str, ...] = ()
    if flat:
        target = data.get("target")
        name = str(target).replace(":", ".").rpartition(".")[2] if target else "it"
        data, prefix = {"implementations": {name: data}}, ("implementations", name)
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explained(path, node, prefix, error))) from None
    for name, entry in file.implementations.items():
        if entry.target is None and not flat:
            line = _line(node, ("implementations", name))
            raise ConfigError(f"{path}:{line}: implementations.{name}: has no target; write `target: pkg.mod.attr`")
    return Config(path, file.implementations, flat)


@lru_cache(maxsize=1)
def _shipped() -> Config | None:
    return load(LEDGER) if LEDGER.is_file() else None


def shipped_ledger(target: str) -> tuple[KnownFailure, ...]:
    """The known failures of a public implementation that ship with this package."""
    config = _shipped()
    entries = () if config is None else config.implementations.values()
    fitting = [entry for entry in entries if entry.target is not None and canonical(entry.target) == canonical(target)]
    return tuple(known for entry in fitting for known in entry.ledger())


# what is said about a file that can't be used ------------------------------------------------------------------------


def _damaged(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f":{mark.line + 1}" if mark is not None else ""
    problem = getattr(error, "problem", None) or str(error)
    return f"{path}{where}: is no YAML: {problem}; mend the line, or the one before it"


def _repeated(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """Keys that stand twice in one mapping, of which YAML would keep the last without a word."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                yield key.start_mark.line + 1, str(key.value)
            seen.add(key.value)
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value)


def _explained(path: Path, node: yaml.Node, prefix: tuple[str, ...], error: ValidationError) -> Iterator[str]:
    items = error.errors(include_url=False)
    if len(items) > 1 and items[0]["type"] == "missing" and items[0]["loc"] == ("implementations",):
        items = items[1:]  # it is there, misspelt
    for item in items:
        keys = tuple(item["loc"])
        keys = keys[:-1] if keys and keys[-1] == "[key]" else keys
        if prefix and keys[: len(prefix)] == prefix:
            keys = keys[len(prefix) :]
        where = f"{path}:{_line(node, keys)}: {'.'.join(map(str, keys)) or 'the file'}"
        yield f"{where}: {_said(item, prefix + keys)}"


def said(error: ValidationError) -> Iterator[str]:
    """What is wrong with declarations that came from no file."""
    for item in error.errors(include_url=False):
        yield f"{'.'.join(map(str, item['loc']))}: {_said(item, ('implementations', '', *item['loc']))}"


def _said(item: Any, keys: tuple[Any, ...]) -> str:
    kind, given = item["type"], item.get("input")
    if kind == "extra_forbidden":
        known = _keys_at(keys[:-1])
        near = difflib.get_close_matches(str(keys[-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(known)}"
        return f"is not a key; {hint}"
    if kind == "missing":
        return "is missing; it must be given"
    if kind == "value_error":
        said = str(item["ctx"]["error"])
        return said if said.startswith("is empty") else f"{given!r} {said}"
    if kind == "literal_error":
        return f"{given!r} is not one of {item['ctx']['expected'].replace(chr(39), '')}"
    wanted = WANTED.get(kind, item["msg"])
    return f"{given!r} is {_kind(given)}; write {wanted}"


WANTED = {
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list, [a, b]",
    "dict_type": "a mapping, {key: value}",
    "model_type": "a mapping, {key: value}",
    "model_attributes_type": "a mapping, {key: value}",
}


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", str: "text", type(None): "empty", bool: "true or false"}.get(
        type(value), f"a number of type {type(value).__name__}"
    )


def _keys_at(keys: tuple[Any, ...]) -> list[str]:
    """The keys that are known in the mapping at a place."""
    if not keys:
        return [*_File.model_fields, *ImplementationConfig.model_fields]
    place = str(keys[2]) if len(keys) > 2 else ""
    if place == "precision":
        return list(PrecisionConfig.model_fields)
    return list((KnownFailureConfig if place == "known_failures" else ImplementationConfig).model_fields)


def _line(node: yaml.Node, keys: tuple[Any, ...]) -> int:
    """The line of a key; where it is missing, that of the mapping it is missing from."""
    line = node.start_mark.line + 1
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if k.value == str(key)]
            if not found:
                return line
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = node.value[key]
            line = node.start_mark.line + 1
    return line
