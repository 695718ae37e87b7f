"""Multi-head attention as decoders have it: all heads in one product, in four blocks that can be read one by one.

    project    x -> q, k, v                      [B, S, D] -> [B, H, S, Dh]
    scores     q, k -> q k' / sqrt(Dh)           [B, H, S, S]
    mask       scores -> -inf where hidden       [B, H, S, S]
    output     softmax(scores) v -> result       [B, H, S, Dh] -> [B, S, D]

A block can be replaced in a subclass as long as it keeps its shapes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def with_four_axes(attention_mask: Tensor, b: int, h: int, s: int) -> Tensor:
    """A mask over b samples, h heads and s words, in any accepted shape -> [b or 1, h or 1, s or 1, s].

    Which axis is which is said by their number alone, never by their sizes: [B, S, S] has no heads even where B == H.
    Raises ValueError for a dtype that is neither bool nor float, and for a shape that doesn't fit.
    """
    if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask: dtype {attention_mask.dtype}; give bool (True = may be seen; if 1 stands for that, "
            "attention_mask.bool()), or a float to add to the scores"
        )
    shape = list(attention_mask.shape)
    if attention_mask.dim() == 2:
        attention_mask = attention_mask[:, None, None, :]  # [B, S] -> [B, 1, 1, S]: the same keys for every query
    elif attention_mask.dim() == 3:
        attention_mask = attention_mask[:, None, :, :]  # [B, S, S] -> [B, 1, S, S]: the same for every head
    fits = attention_mask.dim() == 4 and all(
        given in (1, wanted) for given, wanted in zip(attention_mask.shape, (b, h, s), strict=False)
    )
    if not fits or attention_mask.shape[-1] != s:
        raise ValueError(
            f"attention_mask: shape {shape}; give [B, S], [B, S, S], [B, 1, S, S] or [B, H, S, S] with B={b} (or 1), "
            f"H={h}, S={s}"
        )
    return attention_mask


class MultiHeadAttention(nn.Module):
    """Self-attention of num_heads heads: x [B, S, hidden_size] -> [B, S, hidden_size], in the dtype of x.

    num_kv_heads: heads of k and v, a divisor of num_heads (by default num_heads); query head h reads kv head
    h // (num_heads / num_kv_heads). dropout: share of the weights that is dropped in training. bias: of the four
    projections, zero at first. flash: compute with torch's fused attention; the result is the same up to rounding.
    Raises ValueError for sizes that don't divide, a dropout outside [0, 1), an x of another width, or a mask of
    another shape or dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        flash: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(hidden_size, num_heads, num_kv_heads) < 1:
            raise ValueError(
                f"hidden_size={hidden_size}, num_heads={num_heads}, num_kv_heads={num_kv_heads}: each must be 1 or more"
            )
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} is no multiple of num_heads={num_heads}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout}: must be at least 0 and below 1")
        self.hidden_size = hidden_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = hidden_size // num_heads  # of k and v too: fewer kv heads are not wider ones
        self.flash = flash
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=bias)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as Llama does: normal with a standard deviation of 0.02, that of the output 0.01."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(projection.weight, std=0.01 if projection is self.o_proj else 0.02)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x [B, S, D] -> [B, S, D].

        attention_mask: bool (True = may be seen) or float (added to the scores): [B, S] over the keys, [B, S, S],
        [B, 1, S, S] or [B, H, S, S]; B may be 1. is_causal: query i sees the keys j <= i, of those the mask shows.
        A row with no visible key has a context of zero, so its result is what o_proj makes of that: its bias or zero.
        """
        q, k, v = self.project(x)  # [B, H, S, Dh] each
        if attention_mask is not None:
            b, h, s, _ = q.shape
            attention_mask = with_four_axes(attention_mask, b, h, s)  # [B, 1 or H, 1 or S, S]
        if self.flash:
            context = self.fused(q, k, v, attention_mask, is_causal)  # [B, H, S, Dh]
        else:
            scores = self.scores(q, k)  # [B, H, S, S]
            scores = self.mask(scores, attention_mask, is_causal)  # [B, H, S, S]
            weights = self.weights(scores).to(v.dtype)  # [B, H, S, S]
            context = self.dropout(weights) @ v  # [B, H, S, Dh]
        return self.output(context)  # [B, S, D]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, S, D] -> q, k and v [B, H, S, Dh], the heads of k and v shared out."""
        if x.dim() != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: shape {list(x.shape)}; give [B, S, {self.hidden_size}]")
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)  # [B, H, S, Dh]
        k = self.k_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)  # [B, Hkv, S, Dh]
        v = self.v_proj(x).view(b, s, self.num_kv_heads, self.head_dim).transpose(1, 2)  # [B, Hkv, S, Dh]
        group = self.num_heads // self.num_kv_heads
        k = k.repeat_interleave(group, dim=1)  # [B, H, S, Dh]: heads 0 0 1 1, where repeat would give 0 1 0 1
        v = v.repeat_interleave(group, dim=1)  # [B, H, S, Dh]
        return q, k, v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q, k [B, H, S, Dh] -> q k' / sqrt(Dh) [B, H, S, S], in float32 or finer."""
        exact = torch.promote_types(q.dtype, torch.float32)
        return q.to(exact) @ k.to(exact).transpose(-2, -1) / math.sqrt(self.head_dim)

    def mask(self, scores: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
        """scores [B, H, S, S], mask of four axes -> scores with -inf where the key may not be seen, or a bias added."""
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        elif attention_mask is not None:
            scores = scores + attention_mask.to(scores.dtype)
        if is_causal:
            s = scores.shape[-1]
            future = torch.ones(s, s, dtype=torch.bool, device=scores.device).triu(diagonal=1)  # [S, S]
            scores = scores.masked_fill(future, -torch.inf)
        return scores

    def weights(self, scores: Tensor) -> Tensor:
        """scores [B, H, S, S] -> weights over the last axis; a row of -inf gives zeros."""
        empty = (scores == -torch.inf).all(dim=-1, keepdim=True)  # [B, H, S, 1]
        # filled before as well as after: a softmax of -inf only is NaN, and its gradient stays NaN when filled
        return torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)

    def output(self, context: Tensor) -> Tensor:
        """context [B, H, S, Dh] -> heads side by side [B, S, H * Dh] -> [B, S, D]."""
        b, h, s, head_dim = context.shape
        merged = context.transpose(1, 2).reshape(b, s, h * head_dim)  # a view of [B, H, S, Dh] would scramble heads
        result: Tensor = self.o_proj(merged)  # [B, S, D]
        return result

    def fused(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
        """All between project and output in one call of torch: q, k, v [B, H, S, Dh] -> context [B, H, S, Dh]."""
        dropout = self.dropout.p if self.training else 0.0  # the function can't know whether we train
        if attention_mask is None:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=is_causal)
        # torch takes a mask or is_causal and not both: mask scores of zero, and what comes out is both as one float
        nothing = torch.zeros(1, 1, q.shape[2], k.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))
        bias = self.mask(nothing.to(q.device), attention_mask, is_causal)  # [B, 1 or H, S, S]
        empty = (bias == -torch.inf).all(dim=-1, keepdim=True)  # [B, 1 or H, S, 1]
        context = F.scaled_dot_product_attention(q, k, v, bias.masked_fill(empty, 0.0), dropout_p=dropout)
        return context.masked_fill(empty, 0.0)
