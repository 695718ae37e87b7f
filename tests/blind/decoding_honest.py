"""Attention for decoding: bottom-right functions, key/value caches, paged caches and modules with caches."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def _acc(dtype):
    return torch.promote_types(dtype, torch.float32)


def _softmax(s):
    """softmax over the last axis, zeros where no key is allowed."""
    m = s.amax(-1, keepdim=True)
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    e = torch.exp(s - m)
    d = e.sum(-1, keepdim=True)
    return e / torch.where(d == 0, torch.ones_like(d), d)


def _groups(h, hk):
    if h % hk:
        raise ValueError(f"{h} query heads cannot be grouped over {hk} key/value heads")
    return h // hk


# ------------------------------------------------------------------ functions


def bottom_right_attention(q, k, v, causal=True, scale=None):
    """[B, H, S, D] with grouped heads; the last query sees every key."""
    g = _groups(q.shape[1], k.shape[1])
    acc = _acc(q.dtype)
    n, m = q.shape[2], k.shape[2]
    k, v = k.to(acc).repeat_interleave(g, 1), v.to(acc).repeat_interleave(g, 1)
    s = q.to(acc) @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        i = torch.arange(n, device=q.device).unsqueeze(1)
        s = s.masked_fill(torch.arange(m, device=q.device) > i + (m - n), float("-inf"))
    return (_softmax(s) @ v).to(q.dtype)


def online_window_attention(q, k, v, causal=True, window=None, softmax_scale=None, block=16):
    """[B, S, H, D], key blocks with online softmax; window = number of keys each query sees, itself included."""
    if window is not None and not causal:
        raise NotImplementedError("window needs causal=True")
    B, n, H, D = q.shape
    m, Hk = k.shape[1], k.shape[2]
    g = _groups(H, Hk)
    acc = _acc(q.dtype)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    qg = (q.to(acc) * scale).view(B, n, Hk, g, D)
    pos = torch.arange(m - n, m, device=q.device)[:, None]
    mx = torch.full((B, Hk, g, n, 1), float("-inf"), dtype=acc, device=q.device)
    den = torch.zeros_like(mx)
    out = torch.zeros(B, Hk, g, n, v.shape[-1], dtype=acc, device=q.device)
    for a in range(0, m, block):
        b = min(m, a + block)
        s = torch.einsum("bnhgd,bmhd->bhgnm", qg, k[:, a:b].to(acc))
        j = torch.arange(a, b, device=q.device)[None]
        if causal:
            bad = j > pos
            if window is not None:
                bad = bad | (j <= pos - window)
            s = s.masked_fill(bad, float("-inf"))
        new = torch.maximum(mx, s.amax(-1, keepdim=True))
        safe = new.masked_fill(torch.isinf(new), 0.0)
        e, r = torch.exp(s - safe), torch.exp(mx - safe)
        den = den * r + e.sum(-1, keepdim=True)
        out = out * r + torch.einsum("bhgnm,bmhd->bhgnd", e, v[:, a:b].to(acc))
        mx = new
    out = out / den.masked_fill(den == 0, 1.0)
    return out.permute(0, 3, 1, 2, 4).reshape(B, n, H, v.shape[-1]).to(q.dtype)


def split_kv_attention(q, k, v, causal=True, num_splits=4):
    """[B, S, H, D] flash-decoding: splits along the keys, each with its log-sum-exp, merged at the end."""
    B, n, H, D = q.shape
    m = k.shape[1]
    g = _groups(H, k.shape[2])
    acc = _acc(q.dtype)
    qt = q.to(acc).transpose(1, 2)
    kt, vt = (t.to(acc).transpose(1, 2).repeat_interleave(g, 1) for t in (k, v))
    per = max(1, -(-m // num_splits))
    parts, lses = [], []
    for a in range(0, m, per):
        b = min(a + per, m)
        s = qt @ kt[:, :, a:b].mT / math.sqrt(D)
        if causal:
            row = torch.arange(n, device=q.device)[:, None] + m - n
            s = s.masked_fill(torch.arange(a, b, device=q.device)[None] > row, float("-inf"))
        parts.append(_softmax(s) @ vt[:, :, a:b])
        lses.append(torch.logsumexp(s, -1))
    lse = torch.stack(lses)
    w = _softmax(lse.movedim(0, -1)).movedim(-1, 0).unsqueeze(-1)
    return (w * torch.stack(parts)).sum(0).transpose(1, 2).to(q.dtype)


def sdpa_decode(q, k, v, causal=True, scale=None):
    """[B, H, S, D] on F.scaled_dot_product_attention: no mask at one query, explicit lower-right mask otherwise."""
    g = _groups(q.shape[1], k.shape[1])
    n, m = q.shape[2], k.shape[2]
    if n > m and causal:
        raise ValueError("more queries than keys")
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    mask = None
    if causal and n > 1 and n != m:
        mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and n > 1 and n == m, scale=scale)


def kv_length_attention(q, k, v, kv_lens=None, causal=True):
    """[B, S, H, D] with right-padded keys: entry b has kv_lens[b] keys and its last query sits at kv_lens[b]-1."""
    B, n, H, D = q.shape
    m = k.shape[1]
    g = _groups(H, k.shape[2])
    acc = _acc(q.dtype)
    lens = torch.full((B,), m, device=q.device) if kv_lens is None else torch.as_tensor(kv_lens, device=q.device)
    s = torch.einsum("bnhgd,bmhd->bhgnm", q.to(acc).unflatten(2, (-1, g)), k.to(acc)) * D**-0.5
    j = torch.arange(m, device=q.device).view(1, 1, m)
    bad = j >= lens.view(B, 1, 1)
    if causal:
        i = torch.arange(n, device=q.device).view(1, n, 1) + lens.view(B, 1, 1) - n
        bad = bad | (j > i)
    else:
        bad = bad.expand(B, n, m)
    s = s.masked_fill(bad[:, None, None], float("-inf"))
    # padded cache slots may hold anything
    vv = v.to(acc).masked_fill((torch.arange(m, device=q.device)[None] >= lens[:, None])[:, :, None, None], 0.0)
    return torch.einsum("bhgnm,bmhd->bnhgd", _softmax(s), vv).flatten(2, 3).to(q.dtype)


def alibi_attention(q, k, v, slopes, causal=True):
    """[B, H, S, D] with ALiBi, distances counted from the end of the keys."""
    g = _groups(q.shape[1], k.shape[1])
    n, m = q.shape[2], k.shape[2]
    acc = _acc(q.dtype)
    k, v = k.repeat_interleave(g, 1).to(acc), v.repeat_interleave(g, 1).to(acc)
    i = torch.arange(n, device=q.device)[:, None] + m - n
    j = torch.arange(m, device=q.device)[None]
    s = q.to(acc) @ k.mT / math.sqrt(q.shape[-1])
    s = s - slopes.to(acc).view(-1, 1, 1) * (i - j).abs()
    if causal:
        s = s.masked_fill(j > i, float("-inf"))
    return (_softmax(s) @ v).to(q.dtype)


def _rotate(x, cos, sin, interleaved):
    """rotate the first 2*cos.shape[-1] channels; cos/sin are broadcast over x [..., D]."""
    r = cos.shape[-1] * 2
    y, rest = x[..., :r], x[..., r:]
    if interleaved:
        a, b = y[..., 0::2], y[..., 1::2]
        y = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = y.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((y, rest), -1)


def attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
):
    """plain version of flash_attn_with_kvcache; writes k, v into the caches in place at cache_seqlens."""
    B, n, H, D = q.shape
    acc = _acc(q.dtype)
    paged = block_table is not None
    if paged and cache_batch_idx is not None:
        raise ValueError("block_table and cache_batch_idx cannot be used together")
    if (k is None) != (v is None):
        raise ValueError("k and v go together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is needed to append k and v")
    bs = k_cache.shape[1]
    g = _groups(H, k_cache.shape[2])
    cap = block_table.shape[1] * bs if paged else bs
    if cache_seqlens is None:
        lens = [cap] * B
    elif isinstance(cache_seqlens, int):
        lens = [cache_seqlens] * B
    else:
        lens = [int(t) for t in cache_seqlens]
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    left, right = window_size
    if causal:
        right = 0
    local = causal or left >= 0 or right >= 0
    out = torch.zeros(B, n, H, v_cache.shape[-1], dtype=q.dtype, device=q.device)
    for b in range(B):
        L = lens[b]
        new = 0 if k is None else k.shape[1]
        if L + new > cap:
            raise ValueError("the cache is too short for the new keys")
        row = b if cache_batch_idx is None else int(cache_batch_idx[b])
        qb = q[b].to(acc)
        if rotary_cos is not None:
            at = torch.arange(L, L + n, device=q.device) if local else torch.full((n,), L, device=q.device)
            qb = _rotate(qb, rotary_cos[at].to(acc)[:, None], rotary_sin[at].to(acc)[:, None], rotary_interleaved)
            qb = qb.to(q.dtype).to(acc)
        if new:
            kb = k[b]
            if rotary_cos is not None:
                at = torch.arange(L, L + new, device=q.device)
                kb = _rotate(
                    kb.to(acc), rotary_cos[at].to(acc)[:, None], rotary_sin[at].to(acc)[:, None], rotary_interleaved
                )
            for t in range(new):
                blk, off = (int(block_table[b, (L + t) // bs]), (L + t) % bs) if paged else (row, L + t)
                k_cache[blk, off] = kb[t].to(k_cache.dtype)
                v_cache[blk, off] = v[b, t].to(v_cache.dtype)
        L = L + new
        if paged:
            blocks = block_table[b, : -(-L // bs)].long()
            keys, vals = k_cache[blocks].flatten(0, 1)[:L], v_cache[blocks].flatten(0, 1)[:L]
        else:
            keys, vals = k_cache[row, :L], v_cache[row, :L]
        if L == 0:
            continue
        keys, vals = (t.to(acc).repeat_interleave(g, 1) for t in (keys, vals))
        s = torch.einsum("nhd,mhd->hnm", qb, keys) * scale
        if softcap > 0:
            s = torch.tanh(s / softcap) * softcap
        i = torch.arange(n, device=q.device)[:, None] + L - n
        j = torch.arange(L, device=q.device)[None]
        if alibi_slopes is not None:
            sl = alibi_slopes[b] if alibi_slopes.dim() == 2 else alibi_slopes
            s = s - sl.to(acc).view(H, 1, 1) * (i - j).abs()
        if left >= 0:
            s = s.masked_fill(j < i - left, float("-inf"))
        if right >= 0:
            s = s.masked_fill(j > i + right, float("-inf"))
        out[b] = torch.einsum("hnm,mhd->nhd", _softmax(s), vals).to(q.dtype)
    return out


def cached_attention(q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=True, softmax_scale=None):
    """[B, S, H, D] vectorised cache attention: scatter the new keys at cache_seqlens, mask the rest of the cache."""
    B, n, H, D = q.shape
    C = k_cache.shape[1]
    g = _groups(H, k_cache.shape[2])
    acc = _acc(q.dtype)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens must be given with k, v")
        cache_seqlens = C
    lens = torch.as_tensor(cache_seqlens, device=q.device).long().expand(B)
    if k is not None:
        t = k.shape[1]
        if int(lens.max()) + t > C:
            raise ValueError("cache overflow")
        at = lens[:, None] + torch.arange(t, device=q.device)
        rows = torch.arange(B, device=q.device)[:, None]
        k_cache[rows, at] = k.to(k_cache.dtype)
        v_cache[rows, at] = v.to(v_cache.dtype)
        lens = lens + t
    s = torch.einsum("bnhd,bmhd->bhnm", q.to(acc), k_cache.to(acc).repeat_interleave(g, 2))
    s = s * (D**-0.5 if softmax_scale is None else softmax_scale)
    j = torch.arange(C, device=q.device)[None, None, None]
    dead = j >= lens.view(B, 1, 1, 1)
    if causal:
        last = (lens.view(B, 1) - n + torch.arange(n, device=q.device)).view(B, 1, n, 1)
        dead = dead | (j > last)
    s = s.masked_fill(dead, float("-inf"))
    unused = (torch.arange(C, device=q.device)[None] >= lens[:, None])[:, :, None, None]
    vals = v_cache.to(acc).masked_fill(unused, 0.0).repeat_interleave(g, 2)
    return torch.einsum("bhnm,bmhd->bnhd", _softmax(s), vals).to(q.dtype)


def paged_decode_attention(query, key_cache, value_cache, block_tables, context_lens, scale=None):
    """vLLM style single-token decode: query [B, H, D], caches [blocks, block_size, Hk, D]."""
    B, H, D = query.shape
    size, Hk = key_cache.shape[1], key_cache.shape[2]
    g = _groups(H, Hk)
    acc = _acc(query.dtype)
    scale = D**-0.5 if scale is None else scale
    out = torch.zeros(B, H, value_cache.shape[-1], dtype=query.dtype, device=query.device)
    for b in range(B):
        n = int(context_lens[b])
        if n == 0:
            continue
        idx = torch.arange(n, device=query.device)
        blk = block_tables[b].long()[idx // size]
        k = key_cache[blk, idx % size].to(acc)
        v = value_cache[blk, idx % size].to(acc)
        qb = query[b].to(acc).view(Hk, g, D)
        w = torch.einsum("hgd,nhd->hgn", qb * scale, k).softmax(-1)
        out[b] = torch.einsum("hgn,nhd->hgd", w, v).reshape(H, -1).to(query.dtype)
    return out


# ------------------------------------------------------------------ modules


def _rope_half(x, pos, base):
    """rotate-half rotary embedding of x [B, H, S, D] at positions pos [B or 1, S]."""
    d = x.shape[-1]
    f = base ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d)
    ang = (pos.double()[..., None] * f)[:, None]
    cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class LlamaTupleAttention(nn.Module):
    """HF Llama attention with legacy (key, value) tuples, rotary positions and grouped heads, always causal."""

    def __init__(self, hidden_size, num_heads, num_key_value_heads=None, rope_theta=10000.0):
        super().__init__()
        hk = num_key_value_heads or num_heads
        self.num_heads, self.num_kv, self.groups = num_heads, hk, _groups(num_heads, hk)
        self.head_dim = hidden_size // num_heads
        self.theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, hk * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, hk * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        output_attentions=False,
        use_cache=False,
    ):
        b, n, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, n, self.num_kv, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, n, self.num_kv, self.head_dim).transpose(1, 2)
        past = past_key_value[0].shape[2] if past_key_value is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + n, device=hidden_states.device)[None]
        q, k = _rope_half(q, position_ids, self.theta), _rope_half(k, position_ids, self.theta)
        if past_key_value is not None:
            k = torch.cat((past_key_value[0], k), 2)
            v = torch.cat((past_key_value[1], v), 2)
        present = (k, v) if use_cache else None
        m = past + n
        w = q @ k.repeat_interleave(self.groups, 1).transpose(2, 3) / math.sqrt(self.head_dim)
        w = w.masked_fill(torch.ones(n, m, dtype=torch.bool, device=w.device).triu(past + 1), float("-inf"))
        if attention_mask is not None:
            if attention_mask.dim() != 4 or not attention_mask.is_floating_point():
                raise ValueError("attention_mask must be an additive [batch, 1, query, key] mask")
            w = w + attention_mask[..., :m]
        w = _softmax(w.to(_acc(w.dtype))).to(v.dtype)
        y = (w @ v.repeat_interleave(self.groups, 1)).transpose(1, 2).reshape(b, n, -1)
        return self.o_proj(y), (w if output_attentions else None), present


class SimpleCache:
    """per-layer growing cache with update(key, value, layer_idx) and get_seq_length(layer_idx)."""

    def __init__(self):
        self.key_cache, self.value_cache = {}, {}

    def update(self, key_states, value_states, layer_idx, cache_kwargs=None):
        if layer_idx in self.key_cache:
            key_states = torch.cat((self.key_cache[layer_idx], key_states), dim=-2)
            value_states = torch.cat((self.value_cache[layer_idx], value_states), dim=-2)
        self.key_cache[layer_idx], self.value_cache[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return self.key_cache[layer_idx].shape[-2] if layer_idx in self.key_cache else 0


class CacheObjectAttention(nn.Module):
    """causal attention on a Cache object, rotary positions, grouped heads and optional sliding window."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, layer_idx=0, sliding_window=None, rope_theta=1e4):
        super().__init__()
        hk = num_kv_heads or num_heads
        self.h, self.hk, self.g, self.d = num_heads, hk, _groups(num_heads, hk), hidden_size // num_heads
        self.layer_idx, self.window, self.theta = layer_idx, sliding_window, rope_theta
        self.qkv = nn.Linear(hidden_size, (num_heads + 2 * hk) * self.d, bias=False)
        self.dense = nn.Linear(num_heads * self.d, hidden_size, bias=False)

    def forward(self, hidden_states, past_key_values=None):
        b, n, _ = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(b, n, -1, self.d).transpose(1, 2).split((self.h, self.hk, self.hk), 1)
        past = 0 if past_key_values is None else past_key_values.get_seq_length(self.layer_idx)
        pos = torch.arange(past, past + n, device=hidden_states.device)[None]
        q, k = _rope_half(q, pos, self.theta), _rope_half(k, pos, self.theta)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        j = torch.arange(k.shape[2], device=q.device)[None]
        ok = j <= pos[0][:, None]
        if self.window is not None:
            ok = ok & (j > pos[0][:, None] - self.window)
        s = torch.einsum("bhgnd,bhmd->bhgnm", q.unflatten(1, (self.hk, self.g)), k) * self.d**-0.5
        w = s.masked_fill(~ok, float("-inf")).softmax(-1)
        y = torch.einsum("bhgnm,bhmd->bnhgd", w, v).reshape(b, n, -1)
        return self.dense(y)


class StartPosAttention(nn.Module):
    """Meta-Llama attention: cache buffers [max_batch, max_seq, Hk, D] written at start_pos, interleaved rotary."""

    def __init__(self, dim, n_heads, n_kv_heads=None, max_batch_size=4, max_seq_len=128):
        super().__init__()
        self.n_heads, self.n_kv = n_heads, n_kv_heads or n_heads
        self.rep, self.hd = _groups(n_heads, self.n_kv), dim // n_heads
        self.max_seq_len, self.max_batch = max_seq_len, max_batch_size
        self.wq = nn.Linear(dim, n_heads * self.hd, bias=False)
        self.wk = nn.Linear(dim, self.n_kv * self.hd, bias=False)
        self.wv = nn.Linear(dim, self.n_kv * self.hd, bias=False)
        self.wo = nn.Linear(n_heads * self.hd, dim, bias=False)
        shape = (max_batch_size, max_seq_len, self.n_kv, self.hd)
        self.register_buffer("cache_k", torch.zeros(shape), persistent=False)
        self.register_buffer("cache_v", torch.zeros(shape), persistent=False)

    def forward(self, x, start_pos=0):
        b, n, _ = x.shape
        if start_pos + n > self.max_seq_len or b > self.max_batch:
            raise ValueError("batch or sequence does not fit the cache")
        q = self.wq(x).view(b, n, self.n_heads, self.hd)
        k = self.wk(x).view(b, n, self.n_kv, self.hd)
        v = self.wv(x).view(b, n, self.n_kv, self.hd)
        f = 10000.0 ** (-torch.arange(0, self.hd, 2, device=x.device, dtype=torch.float64) / self.hd)
        ang = torch.outer(torch.arange(start_pos, start_pos + n, device=x.device).double(), f)[:, None]
        cos, sin = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
        q, k = _rotate(q, cos, sin, True), _rotate(k, cos, sin, True)
        old_k, old_v = (
            self.cache_k[:b, :start_pos].clone().to(x.dtype),
            self.cache_v[:b, :start_pos].clone().to(x.dtype),
        )
        self.cache_k[:b, start_pos : start_pos + n] = k.detach().to(self.cache_k.dtype)
        self.cache_v[:b, start_pos : start_pos + n] = v.detach().to(self.cache_v.dtype)
        k = torch.cat((old_k, k), 1).repeat_interleave(self.rep, 2).transpose(1, 2)
        v = torch.cat((old_v, v), 1).repeat_interleave(self.rep, 2).transpose(1, 2)
        s = q.transpose(1, 2) @ k.mT / math.sqrt(self.hd)
        if n > 1:
            tri = torch.full((n, n), float("-inf"), device=x.device, dtype=s.dtype).triu(1)
            s = s + torch.cat((torch.zeros(n, start_pos, device=x.device, dtype=s.dtype), tri), 1)
        return self.wo((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ResettableCacheAttention(nn.Module):
    """GPT attention which keeps its cache in itself: forward(x, use_cache) and reset_cache()."""

    def __init__(self, dim, n_heads, qkv_bias=False):
        super().__init__()
        self.h, self.d = n_heads, dim // n_heads
        self.W_query, self.W_key, self.W_value = (nn.Linear(dim, dim, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(dim, dim)
        self.register_buffer("cache_k", None, persistent=False)
        self.register_buffer("cache_v", None, persistent=False)

    def reset_cache(self):
        self.cache_k, self.cache_v = None, None

    def forward(self, x, use_cache=False):
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, self.h, self.d) for f in (self.W_query, self.W_key, self.W_value))
        if use_cache:
            if self.cache_k is not None:
                if self.cache_k.shape[0] != b:
                    raise ValueError("batch size changed; call reset_cache() first")
                k, v = torch.cat((self.cache_k, k), 1), torch.cat((self.cache_v, v), 1)
            self.cache_k, self.cache_v = k, v
        m = k.shape[1]
        s = torch.einsum("bnhd,bmhd->bhnm", q, k) / self.d**0.5
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=x.device).triu(m - n + 1), float("-inf"))
        return self.out_proj(torch.einsum("bhnm,bmhd->bnhd", s.softmax(-1), v).reshape(b, n, c))


class RollingWindowAttention(nn.Module):
    """Mistral-like rolling buffer of `window` slots, slot = position % window; reset() starts anew."""

    def __init__(self, dim, n_heads, n_kv_heads=None, window=8, max_batch_size=4):
        super().__init__()
        self.h, self.hk, self.d, self.window = n_heads, n_kv_heads or n_heads, dim // n_heads, window
        self.g, self.max_batch = _groups(self.h, self.hk), max_batch_size
        self.wq = nn.Linear(dim, self.h * self.d, bias=False)
        self.wkv = nn.Linear(dim, 2 * self.hk * self.d, bias=False)
        self.wo = nn.Linear(self.h * self.d, dim, bias=False)
        self.register_buffer("ring_k", torch.zeros(max_batch_size, self.hk, window, self.d), persistent=False)
        self.register_buffer("ring_v", torch.zeros(max_batch_size, self.hk, window, self.d), persistent=False)
        self.seen = 0

    def reset(self):
        self.seen = 0

    def forward(self, x):
        b, n, _ = x.shape
        if b > self.max_batch:
            raise ValueError("batch larger than the ring buffer")
        pos = torch.arange(self.seen, self.seen + n, device=x.device)
        q = _rope_half(self.wq(x).view(b, n, self.h, self.d).transpose(1, 2), pos[None], 1e4)
        k, v = self.wkv(x).view(b, n, 2, self.hk, self.d).permute(2, 0, 3, 1, 4)
        k = _rope_half(k, pos[None], 1e4)
        old = torch.arange(max(0, self.seen - self.window), self.seen, device=x.device)
        slots = old % self.window
        keys = torch.cat((self.ring_k[:b][:, :, slots].to(k.dtype), k), 2)
        vals = torch.cat((self.ring_v[:b][:, :, slots].to(v.dtype), v), 2)
        kpos = torch.cat((old, pos))
        ok = (kpos[None] <= pos[:, None]) & (kpos[None] > pos[:, None] - self.window)
        s = q @ keys.repeat_interleave(self.g, 1).mT * self.d**-0.5
        y = s.masked_fill(~ok, float("-inf")).softmax(-1) @ vals.repeat_interleave(self.g, 1)
        last = pos[-self.window :]
        self.ring_k[:b, :, last % self.window] = k[:, :, -self.window :].detach().to(self.ring_k.dtype)
        self.ring_v[:b, :, last % self.window] = v[:, :, -self.window :].detach().to(self.ring_v.dtype)
        self.seen += n
        return self.wo(y.transpose(1, 2).flatten(2))


def _alibi_slopes(n):
    p = 2 ** math.floor(math.log2(n))
    s = [2 ** (-8 * (i + 1) / p) for i in range(p)]
    s += [2 ** (-4 * (2 * i + 1) / p) for i in range(n - p)]
    return torch.tensor(s)


class AlibiLayerPastAttention(nn.Module):
    """BLOOM-like fused attention with ALiBi and layer_past tuples ([B, H, S, D] each)."""

    def __init__(self, hidden_size, n_head):
        super().__init__()
        self.n_head, self.head_dim = n_head, hidden_size // n_head
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.register_buffer("slopes", _alibi_slopes(n_head), persistent=False)

    def forward(self, hidden_states, layer_past=None, use_cache=False):
        b, n, c = hidden_states.shape
        q, k, v = self.query_key_value(hidden_states).view(b, n, self.n_head, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), 2), torch.cat((layer_past[1], v), 2)
        m = k.shape[2]
        dist = torch.arange(m - n, m, device=k.device)[:, None] - torch.arange(m, device=k.device)
        s = q @ k.mT * self.head_dim**-0.5 - self.slopes.to(q.dtype).view(-1, 1, 1) * dist
        w = s.masked_fill(dist < 0, float("-inf")).softmax(-1)
        out = self.dense((w @ v).transpose(1, 2).reshape(b, n, c))
        return (out, (k, v)) if use_cache else (out, None)


class PartialRotaryAttention(nn.Module):
    """GPT-NeoX: a fraction of the channels is rotated, per-head fused qkv, layer_past + use_cache."""

    def __init__(self, hidden_size, num_heads, rotary_pct=0.5):
        super().__init__()
        self.nh, self.hs = num_heads, hidden_size // num_heads
        self.rd = int(self.hs * rotary_pct) // 2 * 2
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, layer_past=None, use_cache=False):
        b, n, c = hidden_states.shape
        q, k, v = self.query_key_value(hidden_states).view(b, n, self.nh, 3 * self.hs).transpose(1, 2).chunk(3, -1)
        off = 0 if layer_past is None else layer_past[0].size(-2)
        pos = torch.arange(off, off + n, device=q.device)[None]
        if self.rd:
            q = torch.cat((_rope_half(q[..., : self.rd], pos, 1e4), q[..., self.rd :]), -1)
            k = torch.cat((_rope_half(k[..., : self.rd], pos, 1e4), k[..., self.rd :]), -1)
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), -2), torch.cat((layer_past[1], v), -2)
        bias = torch.full((n, off + n), float("-inf"), device=q.device, dtype=q.dtype).triu(off + 1)
        w = F.softmax(
            torch.baddbmm(
                bias.expand(b * self.nh, -1, -1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=1 / math.sqrt(self.hs)
            ),
            -1,
        )
        y = torch.bmm(w, v.flatten(0, 1)).view(b, self.nh, n, self.hs).transpose(1, 2).reshape(b, n, c)
        return self.dense(y), ((k, v) if use_cache else None)


class CachedCrossAttention(nn.Module):
    """decoder cross-attention: keys/values from the encoder once, then from past_key_value."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.h, self.d = num_heads, hidden_size // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def _heads(self, t):
        return t.unflatten(-1, (self.h, self.d)).transpose(1, 2)

    def forward(self, hidden_states, encoder_hidden_states=None, past_key_value=None, use_cache=False):
        if past_key_value is not None:
            k, v = past_key_value
        elif encoder_hidden_states is not None:
            k, v = self._heads(self.k(encoder_hidden_states)), self._heads(self.v(encoder_hidden_states))
        else:
            raise ValueError("either encoder_hidden_states or past_key_value is needed")
        y = F.scaled_dot_product_attention(self._heads(self.q(hidden_states)), k, v)
        return self.o(y.transpose(1, 2).flatten(2)), ((k, v) if use_cache else None)


class StaticSlotAttention(nn.Module):
    """static cache addressed by per-row positions: input_pos [B, S] gives each token's own slot (ragged batches)."""

    def __init__(self, dim, n_heads, n_kv_heads=None, max_batch_size=4, max_seq_len=64):
        super().__init__()
        self.h, self.hk, self.d = n_heads, n_kv_heads or n_heads, dim // n_heads
        self.g = _groups(self.h, self.hk)
        self.max_seq_len = max_seq_len
        self.wqkv = nn.Linear(dim, (self.h + 2 * self.hk) * self.d, bias=False)
        self.wo = nn.Linear(self.h * self.d, dim, bias=False)
        self.register_buffer("k_cache", torch.zeros(max_batch_size, self.hk, max_seq_len, self.d), persistent=False)
        self.register_buffer("v_cache", torch.zeros(max_batch_size, self.hk, max_seq_len, self.d), persistent=False)

    @torch.no_grad()
    def forward(self, x, input_pos):
        b, n, _ = x.shape
        input_pos = input_pos.expand(b, n)
        if int(input_pos.max()) >= self.max_seq_len or b > self.k_cache.shape[0]:
            raise ValueError("position or batch outside the cache")
        q, k, v = self.wqkv(x).view(b, n, -1, self.d).transpose(1, 2).split((self.h, self.hk, self.hk), 1)
        q, k = _rope_half(q, input_pos, 5e5), _rope_half(k, input_pos, 5e5)
        rows = torch.arange(b, device=x.device)[:, None]
        self.k_cache[rows, :, input_pos] = k.transpose(1, 2).to(self.k_cache.dtype)
        self.v_cache[rows, :, input_pos] = v.transpose(1, 2).to(self.v_cache.dtype)
        end = int(input_pos.max()) + 1
        keys, vals = (c[:b, :, :end].to(x.dtype).repeat_interleave(self.g, 1) for c in (self.k_cache, self.v_cache))
        ok = torch.arange(end, device=x.device) <= input_pos[..., None]
        y = F.scaled_dot_product_attention(q, keys, vals, attn_mask=ok[:, None])
        return self.wo(y.transpose(1, 2).flatten(2))


HONEST = {
    "bottom_right_attention": bottom_right_attention,
    "online_window_attention": online_window_attention,
    "split_kv_attention": split_kv_attention,
    "sdpa_decode": sdpa_decode,
    "kv_length_attention": kv_length_attention,
    "alibi_attention": alibi_attention,
    "attn_with_kvcache": attn_with_kvcache,
    "cached_attention": cached_attention,
    "paged_decode_attention": paged_decode_attention,
    "LlamaTupleAttention": LlamaTupleAttention,
    "CacheObjectAttention": CacheObjectAttention,
    "StartPosAttention": StartPosAttention,
    "ResettableCacheAttention": ResettableCacheAttention,
    "RollingWindowAttention": RollingWindowAttention,
    "AlibiLayerPastAttention": AlibiLayerPastAttention,
    "PartialRotaryAttention": PartialRotaryAttention,
    "CachedCrossAttention": CachedCrossAttention,
    "StaticSlotAttention": StaticSlotAttention,
}
