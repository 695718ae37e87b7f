"""What torch itself is known to do on a CPU, which the checks must see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import check_attention
from attn_spec.faults import named
from attn_spec.faults.planted import planted


@pytest.mark.parametrize("strict", [False, True])
def test_nan_at_a_hidden_value_leaks_in_sdpa(strict: bool) -> None:
    report = check_attention(F.scaled_dot_product_attention, laws=["ATN509"], strict=strict)
    assert report.passed is not strict
    assert {r.outcome for r in report.results} == {"failed" if strict else "known-failure"}
    assert all("NaN at the hidden keys" in r.message for r in report.results)


def test_sdpa_takes_keys_and_values_of_different_lengths() -> None:
    def sdpa(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    report = check_attention(sdpa, laws=["ATN109"])
    taken = [r.message for r in report.results if r.outcome == "known-failure"]
    assert report.passed
    assert any("than v" in message or "than k" in message for message in taken), taken


def test_a_row_without_keys_is_nan_in_multihead_attention_where_weights_are_asked_for() -> None:
    report = check_attention(nn.MultiheadAttention, laws=["ATN214"], strict=True)
    assert [r.outcome for r in report.results] == ["failed"]
    assert "is nan" in report.results[0].message
    assert check_attention(nn.MultiheadAttention, laws=["ATN214", "ATN211"]).passed


def guarded(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, need_weights: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Zeros for a row without keys, whether weights are asked for or not."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.zeros_like(s, dtype=torch.bool) if attn_mask is None else ~attn_mask.expand_as(s)
    empty = hidden.all(-1, keepdim=True)
    p = s.masked_fill(hidden & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0)
    return (p @ v, p) if need_weights else p @ v


def filled(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, return_weights: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The mean of all values for such a row."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = s if mask is None else s.masked_fill(~mask, torch.finfo(s.dtype).min)
    return (s.softmax(-1) @ v, s.softmax(-1)) if return_weights else s.softmax(-1) @ v


@pytest.mark.parametrize("attention", [guarded, filled, planted(None)])
def test_right_weights_of_empty_rows_are_left_alone(attention: Any) -> None:
    declared = {"empty_rows": "mean"} if attention is filled else {}
    report = check_attention(attention, laws=["ATN214"], strict=True, **declared)
    assert [r.outcome for r in report.results] == ["passed"], str(report)


def test_the_fault_is_caught() -> None:
    report = check_attention(planted(named("empty-rows-nan")), laws=["ATN214"], strict=True)
    assert not report.passed
