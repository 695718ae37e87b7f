"""Faults of the denominator: sinks, and the log-sum-exp that is returned."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

# sinks ---------------------------------------------------------------------------------------------------------------


@fault(
    "drain",
    "one sink, that of the first head, is used for all",
    sources=("modular/modular#6591",),
    advice="Index the sinks by the query head.",
)
def sink_of_first_head(p: Tensor, s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None or not s.shape[-1]:
        return p
    return p * torch.sigmoid(torch.logsumexp(s, dim=-1, keepdim=True) - sinks[0])


@fault(
    "drain",
    "sinks are indexed by the row and not by the head",
    sources=("modular/modular#6591",),
    advice="Index the sinks by the query head.",
)
def sink_by_row(p: Tensor, s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None or not s.shape[-1]:
        return p
    h, i = torch.arange(s.shape[1])[:, None], torch.arange(s.shape[2])
    return p * torch.sigmoid(torch.logsumexp(s, dim=-1) - sinks[(h * s.shape[2] + i) % len(sinks)])[..., None]


@fault(
    "drain",
    "the sink is added to the sum as it is, and not its exponential",
    sources=("NVIDIA/cudnn-frontend#676",),
    advice="The denominator gains exp(sink - max).",
)
def sink_not_exponentiated(p: Tensor, s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None or not s.shape[-1]:
        return p
    return p / (1 + sinks[:, None, None].abs() * torch.exp(-torch.logsumexp(s, dim=-1, keepdim=True)))


@fault(
    "drain",
    "the sink counts twice",
    sources=("sgl-project/sgl-kernel-npu#216",),
    advice="Add exp(sink) to the sum once, and not once for each split or block.",
)
def sink_twice(p: Tensor, s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None or not s.shape[-1]:
        return p
    return p * torch.sigmoid(torch.logsumexp(s, dim=-1, keepdim=True) - sinks[:, None, None] - math.log(2))


@fault(
    "drain",
    "the sink is taken for a logit of base 2",
    sources=("modular/modular#6591",),
    advice="Where exp2 is used, multiply the sink by log2(e) too.",
)
def sink_in_base_two(p: Tensor, s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None or not s.shape[-1]:
        return p
    return p * torch.sigmoid(torch.logsumexp(s, dim=-1, keepdim=True) - sinks[:, None, None] * math.log(2))


@fault(
    "drain",
    "the share of the sink is given back: the weights of a row sum to 1 again",
    sources=("NVIDIA/TransformerEngine#2541",),
    advice="Do not renormalise once the sink is in the sum.",
)
def sink_renormalised(p: Tensor, s: Tensor, sinks: Tensor | None) -> Tensor:
    return p


# log-sum-exp ---------------------------------------------------------------------------------------------------------


@fault(
    "log_sum",
    "the log-sum-exp is returned in base 2",
    sources=("flashinfer-ai/flashinfer#2113", "vllm-project/vllm#28840", "sgl-project/sglang#40903"),
    advice="Multiply by ln 2, or declare `lse_base: 2`.",
)
def lse_in_base_two(s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    s = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    return s / math.log(2)


@fault(
    "log_sum",
    "the row maximum is not added back to the log-sum-exp",
    sources=("ROCm/aiter#4420",),
    advice="lse = max + log(sum).",
)
def lse_without_maximum(s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    return torch.logsumexp(s, dim=-1) - s.amax(dim=-1).clamp(min=-1e30) if s.shape[-1] else s.sum(dim=-1)


@fault(
    "log_sum",
    "the sum is returned, and not its logarithm with the maximum",
    sources=("flashinfer-ai/flashinfer#50",),
    advice="lse = max + log(sum).",
)
def lse_is_maximum(s: Tensor, sinks: Tensor | None) -> Tensor:
    return s.amax(dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)


@fault(
    "log_sum",
    "the log-sum-exp of a row with no visible key is +inf",
    sources=("flashinfer-ai/flashinfer#3943",),
    advice="The logarithm of an empty sum is -inf; declare `lse_empty: +inf` if it is meant.",
)
def lse_empty_plus_infinity(s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    s = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    return torch.where(s == -torch.inf, torch.inf, s)


@fault(
    "log_sum",
    "the log-sum-exp of a row with no visible key is a number",
    sources=("flashinfer-ai/flashinfer#4452", "flashinfer-ai/flashinfer#3943"),
    advice="The logarithm of an empty sum is -inf.",
)
def lse_empty_finite(s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    s = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    return s.clamp(min=-5e4)


@fault(
    "log_sum",
    "the log-sum-exp of a row with no visible key is NaN",
    sources=("pytorch/pytorch#119320",),
    advice="Guard -inf minus -inf where the maximum of a row is -inf.",
)
def lse_empty_nan(s: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    s = torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)
    return torch.where(s == -torch.inf, torch.nan, s)


def _lse_tail(size: int) -> Fault:
    def log_sum(s: Tensor, sinks: Tensor | None) -> Tensor:
        whole = max(s.shape[-1] // size, 1) * size
        if sinks is not None:
            s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
        s = s[..., :whole]
        return torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)

    return Fault(
        f"lse-tail-dropped-{size}",
        f"the keys after the last whole block of {size} are not in the log-sum-exp",
        {"log_sum": log_sum},
        sources=("tile-ai/tilelang#2461",),
        advice="Sum over the last, partial block too.",
    )


for _size in (16, 64):
    add(_lse_tail(_size))
