"""Blind flash-attn mutants, part 2: LSE, head mapping, scale, alignment, strides and combinations.

Same rules as ``flash_mutants.py``: one fault a function, named in its docstring; the helpers are right.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

NEG_INF = float("-inf")


def _visible(sq: int, sk: int, causal: bool, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Boolean [Sq, Sk], True where the query may read the key."""
    left, right = window
    if causal:
        right = 0
    i = torch.arange(sq, device=device)[:, None] + (sk - sq)
    j = torch.arange(sk, device=device)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (j >= i - left)
    if right >= 0:
        seen = seen & (j <= i + right)
    return seen


def _alibi(slopes: torch.Tensor, sq: int, sk: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive ALiBi bias [1 or B, H, Sq, Sk]."""
    i = torch.arange(sq, device=slopes.device)[:, None] + (sk - sq)
    j = torch.arange(sk, device=slopes.device)[None, :]
    return -slopes.to(dtype).reshape(-1, slopes.shape[-1], 1, 1) * (i - j).abs().to(dtype)


def _load(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """To [B, H, S, D] in at least float32, with the key and value heads repeated over their group."""
    dt = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    kh = k.to(dt).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(group, dim=1)
    return q.to(dt).transpose(1, 2), kh, vh


def _cap(s: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(s / softcap) if softcap > 0.0 else s


def _lse(s: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(s, dim=-1)


def _weights(s: torch.Tensor) -> torch.Tensor:
    """Softmax over keys that gives 0 to rows without a key."""
    dead = (s == NEG_INF).all(dim=-1, keepdim=True)
    return torch.softmax(s.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)


def _answer(out: torch.Tensor, lse: torch.Tensor, like: torch.Tensor, want: bool) -> Any:
    """From [B, H, Sq, Dv] to what flash-attn hands back."""
    out = out.transpose(1, 2).to(like.dtype)
    return (out, lse, None) if want else out


# ------------------------------------------------------------------------------------------------
# log-sum-exp
# ------------------------------------------------------------------------------------------------


def lse_base_two(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The exponent works in base 2 and the LSE is handed out without the factor ln 2."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF) * math.log2(math.e)
    m = s.detach().amax(dim=-1, keepdim=True)
    m = m.masked_fill(m == NEG_INF, 0.0)
    p = torch.exp2(s - m)
    total = p.sum(dim=-1, keepdim=True)
    live = total > 0
    total = torch.where(live, total, 1.0)
    lse = torch.where(live, m + torch.log2(total), NEG_INF).squeeze(-1)
    return _answer(F.dropout(p / total, dropout_p) @ vh, lse, q, return_attn_probs)


def lse_without_scale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The LSE is recomputed for the caller from q.k without the softmax scale."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    raw = qh @ kh.transpose(-1, -2)
    bias = torch.zeros((), dtype=raw.dtype, device=q.device)
    if alibi_slopes is not None:
        bias = _alibi(alibi_slopes, sq, sk, raw.dtype)
    s = (_cap(raw * scale, softcap) + bias).masked_fill(~seen, NEG_INF)
    out = F.dropout(_weights(s), dropout_p) @ vh
    lse = _lse((_cap(raw, softcap) + bias).masked_fill(~seen, NEG_INF))
    return _answer(out, lse, q, return_attn_probs)


def lse_of_unmasked_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The LSE is taken before the mask is applied."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    lse = _lse(s)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, lse, q, return_attn_probs)


def lse_before_softcap(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The LSE is recomputed for the caller from scores that were not capped."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    raw = qh @ kh.transpose(-1, -2) * scale
    bias = torch.zeros((), dtype=raw.dtype, device=q.device)
    if alibi_slopes is not None:
        bias = _alibi(alibi_slopes, sq, sk, raw.dtype)
    seen = _visible(sq, sk, causal, window_size, q.device)
    s = (_cap(raw, softcap) + bias).masked_fill(~seen, NEG_INF)
    out = F.dropout(_weights(s), dropout_p) @ vh
    lse = _lse((raw + bias).masked_fill(~seen, NEG_INF))
    return _answer(out, lse, q, return_attn_probs)


def lse_without_alibi(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The LSE leaves the ALiBi bias out."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    lse = _lse(s)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, lse, q, return_attn_probs)


def lse_axes_swapped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The LSE comes back as [B, Sq, H]."""
    b, sq, h, d = q.shape
    sk = k.shape[1]
    qh, kh, vh = _load(q, k, v)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    s = _cap(torch.einsum("bhid,bhjd->bihj", qh, kh) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype).transpose(1, 2)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device)[:, None, :], NEG_INF)
    out = torch.einsum("bihj,bhjd->bihd", F.dropout(_weights(s), dropout_p), vh).to(q.dtype)
    return (out, _lse(s), None) if return_attn_probs else out


def lse_reshaped_not_permuted(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The LSE lies in memory as [B, Sq, H] and is viewed as [B, H, Sq]."""
    b, sq, h, d = q.shape
    sk = k.shape[1]
    qh, kh, vh = _load(q, k, v)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    s = _cap(torch.einsum("bhid,bhjd->bihj", qh, kh) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype).transpose(1, 2)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device)[:, None, :], NEG_INF)
    out = torch.einsum("bihj,bhjd->bihd", F.dropout(_weights(s), dropout_p), vh).to(q.dtype)
    return (out, _lse(s).contiguous().view(b, h, sq), None) if return_attn_probs else out


def lse_without_max(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The LSE is the log of the shifted sum, the row maximum is not added back."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    m = s.detach().amax(dim=-1, keepdim=True)
    m = m.masked_fill(m == NEG_INF, 0.0)
    p = torch.exp(s - m)
    total = p.sum(dim=-1, keepdim=True)
    out = F.dropout(p / total.clamp_min(1e-30), dropout_p) @ vh
    lse = torch.where(total > 0, total.clamp_min(1e-30).log(), NEG_INF).squeeze(-1)
    return _answer(out, lse, q, return_attn_probs)


def lse_empty_row_zero(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Rows without a visible key report an LSE of 0."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    lse = _lse(s)
    lse = torch.where(torch.isfinite(lse), lse, 0.0)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, lse, q, return_attn_probs)


def lse_group_order(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Under GQA the LSE of the heads is laid out (member, group) instead of (group, member)."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    g = h // hk
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    s = torch.einsum("bikgd,bjkd->bkgij", q.to(dt).unflatten(2, (hk, g)), k.to(dt)) * scale
    s = _cap(s, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, dt).unflatten(1, (hk, g))
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    out = torch.einsum("bkgij,bjkd->bikgd", F.dropout(_weights(s), dropout_p), v.to(dt)).flatten(2, 3).to(q.dtype)
    lse = _lse(s).permute(0, 2, 1, 3).flatten(1, 2)
    return (out, lse, None) if return_attn_probs else out


# ------------------------------------------------------------------------------------------------
# heads, widths, alignment, strides
# ------------------------------------------------------------------------------------------------


def gqa_tiled_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Query head h reads key head h mod Hkv instead of h // group."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    kh = k.to(dt).transpose(1, 2).repeat(1, h // hk, 1, 1)
    vh = v.to(dt).transpose(1, 2).repeat(1, h // hk, 1, 1)
    s = _cap(q.to(dt).transpose(1, 2) @ kh.mT * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, dt)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def gqa_value_head_offset(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The value pointer of a query head is advanced by its key head plus one, wrapping at the last."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    idx = torch.arange(h, device=q.device) * hk // h
    v_idx = idx if h == hk else (idx + 1) % hk
    s = _cap(torch.einsum("bihd,bjhd->bhij", q.to(dt), k.to(dt)[:, :, idx]) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, dt)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    out = torch.einsum("bhij,bjhd->bhid", F.dropout(_weights(s), dropout_p), v.to(dt)[:, :, v_idx])
    return _answer(out, _lse(s), q, return_attn_probs)


def scale_from_value_width(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The default scale comes from the width of v, wrong as soon as it differs from that of q."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = v.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def scale_of_zero_is_default(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The scale is tested for truth, so an explicit softmax_scale of 0.0 becomes the default."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = softmax_scale or q.shape[-1] ** -0.5
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def causal_empty_rows_mean(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Hidden scores are the lowest finite number, so rows without a key return the mean of V."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    seen = _visible(sq, sk, causal, window_size, q.device)
    lse = _lse(s.masked_fill(~seen, NEG_INF))
    p = torch.softmax(s.masked_fill(~seen, torch.finfo(s.dtype).min), dim=-1)
    return _answer(F.dropout(p, dropout_p) @ vh, lse, q, return_attn_probs)


def causal_offset_clamped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The bottom-right offset is max(Sk - Sq, 0), so with more queries than keys the mask is top-left."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    seen = _visible(sq, sk, False, window_size if not causal else (window_size[0], -1), q.device)
    if causal:
        seen = seen & torch.ones_like(seen).tril(max(sk - sq, 0))
    s = s.masked_fill(~seen, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def value_strides_assumed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """V is read with the strides of a contiguous tensor, wrong for a slice of a packed projection."""
    b, sk, hk, dv = v.shape
    if v.untyped_storage().nbytes() // v.element_size() - v.storage_offset() >= v.numel():
        v = torch.as_strided(v, v.shape, (sk * hk * dv, hk * dv, dv, 1))
    qh, kh, vh = _load(q, k, v)
    sq = q.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def combo_window_alibi_distance_clipped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Only with a window: the ALiBi distance is counted from the left edge of the window, not from the query."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        bias = _alibi(alibi_slopes, sq, sk, s.dtype)
        if window_size[0] >= 0:
            edge = torch.arange(sk - sq, sk, device=q.device)[:, None] - window_size[0]
            dist = torch.arange(sk, device=q.device)[None, :] - edge
            bias = -alibi_slopes.to(s.dtype)[..., None, None] * dist
        s = s + bias
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def combo_softcap_gqa_double_scale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Only softcap and GQA together: the scale folded in q is folded in tanh's factor again."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    g = h // hk
    qs = (q.to(dt) * scale).reshape(b, sq, hk, g, d)
    s = torch.einsum("bikgd,bjkd->bkgij", qs, k.to(dt))
    if softcap > 0:
        factor = scale / softcap if g > 1 else 1.0 / softcap
        s = softcap * torch.tanh(s * factor)
    s = s.flatten(1, 2)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, dt)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def combo_causal_window_cross_lengths(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Only causal, window and Sq != Sk together: the left bound forgets Sk - Sq."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        if window_size[0] >= 0:
            seen = seen.triu(-window_size[0])
    else:
        seen = _visible(sq, sk, False, window_size, q.device)
    s = s.masked_fill(~seen, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


_BY_KIND: dict[str, tuple[Callable[..., Any], ...]] = {
    "LSE": (
        lse_base_two,
        lse_without_scale,
        lse_of_unmasked_scores,
        lse_before_softcap,
        lse_without_alibi,
        lse_axes_swapped,
        lse_reshaped_not_permuted,
        lse_without_max,
        lse_empty_row_zero,
        lse_group_order,
    ),
    "GQA heads": (
        gqa_tiled_heads,
        gqa_value_head_offset,
    ),
    "scale": (
        scale_from_value_width,
        scale_of_zero_is_default,
    ),
    "causal alignment": (
        causal_empty_rows_mean,
        causal_offset_clamped,
    ),
    "strides": (value_strides_assumed,),
    "combination": (
        combo_window_alibi_distance_clipped,
        combo_softcap_gqa_double_scale,
        combo_causal_window_cross_lengths,
    ),
}

MUTANTS: dict[str, Callable[..., Any]] = {fn.__name__: fn for fns in _BY_KIND.values() for fn in fns}

CAUSES: dict[str, str] = {
    fn.__name__: f"{kind}: {(fn.__doc__ or '').strip()}" for kind, fns in _BY_KIND.items() for fn in fns
}
