"""Blind test material: attention modules as people write them, each with exactly one planted fault.

Written without sight of the checks.  This file holds the self-attention styles (nanoGPT, ViT, Llama, BERT,
W_query/W_key/W_value); ``module_mutants_more`` holds the rest.  ``CAUSE`` names the fault in a few words.
``DECLARED`` holds what a user would have to state where the meaning of a mask cannot be read from its name.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------
# nanoGPT style: a config object, fused c_attn, c_proj, a triangular buffer
# ------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    """Sizes of a small GPT."""

    block_size: int = 64
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class GPTCausalOffByOne(nn.Module):
    """Causal self-attention whose triangle keeps one diagonal too many, so a token sees its successor."""

    CAUSE: ClassVar[str] = "causal mask off by one"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        mask = torch.tril(torch.ones(config.block_size, config.block_size), diagonal=1)
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
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


class GPTMergeWithoutTranspose(nn.Module):
    """Causal self-attention that merges the heads by a bare view, without the transpose before it."""

    CAUSE: ClassVar[str] = "heads merged without transpose"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.head_size = config.n_embd // config.n_head
        self.register_buffer("tril", torch.tril(torch.ones(config.block_size, config.block_size)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape  # noqa: N806
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q = q.view(B, T, self.n_head, self.head_size).transpose(1, 2)
        k = k.view(B, T, self.n_head, self.head_size).transpose(1, 2)
        v = v.view(B, T, self.n_head, self.head_size).transpose(1, 2)
        wei = q @ k.transpose(-2, -1) * self.head_size**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.attn_dropout(F.softmax(wei, dim=-1))
        out = (wei @ v).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(out))


class GPTFlashDropoutInEval(nn.Module):
    """Causal self-attention through SDPA that hands over the dropout rate in eval mode as well."""

    CAUSE: ClassVar[str] = "SDPA dropout_p not gated on training"

    def __init__(self, n_embd: int, n_head: int, dropout: float = 0.1, bias: bool = False) -> None:
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.n_embd = n_embd
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTPaddingReplacesCausal(nn.Module):
    """SDPA refuses a mask together with is_causal, so the causal flag is dropped whenever a mask comes in."""

    CAUSE: ClassVar[str] = "is_causal ignored when a mask is given"

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        B, T, C = x.shape  # noqa: N806
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        mask = None
        if attention_mask is not None:
            mask = attention_mask.bool()[:, None, None, :]
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=mask is None
        )
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


# ------------------------------------------------------------------------------------------------
# ViT style: fused qkv, proj
# ------------------------------------------------------------------------------------------------


class ViTScaleFromDim(nn.Module):
    """Vision attention whose scores are divided by the root of the model width, not of the head width."""

    CAUSE: ClassVar[str] = "scale from hidden size"

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class ViTDropoutInEval(nn.Module):
    """Vision attention that calls F.dropout without the training flag, so weights drop in eval mode too."""

    CAUSE: ClassVar[str] = "dropout active in eval"

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = True, attn_drop: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.softmax(q @ k.transpose(-2, -1) / self.head_dim**0.5, dim=-1)
        attn = F.dropout(attn, p=self.attn_drop)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class ViTSoftmaxOverQueries(nn.Module):
    """Vision attention whose softmax runs over the query axis."""

    CAUSE: ClassVar[str] = "softmax over the query axis"

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dots = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(self.head_dim)
        attn = self.drop(dots.softmax(dim=-2))
        out = torch.einsum("bhqk,bhkd->bqhd", attn, v)
        return self.proj(out.reshape(b, n, d))


class ViTResidualInside(nn.Module):
    """Vision attention that adds its input inside and scales the sum, although the block does so again."""

    CAUSE: ClassVar[str] = "residual added inside and scaled"

    def __init__(self, dim: int, num_heads: int = 4, qkv_bias: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        out = self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
        return (out + x) * math.sqrt(0.5)


class ViTScaledTwice(nn.Module):
    """Vision attention that multiplies q by the scale and then calls SDPA, which scales once more."""

    CAUSE: ClassVar[str] = "scale applied twice"

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False, attn_drop: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * self.scale
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop if self.training else 0.0)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class ViTKeyNormForgotten(nn.Module):
    """Vision attention with query and key norms of which the key norm is built but never applied."""

    CAUSE: ClassVar[str] = "k_norm never applied"

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q = self.q_norm(q)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


# ------------------------------------------------------------------------------------------------
# Llama style: q_proj, k_proj, v_proj, o_proj, num_key_value_heads
# ------------------------------------------------------------------------------------------------


@dataclass
class LlamaConfig:
    """Sizes of a small Llama."""

    hidden_size: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    attention_dropout: float = 0.0
    attention_bias: bool = False
    rope_theta: float = 10000.0


def rotate_half(x: Tensor) -> Tensor:
    """Turn the second half of the channels into the first."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rope_tables(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, [S, dim] each."""
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)
    angles = torch.outer(positions.double(), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """[B, Hkv, S, D] -> [B, Hkv * n_rep, S, D], each head repeated in place."""
    b, h, s, d = hidden_states.shape
    return hidden_states[:, :, None, :, :].expand(b, h, n_rep, s, d).reshape(b, h * n_rep, s, d)


class LlamaTiledKV(nn.Module):
    """Grouped-query attention that tiles the key/value heads instead of repeating each one in place."""

    CAUSE: ClassVar[str] = "repeat instead of repeat_interleave"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.rope_theta = config.rope_theta
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(
            config.hidden_size, self.num_key_value_heads * self.head_dim, bias=config.attention_bias
        )
        self.v_proj = nn.Linear(
            config.hidden_size, self.num_key_value_heads * self.head_dim, bias=config.attention_bias
        )
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        positions = torch.arange(q_len, device=hidden_states.device)
        cos, sin = rope_tables(positions, self.head_dim, self.rope_theta, q.dtype)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        n_rep = self.num_heads // self.num_key_value_heads
        k = k.repeat(1, n_rep, 1, 1)
        v = v.repeat(1, n_rep, 1, 1)
        attn_weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        if attention_mask is not None:  # additive, [B, 1, S, S]
            attn_weights = attn_weights + attention_mask
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
        out = torch.matmul(attn_weights, v).transpose(1, 2).contiguous().reshape(bsz, q_len, -1)
        return self.o_proj(out)


class LlamaScaleFromKVHeads(nn.Module):
    """Grouped-query attention whose scale uses hidden_size / num_key_value_heads as the head width."""

    CAUSE: ClassVar[str] = "GQA scale from kv heads"

    def __init__(self, hidden_size: int, num_attention_heads: int, num_key_value_heads: int) -> None:
        super().__init__()
        self.num_heads = num_attention_heads
        self.num_kv_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.scaling = (hidden_size // num_key_value_heads) ** -0.5
        self.q_proj = nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, is_causal: bool = True) -> Tensor:
        b, s, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k = repeat_kv(k, self.num_heads // self.num_kv_heads)
        v = repeat_kv(v, self.num_heads // self.num_kv_heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=self.scaling)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class LlamaQueryPositionShifted(nn.Module):
    """Rotary attention in which the queries count positions from one and the keys from zero."""

    CAUSE: ClassVar[str] = "rotary positions of queries shifted by one"

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, rope_theta: float = 10000.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        pos = torch.arange(s, device=x.device)
        cos, sin = rope_tables(pos + 1, self.head_dim, self.rope_theta, x.dtype)
        q = q * cos + rotate_half(q) * sin
        cos, sin = rope_tables(pos, self.head_dim, self.rope_theta, x.dtype)
        k = k * cos + rotate_half(k) * sin
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class LlamaMinPlusMin(nn.Module):
    """Two finfo.min masks are summed and hidden slots found by == finfo.min, so doubly hidden ones reappear."""

    CAUSE: ClassVar[str] = "additive masks overflow when summed"

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, s, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k = repeat_kv(k, self.num_heads // self.num_kv_heads)
        v = repeat_kv(v, self.num_heads // self.num_kv_heads)
        lowest = torch.finfo(q.dtype).min
        mask = torch.full((s, s), lowest, dtype=q.dtype, device=q.device).triu(1)[None, None]
        if attention_mask is not None:  # [B, S], 1 = token, 0 = padding
            mask = mask + (1.0 - attention_mask[:, None, None, :].to(q.dtype)) * lowest
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        scores = scores.masked_fill(mask == lowest, float("-inf"))
        out = torch.softmax(scores, dim=-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class GroupedEinsumWrongOrder(nn.Module):
    """Grouped-query einsum that splits the query heads as (group, kv) where the weights mean (kv, group)."""

    CAUSE: ClassVar[str] = "query heads grouped in the wrong order"

    def __init__(self, embed_dim: int, num_query_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_query_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        groups = self.num_query_heads // self.num_kv_heads
        q = self.q_proj(x).view(b, s, groups, self.num_kv_heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim)
        scores = torch.einsum("bsghd,bthd->bghst", q, k) / math.sqrt(self.head_dim)
        attn = scores.softmax(dim=-1)
        out = torch.einsum("bghst,bthd->bsghd", attn, v)
        return self.out_proj(out.reshape(b, s, e))


class MQAValueFromKey(nn.Module):
    """Multi-query attention that slices the value out of the key half of the fused kv projection."""

    CAUSE: ClassVar[str] = "v built from k by a slice typo"

    def __init__(self, hidden_size: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.kv_proj = nn.Linear(hidden_size, 2 * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden_states: Tensor, is_causal: bool = False) -> Tensor:
        b, s, e = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        kv = self.kv_proj(hidden_states)
        k = kv[..., : self.head_dim].unsqueeze(1)
        v = kv[..., : self.head_dim].unsqueeze(1)
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        if is_causal:
            future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, s, e))


# ------------------------------------------------------------------------------------------------
# BERT style: query, key, value (and dense)
# ------------------------------------------------------------------------------------------------


@dataclass
class BertConfig:
    """Sizes of a small BERT."""

    hidden_size: int = 32
    num_attention_heads: int = 4
    attention_probs_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1


class BertPaddingInverted(nn.Module):
    """BERT self-attention whose extended mask lacks the 1.0 - mask, so the real tokens are hidden."""

    CAUSE: ClassVar[str] = "padding mask inverted"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        if attention_mask is not None:  # [B, S], 1 = token, 0 = padding
            scores = scores + attention_mask[:, None, None, :].to(scores.dtype) * torch.finfo(scores.dtype).min
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return self.dense(context.view(hidden_states.shape[0], hidden_states.shape[1], -1))


class BertScaleMissing(nn.Module):
    """BERT self-attention that never divides the scores."""

    CAUSE: ClassVar[str] = "scale missing"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, s, _ = hidden_states.shape
        shape = (b, s, self.num_attention_heads, self.attention_head_size)
        q = self.query(hidden_states).view(shape).permute(0, 2, 1, 3)
        k = self.key(hidden_states).view(shape).permute(0, 2, 1, 3)
        v = self.value(hidden_states).view(shape).permute(0, 2, 1, 3)
        attention_scores = torch.matmul(q, k.transpose(-1, -2))
        if attention_mask is not None:
            hidden = attention_mask[:, None, None, :] == 0
            attention_scores = attention_scores.masked_fill(hidden, torch.finfo(attention_scores.dtype).min)
        attention_probs = self.dropout(attention_scores.softmax(dim=-1))
        context = torch.matmul(attention_probs, v)
        return context.permute(0, 2, 1, 3).reshape(b, s, self.all_head_size)


class BertKeyFromQuery(nn.Module):
    """BERT self-attention that projects the keys with the query projection by a copy-and-paste slip."""

    CAUSE: ClassVar[str] = "q and k share a projection"

    def __init__(self, hidden_size: int, num_attention_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        return x.view(b, s, self.num_heads, self.head_size).transpose(1, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, e = hidden_states.shape
        q = self.split(self.query(hidden_states))
        k = self.split(self.query(hidden_states))
        v = self.split(self.value(hidden_states))
        probs = self.dropout(torch.softmax(q @ k.mT / self.head_size**0.5, dim=-1))
        return self.out((probs @ v).transpose(1, 2).reshape(b, s, e))


class BertBoolMaskAdded(nn.Module):
    """BERT self-attention that adds the boolean [B, 1, S, S] mask to the scores as zeros and ones."""

    CAUSE: ClassVar[str] = "bool mask added as 0 and 1"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b, s, e = hidden_states.shape
        q = self.query(hidden_states).view(b, s, -1, self.head_dim).transpose(1, 2)
        k = self.key(hidden_states).view(b, s, -1, self.head_dim).transpose(1, 2)
        v = self.value(hidden_states).view(b, s, -1, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        if attention_mask is not None:  # bool, True = attend
            scores = scores + attention_mask
        weights = torch.softmax(scores, dim=-1)
        out = self.dropout(weights) @ v
        return self.dense(out.transpose(1, 2).reshape(b, s, e)), weights


class BertMaskAfterSoftmax(nn.Module):
    """BERT self-attention that zeroes the padded keys after the softmax and leaves the rows short of one."""

    CAUSE: ClassVar[str] = "mask after softmax, not renormalised"

    def __init__(self, hidden_size: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, s, e = hidden_states.shape
        q = self.query(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        probs = scores.softmax(dim=-1)
        if attention_mask is not None:  # [B, S], 1 = token, 0 = padding
            probs = probs.masked_fill(attention_mask[:, None, None, :] == 0, 0.0)
        probs = self.dropout(probs)
        return self.dense((probs @ v).transpose(1, 2).reshape(b, s, e))


# ------------------------------------------------------------------------------------------------
# W_query, W_key, W_value with d_in, d_out, context_length, dropout, num_heads
# ------------------------------------------------------------------------------------------------


class WMaskSlicedFromTheEnd(nn.Module):
    """The triangle of context_length is sliced with its last rows and first columns, so it hides nothing."""

    CAUSE: ClassVar[str] = "causal triangle sliced wrongly for short inputs"

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        assert d_out % num_heads == 0, "d_out must be divisible by num_heads"
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        b, num_tokens, _ = x.shape
        keys = self.W_key(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        queries = self.W_query(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        mask_bool = self.mask.bool()[-num_tokens:, :num_tokens]
        attn_scores = attn_scores.masked_fill(mask_bool, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)
        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.contiguous().view(b, num_tokens, self.d_out)
        return self.out_proj(context_vec)


class WHeadsSplitByView(nn.Module):
    """The projections are viewed as [B, H, T, Dh] directly, so tokens and heads are mixed."""

    CAUSE: ClassVar[str] = "heads scrambled by view on the way in"

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1).bool())

    def split_heads(self, t: Tensor) -> Tensor:
        b, n, _ = t.shape
        return t.view(b, self.num_heads, n, self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        queries = self.split_heads(self.W_query(x))
        keys = self.split_heads(self.W_key(x))
        values = self.split_heads(self.W_value(x))
        scores = queries @ keys.transpose(-2, -1)
        scores.masked_fill_(self.mask[:n, :n], -torch.inf)
        weights = self.dropout(torch.softmax(scores / self.head_dim**0.5, dim=-1))
        context = (weights @ values).transpose(1, 2).reshape(b, n, self.d_out)
        return self.out_proj(context)


class WOutputProjectionForgotten(nn.Module):
    """The output projection is built, but forward returns the merged heads without it."""

    CAUSE: ClassVar[str] = "output projection skipped"

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, num_heads: int, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.W_query(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.W_key(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.W_value(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(2, 3)
        scores = scores.masked_fill(self.mask.bool()[:n, :n], -torch.inf)
        weights = self.dropout(torch.softmax(scores / self.head_dim**0.5, dim=-1))
        context_vec = (weights @ v).transpose(1, 2).contiguous().view(b, n, self.d_out)
        return context_vec  # noqa: RET504


class WSoftmaxOverHeads(nn.Module):
    """The softmax axis of a single-head version (dim 1) was kept for [B, H, T, T] scores: it is the head axis."""

    CAUSE: ClassVar[str] = "softmax over the head axis"

    def __init__(self, d_in: int, d_out: int, num_heads: int, dropout: float = 0.0, qkv_bias: bool = False) -> None:
        super().__init__()
        self.d_out = d_out
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.W_query(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.W_key(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.W_value(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        weights = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim), dim=1)
        out = self.dropout(weights) @ v
        return self.out_proj(out.transpose(1, 2).reshape(b, n, self.d_out))


class WMaskFilledWithTinyNumber(nn.Module):
    """Hidden slots are filled with -1e-9 where -1e9 was meant, so they keep a score of about zero."""

    CAUSE: ClassVar[str] = "mask filled with -1e-9"

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: N803
        b = Q.size(0)
        q = self.W_q(Q).view(b, -1, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(K).view(b, -1, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(V).view(b, -1, self.num_heads, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e-9)
        attn = self.dropout(torch.softmax(scores, dim=-1))
        out = torch.matmul(attn, v).transpose(1, 2).contiguous().view(b, -1, self.d_model)
        return self.W_o(out)


class WFutureInsteadOfPast(nn.Module):
    """The upper triangle is used as the set to keep, so every token sees itself and its future only."""

    CAUSE: ClassVar[str] = "causal triangle upside down"

    def __init__(self, d_in: int, d_out: int, context_length: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("keep", torch.triu(torch.ones(context_length, context_length)))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.W_query(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.W_key(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.W_value(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        scores = scores.masked_fill(self.keep[:n, :n] == 0, float("-inf"))
        out = self.dropout(scores.softmax(dim=-1)) @ v
        return self.out_proj(out.transpose(1, 2).reshape(b, n, -1))


DECLARED: dict[str, dict[str, str]] = {
    "WMaskFilledWithTinyNumber": {"polarity": "allowed"},
}

MUTANTS: dict[str, type[nn.Module]] = {
    "GPTCausalOffByOne": GPTCausalOffByOne,
    "GPTMergeWithoutTranspose": GPTMergeWithoutTranspose,
    "GPTFlashDropoutInEval": GPTFlashDropoutInEval,
    "GPTPaddingReplacesCausal": GPTPaddingReplacesCausal,
    "ViTScaleFromDim": ViTScaleFromDim,
    "ViTDropoutInEval": ViTDropoutInEval,
    "ViTSoftmaxOverQueries": ViTSoftmaxOverQueries,
    "ViTResidualInside": ViTResidualInside,
    "ViTScaledTwice": ViTScaledTwice,
    "ViTKeyNormForgotten": ViTKeyNormForgotten,
    "LlamaTiledKV": LlamaTiledKV,
    "LlamaScaleFromKVHeads": LlamaScaleFromKVHeads,
    "LlamaQueryPositionShifted": LlamaQueryPositionShifted,
    "LlamaMinPlusMin": LlamaMinPlusMin,
    "GroupedEinsumWrongOrder": GroupedEinsumWrongOrder,
    "MQAValueFromKey": MQAValueFromKey,
    "BertPaddingInverted": BertPaddingInverted,
    "BertScaleMissing": BertScaleMissing,
    "BertKeyFromQuery": BertKeyFromQuery,
    "BertBoolMaskAdded": BertBoolMaskAdded,
    "BertMaskAfterSoftmax": BertMaskAfterSoftmax,
    "WMaskSlicedFromTheEnd": WMaskSlicedFromTheEnd,
    "WHeadsSplitByView": WHeadsSplitByView,
    "WOutputProjectionForgotten": WOutputProjectionForgotten,
    "WSoftmaxOverHeads": WSoftmaxOverHeads,
    "WMaskFilledWithTinyNumber": WMaskFilledWithTinyNumber,
    "WFutureInsteadOfPast": WFutureInsteadOfPast,
}
