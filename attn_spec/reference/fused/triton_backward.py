"""The kernels of flash attention's backward pass in Triton: one for dQ, one for dK and dV. No sum depends on timing.

The weights are worked out anew from the log-sum-exp L. With D = rowsum(dO o O) - dL

    P  = exp2(S - L log2(e))     dV = P' dO     dS = P o (dO V' - D), times 1 - tanh^2 under a softcap
    dQ = scale dS K              dK = scale dS' Q

and dK and dV are summed over the query heads that share a key/value head.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from attn_spec.reference.fused.triton_forward import LOG2E, load, places, store, tanh, tuned


@triton.jit
def weights_again(q, k, lse, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """The weights of a block and, under a softcap, the derivative of its logits by the scaled products."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    slope = 1.0
    if SOFTCAP:
        capped = tanh(s / softcap)
        s, slope = softcap * capped, 1 - capped * capped
    shift = tl.where(lse == float("-inf"), 0.0, lse) * LOG2E  # a row that sees no key has no weights
    return tl.exp2(tl.where(seen, s * LOG2E, float("-inf")) - shift[:, None]), slope


@tuned
@triton.jit
def queries_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d,
    do_b, do_h, do_i, do_d,
    dq_b, dq_h, dq_i, dq_d,
    heads, group, q_len, kv_len, head_dim, v_dim,
    offset, left, right,
    scale, softcap,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dQ [B, H, Sq, D]. lse and delta [B, H, Sq], contiguous in float32. Grid: (blocks of queries, B * H)."""
    block = tl.program_id(0) * BLOCK_M
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    kv_head = h // group
    i, d, e = block + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row = tl.program_id(1).to(tl.int64) * q_len + i
    q = load(q_ptr + b * q_b + h * q_h, i, d, q_i, q_d, q_len, head_dim)
    do = load(do_ptr + b * do_b + h * do_h, i, e, do_i, do_d, q_len, v_dim)
    lse = tl.load(lse_ptr + row, mask=i < q_len, other=0.0)
    delta = tl.load(delta_ptr + row, mask=i < q_len, other=0.0)
    here = i + offset

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first = tl.maximum(block + offset - left, 0) // BLOCK_N * BLOCK_N
    last = tl.minimum(block + BLOCK_M + offset + right, kv_len)
    j = first + tl.arange(0, BLOCK_N)
    k_at = places(k_ptr + b * k_b + kv_head * k_h, j, d, k_j, k_d)
    v_at = places(v_ptr + b * v_b + kv_head * v_h, j, e, v_j, v_d)
    for _ in range(first, last, BLOCK_N):
        k = tl.load(k_at, (j < kv_len)[:, None] & (d < head_dim)[None, :], 0.0)
        v = tl.load(v_at, (j < kv_len)[:, None] & (e < v_dim)[None, :], 0.0)
        ahead = j[None, :] - here[:, None]
        seen = (j < kv_len)[None, :] & (ahead >= -left) & (ahead <= right)
        p, slope = weights_again(q, k, lse, seen, scale, softcap, SOFTCAP)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * slope
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
        j += BLOCK_N
        k_at += BLOCK_N * k_j
        v_at += BLOCK_N * v_j
    store(dq_ptr + b * dq_b + h * dq_h, dq * scale, i, d, dq_i, dq_d, q_len, head_dim)


@tuned
@triton.jit
def keys_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_i, q_d,
    k_b, k_h, k_j, k_d,
    v_b, v_h, v_j, v_d,
    do_b, do_h, do_i, do_d,
    dk_b, dk_h, dk_j, dk_d,
    dv_b, dv_h, dv_j, dv_d,
    heads, group, q_len, kv_len, head_dim, v_dim,
    offset, left, right,
    scale, softcap,
    SOFTCAP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dK [B, Hkv, Sk, D] and dV [B, Hkv, Sk, Dv]. Grid: (blocks of keys, B * Hkv)."""
    block = tl.program_id(0) * BLOCK_N
    kv_heads = heads // group
    b, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    j, d, e = block + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    k = load(k_ptr + b * k_b + kv_head * k_h, j, d, k_j, k_d, kv_len, head_dim)
    v = load(v_ptr + b * v_b + kv_head * v_h, j, e, v_j, v_d, kv_len, v_dim)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    first = tl.maximum(block - offset - right, 0) // BLOCK_M * BLOCK_M
    last = tl.minimum(block + BLOCK_N - offset + left, q_len)
    for h in range(kv_head * group, kv_head * group + group):
        i = first + tl.arange(0, BLOCK_M)
        row = (b * heads + h) * q_len + i
        q_at = places(q_ptr + b * q_b + h * q_h, i, d, q_i, q_d)
        do_at = places(do_ptr + b * do_b + h * do_h, i, e, do_i, do_d)
        for _ in range(first, last, BLOCK_M):
            q = tl.load(q_at, (i < q_len)[:, None] & (d < head_dim)[None, :], 0.0)
            do = tl.load(do_at, (i < q_len)[:, None] & (e < v_dim)[None, :], 0.0)
            lse = tl.load(lse_ptr + row, i < q_len, 0.0)
            delta = tl.load(delta_ptr + row, i < q_len, 0.0)
            ahead = j[None, :] - (i + offset)[:, None]
            seen = (j < kv_len)[None, :] & (ahead >= -left) & (ahead <= right)
            p, slope = weights_again(q, k, lse, seen, scale, softcap, SOFTCAP)
            dv += tl.dot(tl.trans(p.to(do.dtype)), do, input_precision="ieee")
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            ds = p * (dp - delta[:, None]) * slope
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee")
            i += BLOCK_M
            row += BLOCK_M
            q_at += BLOCK_M * q_i
            do_at += BLOCK_M * do_i
    store(dk_ptr + b * dk_b + kv_head * dk_h, dk * scale, j, d, dk_j, dk_d, kv_len, head_dim)
    store(dv_ptr + b * dv_b + kv_head * dv_h, dv, j, e, dv_j, dv_d, kv_len, v_dim)
