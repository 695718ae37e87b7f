"""Attention for decoding, each with one fault."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

_NEG = float("-inf")


def _acc(dtype):
    return torch.promote_types(dtype, torch.float32)


def _softmax(s):
    """softmax over the last axis, zeros where no key is allowed."""
    m = s.amax(-1, keepdim=True)
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    e = torch.exp(s - m)
    d = e.sum(-1, keepdim=True)
    return e / torch.where(d == 0, torch.ones_like(d), d)


def _expand(q, k, v):
    """[B, H, S, D] inputs in the accumulation type, key/value heads repeated."""
    g, r = divmod(q.shape[1], k.shape[1])
    if r:
        raise ValueError("query heads must be a multiple of key/value heads")
    acc = _acc(q.dtype)
    return q.to(acc), k.to(acc).repeat_interleave(g, 1), v.to(acc).repeat_interleave(g, 1)


def _rows_cols(n, m, device):
    return torch.arange(n, device=device)[:, None] + m - n, torch.arange(m, device=device)[None]


# ------------------------------------------------------------------ f(q, k, v, causal), [B, H, S, D]


def top_left_causal(q, k, v, causal=True):
    """Wrong: top-left mask, query i sees keys 0..i although Sk > Sq (causal, Sq < Sk)."""
    qf, kf, vf = _expand(q, k, v)
    s = qf @ kf.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).tril(), _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def one_query_is_causal(q, k, v, causal=True):
    """Wrong: at Sq = 1 is_causal=True goes to SDPA, the one query sees only key 0; right for longer queries."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    if n == 1 or n == m or not causal:
        return F.scaled_dot_product_attention(qf, kf, vf, is_causal=causal).to(q.dtype)
    i, j = _rows_cols(n, m, q.device)
    return F.scaled_dot_product_attention(qf, kf, vf, attn_mask=(j <= i)).to(q.dtype)


def own_key_hidden(q, k, v, causal=True):
    """Wrong: >= for > in the bottom-right mask, a query does not see its own key (causal, Sk > Sq)."""
    qf, kf, vf = _expand(q, k, v)
    s = qf @ kf.mT / math.sqrt(q.shape[-1])
    if causal:
        i, j = _rows_cols(q.shape[2], k.shape[2], q.device)
        s = s.masked_fill((j >= i) & (j > 0), _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def peeks_one_ahead_with_past(q, k, v, causal=True):
    """Wrong: with past keys (Sk > Sq > 1) each query sees one key too far; right at Sq = Sk and at Sq = 1."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    s = qf @ kf.mT / math.sqrt(q.shape[-1])
    if causal:
        off = m - n + (1 if m > n else 0)
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(off + 1), _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def unmasked_when_lengths_differ(q, k, v, causal=True):
    """Wrong: the mask is only made for Sq = Sk; a chunk of several queries with past sees its future."""
    qf, kf, vf = _expand(q, k, v)
    same = q.shape[2] == k.shape[2]
    return F.scaled_dot_product_attention(qf, kf, vf, is_causal=causal and same).to(q.dtype)


def decode_drops_last_key(q, k, v, causal=True):
    """Wrong: at Sq = 1 (causal) the newest key is left out, range(Sk - 1)."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    if n == 1 and m > 1 and causal:
        w = (qf @ kf[:, :, : m - 1].mT * q.shape[-1] ** -0.5).softmax(-1)
        return (w @ vf[:, :, : m - 1]).to(q.dtype)
    s = qf @ kf.mT * q.shape[-1] ** -0.5
    if causal:
        i, j = _rows_cols(n, m, q.device)
        s = s.masked_fill(j > i, _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def decode_unscaled(q, k, v, causal=True, scale=None):
    """Wrong: the Sq = 1 fast path leaves out the scale."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    if n == 1:
        w = torch.softmax((qf * kf).sum(-1), -1)
        return torch.einsum("bhm,bhmd->bhd", w, vf).unsqueeze(2).to(q.dtype)
    s = qf @ kf.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        i, j = _rows_cols(n, m, q.device)
        s = s.masked_fill(j > i, _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def decode_ignores_given_scale(q, k, v, causal=True, scale=None):
    """Wrong: at Sq = 1 a given scale is ignored for 1/sqrt(D)."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    d = q.shape[-1] ** -0.5
    s = qf @ kf.mT * (d if scale is None or n == 1 else scale)
    if causal:
        i, j = _rows_cols(n, m, q.device)
        s = s.masked_fill(j > i, _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def decode_group_order(q, k, v, causal=True):
    """Wrong: at Sq = 1 query head h uses key head h % Hk in place of h // group (grouped heads, Hk > 1)."""
    n, m, Hk = q.shape[2], k.shape[2], k.shape[1]
    if n == 1:
        acc = _acc(q.dtype)
        qg = q.to(acc)[:, :, 0].unflatten(1, (q.shape[1] // Hk, Hk))
        w = (torch.einsum("bghd,bhmd->bghm", qg, k.to(acc)) * q.shape[-1] ** -0.5).softmax(-1)
        return torch.einsum("bghm,bhmd->bghd", w, v.to(acc)).flatten(1, 2).unsqueeze(2).to(q.dtype)
    qf, kf, vf = _expand(q, k, v)
    s = qf @ kf.mT * q.shape[-1] ** -0.5
    if causal:
        i, j = _rows_cols(n, m, q.device)
        s = s.masked_fill(j > i, _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def decode_window_too_wide(q, k, v, causal=True, window=8):
    """Wrong: at Sq = 1 the window slice keeps window + 1 keys; the mask for longer queries keeps window."""
    if not causal:
        raise NotImplementedError("window attention is causal")
    n, m = q.shape[2], k.shape[2]
    if n == 1:
        k, v = k[:, :, max(0, m - 1 - window) :], v[:, :, max(0, m - 1 - window) :]
        qf, kf, vf = _expand(q, k, v)
        return ((qf @ kf.mT * q.shape[-1] ** -0.5).softmax(-1) @ vf).to(q.dtype)
    qf, kf, vf = _expand(q, k, v)
    i, j = _rows_cols(n, m, q.device)
    s = (qf @ kf.mT * q.shape[-1] ** -0.5).masked_fill((j > i) | (j <= i - window), _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def window_without_offset(q, k, v, causal=True, window=8):
    """Wrong: the window's lower edge is counted from the row number without Sk - Sq, so past keys never fall out."""
    if not causal:
        raise NotImplementedError("window attention is causal")
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    i, j = _rows_cols(n, m, q.device)
    low = torch.arange(n, device=q.device)[:, None] - window
    s = (qf @ kf.mT * q.shape[-1] ** -0.5).masked_fill((j > i) | (j <= low), _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def _splits(q, k, v, causal, num_splits, keep_tail=True):
    """per-split outputs and log-sum-exps along the keys."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    per = max(1, -(-m // num_splits) if keep_tail else m // num_splits)
    ends = range(0, m, per) if keep_tail else range(0, per * min(num_splits, m), per)
    outs, lses = [], []
    i, j = _rows_cols(n, m, q.device)
    for a in ends:
        s = qf @ kf[:, :, a : a + per].mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(j[:, a : a + per] > i, _NEG)
        outs.append(_softmax(s) @ vf[:, :, a : a + per])
        lses.append(torch.logsumexp(s, -1, keepdim=True))
    return torch.stack(outs), torch.stack(lses)


def split_plain_mean(q, k, v, causal=True, num_splits=4):
    """Wrong: the splits' outputs are averaged without their log-sum-exp weights."""
    o, lse = _splits(q, k, v, causal, num_splits)
    ok = torch.isfinite(lse).to(o.dtype)
    return ((o * ok).sum(0) / ok.sum(0).clamp_min(1)).to(q.dtype)


def split_base_two_merge(q, k, v, causal=True, num_splits=4):
    """Wrong: natural log-sum-exps are merged with exp2."""
    o, lse = _splits(q, k, v, causal, num_splits)
    m = lse.amax(0)
    w = torch.exp2(lse - torch.where(torch.isinf(m), torch.zeros_like(m), m))
    return ((o * w).sum(0) / w.sum(0).clamp_min(1e-30)).to(q.dtype)


def split_loses_remainder(q, k, v, causal=True, num_splits=4):
    """Wrong: Sk // num_splits keys for each split, the remainder's (newest) keys are never read (Sk % 4 != 0)."""
    o, lse = _splits(q, k, v, causal, num_splits, keep_tail=False)
    m = lse.amax(0)
    w = torch.exp(lse - torch.where(torch.isinf(m), torch.zeros_like(m), m))
    return ((o * w).sum(0) / w.sum(0).clamp_min(1e-30)).to(q.dtype)


def online_without_rescale(q, k, v, causal=True, block=16):
    """Wrong: the output accumulator is not rescaled at a new maximum (the sum is), Sk > 16."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    i, j = _rows_cols(n, m, q.device)
    mx = qf.new_full((*qf.shape[:3], 1), _NEG)
    den, out = torch.zeros_like(mx), qf.new_zeros(*qf.shape[:3], vf.shape[-1])
    for a in range(0, m, block):
        s = qf @ kf[:, :, a : a + block].mT * q.shape[-1] ** -0.5
        if causal:
            s = s.masked_fill(j[:, a : a + block] > i, _NEG)
        new = torch.maximum(mx, s.amax(-1, keepdim=True))
        safe = torch.where(torch.isinf(new), torch.zeros_like(new), new)
        e = torch.exp(s - safe)
        den = den * torch.exp(mx - safe) + e.sum(-1, keepdim=True)
        out = out + e @ vf[:, :, a : a + block]
        mx = new
    return (out / torch.where(den == 0, torch.ones_like(den), den)).to(q.dtype)


def chunk_blind_inside(q, k, v, causal=True, chunk=8):
    """Wrong: chunked prefill lets each query see all keys to the end of its chunk (Sq > 1); right at Sq = 1."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    if not causal:
        return F.scaled_dot_product_attention(qf, kf, vf).to(q.dtype)
    outs = []
    for a in range(0, n, chunk):
        b = min(n, a + chunk)
        end = max(0, m - n + b)
        outs.append(
            _softmax(qf[:, :, a:b] @ kf[:, :, :end].mT * q.shape[-1] ** -0.5) @ vf[:, :, :end]
            if end
            else torch.zeros_like(vf[:, :, :1]).expand(-1, -1, b - a, -1)
        )
    return torch.cat(outs, 2).to(q.dtype)


def alibi_no_past_offset(q, k, v, slopes, causal=True):
    """Wrong: ALiBi distance |i - j| with i from 0, the past length is left out (Sk > Sq)."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    i, j = _rows_cols(n, m, q.device)
    dist = (torch.arange(n, device=q.device)[:, None] - j).abs()
    s = qf @ kf.mT * q.shape[-1] ** -0.5 - slopes.to(qf.dtype).view(-1, 1, 1) * dist
    if causal:
        s = s.masked_fill(j > i, _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def alibi_missing_at_decode(q, k, v, slopes, causal=True):
    """Wrong: no ALiBi bias at Sq = 1."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    i, j = _rows_cols(n, m, q.device)
    s = qf @ kf.mT * q.shape[-1] ** -0.5
    if n > 1:
        s = s - slopes.to(qf.dtype).view(-1, 1, 1) * (i - j).abs()
    if causal:
        s = s.masked_fill(j > i, _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


def alibi_sign_of_cached(q, k, v, slopes, causal=True):
    """Wrong: with past keys the bias is +slope * distance (far keys favoured); right at Sq = Sk."""
    qf, kf, vf = _expand(q, k, v)
    n, m = q.shape[2], k.shape[2]
    i, j = _rows_cols(n, m, q.device)
    dist = (i - j).abs() if n == m else -(i - j).abs()
    s = qf @ kf.mT * q.shape[-1] ** -0.5 - slopes.to(qf.dtype).view(-1, 1, 1) * dist
    if causal:
        s = s.masked_fill(j > i, _NEG)
    return (_softmax(s) @ vf).to(q.dtype)


# ------------------------------------------------------------------ caches in the signature, [B, S, H, D]


def _lens(cache_seqlens, B, full):
    if cache_seqlens is None:
        return [full] * B
    return [cache_seqlens] * B if isinstance(cache_seqlens, int) else [int(t) for t in cache_seqlens]


def _attend(qb, keys, vals, causal, scale, align=None, window=None):
    """one batch entry: qb [n, H, D], keys/vals [L, Hk, D]; the last query stands at align - 1."""
    n, H, D = qb.shape
    L = keys.shape[0]
    align = L if align is None else align
    if L == 0:
        return torch.zeros(n, H, vals.shape[-1], dtype=qb.dtype)
    acc = _acc(qb.dtype)
    g = H // keys.shape[1]
    keys, vals = keys.to(acc).repeat_interleave(g, 1), vals.to(acc).repeat_interleave(g, 1)
    s = torch.einsum("nhd,mhd->hnm", qb.to(acc), keys) * (D**-0.5 if scale is None else scale)
    i = torch.arange(n)[:, None] + align - n
    j = torch.arange(L)[None]
    if causal:
        s = s.masked_fill(j > i, _NEG)
    if window is not None:
        s = s.masked_fill(j < i - window, _NEG)
    return torch.einsum("hnm,mhd->nhd", _softmax(s), vals).to(qb.dtype)


def _append(k_cache, v_cache, k, v, b, at):
    k_cache[b, at : at + k.shape[1]] = k[b].to(k_cache.dtype)
    v_cache[b, at : at + v.shape[1]] = v[b].to(v_cache.dtype)


def kvcache_length_not_advanced(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None
):
    """Wrong: the new keys are written but only the first cache_seqlens are read (k given)."""
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        if k is not None:
            _append(k_cache, v_cache, k, v, b, L)
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale)
    return out


def kvcache_appends_one_late(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None):
    """Wrong: new keys go to cache_seqlens + 1, leaving a stale slot and losing the newest key from the read range."""
    C = k_cache.shape[1]
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], C)):
        if k is not None:
            at = min(L + 1, C - k.shape[1])
            _append(k_cache, v_cache, k, v, b, at)
            L += k.shape[1]
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale)
    return out


def kvcache_overwrites_last(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None):
    """Wrong: new keys start at cache_seqlens - 1 and overwrite the last cached key (cache_seqlens > 0)."""
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        if k is not None:
            at = max(L - 1, 0)
            _append(k_cache, v_cache, k, v, b, at)
            L = at + k.shape[1]
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale)
    return out


def kvcache_longest_for_all(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None):
    """Wrong: every batch entry reads up to the longest entry's length (unequal cache_seqlens)."""
    lens = _lens(cache_seqlens, q.shape[0], k_cache.shape[1])
    new = 0 if k is None else k.shape[1]
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(lens):
        if new:
            _append(k_cache, v_cache, k, v, b, L)
    top = max(lens) + new
    for b in range(q.shape[0]):
        out[b] = _attend(q[b], k_cache[b, :top], v_cache[b, :top], causal, softmax_scale)
    return out


def kvcache_first_length_for_all(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None
):
    """Wrong: cache_seqlens[0] is used for every batch entry (unequal cache_seqlens)."""
    lens = _lens(cache_seqlens, q.shape[0], k_cache.shape[1])
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        L = lens[0]
        if k is not None:
            _append(k_cache, v_cache, k, v, b, L)
            L += k.shape[1]
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale)
    return out


def kvcache_causal_from_capacity(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None
):
    """Wrong: the causal edge is aligned with the cache's capacity, not its length: Sq > 1 sees ahead."""
    C = k_cache.shape[1]
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], C)):
        if k is not None:
            _append(k_cache, v_cache, k, v, b, L)
            L += k.shape[1]
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale, align=C)
    return out


def kvcache_causal_before_append(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None
):
    """Wrong: the causal edge is aligned with the length before the append, a query misses its own keys (causal)."""
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        old = L
        if k is not None:
            _append(k_cache, v_cache, k, v, b, L)
            L += k.shape[1]
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale, align=old)
    return out


def kvcache_values_stale(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None):
    """Wrong: only the first new value is written when several are appended (k has more than one token)."""
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        if k is not None:
            k_cache[b, L : L + k.shape[1]] = k[b].to(k_cache.dtype)
            v_cache[b, L] = v[b, 0].to(v_cache.dtype)
            L += k.shape[1]
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale)
    return out


def kvcache_not_in_place(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None):
    """Wrong: the append works on copies; this output is right, the caller's caches stay old for the next step."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        if k is not None:
            _append(k_cache, v_cache, k, v, b, L)
            L += k.shape[1]
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal, softmax_scale)
    return out


def kvcache_append_after(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None):
    """Wrong: the write comes after the read, the new range is read with what the cache held before."""
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        n = 0 if k is None else k.shape[1]
        out[b] = _attend(q[b], k_cache[b, : L + n], v_cache[b, : L + n], causal, softmax_scale)
        if n:
            _append(k_cache, v_cache, k, v, b, L)
    return out


def kvcache_reads_unused_slots(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None
):
    """Wrong: without causal the whole cache is read, unused slots too (causal=False, cache_seqlens < capacity)."""
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        if k is not None:
            _append(k_cache, v_cache, k, v, b, L)
            L += k.shape[1]
        end = L if causal else k_cache.shape[1]
        out[b] = _attend(q[b], k_cache[b, :end], v_cache[b, :end], causal, softmax_scale)
    return out


def kvcache_window_one_short(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, softmax_scale=None, window_size=(-1, -1)
):
    """Wrong: the left window edge is off by one, left keys with the query's own in place of left + 1 (window given)."""
    if window_size[1] > 0 or (window_size[0] >= 0 and not causal):
        raise NotImplementedError("only causal windows")
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        if k is not None:
            _append(k_cache, v_cache, k, v, b, L)
            L += k.shape[1]
        w = None if window_size[0] < 0 else max(window_size[0] - 1, 0)
        out[b] = _attend(q[b], k_cache[b, :L], v_cache[b, :L], causal or window_size[1] == 0, softmax_scale, window=w)
    return out


def _rot(x, pos, cos, sin):
    """interleaved rotary of x [n, H, D] at positions pos."""
    c, s = cos[pos][:, None].to(x.dtype), sin[pos][:, None].to(x.dtype)
    r = 2 * c.shape[-1]
    a, b = x[..., 0:r:2], x[..., 1:r:2]
    return torch.cat((torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2), x[..., r:]), -1)


def _rotary_kvcache(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens, softmax_scale, qpos, kpos):
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    n, t = q.shape[1], k.shape[1]
    for b, L in enumerate(_lens(cache_seqlens, q.shape[0], k_cache.shape[1])):
        qb = _rot(q[b], qpos(L, n), cos, sin)
        k_cache[b, L : L + t] = _rot(k[b], kpos(L, t), cos, sin).to(k_cache.dtype)
        v_cache[b, L : L + t] = v[b].to(v_cache.dtype)
        out[b] = _attend(qb, k_cache[b, : L + t], v_cache[b, : L + t], True, softmax_scale)
    return out


def kvcache_rotary_keys_from_zero(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, softmax_scale=None):
    """Wrong: appended keys are rotated at 0, 1, ... and not at cache_seqlens + t (causal, interleaved rotary)."""
    return _rotary_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        softmax_scale,
        lambda L, n: torch.arange(L, L + n),
        lambda L, t: torch.arange(t),
    )


def kvcache_rotary_query_constant(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, softmax_scale=None):
    """Wrong: all queries of a causal chunk are rotated at cache_seqlens (Sq > 1, interleaved rotary)."""
    return _rotary_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        softmax_scale,
        lambda L, n: torch.full((n,), L),
        lambda L, t: torch.arange(L, L + t),
    )


def kvcache_rotary_query_late(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, softmax_scale=None):
    """Wrong: queries are rotated one position late, at cache_seqlens + i + 1 (causal, interleaved rotary)."""
    return _rotary_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        softmax_scale,
        lambda L, n: (torch.arange(L, L + n) + 1).clamp_max(rotary_cos.shape[0] - 1),
        lambda L, t: torch.arange(L, L + t),
    )


def _paged(q, k_cache, v_cache, k, v, lens, block_table, causal, scale, write, read):
    """paged attention; write/read map (table row, position array, block size) to (block, slot)."""
    bs = k_cache.shape[1]
    out = torch.empty(*q.shape[:3], v_cache.shape[-1], dtype=q.dtype)
    for b, L in enumerate(lens):
        if k is not None:
            pos = torch.arange(L, L + k.shape[1])
            blk, slot = write(b, pos, bs)
            k_cache[blk, slot] = k[b].to(k_cache.dtype)
            v_cache[blk, slot] = v[b].to(v_cache.dtype)
            L += k.shape[1]
        blk, slot = read(b, torch.arange(L), bs)
        out[b] = _attend(q[b], k_cache[blk, slot], v_cache[blk, slot], causal, scale, align=L)
    return out


def paged_contiguous_assumed(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, causal=False, softmax_scale=None
):
    """Wrong: reads follow the first block's number upwards, as if the blocks lay in order (scattered block_table)."""
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table and cache_seqlens are needed")
    t = block_table.long()
    last = k_cache.shape[0] - 1
    return _paged(
        q,
        k_cache,
        v_cache,
        k,
        v,
        _lens(cache_seqlens, q.shape[0], 0),
        t,
        causal,
        softmax_scale,
        lambda b, p, s: (t[b, p // s], p % s),
        lambda b, p, s: ((t[b, 0] + p // s).clamp_max(last), p % s),
    )


def paged_partial_block_lost(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, causal=False, softmax_scale=None
):
    """Wrong: with more than one block only whole blocks are read, the last ragged block is lost."""
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table and cache_seqlens are needed")
    t = block_table.long()

    def read(b, p, s):
        p = p[: len(p) // s * s] if len(p) > s else p
        return t[b, p // s], p % s

    return _paged(
        q,
        k_cache,
        v_cache,
        k,
        v,
        _lens(cache_seqlens, q.shape[0], 0),
        t,
        causal,
        softmax_scale,
        lambda b, p, s: (t[b, p // s], p % s),
        read,
    )


def paged_boundary_write(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, causal=False, softmax_scale=None
):
    """Wrong: the block of a new token is (position - 1) // size: a token that opens a block lands in the one before."""
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table and cache_seqlens are needed")
    t = block_table.long()
    return _paged(
        q,
        k_cache,
        v_cache,
        k,
        v,
        _lens(cache_seqlens, q.shape[0], 0),
        t,
        causal,
        softmax_scale,
        lambda b, p, s: (t[b, (p - 1).clamp_min(0) // s], p % s),
        lambda b, p, s: (t[b, p // s], p % s),
    )


def paged_first_table_for_all(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, causal=False, softmax_scale=None
):
    """Wrong: every batch entry reads through block_table[0] (batch > 1)."""
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table and cache_seqlens are needed")
    t = block_table.long()
    return _paged(
        q,
        k_cache,
        v_cache,
        k,
        v,
        _lens(cache_seqlens, q.shape[0], 0),
        t,
        causal,
        softmax_scale,
        lambda b, p, s: (t[b, p // s], p % s),
        lambda b, p, s: (t[0, p // s], p % s),
    )


# ------------------------------------------------------------------ modules


def _rope(x, pos, base=1e4):
    """rotate-half rotary embedding of x [B, H, S, D] at pos [B or 1, S]."""
    d = x.shape[-1]
    f = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d)
    ang = (pos.double()[..., None] * f)[:, None]
    c, s = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


class _QKV(nn.Module):
    """projections with grouped heads and a bottom-right causal core."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None):
        super().__init__()
        self.h, self.hk = num_heads, num_kv_heads or num_heads
        if self.h % self.hk:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        self.g, self.d = self.h // self.hk, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.hk * self.d, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.hk * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, hidden_size, bias=False)

    def project(self, x):
        b, n, _ = x.shape
        return (
            self.q_proj(x).view(b, n, self.h, self.d).transpose(1, 2),
            self.k_proj(x).view(b, n, self.hk, self.d).transpose(1, 2),
            self.v_proj(x).view(b, n, self.hk, self.d).transpose(1, 2),
        )

    def core(self, q, k, v, bad=None, bias=None):
        n, m = q.shape[2], k.shape[2]
        k, v = k.repeat_interleave(self.g, 1), v.repeat_interleave(self.g, 1)
        if bad is None:
            bad = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1)
        s = q @ k.mT * self.d**-0.5
        if bias is not None:
            s = s + bias
        y = _softmax(s.masked_fill(bad, _NEG)) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class TupleAttentionRopeRestarts(_QKV):
    """Wrong: rotary positions start at 0 at every call, the past length is not added (past_key_value given)."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        pos = torch.arange(hidden_states.shape[1])[None]
        q, k = _rope(q, pos), _rope(k, pos)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        return self.core(q, k, v), None, ((k, v) if use_cache else None)


class TupleAttentionRopeOneLate(_QKV):
    """Wrong: with a past the rotary positions start at past + 1."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        past = 0 if past_key_value is None else past_key_value[0].shape[2] + 1
        pos = torch.arange(past, past + hidden_states.shape[1])[None]
        q, k = _rope(q, pos), _rope(k, pos)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        return self.core(q, k, v), None, ((k, v) if use_cache else None)


class TupleAttentionNewFirst(_QKV):
    """Wrong: new keys are put before the past ones, which breaks the causal mask of a several-token step."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        past = 0 if past_key_value is None else past_key_value[0].shape[2]
        pos = torch.arange(past, past + hidden_states.shape[1])[None]
        q, k = _rope(q, pos), _rope(k, pos)
        if past_key_value is not None:
            k, v = torch.cat((k, past_key_value[0]), 2), torch.cat((v, past_key_value[1]), 2)
        return self.core(q, k, v), None, ((k, v) if use_cache else None)


class TupleAttentionDoubleRotation(_QKV):
    """Wrong: rotary goes over the concatenated keys, cached keys are rotated again at each step."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        m, n = k.shape[2], q.shape[2]
        q, k = _rope(q, torch.arange(m - n, m)[None]), _rope(k, torch.arange(m)[None])
        return self.core(q, k, v), None, ((k, v) if use_cache else None)


class TupleAttentionPresentLosesPast(_QKV):
    """Wrong: the returned present holds only the new keys, the third call has lost the first's."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        present = (k, v) if use_cache else None
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        return self.core(q, k, v), None, present


class TupleAttentionTopLeftChunk(_QKV):
    """Wrong: triu(1) mask over [n, past + n], a step after a past sees only the oldest keys."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        bad = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return self.core(q, k, v, bad), None, ((k, v) if use_cache else None)


class TupleAttentionMaskIgnoredAtDecode(_QKV):
    """Wrong: the additive attention_mask [B, 1, n, m] is skipped for a one-token step (left-padded batches)."""

    def forward(self, hidden_states, attention_mask=None, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        bias = attention_mask if attention_mask is not None and q.shape[2] > 1 else None
        return self.core(q, k, v, bias=bias), None, ((k, v) if use_cache else None)


class TupleAttentionTrimmedPositions(_QKV):
    """Wrong: the past is trimmed to the window and positions are taken from the trimmed length (long decodes)."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, sliding_window=8):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.window = sliding_window

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        past = 0 if past_key_value is None else past_key_value[0].shape[2]
        pos = torch.arange(past, past + hidden_states.shape[1])[None]
        q, k = _rope(q, pos), _rope(k, pos)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        n, m = q.shape[2], k.shape[2]
        i, j = _rows_cols(n, m, q.device)
        y = self.core(q, k, v, (j > i) | (j <= i - self.window))
        w = self.window
        return y, None, ((k[:, :, -w:], v[:, :, -w:]) if use_cache else None)


class TupleAttentionSharedBuffer(_QKV):
    """Wrong: presents are views of one inner buffer; two continuations of the same past overwrite each other."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, max_len=256):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.max_len, self.buf = max_len, None

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        if not use_cache and past_key_value is None:
            return self.core(q, k, v), None, None
        past = 0 if past_key_value is None else past_key_value[0].shape[2]
        m = past + k.shape[2]
        if m > self.max_len:
            raise ValueError("longer than max_len")
        if past == 0 or self.buf is None or self.buf.shape[1] != k.shape[0]:
            self.buf = k.new_zeros(2, k.shape[0], self.hk, self.max_len, self.d)
            if past:
                self.buf[:, :, :, :past] = torch.stack(past_key_value).detach()
        self.buf[0, :, :, past:m], self.buf[1, :, :, past:m] = k.detach(), v.detach()
        k, v = self.buf[0, :, :, :m], self.buf[1, :, :, :m]
        return self.core(q, k, v), None, ((k, v) if use_cache else None)


class TupleAttentionRepeatAtDecode(_QKV):
    """Wrong: a one-token step repeats the heads with .repeat (h % Hk) in place of repeat_interleave (grouped heads)."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        present = (k, v) if use_cache else None
        if q.shape[2] == 1:
            kr, vr = k.repeat(1, self.g, 1, 1), v.repeat(1, self.g, 1, 1)
            y = F.scaled_dot_product_attention(q, kr, vr)
            return self.o_proj(y.transpose(1, 2).flatten(2)), None, present
        return self.core(q, k, v), None, present


class TupleAttentionScaledTwiceAtDecode(_QKV):
    """Wrong: a one-token step with past scales the query twice."""

    def forward(self, hidden_states, past_key_value=None, use_cache=False):
        q, k, v = self.project(hidden_states)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
            if q.shape[2] == 1:
                q = q * self.d**-0.5
        return self.core(q, k, v), None, ((k, v) if use_cache else None)


class LayerCache:
    """growing per-layer cache with update(key, value, layer_idx) and get_seq_length(layer_idx)."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        if layer_idx in self.keys:
            key_states = torch.cat((self.keys[layer_idx], key_states), -2)
            value_states = torch.cat((self.values[layer_idx], value_states), -2)
        self.keys[layer_idx], self.values[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return self.keys[layer_idx].shape[-2] if layer_idx in self.keys else 0


class CacheAttentionLayerZero(_QKV):
    """Wrong: update is called with layer 0 whatever layer_idx is, layers that share a cache mix (two layers)."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, layer_idx=0):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.layer_idx = layer_idx

    def forward(self, hidden_states, past_key_values=None):
        q, k, v = self.project(hidden_states)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, 0)
        return self.core(q, k, v)


class CacheAttentionLengthOfLayerZero(_QKV):
    """Wrong: the rotary offset is get_seq_length() of layer 0, which has the new tokens already when layer 1 runs."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, layer_idx=0):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.layer_idx = layer_idx

    def forward(self, hidden_states, past_key_values=None):
        q, k, v = self.project(hidden_states)
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        pos = torch.arange(past, past + q.shape[2])[None]
        q, k = _rope(q, pos), _rope(k, pos)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        return self.core(q, k, v)


class CacheAttentionUnrotatedCached(_QKV):
    """Wrong: the cache gets the keys before rotary, later steps see the old keys unrotated."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, layer_idx=0):
        super().__init__(hidden_size, num_heads, num_kv_heads)
        self.layer_idx = layer_idx

    def forward(self, hidden_states, past_key_values=None):
        q, k, v = self.project(hidden_states)
        n = q.shape[2]
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        m = k.shape[2]
        pos = torch.arange(m - n, m)[None]
        q = _rope(q, pos)
        k = torch.cat((k[:, :, : m - n], _rope(k[:, :, m - n :], pos)), 2)
        return self.core(q, k, v)


class _Buffers(_QKV):
    """preallocated caches [max_batch, Hk, max_len, D]."""

    def __init__(self, dim, n_heads, n_kv_heads=None, max_batch_size=4, max_seq_len=64, dtype=None):
        super().__init__(dim, n_heads, n_kv_heads)
        z = torch.zeros(max_batch_size, self.hk, max_seq_len, self.d, dtype=dtype)
        self.register_buffer("cache_k", z.clone(), persistent=False)
        self.register_buffer("cache_v", z.clone(), persistent=False)

    def write(self, k, v, at):
        b, n = k.shape[0], k.shape[2]
        if at + n > self.cache_k.shape[2] or b > self.cache_k.shape[0]:
            raise ValueError("does not fit the cache")
        self.cache_k[:b, :, at : at + n] = k.detach().to(self.cache_k.dtype)
        self.cache_v[:b, :, at : at + n] = v.detach().to(self.cache_v.dtype)


class StartPosReadsWholeCache(_Buffers):
    """Wrong: a one-token step attends to the whole buffer, zero or stale slots too."""

    def forward(self, x, start_pos=0):
        q, k, v = self.project(x)
        n = x.shape[1]
        pos = torch.arange(start_pos, start_pos + n)[None]
        q, k = _rope(q, pos), _rope(k, pos)
        self.write(k, v, start_pos)
        if n == 1:
            k, v = (c[: x.shape[0]].to(x.dtype) for c in (self.cache_k, self.cache_v))
            return self.core(q, k, v)
        k, v = (c[: x.shape[0], :, : start_pos + n].to(x.dtype) for c in (self.cache_k, self.cache_v))
        return self.core(q, k, v)


class StartPosFirstRowCache(_Buffers):
    """Wrong: at start_pos > 0 all batch entries read the cache of entry 0 (batch > 1)."""

    def forward(self, x, start_pos=0):
        q, k, v = self.project(x)
        b, n, _ = x.shape
        pos = torch.arange(start_pos, start_pos + n)[None]
        q, k = _rope(q, pos), _rope(k, pos)
        self.write(k, v, start_pos)
        rows = slice(0, b) if start_pos == 0 else torch.zeros(b, dtype=torch.long)
        k, v = (c[rows, :, : start_pos + n].to(x.dtype) for c in (self.cache_k, self.cache_v))
        return self.core(q, k, v)


class StartPosRopeFromZero(_Buffers):
    """Wrong: rotary tables are sliced [:n] in place of [start_pos:start_pos + n]."""

    def forward(self, x, start_pos=0):
        q, k, v = self.project(x)
        n = x.shape[1]
        pos = torch.arange(n)[None]
        q, k = _rope(q, pos), _rope(k, pos)
        self.write(k, v, start_pos)
        k, v = (c[: x.shape[0], :, : start_pos + n].to(x.dtype) for c in (self.cache_k, self.cache_v))
        return self.core(q, k, v)


class StartPosLowPrecisionCache(_Buffers):
    """Wrong: the cache is bfloat16 whatever the model's type, float32 decoding is off by about 1e-3."""

    def __init__(self, dim, n_heads, n_kv_heads=None, max_batch_size=4, max_seq_len=64):
        super().__init__(dim, n_heads, n_kv_heads, max_batch_size, max_seq_len, dtype=torch.bfloat16)

    def forward(self, x, start_pos=0):
        q, k, v = self.project(x)
        self.write(k, v, start_pos)
        k = torch.cat((self.cache_k[: x.shape[0], :, :start_pos].to(x.dtype), k), 2)
        v = torch.cat((self.cache_v[: x.shape[0], :, :start_pos].to(x.dtype), v), 2)
        return self.core(q, k, v)


class StartPosUnmaskedChunk(_Buffers):
    """Wrong: the mask is only made at start_pos = 0, a several-token step later sees its own future."""

    def forward(self, x, start_pos=0):
        q, k, v = self.project(x)
        n = x.shape[1]
        self.write(k, v, start_pos)
        m = start_pos + n
        k, v = (c[: x.shape[0], :, :m].to(x.dtype) for c in (self.cache_k, self.cache_v))
        bad = torch.zeros(n, m, dtype=torch.bool)
        if start_pos == 0:
            bad = torch.ones(n, m, dtype=torch.bool).triu(1)
        return self.core(q, k, v, bad)


class ResetKeepsPointer(_Buffers):
    """Wrong: reset_cache zeroes the buffers but not the pointer, the next sequence attends to zero keys."""

    def __init__(self, dim, n_heads, n_kv_heads=None, max_batch_size=4, max_seq_len=128):
        super().__init__(dim, n_heads, n_kv_heads, max_batch_size, max_seq_len)
        self.ptr = 0

    def reset_cache(self):
        self.cache_k.zero_()
        self.cache_v.zero_()

    def forward(self, x, use_cache=False):
        q, k, v = self.project(x)
        if use_cache:
            self.write(k, v, self.ptr)
            self.ptr += x.shape[1]
            k, v = (c[: x.shape[0], :, : self.ptr].to(x.dtype) for c in (self.cache_k, self.cache_v))
        return self.core(q, k, v)


class UncachedCallReadsCache(_QKV):
    """Wrong: a call with use_cache=False still attends to what the cache holds."""

    def __init__(self, dim, n_heads, n_kv_heads=None):
        super().__init__(dim, n_heads, n_kv_heads)
        self.cache = None

    def reset_cache(self):
        self.cache = None

    def forward(self, x, use_cache=False):
        q, k, v = self.project(x)
        if self.cache is not None:
            k, v = torch.cat((self.cache[0], k), 2), torch.cat((self.cache[1], v), 2)
        if use_cache:
            self.cache = (k, v)
        return self.core(q, k, v)


class CacheKeepsOnlyPrompt(_QKV):
    """Wrong: the cache is filled at the first call and never grows, later tokens are forgotten."""

    def __init__(self, dim, n_heads, n_kv_heads=None):
        super().__init__(dim, n_heads, n_kv_heads)
        self.cache = None

    def reset_cache(self):
        self.cache = None

    def forward(self, x, use_cache=False):
        q, k, v = self.project(x)
        if use_cache:
            if self.cache is None:
                self.cache = (k, v)
            else:
                k, v = torch.cat((self.cache[0], k), 2), torch.cat((self.cache[1], v), 2)
        return self.core(q, k, v)


class _Rolling(_QKV):
    """rolling window buffer; subclasses change slots(), kept(), low() or key positions."""

    def __init__(self, dim, n_heads, n_kv_heads=None, window=8, max_batch_size=4):
        super().__init__(dim, n_heads, n_kv_heads)
        self.window = window
        z = torch.zeros(max_batch_size, self.hk, window, self.d)
        self.register_buffer("ring_k", z.clone(), persistent=False)
        self.register_buffer("ring_v", z.clone(), persistent=False)
        self.seen = 0

    def reset_cache(self):
        self.seen = 0

    def low(self, pos):
        return pos - self.window

    def kept(self, n):
        return slice(max(0, n - self.window), n)

    def rope_pos(self, pos):
        return pos

    def slot(self, pos):
        return pos % self.window

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.project(x)
        pos = torch.arange(self.seen, self.seen + n)
        q, k = _rope(q, pos[None]), _rope(k, self.rope_pos(pos)[None])
        old = torch.arange(max(0, self.seen - self.window), self.seen)
        keys = torch.cat((self.ring_k[:b][:, :, old % self.window].to(k.dtype), k), 2)
        vals = torch.cat((self.ring_v[:b][:, :, old % self.window].to(v.dtype), v), 2)
        kpos = torch.cat((old, pos))
        bad = (kpos[None] > pos[:, None]) | (kpos[None] <= self.low(pos)[:, None])
        y = self.core(q, keys, vals, bad)
        s = self.kept(n)
        self.ring_k[:b, :, self.slot(pos[-min(n, self.window) :])] = k[:, :, s].detach().to(self.ring_k.dtype)
        self.ring_v[:b, :, self.slot(pos[-min(n, self.window) :])] = v[:, :, s].detach().to(self.ring_v.dtype)
        self.seen += n
        return y


class RollingOneTooMany(_Rolling):
    """Wrong: with a filled ring a step sees window old keys and its own, window + 1 in all."""

    def low(self, pos):
        return pos - self.window - (1 if self.seen else 0)


class RollingKeepsFirstKeys(_Rolling):
    """Wrong: a prompt longer than the window stores its first window keys, not its last."""

    def kept(self, n):
        return slice(0, min(n, self.window))


class RollingRopeAtSlot(_Rolling):
    """Wrong: once the ring holds something new keys are rotated at their slot, not their position."""

    def rope_pos(self, pos):
        return pos % self.window if self.seen else pos


class RollingWrongSlot(_Rolling):
    """Wrong: writes go to slot (position + 1) % window while reads take position % window."""

    def slot(self, pos):
        return (pos + 1) % self.window


class AlibiPastDistance(nn.Module):
    """Wrong: with layer_past the ALiBi distance is |i - j| with i counted within the new tokens."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.nh, self.hd = num_heads, hidden_size // num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.register_buffer("slopes", 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads), persistent=False)

    def forward(self, hidden_states, layer_past=None, use_cache=False):
        b, n, c = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(b, n, 3, self.nh, self.hd).permute(2, 0, 3, 1, 4)
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), 2), torch.cat((layer_past[1], v), 2)
        m = k.shape[2]
        j = torch.arange(m)[None]
        i = torch.arange(n)[:, None]
        s = q @ k.mT * self.hd**-0.5 - self.slopes.to(q.dtype).view(-1, 1, 1) * (i - j).abs()
        w = s.masked_fill(j > i + m - n, _NEG).softmax(-1)
        return self.dense((w @ v).transpose(1, 2).reshape(b, n, c)), ((k, v) if use_cache else None)


class PartialRotaryWholeHeadAtDecode(nn.Module):
    """Wrong: a step with layer_past rotates all channels, the prompt only the first rotary_pct of them."""

    def __init__(self, hidden_size, num_heads, rotary_pct=0.5):
        super().__init__()
        self.nh, self.hd = num_heads, hidden_size // num_heads
        self.rd = int(self.hd * rotary_pct) // 2 * 2
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, layer_past=None, use_cache=False):
        b, n, c = hidden_states.shape
        q, k, v = self.query_key_value(hidden_states).view(b, n, self.nh, 3 * self.hd).transpose(1, 2).chunk(3, -1)
        off = 0 if layer_past is None else layer_past[0].shape[2]
        r = self.rd if layer_past is None else self.hd
        pos = torch.arange(off, off + n)[None]
        q, k = (torch.cat((_rope(t[..., :r], pos), t[..., r:]), -1) for t in (q, k))
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), 2), torch.cat((layer_past[1], v), 2)
        m = off + n
        s = (q @ k.mT / math.sqrt(self.hd)).masked_fill(torch.ones(n, m, dtype=torch.bool).triu(off + 1), _NEG)
        return self.dense((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)), ((k, v) if use_cache else None)


class CrossAttentionCausalAtDecode(nn.Module):
    """Wrong: with cached encoder keys SDPA gets is_causal=True, a step sees only the first encoder positions."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.h, self.d = num_heads, hidden_size // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def _heads(self, t):
        return t.unflatten(-1, (self.h, self.d)).transpose(1, 2)

    def forward(self, hidden_states, encoder_hidden_states=None, past_key_value=None, use_cache=False):
        cached = past_key_value is not None
        k, v = (
            past_key_value
            if cached
            else (self._heads(self.k(encoder_hidden_states)), self._heads(self.v(encoder_hidden_states)))
        )
        y = F.scaled_dot_product_attention(self._heads(self.q(hidden_states)), k, v, is_causal=cached)
        return self.o(y.transpose(1, 2).flatten(2)), ((k, v) if use_cache else None)


class CrossAttentionStaleEncoder(nn.Module):
    """Wrong: the encoder keys of the first call are kept for ever, a second source is ignored."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.h, self.d, self.kv = num_heads, hidden_size // num_heads, None
        self.q, self.k, self.v, self.o = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def _heads(self, t):
        return t.unflatten(-1, (self.h, self.d)).transpose(1, 2)

    def forward(self, hidden_states, encoder_hidden_states):
        if self.kv is None or self.kv[0].shape[0] != hidden_states.shape[0]:
            self.kv = (self._heads(self.k(encoder_hidden_states)), self._heads(self.v(encoder_hidden_states)))
        y = F.scaled_dot_product_attention(self._heads(self.q(hidden_states)), *self.kv)
        return self.o(y.transpose(1, 2).flatten(2))


class SlotsMaskedByLongest(_Buffers):
    """Wrong: per-row positions input_pos [B, S], but the mask takes the batch's largest (ragged batches)."""

    @torch.no_grad()
    def forward(self, x, input_pos):
        b, n, _ = x.shape
        input_pos = input_pos.expand(b, n)
        q, k, v = self.project(x)
        q, k = _rope(q, input_pos), _rope(k, input_pos)
        rows = torch.arange(b)[:, None]
        self.cache_k[rows, :, input_pos] = k.transpose(1, 2).to(self.cache_k.dtype)
        self.cache_v[rows, :, input_pos] = v.transpose(1, 2).to(self.cache_v.dtype)
        end = int(input_pos.max()) + 1
        keys, vals = (c[:b, :, :end].to(x.dtype) for c in (self.cache_k, self.cache_v))
        return self.core(q, keys, vals, torch.arange(end) > input_pos.amax(0)[:, None])


MUTANTS = {
    f.__name__: f
    for f in (
        top_left_causal,
        one_query_is_causal,
        own_key_hidden,
        peeks_one_ahead_with_past,
        unmasked_when_lengths_differ,
        decode_drops_last_key,
        decode_unscaled,
        decode_ignores_given_scale,
        decode_group_order,
        decode_window_too_wide,
        window_without_offset,
        split_plain_mean,
        split_base_two_merge,
        split_loses_remainder,
        online_without_rescale,
        chunk_blind_inside,
        alibi_no_past_offset,
        alibi_missing_at_decode,
        alibi_sign_of_cached,
        kvcache_length_not_advanced,
        kvcache_appends_one_late,
        kvcache_overwrites_last,
        kvcache_longest_for_all,
        kvcache_first_length_for_all,
        kvcache_causal_from_capacity,
        kvcache_causal_before_append,
        kvcache_values_stale,
        kvcache_not_in_place,
        kvcache_append_after,
        kvcache_reads_unused_slots,
        kvcache_window_one_short,
        kvcache_rotary_keys_from_zero,
        kvcache_rotary_query_constant,
        kvcache_rotary_query_late,
        paged_contiguous_assumed,
        paged_partial_block_lost,
        paged_boundary_write,
        paged_first_table_for_all,
        TupleAttentionRopeRestarts,
        TupleAttentionRopeOneLate,
        TupleAttentionNewFirst,
        TupleAttentionDoubleRotation,
        TupleAttentionPresentLosesPast,
        TupleAttentionTopLeftChunk,
        TupleAttentionMaskIgnoredAtDecode,
        TupleAttentionTrimmedPositions,
        TupleAttentionSharedBuffer,
        TupleAttentionRepeatAtDecode,
        TupleAttentionScaledTwiceAtDecode,
        CacheAttentionLayerZero,
        CacheAttentionLengthOfLayerZero,
        CacheAttentionUnrotatedCached,
        StartPosReadsWholeCache,
        StartPosFirstRowCache,
        StartPosRopeFromZero,
        StartPosLowPrecisionCache,
        StartPosUnmaskedChunk,
        ResetKeepsPointer,
        UncachedCallReadsCache,
        CacheKeepsOnlyPrompt,
        RollingOneTooMany,
        RollingKeepsFirstKeys,
        RollingRopeAtSlot,
        RollingWrongSlot,
        AlibiPastDistance,
        PartialRotaryWholeHeadAtDecode,
        CrossAttentionCausalAtDecode,
        CrossAttentionStaleEncoder,
        SlotsMaskedByLongest,
    )
}
