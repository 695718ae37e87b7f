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
from attn_spec.report.reproducer import reproducer


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


def offsets_alone(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:  # fmt: skip
    return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0, softmax_scale, causal)


def offsets_of_both(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, softmax_scale: float | None = None,
    causal: bool = False,
) -> Any:  # fmt: skip
    assert max_seqlen == max(x.item() for x in cu_seqlens.diff())
    return varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, softmax_scale, causal)


def of_both_mixed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, causal: bool = False) -> Any:
    """A sample sees the keys of the one before it."""
    first = torch.cat((cu_seqlens[:1], cu_seqlens[:-1]))
    outs = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for a, b, c in zip(cu_seqlens, cu_seqlens[1:], first, strict=False):
        outs.append(variants(q[a:b][None], k[c:b][None], v[c:b][None], causal=causal)[0])
    return torch.cat(outs)


def test_offsets_alone_are_enough() -> None:
    report = check_attention(offsets_alone, laws=["ATN101", "ATN404", "ATN601", "ATN751", "ATN901"])
    assert report.passed, str(report)
    assert {r.code for r in report.results if r.outcome == "passed"} == {
        "ATN101",
        "ATN404",
        "ATN601",
        "ATN751",
        "ATN901",
    }


def test_one_offset_for_queries_and_keys_is_judged_where_they_are_as_many() -> None:
    report = check_attention(offsets_of_both, laws=["ATN103", "ATN401", "ATN404", "ATN751"])
    assert report.passed, str(report)
    assert {"ATN103", "ATN401"} <= {r.code for r in report.results if r.outcome == "passed"}
    said = {r.message for r in report.results if r.outcome == "unsupported"}
    assert any("as many keys as queries" in message for message in said)
    assert not check_attention(of_both_mixed, laws=["ATN103"]).passed


def test_a_script_for_one_offset_runs() -> None:
    report = check_attention(of_both_mixed, laws=["ATN103"])
    failed = next(r for r in report.results if r.outcome == "failed")
    text = reproducer(report.judgement.implementation, failed.problem, failed)
    assert "import inspect\n" in text
    with pytest.raises(AssertionError):
        exec(text, {})


def dropping(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = 0.0
) -> Any:
    outs = [q.new_zeros(0, q.shape[1], v.shape[2])]
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        one, two, three = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        two, three = (x.repeat_interleave(len(one) // len(two), 0) for x in (two, three))
        p = torch.softmax(one @ two.mT / one.shape[-1] ** 0.5, -1)
        outs.append((torch.nn.functional.dropout(p, dropout_p) @ three).transpose(0, 1))
    return torch.cat(outs)


def test_dropout_of_packed_samples_is_judged() -> None:
    report = check_attention(dropping, laws=["randomness"])
    assert report.passed, str(report)
    assert {"ATN1101", "ATN1104", "ATN1107", "ATN1108", "ATN1109"} <= {
        r.code for r in report.results if r.outcome == "passed"
    }

    def alike(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, dropout_p: float = 0.0
    ) -> Any:
        outs, state = [q.new_zeros(0, q.shape[1], v.shape[2])], torch.get_rng_state()
        for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
            torch.set_rng_state(state)
            ends = (torch.tensor([0, len(q[a:b])]), torch.tensor([0, len(k[c:d])]))
            outs.append(dropping(q[a:b], k[c:d], v[c:d], *ends, dropout_p))
        return torch.cat(outs)

    assert check_attention(alike, laws=["ATN1104"]).diagnosis == ["one-mask-for-the-batch"]
