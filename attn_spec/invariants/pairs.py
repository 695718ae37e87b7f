"""Modules that take a representation of pairs of tokens beside the hidden states, of which a bias is made."""

from __future__ import annotations

import dataclasses

import torch

from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.hidden import hidden_call
from attn_spec.law import Refused, Unsupported, Violation, law
from attn_spec.problem import Problem
from attn_spec.tolerance import roundoff


@law("ATN658", "pair-bias", "What a pair of tokens says reaches the first of the two alone", of_modules=True)
def pair_bias(implementation: Implementation, problem: Problem) -> None:
    """z [B, S, S, P] changed at (b, i, j), i /= j  =>  y_i of sample b changes and no other

    Why: the bias of query i and key j is made from z_ij; transposed, the model learns every relation backwards.
    Example: `linear(z).permute(0, 3, 2, 1)` added to scores [B, H, Sq, Sk].
    """
    call = hidden_call(implementation, problem)
    name, width = call.pairs
    if not name:
        raise Unsupported("takes no representation of pairs")
    b, s = call.x.shape[:2]
    if s < 4 or call.like.causal or implementation.conventions.causal.value == "always":
        raise Unsupported("a pair is hidden by causality, or there are too few")
    g = torch.Generator().manual_seed(problem.seed + 3)
    z = torch.randn(b, s, s, width, generator=g, dtype=torch.float64).to(call.x.dtype)
    changed, i, j = z.clone(), 1, s - 1
    changed[0, i, j] += 3.0 * torch.randn(width, generator=g, dtype=torch.float64).to(z.dtype)
    try:
        before, after = (
            dataclasses.replace(call, named={**call.named, name: y}).run()[0].detach() for y in (z, changed)
        )
    except (Refused, Violation) as error:
        raise Unsupported(f"it takes no pairs [B, S, S, {width}]: {error}") from None
    room = 64 * roundoff(problem.dtype) * float(before.double().abs().max())
    moved = ((after - before).double().abs() > room).any(-1)
    if not bool(moved.any()):
        raise Unsupported("the pairs change nothing at first")
    expected = torch.zeros_like(moved)
    expected[0, i] = True
    if not torch.equal(moved, expected):
        places = [tuple(place) for place in moved.nonzero().tolist()]
        raise Violation(
            f"a change of {name}[0, {i}, {j}] moves the output of (sample, token) {places[:4]}, expected [(0, {i})]",
            evidence={"expected": [[0, i]], "received": [list(place) for place in places]},
            hint="the scores are [B, H, queries, keys]: bring the bias there with `permute(0, 3, 1, 2)`",
            merge="pair-bias",
        )
