"""Blind test material: correct attention modules as people write them.

Written without sight of the checks.  In eval mode every class agrees with a per-head float64 loop.
``DECLARED`` holds what a user would have to state where a convention cannot be read from the names.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------
# GPT and blog styles, causal always
# ------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    """Sizes of a small GPT."""

    block_size: int = 64
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0
    bias: bool = True


class CausalSelfAttention(nn.Module):
    """nanoGPT's attention with the flash path; causal always."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class CausalSelfAttentionSlow(nn.Module):
    """nanoGPT's attention with the explicit path and the triangular buffer called bias."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.register_buffer(
            "bias", torch.tril(torch.ones(config.block_size, config.block_size))[None, None], persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MinGPTAttention(nn.Module):
    """minGPT's first version: separate key, query, value layers and a mask buffer."""

    def __init__(self, n_embd: int, n_head: int, block_size: int, attn_pdrop: float = 0.1) -> None:
        super().__init__()
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.attn_drop = nn.Dropout(attn_pdrop)
        self.proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))
        self.n_head = n_head

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        k = self.key(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = self.query(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = self.value(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :t, :t] == 0, torch.finfo(att.dtype).min)
        att = self.attn_drop(F.softmax(att, dim=-1))
        return self.proj((att @ v).transpose(1, 2).contiguous().view(b, t, c))


class Conv1D(nn.Module):
    """GPT-2's linear layer with the weight stored as [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class GPT2Conv1DAttention(nn.Module):
    """GPT-2 as in transformers: Conv1D layers, attention_mask [B, S] with 1 = token, causal always."""

    def __init__(self, hidden_size: int, num_heads: int, max_positions: int = 128) -> None:
        super().__init__()
        self.split_size = hidden_size
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.c_attn = Conv1D(3 * hidden_size, hidden_size)
        self.c_proj = Conv1D(hidden_size, hidden_size)
        self.register_buffer(
            "causal", torch.tril(torch.ones(max_positions, max_positions, dtype=torch.bool)), persistent=False
        )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, s, _ = hidden_states.shape
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query = query.view(b, s, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        key = key.view(b, s, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        value = value.view(b, s, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        weights = torch.matmul(query, key.transpose(-1, -2)) / self.head_dim**0.5
        lowest = torch.finfo(weights.dtype).min
        weights = torch.where(self.causal[:s, :s], weights, lowest)
        if attention_mask is not None:
            weights = weights.masked_fill(attention_mask[:, None, None, :] == 0, lowest)
        weights = nn.functional.softmax(weights, dim=-1)
        out = torch.matmul(weights, value).permute(0, 2, 1, 3).reshape(b, s, -1)
        return self.c_proj(out)


class Head(nn.Module):
    """One head of causal self-attention, after Karpathy's lecture."""

    def __init__(self, n_embd: int, head_size: int, block_size: int, dropout: float) -> None:
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        _, T, _ = x.shape  # noqa: N806
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = self.dropout(F.softmax(wei, dim=-1))
        return wei @ self.value(x)


class MultiHeadAttentionList(nn.Module):
    """Several single heads in a list, concatenated and projected."""

    def __init__(self, n_embd: int, num_heads: int, block_size: int = 64, dropout: float = 0.2) -> None:
        super().__init__()
        head_size = n_embd // num_heads
        self.heads = nn.ModuleList([Head(n_embd, head_size, block_size, dropout) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


class WMultiHeadAttention(nn.Module):
    """Causal attention with W_query, W_key, W_value, d_in and d_out."""

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
        mask_bool = self.mask.bool()[:num_tokens, :num_tokens]
        attn_scores.masked_fill_(mask_bool, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)
        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.contiguous().view(b, num_tokens, self.d_out)
        return self.out_proj(context_vec)


class SelfAttentionV1(nn.Module):
    """Single-head attention on bare parameters without an output projection, not causal."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x: Tensor) -> Tensor:
        keys = x @ self.W_key
        queries = x @ self.W_query
        values = x @ self.W_value
        attn_scores = queries @ keys.mT
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        return attn_weights @ values


class CausalAttentionSingle(nn.Module):
    """Single-head causal attention with linear layers and no output projection."""

    def __init__(self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        num_tokens = x.shape[1]
        keys, queries, values = self.W_key(x), self.W_query(x), self.W_value(x)
        attn_scores = queries @ keys.transpose(1, 2)
        attn_scores = attn_scores.masked_fill(self.mask.bool()[:num_tokens, :num_tokens], -torch.inf)
        attn_weights = self.dropout(torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1))
        return attn_weights @ values


# ------------------------------------------------------------------------------------------------
# ViT styles
# ------------------------------------------------------------------------------------------------


class ViTAttention(nn.Module):
    """timm's attention with optional query and key norms and both paths."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        fused_attn: bool = True,
    ) -> None:
        super().__init__()
        assert dim % num_heads == 0, "dim should be divisible by num_heads"
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = fused_attn
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            attn = self.attn_drop(attn.softmax(dim=-1))
            x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class ViTAttentionWithWeights(nn.Module):
    """DINO's attention: returns the output and the weights [B, H, N, N]."""

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = True, attn_drop: float = 0.0, proj_drop: float = 0.0
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, N, C = x.shape  # noqa: N806
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        x = (self.attn_drop(attn) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x)), attn


class ViTKeyNormed(nn.Module):
    """Vision attention with LayerNorm on the queries and keys of each head, always on."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.k_norm = nn.LayerNorm(self.head_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        dots = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(self.head_dim)
        out = torch.einsum("bhqk,bkhd->bqhd", dots.softmax(dim=-1), v)
        return self.proj(out.flatten(2))


class NeoXInterleavedQKV(nn.Module):
    """GPT-NeoX packing: query_key_value holds q, k, v of head 0, then of head 1, and so on; causal always."""

    def __init__(self, hidden_size: int, num_attention_heads: int) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, e = hidden_states.shape
        qkv = self.query_key_value(hidden_states).view(b, s, self.num_attention_heads, 3 * self.head_size)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(out.transpose(1, 2).reshape(b, s, e))


# ------------------------------------------------------------------------------------------------
# BERT and Transformer styles
# ------------------------------------------------------------------------------------------------


@dataclass
class BertConfig:
    """Sizes of a small BERT."""

    hidden_size: int = 32
    num_attention_heads: int = 4
    attention_probs_dropout_prob: float = 0.1


class BertSelfAttention(nn.Module):
    """BERT's self-attention, no output layer; attention_mask is [B, S] with 1 = token and 0 = padding."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size
        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            extended = (1.0 - attention_mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
            scores = scores + extended
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return context.view(*context.shape[:-2], self.all_head_size)


class BertAdditiveMask(nn.Module):
    """BERT with its dense layer; attention_mask is additive, [B, 1, 1, S] or [B, 1, S, S]; returns weights."""

    def __init__(self, hidden_size: int, num_attention_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b, s, e = hidden_states.shape
        q = self.query(hidden_states).view(b, s, self.num_heads, self.head_size).transpose(1, 2)
        k = self.key(hidden_states).view(b, s, self.num_heads, self.head_size).transpose(1, 2)
        v = self.value(hidden_states).view(b, s, self.num_heads, self.head_size).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = scores.softmax(dim=-1)
        out = (self.dropout(probs) @ v).transpose(1, 2).reshape(b, s, e)
        return self.dense(out), probs


class AnnotatedMultiHeadedAttention(nn.Module):
    """The Annotated Transformer: four linear layers in a list, mask [B, 1, S] or [B, S, S] with 0 = hidden."""

    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn: Tensor | None = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = (
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        )
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = self.dropout(scores.softmax(dim=-1))
        self.attn = p_attn.detach()
        x = torch.matmul(p_attn, value)
        x = x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](x)


class ValuesKeysQuery(nn.Module):
    """A video tutorial's argument order (values, keys, query, mask), einsum, mask 0 = hidden."""

    def __init__(self, embed_size: int, heads: int) -> None:
        super().__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        assert self.head_dim * heads == embed_size, "Embedding size needs to be divisible by heads"
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values: Tensor, keys: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        n, query_len = query.shape[0], query.shape[1]
        v = self.values(values).reshape(n, values.shape[1], self.heads, self.head_dim)
        k = self.keys(keys).reshape(n, keys.shape[1], self.heads, self.head_dim)
        q = self.queries(query).reshape(n, query_len, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, torch.finfo(energy.dtype).min)
        attention = torch.softmax(energy / (self.head_dim ** (1 / 2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, v]).reshape(n, query_len, self.heads * self.head_dim)
        return self.fc_out(out)


class SeparateKeyValueWidths(nn.Module):
    """w_qs, w_ks, w_vs, fc with d_k and d_v of their own; mask True = hidden; returns output and weights."""

    def __init__(self, n_head: int, d_model: int, d_k: int, d_v: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.n_head = n_head
        self.d_k = d_k
        self.d_v = d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """mask: bool, [B, Sq, Sk]."""
        b, len_q, len_k, len_v = q.size(0), q.size(1), k.size(1), v.size(1)
        q = self.w_qs(q).view(b, len_q, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(k).view(b, len_k, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(v).view(b, len_v, self.n_head, self.d_v).transpose(1, 2)
        attn = torch.matmul(q / self.d_k**0.5, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask.unsqueeze(1), torch.finfo(attn.dtype).min)
        attn = torch.softmax(attn, dim=-1)
        out = torch.matmul(self.dropout(attn), v).transpose(1, 2).contiguous().view(b, len_q, -1)
        return self.fc(out), attn


class HiddenMaskAttention(nn.Module):
    """Self-attention whose mask [B, S] is True where a key is hidden."""

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.d_head = d_model // num_heads
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        q = self.wq(x).view(b, s, self.num_heads, self.d_head).transpose(1, 2)
        k = self.wk(x).view(b, s, self.num_heads, self.d_head).transpose(1, 2)
        v = self.wv(x).view(b, s, self.num_heads, self.d_head).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = self.dropout(scores.softmax(dim=-1))
        return self.wo((weights @ v).transpose(1, 2).reshape(b, s, d))


class BlockedMatrixAttention(nn.Module):
    """Self-attention whose boolean [S, S] mask is True where attention is blocked."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(embed_dim, embed_dim)
        self.k = nn.Linear(embed_dim, embed_dim)
        self.v = nn.Linear(embed_dim, embed_dim)
        self.o = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        keep = None if mask is None else ~mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.o(out.transpose(1, 2).reshape(b, s, d))


class LengthsAttention(nn.Module):
    """Self-attention that hides the keys at and beyond each sample's length; lengths is int [B]."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        q, k, v = (f(x).view(b, s, self.num_heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) * (d // self.num_heads) ** -0.5
        if lengths is not None:
            valid = torch.arange(s, device=x.device)[None, :] < lengths[:, None]
            scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, d))


# ------------------------------------------------------------------------------------------------
# Llama styles
# ------------------------------------------------------------------------------------------------


@dataclass
class LlamaConfig:
    """Sizes of a small Llama."""

    hidden_size: int = 32
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    attention_bias: bool = False
    attention_dropout: float = 0.0
    rope_theta: float = 10000.0


def rotate_half(x: Tensor) -> Tensor:
    """Turn the second half of the channels into the first."""
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rope(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding of x, [B, H, S, D], for the positions 0 to S - 1."""
    s, d = x.shape[-2:]
    inv_freq = 1.0 / theta ** (torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d)
    angles = torch.outer(torch.arange(s, device=x.device, dtype=torch.float64), inv_freq)
    angles = torch.cat((angles, angles), dim=-1)
    return x * angles.cos().to(x.dtype) + rotate_half(x) * angles.sin().to(x.dtype)


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    """[B, Hkv, S, D] -> [B, Hkv * n_rep, S, D], each head repeated in place."""
    b, h, s, d = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    return hidden_states[:, :, None, :, :].expand(b, h, n_rep, s, d).reshape(b, h * n_rep, s, d)


class LlamaAttention(nn.Module):
    """Llama: rotary embedding, grouped heads, float32 softmax, additive mask [B, 1, S, S]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.rope_theta = config.rope_theta
        self.attention_dropout = config.attention_dropout
        kv_dim = self.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rope(q, self.rope_theta), apply_rope(k, self.rope_theta)
        k = repeat_kv(k, self.num_heads // self.num_key_value_heads)
        v = repeat_kv(v, self.num_heads // self.num_key_value_heads)
        weights = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            weights = weights + attention_mask
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, p=self.attention_dropout, training=self.training)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().reshape(bsz, q_len, -1)
        return self.o_proj(out)


class LlamaFlagAttention(nn.Module):
    """Grouped heads without rotary embedding, the causal mask switched by is_causal."""

    def __init__(self, hidden_size: int, num_attention_heads: int, num_key_value_heads: int) -> None:
        super().__init__()
        self.num_heads = num_attention_heads
        self.num_kv_heads = num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, is_causal: bool = True) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        v = v.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class LlamaPaddedCausal(nn.Module):
    """Grouped heads, causal always, together with a [B, S] padding mask of ones and zeros."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=True)
        self.k_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(config.hidden_size, self.num_kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        b, s, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)
        keep = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()[None, None]
        if attention_mask is not None:
            keep = keep & attention_mask.bool()[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


class MultiQueryAttention(nn.Module):
    """One key/value head for all query heads, fused kv projection."""

    def __init__(self, hidden_size: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=bias)
        self.kv_proj = nn.Linear(hidden_size, 2 * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=bias)

    def forward(self, hidden_states: Tensor, is_causal: bool = False) -> Tensor:
        b, s, e = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim)
        k, v = self.kv_proj(hidden_states).split(self.head_dim, dim=-1)
        scores = torch.einsum("bqhd,bkd->bhqk", q, k) * self.head_dim**-0.5
        if is_causal:
            future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        out = torch.einsum("bhqk,bkd->bqhd", scores.softmax(dim=-1), v)
        return self.o_proj(out.reshape(b, s, e))


class GroupedEinsumAttention(nn.Module):
    """Grouped-query attention in which the query is viewed as [B, S, Hkv, G, D] and nothing is repeated."""

    def __init__(self, embed_dim: int, query_heads: int, kv_heads: int) -> None:
        super().__init__()
        self.query_heads = query_heads
        self.kv_heads = kv_heads
        self.head_dim = embed_dim // query_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, kv_heads * self.head_dim)
        self.v_proj = nn.Linear(embed_dim, kv_heads * self.head_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = self.q_proj(x).view(b, s, self.kv_heads, -1, self.head_dim)
        k = self.k_proj(x).view(b, s, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.kv_heads, self.head_dim)
        scores = torch.einsum("bshgd,bthd->bhgst", q, k) / math.sqrt(self.head_dim)
        out = torch.einsum("bhgst,bthd->bshgd", scores.softmax(dim=-1), v)
        return self.out_proj(out.reshape(b, s, e))


class FusedWqkvGrouped(nn.Module):
    """Wqkv holds all query heads, then all key heads, then all value heads; causal always."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_kv_heads
        self.head_dim = d_model // n_heads
        self.Wqkv = nn.Linear(d_model, (n_heads + 2 * n_kv_heads) * self.head_dim, bias=False)
        self.out_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        kv = self.n_kv_heads * self.head_dim
        q, k, v = self.Wqkv(x).split([self.n_heads * self.head_dim, kv, kv], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class QwenAttention(nn.Module):
    """Qwen3: head_dim of its own, RMS norm of queries and keys per head, rotary embedding, causal always."""

    def __init__(
        self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, rope_theta: float = 1e6
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(head_dim)
        self.k_norm = RMSNorm(head_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, _ = hidden_states.shape
        q = self.q_norm(self.q_proj(hidden_states).view(b, s, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(b, s, -1, self.head_dim)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, s, -1, self.head_dim).transpose(1, 2)
        q, k = apply_rope(q, self.rope_theta), apply_rope(k, self.rope_theta)
        k = repeat_kv(k, self.num_heads // self.num_kv_heads)
        v = repeat_kv(v, self.num_heads // self.num_kv_heads)
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        scores = scores + torch.full((s, s), float("-inf"), device=q.device, dtype=q.dtype).triu(1)
        out = scores.softmax(dim=-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(b, s, -1))


# ------------------------------------------------------------------------------------------------
# cross-attention
# ------------------------------------------------------------------------------------------------


class LucidAttention(nn.Module):
    """to_q, to_kv, to_out; the optional context gives keys and values; mask [B, N] of keys, True = keep."""

    def __init__(self, dim: int, heads: int = 8, dim_head: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h = self.heads
        context = x if context is None else context
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t in (q, k, v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        if mask is not None:
            sim = sim.masked_fill(~mask[:, None, None, :], -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class DiffusionCrossAttention(nn.Module):
    """Stable Diffusion's attention on a merged batch-head axis; context has a width of its own."""

    def __init__(
        self, query_dim: int, context_dim: int | None = None, heads: int = 8, dim_head: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = query_dim if context_dim is None else context_dim
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def split(self, t: Tensor) -> Tensor:
        b, n, _ = t.shape
        return t.view(b, n, self.heads, -1).permute(0, 2, 1, 3).reshape(b * self.heads, n, -1)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        context = x if context is None else context
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(empty, q, k.transpose(1, 2), beta=0, alpha=self.scale)
        out = torch.bmm(scores.softmax(dim=-1), v)
        out = out.view(b, self.heads, n, -1).permute(0, 2, 1, 3).reshape(b, n, -1)
        return self.to_out(out)


class PerceiverCrossAttention(nn.Module):
    """Latents of width query_dim attend to inputs of width kv_dim; key_padding_mask True = padding."""

    def __init__(self, query_dim: int, kv_dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = query_dim // num_heads
        self.q_proj = nn.Linear(query_dim, query_dim)
        self.k_proj = nn.Linear(kv_dim, query_dim)
        self.v_proj = nn.Linear(kv_dim, query_dim)
        self.out_proj = nn.Linear(query_dim, query_dim)

    def forward(self, query: Tensor, key_value: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        b, sq, e = query.shape
        sk = key_value.shape[1]
        q = self.q_proj(query).view(b, sq, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(key_value).view(b, sk, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(key_value).view(b, sk, self.num_heads, self.head_dim).transpose(1, 2)
        mask = None if key_padding_mask is None else ~key_padding_mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).reshape(b, sq, e))


class WhisperAttention(nn.Module):
    """Whisper: key without bias, both sides scaled by d ** -0.25, optional xa, additive [S, S] mask."""

    def __init__(self, n_state: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q = self.query(x)
        k = self.key(x if xa is None else xa)
        v = self.value(x if xa is None else xa)
        n_ctx = q.shape[1]
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk + mask[:n_ctx, :n_ctx]
        w = F.softmax(qk.float(), dim=-1).to(q.dtype)
        return self.out((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class EncoderDecoderAttention(nn.Module):
    """BART style: hidden_states and optional key_value_states, additive mask [B, 1, Sq, Sk], returns weights."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        b, tgt, e = hidden_states.shape
        source = hidden_states if key_value_states is None else key_value_states
        src = source.shape[1]
        q = (self.q_proj(hidden_states) * self.scaling).view(b, tgt, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(source).view(b, src, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(source).view(b, src, self.num_heads, self.head_dim).transpose(1, 2)
        q, k, v = (t.reshape(b * self.num_heads, -1, self.head_dim) for t in (q, k, v))
        weights = torch.bmm(q, k.transpose(1, 2))
        if attention_mask is not None:
            weights = (weights.view(b, self.num_heads, tgt, src) + attention_mask).view(-1, tgt, src)
        weights = F.softmax(weights, dim=-1)
        probs = F.dropout(weights, p=self.dropout, training=self.training)
        out = torch.bmm(probs, v).view(b, self.num_heads, tgt, self.head_dim).transpose(1, 2).reshape(b, tgt, e)
        return self.out_proj(out), weights.view(b, self.num_heads, tgt, src)


# ------------------------------------------------------------------------------------------------
# bare parameters, packed projections, sequence first
# ------------------------------------------------------------------------------------------------


class LensAttention(nn.Module):
    """TransformerLens style: W_Q, W_K, W_V [H, D, Dh], W_O [H, Dh, D] and biases; causal always."""

    def __init__(self, d_model: int, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) / math.sqrt(d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, normalized_resid_pre: Tensor) -> Tensor:
        x = normalized_resid_pre
        q = torch.einsum("bpm,nmh->bpnh", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpm,nmh->bpnh", x, self.W_K) + self.b_K
        v = torch.einsum("bpm,nmh->bpnh", x, self.W_V) + self.b_V
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) / self.d_head**0.5
        future = torch.triu(torch.ones(x.shape[1], x.shape[1], device=x.device), diagonal=1).bool()
        pattern = scores.masked_fill(future, float("-inf")).softmax(-1)
        z = torch.einsum("bnqk,bknh->bqnh", pattern, v)
        return torch.einsum("bqnh,nhm->bqm", z, self.W_O) + self.b_O


class BareMatrixAttention(nn.Module):
    """Bare [D, D] matrices applied from the right, a causal flag in the constructor."""

    def __init__(self, dim: int, num_heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.wq = nn.Parameter(torch.empty(dim, dim))
        self.wk = nn.Parameter(torch.empty(dim, dim))
        self.wv = nn.Parameter(torch.empty(dim, dim))
        self.wo = nn.Parameter(torch.empty(dim, dim))
        for p in self.parameters():
            nn.init.xavier_uniform_(p)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q, k, v = ((x @ w).view(b, s, self.num_heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            keep = torch.tril(torch.ones(s, s, dtype=torch.bool, device=x.device))
            scores = torch.where(keep, scores, torch.finfo(scores.dtype).min)
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, s, e) @ self.wo


class PackedSeqFirstAttention(nn.Module):
    """[S, B, D] with in_proj_weight, float attn_mask [S, S], key_padding_mask True = padding; averaged weights."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, batch_first: bool = False) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        tgt, bsz, e = query.shape
        src = key.shape[0]
        w, b = self.in_proj_weight, self.in_proj_bias
        q = F.linear(query, w[:e], b[:e]) * self.head_dim**-0.5
        k = F.linear(key, w[e : 2 * e], b[e : 2 * e])
        v = F.linear(value, w[2 * e :], b[2 * e :])
        q = q.contiguous().view(tgt, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(src, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(src, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        bias = torch.zeros(bsz * self.num_heads, tgt, src, dtype=q.dtype, device=q.device)
        if attn_mask is not None:
            bias = bias + attn_mask
        if key_padding_mask is not None:
            hidden = key_padding_mask.repeat_interleave(self.num_heads, dim=0)[:, None, :]
            bias = bias.masked_fill(hidden, float("-inf"))
        weights = torch.baddbmm(bias, q, k.transpose(1, 2)).softmax(dim=-1)
        out = torch.bmm(F.dropout(weights, self.dropout, self.training), v)
        out = self.out_proj(out.transpose(0, 1).contiguous().view(tgt, bsz, e))
        averaged = weights.view(bsz, self.num_heads, tgt, src).mean(dim=1)
        return (out.transpose(0, 1) if self.batch_first else out), averaged


class FairseqAttention(nn.Module):
    """[S, B, D] always; separate projections; key_padding_mask [B, S] True = padding."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.batch_first = False
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout_module = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        """x: [S, B, D]."""
        s, b, e = x.shape
        q = self.q_proj(x).view(s, b, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        k = self.k_proj(x).view(s, b, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        v = self.v_proj(x).view(s, b, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        out = self.dropout_module(scores.softmax(dim=-1)) @ v
        return self.out_proj(out.permute(2, 0, 1, 3).reshape(s, b, e))


class WrappedTorchMHA(nn.Module):
    """A thin wrapper about nn.MultiheadAttention, batch first, key_padding_mask True = padding."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        out, _ = self.mha(x, x, x, key_padding_mask=key_padding_mask, need_weights=False)
        return out


# ------------------------------------------------------------------------------------------------
# chunks
# ------------------------------------------------------------------------------------------------


class OnlineSoftmaxAttention(nn.Module):
    """Keys in blocks with a running maximum, as in flash attention; causal flag in the call."""

    def __init__(self, embed_dim: int, num_heads: int, block_size: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.block_size = block_size
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        b, s, e = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2) * self.head_dim**-0.5
        k = self.k_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        rows = torch.arange(s, device=x.device)
        m = torch.full_like(q[..., :1], torch.finfo(q.dtype).min)
        den = torch.zeros_like(m)
        acc = torch.zeros_like(q)
        for start in range(0, s, self.block_size):
            kb = k[:, :, start : start + self.block_size]
            vb = v[:, :, start : start + self.block_size]
            scores = q @ kb.transpose(-2, -1)
            if causal:
                cols = torch.arange(start, start + kb.shape[2], device=x.device)
                scores = scores.masked_fill(cols[None, :] > rows[:, None], float("-inf"))
            m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
            p = torch.exp(scores - m_new)
            alpha = torch.exp(m - m_new)
            den = den * alpha + p.sum(dim=-1, keepdim=True)
            acc = acc * alpha + p @ vb
            m = m_new
        return self.out_proj((acc / den).transpose(1, 2).reshape(b, s, e))


class SlicedAttention(nn.Module):
    """Queries in slices of slice_size, the last one shorter where it must be."""

    def __init__(self, query_dim: int, heads: int = 8, dim_head: int = 64, slice_size: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.scale = dim_head**-0.5
        self.slice_size = slice_size
        self.to_q = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(query_dim, heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, query_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, _ = hidden_states.shape
        q = self.to_q(hidden_states).view(b, s, self.heads, -1).transpose(1, 2)
        k = self.to_k(hidden_states).view(b, s, self.heads, -1).transpose(1, 2)
        v = self.to_v(hidden_states).view(b, s, self.heads, -1).transpose(1, 2)
        parts = []
        for rows in q.split(self.slice_size, dim=2):
            attn = (rows @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
            parts.append(attn @ v)
        return self.to_out(torch.cat(parts, dim=2).transpose(1, 2).reshape(b, s, -1))


DECLARED: dict[str, dict[str, str]] = {
    "AnnotatedMultiHeadedAttention": {"polarity": "allowed"},
    "ValuesKeysQuery": {"polarity": "allowed"},
    "SeparateKeyValueWidths": {"polarity": "masked"},
    "HiddenMaskAttention": {"polarity": "masked"},
    "BlockedMatrixAttention": {"polarity": "masked"},
    "LucidAttention": {"polarity": "allowed"},
}

HONEST: dict[str, type[nn.Module]] = {
    "CausalSelfAttention": CausalSelfAttention,
    "CausalSelfAttentionSlow": CausalSelfAttentionSlow,
    "MinGPTAttention": MinGPTAttention,
    "GPT2Conv1DAttention": GPT2Conv1DAttention,
    "MultiHeadAttentionList": MultiHeadAttentionList,
    "WMultiHeadAttention": WMultiHeadAttention,
    "SelfAttentionV1": SelfAttentionV1,
    "CausalAttentionSingle": CausalAttentionSingle,
    "ViTAttention": ViTAttention,
    "ViTAttentionWithWeights": ViTAttentionWithWeights,
    "ViTKeyNormed": ViTKeyNormed,
    "NeoXInterleavedQKV": NeoXInterleavedQKV,
    "BertSelfAttention": BertSelfAttention,
    "BertAdditiveMask": BertAdditiveMask,
    "AnnotatedMultiHeadedAttention": AnnotatedMultiHeadedAttention,
    "ValuesKeysQuery": ValuesKeysQuery,
    "SeparateKeyValueWidths": SeparateKeyValueWidths,
    "HiddenMaskAttention": HiddenMaskAttention,
    "BlockedMatrixAttention": BlockedMatrixAttention,
    "LengthsAttention": LengthsAttention,
    "LlamaAttention": LlamaAttention,
    "LlamaFlagAttention": LlamaFlagAttention,
    "LlamaPaddedCausal": LlamaPaddedCausal,
    "MultiQueryAttention": MultiQueryAttention,
    "GroupedEinsumAttention": GroupedEinsumAttention,
    "FusedWqkvGrouped": FusedWqkvGrouped,
    "QwenAttention": QwenAttention,
    "LucidAttention": LucidAttention,
    "DiffusionCrossAttention": DiffusionCrossAttention,
    "PerceiverCrossAttention": PerceiverCrossAttention,
    "WhisperAttention": WhisperAttention,
    "EncoderDecoderAttention": EncoderDecoderAttention,
    "LensAttention": LensAttention,
    "BareMatrixAttention": BareMatrixAttention,
    "PackedSeqFirstAttention": PackedSeqFirstAttention,
    "FairseqAttention": FairseqAttention,
    "WrappedTorchMHA": WrappedTorchMHA,
    "OnlineSoftmaxAttention": OnlineSoftmaxAttention,
    "SlicedAttention": SlicedAttention,
}
