"""Weights: each output row is an average of the values, with weights that are a softmax over the keys."""

from __future__ import annotations

import torch

from attn_spec import tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants import comparison
from attn_spec.invariants.comparison import (
    answer,
    arguments_for,
    needs_given,
    needs_heads_alike,
    needs_plain,
    output,
    place,
    recovered,
    require_within,
)
from attn_spec.law import Advisory, Unsupported, Violation, law
from attn_spec.problem import Arguments, Problem


@law("ATN201", "rows-sum-to-one", "The weights of a row sum to 1")
def rows_sum_to_one(implementation: Implementation, problem: Problem) -> None:
    """V = 1  =>  out = sum_j p_ij = 1

    Why: weights that sum to less shrink the output; layer norm hides it and the model trains worse.
    Example: hiding keys after the softmax without normalising again; a softmax over heads and keys together.
    """
    arguments = arguments_for(implementation, problem)
    ones = arguments.replace(v=torch.ones_like(arguments.v))
    worst = answer(implementation, ones).compare(output(implementation, ones))
    because = "with V = 1 every output is the sum of its row's weights"
    require_within(worst, "the sum", because=because, setup="v = torch.ones_like(v)", merge="row-sum")


@law("ATN202", "weights-not-negative", "No weight is negative")
def weights_not_negative(implementation: Implementation, problem: Problem) -> None:
    """p_ij >= 0, read off with a one-hot V

    Why: a negative weight is no average; it comes from a bias added after the softmax or from a broken rescale.
    Example: `softmax(s) + mask`.
    """
    weights, exact = recovered(implementation, arguments_for(implementation, problem))
    lowest = weights.double() + exact.bounds.output
    if bool((lowest < 0).any()) or bool(weights.isnan().any()):
        place_ = tuple(int(n) for n in torch.unravel_index((~(lowest >= 0)).flatten().int().argmax(), lowest.shape))
        raise Violation(
            f"the weight of key {place_[3]} for query {place_[2]} (sample {place_[0]}, head {place_[1]}) is "
            f"{float(weights[place_]):.4g}; a weight is never below 0",
            setup="v = one_hot(v)",
        )


@law("ATN203", "weights-agree", "The weights are the softmax of the scaled logits over the keys")
def weights_agree(implementation: Implementation, problem: Problem) -> None:
    """p_ij = exp(s_ij) / sum_k exp(s_ik), read off with a one-hot V

    Why: an output is one number for many weights; the weights themselves show which key is wrong.
    Example: a softmax over the queries (dim=-2) instead of the keys.
    """
    weights, exact = recovered(implementation, arguments_for(implementation, problem))
    worst = exact.compare(weights)
    if not worst.holds:
        sample, head, query, key = worst.index
        raise Violation(
            f"query {query} gives key {key} the weight {worst.got:.6g}, expected {worst.expected:.6g} "
            f"(sample {sample}, head {head}; {worst.ratio:.3g} times the bound {worst.bound:.2g})",
            evidence=comparison.evidence(worst),
            setup="v = one_hot(v)",
        )


@law("ATN204", "linear-in-values", "The output is linear in V")
def linear_in_values(implementation: Implementation, problem: Problem) -> None:
    """f(q, k, v + w) = f(q, k, v) + f(q, k, w)

    Why: the values are only averaged; what is not linear in them (a cap, a norm, a lossy cast) is not attention.
    Example: values clamped on the way in.
    """
    one = arguments_for(implementation, problem)
    two = one.replace(v=one.v.flip(-1).roll(1, dims=2) * 64)
    both = one.replace(v=one.v + two.v)
    sum_ = output(implementation, one).double() + output(implementation, two).double()
    exact = [answer(implementation, a) for a in (one, two, both)]
    rounding = tolerance.roundoff(problem.dtype) * both.v.double().abs().amax(2, keepdim=True)
    rounding = rounding.repeat_interleave(problem.heads // problem.kv_heads, dim=1)
    bound = exact[0].bounds.output + exact[1].bounds.output + exact[2].bounds.output + rounding
    got = output(implementation, both)
    require_within(tolerance.worst(got, sum_, bound), "f(q, k, v + w)", because="f(q, k, v) + f(q, k, w) is expected")


@law("ATN205", "inside-the-hull", "Each output lies between the smallest and the largest value")
def inside_the_hull(implementation: Implementation, problem: Problem) -> None:
    """min_j v_jc <= out_ic <= max_j v_jc

    Why: an average can't leave the range of what it averages, whatever the weights.
    Example: online softmax whose running sum is not rescaled with the maximum.
    """
    arguments = arguments_for(implementation, problem)
    out = output(implementation, arguments).double()
    v = arguments.v.double().repeat_interleave(problem.heads // problem.kv_heads, dim=1)
    bound = answer(implementation, arguments).bounds.output
    low, high = v.amin(2, keepdim=True), v.amax(2, keepdim=True)
    outside = torch.maximum(low - out, out - high) - bound
    if bool((outside > 0).any()) or bool(out.isnan().any()):
        n = int(torch.where(out.isnan(), torch.inf, outside).argmax())
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(n), out.shape))
        raise Violation(
            f"output{place(index)} is {float(out[index]):.6g}, outside of the values it averages "
            f"[{float(low.expand_as(out)[index]):.4g}, {float(high.expand_as(out)[index]):.4g}]"
        )


def _same_after(
    implementation: Implementation, one: Arguments, two: Arguments, back: torch.Tensor | None, axis: int, what: str
) -> None:
    """f(two), put back along the axis, is f(one)."""
    expected, got = output(implementation, one), output(implementation, two)
    if back is not None:
        got = got.index_select(axis, back)
    bound = answer(implementation, one).bounds.output
    require_within(comparison.same(got, expected, bound), "output", because=what)


def _take(mask: torch.Tensor | None, axis: int, order: torch.Tensor) -> torch.Tensor | None:
    """A mask permuted along an axis, counted from the end, where it has that axis."""
    if mask is None or mask.dim() < -axis or mask.shape[axis] == 1:
        return mask
    return mask.index_select(axis, order)


def _order_is_free(problem: Problem) -> None:
    if problem.causal_by_flag:
        raise Unsupported("always causal, so the order of queries and keys is not free")


def _order(n: int, seed: int) -> torch.Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


@law("ATN206", "key-order", "The order of the keys does not matter")
def key_order(implementation: Implementation, problem: Problem) -> None:
    """f(q, k[order], v[order], mask[order]) = f(q, k, v, mask)

    Why: attention is a sum over keys; code that depends on their order drops, repeats or misplaces some.
    Example: the last partial block of keys left out.
    """
    needs_plain(implementation)
    _order_is_free(problem)
    one = arguments_for(implementation, problem)
    order = _order(problem.kv_len, problem.seed)
    k, v = one.k.index_select(2, order), one.v.index_select(2, order)
    two = one.replace(k=k, v=v, mask=_take(one.mask, -1, order))
    _same_after(implementation, one, two, None, 2, "the keys and values in another order")


@law("ATN207", "query-order", "Each query is answered on its own")
def query_order(implementation: Implementation, problem: Problem) -> None:
    """f(q[order], k, v, mask[order]) = f(q, k, v, mask)[order]

    Why: a row that depends on other queries leaks across tokens.
    Example: a softmax over the queries.
    """
    needs_plain(implementation)
    _order_is_free(problem)
    one = arguments_for(implementation, problem)
    order = _order(problem.q_len, problem.seed + 1)
    mask = one.mask if one.form == "key-padding" else _take(one.mask, -2, order)
    two = one.replace(q=one.q.index_select(2, order), mask=mask)
    _same_after(implementation, one, two, order.argsort(), 2, "the queries in another order")


@law("ATN208", "head-order", "Each head is answered on its own")
def head_order(implementation: Implementation, problem: Problem) -> None:
    """f(q[:, order], k[:, order], v[:, order]) = f(q, k, v)[:, order]

    Why: heads that mix are one big head, or scrambled ones.
    Example: heads split by `view` without a transpose.
    """
    needs_heads_alike(implementation)
    one = arguments_for(implementation, problem)
    kv_order = _order(problem.kv_heads, problem.seed + 2)
    group = problem.heads // problem.kv_heads
    order = (kv_order[:, None] * group + torch.arange(group)).flatten()
    mask = one.mask if one.form == "key-padding" else _take(one.mask, -3, order)
    k, v = one.k.index_select(1, kv_order), one.v.index_select(1, kv_order)
    two = one.replace(q=one.q.index_select(1, order), k=k, v=v, mask=mask)
    _same_after(implementation, one, two, order.argsort(), 1, "the heads in another order")


@law("ATN209", "batch-order", "Each sample is answered on its own")
def batch_order(implementation: Implementation, problem: Problem) -> None:
    """f of the samples in another order = the outputs in that order

    Why: a sample that sees another one's keys or mask is a leak that no loss curve shows.
    Example: the first sample's mask used for all.
    """
    one = arguments_for(implementation, problem)
    order = _order(problem.batch, problem.seed + 3)
    mask = _take(one.mask, -2 if one.form == "key-padding" else -4, order)
    two = one.replace(q=one.q[order], k=one.k[order], v=one.v[order], mask=mask)
    _same_after(implementation, one, two, order.argsort(), 0, "the samples in another order")


@law("ATN210", "row-shift", "A constant added to a row of logits changes nothing")
def row_shift(implementation: Implementation, problem: Problem) -> None:
    """softmax(s + c) = softmax(s), with c = 0, 20, 40, ... 200 by row, through an additive mask

    Why: without the row maximum taken off, exp overflows and the row becomes NaN.
    Example: `exp(s) / exp(s).sum(-1)`.
    """
    needs_given(implementation)
    one = arguments_for(implementation, problem)
    b, h, q_len, kv_len = one.sizes
    shift = (20.0 * (torch.arange(q_len) % 11))[:, None].to(one.q.dtype)
    two = one.replace(mask=shift.expand(b, h, q_len, kv_len).contiguous(), form="additive")
    exact = answer(implementation, two)
    require_within(
        exact.compare(output(implementation, two)),
        "output",
        because="a constant added to every logit of a row (through an additive mask)",
        setup="mask = (20.0 * (torch.arange(q.shape[2]) % 11))[:, None].to(q.dtype).expand(*q.shape[:3], k.shape[2])",
    )


@law("ATN211", "returned-weights", "Weights that are returned are those that made the output")
def returned_weights(implementation: Implementation, problem: Problem) -> None:
    """weights = softmax(s) per head, and weights @ v = out

    Why: what is plotted must be what was computed.
    Example: weights returned before the mask, or averaged over heads.
    """
    arguments = arguments_for(implementation, problem).replace(returns="weights")
    result = implementation(arguments)
    if result.weights is None:
        raise Violation("asked for the weights, it returned none of shape [B, H, Sq, Sk]", merge="weights-shape")
    exact = answer(implementation, arguments, weights=True)
    assert exact.weights is not None
    require_within(exact.compare(result.output), "output", because="with the weights asked for")
    if implementation.is_module and comparison.are_logits(result.weights, exact.weights):
        raise Unsupported(comparison.LOGITS)
    require_within(tolerance.worst(result.weights, exact.weights, exact.bounds.weights), "weights")


@law(
    "ATN214",
    "weights-of-empty-rows",
    "A row with no visible key is no other where weights are asked for",
    advisory=True,
)
def weights_of_empty_rows(implementation: Implementation, problem: Problem) -> None:
    """out_i as the conventions say where every key is hidden, and weights that are finite, with the weights asked for

    Why: the weights come from another path than the fused one, and what guards empty rows there is missing here.
    Example: torch's nn.MultiheadAttention with need_weights=True, in which one hidden head makes the whole row NaN.
    """
    arguments = arguments_for(implementation, problem).replace(returns="weights")
    result = implementation(arguments)
    if result.weights is None:
        raise Unsupported("no weights of shape [B, H, Sq, Sk] are returned")
    exact = answer(implementation, arguments)
    empty = (exact.lse == -torch.inf)[..., None]
    worst = exact.compare(torch.where(empty, result.output.double(), exact.output))
    if not worst.holds:
        said = comparison.difference(worst, "output")
        raise Advisory(
            f"with the weights asked for: {said}", evidence=comparison.evidence(worst), merge="weights-of-empty-rows"
        )
    declared = implementation.conventions.meaning.empty_rows
    if declared != "nan" and not bool(result.weights.isfinite().all()):
        count = int((~result.weights.isfinite()).sum())
        raise Advisory(f"{count} weights are not finite", evidence={"not_finite": count}, merge="weights-of-empty-rows")
