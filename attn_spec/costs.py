"""Which checks come first where a call takes long, as under Triton's interpreter, and how long they will all take.

The interpreter does one block of queries with one block of keys after the other, so a call costs what it costs to begin
and its tiles; both are measured on two calls. The order depends on sizes alone, so it is the same on every machine and
in every worker: first the cheapest problem of every law, then the next two of each, the next four and so on. So
wherever a budget ends, no law was left out, and little time went into one check. Random problems, which take longest,
come last.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from attn_spec.adapters.implementation import Implementation
from attn_spec.engine import as_asked
from attn_spec.fuzzing import Search
from attn_spec.law import Law, Refused, Unsupported, Violation
from attn_spec.problem import Problem

BUDGETS = {"quick": 240.0, "ci": 1800.0}  # seconds, where none is given
TILE = 16  # rows and columns of a block
TO_BEGIN = 4.0  # what a call costs before its first tile, in tiles: seen between 3 and 6
CALLS = 3.0  # of one check; what is off here is put right as the run goes on
BACKWARD = 3.0  # a call with its backward pass, in calls
DRAWN = 20.0  # tiles of a random problem
SMALL, LARGE = (Problem(batch=1, heads=1, kv_heads=1, q_len=n, kv_len=n, head_dim=16, v_dim=16) for n in (16, 96))
EVERY_S = 30.0  # between two lines of progress
ENOUGH = 20  # checks after which their own time says more than that of two calls

T = TypeVar("T")


def tiles(problem: Problem) -> float:
    """How many tiles one forward pass has, whatever is hidden in them."""
    return float(problem.batch * problem.heads * -(-problem.q_len // TILE) * -(-problem.kv_len // TILE))


def weight(law: Law, problem: Problem) -> float:
    """What a check costs beside others, in tiles."""
    if isinstance(problem, Search):
        return problem.examples * CALLS * (TO_BEGIN + DRAWN)
    return CALLS * (BACKWARD if law.theme == "gradients" else 1.0) * (TO_BEGIN + tiles(problem))


def in_rounds(items: Iterable[T], check_of: Callable[[T], tuple[Law, Problem]]) -> list[T]:
    """The items, each of which is a check, in the order in which they are tried."""
    by_law: dict[str, list[tuple[float, int, T]]] = defaultdict(list)
    for place, item in enumerate(items):
        law, problem = check_of(item)
        by_law[law.code].append((weight(law, problem), place, item))
    placed = []
    for checks in by_law.values():
        for rank, (_, place, item) in enumerate(sorted(checks, key=lambda check: check[:2])):
            random = isinstance(check_of(item)[1], Search)
            placed.append((random, (rank + 1).bit_length(), place, item))
    return [entry[-1] for entry in sorted(placed, key=lambda entry: entry[:-1])]


@dataclass(frozen=True)
class Cost:
    """Seconds that a call takes to begin, and for each tile."""

    call_s: float
    tile_s: float

    def __str__(self) -> str:
        return f"a call takes {1000 * self.call_s:.0f} ms and {1000 * self.tile_s:.1f} ms a {TILE} x {TILE} tile"


def measured(implementation: Implementation) -> Cost | None:
    """What calls cost, from a call with one tile and one with 36; None where it takes neither."""
    seconds = []
    for problem in (SMALL, LARGE):
        asked = as_asked(implementation, problem)
        arguments = asked.arguments(implementation.conventions.meaning.alignment)
        start = time.perf_counter()
        try:
            implementation(arguments)
        except (Unsupported, Refused, Violation):
            return None
        seconds.append(time.perf_counter() - start)
    small, large = seconds
    tile_s = max(large - small, 0.0) / (tiles(LARGE) - tiles(SMALL))
    return Cost(max(small - tile_s * tiles(SMALL), 0.0), tile_s)


@dataclass
class Progress:
    """How far a run is: what is left by weight, and the seconds that the weights so far have taken.

    weights: of the checks, in order.  seconds: of one unit of weight, until it is known better.
    """

    weights: Sequence[float]
    seconds: float
    budget_s: float
    start: float = field(default_factory=time.perf_counter)
    done: int = 0
    said: float = field(default_factory=time.perf_counter)

    def left_s(self, now: float) -> float:
        """Seconds until the last check has ended, or the budget."""
        past, total = sum(self.weights[: self.done]), sum(self.weights)
        rate = (now - self.start) / past if self.done >= ENOUGH else self.seconds
        return min(rate * (total - past), max(self.start + self.budget_s - now, 0.0))

    def line(self, now: float) -> str:
        """What is said now and then; "" in between."""
        if now - self.said < EVERY_S:
            return ""
        self.said = now
        spent, left = now - self.start, self.left_s(now)
        return f"attn-spec: {self.done} of {len(self.weights)} checks in {spent:.0f} s, about {left:.0f} s left"
