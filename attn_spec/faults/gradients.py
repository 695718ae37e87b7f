"""Faults of the backward pass alone: the output is right, and what is learned from it is wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_spec.faults.fault import fault

# the formulas --------------------------------------------------------------------------------------------------------


@fault(
    "to_logits",
    "the row term is left out of the gradient of the softmax",
    sources=("triton-lang/triton#7216",),
    advice="dS = P * (dP - rowsum(dO * O)).",
)
def row_term_missing(p: Tensor, dp: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    return p * dp if dlse is None else p * (dp + dlse[..., None])


@fault(
    "row_term",
    "the row term is that of one element of the row instead of their sum",
    sources=("tile-ai/tilelang#2461",),
    advice="Sum dO * O over the channels.",
)
def row_term_is_mean(do: Tensor, o: Tensor, dp: Tensor, p: Tensor) -> Tensor:
    return (do * o).mean(dim=-1, keepdim=True)


@fault(
    "row_term",
    "the row term is summed over rows whose weights were taken to sum to 1, without what the sink takes",
    sources=("NVIDIA/cudnn-frontend#676",),
    advice="rowsum(dO * O) with the output that the sink has made smaller.",
)
def row_term_without_sink(do: Tensor, o: Tensor, dp: Tensor, p: Tensor) -> Tensor:
    return (do * o).sum(dim=-1, keepdim=True) / p.sum(dim=-1, keepdim=True).clamp(min=1e-30)


@fault(
    "to_logits",
    "what comes back to the log-sum-exp is dropped",
    sources=("sgl-project/sglang#40903",),
    advice="Add the cotangent of the log-sum-exp: dS = P * (dP - rowsum(dO * O) + dL).",
)
def lse_cotangent_dropped(p: Tensor, dp: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    return p * (dp - row)


@fault(
    "to_logits",
    "what comes back to the log-sum-exp has the wrong sign",
    sources=("sgl-project/sglang#40903",),
    advice="dS = P * (dP - rowsum(dO * O) + dL).",
)
def lse_cotangent_negated(p: Tensor, dp: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    return p * (dp - row) if dlse is None else p * (dp - row - dlse[..., None])


@fault(
    "to_queries",
    "the gradient of the queries is not scaled",
    sources=("triton-lang/triton#7216",),
    advice="dQ = scale * dS K.",
)
def query_gradient_unscaled(dx: Tensor, k: Tensor, scale: float) -> Tensor:
    return dx @ k


@fault(
    "to_keys",
    "the gradient of the keys is not scaled",
    sources=("triton-lang/triton#7216",),
    advice="dK = scale * dS' Q.",
)
def key_gradient_unscaled(dx: Tensor, q: Tensor, scale: float) -> Tensor:
    return dx.mT @ q


@fault(
    "to_keys",
    "the gradient of the keys is scaled twice: the queries were scaled already",
    sources=("triton-lang/triton#7216",),
    advice="dK = scale * dS' Q, with Q as it was given.",
)
def key_gradient_scaled_twice(dx: Tensor, q: Tensor, scale: float) -> Tensor:
    return dx.mT @ q * scale * scale


@fault(
    "to_queries",
    "the gradient of the queries is in base 2: ln 2 is missing",
    sources=("triton-lang/triton#7216",),
    advice="Where logits are kept in base 2, multiply dQ by ln 2 in the end.",
)
def query_gradient_in_base_two(dx: Tensor, k: Tensor, scale: float) -> Tensor:
    return dx @ k * scale / math.log(2)


@fault(
    "to_queries",
    "no gradient reaches the queries",
    sources=("paiml/aprender#2203",),
    advice="Do not detach the queries.",
)
def query_gradient_cut(dx: Tensor, k: Tensor, scale: float) -> Tensor:
    return 0 * (dx @ k)


@fault(
    "to_keys",
    "no gradient reaches the keys",
    sources=("paiml/aprender#2203",),
    advice="Do not detach the keys.",
)
def key_gradient_cut(dx: Tensor, q: Tensor, scale: float) -> Tensor:
    return 0 * (dx.mT @ q)


@fault(
    "to_values",
    "no gradient reaches the values",
    sources=("paiml/aprender#2203",),
    advice="Do not detach the values.",
)
def value_gradient_cut(p: Tensor, do: Tensor) -> Tensor:
    return 0 * (p.mT @ do)


@fault(
    "to_values",
    "the gradient of the values uses weights that were not normalised",
    sources=("pytorch/pytorch#119320",),
    advice="dV = P' dO with the weights of the forward pass.",
)
def value_gradient_unnormalised(p: Tensor, do: Tensor) -> Tensor:
    return (p / p.amax(dim=-1, keepdim=True).clamp(min=1e-30)).mT @ do


@fault(
    "to_products",
    "the derivative of the softcap is left out",
    sources=("Dao-AILab/flash-attention#1033",),
    advice="Multiply dS by 1 - tanh(x / softcap)^2.",
)
def softcap_derivative_missing(ds: Tensor, x: Tensor, softcap: float | None) -> Tensor:
    return ds


@fault(
    "to_products",
    "the derivative of the softcap is taken at the capped logits",
    sources=("Dao-AILab/flash-attention#1033",),
    advice="1 - (capped / softcap)^2 is the derivative; tanh must not be applied again.",
)
def softcap_derivative_of_capped(ds: Tensor, x: Tensor, softcap: float | None) -> Tensor:
    return ds if softcap is None else ds * (1 - torch.tanh(torch.tanh(x / softcap)).square())


@fault(
    "to_products",
    "the derivative of the softcap is divided by the softcap",
    sources=("Dao-AILab/flash-attention#1033",),
    advice="The factor softcap outside and 1 / softcap inside cancel.",
)
def softcap_derivative_divided(ds: Tensor, x: Tensor, softcap: float | None) -> Tensor:
    return ds if softcap is None else ds * (1 - torch.tanh(x / softcap).square()) / softcap


# what is summed ------------------------------------------------------------------------------------------------------


@fault(
    "to_bias",
    "the gradient of a bias is that of the first sample",
    sources=("jax-ml/jax#30593",),
    advice="Sum over the axes along which the bias was broadcast.",
)
def bias_gradient_of_first_sample(ds: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ds.sum_to_size(shape) if len(shape) == 4 and shape[0] > 1 else ds[:1].sum_to_size(shape)


@fault(
    "to_bias",
    "the gradient of a bias is averaged, not summed, over what it was broadcast along",
    sources=("jax-ml/jax#30593",),
    advice="Sum over the axes along which the bias was broadcast.",
)
def bias_gradient_averaged(ds: Tensor, shape: tuple[int, ...]) -> Tensor:
    return ds.sum_to_size(shape) * math.prod(shape) / max(1, ds.numel())


@fault(
    "to_bias",
    "no gradient reaches the bias",
    sources=("pytorch/pytorch#188302",),
    advice="Return dS, summed as the bias was broadcast.",
)
def bias_gradient_missing(ds: Tensor, shape: tuple[int, ...]) -> Tensor:
    return 0 * ds.sum_to_size(shape)


@fault(
    "to_sinks",
    "no gradient reaches the sinks",
    sources=("NVIDIA/TransformerEngine#2541", "NVIDIA/cudnn-frontend#676"),
    advice="dSink = - sum over samples and queries of p_sink * rowsum(dO * O).",
)
def sink_gradient_missing(p_sink: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    return 0 * p_sink.sum(dim=(0, 2))


@fault(
    "to_sinks",
    "the share of the sink is left out of its gradient",
    sources=("NVIDIA/cudnn-frontend#676",),
    advice="Multiply by p_sink = exp(sink - lse).",
)
def sink_gradient_without_share(p_sink: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    ds = -row[..., 0]
    if dlse is not None:
        ds = ds + dlse
    return ds.sum(dim=(0, 2))


@fault(
    "to_sinks",
    "the gradient of the sinks is that of the last query",
    sources=("NVIDIA/cudnn-frontend#676",),
    advice="Sum over samples and queries.",
)
def sink_gradient_of_last_query(p_sink: Tensor, row: Tensor, dlse: Tensor | None) -> Tensor:
    ds = -p_sink * row[..., 0]
    if dlse is not None:
        ds = ds + p_sink * dlse
    return ds[..., -1].sum(dim=0)


@fault(
    "gather",
    "keys and values get the gradient of the first query head of their group",
    sources=("marin-community/levanter#449", "fla-org/flash-linear-attention#384"),
    advice="Sum over the query heads that share a head.",
)
def group_gradient_of_first_head(x: Tensor, kv_heads: int, grouping: str) -> Tensor:
    if grouping == "tiled":
        return x.reshape(len(x), -1, kv_heads, *x.shape[2:])[:, 0]
    return x.reshape(len(x), kv_heads, -1, *x.shape[2:])[:, :, 0]


@fault(
    "gather",
    "the gradients of the query heads that share a head are averaged",
    sources=("marin-community/levanter#449",),
    advice="Sum over the query heads that share a head.",
)
def group_gradient_averaged(x: Tensor, kv_heads: int, grouping: str) -> Tensor:
    if grouping == "tiled":
        return x.reshape(len(x), -1, kv_heads, *x.shape[2:]).mean(dim=1)
    return x.reshape(len(x), kv_heads, -1, *x.shape[2:]).mean(dim=2)


@fault(
    "gather",
    "gradients are summed over heads h, h + Hkv, ... instead of neighbours",
    sources=("fla-org/flash-linear-attention#384",),
    advice="Query head h belongs to head h // group.",
)
def group_gradient_tiled(x: Tensor, kv_heads: int, grouping: str) -> Tensor:
    return x.reshape(len(x), -1, kv_heads, *x.shape[2:]).sum(dim=1)


# right none the less -------------------------------------------------------------------------------------------------


@fault(
    "row_term",
    "the row term is worked out from weights and their gradients, not from the output",
    sources=("Dao-AILab/flash-attention#1033",),
    advice="Nothing: it is the same number.",
    equivalent="rowsum(dO o O) = rowsum(P o dP): eager code does the one, fused kernels the other",
)
def row_term_by_weights(do: Tensor, o: Tensor, dp: Tensor, p: Tensor) -> Tensor:
    return (dp * p).sum(dim=-1, keepdim=True)
