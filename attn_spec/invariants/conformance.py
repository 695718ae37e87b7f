"""Conformance: the output is the one that somebody else's standard stores for the same inputs."""

from __future__ import annotations

import dataclasses
import textwrap

from attn_spec import tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.conventions import Meaning
from attn_spec.invariants.comparison import answer, difference, evidence, needs_plain, output
from attn_spec.law import Unsupported, Violation, law
from attn_spec.onnx_cases import OnnxCase, OnnxProblem, named
from attn_spec.problem import TENSORS, Arguments, Problem
from attn_spec.tolerance import Worst


@law("ATN820", "onnx-conformance", "The output is the one that ONNX stores for a case of its Attention operator")
def onnx_conformance(implementation: Implementation, problem: Problem) -> None:
    """|out - stored| <= bound of the implementation + bound of the code that made the stored output

    Why: an oracle of one's own and what it judges may share a mistake; these inputs and outputs are other people's.
    Example: a window that counts the query's own key; causality aligned to the other end beside a cache.
    """
    if not isinstance(problem, OnnxProblem):
        raise Unsupported("not a case of ONNX")
    needs_plain(implementation)
    if not problem.unchanged:
        raise Unsupported("it can't be built for the sizes of this case, or is always causal")
    one, conventions = named(problem.case), implementation.conventions
    reason = one.differs(conventions.meaning)
    if reason:
        raise Unsupported(reason)
    arguments = one.asked(conventions.meaning, flag=conventions.causal.value != "never")
    if conventions.causal.value == "always" and not arguments.causal:
        raise Unsupported("always causal, with another alignment than this case")
    out = output(implementation, arguments)
    bound = one.bound + answer(implementation, one.asked(conventions.meaning, flag=arguments.causal)).bounds.output
    worst = tolerance.worst(out, one.output.double(), bound)
    if not worst.holds:
        raise Violation(
            f"{one.name}: {difference(worst, 'output')} by ONNX",
            evidence={**evidence(worst), "onnx_case": one.name},
            reproducer=script(implementation, one, arguments, worst),
        )


def script(implementation: Implementation, one: OnnxCase, arguments: Arguments, worst: Worst) -> str:
    """A script that makes the call on the case and compares the element that is furthest off."""
    meaning = implementation.conventions.meaning
    held = {f.name: getattr(meaning, f.name) for f in dataclasses.fields(meaning)}
    said = ", ".join(f"{name}={value!r}" for name, value in held.items() if value != getattr(Meaning, name))
    flag = "" if arguments.causal or not one.causal else ", flag=False"
    tensors = [name for name in TENSORS if getattr(arguments, name) is not None]
    element = ", ".join(map(str, worst.index))
    title = f"{one.name}: {difference(worst, 'output')} by ONNX"
    return "\n".join(
        [
            *(f"# {line}" for line in textwrap.wrap(title, 112, break_long_words=False)),
            "import torch",
            "from attn_spec.conventions import Meaning",
            "from attn_spec.onnx_cases import named",
            implementation.import_line or "impl = ...  # your function",
            "",
            f"case = named({one.name!r})",
            f"a = case.asked(Meaning({said}){flag})",
            f"{', '.join(tensors)} = {', '.join(f'a.{name}' for name in tensors)}",
            f"out = {implementation.adapter.source(arguments)}",
            "out = out[0] if isinstance(out, tuple) else out",
            f"got, stored = out[{element}].item(), case.output[{element}].item()",
            f"assert abs(got - stored) <= {worst.bound:.3g}, f'{{got}}, and ONNX stores {{stored}}'",
            "",
        ]
    )
