"""Which fault around its attention a module has: the one that, with the module's own weights, gives what it gave.

As in `attn_spec.faults.diagnosis`, a fault has to give the output on the problems that failed and on those that held.
What no output shows (a dropout in eval mode, a gradient that is lost) is named by the law that it breaks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_spec import module_blocks, tolerance, whole
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.hidden import HiddenCall, hidden_call
from attn_spec.engine import CheckResult
from attn_spec.faults.diagnosis import Diagnosis
from attn_spec.faults.modules import MODULE_FAULTS, ModuleFault
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.module_blocks import ModulePipeline
from attn_spec.problem import Problem

ANSWERS = {"ATN650": False, "ATN652": True}  # laws of the whole answer; whether a context is given
MOST = 8  # problems that are looked at
FAR_REACHING = ("state-kept", "mask-kept", "values-rotated")  # which make other laws fail too, any of them
SLACK = 16.0  # the bound is that of the right module; a faulted one may be that much looser


@torch.no_grad()
def diagnose_module(implementation: Implementation, results: Sequence[CheckResult]) -> list[Diagnosis]:
    """The faults that explain what a module gives on hidden states; else those whose law it breaks."""
    answers = [r for r in results if r.code in ANSWERS]
    wrong = list(dict.fromkeys((r.problem, ANSWERS[r.code]) for r in answers if r.outcome == "failed"))[:MOST]
    right = list(dict.fromkeys((r.problem, ANSWERS[r.code]) for r in answers if r.outcome == "passed"))[:MOST]
    failed, held = ([case for p in found if (case := _case(implementation, *p))] for found in (wrong, right))
    cases = [*failed, *held]
    if failed:
        found = [one for one in MODULE_FAULTS.values() if not one.told_by and all(_gives(one, case) for case in cases)]
        if found:
            return [Diagnosis(one, len(cases), len(cases)) for one in found]
    return _told(results)


def _told(results: Sequence[CheckResult]) -> list[Diagnosis]:
    broken = [r.merge for r in results if r.outcome == "failed"]
    told = [
        one for one in MODULE_FAULTS.values() if (one.told_by or one.id) in broken
    ]  # some are seen for what they are
    counts = {
        one.id: len(broken) if one.told_by in FAR_REACHING else broken.count(one.told_by or one.id) for one in told
    }
    return [Diagnosis(one, counts[one.id], counts[one.id]) for one in told]


class Case:
    """One problem: the call, the weights, what the module gave, and the right answer with its bound."""

    def __init__(self, implementation: Implementation, call: HiddenCall, weights: dict[str, Tensor]) -> None:
        self.call, self.weights, self.meaning = call, weights, implementation.conventions.meaning
        precision = implementation.precision_for(call.dtype)
        self.right = whole.answer(call.x, call.context, weights, call.like, self.meaning, precision)
        self.output = call.run()[0].detach().double()

    def of(self, pipeline: ModulePipeline) -> Tensor | None:
        """What a pipeline gives with these weights; None where it can't be run."""
        x, context = self.call.x.double(), self.call.context
        context = None if context is None else context.double()
        try:
            y, _ = module_blocks.run(x, context, self.weights, self.call.like.double(), self.meaning, pipeline)
        except (RuntimeError, IndexError, ValueError, KeyError):
            return None
        return y


def _case(implementation: Implementation, problem: Problem, with_context: bool) -> Case | None:
    try:
        call = hidden_call(implementation, problem, with_context=with_context)
        weights = call.weights()
        return Case(implementation, call, weights) if weights else None
    except (Unsupported, Refused, Violation, RuntimeError):
        return None


def _gives(one: ModuleFault, case: Case) -> bool:
    expected = case.of(one.pipeline)
    if expected is None or expected.shape != case.output.shape:
        return False
    bound = case.right.bound
    if bound.shape != expected.shape:
        bound = torch.full_like(expected, float(bound.max()))
    return tolerance.worst(case.output, expected, SLACK * torch.maximum(bound, bound.mean())).holds
