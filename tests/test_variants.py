"""Windows, caps, slopes, sinks, log-sum-exp: as data, in the oracle, through names, in faults and their diagnosis."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_spec import adapt, check_attention, kills, oracle
from attn_spec.choice import variants as choice
from attn_spec.choice.covering import covered
from attn_spec.choice.matrix import MEANINGS
from attn_spec.conventions import Meaning
from attn_spec.engine import Subject
from attn_spec.faults import CATALOGUE, Fault
from attn_spec.faults.beside import diagnose_beside
from attn_spec.faults.diagnosis import diagnose
from attn_spec.faults.planted import planted
from attn_spec.law import Unsupported
from attn_spec.masks import Alibi, Bias, Causal, Delivery, Documents, KeyPadding, Visible, Window
from attn_spec.problem import Problem
from attn_spec.reference.scratch.variants import variants
from attn_spec.report.reproducer import reproducer
from attn_spec.suites.test_variants import test_variants_together as together
from attn_spec.tolerance import candidates

torch.set_num_threads(1)
BOTTOM = Meaning(alignment="bottom-right", window_alignment="bottom-right")
FINE = candidates("float64")[0]


def by_hand(p: Problem, *, bottom: bool = True) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a problem without a mask tensor, row by row."""
    a = p.arguments().double()
    out, lse = torch.zeros(*p.sizes[:3], p.v_dim).double(), torch.zeros(p.sizes[:3]).double()
    for b in range(p.batch):
        for h in range(p.heads):
            k, v = a.k[b, h // (p.heads // p.kv_heads)], a.v[b, h // (p.heads // p.kv_heads)]
            for i in range(p.q_len):
                at = i + (p.kv_len - p.q_len) * bottom
                terms, rows = [], []
                for j in range(p.kv_len):
                    s = (a.q[b, h, i] @ k[j]) * p.head_dim**-0.5
                    s = p.softcap * torch.tanh(s / p.softcap) if p.softcap else s
                    if a.alibi is not None:
                        s = s - (a.alibi[b, h] if a.alibi.dim() == 2 else a.alibi[h]) * abs(at - j)
                    near = a.window is None or (
                        (a.window[0] is None or j >= at - a.window[0])
                        and (a.window[1] is None or j <= at + a.window[1])
                    )
                    if near and (not a.causal or j <= at):
                        terms.append(s)
                        rows.append(v[j])
                extra = [] if a.sinks is None else [a.sinks[h]]
                lse[b, h, i] = torch.logsumexp(torch.stack(terms + extra), 0) if terms + extra else -torch.inf
                for s, row in zip(terms, rows, strict=True):
                    out[b, h, i] += torch.exp(s - lse[b, h, i]) * row
    return out, lse


CASES = [
    Problem(mask=(Window(2, 1),)),
    Problem(mask=(Window(3, None), Causal()), q_len=3, kv_len=7),
    Problem(mask=(Window(None, 0),), q_len=7, kv_len=4),
    Problem(softcap=2.0, mask=(Causal(), Alibi())),
    Problem(mask=(Alibi(batched=True),), heads=4, q_len=2, kv_len=6),
    Problem(sinks=True, heads=3, kv_heads=3, mask=(Window(1, 1),)),
    Problem(sinks=True, softcap=1.0, mask=(Alibi(), Window(2, None), Causal()), q_len=1, kv_len=6),
]


@pytest.mark.parametrize("problem", CASES, ids=str)
@pytest.mark.parametrize("bottom", [True, False])
def test_the_oracle_is_what_the_definition_says(problem: Problem, bottom: bool) -> None:
    expected, lse = by_hand(problem, bottom=bottom)
    found = oracle.answer(problem.arguments(), BOTTOM if bottom else Meaning(), FINE)
    torch.testing.assert_close(found.output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.lse, lse, rtol=0, atol=1e-12)


@pytest.mark.parametrize("problem", CASES, ids=str)
def test_blocks_of_rows_give_the_whole(problem: Problem) -> None:
    whole, parts = (oracle.answer(problem.arguments(), BOTTOM, FINE, chunk=n) for n in (1 << 17, 8))
    torch.testing.assert_close(parts.output, whole.output, rtol=0, atol=1e-14)
    torch.testing.assert_close(parts.lse, whole.lse, rtol=0, atol=1e-14)
    torch.testing.assert_close(parts.bounds.output, whole.bounds.output)


def test_problems_are_data() -> None:
    for problem in (*CASES, *choice.variant_problems()):
        assert Problem.from_yaml(problem.to_yaml()) == problem
    assert str(CASES[-1]) == "B2-H2-Sq1-Sk6-D8-alibi(H)-window(2,inf)-causal-softcap1-sinks-f32"
    assert not CASES[3].masked
    assert CASES[0].fingerprint() == Problem().fingerprint()  # a window is no tensor
    assert CASES[3].fingerprint() != Problem().fingerprint()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"softcap": 0.0}, "softcap: 0.0 is not positive"),
        ({"mask": (Window(-1, 2),)}, "left: -1 is negative"),
        ({"mask": (Window(1, 2), Window(1, 2))}, "more than one window"),
        ({"mask": (Documents((3, 3)),)}, "does not add up to 7 queries and 7 keys"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem(**fields)


def test_documents() -> None:
    seen = Documents((2, 3), (1, 2)).visible((1, 1, 3, 5), 0, "top-left")[0, 0]
    assert seen.int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]


# through names -------------------------------------------------------------------------------------------------------


def bhsd(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Tensor:
    return variants(*(x.transpose(1, 2) for x in (q, k, v)), **others).transpose(1, 2)  # type: ignore[union-attr]


def counted(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sliding_window: int | None = None) -> Tensor:
    return bhsd(q, k, v, causal=causal, window_size=(-1 if sliding_window is None else sliding_window - 1, -1))


def uncounted(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, sliding_window: int | None = None) -> Tensor:
    return bhsd(q, k, v, causal=causal, window_size=(-1 if sliding_window is None else sliding_window, -1))


def around(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    width = -1 if window is None else window - 1
    return bhsd(q, k, v, window_size=(width, width))


def none_is_unbounded(q: Tensor, k: Tensor, v: Tensor, window_size: Any = (None, None)) -> Tensor:
    left, right = window_size
    return bhsd(q, k, v, window_size=(-1 if left is None else left, -1 if right is None else right))


@pytest.mark.parametrize(
    ("function", "value", "how"),
    [
        (variants, "pair", "measured"),
        (counted, "count", "measured"),
        (around, "count-both", "measured"),
        (none_is_unbounded, "pair", "measured"),
    ],
)
def test_what_a_window_is_said_by(function: Callable[..., Any], value: str, how: str) -> None:
    made = adapt(function)
    assert (made.conventions.window.value, made.conventions.window.how) == (value, how)
    assert not [one for one in made.contradictions if one.field == "window"]
    report = check_attention(function, laws=["ATN701", "ATN702", "ATN705"])
    assert report.passed, str(report)
    assert any(result.outcome == "passed" for result in report.results)


def test_a_number_that_does_not_count_itself_contradicts_its_name() -> None:
    (one,) = adapt(uncounted).contradictions
    assert (one.field, one.expected.value, one.line) == ("window", "count", "window: left")
    assert check_attention(uncounted, window="left", laws=["ATN702"]).passed
    report = check_attention(uncounted, laws=["ATN702", "ATN703"])
    assert not report.passed
    assert "window: left" in str(report)


def test_a_pair_can_not_be_said_by_one_number() -> None:
    made = adapt(counted)
    with pytest.raises(Unsupported, match=r"the window \(3, 1\) can't be said by one number"):
        made(Problem(mask=(Window(3, 1),)).arguments())


def base_two(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, return_lse: bool = False) -> Any:
    out, lse, _ = variants(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, return_attn_probs=True)
    lse = (lse / 0.6931471805599453).masked_fill(lse == -torch.inf, torch.inf)
    return (out.transpose(1, 2), lse.mT.contiguous()) if return_lse else out.transpose(1, 2)


def test_base_and_empty_rows_of_the_log_sum_exp_are_measured() -> None:
    made = adapt(base_two, declared={"lse_layout": "BSH"})
    assert (made.conventions.lse_base.value, made.conventions.lse_empty.value) == ("2", "+inf")
    assert check_attention(base_two, lse_layout="BSH", laws=["ATN741", "ATN742", "ATN743", "ATN744", "ATN906"]).passed
    assert not check_attention(base_two, lse_layout="BSH", lse_base="e", laws=["ATN741"]).passed
    report = check_attention(base_two, laws=["ATN741"])
    assert "declare `lse_layout: BSH`" in " ".join(str(report).split())


def signed(q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    if alibi_slopes is not None:
        ahead = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None]
        s = s + alibi_slopes[..., None, None] * ahead
    s = softcap * torch.tanh(s / softcap) if softcap else s
    return s.softmax(-1).to(v.dtype) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def test_signed_slopes_and_a_late_cap_contradict_their_names() -> None:
    assert "alibi: signed" in {one.line for one in adapt(signed).contradictions}
    (other,) = adapt(signed, declared={"alibi": "signed", "window_alignment": "top-left"}).contradictions
    assert other.line == "softcap_order: after-bias"
    declared = {"alibi": "signed", "softcap_order": "after-bias", "window_alignment": "top-left"}
    assert check_attention(signed, **declared, laws=["ATN711", "ATN712", "ATN721", "ATN722", "ATN781"]).passed


def test_the_eager_function_of_every_variant_passes() -> None:
    report = check_attention(variants)
    assert report.passed, str(report)
    ran = {result.code for result in report.results if result.outcome == "passed"}
    assert {f"ATN7{n:02}" for n in (1, 2, 3, 4, 5, 11, 12, 21, 22, 23, 31, 32, 41, 42, 43, 44, 81)} <= ran
    assert {f"ATN9{n:02}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13)} <= ran


# combinations --------------------------------------------------------------------------------------------------------


def drawn(factors: dict[str, tuple[str, ...]], count: int) -> list[Problem]:
    by = random.Random(3)
    rows = [{name: by.choice(levels) for name, levels in factors.items()} for _ in range(count)]
    return [choice.problem_of(row) for row in rows if choice.applies(row) is not None]


@pytest.mark.parametrize("factors", [choice.SAID_BY_FLASH, choice.EVERYTHING])
def test_every_two_variants_meet(factors: dict[str, tuple[str, ...]]) -> None:
    chosen = choice.variant_problems()
    if factors is choice.SAID_BY_FLASH:  # no pair stands only where a mask or a sink does
        chosen = tuple(p for p in chosen if not p.masked and not p.sinks)
    missing = covered(map(choice.features, drawn(factors, 3000)), 2) - covered(map(choice.features, chosen), 2)
    assert not missing, f"{sorted(missing)[:5]}: run `python benchmarks/choose_variants.py`"
    assert len(chosen) <= 70


def test_every_three_variants_are_in_ci() -> None:
    have = covered(map(choice.features, together.problems("ci")), 3)
    missing = covered(map(choice.features, drawn(choice.EVERYTHING, 600)), 3) - have
    assert len(missing) <= 3, f"{sorted(missing)[:5]}: run `python benchmarks/choose_variants.py`"
    assert together.problems("quick") == list(choice.variant_problems())


# faults --------------------------------------------------------------------------------------------------------------

OF_VARIANTS = [f for f in CATALOGUE.values() if f.theme in ("variants", "gradients")]


def test_there_are_many_and_of_every_kind() -> None:
    assert len(OF_VARIANTS) >= 100
    assert sum(f.shows == "gradients" for f in OF_VARIANTS) >= 40
    assert sum(f.shows == "lse" for f in OF_VARIANTS) >= 8
    assert sum("one-query" in f.id for f in OF_VARIANTS) >= 4
    assert sum("tail" in f.id for f in OF_VARIANTS) >= 6
    assert sum("-with-" in f.id or "-when-" in f.id for f in OF_VARIANTS) >= 10


PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=5, kv_len=5, head_dim=4, v_dim=4)
PROBLEMS = [
    *choice.variant_problems(),
    PLAIN.replace(mask=(Causal(),)),
    PLAIN.replace(mask=(Visible("BHQK"),)),
    PLAIN.replace(mask=(Visible("BHQK", empty_rows=(1,)),)),
    PLAIN.replace(mask=(KeyPadding((5, 3)),), delivery=Delivery("key-padding")),
    PLAIN.replace(heads=6, kv_heads=2, q_len=3),
    PLAIN.replace(q_len=1, kv_len=9, scale=0.3),
    *(PLAIN.replace(mask=(Bias(axes),), delivery=Delivery("additive")) for axes in ("BHQK", "HQK")),
    PLAIN.replace(q_len=18, kv_len=18),
    PLAIN.replace(q_len=70, kv_len=70, batch=1),
    PLAIN.replace(sinks=True),
    PLAIN.replace(softcap=2.0),
    PLAIN.replace(mask=(Window(1, 1),)),
    PLAIN.replace(mask=(Alibi(),)),
]


@pytest.mark.parametrize("fault", OF_VARIANTS, ids=lambda f: f.id)
def test_fault_is_named(fault: Fault) -> None:
    """`test_every_fault_is_killed_on_quick` tells that it is caught."""
    name, problems = diagnose, sorted(PROBLEMS, key=lambda problem: problem.cost)
    if fault.shows != "output":
        plain = [problem for problem in PROBLEMS if problem.head_dim == 4]
        name, problems = diagnose_beside, [*plain, *PROBLEMS[::3]]
    named = (name(planted(fault, meaning), problems, budget_s=30) for meaning in MEANINGS[:2])
    found = [one.fault.id for one in next((some for some in named if some), [])]
    if fault.equivalent:
        assert not found
    else:
        assert fault.id in found
        assert len(found) < 6


def narrow(q: Tensor, k: Tensor, v: Tensor, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    left, right = window_size
    return variants(q, k, v, window_size=(max(left - 1, -1), right))  # type: ignore[return-value]


def test_the_reproducer_fails_as_the_check_does() -> None:
    made = adapt(narrow, import_line="impl = narrow")
    problem = Problem(mask=(Window(3, 2),))
    subject = Subject(made)
    law = next(law for law, _, _ in kills.checks("quick", "variants") if law.code == "ATN701")
    result = subject.judge(law, problem)
    script = reproducer(made, problem, result)
    assert "window_size=(3, 2)" in script
    with pytest.raises(AssertionError, match="more than rounding explains"):
        exec(script, {"narrow": narrow})
    right = script.replace("impl = narrow", "impl = variants")
    exec(right, {"variants": variants})
