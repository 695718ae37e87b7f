"""The paired engine on a simulated device whose true times are known, so that nothing waits."""

import math
import random

import pytest

from attn_spec.benchmark import stats
from attn_spec.benchmark.clock import CpuClock, Distrusted
from attn_spec.benchmark.paired import (
    FAIL,
    INCONCLUSIVE,
    LOOKS,
    MEASURED,
    PASS,
    Comparison,
    Plan,
    check_host,
    compare,
)
from attn_spec.benchmark.simulated import SimulatedClock, SimulatedContender, busy, quiet


def compared(ratio: float, plan: Plan, noise=quiet, seed: int = 0, **candidate: float) -> Comparison:
    clock = SimulatedClock(noise, seed)
    one = SimulatedContender("candidate", clock, 1e-3 * ratio, **candidate)
    return compare(clock, one, SimulatedContender("baseline", clock, 1e-3), plan)


def counts(ratio: float, runs: int, limit: float = 1.1) -> dict[str, int]:
    verdicts = [compared(ratio, Plan(limit=limit, seed=n), busy(), n).verdict() for n in range(runs)]
    return {name: verdicts.count(name) for name in (PASS, FAIL, INCONCLUSIVE)}


def test_on_a_quiet_device_the_ratio_is_the_true_one() -> None:
    found = compared(1.37, Plan(limit=1.1))
    assert found.ratio == pytest.approx(1.37)
    assert found.interval == pytest.approx((1.37, 1.37))
    assert found.verdict() == FAIL
    assert len(found.log_ratios) == LOOKS[0]
    assert found.stopped == "decided"


@pytest.mark.parametrize("ratio, verdict", [(0.5, PASS), (1.0, PASS), (1.09, PASS), (1.11, FAIL), (1.2, FAIL)])
def test_verdict_against_the_limit(ratio: float, verdict: str) -> None:
    assert compared(ratio, Plan(limit=1.1)).verdict() == verdict


def test_without_a_limit_it_measures_until_it_is_precise() -> None:
    exact, rough = compared(1.0, Plan()), compared(1.0, Plan(), busy(0.2, 0.3), 3)
    assert exact.verdict() == MEASURED
    assert len(exact.log_ratios) == LOOKS[0]
    assert len(rough.log_ratios) == LOOKS[-1]
    assert rough.stopped == "cap"


def test_a_against_a_on_a_busy_device_never_fails() -> None:
    assert counts(1.0, 200)[FAIL] == 0


def test_a_slowdown_of_20_percent_fails_against_a_limit_of_10_and_never_passes() -> None:
    found = counts(1.2, 100)
    assert found[FAIL] >= 95
    assert found[PASS] == 0


def test_a_slowdown_of_35_percent_always_fails() -> None:
    assert counts(1.35, 100)[FAIL] == 100


def test_at_the_limit_itself_it_is_rarely_sure() -> None:
    found = counts(1.1, 200)
    assert found[FAIL] <= 10
    assert found[PASS] <= 10


def test_a_drift_of_the_machine_falls_on_both_sides_alike() -> None:
    def slower_and_slower(generator: random.Random, now: float) -> float:
        return 1.0 + now * 5

    found = compared(1.0, Plan(looks=(46,)), slower_and_slower)
    assert found.candidate_s[-1] > 1.5 * found.candidate_s[0]
    assert found.ratio == pytest.approx(1.0, abs=0.01)


def test_pairs_end_with_the_budget_but_not_before_the_first_look() -> None:
    found = compared(1.1, Plan(limit=1.1, budget_s=0.06), busy(), 1)
    assert LOOKS[0] <= len(found.log_ratios) < LOOKS[1]
    assert found.stopped == "budget"
    assert found.verdict() == INCONCLUSIVE


def test_short_calls_share_a_window() -> None:
    clock = SimulatedClock()
    made = compare(clock, *(SimulatedContender(name, clock, 20e-6) for name in "ab"), Plan(limit=1.1))
    assert made.calls_a_reading in (10, 11)
    assert stats.median(made.candidate_s) == pytest.approx(20e-6)


def test_the_order_of_a_pair_is_random_and_from_the_seed() -> None:
    def order(seed: int) -> str:
        clock, seen = SimulatedClock(), []
        sides = []
        for name in "AB":
            side = SimulatedContender(name, clock, 1e-3)
            side.verify = lambda outputs, name=name: seen.append(name)
            sides.append(side)
        compare(clock, *sides, Plan(limit=2.0, warm_up_s=0.0, seed=seed))
        return "".join(seen[4:48])

    quads = [order(7)[n : n + 4] for n in range(0, 44, 4)]
    assert set(quads) == {"ABBA", "BAAB"}
    assert order(7) == order(7)
    assert order(7) != order(8)


def test_a_wrong_timed_output_is_not_timed() -> None:
    with pytest.raises(Distrusted, match="candidate: the output of a timed call is wrong"):
        compared(0.5, Plan(limit=1.1), wrong_after=60)


def test_work_on_a_queue_that_the_events_do_not_see_is_found_by_the_host_clock() -> None:
    with pytest.raises(Distrusted, match=r"candidate: .* leaves work on another stream"):
        compared(5.0, Plan(limit=1.1), queue=1, host_s=10e-6)


def test_a_slow_launch_within_reason_is_no_disagreement() -> None:
    clock = SimulatedClock()
    check_host(clock, SimulatedContender("a", clock, 1e-3, host_s=50e-6), 1e-3)
    with pytest.raises(Distrusted, match="until the device is idle"):
        check_host(clock, SimulatedContender("a", clock, 1e-3, host_s=5e-3), 1e-3)


def test_a_call_without_any_time_is_not_believed() -> None:
    with pytest.raises(Distrusted, match="no time at all"):
        compared(0.0, Plan(limit=1.1))


def test_the_engine_counts_its_own_time_apart() -> None:
    clock = SimulatedClock()

    class Slow(SimulatedContender):
        def verify(self, outputs: list[object]) -> None:
            clock.host += 2e-3

    found = compare(clock, *(Slow(name, clock, 1e-3) for name in "ab"), Plan(limit=1.1))
    assert found.overhead_s == pytest.approx(4e-3, rel=0.01)


def test_the_cpu_clock_counts_seconds_of_a_call() -> None:
    read = CpuClock().read([lambda: sum(range(20_000))] * 5)
    assert read.outputs == [199_990_000] * 5
    assert 20e-6 < read.seconds < 0.5
    assert CpuClock().synchronised(lambda: sum(range(20_000))) > 20e-6


# the statistics ------------------------------------------------------------------------------------------------------


def test_the_exact_bootstrap_interval_is_that_of_drawing() -> None:
    generator = random.Random(1)
    values = [generator.gauss(0, 1) for _ in range(23)]
    drawn = [stats.median(generator.choices(values, k=23)) for _ in range(20_000)]
    low, high = stats.bootstrap_interval(values, 0.9)
    ordered = sorted(values)
    after, before = ordered[ordered.index(low) + 1], ordered[ordered.index(high) - 1]
    assert sum(x <= low for x in drawn) / 20_000 < 0.05 < sum(x <= after for x in drawn) / 20_000
    assert sum(x >= high for x in drawn) / 20_000 < 0.05 < sum(x >= before for x in drawn) / 20_000


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    generator = random.Random(2)
    held = 0
    for _ in range(1000):
        low, high = stats.bootstrap_interval([generator.gauss(0, 1) for _ in range(23)], 0.95)
        held += low <= 0 <= high
    assert 950 <= held <= 980  # 96.5 % by the binomial distribution


def test_the_sign_test_is_a_binomial_probability() -> None:
    assert stats.sign_p([1.0] * 5, 0.0, above=True) == pytest.approx(2**-5)
    assert stats.sign_p([1.0] * 5, 0.0, above=False) == 1.0
    assert stats.sign_p([1.0, -1.0], 0.0, above=True) == pytest.approx(0.75)


def test_holm_corrects_for_the_number_of_cases() -> None:
    assert stats.holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert stats.holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert stats.holm({}) == {}


def test_a_case_among_many_needs_more_than_one_alone() -> None:
    found = compared(1.2, Plan(limit=1.1))
    assert found.verdict() == FAIL
    assert found.verdict(p_fail=0.2) == INCONCLUSIVE


def test_quantile_mean_and_slope() -> None:
    assert stats.quantile([4.0, 1.0, 2.0, 3.0], 0.5) == 2.5
    assert stats.geometric_mean([2.0, 0.5]) == pytest.approx(1.0)
    assert stats.slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]) == pytest.approx(2.0)
    assert math.isclose(stats.slope([1.0, 2.0], [5.0, 5.0]), 0.0, abs_tol=1e-12)


@pytest.mark.parametrize(
    "call",
    [
        lambda: stats.median([]),
        lambda: stats.bootstrap_interval([]),
        lambda: stats.geometric_mean([]),
        lambda: stats.slope([1.0], [1.0]),
    ],
)
def test_statistics_of_nothing_are_an_error(call) -> None:
    with pytest.raises(ValueError, match="there are none|needs points"):
        call()
