"""Causal attention that remembers: the keys and values of earlier words are kept, and only new ones are worked out.

A word's output needs its own query and the keys and values of all words before it. These do not change when words are
added, since a word sees no later one. So each call takes the new words and what the calls before gave back:

    y, cache = attention(prompt)            the whole prompt at once
    y, cache = attention(word, cache)       then one word, or several, at a time

With S new words after P old ones the scores are S by P + S, and new word i stands at position P + i.
"""

import math

import torch
from torch import Tensor, nn

Cache = tuple[Tensor, Tensor]  # keys and values [B, H, P, Dh] of the words so far


class CachedCausalAttention(nn.Module):
    """Causal self-attention of num_heads heads with a cache: x [B, S, hidden_size] -> the same, and the new cache.

    Raises ValueError for a hidden_size that num_heads doesn't divide.
    """

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size={hidden_size} is no multiple of num_heads={num_heads}")
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """x [B, S, D] of the new words, cache of the P words before them -> y [B, S, D], cache of P + S words."""
        b, s, d = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)  # [B, H, S, Dh]
        k = self.k_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)  # [B, H, S, Dh]
        v = self.v_proj(x).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)  # [B, H, S, Dh]
        if cache is not None:
            k = torch.cat([cache[0], k], dim=2)  # [B, H, P + S, Dh]
            v = torch.cat([cache[1], v], dim=2)  # [B, H, P + S, Dh]
        past = k.shape[2] - s
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)  # [B, H, S, P + S]
        future = torch.ones(s, past + s, dtype=torch.bool, device=x.device).triu(past + 1)  # key j > P + i
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)  # [B, H, S, P + S]
        y: Tensor = self.o_proj((weights @ v).transpose(1, 2).reshape(b, s, d))  # [B, S, D]
        return y, (k, v)
