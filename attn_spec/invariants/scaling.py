"""Scaling: the logits are multiplied by 1/sqrt(d_k) of one head, or by the scale that was given."""

from __future__ import annotations

import math

import torch

from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import (
    agrees,
    answer,
    arguments_for,
    needs_given,
    needs_plain,
    output,
    recovered,
    require_within,
)
from attn_spec.law import Advisory, Violation, law
from attn_spec.problem import Arguments, Problem

STEPS = (0.0, 1 / 64, 1 / 8, 1.0)  # logits of the four probe keys, in units of 2 sqrt(d_k)


def probe(arguments: Arguments) -> Arguments:
    """Four keys whose products with the last query are 0, 1/64, 1/8 and 1 times 2 sqrt(d_k)."""
    b, h, _, _ = arguments.sizes
    kv_heads, d = arguments.k.shape[1], arguments.q.shape[-1]
    direction = torch.ones(d, dtype=torch.float64) / d**0.5
    q = (direction * 2.0 * d**0.25).expand(b, h, 4, d)
    k = torch.stack([direction * step * d**0.25 for step in STEPS]).expand(b, kv_heads, 4, d)
    v = arguments.v[:, :, :1].expand(-1, -1, 4, -1)
    like = arguments.q
    return arguments.replace(
        q=q.to(like).contiguous(), k=k.to(like).contiguous(), v=v.contiguous(), mask=None, form=None
    )


def measured_scale(implementation: Implementation, arguments: Arguments) -> float | None:
    """The factor on the logits, from ln(p_a / p_b) / (q.k_a - q.k_b) of the last query; None if it can't be read."""
    probes = probe(arguments)
    weights, _ = recovered(implementation, probes)
    p = weights[0, 0, -1].double()
    products = (probes.q[0, 0, -1].double() @ probes.k[0, 0].double().mT).tolist()
    readings = []
    for n in range(1, len(STEPS)):
        if float(p[n]) > 1e-30 and float(p[0]) > 1e-30:
            readings.append((abs(math.log(p[n] / p[0])), math.log(p[n] / p[0]) / (products[n] - products[0])))
    good = [reading for reading in readings if reading[0] < 60]
    return max(good)[1] if good else None


def names_of(scale: float, p: Problem) -> list[str]:
    """What a measured scale equals, of the values that people use."""
    hidden, d, s = p.heads * p.head_dim, p.head_dim, p.scale
    known = {
        "1 (no scale)": 1.0,
        "1/d_k": 1 / d,
        "1/sqrt(d_k)": d**-0.5,
        "sqrt(d_k)": d**0.5,
        "d_k^(-1/4)": d**-0.25,
        "1/sqrt(hidden), hidden = heads x d_k": hidden**-0.5,
        "1/sqrt(hidden / kv_heads)": (hidden / p.kv_heads) ** -0.5,
        "1/sqrt(d_v)": p.v_dim**-0.5,
        "1/sqrt(heads)": p.heads**-0.5,
        "1/8, hard-wired for d_k = 64": 0.125,
        "1/sqrt(d_k) twice, 1/d_k": 1 / d,
    }
    if s:
        known |= {
            "the given scale": s,
            "1 / the given scale": 1 / s,
            "the given scale times 1/sqrt(d_k)": s * d**-0.5,
            "the given scale squared": s * s,
        }
    return [name for name, value in known.items() if abs(scale - value) <= 2e-3 * value]


def _scale_is(implementation: Implementation, problem: Problem, expected: float, what: str) -> None:
    arguments = arguments_for(implementation, problem)
    scale = measured_scale(implementation, arguments)
    if scale is None:
        raise Violation(f"the scale can't be measured: no two of the probe's weights are positive; {what} is expected")
    # weights are known to the output's roundoff, so their logarithm is known to about that much
    if abs(scale - expected) > 4 * torch.finfo(arguments.q.dtype).eps * max(1.0, abs(expected)) + 2e-3 * abs(expected):
        equal = names_of(scale, problem)
        is_ = f", which is {' = '.join(equal)}" if equal else ""
        raise Violation(
            f"the measured scale is {scale:.6g}{is_}; expected {what} = {expected:.6g} "
            f"(heads {problem.heads}, kv heads {problem.kv_heads}, d_k {problem.head_dim})",
            evidence={"received": scale, "expected": expected, "equals": equal},
            hint="multiply q @ k.mT by q.shape[-1] ** -0.5" if problem.scale is None else "multiply by the given scale",
            merge=f"scale:{equal[0]}" if equal else "scale",
        )


@law("ATN301", "default-scale", "The default scale is 1/sqrt(d_k) of one head")
def default_scale(implementation: Implementation, problem: Problem) -> None:
    """s_ij = q_i.k_j / sqrt(d_k); the scale is measured from the weights of four probe keys

    Why: at scale 1 the softmax saturates and its gradients vanish; with the wrong width it is blunt or sharp, and the
    model trains, a little worse.
    Example: sqrt(hidden) of the whole model, or hidden / kv_heads under grouped heads.
    """
    needs_plain(implementation)
    declared = implementation.conventions.meaning.scale
    _scale_is(implementation, problem, 1.0 if declared == "1" else problem.head_dim**-0.5, declared)


@law("ATN302", "explicit-scale", "A scale that is given is the one that is used")
def explicit_scale(implementation: Implementation, problem: Problem) -> None:
    """s_ij = scale q_i.k_j

    Why: a given scale that is ignored, inverted or applied on top of the default goes unseen at the default.
    Example: `scores / scale`; q scaled before a call that scales again.
    """
    assert problem.scale is not None
    _scale_is(implementation, problem, problem.scale, "the given scale")


@law("ATN303", "scale-and-bias", "The scale applies to q.k alone, not to a bias")
def scale_and_bias(implementation: Implementation, problem: Problem) -> None:
    """s_ij = scale q_i.k_j + bias_ij

    Why: a bias that is scaled too is sqrt(d_k) times too weak: position biases lose their effect.
    Example: `(q @ k.mT + bias) * scale`.
    """
    needs_given(implementation)
    agrees(implementation, problem)


@law("ATN304", "edge-scales", "With causal, a scale of zero or below is taken as it is", advisory=True)
def edge_scales(implementation: Implementation, problem: Problem) -> None:
    """scale = 0: uniform weights. scale < 0: the softmax of negated products (advisory, red when strict)

    Why: a mask of -inf that is scaled afterwards is +inf below 0, and NaN at 0.
    Example: torch's CPU kernel gives NaN for a scale of 0 with is_causal.
    """
    arguments = arguments_for(implementation, problem)
    try:
        require_within(answer(implementation, arguments).compare(output(implementation, arguments)), "output")
    except Violation as violation:
        raise Advisory(violation.message, evidence=violation.evidence, merge="edge-scales") from None


@law("ATN305", "scale-in-full", "The scale holds together with every other feature")
def scale_in_full(implementation: Implementation, problem: Problem) -> None:
    """the output of the oracle with a given scale, grouped heads, masks and the causal flag

    Why: flags that are dropped in combination are the commonest hard bug.
    Example: a fast path for causal that forgets the given scale.
    """
    agrees(implementation, problem)


@law("ATN306", "zero-scale", "A scale of zero or below is taken as it is")
def zero_scale(implementation: Implementation, problem: Problem) -> None:
    """scale = 0: uniform weights. scale < 0: the softmax of the negated products.

    Why: a learned temperature may pass through 0, and an ablation sets it there.
    Example: `scale = scale or q.shape[-1] ** -0.5`; a row maximum taken before a negative scale, which overflows.
    """
    agrees(implementation, problem)
