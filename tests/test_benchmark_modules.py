"""Modules are timed on hidden states, beside a baseline between their own projections, and verified as functions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.adapter import callable_of
from attn_spec.adapters.resolve import resolve
from attn_spec.benchmark.cases import Case
from attn_spec.benchmark.clock import CpuClock, Distrusted
from attn_spec.benchmark.contenders import Stage
from attn_spec.benchmark.memory import scaling, sweep
from attn_spec.benchmark.modules import module_work
from attn_spec.benchmark.paired import PASS, Plan, compare
from attn_spec.benchmark.roofline import Ceilings
from attn_spec.benchmark.session import NOT_TIMED, Session
from attn_spec.benchmark.work import work
from attn_spec.law import Unsupported
from attn_spec.masks import Causal
from attn_spec.problem import Problem

PROBLEM = Problem(batch=2, heads=2, kv_heads=2, q_len=24, kv_len=24, head_dim=8, v_dim=8, values="mild")
CAUSAL = PROBLEM.replace(mask=(Causal(),))
PLAN = Plan(limit=50.0, budget_s=1.0, looks=(11,), seed=3)


class Plain(nn.Module):
    """Self-attention, as a base of the wrong ones."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Unscaled(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v


class Replaying(Plain):
    """Gives its first output again whenever it is called with the same tensor."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.__dict__.setdefault("kept", {})
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = super().forward(x)
        return kept[x.data_ptr()]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class WrongBackward(Plain):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return Doubled.apply(super().attend(q, k, v))


@functools.cache
def adapted(target: Any) -> Implementation:
    found = resolve(target) if isinstance(target, str) else None
    name = found.name if found is not None else target.__name__
    function = callable_of(found.object if found is not None else target, name)
    return adapt(function, name=name, target_name=target if isinstance(target, str) else name)


def timed(target: Any, problem: Problem, direction: str = "forward", baseline: str = "sdpa") -> float:
    stage, other = Stage(problem, direction), adapted(baseline)
    one = stage.contender(adapted(target))
    beside = stage.contender(other) if other.is_module else stage.of_module(adapted(target)).around(other)
    with torch.set_grad_enabled(direction != "forward"):
        found = compare(CpuClock(), one, beside, PLAN)
    assert found.verdict() == PASS
    assert one.checked >= 11, "every timed output is looked at"
    assert beside.checked >= 11
    return found.ratio


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    "target, problem",
    [(Plain, PROBLEM), ("torch.nn.MultiheadAttention", CAUSAL), ("multihead", CAUSAL.replace(kv_heads=1))],
    ids=["plain", "nn.MultiheadAttention", "grouped"],
)
def test_modules_are_timed_and_verified(target: Any, problem: Problem, direction: str) -> None:
    assert timed(target, problem, direction) > 0


@pytest.mark.parametrize("baseline", ["tiled", "variants", "torch.nn.MultiheadAttention"])
def test_any_baseline_stands_beside_it(baseline: str) -> None:
    assert timed("multihead", PROBLEM, baseline=baseline) > 0


def test_keys_from_another_sequence() -> None:
    assert timed("torch.nn.MultiheadAttention", PROBLEM.replace(kv_len=40)) > 0


@pytest.mark.parametrize(
    "module, direction, said",
    [
        (Unscaled, "forward", "the output of the first call is wrong"),
        (Replaying, "forward", "the output of .* call is wrong"),
        (WrongBackward, "backward", "the gradient of x is wrong"),
    ],
)
def test_what_is_wrong_is_not_believed(module: Any, direction: str, said: str) -> None:
    with pytest.raises(Distrusted, match=said):
        timed(module, PROBLEM, direction)


def test_what_a_module_can_not_be_asked_is_said() -> None:
    with pytest.raises(Unsupported, match="come from one sequence"):
        Stage(PROBLEM.replace(kv_len=40), "forward").contender(adapted(Plain))
    with pytest.raises(Unsupported, match="the nearest is 2 heads, 2 of keys, 8 channels each"):
        Stage(PROBLEM.replace(kv_heads=1), "forward").contender(adapted(Plain))
    with pytest.raises(Unsupported, match="no causal parameter"):
        Stage(CAUSAL, "forward").contender(adapted(Plain))


def test_a_session_says_for_each_case_what_came_of_it() -> None:
    said: list[str] = []
    session = Session(
        [adapted(Plain), adapted("sdpa")],
        [adapted("sdpa"), adapted("multihead")],
        [Case("small", PROBLEM, "forward", 50.0)],
        CpuClock(),
        PLAN,
        lambda dtype, fresh: Ceilings(1e15, 1e14, 1e15),
        say=said.append,
        with_memory=False,
    )
    results = session.run()
    outcomes = {(one.implementation, one.baseline): one for one in results.cases}
    assert outcomes["Plain", "sdpa"].comparison is not None
    assert outcomes["Plain", "multihead"].comparison is not None
    assert outcomes["sdpa", "multihead"].outcome == NOT_TIMED
    assert "the baseline is a module" in outcomes["sdpa", "multihead"].reason
    alone = outcomes["sdpa", "sdpa"].work
    whole = outcomes["Plain", "sdpa"].work
    assert alone is not None
    assert whole is not None
    assert whole.flop == alone.flop + 2 * 4 * (2 * 24) * 16 * 16  # four matrices [16, 16] on 48 tokens


def test_the_work_of_a_module_is_that_of_its_parts() -> None:
    weights = {name: torch.zeros(16, 16) for name in "qkvo"}
    once, both = (module_work(PROBLEM, direction, weights, "top-left") for direction in ("forward", "both"))
    assert both.bytes == 3 * once.bytes
    assert once.pairs == work(PROBLEM).pairs
    assert module_work(PROBLEM, "forward", {}, "top-left") == work(PROBLEM)


def test_the_memory_of_a_module_tells_linear_from_quadratic(tmp_path: Path) -> None:
    problem = Problem(batch=1, heads=2, kv_heads=2, q_len=2048, kv_len=2048, head_dim=16, v_dim=16)
    assert scaling(adapted("torch.nn.MultiheadAttention"), sweep(problem)).linear
    assert not scaling(adapted("multihead"), sweep(problem)).linear
