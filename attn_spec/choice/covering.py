"""Covering arrays: few rows in which every pair, or every three, of the levels that can meet do meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations

Levels = Mapping[str, str]
Interaction = tuple[tuple[str, str], ...]


def interactions(levels: Levels, strength: int) -> set[Interaction]:
    """Every `strength` levels of different factors that stand together in a row."""
    return set(combinations(sorted(levels.items()), strength))


def covered(rows: Iterable[Levels], strength: int) -> set[Interaction]:
    """All that stands together in one of the rows."""
    return {found for row in rows for found in interactions(row, strength)}


def covering_array(
    factors: Mapping[str, tuple[str, ...]],
    strength: int,
    applies: Callable[[dict[str, str]], Levels | None],
    *,
    seed: int = 0,
    draws: int = 4000,
    starts: int = 8,
) -> list[dict[str, str]]:
    """Rows, a level for each factor, in which every feasible interaction stands at least once.

    applies(row): the levels that mean something in a row, or None where they contradict each other. Feasible is what
    was met in `draws` random rows. Greedy: each row starts from the best of a few drawn ones that have something new,
    and is then changed one factor at a time for as long as that adds more. The same seed gives the same rows.
    """
    drawn_by = random.Random(seed)
    pool = [{name: drawn_by.choice(levels) for name, levels in factors.items()} for _ in range(draws)]
    holding: dict[Interaction, list[dict[str, str]]] = {}
    for row in pool:
        levels = applies(row)
        for found in interactions(levels, strength) if levels is not None else ():
            holding.setdefault(found, []).append(row)
    missing = set(holding)

    def gain(row: dict[str, str]) -> int:
        levels = applies(row)
        return -1 if levels is None else len(interactions(levels, strength) & missing)

    rows: list[dict[str, str]] = []
    for target in sorted(holding, key=lambda found: (len(holding[found]), found)):  # what is rare first
        while target in missing:
            climbed = [_climb(row, factors, gain) for row in sorted(holding[target], key=gain)[-starts:]]
            best = max(climbed, key=gain)  # has something new, since every row of `holding[target]` has
            rows.append(best)
            missing -= interactions(applies(best) or {}, strength)
    return rows


def _climb(
    row: dict[str, str], factors: Mapping[str, tuple[str, ...]], gain: Callable[[dict[str, str]], int]
) -> dict[str, str]:
    """The row after changing one level at a time while that gains; what it started for may give way to more."""
    best, reached, better = row, gain(row), True
    while better:
        better = False
        for name, levels in factors.items():
            for level in levels:
                if level != best[name] and (more := gain({**best, name: level})) > reached:
                    best, reached, better = {**best, name: level}, more, True
    return best
