"""Faults that no single call shows: in what is kept between calls, what is drawn at random, and how a call is run.

Each is one changed block beside the right one, as in `attn_spec.faults.fault`; the right blocks of a theme stand in a
module of their own. A fault is named by the theme's own diagnosis, which runs its blocks and compares, or, where
`told_by` is given, by the law that it breaks: the key under which that law's violations are merged.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from attn_spec.faults.fault import statements

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.engine import CheckResult
    from attn_spec.faults.diagnosis import Diagnosis

Block = TypeVar("Block", bound=Callable[..., Any])

# modules of attn_spec.faults that enter behaviour faults, in the order of the catalogue
CATALOGUES: tuple[str, ...] = (
    *("packing", "tangents", "decoding", "decoding_diagnosis", "randomness", "running", "module_variants"),
)


@dataclass(frozen=True, eq=False)
class BehaviourFault:
    """A known way to get the surroundings of a call wrong; the fields are those of `attn_spec.faults.Fault`.

    right: the right blocks of its theme, by name.  told_by: the merge key of the violations that it makes, where that
    law knows its cause; empty where the theme's diagnosis tells it.
    """

    id: str
    title: str
    blocks: dict[str, Callable[..., Any]] = field(repr=False)
    right: Mapping[str, Callable[..., Any]] = field(repr=False)
    theme: str
    sources: tuple[str, ...] = field(repr=False)
    advice: str = field(repr=False)
    told_by: str = field(default="", repr=False)
    equivalent: str = ""

    @property
    def module(self) -> str:
        """The module that enters it."""
        return str(next(iter(self.blocks.values())).__module__)

    @cached_property
    def diff(self) -> str:
        """What to mend, from the fault to the right block."""
        lines = []
        for name, changed in self.blocks.items():
            compared = difflib.ndiff(statements(changed), statements(self.right[name]))
            lines += [line.rstrip() for line in compared if line[0] in "-+"]
        return "\n".join(lines)


BEHAVIOUR_FAULTS: dict[str, BehaviourFault] = {}
Diagnose = Callable[["Implementation", "Sequence[CheckResult]"], "list[Diagnosis]"]
DIAGNOSES: dict[str, Diagnose] = {}  # theme -> how its faults are told apart


def catalogue(theme: str, right: Mapping[str, Callable[..., Any]]) -> Callable[..., Callable[[Block], Block]]:
    """The decorator by which a module enters the faults of a theme, each a changed block of `right`.

    Raises ValueError where a block does not exist or an id is taken.
    """

    def fault(
        block: str, title: str, *, sources: tuple[str, ...], advice: str, told_by: str = "", equivalent: str = ""
    ) -> Callable[[Block], Block]:
        if block not in right:
            raise ValueError(f"block: {block!r} is not one of {', '.join(right)}")

        def register(function: Block) -> Block:
            name = function.__name__.replace("_", "-")
            taken = BEHAVIOUR_FAULTS.get(name)
            if taken is not None and taken.module != function.__module__:  # a module may be imported anew
                raise ValueError(f"fault: {name} is taken")
            BEHAVIOUR_FAULTS[name] = BehaviourFault(
                name, title, {block: function}, right, theme, sources, advice, told_by, equivalent
            )
            return function

        return register

    return fault


def load() -> dict[str, BehaviourFault]:
    """Every behaviour fault, by id."""
    for name in CATALOGUES:
        importlib.import_module(f"attn_spec.faults.{name}")
    return BEHAVIOUR_FAULTS


def diagnose_behaviour(implementation: Implementation, results: Sequence[CheckResult]) -> list[Diagnosis]:
    """The behaviour faults that explain what failed: those a theme's diagnosis finds, else those a law tells."""
    from attn_spec.law import THEMES

    load()
    themes = {THEMES[int(r.code[3:]) // 100] for r in results if r.outcome == "failed"}
    for theme, diagnose in DIAGNOSES.items():
        found = diagnose(implementation, results) if theme in themes else []
        if found:
            return found
    return told(results)


def told(results: Sequence[CheckResult]) -> list[Diagnosis]:
    """The behaviour faults that laws tell, by the merge keys of what failed."""
    from attn_spec.faults.diagnosis import Diagnosis

    broken = [r.merge for r in results if r.outcome == "failed"]
    known = [one for one in load().values() if one.told_by and one.told_by in broken]
    return [Diagnosis(one, broken.count(one.told_by), broken.count(one.told_by)) for one in known]
