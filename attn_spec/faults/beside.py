"""Faults that no output shows: in the log-sum-exp that is returned beside it, and in the gradients.

As `attn_spec.faults.diagnosis` does with outputs: a fault is named when its log-sum-exp, or its backward pass, gives
what the implementation gave on every problem, on those where that is right and on those where it is wrong; failing
that, one that does so confined to calls of one kind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_spec import blocks, oracle, tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.backward import RIGHT, Cotangents
from attn_spec.faults import CATALOGUE, Fault
from attn_spec.faults.diagnosis import CONFINED, HALF_SLACK, LARGEST, SLACK, Diagnosis
from attn_spec.faults.scope import confined, scopes_that
from attn_spec.invariants.differentiation import cotangents_for, differentiate, names_of
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import Arguments, Problem

MOST = 24  # problems that are looked at
FEWEST = 4  # answers that are waited for


@dataclass(frozen=True, eq=False)
class Seen:
    """What was seen on one call: `differs` from what is right; `given_by` tells whether a fault gives it."""

    arguments: Arguments
    differs: bool
    given_by: Callable[[Fault], bool]


def diagnose_beside(
    implementation: Implementation, problems: Iterable[Problem], *, budget_s: float = 3.0
) -> list[Diagnosis]:
    """The faults of the log-sum-exp, or else of the gradients, that explain what is given on the problems.

    problems: those that failed first. After `budget_s` seconds what is still undecided is not named.
    """
    start = time.monotonic()
    problems = [p for p in problems if p.lengths is None]
    small = [p for p in problems if 0 < p.batch * p.heads * p.q_len * p.kv_len <= LARGEST // 8]
    for shows, look in (("lse", _lse), ("gradients", _gradients)):
        faults = [f for f in CATALOGUE.values() if f.shows == shows and not f.equivalent]
        seen: list[Seen] = []
        for place, problem in enumerate(small):
            late = time.monotonic() > start + budget_s * (0.3 if shows == "lse" else 0.7)
            if len(seen) >= MOST or (late and len(seen) >= FEWEST):
                break
            for tried in (problem.replace(dtype="float64"), problem):
                try:
                    found = look(implementation, tried, place)
                except (Unsupported, Refused, Violation):
                    continue
                seen.append(found)
                break
        if any(one.differs for one in seen):
            named = _named(faults, seen, start + budget_s)
            return [Diagnosis(fault, len(seen), len(seen)) for fault in named]
    return []


def _named(faults: list[Fault], seen: list[Seen], deadline: float) -> list[Fault]:
    wrong, right = [one for one in seen if one.differs], [one for one in seen if not one.differs]
    whole: list[Fault] = []
    partly: list[Fault] = []
    for fault in faults:
        if time.monotonic() > deadline:
            break
        if not all(one.given_by(fault) for one in wrong):
            continue
        beyond = [one.arguments for one in right if not one.given_by(fault)]
        if not beyond:
            whole.append(fault)
        else:
            scopes = list(scopes_that([one.arguments for one in wrong], beyond))
            partly += [confined(fault, scope) for scope in scopes[:CONFINED]]
    return whole or partly


def _slack(problem: Problem) -> float:
    return SLACK if problem.dtype in ("float64", "float32") else HALF_SLACK


def _lse(implementation: Implementation, problem: Problem, place: int) -> Seen:
    meaning = implementation.conventions.meaning
    arguments = problem.arguments(meaning.alignment).replace(returns="lse")
    got = implementation(arguments).lse
    if got is None:
        raise Unsupported("no log-sum-exp is returned")
    got = got.detach().double()
    exact = oracle.answer(arguments, meaning, implementation.precision_for(problem.dtype))
    bound = exact.bounds.lse + 2 * tolerance.roundoff("float32") * exact.lse.nan_to_num(posinf=0.0, neginf=0.0).abs()
    empty = torch.tensor(float(implementation.conventions.lse_empty.value), dtype=torch.float64)

    def same(lse: Tensor) -> bool:
        return tolerance.worst(got, lse, _slack(problem) * bound).holds

    def given_by(fault: Fault) -> bool:
        return same(blocks.run(arguments.double(), meaning, fault.pipeline).lse)

    right = torch.where(exact.lse == -torch.inf, empty, exact.lse)
    return Seen(arguments, not same(right), given_by)


def _gradients(implementation: Implementation, problem: Problem, place: int) -> Seen:
    """A backward pass: now and then with a cotangent that is transposed, or with one for the log-sum-exp too."""
    meaning = implementation.conventions.meaning
    arguments = problem.arguments(meaning.alignment)
    given, names = cotangents_for(problem, lse=place % 3 == 2), names_of(arguments)
    if place % 3 == 1:
        given = Cotangents(given.output.transpose(1, 2).contiguous().transpose(1, 2))
    try:
        grads, _ = differentiate(implementation, arguments, given, names)
    except Unsupported:
        if given.lse is None:
            raise
        given = cotangents_for(problem)
        grads, _ = differentiate(implementation, arguments, given, names)
    precision = implementation.precision_for(problem.dtype)
    right = oracle.derivative(arguments, meaning, precision, given)
    if right.empty and meaning.empty_rows != "zero":
        raise Unsupported("a row with no visible key is not zero")

    def same(other: oracle.Derivative) -> bool:
        for name, got in zip(names, grads, strict=True):
            expected, bound = getattr(other.gradients, name), getattr(other.bounds, name)
            room = _slack(problem) * bound.nan_to_num(nan=0.0)
            if other is not right:  # weights beyond 1, where hidden keys are seen, lose more than the bound knows of
                coarsest = "float32" if arguments.alibi is not None else precision.scores  # slopes come in float32
                room = room + 64 * tolerance.roundoff(coarsest) * expected.abs().nan_to_num().amax()
            if not tolerance.worst(got, expected, room).holds:
                return False
        return True

    def given_by(fault: Fault) -> bool:
        try:
            changed = fault.backward_for(arguments)
            if changed is RIGHT:
                return same(right)
            return same(oracle.derivative(arguments, meaning, precision, given, changed=changed))
        except (RuntimeError, IndexError, ValueError):
            return False

    return Seen(arguments, not same(right), given_by)
