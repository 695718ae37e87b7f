"""Attention as the formula reads: softmax(q k' / sqrt(d)) v, and nothing else."""

import torch
from torch import Tensor


def naive(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """q [B, H, Sq, D], k [B, H, Sk, D], v [B, H, Sk, Dv], attn_mask bool (True = may be seen) -> [B, H, Sq, Dv]."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # [B, H, Sq, Sk]
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    weights = torch.softmax(scores, dim=-1)  # each row sums to 1 over the keys
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, 0.0)  # a row with no visible key is 0/0 so far: let it be 0
    return weights @ v  # [B, H, Sq, Dv]
