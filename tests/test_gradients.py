"""Gradients: the backward blocks against autograd, the laws against functions with one wrong gradient each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import adapt, blocks, check_attention, oracle
from attn_spec.adapters.apart import Apart
from attn_spec.backward import Cotangents
from attn_spec.choice.variants import variant_problems
from attn_spec.conventions import Meaning
from attn_spec.engine import Policy, Subject
from attn_spec.invariants.differentiation import cotangents_for, differentiate, names_of, precision_of
from attn_spec.law import LAWS, Unsupported
from attn_spec.masks import Bias, Causal, Delivery, Visible
from attn_spec.problem import Problem
from attn_spec.suites import all_tests
from attn_spec.tolerance import candidates

torch.set_num_threads(1)
BOTTOM = Meaning(alignment="bottom-right", window_alignment="bottom-right")
PROBLEMS = [
    Problem(),
    Problem(heads=4, mask=(Causal(),)),
    Problem(mask=(Bias("HQK"),), delivery=Delivery("additive"), softcap=2.0, scale=0.4),
    Problem(sinks=True, mask=(Visible("BQK"),), kv_len=9, v_dim=5),
    *variant_problems()[::4],
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("order", ["first", "after-bias"])
def test_the_backward_blocks_are_what_autograd_gives(problem: Problem, order: Any) -> None:
    meaning = Meaning(**{**vars(BOTTOM), "softcap_order": order})
    arguments = problem.replace(dtype="float64").arguments(meaning.alignment).double()
    names = names_of(arguments)
    fields = [{"bias": "mask"}.get(name, name) for name in names]
    leaves = [getattr(arguments, field).clone().requires_grad_() for field in fields]
    trace = blocks.run(arguments.replace(**dict(zip(fields, leaves, strict=True))), meaning)
    assert bool((trace.lse > -torch.inf).all()) or problem.kv_len < problem.q_len
    if bool((trace.lse == -torch.inf).any()):
        return
    given = cotangents_for(problem.replace(dtype="float64"), lse=True)
    assert given.lse is not None
    expected = torch.autograd.grad([trace.output, trace.lse], leaves, [given.output, given.lse.double()])
    found = oracle.derivative(arguments, meaning, candidates("float64")[0], given)
    for name, gradient in zip(names, expected, strict=True):
        assert found.compare(name, gradient).ratio < 0.5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("values", ["sharp", "mild"])
def test_honest_is_within_and_wrong_is_far_beyond(dtype: str, values: str) -> None:
    problem = Problem(q_len=33, kv_len=33, head_dim=16, v_dim=16, dtype=dtype, values=values)
    arguments, given = problem.arguments(), cotangents_for(problem)
    sdpa = adapt(F.scaled_dot_product_attention)
    grads, _ = differentiate(sdpa, arguments, given)
    right = oracle.derivative(arguments, Meaning(), precision_of(sdpa, dtype), given)
    for name, got in zip("qkv", grads, strict=True):
        assert 1e-4 < right.compare(name, got).ratio < 0.95
        assert right.compare(name, 1.2 * got.double()).ratio > 5
        assert right.compare(name, torch.zeros_like(got)).ratio > 30


# each law, broken by a function of its own ---------------------------------------------------------------------------


class Wrong(torch.autograd.Function):
    """The right output; the gradients go through `change`."""

    @staticmethod
    def forward(ctx: Any, change: Callable[..., Any], causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.change, ctx.causal = change, causal
        ctx.save_for_backward(q, k, v)
        return right(q, k, v, causal)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            out = right(q, k, v, ctx.causal)
            dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
        return None, None, *ctx.change(dq, dk, dv)


def right(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2]), -torch.inf)
    p = torch.where(s.isneginf().all(-1, keepdim=True), 0.0, s).softmax(-1)
    return p.masked_fill(s.isneginf(), 0.0) @ v


def wrong(change: Callable[..., Any]) -> Callable[..., Any]:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Any:
        return Wrong.apply(change, causal, q, k, v)

    return attention


def nan_rows(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    s = (
        (q @ k.mT * q.shape[-1] ** -0.5)
        if attn_mask is None
        else (q @ k.mT * q.shape[-1] ** -0.5) + torch.zeros((), dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    )
    return s.softmax(-1).nan_to_num() @ v


class Once(torch.autograd.Function):
    """A gradient that is cut: twice differentiated it is zero."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return right(q, k, v)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            grads = torch.autograd.grad(right(*leaves), leaves, do.detach())
        return tuple(g + 0 * sum(x.sum() for x in ctx.saved_tensors) for g in grads)


def cut(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return Once.apply(q, k, v)


def only_together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return right(q, k, v if q.requires_grad else v.detach() + 0 * v)


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("ATN901", wrong(lambda dq, dk, dv: (2 * dq, dk, dv))),
        ("ATN902", wrong(lambda dq, dk, dv: (dq, dk.roll(1, 2), dv))),
        ("ATN903", wrong(lambda dq, dk, dv: (dq, dk, 0 * dv))),
        ("ATN907", wrong(lambda dq, dk, dv: (dq, 1.01 * dk, dv))),
        ("ATN908", nan_rows),
        ("ATN910", wrong(lambda dq, dk, dv: (dq, dk, -dv))),
        ("ATN911", wrong(lambda dq, dk, dv: (dq.flip(2), dk, dv))),
        ("ATN912", cut),
        ("ATN913", only_together),
    ],
)
def test_the_law_is_broken_by_its_fault(code: str, function: Callable[..., Any]) -> None:
    subject = Subject(adapt(function), Policy(strict=True))
    for _, name, test in all_tests():
        if test.law.code == code:
            outcomes = [test.judge(subject, problem, name).outcome for problem in test.problems("quick")]
            assert "error" not in outcomes
            if "failed" in outcomes:
                return
    pytest.fail(f"{code} {LAWS[code].name} leaves {function} alone")


def test_what_carries_no_gradient_is_not_asked() -> None:
    def detached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q, k, v).detach()

    report = check_attention(detached, laws=[f"ATN9{n:02}" for n in range(1, 14)] + ["ATN101"])
    assert report.passed
    assert {r.outcome for r in report.results if r.code.startswith("ATN9")} == {"unsupported"}


def test_a_wrong_gradient_is_diagnosed_and_shown_in_plain_torch() -> None:
    report = check_attention(wrong(lambda dq, dk, dv: (dq, dk * dk.shape[-1] ** -0.5, dv)))
    text = str(report)
    assert "key-gradient-scaled-twice" in text
    assert "torch.autograd.grad(" in text
    assert not report.passed


# in a process of its own ---------------------------------------------------------------------------------------------


def test_gradients_come_over_of_every_output_and_twice(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two_outputs.py").write_text(
        "import torch\n"
        "def attention(q, k, v, return_lse=False):\n"
        "    s = q @ k.mT * q.shape[-1] ** -0.5\n"
        "    out = s.softmax(-1) @ v\n"
        "    return (out, torch.logsumexp(s, -1), torch.arange(3)) if return_lse else out\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import two_outputs  # type: ignore[import-not-found]

    there = Apart("two_outputs.attention", two_outputs.attention, 60.0)
    a = Problem(dtype="float64").arguments()
    given = cotangents_for(Problem(dtype="float64"), lse=True)
    found = []
    for function in (there, two_outputs.attention):
        leaves = [x.clone().requires_grad_() for x in (a.q, a.k, a.v)]
        out, lse, numbers = function(*leaves, return_lse=True)
        assert numbers.tolist() == [0, 1, 2]
        assert not numbers.requires_grad
        grads = torch.autograd.grad([out, lse], leaves, [given.output, given.lse], create_graph=True)
        (alone,) = torch.autograd.grad(lse, leaves[:1], given.lse, retain_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
        found.append((*grads, alone, *second))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    there.close()


def test_a_log_sum_exp_without_gradient_is_unsupported() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
        s = q @ k.mT * q.shape[-1] ** -0.5
        return (s.softmax(-1) @ v, torch.logsumexp(s, -1).detach()) if return_lse else s.softmax(-1) @ v

    problem = Problem()
    with pytest.raises(Unsupported, match="log-sum-exp carries no gradient"):
        differentiate(adapt(attention), problem.arguments(), cotangents_for(problem, lse=True))
    assert isinstance(cotangents_for(problem), Cotangents)
