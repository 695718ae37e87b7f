"""Numerics: the output is within the derived bound, whatever the dtype and the size of the numbers."""

from __future__ import annotations

from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import agrees
from attn_spec.law import Advisory, Violation, law
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


@law("ATN804", "value-sizes", "Tiny and huge values are averaged as exactly as others")
def value_sizes(implementation: Implementation, problem: Problem) -> None:
    """v of 2^-20 and of 2^10 times the usual size: the same relative bound, and half a subnormal

    Why: an epsilon, a threshold or an absolute tolerance that suits values near 1 swallows small ones whole.
    Example: `p / (p.sum(-1) + 1e-6)`; weights below 1e-3 dropped.
    """
    agrees(implementation, problem)


@law("ATN805", "long-rows", "A row of two thousand keys is averaged in full")
def long_rows(implementation: Implementation, problem: Problem) -> None:
    """Sk = 2000, nearly equal weights and sharp ones

    Why: sums kept in a half type stop growing at a few hundred equal terms; a bound for long rows hides a lost block.
    Example: a running sum in bfloat16.
    """
    agrees(implementation, problem)


@law("ATN806", "half-range", "Products beyond the range of float16 are scaled before they overflow", advisory=True)
def half_range(implementation: Implementation, problem: Problem) -> None:
    """q.k beyond 65,504, scaled logits within it: no NaN (advisory, red when strict)

    Why: eager code in float16 that scales after the product gives inf - inf = NaN on such rows.
    Example: `(q @ k.mT) * scale` in float16; `(q * scale) @ k.mT` holds four to sixteen times as much.
    """
    try:
        agrees(implementation, problem)
    except Violation as violation:
        raise Advisory(violation.message, evidence=violation.evidence, merge="half-range") from None


@law("ATN807", "features-together", "Every pair of features holds together")
def features_together(implementation: Implementation, problem: Problem) -> None:
    """|out - exact| <= bound on problems in which dtype, heads, lengths, mask, scale, strides and values are combined

    Why: each feature has a branch of its own, which is tried alone; what is wrong is where two branches meet.
    Example: a bias [H, Sq, Sk] that is laid over kv heads, and not query heads, once heads are grouped.
    """
    agrees(implementation, problem)
