"""What a report says first, where several things are wrong or no fault of the catalogue explains them."""

import itertools

import pytest
import torch
from torch import Tensor

from attn_spec import check_attention


def answer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Attention as it should be, with a mask that is bool or added, and aligned to the top left where causal."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        s = s + mask if mask.is_floating_point() else s.masked_fill(~mask, -torch.inf)
    return s.softmax(-1).nan_to_num(0.0) @ v


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_all_in_a_half_type(half):
    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        mask = attn_mask.to(half) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
        return answer(q.to(half), k.to(half), v.to(half), mask, is_causal).to(q.dtype)

    report = check_attention(attention)
    assert report.diagnosis == [f"computed-in-{str(half).removeprefix('torch.')}"], str(report)


def test_a_call_that_differs_from_the_last():
    calls = itertools.count()

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        out = answer(q, k, v, None, is_causal)
        return out.fill_(torch.nan) if next(calls) % 7 == 6 else out

    report = check_attention(attention)
    assert report.diagnosis == []
    assert report.judgement.headline.startswith(("A second call is independent", "The same call gives the same output"))


def test_what_one_law_tells_does_not_stand_for_all():
    """Memory that nobody wrote: wrong on every problem, and in threads too."""

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        return torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype)

    report = check_attention(attention)
    assert report.counts["failed"] > 100
    assert report.diagnosis == []


def test_extreme_inputs_say_little_where_plain_ones_fail():
    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return 1.01 * answer(q, k, v, attn_mask, is_causal)

    report = check_attention(attention)
    first = report.judgement.telling
    assert first is not None
    assert first.first.code not in ("ATN518", "ATN802", "ATN804")
