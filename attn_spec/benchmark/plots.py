"""Pictures of a session: time, TFLOP/s, memory and ratio against the length, with the intervals drawn.

matplotlib (extra `report`) is imported when a picture is drawn, and not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attn_spec.benchmark import stats
from attn_spec.benchmark.session import CaseResult, Results

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart by everyone (Okabe and Ito)
MARKERS = "osD^vP"
BASELINE = "#555555"
Point = tuple[float, float, float, float]  # length, value, low, high


def draw(results: Results, folder: Path) -> list[Path]:
    """One picture, as PNG and SVG, for each sweep of lengths and each direction; the files that were written.

    Raises ImportError, saying what to install, where there is no matplotlib.
    """
    written = []
    for (entry, direction), group in _sweeps(results).items():
        figure = picture(results, entry, direction, group)
        folder.mkdir(parents=True, exist_ok=True)
        for kind in ("png", "svg"):
            path = folder / f"benchmark-{entry}-{direction}.{kind}"
            figure.savefig(path, dpi=120)
            written.append(path)
    return written


def _sweeps(results: Results) -> dict[tuple[str, str], list[CaseResult]]:
    """What was timed at two or more lengths, by entry and direction."""
    groups: dict[tuple[str, str], list[CaseResult]] = {}
    for one in results.timed:
        groups.setdefault((one.case.entry, one.case.direction), []).append(one)
    return {key: group for key, group in groups.items() if len({one.case.problem.kv_len for one in group}) > 1}


def picture(results: Results, entry: str, direction: str, group: Sequence[CaseResult]) -> Any:
    """The figure of one sweep: four panels. Raises ImportError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib ({error}); install attn-spec[report]") from None
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    (time, speed), (memory, ratio) = figure.subplots(2, 2)
    lengths = sorted({one.case.problem.kv_len for one in group})
    names = list(dict.fromkeys(one.implementation for one in group))
    standing = list(dict.fromkeys(one.baseline for one in group))
    style = {name: {"color": COLOURS[n % 6], "marker": MARKERS[n % 6]} for n, name in enumerate(names)}
    for name in standing:
        dashed = {"color": BASELINE, "marker": "x", "linestyle": "--"}
        style[f"{name} (baseline)"] = dashed
        style.setdefault(name, dashed)
    _lines(time, _by_name(group, _milliseconds), style)
    _lines(speed, _by_name(group, _tflop_per_s), style)
    peaks = _peaks(results, entry)
    _lines(memory, peaks, style)
    versus = {f"{name} / {other}": (name, other) for name in names for other in standing}
    drawn = {label: _ratios(group, *pair) for label, pair in versus.items()}
    _lines(ratio, drawn, {label: style[pair[0]] for label, pair in versus.items()})
    ratio.axhline(1.0, color=BASELINE, linewidth=1)
    limits = {one.case.limit for one in group if one.case.limit is not None}
    for limit in limits:
        ratio.axhline(limit, color="#b00020", linewidth=1, linestyle=":")
        ratio.annotate(f"limit {limit:g}", (lengths[0], limit), color="#b00020", fontsize=8, va="bottom")
    ceilings = group[0].ceilings
    if ceilings is not None and group[0].work is not None:
        top = ceilings.attainable(group[-1].work or group[0].work) / 1e12
        speed.axhline(top, color="#b00020", linewidth=1, linestyle=":")
        speed.annotate("roofline", (lengths[0], top), color="#b00020", fontsize=8, va="bottom")
    for axes, title, unit in (
        (time, "time of a call (median, p20 to p80)", "ms"),
        (speed, "speed", "TFLOP/s"),
        (memory, "peak memory above the inputs", "MiB"),
        (ratio, "time over the baseline's (interval)", "ratio"),
    ):
        _axes(axes, title, unit, lengths)
    if not peaks:
        memory.text(0.5, 0.5, "not measured", ha="center", va="center", transform=memory.transAxes)
        memory.set_yticks([])
    problem = group[-1].case.problem
    title = f"{entry}, {direction}: B{problem.batch}, heads {problem.heads}:{problem.kv_heads}, d {problem.head_dim}"
    figure.suptitle(f"{title}, {problem.dtype}{', causal' * (problem.causal is not None)}")
    time.legend(fontsize=8, loc="upper left")
    return figure


def _axes(axes: Any, title: str, unit: str, lengths: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if unit == "ratio" else (1.0, 2.0, 5.0))
    )
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("S")
    axes.set_ylabel(unit)
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Any, lines: dict[str, list[Point]], style: dict[str, dict[str, str]]) -> None:
    for place, (name, points) in enumerate(lines.items()):
        if not points:
            continue
        x, y, low, high = (list(column) for column in zip(*sorted(points), strict=True))
        x = [n * 1.02 ** (place - (len(lines) - 1) / 2) for n in x]  # side by side, so that no interval hides another
        below = [max(a - b, 0.0) for a, b in zip(y, low, strict=True)]
        above = [max(b - a, 0.0) for a, b in zip(y, high, strict=True)]
        axes.errorbar(x, y, yerr=[below, above], label=name, markersize=5, capsize=3, linewidth=1.5, **style[name])


def _by_name(
    group: Sequence[CaseResult], value: Callable[[CaseResult, Sequence[float]], tuple[float, float, float]]
) -> dict[str, list[Point]]:
    """A value of every implementation, and of the baselines, at each length."""
    out: dict[str, dict[int, Point]] = {}
    for one in group:
        if one.comparison is None:
            continue
        length = one.case.problem.kv_len
        for name, seconds in (
            (one.implementation, one.comparison.candidate_s),
            (f"{one.baseline} (baseline)", one.comparison.baseline_s),
        ):
            out.setdefault(name, {}).setdefault(length, (float(length), *value(one, seconds)))
    return {name: list(points.values()) for name, points in out.items()}


def _milliseconds(one: CaseResult, seconds: Sequence[float]) -> tuple[float, float, float]:
    middle, low, high = (stats.quantile(seconds, share) * 1e3 for share in (0.5, 0.2, 0.8))
    return middle, low, high


def _tflop_per_s(one: CaseResult, seconds: Sequence[float]) -> tuple[float, float, float]:
    flop = 0.0 if one.work is None else one.work.flop / 1e12
    middle, low, high = (flop / stats.quantile(seconds, share) for share in (0.5, 0.8, 0.2))
    return middle, low, high


def _ratios(group: Sequence[CaseResult], name: str, baseline: str) -> list[Point]:
    chosen = [one for one in group if (one.implementation, one.baseline) == (name, baseline)]
    return [
        (float(one.case.problem.kv_len), one.comparison.ratio, *one.comparison.interval)
        for one in chosen
        if one.comparison is not None
    ]


def _peaks(results: Results, entry: str) -> dict[str, list[Point]]:
    out = {}
    for one in results.memory:
        if one.entry == entry and one.scaling is not None:
            pairs = zip(one.scaling.lengths, one.scaling.peaks, strict=True)
            out[one.implementation] = [(float(n), p / 2**20, p / 2**20, p / 2**20) for n, p in pairs if p > 0]
    return out
