"""The strategies: what they draw is a problem, within the capabilities, at the edges; and shrinks to what is plain."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

from attn_spec import adapt, masks, strategies
from attn_spec.capabilities import Capabilities, capabilities
from attn_spec.faults.planted import planted
from attn_spec.invariants.numerics import fuzzed
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import SIZES, Problem

MINIMAL = settings(max_examples=2000, database=None, deadline=None, derandomize=True)
STILL = settings(MINIMAL, max_examples=150, suppress_health_check=list(HealthCheck))
DEFAULT = Problem()


def drawn(strategy: st.SearchStrategy[Problem], count: int = 150) -> list[Problem]:
    out: list[Problem] = []

    @settings(STILL, max_examples=count)
    @given(problem=strategy)
    def collect(problem: Problem) -> None:
        out.append(problem)

    collect()
    return out


def test_problems_are_right_problems_of_every_kind() -> None:
    """A right implementation holds on each; every feature and edge comes up; none costs more than asked."""
    right = planted(None)
    problems = drawn(strategies.problems(cost=50_000), 400)
    for problem in problems:
        fuzzed(right, problem)
        assert problem.cost <= 50_000
        assert Problem.from_yaml(problem.to_yaml()) == problem
    seen = Counter(kind for p in problems for kind in {type(part).__name__ for part in p.mask})
    assert min(seen[kind.__name__] for kind in (Causal, KeyPadding, Visible, Bias)) > 10
    for field in (*SIZES, "dtype", "values", "layout", "scale", "seed"):
        assert len({getattr(p, field) for p in problems}) > 2, field
    assert {p.delivery.form for p in problems if p.masked} == {"bool", "additive", "key-padding"}
    assert any(p.q_len == 0 or p.kv_len == 0 or p.batch == 0 for p in problems)
    assert any(p.q_len != p.kv_len for p in problems)
    assert any(p.kv_len % 8 in (1, 7) and p.kv_len > 30 for p in problems)
    assert any(p.delivery.strided for p in problems)
    assert any(not p.delivery.flag for p in problems)


def test_what_an_implementation_cannot_do_is_not_drawn() -> None:
    def picky(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("grouped heads are not supported")
        if q.shape[-1] % 16 or v.shape[-1] != q.shape[-1]:
            raise ValueError("head_dim must be a multiple of 16, of q and v alike")
        if q.shape[2] % 32 or q.shape[2] != k.shape[2]:
            raise ValueError("sequences must have the same length, a multiple of 32")
        if q.dtype == torch.bfloat16:
            raise TypeError("bfloat16 is not supported")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    picky_ = adapt(picky, name="picky")
    can = capabilities(picky_)
    assert (can.grouped, can.value_width, can.cross, can.forms, can.scale) == (False, False, False, (), False)
    assert (can.head_multiple, can.length_multiple, can.causal) == (16, 32, "flag")
    assert "bfloat16" not in can.dtypes
    taken = 0
    problems = drawn(strategies.problems(for_=picky_))
    for problem in problems:
        picky_(problem.arguments())
        taken += 1
    assert taken == len(problems)
    assert any(p.causal for p in problems)
    assert len({p.kv_len for p in problems}) > 2


@pytest.mark.parametrize(
    "limits, holds",
    [
        ({"grouped": False}, lambda p: p.heads == p.kv_heads),
        ({"value_width": False}, lambda p: p.head_dim == p.v_dim),
        ({"cross": False}, lambda p: p.q_len == p.kv_len),
        ({"causal": "never"}, lambda p: not p.causal_by_flag),
        ({"causal": "always", "cross": False}, lambda p: p.causal_by_flag),
        ({"causal_cross": False}, lambda p: not p.causal_by_flag or p.q_len == p.kv_len),
        ({"forms": ("bool",)}, lambda p: not p.masked or p.delivery.form == "bool"),
        ({"forms": ()}, lambda p: not p.masked),
        ({"with_causal": False}, lambda p: not (p.masked and p.causal_by_flag)),
        ({"bias": False}, lambda p: not any(isinstance(part, Bias) for part in p.mask)),
        ({"broadcast": False}, lambda p: not p.masked or p.delivery.shape == "BHQK" or "padding" in p.delivery.form),
        ({"mask_dtype": False}, lambda p: not p.delivery.dtype),
        ({"scale": False}, lambda p: p.scale is None),
        ({"scale_edges": False}, lambda p: p.scale is None or p.scale > 0),
        ({"zero": False}, lambda p: p.batch and p.q_len and p.kv_len),
        ({"strided": False}, lambda p: p.layout == "contiguous" and not p.delivery.strided),
        ({"dtypes": ("float16",)}, lambda p: p.dtype == "float16"),
        ({"head_multiple": 16}, lambda p: p.head_dim % 16 == 0 and p.v_dim % 16 == 0),
        ({"length_multiple": 32, "zero": False}, lambda p: p.q_len % 32 == 0 and p.kv_len % 32 == 0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_capability_is_respected(limits: dict[str, object], holds: object) -> None:
    assert callable(holds)
    problems = drawn(strategies.problems(for_=Capabilities().but(**limits)))
    assert len(problems) > 100
    assert all(holds(problem) for problem in problems)


def test_rows_are_left_with_a_key_where_empty_rows_say_nothing() -> None:
    for problem in drawn(strategies.problems(for_=Capabilities(empty_rows=False)), 400):
        for alignment in ("top-left", "bottom-right"):
            visible, _ = masks.combined(problem.mask, problem.sizes, problem.seed, alignment)  # type: ignore[arg-type]
            rows = torch.ones(problem.sizes, dtype=torch.bool) if visible is None else visible.expand(problem.sizes)
            assert bool(rows.any(-1).all()), problem


@pytest.mark.parametrize(
    "condition, expected",
    [
        (lambda p: True, {}),
        (lambda p: p.kv_len >= 65, {"q_len": 65, "kv_len": 65}),
        (lambda p: p.heads != p.kv_heads, {"heads": 4}),
        (lambda p: p.dtype == "float16", {"dtype": "float16"}),
        (lambda p: p.scale is not None, {"scale": 0.5}),
        (lambda p: p.causal_by_flag, {"mask": (Causal(),)}),
        (lambda p: p.layout == "sliced", {"layout": "sliced"}),
        (lambda p: p.head_dim > 100, {"head_dim": 128, "v_dim": 128}),
    ],
)
def test_every_field_shrinks_to_the_default(condition: object, expected: dict[str, object]) -> None:
    assert callable(condition)
    assert find(strategies.problems(), condition, settings=MINIMAL) == DEFAULT.replace(**expected)


def test_a_feature_shrinks_to_little_more_than_itself() -> None:
    found = find(strategies.problems(), lambda p: any(isinstance(part, Bias) for part in p.mask), settings=MINIMAL)
    changed = [f.name for f in dataclasses.fields(found) if getattr(found, f.name) != getattr(DEFAULT, f.name)]
    assert set(changed) <= {"mask", "delivery"}


@settings(STILL)
@given(shape=strategies.shapes(), data=st.data())
def test_shapes_and_masks_fit_together(shape: dict[str, int], data: st.DataObject) -> None:
    sizes = {name: shape[name] for name in ("batch", "q_len", "kv_len")}
    mask, how = data.draw(strategies.masks(**sizes))  # type: ignore[arg-type]
    assert isinstance(how, Delivery)
    Problem(**shape, mask=mask, delivery=how).arguments()  # type: ignore[arg-type]


@given(problem=strategies.problems(cost=20_000))
@settings(max_examples=20, database=None)
def test_in_a_test_of_ones_own(problem: Problem) -> None:
    """As the documentation shows it, with every health check on."""
    a = problem.arguments()
    assert a.q.shape == (problem.batch, problem.heads, problem.q_len, problem.head_dim)
