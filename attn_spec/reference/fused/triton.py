"""Flash attention, forward and backward, as Triton kernels of our own, behind an ordinary function.

On a GPU the kernels are compiled. On a CPU they run under Triton's interpreter, which the environment has to ask for
before anything imports triton:

    pytest --attn-impl=triton --attn-triton-interpret

`triton_forward.py` and `triton_backward.py` hold the kernels; triton is imported when they are first needed.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from attn_spec.adapters.signature import TargetError
from attn_spec.interpreter import interpreted

FAR = 1 << 30  # a window without bound, in keys
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
    alignment: Literal["bottom-right", "top-left"] = "bottom-right",
) -> Tensor | tuple[Tensor, Tensor]:
    """Flash attention: blocks of logits only, sums in float32.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> [B, H, Sq, Dv], all of one dtype: float32, float16 or, on
    a GPU, bfloat16; of any strides. Hkv divides H: query head h reads kv head h // (H / Hkv).
    Query i stands at key p = i + Sk - Sq (alignment "bottom-right") or p = i ("top-left"). causal: it sees j <= p.
    window_size (left, right): it sees p - left <= j <= p + right, without bound where negative. softcap: logits become
    softcap tanh(logits / softcap), where it is positive. scale: 1 / sqrt(D) if None.
    return_lse: the natural log-sum-exp [B, H, Sq] in float32 comes too, and may be differentiated as well.
    A row with no visible key is 0, its log-sum-exp -inf.
    Raises TypeError for other dtypes, ValueError for sizes that do not fit, TargetError where there is neither a GPU
    nor the interpreter.
    """
    _check(q, k, v)
    offset = k.shape[2] - q.shape[2] if alignment == "bottom-right" else 0
    left, right = (FAR if bound < 0 else bound for bound in window_size)
    if causal:
        right = 0
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, lse = TritonAttention.apply(q, k, v, offset, left, right, scale, softcap)  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


class TritonAttention(torch.autograd.Function):
    """The kernels, with their backward pass; positions as `offset`, `left` and `right` say."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offset: int,
        left: int,
        right: int,
        scale: float,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        from attn_spec.reference.fused.triton_forward import BLOCKS, forward_kernel

        (batch, heads, q_len, _), v_dim = q.shape, v.shape[-1]
        o = q.new_empty(batch, heads, q_len, v_dim)
        lse = q.new_empty(batch, heads, q_len, dtype=torch.float32)
        ctx.positions, ctx.scaling = (offset, left, right), (scale, softcap)
        ctx.set_materialize_grads(False)
        if lse.numel():
            grid = _grid(q_len, "BLOCK_M", batch * heads)
            strides = (*q.stride(), *k.stride(), *v.stride(), *o.stride())
            known = _sizes(q, k, v), ctx.positions, ctx.scaling
            forward_kernel[grid](q, k, v, o, lse, *strides, *sum(known, ()), **_padded(q, v, softcap), **BLOCKS)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        from attn_spec.reference.fused.triton_backward import keys_kernel, queries_kernel
        from attn_spec.reference.fused.triton_forward import BLOCKS

        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        delta = (do.float() * o.float()).sum(dim=-1)  # [B, H, Sq]
        delta = (delta if dlse is None else delta - dlse).contiguous()
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        batch, heads, q_len, _ = q.shape
        kv_heads, kv_len = k.shape[1:3]
        if q.numel() and k.numel():
            inputs = q, k, v, do, lse, delta
            strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
            known = sum((_sizes(q, k, v), ctx.positions, ctx.scaling), ())
            padded = _padded(q, v, ctx.scaling[1])
            grid = _grid(q_len, "BLOCK_M", batch * heads)
            queries_kernel[grid](*inputs, dq, *strides, *dq.stride(), *known, **padded, **BLOCKS)
            grid = _grid(kv_len, "BLOCK_N", batch * kv_heads)
            keys_kernel[grid](*inputs, dk, dv, *strides, *dk.stride(), *dv.stride(), *known, **padded, **BLOCKS)
        return dq, dk, dv, None, None, None, None, None


def _grid(length: int, block: str, heads: int) -> Any:
    return lambda meta: (-(-length // meta[block]), heads)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return q.shape[1], q.shape[1] // k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3]


def _padded(q: Tensor, v: Tensor, softcap: float) -> dict[str, Any]:
    """What the kernels are compiled for: channels are padded to a power of two that a product of tiles takes."""
    widths = (max(16, 1 << (x.shape[-1] - 1).bit_length()) for x in (q, v))
    return {"SOFTCAP": softcap > 0, **dict(zip(("BLOCK_D", "BLOCK_DV"), widths, strict=True))}


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"triton_attention: q, k and v are of one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.dtype not in DTYPES:
        raise TypeError(f"triton_attention: {q.dtype} is not supported; use {', '.join(map(str, DTYPES))}")
    if not (q.dim() == k.dim() == v.dim() == 4 and len(q) == len(k) == len(v)):
        shapes = [tuple(x.shape) for x in (q, k, v)]
        raise ValueError(f"triton_attention: q, k and v are [B, H, S, D] with the same B, got {shapes}")
    if k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"triton_attention: k {tuple(k.shape)} fits neither q {tuple(q.shape)} nor v {tuple(v.shape)}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"triton_attention: {k.shape[1]} key/value heads do not divide {q.shape[1]} heads")
    if q.device.type != "cuda":
        if not interpreted():
            raise TargetError(
                f"triton: the tensors are on {q.device}; without a GPU the kernels run under Triton's interpreter, "
                f"which `pytest --attn-triton-interpret`, or TRITON_INTERPRET=1 before triton is imported, turns on"
            )
        if q.dtype == torch.bfloat16:
            raise TypeError(
                "triton_attention: bfloat16 is not supported under Triton's interpreter, which multiplies its bits as "
                "integers and truncates where a GPU rounds"
            )
