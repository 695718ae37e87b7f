"""Which check catches which fault first, by how much, and how many of the chosen problems do: the kill matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from attn_spec.choice.chosen import chosen_problems, weak_faults
from attn_spec.choice.matrix import CLEAR, MEANINGS, Bench
from attn_spec.engine import CheckResult, Subject
from attn_spec.faults import CATALOGUE, Fault
from attn_spec.faults.planted import planted
from attn_spec.fuzzing import Search
from attn_spec.law import Law
from attn_spec.problem import Problem
from attn_spec.suites import all_tests


@dataclass(frozen=True)
class Kill:
    """The first check that a fault fails, None where it fails none.

    margin: its error in units of the bound, 0 where the law has no bound.  chosen: how many of the chosen problems
    catch it by at least 10 bounds.  best: its largest margin on those.  error: the check that ended in an error of ours
    instead, if one did.
    """

    fault: Fault
    result: CheckResult | None
    margin: float = 0.0
    chosen: int = 0
    best: float = 0.0
    error: CheckResult | None = None


@cache
def checks(profile: str, theme: str) -> tuple[tuple[Law, Problem, str], ...]:
    """Every check of a profile on a fixed problem, those of a theme first: what is found by luck does not count."""
    tests = sorted(all_tests(), key=lambda found: found[2].law.theme != theme)
    return tuple(
        (test.law, problem, name)
        for _, name, test in tests
        for problem in test.problems(profile)
        if not isinstance(problem, Search) and not test.law.of_modules
    )


def first_kill(fault: Fault, profile: str = "quick") -> Kill:
    """The first check that fails for the planted fault, under the first conventions that show it."""
    for meaning in MEANINGS:
        subject = Subject(planted(fault, meaning))
        for law, problem, name in checks(profile, fault.theme):
            result = subject.judge(law, problem, name)
            if result.outcome == "error":
                return Kill(fault, None, error=result)
            if result.outcome == "failed":
                return Kill(fault, result, float(result.evidence.get("ratio", 0.0)))
    return Kill(fault, None)


def kills(faults: Iterable[Fault] = CATALOGUE.values(), profile: str = "quick") -> Iterator[Kill]:
    """The kill of every fault that changes an output."""
    bench, weak = Bench(chosen_problems()), weak_faults()
    for fault in faults:
        if fault.equivalent:
            continue
        kill = first_kill(fault, profile)
        line = bench.best_margins(fault)
        chosen = len(line.catchers(weak.get(fault.id, CLEAR)))
        yield dataclasses.replace(kill, chosen=chosen, best=max(line.on.values()))


HEADER = ("fault", "first killed by", "on", "margin", "chosen problems", "largest margin on them")


def row(kill: Kill) -> tuple[str, str, str, str, str, str]:
    """The line of a kill, in the order of `HEADER`."""
    result = kill.result or kill.error
    law, problem = "survives", ""
    if result is not None:
        law, problem = f"{result.code} {result.name}{' (error)' * (kill.result is None)}", str(result.problem)
    margin = f"{kill.margin:.3g}" if kill.margin else "-"
    return kill.fault.id, law, problem, margin, str(kill.chosen), f"{kill.best:.3g}"


def summary(found: Sequence[Kill], profile: str) -> list[str]:
    """The totals: how many faults, who survives, how many of them the chosen problems catch."""
    dead = [kill for kill in found if kill.result is not None]
    alive = [kill.fault.id for kill in found if kill.result is None]
    with_bound = [kill.margin for kill in dead if kill.margin]
    problems = len(chosen_problems())
    return [
        f"{len(dead)} of {len(found)} faults are killed on `{profile}`, {sum(m >= CLEAR for m in with_bound)} of the "
        f"{len(with_bound)} whose first kill has a bound by a margin of {CLEAR:g} or more.",
        f"Survivors: {', '.join(alive) or 'none'}.",
        f"The {problems} chosen problems alone catch {sum(kill.chosen >= 2 for kill in found)} by two of them or more, "
        f"{sum(kill.chosen == 1 for kill in found)} by one, {sum(kill.chosen == 0 for kill in found)} by none.",
    ]
