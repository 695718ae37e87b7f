"""Self-attention of one head: every word looks at every word of its own sentence.

    q = x W_query        what this word looks for
    k = x W_key          what this word can be found by
    v = x W_value        what this word hands over
    out = softmax(q k' / sqrt(d_kq)) v

The rows of x are the words, so the matrices stand on the right.
"""

import torch
from torch import Tensor, nn


def require_width(name: str, x: Tensor, width: int) -> None:
    """Raise ValueError unless x is [S, width] or [B, S, width]."""
    if x.dim() not in (2, 3) or x.shape[-1] != width:
        raise ValueError(f"{name}: shape {list(x.shape)}; give [S, {width}] or [B, S, {width}]")


class SelfAttention(nn.Module):
    """One head with bare matrices: x [S, d_in] or [B, S, d_in] -> [S, d_out_v] or [B, S, d_out_v].

    d_in: width of a word; d_out_kq: width of its query and of its key; d_out_v: width of its value. The matrices are
    drawn in the order W_query, W_key, W_value, uniform in [0, 1). Raises ValueError for a width below 1, or an x of
    another width.
    """

    def __init__(self, d_in: int, d_out_kq: int, d_out_v: int) -> None:
        super().__init__()
        if min(d_in, d_out_kq, d_out_v) < 1:
            raise ValueError(f"d_in={d_in}, d_out_kq={d_out_kq}, d_out_v={d_out_v}: each must be 1 or more")
        self.d_in = d_in
        self.d_out_kq = d_out_kq
        self.W_query = nn.Parameter(torch.rand(d_in, d_out_kq))
        self.W_key = nn.Parameter(torch.rand(d_in, d_out_kq))
        self.W_value = nn.Parameter(torch.rand(d_in, d_out_v))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., S, d_in] -> q and k [..., S, d_out_kq], v [..., S, d_out_v]."""
        require_width("x", x, self.d_in)
        return x @ self.W_query, x @ self.W_key, x @ self.W_value

    def forward(self, x: Tensor) -> Tensor:
        """x [S, d_in] or [B, S, d_in] -> [S, d_out_v] or [B, S, d_out_v]."""
        q, k, v = self.project(x)
        # transpose(-2, -1) swaps the last two axes only; .T would turn [B, S, d] into [d, S, B]
        scores = q @ k.transpose(-2, -1) / self.d_out_kq**0.5  # [..., S, S]
        weights = torch.softmax(scores, dim=-1)  # [..., S, S], each row sums to 1 over the keys
        return weights @ v  # [..., S, d_out_v]
