"""More modules written without sight of this package: wrong ones are red, right ones are left alone."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "blind"))

import module_honest_later
import module_mutants_later

from attn_spec import check_attention

HONEST, MUTANTS = module_honest_later.HONEST, module_mutants_later.MUTANTS
DECLARED = {"t5": {"scale": 1}}  # its logits are not scaled, which no name says
# what is not judged: its forward takes as many tokens as its window has, whatever the problem
NOT_TAKEN = "swin_window"
# what is not red, and why
NOT_RED = {
    "partial_rotary_width": "a rotation by other frequencies is one",
    "mla_scale_nope": "keys and values that are compressed leave no q, k and v to compare with: a black box",
    "swin_mask_order": "it shows where the windows of an image have masks [windows, N, N], which nobody asks for",
    "alibi_naive_slopes": "slopes of heads that are no power of two are an advisory",
}


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_red(name):
    report = check_attention(MUTANTS[name], exitfirst=True)
    if name in NOT_RED:
        assert report.verdict == "passed", f"{name} is red now: take it off the list"
    else:
        assert report.verdict == "failed", f"{name} gets through: {MUTANTS[name].__doc__}"


@pytest.mark.parametrize("name", sorted(set(HONEST) - {NOT_TAKEN}))
def test_honest_is_left_alone(name):
    report = check_attention(HONEST[name], dtypes=("float32", "bfloat16"), **DECLARED.get(name, {}))
    assert report.passed, str(report)
    assert report.counts["passed"] > 20
