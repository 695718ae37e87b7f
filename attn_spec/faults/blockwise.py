"""Faults of kernels: keys taken block by block or in splits, exponentials in base 2, and what is rounded on the way."""

import torch
from torch import Tensor

from attn_spec.faults.fault import Block, Fault, add, fault

# the online softmax --------------------------------------------------------------------------------------------------


def _unrescaled(size: int) -> Fault:
    def normalise(s: Tensor) -> Tensor:
        m = torch.cat([x.amax(-1, True).expand_as(x) for x in torch.split(s, size, dim=-1)], -1).cummax(-1).values
        e = torch.exp(s - m.clamp(min=torch.finfo(s.dtype).min))
        return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)

    return Fault(
        f"online-softmax-unrescaled-{size}",
        f"over blocks of {size} keys, sum and output are not rescaled when the running maximum grows",
        {"normalise": normalise},
        sources=("Dao-AILab/flash-attention#991", "pytorch/pytorch#174861"),
        advice="Multiply what was summed so far by exp(old maximum - new maximum).",
    )


def _output_unrescaled(size: int) -> Fault:
    def normalise(s: Tensor) -> Tensor:
        m = torch.cat([x.amax(-1, True).expand_as(x) for x in torch.split(s, size, dim=-1)], -1).cummax(-1).values
        e = torch.exp(s - m.clamp(min=torch.finfo(s.dtype).min))
        total = torch.exp(s - m[..., -1:].clamp(min=torch.finfo(s.dtype).min)).sum(dim=-1, keepdim=True)
        return e / total.clamp(min=torch.finfo(s.dtype).tiny)

    return Fault(
        f"online-softmax-output-unrescaled-{size}",
        f"over blocks of {size} keys, the output is not rescaled when the running maximum grows; the sum is",
        {"normalise": normalise},
        sources=("Dao-AILab/flash-attention#991", "PaddleJitLab/CUDATutorial#69"),
        advice="Multiply the output so far by exp(old maximum - new maximum), as the sum.",
    )


def _sum_unrescaled(size: int) -> Fault:
    def normalise(s: Tensor) -> Tensor:
        m = torch.cat([x.amax(-1, True).expand_as(x) for x in torch.split(s, size, dim=-1)], -1).cummax(-1).values
        e = torch.exp(s - m[..., -1:].clamp(min=torch.finfo(s.dtype).min))
        total = torch.exp(s - m.clamp(min=torch.finfo(s.dtype).min)).sum(dim=-1, keepdim=True)
        return e / total.clamp(min=torch.finfo(s.dtype).tiny)

    return Fault(
        f"online-softmax-sum-unrescaled-{size}",
        f"over blocks of {size} keys, the sum is not rescaled when the running maximum grows; the output is",
        {"normalise": normalise},
        sources=("Dao-AILab/flash-attention#991", "tile-ai/tilelang#328"),
        advice="Multiply the sum so far by exp(old maximum - new maximum), as the output.",
    )


for _size in (8, 16, 32, 64, 128):
    for _family in (_unrescaled, _output_unrescaled, _sum_unrescaled):
        add(_family(_size))


# splits of the keys, merged ------------------------------------------------------------------------------------------


def _poisoned(parts: int) -> Block:
    def normalise(s: Tensor) -> Tensor:
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        split = [x for x in s.tensor_split(parts, dim=-1) if x.shape[-1]]
        return torch.cat([torch.softmax(x, -1) * torch.exp(torch.logsumexp(x, -1, True) - lse) for x in split], -1)

    return normalise


def _poisoned_block(size: int) -> Block:
    def normalise(s: Tensor) -> Tensor:
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        split = torch.split(s, size, dim=-1)
        return torch.cat([torch.softmax(x, -1) * torch.exp(torch.logsumexp(x, -1, True) - lse) for x in split], -1)

    return normalise


def _unweighted(parts: int) -> Fault:
    def normalise(s: Tensor) -> Tensor:
        split = [x for x in s.tensor_split(parts, dim=-1) if x.shape[-1]]
        return torch.cat([torch.softmax(x, -1) / len(split) for x in split], -1)

    return Fault(
        f"splits-averaged-{parts}",
        f"the keys are done in {parts} parts, whose outputs are averaged instead of weighted by their sums",
        {"normalise": normalise},
        sources=("pytorch/pytorch#174861", "ROCm/aiter#4420"),
        advice="Weight each part by exp(its log-sum-exp - the total's).",
    )


POISON = ("ROCm/aiter#4420", "pytorch/pytorch#174861")
for _parts in (2, 4):
    add(
        Fault(
            f"empty-split-poisons-{_parts}",
            f"the keys are done in {_parts} parts, and one in which a row sees no key makes NaN of the row",
            {"normalise": _poisoned(_parts)},
            POISON,
            "Give a part without visible keys the output 0 and the log-sum-exp -inf.",
        )
    )
    add(_unweighted(_parts))
for _size in (16, 32, 64, 128):
    add(
        Fault(
            f"empty-block-poisons-{_size}",
            f"a block of {_size} keys in which a row sees no key makes NaN of the row",
            {"normalise": _poisoned_block(_size)},
            POISON,
            "Guard the maximum of a block that is hidden: -inf minus -inf is NaN.",
        )
    )


# base 2 --------------------------------------------------------------------------------------------------------------


@fault(
    "normalise",
    "the logits are multiplied by log2(e) with the mask already in them: its lowest number overflows to -inf",
    sources=("pytorch/pytorch#109517", "triton-lang/triton#2700"),
    advice="Fold log2(e) into the scale, and bring the mask to base 2 with a clamp.",
)
def base_two_overflow(s: Tensor) -> Tensor:
    s = s * 1.4426950408889634
    m = s.amax(dim=-1, keepdim=True) if s.shape[-1] else s.new_zeros(())
    e = torch.exp2(s - m.clamp(min=torch.finfo(s.dtype).min))
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)


@fault(
    "normalise",
    "the logits are multiplied by log2(e) with the mask already in them: its lowest number overflows, and makes NaN",
    sources=("pytorch/pytorch#109517",),
    advice="Fold log2(e) into the scale, and guard a row maximum of -inf.",
)
def base_two_overflow_nan(s: Tensor) -> Tensor:
    s = s * 1.4426950408889634
    e = torch.exp2(s - s.amax(dim=-1, keepdim=True)) if s.shape[-1] else s
    return e / e.sum(dim=-1, keepdim=True)


# rounded whatever the dtype of the inputs ----------------------------------------------------------------------------


def _softmax_in(dtype: torch.dtype) -> Block:
    def normalise(s: Tensor) -> Tensor:
        return torch.softmax(s.to(dtype), dim=-1).to(s.dtype)

    return normalise


def _scores_in(dtype: torch.dtype) -> Block:
    def normalise(s: Tensor) -> Tensor:
        return torch.softmax(s.to(dtype).to(s.dtype), dim=-1)

    return normalise


def _weights_in(dtype: torch.dtype) -> Block:
    def normalise(s: Tensor) -> Tensor:
        return torch.softmax(s, dim=-1).to(dtype).to(s.dtype)

    return normalise


def _inputs_in(half: torch.dtype) -> Block:
    def arrange(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.to(half).to(q.dtype), k.to(half).to(k.dtype), v.to(half).to(v.dtype)

    return arrange


def _output_in(half: torch.dtype) -> Block:
    def merge(o: Tensor, q: Tensor) -> Tensor:
        return o.to(half).to(o.dtype)

    return merge


ROUNDED = (
    ("softmax-in-{}", "the softmax runs in {}, whatever the dtype of the inputs", _softmax_in),
    ("scores-in-{}", "the scores are rounded to {}, whatever the dtype of the inputs", _scores_in),
    ("weights-in-{}", "the weights are rounded to {}, whatever the dtype of the inputs", _weights_in),
)
for _dtype in (torch.bfloat16, torch.float16):
    _name = str(_dtype).removeprefix("torch.")
    for _id, _title, _made in ROUNDED:
        _sources = ("tinygrad/tinygrad#12280", "pytorch/pytorch#128922")
        _advice = "Keep scores and softmax in float32 or in the dtype of the inputs, whichever is wider."
        add(Fault(_id.format(_name), _title.format(_name), {"normalise": _made(_dtype)}, _sources, _advice))
    add(
        Fault(
            f"computed-in-{_name}",
            f"everything is computed in {_name} and cast back, whatever the dtype of the inputs",
            {"arrange": _inputs_in(_dtype), "merge": _output_in(_dtype)},
            ("pytorch/pytorch#128922",),
            "Compute in the dtype of the inputs, and take a half type from those who ask for one.",
        )
    )
