"""Modules written without sight of this package: those with a bug are red, the right ones are left alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "blind"))

import module_honest
import module_mutants
import module_mutants_more

from attn_spec import check_attention

MUTANTS = {**module_mutants.MUTANTS, **module_mutants_more.MUTANTS}
DECLARED = {**module_mutants.DECLARED, **module_mutants_more.DECLARED, **module_honest.DECLARED}
# what is not red, and why
NOT_RED = {
    "WeightsAfterDropout": "in training, what made the output holds its dropout; torch's own module gave it so too",
}


def declared(name: str) -> dict[str, str]:
    """What a user would declare; "allowed" is this package's "attend"."""
    return {key: "attend" if value == "allowed" else value for key, value in DECLARED.get(name, {}).items()}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_red(name):
    report = check_attention(MUTANTS[name], exitfirst=True, **declared(name))
    if name in NOT_RED:
        assert report.verdict == "passed", f"{name} is red now: take it off the list"
    else:
        assert report.verdict == "failed", f"{name} gets through: {MUTANTS[name].__doc__}"


@pytest.mark.parametrize("name", sorted(module_honest.HONEST))
def test_honest_is_left_alone(name):
    report = check_attention(module_honest.HONEST[name], **declared(name))
    assert report.passed, str(report)
    assert report.counts["passed"] > 100
