"""Flash attention in plain torch: one pass over blocks of keys, with a running maximum and a running sum.

It reads as the algorithm does (Dao et al., 2022, algorithm 1; Milakov and Gimelshein, 2018, for the running softmax).
For each block of keys

    m'   = max(m, rowmax(S))                 the new maximum of the row
    P    = exp(S - m')                       weights of this block, not yet normalised
    l    = exp(m - m') l + rowsum(P)         the sum so far, brought to the new maximum
    O    = exp(m - m') O + P V               so is the output

and at the end O / l. Only one block of logits exists at a time, so memory grows with S and not with S^2.
"""

import torch
from torch import Tensor


def tiled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    block: int = 64,
) -> Tensor:
    """Attention by blocks of keys, in float32 or finer.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv] -> [B, H, Sq, Dv] in the dtype of q. Hkv divides H: query head
    h reads kv head h // (H / Hkv). attn_mask: bool (True = may be seen) or additive, broadcastable to [B, H, Sq, Sk].
    is_causal: query i sees the keys j <= i. A row with no visible key is 0.
    """
    q_len, kv_len, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    i = torch.arange(q_len, device=q.device)[:, None]
    j = torch.arange(kv_len, device=q.device)[None, :]

    m = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=exact)  # [B, H, Sq, 1]
    l = q.new_zeros((*q.shape[:3], 1), dtype=exact)  # noqa: E741  [B, H, Sq, 1]
    o = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=exact)  # [B, H, Sq, Dv]
    for start in range(0, kv_len, block):
        keys = slice(start, min(start + block, kv_len))
        k_block = k[:, :, keys].to(exact).repeat_interleave(group, dim=1)  # [B, H, block, D]
        v_block = v[:, :, keys].to(exact).repeat_interleave(group, dim=1)  # [B, H, block, Dv]
        s = q.to(exact) @ k_block.mT * scale  # [B, H, Sq, block]
        if attn_mask is not None:
            part = attn_mask[..., keys] if attn_mask.shape[-1] > 1 else attn_mask
            s = s.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else s + part
        if is_causal:
            s = s.masked_fill(j[:, keys] > i, -torch.inf)
        m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -torch.inf, 0.0)  # nothing seen yet: -inf minus -inf would be NaN
        p = torch.exp(s - shift)
        rescale = torch.exp(m - shift)
        l = rescale * l + p.sum(dim=-1, keepdim=True)  # noqa: E741
        o = rescale * o + p @ v_block
        m = m_new
    return (o / l.masked_fill(l == 0, 1.0)).to(q.dtype)
