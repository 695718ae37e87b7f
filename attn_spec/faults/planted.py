"""A fault as an implementation: for kill matrices, and to try a suite on something that is known to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_spec import blocks
from attn_spec.adapters.implementation import Implementation, Result
from attn_spec.conventions import Conventions, Finding, Meaning
from attn_spec.faults.fault import Fault
from attn_spec.problem import Arguments


@dataclass(frozen=True)
class Planted:
    """Runs the pipeline of a fault (or the right one), half types in float32; takes every mask, scale and flag."""

    fault: Fault | None
    meaning: Meaning

    def __call__(self, arguments: Arguments) -> Result:
        dtype = arguments.q.dtype
        if dtype in (torch.float16, torch.bfloat16):
            q, k, v = (x.float() for x in (arguments.q, arguments.k, arguments.v))
            arguments = arguments.replace(q=q, k=k, v=v)
        pipeline = blocks.RIGHT if self.fault is None else self.fault.pipeline_for(arguments)
        trace = blocks.run(arguments, self.meaning, pipeline)
        return Result(trace.output.to(dtype), trace.weights)

    def source(self, arguments: Arguments) -> str:
        return "impl(q, k, v, mask)"


def planted(fault: Fault | None, meaning: Meaning | None = None) -> Implementation:
    """An implementation that has this fault and no other; without a fault, the right one."""
    meaning = meaning or Meaning()
    conventions = Conventions(
        causal=Finding("flag", "declared", "planted"),
        alignment=Finding(meaning.alignment, "declared", "planted"),
        empty_rows=Finding(meaning.empty_rows, "declared", "planted"),
        grouping=Finding(meaning.grouping, "declared", "planted"),
    )
    name = "right" if fault is None else fault.id
    return Implementation(name, f"planted:{name}", Planted(fault, meaning), conventions)
