"""Contenders: whatever a function looks like its timed outputs are verified, and measurements that lie are refused."""

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.apart import Apart
from attn_spec.adapters.implementation import Implementation
from attn_spec.benchmark.calls import in_this_process
from attn_spec.benchmark.clock import CpuClock, Distrusted
from attn_spec.benchmark.contenders import Stage, asked_for, same_work
from attn_spec.benchmark.paired import PASS, Plan, compare
from attn_spec.benchmark.roofline import Ceilings, require_possible
from attn_spec.benchmark.work import work
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.masks import Causal, KeyPadding
from attn_spec.problem import Problem

PROBLEM = Problem(batch=2, heads=4, kv_heads=4, q_len=48, kv_len=48, head_dim=16, v_dim=16, values="mild")
CAUSAL = PROBLEM.replace(mask=(Causal(),))
PLAN = Plan(limit=100.0, looks=(11,), warm_up_s=0.0)


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def bshd(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def nsd(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def matrices(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.dim() == 2
    return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask)


@functools.cache
def adapted(function: Callable[..., Any]) -> Implementation:
    return adapt(function)


def timed(
    function: Callable[..., Any],
    problem: Problem = PROBLEM,
    direction: str = "forward",
    baseline: Callable[..., Any] = sdpa,
) -> None:
    """A whole comparison on these inputs."""
    stage = Stage(problem, direction)
    pair = [stage.contender(adapted(one)) for one in (function, baseline)]
    with torch.set_grad_enabled(direction != "forward"):
        found = compare(CpuClock(), *pair, PLAN)
    assert found.verdict() == PASS
    assert all(one.checked >= 11 for one in pair), "every timed output is looked at"


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
@pytest.mark.parametrize(
    "function, problem",
    [(sdpa, CAUSAL), (bshd, CAUSAL), (masked, CAUSAL), (nsd, PROBLEM), (sdpa, PROBLEM.replace(kv_heads=2))],
    ids=["flag", "bshd", "in-mask", "nsd", "grouped"],
)
def test_functions_of_every_form_are_timed_and_verified(
    function: Callable[..., Any], problem: Problem, direction: str
) -> None:
    timed(function, problem, direction)


def test_a_function_of_matrices_is_timed_over_all_heads_and_forward_only() -> None:
    timed(matrices, PROBLEM.replace(batch=1))
    with pytest.raises(Unsupported, match="not timed backward"):
        Stage(PROBLEM, "backward").contender(adapt(matrices))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    timed(sdpa, CAUSAL.replace(dtype=dtype), "both")


def test_padding_and_rows_that_are_few_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_spec.benchmark.expected.ROW_LOGITS", 4000)
    problem = PROBLEM.replace(mask=(Causal(), KeyPadding((48, 30))))
    stage = Stage(problem, "forward")
    assert all(len(rows) == 10 for rows in stage.rows)
    assert len({tuple(rows.tolist()) for rows in stage.rows}) > 1

    def with_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        past = (
            torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            if is_causal
            else torch.ones(1, 1, dtype=torch.bool)
        )
        return F.scaled_dot_product_attention(q, k, v, past if mask is None else mask & past)

    timed(with_mask, problem, baseline=with_mask)


def test_the_timed_call_is_the_function_alone() -> None:
    seen = []

    def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q.shape, q.is_contiguous()))
        return bshd(q, k, v)

    contender = Stage(PROBLEM, "forward").contender(adapt(watched, declared={"layout": "BSHD"}))
    calls = contender.calls(1)
    before = len(seen)
    contender.verify([call() for call in calls])
    assert seen[before:] == [((2, 48, 4, 16), True)], "one call, on what it takes"


def test_inputs_are_rotated_and_v_changes_its_sign() -> None:
    got = []

    def watched(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        got.append((q.data_ptr(), float(v.flatten()[0])))
        return sdpa(q, k, v)

    contender = Stage(PROBLEM, "forward").contender(adapt(watched))
    got.clear()
    for _ in range(6):
        contender.verify([call() for call in contender.calls(1)])
    warm, timed_ = got[::2], got[1::2]
    assert [pointer for pointer, _ in warm] == [pointer for pointer, _ in timed_]
    assert len({pointer for pointer, _ in timed_}) == 3
    assert [b for _, b in timed_] == [-a for _, a in warm]
    assert [b for _, b in timed_[3:]] == [-a for _, a in timed_[:3]]


# what is refused -----------------------------------------------------------------------------------------------------


class LazyThread:
    """Returns at once, and lets a thread fill in the output a little later."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.late = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self.late:
            return sdpa(q, k, v)
        out = torch.zeros_like(q)

        def work_on() -> None:
            time.sleep(0.02)
            out.copy_(sdpa(q, k, v))

        self.threads.append(threading.Thread(target=work_on))
        self.threads[-1].start()
        return out


def test_what_returns_before_its_work_is_done_is_refused() -> None:
    lazy = LazyThread()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lazy(q, k, v)

    implementation = adapt(attention)
    lazy.late = True
    contender = Stage(PROBLEM, "forward").contender(implementation)
    with pytest.raises(Distrusted, match="attention: returned before its work was done"):
        compare(CpuClock(), contender, contender, PLAN)
    for thread in lazy.threads:
        thread.join()


def test_an_output_that_changes_after_the_clock_has_stopped_is_refused() -> None:
    contender = Stage(PROBLEM, "forward").contender(adapted(sdpa))
    outputs = [call() for call in contender.calls(1)]
    contender.verify(outputs)
    outputs[0].add_(1e-4)
    with pytest.raises(Distrusted, match="its output changed after the clock had stopped"):
        contender.calls(1)


def test_what_is_right_only_while_it_is_not_timed_is_refused() -> None:
    made = 0

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal made
        made += q.shape[2] == 48
        return sdpa(q, k, v) if made < 9 else torch.zeros_like(q)

    stage = Stage(PROBLEM, "forward")
    with pytest.raises(Distrusted, match="attention: the output of a timed call is wrong"):
        compare(CpuClock(), stage.contender(adapt(attention)), stage.contender(adapted(sdpa)), PLAN)


def test_what_replays_by_pointer_is_refused() -> None:
    kept: dict[int, Tensor] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] != 48:
            return sdpa(q, k, v)
        if q.data_ptr() not in kept:
            kept[q.data_ptr()] = sdpa(q, k, v)
        return kept[q.data_ptr()]

    stage = Stage(PROBLEM, "forward")
    with pytest.raises(Distrusted, match="the output of .* call is wrong"):
        compare(CpuClock(), stage.contender(adapt(attention)), stage.contender(adapted(sdpa)), PLAN)


def test_what_is_faster_than_possible_is_refused() -> None:
    ceilings = Ceilings(1e11, 2e10, 1e11)
    large = PROBLEM.replace(q_len=2048, kv_len=2048)
    with pytest.raises(Distrusted, match="cheat: 0.01 ms is faster than possible"):
        require_possible(ceilings, work(large), 1e-5, "cheat")


def test_wrong_numbers_have_no_speed() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v) * 1.0001

    contender = Stage(PROBLEM, "forward").contender(adapt(attention))
    with pytest.raises(Distrusted, match="attention: the output of the first call is wrong"):
        compare(CpuClock(), contender, contender, PLAN)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_wrong_gradient_has_no_speed(name: str) -> None:
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 1.01

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = {"q": q, "k": k, "v": v}
        given[name] = Off.apply(given[name])
        return sdpa(**given)

    contender = Stage(PROBLEM, "both").contender(adapt(attention))
    with torch.enable_grad(), pytest.raises(Distrusted, match=f"attention: the gradient of {name} is wrong"):
        compare(CpuClock(), contender, contender, PLAN)


def test_a_tensor_that_computes_itself_later_is_refused() -> None:
    class Later(Tensor):
        pass

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v).as_subclass(Later) if q.shape[2] == 48 else sdpa(q, k, v)

    contender = Stage(PROBLEM, "forward").contender(adapt(attention))
    with pytest.raises(Distrusted, match="returned a Later, which may be computed later"):
        compare(CpuClock(), contender, contender, PLAN)


def test_more_threads_than_the_others_have_are_refused() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.set_num_threads(2)
        return sdpa(q, k, v)

    contender = Stage(PROBLEM, "forward").contender(adapt(attention))
    with pytest.raises(Distrusted, match="changed the number of threads"):
        compare(CpuClock(), contender, contender, PLAN)
    assert torch.get_num_threads() == 1


def test_what_it_does_not_take_is_refused_before_anything_is_timed() -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v)

    def picky(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[1] != k.shape[1]:
            raise NotImplementedError("no grouped heads")
        return sdpa(q, k, v)

    with pytest.raises(Unsupported, match="no causal parameter"):
        Stage(CAUSAL, "forward").contender(adapt(plain))
    with pytest.raises(Refused, match="no grouped heads"):
        Stage(PROBLEM.replace(kv_heads=1), "forward").contender(adapt(picky))


def test_a_function_that_returns_more_than_its_output() -> None:
    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return sdpa(q, k, v), torch.zeros(q.shape[:3])

    timed(with_lse, PROBLEM, "both")


def test_exit_from_inside_is_not_the_end_of_the_run() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[2] == 48:
            raise SystemExit(0)
        return sdpa(q, k, v)

    with pytest.raises(Violation, match=r"called sys\.exit\(0\)"):
        Stage(PROBLEM, "forward").contender(adapt(attention))


# what is compared ----------------------------------------------------------------------------------------------------


def test_causality_goes_in_by_the_flag_else_inside_the_mask() -> None:
    assert asked_for(adapted(sdpa), CAUSAL).causal_by_flag
    in_mask = asked_for(adapted(masked), CAUSAL)
    assert in_mask.masked
    assert not in_mask.causal_by_flag


def test_implementations_that_mean_different_things_are_not_compared() -> None:
    one, other = adapted(sdpa), adapted(bshd)
    unequal = CAUSAL.replace(q_len=20)
    assert same_work(one, other, CAUSAL) == ""
    assert "aligned to the top-left in sdpa and to the bottom-right in bshd" in same_work(one, other, unequal)

    def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, is_causal=True)

    assert same_work(one, adapt(causal_attention), PROBLEM) == "one of them is causal always"


def test_a_function_in_a_process_of_its_own_is_timed_in_this_one() -> None:
    apart = Apart("torch.nn.functional.scaled_dot_product_attention", F.scaled_dot_product_attention, 60.0)
    implementation = adapt(sdpa)
    implementation.adapter.function = apart
    here = in_this_process(implementation)
    assert here.adapter.function is F.scaled_dot_product_attention
    assert implementation.adapter.function is apart
    assert in_this_process(adapted(sdpa)).adapter.function is sdpa
