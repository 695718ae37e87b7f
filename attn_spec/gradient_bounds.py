"""How far right gradients may be from the float64 ones: the bound of `attn_spec.tolerance`, carried backwards.

Each step of the backward pass (`attn_spec.backward`) adds its own rounding to what it got. With |dp_ij| and |do_i| the
forward errors of weights and output, A = |dO| and the roundoffs of `attn_spec.tolerance`:

    err dV    = err(P)' A + gamma(n) P' A + u |dV|                                     n: the queries that share a key
    err dP    = gamma(d_v) A |V|' + u_score |dP|
    err D     = max(A.err(O) + gamma(d_v) A.|O|,  sum_j (err(P) |dP| + P err(dP)) + gamma(Sk) P.|dP|) + u_score |D|
    err dS    = err(P) |dP - D + dL| + P (err dP + err D + 2 u_acc (|dP| + |D| + |dL|)) + (u_weight + u_score) |dS|
    err dX    = err dS (1 - t^2) + |dS| (2 |t| (1 - t^2) err(x) / c + 4 u_tanh)       under a softcap c, t = tanh(x/c)
    err dQ    = |scale| (err(dX) |K| + gamma(Sk) |dX| |K|) + u |dQ|                    dK alike
    err dBias = the sum of err dS as the bias was broadcast + gamma(n) sum |dS| + u |dBias|
    err dSink = sum (err(p_sink) |dL - D| + p_sink (err D + 2 u_acc (|D| + |dL|))) + gamma(n) sum |p_sink (dL - D)|

D may be worked out from the rounded output or from the weights, hence the larger of the two. The share of a sink may be
1 minus that of the keys, so 2 u of it is lost to cancellation. Where a key is shared, the gradient of each query head
may be stored before they are summed: u times the sum of their sizes; in half types the sum may be stored after each of
them, as index_add does: u sqrt(group - 2) of it more. As forwards, small weights may have no relative accuracy (a
running average): err(P) holds gamma(Sk). Code that takes the mean off the keys takes the mean off dK, and spreads its
errors: the mean of err dK over the keys is added. In half types a kernel may keep dK and dV in the output's type while
it adds block after block of queries to them (torch's on a CPU does): u |partial sum| for each block of 32, which add
like the square root of their number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.backward import Gradients, Steps
from attn_spec.conventions import Meaning
from attn_spec.problem import Arguments
from attn_spec.tolerance import (
    Precision,
    bounds,
    gamma,
    half_subnormal,
    logit_errors,
    roundoff,
    tanh_error,
    weight_errors,
)

STORED = 32  # queries after which a sum may be stored


def gradient_bounds(arguments: Arguments, meaning: Meaning, steps: Steps, precision: Precision) -> Gradients:
    """The bound of every element of every gradient; arguments as they were given, all of `steps` float64."""
    t, softcap = steps.forward, steps.forward.softcap
    u, u_acc = roundoff(precision.output), precision.gamma_unit
    u_score, u_weight = roundoff(precision.scores), roundoff(precision.weights)
    u_score = u_score if u_score > u_acc else u_acc
    tiny, tiny_weight = half_subnormal(precision.output), half_subnormal(precision.weights)
    q_len, kv_len, width = t.q.shape[2], t.k.shape[2], t.v.shape[3]
    group = t.q.shape[1] // arguments.k.shape[1]
    variants = softcap, t.slopes, t.sinks
    mean_d, spread = weight_errors(t.q, t.k, t.scale, t.bias, t.logits, t.weights, precision, *variants)
    forward = bounds(t.q, t.k, t.v, t.scale, t.bias, t.logits, t.weights, t.output, precision, *variants)
    size, p = steps.do.abs(), steps.p
    d_weights = p * torch.expm1(spread) + (gamma(kv_len, u_acc) + tiny_weight) * (p > 0)

    e_dp = gamma(width, u_acc) * (size @ t.v.abs().mT) + u_score * steps.dp.abs()
    by_output = (size * (forward.output + gamma(width, u_acc) * t.output.abs())).sum(-1, keepdim=True)
    by_weights = (d_weights * steps.dp.abs() + p * (e_dp + gamma(kv_len, u_acc) * steps.dp.abs())).sum(-1, keepdim=True)
    e_row = torch.maximum(by_output, by_weights) + u_score * steps.row.abs()
    dlse = torch.zeros_like(steps.row) if steps.dlse is None else steps.dlse[..., None]
    sizes = steps.dp.abs() + steps.row.abs() + dlse.abs()
    e_ds = d_weights * (steps.dp - steps.row + dlse).abs() + p * (e_dp + e_row + 2 * u_acc * sizes)
    e_ds = e_ds + (u_weight + u_score) * steps.ds.abs() + tiny_weight * (p > 0)
    e_dx = e_ds
    if softcap is not None:
        tanh = torch.tanh(steps.x / softcap)
        slope = 1 - tanh.square()
        raw = logit_errors(t.q, t.k, t.scale, precision) + 2 * u_acc * steps.x.abs()
        before = steps.ds if meaning.softcap_order == "first" else p * (steps.dp - steps.row + dlse)
        e_dx = e_ds * slope + before.abs() * (2 * tanh.abs() * slope * raw / softcap + 4 * tanh_error(precision))
        e_ds = e_ds if meaning.softcap_order == "first" else e_dx

    n = q_len * group
    dx, scale = steps.dx.abs(), abs(t.scale)
    e_dq = scale * (e_dx @ t.k.abs() + gamma(kv_len, u_acc) * dx @ t.k.abs())
    e_dk = scale * (e_dx.mT @ t.q.abs() + gamma(n, u_acc) * dx.mT @ t.q.abs())
    e_dv = d_weights.mT @ size + gamma(n, u_acc) * p.mT @ size
    e_dk = e_dk + e_dk.mean(dim=-2, keepdim=True)
    if u > roundoff("float32"):  # dK and dV may be stored after each block of queries, and added to
        stores = u * (-(-q_len // STORED) - 1) ** 0.5
        e_dk = e_dk + stores * (scale * (dx.mT.square() @ t.q.square()).sqrt() + steps.dk.abs())
        e_dv = e_dv + stores * ((p.mT.square() @ size.square()).sqrt() + steps.dv.abs())
    if u_score > u_acc:  # the other factor may have been scaled and rounded
        e_dq = e_dq + u_score * scale * (dx.square() @ t.k.square()).sqrt() + u_score * steps.dq.abs()
        e_dk = e_dk + u_score * scale * (dx.mT.square() @ t.q.square()).sqrt() + u_score * steps.dk.abs()

    def shared(error: Tensor, each: Tensor) -> Tensor:
        """The error of a sum over the query heads that share a head."""
        stored = 2 if group > 1 else 1
        between = (group - 2) ** 0.5 if group > 2 and u > roundoff("float32") else 0.0
        both = error + (stored + between) * u * each.abs() + 2 * tiny
        tiled = meaning.grouping == "tiled"
        split = (group, -1) if tiled else (-1, group)
        return both.reshape(len(both), *split, *both.shape[2:]).sum(1 if tiled else 2)

    e_bias = e_sinks = None
    if steps.gradients.bias is not None and arguments.mask is not None:
        shape = tuple(arguments.mask.shape)
        number = steps.ds.numel() // max(1, arguments.mask.numel())
        own = roundoff(str(arguments.mask.dtype).removeprefix("torch."))
        e_bias = (e_ds + gamma(number, u_acc) * steps.ds.abs()).sum_to_size(shape) + 2 * tiny
        e_bias = e_bias + max(u, own) * steps.gradients.bias.abs()
    if steps.gradients.sinks is not None and steps.p_sink is not None and t.sinks is not None:
        p_sink, row = steps.p_sink, steps.row[..., 0]
        lost = 2 * max(u_acc, u_weight)
        d_sink = p_sink * ((4 * u_acc + u_score) * t.sinks.abs()[:, None] + mean_d[..., 0] + gamma(kv_len, u_acc))
        counted = dlse[..., 0] if meaning.lse_sinks == "included" else 0 * dlse[..., 0]
        through = (counted - row).abs()
        e_sinks = (d_sink + lost) * through + p_sink * (e_row[..., 0] + 2 * u_acc * (row.abs() + counted.abs()))
        e_sinks = e_sinks + (gamma(len(p_sink) * q_len, u_acc) + u_score) * p_sink * through
        e_sinks = e_sinks.sum((0, 2)) + u * steps.gradients.sinks.abs() + 2 * tiny
    e_dq = e_dq + u * steps.dq.abs() + 2 * tiny
    return Gradients(e_dq, shared(e_dk, steps.dk), shared(e_dv, steps.dv), e_bias, e_sinks)
