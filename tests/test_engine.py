"""Outcomes: what passes, fails, is refused, unsupported or known; policy, ledger, conventions; laws by their faults."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import check_attention
from attn_spec.adapters.adapt import adapt
from attn_spec.engine import CheckResult, KnownFailure, Policy, Subject, optional_axes, stale
from attn_spec.invariants import execution, heads, masking, scaling, shapes
from attn_spec.law import LAWS
from attn_spec.masks import Causal, Delivery, Visible
from attn_spec.plugin import SUITES
from attn_spec.problem import Problem
from attn_spec.suites import all_tests

BASE = Problem(q_len=128, kv_len=128, head_dim=64, v_dim=64)


def right(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, enable_gqa=True)


def judged(function: Callable[..., Any], law: Any, problem: Problem, **policy: Any) -> CheckResult:
    return Subject(adapt(function), Policy(**policy)).judge(law, problem)


def test_every_law_is_tried_and_has_a_test() -> None:
    tried = {test.law.code for suite in ("", *SUITES) for _, _, test in all_tests(suite)}
    assert tried == set(LAWS)
    names = [(module, name) for module, name, _ in all_tests()]
    assert len(names) == len(set(names))
    problems = [f"{name}-{problem}" for _, name, test in all_tests() for problem in test.problems("quick")]
    assert len(problems) == len(set(problems)), "node ids must differ"


def test_every_law_is_documented() -> None:
    for law in LAWS.values():
        assert "Why:" in law.doc, law.code
        assert "Example:" in law.doc, law.code


def test_refusal_of_an_optional_axis_is_not_red() -> None:
    def picky(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] != k.shape[1]:
            raise ValueError("grouped heads are not supported")
        return right(q, k, v)

    problem = Problem(heads=4, kv_heads=2)
    result = judged(picky, heads.multi_query, problem)
    assert result.outcome == "refused"
    assert "gqa" in result.message
    assert "not supported" in result.message
    assert judged(picky, heads.multi_query, problem, require=("gqa",)).outcome == "failed"


def test_raising_on_a_base_problem_is_red() -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise ValueError("not today")

    assert optional_axes(BASE) == []
    result = judged(broken, shapes.base_problems, BASE)
    assert result.outcome == "failed"
    assert "not today" in result.message


def test_a_crash_is_no_refusal() -> None:
    def crashes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] % 2:
            raise AttributeError("'NoneType' object has no attribute 'shape'")
        return right(q, k, v)

    assert judged(crashes, shapes.edge_sizes, Problem(q_len=7, kv_len=7)).outcome == "failed"


def test_a_combination_of_axes_each_taken_alone_is_no_refusal() -> None:
    def fragile(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None and q.shape[1] != k.shape[1]:
            raise RuntimeError("shape '[2, 4]' is invalid for input of size 3")
        return right(q, k, v, attn_mask)

    mask = {"mask": (Visible("BHQK"),), "delivery": Delivery("additive", "BHQK")}
    result = judged(fragile, heads.grouped_with_features, Problem(heads=4, kv_heads=2, **mask))  # type: ignore[arg-type]
    assert result.outcome == "failed"
    assert "alone" in result.message


def test_unsupported_and_required() -> None:
    problem = Problem(mask=(Causal(),))
    assert judged(lambda q, k, v: right(q, k, v), shapes.edge_sizes, problem).message == "no causal parameter"
    assert judged(lambda q, k, v: right(q, k, v), shapes.edge_sizes, problem).outcome == "unsupported"
    assert judged(lambda q, k, v: right(q, k, v), shapes.edge_sizes, problem, require=("causal",)).outcome == "failed"


def test_ledger_and_stale_entries() -> None:
    def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=1.0)

    problem = Problem(q_len=4, kv_len=4)
    entry = KnownFailure("default-scale", "a study of sharp softmaxes", str(problem), "https://example.org/1")
    result = judged(unscaled, scaling.default_scale, problem, known_failures=(entry,))
    assert result.outcome == "known-failure"
    assert "a study of sharp softmaxes (https://example.org/1)" in result.message
    healed = judged(right, scaling.default_scale, problem, known_failures=(entry,))
    assert healed.outcome == "failed"
    assert "it holds" in healed.message
    subject = Subject(adapt(right), Policy(known_failures=(KnownFailure("ATN301", "why", "B9-*"),)))
    subject.judge(scaling.default_scale, problem)
    assert stale(subject.policy, subject.results) == list(subject.policy.known_failures)


def test_advisory_laws_are_red_when_strict() -> None:
    def lax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q, k[:, :, : v.shape[2]], v[:, :, : k.shape[2]])

    problem = Problem(q_len=5)
    assert judged(lax, shapes.mismatched_sizes, problem).outcome == "known-failure"
    assert judged(lax, shapes.mismatched_sizes, problem, strict=True).outcome == "failed"


def test_a_convention_of_another_library_is_one_violation_with_the_line_to_declare() -> None:
    def bottom_right(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        return right(query, key, value, seen if is_causal else None)

    report = check_attention(bottom_right)
    [merged] = report.judgement.merged()
    assert merged.first.merge == "convention:alignment"
    assert "`alignment: bottom-right`" in merged.first.hint
    assert check_attention(bottom_right, alignment="bottom-right").passed


def test_causal_always_is_judged_as_causal() -> None:
    def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q, k, v, is_causal=True)

    report = check_attention(causal_attention)
    assert report.passed
    assert report.counts["passed"] > 60

    def encoder(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q, k, v, is_causal=True)

    report = check_attention(encoder)
    assert not report.passed
    assert "causal: always" in str(report)
    assert check_attention(encoder, causal="always").passed


def rude(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    torch.manual_seed(0)
    return right(q, k, v)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q *= 1.0 / q.shape[-1] ** 0.5
    return (q @ k.mT).softmax(-1) @ v


def exits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    raise SystemExit(2)


def flagged(q: Tensor, k: Tensor, v: Tensor, is_casual: bool = False) -> Tensor:
    return right(q, k, v, is_causal=is_casual)


def eats_mask(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    out = right(q, k, v, attn_mask)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask.fill_(True)
    return out


@pytest.mark.parametrize(
    ("function", "law", "problem", "said"),
    [
        (rude, execution.global_state_unchanged, Problem(), "random generator"),
        (in_place, execution.inputs_unchanged, Problem(), "q was modified"),
        (exits, execution.inputs_unchanged, Problem(), "sys.exit"),
        (flagged, execution.parameters_understood, Problem(), "is_casual"),
        (eats_mask, masking.mask_unchanged, Problem(mask=(Visible("BHQK"),)), "mask was modified"),
    ],
)
def test_bad_manners_are_caught(function: Any, law: Any, problem: Problem, said: str) -> None:
    result = judged(function, law, problem)
    assert result.outcome == "failed"
    assert said in result.message


def test_results_travel_as_plain_data() -> None:
    result = judged(in_place, execution.inputs_unchanged, Problem(mask=()))
    again = CheckResult.from_dict(result.to_dict())
    assert again == result
