"""The results as text: what was measured, against what, how sure that is, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attn_spec.benchmark import stats
from attn_spec.benchmark.paired import FAIL, INCONCLUSIVE, MEASURED, PASS
from attn_spec.benchmark.session import DISTRUSTED, NOT_RUN, NOT_TIMED, CaseResult, Results

HEADER = ("implementation", "ms", "p20", "p80", "ratio", "interval", "TFLOP/s", "GB/s", "roofline", "pairs", "")


def lines(results: Results) -> Iterator[str]:
    """The whole report, case by case."""
    by_case: dict[str, list[CaseResult]] = {}
    for one in results.timed:
        by_case.setdefault(f"{one.case.name} against {one.baseline}", []).append(one)
    for title, group in by_case.items():
        first = group[0]
        assert first.work is not None
        note = f", {first.case.note}" if first.case.note else ""
        limit = f", limit {first.case.limit:.3g}" if first.case.limit is not None else ""
        yield f"{title}: {first.work.flop / 1e9:.4g} GFLOP, {first.work.bytes / 2**20:.4g} MiB{limit}{note}"
        yield from _table([HEADER, *(_row(one) for one in group), _baseline_row(group)])
        yield ""
    yield from _others(results)
    yield from _overheads(results.cases)
    for kept in results.memory:
        judged = " FAIL" if kept.failed else ""
        yield f"memory: {kept.entry}: {kept.implementation}: {kept.scaling or kept.reason}{judged}"
    for (implementation, baseline), ratios in results.ratios().items():
        mean = stats.geometric_mean(ratios)
        cases = f"{len(ratios)} case{'s' * (len(ratios) > 1)}"
        yield f"{implementation}: {mean:.3g} times the time of {baseline} (geometric mean of {cases})"
    if results.control is not None:
        low, high = results.control.interval
        name, ratio, own_ms = results.control.baseline, results.control.ratio, results.control.overhead_s * 1e3
        yield f"control: {name} against itself {ratio:.3f} ({low:.3f} to {high:.3f}), {own_ms:.3g} ms a pair of our own"
    yield verdict(results)


def verdict(results: Results) -> str:
    """One line: how many of each outcome."""
    names = (PASS, FAIL, INCONCLUSIVE, DISTRUSTED, MEASURED, NOT_TIMED, NOT_RUN)
    counts = {name: sum(one.outcome == name for one in results.cases) for name in names}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count) or "no cases"
    void = f"; void: {results.void}" if results.void else ""
    steep = sum(one.failed for one in results.memory)
    memory = f", {steep} with memory that grows too fast" if steep else ""
    return f"speed: {said}{memory}{', interrupted' if results.interrupted else ''}{void}"


def _row(one: CaseResult) -> tuple[str, ...]:
    found, done = one.comparison, one.work
    assert found is not None
    assert done is not None
    low, high = found.interval
    share = "" if one.ceilings is None else f"{one.ceilings.share(done, one.seconds):.0%}"
    times = _times(found.candidate_s)
    rates = (f"{done.flop / one.seconds / 1e12:.3g}", f"{done.bytes / one.seconds / 1e9:.3g}")
    word = "" if one.outcome == MEASURED else one.outcome
    interval = f"{low:.3f}-{high:.3f}"
    return (one.implementation, *times, f"{found.ratio:.3f}", interval, *rates, share, str(len(found.log_ratios)), word)


def _baseline_row(group: Sequence[CaseResult]) -> tuple[str, ...]:
    first = group[0]
    found, done = first.comparison, first.work
    assert found is not None
    assert done is not None
    seconds = [s for one in group if one.comparison is not None for s in one.comparison.baseline_s]
    middle = stats.median(seconds)
    share = "" if first.ceilings is None else f"{first.ceilings.share(done, middle):.0%}"
    rates = (f"{done.flop / middle / 1e12:.3g}", f"{done.bytes / middle / 1e9:.3g}")
    return (f"{first.baseline} (baseline)", *_times(seconds), "1", "", *rates, share, "", "")


def _times(seconds: Sequence[float]) -> tuple[str, str, str]:
    middle, low, high = (stats.quantile(seconds, share) * 1e3 for share in (0.5, 0.2, 0.8))
    return f"{middle:.4g}", f"{low:.4g}", f"{high:.4g}"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _others(results: Results) -> Iterator[str]:
    """What was not timed, what is not to be believed and what has a reason to be undecided, each reason once."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for one in results.cases:
        if one.outcome in (DISTRUSTED, NOT_TIMED, NOT_RUN) or (one.outcome == INCONCLUSIVE and one.reason):
            groups.setdefault((one.outcome, one.implementation, one.reason), []).append(one.case.name)
    for (outcome, implementation, reason), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        said = reason if reason.startswith(f"{implementation}: ") else f"{implementation}: {reason}"
        yield f"{outcome}: {said} ({names[0]}{more})"


def _overheads(cases: Sequence[CaseResult]) -> Iterator[str]:
    """Of each implementation on each entry of the grid, the last and so the longest of a sweep."""
    last = {(one.implementation, one.case.entry): one for one in cases if one.overheads is not None}
    for one in last.values():
        yield f"overheads: {one.case.name}: {one.implementation}: {one.overheads}"
