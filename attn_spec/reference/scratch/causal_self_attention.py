"""Causal self-attention of one head: a word sees itself and the words before it.

Two orders of the same two steps. With M_ij = 1 for j <= i and 0 for the future,

    mask, then softmax:    p_ij = exp(s_ij) M_ij / sum_k exp(s_ik) M_ik
    softmax, then mask:    p_ij = softmax(s)_ij M_ij / sum_k softmax(s)_ik M_ik

The common factor 1 / sum_k exp(s_ik) cancels in the second, so in exact arithmetic they are equal.
"""

import torch
from torch import Tensor

from attn_spec.reference.scratch.self_attention import SelfAttention


def future(length: int, device: torch.device) -> Tensor:
    """What a word must not see: bool [S, S], True where the key j comes after the query i."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(diagonal=1)


class CausalSelfAttention(SelfAttention):
    """Self-attention that hides the future before the softmax: arguments, shapes and errors of SelfAttention."""

    def forward(self, x: Tensor) -> Tensor:
        """x [S, d_in] or [B, S, d_in] -> [S, d_out_v] or [B, S, d_out_v]."""
        q, k, v = self.project(x)
        scores = q @ k.transpose(-2, -1) / self.d_out_kq**0.5  # [..., S, S]
        scores = scores.masked_fill(future(x.shape[-2], x.device), -torch.inf)  # exp(-inf) is exactly 0
        weights = torch.softmax(scores, dim=-1)  # [..., S, S]
        return weights @ v  # [..., S, d_out_v]


class CausalSelfAttentionRenormalised(SelfAttention):
    """Self-attention that hides the future after the softmax and divides by what is left: shown to be avoided.

    It equals CausalSelfAttention on moderate scores. But the softmax has already seen the future: where a future key
    scores some 104 above every key of the past, the weights of the past are below the smallest float32 and become 0,
    their sum is 0, and the row is 0/0 = NaN. So words of the past break on a word that they must not see.
    Arguments, shapes and errors of SelfAttention.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x [S, d_in] or [B, S, d_in] -> [S, d_out_v] or [B, S, d_out_v]."""
        q, k, v = self.project(x)
        scores = q @ k.transpose(-2, -1) / self.d_out_kq**0.5  # [..., S, S]
        weights = torch.softmax(scores, dim=-1)  # the future still takes its share
        weights = weights.masked_fill(future(x.shape[-2], x.device), 0.0)  # rows sum to less than 1
        weights = weights / weights.sum(dim=-1, keepdim=True)  # 0/0 where the past kept nothing
        return weights @ v  # [..., S, d_out_v]
