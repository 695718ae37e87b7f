"""Variants that a module is built with or has inside: that they are used, and that ALiBi has its slopes.

What a variant does to the output is judged as that of a function is (`attn_spec.invariants.variants`): the constructor
is given what the problem asks for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_spec import values
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.adapter import ModuleAdapter
from attn_spec.adapters.modules.variants import PARAMETERS
from attn_spec.invariants.comparison import arguments_for, output
from attn_spec.law import Advisory, Unsupported, Violation, law
from attn_spec.problem import Problem

HELD = 2.0**-8  # of a slope, which may be kept in bfloat16


def _adapter(implementation: Implementation) -> ModuleAdapter:
    adapter = implementation.adapter
    if not isinstance(adapter, ModuleAdapter) or adapter.module is None or not adapter.module.projections.whole:
        raise Unsupported("its projections were not found")
    return adapter


@law("ATN782", "variant-used", "A variant that a module is built with changes its output", of_modules=True)
def variant_used(implementation: Implementation, problem: Problem) -> None:
    """f with a softcap of 1, a window of three keys, slopes or sinks  !=  f without, on the same q, k and v

    Why: an argument that is stored and not handed on looks like a feature, and every check at its default passes.
    Example: `attn_logit_softcapping` in a config, and a call of attention that leaves it out.
    """
    adapter = _adapter(implementation)
    arguments = arguments_for(implementation, problem)
    asked = {"softcap": arguments.softcap, "window": arguments.window, "alibi": arguments.alibi}
    asked["sinks"] = arguments.sinks
    ((role, _),) = [(role, value) for role, value in asked.items() if value is not None]
    assert adapter.module is not None
    name = adapter.module.variants.get(role, "")
    given = adapter.asked(arguments).get(PARAMETERS[role]) if name else None
    if not name:
        raise Unsupported(adapter.why_not(role))
    plain = arguments.replace(softcap=None, window=None, alibi=None, sinks=None)
    if torch.equal(output(implementation, arguments), output(implementation, plain)):
        how = f"as {name} = {given!r}" if isinstance(given, (int, float)) else f"as {name}"
        raise Violation(
            f"{role} was given {how} and changes nothing",
            evidence={"argument": name, "given": given if isinstance(given, (int, float)) else str(given)},
            hint=f"hand {name} on to where attention is computed, or do not take it",
            merge=f"{role}-unused",
        )


@law(
    "ATN724",
    "alibi-inside",
    "ALiBi inside a module has the slopes 2^(-8 h / H), and takes from what is far away",
    of_modules=True,
)
def alibi_inside(implementation: Implementation, problem: Problem) -> None:
    """b_hij - b_hii = -2^(-8 h / H) (i - j) for the keys before a query; what lies after it is not looked at

    Why: the other sign favours what is far away, and slopes of another head or rule are those of no trained model.
    Example: `slopes * (i - j)` added; exponents from 0 on. Where H is no power of two, rules differ (advisory).
    """
    adapter = _adapter(implementation)
    assert adapter.module is not None
    arguments, named = arguments_for(implementation, problem), dict[str, Any]()
    if "alibi" in adapter.module.variants:
        named[PARAMETERS["alibi"]] = values.standard_slopes(problem.heads)
    elif implementation.biased != "alibi":
        raise Unsupported("no ALiBi inside")
    bias = adapter.own_bias(arguments, **named)[0].double()
    n = bias.shape[-1]
    added = bias - bias.diagonal(dim1=-2, dim2=-1)[..., None]
    distance = torch.arange(n, dtype=torch.float64)[:, None] - torch.arange(n, dtype=torch.float64)
    past = distance > 0
    found = torch.stack([(head[past] / distance[past]).mean() for head in added])
    straight = ((added - found[:, None, None] * distance).abs() <= HELD * found.abs()[:, None, None] * distance)[
        :, past
    ]
    expected = -values.standard_slopes(len(found)).double()
    kind = Violation if len(found) & (len(found) - 1) == 0 else Advisory
    if not bool(straight.all()):
        head = int((~straight).any(-1).nonzero()[0])
        raise kind(
            f"what is added in head {head} is not in proportion to the distance: {_shown(added[head, -1].flip(0))} for "
            f"0, 1, 2 ... keys back",
            evidence={"head": head, "received": added[head, -1].tolist()},
            merge="alibi-slopes",
        )
    if _same(found, expected):
        return
    head = int(((found - expected).abs() / expected.abs()).argmax())
    merge, hint = _cause(found, expected)
    raise kind(
        f"head {head} of {len(found)} adds {found[head]:+.4g} for each key further back, expected "
        f"{expected[head]:+.4g} = -2^(-8 h / H); the heads add {_shown(found)}",
        evidence={"head": head, "received": found.tolist(), "expected": expected.tolist()},
        hint=hint,
        merge=merge,
    )


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool(((found - expected).abs() <= HELD * expected.abs()).all())


def _cause(found: Tensor, expected: Tensor) -> tuple[str, str]:
    """The key by which a fault is told, and a hint."""
    if _same(-found, expected):
        return "alibi-sign", "take the distance times the slope off the scores"
    if _same(found.flip(0), expected):
        return "alibi-heads", "the first head has the steepest slope"
    return "alibi-slopes", "the slopes are 2^(-8 h / H) for h = 1 ... H, whatever the scale of the scores"


def _shown(numbers: Tensor) -> str:
    return ", ".join(f"{x:+.4g}" for x in numbers[:8].tolist())
