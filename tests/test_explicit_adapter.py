"""docs/adapters.md: the adapter that it shows works as it stands, and notices what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from attn_spec import Implementation

pytest_plugins = ["pytester"]

TEXT = (Path(__file__).parents[1] / "docs" / "adapters.md").read_text(encoding="utf-8")
CLASS, FIXTURE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[:2]


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_it_passes(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(CLASS)
    assert isinstance(names["packed"], Implementation)
    assert names["report"].passed
    assert names["report"].counts["passed"] > 100
    assert "packed passed" in capsys.readouterr().out


def test_what_is_wrong_is_red() -> None:
    wrong = CLASS.replace(".triu(1)", ".triu(2)")
    assert wrong != CLASS
    report = run(wrong)["report"]
    assert report.verdict == "failed"
    assert "impl(torch.stack((q, k, v), dim=2).transpose(1, 3), True).transpose(1, 2)" in str(report)


def test_the_fixture_takes_it(pytester: pytest.Pytester) -> None:
    without_run = CLASS.partition("report = ")[0]
    pytester.makepyfile(test_adapter_of_ones_own=without_run + FIXTURE)
    outcomes = pytester.runpytest("-q").parseoutcomes()
    assert outcomes["passed"] > 5
    assert not outcomes.get("failed")
    assert not outcomes.get("errors")
