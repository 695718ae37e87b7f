"""The pytest plugin: its options, markers and the fixture that a test file of one's own overrides.

Without one of its options nothing happens, and nothing heavy is imported. With --attn-impl (or --attn-config) the run
is ours: `attn_spec.isolation` says what is collected, `attn_spec.judged_run` judges and reports.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attn_spec.benchmark import pytest_options

if TYPE_CHECKING:
    from attn_spec.problem import Problem

PROFILES = ("quick", "ci", "deep")
SUITES = ("onnx",)
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("float64", "float32", "bfloat16", "float16")
FINDS = pytest.StashKey[list["Problem"]]()  # what a judged run replays
SHORT = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attn-spec", "attn-spec: judge an attention implementation")
    group.addoption(
        "--attn-impl",
        action="append",
        default=[],
        metavar="TARGET",
        help="judge this attention: pkg.mod.attr, pkg.mod:attr, path/file.py:attr or a built-in name (repeatable)",
    )
    group.addoption(
        "--attn-config",
        metavar="FILE",
        help="declarations in YAML; without --attn-impl all of its implementations are judged (default: attn.yaml)",
    )
    group.addoption("--attn-profile", metavar="|".join(PROFILES), default="quick", help="how many problems (quick)")
    group.addoption("--attn-device", metavar="|".join(DEVICES), default="auto", help="where tensors live (auto)")
    group.addoption(
        "--attn-dtype", action="append", default=[], metavar="DTYPE", help="judge in these dtypes only (repeatable)"
    )
    group.addoption("--attn-json", metavar="FILE", help="write the results as JSON")
    group.addoption(
        "--attn-heatmap", metavar="FILE", help="draw the weights beside the oracle's, .png or .svg (needs matplotlib)"
    )
    group.addoption(
        "--attn-timeout",
        metavar="SECONDS",
        help="for one call of the implementation, which runs in a process of its own (60, or 600 under Triton's "
        "interpreter); 0: in this process",
    )
    group.addoption(
        "--attn-budget",
        metavar="SECONDS",
        help="checks that did not start by then are not run (no end; under Triton's interpreter 240 for quick)",
    )
    group.addoption(
        "--attn-triton-interpret",
        action="store_true",
        help="run Triton kernels on the CPU, under Triton's interpreter, and try first what costs least",
    )
    group.addoption(
        "--attn-replay",
        action="append",
        default=[],
        metavar="FILE",
        help="run the checks of these finds only, a file or a folder of them (repeatable)",
    )
    group.addoption("--attn-finds", metavar="DIR", help="keep what fuzzing finds here (attn-finds/, where it exists)")
    group.addoption(
        "--attn-suite", metavar="|".join(SUITES), default="", help="judge on this suite alone (onnx: its stored cases)"
    )
    group.addoption("--attn-seed", metavar="N", default="0", help="draw other tensors (0)")
    pytest_options.add_options(parser)


def judged(options: Any) -> bool:
    """Whether this run judges implementations, rather than running the user's tests."""
    return bool(getattr(options, "attn_impl", None) or getattr(options, "attn_config", None))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    if getattr(early_config.known_args_namespace, "attn_triton_interpret", False):
        _interpret(early_config)
    if judged(early_config.known_args_namespace):
        from attn_spec.isolation import without_conftests

        without_conftests(early_config)


def _interpret(config: pytest.Config) -> None:
    """Turn Triton's interpreter on for this run and the processes that it starts, before anything imports triton."""
    from attn_spec.interpreter import VARIABLE, InterpreterError, turn_on

    before = os.environ.get(VARIABLE)
    try:
        turn_on()
    except InterpreterError as error:
        raise pytest.UsageError(f"--attn-triton-interpret: {error}") from None
    if before is None:
        config.add_cleanup(lambda: os.environ.__delitem__(VARIABLE))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "attn(law, name, theme): a check of attn-spec, such as attn(law='ATN301')")
    config.addinivalue_line("markers", pytest_options.MARKER)
    check_options(config)
    if config.option.attn_bench and not config.option.help and not config.option.version:
        pytest_options.prepare(config)
    if judged(config.option) and not config.option.help and not config.option.version:
        from attn_spec.isolation import isolate

        with warnings.catch_warnings():  # torch and the user's modules are imported here, under filters of the project
            warnings.simplefilter("ignore")
            from attn_spec.judged_run import JudgedRun

            run = JudgedRun(config, isolate(config))
        config.pluginmanager.register(run, "attn_spec.judged_run")
        config.pluginmanager.register(run.fixtures(), "attn_spec.judged_fixtures")


@pytest.hookimpl
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    pytest_options.deselect(config, items)


def check_options(config: pytest.Config) -> None:
    """Raise pytest.UsageError for a value that an option does not take, and bring them into one form."""
    option = config.option
    _one_of("--attn-profile", option.attn_profile, PROFILES)
    _one_of("--attn-device", option.attn_device, DEVICES)
    given = [word.strip() for text in option.attn_dtype for word in text.split(",")]
    option.attn_dtype = [SHORT.get(word, word) for word in given if word]
    for dtype in option.attn_dtype:
        _one_of("--attn-dtype", dtype, DTYPES)
    try:
        option.attn_seed = int(option.attn_seed)
    except ValueError:
        raise pytest.UsageError(f"--attn-seed: {option.attn_seed!r} is not a whole number") from None
    if option.attn_timeout is None:
        option.attn_timeout = 600 if os.environ.get("TRITON_INTERPRET") == "1" else 60
    try:
        option.attn_timeout = float(option.attn_timeout)
    except ValueError:
        raise pytest.UsageError(f"--attn-timeout: {option.attn_timeout!r} is not a number of seconds") from None
    if not 0 <= option.attn_timeout < float("inf"):
        raise pytest.UsageError(f"--attn-timeout: {option.attn_timeout} is no time; give seconds, or 0 for no process")
    if option.attn_seed < 0:
        raise pytest.UsageError(f"--attn-seed: {option.attn_seed} is negative; give 0 or more")
    if option.attn_budget is not None:
        try:
            option.attn_budget = float(option.attn_budget)
        except ValueError:
            raise pytest.UsageError(f"--attn-budget: {option.attn_budget!r} is not a number of seconds") from None
        if not 0 < option.attn_budget < float("inf"):
            raise pytest.UsageError(f"--attn-budget: {option.attn_budget} is no time; give seconds")
    if option.attn_suite:
        _one_of("--attn-suite", option.attn_suite, SUITES)
        if option.attn_replay:
            raise pytest.UsageError("--attn-suite: nothing is replayed there; leave out --attn-replay")
    for name in ("json", "replay", "finds", "suite", "budget", "heatmap", "triton_interpret"):
        if getattr(option, f"attn_{name}") and not judged(option):
            raise pytest.UsageError(f"--attn-{name.replace('_', '-')}: nothing is judged without --attn-impl=TARGET")
    pytest_options.check_options(config)
    for name in ("json", "heatmap"):
        if getattr(option, f"attn_{name}"):
            _can_be_written(f"--attn-{name}", config.invocation_params.dir, getattr(option, f"attn_{name}"))
    if option.attn_heatmap:
        if not option.attn_heatmap.endswith((".png", ".svg")):
            raise pytest.UsageError(f"--attn-heatmap: {option.attn_heatmap}: end the name in .png or .svg")
        if importlib.util.find_spec("matplotlib") is None:
            raise pytest.UsageError("--attn-heatmap: matplotlib is not installed: pip install 'attn-spec[report]'")


def _can_be_written(option: str, here: Path, given: str) -> None:
    path = here / given
    if not path.parent.is_dir():
        raise pytest.UsageError(f"{option}: there is no folder {path.parent}")
    if path.is_dir():
        raise pytest.UsageError(f"{option}: {given} is a folder; name a file in it")


def _one_of(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise pytest.UsageError(f"{option}: {value!r} is not one of {', '.join(choices)}{hint}")


@pytest.fixture(scope="session")
def attention() -> Any:
    """What is judged: a callable f(q, k, v, ...) or an `attn_spec.Implementation`. Override it in your test file."""
    pytest.fail(
        "nothing is judged: give --attn-impl=TARGET, or override the fixture `attention` in this test file so that it "
        "returns your function f(q, k, v, ...)",
        pytrace=False,
    )


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A suite's test is tried on the problems of the profile, here and in a test file that imports it."""
    if "problem" in metafunc.fixturenames and hasattr(metafunc.function, "problems"):
        problems = problems_of(metafunc.config, metafunc.function)
        marked = []
        for problem in problems:
            law = metafunc.function.law_of(problem)
            mark = pytest.mark.attn(law=law.code, name=law.name, theme=law.theme)
            marked.append(pytest.param(problem, id=str(problem), marks=mark))
        metafunc.parametrize("problem", marked)


def problems_of(config: pytest.Config, test: Any) -> list[Problem]:
    """The problems of a suite's test that the options leave."""
    option = config.option
    if test.replays:
        return config.stash.get(FINDS, [])
    return problems_left(
        test,
        profile=option.attn_profile,
        dtypes=option.attn_dtype,
        seed=option.attn_seed,
        device="cuda" if option.attn_device == "cuda" else "cpu",
    )


def problems_left(
    test: Any, *, profile: str, dtypes: Collection[str] = (), seed: int = 0, device: str = "cpu"
) -> list[Problem]:
    """The problems of a test in a profile: in these dtypes only, drawn with other seeds, on another device."""
    problems: list[Problem] = test.problems(profile)
    if dtypes:
        problems = [narrowed for p in problems if (narrowed := p.in_dtypes(dtypes)) is not None]
    if seed:
        problems = [p.replace(seed=p.seed + seed) for p in problems]
    if device != "cpu":
        problems = [p.replace(device=device) for p in problems]
    return problems
