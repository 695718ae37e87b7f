"""What the timed calls should give: the oracle's rows with their bounds, and gradients of the reference pipeline."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_spec import blocks, masks, oracle, values
from attn_spec.conventions import Meaning
from attn_spec.problem import DTYPES, Arguments, Problem
from attn_spec.tolerance import Precision, Worst, roundoff, worst

ROW_LOGITS = 1 << 20  # logits of the rows that are compared: about a tenth of a second of float64 on one core
ROW_ELEMENTS = 1 << 15  # of the output, compared after every reading: more would take longer than a short call
GRADIENT_LOGITS = 1 << 24  # above, only the gradient of q is compared, on those rows


Drawn = tuple[Tensor, Tensor, Tensor]


def drawn(problem: Problem, seed: int) -> Drawn:
    """q, k and v of a problem in its dtype, drawn anew and kept nowhere else: those of a long problem are large."""
    p = problem
    sizes = (p.batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.v_dim)
    q, k, v = (x.to(p.torch_dtype) for x in values.draw(p.values, sizes, seed))
    return q, k, v


def inputs(problem: Problem, meaning: Meaning, seed: int, given: Drawn | None = None) -> Arguments:
    """The arguments of a problem, of these q, k and v (copied), else of some drawn anew."""
    p = problem
    q, k, v = drawn(p, seed) if given is None else (x.clone() for x in given)
    dtype = DTYPES[p.delivery.dtype] if p.delivery.dtype else p.torch_dtype
    mask = masks.delivered(p.mask, p.delivery, p.sizes, p.seed, meaning.alignment, dtype, p.torch_dtype)
    return Arguments(q, k, v, mask, None if mask is None else p.delivery.form, p.causal_by_flag, p.scale)


def some_rows(problem: Problem, generator: torch.Generator) -> Tensor:
    """Indices of the queries that are compared: all of them where that is cheap, else so many at random."""
    heads = max(1, problem.batch * problem.heads)
    cheap = min(ROW_LOGITS // (heads * max(1, problem.kv_len)), ROW_ELEMENTS // (heads * problem.v_dim))
    count = min(problem.q_len, max(8, cheap))
    return torch.randperm(problem.q_len, generator=generator)[:count].sort().values


def of_rows(arguments: Arguments, rows: Tensor, meaning: Meaning) -> Arguments:
    """The same attention for some of its queries only: the causal flag becomes part of the mask."""
    mask, form = arguments.mask, arguments.form
    _, heads, q_len, kv_len = arguments.sizes
    if mask is not None and form == "key-padding":
        mask, form = mask[:, None, None, :], "bool"
    elif mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if arguments.causal:
        past = blocks.causal(rows[:, None], torch.arange(kv_len)[None], q_len, kv_len, meaning.alignment, heads)
        if mask is None:
            mask, form = past, "bool"
        elif mask.dtype == torch.bool:
            mask = mask & past
        else:
            mask = mask.masked_fill(~past, -torch.inf)
    return arguments.replace(q=arguments.q[:, :, rows], mask=mask, form=form, causal=False)


@dataclass(frozen=True, eq=False)
class Expected:
    """rows: the queries that are compared.  output, bound [B, H, rows, Dv], float64.
    cotangent: dOut [B, H, Sq, Dv] in the inputs' dtype, and gradients: the float64 dq (on the rows), dk, dv for it."""

    rows: Tensor
    output: Tensor
    bound: Tensor
    cotangent: Tensor | None = None
    gradients: dict[str, Tensor] | None = None

    def holds(self, output: Tensor, sign: float) -> bool:
        """Whether rows of an output (already picked) are right; sign: -1 where V has changed its sign."""
        quickly = (output.cpu().double() - sign * self.output).abs() <= self.bound
        return bool(quickly.all()) or self.compare(output, sign).holds

    def gradient(self, name: str, sign: float) -> Tensor | None:
        """The gradient of an input by its name; None where it is not known."""
        found = (self.gradients or {}).get(name)
        return found if found is None or name == "v" else sign * found

    def compare(self, output: Tensor, sign: float) -> Worst:
        """Where such rows are furthest off."""
        return worst(output, sign * self.output, self.bound)


def expected(
    arguments: Arguments, rows: Tensor, meaning: Meaning, precision: Precision, cotangent: Tensor | None = None
) -> Expected:
    """The right answer on some rows; with a cotangent also the gradients."""
    answer = oracle.answer(of_rows(arguments, rows, meaning), meaning, precision)
    found = None if cotangent is None else _gradients(arguments, rows, meaning, cotangent)
    return Expected(rows, answer.output, answer.bounds.output, cotangent, found)


def _gradients(arguments: Arguments, rows: Tensor, meaning: Meaning, cotangent: Tensor) -> dict[str, Tensor]:
    b, h, q_len, kv_len = arguments.sizes
    whole = b * h * q_len * kv_len <= GRADIENT_LOGITS
    exact = arguments.double()
    k, v = (x.clone().requires_grad_() for x in (exact.k, exact.v))
    wanted = torch.arange(q_len) if whole else rows
    step = max(1, ROW_LOGITS // max(1, b * h * kv_len))
    pieces = []
    with torch.enable_grad():
        for start in range(0, len(wanted), step):
            part = wanted[start : start + step]
            some = of_rows(exact, part, meaning)
            q = some.q.clone().requires_grad_()
            output = blocks.run(some.replace(q=q, k=k, v=v), meaning).output
            output.backward(cotangent[:, :, part].double())  # type: ignore[no-untyped-call]
            assert q.grad is not None
            pieces.append(q.grad)
    dq = torch.cat(pieces, dim=2)
    if not whole:
        return {"q": dq}
    assert k.grad is not None
    assert v.grad is not None
    return {"q": dq[:, :, rows], "k": k.grad, "v": v.grad}


def gradient_error(got: Tensor, right: Tensor) -> float:
    """The largest error of a gradient, in units of the largest element of the right one."""
    largest = float(right.abs().max()) if right.numel() else 0.0
    error = (got.detach().cpu().double() - right).abs()
    worst_error = float(error.nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0
    return float(worst_error / max(largest, 1e-300))


def gradient_bound(dtype: str, length: int) -> float:
    """What an honest gradient may be off by, in those units: coarse, there is no bound of each element here."""
    return 16 * roundoff(dtype) * math.sqrt(max(length, 16))
