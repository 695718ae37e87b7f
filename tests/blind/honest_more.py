"""More correct attention functions, each in an unusual style.

`sdp_` functions follow torch's scaled_dot_product_attention on [B, H, S, D]; `fa_` ones follow flash-attn's
flash_attn_func on [B, S, H, D]. Forward only; dropout_p is there for the signature and must stay 0.
Rows that see no key give zeros. `HONEST` at the end lists them.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def sdp_random_key_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Running softmax over key blocks of random sizes, the same ones on every call."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide) * (d**-0.5 if scale is None else scale)
    mask = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)
    dice = torch.Generator().manual_seed(sk)
    m = torch.full((b, h, sq, 1), -math.inf, dtype=wide, device=q.device)
    norm, acc = torch.zeros_like(m), torch.zeros(b, h, sq, value.size(-1), dtype=wide, device=q.device)
    j0 = 0
    while j0 < sk:
        j1 = min(sk, j0 + int(torch.randint(1, 24, (), generator=dice)))
        s = q @ key[:, :, j0:j1].to(wide).mT
        if mask is not None:
            part = mask[..., j0:j1]
            s = s.masked_fill(~part, -math.inf) if part.dtype == torch.bool else s + part
        if is_causal:
            cols = torch.arange(j0, j1, device=q.device)
            s = s.masked_fill(cols > torch.arange(sq, device=q.device)[:, None], -math.inf)
        new = torch.maximum(m, s.amax(-1, keepdim=True))
        base = torch.where(new.isneginf(), 0.0, new)
        p, alpha = torch.exp(s - base), torch.exp(m - base)
        norm = norm * alpha + p.sum(-1, keepdim=True)
        acc = acc * alpha + p @ value[:, :, j0:j1].to(wide)
        m, j0 = new, j1
    return (acc / torch.where(norm == 0, 1.0, norm)).to(query.dtype)


def sdp_keys_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Sorts the keys of each head by their norm first; attention does not mind their order."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    order = key.to(wide).square().sum(-1).argsort(dim=-1, stable=True)
    k = key.to(wide).gather(2, order.unsqueeze(-1).expand(-1, -1, -1, d))
    v = value.to(wide).gather(2, order.unsqueeze(-1).expand(-1, -1, -1, value.size(-1)))
    s = query.to(wide) @ k.mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        m = attn_mask.expand(b, h, sq, sk).gather(3, order.unsqueeze(2).expand(-1, -1, sq, -1))
        s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m
    if is_causal:
        late = order.unsqueeze(2) > torch.arange(sq, device=s.device)[:, None]
        s = s.masked_fill(late, -math.inf)
    p = torch.softmax(s, dim=-1).masked_fill(s.isneginf().all(-1, keepdim=True), 0.0)
    return (p @ v).to(query.dtype)


def sdp_compensated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Adds weight times value key by key, with Kahan's running correction."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = query.to(wide) @ key.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=s.device).triu(1), -math.inf)
    top = torch.full((b, h, sq, 1), -math.inf, dtype=wide, device=s.device)
    for j in range(sk):
        top = torch.maximum(top, s[..., j : j + 1])
    e = torch.exp(s - torch.where(top.isneginf(), 0.0, top))
    rows = torch.cat([value.to(wide), torch.ones_like(value[..., :1], dtype=wide)], dim=-1)
    total = torch.zeros(b, h, sq, rows.size(-1), dtype=wide, device=s.device)
    lost = torch.zeros_like(total)
    for j in range(sk):
        term = e[..., j : j + 1] * rows[:, :, j : j + 1] - lost
        grown = total + term
        lost = (grown - total) - term
        total = grown
    o, norm = total[..., :-1], total[..., -1:]
    return torch.where(norm > 0, o / norm.clamp(min=0.5), 0.0).to(query.dtype)


def sdp_double_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Everything around the softmax in the working dtype, the softmax itself in float64."""
    h, sq, d = query.shape[1:]
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = torch.matmul(query.to(wide), key.to(wide).transpose(2, 3)).double()
    s = s * (1 / math.sqrt(d) if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = torch.where(attn_mask, s, -math.inf)
    elif attn_mask is not None:
        s = s + attn_mask.double()
    if is_causal:
        s = torch.where(torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(), s, -math.inf)
    p = F.softmax(s, dim=-1).nan_to_num(0.0).to(wide)
    return torch.matmul(p, value.to(wide)).to(query.dtype)


def sdp_softmax_dtype(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Leaves the widening to softmax's dtype argument and keeps the weights in the input dtype."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = 1 / math.sqrt(d) if scale is None else scale
    bias = torch.zeros(b, h, sq, sk, dtype=wide, device=query.device)
    if attn_mask is not None:
        bias = bias.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else bias + attn_mask
    if is_causal:
        bias = bias.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=bias.device).triu(1), -math.inf)
    s = torch.einsum("bhid,bhjd->bhij", query.to(wide), key.to(wide)) * factor + bias
    p = F.softmax(s, dim=-1, dtype=wide).to(query.dtype)
    p = torch.where(bias.isneginf().all(-1, keepdim=True), torch.zeros_like(p), p)
    return torch.einsum("bhij,bhjd->bhid", p.to(wide), value.to(wide)).to(query.dtype)


def sdp_in_place(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """One private score buffer, changed in place from product to weights; keeps no gradient."""
    b, h, sq, d = query.shape
    sk, dv = key.size(2), value.size(3)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    with torch.no_grad():
        work = torch.empty(b * h, sq, sk, dtype=wide, device=query.device)
        torch.bmm(query.reshape(b * h, sq, d).to(wide), key.reshape(b * h, sk, d).to(wide).mT, out=work)
        work.mul_(d**-0.5 if scale is None else scale)
        plane = work.view(b, h, sq, sk)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:
                plane.masked_fill_(attn_mask.logical_not(), -math.inf)
            else:
                plane.add_(attn_mask)
        if is_causal:
            plane.masked_fill_(torch.ones(sq, sk, dtype=torch.bool, device=work.device).triu_(1), -math.inf)
        if sk:
            top = work.amax(dim=-1, keepdim=True)
            work.sub_(top.masked_fill_(top.isneginf(), 0.0)).exp_()
        total = work.sum(dim=-1, keepdim=True)
        work.div_(total.masked_fill_(total == 0, 1.0))
        out = torch.empty(b * h, sq, dv, dtype=wide, device=query.device)
        torch.bmm(work, value.reshape(b * h, sk, dv).to(wide), out=out)
    return out.view(b, h, sq, dv).to(query.dtype)


def sdp_gathered_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Row by row, looking only at the keys whose numbers the mask lists."""
    b, h, sq, d = query.shape
    sk, group = key.size(2), h // key.size(1) if enable_gqa else 1
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    seen = torch.ones(b, h, sq, sk, dtype=torch.bool, device=query.device)
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        bias = attn_mask.expand(b, h, sq, sk)
        seen = seen & (bias != -math.inf)
    if is_causal:
        seen = seen.tril()
    out = torch.zeros(b, h, sq, value.size(-1), dtype=query.dtype, device=query.device)
    for n in range(b):
        for i in range(h):
            k, v = key[n, i // group].to(wide), value[n, i // group].to(wide)
            for row in range(sq):
                picks = seen[n, i, row].nonzero().flatten()
                if len(picks):
                    s = k[picks] @ query[n, i, row].to(wide) * factor
                    if bias is not None:
                        s = s + bias[n, i, row, picks]
                    out[n, i, row] = (torch.softmax(s, dim=0) @ v[picks]).to(query.dtype)
    return out


def sdp_mapped_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Written for one head and mapped over heads of a group, key heads and samples by vmap."""
    b, h, sq, d = query.shape
    hkv, sk, dv = (key.size(1) if enable_gqa else h), key.size(2), value.size(3)
    if 0 in (b, h, sq, sk):
        return torch.zeros(b, h, sq, dv, dtype=query.dtype, device=query.device)
    wide = torch.promote_types(query.dtype, torch.float32)
    factor = d**-0.5 if scale is None else scale
    bias = torch.zeros(b, h, sq, sk, dtype=wide, device=query.device)
    if attn_mask is not None:
        bias = bias.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else bias + attn_mask
    if is_causal:
        bias = bias.masked_fill(torch.ones(sq, sk, dtype=torch.bool, device=bias.device).triu(1), -math.inf)

    def one_head(q: Tensor, k: Tensor, v: Tensor, add: Tensor) -> Tensor:
        p = torch.softmax(q.to(wide) @ k.to(wide).t() * factor + add, dim=-1)
        return torch.where(torch.isneginf(add).all(dim=-1, keepdim=True), 0.0, p) @ v.to(wide)

    in_group = torch.func.vmap(one_head, in_dims=(0, None, None, 0))
    over_all = torch.func.vmap(torch.func.vmap(in_group))
    split = (b, hkv, h // hkv, sq)
    out = over_all(query.reshape(*split, d), key, value, bias.reshape(*split, sk))
    return out.reshape(b, h, sq, dv).to(query.dtype)


def sdp_scale_in_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Folds the scale into the keys and the triangle into the loop over query rows."""
    b, h, sq, d = query.shape
    hkv, sk = key.size(1), key.size(2)
    group = h // hkv if enable_gqa else 1
    wide = torch.promote_types(query.dtype, torch.float32)
    scaled = (key.to(wide) * (d**-0.5 if scale is None else scale)).repeat_interleave(group, dim=1)
    v = value.to(wide).repeat_interleave(group, dim=1)
    mask = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)
    rows = []
    for i in range(sq):
        n = min(i + 1, sk) if is_causal else sk
        s = torch.einsum("bhd,bhjd->bhj", query[:, :, i].to(wide), scaled[:, :, :n])
        if mask is not None:
            m = mask[:, :, i, :n]
            s = torch.where(m, s, -math.inf) if m.dtype == torch.bool else s + m
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        rows.append(torch.einsum("bhj,bhjd->bhd", p, v[:, :, :n]))
    if not rows:
        return torch.zeros(b, h, 0, value.size(-1), dtype=query.dtype, device=query.device)
    return torch.stack(rows, dim=2).to(query.dtype)


def sdp_halving(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Cuts the key axis in halves down to seven keys and merges (maximum, sum, result) on the way back."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), key.to(wide), value.to(wide)
    factor = d**-0.5 if scale is None else scale
    mask = None if attn_mask is None else attn_mask.expand(b, h, sq, sk)

    def part(j0: int, j1: int) -> tuple[Tensor, Tensor, Tensor]:
        if j1 - j0 > 7:
            middle = (j0 + j1) // 2
            m1, n1, o1 = part(j0, middle)
            m2, n2, o2 = part(middle, j1)
            m = torch.maximum(m1, m2)
            base = torch.where(m.isneginf(), 0.0, m)
            w1, w2 = torch.exp(m1 - base), torch.exp(m2 - base)
            return m, n1 * w1 + n2 * w2, o1 * w1 + o2 * w2
        s = q @ k[:, :, j0:j1].mT * factor
        if mask is not None:
            cut = mask[..., j0:j1]
            s = s.masked_fill(~cut, -math.inf) if cut.dtype == torch.bool else s + cut
        if is_causal:
            cols = torch.arange(j0, j1, device=s.device)
            s = s.masked_fill(cols > torch.arange(sq, device=s.device)[:, None], -math.inf)
        m = s.amax(dim=-1, keepdim=True)
        e = torch.exp(s - torch.where(m.isneginf(), 0.0, m))
        return m, e.sum(dim=-1, keepdim=True), e @ v[:, :, j0:j1]

    if sk == 0:
        return torch.zeros(b, h, sq, value.size(-1), dtype=query.dtype, device=query.device)
    _, norm, out = part(0, sk)
    return (out / torch.where(norm == 0, 1.0, norm)).to(query.dtype)


def sdp_two_passes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """First pass over key tiles finds the row maxima, second pass sums; scores are computed twice."""
    b, h, sq, d = query.shape
    hkv, sk, dv = key.size(1), key.size(2), value.size(3)
    hkv = hkv if enable_gqa else h
    wide = torch.promote_types(query.dtype, torch.float32)
    q = query.to(wide).reshape(b, hkv, h // hkv, sq, d)
    mask = None
    if attn_mask is not None:
        mask = attn_mask.expand(b, h, sq, sk).reshape(b, hkv, h // hkv, sq, sk)

    def tile(j: int) -> Tensor:
        s = q @ key[:, :, None, j : j + 13].to(wide).mT * (d**-0.5 if scale is None else scale)
        if mask is not None:
            cut = mask[..., j : j + 13]
            s = torch.where(cut, s, -math.inf) if cut.dtype == torch.bool else s + cut
        if is_causal:
            cols = torch.arange(j, j + s.size(-1), device=s.device)
            s = torch.where(cols <= torch.arange(sq, device=s.device)[:, None], s, -math.inf)
        return s

    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=wide, device=q.device)
    for j in range(0, sk, 13):
        top = torch.maximum(top, tile(j).amax(dim=-1, keepdim=True))
    top = torch.where(top.isneginf(), 0.0, top)
    norm, acc = torch.zeros_like(top), torch.zeros(*q.shape[:-1], dv, dtype=wide, device=q.device)
    for j in range(0, sk, 13):
        e = torch.exp(tile(j) - top)
        norm = norm + e.sum(dim=-1, keepdim=True)
        acc = acc + e @ value[:, :, None, j : j + 13].to(wide)
    return (acc / torch.where(norm == 0, 1.0, norm)).reshape(b, h, sq, dv).to(query.dtype)


def sdp_keys_down(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Everything transposed: keys run down the score matrix and the softmax runs along columns."""
    b, h, sq, d = query.shape
    sk = key.size(2)
    if enable_gqa:
        key = key.repeat_interleave(h // key.size(1), dim=1)
        value = value.repeat_interleave(h // value.size(1), dim=1)
    wide = torch.promote_types(query.dtype, torch.float32)
    s = key.to(wide) @ query.to(wide).mT * (d**-0.5 if scale is None else scale)
    if attn_mask is not None:
        m = attn_mask.expand(b, h, sq, sk).mT
        s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m
    if is_causal:
        s = s.masked_fill(torch.ones(sk, sq, dtype=torch.bool, device=s.device).tril(-1), -math.inf)
    p = torch.softmax(s, dim=-2).masked_fill(s.isneginf().all(dim=-2, keepdim=True), 0.0)
    return (value.to(wide).mT @ p).mT.to(query.dtype)


def sdp_edge_list(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Turns the visible pairs into edges of a graph and uses scatter operations."""
    b, h, sq, d = query.shape
    sk, dv, group = key.size(2), value.size(3), h // key.size(1) if enable_gqa else 1
    wide = torch.promote_types(query.dtype, torch.float32)
    seen = torch.ones(b, h, sq, sk, dtype=torch.bool, device=query.device)
    if attn_mask is not None:
        seen = seen & (attn_mask if attn_mask.dtype == torch.bool else ~torch.isneginf(attn_mask))
    n, i, row, col = (seen.tril() if is_causal else seen).nonzero(as_tuple=True)
    s = (query[n, i, row].to(wide) * key[n, i // group, col].to(wide)).sum(-1)
    s = s * (d**-0.5 if scale is None else scale)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        s = s + attn_mask.expand(b, h, sq, sk)[n, i, row, col]
    place = (n * h + i) * sq + row
    top = torch.full((b * h * sq,), -math.inf, dtype=wide, device=s.device)
    top = top.scatter_reduce(0, place, s, reduce="amax")
    e = torch.exp(s - top[place])
    norm = torch.zeros_like(top).index_add(0, place, e)
    acc = torch.zeros(b * h * sq, dv, dtype=wide, device=s.device)
    acc = acc.index_add(0, place, e[:, None] * value[n, i // group, col].to(wide))
    return (acc / torch.where(norm == 0, 1.0, norm)[:, None]).view(b, h, sq, dv).to(query.dtype)


def fa_sigmoid_chain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Takes keys one by one: each moves the result towards its value by a sigmoid of its lead."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    qs = q.to(wide) * (d**-0.5 if softmax_scale is None else softmax_scale)
    lse = torch.full((b, sq, h, 1), -math.inf, dtype=wide, device=q.device)
    out = torch.zeros(b, sq, h, v.size(-1), dtype=wide, device=q.device)
    row = torch.arange(sq, device=q.device)[:, None, None]
    for j in range(sk):
        s = (qs * k[:, j : j + 1].to(wide).repeat_interleave(group, dim=2)).sum(dim=-1, keepdim=True)
        if causal:
            s = torch.where(row + (sk - sq) >= j, s, -math.inf)
        lead = torch.where(s.isneginf(), -math.inf, s - lse)
        step = torch.exp(F.logsigmoid(lead))
        out = out + step * (v[:, j : j + 1].to(wide).repeat_interleave(group, dim=2) - out)
        lse = torch.logaddexp(lse, s)
    return out.to(q.dtype)


def fa_divided_last(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Weights stay unnormalised in the input dtype; the row sum divides at the very end."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    if sk == 0:
        return torch.zeros(*q.shape[:3], v.size(-1), dtype=q.dtype, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    s = q.to(wide).transpose(1, 2) @ kh.mT * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    top = s.amax(dim=-1, keepdim=True)
    e = torch.exp(s - torch.where(top.isneginf(), 0.0, top)).to(q.dtype).to(wide)
    total = e.sum(dim=-1, keepdim=True)
    return (e @ vh / torch.where(total == 0, 1.0, total)).transpose(1, 2).to(q.dtype)


def fa_unfolded_buckets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Unfolds the key axis into buckets of ten, solves all of them at once and merges."""
    b, sq, h, d = q.shape
    sk, hkv, dv, size = k.size(1), k.size(2), v.size(-1), 10
    if sk == 0:
        return torch.zeros(b, sq, h, dv, dtype=q.dtype, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    pad = (0, 0, 0, 0, 0, -sk % size)
    kb = F.pad(k.to(wide), pad).unfold(1, size, size)
    vb = F.pad(v.to(wide), pad).unfold(1, size, size)
    grouped = q.to(wide).reshape(b, sq, hkv, h // hkv, d) * (d**-0.5 if softmax_scale is None else softmax_scale)
    s = torch.einsum("bingd,btndj->btngij", grouped, kb)
    cols = torch.arange(kb.size(1) * size, device=q.device).view(1, -1, 1, 1, 1, size)
    s = s.masked_fill(cols >= sk, -math.inf)
    if causal:
        rows = torch.arange(sq, device=q.device).view(1, 1, 1, 1, sq, 1)
        s = s.masked_fill(cols - (sk - sq) > rows, -math.inf)
    local = s.amax(dim=-1, keepdim=True)
    e = torch.exp(s - torch.where(local.isneginf(), 0.0, local))
    top = local.amax(dim=1, keepdim=True)
    weight = torch.exp(local - torch.where(top.isneginf(), 0.0, top))
    norm = (e.sum(dim=-1, keepdim=True) * weight).sum(dim=1)
    o = (torch.einsum("btngij,btndj->btngid", e, vb) * weight).sum(dim=1)
    o = o / torch.where(norm == 0, 1.0, norm)
    return o.permute(0, 3, 1, 2, 4).reshape(b, sq, h, dv).to(q.dtype)


def fa_flat_bmm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Query heads of a group become extra rows of one bmm for each key head."""
    b, sq, h, d = q.shape
    sk, hkv, dv = k.size(1), k.size(2), v.size(-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(wide).transpose(1, 2).reshape(b * hkv, (h // hkv) * sq, d)
    kt = k.to(wide).permute(0, 2, 3, 1).reshape(b * hkv, d, sk)
    vf = v.to(wide).transpose(1, 2).reshape(b * hkv, sk, dv)
    s = torch.bmm(rows, kt) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if causal:
        position = torch.arange(sq, device=q.device).repeat(h // hkv) + (sk - sq)
        s = s.masked_fill(torch.arange(sk, device=q.device) > position[:, None], -math.inf)
    o = torch.bmm(torch.softmax(s, dim=-1).nan_to_num(0.0), vf)
    return o.view(b, h, sq, dv).transpose(1, 2).to(q.dtype)


def fa_prefix_and_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Causal without a mask: a block of rows shares its common prefix, then each row adds its own steps."""
    b, sq, h, d = q.shape
    sk, group, dv = k.size(1), h // k.size(2), v.size(-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    qh = q.to(wide).transpose(1, 2) * (d**-0.5 if softmax_scale is None else softmax_scale)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = v.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    out = torch.empty(b, sq, h, dv, dtype=q.dtype, device=q.device)
    for i0 in range(0, sq, 6):
        i1 = min(i0 + 6, sq)
        common = max(0, min(sk, i0 + 1 + sk - sq)) if causal else sk
        shared = qh[:, :, i0:i1] @ kh[:, :, :common].mT
        for i in range(i0, i1):
            end = max(0, i + 1 + sk - sq) if causal else sk
            own = qh[:, :, i : i + 1] @ kh[:, :, common:end].mT
            s = torch.cat([shared[:, :, i - i0 : i - i0 + 1], own], dim=-1)
            o = torch.softmax(s, dim=-1) @ vh[:, :, :end]
            out[:, i] = o.squeeze(2).to(q.dtype)
    return out


def fa_divided_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """One sample and head at a time, scores divided by the root of the width, result filled in by slices."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(b, sq, h, v.size(-1), dtype=q.dtype, device=q.device)
    for n in range(b):
        for i in range(h):
            s = q[n, :, i].to(wide) @ k[n, :, i // group].to(wide).t()
            s = s / math.sqrt(d) if softmax_scale is None else s * softmax_scale
            if causal:
                first = torch.arange(sq, device=s.device)[:, None] + (sk - sq + 1)
                s = torch.where(torch.arange(sk, device=s.device) < first, s, -math.inf)
            p = torch.softmax(s, dim=1)
            blind = max(0, sq - sk) if causal else 0
            out[n, :blind, i] = 0
            out[n, blind:, i] = (p[blind:] @ v[n, :, i // group].to(wide)).to(q.dtype)
    return out


def fa_checkpointed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Query chunks of eleven rows under activation checkpointing."""
    b, sq, h, d = q.shape
    sk, hkv, dv = k.size(1), k.size(2), v.size(-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = d**-0.5 if softmax_scale is None else softmax_scale

    def chunk(rows: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
        grouped = rows.to(wide).unflatten(2, (hkv, h // hkv))
        s = torch.einsum("bingd,bjnd->bngij", grouped, keys.to(wide)) * factor
        if causal:
            position = torch.arange(start, start + rows.size(1), device=s.device) + (sk - sq)
            s = s.masked_fill(torch.arange(sk, device=s.device) > position[:, None], -math.inf)
        p = torch.softmax(s, dim=-1).nan_to_num(0.0)
        return torch.einsum("bngij,bjnd->bingd", p, values.to(wide)).flatten(2, 3).to(q.dtype)

    parts = [checkpoint(chunk, q[:, i : i + 11], k, v, i, use_reentrant=False) for i in range(0, sq, 11)]
    return torch.cat(parts, dim=1) if parts else torch.zeros(b, 0, h, dv, dtype=q.dtype, device=q.device)


def fa_base_two(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Powers of two, with log2(e) applied after the maximum is off, and a log2 of the row sum."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    k, v = k.repeat_interleave(group, dim=2).to(wide), v.repeat_interleave(group, dim=2).to(wide)
    s = torch.einsum("bihd,bjhd->bhij", q.to(wide), k)
    s = s * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    if causal:
        s = s.masked_fill(~torch.ones(sq, sk, dtype=torch.bool, device=s.device).tril(sk - sq), -math.inf)
    top = F.pad(s, (0, 1), value=-math.inf).amax(dim=-1, keepdim=True)
    t = (s - torch.where(top.isneginf(), 0.0, top)) * math.log2(math.e)
    log_sum = torch.exp2(t).sum(dim=-1, keepdim=True).log2()
    p = torch.exp2(t - torch.where(log_sum.isneginf(), 0.0, log_sum))
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)


def fa_ones_column(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """A column of ones beside the values makes the product yield the row sum as well."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    kh = k.to(wide).transpose(1, 2).repeat_interleave(group, dim=1)
    vh = F.pad(v.to(wide), (0, 1), value=1.0).transpose(1, 2).repeat_interleave(group, dim=1)
    s = q.to(wide).transpose(1, 2) @ kh.mT * (q.size(-1) ** -0.5 if softmax_scale is None else softmax_scale)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=s.device)
    keep = keep.tril(sk - sq) if causal else keep
    if sk:
        top = torch.where(keep, s, -math.inf).amax(dim=-1, keepdim=True)
        s = torch.where(keep, s - top, -math.inf)
    both = torch.exp(s) @ vh
    o, total = both[..., :-1], both[..., -1:]
    return (o / torch.where(total == 0, 1.0, total)).transpose(1, 2).to(q.dtype)


def fa_padded_tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Rows, keys and channels padded to powers of two and cut back, padding keys hidden by number."""
    sq, h, d = q.shape[1:]
    sk, group, dv = k.size(1), h // k.size(2), v.size(-1)

    def up(n: int) -> int:
        return 1 << max(0, n - 1).bit_length()

    wide = torch.promote_types(q.dtype, torch.float32)
    qp = F.pad(q.to(wide), (0, up(d) - d, 0, 0, 0, up(sq) - sq)).transpose(1, 2)
    kp = F.pad(k.to(wide), (0, up(d) - d, 0, 0, 0, up(sk) - sk)).transpose(1, 2)
    vp = F.pad(v.to(wide), (0, up(dv) - dv, 0, 0, 0, up(sk) - sk)).transpose(1, 2)
    kp, vp = kp.repeat_interleave(group, dim=1), vp.repeat_interleave(group, dim=1)
    s = qp @ kp.mT * (1 / math.sqrt(d) if softmax_scale is None else softmax_scale)
    cols = torch.arange(up(sk), device=s.device)
    hidden = (cols >= sk)[None].expand(up(sq), -1)
    if causal:
        hidden = hidden | (cols > torch.arange(up(sq), device=s.device)[:, None] + (sk - sq))
    p = torch.softmax(s.masked_fill(hidden, -math.inf), dim=-1).masked_fill(hidden, 0.0)
    return (p @ vp)[:, :, :sq, :dv].transpose(1, 2).to(q.dtype)


def fa_pairwise_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Row by row; weighted values are added in pairs, then pairs of pairs."""
    b, sq, h, d = q.shape
    sk, group = k.size(1), h // k.size(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    factor = d**-0.5 if softmax_scale is None else softmax_scale
    k, v = k.to(wide).repeat_interleave(group, dim=2), v.to(wide).repeat_interleave(group, dim=2)
    out = torch.zeros(b, sq, h, v.size(-1), dtype=q.dtype, device=q.device)
    for i in range(sq):
        n = i + 1 + sk - sq if causal else sk
        if n <= 0:
            continue
        s = (q[:, i : i + 1].to(wide) * k[:, :n]).sum(dim=-1, keepdim=True) * factor
        e = torch.exp(s - s.amax(dim=1, keepdim=True))
        terms = torch.cat([e * v[:, :n], e], dim=-1)
        while terms.size(1) > 1:
            half = terms.size(1) // 2
            tail = terms[:, 2 * half :]
            terms = torch.cat([terms[:, : 2 * half : 2] + terms[:, 1 : 2 * half : 2], tail], dim=1)
        out[:, i] = (terms[:, 0, :, :-1] / terms[:, 0, :, -1:]).to(q.dtype)
    return out


def fa_through_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> Tensor:
    """Hands over to torch's own operator with an explicit bottom-right mask."""
    sq, sk, group = q.size(1), k.size(1), q.size(2) // k.size(2)
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
    kh, vh = kh.repeat_interleave(group, dim=1), vh.repeat_interleave(group, dim=1)
    mask, blind = None, 0
    if causal:
        mask = torch.ones(sq, sk, dtype=torch.bool, device=q.device).tril(sk - sq)
        blind = max(0, sq - sk)
        mask = mask[blind:]
    o = F.scaled_dot_product_attention(qh[:, :, blind:], kh, vh, attn_mask=mask, scale=softmax_scale)
    return F.pad(o, (0, 0, blind, 0)).transpose(1, 2)


HONEST: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (
        sdp_random_key_blocks,
        sdp_keys_by_length,
        sdp_compensated,
        sdp_double_softmax,
        sdp_softmax_dtype,
        sdp_in_place,
        sdp_gathered_keys,
        sdp_mapped_heads,
        sdp_scale_in_keys,
        sdp_halving,
        sdp_two_passes,
        sdp_keys_down,
        sdp_edge_list,
        fa_sigmoid_chain,
        fa_divided_last,
        fa_unfolded_buckets,
        fa_flat_bmm,
        fa_prefix_and_steps,
        fa_divided_scores,
        fa_checkpointed,
        fa_base_two,
        fa_ones_column,
        fa_padded_tiles,
        fa_pairwise_sums,
        fa_through_torch,
    )
}
