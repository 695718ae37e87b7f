"""Blind flash-attn honest material, part 2: hand-written backward passes, named LSE flags, bias, torch names.

What a function does not support it refuses with NotImplementedError, or it has no parameter for it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

NEG_INF = float("-inf")


class _Full(torch.autograd.Function):
    """Everything flash-attn has but dropout, with a gradient through the LSE."""

    @staticmethod
    def scores(
        q: torch.Tensor, k: torch.Tensor, cfg: tuple[Any, ...], slopes: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, causal, (left, right), softcap = cfg
        sq, sk, h, hk = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
        raw = torch.einsum("bikgd,bjkd->bkgij", q.unflatten(2, (hk, h // hk)), k) * scale
        slope_of_cap = torch.ones_like(raw)
        if softcap > 0:
            t = torch.tanh(raw / softcap)
            raw, slope_of_cap = softcap * t, 1 - t * t
        i = torch.arange(sq, device=q.device)[:, None] + sk - sq
        j = torch.arange(sk, device=q.device)[None, :]
        if slopes is not None:
            raw = raw - slopes.to(raw.dtype).reshape(-1, hk, h // hk, 1, 1) * (i - j).abs()
        hidden = torch.zeros(sq, sk, dtype=torch.bool, device=q.device)
        if left >= 0:
            hidden |= j < i - left
        if causal or right >= 0:
            hidden |= j > i + (0 if causal else right)
        return raw.masked_fill(hidden, NEG_INF), slope_of_cap

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, cfg: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dt = torch.promote_types(q.dtype, torch.float32)
        s, _ = _Full.scores(q.to(dt), k.to(dt), cfg, slopes)
        lse = torch.logsumexp(s, dim=-1)
        p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
        out = torch.einsum("bkgij,bjkd->bikgd", p, v.to(dt)).flatten(2, 3)
        ctx.save_for_backward(q, k, v, slopes, out, lse)
        ctx.cfg = cfg
        return out.to(q.dtype), lse.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, slopes, out, lse = ctx.saved_tensors
        dt = out.dtype
        hk, g = k.shape[2], q.shape[2] // k.shape[2]
        s, dcap = _Full.scores(q.to(dt), k.to(dt), ctx.cfg, slopes)
        p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
        do = dout.to(dt).unflatten(2, (hk, g))
        delta = (do * out.unflatten(2, (hk, g))).sum(dim=-1).permute(0, 2, 3, 1) - dlse.to(dt).unflatten(1, (hk, g))
        dp = torch.einsum("bikgd,bjkd->bkgij", do, v.to(dt))
        ds = p * (dp - delta[..., None]) * dcap * ctx.cfg[0]
        dq = torch.einsum("bkgij,bjkd->bikgd", ds, k.to(dt)).flatten(2, 3)
        dk = torch.einsum("bkgij,bikgd->bjkd", ds, q.to(dt).unflatten(2, (hk, g)))
        dv = torch.einsum("bkgij,bikgd->bjkd", p, do)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def function_full(
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
    """Hand-written backward for everything but dropout."""
    if dropout_p > 0.0:
        raise NotImplementedError("function_full has no dropout")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _Full.apply(q, k, v, alibi_slopes, (scale, causal, tuple(window_size), softcap))
    return (out, lse, None) if return_attn_probs else out


class _Tiled(torch.autograd.Function):
    """Forward and backward in tiles, as in the paper; window and causal, GQA, no LSE gradient asked for."""

    TILE = 8

    @staticmethod
    def tile(
        q: torch.Tensor, k: torch.Tensor, i0: int, j0: int, cfg: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, left, right, offset, softcap = cfg
        s = q @ k.mT * scale
        dcap = torch.ones_like(s)
        if softcap > 0:
            t = torch.tanh(s / softcap)
            s, dcap = t * softcap, 1.0 - t.square()
        row = torch.arange(i0, i0 + q.shape[2], device=q.device)[:, None] + offset
        col = torch.arange(j0, j0 + k.shape[2], device=q.device)[None, :]
        if left is not None:
            s = s.masked_fill(col < row - left, NEG_INF)
        if right is not None:
            s = s.masked_fill(col > row + right, NEG_INF)
        return s, dcap

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cfg: tuple[Any, ...]) -> torch.Tensor:
        dt = torch.promote_types(q.dtype, torch.float32)
        g = q.shape[2] // k.shape[2]
        qh = q.to(dt).transpose(1, 2)
        kh = k.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        vh = v.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        n = _Tiled.TILE
        out = vh.new_zeros(*qh.shape[:3], vh.shape[-1])
        lse = qh.new_full(qh.shape[:3], NEG_INF)
        for i0 in range(0, qh.shape[2], n):
            qi = qh[:, :, i0 : i0 + n]
            m = qi.new_full((*qi.shape[:3], 1), NEG_INF)
            total = torch.zeros_like(m)
            acc = vh.new_zeros(*qi.shape[:3], vh.shape[-1])
            for j0 in range(0, kh.shape[2], n):
                s, _ = _Tiled.tile(qi, kh[:, :, j0 : j0 + n], i0, j0, cfg)
                m_new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
                ref = m_new.masked_fill(m_new == NEG_INF, 0.0)
                p = torch.exp(s - ref)
                acc = acc * torch.exp(m - ref) + p @ vh[:, :, j0 : j0 + n]
                total = total * torch.exp(m - ref) + p.sum(dim=-1, keepdim=True)
                m = m_new
            live = total > 0
            total = torch.where(live, total, 1.0)
            out[:, :, i0 : i0 + n] = acc / total
            lse[:, :, i0 : i0 + n] = torch.where(live, m + total.log(), NEG_INF).squeeze(-1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.cfg = cfg
        return out.transpose(1, 2).to(q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dt = out.dtype
        hk, g = k.shape[2], q.shape[2] // k.shape[2]
        qh, do = q.to(dt).transpose(1, 2), dout.to(dt).transpose(1, 2)
        kh = k.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        vh = v.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        delta = (do * out).sum(dim=-1, keepdim=True)
        ref = lse.masked_fill(lse == NEG_INF, 0.0).unsqueeze(-1)
        dq, dk, dv = torch.zeros_like(qh), torch.zeros_like(kh), torch.zeros_like(vh)
        n = _Tiled.TILE
        for j0 in range(0, kh.shape[2], n):
            cols = slice(j0, j0 + n)
            for i0 in range(0, qh.shape[2], n):
                rows = slice(i0, i0 + n)
                s, dcap = _Tiled.tile(qh[:, :, rows], kh[:, :, cols], i0, j0, ctx.cfg)
                p = torch.exp(s - ref[:, :, rows])
                dv[:, :, cols] += p.mT @ do[:, :, rows]
                ds = p * (do[:, :, rows] @ vh[:, :, cols].mT - delta[:, :, rows]) * dcap * ctx.cfg[0]
                dq[:, :, rows] += ds @ kh[:, :, cols]
                dk[:, :, cols] += ds.mT @ qh[:, :, rows]
        dk = dk.unflatten(1, (hk, g)).sum(dim=2).transpose(1, 2)
        dv = dv.unflatten(1, (hk, g)).sum(dim=2).transpose(1, 2)
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def function_tiled(
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
    """Tiled forward and backward; refuses dropout, ALiBi and the LSE."""
    if dropout_p > 0.0 or alibi_slopes is not None:
        raise NotImplementedError("function_tiled supports neither dropout nor ALiBi")
    if return_attn_probs:
        raise NotImplementedError("function_tiled does not return the LSE")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    left = window_size[0] if window_size[0] >= 0 else None
    right = 0 if causal else (window_size[1] if window_size[1] >= 0 else None)
    return _Tiled.apply(q, k, v, (scale, left, right, k.shape[1] - q.shape[1], softcap))


class _Causal(torch.autograd.Function):
    """Plain or causal attention with equal heads; the LSE carries no gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dt = torch.promote_types(q.dtype, torch.float32)
        s = torch.einsum("bihd,bjhd->bhij", q.to(dt), k.to(dt)) * scale
        if causal:
            s = s + torch.full_like(s[0, 0], NEG_INF).triu(k.shape[1] - q.shape[1] + 1) if s.numel() else s
        lse = torch.logsumexp(s, dim=-1)
        p = torch.exp(s - torch.where(lse == NEG_INF, 0.0, lse)[..., None])
        ctx.save_for_backward(q, k, v, p)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return torch.einsum("bhij,bjhd->bihd", p, v.to(dt)).to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        do = dout.to(p.dtype)
        dp = torch.einsum("bihd,bjhd->bhij", do, v.to(p.dtype))
        ds = p * (dp - (p * dp).sum(dim=-1, keepdim=True)) * ctx.scale
        dq = torch.einsum("bhij,bjhd->bihd", ds, k.to(p.dtype))
        dk = torch.einsum("bhij,bihd->bjhd", ds, q.to(p.dtype))
        dv = torch.einsum("bhij,bihd->bjhd", p, do)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def function_causal_only(
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
    """Refuses GQA, windows, softcap, ALiBi and dropout; the LSE is not differentiable, as in flash-attn."""
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("function_causal_only needs as many key heads as query heads")
    if tuple(window_size) != (-1, -1) or softcap > 0.0 or alibi_slopes is not None or dropout_p > 0.0:
        raise NotImplementedError("function_causal_only supports causal and full attention only")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _Causal.apply(q, k, v, scale, causal)
    return (out, lse, None) if return_attn_probs else out


class _Recompute(torch.autograd.Function):
    """The backward pass runs the eager forward again and lets autograd do the work."""

    @staticmethod
    def eager(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, cfg: tuple[Any, ...]
    ) -> torch.Tensor:
        scale, causal, (left, right), softcap = cfg
        dt = torch.promote_types(q.dtype, torch.float32)
        g, sq, sk = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
        s = torch.einsum("bihd,bjhd->bhij", q.to(dt), k.to(dt).repeat_interleave(g, dim=2)) * scale
        if softcap > 0:
            s = softcap * torch.tanh(s / softcap)
        rel = torch.arange(sk, device=q.device) - torch.arange(sk - sq, sk, device=q.device)[:, None]
        if slopes is not None:
            s = s - slopes.to(dt)[..., None, None] * rel.abs()
        keep = torch.ones_like(rel, dtype=torch.bool)
        if left >= 0:
            keep &= rel >= -left
        if causal or right >= 0:
            keep &= rel <= (0 if causal else right)
        dead = ~keep.any(dim=-1, keepdim=True)
        p = s.masked_fill(~(keep | dead), NEG_INF).softmax(dim=-1).masked_fill(dead, 0.0)
        return torch.einsum("bhij,bjhd->bihd", p, v.to(dt).repeat_interleave(g, dim=2)).to(q.dtype)

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor | None, cfg: tuple[Any, ...]
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v, slopes)
        ctx.cfg = cfg
        return _Recompute.eager(q, k, v, slopes, cfg)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, slopes = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = _Recompute.eager(*leaves, slopes, ctx.cfg)
            grads = torch.autograd.grad(out, leaves, dout)
        return (*grads, None, None)


def function_recompute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Saves the inputs only and recomputes in the backward pass."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Recompute.apply(q, k, v, alibi_slopes, (scale, causal, tuple(window_size), softcap))


class _Sinks(torch.autograd.Function):
    """Sliding-window attention with a learned sink and its gradient."""

    @staticmethod
    def weights(
        q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor, cfg: tuple[Any, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale, left, right = cfg
        s = q @ k.mT * scale
        off = k.shape[2] - q.shape[2]
        seen = torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device)
        if left >= 0:
            seen = seen.triu(off - left)
        if right >= 0:
            seen = seen.tril(off + right)
        s = s.masked_fill(~seen, NEG_INF)
        lse = torch.logaddexp(torch.logsumexp(s, dim=-1), sinks[:, None].expand(s.shape[:3]))
        return torch.exp(s - lse[..., None]), lse

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, cfg: tuple[Any, ...]
    ) -> torch.Tensor:
        dt = torch.promote_types(q.dtype, torch.float32)
        g = q.shape[2] // k.shape[2]
        kh = k.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        vh = v.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        p, _ = _Sinks.weights(q.to(dt).transpose(1, 2), kh, sinks.to(dt), cfg)
        ctx.save_for_backward(q, k, v, sinks)
        ctx.cfg = cfg
        return (p @ vh).transpose(1, 2).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks = ctx.saved_tensors
        dt = torch.promote_types(q.dtype, torch.float32)
        hk, g = k.shape[2], q.shape[2] // k.shape[2]
        qh, do = q.to(dt).transpose(1, 2), dout.to(dt).transpose(1, 2)
        kh = k.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        vh = v.to(dt).transpose(1, 2).repeat_interleave(g, dim=1)
        p, lse = _Sinks.weights(qh, kh, sinks.to(dt), ctx.cfg)
        dp = do @ vh.mT
        delta = (p * dp).sum(dim=-1)
        ds = p * (dp - delta[..., None]) * ctx.cfg[0]
        dsink = -(torch.exp(sinks.to(dt)[:, None] - lse) * delta).sum(dim=(0, 2))
        dk = (ds.mT @ qh).unflatten(1, (hk, g)).sum(dim=2).transpose(1, 2)
        dv = (p.mT @ do).unflatten(1, (hk, g)).sum(dim=2).transpose(1, 2)
        dq = (ds @ kh).transpose(1, 2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsink.to(sinks.dtype), None


def function_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Hand-written backward with the gradient of the sink."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if sinks is None:
        sinks = torch.full((q.shape[2],), -1e30, dtype=torch.float32, device=q.device)
    return _Sinks.apply(q, k, v, sinks, (scale, window_size[0], 0 if causal else window_size[1]))


class _Biased(torch.autograd.Function):
    """Attention with an additive bias that may be broadcast, and its gradient."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float, off: Any
    ) -> torch.Tensor:
        dt = torch.promote_types(q.dtype, torch.float32)
        s = torch.einsum("bihd,bjhd->bhij", q.to(dt), k.to(dt)) * scale
        if bias is not None:
            s = s + bias.to(dt)
        if off is not None:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=q.device).triu(off + 1), NEG_INF)
        lse = torch.logsumexp(s, dim=-1, keepdim=True)
        p = torch.where(lse == NEG_INF, 0.0, torch.exp(s - lse))
        ctx.save_for_backward(q, k, v, bias, p)
        ctx.scale = scale
        return torch.einsum("bhij,bjhd->bihd", p, v.to(dt)).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, bias, p = ctx.saved_tensors
        do = dout.to(p.dtype)
        dp = torch.einsum("bihd,bjhd->bhij", do, v.to(p.dtype))
        ds = p * (dp - (dp * p).sum(dim=-1, keepdim=True))
        dq = torch.einsum("bhij,bjhd->bihd", ds, k.to(p.dtype)) * ctx.scale
        dk = torch.einsum("bhij,bihd->bjhd", ds, q.to(p.dtype)) * ctx.scale
        dv = torch.einsum("bhij,bihd->bjhd", p, do)
        dbias = ds.sum_to_size(bias.shape).to(bias.dtype) if bias is not None and ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dbias, None, None


def function_bias(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Additive bias [B or 1, H or 1, Sq, Sk] with a gradient summed over the broadcast axes; refuses GQA."""
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("function_bias needs as many key heads as query heads")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return _Biased.apply(q, k, v, bias, scale, k.shape[1] - q.shape[1] if causal else None)


def bias_and_softcap(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softcap, then bias, then mask; eager."""
    b, sq, h, d = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    kh = k.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
    s = q.to(dt).transpose(1, 2) @ kh.mT * scale
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias.to(dt)
    rel = torch.arange(sk, device=q.device)[None, :] - torch.arange(sk - sq, sk, device=q.device)[:, None]
    keep = torch.ones_like(rel, dtype=torch.bool)
    if window_size[0] >= 0:
        keep &= rel >= -window_size[0]
    if causal or window_size[1] >= 0:
        keep &= rel <= (0 if causal else window_size[1])
    s = s.masked_fill(~keep, NEG_INF)
    dead = (s == NEG_INF).all(dim=-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    out = (s.softmax(dim=-1).masked_fill(dead, 0.0) @ vh).transpose(1, 2).to(q.dtype)
    lse = s.logsumexp(dim=-1).masked_fill(dead[..., 0], NEG_INF)
    return (out, lse) if return_lse else out


def window_with_return_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Chunks of queries against a slice of the keys that covers their windows."""
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    left = window_size[0] if window_size[0] >= 0 else sq + sk
    right = 0 if causal else (window_size[1] if window_size[1] >= 0 else sq + sk)
    outs = [torch.zeros(b, h, 0, dv, dtype=dt, device=q.device)]
    lses = [torch.zeros(b, h, 0, dtype=dt, device=q.device)]
    for i0 in range(0, sq, 6):
        i1 = min(i0 + 6, sq)
        lo = min(max(i0 + sk - sq - left, 0), sk)
        hi = max(min(i1 + sk - sq + right, sk), lo)
        kh = k[:, lo:hi].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        vh = v[:, lo:hi].to(dt).transpose(1, 2).repeat_interleave(h // hk, dim=1)
        s = q[:, i0:i1].to(dt).transpose(1, 2) @ kh.mT * scale
        rel = torch.arange(lo, hi, device=q.device) - torch.arange(i0 + sk - sq, i1 + sk - sq, device=q.device)[:, None]
        keep = (rel >= -left) & (rel <= right)
        dead = ~keep.any(dim=-1, keepdim=True)
        s = s.masked_fill(~(keep | dead), NEG_INF)
        outs.append(s.softmax(dim=-1).masked_fill(dead, 0.0) @ vh)
        lses.append(s.logsumexp(dim=-1).masked_fill(dead[:, 0], NEG_INF))
    out = torch.cat(outs, dim=2).transpose(1, 2).to(q.dtype)
    out = out + (q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum())  # keeps the graph of empty calls
    return (out, torch.cat(lses, dim=2)) if return_lse else out


def softcap_with_return_softmax_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Batched matrix products over flattened (batch, head), LSE under flash-attn 3's name."""
    b, sq, h, d = q.shape
    sk, hk, dv = v.shape[1:]
    dt = torch.promote_types(q.dtype, torch.float32)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    kv_index = torch.arange(h, device=q.device) // (h // hk)
    qf = q.to(dt).permute(0, 2, 1, 3).reshape(b * h, sq, d)
    kf = k.to(dt)[:, :, kv_index].permute(0, 2, 3, 1).reshape(b * h, d, sk)
    vf = v.to(dt)[:, :, kv_index].permute(0, 2, 1, 3).reshape(b * h, sk, dv)
    s = torch.bmm(qf * scale, kf)
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    alive = torch.ones(sq, dtype=torch.bool, device=q.device)
    if causal:
        alive = torch.arange(sq, device=q.device) >= sq - sk
        mask = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        s = s.masked_fill(mask & alive[:, None], NEG_INF)
    alive = alive & (sk > 0)
    p = s.softmax(dim=-1) * alive[:, None]
    out = torch.bmm(p, vf).view(b, h, sq, dv).transpose(1, 2).to(q.dtype)
    lse = s.logsumexp(dim=-1).masked_fill(~alive, NEG_INF).view(b, h, sq)
    return (out, lse) if return_softmax_lse else out


def alibi_only(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """ALiBi by slopes on top of torch's own attention with an additive mask."""
    b, sq, h, _ = q.shape
    sk, hk = k.shape[1], k.shape[2]
    dt = torch.promote_types(q.dtype, torch.float32)
    rel = torch.arange(sk, device=q.device)[None, :] - torch.arange(sk - sq, sk, device=q.device)[:, None]
    mask = torch.zeros(1, 1, sq, sk, dtype=dt, device=q.device)
    if alibi_slopes is not None:
        mask = -alibi_slopes.to(dt).reshape(-1, h, 1, 1) * rel.abs()
    dead = torch.zeros(sq, dtype=torch.bool, device=q.device)
    if causal:
        dead = (rel > 0).all(dim=-1)
        mask = mask.masked_fill((rel > 0) & ~dead[:, None], NEG_INF)
    qh, kh, vh = (x.to(dt).transpose(1, 2) for x in (q, k, v))
    kh, vh = (x.repeat_interleave(h // hk, dim=1) for x in (kh, vh))
    out = F.scaled_dot_product_attention(qh, kh, vh, attn_mask=mask.expand(b, h, sq, sk), scale=softmax_scale)
    return out.masked_fill(dead[:, None], 0.0).transpose(1, 2).to(q.dtype)


def torch_names_top_left(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """[B, H, S, D] with torch's names and torch's top-left alignment, window and softcap added."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if key.shape[1] != query.shape[1]:
        if not enable_gqa:
            raise NotImplementedError("grouped heads need enable_gqa=True")
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    s = query.to(dt) @ key.to(dt).mT * factor
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=query.device)
    if is_causal:
        keep = keep.tril()
    elif window_size[1] >= 0:
        keep = keep.tril(window_size[1])
    if window_size[0] >= 0:
        keep = keep.triu(-window_size[0])
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.to(dt)
    s = s.masked_fill(~keep, NEG_INF)
    dead = (s == NEG_INF).all(dim=-1, keepdim=True)
    p = s.masked_fill(dead, 0.0).softmax(dim=-1).masked_fill(dead, 0.0)
    return (F.dropout(p, dropout_p) @ value.to(dt)).to(query.dtype)


def torch_names_bottom_right(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """[B, H, S, D] with torch's names but aligned bottom-right; key heads are grouped without a flag."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, h, sq, d = query.shape
    hk, sk = key.shape[1], key.shape[2]
    factor = d**-0.5 if scale is None else scale
    s = torch.einsum("bkgid,bkjd->bkgij", query.to(dt).unflatten(1, (hk, h // hk)), key.to(dt)).flatten(1, 2) * factor
    if softcap > 0.0:
        s = softcap * torch.tanh(s / softcap)
    pos = torch.arange(sk - sq, sk, device=query.device)[:, None]
    col = torch.arange(sk, device=query.device)[None, :]
    hidden = torch.zeros(sq, sk, dtype=torch.bool, device=query.device)
    if is_causal:
        hidden |= col > pos
    if window_size[0] >= 0:
        hidden |= col < pos - window_size[0]
    if window_size[1] >= 0 and not is_causal:
        hidden |= col > pos + window_size[1]
    s = s.masked_fill(hidden, NEG_INF)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, NEG_INF) if attn_mask.dtype == torch.bool else s + attn_mask.to(dt)
    dead = (s == NEG_INF).all(dim=-1, keepdim=True)
    s = s.masked_fill(dead, 0.0)
    p = s.softmax(dim=-1).masked_fill(dead, 0.0).unflatten(1, (hk, h // hk))
    out = torch.einsum("bkgij,bkjd->bkgid", p, value.to(dt)).flatten(1, 2).to(query.dtype)
    lse = s.logsumexp(dim=-1).masked_fill(dead[..., 0], NEG_INF)
    return (out, lse) if return_lse else out


def sdpa_sliding_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Always causal, [B, H, S, D]; the window counts the query's own key, as in Hugging Face models."""
    dt = torch.promote_types(query.dtype, torch.float32)
    sq, sk = query.shape[2], key.shape[2]
    if sq > sk:
        raise NotImplementedError("sdpa_sliding_window needs at least as many keys as queries")
    keep = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril(sk - sq)
    if sliding_window is not None:
        if sliding_window < 1:
            raise NotImplementedError("sliding_window must be at least 1")
        keep = keep.triu(sk - sq - sliding_window + 1)
    group = query.shape[1] // key.shape[1]
    kh, vh = (x.to(dt).repeat_interleave(group, dim=1) for x in (key, value))
    out = F.scaled_dot_product_attention(query.to(dt), kh, vh, attn_mask=keep, scale=scale)
    return out.to(query.dtype)


HONEST: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        function_full,
        function_tiled,
        function_causal_only,
        function_recompute,
        function_sinks,
        function_bias,
        bias_and_softcap,
        window_with_return_lse,
        softcap_with_return_softmax_lse,
        alibi_only,
        torch_names_top_left,
        torch_names_bottom_right,
        sdpa_sliding_window,
    )
}

DECLARED: dict[str, dict[str, str]] = {
    "function_causal_only": {"lse_gradient": "none, the LSE is marked non-differentiable"},
    "function_sinks": {"sinks": "one logit per query head in the denominator, no value, not scaled"},
    "bias_and_softcap": {"order": "softcap, then bias, then mask"},
    "torch_names_top_left": {
        "layout": "BHSD",
        "causal": "top-left",
        "window": "top-left, inclusive on both sides, -1 is unlimited",
        "order": "softcap, then attn_mask",
    },
    "torch_names_bottom_right": {
        "layout": "BHSD",
        "causal": "bottom-right",
        "window": "bottom-right, inclusive on both sides, -1 is unlimited",
        "order": "softcap, then attn_mask",
        "gqa": "implied by the shapes",
    },
    "sdpa_sliding_window": {
        "layout": "BHSD",
        "causal": "always causal, bottom-right",
        "window": "counts the query's own key, None is unlimited",
    },
}
