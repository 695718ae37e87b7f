"""Fuzzing: the same from everywhere, finds faults by itself, makes them small, and accuses nobody."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
import pytest
import torch

from attn_spec import adapt, check_attention, fuzzing, strategies
from attn_spec.adapters.implementation import Implementation
from attn_spec.conventions import Meaning
from attn_spec.engine import CheckResult, KnownFailure, Policy, Subject
from attn_spec.faults import Fault, named
from attn_spec.faults.planted import planted
from attn_spec.invariants import numerics
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.shrink import smaller
from attn_spec.suites import Test, all_tests

pytest_plugins = ["pytester"]
TESTS: dict[str, Test] = {name: test for module, name, test in all_tests() if module == "test_fuzz"}
MEANINGS = (Meaning(), Meaning(alignment="bottom-right"), Meaning(empty_rows="mean"), Meaning(grouping="tiled"))
PLANTED = [
    "causal-one-ahead-in-upper-heads",
    "mask-ignored-with-groups",
    "online-softmax-sum-unrescaled-64",
    "scale-of-v",
    "mask-transposed",
    "padding-ignored",
    "tail-queries-without-diagonal-64",
    "tail-keys-dropped-32",
    "masks-inverted",
    "scale-zero-replaced",
    "additive-mask-as-bool",
    "kv-heads-tiled-in-second-half",
]


def fuzz(subject: Subject, profile: str = "quick") -> list[CheckResult]:
    return [test.judge(subject, test.problems(profile)[0], name) for name, test in TESTS.items()]


def found(fault: Fault, seconds: float = 60.0) -> CheckResult | None:
    """What fuzzing finds of a fault, under the conventions under which it shows."""
    start = time.process_time()
    for profile in ("quick", "ci"):
        for meaning in MEANINGS:
            for name, test in TESTS.items():
                result = test.judge(Subject(planted(fault, meaning)), test.problems(profile)[0], name)
                if result.outcome == "failed":
                    return result
                if time.process_time() - start > seconds:
                    return None
    return None


def changed(problem: Problem) -> list[str]:
    return [f.name for f in dataclasses.fields(Problem) if getattr(problem, f.name) != getattr(Problem(), f.name)]


@pytest.mark.parametrize("fault", PLANTED[:6])
def test_fuzzing_alone_finds_a_fault(fault: str) -> None:
    """Six of those that benchmarks/fuzz_faults.py measures."""
    result = found(named(fault))
    assert result is not None
    assert result.evidence["random_problems"]["failed"] == 1


def test_what_is_found_is_small() -> None:
    """Over twelve faults the median of fields that are not the default is at most 4."""
    results = [found(named(fault)) for fault in PLANTED]
    assert statistics.median(len(changed(result.problem)) for result in results if result is not None) <= 4
    assert None not in results


@pytest.mark.parametrize(
    "fault, expected",
    [
        ("scale-missing", Problem()),
        ("causal-one-ahead", Problem(mask=(Causal(),))),
        ("kv-heads-tiled", Problem(heads=4)),
        ("mask-transposed", Problem(mask=(Bias(),), delivery=Delivery("additive"))),
        ("tail-keys-dropped-64", Problem(kv_len=65)),
    ],
)
def test_a_large_failing_problem_becomes_the_smallest(fault: str, expected: Problem) -> None:
    subject = Subject(planted(named(fault)))
    large = Problem(
        batch=3,
        heads=8,
        kv_heads=2,
        q_len=65,
        kv_len=65,
        head_dim=20,
        v_dim=12,
        mask=(Causal(), Visible("BHQK", 0.8), Bias("HQK")),
        delivery=Delivery("additive", "BHQK", strided=True),
        scale=0.4,
        values="shared-key",
        layout="sliced",
        seed=3,
    )
    assert smaller(subject, numerics.fuzzed, large, budget_s=20.0) == expected
    assert not subject.results


def test_what_holds_or_does_not_apply_is_left_as_it_is() -> None:
    """A law is not shrunk to a problem on which it would accuse the innocent."""
    from attn_spec.invariants.causality import no_future_leak

    problem = Problem(q_len=9, kv_len=9, mask=(Causal(), KeyPadding((9, 4))))
    assert smaller(Subject(planted(None)), numerics.fuzzed, problem) == problem
    small = smaller(Subject(planted(named("causal-one-ahead"))), no_future_leak, problem, budget_s=20.0)
    assert small.causal is not None
    assert not small.masked


@pytest.mark.parametrize("meaning", MEANINGS, ids=str)
def test_the_right_pipeline_is_not_accused(meaning: Meaning) -> None:
    results = fuzz(Subject(planted(None, meaning)))
    assert [result.outcome for result in results] == ["passed"] * len(TESTS)
    assert all(sum(result.evidence["random_problems"].values()) >= 15 for result in results)


def test_the_problem_of_a_failure_fails_by_itself() -> None:
    """The result carries the shrunk problem: diagnosis, reproducer and replay work on it as on any other."""
    report = check_attention(Tailless(), laws=["ATN803"], profile="ci")
    (result,) = report.results
    assert result.outcome == "failed"
    assert result.problem == Problem(kv_len=97)
    assert Subject(report.judgement.implementation).judge(numerics.fuzzed, result.problem).outcome == "failed"
    assert "(2, 2, 2, 7, 97, 8, 8)" in report.judgement.reproducer(result)
    assert CheckResult.from_dict(result.to_dict()).problem == result.problem


class Tailless:
    """Drops the last of 97 keys, and of no other number."""

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = 96 if k.shape[2] == 97 else k.shape[2]
        return torch.nn.functional.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n])


# known failures ------------------------------------------------------------------------------------------------------


def test_a_known_failure_is_not_red_not_shrunk_and_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(pattern: str) -> Subject:
        entry = KnownFailure("ATN803", "known", pattern)
        return Subject(planted(named("causal-one-ahead")), Policy(known_failures=(entry,)))

    test = TESTS["test_fuzzed"]
    search = test.problems("ci")[0]
    red = test.judge(known("*bf16*"), search, "")
    assert red.outcome == "failed"
    assert "bf16" not in str(red.problem)
    monkeypatch.setattr("attn_spec.shrink.smaller", lambda *_: pytest.fail("a known failure was made smaller"))
    for pattern in ("*", "*causal*"):
        result = test.judge(known(pattern), search, "")
        assert result.outcome == "known-failure"
        assert result.evidence["random_problems"]["known-failure"] == 1


# the same from everywhere --------------------------------------------------------------------------------------------

LISTING = """
import sys
from attn_spec import fuzzing, strategies
from attn_spec.engine import Subject
from attn_spec.faults.planted import planted
from attn_spec.invariants.numerics import fuzzed
seen = []
subject = Subject(planted(None))
subject.attempt = lambda law, problem: (seen.append(problem), ("passed", None))[1]
fuzzing.search(subject, fuzzed, strategies.problems(), examples=60, seed=int(sys.argv[1]))
print("\\n".join(problem.to_yaml() for problem in seen))
"""


def listed(cwd: Path, seed: int = 0, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_CURRENT_TEST")}
    command = [sys.executable, "-c", LISTING, str(seed)]
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, timeout=300, check=True
    )
    return done.stdout


def test_the_same_seed_gives_the_same_problems_with_ci_and_without(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(f"NUMBERS = {list(range(100, 900))}\n")  # of which Hypothesis would draw
    alone = listed(tmp_path)
    assert alone.count("q_len") > 40
    assert listed(tmp_path, CI="true", GITHUB_ACTIONS="true", PYTHONHASHSEED="5") == alone
    assert listed(tmp_path, seed=1) != alone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large.py"]  # no folder of Hypothesis' either


def test_a_profile_of_the_users_changes_nothing() -> None:
    def problems() -> list[Problem]:
        seen: list[Problem] = []
        subject = Subject(planted(None))
        subject.attempt = lambda law, problem: (seen.append(problem), ("passed", None))[1]  # type: ignore[method-assign]
        fuzzing.search(subject, numerics.fuzzed, strategies.problems(), examples=30)
        return seen

    before, usual = problems(), hypothesis.settings.default
    hypothesis.settings.register_profile("theirs", max_examples=1, derandomize=True, phases=[], stateful_step_count=3)
    hypothesis.settings.load_profile("theirs")
    try:
        assert problems() == before
    finally:
        hypothesis.settings.register_profile("before", usual)
        hypothesis.settings.load_profile("before")


def test_every_field_of_the_settings_is_set() -> None:
    source = inspect.getsource(fuzzing.profile)
    fields = [name for name in inspect.signature(hypothesis.settings).parameters if name != "parent"]
    assert len(fields) > 8
    assert [name for name in fields if f"{name}=" not in source] == []


# what is slow, refuses, or answers now and then ----------------------------------------------------------------------


def test_a_flaky_answer_is_red() -> None:
    calls = 0

    def now_and_then(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out * (2.0 if calls == 150 else 1.0)

    test = TESTS["test_fuzzed"]
    subject = Subject(adapt(now_and_then, name="flaky"))
    calls = 130
    result = test.judge(subject, test.problems("ci")[0], "")
    assert (result.outcome, result.merge) == ("failed", "stateful")


def test_what_cannot_be_asked_is_unsupported_and_soon_given_up() -> None:
    result = TESTS["test_fuzzed_mask_ways"].judge(Subject(adapt(plain, name="plain")), fuzzing.Search(examples=400), "")
    assert result.outcome == "unsupported"
    assert result.evidence["random_problems"]["unsupported"] < 40


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_slow_implementation_ends_in_time() -> None:
    implementation: Implementation = planted(None)
    fast = implementation.adapter

    class Slow:
        def __call__(self, arguments: object) -> object:
            time.sleep(0.05)
            return fast(arguments)  # type: ignore[arg-type]

        def source(self, arguments: object) -> str:
            return "impl(q, k, v)"

    implementation.adapter = Slow()  # type: ignore[assignment]
    start = time.perf_counter()
    met = fuzzing.search(Subject(implementation), numerics.fuzzed, strategies.problems(), examples=200, seconds=0.6)
    assert time.perf_counter() - start < 5
    assert 1 <= met.outcomes["passed"] < 100


# the budget ----------------------------------------------------------------------------------------------------------


def test_a_budget_cuts_a_run_and_says_so(pytester: pytest.Pytester) -> None:
    right = "return ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v"
    # quick while it is got to know, so that the budget ends among its checks on any machine
    slowing = "    calls.append(1)\n    time.sleep(2 * (len(calls) > 40))\n"
    slow = f"import time\ncalls = []\ndef attn(q, k, v):\n{slowing}    {right}\n"
    pytester.makepyfile(slow=slow)
    common = ("--attn-impl=slow.attn", "attn_spec/suites/test_weights.py", "--attn-timeout=0")
    result = pytester.runpytest_inprocess(*common, "--attn-budget=5", "--attn-json=out.json")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["* of * checks ran: *not run"])
    (one,) = json.loads((pytester.path / "out.json").read_text())["implementations"]
    assert one["counts"]["not-run"] > 3
    assert one["counts"]["passed"] > 0
    assert {check["message"] for check in one["checks"] if check["outcome"] == "not-run"} == {"the budget ended first"}
    assert check_attention(plain, budget_s=0.0).counts["not-run"] > 100
    for wrong in ("soon", "-1", "0", "nan"):
        assert pytester.runpytest_inprocess(*common, f"--attn-budget={wrong}").ret == 4
