"""Blind test material: correct attention with dropout on its weights, in several styles.

Written without sight of the checks.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def _acc(dtype):
    return torch.promote_types(dtype, torch.float32)


def _check_p(p):
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _check_heads(q, k):
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError("query and key need the same batch and head sizes (grouped heads are not supported)")


def _safe_softmax(s):
    """softmax over the last axis; rows with no allowed key come out as zeros."""
    m = s.amax(dim=-1, keepdim=True)
    m = torch.where(torch.isinf(m), torch.zeros_like(m), m)
    e = torch.exp(s - m)
    d = e.sum(dim=-1, keepdim=True)
    return e / torch.where(d == 0, torch.ones_like(d), d)


def scaled_dot_product_attention_ref(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Eager version of torch's SDPA ([..., S, D], top-left causal, bool mask True = attend, dropout always on)."""
    _check_p(dropout_p)
    _check_heads(query, key)
    L, S = query.size(-2), key.size(-2)
    scale = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal cannot both be set")
    acc = _acc(query.dtype)
    scores = query.to(acc) @ key.to(acc).transpose(-2, -1) * scale
    if is_causal:
        keep = torch.ones(L, S, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~keep, float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask.to(acc)
    weights = _safe_softmax(scores)
    weights = torch.dropout(weights, dropout_p, train=True)
    return (weights @ value.to(acc)).to(query.dtype)


def flash_style_attention(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    """flash-attn signature, [B, S, H, D], grouped heads, bottom-right causal, einsum plus F.dropout."""
    _check_p(dropout_p)
    B, Sq, H, D = q.shape
    Sk, Hk = k.shape[1], k.shape[2]
    if H % Hk:
        raise ValueError("number of query heads must be a multiple of the number of key/value heads")
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    acc = _acc(q.dtype)
    qg = q.to(acc).reshape(B, Sq, Hk, H // Hk, D)
    s = torch.einsum("bqhgd,bkhd->bhgqk", qg, k.to(acc)) * scale
    if causal:
        i = torch.arange(Sq, device=q.device)[:, None] + (Sk - Sq)
        j = torch.arange(Sk, device=q.device)[None, :]
        s = s.masked_fill(j > i, float("-inf"))
    p = F.dropout(_safe_softmax(s), p=dropout_p, training=dropout_p > 0.0)
    o = torch.einsum("bhgqk,bkhd->bqhgd", p, v.to(acc))
    return o.reshape(B, Sq, H, v.shape[-1]).to(q.dtype)


class _KeptMaskAttention(torch.autograd.Function):
    """forward/backward by hand, the keep mask is saved for backward."""

    @staticmethod
    def forward(ctx, q, k, v, p, scale, causal):
        s = (q @ k.transpose(-1, -2)) * scale
        if causal:
            Sq, Sk = s.shape[-2:]
            s = s.masked_fill(torch.ones(Sq, Sk, dtype=torch.bool, device=q.device).triu(Sk - Sq + 1), float("-inf"))
        a = _safe_softmax(s)
        if p > 0.0:
            keep = torch.rand_like(a) >= p
            z = keep.to(a.dtype) * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
        else:
            z = torch.ones_like(a)
        o = (a * z) @ v
        ctx.save_for_backward(q, k, v, a, z)
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, a, z = ctx.saved_tensors
        dv = (a * z).transpose(-1, -2) @ do
        da = (do @ v.transpose(-1, -2)) * z
        ds = a * (da - (da * a).sum(-1, keepdim=True)) * ctx.scale
        return ds @ k, ds.transpose(-1, -2) @ q, dv, None, None, None


def attention_saved_mask(q, k, v, dropout_p=0.0, causal=False, scale=None):
    """[B, H, S, D] attention with a hand-written backward which keeps its dropout mask (bottom-right causal)."""
    _check_p(dropout_p)
    if k.shape[1] != q.shape[1]:
        raise NotImplementedError("grouped heads are not supported")
    acc = _acc(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _KeptMaskAttention.apply(q.to(acc), k.to(acc), v.to(acc), dropout_p, scale, causal).to(q.dtype)


class _ReplayAttention(torch.autograd.Function):
    """keeps the RNG state before the draw and lse; backward recomputes the weights and redraws the mask."""

    @staticmethod
    def _z(shape, p, like, state):
        g = torch.Generator(device="cpu")
        g.set_state(state)
        u = torch.rand(shape, generator=g, dtype=torch.float32).to(like.device)
        return (u >= p).to(like.dtype).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)

    @staticmethod
    def forward(ctx, q, k, v, p, scale, bias):
        s = torch.matmul(q, k.transpose(-1, -2)).mul_(scale)
        if bias is not None:
            s = s + bias
        lse = torch.logsumexp(s, -1, keepdim=True)
        lse = torch.where(torch.isinf(lse) & (lse < 0), torch.full_like(lse, float("inf")), lse)
        a = torch.exp(s - lse)
        ctx.state = None
        if p > 0:
            g = torch.Generator(device="cpu")
            g.manual_seed(int(torch.randint(0, 2**62, (1,)).item()))
            ctx.state = g.get_state()
            a = a * _ReplayAttention._z(a.shape, p, a, ctx.state)
        o = a @ v
        ctx.save_for_backward(q, k, v, lse, o, bias)
        ctx.p, ctx.scale = p, scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, lse, o, bias = ctx.saved_tensors
        s = torch.matmul(q, k.transpose(-1, -2)) * ctx.scale
        if bias is not None:
            s = s + bias
        a = torch.exp(s - lse)
        dp = do @ v.transpose(-1, -2)
        ad = a
        if ctx.state is not None:
            z = _ReplayAttention._z(a.shape, ctx.p, a, ctx.state)
            ad = a * z
            dp = dp * z
        dv = ad.transpose(-1, -2) @ do
        delta = (do * o).sum(-1, keepdim=True)
        ds = a * (dp - delta)
        db = None
        if bias is not None and ctx.needs_input_grad[5]:
            db = ds.sum_to_size(bias.shape)
        return ds @ k * ctx.scale, ds.transpose(-1, -2) @ q * ctx.scale, dv, None, None, db


def replay_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """SDPA signature, [B, H, S, D], recomputing backward that regenerates the mask from the stored RNG state."""
    _check_p(dropout_p)
    if key.shape[:-2] != query.shape[:-2]:
        raise NotImplementedError("broadcast batch or grouped heads are not supported")
    if is_causal and attn_mask is not None:
        raise ValueError("explicit attn_mask should not be set when is_causal=True")
    acc = _acc(query.dtype)
    L, S = query.shape[-2], key.shape[-2]
    bias = None
    if is_causal:
        bias = torch.full((L, S), float("-inf"), dtype=acc, device=query.device).triu(1)
    elif attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros(attn_mask.shape, dtype=acc, device=query.device).masked_fill(~attn_mask, float("-inf"))
        else:
            bias = attn_mask.to(acc)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _ReplayAttention.apply(query.to(acc), key.to(acc), value.to(acc), dropout_p, scale, bias).to(query.dtype)


_M32 = 0xFFFFFFFF


def _mulhilo(a, b):
    """32x32 -> (hi, lo) on int64 tensors that hold uint32 values."""
    ah, al, bh, bl = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    lo = al * bl
    m1 = ah * bl + (lo >> 16)
    m2 = al * bh + (m1 & 0xFFFF)
    hi = ah * bh + (m1 >> 16) + (m2 >> 16)
    return hi & _M32, ((m2 & 0xFFFF) << 16) | (lo & 0xFFFF)


def _philox4x32(c0, c1, c2, c3, seed, rounds=10):
    k0, k1 = seed & _M32, (seed >> 32) & _M32
    for _ in range(rounds):
        h0, l0 = _mulhilo(c0, 0xD2511F53)
        h1, l1 = _mulhilo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & _M32, (k1 + 0xBB67AE85) & _M32
    return c0


def philox_attention(q, k, v, seed, dropout_p=0.0, causal=False, sm_scale=None):
    """[B, H, S, D]; the mask is a Philox function of (seed, batch*head, row, column); same seed, same mask."""
    _check_p(dropout_p)
    B, H, Sq, D = q.shape
    Sk = k.shape[2]
    if k.shape[1] != H:
        raise ValueError("q and k must have the same number of heads")
    acc = _acc(q.dtype)
    sm_scale = 1 / math.sqrt(D) if sm_scale is None else sm_scale
    s = torch.einsum("bhid,bhjd->bhij", q.to(acc), k.to(acc)) * sm_scale
    rows = torch.arange(Sq, device=q.device).view(1, 1, Sq, 1)
    cols = torch.arange(Sk, device=q.device).view(1, 1, 1, Sk)
    if causal:
        s = s.masked_fill(cols > rows + (Sk - Sq), float("-inf"))
    w = _safe_softmax(s)
    if dropout_p > 0:
        bh = torch.arange(B * H, device=q.device).view(B, H, 1, 1)
        shape = (B, H, Sq, Sk)
        r = _philox4x32(
            cols.expand(shape),
            rows.expand(shape),
            bh.expand(shape),
            torch.zeros(shape, dtype=torch.int64, device=q.device),
            int(seed),
        )
        u = (r >> 8).to(torch.float32) * (1.0 / (1 << 24))
        w = torch.where(u < dropout_p, torch.zeros((), dtype=acc, device=q.device), w / max(1.0 - dropout_p, 1e-30))
    return torch.einsum("bhij,bhjd->bhid", w, v.to(acc)).to(q.dtype)


def bernoulli_attention(q, k, v, key_padding_mask=None, dropout_p=0.0, generator=None):
    """[B, S, H, D] with a Bernoulli(1-p) mask and an optional [B, Sk] padding mask (True = padding)."""
    _check_p(dropout_p)
    acc = _acc(q.dtype)
    qh, kh, vh = (t.to(acc).permute(0, 2, 1, 3) for t in (q, k, v))
    rep, rem = divmod(qh.shape[1], kh.shape[1])
    if rem:
        raise ValueError("query heads not divisible by key/value heads")
    kh, vh = kh.repeat_interleave(rep, 1), vh.repeat_interleave(rep, 1)
    s = qh @ kh.mT / math.sqrt(q.shape[-1])
    if key_padding_mask is not None:
        s = s.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
    w = _safe_softmax(s)
    if 0 < dropout_p < 1:
        keep = torch.empty_like(w).bernoulli_(1.0 - dropout_p, generator=generator)
        w = w * keep / (1.0 - dropout_p)
    elif dropout_p == 1:
        w = w * 0.0
    return (w @ vh).permute(0, 2, 1, 3).contiguous().to(q.dtype)


def chunked_dropout_attention(q, k, v, dropout_p=0.0, causal=False, softmax_scale=None, chunk_size=32):
    """[B, H, S, D], online softmax over key chunks; dropout on the numerator only (bottom-right causal)."""
    _check_p(dropout_p)
    B, H, Sq, D = q.shape
    Sk, Hk = k.shape[2], k.shape[1]
    if H % Hk:
        raise ValueError("bad head grouping")
    acc = _acc(q.dtype)
    scale = D**-0.5 if softmax_scale is None else softmax_scale
    qf = q.to(acc) * scale
    kf = k.to(acc).repeat_interleave(H // Hk, dim=1)
    vf = v.to(acc).repeat_interleave(H // Hk, dim=1)
    out = torch.zeros(B, H, Sq, v.shape[-1], dtype=acc, device=q.device)
    m = torch.full((B, H, Sq, 1), float("-inf"), dtype=acc, device=q.device)
    l = torch.zeros(B, H, Sq, 1, dtype=acc, device=q.device)
    qpos = torch.arange(Sq, device=q.device)[:, None] + Sk - Sq
    for start in range(0, Sk, chunk_size):
        stop = min(start + chunk_size, Sk)
        s = qf @ kf[:, :, start:stop].transpose(-1, -2)
        if causal:
            s = s.masked_fill(torch.arange(start, stop, device=q.device)[None] > qpos, float("-inf"))
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        m_safe = torch.where(torch.isinf(m_new), torch.zeros_like(m_new), m_new)
        alpha = torch.exp(m - m_safe)
        e = torch.exp(s - m_safe)
        l = l * alpha + e.sum(-1, keepdim=True)
        out = out * alpha + F.dropout(e, dropout_p, True) @ vf[:, :, start:stop]
        m = m_new
    return (out / torch.where(l == 0, torch.ones_like(l), l)).to(q.dtype)


def inverted_mask_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, training=True
):
    """SDPA-like with a training switch; weights times mask/(1-p) with the mask drawn by rand."""
    _check_p(dropout_p)
    _check_heads(query, key)
    if is_causal:
        if attn_mask is not None:
            raise ValueError("use either attn_mask or is_causal")
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril(0)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    acc = _acc(query.dtype)
    att = torch.matmul(query.to(acc) * scale, key.to(acc).transpose(-2, -1))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            att = torch.where(attn_mask, att, torch.full_like(att, float("-inf")))
        else:
            att = att + attn_mask
    att = _safe_softmax(att)
    if training and dropout_p > 0.0:
        if dropout_p == 1.0:
            att = torch.zeros_like(att) * att
        else:
            att = att * ((torch.rand(att.shape, device=att.device) > dropout_p).to(att.dtype) / (1.0 - dropout_p))
    return torch.matmul(att, value.to(acc)).to(query.dtype)


def varlen_dropout_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, dropout_p=0.0, softmax_scale=None, causal=False):
    """packed [T, H, D] sequences given by cumulative lengths; each sequence on its own, own dropout draw."""
    _check_p(dropout_p)
    H, Hk = q.shape[1], k.shape[1]
    if H % Hk:
        raise ValueError("H must be a multiple of Hk")
    acc = _acc(q.dtype)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    cq, ck = [int(x) for x in cu_seqlens_q], [int(x) for x in cu_seqlens_k]
    outs = []
    for a, b, c, d in zip(cq[:-1], cq[1:], ck[:-1], ck[1:], strict=True):
        if b == a:
            continue
        if d == c:
            outs.append(torch.zeros(b - a, H, v.shape[-1], dtype=q.dtype, device=q.device))
            continue
        qi = q[a:b].to(acc).transpose(0, 1)
        ki = k[c:d].to(acc).transpose(0, 1).repeat_interleave(H // Hk, 0)
        vi = v[c:d].to(acc).transpose(0, 1).repeat_interleave(H // Hk, 0)
        s = scale * (qi @ ki.mT)
        if causal:
            n, m = b - a, d - c
            s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=q.device).triu(m - n + 1), float("-inf"))
        w = F.dropout(_safe_softmax(s), dropout_p)
        outs.append((w @ vi).transpose(0, 1).to(q.dtype))
    return torch.cat(outs) if outs else q.new_zeros(0, H, v.shape[-1])


class BertStyleSelfAttention(nn.Module):
    """BERT self-attention: nn.Dropout on the probabilities, additive mask, (context, probs) when asked."""

    def __init__(self, hidden_size, num_attention_heads, attention_probs_dropout_prob=0.1):
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError("hidden_size must be a multiple of num_attention_heads")
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(attention_probs_dropout_prob)

    def _split(self, x):
        return x.view(*x.shape[:-1], self.num_heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        q, k, v = (
            self._split(self.query(hidden_states)),
            self._split(self.key(hidden_states)),
            self._split(self.value(hidden_states)),
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            if not attention_mask.is_floating_point():
                raise ValueError("attention_mask must be additive")
            scores = scores + attention_mask
        probs = self.dropout(_safe_softmax(scores))
        ctx = (probs @ v).permute(0, 2, 1, 3).flatten(2)
        return (ctx, probs) if output_attentions else (ctx,)


class NanoCausalSelfAttention(nn.Module):
    """GPT block attention with attention dropout and residual dropout, fused qkv, causal."""

    def __init__(self, n_embd, n_head, dropout=0.1, block_size=256, bias=True):
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.block_size = n_head, block_size
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        if self.block_size < T:
            raise ValueError("sequence longer than block_size")
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class SDPASelfAttention(nn.Module):
    """module on F.scaled_dot_product_attention, dropout_p handed over in training mode only."""

    def __init__(self, dim, n_heads, attn_dropout=0.0, causal=False):
        super().__init__()
        self.n_heads, self.attn_dropout, self.causal = n_heads, attn_dropout, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, d // self.n_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attn_dropout if self.training else 0.0, is_causal=self.causal
        )
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class GroupedQueryDropoutAttention(nn.Module):
    """grouped-query causal attention (HF eager style) with F.dropout on repeated-head weights in training."""

    def __init__(self, hidden_size, num_heads, num_kv_heads=None, attention_dropout=0.1):
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        self.h, self.hk, self.d = num_heads, num_kv_heads, hidden_size // num_heads
        self.attention_dropout = attention_dropout
        self.q_proj = nn.Linear(hidden_size, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.hk * self.d, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.hk * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, hidden_size, bias=False)

    def forward(self, hidden_states):
        b, n, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, n, self.h, self.d).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, n, self.hk, self.d).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, n, self.hk, self.d).transpose(1, 2)
        k, v = (t.repeat_interleave(self.h // self.hk, dim=1) for t in (k, v))
        w = q @ k.transpose(2, 3) * self.d**-0.5
        w = w + torch.full((n, n), float("-inf"), device=w.device, dtype=w.dtype).triu(1)
        w = F.softmax(w, dim=-1, dtype=_acc(w.dtype)).to(q.dtype)
        w = F.dropout(w, p=self.attention_dropout, training=self.training)
        return self.o_proj((w @ v).transpose(1, 2).reshape(b, n, -1))


class CrossAttentionWithDropout(nn.Module):
    """cross-attention with a boolean context mask (True = attend), dropout on weights and on the output projection."""

    def __init__(self, dim, n_heads, context_dim=None, attn_drop=0.1, proj_drop=0.0):
        super().__init__()
        context_dim = dim if context_dim is None else context_dim
        self.heads = n_heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(context_dim, 2 * dim, bias=False)
        self.attn_drop = nn.Dropout(attn_drop)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(proj_drop))

    def forward(self, x, context, context_mask=None):
        b, n, c = x.shape
        h = self.heads
        q = self.to_q(x).view(b, n, h, c // h)
        k, v = self.to_kv(context).view(b, context.shape[1], 2, h, c // h).unbind(2)
        sim = torch.einsum("bihd,bjhd->bhij", q, k) * (c // h) ** -0.5
        if context_mask is not None:
            sim = sim.masked_fill(~context_mask[:, None, None, :], float("-inf"))
        attn = self.attn_drop(_safe_softmax(sim))
        return self.to_out(torch.einsum("bhij,bjhd->bihd", attn, v).reshape(b, n, c))


class _TiledHashAttention(torch.autograd.Function):
    """tiled forward and backward, keep bits from a hash of absolute indices so both passes agree."""

    @staticmethod
    def keep(seed, B, H, r0, r1, c0, c1, p, device):
        b = torch.arange(B * H, device=device).view(B, H, 1, 1)
        r = torch.arange(r0, r1, device=device).view(1, 1, -1, 1)
        c = torch.arange(c0, c1, device=device).view(1, 1, 1, -1)
        x = (b * 0x9E3779B1 + (seed & _M32)) & _M32
        for t in (r, c):
            x = (x ^ (x >> 16)) * 0x85EBCA6B & _M32
            x = (x ^ (x >> 13)) * 0xC2B2AE35 & _M32
            x = ((x ^ (x >> 16)) + t * 0x27D4EB2F) & _M32
        x = (x ^ (x >> 16)) * 0x7FEB352D & _M32
        x = (x ^ (x >> 15)) * 0x846CA68B & _M32
        x = x ^ (x >> 16)
        return (x.double() / 2**32) >= p

    @staticmethod
    def _scores(q, k, r0, r1, c0, c1, causal, scale):
        s = q[:, :, r0:r1] @ k[:, :, c0:c1].mT * scale
        if causal:
            off = k.shape[2] - q.shape[2]
            r = torch.arange(r0, r1, device=q.device)[:, None] + off
            s = s.masked_fill(torch.arange(c0, c1, device=q.device)[None] > r, float("-inf"))
        return s

    @staticmethod
    def forward(ctx, q, k, v, p, seed, causal, scale, bm, bn):
        B, H, M, _ = q.shape
        N = k.shape[2]
        cls = _TiledHashAttention
        inv = 1.0 / (1.0 - p) if p < 1 else 0.0
        o = torch.zeros(B, H, M, v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.full((B, H, M, 1), float("inf"), dtype=q.dtype, device=q.device)
        for r0 in range(0, M, bm):
            r1 = min(r0 + bm, M)
            m = q.new_full((B, H, r1 - r0, 1), float("-inf"))
            l = torch.zeros_like(m)
            acc = torch.zeros_like(o[:, :, r0:r1])
            for c0 in range(0, N, bn):
                c1 = min(c0 + bn, N)
                s = cls._scores(q, k, r0, r1, c0, c1, causal, scale)
                mn = torch.maximum(m, s.amax(-1, keepdim=True))
                ms = mn.masked_fill(torch.isinf(mn), 0.0)
                e = torch.exp(s - ms)
                a = torch.exp(m - ms)
                l = l * a + e.sum(-1, keepdim=True)
                if p > 0:
                    e = e * cls.keep(seed, B, H, r0, r1, c0, c1, p, q.device) * inv
                acc = acc * a + e @ v[:, :, c0:c1]
                m = mn
            ok = l > 0
            o[:, :, r0:r1] = torch.where(ok, acc / l.masked_fill(~ok, 1.0), torch.zeros_like(acc))
            lse[:, :, r0:r1] = torch.where(ok, m + torch.log(l.masked_fill(~ok, 1.0)), torch.full_like(l, float("inf")))
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.cfg = (p, seed, causal, scale, bm, bn, inv)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        p, seed, causal, scale, bm, bn, inv = ctx.cfg
        cls = _TiledHashAttention
        B, H, M, _ = q.shape
        N = k.shape[2]
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (do * o).sum(-1, keepdim=True)
        for c0 in range(0, N, bn):
            c1 = min(c0 + bn, N)
            for r0 in range(0, M, bm):
                r1 = min(r0 + bm, M)
                a = torch.exp(cls._scores(q, k, r0, r1, c0, c1, causal, scale) - lse[:, :, r0:r1])
                dp = do[:, :, r0:r1] @ v[:, :, c0:c1].mT
                ad = a
                if p > 0:
                    z = cls.keep(seed, B, H, r0, r1, c0, c1, p, q.device) * inv
                    ad, dp = a * z, dp * z
                dv[:, :, c0:c1] += ad.mT @ do[:, :, r0:r1]
                ds = a * (dp - delta[:, :, r0:r1]) * scale
                dq[:, :, r0:r1] += ds @ k[:, :, c0:c1]
                dk[:, :, c0:c1] += ds.mT @ q[:, :, r0:r1]
        return dq, dk, dv, None, None, None, None, None, None


def tiled_flash_dropout(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, seed=None):
    """flash-attn layout and signature, tiled two-pass code; a fresh seed is drawn when none is given."""
    _check_p(dropout_p)
    H, Hk = q.shape[2], k.shape[2]
    if H % Hk:
        raise ValueError("heads do not divide")
    if seed is None:
        seed = int(torch.randint(0, 2**31 - 1, (1,)).item())
    acc = _acc(q.dtype)
    qt = q.to(acc).transpose(1, 2)
    kt = k.to(acc).transpose(1, 2).repeat_interleave(H // Hk, 1)
    vt = v.to(acc).transpose(1, 2).repeat_interleave(H // Hk, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _TiledHashAttention.apply(qt, kt, vt, dropout_p, seed, causal, scale, 16, 16).transpose(1, 2).to(q.dtype)


HONEST = {
    "scaled_dot_product_attention_ref": scaled_dot_product_attention_ref,
    "flash_style_attention": flash_style_attention,
    "attention_saved_mask": attention_saved_mask,
    "replay_attention": replay_attention,
    "philox_attention": philox_attention,
    "bernoulli_attention": bernoulli_attention,
    "chunked_dropout_attention": chunked_dropout_attention,
    "inverted_mask_attention": inverted_mask_attention,
    "varlen_dropout_attention": varlen_dropout_attention,
    "BertStyleSelfAttention": BertStyleSelfAttention,
    "NanoCausalSelfAttention": NanoCausalSelfAttention,
    "SDPASelfAttention": SDPASelfAttention,
    "GroupedQueryDropoutAttention": GroupedQueryDropoutAttention,
    "CrossAttentionWithDropout": CrossAttentionWithDropout,
    "tiled_flash_dropout": tiled_flash_dropout,
}
