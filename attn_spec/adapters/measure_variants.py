"""What is measured about windows, slopes, caps and the log-sum-exp, by small probe calls.

Each probe answers None where the implementation would not run it or the answer is no clear one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_spec import masks, oracle
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.measure import BASE, assuming, recovered_weights
from attn_spec.conventions import CHOICES
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import candidates


def window(implementation: Implementation) -> str | None:
    """What a window is said by: a pair, or one number and which keys that counts."""
    problem = implementation.fit(BASE.replace(q_len=9, kv_len=9, head_dim=16, v_dim=16))
    j, i = torch.arange(9), torch.arange(9)[:, None]
    seen = {
        "pair": (j >= i - 2) & (j <= i + 1),
        "count": j > i - 3,
        "left": j >= i - 3,
        "count-both": (i - j).abs() < 3,
        "left-both": (i - j).abs() <= 3,
    }
    asked = {"pair": (2, 1), "count": (2, None)}
    always = implementation.conventions.causal.value == "always"
    for kind, bounds in asked.items():
        arguments = problem.arguments().replace(window=bounds, causal=always)
        w = recovered_weights(assuming(implementation, window=kind), arguments)
        if w is None or bool(w.isnan().any()):
            continue
        past = torch.ones(9, 9, dtype=torch.bool).tril() if always else torch.ones(9, 9, dtype=torch.bool)
        for name in ["pair"] if kind == "pair" else ["count", "left", "count-both", "left-both"]:
            if bool(((w.abs() > 1e-9) == (seen[name] & past)).all()):
                return name
        behind = [n for n in ("count", "left") if bool(((w.abs() > 1e-9) == (seen[n] & (j <= i))).all())]
        if behind:  # it hides the future as well
            return behind[0]
    return None


def goes_by_distance(implementation: Implementation) -> bool:
    """Whether the keys that one number leaves visible go by their distance from the query, or are all there are."""
    problem = implementation.fit(BASE.replace(q_len=9, kv_len=9, head_dim=16, v_dim=16))
    always = implementation.conventions.causal.value == "always"
    arguments = problem.arguments().replace(window=(2, None), causal=always)
    w = recovered_weights(assuming(implementation, window="count"), arguments)
    if w is None or bool(w.isnan().any()):
        return False
    seen = (w.abs() > 1e-9).all(1).all(0)
    return bool((seen[1:, 1:] == seen[:-1, :-1]).all())


def by_oracle(implementation: Implementation, field: str, problems: Sequence[Problem]) -> str | None:
    """The one value of a convention under which the oracle gives what the implementation gives."""
    for problem in map(implementation.fit, problems):
        arguments = problem.arguments(implementation.conventions.meaning.alignment)
        try:
            out = implementation(arguments).output
        except (Unsupported, Refused, Violation):
            continue
        fits = []
        for value in CHOICES[field]:
            meaning = assuming(implementation, **{field: value}).conventions.meaning
            right = oracle.answer(implementation.effective(arguments), meaning, candidates("float32")[0])
            if out.shape == right.output.shape and right.compare(out).ratio <= 8:
                fits.append(value)
        if len(fits) == 1:
            return fits[0]
    return None


def _also_causal(implementation: Implementation, *problems: Problem) -> list[Problem]:
    """The problems as an implementation that is causal always takes them."""
    always = implementation.conventions.causal.value == "always"
    return [p.replace(mask=(*p.mask, masks.Causal())) if always else p for p in problems]


ACROSS = BASE.replace(q_len=3, kv_len=6)


def window_alignment(implementation: Implementation) -> str | None:
    """top-left or bottom-right, from the output under a window or slopes with Sq = 3, Sk = 6."""
    parts = masks.Window(1, 0), masks.Window(1), masks.Window(1, 1), masks.Alibi()
    problems = [ACROSS.replace(mask=(part,)) for part in parts]
    flagged = [
        p.replace(mask=(masks.Causal(), *p.mask)) for p in problems if implementation.conventions.causal.value == "flag"
    ]
    return by_oracle(implementation, "window_alignment", [*_also_causal(implementation, *problems), *flagged[1:2]])


def alibi(implementation: Implementation) -> str | None:
    """Whether slopes multiply distances, or signed differences of positions."""
    return by_oracle(implementation, "alibi", [BASE.replace(mask=(masks.Alibi(),))])


def softcap_order(implementation: Implementation) -> str | None:
    """Whether the cap comes before what is added to the logits, or after it."""
    capped = BASE.replace(softcap=2.0)
    biased = capped.replace(mask=(masks.Bias("BHQK"),), delivery=masks.Delivery("additive"))
    problems = _also_causal(implementation, biased, capped.replace(mask=(masks.Alibi(),)))
    return by_oracle(implementation, "softcap_order", problems)


def _lse(implementation: Implementation, problem: Problem) -> tuple[Tensor, Arguments] | None:
    """The log-sum-exp that is returned beside the output; None where none is."""
    alignment = implementation.conventions.meaning.alignment
    (asked,) = _also_causal(implementation, problem)
    arguments = asked.arguments(alignment).replace(returns="lse")
    try:
        lse = implementation(arguments).lse
    except (Unsupported, Refused, Violation):
        return None
    return None if lse is None else (lse.double(), arguments)


def lse_base(implementation: Implementation) -> str | None:
    """The base of the log-sum-exp that is returned beside the output; None where it is no log-sum-exp."""
    found = _lse(assuming(implementation, lse_base="e"), BASE)
    if found is None:
        return None
    lse, arguments = found
    right = oracle.answer(arguments, implementation.conventions.meaning, candidates("float32")[0]).lse
    for base, factor in (("e", 1.0), ("2", 1.4426950408889634), ("10", 0.4342944819032518)):
        if bool(((lse - factor * right).abs() < 1e-3).all()):
            return base
    return None


def lse_empty(implementation: Implementation) -> str | None:
    """The log-sum-exp of a row that sees no key: -inf, +inf, or None for anything else."""
    masked = BASE.replace(mask=(masks.Visible("QK", empty_rows=(2,)),), delivery=masks.Delivery(shape="BHQK"))
    longer = BASE.replace(q_len=6, mask=(masks.Causal("bottom-right"),))
    aligned = implementation.conventions.alignment.value == "bottom-right"
    for problem, row in ((masked, 2), *([(longer, 0)] if aligned else [])):
        found = _lse(implementation, problem)
        if found is not None:
            value = found[0][:, :, row]
            return "-inf" if bool(value.isneginf().all()) else "+inf" if bool(value.isposinf().all()) else None
    return None


def lse_sinks(implementation: Implementation) -> str | None:
    """Whether the sink counts in the log-sum-exp."""
    found = _lse(implementation, BASE.replace(sinks=True))
    if found is None:
        return None
    lse, arguments = found
    for value in CHOICES["lse_sinks"]:
        meaning = assuming(implementation, lse_sinks=value).conventions.meaning
        right = oracle.answer(arguments, meaning, candidates("float32")[0]).lse
        if bool(((lse - right).abs() < 1e-3).all()):
            return value
    return None
