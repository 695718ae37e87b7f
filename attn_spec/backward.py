"""The backward pass of the reference pipeline, as a row of small pure functions, each of which can be changed.

    recall -> recompute -> receive -> to_values -> to_weights -> row_term -> to_logits -> to_bias, to_sinks
           -> to_products -> to_queries, to_keys -> gather

With O = P V, L = log sum exp and the cotangents dO and dL:

    dV = P' dO      dP = dO V'      D = rowsum(dO o O)      dS = P o (dP - D + dL)
    dBias = dS, summed as the bias was broadcast      dSink = sum_i p_sink (dL - D)
    dX = dS (1 - tanh(x / c)^2) under a softcap c      dQ = scale dX K      dK = scale dX' Q, summed over its heads

As in fused kernels the weights are worked out anew from the logits and the log-sum-exp, P = exp(S - L), so a backward
pass may forget what the forward pass heeded. Shapes as in `attn_spec.blocks`; all tensors in one dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_spec import blocks
from attn_spec.blocks import Trace
from attn_spec.conventions import Meaning
from attn_spec.problem import Arguments

# the blocks ----------------------------------------------------------------------------------------------------------


def recall(a: Arguments) -> Arguments:
    """What the backward pass heeds of what was asked: all that the forward pass does."""
    return a


def recompute(s: Tensor, lse: Tensor) -> Tensor:
    """The weights again, from the logits and the log-sum-exp; a row with no visible key has none."""
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


def receive(do: Tensor) -> Tensor:
    """The cotangent of the output as it comes, whatever its strides."""
    return do


def to_values(p: Tensor, do: Tensor) -> Tensor:
    """The gradient of the values."""
    return p.mT @ do


def to_weights(do: Tensor, v: Tensor) -> Tensor:
    """The gradient of the weights."""
    return do @ v.mT


def row_term(do: Tensor, o: Tensor, dp: Tensor, p: Tensor) -> Tensor:
    """What normalising takes from each row [B, H, Sq, 1]: rowsum(dO o O), which is rowsum(P o dP)."""
    return (do * o).sum(dim=-1, keepdim=True)


def to_logits(p: Tensor, dp: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of the logits, through the output and through the log-sum-exp."""
    return p * (dp - row) if dlse is None else p * (dp - row + dlse[..., None])


def to_bias(ds: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a bias of this shape: summed over the axes along which it was broadcast."""
    return ds.sum_to_size(shape)


def to_sinks(p_sink: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    """The gradient of the sinks [H]; p_sink [B, H, Sq] is the share of the sink."""
    ds = -p_sink * row[..., 0]
    if dlse is not None:
        ds = ds + p_sink * dlse
    return ds.sum(dim=(0, 2))


def to_products(ds: Tensor, x: Tensor, softcap: float | None) -> Tensor:
    """The gradient of the scaled products x: through the derivative of softcap * tanh(x / softcap)."""
    return ds if softcap is None else ds * (1 - torch.tanh(x / softcap).square())


def to_queries(dx: Tensor, k: Tensor, scale: float) -> Tensor:
    """The gradient of the queries."""
    return dx @ k * scale


def to_keys(dx: Tensor, q: Tensor, scale: float) -> Tensor:
    """The gradient of the keys, for each query head."""
    return dx.mT @ q * scale


def gather(x: Tensor, kv_heads: int, grouping: str) -> Tensor:
    """Gradients for each query head [B, H, Sk, D], summed over the query heads that share a key/value head."""
    if grouping == "tiled":
        return x.reshape(len(x), -1, kv_heads, *x.shape[2:]).sum(dim=1)
    return x.reshape(len(x), kv_heads, -1, *x.shape[2:]).sum(dim=2)


# the pass ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backward:
    """The blocks of one backward pass; `Backward()` is right."""

    recall: Callable[..., Any] = recall
    recompute: Callable[..., Any] = recompute
    receive: Callable[..., Any] = receive
    to_values: Callable[..., Any] = to_values
    to_weights: Callable[..., Any] = to_weights
    row_term: Callable[..., Any] = row_term
    to_logits: Callable[..., Any] = to_logits
    to_bias: Callable[..., Any] = to_bias
    to_sinks: Callable[..., Any] = to_sinks
    to_products: Callable[..., Any] = to_products
    to_queries: Callable[..., Any] = to_queries
    to_keys: Callable[..., Any] = to_keys
    gather: Callable[..., Any] = gather


BLOCKS: dict[str, Callable[..., Any]] = {f.name: f.default for f in dataclasses.fields(Backward)}  # type: ignore[misc]
RIGHT = Backward()
NAMES = ("q", "k", "v", "bias", "sinks")


@dataclass(frozen=True, eq=False)
class Cotangents:
    """What comes back to the output [B, H, Sq, Dv] and, where it is differentiated too, the log-sum-exp [B, H, Sq]."""

    output: Tensor
    lse: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Cotangents:
        return Cotangents(self.output.to(dtype), None if self.lse is None else self.lse.to(dtype))


@dataclass(frozen=True, eq=False)
class Gradients:
    """Of q, k, v as they were given; of an additive mask, in its shape; of the sinks [H]. None: there is none."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Steps:
    """Every tensor of one backward pass."""

    forward: Trace
    p: Tensor
    p_sink: Tensor | None
    do: Tensor
    dlse: Tensor | None
    dp: Tensor
    row: Tensor
    ds: Tensor
    x: Tensor
    dx: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    gradients: Gradients


def run(arguments: Arguments, meaning: Meaning, given: Cotangents, backward: Backward = RIGHT) -> Steps:
    """Run a backward pass on the arguments, in their dtype, after the right forward pass."""
    pass_, t = backward, blocks.run(arguments, meaning)
    again = pass_.recall(arguments)
    seen = t if again is arguments else blocks.run(again, meaning)
    p = pass_.recompute(seen.logits, blocks.log_sum(t.logits, t.sinks))
    do, dlse = pass_.receive(given.output), given.lse
    dv = pass_.to_values(p, do)
    dp = pass_.to_weights(do, t.v)
    row = pass_.row_term(do, t.output, dp, p)
    ds = pass_.to_logits(p, dp, row, dlse)
    x = seen.q @ seen.k.mT * seen.scale
    if meaning.softcap_order == "after-bias":
        x = x + sum(add for add in (seen.bias, seen.slopes) if add is not None)
        ds = pass_.to_products(ds, x, seen.softcap)
    dx = ds if meaning.softcap_order == "after-bias" else pass_.to_products(ds, x, seen.softcap)
    dq, dk = pass_.to_queries(dx, seen.k, seen.scale), pass_.to_keys(dx, seen.q, seen.scale)
    kv_heads, mask = arguments.k.shape[1], arguments.mask
    p_sink, sinks, bias = None, None, None
    if arguments.sinks is not None:
        p_sink = torch.exp(arguments.sinks[:, None] - blocks.log_sum(t.logits, t.sinks))
        counted = dlse if meaning.lse_sinks == "included" else None
        sinks = pass_.to_sinks(p_sink, row, counted)
    if mask is not None and arguments.form == "additive":
        bias = pass_.to_bias(ds, tuple(mask.shape))
    k, v = (pass_.gather(g, kv_heads, meaning.grouping) for g in (dk, dv))
    gradients = Gradients(dq, k, v, bias, sinks)
    return Steps(t, p, p_sink, do, dlse, dp, row, ds, x, dx, dq, dk, dv, gradients)
