"""Blind test material: attention functions that each carry one planted fault.

Every function below is complete by itself and right but for a single mistake that was made in public
before (the source is named in ``MUTANTS``).  The first half has the signature and meaning of torch's
``scaled_dot_product_attention``, the second half those of flash-attn's ``flash_attn_func``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# ------------------------------------------------------------------------------------------------
# torch layout: query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv]
# ------------------------------------------------------------------------------------------------


def empty_rows_nan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the softmax has no guard for rows in which every key is hidden."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query.to(dt), key.to(dt).transpose(-2, -1)) * factor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, float("-inf"))
        else:
            scores = scores + attn_mask.to(dt)
    weights = F.dropout(torch.softmax(scores, dim=-1), p=dropout_p)
    return torch.matmul(weights, value.to(dt)).to(query.dtype)


def empty_rows_mean(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; hidden keys get the lowest finite number, so an empty row averages V."""
    dt = torch.promote_types(query.dtype, torch.float32)
    lowest = torch.finfo(dt).min
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhqd,bhkd->bhqk", query.to(dt) * factor, key.to(dt))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, lowest)
    elif attn_mask is not None:
        scores = (scores + attn_mask.to(dt)).clamp(min=lowest)
    if is_causal:
        rows = torch.arange(query.shape[2], device=query.device)[:, None]
        cols = torch.arange(key.shape[2], device=query.device)[None, :]
        scores = torch.where(cols <= rows, scores, lowest)
    weights = F.dropout(torch.softmax(scores, dim=-1), p=dropout_p)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value.to(dt)).to(query.dtype)


def bool_mask_added(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused call; the mask is turned into an additive one by a plain cast, whatever its dtype."""
    dt = torch.promote_types(query.dtype, torch.float32)
    lq, lk = query.shape[2], key.shape[2]
    bias = torch.zeros(lq, lk, dtype=dt, device=query.device)
    if is_causal:
        future = torch.ones(lq, lk, dtype=torch.bool, device=query.device).triu(1)
        bias = bias.masked_fill(future, float("-inf"))
    if attn_mask is not None:
        bias = bias + attn_mask.to(dt)
    out = F.scaled_dot_product_attention(
        query.to(dt),
        key.to(dt),
        value.to(dt),
        attn_mask=bias,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.to(query.dtype)


def mask_polarity(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; a boolean mask is read as "True means hidden"."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    logits = query.to(dt) @ key.to(dt).mT * scale
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            logits = logits.masked_fill(attn_mask, -math.inf)
        else:
            logits = logits + attn_mask.to(dt)
    if is_causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(future, -math.inf)
    nothing = torch.isneginf(logits).all(dim=-1, keepdim=True)
    probs = torch.softmax(logits, dim=-1).masked_fill(nothing, 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def mask_first_batch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Loop over batch and head; every batch entry reads the mask of the first one."""
    dt = torch.promote_types(query.dtype, torch.float32)
    batch, heads, lq, dim = query.shape
    kv_heads, lk = key.shape[1], key.shape[2]
    group = heads // kv_heads if enable_gqa else 1
    factor = 1.0 / math.sqrt(dim) if scale is None else scale
    if attn_mask is not None:
        attn_mask = torch.broadcast_to(attn_mask, (batch, heads, lq, lk))
    out = query.new_zeros(batch, heads, lq, value.shape[-1])
    for b in range(batch):
        for h in range(heads):
            k = key[b, h // group if kv_heads > 1 else 0].to(dt)
            v = value[b, h // group if kv_heads > 1 else 0].to(dt)
            s = query[b, h].to(dt) @ k.T * factor
            if attn_mask is not None:
                mask = attn_mask[0, h]
                s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.to(dt)
            if is_causal:
                s = s.masked_fill(torch.ones(lq, lk, device=s.device).triu(1) > 0, -math.inf)
            p = torch.softmax(s, dim=-1)
            p = torch.where(torch.isneginf(s).all(-1, keepdim=True), torch.zeros_like(p), p)
            out[b, h] = (F.dropout(p, p=dropout_p) @ v).to(out.dtype)
    return out


def mask_tiled_over_folded_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Heads are folded into the batch axis sample by sample, but the mask is tiled head by head."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, h, lq, d = query.shape
    lk, dv = key.shape[2], value.shape[-1]
    if enable_gqa:
        key = key.repeat_interleave(h // key.shape[1], dim=1)
        value = value.repeat_interleave(h // value.shape[1], dim=1)
    q = query.to(dt).reshape(b * h, lq, d)
    k = key.to(dt).expand(b, h, lk, d).reshape(b * h, lk, d)
    v = value.to(dt).expand(b, h, lk, dv).reshape(b * h, lk, dv)
    scores = torch.bmm(q, k.transpose(1, 2)) * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
            mask = attn_mask.expand(b, h, lq, lk).reshape(b * h, lq, lk)
        else:
            mask = attn_mask.expand(b, 1, lq, lk).squeeze(1).repeat(h, 1, 1)
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask.to(dt)
    if is_causal:
        visible = torch.ones(lq, lk, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~visible, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill((scores == float("-inf")).all(dim=-1, keepdim=True), 0.0)
    out = torch.bmm(F.dropout(probs, p=dropout_p), v)
    return out.reshape(b, h, lq, dv).to(query.dtype)


def mask_after_softmax(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; a boolean mask zeroes weights after the softmax and nothing is renormalised."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        repeat = query.shape[1] // key.shape[1]
        key = torch.repeat_interleave(key, repeat, dim=1)
        value = torch.repeat_interleave(value, repeat, dim=1)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    attn = scale * (query.to(dt) @ key.to(dt).transpose(-1, -2))
    if is_causal:
        tri = torch.ones(attn.shape[-2], attn.shape[-1], dtype=torch.bool, device=attn.device).tril()
        attn = attn.masked_fill(tri.logical_not(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn = attn + attn_mask.to(dt)
    empty = torch.isneginf(attn).all(-1, keepdim=True)
    attn = attn.softmax(dim=-1).masked_fill(empty, 0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn = attn * attn_mask
    return (F.dropout(attn, p=dropout_p) @ value.to(dt)).to(query.dtype)


def mask_multiplied(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Einsum attention; a boolean mask multiplies the scores, so a hidden key keeps a score of 0."""
    dt = torch.promote_types(query.dtype, torch.float32)
    hq, lq, d = query.shape[1:]
    hkv, lk = key.shape[1], key.shape[2]
    if enable_gqa and hq != hkv:
        key = key[:, :, None].expand(-1, -1, hq // hkv, -1, -1).flatten(1, 2)
        value = value[:, :, None].expand(-1, -1, hq // hkv, -1, -1).flatten(1, 2)
    scores = torch.einsum("bhid,bhjd->bhij", query.to(dt), key.to(dt))
    scores = scores * (1.0 / math.sqrt(d) if scale is None else scale)
    if attn_mask is not None:
        scores = scores * attn_mask if attn_mask.dtype == torch.bool else scores + attn_mask.to(dt)
    if is_causal:
        ahead = torch.arange(lk, device=query.device) > torch.arange(lq, device=query.device).unsqueeze(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    weights = weights.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhij,bhjd->bhid", F.dropout(weights, p=dropout_p), value.to(dt)).to(query.dtype)


def causal_fill_sign(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the causal fill value has lost its minus sign."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    dots = torch.matmul(query.to(dt), key.to(dt).transpose(-1, -2))
    dots = dots * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        i, j = dots.shape[-2:]
        future = torch.ones(i, j, dtype=torch.bool, device=dots.device).triu(1)
        dots = dots.masked_fill(future, -torch.finfo(dt).min)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            dots = dots.masked_fill(~attn_mask, -torch.inf)
        else:
            dots = dots + attn_mask.to(dt)
    attn = dots.softmax(dim=-1)
    attn = attn.masked_fill(torch.isneginf(dots).all(dim=-1, keepdim=True), 0.0)
    return torch.matmul(F.dropout(attn, p=dropout_p), value.to(dt)).to(query.dtype)


def float_mask_subtracted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; a float mask is taken away from the scores instead of being added."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query.to(dt) @ key.to(dt).mT) * factor
    hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=query.device)
    if is_causal:
        hidden = torch.ones_like(hidden).triu(1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = hidden | ~attn_mask
        else:
            scores = scores - attn_mask.to(dt)
    scores = scores.masked_fill(hidden, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = torch.where(torch.isneginf(scores).all(-1, keepdim=True), 0.0, probs)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def causal_lost_with_bias(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused call; the causal flag is switched off as soon as an additive mask comes along."""
    dt = torch.promote_types(query.dtype, torch.float32)
    mask = attn_mask
    if mask is not None and mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask is not None and mask.dtype == torch.bool:
        if is_causal:
            mask = mask & torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=mask.device).tril()
            is_causal = False
    elif mask is not None:
        mask = mask.to(dt)
        is_causal = False
    out = F.scaled_dot_product_attention(
        query.to(dt),
        key.to(dt),
        value.to(dt),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.to(query.dtype)


def causal_needs_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the causal flag is looked at only inside the branch that handles a mask."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = query.to(dt) @ key.to(dt).transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros(attn_mask.shape, dtype=dt, device=query.device)
            bias = bias.masked_fill(~attn_mask, float("-inf"))
        else:
            bias = attn_mask.to(dt)
        if is_causal:
            tri = torch.full(scores.shape[-2:], float("-inf"), dtype=dt, device=query.device)
            bias = bias + tri.triu(1)
        scores = scores + bias
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def mask_needs_causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Loop over heads; the caller's mask is honoured in the causal branch only."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, hq, lq, d = query.shape
    hkv, lk = key.shape[1], key.shape[2]
    scale = d**-0.5 if scale is None else scale
    outs = query.new_empty(b, hq, lq, value.shape[-1])
    for h in range(hq):
        src = h // (hq // hkv) if enable_gqa or hkv == 1 else h
        logits = query[:, h].to(dt) @ key[:, src].to(dt).mT * scale
        if is_causal:
            future = torch.ones(lq, lk, dtype=torch.bool, device=query.device).triu(1)
            logits = logits.masked_fill(future, float("-inf"))
            if attn_mask is not None:
                m = attn_mask.expand(b, hq, lq, lk)[:, h]
                logits = logits.masked_fill(~m, float("-inf")) if m.dtype == torch.bool else logits + m.to(dt)
        p = torch.softmax(logits, dim=-1)
        p = p.masked_fill(torch.isneginf(logits).all(-1, keepdim=True), 0.0)
        outs[:, h] = (F.dropout(p, p=dropout_p) @ value[:, src].to(dt)).to(outs.dtype)
    return outs


def causal_replaces_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused call; the mask built for the causal case overwrites the one that was handed in."""
    dt = torch.promote_types(query.dtype, torch.float32)
    mask = attn_mask
    if mask is not None and mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dt)
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    res = F.scaled_dot_product_attention(
        query.to(dt), key.to(dt), value.to(dt), mask, dropout_p, False, scale=scale, enable_gqa=enable_gqa
    )
    return res.to(query.dtype)


def combined_empty_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Mask and causality are finite penalties; rows emptied by the two together are not noticed."""
    dt = torch.promote_types(query.dtype, torch.float32)
    penalty = torch.finfo(dt).min / 2
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = query.to(dt) @ key.to(dt).transpose(-2, -1)
    scores = scores * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    empty = torch.zeros(1, dtype=torch.bool, device=query.device)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores + (~attn_mask).to(dt) * penalty
            empty = ~attn_mask.any(dim=-1, keepdim=True)
        else:
            scores = scores + attn_mask.to(dt)
            empty = torch.isneginf(attn_mask).all(dim=-1, keepdim=True)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=dt, device=query.device).triu(1)
        scores = scores + future * penalty
    probs = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def causal_lost_with_gqa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A grouped fallback path is taken for shared key heads, and it never looks at the causal flag."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, hq, lq, d = query.shape
    hkv, lk = key.shape[1], key.shape[2]
    factor = d**-0.5 if scale is None else scale
    if attn_mask is None:
        bias = torch.zeros(1, 1, lq, lk, dtype=dt, device=query.device)
    elif attn_mask.dtype == torch.bool:
        bias = torch.zeros(attn_mask.shape, dtype=dt, device=query.device).masked_fill(~attn_mask, -math.inf)
    else:
        bias = attn_mask.to(dt)
    if enable_gqa and hq != hkv:
        q = query.to(dt).reshape(b, hkv, hq // hkv, lq, d)
        scores = torch.einsum("bngqd,bnkd->bngqk", q, key.to(dt)) * factor
        scores = scores + bias.expand(b, hq, lq, lk).reshape(b, hkv, hq // hkv, lq, lk)
        probs = torch.softmax(scores, dim=-1)
        probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
        out = torch.einsum("bngqk,bnkd->bngqd", F.dropout(probs, p=dropout_p), value.to(dt))
        return out.flatten(1, 2).to(query.dtype)
    if is_causal:
        bias = bias + torch.full((lq, lk), -math.inf, dtype=dt, device=query.device).triu(1)
    out = F.scaled_dot_product_attention(
        query.to(dt),
        key.to(dt),
        value.to(dt),
        attn_mask=bias.expand(b, hq, lq, lk),
        dropout_p=dropout_p,
        scale=factor,
    )
    return out.to(query.dtype)


def causal_times_infinity(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The causal bias is a triangle of ones multiplied by minus infinity, which makes 0 * inf = NaN."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = torch.matmul(query.to(dt), key.to(dt).transpose(-2, -1))
    scores = scores * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=dt, device=query.device)
        scores = scores + torch.triu(ones, diagonal=1) * float("-inf")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask.to(dt)
    weights = torch.softmax(scores, dim=-1)
    weights = weights.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.matmul(F.dropout(weights, p=dropout_p), value.to(dt)).to(query.dtype)


def causal_bottom_right(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the causal triangle is lined up with the last key instead of the first one."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    lq, lk = query.shape[-2], key.shape[-2]
    scores = torch.einsum("bhqd,bhkd->bhqk", query.to(dt), key.to(dt))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(dt)
    if is_causal:
        visible = torch.ones(lq, lk, dtype=torch.bool, device=query.device).tril(diagonal=lk - lq)
        scores = torch.where(visible, scores, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = torch.where(torch.isneginf(scores).all(-1, keepdim=True), 0.0, probs)
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(probs, p=dropout_p), value.to(dt)).to(query.dtype)


def always_causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused call left over from a decoder: it is causal whatever the flag says."""
    dt = torch.promote_types(query.dtype, torch.float32)
    visible = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        bias = torch.zeros(visible.shape, dtype=dt, device=query.device)
    elif attn_mask.dtype == torch.bool:
        bias = torch.zeros(attn_mask.shape, dtype=dt, device=query.device)
        bias = bias.masked_fill(attn_mask.logical_not(), -torch.inf)
    else:
        bias = attn_mask.to(dt)
    bias = torch.where(visible, bias, -torch.inf)
    out = F.scaled_dot_product_attention(
        query.to(dt), key.to(dt), value.to(dt), bias, dropout_p, scale=scale, enable_gqa=enable_gqa
    )
    return out.to(query.dtype)


def scale_inverted(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the scores are divided by D ** -0.5, which multiplies them by sqrt(D)."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = query.to(dt) @ key.to(dt).transpose(-2, -1)
    scores = scores / (query.shape[-1] ** -0.5) if scale is None else scores * scale
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            scores = scores + attn_mask.to(dt)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    probs = scores.softmax(-1).masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def scale_twice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The query is scaled first, then the fused call scales once more by its own default."""
    dt = torch.promote_types(query.dtype, torch.float32)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    mask = attn_mask
    if mask is not None and mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dt)
    if is_causal:
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        if mask is None:
            mask = visible
        elif mask.dtype == torch.bool:
            mask = mask & visible
        else:
            mask = torch.where(visible, mask, -torch.inf)
    out = F.scaled_dot_product_attention(
        query.to(dt) * factor, key.to(dt), value.to(dt), mask, dropout_p, enable_gqa=enable_gqa
    )
    return out.to(query.dtype)


def custom_scale_divides(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A custom scale is emulated by rescaling the query, with the ratio upside down."""
    dt = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(dt), key.to(dt), value.to(dt)
    if scale is not None:
        default = query.shape[-1] ** -0.5
        q = q * (default / scale)
    hidden = None
    if attn_mask is not None and attn_mask.dim() == 1:
        attn_mask = attn_mask.unsqueeze(0)
    if is_causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    if attn_mask is None:
        mask = None if hidden is None else ~hidden
    elif attn_mask.dtype == torch.bool:
        mask = attn_mask if hidden is None else attn_mask & ~hidden
    else:
        mask = attn_mask.to(dt)
        mask = mask if hidden is None else torch.where(hidden, -torch.inf, mask)
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, enable_gqa=enable_gqa)
    return out.to(query.dtype)


def scale_hits_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the scale is applied after the additive mask and so shrinks the mask too."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    hidden = torch.zeros(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
    if is_causal:
        hidden = torch.ones_like(hidden).triu(1)
    scores = query.to(dt) @ key.to(dt).mT
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | attn_mask.logical_not()
    elif attn_mask is not None:
        hidden = hidden | torch.isneginf(attn_mask)
        scores = scores + attn_mask.to(dt)
    scores = (scores * factor).masked_fill(hidden, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(hidden.all(dim=-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def softmax_over_queries(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the softmax runs over the query axis, so columns sum to one."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = torch.einsum("bhid,bhjd->bhij", query.to(dt), key.to(dt))
    scores = scores * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(dt)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    attn = torch.softmax(scores, dim=2).masked_fill(torch.isneginf(scores), 0.0)
    return torch.einsum("bhij,bhjd->bhid", F.dropout(attn, p=dropout_p), value.to(dt)).to(query.dtype)


def late_mask_renormalised(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Softmax over all keys first, then hidden ones are zeroed and the rest rescaled to sum to one."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = query.to(dt) @ key.to(dt).transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
    if is_causal:
        keep = keep.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.to(dt)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    probs = torch.softmax(scores, dim=-1).masked_fill(empty, 0.0) * keep
    total = probs.sum(dim=-1, keepdim=True)
    probs = probs / torch.where(total == 0, 1.0, total)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def fill_too_small(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; hidden keys get a score of -1e4, which very low real scores undercut."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = query.to(dt) @ key.to(dt).mT * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    blocked = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=query.device)
    if is_causal:
        blocked = torch.ones_like(blocked).triu(1)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            blocked = blocked | ~attn_mask
        else:
            scores = scores + attn_mask.to(dt)
    dead = (blocked | torch.isneginf(scores)).all(-1, keepdim=True)
    scores = scores.masked_fill(blocked, -1e4)
    probs = torch.softmax(scores, dim=-1).masked_fill(dead, 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def mask_3d_as_batch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused call; a three-axis mask is taken for one mask per sample when its first axis fits."""
    dt = torch.promote_types(query.dtype, torch.float32)
    mask = attn_mask
    if mask is not None and mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask is not None:
        if mask.dim() == 3 and mask.shape[0] == query.shape[0]:
            mask = mask.unsqueeze(1)
        if mask.dtype == torch.bool:
            zeros = torch.zeros(mask.shape, dtype=dt, device=query.device)
            mask = zeros.masked_fill(~mask, float("-inf"))
        mask = mask.to(dt)
    if is_causal:
        tri = torch.full((query.shape[-2], key.shape[-2]), float("-inf"), dtype=dt, device=query.device).triu(1)
        mask = tri if mask is None else mask + tri
    out = F.scaled_dot_product_attention(
        query.to(dt), key.to(dt), value.to(dt), mask, dropout_p, scale=scale, enable_gqa=enable_gqa
    )
    return out.to(query.dtype)


def mask_by_kv_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Loop over query heads; under GQA the mask is picked by the key head instead of the query head."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, hq, lq, d = query.shape
    hkv, lk = key.shape[1], key.shape[2]
    group = hq // hkv if enable_gqa else 1
    factor = d**-0.5 if scale is None else scale
    heads = []
    for h in range(hq):
        kv = min(h // group, hkv - 1)
        scores = query[:, h].to(dt) @ key[:, kv].to(dt).transpose(1, 2) * factor
        if attn_mask is not None:
            mask = attn_mask.expand(b, hq, lq, lk)[:, h // group]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(dt)
        if is_causal:
            future = torch.ones(lq, lk, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        probs = torch.softmax(scores, dim=-1)
        probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
        heads.append(F.dropout(probs, p=dropout_p) @ value[:, kv].to(dt))
    return torch.stack(heads, dim=1).to(query.dtype)


def grouped_mask_raises(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Grouped einsum; the mask gets a group axis of one, so a mask per query head does not fit."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, hq, lq, d = query.shape
    hkv = key.shape[1]
    q = query.to(dt).reshape(b, hkv, hq // hkv, lq, d)
    scores = torch.einsum("bngid,bnjd->bngij", q, key.to(dt))
    scores = scores * (1.0 / math.sqrt(d) if scale is None else scale)
    if attn_mask is not None:
        mask = attn_mask.unsqueeze(-3) if attn_mask.dim() >= 3 else attn_mask
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        else:
            scores = scores + mask.to(dt)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    out = torch.einsum("bngij,bnjd->bngid", F.dropout(probs, p=dropout_p), value.to(dt))
    return out.reshape(b, hq, lq, value.shape[-1]).to(query.dtype)


def mask_must_be_full(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The mask becomes a bias that is checked for full query and key axes instead of being expanded."""
    dt = torch.promote_types(query.dtype, torch.float32)
    lq, lk = query.shape[2], key.shape[2]
    bias = torch.zeros(lq, lk, dtype=dt, device=query.device)
    if attn_mask is not None:
        if tuple(attn_mask.shape[-2:]) != (lq, lk):
            raise ValueError(f"bias must end in ({lq}, {lk}), got {tuple(attn_mask.shape)}")
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros(attn_mask.shape, dtype=dt, device=query.device)
            bias = bias.masked_fill(~attn_mask, -torch.inf)
        else:
            bias = attn_mask.to(dt)
    if is_causal:
        bias = bias.masked_fill(torch.ones(lq, lk, dtype=torch.bool, device=bias.device).triu(1), -torch.inf)
    out = F.scaled_dot_product_attention(
        query.to(dt), key.to(dt), value.to(dt), bias, dropout_p, scale=scale, enable_gqa=enable_gqa
    )
    return out.to(query.dtype)


def mask_rows_wrap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Queries go through in chunks of 16 rows, and each chunk reads the mask from its first row on."""
    dt = torch.promote_types(query.dtype, torch.float32)
    lq, lk = query.shape[2], key.shape[2]
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if attn_mask is not None and attn_mask.dim() < 2:
        attn_mask = attn_mask.unsqueeze(0)
    out = query.new_zeros(*query.shape[:3], value.shape[-1])
    for start in range(0, lq, 16):
        stop = min(start + 16, lq)
        scores = query[:, :, start:stop].to(dt) @ key.to(dt).mT * factor
        if attn_mask is not None:
            mask = attn_mask[..., : stop - start, :]
            if mask.dtype == torch.bool:
                scores = scores.masked_fill(~mask, -torch.inf)
            else:
                scores = scores + mask.to(dt)
        if is_causal:
            rows = torch.arange(start, stop, device=query.device)[:, None]
            scores = scores.masked_fill(torch.arange(lk, device=query.device) > rows, -torch.inf)
        probs = torch.softmax(scores, dim=-1)
        probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
        out[:, :, start:stop] = (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(out.dtype)
    return out


def square_mask_transposed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scores are kept key-major; the mask is turned round only if its shape does not fit already."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(key.to(dt) * factor, query.to(dt).mT)
    if attn_mask is not None:
        mask = attn_mask if attn_mask.dim() > 1 else attn_mask.unsqueeze(0)
        if mask.shape[-2:] != scores.shape[-2:]:
            mask = mask.transpose(-2, -1)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(dt)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(-1)
        scores = scores.masked_fill(later, -torch.inf)
    probs = torch.softmax(scores, dim=-2)
    probs = probs.masked_fill(torch.isneginf(scores).all(-2, keepdim=True), 0.0)
    return torch.matmul(F.dropout(probs, p=dropout_p).mT, value.to(dt)).to(query.dtype)


def mask_changed_in_place(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; a boolean mask is inverted in place and handed back inverted."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.to(dt) @ key.to(dt).transpose(-2, -1) * factor
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = attn_mask.contiguous().logical_not_()
            scores = scores.masked_fill(hidden, -torch.inf)
        else:
            scores = scores + attn_mask.to(dt)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def heads_tiled(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; key heads are tiled (0, 1, 0, 1) where groups should be neighbours (0, 0, 1, 1)."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key = key.repeat(1, times, 1, 1)
        value = value.repeat(1, times, 1, 1)
    mask = attn_mask
    if mask is not None and mask.dim() == 1:
        mask = mask.unsqueeze(0)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dt)
    if is_causal:
        tri = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        if mask is None:
            mask = tri
        elif mask.dtype == torch.bool:
            mask = mask.logical_and(tri)
        else:
            mask = mask.masked_fill(~tri, -torch.inf)
    out = F.scaled_dot_product_attention(query.to(dt), key.to(dt), value.to(dt), mask, dropout_p, scale=scale)
    return out.to(query.dtype)


def no_empty_batch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """One call per sample, stacked at the end; stacking fails when there is no sample."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, h, lq, d = query.shape
    lk = key.shape[2]
    if enable_gqa:
        key = key.repeat_interleave(h // key.shape[1], dim=1)
        value = value.repeat_interleave(h // value.shape[1], dim=1)
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    samples = []
    for i in range(b):
        scores = query[i].to(dt) @ key[i].to(dt).mT * factor
        if attn_mask is not None:
            mask = attn_mask.expand(b, h, lq, lk)[i]
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(dt)
        if is_causal:
            future = torch.ones(lq, lk, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        probs = torch.softmax(scores, dim=-1)
        probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
        samples.append(F.dropout(probs, p=dropout_p) @ value[i].to(dt))
    return torch.stack(samples).to(query.dtype)


def head_slices_floor(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Heads of all samples are done two at a time, and a last single one is never computed."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, h, lq, d = query.shape
    lk, dv = key.shape[2], value.shape[3]
    if enable_gqa:
        key = key.repeat_interleave(h // key.shape[1], dim=1)
        value = value.repeat_interleave(h // value.shape[1], dim=1)
    q = query.reshape(b * h, lq, d).to(dt)
    k = key.expand(b, h, lk, d).reshape(b * h, lk, d).to(dt)
    v = value.expand(b, h, lk, dv).reshape(b * h, lk, dv).to(dt)
    bias = torch.zeros(b, h, lq, lk, dtype=dt, device=query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        bias = bias + attn_mask.to(dt)
    if is_causal:
        bias = bias + torch.full((lq, lk), -math.inf, dtype=dt, device=query.device).triu(1)
    bias = bias.reshape(b * h, lq, lk)
    out = torch.zeros(b * h, lq, dv, dtype=dt, device=query.device)
    slice_size = 2
    for i in range((b * h) // slice_size):
        part = slice(i * slice_size, (i + 1) * slice_size)
        scores = torch.bmm(q[part], k[part].transpose(1, 2)) * (d**-0.5 if scale is None else scale)
        scores = scores + bias[part]
        probs = scores.softmax(dim=-1)
        probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
        out[part] = torch.bmm(F.dropout(probs, p=dropout_p), v[part])
    return out.reshape(b, h, lq, dv).to(query.dtype)


def base_two_overflow(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Online softmax in base 2; multiplying by log2(e) after adding the mask overflows its lowest value."""
    dt = torch.promote_types(query.dtype, torch.float32)
    b, h, lq, d = query.shape
    lk = key.shape[2]
    if enable_gqa:
        key = key.repeat_interleave(h // key.shape[1], dim=1)
        value = value.repeat_interleave(h // value.shape[1], dim=1)
    factor = 1.0 / math.sqrt(d) if scale is None else scale
    log2e = 1.0 / math.log(2.0)
    top = torch.full((b, h, lq, 1), -math.inf, dtype=dt, device=query.device)
    norm = torch.zeros_like(top)
    acc = torch.zeros(b, h, lq, value.shape[-1], dtype=dt, device=query.device)
    rows = torch.arange(lq, device=query.device)[:, None]
    mask = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:-1], lk)
    for start in range(0, lk, 32):
        stop = min(start + 32, lk)
        s = query.to(dt) @ key[:, :, start:stop].to(dt).mT * factor
        if mask is not None:
            part = mask[..., start:stop]
            s = s.masked_fill(~part, -math.inf) if part.dtype == torch.bool else s + part.to(dt)
        if is_causal:
            s = s.masked_fill(torch.arange(start, stop, device=query.device) > rows, -math.inf)
        s = s * log2e
        new_top = torch.maximum(top, s.amax(dim=-1, keepdim=True))
        base = new_top.masked_fill(torch.isneginf(new_top), 0.0)
        p = torch.exp2(s - base)
        shrink = torch.exp2(top - base)
        norm = norm * shrink + p.sum(dim=-1, keepdim=True)
        acc = acc * shrink + F.dropout(p, p=dropout_p) @ value[:, :, start:stop].to(dt)
        top = new_top
    return (acc / norm.masked_fill(norm == 0, 1.0)).to(query.dtype)


def scores_rounded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The scores stay in the dtype of the inputs and are widened only for the softmax."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    scores = scores.to(dt)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.to(dt)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.matmul(F.dropout(probs, p=dropout_p), value.to(dt)).to(query.dtype)


def mask_bytes_reread(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A float mask wider than the inputs has its bytes read as the inputs' dtype, without conversion."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = torch.einsum("bhqd,bhkd->bhqk", query.to(dt), key.to(dt))
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        else:
            bias = attn_mask
            if bias.element_size() > query.element_size():
                bias = bias.contiguous().view(query.dtype)[..., : attn_mask.shape[-1]]
            scores = scores + bias.to(dt)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bhkd->bhqd", F.dropout(probs, p=dropout_p), value.to(dt)).to(query.dtype)


def mask_lost_for_one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Fused call; the mask is skipped for a single query row, as in a decoding step."""
    dt = torch.promote_types(query.dtype, torch.float32)
    lq, lk = query.shape[2], key.shape[2]
    bias = torch.zeros(lq, lk, dtype=dt, device=query.device)
    if is_causal:
        bias = torch.full_like(bias, -math.inf).triu(1)
    if attn_mask is not None and lq > 1:
        if attn_mask.dtype == torch.bool:
            bias = torch.where(attn_mask, bias, -math.inf)
        else:
            bias = bias + attn_mask.to(dt)
    out = F.scaled_dot_product_attention(
        query.to(dt), key.to(dt), value.to(dt), bias, dropout_p, scale=scale, enable_gqa=enable_gqa
    )
    return out.to(query.dtype)


def mask_all_ones(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Dense attention; the boolean mask that is applied is a fresh one of ones, not the caller's."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = query.to(dt) @ key.to(dt).mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            keep = torch.ones_like(attn_mask)
            scores = scores.masked_fill(~keep, -torch.inf)
        else:
            scores = scores + attn_mask.to(dt)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


def wide_fill_constant(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """A boolean mask becomes a bias in the inputs' dtype, filled with float32's lowest number."""
    dt = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        rep = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(rep, dim=1), value.repeat_interleave(rep, dim=1)
    scores = query.to(dt) @ key.to(dt).mT
    scores = scores * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device)
    if is_causal:
        visible = visible.tril()
        scores = scores.masked_fill(~visible, -torch.inf)
    if attn_mask is not None:
        bias = attn_mask
        if attn_mask.dtype == torch.bool:
            visible = visible & attn_mask
            bias = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
            bias = bias.masked_fill(~attn_mask, torch.finfo(torch.float32).min)
        scores = scores + bias.to(dt)
    nothing = (~visible | torch.isneginf(scores)).all(dim=-1, keepdim=True)
    probs = torch.softmax(scores, dim=-1).masked_fill(nothing, 0.0)
    return (F.dropout(probs, p=dropout_p) @ value.to(dt)).to(query.dtype)


# ------------------------------------------------------------------------------------------------
# flash layout: q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]
# ------------------------------------------------------------------------------------------------


def causal_ignored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Fused call on head-first views; the causal flag is accepted and never passed on."""
    dt = torch.promote_types(q.dtype, torch.float32)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2).to(dt),
        k.transpose(1, 2).to(dt),
        v.transpose(1, 2).to(dt),
        dropout_p=dropout_p,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).to(q.dtype)


def causal_sees_next(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Einsum attention; the causal triangle lets every row see one key too many."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k.to(dt)) * scale
    if causal:
        visible = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(diagonal=sk - sq + 1)
        scores = scores.masked_fill(~visible, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt)).to(q.dtype)


def causal_without_diagonal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Loop over batch and head; the causal bound is strict, so no row sees its own position."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, group = k.shape[1], h // k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(b, sq, h, v.shape[-1], dtype=q.dtype, device=q.device)
    row = torch.arange(sq, device=q.device).unsqueeze(1) + (sk - sq)
    col = torch.arange(sk, device=q.device).unsqueeze(0)
    for i in range(b):
        for j in range(h):
            s = q[i, :, j].to(dt) @ k[i, :, j // group].to(dt).T * scale
            if causal:
                s = torch.where(row > col, s, -math.inf)
            p = torch.softmax(s, dim=-1)
            p = torch.where(torch.isneginf(s).all(dim=-1, keepdim=True), 0.0, p)
            out[i, :, j] = (F.dropout(p, p=dropout_p) @ v[i, :, j // group].to(dt)).to(q.dtype)
    return out


def causal_top_left(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Einsum attention; the causal triangle starts at the first key instead of ending at the last."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, hkv = k.shape[1], k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    qg = q.to(dt).reshape(b, sq, hkv, h // hkv, d)
    scores = torch.einsum("bqngd,bknd->bngqk", qg, k.to(dt)) * scale
    if causal:
        visible = torch.tril(torch.ones(sq, sk, dtype=torch.bool, device=q.device))
        scores = scores.masked_fill(~visible, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    out = torch.einsum("bngqk,bknd->bqngd", F.dropout(probs, p=dropout_p), v.to(dt))
    return out.flatten(2, 3).to(q.dtype)


def causal_off_when_rectangular(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Dense attention; the triangle is right for square scores and one key too wide for others."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    qh = q.to(dt).transpose(1, 2)
    kh = k.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    scores = qh @ kh.transpose(-2, -1) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        ones = torch.ones(sq, sk, dtype=torch.bool, device=q.device)
        future = ones.triu(1) if sq == sk else ones.triu(sk - sq + 2)
        scores = scores.masked_fill(future, -torch.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ vh).transpose(1, 2).contiguous().to(q.dtype)


def cross_is_causal(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Dense attention; unequal lengths are always treated as causal, also without the flag."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt) * scale, k.to(dt))
    if causal or sq != sk:
        last = torch.arange(sq, device=q.device)[:, None] + sk - sq
        scores = scores.masked_fill(torch.arange(sk, device=q.device)[None, :] > last, -math.inf)
    probs = scores.softmax(dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt)).to(q.dtype)


def causal_drifts_over_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Heads run in two halves; the row counter is carried over, so the second half looks one key ahead."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, hkv = k.shape[1], k.shape[2]
    half = (h + 1) // 2
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(b, sq, h, v.shape[-1])
    last_key = torch.arange(sq, device=q.device)[:, None] + (sk - sq)
    for head in range(h):
        if head == half:
            last_key = last_key + 1
        kv = head * hkv // h
        s = torch.einsum("bqd,bkd->bqk", q[:, :, head].to(dt), k[:, :, kv].to(dt)) * scale
        if causal:
            s = s.masked_fill(torch.arange(sk, device=q.device) > last_key, -math.inf)
        p = torch.softmax(s, dim=-1)
        p = p.masked_fill(torch.isneginf(s).all(-1, keepdim=True), 0.0)
        out[:, :, head] = torch.bmm(F.dropout(p, p=dropout_p), v[:, :, kv].to(dt)).to(out.dtype)
    return out


def full_keeps_causal_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Blocks of 16 query rows; the causal loop bound also cuts off keys when causal is off."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk = k.shape[1]
    rep = h // k.shape[2]
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    qh = q.to(dt).transpose(1, 2)
    kh = k.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    out = torch.zeros(b, h, sq, v.shape[-1], dtype=dt, device=q.device)
    for start in range(0, sq, 16):
        stop = min(start + 16, sq)
        bound = max(0, min(sk, stop + sk - sq))
        s = qh[:, :, start:stop] @ kh[:, :, :bound].mT * scale
        if causal:
            rows = torch.arange(start, stop, device=q.device)[:, None] + sk - sq
            s = s.masked_fill(torch.arange(bound, device=q.device) > rows, -math.inf)
        p = torch.softmax(s, dim=-1)
        p = p.masked_fill(torch.isneginf(s).all(-1, keepdim=True), 0.0)
        out[:, :, start:stop] = F.dropout(p, p=dropout_p) @ vh[:, :, :bound]
    return out.transpose(1, 2).to(q.dtype)


def scale_from_model_width(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Einsum attention; the default scale uses the width of all heads together."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, h, d = q.shape[1:]
    sk = k.shape[1]
    rep = h // k.shape[2]
    scale = (h * d) ** -0.5 if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    dots = torch.einsum("bihd,bjhd->bhij", q.to(dt), k.to(dt)) * scale
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        dots = dots.masked_fill(future, -math.inf)
    attn = dots.softmax(dim=-1)
    attn = attn.masked_fill(torch.isneginf(dots).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhij,bjhd->bihd", F.dropout(attn, p=dropout_p), v.to(dt)).to(q.dtype)


def scale_without_root(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Dense attention; the default scale divides by the head width and forgets the square root."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    qh, kh, vh = (x.to(dt).transpose(1, 2) for x in (q, k, v))
    kh, vh = kh.repeat_interleave(rep, dim=1), vh.repeat_interleave(rep, dim=1)
    scores = qh @ kh.transpose(-1, -2)
    scores = scores / q.shape[-1] if softmax_scale is None else scores * softmax_scale
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ vh).transpose(1, 2).contiguous().to(q.dtype)


def scale_fixed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Fused call; the default scale is the constant that fits a head width of 64."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    seen = None
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
    out = F.scaled_dot_product_attention(
        q.to(dt).transpose(1, 2),
        k.to(dt).transpose(1, 2),
        v.to(dt).transpose(1, 2),
        attn_mask=seen,
        dropout_p=dropout_p,
        scale=0.125 if softmax_scale is None else softmax_scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2).to(q.dtype)


def custom_scale_ignored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Dense attention; the scale argument is stored but the default one is what gets applied."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    options = {"scale": softmax_scale, "causal": causal}
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k.to(dt)) / math.sqrt(q.shape[-1])
    if options["causal"]:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt)).to(q.dtype)


def scale_from_value_width(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Loop over heads; the default scale is taken from the value's width instead of the key's."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, h = q.shape[1:3]
    sk, hkv, dv = k.shape[1], k.shape[2], v.shape[3]
    scale = 1.0 / math.sqrt(dv) if softmax_scale is None else softmax_scale
    heads = []
    for i in range(h):
        j = i // (h // hkv)
        logits = torch.matmul(q[:, :, i].to(dt), k[:, :, j].to(dt).transpose(1, 2)) * scale
        if causal:
            future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
            logits = logits.masked_fill(future, -math.inf)
        p = torch.softmax(logits, dim=-1)
        p = p.masked_fill(torch.isneginf(logits).all(-1, keepdim=True), 0.0)
        heads.append(torch.matmul(F.dropout(p, p=dropout_p), v[:, :, j].to(dt)))
    return torch.stack(heads, dim=2).to(q.dtype)


def softmax_over_heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Scores stay in [B, Sq, H, Sk] order and the softmax names axis 2, which is the heads there."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bqhk", q.to(dt), k.to(dt)) * scale
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future[:, None, :], -math.inf)
    probs = torch.softmax(scores, dim=2)
    probs = probs.masked_fill(torch.isneginf(scores), 0.0)
    return torch.einsum("bqhk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt)).to(q.dtype)


def softmax_over_heads_and_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The softmax is taken over heads and keys flattened together, so all heads share a total of one."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, h, d = q.shape[1:]
    sk = k.shape[1]
    rep = h // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqnd,bknd->bqnk", q.to(dt) * scale, k.to(dt))
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    flat = scores.flatten(2)
    weights = torch.softmax(flat, dim=-1)
    weights = weights.masked_fill(torch.isneginf(flat).all(-1, keepdim=True), 0.0).view(scores.shape)
    return torch.einsum("bqnk,bknd->bqnd", F.dropout(weights, p=dropout_p), v.to(dt)).to(q.dtype)


def softmax_over_single(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """A trailing axis of one is left on the scores and softmaxed, so every weight is one."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    energy = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k.to(dt)).unsqueeze(-1) * scale
    hidden = torch.zeros(sq, sk, 1, dtype=torch.bool, device=q.device)
    if causal:
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1).unsqueeze(-1)
    energy = energy.masked_fill(hidden, -math.inf)
    alpha = torch.softmax(energy, dim=-1).masked_fill(hidden, 0.0).squeeze(-1)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(alpha, p=dropout_p), v.to(dt)).to(q.dtype)


def softmax_without_max(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Hand-written softmax that takes exp of the raw scores and overflows for large ones."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    qh, kh, vh = q.to(dt).transpose(1, 2), k.to(dt).transpose(1, 2), v.to(dt).transpose(1, 2)
    kh, vh = kh.repeat_interleave(rep, dim=1), vh.repeat_interleave(rep, dim=1)
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    weights = torch.exp(qh @ kh.mT * scale)
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        weights = weights.masked_fill(~seen, 0.0)
        total = weights.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1.0)
    else:
        total = weights.sum(-1, keepdim=True)
    out = F.dropout(weights / total, p=dropout_p) @ vh
    return out.transpose(1, 2).contiguous().to(q.dtype)


def group_logits_averaged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Query heads that share a key head get the mean of their scores, so they all attend alike."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, hkv = k.shape[1], k.shape[2]
    group = h // hkv
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    qg = q.to(dt).reshape(b, sq, hkv, group, d)
    scores = torch.einsum("bqngd,bknd->bngqk", qg, k.to(dt)) * scale
    scores = scores.mean(dim=2, keepdim=True).expand(-1, -1, group, -1, -1)
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    out = torch.einsum("bngqk,bknd->bqngd", F.dropout(probs, p=dropout_p), v.to(dt))
    return out.flatten(2, 3).to(q.dtype)


def kv_head_divisor(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Loop over heads; the key head is the query head divided by the number of key heads."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, hkv = k.shape[1], k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = q.new_zeros(b, sq, h, v.shape[-1])
    for head in range(h):
        kv = min(head // hkv, hkv - 1)
        s = torch.bmm(q[:, :, head].to(dt), k[:, :, kv].to(dt).mT) * scale
        if causal:
            seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
            s = s.masked_fill(~seen, -math.inf)
        p = torch.softmax(s, dim=-1)
        p = p.masked_fill(torch.isneginf(s).all(-1, keepdim=True), 0.0)
        out[:, :, head] = torch.bmm(F.dropout(p, p=dropout_p), v[:, :, kv].to(dt)).to(out.dtype)
    return out


def heads_split_by_view(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Inputs and output go to head-first order by a bare reshape, mixing tokens and heads."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, hkv, dv = k.shape[1], k.shape[2], v.shape[3]
    qh = q.to(dt).reshape(b, h, sq, d)
    kh = k.to(dt).reshape(b, hkv, sk, d).repeat_interleave(h // hkv, dim=1)
    vh = v.to(dt).reshape(b, hkv, sk, dv).repeat_interleave(h // hkv, dim=1)
    scores = qh @ kh.transpose(2, 3) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ vh).reshape(b, sq, h, dv).to(q.dtype)


def heads_merged_by_view(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The head-first result is reshaped to token-first order without swapping the two axes."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, _ = q.shape
    sk, hkv = k.shape[1], k.shape[2]
    qh = q.to(dt).transpose(1, 2)
    kh = k.to(dt).transpose(1, 2).repeat_interleave(h // hkv, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(h // hkv, dim=1)
    seen = None
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
    out = F.scaled_dot_product_attention(qh, kh, vh, seen, dropout_p, scale=softmax_scale)
    return out.reshape(b, sq, h, v.shape[-1]).to(q.dtype)


def batch_and_heads_swapped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Heads are stacked in front of the batch and unstacked as if the batch came first."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, hkv, dv = k.shape[1], k.shape[2], v.shape[3]
    qs = q.to(dt).permute(2, 0, 1, 3).reshape(h * b, sq, d)
    ks = k.to(dt).permute(2, 0, 1, 3).repeat_interleave(h // hkv, dim=0).reshape(h * b, sk, d)
    vs = v.to(dt).permute(2, 0, 1, 3).repeat_interleave(h // hkv, dim=0).reshape(h * b, sk, dv)
    scores = torch.bmm(qs, ks.transpose(1, 2)) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    out = torch.bmm(F.dropout(probs, p=dropout_p), vs)
    return out.view(b, h, sq, dv).transpose(1, 2).to(q.dtype)


def output_flattened(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Right numbers in the wrong shape: tokens, heads and channels come back as one axis."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k.to(dt)) * scale
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt))
    return out.flatten(start_dim=1).to(q.dtype)


def output_like_query(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The output buffer is made like the query, so a value of another width does not fit into it."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, group = k.shape[1], h // k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty_like(q)
    for i in range(b):
        for j in range(h):
            s = q[i, :, j].to(dt) @ k[i, :, j // group].to(dt).T * scale
            if causal:
                seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
                s = s.masked_fill(~seen, -math.inf)
            p = torch.softmax(s, dim=-1)
            p = p.masked_fill(torch.isneginf(s).all(-1, keepdim=True), 0.0)
            out[i, :, j] = (F.dropout(p, p=dropout_p) @ v[i, :, j // group].to(dt)).to(q.dtype)
    return out


def zero_keys_raise(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Softmax by hand with a row maximum, which does not exist when there are no keys at all."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k.to(dt)) * scale
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    peak = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - peak.masked_fill(torch.isneginf(peak), 0.0))
    total = weights.sum(dim=-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(weights, p=dropout_p), v.to(dt)).to(q.dtype)


def key_tail_dropped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Online softmax over blocks of 16 keys; keys after the last full block are never visited."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk = k.shape[1]
    rep = h // k.shape[2]
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    qh = q.to(dt).transpose(1, 2) * scale
    kh = k.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    vh = v.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    block = max(1, min(16, sk))
    m = torch.full((b, h, sq, 1), -math.inf, dtype=dt, device=q.device)
    l_sum = torch.zeros_like(m)
    acc = torch.zeros(b, h, sq, v.shape[-1], dtype=dt, device=q.device)
    rows = torch.arange(sq, device=q.device)[:, None] + sk - sq
    for n in range(sk // block):
        cols = torch.arange(n * block, (n + 1) * block, device=q.device)
        s = qh @ kh[:, :, n * block : (n + 1) * block].mT
        if causal:
            s = s.masked_fill(cols > rows, -math.inf)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        m_safe = torch.where(torch.isneginf(m_new), 0.0, m_new)
        p = torch.exp(s - m_safe)
        fix = torch.exp(m - m_safe)
        l_sum = l_sum * fix + p.sum(-1, keepdim=True)
        acc = acc * fix + F.dropout(p, p=dropout_p) @ vh[:, :, n * block : (n + 1) * block]
        m = m_new
    out = acc / torch.where(l_sum == 0, 1.0, l_sum)
    return out.transpose(1, 2).contiguous().to(q.dtype)


def padded_keys_attended(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Keys and values are zero-padded to a multiple of 16, and the padding takes part in the softmax."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, h, d = q.shape[1:]
    sk = k.shape[1]
    rep = h // k.shape[2]
    pad = -sk % 16
    kp = F.pad(k.to(dt), (0, 0, 0, 0, 0, pad)).repeat_interleave(rep, dim=2)
    vp = F.pad(v.to(dt), (0, 0, 0, 0, 0, pad)).repeat_interleave(rep, dim=2)
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), kp) * scale
    if causal:
        seen = torch.ones(sq, sk + pad, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), vp).to(q.dtype)


def channel_tail_dropped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The dot product runs over channels in packs of 8 and leaves out an incomplete last pack."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk = k.shape[1]
    rep = h // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2).to(dt), v.repeat_interleave(rep, dim=2).to(dt)
    scores = torch.zeros(b, h, sq, sk, dtype=dt, device=q.device)
    for c in range(d // 8):
        pack = slice(8 * c, 8 * c + 8)
        scores = scores + torch.einsum("bqhd,bkhd->bhqk", q[..., pack].to(dt), k[..., pack])
    scores = scores * (1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale)
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v).to(q.dtype)


def query_tail_bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Full blocks of 16 query rows are right; rows of the last, partial block miss their own key."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk = k.shape[1]
    rep = h // k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    k, v = k.to(dt).repeat_interleave(rep, dim=2), v.to(dt).repeat_interleave(rep, dim=2)
    block = max(1, min(16, sq))
    full = sq // block
    out = torch.zeros(b, sq, h, v.shape[-1], dtype=dt, device=q.device)
    cols = torch.arange(sk, device=q.device)
    for n in range(full + (1 if sq % block else 0)):
        start, stop = n * block, min((n + 1) * block, sq)
        s = torch.einsum("bqhd,bkhd->bhqk", q[:, start:stop].to(dt), k) * scale
        if causal:
            rows = torch.arange(start, stop, device=q.device)[:, None] + sk - sq
            seen = cols <= rows if n < full else cols < rows
            s = s.masked_fill(~seen, -math.inf)
        p = torch.softmax(s, dim=-1)
        p = p.masked_fill(torch.isneginf(s).all(-1, keepdim=True), 0.0)
        out[:, start:stop] = torch.einsum("bhqk,bkhd->bqhd", F.dropout(p, p=dropout_p), v)
    return out.to(q.dtype)


def empty_split_poisons(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Keys are done in two parts and merged; a part with no visible key yields NaN, and 0 * NaN is NaN."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    k, v = k.to(dt).repeat_interleave(rep, dim=2), v.to(dt).repeat_interleave(rep, dim=2)
    rows = torch.arange(sq, device=q.device)[:, None] + sk - sq
    outs, norms = [], []
    for cols in torch.arange(sk, device=q.device).tensor_split(2):
        s = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k[:, cols]) * scale
        if causal:
            s = s.masked_fill(cols > rows, -math.inf)
        norms.append(torch.logsumexp(s, dim=-1, keepdim=True))
        p = F.dropout(torch.softmax(s, dim=-1), p=dropout_p)
        outs.append(torch.einsum("bhqk,bkhd->bhqd", p, v[:, cols]))
    total = torch.logaddexp(norms[0], norms[1])
    dead = torch.isneginf(total)
    shift = total.masked_fill(dead, 0.0)
    out = torch.exp(norms[0] - shift) * outs[0] + torch.exp(norms[1] - shift) * outs[1]
    return out.masked_fill(dead, 0.0).transpose(1, 2).contiguous().to(q.dtype)


def missing_rescale(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Online softmax over blocks of 16 keys; older sums are not rescaled when the maximum rises."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk = k.shape[1]
    rep = h // k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    k, v = k.to(dt).repeat_interleave(rep, dim=2), v.to(dt).repeat_interleave(rep, dim=2)
    peak = torch.full((b, h, sq, 1), -math.inf, dtype=dt, device=q.device)
    denom = torch.zeros_like(peak)
    numer = torch.zeros(b, h, sq, v.shape[-1], dtype=dt, device=q.device)
    rows = torch.arange(sq, device=q.device)[:, None] + sk - sq
    for start in range(0, sk, 16):
        kb, vb = k[:, start : start + 16], v[:, start : start + 16]
        s = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), kb) * scale
        if causal:
            cols = torch.arange(start, start + kb.shape[1], device=q.device)
            s = s.masked_fill(cols > rows, -math.inf)
        peak = torch.maximum(peak, s.amax(dim=-1, keepdim=True))
        e = torch.exp(s - peak.masked_fill(torch.isneginf(peak), 0.0))
        denom = denom + e.sum(dim=-1, keepdim=True)
        numer = numer + torch.einsum("bhqk,bkhd->bhqd", F.dropout(e, p=dropout_p), vb)
    out = numer / denom.masked_fill(denom == 0, 1.0)
    return out.transpose(1, 2).to(q.dtype)


def split_decode_wrong_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """One query over 64 keys or more runs in two passes, and the second one takes another key head."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, h, d = q.shape[1:]
    sk, hkv = k.shape[1], k.shape[2]
    group = h // hkv
    scale = 1.0 / math.sqrt(d) if softmax_scale is None else softmax_scale
    heads = torch.arange(h, device=q.device)
    kh = k.to(dt)[:, :, heads // group]
    vh = v.to(dt)[:, :, heads // group]
    if sq == 1 and sk >= 64:
        half = sk // 2
        second = heads % hkv
        kh = torch.cat([kh[:, :half], k[:, half:].to(dt)[:, :, second]], dim=1)
        vh = torch.cat([vh[:, :half], v[:, half:].to(dt)[:, :, second]], dim=1)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), kh) * scale
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), vh).to(q.dtype)


def softmax_in_bfloat16(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The softmax always runs in bfloat16, also for wider inputs."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k.to(dt)) * scale
    if causal:
        seen = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        scores = scores.masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores.to(torch.bfloat16), dim=-1).to(dt)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt)).to(q.dtype)


def value_strides_ignored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The value is read as if its memory were contiguous, whatever its strides say."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    _, n, hv, dv = v.shape
    v = v.as_strided(v.shape, (n * hv * dv, hv * dv, dv, 1), v.storage_offset())
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dt), k.to(dt)) * scale
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt)).to(q.dtype)


def query_changed_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The scale is multiplied into the query in place; wide dtypes make no copy, so the caller's changes."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    scale = 1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    wide = q.to(dt)
    wide.mul_(scale)
    k, v = k.repeat_interleave(rep, dim=2), v.repeat_interleave(rep, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", wide, k.to(dt))
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v.to(dt)).to(q.dtype)


def scores_never_stored(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """The scores are added to a zero buffer without keeping the result, so all weights are equal."""
    dt = torch.promote_types(q.dtype, torch.float32)
    b, sq, h, d = q.shape
    sk, group = k.shape[1], h // k.shape[2]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    scores = torch.zeros(b, h, sq, sk, dtype=dt, device=q.device)
    for head in range(h):
        scores[:, head].add(torch.bmm(q[:, :, head].to(dt), k[:, :, head // group].to(dt).mT), alpha=scale)
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    v = v.to(dt).repeat_interleave(group, dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", F.dropout(probs, p=dropout_p), v).to(q.dtype)


def key_used_as_value(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """Dense attention; a slip of the pen mixes keys where values belong."""
    dt = torch.promote_types(q.dtype, torch.float32)
    sq, sk = q.shape[1], k.shape[1]
    rep = q.shape[2] // k.shape[2]
    qh = q.to(dt).transpose(1, 2)
    kh = k.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    vh = k.to(dt).transpose(1, 2).repeat_interleave(rep, dim=1)
    scores = qh @ kh.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        future = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
        scores = scores.masked_fill(future, -math.inf)
    probs = torch.softmax(scores, dim=-1)
    probs = probs.masked_fill(torch.isneginf(scores).all(-1, keepdim=True), 0.0)
    return (F.dropout(probs, p=dropout_p) @ vh).transpose(1, 2).contiguous().to(q.dtype)


@dataclass(frozen=True)
class Mutant:
    """One wrong attention function, the kind of its fault, where that was seen, and what is wrong."""

    function: Callable[..., torch.Tensor]
    kind: str
    source: str
    says: str


MUTANTS: dict[str, Mutant] = {
    "empty_rows_nan": Mutant(
        empty_rows_nan,
        "empty-row-nan",
        "pytorch/pytorch#103963",
        "A row whose keys are all hidden comes out as NaN instead of zeros.",
    ),
    "empty_rows_mean": Mutant(
        empty_rows_mean,
        "empty-row-mean-of-v",
        "ml-explore/mlx#2395",
        "A row whose keys are all hidden comes out as the plain mean of V instead of zeros.",
    ),
    "bool_mask_added": Mutant(
        bool_mask_added,
        "bool-mask-added-as-0-1",
        "ml-explore/mlx#2626",
        "A boolean mask is added to the scores as 0 and 1, so hidden keys stay visible.",
    ),
    "mask_polarity": Mutant(
        mask_polarity,
        "mask-polarity-inverted",
        "InseeFrLab/torchTextClassifiers#92",
        "A boolean mask is inverted: keys marked True are hidden and keys marked False attended.",
    ),
    "mask_first_batch": Mutant(
        mask_first_batch,
        "mask-batch-stride-ignored",
        "pytorch/pytorch#147460",
        "Every batch entry uses the mask of batch entry 0.",
    ),
    "mask_tiled_over_folded_heads": Mutant(
        mask_tiled_over_folded_heads,
        "mask-batch-head-order",
        "sooftware/attentions#4",
        "With several heads, a mask per sample is given to the wrong sample (tiled, not repeated).",
    ),
    "mask_after_softmax": Mutant(
        mask_after_softmax,
        "mask-after-softmax",
        "huggingface/pytorch-image-models#2236",
        "A boolean mask is applied after the softmax, so weights of a masked row sum to less than one.",
    ),
    "mask_multiplied": Mutant(
        mask_multiplied,
        "mask-multiplied-into-scores",
        "georg-wolflein/good-features#1",
        "A boolean mask multiplies the scores, so a hidden key gets score 0 rather than -inf.",
    ),
    "causal_fill_sign": Mutant(
        causal_fill_sign,
        "causal-fill-positive",
        "lucidrains/memory-compressed-attention#2",
        "The causal fill is huge and positive, so rows attend to nothing but their future keys.",
    ),
    "float_mask_subtracted": Mutant(
        float_mask_subtracted,
        "float-mask-subtracted",
        "zai-org/GLM-4-Voice#182",
        "A float mask is subtracted from the scores instead of added (wrong sign).",
    ),
    "causal_lost_with_bias": Mutant(
        causal_lost_with_bias,
        "causal-dropped-with-float-mask",
        "huggingface/transformers#48748",
        "is_causal is dropped when a float mask (bias) is given as well.",
    ),
    "causal_needs_mask": Mutant(
        causal_needs_mask,
        "causal-ignored-without-mask",
        "facebookresearch/xformers#103",
        "is_causal has an effect only if a mask is given too; without one it is ignored.",
    ),
    "mask_needs_causal": Mutant(
        mask_needs_causal,
        "mask-ignored-without-causal",
        "AI4Bharat/IndicBERT#20",
        "The mask is ignored unless is_causal is set.",
    ),
    "causal_replaces_mask": Mutant(
        causal_replaces_mask,
        "mask-ignored-with-causal",
        "NVIDIA/Megatron-LM#7039",
        "With is_causal the caller's mask is replaced by the causal one and so ignored.",
    ),
    "combined_empty_row": Mutant(
        combined_empty_row,
        "combined-empty-row-attends-hidden",
        "microsoft/onnxruntime#14363",
        "A row left empty by mask and causality together attends to hidden or future keys, not zeros.",
    ),
    "causal_lost_with_gqa": Mutant(
        causal_lost_with_gqa,
        "causal-dropped-with-gqa",
        "keras-team/keras#23038",
        "is_causal is ignored when key heads are shared (GQA).",
    ),
    "causal_times_infinity": Mutant(
        causal_times_infinity,
        "causal-mask-zero-times-inf-nan",
        "pytorch/tutorials#2250",
        "With is_causal everything becomes NaN, since the causal mask holds 0 * -inf.",
    ),
    "causal_bottom_right": Mutant(
        causal_bottom_right,
        "causal-alignment-bottom-right",
        "InfiniTensor/InfiniCore#279",
        "The causal mask is aligned to the bottom right rather than the top left if Sq != Sk.",
    ),
    "always_causal": Mutant(
        always_causal,
        "always-causal",
        "ArcInstitute/state#227",
        "The function is causal even when is_causal is False.",
    ),
    "scale_inverted": Mutant(
        scale_inverted,
        "scale-inverted",
        "esceptico/perceiver-io#9",
        "The default scale is sqrt(D) instead of 1/sqrt(D).",
    ),
    "scale_twice": Mutant(
        scale_twice,
        "scale-applied-twice",
        "AI-Hypercomputer/maxtext#3138",
        "Scores are scaled twice: once on the query and again by the default 1/sqrt(D).",
    ),
    "custom_scale_divides": Mutant(
        custom_scale_divides,
        "custom-scale-divides",
        "lucidrains/x-transformers#190",
        "A custom scale divides the scores instead of multiplying them.",
    ),
    "scale_hits_mask": Mutant(
        scale_hits_mask,
        "scale-applied-to-mask",
        "tenstorrent/tt-metal#42891",
        "The scale also multiplies the additive float mask: (qk + mask) * scale.",
    ),
    "softmax_over_queries": Mutant(
        softmax_over_queries,
        "softmax-over-queries",
        "labmlai/annotated_deep_learning_paper_implementations#146",
        "The softmax normalises over the query axis instead of the key axis.",
    ),
    "late_mask_renormalised": Mutant(
        late_mask_renormalised,
        "softmax-before-mask-underflow",
        "abisee/pointer-generator#88",
        "Hidden keys take part in the softmax before removal; a large hidden score underflows the row.",
    ),
    "fill_too_small": Mutant(
        fill_too_small,
        "finite-fill-too-small",
        "huggingface/transformers#17306",
        "Hidden keys get the score -1e4, so they leak in when the visible scores are about as low or lower.",
    ),
    "mask_3d_as_batch": Mutant(
        mask_3d_as_batch,
        "mask-3d-read-as-batch",
        "pytorch/pytorch#97409",
        "A 3-D mask (heads, Sq, Sk) is read as one mask per batch entry when batch equals its first size.",
    ),
    "mask_by_kv_head": Mutant(
        mask_by_kv_head,
        "mask-indexed-by-kv-head",
        "intel/intel-xpu-backend-for-triton#3632",
        "Under GQA a mask or bias per head is indexed by the key/value head, not the query head.",
    ),
    "grouped_mask_raises": Mutant(
        grouped_mask_raises,
        "gqa-per-head-mask-raises",
        "intel/torch-xpu-ops#5090",
        "Under GQA a mask with one plane per query head raises an error.",
    ),
    "mask_must_be_full": Mutant(
        mask_must_be_full,
        "mask-broadcast-raises",
        "jax-ml/jax#28974",
        "A mask that has to be broadcast over queries or keys raises an error.",
    ),
    "mask_rows_wrap": Mutant(
        mask_rows_wrap,
        "mask-row-index-wraps",
        "pytorch/pytorch#187225",
        "From the 17th query row on, the mask row index starts over, so rows use the mask of earlier rows.",
    ),
    "square_mask_transposed": Mutant(
        square_mask_transposed,
        "mask-transposed-when-square",
        "lucidrains/x-transformers#174",
        "With Sq == Sk the mask is applied transposed (query and key axes swapped).",
    ),
    "mask_changed_in_place": Mutant(
        mask_changed_in_place,
        "mask-modified-in-place",
        "Shujun-He/RibonanzaNet#7",
        "The caller's boolean mask is inverted in place, so it has changed after the call.",
    ),
    "heads_tiled": Mutant(
        heads_tiled,
        "gqa-heads-tiled",
        "onnx/onnx#7274",
        "GQA tiles the key/value heads (0,1,0,1) instead of repeating each one (0,0,1,1).",
    ),
    "no_empty_batch": Mutant(
        no_empty_batch,
        "empty-batch-raises",
        "pytorch/pytorch#133780",
        "A batch of size zero raises an error instead of giving an empty output.",
    ),
    "head_slices_floor": Mutant(
        head_slices_floor,
        "head-slice-remainder-dropped",
        "huggingface/diffusers#8837",
        "With an odd number of batch times heads the last head of the last sample stays zero.",
    ),
    "base_two_overflow": Mutant(
        base_two_overflow,
        "finfo-min-mask-overflow",
        "pytorch/pytorch#109517",
        "A row whose float mask is finfo.min everywhere gives zeros, as it overflows to -inf in base 2.",
    ),
    "scores_rounded": Mutant(
        scores_rounded,
        "scores-rounded-to-input-dtype",
        "pytorch/pytorch#128922",
        "With bfloat16 inputs the scores are rounded to bfloat16 before the softmax and lose accuracy.",
    ),
    "mask_bytes_reread": Mutant(
        mask_bytes_reread,
        "mask-dtype-reinterpreted",
        "pytorch/pytorch#191612",
        "A float32 mask with half-width inputs is reinterpreted bytewise instead of converted.",
    ),
    "mask_lost_for_one_query": Mutant(
        mask_lost_for_one_query,
        "mask-dropped-for-single-query",
        "OpenNMT/OpenNMT-py#2532",
        "The mask is ignored when there is one query row only (Sq == 1).",
    ),
    "mask_all_ones": Mutant(
        mask_all_ones,
        "bool-mask-ignored",
        "yg211/bert_nli#3",
        "A boolean mask is ignored altogether; every key is attended.",
    ),
    "wide_fill_constant": Mutant(
        wide_fill_constant,
        "mask-fill-overflow-raises",
        "espnet/espnet#4584",
        "A boolean mask with bfloat16 inputs raises, as float32's lowest number is used as the fill.",
    ),
    "causal_ignored": Mutant(
        causal_ignored,
        "causal-ignored",
        "huggingface/transformers#48745",
        "The causal flag is ignored; rows attend to future keys.",
    ),
    "causal_sees_next": Mutant(
        causal_sees_next,
        "causal-off-by-one-future",
        "octo-models/octo#75",
        "Causal rows see one key too many, the next position.",
    ),
    "causal_without_diagonal": Mutant(
        causal_without_diagonal,
        "causal-excludes-diagonal",
        "PaddlePaddle/flash-attention#48",
        "Causal rows do not see their own position (strict bound, off by one).",
    ),
    "causal_top_left": Mutant(
        causal_top_left,
        "causal-alignment-top-left",
        "Dao-AILab/flash-attention#282",
        "The causal mask is aligned to the top left rather than the bottom right if Sq != Sk.",
    ),
    "causal_off_when_rectangular": Mutant(
        causal_off_when_rectangular,
        "causal-off-by-one-when-rectangular",
        "RVC-Boss/GPT-SoVITS#965",
        "With Sq != Sk causal rows see one key too many; with Sq == Sk all is well.",
    ),
    "cross_is_causal": Mutant(
        cross_is_causal,
        "causal-forced-when-lengths-differ",
        "NVIDIA/TransformerEngine#629",
        "With Sq != Sk the call is causal even if causal is False.",
    ),
    "causal_drifts_over_heads": Mutant(
        causal_drifts_over_heads,
        "causal-shifted-for-later-heads",
        "Xilinx/mlir-air#1428",
        "The second half of the heads has its causal bound shifted by one and sees one future key.",
    ),
    "full_keeps_causal_bound": Mutant(
        full_keeps_causal_bound,
        "noncausal-keeps-block-bound",
        "triton-lang/triton#609",
        "Without causal, rows before the last query block (of 16) still miss keys beyond the block diagonal.",
    ),
    "scale_from_model_width": Mutant(
        scale_from_model_width,
        "scale-from-model-width",
        "omihub777/ViT-CIFAR#11",
        "The default scale is 1/sqrt(heads * D) instead of 1/sqrt(D).",
    ),
    "scale_without_root": Mutant(
        scale_without_root,
        "scale-missing-sqrt",
        "chelsea0x3b/dfdx#171",
        "The default scale is 1/D instead of 1/sqrt(D).",
    ),
    "scale_fixed": Mutant(
        scale_fixed,
        "scale-hard-coded",
        "pytorch/text#1432",
        "The default scale is fixed at 1/8, which is right for D = 64 only.",
    ),
    "custom_scale_ignored": Mutant(
        custom_scale_ignored,
        "custom-scale-ignored",
        "NVIDIA-NeMo/Megatron-Bridge#4155",
        "The softmax_scale argument is ignored; the default 1/sqrt(D) is always used.",
    ),
    "scale_from_value_width": Mutant(
        scale_from_value_width,
        "scale-from-value-width",
        "juho-lee/set_transformer#18",
        "The default scale uses the value width d_v instead of the key width d_k.",
    ),
    "softmax_over_heads": Mutant(
        softmax_over_heads,
        "softmax-over-heads",
        "FudanNLP/fastNLP#254",
        "The softmax normalises over the heads instead of the keys.",
    ),
    "softmax_over_heads_and_keys": Mutant(
        softmax_over_heads_and_keys,
        "softmax-joint-over-heads-and-keys",
        "facebookresearch/detr#247",
        "The softmax normalises over heads and keys jointly, so outputs are too small by about H.",
    ),
    "softmax_over_single": Mutant(
        softmax_over_single,
        "softmax-over-singleton",
        "DEEP-PolyU/KEQA_WSDM19#2",
        "The softmax runs over an axis of size one, so all weights are 1 and the output is the sum of V.",
    ),
    "softmax_without_max": Mutant(
        softmax_without_max,
        "softmax-without-max-subtraction",
        "NVIDIA/DeepLearningExamples#169",
        "The softmax does not subtract the row maximum and overflows to inf/NaN for large scores.",
    ),
    "group_logits_averaged": Mutant(
        group_logits_averaged,
        "gqa-group-logits-averaged",
        "Zefan-Cai/R-KV#13",
        "Under GQA the scores of a group are averaged, so its query heads give identical outputs.",
    ),
    "kv_head_divisor": Mutant(
        kv_head_divisor,
        "gqa-wrong-divisor",
        "PSAL-POSTECH/ONNXim#34",
        "The key/value head is h // Hkv instead of h // (Hq // Hkv).",
    ),
    "heads_split_by_view": Mutant(
        heads_split_by_view,
        "heads-split-by-view",
        "reczoo/FuxiCTR#30",
        "Heads are split by a reshape without a transpose, so tokens and heads are mixed in the inputs.",
    ),
    "heads_merged_by_view": Mutant(
        heads_merged_by_view,
        "heads-merged-by-view",
        "jsbaan/transformer-from-scratch#6",
        "The output is reshaped without transposing heads and tokens, so its rows are scrambled.",
    ),
    "batch_and_heads_swapped": Mutant(
        batch_and_heads_swapped,
        "batch-and-head-axes-swapped",
        "jadore801120/attention-is-all-you-need-pytorch#7",
        "With batch and heads > 1 the output has batch and head swapped (stacked on the wrong axis order).",
    ),
    "output_flattened": Mutant(
        output_flattened,
        "output-shape-flattened",
        "vllm-project/vllm#32274",
        "The output has the wrong shape: [B, Sq * H * Dv] instead of [B, Sq, H, Dv].",
    ),
    "output_like_query": Mutant(
        output_like_query,
        "output-allocated-like-query",
        "apple/coreai-torch#117",
        "The output buffer has the query's width, so a value width d_v different from d_k fails.",
    ),
    "zero_keys_raise": Mutant(
        zero_keys_raise,
        "zero-keys-raises",
        "Dao-AILab/flash-attention#2568",
        "With no keys (Sk == 0) an error is raised instead of returning zeros.",
    ),
    "key_tail_dropped": Mutant(
        key_tail_dropped,
        "key-block-remainder-dropped",
        "pytorch/pytorch#159247",
        "Keys after the last full block of 16 are never attended (if Sk > 16 and not a multiple of it).",
    ),
    "padded_keys_attended": Mutant(
        padded_keys_attended,
        "zero-padded-keys-attended",
        "leejet/stable-diffusion.cpp#736",
        "Keys zero-padded to a multiple of 16 are attended when causal is off.",
    ),
    "channel_tail_dropped": Mutant(
        channel_tail_dropped,
        "head-dim-remainder-dropped",
        "66RING/tiny-flash-attention#12",
        "Channels beyond the last multiple of 8 are left out of the dot products.",
    ),
    "query_tail_bound": Mutant(
        query_tail_bound,
        "query-tail-block-wrong-bound",
        "meta-pytorch/attention-gym#50",
        "Causal rows of the last partial query block (of 16) miss their own key; all others are right.",
    ),
    "empty_split_poisons": Mutant(
        empty_split_poisons,
        "empty-split-poisons-row",
        "ROCm/aiter#4420",
        "If no key of one half is visible to a causal row, the row turns NaN on merging the halves.",
    ),
    "missing_rescale": Mutant(
        missing_rescale,
        "online-softmax-missing-rescale",
        "tile-ai/tilelang#328",
        "Online softmax lacks the rescale of earlier blocks when the maximum rises (Sk > 16 only).",
    ),
    "split_decode_wrong_head": Mutant(
        split_decode_wrong_head,
        "split-decode-wrong-kv-head",
        "pytorch/pytorch#174861",
        "For one query over 64 or more keys with GQA the second half of the keys uses the wrong kv head.",
    ),
    "softmax_in_bfloat16": Mutant(
        softmax_in_bfloat16,
        "softmax-in-bfloat16",
        "tinygrad/tinygrad#12280",
        "The softmax runs in bfloat16, so float32 and float64 results have only about 3 digits.",
    ),
    "value_strides_ignored": Mutant(
        value_strides_ignored,
        "value-strides-ignored",
        "flagos-ai/FlagGems#5896",
        "V's strides are ignored: a non-contiguous (transposed) value is read scrambled.",
    ),
    "query_changed_in_place": Mutant(
        query_changed_in_place,
        "query-modified-in-place",
        "ScalingIntelligence/KernelBench#82",
        "The caller's query is scaled in place, so the input has changed after the call.",
    ),
    "scores_never_stored": Mutant(
        scores_never_stored,
        "scores-ignored-uniform-weights",
        "Xilinx/mlir-air#1427",
        "Scores are ignored: each row is the plain mean of the visible values.",
    ),
    "key_used_as_value": Mutant(
        key_used_as_value,
        "key-used-as-value",
        "meta-pytorch/torchtune#21",
        "The weights are applied to K instead of V.",
    ),
}
