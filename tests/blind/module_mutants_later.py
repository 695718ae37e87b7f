"""Attention layers in the styles of well-known model families, each with one mistake (torch only)."""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope_angles(positions, dim, theta):
    inv = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)
    return positions.double()[..., None] * inv


def rope_half_cos_sin(positions, dim, theta, dtype):
    a = rope_angles(positions, dim, theta)
    a = torch.cat([a, a], -1)
    return a.cos().to(dtype), a.sin().to(dtype)


def repeat_kv(x, n_rep):
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, n_rep, s, d).reshape(b, h * n_rep, s, d)


# --------------------------------------------------------------------------- GPT family


@dataclass
class GPTConfig:
    block_size: int = 64
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class GPTScaleByModelWidth(nn.Module):
    """nanoGPT-style causal attention; wrong: logits scaled by sqrt(n_embd) in place of sqrt(head size); always shows for heads > 1."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size)))

    def forward(self, x):
        B, T, C = x.size()
        if self.bias.size(0) < T:
            raise ValueError("sequence longer than block_size")
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(C))
        att = att.masked_fill(self.bias[:T, :T] == 0, float("-inf")).softmax(-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class FusedSliceOffset(nn.Module):
    """Causal grouped-query attention with one fused q | k | v layer; wrong: the value slice starts one head after the keys begin, overlapping them; shows for kv heads > 1."""

    def __init__(self, n_embd=32, n_head=4, n_kv_head=2):
        super().__init__()
        self.n_head, self.n_kv_head, self.hd = n_head, n_kv_head, n_embd // n_head
        self.c_attn = nn.Linear(n_embd, (n_head + 2 * n_kv_head) * self.hd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, -1, self.hd).transpose(1, 2)
        q = qkv[:, : self.n_head]
        k = qkv[:, self.n_head : self.n_head + self.n_kv_head]
        v = qkv[:, self.n_head + 1 : self.n_head + 1 + self.n_kv_head]
        k, v = (t.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MinGPTViewScramble(nn.Module):
    """minGPT-style causal attention; wrong: heads split by view(B, H, T, D) without a transpose, so tokens and heads mix (and the future leaks)."""

    def __init__(self, n_embd=32, n_head=4, block_size=64):
        super().__init__()
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)).bool())
        self.n_head = n_head

    def forward(self, x):
        B, T, C = x.size()
        k = self.key(x).view(B, self.n_head, T, C // self.n_head)
        q = self.query(x).view(B, self.n_head, T, C // self.n_head)
        v = self.value(x).view(B, self.n_head, T, C // self.n_head)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = F.softmax(att.masked_fill(~self.mask[:T, :T], float("-inf")), dim=-1)
        return self.proj((att @ v).reshape(B, T, C))


class GPT2MaskAfterSoftmax(nn.Module):
    """GPT-2-style causal attention, attention_mask [B, S] 1 = real; wrong: padding zeroed after the softmax without renormalising; shows with padding."""

    def __init__(self, hidden_size=32, num_heads=4):
        super().__init__()
        self.h, self.d = num_heads, hidden_size // num_heads
        self.c_attn = nn.Linear(hidden_size, 3 * hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        b, n, c = hidden_states.shape
        q, k, v = (t.view(b, n, self.h, self.d).transpose(1, 2) for t in self.c_attn(hidden_states).chunk(3, -1))
        w = q @ k.mT / math.sqrt(self.d)
        w = w.masked_fill(torch.ones(n, n, dtype=torch.bool, device=w.device).triu(1), float("-inf")).softmax(-1)
        if attention_mask is not None:
            w = w * attention_mask[:, None, None, :].to(w.dtype)
        return self.c_proj((w @ v).transpose(1, 2).reshape(b, n, c)), w


class TriangleOneAhead(nn.Module):
    """Causal attention with bias-free layers; wrong: tril(diagonal=1) lets each token see the next one."""

    def __init__(self, d_model=32, heads=4):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(d_model, d_model * 3, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        allowed = torch.ones(n, n, device=x.device).tril(diagonal=1).bool()
        s = (q @ k.mT) * q.size(-1) ** -0.5
        p = s.masked_fill(~allowed, torch.finfo(s.dtype).min).softmax(-1)
        return self.to_out((p @ v).transpose(1, 2).flatten(2))


class TriangleStrict(nn.Module):
    """Multi-query causal attention; wrong: triu(diagonal=0) also hides the token itself."""

    def __init__(self, d_model=32, n_head=4):
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.q = nn.Linear(d_model, d_model)
        self.kv = nn.Linear(d_model, 2 * self.d_head)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.n_head, self.d_head)
        k, v = self.kv(x).chunk(2, -1)
        s = torch.einsum("bthd,bsd->bhts", q, k) / self.d_head**0.5
        s = s + torch.triu(torch.full((t, t), -1e9, device=x.device, dtype=s.dtype))
        return self.o(torch.einsum("bhts,bsd->bthd", s.softmax(-1), v).flatten(2))


class FirstHeadOnly(nn.Module):
    """Tutorial-style causal attention over a ModuleList of heads; wrong: the first head is run num_heads times and the other heads never; always shows for heads > 1."""

    class Head(nn.Module):
        def __init__(self, n_embd, head_size):
            super().__init__()
            self.key = nn.Linear(n_embd, head_size, bias=False)
            self.query = nn.Linear(n_embd, head_size, bias=False)
            self.value = nn.Linear(n_embd, head_size, bias=False)

        def forward(self, x):
            k, q = self.key(x), self.query(x)
            wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
            wei = wei.masked_fill(torch.ones_like(wei[0]).tril() == 0, float("-inf"))
            return F.softmax(wei, dim=-1) @ self.value(x)

    def __init__(self, n_embd=32, num_heads=4):
        super().__init__()
        self.heads = nn.ModuleList([FirstHeadOnly.Head(n_embd, n_embd // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([self.heads[0](x) for _ in self.heads], dim=-1))


class FlashDropoutAlways(nn.Module):
    """Causal attention through SDPA; wrong: dropout_p is passed in eval mode too; shows in eval with dropout > 0."""

    def __init__(self, d_model=32, n_heads=4, dropout=0.1):
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.Wqkv = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, s, d = x.shape
        q, k, v = self.Wqkv(x).view(b, s, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return self.out_proj(y.transpose(1, 2).reshape(b, s, d))


class CausalTopLeftCache(nn.Module):
    """Causal attention returning (out, cache); wrong: with a past it calls SDPA is_causal=True, whose triangle starts at key 0; shows with a cache (Sq != Sk)."""

    def __init__(self, dim=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cache=None):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.n_heads, -1).transpose(1, 2) for t in self.qkv(x).split(d, dim=-1))
        if cache is not None:
            k = torch.cat([cache[0], k], dim=2)
            v = torch.cat([cache[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, n, d)), (k, v)


class CacheOrderSwapped(nn.Module):
    """Causal grouped-query attention with past_key_value; wrong: the new values are put before the past ones while keys go after; shows with a past."""

    def __init__(self, dim=32, n_head=4, n_kv_head=2):
        super().__init__()
        self.n_head, self.n_kv, self.hd = n_head, n_kv_head, dim // n_head
        self.q_proj = nn.Linear(dim, n_head * self.hd, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_head * self.hd, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_head * self.hd, bias=False)
        self.o_proj = nn.Linear(n_head * self.hd, dim, bias=False)

    def forward(self, x, past_key_value: tuple[Tensor, Tensor] | None = None):
        b, n, _ = x.shape
        q = self.q_proj(x).view(b, n, self.n_head, self.hd).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.n_kv, self.hd).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.n_kv, self.hd).transpose(1, 2)
        if past_key_value is not None:
            pk, pv = past_key_value
            k, v = torch.cat([pk, k], 2), torch.cat([v, pv], 2)
        m = k.size(2)
        s = q @ repeat_kv(k, self.n_head // self.n_kv).mT / math.sqrt(self.hd)
        s = s.masked_fill(torch.ones(n, m, dtype=torch.bool, device=x.device).triu(m - n + 1), float("-inf"))
        p = s.softmax(-1)
        o = p @ repeat_kv(v, self.n_head // self.n_kv)
        return self.o_proj(o.transpose(1, 2).flatten(2)), p, (k, v)


class CacheOnSelf(nn.Module):
    """Causal attention; wrong: keys and values of earlier calls stay on the module and are attended by later, unrelated calls."""

    def __init__(self, embed_dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self._k = self._v = None

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.in_proj(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if self._k is not None and self._k.size(0) == b and not self.training:
            k, v = torch.cat([self._k, k], 2), torch.cat([self._v, v], 2)
        self._k, self._v = k.detach(), v.detach()
        m = k.size(2)
        ok = torch.ones(n, m, dtype=torch.bool, device=x.device).tril(m - n)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        return self.out_proj(y.transpose(1, 2).reshape(b, n, d))


# --------------------------------------------------------------------------- rotary family


class LlamaRepeatTile(nn.Module):
    """Llama-style causal grouped-query attention; wrong: KV heads tiled with repeat in place of repeat_interleave; shows for 1 < kv heads < heads."""

    def __init__(self, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, rope_theta=10000.0):
        super().__init__()
        self.h, self.kv, self.d, self.theta = (
            num_attention_heads,
            num_key_value_heads,
            hidden_size // num_attention_heads,
            rope_theta,
        )
        self.q_proj = nn.Linear(hidden_size, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.kv * self.d, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.kv * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, hidden_size, bias=False)

    def forward(self, hidden_states):
        b, n, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, n, self.h, self.d).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, n, self.kv, self.d).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, n, self.kv, self.d).transpose(1, 2)
        cos, sin = rope_half_cos_sin(torch.arange(n, device=q.device), self.d, self.theta, q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k = k.repeat(1, self.h // self.kv, 1, 1)
        v = v.repeat(1, self.h // self.kv, 1, 1)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, n, -1))


class GroupViewSwapped(nn.Module):
    """Mistral-style causal grouped-query attention without positions; wrong: queries viewed as (group, kv) in place of (kv, group); shows for 1 < kv heads < heads."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.h, self.kv, self.d = num_heads, num_kv_heads, hidden_size // num_heads
        self.wq = nn.Linear(hidden_size, self.h * self.d, bias=False)
        self.wk = nn.Linear(hidden_size, self.kv * self.d, bias=False)
        self.wv = nn.Linear(hidden_size, self.kv * self.d, bias=False)
        self.wo = nn.Linear(self.h * self.d, hidden_size, bias=False)

    def forward(self, x):
        B, S, _ = x.shape
        q = self.wq(x).view(B, S, self.h // self.kv, self.kv, self.d)
        k, v = self.wk(x).view(B, S, self.kv, self.d), self.wv(x).view(B, S, self.kv, self.d)
        s = torch.einsum("bigkd,bjkd->bgkij", q, k) / self.d**0.5
        s = s.masked_fill(torch.ones(S, S, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        o = torch.einsum("bgkij,bjkd->bigkd", s.softmax(-1), v)
        return self.wo(o.reshape(B, S, -1))


class RotaryOnValues(nn.Module):
    """Causal attention with half rotary; wrong: v is rotated too; always shows past the first token."""

    def __init__(self, dim=32, n_heads=4, theta=10000.0):
        super().__init__()
        self.n_heads, self.theta = n_heads, theta
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = rope_half_cos_sin(torch.arange(n, device=x.device), qkv.size(-1), self.theta, x.dtype)
        q, k, v = (qkv * cos + rotate_half(qkv) * sin).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class RotaryMixedPairs(nn.Module):
    """Llama-style causal attention; wrong: angles repeat_interleaved (for adjacent pairs) but combined with rotate_half (for halves)."""

    def __init__(self, hidden_size=32, num_heads=4, base=10000.0):
        super().__init__()
        self.num_heads, self.head_dim, self.base = num_heads, hidden_size // num_heads, base
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (
            f(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        a = rope_angles(torch.arange(n, device=x.device), self.head_dim, self.base).repeat_interleave(2, dim=-1)
        cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, c))


class RotaryCacheOffset(nn.Module):
    """Llama-reference-style attention with interleaved rotary and a cache of rotated keys; wrong: the positions restart at 0 for each call; shows with a cache."""

    def __init__(self, dim=32, n_heads=4, theta=10000.0):
        super().__init__()
        self.n_heads, self.hd, self.theta = n_heads, dim // n_heads, theta
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def _rot(self, x, start):
        a = rope_angles(torch.arange(x.size(1), device=x.device), self.hd, self.theta)[:, None]
        cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
        e, o = x[..., 0::2], x[..., 1::2]
        return torch.stack((e * cos - o * sin, e * sin + o * cos), -1).flatten(-2)

    def forward(self, x, cache=None):
        b, n, d = x.shape
        past = 0 if cache is None else cache[0].size(1)
        q = self._rot(self.wq(x).view(b, n, self.n_heads, self.hd), past)
        k = self._rot(self.wk(x).view(b, n, self.n_heads, self.hd), past)
        v = self.wv(x).view(b, n, self.n_heads, self.hd)
        if cache is not None:
            k, v = torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)
        s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(self.hd)
        s = s + torch.full((n, past + n), -math.inf, device=x.device, dtype=s.dtype).triu(past + 1)
        y = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)
        return self.wo(y.reshape(b, n, d)), (k, v)


class RotaryTableClamped(nn.Module):
    """Causal attention with a rotary table of max_position_embeddings rows; wrong: later positions are clamped to the last row; shows past that many tokens."""

    def __init__(self, hidden_size=32, num_heads=4, max_position_embeddings=16):
        super().__init__()
        self.num_heads, self.d, self.maxp = num_heads, hidden_size // num_heads, max_position_embeddings
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states):
        b, n, c = hidden_states.shape
        q, k, v = self.qkv_proj(hidden_states).view(b, n, 3, self.num_heads, self.d).permute(2, 0, 3, 1, 4)
        pos = torch.arange(n, device=q.device).clamp(max=self.maxp - 1)
        cos, sin = rope_half_cos_sin(pos, self.d, 10000.0, q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, n, c))


class PartialRotaryWrongWidth(nn.Module):
    """GPT-NeoX-style causal attention with rotary on part of each head; wrong: frequencies use the full head size as the exponent's width; always shows for rotary_pct < 1."""

    def __init__(self, hidden_size=64, num_heads=4, rotary_pct=0.5, base=10000):
        super().__init__()
        self.num_heads, self.head_size, self.base = num_heads, hidden_size // num_heads, base
        self.rotary_ndims = int(self.head_size * rotary_pct)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def _rotary(self, t):
        inv = self.base ** (
            -torch.arange(0, self.rotary_ndims, 2, dtype=torch.float64, device=t.device) / self.head_size
        )
        a = torch.outer(torch.arange(t.size(2), dtype=torch.float64, device=t.device), inv)
        a = torch.cat([a, a], -1)
        rot, rest = t[..., : self.rotary_ndims], t[..., self.rotary_ndims :]
        return torch.cat([rot * a.cos().to(t.dtype) + rotate_half(rot) * a.sin().to(t.dtype), rest], -1)

    def forward(self, hidden_states):
        B, S, _ = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(B, S, self.num_heads, 3 * self.head_size)
        q, k, v = (t.transpose(1, 2) for t in qkv.split(self.head_size, -1))
        y = F.scaled_dot_product_attention(self._rotary(q), self._rotary(k), v, is_causal=True)
        return self.dense(y.transpose(1, 2).flatten(2))


class PositionIdsOnKeysOnly(nn.Module):
    """Causal attention with half rotary and position_ids [B, S]; wrong: queries always use 0..S-1, only keys use position_ids; shows with packed or shifted positions."""

    def __init__(self, d_model=32, n_heads=4, theta=10000.0):
        super().__init__()
        self.n_heads, self.d, self.theta = n_heads, d_model // n_heads, theta
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, position_ids=None):
        b, n, c = x.shape
        q, k, v = (f(x).view(b, n, self.n_heads, self.d).transpose(1, 2) for f in (self.q, self.k, self.v))
        default = torch.arange(n, device=x.device)[None, None]
        kpos = default if position_ids is None else position_ids[:, None]
        cq, sq = rope_half_cos_sin(default, self.d, self.theta, x.dtype)
        ck, sk = rope_half_cos_sin(kpos, self.d, self.theta, x.dtype)
        q, k = q * cq + rotate_half(q) * sq, k * ck + rotate_half(k) * sk
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, n, c))


class MistralWindowInclusive(nn.Module):
    """Mistral-style causal attention where sliding_window counts the token itself; wrong: diff <= window sees one token too many; shows past sliding_window tokens."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, sliding_window=4):
        super().__init__()
        self.h, self.kvh, self.d, self.window = num_heads, num_kv_heads, hidden_size // num_heads, sliding_window
        self.q_proj = nn.Linear(hidden_size, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.kvh * self.d, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.kvh * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, hidden_size, bias=False)

    def forward(self, x):
        B, S, _ = x.shape
        q = self.q_proj(x).view(B, S, self.h, self.d).transpose(1, 2)
        k = repeat_kv(self.k_proj(x).view(B, S, self.kvh, self.d).transpose(1, 2), self.h // self.kvh)
        v = repeat_kv(self.v_proj(x).view(B, S, self.kvh, self.d).transpose(1, 2), self.h // self.kvh)
        i = torch.arange(S, device=x.device)
        diff = i[:, None] - i[None, :]
        ok = (diff >= 0) & (diff <= self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ok)
        return self.o_proj(y.transpose(1, 2).reshape(B, S, -1))


class WindowLostWithMask(nn.Module):
    """Causal sliding-window attention with attention_mask [B, S] 1 = keep; wrong: when a mask is given the window is forgotten; shows with a mask past window tokens."""

    def __init__(self, dim=32, heads=4, window=3):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n, device=x.device)
        causal = i[None, :] <= i[:, None]
        if attention_mask is not None:
            keep = causal & attention_mask[:, None, None, :].bool()
        else:
            keep = causal & (i[:, None] - i[None, :] < self.window)
        s = (q @ k.mT) / math.sqrt(q.size(-1))
        y = s.masked_fill(~keep, torch.finfo(s.dtype).min).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class SoftcapAfterMask(nn.Module):
    """Gemma-style causal attention with logit softcap; wrong: tanh is applied after the mask, so hidden keys get -softcap and leak; shows with the softcap on."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, attn_logit_softcapping=5.0):
        super().__init__()
        self.h, self.kv, self.d, self.softcap = num_heads, num_kv_heads, head_dim, attn_logit_softcapping
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def forward(self, hidden_states):
        b, n, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, n, self.h, self.d).transpose(1, 2)
        k = repeat_kv(self.k_proj(hidden_states).view(b, n, self.kv, self.d).transpose(1, 2), self.h // self.kv)
        v = repeat_kv(self.v_proj(hidden_states).view(b, n, self.kv, self.d).transpose(1, 2), self.h // self.kv)
        w = torch.matmul(q, k.mT) * self.d**-0.5
        w = w.masked_fill(torch.ones(n, n, dtype=torch.bool, device=w.device).triu(1), torch.finfo(w.dtype).min)
        if self.softcap is not None:
            w = self.softcap * torch.tanh(w / self.softcap)
        return self.o_proj(torch.matmul(w.softmax(-1), v).transpose(1, 2).reshape(b, n, -1))


class _Softcap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cap):
        return cap * torch.tanh(x / cap)

    @staticmethod
    def backward(ctx, g):
        return g, None


class SoftcapStraightGradient(nn.Module):
    """Causal attention with a softcap as an autograd function; wrong: its backward omits the factor 1 - tanh**2; shows only in gradients."""

    def __init__(self, d_model=32, n_heads=4, softcap=2.0):
        super().__init__()
        self.n_heads, self.softcap = n_heads, softcap
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        s = _Softcap.apply(q @ k.mT * q.size(-1) ** -0.5, self.softcap)
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class QKNormOneWeight(nn.Module):
    """Qwen3-style causal attention with RMS q_norm and k_norm; wrong: keys are normalised with q_norm's weight; shows once the two weights differ (trained)."""

    class RMSNorm(nn.Module):
        def __init__(self, dim, eps=1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(1 + 0.3 * torch.randn(dim)), eps

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    def __init__(self, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16):
        super().__init__()
        self.head_dim, self.groups = head_dim, num_attention_heads // num_key_value_heads
        self.q_proj = nn.Linear(hidden_size, num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_attention_heads * head_dim, hidden_size, bias=False)
        self.q_norm, self.k_norm = self.RMSNorm(head_dim), self.RMSNorm(head_dim)

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.q_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = rope_half_cos_sin(torch.arange(q.size(2), device=q.device), self.head_dim, 1e6, q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        o = F.scaled_dot_product_attention(q, repeat_kv(k, self.groups), repeat_kv(v, self.groups), is_causal=True)
        return self.o_proj(o.transpose(1, 2).flatten(2))


class SinkOfWrongHead(nn.Module):
    """gpt-oss-style causal grouped-query attention with a sink logit per head; wrong: sinks viewed as (group, kv) so heads take each other's; shows for 1 < kv heads < heads."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8):
        super().__init__()
        self.h, self.kv, self.d = num_heads, num_kv_heads, head_dim
        self.qkv = nn.Linear(hidden_size, head_dim * (num_heads + 2 * num_kv_heads))
        self.out = nn.Linear(num_heads * head_dim, hidden_size)
        self.sinks = nn.Parameter(torch.randn(num_heads))

    def forward(self, x):
        b, n, _ = x.shape
        g = self.h // self.kv
        q, k, v = self.qkv(x).split([self.h * self.d, self.kv * self.d, self.kv * self.d], -1)
        q = q.view(b, n, self.kv, g, self.d)
        k, v = k.view(b, n, self.kv, self.d), v.view(b, n, self.kv, self.d)
        s = torch.einsum("bqhgd,bkhd->bhgqk", q, k) / math.sqrt(self.d)
        s = s + torch.triu(s.new_full((n, n), -math.inf), 1)
        sink = self.sinks.view(g, self.kv).t()[None, :, :, None, None].expand(b, -1, -1, n, 1)
        w = torch.cat([s, sink], -1).softmax(-1)[..., :-1]
        return self.out(torch.einsum("bhgqk,bkhd->bqhgd", w, v).reshape(b, n, -1))


class SinkAsValueMean(nn.Module):
    """Causal attention with a learned sink logit per head; wrong: weights are renormalised after the sink's share is dropped, so the sink has no effect."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.Wqkv = nn.Linear(d_model, 3 * d_model)
        self.Wo = nn.Linear(d_model, d_model)
        self.sink = nn.Parameter(torch.randn(n_heads))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.Wqkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / math.sqrt(q.size(-1))
        s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        w = torch.cat([s, self.sink[None, :, None, None].expand(b, -1, n, 1)], -1).softmax(-1)[..., :n]
        w = w / w.sum(-1, keepdim=True)
        return self.Wo((w @ v).transpose(1, 2).reshape(b, n, d)), w


class LatentScaleNopeOnly(nn.Module):
    """DeepSeek-style multi-head latent attention, causal; wrong: logits scaled by the no-position width, leaving out the rotary width."""

    def __init__(self, dim=32, n_heads=4, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6):
        super().__init__()
        self.h, self.rank, self.dn, self.dr, self.dv = (
            n_heads,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            v_head_dim,
        )
        self.wq = nn.Linear(dim, n_heads * (self.dn + self.dr), bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + self.dr, bias=False)
        self.wkv_b = nn.Linear(kv_lora_rank, n_heads * (self.dn + self.dv), bias=False)
        self.wo = nn.Linear(n_heads * self.dv, dim, bias=False)

    def _rope(self, x):
        a = rope_angles(torch.arange(x.size(1), device=x.device), self.dr, 10000.0)[:, None]
        cos, sin = a.cos().to(x.dtype), a.sin().to(x.dtype)
        e, o = x[..., 0::2], x[..., 1::2]
        return torch.stack((e * cos - o * sin, e * sin + o * cos), -1).flatten(-2)

    def forward(self, x):
        B, S, _ = x.shape
        q_nope, q_pe = self.wq(x).view(B, S, self.h, -1).split([self.dn, self.dr], -1)
        c_kv, k_pe = self.wkv_a(x).split([self.rank, self.dr], -1)
        k_nope, v = self.wkv_b(c_kv).view(B, S, self.h, -1).split([self.dn, self.dv], -1)
        q_pe, k_pe = self._rope(q_pe), self._rope(k_pe[:, :, None])[:, :, 0]
        s = torch.einsum("bshd,bthd->bsht", q_nope, k_nope) + torch.einsum("bshd,btd->bsht", q_pe, k_pe)
        s = s * self.dn**-0.5
        s = s + torch.full((S, S), -math.inf, device=x.device, dtype=s.dtype).triu(1)[:, None]
        return self.wo(torch.einsum("bsht,bthd->bshd", s.softmax(-1), v).flatten(2))


# --------------------------------------------------------------------------- position biases


class T5BiasReversed(nn.Module):
    """T5-style bidirectional attention; wrong: relative position taken as query - key, so the bias table is read mirrored."""

    def __init__(self, d_model=32, d_kv=8, num_heads=4, num_buckets=32, max_distance=128):
        super().__init__()
        self.n_heads, self.d_kv, self.num_buckets, self.max_distance = num_heads, d_kv, num_buckets, max_distance
        self.q = nn.Linear(d_model, num_heads * d_kv, bias=False)
        self.k = nn.Linear(d_model, num_heads * d_kv, bias=False)
        self.v = nn.Linear(d_model, num_heads * d_kv, bias=False)
        self.o = nn.Linear(num_heads * d_kv, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def _bucket(self, rel):
        nb = self.num_buckets // 2
        out = (rel > 0).long() * nb
        rel = rel.abs()
        exact = nb // 2
        large = (
            exact
            + (torch.log(rel.clamp(min=1).float() / exact) / math.log(self.max_distance / exact) * (nb - exact)).long()
        )
        return out + torch.where(rel < exact, rel, large.clamp(max=nb - 1))

    def forward(self, hidden_states, mask=None):
        b, n, _ = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(b, n, self.n_heads, self.d_kv).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        pos = torch.arange(n, device=q.device)
        bias = self.relative_attention_bias(self._bucket(pos[:, None] - pos[None, :])).permute(2, 0, 1)
        s = q @ k.mT + bias
        if mask is not None:
            s = s + mask  # additive [B, 1, 1, S]
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ScaleWithoutRoot(nn.Module):
    """Encoder-decoder cross-attention through SDPA; wrong: scale=1/d_kv in place of 1/sqrt(d_kv); always shows."""

    def __init__(self, d_model=32, d_kv=8, num_heads=4):
        super().__init__()
        self.h, self.d_kv = num_heads, d_kv
        self.q = nn.Linear(d_model, num_heads * d_kv, bias=False)
        self.k = nn.Linear(d_model, num_heads * d_kv, bias=False)
        self.v = nn.Linear(d_model, num_heads * d_kv, bias=False)
        self.o = nn.Linear(num_heads * d_kv, d_model, bias=False)

    def forward(self, hidden_states, key_value_states):
        q = self.q(hidden_states).unflatten(-1, (self.h, -1)).transpose(1, 2)
        k = self.k(key_value_states).unflatten(-1, (self.h, -1)).transpose(1, 2)
        v = self.v(key_value_states).unflatten(-1, (self.h, -1)).transpose(1, 2)
        return self.o(F.scaled_dot_product_attention(q, k, v, scale=1.0 / self.d_kv).transpose(1, 2).flatten(2))


class AlibiNaiveSlopes(nn.Module):
    """Causal attention with ALiBi; wrong: slopes are 2**(-8 i / H) for any H; shows when the number of heads is not a power of two."""

    def __init__(self, embed_dim=48, num_heads=6):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        slopes = 2.0 ** (
            -8.0 * torch.arange(1, self.num_heads + 1, device=x.device, dtype=torch.float64) / self.num_heads
        )
        pos = torch.arange(t, device=x.device)
        dist = pos[None, :] - pos[:, None]
        s = q @ k.mT * self.head_dim**-0.5 + (slopes[:, None, None] * dist).to(x.dtype)
        y = s.masked_fill(dist > 0, -math.inf).softmax(-1) @ v
        return self.out_proj(y.transpose(1, 2).reshape(b, t, c))


class AlibiRewardsDistance(nn.Module):
    """Causal ALiBi attention (power-of-two heads); wrong: the bias has the wrong sign and rewards distant tokens."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        if n_heads & (n_heads - 1):
            raise ValueError("n_heads must be a power of two")
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.n_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.n_heads + 1, device=x.device) / self.n_heads)
        i = torch.arange(t, device=x.device)
        s = q @ k.mT / math.sqrt(d // self.n_heads) + (slopes[:, None, None] * (i[:, None] - i[None, :])).to(x.dtype)
        s = s + torch.full((t, t), -math.inf, device=x.device, dtype=x.dtype).triu(1)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class SwinMaskOrder(nn.Module):
    """Swin-style window attention [B*nW, N, C], mask [nW, N, N]; wrong: windows taken as the slow axis of the batch; shows with a shift mask and B > 1."""

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(nW, B_ // nW, self.num_heads, N, N) + mask[:, None, None]
            attn = attn.view(-1, self.num_heads, N, N)
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))


class SwinTableStride(nn.Module):
    """Swin-style window attention with a relative bias table for (height, width) windows; wrong: rows strided by 2*height-1; shows for non-square windows."""

    def __init__(self, dim=32, window_size=(3, 2), num_heads=4):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        wh, ww = window_size
        n = (2 * wh - 1) * (2 * ww - 1)
        self.relative_position_bias_table = nn.Parameter(torch.randn(n, num_heads) * 0.5)
        coords = torch.stack(torch.meshgrid(torch.arange(wh), torch.arange(ww), indexing="ij")).flatten(1)
        rel = coords[:, :, None] - coords[:, None, :]
        index = (rel[0] + wh - 1) * (2 * wh - 1) + rel[1] + ww - 1
        self.register_buffer("relative_position_index", index % n)
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.mT + self.relative_position_bias_table[self.relative_position_index].permute(
            2, 0, 1
        )
        return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))


class BiasTableNoGrad(nn.Module):
    """Self-attention with a learned bias per clipped relative distance; wrong: the bias is gathered under no_grad, so the table never trains; shows only in gradients."""

    def __init__(self, dim=32, heads=4, max_distance=8):
        super().__init__()
        self.heads, self.maxd = heads, max_distance
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.rel = nn.Parameter(torch.randn(2 * max_distance + 1, heads) * 0.5)
        self.to_out = nn.Linear(dim, dim)

    @torch.no_grad()
    def _bias(self, n):
        i = torch.arange(n, device=self.rel.device)
        idx = (i[None, :] - i[:, None]).clamp(-self.maxd, self.maxd) + self.maxd
        return self.rel[idx].permute(2, 0, 1)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / math.sqrt(d // self.heads) + self._bias(n)
        return self.to_out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class PairBiasTransposed(nn.Module):
    """AlphaFold-style gated attention with pair_rep [B, Q, K, P]; wrong: the pair bias is transposed over query and key; shows when pair_rep is given."""

    def __init__(self, c_in=32, c_pair=8, c_hidden=8, no_heads=4):
        super().__init__()
        self.h, self.c = no_heads, c_hidden
        self.linear_q = nn.Linear(c_in, c_hidden * no_heads, bias=False)
        self.linear_k = nn.Linear(c_in, c_hidden * no_heads, bias=False)
        self.linear_v = nn.Linear(c_in, c_hidden * no_heads, bias=False)
        self.linear_b = nn.Linear(c_pair, no_heads, bias=False)
        self.linear_g = nn.Linear(c_in, c_hidden * no_heads)
        self.linear_o = nn.Linear(c_hidden * no_heads, c_in)

    def forward(self, single, pair_rep=None):
        q, k, v = (
            f(single).unflatten(-1, (self.h, self.c)).transpose(1, 2)
            for f in (self.linear_q, self.linear_k, self.linear_v)
        )
        a = q / math.sqrt(self.c) @ k.mT
        if pair_rep is not None:
            a = a + self.linear_b(pair_rep).permute(0, 3, 2, 1)
        o = (a.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.linear_o(o * torch.sigmoid(self.linear_g(single)))


# --------------------------------------------------------------------------- encoders and masks


class ViTMergeScramble(nn.Module):
    """timm-style ViT self-attention; wrong: heads merged by reshape without transposing back, so tokens and heads mix."""

    def __init__(self, dim=32, num_heads=8, qkv_bias=False):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).reshape(B, N, C))


class ViTDropoutOnLogits(nn.Module):
    """timm-style ViT self-attention; wrong: attn_drop is applied to the logits before the softmax; shows in training with attn_drop > 0."""

    def __init__(self, dim=32, num_heads=4, attn_drop=0.2):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = q @ k.transpose(-2, -1) * self.scale
        attn = self.attn_drop(attn)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class DropoutNotRescaled(nn.Module):
    """BERT-style self-attention; wrong: home-made dropout of the weights lacks the 1/(1-p) factor; shows in training."""

    def __init__(self, hidden_size=32, num_heads=4, dropout=0.3):
        super().__init__()
        self.num_heads, self.p = num_heads, dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states):
        b, n, d = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(b, n, self.num_heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value)
        )
        w = (q @ k.mT / math.sqrt(d // self.num_heads)).softmax(-1)
        if self.training and self.p > 0:
            w = w * (torch.rand_like(w) >= self.p)
        return (w @ v).transpose(1, 2).reshape(b, n, d)


class FunctionalDropoutInEval(nn.Module):
    """Annotated-Transformer-style attention on query, key, value; wrong: F.dropout without training= drops in eval too."""

    def __init__(self, h=4, d_model=32, dropout=0.1):
        super().__init__()
        self.d_k, self.h, self.p = d_model // h, h, dropout
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        n = query.size(0)
        q, k, v = (
            f(t).view(n, -1, self.h, self.d_k).transpose(1, 2) for f, t in zip(self.linears, (query, key, value))
        )
        s = q @ k.mT / math.sqrt(self.d_k)
        if mask is not None:
            s = s.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        p = F.dropout(s.softmax(-1), self.p)
        return self.linears[-1]((p @ v).transpose(1, 2).reshape(n, -1, self.h * self.d_k))


class TinyMaskValue(nn.Module):
    """Annotated-Transformer-style attention, mask 0 = hidden; wrong: hidden logits are filled with 1e-9 in place of -1e9; shows with a mask."""

    def __init__(self, h=4, d_model=32):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        n = query.size(0)
        q, k, v = (
            f(t).view(n, -1, self.h, self.d_k).transpose(1, 2) for f, t in zip(self.linears, (query, key, value))
        )
        s = q @ k.mT / math.sqrt(self.d_k)
        if mask is not None:
            s = s.masked_fill(mask.unsqueeze(1) == 0, 1e-9)
        x = (s.softmax(-1) @ v).transpose(1, 2).reshape(n, -1, self.h * self.d_k)
        return self.linears[-1](x)


class BertMaskFlipped(nn.Module):
    """BERT-style self-attention, attention_mask [B, S] 1 = real token; wrong: extended mask is mask * -10000, hiding the real tokens; shows with padding."""

    def __init__(self, hidden_size=32, num_attention_heads=4):
        super().__init__()
        self.h = num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        b, n, d = hidden_states.shape
        q, k, v = (
            f(hidden_states).view(b, n, self.h, -1).permute(0, 2, 1, 3) for f in (self.query, self.key, self.value)
        )
        s = q @ k.mT / math.sqrt(d // self.h)
        if attention_mask is not None:
            s = s + attention_mask[:, None, None, :].to(s.dtype) * -10000.0
        return self.dense((s.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(b, n, d))


class BertMaskInPlace(nn.Module):
    """BERT-style self-attention, float attention_mask [B, S] 1 = real; wrong: the caller's mask is inverted in place; shows when the same mask serves a second layer."""

    def __init__(self, hidden_size=32, num_attention_heads=4):
        super().__init__()
        self.h = num_attention_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask=None):
        b, n, d = hidden_states.shape
        q, k, v = (t.view(b, n, self.h, -1).transpose(1, 2) for t in self.qkv(hidden_states).chunk(3, -1))
        s = q @ k.mT / math.sqrt(d // self.h)
        if attention_mask is not None:
            hidden = attention_mask.neg_().add_(1.0)
            s = s + hidden[:, None, None, :] * -10000.0
        return self.dense((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class InputZeroedInPlace(nn.Module):
    """Self-attention with lengths [B]; wrong: padded positions of the caller's x are zeroed in place; shows with lengths when x is used again."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        b, n, d = x.shape
        pad = None
        if lengths is not None:
            pad = torch.arange(n, device=x.device)[None] >= lengths[:, None]
            x.data[pad] = 0.0
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / math.sqrt(d // self.heads)
        if pad is not None:
            s = s.masked_fill(pad[:, None, None, :], torch.finfo(s.dtype).min)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class DetrMaskInverted(nn.Module):
    """DETR-style attention on query, key, value, key_padding_mask True = hidden; wrong: passed to SDPA as it is, where True means keep; shows with padding."""

    def __init__(self, embed_dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None):
        q, k, v = (
            f(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        mask = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class FairseqMaskTiled(nn.Module):
    """Fairseq-style [T, B, C] attention by bmm, key_padding_mask [B, S] True = pad; wrong: mask repeated as (heads, batch) against a (batch, heads) fold; shows with padding and B > 1."""

    def __init__(self, embed_dim=32, num_heads=4):
        super().__init__()
        self.h, self.d = num_heads, embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None):
        T, B, C = query.shape
        S = key.size(0)
        q = self.q_proj(query).reshape(T, B * self.h, self.d).transpose(0, 1) * self.d**-0.5
        k = self.k_proj(key).reshape(S, B * self.h, self.d).transpose(0, 1)
        v = self.v_proj(value).reshape(S, B * self.h, self.d).transpose(0, 1)
        w = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            w = w.masked_fill(key_padding_mask.repeat(self.h, 1)[:, None, :], torch.finfo(w.dtype).min)
        w = w.softmax(-1)
        o = torch.bmm(w, v).transpose(0, 1).reshape(T, B, C)
        return self.out_proj(o), w.view(B, self.h, T, S).mean(1)


class SeqFirstBatchMixed(nn.Module):
    """Self-attention for [S, B, D] input; wrong: viewed as if batch came first, so samples attend to each other; shows for B > 1."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.in_proj = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        s, b, d = x.shape
        q, k, v = self.in_proj(x).reshape(b, s, 3, self.n_heads, d // self.n_heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(y.transpose(1, 2).reshape(s, b, d))


class MaskOverHeads(nn.Module):
    """Self-attention with attn_mask [S, S] or [B, S, S], True = keep; wrong: a 3-D mask lines its batch up with the heads; shows when batch equals heads."""

    def __init__(self, embed_dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, attn_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / math.sqrt(d // self.num_heads)
        if attn_mask is not None:
            s = s.masked_fill(~attn_mask, torch.finfo(s.dtype).min)
        return self.proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class PaddingHidesQueries(nn.Module):
    """Encoder self-attention, src_key_padding_mask [B, S] True = pad; wrong: the mask is laid over the query axis, so padded keys are still attended; shows with padding."""

    def __init__(self, d_model=32, nhead=4):
        super().__init__()
        self.nhead = nhead
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, src, src_key_padding_mask=None):
        b, n, d = src.shape
        q, k, v = self.qkv(src).view(b, n, 3, self.nhead, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / math.sqrt(d // self.nhead)
        if src_key_padding_mask is not None:
            s = s.masked_fill(src_key_padding_mask[:, None, :, None], torch.finfo(s.dtype).min)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))


class NanOnPaddedRows(nn.Module):
    """Self-attention, mask [B, S] True = real; wrong: -inf on every pair with a padded member gives NaN rows for padded queries, and NaN gradients everywhere; shows with padding."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q = self.to_q(x).view(b, n, self.heads, -1).transpose(1, 2)
        k, v = self.to_kv(x).view(b, n, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhid,bhjd->bhij", q, k) * q.size(-1) ** -0.5
        if mask is not None:
            pair = mask[:, :, None] & mask[:, None, :]
            s = s.masked_fill(~pair[:, None], -math.inf)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v).transpose(1, 2).reshape(b, n, d))


class CausalOrPadding(nn.Module):
    """Decoder self-attention, causal, attention_mask [B, S] True = real; wrong: the two masks are joined with OR, so either lets a pair through; shows with a mask."""

    def __init__(self, d_model=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, attention_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        keep = torch.ones(1, 1, n, n, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            keep = keep | attention_mask[:, None, None, :].bool()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class CausalDropsPadding(nn.Module):
    """Attention with causal=True by constructor and key_padding_mask True = pad; wrong: in causal mode the padding mask is ignored (elif); shows with left or inner padding."""

    def __init__(self, embed_dim=32, heads=4, causal=True):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, key_padding_mask=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / math.sqrt(d // self.heads)
        if self.causal:
            s = s.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), torch.finfo(s.dtype).min)
        elif key_padding_mask is not None:
            s = s.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(s.dtype).min)
        w = s.softmax(-1)
        return {"out": self.out((w @ v).transpose(1, 2).reshape(b, n, d)), "attn": w}


class MaskRemembered(nn.Module):
    """Self-attention with lengths [B]; wrong: the padding mask of the first call is kept and reused for later batches of that shape; shows on the second call."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads, self._mask = heads, {}
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, lengths=None):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = None
        if lengths is not None:
            if (b, n) not in self._mask:
                self._mask[b, n] = (torch.arange(n, device=x.device)[None] < lengths[:, None])[:, None, None, :]
            mask = self._mask[b, n]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, n, d))


class PrefixOfWholeBatch(nn.Module):
    """Prefix-LM attention with prefix_len [B]; wrong: the longest prefix of the batch is used for every sample; shows for B > 1 with unequal prefixes."""

    def __init__(self, model_dim=32, num_heads=4):
        super().__init__()
        self.h = num_heads
        self.to_qkv = nn.Linear(model_dim, 3 * model_dim)
        self.to_out = nn.Linear(model_dim, model_dim)

    def forward(self, x, prefix_len):
        b, n, d = x.shape
        q, k, v = self.to_qkv(x).view(b, n, 3, self.h, -1).permute(2, 0, 3, 1, 4)
        i = torch.arange(n, device=x.device)
        see = (i[None, :] <= i[:, None]) | (i[None, :] < prefix_len.max())
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return self.to_out(y.transpose(1, 2).reshape(b, n, d))


class ChunkLocalTriangle(nn.Module):
    """Causal attention over query chunks; wrong: the triangle is built from positions inside the chunk, so later chunks see only the first keys; shows past chunk_size tokens."""

    def __init__(self, dim=32, heads=4, chunk_size=4):
        super().__init__()
        self.heads, self.chunk = heads, chunk_size
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        outs = []
        for qc in q.split(self.chunk, dim=2):
            s = qc @ k.mT * qc.size(-1) ** -0.5
            tri = torch.ones(qc.size(2), n, dtype=torch.bool, device=x.device).tril()
            outs.append(s.masked_fill(~tri, -math.inf).softmax(-1) @ v)
        return self.out(torch.cat(outs, 2).transpose(1, 2).reshape(b, n, d))


class HeadsAveraged(nn.Module):
    """BERT-style self-attention returning (context, probs); wrong: the weights are averaged over the heads before they meet the values."""

    def __init__(self, hidden_size=32, num_attention_heads=4):
        super().__init__()
        self.h = num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states):
        b, n, d = hidden_states.shape
        q, k, v = (f(hidden_states).view(b, n, self.h, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        probs = (q @ k.mT / math.sqrt(d // self.h)).softmax(-1).mean(1, keepdim=True)
        return (probs @ v).transpose(1, 2).reshape(b, n, d), probs[:, 0]


class SoftmaxInHalf(nn.Module):
    """ViT-style self-attention; wrong: the softmax runs in float16 for float32 input too, losing about three digits; always shows as a small error."""

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        a = (q @ k.mT / math.sqrt(d // self.num_heads)).half().softmax(-1).to(x.dtype)
        return self.proj((a @ v).transpose(1, 2).reshape(b, n, d))


class UnshiftedExp(nn.Module):
    """Single-head attention with bare matrices; wrong: softmax written as exp / sum without subtracting the maximum, NaN for large logits."""

    def __init__(self, d_in=32, d_kq=16, d_v=24):
        super().__init__()
        self.W_query = nn.Parameter(torch.randn(d_in, d_kq) * 0.2)
        self.W_key = nn.Parameter(torch.randn(d_in, d_kq) * 0.2)
        self.W_value = nn.Parameter(torch.randn(d_in, d_v) * 0.2)

    def forward(self, x):
        e = torch.exp((x @ self.W_query) @ (x @ self.W_key).mT / self.W_key.shape[1] ** 0.5)
        return (e / e.sum(-1, keepdim=True)) @ (x @ self.W_value)


class ScaleFromValueWidth(nn.Module):
    """Single-head attention with key width d_kq and value width d_v; wrong: logits scaled by sqrt(d_v); shows when d_v differs from d_kq."""

    def __init__(self, d_in=32, d_kq=16, d_v=24):
        super().__init__()
        self.W_query = nn.Linear(d_in, d_kq, bias=False)
        self.W_key = nn.Linear(d_in, d_kq, bias=False)
        self.W_value = nn.Linear(d_in, d_v, bias=False)

    def forward(self, x):
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        return torch.softmax(q @ k.mT / v.shape[-1] ** 0.5, dim=-1) @ v


# --------------------------------------------------------------------------- cross-attention and images


class WhisperScaleOnce(nn.Module):
    """Whisper-style attention; wrong: the split scale d**-0.25 is applied to q only, not to k."""

    def __init__(self, n_state=32, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, xa=None):
        src = x if xa is None else xa
        scale = (x.size(-1) // self.n_head) ** -0.25
        q = self.query(x).unflatten(-1, (self.n_head, -1)).permute(0, 2, 1, 3) * scale
        k = self.key(src).unflatten(-1, (self.n_head, -1)).permute(0, 2, 3, 1)
        v = self.value(src).unflatten(-1, (self.n_head, -1)).permute(0, 2, 1, 3)
        return self.out((F.softmax(q @ k, dim=-1) @ v).permute(0, 2, 1, 3).flatten(2))


class WhisperNoOutput(nn.Module):
    """Whisper-style attention with a mask [T, T]; wrong: the output layer is built but never applied."""

    def __init__(self, n_state=32, n_head=4):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None):
        src = x if xa is None else xa
        q = self.query(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        k = self.key(src).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        v = self.value(src).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        qk = q @ k.mT * q.size(-1) ** -0.5
        if mask is not None:
            qk = qk + mask[: x.size(1), : x.size(1)]
        w = qk.softmax(-1)
        return (w @ v).transpose(1, 2).flatten(2), w


class OutBiasDropped(nn.Module):
    """Encoder self-attention with in_proj/out parameters; wrong: the output bias exists but is left out of the product."""

    def __init__(self, d_model=32, nhead=4):
        super().__init__()
        self.nhead = nhead
        self.in_proj_weight = nn.Parameter(torch.randn(3 * d_model, d_model) * d_model**-0.5)
        self.in_proj_bias = nn.Parameter(torch.randn(3 * d_model) * 0.1)
        self.out_proj_weight = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.out_proj_bias = nn.Parameter(torch.randn(d_model) * 0.1)

    def forward(self, src):
        b, n, d = src.shape
        q, k, v = (
            t.view(b, n, self.nhead, -1).transpose(1, 2)
            for t in F.linear(src, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        )
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), self.out_proj_weight)


class QueryFromContext(nn.Module):
    """Diffusion-style attention, context=None for self-attention; wrong: q comes from the context and k, v from x; shows with a context."""

    def __init__(self, query_dim=32, heads=4, dim_head=8):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(query_dim, inner, bias=False)
        self.to_v = nn.Linear(query_dim, inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, query_dim), nn.Dropout(0.0))

    def forward(self, x, context=None):
        context = x if context is None else context
        q = self.to_q(context).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.to_k(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.to_v(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ContextIgnoredByValues(nn.Module):
    """Stable-diffusion-style attention with context of the same width; wrong: values are taken from x whenever the lengths agree; shows with a context as long as x."""

    def __init__(self, query_dim=32, heads=4, dim_head=8):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(query_dim, inner, bias=False)
        self.to_v = nn.Linear(query_dim, inner, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        value_src = x if context.shape == x.shape else context
        q, k, v = (
            f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f, t in ((self.to_q, x), (self.to_k, context), (self.to_v, value_src))
        )
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class PerceiverFoldMismatch(nn.Module):
    """Perceiver-style cross-attention; wrong: heads folded as (h b) for q and (b h) for k and v, so samples meet other samples' context; shows for B > 1."""

    def __init__(self, query_dim=32, context_dim=20, heads=4, dim_head=8):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_kv = nn.Linear(context_dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, x, context):
        b, n, _ = x.shape
        h = self.heads
        q = self.to_q(x).view(b, n, h, -1).permute(2, 0, 1, 3).reshape(h * b, n, -1)
        k, v = (
            t.view(b, context.size(1), h, -1).permute(0, 2, 1, 3).flatten(0, 1)
            for t in self.to_kv(context).chunk(2, -1)
        )
        attn = (torch.bmm(q, k.transpose(1, 2)) * self.scale).softmax(-1)
        out = torch.bmm(attn, v).view(h, b, n, -1).permute(1, 2, 0, 3).reshape(b, n, -1)
        return self.to_out(out)


class LatentKeysDetached(nn.Module):
    """Perceiver-style cross-attention over a context; wrong: the context is detached for the keys, so part of its gradient is missing; shows only in gradients."""

    def __init__(self, query_dim=32, context_dim=20, heads=4, dim_head=8):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner, bias=False)
        self.to_k = nn.Linear(context_dim, inner, bias=False)
        self.to_v = nn.Linear(context_dim, inner, bias=False)
        self.to_out = nn.Linear(inner, query_dim)

    def forward(self, latents, context):
        q = self.to_q(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.to_k(context.detach()).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.to_v(context).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LengthOffByOne(nn.Module):
    """Encoder-decoder attention with memory_lengths [B]; wrong: index > length lets the first padded key through; shows with padding."""

    def __init__(self, d_model=32, d_memory=24, n_heads=4):
        super().__init__()
        self.n_heads, self.d_head = n_heads, d_model // n_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_kv = nn.Linear(d_memory, 2 * d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, tgt, memory, memory_lengths=None):
        B, T, _ = tgt.shape
        S = memory.size(1)
        q = self.w_q(tgt).view(B, T, self.n_heads, self.d_head)
        k, v = self.w_kv(memory).view(B, S, 2, self.n_heads, self.d_head).unbind(2)
        e = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if memory_lengths is not None:
            pad = torch.arange(S, device=e.device)[None] > memory_lengths[:, None]
            e = e.masked_fill(pad[:, None, None], torch.finfo(e.dtype).min)
        a = e.softmax(-1)
        return {"output": self.w_o(torch.einsum("bhts,bshd->bthd", a, v).reshape(B, T, -1)), "attention": a}


class SpatialSoftmaxAxis(nn.Module):
    """VAE-style attention over the pixels of [B, C, H, W] with a residual; wrong: softmax over the query axis."""

    def __init__(self, in_channels=32, num_groups=8):
        super().__init__()
        self.norm = nn.GroupNorm(num_groups, in_channels, eps=1e-6)
        self.q = nn.Conv2d(in_channels, in_channels, 1)
        self.k = nn.Conv2d(in_channels, in_channels, 1)
        self.v = nn.Conv2d(in_channels, in_channels, 1)
        self.proj_out = nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x):
        h_ = self.norm(x)
        b, c, h, w = x.shape
        q = self.q(h_).reshape(b, c, h * w).permute(0, 2, 1)
        k = self.k(h_).reshape(b, c, h * w)
        v = self.v(h_).reshape(b, c, h * w)
        w_ = F.softmax(torch.bmm(q, k) * c**-0.5, dim=1)
        return x + self.proj_out(torch.bmm(v, w_.permute(0, 2, 1)).reshape(b, c, h, w))


class ImageAxesSwapped(nn.Module):
    """Multi-head attention over the pixels of [B, C, H, W]; wrong: pixels flattened in (w, h) order but unflattened as (h, w), scrambling the map; shows for any image wider and taller than 1."""

    def __init__(self, dim=32, heads=4, dim_head=8):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Conv2d(dim, heads * dim_head * 3, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        qkv = self.to_qkv(x).transpose(2, 3).reshape(b, 3, self.heads, -1, h * w).transpose(-1, -2)
        q, k, v = qkv.unbind(1)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(-1, -2).reshape(b, -1, h, w))


class ConvViewScramble(nn.Module):
    """Speech-style attention on [B, C, T] with context c; wrong: channels viewed as (heads, T, d) without a transpose, mixing time and channels."""

    def __init__(self, channels=32, n_heads=4):
        super().__init__()
        self.n_heads, self.kc = n_heads, channels // n_heads
        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, channels, 1)

    def forward(self, x, c):
        b, d, t = x.shape
        q = self.conv_q(x).reshape(b, self.n_heads, t, self.kc)
        k = self.conv_k(c).reshape(b, self.n_heads, c.size(2), self.kc)
        v = self.conv_v(c).reshape(b, self.n_heads, c.size(2), self.kc)
        p = (q @ k.mT / math.sqrt(self.kc)).softmax(-1)
        return self.conv_o((p @ v).reshape(b, d, t))


class KeysFromQueryWeights(nn.Module):
    """Flax-style attention with kernels [D, H, K]; wrong: keys are projected with the query kernel and the key kernel is unused."""

    def __init__(self, features=32, num_heads=4, head_dim=8):
        super().__init__()

        def p(*s):
            return nn.Parameter(torch.randn(*s) * features**-0.5)

        self.wq, self.wk, self.wv = (p(features, num_heads, head_dim) for _ in range(3))
        self.wo = p(num_heads, head_dim, features)

    def forward(self, inputs_q, inputs_kv):
        q = torch.einsum("bqd,dhk->bqhk", inputs_q, self.wq)
        k = torch.einsum("btd,dhk->bthk", inputs_kv, self.wq)
        v = torch.einsum("btd,dhk->bthk", inputs_kv, self.wv)
        w = torch.softmax(torch.einsum("bqhk,bthk->bhqt", q, k) / q.shape[-1] ** 0.5, dim=-1)
        return torch.einsum("bhqt,bthk,hkd->bqd", w, v, self.wo)


class WeightsBeforeMask(nn.Module):
    """Causal attention returning (out, weights); wrong: the returned weights are computed before the mask and do not match the output; shows in the second result."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        w = (q @ k.mT / math.sqrt(d // self.n_heads)).softmax(-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, n, d)), w


class BiasScaledToo(nn.Module):
    """DETR-style attention with a float attn_mask added to the logits; wrong: the scale is applied after adding it, shrinking the bias; shows with a finite float mask."""

    def __init__(self, embed_dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.scale = num_heads, (embed_dim // num_heads) ** -0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = (
            f(t).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f, t in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        s = q @ k.mT
        if attn_mask is not None:
            s = s + attn_mask
        w = (s * self.scale).softmax(-1)
        return self.out_proj((w @ v).transpose(1, 2).flatten(2)), w.mean(1)


def make_gpt_scale(hidden_size=32, num_heads=4, block_size=64, bias=True):
    return GPTScaleByModelWidth(GPTConfig(block_size, num_heads, hidden_size, 0.0, bias))


MUTANTS = {
    "gpt_scale_model_width": make_gpt_scale,
    "fused_slice_offset": FusedSliceOffset,
    "mingpt_view_scramble": MinGPTViewScramble,
    "gpt2_mask_after_softmax": GPT2MaskAfterSoftmax,
    "triangle_one_ahead": TriangleOneAhead,
    "triangle_strict": TriangleStrict,
    "first_head_only": FirstHeadOnly,
    "flash_dropout_always": FlashDropoutAlways,
    "causal_top_left_cache": CausalTopLeftCache,
    "cache_order_swapped": CacheOrderSwapped,
    "cache_on_self": CacheOnSelf,
    "llama_repeat_tile": LlamaRepeatTile,
    "group_view_swapped": GroupViewSwapped,
    "rotary_on_values": RotaryOnValues,
    "rotary_mixed_pairs": RotaryMixedPairs,
    "rotary_cache_offset": RotaryCacheOffset,
    "rotary_table_clamped": RotaryTableClamped,
    "partial_rotary_width": PartialRotaryWrongWidth,
    "position_ids_keys_only": PositionIdsOnKeysOnly,
    "mistral_window_inclusive": MistralWindowInclusive,
    "window_lost_with_mask": WindowLostWithMask,
    "softcap_after_mask": SoftcapAfterMask,
    "softcap_gradient": SoftcapStraightGradient,
    "qk_norm_one_weight": QKNormOneWeight,
    "sink_wrong_head": SinkOfWrongHead,
    "sink_renormalised": SinkAsValueMean,
    "mla_scale_nope": LatentScaleNopeOnly,
    "t5_bias_reversed": T5BiasReversed,
    "scale_without_root": ScaleWithoutRoot,
    "alibi_naive_slopes": AlibiNaiveSlopes,
    "alibi_sign": AlibiRewardsDistance,
    "swin_mask_order": SwinMaskOrder,
    "swin_table_stride": SwinTableStride,
    "bias_table_no_grad": BiasTableNoGrad,
    "pair_bias_transposed": PairBiasTransposed,
    "vit_merge_scramble": ViTMergeScramble,
    "vit_dropout_on_logits": ViTDropoutOnLogits,
    "dropout_not_rescaled": DropoutNotRescaled,
    "dropout_in_eval": FunctionalDropoutInEval,
    "tiny_mask_value": TinyMaskValue,
    "bert_mask_flipped": BertMaskFlipped,
    "bert_mask_in_place": BertMaskInPlace,
    "input_zeroed_in_place": InputZeroedInPlace,
    "detr_mask_inverted": DetrMaskInverted,
    "fairseq_mask_tiled": FairseqMaskTiled,
    "seq_first_batch_mixed": SeqFirstBatchMixed,
    "mask_over_heads": MaskOverHeads,
    "padding_hides_queries": PaddingHidesQueries,
    "nan_on_padded_rows": NanOnPaddedRows,
    "causal_or_padding": CausalOrPadding,
    "causal_drops_padding": CausalDropsPadding,
    "mask_remembered": MaskRemembered,
    "prefix_of_whole_batch": PrefixOfWholeBatch,
    "chunk_local_triangle": ChunkLocalTriangle,
    "heads_averaged": HeadsAveraged,
    "softmax_in_half": SoftmaxInHalf,
    "unshifted_exp": UnshiftedExp,
    "scale_from_value_width": ScaleFromValueWidth,
    "whisper_scale_once": WhisperScaleOnce,
    "whisper_no_output": WhisperNoOutput,
    "out_bias_dropped": OutBiasDropped,
    "query_from_context": QueryFromContext,
    "values_from_x": ContextIgnoredByValues,
    "perceiver_fold_mismatch": PerceiverFoldMismatch,
    "context_keys_detached": LatentKeysDetached,
    "length_off_by_one": LengthOffByOne,
    "spatial_softmax_axis": SpatialSoftmaxAxis,
    "image_axes_swapped": ImageAxesSwapped,
    "conv_view_scramble": ConvViewScramble,
    "keys_from_query_weights": KeysFromQueryWeights,
    "weights_before_mask": WeightsBeforeMask,
    "bias_scaled_too": BiasScaledToo,
}
