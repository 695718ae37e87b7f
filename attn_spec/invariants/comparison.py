"""What the laws have in common: call the implementation, compare with the oracle, and say where it is furthest off."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec import oracle, tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.measure import one_hot
from attn_spec.law import Unsupported, Violation
from attn_spec.oracle import Answer
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import Worst

AXES = ("sample", "head", "query", "channel")


def arguments_for(implementation: Implementation, problem: Problem) -> Arguments:
    return problem.arguments(implementation.conventions.meaning.alignment)


def needs_plain(implementation: Implementation) -> None:
    """Raise Unsupported where a module does to q, k and the logits of each call what the law knows nothing of."""
    needs_given(implementation)
    if implementation.positional:
        raise Unsupported("the logits of each call are capped, or have a bias by position added")


def needs_given(implementation: Implementation) -> None:
    """Raise Unsupported where q and k change with their positions on the way, of which the law knows nothing."""
    if implementation.between:
        raise Unsupported("q and k are rotated or normalised on the way to their product")


def needs_heads_alike(implementation: Implementation) -> None:
    """Raise Unsupported where a module adds another bias in each head."""
    if implementation.biased:
        raise Unsupported("each head has a bias by position of its own added")


def output(implementation: Implementation, arguments: Arguments) -> Tensor:
    """The output of one call, detached; a Violation where its shape or dtype is not that of an attention."""
    out = implementation(arguments).output.detach()
    b, h, q_len, _ = arguments.sizes
    expected = (b, h, q_len, arguments.v.shape[-1])
    if tuple(out.shape) != expected:
        raise Violation(
            f"the output has shape {list(out.shape)}, expected [B, H, Sq, d_v] = {list(expected)}",
            evidence={"expected": list(expected), "received": list(out.shape)},
            hint=_shape_hint(tuple(out.shape), expected),
            merge="output-shape",
        )
    if out.dtype != arguments.q.dtype:
        raise Violation(
            f"the output is {out.dtype}, expected {arguments.q.dtype} as q",
            evidence={"expected": str(arguments.q.dtype), "received": str(out.dtype)},
            hint="cast back with `.to(q.dtype)` before returning",
            merge="output-dtype",
            setup="assert impl_output.dtype == q.dtype, f'{impl_output.dtype} for {q.dtype} inputs'",
        )
    return out


def _shape_hint(got: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if len(got) == 4 and got != expected and sorted(got) == sorted(expected):
        return "the axes are in another order than those of q: transpose back before returning"
    return ""


def answer(implementation: Implementation, arguments: Arguments, *, weights: bool = False) -> Answer:
    """The oracle's answer to the arguments, with the bound for this implementation's precision."""
    precision = implementation.precision_for(arguments.dtype)
    seen = implementation.effective(arguments)
    return oracle.answer(seen, implementation.conventions.meaning, precision, weights=weights)


def answer_to(implementation: Implementation, problem: Problem) -> Answer:
    """As `answer`, for a problem as it stands: worked out once."""
    if implementation.positional:
        return answer(implementation, arguments_for(implementation, problem))
    precision = implementation.precision_for(problem.dtype)
    return oracle.known_answer(problem, implementation.conventions.meaning, precision)


def agrees(implementation: Implementation, problem: Problem) -> None:
    """The output is that of the oracle, within the bound of every element."""
    out = output(implementation, arguments_for(implementation, problem))
    require_within(answer_to(implementation, problem).compare(out), "output")


def require_within(
    worst: Worst, what: str, *, because: str = "", hint: str = "", setup: str = "", merge: str = ""
) -> None:
    """Raise a Violation where the worst element lies beyond its bound."""
    if worst.holds:
        return
    raise Violation(
        f"{because + ': ' if because else ''}{difference(worst, what)}",
        evidence=evidence(worst),
        hint=hint,
        setup=setup,
        merge=merge,
    )


def difference(worst: Worst, what: str) -> str:
    """One sentence: the element, what was expected, what was received, and how far beyond the bound that is."""
    error = abs(worst.got - worst.expected)
    beyond = (
        "not a number" if error != error else f"error {error:.3g}, {worst.ratio:.3g} times the bound {worst.bound:.2g}"
    )
    return f"{what}{place(worst.index)} is {worst.got:.6g}, expected {worst.expected:.6g} ({beyond})"


def place(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"


def evidence(worst: Worst) -> dict[str, object]:
    return {
        "index": list(worst.index),
        "received": worst.got,
        "expected": worst.expected,
        "bound": worst.bound,
        "ratio": worst.ratio,
        "bound_from": "running error analysis for the implementation's precision (attn_spec/tolerance.py)",
    }


LOGITS = "what it returns beside its output are the logits before the softmax"


def are_logits(x: Tensor, weights: Tensor) -> bool:
    """Whether what is returned beside an output are the numbers whose softmax the weights are: to be looked at too."""
    p, x = weights.double(), x.double()
    if x.shape != p.shape or not x.numel() or bool(((x.sum(-1) - 1).abs() < 0.1).all()):
        return False
    return bool(((torch.softmax(x, dim=-1) - p).abs() < 0.02).all())


def same(got: Tensor, expected: Tensor, bound: Tensor) -> Worst:
    """Where two outputs that should be equal are furthest apart, each being within `bound` of the same number."""
    return tolerance.worst(got, expected.double(), 2 * bound)


def alike(implementation: Implementation, got: Tensor, expected: Tensor, arguments: Arguments, bound: Tensor) -> Worst:
    """As `same`, for `got`, the output of a call of other sizes.

    Norms and rotations on the way to q.k may round otherwise there, which no bound of a product holds: where there are
    some, `got` is compared with the answer to q and k as they arrive in this very call.
    """
    if implementation.positional:
        return answer(implementation, arguments).compare(got)
    return same(got, expected, bound)


def recovered(implementation: Implementation, arguments: Arguments) -> tuple[Tensor, Answer]:
    """The weights [B, H, Sq, Sk] that a black box uses, read off with a one-hot V; and the oracle's answer to that.

    V is handed over in blocks of its own width, so that an implementation which needs d_v = d_k is not asked for more.
    """
    kv_len, width = arguments.k.shape[2], arguments.v.shape[3]
    identity = one_hot(arguments)
    columns = []
    for start in range(0, kv_len, width):
        block = identity.v[..., start : start + width]
        if block.shape[-1] < width:
            block = torch.nn.functional.pad(block, (0, width - block.shape[-1]))
        part = output(implementation, identity.replace(v=block.contiguous()))
        columns.append(part[..., : min(width, kv_len - start)])
    exact = identity.replace(v=identity.v[..., :kv_len].contiguous())
    weights = torch.cat(columns, dim=-1) if columns else exact.v.new_zeros((*arguments.sizes[:3], 0))
    return weights, answer(implementation, exact)
