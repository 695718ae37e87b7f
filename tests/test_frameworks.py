"""The adapters of examples/frameworks, and what functions of other frameworks need to be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import adapt, check_attention
from attn_spec.config import load
from attn_spec.masks import Bias, Causal, Delivery, Visible, Window
from attn_spec.problem import Problem

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["numpy", "onnx"])
def test_an_example_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = dict(load(ROOT / "examples/frameworks/attn.yaml").implementations)[name]
    assert entry.target is not None
    monkeypatch.chdir(ROOT)
    declared = entry.model_dump(exclude_unset=True, by_alias=True, exclude={"target"})
    report = check_attention(entry.target, profile="quick", **declared)
    assert report.passed, str(report)
    assert report.counts["passed"] > 200


def with_bias_apart(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """What is added in one parameter, what is hidden in another, which is read as bool whatever comes."""
    added = torch.zeros(q.shape[-2], k.shape[-2], dtype=q.dtype) if bias is None else bias
    if mask is not None:
        added = added.masked_fill(~mask.bool(), -torch.inf)
    if is_causal:
        added = added.masked_fill(torch.ones(q.shape[-2], k.shape[-2]).triu(1).bool(), -torch.inf)
    return F.scaled_dot_product_attention(q, k, v, added, enable_gqa=True)


def without_bias(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    return with_bias_apart(q, k, v, None if mask is not None else bias, mask, is_causal)


def test_a_bias_goes_to_its_own_parameter_beside_a_bool_mask() -> None:
    made = adapt(with_bias_apart, declared={"mask_form": "bool"})
    problem = Problem(mask=(Visible("BHQK"), Bias("HQK")), delivery=Delivery("additive"))
    arguments = problem.arguments()
    _, given = made.adapter.call_arguments(arguments)  # type: ignore[attr-defined]
    assert torch.equal(given["mask"], arguments.mask != -torch.inf)
    assert bool(given["bias"].isfinite().all())
    source = made.adapter.source(arguments)
    assert "bias=mask.masked_fill(mask == -torch.inf, 0.0)" in source
    assert "mask=mask != -torch.inf" in source
    codes = ["ATN502", "ATN503", "ATN504", "ATN505", "ATN507", "ATN510", "ATN904"]
    report = check_attention(with_bias_apart, laws=codes, mask_form="bool")
    assert report.passed, str(report)
    assert {r.code for r in report.results if r.outcome == "passed"} == set(codes)
    assert not check_attention(without_bias, laws=codes, mask_form="bool").passed


def local(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, local_window_size: Any = None) -> Tensor:
    """A window of jax: (left, right), in which -1 is a number and no sign for all."""
    ahead = torch.arange(k.shape[-2]) - torch.arange(q.shape[-2])[:, None]
    seen = torch.ones_like(ahead).bool() if not is_causal else ahead <= 0
    if local_window_size is not None:
        left, right = local_window_size
        seen = seen & (ahead >= -left) & (ahead <= right)
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


def test_a_window_of_jax_without_a_bound_is_one_beyond_all_keys() -> None:
    made = adapt(local)
    assert made.conventions.window.value == "pair"
    _, given = made.adapter.call_arguments(Problem(mask=(Window(3, None), Causal())).arguments())  # type: ignore[attr-defined]
    assert given["local_window_size"] == (3, 14)
    report = check_attention(local, laws=["ATN701", "ATN702", "ATN703", "ATN704", "ATN705"])
    assert report.passed, str(report)
