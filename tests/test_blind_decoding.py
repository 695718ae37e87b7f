"""Attention for decoding, written without sight of this package: wrong functions and modules, and right ones."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "blind"))

import decoding_honest
import decoding_mutants

from attn_spec import adapt, check_attention
from attn_spec.adapters.signature import TargetError

MUTANTS: dict[str, Callable[..., Any]] = decoding_mutants.MUTANTS
HONEST: dict[str, Callable[..., Any]] = decoding_honest.HONEST
LAWS = ("decoding", "modules", "causality", "weights", "variants", "scaling", "ATN751", "ATN911")
# what is not red, and why
NOT_RED = {
    "TupleAttentionSharedBuffer": "one sequence goes on from each cache: what two do to each other is not asked",
    "SlotsMaskedByLongest": "all rows of a batch are decoded at the same positions",
}
# what can't be called, and what it asks for
ASKS = {
    **dict.fromkeys(("kvcache_rotary_keys_from_zero", "kvcache_rotary_query_constant"), "rotary_cos"),
    **dict.fromkeys(("kvcache_rotary_query_late",), "rotary_cos"),
}


def verdict_of(name):
    """The laws of decoding come first: they catch most of them."""
    implementation = adapt(MUTANTS[name], name=name)
    report = check_attention(implementation, exitfirst=True, laws=LAWS[:1])
    if report.verdict != "failed":
        report = check_attention(implementation, exitfirst=True, laws=LAWS)
    return report.verdict


@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(ASKS)))
def test_mutant_is_red(name):
    if name in NOT_RED:
        assert verdict_of(name) == "passed", f"{name} is red now: take it off the list"
    else:
        assert verdict_of(name) == "failed", f"{name} gets through: {MUTANTS[name].__doc__}"


@pytest.mark.parametrize("name", sorted(set(HONEST) - set(ASKS)))
def test_honest_is_left_alone(name):
    report = check_attention(HONEST[name], laws=LAWS)
    assert report.passed, str(report)
    assert report.counts["passed"] > 8


@pytest.mark.parametrize("name", sorted(ASKS))
def test_what_is_required_is_named(name):
    with pytest.raises(TargetError, match=ASKS[name]):
        check_attention({**MUTANTS, **HONEST}[name], laws=LAWS)
