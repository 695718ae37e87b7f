"""The judged run inside pytest: parametrises our tests over the implementations, gathers results, reports, exits.

Results travel as user properties of pytest's own reports, so that they reach the controller from the workers of xdist.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

import attn_spec
from attn_spec import costs, engine, finds, onnx_cases
from attn_spec.adapters.implementation import described
from attn_spec.adapters.signature import TargetError
from attn_spec.benchmark import pytest_options
from attn_spec.config import ConfigError
from attn_spec.engine import CheckResult, Subject
from attn_spec.finds import FindError
from attn_spec.interpreter import interpreted
from attn_spec.isolation import Selection, SuiteModule, quiet, suite_module
from attn_spec.items import check_of, judged_by, replays
from attn_spec.law import Law, Violation
from attn_spec.onnx_cases import OnnxMissing
from attn_spec.plugin import FINDS, problems_of
from attn_spec.problem import Problem
from attn_spec.report import json_report, terminal
from attn_spec.report.judgement import Judgement
from attn_spec.subjects import Chosen, choose, find_config
from attn_spec.suites import Test, all_tests

PROPERTY = "attn_spec"
LETTERS = {
    "refused": ("skipped", "R", "REFUSED"),
    "unsupported": ("skipped", "u", "UNSUPPORTED"),
    "known-failure": ("xfailed", "x", "KNOWN FAILURE"),
    "not-run": ("skipped", "-", "NOT RUN"),
}


class JudgedRun:
    """The plugin that --attn-impl registers. Raises pytest.UsageError where a target or a declaration can't be used."""

    def __init__(self, config: pytest.Config, selection: Selection) -> None:
        self.config = config
        self.selection = selection
        self.worker = hasattr(config, "workerinput")
        self.start = time.perf_counter()
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)  # problems are small: with two threads on a busy machine a check took 50 times as long
        if config.option.attn_device == "auto":
            gpu = torch.cuda.is_available() and not config.option.attn_triton_interpret
            config.option.attn_device = "cuda" if gpu else "cpu"
        if config.option.attn_device == "cuda" and not torch.cuda.is_available():
            raise pytest.UsageError("--attn-device=cuda: this torch sees no CUDA device")
        try:
            if config.option.attn_suite:
                onnx_cases.require()
            settings = find_config(self._path(config.option.attn_config), config.rootpath)
            self.chosen = choose(
                config.option.attn_impl,
                settings,
                named=config.option.attn_config is not None,
                timeout_s=self._timeout(),
                device=config.option.attn_device,
            )
            config.stash[FINDS] = self._finds()
        except (TargetError, ConfigError, FindError, OnnxMissing) as error:
            torch.set_num_threads(self.threads)
            raise pytest.UsageError(str(error)) from None
        self.subjects: dict[str, Subject] = {one.name: one.subject for one in self.chosen}
        self.interpreted = interpreted()
        self.budget_s = float("inf")
        if config.option.attn_budget or self.interpreted:
            self.budget_s = config.option.attn_budget or costs.BUDGETS.get(config.option.attn_profile, self.budget_s)
        for subject in self.subjects.values():
            subject.deadline = self.start + self.budget_s
        slow = self.subjects if self.interpreted and not self.worker else {}
        self.costs = {name: costs.measured(subject.implementation) for name, subject in slow.items()}
        self.progress: costs.Progress | None = None
        self.collected: list[str] = []
        self.checks: dict[str, tuple[str, CheckResult]] = {}
        self.errors: dict[str, list[str]] = {}  # what else failed: the text, and where
        self.judgements: list[Judgement] = []
        self.kept: list[str] = []  # the files of what was found
        self.speed: list[str] = []  # the report of the benchmarks
        self.drawn: list[str] = []  # what is said of the pictures

    def _timeout(self) -> float:
        """Seconds for one call in a process of its own; 0 on a GPU and under a debugger, where it runs in this one."""
        option = self.config.option
        here = option.attn_device == "cuda" or option.usepdb or option.trace
        return 0.0 if here else float(option.attn_timeout)

    def _path(self, given: str | None) -> str | None:
        return None if given is None else str(self.config.invocation_params.dir / given)

    def _finds(self) -> list[Problem]:
        """What is replayed: what was asked for, or what the project keeps. Raises FindError."""
        asked, folder = self.config.option.attn_replay, self._folder()
        paths = [Path(str(self._path(path))) for path in asked]
        if not asked and folder is not None and folder.is_dir():
            paths = [folder]
        found = finds.read_all(paths)
        for find in found:
            if find.changed:
                note = f"{find.path}: the inputs are not those it was found on: torch draws other numbers here"
                for one in self.chosen:
                    one.subject.implementation.notes.append(note)
        return [finds.kept(find) for find in found]

    def _folder(self) -> Path | None:
        """Where finds are kept: the folder that was asked for, or the project's, where it has one."""
        if self.config.option.attn_finds:
            return Path(str(self._path(self.config.option.attn_finds)))
        folder = self.config.rootpath / finds.FOLDER
        return folder if folder.is_dir() else None

    def _keep(self, judgements: list[Judgement]) -> Iterator[str]:
        """Write what fuzzing has found."""
        folder = self._folder()
        for judgement in judgements if folder is not None else []:
            for result in judgement.with_outcome("failed"):
                if "random_problems" in result.evidence and folder is not None:
                    yield str(finds.of(result, judgement.implementation.target).write(folder))

    def fixtures(self) -> ModuleType:
        """Our `attention` fixture, as a plugin that is registered last and so comes before any other of the name."""

        @pytest.fixture(scope="session")
        def attention(request: pytest.FixtureRequest) -> Subject:
            """The implementation that is judged."""
            return self.subjects[request.param]

        module = ModuleType("attn_spec.judged_fixtures")
        module.attention = attention  # type: ignore[attr-defined]
        return module

    def pytest_unconfigure(self) -> None:
        for subject in self.subjects.values():
            subject.implementation.close()
        torch.set_num_threads(self.threads)

    # what is collected ---------------------------------------------------------------------------------------------

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> SuiteModule | None:
        return suite_module(module_path, parent)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makeitem(self, collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
        """No item where --attn-dtype leaves a law without problems, or it is about modules and none is judged."""
        if not isinstance(collector, SuiteModule) or not hasattr(obj, "problems"):
            return None
        test = cast(Test, obj)
        return None if problems_of(self.config, test) and self._judged_by(test.law) else []

    def _judged_by(self, law: Law) -> list[str]:
        """The implementations that a law is tried on, by name."""
        return [name for name, subject in self.subjects.items() if subject.takes(law)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "attention" in metafunc.fixturenames:
            test = metafunc.function
            names = self._judged_by(test.law) if hasattr(test, "law") else list(self.subjects)
            metafunc.parametrize("attention", names, ids=names, indirect=True, scope="session")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """One implementation after the other; for each, what was found before comes first.

        Under Triton's interpreter the rest comes in the order of `attn_spec.costs`.
        """
        if self.interpreted:
            items[:] = costs.in_rounds(items, check_of)
        order = {name: place for place, name in enumerate(self.subjects)}
        items.sort(key=lambda item: (order.get(judged_by(item), 0), not replays(item)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = [item.nodeid for item in session.items]  # whatever other plugins left
        if self.interpreted and not self.config.option.attn_budget:  # it took long to get to know the implementation
            for subject in self.subjects.values():
                subject.deadline = time.perf_counter() + self.budget_s
        known = [cost.tile_s for cost in self.costs.values() if cost is not None]
        if known and session.items:
            weights = [costs.weight(*check_of(item)) for item in session.items]
            left_s = max(subject.deadline for subject in self.subjects.values()) - time.perf_counter()
            self.progress = costs.Progress(weights, max(known), left_s)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.worker:  # another plugin, or a file of ours that is damaged
            self.errors.setdefault(report.longreprtext, []).append(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.collected = list(ids)

    # what is gathered ----------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.excinfo is not None and isinstance(call.excinfo.value, Violation) and quiet(self.config):
            report.longrepr = str(call.excinfo.value)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker:
            return
        if self.progress is not None and report.when == "teardown":
            self._say_progress(self.progress)
        found = [value for key, value in report.user_properties if key == PROPERTY]
        data: dict[str, Any] = dict(found[-1]) if found else {}  # type: ignore[call-overload]
        if data:  # for JUnit's XML two words are enough
            kept = [pair for pair in report.user_properties if pair[0] != PROPERTY]
            report.user_properties = [*kept, ("law", f"{data['code']} {data['name']}"), ("outcome", data["outcome"])]
        if data and report.when == "call":
            self.checks[report.nodeid] = (str(data.pop("implementation")), CheckResult.from_dict(data))
        elif report.failed:
            self._record_error(report)

    def _say_progress(self, progress: costs.Progress) -> None:
        progress.done += 1
        line = progress.line(time.perf_counter()) if self.config.option.verbose >= 0 else ""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if line and reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)

    def _record_error(self, report: pytest.TestReport) -> None:
        """Something other than a law failed: a fixture of another plugin, a worker that died, an error of ours."""
        lines = report.longreprtext.strip().splitlines() or ["no message"]
        self.errors.setdefault(report.longreprtext, []).append(report.nodeid)
        place = self._place(report.nodeid)
        if place is not None:
            name, result = place
            result.outcome, result.message = "error", f"during {report.when}: {lines[-1]}"
            self.checks[report.nodeid] = (name, result)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
        if report.when == "call" and report.nodeid in self.checks:
            return LETTERS.get(self.checks[report.nodeid][1].outcome)
        return None

    # what is reported ----------------------------------------------------------------------------------------------

    def pytest_report_header(self) -> list[str]:
        option = self.config.option
        lines = [f"attn-spec {attn_spec.__version__}: profile {option.attn_profile}, seed {option.attn_seed}"]
        for one in self.chosen:
            target = one.subject.implementation.target
            declared = f", declarations of {one.source}" if one.source else ""
            lines.append(f"judging {one.name}{'' if target == one.name else f' ({target})'}{declared}")
        for name, cost in self.costs.items():
            until = f"; what has not begun after {self.budget_s:g} s is not run" if self.budget_s < float("inf") else ""
            lines.append(f"{name} under Triton's interpreter: {cost or 'its calls could not be timed'}{until}")
        if self.selection.ignored:
            lines.append(f"not collected, for a judged run holds attn-spec's own: {', '.join(self.selection.ignored)}")
        return lines

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.worker or self.config.option.collectonly or exitstatus not in (0, 1, 2, 5):
            return
        self.judgements = [self._judgement(one) for one in self.chosen]
        self.kept = list(dict.fromkeys(self._keep(self.judgements)))
        for judgement in self.judgements:
            if exitstatus != pytest.ExitCode.INTERRUPTED and judgement.with_outcome("failed"):
                judgement.diagnose()
        if self.config.option.attn_heatmap and exitstatus != pytest.ExitCode.INTERRUPTED:
            self.drawn = list(self._draw())
        if exitstatus in (0, 5):
            if any(judgement.verdict == "failed" for judgement in self.judgements):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            elif any(judgement.nothing_ran for judgement in self.judgements):
                session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
        if self.config.option.attn_bench and session.exitstatus in (0, 1, 5):
            self._time(session)
        if self.config.option.attn_json:
            option = self.config.option
            json_report.write(
                self.config.invocation_params.dir / option.attn_json,
                self.judgements,
                profile=option.attn_profile,
                seed=option.attn_seed,
                duration_s=time.perf_counter() - self.start,
            )

    def _time(self, session: pytest.Session) -> None:
        """Time what held its checks. A run that is green so far ends as its benchmarks do."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        verdicts = {judgement.name: judgement.verdict for judgement in self.judgements}
        say = (lambda line: None) if reporter is None else reporter.write_line
        run = pytest_options.run_for(self.config, self.chosen, verdicts=verdicts, say=say)
        self.speed = run.lines
        if run.exit_status and session.exitstatus in (0, 5):
            session.exitstatus = run.exit_status

    def _draw(self) -> Iterator[str]:
        """Draw the weights of each implementation. What goes wrong with a picture is said, and costs no verdict."""
        from attn_spec.report.weights_picture import draw, own_path

        path = self.config.invocation_params.dir / self.config.option.attn_heatmap
        for judgement in self.judgements:
            own = own_path(path, judgement.name, len(self.judgements) > 1)
            try:
                yield draw(judgement, own)
            except Exception as error:
                yield f"{own} not drawn: {described(error)}"

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.worker:
            return
        for text, nodeids in self.errors.items() if quiet(self.config) else ():
            also = f" and {len(nodeids) - 1} more" if len(nodeids) > 1 else ""
            terminalreporter.section(f"ERROR {nodeids[0]}{also}", sep="_", red=True)
            terminalreporter.write_line(text)
        for judgement in self.judgements:
            good = judgement.verdict == "passed"
            terminalreporter.section(f"attn-spec: {judgement.name}", sep="=", bold=True, green=good, red=not good)
            for line in terminal.lines(judgement, verbose=self.config.option.verbose > 0):
                terminalreporter.write_line(line.text, **line.markup)
        if self.speed:
            terminalreporter.section("attn-spec: speed", sep="=", bold=True)
        for said in [*self.speed, *self.drawn]:
            terminalreporter.write_line(said)
        for path in self.kept:
            terminalreporter.write_line(f"kept in {path}, to be run first next time (or by --attn-replay={path})")

    def _judgement(self, one: Chosen) -> Judgement:
        checks = {nodeid: result for nodeid, (name, result) in self.checks.items() if name == one.name}
        missing = set(self.collected) - set(self.checks)
        if missing:
            for nodeid, (name, result) in self._index().items():
                if nodeid in missing and name == one.name:
                    result.outcome, result.message = "not-run", "the run ended first"
                    checks[nodeid] = result
        order = {nodeid: place for place, nodeid in enumerate(self.collected)}
        nodeids = sorted(checks, key=lambda nodeid: order.get(nodeid, len(order)))
        results, command = [checks[nodeid] for nodeid in nodeids], self._command(one)
        judgement = Judgement(one.subject.implementation, results, nodeids, command=command)
        if self._whole() and not judgement.with_outcome("not-run"):
            unmet = engine.stale(one.subject.policy, judgement.results)
            judgement.stale = [known for known in unmet if known in one.own_ledger]
            judgement.outdated = [known for known in unmet if known not in one.own_ledger]
        return judgement

    def _command(self, one: Chosen) -> str:
        """What to type before a node id to judge this implementation on that check as in this run."""
        option = self.config.option
        words = ["pytest", f"--attn-impl={one.subject.implementation.target}"]
        words += [f"--attn-config={option.attn_config}"] if option.attn_config else []
        words += [f"--attn-suite={option.attn_suite}"] if option.attn_suite else []
        words += [f"--attn-profile={option.attn_profile}"] if option.attn_profile != "quick" else []
        words += [f"--attn-seed={option.attn_seed}"] if option.attn_seed else []
        words += [f"--attn-device={option.attn_device}"] if option.attn_device == "cuda" else []
        words += ["--attn-triton-interpret"] if option.attn_triton_interpret else []
        return shlex.join(words)

    # what there is to collect ----------------------------------------------------------------------------------------

    def _whole(self) -> bool:
        """Whether every check there is was collected."""
        return self.selection.whole and not self.config.option.attn_dtype and set(self.collected) == set(self._index())

    def _index(self) -> dict[str, tuple[str, CheckResult]]:
        """Every node id there is, with the implementation and a check that has not run."""
        out = {}
        for module, test_name, test in all_tests(self.config.option.attn_suite):
            for problem in problems_of(self.config, test):
                law = test.law_of(problem)
                for name in self._judged_by(test.law):
                    nodeid = f"attn_spec/suites/{module.replace('.', '/')}.py::{test_name}[{name}-{problem}]"
                    result = CheckResult(law.code, law.name, law.title, "not-run", problem, test=test_name)
                    out[nodeid] = (name, result)
        return out

    def _place(self, nodeid: str) -> tuple[str, CheckResult] | None:
        return self._index().get(nodeid)
