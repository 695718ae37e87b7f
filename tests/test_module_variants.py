"""Variants inside modules: softcap, windows, ALiBi, biases by position and sinks, asked for, fixed or a parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_spec import adapt, check_attention
from attn_spec.adapters.implementation import Implementation
from attn_spec.check import Report
from attn_spec.faults import behaviour
from attn_spec.faults.behaviour import BehaviourFault
from attn_spec.faults.plants import plants
from attn_spec.invariants import load
from attn_spec.module_variant_blocks import module_of
from attn_spec.values import standard_slopes

load()
torch.set_num_threads(1)
LAWS = ("variants", "ATN103", "ATN201", "ATN403", "ATN650", "ATN901", "ATN905", "ATN951")
FAULTS = [fault for fault in behaviour.load().values() if fault.module.endswith(".module_variants")]


class Base(nn.Module):
    """Attention of grouped heads, causal where it is asked to be, in which subclasses change a step."""

    softcap: float | None = None
    window: int | None = None

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, hidden_size // num_heads
        self.q_proj, self.o_proj = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim)

    def added(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.zeros(())

    def near(self, i: Tensor, j: Tensor, causal: bool) -> Tensor:
        if self.window is None:
            return torch.ones_like(i - j, dtype=torch.bool)
        return (i - j < self.window) & (j - i < self.window)

    def weights(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        b, n, _ = x.shape
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.view(b, n, -1, self.head_dim).transpose(1, 2) for y in parts)
        k, v = (y.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for y in (k, v))
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        scores = q @ k.mT / math.sqrt(self.head_dim)
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores + self.added(i, j).to(x.dtype)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        shown = self.near(i, j, is_causal) & ((j <= i) | (not is_causal))
        weights = self.weights(scores.masked_fill(~shown, -torch.inf)).nan_to_num()
        out: Tensor = self.o_proj((weights @ v).transpose(1, 2).reshape(b, n, -1))
        return out


class Capped(Base):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, logit_softcap: float | None = None) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.softcap = logit_softcap


class AlwaysCapped(Base):
    """A softcap without which it does not run."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, softcap: float = 5.0) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.softcap = float(softcap)


class CappedByNumber(Base):
    """A softcap of which nothing but its code speaks."""

    def added(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.zeros(())

    def forward(self, x: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        b, n, _ = x.shape
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.view(b, n, -1, self.head_dim).transpose(1, 2) for y in parts)
        k, v = (y.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for y in (k, v))
        scores = 3.0 * torch.tanh(q @ k.mT / math.sqrt(self.head_dim) / 3.0)
        if is_causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        out: Tensor = self.o_proj((scores.softmax(-1).nan_to_num() @ v).transpose(1, 2).reshape(b, n, -1))
        return out


class Windowed(Base):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, window: int | None = None) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.window = window


class WindowOfKeysBefore(Windowed):
    def near(self, i: Tensor, j: Tensor, causal: bool) -> Tensor:
        return (i - j).abs() <= self.window if self.window is not None else super().near(i, j, causal)


class Buckets(Windowed):
    def near(self, i: Tensor, j: Tensor, causal: bool) -> Tensor:
        return i // self.window == j // self.window if self.window else super().near(i, j, causal)


@dataclass
class Config:
    d_model: int = 64
    n_heads: int = 4
    n_kv_heads: int = 4
    sliding_window: int | None = None
    attn_logit_softcapping: float | None = 50.0


class Configured(Base):
    """Its variants come from a config, one of them on by default."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.d_model, config.n_heads, config.n_kv_heads)
        self.softcap, self.window = config.attn_logit_softcapping, config.sliding_window


class ConfiguredDropsCap(Configured):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.softcap = None


class Renamed(Base):
    """Variants by names that say nothing."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        ceiling: float | None = None,
        reach: int | None = None,
    ) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.softcap, self.window = ceiling, reach


class Alibi(Base):
    def added(self, i: Tensor, j: Tensor) -> Tensor:
        return -standard_slopes(self.num_heads)[:, None, None] * (i - j).abs()


class AlibiSwitched(Alibi):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, alibi: bool = False) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.alibi = alibi

    def added(self, i: Tensor, j: Tensor) -> Tensor:
        return super().added(i, j) if self.alibi else torch.zeros(())


class AlibiFlipped(AlibiSwitched):
    def added(self, i: Tensor, j: Tensor) -> Tensor:
        return -super().added(i, j)


class AlibiOneRule(Alibi):
    """2^(-8 h / H) whatever H is, as many have it."""

    def added(self, i: Tensor, j: Tensor) -> Tensor:
        slopes = 2.0 ** (-8 * torch.arange(1, self.num_heads + 1) / self.num_heads)
        return slopes[:, None, None] * (j - i)


class Relative(Base):
    """A learned bias for each distance, as T5 has it."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.table = nn.Embedding(17, num_heads)

    def added(self, i: Tensor, j: Tensor) -> Tensor:
        bias: Tensor = self.table((j - i).clamp(-8, 8) + 8)
        return bias.permute(2, 0, 1)


class RelativeTwice(Relative):
    """Beside its bias it forgets the scale."""

    def weights(self, logits: Tensor) -> Tensor:
        return (2 * logits).softmax(-1)


class Sinks(Base):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.attn_sinks = nn.Parameter(torch.zeros(num_heads))

    def weights(self, logits: Tensor) -> Tensor:
        column = self.attn_sinks[:, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def judged(target: Any, **declared: Any) -> Report:
    return check_attention(target, laws=LAWS, **declared)


def ran(report: Report, *codes: str) -> bool:
    passed = {result.code for result in report.results if result.outcome == "passed"}
    return set(codes) <= passed


def made(module: type[nn.Module], **declared: Any) -> Implementation:
    return adapt(module, declared=declared)


HONEST = {
    Capped: ("ATN711", "ATN712", "ATN782"),
    Windowed: ("ATN701", "ATN702", "ATN703", "ATN782"),
    WindowOfKeysBefore: ("ATN701", "ATN702", "ATN703", "ATN782"),
    Configured: ("ATN701", "ATN711", "ATN712", "ATN782"),
    AlibiSwitched: ("ATN721", "ATN724", "ATN782"),
    Alibi: ("ATN650", "ATN724", "ATN901"),
    AlibiOneRule: ("ATN650", "ATN724"),
    Relative: ("ATN650", "ATN901"),
    Sinks: ("ATN731", "ATN732", "ATN782", "ATN905"),
    AlwaysCapped: ("ATN650", "ATN901"),
    CappedByNumber: ("ATN650", "ATN901"),
}


@pytest.mark.parametrize("module", HONEST, ids=lambda module: module.__name__)
def test_honest_modules_hold_and_are_judged(module: type[nn.Module]) -> None:
    report = judged(module)
    assert report.passed, str(report)
    assert ran(report, "ATN103", *HONEST[module]), str(report)


@pytest.mark.parametrize("alibi", [False, True])
def test_the_right_blocks_hold(alibi: bool) -> None:
    report = judged(module_of({}, alibi=alibi), name="decoder")
    assert report.passed, str(report)
    assert ran(report, *(["ATN724"] if alibi else ["ATN701", "ATN711", "ATN731", "ATN782"]))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_every_fault_is_caught_and_named(fault: BehaviourFault) -> None:
    reports = [judged(target, **declared) for target, declared in plants(fault)]
    assert any(report.verdict == "failed" and fault.id in report.diagnosis for report in reports), fault.id
    assert fault.sources
    assert fault.told_by


def test_what_changes_nothing_is_named_by_its_argument() -> None:
    report = judged(ConfiguredDropsCap)
    (said,) = [r.message for r in report.results if r.code == "ATN782" and r.outcome == "failed"]
    assert said == "softcap was given as attn_logit_softcapping = 1.0 and changes nothing"
    assert "softcap-argument-unused" in report.diagnosis
    assert "softcap-argument-after-mask" not in report.diagnosis


def test_a_switch_with_the_wrong_sign() -> None:
    report = judged(AlibiFlipped)
    assert "alibi-inside-sign-flipped" in report.diagnosis
    messages = [r.message for r in report.results if r.code == "ATN724" and r.outcome == "failed"]
    assert any("head 0 of 4 adds +0.25 for each key further back, expected -0.25" in m for m in messages), messages


def test_beside_a_bias_of_its_own_all_else_is_judged() -> None:
    report = judged(RelativeTwice)
    assert report.verdict == "failed"
    assert {"ATN103", "ATN650"} <= {r.code for r in report.results if r.outcome == "failed"}


def test_a_softcap_that_is_declared_stands() -> None:
    capped = made(Capped, construct={"logit_softcap": 2.0})
    assert capped.adapter.module.softcap == 2.0  # type: ignore[attr-defined]
    assert judged(Capped, construct={"logit_softcap": 2.0}).passed
    assert judged(ConfiguredDropsCap, construct={"config": {"attn_logit_softcapping": 2.0}}).verdict == "failed"


@pytest.mark.parametrize(
    ("module", "kind"), [(Windowed, "count-both"), (WindowOfKeysBefore, "left-both"), (Configured, "count-both")]
)
def test_what_a_window_counts_is_measured(module: type[nn.Module], kind: str) -> None:
    assert made(module).conventions.window.value == kind


def test_a_window_of_buckets_is_not_judged_and_said() -> None:
    report = judged(Buckets)
    assert report.passed, str(report)
    reasons = {r.message for r in report.results if r.code == "ATN701"}
    assert any("none of so many keys by distance" in reason for reason in reasons), reasons


def test_words_say_what_names_do_not() -> None:
    words = {"ceiling": "$softcap", "reach": "$window"}
    assert not made(Renamed).built_with
    assert made(Renamed, construct=words).built_with == {"softcap": "ceiling", "window": "reach"}
    report = judged(Renamed, construct=words)
    assert report.passed, str(report)
    assert ran(report, "ATN701", "ATN711")


def test_an_instance_has_its_sinks_given() -> None:
    report = judged(Sinks(48, 4, 2))
    assert report.passed, str(report)
    assert ran(report, "ATN731", "ATN782")


def test_slopes_of_any_number_of_heads() -> None:
    assert standard_slopes(8).tolist() == [2.0**-h for h in range(1, 9)]
    assert torch.allclose(standard_slopes(3), torch.tensor([2.0**-4, 2.0**-8, 2.0**-2]))
