"""The catalogue of faults and the diagnosis: each fault is seen, explained, and found again by its outputs."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from attn_spec import blocks, check_attention
from attn_spec.adapters.implementation import Implementation, Result
from attn_spec.conventions import Meaning
from attn_spec.faults import CATALOGUE, Fault, diagnosis, named
from attn_spec.faults.diagnosis import diagnose
from attn_spec.faults.fault import both
from attn_spec.faults.planted import planted
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import candidates, worst

torch.set_num_threads(1)

EXACT = candidates("float64")[0]
MEANINGS = (
    Meaning(),
    Meaning(alignment="bottom-right"),
    Meaning(empty_rows="mean"),
    Meaning(grouping="tiled"),
)


def of(**fields: object) -> Problem:
    """A problem on which distinct sizes tell the axes apart."""
    sizes = {"batch": 2, "heads": 6, "kv_heads": 2, "q_len": 5, "kv_len": 7, "head_dim": 20, "v_dim": 12}
    return Problem(**{**sizes, "dtype": "float64", **fields})  # type: ignore[arg-type]


SQUARE = {"q_len": 7, "kv_len": 7}
PLAIN = {"heads": 3, "kv_heads": 3}
ADDITIVE = Delivery("additive")
PADDING = Delivery("key-padding")

SMALL = [
    of(),
    of(**PLAIN, **SQUARE, v_dim=20),
    of(heads=8, kv_heads=2, q_len=9),
    of(batch=3, kv_heads=3, head_dim=8),
    of(kv_heads=1, head_dim=10, v_dim=24),
    of(mask=(Causal(),)),
    of(mask=(Causal(),), q_len=7, kv_len=5),
    of(mask=(Causal(),), **SQUARE, **PLAIN),
    of(mask=(Causal(),), q_len=1, scale=0.3),
    of(mask=(Causal(),), **SQUARE, **PLAIN, scale=0.3),
    of(mask=(Visible("QK"),), delivery=Delivery("bool", "QK"), **SQUARE),
    of(mask=(Visible("BHQK"),), kv_heads=3),
    of(mask=(Visible("BQK"),), batch=3, **PLAIN, **SQUARE),
    of(mask=(Visible("HQK"),), delivery=Delivery("bool", "HQK"), batch=3, **PLAIN),
    of(mask=(Visible("BHQK"),), batch=3, **PLAIN, **SQUARE),
    of(mask=(Visible("BK"),), q_len=1),
    of(mask=(Visible("BHQK", empty_rows=(1,)), Causal()), **SQUARE),
    of(mask=(Visible("BQK", density=0.3), Causal()), **SQUARE, **PLAIN),
    of(mask=(Visible("BHQK", empty_rows=(2,)),), delivery=ADDITIVE),
    of(mask=(Bias("HQK"),), delivery=ADDITIVE, scale=0.4, **SQUARE),
    of(mask=(Bias("BHQK"), Visible("BQK"), Causal()), delivery=ADDITIVE, **SQUARE, **PLAIN),
    of(mask=(KeyPadding((4, 7)),), delivery=PADDING),
    of(mask=(KeyPadding((4, 6), left=True),), delivery=PADDING, **SQUARE, **PLAIN),
    of(mask=(KeyPadding((3, 7), left=True), Causal()), delivery=PADDING, **SQUARE),
    of(mask=(KeyPadding((0, 5)),), delivery=PADDING, **SQUARE),
    of(scale=0.0, **PLAIN),
    of(scale=0.4),
    of(values="large", scale=12.0, mask=(Visible("BQK"),), **PLAIN, **SQUARE),
    of(values="large", scale=-12.0, **PLAIN),
    of(values="large", scale=300.0, mask=(Visible("BHQK", density=0.3),), **SQUARE),
    of(values="large", scale=3e7, mask=(Visible("BHQK", density=0.3),), **SQUARE),
    of(mask=(Visible("BQK", empty_rows=(2,)),), delivery=Delivery("additive", hidden="min"), **PLAIN),
]
LARGE = [
    *(
        of(batch=2, **PLAIN, q_len=n + 2, kv_len=n, head_dim=d, v_dim=d, mask=mask)
        for n, d in ((17, 4), (33, 8), (65, 36), (129, 16))
        for mask in ((), (Causal(),))
    ),
    of(mask=(Visible("QK"),), q_len=130, **PLAIN),
]
PROBLEMS = [*SMALL, *LARGE]


@cache
def right_answer(problem: Problem, meaning: Meaning) -> tuple[Tensor, Tensor]:
    """The right output with its bound, numbers that stand for -inf being exact."""
    right = blocks.run(problem.arguments(meaning.alignment), meaning)
    return right.output, diagnosis.bound(right, blocks.RIGHT, EXACT)


def differs(fault: Fault, problem: Problem, meaning: Meaning, margin: float = 10.0) -> bool:
    """Whether a fault moves the output further than `margin` bounds; refusing to answer counts as well."""
    arguments = problem.arguments(meaning.alignment)
    right, bound = right_answer(problem, meaning)
    try:
        output = blocks.run(arguments, meaning, fault.pipeline).output
    except (RuntimeError, IndexError, ValueError):
        return True
    if output.shape != right.shape:
        return True
    return worst(output, right, bound).ratio > margin


def seen_under(fault: Fault) -> Meaning | None:
    """The first conventions under which a fault can be seen."""
    return next((m for m in MEANINGS if any(differs(fault, p, m) for p in PROBLEMS)), None)


@pytest.mark.parametrize("fault", CATALOGUE.values(), ids=lambda f: f.id)
def test_fault_is_explained(fault: Fault) -> None:
    assert fault.title[0].islower() or not fault.title[0].isalpha() or fault.title.startswith("-")
    assert not fault.title.endswith(".")
    assert fault.advice.endswith(".")
    assert fault.sources
    assert all("#" in source or source.startswith("https://") for source in fault.sources)
    lines = fault.diff.splitlines()
    assert 1 <= len(lines) <= 8
    assert all(line[:2] in ("- ", "+ ") for line in lines)
    assert pickle.loads(pickle.dumps(fault)).id == fault.id


def test_diff_reads_as_the_change() -> None:
    assert named("scale-missing").diff == "- return q @ k.mT\n+ return q @ k.mT * scale"
    assert "- whole = max(s.shape[-1] // 64, 1) * 64" in named("tail-keys-dropped-64").diff


OF_PLAIN_CALLS = [f for f in CATALOGUE.values() if f.theme not in ("variants", "gradients")]  # tests/test_variants.py


@pytest.mark.parametrize("fault", OF_PLAIN_CALLS, ids=lambda f: f.id)
def test_fault_is_seen_and_found(fault: Fault) -> None:
    meaning = seen_under(fault)
    if fault.equivalent:
        assert meaning is None
        return
    assert meaning is not None
    if fault.id.endswith(("-32", "-64")):
        return  # found as their relatives of 16 and 128 are
    found: list[str] = []
    for problems in (SMALL, PROBLEMS):  # the large ones only where the small ones don't tell faults apart
        if not 0 < len(found) < 4:
            found = [d.fault.id for d in diagnose(planted(fault, meaning), problems, budget_s=20)]
    assert fault.id in found
    assert len(found) < 4


def test_two_faults_are_found_together() -> None:
    pair = both(named("scale-missing"), named("kv-heads-tiled"))
    assert pair.id in [d.fault.id for d in diagnose(planted(pair), SMALL, budget_s=60)]


def test_two_flags_that_are_not_heeded_are_found_together() -> None:
    pair = both(named("window-ignored"), named("softcap-ignored"))
    assert pair.theme == "variants"
    assert pair.diff.count("+ return a") == 2
    report = check_attention(planted(pair), laws=["variants"])
    assert {frozenset(name.split("+")) for name in report.diagnosis} >= {frozenset(pair.id.split("+"))}
    with pytest.raises(ValueError, match="both change score"):
        both(named("scale-missing"), named("scale-twice"))


def test_nothing_is_named_where_nothing_is_wrong() -> None:
    assert diagnose(planted(None), PROBLEMS) == []
    assert diagnose(planted(None), [p.replace(dtype="float32") for p in PROBLEMS]) == []


@dataclass
class Plain:
    """An attention as people write it, without a mask parameter; `dtypes` are those it takes."""

    change: str
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)

    def __call__(self, arguments: Arguments) -> Result:
        q, k, v = arguments.q, arguments.k, arguments.v
        if q.dtype not in self.dtypes or arguments.mask is not None or k.shape[1] != q.shape[1]:
            raise NotImplementedError("only plain inputs")
        scale = arguments.scale if arguments.scale is not None else q.shape[-1] ** -0.5
        s = torch.einsum("bhid,bhjd->bhij", q, k) * (1.0 if self.change == "no scale" else scale)
        if arguments.causal:
            future = torch.ones(s.shape[-2:], dtype=torch.bool).triu(2 if self.change == "one ahead" else 1)
            s = s.masked_fill(future, -torch.inf)
        p = s.exp() / s.exp().sum(-1, keepdim=True) if self.change == "no maximum" else s.softmax(-1)
        if self.change == "unknown":
            p = p * (1 + 1e-3 * torch.cos(s.nan_to_num()))
        return Result(p @ v)

    def source(self, arguments: Arguments) -> str:
        return "impl(q, k, v)"


def named_for(adapter: Plain, dtype: str) -> list[str]:
    implementation = Implementation("plain", "plain", adapter)
    problems = [p.replace(dtype=dtype) for p in (*PROBLEMS, of(**PLAIN, values="large"))]
    return [d.fault.id for d in diagnose(implementation, problems, budget_s=3)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_function_of_ones_own_is_diagnosed(dtype: str) -> None:
    assert named_for(Plain("no scale"), dtype) == ["scale-missing"]
    assert named_for(Plain("one ahead"), dtype) == ["causal-one-ahead"]
    assert named_for(Plain("unknown"), dtype) == []
    assert named_for(Plain(""), dtype) == []


def test_float32_only() -> None:
    assert named_for(Plain("no scale", (torch.float32,)), "float32") == ["scale-missing"]


def test_an_overflow_is_found_in_the_dtype_that_overflows() -> None:
    problems = [of(**PLAIN, values=kind, dtype="float32") for kind in ("large", "mild")]
    found = diagnose(Implementation("plain", "plain", Plain("no maximum")), problems, budget_s=60)
    assert "softmax-without-max" in [d.fault.id for d in found]


@pytest.mark.parametrize("name", ["causal-one-ahead@across", "scale-missing@grouped", "kv-heads-tiled@one-query"])
def test_a_fault_confined_to_some_calls_is_found(name: str) -> None:
    fault = named(name)
    assert name in [d.fault.id for d in diagnose(planted(fault), SMALL, budget_s=20)]
    assert pickle.loads(pickle.dumps(fault)).id == name
    assert fault.diff.startswith("- # only if ")


def test_rows_without_keys_may_be_guarded() -> None:
    """A fault beside a guard of empty rows is the fault, not a pair: zeros after the softmax over the queries."""

    def guarded(arguments: Arguments) -> Result:
        fault = named("softmax-over-queries")
        trace = blocks.run(arguments, Meaning(), fault.pipeline)
        return Result(trace.weights.nan_to_num(nan=0.0) @ trace.v)

    guarded.source = lambda arguments: "impl(q, k, v)"  # type: ignore[attr-defined]
    implementation = Implementation("guarded", "guarded", guarded)  # type: ignore[arg-type]
    assert [d.fault.id for d in diagnose(implementation, SMALL, budget_s=20)] == ["softmax-over-queries"]
