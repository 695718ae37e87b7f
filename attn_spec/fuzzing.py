"""Random problems: a law tried on problems that Hypothesis draws, until one fails; then the smallest that still fails.

What is drawn depends on the seed and on nothing else: every field of Hypothesis' settings is set here, so that neither
a profile of the user's nor a variable of a CI changes anything, and nothing is read from or written to a folder.

Hypothesis finds, and `attn_spec.shrink` makes small: it knows what a problem is, and needs a few dozen calls where
shrinking the choices behind it takes hundreds. A failure that the ledger lists is not made smaller, and hides no other.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings
from hypothesis.internal.conjecture import providers
from hypothesis.strategies import SearchStrategy

from attn_spec import shrink, strategies
from attn_spec.capabilities import Capabilities, capabilities
from attn_spec.engine import CheckResult, Subject
from attn_spec.law import Law
from attn_spec.problem import Problem

EXAMPLES = {"quick": 25, "ci": 400, "deep": 5000}
IN_VAIN = 30
SECONDS = {25: 10.0, 400: 60.0, 5000: 600.0}  # for slow implementations; others need a tenth of it


@dataclass(frozen=True)
class Search(Problem):
    """Stands for many problems in the id of a check: how many are drawn, from which seed, of which dtypes (all: ())."""

    examples: int = 25
    dtypes: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [f"random{self.examples}", *self.dtypes]
        words += [] if self.device == "cpu" else [self.device]
        return "-".join([*words, f"seed{self.seed}"] if self.seed else words)

    def in_dtypes(self, dtypes: Collection[str]) -> Problem:
        return replace(self, dtypes=tuple(dtypes))

    def to_dict(self) -> dict[str, Any]:
        """As the default problem, which is the first that is drawn."""
        return Problem(**{f.name: getattr(self, f.name) for f in fields(Problem)}).to_dict()


def profile(examples: int) -> settings:
    """Hypothesis' settings with every field set."""
    return settings(
        max_examples=examples,
        phases=(Phase.generate,),
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        report_multiple_bugs=False,
        stateful_step_count=1,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        backend="hypothesis",
    )


@dataclass
class Met:
    """What a search came upon: how many problems of each outcome, and one of those that matter."""

    outcomes: Counter[str] = field(default_factory=Counter)
    first: dict[str, Problem] = field(default_factory=dict)

    @property
    def in_vain(self) -> bool:
        """Whether it goes on being told that it can't be asked for."""
        return self.outcomes["unsupported"] > IN_VAIN and set(self.outcomes) == {"unsupported"}

    def note(self, outcome: str, problem: Problem) -> None:
        self.outcomes[outcome] += 1
        self.first.setdefault(outcome, problem)


@dataclass
class Drawn:
    """The different problems that were drawn so far, in order. whole: no other one follows."""

    problems: dict[Problem, None] = field(default_factory=dict)
    whole: bool = False


class _Failed(Exception):  # noqa: N818
    """Ends a search."""


def search(
    subject: Subject,
    law: Law,
    drawn: SearchStrategy[Problem],
    *,
    examples: int,
    seed: int = 0,
    seconds: float = 60.0,
    before: Drawn | None = None,
) -> Met:
    """Try a law on random problems until one fails. After so many seconds the rest is left out.

    before: what searches with the same law, strategy, examples and seed have drawn. It is tried first, and grows.
    """
    met, known = Met(), set[Problem]()
    before = before or Drawn()
    stop = min(time.perf_counter() + seconds, subject.deadline)

    def tried(problem: Problem) -> None:
        if problem == met.first.get("failed"):  # Hypothesis runs what failed once more
            raise _Failed
        before.problems.setdefault(problem)
        if problem in known or met.outcomes["failed"] or time.perf_counter() > stop or met.in_vain:
            return
        known.add(problem)
        if subject.known(law, problem) is not None and met.outcomes["known-failure"]:
            return  # one is enough
        outcome, _ = subject.attempt(law, problem)
        met.note(outcome, problem)
        if outcome in ("failed", "error"):
            met.first["failed"] = problem
            raise _Failed

    seeded = hypothesis.seed(int(law.code[3:]) * 1000 + seed)
    with _nothing_from_local_modules(), suppress(_Failed):
        for problem in list(before.problems):
            tried(problem)
        if not before.whole:
            seeded(profile(examples)(given(drawn)(tried)))()
            before.whole = True
    return met


def judge(subject: Subject, law: Law, wanted: Search, limits: dict[str, Any], test: str = "") -> CheckResult:
    """One check of random problems. Its result carries the problem that matters: the smallest one that fails."""
    start = time.perf_counter()
    if start > subject.deadline:
        return subject.not_run(law, Problem(device=wanted.device), test)
    limits = dict(limits)
    masked = bool(limits.pop("masked", False))
    can = capabilities(subject.implementation).but(**limits)
    drawn = strategies.problems(for_=can, dtypes=wanted.dtypes, device=wanted.device, masked=masked)
    met = search(
        subject,
        law,
        drawn,
        examples=wanted.examples,
        seed=wanted.seed,
        seconds=SECONDS.get(wanted.examples, 60.0),
        before=_before(law.code, wanted, can, masked),
    )
    found = met.first.get("failed")
    if found is not None:
        found = shrink.smaller(subject, law, found)
    telling = (met.first[o] for o in ("known-failure", "passed", "refused", "unsupported") if o in met.first)
    result = subject.judge(law, found or next(telling, Problem(device=wanted.device)), test, started=True)
    if found is not None and result.outcome == "passed":
        result.outcome = "failed"
        result.message = "it failed on this problem and then held on it: the same inputs give different outputs"
        result.merge = "stateful"
    result.evidence["random_problems"] = dict(met.outcomes)
    result.duration_s = time.perf_counter() - start
    return result


@lru_cache(maxsize=128)
def _before(code: str, wanted: Search, can: Capabilities, masked: bool) -> Drawn:
    """What searches of this kind have drawn in this process: drawing takes as long as judging."""
    return Drawn()


@contextmanager
def _nothing_from_local_modules() -> Iterator[None]:
    """Keep Hypothesis from parsing every module of the project for constants, and keeping them in .hypothesis/.

    No choice of ours could be one of them, as `attn_spec.strategies` says; for a large project it takes seconds.
    """
    theirs = getattr(providers, "_get_local_constants", None)
    if theirs is None:  # a version that does not
        yield
        return
    providers._get_local_constants = lambda: providers._local_constants
    try:
        yield
    finally:
        providers._get_local_constants = theirs
