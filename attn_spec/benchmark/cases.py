"""What is timed: a grid in YAML, with model presets, scaled to what the device does in reasonable time.

models:
  mine: {heads: 24, kv_heads: 8, head_dim: 64}
cases:
  prefill:
    model: mine                    # or heads, kv_heads, head_dim, v_dim
    batch: 2
    length: [1024, 2048, 4096]     # of queries and keys; or q_len and kv_len; a list is a sweep
    causal: true
    mask: [{kind: key-padding, lengths: [4096, 3000]}]
    form: bool                     # how the mask is handed over: bool, additive, key-padding
    dtype: bfloat16                # default: bfloat16 on a GPU, float32 on a CPU
    directions: [forward, backward, both]
    max_slowdown: 1.05             # instead of --attn-max-slowdown; min_speedup likewise
    scale: false                   # take the sizes as they are, whatever the device
    memory: true                   # also the peak memory of the sweep, and whether it grows with S or S^2
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from attn_spec import masks
from attn_spec.masks import Delivery, Form
from attn_spec.problem import Problem

HERE = Path(__file__).parent
GRIDS = ("quick", "full")
CALL_S = {"cpu": 0.03, "cuda": 0.02}  # seconds that a forward pass at the matmul ceiling may take


class GridError(ValueError):
    """A grid that can't be used: the file, the key, what is wrong and what to write."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ModelConfig(_Section):
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)


class CaseConfig(_Section):
    """One entry of a grid."""

    model: str | None = None
    heads: int = Field(8, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    head_dim: int = Field(64, ge=1)
    v_dim: int | None = Field(None, ge=1)
    batch: int = Field(1, ge=1)
    length: int | list[int] | None = None
    q_len: int | list[int] | None = None
    kv_len: int | list[int] | None = None
    causal: bool = False
    mask: list[dict[str, Any]] = Field(default_factory=list)
    form: Literal["bool", "additive", "key-padding"] = "bool"
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    directions: list[Literal["forward", "backward", "both"]] = Field(["forward"], min_length=1)
    max_slowdown: float | None = Field(None, gt=0)
    min_speedup: float | None = Field(None, gt=0)
    scale: bool = True
    memory: Literal["no", "measure", "linear"] = "no"


class _File(_Section):
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    cases: dict[str, CaseConfig] = Field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One problem in one direction. limit: the largest allowed ratio to the baseline.  skipped: why it is not timed."""

    entry: str
    problem: Problem
    direction: str
    limit: float | None = None
    memory: str = "no"
    note: str = ""
    skipped: str = ""

    @property
    def name(self) -> str:
        return f"{self.entry}/{self.problem}/{self.direction}"


@dataclass(frozen=True)
class Grid:
    """Entries by name, and the models that they may name."""

    path: str
    cases: Mapping[str, CaseConfig]
    models: Mapping[str, ModelConfig]


def limit_of(max_slowdown: float | None, min_speedup: float | None) -> float | None:
    """The largest allowed ratio of candidate to baseline time, from either way of saying it."""
    limits = [x for x in (max_slowdown, None if min_speedup is None else 1 / min_speedup) if x is not None]
    return min(limits, default=None)


def load(given: str, root: Path | None = None) -> Grid:
    """Read a grid: one of `GRIDS`, or a YAML file (relative to root). Raises GridError."""
    path = HERE / f"{given}.yaml" if given in GRIDS else (root or Path.cwd()) / given
    if not path.is_file():
        near = difflib.get_close_matches(given, GRIDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"give a YAML file, or one of {', '.join(GRIDS)}"
        raise GridError(f"{given}: no such grid; {hint}")
    shipped = _read(HERE / "models.yaml").models
    file = _read(path)
    if not file.cases:
        raise GridError(f"{path}: has no cases; write `cases: {{prefill: {{length: 1024}}}}`")
    grid = Grid(str(path), file.cases, {**shipped, **file.models})
    for name, entry in grid.cases.items():
        if entry.model is not None and entry.model not in grid.models:
            near = difflib.get_close_matches(entry.model, grid.models, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the models are {', '.join(grid.models)}"
            raise GridError(f"{path}: cases.{name}.model: {entry.model!r} is not known; {hint}")
        if entry.length is None and (entry.q_len is None or entry.kv_len is None):
            raise GridError(f"{path}: cases.{name}: has no length; write `length: 1024`, or both q_len and kv_len")
        if entry.length is not None and (entry.q_len is not None or entry.kv_len is not None):
            raise GridError(f"{path}: cases.{name}: length stands for q_len and kv_len; write it or them, not both")
    return grid


def _read(path: Path) -> _File:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GridError(f"{path}: can't be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise GridError(f"{path}: holds no mapping; write one that begins with `cases:`")
    try:
        return _File.model_validate(data)
    except ValidationError as error:
        raise GridError("\n".join(_explained(path, error))) from None


def _explained(path: Path, error: ValidationError) -> Iterator[str]:
    known = [*_File.model_fields, *CaseConfig.model_fields]
    for item in error.errors(include_url=False):
        where = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(CaseConfig.model_fields)}"
            yield f"{path}: {where}: is not a key; {hint}"
        else:
            yield f"{path}: {where}: {item['msg']}, and {item.get('input')!r} was given"


def cases(
    grid: Grid,
    *,
    device: str = "cpu",
    flop_per_s: float | None = None,
    max_slowdown: float | None = None,
    min_speedup: float | None = None,
    dtypes: tuple[str, ...] = (),
) -> list[Case]:
    """The cases of a grid on a device. flop_per_s: its matmul ceiling, to scale by; None: sizes as written.

    dtypes: time in these, whatever the grid says. Raises GridError where an entry does not make a problem.
    """
    found = []
    usual = "bfloat16" if device.startswith("cuda") else "float32"
    for name, entry in grid.cases.items():
        for dtype in dtypes or (usual if entry.dtype == "auto" else entry.dtype,):
            try:
                problems = _problems(entry, grid.models, dtype)
            except ValueError as error:
                raise GridError(f"{grid.path}: cases.{name}: {error}") from None
            limit = limit_of(entry.max_slowdown, entry.min_speedup)
            limit = limit_of(max_slowdown, min_speedup) if limit is None else limit
            for problem, missing in problems:
                call_s = CALL_S["cuda" if device.startswith("cuda") else "cpu"]
                note, skipped = "", missing
                if flop_per_s is not None and entry.scale and not missing:
                    largest = max((p for p, _ in problems), key=lambda p: p.cost)
                    problem, note = _fitted(problem, largest, flop_per_s * call_s, whole=len(problems) > 1)
                    if 2.0 * problem.cost > 4 * flop_per_s * call_s:
                        skipped = f"too large for this device even with {problem.heads} heads (scale: false times it)"
                for direction in entry.directions:
                    found.append(Case(name, problem, direction, limit, entry.memory, note, skipped))
    return found


def _problems(entry: CaseConfig, models: Mapping[str, ModelConfig], dtype: str) -> list[tuple[Problem, str]]:
    """The problems of an entry, and for each what this version lacks for it."""
    heads, kv_heads, head_dim = entry.heads, entry.kv_heads or entry.heads, entry.head_dim
    if entry.model is not None:
        model = models[entry.model]
        heads, kv_heads, head_dim = model.heads, model.kv_heads, model.head_dim
    missing = [part.get("kind") for part in entry.mask if part.get("kind") not in masks.PARTS]
    parts = ([{"kind": "causal"}] if entry.causal else []) + ([] if missing else entry.mask)
    lacks = f"masks of kind {missing[0]!r} are not known; there are {', '.join(masks.PARTS)}" if missing else ""
    form: Form = entry.form
    lengths = entry.length is not None
    out = []
    for q_len in _listed(entry.length if lengths else entry.q_len):
        for kv_len in [q_len] if lengths else _listed(entry.kv_len):
            problem = Problem.from_dict(
                {
                    "batch": entry.batch,
                    "heads": heads,
                    "kv_heads": kv_heads,
                    "q_len": q_len,
                    "kv_len": kv_len,
                    "head_dim": head_dim,
                    "v_dim": entry.v_dim or head_dim,
                    "dtype": dtype,
                    "values": "mild",
                    "mask": parts,
                }
            )
            out.append((problem.replace(delivery=Delivery(form)) if entry.mask else problem, lacks))
    return out


def _listed(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _fitted(problem: Problem, largest: Problem, flop: float, *, whole: bool) -> tuple[Problem, str]:
    """Fewer heads, in the same groups, then fewer samples, until the largest of a sweep costs no more than flop.

    The problems of a sweep (whole) are cut alike, so that what is drawn against the length differs in nothing else; one
    that stands alone is also shortened, where it would take four times as long even so.
    """
    part, batch = 1, largest.batch
    padded = any(isinstance(part_, masks.KeyPadding) for part_ in problem.mask)

    def cost() -> float:
        return 2.0 * largest.cost / part / largest.batch * batch

    while cost() > flop and largest.kv_heads % (2 * part) == 0:
        part *= 2
    while cost() > flop and batch > 1 and batch % 2 == 0 and not padded:
        batch //= 2
    scaled = problem.replace(heads=problem.heads // part, kv_heads=problem.kv_heads // part, batch=batch)
    while not whole and not padded and 2.0 * scaled.cost > 4 * flop and scaled.kv_len >= 512:
        scaled = scaled.replace(q_len=(scaled.q_len + 1) // 2, kv_len=scaled.kv_len // 2)
    if scaled == problem:
        return problem, ""
    was = f"B{problem.batch}-H{problem.heads}:{problem.kv_heads}-Sq{problem.q_len}-Sk{problem.kv_len}"
    return scaled, f"scaled to the device from {was}"
