"""Functions with a cache in their signature: what they write to it, and how they find their keys in it.

That their outputs are right, every other law says: `attn_spec.adapters.cached` makes a cache of each problem.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attn_spec import tolerance
from attn_spec.adapters.cached import Cached, Laid
from attn_spec.adapters.function import FunctionAdapter
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.parcels import moved
from attn_spec.invariants.comparison import (
    answer,
    answer_to,
    arguments_for,
    difference,
    evidence,
    require_within,
    same,
)
from attn_spec.law import Advisory, Unsupported, Violation, law
from attn_spec.problem import Arguments, Problem


class Calls:
    """The calls of a function with a cache on one problem; q [B, H, Sq, D] and what else it is asked for."""

    def __init__(self, implementation: Implementation, problem: Problem) -> None:
        adapter = implementation.adapter
        cached = getattr(getattr(adapter, "function", None), "of_cache", None)
        if not isinstance(adapter, FunctionAdapter) or not isinstance(cached, Cached):
            raise Unsupported("no cache in its signature")
        self.implementation, self.adapter, self.cached = implementation, adapter, cached
        self.arguments = arguments_for(implementation, problem)
        args, self.named = adapter.call_arguments(self.arguments.replace(lengths=None))
        self.q, self.k, self.v = moved(args, implementation.device)[:3]
        every = [self.arguments.q.shape[2]] * len(self.q), [self.arguments.k.shape[2]] * len(self.q)
        self.lengths = self.arguments.lengths or every

    def laid(self, **how: Any) -> Laid:
        """The cache of the problem; see `Cached.laid`."""
        return self.cached.laid(self.k, self.v, self.lengths[1], **how)

    def on(self, laid: Laid, q: Tensor | None = None, like: Arguments | None = None) -> Tensor:
        """The output [B, H, Sq, Dv] of one call on a cache, which the call may write to."""
        q, named = self.q if q is None else q, moved(self.named, self.implementation.device)
        returned = self.implementation.shielded(self.cached.call, q, laid, **named)
        return self.adapter.result(returned, like or self.arguments).output.detach().cpu()


@law("ATN1010", "cache-written", "New keys and values are written to their own slots of the cache, and to no other")
def cache_written(implementation: Implementation, problem: Problem) -> None:
    """k_cache[b, n_b + i] = k[b, i], v_cache likewise; every other slot, page and row as it was

    Why: what is written elsewhere is another request's text, or the next layer's weights.
    Example: whole tiles stored where three tokens are new; a store that goes on behind a full cache.
    """
    calls = Calls(implementation, problem)
    if not calls.cached.appends:
        raise Unsupported("it appends no new keys")
    new = problem.q_len
    for paged in calls.cached.kinds:
        for behind in (3, 0):
            laid, right = (calls.laid(new=new, paged=paged, behind=behind) for _ in range(2))
            arenas = [torch.cat([x, x[:1].flip(1)]) for x in (laid.k_cache, laid.v_cache)]  # a row behind the last
            laid.k_cache, laid.v_cache = (x[:-1] for x in arenas)
            _written(calls.cached, right)
            expected = [torch.cat([x, y[-1:]]) for x, y in zip((right.k_cache, right.v_cache), arenas, strict=True)]
            expected = [x.clone() for x in expected]
            calls.on(laid)
            for name, got, want in zip(("k_cache", "v_cache"), arenas, expected, strict=True):
                _require_equal(name, got, want, calls.cached, "pages" if paged else "rows")


def _written(cached: Cached, laid: Laid) -> None:
    """Do to a cache what the call should have done to it."""
    assert laid.k is not None
    assert laid.v is not None
    for cache, new in ((laid.k_cache, laid.k), (laid.v_cache, laid.v)):
        view, x = (y if cached.layout == "BSHD" else y.transpose(1, 2) for y in (cache, new))
        for n, start in enumerate(laid.filled.tolist()):
            at = torch.arange(start, start + x.shape[1], device=x.device)
            if laid.table is not None:
                view[laid.table[n].long()[at // cached.page], at % cached.page] = x[n]
            else:
                view[n if laid.rows is None else int(laid.rows[n]), at] = x[n]


def _require_equal(name: str, got: Tensor, expected: Tensor, cached: Cached, what: str) -> None:
    got, expected = (x.cpu() if cached.layout == "BSHD" else x.cpu().transpose(1, 2) for x in (got, expected))
    wrong = (got != expected).flatten(2).any(-1)
    if bool(wrong.any()):
        row, place = (int(n) for n in torch.nonzero(wrong)[0])
        raise Violation(
            f"in a cache of {what}, slot {place} of {what[:-1]} {row} of {name} does not hold what it should "
            f"({int(wrong.sum())} slots are wrong)",
            evidence={"row": row, "slot": place, "received": got[row, place].flatten()[:4].tolist(),
                      "expected": expected[row, place].flatten()[:4].tolist()},
            hint="new token i of sample b goes to slot len(cache of b) + i, and nothing else is touched",
            merge="cache-written",
        )  # fmt: skip


@law("ATN1011", "pages-equal-rows", "A cache in pages gives what a cache in rows gives")
def pages_equal_rows(implementation: Implementation, problem: Problem) -> None:
    """f(cache in pages, in any order, with junk pages between) = f(cache in rows)

    Why: the pages of a new server lie in order, and those of a busy one do not.
    Example: the block table accepted and not read; pages of another size than those written.
    """
    calls = Calls(implementation, problem)
    if not calls.cached.pages:
        raise Unsupported("no block table")
    right = answer_to(implementation, problem)
    paged = calls.on(calls.laid(paged=True))
    worst = right.compare(paged)
    require_within(worst, "output", because="a cache in pages", merge="cache-pages")
    if not calls.cached.rows:
        return
    rows = calls.on(calls.laid(paged=False))
    require_within(right.compare(rows), "output", because="a cache in rows", merge="cache-rows")
    require_within(
        same(paged, rows, right.bounds.output), "output", because="pages instead of rows", merge="cache-pages"
    )


@law("ATN1012", "sequences-apart", "Two sequences in one cache do not meet")
def sequences_apart(implementation: Implementation, problem: Problem) -> None:
    """what stands in the rows and pages of other samples, and in free ones, does not matter to a sample

    Why: one request reads the text of another, and only under load.
    Example: the rows of the first sample for all; `cache_batch_idx` ignored.
    """
    calls = Calls(implementation, problem)
    right = answer_to(implementation, problem)
    for paged in calls.cached.kinds:
        whole = calls.laid(paged=paged)
        together = calls.on(whole)
        for n in range(len(calls.q)):
            one = slice(n, n + 1)
            table, rows = (None if x is None else x[one] for x in (whole.table, whole.rows))
            if table is None and rows is None:
                alone = Laid(whole.k_cache[one], whole.v_cache[one], None, None, whole.filled[one])
            else:
                alone = Laid(whole.k_cache, whole.v_cache, None, None, whole.filled[one], rows, table)
            like = calls.arguments.replace(**{x: getattr(calls.arguments, x)[one] for x in "qkv"}, lengths=None)
            got = calls.on(alone, calls.q[one].contiguous(), like)
            for kind, out in (("alone", got), ("beside the others", together[one])):
                worst = tolerance.worst(out, right.output[one], right.bounds.output[one])
                because = f"sample {n} {kind}, in a cache of {'pages' if paged else 'rows'} that holds all"
                require_within(worst, "output", because=because, merge="cache-samples-meet")


@law("ATN1013", "cache-filled-by-itself", "With the cache that it has written itself, parts give the whole")
def cache_filled_by_itself(implementation: Implementation, problem: Problem) -> None:
    """an empty cache, and the tokens appended in parts  =  the causal f on all of them

    Why: what is written and what is read can be wrong together, or each in its own way.
    Example: a page size for writing and another for reading; the second chunk on the slots of the first.
    """
    calls = Calls(implementation, problem)
    if not calls.cached.appends:
        raise Unsupported("it appends no new keys")
    if implementation.conventions.meaning.alignment != "bottom-right":
        raise Unsupported("with a cache, causality is aligned to the bottom right")
    whole, right = calls.arguments, answer_to(implementation, problem)
    length = problem.q_len
    for cuts in ([*range(length + 1)], sorted({0, length // 2 + 1, length - 1, length})):
        laid = calls.laid(new=0)
        for x in (laid.k_cache, laid.v_cache):
            x.fill_(7.0)
        _in_parts(calls, laid, cuts, whole, right)


def _in_parts(calls: Calls, laid: Laid, cuts: Sequence[int], whole: Arguments, right: Any) -> None:
    axis = 1 if calls.cached.layout == "BSHD" else 2
    for start, stop in zip(cuts, cuts[1:], strict=False):
        q, k, v = (x.narrow(axis, start, stop - start).contiguous() for x in (calls.q, calls.k, calls.v))
        filled = torch.full_like(laid.filled, start)
        step = Laid(laid.k_cache, laid.v_cache, k, v, filled, laid.rows, laid.table)
        like = whole.replace(q=whole.q[:, :, start:stop], lengths=None)
        got = calls.on(step, q, like)
        rows = slice(start, stop)
        worst = tolerance.worst(got, right.output[:, :, rows], right.bounds.output[:, :, rows])
        if not worst.holds:
            raise Violation(
                f"tokens {start} to {stop - 1}, appended to {start} that it has written: {difference(worst, 'output')}",
                evidence=evidence(worst),
                merge="cache-filled",
            )


@law("ATN1014", "unfilled-nan", "NaN in slots that are not filled reaches no output", advisory=True)
def unfilled_nan(implementation: Implementation, problem: Problem) -> None:
    """NaN at the slots j >= n_b  =>  out finite, and as without

    Why: a cache from `torch.empty` holds whatever was there; NaN times a weight of 0 is NaN.
    Example: `scores + mask` where `where(mask, scores, -inf)` was meant.
    """
    calls = Calls(implementation, problem)
    laid = calls.laid()
    for x, junk in ((laid.k_cache, 30.0), (laid.v_cache, 1e3)):
        x.masked_fill_(x.abs() == torch.tensor(junk, dtype=x.dtype), torch.nan)
    worst = answer(implementation, calls.arguments).compare(calls.on(laid))
    if not worst.holds:
        raise Advisory(
            f"with NaN behind what is filled, {difference(worst, 'output')}",
            evidence=evidence(worst),
            hint="leave out what is not filled, in the product with v too",
            merge="unfilled-nan",
        )
