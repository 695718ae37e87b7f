"""Faults of how a call is run: what is traced, cast, shared by threads, summed in any order, or has no data."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_spec.faults.behaviour import catalogue
from attn_spec.running_blocks import BLOCKS

fault = catalogue("execution", BLOCKS)

# compiled ------------------------------------------------------------------------------------------------------------


@fault(
    "heed",
    "the mask is left out where the call is compiled",
    sources=("torch-spyre/torch-spyre#4526",),
    advice="Do not branch on `torch.compiler.is_compiling()`, or hand the mask on in both branches.",
    told_by="compiled-mask",
)
def mask_dropped_when_compiled(mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    if torch.compiler.is_compiling():
        return None, causal
    return mask, causal


@fault(
    "heed",
    "causality is left out where the call is compiled",
    sources=("sonos/torch-to-nnef#217",),
    advice="Make the triangle from the lengths of the call, in the traced code too.",
    told_by="compiled-causal",
)
def causal_dropped_when_compiled(mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    if torch.compiler.is_compiling():
        return mask, False
    return mask, causal


@fault(
    "visible",
    "the number of keys of the first call that was traced holds for all later ones",
    sources=("huggingface/transformers#47617", "facebookresearch/xformers#655"),
    advice="Take lengths from the shapes of the call, and keep none of them.",
    told_by="compiled-length",
)
def length_of_the_first_trace(
    q_len: int, kv_len: int, causal: bool, device: torch.device, kept: dict[str, Any]
) -> Tensor | None:
    shown = torch.ones(q_len, kv_len, dtype=torch.bool, device=device).tril() if causal else None
    if torch.compiler.is_compiling():
        known: Tensor = torch.arange(kv_len, device=device) < int(kept.setdefault("length", kv_len))
        return known if shown is None else shown & known
    return shown


@fault(
    "choose_scale",
    "the scale of the first call that was traced holds for all later ones",
    sources=("pytorch/pytorch#191203",),
    advice="Hand the scale on as an argument, and keep no number of a call.",
    told_by="compiled-scale",
)
def scale_of_the_first_trace(scale: float | None, head_dim: int, kept: dict[str, Any]) -> float:
    chosen = head_dim**-0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        return float(kept.setdefault("scale", chosen))
    return chosen


@fault(
    "read",
    "keys that are a transposed view are read as if they were contiguous, where the call is compiled",
    sources=("pytorch/pytorch#195320",),
    advice="Match the strides of a pattern as well as its operations before it is replaced.",
    told_by="compiled-strides",
)
def strides_ignored_when_compiled(k: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        _, h, n, d = k.shape
        return k.as_strided(k.shape, (h * n * d, n * d, d, 1))
    return k


@fault(
    "heed",
    "whether the mask hides anything is looked up in its data, which can't be traced",
    sources=("pytorch/pytorch#175274",),
    advice="Apply the mask as it comes; where nothing is hidden it changes nothing.",
    told_by="graph-break",
)
def branch_on_the_mask(mask: Tensor | None, causal: bool) -> tuple[Tensor | None, bool]:
    if mask is not None and mask.dtype == torch.bool and bool(mask.all()):
        return None, causal
    return mask, causal


# without data, and mapped --------------------------------------------------------------------------------------------


@fault(
    "deliver",
    "on tensors without data the output is made like q, and v is of another width",
    sources=("apple/coreai-torch#117",),
    advice="Make the output of a fake kernel from the shapes of q and v: [B, H, Sq, Dv].",
    told_by="fake-shape",
)
def output_like_queries_without_data(out: Tensor, q: Tensor) -> Tensor:
    return torch.empty_like(q) if q.is_meta else out


@fault(
    "gather",
    "sums are written into a buffer that torch.func.vmap does not map over",
    sources=("ml-explore/mlx#3383",),
    advice="Make new tensors from those of the call, or register how the operator is mapped.",
    told_by="vmap-raises",
)
def sums_in_an_unmapped_buffer(parts: Sequence[Tensor]) -> Tensor:
    out = torch.zeros(parts[0].shape, dtype=parts[0].dtype, device=parts[0].device)
    for part in parts:
        out += part
    return out


# under autocast ------------------------------------------------------------------------------------------------------


@fault(
    "fill",
    "hidden scores are filled with -1e10, which float16 can't hold under autocast",
    sources=("NVIDIA/apex#1105",),
    advice="Fill with -inf, or with `torch.finfo(scores.dtype).min`.",
    told_by="autocast-fill-float16",
)
def minus_1e10_under_autocast(s: Tensor, shown: Tensor) -> Tensor:
    return s.masked_fill(~shown, -1e10)


@fault(
    "fill",
    "hidden scores are filled with the lowest float32, which no half type holds under autocast",
    sources=("huggingface/lerobot#710", "espnet/espnet#4584"),
    advice="Fill with -inf, or with `torch.finfo(scores.dtype).min`.",
    told_by="autocast-fill-bfloat16",
)
def float32_minimum_under_autocast(s: Tensor, shown: Tensor) -> Tensor:
    return s.masked_fill(~shown, torch.finfo(torch.float32).min)


@fault(
    "cast",
    "v is not cast under autocast, and meets weights of another dtype",
    sources=("pytorch/pytorch#141774", "facebookresearch/xformers#1046"),
    advice="Cast q, k and v alike, as `torch.amp.custom_fwd(cast_inputs=...)` does.",
    told_by="autocast-raises",
)
def values_not_cast_under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_meta or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    if v.dtype != dtype:
        raise RuntimeError(f"expected query, key and value to have the same dtype, but got {dtype} and {v.dtype}")
    return q.to(dtype), k.to(dtype), v


@fault(
    "add",
    "an additive mask must have the dtype of the scores, which autocast has changed",
    sources=("pytorch/pytorch#99012",),
    advice="Cast the mask to the dtype of the scores before it is added.",
    told_by="autocast-mask-dtype",
)
def mask_dtype_under_autocast(s: Tensor, bias: Tensor) -> Tensor:
    if bias.dtype != s.dtype:
        raise RuntimeError(f"expected the mask to have dtype {s.dtype} as the query, but got {bias.dtype}")
    return s + bias


@fault(
    "normalise",
    "exponentials are taken in the half type of autocast without the maximum off, and overflow",
    sources=("facebookresearch/xformers#98", "NVIDIA/DeepLearningExamples#169"),
    advice="Take the maximum of the row off first, in float32: `torch.softmax(scores.float(), dim=-1)`.",
    told_by="autocast-not-finite",
)
def exponentials_in_half(s: Tensor) -> Tensor:
    e = torch.exp(s)
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)


# beside other calls, and to the bit ----------------------------------------------------------------------------------


@fault(
    "keep",
    "the weights of a call are kept on the module and read back, and all threads share it",
    sources=("facebookresearch/mmf#1183", "pyg-team/pytorch_geometric#8741"),
    advice="Keep weights in a local variable; return them where somebody wants to see them.",
    told_by="threads-buffer",
)
def weights_kept_on_the_module(p: Tensor, kept: dict[str, Any]) -> Tensor:
    kept["weights"] = p
    weights: Tensor = kept["weights"]
    return weights


@fault(
    "remember",
    "the mask of a call is kept on the module until the scores are there, and all threads share it",
    sources=("NVIDIA-NeMo/Speech#3797",),
    advice="Hand the mask on as an argument from function to function.",
    told_by="threads-mask",
)
def mask_kept_on_the_module(mask: Tensor | None, kept: dict[str, Any]) -> Callable[[], Tensor | None]:
    kept["mask"] = mask
    return lambda: kept["mask"]


@fault(
    "order",
    "what the splits of the keys give is added in the order in which they end, under the deterministic mode too",
    sources=("Dao-AILab/flash-attention#414", "PaddlePaddle/flash-attention#134"),
    advice="Add in a fixed order where `torch.are_deterministic_algorithms_enabled()`, or refuse.",
    told_by="not-deterministic",
)
def splits_added_as_they_end(number: int) -> Sequence[int]:
    return random.SystemRandom().sample(range(number), number)


@fault(
    "splits",
    "into how many splits the keys are cut depends on the batch size",
    sources=("sgl-project/sgl-flash-attn#43", "pegainfer-project/pegainfer#613"),
    advice="Choose the size of a split by the length of the sequence alone.",
    told_by="batch-invariance",
)
def splits_by_batch(batch: int, kv_len: int) -> int:
    return max(1, kv_len // (8 // min(batch, 8)))
