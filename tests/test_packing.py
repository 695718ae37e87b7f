"""Faults of packed sequences: each is caught and named, right functions are left alone; gradients sample by sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import check_attention
from attn_spec.faults import behaviour
from attn_spec.faults.packing import FAULTS
from attn_spec.packing_blocks import packed_attention

behaviour.load()
LAWS = ["ATN404", "ATN751", "ATN752", "ATN901", "ATN902", "ATN903", "ATN907", "ATN908", "ATN911"]


def one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """torch's SDPA on each sample."""
    outs = []
    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:], strict=False):
        one = [x[None].transpose(1, 2) for x in (q[a:b], k[c:d], v[c:d])]
        seen = torch.ones(int(b - a), int(d - c), dtype=torch.bool)
        seen = seen.tril(int(d - c - b + a)) if causal else seen
        if not seen.numel():
            outs.append(q.new_zeros(int(b - a), q.shape[1], v.shape[2]) + 0 * q[a:b, :, :1])
            continue
        out = F.scaled_dot_product_attention(*one, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
        outs.append(out.transpose(1, 2)[0])
    return torch.cat(outs)


def block_diagonal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """All samples at once under a mask that is a block for each."""
    i, j = torch.arange(len(q)), torch.arange(len(k))
    mine, theirs = ((x[:, None] >= cu[1:]).sum(1) for x, cu in ((i, cu_seqlens_q), (j, cu_seqlens_k)))
    seen = mine[:, None] == theirs
    if causal:
        left_q, left_k = cu_seqlens_q[1:][mine] - i, cu_seqlens_k[1:][theirs] - j
        seen = seen & (left_k[None] >= left_q[:, None])
    if not len(k) or not len(q):
        return q.new_zeros(len(q), q.shape[1], v.shape[2]) + 0 * q[..., :1]
    one = [x[None].transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*one, attn_mask=seen, scale=softmax_scale, enable_gqa=True)
    return out.transpose(1, 2)[0]


@pytest.mark.parametrize("attention", [packed_attention(), one_by_one, block_diagonal], ids=["blocks", "one", "mask"])
def test_a_right_function_is_left_alone(attention: Callable[..., Tensor]) -> None:
    report = check_attention(attention, laws=LAWS)
    assert report.passed, str(report)
    packed = [r for r in report.results if r.problem.lengths is not None and r.outcome == "passed"]
    assert {r.code for r in packed} == set(LAWS) - {"ATN404"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_is_caught_and_named(fault: behaviour.BehaviourFault) -> None:
    report = check_attention(packed_attention(fault.blocks), laws=LAWS)
    assert not report.passed
    assert list(report.diagnosis) == [fault.id], str(report)


def test_a_dropped_gradient_is_caught() -> None:
    """Of the last sample alone."""

    class Last(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, begin: int) -> Tensor:  # type: ignore[no-untyped-def]
            ctx.begin = begin
            return x.view_as(x)

        @staticmethod
        def backward(ctx, *given: Tensor):  # type: ignore[no-untyped-def]
            return torch.cat((given[0][: ctx.begin], 0 * given[0][ctx.begin :])), None

    right = packed_attention()

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
    ) -> Tensor:
        v = Last.apply(v, int(cu_seqlens_k[-2]))  # type: ignore[no-untyped-call]
        return right(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal)

    report = check_attention(attention, laws=["ATN903", "ATN901"])
    failed = [r for r in report.results if r.outcome == "failed"]
    assert {r.code for r in failed} == {"ATN903"}
    assert any(r.problem.lengths is not None for r in failed)
