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
        claims: [fullgraph]             # what many honest ones do not do, and this one does
        strict: true                    # so is bad input taken without complaint
        known_failures:
          - {check: ATN510, problem: "*bf16", reason: kernel gives NaN, link: "https://..."}
      module:
        target: mypkg.layers.Attention
        construct: {width: $hidden, config: {class: mypkg.Config, bias: true}}  # what its constructor is given
        call: {freqs: $positions}       # what its forward is given at each call
        projections: {qkv: in_proj, o: out_proj}
        heads: 8                        # of an instance that does not say

A file for a single implementation may leave out `implementations:` and the name, and write its keys at the top.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator

from attn_spec.config_sections import CacheConfig, PrecisionConfig, Section
from attn_spec.config_words import Called, Claim, Constructed, Projection, Role
from attn_spec.conventions import CHOICES
from attn_spec.engine import KnownFailure, Policy
from attn_spec.reference import BUILTINS

MASK_SHAPE = Literal["BHQK", "B1QK", "B11K", "HQK", "QK", "BK"]
LEDGER = Path(__file__).parent / "reference" / "ledger.yaml"
SCHEMA = Path(__file__).parent / "attn.schema.json"


class ConfigError(ValueError):
    """A configuration file that can't be used: the file, the line, the key, what is wrong and what to write."""


class KnownFailureConfig(Section):
    """A check that is known to fail; the reason is mandatory, and an entry that no longer fails is red."""

    check: str
    """The code or the name of a law: ATN510, empty-rows. `attn-spec list` shows them."""
    reason: str
    """Why it fails, in a few words."""
    problem: str = "*"
    """A pattern over the one-line form of problems, such as "*bf16" or "*Sk0*"."""
    link: str = ""
    """Where it is discussed."""

    @field_validator("reason")
    @classmethod
    def _given(cls, reason: str) -> str:
        if not reason.strip():
            raise ValueError("is empty; say in a few words why the check fails")
        return reason


class ImplementationConfig(Section):
    """What is declared for one implementation."""

    target: str | None = None
    """What is judged: pkg.mod.attr, pkg.mod:attr, path/file.py:attr or a built-in name."""
    layout: str | None = None
    """The axes of q, k and v (B sample, H head, S position, D channel, N sample and head); measured if left out."""
    layout_out: str | None = None
    """The axes of the output, where they are others than those of q."""
    mask_form: str | None = None
    """Which masks it takes: bool, additive (0 and -inf, added to the logits), or both."""
    polarity: str | None = None
    """What True in a bool mask means: the query may attend to the key, or the key is masked."""
    padding_polarity: str | None = None
    """What True in a key padding mask means: attend or masked."""
    alignment: str | None = None
    """Where the causal triangle stands if Sq != Sk: top-left as in torch, bottom-right as in flash-attn."""
    causal: str | None = None
    """Whether the future is hidden: by a flag, always, or never."""
    empty_rows: str | None = None
    """The output of a row with no visible key: zero, mean (of v), or nan."""
    grouping: str | None = None
    """How query heads share kv heads: contiguous (0 0 1 1) or tiled (0 1 0 1)."""
    window: str | None = None
    """What the window parameter holds: pair (left, right), count, count-both, left, or left-both."""
    window_alignment: str | None = None
    """Where windows and the distances of ALiBi stand if Sq != Sk: top-left or bottom-right."""
    softcap_order: str | None = None
    """Whether the softcap comes first (before mask and bias), or after the bias."""
    alibi: str | None = None
    """What ALiBi slopes multiply: distance, -|j - i|, or signed, j - i."""
    lse_base: str | None = None
    """The base of the log-sum-exp that is returned; none where it returns none."""
    lse_empty: str | None = None
    """The log-sum-exp of a row with no visible key: -inf or +inf."""
    lse_sinks: str | None = None
    """Whether the log-sum-exp holds the sinks: included or excluded."""
    lse_layout: str | None = None
    """The axes of the log-sum-exp: BHS as flash-attn's, BSH as jax's."""
    scale: str | None = None
    """The scale where none is given: 1/sqrt(d_k), or 1 for logits that are not scaled (T5)."""
    parameters: dict[Role, str] = Field(default_factory=dict)
    """What a parameter of another name stands for, role to name: {scale: temperature}."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    """Arguments that a function is given at each call, by parameter name: {deterministic: true}."""
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    """The dtypes it rounds to inside, for inputs of half precision. Measured if left out."""
    constructor: dict[str, Constructed] = Field(default_factory=dict, alias="construct")
    """Arguments for the constructor of a module, where their names can't tell; $hidden and its like are the size in
    use, and a mapping with `class:` is an object to build."""
    call: dict[str, Called] = Field(default_factory=dict)
    """Arguments that the forward of a module is given at each call; beside the sizes $positions is arange [1, S], $cos
    and $sin the rotation that changes nothing [1, S, head_dim], and $identity_rotation the tuple of both."""
    projections: dict[Projection, str] = Field(default_factory=dict)
    """The submodules or parameters of a module that project q, k, v and the output, by dotted name."""
    fused: str | None = None
    """The order of the channels of a fused projection: q|k|v, per-head, per-group."""
    heads: Annotated[int, Field(ge=1)] | None = None
    """The number of query heads of a module instance whose attributes do not say."""
    kv_heads: Annotated[int, Field(ge=1)] | None = None
    """The number of kv heads of a module instance whose attributes do not say."""
    input: Literal["BSD", "SBD", "SD"] | None = None
    """The axes of the hidden states that a module takes: B sample, S position, D channel."""
    output: Annotated[int, Field(ge=0)] | None = None
    """Which of the things that a module returns is the output, counted from 0."""
    mask_shapes: list[MASK_SHAPE] = Field(default_factory=list)
    """The shapes that a mask parameter takes: B sample, H head, Q query, K key, 1 for all."""
    cache: CacheConfig = Field(default_factory=CacheConfig)
    """How a module keeps its cache, where the names of its arguments can't tell."""
    require: list[str] = Field(default_factory=list)
    """What must not be refused: axes (gqa, bfloat16, d_v, ...), parameters, or codes and names of laws."""
    claims: list[Claim] = Field(default_factory=list)
    """What it promises beyond what every attention must do: batch-invariant, deterministic, export, fake-tensors,
    fullgraph, vmap. Where it does not hold it is red."""
    strict: bool = False
    """Whether advisory laws are red too, such as bad input that is taken without complaint."""
    known_failures: list[KnownFailureConfig] = Field(default_factory=list)
    """Checks that are known to fail, each with the reason."""

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
        more = {
            "fixed": self.fixed,
            "parameters": self.parameters,
            "precision": precision,
            "construct": self.constructor,
            "claims": self.claims,
        }
        more |= {name: getattr(self, name) for name in FOR_MODULES} | {"cache": self.cache.declared()}
        out |= {key: value for key, value in more.items() if value not in (None, {}, [])}
        if "projections" in self.model_fields_set and not self.projections:
            out["projections"] = {}  # it has none that count
        return out

    def policy(self, shipped: tuple[KnownFailure, ...] = ()) -> Policy:
        """How strictly it is judged; `shipped` are the entries of our own ledger."""
        return Policy(self.strict, tuple(self.require), (*self.ledger(), *shipped))

    def ledger(self) -> tuple[KnownFailure, ...]:
        return tuple(KnownFailure(k.check, k.reason, k.problem, k.link) for k in self.known_failures)


FOR_MODULES = ("call", "projections", "fused", "heads", "kv_heads", "input", "output", "mask_shapes")


class _File(Section):
    """What attn-spec is told about implementations: by name, or a single one at the top."""

    implementations: dict[str, ImplementationConfig]
    """The implementations by name."""


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
    except RecursionError:
        raise ConfigError(
            f"{path}: is nested too deeply; write a mapping that begins with `implementations:`"
        ) from None
    if not isinstance(data, dict) or node is None:
        given = "nothing" if data is None else f"a {type(data).__name__}"
        raise ConfigError(f"{path}: holds {given}; write a mapping that begins with `implementations:`")
    for line, key in _repeated(node, set()):
        raise ConfigError(f"{path}:{line}: {key}: is written twice in one mapping; keep one of them")
    flat = "implementations" not in data and bool(set(data) & set(_names(ImplementationConfig)))
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


def _repeated(node: yaml.Node, looked_at: set[int]) -> Iterator[tuple[int, str]]:
    """Keys that stand twice in one mapping, of which YAML would keep the last without a word."""
    if id(node) in looked_at:  # an alias, perhaps of what holds it
        return
    looked_at.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                yield key.start_mark.line + 1, str(key.value)
            seen.add(key.value)
            yield from _repeated(value, looked_at)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _repeated(value, looked_at)


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
    if kind == "greater_than_equal":
        return f"{given!r} is too small; write {item['ctx']['ge']} or more"
    wanted = WANTED.get(kind, item["msg"])
    return f"{given!r} is {_kind(given)}; write {wanted}"


WANTED = {
    "string_type": "text",
    "bool_type": "true or false",
    "int_type": "a whole number",
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
        return [*_names(_File), *_names(ImplementationConfig)]
    sections: dict[str, type[BaseModel]] = {"precision": PrecisionConfig, "known_failures": KnownFailureConfig}
    sections |= {"cache": CacheConfig}
    return _names(sections.get(str(keys[2]) if len(keys) > 2 else "", ImplementationConfig))


def _names(section: type[BaseModel]) -> list[str]:
    """The keys of a section as they are written."""
    return [field.alias or name for name, field in section.model_fields.items()]


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


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 7) of a file, for editors: every key with its description, every choice as an enum."""
    from attn_spec.config_schema import schema

    return schema()
