"""Faults of heads: which key/value head a query head reads, and how heads are split and merged."""

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

# shared key/value heads ----------------------------------------------------------------------------------------------


@fault(
    "share_heads",
    "query head h reads key/value head h mod Hkv instead of h // group",
    sources=("onnx/onnx#7274", "apple/axlearn#842", "ekzhang/jax-js#180"),
    advice="Repeat each head in place: repeat_interleave(group, dim=1), or declare `grouping: tiled`.",
)
def kv_heads_tiled(x: Tensor, heads: int, grouping: str) -> Tensor:
    group = heads // x.shape[1]
    return x.repeat(1, group, 1, 1)


@fault(
    "share_heads",
    "query head h reads key/value head h // group instead of h mod Hkv",
    sources=("apple/axlearn#842",),
    advice="Repeat all heads in turn: repeat(1, group, 1, 1), or declare `grouping: contiguous`.",
)
def kv_heads_contiguous(x: Tensor, heads: int, grouping: str) -> Tensor:
    group = heads // x.shape[1]
    return x.repeat_interleave(group, dim=1)


@fault(
    "share_heads",
    "query head h reads key/value head h // Hkv, and the last one beyond: divided by their number, not the group size",
    sources=("PSAL-POSTECH/ONNXim#34",),
    advice="Divide by the group size, H // Hkv.",
)
def kv_heads_divided_by_count(x: Tensor, heads: int, grouping: str) -> Tensor:
    return x[:, (torch.arange(heads) // x.shape[1]).clamp(max=x.shape[1] - 1)]


@fault(
    "share_heads",
    "query head h reads key/value head (h // Hkv) mod Hkv: divided by their number instead of the group size",
    sources=("PSAL-POSTECH/ONNXim#34",),
    advice="Divide by the group size, H // Hkv.",
)
def kv_heads_divided_by_count_modulo(x: Tensor, heads: int, grouping: str) -> Tensor:
    return x[:, torch.arange(heads) // x.shape[1] % x.shape[1]]


@fault(
    "share_heads",
    "query head h reads key/value head h, and the last one when there are no more",
    sources=("GenerelSchwerz/llama.cpp#48", "quantumaikr/quant.cpp#61"),
    advice="Let each group of H // Hkv query heads share a key/value head.",
)
def kv_heads_clamped(x: Tensor, heads: int, grouping: str) -> Tensor:
    return x[:, torch.arange(heads).clamp(max=x.shape[1] - 1)]


@fault(
    "share_heads",
    "every query head reads the first key/value head",
    sources=("PSAL-POSTECH/ONNXim#34", "quantumaikr/quant.cpp#61"),
    advice="Let each group of H // Hkv query heads read its own key/value head.",
)
def kv_heads_first_only(x: Tensor, heads: int, grouping: str) -> Tensor:
    return x[:, :1].expand(-1, heads, -1, -1)


@fault(
    "share_heads",
    "every query head reads the mean of the key/value heads",
    sources=("fkodom/grouped-query-attention-pytorch#6",),
    advice="Let each group of H // Hkv query heads read its own key/value head.",
)
def kv_heads_averaged(x: Tensor, heads: int, grouping: str) -> Tensor:
    return x.mean(dim=1, keepdim=True).expand(-1, heads, -1, -1)


@fault(
    "share_heads",
    "the key/value heads are read in reverse order",
    sources=("HomericIntelligence/Odyssey#5648", "sgl-project/sglang#7462"),
    advice="Keep the heads of q, k and v in one order.",
)
def kv_heads_reversed(x: Tensor, heads: int, grouping: str) -> Tensor:
    group = heads // x.shape[1]
    return x.flip(1).repeat_interleave(group, dim=1)


@fault(
    "arrange",
    "the key heads are tiled while the value heads are repeated in place",
    sources=("apple/axlearn#842", "NVIDIA-NeMo/RL#2802"),
    advice="Share the heads of k and v in the same order.",
)
def key_heads_tiled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k.repeat(1, q.shape[1] // k.shape[1], 1, 1), v


@fault(
    "arrange",
    "the value heads are tiled while the key heads are repeated in place",
    sources=("apple/axlearn#842", "NVIDIA-NeMo/RL#2802"),
    advice="Share the heads of k and v in the same order.",
)
def value_heads_tiled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v.repeat(1, q.shape[1] // v.shape[1], 1, 1)


@fault(
    "arrange",
    "the queries, and so the logits, of a group are averaged",
    sources=("fkodom/grouped-query-attention-pytorch#6", "Zefan-Cai/R-KV#13"),
    advice="Keep the query heads of a group apart.",
)
def queries_averaged_over_group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    return q.reshape(len(q), -1, group, *q.shape[2:]).mean(dim=2).repeat_interleave(group, dim=1), k, v


@fault(
    "arrange",
    "the queries, and so the logits, of a group are summed",
    sources=("fkodom/grouped-query-attention-pytorch#6",),
    advice="Keep the query heads of a group apart.",
)
def queries_summed_over_group(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    return q.reshape(len(q), -1, group, *q.shape[2:]).sum(dim=2).repeat_interleave(group, dim=1), k, v


# a part of the heads or of the keys ----------------------------------------------------------------------------------


def _slices_dropped(size: int) -> Fault:
    def merge(o: Tensor, q: Tensor) -> Tensor:
        n = torch.arange(o.shape[0] * o.shape[1]).reshape(o.shape[0], o.shape[1], 1, 1)
        return o.masked_fill(n >= n.numel() // size * size, 0.0)

    return Fault(
        f"head-slices-dropped-{size}",
        f"the heads of all samples are done {size} at a time, and those after the last whole slice get no output",
        {"merge": merge},
        sources=("huggingface/diffusers#8837",),
        advice="Round the number of slices up.",
    )


for _size in (2, 4, 8):
    add(_slices_dropped(_size))


@fault(
    "share_heads",
    "in the second half of the keys, query head h reads key/value head h mod Hkv instead of h // group",
    sources=("pytorch/pytorch#174861", "onnx/onnx#7274"),
    advice="Read the same key/value head in every split of the keys.",
)
def kv_heads_tiled_in_second_half(x: Tensor, heads: int, grouping: str) -> Tensor:
    group, half = heads // x.shape[1], x.shape[2] // 2
    return torch.cat([x[:, :, :half].repeat_interleave(group, dim=1), x[:, :, half:].repeat(1, group, 1, 1)], dim=2)


@fault(
    "share_heads",
    "in the second half of the keys, every query head reads the first key/value head",
    sources=("pytorch/pytorch#174861",),
    advice="Read the same key/value head in every split of the keys.",
)
def kv_heads_first_in_second_half(x: Tensor, heads: int, grouping: str) -> Tensor:
    group = heads // x.shape[1]
    first, half = x[:, :1].expand(-1, heads, -1, -1), x.shape[2] // 2
    return torch.cat([x[:, :, :half].repeat_interleave(group, dim=1), first[:, :, half:]], dim=2)


# split and merged ----------------------------------------------------------------------------------------------------


def _view_in(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2).reshape(x.shape) for x in (q, k, v))
    return q, k, v


def _view_out(o: Tensor, q: Tensor) -> Tensor:
    return o.reshape(o.transpose(1, 2).shape).transpose(1, 2)


add(
    Fault(
        "heads-split-by-view",
        "[B, S, H*D] is viewed as [B, H, S, D] without a transpose: heads and positions are scrambled",
        {"arrange": _view_in},
        sources=("reczoo/FuxiCTR#30", "onnx/onnx#7118"),
        advice="View as [B, S, H, D], then transpose(1, 2).",
    )
)
add(
    Fault(
        "heads-merged-by-view",
        "[B, H, S, D] is viewed as [B, S, H*D] without a transpose: heads and positions are scrambled",
        {"merge": _view_out},
        sources=("jsbaan/transformer-from-scratch#6", "meta-pytorch/opacus#825"),
        advice="transpose(1, 2) before the heads are merged.",
    )
)
add(
    Fault(
        "heads-split-and-merged-by-view",
        "heads are split and merged without a transpose: each attends within its own stretch of positions",
        {"arrange": _view_in, "merge": _view_out},
        sources=("aladdinpersson/Machine-Learning-Collection#165", "reczoo/FuxiCTR#30"),
        advice="transpose(1, 2) after the heads are split and before they are merged.",
    )
)


@fault(
    "arrange",
    "the channels are split as (D, H) instead of (H, D): heads are interleaved",
    sources=("awslabs/slapo#46", "NVIDIA-NeMo/RL#2802"),
    advice="View the channels as (H, D).",
)
def heads_interleaved(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2).reshape(len(x), x.shape[2], x.shape[3], -1).permute(0, 3, 1, 2) for x in (q, k, v))
    return q, k, v


@fault(
    "merge",
    "the output of (head, sample) is read as that of (sample, head)",
    sources=("jadore801120/attention-is-all-you-need-pytorch#7", "hackiey/QAnet-pytorch#2"),
    advice="Put the batch first before heads are folded into it.",
)
def heads_and_samples_mixed(o: Tensor, q: Tensor) -> Tensor:
    return o.transpose(0, 1).reshape(o.shape)


@fault(
    "merge",
    "[H, B, S, D] is viewed as [B, S, H*D] without a permute",
    sources=("hackiey/QAnet-pytorch#2", "jadore801120/attention-is-all-you-need-pytorch#7"),
    advice="Permute to [B, S, H, D] before the heads are merged.",
)
def heads_first_merged_by_view(o: Tensor, q: Tensor) -> Tensor:
    return o.transpose(0, 1).reshape(o.transpose(1, 2).shape).transpose(1, 2)


@fault(
    "merge",
    "the heads of the output are in reverse order",
    sources=("HomericIntelligence/Odyssey#5648",),
    advice="Keep the heads in the order of the queries.",
)
def output_heads_reversed(o: Tensor, q: Tensor) -> Tensor:
    return o.flip(1)


def _heads_as_sequence(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _sequence_back(o: Tensor, q: Tensor) -> Tensor:
    return o.transpose(1, 2)


def _batch_as_sequence(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.transpose(0, 2), k.transpose(0, 2), v.transpose(0, 2)


def _batch_back(o: Tensor, q: Tensor) -> Tensor:
    return o.transpose(0, 2)


add(
    Fault(
        "attends-over-heads",
        "attention runs over the heads of a position instead of over the positions",
        {"arrange": _heads_as_sequence, "merge": _sequence_back},
        sources=("pytorch/pytorch#195320", "triton-lang/triton#2626"),
        advice="Transpose to [B, H, S, D] before the scores are computed.",
    )
)
add(
    Fault(
        "attends-over-batch",
        "attention runs over the samples of the batch instead of over the positions",
        {"arrange": _batch_as_sequence, "merge": _batch_back},
        sources=("om-ai-lab/OmDet#19", "aipixel/AEMatter#3"),
        advice="Give the axes in the order that the callee takes them: batch_first=True.",
    )
)
