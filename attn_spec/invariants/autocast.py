"""Autocast: products in half precision, and the rest of an attention in whatever precision that leaves."""

from __future__ import annotations

from typing import Any

import torch

from attn_spec import oracle
from attn_spec.adapters import running
from attn_spec.adapters.function import into_layout
from attn_spec.adapters.implementation import Implementation
from attn_spec.backward import Cotangents
from attn_spec.invariants.asked import Asked, ask
from attn_spec.invariants.comparison import answer_to, arguments_for, needs_plain, output, require_within
from attn_spec.invariants.differentiation import cotangents_for
from attn_spec.law import Advisory, Unsupported, Violation, law
from attn_spec.masks import Delivery
from attn_spec.problem import DTYPES, Arguments, Problem
from attn_spec.tolerance import Precision

HALVES = ("bfloat16", "float16")


@law("ATN1225", "autocast", "Under autocast it is right in half precision, masks and gradients included")
def autocast(implementation: Implementation, problem: Problem) -> None:
    """float32 inputs under torch.autocast, in bfloat16 and float16: within the bound of code that rounds every step

    Why: products are in half precision then and the rest is not; constants overflow, and dtypes meet that never met.
    Example: `masked_fill(mask, -1e10)`, which float16 can't hold; a float32 mask beside queries that were cast.
    """
    needs_plain(implementation)
    problem = implementation.as_asked(problem)
    right = answer_to(implementation, problem)
    if not right.compare(output(implementation, arguments_for(implementation, problem))).holds:
        raise Unsupported("its answer without autocast is wrong already")
    for dtype in HALVES:
        arguments = _representable(arguments_for(implementation, problem), DTYPES[dtype])
        asked, found, given = _autocast(implementation, problem, dtype, arguments)
        if found.get("deliberate"):  # it has perhaps no backward pass
            asked, found, given = _autocast(implementation, problem, dtype, arguments, gradients=False)
        how = f"under autocast in {dtype}"
        if "raised" in found:
            _autocast_raised(implementation, problem, dtype, f"{how}: raises {found['raised']}", found["deliberate"])
        if found["state"]:
            raise Violation(f"{how}: the call leaves it changed ({found['state']})", merge="autocast-state")
        _autocast_right(asked, found, given, dtype, how)


def _representable(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """The arguments with q, k and v that the half type holds, in their own type."""
    q, k, v = (x.to(dtype).to(x.dtype) for x in (arguments.q, arguments.k, arguments.v))
    return arguments.replace(q=q, k=k, v=v)


def _autocast(
    implementation: Implementation, problem: Problem, dtype: str, arguments: Arguments, *, gradients: bool = True
) -> tuple[Asked, dict[str, Any], Cotangents]:
    asked = ask(implementation, problem, gradients=gradients, core=True, arguments=arguments)
    given = Cotangents(cotangents_for(problem).output.to(DTYPES[dtype]).to(problem.torch_dtype), None)
    cotangent = into_layout(given.output, implementation.conventions.layout_out.value)
    question = {**asked.question, "cotangent": cotangent}
    found: dict[str, Any] = implementation.perform(running.autocast, question, dtype)
    return asked, found, given


def _autocast_raised(
    implementation: Implementation, problem: Problem, dtype: str, message: str, deliberate: bool
) -> None:
    """Raise what an exception under autocast is, with the plain call beside it to tell whether the mask is to blame."""
    if deliberate:
        raise Unsupported(message)
    merge = "autocast-raises"
    if problem.mask:
        plain = implementation.as_asked(problem.replace(mask=(), delivery=Delivery()))
        arguments = _representable(arguments_for(implementation, plain), DTYPES[dtype])
        if "raised" not in _autocast(implementation, plain, dtype, arguments)[1]:
            merge = "autocast-mask-dtype" if problem.delivery.form == "additive" else f"autocast-fill-{dtype}"
    _raised(implementation, message, merge)


def _raised(implementation: Implementation, message: str, merge: str) -> None:
    """That it raises is red where `autocast` is claimed: much honest code was never run so."""
    claimed = "autocast" in implementation.claims
    raise (Violation if claimed else Advisory)(
        f"{message}; `claims:` says autocast" if claimed else f"{message}; `claims: [autocast]` makes this red",
        merge=merge,
        hint="take dtypes and the numbers that stand for -inf from the scores; see torch.amp.custom_fwd",
    )


def _autocast_right(asked: Asked, found: dict[str, Any], given: Cotangents, dtype: str, how: str) -> None:
    out = asked.output(found["returned"])
    if out.dtype not in (torch.float32, DTYPES[dtype]):
        raise Violation(f"{how}: the output is {out.dtype}", merge="autocast-dtype")
    if not bool(out.isfinite().all()):
        number = int((~out.isfinite()).sum())
        raise Violation(f"{how}: {number} of {out.numel()} elements are not finite", merge="autocast-not-finite")
    loose, meaning = Precision(dtype, dtype, dtype, dtype), asked.implementation.conventions.meaning
    right = oracle.answer(asked.arguments, meaning, loose)
    require_within(right.compare(out), "output", because=how, merge="autocast-answer")
    if "backward" in found:
        _raised(asked.implementation, f"{how}: its backward pass raises {found['backward']}", "autocast-gradient")
    if found["gradients"]:
        derivative = oracle.derivative(asked.arguments, meaning, loose, given)
        for name, got in asked.gradients(found["gradients"]):
            worst = derivative.compare(name, got)
            require_within(worst, f"d{name.upper()}", because=how, merge="autocast-gradient")
