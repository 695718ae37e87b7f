"""The fault x problem matrix: by how much the oracle's comparison catches each fault on each problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from attn_spec import oracle
from attn_spec.conventions import Meaning
from attn_spec.faults import Fault
from attn_spec.faults.planted import Planted
from attn_spec.oracle import Answer
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import candidates

# a fault is planted under the conventions under which it is one: top-left alignment is none where it is declared
MEANINGS = (
    Meaning(),
    Meaning(alignment="bottom-right", window_alignment="bottom-right"),
    Meaning(empty_rows="mean"),
    Meaning(empty_rows="nan"),
    Meaning(grouping="tiled"),
)
CLEAR, SEEN = 10.0, 2.0  # margins: what to aim for, and what will do in a half type


@dataclass(frozen=True)
class Margins:
    """One line of the matrix: the meaning that a fault is planted under, and its margin on each problem."""

    fault: Fault
    meaning: Meaning
    on: dict[Problem, float]

    @property
    def enough(self) -> float:
        """The margin that counts as caught: 10, or less where no two problems come to that."""
        second = sorted(self.on.values(), reverse=True)[1:2] or [0.0]
        return next((level for level in (CLEAR, SEEN) if second[0] >= level), 1.0)

    def catchers(self, enough: float) -> list[Problem]:
        """The problems with at least this margin, and more than the bound."""
        return [problem for problem, margin in self.on.items() if margin >= enough and margin > 1.0]


class Bench:
    """Problems whose tensors and right answers are worked out once for each meaning."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = problems
        self._prepared: dict[Meaning, list[tuple[Arguments, Answer]]] = {}

    def prepared(self, meaning: Meaning) -> list[tuple[Arguments, Answer]]:
        if meaning not in self._prepared:
            self._prepared[meaning] = [_prepared(problem, meaning) for problem in self.problems]
        return self._prepared[meaning]

    def margins(self, fault: Fault, meaning: Meaning) -> Margins:
        """A fault planted under one meaning, on every problem."""
        run = Planted(fault, meaning)
        found = [_margin(run, arguments, right) for arguments, right in self.prepared(meaning)]
        return Margins(fault, meaning, dict(zip(self.problems, found, strict=True)))

    def best_margins(self, fault: Fault) -> Margins:
        """Under the first meaning in which two problems catch it clearly, else under the one that shows most."""
        tried: list[Margins] = []
        for meaning in MEANINGS:
            tried.append(self.margins(fault, meaning))
            if len(tried[-1].catchers(CLEAR)) >= 2:
                return tried[-1]
        return max(tried, key=lambda line: sorted(line.on.values(), reverse=True)[:2][::-1])


def _prepared(problem: Problem, meaning: Meaning) -> tuple[Arguments, Answer]:
    arguments = problem.arguments(meaning.alignment)
    return arguments, oracle.answer(arguments, meaning, candidates(problem.dtype)[0])


def _margin(run: Planted, arguments: Arguments, right: Answer) -> float:
    """Error / bound at the worst element; infinite for a wrong shape, 0 where it raises: that may be a refusal."""
    try:
        output = run(arguments).output
    except Exception:  # whatever a fault runs into
        return 0.0
    return right.compare(output).ratio if output.shape == right.output.shape else math.inf


def matrix(
    faults: Iterable[Fault], problems: Sequence[Problem], progress: Callable[[int], None] = lambda done: None
) -> list[Margins]:
    """The margins of every fault that changes an output; `progress` is told how many lines are done."""
    bench, lines = Bench(problems), []
    for fault in faults:
        if not fault.equivalent and fault.shows == "output":
            lines.append(bench.best_margins(fault))
            progress(len(lines))
    return lines
