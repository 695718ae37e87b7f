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
NOT_RED = {
    "NeverDrops": "a rate that nothing heeds is an advisory, red under strict",
    "SwappedRates": "a module has one rate for the checks, which they give to each dropout of its constructor",
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_red(name):
    report = check_attention(MUTANTS[name], laws=LAWS, exitfirst=True, **dropout_mutants.DECLARED.get(name, {}))
    if name in NOT_RED:
        assert report.verdict == "passed", f"{name} is red now: take it off the list"
    else:
        assert report.verdict == "failed", f"{name} gets through: {MUTANTS[name].__doc__}"


def test_a_module_that_drops_nothing_is_told_so():
    declared = dropout_mutants.DECLARED["NeverDrops"]
    report = check_attention(MUTANTS["NeverDrops"], laws=["ATN1101"], **declared)
    told = [r for r in report.results if r.outcome == "known-failure"]
    assert told
    assert all("the weights are those without dropout" in r.message for r in told)
    assert check_attention(MUTANTS["NeverDrops"], laws=["ATN1101"], strict=True, **declared).verdict == "failed"


@pytest.mark.parametrize("name", sorted(HONEST))
def test_honest_is_left_alone(name):
    report = check_attention(HONEST[name], laws=LAWS)
    assert report.passed, str(report)
    assert report.counts["passed"] >= 12
