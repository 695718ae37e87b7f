"""The fewest problems that have every pair of features and catch every fault twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from attn_spec.choice.chosen import Chosen
from attn_spec.choice.covering import Interaction, covering_array, interactions
from attn_spec.choice.features import FACTORS, Row, features, problem_of
from attn_spec.choice.matrix import CLEAR, Margins
from attn_spec.problem import Problem

CATCHES = 2  # how many problems shall catch each fault
T = TypeVar("T", bound=Hashable)


# the array -----------------------------------------------------------------------------------------------------------


def array(strength: int, *, seed: int = 0, **effort: int) -> list[Problem]:
    """Problems in which all that can stand together, `strength` features at a time, does."""

    @cache
    def applying(levels: tuple[str, ...]) -> Row | None:
        problem = problem_of(dict(zip(FACTORS, levels, strict=True)))
        return None if problem is None else features(problem)

    rows = covering_array(FACTORS, strength, lambda row: applying(tuple(row.values())), seed=seed, **effort)
    return list(dict.fromkeys(problem for row in rows if (problem := problem_of(row)) is not None))


def pairs(problem: Problem) -> set[Interaction]:
    """The pairs of features that a problem has."""
    return interactions(features(problem), 2)


# the choice ----------------------------------------------------------------------------------------------------------


def cover(offers: Mapping[T, set[Any]], wanted: Mapping[Any, int], start: Iterable[T] = ()) -> list[T]:
    """Few of the keys of `offers` that together offer everything as often as it is wanted, or as often as it is there.

    Greedy from `start`: what offers most of what is still missing, the earlier one of two; then what has become
    superfluous goes, the later ones first.
    """
    there = Counter(thing for things in offers.values() for thing in things)
    need = {thing: min(times, there[thing]) for thing, times in wanted.items() if there[thing]}
    taken = list(start)
    missing = Counter(need)
    for one in taken:
        missing.subtract(offers[one] & need.keys())
    left = [one for one in offers if one not in set(taken)]
    while any(times > 0 for times in missing.values()):
        best = max(left, key=lambda one: sum(missing[thing] > 0 for thing in offers[one]))
        left.remove(best)
        taken.append(best)
        missing.subtract(offers[best] & need.keys())
    for one in reversed(list(taken)):
        if all(missing[thing] < 0 for thing in offers[one] & need.keys()):
            taken.remove(one)
            missing.update(offers[one] & need.keys())
    return taken


def taken_by_most(problem: Problem) -> bool:
    """Float32, and a mask as torch's own function takes it: no key padding, none beside the causal flag."""
    beside = problem.masked and (problem.delivery.form == "key-padding" or problem.causal_by_flag)
    return problem.dtype == "float32" and not beside


def choose(lines: Sequence[Margins], problems: Sequence[Problem], starts: Sequence[Sequence[Problem]]) -> list[Problem]:
    """The fewest of the problems with every pair of features, on which every fault is caught twice.

    Once of it, where that can be, on a problem that most implementations take.
    `starts`: sets to begin with, of which the one that ends smallest is taken.
    """
    offers: dict[Problem, set[Any]] = {p: set(pairs(p)) for p in sorted(problems, key=lambda p: (p.cost, str(p)))}
    wanted: dict[Any, int] = {pair: 1 for things in offers.values() for pair in things}
    for line in lines:
        for problem in line.catchers(line.enough):
            offers[problem].add(line.fault.id)
            wanted[line.fault.id] = CATCHES
            if taken_by_most(problem):
                offers[problem].add((line.fault.id, "by most"))
                wanted[line.fault.id, "by most"] = 1
    begun: list[Sequence[Problem]] = [[], *starts]
    found = [cover(offers, wanted, start) for start in begun]
    fewest = min(found, key=lambda taken: (len(taken), sum(p.cost for p in taken)))
    return sorted(fewest, key=lambda p: (p.cost, str(p)))


# why each is there ---------------------------------------------------------------------------------------------------


def reasons(problems: Sequence[Problem], lines: Iterable[Margins], weak: Mapping[str, float]) -> list[Chosen]:
    """Why each problem is there, from the margins of the faults on them; `weak`: other margins than 10 that count."""
    covers: Counter[Problem] = Counter()
    needed: dict[Problem, list[str]] = {problem: [] for problem in problems}
    for line in lines:
        catchers = line.catchers(weak.get(line.fault.id, CLEAR))
        covers.update(catchers)
        by_most = [problem for problem in catchers if taken_by_most(problem)]
        for problem in catchers:
            if len(catchers) <= CATCHES or by_most == [problem]:
                needed[problem].append(line.fault.id)
    often = Counter(pair for problem in problems for pair in pairs(problem))
    return [
        Chosen(p, covers[p], sum(often[pair] == 1 for pair in pairs(p)), tuple(sorted(needed[p]))) for p in problems
    ]
