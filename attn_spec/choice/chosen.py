"""The chosen problems, as they stand in `chosen.yaml`, and the array of three features of `three_way.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attn_spec.problem import Problem

SUITES = Path(__file__).parents[1] / "suites"
CHOSEN, THREE_WAY = SUITES / "chosen.yaml", SUITES / "three_way.yaml"
FIELDS = ("problem", "covers", "only_here", "needed_by")


@dataclass(frozen=True)
class Chosen:
    """A chosen problem and why it is there.

    covers: how many faults it catches.  only_here: how many pairs of features stand together in no other.
    needed_by: the faults that it and at most one other catch, or that it alone does of the problems that most
    implementations take.
    """

    problem: Problem
    covers: int = 0
    only_here: int = 0
    needed_by: tuple[str, ...] = ()


def read(path: Path = CHOSEN) -> list[Chosen]:
    """The chosen problems of a file; ValueError names the entry and the field that does not fit."""
    chosen = []
    for place, entry in enumerate(_loaded(path)["problems"]):
        if unknown := set(entry) - set(FIELDS):
            wrong = ", ".join(sorted(unknown))
            raise ValueError(f"{path.name}: entry {place}: {wrong}: not one of {', '.join(FIELDS)}")
        if "problem" not in entry:
            raise ValueError(f"{path.name}: entry {place}: problem: missing")
        try:
            problem = Problem.from_dict(entry["problem"])
        except ValueError as error:
            raise ValueError(f"{path.name}: entry {place}: {error}") from None
        why = {name: entry[name] for name in entry if name != "problem"}
        chosen.append(Chosen(problem, **{**why, "needed_by": tuple(why.get("needed_by", ()))}))
    return chosen


def weak_faults(path: Path = CHOSEN) -> dict[str, float]:
    """The faults that no two candidates catch by 10 bounds, and the margin that counts for them."""
    return dict(_loaded(path).get("weak", {}))


def chosen_problems() -> list[Problem]:
    """The problems that every profile tries."""
    return [entry.problem for entry in read()]


def three_way_problems(path: Path = THREE_WAY) -> list[Problem]:
    """The problems that `ci` and `deep` add: every three features together."""
    return [Problem.from_dict(entry) for entry in _loaded(path)["problems"]]


def _loaded(path: Path) -> dict[str, Any]:
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # where it exists it is ten times as fast
    data = yaml.load(path.read_text(), Loader=loader)
    if not isinstance(data, dict) or not isinstance(data.get("problems"), list):
        raise ValueError(f"{path.name}: expected a mapping with a list of problems")
    return data


def listed(problems: Iterable[Problem], header: str) -> str:
    """A file of problems, one a line."""
    return "\n".join([*_comment(header), "problems:", *(f"  - {_flow(p.to_dict())}" for p in problems)]) + "\n"


def text_of(chosen: Sequence[Chosen], weak: Mapping[str, float], header: str) -> str:
    """The file of the chosen problems, one a line and its reasons below."""
    lines = [*_comment(header), f"weak: {_flow(dict(weak))}", "problems:"]
    for entry in chosen:
        lines.append(f"  - problem: {_flow(entry.problem.to_dict())} # {entry.problem}")
        lines.append(f"    covers: {entry.covers}")
        lines.append(f"    only_here: {entry.only_here}")
        if entry.needed_by:
            lines.append(f"    needed_by: {_flow(list(entry.needed_by))}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return [f"# {line}".rstrip() for line in text.splitlines()]


def _flow(data: Any) -> str:
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=True, width=10**6).strip()
