"""The forward kernel of flash attention in Triton, and what the kernels of the backward pass share with it.

One program does one block of queries of one head. It goes over the blocks of keys that any of them sees, with

    S    = softcap tanh(scale Q K' / softcap) log2(e)      the logits, in base 2
    m'   = max(m, rowmax(S))                                the new maximum of the row
    P    = exp2(S - m')                                     weights of this block, not yet normalised
    l    = exp2(m - m') l + rowsum(P)                       the sum so far, brought to the new maximum
    O    = exp2(m - m') O + P V                             so is the output

and at the end O / l and the log-sum-exp (m + log2 l) / log2(e).
"""

# ruff: noqa: N803  (what is known when a kernel is compiled is in capitals, as everywhere in Triton)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import triton
import triton.language as tl

from attn_spec.interpreter import interpreted

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
BLOCKS = {"BLOCK_M": 16, "BLOCK_N": 16} if interpreted() else {}  # on a GPU they are chosen by time
CONFIGURATIONS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in ((128, 64, 8, 3), (128, 32, 4, 3), (64, 64, 4, 3), (64, 32, 4, 2), (32, 32, 4, 2))
]


def tuned(kernel: Any) -> Any:
    """The kernel with its block sizes chosen by time; under the interpreter, where time says nothing, as it is."""
    return kernel if interpreted() else triton.autotune(CONFIGURATIONS, key=["BLOCK_D", "BLOCK_DV"])(kernel)


@triton.jit
def tanh(x):
    """By its series near 0, where 2 sigmoid(2x) - 1 would cancel."""
    y = x * x
    series = x * (1 - y * (1 / 3 - y * (2 / 15 - y * (17 / 315 - y * (62 / 2835)))))
    return tl.where(y < 0.0625, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def places(start, i, d, i_stride, d_stride):
    """Where rows i and channels d of a matrix lie in memory."""
    return start + i[:, None].to(tl.int64) * i_stride + d[None, :] * d_stride


@triton.jit
def load(start, i, d, i_stride, d_stride, length, width):
    """Rows i and channels d of a matrix, 0 beyond its ends."""
    return tl.load(places(start, i, d, i_stride, d_stride), (i[:, None] < length) & (d[None, :] < width), 0.0)


@triton.jit
def store(start, x, i, d, i_stride, d_stride, length, width):
    """Write rows i and channels d of a matrix, as far as it goes."""
    x = x.to(start.dtype.element_ty)
    tl.store(places(start, i, d, i_stride, d_stride), x, (i[:, None] < length) & (d[None, :] < width))


@tuned
@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d,
    o_b, o_h, o_i, o_d,
    heads, group, q_len, kv_len, head_dim, v_dim,
    offset, left, right,
    scale, softcap,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """O [B, H, Sq, Dv] and the log-sum-exp [B, H, Sq], contiguous in float32. Grid: (blocks of queries, B * H)."""
    block = tl.program_id(0) * BLOCK_M
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    kv_head = h // group
    i, d, e = block + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q = load(q_ptr + b * q_b + h * q_h, i, d, q_i, q_d, q_len, head_dim)
    here = i + offset  # where each query stands among the keys

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)  # noqa: E741
    o = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    first = tl.maximum(block + offset - left, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(block + BLOCK_M + offset + right, kv_len)
    j = first + tl.arange(0, BLOCK_N)
    k_at = places(k_ptr + b * k_b + kv_head * k_h, j, d, k_j, k_d)
    v_at = places(v_ptr + b * v_b + kv_head * v_h, j, e, v_j, v_d)
    for _ in range(first, last, BLOCK_N):
        k = tl.load(k_at, (j < kv_len)[:, None] & (d < head_dim)[None, :], 0.0)  # [BLOCK_N, BLOCK_D]
        v = tl.load(v_at, (j < kv_len)[:, None] & (e < v_dim)[None, :], 0.0)  # [BLOCK_N, BLOCK_DV]
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            s = softcap * tanh(s / softcap)
        ahead = j[None, :] - here[:, None]
        seen = (j < kv_len)[None, :] & (ahead >= -left) & (ahead <= right)
        s = tl.where(seen, s * LOG2E, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen yet: -inf minus -inf would be NaN
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(m - shift)
        l = rescale * l + tl.sum(p, 1)  # noqa: E741
        o = rescale[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
        j += BLOCK_N
        k_at += BLOCK_N * k_j
        v_at += BLOCK_N * v_j

    o = o / tl.where(l == 0.0, 1.0, l)[:, None]
    lse = (m + tl.log2(tl.where(l == 0.0, 1.0, l))) / LOG2E
    store(o_ptr + b * o_b + h * o_h, o, i, e, o_i, o_d, q_len, v_dim)
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * q_len + i, lse, mask=i < q_len)
