"""Functions of another framework's arrays, judged through a bridge."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attn_spec import adapt, check_attention
from attn_spec.adapters.bridge import bridged


class Array:
    """Nested lists with a shape: a framework that knows nothing of torch."""

    def __init__(self, nested: Any, shape: tuple[int, ...], dtype: str) -> None:
        self.nested, self.shape, self.dtype = nested, shape, dtype


def to(x: Tensor) -> Array:
    assert x.is_contiguous()
    return Array(x.double().tolist(), tuple(x.shape), str(x.dtype).removeprefix("torch."))


def back(x: Array) -> Tensor:
    return torch.tensor(x.nested, dtype=torch.float64).reshape(x.shape).to(getattr(torch, x.dtype))


def of_lists(query: Array, key: Array, value: Array, *, scale: float | None = None, return_lse: bool = False) -> Any:
    """softmax(scale q k') v on lists [B, H, S, D]."""
    if query.shape[1] != key.shape[1]:
        raise NotImplementedError("grouped heads are not supported")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, sums = [], []
    for q_, k_, v_ in zip(query.nested, key.nested, value.nested, strict=True):
        for q, k, v in zip(q_, k_, v_, strict=True):
            for row in q:
                s = [scale * sum(a * b for a, b in zip(row, other, strict=True)) for other in k]
                top = max(s, default=0.0)
                e = [math.exp(x - top) for x in s]
                out += [
                    sum(p * x[c] for p, x in zip(e, v, strict=True)) / (sum(e) or 1.0) for c in range(value.shape[3])
                ]
                sums.append(top + math.log(sum(e)) if e else -math.inf)
    answer = Array(out, (*query.shape[:3], value.shape[3]), query.dtype)
    return (answer, Array(sums, query.shape[:3], "float32")) if return_lse else answer


def test_a_function_of_other_arrays_is_judged() -> None:
    attention = bridged(of_lists, to, back)
    made = adapt(attention)
    assert made.name == "of_lists"
    assert made.conventions.layout.value == "BHSD"
    assert made.conventions.lse_base.value == "e"
    report = check_attention(attention, laws=["ATN101", "ATN201", "ATN301", "ATN302", "ATN741", "ATN901"])
    assert report.passed, str(report)
    assert {r.outcome for r in report.results if r.code == "ATN901"} <= {"unsupported", "refused"}
    assert any(r.code == "ATN741" and r.outcome == "passed" for r in report.results)


def test_a_wrong_one_is_caught() -> None:
    def unscaled(query: Array, key: Array, value: Array) -> Any:
        return of_lists(query, key, value, scale=1.0)

    report = check_attention(bridged(unscaled, to, back), laws=["ATN301"])
    assert not report.passed
