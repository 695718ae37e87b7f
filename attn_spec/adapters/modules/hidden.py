"""One call of a whole module on hidden states: what a law on modules works with."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_spec import masks
from attn_spec.adapters.modules import variants
from attn_spec.adapters.modules.construct import Sizes
from attn_spec.law import Unsupported
from attn_spec.problem import DTYPES, Arguments, Problem

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.adapters.modules.adapter import ModuleAdapter


@dataclass(frozen=True, eq=False)
class HiddenCall:
    """A call on hidden states x [B, S, width], and context [B, Sk, kv_width] where keys come from another sequence.

    like: arguments of the same mask, flags and head counts.  named: the arguments of forward beside the inputs.
    """

    implementation: Implementation
    adapter: ModuleAdapter
    sizes: Sizes
    x: Tensor
    context: Tensor | None
    like: Arguments
    named: dict[str, Any]

    @property
    def dtype(self) -> str:
        return str(self.x.dtype).removeprefix("torch.")

    def run(self, x: Tensor | None = None, context: Tensor | None = None, *, train: bool = False) -> list[Tensor]:
        """What the module returns, batch first, the output first; x and context in the place of this call's."""
        return list(self._ask("whole", x, context, train=train))

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return (self.x,) if self.context is None else (self.x, self.context)

    def _ask(self, request: str, x: Tensor | None = None, context: Tensor | None = None, **others: Any) -> Any:
        x = self.x if x is None else x
        context = self.context if context is None else context
        inputs = (x,) if context is None else (x, context)
        named = {**self.named, **others, "sizes": self.sizes, "attn_spec_request": request}
        return self.implementation.shielded(self.adapter.function, *inputs, **named)

    def weights(self) -> dict[str, Tensor]:
        """The projections as matrices [in, out]; see `attn_spec.adapters.modules.used`. {}: they say not all."""
        if not self._module.projections.whole:
            return {}
        return dict(self._ask("weights"))

    def gradients(self) -> dict[str, Tensor]:
        """The largest gradient of each projection's weight, by name; -1 for any parameter that is not used at all."""
        if not self._module.projections.whole:
            raise Unsupported("its projections were not found")
        return dict(self._ask("gradients"))

    @property
    def _module(self) -> Any:
        assert self.adapter.module is not None
        return self.adapter.module

    @property
    def has_output_projection(self) -> bool:
        return bool(self._module.projections.of("o"))

    @property
    def output_projection(self) -> str:
        return ", ".join(p.name for p in self._module.projections.of("o"))

    @property
    def optional_context(self) -> bool:
        """Whether a context may be given or not: what only one of the two ways uses is of use."""
        return bool(self._module.forward.context) and not self._module.forward.context_required

    @property
    def pairs(self) -> tuple[str, int]:
        """The argument that takes a representation of pairs of tokens, and its width; ("", 0) where there is none.

        It may be left out, has `pair` in its name, and the width is that of a layer that it goes through.
        """
        from attn_spec.adapters.modules.expected import code_of

        f = self._module
        names = [n for n in f.forward.left if "pair" in n.lower() and f.forward.defaults.get(n, 0) is None]
        code = code_of(f.module)
        layers = dict(f.built(self.sizes, torch.float32).named_modules())
        for name in names:
            for layer in re.findall(rf"self\.(\w+)\({re.escape(name)}\b", code):
                width = getattr(layers.get(layer), "in_features", 0)
                width = width or next(iter(getattr(layers.get(layer), "normalized_shape", ())), 0)
                if width:
                    return name, int(width)
        return "", 0

    def waits(self, name: str) -> bool:
        """Whether a parameter is used on an argument that may be left out, and was: `self.linear_b(pair)`."""
        from attn_spec.adapters.modules.expected import code_of

        f = self._module
        left = [n for n in f.forward.left if f.forward.defaults.get(n, 0) is None]
        owner = re.sub(r"\.(weight|bias)$", "", name).rpartition(".")[2]
        lines = code_of(f.module).splitlines()
        return any(re.search(rf"\.{re.escape(owner)}\b.*\b{re.escape(n)}\b", line) for n in left for line in lines)

    @property
    def residual(self) -> bool:
        """Whether the output is to be added to the hidden states."""
        return self.has_output_projection and "out" not in self._module.roles

    @property
    def positional(self) -> bool:
        return bool(self.like.causal) or self.like.mask is not None

    @property
    def positions_unseen(self) -> bool:
        """Whether it is a black box that may rotate or add positions of its own, by what its source says."""
        from attn_spec.adapters.modules.expected import code_of

        words = r"arange|rope|rotary|rotate|position|freqs|\bsin\("
        return not self._module.projections.whole and bool(re.search(words, code_of(self._module.module)))

    @property
    def shared_projections(self) -> list[str]:
        """Names of q, k and v projections that are one parameter."""
        seen: dict[int, str] = {}
        for p in self._module.projections.found:
            if p.role == "o":
                continue
            if id(p.weight) in seen:
                return [seen[id(p.weight)], p.name]
            seen[id(p.weight)] = p.name
        return []

    @property
    def shared_by_heads(self) -> str:
        """The name of a query projection that takes a slice of the hidden states, one head's, and serves all heads."""
        sizes = self._module.sizes
        sliced = [p for p in self._module.projections.of("q") if p.head is None and sizes.heads > 1]
        width = sizes.hidden // sizes.heads
        return next((p.name for p in sliced if tuple(p.weight.shape) == (width, width)), "")

    @property
    def always_drops(self) -> bool:
        """Whether an instance has a dropout that was not built to be 0."""
        ps = [m.p for m in self._module.module.modules() if isinstance(m, torch.nn.Dropout)]
        return self._module.instance is not None and any(ps)

    def with_dropout(self, p: float) -> HiddenCall | None:
        """The same call of a module that was built with this dropout; None where the constructor takes none."""
        if "dropout" not in self._module.roles or self._module.instance is not None:
            return None
        return dataclasses.replace(self, sizes=dataclasses.replace(self.sizes, dropout=p))

    def sample(self, n: int) -> HiddenCall:
        """The call of one sample alone."""
        one = slice(n, n + 1)
        batched = (1, 2) if self.like.form == "key-padding" else (3, 4) if self.adapter.three_axes else (4,)
        named = {
            name: value[one]
            if isinstance(value, Tensor) and value.dim() in batched and len(value) == len(self.x) > 1
            else value
            for name, value in self.named.items()
        }
        context = None if self.context is None else self.context[one]
        like = self.like.replace(q=self.like.q[one], k=self.like.k[one], v=self.like.v[one])
        return dataclasses.replace(self, x=self.x[one], context=context, named=named, like=like)

    def asking_for_weights(self) -> HiddenCall | None:
        """The same call that asks for weights too; None where there is no way to."""
        name = self.adapter.signature.roles.get("weights")
        return None if name is None else dataclasses.replace(self, named={**self.named, name: True})

    def with_three_axes(self) -> HiddenCall:
        """The same call whose mask [B, 1, S, S] goes in as [B, S, S]."""
        name = self.adapter.signature.roles["mask"]
        mask = self.named[name]
        return dataclasses.replace(self, named={**self.named, name: mask[:, 0] if mask.dim() == 4 else mask})

    @property
    def documents_three_axes(self) -> bool:
        """Whether the source of the module says that its mask may be [B, S, S]."""
        from attn_spec.adapters.modules.expected import source_of

        axes = r"[\[(]\s*(?:B|N|b|n|batch\w*|bsz)\s*,\s*([A-Za-z])\w*\s*,\s*\1\w*\s*[\])]"  # [B, S, S], [B, Sq, Sk]
        return any("mask" in line and re.search(axes, line) for line in source_of(self._module.module).splitlines())

    def hidden_tokens(self, problem: Problem) -> Tensor:
        """Which tokens of each sample no query may see [B, Sk]. Raises Unsupported where there are none."""
        visible, _ = masks.combined(problem.mask, problem.sizes, problem.seed, "top-left")
        if visible is None:
            raise Unsupported("no mask parameter")
        hidden = ~visible.expand(problem.sizes[0], 1, problem.q_len, problem.kv_len)[:, 0].any(1)
        if not bool(hidden.any()):
            raise Unsupported("no token is hidden from all")
        return hidden


def hidden_call(implementation: Implementation, problem: Problem, *, with_context: bool = False) -> HiddenCall:
    """A problem as a call on hidden states. Raises Unsupported where it is no module, or can't be asked so.

    with_context: keys come from another sequence though it is as long as that of the queries.
    """
    from attn_spec.adapters.modules.adapter import ModuleAdapter

    adapter = implementation.adapter
    if not isinstance(adapter, ModuleAdapter) or adapter.module is None:
        raise Unsupported("not a module")
    f, p = adapter.module, problem
    arguments = p.arguments(implementation.conventions.meaning.alignment)
    named = adapter.asked(arguments)
    if with_context and not f.takes_context:
        raise Unsupported("queries and keys come from one sequence")
    optional = not f.forward.context_required and not f.forward.separate
    cross = f.takes_context and (with_context or not optional or p.q_len != p.kv_len)
    causal = bool(arguments.causal) if f.causal_by == "constructor" and "causal" not in f.forward.roles else None
    if f.causal_by == "constructor" and "causal" not in f.forward.roles:
        named.pop("is_causal", None)  # `sizes` say it
    asked, sinks = variants.taken_from(named, f.variants)
    named |= {} if sinks is None else {variants.PARAMETERS["sinks"]: sinks}
    sizes = f.sizes_for(
        p.heads, p.kv_heads, p.head_dim, p.v_dim, max(p.q_len, p.kv_len), causal=causal,
        cross=cross and not f.forward.separate, **asked,
    )  # fmt: skip
    width, kv_width = f.widths_for(sizes)
    g = torch.Generator().manual_seed(p.seed + 17)
    size = {"flat": 0.3, "large": 4.0, "mild": 0.7}.get(p.values, 1.3)
    dtype = DTYPES[p.dtype]
    x = (torch.randn(p.batch, p.q_len, width, generator=g, dtype=torch.float64) * size).to(dtype)
    context = None
    if cross and (with_context or p.q_len != p.kv_len or not f.forward.separate or kv_width != width):
        context = (torch.randn(p.batch, p.kv_len, kv_width, generator=g, dtype=torch.float64) * size).to(dtype)
    return HiddenCall(implementation, adapter, sizes, x, context, arguments, named)
