"""What is found out about a module by its source and by running it: causality, own biases, windows, state, contexts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "blind"))

import decoding_honest as honest

from attn_spec import adapt
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.modules.expected import code_of


def facts(target: Any) -> dict[str, str]:
    return {name: finding.value for name, finding in ModuleFunction(target, target.__name__).facts}


class Base(nn.Module):
    """Causal, which only a function beside it says."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.weighed(q @ k.mT * q.shape[-1] ** -0.5)
        out: Tensor = self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))
        return out

    def weighed(self, scores: Tensor) -> Tensor:
        return hidden(scores, 1).softmax(-1)

    def never_called(self, scores: Tensor) -> Tensor:
        """With is_causal=True in its docstring."""
        return scores.tril()


def hidden(scores: Tensor, diagonal: int, by: float = float("-inf")) -> Tensor:
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal)
    return scores.masked_fill(future, by) if by == float("-inf") else scores + by * future


class Inherits(Base):
    pass


class Plain(Base):
    def weighed(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class Shifted(Base):
    def weighed(self, scores: Tensor) -> Tensor:
        return hidden(scores, 2).softmax(-1)


class MaskedLate(Base):
    def weighed(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1).tril()


class Leaks(Base):
    def weighed(self, scores: Tensor) -> Tensor:
        return hidden(scores, 1, by=-4.0).softmax(-1)


class LeaksUnsaid(Plain):
    def weighed(self, scores: Tensor) -> Tensor:
        n = torch.arange(scores.shape[-1])
        return (scores - 4.0 * (n > n.unsqueeze(1))).softmax(-1)


class OverQueries(Base):
    def weighed(self, scores: Tensor) -> Tensor:
        return hidden(scores, 1).softmax(-2).nan_to_num()


class ByDistance(Base):
    """ALiBi in both directions."""

    def weighed(self, scores: Tensor) -> Tensor:
        n = torch.arange(scores.shape[-1])
        return (scores - 0.3 * (n - n.unsqueeze(1)).abs()).softmax(-1)


@pytest.mark.parametrize(("module", "expected"), [(Base, "always"), (Inherits, "always"), (Plain, "never")])
def test_causality_is_read_off_what_forward_reaches(module: type[nn.Module], expected: str) -> None:
    assert adapt(module).conventions.causal.value == expected


def test_code_has_no_docstrings_and_nothing_that_is_not_called() -> None:
    code = code_of(Plain(16, 2))
    assert "softmax" in code
    assert "tril" not in code
    assert "is_causal" not in code


@pytest.mark.parametrize("name", ["LlamaTupleAttention", "CacheObjectAttention", "StartPosAttention"])
def test_modules_with_a_cache_are_causal(name: str) -> None:
    assert adapt(honest.HONEST[name]).conventions.causal.value == "always"


@pytest.mark.parametrize(("module", "kind"), [(honest.AlibiLayerPastAttention, "alibi"), (ByDistance, "by position")])
def test_a_bias_by_distance_is_found(module: type[nn.Module], kind: str) -> None:
    assert facts(module)["bias"] == kind


@pytest.mark.parametrize("module", [Base, Plain, Shifted, MaskedLate, Leaks, LeaksUnsaid, OverQueries])
def test_what_is_wrong_is_no_bias(module: type[nn.Module]) -> None:
    assert "bias" not in facts(module)


def test_a_window_of_its_own_is_as_long_as_the_context() -> None:
    found = facts(honest.RollingWindowAttention)
    assert (found["window"], found["state"]) == ("window", "reset()")
    assert ModuleFunction(honest.RollingWindowAttention, "rolling").module.window == 128


def test_a_declared_window_stays() -> None:
    declared = {"construct": {"window": 5}}
    assert ModuleFunction(honest.RollingWindowAttention, "rolling", declared).module.window == 5


def test_a_context_that_it_raises_without_is_required() -> None:
    f = ModuleFunction(honest.CachedCrossAttention, "crossed")
    assert f.forward.context_required
    assert dict(f.facts)["context"].value == "required"


def test_positions_are_given_where_they_are_required() -> None:
    f = ModuleFunction(honest.StaticSlotAttention, "slots")
    assert f.forward.extras(torch.zeros(1), 3, 8, {})["input_pos"].tolist() == [0, 1, 2]
