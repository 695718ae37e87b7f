"""Blind flash-attn mutants, part 3: blocks, online softmax and sinks.

Same rules as ``flash_mutants.py``: one fault a function, named in its docstring; the helpers are right.
"""

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


def _finish(acc: torch.Tensor, m: torch.Tensor, total: torch.Tensor, like: torch.Tensor, want: bool) -> Any:
    """Close an online softmax: divide by the sum and build the LSE."""
    live = total > 0
    denom = torch.where(live, total, 1.0)
    lse = torch.where(live, m.masked_fill(~live, 0.0) + denom.log(), NEG_INF)
    return _answer(acc / denom[..., None], lse, like, want)


# ------------------------------------------------------------------------------------------------
# blocks and online softmax
# ------------------------------------------------------------------------------------------------


def tail_keys_unmasked(
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
    """Keys are padded to a multiple of 16 and the zero keys of the tail take part when nothing else masks them."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    pad = -sk % 16
    kh, vh = F.pad(kh, (0, 0, 0, pad)), F.pad(vh, (0, 0, 0, pad))
    seen = _visible(sq, sk, causal, window_size, q.device)
    seen = F.pad(seen, (0, pad), value=not causal and window_size == (-1, -1))
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for j0 in range(0, sk + pad, 16):
        s = _cap(qh @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
        if alibi_slopes is not None:
            i = torch.arange(sk - sq, sk, device=q.device)[:, None]
            j = torch.arange(j0, j0 + 16, device=q.device)[None, :]
            s = s - alibi_slopes.to(s.dtype)[..., None, None] * (i - j).abs()
        s = s.masked_fill(~seen[:, j0 : j0 + 16], NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + p @ vh[:, :, j0 : j0 + 16]
        m = m_new
    return _finish(acc, m, total, q, return_attn_probs)


def tail_keys_dropped(
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
    """The loop runs over Sk // 16 blocks once Sk exceeds a block, so the keys of the last part are never read."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for n in range(max(sk // 16, 1)):
        cols = slice(16 * n, 16 * n + 16)
        s = _cap(qh @ kh[:, :, cols].mT * scale, softcap)
        if bias is not None:
            s = s + bias[..., cols]
        s = s.masked_fill(~seen[:, cols], NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + p @ vh[:, :, cols]
        m = m_new
    return _finish(acc, m, total, q, return_attn_probs)


def last_query_block_shifted(
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
    """The last block of 16 queries is moved back to stay in bounds, but its positions are not."""
    sq, sk = q.shape[1], k.shape[1]
    qh, kh, vh = _load(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    lse = qh.new_zeros(qh.shape[:3])
    seen = F.pad(_visible(sq, sk, causal, window_size, q.device), (0, 0, 0, 16), value=True)
    bias = None
    if alibi_slopes is not None:
        bias = F.pad(_alibi(alibi_slopes, sq, sk, qh.dtype), (0, 0, 0, 16))
    for i0 in range(0, sq, 16):
        start = min(i0, max(sq - 16, 0))
        rows = slice(start, start + 16)
        count = qh[:, :, rows].shape[2]
        where = slice(i0, i0 + count)
        s = _cap(qh[:, :, rows] @ kh.mT * scale, softcap)
        if bias is not None:
            s = s + bias[:, :, where]
        s = s.masked_fill(~seen[where], NEG_INF)
        out = out.slice_scatter(F.dropout(_weights(s), dropout_p) @ vh, 2, start, start + count)
        lse = lse.slice_scatter(_lse(s), 2, start, start + count)
    return _answer(out, lse, q, return_attn_probs)


def rescale_missing_in_masked_block(
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
    """The accumulator is rescaled in whole blocks only, the branch for partly masked blocks adds to the old one."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for j0 in range(0, sk, 16):
        block = seen[:, j0 : j0 + 16]
        whole = bool(block.all())
        s = _cap(qh @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
        if bias is not None:
            s = s + bias[..., j0 : j0 + 16]
        if not whole:
            s = s.masked_fill(~block, NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(dim=-1)
        if whole:
            acc = acc * alpha[..., None]
        acc = acc + p @ vh[:, :, j0 : j0 + 16]
        m = m_new
    return _finish(acc, m, total, q, return_attn_probs)


def denominator_not_rescaled(
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
    """When a later block raises the row maximum, the running sum keeps its old reference."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for j0 in range(0, sk, 16):
        s = _cap(qh @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
        if bias is not None:
            s = s + bias[..., j0 : j0 + 16]
        s = s.masked_fill(~seen[:, j0 : j0 + 16], NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        total = total + p.sum(dim=-1)
        acc = acc * torch.exp(m - safe)[..., None] + p @ vh[:, :, j0 : j0 + 16]
        m = m_new
    return _finish(acc, m, total, q, return_attn_probs)


def causal_block_limit_without_offset(
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
    """The last key block of a causal query block is found from the row number without Sk - Sq."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    outs, lses = [], []
    for i0 in range(0, sq, 16):
        qi = qh[:, :, i0 : i0 + 16]
        m = qi.new_full(qi.shape[:3], NEG_INF)
        total = torch.zeros_like(m)
        acc = vh.new_zeros(*qi.shape[:3], vh.shape[-1])
        stop = min(sk, i0 + 16) if causal else sk
        for j0 in range(0, stop, 16):
            s = _cap(qi @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
            if bias is not None:
                s = s + bias[:, :, i0 : i0 + 16, j0 : j0 + 16]
            s = s.masked_fill(~seen[i0 : i0 + 16, j0 : j0 + 16], NEG_INF)
            m_new = torch.maximum(m, s.detach().amax(dim=-1))
            safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
            p = torch.exp(s - safe[..., None])
            alpha = torch.exp(m - safe)
            total = total * alpha + p.sum(dim=-1)
            acc = acc * alpha[..., None] + p @ vh[:, :, j0 : j0 + 16]
            m = m_new
        o, e = _finish(acc, m, total, q, True)[:2]
        outs.append(o)
        lses.append(e)
    out, lse = torch.cat(outs, dim=1), torch.cat(lses, dim=2)
    return (out, lse, None) if return_attn_probs else out


def window_first_block_from_last_row(
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
    """The first key block of a window is found from the last row of the query block, earlier rows lose keys."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    outs, lses = [], []
    for i0 in range(0, sq, 16):
        qi = qh[:, :, i0 : i0 + 16]
        rows = qi.shape[2]
        m = qi.new_full(qi.shape[:3], NEG_INF)
        total = torch.zeros_like(m)
        acc = vh.new_zeros(*qi.shape[:3], vh.shape[-1])
        first = 0
        if window_size[0] >= 0:
            first = max(0, (i0 + rows - 1 + sk - sq - window_size[0]) // 8)
        for j0 in range(8 * first, sk, 8):
            s = _cap(qi @ kh[:, :, j0 : j0 + 8].mT * scale, softcap)
            if bias is not None:
                s = s + bias[:, :, i0 : i0 + 16, j0 : j0 + 8]
            s = s.masked_fill(~seen[i0 : i0 + 16, j0 : j0 + 8], NEG_INF)
            m_new = torch.maximum(m, s.detach().amax(dim=-1))
            safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
            p = torch.exp(s - safe[..., None])
            alpha = torch.exp(m - safe)
            total = total * alpha + p.sum(dim=-1)
            acc = acc * alpha[..., None] + p @ vh[:, :, j0 : j0 + 8]
            m = m_new
        o, e = _finish(acc, m, total, q, True)[:2]
        outs.append(o)
        lses.append(e)
    out, lse = torch.cat(outs, dim=1), torch.cat(lses, dim=2)
    return (out, lse, None) if return_attn_probs else out


def window_last_block_from_first_row(
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
    """The last key block of a right-bounded window is found from the first row of the query block."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    outs, lses = [], []
    for i0 in range(0, sq, 16):
        i1 = min(i0 + 16, sq)
        n_blocks = -(-sk // 8)
        if causal:
            n_blocks = min(n_blocks, max(0, -(-(i1 + sk - sq) // 8)))
        elif window_size[1] >= 0:
            n_blocks = min(n_blocks, max(0, -(-(i0 + 1 + sk - sq + window_size[1]) // 8)))
        if n_blocks == 0:
            outs.append(torch.zeros_like(vh[:, :, :1].expand(-1, -1, i1 - i0, -1)))
            lses.append(qh.new_full((*qh.shape[:2], i1 - i0), NEG_INF))
            continue
        s = _cap(qh[:, :, i0:i1] @ kh[:, :, : 8 * n_blocks].mT * scale, softcap)
        if bias is not None:
            s = s + bias[:, :, i0:i1, : 8 * n_blocks]
        s = s.masked_fill(~seen[i0:i1, : 8 * n_blocks], NEG_INF)
        outs.append(_weights(s) @ vh[:, :, : 8 * n_blocks])
        lses.append(_lse(s))
    return _answer(torch.cat(outs, dim=2), torch.cat(lses, dim=2), q, return_attn_probs)


def alibi_column_within_block(
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
    """The ALiBi column restarts at 0 in every key block."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    row = torch.arange(sk - sq, sk, device=q.device)[:, None]
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for j0 in range(0, sk, 16):
        s = _cap(qh @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
        if alibi_slopes is not None:
            col = torch.arange(s.shape[-1], device=q.device)[None, :]
            s = s - alibi_slopes.to(s.dtype)[..., None, None] * (row - col).abs()
        s = s.masked_fill(~seen[:, j0 : j0 + 16], NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + p @ vh[:, :, j0 : j0 + 16]
        m = m_new
    return _finish(acc, m, total, q, return_attn_probs)


def split_merge_base_two(
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
    """Decode over two splits of the keys: the natural LSEs of the splits are merged with powers of two."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.mT * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    full = _lse(s)
    if sq > 1 or sk < 2:
        return _answer(F.dropout(_weights(s), dropout_p) @ vh, full, q, return_attn_probs)
    half = sk // 2
    parts = [s[..., :half], s[..., half:]]
    outs = [
        F.dropout(_weights(parts[0]), dropout_p) @ vh[:, :, :half],
        F.dropout(_weights(parts[1]), dropout_p) @ vh[:, :, half:],
    ]
    lses = torch.stack([_lse(part) for part in parts])
    top = lses.detach().amax(dim=0)
    w = torch.exp2(lses - top.masked_fill(top == NEG_INF, 0.0))
    w = w / w.sum(dim=0).clamp_min(1e-30)
    out = outs[0] * w[0][..., None] + outs[1] * w[1][..., None]
    return _answer(out, full, q, return_attn_probs)


def split_lse_of_last_split(
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
    """The keys are worked on in splits of 8 and merged, but the LSE handed out is the one of the last split."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    outs, lses = [], []
    for j0 in range(0, sk, 8):
        s = _cap(qh @ kh[:, :, j0 : j0 + 8].mT * scale, softcap)
        if bias is not None:
            s = s + bias[..., j0 : j0 + 8]
        s = s.masked_fill(~seen[:, j0 : j0 + 8], NEG_INF)
        outs.append(_weights(s) @ vh[:, :, j0 : j0 + 8])
        lses.append(_lse(s))
    part = torch.stack(lses, dim=-1)
    merged = (_weights(part)[..., None, :] @ torch.stack(outs, dim=-2)).squeeze(-2)
    return _answer(merged, part[..., -1], q, return_attn_probs)


# ------------------------------------------------------------------------------------------------
# sinks: one extra logit per head in the denominator (and so in the LSE), without a value
# ------------------------------------------------------------------------------------------------


def sink_added_in_every_block(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The sink joins the running sum in each key block instead of once."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for j0 in range(0, sk, 16):
        s = _cap(qh @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
        if bias is not None:
            s = s + bias[..., j0 : j0 + 16]
        s = s.masked_fill(~seen[:, j0 : j0 + 16], NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        if sinks is not None:
            m_new = torch.maximum(m_new, sinks.detach().to(m.dtype)[:, None])
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(dim=-1)
        if sinks is not None:
            total = total + torch.exp(sinks.to(m.dtype)[:, None] - safe)
        acc = acc * alpha[..., None] + p @ vh[:, :, j0 : j0 + 16]
        m = m_new
    return _finish(acc, m, total, q, return_attn_probs)


def sink_wrong_column_dropped(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The sink is put in front of the scores and the last column is cut off after the softmax."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    if sinks is None:
        return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)
    s = torch.cat([sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1), s], dim=-1)
    p = torch.softmax(s, dim=-1)[..., :-1]
    return _answer(F.dropout(p, dropout_p) @ vh, _lse(s), q, return_attn_probs)


def sink_with_mean_value(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The sink's weight is not thrown away but spent on the mean of V."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    if sinks is None:
        return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)
    s = torch.cat([s, sinks.to(s.dtype).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
    vh = torch.cat([vh, vh.mean(dim=2, keepdim=True)], dim=2)
    return _answer(F.dropout(torch.softmax(s, dim=-1), dropout_p) @ vh, _lse(s), q, return_attn_probs)


def sink_by_kv_head(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """Under GQA the sink is looked up by the key head."""
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
    lse = _lse(s)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks[:hk].to(dt).view(1, hk, 1, 1).expand_as(lse))
    p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
    out = torch.einsum("bkgij,bjkd->bikgd", F.dropout(p, dropout_p), v.to(dt)).flatten(2, 3).to(q.dtype)
    return (out, lse.flatten(1, 2), None) if return_attn_probs else out


def sink_scaled(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The sink logit is concatenated before the softmax scale and multiplied by it."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    if sinks is None:
        return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)
    s = torch.cat([s, (sinks.to(s.dtype) * scale).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
    p = torch.softmax(s, dim=-1)[..., :sk]
    return _answer(F.dropout(p, dropout_p) @ vh, _lse(s), q, return_attn_probs)


def sink_dropped_for_gqa(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The grouped path forgets the sink."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    lse = _lse(s)
    if sinks is not None and q.shape[2] == k.shape[2]:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
    p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
    return _answer(F.dropout(p, dropout_p) @ vh, lse, q, return_attn_probs)


def sink_not_shifted_by_max(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """At the end of the online softmax exp(sink) joins a sum that is relative to the row maximum."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for j0 in range(0, sk, 16):
        s = _cap(qh @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
        if bias is not None:
            s = s + bias[..., j0 : j0 + 16]
        s = s.masked_fill(~seen[:, j0 : j0 + 16], NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        alpha = torch.exp(m - safe)
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + p @ vh[:, :, j0 : j0 + 16]
        m = m_new
    if sinks is not None:
        total = total + sinks.to(total.dtype).exp()[:, None]
        m = m.masked_fill(m == NEG_INF, 0.0)
    return _finish(acc, m, total, q, return_attn_probs)


def sink_not_rescaled(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The running sum starts at the sink, and the first block, which overwrites the maximum, does not rescale it."""
    if dropout_p:
        raise NotImplementedError("no dropout")
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    seen = _visible(sq, sk, causal, window_size, q.device)
    bias = None if alibi_slopes is None else _alibi(alibi_slopes, sq, sk, qh.dtype)
    m = qh.new_full(qh.shape[:3], NEG_INF)
    total = torch.zeros_like(m)
    if sinks is not None:
        m = sinks.detach().to(m.dtype)[:, None].expand_as(m)
        total = torch.exp(sinks.to(m.dtype)[:, None] - m)
    acc = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
    for j0 in range(0, sk, 16):
        s = _cap(qh @ kh[:, :, j0 : j0 + 16].mT * scale, softcap)
        if bias is not None:
            s = s + bias[..., j0 : j0 + 16]
        s = s.masked_fill(~seen[:, j0 : j0 + 16], NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        safe = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p = torch.exp(s - safe[..., None])
        alpha = torch.exp(m - safe) if j0 else torch.ones_like(m)
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + p @ vh[:, :, j0 : j0 + 16]
        m = m_new
    return _finish(acc, m, total, q, return_attn_probs)


def sink_softcapped(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The sink logit goes through the softcap with the scores."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    if sinks is None:
        return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)
    extra = _cap(sinks.to(s.dtype), softcap).reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)
    s = torch.cat([s, extra], dim=-1)
    p = torch.softmax(s, dim=-1)[..., :sk]
    return _answer(F.dropout(p, dropout_p) @ vh, _lse(s), q, return_attn_probs)


def sink_by_row_number(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The sink of a flattened (head, query) row is row mod H, right for a single query only."""
    b, sq, h, d = q.shape
    sk = k.shape[1]
    qh, kh, vh = _load(q, k, v)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    lse = _lse(s)
    if sinks is not None:
        row = torch.arange(h * sq, device=q.device) % h
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[row].view(1, h, sq).expand_as(lse))
    p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
    return _answer(F.dropout(p, dropout_p) @ vh, lse, q, return_attn_probs)


def sink_without_gradient(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The sink is rebuilt from its data, the learned logit never gets a gradient."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    lse = _lse(s)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.data.to(lse.dtype)[:, None].expand_as(lse))
    p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
    return _answer(F.dropout(p, dropout_p) @ vh, lse, q, return_attn_probs)


def sink_dropped_in_decode(
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
    sinks: torch.Tensor | None = None,
) -> Any:
    """The path for one query computes a plain softmax."""
    qh, kh, vh = _load(q, k, v)
    sq, sk = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    s = _cap(qh @ kh.transpose(-1, -2) * scale, softcap)
    if alibi_slopes is not None:
        s = s + _alibi(alibi_slopes, sq, sk, s.dtype)
    s = s.masked_fill(~_visible(sq, sk, causal, window_size, q.device), NEG_INF)
    if sinks is None or sq == 1:
        return _answer(F.dropout(_weights(s), dropout_p) @ vh, _lse(s), q, return_attn_probs)
    lse = torch.logaddexp(_lse(s), sinks.to(s.dtype)[:, None].expand(s.shape[:3]))
    return _answer(F.dropout(torch.exp(s - lse[..., None]), dropout_p) @ vh, lse, q, return_attn_probs)


_BY_KIND: dict[str, tuple[Callable[..., Any], ...]] = {
    "blocks": (
        tail_keys_unmasked,
        tail_keys_dropped,
        last_query_block_shifted,
        causal_block_limit_without_offset,
    ),
    "online softmax": (
        rescale_missing_in_masked_block,
        denominator_not_rescaled,
    ),
    "window": (
        window_first_block_from_last_row,
        window_last_block_from_first_row,
    ),
    "ALiBi": (alibi_column_within_block,),
    "split keys": (
        split_merge_base_two,
        split_lse_of_last_split,
    ),
    "sinks": (
        sink_added_in_every_block,
        sink_wrong_column_dropped,
        sink_with_mean_value,
        sink_by_kv_head,
        sink_scaled,
        sink_dropped_for_gqa,
        sink_not_shifted_by_max,
        sink_not_rescaled,
        sink_softcapped,
        sink_by_row_number,
        sink_without_gradient,
        sink_dropped_in_decode,
    ),
}

MUTANTS: dict[str, Callable[..., Any]] = {fn.__name__: fn for fns in _BY_KIND.values() for fn in fns}

CAUSES: dict[str, str] = {
    fn.__name__: f"{kind}: {(fn.__doc__ or '').strip()}" for kind, fns in _BY_KIND.items() for fn in fns
}
