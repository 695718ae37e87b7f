"""Five levels at which an attention turns to NaN, walked in the order of the computation.

L1 the projections, L2 the scores (they overflow, or hardly differ), L3 what goes into the softmax, L4 the weights,
L5 the output. The first level that is not finite holds the cause.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_spec.capture import Seen
from attn_spec.trace import flow
from attn_spec.trace.finding import Case, Finding

OVERFLOW = 1e4  # scores beyond this leave a softmax of one key, and float16 ends at 65504
CONSTANT = 0.01  # a standard deviation of scores below which all weights are equal to a percent


def judge(case: Case) -> Iterator[Finding]:
    """What is found at each level."""
    yield from _projections(case)
    yield from _scores(case)
    yield from _masked(case)
    yield from _weights(case)
    yield from _output(case)


def amount(x: Tensor) -> str:
    """How many numbers are NaN or infinite, in words; "" where none is."""
    counts = [
        (int(x.isnan().sum()), "NaN"),
        (int((x == torch.inf).sum()), "+inf"),
        (int((x == -torch.inf).sum()), "-inf"),
    ]
    return " and ".join(f"{n} {what}" for n, what in counts if n)


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _end_of(x: Tensor) -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    return f"{dtype} ends at {torch.finfo(x.dtype).max:.5g}"


# L1 ------------------------------------------------------------------------------------------------------------------


def _projections(case: Case) -> Iterator[Finding]:
    for name, seen in case.recording.arguments.items():
        if seen.value.is_floating_point() and seen.value.dim() > 1 and _is_mixed_in(case, seen) and amount(seen.value):
            yield case.finding("input", f"the input {name} already holds {amount(seen.value)}", level="L1")
    for name in "qkv":
        seen_ = case.core.projections.get(name)
        if seen_ is not None and amount(seen_.value):
            text = f"the projection to {name} holds {amount(seen_.value)}: {_why_projected(seen_)}"
            yield case.finding(f"{name} projected", text, f"{name} projected", level="L1")
        elif (x := case.core.tensor(name)) is not None and amount(x):
            text = (
                f"{name} holds {amount(x)}, its projection none" if seen_ is not None else f"{name} holds {amount(x)}"
            )
            yield case.finding(name, text, name, level="L1")


def _is_mixed_in(case: Case, seen: Seen) -> bool:
    """Whether an argument is something that attention is paid to, and not a mask or a bias."""
    sources = [case.core.seen[name] for name in "qkv" if name in case.core.seen]
    sources += [x for p in case.core.projections.values() if p.made_by for x in flow.operands(p.made_by)]
    return any(_comes_from(source, seen) for source in sources)


def _comes_from(source: Seen, seen: Seen) -> bool:
    return source is seen or any(taken is seen for _, taken in flow.line(source))


def _why_projected(seen: Seen) -> str:
    call = seen.made_by
    weight = flow.weight_of(call) if call is not None else None
    if call is None or weight is None:
        return "what it is made of overflows"
    called = weight.name or "the weight"
    if amount(weight.value):
        return f"{called} holds {amount(weight.value)}"
    bias = next((p for p in call.taken if p.parameter and p is not weight and amount(p.value)), None)
    if bias is not None:
        return f"{bias.name or 'the bias'} holds {amount(bias.value)}"
    x = next((t for t in flow.operands(call) if t is not weight), seen)
    if amount(x.value):
        return f"what is projected holds {amount(x.value)}"
    return f"{called} has std {float(weight.value.double().std()):.3g}, and {_end_of(seen.value)}"


# L2 ------------------------------------------------------------------------------------------------------------------


def _scores(case: Case) -> Iterator[Finding]:
    for field, block in (("logits", "scores"), ("scaled", "scaled")):
        x = case.core.tensor(field)
        if x is None:
            continue
        if bad := amount(x):
            if all(case.core.tensor(name) is None or not amount(case.core.seen[name].value) for name in "qk"):
                yield case.finding(
                    block, f"the {_called(field)} hold {bad}: {_why_overflow(case, x)}", field, level="L2"
                )
            return
        if field == "scaled" or "scaled" not in case.core.seen:
            if (top := _largest(x)) > OVERFLOW:
                text = f"the {_called(field)} reach {top:.4g}: the softmax leaves one key, and {_end_of(x)}"
                yield case.finding(block, text, field, level="L2", wrong=False)
            elif x.shape and x.numel() > 1 and (std := float(x.double().std())) < CONSTANT:
                text = f"the {_called(field)} hardly differ (std {std:.2g}), so all weights are nearly equal"
                yield case.finding(block, text, field, level="L2b", wrong=False)


def _called(field: str) -> str:
    return "scaled scores" if field == "scaled" else "scores"


def _why_overflow(case: Case, x: Tensor) -> str:
    core = case.core
    largest = [(name, _largest(core.seen[name].value)) for name in "qk" if name in core.seen]
    sizes = " and ".join(f"{name} reaches {size:.3g}" for name, size in largest)
    text = f"{sizes}, and {_end_of(x)}"
    loud = []
    for name in "qk":
        call = core.projections[name].made_by if name in core.projections else None
        weight = flow.weight_of(call) if call is not None else None
        if weight is not None and (std := float(weight.value.double().std())) > 2:
            loud.append(f"{weight.name or 'a weight'} has std {std:.3g}")
    if loud:
        return f"{text}; {' and '.join(dict.fromkeys(loud))}, and an initialisation is of the order of 0.02"
    q = core.q
    if q is not None and core.scale == 1:
        return f"{text}; they are not scaled (1/sqrt(d) would be {q.shape[-1] ** -0.5:.4g})"
    if q is not None and core.before == 1 and x.dtype in (torch.float16,):
        return f"{text}; they are scaled only after the product: multiply q by the scale before it"
    return text


# L3 ------------------------------------------------------------------------------------------------------------------


def _masked(case: Case) -> Iterator[Finding]:
    x = case.get("masked")
    if x is None or not x.numel():
        return
    earlier = [case.core.tensor(name) for name in ("logits", "scaled", "q", "k")]
    before_is_finite = all(t is None or not amount(t) for t in earlier)
    if before_is_finite and (bad := int(x.isnan().sum()) + int((x == torch.inf).sum())):
        mask = case.core.mask
        why = f"the mask itself holds {amount(mask)}" if mask is not None and amount(mask) else "masking made them"
        yield case.finding("masked", f"{bad} of the masked scores are NaN or +inf: {why}", "masked", level="L3")
        return
    if case.core.softmax_axis not in ("", "K"):
        return  # rows are not what is normalised, and another finding says so
    rows = (x == -torch.inf).all(-1)
    used = case.used
    if not rows.any() or used is None or used.shape[:-1] != rows.shape:
        return
    harmed = rows & used.isnan().any(-1)
    if harmed.any():
        first = [int(n) for n in harmed.nonzero()[0]]
        text = (
            f"{int(rows.sum())} of {rows.numel()} rows are -inf throughout, so their softmax is 0/0 = NaN; the first is"
            f" sample {first[0]}, head {first[1]}, query {first[2]}{_why_empty(case, rows)}"
        )
        yield case.finding("masked", text, "masked", level="L3")


def _why_empty(case: Case, rows: Tensor) -> str:
    mask, asked = case.core.mask, case.hidden_asked
    if mask is not None and mask.is_floating_point():
        lowest = torch.finfo(mask.dtype).min
        behind = [mask, *(taken.value for _, taken in flow.line(case.core.seen["mask"]))]
        if any((x == lowest).any() and not (x == -torch.inf).any() for x in behind):
            return "; two masks of finfo.min add up to -inf"
    if asked is not None and not asked.all(-1).expand_as(rows)[rows].any():
        return "; the mask that was asked for leaves keys to these rows, so it was broadcast or read wrongly"
    hidden = case.hidden
    if hidden is not None and bool((hidden.all(-1) | ~hidden.any(-1)).all()) and not hidden.all():
        return "; whole rows are hidden and nothing else: the mask of the keys stands on the axis of the queries"
    return "; give such a row 0, or mask with a finite number"


# L4 and L5 -----------------------------------------------------------------------------------------------------------


def _weights(case: Case) -> Iterator[Finding]:
    core = case.core
    masked, used = core.tensor("masked"), case.used
    if used is None or not used.numel():
        return
    field = "applied" if "applied" in core.seen else "weights"
    block = "weights used" if core.seen.get(field) is not core.seen.get("weights") else "weights"
    if core.softmax_axis not in ("", "K"):
        return
    if bad := amount(used):
        if masked is None or not (
            masked.isnan().any() or (masked == torch.inf).any() or _empty(masked, core.softmax_axis)
        ):
            yield case.finding(
                block, f"the weights hold {bad}, and what went into the softmax is finite", field, level="L4"
            )
        return
    if (used.abs() < 1e-8).all():
        text = "all weights are 0: everything is hidden, or they are masked or divided away after the softmax"
        yield case.finding(block, text, field, level="L4")
    elif used.shape[-1] > 1 and (used.amax(-1) > 1 - 1e-6).all() and _has_choice(case):
        text = "every row has one key of weight 1: the softmax is saturated, and no gradient passes"
        yield case.finding(block, text, field, level="L4", wrong=False)


def _empty(masked: Tensor, axis: str) -> bool:
    return bool((masked == -torch.inf).all(-1).any())


def _has_choice(case: Case) -> bool:
    """Whether each row but the first ones sees more than one key."""
    hidden = case.hidden
    return hidden is None or bool(((~hidden).sum(-1) > 1).any())


def _output(case: Case) -> Iterator[Finding]:
    core = case.core
    inside = [core.tensor(name) for name in ("q", "k", "v")]
    used = case.used
    if (used is not None and amount(used)) or any(x is not None and amount(x) for x in inside):
        return
    mixed = core.tensor("mixed")
    if mixed is not None and (bad := amount(mixed)):
        if used is None:
            text = f"the output of {core.call.name} holds {bad}, and q, k and v are finite; its inside can't be seen"
        else:
            reach = f"v reaches {_largest(core.v):.3g}, and {_end_of(mixed)}" if core.v is not None else "v overflows"
            text = f"the weighted sum holds {bad} though weights and v are finite: {reach}"
        yield case.finding("mixed", text, "mixed", level="L5")
        return
    output = core.tensor("output")
    if output is not None and mixed is not None and (bad := amount(output)):
        seen = core.seen["output"]
        why = (
            _why_projected(seen) if seen.made_by is not None and flow.weight_of(seen.made_by) else "made after the mix"
        )
        yield case.finding(
            "output", f"the output holds {bad}, and the weighted sum is finite: {why}", "output", level="L5"
        )
