"""The lines of a reproducer for what is beside the output: the log-sum-exp, and the gradients."""

from __future__ import annotations

import ast
import contextlib
from typing import Any

import torch

from attn_spec.adapters.implementation import Implementation
from attn_spec.conventions import Meaning
from attn_spec.law import Refused, Violation
from attn_spec.problem import TENSORS, Arguments, Problem

Lines = list[str]
FIELDS = {"bias": "mask"}


def lse_call(implementation: Implementation, arguments: Arguments) -> str | None:
    """The call as an expression that gives the log-sum-exp [B, H, Sq], out of the tuple that it comes in."""
    function = getattr(implementation.adapter, "function", None)
    b, h, q_len, _ = arguments.sizes
    if function is None:
        return None
    source = implementation.adapter.source(arguments.replace(returns="lse"))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    inner = next((ast.unparse(node) for node in calls if getattr(node.func, "id", "") == "impl"), "")
    names: dict[str, Any] = {name: getattr(arguments, name) for name in TENSORS} | {"torch": torch, "impl": function}
    with contextlib.suppress(Refused, Violation):
        returned = implementation.shielded(eval, inner, names)
        if isinstance(returned, (tuple, list)):
            places = [n for n, x in enumerate(returned) if isinstance(x, torch.Tensor) and x.shape == (b, h, q_len)]
            return f"{inner}[{places[0]}]" if places else None
    return None


def lse_lines(arguments: Arguments, meaning: Meaning, formula: Lines) -> Lines:
    """The right log-sum-exp by the formula for the output, without its last line."""
    lines = [line for line in formula[:-1] if not line.startswith("extra = ")]
    if arguments.sinks is None or meaning.lse_sinks == "excluded":
        return [*lines, "expected_lse = torch.logsumexp(s, -1)"]
    extra = "torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)"
    return [*lines, f"expected_lse = torch.logsumexp({extra}, -1)"]


def gradient_lines(problem: Problem, arguments: Arguments, name: str, call: str, formula: Lines) -> Lines:
    """The gradient that autograd gets from the implementation, and from the formula in float64."""
    field = FIELDS.get(name, name)
    shape = (problem.batch, problem.heads, problem.q_len, problem.v_dim)
    drawn = (
        f"torch.randn({shape}, generator=torch.Generator().manual_seed({problem.seed + 611953}), dtype=torch.float64)"
    )
    given = [n for n in ("q", "k", "v", "sinks") if getattr(arguments, n) is not None]
    given += ["mask"] if name == "bias" else []
    return [
        f"cotangent = {drawn}.to(torch.{problem.dtype})",
        *(f"{n}.requires_grad_()" for n in given),
        f"(got_gradient,) = torch.autograd.grad({call}, {field}, cotangent)",
        *(f"{n} = {n}.detach().double().requires_grad_()" for n in given),
        *formula,
        f"(right_gradient,) = torch.autograd.grad(expected, {field}, cotangent.double())",
    ]
