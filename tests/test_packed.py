"""Functions of packed sequences, judged as functions of padded ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_spec import adapt, check_attention
from attn_spec.masks import Causal, Lengths
from attn_spec.problem import Problem
from attn_spec.reference.scratch.variants import variants


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Each sequence by itself: q [total_q, H, D] -> [total_q, H, D], and the log-sum-exp [H, total_q]."""
    outs, sums = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(q.shape[1], 0, dtype=torch.float32)]
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        one = (q[a:b][None], k[c:d][None], v[c:d][None])
        out, lse, _ = variants(*one, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)
        outs.append(out[0])
        sums.append(lse[0])
    out = torch.cat(outs)
    return (out, torch.cat(sums, dim=1), None) if return_attn_probs else out


def mixed(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> Any:
    """Keys are read by the offsets of the queries."""
    most = torch.minimum(cu_seqlens_q, torch.tensor(len(k)))
    return varlen(q, k, v, cu_seqlens_q, most, max_seqlen_q, max_seqlen_k)


CODES = ["ATN101", "ATN404", "ATN601", "ATN741", "ATN751", "ATN752", "ATN901", "ATN902"]


def test_a_packed_function_is_judged_on_every_problem() -> None:
    made = adapt(varlen)
    assert made.conventions.layout.value == "BSHD"
    report = check_attention(varlen, laws=CODES)
    assert report.passed, str(report)
    assert {r.code for r in report.results if r.outcome == "passed"} == set(CODES)


def test_keys_read_by_the_offsets_of_the_queries_are_caught() -> None:
    report = check_attention(mixed, laws=["ATN751", "ATN752"])
    assert not report.passed


def test_others_are_not_asked_for_packed_sequences() -> None:
    report = check_attention(variants, laws=["ATN751"])
    assert {r.outcome for r in report.results} == {"unsupported"}


@pytest.mark.parametrize(("lengths", "message"), [(((3,), (3, 4)), "q_lengths: "), (((3, 9), (3, 4)), "at most 7")])
def test_lengths_that_do_not_fit_are_named(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(mask=(Lengths(*lengths), Causal()))
