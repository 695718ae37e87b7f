"""Correct attention functions in many styles, on which a verification harness must raise no alarm.

Two families: ``sdpa_*`` follow ``torch.nn.functional.scaled_dot_product_attention`` ([B, H, S, D], causal
aligned top-left, mask and causal both apply), ``flash_*`` follow flash-attn ([B, S, H, D], causal aligned
bottom-right).  In both, a query row that sees no key gives zeros.  Every function stands on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# --------------------------------------------------------------------------------------------------------
# SDPA signature, [B, H, S, D]
# --------------------------------------------------------------------------------------------------------


def sdpa_naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Matmul, float32 softmax, probabilities cast back, matmul."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        value = value.repeat_interleave(query.size(1) // value.size(1), dim=1)
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale

    scores = torch.matmul(query * factor, key.transpose(-2, -1))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask.to(scores.dtype)
    if is_causal:
        causal = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))

    dead = (scores == float("-inf")).all(dim=-1, keepdim=True)
    probs = torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    return torch.matmul(probs.to(value.dtype), value)


def sdpa_einsum(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Einsum with one boolean visibility tensor and one bias."""
    if dropout_p != 0.0:
        raise NotImplementedError("dropout_p must be 0")
    n_q, n_k = query.shape[-2], key.shape[-2]
    if enable_gqa:
        key = torch.repeat_interleave(key, query.shape[1] // key.shape[1], dim=1)
        value = torch.repeat_interleave(value, query.shape[1] // value.shape[1], dim=1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32

    logits = torch.einsum("bhqd,bhkd->bhqk", query.to(wide), key.to(wide)) * scale
    visible = torch.ones_like(logits, dtype=torch.bool)
    if is_causal:
        rows = torch.arange(n_q, device=query.device)[:, None]
        cols = torch.arange(n_k, device=query.device)[None, :]
        visible = visible & (cols <= rows)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        visible = visible & (attn_mask > float("-inf"))
        logits = logits + attn_mask.to(wide)

    has_key = visible.any(-1, keepdim=True)
    logits = torch.where(visible, logits, float("-inf"))
    logits = torch.where(has_key, logits, 0.0)
    weights = torch.where(has_key, logits.softmax(-1), 0.0)
    return torch.einsum("bhqk,bhkv->bhqv", weights, value.to(wide)).to(query.dtype)


def sdpa_online16(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Online softmax over key blocks of 16."""
    if dropout_p:
        raise NotImplementedError("dropout is not supported")
    block = 16
    batch, heads, n_q, d_k = query.shape
    n_k, d_v = key.shape[2], value.shape[3]
    if enable_gqa:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
    if scale is None:
        scale = 1.0 / math.sqrt(d_k)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(batch, heads, n_q, n_k)

    acc_dtype = torch.promote_types(query.dtype, torch.float32)
    q = query.to(acc_dtype) * scale
    acc = q.new_zeros(batch, heads, n_q, d_v)
    row_max = q.new_full((batch, heads, n_q, 1), float("-inf"))
    row_sum = q.new_zeros(batch, heads, n_q, 1)
    rows = torch.arange(n_q, device=q.device).unsqueeze(1)

    for start in range(0, n_k, block):
        stop = min(start + block, n_k)
        s = q @ key[:, :, start:stop].to(acc_dtype).transpose(-1, -2)
        if attn_mask is not None:
            m_blk = attn_mask[..., start:stop]
            s = s.masked_fill(~m_blk, float("-inf")) if m_blk.dtype == torch.bool else s + m_blk.to(acc_dtype)
        if is_causal:
            cols = torch.arange(start, stop, device=q.device)
            s = s.masked_fill(cols > rows, float("-inf"))
        new_max = torch.maximum(row_max, s.amax(dim=-1, keepdim=True).detach())
        # a row that has met no key yet keeps -inf as its maximum: use 0 there so that exp gives 0, not nan
        safe_max = new_max.masked_fill(new_max == float("-inf"), 0.0)
        alpha = torch.exp(row_max - safe_max)
        p = torch.exp(s - safe_max)
        acc = acc * alpha + p @ value[:, :, start:stop].to(acc_dtype)
        row_sum = row_sum * alpha + p.sum(dim=-1, keepdim=True)
        row_max = new_max

    return (acc / row_sum.masked_fill(row_sum == 0, 1.0)).to(query.dtype)


def sdpa_online64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Online softmax over key blocks of 64; later causal blocks touch only the rows that reach them."""
    if dropout_p > 0:
        raise NotImplementedError
    b, h, n_q, d = query.shape
    n_k = key.shape[-2]
    groups = h // key.shape[1] if enable_gqa else 1
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    dt = query.dtype if query.dtype == torch.float64 else torch.float32
    q, k, v = query.to(dt), key.to(dt), value.to(dt)
    sm_scale = scale if scale is not None else d**-0.5

    bias = None
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros(attn_mask.shape, dtype=dt, device=q.device)
            bias = bias.masked_fill(attn_mask.logical_not(), -math.inf)
        else:
            bias = attn_mask.to(dt)
        bias = bias.broadcast_to((b, h, n_q, n_k))

    out = torch.zeros(b, h, n_q, v.shape[-1], dtype=dt, device=q.device)
    run_max = torch.full((b, h, n_q), -math.inf, dtype=dt, device=q.device)
    run_sum = torch.zeros(b, h, n_q, dtype=dt, device=q.device)
    for j0 in range(0, n_k, 64):
        j1 = min(j0 + 64, n_k)
        i0 = j0 if is_causal else 0  # rows above the block see none of it
        if i0 >= n_q:
            break
        s = torch.matmul(q[:, :, i0:], k[:, :, j0:j1].mT) * sm_scale
        if bias is not None:
            s = s + bias[:, :, i0:, j0:j1]
        if is_causal:
            later = torch.ones(n_q - i0, j1 - j0, dtype=torch.bool, device=q.device).triu(1)
            s = s.masked_fill(later, -math.inf)
        old = run_max[:, :, i0:]
        new = torch.maximum(old, s.amax(-1))
        base = torch.where(torch.isneginf(new), torch.zeros_like(new), new)
        decay = torch.exp(old - base)
        p = torch.exp(s - base.unsqueeze(-1))
        part = out[:, :, i0:] * decay.unsqueeze(-1) + torch.matmul(p, v[:, :, j0:j1])
        out = torch.cat([out[:, :, :i0], part], dim=2)
        run_sum = torch.cat([run_sum[:, :, :i0], run_sum[:, :, i0:] * decay + p.sum(-1)], dim=2)
        run_max = torch.cat([run_max[:, :, :i0], new], dim=2)
    denom = torch.where(run_sum > 0, run_sum, torch.ones_like(run_sum))
    return (out / denom.unsqueeze(-1)).to(query.dtype)


def sdpa_query_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Memory-saving loop over chunks of 32 queries; each chunk sees the whole key axis."""
    if dropout_p != 0:
        raise NotImplementedError("dropout is not supported")
    num_q, num_k = query.size(2), key.size(2)
    if enable_gqa and key.size(1) != query.size(1):
        reps = query.size(1) // key.size(1)
        key = key.repeat_interleave(reps, dim=1)
        value = value.repeat_interleave(reps, dim=1)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.size(0), query.size(1), num_q, num_k)
    work = torch.promote_types(query.dtype, torch.float32)
    key_t = key.to(work).transpose(2, 3)
    value_w = value.to(work)
    factor = query.size(3) ** -0.5 if scale is None else scale
    key_index = torch.arange(num_k, device=query.device)

    outputs = []
    for begin in range(0, num_q, 32):
        q_chunk = query[:, :, begin : begin + 32].to(work)
        scores = torch.matmul(q_chunk, key_t).mul(factor)
        if attn_mask is not None:
            mask_chunk = attn_mask[:, :, begin : begin + 32]
            if mask_chunk.dtype == torch.bool:
                scores = torch.where(mask_chunk, scores, torch.full_like(scores, float("-inf")))
            else:
                scores = scores + mask_chunk.to(work)
        if is_causal:
            query_index = torch.arange(begin, begin + q_chunk.size(2), device=query.device)
            scores = scores.masked_fill(key_index[None, :] > query_index[:, None], float("-inf"))
        empty = torch.isneginf(scores).all(dim=-1, keepdim=True)
        probs = F.softmax(scores.masked_fill(empty, 0.0), dim=-1)
        outputs.append(torch.matmul(probs, value_w).masked_fill(empty, 0.0))
    return torch.cat(outputs, dim=2).to(query.dtype)


def sdpa_exp2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Softmax in base 2: exp(x) = 2 ** (x * log2 e), normalised after the second matmul."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    log2e = 1.4426950408889634
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    n_q, n_k = query.shape[2], key.shape[2]
    if n_k == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3])

    s = query.to(dtype) @ key.to(dtype).transpose(2, 3)
    s = s * (1.0 / math.sqrt(query.shape[3]) if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            s = s.masked_fill(attn_mask.logical_not(), -torch.inf)
        else:
            s = s + attn_mask.to(dtype)
    if is_causal:
        s = s.masked_fill(torch.ones(n_q, n_k, dtype=torch.bool, device=s.device).triu(1), -torch.inf)

    # subtract first, then change base: (finfo.min * log2e) would overflow
    peak = s.amax(-1, keepdim=True)
    peak = torch.where(peak == -torch.inf, 0.0, peak)
    p = torch.exp2((s - peak) * log2e)
    total = p.sum(-1, keepdim=True)
    out = (p @ value.to(dtype)) / torch.where(total == 0, 1.0, total)
    return out.to(query.dtype)


def sdpa_split_merge(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Keys split in up to four parts, each reduced on its own; partials merged by (max, sum of exps).

    The two parts of the log-sum-exp are kept apart: added up, a maximum near finfo.min swallows log(sum).
    """
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    bsz, n_head, n_q, head_dim = query.shape
    n_k = key.shape[2]
    if n_k == 0:
        return query.new_zeros(bsz, n_head, n_q, value.shape[-1])
    if enable_gqa:
        key = key.repeat_interleave(n_head // key.shape[1], dim=1)
        value = value.repeat_interleave(n_head // value.shape[1], dim=1)
    ct = torch.promote_types(query.dtype, torch.float32)
    scale = head_dim**-0.5 if scale is None else scale
    pieces = torch.arange(n_k, device=query.device).chunk(4)
    q_pos = torch.arange(n_q, device=query.device)

    maxes, sums, partials = [], [], []
    for idx in pieces:
        lo, hi = int(idx[0]), int(idx[-1]) + 1
        s = torch.matmul(query.to(ct), key[:, :, lo:hi].to(ct).transpose(-1, -2)) * scale
        if attn_mask is not None:
            part = attn_mask.expand(bsz, n_head, n_q, n_k)[..., lo:hi]
            s = s.masked_fill(~part, -math.inf) if part.dtype == torch.bool else s + part.to(ct)
        if is_causal:
            s = s.masked_fill(idx[None, :] > q_pos[:, None], -math.inf)
        m = s.amax(dim=-1, keepdim=True).detach()
        p = torch.exp(s - m.masked_fill(m == -math.inf, 0.0))
        maxes.append(m)
        sums.append(p.sum(dim=-1, keepdim=True))
        partials.append(torch.matmul(p, value[:, :, lo:hi].to(ct)))

    m_all = torch.stack(maxes)
    top = m_all.amax(dim=0)
    weight = torch.exp(m_all - top.masked_fill(top == -math.inf, 0.0))
    denom = (weight * torch.stack(sums)).sum(dim=0)
    numer = (weight * torch.stack(partials)).sum(dim=0)
    return (numer / denom.masked_fill(denom == 0.0, 1.0)).to(query.dtype)


def sdpa_two_pass(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """First pass finds each row's maximum and normaliser, second pass recomputes scores and accumulates."""
    if dropout_p:
        raise NotImplementedError("dropout is not supported")
    batch, heads, n_q, dim = query.shape
    n_k = key.shape[2]
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        key = key.repeat_interleave(heads // key.shape[1], dim=1)
        value = value.repeat_interleave(heads // value.shape[1], dim=1)
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    q, k, v = query.to(dt) * factor, key.to(dt), value.to(dt)
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, n_q, n_k)
    q_idx = torch.arange(n_q, device=q.device)[:, None]

    def block_scores(lo: int, hi: int) -> torch.Tensor:
        s = q @ k[:, :, lo:hi].transpose(-2, -1)
        if mask is not None and mask.dtype == torch.bool:
            s = s.masked_fill(~mask[..., lo:hi], float("-inf"))
        elif mask is not None:
            s = s + mask[..., lo:hi].to(dt)
        if is_causal:
            s = s.masked_fill(torch.arange(lo, hi, device=q.device) > q_idx, float("-inf"))
        return s

    spans = [(lo, min(lo + 48, n_k)) for lo in range(0, n_k, 48)]
    peak = q.new_full((batch, heads, n_q, 1), float("-inf"))
    for lo, hi in spans:
        peak = torch.maximum(peak, block_scores(lo, hi).detach().amax(dim=-1, keepdim=True))
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    norm = q.new_zeros(batch, heads, n_q, 1)
    for lo, hi in spans:
        norm = norm + torch.exp(block_scores(lo, hi) - peak).sum(dim=-1, keepdim=True)
    norm = norm.masked_fill(norm == 0.0, 1.0)

    out = q.new_zeros(batch, heads, n_q, v.shape[-1])
    for lo, hi in spans:
        out = out + (torch.exp(block_scores(lo, hi) - peak) / norm) @ v[:, :, lo:hi]
    return out.to(query.dtype)


def sdpa_head_loop(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Plain Python loops over batch and heads; query head h reads key/value head h // group."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    b_size, n_heads, n_q, d_k = query.shape
    n_k, d_v = key.shape[2], value.shape[3]
    k_group = n_heads // key.shape[1] if enable_gqa else 1
    v_group = n_heads // value.shape[1] if enable_gqa else 1
    scale = 1 / math.sqrt(d_k) if scale is None else scale
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    if attn_mask is not None:
        attn_mask = attn_mask.expand(b_size, n_heads, n_q, n_k)

    out = torch.zeros(b_size, n_heads, n_q, d_v, dtype=query.dtype, device=query.device)
    for b in range(b_size):
        for h in range(n_heads):
            q = query[b, h].to(compute)
            k = key[b, h // k_group].to(compute)
            v = value[b, h // v_group].to(compute)
            s = scale * (q @ k.T)
            if attn_mask is not None:
                mask = attn_mask[b, h]
                s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(compute)
            if is_causal:
                s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(diagonal=1), float("-inf"))
            rows = (s != float("-inf")).any(dim=1)  # rows without a key stay zero
            out[b, h, rows] = (torch.softmax(s[rows], dim=-1) @ v).to(query.dtype)
    return out


def sdpa_reverse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Online softmax that walks the key blocks from the last one to the first."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    bs, nh, lq, d = query.shape
    lk = key.size(-2)
    if enable_gqa:
        key = key.repeat_interleave(nh // key.size(1), dim=1)
        value = value.repeat_interleave(nh // value.size(1), dim=1)
    ft = torch.promote_types(query.dtype, torch.float32)
    scale_ = d**-0.5 if scale is None else scale
    q = query.to(ft)
    o = torch.zeros(bs, nh, lq, value.size(-1), dtype=ft, device=query.device)
    m = torch.full((bs, nh, lq, 1), float("-inf"), dtype=ft, device=query.device)
    z = torch.zeros_like(m)
    i = torch.arange(lq, device=query.device).view(-1, 1)

    n_blocks = (lk + 31) // 32
    for blk in reversed(range(n_blocks)):
        cols = slice(blk * 32, min(blk * 32 + 32, lk))
        if is_causal and cols.start > lq - 1:
            continue
        s = scale_ * torch.einsum("bhqd,bhkd->bhqk", q, key[:, :, cols].to(ft))
        if attn_mask is not None:
            mk = attn_mask.expand(bs, nh, lq, lk)[:, :, :, cols]
            s = torch.where(mk, s, float("-inf")) if mk.dtype == torch.bool else s + mk.to(ft)
        if is_causal:
            s = torch.where(torch.arange(cols.start, cols.stop, device=s.device) <= i, s, float("-inf"))
        m_next = torch.maximum(m, s.amax(-1, keepdim=True))
        shift = torch.where(m_next.isneginf(), 0.0, m_next).detach()
        keep = torch.exp(m - shift).detach()
        p = torch.exp(s - shift)
        o = o * keep + p @ value[:, :, cols].to(ft)
        z = z * keep + p.sum(-1, keepdim=True)
        m = m_next.detach()
    return (o / torch.where(z == 0, 1.0, z)).to(query.dtype)


def sdpa_p_cast(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Float32 scores; unnormalised P rounded to the input dtype; float32 accumulation of P @ V."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    in_dtype = query.dtype
    acc_dtype = torch.float64 if in_dtype == torch.float64 else torch.float32
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        value = value.repeat_interleave(query.size(1) // value.size(1), dim=1)
    if key.size(2) == 0:
        return query.new_zeros(query.shape[:3] + value.shape[3:])
    sm_scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale

    s = torch.matmul(query.to(acc_dtype), key.to(acc_dtype).transpose(-2, -1)) * sm_scale
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            s = s.masked_fill(~attn_mask, float("-inf"))
        else:
            s = s + attn_mask.to(acc_dtype)
    if is_causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(0)
        s = s.masked_fill(~keep, float("-inf"))
    row_max = s.amax(dim=-1, keepdim=True).detach()
    row_max = row_max.masked_fill(row_max == float("-inf"), 0.0)
    p = torch.exp(s - row_max)
    denom = p.sum(dim=-1, keepdim=True)
    acc = torch.matmul(p.to(in_dtype).to(acc_dtype), value.to(acc_dtype))
    return (acc / denom.masked_fill(denom == 0, 1.0)).to(in_dtype)


def sdpa_eager_dtype(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Eager attention that never leaves the dtype of its inputs."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    dtype = query.dtype
    lowest = torch.finfo(dtype).min
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), dim=-3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), dim=-3)
    scale_factor = 1 / math.sqrt(query.size(-1)) if scale is None else scale

    scores = (query * scale_factor) @ key.transpose(-2, -1)
    blocked = torch.zeros(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device)
    if is_causal:
        blocked = ~torch.ones_like(blocked).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            blocked = blocked | ~attn_mask
        else:
            # a finite mask value has to stay finite in a narrow dtype; only a true -inf blocks
            blocked = blocked | torch.isneginf(attn_mask)
            bias = attn_mask.to(torch.promote_types(attn_mask.dtype, dtype)).clamp(min=lowest).to(dtype)
            scores = (scores + bias).clamp(min=lowest)
    nothing = blocked.all(dim=-1, keepdim=True)
    scores = scores.masked_fill(blocked & ~nothing, float("-inf"))
    attn = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)
    return attn @ value


def sdpa_upcast(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Everything in float32 (float64 stays float64), rounded once at the end; softmax written out."""
    if dropout_p != 0.0:
        raise NotImplementedError("only dropout_p=0.0 is supported")
    out_dtype = query.dtype
    if out_dtype != torch.float64:
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    sq, sk = query.shape[-2], key.shape[-2]
    if sk == 0:
        return torch.zeros(*query.shape[:-1], value.shape[-1], dtype=out_dtype, device=query.device)

    scores = query @ key.mT
    scores = scores / math.sqrt(query.shape[-1]) if scale is None else scores * scale
    if attn_mask is not None and attn_mask.is_floating_point():
        scores = scores + attn_mask.to(scores.dtype)
    allowed = torch.ones(sq, sk, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    if attn_mask is not None and not attn_mask.is_floating_point():
        allowed = allowed & attn_mask
    scores = scores.masked_fill(~allowed, -math.inf)

    row_max = scores.max(dim=-1, keepdim=True).values
    row_max = row_max.masked_fill(row_max == -math.inf, 0.0)
    weights = (scores - row_max).exp()
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0.0, 1.0)
    return (weights @ value).to(out_dtype)


def sdpa_k_smooth(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Subtract the mean key before Q @ K^T: shifts every row of scores by a constant, softmax unchanged."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    if k.size(-2) > 0:
        k = k - k.mean(dim=-2, keepdim=True)
    if enable_gqa:
        k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
        v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    scores = (q @ k.transpose(-1, -2)) * (q.size(-1) ** -0.5 if scale is None else scale)

    # the shift is the same along a row, so masks are applied to the shifted scores as usual
    if is_causal:
        upper = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(upper, float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask.to(wide)
    no_key = torch.all(scores == float("-inf"), dim=-1, keepdim=True)
    probs = torch.softmax(scores.masked_fill(no_key, 0.0), dim=-1)
    return (probs @ v).masked_fill(no_key, 0.0).to(query.dtype)


def sdpa_log_softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Log-softmax, then exp."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    if enable_gqa:
        n_rep = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(n_rep, dim=1)
        value = value.repeat_interleave(n_rep, dim=1)
    sm_scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = torch.einsum("...qd,...kd->...qk", query.to(work) * sm_scale, key.to(work))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            logits = torch.where(attn_mask, logits, -torch.inf)
        else:
            logits = logits + attn_mask.to(work)
    if is_causal:
        keep = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = torch.where(keep, logits, -torch.inf)
    dead = logits.isneginf().all(dim=-1, keepdim=True)
    log_probs = F.log_softmax(logits.masked_fill(dead, 0.0), dim=-1)
    probs = log_probs.exp().masked_fill(dead, 0.0)
    return torch.matmul(probs, value.to(work)).to(query.dtype)


class _BiasAttention(torch.autograd.Function):
    """Attention with an additive bias; forward and backward by hand, probabilities saved."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Return softmax(scale * q k^T + bias) v, rows that are -inf throughout giving zeros."""
        wide = torch.promote_types(q.dtype, torch.float32)
        s = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
        if bias is not None:
            s = s + bias.to(wide)
        dead = (s == -math.inf).all(dim=-1, keepdim=True)
        p = torch.softmax(s.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        ctx.bias_shape = None if bias is None else bias.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return (p @ v.to(wide)).to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients for q, k, v and, where wanted, the bias."""
        q, k, v, p = ctx.saved_tensors
        wide = p.dtype
        g = grad_out.to(wide)
        grad_v = p.transpose(-1, -2) @ g
        grad_p = g @ v.to(wide).transpose(-1, -2)
        grad_s = p * (grad_p - (p * grad_p).sum(dim=-1, keepdim=True))
        grad_q = (grad_s @ k.to(wide)) * ctx.scale
        grad_k = (grad_s.transpose(-1, -2) @ q.to(wide)) * ctx.scale
        grad_bias = None
        if ctx.bias_shape is not None and ctx.needs_input_grad[3]:
            grad_bias = grad_s.sum_to_size(ctx.bias_shape).to(ctx.bias_dtype)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_bias, None


def sdpa_autograd(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Front end of the hand-differentiated function: masks become one additive bias."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        value = value.repeat_interleave(query.size(1) // value.size(1), dim=1)
    bias_dtype = torch.promote_types(query.dtype, torch.float32)
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=bias_dtype).masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        bias = attn_mask.to(bias_dtype)
    if is_causal:
        future = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).triu(1)
        if bias is None:
            bias = torch.zeros(future.shape, dtype=bias_dtype, device=query.device)
        bias = torch.where(future, -math.inf, bias)
    return _BiasAttention.apply(query, key, value, bias, query.size(-1) ** -0.5 if scale is None else scale)


def sdpa_wrapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """PyTorch's own kernel on contiguous copies, with the mask and causal combined beforehand."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    if scale is not None and scale <= 0.0:  # fused kernels mask before they scale: -inf * scale must be -inf
        query, scale = (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)
    if attn_mask is None:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    full = (*query.shape[:3], key.shape[2])
    blocked = ~attn_mask if attn_mask.dtype == torch.bool else torch.isneginf(attn_mask)
    if is_causal:
        blocked = blocked | torch.ones(full[-2:], dtype=torch.bool, device=query.device).triu(1)
    blocked = blocked.expand(full)
    dead = blocked.all(dim=-1, keepdim=True)
    if attn_mask.dtype == torch.bool:
        mask = (~blocked | dead).contiguous()
    else:
        # clamp before the cast: float32's finfo.min would turn into -inf in a half dtype
        finite = attn_mask.to(torch.promote_types(attn_mask.dtype, query.dtype))
        finite = finite.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)
        mask = finite.expand(full).masked_fill(blocked & ~dead, float("-inf")).contiguous()
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out.masked_fill(dead, 0.0)


def sdpa_sqrt_scale(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The square root of the scale goes on q and on k; a negative scale leaves its sign on q."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    root = math.sqrt(abs(scale))
    q = query * math.copysign(root, scale)
    k = key * root
    v = value
    if enable_gqa:
        k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
        v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-2, -1))
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(wide)
    elif attn_mask is not None:
        scores = scores.masked_fill(torch.logical_not(attn_mask), float("-inf"))
    if is_causal:
        n_q, n_k = scores.shape[-2:]
        ahead = torch.arange(n_k, device=q.device) > torch.arange(n_q, device=q.device).unsqueeze(-1)
        scores = scores.masked_fill(ahead, float("-inf"))
    empty = scores.eq(float("-inf")).all(-1, True)
    probs = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return torch.matmul(probs, v.to(wide)).to(query.dtype)


def sdpa_baddbmm(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.baddbmm on [B * H, S, D]: the additive bias is the first operand, the scale is alpha."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    b, h, n_q, d_k = query.shape
    n_k, d_v = key.shape[2], value.shape[3]
    if enable_gqa:
        key = key.repeat_interleave(h // key.shape[1], dim=1)
        value = value.repeat_interleave(h // value.shape[1], dim=1)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = query.reshape(b * h, n_q, d_k).to(wide)
    k = key.reshape(b * h, n_k, d_k).to(wide)
    v = value.reshape(b * h, n_k, d_v).to(wide)

    bias = torch.zeros(b, h, n_q, n_k, dtype=wide, device=query.device)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = bias.masked_fill(~attn_mask, float("-inf"))
        else:
            bias = bias + attn_mask.to(wide)
    if is_causal:
        bias = bias + torch.full((n_q, n_k), float("-inf"), dtype=wide, device=query.device).triu(1)
    bias = bias.view(b * h, n_q, n_k)
    dead = (bias == float("-inf")).all(dim=-1, keepdim=True)
    alpha = 1.0 / math.sqrt(d_k) if scale is None else scale
    scores = torch.baddbmm(bias.masked_fill(dead, 0.0), q, k.transpose(1, 2), beta=1.0, alpha=alpha)
    probs = torch.softmax(scores, dim=-1).masked_fill(dead, 0.0)
    return torch.bmm(probs, v).view(b, h, n_q, d_v).to(query.dtype)


def sdpa_additive_merged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """An additive -inf mask is built from causal, merged with the caller's mask, and added once."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    n_q, n_k = query.shape[2], key.shape[2]
    wide = torch.promote_types(query.dtype, torch.float32)
    additive = torch.zeros(1, 1, n_q, n_k, dtype=wide, device=query.device)
    if is_causal:
        additive = torch.full_like(additive, -math.inf).triu(1)
    if attn_mask is not None:
        user = attn_mask
        if user.dtype == torch.bool:
            user = torch.where(user, 0.0, -math.inf)
        additive = additive + user.to(wide)
    unseen = (additive == -math.inf).all(dim=-1, keepdim=True)

    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    sm_scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    scores = sm_scale * (query.to(wide) @ key.to(wide).mT) + additive.masked_fill(unseen, 0.0)
    out = scores.softmax(dim=-1) @ value.to(wide)
    return out.masked_fill(unseen, 0.0).to(query.dtype)


def sdpa_grouped_5d(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """GQA through a [B, Hkv, G, S, D] view of the queries; keys and values are never expanded."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    b, h, n_q, d = query.shape
    h_kv, n_k = key.shape[1], key.shape[2]
    if not enable_gqa and h_kv != h:
        raise ValueError("head counts differ; pass enable_gqa=True")
    acc = torch.promote_types(query.dtype, torch.float32)
    scale = d**-0.5 if scale is None else scale
    q5 = query.unflatten(1, (h_kv, h // h_kv)).to(acc) * scale
    scores = torch.einsum("bngqd,bnkd->bngqk", q5, key.to(acc))

    if attn_mask is not None:
        mask5 = attn_mask.expand(b, h, n_q, n_k).reshape(b, h_kv, h // h_kv, n_q, n_k)
        if mask5.dtype == torch.bool:
            scores = scores.masked_fill(~mask5, float("-inf"))
        else:
            scores = scores + mask5.to(acc)
    if is_causal:
        causal = torch.ones(n_q, n_k, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
    dead = (scores == float("-inf")).all(dim=-1, keepdim=True)
    probs = scores.masked_fill(dead, 0.0).softmax(dim=-1).masked_fill(dead, 0.0)
    return torch.einsum("bngqk,bnkv->bngqv", probs, value.to(acc)).flatten(1, 2).to(query.dtype)


# --------------------------------------------------------------------------------------------------------
# flash-attn signature, [B, S, H, D]
# --------------------------------------------------------------------------------------------------------


def flash_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Transpose to heads-first, matmul, softmax, matmul, transpose back."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    n_rep = q.shape[2] // k.shape[2]
    qt = q.transpose(1, 2)
    kt = k.repeat_interleave(n_rep, dim=2).transpose(1, 2)
    vt = v.repeat_interleave(n_rep, dim=2).transpose(1, 2)
    scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(q.shape[-1])

    scores = torch.matmul(qt * scale, kt.transpose(-2, -1))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    sq, sk = scores.shape[-2:]
    if causal:
        mask = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(diagonal=sk - sq)
        empty = ~mask.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~(mask | empty), float("-inf"))
        probs = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)
    else:
        probs = torch.softmax(scores, dim=-1)
    return torch.matmul(probs.to(v.dtype), vt).transpose(1, 2).contiguous()


def flash_einsum(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Einsum directly on [B, S, H, D]."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    dtype_og = q.dtype
    if dtype_og != torch.float64:
        q, k, v = q.float(), k.float(), v.float()
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bthd,bshd->bhts", q * scale, k)
    if causal:
        t, s = q.shape[1], k.shape[1]
        row_idx = torch.arange(t, device=q.device).unsqueeze(-1)
        col_idx = torch.arange(s, device=q.device)
        hidden = col_idx > row_idx + s - t
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        attention = torch.softmax(scores, dim=-1)
        attention = attention.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
    else:
        attention = torch.softmax(scores, dim=-1)
    return torch.einsum("bhts,bshd->bthd", attention, v).to(dtype_og)


def flash_online16(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """FlashAttention tiling in plain Python: query tiles outside, key tiles of 16 inside."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    b, sq, h, d = q.shape
    sk, h_k, d_v = k.shape[1], k.shape[2], v.shape[3]
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    ct = torch.promote_types(q.dtype, torch.float32)
    kh = k.repeat_interleave(h // h_k, dim=2).permute(0, 2, 1, 3).to(ct)
    vh = v.repeat_interleave(h // h_k, dim=2).permute(0, 2, 1, 3).to(ct)
    offset = sk - sq
    tiles = []
    for i0 in range(0, sq, 16):
        i1 = min(i0 + 16, sq)
        qi = q[:, i0:i1].permute(0, 2, 1, 3).to(ct) * scale
        oi = torch.zeros(b, h, i1 - i0, d_v, dtype=ct, device=q.device)
        li = torch.zeros(b, h, i1 - i0, 1, dtype=ct, device=q.device)
        mi = torch.full((b, h, i1 - i0, 1), float("-inf"), dtype=ct, device=q.device)
        last = min(sk, i1 + offset) if causal else sk
        for j0 in range(0, last, 16):
            j1 = min(j0 + 16, sk)
            sij = qi @ kh[:, :, j0:j1].transpose(-1, -2)
            if causal:
                rows = torch.arange(i0, i1, device=q.device)[:, None] + offset
                sij = sij.masked_fill(torch.arange(j0, j1, device=q.device)[None] > rows, float("-inf"))
            m_new = torch.maximum(mi, sij.max(dim=-1, keepdim=True).values)
            m_use = m_new.masked_fill(m_new == float("-inf"), 0.0)
            pij = torch.exp(sij - m_use)
            corr = torch.exp(mi - m_use)
            li = corr * li + pij.sum(dim=-1, keepdim=True)
            oi = corr * oi + pij @ vh[:, :, j0:j1]
            mi = m_new
        tiles.append((oi / li.masked_fill(li == 0, 1.0)).to(q.dtype))
    return torch.cat(tiles, dim=2).permute(0, 2, 1, 3)


def flash_online64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Online softmax over key blocks of 64 for all queries at once."""
    if dropout_p:
        raise NotImplementedError("dropout is not supported")
    bsz, seqlen_q, n_heads, head_dim = q.shape
    seqlen_k = k.shape[1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    acc_t = torch.float64 if q.dtype == torch.float64 else torch.float32
    k = k.repeat_interleave(n_heads // k.shape[2], dim=2)
    v = v.repeat_interleave(n_heads // v.shape[2], dim=2)

    acc = torch.zeros(bsz, n_heads, seqlen_q, v.shape[-1], dtype=acc_t, device=q.device)
    lse_max = torch.full((bsz, n_heads, seqlen_q), -math.inf, dtype=acc_t, device=q.device)
    lse_sum = torch.zeros_like(lse_max)
    limit = torch.arange(seqlen_q, device=q.device) + (seqlen_k - seqlen_q)
    for k_blk, v_blk, idx in zip(
        k.split(64, dim=1), v.split(64, dim=1), torch.arange(seqlen_k, device=q.device).split(64), strict=True
    ):
        if idx.numel() == 0:
            continue
        logits = torch.einsum("bqhd,bkhd->bhqk", q.to(acc_t), k_blk.to(acc_t)) * scale
        if causal:
            logits = logits.masked_fill(idx[None, :] > limit[:, None], -math.inf)
        new_max = torch.maximum(lse_max, logits.amax(dim=-1))
        ref = torch.where(new_max == -math.inf, torch.zeros_like(new_max), new_max)
        rescale = torch.exp(lse_max - ref)
        p = torch.exp(logits - ref[..., None])
        lse_sum = lse_sum * rescale + p.sum(-1)
        acc = acc * rescale[..., None] + torch.einsum("bhqk,bkhv->bhqv", p, v_blk.to(acc_t))
        lse_max = new_max
    inv = torch.where(lse_sum > 0, 1.0 / torch.where(lse_sum > 0, lse_sum, 1.0), 0.0)
    return (acc * inv[..., None]).transpose(1, 2).to(q.dtype)


def flash_query_chunks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Chunks of 24 queries; under causal each chunk is given only the keys that it can reach."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    scale = 1.0 / math.sqrt(q.size(-1)) if softmax_scale is None else softmax_scale
    work = torch.promote_types(q.dtype, torch.float32)
    shift = k.size(1) - q.size(1)
    group = q.size(2) // k.size(2)
    kk = k.to(work).permute(0, 2, 3, 1).repeat_interleave(group, dim=1)
    vv = v.to(work).permute(0, 2, 1, 3).repeat_interleave(group, dim=1)
    result = []
    for first, chunk in zip(range(0, q.size(1), 24), q.split(24, dim=1), strict=True):
        n = chunk.size(1)
        reach = max(0, min(k.size(1), first + n + shift)) if causal else k.size(1)
        s = (chunk.to(work).permute(0, 2, 1, 3) * scale) @ kk[..., :reach]
        if causal:
            visible = torch.arange(reach, device=q.device) <= torch.arange(
                first + shift, first + n + shift, device=q.device
            ).unsqueeze(1)
            none = ~visible.any(dim=1, keepdim=True)
            p = s.masked_fill(~(visible | none), float("-inf")).softmax(dim=-1).masked_fill(none, 0.0)
        else:
            p = s.softmax(dim=-1)
        result.append((p @ vv[:, :, :reach]).permute(0, 2, 1, 3).to(q.dtype))
    return torch.cat(result, dim=1)


def flash_exp2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Triton-style loop: log2(e) folded into the scale, exp2 in an online softmax, key blocks of 32."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    b, m_ctx, h, d = q.shape
    n_ctx = k.shape[1]
    qk_scale = (d**-0.5 if softmax_scale is None else softmax_scale) * math.log2(math.e)
    ft = torch.float64 if q.dtype == torch.float64 else torch.float32
    qh = q.to(ft).transpose(1, 2)
    kh = k.to(ft).transpose(1, 2).repeat_interleave(h // k.shape[2], dim=1)
    vh = v.to(ft).transpose(1, 2).repeat_interleave(h // v.shape[2], dim=1)
    offs_m = torch.arange(m_ctx, device=q.device) + n_ctx - m_ctx

    m_i = torch.full((b, h, m_ctx), float("-inf"), dtype=ft, device=q.device)
    l_i = torch.zeros(b, h, m_ctx, dtype=ft, device=q.device)
    acc = torch.zeros(b, h, m_ctx, v.shape[-1], dtype=ft, device=q.device)
    for start_n in range(0, n_ctx, 32):
        offs_n = torch.arange(start_n, min(start_n + 32, n_ctx), device=q.device)
        qk = (qh @ kh[:, :, start_n : start_n + 32].transpose(-1, -2)) * qk_scale
        if causal:
            qk = torch.where(offs_m[:, None] >= offs_n[None, :], qk, float("-inf"))
        m_ij = torch.maximum(m_i, qk.amax(-1))
        m_safe = torch.where(m_ij == float("-inf"), 0.0, m_ij)
        p = torch.exp2(qk - m_safe[..., None])
        alpha = torch.exp2(m_i - m_safe)
        l_i = l_i * alpha + p.sum(-1)
        acc = acc * alpha[..., None] + p @ vh[:, :, start_n : start_n + 32]
        m_i = m_ij
    acc = acc / torch.where(l_i == 0.0, 1.0, l_i)[..., None]
    return acc.transpose(1, 2).contiguous().to(q.dtype)


def flash_split_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """FlashDecoding: normalised partial outputs over three key splits, combined through their LSEs."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    wide = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    qh = q.to(wide).transpose(1, 2) * scale
    kh = k.to(wide).repeat_interleave(q.shape[2] // k.shape[2], dim=2).transpose(1, 2)
    vh = v.to(wide).repeat_interleave(q.shape[2] // v.shape[2], dim=2).transpose(1, 2)

    outs, lses = [], []
    bounds = [round(i * sk / 3) for i in range(4)]
    for lo, hi in zip(bounds[:-1], bounds[1:], strict=True):
        if hi == lo:
            continue
        s = qh @ kh[:, :, lo:hi].mT
        visible = torch.ones(sq, hi - lo, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible.tril(sk - sq - lo)
        none = ~visible.any(-1, keepdim=True)
        s = s.masked_fill(~(visible | none), float("-inf"))
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        outs.append(torch.exp(s - lse) @ vh[:, :, lo:hi])
        lses.append(lse.masked_fill(none, float("-inf")))
    if not outs:
        return q.new_zeros(*q.shape[:3], v.shape[-1])

    lse_parts = torch.stack(lses)
    dead = torch.isneginf(lse_parts).all(dim=0)
    weights = torch.softmax(lse_parts.masked_fill(dead, 0.0), dim=0)
    merged = (weights * torch.stack(outs)).sum(dim=0).masked_fill(dead, 0.0)
    return merged.transpose(1, 2).to(q.dtype)


def flash_two_pass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Running (max, sum) statistics over key blocks first, exact probabilities in a second sweep."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    block = 40
    batch, n_q, heads, dim = q.shape
    n_k = k.shape[1]
    scale = 1 / math.sqrt(dim) if softmax_scale is None else softmax_scale
    ct = torch.promote_types(q.dtype, torch.float32)
    q_ = q.to(ct).transpose(1, 2)
    k_ = k.to(ct).transpose(1, 2).repeat_interleave(heads // k.shape[2], dim=1)
    v_ = v.to(ct).transpose(1, 2).repeat_interleave(heads // v.shape[2], dim=1)
    bound = torch.arange(n_q, device=q.device)[:, None] + (n_k - n_q)

    score_blocks = []
    top = torch.full((batch, heads, n_q, 1), -math.inf, dtype=ct, device=q.device)
    norm = torch.zeros_like(top)
    for lo in range(0, n_k, block):
        s = (q_ @ k_[:, :, lo : lo + block].transpose(2, 3)) * scale
        if causal:
            cols = torch.arange(lo, lo + s.shape[-1], device=q.device)
            s = s.masked_fill(cols > bound, -math.inf)
        new_top = torch.maximum(top, s.detach().amax(-1, keepdim=True))
        base = new_top.clamp(min=torch.finfo(ct).min)
        norm = norm * torch.exp(top - base) + torch.exp(s - base).sum(-1, keepdim=True)
        top = new_top
        score_blocks.append(s)

    base = top.clamp(min=torch.finfo(ct).min)
    out = torch.zeros(batch, heads, n_q, v.shape[-1], dtype=ct, device=q.device)
    for n, s in enumerate(score_blocks):
        p = torch.exp(s - base) / norm.masked_fill(norm == 0, 1.0)
        out = out + p @ v_[:, :, n * block : (n + 1) * block]
    return out.to(q.dtype).transpose(1, 2)


def flash_head_loop(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """One head at a time, the batch vectorised with bmm."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    sq, sk, n_heads = q.shape[1], k.shape[1], q.shape[2]
    per_kv = n_heads // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    first = max(0, sq - sk) if causal else 0  # under causal the first sq - sk rows see nothing

    heads = []
    for h in range(n_heads):
        qh = q[:, first:, h].to(compute)
        kh = k[:, :, h // per_kv].to(compute)
        vh = v[:, :, h // per_kv].to(compute)
        s = torch.bmm(qh, kh.transpose(1, 2)) * scale
        if causal:
            future = torch.ones(sq - first, sk, dtype=torch.bool, device=q.device).triu(sk - (sq - first) + 1)
            s = s.masked_fill(future, float("-inf"))
        o = torch.bmm(F.softmax(s, dim=-1), vh)
        heads.append(F.pad(o, (0, 0, first, 0)).to(q.dtype))
    return torch.stack(heads, dim=2)


def flash_reverse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """FlashAttention-2 order of the forward kernel: last key block first, down to block zero."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    step = 16
    b, sq, h, d = q.shape
    sk = k.shape[1]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    dt = torch.promote_types(q.dtype, torch.float32)
    kh = torch.repeat_interleave(k, h // k.shape[2], dim=2).to(dt)
    vh = torch.repeat_interleave(v, h // v.shape[2], dim=2).to(dt)
    o = torch.zeros(b, sq, h, v.shape[-1], dtype=dt, device=q.device)
    m = torch.full((b, sq, h, 1), float("-inf"), dtype=dt, device=q.device)
    z = torch.zeros(b, sq, h, 1, dtype=dt, device=q.device)
    row = torch.arange(sq, device=q.device).view(1, sq, 1, 1) + sk - sq
    for lo in range((sk - 1) // step * step, -1, -step):
        hi = min(lo + step, sk)
        s = torch.einsum("bqhd,bkhd->bqhk", q.to(dt) * scale, kh[:, lo:hi])
        if causal:
            s = s.masked_fill(torch.arange(lo, hi, device=q.device) > row, float("-inf"))
        m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True).detach())
        m_fin = m_new.masked_fill(m_new.isneginf(), 0.0)
        factor = (m - m_fin).exp()
        p = (s - m_fin).exp()
        z = z * factor + p.sum(dim=-1, keepdim=True)
        o = o * factor + torch.einsum("bqhk,bkhv->bqhv", p, vh[:, lo:hi])
        m = m_new
    return (o / z.masked_fill(z == 0.0, 1.0)).to(q.dtype)


def flash_p_cast(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Tensor-core numerics: float32 S, normalised P rounded to the input dtype, float32 accumulation."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    out_dtype = q.dtype
    acc = torch.promote_types(out_dtype, torch.float32)
    ratio = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(ratio, dim=2)
    v = v.repeat_interleave(ratio, dim=2)
    scale = 1.0 / math.sqrt(q.shape[3]) if softmax_scale is None else softmax_scale
    s = torch.einsum("bqhd,bkhd->bhqk", q.to(acc), k.to(acc)) * scale
    if causal:
        diag = k.shape[1] - q.shape[1]
        keep = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(diag)
        lonely = ~keep.any(dim=-1)
        s = s.masked_fill(~keep, float("-inf")).masked_fill(lonely[:, None], 0.0)
        p = s.softmax(dim=-1).masked_fill(lonely[:, None], 0.0)
    else:
        p = s.softmax(dim=-1)
    p = p.to(out_dtype)
    return torch.einsum("bhqk,bkhv->bqhv", p.to(acc), v.to(acc)).to(out_dtype)


def flash_eager_dtype(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Eager half precision: every intermediate has the dtype of the inputs."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    scale = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    q = (q * scale).transpose(1, 2)
    k = k.transpose(1, 2).repeat_interleave(q.size(1) // k.size(2), dim=1)
    v = v.transpose(1, 2).repeat_interleave(q.size(1) // v.size(2), dim=1)
    scores = q @ k.transpose(-1, -2)
    dead = torch.zeros(q.size(2), 1, dtype=torch.bool, device=q.device)
    if causal:
        sq, sk = q.size(2), k.size(2)
        dead = torch.arange(sq, device=q.device).unsqueeze(1) < sq - sk
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future & ~dead, float("-inf"))
    attn = scores.softmax(dim=-1).masked_fill(dead, 0.0)
    return (attn @ v).transpose(1, 2)


def flash_upcast(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """All in float32 (float64 stays float64), with the softmax normalisation after P @ V."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    up = (lambda x: x) if q.dtype == torch.float64 else (lambda x: x.float())
    qf, kf, vf = up(q).transpose(1, 2), up(k).transpose(1, 2), up(v).transpose(1, 2)
    if kf.shape[1] != qf.shape[1]:
        kf = kf.repeat_interleave(qf.shape[1] // kf.shape[1], dim=1)
        vf = vf.repeat_interleave(qf.shape[1] // vf.shape[1], dim=1)
    sq, sk = qf.shape[2], kf.shape[2]
    if sk == 0:
        return q.new_zeros(q.shape[0], sq, q.shape[2], v.shape[3])
    scores = qf @ kf.transpose(2, 3) * (softmax_scale if softmax_scale is not None else q.shape[3] ** -0.5)
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    high = scores.amax(dim=-1, keepdim=True)
    high = torch.where(high == -math.inf, torch.zeros_like(high), high)
    e = torch.exp(scores - high)
    z = e.sum(dim=-1, keepdim=True)
    out = (e @ vf) / torch.where(z == 0, torch.ones_like(z), z)
    return out.transpose(1, 2).contiguous().to(q.dtype)


def flash_k_smooth(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """SageAttention-style smoothing of K by its mean over the keys, without the quantisation."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    if k.shape[1] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[-1])
    hi = torch.promote_types(q.dtype, torch.float32)
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k_centred = k.to(hi)
    k_centred = k_centred - k_centred.mean(dim=1, keepdim=True)
    group = q.shape[2] // k.shape[2]
    k_all = k_centred.repeat_interleave(group, dim=2)
    v_all = v.to(hi).repeat_interleave(group, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q.to(hi), k_all) * scale
    if causal:
        i = torch.arange(q.shape[1], device=q.device)
        j = torch.arange(k.shape[1], device=q.device)
        hidden = j[None, :] > i[:, None] + (k.shape[1] - q.shape[1])
        blank = hidden.all(dim=1, keepdim=True)
        s = s.masked_fill(hidden & ~blank, float("-inf"))
        p = torch.softmax(s, dim=-1).masked_fill(blank, 0.0)
    else:
        p = torch.softmax(s, dim=-1)
    return torch.einsum("bhij,bjhv->bihv", p, v_all).to(q.dtype)


def flash_log_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Log-probabilities by subtracting a log-sum-exp, exponentiated for the second product."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    prec = torch.float64 if q.dtype == torch.float64 else torch.float32
    n_q, n_k, h = q.shape[1], k.shape[1], q.shape[2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    kx = k.repeat_interleave(h // k.shape[2], dim=2).to(prec)
    vx = v.repeat_interleave(h // v.shape[2], dim=2).to(prec)
    logits = torch.einsum("bqhd,bkhd->bhqk", q.to(prec) * scale, kx)
    seen = torch.ones(n_q, n_k, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(diagonal=n_k - n_q)
    nothing = ~seen.any(dim=-1, keepdim=True)
    logits = logits.masked_fill(~(seen | nothing), float("-inf"))
    log_p = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    p = log_p.exp().masked_fill(nothing, 0.0)
    return torch.einsum("bhqk,bkhv->bqhv", p, vx).to(q.dtype)


class _FlashLikeAttention(torch.autograd.Function):
    """Attention that saves only the output and the log-sum-exp and recomputes P in the backward."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        """Forward on [B, S, H, D] with grouped key/value heads."""
        wide = torch.promote_types(q.dtype, torch.float32)
        b, sq, h, d = q.shape
        sk, h_k = k.shape[1], k.shape[2]
        q5 = q.to(wide).reshape(b, sq, h_k, h // h_k, d)
        s = torch.einsum("bqngd,bknd->bngqk", q5, k.to(wide)) * scale
        hidden = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
        if causal:
            hidden = (~hidden).triu(sk - sq + 1)
        dead = hidden.all(dim=-1, keepdim=True)
        s = s.masked_fill(hidden & ~dead, float("-inf"))
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        p = torch.exp(s - lse).masked_fill(dead, 0.0)
        out = torch.einsum("bngqk,bknv->bqngv", p, v.to(wide)).reshape(b, sq, h, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, lse, hidden, dead)
        ctx.scale = scale
        return out.to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """dS = P * (dP - rowsum(dO * O)); dK and dV sum over the group."""
        q, k, v, out, lse, hidden, dead = ctx.saved_tensors
        wide = out.dtype
        b, sq, h, d = q.shape
        h_k = k.shape[2]
        grouped = (b, sq, h_k, h // h_k)
        q5 = q.to(wide).reshape(*grouped, d)
        do = grad_out.to(wide).reshape(*grouped, -1)
        delta = (do * out.reshape(*grouped, -1)).sum(dim=-1).permute(0, 2, 3, 1).unsqueeze(-1)
        s = torch.einsum("bqngd,bknd->bngqk", q5, k.to(wide)) * ctx.scale
        p = torch.exp(s.masked_fill(hidden & ~dead, float("-inf")) - lse).masked_fill(dead, 0.0)
        dp = torch.einsum("bqngv,bknv->bngqk", do, v.to(wide))
        ds = p * (dp - delta) * ctx.scale
        dq = torch.einsum("bngqk,bknd->bqngd", ds, k.to(wide)).reshape(q.shape)
        dk = torch.einsum("bngqk,bqngd->bknd", ds, q5)
        dv = torch.einsum("bngqk,bqngv->bknv", p, do)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def flash_autograd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """autograd.Function with a recomputing backward, as the CUDA kernels do it."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    return _FlashLikeAttention.apply(q, k, v, softmax_scale, causal)


def flash_wrapped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """flash-attn's interface on top of PyTorch's SDPA, for machines without the package."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    q = q.transpose(1, 2).contiguous()
    k = k.transpose(1, 2).contiguous()
    v = v.transpose(1, 2).contiguous()
    if softmax_scale is not None and softmax_scale <= 0.0:  # is_causal is nan there in PyTorch's CPU kernel
        q, softmax_scale = (-q, -softmax_scale) if softmax_scale < 0.0 else (q * 0.0, 1.0)
    sq, sk = q.size(2), k.size(2)
    blank = 0
    mask = None
    if causal and sq > sk:  # rows before the diagonal starts see no key: leave them out, pad with zeros
        blank = sq - sk
        q = q[:, :, blank:]
    elif causal and sq < sk:
        mask = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=softmax_scale,
        enable_gqa=q.size(1) != k.size(1),
    )
    if blank:
        out = F.pad(out, (0, 0, blank, 0))
    return out.transpose(1, 2).contiguous()


def flash_sqrt_scale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Fourth root of d on both sides: q and k are each multiplied by sqrt(scale), in float32."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    calc = torch.promote_types(q.dtype, torch.float32)
    scale = 1.0 / math.sqrt(q.size(-1)) if softmax_scale is None else softmax_scale
    half_scale = math.sqrt(abs(scale))
    sign = -1.0 if scale < 0 else 1.0
    group = q.size(2) // k.size(2)
    qs = (q.to(calc) * (sign * half_scale)).movedim(2, 1)
    ks = (k.to(calc) * half_scale).movedim(2, 1).repeat_interleave(group, 1)
    vs = v.to(calc).movedim(2, 1).repeat_interleave(group, 1)
    w = qs @ ks.transpose(-1, -2)
    if causal:
        start = ks.size(2) - qs.size(2)
        pos_q = torch.arange(start, start + qs.size(2), device=q.device)
        pos_k = torch.arange(ks.size(2), device=q.device)
        w = w.masked_fill(pos_k > pos_q[:, None], float("-inf"))
        w = w.masked_fill(pos_q[:, None] < 0, 0.0)
        w = w.softmax(-1).masked_fill(pos_q[:, None] < 0, 0.0)
    else:
        w = w.softmax(-1)
    return (w @ vs).movedim(1, 2).to(q.dtype)


def flash_baddbmm(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Megatron style: baddbmm with beta=0 into a fresh buffer, [B * H, S, D] operands."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    b, sq, h, d = q.shape
    sk, d_v = k.shape[1], v.shape[3]
    k = k.repeat_interleave(h // k.shape[2], dim=2)
    v = v.repeat_interleave(h // v.shape[2], dim=2)
    q3 = q.transpose(1, 2).reshape(b * h, sq, d)
    k3 = k.permute(0, 2, 3, 1).reshape(b * h, d, sk)
    v3 = v.transpose(1, 2).reshape(b * h, sk, d_v)
    acc = torch.promote_types(q.dtype, torch.float32)
    buffer = torch.empty(b * h, sq, sk, dtype=acc, device=q.device)
    alpha = d**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.baddbmm(buffer, q3.to(acc), k3.to(acc), beta=0.0, alpha=alpha)
    if causal:
        allowed = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        has_any = allowed.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(has_any & ~allowed, float("-inf"))
        probs = F.softmax(scores, dim=-1) * has_any
    else:
        probs = F.softmax(scores, dim=-1)
    context = torch.bmm(probs, v3.to(acc))
    return context.view(b, h, sq, d_v).transpose(1, 2).to(q.dtype)


def flash_additive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Causal as an additive -inf triangle, shifted to the bottom-right corner."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    query = q.to(dtype).transpose(1, 2)
    key = k.to(dtype).transpose(1, 2).repeat_interleave(rep, dim=1)
    value = v.to(dtype).transpose(1, 2).repeat_interleave(rep, dim=1)
    bias = torch.zeros(sq, sk, dtype=dtype, device=q.device)
    if causal:
        bias = torch.full_like(bias, float("-inf")).triu(sk - sq + 1)
    valid = (bias == 0).any(dim=-1, keepdim=True)
    bias = bias.masked_fill(~valid, 0.0)
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    attn = torch.softmax(query @ key.transpose(-1, -2) * scale + bias, dim=-1)
    out = (attn @ value) * valid.to(dtype)
    return out.transpose(1, 2).to(q.dtype)


def flash_grouped_5d(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Grouped heads folded into the query rows: one matmul per key head, nothing repeated."""
    if dropout_p > 0.0:
        raise NotImplementedError("dropout is not supported")
    b, sq, h, d = q.shape
    sk, h_k, d_v = k.shape[1], k.shape[2], v.shape[3]
    g = h // h_k
    wide = torch.promote_types(q.dtype, torch.float32)
    qg = q.view(b, sq, h_k, g, d) if q.is_contiguous() else q.reshape(b, sq, h_k, g, d)
    qg = qg.permute(0, 2, 3, 1, 4).to(wide)  # [b, h_k, g, sq, d]
    kg = k.permute(0, 2, 1, 3).unsqueeze(2).to(wide)  # [b, h_k, 1, sk, d]
    vg = v.permute(0, 2, 1, 3).unsqueeze(2).to(wide)
    scores = torch.matmul(qg, kg.transpose(-1, -2))
    scores = scores * (softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(d))
    if causal:
        visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        dead = ~visible.any(dim=-1, keepdim=True)
        scores = scores.masked_fill(~visible & ~dead, float("-inf"))
        probs = scores.softmax(dim=-1).masked_fill(dead, 0.0)
    else:
        probs = scores.softmax(dim=-1)
    out = torch.matmul(probs, vg)
    return out.permute(0, 3, 1, 2, 4).reshape(b, sq, h, d_v).to(q.dtype)


# --------------------------------------------------------------------------------------------------------
# Small signatures, as in lecture notes
# --------------------------------------------------------------------------------------------------------


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v on any leading dimensions."""
    d = q.shape[-1]
    scores = q @ k.transpose(-2, -1) / math.sqrt(d)
    return torch.softmax(scores, dim=-1) @ v


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Boolean mask, True = attend; hidden scores get finfo.min, so a row with no key is a plain mean."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = F.softmax(scores, dim=-1)
    return torch.matmul(weights, v)


def attention_maybe_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
    """Optional causal mask, aligned top-left: query i sees keys 0..i."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if is_causal:
        mask = torch.tril(torch.ones(q.shape[-2], k.shape[-2], device=q.device)) == 0
        scores = scores.masked_fill(mask, float("-inf"))
    return scores.softmax(dim=-1) @ v


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Always causal self-attention; as many queries as keys."""
    t = q.size(-2)
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    bias = torch.tril(torch.ones(t, t, device=q.device))
    att = att.masked_fill(bias == 0, float("-inf"))
    att = F.softmax(att, dim=-1)
    return att @ v


def attention_3d(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """[N, S, D] tensors, heads already folded into the batch."""
    if scale is None:
        scale = q.size(2) ** -0.5
    weights = torch.bmm(q * scale, k.transpose(1, 2)).softmax(dim=2)
    return torch.bmm(weights, v)


def attention_with_weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the attention weights, for plotting."""
    logits = torch.einsum("...qd,...kd->...qk", query, key) / query.shape[-1] ** 0.5
    weights = F.softmax(logits, dim=-1)
    output = torch.einsum("...qk,...kd->...qd", weights, value)
    return output, weights


HONEST: dict[str, Callable[..., torch.Tensor]] = {
    "sdpa_naive": sdpa_naive,
    "sdpa_einsum": sdpa_einsum,
    "sdpa_online16": sdpa_online16,
    "sdpa_online64": sdpa_online64,
    "sdpa_query_chunks": sdpa_query_chunks,
    "sdpa_exp2": sdpa_exp2,
    "sdpa_split_merge": sdpa_split_merge,
    "sdpa_two_pass": sdpa_two_pass,
    "sdpa_head_loop": sdpa_head_loop,
    "sdpa_reverse": sdpa_reverse,
    "sdpa_p_cast": sdpa_p_cast,
    "sdpa_eager_dtype": sdpa_eager_dtype,
    "sdpa_upcast": sdpa_upcast,
    "sdpa_k_smooth": sdpa_k_smooth,
    "sdpa_log_softmax": sdpa_log_softmax,
    "sdpa_autograd": sdpa_autograd,
    "sdpa_wrapped": sdpa_wrapped,
    "sdpa_sqrt_scale": sdpa_sqrt_scale,
    "sdpa_baddbmm": sdpa_baddbmm,
    "sdpa_additive_merged": sdpa_additive_merged,
    "sdpa_grouped_5d": sdpa_grouped_5d,
    "flash_naive": flash_naive,
    "flash_einsum": flash_einsum,
    "flash_online16": flash_online16,
    "flash_online64": flash_online64,
    "flash_query_chunks": flash_query_chunks,
    "flash_exp2": flash_exp2,
    "flash_split_lse": flash_split_lse,
    "flash_two_pass": flash_two_pass,
    "flash_head_loop": flash_head_loop,
    "flash_reverse": flash_reverse,
    "flash_p_cast": flash_p_cast,
    "flash_eager_dtype": flash_eager_dtype,
    "flash_upcast": flash_upcast,
    "flash_k_smooth": flash_k_smooth,
    "flash_log_softmax": flash_log_softmax,
    "flash_autograd": flash_autograd,
    "flash_wrapped": flash_wrapped,
    "flash_sqrt_scale": flash_sqrt_scale,
    "flash_baddbmm": flash_baddbmm,
    "flash_additive": flash_additive,
    "flash_grouped_5d": flash_grouped_5d,
}

HONEST_SMALL: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "masked_attention": masked_attention,
    "attention_maybe_causal": attention_maybe_causal,
    "causal_attention": causal_attention,
    "attention_3d": attention_3d,
    "attention_with_weights": attention_with_weights,
}
