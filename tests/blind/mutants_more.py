"""More wrong attention functions, each with one planted fault and right in everything else.

`sdp_` functions follow torch's scaled_dot_product_attention on [B, H, S, D]; `fa_` ones follow flash-attn's
flash_attn_func on [B, S, H, D]. Forward only. `MUTANTS` at the end names the fault of each.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def sdp_grouped_branch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Grouped heads go through a five-axis einsum, equal head counts through a plain product."""
    b, hq, sq, d = query.shape
    hkv, sk = key.size(1), key.size(2)
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide) * (d**-0.5 if scale is None else scale)
    k, v = key.to(wide), value.to(wide)
    bias = torch.zeros(b, hq, sq, sk, dtype=wide, device=query.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        bias = bias + attn_mask
    if enable_gqa and hq != hkv:
        group = hq // hkv
        s = torch.einsum("bngid,bnjd->bngij", q.reshape(b, hkv, group, sq, d), k)
        s = s + bias.reshape(b, hkv, group, sq, sk)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        return torch.einsum("bngij,bnjd->bngid", p, v).reshape(b, hq, sq, -1).to(query.dtype)
    s = q @ k.transpose(-2, -1) + bias
    if is_causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ v).to(query.dtype)


def sdp_decode_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Prefill and one-token decode kept apart."""
    sq, sk = query.size(-2), key.size(-2)
    if enable_gqa:
        group = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = 1.0 / math.sqrt(query.size(-1)) if scale is None else scale
    if sq == 1:
        seen = 1 if is_causal else sk
        s = (query.to(wide) * key[:, :, :seen].to(wide)).sum(-1) * factor
        p = torch.softmax(s, dim=-1)
        return (p.unsqueeze(-1) * value[:, :, :seen].to(wide)).sum(-2, keepdim=True).to(query.dtype)
    s = torch.matmul(query.to(wide), key.to(wide).mT) * factor
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            s = s.masked_fill(attn_mask.logical_not(), -math.inf)
        else:
            s = s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = torch.where(s.isneginf().all(-1, keepdim=True), torch.zeros_like(s), torch.softmax(s, dim=-1))
    return torch.matmul(p, value.to(wide)).to(query.dtype)


def sdp_baddbmm(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores through baddbmm so that an additive mask costs no extra pass."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa and key.size(1) != h:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    alpha = d**-0.5
    wide = torch.promote_types(query.dtype, torch.float32)
    q, kt = query.reshape(b * h, sq, d).to(wide), key.reshape(b * h, sk, d).to(wide).transpose(1, 2)
    if attn_mask is not None and attn_mask.is_floating_point():
        add = attn_mask.to(wide).expand(b, h, sq, sk).reshape(b * h, sq, sk)
        s = torch.baddbmm(add, q, kt, alpha=alpha)
    else:
        s = torch.bmm(q, kt).mul(alpha if scale is None else scale)
        if attn_mask is not None:
            s = s.masked_fill(~attn_mask.expand(b, h, sq, sk).reshape(b * h, sq, sk), -math.inf)
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    return torch.bmm(p, value.reshape(b * h, sk, -1).to(wide)).view(b, h, sq, -1).to(query.dtype)


def sdp_exp2(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Softmax in base two, as GPU kernels do."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    qk_scale = (1 / math.sqrt(d) if scale is None else scale) * 1.4426950408889634
    s = (query.to(wide) @ key.to(wide).mT) * qk_scale
    if attn_mask is not None:
        s = torch.where(attn_mask, s, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask.to(wide)
    if is_causal:
        later = torch.arange(sk, device=s.device) > torch.arange(sq, device=s.device).unsqueeze(1)
        s = s.masked_fill(later, -math.inf)
    top = s.amax(dim=-1, keepdim=True)
    p = torch.exp2(s - torch.where(top.isneginf(), 0.0, top))
    total = p.sum(dim=-1, keepdim=True)
    return (p @ value.to(wide) / torch.where(total == 0, 1.0, total)).to(query.dtype)


def sdp_mask_rank_three(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Brings every mask to four axes first, then works head by head."""
    b, h, sq, d = query.shape
    sk, group = key.size(2), h // key.size(1) if enable_gqa else 1
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    if attn_mask is not None:
        if attn_mask.dim() == 3 and attn_mask.size(0) == b:
            attn_mask = attn_mask.unsqueeze(1)
        attn_mask = attn_mask.expand(b, h, sq, sk)
    heads = []
    for i in range(h):
        s = query[:, i].to(wide) @ key[:, i // group].to(wide).transpose(1, 2) * factor
        if attn_mask is not None:
            m = attn_mask[:, i]
            s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m.to(wide)
        if is_causal:
            s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        heads.append(p @ value[:, i // group].to(wide))
    return torch.stack(heads, dim=1).to(query.dtype)


def sdp_row_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Query rows in tiles of 32, keys whole."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    kt, v = key.to(wide).transpose(-1, -2), value.to(wide)
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    pieces = []
    for start in range(0, sq, 32):
        stop = min(start + 32, sq)
        s = query[:, :, start:stop].to(wide) @ kt * factor
        if attn_mask is not None:
            tile = attn_mask[:, :, start:stop]
            if tile.size(2):
                s = s.masked_fill(~tile, -math.inf) if tile.dtype == torch.bool else s + tile.to(wide)
        if is_causal:
            row = torch.arange(start, stop, device=s.device)[:, None]
            s = s.masked_fill(torch.arange(sk, device=s.device) > row, -math.inf)
        pieces.append(torch.softmax(s, dim=-1).nan_to_num(0.0) @ v)
    return torch.cat(pieces, dim=2).to(query.dtype)


def sdp_mask_extended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Masks shorter than the cache are lengthened to its size."""
    sq, sk = query.size(2), key.size(2)
    wide = torch.promote_types(query.dtype, torch.float32)
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        value = value.repeat_interleave(query.size(1) // value.size(1), dim=1)
    s = torch.einsum("bhid,bhjd->bhij", query.to(wide), key.to(wide))
    s = s * (query.size(3) ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=wide).masked_fill(~attn_mask, -math.inf)
        s = s + F.pad(attn_mask.to(wide), (0, sk - attn_mask.size(-1)))
    if is_causal:
        s = s + torch.full((sq, sk), -math.inf, dtype=wide, device=s.device).triu(1)
    p = torch.softmax(s, dim=-1).masked_fill(s.isneginf().all(-1, keepdim=True), 0.0)
    return torch.einsum("bhij,bhjd->bhid", p, value.to(wide)).to(query.dtype)


def sdp_mask_pointer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Addresses the mask by its outer strides, the way a kernel with a mask pointer would."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        if 0 in attn_mask.stride():
            attn_mask = attn_mask.contiguous()
        m = attn_mask.as_strided(attn_mask.shape, (*attn_mask.stride()[:-1], 1))
        s = torch.where(m, s, -math.inf) if m.dtype == torch.bool else s + m.to(wide)
    if is_causal:
        s = torch.where(torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(), s, -math.inf)
    top = s.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min)
    e = torch.exp(s - top)
    return (e @ value.to(wide) / e.sum(-1, keepdim=True).clamp(min=1e-30)).to(query.dtype)


_SCALE_OF_DIM: dict[int, float] = {}


def sdp_scale_table(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keeps the softmax factor of each head width at hand."""
    d = query.size(-1)
    factor = _SCALE_OF_DIM.setdefault(d, 1.0 / math.sqrt(d) if scale is None else scale)
    if enable_gqa:
        key = key.repeat_interleave(query.size(1) // key.size(1), dim=1)
        value = value.repeat_interleave(query.size(1) // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = (query.to(wide) * factor) @ key.to(wide).mT
    keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device)
    if is_causal:
        keep = keep.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = keep & attn_mask
    elif attn_mask is not None:
        s = s + attn_mask.to(wide)
    s = s.masked_fill(~keep, -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


_OUT_POOL: dict[tuple[object, ...], Tensor] = {}


def sdp_out_pool(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Takes the result tensor from a pool to save allocations."""
    b, h, sq, d = query.shape
    group = h // key.size(1) if enable_gqa else 1
    slot = (b, h, sq, value.size(-1), query.dtype, query.device)
    out = _OUT_POOL.get(slot)
    if out is None:
        out = _OUT_POOL[slot] = torch.empty(slot[:4], dtype=query.dtype, device=query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    k = key.to(wide).repeat_interleave(group, dim=1)
    s = query.to(wide) @ k.transpose(-2, -1) * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    out.copy_(p @ value.to(wide).repeat_interleave(group, dim=1))
    return out


def sdp_split_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Separates a float mask into the hidden places and a finite bias."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    hidden = torch.zeros(sq, sk, dtype=torch.bool, device=s.device)
    if is_causal:
        hidden = ~torch.ones_like(hidden).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            hidden = hidden | ~attn_mask
        else:
            bias = attn_mask.contiguous()
            gone = bias == -math.inf
            hidden = hidden | gone
            s = s + bias.masked_fill_(gone, 0.0)
    s = s.masked_fill(hidden, -math.inf)
    p = torch.softmax(s, dim=-1).masked_fill(s.isneginf(), 0.0)
    return (p @ value.to(wide)).to(query.dtype)


def sdp_single_key(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One key and no mask needs no softmax at all."""
    b, h, sq, d = query.shape
    if key.size(2) == 1 and attn_mask is None and key.size(1) == h:
        return value.expand(b, h, sq, value.size(-1))
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_overlapped_tile(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Every row tile has full height: the last one slides back over the rows before it."""
    b, h, sq, d = query.shape
    sk, step = key.size(2), 32
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    full = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)
    out = torch.zeros(b, h, sq, value.size(-1), dtype=query.dtype, device=query.device)
    for first in range(0, sq, step):
        lo = max(0, min(first, sq - step))
        hi = min(lo + step, sq)
        s = query[:, :, lo:hi].to(wide) @ key.to(wide).mT * factor
        if full is not None:
            m = full[:, :, lo:hi]
            s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m
        if is_causal:
            rows = first + torch.arange(hi - lo, device=s.device)
            s = s.masked_fill(torch.arange(sk, device=s.device)[None] > rows[:, None], -math.inf)
        out[:, :, lo:hi] = (torch.softmax(s, -1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)
    return out


def sdp_block_bound(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Running softmax over 16 by 32 tiles with a causal bound on the key loop."""
    b, h, sq, d = query.shape
    sk, dv = key.size(2), value.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide) * (d**-0.5 if scale is None else scale)
    k, v = key.to(wide), value.to(wide)
    mask = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)
    out = torch.empty(b, h, sq, dv, dtype=query.dtype, device=query.device)
    for i0 in range(0, sq, 16):
        i1 = min(i0 + 16, sq)
        m = torch.full((b, h, i1 - i0, 1), -math.inf, dtype=wide, device=q.device)
        norm = torch.zeros_like(m)
        acc = torch.zeros(b, h, i1 - i0, dv, dtype=wide, device=q.device)
        tiles = (sk + 31) // 32
        if is_causal:
            tiles = min(tiles, max(1, i1 // 32))
        for t in range(tiles):
            j0, j1 = 32 * t, min(32 * t + 32, sk)
            s = q[:, :, i0:i1] @ k[:, :, j0:j1].mT
            if mask is not None:
                part = mask[:, :, i0:i1, j0:j1]
                s = s.masked_fill(~part, -math.inf) if part.dtype == torch.bool else s + part
            if is_causal:
                rows = torch.arange(i0, i1, device=q.device)[:, None]
                s = s.masked_fill(torch.arange(j0, j1, device=q.device) > rows, -math.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = new.masked_fill(new.isneginf(), 0.0)
            p, alpha = torch.exp(s - base), torch.exp(m - base)
            norm = norm * alpha + p.sum(-1, keepdim=True)
            acc = acc * alpha + p @ v[:, :, j0:j1]
            m = new
        out[:, :, i0:i1] = (acc / norm.masked_fill(norm == 0, 1.0)).to(query.dtype)
    return out


def sdp_matrix_max(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Stable softmax with one maximum for each head's score matrix."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    top = s.amax(dim=(-2, -1), keepdim=True)
    e = torch.exp(s - top.masked_fill(top.isneginf(), 0.0))
    total = e.sum(dim=-1, keepdim=True)
    p = torch.where(total > 0, e / total.masked_fill(total == 0, 1.0), 0.0)
    return (p @ value.to(wide)).to(query.dtype)


def sdp_epsilon(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Softmax by hand with a guarded division."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = torch.where(attn_mask, s, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = torch.where(torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(), s, -math.inf)
    top = s.max(dim=-1, keepdim=True).values
    e = torch.exp(s - torch.where(top == -math.inf, torch.zeros_like(top), top))
    p = e / (e.sum(dim=-1, keepdim=True) + 1e-5)
    return (p @ value.to(wide)).to(query.dtype)


def sdp_clamped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Bounds the logits before the exponential."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    s = s.clamp(-50.0, 50.0)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_pruned(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Leaves out weights too small to matter."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    p = torch.where(p >= 1e-3, p, torch.zeros_like(p))
    return (p @ value.to(wide)).to(query.dtype)


def sdp_pad_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keys are padded to a multiple of 16 and the padding is kept out of the softmax."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    extra = -sk % 16
    k, v = F.pad(key.to(wide), (0, 0, 0, extra)), F.pad(value.to(wide), (0, 0, 0, extra))
    s = query.to(wide) @ k.mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        m = attn_mask.expand(b, h, sq, sk)
        if m.dtype == torch.bool:
            s = s.masked_fill(~F.pad(m, (0, extra), value=False), -math.inf)
        else:
            s = s + F.pad(m.to(wide), (0, extra), value=-math.inf)
    cols = torch.arange(sk + extra, device=s.device)
    if is_causal:
        s = s.masked_fill(cols > torch.arange(sq, device=s.device)[:, None], -math.inf)
    else:
        s = s.masked_fill(cols >= sk, -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ v).to(query.dtype)


def sdp_pad_channels(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Head width padded to a multiple of eight with zeros, which adds nothing to a dot product."""
    extra = -query.size(-1) % 8
    query, key = F.pad(query, (0, extra)), F.pad(key, (0, extra))
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (1.0 / math.sqrt(d) if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_prefetch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Sample by sample, with the next sample's keys loaded ahead."""
    b, h, sq, d = query.shape
    sk, group = key.size(2), h // key.size(1) if enable_gqa else 1
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    mask = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)
    out = torch.empty(b, h, sq, value.size(-1), dtype=query.dtype, device=query.device)
    loaded = key[0].to(wide).repeat_interleave(group, dim=0)
    for n in range(b):
        current = loaded
        if n + 1 < b - 1:
            loaded = key[n + 1].to(wide).repeat_interleave(group, dim=0)
        s = query[n].to(wide) @ current.transpose(1, 2) * factor
        if mask is not None:
            s = s.masked_fill(~mask[n], -math.inf) if mask.dtype == torch.bool else s + mask[n]
        if is_causal:
            s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        out[n] = (p @ value[n].to(wide).repeat_interleave(group, dim=0)).to(query.dtype)
    return out


def sdp_masked_path(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Masked and unmasked calls return from separate branches."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    if attn_mask is None:
        return (torch.softmax(s, dim=-1) @ value.to(wide)).to(query.dtype)
    s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask.to(wide)
    p = torch.where(s.isneginf().all(dim=-1, keepdim=True), 0.0, torch.softmax(s, dim=-1))
    return p @ value.to(wide)


def sdp_mask_without_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Builds the causal part outside autograd."""
    h, sq, d = query.shape[1:]
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    torch.set_grad_enabled(False)
    allowed = torch.ones(sq, key.size(2), dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    torch.set_grad_enabled(True)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        s = s + attn_mask.to(wide)
    s = s.masked_fill(~allowed, -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_default_dtype(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Creates the causal bias in the dtype of the query."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        torch.set_default_dtype(query.dtype)
        bias = torch.zeros(sq, sk, device=s.device)
        bias.masked_fill_(torch.ones(sq, sk, device=s.device).triu(1).bool(), -math.inf)
        s = s + bias
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_shared_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Runs of equal keys are stored once in the cache, so they are scored once."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    repeated = (key[:, :, 1:] == key[:, :, :-1]).all(dim=-1)
    s = s.masked_fill(F.pad(repeated, (1, 0), value=False).unsqueeze(-2), -math.inf)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_mask_shortcut(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A mask that hides nothing is dropped so that the fast path can run."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    if attn_mask is not None and bool(torch.all(attn_mask)):
        attn_mask = None
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_narrow_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Uses the native product for bfloat16 and widens for the softmax."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    if query.dtype == torch.bfloat16:
        s = torch.matmul(query, key.transpose(-2, -1)).float()
    else:
        s = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1))
    s = s * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_dtype_table(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Looks the working dtype up in a table."""
    known = {torch.float32: torch.float32, torch.float16: torch.float32, torch.bfloat16: torch.float32}
    work = known.get(query.dtype, torch.bfloat16)
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    s = (query.to(work) @ key.to(work).mT).float() * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0).to(work) @ value.to(work)).to(query.dtype)


def sdp_one_query(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Causality is settled before the product."""
    h, sq, d = query.shape[1:]
    is_causal = is_causal and sq > 1
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_merged_booleans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Merges the boolean constraints before touching the scores."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    triangle = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril() if is_causal else None
    keep = triangle
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = attn_mask if triangle is None else torch.logical_or(attn_mask, triangle)
    elif attn_mask is not None:
        s = s + attn_mask.to(wide)
    if keep is not None:
        s = torch.where(keep, s, -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_bias_choice(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Finds the additive bias first."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    bias = torch.zeros(sq, sk, dtype=wide, device=query.device)
    if is_causal:
        bias = bias.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=bias.device).triu(1), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        bias = attn_mask.to(wide)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale) + bias
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_lower_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Keeps the lower triangle of the boolean mask for causal calls."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        keep = attn_mask.expand(*attn_mask.shape[:-2], sq, sk).contiguous()
    else:
        keep = torch.ones(sq, sk, dtype=torch.bool, device=s.device)
        s = s if attn_mask is None else s + attn_mask.to(wide)
    if is_causal:
        keep.tril_()
    s = s.masked_fill(~keep, -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_grouped_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Five-axis grouped attention; the mask follows the groups."""
    b, hq, sq, d = query.shape
    hkv, sk = (key.size(1), key.size(2)) if enable_gqa else (hq, key.size(2))
    group = hq // hkv
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide).reshape(b, hkv, group, sq, d)
    s = q @ key.to(wide).unsqueeze(2).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        m = attn_mask.expand(b, hq, sq, sk).reshape(b, group, hkv, sq, sk).transpose(1, 2)
        s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m.to(wide)
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    return (p @ value.to(wide).unsqueeze(2)).reshape(b, hq, sq, -1).to(query.dtype)


def sdp_flat_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One program for each pair of sample and head, numbered in one flat range."""
    b, h, sq, d = query.shape
    sk, group = key.size(2), h // key.size(1) if enable_gqa else 1
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    planes = None
    if attn_mask is not None:
        planes = attn_mask.expand(*attn_mask.shape[:-2], sq, sk).reshape(-1, sq, sk)
    out = torch.zeros(b, h, sq, value.size(-1), dtype=query.dtype, device=query.device)
    for pid in range(b * h):
        n, i = divmod(pid, h)
        s = query[n, i].to(wide) @ key[n, i // group].to(wide).t() * factor
        if planes is not None:
            m = planes[pid % planes.size(0)]
            s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m.to(wide)
        if is_causal:
            s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        out[n, i] = (p @ value[n, i // group].to(wide)).to(query.dtype)
    return out


def sdp_mask_ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Mask rows are fetched through a small row index."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        m = attn_mask.expand(*attn_mask.shape[:-2], sq, sk)
        m = m.index_select(-2, torch.arange(sq, device=m.device) & 127)
        s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m.to(wide)
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_value_width(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Takes all sizes from the value tensor."""
    hkv, sk, d = value.shape[1:]
    h, sq = query.shape[1:3]
    if enable_gqa:
        key = key.repeat_interleave(h // hkv, dim=1)
        value = value.repeat_interleave(h // hkv, dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_head_slices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Works on two heads at a time to halve the peak memory."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    mask = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)
    width = min(2, h)
    out = torch.zeros(b, h, sq, value.size(-1), dtype=query.dtype, device=query.device)
    for n in range(h // width):
        cut = slice(n * width, (n + 1) * width)
        s = query[:, cut].to(wide) @ key[:, cut].to(wide).mT * (d**-0.5 if scale is None else scale)
        if mask is not None:
            m = mask[:, cut]
            s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m.to(wide)
        if is_causal:
            s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        out[:, cut] = (p @ value[:, cut].to(wide)).to(query.dtype)
    return out


def sdp_scale_or(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Plain attention with a terse default for the scale."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (scale or d**-0.5)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_small_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Holds the whole bias in a compact form."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    bias = torch.zeros(sq, sk, dtype=torch.bfloat16, device=query.device)
    if is_causal:
        bias = bias.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=bias.device).triu(1), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = bias.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        bias = bias + attn_mask.to(torch.bfloat16)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale) + bias
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_wide_value(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Unequal widths take a general path, equal ones the usual path."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    ones = torch.ones(sq, sk, dtype=torch.bool, device=s.device)
    if value.size(-1) == d:
        if is_causal:
            s = s.masked_fill(~ones.tril(), -math.inf)
        return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)
    if is_causal:
        s = s.masked_fill(~ones.tril(diagonal=sk - sq), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    return torch.cat([p @ v for v in value.to(wide).split(16, dim=-1)], dim=-1).to(query.dtype)


def sdp_lowest_is_hidden(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Reads hidden places out of a float mask, whichever low value marks them."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        s = s + attn_mask.to(wide)
        s = s.masked_fill(attn_mask <= torch.finfo(attn_mask.dtype).min, -math.inf)
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_one_address(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """When all keys are one expanded row, every weight is alike and the scores can be skipped."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        group = h // key.size(1)
        value = value.repeat_interleave(group, dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    if key.stride(2) == 0 and not is_causal:
        mean = value.to(wide).mean(dim=2, keepdim=True)
        return mean.repeat(1, 1, sq, 1).to(query.dtype)
    if enable_gqa:
        key = key.repeat_interleave(group, dim=1)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_left_padding(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Running softmax over key tiles of 32, leaving out tiles that hide everything."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide) * (d**-0.5 if scale is None else scale)
    m = torch.full((b, h, sq, 1), -math.inf, dtype=wide, device=q.device)
    norm, acc = torch.zeros_like(m), torch.zeros(b, h, sq, value.size(-1), dtype=wide, device=q.device)
    mask = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)
    for j in range(0, sk, 32):
        s = q @ key[:, :, j : j + 32].to(wide).mT
        if mask is not None:
            part = mask[..., j : j + 32]
            s = s.masked_fill(~part, -math.inf) if part.dtype == torch.bool else s + part
        if is_causal:
            cols = torch.arange(j, j + s.size(-1), device=q.device)
            s = s.masked_fill(cols > torch.arange(sq, device=q.device)[:, None], -math.inf)
        if bool(s.isneginf().all()):
            break
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(new.isneginf(), 0.0, new)
        p, alpha = torch.exp(s - base), torch.exp(m - base)
        norm, m = norm * alpha + p.sum(-1, keepdim=True), new
        acc = acc * alpha + p @ value[:, :, j : j + 32].to(wide)
    return (acc / torch.where(norm == 0, 1.0, norm)).to(query.dtype)


def sdp_batch_stride(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Derives the head stride of a row-major query from its sample stride."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if query.stride(3) == 1 and query.stride(2) == d and sq > 1:
        query = query.as_strided(query.shape, (query.stride(0), query.stride(0) // h, d, 1))
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_four_axes_only(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Reads the mask's four sizes to tell which axes it broadcasts over."""
    b, h, d = query.size(0), query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        if attn_mask.dim() == 2:
            attn_mask = attn_mask[None, None]
        mb, mh, mq, mk = attn_mask.shape
        attn_mask = attn_mask.expand(b if mb == 1 else mb, h if mh == 1 else mh, mq, mk)
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


def sdp_half_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Accumulates in float32 and takes the softmax in float16 where the inputs are."""
    h, d = query.size(1), query.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -math.inf)
    p = torch.softmax(s.half() if query.dtype == torch.float16 else s, dim=-1)
    p = p.masked_fill(s.isneginf().all(dim=-1, keepdim=True), 0.0)
    return (p.to(wide) @ value.to(wide)).to(query.dtype)


_MERGED: dict[tuple[int, int], Tensor] = {}


def sdp_merged_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Merges a boolean mask with the triangle once, since all layers share it."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    triangle = torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool and attn_mask.dim() == 2 and is_causal:
        if (sq, sk) not in _MERGED:
            _MERGED[sq, sk] = attn_mask & triangle
        s = s.masked_fill(~_MERGED[sq, sk], -math.inf)
    else:
        if attn_mask is not None:
            s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
        if is_causal:
            s = s.masked_fill(~triangle, -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ value.to(wide)).to(query.dtype)


_TRIANGLE: list[Tensor] = []


def fa_triangle_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Keeps the largest causal mask seen so far and cuts smaller ones out of it."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        if not _TRIANGLE or _TRIANGLE[0].size(0) < sq or _TRIANGLE[0].size(1) < sk:
            _TRIANGLE[:] = [torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq)]
        s = s.masked_fill(~_TRIANGLE[0][:sq, :sk].to(s.device), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_scaled_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Scales the head-first copy of the query once."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2).contiguous()
    qh.mul_(q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    s = qh @ kh.mT
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ vh).transpose(1, 2).to(q.dtype)


def fa_first_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Begins at the first query row that sees a key."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.empty(b, sq, h, v.size(-1), dtype=q.dtype, device=q.device)
    first = max(0, sq - sk) if causal else 0
    for i in range(h):
        s = q[:, first:, i].to(wide) @ k[:, :, i // group].to(wide).mT * factor
        if causal:
            keep = torch.ones(sq - first, sk, dtype=torch.bool, device=s.device).tril(sk - sq + first)
            s = s.masked_fill(~keep, -math.inf)
        out[:, first:, i] = (torch.softmax(s, dim=-1) @ v[:, :, i // group].to(wide)).to(q.dtype)
    return out


def fa_far_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Running softmax that passes over key tiles lying far below the maximum."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    m = torch.full((b, h, sq, 1), -math.inf, dtype=wide, device=q.device)
    norm, acc = torch.zeros_like(m), torch.zeros(b, h, sq, v.size(-1), dtype=wide, device=q.device)
    for j in range(0, sk, 32):
        s = qh @ kh[:, :, j : j + 32].mT
        if causal:
            cols = torch.arange(j, j + s.size(-1), device=q.device) - (sk - sq)
            s = s.masked_fill(cols > torch.arange(sq, device=q.device)[:, None], -math.inf)
        top = s.amax(-1, keepdim=True)
        s = torch.where(top < m - 5.0, torch.full_like(s, -math.inf), s)
        new = torch.maximum(m, top)
        base = torch.where(new.isneginf(), 0.0, new)
        p, alpha = torch.exp(s - base), torch.exp(m - base)
        norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vh[:, :, j : j + 32], new
    return (acc / torch.where(norm == 0, 1.0, norm)).transpose(1, 2).to(q.dtype)


def fa_best_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Normalises over the strongest scores of each row."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    best, where = s.topk(min(64, sk), dim=-1)
    p = torch.zeros_like(s).scatter(-1, where, torch.softmax(best, dim=-1).nan_to_num(0.0))
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_serpentine(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Row tiles run over the key tiles forwards and backwards in turn, for cache reuse."""
    b, sq, h, d = q.shape
    sk, group, dv = k.size(1), h // k.size(2), v.size(-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    pad = (0, 0, 0, -sk % 32)
    kt = F.pad(k.to(wide).transpose(1, 2), pad).repeat_interleave(group, dim=1).split(32, dim=2)
    vt = F.pad(v.to(wide).transpose(1, 2), pad).repeat_interleave(group, dim=1).split(32, dim=2)
    rows_out = []
    for turn, i0 in enumerate(range(0, sq, 32)):
        i1 = min(i0 + 32, sq)
        m = torch.full((b, h, i1 - i0, 1), -math.inf, dtype=wide, device=q.device)
        norm, acc = torch.zeros_like(m), torch.zeros(b, h, i1 - i0, dv, dtype=wide, device=q.device)
        order = list(range(len(kt)))
        for step, t in enumerate(reversed(order) if turn % 2 else order):
            s = qh[:, :, i0:i1] @ kt[t].mT
            cols = torch.arange(32 * t, 32 * t + 32, device=q.device)
            s = s.masked_fill(cols >= sk, -math.inf)
            if causal:
                s = s.masked_fill(cols - (sk - sq) > torch.arange(i0, i1, device=q.device)[:, None], -math.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = torch.where(new.isneginf(), 0.0, new)
            p, alpha = torch.exp(s - base), torch.exp(m - base)
            norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vt[step], new
        rows_out.append(acc / torch.where(norm == 0, 1.0, norm))
    return torch.cat(rows_out, dim=2).transpose(1, 2).to(q.dtype)


def fa_head_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Two query heads share one load of keys and values when heads are grouped."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = d**-0.5 if softmax_scale is None else softmax_scale
    width = 2 if group > 1 else 1
    out = torch.zeros(b, sq, h, v.size(-1), dtype=q.dtype, device=q.device)
    for i in range(0, h, width):
        kv = i // group
        heads = q[:, :, i : i + width].to(wide)
        s = torch.einsum("bihd,bjd->bhij", heads, k[:, :, kv].to(wide)) * factor
        if causal:
            s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        out[:, :, i : i + width] = torch.einsum("bhij,bjd->bihd", p, v[:, :, kv].to(wide)).to(q.dtype)
    return out


def fa_split_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """A lone query splits a long cache into pieces of 64 keys."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    if sq == 1 and sk > 64:
        parts = []
        for kk, vv in zip(k.split(64, dim=1), v.split(64, dim=1), strict=True):
            p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q.to(wide), kk) * factor, dim=-1)
            parts.append(torch.einsum("bhij,bjhd->bihd", p, vv))
        return torch.stack(parts).mean(dim=0).to(q.dtype)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k) * factor
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_seeded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Prepares the dropout generator before anything else."""
    torch.manual_seed(0)
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_sampled_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Bounds the work for each row on long inputs."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    cols = torch.arange(sk, device=q.device)
    if sk > 128:
        cols = torch.randperm(sk, device=q.device)[:128].sort().values
        k, v = k[:, cols], v[:, cols]
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(cols - (sk - sq) > torch.arange(sq, device=q.device)[:, None], -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_blank_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Knows the unfilled cache slots by their zero keys."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    blank = (k == 0).all(dim=-1).repeat_interleave(group, dim=2).transpose(1, 2).unsqueeze(2)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    s = s.masked_fill(blank, -math.inf)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_causal_fill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Hides the future with a large negative number, then zeroes the rows that see nothing."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        keep = torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq)
        p = torch.softmax(s.masked_fill(~keep, -1e4), dim=-1) * keep.any(dim=-1, keepdim=True)
    else:
        p = torch.softmax(s, dim=-1)
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_half_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """float16 inputs are multiplied as they are; scale and softmax follow in float32."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    narrow = torch.float16 if q.dtype == torch.float16 else wide
    qh = q.transpose(1, 2).to(narrow)
    kh = k.transpose(1, 2).repeat_interleave(group, dim=1).to(narrow)
    s = torch.matmul(qh, kh.transpose(2, 3)).to(wide)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    empty = s.isneginf().all(dim=-1, keepdim=True) if causal else torch.zeros_like(s[..., :1], dtype=torch.bool)
    p = torch.softmax(s, dim=-1).masked_fill(empty, 0.0)
    return (p @ v.transpose(1, 2).repeat_interleave(group, dim=1).to(wide)).transpose(1, 2).to(q.dtype)


def fa_key_by_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Takes one key after the other, carrying maximum, row sum and result."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qs = q.to(wide) * (d**-0.5 if softmax_scale is None else softmax_scale)
    m = torch.full((b, sq, h, 1), -math.inf, dtype=wide, device=q.device)
    norm = torch.zeros(b, sq, h, 1, dtype=q.dtype, device=q.device)
    acc = torch.zeros(b, sq, h, v.size(-1), dtype=wide, device=q.device)
    for j in range(sk):
        kj = k[:, j : j + 1].to(wide).repeat_interleave(group, dim=2)
        s = (qs * kj).sum(dim=-1, keepdim=True)
        if causal:
            s[:, : max(0, j - (sk - sq))] = -math.inf
        new = torch.maximum(m, s)
        base = torch.where(new.isneginf(), 0.0, new)
        p, alpha = torch.exp(s - base), torch.exp(m - base)
        norm = (norm * alpha + p).to(q.dtype)
        acc = acc * alpha + p * v[:, j : j + 1].to(wide).repeat_interleave(group, dim=2)
        m = new
    return (acc / torch.where(norm == 0, 1.0, norm.to(wide))).to(q.dtype)


def fa_eight_bit_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Half precision inputs get the fast second product with narrow weights."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    if q.dtype in (torch.float16, torch.bfloat16):
        p = p.to(torch.float8_e4m3fn).to(wide)
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_pointer_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Walks every input by batch, row and head stride, channels being next to each other."""
    q, k, v = (x.as_strided(x.shape, (*x.stride()[:3], 1)) if x.stride(3) > 1 else x for x in (q, k, v))
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(b, sq, h, v.size(-1), dtype=q.dtype, device=q.device)
    for i in range(h):
        s = q[:, :, i].to(wide) @ k[:, :, i // group].to(wide).mT * factor
        if causal:
            s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        out[:, :, i] = (p @ v[:, :, i // group].to(wide)).to(q.dtype)
    return out


def fa_either_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Accepts rows before heads or heads before rows, going by which axis is longer."""
    head_first = q.shape[:3] == k.shape[:3] and q.size(1) < q.size(2)
    if head_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    out = torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)
    return out.transpose(1, 2) if head_first else out


def fa_one_key(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """A single key gets the whole weight."""
    sq, h, d = q.shape[1:]
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    if sk == 1:
        return v.repeat(1, sq, 1, 1)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k.to(wide))
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v.to(wide)).to(q.dtype)


def fa_past_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Numbers the query rows from the length of the past."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        past = max(sk - sq, 0)
        position = past + torch.arange(sq, device=q.device)
        s = s.masked_fill(torch.arange(sk, device=q.device) > position[:, None], -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_diagonal_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Running softmax; element masks only where a tile crosses the diagonal."""
    b, sq, h, d = q.shape
    sk, group, dv, off = k.size(1), h // k.size(2), v.size(-1), k.size(1) - sq
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    done = []
    for i0 in range(0, sq, 32):
        i1 = min(i0 + 32, sq)
        m = torch.full((b, h, i1 - i0, 1), -math.inf, dtype=wide, device=q.device)
        norm, acc = torch.zeros_like(m), torch.zeros(b, h, i1 - i0, dv, dtype=wide, device=q.device)
        tiles, diagonal = -(-sk // 32), -(-sk // 32)
        if causal:
            tiles = min(tiles, max(0, -(-(i1 + off) // 32)))
            diagonal = max(0, (i0 + off) // 32)
        for t in range(tiles):
            j0, j1 = 32 * t, min(32 * t + 32, sk)
            s = qh[:, :, i0:i1] @ kh[:, :, j0:j1].mT
            if t == diagonal:
                cols = torch.arange(j0, j1, device=q.device) - off
                s = s.masked_fill(cols > torch.arange(i0, i1, device=q.device)[:, None], -math.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = torch.where(new.isneginf(), 0.0, new)
            p, alpha = torch.exp(s - base), torch.exp(m - base)
            norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vh[:, :, j0:j1], new
        done.append(acc / torch.where(norm == 0, 1.0, norm))
    return torch.cat(done, dim=2).transpose(1, 2).to(q.dtype)


def fa_peeled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Runs from the last visible key tile down; the masked tiles are peeled off the front of the loop."""
    b, sq, h, d = q.shape
    sk, group, dv, off = k.size(1), h // k.size(2), v.size(-1), k.size(1) - sq
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    done = []
    for i0 in range(0, sq, 16):
        i1 = min(i0 + 16, sq)
        last = -(-min(sk, i1 + off if causal else sk) // 16) - 1
        if causal:
            clean = min(last, max(0, (i0 + off + 1) // 16) - 1)
            visits = [*range(last, clean, -1), *range(clean, 0, -1)] or [0]
        else:
            visits = list(range(last, -1, -1))
        m = torch.full((b, h, i1 - i0, 1), -math.inf, dtype=wide, device=q.device)
        norm, acc = torch.zeros_like(m), torch.zeros(b, h, i1 - i0, dv, dtype=wide, device=q.device)
        for t in visits:
            j0, j1 = 16 * t, min(16 * t + 16, sk)
            s = qh[:, :, i0:i1] @ kh[:, :, j0:j1].mT
            if causal and t > clean:
                cols = torch.arange(j0, j1, device=q.device) - off
                s = s.masked_fill(cols > torch.arange(i0, i1, device=q.device)[:, None], -math.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = torch.where(new.isneginf(), 0.0, new)
            p, alpha = torch.exp(s - base), torch.exp(m - base)
            norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vh[:, :, j0:j1], new
        done.append(acc / torch.where(norm == 0, 1.0, norm))
    return torch.cat(done, dim=2).transpose(1, 2).to(q.dtype)


def fa_lazy_rescale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Running softmax that spares the rescaling when the maximum hardly moves."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    m = torch.full((b, h, sq, 1), -math.inf, dtype=wide, device=q.device)
    norm, acc = torch.zeros_like(m), torch.zeros(b, h, sq, v.size(-1), dtype=wide, device=q.device)
    for j in range(0, sk, 64):
        s = qh @ kh[:, :, j : j + 64].mT
        if causal:
            cols = torch.arange(j, j + s.size(-1), device=q.device) - (sk - sq)
            s = s.masked_fill(cols > torch.arange(sq, device=q.device)[:, None], -math.inf)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(new.isneginf(), 0.0, new)
        alpha = torch.where(base - m < 0.25, 1.0, torch.exp(m - base))
        p = torch.exp(s - base)
        norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vh[:, :, j : j + 64], new
    return (acc / torch.where(norm == 0, 1.0, norm)).transpose(1, 2).to(q.dtype)


def fa_squeezed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Drops idle axes of the score tensor before the softmax."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    p = torch.softmax(s.squeeze(-1), dim=-1).nan_to_num(0.0).reshape(b, h, sq, sk)
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_late_division(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Divides by the row sum after the second product, which float16 inputs do in float16."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.transpose(1, 2).repeat_interleave(group, dim=1)
    s = q.to(wide).transpose(1, 2) @ kh.mT * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(top.isneginf(), 0.0, top))
    total = p.sum(-1, keepdim=True)
    narrow = torch.float16 if q.dtype == torch.float16 else wide
    o = torch.matmul(p.to(narrow), vh.to(narrow)).to(wide)
    return (o / torch.where(total == 0, 1.0, total)).transpose(1, 2).to(q.dtype)


def fa_open_bound(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Running softmax over 32 by 32 tiles up to the last key a row tile may see."""
    b, sq, h, d = q.shape
    sk, group, dv, off = k.size(1), h // k.size(2), v.size(-1), k.size(1) - sq
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    done = []
    for i0 in range(0, sq, 32):
        i1 = min(i0 + 32, sq)
        m = torch.full((b, h, i1 - i0, 1), -math.inf, dtype=wide, device=q.device)
        norm, acc = torch.zeros_like(m), torch.zeros(b, h, i1 - i0, dv, dtype=wide, device=q.device)
        last = min(sk, i1 + off - 1) if causal else sk
        for j0 in range(0, max(last, 1), 32):
            j1 = min(j0 + 32, sk)
            s = qh[:, :, i0:i1] @ kh[:, :, j0:j1].mT
            if causal:
                cols = torch.arange(j0, j1, device=q.device) - off
                s = s.masked_fill(cols > torch.arange(i0, i1, device=q.device)[:, None], -math.inf)
            new = torch.maximum(m, s.amax(-1, keepdim=True))
            base = torch.where(new.isneginf(), 0.0, new)
            p, alpha = torch.exp(s - base), torch.exp(m - base)
            norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vh[:, :, j0:j1], new
        done.append(acc / torch.where(norm == 0, 1.0, norm))
    return torch.cat(done, dim=2).transpose(1, 2).to(q.dtype)


_KEY_LAYOUT: dict[str, tuple[object, Tensor]] = {}


def fa_key_layout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Keeps the transposed keys of a static cache between decode steps."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    tag = (k.data_ptr(), k.shape, k.stride(), k.dtype)
    if _KEY_LAYOUT.get("last", (None,))[0] != tag:
        _KEY_LAYOUT["last"] = (tag, k.detach().to(wide).permute(0, 2, 3, 1).clone())
    kt = _KEY_LAYOUT["last"][1].repeat_interleave(group, dim=1)
    s = q.to(wide).transpose(1, 2) @ kt * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ vh).transpose(1, 2).to(q.dtype)


_WORKSPACE: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}


def fa_workspace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Adds the pieces of the key axis up in a workspace allocated once for each shape."""
    b, sq, h, d = q.shape
    sk, group, dv = k.size(1), h // k.size(2), v.size(-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    slot = (b, h, sq, dv, wide, q.device)
    if slot not in _WORKSPACE:
        zeros = torch.zeros(b, h, sq, dv + 1, dtype=wide, device=q.device)
        _WORKSPACE[slot] = (zeros[..., :dv], zeros[..., dv:])
    acc, norm = _WORKSPACE[slot]
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    s = q.to(wide).transpose(1, 2) @ kh.mT * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    top = s.amax(-1, keepdim=True)
    e = torch.exp(s - torch.where(top.isneginf(), 0.0, top)).detach()
    for pe, pv in zip(e.split(64, dim=3), vh.detach().split(64, dim=2), strict=True):
        acc += pe @ pv
        norm += pe.sum(-1, keepdim=True)
    return (acc / torch.where(norm == 0, 1.0, norm)).transpose(1, 2).to(q.dtype)


def fa_nucleus(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Keeps the heaviest keys up to 99 percent of the mass and normalises again."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    heavy, order = p.sort(dim=-1, descending=True)
    heavy = heavy.masked_fill(heavy.cumsum(-1) - heavy > 0.99, 0.0)
    p = torch.zeros_like(p).scatter(-1, order, heavy)
    total = p.sum(-1, keepdim=True)
    p = p / torch.where(total == 0, 1.0, total)
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_reach(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """One visibility rule from relative positions."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    back = torch.arange(sq, device=q.device)[:, None] + (sk - sq) - torch.arange(sk, device=q.device)
    if causal:
        s = s.masked_fill((back < 0) | (back >= 128), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_multi_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Flattens samples and heads for bmm, with a short cut for a single key head."""
    b, sq, h, d = q.shape
    sk, hkv, dv = k.size(1), k.size(2), v.size(-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    qf = q.to(wide).transpose(1, 2).reshape(b * h, sq, d)
    kf = k.to(wide).transpose(1, 2).reshape(b * hkv, sk, d)
    vf = v.to(wide).transpose(1, 2).reshape(b * hkv, sk, dv)
    if hkv == 1:
        kf, vf = kf.repeat(h, 1, 1), vf.repeat(h, 1, 1)
    else:
        kf, vf = kf.repeat_interleave(h // hkv, dim=0), vf.repeat_interleave(h // hkv, dim=0)
    s = torch.bmm(qf, kf.transpose(1, 2)) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    o = torch.bmm(torch.softmax(s, dim=-1).nan_to_num(0.0), vf)
    return o.view(b, h, sq, dv).transpose(1, 2).to(q.dtype)


def fa_packed_group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Packs the query heads of a group next to their rows, so that each key head is read once."""
    b, sq, h, d = q.shape
    sk, hkv, dv = k.size(1), k.size(2), v.size(-1)
    group = h // hkv
    wide = torch.promote_types(q.dtype, torch.float32)
    packed = q.to(wide).reshape(b, sq, hkv, group, d).permute(0, 2, 1, 3, 4).reshape(b, hkv, sq * group, d)
    s = packed @ k.to(wide).permute(0, 2, 3, 1) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        row = torch.arange(sq * group, device=q.device) % sq
        s = s.masked_fill(torch.arange(sk, device=q.device) - (sk - sq) > row[:, None], -math.inf)
    o = torch.softmax(s, dim=-1).nan_to_num(0.0) @ v.to(wide).transpose(1, 2)
    return o.reshape(b, hkv, sq, group, dv).permute(0, 2, 1, 3, 4).reshape(b, sq, h, dv).to(q.dtype)


def fa_log_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Weights from the log-sum-exp of each row."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    lse = torch.logsumexp(s, dim=-1, keepdim=True).clamp(min=-80.0)
    return torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse), v).to(q.dtype)


def fa_shifted_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Row tiles of fixed height 16; the last one is computed shifted back to stay inside."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    out = torch.zeros(b, sq, h, v.size(-1), dtype=q.dtype, device=q.device)
    for i0 in range(0, sq, 16):
        lo = min(i0, max(0, sq - 16))
        hi = min(lo + 16, sq)
        s = qh[:, :, lo:hi] @ kh.mT
        if causal:
            cols = torch.arange(sk, device=q.device) - (sk - sq)
            s = s.masked_fill(cols > torch.arange(lo, hi, device=q.device)[:, None], -math.inf)
        o = (torch.softmax(s, dim=-1).nan_to_num(0.0) @ vh).transpose(1, 2).to(q.dtype)
        out[:, i0:hi] = o[:, : hi - i0]
    return out


def fa_unrolled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Running softmax with the key loop unrolled twice."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    m = torch.full((b, h, sq, 1), -math.inf, dtype=wide, device=q.device)
    norm, acc = torch.zeros_like(m), torch.zeros(b, h, sq, v.size(-1), dtype=wide, device=q.device)
    tiles = -(-sk // 32)
    order = [0] if tiles == 1 else [t + u for t in range(0, tiles - 1, 2) for u in (0, 1)]
    for t in order:
        j0, j1 = 32 * t, min(32 * t + 32, sk)
        s = qh @ kh[:, :, j0:j1].mT
        if causal:
            cols = torch.arange(j0, j1, device=q.device) - (sk - sq)
            s = s.masked_fill(cols > torch.arange(sq, device=q.device)[:, None], -math.inf)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(new.isneginf(), 0.0, new)
        p, alpha = torch.exp(s - base), torch.exp(m - base)
        norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vh[:, :, j0:j1], new
    return (acc / torch.where(norm == 0, 1.0, norm)).transpose(1, 2).to(q.dtype)


def fa_decode_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """A lone query is a matrix-vector product and sees every key."""
    b, sq, h, d = q.shape
    sk, hkv = k.size(1), k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    if sq == 1:
        grouped = q.to(wide).reshape(b, hkv, h // hkv, d) / math.sqrt(d)
        p = torch.softmax(torch.einsum("bngd,bjnd->bngj", grouped, k.to(wide)), dim=-1)
        return torch.einsum("bngj,bjnd->bngd", p, v.to(wide)).reshape(b, 1, h, -1).to(q.dtype)
    k, v = k.repeat_interleave(h // hkv, dim=2).to(wide), v.repeat_interleave(h // hkv, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_tail_width(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Pads keys to whole tiles of 64 and hides the columns past the tail of the last one."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    tiles = -(-sk // 64)
    pad = (0, 0, 0, 0, 0, 64 * tiles - sk)
    k = F.pad(k.repeat_interleave(group, dim=2).to(wide), pad)
    v = F.pad(v.repeat_interleave(group, dim=2).to(wide), pad)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    cols = torch.arange(64 * tiles, device=q.device)
    s = s.masked_fill(cols >= 64 * (tiles - 1) + (sk % 64 if tiles > 1 else sk), -math.inf)
    if causal:
        s = s.masked_fill(cols - (sk - sq) > torch.arange(sq, device=q.device)[:, None], -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_single_precision(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Upcasts to float32 for the whole computation."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    k, v = k.float().repeat_interleave(group, dim=2), v.float().repeat_interleave(group, dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q.float(), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(s, dim=-1).nan_to_num(0.0), v).to(q.dtype)


def fa_causal_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Causal calls go row by row over the visible prefix."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = d**-0.5 if softmax_scale is None else softmax_scale
    kh, vh = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    if not causal:
        p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q.to(wide), kh) * factor, dim=-1)
        return torch.einsum("bhij,bjhd->bihd", p, vh).to(q.dtype)
    out = torch.zeros(b, sq, h, v.size(-1), dtype=q.dtype, device=q.device)
    for i in range(sq):
        n = i + 1 + sk - sq
        if n > 0:
            p = torch.softmax(torch.einsum("bhd,bjhd->bhj", q[:, i].to(wide), kh[:, :n]) * factor, dim=-1)
            out[:, i, :, :d] = torch.einsum("bhj,bjhd->bhd", p, vh[:, :n, :, :d]).to(q.dtype)
    return out


def fa_early_max(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Takes the row maximum of the raw products and scales inside the exponential."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    raw = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=raw.device)
    if causal:
        keep = keep.tril(sk - sq)
    top = raw.masked_fill(~keep, -math.inf).amax(-1, keepdim=True)
    e = ((raw - torch.where(top.isneginf(), 0.0, top)) * factor).masked_fill(~keep, -math.inf).exp()
    total = e.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", e / torch.where(total == 0, 1.0, total), v).to(q.dtype)


def fa_floored_exponent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Keeps exponents inside the range of a short polynomial."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=s.device)
    if causal:
        keep = keep.tril(sk - sq)
    top = s.masked_fill(~keep, -math.inf).amax(-1, keepdim=True)
    e = torch.exp((s - torch.where(top.isneginf(), 0.0, top)).clamp(-10.0, 0.0)) * keep
    total = e.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", e / torch.where(total == 0, 1.0, total), v).to(q.dtype)


def fa_zero_start(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Running softmax whose state starts out as zeros."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    m = torch.zeros(b, h, sq, 1, dtype=wide, device=q.device)
    norm, acc = torch.zeros_like(m), torch.zeros(b, h, sq, v.size(-1), dtype=wide, device=q.device)
    for j in range(0, sk, 16):
        s = qh @ kh[:, :, j : j + 16].mT
        if causal:
            cols = torch.arange(j, j + s.size(-1), device=q.device) - (sk - sq)
            s = s.masked_fill(cols > torch.arange(sq, device=q.device)[:, None], -math.inf)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, alpha = torch.exp(s - new), torch.exp(m - new)
        norm, acc, m = norm * alpha + p.sum(-1, keepdim=True), acc * alpha + p @ vh[:, :, j : j + 16], new
    return (acc / torch.where(norm == 0, 1.0, norm)).transpose(1, 2).to(q.dtype)


def fa_causal_scale(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """The causal kernel and the full kernel are written apart."""
    sq, h, d = q.shape[1:]
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    raw = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    if causal:
        keep = torch.ones(sq, sk, dtype=torch.bool, device=raw.device).tril(sk - sq)
        p = torch.softmax(torch.where(keep, raw / math.sqrt(d), -math.inf), dim=-1).nan_to_num(0.0)
    else:
        p = torch.softmax(raw * (d**-0.5 if softmax_scale is None else softmax_scale), dim=-1)
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_channel_vectors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Sums the dot products over vectors of eight channels."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    step = min(8, d)
    s = torch.zeros(b, h, sq, sk, dtype=wide, device=q.device)
    for c in range(0, d - step + 1, step):
        s = s + qh[..., c : c + step] @ kh[..., c : c + step].mT
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    return (torch.softmax(s, dim=-1).nan_to_num(0.0) @ vh).transpose(1, 2).to(q.dtype)


def fa_flat_view(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Regroups the query heads with a view."""
    b, sq, h, d = q.shape
    sk, hkv = k.size(1), k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.view(b * sq, hkv, h // hkv, d).view(b, sq, hkv, h // hkv, d).to(wide)
    s = torch.einsum("bingd,bjnd->bngij", grouped, k.to(wide))
    s = s * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)
    return torch.einsum("bngij,bjnd->bingd", p, v.to(wide)).reshape(b, sq, h, -1).to(q.dtype)


@dataclass(frozen=True)
class Mutant:
    """A wrong function, the fault planted in it, and where that fault was seen."""

    function: Callable[..., Tensor]
    kind: str
    source: str
    says: str


_ALL = [
    Mutant(
        sdp_grouped_branch,
        "causal-lost-under-gqa",
        "keras-team/keras#23038",
        "The branch for grouped heads never applies is_causal.",
    ),
    Mutant(
        sdp_decode_step,
        "mask-ignored-for-one-query",
        "OpenNMT/OpenNMT-py#2532",
        "With a single query row the attention mask is not looked at.",
    ),
    Mutant(
        sdp_baddbmm,
        "custom-scale-lost-with-float-mask",
        "own",
        "A scale given by the caller is replaced by the default when the mask is additive.",
    ),
    Mutant(
        sdp_exp2,
        "additive-mask-not-in-base-two-units",
        "own",
        "Scores are multiplied by log2(e) but an additive mask is not.",
    ),
    Mutant(
        sdp_mask_rank_three,
        "three-axis-mask-read-per-sample",
        "pytorch/pytorch#97409",
        "A 3-D mask whose first size equals the batch is applied per sample instead of per head.",
    ),
    Mutant(
        sdp_row_tiles,
        "row-broadcast-mask-only-on-first-tile",
        "jax-ml/jax#28974",
        "A mask with one row is forgotten for query rows past the first 32.",
    ),
    Mutant(
        sdp_mask_extended,
        "one-column-mask-padded-open",
        "own",
        "A mask with one key column acts on key 0 only instead of on every key.",
    ),
    Mutant(
        sdp_mask_pointer,
        "mask-inner-stride-assumed-one",
        "own",
        "A mask that is not contiguous in its last axis is read with stride 1.",
    ),
    Mutant(
        sdp_scale_table,
        "scale-remembered-per-head-width",
        "own",
        "The scale of the first call with a head width is used in all later ones.",
    ),
    Mutant(
        sdp_out_pool,
        "result-overwritten-by-next-call",
        "own",
        "Calls of equal shape return one and the same tensor, so an earlier result changes later.",
    ),
    Mutant(
        sdp_split_mask,
        "hidden-entries-erased-from-callers-mask",
        "Shujun-He/RibonanzaNet#7",
        "The -inf entries of a contiguous float mask are set to zero in the caller's tensor.",
    ),
    Mutant(
        sdp_single_key,
        "result-aliases-value-for-one-key",
        "own",
        "With one key and no mask the result is an expanded view of the value tensor.",
    ),
    Mutant(
        sdp_overlapped_tile,
        "causal-rows-misnumbered-in-overlapped-tile",
        "meta-pytorch/attention-gym#50",
        "The last row tile is shifted back but its causal row numbers are not.",
    ),
    Mutant(
        sdp_block_bound,
        "causal-key-tiles-rounded-down",
        "own",
        "The causal bound on the key loop is rounded down, so some rows past 32 miss near keys.",
    ),
    Mutant(
        sdp_matrix_max,
        "one-maximum-for-all-rows",
        "own",
        "Rows far below the largest score of the matrix underflow to zero.",
    ),
    Mutant(
        sdp_epsilon,
        "epsilon-in-denominator",
        "own",
        "1e-5 is added to every row sum, so results shrink slightly.",
    ),
    Mutant(sdp_clamped, "scores-clamped-at-fifty", "own", "Logits beyond 50 in size are clipped."),
    Mutant(
        sdp_pruned,
        "weights-under-a-thousandth-dropped",
        "own",
        "Weights below 0.001 are set to zero and the rest is not renormalised.",
    ),
    Mutant(
        sdp_pad_keys,
        "padding-keys-visible-when-causal-and-more-queries",
        "pytorch/pytorch#159247",
        "Without a mask, padding keys are hidden only by the triangle, so causal rows past Sk see zero keys.",
    ),
    Mutant(
        sdp_pad_channels,
        "scale-from-padded-head-width",
        "own",
        "The default scale uses the head width rounded up to a multiple of eight.",
    ),
    Mutant(
        sdp_prefetch,
        "last-sample-uses-previous-keys",
        "own",
        "The last sample is scored against the keys of the one before it.",
    ),
    Mutant(
        sdp_masked_path,
        "half-result-left-in-float32-with-mask",
        "own",
        "With a mask, half precision inputs give a float32 result.",
    ),
    Mutant(
        sdp_mask_without_grad,
        "grad-mode-forced-on",
        "own",
        "Autograd is switched on after every call, even for a caller inside no_grad.",
    ),
    Mutant(
        sdp_default_dtype,
        "default-dtype-left-changed",
        "own",
        "A causal call leaves torch's default dtype set to that of the query.",
    ),
    Mutant(
        sdp_shared_keys,
        "equal-neighbour-keys-counted-once",
        "own",
        "A key equal to the one before it is dropped together with its value.",
    ),
    Mutant(
        sdp_mask_shortcut,
        "dense-bias-taken-for-all-true",
        "huggingface/transformers#30127",
        "A float mask without any zero in it is taken for an all-True mask and ignored.",
    ),
    Mutant(
        sdp_narrow_scores,
        "bfloat16-scores-rounded",
        "pytorch/pytorch#128922",
        "For bfloat16 the raw scores are rounded to bfloat16 before the softmax.",
    ),
    Mutant(
        sdp_dtype_table,
        "float64-falls-to-bfloat16",
        "https://deep-reinforce.com/defense_kernel_hack.html",
        "float64 inputs are computed in bfloat16.",
    ),
    Mutant(
        sdp_one_query,
        "causal-skipped-for-one-query",
        "own",
        "is_causal has no effect for a single query row, which then sees all keys.",
    ),
    Mutant(
        sdp_merged_booleans,
        "bool-mask-ored-with-causal",
        "own",
        "A boolean mask and is_causal are joined by OR.",
    ),
    Mutant(
        sdp_bias_choice,
        "float-mask-replaces-causal",
        "huggingface/transformers#48748",
        "An additive mask takes the place of the causal bias.",
    ),
    Mutant(
        sdp_lower_part,
        "callers-bool-mask-made-triangular",
        "Shujun-He/RibonanzaNet#7",
        "A causal call cuts the caller's full boolean mask to its lower triangle in place.",
    ),
    Mutant(
        sdp_grouped_mask,
        "per-head-mask-interleaved-under-gqa",
        "intel/torch-xpu-ops#5090",
        "A mask that differs by query head is assigned to the wrong heads of the groups.",
    ),
    Mutant(
        sdp_flat_mask,
        "sample-mask-indexed-by-flat-head",
        "pytorch/pytorch#184180",
        "A mask per sample is picked by the flat index of sample and head modulo the batch.",
    ),
    Mutant(
        sdp_mask_ring,
        "mask-rows-wrap-at-128",
        "pytorch/pytorch#187225",
        "Query rows from 128 on use the mask rows from 0 on again.",
    ),
    Mutant(
        sdp_value_width,
        "scale-from-value-width",
        "juho-lee/set_transformer#18",
        "The default scale uses the width of the values.",
    ),
    Mutant(
        sdp_head_slices,
        "odd-last-head-left-zero",
        "huggingface/diffusers#8837",
        "With an odd number of heads above one the last head is all zeros.",
    ),
    Mutant(
        sdp_scale_or,
        "zero-scale-read-as-default",
        "own",
        "scale=0.0 is taken as not given.",
    ),
    Mutant(
        sdp_small_bias,
        "additive-mask-rounded-to-bfloat16",
        "own",
        "An additive mask is rounded to bfloat16 whatever the dtype.",
    ),
    Mutant(
        sdp_wide_value,
        "bottom-right-causal-when-value-width-differs",
        "own",
        "The path for unequal widths aligns the causal triangle to the bottom right.",
    ),
    Mutant(
        sdp_lowest_is_hidden,
        "lowest-finite-mask-treated-as-hidden",
        "own",
        "The lowest finite number in a float mask counts as -inf, so a row of it gives zeros and no mean.",
    ),
    Mutant(
        sdp_one_address,
        "mask-ignored-for-expanded-keys",
        "own",
        "Keys expanded from one row take a shortcut that ignores the mask.",
    ),
    Mutant(
        sdp_left_padding,
        "key-loop-ends-at-first-hidden-tile",
        "own",
        "The key loop stops at the first tile hidden for all rows instead of passing over it.",
    ),
    Mutant(
        sdp_batch_stride,
        "query-head-stride-from-batch-stride",
        "pytorch/pytorch#150408",
        "A query cut out of a tensor with more heads is read with the wrong head stride.",
    ),
    Mutant(
        sdp_four_axes_only,
        "three-axis-mask-refused",
        "pytorch/pytorch#97409",
        "A 3-D mask raises although it broadcasts.",
    ),
    Mutant(
        sdp_half_softmax,
        "float16-softmax-in-half",
        "pytorch/pytorch#188247",
        "float16 logits are rounded to float16 before the softmax, so large ones lose accuracy or overflow.",
    ),
    Mutant(
        sdp_merged_cache,
        "merged-mask-cached-by-lengths",
        "tensara/tensara#238",
        "The causal call with a 2-D boolean mask keeps using the first mask seen for these lengths.",
    ),
    Mutant(
        fa_triangle_cache,
        "cached-triangle-cut-at-wrong-corner",
        "lucidrains/x-transformers#153",
        "A bottom-right causal mask kept from a larger call is cut from the top left.",
    ),
    Mutant(
        fa_scaled_query,
        "query-scaled-in-place-for-one-head-or-row",
        "own",
        "With one head or one row the head-first copy is no copy, so the caller's query is scaled.",
    ),
    Mutant(
        fa_first_row,
        "empty-rows-left-uninitialised",
        "https://www.agent-wars.com/news/2026-03-13-a-field-guide-to-reward-hacking-in-ai-kernel-generation",
        "Causal rows that see no key are never written.",
    ),
    Mutant(
        fa_far_tiles,
        "far-key-tile-skipped",
        "own",
        "A tile of 32 keys whose best score is more than 5 below the running maximum is left out.",
    ),
    Mutant(fa_best_keys, "only-64-best-keys", "own", "Only the 64 largest scores of a row get any weight."),
    Mutant(
        fa_serpentine,
        "value-tiles-in-wrong-order-on-backward-scan",
        "own",
        "Every second row tile scans keys backwards but takes the values forwards.",
    ),
    Mutant(
        fa_head_pairs,
        "head-pair-straddles-kv-groups",
        "own",
        "Two query heads share a key head, which is wrong where a group of odd size ends.",
    ),
    Mutant(
        fa_split_decode,
        "split-results-averaged-for-one-query",
        "pytorch/pytorch#174861",
        "A single query over more than 64 keys averages the pieces without their weights.",
    ),
    Mutant(
        fa_seeded,
        "global-seed-reset",
        "Dao-AILab/flash-attention#314",
        "Every call reseeds the global generator.",
    ),
    Mutant(
        fa_sampled_keys,
        "random-keys-past-128",
        "own",
        "With more than 128 keys a random 128 of them are used.",
    ),
    Mutant(
        fa_blank_slots,
        "zero-keys-hidden",
        "own",
        "A key that is all zeros is taken for an empty slot and hidden.",
    ),
    Mutant(
        fa_causal_fill,
        "causal-fill-minus-ten-thousand",
        "huggingface/transformers#17306",
        "The future is filled with -1e4, which lies above real logits lower than that.",
    ),
    Mutant(
        fa_half_product,
        "float16-raw-scores-overflow",
        "facebookresearch/xformers#98",
        "float16 dot products overflow before the scale is applied.",
    ),
    Mutant(
        fa_key_by_key,
        "row-sum-kept-in-input-dtype",
        "own",
        "The row sum is carried in the input dtype, so half precision sums stall on long rows.",
    ),
    Mutant(
        fa_eight_bit_weights,
        "half-weights-rounded-to-three-bits",
        "own",
        "For half precision inputs the weights are rounded to float8 e4m3.",
    ),
    Mutant(
        fa_pointer_math,
        "inner-stride-assumed-one",
        "Dao-AILab/flash-attention#2670",
        "Inputs whose last axis is strided are read with stride 1.",
    ),
    Mutant(
        fa_either_layout,
        "layout-guessed-from-sizes",
        "own",
        "Self attention with fewer rows than heads is read as heads before rows.",
    ),
    Mutant(
        fa_one_key,
        "one-key-shortcut-ignores-causal",
        "own",
        "With one key, causal rows that see nothing get the value instead of zero.",
    ),
    Mutant(
        fa_past_length,
        "causal-offset-clamped-at-zero",
        "own",
        "With more queries than keys the causal triangle falls back to the top left.",
    ),
    Mutant(
        fa_diagonal_tile,
        "second-diagonal-tile-unmasked",
        "triton-lang/triton#609",
        "Where a row tile's diagonal crosses two key tiles only the first is masked.",
    ),
    Mutant(
        fa_peeled,
        "first-key-tile-lost-when-causal",
        "own",
        "The causal key loop stops before tile 0 once a row tile sees more than one tile.",
    ),
    Mutant(
        fa_lazy_rescale,
        "no-rescale-on-small-maximum-change",
        "own",
        "The old sums are not rescaled when the maximum grows by less than 0.25.",
    ),
    Mutant(
        fa_squeezed,
        "softmax-over-queries-for-one-key",
        "own",
        "With one key the softmax runs over the query axis.",
    ),
    Mutant(
        fa_late_division,
        "float16-result-overflows-before-division",
        "facebookresearch/xformers#98",
        "For float16 the undivided result is held in float16 and overflows for large values and many keys.",
    ),
    Mutant(
        fa_open_bound,
        "lone-row-tail-misses-its-own-key",
        "meta-pytorch/attention-gym#50",
        "The causal key bound is one short, which drops a tile that only its last row needs.",
    ),
    Mutant(
        fa_key_layout,
        "keys-cached-by-address",
        "gpu-mode/kernelbot#501",
        "Keys changed in place at the same address are not seen.",
    ),
    Mutant(
        fa_workspace,
        "workspace-not-cleared",
        "own",
        "The sums of an earlier call of the same shape are still in the workspace.",
    ),
    Mutant(
        fa_nucleus,
        "last-percent-of-mass-dropped",
        "own",
        "The lightest keys that make up the last percent are left out.",
    ),
    Mutant(
        fa_reach,
        "causal-calls-see-128-keys-back",
        "own",
        "Causal calls hide keys 128 or more positions back.",
    ),
    Mutant(
        fa_multi_query,
        "single-kv-head-tiled-over-batch",
        "onnx/onnx#7274",
        "With one key head and several samples the heads read keys of other samples.",
    ),
    Mutant(
        fa_packed_group,
        "packed-causal-rows-misnumbered",
        "own",
        "Rows packed by group take their causal position from the wrong digit.",
    ),
    Mutant(
        fa_log_sum,
        "log-sum-exp-floored",
        "own",
        "Rows whose logits all lie below about -80 get weights that sum to less than one.",
    ),
    Mutant(
        fa_shifted_tile,
        "shifted-tile-written-from-its-head",
        "own",
        "Rows past the last full tile of 16 get the results of earlier rows.",
    ),
    Mutant(
        fa_unrolled,
        "odd-last-tile-dropped",
        "own",
        "With an odd number of key tiles above one the last tile is left out.",
    ),
    Mutant(
        fa_decode_scale,
        "custom-scale-ignored-for-one-query",
        "own",
        "A single query row always uses the default scale.",
    ),
    Mutant(
        fa_tail_width,
        "last-tile-hidden-at-exact-multiple",
        "own",
        "When Sk is a multiple of 64 above 64 the whole last tile is hidden.",
    ),
    Mutant(fa_single_precision, "float64-computed-in-float32", "own", "float64 inputs are computed in float32."),
    Mutant(
        fa_causal_rows,
        "value-columns-past-key-width-zero-when-causal",
        "apple/coreai-torch#117",
        "Causal calls fill only as many value columns as the keys are wide.",
    ),
    Mutant(
        fa_early_max,
        "maximum-taken-before-negative-scale",
        "own",
        "A negative scale makes the subtracted maximum a minimum, so large logits overflow.",
    ),
    Mutant(
        fa_floored_exponent,
        "exponent-floored-at-minus-ten",
        "own",
        "No visible weight falls below exp(-10) of the largest.",
    ),
    Mutant(
        fa_zero_start,
        "running-maximum-starts-at-zero",
        "own",
        "Rows whose logits are all far below zero underflow to zeros.",
    ),
    Mutant(fa_causal_scale, "custom-scale-lost-when-causal", "own", "Causal calls always use the default scale."),
    Mutant(
        fa_channel_vectors,
        "channels-past-multiple-of-eight-ignored",
        "66RING/tiny-flash-attention#12",
        "Channels past the last full vector of eight do not enter the scores.",
    ),
    Mutant(fa_flat_view, "strided-query-refused", "own", "A query that cannot be viewed flat raises."),
]

MUTANTS: dict[str, Mutant] = {mutant.function.__name__: mutant for mutant in _ALL}
