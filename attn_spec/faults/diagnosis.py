"""Which fault an implementation has: the one whose pipeline gives what the implementation gave.

The implementation is run on the problems, and so is the pipeline of every fault. A fault is named when it gives the
implementation's answer on every problem, on those where the implementation is right and on those where it is wrong.
All faults of which that holds are named: on these problems they can't be told apart. Where no fault alone does, faults
confined to calls of one kind are tried (`attn_spec.faults.scope`), and where none of those does, pairs. What explains
only a part is not named.

Answers are compared within the bound of the faulted pipeline, in float64 where the implementation takes it. Faults
that only show in a smaller dtype (an overflow) are then looked for in the arithmetic of that dtype. People guard
against rows that see no key, and against NaN, in ways of their own beside any fault; so a fault may also be matched
with those rows right, or with its NaN weights zero, as long as it is the same on every problem (see `Guard`).

A problem of no size, one that the implementation refuses, and one on which it breaks a law by itself say nothing and
are left out. A fault whose pipeline raises on a problem that the implementation answered does not explain it.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attn_spec import blocks, tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.blocks import Pipeline, Trace
from attn_spec.conventions import Meaning
from attn_spec.faults import CATALOGUE, Fault
from attn_spec.faults.behaviour import BehaviourFault
from attn_spec.faults.fault import both, joinable
from attn_spec.faults.modules import ModuleFault
from attn_spec.faults.scope import confined, scopes_that
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import DTYPES, Arguments, Problem
from attn_spec.tolerance import Precision

SLACK = 16.0  # bounds are derived for the right pipeline; those of a faulted one are that much looser in float32 and up
HALF_SLACK = 2.0  # in half types there is no room for more: half the faults would match
HALVES = ("bfloat16", "float16")  # the coarser first: its numbers are nearly all numbers of the other
FILLED = 1e30  # a logit beyond was filled in
FEWEST = 12  # answers that are waited for, however long each takes: fewer would let too many faults match
LARGEST = 1 << 19  # logits of the largest problem that is looked at: a changed pipeline runs on all rows at once
PAIRED = 12  # wrong answers on which the first of two faults is looked for
LOOKED_AT = 3  # problems that are answered in two dtypes to see whether they break alike
CONFINED = 2  # scopes that are named for one fault


class Guard(enum.Flag):
    """How an implementation may treat what no weights can be worked out for, apart from its fault."""

    NONE = enum.auto()  # as the pipeline of the fault does
    MASKED_ROWS = enum.auto()  # rows in which the mask alone hides every key are right
    EMPTY_ROWS = enum.auto()  # all rows that see no key are right
    NAN = enum.auto()  # besides, weights that are not a number are zero


NEVER = Guard(0)
GUARDS = (Guard.NONE, Guard.MASKED_ROWS, Guard.EMPTY_ROWS, Guard.NAN)
ANY = Guard.NONE | Guard.MASKED_ROWS | Guard.EMPTY_ROWS | Guard.NAN


@dataclass(frozen=True)
class Diagnosis:
    """A fault, or two, that gives the implementation's answer on `reproduces` of `of` problems."""

    fault: Fault | ModuleFault | BehaviourFault
    reproduces: int
    of: int


@dataclass(frozen=True, eq=False)
class Case:
    """One problem, with what the implementation gave on it; `differs` where that is not the right answer.

    right: the right answer.  empty: the rows [B, H, Sq] that see no key.  masked: those to which the mask shows none.
    """

    problem: Problem
    arguments: Arguments
    output: Tensor
    right: Tensor
    empty: Tensor
    masked: Tensor
    precision: Precision
    meaning: Meaning
    slack: float
    differs: bool

    def holds_in(self, precision: Precision) -> bool:
        """Whether the output is right to a precision that is not the implementation's own."""
        allowed = HALF_SLACK * bound(blocks.run(self.arguments, self.meaning), blocks.RIGHT, precision)
        return tolerance.worst(self.output, self.right, allowed).holds

    def in_own_arithmetic(self) -> Case:
        """The same, but pipelines are run in the dtype of the implementation's scores."""
        return dataclasses.replace(self, arguments=self.arguments.cast(DTYPES[self.precision.scores]))

    def under(self, meaning: Meaning) -> Case:
        """The same, judged by other conventions."""
        _, right, empty, masked = _right(self.problem.replace(device="cpu"), meaning)
        differs = not tolerance.worst(self.output, right.output, bound(right, blocks.RIGHT, self.precision)).holds
        return dataclasses.replace(
            self, meaning=meaning, right=right.output, empty=empty, masked=masked, differs=differs
        )

    def guards(self, pipeline: Pipeline) -> Guard:
        """The guards with which a pipeline gives what the implementation gave; none of them where it does not."""
        try:
            trace = blocks.run(self.arguments, self.meaning, pipeline)
        except (RuntimeError, IndexError, ValueError, ArithmeticError):
            return NEVER
        expected = trace.output.double()
        if expected.shape != self.output.shape:
            return NEVER
        holds = self._is(expected, trace, pipeline)
        found = Guard.NONE if holds else NEVER
        for guard, rows in ((Guard.MASKED_ROWS, self.masked), (Guard.EMPTY_ROWS, self.empty)):
            if bool(rows.any()):
                holds = self._is(torch.where(rows[..., None], self.right, expected), trace, pipeline)
            found |= guard if holds else NEVER
        if bool(trace.weights.isnan().any()):
            trace = dataclasses.replace(trace, weights=trace.weights.nan_to_num(nan=0.0))
            zeroed = pipeline.merge(pipeline.mix(trace.weights, trace.v), trace.q).double()
            holds = self._is(torch.where(self.empty[..., None], self.right, zeroed), trace, pipeline)
        return found | Guard.NAN if holds else found

    def given_by(self, pipeline: Pipeline) -> bool:
        """Whether a pipeline gives what the implementation gave, as it stands."""
        return Guard.NONE in self.guards(pipeline)

    def _is(self, expected: Tensor, trace: Trace, pipeline: Pipeline) -> bool:
        if not torch.equal(expected.isnan(), self.output.isnan()):
            return False
        error = (expected - self.output).abs().nan_to_num(nan=0.0)  # infinities of one sign are equal
        worst = float(error.max())
        if worst == 0:
            return True
        if worst > self.slack * _largest_bound(trace, self.precision):
            return False
        return tolerance.worst(self.output, expected, self.slack * bound(trace, pipeline, self.precision)).holds


def _largest_bound(trace: Trace, precision: Precision) -> float:
    """No element's bound is larger; far less work than the bounds, and enough to rule out most faults."""
    u_acc, keys, width = precision.gamma_unit, trace.logits.shape[-1], trace.q.shape[-1]
    size = abs(trace.scale) * width * float(trace.q.abs().max()) * float(trace.k.abs().max())
    size += sum(float(x.abs().max()) for x in (trace.slopes, trace.sinks) if x is not None)
    if trace.bias is not None:
        size += float(torch.where(trace.bias.abs() > FILLED, 0.0, trace.bias).abs().max())
    u = tolerance.gamma(width, u_acc) + 2 * u_acc + 2 * tolerance.roundoff(precision.scores)
    spread = 2 * u * size + tolerance.gamma(keys, u_acc) + tolerance.roundoff(precision.weights)
    plain = float(trace.weights.abs().sum(-1).max()) * float(trace.v.abs().max())
    stored = tolerance.roundoff(precision.output) * float(trace.output.abs().max())
    largest = 2 * plain * (spread + tolerance.gamma(keys, u_acc)) + stored
    return largest + 1e-6 if spread < 1 and largest == largest else float("inf")


def bound(trace: Trace, pipeline: Pipeline, precision: Precision) -> Tensor:
    """The bound of a faulted pipeline's output; it goes where the output goes when heads are merged in disorder."""
    q, k, v, logits = (x.double() for x in (trace.q, trace.k, trace.v, trace.logits))
    weights = trace.weights.double().abs().nan_to_num()  # what is no softmax may be negative
    logits = torch.where((logits.abs() > FILLED) & logits.isfinite(), 0.0, logits)  # a filled-in number is exact
    bias = None if trace.bias is None else torch.where(trace.bias.abs() > FILLED, 0.0, trace.bias).double()
    output = trace.output.double().abs().nan_to_num()
    stored = tolerance.roundoff(precision.output) * output + tolerance.half_subnormal(precision.output)
    try:
        plain = weights @ v.abs()
        variants = trace.softcap, trace.slopes, trace.sinks
        bounds = tolerance.bounds(q, k, v, trace.scale, bias, logits, weights, plain, precision, *variants)
        merged: Tensor = pipeline.merge(bounds.output, torch.zeros_like(q))
    except RuntimeError:  # the blocks change shapes on the way: no more than the last rounding is allowed
        return stored
    return stored + merged.double().nan_to_num()


@torch.no_grad()
def diagnose(
    implementation: Implementation,
    problems: Iterable[Problem],
    *,
    otherwise: Iterable[Problem] = (),
    budget_s: float = 3.0,
) -> list[Diagnosis]:
    """The faults that explain what the implementation gives on the problems: all that do, or none.

    problems: those that failed first, then some that passed; both have to be reproduced. Faults without effect are
    never named.  otherwise: problems that are looked at in their place where nothing is wrong on them.
    After `budget_s` seconds what is still undecided is not named.
    """
    start = time.monotonic()
    problems, otherwise = list(problems), list(otherwise)
    faults = [fault for fault in CATALOGUE.values() if not fault.equivalent and fault.shows == "output"]
    telling = []
    for cases in _attempts(implementation, problems, start + budget_s / 2):
        if not any(case.differs for case in cases) or all(case.given_by(blocks.RIGHT) for case in cases):
            continue
        telling.append(cases)
        rounded = _rounded(cases)
        if rounded:
            return [Diagnosis(rounded, len(cases), len(cases))]
        if all(not case.problem.without_variants for case in cases if case.differs):  # the likelier ones first
            faults = sorted(faults, key=lambda fault: fault.theme != "variants")
        found = _alone(faults, cases, start + budget_s)
        if len(found) > 1:
            found = _apart(found, implementation, [*problems, *otherwise], start + budget_s) or found
        if found:
            return [Diagnosis(fault, len(cases), len(cases)) for fault in found]
    for cases in telling[:1]:
        found = _beside_empty_rows(implementation, faults, cases, start + budget_s)
        found = found or _pairs(faults, cases, start + budget_s)
        return [Diagnosis(fault, len(cases), len(cases)) for fault in found]
    return diagnose(implementation, otherwise, budget_s=budget_s / 2) if otherwise else []


def _attempts(implementation: Implementation, problems: list[Problem], deadline: float) -> Iterator[list[Case]]:
    """The problems in float64; failing that in their own dtype, against exact arithmetic and against the same."""
    problems = [p for p in problems if p.lengths is None]  # pipelines know of no packed samples
    small = list(dict.fromkeys(p for p in problems if 0 < p.batch * p.heads * p.q_len * p.kv_len <= LARGEST))
    exact = list(dict.fromkeys(p.replace(dtype="float64") for p in small))
    double = _cases(implementation, exact, deadline)
    wrong = any(case.differs for case in double)
    own: list[Case] = []
    if _numbers_where_nan(
        implementation, small, double
    ):  # float64 breaks in a way of its own, which is not what failed
        own = _cases(implementation, small, deadline)
        yield own
        yield [case.in_own_arithmetic() for case in own]
    if wrong:
        yield double
    inside = implementation.precision_for("float64").scores
    if wrong and len(double) == len(exact) and inside == "float64":
        return
    own = own or _cases(implementation, small, deadline)  # float64 is refused here or there, or nothing is wrong in it
    yield own
    yield [case.in_own_arithmetic() for case in own]


def _numbers_where_nan(implementation: Implementation, problems: list[Problem], double: list[Case]) -> bool:
    """Whether an answer is wrong, but a number, in the dtype of its problem, and NaN in float64."""
    nan = {case.problem: case.output.isnan() for case in double if case.differs and bool(case.output.isnan().any())}
    some = [problem for problem in problems if problem.replace(dtype="float64") in nan and problem.dtype != "float64"]
    return any(
        case.differs and bool((nan[case.problem.replace(dtype="float64")] & ~case.output.isnan()).any())
        for case in _cases(implementation, some[:LOOKED_AT], 0.0)
    )


def _cases(implementation: Implementation, problems: list[Problem], deadline: float) -> list[Case]:
    """What the implementation gives on the problems, in the order in which faults are tried on them."""
    meaning = implementation.conventions.meaning
    cases: list[Case] = []
    for problem in problems:
        if len(cases) >= FEWEST and time.monotonic() > deadline:
            break
        try:
            output = implementation(problem.arguments(meaning.alignment)).output.detach().cpu().double()
            arguments, right, empty, masked = _right(problem.replace(device="cpu"), meaning)
            if implementation.positional:
                seen = implementation.effective(problem.arguments(meaning.alignment))
                arguments, right, empty, masked = _answered(seen, meaning)
        except (Unsupported, Refused, Violation):
            continue
        precision = implementation.precision_for(problem.dtype)
        if output.shape != right.output.shape:
            continue
        differs = not tolerance.worst(output, right.output, bound(right, blocks.RIGHT, precision)).holds
        slack = SLACK if problem.dtype in ("float64", "float32") else HALF_SLACK
        cases.append(Case(problem, arguments, output, right.output, empty, masked, precision, meaning, slack, differs))
    return sorted(cases, key=lambda case: (not case.differs, case.problem.cost))


@lru_cache(maxsize=128)
def _right(problem: Problem, meaning: Meaning) -> tuple[Arguments, Trace, Tensor, Tensor]:
    """The arguments in float64, the right answer, the rows that see no key, and those to which the mask shows none."""
    return _answered(problem.arguments(meaning.alignment), meaning)


def _answered(arguments: Arguments, meaning: Meaning) -> tuple[Arguments, Trace, Tensor, Tensor]:
    arguments = arguments.double()
    right = blocks.run(arguments, meaning)
    masked = blocks.run(arguments.replace(causal=False), meaning) if arguments.causal else right
    return arguments, right, (right.logits == -torch.inf).all(-1), (masked.logits == -torch.inf).all(-1)


def _rounded(cases: list[Case]) -> Fault | None:
    """The fault of computing all in a half type: every number of every output is one, and most are near the right ones.

    How a sum of halves is rounded on the way is nobody's to repeat, so this can't be told by running its pipeline.
    """
    finite = [case for case in cases if bool(case.output.isfinite().all())]
    if 2 * len(finite) <= len(cases) or any(case.problem.dtype in HALVES for case in cases):
        return None
    wrong = [case for case in finite if case.differs]
    if not any(bool(case.output.count_nonzero() * 2 > case.output.numel()) for case in wrong):
        return None  # zero is a number of every type
    for name in HALVES:
        if all(torch.equal(case.output.to(DTYPES[name]).double(), case.output) for case in finite):
            near = sum(case.holds_in(Precision(name, name, name, name)) for case in wrong)
            return CATALOGUE[f"computed-in-{name}"] if 2 * near > len(wrong) else None
    return None


def _alone(faults: list[Fault], cases: list[Case], deadline: float) -> list[Fault]:
    """The faults that explain everything by themselves; failing that, those that do confined to some calls."""
    wrong, right = [c for c in cases if c.differs], [c for c in cases if not c.differs]
    whole: list[Fault] = []
    partly: list[Fault] = []
    for fault in faults:
        if time.monotonic() > deadline:
            break
        shared = _shared(fault, wrong)
        if shared:
            guards = [case.guards(fault.pipeline) for case in right]
            if any(all(guard in given for given in [shared, *guards]) for guard in GUARDS):
                whole.append(fault)
            elif not whole:
                partly += _confined(fault, wrong, right, guards, shared)
    return whole or partly


def _apart(found: list[Fault], implementation: Implementation, problems: list[Problem], deadline: float) -> list[Fault]:
    """Those of several faults that also give what it gave on extreme values, in the arithmetic of its own dtype."""
    extreme = [p for p in problems if p.values in ("large", "deep") and p.cost]
    cases = [case.in_own_arithmetic() for case in _cases(implementation, list(dict.fromkeys(extreme)), deadline)]
    return [fault for fault in found if all(case.guards(fault.pipeline_for(case.arguments)) for case in cases)]


def _shared(fault: Fault, cases: list[Case]) -> Guard:
    """The guards with which a fault explains all of the cases."""
    shared = ANY
    for case in cases:
        shared &= case.guards(fault.pipeline)
        if not shared:
            break
    return shared


def _confined(fault: Fault, wrong: list[Case], right: list[Case], guards: list[Guard], shared: Guard) -> list[Fault]:
    """A fault that explains all wrong answers, confined to calls on which it explains the right ones too."""
    inside = [case.arguments for case in wrong]
    for guard in (guard for guard in GUARDS if guard in shared):
        outside = [case.arguments for case, given in zip(right, guards, strict=True) if guard not in given]
        found = list(scopes_that(inside, outside))
        if found:
            return [confined(fault, scope) for scope in found[:CONFINED]]
    return []


def _beside_empty_rows(
    implementation: Implementation, faults: list[Fault], cases: list[Case], deadline: float
) -> list[Fault]:
    """Faults beside rows without keys that are NaN or the mean of V, as they are where nobody thought of them."""
    for contradiction in implementation.contradictions:
        if contradiction.field == "empty_rows":
            also = CATALOGUE[f"empty-rows-{contradiction.measured.value}"]
            meaning = implementation.conventions.replace(empty_rows=contradiction.measured).meaning
            found = _alone(faults, [case.under(meaning) for case in cases], deadline)
            return [both(f, also) if f.where is None and joinable(f, also) else f for f in found]
    return []


def _pairs(faults: list[Fault], cases: list[Case], deadline: float) -> list[Fault]:
    """Two faults at once: one that explains some of the wrong answers, and another for what is left."""
    wrong = [case for case in cases if case.differs]
    some = wrong[:: max(1, len(wrong) // PAIRED)]
    explained: dict[str, int] = {}
    for fault in faults:
        if time.monotonic() > deadline:
            return []
        explained[fault.id] = sum(case.given_by(fault.pipeline) for case in some)
    first = sorted((f for f in faults if explained[f.id]), key=lambda f: -explained[f.id])
    found: dict[frozenset[str], Fault] = {}
    for one in first:
        left = [case for case in wrong if not case.given_by(one.pipeline)]
        ordered = [*left, *(case for case in cases if case not in left)]
        for other in faults:
            if time.monotonic() > deadline:
                return list(found.values())
            if frozenset((one.id, other.id)) in found or one is other or not joinable(one, other):
                continue
            pair = both(one, other)
            if all(case.given_by(pair.pipeline) for case in ordered):
                found[frozenset((one.id, other.id))] = pair
    return list(found.values())
