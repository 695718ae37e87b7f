"""A fault as an implementation: for kill matrices, and to try a suite on something that is known to be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_spec import blocks
from attn_spec.adapters.implementation import Implementation, Result
from attn_spec.backward import RIGHT, Backward, Cotangents, run
from attn_spec.conventions import Conventions, Finding, Meaning
from attn_spec.faults.fault import Fault
from attn_spec.law import Unsupported
from attn_spec.problem import Arguments


@dataclass(frozen=True)
class Planted:
    """Runs the pipeline of a fault (or the right one), half types in float32; takes every mask, scale and flag."""

    fault: Fault | None
    meaning: Meaning

    def __call__(self, arguments: Arguments) -> Result:
        if arguments.lengths is not None:
            raise Unsupported("no packed sequences")
        dtype = arguments.q.dtype
        if dtype in (torch.float16, torch.bfloat16):
            arguments = arguments.cast(torch.float32)
        backward = RIGHT if self.fault is None else self.fault.backward_for(arguments)
        own = self.fault is None or self.fault.shows != "output"
        if own and torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in _given(arguments)):
            output, lse, weights = _Passes.apply(self, arguments, backward, *_given(arguments))  # type: ignore[no-untyped-call]
        else:
            output, lse, weights = self._forward(arguments)
        return Result(output.to(dtype), weights, lse if arguments.returns == "lse" else None)

    def _forward(self, arguments: Arguments) -> tuple[Tensor, Tensor | None, Tensor]:
        pipeline = blocks.RIGHT if self.fault is None else self.fault.pipeline_for(arguments)
        trace = blocks.run(arguments, self.meaning, pipeline)
        return trace.output, trace.lse if arguments.returns == "lse" else None, trace.weights

    def source(self, arguments: Arguments) -> str:
        return "impl(q, k, v, mask)"


def _given(arguments: Arguments) -> list[Tensor | None]:
    return [arguments.q, arguments.k, arguments.v, arguments.mask, arguments.sinks]


class _Passes(torch.autograd.Function):
    """A forward pass, and a backward pass of the blocks of `attn_spec.backward`."""

    @staticmethod
    def forward(ctx: Any, planted: Planted, arguments: Arguments, backward: Backward, *given: Any) -> Any:
        ctx.planted, ctx.arguments, ctx.backward = planted, arguments, backward
        output, lse, weights = planted._forward(arguments)
        ctx.mark_non_differentiable(weights)
        ctx.set_materialize_grads(False)
        return output, lse, weights

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        do, dlse = cotangents[:2]
        a: Arguments = ctx.arguments
        if do is None:
            do = a.q.new_zeros(*a.q.shape[:3], a.v.shape[3])
        with torch.no_grad():
            found = run(a, ctx.planted.meaning, Cotangents(do, dlse), ctx.backward).gradients
        bias = found.bias if a.mask is not None and a.mask.requires_grad else None
        return None, None, None, found.q, found.k, found.v, bias, found.sinks


def planted(fault: Fault | None, meaning: Meaning | None = None) -> Implementation:
    """An implementation that has this fault and no other; without a fault, the right one."""
    meaning = meaning or Meaning()
    conventions = Conventions(
        causal=Finding("flag", "declared", "planted"),
        alignment=Finding(meaning.alignment, "declared", "planted"),
        empty_rows=Finding(meaning.empty_rows, "declared", "planted"),
        grouping=Finding(meaning.grouping, "declared", "planted"),
        window_alignment=Finding(meaning.window_alignment, "declared", "planted"),
        lse_base=Finding("e", "declared", "planted"),
    )
    name = "right" if fault is None else fault.id
    return Implementation(name, f"planted:{name}", Planted(fault, meaning), conventions)
