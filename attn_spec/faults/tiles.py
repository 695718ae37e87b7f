"""Faults of kernels that go over tiles: the strides of another tensor, sums and exponentials kept too short."""

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

# where a tile is read ------------------------------------------------------------------------------------------------


@fault(
    "arrange",
    "the rows of v are read with the stride of those of k, which is another where d_v is not d_k",
    sources=("triton-lang/triton#2626", "flagos-ai/FlagGems#5896"),
    advice="Hand the strides of v to the kernel, and read v with them.",
)
def values_by_key_strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    start = torch.arange(v.numel(), device=v.device).view(v.shape)[..., :1, :1]
    row = torch.arange(v.shape[-2], device=v.device)[:, None] * k.shape[-1]
    at = start + row + torch.arange(v.shape[-1], device=v.device)
    return q, k, v.flatten()[at.clamp(max=max(v.numel() - 1, 0))]


# what is carried from tile to tile -----------------------------------------------------------------------------------


def _summed_in(dtype: torch.dtype, size: int) -> Fault:
    def mix(p: Tensor, v: Tensor) -> Tensor:
        o, m = torch.zeros_like(p[..., :1] * v[..., :1, :]), torch.zeros_like(p[..., :1])
        for w, x in zip(torch.split(p, size, -1), torch.split(v, size, -2), strict=True):
            larger = torch.maximum(m, w.amax(-1, True)) if w.shape[-1] else m
            o = (m * o + w @ x) / larger.clamp(min=torch.finfo(p.dtype).tiny)
            o, m = o.to(dtype).to(p.dtype), larger
        return o * m

    name = str(dtype).removeprefix("torch.")
    return Fault(
        f"output-summed-in-{name}-{size}",
        f"over blocks of {size} keys, the output is summed in {name}, whatever the dtype of the inputs",
        {"mix": mix},
        sources=("pytorch/pytorch#128922", "facebookresearch/xformers#98"),
        advice="Keep the sum in float32 until the last block is in, and round it once.",
    )


for _dtype in (torch.float16, torch.bfloat16):
    for _size in (16, 64):
        add(_summed_in(_dtype, _size))


@fault(
    "normalise",
    "exponentials are taken in float16 without the maximum, and overflow from logits of 11 upwards",
    sources=("facebookresearch/xformers#98", "NVIDIA/DeepLearningExamples#169"),
    advice="Take the running maximum off first, and the exponential in float32.",
)
def exponentials_overflow_in_float16(s: Tensor) -> Tensor:
    e = torch.exp(s.half()).to(s.dtype)
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
