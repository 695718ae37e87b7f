"""Judged by what others wrote: the oracle and the blocks against the stored outputs of ONNX's Attention cases."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import Implementation, adapt, blocks, onnx_cases, oracle, tolerance
from attn_spec.conventions import Meaning
from attn_spec.engine import Subject
from attn_spec.invariants.conformance import onnx_conformance
from attn_spec.onnx_cases import OnnxCase, OnnxMissing
from attn_spec.problem import Problem

pytest_plugins = ["pytester"]

try:
    onnx_cases.require()
except OnnxMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

CASES = onnx_cases.cases()
every = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])

# what onnx stores against the text of its own standard: the case, which of its outputs, and why
DISAGREEMENTS: dict[tuple[str, str], str] = {}


def off(case: OnnxCase) -> dict[str, tolerance.Worst]:
    """How far each stored output of a case is from ours, in units of its bound."""
    steps = blocks.run(case.arguments.double(), case.meaning)
    found = {
        "Y": tolerance.worst(case.output, case.answer.output, case.bound),
        "Y of the blocks": tolerance.worst(case.output, steps.output, case.bound),
    }
    if case.intermediate is not None:
        value, bound = onnx_cases.intermediate(steps, case.mode, case.precision)
        bound = bound + onnx_cases.half_ulp(case.intermediate)
        found["qk_matmul_output"] = tolerance.worst(case.intermediate, value, bound)
    if case.present is not None:
        for name, got, stored in zip(("key", "value"), (case.k, case.v), case.present, strict=True):
            found[f"present_{name}"] = tolerance.worst(got, stored.double(), torch.zeros(stored.shape))
    return found


@every
def test_what_onnx_stores_is_reproduced(case: OnnxCase) -> None:
    beyond = {name: worst for name, worst in off(case).items() if not worst.holds}
    assert set(beyond) == {name for of, name in DISAGREEMENTS if of == case.name}, beyond


def test_every_kind_of_case_is_there() -> None:
    kinds = Counter(kind for case in CASES for kind in case.kinds)
    assert len(CASES) >= 93
    outputs = {f"qk output: {mode}" for mode in onnx_cases.MODES}
    assert set(kinds) >= {"3-D", "4-D", "groups", "cache", "lengths", "window", "softcap", "bfloat16", *outputs}
    assert sum(case.has_empty_rows for case in CASES) >= 8
    assert sum(not case.alignments for case in CASES if case.causal or case.window) >= 10


@pytest.mark.parametrize(
    "changes",
    [
        {"alignment": "bottom-right"},
        {"window_alignment": "bottom-right"},
        {"softcap_order": "after-bias"},
        {"grouping": "tiled"},
        {"scale": "1"},
        {"empty_rows": "mean"},
        {"empty_rows": "nan"},
    ],
    ids=str,
)
def test_another_convention_is_told_apart(changes: dict[str, Any]) -> None:
    """Where the oracle is given a convention that is not ONNX's, a stored output is beyond its bound."""

    def told(case: OnnxCase) -> bool:
        meaning = dataclasses.replace(case.meaning, **changes)
        answer = oracle.answer(case.arguments, meaning, case.precision)
        return not tolerance.worst(case.output, answer.output, case.bound).holds

    assert any(told(case) for case in CASES)


@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
@pytest.mark.parametrize("flag", [True, False])
def test_a_case_means_the_same_however_it_is_asked(alignment: Any, flag: bool) -> None:
    """Another alignment, causality in the mask, a scale of one: the answer is the same, bit for bit in float64."""
    other = Meaning(alignment=alignment, window_alignment=alignment, scale="1")
    for case in CASES:
        asked = case.asked(other, flag=flag)
        torch.testing.assert_close(
            oracle.answer(asked, other, case.precision).output, case.answer.output, rtol=1e-12, atol=1e-15
        )


# the law -------------------------------------------------------------------------------------------------------------


def right(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    logits = (q.float() @ k.float().mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.float()
    if is_causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return (logits.softmax(-1).nan_to_num(0.0) @ v.float()).to(q.dtype)


def outcomes(implementation: Implementation) -> Counter[str]:
    subject = Subject(implementation)
    return Counter(subject.judge(onnx_conformance, problem).outcome for problem in onnx_cases.problems())


def test_a_right_implementation_holds_on_what_it_can_be_asked() -> None:
    found = outcomes(adapt(right, declared={"empty_rows": "zero"}))
    assert set(found) == {"passed", "unsupported"}
    asked = [case for case in CASES if case.softcap is None and (case.window is None or not case.alignments)]
    assert found["passed"] == len(asked)


def test_the_law_fails_where_an_implementation_is_wrong() -> None:
    def wrong(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return right(q, k, v, mask, is_causal, scale=0.9 * q.shape[-1] ** -0.5)

    subject = Subject(adapt(wrong, declared={"empty_rows": "zero"}))
    results = [subject.judge(onnx_conformance, problem) for problem in onnx_cases.problems()]
    failed = [result for result in results if result.outcome == "failed"]
    assert len(failed) > 50
    assert failed[0].message.startswith(f"{failed[0].evidence['onnx_case']}: output[")
    script = failed[0].reproducer.replace("impl = ...  # your function", "")
    with pytest.raises(AssertionError, match="and ONNX stores"):
        exec(script, {"impl": wrong})
    exec(script, {"impl": right})


def test_it_says_what_cannot_be_asked() -> None:
    def always(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q, k, v, is_causal=True)

    judged = {
        "rows with no visible key are nan": adapt(right, declared={"empty_rows": "nan"}),
        "no softcap parameter": adapt(right),
        "is always causal": adapt(always, declared={"causal": "always", "alignment": "top-left"}),
        "another alignment than this case": adapt(always, declared={"causal": "always", "alignment": "bottom-right"}),
    }
    for reason, implementation in judged.items():
        subject = Subject(implementation)
        results = [subject.judge(onnx_conformance, problem) for problem in onnx_cases.problems()]
        said = {result.message for result in results if result.outcome == "unsupported"}
        assert any(reason in message for message in said), (reason, said)
    result = Subject(adapt(F.scaled_dot_product_attention)).judge(onnx_conformance, Problem())
    assert (result.outcome, result.message) == ("unsupported", "not a case of ONNX")


def test_a_problem_is_data_of_the_same_kind() -> None:
    for problem in onnx_cases.problems():
        plain = Problem.from_dict(problem.to_dict())
        a, b = problem.arguments(), plain.arguments()
        assert (a.sizes, a.dtype, a.softcap, a.window is None) == (b.sizes, b.dtype, b.softcap, b.window is None)
    assert len({str(problem) for problem in onnx_cases.problems()}) == len(CASES)
    assert not onnx_cases.problems()[0].replace(q_len=5).unchanged
    assert onnx_cases.problems()[0].replace(device="cuda", seed=7).unchanged
    with pytest.raises(KeyError, match="no such case"):
        onnx_cases.named("5d")


def test_without_onnx_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> str:
        raise onnx_cases.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(onnx_cases.metadata, "version", gone)
    with pytest.raises(OnnxMissing, match=r"pip install 'attn-spec\[onnx\]'"):
        onnx_cases.require()
    monkeypatch.setattr(onnx_cases.metadata, "version", lambda name: "1.22.0")
    with pytest.raises(OnnxMissing, match=r"onnx 1\.22\.0 has other cases, 1\.23 is needed"):
        onnx_cases.require()


# the suite -----------------------------------------------------------------------------------------------------------

RIGHT = """
import torch.nn.functional as F

def attn(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    return F.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
"""
HERE = ("--attn-timeout=0", "--attn-suite=onnx")


def test_the_suite_is_run_where_it_is_asked_for(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(right=RIGHT, wrong=RIGHT.replace("scale=scale", "scale=scale or 0.3"))
    right_ = pytester.runpytest_inprocess("--attn-impl=right.attn", *HERE)
    assert right_.ret == 0
    right_.stdout.fnmatch_lines(["*78 of 93 checks ran: 15 not supported (no softcap parameter, no window parameter)*"])
    wrong = pytester.runpytest_inprocess("--attn-impl=wrong.attn", *HERE)
    assert wrong.ret == 1
    wrong.stdout.fnmatch_lines(
        ["ATN820 onnx-conformance: *", "*again: pytest * --attn-suite=onnx '*::test_onnx[[]attn-*"]
    )
    one = "attn_spec/suites/onnx/test_onnx.py::test_onnx[attn-4d]"
    pytester.runpytest_inprocess("--attn-impl=wrong.attn", *HERE, one).assert_outcomes(failed=1)
    ordinary = pytester.runpytest_inprocess("--attn-impl=right.attn", "--attn-timeout=0", "--collect-only", "-q")
    assert "onnx" not in ordinary.stdout.str()


def test_a_suite_that_cannot_be_run_is_a_usage_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(right=RIGHT)
    for options, said in (
        (("--attn-impl=right.attn", "--attn-suite=onn"), "*did you mean onnx?*"),
        (("--attn-suite=onnx",), "*--attn-suite: nothing is judged*"),
        (("--attn-impl=right.attn", *HERE, "attn_spec/suites/onnx/test_onn.py"), "*suites/onnx/test_onnx.py?*"),
    ):
        result = pytester.runpytest_inprocess(*options)
        assert result.ret == 4
        result.stderr.fnmatch_lines([said])

    def missing() -> None:
        raise OnnxMissing("onnx is not installed")

    monkeypatch.setattr(onnx_cases, "require", missing)
    result = pytester.runpytest_inprocess("--attn-impl=right.attn", *HERE)
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*onnx is not installed*"])
