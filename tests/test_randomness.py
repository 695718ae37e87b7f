"""Dropout: faults are caught and named, what is right is left alone, and the chances are what is said of them."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import Problem, adapt, chance, check_attention
from attn_spec.adapters import seeding
from attn_spec.adapters.hf_interface import from_interface
from attn_spec.dropout_blocks import RIGHT, Dropout, attention
from attn_spec.engine import Subject, optional_axes
from attn_spec.faults import behaviour
from attn_spec.invariants import drawing
from attn_spec.invariants import randomness as law
from attn_spec.invariants.randomness import COUNTING
from attn_spec.report.reproducer import reproducer
from attn_spec.suites import all_tests
from attn_spec.suites import test_randomness as suite

FAULTS = [one for one in behaviour.load().values() if one.theme == "randomness"]
SAME = {"kept-where-dropped": "rate-is-keep-probability"}  # the same numbers
SMALL = suite.SMALL


def benchmark() -> Any:
    path = Path(__file__).parent.parent / "benchmarks" / "dropout_alarms.py"
    spec = importlib.util.spec_from_file_location("dropout_alarms", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


BENCHMARK = benchmark()


def faulty(fault: behaviour.BehaviourFault) -> Any:
    return attention(Dropout(**fault.blocks))


def judged(target: Any, what: Any, problem: Problem) -> Any:
    return Subject(adapt(target)).judge(what, problem)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.id)
def test_a_fault_is_caught_and_named(fault: behaviour.BehaviourFault) -> None:
    report = check_attention(faulty(fault), laws=["randomness"], strict=bool(fault.equivalent))
    assert report.verdict == "failed", f"{fault.id} gets through"
    assert report.diagnosis[0] in (fault.id, SAME.get(fault.id)), (report.diagnosis, str(report))
    assert fault.id in report.diagnosis
    assert report.judgement.headline in (fault.title, report.judgement.diagnosis[0].fault.title)


def test_a_rate_that_changes_nothing_is_an_advisory() -> None:
    report = check_attention(faulty(behaviour.load()["dropout-never-applied"]), laws=["randomness"])
    assert report.verdict == "passed"
    told = [r for r in report.results if r.outcome == "known-failure" and r.code in ("ATN1101", "ATN1102")]
    assert told
    assert all("the weights are those without dropout" in r.message for r in told)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["one-mask-for-all-queries", "keys-dropped-together", "mask-repeated-by-tile"])
def test_draws_that_hang_together_are_not_taken_for_a_rate(name: str, seed: int) -> None:
    report = check_attention(faulty(behaviour.load()[name]), laws=["randomness"], seed=seed)
    assert report.diagnosis == [name]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.id)
def test_a_script_shows_the_fault_and_holds_for_what_is_right(
    fault: behaviour.BehaviourFault, capsys: pytest.CaptureFixture[str]
) -> None:
    report = check_attention(faulty(fault), laws=["randomness"], strict=bool(fault.equivalent))
    first = next(r for r in report.results if r.outcome == "failed" and r.merge == fault.told_by)
    text = reproducer(report.judgement.implementation, first.problem, first)
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("impl ="))
    state = torch.get_rng_state()
    with pytest.raises(AssertionError):
        exec(lines, {"impl": faulty(fault)})
    exec(lines, {"impl": attention(RIGHT)})
    torch.set_rng_state(state)
    capsys.readouterr()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.id)
def test_a_fault_explains_itself(fault: behaviour.BehaviourFault) -> None:
    assert not fault.title.endswith(".")
    assert fault.advice.endswith(".")
    assert fault.sources
    assert fault.told_by
    assert any(line.startswith("-") for line in fault.diff.splitlines())


def test_there_are_enough_faults() -> None:
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("name", BENCHMARK.HONEST)
def test_what_is_right_is_left_alone(name: str) -> None:
    results = BENCHMARK.repeated(Subject(adapt(BENCHMARK.HONEST[name])), 3, first=17)
    assert not [str(r) for r in results if r.outcome in ("failed", "error", "known-failure")]
    ran = {r.code for r in results if r.outcome == "passed"}
    assert {*COUNTING, "ATN1102", "ATN1105", "ATN1106", "ATN1107"} <= ran


@pytest.mark.parametrize("name", ["sdpa", "counter", "MultiHeadAttention"])
@pytest.mark.parametrize("test", BENCHMARK.tests(), ids=lambda test: test.law.name)
def test_so_it_is_on_the_problems_of_ci(name: str, test: Any) -> None:
    subject = Subject(adapt(BENCHMARK.HONEST[name]))
    outcomes = [subject.judge(test.law, p).outcome for p in test.problems("ci") if p.seed < 100]
    assert not {"failed", "error", "known-failure"} & set(outcomes)


def with_a_seed(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, seed: int = 0) -> Tensor:
    """The seed is an argument, as of kernels in Triton: the same one drops the same weights."""
    w = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    if dropout_p:
        w = w * (torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) >= dropout_p) / (1 - dropout_p)
    return w @ v


def its_seed_ignored(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, seed: int = 0) -> Tensor:
    return with_a_seed(q, k, v, dropout_p, 5)


def test_a_seed_that_is_an_argument_is_handed_over() -> None:
    report = check_attention(with_a_seed, laws=["randomness"])
    assert report.verdict == "passed", str(report)
    assert {"ATN1107", "ATN1108", "ATN1109"} <= {r.code for r in report.results if r.outcome == "passed"}
    report = check_attention(its_seed_ignored, laws=["randomness"])
    assert "seed-fixed" in report.diagnosis
    lines = str(report).splitlines()
    assert any("dropout_p=0.2, seed=seed + m)" in line for line in lines)


def its_seed_unused(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, seed: int = 0) -> Tensor:
    return attention(RIGHT)(q, k, v, dropout_p=dropout_p)


def test_a_seed_that_is_an_argument_says_all_whatever_torch_s_generator_is_at() -> None:
    report = check_attention(its_seed_unused, laws=["randomness"])
    found = next(r for r in report.results if r.outcome == "failed" and r.code == "ATN1108")
    assert found.message.startswith("dropout = 0.3: with the same seed for an argument ")
    text = reproducer(report.judgement.implementation, found.problem, found)
    lines = "\n".join(line for line in text.splitlines() if not line.endswith("as impl"))
    with pytest.raises(AssertionError, match="after the same seed"):
        exec(lines, {"impl": its_seed_unused})
    exec(lines, {"impl": with_a_seed})


def dropping(changed: Any) -> Any:
    """A right attention but for what `changed(dropped, mask, is_causal)` makes of the mask of dropout."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        s = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
        if attn_mask is not None:
            s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask
        if is_causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        p = torch.softmax(s, -1).nan_to_num()
        dropped = torch.rand(p.shape) < dropout_p if dropout_p else torch.zeros(p.shape, dtype=torch.bool)
        dropped, factor = changed(dropped, attn_mask, is_causal), 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
        factor = factor if bool(dropped.any()) else 1.0
        return (p * ~dropped * factor) @ v.repeat_interleave(q.shape[1] // k.shape[1], 1)

    return attend


def nothing_when_masked(dropped: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return dropped if mask is None else torch.zeros_like(dropped)


def nothing_when_causal(dropped: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return torch.zeros_like(dropped) if is_causal else dropped


def nothing_when_grouped_long(dropped: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return dropped if dropped.shape[-1] == dropped.shape[-2] else torch.zeros_like(dropped)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (nothing_when_masked, "nothing is dropped once a mask is given, though something is in a plain call"),
        (nothing_when_causal, "nothing is dropped in a causal call, though"),
        (nothing_when_grouped_long, "nothing is dropped where there are more keys, though"),
    ],
)
def test_a_rate_that_only_some_calls_heed_is_a_violation(changed: Any, said: str) -> None:
    report = check_attention(dropping(changed), laws=["ATN1101", "ATN1102"])
    failed = [r for r in report.results if r.outcome == "failed"]
    assert failed
    assert all(said in r.message and r.merge == "dropout-forgotten" for r in failed)
    assert check_attention(dropping(lambda dropped, mask, is_causal: dropped), laws=["randomness"]).passed


@pytest.mark.parametrize("lower", [False, True])
def test_a_diagonal_that_is_never_dropped_is_caught(lower: bool) -> None:
    def spared(dropped: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        offset = dropped.shape[-1] - dropped.shape[-2] if lower else 0
        eye = torch.ones(dropped.shape[-2:], dtype=torch.bool).triu(offset).tril(offset)
        return dropped & ~eye

    report = check_attention(dropping(spared), laws=["ATN1101"])
    failed = [r for r in report.results if r.outcome == "failed"]
    assert failed
    assert all(r.merge == "dropout-uneven" and "of the diagonal key = query" in r.message for r in failed)


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_a_last_block_that_is_not_full_is_looked_at(block: int) -> None:
    def tail_spared(dropped: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        keys = torch.arange(dropped.shape[-1])
        return dropped & (keys < dropped.shape[-1] // block * block)

    full = Subject(adapt(dropping(tail_spared)))
    assert full.judge(law.dropout_rate, suite.TAIL).merge == "dropout-tail"


@pytest.mark.parametrize("along", ["keys", "queries"])
@pytest.mark.parametrize("stride", [3, 16, 40])
def test_numbers_of_lines_that_overlap_are_caught(along: str, stride: int) -> None:
    def overlapping(dropped: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
        b, h, q_len, kv_len = dropped.shape
        lines, size = (q_len, kv_len) if along == "keys" else (kv_len, q_len)
        drawn = torch.rand(b, h, stride * lines + size).unfold(-1, size, stride)[:, :, :lines]
        return (drawn if along == "keys" else drawn.mT) < suite.PLAIN.dropout

    found = judged(dropping(overlapping), law.dropout_independent, suite.PLAIN)
    assert found.merge == "dropout-shifted-alike"
    assert f"moved by {stride} {along}" in found.message or f"moved by {-stride} {along}" in found.message


def drawing_first(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """It takes a seed from torch's generator in each call, whatever the rate."""
    seed = int(torch.randint(1 << 31, ()))
    return with_a_seed(q, k, v, dropout_p, seed)


def reseeding_first(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    torch.manual_seed(0)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)


def test_a_generator_that_is_moved_on_at_zero_is_an_advisory() -> None:
    laws = ["ATN1106", "ATN1202"]
    report = check_attention(drawing_first, laws=laws)
    assert report.passed
    assert {r.code for r in report.results if r.outcome == "known-failure"} == set(laws)
    strict = check_attention(drawing_first, laws=laws, strict=True)
    assert {r.code for r in strict.results if r.outcome == "failed"} == set(laws)


def test_a_generator_that_is_set_anew_is_a_violation() -> None:
    report = check_attention(reseeding_first, laws=["ATN1106", "ATN1202"])
    told = {(r.code, r.merge) for r in report.results if r.outcome == "failed"}
    assert told == {("ATN1106", "dropout-reseeds"), ("ATN1202", "global-state")}
    assert seeding.reseeds(reseeding_first, [torch.randn(1, 1, 4, 4)] * 3, {})
    assert not seeding.reseeds(drawing_first, [torch.randn(1, 1, 4, 4)] * 3, {})


@pytest.mark.parametrize("used", ["none", "dropped", "twice"])
def test_weights_that_are_returned_drop_what_the_output_does(used: str) -> None:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, need_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        p = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        dropped = F.dropout(p, dropout_p)
        mixed = {"none": p, "dropped": dropped, "twice": F.dropout(p, dropout_p)}[used]
        return (mixed @ v, dropped) if need_weights else mixed @ v

    result = judged(attend, law.dropout_on_weights, SMALL)
    assert (result.outcome, result.merge) == (
        ("passed", "") if used == "dropped" else ("failed", "dropout-returned-only")
    )


# modules --------------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Self-attention whose dropout is where `where` says."""

    where = "weights"

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.drop = num_heads, nn.Dropout(dropout)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        p = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        p = self.drop(p) if self.where == "weights" else self.changed(p)
        y = (p @ v).transpose(1, 2).reshape(b, s, width)
        y = self.drop(y) if self.where == "heads" else y
        out: Tensor = self.proj(y)
        return self.drop(out) if self.where == "residual" else out

    def changed(self, p: Tensor) -> Tensor:
        return p


def variant(name: str, changed: Any = Dropping.changed) -> type[Dropping]:
    return type(name.title(), (Dropping,), {"where": name, "changed": changed})


def test_dropout_after_the_output_projection_is_nobody_s_fault() -> None:
    report = check_attention(variant("residual"), laws=["randomness"])
    assert report.passed, str(report)
    said = {r.message for r in report.results if r.outcome == "unsupported" and r.code in COUNTING}
    assert "no dropout lies between its projections" in said


def test_dropout_on_the_heads_of_a_module_is_an_advisory() -> None:
    report = check_attention(variant("heads"), laws=["randomness"])
    assert report.passed, str(report)
    assert [r.code for r in report.results if r.outcome == "known-failure"] == ["ATN1105"]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (lambda self, p: p * (torch.rand_like(p) >= self.drop.p) if self.training else p, "kept-not-rescaled"),
        (lambda self, p: F.dropout(p, 1 - self.drop.p if self.drop.p else 0.0, self.training), "rate-is-keep"),
        (lambda self, p: p * self.drop(torch.ones_like(p[:, :1])), "one-mask-for-all-heads"),
    ],
)
def test_faults_of_a_module_are_named(changed: Any, named: str) -> None:
    laws = [*COUNTING, "ATN1102", "ATN1105"]
    report = check_attention(variant("wrong", changed), laws=laws)
    assert report.diagnosis[0].startswith(named), str(report)


def test_an_instance_can_t_be_asked() -> None:
    result = judged(Dropping(64, 4, 0.1), law.dropout_rate, suite.PLAIN)
    assert (result.outcome, result.message) == ("unsupported", "no dropout parameter")


def test_a_module_is_in_eval_mode_again() -> None:
    f = adapt(Dropping).adapter.function  # type: ignore[attr-defined]
    q = torch.randn(2, 2, 4, 8)
    assert not torch.equal(f(q, q, q, dropout=0.5)[0], f(q, q, q, dropout=0.5)[0])
    assert not f.built(f.sizes_for(2, 2, 8, 8, 4, dropout=0.5), torch.float32).training
    assert torch.equal(f(q, q, q)[0], f(q, q, q)[0])


# how it is asked for --------------------------------------------------------------------------------------------------


def test_a_problem_has_a_dropout() -> None:
    problem = Problem(dropout=0.25)
    assert "dropout0.25" in str(problem)
    assert Problem.from_yaml(problem.to_yaml()) == problem
    assert problem.arguments().dropout == 0.25
    assert Problem().arguments().dropout is None
    assert "dropout" in optional_axes(problem)
    with pytest.raises(ValueError, match="dropout: 1.5 is not a share"):
        Problem(dropout=1.5)


def test_a_refusal_is_a_refusal() -> None:
    def without(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> Tensor:
        if dropout_p:
            raise NotImplementedError("dropout is not supported on a CPU")
        return F.scaled_dot_product_attention(query, key, value)

    assert judged(without, law.dropout_rate, suite.PLAIN).outcome == "refused"


def test_a_module_for_the_rate_is_no_fault() -> None:
    def annotated(query: Tensor, key: Tensor, value: Tensor, dropout: Any = None) -> Tensor:
        p = torch.softmax(query @ key.mT / math.sqrt(query.shape[-1]), -1)
        return (p if dropout is None else dropout(p)) @ value

    report = check_attention(annotated, laws=["randomness"])
    assert {r.outcome for r in report.results} <= {"refused", "unsupported"}


@pytest.mark.parametrize("name", ["training", "deterministic"])
def test_a_function_is_told_that_it_trains(name: str) -> None:
    def trains(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, training: bool = False) -> Tensor:
        return F.dropout(torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1), dropout_p, training) @ v

    def random(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, deterministic: bool = True) -> Tensor:
        return trains(q, k, v, dropout_p, not deterministic)

    report = check_attention(trains if name == "training" else random, laws=["randomness"])
    assert report.passed, str(report)
    assert report.counts["passed"] >= 10


def test_a_rate_of_one_that_crashes_is_an_advisory() -> None:
    def divides(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        p = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1)
        return F.dropout(p, dropout_p) * (1 - dropout_p) * (1 / (1 - dropout_p)) @ v

    result = judged(divides, law.dropout_all, SMALL.replace(dropout=1.0))
    assert result.outcome == "known-failure"
    assert "ZeroDivisionError" in result.message


def test_without_a_parameter_it_is_not_supported() -> None:
    result = judged(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), law.dropout_rate, suite.PLAIN)
    assert (result.outcome, result.message) == ("unsupported", "no dropout parameter")


def test_the_interface_of_hugging_face_is_judged_in_training_mode() -> None:
    def eager(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float,
        dropout: float = 0.0, **_: Any,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        p = F.dropout(torch.softmax(query @ key.mT * scaling, -1), dropout, module.training)
        return (p @ value).transpose(1, 2), p

    f = adapt(from_interface(eager))
    assert Subject(f).judge(law.dropout_rate, suite.PLAIN).outcome == "passed"
    assert Subject(f).judge(law.dropout_backward, SMALL).outcome == "passed"


@pytest.mark.parametrize("layout", ["BSHD", "SBHD", "NSD"])
def test_layouts(layout: str) -> None:
    order = {"BSHD": (0, 2, 1, 3), "SBHD": (1, 2, 0, 3), "NSD": (0, 1, 2)}[layout]
    back = {"BSHD": (0, 2, 1, 3), "SBHD": (2, 0, 1, 3), "NSD": (0, 1, 2)}[layout]

    def f(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
        q, k, v = (x.permute(order) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p).permute(back)

    subject = Subject(adapt(f))
    assert subject.implementation.conventions.layout.value == layout
    for one, problem in ((law.dropout_independent, suite.TAIL), (law.dropout_backward, SMALL)):
        assert subject.judge(one, problem).outcome == "passed"


def test_a_packed_function_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_spec.adapters.apart import Apart
    from attn_spec.adapters.resolve import resolve

    (tmp_path / "packed_dropping.py").write_text(
        "import torch\n"
        "import torch.nn.functional as F\n"
        "def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0):\n"
        "    out = []\n"
        "    for a, b, c, d in zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:]):\n"
        "        one, two, three = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))\n"
        "        p = (one @ two.mT / one.shape[-1] ** 0.5).softmax(-1)\n"
        "        out.append((F.dropout(p, dropout_p) @ three).transpose(0, 1))\n"
        "    return torch.cat(out)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    apart = Apart("packed_dropping:varlen", resolve("packed_dropping:varlen").object, 60.0)
    implementation = adapt(apart, name="varlen")
    subject = Subject(implementation)
    for one in (law.dropout_rate, law.dropout_seeded, law.dropout_advances):
        assert subject.judge(one, suite.PLAIN).outcome == "passed", subject.results[-1].message
    assert subject.judge(law.dropout_backward, SMALL).outcome == "passed"
    implementation.close()


# seeding --------------------------------------------------------------------------------------------------------------


def test_the_generator_is_left_alone() -> None:
    q = torch.randn(1, 1, 4, 4)
    before = torch.get_rng_state()
    outputs, moved_on = seeding.draw(F.dropout, [q, 0.5], {}, [3, -1, 3])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(outputs[0][0], outputs[2][0])
    assert not torch.equal(outputs[0][0], outputs[1][0])
    assert moved_on == [True, True, True]
    assert seeding.draw(F.dropout, [q, 0.0], {}, [3])[1] == [False]


def test_a_second_run_draws_the_same() -> None:
    one, two = (drawing.drawn(adapt(F.scaled_dot_product_attention), SMALL) for _ in range(2))
    assert torch.equal(one.first, two.first)
    assert torch.equal(one.other, two.other)


# chances --------------------------------------------------------------------------------------------------------------


def test_tails_are_exact() -> None:
    weights = [math.comb(20, k) * 0.3**k * 0.7 ** (20 - k) for k in range(21)]
    for count in (0, 3, 6, 19, 20):
        below, above = chance.binomial_tails(count, 20, 0.3)
        assert below == pytest.approx(sum(weights[: count + 1]), rel=1e-10)
        assert above == pytest.approx(sum(weights[count:]), rel=1e-10)
    ways = [math.comb(7, k) * math.comb(13, 9 - k) / math.comb(20, 9) for k in range(8)]
    for count in (0, 2, 5, 7):
        below, above = chance.overlap_tails(count, 20, 7, 9)
        assert below == pytest.approx(sum(ways[: count + 1]), rel=1e-10)
        assert above == pytest.approx(sum(ways[count:]), rel=1e-10)


def test_far_tails_keep_their_accuracy() -> None:
    exact = sum(math.comb(1000, k) * 3**k * 7 ** (1000 - k) for k in range(420, 1001)) / 10**1000
    assert chance.binomial_tails(420, 1000, 0.3)[1] == pytest.approx(exact, rel=1e-9)


def test_a_rate_in_eight_bits_is_right_and_others_are_not() -> None:
    n = 1 << 20
    assert chance.rate_p(round(n * 77 / 256), n, 0.3) > 0.5
    assert chance.rate_p(round(n * 0.31), n, 0.3) < 1e-9


@pytest.mark.parametrize("profile", ["quick", "ci", "deep"])
def test_false_alarms_of_the_suite_are_rarer_than_one_in_a_million(profile: str) -> None:
    counting = [test for _, _, test in all_tests() if test.law.code in COUNTING]
    assert {test.law.code for test in counting} == set(COUNTING)
    checks = sum(len(test.problems(profile)) for test in counting)
    assert checks * chance.CHECK < 1e-6


def test_no_other_law_counts() -> None:
    source = Path(law.__file__).read_text()
    counts = ("Tests()", "within(found", "_across(found, f")
    found = [part.split('"')[1] for part in source.split("@law(")[1:] if any(word in part for word in counts)]
    assert tuple(found) == COUNTING


def test_each_check_has_its_share_among_its_tests() -> None:
    tests = chance.Tests()
    tests.rates("some", ["a", "b"], torch.tensor([30.0, 95.0]), torch.tensor([100.0, 100.0]), 0.3)
    (found,) = tests.unlikely()
    assert (found.what, found.count, found.level) == ("b", 95, chance.CHECK / 2)


def level(problem: Problem) -> float:
    """Below the level of any one test on a problem: 1101 has a test for each line, 1104 one for each pair of lines."""
    lines = problem.batch * problem.heads, problem.q_len, problem.kv_len
    return chance.CHECK / (sum(n * n for n in lines) + 1_000)


def places(problem: Problem) -> int:
    found = drawing.drawn(adapt(F.scaled_dot_product_attention), problem)
    return int(found.tells.sum())


@pytest.mark.parametrize("problem", [suite.PLAIN, suite.TAIL, suite.CAUSAL], ids=str)
def test_nearly_every_weight_tells(problem: Problem) -> None:
    found = drawing.drawn(adapt(F.scaled_dot_product_attention), problem)
    assert int(found.tells.sum()) > 0.99 * int((found.right > 0).sum())


@pytest.mark.parametrize(
    ("fault", "actual"),
    [
        ("rate-is-keep-probability", 0.7),
        ("everything-dropped", 1.0),
        ("dropout-never-applied", 0.0),
        ("rate-fixed", 0.1),
    ],
)
def test_a_wrong_rate_is_found_with_near_certainty(fault: str, actual: float) -> None:
    assert fault in [one.id for one in FAULTS]
    n = places(suite.PLAIN)
    assert 1 - chance.power(n, suite.PLAIN.dropout, actual, level(suite.PLAIN)) < 1e-6


def test_tiles_that_are_not_dropped_are_found_with_near_certainty() -> None:
    p = suite.TAIL
    rest = p.batch * p.heads * p.q_len * (p.kv_len % 64)
    assert 1 - chance.power(rest, p.dropout, 0.0, level(p)) < 1e-6


@pytest.mark.parametrize(
    ("problem", "n", "times"),
    [
        (suite.PLAIN, 64 * 64, 1),  # two heads or two samples; the same for two calls
        (suite.PLAIN, 2 * 4 * 32 * 64, 1),  # neighbouring queries or keys
        (suite.GROUPED, 64 * 64, 1),
        (suite.TAIL, 4 * 32, 64),  # two keys of different tiles: of 64 such pairs one is enough
    ],
    ids=["heads", "neighbours", "group", "tiles"],
)
def test_a_shared_mask_is_found_with_near_certainty(problem: Problem, n: int, times: int) -> None:
    """Two lines that are the same are missed where so few are dropped that they may well be the same by chance."""
    n, p = round(0.99 * n), problem.dropout
    told = next(a for a in range(1, n) if 2 * chance.overlap_tails(a, n, a, a)[1] < level(problem))
    assert chance.binomial_tails(told - 1, n, p)[0] ** times < 1e-6
