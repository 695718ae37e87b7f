"""Blind flash-attn mutants, part 4: hand-written backward passes.

Same rules as ``flash_mutants.py``: one fault a function, named in its docstring.  The forward pass is right in
all of them; each class below rewrites the backward pass with one mistake.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

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


def _scores(
    qh: torch.Tensor, kh: torch.Tensor, scale: float, softcap: float, slopes: torch.Tensor | None
) -> torch.Tensor:
    s = _cap(qh @ kh.mT * scale, softcap)
    return s if slopes is None else s + _alibi(slopes, qh.shape[2], kh.shape[2], s.dtype)


class _Saved(NamedTuple):
    """What a right backward needs: heads first, key heads repeated, at least float32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    p: torch.Tensor
    dcap: torch.Tensor


class _Attention(torch.autograd.Function):
    """The forward pass shared by all faulty backward passes below."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
        slopes: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qh, kh, vh = _load(q, k, v)
        s = _scores(qh, kh, scale, softcap, slopes)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], causal, window, q.device), NEG_INF)
        out = (_weights(s) @ vh).transpose(1, 2)
        lse = _lse(s)
        ctx.save_for_backward(q, k, v, out, lse, slopes)
        ctx.scale, ctx.causal, ctx.window, ctx.softcap = scale, causal, window, softcap
        return out.to(q.dtype), lse


def _recall(ctx: Any) -> _Saved:
    """Rebuild the weights from the saved LSE, and the derivative of the softcap."""
    q, k, v, out, lse, slopes = ctx.saved_tensors
    qh, kh, vh = _load(q, k, v)
    s = _scores(qh, kh, ctx.scale, ctx.softcap, slopes)
    s = s.masked_fill(~_visible(q.shape[1], k.shape[1], ctx.causal, ctx.window, q.device), NEG_INF)
    p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
    return _Saved(qh, kh, vh, out.transpose(1, 2), lse, p, _dcap(qh, kh, ctx))


def _dcap(qh: torch.Tensor, kh: torch.Tensor, ctx: Any) -> torch.Tensor:
    """Derivative of the softcap with respect to the scaled scores."""
    s = qh @ kh.mT * ctx.scale
    if ctx.softcap > 0.0:
        return 1.0 - torch.tanh(s / ctx.softcap) ** 2
    return torch.ones_like(s)


def _hand_back(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Sum key and value gradients over the group and return to [B, S, H, D]."""
    q, k, v = ctx.saved_tensors[:3]
    hk = k.shape[2]
    group = q.shape[2] // hk
    dk = dk.unflatten(1, (hk, group)).sum(dim=2)
    dv = dv.unflatten(1, (hk, group)).sum(dim=2)
    grads = (g.transpose(1, 2).to(x.dtype) for g, x in zip((dq, dk, dv), (q, k, v), strict=True))
    return (*grads, None, None, None, None, None)


def _call(
    fn: type[_Attention],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: torch.Tensor | None,
    want: bool,
) -> Any:
    if dropout_p > 0.0:
        raise NotImplementedError("no dropout")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = fn.apply(q, k, v, scale, causal, window, softcap, slopes)
    return (out, lse, None) if want else out


# ------------------------------------------------------------------------------------------------
# the faults
# ------------------------------------------------------------------------------------------------


class _DqWithoutScale(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q * ctx.scale, t.p.mT @ do)


def dq_without_scale(
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
    """dQ is not multiplied by the softmax scale."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DqWithoutScale, q, k, v, dropout_p, *rest)


class _DkWithoutScale(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap
        return _hand_back(ctx, ds @ t.k * ctx.scale, ds.mT @ t.q, t.p.mT @ do)


def dk_without_scale(
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
    """dK is built from the unscaled query, the scale folded in the forward's q is missing."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DkWithoutScale, q, k, v, dropout_p, *rest)


class _DkScaledTwice(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        qs = t.q * ctx.scale
        do = dout.to(qs.dtype).transpose(1, 2)
        dp = torch.einsum("bhid,bhjd->bhij", do, t.v)
        ds = t.p * (dp - (do * t.out).sum(dim=-1, keepdim=True) + dlse.unsqueeze(-1)) * t.dcap
        dq = torch.einsum("bhij,bhjd->bhid", ds, t.k) * ctx.scale
        dk = torch.einsum("bhij,bhid->bhjd", ds, qs) * ctx.scale
        dv = torch.einsum("bhij,bhid->bhjd", t.p, do)
        return _hand_back(ctx, dq, dk, dv)


def dk_scaled_twice(
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
    """dK takes the scaled query and is multiplied by the scale at the store as well."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DkScaledTwice, q, k, v, dropout_p, *rest)


class _DvUnmasked(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        slopes = ctx.saved_tensors[5]
        do = dout.to(t.q.dtype).transpose(1, 2)
        safe = torch.where(torch.isfinite(t.lse), t.lse, float("inf"))
        p_raw = torch.exp(_scores(t.q, t.k, ctx.scale, ctx.softcap, slopes) - safe[..., None])
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap
        return _hand_back(ctx, ds @ t.k * ctx.scale, ds.mT @ t.q * ctx.scale, p_raw.mT @ do)


def dv_from_unmasked_weights(
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
    """dV uses weights recomputed before the mask is applied, hidden keys receive gradient."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DvUnmasked, q, k, v, dropout_p, *rest)


class _GroupFirstMember(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        q, k, v = ctx.saved_tensors[:3]
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * ctx.scale
        group = q.shape[2] // k.shape[2]
        dq = (ds @ t.k).transpose(1, 2).to(q.dtype)
        dk = (ds.mT @ t.q)[:, ::group].transpose(1, 2).to(k.dtype)
        dv = (t.p.mT @ do)[:, ::group].transpose(1, 2).to(v.dtype)
        return dq, dk, dv, None, None, None, None, None


def gqa_gradient_of_first_member(
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
    """dK and dV of a group are those of its first query head, not the sum."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_GroupFirstMember, q, k, v, dropout_p, *rest)


class _GroupTiledSum(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        q, k, v = ctx.saved_tensors[:3]
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * ctx.scale
        b, h, hk = q.shape[0], q.shape[2], k.shape[2]
        dk = (ds.mT @ t.q).reshape(b, h // hk, hk, k.shape[1], -1).sum(dim=1)
        dv = (t.p.mT @ do).reshape(b, h // hk, hk, v.shape[1], -1).sum(dim=1)
        dq = (ds @ t.k).transpose(1, 2).to(q.dtype)
        return dq, dk.transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype), None, None, None, None, None


def gqa_gradient_summed_tiled(
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
    """The sum over the group views the heads as (member, group), gradients land on other key heads."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_GroupTiledSum, q, k, v, dropout_p, *rest)


class _BackwardNoCausal(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        s = _scores(qh, kh, ctx.scale, ctx.softcap, slopes)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], False, ctx.window, q.device), NEG_INF)
        p = torch.exp(s - torch.where(torch.isfinite(lse), lse, float("inf"))[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_ignores_causal(
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
    """The causal flag kept in ctx is never read by the backward pass."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardNoCausal, q, k, v, dropout_p, *rest)


class _BackwardNoWindow(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        s = _scores(qh, kh, ctx.scale, ctx.softcap, slopes)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], ctx.causal, (-1, -1), q.device), NEG_INF)
        p = torch.exp(s - torch.where(torch.isfinite(lse), lse, float("inf"))[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_ignores_window(
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
    """The backward pass masks by causality only, keys outside of the window get gradient."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardNoWindow, q, k, v, dropout_p, *rest)


class _BackwardWindowShort(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        seen = _visible(q.shape[1], k.shape[1], ctx.causal, ctx.window, q.device)
        if ctx.window[0] > 0:
            seen = seen.triu(k.shape[1] - q.shape[1] - ctx.window[0] + 1)
        s = _scores(qh, kh, ctx.scale, ctx.softcap, slopes).masked_fill(~seen, NEG_INF)
        p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_window_one_short(
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
    """The left edge of the window is exclusive in the backward pass only."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardWindowShort, q, k, v, dropout_p, *rest)


class _BackwardTopLeft(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        window = (ctx.window[0], -1) if ctx.causal else ctx.window
        seen = _visible(q.shape[1], k.shape[1], False, window, q.device)
        if ctx.causal:
            seen = seen & torch.ones_like(seen).tril()
        s = _scores(qh, kh, ctx.scale, ctx.softcap, slopes).masked_fill(~seen, NEG_INF)
        p = torch.exp(s - torch.where(torch.isfinite(lse), lse, float("inf"))[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_mask_top_left(
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
    """The backward pass rebuilds the causal mask with tril(), right for Sq == Sk only."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardTopLeft, q, k, v, dropout_p, *rest)


class _BackwardNoDtanh(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * ctx.scale
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def backward_without_softcap_derivative(
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
    """The weights are rebuilt from capped scores, but the factor 1 - tanh^2 is missing."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardNoDtanh, q, k, v, dropout_p, *rest)


class _BackwardUncapped(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        s = _scores(qh, kh, ctx.scale, 0.0, slopes)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], ctx.causal, ctx.window, q.device), NEG_INF)
        p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_rebuilds_uncapped_weights(
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
    """The weights of the backward pass come from raw scores and the LSE of the capped ones."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardUncapped, q, k, v, dropout_p, *rest)


class _BackwardDtanhOfBiased(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        slopes = ctx.saved_tensors[5]
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * ctx.scale
        if ctx.softcap > 0.0:
            s = _scores(t.q, t.k, ctx.scale, ctx.softcap, slopes)
            ds = ds * (1.0 - (s / ctx.softcap) ** 2)
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def backward_softcap_derivative_after_alibi(
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
    """Only softcap with ALiBi: 1 - (s / cap)^2 takes the scores that already hold the bias."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardDtanhOfBiased, q, k, v, dropout_p, *rest)


class _BackwardNoAlibi(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, _ = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        s = _scores(qh, kh, ctx.scale, ctx.softcap, None)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], ctx.causal, ctx.window, q.device), NEG_INF)
        p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_ignores_alibi(
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
    """The weights of the backward pass are rebuilt without the ALiBi bias."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardNoAlibi, q, k, v, dropout_p, *rest)


class _BackwardAlibiTopLeft(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        sq, sk = q.shape[1], k.shape[1]
        do = dout.to(qh.dtype).transpose(1, 2)
        s = _scores(qh, kh, ctx.scale, ctx.softcap, None)
        if slopes is not None:
            dist = torch.arange(sq, device=q.device)[:, None] - torch.arange(sk, device=q.device)[None, :]
            s = s - slopes.to(s.dtype)[..., None, None] * dist.abs()
        s = s.masked_fill(~_visible(sq, sk, ctx.causal, ctx.window, q.device), NEG_INF)
        p = torch.exp(s - lse.masked_fill(lse == NEG_INF, 0.0)[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_alibi_top_left(
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
    """The ALiBi distance of the backward pass is |i - j| without Sk - Sq."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardAlibiTopLeft, q, k, v, dropout_p, *rest)


class _DeltaDropped(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        ds = t.p * (do @ t.v.mT + dlse[..., None]) * t.dcap * ctx.scale
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def delta_dropped(
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
    """dS is P * dP, the row term sum(dO * O) is missing."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DeltaDropped, q, k, v, dropout_p, *rest)


class _DlseIgnored(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1)
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * ctx.scale
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def lse_gradient_ignored(
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
    """The gradient that arrives through the LSE is thrown away."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DlseIgnored, q, k, v, dropout_p, *rest)


class _DlseSign(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) + dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * ctx.scale
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def lse_gradient_sign(
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
    """The gradient of the LSE is added to delta instead of subtracted."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DlseSign, q, k, v, dropout_p, *rest)


class _DeltaQueryWidth(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        d = t.q.shape[-1]
        delta = (do[..., :d] * t.out[..., :d]).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * ctx.scale
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def delta_over_query_width(
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
    """delta sums dO * O over the width of q, so it is cut when v is wider."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DeltaQueryWidth, q, k, v, dropout_p, *rest)


class _BackwardDefaultScale(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * t.q.shape[-1] ** -0.5
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def backward_default_scale(
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
    """The backward pass multiplies dQ and dK by 1 / sqrt(d), whatever softmax_scale was given."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardDefaultScale, q, k, v, dropout_p, *rest)


class _BackwardEmptyRows(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        s = _scores(qh, kh, ctx.scale, ctx.softcap, slopes)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], ctx.causal, ctx.window, q.device), NEG_INF)
        p = torch.exp(s - lse[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        return _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)


def backward_empty_rows_nan(
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
    """Rows without a key have score and LSE of -inf, their difference makes every gradient NaN."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_BackwardEmptyRows, q, k, v, dropout_p, *rest)


class _DoutStrides(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        held = dout.untyped_storage().nbytes() // dout.element_size() - dout.storage_offset()
        if held >= dout.numel():
            b, sq, h, dv = dout.shape
            dout = torch.as_strided(dout, (b, sq, h, dv), (sq * h * dv, h * dv, dv, 1))
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * ctx.scale
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


def dout_strides_assumed(
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
    """The upstream gradient is read from its storage as if it were contiguous."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DoutStrides, q, k, v, dropout_p, *rest)


class _QueryTail(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1, keepdim=True) - dlse[..., None]
        dq, dk, dv = torch.zeros_like(t.q), torch.zeros_like(t.k), torch.zeros_like(t.v)
        for n in range(max(t.q.shape[2] // 16, 1)):
            rows = slice(16 * n, 16 * n + 16)
            p, doi = t.p[:, :, rows], do[:, :, rows]
            ds = p * (doi @ t.v.mT - delta[:, :, rows]) * t.dcap[:, :, rows] * ctx.scale
            dq[:, :, rows] = ds @ t.k
            dk += ds.mT @ t.q[:, :, rows]
            dv += p.mT @ doi
        return _hand_back(ctx, dq, dk, dv)


def backward_query_tail_dropped(
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
    """The backward loop runs over Sq // 16 query blocks once there is more than one, the last part adds nothing."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_QueryTail, q, k, v, dropout_p, *rest)


class _DqOverwritten(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1, keepdim=True) - dlse[..., None]
        dq, dk, dv = torch.zeros_like(t.q), torch.zeros_like(t.k), torch.zeros_like(t.v)
        for j0 in range(0, t.k.shape[2], 16):
            cols = slice(j0, j0 + 16)
            p = t.p[..., cols]
            ds = p * (do @ t.v[:, :, cols].mT - delta) * t.dcap[..., cols] * ctx.scale
            dq = ds @ t.k[:, :, cols]
            dk[:, :, cols] = ds.mT @ t.q
            dv[:, :, cols] = p.mT @ do
        return _hand_back(ctx, dq, dk, dv)


def backward_dq_overwritten(
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
    """dQ is stored, not accumulated, by each block of 16 keys, so only the last block counts."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DqOverwritten, q, k, v, dropout_p, *rest)


class _DiagonalBlockSkipped(_Attention):
    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1, keepdim=True) - dlse[..., None]
        dq, dk, dv = torch.zeros_like(t.q), torch.zeros_like(t.k), torch.zeros_like(t.v)
        for j0 in range(0, t.k.shape[2], 8):
            cols = slice(j0, j0 + 8)
            for i0 in range(j0 if ctx.causal else 0, t.q.shape[2], 8):
                rows = slice(i0, i0 + 8)
                p = t.p[:, :, rows, cols]
                ds = p * (do[:, :, rows] @ t.v[:, :, cols].mT - delta[:, :, rows])
                ds = ds * t.dcap[:, :, rows, cols] * ctx.scale
                dq[:, :, rows] += ds @ t.k[:, :, cols]
                dk[:, :, cols] += ds.mT @ t.q[:, :, rows]
                dv[:, :, cols] += p.mT @ do[:, :, rows]
        return _hand_back(ctx, dq, dk, dv)


def backward_first_query_block_without_offset(
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
    """A causal key block starts its loop at the query block of the same number, forgetting Sk - Sq."""
    rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
    return _call(_DiagonalBlockSkipped, q, k, v, dropout_p, *rest)


class _Right(_Attention):
    """The backward pass as it should be, for calls without a sink."""

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        t = _recall(ctx)
        do = dout.to(t.q.dtype).transpose(1, 2)
        delta = (do * t.out).sum(dim=-1) - dlse
        ds = t.p * (do @ t.v.mT - delta[..., None]) * t.dcap * ctx.scale
        return _hand_back(ctx, ds @ t.k, ds.mT @ t.q, t.p.mT @ do)


class _SinkAttention(torch.autograd.Function):
    """Attention with a sink logit whose own gradient is wrong."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor,
        scale: float,
        causal: bool,
        window: tuple[int, int],
        softcap: float,
        slopes: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qh, kh, vh = _load(q, k, v)
        s = _scores(qh, kh, scale, softcap, slopes)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], causal, window, q.device), NEG_INF)
        lse = torch.logaddexp(_lse(s), sinks.to(s.dtype)[:, None].expand(s.shape[:3]))
        out = (torch.exp(s - lse[..., None]) @ vh).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, lse, slopes, sinks)
        ctx.scale, ctx.causal, ctx.window, ctx.softcap = scale, causal, window, softcap
        return out.to(q.dtype), lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, slopes, sinks = ctx.saved_tensors
        qh, kh, vh = _load(q, k, v)
        do = dout.to(qh.dtype).transpose(1, 2)
        s = _scores(qh, kh, ctx.scale, ctx.softcap, slopes)
        s = s.masked_fill(~_visible(q.shape[1], k.shape[1], ctx.causal, ctx.window, q.device), NEG_INF)
        p = torch.exp(s - lse[..., None])
        delta = (do * out.transpose(1, 2)).sum(dim=-1) - dlse
        ds = p * (do @ vh.mT - delta[..., None]) * _dcap(qh, kh, ctx) * ctx.scale
        dq, dk, dv = _hand_back(ctx, ds @ kh, ds.mT @ qh, p.mT @ do)[:3]
        p_sink = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
        dsink = (p_sink * delta).sum(dim=(0, 2)).to(sinks.dtype)
        return dq, dk, dv, dsink, None, None, None, None, None


def sink_gradient_sign(
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
    """The gradient of the sink is +sum(p_sink * delta), its sign is flipped."""
    if sinks is None:
        rest = (softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs)
        return _call(_Right, q, k, v, dropout_p, *rest)
    if dropout_p > 0.0:
        raise NotImplementedError("no dropout")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = _SinkAttention.apply(q, k, v, sinks, scale, causal, window_size, softcap, alibi_slopes)
    return (out, lse, None) if return_attn_probs else out


_BY_KIND: dict[str, tuple[Callable[..., Any], ...]] = {
    "gradient": (
        dq_without_scale,
        dk_without_scale,
        dk_scaled_twice,
        dv_from_unmasked_weights,
        backward_ignores_causal,
        backward_ignores_window,
        backward_window_one_short,
        backward_mask_top_left,
        backward_without_softcap_derivative,
        backward_rebuilds_uncapped_weights,
        backward_softcap_derivative_after_alibi,
        backward_ignores_alibi,
        backward_alibi_top_left,
        delta_dropped,
        delta_over_query_width,
        backward_default_scale,
        backward_empty_rows_nan,
        backward_query_tail_dropped,
        backward_dq_overwritten,
        backward_first_query_block_without_offset,
    ),
    "gradient, GQA": (
        gqa_gradient_of_first_member,
        gqa_gradient_summed_tiled,
    ),
    "gradient of the LSE": (
        lse_gradient_ignored,
        lse_gradient_sign,
    ),
    "gradient, strides": (dout_strides_assumed,),
    "gradient of the sink": (sink_gradient_sign,),
}

MUTANTS: dict[str, Callable[..., Any]] = {fn.__name__: fn for fns in _BY_KIND.values() for fn in fns}

CAUSES: dict[str, str] = {
    fn.__name__: f"{kind}: {(fn.__doc__ or '').strip()}" for kind, fns in _BY_KIND.items() for fn in fns
}
