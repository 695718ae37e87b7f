"""A module as the engine times it: its own forward on hidden states, beside its own projections around a baseline.

The baseline gets the module's weights: hidden states through the same projections, the baseline's attention, and the
same output projection. So both do the same work and have the same right answer, which is worked out from the weights.
Between two readings the hidden states are exchanged for others in place, so a replayed output is a wrong one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import module_blocks, whole
from attn_spec.adapters.function import BACK, PERMUTED, FunctionAdapter, flat
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.hidden import HiddenCall, hidden_call
from attn_spec.benchmark import expected as right
from attn_spec.benchmark.calls import TimedImplementation, by_name, recorded
from attn_spec.benchmark.clock import Call
from attn_spec.benchmark.contenders import asked_for
from attn_spec.benchmark.expected import GRADIENT_LOGITS, Expected, of_rows, some_rows
from attn_spec.benchmark.work import Work, work
from attn_spec.engine import as_asked
from attn_spec.law import Unsupported
from attn_spec.masks import Alignment
from attn_spec.problem import Problem
from attn_spec.tolerance import Worst

OTHER = 1_000_003  # added to the seed of a set for the hidden states that it is exchanged for


@dataclass(frozen=True, eq=False)
class Either(Expected):
    """Expected of two hidden states that stand in one place in turn; `sign` 1 is the first, -1 the other.

    output, bound [B, 1, rows, width]; gradients: of the hidden states, under "x".
    """

    other: Expected | None = None

    def of(self, sign: float) -> Expected:
        assert self.other is not None
        return Expected(self.rows, self.output, self.bound, None, self.gradients) if sign > 0 else self.other

    def holds(self, output: Tensor, sign: float) -> bool:
        return self.of(sign).holds(output, 1.0)

    def compare(self, output: Tensor, sign: float) -> Worst:
        return self.of(sign).compare(output, 1.0)

    def gradient(self, name: str, sign: float) -> Tensor | None:
        return self.of(sign).gradient(name, 1.0)


class Prepared:
    """A call on hidden states that are exchanged in place between readings.

    inputs: "x", the hidden states as the call gets them, and the weights that a backward pass reaches.
    exchanged: each with what it is exchanged for.  read: the output [B, S, width] in what the call returned.
    """

    def __init__(
        self,
        call: Call,
        inputs: dict[str, Tensor],
        exchanged: list[tuple[Tensor, Tensor]],
        read: Callable[[Any], Tensor],
        *,
        sequence_first: bool = False,
    ) -> None:
        tokens = inputs["x"].shape[0 if sequence_first else 1]
        self.length = max(tokens, inputs["x"].shape[-1])
        self.call, self.inputs, self.exchanged, self.read = call, inputs, exchanged, read
        self.sequence_first = sequence_first

    def change_sign(self) -> None:
        """The other hidden states in the place of these."""
        with torch.no_grad():
            for used, other in self.exchanged:
                kept = used.clone()
                used.copy_(other)
                other.copy_(kept)

    def output(self, returned: Any) -> Tensor:
        """[B, 1, S, width] from what the call returned."""
        return self.read(returned)[:, None]

    def canonical(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient of the hidden states as [B, S, width]."""
        return gradient.transpose(0, 1) if self.sequence_first and name == "x" else gradient


class ModuleSets:
    """The hidden states of a module on one problem, several sets of two, with the right answers.

    Raises Unsupported where it can't take the problem, or its right answer is not known from its weights.
    """

    def __init__(
        self, implementation: Implementation, problem: Problem, direction: str, *, seed: int, sets: int
    ) -> None:
        self.implementation, self.direction = implementation, direction
        self.problem = fitted(implementation, problem)
        self.grad = direction != "forward"
        meaning = implementation.conventions.meaning
        first = self._call(seed)
        function = first.adapter.module
        assert function is not None
        self.function = function
        if function.input == "SD":
            raise Unsupported("a module of one sequence [S, D] is not timed")
        self.weights: Mapping[str, Tensor] = first.weights()
        if not self.weights:
            raise Unsupported("what its projections are given or do is more than a matrix and a bias: not timed")
        pairs = self.problem.batch * self.problem.heads * self.problem.q_len * self.problem.kv_len
        if self.grad and (pairs > GRADIENT_LOGITS or implementation.positional):
            raise Unsupported("the gradients of so long a module, or one that rotates, are not known: not timed")
        secret = torch.Generator()
        secret.seed()
        self.rows = torch.arange(self.problem.q_len)
        if not implementation.positional and not self.grad:
            self.rows = some_rows(self.problem, secret)
        self.calls = [(self._call(seed + n), self._call(seed + n + OTHER)) for n in range(sets)]
        p = self.problem
        self.cotangents: list[Tensor | None] = [None] * sets
        if self.grad:
            like = first.run()[0]
            drawn = (torch.randn(like.shape, generator=torch.Generator().manual_seed(seed + n)) for n in range(sets))
            self.cotangents = [x.to(p.torch_dtype)[:, None] for x in drawn]
        self.meaning = meaning

    def _call(self, seed: int) -> HiddenCall:
        return hidden_call(self.implementation, self.problem.replace(seed=seed))

    def expected(self, of: Implementation) -> list[Expected]:
        """The right answers, with the bounds of an implementation's precision."""
        out: list[Expected] = []
        for (one, other), cotangent in zip(self.calls, self.cotangents, strict=True):
            right, instead = (self._answer(call, of, cotangent) for call in (one, other))
            values = (self.rows, right.output, right.bound, cotangent, right.gradients)
            out.append(Either(*values, other=instead))
        return out

    def _answer(self, call: HiddenCall, of: Implementation, cotangent: Tensor | None) -> Expected:
        precision = of.precision_for(call.dtype)
        arrive = self.implementation.effective if self.implementation.positional else None
        context = call.x if call.context is None else call.context
        like = of_rows(call.like, self.rows, self.meaning)
        found = whole.answer(call.x[:, self.rows], context, self.weights, like, self.meaning, precision, arrive)
        gradients = None if cotangent is None else {"x": self._gradient(call, cotangent[:, 0])}
        return Expected(self.rows, found.output[:, None], found.bound[:, None], None, gradients)

    def _gradient(self, call: HiddenCall, cotangent: Tensor) -> Tensor:
        with torch.enable_grad():
            x = call.x.double().requires_grad_()
            context = None if call.context is None else call.context.double()
            y, _ = module_blocks.run(x, context, self.weights, call.like.double(), self.meaning, module_blocks.RIGHT)
            (grad,) = torch.autograd.grad(y, x, cotangent.double())
        return grad

    # who is timed ---------------------------------------------------------------------------------------------------

    def contender(self, name: str = "") -> TimedImplementation:
        """The module itself: its forward, on what it is called with."""
        prepared = [self._of_module(one, other) for one, other in self.calls]
        return self._timed(self.implementation, prepared, name)

    def around(self, baseline: Implementation, name: str = "") -> TimedImplementation:
        """The module's projections around a baseline's attention. Raises Unsupported."""
        if self.implementation.positional:
            raise Unsupported("the module does more to q and k than the baseline is given")
        adapter = baseline.adapter
        if not isinstance(adapter, FunctionAdapter) or adapter.conventions.layout.value not in BACK:
            raise Unsupported("the baseline is no function of four axes")
        asked = asked_for(baseline, self.problem)
        prepared = [self._around(adapter, asked, one, other) for one, other in self.calls]
        return self._timed(baseline, prepared, name)

    def _timed(self, implementation: Implementation, prepared: list[Prepared], name: str) -> TimedImplementation:
        return TimedImplementation(implementation, prepared, self.expected(implementation), self.direction, name=name)

    def _of_module(self, call: HiddenCall, other: HiddenCall) -> Prepared:
        f, device = self.function, self.implementation.device
        (args, kwargs), (args_of_other, kwargs_of_other) = (self._passed(one) for one in (call, other))
        timed = copy.deepcopy(f.built(call.sizes, call.x.dtype)).to(device)
        mine: dict[int, Tensor] = {}
        exchanged: list[tuple[Tensor, Tensor]] = []
        given, of_other = [*args, *kwargs.values()], [*args_of_other, *kwargs_of_other.values()]
        for x, y in zip(given, of_other, strict=True):
            if isinstance(x, Tensor) and id(x) not in mine:
                mine[id(x)] = x.detach().clone().to(device)
                if not torch.equal(x, y):  # hidden states; masks and the like are the same in both
                    exchanged.append((mine[id(x)], y.detach().clone().to(device)))
        args = tuple(mine.get(id(x), x) for x in args)
        kwargs = {key: mine.get(id(x), x) for key, x in kwargs.items()}
        leaves = {"x": exchanged[0][0]}
        if self.grad:
            leaves |= {p.name: p.weight for p in f._projections(timed).found}
            for leaf in leaves.values():
                leaf.requires_grad_()

        def output(returned: Any) -> Tensor:
            found = f.tensors(returned)[0]
            return found.transpose(0, 1) if f.input == "SBD" else found

        return Prepared(lambda: timed(*args, **kwargs), leaves, exchanged, output, sequence_first=f.input == "SBD")

    def _passed(self, call: HiddenCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What forward is called with."""
        named = {**call.named, "sizes": call.sizes}
        seen = self.implementation.shielded(self.function.forwarded, call.x, call.context, **named)
        passed: tuple[tuple[Any, ...], dict[str, Any]] = seen[0]
        return passed

    def _around(self, adapter: FunctionAdapter, asked: Problem, call: HiddenCall, other: HiddenCall) -> Prepared:
        device, dtype = self.implementation.device, call.x.dtype
        function, layout = adapter.function, adapter.conventions.layout.value
        arguments = right.inputs(asked, adapter.conventions.meaning, 0)
        ((args, kwargs),) = recorded(adapter, arguments.to(device))
        place = {
            id(x): role for role in "qkv" for x in [by_name(adapter, (args, kwargs))[adapter.signature.roles[role]]]
        }
        w = {name: x.to(dtype).to(device) for name, x in self.weights.items()}
        w = {name: x.mT.contiguous() if x.dim() == 2 else x for name, x in w.items()}
        exchanged = [(call.x.clone().to(device), other.x.clone().to(device))]
        x = source = exchanged[0][0]
        if call.context is not None and other.context is not None:
            exchanged.append((call.context.clone().to(device), other.context.clone().to(device)))
            source = exchanged[1][0]
        leaves = {"x": x}
        if self.grad:
            leaves |= {name: w[name] for name in "qkvo" if name in w}
            for leaf in leaves.values():
                leaf.requires_grad_()
        p = self.problem
        heads = {"q": p.heads, "k": p.kv_heads, "v": p.kv_heads}
        into, back = PERMUTED[layout], BACK[adapter.conventions.layout_out.value]

        def attend() -> Tensor:
            made = {}
            for name in "qkv":
                y = F.linear(x if name == "q" else source, w[name], w.get(f"{name}_bias"))
                made[name] = y.view(*y.shape[:-1], heads[name], -1).transpose(1, 2).permute(into)
            in_order = [made[place[id(a)]] if id(a) in place else a for a in args]
            named = {key: made[place[id(a)]] if id(a) in place else a for key, a in kwargs.items()}
            o = flat(function(*in_order, **named))[0].permute(back)
            y = o.transpose(1, 2).flatten(2)
            return F.linear(y, w["o"], w.get("o_bias")) if "o" in w else y

        return Prepared(attend, leaves, exchanged, lambda returned: returned)


def fitted(implementation: Implementation, problem: Problem) -> Problem:
    """The problem as the module takes it; an instance has the sizes it has. Raises Unsupported."""
    asked = as_asked(implementation, problem)
    adapter = implementation.adapter
    instance = getattr(getattr(adapter, "module", None), "instance", None) is not None
    if (asked.q_len, asked.kv_len) != (problem.q_len, problem.kv_len):
        raise Unsupported("queries and keys come from one sequence")
    if asked.sizes_in_full != problem.sizes_in_full and not instance:
        kind = f"{asked.heads} heads, {asked.kv_heads} of keys, {asked.head_dim} channels each"
        raise Unsupported(f"it can't be built with these heads; the nearest is {kind}")
    return asked


def module_work(problem: Problem, direction: str, weights: Mapping[str, Tensor], alignment: Alignment) -> Work:
    """The work of a module: that of its attention, and of its projections on every token, each weight read once.

    FLOP: 2 for each weight and token, backward twice that. Least bytes: hidden states, weights and output. Without
    weights it is that of attention alone.
    """
    inner, p = work(problem, direction, alignment), problem
    if not weights:
        return inner
    tokens = {"q": p.batch * p.q_len, "k": p.batch * p.kv_len, "v": p.batch * p.kv_len, "o": p.batch * p.q_len}
    matrices = {name: weights[name] for name in "qkvo" if name in weights}
    forward = sum(2.0 * tokens[name] * w.numel() for name, w in matrices.items())
    share = {"forward": 1.0, "backward": 2.0, "both": 3.0}[direction]
    moved = sum(w.numel() for w in matrices.values()) + tokens["q"] * 2 * weights["q"].shape[0]
    times = {"forward": 1, "backward": 2, "both": 3}[direction]
    return Work(inner.pairs, inner.flop + share * forward, times * moved * p.torch_dtype.itemsize)
