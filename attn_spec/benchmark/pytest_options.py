"""What --attn-bench adds to a judged run: the options, their checks, the marker, and the run itself.

The marker `attn_bench` is for tests of one's own that time something: without --attn-bench they are deselected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.benchmark.session import Results

MARKER = "attn_bench: times something; deselected unless --attn-bench is given"
INCONCLUSIVE = ("report", "fail")


class Judged(Protocol):
    """What a judged run knows of an implementation: `attn_spec.subjects.Chosen`."""

    @property
    def name(self) -> str: ...

    @property
    def subject(self) -> Any: ...


@dataclass(eq=False)
class BenchRun:
    """What came of the benchmarks. exit_status: pytest's.  lines: the report.  written: files."""

    exit_status: int
    lines: list[str] = field(default_factory=list)
    written: list[Path] = field(default_factory=list)
    results: Results | None = None


def add_options(parser: pytest.Parser) -> None:
    """Declare the options. Imports nothing heavy."""
    group = parser.getgroup("attn-spec-bench", "attn-spec: time an attention against a baseline")

    def option(name: str, text: str, **more: Any) -> None:
        group.addoption(f"--attn-{name}", help=text, **more)

    option("bench", "after the checks, time what passed them, in pairs with a baseline", action="store_true")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "TARGET"}
    option("baseline", "time against this: a built-in name or a target (repeatable; default: sdpa)", **many)
    option("bench-grid", "what is timed: quick, full or a YAML file (quick)", metavar="GRID", default="quick")
    option("bench-only", "only cases with this in their name", metavar="TEXT", default="")
    option("bench-seconds", "for one comparison, at most (10)", metavar="SECONDS", default="10")
    option("bench-threads", "of torch on a CPU, for all that is timed (1)", metavar="N", default="1")
    option("bench-graphs", "time CUDA graphs, for calls shorter than their launch", action="store_true")
    option("max-slowdown", "fail where the time over the baseline's is above this", metavar="RATIO")
    option("min-speedup", "fail where the baseline's time over this one's is below this", metavar="RATIO")
    option("inconclusive", "report (the default) or fail: what an undecided case means", default="report")
    option("bench-json", "write the measurements as JSON", metavar="FILE")
    option("bench-plots", "draw them here, as PNG and SVG (extra `report`)", metavar="DIR")
    save: dict[str, Any] = {"nargs": "?", "const": "", "default": None, "metavar": "NAME"}
    option("bench-save", "keep them in .benchmarks/, for `pytest-benchmark compare`", **save)


def check_options(config: pytest.Config) -> None:
    """Bring the options into one form. Raises pytest.UsageError for a value that an option does not take."""
    option = config.option
    for name in ("max_slowdown", "min_speedup", "bench_seconds", "bench_threads"):
        value = getattr(option, f"attn_{name}")
        if value is not None:
            setattr(option, f"attn_{name}", _positive(f"--attn-{name.replace('_', '-')}", value))
    threads = option.attn_bench_threads
    if threads != int(threads):
        raise pytest.UsageError(f"--attn-bench-threads: {threads} is not a whole number")
    option.attn_bench_threads = int(threads)
    if option.attn_inconclusive not in INCONCLUSIVE:
        raise pytest.UsageError(f"--attn-inconclusive: {option.attn_inconclusive!r} is not one of report, fail")
    given = [name for name in ("baseline", "max_slowdown", "min_speedup") if getattr(option, f"attn_{name}")]
    given += [name for name in ("bench_json", "bench_plots") if getattr(option, f"attn_{name}")]
    if given and not option.attn_bench:
        raise pytest.UsageError(f"--attn-{given[0].replace('_', '-')}: nothing is timed without --attn-bench")
    if option.attn_bench_json and not (config.invocation_params.dir / option.attn_bench_json).parent.is_dir():
        raise pytest.UsageError(f"--attn-bench-json: there is no folder for {option.attn_bench_json}")


def _positive(option: str, value: Any) -> float:
    try:
        number = float(value)
    except ValueError:
        raise pytest.UsageError(f"{option}: {value!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise pytest.UsageError(f"{option}: {value} makes no sense; give a number above 0")
    return number


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are marked `attn_bench`, unless --attn-bench asks for them."""
    if config.option.attn_bench:
        return
    timing = [item for item in items if item.get_closest_marker("attn_bench") is not None]
    if timing:
        config.hook.pytest_deselected(items=timing)
        items[:] = [item for item in items if item.get_closest_marker("attn_bench") is None]


def prepare(config: pytest.Config) -> None:
    """Read the grid and resolve the baselines before anything runs. Raises pytest.UsageError."""
    from attn_spec.adapters.resolve import resolve
    from attn_spec.adapters.signature import TargetError
    from attn_spec.benchmark.cases import GridError, load

    try:
        load(config.option.attn_bench_grid, config.invocation_params.dir)
        for target in config.option.attn_baseline:
            resolve(target)
    except GridError as error:
        raise pytest.UsageError(f"--attn-bench-grid: {error}") from None
    except TargetError as error:
        raise pytest.UsageError(f"--attn-baseline: {error}") from None


def run_for(
    config: pytest.Config,
    chosen: Sequence[Judged],
    *,
    verdicts: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> BenchRun:
    """Time what was chosen, after it was judged: the session, its report, and the files that were asked for.

    verdicts: "passed", "failed" or "error" by name; what failed is not timed, and makes the run red only as a failed
    check does.  say: takes lines of progress.
    """
    from attn_spec.benchmark import tables
    from attn_spec.benchmark.cases import GridError, load
    from attn_spec.benchmark.run import benchmark

    option, failed = config.option, _failed(chosen, verdicts or {})
    timed: list[Implementation] = [one.subject.implementation for one in chosen if one.name not in failed]
    untimed = [f"not timed: {name} failed its checks, and a wrong number has no speed" for name in sorted(failed)]
    if not timed:
        return BenchRun(0 if untimed else 5, untimed or ["not timed: there is no implementation"])
    device = "cuda" if option.attn_device == "cuda" else "cpu"
    try:
        results = benchmark(
            timed,
            list(dict.fromkeys(option.attn_baseline)) or ["sdpa"],
            grid=load(option.attn_bench_grid, config.invocation_params.dir),
            only=option.attn_bench_only,
            device=device,
            threads=option.attn_bench_threads,
            dtypes=tuple(option.attn_dtype),
            max_slowdown=option.attn_max_slowdown,
            min_speedup=option.attn_min_speedup,
            inconclusive_fails=option.attn_inconclusive == "fail",
            seconds=option.attn_bench_seconds,
            seed=option.attn_seed,
            graphs=option.attn_bench_graphs,
            say=say,
        )
    except (GridError, ValueError) as error:  # TargetError is a ValueError
        return BenchRun(4, [*untimed, f"speed: {error}"])
    run = BenchRun(results.exit_status, [*untimed, *tables.lines(results)], results=results)
    _write(config, run, results, device)
    run.lines += [f"written: {path}" for path in run.written]
    return run


def _failed(chosen: Iterable[Judged], verdicts: Mapping[str, str]) -> Collection[str]:
    return {one.name for one in chosen if verdicts.get(one.name) == "failed"}


def _write(config: pytest.Config, run: BenchRun, results: Results, device: str) -> None:
    option, here = config.option, config.invocation_params.dir
    if option.attn_bench_json:
        from attn_spec.benchmark import document

        document.write(here / option.attn_bench_json, results, device)
        run.written.append(here / option.attn_bench_json)
    if option.attn_bench_save is not None and results.timed:
        from attn_spec.benchmark import history

        run.written.append(history.save(results, config.rootpath, option.attn_bench_save, device))
    if option.attn_bench_plots:
        from attn_spec.benchmark import plots

        try:
            run.written += plots.draw(results, here / option.attn_bench_plots)
        except ImportError as error:
            run.lines.append(f"--attn-bench-plots: {error}")
