"""Attention with every variant, step by step, under flash-attn's names and in its layout."""

import torch
import torch.nn.functional as F
from torch import Tensor


def variants(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention in float32 or finer.

    q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv] -> [B, Sq, H, Dv] in the dtype of q. Positions are aligned to
    the bottom right: query i stands at key p = i + Sk - Sq. causal: it sees j <= p. window_size (left, right): it sees
    p - left <= j <= p + right, without bound where negative. softcap: logits become softcap tanh(logits / softcap),
    before anything is added. alibi_slopes [H] or [B, H]: -slope |p - j| is added. bias, broadcastable to
    [B, H, Sq, Sk]: is added. sinks [H]: one more logit in the denominator. A row with no visible key is 0. dropout_p:
    the share of weights that is dropped. return_attn_probs: the log-sum-exp [B, H, Sq] (-inf in such a row, unless
    there is a sink) and the weights [B, H, Sq, Sk] before dropout come too.
    """
    q_len, kv_len, heads = q.shape[1], k.shape[1], q.shape[2]
    exact = torch.promote_types(q.dtype, torch.float32)
    q_, k_, v_ = (x.transpose(1, 2).to(exact) for x in (q, k, v))  # [B, H, S, D]
    k_, v_ = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k_, v_))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

    s = q_ @ k_.mT * scale  # [B, H, Sq, Sk]
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    p = torch.arange(q_len, device=q.device)[:, None] + kv_len - q_len  # where each query stands among the keys
    j = torch.arange(kv_len, device=q.device)[None, :]
    if bias is not None:
        s = s + bias.to(exact)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(exact)[..., None, None] * (p - j).abs()
    left, right = window_size
    if causal:
        right = 0 if right < 0 else min(right, 0)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool, device=q.device)
    if left >= 0:
        seen = seen & (j >= p - left)
    if right >= 0:
        seen = seen & (j <= p + right)
    s = s.masked_fill(~seen, -torch.inf)

    extra = s if sinks is None else torch.cat([s, sinks.to(exact)[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
    empty = (extra == -torch.inf).all(dim=-1, keepdim=True)  # nothing to sum: 0 / 0 is avoided, backwards too
    weights = torch.softmax(extra.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)[..., :kv_len]
    out = (F.dropout(weights, dropout_p) @ v_).to(q.dtype).transpose(1, 2)
    if not return_attn_probs:
        return out
    lse = torch.logsumexp(extra.masked_fill(empty, 0.0), dim=-1).masked_fill(empty[..., 0], -torch.inf)
    return out, lse, weights
