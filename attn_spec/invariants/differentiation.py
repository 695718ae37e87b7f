"""Backward passes of an implementation: with which cotangents, in which precision, and what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attn_spec import masks, oracle
from attn_spec.adapters.implementation import Implementation, is_clear
from attn_spec.adapters.parcels import hand_written
from attn_spec.backward import Cotangents, Gradients
from attn_spec.conventions import Meaning
from attn_spec.invariants.comparison import arguments_for, needs_given
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.oracle import Derivative
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import Precision, candidates

FIELDS = {"bias": "mask"}  # the field of `Arguments` that a gradient belongs to, where it has another name
KEPT = 64  # gradients of problems, so that dQ, dK and dV of one call are three laws and one call


def cotangents_for(problem: Problem, *, lse: bool = False) -> Cotangents:
    """Random cotangents of a problem's output and log-sum-exp, in the dtype of the problem and in float32."""
    g = torch.Generator().manual_seed(problem.seed + 611953)
    shape = (problem.batch, problem.heads, problem.q_len)
    do = torch.randn(*shape, problem.v_dim, generator=g, dtype=torch.float64).to(problem.torch_dtype)
    dlse = torch.randn(*shape, generator=g, dtype=torch.float64).to(torch.promote_types(do.dtype, torch.float32))
    return Cotangents(do, dlse if lse else None)


def slope_at_zero(f: Callable[[float], float], step: float) -> tuple[float, float]:
    """The derivative of f at 0 by central differences with one and two steps, extrapolated; and how far they differ."""
    one = (f(step) - f(-step)) / (2 * step)
    two = (f(2 * step) - f(-2 * step)) / (4 * step)
    return one + (one - two) / 3, abs(one - two)


def names_of(arguments: Arguments) -> tuple[str, ...]:
    """The gradients that there are: of q, k and v, of an additive mask, of sinks."""
    additive = arguments.mask is not None and arguments.form == "additive"
    return ("q", "k", "v", *(("bias",) if additive else ()), *(("sinks",) if arguments.sinks is not None else ()))


def differentiate(
    implementation: Implementation,
    arguments: Arguments,
    given: Cotangents,
    wanted: tuple[str, ...] = ("q", "k", "v"),
    *,
    graph: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The gradients that are wanted, and the leaves; of the output and, with a cotangent for it, the log-sum-exp.

    Raises Unsupported where nothing carries a gradient, Refused with what the backward pass raised.
    """
    fields = [FIELDS.get(name, name) for name in wanted]
    leaves = tuple(getattr(arguments, field).detach().requires_grad_() for field in fields)
    arguments = arguments.replace(**dict(zip(fields, leaves, strict=True)))
    with torch.enable_grad():
        result = implementation(arguments if given.lse is None else arguments.replace(returns="lse"))
        pairs = [(result.output, given.output)]
        if given.lse is not None:
            if result.lse is None:
                raise Unsupported("no log-sum-exp is returned")
            pairs.append((result.lse, given.lse.to(result.lse.dtype)))
        if tuple(result.output.shape) != tuple(given.output.shape):
            raise Violation(f"the output has shape {list(result.output.shape)}", merge="output-shape")
        if not pairs[-1][0].requires_grad:
            what = "output" if given.lse is None else "log-sum-exp"
            raise Unsupported(f"the {what} carries no gradient")
        carrying = [(x, g.to(x.dtype)) for x, g in pairs if x.requires_grad]
        outputs, cotangents = zip(*carrying, strict=True)
        try:
            grads = implementation.shielded(
                torch.autograd.grad, outputs, leaves, cotangents, materialize_grads=True, create_graph=graph
            )
        except Refused as error:
            raise Refused(f"backward: {error}", error.error) from error.error
    return grads, leaves


def hand_written_backward(implementation: Implementation, problem: Problem) -> bool:
    """Whether the implementation brings a backward pass of its own, rather than that of torch's operations."""
    arguments = arguments_for(implementation, problem)
    with torch.enable_grad():
        output = implementation(arguments.replace(q=arguments.q.detach().requires_grad_())).output
    function = getattr(implementation.adapter, "function", None)
    apart = getattr(function, "hand_written", None)
    return bool(apart) if apart is not None else hand_written(output)


@dataclass(frozen=True, eq=False)
class Found:
    """What one backward pass gave, and what is right."""

    gradients: Gradients
    right: Derivative


_found: WeakKeyDictionary[Implementation, dict[tuple[Problem, bool], Found]] = WeakKeyDictionary()
_precisions: WeakKeyDictionary[Implementation, dict[str, Precision]] = WeakKeyDictionary()


def gradients(implementation: Implementation, problem: Problem, *, lse: bool = False) -> Found:
    """The gradients of a problem, worked out once for all laws that look at them."""
    needs_given(implementation)
    if implementation.capped and problem.dtype in ("bfloat16", "float16"):
        raise Unsupported("its softcap hides from every probe how its scores are rounded, on which gradients depend")
    kept = _found.setdefault(implementation, {})
    if (problem, lse) not in kept:
        arguments, given = arguments_for(implementation, problem), cotangents_for(problem, lse=lse)
        names, meaning = names_of(arguments), implementation.conventions.meaning
        names = tuple(n for n in names if n != "bias" or not implementation.biased)  # it would be of both together
        try:
            grads, _ = differentiate(implementation, arguments, given, names)
        except Refused as error:  # one that has no gradient of a bias refuses to be given one that asks for it
            if "bias" not in names or not is_clear(error.error):
                raise
            names = tuple(name for name in names if name != "bias")
            grads, _ = differentiate(implementation, arguments, given, names)
        right = right_for(implementation, problem, precision_of(implementation, problem.dtype), lse)
        if right.empty and meaning.empty_rows != "zero":
            raise Unsupported(
                "a row with no visible key is not zero, and what its gradient is depends on how it is made"
            )
        if len(kept) >= KEPT:
            kept.clear()
        kept[problem, lse] = Found(Gradients(**dict(zip(names, (g.detach() for g in grads), strict=True))), right)
    return kept[problem, lse]


def right_for(implementation: Implementation, problem: Problem, precision: Precision, lse: bool = False) -> Derivative:
    """The right gradients of a problem for the cotangents that go with it."""
    meaning = implementation.conventions.meaning
    if not implementation.positional:
        return _right_for(problem, meaning, precision, lse)
    arguments = implementation.effective(arguments_for(implementation, problem))
    return oracle.derivative(arguments, meaning, precision, cotangents_for(problem, lse=lse))


@lru_cache(maxsize=256)
def _right_for(problem: Problem, meaning: Meaning, precision: Precision, lse: bool) -> Derivative:
    arguments = problem.arguments(meaning.alignment)
    return oracle.derivative(arguments, meaning, precision, cotangents_for(problem, lse=lse))


PROBES = tuple(
    Problem(q_len=n, kv_len=n, heads=2, kv_heads=2, head_dim=d, v_dim=d, values=values, seed=seed)
    for n, d, values, seed in ((33, 16, "sharp", 1), (64, 64, "mild", 2))
)


def precision_of(implementation: Implementation, dtype: str) -> Precision:
    """The precision of the backward pass: that of the forward one, or where it does not hold a coarser honest one.

    Measured once, on probes, for the half types; a kernel may keep float32 forwards and round each step backwards.
    """
    forward = implementation.precision_for(dtype)
    if dtype not in ("bfloat16", "float16"):
        return forward
    known = _precisions.setdefault(implementation, {})
    if dtype not in known:
        choices = candidates(dtype)
        coarser = choices[choices.index(forward) :] if forward in choices else [forward]
        known[dtype] = next((p for p in coarser if _holds(implementation, dtype, p)), forward)
    return known[dtype]


def _holds(implementation: Implementation, dtype: str, precision: Precision) -> bool:
    always = implementation.conventions.causal.value == "always"
    for probe in PROBES:
        problem = probe.replace(dtype=dtype, mask=(masks.Causal(),) if always else ())
        try:
            grads, _ = differentiate(implementation, arguments_for(implementation, problem), cotangents_for(problem))
        except (Unsupported, Refused, Violation):
            return False
        right = right_for(implementation, problem, precision)
        if not all(right.compare(name, g).holds for name, g in zip("qkv", grads, strict=True)):
            return False
    return True
