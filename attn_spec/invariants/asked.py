"""A problem as the call that a procedure makes (`attn_spec.adapters.running`), and how near two answers must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_spec.adapters.function import BACK, FunctionAdapter
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.hidden import hidden_call
from attn_spec.invariants.comparison import answer_to, arguments_for, same
from attn_spec.invariants.differentiation import precision_of, right_for
from attn_spec.law import Unsupported, Violation
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import Worst, roundoff

WHOLE = 16  # roundoffs of the largest element by which one answer of a whole module may be off
BACKWARDS = 64  # the same for its gradients: the backward pass has four sums for each of the forward one's


@dataclass(frozen=True, eq=False)
class Asked:
    """A problem as plain data for a procedure: `question`.

    whole: it is asked of a whole module, on hidden states, and not of a function of q, k and v.
    """

    implementation: Implementation
    problem: Problem
    arguments: Arguments
    question: dict[str, Any]
    whole: bool

    def compare(self, got: Tensor, expected: Tensor) -> Worst:
        """Two outputs, as the procedure gave them, of which each is right within its bound. Raises Violation."""
        if got.shape != expected.shape or got.dtype != expected.dtype:
            raise Violation(
                f"the output is {list(got.shape)} of {got.dtype}, expected {list(expected.shape)} of {expected.dtype}",
                merge="run-otherwise-shape",
            )
        if self.whole:
            return same(got, expected, _of_largest(expected, WHOLE))
        bound = answer_to(self.implementation, self.problem).bounds.output
        return same(self.output(got), self.output(expected), bound)

    def output(self, returned: Any) -> Tensor:
        """What a function returned, as its output [B, H, Sq, Dv]."""
        adapter = self.implementation.adapter
        assert isinstance(adapter, FunctionAdapter)
        return adapter.result(returned, self.arguments).output

    def gradients(self, raw: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The gradients of q, k and v, as a procedure gave them, by name and in canonical form."""
        adapter = self.implementation.adapter
        assert isinstance(adapter, FunctionAdapter)
        names = {adapter.signature.roles[role]: role for role in "qkv"}
        order = [names[p.name] for p in adapter.signature.parameters if p.name in names]
        layout = self.implementation.conventions.layout.value
        for name, x in zip(order, raw, strict=True):
            like = getattr(self.arguments, name)
            yield name, x.reshape(like.shape) if layout == "NSD" else x.permute(BACK[layout])

    def compare_gradients(self, got: list[Tensor], expected: list[Tensor]) -> Iterator[tuple[str, Worst]]:
        """Each gradient by its name, each of the two being right within its bound."""
        if self.whole:
            for name, one, other in zip(("dX", "dContext"), got, expected, strict=False):
                yield name, same(one, other, _of_largest(other, BACKWARDS))
            return
        problem = self.problem
        right = right_for(self.implementation, problem, precision_of(self.implementation, problem.dtype))
        pairs = zip(self.gradients(got), self.gradients(expected), strict=True)
        for (name, one), (_, other) in pairs:
            yield f"d{name.upper()}", same(one, other, getattr(right.bounds, name))


def _of_largest(x: Tensor, roundoffs: int) -> Tensor:
    """That many roundoffs of the largest element, for each element."""
    size = x.double().abs().max().clamp(min=1e-6) if x.numel() else x.double().sum()
    return roundoffs * roundoff(str(x.dtype).removeprefix("torch.")) * size * torch.ones_like(x, dtype=torch.float64)


def ask(
    implementation: Implementation,
    problem: Problem,
    *,
    gradients: bool = False,
    core: bool = False,
    arguments: Arguments | None = None,
) -> Asked:
    """A problem as a procedure gets it: of a function, or of a whole module on hidden states.

    gradients: with respect to q, k and v, or to the hidden states.  core: of a module, what lies between its
    projections.  arguments: in place of those that the problem makes.
    Raises Unsupported where it can't be asked so.
    """
    problem = implementation.as_asked(problem)
    arguments = arguments_for(implementation, problem) if arguments is None else arguments
    if implementation.is_module and not core:
        hidden = hidden_call(implementation, problem)
        for x in hidden.inputs:
            x.requires_grad_(gradients)
        question = {"x": hidden.x, "context": hidden.context, "sizes": hidden.sizes, "named": hidden.named}
        return Asked(implementation, problem, arguments, question, True)
    adapter, layout = implementation.adapter, implementation.conventions.layout.value
    if not isinstance(adapter, FunctionAdapter):
        raise Unsupported("an adapter of its own")
    if adapter.signature.has("lengths") or layout == "SD":
        raise Unsupported("a function of packed sequences" if layout != "SD" else "a function of one head")
    mask = arguments.mask
    if layout == "NSD" and (mask is not None or arguments.q.shape[1] != arguments.k.shape[1]):
        raise Unsupported("q, k and v are [N, S, D]")
    if gradients:
        q, k, v = (x.detach().requires_grad_() for x in (arguments.q, arguments.k, arguments.v))
        arguments = arguments.replace(q=q, k=k, v=v)
    with torch.enable_grad():
        args, kwargs = adapter.call_arguments(arguments)
    return Asked(implementation, problem, arguments, {"args": args, "kwargs": kwargs}, False)
