"""Blind flash-attn honest material, part 1: right implementations that share the whole signature or most of it.

Layout [B, S, H, D], causal and window aligned bottom-right, rows without a key give 0 and an LSE of -inf.
What a function does not support it refuses with NotImplementedError.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

NEG_INF = float("-inf")


def _tie(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A zero that hangs on all three inputs, so that calls without keys or queries keep their graph."""
    return q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()


def dense(
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
    """Dense attention, heads first."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    kh = k.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
    s = q.to(dt).transpose(1, 2) @ kh.transpose(-2, -1) * scale
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(sq, device=q.device)[:, None] + sk - sq
    j = torch.arange(sk, device=q.device)[None, :]
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dt).reshape(-1, h, 1, 1) * (i - j).abs()
    seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    left, right = window_size
    if causal:
        right = 0
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    dead = ~seen.any(dim=-1, keepdim=True)
    s = s.masked_fill(~(seen | dead), NEG_INF)
    p = torch.softmax(s, dim=-1).masked_fill(dead, 0.0)
    out = (F.dropout(p, dropout_p) @ vh).transpose(1, 2).to(q.dtype)
    if not return_attn_probs:
        return out
    return out, torch.logsumexp(s, dim=-1).masked_fill(dead[:, 0], NEG_INF), None


def einsum_grouped(
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
    """Grouped einsum without repeating the key heads, mask by tril and triu."""
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    s = torch.einsum("bikgd,bjkd->bkgij", q.to(dt).unflatten(2, (hk, h // hk)) * scale, k.to(dt))
    if softcap:
        s = torch.tanh(s / softcap) * softcap
    if alibi_slopes is not None:
        rel = torch.arange(sk, device=q.device) - torch.arange(sk - sq, sk, device=q.device).unsqueeze(1)
        s = s - rel.abs() * alibi_slopes.to(dt).reshape(-1, hk, h // hk, 1, 1)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
    if causal:
        keep = keep.tril(sk - sq)
    elif window_size[1] >= 0:
        keep = keep.tril(sk - sq + window_size[1])
    if window_size[0] >= 0:
        keep = keep.triu(sk - sq - window_size[0])
    s = torch.where(keep, s, NEG_INF)
    lse = torch.logsumexp(torch.where(keep.any(-1, keepdim=True), s, 0.0), dim=-1)
    p = torch.exp(s - lse.unsqueeze(-1))
    out = torch.einsum("bkgij,bjkd->bikgd", F.dropout(p, dropout_p), v.to(dt)).reshape(b, sq, h, dv).to(q.dtype)
    lse = torch.where(keep.any(-1), lse, NEG_INF).reshape(b, h, sq)
    return (out, lse, None) if return_attn_probs else out


def per_row_slices(
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
    """Each query row reads exactly its slice of the keys, nothing is masked."""
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    kk = k.to(dt).repeat_interleave(h // hk, dim=2)
    vv = v.to(dt).repeat_interleave(h // hk, dim=2)
    outs, lses = [], []
    for row in range(sq):
        pos = row + sk - sq
        lo = max(pos - window_size[0], 0) if window_size[0] >= 0 else 0
        hi = sk
        if causal:
            hi = min(pos + 1, sk)
        elif window_size[1] >= 0:
            hi = min(pos + window_size[1] + 1, sk)
        if hi <= lo:
            outs.append(torch.zeros(b, h, dv, dtype=dt, device=q.device))
            lses.append(torch.full((b, h), NEG_INF, dtype=dt, device=q.device))
            continue
        s = torch.einsum("bhd,bjhd->bhj", q[:, row].to(dt), kk[:, lo:hi]) * scale
        if softcap > 0:
            s = softcap * (s / softcap).tanh()
        if alibi_slopes is not None:
            dist = (torch.arange(lo, hi, device=q.device) - pos).abs().to(dt)
            s = s - alibi_slopes.to(dt).unsqueeze(-1) * dist
        lses.append(torch.logsumexp(s, dim=-1))
        outs.append(torch.einsum("bhj,bjhd->bhd", F.dropout(s.softmax(-1), dropout_p), vv[:, lo:hi]))
    if not outs:
        out = torch.zeros(b, 0, h, dv, dtype=q.dtype, device=q.device)
        lse = torch.zeros(b, h, 0, dtype=dt, device=q.device)
    else:
        out, lse = torch.stack(outs, dim=1).to(q.dtype), torch.stack(lses, dim=2)
    out = out + _tie(q, k, v)
    return (out, lse, None) if return_attn_probs else out


def online_over_keys(
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
    """Online softmax over blocks of 16 keys."""
    if dropout_p > 0.0:
        raise NotImplementedError("online_over_keys has no dropout")
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    qh = q.to(dt).transpose(1, 2) * scale
    row = torch.arange(sk - sq, sk, device=q.device)[:, None]
    m = torch.full((b, h, sq, 1), NEG_INF, dtype=dt, device=q.device)
    total = torch.zeros_like(m)
    acc = torch.zeros(b, h, sq, dv, dtype=dt, device=q.device)
    for start in range(0, sk, 16):
        kb = k[:, start : start + 16].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        vb = v[:, start : start + 16].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        col = torch.arange(start, start + kb.shape[2], device=q.device)[None, :]
        s = qh @ kb.mT
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        if alibi_slopes is not None:
            s = s - alibi_slopes.to(dt)[..., None, None] * (row - col).abs()
        hidden = torch.zeros(sq, kb.shape[2], dtype=torch.bool, device=q.device)
        if window_size[0] >= 0:
            hidden |= col < row - window_size[0]
        if causal:
            hidden |= col > row
        elif window_size[1] >= 0:
            hidden |= col > row + window_size[1]
        s = s.masked_fill(hidden, NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1, keepdim=True))
        ref = torch.where(m_new == NEG_INF, 0.0, m_new)
        alpha = torch.exp(m - ref)
        p = torch.exp(s - ref)
        total = total * alpha + p.sum(dim=-1, keepdim=True)
        acc = acc * alpha + p @ vb
        m = m_new
    live = total > 0
    denom = torch.where(live, total, 1.0)
    out = (acc / denom).transpose(1, 2).to(q.dtype)
    lse = torch.where(live, torch.where(live, m, 0.0) + denom.log(), NEG_INF).squeeze(-1)
    out = out + _tie(q, k, v)
    return (out, lse, None) if return_attn_probs else out


def tiles_with_skipping(
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
    """Tiles of 8 queries and 8 keys, with key tiles outside of the band never visited."""
    if dropout_p > 0.0:
        raise NotImplementedError("tiles_with_skipping has no dropout")
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    left = window_size[0] if window_size[0] >= 0 else sk + sq
    right = 0 if causal else (window_size[1] if window_size[1] >= 0 else sk + sq)
    out = torch.zeros(b, 0, h, dv, dtype=q.dtype, device=q.device)
    lse = torch.zeros(b, h, 0, dtype=dt, device=q.device)
    for i0 in range(0, sq, 8):
        i1 = min(i0 + 8, sq)
        qi = q[:, i0:i1].to(dt).unflatten(2, (hk, h // hk))
        row = torch.arange(i0, i1, device=q.device)[:, None] + sk - sq
        m = torch.full((b, hk, h // hk, i1 - i0), NEG_INF, dtype=dt, device=q.device)
        total = torch.zeros_like(m)
        acc = torch.zeros(*m.shape, dv, dtype=dt, device=q.device)
        first = max(0, i0 + sk - sq - left) // 8
        last = min(sk, i1 + sk - sq + right)
        for j0 in range(8 * first, max(last, 0), 8):
            j1 = min(j0 + 8, sk)
            s = torch.einsum("bikgd,bjkd->bkgij", qi, k[:, j0:j1].to(dt)) * scale
            if softcap > 0:
                s = softcap * torch.tanh(s / softcap)
            col = torch.arange(j0, j1, device=q.device)[None, :]
            if alibi_slopes is not None:
                s = s - alibi_slopes.to(dt).reshape(-1, hk, h // hk, 1, 1) * (row - col).abs()
            s = s.masked_fill((col < row - left) | (col > row + right), NEG_INF)
            m_new = torch.maximum(m, s.detach().amax(dim=-1))
            ref = m_new.masked_fill(m_new == NEG_INF, 0.0)
            p = torch.exp(s - ref[..., None])
            alpha = torch.exp(m - ref)
            total = total * alpha + p.sum(dim=-1)
            acc = acc * alpha[..., None] + torch.einsum("bkgij,bjkd->bkgid", p, v[:, j0:j1].to(dt))
            m = m_new
        dead = total == 0
        denom = total.masked_fill(dead, 1.0)
        tile = (acc / denom[..., None]).flatten(1, 2).transpose(1, 2).to(q.dtype)
        e = (m.masked_fill(dead, 0.0) + denom.log()).masked_fill(dead, NEG_INF).flatten(1, 2)
        out, lse = torch.cat([out, tile], dim=1), torch.cat([lse, e], dim=2)
    out = out + _tie(q, k, v)
    return (out, lse, None) if return_attn_probs else out


def base_two(
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
    """Everything in base 2 as on the GPU, the LSE is turned to natural log at the end."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    kh = k.to(dt).repeat_interleave(h // hk, dim=2)
    vh = v.to(dt).repeat_interleave(h // hk, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q.to(dt), kh)
    log2e = math.log2(math.e)
    s = torch.tanh(s * (scale / softcap)) * (softcap * log2e) if softcap > 0 else s * (scale * log2e)
    i = torch.arange(sq, device=q.device).view(-1, 1) + (sk - sq)
    j = torch.arange(sk, device=q.device).view(1, -1)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dt).reshape(-1, h, 1, 1) * ((i - j).abs().to(dt) * log2e)
    lo = window_size[0] if window_size[0] >= 0 else sq + sk
    hi = 0 if causal else (window_size[1] if window_size[1] >= 0 else sq + sk)
    band = (j - i >= -lo) & (j - i <= hi)
    s = s.masked_fill(~band, NEG_INF)
    m = torch.where(band.any(dim=-1, keepdim=True), s.detach(), 0.0)
    m = m.amax(dim=-1, keepdim=True) if sk else m.new_zeros(b, h, sq, 1)
    p = torch.exp2(s - m)
    total = p.sum(dim=-1, keepdim=True)
    live = total > 0
    total = total.masked_fill(~live, 1.0)
    out = torch.einsum("bhij,bjhd->bihd", F.dropout(p / total, dropout_p), vh).to(q.dtype)
    lse = ((m + total.log2()) * math.log(2.0)).masked_fill(~live, NEG_INF)[..., 0]
    return (out, lse, None) if return_attn_probs else out


def split_keys_and_merge(
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
    """Three splits of the keys, each with its own softmax, merged by their LSEs."""
    if dropout_p > 0.0:
        raise NotImplementedError("split_keys_and_merge has no dropout")
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    pos = torch.arange(sk - sq, sk, device=q.device)[:, None]
    size = max(-(-sk // 3), 1)
    outs = [torch.zeros(b, h, sq, dv, dtype=dt, device=q.device)]
    lses = [torch.full((b, h, sq), NEG_INF, dtype=dt, device=q.device)]
    for start in range(0, sk, size):
        kb = k[:, start : start + size].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        vb = v[:, start : start + size].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        s = q.to(dt).transpose(1, 2) @ kb.mT * scale
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        col = torch.arange(start, start + kb.shape[2], device=q.device)
        if alibi_slopes is not None:
            s = s - alibi_slopes.to(dt)[..., None, None] * (pos - col).abs()
        seen = torch.ones_like(pos - col, dtype=torch.bool)
        if window_size[0] >= 0:
            seen = seen & (pos - col <= window_size[0])
        if causal or window_size[1] >= 0:
            seen = seen & (col - pos <= (0 if causal else window_size[1]))
        dead = ~seen.any(dim=-1, keepdim=True)
        s = s.masked_fill(~(seen | dead), NEG_INF)
        outs.append(torch.softmax(s, dim=-1).masked_fill(dead, 0.0) @ vb)
        lses.append(torch.logsumexp(s, dim=-1).masked_fill(dead[:, 0], NEG_INF))
    part = torch.stack(lses)
    dead = (part == NEG_INF).all(dim=0)
    lse = torch.logsumexp(part.masked_fill(dead, 0.0), dim=0)
    weight = torch.exp(part - lse)
    out = (weight[..., None] * torch.stack(outs)).sum(dim=0).transpose(1, 2).to(q.dtype)
    out = out + _tie(q, k, v)
    return (out, lse.masked_fill(dead, NEG_INF), None) if return_attn_probs else out


def two_passes(
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
    """First pass for the LSE over all key blocks, second pass for the output."""
    if dropout_p > 0.0:
        raise NotImplementedError("two_passes has no dropout")
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    owner = torch.arange(h, device=q.device) // (h // hk)
    row = torch.arange(sq, device=q.device)[:, None] + sk - sq

    def block(j0: int) -> torch.Tensor:
        s = torch.einsum("bihd,bjhd->bhij", q.to(dt), k[:, j0 : j0 + 12, owner].to(dt)) * scale
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        rel = torch.arange(j0, j0 + s.shape[-1], device=q.device) - row
        if alibi_slopes is not None:
            s = s - alibi_slopes.to(dt)[..., None, None] * rel.abs()
        hidden = rel > 0 if causal else (rel > window_size[1]) & (window_size[1] >= 0)
        if window_size[0] >= 0:
            hidden = hidden | (rel < -window_size[0])
        return s.masked_fill(hidden, NEG_INF)

    lse = torch.full((b, h, sq), NEG_INF, dtype=dt, device=q.device)
    blocks = [block(j0) for j0 in range(0, sk, 12)]
    if blocks:
        whole = torch.cat(blocks, dim=-1)
        dead = (whole == NEG_INF).all(dim=-1)
        lse = torch.logsumexp(whole.masked_fill(dead[..., None], 0.0), dim=-1)
        lse = lse.masked_fill(dead, NEG_INF)
    safe = lse.masked_fill(lse == NEG_INF, 0.0)
    out = torch.zeros(b, sq, h, dv, dtype=dt, device=q.device)
    for n, s in enumerate(blocks):
        p = torch.exp(s - safe[..., None])
        out = out + torch.einsum("bhij,bjhd->bihd", p, v[:, 12 * n : 12 * n + 12, owner].to(dt))
    out = out.to(q.dtype)
    out = out + _tie(q, k, v)
    return (out, lse, None) if return_attn_probs else out


def padded_to_blocks(
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
    """Keys and queries are padded to multiples of 16, the padding is masked and cut off again."""
    if dropout_p > 0.0:
        raise NotImplementedError("padded_to_blocks has no dropout")
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    pq, pk = -sq % 16, -sk % 16
    qp = F.pad(q.to(dt), (0, 0, 0, 0, 0, pq))
    kp = F.pad(k.to(dt), (0, 0, 0, 0, 0, pk)).repeat_interleave(h // hk, dim=2)
    vp = F.pad(v.to(dt), (0, 0, 0, 0, 0, pk)).repeat_interleave(h // hk, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", qp, kp) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(sq + pq, device=q.device)[:, None] + sk - sq
    j = torch.arange(sk + pk, device=q.device)[None, :]
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dt).reshape(-1, h, 1, 1) * (i - j).abs()
    ok = (j < sk) & (i < sk)
    if window_size[0] >= 0:
        ok = ok & (j >= i - window_size[0])
    if window_size[1] >= 0 and not causal:
        ok = ok & (j <= i + window_size[1])
    if causal:
        ok = ok & (j <= i)
    dead = ~ok.any(dim=-1, keepdim=True)
    s = s.masked_fill(~ok & ~dead, NEG_INF)
    p = s.softmax(dim=-1).masked_fill(dead, 0.0)
    out = torch.einsum("bhij,bjhd->bihd", p, vp)[:, :sq].to(q.dtype)
    lse = s.logsumexp(dim=-1).masked_fill(dead[:, 0], NEG_INF)[..., :sq]
    return (out, lse, None) if return_attn_probs else out


def decode_packs_group(
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
    """One query: the heads of a group are packed as rows over their key head.  More queries: head by head."""
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    g = h // hk
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    i = torch.arange(sk - sq, sk, device=q.device)[:, None]
    j = torch.arange(sk, device=q.device)
    hidden = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
    if window_size[0] >= 0:
        hidden |= i - j > window_size[0]
    if causal or window_size[1] >= 0:
        hidden |= j - i > (0 if causal else window_size[1])
    dead = hidden.all(dim=-1, keepdim=True)
    slopes = None if alibi_slopes is None else alibi_slopes.to(dt).expand(b, h)

    def attend(s: torch.Tensor, slope: torch.Tensor | None, val: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        if slope is not None:
            s = s - slope * (i - j).abs()
        s = s.masked_fill(hidden & ~dead, NEG_INF)
        p = F.dropout(s.softmax(dim=-1).masked_fill(dead, 0.0), dropout_p)
        return p @ val, s.logsumexp(dim=-1).masked_fill(dead[:, 0], NEG_INF)

    if sq == 1:
        rows = q.to(dt).reshape(b, hk, g, d)
        slope = None if slopes is None else slopes.reshape(b, hk, g, 1)
        o, e = attend(rows @ k.to(dt).permute(0, 2, 3, 1) * scale, slope, v.to(dt).transpose(1, 2))
        out, lse = o.reshape(b, 1, h, dv), e.reshape(b, h, 1)
    else:
        pairs = []
        for head in range(h):
            s = q[:, :, head].to(dt) @ k[:, :, head // g].to(dt).mT * scale
            slope = None if slopes is None else slopes[:, head, None, None]
            pairs.append(attend(s, slope, v[:, :, head // g].to(dt)))
        out = torch.stack([o for o, _ in pairs], dim=2)
        lse = torch.stack([e for _, e in pairs], dim=1)
    return (out.to(q.dtype), lse, None) if return_attn_probs else out.to(q.dtype)


def half_weights(
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
    """Scores and sums in float32, the weights are rounded to the input type before they meet V, as on the GPU."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    kh = k.transpose(1, 2).repeat_interleave(h // hk, dim=1)
    vh = v.transpose(1, 2).repeat_interleave(h // hk, dim=1)
    s = (q.transpose(1, 2).to(dt) @ kh.to(dt).mT) * scale
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(sq, device=q.device)[:, None] + sk - sq
    j = torch.arange(sk, device=q.device)[None, :]
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dt).reshape(-1, h, 1, 1) * (i - j).abs()
    limits = (window_size[0], 0 if causal else window_size[1])
    keep = (i - j <= limits[0]) | (limits[0] < 0)
    keep = keep & ((j - i <= limits[1]) | (limits[1] < 0))
    dead = ~keep.any(dim=-1, keepdim=True)
    s = s.masked_fill(~(keep | dead), NEG_INF)
    p = F.dropout(torch.softmax(s, dim=-1).masked_fill(dead, 0.0), dropout_p)
    out = (p.to(v.dtype).to(dt) @ vh.to(dt)).transpose(1, 2).to(q.dtype)
    lse = torch.logsumexp(s, dim=-1).masked_fill(dead[:, 0], NEG_INF)
    return (out, lse, None) if return_attn_probs else out


def chunked_with_checkpoint(
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
    """Chunks of queries under activation checkpointing."""
    if dropout_p > 0.0:
        raise NotImplementedError("chunked_with_checkpoint has no dropout")
    from torch.utils.checkpoint import checkpoint

    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale

    def chunk(qc: torch.Tensor, kc: torch.Tensor, vc: torch.Tensor, i0: int) -> tuple[torch.Tensor, torch.Tensor]:
        kh = kc.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        vh = vc.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        s = qc.to(dt).transpose(1, 2) @ kh.mT * scale
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        rel = torch.arange(sk, device=qc.device)[None, :] - (
            torch.arange(i0, i0 + qc.shape[1], device=qc.device)[:, None] + sk - sq
        )
        if alibi_slopes is not None:
            s = s - alibi_slopes.to(dt)[..., None, None] * rel.abs()
        bad = torch.zeros_like(rel, dtype=torch.bool)
        if window_size[0] >= 0:
            bad = bad | (rel < -window_size[0])
        if causal:
            bad = bad | (rel > 0)
        elif window_size[1] >= 0:
            bad = bad | (rel > window_size[1])
        dead = bad.all(dim=-1, keepdim=True)
        s = s.masked_fill(bad & ~dead, NEG_INF)
        o = s.softmax(dim=-1).masked_fill(dead, 0.0) @ vh
        return o.transpose(1, 2).to(q.dtype), s.logsumexp(dim=-1).masked_fill(dead[:, 0], NEG_INF)

    if sq == 0:
        out = torch.zeros(b, 0, h, dv, dtype=q.dtype, device=q.device)
        lse = torch.zeros(b, h, 0, dtype=dt, device=q.device)
    else:
        done = [checkpoint(chunk, q[:, i0 : i0 + 10], k, v, i0, use_reentrant=False) for i0 in range(0, sq, 10)]
        out, lse = torch.cat([o for o, _ in done], dim=1), torch.cat([e for _, e in done], dim=2)
    out = out + _tie(q, k, v)
    return (out, lse, None) if return_attn_probs else out


def sinks_by_concatenation(
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
    """The sink is one more column of logits that is dropped after the softmax."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    kh = k.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
    s = q.to(dt).transpose(1, 2) @ kh.mT * scale
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    rel = torch.arange(sk, device=q.device)[None, :] - torch.arange(sk - sq, sk, device=q.device)[:, None]
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(dt).reshape(-1, h, 1, 1) * rel.abs()
    hidden = rel > 0 if causal else (rel > window_size[1]) & (window_size[1] >= 0)
    if window_size[0] >= 0:
        hidden = hidden | (rel < -window_size[0])
    if sinks is None:
        dead = hidden.all(dim=-1, keepdim=True)
        s = s.masked_fill(hidden & ~dead, NEG_INF)
        p = s.softmax(dim=-1).masked_fill(dead, 0.0)
        lse = s.logsumexp(dim=-1).masked_fill(dead[:, 0], NEG_INF)
    else:
        column = sinks.to(dt).reshape(1, h, 1, 1).expand(b, h, sq, 1)
        s = torch.cat([s.masked_fill(hidden, NEG_INF), column], dim=-1)
        p = s.softmax(dim=-1)[..., :-1]
        lse = s.logsumexp(dim=-1)
    out = (F.dropout(p, dropout_p) @ vh).transpose(1, 2).to(q.dtype)
    return (out, lse, None) if return_attn_probs else out


def sinks_online(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """Online softmax whose running maximum and sum start at the sink."""
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    qh = q.to(dt).transpose(1, 2)
    row = torch.arange(sq, device=q.device)[:, None] + sk - sq
    m = torch.full((b, h, sq), NEG_INF, dtype=dt, device=q.device)
    total = torch.zeros_like(m)
    if sinks is not None:
        logit = sinks.to(dt)[:, None].expand(b, h, sq)
        m = logit.detach().clone()
        total = torch.exp(logit - m)
    acc = torch.zeros(b, h, sq, dv, dtype=dt, device=q.device)
    for j0 in range(0, sk, 8):
        kb = k[:, j0 : j0 + 8].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        vb = v[:, j0 : j0 + 8].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        col = torch.arange(j0, j0 + kb.shape[2], device=q.device)[None, :]
        seen = torch.ones(sq, kb.shape[2], dtype=torch.bool, device=q.device)
        if causal:
            seen = seen & (col <= row)
        elif window_size[1] >= 0:
            seen = seen & (col <= row + window_size[1])
        if window_size[0] >= 0:
            seen = seen & (col >= row - window_size[0])
        s = (qh @ kb.mT * scale).masked_fill(~seen, NEG_INF)
        m_new = torch.maximum(m, s.detach().amax(dim=-1))
        ref = m_new.masked_fill(m_new == NEG_INF, 0.0)
        p, alpha = torch.exp(s - ref[..., None]), torch.exp(m - ref)
        total = total * alpha + p.sum(dim=-1)
        acc = acc * alpha[..., None] + p @ vb
        m = m_new
    total = total.masked_fill(total == 0, 1.0)
    return (acc / total[..., None]).transpose(1, 2).to(q.dtype) + _tie(q, k, v)


HONEST: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        dense,
        einsum_grouped,
        per_row_slices,
        online_over_keys,
        tiles_with_skipping,
        base_two,
        split_keys_and_merge,
        two_passes,
        padded_to_blocks,
        decode_packs_group,
        half_weights,
        chunked_with_checkpoint,
        sinks_by_concatenation,
        sinks_online,
    )
}

DECLARED: dict[str, dict[str, str]] = {
    "sinks_by_concatenation": {
        "sinks": "one logit per query head in the denominator, no value, not scaled, not capped",
        "lse": "natural log, includes the sink; a row without a key has output 0 and the sink as its LSE",
    },
    "sinks_online": {"sinks": "one logit per query head in the denominator, no value, not scaled, not capped"},
}
