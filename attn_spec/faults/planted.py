"""A fault as an implementation: for kill matrices, and to try a suite on something that is known to be wrong."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attn_spec import blocks, module_blocks
from attn_spec.adapters.implementation import Implementation, Result
from attn_spec.backward import RIGHT, Backward, Cotangents, run
from attn_spec.conventions import Conventions, Finding, Meaning
from attn_spec.faults.fault import Fault
from attn_spec.faults.modules import ModuleFault
from attn_spec.law import Unsupported
from attn_spec.module_blocks import Mode
from attn_spec.problem import Arguments


@dataclass(frozen=True)
class Planted:
    """Runs the pipeline of a fault (or the right one), half types in float32; takes every mask, scale and flag."""

    takes_variants: ClassVar[bool] = True
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


def planted_class(fault: Fault | ModuleFault | None) -> type[nn.Module]:
    """An attention module of its own with this fault, written around the blocks: to be judged as a user's is."""
    core = fault.pipeline if isinstance(fault, Fault) else blocks.RIGHT
    surroundings = fault.pipeline if isinstance(fault, ModuleFault) else module_blocks.RIGHT
    pipeline = dataclasses.replace(surroundings, core=core)

    class Module(nn.Module):
        """x [B, S, hidden], context [B, Sk, hidden] or None, mask bool (True = may be seen) or additive."""

        def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, dropout: float = 0.0) -> None:
            super().__init__()
            if hidden_size % num_heads or num_heads % num_kv_heads:
                raise ValueError(f"{hidden_size} channels, {num_heads} heads and {num_kv_heads} kv heads do not divide")
            head_dim = hidden_size // num_heads
            self.num_heads, self.num_kv_heads, self.dropout = num_heads, num_kv_heads, dropout
            self.q_proj = nn.Linear(hidden_size, num_heads * head_dim)
            self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim)
            self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim)
            self.o_proj = nn.Linear(num_heads * head_dim, hidden_size)
            self._kept: dict[str, Tensor] = {}

        def forward(
            self,
            x: Tensor,
            context: Tensor | None = None,
            mask: Tensor | None = None,
            is_causal: bool = False,
            return_weights: bool = False,
        ) -> Tensor | tuple[Tensor, Tensor]:
            q = x.new_empty(x.shape[0], self.num_heads, x.shape[1], 1)
            k = x.new_empty(x.shape[0], self.num_kv_heads, 1, 1)
            form = None if mask is None else "bool" if mask.dtype == torch.bool else "additive"
            if mask is not None and mask.dtype != torch.bool:
                mask = mask.to(x.dtype)
            like = Arguments(q, k, k, mask, form, is_causal)  # type: ignore[arg-type]
            linears = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj, "o": self.o_proj}
            weights = {name: linear.weight.mT for name, linear in linears.items()}
            weights |= {f"{name}_bias": linear.bias for name, linear in linears.items()}
            mode = Mode(self.training, self.dropout, return_weights, self._kept)
            y, p = module_blocks.run(x, context, weights, like, Meaning(), pipeline, mode)
            return (y, p) if return_weights else y

    Module.__name__ = Module.__qualname__ = "Right" if fault is None else fault.id.title().replace("-", "")
    return Module
