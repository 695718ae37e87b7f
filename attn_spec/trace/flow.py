"""Following tensors through a recording: what a tensor was made from, and what was made from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from attn_spec.capture import Call, Seen

MATMULS = ("matmul", "mm", "bmm", "baddbmm", "addmm", "addbmm", "einsum", "linear", "rmatmul", "tensordot", "inner")
CONVOLUTIONS = ("conv1d", "conv2d")
SOFTMAXES = ("softmax", "_softmax")
EXPONENTIALS = ("exp", "exp2")
# where the numbers of a row are brought together: what comes out is no longer the tensor that went in
REDUCTIONS = ("sum", "mean", "amax", "max", "amin", "min", "norm", "logsumexp", "var", "std", "cumsum", "embedding")
TRANSPOSES = ("transpose", "swapaxes", "swapdims", "permute", "T", "mT", "t", "movedim", "moveaxis")
REORDERINGS = ("gather", "index_select", "take_along_dim", "flip", "roll", "sort", "fliplr", "flipud")

Step = tuple[Call, Seen]  # a call, and the one of its tensors through which the path goes


def floats(call: Call) -> list[Seen]:
    """The tensors of numbers that a call took; those of a mask or an index are left out."""
    return [seen for seen in call.taken if seen.value.is_floating_point()]


def operands(call: Call) -> list[Seen]:
    """The two factors of a product; what a baddbmm or a linear adds is left out."""
    found = floats(call)
    if call.name in ("baddbmm", "addmm", "addbmm"):
        return found[1:3]
    return found[:2]


def carries(call: Call) -> bool:
    """Whether what a call gives is still what it took: moved, cast, scaled, added to, masked, dropped from."""
    known = (*MATMULS, *CONVOLUTIONS, *SOFTMAXES, *REDUCTIONS, *EXPONENTIALS, "scaled_dot_product_attention")
    return call.name not in known and not call.opaque and call.error is None


def back(seen: Seen, stop: Callable[[Call], bool]) -> list[Step] | None:
    """The path from the first call that `stop` accepts to a tensor, in the order of the code; None if there is none.

    Each step is a call with the tensor it took on the way; that of the first step is its first factor.
    """
    visited: set[int] = set()
    trail: list[Step] = []

    def search(here: Seen) -> bool:
        call = here.made_by
        if call is None or id(here) in visited:
            return False
        visited.add(id(here))
        if stop(call):
            trail.append((call, next(iter(operands(call)), here)))
            return True
        if not carries(call):
            return False
        for taken in floats(call):
            if search(taken):
                trail.append((call, taken))
                return True
        return False

    return trail if search(seen) else None


def line(seen: Seen) -> Iterator[Step]:
    """The calls behind a tensor, each by the largest tensor of numbers it took, back to a product or the outside."""
    while seen.made_by is not None and carries(seen.made_by) and floats(seen.made_by):
        call = seen.made_by
        seen = max(floats(call), key=lambda taken: taken.value.numel())
        yield call, seen


def onward(seen: Seen, calls: list[Call], stop: Callable[[Call], bool]) -> tuple[list[Step], Step | None]:
    """The calls that carry a tensor on, and the first that `stop` accepts with the tensor that it took."""
    derived = {id(seen)}
    steps: list[Step] = []
    for call in calls:
        taken = next((t for t in call.taken if id(t) in derived), None)
        if taken is None:
            continue
        if stop(call):
            return steps, (call, taken)
        if carries(call):
            derived.update(id(given) for given in call.given)
            steps.append((call, taken))
    return steps, None


def parameter_of(seen: Seen) -> Seen | None:
    """The parameter that a tensor is, or is a view or cast of."""
    for _ in range(8):
        if seen.parameter:
            return seen
        if seen.made_by is None or not carries(seen.made_by) or len(floats(seen.made_by)) != 1:
            return None
        seen = floats(seen.made_by)[0]
    return None


def weight_of(call: Call) -> Seen | None:
    """The parameter by which a call projects; None where it is no projection."""
    if call.name not in (*MATMULS, *CONVOLUTIONS):
        return None
    return next((p for seen in operands(call) if (p := parameter_of(seen)) is not None), None)


def is_product(call: Call) -> bool:
    """A product of two tensors neither of which is a parameter, or one written as a sum over q * k."""
    if call.name in MATMULS and len(operands(call)) == 2:
        return weight_of(call) is None
    if call.name == "sum" and call.taken and (made := call.taken[0].made_by) is not None:
        factors, result = floats(made), call.taken[0].shape
        return made.name == "mul" and len(factors) == 2 and all(f.shape != result for f in factors) and len(result) > 2
    return False


def factor(call: Call, taken: Seen) -> float | None:
    """The number by which a call multiplies a tensor: 1 if it does not; None where it is no single number."""
    if call.name not in ("mul", "multiply", "div", "divide", "true_divide"):
        return 1.0
    other = next((a for a in (*call.args, *call.kwargs.values()) if a is not taken), None)
    if other is None:  # a tensor with itself
        return None
    if isinstance(other, Seen):
        if other.value.numel() != 1 or parameter_of(other) is not None:  # for each head, or learned
            return None
        other = float(other.value.double())
    if not isinstance(other, (int, float)) or isinstance(other, bool):
        return None
    if call.name in ("mul", "multiply"):
        return float(other)
    return 1 / other if other else math.inf


def is_reordered(seen: Seen) -> bool:
    """Whether a tensor's rows were put into another order on the way, so that no mask of the input fits them."""
    return any(call.name in REORDERINGS for call, _ in line(seen))


def has_axes_reversed(seen: Seen) -> Call | None:
    """The `.T` of a tensor of 3 or more axes among the calls behind a tensor."""
    reversals = (call for call, taken in line(seen) if call.name == "T" and len(taken.shape) > 2)
    return next(reversals, None)
