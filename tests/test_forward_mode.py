"""Forward-mode derivatives: a wrong one is caught and named, right ones and missing ones are left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from attn_spec import check_attention
from attn_spec.faults import behaviour
from attn_spec.reference.scratch.naive import naive
from attn_spec.reference.scratch.variants import variants
from attn_spec.tangent_blocks import attention_with_tangents


def by_math(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("attention", [attention_with_tangents(), naive, variants, by_math])
def test_a_right_one_is_left_alone(attention: Callable[..., Any]) -> None:
    report = check_attention(attention, laws=["ATN914"])
    assert report.passed, str(report)
    assert report.counts["passed"] >= 1


def test_a_wrong_output_is_not_taken_for_a_wrong_tangent() -> None:
    report = check_attention(lambda q, k, v: naive(q, 2 * k, v), laws=["ATN301", "ATN914"])
    assert {r.code for r in report.results if r.outcome == "failed"} == {"ATN301"}


def test_a_missing_one_is_no_failure() -> None:
    report = check_attention(F.scaled_dot_product_attention, laws=["ATN914"])
    assert {r.outcome for r in report.results} == {"unsupported"}
    assert "no forward-mode derivative" in report.results[0].message


@pytest.mark.parametrize("fault", [one for one in behaviour.load().values() if one.told_by == "forward-mode"])
def test_a_fault_is_caught_and_named(fault: behaviour.BehaviourFault) -> None:
    report = check_attention(attention_with_tangents(fault.blocks), laws=["ATN101", "ATN914"])
    assert {r.code for r in report.results if r.outcome == "failed"} == {"ATN914"}
    assert list(report.diagnosis) == [fault.id], str(report)


def test_a_tangent_that_is_lost_on_the_way_is_caught() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None) -> Tensor:
        with forward_ad._set_fwd_grad_enabled(False):
            return by_math(q, k, v, is_causal, scale)

    report = check_attention(attention, laws=["ATN914"])
    assert any("and no tangent" in r.message for r in report.results if r.outcome == "failed"), str(report)
