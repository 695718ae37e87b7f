"""From implementations and a problem to contenders: each with its own copy of the numbers, asked as it can be."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from attn_spec.adapters.function import FunctionAdapter
from attn_spec.adapters.implementation import Implementation
from attn_spec.benchmark import expected as right
from attn_spec.benchmark.calls import PreparedCall, TimedImplementation, recorded
from attn_spec.benchmark.expected import Expected
from attn_spec.engine import as_asked
from attn_spec.law import Unsupported
from attn_spec.masks import Causal, Delivery
from attn_spec.problem import Arguments, Problem

if TYPE_CHECKING:
    from attn_spec.benchmark.modules import ModuleSets

SETS = 3  # of inputs, in rotation
LARGE_BYTES = 1 << 29  # a set above this is one of two


class Stage:
    """One problem in one direction: the inputs, drawn once, and the right answers, worked out once for each meaning.

    seed: of the inputs; which rows are compared is not drawn from it.
    """

    def __init__(self, problem: Problem, direction: str, *, seed: int = 0, sets: int = SETS) -> None:
        self.problem, self.direction, self.seed = problem, direction, seed
        if "torch._dynamo" in sys.modules:  # after eight kinds of inputs it compiles no more, and runs eagerly
            torch.compiler.reset()
        once = [right.drawn(problem, seed)]
        size = sum(x.nbytes for x in once[0])
        count = min(sets, 2) if size > LARGE_BYTES else sets
        self.drawn = once + [right.drawn(problem, seed + n) for n in range(1, count)]
        secret = torch.Generator()
        secret.seed()
        self.rows = [right.some_rows(problem, secret) for _ in self.drawn]
        self.cotangents = [None if direction == "forward" else self._cotangent(seed + n) for n in range(count)]
        self._known: dict[Any, Expected] = {}
        self._modules: dict[str, ModuleSets] = {}

    def _cotangent(self, seed: int) -> torch.Tensor:
        p = self.problem
        generator = torch.Generator().manual_seed(seed + 1_000_003)
        return torch.randn(p.batch, p.heads, p.q_len, p.v_dim, generator=generator).to(p.torch_dtype)

    def contender(self, implementation: Implementation, name: str = "") -> TimedImplementation:
        """The implementation on this problem. Raises `Unsupported`, `Refused` or `Violation` where it can't take it."""
        if implementation.is_module:
            return self.of_module(implementation).contender(name)
        asked = asked_for(implementation, self.problem)
        meaning = implementation.conventions.meaning
        precision = implementation.precision_for(asked.dtype)
        sets: list[tuple[Arguments, Expected]] = []
        for n, given in enumerate(self.drawn):
            arguments = right.inputs(asked, meaning, 0, given)
            key = (n, meaning, precision, asked.causal is not None)
            if key not in self._known:
                self._known[key] = right.expected(arguments, self.rows[n], meaning, precision, self.cotangents[n])
            sets.append((arguments.to(implementation.device), self._known[key]))
        grad = self.direction != "forward"
        prepared = [PreparedCall(implementation, arguments, grad=grad) for arguments, _ in sets]
        return TimedImplementation(implementation, prepared, [one for _, one in sets], self.direction, name=name)

    def of_module(self, implementation: Implementation) -> ModuleSets:
        """A module on this problem: itself, and what it is compared with. Raises as `contender`."""
        from attn_spec.benchmark.modules import ModuleSets

        if implementation.name not in self._modules:
            made = ModuleSets(implementation, self.problem, self.direction, seed=self.seed, sets=len(self.drawn))
            self._modules[implementation.name] = made
        return self._modules[implementation.name]


def asked_for(implementation: Implementation, problem: Problem) -> Problem:
    """The problem in the form in which an implementation takes it: causality by its flag, else inside the mask.

    Raises `Unsupported`, with the reason for the first form, where it takes neither.
    """
    problem = as_asked(implementation, problem)
    adapter = implementation.adapter
    if not isinstance(adapter, FunctionAdapter):
        return problem
    try:
        _ask(adapter, problem)
    except Unsupported as error:
        in_mask = problem.replace(delivery=Delivery(problem.delivery.form if problem.masked else "bool", flag=False))
        if not problem.causal_by_flag or in_mask.delivery.form == "key-padding":
            raise
        try:
            _ask(adapter, in_mask)
        except Unsupported:
            raise error from None
        return in_mask
    return problem


def _ask(adapter: FunctionAdapter, problem: Problem) -> None:
    """Whether the function has the parameters for it: with one sample and one channel, which is soon drawn."""
    one = {"batch": 1, "head_dim": 1, "v_dim": 1} if all(isinstance(p, Causal) for p in problem.mask) else {}
    recorded(adapter, right.inputs(problem.replace(**one), adapter.conventions.meaning, 0))


def same_work(one: Implementation, other: Implementation, problem: Problem) -> str:
    """Why two implementations compute different things on a problem; "" where they do not."""
    meanings = [i.conventions.meaning.alignment for i in (one, other)]
    if other.is_module and not one.is_module:
        return "the baseline is a module, whose projections would be timed too"
    causal = [
        as_asked(one, problem).causal,
        as_asked(other, as_asked(one, problem) if one.is_module else problem).causal,
    ]
    if (causal[0] is None) != (causal[1] is None):
        return "one of them is causal always"
    unequal = problem.q_len != problem.kv_len
    if causal[0] is not None and causal[0].alignment is None and unequal and meanings[0] != meanings[1]:
        return f"causal is aligned to the {meanings[0]} in {one.name} and to the {meanings[1]} in {other.name}"
    if one.conventions.meaning.grouping != other.conventions.meaning.grouping and problem.heads != problem.kv_heads:
        return "they group heads differently"
    return ""
