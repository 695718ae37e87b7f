"""Whether splitting into heads, and merging them, keeps each token to itself.

A `view` that forgets to transpose runs, and gives each head a right attention over channels of the wrong tokens. It
moves numbers and changes none, so where each number came from can be read off the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from attn_spec.capture import Seen
from attn_spec.trace import flow
from attn_spec.trace.finding import Case, Finding


def judge(case: Case) -> Iterator[Finding]:
    """What is found where heads are split and where they are merged."""
    for name in "qkv":
        if (number := _split_wrong(case, name)) is not None:
            text = (
                f"the split into heads mixes tokens: token {number} of {name} holds channels of other tokens; "
                f"view as [B, S, H, D] and then transpose(1, 2)"
            )
            yield case.finding(name, text, name)
            break  # the other two are split by the same line
    if (number := _merged_wrong(case)) is not None:
        text = (
            f"merging the heads mixes tokens: row {number} holds channels of other tokens; "
            f"transpose(1, 2) before they are put side by side"
        )
        yield case.finding("merged", text, "merged")


def _split_wrong(case: Case, name: str) -> int | None:
    projected, x = case.core.projections.get(name), case.get(name)
    if projected is None or x is None or len(case.core.letters.get(name, "")) != 4:
        return None
    values = _rows(projected)
    if (
        values is None
        or values.shape[-1] < x.shape[-1]
        or values.numel() // values.shape[-1] != x.shape[0] * x.shape[2]
    ):
        return None
    sides = [values.flatten(0, -2)]
    if values.dim() == 3:  # a projection over the sequence holds tokens along its last axis
        sides.append(values.mT.flatten(0, -2))
    firsts = [_first_mixed(x.transpose(1, 2).flatten(2), side) for side in sides]
    return firsts[0] if all(first is not None for first in firsts) else None


def _rows(projected: Seen) -> Tensor | None:
    """What a projection gave, tokens by channels; None where its channels may lie otherwise."""
    call = projected.made_by
    if call is None or call.name not in ("linear", "matmul", "mm", "addmm") or projected.value.dim() < 2:
        return None
    if call.name != "linear" and flow.parameter_of(flow.operands(call)[-1]) is None:
        return None
    return projected.value.double().cpu()


def _merged_wrong(case: Case) -> int | None:
    mixed, merged = case.get("mixed"), case.core.tensor("merged")
    if mixed is None or merged is None or len(case.core.letters.get("mixed", "")) != 4:
        return None
    b, h, s, d = mixed.shape
    if merged.dim() < 2 or merged.shape[-1] != h * d or merged.numel() != mixed.numel():
        return None
    return _first_mixed(merged.double().cpu().reshape(1, b * s, h * d), mixed.transpose(1, 2).reshape(b * s, h * d))


def _first_mixed(x: Tensor, rows: Tensor) -> int | None:
    """The first position of x [B, S, C] that holds numbers of more than one of the rows [N, C].

    None where there is none, or where a number can't be told from another row's or is in no row.
    """
    if not x.numel() or not rows.numel() or not bool(rows.isfinite().all()):
        return None
    numbers, place = rows.flatten().sort()
    owner = place // rows.shape[-1]
    if bool(((numbers[1:] == numbers[:-1]) & (owner[1:] != owner[:-1])).any()):
        return None
    found = torch.searchsorted(numbers, x.contiguous()).clamp(max=len(numbers) - 1)
    if not torch.equal(numbers[found], x):
        return None
    from_row = owner[found]
    mixed = (from_row != from_row[..., :1]).any(-1).any(0)
    return int(mixed.nonzero()[0]) if bool(mixed.any()) else None
