"""Exact chances: how unlikely a count is, and how often all tests together may accuse something right.

Every check that counts has the same share of false alarms, `CHECK`, divided among its tests (Bonferroni), whatever
these are and however they hang together. The share of a suite is its number of such checks times `CHECK`, a union
bound: nothing is assumed of how checks hang together either. Draws come from the seeds of the problems, so a second run
counts the same numbers and adds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

CHECK = 1e-9  # how often a check that counts may accuse an implementation that draws right
STEP = 2.0**-8  # a rate may be kept in 8 bits, as flash-attn keeps it


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def binomial_tails(count: int, n: int, p: float) -> tuple[float, float]:
    """P(X <= count) and P(X >= count) for n independent draws of probability p."""
    if p <= 0.0 or p >= 1.0:
        sure = 0 if p <= 0.0 else n
        return float(sure <= count), float(sure >= count)
    k = torch.arange(n + 1, dtype=torch.float64)
    size = torch.tensor(float(n), dtype=torch.float64)
    return _tails(_log_choose(size, k) + k * math.log(p) + (n - k) * math.log1p(-p), count)


def overlap_tails(count: int, n: int, a: int, b: int) -> tuple[float, float]:
    """P(X <= count) and P(X >= count) for what two sets of a and b of n places share, each drawn by chance."""
    low, high = max(0, a + b - n), min(a, b)
    k = torch.arange(low, high + 1, dtype=torch.float64)
    first, second, size = (torch.tensor(float(x), dtype=torch.float64) for x in (a, b, n))
    logs = _log_choose(first, k) + _log_choose(size - first, second - k) - _log_choose(size, second)
    return _tails(logs, count - low)


def _tails(logs: Tensor, place: int) -> tuple[float, float]:
    """The sums of the exponentials up to a place, and from it on."""
    below = logs[: max(place + 1, 0)]
    above = logs[max(place, 0) :]
    return tuple(min(1.0, float(part.logsumexp(0).exp())) if len(part) else 0.0 for part in (below, above))  # type: ignore[return-value]


def rate_p(count: int, n: int, p: float, step: float = STEP) -> float:
    """How unlikely so few or so many of n are, where each is taken with probability p, give or take a step.

    Two-sided: twice the smaller tail, at the end of [p - step, p + step] that makes it likelier.
    """
    if count < n * p:
        return min(1.0, 2 * binomial_tails(count, n, max(0.0, p - step))[0])
    return min(1.0, 2 * binomial_tails(count, n, min(1.0, p + step))[1])


def power(n: int, p: float, actual: float, level: float, step: float = STEP) -> float:
    """How likely n draws of another probability are found out, at a level for the test."""
    missed = 0.0
    k = torch.arange(n + 1, dtype=torch.float64)
    size = torch.tensor(float(n), dtype=torch.float64)
    if actual in (0.0, 1.0):
        return float(rate_p(round(n * actual), n, p, step) < level)
    logs = _log_choose(size, k) + k * math.log(actual) + (n - k) * math.log1p(-actual)
    low, high = _taken(n, p, level, step)
    if low <= high:
        missed = float(logs[low : high + 1].logsumexp(0).exp())
    return 1.0 - missed


def _taken(n: int, p: float, level: float, step: float) -> tuple[int, int]:
    """The least and the largest count that the test takes."""

    def edge(inside: int, outside: int) -> int:
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if rate_p(middle, n, p, step) >= level else (inside, middle)
        return inside

    usual = round(n * p)
    return edge(usual, -1), edge(usual, n + 1)


@dataclass(frozen=True)
class Unlikely:
    """A count that chance does not give: what was counted, the count of n, what was to be expected, and how unlikely.

    group: the tests that it is one of.  level: what each test was allowed, `CHECK` divided by the tests of its check.
    """

    group: str
    what: str
    count: int
    n: int
    expected: float
    p: float
    level: float

    @property
    def evidence(self) -> dict[str, object]:
        """What a violation tells of it."""
        told = {"received": self.count, "of": self.n, "expected": self.expected, "probability": self.p}
        return {
            **told,
            "bound": self.level,
            "bound_from": "an exact tail, and the tests of the check (attn_spec/chance.py)",
        }


@dataclass
class Tests:
    """The tests of one check. `unlikely()` are those that chance does not give, the least likely first."""

    number: int = 0
    _found: list[tuple[float, str, str, int, int, float]] = field(default_factory=list)

    def rates(self, group: str, what: Sequence[str], count: Tensor, n: Tensor, p: float) -> None:
        """Counts [N] of as many draws [N], each of probability p; what: the name of each."""
        count, n = count.flatten().double(), n.flatten().double()
        self.number += len(count)
        z = (count - n * p).abs() / (n * p * (1 - p) + 1e-9).sqrt()
        for place in _far(z):
            k, size = int(count[place]), int(n[place])
            self._found.append((rate_p(k, size, p), group, what[place], k, size, size * p))

    def overlaps(self, group: str, what: Sequence[str], both: Tensor, n: Tensor, a: Tensor, b: Tensor) -> None:
        """Pairs of sets [N]: what they share, their places, and the size of each; drawn apart from each other."""
        both, n, a, b = (x.flatten().double() for x in (both, n, a, b))
        self.number += len(both)
        mean = a * b / n.clamp(min=1)
        spread = (mean * (n - a) * (n - b) / (n.square() - n).clamp(min=1)).sqrt()
        z = torch.where(spread > 0, (both - mean).abs() / spread.clamp(min=1e-9), 0.0)
        for place in _far(z):
            k, size = int(both[place]), int(n[place])
            tails = overlap_tails(k, size, int(a[place]), int(b[place]))
            self._found.append((min(1.0, 2 * min(tails)), group, what[place], k, size, float(mean[place])))

    def unlikely(self) -> list[Unlikely]:
        """Every one that was looked at and is less likely than its share of `CHECK`."""
        level = CHECK / max(self.number, 1)
        return [
            Unlikely(group, what, count, n, expected, p, level)
            for p, group, what, count, n, expected in sorted(self._found)
            if p < level
        ]


def _far(z: Tensor) -> list[int]:
    """The places of the three largest scores; below 3 none comes near a share of `CHECK`."""
    return [place for place in z.argsort(descending=True)[:3].tolist() if z[place] > 3]
