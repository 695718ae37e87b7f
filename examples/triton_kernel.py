"""A flash attention forward kernel as one writes it first, and how to have it judged on a CPU:

pytest --attn-impl=examples/triton_kernel.py:attention --attn-triton-interpret
"""

# ruff: noqa: N803

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, q_len, kv_len, scale,
    causal: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q = tl.load(q_ptr + (head * q_len + i[:, None]) * D + d[None, :], i[:, None] < q_len, 0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    o = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, kv_len, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        at = (head * kv_len + j[:, None]) * D + d[None, :]
        k = tl.load(k_ptr + at, j[:, None] < kv_len, 0.0)
        v = tl.load(v_ptr + at, j[:, None] < kv_len, 0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = j[None, :] < kv_len
        if causal:
            seen = seen & (j[None, :] <= i[:, None])
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - m_new[:, None])
        rescale = tl.exp(m - m_new)
        l = rescale * l + tl.sum(p, 1)  # noqa: E741
        o = rescale[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    o = o / l[:, None]
    tl.store(
        o_ptr + (head * q_len + i[:, None]) * D + d[None, :], o.to(o_ptr.dtype.element_ty), mask=i[:, None] < q_len
    )


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """q [B, H, Sq, D], k and v [B, H, Sk, D] -> [B, H, Sq, D]; is_causal is aligned to the top left."""
    (b, h, q_len, d), kv_len = q.shape, k.shape[2]
    if q.dtype not in (torch.float32, torch.float16):
        raise TypeError(f"{q.dtype} is not supported; use float32 or float16")
    if k.shape != v.shape or k.shape != (b, h, kv_len, d):
        raise ValueError("q, k and v of different heads or channels are not supported")
    if d < 16 or d & (d - 1):
        raise ValueError(f"head_dim {d} is not supported; use a power of two from 16 upwards")
    if not kv_len:
        return torch.zeros_like(q)
    scale = d**-0.5 if scale is None else scale
    q, k, v = (x.contiguous() for x in (q, k, v))
    o = torch.empty_like(q)
    if o.numel():
        grid = (triton.cdiv(q_len, 32), b * h)
        kernel[grid](q, k, v, o, q_len, kv_len, scale, causal=is_causal, D=d, BLOCK_M=32, BLOCK_N=32)
    return o
