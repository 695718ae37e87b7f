"""A whole session: control, cases, correction, interruption; its report, files, options and marker."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec.adapters.adapt import adapt
from attn_spec.benchmark import document, history, plots, pytest_options, tables
from attn_spec.benchmark.cases import Case
from attn_spec.benchmark.clock import CpuClock
from attn_spec.benchmark.memory import Scaling
from attn_spec.benchmark.overheads import Overheads, overheads
from attn_spec.benchmark.paired import FAIL, INCONCLUSIVE, MEASURED, PASS, Comparison, Plan
from attn_spec.benchmark.roofline import Ceilings
from attn_spec.benchmark.run import benchmark
from attn_spec.benchmark.session import (
    DISTRUSTED,
    NOT_RUN,
    NOT_TIMED,
    CaseResult,
    MemoryResult,
    Results,
    Session,
    settle,
)
from attn_spec.benchmark.work import work
from attn_spec.masks import Causal
from attn_spec.problem import Problem

pytest_plugins = ["pytester"]
PROBLEM = Problem(batch=1, heads=2, kv_heads=2, q_len=32, kv_len=32, head_dim=8, v_dim=8, values="mild")
CEILINGS = Ceilings(1e15, 1e14, 1e15)  # nothing is faster than this


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def no_flag(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def wrong(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return sdpa(q, k, v) if q.shape[2] == 32 else sdpa(q, k, v, is_causal)


def case(length: int = 32, direction: str = "forward", limit: float | None = 50.0, causal: bool = False) -> Case:
    problem = PROBLEM.replace(q_len=length, kv_len=length, mask=(Causal(),) if causal else ())
    return Case("small", problem, direction, limit)


def session(cases: list[Case], *functions: Any, **more: Any) -> Session:
    plan = Plan(looks=(11, 23), warm_up_s=0.0, budget_s=2.0)
    usual: dict[str, Any] = {"ceilings": lambda dtype, fresh: CEILINGS, "say": lambda line: None, "with_memory": False}
    adapted = [adapt(one) for one in functions]
    return Session(adapted, [adapt(sdpa, name="base")], cases, CpuClock(), plan, **(usual | more))


def test_a_session_times_every_case_and_says_how_far_it_is() -> None:
    said: list[str] = []
    results = session([case(), case(direction="both")], sdpa, say=said.append).run()
    assert [one.outcome for one in results.cases] == [PASS, PASS]
    assert results.control is not None
    assert results.exit_status == 0
    assert said[0].startswith("control: base against itself ")
    assert "s left" in said[1]
    assert said[2].startswith("[2/2] small/")
    text = "\n".join(tables.lines(results))
    assert "speed: 2 PASS" in text
    assert "overheads: small/" in text
    assert "1 launches, 0 copies, 0 casts" in text


def test_what_is_wrong_or_not_taken_is_said_and_not_timed() -> None:
    results = session([case(causal=True)], wrong, no_flag, sdpa).run()
    assert [one.outcome for one in results.cases] == [DISTRUSTED, NOT_TIMED, PASS]
    assert "the output of the first call is wrong" in results.cases[0].reason
    assert results.cases[1].reason == "no causal parameter"
    assert results.exit_status == 1
    text = "\n".join(tables.lines(results))
    assert "DISTRUSTED: wrong: the output of the first call is wrong" in text
    assert "not timed: no_flag: no causal parameter (small/" in text


def test_nothing_timed_exits_5() -> None:
    results = session([case(causal=True)], no_flag).run()
    assert results.exit_status == 5
    skipped = session([dataclasses.replace(case(), skipped="too large")], sdpa).run()
    assert (skipped.cases[0].outcome, skipped.cases[0].reason, skipped.exit_status) == (NOT_TIMED, "too large", 5)


def test_an_impossible_time_is_refused_after_the_ceilings_were_measured_again() -> None:
    asked = []

    def slow_machine(dtype: str, fresh: bool) -> Ceilings:
        asked.append(fresh)
        return Ceilings(1e3, 1e12, 1e12)

    results = session([case()], sdpa, ceilings=slow_machine).run()
    assert asked == [False, True]
    assert results.cases[0].outcome == DISTRUSTED
    assert "is faster than possible" in results.cases[0].reason


def test_ctrl_c_keeps_what_is_done() -> None:
    calls = 0

    def interrupted(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        nonlocal calls
        calls += q.shape[2] == 48
        if calls == 9:
            raise KeyboardInterrupt
        return sdpa(q, k, v, is_causal)

    results = session([case(32), case(48), case(64)], interrupted).run()
    assert [one.outcome for one in results.cases] == [PASS, NOT_RUN, NOT_RUN]
    assert results.exit_status == 2
    assert "interrupted" in tables.verdict(results)


def test_what_raises_while_it_is_timed_is_refused() -> None:
    calls = 0

    def flaky(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        nonlocal calls
        calls += q.shape[2] == 32
        if calls == 9:
            raise ValueError("now and then")
        return sdpa(q, k, v, is_causal)

    results = session([case()], flaky).run()
    assert results.cases[0].outcome == DISTRUSTED
    assert results.cases[0].reason == "raised while it was timed: ValueError: now and then"


# verdicts over the whole session -------------------------------------------------------------------------------------


def timed(log_ratios: list[float], limit: float | None = 1.1, length: int = 32) -> CaseResult:
    implementation = "mine"
    plan = Plan(limit=limit, looks=(11,))
    seconds = [1e-3 * 2.718281828**r for r in log_ratios]
    found = Comparison(implementation, "base", plan, log_ratios, seconds, [1e-3] * len(seconds))
    one = case(length, limit=limit)
    extra = Overheads(3, 2, 1, 10)
    done = work(one.problem)
    return CaseResult(one, implementation, "base", found.verdict(), "", found, done, CEILINGS, extra)


def test_holm_takes_back_what_is_not_sure_among_many() -> None:
    beyond = [0.2] * 10 + [0.0]  # 10 of 11 beyond a limit of 1.1: p = 0.006, of 0.025 that are allowed
    alone, among = Results([timed(beyond)]), Results([timed(beyond) for _ in range(6)])
    for results in (alone, among):
        settle(results)
    assert [one.outcome for one in alone.cases] == [FAIL]
    assert {one.outcome for one in among.cases} == {INCONCLUSIVE}
    assert "Holm's correction" in among.cases[0].reason
    sure = Results([timed([0.2] * 11) for _ in range(6)])
    settle(sure)
    assert {one.outcome for one in sure.cases} == {FAIL}


def test_a_control_that_moves_voids_the_session() -> None:
    results = Results([timed([0.5] * 11)], void="the control moved")
    settle(results)
    assert results.cases[0].outcome == INCONCLUSIVE
    assert "void: the control moved" in tables.verdict(results)
    assert results.exit_status == 0


def test_inconclusive_fails_where_that_is_asked_for() -> None:
    results = Results([timed([0.05, 0.2] * 6)])
    settle(results)
    assert results.cases[0].outcome == INCONCLUSIVE
    assert results.exit_status == 0
    results.inconclusive_fails = True
    assert results.exit_status == 1


def test_memory_that_must_be_linear() -> None:
    steep = Scaling((512, 1024), (2**22, 2**24))
    measured, asked = (MemoryResult("small", "mine", steep, must_be_linear=flag) for flag in (False, True))
    assert Results([timed([0.0] * 11)], [measured]).exit_status == 0
    results = Results([timed([0.0] * 11)], [asked])
    assert results.exit_status == 1
    assert "1 with memory that grows too fast" in tables.verdict(results)


def test_the_summary_is_a_geometric_mean() -> None:
    results = Results([timed([0.0] * 11, None), timed([1.3862943] * 11, None, length=64)])
    assert "mine: 2 times the time of base (geometric mean of 2 cases)" in list(tables.lines(results))


# files ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def results() -> Results:
    found = Results([timed([0.3 + 0.01 * n for n in range(11)], None, length=length) for length in (32, 64, 128)])
    found.memory = [MemoryResult("small", "mine", Scaling((32, 64, 128), (1000, 2000, 4000)))]
    found.control = found.cases[0].comparison
    return found


def test_the_document_says_what_the_tables_say(results: Results, tmp_path: Path) -> None:
    document.write(tmp_path / "bench.json", results)
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data["schema_version"] == 1
    first = data["cases"][0]
    assert first["outcome"] == MEASURED
    assert first["comparison"]["ratio"] == pytest.approx(2.718281828**0.35)
    assert first["flop"] == 2 * 2 * 32 * 32 * 16
    assert first["overheads"] == {"launches": 3, "copies": 2, "casts": 1, "copied_elements": 10}
    assert Problem.from_dict(first["problem"]) == results.cases[0].case.problem
    assert data["memory"][0]["slope"] == pytest.approx(1.0)


def test_history_is_stored_as_pytest_benchmark_stores_it(results: Results, tmp_path: Path) -> None:
    one, two = (history.save(results, tmp_path, name) for name in ("first", "after a change"))
    assert one.parent.parent == tmp_path / ".benchmarks"
    assert [path.name for path in (one, two)] == ["0001_first.json", "0002_after-a-change.json"]
    data = json.loads(one.read_text())
    assert set(data) == {"machine_info", "commit_info", "benchmarks", "datetime", "version"}
    first = data["benchmarks"][0]
    assert set(first) == {"group", "name", "fullname", "params", "param", "extra_info", "options", "stats"}
    assert first["extra_info"]["ratio"] == pytest.approx(2.718281828**0.35)
    found = first["stats"]
    assert found["rounds"] == 11
    assert found["min"] <= found["q1"] <= found["median"] <= found["q3"] <= found["max"]
    assert found["ops"] == pytest.approx(1 / found["mean"])
    with pytest.raises(ValueError, match="nothing was timed"):
        history.save(Results(), tmp_path)


def test_pytest_benchmark_compares_what_was_stored(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("pytest_benchmark", reason="pytest-benchmark (extra `bench`) is not installed")
    for name in ("first", "second"):
        history.save(results, tmp_path, name)
    command = [sys.executable, "-m", "pytest_benchmark", "compare", "0001", "0002", "--columns=median,rounds"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert "test_speed[mine-small/" in said
    assert "0001_fir" in said
    assert "0002_sec" in said


def test_pictures_are_drawn_as_png_and_svg(results: Results, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib (extra `report`) is not installed")
    written = plots.draw(results, tmp_path / "new")
    assert [path.name for path in written] == ["benchmark-small-forward.png", "benchmark-small-forward.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    text = written[1].read_text()
    assert "<svg" in text
    figure = plots.picture(results, "small", "forward", results.timed)
    time, speed, memory, ratio = figure.axes
    assert [axes.get_xscale() for axes in figure.axes] == ["log"] * 4
    assert [axes.get_yscale() for axes in figure.axes] == ["log"] * 4
    (line,) = [box for box in ratio.containers if box.get_label() == "mine / base"]
    assert list(line.lines[0].get_ydata()) == pytest.approx([2.718281828**0.35] * 3)
    assert line.has_yerr
    assert len(memory.containers) == 1
    assert (
        {box.get_label() for box in time.containers}
        == {"mine", "base (baseline)"}
        == {box.get_label() for box in speed.containers}
    )


def test_one_length_is_no_picture(tmp_path: Path) -> None:
    assert plots.draw(Results([timed([0.0] * 11, None)]), tmp_path) == []


# overheads -----------------------------------------------------------------------------------------------------------


def test_overheads_are_counted() -> None:
    x = torch.randn(1, 4, 32, 8)
    assert overheads(lambda: F.scaled_dot_product_attention(x, x, x)) == Overheads(1, 0, 0, 0)
    assert overheads(lambda: x.transpose(1, 2).contiguous()) == Overheads(1, 1, 0, x.numel())
    assert overheads(lambda: x.half().float()) == Overheads(2, 0, 2, 2 * x.numel())
    assert overheads(lambda: x.view(-1).unsqueeze(0).expand(2, -1)) == Overheads(0, 0, 0, 0)


# options -------------------------------------------------------------------------------------------------------------


class Driver:
    """The hooks as the plugin has them, for runs of a test."""

    @staticmethod
    def pytest_addoption(parser: pytest.Parser) -> None:
        pytest_options.add_options(parser)

    @staticmethod
    def pytest_configure(config: pytest.Config) -> None:
        config.addinivalue_line("markers", pytest_options.MARKER)
        pytest_options.check_options(config)
        if config.option.attn_bench:
            pytest_options.prepare(config)

    @staticmethod
    def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
        pytest_options.deselect(config, items)


TESTS = """
import pytest

def test_right():
    assert 1 + 1 == 2

@pytest.mark.attn_bench
def test_speed():
    assert 2 > 1
"""


@pytest.fixture
def driver() -> list[object]:
    """Nothing where the plugin itself has the options."""
    from attn_spec import plugin

    module = ModuleType("bench_driver")
    for name in ("pytest_addoption", "pytest_configure", "pytest_collection_modifyitems"):
        setattr(module, name, getattr(Driver, name))
    return [] if hasattr(plugin, "pytest_options") else [module]


def test_the_marker_keeps_timing_out_of_ordinary_runs(pytester: pytest.Pytester, driver: list[object]) -> None:
    pytester.makepyfile(TESTS)
    pytester.inline_run("-p", "no:cacheprovider", plugins=driver).assertoutcome(passed=1)
    pytester.inline_run("-p", "no:cacheprovider", "--attn-bench", plugins=driver).assertoutcome(passed=2)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--attn-max-slowdown=fast"], "--attn-max-slowdown: 'fast' is not a number"),
        (["--attn-max-slowdown=0"], "--attn-max-slowdown: 0 makes no sense; give a number above 0"),
        (["--attn-min-speedup=2"], "--attn-min-speedup: nothing is timed without --attn-bench"),
        (["--attn-inconclusive=maybe"], "--attn-inconclusive: 'maybe' is not one of report, fail"),
        (["--attn-bench", "--attn-bench-threads=1.5"], "--attn-bench-threads: 1.5 is not a whole number"),
        (["--attn-bench", "--attn-bench-grid=quik"], "--attn-bench-grid: quik: no such grid; did you mean quick?"),
        (["--attn-bench", "--attn-baseline=no.such"], "--attn-baseline: no.such: no module 'no'"),
        (["--attn-bench", "--attn-bench-json=no/such.json"], "--attn-bench-json: there is no folder"),
    ],
)
def test_an_option_that_cannot_be_used_is_explained(
    pytester: pytest.Pytester, driver: list[object], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.makepyfile(TESTS)
    done = pytester.inline_run("-p", "no:cacheprovider", *arguments, plugins=driver)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert said in capsys.readouterr().err


def config_for(tmp_path: Path, **options: Any) -> SimpleNamespace:
    (tmp_path / "grid.yaml").write_text("cases: {small: {heads: 2, head_dim: 8, length: [32, 64]}}")
    usual = {
        "baseline": [],
        "bench_grid": "grid.yaml",
        "bench_only": "",
        "bench_seconds": 2.0,
        "bench_threads": 1,
        "bench_graphs": False,
        "max_slowdown": None,
        "min_speedup": None,
        "inconclusive": "report",
        "bench_json": "bench.json",
        "bench_plots": None,
        "bench_save": "kept",
        "device": "cpu",
        "dtype": [],
        "seed": 0,
    }
    option = SimpleNamespace(**{f"attn_{name}": value for name, value in (usual | options).items()})
    return SimpleNamespace(option=option, rootpath=tmp_path, invocation_params=SimpleNamespace(dir=tmp_path), hook=None)


def chosen(function: Any, name: str = "mine") -> SimpleNamespace:
    return SimpleNamespace(name=name, subject=SimpleNamespace(implementation=adapt(function, name=name)))


@pytest.fixture(autouse=True)
def _ceilings_of_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("attn_spec.benchmark.roofline._measure", lambda dtype, clock, device: CEILINGS)


def test_run_for_times_what_was_judged_and_writes_what_is_asked_for(tmp_path: Path) -> None:
    said: list[str] = []
    run = pytest_options.run_for(config_for(tmp_path, max_slowdown=50.0), [chosen(sdpa)], say=said.append)
    assert run.exit_status == 0
    assert "speed: 2 PASS" in run.lines
    assert said[-1].startswith("[2/2] ")
    assert [path.name for path in run.written] == ["bench.json", "0001_kept.json"]
    assert run.results is not None
    assert {one.baseline for one in run.results.cases} == {"sdpa"}


def test_what_failed_its_checks_is_not_timed(tmp_path: Path) -> None:
    run = pytest_options.run_for(config_for(tmp_path), [chosen(sdpa)], verdicts={"mine": "failed"})
    assert run.lines == ["not timed: mine failed its checks, and a wrong number has no speed"]
    assert run.exit_status == 0, "the failed check itself is what is red"
    assert run.results is None


def test_run_for_says_what_it_can_not_use(tmp_path: Path) -> None:
    run = pytest_options.run_for(config_for(tmp_path, bench_only="large"), [chosen(sdpa)])
    assert run.exit_status == 4
    assert "'large' is in no case's name; the entries of" in run.lines[0]


def test_the_door_for_scripts(tmp_path: Path) -> None:
    (tmp_path / "grid.yaml").write_text("cases: {small: {heads: 2, head_dim: 8, length: 32}}")
    before = torch.get_num_threads()
    found = benchmark(
        no_flag, sdpa, grid=str(tmp_path / "grid.yaml"), max_slowdown=0.01, seconds=2.0, say=lambda line: None
    )
    assert [one.outcome for one in found.cases] == [FAIL]
    assert found.exit_status == 1
    assert torch.get_num_threads() == before
