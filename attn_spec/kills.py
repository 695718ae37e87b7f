"""Which check catches which fault first, by how much, and how many of the chosen problems do: the kill matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from attn_spec.check import check_attention
from attn_spec.choice.chosen import chosen_problems, weak_faults
from attn_spec.choice.matrix import CLEAR, MEANINGS, Bench
from attn_spec.engine import CheckResult, Subject
from attn_spec.faults import CATALOGUE, Fault, behaviour
from attn_spec.faults.behaviour import BehaviourFault
from attn_spec.faults.modules import MODULE_FAULTS, ModuleFault
from attn_spec.faults.planted import planted, planted_class
from attn_spec.faults.plants import plants
from attn_spec.fuzzing import Search
from attn_spec.invariants import load as load_laws
from attn_spec.law import LAWS, Law
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


# faults that no single call shows, and faults around attention ------------------------------------------------------


@dataclass(frozen=True)
class Caught:
    """The first check that fails for a fault planted in a whole function or module, on the first profile that has one.

    named: whether the diagnosis of that run names the fault.
    """

    fault: BehaviourFault | ModuleFault
    result: CheckResult | None
    profile: str = ""
    named: bool = False


def caught(fault: BehaviourFault | ModuleFault) -> Caught:
    """Judge the plants of a fault by the laws of its theme, on `quick` and then on `ci`, until a check fails."""
    for profile in ("quick", "ci"):
        for target, declared in _plants(fault):
            report = check_attention(target, laws=_laws(fault), profile=profile, **declared)
            failed = [result for result in report.results if result.outcome == "failed"]
            if failed:
                return Caught(fault, failed[0], profile, fault.id in report.diagnosis)
    return Caught(fault, None)


def _plants(fault: BehaviourFault | ModuleFault) -> Iterable[tuple[Any, dict[str, Any]]]:
    return [(planted_class(fault), {})] if isinstance(fault, ModuleFault) else plants(fault)


def _laws(fault: BehaviourFault | ModuleFault) -> list[str]:
    """Those of modules for a fault around attention; those of packing stand among the variants and the gradients."""
    if fault.theme == "modules":
        load_laws()
        also = [] if isinstance(fault, ModuleFault) else ["variants"]
        return [*(law.code for law in LAWS.values() if law.of_modules), *also]
    return ["variants", "gradients"] if fault.theme == "variants" else [fault.theme]


def all_caught() -> Iterator[Caught]:
    """Every fault that is no changed block of one call."""
    yield from map(caught, MODULE_FAULTS.values())
    yield from map(caught, behaviour.load().values())


CAUGHT_HEADER = ("fault", "first caught by", "on", "profile", "named")


def caught_row(one: Caught) -> tuple[str, str, str, str, str]:
    """The line of a fault, in the order of `CAUGHT_HEADER`."""
    if one.result is None:
        return one.fault.id, "survives", "", "", ""
    law = f"{one.result.code} {one.result.name}"
    return one.fault.id, law, str(one.result.problem), one.profile, "yes" if one.named else "no"


def caught_summary(found: Sequence[Caught]) -> str:
    """The totals in a sentence."""
    dead, named = sum(one.result is not None for one in found), sum(one.named for one in found)
    alive = [one.fault.id for one in found if one.result is None]
    return (
        f"Of {len(found)} faults that no single call shows, or that lie around the attention of a module, {dead} are "
        f"caught, {named} of them by name; survivors: {', '.join(alive) or 'none'}."
    )
