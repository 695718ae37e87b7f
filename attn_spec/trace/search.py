"""Finding each attention in a recording: the softmax or the call that holds one, and the tensors around it."""

from __future__ import annotations

import math
from typing import Any

from attn_spec.capture import Call, Recording, Seen, Where
from attn_spec.trace import axes, flow
from attn_spec.trace.core import Core, bound

MASKINGS = ("masked_fill", "where", "add", "sub", "setitem", "mul", "masked_scatter", "masked_fill_")


def cores(recording: Recording) -> list[Core]:
    """Every attention in a recording, in the order of the code."""
    found = []
    for call in recording.calls:
        if call.error is not None or not call.given:
            continue
        core = None
        if call.name == "scaled_dot_product_attention":
            core = _sdpa(call)
        elif call.name in flow.SOFTMAXES and call.taken:
            core = _softmax(call, call.taken[0], call.given[0], call.argument(1, "dim"), recording)
        elif call.name in ("div", *flow.EXPONENTIALS):
            core = _by_hand(call, recording)
        elif call.opaque and len([x for x in flow.floats(call) if len(x.shape) > 1]) >= 3:
            core = Core("fused", call, dict(zip("qkv", flow.floats(call), strict=False)))
            core.seen["mixed"] = call.given[0]
        if core is not None:
            _around(core, recording)
            found.append(core)
    return found or [core for core in (_unseen(recording),) if core is not None]


def _unseen(recording: Recording) -> Core | None:
    """The core of a run that takes exponentials of scores in another form, or whose output no call is seen to make."""
    named = [seen for seen in recording.arguments.values() if len(seen.shape) > 1 and seen.value.is_floating_point()]
    others = [c for c in recording.calls if c.name in flow.EXPONENTIALS and c.taken and c.given]
    other = next((c for c in others if flow.back(c.taken[0], flow.is_product) is not None), None)
    if other is not None and recording.given_back:
        call = Call("a softmax in a form that is not known", "", (), {}, other.where, [], [])
        return Core("fused", call, dict(zip("qkv", named, strict=False)) | {"mixed": recording.given_back[0]})
    for seen in [seen for call in reversed(recording.calls) for seen in call.taken] + recording.given_back:
        if seen.name or seen.made_by is not None or len(seen.shape) < 2 or not seen.value.is_floating_point():
            continue
        call = Call("a kernel of its own or a vmap", "", (), {}, Where("", 0, ""), [], [seen])
        core = Core("fused", call, {"mixed": seen})
        if len(named) >= 3:
            core.seen |= dict(zip("qkv", named, strict=False))
        return core
    return None


# the three kinds -----------------------------------------------------------------------------------------------------


def _sdpa(call: Call) -> Core:
    given = bound(call)
    core = Core("sdpa", call, causal=bool(given["is_causal"]))
    core.seen = {"q": given["query"], "k": given["key"], "v": given["value"], "mixed": call.given[0]}
    if isinstance(given["attn_mask"], Seen):
        core.seen["mask"] = given["attn_mask"]
    for name, last_two in (("q", "QD"), ("k", "KD"), ("v", "KV"), ("mixed", "QV")):
        rank = len(core.seen[name].shape)
        core.letters[name] = axes.plain(rank, last_two, rank)
    q = core.seen["q"]
    core.scale = given["scale"] if given["scale"] is not None else q.shape[-1] ** -0.5
    core.softmax_axis = core.summed_axis = "K"
    return core


def _softmax(call: Call, taken: Seen, given: Seen, axis: Any, recording: Recording) -> Core | None:
    """The core around a softmax; None where its logits come from no product of two tensors, as a router's do."""
    steps = flow.back(taken, flow.is_product)
    if steps is None:
        return None
    core = Core("softmax", call, {"masked": taken, "weights": given})
    core.steps_to_softmax = steps[1:]
    letters_q, letters_k, letters = axes.of_scores(steps[0][0])
    at_softmax = axes.carried(letters, core.steps_to_softmax)
    later = recording.calls[recording.calls.index(call) + 1 :]
    core.steps_to_mix, mix = flow.onward(given, later, flow.is_product)
    if mix is not None:
        core.seen |= {"applied": mix[1], "mixed": mix[0].given[0]} if mix[0].given else {"applied": mix[1]}
        rank = len(mix[1].shape)  # where the axes were lost on the way, the product with V tells them
        at_mix = axes.carried(at_softmax, core.steps_to_mix) or axes.plain(rank, "QK", rank)
        core.summed_axis, letters_v, letters_mixed = axes.of_mix(mix[0], mix[1], at_mix)
        factors = flow.operands(mix[0])
        if len(factors) == 2:
            core.seen["v"] = factors[1] if factors[0] is mix[1] else factors[0]
        core.letters |= {"v": letters_v, "mixed": letters_mixed, "applied": at_mix}
    if isinstance(axis, int) and at_softmax:
        core.softmax_axis = at_softmax[axis]
    core.letters |= {"masked": at_softmax, "weights": at_softmax}
    _scores(core, steps[0][0], letters_q, letters_k, letters)
    if core.summed_axis == "Q":  # the first factor is k: what is summed over with V is the keys
        swap = str.maketrans("QK", "KQ")
        core.letters = {name: text.translate(swap) for name, text in core.letters.items()}
        core.seen["q"], core.seen["k"] = core.seen["k"], core.seen["q"]
        core.letters["q"], core.letters["k"] = core.letters["k"], core.letters["q"]
        core.softmax_axis, core.summed_axis = core.softmax_axis.translate(swap), "K"
    return core


def _by_hand(call: Call, recording: Recording) -> Core | None:
    """A softmax written out: exp, divided by its sum over an axis, or exp of what the logsumexp was taken off."""
    if call.name in flow.EXPONENTIALS:
        off = call.taken[0].made_by
        if off is not None and off.name == "log_softmax":
            return _softmax(call, off.taken[0], call.given[0], off.argument(1, "dim"), recording)
        terms = flow.floats(off) if off is not None and off.name == "sub" else []
        made = terms[1].made_by if len(terms) == 2 else None
        if made is None or made.name != "logsumexp":
            return None
        return _softmax(call, terms[0], call.given[0], made.argument(1, "dim"), recording)
    terms = flow.floats(call)
    if len(terms) != 2:
        return None
    total = flow.back(terms[1], lambda c: c.name == "sum")
    summed = total[0][0] if total else None
    if summed is None or not summed.taken:
        return None
    exp = flow.back(summed.taken[0], lambda c: c.name in flow.EXPONENTIALS)
    own = flow.back(terms[0], lambda c: c.name in flow.EXPONENTIALS)
    axis = summed.argument(1, "dim")
    axis = axis[0] if isinstance(axis, (tuple, list)) and len(axis) == 1 else axis
    if exp is None:
        return None
    taken = _without_maximum(exp[0][0].taken[0])
    if own is not None and own[0][0] is exp[0][0]:
        found = _softmax(call, taken, call.given[0], axis, recording)
    else:
        found = _deferred(call, exp[0][0], taken, terms[0], axis, recording)
    if found is not None and exp[0][0].name == "exp2" and found.scale is not None:
        found.scale *= math.log(2)
    return found


def _deferred(call: Call, exp: Call, taken: Seen, numerator: Seen, axis: Any, recording: Recording) -> Core | None:
    """exp(s) @ V, divided by the sum afterwards; over blocks of keys no tensor holds the weights."""
    mixed = flow.back(numerator, flow.is_product)
    if mixed is None or flow.back(taken, flow.is_product) is None:
        return None
    earlier = recording.calls[: recording.calls.index(call)]
    if sum(c.name == exp.name and flow.back(c.taken[0], flow.is_product) is not None for c in earlier) > 1:
        arguments = {name: seen for name, seen in recording.arguments.items() if name in ("q", "k", "v")}
        return Core("fused", call, arguments | {"mixed": call.given[0]})  # an online softmax
    core = _softmax(exp, taken, exp.given[0], axis, recording)
    if core is not None:
        core.deferred = True
        core.seen["mixed"] = call.given[0]
    return core


def _without_maximum(seen: Seen) -> Seen:
    """The logits before their maximum was taken off."""
    made = seen.made_by
    terms = flow.floats(made) if made is not None and made.name == "sub" else []
    if len(terms) == 2 and flow.back(terms[1], lambda c: c.name in ("amax", "max", "maximum")) is not None:
        return terms[0]
    return seen


# what is around them -------------------------------------------------------------------------------------------------


def _scores(core: Core, product: Call, letters_q: str, letters_k: str, letters: str) -> None:
    """q, k, logits, scaled, mask and scale, from the product on to the softmax."""
    if len(factors := flow.operands(product)) == 2 and product.name != "sum":
        core.seen["q"], core.seen["k"] = factors
        core.letters |= {"q": letters_q, "k": letters_k}
        turned = factors[1].made_by  # `k.mT`: k as it was before is what people call k
        if turned is not None and letters_k.endswith("DK") and _swaps_last_two(turned) and product.name != "linear":
            core.seen["k"], core.letters["k"] = turned.taken[0], letters_k[:-2] + "KD"
    held = [_held(core.seen[name]) for name in "qk" if name in core.seen]
    alpha, added = 1.0, None
    if product.name in ("baddbmm", "addmm", "addbmm"):
        alpha = float(product.kwargs.get("alpha", 1))
        adds = product.kwargs.get("beta", 1) != 0 and bool(product.taken[0].value.any())
        added = product.taken[0] if adds else None
    before = math.prod(h for h in held if h is not None)
    scale: float | None = alpha * before if None not in held else None
    core.before = before
    name = "logits" if alpha * before == 1 else "scaled"
    if added is None:
        core.seen[name], core.letters[name] = product.given[0], letters
    else:
        core.seen["mask"] = added
    for call, taken in core.steps_to_softmax:
        by = flow.factor(call, taken)
        other = next((seen for seen in call.taken if seen is not taken and seen.value.numel() > 1), None)
        if by is None and (other is None or other.shape[-2:] == (1, 1) or len(other.shape) < 2):
            scale = None  # one for each head, say
        elif by is not None and by != 1:
            scale = None if scale is None else scale * by
            if "mask" not in core.seen and call.given:
                core.seen["scaled"] = call.given[0]
                core.letters["scaled"] = axes.carried(letters, core.steps_to_softmax)
        elif other is not None and call.name in MASKINGS and "mask" not in core.seen:
            core.seen["mask"] = other
    core.scale = scale


def _swaps_last_two(call: Call) -> bool:
    letters = "".join(chr(97 + n) for n in range(len(call.taken[0].shape))) if call.taken else ""
    if call.name not in flow.TRANSPOSES or len(letters) < 2:
        return False
    return axes.carried(letters, [(call, call.taken[0])]) == letters[:-2] + letters[-1] + letters[-2]


def _held(seen: Seen) -> float | None:
    """The numbers that q or k was multiplied with on its way from its projection."""
    product = 1.0
    for call, taken in flow.line(seen):
        by = flow.factor(call, taken)
        if by is not None:
            product *= by
    return product


def _around(core: Core, recording: Recording) -> None:
    """Projections before, merged heads and output after."""
    if core.kind == "sdpa":
        held = [_held(core.seen[name]) for name in "qk"]
        core.before = math.prod(h for h in held if h is not None)
        core.scale = (core.scale or 0.0) * core.before
    for name in "qkv":
        if name in core.seen:
            steps = flow.back(core.seen[name], lambda call: call.name in (*flow.MATMULS, *flow.CONVOLUTIONS))
            if steps is not None:
                core.projections[name] = steps[0][0].given[0]
    mixed = core.seen.get("mixed")
    if mixed is None:
        return
    start = next((n for n, call in enumerate(recording.calls) if any(g is mixed for g in call.given)), 0)
    later = recording.calls[start + 1 :]
    steps, last = flow.onward(mixed, later, lambda call: call.name in (*flow.MATMULS, *flow.CONVOLUTIONS))
    ends = [mixed, *(given for call, _ in steps for given in call.given)]
    if last is not None:
        core.seen["merged"] = last[1]
        if last[0].given:
            core.seen["output"] = last[0].given[0]
        return
    returned = next((seen for seen in recording.given_back if any(seen is end for end in ends)), None)
    if returned is not None:
        core.seen["output"] = returned
