"""How a law and its problems become a pytest test, and a result becomes a pytest outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import pytest

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.engine import CheckResult, Subject
from attn_spec.law import Law, Violation
from attn_spec.problem import Problem

PROFILES = ("quick", "ci", "deep")
SEEDS = {"quick": 1, "ci": 3, "deep": 10}  # how many draws of each problem


class Test(Protocol):
    """A test that tries one law; `problems(profile)` are the problems, in order.

    judge(subject, problem, name): how a check of it is judged.  law_of(problem): the law that is tried there, which is
    `law` but for what is replayed.  replays: its problems are the finds that a judged run is given.
    """

    __test__: bool = False
    law: Law
    problems: Callable[[str], list[Problem]]
    judge: Callable[[Subject, Problem, str], CheckResult]
    law_of: Callable[[Problem], Law]
    replays: bool

    def __call__(self, attention: Any, problem: Problem, request: pytest.FixtureRequest) -> None: ...


Suite = Sequence[Test]


def tries(
    law: Law, *problems: Problem | Sequence[Problem], ci: Sequence[Problem] | Callable[[], Sequence[Problem]] = ()
) -> Test:
    """A test of a law on problems. The profiles `ci` and `deep` add the problems of `ci` and more draws of each.

    A function for `ci` is called where its problems are asked for, and not before.
    """
    quick = [p for given in problems for p in ([given] if isinstance(given, Problem) else given)]

    def chosen(profile: str) -> list[Problem]:
        several = quick if profile == "quick" else [*quick, *(ci() if callable(ci) else ci)]
        drawn = [p.replace(seed=p.seed + 100 * n) for n in range(SEEDS[profile]) for p in several]
        return list(dict.fromkeys(drawn))

    return _test(law, chosen, lambda subject, problem, name: subject.judge(law, problem, name))


def fuzzes(law: Law, **limits: Any) -> Test:
    """A test of a law on random problems: one check, whose result carries the smallest problem that fails.

    limits: fields of `attn_spec.capabilities.Capabilities` beyond which the law says nothing (`causal="never"`), and
    `masked=True` where it needs a mask tensor.
    """
    from attn_spec import fuzzing

    def chosen(profile: str) -> list[Problem]:
        return [fuzzing.Search(examples=fuzzing.EXAMPLES[profile])]

    def judge(subject: Subject, problem: Problem, name: str) -> CheckResult:
        assert isinstance(problem, fuzzing.Search)
        return fuzzing.judge(subject, law, problem, limits, name)

    return _test(law, chosen, judge)


def replays() -> Test:
    """A test of what was found before: each find is one check, of its own law on its own problem."""
    from attn_spec import finds
    from attn_spec.invariants.numerics import fuzzed

    made = _test(fuzzed, lambda profile: [], finds.judge)
    made.law_of, made.replays = finds.law_of, True
    return made


def _test(
    law: Law, problems: Callable[[str], list[Problem]], judge: Callable[[Subject, Problem, str], CheckResult]
) -> Test:
    def test(attention: Any, problem: Problem, request: pytest.FixtureRequest) -> None:
        __tracebackhide__ = True
        name = getattr(request.node, "originalname", request.node.name)
        result = judge(subject_of(attention), problem, name)
        described = {"implementation": subject_of(attention).name, **result.to_dict()}
        request.node.user_properties.append(("attn_spec", described))
        hand_over(result)

    test.__doc__ = f"{law.code} {law.name}: {law.title}."
    made = cast(Test, test)
    made.law, made.problems, made.judge = law, problems, judge
    made.law_of, made.replays = lambda problem: law, False
    return made


def both(*problems: Problem) -> list[Problem]:
    """Each problem in float32 and in bfloat16."""
    return [p.replace(dtype=dtype) for p in problems for dtype in ("float32", "bfloat16")]


_subjects: dict[int, tuple[Any, Subject]] = {}


def subject_of(attention: Any) -> Subject:
    """What the `attention` fixture gave, as a subject; a bare callable is adapted once."""
    if isinstance(attention, Subject):
        return attention
    if id(attention) not in _subjects:
        made = attention if isinstance(attention, Implementation) else adapt(attention)
        _subjects[id(attention)] = (attention, Subject(made))
    return _subjects[id(attention)][1]


def hand_over(result: CheckResult) -> None:
    """Tell pytest what came of a check: pass, fail, skip (refused, unsupported, not run) or xfail (known failure)."""
    __tracebackhide__ = True
    if result.outcome == "passed":
        return
    if result.outcome == "known-failure":
        pytest.xfail(result.message)
    if result.outcome in ("refused", "unsupported", "not-run"):
        pytest.skip(f"{result.outcome}: {result.message}")
    hint = f"\n  {result.hint}" if result.hint else ""
    raise Violation(f"{result.code} {result.name}: {result.message}\n  on {result.problem}{hint}")
