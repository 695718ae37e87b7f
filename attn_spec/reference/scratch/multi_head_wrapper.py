"""Several heads as several modules: each looks in its own way, and their answers stand side by side."""

import torch
from torch import Tensor, nn

from attn_spec.reference.scratch.self_attention import SelfAttention


class MultiHeadAttentionWrapper(nn.Module):
    """num_heads heads of SelfAttention: x [S, d_in] or [B, S, d_in] -> [..., S, num_heads * d_out_v].

    Columns h * d_out_v to (h + 1) * d_out_v of the result are head h. Raises ValueError for num_heads below 1, and
    where SelfAttention does.
    """

    def __init__(self, d_in: int, d_out_kq: int, d_out_v: int, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads={num_heads}: must be 1 or more")
        self.heads = nn.ModuleList(SelfAttention(d_in, d_out_kq, d_out_v) for _ in range(num_heads))

    def forward(self, x: Tensor) -> Tensor:
        """x [S, d_in] or [B, S, d_in] -> [..., S, num_heads * d_out_v]."""
        return torch.cat([head(x) for head in self.heads], dim=-1)
