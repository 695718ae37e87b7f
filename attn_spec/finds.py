"""What a find becomes: the smallest failing problem and its law as a few lines of YAML, to be kept and run again.

    law: ATN803 fuzzed
    found_in: mypkg.attention
    problem:
      q_len: 65
      ...
    fingerprint: 8c6976e5b5410415

A folder `attn-finds/` at the root of a project is read at the start of a judged run, and what fuzzing finds is written
there; a project without that folder is left as it is.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from attn_spec.engine import CheckResult, Subject
from attn_spec.invariants import load as load_laws
from attn_spec.law import LAWS, Law
from attn_spec.problem import Problem

FOLDER = "attn-finds"
KEYS = ("law", "problem", "fingerprint", "found_in")


class FindError(ValueError):
    """A file of a find that can't be used; the message names the file and the key."""


@dataclass(frozen=True)
class Find:
    """A law and a problem on which it failed. found_in: the target; fingerprint: that of the problem's inputs."""

    law: Law
    problem: Problem
    fingerprint: str
    found_in: str = ""
    path: str = ""

    @property
    def file_name(self) -> str:
        """The same for the same law and problem, whoever found it."""
        digest = hashlib.sha256(self.problem.to_yaml().encode()).hexdigest()[:8]
        return f"{self.law.code}-{self.law.name}-{digest}.yaml"

    @property
    def changed(self) -> bool:
        """Whether the problem's inputs are no longer those that it was found on."""
        return bool(self.fingerprint) and self.problem.fingerprint() != self.fingerprint

    def to_yaml(self) -> str:
        data = {"law": str(self.law), "found_in": self.found_in, "problem": self.problem.to_dict()}
        return str(yaml.safe_dump({**data, "fingerprint": self.fingerprint}, sort_keys=False))

    def write(self, folder: Path) -> Path:
        """Keep it in a folder, which is made where there is none."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / self.file_name
        path.write_text(self.to_yaml(), encoding="utf-8")
        return path


def of(result: CheckResult, target: str) -> Find:
    """The find of a check that failed."""
    load_laws()
    return Find(LAWS[result.code], result.problem, result.problem.fingerprint(), target)


def read(path: Path) -> Find:
    """One find. Raises FindError, naming the file and the key."""
    load_laws()
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FindError(f"{path}: can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(data, Mapping):
        raise FindError(f"{path}: expected a mapping of {', '.join(KEYS)}, got {type(data).__name__}")
    for key in data:
        if key not in KEYS:
            raise FindError(f"{path}: {key}: not a key of a find; the keys are {', '.join(KEYS)}")
    for key in KEYS[:2]:
        if key not in data:
            raise FindError(f"{path}: {key}: missing")
    law = _law(path, data["law"])
    if not isinstance(data["problem"], Mapping):
        raise FindError(f"{path}: problem: expected a mapping of fields, got {type(data['problem']).__name__}")
    try:
        problem = Problem.from_dict(dict(data["problem"]))
        problem.arguments()
    except (ValueError, TypeError, AttributeError, RuntimeError, AssertionError) as error:
        raise FindError(f"{path}: problem: {error}") from None
    return Find(law, problem, str(data.get("fingerprint", "")), str(data.get("found_in", "")), str(path))


def _law(path: Path, given: Any) -> Law:
    word = str(given).split()[0] if str(given).split() else ""
    found = next((law for law in LAWS.values() if word in (law.code, law.name)), None)
    if found is None:
        known = [word for law in LAWS.values() for word in (law.code, law.name)]
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise FindError(f"{path}: law: {given!r} is the code or name of no law{hint}")
    return found


def read_all(paths: Iterable[Path]) -> list[Find]:
    """The finds in files and folders, each law and problem once. Raises FindError."""
    found: dict[tuple[str, Problem], Find] = {}
    for path in paths:
        if not path.exists():
            raise FindError(f"{path}: no such file or folder")
        files = sorted([*path.glob("*.yaml"), *path.glob("*.yml")]) if path.is_dir() else [path]
        for file in files:
            find = read(file)
            found.setdefault((find.law.code, find.problem), find)
    return list(found.values())


# as checks -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept(Problem):
    """The problem of a find, with its law: what a check of `test_replay` is parametrised with."""

    law: str = "ATN803"

    def __str__(self) -> str:
        return f"{self.law}-{self.plain}"

    @property
    def plain(self) -> Problem:
        return Problem(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Problem)})

    def to_dict(self) -> dict[str, Any]:
        return self.plain.to_dict()


def kept(find: Find) -> Kept:
    """A find as a check."""
    problem = find.problem
    return Kept(**{f.name: getattr(problem, f.name) for f in dataclasses.fields(problem)}, law=find.law.code)


def law_of(problem: Problem) -> Law:
    assert isinstance(problem, Kept)
    load_laws()
    return LAWS[problem.law]


def judge(subject: Subject, problem: Problem, test: str = "") -> CheckResult:
    """The check of a find on an implementation."""
    assert isinstance(problem, Kept)
    return subject.judge(law_of(problem), problem.plain, test)
