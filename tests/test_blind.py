"""Functions written without sight of the suites and the faults: the honest are left alone, the wrong ones are caught.

`blind/mutants.py` and `blind/mutants_more.py` hold wrong functions, each with the public report or the idea that it
comes from; `blind/honest.py` and `blind/honest_more.py` right ones in many styles. They import nothing of this package.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "blind"))

import honest
import honest_more
import mutants
import mutants_more

from attn_spec.adapters.adapt import adapt
from attn_spec.engine import CheckResult, Subject
from attn_spec.invariants.gradients import empty_row_gradients
from attn_spec.plugin import problems_left
from attn_spec.suites import all_tests
from attn_spec.suites import test_gradients as gradient_suite

HONEST = {**honest.HONEST, **honest.HONEST_SMALL, **honest_more.HONEST}
MUTANTS = {**mutants.MUTANTS, **mutants_more.MUTANTS}

# wrong by their author's lights, and not red by ours, with the reason
NOT_RED = {
    "mask_must_be_full": "raises on an optional axis, a mask's rank: a refusal",
    "no_empty_batch": "raises on an optional axis, zero sizes: a refusal",
    "zero_keys_raise": "raises on an optional axis, zero sizes: a refusal",
    "sdp_four_axes_only": "raises on an optional axis, a mask's rank: a refusal",
    "fa_flat_view": "raises on an optional axis, strides: a refusal",
    "wide_fill_constant": "raises on a dtype with a mask, in torch's own words: a fill of -1e9 has no float16",
    "scores_rounded": "scores rounded to the input's dtype are a precision, which is reported",
    "sdp_narrow_scores": "scores rounded to the input's dtype are a precision, which is reported",
    "sdp_half_softmax": "a softmax in the input's dtype is a precision, which is reported",
    "fa_single_precision": "float32 inside a float64 function is a precision, which is reported",
    "fa_causal_fill": "a fill of -1e4 is advisory: many libraries have it (red when strict)",
    "fa_half_product": "products beyond the range of float16 are advisory (red when strict)",
}

# right forwards, and none of them guards the way back: 0/0 in a row with no visible key is NaN in every dK
NAN_BACKWARDS = (
    "sdp_keys_by_length",
    "sdp_double_softmax",
    "sdp_softmax_dtype",
    "sdp_mapped_heads",
    "sdp_scale_in_keys",
    "sdp_keys_down",
)


def first_red(function: Callable[..., Any], name: str) -> CheckResult | None:
    """The first check of `quick` that is red; those that are quick to tell come first, random problems last."""
    subject = Subject(adapt(function, name=name))
    order = {"test_combinations": 0, "test_masking": 0, "test_fuzz": 2}
    tests = sorted(all_tests(), key=lambda found: order.get(found[0], 1))
    for _, test_name, test in tests:
        for problem in problems_left(test, profile="quick"):
            result = test.judge(subject, problem, test_name)
            if result.red:
                return result
    return None


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in NOT_RED])
def test_a_wrong_function_is_caught(name: str) -> None:
    torch.manual_seed(0)
    result = first_red(MUTANTS[name].function, name)
    assert result is not None, MUTANTS[name].says
    assert result.outcome == "failed", result.message


@pytest.mark.parametrize("name", list(HONEST))
def test_a_right_function_is_left_alone(name: str) -> None:
    result = first_red(HONEST[name], name)
    assert result is None, f"{result.code} on {result.problem}: {result.message}"


@pytest.mark.parametrize("name", NAN_BACKWARDS)
def test_nan_on_the_way_back_is_told(name: str) -> None:
    subject = Subject(adapt(HONEST[name], name=name))
    results = [
        subject.judge(empty_row_gradients, problem)
        for problem in gradient_suite.test_empty_row_gradients.problems("quick")
    ]
    assert any(r.outcome == "known-failure" and "not finite" in r.message for r in results)


def test_the_exceptions_are_known_by_name() -> None:
    assert set(NOT_RED) <= set(MUTANTS)
