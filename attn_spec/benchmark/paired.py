"""The paired engine: candidate and baseline in randomised ABBA order, until an interval of their ratio decides.

Two pairs are four readings, ABBA or BAAB by a coin: a drift of the machine falls on both alike. A pair is two readings
that stand next to each other and its log-ratio log a - log b: on a machine where other work cuts into every fifth
reading, most pairs are still untouched, and most means over four are not. The interval is the exact bootstrap interval
of the median log-ratio. Pairs are looked at after 22, 46, 94, ... of them; each look has its share of the error that is
allowed, so looking often makes no false alarms. A decision also needs the sign test: the bootstrap alone is too sure of
few values.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from attn_spec.benchmark import stats
from attn_spec.benchmark.clock import Call, Clock, Distrusted, Reading

PASS, FAIL, INCONCLUSIVE, MEASURED = "PASS", "FAIL", "INCONCLUSIVE", "measured"
LOOKS = (22, 46, 94, 190)
ASYNC_S = 200e-6  # a host clock includes the launch of a call; more than this and a half is not the launch
TRIES = 3  # of a reading that other work was let into
TARGET_READING_S, MOST_CALLS = 200e-6, 16  # short calls share a window, or the clock's own error counts


class Contender(Protocol):
    """One side of a comparison."""

    name: str

    def calls(self, count: int) -> list[Call]:
        """The next calls, on rotated inputs, made ready off the clock."""

    def verify(self, outputs: list[Any]) -> None:
        """Look at what the last calls returned, off the clock. Raises Distrusted where it is wrong."""


@dataclass(frozen=True)
class Plan:
    """How long one comparison goes on, and what it has to decide.

    limit: the largest allowed ratio of candidate to baseline time; None: measure to `precision` (of the ratio).
    confidence: of the verdict and the interval, over all looks.  cases: comparisons of the session that can fail.
    warm_up_s, budget_s: seconds; at least one look is taken whatever the budget.
    """

    limit: float | None = None
    confidence: float = 0.95
    looks: tuple[int, ...] = LOOKS
    budget_s: float = 10.0
    warm_up_s: float = 0.05
    precision: float = 0.02
    cases: int = 1
    seed: int = 0

    @property
    def level(self) -> float:
        """The confidence of the interval at each look."""
        return 1 - (1 - self.confidence) / len(self.looks)

    @property
    def tail(self) -> float:
        """The error allowed on one side at each look."""
        return (1 - self.level) / 2


@dataclass(eq=False)
class Comparison:
    """What was measured of one pair of contenders: log-ratios, and the seconds of every reading per call.

    disturbed: readings that other work was let into, each time they were tried.
    """

    candidate: str
    baseline: str
    plan: Plan
    log_ratios: list[float] = field(default_factory=list)
    candidate_s: list[float] = field(default_factory=list)
    baseline_s: list[float] = field(default_factory=list)
    calls_a_reading: int = 1
    disturbed: int = 0
    wall_s: float = 0.0
    timed_s: float = 0.0
    stopped: str = ""

    @property
    def ratio(self) -> float:
        """Candidate time over baseline time: above 1 is slower."""
        return math.exp(stats.median(self.log_ratios))

    @property
    def interval(self) -> tuple[float, float]:
        """The interval of the ratio that holds with the plan's confidence, whenever the pairs ended."""
        low, high = stats.bootstrap_interval(self.log_ratios, self.plan.level)
        return math.exp(low), math.exp(high)

    @property
    def overhead_s(self) -> float:
        """Seconds that the engine itself takes for each pair: verification, rotation, stats."""
        return (self.wall_s - self.timed_s) / max(len(self.log_ratios), 1)

    @property
    def p_fail(self) -> float:
        """How likely so many pairs beyond the limit are, were the true ratio at the limit; corrected for the looks."""
        return self._p(above=True)

    @property
    def p_pass(self) -> float:
        return self._p(above=False)

    def _p(self, *, above: bool) -> float:
        if self.plan.limit is None:
            return 1.0
        p = stats.sign_p(self.log_ratios, math.log(self.plan.limit), above=above)
        return min(1.0, p * len(self.plan.looks))

    def verdict(self, p_fail: float | None = None) -> str:
        """FAIL where the interval lies wholly beyond the limit, PASS where wholly inside, INCONCLUSIVE otherwise.

        p_fail: the p-value of failing, corrected for the other cases of the session.
        """
        if self.plan.limit is None:
            return MEASURED
        allowed = (1 - self.plan.confidence) / 2
        low, high = self.interval
        if low > self.plan.limit and (self.p_fail if p_fail is None else p_fail) <= allowed:
            return FAIL
        if high <= self.plan.limit and self.p_pass <= allowed:
            return PASS
        return INCONCLUSIVE

    def _decided(self) -> bool:
        if self.plan.limit is None:
            low, high = self.interval
            return high / low - 1 <= 2 * self.plan.precision
        return self.verdict(self.p_fail * self.plan.cases) != INCONCLUSIVE


def compare(clock: Clock, candidate: Contender, baseline: Contender, plan: Plan) -> Comparison:
    """Time a candidate against a baseline. Raises Distrusted where a timed output is wrong or a clock is not to be
    believed; KeyboardInterrupt passes through."""
    found = Comparison(candidate.name, baseline.name, plan)
    coin = random.Random(plan.seed)
    quickest = min(warm_up(clock, one, plan.warm_up_s) for one in (candidate, baseline))
    found.calls_a_reading = max(1, min(MOST_CALLS, math.ceil(TARGET_READING_S / max(quickest, 1e-9))))
    start = clock.now()
    sides = {"A": (candidate, found.candidate_s), "B": (baseline, found.baseline_s)}
    for look in plan.looks:
        while len(found.log_ratios) < look and not _late(clock, start, found):
            for side in coin.choice(("ABBA", "BAAB")):
                contender, kept = sides[side]
                read = reading(clock, contender, found.calls_a_reading)
                found.timed_s += read.seconds * found.calls_a_reading
                found.disturbed += read.disturbed
                kept.append(read.seconds)
            pairs = zip(found.candidate_s[-2:], found.baseline_s[-2:], strict=True)
            found.log_ratios += [math.log(a / b) for a, b in pairs]
        if _late(clock, start, found) or found._decided():
            found.stopped = "decided" if found._decided() else "budget"
            break
    else:
        found.stopped = "cap"
    found.wall_s = clock.now() - start
    for contender, kept in sides.values():
        check_host(clock, contender, stats.median(kept))
    return found


def _late(clock: Clock, start: float, found: Comparison) -> bool:
    return len(found.log_ratios) >= found.plan.looks[0] and clock.now() - start > found.plan.budget_s


def reading(clock: Clock, contender: Contender, count: int) -> Reading:
    """One verified reading; a disturbed one is taken again, twice at most. Raises Distrusted."""
    best: Reading | None = None
    for _ in range(TRIES):
        read = clock.read(contender.calls(count))
        contender.verify(read.outputs)
        if read.seconds <= 0:
            raise Distrusted(f"{contender.name}: the {clock.name} clock shows no time at all for a call")
        if not read.disturbed:
            return read
        if best is None or read.seconds < best.seconds:
            best = read
    assert best is not None
    return best


def warm_up(clock: Clock, contender: Contender, seconds: float) -> float:
    """Call, by time and not by number, and verify each; the shortest seconds of a call. Raises Distrusted."""
    times: list[float] = []
    start = clock.now()
    while len(times) < 2 or (clock.now() - start < seconds and len(times) < 10_000):
        read = clock.read(contender.calls(1))
        contender.verify(read.outputs)
        times.append(read.seconds)
    return min(times)


def check_host(clock: Clock, contender: Contender, device_s: float, tries: int = 5) -> None:
    """Raise Distrusted where the device's clock shows much less than the host's: work that its events do not see."""
    if clock.name == "cpu":  # one clock, which is the host's
        return
    host_s = min(clock.synchronised(contender.calls(1)[0]) for _ in range(tries))
    if host_s > 1.5 * device_s + ASYNC_S:
        raise Distrusted(
            f"{contender.name}: {device_s * 1e3:.4g} ms by the events of its stream and {host_s * 1e3:.4g} ms until "
            f"the device is idle: it leaves work on another stream, or launches slowly (then time it with CUDA graphs)"
        )
