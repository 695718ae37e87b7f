"""Numerics: the output is within the derived bound, whatever the dtype and the size of the numbers."""

from __future__ import annotations

from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import agrees
from attn_spec.law import law
from attn_spec.problem import Problem


@law("ATN801", "within-the-bound", "Every element is within the error bound of its dtype")
def within_the_bound(implementation: Implementation, problem: Problem) -> None:
    """|out - exact| <= bound, element by element, exact in float64 on the same rounded inputs

    Why: a fixed tolerance that lets honest bfloat16 through lets a dropped key through as well.
    Example: sums kept in bfloat16, which lose a key of small weight.
    """
    agrees(implementation, problem)


@law("ATN802", "large-logits", "Large logits overflow nowhere")
def large_logits(implementation: Implementation, problem: Problem) -> None:
    """logits of spread 60: exp(s) overflows, exp(s - max) does not

    Why: early in training and after a bad step logits are large; a NaN there is the end of the run.
    Example: a softmax without the row maximum taken off.
    """
    agrees(implementation, problem)


@law(
    "ATN803", "fuzzed", "The output is right on any problem, whatever its sizes, mask, dtype, scale, strides and values"
)
def fuzzed(implementation: Implementation, problem: Problem) -> None:
    """|out - exact| <= bound on problems that are drawn at random (`attn_spec.strategies`)

    Why: a chosen list of problems holds the combinations that somebody thought of.
    Example: grouped heads, a mask [Sq, Sk] and Sk = 65, each of which is right alone.
    """
    agrees(implementation, problem)
