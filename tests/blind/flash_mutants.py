"""Blind flash-attn mutants, part 1: window, softcap and ALiBi.

Every function has the signature and the meaning of flash-attn's ``flash_attn_func`` (layout [B, S, H, D],
causal and window aligned bottom-right, rows without a key give 0 and an LSE of -inf) and exactly one fault,
named in its docstring.  The helpers below are right; a fault sits in the function that carries its name.
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
# window
# ------------------------------------------------------------------------------------------------


def window_left_one_short(
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
    """The left edge is exclusive, so a window of (L, R) reaches only L - 1 keys to the left."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    left, right = window_size
    right = 0 if causal else right
    rel = torch.arange(sk, device=q.device)[None, :] - torch.arange(sq, device=q.device)[:, None] - (sk - sq)
    hidden = torch.zeros_like(rel, dtype=torch.bool)
    if left >= 0:
        hidden |= (rel <= -left) & (rel != 0)
    if right >= 0:
        hidden |= rel > right
    s = s.masked_fill(hidden, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_left_one_long(
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
    """The window is taken as a count of keys plus the query's own, one key too many on the left."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    qg = q.to(dt).reshape(b, sq, hk, h // hk, d)
    s = torch.einsum("bikgd,bjkd->bkgij", qg * scale, k.to(dt)).reshape(b, h, sq, sk)
    s = _cap(s, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, dt)
    seen = _visible(sq, sk, causal, (-1, window_size[1]), q.device)
    if window_size[0] >= 0:
        seen = seen & torch.ones_like(seen).triu(sk - sq - window_size[0] - 1)
    s = s.masked_fill(~seen, NEG_INF)
    p = F.dropout(_weights(s), dropout_p).reshape(b, hk, h // hk, sq, sk)
    out = torch.einsum("bkgij,bjkd->bkgid", p, v.to(dt)).reshape(b, h, sq, v.shape[-1])
    return _answer(out, _lse(s), q, return_attn_probs)


def window_right_exclusive(
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
    """The right edge of a window wider than 0 is exclusive, as in a python range."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(torch.einsum("bhid,bhjd->bhij", qh, kh) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    keep = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
    for i in range(sq):
        here = i + sk - sq
        lo = max(0, here - window_size[0]) if window_size[0] >= 0 else 0
        hi = sk
        if causal or window_size[1] == 0:
            hi = here + 1
        elif window_size[1] > 0:
            hi = here + window_size[1]
        keep[i, lo : max(hi, 0)] = True
    s = s.masked_fill(~keep, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_right_one_long(
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
    """The right edge of a non-causal window lets one key more through."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap((qh * scale) @ kh.mT, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    left = window_size[0] if window_size[0] >= 0 else sk + sq
    right = window_size[1] if window_size[1] >= 0 else sk + sq
    row = torch.arange(sq, device=q.device).view(-1, 1)
    col = torch.arange(sk, device=q.device).view(1, -1)
    col_limit_right = row + 1 + sk - sq + (0 if causal else right)
    col_limit_left = row + sk - sq - left
    out_of_band = (col > col_limit_right) if not causal else (col >= col_limit_right)
    s = s.masked_fill(out_of_band | (col < col_limit_left), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_top_left(
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
    """The window is measured from the query's own row number, only causal takes Sk - Sq into account."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if causal:
        keep = keep.tril(sk - sq)
    if window_size[0] >= 0:
        keep = keep.triu(-window_size[0])
    if window_size[1] >= 0 and not causal:
        keep = keep.tril(window_size[1])
    s = s.masked_fill(~keep, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_ignored_when_causal(
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
    """The mask is chosen by if causal / elif window, so a causal call loses its left bound."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    if causal:
        keep = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        s = torch.where(keep, s, NEG_INF)
    elif window_size != (-1, -1):
        s = torch.where(_visible(sq, sk, False, window_size, q.device), s, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_replaces_causal(
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
    """A window that was given replaces the causal mask, so a right bound above 0 shows the future."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    left, right = window_size
    if causal and right < 0:
        right = 0
    s = s.masked_fill(~_visible(sq, sk, False, (left, right), q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_ignored_for_gqa(
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
    """The grouped-head branch was written for full attention and never got the window."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    if h == hk:
        s = torch.einsum("bihd,bjhd->bhij", q.to(dt), k.to(dt)) * scale
        seen = _visible(sq, sk, causal, window_size, q.device)
    else:
        qg = q.to(dt).unflatten(2, (hk, h // hk))
        s = torch.einsum("bikgd,bjkd->bkgij", qg, k.to(dt)).flatten(1, 2) * scale
        seen = _visible(sq, sk, causal, (-1, -1), q.device)
    s = _cap(s, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, dt)
    s = s.masked_fill(~seen, NEG_INF)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_ignored_with_softcap(
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
    """The soft-capped specialisation knows causal and full attention but no local one."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2) * scale
    is_local = window_size != (-1, -1)
    if softcap > 0.0:
        s = torch.tanh(s / softcap) * softcap
        is_local = False
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    if is_local:
        s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    elif causal:
        s = s.masked_fill(~_visible(sq, sk, True, (-1, -1), q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_ignored_with_alibi(
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
    """The ALiBi bias is folded in the mask tensor, and the fold is built from the causal mask alone."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    seen = _visible(sq, sk, causal, window_size, q.device)
    hidden = ~seen
    if alibi_slopes is not None:
        bias = _alibi(alibi_slopes, sq, sk, s.dtype)
        if causal:
            bias = bias.masked_fill(~_visible(sq, sk, True, (-1, -1), q.device), NEG_INF)
        s = s + bias
        hidden = bias == NEG_INF
    s = s.masked_fill(hidden, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_ignored_in_decode(
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
    """One query sees the whole cache: the mask is skipped when Sq is 1."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    if sq > 1:
        s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_shifted_in_decode(
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
    """With one query the cache is cut to its last L keys, forgetting that L does not count the query's own."""
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    first = 0
    if sq == 1 and window_size[0] >= 0:
        first = max(0, sk - max(window_size[0], 1))
    qh, kh, vh = _load(q, k[:, first:], v[:, first:])
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)[..., first:]
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device)[:, first:], NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_right_zero_is_unlimited(
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
    """The right bound is tested for truth, so (L, 0) without causal reads the whole future."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    left, right = (w if w != -1 else None for w in window_size)
    i = torch.arange(sk - sq, sk, device=q.device).unsqueeze(1)
    j = torch.arange(sk, device=q.device)
    mask = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
    if left is not None:
        mask |= j < i - left
    if causal:
        mask |= j > i
    elif right:
        mask |= j > i + right
    s = s.masked_fill(mask, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_left_unlimited_is_zero(
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
    """The bounds are clamped to 0 as soon as one of them is set, so (-1, R) loses every key on the left."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    window = window_size
    if window[1] > 0 and not causal:
        window = (max(window[0], 0), window[1])
    s = s.masked_fill(~_visible(sq, sk, causal, window, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def window_left_alone_means_causal(
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
    """A left bound with an open right side is taken for a causal sliding window."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    sliding = window_size[0] >= 0 and window_size[1] < 0
    s = s.masked_fill(~_visible(sq, sk, causal or sliding, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


# ------------------------------------------------------------------------------------------------
# softcap
# ------------------------------------------------------------------------------------------------


def softcap_after_mask(
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
    """The cap is applied to masked scores: tanh(-inf) is -1, so hidden keys come back with logit -cap."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2) * scale
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    s = _cap(s, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def softcap_on_raw_scores(
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
    """The cap is applied to q.k before the softmax scale."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    s = s * scale
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def softcap_branch_without_scale(
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
    """The capped branch is cap * tanh(q.k / cap), the softmax scale is only in the other one."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    qg = q.to(dt).reshape(b, sq, hk, h // hk, d)
    s = torch.einsum("bikgd,bjkd->bkgij", qg, k.to(dt)).reshape(b, h, sq, sk)
    s = softcap * torch.tanh(s / softcap) if softcap > 0.0 else s * scale
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, dt)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    p = F.dropout(_weights(s), dropout_p).reshape(b, hk, h // hk, sq, sk)
    out = torch.einsum("bkgij,bjkd->bkgid", p, v.to(dt)).reshape(b, h, sq, v.shape[-1])
    return _answer(out, _lse(s), q, return_attn_probs)


def softcap_without_division(
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
    """The argument of tanh is not divided by the cap."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def softcap_uses_default_scale(
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
    """The factor folded in tanh is scale / cap with the default scale, an explicit softmax_scale is lost there."""
    qh, kh, vh = _load(q, k, v)
    sq, sk, d = q.shape[1], k.shape[1], q.shape[-1]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2)
    if softcap > 0:
        pre = (1.0 / math.sqrt(d)) / softcap
        s = torch.tanh(s * pre) * softcap
    else:
        s = s * scale
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def softcap_scaled_twice(
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
    """Capped scores already hold the scale, and the exponent multiplies by it once more."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2)
    if softcap > 0:
        s = torch.tanh(s * (scale / softcap)) * softcap
    s = s * scale
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def softcap_dropped_when_causal(
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
    """The causal branch masks the raw scores and overwrites the capped ones."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    raw = qh @ kh.transpose(-1, -2) * scale
    s = _cap(raw, softcap)
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = 0.0 if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, raw.dtype)
    if causal:
        s = (raw + bias).masked_fill(~seen, NEG_INF)
    else:
        s = (s + bias).masked_fill(~seen, NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def softcap_dropped_in_decode(
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
    """The single-query path is a separate matrix-vector kernel that takes no softcap."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if sq == 1:
        s = (kh * (qh * scale)).sum(dim=-1).unsqueeze(2)
    else:
        s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def softcap_as_clamp(
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
    """The cap is a hard clamp to [-cap, cap] in place of the tanh."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2) * scale
    if softcap > 0.0:
        s = s.clamp(-softcap, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


# ------------------------------------------------------------------------------------------------
# ALiBi
# ------------------------------------------------------------------------------------------------


def alibi_sign_flipped(
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
    """The bias grows with the distance, far keys are favoured."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        i = torch.arange(sk - sq, sk, device=q.device)
        j = torch.arange(sk, device=q.device)
        dist = (i[:, None] - j[None, :]).abs().to(s.dtype)
        s = s + alibi_slopes.to(s.dtype)[..., None, None] * dist
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_top_left(
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
    """The distance is |i - j| with the query's row number, without Sk - Sq."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        i = torch.arange(sq, device=q.device)[:, None]
        j = torch.arange(sk, device=q.device)[None, :]
        s = s - alibi_slopes.to(s.dtype)[..., None, None] * (i - j).abs()
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_before_softcap(
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
    """The bias is added first and capped together with the scores."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = qh @ kh.transpose(-1, -2) * scale
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = _cap(s, softcap)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_scaled(
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
    """The bias enters before the softmax scale and is multiplied by it (the division by the scale is missing)."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + scale * _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_slope_by_kv_head(
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
    """Under GQA the slope is looked up by the key head, all query heads of a group share it."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    outs, lses = [], []
    for head in range(h):
        kv = head // (h // hk)
        s = _cap(q[:, :, head].to(dt) @ k[:, :, kv].to(dt).transpose(1, 2) * scale, softcap)
        if alibi_slopes is not None:
            s = s + _alibi(alibi_slopes[..., kv : kv + 1], sq, sk, dt)[:, 0]
        s = s.masked_fill(~seen, NEG_INF)
        outs.append(F.dropout(_weights(s), dropout_p) @ v[:, :, kv].to(dt))
        lses.append(_lse(s))
    return _answer(torch.stack(outs, dim=1), torch.stack(lses, dim=1), q, return_attn_probs)


def alibi_batch_zero(
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
    """Slopes of shape [B, H] are read from the first batch entry for all of them."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        slopes = alibi_slopes.reshape(-1)[: q.shape[2]]
        s = s + _alibi(slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_ignored_in_decode(
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
    """A single query is thought to make the bias a constant, so it is skipped."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None and sq > 1:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_without_abs(
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
    """The distance keeps its sign, keys after the query are rewarded when the call is not causal."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        rel = torch.arange(sk, device=q.device)[None, :] - torch.arange(sk - sq, sk, device=q.device)[:, None]
        s = s + alibi_slopes.to(s.dtype)[..., None, None] * rel
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_column_bias_in_lse(
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
    """Causal calls add slope * j to every row, which the softmax forgives but the returned LSE shows."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        if causal:
            cols = torch.arange(sk, device=q.device, dtype=s.dtype)
            s = s + alibi_slopes.to(s.dtype)[..., None, None] * cols
        else:
            s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def alibi_packed_group_positions(
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
    """Decode packs the heads of a group as rows, and the bias takes the row number for a query position."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    if sq != 1 or h == hk:
        qh, kh, vh = _load(q, k, v)
        scale = d**-0.5 if softmax_scale is None else softmax_scale
        s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
        if alibi_slopes is not None:
            s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
        s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
        return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)
    dt = torch.promote_types(q.dtype, torch.float32)
    g = h // hk
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    packed = q.to(dt).reshape(b, hk, g, d)
    s = _cap(packed @ k.to(dt).permute(0, 2, 3, 1) * scale, softcap)
    if alibi_slopes is not None:
        rows = torch.arange(g, device=q.device)[:, None] + sk - g
        dist = (rows - torch.arange(sk, device=q.device)[None, :]).abs()
        s = s - alibi_slopes.to(dt).reshape(-1, hk, g, 1) * dist
    s = s.masked_fill(~_visible(1, sk, causal, window_size, q.device), NEG_INF)
    out = F.dropout(_weights(s), dropout_p) @ v.to(dt).transpose(1, 2)
    lse = _lse(s).reshape(b, h, 1)
    return _answer(out.reshape(b, h, 1, v.shape[-1]), lse, q, return_attn_probs)


_BY_KIND: dict[str, tuple[Callable[..., Any], ...]] = {
    "window": (
        window_left_one_short,
        window_left_one_long,
        window_right_exclusive,
        window_right_one_long,
        window_top_left,
        window_ignored_when_causal,
        window_replaces_causal,
        window_ignored_for_gqa,
        window_ignored_with_softcap,
        window_ignored_with_alibi,
        window_ignored_in_decode,
        window_shifted_in_decode,
        window_right_zero_is_unlimited,
        window_left_unlimited_is_zero,
        window_left_alone_means_causal,
    ),
    "softcap": (
        softcap_after_mask,
        softcap_on_raw_scores,
        softcap_branch_without_scale,
        softcap_without_division,
        softcap_uses_default_scale,
        softcap_scaled_twice,
        softcap_dropped_when_causal,
        softcap_dropped_in_decode,
        softcap_as_clamp,
    ),
    "ALiBi": (
        alibi_sign_flipped,
        alibi_top_left,
        alibi_before_softcap,
        alibi_scaled,
        alibi_slope_by_kv_head,
        alibi_batch_zero,
        alibi_ignored_in_decode,
        alibi_without_abs,
        alibi_column_bias_in_lse,
        alibi_packed_group_positions,
    ),
}

MUTANTS: dict[str, Callable[..., Any]] = {fn.__name__: fn for fns in _BY_KIND.values() for fn in fns}

CAUSES: dict[str, str] = {
    fn.__name__: f"{kind}: {(fn.__doc__ or '').strip()}" for kind, fns in _BY_KIND.items() for fn in fns
}
