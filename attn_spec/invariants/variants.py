"""Variants: windows, softcap, ALiBi, sinks, log-sum-exp, documents; each alone, and with each that it can meet."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec import blocks, tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import (
    agrees,
    answer,
    answer_to,
    arguments_for,
    evidence,
    output,
    place,
    recovered,
    require_within,
    same,
)
from attn_spec.law import Unsupported, Violation, law
from attn_spec.problem import Arguments, Problem

# windows -------------------------------------------------------------------------------------------------------------


@law("ATN701", "window", "A window holds the keys near a query's own position, and no others")
def window(implementation: Implementation, problem: Problem) -> None:
    """query i at position p sees the keys p - left <= j <= p + right, on either side or on both

    Why: with a window that is ignored a model is trained at full length and served at another; nothing looks wrong.
    Example: `window_size` accepted and not handed on.
    """
    agrees(implementation, problem)


def near(implementation: Implementation, problem: Problem) -> Tensor:
    """The keys that the window and the causal flag let a query see [Sq, Sk]."""
    assert problem.window is not None
    _, _, q_len, kv_len = problem.sizes
    i, j, meaning = torch.arange(q_len)[:, None], torch.arange(kv_len)[None], implementation.conventions.meaning
    bounds = problem.window.left, problem.window.right
    seen = blocks.window(i, j, q_len, kv_len, *bounds, meaning.window_alignment)
    if problem.causal_by_flag:
        seen = blocks.meet(blocks.causal(i, j, q_len, kv_len, meaning.alignment, 1), seen)
    return seen


@law("ATN702", "window-edges", "The first and the last key of a window are the ones that it says")
def window_edges(implementation: Implementation, problem: Problem) -> None:
    """p_ij > 0 exactly for the keys of the window, read off with a one-hot V

    Why: W keys with the query's own counted, or W before it: libraries differ by one key, and ports drop or add it.
    Example: `i - j <= W` for a window of W keys; `i - j < left` for `left` keys before.
    """
    weights, exact = recovered(implementation, arguments_for(implementation, problem))
    expected = exact.output[..., : problem.kv_len]
    seen = near(implementation, problem)
    missing = seen & (expected > 4 * exact.bounds.output[..., : problem.kv_len]) & ~(weights.double() > expected / 4)
    added = ~seen & (weights.double().abs() > 1e-6)
    wrong = missing | added
    if bool(wrong.any()):
        sample, head, query, key = (int(n) for n in torch.nonzero(wrong)[0])
        keys = [int(n) for n in torch.nonzero(seen[query]).flatten()]
        got = [int(n) for n in torch.nonzero(weights[sample, head, query].abs() > 1e-6).flatten()]
        raise Violation(
            f"query {query} sees {_span(got)}, expected {_span(keys)} (window {problem.window}, sample {sample}, head "
            f"{head}; {int(wrong.sum())} weights are wrong)",
            evidence={"query": query, "key": key, "received": got, "expected": keys},
            hint="left and right are numbers of keys before and after the query's own: p - left <= j <= p + right",
            setup="v = one_hot(v)",
            merge="window-edges",
        )


def _span(keys: list[int]) -> str:
    if not keys:
        return "no key"
    whole = keys == list(range(keys[0], keys[-1] + 1))
    return f"keys {keys[0]} to {keys[-1]}" if whole else f"keys {', '.join(map(str, keys))}"


@law("ATN703", "window-with-causal", "A window and the causal flag hold together")
def window_with_causal(implementation: Implementation, problem: Problem) -> None:
    """j <= p and p - left <= j <= p + right: the flag cuts off what the window shows of the future

    Why: the two are often one number each in a kernel, and one of them overwrites the other.
    Example: causal ignored once a window is given; a window that replaces the mask.
    """
    agrees(implementation, problem)


@law("ATN704", "window-across", "A window moves with the query's position where Sq != Sk, and for one query")
def window_across(implementation: Implementation, problem: Problem) -> None:
    """p = i (top-left) or p = i + Sk - Sq (bottom-right), as declared; for Sq = 1 too

    Why: in decoding the only query stands at the end, and the window must hold the last keys, not the first.
    Example: `if q.shape[1] == 1` returns early, without the window.
    """
    agrees(implementation, problem)


@law("ATN705", "window-unbounded", "A window without bounds, or wider than the keys, changes nothing")
def window_unbounded(implementation: Implementation, problem: Problem) -> None:
    """window (none, none) or wider than Sk on both sides: the output without one

    Why: the value for "no window" is -1 here and None there, and 0 is a window of one key.
    Example: -1 taken for a number, so that no key is seen.
    """
    agrees(implementation, problem)


# softcap -------------------------------------------------------------------------------------------------------------


@law("ATN711", "softcap", "Logits are softened by softcap * tanh(logits / softcap)")
def softcap(implementation: Implementation, problem: Problem) -> None:
    """s_ij = c tanh(scale q_i.k_j / c), for a cap of 1 and of 50, and one so large that it changes nothing

    Why: on plain random data a cap of 50 changes next to nothing, so one that is ignored goes unseen.
    Example: the cap accepted and not used; applied before the scale.
    """
    agrees(implementation, problem)


@law("ATN712", "softcap-order", "The cap comes before what is hidden and what is added")
def softcap_order(implementation: Implementation, problem: Problem) -> None:
    """s_ij = c tanh(scale q_i.k_j / c) + bias_ij, and -inf where hidden

    Why: a cap that comes after the mask brings -inf back to -c, and with a small cap the future is seen.
    Example: `softcap * tanh((s + mask) / softcap)`.
    """
    arguments = arguments_for(implementation, problem)
    out = output(implementation, arguments)
    worst, merge = answer_to(implementation, problem).compare(out), ""
    if not worst.holds and "softcap" in implementation.built_with and (problem.masked or problem.causal):
        unused = torch.equal(out, output(implementation, arguments.replace(softcap=None)))
        merge = "" if unused else "built-softcap-order"
    require_within(worst, "output", merge=merge)


# ALiBi ---------------------------------------------------------------------------------------------------------------


@law("ATN721", "alibi", "Each head's slope takes from the logits of a key what its distance is")
def alibi(implementation: Implementation, problem: Problem) -> None:
    """s_ij = scale q_i.k_j - slope_h |p_i - j|, with and without the causal flag

    Why: the other sign rewards distance; slopes that are worked out anew differ where H is no power of two.
    Example: slope * (p - j), without the absolute value; slopes of the first head for all.
    """
    agrees(implementation, problem)


@law("ATN722", "alibi-slopes", "Slopes are those that are given, for each head or for each sample and head")
def alibi_slopes(implementation: Implementation, problem: Problem) -> None:
    """alibi_slopes [H] or [B, H], H no power of two, grouped heads too: the slope is the query head's

    Why: with grouped heads there are H slopes and Hkv heads of keys, and it is easy to index by the wrong one.
    Example: slope[h // group]; the slopes of the first sample for all.
    """
    agrees(implementation, problem)


@law("ATN723", "alibi-across", "Distances are from the query's position where Sq != Sk, and for one query")
def alibi_across(implementation: Implementation, problem: Problem) -> None:
    """|p_i - j|, p = i or i + Sk - Sq as declared

    Why: with a cache the queries are the last positions; distances from 0 favour the oldest keys.
    Example: `arange(Sq)` for the positions of the queries.
    """
    agrees(implementation, problem)


# sinks ---------------------------------------------------------------------------------------------------------------


@law("ATN731", "sinks", "A sink is one more logit in the denominator, for each head its own")
def sinks(implementation: Implementation, problem: Problem) -> None:
    """p_ij = exp(s_ij) / (exp(sink_h) + sum_k exp(s_ik)): the sink has no value, and is not scaled or capped

    Why: a sink near 0 hides being ignored; one that is large takes most of the row.
    Example: one sink for all heads; a sink that is indexed by the row.
    """
    agrees(implementation, problem)


@law("ATN732", "sink-share", "The weights of a row sum to what the sink leaves")
def sink_share(implementation: Implementation, problem: Problem) -> None:
    """sum_j p_ij = 1 - exp(sink_h - lse_i), read off with V = 1

    Why: renormalising afterwards undoes the sink and leaves the output plausible.
    Example: a sink subtracted as a maximum and not added to the sum.
    """
    arguments = arguments_for(implementation, problem)
    ones = arguments.replace(v=torch.ones_like(arguments.v))
    got, exact = output(implementation, ones), answer(implementation, ones)
    require_within(exact.compare(got), "sum of weights", because="V = 1", setup="v = torch.ones_like(v)")


# log-sum-exp ---------------------------------------------------------------------------------------------------------


def returned_lse(implementation: Implementation, arguments: Arguments) -> Tensor:
    """The log-sum-exp [B, H, Sq] of one call, as a natural logarithm; a Violation where none of its shape comes."""
    result = implementation(arguments.replace(returns="lse"))
    if result.lse is None:
        if "lse" not in getattr(getattr(implementation.adapter, "signature", None), "roles", {"lse": ""}):
            raise Unsupported("no log-sum-exp is returned")
        raise Violation("asked for the log-sum-exp, it returned none of shape [B, H, Sq]", merge="lse-shape")
    return result.lse.detach()


def lse_bound(lse: Tensor, bound: Tensor, exact: Tensor) -> Tensor:
    """The bound of a log-sum-exp that is returned in a dtype of its own."""
    own = str(lse.dtype).removeprefix("torch.")
    return bound + 2 * tolerance.roundoff(own) * exact.nan_to_num(posinf=0.0, neginf=0.0).abs()


@law("ATN741", "lse", "The log-sum-exp that is returned is that of the logits")
def lse(implementation: Implementation, problem: Problem) -> None:
    """lse_i = log sum_j exp(s_ij), of the scaled, capped, biased logits of the visible keys [B, H, Sq]

    Why: split keys are merged by it; in base 2, without the scale or without the row maximum every merge is off.
    Example: log2 returned where the natural logarithm is expected; the maximum not added back.
    """
    arguments = arguments_for(implementation, problem)
    got, exact = returned_lse(implementation, arguments), answer_to(implementation, problem)
    full = exact.lse > -torch.inf
    checked = torch.where(full, got.double(), exact.lse)
    worst = tolerance.worst(checked, exact.lse, lse_bound(got, exact.bounds.lse, exact.lse))
    require_within(worst, "lse", merge="lse", hint=_lse_hint(got.double(), exact.lse, full))


def _lse_hint(got: Tensor, expected: Tensor, full: Tensor) -> str:
    """What the received values are, where they are a known other thing."""
    got, expected = got[full], expected[full]
    for base, factor in (("2", 1.4426950408889634), ("10", 0.4342944819032518)):
        if got.numel() and bool(((got - factor * expected).abs() < 1e-3 * (1 + expected.abs())).all()):
            return f"it is to the base {base}: declare `lse_base: {base}` if that is meant"
    return ""


@law("ATN742", "lse-of-empty-rows", "The log-sum-exp of a row with no visible key is an infinity, and harms no other")
def lse_of_empty_rows(implementation: Implementation, problem: Problem) -> None:
    """lse_i = -inf (or +inf, as measured or declared) where every key is hidden; all other rows as they are

    Why: whoever merges by it takes any number for weight, and NaN for the end.
    Example: log(0 + 1e-20) = -46; the maximum of an empty row as it was initialised.
    """
    if implementation.conventions.meaning.empty_rows == "mean":
        raise Unsupported("a row with no visible key is the mean of all values, so it has a sum, of finite logits")
    arguments = arguments_for(implementation, problem)
    got, exact = returned_lse(implementation, arguments), answer_to(implementation, problem)
    empty = exact.lse == -torch.inf
    value = torch.tensor(float(implementation.conventions.lse_empty.value), dtype=torch.float64)
    expected = torch.where(empty, value, exact.lse)
    worst = tolerance.worst(got, expected, lse_bound(got, exact.bounds.lse, exact.lse))
    if not worst.holds:
        kind = "a row with no visible key" if bool(empty[worst.index]) else "a row beside empty ones"
        raise Violation(
            f"lse{place(worst.index)} of {kind} is {worst.got:.6g}, expected {worst.expected:.6g}",
            evidence=evidence(worst),
            hint="start from -inf and let an empty sum stay there",
            merge="lse-empty",
        )


@law("ATN743", "lse-merges", "Keys in two parts, merged by their log-sum-exp, give the whole")
def lse_merges(implementation: Implementation, problem: Problem) -> None:
    """out = w out_1 + (1 - w) out_2 with w = exp(lse_1 - lse), lse = log(exp lse_1 + exp lse_2)

    Why: split-K decoding, ring attention and cascades do just this, and it needs both outputs and both sums right.
    Example: base-2 sums merged with natural exponentials.
    """
    if problem.causal_by_flag or problem.window or problem.alibi or problem.sinks:
        raise Unsupported("keys that depend on positions can't be split")
    whole = arguments_for(implementation, problem)
    n = problem.kv_len // 2 + 1
    exact, parts = answer_to(implementation, problem), []
    for keys in (slice(0, n), slice(n, None)):
        mask = whole.mask
        if mask is not None and mask.shape[-1] == problem.kv_len:
            mask = mask[..., keys].contiguous()
        part = whole.replace(
            k=whole.k[:, :, keys].contiguous(), v=whole.v[:, :, keys].contiguous(), mask=mask, returns="lse"
        )
        result = implementation(part)
        right = answer(implementation, part)
        parts.append((result.output.detach().double(), returned_lse(implementation, part), right))
    (out_1, given_1, right_1), (out_2, given_2, right_2) = parts
    lse_1, lse_2 = given_1.double(), given_2.double()
    w = torch.sigmoid(lse_1 - lse_2)[..., None]
    moved = (w * (1 - w)) * (lse_bound(given_1, right_1.bounds.lse, lse_1)
                             + lse_bound(given_2, right_2.bounds.lse, lse_2))[..., None]  # fmt: skip
    bound = exact.bounds.output + w * right_1.bounds.output + (1 - w) * right_2.bounds.output
    bound = bound + 2 * moved * (right_1.output - right_2.output).abs()
    worst = tolerance.worst(w * out_1 + (1 - w) * out_2, exact.output, bound)
    require_within(worst, "merged output", because=f"merged from the first {n} keys and the other {problem.kv_len - n}")


@law("ATN744", "lse-changes-no-output", "Asking for the log-sum-exp changes no output")
def lse_changes_no_output(implementation: Implementation, problem: Problem) -> None:
    """out with the log-sum-exp = out without

    Why: the flag often takes another path through the code, on which something else is dropped.
    Example: `is_causal` ignored once weights or the log-sum-exp are asked for.
    """
    arguments = arguments_for(implementation, problem)
    returned_lse(implementation, arguments)
    got = output(implementation, arguments.replace(returns="lse"))
    require_within(answer_to(implementation, problem).compare(got), "output", because="with the log-sum-exp asked for")
    plain = output(implementation, arguments)
    require_within(same(got, plain, answer_to(implementation, problem).bounds.output), "output")


# packed sequences ----------------------------------------------------------------------------------------------------


@law("ATN751", "packed-lengths", "Packed sequences of different lengths do not see each other")
def packed_lengths(implementation: Implementation, problem: Problem) -> None:
    """each sequence [total, H, D] between cu_seqlens[b] and cu_seqlens[b + 1] gives what it gives alone

    Why: sequences are packed to save padding; one offset that is off by a row mixes two texts.
    Example: causal aligned by the longest sequence and not by each its own; keys read by the queries' offsets.
    """
    agrees(implementation, problem)


@law("ATN752", "packed-empty", "An empty sequence among packed ones gives nothing, and moves no other")
def packed_empty(implementation: Implementation, problem: Problem) -> None:
    """cu_seqlens with equal neighbours: no queries, no keys, or neither

    Why: the last step of a batch and speculative decoding hand over empty sequences; 0 keys are a row of 0/0.
    Example: a division by the batch to find the length; the output of an empty sequence never written.
    """
    agrees(implementation, problem)


# documents, and all together -----------------------------------------------------------------------------------------


@law("ATN761", "documents", "Packed documents do not see each other")
def documents(implementation: Implementation, problem: Problem) -> None:
    """a block-diagonal mask, with the causal triangle inside each block: each document as if it were alone

    Why: packed training rows leak from one text into the next where the mask is dropped or only causal.
    Example: position ids that start anew under a plain causal mask.
    """
    agrees(implementation, problem)


@law("ATN781", "variants-together", "Variants hold together: windows, cap, slopes, sinks, bias, causal, grouped heads")
def variants_together(implementation: Implementation, problem: Problem) -> None:
    """|out - exact| <= bound on problems in which every two variants, and what else there is, meet

    Why: flags that are dropped in combination are the commonest hard bug.
    Example: a fast path for slopes that knows nothing of the window.
    """
    agrees(implementation, problem)
