"""Attention with dropout, written without sight of this package: wrong ones are red, right ones are left alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "blind"))

import dropout_honest
import dropout_mutants

from attn_spec import check_attention

MUTANTS = dropout_mutants.MUTANTS
HONEST = dropout_honest.HONEST
LAWS = ["randomness", "ATN101", "ATN1202"]
# what is not red, and why
NOT_RED: dict[str, str] = {}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_red(name):
    report = check_attention(MUTANTS[name], laws=LAWS, exitfirst=True, **dropout_mutants.DECLARED.get(name, {}))
    if name in NOT_RED:
        assert report.verdict == "passed", f"{name} is red now: take it off the list"
    else:
        assert report.verdict == "failed", f"{name} gets through: {MUTANTS[name].__doc__}"


@pytest.mark.parametrize("name", sorted(HONEST))
def test_honest_is_left_alone(name):
    report = check_attention(HONEST[name], laws=LAWS)
    assert report.passed, str(report)
    assert report.counts["passed"] >= 12
