"""Cross-attention of one head: the words of one sequence look at those of another.

    q = x W_query,  k = context W_key,  v = context W_value
    out = softmax(q k' / sqrt(d_kq)) v

Only the queries come from x, so the result is as long as x, however long the context is.
"""

import torch
from torch import Tensor, nn

from attn_spec.reference.scratch.self_attention import require_width


class CrossAttention(nn.Module):
    """One head from x to context: x [Sq, d_in], context [Sk, d_context] -> [Sq, d_out_v], each with or without a batch.

    d_context is d_in where it is not given. Sq and Sk are free of each other. The matrices are drawn in the order
    W_query, W_key, W_value, uniform in [0, 1). Raises ValueError for a width below 1, an input of another width, or
    two inputs of different batches.
    """

    def __init__(self, d_in: int, d_out_kq: int, d_out_v: int, d_context: int | None = None) -> None:
        super().__init__()
        d_context = d_in if d_context is None else d_context
        if min(d_in, d_out_kq, d_out_v, d_context) < 1:
            raise ValueError(
                f"d_in={d_in}, d_out_kq={d_out_kq}, d_out_v={d_out_v}, d_context={d_context}: each must be 1 or more"
            )
        self.d_in = d_in
        self.d_context = d_context
        self.d_out_kq = d_out_kq
        self.W_query = nn.Parameter(torch.rand(d_in, d_out_kq))
        self.W_key = nn.Parameter(torch.rand(d_context, d_out_kq))
        self.W_value = nn.Parameter(torch.rand(d_context, d_out_v))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x [B, Sq, d_in], context [B, Sk, d_context] -> [B, Sq, d_out_v]; all of them without B as well."""
        require_width("x", x, self.d_in)
        require_width("context", context, self.d_context)
        if x.shape[:-2] != context.shape[:-2]:
            raise ValueError(
                f"context: shape {list(context.shape)} beside x {list(x.shape)}; give both the same batch, or neither"
            )
        q = x @ self.W_query  # [..., Sq, d_out_kq]
        k = context @ self.W_key  # [..., Sk, d_out_kq]
        v = context @ self.W_value  # [..., Sk, d_out_v]
        scores = q @ k.transpose(-2, -1) / self.d_out_kq**0.5  # [..., Sq, Sk]
        weights = torch.softmax(scores, dim=-1)  # [..., Sq, Sk], each row sums to 1 over the context
        return weights @ v  # [..., Sq, d_out_v]
