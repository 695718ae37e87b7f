"""Functions of flash-attn's whole signature, written without sight of this package: wrong ones and right ones."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "blind"))

import flash_honest
import flash_honest_more
import flash_mutants
import flash_mutants_grad
import flash_mutants_lse
import flash_mutants_more

from attn_spec import check_attention

MUTANTS: dict[str, Callable[..., Any]] = {
    **flash_mutants.MUTANTS,
    **flash_mutants_lse.MUTANTS,
    **flash_mutants_more.MUTANTS,
    **flash_mutants_grad.MUTANTS,
}
HONEST: dict[str, Callable[..., Any]] = {**flash_honest.HONEST, **flash_honest_more.HONEST}
# what a user would declare, where the names do not say it
DECLARED: dict[str, dict[str, str]] = {
    "torch_names_bottom_right": {"alignment": "bottom-right", "window_alignment": "bottom-right"},
    "sdpa_sliding_window": {"causal": "always", "alignment": "bottom-right", "window": "count"},
}
# what is not red, and why
NOT_RED: dict[str, str] = {}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_red(name):
    report = check_attention(MUTANTS[name], exitfirst=True, **DECLARED.get(name, {}))
    if name in NOT_RED:
        assert report.verdict == "passed", f"{name} is red now: take it off the list"
    else:
        assert report.verdict == "failed", f"{name} gets through: {MUTANTS[name].__doc__}"


@pytest.mark.parametrize("name", sorted(HONEST))
def test_honest_is_left_alone(name):
    report = check_attention(HONEST[name], **DECLARED.get(name, {}))
    assert report.passed, str(report)
