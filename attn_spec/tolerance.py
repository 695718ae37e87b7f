"""How far a right answer may be from the float64 one: a bound for each element, derived and not tuned.

Running error analysis of softmax(scale q k' + bias) v in the manner of Higham, *Accuracy and Stability of Numerical
Algorithms*, ch. 3, and Blanchard, Higham and Higham, *Accurately computing the log-sum-exp and softmax functions*
(2021). With p the weights, s the logits, u the unit roundoff of the output's dtype, u_score, u_weight and u_acc those
of the implementation's `Precision`, gamma(n) the growth of a sum of n terms:

    d_ij    = gamma(d) |scale| |q_i|.|k_j| + 2 u_acc (|scale q_i.k_j| + |bias_ij|) + u_score |s_ij|     (visible keys)
    |dp_ij| <= p_ij (exp(d_ij + sum_k p_ik d_ik + gamma(Sk) + u_weight) - 1)
    |do_i|  <= sum_j |dp_ij| |v_j| + gamma(Sk) (sum_j p_ij |v_j| + max_j |v_j|) + u |o_i|

The term with max_j |v_j| (over visible keys) is that of code which moves a running average, o + w (v - o): its error
is relative to the values and not to their share in the row, and small weights have no relative accuracy. To it comes
half of the smallest subnormal for each of two stores, of the sum and of the result, and for each weight; where the
scores are kept in the output's dtype, so may be the products p_ij v_j, whose roundings add like 2 sqrt(Sk) of them.

Where the scores are rounded to a half type, so may be
the scaled q or k: u_score then also multiplies |scale| (q_i^2 . k_j^2)^(1/2), the size of such roundings when they are
independent.

With a softcap c and t = tanh(s / c), the error of what goes in is multiplied by the derivative 1 - t^2, and that of the
function, 4 u_acc |c t|, is added; 2^-11 stands for u_acc there in half types, the error of the tanh that GPUs have.
What slopes add counts as a bias, of which each term is rounded to float32 (slopes come in it) and to the scores' type.
A sink is one more logit: its own
error weighs as its share does. For the log-sum-exp, sum_k p_ik d_ik + gamma(Sk) + 4 u_acc (|lse| + ln Sk + 1).

gamma(n) = u_acc min(n, 2 sqrt(n) + 2): rounding errors of a sum are taken as independent with mean zero (Higham and
Mary, 2019), with room for two standard deviations and two more operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_spec.problem import DTYPES


def roundoff(dtype: str) -> float:
    """The unit roundoff of a dtype: half the distance from 1 to the next number."""
    return float(torch.finfo(DTYPES[dtype]).eps) / 2


def half_subnormal(dtype: str) -> float:
    """Half of the smallest positive number of a dtype."""
    info = torch.finfo(DTYPES[dtype])
    return float(info.smallest_normal * info.eps / 2)


@dataclass(frozen=True)
class Precision:
    """The dtypes an implementation rounds to: its scores, its weights, its sums; and that of its output."""

    scores: str
    weights: str
    accumulate: str
    output: str

    def __str__(self) -> str:
        return f"scores {self.scores}, weights {self.weights}, sums {self.accumulate}"

    @property
    def gamma_unit(self) -> float:
        return roundoff(self.accumulate)


def candidates(dtype: str) -> list[Precision]:
    """The precisions that honest code has on inputs of this dtype, the finest first."""
    if dtype == "float64":
        return [Precision("float64", "float64", "float64", dtype), Precision("float32", "float32", "float32", dtype)]
    if dtype == "float32":
        return [Precision("float32", "float32", "float32", dtype)]
    return [
        Precision("float32", dtype, "float32", dtype),
        Precision(dtype, dtype, "float32", dtype),
        Precision(dtype, dtype, dtype, dtype),
    ]


def gamma(n: int, u: float) -> float:
    return float(u * min(n, 2 * n**0.5 + 2))


@dataclass(frozen=True, eq=False)
class Bounds:
    """The largest honest error of each element of the output, the weights and the log-sum-exp."""

    output: Tensor
    weights: Tensor
    lse: Tensor


def bounds(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    logits: Tensor,
    weights: Tensor,
    output: Tensor,
    precision: Precision,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Bounds:
    """The bound of every element of one (block of an) answer; all tensors float64, heads already shared out."""
    u, u_acc = roundoff(precision.output), precision.gamma_unit
    tiny = half_subnormal(precision.output)
    sum_growth = gamma(k.shape[2], u_acc)
    shown = logits > -torch.inf
    mean_d, spread = weight_errors(q, k, scale, bias, logits, weights, precision, softcap, slopes, sinks)
    d_weights = weights * torch.expm1(spread)
    plain = weights @ v.abs()
    largest = torch.where(shown, v.abs().amax(-1)[..., None, :], 0.0)
    largest = largest.amax(-1, keepdim=True) if k.shape[2] else largest.new_zeros((*largest.shape[:-1], 1))
    d_output = d_weights @ v.abs() + sum_growth * (plain + largest) + u * output.abs()
    stores = 2 + 2 * k.shape[2] ** 0.5 if precision.scores == precision.output else 2
    d_output = d_output + stores * tiny + half_subnormal(precision.weights) * v.abs().sum(-2, keepdim=True)
    lse = torch.logsumexp(logits, -1) if k.shape[2] else logits.new_zeros(logits.shape[:-1])
    lse = torch.where(lse.isfinite(), lse, 0.0).abs()
    if sinks is not None:
        lse = torch.maximum(lse, sinks.abs()[:, None])
    d_lse = mean_d[..., 0] + sum_growth + 4 * u_acc * (lse + math.log(k.shape[2] + 1) + 1)
    return Bounds(d_output, d_weights + u * weights + sum_growth + half_subnormal(precision.weights), d_lse)


def weight_errors(
    q: Tensor,
    k: Tensor,
    scale: float,
    bias: Tensor | None,
    logits: Tensor,
    weights: Tensor,
    precision: Precision,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What the logits' errors make of the log-sum-exp [B, H, Sq, 1]; and x, where a weight is off by exp(x) - 1."""
    u_acc, u_score = precision.gamma_unit, roundoff(precision.scores)
    shown = logits > -torch.inf
    d = logit_errors(q, k, scale, precision, softcap)
    if bias is not None:
        d = d + 2 * u_acc * torch.where(shown, bias, 0.0).abs()
    if slopes is not None:
        d = d + (4 * max(u_acc, roundoff("float32")) + u_score) * slopes.abs()
    d = d + u_score * torch.where(shown, logits, 0.0).abs()
    d = torch.where(shown, d, 0.0)
    mean_d = (weights * d).sum(-1, keepdim=True)
    if sinks is not None:  # its share of the row, times its own error
        left = (1 - weights.sum(-1, keepdim=True)).clamp(min=0.0)
        mean_d = mean_d + left * (2 * u_acc + u_score) * sinks.abs()[:, None, None]
    return mean_d, (d + mean_d + gamma(k.shape[2], u_acc) + roundoff(precision.weights)).clamp(max=60.0)


def logit_errors(q: Tensor, k: Tensor, scale: float, precision: Precision, softcap: float | None = None) -> Tensor:
    """The error of each scaled, capped product before anything is added [B, H, Sq, Sk]."""
    u_acc, u_score = precision.gamma_unit, roundoff(precision.scores)
    products = q @ k.mT
    d = gamma(q.shape[-1], u_acc) * abs(scale) * (q.abs() @ k.abs().mT) + 2 * u_acc * abs(scale) * products.abs()
    if u_score > u_acc:
        d = d + u_score * abs(scale) * (q.square() @ k.square().mT).sqrt()
    if softcap is None:
        return d
    d = d + (u_score + 2 * u_acc) * abs(scale) * products.abs()  # the quotient by the cap is one more rounding
    t = torch.tanh(scale / softcap * products)
    slope = (1 - t.square() + 2 * d / softcap).clamp(max=1.0)  # the derivative, at most, within that error
    return slope * d + tanh_error(precision) * softcap * t.abs()


def tanh_error(precision: Precision) -> float:
    """The relative error of a hyperbolic tangent."""
    u_acc, u_score = precision.gamma_unit, roundoff(precision.scores)
    half = roundoff(precision.output) > roundoff("float32")
    return max(4 * u_acc, 2 * u_score if u_score > u_acc else 0.0, 2.0**-11 if half else 0.0)


@dataclass(frozen=True)
class Worst:
    """The element where a result is furthest beyond its bound; `ratio` is error / bound there."""

    ratio: float
    index: tuple[int, ...]
    got: float
    expected: float
    bound: float

    @property
    def holds(self) -> bool:
        return self.ratio <= 1.0


def unravelled(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of the element at a place of the flattened tensor (torch.unravel_index imports sympy: 0.8 s)."""
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.insert(0, rest)
    return tuple(index)


def worst(got: Tensor, expected: Tensor, bound: Tensor) -> Worst:
    """Compare element by element. A NaN or an infinity is right only where the expected value is the same one.

    A bound that is no number allows nothing.
    """
    got = got.detach().to(device=expected.device, dtype=torch.float64)
    if not got.numel():
        return Worst(0.0, (), 0.0, 0.0, 0.0)
    error = (got - expected).abs()
    ratio = error / torch.where(bound.isfinite(), bound, 0.0).clamp(min=torch.finfo(torch.float64).tiny)
    same = (got == expected) | (got.isnan() & expected.isnan())
    ratio = torch.where(same, 0.0, torch.where(ratio.isnan() | got.isnan() | expected.isnan(), torch.inf, ratio))
    place = int(ratio.argmax())
    index = unravelled(place, ratio.shape)
    return Worst(
        float(ratio.flatten()[place]),
        index,
        float(got.flatten()[place]),
        float(expected.flatten()[place]),
        float(bound.expand_as(ratio).flatten()[place]),
    )
