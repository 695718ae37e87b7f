"""Decoding of modules: every fault is caught and named, and every way to keep a cache is understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import adapt, check_attention
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.modules.sessions import Grown, protocol_of
from attn_spec.faults import behaviour
from attn_spec.faults.decoding_planted import planted_decoder
from attn_spec.law import LAWS
from attn_spec.reference.scratch.cached_attention import CachedCausalAttention

LAWS_OF_MODULES = [f"ATN105{n}" for n in range(6)]
FAULTS = {name: one for name, one in behaviour.load().items() if one.theme == "decoding"}
IN_MODULES = [
    *("decoding-causal-top-left", "unfilled-slots-seen", "cached-keys-unseen", "mask-at-first-call-only"),
    *("rotation-from-zero", "positions-one-late", "cache-of-first-sample", "chunk-on-first-slots"),
    *("last-slot-overwritten", "cache-not-reset", "empty-part-nan"),
]
IN_WINDOWS = ["window-ignored-at-one-query", "window-from-chunk", "window-wider-at-one-query"]


def judged(target: Any, **declared: Any) -> Any:
    return check_attention(target, laws=LAWS_OF_MODULES, **declared)


@pytest.mark.parametrize("name", IN_MODULES)
def test_caught_and_named(name: str) -> None:
    report = judged(planted_decoder(FAULTS[name]))
    assert report.verdict == "failed", f"{name} gets through"
    assert report.diagnosis == [name], str(report)


@pytest.mark.parametrize("name", IN_WINDOWS)
def test_caught_and_named_with_a_window(name: str) -> None:
    report = judged(planted_decoder(FAULTS[name], rotates=False, window=2))
    assert report.diagnosis == [name], str(report)


@pytest.mark.parametrize("rotates", [True, False])
def test_the_right_one_holds(rotates: bool) -> None:
    report = check_attention(planted_decoder(None, rotates=rotates), laws=["decoding"], profile="ci")
    assert report.passed, str(report)
    assert {r.code for r in report.results if r.outcome == "passed"} >= set(LAWS_OF_MODULES)


def test_the_reference_holds() -> None:
    report = check_attention(CachedCausalAttention, laws=["decoding", "modules", "ATN103", "ATN401", "ATN650"])
    assert report.passed, str(report)
    assert {r.code for r in report.results if r.outcome == "passed"} >= set(LAWS_OF_MODULES)


# the ways to keep a cache, each right and with a fault of its own ----------------------------------------------------


class Base(nn.Module):
    """Projections, and attention of new tokens to all."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError("does not divide")
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def project(self, x: Tensor) -> list[Tensor]:
        shape = (*x.shape[:2], self.num_heads, self.head_dim)
        return [p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, past: int, seen: Tensor | None = None) -> Tensor:
        if seen is None:
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past)
        out: Tensor = self.o_proj(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return out


class CausalWithObject(Base):
    """An object with `update`, as transformers' caches."""

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        q, k, v = self.project(x)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, 0)
        return self.attend(q, k, v, self.offset(q, k))

    def offset(self, q: Tensor, k: Tensor) -> int:
        return k.shape[2] - q.shape[2]


class CausalTopLeft(CausalWithObject):
    def offset(self, q: Tensor, k: Tensor) -> int:
        return 0


class CausalWithPair(Base):
    """(k, v) in, and (k, v) back beside the output."""

    def forward(self, x: Tensor, layer_past: Any = None, use_cache: bool = False) -> Any:
        q, k, v = self.project(x)
        if layer_past is not None:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(layer_past, (k, v), strict=True))
        y = self.attend(q, k, v, k.shape[2] - q.shape[2])
        return (y, self.kept(k, v, x)) if use_cache else y

    def kept(self, k: Tensor, v: Tensor, x: Tensor) -> Any:
        return k, v


class CausalPairOfNewAlone(CausalWithPair):
    """What is given back is what is new, without what was there."""

    def kept(self, k: Tensor, v: Tensor, x: Tensor) -> Any:
        return k[:, :, -x.shape[1] :], v[:, :, -x.shape[1] :]


class CausalPairOfNothing(CausalWithPair):
    def kept(self, k: Tensor, v: Tensor, x: Tensor) -> Any:
        return None


class CausalInside(Base):
    """Kept by the module from `use_cache=True` to `reset_cache()`."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        self.cache_k: Tensor | None = None
        self.cache_v: Tensor | None = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        q, k, v = self.project(x)
        if self.reads(use_cache):
            if self.cache_k is not None and self.cache_v is not None:
                k, v = torch.cat([self.cache_k, k], dim=2), torch.cat([self.cache_v, v], dim=2)
            self.cache_k, self.cache_v = k, v
        return self.attend(q, k, v, k.shape[2] - q.shape[2])

    def reads(self, use_cache: bool) -> bool:
        return use_cache

    def reset_cache(self) -> None:
        self.cache_k = self.cache_v = None


class CausalInsideUnasked(CausalInside):
    """Reads what is there whether it is asked to or not."""

    def reads(self, use_cache: bool) -> bool:
        return use_cache or (self.cache_k is not None)


class AtPositions(Base):
    """Buffers that are written at `start_pos`, and rotated keys, as Llama's reference code."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        self.cache_k = torch.zeros(8, 40, num_heads, self.head_dim)
        self.cache_v = torch.zeros(8, 40, num_heads, self.head_dim)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (y.transpose(1, 2) for y in self.project(x))
        q, k = (self.turned(y, freqs_cis) for y in (q, k))
        self.cache_k, self.cache_v = self.cache_k.to(k), self.cache_v.to(v)
        self.cache_k[:b, start_pos : start_pos + s] = k
        self.cache_v[:b, start_pos : start_pos + s] = v
        k, v = (y[:b, : self.end(start_pos, s)].transpose(1, 2) for y in (self.cache_k, self.cache_v))
        scores = q.transpose(1, 2) @ k.mT * self.head_dim**-0.5
        if mask is not None:
            scores = scores + mask
        out: Tensor = self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out

    def end(self, start_pos: int, s: int) -> int:
        return start_pos + s

    @staticmethod
    def turned(x: Tensor, freqs_cis: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).to(x.dtype)


class Store(nn.Module):
    def __init__(self, b: int, h: int, n: int, d: int, dtype: Any) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(b, h, n, d, dtype=dtype))
        self.register_buffer("v", torch.zeros(b, h, n, d, dtype=dtype))


class CausalBuilt(Base):
    """A submodule that `build_kv_cache` makes, and slots at `input_pos`, as litgpt."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        self.kv_cache: Any = None

    def build_kv_cache(self, batch_size: int, max_seq_length: int, dtype: Any = None) -> Store:
        return Store(batch_size, self.num_heads, max_seq_length, self.head_dim, dtype)

    def forward(self, x: Tensor, mask: Tensor | None = None, input_pos: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        if input_pos is not None:
            at = self.slots(input_pos)
            self.kv_cache.k[:, :, at], self.kv_cache.v[:, :, at] = k, v
            k, v = self.kv_cache.k, self.kv_cache.v
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if mask is None else mask
        return self.attend(q, k, v, 0, seen)

    def slots(self, input_pos: Tensor) -> Tensor:
        return input_pos


class CausalBuiltOverwriting(CausalBuilt):
    def slots(self, input_pos: Tensor) -> Tensor:
        return input_pos - input_pos[0]


class CausalWithTable(Base):
    """The whole table of the rotation, of which it takes the rows from `start_pos` on."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, start_pos: int = 0, cache: Any = None) -> Any:
        q, k, v = self.project(x)
        rows = slice(self.first(start_pos), self.first(start_pos) + x.shape[1])
        q, k = (self.turned(y, cos[rows], sin[rows]) for y in (q, k))
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        return self.attend(q, k, v, k.shape[2] - q.shape[2]), (k, v)

    def first(self, start_pos: int) -> int:
        return start_pos

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], dim=-1) * sin


class CausalTableFromZero(CausalWithTable):
    def first(self, start_pos: int) -> int:
        return 0


RIGHT: dict[type[nn.Module], tuple[str, dict[str, Any]]] = {
    CausalWithObject: ("object", {}),
    CausalWithPair: ("returned", {}),
    CausalWithTable: ("returned", {}),
    CausalInside: ("inside", {}),
    AtPositions: ("positions", {}),
    CausalBuilt: ("built", {"causal": "always", "call": {"mask": None}}),
    CachedCausalAttention: ("returned", {}),
}


@pytest.mark.parametrize("module", RIGHT, ids=lambda m: m.__name__)
def test_every_way_is_understood_and_holds(module: type[nn.Module]) -> None:
    kind, declared = RIGHT[module]
    found = protocol_of(ModuleFunction(module, module.__name__, declared))
    assert found is not None
    assert found.kind == kind
    report = judged(module, **declared)
    assert report.passed, str(report)
    assert report.counts["passed"] >= 7, str(report)


@pytest.mark.parametrize(
    ("module", "declared", "merge"),
    [
        (CausalTopLeft, {}, "session-steps"),
        (CausalPairOfNewAlone, {}, "session-steps"),
        (CausalTableFromZero, {}, "session-steps"),
        (CausalPairOfNothing, {}, "cache-not-returned"),
        (CausalInsideUnasked, {}, "cache-unasked"),
        (CausalBuiltOverwriting, {"causal": "always", "call": {"mask": None}}, "session-steps"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_what_is_wrong_is_caught(module: type[nn.Module], declared: dict[str, Any], merge: str) -> None:
    report = judged(module, **declared)
    assert report.verdict == "failed"
    assert merge in {r.merge for r in report.results if r.outcome == "failed"}, str(report)


def test_what_raises_with_a_cache_is_no_refusal() -> None:
    class CausalSlicesWrongly(CausalWithPair):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, past: int, seen: Tensor | None = None) -> Tensor:
            n = k.shape[2]
            return super().attend(q, k, v, past, torch.ones(n, n, dtype=torch.bool).tril()[:, -q.shape[2] :])

    report = judged(CausalSlicesWrongly)
    assert report.verdict == "failed"
    assert {r.merge for r in report.results if r.outcome == "failed"} == {"decoding-raises"}
    assert "raises RuntimeError" in report.judgement.headline


def test_the_reproducer_fails_by_itself() -> None:
    report = judged(CausalPairOfNewAlone)
    (first,) = [m for m in report.judgement.merged() if m.first.code == "ATN1050"]
    script = report.judgement.reproducer(first.first)
    assert "layer_past=cache, use_cache=True" in script
    with pytest.raises(AssertionError, match="in parts, with the cache"):
        exec(script, {})


def test_what_it_keeps_is_described() -> None:
    made = adapt(CausalWithPair)
    assert [(name, finding.value) for name, finding in made.facts if name == "cache"] == [("cache", "returned")]
    assert not any("left at their defaults" in note for note in made.notes)


def test_one_token_at_a_time_is_allowed() -> None:
    class CausalOneByOne(CausalWithPair):
        def forward(self, x: Tensor, layer_past: Any = None, use_cache: bool = False) -> Any:
            if layer_past is not None and x.shape[1] > 1:
                raise ValueError("one token at a time, once there is a cache")
            return super().forward(x, layer_past, use_cache)

    report = judged(CausalOneByOne)
    outcomes = {r.code: r.outcome for r in report.results}
    assert outcomes["ATN1050"] == "passed"
    assert outcomes["ATN1051"] == "unsupported"


def test_a_module_without_a_cache_is_not_asked() -> None:
    report = judged(nn.MultiheadAttention)
    assert {r.message for r in report.results} == {"it takes no cache"}
    assert all(LAWS[code].of_modules for code in LAWS_OF_MODULES)


class Memory:
    """A cache of fixed length under names of its own."""

    def __init__(self, batch: int, heads: int, length: int, width: int) -> None:
        self.k, self.v = torch.zeros(batch, heads, length, width), torch.zeros(batch, heads, length, width)
        self.n = 0

    def put(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        stop = self.n + k.shape[2]
        self.k[:, :, self.n : stop], self.v[:, :, self.n : stop], self.n = k, v, stop
        return self.k[:, :, :stop].to(k), self.v[:, :, :stop].to(v)


class CausalWithMemory(Base):
    def forward(self, x: Tensor, memory_of_keys: Memory | None = None) -> Tensor:
        q, k, v = self.project(x)
        if memory_of_keys is not None:
            k, v = memory_of_keys.put(k, v)
        return self.attend(q, k, v, k.shape[2] - q.shape[2])


def test_a_cache_of_ones_own_is_declared() -> None:
    assert {r.outcome for r in judged(CausalWithMemory).results} == {"unsupported"}
    sizes = {"batch": "$batch", "heads": "$heads", "length": "$capacity", "width": "$head_dim"}
    cache = {"kind": "object", "parameter": "memory_of_keys", "class": f"{__name__}.Memory", "arguments": sizes}
    report = judged(CausalWithMemory, cache=cache)
    assert report.passed, str(report)
    assert report.counts["passed"] >= 7


def test_a_reset_is_declared() -> None:
    class CausalForgetting(CausalInside):
        reset_cache = None  # type: ignore[assignment]

        def forget(self) -> None:
            self.cache_k = self.cache_v = None

    assert judged(CausalForgetting).verdict == "failed"
    assert judged(CausalForgetting, cache={"kind": "inside", "reset": "forget"}).passed


def test_our_cache_grows() -> None:
    cache, k = Grown(), torch.randn(1, 2, 3, 4)
    assert cache.get_seq_length() == 0
    cache.update(k, k)
    found, _ = cache.update(k + 1, k, 0, {"cache_position": None})
    assert torch.equal(found, torch.cat([k, k + 1], dim=2))
    assert cache.get_seq_length() == 6


@pytest.mark.parametrize("make", [planted_decoder])
def test_every_fault_of_modules_can_be_planted(make: Callable[..., type[nn.Module]]) -> None:
    assert all(issubclass(make(one), nn.Module) for one in FAULTS.values())
