"""Weights that dropout has been at, read off a black box: with V = identity the output is the dropped weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attn_spec.adapters.function import BACK, FunctionAdapter, into_layout
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.measure import one_hot
from attn_spec.adapters.modules.hidden import hidden_call
from attn_spec.adapters.seeding import draw, draw_with_gradients, reseeds
from attn_spec.invariants.comparison import agrees, answer, arguments_for, same
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.masks import Causal
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import roundoff

KEPT = 8  # problems whose draws are remembered: several laws look at the same ones
TELLS = 4  # a weight tells whether it was dropped where it is this many times its bound


@dataclass(frozen=True, eq=False)
class Drawn:
    """Weights [B, H, Sq, Sk] of four calls, float64, and what they are without dropout.

    first: after a seed.  second: the next call.  again: after the same seed once more.  other: after another seed.
    right: without dropout.  bound: of a kept weight, `right / (1 - rate)`.
    """

    rate: float
    right: Tensor
    bound: Tensor
    first: Tensor
    second: Tensor
    again: Tensor
    other: Tensor

    @cached_property
    def kept(self) -> Tensor:
        """What a weight is where it is kept."""
        return self.right / (1 - self.rate)

    @cached_property
    def tells(self) -> Tensor:
        """Where the weight is large enough to tell whether it was dropped."""
        return self.kept >= TELLS * self.bound

    @cached_property
    def drawn_on(self) -> Tensor:
        """`tells` up to the last key that is dropped anywhere: beyond it nothing is drawn that could be compared."""
        keys = self.dropped(self.first).any(2).any(1).any(0).nonzero().flatten()
        end = int(keys[-1]) + 1 if len(keys) else 0
        return self.tells & (torch.arange(self.tells.shape[-1]) < end)

    def dropped(self, call: Tensor) -> Tensor:
        """Which of the weights that tell are dropped."""
        return self.tells & self.gone(call)

    @property
    def untouched(self) -> bool:
        """Whether no call shows anything of dropout."""
        calls = (self.first, self.second, self.other)
        return all(bool(((x - self.right).abs() <= self.bound)[self.tells].all()) for x in calls)

    def gone(self, call: Tensor) -> Tensor:
        """Which weights of a call are zero."""
        return call.abs() <= self.bound


_known: WeakKeyDictionary[Implementation, dict[Problem, Drawn]] = WeakKeyDictionary()


def drawn(implementation: Implementation, problem: Problem) -> Drawn:
    """The weights of four calls under the problem's dropout. Raises Unsupported, Refused or Violation.

    Where V is narrower than the keys are many it is handed over in blocks, each after the same seeds.
    """
    known = _known.setdefault(implementation, {})
    if problem not in known:
        require_on_weights(implementation, problem)
        if len(known) >= KEPT:
            known.clear()
        known[problem] = _drawn(implementation, problem)
    found = known[problem]
    elsewhere = implementation.is_module and found.untouched and not forgotten(implementation, problem)
    if elsewhere and _drops_around(implementation, problem):
        raise Unsupported("no dropout lies between its projections")
    return found


def _drops_around(implementation: Implementation, problem: Problem) -> bool:
    """Whether a module drops anything in training, wherever that is; True where that can't be seen."""
    try:
        call = hidden_call(implementation, problem.replace(dropout=0.0)).with_dropout(problem.dropout)
        return call is None or not torch.equal(call.run(train=True)[0], call.run()[0])
    except (Unsupported, Refused, Violation):
        return True


def wrong_without(implementation: Implementation, problem: Problem) -> bool:
    """Whether the output is wrong without dropout too, so that what is wrong under dropout says nothing of dropout."""
    try:
        agrees(implementation, problem.replace(dropout=0.0))
    except Violation:
        arguments = arguments_for(implementation, problem).replace(dropout=0.0)
        (one, other), _ = called(implementation, arguments, [seed_of(problem), seed_of(problem) + 1])
        return torch.equal(one.nan_to_num(), other.nan_to_num())  # what changes with the seed is drawn
    except (Unsupported, Refused):
        return False
    return False


def forgotten(implementation: Implementation, problem: Problem) -> str:
    """When nothing is dropped, in words, where a plain call drops: no mask, not causal, as many queries as keys.

    "" where the plain call drops nothing either, or can't be made.
    """
    length = min(problem.q_len, problem.kv_len)
    plain = implementation.fit(
        problem.replace(mask=(), dtype="float32", kv_heads=problem.heads, q_len=length, kv_len=length)
    )
    try:
        if plain == problem or drawn(implementation, plain).untouched:
            return ""
    except (Unsupported, Refused, Violation):
        return ""
    if problem.mask:
        causal = all(isinstance(part, Causal) for part in problem.mask)
        return "in a causal call" if causal else "once a mask is given"
    if problem.dtype != plain.dtype:
        return f"in {problem.dtype}"
    return "where query heads share keys" if problem.kv_heads != problem.heads else "where there are more keys"


def _drawn(implementation: Implementation, problem: Problem) -> Drawn:
    arguments = arguments_for(implementation, problem)
    seed, kv_len, width = seed_of(problem), problem.kv_len, problem.v_dim
    identity = one_hot(arguments)
    columns: list[list[Tensor]] = [[] for _ in range(4)]
    for start in range(0, kv_len, width):
        block = identity.v[..., start : start + width]
        if block.shape[-1] < width:
            block = torch.nn.functional.pad(block, (0, width - block.shape[-1]))
        calls, _ = called(implementation, identity.replace(v=block.contiguous()), [seed, -1, seed, seed + 1])
        for column, call in zip(columns, calls, strict=True):
            column.append(call[..., : min(width, kv_len - start)])
    right, bound = right_weights(implementation, arguments)
    return Drawn(problem.dropout, right, bound, *(torch.cat(column, -1) for column in columns))


def copies(implementation: Implementation, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of one call twice, [B, H, Sq, keys] each, by V = [I, I]; and their bound.

    keys: half as many as V has channels. Raises Unsupported where that is none.
    """
    arguments = arguments_for(implementation, problem)
    keys = min(problem.kv_len, problem.v_dim // 2)
    if not keys:
        raise Unsupported("one channel can't be told from another")
    v = torch.zeros_like(arguments.v)
    for half in (0, keys):
        v[:, :, :keys, half : half + keys] = torch.eye(keys, dtype=v.dtype)
    (got,), _ = called(implementation, arguments.replace(v=v), [seed_of(problem)])
    _, bound = right_weights(implementation, arguments)
    return got[..., :keys], got[..., keys : 2 * keys], bound[..., :keys]


def beside(implementation: Implementation, problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Which weights [B, H, Sq, Sk] one call drops from its output, and which from the weights that it returns.

    None where it returns none, or V is narrower than the keys are many.
    """
    arguments = one_hot(arguments_for(implementation, problem))
    adapter = _adapter(implementation)
    if adapter.signature.has("weights"):
        arguments = arguments.replace(returns="weights")
    if problem.kv_len > problem.v_dim:
        return None
    args, kwargs = adapter.call_arguments(arguments)
    (returned,), _ = implementation.perform(draw, args, kwargs, [seed_of(problem)], _place(adapter, "seed", kwargs))
    found = adapter.result(returned, arguments)
    if found.weights is None:
        return None
    right, bound = right_weights(implementation, arguments_for(implementation, problem))
    tells = right / (1 - problem.dropout) >= TELLS * bound
    shown = found.output[..., : problem.kv_len].double()
    return tells & (shown.abs() <= bound), tells & (found.weights.double().abs() <= bound)


def require_on_weights(implementation: Implementation, problem: Problem) -> None:
    """Raise Unsupported where dropout is on the output or on V: then nothing is read off of weights (ATN1105 tells)."""
    if problem.v_dim >= 2 and not same(*copies(implementation, problem)).holds:
        raise Unsupported("its dropout is on the output of the heads or on V, and not on the weights")


def right_weights(implementation: Implementation, arguments: Arguments) -> tuple[Tensor, Tensor]:
    """The weights without dropout, and the bound of one that is kept.

    Beside what the oracle allows for the weight, a kept one is multiplied by a rounded factor and stored.
    """
    identity = one_hot(arguments)
    exact = identity.replace(v=identity.v[..., : arguments.k.shape[2]].contiguous(), dropout=None)
    found, rate = answer(implementation, exact), arguments.dropout or 0.0
    precision = implementation.precision_for(arguments.dtype)
    more = 2 * (roundoff(precision.weights) + roundoff(precision.output)) + 4 * precision.gamma_unit
    return found.output, (found.bounds.output + more * found.output.abs()) / (1 - rate)


def seed_of(problem: Problem) -> int:
    """What torch is seeded with: the same for a problem on every run."""
    return 20_011 + 2 * problem.seed


def called(implementation: Implementation, arguments: Arguments, seeds: list[int]) -> tuple[list[Tensor], list[bool]]:
    """The outputs [B, H, Sq, Dv] of calls after these seeds, float64; and whether each moved the generators on."""
    adapter = _adapter(implementation)
    args, kwargs = adapter.call_arguments(arguments)
    returned, moved_on = implementation.perform(draw, args, kwargs, seeds, _place(adapter, "seed", kwargs))
    return [_output(adapter, one, arguments) for one in returned], list(moved_on)


def reseeding(implementation: Implementation, arguments: Arguments) -> bool:
    """Whether a call sets torch's generator, and does not only draw from it. Raises Unsupported where it can't tell."""
    args, kwargs = _adapter(implementation).call_arguments(arguments)
    return bool(implementation.perform(reseeds, args, kwargs))


def has_own_seed(implementation: Implementation) -> bool:
    """Whether a seed is an argument of the call."""
    return _adapter(implementation).signature.has("seed")


def called_with_gradients(
    implementation: Implementation, arguments: Arguments, cotangent: Tensor, seed: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output of a call after a seed, and the gradients of q, k and v, float64. Raises Unsupported without any."""
    adapter = _adapter(implementation)
    args, kwargs = adapter.call_arguments(arguments)
    layout, layout_out = adapter.conventions.layout.value, adapter.conventions.layout_out.value
    wanted = [_place(adapter, role, kwargs) for role in "qkv"]
    given = into_layout(cotangent, layout_out).contiguous()
    returned, grads = implementation.perform(
        draw_with_gradients, args, kwargs, wanted, given, seed, _place(adapter, "seed", kwargs)
    )
    if not grads:
        raise Unsupported("the output carries no gradient")
    shapes = (arguments.q.shape, arguments.k.shape, arguments.v.shape)
    back = [
        g.reshape(shape) if layout == "NSD" else g.permute(BACK[layout]) for g, shape in zip(grads, shapes, strict=True)
    ]
    return _output(adapter, returned, arguments), tuple(g.double() for g in back)


def _place(adapter: FunctionAdapter, role: str, kwargs: dict[str, Any]) -> int | str | None:
    """Where the argument of a role is, by name or by position; None where there is none."""
    signature = adapter.signature
    if not signature.has(role):
        return None
    name = signature.roles[role]
    return name if name in kwargs else [p.name for p in signature.parameters].index(name)


def _adapter(implementation: Implementation) -> FunctionAdapter:
    if not isinstance(implementation.adapter, FunctionAdapter):
        raise Unsupported("an adapter of its own")
    return implementation.adapter


def _output(adapter: FunctionAdapter, returned: Any, arguments: Arguments) -> Tensor:
    output = adapter.result(returned, arguments).output.double()
    expected = (*arguments.sizes[:3], arguments.v.shape[-1])
    if tuple(output.shape) != expected:
        raise Violation(
            f"under dropout the output has shape {list(output.shape)}, expected {list(expected)}", merge="output-shape"
        )
    return output
