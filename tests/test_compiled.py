"""Calls that are run otherwise: honest ones hold, faults are caught by name, and claims make red what few promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_spec import check_attention
from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.config import ConfigError, load
from attn_spec.config_words import CLAIMS
from attn_spec.engine import CheckResult, Subject
from attn_spec.faults import behaviour
from attn_spec.faults.behaviour import BehaviourFault, diagnose_behaviour
from attn_spec.invariants import load as load_laws
from attn_spec.law import LAWS
from attn_spec.masks import Visible
from attn_spec.problem import Problem
from attn_spec.reference.fused.flex import flex
from attn_spec.reference.fused.tiled import tiled
from attn_spec.reference.scratch.multi_head import MultiHeadAttention
from attn_spec.reference.scratch.naive import naive
from attn_spec.running_blocks import BLOCKS, Running
from attn_spec.subjects import choose
from attn_spec.suites.test_compiled import PLAIN, WIDE

load_laws()
QUICK = ["ATN1225", "ATN1226", "ATN1227", "ATN1228", "ATN1229"]
FAULTS = {name: fault for name, fault in behaviour.load().items() if fault.right is BLOCKS}
# the law that is tried on a fault that is not caught on `quick`
COMPILED = {
    "mask-dropped-when-compiled": "ATN1220",
    "causal-dropped-when-compiled": "ATN1220",
    "strides-ignored-when-compiled": "ATN1220",
    "length-of-the-first-trace": "ATN1221",
    "scale-of-the-first-trace": "ATN1221",
    "branch-on-the-mask": "ATN1222",
    "output-like-queries-without-data": "ATN1224",
}
sdpa = nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def adapted(target: Any, *claims: str) -> Implementation:
    return adapt(target, name=getattr(target, "__name__", "running"), declared={"claims": list(claims)})


def judged(implementation: Implementation, code: str, problem: Problem = PLAIN) -> CheckResult:
    return Subject(implementation).judge(LAWS[code], problem)


# honest --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [sdpa, naive, tiled, MultiHeadAttention, nn.MultiheadAttention])
def test_honest_ones_hold(target: Any) -> None:
    report = check_attention(target, laws=QUICK)
    results = report.judgement.results
    assert report.verdict == "passed", str(report)
    assert not report.judgement.with_outcome("known-failure")
    for code in ("ATN1225", "ATN1226", "ATN1227", "ATN1229"):
        assert [r for r in results if r.code == code and r.outcome == "passed"], code


@pytest.mark.parametrize(
    "target, codes",
    [
        (sdpa, ["ATN1220", "ATN1221", "ATN1222", "ATN1223", "ATN1224"]),
        (naive, ["ATN1221", "ATN1222", "ATN1223", "ATN1224"]),
        (tiled, ["ATN1222", "ATN1224"]),
        (MultiHeadAttention, ["ATN1221", "ATN1222", "ATN1223", "ATN1224"]),
        (nn.MultiheadAttention, ["ATN1222", "ATN1223", "ATN1224"]),
        (flex, ["ATN1222"]),
    ],
)
def test_honest_ones_are_compiled_and_exported(target: Any, codes: list[str]) -> None:
    implementation = adapted(target, "fullgraph", "export", "fake-tensors")
    for code in codes:
        assert judged(implementation, code).outcome == "passed", code


def test_what_torch_traces_at_each_call_is_no_race_of_its_own() -> None:
    assert judged(adapted(flex), "ATN1225", PLAIN.replace(values="mild")).outcome == "passed"
    assert judged(adapted(flex), "ATN1227").outcome in ("passed", "unsupported")


def test_the_right_blocks_hold_and_keep_every_promise_that_they_can() -> None:
    claims = [claim for claim in CLAIMS if claim != "export"]  # it loops over the keys
    report = check_attention(Running(), name="running", laws=QUICK, claims=claims)
    assert report.counts["passed"] == len(report.judgement.results) > 8
    assert judged(adapted(Running(), *claims), "ATN1221").outcome == "passed"
    assert judged(adapted(Running(), *claims), "ATN1222").outcome == "passed"
    assert judged(adapted(Running(), *claims), "ATN1224", WIDE).outcome == "passed"


def test_it_runs_where_the_function_is() -> None:
    (chosen,) = choose(["sdpa"], timeout_s=120)
    try:
        for code in ("ATN1225", "ATN1226", "ATN1227"):
            assert chosen.subject.judge(LAWS[code], PLAIN.replace(mask=(Visible("BQK"),))).outcome == "passed", code
    finally:
        chosen.subject.implementation.close()


# faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [f for n, f in FAULTS.items() if n not in COMPILED], ids=lambda f: f.id)
def test_caught_and_named(fault: BehaviourFault) -> None:
    report = check_attention(Running(fault.blocks), name="running", laws=QUICK, claims=list(CLAIMS))
    assert report.verdict == "failed", f"{fault.id} gets through"
    assert report.diagnosis == [fault.id]


@pytest.mark.parametrize("fault", [FAULTS[name] for name in COMPILED], ids=lambda f: f.id)
def test_caught_and_named_where_it_is_compiled(fault: BehaviourFault) -> None:
    implementation = adapted(Running(fault.blocks), "fullgraph")
    result = judged(implementation, COMPILED[fault.id], WIDE if "data" in fault.id else PLAIN)
    assert result.outcome == "failed", f"{fault.id} gets through"
    assert [found.fault for found in diagnose_behaviour(implementation, [result])] == [fault]


def test_faults_explain_themselves() -> None:
    assert len(FAULTS) >= 15
    for fault in FAULTS.values():
        assert fault.sources
        assert fault.told_by
        assert fault.title[0].islower()
        assert fault.advice.endswith(".")
        assert any(line.startswith(("-", "+")) for line in fault.diff.splitlines())


def test_a_shared_attribute_is_caught_every_time() -> None:
    for name in ("weights-kept-on-the-module", "mask-kept-on-the-module"):
        implementation = adapted(Running(FAULTS[name].blocks))
        assert [judged(implementation, "ATN1227", PLAIN.replace(seed=n)).outcome for n in range(10)] == ["failed"] * 10


# claims --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, code, outcome, said",
    [
        ("branch-on-the-mask", "ATN1222", "unsupported", "1 graph break"),
        ("splits-by-batch", "ATN1228", "unsupported", "3 of 5 samples and queries"),
        ("sums-in-an-unmapped-buffer", "ATN1229", "known-failure", "advisory"),
    ],
)
def test_what_is_not_claimed_is_not_red(name: str, code: str, outcome: str, said: str) -> None:
    problem = PLAIN.replace(batch=3, q_len=16, kv_len=64) if code == "ATN1228" else PLAIN
    result = judged(adapted(Running(FAULTS[name].blocks)), code, problem)
    assert result.outcome == outcome
    assert said in result.message
    assert "`claims: [" in result.message


def test_claims_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "attn.yaml"
    path.write_text("target: pkg.mod.attn\nclaims: [fullgraph, export]\n")
    (entry,) = load(path).implementations.values()
    assert entry.declared()["claims"] == ["fullgraph", "export"]
    path.write_text("target: pkg.mod.attn\nclaims: [fulgraph]\n")
    with pytest.raises(ConfigError, match=r"attn.yaml:2: claims.0: 'fulgraph' is not .*; did you mean fullgraph"):
        load(path)
    with pytest.raises(ConfigError, match=r"claims: .* write a list"):
        check_attention(naive, claims="export")


# what else is looked at ----------------------------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def detaching(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(q, k.detach() if torch.compiler.is_compiling() else k, v)


def scaling(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return attended(q.mul_(0.5), k * 2, v)
    return attended(q, k, v)


@pytest.mark.parametrize("function, merge", [(detaching, "compiled-gradient"), (scaling, "compiled-inputs-changed")])
def test_gradients_and_inputs_of_compiled_calls(function: Any, merge: str) -> None:
    result = judged(adapted(function), "ATN1220")
    assert (result.outcome, result.merge) == ("failed", merge)


def test_wrong_numbers_of_an_exported_program_are_red_without_a_claim() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(q, k, v * 1.01 if torch.compiler.is_compiling() else v)

    result = judged(adapted(attention), "ATN1223")
    assert (result.outcome, result.merge) == ("failed", "compiled-plain")


def leaving(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", False)
    return attended(q, k, v)


def in_double(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = attended(q, k, v)
    return out.double() if torch.is_autocast_enabled("cpu") else out


def rounded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(q, k, v * 1.1 if torch.is_autocast_enabled("cpu") else v)


def half_gradient(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attended(q, k.detach() if torch.is_autocast_enabled("cpu") else k, v)


@pytest.mark.parametrize(
    "function, merge",
    [
        (leaving, "autocast-state"),
        (in_double, "autocast-dtype"),
        (rounded, "autocast-answer"),
        (half_gradient, "autocast-gradient"),
    ],
)
def test_autocast(function: Any, merge: str) -> None:
    result = judged(adapted(function), "ATN1225", PLAIN.replace(values="mild"))
    assert (result.outcome, result.merge) == ("failed", merge)
    assert not torch.is_autocast_enabled("cpu")
