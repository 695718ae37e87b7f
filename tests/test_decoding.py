"""Decoding of functions: every fault is caught and named, with a cache in the signature or without; right ones hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_spec import adapt, check_attention
from attn_spec.adapters.cached import Cached, is_cached, uncached
from attn_spec.choice import decoding as choice
from attn_spec.choice.covering import covered
from attn_spec.decoding_blocks import BLOCKS, RIGHT, Asked, empty, rotate_halves, rotate_pairs, step
from attn_spec.faults import behaviour
from attn_spec.faults.behaviour import BehaviourFault
from attn_spec.faults.decoding_planted import planted_cached, planted_function
from attn_spec.invariants.decoding import chunks
from attn_spec.problem import Problem

FAULTS = {name: one for name, one in behaviour.load().items() if one.theme == "decoding"}
IN_FUNCTIONS = [
    *("decoding-causal-top-left", "cached-keys-unseen", "window-ignored-at-one-query", "window-from-chunk"),
    *("window-wider-at-one-query", "mask-at-first-call-only", "alibi-from-chunk", "positions-one-late"),
    *("cache-of-first-sample", "empty-part-nan", "merge-to-base-two", "parts-averaged", "merge-not-normalised"),
]
IN_CACHES = [
    *("unfilled-slots-seen", "shortest-length-for-all", "longest-position-for-all", "block-table-ignored"),
    *("page-size-of-another", "batch-index-ignored", "chunk-on-first-slots", "last-slot-overwritten"),
    *("neighbours-overwritten", "decoding-causal-top-left", "cached-keys-unseen", "merge-not-normalised"),
]


def failed(report: Any) -> set[str]:
    return {r.code for r in report.results if r.outcome == "failed"}


@pytest.mark.parametrize("name", IN_FUNCTIONS)
def test_caught_and_named_in_a_function(name: str) -> None:
    report = check_attention(planted_function(FAULTS[name]), laws=["decoding"])
    assert report.verdict == "failed", f"{name} gets through"
    assert report.diagnosis == [name], str(report)


@pytest.mark.parametrize("name", IN_CACHES)
def test_caught_and_named_in_a_function_with_a_cache(name: str) -> None:
    report = check_attention(planted_cached(FAULTS[name]), laws=["decoding"])
    assert report.verdict == "failed", f"{name} gets through"
    assert report.diagnosis == [name], str(report)


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 20
    assert {block for one in FAULTS.values() for block in one.blocks} == set(BLOCKS)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda one: one.id)
def test_explains_itself(fault: BehaviourFault) -> None:
    assert fault.title[0].islower()
    assert not fault.title.endswith(".")
    assert fault.advice.endswith(".")
    assert all("#" in source for source in fault.sources)
    assert fault.sources
    assert any(line.startswith(("-", "+")) for line in fault.diff.splitlines())


# what is right is left alone -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sdpa", "sdpa-math", "tiled", "naive", "variants"])
def test_right_functions_hold(name: str) -> None:
    report = check_attention(name, laws=["decoding"], profile="ci")
    assert report.passed, str(report)
    assert report.counts["passed"] >= 10


@pytest.mark.parametrize("made", [planted_function, planted_cached])
def test_right_blocks_hold(made: Callable[[None], Callable[..., Any]]) -> None:
    report = check_attention(made(None), laws=["decoding"], profile="ci")
    assert report.passed, str(report)


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Sample by sample, in plain torch: q [B, Sq, H, D], caches [R, N, Hkv, D] or pages of them."""
    out = q.new_zeros(*q.shape[:3], v_cache.shape[3])
    lengths = [k_cache.shape[1]] * len(q) if cache_seqlens is None else cache_seqlens.tolist()
    for b, filled in enumerate(lengths):
        held = int(filled)
        if block_table is not None:
            size = k_cache.shape[1]
            where = [(int(block_table[b, p // size]), p % size) for p in range(size * block_table.shape[1])]
        else:
            row = b if cache_batch_idx is None else int(cache_batch_idx[b])
            where = [(row, p) for p in range(k_cache.shape[1])]
        if k is not None and v is not None:
            for i in range(k.shape[1]):
                k_cache[where[held + i]], v_cache[where[held + i]] = k[b, i], v[b, i]
            held += k.shape[1]
        if not held:
            continue
        keys, values = (torch.stack([x[place] for place in where[:held]]) for x in (k_cache, v_cache))
        group = q.shape[2] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1).float() for x in (keys, values))
        s = q[b].transpose(0, 1).float() @ keys.mT * (softmax_scale or 1 / math.sqrt(q.shape[3]))
        if causal:
            at = torch.arange(q.shape[1])[:, None] + held - q.shape[1]
            s = s.masked_fill(torch.arange(held) > at, -torch.inf)
        out[b] = (torch.softmax(s, -1).nan_to_num() @ values).transpose(0, 1).to(q.dtype)
    return out


def of_rows(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, causal: bool = False) -> Tensor:
    """[B, H, S, D], nothing appended."""
    q, k_cache, v_cache = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    return with_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, causal=causal).transpose(1, 2)


def of_pages(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float = 0.0,
) -> Tensor:
    """Pages alone, under other names."""
    return with_kvcache(
        query, key_cache, value_cache, cache_seqlens=context_lens, block_table=block_tables, softmax_scale=scale or None
    )


def test_functions_with_a_cache_hold() -> None:
    report = check_attention(with_kvcache, laws=["decoding", "ATN103", "ATN404", "ATN601", "ATN751"])
    assert report.passed, str(report)
    passed = {r.code for r in report.results if r.outcome == "passed"}
    assert {"ATN1001", "ATN1002", "ATN1003", "ATN1010", "ATN1011", "ATN1012", "ATN1013", "ATN751"} <= passed
    assert adapt(with_kvcache).conventions.alignment.value == "bottom-right"


def test_other_layouts_and_names_are_understood() -> None:
    report = check_attention(of_rows, laws=["decoding"], layout="BHSD")
    assert report.passed, str(report)
    assert report.counts["passed"] >= 5
    report = check_attention(of_pages, laws=["decoding"])
    assert report.passed, str(report)
    assert {r.code for r in report.results if r.outcome == "passed"} >= {"ATN1003", "ATN1011", "ATN1012"}


def test_a_cache_of_pages_holds_what_is_put_in() -> None:
    cached = uncached(with_kvcache).of_cache  # type: ignore[attr-defined]
    assert isinstance(cached, Cached)
    assert cached.page == 4
    k, v = torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    laid = cached.laid(k, v, (9, 5), new=2)
    assert laid.filled.tolist() == [7, 3]
    assert laid.table is not None
    assert len(set(laid.table.flatten().tolist())) == laid.table.numel()
    assert laid.table.flatten().tolist() != sorted(laid.table.flatten().tolist())
    for b, n in enumerate((7, 3)):
        found = torch.stack([laid.k_cache[laid.table[b, p // 4], p % 4] for p in range(n)])
        assert torch.equal(found, k[b, :n])
    assert laid.k is not None
    assert torch.equal(laid.k[1], k[1, 3:5])


def test_what_has_no_cache_is_no_such_function() -> None:
    assert is_cached(with_kvcache)
    assert not is_cached(torch.nn.functional.scaled_dot_product_attention)
    report = check_attention("sdpa", laws=["ATN1010", "ATN1011", "ATN1012", "ATN1013"])
    assert {r.outcome for r in report.results} == {"unsupported"}


def test_nan_behind_what_is_filled_is_an_advisory() -> None:
    def poisoned(q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor) -> Tensor:
        s = torch.einsum("bihd,bjhd->bhij", q, k_cache.repeat_interleave(q.shape[2] // k_cache.shape[2], 2))
        hidden = torch.arange(k_cache.shape[1]) >= cache_seqlens[:, None, None, None]
        p = torch.softmax(s.masked_fill(hidden, -torch.inf) * q.shape[-1] ** -0.5, -1)
        return torch.einsum("bhij,bjhd->bihd", p, v_cache.repeat_interleave(q.shape[2] // k_cache.shape[2], 2))

    report = check_attention(poisoned, laws=["ATN1014"])
    assert report.counts["known-failure"] == 1
    assert check_attention(poisoned, laws=["ATN1014"], strict=True).verdict == "failed"


# blocks and problems -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", list(chunks(11)))
def test_steps_of_the_right_blocks_give_the_whole(cuts: list[int]) -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, h, 11, 8, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    cache, outs = empty(13, k, v), []
    for a, b in zip(cuts, cuts[1:], strict=False):
        asked = Asked(rotate=rotate_halves)
        outs.append(step(cache, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], asked, RIGHT)[0])
    at = torch.arange(11).expand(2, 11)
    right = torch.nn.functional.scaled_dot_product_attention(
        rotate_halves(q, at), rotate_halves(k, at), v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(torch.cat(outs, dim=2), right, rtol=1e-12, atol=1e-12)


def test_both_rotations_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    for rotate in (rotate_halves, rotate_pairs):
        products = [(rotate(q, torch.tensor([[i + 3]])) * rotate(k, torch.tensor([[i]]))).sum() for i in (0, 5, 100)]
        assert max(products) - min(products) < 1e-12
        assert abs(products[0] - (q * k).sum()) > 1e-3


@pytest.mark.parametrize("length", range(2, 40))
def test_chunks_cover_a_sequence_and_do_not_divide_it(length: int) -> None:
    found = list(chunks(length))
    for cuts in found:
        assert cuts[0] == 0
        assert cuts[-1] == length
        assert cuts == sorted(set(cuts))
    if length > 6:
        assert length % (found[0][1] - found[0][0])
        assert any(cuts[1] == 1 for cuts in found)


def test_every_two_features_meet_at_one_query() -> None:
    def levels(problem: Problem) -> dict[str, str]:
        part = {p.kind: p for p in problem.mask}
        return {
            "heads": f"{problem.heads}:{problem.kv_heads}",
            "mask": ",".join(kind for kind in part if kind in ("visible", "bias", "key-padding")),
            "length": str(problem.kv_len),
            "dtype": problem.dtype,
            "window": str("window" in part),
            "softcap": str(problem.softcap),
            "alibi": str(part.get("alibi")),
            "sinks": str(problem.sinks),
        }

    kept, anew = choice.one_query_problems(), choice.array(2, draws=1500, starts=3)
    assert all(problem.q_len == 1 for problem in kept)
    missing = covered([levels(p) for p in anew], 2) - covered([levels(p) for p in kept], 2)
    assert not missing, f"{sorted(missing)[:5]}: run `python benchmarks/choose_one_query.py`"
