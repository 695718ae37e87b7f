"""Decoding: one query, a cache, chunks. The same rows of the same attention, asked for in other calls."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_spec import tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import (
    agrees,
    answer,
    answer_to,
    arguments_for,
    difference,
    evidence,
    needs_plain,
    output,
    require_within,
)
from attn_spec.invariants.masking import smoothing_error
from attn_spec.invariants.variants import lse_bound, returned_lse
from attn_spec.law import Unsupported, Violation, law
from attn_spec.masks import Form, KeyPadding
from attn_spec.problem import Arguments, Problem

JUNK = 1e3  # what stands in unfilled slots, in units of the values: large, and finite in every dtype


# the same rows in several calls --------------------------------------------------------------------------------------


def follows(implementation: Implementation) -> bool:
    """Whether the causal flag means what a cache needs: the last query at the last key."""
    conventions = implementation.conventions
    return conventions.causal.value != "never" and conventions.meaning.alignment == "bottom-right"


def rows_of(implementation: Implementation, whole: Arguments, start: int, stop: int) -> Arguments:
    """The call for the queries from `start` to `stop` over the keys before `stop`, as with a cache.

    Causality goes by the flag where that is aligned to the bottom right, else by a mask tensor; one query needs none.
    Raises Unsupported where a window or slopes are aligned to the top left, which no later call can say.
    """
    meaning = implementation.conventions.meaning
    if start and (whole.window or whole.alibi is not None) and meaning.window_alignment == "top-left":
        raise Unsupported("windows and slopes aligned to the top left can't be continued")
    q, k, v = whole.q[:, :, start:stop], whole.k[:, :, :stop], whole.v[:, :, :stop]
    mask, form, causal = whole.mask, whole.form, whole.causal
    if mask is not None:
        if form != "key-padding" and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask[..., start:stop, :]
        mask = mask[..., :stop] if mask.shape[-1] > 1 else mask
        mask = mask.contiguous()
    if causal and not (follows(implementation) or (start == 0 and implementation.conventions.causal.value != "never")):
        causal = False
        if stop - start > 1:
            past = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)
            mask, form = _with_past(mask, form, past)
    return whole.replace(q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), mask=mask, form=form, causal=causal)


def _with_past(mask: Tensor | None, form: Form | None, past: Tensor) -> tuple[Tensor, Form]:
    """A mask and the causal triangle in one tensor."""
    if mask is None:
        return past[None, None], "bool"
    if form == "key-padding":
        return mask[:, None, None, :] & past, "bool"
    return (mask & past, "bool") if form == "bool" else (mask.masked_fill(~past, -torch.inf), "additive")


def _same_rows(implementation: Implementation, problem: Problem, cuts: list[int], merge: str, hint: str) -> None:
    """Every part of the rows, between two cuts, in a call of its own: the rows of the whole."""
    needs_plain(implementation)
    whole, right = arguments_for(implementation, problem), answer_to(implementation, problem)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        rows = slice(start, stop)
        asked = rows_of(implementation, whole, start, stop)
        got = output(implementation, asked)
        worst = tolerance.worst(got, right.output[:, :, rows], right.bounds.output[:, :, rows])
        if not worst.holds:
            what = f"query {start}" if stop - start == 1 else f"queries {start} to {stop - 1}"
            raise Violation(
                f"{what} in a call of its own over the keys 0 to {stop - 1}: {difference(worst, 'output')}",
                evidence={**evidence(worst), "queries": [start, stop], "keys": stop, "causal": asked.causal},
                hint=hint,
                merge=merge,
                setup=_cut(whole, asked, start, stop),
            )


def _cut(whole: Arguments, asked: Arguments, start: int, stop: int) -> str:
    """Plain torch that makes the arguments of the whole those of the call; "" where that takes more than two lines."""
    if whole.mask is not None:
        return ""
    lines = [f"q, k, v = q[:, :, {start}:{stop}], k[:, :, :{stop}], v[:, :, :{stop}]"]
    if asked.mask is not None:
        lines.append(f"mask = torch.ones({stop - start}, {stop}, dtype=torch.bool).tril({start})[None, None]")
    return "\n".join(lines)


@law("ATN1001", "steps-equal-prefill", "Token by token gives the rows of the whole sequence")
def steps_equal_prefill(implementation: Implementation, problem: Problem) -> None:
    """f(q[t : t + 1], k[: t + 1], v[: t + 1]) = row t of the causal f(q, k, v), for every t

    Why: a model is trained and measured on whole sequences, and answers token by token.
    Example: `is_causal=True` at one query, aligned to the top left: it sees the first key of the cache alone.
    """
    hint = "at one query every key that is there lies in the past: it stands at position Sk - 1"
    _same_rows(implementation, problem, list(range(problem.q_len + 1)), "decoding-steps", hint)


def chunks(length: int) -> Iterator[list[int]]:
    """Cuts of a sequence: in parts that do not divide it, the longest first, and beginning with one token."""
    step = max(2, length // 3 + (length % (length // 3 or 1) == 0))
    yield [*range(0, length, step), length]
    yield sorted({0, 1, max(1, length // 2), length})
    yield sorted({0, max(1, length - 3), max(1, length - 1), length})


@law("ATN1002", "chunks-equal-prefill", "A prefill in chunks gives the rows of the whole sequence")
def chunks_equal_prefill(implementation: Implementation, problem: Problem) -> None:
    """f(q[a : b], k[: b], v[: b]) = rows a to b of the causal f(q, k, v), by the flag or by a mask tensor

    Why: long prompts are read in chunks, and the second is the first call in which Sq != Sk.
    Example: a triangle aligned to the top left from the second chunk on; rows counted from the chunk's start.
    """
    hint = "query i of a chunk stands at position Sk - Sq + i"
    for cuts in chunks(problem.q_len):
        _same_rows(implementation, problem, cuts, "decoding-chunks", hint)


@law("ATN1003", "one-query", "One query with all it can meet: masks, bias, grouped heads, windows, caps, slopes, sinks")
def one_query(implementation: Implementation, problem: Problem) -> None:
    """|out - exact| <= bound for Sq = 1, on problems in which every two features meet

    Why: one query takes a path of its own (a vector times a matrix, split keys), and it knows fewer features.
    Example: the window or the softcap dropped `if q_len == 1`; kv heads mixed up where the group is folded into Sq.
    """
    agrees(implementation, problem)


# a cache that is longer than what is filled --------------------------------------------------------------------------


def filled(problem: Problem) -> tuple[int, ...]:
    """How many keys of each sample are filled: those that the problem's padding says."""
    return next(part.lengths for part in problem.mask if isinstance(part, KeyPadding))


@law("ATN1004", "unfilled-hidden", "What lies in a cache beyond what is filled is not seen")
def unfilled_hidden(implementation: Implementation, problem: Problem) -> None:
    """junk at the keys j >= n_b, hidden by the mask, the last query at key n_b - 1  =>  f on the first n_b keys alone

    Why: a cache of a fixed length holds zeros, or what the request before left there.
    Example: slots of zeros that take their share of the softmax; one length for the whole batch.
    """
    whole, lengths = arguments_for(implementation, problem), filled(problem)
    asked, seen = with_junk(implementation, problem)
    kv_len = problem.kv_len
    got, honest = output(implementation, asked), smoothing_error(implementation, whole, float(asked.k.abs().amax()))
    for n, length in enumerate(lengths):
        one = slice(n, n + 1)
        alone = whole.replace(
            **{name: getattr(whole, name)[one] for name in ("q", "k", "v")}, mask=seen[one, :, :, :length], form="bool"
        )
        alone = alone.replace(k=alone.k[:, :, :length], v=alone.v[:, :, :length], causal=False)
        right = answer(implementation, alone)
        sees = right.lse[..., None] > -torch.inf  # a row without a key is what is declared, of all slots
        worst = tolerance.worst(
            torch.where(sees, got[one].double(), right.output), right.output, right.bounds.output + honest[one]
        )
        require_within(
            worst, "output", merge="decoding-unfilled",
            because=f"sample {n}, {length} of {kv_len} keys filled and junk behind them",
            hint="hide the slots from the filled length on, of each sample its own",
        )  # fmt: skip


def with_junk(implementation: Implementation, problem: Problem) -> tuple[Arguments, Tensor]:
    """The call on a cache with junk behind what is filled, and what its queries see [B, 1, Sq, Sk].

    Raises Unsupported where no mask can say that.
    """
    if implementation.conventions.causal.value == "always":
        raise Unsupported("always causal, so the length of a cache can't be said by a mask")
    whole, lengths = arguments_for(implementation, problem), filled(problem)
    _, _, q_len, kv_len = whole.sizes
    j, i = torch.arange(kv_len), torch.arange(q_len)[:, None]
    seen = torch.stack([j <= n - q_len + i for n in lengths])[:, None]  # [B, 1, Sq, Sk]
    beyond = torch.stack([j >= n for n in lengths])[:, None, :, None]
    k, v = (
        torch.where(beyond, JUNK * sign * (1 + whole_.abs()), whole_)
        for whole_, sign in ((whole.k, 1.0), (whole.v, -1.0))
    )
    mask = seen
    if whole.form == "additive":
        mask = torch.zeros(seen.shape, dtype=whole.q.dtype).masked_fill(~seen, -torch.inf)
    elif whole.form == "key-padding":
        if q_len > 1:
            raise Unsupported("a key padding can't hide the future")
        mask = seen[:, 0, 0]
    return whole.replace(k=k, v=v, mask=mask, form=whole.form, causal=False), seen


# keys in parts -------------------------------------------------------------------------------------------------------


@law("ATN1005", "uneven-splits-merge", "Keys in uneven parts, one of which none may see, merge to the whole")
def uneven_splits_merge(implementation: Implementation, problem: Problem) -> None:
    """out = sum_n w_n out_n, w_n = exp(lse_n - lse), lse = log sum_n exp(lse_n); a part without a visible key counts 0

    Why: keys of a long cache are shared out to as many blocks as there are, and the last are short or empty.
    Example: 0 / 0 in an empty part, which is NaN times a weight of 0; a log-sum-exp of log(1e-20) for nothing.
    """
    if problem.causal_by_flag or problem.window or problem.alibi or problem.sinks:
        raise Unsupported("keys that depend on positions can't be split")
    whole, right = arguments_for(implementation, problem), answer_to(implementation, problem)
    parts = []
    for part in uneven_parts(whole):
        lse, out = returned_lse(implementation, part), output(implementation, part.replace(returns="lse"))
        parts.append((out.double(), lse.double(), answer(implementation, part), lse))
    sums = torch.stack([_nothing(implementation, exact.lse, lse) for _, lse, exact, _ in parts])
    total = torch.logsumexp(sums, 0)
    shares = torch.exp(sums - total.clamp(min=torch.finfo(torch.float64).min))[..., None]
    outs = torch.stack([out for out, *_ in parts])
    if implementation.conventions.empty_rows.value != "zero":  # what such a row holds is declared to be something else
        outs = torch.where(shares == 0, 0.0, outs)
    merged = (shares * outs).sum(0)
    bound = right.bounds.output.clone()
    for share, out, (_, _, exact, lse) in zip(shares, outs, parts, strict=True):
        moved = lse_bound(lse, exact.bounds.lse, exact.lse.nan_to_num(neginf=0.0))[..., None]
        added = share * (exact.bounds.output + 2 * moved * (out - right.output).abs())
        bound += torch.where(share > 0, added, 0.0)  # a part that counts nothing may be bounded by anything
    merged = torch.where(right.lse[..., None] > -torch.inf, merged, right.output)
    worst = tolerance.worst(merged, right.output, bound.nan_to_num())
    require_within(
        worst, "merged output", merge="decoding-splits",
        because=f"merged from {len(parts)} parts of unequal size",
        hint="a part in which a query sees no key gives 0 and a log-sum-exp of -inf",
    )  # fmt: skip


def uneven_parts(whole: Arguments) -> Iterator[Arguments]:
    """The call on one key, on most of the keys, and on a short rest."""
    length = whole.k.shape[2]
    cuts = sorted({0, 1, length - max(2, length // 4), length})
    for start, stop in zip(cuts, cuts[1:], strict=False):
        k, v = (x[:, :, start:stop].contiguous() for x in (whole.k, whole.v))
        mask = whole.mask
        if mask is not None and mask.shape[-1] > 1:
            mask = mask[..., start:stop].contiguous()
        yield whole.replace(k=k, v=v, mask=mask)


def _nothing(implementation: Implementation, exact: Tensor, lse: Tensor) -> Tensor:
    """The log-sum-exp of a part, with the infinity by which the implementation says that it is empty as -inf."""
    value = float(implementation.conventions.lse_empty.value)
    return torch.where((exact == -torch.inf) & (lse == value), -torch.inf, lse)


# batches -------------------------------------------------------------------------------------------------------------


@law("ATN1006", "left-padding", "A sample that is padded on the left gives what it gives alone")
def left_padding(implementation: Implementation, problem: Problem) -> None:
    """rows of the last n_b tokens, the others hidden, causal  =  the causal f on these n_b tokens alone

    Why: prompts of a batch are padded on the left, so that their last tokens stand side by side.
    Example: a padding mask that takes the place of the triangle; one that is broadcast over the queries.
    """
    needs_plain(implementation)
    whole, length = arguments_for(implementation, problem), problem.q_len
    got, exact = output(implementation, whole), answer_to(implementation, problem)
    for n, real in enumerate(filled(problem)):
        one, rows = slice(n, n + 1), slice(length - real, length)
        q, k, v = (x[one, :, rows].contiguous() for x in (whole.q, whole.k, whole.v))
        slopes = whole.alibi[one] if whole.alibi is not None and whole.alibi.dim() == 2 else whole.alibi
        alone = whole.replace(q=q, k=k, v=v, mask=None, form=None, alibi=slopes)
        if problem.causal is not None and not problem.causal_by_flag:
            past = torch.ones(real, real, dtype=torch.bool).tril()
            alone = alone.replace(mask=past[None, None], form="bool")
        right = answer(implementation, alone)
        because = f"sample {n}, {length - real} tokens of padding on its left"
        bound = torch.maximum(right.bounds.output, exact.bounds.output[one, :, rows])
        worst = tolerance.worst(got[one, :, rows], right.output, bound)
        require_within(worst, "output", because=because, merge="decoding-left-padding")
        require_within(right.compare(output(implementation, alone)), "output", because=f"sample {n} alone")
