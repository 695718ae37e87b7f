"""The oracle for a whole module: hidden states through its own projections, attention, and its output projection.

In float64, with a bound for each element: the errors of the projections (running error analysis of their sums) go
through the softmax to first order and through the output projection in full.

    dq = (gamma(n) + 2u) (|x| |W| + |b|), dk and dv alike
    ds = |scale| (dq |k|' + |q| dk'),  do = [p (exp(ds + sum p ds) - 1)] |v| + p dv + (the bound of attention itself)
    dg = dz / 4 + 4u g  for a gate g = sigmoid(z) on o, where there is one
    dy = do |W_o| + (gamma(m) + 2u) (|o| |W_o| + |b_o|)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_spec import oracle
from attn_spec.blocks import choose_scale, share_heads
from attn_spec.conventions import Meaning
from attn_spec.problem import Arguments
from attn_spec.tolerance import Precision, gamma, roundoff


@dataclass(frozen=True, eq=False)
class Whole:
    """The right output [B, S, width] in float64 and its bound; weights [B, H, S, Sk] and theirs."""

    output: Tensor
    bound: Tensor
    weights: Tensor
    weights_bound: Tensor


def projected(x: Tensor, matrix: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """[B, S, in] -> [B, H, S, D]: one projection, its channels head after head."""
    y = x @ matrix
    y = y if bias is None else y + bias
    return y.reshape(*y.shape[:-1], heads, -1).transpose(1, 2)


@torch.no_grad()
def answer(
    x: Tensor,
    context: Tensor | None,
    weights: Mapping[str, Tensor],
    like: Arguments,
    meaning: Meaning,
    precision: Precision,
    arrive: Callable[[Arguments], Arguments] | None = None,
) -> Whole:
    """The output of a module with these weights ([in, out], head after head) on x [B, S, in] and context [B, Sk, in].

    like: arguments whose mask, causal flag, head counts and dtype are those of the call; its q, k and v are not read.
    arrive: what becomes of q and k on the way to their product, each token and head for itself; None: nothing.
    """
    u, u_acc = roundoff(precision.output), precision.gamma_unit
    xs = {"q": x.double(), "k": (x if context is None else context).double()}
    xs["v"] = xs["k"]
    heads = {"q": like.q.shape[1], "k": like.k.shape[1], "v": like.k.shape[1]}
    exact, error = {}, {}
    for name in "qkv":
        w, b = weights[name], weights.get(f"{name}_bias")
        exact[name] = projected(xs[name], w, b, heads[name])
        size = projected(xs[name].abs(), w.abs(), None if b is None else b.abs(), heads[name])
        error[name] = (gamma(w.shape[0], u_acc) + 2 * u) * size
    scale_given = 1.0 if like.scale is None and meaning.scale == "1" else like.scale
    arguments = like.replace(q=exact["q"], k=exact["k"], v=exact["v"])
    if arrive is not None:
        arrived = arrive(arguments)
        rounded = max(u, torch.finfo(arrived.q.dtype).eps / 2, torch.finfo(arrived.k.dtype).eps / 2)
        arguments = arrived.replace(q=arrived.q.double(), k=arrived.k.double())  # a rotation may be in float32 always
        for name, seen in (("q", arguments.q), ("k", arguments.k)):
            grown = seen.norm(dim=-1, keepdim=True) / exact[name].norm(dim=-1, keepdim=True).clamp(min=1e-30)
            error[name] = 2 * error[name].norm(dim=-1, keepdim=True) * grown + 4 * rounded * seen.abs()
            exact[name] = seen
    right = oracle.answer(arguments, meaning, precision, weights=True)
    assert right.weights is not None
    p, scale = right.weights, choose_scale(scale_given, exact["q"], exact["k"], exact["v"])
    k, v, dk, dv = (
        share_heads(y, heads["q"], meaning.grouping) for y in (exact["k"], exact["v"], error["k"], error["v"])
    )
    ds = abs(scale) * (error["q"] @ k.abs().mT + exact["q"].abs() @ dk.mT)
    ds = torch.where(p > 0, ds, 0.0)
    spread = (ds + (p * ds).sum(-1, keepdim=True)).clamp(max=60.0)
    bound = right.bounds.output + (p * torch.expm1(spread)) @ v.abs() + p @ dv
    d_weights = right.bounds.weights + p * torch.expm1(spread)
    merged, d_merged = (y.transpose(1, 2).flatten(2) for y in (right.output, bound))
    if "g" in weights:
        merged, d_merged = _gated(merged, d_merged, xs["q"], weights, u, u_acc)
    if "o" not in weights:
        return Whole(merged, d_merged, p, d_weights)
    w, b = weights["o"], weights.get("o_bias")
    output = merged @ w if b is None else merged @ w + b
    size = merged.abs() @ w.abs() + (0.0 if b is None else b.abs())
    d_output = d_merged @ w.abs() + (gamma(w.shape[0], u_acc) + 2 * u) * size
    return Whole(output, d_output, p, d_weights)


def _gated(
    merged: Tensor, bound: Tensor, x: Tensor, weights: Mapping[str, Tensor], u: float, u_acc: float
) -> tuple[Tensor, Tensor]:
    """The heads' outputs times the sigmoid of x W_g + b_g, and their bound: a sigmoid is no steeper than 1/4."""
    w, b = weights["g"], weights.get("g_bias")
    logits, size = x @ w, x.abs() @ w.abs()
    if b is not None:
        logits, size = logits + b, size + b.abs()
    gate = torch.sigmoid(logits)
    d_gate = (gamma(w.shape[0], u_acc) + 2 * u) * size / 4 + 4 * u * gate
    output = merged * gate
    return output, bound * (gate + d_gate) + merged.abs() * d_gate + 2 * u * output.abs()
