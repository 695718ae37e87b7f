"""A judged run holds our checks and nothing else, whatever the user's own tests are set up to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import hypothesis.internal.observability  # noqa: F401
import pytest
import torch

# some of these are imported so that a run in this process does not import them again each time
from attn_spec.suites import all_tests

pytest_plugins = ["pytester"]
TESTS = {name: test for _, name, test in all_tests()}
CHECKS = len(TESTS["test_default_scale"].problems("quick"))

RIGHT = """
def attn(q, k, v):
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
"""
WRONG = RIGHT.replace(" * q.shape[-1] ** -0.5", "")
SCALES = "attn_spec/suites/test_scaling.py::test_default_scale"

HOSTILE = {
    "python-files": {"pytest.ini": "[pytest]\npython_files = check_*.py\n"},
    "python-functions": {"pytest.ini": "[pytest]\npython_functions = check_*\npython_classes = Check\n"},
    "testpaths": {"pytest.ini": "[pytest]\ntestpaths = tests\n"},
    "addopts-positional": {"pytest.ini": "[pytest]\naddopts = tests\n"},
    "addopts-selecting": {"pytest.ini": "[pytest]\naddopts = -k nothing_of_ours -m unit\nmarkers = unit\n"},
    "usefixtures": {"pytest.ini": "[pytest]\nusefixtures = no_such_fixture\n"},
    "warnings-as-errors": {"pytest.ini": "[pytest]\nfilterwarnings = error\naddopts = -W error\n"},
    "imported-tests": {"pytest.ini": "[pytest]\ncollect_imported_tests = false\n"},
    "strict": {"pytest.ini": "[pytest]\naddopts = --strict-markers --strict-config\nxfail_strict = true\n"},
    "doctests": {"pytest.ini": "[pytest]\naddopts = --doctest-modules --pyargs\n"},
    "pyproject": {"pyproject.toml": '[tool.pytest.ini_options]\npython_files = ["x_*.py"]\nusefixtures = ["gone"]\n'},
    "autouse": {
        "conftest.py": "import pytest\n@pytest.fixture(autouse=True)\ndef broken():\n    raise ValueError('theirs')\n"
    },
    "attention-fixture": {"conftest.py": "import pytest\n@pytest.fixture\ndef attention():\n    return max\n"},
    "conftest-raises": {"conftest.py": "raise ImportError('theirs')\n"},
    "plugin-in-conftest": {"conftest.py": "pytest_plugins = ['attn_spec.plugin']\n"},
    "collect-ignore": {
        "conftest.py": "collect_ignore_glob = ['*']\ndef pytest_collection_modifyitems(items):\n    items.clear()\n"
    },
}


def held(result: pytest.RunResult) -> bool:
    """Whether all checks of the default scale were there, most of them ran, and none failed."""
    outcomes = result.parseoutcomes()
    here = {name: outcomes.get(name, 0) for name in ("passed", "skipped")}
    red = {"failed", "errors", "error"} & set(outcomes)
    return not red and sum(here.values()) == CHECKS and here["passed"] > CHECKS // 2


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project with a right and a wrong attention, and a test of its own that fails."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "--attn-timeout=0")  # no process for each: it would import torch
    pytester.makepyfile(right=RIGHT, wrong=WRONG)
    tests = pytester.mkdir("tests")
    (tests / "test_mine.py").write_text("def test_mine():\n    assert False\n")
    return pytester


@pytest.mark.parametrize("case", HOSTILE)
def test_their_settings_do_not_matter(project: pytest.Pytester, case: str) -> None:
    for name, text in HOSTILE[case].items():
        (project.path / name).write_text(text)
    threads = torch.get_num_threads()
    # torch warns when it is imported, and pytest of modules that an earlier test imported: only a process tells
    run = project.runpytest_subprocess if case == "warnings-as-errors" else project.runpytest_inprocess
    result = run("--attn-impl=right.attn", SCALES, "-p", "no:cacheprovider")
    assert held(result)
    assert result.ret == 0
    assert torch.get_num_threads() == threads


def test_a_fixture_of_another_plugin_does_not_replace_ours(project: pytest.Pytester) -> None:
    project.makepyfile(theirs="import pytest\n@pytest.fixture\ndef attention():\n    return max\n")
    project.syspathinsert()
    result = project.runpytest_inprocess("--attn-impl=right.attn", SCALES, "-p", "theirs")
    assert held(result)


def test_why_nothing_could_be_collected_is_said(project: pytest.Pytester) -> None:
    project.makepyfile(theirs="def pytest_generate_tests(metafunc):\n    raise RuntimeError('a reason of theirs')\n")
    result = project.runpytest_subprocess("--attn-impl=right.attn", "-p", "theirs", SCALES.partition("::")[0])
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*ERROR *test_scaling*", "*RuntimeError: a reason of theirs*"])


def test_node_ids_do_not_depend_on_the_project(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run from a folder below the root, a node id selects one check, and what the reports call it is the same."""
    (project.path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(project.path / "tests")
    one = f"{SCALES}[attn-B1-H3-S4-D4-f32]"
    options = ("--attn-impl=../right.py:attn", "--attn-json=out.json", "-q")
    for argument in (one, f"../{one}", one.removeprefix("attn_spec/")):
        project.runpytest_inprocess(*options, argument).assert_outcomes(passed=1)
        data = json.loads(Path("out.json").read_text())
        assert [check["nodeid"] for check in data["implementations"][0]["checks"]] == [one]


def test_their_tests_are_not_collected_and_that_is_said(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--attn-impl=right.attn", "tests", "-k", "default_scale")
    assert held(result)
    result.stdout.fnmatch_lines(["not collected, for a judged run holds attn-spec's own: tests"])


def test_a_suite_that_does_not_exist_is_a_usage_error(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--attn-impl=right.attn", "attn_spec/suites/test_scalin.py")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*did you mean suites/test_scaling.py?*"])
    result = project.runpytest_inprocess("--attn-impl=right.attn", f"{SCALES}[nobody-B1]")
    assert result.ret == 4


def test_nothing_checked_exits_5(project: pytest.Pytester) -> None:
    """Neither a selection without checks nor an implementation that can do none of them is green."""
    result = project.runpytest_inprocess("--attn-impl=right.attn", "-k", "no_such_check")
    assert result.ret == 5
    result = project.runpytest_inprocess("--attn-impl=right.attn", "-k", "explicit_scale", "--attn-json=out.json")
    assert result.ret == 5
    result.stdout.fnmatch_lines(["0 of * checks ran: * not supported (no scale parameter*", "*nothing was checked*"])
    assert json.loads(Path("out.json").read_text())["implementations"][0]["verdict"] == "error"


def test_several_implementations_are_judged_side_by_side(project: pytest.Pytester) -> None:
    """Each has its own section and verdict; one that fails makes the run red."""
    result = project.runpytest_inprocess(
        "--attn-impl=right.attn", "--attn-impl=wrong.attn", "--attn-json=out.json", SCALES
    )
    assert result.ret == 1
    assert len(result.parseoutcomes()) > 1
    one, two = json.loads(Path("out.json").read_text())["implementations"]
    assert (one["name"], one["verdict"], two["name"], two["verdict"]) == (
        "right.attn",
        "passed",
        "wrong.attn",
        "failed",
    )
    assert {check["nodeid"].partition("[")[2].partition("-")[0] for check in one["checks"]} == {"right.attn"}


def test_first_failure_stops_and_the_rest_is_not_run(project: pytest.Pytester) -> None:
    """-x counts what it left out; --lf then runs what failed and nothing else."""
    result = project.runpytest_inprocess("--attn-impl=wrong.attn", "-x", SCALES)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"1 of {CHECKS} checks ran: {CHECKS - 1} not run"])
    again = project.runpytest_inprocess("--attn-impl=wrong.attn", "--lf", SCALES)
    again.assert_outcomes(failed=1, deselected=CHECKS - 1)
    again.stdout.fnmatch_lines(["1 of 1 checks ran"])


def test_junit_xml_names_the_law(project: pytest.Pytester) -> None:
    project.runpytest_inprocess("--attn-impl=wrong.attn", "--junitxml=out.xml", SCALES)
    text = Path("out.xml").read_text()
    assert f'tests="{CHECKS}"' in text
    assert '<property name="law" value="ATN301 default-scale"' in text
    assert "'evidence'" not in text
    assert "the measured scale is 1" in text


def test_tracebacks_are_there_when_asked_for(project: pytest.Pytester) -> None:
    arguments = ("--attn-impl=wrong.attn", f"{SCALES}[attn-B1-H3-S4-D4-f32]")
    assert "= FAILURES =" not in project.runpytest_inprocess(*arguments).stdout.str()
    assert "= FAILURES =" in project.runpytest_inprocess(*arguments, "--tb=short").stdout.str()


def test_without_our_options_a_fixture_of_theirs_is_judged(project: pytest.Pytester) -> None:
    """Door 3: a suite imported into a test file; without an override it says what to do."""
    test = project.makepyfile(test_door="from attn_spec.suites.test_scaling import test_default_scale\n")
    result = project.runpytest_inprocess(test)
    result.assert_outcomes(errors=CHECKS)
    result.stdout.fnmatch_lines(["*nothing is judged: give --attn-impl=TARGET, or override the fixture*"])
    override = "\nimport pytest, right\n@pytest.fixture\ndef attention():\n    return right.attn\n"
    test.write_text(test.read_text() + override)
    project.syspathinsert()
    assert held(project.runpytest_inprocess(test))


# in a process of their own -------------------------------------------------------------------------------------------


def child(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_xdist_gives_the_same_outcomes_and_one_json(project: pytest.Pytester) -> None:
    common = ("--attn-impl=wrong.attn", "--attn-impl=right.attn", "attn_spec/suites/test_scaling.py")
    alone = project.runpytest_inprocess(*common, "--attn-json=alone.json")
    shared = child(*common, "--attn-json=shared.json", "-n2", cwd=project.path)
    assert shared.returncode == alone.ret == 1
    documents = [json.loads((project.path / f"{name}.json").read_text()) for name in ("alone", "shared")]
    outcomes = [
        [(check["nodeid"], check["outcome"]) for one in document["implementations"] for check in one["checks"]]
        for document in documents
    ]
    assert len(outcomes[0]) > 20
    assert outcomes[0] == outcomes[1]
    assert documents[0]["implementations"][0]["diagnosis"] == documents[1]["implementations"][0]["diagnosis"]


def test_a_plain_run_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import sys\ndef test_mine():\n    assert not {'torch', 'pydantic', 'attn_spec.engine'} & set(sys.modules)\n"
    )
    result = child("-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert result.returncode == 0, result.stdout
    assert "attn-spec 0" not in result.stdout
