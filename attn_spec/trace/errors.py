"""An exception as a finding: the block in which it happened, the shapes that met, and what is likely meant."""

from __future__ import annotations

from attn_spec.capture import Call, Recording, Seen
from attn_spec.trace import flow
from attn_spec.trace.finding import Finding
from attn_spec.trace.search import MASKINGS


def judge(recording: Recording) -> Finding | None:
    """The finding of the exception that the code raised; None where it raised none."""
    error = recording.error
    if error is None:
        return None
    call = recording.calls[-1] if recording.calls and recording.calls[-1].error is error else None
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")
    where = call.where if call is not None else recording.error_where
    place = where.quoted if where is not None else ""
    if call is None:
        last = recording.calls[-1] if recording.calls else None
        after = f"after {last.name} of {_shapes(last)}" if last is not None else "before any call into torch"
        return Finding(_after(recording), f"the code raises {said} ({after})", where=place)
    text = f"{call.name} of {_shapes(call)} raises {said}"
    for seen in call.taken:
        turned = flow.has_axes_reversed(seen)
        if turned is not None:
            shape = list(turned.taken[0].shape)
            text += f"; `.T` of a tensor of {len(shape)} axes, here {shape}, reverses all of them: `.mT` is meant"
            break
    else:
        if call.name == "view" and "stride" in str(error):
            text += "; after a transpose use `.reshape`, or `.contiguous()` first"
    return Finding(block_of(call, recording), text, where=place)


def _shapes(call: Call) -> str:
    shapes = [f"{list(seen.shape)}{f' ({seen.name})' if seen.name else ''}" for seen in call.taken]
    return " and ".join(shapes) or "no tensor"


def _after(recording: Recording) -> str:
    """The block in which the code was, by the last call that it made."""
    return block_of(recording.calls[-1], recording) if recording.calls else "input"


def block_of(call: Call, recording: Recording) -> str:
    """The block that a call belongs to, by what it works on."""
    earlier = recording.calls[: recording.calls.index(call)]
    core = recording.cores[-1] if recording.cores else None
    if core is not None and (mixed := core.seen.get("mixed")) is not None and _reaches(mixed, earlier, call):
        return "output" if flow.weight_of(call) is not None else "merged"
    for other in reversed(earlier):
        if other.name in flow.SOFTMAXES and other.given and _reaches(other.given[0], earlier, call):
            return "mixed" if call.name in flow.MATMULS else "weights used"
    for other in reversed(earlier):
        if flow.is_product(other) and other.given and _reaches(other.given[0], earlier, call):
            if call.name in flow.SOFTMAXES:
                return "weights"
            return "masked" if call.name in MASKINGS else "scaled"
    if flow.weight_of(call) is not None:
        return "q projected" if call is not None and not _named(call) else f"{_named(call)} projected"
    return "scores" if call.name in (*flow.MATMULS, "scaled_dot_product_attention") else "q"


def _named(call: Call) -> str:
    """q, k or v, where the name of the parameter says which."""
    weight = flow.weight_of(call)
    name = weight.name.lower() if weight is not None else ""
    for letter, words in (
        ("q", ("q_", "query", "to_q", "wq", "_q")),
        ("k", ("k_", "key", "to_k", "wk", "_k")),
        ("v", ("v_", "value", "to_v", "wv", "_v")),
    ):
        if any(word in name for word in words):
            return letter
    return ""


def _reaches(seen: Seen, calls: list[Call], call: Call) -> bool:
    _, found = flow.onward(seen, [*calls, call], lambda other: other is call)
    return found is not None
