"""Blind test material: more attention modules as people write them, each with exactly one planted fault.

The styles of this half: to_q/to_kv/to_out with a context, bare parameters, a packed in_proj_weight, single heads
in a ModuleList, sequence-first layouts, cross-attention with two inputs, modules that return their weights, and
modules that work in chunks.  ``CAUSE`` and ``DECLARED`` are as in ``module_mutants``.
"""

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------
# lucidrains style: to_q, to_kv, to_out with dim, heads, dim_head and an optional context
# ------------------------------------------------------------------------------------------------


def exists(val: object) -> bool:
    """Whether a value was given."""
    return val is not None


def default(val: Tensor | None, d: Tensor) -> Tensor:
    """The value, or d where none was given."""
    return val if val is not None else d


class LucidContextIgnored(nn.Module):
    """The source of keys and values is chosen the wrong way round, so it is always x and never the context."""

    CAUSE: ClassVar[str] = "cross attention ignores the context"

    def __init__(self, dim: int, heads: int = 8, dim_head: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.heads
        kv_input = x if exists(x) else context
        q = self.to_q(x)
        k, v = self.to_kv(kv_input).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (h, -1)).transpose(1, 2) for t in (q, k, v))
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class LucidKeysFromInput(nn.Module):
    """Cross-attention that reads the keys from x and only the values from the context."""

    CAUSE: ClassVar[str] = "cross attention reads keys from x"

    def __init__(self, dim: int, heads: int = 4, dim_head: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(dim, heads * dim_head, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        ctx = default(context, x)
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(ctx)
        q, k, v = (t.view(t.shape[0], t.shape[1], self.heads, -1).transpose(1, 2) for t in (q, k, v))
        attn = self.dropout((torch.matmul(q, k.transpose(-1, -2)) * self.scale).softmax(dim=-1))
        out = torch.matmul(attn, v)
        return self.to_out(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class LucidMaskHidesQueries(nn.Module):
    """The [B, N] keep mask is unsqueezed to 'b 1 n 1', so it blanks query rows and hides no key."""

    CAUSE: ClassVar[str] = "padding mask on the query axis"

    def __init__(self, dim: int, heads: int = 8, dim_head: int = 64) -> None:
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Linear(inner, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        if exists(mask):
            dots = dots.masked_fill(~mask[:, None, :, None], -torch.finfo(dots.dtype).max)
        attn = dots.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class LucidScaleIgnoresDimHead(nn.Module):
    """The scale is computed from dim // heads although the head width is dim_head."""

    CAUSE: ClassVar[str] = "scale from dim // heads, not dim_head"

    def __init__(
        self, query_dim: int, context_dim: int | None = None, heads: int = 8, dim_head: int = 64, dropout: float = 0.0
    ) -> None:
        super().__init__()
        context_dim = query_dim if context_dim is None else context_dim
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = (query_dim // heads) ** -0.5
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = default(context, x)
        b, n, _ = x.shape
        q = self.to_q(x).view(b, n, self.heads, -1).transpose(1, 2)
        k = self.to_k(context).view(b, context.shape[1], self.heads, -1).transpose(1, 2)
        v = self.to_v(context).view(b, context.shape[1], self.heads, -1).transpose(1, 2)
        attn = (q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1)
        return self.to_out((attn @ v).transpose(1, 2).reshape(b, n, -1))


# ------------------------------------------------------------------------------------------------
# bare parameters and packed projections
# ------------------------------------------------------------------------------------------------


class EinsumHeadsAveraged(nn.Module):
    """Per-head weights [H, D, Dh] and [H, Dh, D]; the heads' contributions are averaged instead of summed."""

    CAUSE: ClassVar[str] = "mean over heads instead of concatenation"

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        d_head = d_model // num_heads
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(num_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_K = nn.Parameter(torch.randn(num_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_V = nn.Parameter(torch.randn(num_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_O = nn.Parameter(torch.randn(num_heads, d_head, d_model) / math.sqrt(d_model))

    def forward(self, x: Tensor) -> Tensor:
        q = torch.einsum("bse,hed->bhsd", x, self.W_Q)
        k = torch.einsum("bse,hed->bhsd", x, self.W_K)
        v = torch.einsum("bse,hed->bhsd", x, self.W_V)
        pattern = torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(self.d_head), dim=-1)
        z = torch.einsum("bhqk,bhkd->bhqd", pattern, v)
        return torch.einsum("bhqd,hde->bhqe", z, self.W_O).mean(dim=1)


class BareScaleFromSequence(nn.Module):
    """Bare weight matrices; the scores are divided by the root of the sequence length."""

    CAUSE: ClassVar[str] = "normalised by sqrt(seq_len)"

    def __init__(self, dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Parameter(torch.empty(dim, dim))
        self.W_k = nn.Parameter(torch.empty(dim, dim))
        self.W_v = nn.Parameter(torch.empty(dim, dim))
        self.W_o = nn.Parameter(torch.empty(dim, dim))
        for p in self.parameters():
            nn.init.xavier_uniform_(p)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = (x @ self.W_q).view(b, s, self.num_heads, -1).transpose(1, 2)
        k = (x @ self.W_k).view(b, s, self.num_heads, -1).transpose(1, 2)
        v = (x @ self.W_v).view(b, s, self.num_heads, -1).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-2])
        out = torch.softmax(scores, dim=-1) @ v
        return out.transpose(1, 2).reshape(b, s, e) @ self.W_o


class PackedValueFromQuery(nn.Module):
    """A packed in_proj_weight is chunked rightly, but the value is projected with the query's chunk."""

    CAUSE: ClassVar[str] = "v from q's projection"

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.randn(3 * embed_dim) * 0.1)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        b_q, b_k, b_v = self.in_proj_bias.chunk(3)
        q = F.linear(query, w_q, b_q)
        k = F.linear(key, w_k, b_k)
        v = F.linear(value, w_q, b_v)
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class PackedMaskFirstHeadOnly(nn.Module):
    """A [B, H, S, S] keep mask is accepted, but the first head's plane is used for every head."""

    CAUSE: ClassVar[str] = "reads only the first head's mask"

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        b, s, e = x.shape
        q, k, v = (t.view(b, s, self.num_heads, -1).transpose(1, 2) for t in self.in_proj(x).chunk(3, dim=-1))
        if attn_mask is not None:  # bool, True = attend
            attn_mask = attn_mask[:, :1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(out.transpose(1, 2).reshape(b, s, e))


class QueryBiasDropped(nn.Module):
    """The query is projected by F.linear with the weight alone, so the query bias is lost."""

    CAUSE: ClassVar[str] = "bias of the query projection dropped"

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = F.linear(x, self.q_proj.weight)
        k = F.linear(x, self.k_proj.weight, self.k_proj.bias)
        v = F.linear(x, self.v_proj.weight, self.v_proj.bias)
        q, k, v = (t.view(b, s, self.num_heads, e // self.num_heads).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).reshape(b, s, e))


class OutputBiasTwice(nn.Module):
    """The output projection already adds its bias, and forward adds the same bias once more."""

    CAUSE: ClassVar[str] = "bias of the output projection added twice"

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        attn = torch.softmax(q @ k.transpose(-2, -1) / self.head_dim**0.5, dim=-1)
        out = (attn @ v).transpose(1, 2).reshape(b, s, e)
        return self.out_proj(out) + self.out_proj.bias


# ------------------------------------------------------------------------------------------------
# state kept between calls
# ------------------------------------------------------------------------------------------------


class Head(nn.Module):
    """One head of attention, mask [B, T, T] True = hidden."""

    def __init__(self, n_embd: int, head_size: int) -> None:
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * self.key.out_features**-0.5
        if hidden is not None:
            wei = wei.masked_fill(hidden, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class HeadListStaleMask(nn.Module):
    """Single heads in a list; the mask built for the first call is used again for every call of its shape."""

    CAUSE: ClassVar[str] = "mask kept from an earlier call"

    def __init__(self, n_embd: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(n_embd, n_embd // num_heads) for _ in range(num_heads)])
        self.proj = nn.Linear(n_embd, n_embd)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if key_padding_mask is None:
            return self.proj(torch.cat([h(x, None) for h in self.heads], dim=-1))
        if self.hidden is None or self.hidden.shape[0] != x.shape[0] or self.hidden.shape[2] != x.shape[1]:
            self.hidden = key_padding_mask[:, None, :].expand(-1, x.shape[1], -1)  # True = padding
        return self.proj(torch.cat([h(x, self.hidden) for h in self.heads], dim=-1))


class CrossStaleContext(nn.Module):
    """Cross-attention that caches the projected encoder states for decoding and never drops them."""

    CAUSE: ClassVar[str] = "keys and values kept from an earlier call"

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self._kv: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        b, s, e = hidden_states.shape
        t = encoder_hidden_states.shape[1]
        if self._kv is None or self._kv[0].shape[0] != b or self._kv[0].shape[2] != t:
            k = self.k_proj(encoder_hidden_states).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
            v = self.v_proj(encoder_hidden_states).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
            self._kv = (k, v)
        k, v = self._kv
        q = self.q_proj(hidden_states).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).reshape(b, s, e))


# ------------------------------------------------------------------------------------------------
# sequence first, [S, B, D]
# ------------------------------------------------------------------------------------------------


class SeqFirstFirstMask(nn.Module):
    """[S, B, D] attention on a merged batch-head axis that expands only the first sample's padding mask."""

    CAUSE: ClassVar[str] = "reads only the first sample's mask"

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, batch_first: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.batch_first = batch_first
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if self.batch_first:
            x = x.transpose(0, 1)
        s, b, e = x.shape
        q = self.q_proj(x).reshape(s, b * self.num_heads, self.head_dim).transpose(0, 1)
        k = self.k_proj(x).reshape(s, b * self.num_heads, self.head_dim).transpose(0, 1)
        v = self.v_proj(x).reshape(s, b * self.num_heads, self.head_dim).transpose(0, 1)
        scores = torch.bmm(q * self.head_dim**-0.5, k.transpose(1, 2))
        if key_padding_mask is not None:  # [B, S], True = padding
            scores = scores.masked_fill(key_padding_mask[0][None, None, :], float("-inf"))
        attn = self.dropout(F.softmax(scores, dim=-1))
        out = torch.bmm(attn, v).transpose(0, 1).reshape(s, b, e)
        out = self.out_proj(out)
        return out.transpose(0, 1) if self.batch_first else out


class SeqFirstMergeByView(nn.Module):
    """[S, B, D] attention that views its [B * H, S, Dh] result as [S, B, D] without the transpose."""

    CAUSE: ClassVar[str] = "sequence axis not transposed back before the merge"

    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.batch_first = False
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query: Tensor) -> Tensor:
        tgt_len, bsz, embed_dim = query.shape
        q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q = (q * self.scaling).contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        attn = torch.bmm(F.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1), v)
        attn = attn.contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class SeqFirstFlagIgnored(nn.Module):
    """batch_first=False is stored and never looked at, so [S, B, D] inputs attend across the batch."""

    CAUSE: ClassVar[str] = "batch_first=False ignored"

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, batch_first: bool = False) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.batch_first = batch_first
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """x: [S, B, D], or [B, S, D] with batch_first=True."""
        b, s, e = x.shape
        q, k, v = self.qkv_proj(x).view(b, s, 3, self.num_heads, e // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = self.dropout(torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1))
        return self.out_proj((attn @ v).transpose(1, 2).reshape(b, s, e))


# ------------------------------------------------------------------------------------------------
# two inputs, returned weights
# ------------------------------------------------------------------------------------------------


class CrossMaskOverHeads(nn.Module):
    """A [B, Sq, Sk] mask is applied to [B, H, Sq, Sk] scores without a head axis: sample b's mask hits head b."""

    CAUSE: ClassVar[str] = "[B, S, S] mask broadcast over heads"

    def __init__(self, query_dim: int, kv_dim: int, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = query_dim // num_heads
        self.query_proj = nn.Linear(query_dim, query_dim)
        self.key_proj = nn.Linear(kv_dim, query_dim)
        self.value_proj = nn.Linear(kv_dim, query_dim)
        self.out_proj = nn.Linear(query_dim, query_dim)

    def forward(self, query: Tensor, key_value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        b, sq, e = query.shape
        sk = key_value.shape[1]
        q = self.query_proj(query).view(b, sq, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key_proj(key_value).view(b, sk, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value_proj(key_value).view(b, sk, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if attn_mask is not None:  # [B, Sq, Sk], True = attend
            scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
        out = scores.softmax(dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).reshape(b, sq, e))


class CrossWeightsUnmasked(nn.Module):
    """The returned weights are taken from the scores before the mask, the output from those after it."""

    CAUSE: ClassVar[str] = "returned weights are not those that were used"

    def __init__(self, d_model: int, kv_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(kv_dim, d_model)
        self.v_proj = nn.Linear(kv_dim, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, memory: Tensor, key_padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b, n, e = x.shape
        m = memory.shape[1]
        q = self.q_proj(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(memory).view(b, m, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(memory).view(b, m, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        weights = scores.softmax(dim=-1)
        if key_padding_mask is not None:  # True = padding
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).reshape(b, n, e)), weights


class WeightsAveragedOverBatch(nn.Module):
    """The returned weights should be averaged over the heads, but the mean runs over the batch axis."""

    CAUSE: ClassVar[str] = "returned weights averaged over the wrong axis"

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and the head-averaged weights, [B, Sq, Sk]."""
        b, sq, e = query.shape
        q = self.q_proj(query).view(b, sq, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(key).view(b, key.shape[1], self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(value).view(b, key.shape[1], self.num_heads, self.head_dim).transpose(1, 2)
        attn_weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim), dim=-1)
        out = (self.dropout(attn_weights) @ v).transpose(1, 2).reshape(b, sq, e)
        return self.out_proj(out), attn_weights.mean(dim=0)


class WeightsAfterDropout(nn.Module):
    """In training the returned weights are the dropped and rescaled ones, whose rows do not sum to one."""

    CAUSE: ClassVar[str] = "weights returned after dropout"

    def __init__(self, hidden_dim: int, num_heads: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_dim // num_heads
        self.to_qkv = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.to_out = nn.Linear(hidden_dim, hidden_dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, s, e = x.shape
        q, k, v = (t.view(b, s, self.num_heads, self.head_dim).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
        weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.head_dim), dim=-1)
        weights = self.dropout(weights)
        out = (weights @ v).transpose(1, 2).reshape(b, s, e)
        return self.to_out(out), weights


class NeedWeightsDropsCausal(nn.Module):
    """is_causal is honoured by the SDPA path only; with need_weights=True the future is visible."""

    CAUSE: ClassVar[str] = "is_causal ignored when weights are requested"

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, is_causal: bool = False, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        b, s, e = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = scores.softmax(dim=-1)
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out_proj(out.transpose(1, 2).reshape(b, s, e)), weights


class EvalPathDropsMask(nn.Module):
    """The fast path for evaluation calls SDPA without the mask that the training path applies."""

    CAUSE: ClassVar[str] = "eval path ignores the mask"

    def __init__(self, dim: int, num_heads: int, attn_drop: float = 0.1) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(attn_drop)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        if not self.training:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            if attn_mask is not None:  # [S, S] or [B, 1, S, S], True = attend
                scores = scores.masked_fill(~attn_mask, float("-inf"))
            out = self.attn_drop(scores.softmax(dim=-1)) @ v
        return self.proj(out.transpose(1, 2).reshape(b, n, d))


# ------------------------------------------------------------------------------------------------
# masks
# ------------------------------------------------------------------------------------------------


class MaskRenormalisedL2(nn.Module):
    """The mask is applied after the softmax and the rows renormalised by F.normalize, whose norm is L2."""

    CAUSE: ClassVar[str] = "mask after softmax, renormalised by the L2 norm"

    def __init__(self, embed_size: int, heads: int) -> None:
        super().__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values: Tensor, keys: Tensor, query: Tensor, mask: Tensor | None = None) -> Tensor:
        n = query.shape[0]
        v = self.values(values).reshape(n, -1, self.heads, self.head_dim)
        k = self.keys(keys).reshape(n, -1, self.heads, self.head_dim)
        q = self.queries(query).reshape(n, -1, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k) / self.head_dim**0.5
        attention = torch.softmax(energy, dim=3)
        if mask is not None:
            attention = F.normalize(attention * mask, dim=3)
        out = torch.einsum("nhqk,nkhd->nqhd", attention, v).reshape(n, query.shape[1], self.embed_size)
        return self.fc_out(out)


class MaskRenormalisedWithEps(nn.Module):
    """The causal mask is applied after the softmax and renormalised with + 1e-5, so a strong hidden key wins."""

    CAUSE: ClassVar[str] = "mask after softmax, renormalised with a large epsilon"

    def __init__(self, n_embd: int, n_head: int, block_size: int = 64) -> None:
        super().__init__()
        self.n_head = n_head
        self.key = nn.Linear(n_embd, n_embd)
        self.query = nn.Linear(n_embd, n_embd)
        self.value = nn.Linear(n_embd, n_embd)
        self.proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("mask", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        k = self.key(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        q = self.query(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        v = self.value(x).view(b, t, self.n_head, c // self.n_head).transpose(1, 2)
        att = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(k.size(-1)), dim=-1)
        att = att * self.mask[:t, :t]
        att = att / (att.sum(dim=-1, keepdim=True) + 1e-5)
        return self.proj((att @ v).transpose(1, 2).reshape(b, t, c))


class BiasScaledWithScores(nn.Module):
    """The additive mask joins the scores before the division by the root of the head width."""

    CAUSE: ClassVar[str] = "additive mask scaled together with the scores"

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.d_k = d_model // n_heads
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, d_model, bias=False)
        self.wv = nn.Linear(d_model, d_model, bias=False)
        self.wo = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, attn_bias: Tensor | None = None) -> Tensor:
        b, s, e = x.shape
        q = self.wq(x).view(b, s, self.n_heads, self.d_k).transpose(1, 2)
        k = self.wk(x).view(b, s, self.n_heads, self.d_k).transpose(1, 2)
        v = self.wv(x).view(b, s, self.n_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(2, 3)
        if attn_bias is not None:
            scores = scores + attn_bias
        attn = F.softmax(scores / math.sqrt(self.d_k), dim=-1)
        return self.wo((attn @ v).transpose(1, 2).reshape(b, s, e))


class PaddingHandedToSDPA(nn.Module):
    """key_padding_mask (True = padding) is handed to SDPA, for which True means attend."""

    CAUSE: ClassVar[str] = "padding mask inverted for SDPA"

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        b, s, e = x.shape
        q, k, v = self.qkv_proj(x).view(b, s, 3, self.num_heads, e // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        mask = key_padding_mask.view(b, 1, 1, s) if key_padding_mask is not None else None
        p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.out_proj(out.transpose(1, 2).reshape(b, s, e))


class MaskChangedInPlace(nn.Module):
    """The caller's 0/1 mask is turned into an additive one in place, so the next layer gets another mask."""

    CAUSE: ClassVar[str] = "mask changed in place"

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """attention_mask: [B, S] float, 1.0 = token, 0.0 = padding."""
        b, s, e = x.shape
        q = self.query(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        k = self.key(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        v = self.value(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(e // self.num_heads)
        if attention_mask is not None:
            attention_mask = attention_mask.sub_(1.0).mul_(torch.finfo(x.dtype).max)
            scores = scores + attention_mask[:, None, None, :]
        return self.dense((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, s, e))


class InputChangedInPlace(nn.Module):
    """The padded positions of the caller's input are zeroed in place before the projections."""

    CAUSE: ClassVar[str] = "in-place change of the input"

    def __init__(self, hidden_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_dim, 3 * hidden_dim)
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        b, s, e = x.shape
        if key_padding_mask is not None:  # True = padding
            x.masked_fill_(key_padding_mask.unsqueeze(-1), 0.0)
        q, k, v = (t.view(b, s, self.num_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(e // self.num_heads)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        return self.out((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, s, e))


# ------------------------------------------------------------------------------------------------
# numbers and gradients
# ------------------------------------------------------------------------------------------------


class KeyDetached(nn.Module):
    """The keys are detached to save memory, so neither the input nor k_proj gets their gradient."""

    CAUSE: ClassVar[str] = "gradient of k detached"

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        weights = torch.softmax(q @ k.detach().transpose(-2, -1) * self.head_dim**-0.5, dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, s, e))


class ScoresInHalf(nn.Module):
    """Scores and softmax are computed in bfloat16 and cast back, whatever dtype came in."""

    CAUSE: ClassVar[str] = "computed in half precision"

    def __init__(self, dim: int, num_heads: int = 8, qkv_bias: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1).to(v.dtype)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class SoftmaxWithoutMax(nn.Module):
    """The softmax is written as exp over its sum, without the row maximum, so large scores overflow."""

    CAUSE: ClassVar[str] = "softmax without max subtraction"

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = self.query(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.key(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.value(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        e_scores = torch.exp(scores)
        attn = e_scores / e_scores.sum(dim=-1, keepdim=True)
        return self.out((attn @ v).transpose(1, 2).reshape(b, s, e))


class SqueezedSoftmaxAxis(nn.Module):
    """Scores are squeezed and softmaxed over dim 1, which is the key axis for a batch of one only."""

    CAUSE: ClassVar[str] = "softmax axis right for a batch of one only"

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.W_query = nn.Linear(d_in, d_out, bias=False)
        self.W_key = nn.Linear(d_in, d_out, bias=False)
        self.W_value = nn.Linear(d_in, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Single-head attention, [B, S, d_in] -> [B, S, d_out]."""
        q, k, v = self.W_query(x), self.W_key(x), self.W_value(x)
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(k.shape[-1])
        weights = F.softmax(scores.squeeze(0), dim=1)
        return torch.matmul(weights, v)


# ------------------------------------------------------------------------------------------------
# chunks
# ------------------------------------------------------------------------------------------------


class ChunkTailDropped(nn.Module):
    """Queries are handled in slices of slice_size; the last incomplete slice is skipped and stays zero."""

    CAUSE: ClassVar[str] = "last incomplete slice of queries skipped"

    def __init__(self, query_dim: int, heads: int = 8, dim_head: int = 64, slice_size: int = 4) -> None:
        super().__init__()
        inner_dim = heads * dim_head
        self.heads = heads
        self.scale = dim_head**-0.5
        self.slice_size = slice_size
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_out = nn.Linear(inner_dim, query_dim)

    def forward(self, hidden_states: Tensor) -> Tensor:
        b, s, _ = hidden_states.shape
        q = self.to_q(hidden_states).view(b, s, self.heads, -1).transpose(1, 2)
        k = self.to_k(hidden_states).view(b, s, self.heads, -1).transpose(1, 2)
        v = self.to_v(hidden_states).view(b, s, self.heads, -1).transpose(1, 2)
        out = torch.zeros_like(q)
        for i in range(s // self.slice_size):
            rows = slice(i * self.slice_size, (i + 1) * self.slice_size)
            attn = (q[:, :, rows] @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
            out[:, :, rows] = attn @ v
        return self.to_out(out.transpose(1, 2).reshape(b, s, -1))


class OnlineLastTokenDropped(nn.Module):
    """Online softmax whose loop ends at S - 1, so a last block of a single key is never read."""

    CAUSE: ClassVar[str] = "last token dropped when it is alone in its block"

    def __init__(self, embed_dim: int, num_heads: int, block_size: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.block_size = block_size
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2) * self.head_dim**-0.5
        k = self.k_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        m = torch.full_like(q[..., :1], float("-inf"))
        den = torch.zeros_like(m)
        acc = torch.zeros_like(q)
        for start in range(0, max(s - 1, 1), self.block_size):
            kb = k[:, :, start : start + self.block_size]
            vb = v[:, :, start : start + self.block_size]
            scores = q @ kb.transpose(-2, -1)
            m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
            p = torch.exp(scores - m_new)
            alpha = torch.exp(m - m_new)
            den = den * alpha + p.sum(dim=-1, keepdim=True)
            acc = acc * alpha + p @ vb
            m = m_new
        return self.out_proj((acc / den).transpose(1, 2).reshape(b, s, e))


class OnlineAccumulatorNotRescaled(nn.Module):
    """Online softmax that rescales the denominator but not the accumulator when the maximum grows."""

    CAUSE: ClassVar[str] = "online softmax accumulator not rescaled"

    def __init__(self, dim: int, num_heads: int, block_size: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.block_size = block_size
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        scale = q.shape[-1] ** -0.5
        row_max = torch.full_like(q[..., :1], float("-inf"))
        row_sum = torch.zeros_like(row_max)
        acc = torch.zeros_like(q)
        for kb, vb in zip(k.split(self.block_size, dim=2), v.split(self.block_size, dim=2), strict=True):
            scores = q @ kb.transpose(-2, -1) * scale
            new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
            p = torch.exp(scores - new_max)
            row_sum = row_sum * torch.exp(row_max - new_max) + p.sum(dim=-1, keepdim=True)
            acc = acc + p @ vb
            row_max = new_max
        return self.proj((acc / row_sum).transpose(1, 2).reshape(b, n, c))


class PaddedKeysAttended(nn.Module):
    """Keys are padded with zeros to a multiple of 8 for the kernel, and the padding is not hidden."""

    CAUSE: ClassVar[str] = "zero padding keys get attention"

    def __init__(self, embed_dim: int, num_heads: int, multiple: int = 8) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.multiple = multiple
        self.to_q = nn.Linear(embed_dim, embed_dim)
        self.to_kv = nn.Linear(embed_dim, 2 * embed_dim)
        self.to_out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, e = x.shape
        q = self.to_q(x).view(b, s, self.num_heads, -1).transpose(1, 2)
        k, v = (t.view(b, s, self.num_heads, -1).transpose(1, 2) for t in self.to_kv(x).chunk(2, dim=-1))
        extra = -s % self.multiple
        k, v = F.pad(k, (0, 0, 0, extra)), F.pad(v, (0, 0, 0, extra))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(b, s, e))


DECLARED: dict[str, dict[str, str]] = {
    "LucidMaskHidesQueries": {"polarity": "allowed"},
    "MaskRenormalisedL2": {"polarity": "allowed"},
    "PackedMaskFirstHeadOnly": {"polarity": "allowed"},
    "CrossMaskOverHeads": {"polarity": "allowed"},
    "EvalPathDropsMask": {"polarity": "allowed"},
}

MUTANTS: dict[str, type[nn.Module]] = {
    "LucidContextIgnored": LucidContextIgnored,
    "LucidKeysFromInput": LucidKeysFromInput,
    "LucidMaskHidesQueries": LucidMaskHidesQueries,
    "LucidScaleIgnoresDimHead": LucidScaleIgnoresDimHead,
    "EinsumHeadsAveraged": EinsumHeadsAveraged,
    "BareScaleFromSequence": BareScaleFromSequence,
    "PackedValueFromQuery": PackedValueFromQuery,
    "PackedMaskFirstHeadOnly": PackedMaskFirstHeadOnly,
    "QueryBiasDropped": QueryBiasDropped,
    "OutputBiasTwice": OutputBiasTwice,
    "HeadListStaleMask": HeadListStaleMask,
    "CrossStaleContext": CrossStaleContext,
    "SeqFirstFirstMask": SeqFirstFirstMask,
    "SeqFirstMergeByView": SeqFirstMergeByView,
    "SeqFirstFlagIgnored": SeqFirstFlagIgnored,
    "CrossMaskOverHeads": CrossMaskOverHeads,
    "CrossWeightsUnmasked": CrossWeightsUnmasked,
    "WeightsAveragedOverBatch": WeightsAveragedOverBatch,
    "WeightsAfterDropout": WeightsAfterDropout,
    "NeedWeightsDropsCausal": NeedWeightsDropsCausal,
    "EvalPathDropsMask": EvalPathDropsMask,
    "MaskRenormalisedL2": MaskRenormalisedL2,
    "MaskRenormalisedWithEps": MaskRenormalisedWithEps,
    "BiasScaledWithScores": BiasScaledWithScores,
    "PaddingHandedToSDPA": PaddingHandedToSDPA,
    "MaskChangedInPlace": MaskChangedInPlace,
    "InputChangedInPlace": InputChangedInPlace,
    "KeyDetached": KeyDetached,
    "ScoresInHalf": ScoresInHalf,
    "SoftmaxWithoutMax": SoftmaxWithoutMax,
    "SqueezedSoftmaxAxis": SqueezedSoftmaxAxis,
    "ChunkTailDropped": ChunkTailDropped,
    "OnlineLastTokenDropped": OnlineLastTokenDropped,
    "OnlineAccumulatorNotRescaled": OnlineAccumulatorNotRescaled,
    "PaddedKeysAttended": PaddedKeysAttended,
}
