"""What a find becomes: a few lines of YAML that are kept, run first next time, and run alone on demand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attn_spec import cli, finds
from attn_spec.finds import Find, FindError
from attn_spec.invariants import numerics
from attn_spec.masks import Causal, Delivery, Visible
from attn_spec.problem import Problem

pytest_plugins = ["pytester"]

RIGHT = """
def attn(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
"""
WRONG = RIGHT.replace("q.shape[-1] ** -0.5", "(q.shape[-1] ** -0.5 if k.shape[2] % 13 else 0.3)")
FUZZED = "attn_spec/suites/test_fuzz.py::test_fuzzed"
PROBLEM = Problem(kv_len=13)
HERE = "--attn-timeout=0"


def find(problem: Problem = PROBLEM, **others: str) -> Find:
    return Find(numerics.fuzzed, problem, **{"fingerprint": problem.fingerprint(), "found_in": "wrong.attn", **others})


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(right=RIGHT, wrong=WRONG)
    return pytester


def test_a_find_is_written_and_read(tmp_path: Path) -> None:
    masked = Problem(mask=(Causal(), Visible("HQK", empty_rows=(1,))), delivery=Delivery("additive", "1HQK"))
    for problem in (PROBLEM, masked):
        path = find(problem).write(tmp_path / "kept")
        again = finds.read(path)
        assert (again.law, again.problem, again.changed) == (numerics.fuzzed, problem, False)
        assert path == find(problem, found_in="another").write(tmp_path / "kept")  # one file for a law and a problem
    assert len(finds.read_all([tmp_path / "kept", path])) == 2


@pytest.mark.parametrize(
    "text, said",
    [
        ("law: [", "can't be read"),
        ("- 1", "expected a mapping"),
        ("law: ATN803\n", "problem: missing"),
        ("problem: {}\n", "law: missing"),
        ("law: ATN999\nproblem: {}\n", "law: 'ATN999' is the code or name of no law"),
        ("law: fuzzd\nproblem: {}\n", "did you mean fuzzed"),
        ("law: ATN803\nproblem: 3\n", "problem: expected a mapping"),
        ("law: ATN803\nproblem: {q_lenn: 3}\n", "problem: q_lenn"),
        ("law: ATN803\nproblem: {q_len: many}\n", "problem: "),
        ("law: ATN803\nproblem: {heads: 3}\n", "problem: kv_heads"),
        ("law: ATN803\nproblem: {}\nwhen: now\n", "when: not a key of a find"),
    ],
)
def test_a_damaged_file_is_a_usage_error(project: pytest.Pytester, text: str, said: str) -> None:
    path = project.path / "find.yaml"
    path.write_text(text)
    with pytest.raises(FindError, match=said):
        finds.read(path)
    result = project.runpytest_inprocess("--attn-impl=right.attn", HERE, "--attn-replay=find.yaml")
    assert result.ret == 4
    assert f"{path}: " in result.stderr.str()


def test_what_fuzzing_finds_is_kept_and_run_first(project: pytest.Pytester) -> None:
    """In a project that has the folder; the next run fails on it before anything else, and names it."""
    folder = project.mkdir("attn-finds")
    first = project.runpytest_inprocess("--attn-impl=wrong.attn", HERE, FUZZED)
    assert first.ret == 1
    (kept,) = folder.iterdir()
    first.stdout.fnmatch_lines([f"kept in {kept}*"])
    assert finds.read(kept).problem.kv_len % 13 == 0
    again = project.runpytest_inprocess("--attn-impl=wrong.attn", HERE, "-x", "--attn-json=out.json")
    assert again.ret == 1
    checks = json.loads((project.path / "out.json").read_text())["implementations"][0]["checks"]
    assert [c["outcome"] for c in checks[:2]] == ["failed", "not-run"]
    assert checks[0]["nodeid"].startswith("attn_spec/suites/test_replay.py::test_replay[attn-ATN803-")
    assert checks[0]["reproducer"]
    assert [path.name for path in folder.iterdir()] == [kept.name]
    right = project.runpytest_inprocess("--attn-impl=right.attn", HERE, "attn_spec/suites/test_replay.py")
    right.assert_outcomes(passed=1)


def test_nothing_is_written_where_there_is_no_folder(project: pytest.Pytester) -> None:
    before = {path.name for path in project.path.iterdir()}
    common = ("--attn-impl=wrong.attn", HERE, FUZZED, "-p", "no:cacheprovider")
    project.runpytest_inprocess(*common)
    assert {path.name for path in project.path.iterdir()} - before <= {"__pycache__", ".benchmarks"}
    project.runpytest_inprocess(*common, "--attn-finds=elsewhere")
    assert [path.suffix for path in (project.path / "elsewhere").iterdir()] == [".yaml"]


def test_replay_runs_what_it_is_given_and_nothing_else(project: pytest.Pytester) -> None:
    one = find().write(project.path / "a")
    find(PROBLEM.replace(kv_len=9)).write(project.path / "b")
    result = project.runpytest_inprocess("--attn-impl=wrong.attn", HERE, f"--attn-replay={one}")
    result.assert_outcomes(failed=1)
    assert result.ret == 1
    both = project.runpytest_inprocess(
        "--attn-impl=wrong.attn", "--attn-impl=right.attn", HERE, "--attn-replay=a", "--attn-replay=b", "--attn-seed=3"
    )
    both.assert_outcomes(failed=1, passed=3)
    assert project.runpytest_inprocess("--attn-impl=right.attn", HERE, "--attn-replay=gone.yaml").ret == 4
    assert project.runpytest_inprocess("--attn-replay=a").ret == 4


def test_other_numbers_than_those_of_the_find_are_reported(project: pytest.Pytester) -> None:
    path = find(fingerprint="0123456789abcdef").write(project.path)
    result = project.runpytest_inprocess("--attn-impl=wrong.attn", HERE, f"--attn-replay={path}")
    result.stdout.fnmatch_lines(["*the inputs are not those it was found on*"])


def test_on_the_command_line(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.syspathinsert()
    path = str(find().write(project.path))
    assert cli.main(["replay", path]) == 1
    said = capsys.readouterr().out
    assert "ATN803 fuzzed" in said
    assert "kv_len: 13" in said
    assert "attn: failed: output" in said
    assert "from wrong import attn as impl" in said
    assert cli.main(["replay", path, "--attn-impl=right.attn"]) == 0
    assert "attn: passed" in capsys.readouterr().out
    assert cli.main(["replay", "gone.yaml"]) == 4
