"""What a run says: the diagnosis first, then each violation once, then how much was looked at; and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attn_spec import check_attention
from attn_spec.adapters.adapt import adapt
from attn_spec.engine import CheckResult, KnownFailure
from attn_spec.faults import CATALOGUE
from attn_spec.faults.diagnosis import Diagnosis
from attn_spec.problem import Problem
from attn_spec.report import terminal
from attn_spec.report.judgement import Judgement, count_line

pytest_plugins = ["pytester"]

SMALL = Problem(batch=1, heads=2, kv_heads=2, q_len=3, kv_len=3, head_dim=4, v_dim=4)
SCALE = {"code": "ATN301", "name": "default-scale", "title": "The default scale is 1/sqrt(d_k) of one head"}
MASK = {"code": "ATN501", "name": "mask-polarity", "title": "True means what is declared"}
WRONG = """
import torch

def attn(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v

def broken(q, k, v):
    raise KeyError("forgotten")
"""


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process for each implementation: it would import torch."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "--attn-timeout=0")


def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT, -1) @ v


def judgement() -> Judgement:
    """Two violations that are one fact, one that is another, and one check of every other outcome."""
    large = SMALL.replace(q_len=8, kv_len=8)
    results = [
        CheckResult(**SCALE, outcome="failed", problem=large, message="the scale is 1", merge="scale:1"),
        CheckResult(**SCALE, outcome="failed", problem=SMALL, message="the scale is 1", merge="scale:1", hint="scale"),
        CheckResult(**MASK, outcome="failed", problem=SMALL, message="key 1 is hidden"),
        CheckResult(**SCALE, outcome="passed", problem=SMALL),
        CheckResult(**MASK, outcome="refused", problem=large, message="gqa: TypeError: size 6"),
        CheckResult(**MASK, outcome="refused", problem=SMALL, message="gqa, d_v: TypeError: size 4"),
        CheckResult(**MASK, outcome="unsupported", problem=SMALL, message="no mask parameter"),
        CheckResult(**MASK, outcome="known-failure", problem=SMALL, message="kernel gives NaN: key 1 is hidden"),
        CheckResult(**MASK, outcome="known-failure", problem=SMALL, message="advisory (red under `strict: true`): x"),
        CheckResult(**MASK, outcome="not-run", problem=SMALL),
    ]
    nodeids = [f"attn_spec/suites/test_x.py::test_x[wrong-{n}]" for n in range(len(results))]
    made = Judgement(adapt(wrong), results, nodeids, command="pytest --attn-impl=m.wrong")
    found = Diagnosis(CATALOGUE["scale-missing"], 14, 14)
    made.diagnosis = [found]
    made.stale = [KnownFailure("ATN302", "x", "*bf16")]
    return made


def test_the_text() -> None:
    lines = [line.text for line in terminal.lines(judgement())]
    script = [n for n, text in enumerate(lines) if text.startswith("      ") or not text]
    assert [text for n, text in enumerate(lines) if n not in script] == [
        f"DIAGNOSIS: {CATALOGUE['scale-missing'].title}",
        "  scale-missing: reproduces 14/14",
        *[f"    {text}" for text in CATALOGUE["scale-missing"].diff.splitlines()],
        f"  {CATALOGUE['scale-missing'].advice}",
        "ATN301 default-scale: The default scale is 1/sqrt(d_k) of one head",
        "  the scale is 1",
        "  fails 2 of 3; the smallest problem: B1-H2-S3-D4-f32",
        "  what to change: scale",
        "  reproducer:",
        "  again: pytest --attn-impl=m.wrong 'attn_spec/suites/test_x.py::test_x[wrong-1]'",
        "also failed (-v shows them in full):",
        "  ATN501 mask-polarity: 1 of 3: key 1 is hidden",
        "known_failures: the entry ATN302 on '*bf16' meets no check; take it out",
        "known failures:",
        "   1 ATN501 mask-polarity: kernel gives NaN: key 1 is hidden",
        "advisories:",
        "   1 ATN501 mask-polarity: x",
        "refused:",
        "   2 ATN501 mask-polarity: TypeError: size 6",
        "conventions: layout BHSD, layout_out BHSD, causal never (`attn-spec describe` says how each is known)",
        "4 of 10 checks ran: 2 refused, 1 not supported (no mask parameter), 1 known failure, 1 advisory, 1 not run",
        "wrong failed",
    ]


def test_the_count_line_of_a_clean_run() -> None:
    assert count_line([CheckResult(**SCALE, outcome="passed", problem=SMALL)] * 3) == "3 of 3 checks ran"


def test_problems_to_diagnose_are_unique_failing_first_and_capped() -> None:
    problems = [SMALL.replace(q_len=n) for n in range(1, 101)]
    results = [
        CheckResult(**SCALE, outcome="failed" if n % 2 else "passed", problem=p) for n, p in enumerate(problems * 2)
    ]
    chosen = Judgement(adapt(wrong), results).problems_to_diagnose(limit=30)
    assert len(chosen) == len(set(chosen)) == 30
    assert [p.q_len for p in chosen[:3]] == [2, 4, 6]
    assert any(p.q_len % 2 for p in chosen)


def test_the_json_is_the_contract(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(judged=WRONG)
    result = pytester.runpytest_inprocess("--attn-impl=judged.attn", "--attn-json=out.json", "-k", "default_scale")
    assert result.ret == 1
    data = json.loads(Path("out.json").read_text())
    assert {key: data[key] for key in ("schema_version", "profile", "seed")} == {
        "schema_version": 1,
        "profile": "quick",
        "seed": 0,
    }
    assert {"attn_spec_version", "duration_s", "environment"} <= set(data)
    (one,) = data["implementations"]
    assert (one["name"], one["target"], one["verdict"]) == ("attn", "judged.attn", "failed")
    assert one["conventions"]["layout"] == {
        "value": "BHSD",
        "how": "measured",
        "evidence": one["conventions"]["layout"]["evidence"],
    }
    assert one["precision"]["float32"] == {"scores": "float32", "weights": "float32", "accumulate": "float32"}
    assert set(one["counts"]) == {"passed", "failed", "refused", "unsupported", "known-failure", "not-run", "error"}
    assert sum(one["counts"].values()) == len(one["checks"])
    check = next(check for check in one["checks"] if check["outcome"] == "failed")
    assert (check["code"], check["name"]) == ("ATN301", "default-scale")
    assert check["nodeid"].startswith("attn_spec/suites/test_scaling.py::test_default_scale[attn-")
    assert Problem.from_dict(check["problem"])
    assert "from judged import attn as impl" in check["reproducer"]
    assert check["duration_s"] >= 0
    found = one["diagnosis"][0]
    assert found["fault"] in CATALOGUE
    assert {"title", "explains", "reproduces", "diff"} <= set(found)
    assert found["explains"] == ["ATN301"]
    text = result.stdout.str()
    assert text.index("DIAGNOSIS") < text.index("ATN301 default-scale") < text.index("checks ran")


def test_an_entry_of_the_ledger_that_meets_nothing_is_red(pytester: pytest.Pytester) -> None:
    """Only in a whole run, where it can be known."""
    pytester.makefile(
        ".yaml",
        attn="target: sdpa\nknown_failures:\n- {check: ATN301, problem: nothing-*, reason: it was so once}\n",
    )
    result = pytester.runpytest_inprocess("--attn-impl=sdpa", "-q")
    assert result.parseoutcomes()["passed"] > 100
    assert not {"failed", "errors"} & set(result.parseoutcomes())
    assert result.ret == 1
    result.stdout.fnmatch_lines(["known_failures: the entry ATN301 on 'nothing-*' meets no check; take it out"])
    assert pytester.runpytest_inprocess("--attn-impl=sdpa", "-q", "-k", "default_scale").ret == 0


def test_a_known_failure_is_not_red_and_is_listed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(judged=WRONG)
    pytester.makefile(".yaml", attn="known_failures: [{check: default-scale, reason: trained without a scale}]\n")
    result = pytester.runpytest_inprocess("--attn-impl=judged.attn", "-k", "default_scale")
    assert result.ret == 0
    assert set(result.parseoutcomes()) - {"warnings"} == {"xfailed", "skipped", "deselected"}
    result.stdout.fnmatch_lines(["judging attn (judged.attn), declarations of *attn.yaml", "known failures:"])


def test_what_another_plugin_breaks_is_no_verdict(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        judged=WRONG,
        theirs="import pytest\n@pytest.fixture(autouse=True)\ndef broken():\n    raise ValueError('theirs')\n",
    )
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess(
        "--attn-impl=judged.attn", "-p", "theirs", "-k", "default_scale", "--attn-json=out.json"
    )
    assert result.ret == 1
    (one,) = json.loads(Path("out.json").read_text())["implementations"]
    assert one["verdict"] == "error"
    assert one["counts"]["error"] == len(one["checks"]) > 0
    result.stdout.fnmatch_lines(["*ValueError: theirs", "ERROR, which is no verdict*"])


def test_door_2_gives_the_same_results() -> None:
    report = check_attention(wrong, laws=["default-scale"])
    assert (report.verdict, report.passed) == ("failed", False)
    assert "scale-missing" in report.diagnosis
    assert "DIAGNOSIS" in str(report)
    assert report.to_dict()["implementations"][0]["counts"] == report.counts
