"""Laws that few faults of the catalogue break: each is broken here by a function of its own; honest ones hold them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import check_attention
from attn_spec.adapters.adapt import adapt
from attn_spec.engine import Policy, Subject
from attn_spec.law import LAWS, law
from attn_spec.reference.fused.tiled import tiled
from attn_spec.suites import all_tests


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None = None, low: float = -torch.inf) -> Tensor:
    s = q @ k.mT * q.shape[-1] ** -0.5
    return (s if mask is None else s.masked_fill(~mask, low)).softmax(-1)


def averaged(q: Tensor, k: Tensor, v: Tensor, need_weights: bool = False) -> Any:
    p = weights_of(q, k)
    return (p @ v, p.mean(1)) if need_weights else p @ v


def before_the_mask(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, need_weights: bool = False
) -> Any:
    p = weights_of(q, k, attn_mask).nan_to_num()
    return (p @ v, weights_of(q, k)) if need_weights else p @ v


def half_kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights_of(q.float(), k.float()) @ v.float()


def clamped_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights_of(q, k) @ v.clamp(-4, 4)


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = weights_of(q, k)
    return (1.5 * p - 0.5 / p.shape[-1]) @ v


def shallow_fill(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    p = weights_of(q, k, attn_mask, -1e4)
    return (p if attn_mask is None else p * attn_mask.any(-1, keepdim=True)) @ v


def leaks_nan(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return weights_of(q, k, attn_mask).nan_to_num() @ v


def rounds_heads_down(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = max(q.shape[1] // k.shape[1], 1)
    heads = group * k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return F.pad(weights_of(q[:, :heads], k) @ v, (0, 0, 0, 0, 0, q.shape[1] - heads))


def overflows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights_of(q, k) @ v


def unwritten(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    p = weights_of(q, k, attn_mask)
    written = ~p.isnan().any(-1)
    out[written] = (p @ v)[written]
    return out


def aliases(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.expand(*q.shape[:3], -1) if k.shape[2] == 1 and q.shape[1] == k.shape[1] else weights_of(q, k) @ v


OWN = torch.Generator()  # the global generator is put back after each call; this one is not


def noisy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights_of(q, k) @ v * (1 + 0.1 * torch.rand((), generator=OWN).to(q.dtype))


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("ATN102", half_kept),
        ("ATN104", averaged),
        ("ATN202", negative),
        ("ATN204", clamped_values),
        ("ATN211", before_the_mask),
        ("ATN509", leaks_nan),
        ("ATN519", shallow_fill),
        ("ATN606", rounds_heads_down),
        ("ATN806", overflows),
        ("ATN1206", noisy),
        ("ATN1208", unwritten),
        ("ATN1210", aliases),
    ],
)
def test_the_law_is_broken_by_its_fault(code: str, function: Callable[..., Any]) -> None:
    subject = Subject(adapt(function), Policy(strict=True))
    for _, name, test in all_tests():
        if test.law.code == code:
            outcomes = {test.judge(subject, problem, name).outcome for problem in test.problems("quick")}
            assert "error" not in outcomes
            if "failed" in outcomes:
                return
    pytest.fail(f"{code} {LAWS[code].name} leaves {function.__name__} alone")


def honest_weights(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, need_weights: bool = False) -> Any:
    p = weights_of(q.float(), k.float(), attn_mask).nan_to_num()
    p = p.to(q.dtype) if q.dtype != torch.float64 else weights_of(q, k, attn_mask).nan_to_num()
    return (p @ v, p) if need_weights else p @ v


def honest_eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, need_weights: bool = False) -> Any:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if is_causal else None
    p = weights_of(q, k, seen)
    return (p @ v, p) if need_weights else p @ v


def honest_pair(query: Tensor, key: Tensor, value: Tensor, return_weights: bool = False) -> tuple[Tensor, Tensor]:
    p = F.softmax(torch.einsum("bhid,bhjd->bhij", query, key) / query.shape[-1] ** 0.5, dim=-1)
    return torch.einsum("bhij,bhjd->bhid", p, value), p


@pytest.mark.parametrize("function", [honest_weights, honest_eager, honest_pair, tiled])
def test_honest_functions_hold_them(function: Callable[..., Any]) -> None:
    report = check_attention(function)
    assert report.passed, str(report)


# operators -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("attn_spec_tests::right", mutates_args=())
def right_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights_of(q, k) @ v


@right_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


@torch.library.custom_op("attn_spec_tests::wrong_fake", mutates_args=())
def wrong_operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights_of(q, k) @ v


@wrong_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[-1], q.shape[2])


@pytest.mark.parametrize(("name", "outcome"), [("right", "passed"), ("wrong_fake", "failed")])
def test_a_registered_operator_is_checked_for_its_registration(name: str, outcome: str) -> None:
    operator = getattr(torch.ops.attn_spec_tests, name)
    report = check_attention(operator, name=name, laws=["ATN1209", "ATN103"])
    by_code = {result.code: result for result in report.results if result.outcome != "unsupported"}
    assert by_code["ATN1209"].outcome == outcome, by_code["ATN1209"].message
    assert by_code["ATN103"].outcome == "passed"


def test_a_code_is_taken_once_but_a_module_may_be_imported_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(LAWS)
    monkeypatch.setattr("attn_spec.law.LAWS", known)
    first = known["ATN301"]
    again = law(first.code, first.name, first.title)(first.function)
    assert known["ATN301"] is again
    with pytest.raises(ValueError, match="ATN301 default-scale is taken"):
        law("ATN301", "default-scale", "Another")(lambda implementation, problem: None)
