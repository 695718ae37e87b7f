"""The oracle: the float64 answer on the very inputs an implementation got, with the bound of every element.

It runs the reference pipeline a few query rows at a time, so that its memory grows with S and not with S^2
(benchmarks/oracle_memory.py measures it).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attn_spec import backward, blocks, tolerance
from attn_spec.backward import Backward, Cotangents, Gradients
from attn_spec.conventions import Meaning
from attn_spec.gradient_bounds import gradient_bounds
from attn_spec.problem import FEW, Arguments, Problem
from attn_spec.tolerance import Bounds, Precision, Worst

CHUNK = 1 << 17  # logits held at once


@dataclass(frozen=True, eq=False)
class Answer:
    """Output [B, H, Sq, Dv] and log-sum-exp [B, H, Sq] in float64, weights [B, H, Sq, Sk] if asked, and the bounds."""

    output: Tensor
    lse: Tensor
    weights: Tensor | None
    bounds: Bounds

    def compare(self, output: Tensor) -> Worst:
        """Where an output is furthest beyond the bound."""
        return tolerance.worst(output, self.output, self.bounds.output)


@torch.no_grad()
def answer(
    arguments: Arguments,
    meaning: Meaning,
    precision: Precision,
    *,
    weights: bool = False,
    pipeline: blocks.Pipeline = blocks.RIGHT,
    chunk: int = CHUNK,
) -> Answer:
    """The right answer to the arguments, and how far an implementation of this precision may be from it.

    Raises ValueError where a changed pipeline is to be run in blocks of rows: a fault may look at all rows at once.
    """
    exact = arguments.double()
    if exact.lengths is not None:
        return _packed(exact, meaning, precision)
    b, h, q_len, kv_len = exact.sizes
    step = max(1, chunk // max(1, b * h * kv_len))
    whole = step >= q_len
    if not whole and pipeline is not blocks.RIGHT:
        raise ValueError(f"pipeline: a changed pipeline is run on all rows at once; raise chunk above {chunk}")
    if whole:
        return _block(exact, meaning, precision, pipeline, None, weights)
    k, v = (blocks.share_heads(x, h, meaning.grouping) for x in (exact.k, exact.v))
    exact = exact.replace(k=k, v=v)  # once, and not for every block of rows
    # results are written in place: small ones kept between large ones freed would tear the heap into pieces
    width, rows_of = exact.v.shape[3], (b, h, q_len)
    new = exact.q.new_empty
    p_shape = (*rows_of, kv_len if weights else 0)
    bounds = Bounds(new(*rows_of, width), new(p_shape), new(rows_of))
    joined = Answer(new(*rows_of, width), new(rows_of), new(p_shape) if weights else None, bounds)
    for start in range(0, q_len, step):
        rows = slice(start, min(start + step, q_len))
        part = _block(exact, meaning, precision, pipeline, rows, weights)
        joined.output[:, :, rows], joined.lse[:, :, rows] = part.output, part.lse
        bounds.output[:, :, rows], bounds.lse[:, :, rows] = part.bounds.output, part.bounds.lse
        if joined.weights is not None and part.weights is not None:
            joined.weights[:, :, rows], bounds.weights[:, :, rows] = part.weights, part.bounds.weights
    return joined


def known_answer(problem: Problem, meaning: Meaning, precision: Precision) -> Answer:
    """The answer to a problem as it stands, on the CPU; kept, for many laws and implementations ask for the same."""
    few = problem.batch * problem.heads * problem.q_len * problem.v_dim <= FEW
    return (_few_known if few else _many_known)(problem, meaning, precision)


def _answer_to(problem: Problem, meaning: Meaning, precision: Precision) -> Answer:
    return answer(problem.arguments(meaning.alignment), meaning, precision)


_few_known = lru_cache(maxsize=1024)(_answer_to)
_many_known = lru_cache(maxsize=64)(_answer_to)


def _packed(exact: Arguments, meaning: Meaning, precision: Precision) -> Answer:
    """The answer for packed samples, each by itself; 0 and -inf beyond their end."""
    b, h, q_len, _ = exact.sizes
    output, bound = (exact.q.new_zeros(b, h, q_len, exact.v.shape[3]) for _ in range(2))
    lse, lse_bound = exact.q.new_full((b, h, q_len), -torch.inf), exact.q.new_zeros(b, h, q_len)
    for n in range(b):
        one = answer(exact.sample(n), meaning, precision)
        rows = slice(0, one.output.shape[2])
        output[n, :, rows], bound[n, :, rows] = one.output[0], one.bounds.output[0]
        lse[n, :, rows], lse_bound[n, :, rows] = one.lse[0], one.bounds.lse[0]
    return Answer(output, lse, None, Bounds(output=bound, weights=bound.new_empty(0), lse=lse_bound))


def _block(
    exact: Arguments,
    meaning: Meaning,
    precision: Precision,
    pipeline: blocks.Pipeline,
    rows: slice | None,
    weights: bool,
) -> Answer:
    """The answer for some query rows, or for all of them."""
    t = blocks.run(exact, meaning, pipeline, rows)
    variants = t.softcap, t.slopes, t.sinks
    bounds = tolerance.bounds(t.q, t.k, t.v, t.scale, t.bias, t.logits, t.weights, t.output, precision, *variants)
    if not weights:
        bounds = Bounds(bounds.output, bounds.output.new_empty(0), bounds.lse)
    return Answer(t.output, t.lse, t.weights if weights else None, bounds)


@dataclass(frozen=True, eq=False)
class Derivative:
    """The gradients in float64, and the bound of each of their elements. empty: whether a row sees no key."""

    gradients: Gradients
    bounds: Gradients
    empty: bool = False

    def compare(self, name: str, got: Tensor) -> Worst:
        """Where one of the gradients ("q", "k", "v", "bias", "sinks") is furthest beyond its bound."""
        return tolerance.worst(got, getattr(self.gradients, name), getattr(self.bounds, name))


@torch.no_grad()
def derivative(
    arguments: Arguments,
    meaning: Meaning,
    precision: Precision,
    cotangents: Cotangents,
    *,
    changed: Backward = backward.RIGHT,
) -> Derivative:
    """The right gradients for the cotangents, and how far an implementation of this precision may be from them.

    All rows at once: for problems of a size at which a weight for each query and key can be kept.
    """
    if arguments.lengths is not None:
        return _packed_derivative(arguments, meaning, precision, cotangents, changed)
    steps = backward.run(arguments.double(), meaning, cotangents.to(torch.float64), changed)
    empty = bool((steps.forward.logits == -torch.inf).all(-1).any())
    return Derivative(steps.gradients, gradient_bounds(arguments, meaning, steps, precision), empty)


def _packed_derivative(
    arguments: Arguments, meaning: Meaning, precision: Precision, cotangents: Cotangents, changed: Backward
) -> Derivative:
    """The gradients of packed samples, each by itself; 0 beyond their end, and without queries or without keys."""
    given = {"q": arguments.q, "k": arguments.k, "v": arguments.v, "sinks": arguments.sinks}
    new = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in given.items() if x is not None}
    bounds, empty = {name: torch.zeros_like(x) for name, x in new.items()}, False
    for n in range(len(arguments.q)):
        one = arguments.sample(n)
        _, _, q_len, kv_len = one.sizes
        if not q_len or not kv_len:
            empty = empty or bool(q_len)
            continue
        do, dlse = (None if x is None else x[n : n + 1, :, :q_len] for x in (cotangents.output, cotangents.lse))
        assert do is not None
        found = derivative(one, meaning, precision, Cotangents(do, dlse), changed=changed)
        empty = empty or found.empty
        for name in new:
            where = (
                (slice(None),)
                if name == "sinks"
                else (slice(n, n + 1), slice(None), slice(0, getattr(one, name).shape[2]))
            )
            new[name][where] += getattr(found.gradients, name)
            bounds[name][where] += getattr(found.bounds, name)
    return Derivative(Gradients(**new), Gradients(**bounds), empty)
