"""Blind test material: attention with dropout, each with one fault.

Written without sight of the checks.  ``DECLARED`` holds what a user would have to state.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

_NEG = float("-inf")


def _acc(dtype):
    return torch.promote_types(dtype, torch.float32)


def _softmax(s):
    """softmax over the last axis with zeros for rows that have no key."""
    m = s.amax(-1, keepdim=True)
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    e = torch.exp(s - m)
    d = e.sum(-1, keepdim=True)
    return e / torch.where(d == 0, torch.ones_like(d), d)


def _sdpa_scores(query, key, attn_mask, is_causal, scale):
    """scaled scores with torch SDPA's mask rules (top-left causal)."""
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal cannot both be set")
    acc = _acc(query.dtype)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    s = query.to(acc) @ key.to(acc).transpose(-2, -1) * scale
    if is_causal:
        attn_mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, _NEG) if attn_mask.dtype == torch.bool else s + attn_mask
    return s


def _flash_prep(q, k, v):
    """[B, S, H, D] -> float [B, H, S, D] with the key/value heads repeated."""
    H, Hk = q.shape[2], k.shape[2]
    if H % Hk:
        raise ValueError("query heads must be a multiple of key/value heads")
    acc = _acc(q.dtype)
    q, k, v = (t.to(acc).transpose(1, 2) for t in (q, k, v))
    return q, k.repeat_interleave(H // Hk, 1), v.repeat_interleave(H // Hk, 1)


def _br_causal(s):
    """bottom-right causal fill."""
    n, m = s.shape[-2:]
    return s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=s.device).triu(m - n + 1), _NEG)


# ---------------------------------------------------------------- functions in the SDPA signature


def sdpa_no_rescale(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: kept weights are not divided by 1-p; the mean shrinks by 1-p for any dropout_p > 0."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        w = w * (torch.rand_like(w) >= dropout_p)
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_scale_by_p(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: kept weights are divided by p in place of 1-p; wrong mean for any p but 0.5."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        keep = torch.rand_like(w) >= dropout_p
        w = w.masked_fill(~keep, 0.0) / dropout_p
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_inverted_bernoulli(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: the keep mask is Bernoulli(p), so 1-p of the weights are dropped while the scale is 1/(1-p)."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if 0 < dropout_p < 1:
        w = w * torch.bernoulli(torch.full_like(w, dropout_p)) / (1 - dropout_p)
    elif dropout_p == 1:
        w = w * 0
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_keep_prob_to_dropout(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: F.dropout gets the keep probability 1-p when p > 0: unbiased, but the rate is 1-p."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        w = F.dropout(w, 1.0 - dropout_p)
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_dropout_on_logits(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: dropout acts on the logits before softmax (zeroed logits, rows still sum to 1)."""
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal cannot both be set")
    acc = _acc(query.dtype)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    s = F.dropout(query.to(acc) @ key.to(acc).transpose(-2, -1) * scale, dropout_p)
    if is_causal:
        attn_mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, _NEG) if attn_mask.dtype == torch.bool else s + attn_mask
    return (_softmax(s) @ value.to(acc)).to(query.dtype)


def sdpa_dropkey(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: dropped places get -inf before softmax, so survivors are renormalised in place of scaled by 1/(1-p)."""
    s = _sdpa_scores(query, key, attn_mask, is_causal, scale)
    if dropout_p > 0:
        s = s.masked_fill(torch.rand_like(s) < dropout_p, _NEG)
    return (_softmax(s) @ value.to(s.dtype)).to(query.dtype)


def sdpa_renormalised(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: weights are renormalised to sum to one after dropout."""
    w = F.dropout(_softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale)), dropout_p)
    w = w / w.sum(-1, keepdim=True).clamp_min(1e-9)
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_mask_shared_heads(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: one keep mask [B, 1, L, S] is shared by all heads (4-d inputs)."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        u = torch.rand(w.shape[0], 1, *w.shape[-2:], device=w.device) if w.dim() == 4 else torch.rand_like(w)
        w = w * ((u >= dropout_p).to(w.dtype) / max(1 - dropout_p, 1e-12))
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_mask_shared_batch(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: the keep mask has no batch axis, all batch entries drop the same places (batch > 1)."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        keep = torch.rand(w.shape[1:], device=w.device) >= dropout_p
        w = torch.where(keep, w / max(1 - dropout_p, 1e-12), torch.zeros_like(w))
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_value_dropout(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: dropout is applied to the elements of value and not to the weights."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    return (w @ F.dropout(value.to(w.dtype), dropout_p)).to(query.dtype)


def sdpa_output_dropout(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: dropout is applied to the output and not to the weights."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    return F.dropout(w @ value.to(w.dtype), dropout_p).to(query.dtype)


def sdpa_no_dropout_when_masked(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: the path with an explicit attn_mask forgets dropout."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if attn_mask is None:
        w = F.dropout(w, dropout_p)
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_fixed_seed(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: a generator seeded with the same constant each call, so every call drops the same places."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        g = torch.Generator(device=w.device).manual_seed(1234)
        u = torch.rand(w.shape, generator=g, device=w.device)
        w = w * (u >= dropout_p).to(w.dtype) / max(1 - dropout_p, 1e-12)
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_coarse_threshold(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: 4-bit random numbers with a truncated threshold: p = 0.1 drops 1/16, scale stays 1/(1-p)."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        keep = torch.randint(0, 16, w.shape, device=w.device) >= int(dropout_p * 16)
        w = w * keep.to(w.dtype) / max(1 - dropout_p, 1e-12)
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_detached_dropout(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: the masked weights are built under no_grad, query and key get no gradient when dropout_p > 0."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        with torch.no_grad():
            w = F.dropout(w, dropout_p)
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_empirical_scale(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: each row is scaled by its own S / (number kept) and not by 1/(1-p); noticeable at short S."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        keep = (torch.rand_like(w) >= dropout_p).to(w.dtype)
        w = w * keep * (w.shape[-1] / keep.sum(-1, keepdim=True).clamp_min(1.0))
    return (w @ value.to(w.dtype)).to(query.dtype)


def sdpa_self_position_kept(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Wrong: the diagonal is never dropped ('avoid empty rows') but is still scaled by 1/(1-p)."""
    w = _softmax(_sdpa_scores(query, key, attn_mask, is_causal, scale))
    if dropout_p > 0:
        drop = torch.rand_like(w) < dropout_p
        n = min(w.shape[-2:])
        drop[..., torch.arange(n), torch.arange(n)] = False
        w = w.masked_fill(drop, 0.0) / max(1 - dropout_p, 1e-12)
    return (w @ value.to(w.dtype)).to(query.dtype)


# ---------------------------------------------------------------- functions in the flash-attn signature


def flash_row_dropout(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: the mask is [B, H, Sq, 1], whole query rows are dropped at once."""
    qt, kt, vt = _flash_prep(q, k, v)
    s = qt @ kt.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    w = _softmax(_br_causal(s) if causal else s)
    if dropout_p > 0:
        w = w * F.dropout(torch.ones_like(w[..., :1]), dropout_p)
    return (w @ vt).transpose(1, 2).to(q.dtype)


def flash_column_dropout(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: the mask is [B, H, 1, Sk], a key is dropped for all queries together."""
    qt, kt, vt = _flash_prep(q, k, v)
    s = qt @ kt.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    w = _softmax(_br_causal(s) if causal else s)
    if dropout_p > 0:
        w = w * F.dropout(torch.ones_like(w[..., :1, :]), dropout_p)
    return (w @ vt).transpose(1, 2).to(q.dtype)


def flash_group_shared_mask(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: one mask per key/value head, repeated over its query heads (grouped heads only)."""
    Hk, G = k.shape[2], q.shape[2] // k.shape[2]
    qt, kt, vt = _flash_prep(q, k, v)
    s = qt @ kt.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    w = _softmax(_br_causal(s) if causal else s)
    if dropout_p > 0:
        z = F.dropout(torch.ones_like(w[:, :Hk]), dropout_p)
        w = w * z.repeat_interleave(G, 1)
    return (w @ vt).transpose(1, 2).to(q.dtype)


def _online(q, k, v, p, scale, causal, block, variant):
    """online softmax over key blocks in [B, H, S, D]; variant(e, start, stop) -> (numerator, for the sum)."""
    B, H, Sq, _ = q.shape
    Sk = k.shape[2]
    m = q.new_full((B, H, Sq, 1), _NEG)
    l = torch.zeros_like(m)
    o = q.new_zeros(B, H, Sq, v.shape[-1])
    rows = torch.arange(Sq, device=q.device)[:, None] + Sk - Sq
    for a in range(0, Sk, block):
        b = min(a + block, Sk)
        s = q @ k[:, :, a:b].mT * scale
        if causal:
            s = s.masked_fill(torch.arange(a, b, device=q.device) > rows, _NEG)
        mn = torch.maximum(m, s.amax(-1, keepdim=True))
        ms = torch.where(torch.isinf(mn), torch.zeros_like(mn), mn)
        e, r = torch.exp(s - ms), torch.exp(m - ms)
        num, den = variant(e, a, b)
        l = l * r + den.sum(-1, keepdim=True)
        o = o * r + num @ v[:, :, a:b]
        m = mn
    return o / torch.where(l == 0, torch.ones_like(l), l)


def flash_denominator_dropped(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: the running sum of the online softmax adds the dropped and scaled numerators."""
    qt, kt, vt = _flash_prep(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def step(e, a, b):
        e = F.dropout(e, dropout_p)
        return e, e

    return _online(qt, kt, vt, dropout_p, scale, causal, 16, step).transpose(1, 2).to(q.dtype)


def flash_same_mask_each_block(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: each key block of 16 restarts the generator, so the mask repeats with period 16 (Sk > 16)."""
    qt, kt, vt = _flash_prep(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seed = int(torch.randint(0, 2**31, (1,)).item())

    def step(e, a, b):
        if dropout_p == 0:
            return e, e
        g = torch.Generator().manual_seed(seed)
        u = torch.rand((*e.shape[:-1], 16), generator=g)[..., : b - a]
        return e * (u >= dropout_p).to(e.dtype) / max(1 - dropout_p, 1e-12), e

    return _online(qt, kt, vt, dropout_p, scale, causal, 16, step).transpose(1, 2).to(q.dtype)


def flash_tail_not_dropped(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: the ragged last key block (Sk % 16 != 0) skips dropout."""
    qt, kt, vt = _flash_prep(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    def step(e, a, b):
        return (F.dropout(e, dropout_p) if b - a == 16 else e), e

    return _online(qt, kt, vt, dropout_p, scale, causal, 16, step).transpose(1, 2).to(q.dtype)


def flash_rescale_once_per_block(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: 1/(1-p) multiplies the running output at each block, so earlier blocks are scaled again (Sk > 16)."""
    qt, kt, vt = _flash_prep(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    inv = 1 / max(1 - dropout_p, 1e-12)
    B, H, Sq, _ = qt.shape
    Sk = kt.shape[2]
    s = qt @ kt.mT * scale
    if causal:
        s = _br_causal(s)
    m = s.amax(-1, keepdim=True)
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    o, l = 0.0, 0.0
    for a in range(0, Sk, 16):
        e = torch.exp(s[..., a : a + 16] - m)
        l = l + e.sum(-1, keepdim=True)
        o = o + (e * (torch.rand_like(e) >= dropout_p)) @ vt[:, :, a : a + 16]
        o = o * inv
    return (o / torch.where(l == 0, torch.ones_like(l), l)).transpose(1, 2).to(q.dtype)


def flash_causal_edge_skips_dropout(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: with causal=True the masked (diagonal) tiles of 16 columns take a branch without dropout."""
    qt, kt, vt = _flash_prep(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    off = kt.shape[2] - qt.shape[2]

    def step(e, a, b):
        d = F.dropout(e, dropout_p)
        if causal:
            row = torch.arange(e.shape[-2], device=e.device)[:, None] + off
            d = torch.where(row < b - 1, e, d)
        return d, e

    return _online(qt, kt, vt, dropout_p, scale, causal, 16, step).transpose(1, 2).to(q.dtype)


# ---------------------------------------------------------------- seeds


def _hash01(*parts):
    """uniform [0, 1) from integer tensors."""
    x = torch.zeros((), dtype=torch.int64)
    for t in parts:
        x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) + t * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
    for c in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * c & 0xFFFFFFFF
    return (x ^ (x >> 15)).double() / 2**32


def _seeded(q, k, v, dropout_p, causal, sm_scale, u_of):
    """[B, H, S, D] attention with the uniform numbers given by u_of(b, h, i, j)."""
    acc = _acc(q.dtype)
    B, H, Sq, D = q.shape
    Sk = k.shape[2]
    if k.shape[1] != H:
        raise ValueError("q and k must have the same number of heads")
    s = q.to(acc) @ k.to(acc).mT * (D**-0.5 if sm_scale is None else sm_scale)
    w = _softmax(_br_causal(s) if causal else s)
    if dropout_p > 0:
        b = torch.arange(B).view(B, 1, 1, 1)
        h = torch.arange(H).view(1, H, 1, 1)
        i = torch.arange(Sq).view(1, 1, Sq, 1)
        j = torch.arange(Sk).view(1, 1, 1, Sk)
        keep = u_of(b, h, i, j) >= dropout_p
        w = w * keep.to(acc) / max(1 - dropout_p, 1e-12)
    return (w @ v.to(acc)).to(q.dtype)


def seeded_no_head_offset(q, k, v, seed, dropout_p=0.0, causal=False, sm_scale=None):
    """Wrong: the counter leaves out the head, all heads of a batch entry share the mask."""
    return _seeded(q, k, v, dropout_p, causal, sm_scale, lambda b, h, i, j: _hash01(torch.tensor(seed), b, i, j))


def seeded_small_row_stride(q, k, v, seed, dropout_p=0.0, causal=False, sm_scale=None):
    """Wrong: counter row*16 + column, so (i, j) and (i+1, j-16) get the same bit when Sk > 16."""
    return _seeded(
        q, k, v, dropout_p, causal, sm_scale, lambda b, h, i, j: _hash01(torch.tensor(seed), b * 4096 + h, i * 16 + j)
    )


def seeded_ignores_seed(q, k, v, seed, dropout_p=0.0, causal=False, sm_scale=None):
    """Wrong: the seed argument is never used, every seed gives the same mask."""
    return _seeded(q, k, v, dropout_p, causal, sm_scale, lambda b, h, i, j: _hash01(b * 4096 + h, i, j))


def seeded_not_reproducible(q, k, v, seed, dropout_p=0.0, causal=False, sm_scale=None):
    """Wrong: the draw comes from the global generator, the same seed gives another mask at the second call."""
    return _seeded(
        q,
        k,
        v,
        dropout_p,
        causal,
        sm_scale,
        lambda b, h, i, j: torch.rand(torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)),
    )


def seeded_batch_head_added(q, k, v, seed, dropout_p=0.0, causal=False, sm_scale=None):
    """Wrong: batch and head are added (b + h), so (b=0, h=1) and (b=1, h=0) share a mask (batch > 1 and heads > 1)."""
    return _seeded(q, k, v, dropout_p, causal, sm_scale, lambda b, h, i, j: _hash01(torch.tensor(seed), b + h, i, j))


# ---------------------------------------------------------------- hand-written backward


class _Base(torch.autograd.Function):
    """[B, H, S, D] attention, mask kept; subclasses give backward."""

    @staticmethod
    def forward(ctx, q, k, v, p, scale, causal):
        s = q @ k.mT * scale
        a = _softmax(_br_causal(s) if causal else s)
        ctx.state = torch.get_rng_state()
        z = F.dropout(torch.ones_like(a), p)
        ctx.state_after = torch.get_rng_state()
        o = (a * z) @ v
        ctx.save_for_backward(q, k, v, a, z, o)
        ctx.p, ctx.scale = p, scale
        return o


def _finish(ctx, q, k, a, dp, delta, dv):
    ds = a * (dp - delta) * ctx.scale
    return ds @ k, ds.mT @ q, dv, None, None, None


class _StaleState(_Base):
    @staticmethod
    def backward(ctx, do):
        q, k, v, a, z, o = ctx.saved_tensors
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state_after)
        z = F.dropout(torch.ones_like(a), ctx.p)
        torch.set_rng_state(now)
        return _finish(ctx, q, k, a, (do @ v.mT) * z, (do * o).sum(-1, keepdim=True), (a * z).mT @ do)


class _NoScaleDP(_Base):
    @staticmethod
    def backward(ctx, do):
        q, k, v, a, z, o = ctx.saved_tensors
        dp = (do @ v.mT).masked_fill(z == 0, 0.0)
        return _finish(ctx, q, k, a, dp, (dp * a).sum(-1, keepdim=True), (a * z).mT @ do)


class _NoMaskDP(_Base):
    @staticmethod
    def backward(ctx, do):
        q, k, v, a, z, o = ctx.saved_tensors
        dp = do @ v.mT
        return _finish(ctx, q, k, a, dp, (dp * a).sum(-1, keepdim=True), (a * z).mT @ do)


class _PlainDelta(_Base):
    @staticmethod
    def backward(ctx, do):
        q, k, v, a, z, o = ctx.saved_tensors
        dp = do @ v.mT
        return _finish(ctx, q, k, a, dp * z, (dp * a).sum(-1, keepdim=True), (a * z).mT @ do)


class _UndroppedDV(_Base):
    @staticmethod
    def backward(ctx, do):
        q, k, v, a, z, o = ctx.saved_tensors
        return _finish(ctx, q, k, a, (do @ v.mT) * z, (do * o).sum(-1, keepdim=True), a.mT @ do)


class _DroppedJacobian(_Base):
    @staticmethod
    def backward(ctx, do):
        q, k, v, a, z, o = ctx.saved_tensors
        ad = a * z
        return _finish(ctx, q, k, ad, do @ v.mT, (do * o).sum(-1, keepdim=True), ad.mT @ do)


def _apply(fn, q, k, v, p, softmax_scale, causal):
    qt, kt, vt = _flash_prep(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return fn.apply(qt, kt, vt, p, scale, causal).transpose(1, 2).to(q.dtype)


def backward_redraws_late_state(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong in backward: the mask is regenerated from the RNG state after the draw, another mask than forward's."""
    return _apply(_StaleState, q, k, v, dropout_p, softmax_scale, causal)


def backward_dp_unscaled(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong in backward: dP is masked but not divided by 1-p; dq and dk are too small by 1-p."""
    return _apply(_NoScaleDP, q, k, v, dropout_p, softmax_scale, causal)


def backward_dp_unmasked(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong in backward: dP ignores the dropout mask; dq and dk are those without dropout."""
    return _apply(_NoMaskDP, q, k, v, dropout_p, softmax_scale, causal)


def backward_delta_undropped(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong in backward: delta is summed with the unmasked dP; dq and dk off for p > 0."""
    return _apply(_PlainDelta, q, k, v, dropout_p, softmax_scale, causal)


def backward_dv_undropped(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong in backward: dv uses the weights before dropout."""
    return _apply(_UndroppedDV, q, k, v, dropout_p, softmax_scale, causal)


def backward_softmax_of_dropped(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong in backward: dS = dropped P * (dP - delta); dropped places lose the -P*delta term."""
    return _apply(_DroppedJacobian, q, k, v, dropout_p, softmax_scale, causal)


# ---------------------------------------------------------------- modules


class _SelfAttention(nn.Module):
    """multi-head causal self-attention; subclasses give weights_to_output(w, v)."""

    def __init__(self, hidden_size, num_heads, dropout=0.1):
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError("hidden_size must be a multiple of num_heads")
        self.num_heads, self.head_dim, self.p = num_heads, hidden_size // num_heads, dropout
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        w = _softmax(_br_causal(q @ k.mT * self.head_dim**-0.5))
        return self.finish((self.drop(w) @ v).transpose(1, 2).reshape(b, n, c))

    def drop(self, w):
        return F.dropout(w, self.p, self.training)

    def finish(self, y):
        return self.proj(y)


class DropoutInEval(_SelfAttention):
    """Wrong: F.dropout is called without training=self.training, eval outputs are random."""

    def drop(self, w):
        return F.dropout(w, self.p)


class NeverDrops(_SelfAttention):
    """Wrong: the module drops nothing in train mode (training=False left from debugging)."""

    def drop(self, w):
        return F.dropout(w, self.p, training=False)


class InvertedTrainingFlag(_SelfAttention):
    """Wrong: drops in eval mode and not in train mode."""

    def drop(self, w):
        return F.dropout(w, self.p, training=not self.training)


class ClassicDropout(_SelfAttention):
    """Wrong: the old non-inverted dropout: unscaled mask in training, weights times 1-p in eval."""

    def drop(self, w):
        if self.training:
            return w * (torch.rand_like(w) >= self.p)
        return w * (1 - self.p)


class LockedMask(_SelfAttention):
    """Wrong: the keep mask is drawn once per shape and kept, later training steps reuse it."""

    def __init__(self, hidden_size, num_heads, dropout=0.1):
        super().__init__(hidden_size, num_heads, dropout)
        self._masks = {}

    def drop(self, w):
        if not self.training or self.p == 0:
            return w
        key = tuple(w.shape)
        if key not in self._masks:
            self._masks[key] = F.dropout(torch.ones_like(w), self.p).detach()
        return w * self._masks[key]


class DropsTwice(_SelfAttention):
    """Wrong: two dropouts one after another on the weights, the rate is 1-(1-p)^2."""

    def drop(self, w):
        return F.dropout(F.dropout(w, self.p, self.training), self.p, self.training)


class EvalStillRescaled(_SelfAttention):
    """Wrong: eval mode still divides by 1-p (mask drawn in training only)."""

    def drop(self, w):
        if self.training:
            w = w.masked_fill(torch.rand_like(w) < self.p, 0.0)
        return w / (1 - self.p)


class SDPADropoutAlways(nn.Module):
    """Wrong: dropout_p is handed to F.scaled_dot_product_attention in eval mode too."""

    def __init__(self, dim, n_heads, attn_dropout=0.1, causal=True):
        super().__init__()
        self.h, self.causal = n_heads, causal
        self.dropout = nn.Dropout(attn_dropout)
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.h, -1).transpose(1, 2) for t in self.wqkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p, is_causal=self.causal)
        return self.wo(y.transpose(1, 2).reshape(b, n, d))


class SwappedRates(nn.Module):
    """Wrong: attn_pdrop and resid_pdrop are swapped (visible when they differ)."""

    def __init__(self, n_embd, n_head, attn_pdrop=0.1, resid_pdrop=0.0):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_drop, self.resid_drop = nn.Dropout(resid_pdrop), nn.Dropout(attn_pdrop)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (t.view(b, n, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(c, 2))
        w = self.attn_drop(_softmax(_br_causal(q @ k.mT / math.sqrt(c // self.n_head))))
        return self.resid_drop(self.c_proj((w @ v).transpose(1, 2).reshape(b, n, c)))


class FixedRateDropout(nn.Module):
    """Wrong: nn.Dropout() is built with its default 0.5 and the given rate is ignored."""

    def __init__(self, hidden_size, num_heads, attention_dropout=0.1):
        super().__init__()
        self.num_heads, self.attention_dropout = num_heads, attention_dropout
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size) for _ in range(4))
        self.dropout = nn.Dropout()

    def forward(self, hidden_states, attention_mask=None):
        b, n, c = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if attention_mask is not None:
            s = s + attention_mask
        w = self.dropout(_softmax(s))
        return self.o_proj((w @ v).transpose(1, 2).reshape(b, n, c))


class WeightsReturnedBeforeDropoutApplied(nn.Module):
    """Wrong: the dropped weights are returned for inspection but the output uses the undropped ones."""

    def __init__(self, hidden_size, num_heads, attention_dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        self.dropout = nn.Dropout(attention_dropout)

    def forward(self, hidden_states):
        b, n, c = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        probs = _softmax(q @ k.mT / math.sqrt(q.shape[-1]))
        attn = self.dropout(probs)
        return (probs @ v).transpose(1, 2).reshape(b, n, c), attn


def varlen_shared_sequence_mask(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p=0.0, softmax_scale=None, causal=False):
    """Wrong: each packed sequence restarts the same generator, equal-length sequences get equal masks."""
    acc = _acc(q.dtype)
    H, Hk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seed = int(torch.randint(0, 2**31, (1,)).item())
    cq, ck = [int(x) for x in cu_seqlens_q], [int(x) for x in cu_seqlens_k]
    out = torch.zeros(q.shape[0], H, v.shape[-1], dtype=q.dtype)
    for a, b, c, d in zip(cq[:-1], cq[1:], ck[:-1], ck[1:], strict=True):
        if a == b or c == d:
            continue
        g = torch.Generator().manual_seed(seed)
        qi = q[a:b].to(acc).transpose(0, 1)
        ki, vi = (t[c:d].to(acc).transpose(0, 1).repeat_interleave(H // Hk, 0) for t in (k, v))
        s = qi @ ki.mT * scale
        w = _softmax(_br_causal(s) if causal else s)
        if dropout_p > 0:
            w = w * (torch.rand(w.shape, generator=g) >= dropout_p).to(acc) / max(1 - dropout_p, 1e-12)
        out[a:b] = (w @ vi).transpose(0, 1).to(q.dtype)
    return out


MUTANTS = {
    f.__name__: f
    for f in (
        sdpa_no_rescale,
        sdpa_scale_by_p,
        sdpa_inverted_bernoulli,
        sdpa_keep_prob_to_dropout,
        sdpa_dropout_on_logits,
        sdpa_dropkey,
        sdpa_renormalised,
        sdpa_mask_shared_heads,
        sdpa_mask_shared_batch,
        sdpa_value_dropout,
        sdpa_output_dropout,
        sdpa_no_dropout_when_masked,
        sdpa_fixed_seed,
        sdpa_coarse_threshold,
        sdpa_detached_dropout,
        sdpa_empirical_scale,
        sdpa_self_position_kept,
        flash_row_dropout,
        flash_column_dropout,
        flash_group_shared_mask,
        flash_denominator_dropped,
        flash_same_mask_each_block,
        flash_tail_not_dropped,
        flash_rescale_once_per_block,
        flash_causal_edge_skips_dropout,
        seeded_no_head_offset,
        seeded_small_row_stride,
        seeded_ignores_seed,
        seeded_not_reproducible,
        seeded_batch_head_added,
        backward_redraws_late_state,
        backward_dp_unscaled,
        backward_dp_unmasked,
        backward_delta_undropped,
        backward_dv_undropped,
        backward_softmax_of_dropped,
        DropoutInEval,
        NeverDrops,
        InvertedTrainingFlag,
        ClassicDropout,
        LockedMask,
        DropsTwice,
        EvalStillRescaled,
        SDPADropoutAlways,
        SwappedRates,
        FixedRateDropout,
        WeightsReturnedBeforeDropoutApplied,
        varlen_shared_sequence_mask,
    )
}

# modules that are causal without a parameter or a name that says so
_CAUSAL = (
    DropoutInEval,
    NeverDrops,
    InvertedTrainingFlag,
    ClassicDropout,
    LockedMask,
    DropsTwice,
    EvalStillRescaled,
    SwappedRates,
)
DECLARED = {one.__name__: {"causal": "always"} for one in _CAUSAL}
