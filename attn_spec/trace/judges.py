"""What else can be wrong in a trace: scale, axis, masks, sums of rows, equal weights, dropout, reversed axes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec.trace import flow, heads, nan_tree
from attn_spec.trace.core import is_dropout
from attn_spec.trace.finding import Case, Finding
from attn_spec.trace.search import MASKINGS

UNIFORM = 0.999  # entropy of a row as a share of log n, from which on its weights are called equal
ALIKE = 0.8  # cosine of q and k rows beyond which the two hardly differ
LEAK = 1e-6  # a weight that a hidden key must not have


def judge(case: Case) -> list[Finding]:
    """Everything that is found in one attention, in the order of the computation."""
    found = [*nan_tree.judge(case), *heads.judge(case)]
    for part in (_axes, _dropout, _scale, _equal, _softmax_axis, _masking, _rows):
        found += part(case)
    return sorted(found, key=lambda finding: finding.place)


def _axes(case: Case) -> Iterator[Finding]:
    for name in "qkv":
        if name in case.core.seen and (call := flow.has_axes_reversed(case.core.seen[name])) is not None:
            shape = list(call.taken[0].shape)
            text = f"`.T` of {name}, of shape {shape}, reverses all its axes: `.mT` is meant"
            yield Finding(name, text, where=call.where.quoted, core=case.index)


def _dropout(case: Case) -> Iterator[Finding]:
    for call, _ in [(case.core.call, None), *case.core.steps_to_mix]:
        if probability := is_dropout(call):
            text = f"dropout drops weights with probability {probability:g}"
            wrong = not case.recording.training
            text += ", and this is no training: pass `training=self.training`, or nn.Dropout" * wrong
            block = "mixed" if call is case.core.call else "weights used"
            yield Finding(block, text, wrong, "", call.where.quoted, case.index)


# the scale -----------------------------------------------------------------------------------------------------------


def _scale(case: Case) -> Iterator[Finding]:
    core, q, k = case.core, case.get("q"), case.get("k")
    if core.scale is None or q is None or k is None or core.kind == "fused":
        return
    d = q.shape[-1]
    expected = case.expected.scale if case.expected.scale is not None else d**-0.5
    half = core.seen["q"].value.dtype in (torch.float16, torch.bfloat16)
    if abs(core.scale - expected) <= (1e-2 if half else 1e-3) * abs(expected):
        return
    unit = all(bool((x.norm(dim=-1) - 1).abs().max() < 1e-2) for x in (q, k) if x.numel())
    asked = "the scale that was asked for" if case.expected.scale is not None else "1/sqrt(d)"
    equal = " = ".join(_names(case, core.scale, q, d))
    is_ = f", which is {equal}" if equal else ""
    text = f"the scale is {core.scale:.4g}{is_}; expected {asked} = {expected:.4g} for d = {d}"
    if unit:
        text = f"{text}; q and k have norm 1, so this may be meant"
    name, block = ("scaled", "scaled") if "scaled" in core.seen else ("logits", "scores")
    if core.kind == "sdpa":
        name, block = "mixed", "mixed"
    yield case.finding(block, text, name, wrong=not unit)


def _names(case: Case, scale: float, q: Tensor, d: int) -> Iterator[str]:
    merged = case.core.tensor("merged")
    heads = q.shape[1]
    hidden = merged.shape[-1] if merged is not None else heads * d
    known = {
        "1 (none)": 1.0,
        "1/d": 1 / d,
        "1/sqrt(d)": d**-0.5,
        "sqrt(d)": d**0.5,
        "1/sqrt(hidden), hidden = heads x d": hidden**-0.5,
        "1/sqrt(heads)": heads**-0.5,
        "1/sqrt(hidden / kv heads)": (hidden / _kv_heads(case, d)) ** -0.5,
        "1/hidden": 1 / hidden,
        "1/sqrt(Sk)": q.shape[2] ** -0.5 if q.shape[2] else math.nan,
    }
    return (name for name, value in known.items() if abs(scale - value) <= 2e-3 * value)


def _kv_heads(case: Case, d: int) -> int:
    """The heads of k, as it is projected: afterwards it may have been repeated for those of q."""
    projected, k = case.core.projections.get("k"), case.get("k")
    apart = projected is not None and projected is not case.core.projections.get("q")
    if projected is not None and apart:
        return max(1, projected.shape[-1] // d)
    return 1 if k is None else k.shape[1]


# equal weights -------------------------------------------------------------------------------------------------------


def _equal(case: Case) -> Iterator[Finding]:
    q, k = case.get("q"), case.get("k")
    if q is None or k is None or not q.numel() or not k.numel() or nan_tree.amount(q) or nan_tree.amount(k):
        return
    for name, x in (("q", q), ("k", k)):
        projected = case.core.projections.get(name)
        if not x.any():
            text = f"{name} is 0 everywhere, so all weights are equal"
            weight = flow.weight_of(projected.made_by) if projected is not None and projected.made_by else None
            if weight is not None and not weight.value.any():
                text += f": {weight.name or 'its weight'} is 0 everywhere"
            block = f"{name} projected" if weight is not None else name
            yield case.finding(block, text, block, wrong=weight is not None, level="L2b")
            return
    cosine = _cosine(q, k)
    if cosine is not None and float(cosine.min()) > 0.9999:
        names = [name for name in "qk" if name in case.core.projections]
        text = f"q and k are the same (cosine {float(cosine.mean()):.4f}), so every token looks at itself alike"
        text += ": the two are projected by the same weights" * (len(names) == 2)
        block = "k projected" if names else "k"
        yield case.finding(block, text, block, wrong=len(names) == 2)
    elif cosine is not None and cosine.numel() >= 8 and (mean := float(cosine.mean())) > ALIKE:
        text = f"q and k of the same token are alike (mean cosine {mean:.2f}; {ALIKE} and less is usual)"
        yield case.finding("k", text, "k", wrong=False, level="L2b")
    share = evenness(case)
    if share is None or share < UNIFORM:
        return
    alike = f"; q and k rows have cosine {float(cosine.mean()):.2f}" if cosine is not None else ""
    keys = (
        "; all keys of a head are the same" if _constant(k) else "; all queries of a head are the same" * _constant(q)
    )
    text = f"the weights are nearly equal: the entropy of a row is {100 * share:.2f} % of log n{alike}{keys}"
    if not keys and (scores := case.core.tensor("scaled")) is not None:
        std = float(scores.double().std())
        text += f"; the scaled scores have std {std:.2g}, as after an initialisation with a small std"
    block = "weights"
    wrong = bool(keys) and "k" in case.core.projections and not _constant_input(case)
    yield case.finding(block, text, "weights", wrong=wrong)


def _cosine(q: Tensor, k: Tensor) -> Tensor | None:
    """The cosine of each query with the key of the same token; None where they are not of the same tokens."""
    if q.shape[2:] != k.shape[2:] or q.shape[1] % k.shape[1] or q.shape[0] != k.shape[0]:
        return None
    return F.cosine_similarity(q, k.repeat_interleave(q.shape[1] // k.shape[1], 1), dim=-1)


def _constant(x: Tensor) -> bool:
    """Whether all rows of a head are the same."""
    return x.shape[2] > 1 and bool((x - x[:, :, :1]).abs().max() <= 1e-6 * x.abs().max())


def _constant_input(case: Case) -> bool:
    inputs = [
        s.value.double() for s in case.recording.arguments.values() if s.value.is_floating_point() and s.value.dim() > 2
    ]
    return any(bool((x - x[:, :1]).abs().max() <= 1e-6 * x.abs().max()) for x in inputs if x.numel())


def evenness(case: Case) -> float | None:
    """The mean entropy of a row of weights as a share of log n, n being the keys that it sees; None if unknown."""
    used = case.used
    if used is None or not used.numel() or nan_tree.amount(used):
        return None
    p = used.double().clamp(min=0)
    hidden = case.hidden
    visible = p.new_full(p.shape[:-1], p.shape[-1]) if hidden is None else (~hidden).expand(p.shape).sum(-1).double()
    entropy = -torch.special.xlogy(p, p).sum(-1)
    chosen = visible > 1.5
    return float((entropy[chosen] / visible[chosen].log()).mean()) if chosen.any() else None


# axis, masks and sums ------------------------------------------------------------------------------------------------


def _softmax_axis(case: Case) -> Iterator[Finding]:
    core = case.core
    if core.kind == "softmax" and core.softmax_axis and core.softmax_axis != "K":
        what = {"Q": "the queries, so columns sum to 1 and not rows", "H": "the heads", "B": "the samples"}
        over = what.get(core.softmax_axis, "the samples or heads")
        made = nan_tree.amount(case.used) if case.used is not None else ""
        also = f"; it makes {made} where all that it runs over is hidden" if made else ""
        text = f"the softmax runs over {over}: it belongs on the axis of the keys{also}"
        yield case.finding("weights", text, "weights")


def _masking(case: Case) -> Iterator[Finding]:
    core, asked = case.core, case.hidden_asked
    used, hidden = case.used, case.hidden
    if asked is None or used is None or nan_tree.amount(used) or used.shape != asked.shape:
        return
    if _mask_after(case) or (core.softmax_axis and core.softmax_axis != "K"):
        return  # said by what finds that
    block, name = ("masked", "masked") if core.kind == "softmax" else ("mixed", "mixed")
    if hidden is not None:
        if hidden.shape != used.shape:
            return
        if not hidden.any() and asked.any() and not ((used.abs() > LEAK) & asked).any():
            text = "keys are hidden after the exponential only: one that is far larger than the rest leaves 0/0"
            yield case.finding("weights", text, "weights", wrong=False)
            return
        if asked.any() and not hidden.any() and "mask" not in core.seen:
            parts = ["the future"] * case.expected.causal + ["what the mask hides"] * (case.expected.hidden is not None)
            seen_all = f"{' and '.join(parts)} {'is' if len(parts) == 1 else 'are'} seen"
            yield case.finding(block, f"no key is hidden before the softmax: {seen_all}", name)
            return
        if asked.any() and torch.equal(hidden, ~asked):
            yield case.finding(block, "the mask hides what it shall show and shows what it shall hide", name)
            return
        if hidden.shape[-1] == hidden.shape[-2] and not torch.equal(hidden, asked) and torch.equal(hidden, asked.mT):
            text = "the mask stands on the wrong axis: it hides queries for keys (queries and keys are exchanged)"
            yield case.finding(block, text, name)
            return
    future = torch.ones(used.shape[-2:], dtype=torch.bool).triu(1)
    seen = (used.abs() > LEAK) & asked & (~asked.all(-1, keepdim=True))
    if case.expected.causal and (ahead := seen & future).any():
        largest = float(used.masked_fill(~ahead, 0).max())
        text = f"queries see the future: {int(ahead.sum())} weights above the diagonal, up to {largest:.3g}"
        yield case.finding(block, text, name)
    elif seen.any():
        first = [int(n) for n in seen.nonzero()[0]]
        largest = float(used.masked_fill(~seen, 0).max())
        text = (
            f"{int(seen.sum())} hidden keys have a weight, up to {largest:.3g}; the first: "
            f"sample {first[0]}, head {first[1]}, query {first[2]}, key {first[3]}"
        )
        yield case.finding(block, text, name)
    elif hidden is not None and (extra := hidden & ~asked).any():
        first = [int(n) for n in extra.nonzero()[0]]
        text = (
            f"{int(extra.sum())} keys are hidden that were not to be; the first: sample {first[0]}, head {first[1]}, "
            f"query {first[2]}, key {first[3]}"
        )
        yield case.finding(block, text, name)


def _mask_after(case: Case) -> bool:
    """Whether the code hides weights after the softmax, and the rows no longer sum to 1."""
    masks = [(call, taken) for call, taken in case.core.steps_to_mix if call.name in (*MASKINGS, "tril", "triu")]
    hides = any(call.given and not _same(call.given[0].value, taken.value) for call, taken in masks)
    return hides and _sum_error(case) is not None


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _sum_error(case: Case) -> Tensor | None:
    """How far each row sums from 1, where one is further off than rounding explains; rows of zeros are left out."""
    core = case.core
    used = case.used
    if core.kind != "softmax" or used is None or not used.numel() or nan_tree.amount(used):
        return None
    if any(is_dropout(call) for call, _ in core.steps_to_mix):
        return None
    sums = used.double().sum(-1)
    error = (sums - 1).abs() * (used != 0).any(-1)
    eps = max(torch.finfo(x.dtype).eps for x in (used, core.weights) if x is not None)
    return error if float(error.max()) > eps * (4 + used.shape[-1] ** 0.5) else None


def _rows(case: Case) -> Iterator[Finding]:
    core, error = case.core, _sum_error(case)
    if error is None or (core.softmax_axis and core.softmax_axis != "K"):
        return
    used = case.used
    assert used is not None
    worst = int(error.argmax())
    total = float(used.double().sum(-1).flatten()[worst])
    block = "weights used" if core.seen.get("applied") is not core.seen.get("weights") else "weights"
    name = "applied" if "applied" in core.seen else "weights"
    if _mask_after(case) and total < 1:
        text = (
            f"the mask is applied after the softmax: a row of weights sums to {total:.4g} and not to 1; mask the scores"
        )
        yield case.finding(block, text, name)
    elif core.weights is not None and core.weights.shape[-1] != used.shape[-1]:
        yield case.finding(
            block, f"a row sums to {total:.4g}: a key beyond V takes the rest, as a sink does", name, wrong=False
        )
    else:
        yield case.finding(block, f"a row of weights sums to {total:.4g} and not to 1", name)
