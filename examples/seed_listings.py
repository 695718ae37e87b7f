"""Attention listings as tutorials print them, with their mistakes: wrong on purpose, to be judged and to learn from.

Each class says in one line what is wrong with it. Those of one head take x [S, d_in] or [B, S, d_in]; those of several
take (x [B, S, D], attention_mask bool, True = may be seen, is_causal) and change a step of `ListingMended`: project,
score, hide, weigh, merge. What is right, and checks its arguments, stands in attn_spec/reference/scratch.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OneHead(nn.Module):
    """The matrices of one head, and nothing wrong yet."""

    def __init__(self, d_in: int, d_out_kq: int, d_out_v: int) -> None:
        super().__init__()
        self.W_query = nn.Parameter(torch.rand(d_in, d_out_kq))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out_kq))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out_v))
        self.root = math.sqrt(d_out_kq)

    def logits(self, x: Tensor) -> Tensor:
        return (x @ self.W_query) @ (x @ self.W_key).transpose(-2, -1) / self.root  # [..., S, S]


class SelfAttention(OneHead):
    """Wrong: .T turns all axes of a batch round: it raises, but for B == S == d_out_kq, where it is silently wrong."""

    def forward(self, x: Tensor) -> Tensor:
        logits = (x @ self.W_query) @ (x @ self.W_key).T / self.root
        return torch.softmax(logits, dim=-1) @ (x @ self.W_value)


class MultiHeadAttentionWrapper(nn.Module):
    """Wrong: its heads are SelfAttention above, so a batch breaks each of them."""

    def __init__(self, d_in: int, d_out_kq: int, d_out_v: int, num_heads: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(SelfAttention(d_in, d_out_kq, d_out_v) for _ in range(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class CrossAttention(OneHead):
    """Wrong: .T of the keys again; without a batch, and with two lengths, it is right."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        logits = (x @ self.W_query) @ (context @ self.W_key).T / self.root
        return torch.softmax(logits, dim=-1) @ (context @ self.W_value)


class CausalAfterSoftmax(OneHead):
    """Wrong: the future is struck out after it took its share, so rows add up to less than 1 and tell of it."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.logits(x), dim=-1).tril()
        return weights @ (x @ self.W_value)


class CausalAfterSoftmaxRenormalised(OneHead):
    """Wrong: dividing by what is left mends the sum, but is 0/0 where a future key took it all."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.logits(x), dim=-1).tril()
        return weights / weights.sum(dim=-1, keepdim=True) @ (x @ self.W_value)


class CausalOverDimOne(OneHead):
    """Wrong: dim=1 is the keys without a batch; with one it is the queries."""

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=x.device).triu(diagonal=1)
        return torch.softmax(logits.masked_fill(hidden, -torch.inf), dim=1) @ (x @ self.W_value)


class ListingMended(nn.Module):
    """Nothing wrong: is_causal is read, a [B, S] is padding, hidden is -inf, and a row with no visible key is zero."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        for linear, std in ((self.q_proj, 0.02), (self.k_proj, 0.02), (self.v_proj, 0.02), (self.o_proj, 0.01)):
            nn.init.normal_(linear.weight, std=std)
        self.dropout = nn.Dropout(dropout)
        self.scaling = 1 / math.sqrt(self.head_dim)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.project(x)
        scores = self.hide(self.score(q, k), attention_mask, is_causal)
        return self.merge(self.dropout(self.weigh(scores).to(x.dtype)) @ v)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.split(q, self.num_heads), self.split(k, self.num_kv_heads), self.split(v, self.num_kv_heads)

    def split(self, x: Tensor, heads: int) -> Tensor:
        x = x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)  # [B, heads, S, Dh]
        return x.repeat_interleave(self.num_heads // heads, dim=1)  # [B, H, S, Dh]

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        b, h, s, _ = q.shape
        q, k = q.flatten(0, 1), k.flatten(0, 1)  # [B * H, S, Dh]: baddbmm takes three axes
        scores = torch.baddbmm(q.new_zeros(b * h, s, s), q, k.transpose(-2, -1), beta=0.0, alpha=self.scaling)
        return scores.view(b, h, s, s)

    def hide(self, scores: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
        if attention_mask is not None:
            if attention_mask.dim() == 2:
                attention_mask = attention_mask[:, None, None, :]  # [B, 1, 1, S]
            elif attention_mask.dim() == 3:
                attention_mask = attention_mask[:, None]  # [B, 1, S, S]
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(diagonal=1)
            scores = scores.masked_fill(future, -torch.inf)
        return scores

    def weigh(self, scores: Tensor) -> Tensor:
        empty = scores.isneginf().all(dim=-1, keepdim=True)
        return F.softmax(scores.masked_fill(empty, 0.0), dim=-1, dtype=torch.float32).masked_fill(empty, 0.0)

    def merge(self, context: Tensor) -> Tensor:
        result: Tensor = self.o_proj(context.transpose(1, 2).flatten(2))  # [B, S, D]
        return result


class ListingBaddbmmMended(ListingMended):
    """Wrong: it runs, but is_causal is never read, so the future leaks; a row with no visible key is the mean of V."""

    def hide(self, scores: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
        if attention_mask is None:
            return scores
        if attention_mask.dim() == 3:
            attention_mask = attention_mask.unsqueeze(1)  # [B, 1, S, S]; a [B, S] of padding is left as [S, S]
        return scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)


class ListingAsWritten(ListingBaddbmmMended):
    """Wrong: torch.baddbmm takes three axes and is given four, so every call raises; the rest is as above."""

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        nothing = q.new_zeros(q.shape[0], q.shape[1], q.shape[2], q.shape[2])
        return torch.baddbmm(nothing, q, k.transpose(-2, -1), beta=0.0, alpha=self.scaling)


class ListingFused(ListingMended):
    """Wrong: the fused path never passes attention_mask on, and rounds whatever comes to bfloat16."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = (y.to(torch.bfloat16) for y in self.project(x))
        dropout = self.dropout.p if self.training else 0.0
        context = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal, scale=self.scaling)
        return self.merge(context.to(x.dtype))


class ScaleFromKvHeads(ListingMended):
    """Wrong: the scale is of hidden_size / num_kv_heads, too small for grouped heads: fewer are not wider."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int | None = None, dropout: float = 0.0) -> None:
        super().__init__(hidden_size, num_heads, num_kv_heads, dropout)
        self.scaling = 1 / math.sqrt(hidden_size // self.num_kv_heads)


class LowestMasksSummed(ListingMended):
    """Wrong: each mask adds finfo.min, -inf where both hide: a row with no visible key is a mean of what one hides."""

    def hide(self, scores: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
        nothing = torch.zeros_like(scores)
        lowest = torch.finfo(scores.dtype).min
        by_mask = super().hide(nothing, attention_mask, False).clamp(min=lowest)
        by_causality = super().hide(nothing, None, is_causal).clamp(min=lowest)
        return scores + (by_mask + by_causality)


class SharedQueryKey(ListingMended):
    """Wrong: q and k share one weight, so the scores are symmetric: i looks at j as hard as j at i."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__(hidden_size, num_heads, None, dropout)
        self.k_proj.weight = self.q_proj.weight
