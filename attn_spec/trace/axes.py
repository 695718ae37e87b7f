"""What each axis of the tensors around a softmax is, read from the products: one letter for each axis.

B sample, H head, G head in its group, N sample or head or both in one axis, Q query, K key, D channel of q and k,
V channel of v.
"""

from __future__ import annotations

from torch import Tensor

from attn_spec.capture import Call, Seen
from attn_spec.trace.flow import TRANSPOSES, Step, operands

LEADING = {0: "", 1: "N", 2: "BH", 3: "BHG"}


def plain(ndim: int, last_two: str, most: int) -> str:
    """Letters for a tensor whose last two axes are known, beside one of `most` axes; "" where it has others."""
    leading = LEADING.get(most - 2)
    missing = most - ndim
    return "" if leading is None or ndim < 2 else leading[missing:] + last_two


def of_scores(call: Call) -> tuple[str, str, str]:
    """The letters of both factors of q k' and of its result; "" where they can't be told."""
    if call.name == "einsum":
        return _of_einsum(call, "Q", "K", "D")
    if call.name == "sum" or len(operands(call)) != 2:
        return "", "", ""
    q, k = operands(call)
    most = max(len(q.shape), len(k.shape))
    if call.name == "linear":  # q @ k.T of two matrices
        return plain(len(q.shape), "QD", most), "KD", plain(most, "QK", most)
    return plain(len(q.shape), "QD", most), plain(len(k.shape), "DK", most), plain(most, "QK", most)


def of_mix(call: Call, weights: Seen, letters: str) -> tuple[str, str, str]:
    """The letter of the weights' axis that is summed over, and the letters of v and of the result."""
    factors = operands(call)
    if len(factors) != 2 or len(letters) != len(weights.shape):
        return "", "", ""
    first = factors[0] is weights
    if call.name == "einsum":
        return _mixed_by_einsum(call, first, letters)
    v = factors[1 if first else 0]
    if call.name == "linear":  # weights @ v' of two matrices
        return (letters[-1], "VK", letters[:-1] + "V") if first else ("", "", "")
    most = max(len(weights.shape), len(v.shape))
    summed = letters[-1] if first else letters[-2]
    free = letters[-2] if first else letters[-1]
    ours, theirs = (f"{summed}V", f"{free}V") if first else (f"V{summed}", f"V{free}")
    return summed, plain(len(v.shape), ours, most), plain(most, theirs, most)


def carried(letters: str, steps: list[Step]) -> str:
    """The letters after calls that carry a tensor on."""
    for call, taken in steps:
        if not call.given or not letters:
            return letters
        shape = call.given[0].shape
        if call.name in TRANSPOSES and len(letters) == len(taken.shape):
            letters = _transposed(call, letters)
        elif shape[-2:] != taken.shape[-2:] and call.name in ("view", "reshape", "flatten", "unflatten"):
            return ""
        elif len(shape) != len(letters):
            letters = plain(len(shape), letters[-2:], len(shape))
    return letters


def canonical(x: Tensor, letters: str, batch: int | None = None) -> Tensor | None:
    """A tensor as [B, H, ...], its last two axes in the order Q or K, then D, V or K; None where its axes are unknown.

    batch: how many samples lie in an axis N that holds samples and heads.
    """
    if not letters or len(letters) != x.dim():
        return None
    order = [n for letter in "BHGNQKDV" for n, own in enumerate(letters) if own == letter]
    if "Q" in letters and "K" in letters:
        order = [n for n in order if letters[n] not in "QK"] + [letters.index("Q"), letters.index("K")]
    x = x.permute(order)
    leading = "".join(letters[n] for n in order[:-2])
    if leading == "B":  # one head that all share
        return x[:, None]
    if leading in ("N", "G", "H"):
        n = x.shape[0]
        if leading == "N" and batch and n % batch == 0:
            return x.reshape(batch, n // batch, *x.shape[1:])
        return x[None] if leading != "N" else x[:, None]
    if leading in ("BHG", "HG"):
        x = x.flatten(-4, -3)
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def named(letters: str) -> str:
    """Letters as they are shown: [B, H, S, D], where a factor is handed over transposed too."""
    return f"[{', '.join(letters)}]" if letters else ""


def _transposed(call: Call, letters: str) -> str:
    n = len(letters)
    if call.name in ("T", "t"):
        return letters[::-1]
    if call.name == "mT":
        return letters[:-2] + letters[-1] + letters[-2]
    numbers = [a for a in call.args[1:] if not isinstance(a, Seen)] + list(call.kwargs.values())
    dims = list(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], (tuple, list)) else numbers
    if not all(isinstance(dim, int) for dim in dims):
        return ""
    if call.name == "permute":
        return "".join(letters[dim] for dim in dims)
    a, b = (dim % n for dim in dims)
    if call.name in ("movedim", "moveaxis"):
        rest = letters[:a] + letters[a + 1 :]
        return rest[:b] + letters[a] + rest[b:]
    swapped = list(letters)
    swapped[a], swapped[b] = swapped[b], swapped[a]
    return "".join(swapped)


def _equation(call: Call) -> tuple[str, str, str] | None:
    """The letters of an einsum of two tensors; None where it is written otherwise."""
    equation = call.args[0] if call.args and isinstance(call.args[0], str) else ""
    ins, _, out = equation.replace(" ", "").partition("->")
    first, _, second = ins.partition(",")
    if not out or "," in second or len(operands(call)) != 2:
        return None
    if "." in equation:  # the axes that `...` stands for, as far from the right as they are in each tensor
        ranks = [
            len(seen.shape) - len(part.replace("...", ""))
            for seen, part in zip(operands(call), (first, second), strict=True)
        ]
        both = max(ranks)
        spare = "0123456789"[:both]
        first, second = (part.replace("...", spare[both - n :]) for part, n in zip((first, second), ranks, strict=True))
        out = out.replace("...", spare)
    return first, second, out


def _of_einsum(call: Call, free_first: str, free_second: str, summed: str) -> tuple[str, str, str]:
    letters = _equation(call)
    if letters is None:
        return "", "", ""
    first, second, out = letters
    q = [c for c in first if c in out and c not in second]
    k = [c for c in second if c in out and c not in first]
    d = [c for c in first if c in second and c not in out]
    if not q or not k or len(d) != 1:
        return "", "", ""
    query, key = max(q, key=out.index), max(k, key=out.index)  # one that stands before in the result is a head's
    names = {query: free_first, key: free_second, d[0]: summed}
    leading = [c for c in out if c not in names]
    if len(leading) not in LEADING:
        return "", "", ""
    names |= dict(zip(leading, LEADING[len(leading)], strict=True))
    return tuple("".join(names[c] for c in part) for part in (first, second, out))  # type: ignore[return-value]


def _mixed_by_einsum(call: Call, first: bool, letters: str) -> tuple[str, str, str]:
    found = _equation(call)
    if found is None:
        return "", "", ""
    one, two, out = found
    ours, theirs = (one, two) if first else (two, one)
    names = dict(zip(ours, letters, strict=True)) if len(ours) == len(letters) else {}
    summed = [c for c in ours if c in theirs and c not in out]
    if len(summed) != 1 or not names:
        return "", "", ""
    names |= {c: "V" for c in theirs if c not in names}
    return names[summed[0]], "".join(names[c] for c in theirs), "".join(names.get(c, "V") for c in out)
