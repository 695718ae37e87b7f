"""What an item of a judged run tries: a law, a problem, and the implementation it is tried on."""

from __future__ import annotations

from typing import cast

import pytest

from attn_spec.law import Law
from attn_spec.problem import Problem
from attn_spec.suites.suite import Test


def judged_by(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.params.get("attention", ""))


def check_of(item: pytest.Item) -> tuple[Law, Problem]:
    """The law and the problem that an item of ours tries."""
    test, problem = cast(Test, item.function), item.callspec.params["problem"]  # type: ignore[attr-defined]
    return test.law_of(problem), problem


def replays(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "function", None), "replays", False))
