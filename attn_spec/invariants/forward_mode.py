"""The forward-mode derivative: it is that of the function, where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attn_spec.adapters.function import FunctionAdapter, flat
from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import answer_to, arguments_for, needs_plain, output
from attn_spec.invariants.differentiation import cotangents_for, slope_at_zero
from attn_spec.law import Refused, Unsupported, Violation, law
from attn_spec.problem import Problem


def tangent_of(
    function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], along: list[Any], named: dict[str, Any]
) -> tuple[Tensor | None, bool]:
    """The tangent of the first tensor that a call returns, and whether that carries a gradient.

    along, named: the tangents, in the places of the tensors that have one; elsewhere what was given.  None: no tangent
    came out.
    """

    def dual(x: Any, t: Any) -> Any:
        if not isinstance(x, Tensor) or torch.equal(x, t):
            return x
        return forward_ad.make_dual(x, t)  # type: ignore[no-untyped-call]

    def leaf(x: Any, t: Any) -> Any:
        return x.detach().requires_grad_() if isinstance(x, Tensor) and not torch.equal(x, t) else x

    with forward_ad.dual_level():
        given = [dual(x, t) for x, t in zip(args, along, strict=True)]
        returned = function(*given, **{name: dual(x, named[name]) for name, x in kwargs.items()})
        found = flat(returned)
        tangent = forward_ad.unpack_dual(found[0]).tangent if found else None  # type: ignore[no-untyped-call]
    if tangent is not None:
        return tangent, True
    with torch.enable_grad():
        given = [leaf(x, t) for x, t in zip(args, along, strict=True)]
        found = flat(function(*given, **{name: leaf(x, named[name]) for name, x in kwargs.items()}))
    return None, bool(found) and found[0].requires_grad


@law("ATN914", "forward-mode", "The forward-mode derivative, where there is one, is that of the function")
def forward_mode(implementation: Implementation, problem: Problem) -> None:
    """(d out / d(q, k, v) . d) . w = the slope of out . w along d, for random d and w, in float64, of its own output

    Why: consistency models and second-order methods push tangents forward, by a rule written apart from both passes.
    Example: a `jvp` that leaves out what the values contribute.
    """
    if implementation.precision_for("float64").scores != "float64":
        raise Unsupported("float64 is computed in a coarser type")
    needs_plain(implementation)
    adapter = implementation.adapter
    if not isinstance(adapter, FunctionAdapter) or implementation.is_module or adapter.signature.has("lengths"):
        raise Unsupported("tangents are asked for of functions of q, k and v only")
    arguments = arguments_for(implementation, problem)
    if implementation.conventions.layout.value not in ("BHSD", "BSHD", "SBHD"):
        raise Unsupported("q, k and v have fewer than four axes")
    g = torch.Generator().manual_seed(problem.seed + 274177)
    names = ("q", "k", "v")
    along = {n: torch.randn(getattr(arguments, n).shape, generator=g, dtype=torch.float64) for n in names}
    args, kwargs = adapter.call_arguments(arguments)
    tangents, named = adapter.call_arguments(arguments.replace(**along))
    try:
        tangent, carries = implementation.perform(tangent_of, args, kwargs, tangents, named)
    except Refused as error:
        raise Unsupported(f"no forward-mode derivative: {error}") from None
    if tangent is None and not carries:
        raise Unsupported("the output carries no gradient")
    if tangent is None:
        raise Violation(
            "the output carries a gradient, and no tangent: a forward-mode derivative of it is zero",
            hint="write `jvp`, or raise NotImplementedError",
            merge="forward-mode",
        )
    given = cotangents_for(problem).output
    found = adapter.result(tangent, arguments).output
    if found.shape != given.shape:
        raise Violation(f"the tangent of the output has shape {list(found.shape)}", merge="forward-mode")

    def out(step: float) -> float:
        moved = arguments.replace(**{name: getattr(arguments, name) + step * along[name] for name in names})
        return float((implementation(moved).output.detach().double() * given).sum())

    slope, apart = slope_at_zero(out, 1e-4)
    terms = found.double() * given
    received, size = float(terms.sum()), float(terms.abs().sum()) + 1e-6
    if not abs(received - slope) <= 1e-6 * size + apart:
        if not answer_to(implementation, problem).compare(output(implementation, arguments)).holds:
            raise Unsupported("the output is wrong, and may have no slope to compare a tangent with")
        raise Violation(
            f"along random directions of q, k and v the tangent of the output gives {received:.8g}, and the output "
            f"changes by {slope:.8g}",
            evidence={"received": received, "expected": slope},
            merge="forward-mode",
        )
