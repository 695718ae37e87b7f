"""Attention layers in the styles of well-known model families (torch only)."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

# --------------------------------------------------------------------------- GPT family


@dataclass
class GPTConfig:
    block_size: int = 64
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    """nanoGPT-style causal self-attention with a fused c_attn and a block_size triangle buffer."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.register_buffer(
            "bias",
            torch.tril(torch.ones(config.block_size, config.block_size)).view(
                1, 1, config.block_size, config.block_size
            ),
        )

    def forward(self, x):
        B, T, C = x.size()
        if self.bias.size(-1) < T:
            raise ValueError(f"sequence of {T} tokens exceeds block_size {self.bias.size(-1)}")
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MinGPTAttention(nn.Module):
    """minGPT-style causal self-attention with separate key/query/value layers and layer_past."""

    def __init__(self, n_embd=32, n_head=4, block_size=64, attn_pdrop=0.0, resid_pdrop=0.0):
        super().__init__()
        assert n_embd % n_head == 0
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.attn_drop = nn.Dropout(attn_pdrop)
        self.resid_drop = nn.Dropout(resid_pdrop)
        self.proj = nn.Linear(n_embd, n_embd)
        mask = torch.tril(torch.ones(block_size, block_size, dtype=torch.bool))
        self.register_buffer("mask", mask, persistent=False)
        self.n_head = n_head

    def forward(self, x, layer_past=None):
        B, T, C = x.size()
        H = self.n_head
        k = self.key(x).view(B, T, H, C // H).transpose(1, 2)
        q = self.query(x).view(B, T, H, C // H).transpose(1, 2)
        v = self.value(x).view(B, T, H, C // H).transpose(1, 2)
        if layer_past is not None:
            k = torch.cat((layer_past[0], k), dim=-2)
            v = torch.cat((layer_past[1], v), dim=-2)
        present = (k, v)
        S = k.size(-2)
        if self.mask.size(0) < S:
            raise ValueError("past plus current tokens exceed block_size")
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(~self.mask[S - T : S, :S], float("-inf"))
        att = self.attn_drop(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).reshape(B, T, C)
        return self.resid_drop(self.proj(y)), present


class Conv1D(nn.Module):
    """x @ weight + bias with weight stored as [in, out]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Attention(nn.Module):
    """Hugging Face GPT-2 style causal attention; attention_mask [B, S] has 1 for real tokens; returns (out, weights)."""

    def __init__(self, hidden_size=32, num_attention_heads=4, max_position_embeddings=128, attn_pdrop=0.0):
        super().__init__()
        if hidden_size % num_attention_heads:
            raise ValueError("hidden_size must be divisible by num_attention_heads")
        self.embed_dim = hidden_size
        self.num_heads = num_attention_heads
        self.head_dim = hidden_size // num_attention_heads
        self.c_attn = Conv1D(3 * hidden_size, hidden_size)
        self.c_proj = Conv1D(hidden_size, hidden_size)
        self.attn_dropout = nn.Dropout(attn_pdrop)
        n = max_position_embeddings
        self.register_buffer("bias", torch.tril(torch.ones(n, n, dtype=torch.bool)).view(1, 1, n, n), persistent=False)

    def _split_heads(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).permute(0, 2, 1, 3)

    def _merge_heads(self, t):
        t = t.permute(0, 2, 1, 3).contiguous()
        return t.view(t.size(0), t.size(1), self.embed_dim)

    def forward(self, hidden_states, attention_mask=None):
        query, key, value = self.c_attn(hidden_states).split(self.embed_dim, dim=2)
        query, key, value = map(self._split_heads, (query, key, value))
        n = key.size(-2)
        if n > self.bias.size(-1):
            raise ValueError("sequence longer than max_position_embeddings")
        w = torch.matmul(query, key.transpose(-1, -2)) / (self.head_dim**0.5)
        keep = self.bias[:, :, :n, :n]
        if attention_mask is not None:
            need_padding_mask(attention_mask)
            keep = keep & (attention_mask[:, None, None, :] != 0)
        w = w.masked_fill(~keep, torch.finfo(w.dtype).min)
        w = F.softmax(w, dim=-1)
        w = self.attn_dropout(w)
        return self.c_proj(self._merge_heads(torch.matmul(w, value))), w


# --------------------------------------------------------------------------- rotary family


def rope_angles(positions, dim, theta):
    """Angles [..., dim / 2] in double, whatever the model's dtype."""
    inv = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)
    return positions.double()[..., None] * inv


def need_padding_mask(mask):
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be [batch, tokens], got {tuple(mask.shape)}")


def need_additive_mask(mask):
    if not mask.is_floating_point():
        raise TypeError(f"an additive floating-point mask is expected, got {mask.dtype}")


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def repeat_kv(x, n_rep):
    b, h, s, d = x.shape
    if n_rep == 1:
        return x
    return x[:, :, None].expand(b, h, n_rep, s, d).reshape(b, h * n_rep, s, d)


@dataclass
class LlamaConfig:
    hidden_size: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rope_theta: float = 10000.0
    attention_bias: bool = False
    attention_dropout: float = 0.0


class LlamaAttention(nn.Module):
    """Llama-style causal grouped-query attention with half-split rotary; attention_mask [B, S] has 1 for real tokens."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.n_rep = self.num_heads // self.num_key_value_heads
        self.dropout = config.attention_dropout
        b = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=b)
        self.k_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=b)
        self.v_proj = nn.Linear(config.hidden_size, self.num_key_value_heads * self.head_dim, bias=b)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=b)
        self.rope_theta = config.rope_theta

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, -1, self.head_dim).transpose(1, 2)
        if position_ids is None:
            position_ids = torch.arange(q_len, device=hidden_states.device)[None]
        ang = rope_angles(position_ids[:, None, :], self.head_dim, self.rope_theta)
        ang = torch.cat((ang, ang), dim=-1)
        cos, sin = ang.cos().to(q.dtype), ang.sin().to(q.dtype)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k, v = repeat_kv(k, self.n_rep), repeat_kv(v, self.n_rep)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        keep = torch.ones(q_len, q_len, dtype=torch.bool, device=q.device).tril()[None, None]
        if attention_mask is not None:
            need_padding_mask(attention_mask)
            keep = keep & attention_mask[:, None, None, :].bool()
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        p = F.softmax(scores, dim=-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(q.dtype)
        p = F.dropout(p, p=self.dropout, training=self.training)
        out = torch.matmul(p, v).transpose(1, 2).reshape(bsz, q_len, -1)
        return self.o_proj(out), p


class MetaAttention(nn.Module):
    """Llama-reference-style attention with interleaved complex rotary and an explicit cache returned to the caller."""

    def __init__(self, dim=32, n_heads=4, n_kv_heads=None, theta=10000.0):
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.theta = theta

    def _freqs_cis(self, start, end, device, dtype):
        real = torch.float64 if dtype == torch.float64 else torch.float32
        f = 1.0 / (self.theta ** (torch.arange(0, self.head_dim, 2, device=device).to(real) / self.head_dim))
        a = torch.outer(torch.arange(start, end, device=device).to(real), f)
        return torch.polar(torch.ones_like(a), a)

    @staticmethod
    def _rot(x, cis):
        real = torch.float64 if x.dtype == torch.float64 else torch.float32
        z = torch.view_as_complex(x.to(real).reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * cis[None, :, None, :]).flatten(3).to(x.dtype)

    def forward(self, x, cache: tuple[Tensor, Tensor] | None = None):
        bsz, seqlen, _ = x.shape
        past = 0 if cache is None else cache[0].size(1)
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        cis = self._freqs_cis(past, past + seqlen, x.device, x.dtype)
        xq, xk = self._rot(xq, cis), self._rot(xk, cis)
        if cache is not None:
            xk = torch.cat([cache[0], xk], dim=1)
            xv = torch.cat([cache[1], xv], dim=1)
        new_cache = (xk, xv)
        rep = self.n_heads // self.n_kv_heads
        keys = xk.repeat_interleave(rep, dim=2).transpose(1, 2)
        values = xv.repeat_interleave(rep, dim=2).transpose(1, 2)
        scores = xq.transpose(1, 2) @ keys.transpose(2, 3) / math.sqrt(self.head_dim)
        m = torch.full((seqlen, past + seqlen), float("-inf"), device=x.device, dtype=scores.dtype)
        scores = scores + torch.triu(m, diagonal=past + 1)
        out = scores.softmax(dim=-1) @ values
        return self.wo(out.transpose(1, 2).contiguous().view(bsz, seqlen, -1)), new_cache


class NeoXAttention(nn.Module):
    """GPT-NeoX-style attention: per-head fused query_key_value, rotary on the first rotary_pct of each head, causal."""

    def __init__(self, hidden_size=32, num_heads=4, rotary_pct=0.5, base=10000):
        super().__init__()
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.rotary_ndims = int(self.head_size * rotary_pct)
        if self.rotary_ndims % 2:
            raise ValueError("the rotary part must have an even width")
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.base = base

    def _rotary(self, t):
        f = rope_angles(torch.arange(t.size(-2), device=t.device), self.rotary_ndims, self.base)
        f = torch.cat([f, f], -1)
        rot, rest = t[..., : self.rotary_ndims], t[..., self.rotary_ndims :]
        rot = rot * f.cos().to(t.dtype) + rotate_half(rot) * f.sin().to(t.dtype)
        return torch.cat([rot, rest], -1)

    def forward(self, hidden_states, attention_mask=None):
        B, S, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(B, S, self.num_heads, 3 * self.head_size)
        q, k, v = (t.transpose(1, 2) for t in qkv.split(self.head_size, dim=-1))
        q, k = self._rotary(q), self._rotary(k)
        s = torch.einsum("bhid,bhjd->bhij", q, k) * self.head_size**-0.5
        i = torch.arange(S, device=s.device)
        hidden = i[None, :] > i[:, None]
        s = s.masked_fill(hidden, torch.finfo(s.dtype).min)
        if attention_mask is not None:
            # boolean, True = may be attended, [B, S]
            need_padding_mask(attention_mask)
            s = s.masked_fill(~attention_mask.bool()[:, None, None, :], torch.finfo(s.dtype).min)
        o = torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)
        return self.dense(o.transpose(1, 2).flatten(2))


class MistralAttention(nn.Module):
    """Mistral-style causal grouped-query attention in which each token sees itself and the sliding_window - 1 before it."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, sliding_window=4, rope_theta=10000.0):
        super().__init__()
        self.h, self.kvh, self.d = num_heads, num_kv_heads, hidden_size // num_heads
        self.window = sliding_window
        self.theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.kvh * self.d, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.kvh * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, hidden_size, bias=False)

    def forward(self, x):
        B, S, _ = x.shape
        q = self.q_proj(x).view(B, S, self.h, self.d)
        k = self.k_proj(x).view(B, S, self.kvh, self.d)
        v = self.v_proj(x).view(B, S, self.kvh, self.d)
        a = rope_angles(torch.arange(S, device=x.device), self.d, self.theta)
        a = torch.cat([a, a], -1)[:, None, :]
        cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        g = self.h // self.kvh
        q = q.view(B, S, self.kvh, g, self.d)
        s = torch.einsum("bikgd,bjkd->bkgij", q, k) / self.d**0.5
        diff = torch.arange(S, device=x.device)[:, None] - torch.arange(S, device=x.device)[None, :]
        ok = (diff >= 0) & (diff < self.window)
        p = s.masked_fill(~ok, float("-inf")).softmax(-1)
        o = torch.einsum("bkgij,bjkd->bikgd", p, v).reshape(B, S, self.h * self.d)
        return self.o_proj(o)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a plain weight."""

    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class GemmaAttention(nn.Module):
    """Gemma-style causal attention: query_pre_attn_scalar, q/k norms with (1 + w), logit softcap before the mask."""

    def __init__(
        self,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=1,
        head_dim=8,
        query_pre_attn_scalar=None,
        attn_logit_softcapping=None,
    ):
        super().__init__()
        self.h, self.kv, self.d = num_heads, num_kv_heads, head_dim
        self.scaling = (query_pre_attn_scalar or head_dim) ** -0.5
        self.softcap = attn_logit_softcapping
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = nn.Parameter(torch.zeros(head_dim))
        self.k_norm = nn.Parameter(torch.zeros(head_dim))

    @staticmethod
    def _norm(x, w):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1.0 + w)

    def forward(self, hidden_states, attention_mask=None):
        b, n, _ = hidden_states.shape
        q = self._norm(self.q_proj(hidden_states).view(b, n, self.h, self.d), self.q_norm).transpose(1, 2)
        k = self._norm(self.k_proj(hidden_states).view(b, n, self.kv, self.d), self.k_norm).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, n, self.kv, self.d).transpose(1, 2)
        k, v = repeat_kv(k, self.h // self.kv), repeat_kv(v, self.h // self.kv)
        w = torch.matmul(q, k.transpose(-1, -2)) * self.scaling
        if self.softcap is not None:
            w = torch.tanh(w / self.softcap) * self.softcap
        blocked = torch.ones(n, n, dtype=torch.bool, device=w.device).triu(1)
        w = w.masked_fill(blocked, torch.finfo(w.dtype).min)
        if attention_mask is not None:
            need_padding_mask(attention_mask)
            w = w.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(w.dtype).min)
        w = F.softmax(w, dim=-1)
        return self.o_proj(torch.matmul(w, v).transpose(1, 2).reshape(b, n, -1))


class Qwen3Attention(nn.Module):
    """Qwen3-style causal attention: per-head RMS q_norm/k_norm before half rotary, head_dim free of hidden_size, SDPA."""

    def __init__(self, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rope_theta=1e6):
        super().__init__()
        self.head_dim, self.theta = head_dim, rope_theta
        self.groups = num_attention_heads // num_key_value_heads
        self.q_proj = nn.Linear(hidden_size, num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_attention_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        n = hidden_states.size(1)
        ang = rope_angles(torch.arange(n, device=q.device), self.head_dim, self.theta)
        ang = torch.cat([ang, ang], -1)
        cos, sin = ang.cos().to(q.dtype), ang.sin().to(q.dtype)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        k = torch.repeat_interleave(k, self.groups, dim=1)
        v = torch.repeat_interleave(v, self.groups, dim=1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


# --------------------------------------------------------------------------- position biases


class T5Attention(nn.Module):
    """T5-style attention: unscaled logits, bucketed relative position bias, key_value_states, additive mask; returns (out, position_bias)."""

    def __init__(self, d_model=32, d_kv=8, num_heads=4, num_buckets=32, max_distance=128, is_decoder=False):
        super().__init__()
        self.is_decoder = is_decoder
        self.n_heads, self.d_kv = num_heads, d_kv
        self.num_buckets, self.max_distance = num_buckets, max_distance
        inner = num_heads * d_kv
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def _bucket(self, rel):
        num_buckets, out = self.num_buckets, torch.zeros_like(rel)
        if not self.is_decoder:
            num_buckets //= 2
            out = out + (rel > 0).long() * num_buckets
            rel = rel.abs()
        else:
            rel = -torch.min(rel, torch.zeros_like(rel))
        exact = num_buckets // 2
        large = (
            exact
            + (
                torch.log(rel.clamp(min=1).float() / exact)
                / math.log(self.max_distance / exact)
                * (num_buckets - exact)
            ).long()
        )
        large = large.clamp(max=num_buckets - 1)
        return out + torch.where(rel < exact, rel, large)

    def compute_bias(self, q_len, k_len):
        dev = self.relative_attention_bias.weight.device
        rel = torch.arange(k_len, device=dev)[None, :] - torch.arange(q_len, device=dev)[:, None]
        return self.relative_attention_bias(self._bucket(rel)).permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden_states, mask=None, key_value_states=None, position_bias=None):
        b, n, _ = hidden_states.shape
        src = hidden_states if key_value_states is None else key_value_states
        m = src.size(1)
        q = self.q(hidden_states).view(b, n, self.n_heads, self.d_kv).transpose(1, 2)
        k = self.k(src).view(b, m, self.n_heads, self.d_kv).transpose(1, 2)
        v = self.v(src).view(b, m, self.n_heads, self.d_kv).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(3, 2))
        if position_bias is None:
            position_bias = self.compute_bias(n, m)
        scores = scores + position_bias
        if mask is not None:
            need_additive_mask(mask)
            scores = scores + mask
        if self.is_decoder and key_value_states is None:
            future = torch.ones(n, m, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, torch.finfo(scores.dtype).min)
        w = F.softmax(scores, dim=-1)
        o = torch.matmul(w, v).transpose(1, 2).contiguous().view(b, n, -1)
        return self.o(o), position_bias


def alibi_slopes(n):
    def pow2(m):
        start = 2.0 ** (-(2.0 ** -(math.log2(m) - 3)))
        return [start * start**i for i in range(m)]

    if math.log2(n).is_integer():
        return pow2(n)
    c = 2 ** math.floor(math.log2(n))
    return pow2(c) + alibi_slopes(2 * c)[0::2][: n - c]


class AlibiAttention(nn.Module):
    """Causal multi-head attention with ALiBi distance penalties (any number of heads); padding_mask True = padded."""

    def __init__(self, embed_dim=36, num_heads=6, bias=True):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.slopes = alibi_slopes(num_heads)

    def forward(self, x, padding_mask=None):
        b, t, c = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        logits = torch.matmul(q * self.head_dim**-0.5, k.mT)
        pos = torch.arange(t, device=x.device)
        dist = pos[None, :] - pos[:, None]
        slopes = torch.tensor(self.slopes, device=x.device, dtype=torch.float64)
        logits = logits + (slopes[:, None, None] * dist).to(logits.dtype)
        logits = logits.masked_fill(dist > 0, torch.finfo(logits.dtype).min)
        if padding_mask is not None:
            logits = logits.masked_fill(padding_mask[:, None, None, :], torch.finfo(logits.dtype).min)
        y = logits.softmax(-1).matmul(v)
        return self.out_proj(y.permute(0, 2, 1, 3).reshape(b, t, c))


class WindowAttention(nn.Module):
    """Swin-style window attention [num_windows*B, N, C] with a relative position bias table and shift mask [num_windows, N, N]."""

    def __init__(self, dim=32, window_size=(3, 2), num_heads=4, qkv_bias=True, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        wh, ww = window_size
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * wh - 1) * (2 * ww - 1), num_heads) * 0.5)
        coords = torch.stack(torch.meshgrid(torch.arange(wh), torch.arange(ww), indexing="ij")).flatten(1)
        rel = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        rel[:, :, 0] += wh - 1
        rel[:, :, 1] += ww - 1
        rel[:, :, 0] *= 2 * ww - 1
        self.register_buffer("relative_position_index", rel.sum(-1))
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        if self.relative_position_index.size(0) != N:
            raise ValueError("x must hold exactly one window of tokens per row")
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        if mask is not None:
            need_additive_mask(mask)
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj_drop(self.proj(x))


# --------------------------------------------------------------------------- encoders


class ViTAttention(nn.Module):
    """timm-style ViT self-attention: fused qkv, optional q/k LayerNorm, no mask."""

    def __init__(self, dim=32, num_heads=8, qkv_bias=False, qk_norm=False, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        assert dim % num_heads == 0, "dim should be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class DetrAttention(nn.Module):
    """DETR-style attention on separate query, key, value; boolean masks are True where hidden, float attn_mask is added; returns (out, head-mean weights)."""

    def __init__(self, embed_dim=32, num_heads=4, dropout=0.0, bias=True):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def _shape(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
        q = self._shape(self.q_proj(query)) * self.head_dim**-0.5
        k = self._shape(self.k_proj(key))
        v = self._shape(self.v_proj(value))
        logits = q @ k.transpose(-1, -2)
        low = torch.finfo(logits.dtype).min
        if attn_mask is not None:
            if attn_mask.dim() == 3:  # [B * heads, L, S]
                attn_mask = attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:])
            if attn_mask.dtype == torch.bool:
                logits = logits.masked_fill(attn_mask, low)
            else:
                logits = logits + attn_mask
        if key_padding_mask is not None:
            logits = logits.masked_fill(key_padding_mask.bool()[:, None, None, :], low)
        w = logits.softmax(-1)
        p = F.dropout(w, self.dropout, self.training)
        o = (p @ v).transpose(1, 2).flatten(2)
        return self.out_proj(o), w.mean(dim=1)


class WhisperAttention(nn.Module):
    """Whisper-style attention: d**-0.25 on q and on k, no key bias, optional xa, additive [T, T] mask; returns (out, detached qk logits)."""

    def __init__(self, n_state=32, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None):
        q = self.query(x)
        k = self.key(x if xa is None else xa)
        v = self.value(x if xa is None else xa)
        wv, qk = self.qkv_attention(q, k, v, mask)
        return self.out(wv), qk

    def qkv_attention(self, q, k, v, mask=None):
        n_batch, n_ctx, n_state = q.shape
        scale = (n_state // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            need_additive_mask(mask)
            qk = qk + mask[:n_ctx, :n_ctx]
        w = F.softmax(qk, dim=-1).to(q.dtype)
        return (w @ v).permute(0, 2, 1, 3).flatten(start_dim=2), qk.detach()


@dataclass
class BertConfig:
    hidden_size: int = 32
    num_attention_heads: int = 4
    attention_probs_dropout_prob: float = 0.1


class BertSelfAttention(nn.Module):
    """BERT-style self-attention core (no output layer) taking the extended additive mask [B, 1, 1, S] and output_attentions."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def transpose_for_scores(self, x):
        x = x.view(x.size()[:-1] + (self.num_attention_heads, self.attention_head_size))
        return x.permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        scores = scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            need_additive_mask(attention_mask)
            if attention_mask.dim() != 4:
                raise ValueError("attention_mask must be the extended mask [batch, 1, 1 or query, key]")
            scores = scores + attention_mask
        probs = self.dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(probs, value_layer).permute(0, 2, 1, 3).contiguous()
        context = context.view(context.size()[:-2] + (self.all_head_size,))
        return (context, probs) if output_attentions else (context,)


class AnnotatedMultiHeadedAttention(nn.Module):
    """Annotated-Transformer-style attention on query, key, value; mask [B, 1 or Q, K] has 0 where hidden."""

    def __init__(self, h=4, d_model=32, dropout=0.1):
        super().__init__()
        assert d_model % h == 0
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        self.attn = scores.softmax(dim=-1)
        x = torch.matmul(self.dropout(self.attn), value)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class TorchStyleEncoderAttention(nn.Module):
    """Self-attention with bare in_proj/out_proj parameters; src_mask and src_key_padding_mask as booleans True = hidden; no-key rows give zeros before the output layer."""

    def __init__(self, d_model=32, nhead=4):
        super().__init__()
        self.nhead = nhead
        self.in_proj_weight = nn.Parameter(torch.empty(3 * d_model, d_model))
        self.in_proj_bias = nn.Parameter(torch.randn(3 * d_model) * 0.1)
        self.out_w = nn.Parameter(torch.empty(d_model, d_model))
        self.out_b = nn.Parameter(torch.randn(d_model) * 0.1)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_w)

    def forward(self, src, src_mask=None, src_key_padding_mask=None):
        B, S, E = src.shape
        q, k, v = F.linear(src, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (t.reshape(B, S, self.nhead, E // self.nhead).transpose(1, 2) for t in (q, k, v))
        hidden = torch.zeros(B, 1, S, S, dtype=torch.bool, device=src.device)
        if src_mask is not None:
            hidden = hidden | src_mask
        if src_key_padding_mask is not None:
            hidden = hidden | src_key_padding_mask[:, None, None, :]
        s = (q @ k.mT) / math.sqrt(E // self.nhead)
        s = s.masked_fill(hidden, torch.finfo(s.dtype).min)
        a = s.softmax(-1).masked_fill(hidden, 0.0)
        y = (a @ v).transpose(1, 2).reshape(B, S, E)
        return F.linear(y, self.out_w, self.out_b)


# --------------------------------------------------------------------------- cross-attention and images


class PerceiverCrossAttention(nn.Module):
    """Perceiver-style cross-attention of latents over a context of another width; mask [B, M] is True where the context is valid."""

    def __init__(self, query_dim=32, context_dim=20, heads=4, dim_head=8):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_kv = nn.Linear(context_dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, x, context, mask=None):
        h = self.heads
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)

        def fold(t):  # b n (h d) -> (b h) n d
            b, n, hd = t.shape
            return t.reshape(b, n, h, hd // h).transpose(1, 2).reshape(b * h, n, hd // h)

        q, k, v = fold(q), fold(k), fold(v)
        sim = torch.einsum("bid,bjd->bij", q, k) * self.scale
        if mask is not None:
            m = mask.reshape(mask.size(0), 1, -1).repeat_interleave(h, dim=0)
            sim = sim.masked_fill(~m, -torch.finfo(sim.dtype).max)
        out = torch.einsum("bij,bjd->bid", sim.softmax(dim=-1), v)
        bh, n, d = out.shape
        out = out.view(bh // h, h, n, d).transpose(1, 2).reshape(bh // h, n, h * d)
        return self.to_out(out)


class CrossAttention(nn.Module):
    """Stable-diffusion-style attention: context=None means self-attention; mask [B, M] True = keep; to_out holds a dropout."""

    def __init__(self, query_dim=32, context_dim=None, heads=8, dim_head=4, dropout=0.0):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = query_dim if context_dim is None else context_dim
        self.scale, self.heads = dim_head**-0.5, heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, mask=None):
        context = x if context is None else context
        b, n, _ = x.shape
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).movedim(2, 1)
        k = self.to_k(context).unflatten(-1, (self.heads, -1)).movedim(2, 1)
        v = self.to_v(context).unflatten(-1, (self.heads, -1)).movedim(2, 1)
        if mask is not None:
            if mask.dtype != torch.bool or mask.dim() != 2:
                raise TypeError("mask must be boolean [batch, context tokens]")
            mask = mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return self.to_out(out.movedim(1, 2).flatten(-2))


class SpatialAttnBlock(nn.Module):
    """VAE-style single-head attention over the pixels of [B, C, H, W] with GroupNorm and a residual."""

    def __init__(self, in_channels=32, num_groups=8):
        super().__init__()
        self.norm = nn.GroupNorm(num_groups, in_channels, eps=1e-6)
        self.q = nn.Conv2d(in_channels, in_channels, 1)
        self.k = nn.Conv2d(in_channels, in_channels, 1)
        self.v = nn.Conv2d(in_channels, in_channels, 1)
        self.proj_out = nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x):
        h_ = self.norm(x)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k = k.reshape(b, c, h * w)
        w_ = torch.bmm(q, k) * (int(c) ** -0.5)
        w_ = F.softmax(w_, dim=2)
        v = v.reshape(b, c, h * w)
        h_ = torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w)
        return x + self.proj_out(h_)


class ImageMultiHeadAttention(nn.Module):
    """Multi-head attention over the pixels of [B, C, H, W] with bias-free 1x1 convolutions and no residual."""

    def __init__(self, dim=32, heads=4, dim_head=8):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Conv2d(dim, heads * dim_head * 3, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in self.to_qkv(x).chunk(3, dim=1))
        sim = torch.einsum("bhdi,bhdj->bhij", q * self.scale, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("bhij,bhdj->bhdi", sim.softmax(dim=-1), v)
        return self.to_out(out.reshape(b, -1, h, w))


class ConvMultiHeadAttention(nn.Module):
    """Speech-style attention on [B, C, T] with Conv1d projections, separate context c and a 0/1 attn_mask [B, 1, T, S]."""

    def __init__(self, channels=32, out_channels=32, n_heads=4, p_dropout=0.0):
        super().__init__()
        self.n_heads, self.k_channels = n_heads, channels // n_heads
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, out_channels, 1)
        self.drop = nn.Dropout(p_dropout)

    def forward(self, x, c, attn_mask=None):
        q, k, v = self.conv_q(x), self.conv_k(c), self.conv_v(c)
        b, d, t_s, t_t = *k.size(), q.size(2)
        q = q.view(b, self.n_heads, self.k_channels, t_t).transpose(2, 3)
        k = k.view(b, self.n_heads, self.k_channels, t_s).transpose(2, 3)
        v = v.view(b, self.n_heads, self.k_channels, t_s).transpose(2, 3)
        scores = torch.matmul(q / math.sqrt(self.k_channels), k.transpose(-2, -1))
        if attn_mask is not None:
            scores = scores.masked_fill(attn_mask == 0, -1e9)
        p = self.drop(F.softmax(scores, dim=-1))
        out = torch.matmul(p, v).transpose(2, 3).contiguous().view(b, d, t_t)
        return self.conv_o(out)


class MemoryAttention(nn.Module):
    """Encoder-decoder attention with a fused kv layer; memory_lengths [B] gives the valid memory tokens; returns a dict."""

    def __init__(self, d_model=32, d_memory=24, n_heads=4):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_kv = nn.Linear(d_memory, 2 * d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, tgt, memory, memory_lengths=None):
        B, T, _ = tgt.shape
        S = memory.shape[1]
        q = self.w_q(tgt).reshape(B, T, self.n_heads, self.d_head)
        kv = self.w_kv(memory).reshape(B, S, 2, self.n_heads, self.d_head)
        e = torch.einsum("bthd,bshd->bhts", q, kv[:, :, 0]) / math.sqrt(self.d_head)
        if memory_lengths is not None:
            pad = torch.arange(S, device=e.device)[None, :] >= memory_lengths[:, None]
            e = e.masked_fill(pad[:, None, None, :], torch.finfo(e.dtype).min)
        a = torch.softmax(e, -1)
        y = torch.einsum("bhts,bshd->bthd", a, kv[:, :, 1]).reshape(B, T, -1)
        return {"output": self.w_o(y), "attention": a}


# --------------------------------------------------------------------------- other layouts and styles


class MultiQueryAttention(nn.Module):
    """Causal multi-query attention (one shared key/value head) with a fused c_attn of width d + 2*head_dim."""

    def __init__(self, d_model=32, n_head=4):
        super().__init__()
        self.n_head, self.d_head, self.d_model = n_head, d_model // n_head, d_model
        self.c_attn = nn.Linear(d_model, d_model + 2 * self.d_head)
        self.c_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.c_attn(x).split([self.d_model, self.d_head, self.d_head], dim=-1)
        q = q.reshape(b, t * self.n_head, self.d_head)
        s = torch.bmm(q, k.transpose(1, 2)).view(b, t, self.n_head, t) * self.d_head**-0.5
        tri = torch.tril(torch.ones(t, t, dtype=torch.bool, device=x.device))[None, :, None, :]
        p = torch.where(tri, s, torch.full_like(s, -math.inf)).softmax(-1)
        o = torch.bmm(p.reshape(b, t * self.n_head, t), v).view(b, t, self.d_model)
        return self.c_proj(o)


class EinsumAttention(nn.Module):
    """Flax-style attention with per-head kernels [D, H, K] and [H, K, D]; inputs_q, inputs_kv; mask [B, 1, Q, K] True = keep."""

    def __init__(self, features=32, num_heads=4, head_dim=8):
        super().__init__()

        def p(*s):
            return nn.Parameter(torch.randn(*s) * features**-0.5)

        self.wq, self.wk, self.wv = (p(features, num_heads, head_dim) for _ in range(3))
        self.bq, self.bk, self.bv = (nn.Parameter(0.1 * torch.randn(num_heads, head_dim)) for _ in range(3))
        self.wo = p(num_heads, head_dim, features)
        self.bo = nn.Parameter(torch.zeros(features))

    def forward(self, inputs_q, inputs_kv=None, mask=None):
        inputs_kv = inputs_q if inputs_kv is None else inputs_kv
        q = torch.einsum("...qd,dhk->...qhk", inputs_q, self.wq) + self.bq
        k = torch.einsum("...td,dhk->...thk", inputs_kv, self.wk) + self.bk
        v = torch.einsum("...td,dhk->...thk", inputs_kv, self.wv) + self.bv
        logits = torch.einsum("...qhk,...thk->...hqt", q / q.shape[-1] ** 0.5, k)
        if mask is not None:
            logits = torch.where(mask, logits, torch.finfo(logits.dtype).min)
        w = torch.softmax(logits, dim=-1)
        ctx = torch.einsum("...hqt,...thk->...qhk", w, v)
        return torch.einsum("...qhk,hkd->...qd", ctx, self.wo) + self.bo


class FairseqAttention(nn.Module):
    """Fairseq-style [T, B, C] attention by baddbmm; additive attn_mask [T, S], key_padding_mask True = pad; returns (out, mean weights)."""

    def __init__(self, embed_dim=32, num_heads=4, kdim=None, vdim=None, bias=True):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias=bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
        T, B, C = query.shape
        S = key.size(0)
        q = self.q_proj(query).contiguous().view(T, B * self.num_heads, self.head_dim).transpose(0, 1)
        k = self.k_proj(key).contiguous().view(S, B * self.num_heads, self.head_dim).transpose(0, 1)
        v = self.v_proj(value).contiguous().view(S, B * self.num_heads, self.head_dim).transpose(0, 1)
        if attn_mask is not None:
            need_additive_mask(attn_mask)
        base = q.new_zeros(T, S) if attn_mask is None else attn_mask.to(q.dtype)
        w = torch.baddbmm(base.expand(B * self.num_heads, T, S), q, k.transpose(1, 2), alpha=self.head_dim**-0.5)
        if key_padding_mask is not None:
            w = w.view(B, self.num_heads, T, S)
            w = w.masked_fill(key_padding_mask.unsqueeze(1).unsqueeze(2).bool(), torch.finfo(w.dtype).min)
            w = w.view(B * self.num_heads, T, S)
        w = F.softmax(w, dim=-1)
        o = torch.bmm(w, v).transpose(0, 1).contiguous().view(T, B, C)
        return self.out_proj(o), w.view(B, self.num_heads, T, S).mean(1)


class Head(nn.Module):
    """One causal head with its own bias-free projections."""

    def __init__(self, n_embd, head_size, block_size, dropout):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape
        if self.tril.size(0) < T:
            raise ValueError("sequence longer than block_size")
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


class HeadListAttention(nn.Module):
    """Tutorial-style causal attention built from a ModuleList of heads whose outputs are concatenated and projected."""

    def __init__(self, n_embd=32, num_heads=4, block_size=64, dropout=0.0):
        super().__init__()
        head_size = n_embd // num_heads
        self.heads = nn.ModuleList([Head(n_embd, head_size, block_size, dropout) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.proj(torch.cat([h(x) for h in self.heads], dim=-1)))


class FlashCausalAttention(nn.Module):
    """Causal self-attention through scaled_dot_product_attention with is_causal and training-only dropout."""

    def __init__(self, d_model=32, n_heads=4, dropout=0.0, bias=False):
        super().__init__()
        self.n_heads, self.p = n_heads, dropout
        self.Wqkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=bias)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.Wqkv(x).view(b, s, 3, self.n_heads, d // self.n_heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.p if self.training else 0.0,
            is_causal=True,
        )
        return self.out_proj(y.transpose(1, 2).reshape(b, s, d))


class SinkAttention(nn.Module):
    """gpt-oss-style causal grouped-query attention with one learned sink logit per head that takes weight but adds no value."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=0):
        super().__init__()
        self.h, self.kv, self.d, self.window = num_heads, num_kv_heads, head_dim, sliding_window
        self.qkv = nn.Linear(hidden_size, head_dim * (num_heads + 2 * num_kv_heads))
        self.out = nn.Linear(num_heads * head_dim, hidden_size)
        self.sinks = nn.Parameter(torch.randn(num_heads))

    def forward(self, x):
        b, n, _ = x.shape
        qkv = self.qkv(x)
        q, k, v = qkv.split([self.h * self.d, self.kv * self.d, self.kv * self.d], -1)
        q = q.view(b, n, self.kv, self.h // self.kv, self.d)
        k = k.view(b, n, self.kv, 1, self.d).expand(-1, -1, -1, self.h // self.kv, -1)
        v = v.view(b, n, self.kv, 1, self.d).expand(-1, -1, -1, self.h // self.kv, -1)
        qk = torch.einsum("bqhmd,bkhmd->bhmqk", q, k) / math.sqrt(self.d)
        mask = torch.triu(qk.new_full((n, n), -float("inf")), diagonal=1)
        if self.window > 0:
            mask = mask + torch.tril(qk.new_full((n, n), -float("inf")), diagonal=-self.window)
        qk = qk + mask
        sink = self.sinks.view(1, self.kv, self.h // self.kv, 1, 1).expand(b, -1, -1, n, 1)
        w = torch.softmax(torch.cat([qk, sink], dim=-1), dim=-1)[..., :-1]
        o = torch.einsum("bhmqk,bkhmd->bqhmd", w, v)
        return self.out(o.reshape(b, n, self.h * self.d))


class LatentAttention(nn.Module):
    """DeepSeek-style multi-head latent attention: compressed kv, decoupled interleaved rotary key shared by heads, causal."""

    def __init__(
        self, dim=32, n_heads=4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, theta=10000.0
    ):
        super().__init__()
        self.h, self.rank = n_heads, kv_lora_rank
        self.dn, self.dr, self.dv, self.theta = qk_nope_head_dim, qk_rope_head_dim, v_head_dim, theta
        self.wq = nn.Linear(dim, n_heads * (self.dn + self.dr), bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + self.dr, bias=False)
        self.kv_norm = RMSNorm(kv_lora_rank)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (self.dn + self.dv), bias=False)
        self.wo = nn.Linear(n_heads * self.dv, dim, bias=False)

    def _rope(self, x):  # [B, S, H, dr]
        a = rope_angles(torch.arange(x.size(1), device=x.device), self.dr, self.theta)[:, None, :]
        cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
        e, o = x[..., 0::2], x[..., 1::2]
        return torch.stack((e * cos - o * sin, e * sin + o * cos), dim=-1).flatten(-2)

    def forward(self, x):
        B, S, _ = x.shape
        q = self.wq(x).view(B, S, self.h, self.dn + self.dr)
        q_nope, q_pe = q.split([self.dn, self.dr], dim=-1)
        c_kv, k_pe = self.wkv_a(x).split([self.rank, self.dr], dim=-1)
        kv = self.wkv_b(self.kv_norm(c_kv)).view(B, S, self.h, self.dn + self.dv)
        k_nope, v = kv.split([self.dn, self.dv], dim=-1)
        q = torch.cat([q_nope, self._rope(q_pe)], -1)
        k = torch.cat([k_nope, self._rope(k_pe.unsqueeze(2)).expand(-1, -1, self.h, -1)], -1)
        s = torch.einsum("bshd,bthd->bsht", q, k) * (self.dn + self.dr) ** -0.5
        causal = torch.full((S, S), float("-inf"), device=x.device, dtype=s.dtype).triu_(1)
        s = (s + causal.unsqueeze(1)).softmax(dim=-1)
        o = torch.einsum("bsht,bthd->bshd", s, v)
        return self.wo(o.flatten(2))


@dataclass
class AttentionOutput:
    hidden: Tensor
    weights: Tensor | None = None
    cache: tuple[Tensor, Tensor] | None = None


class CachedGQAttention(nn.Module):
    """Causal grouped-query attention with no positions that returns a dataclass and appends to a past [B, H, S, D] pair; attention_mask [B, past + S] True = keep."""

    def __init__(self, dim=32, n_head=4, n_kv_head=2, bias=False):
        super().__init__()
        self.n_head, self.n_kv_head, self.hd = n_head, n_kv_head, dim // n_head
        self.to_q = nn.Linear(dim, n_head * self.hd, bias=bias)
        self.to_kv = nn.Linear(dim, 2 * n_kv_head * self.hd, bias=bias)
        self.to_out = nn.Linear(n_head * self.hd, dim, bias=bias)

    def forward(self, x, past_key_value=None, attention_mask=None):
        b, n, _ = x.shape
        q = self.to_q(x).view(b, n, self.n_kv_head, self.n_head // self.n_kv_head, self.hd).permute(0, 2, 3, 1, 4)
        k, v = (t.view(b, n, self.n_kv_head, self.hd).transpose(1, 2) for t in self.to_kv(x).chunk(2, -1))
        if past_key_value is not None:
            k = torch.cat([past_key_value[0], k], 2)
            v = torch.cat([past_key_value[1], v], 2)
        m = k.size(2)
        s = torch.matmul(q, k.unsqueeze(2).transpose(-1, -2)) / math.sqrt(self.hd)
        qpos = torch.arange(m - n, m, device=x.device)[:, None]
        ok = (torch.arange(m, device=x.device)[None, :] <= qpos)[None]
        if attention_mask is not None:
            ok = ok & attention_mask[:, None, :].bool()
        s = s.masked_fill(~ok[:, None, None], torch.finfo(s.dtype).min)
        w = s.softmax(-1)
        o = torch.matmul(w, v.unsqueeze(2)).permute(0, 3, 1, 2, 4).reshape(b, n, -1)
        return AttentionOutput(self.to_out(o), w.flatten(1, 2), (k, v))


class GatedPairBiasAttention(nn.Module):
    """AlphaFold-style gated attention: pair bias projected from pair_rep [B, Q, K, P], sigmoid gate, mask [B, K] 1 = keep."""

    def __init__(self, c_in=32, c_pair=8, c_hidden=8, no_heads=4, inf=1e9):
        super().__init__()
        self.h, self.c, self.inf = no_heads, c_hidden, inf
        self.linear_q = nn.Linear(c_in, c_hidden * no_heads, bias=False)
        self.linear_k = nn.Linear(c_in, c_hidden * no_heads, bias=False)
        self.linear_v = nn.Linear(c_in, c_hidden * no_heads, bias=False)
        self.linear_b = nn.Linear(c_pair, no_heads, bias=False)
        self.linear_g = nn.Linear(c_in, c_hidden * no_heads)
        self.linear_o = nn.Linear(c_hidden * no_heads, c_in)

    def forward(self, single, pair_rep=None, mask=None):
        q, k, v = (
            f(single).unflatten(-1, (self.h, self.c)).transpose(-2, -3)
            for f in (self.linear_q, self.linear_k, self.linear_v)
        )
        a = torch.matmul(q / math.sqrt(self.c), k.transpose(-1, -2))
        if pair_rep is not None:
            a = a + self.linear_b(pair_rep).permute(0, 3, 1, 2)
        if mask is not None:
            a = a + (self.inf * (mask.to(a.dtype) - 1))[:, None, None, :]
        o = torch.matmul(a.softmax(-1), v).transpose(-2, -3)
        g = torch.sigmoid(self.linear_g(single)).unflatten(-1, (self.h, self.c))
        return self.linear_o((o * g).flatten(-2))


class ChunkedAttention(nn.Module):
    """Memory-lean self-attention that walks the queries in chunks; causal by constructor; lengths [B] gives the valid tokens."""

    def __init__(self, dim=32, heads=4, chunk_size=3, causal=False):
        super().__init__()
        self.heads, self.chunk, self.causal = heads, chunk_size, causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        idx = torch.arange(n, device=x.device)
        outs = []
        for i in range(0, n, self.chunk):
            s = q[:, :, i : i + self.chunk] @ k.transpose(-1, -2) * k.size(-1) ** -0.5
            if self.causal:
                s = s.masked_fill(idx[None, :] > idx[i : i + self.chunk, None], torch.finfo(s.dtype).min)
            if lengths is not None:
                s = s.masked_fill((idx[None, :] >= lengths[:, None])[:, None, None], torch.finfo(s.dtype).min)
            outs.append(s.softmax(-1) @ v)
        return self.out(torch.cat(outs, 2).transpose(1, 2).reshape(b, n, d))


class CosineAttention(nn.Module):
    """Swin-v2-style cosine attention with a learned, clamped per-head logit scale and bias only on q and v."""

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.q_bias = nn.Parameter(torch.randn(dim) * 0.1)
        self.v_bias = nn.Parameter(torch.randn(dim) * 0.1)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * self.logit_scale.clamp(max=math.log(100.0)).exp()
        x = (attn.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class PlainSelfAttention(nn.Module):
    """Single-head attention with bare matrices (x @ W), separate key/value widths, attn_mask boolean [S, S] True = keep."""

    def __init__(self, d_in=32, d_kq=16, d_v=24):
        super().__init__()
        self.W_query = nn.Parameter(torch.randn(d_in, d_kq) * 0.2)
        self.W_key = nn.Parameter(torch.randn(d_in, d_kq) * 0.2)
        self.W_value = nn.Parameter(torch.randn(d_in, d_v) * 0.2)
        self.d_kq = d_kq

    def forward(self, x, attn_mask=None):
        queries, keys, values = x @ self.W_query, x @ self.W_key, x @ self.W_value
        scores = queries @ keys.transpose(-1, -2) / self.d_kq**0.5
        if attn_mask is not None:
            if attn_mask.dtype != torch.bool:
                raise TypeError("attn_mask must be boolean, True = may attend")
            scores = scores.masked_fill(attn_mask.logical_not(), torch.finfo(scores.dtype).min)
        return torch.softmax(scores, dim=-1) @ values


class PrefixLMAttention(nn.Module):
    """Prefix-LM attention: full attention inside the first prefix_len [B] tokens, causal after; nn.Linear qkv with head-major split."""

    def __init__(self, model_dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.dh = num_heads, model_dim // num_heads
        self.to_qkv = nn.Linear(model_dim, num_heads * 3 * self.dh)
        self.to_out = nn.Linear(model_dim, model_dim)

    def forward(self, x, prefix_len=None):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, self.num_heads, 3, self.dh).permute(3, 0, 2, 1, 4)
        i = torch.arange(n, device=x.device)
        see = (i[None, :] <= i[:, None])[None]
        if prefix_len is not None:
            see = see | (i[None, None, :] < prefix_len[:, None, None])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=see[:, None])
        return self.to_out(y.transpose(1, 2).reshape(b, n, d))


def make_nanogpt(hidden_size=32, num_heads=4, block_size=64, bias=True, dropout=0.0):
    return CausalSelfAttention(GPTConfig(block_size, num_heads, hidden_size, dropout, bias))


def make_llama(hidden_size=32, num_heads=4, num_kv_heads=2):
    return LlamaAttention(LlamaConfig(hidden_size, num_heads, num_kv_heads))


def make_bert(hidden_size=32, num_heads=4, dropout=0.1):
    return BertSelfAttention(BertConfig(hidden_size, num_heads, dropout))


HONEST = {
    "nanogpt": make_nanogpt,
    "mingpt": MinGPTAttention,
    "gpt2_hf": GPT2Attention,
    "llama": make_llama,
    "llama_meta_cache": MetaAttention,
    "neox": NeoXAttention,
    "mistral_window": MistralAttention,
    "gemma": GemmaAttention,
    "qwen3": Qwen3Attention,
    "t5": T5Attention,
    "alibi": AlibiAttention,
    "swin_window": WindowAttention,
    "vit": ViTAttention,
    "detr": DetrAttention,
    "whisper": WhisperAttention,
    "bert": make_bert,
    "annotated": AnnotatedMultiHeadedAttention,
    "torch_encoder": TorchStyleEncoderAttention,
    "perceiver": PerceiverCrossAttention,
    "sd_cross": CrossAttention,
    "vae_spatial": SpatialAttnBlock,
    "image_mha": ImageMultiHeadAttention,
    "vits_conv": ConvMultiHeadAttention,
    "memory_dict": MemoryAttention,
    "multi_query": MultiQueryAttention,
    "flax_einsum": EinsumAttention,
    "fairseq_tbc": FairseqAttention,
    "head_list": HeadListAttention,
    "flash_causal": FlashCausalAttention,
    "sink": SinkAttention,
    "mla": LatentAttention,
    "cached_gqa": CachedGQAttention,
    "gated_pair_bias": GatedPairBiasAttention,
    "chunked": ChunkedAttention,
    "cosine": CosineAttention,
    "plain_single": PlainSelfAttention,
    "prefix_lm": PrefixLMAttention,
}
