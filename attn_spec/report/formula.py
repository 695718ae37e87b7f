"""The right answer as lines of plain torch, by the formula, for a reproducer."""

from __future__ import annotations

import torch

from attn_spec.conventions import Meaning
from attn_spec.problem import Arguments, Problem


def formula(p: Problem, a: Arguments, meaning: Meaning) -> list[str]:
    """Lines over q, k, v, mask, alibi and sinks that leave the logits in `s` and the right output in `expected`."""
    if a.lengths is not None:
        raise NotImplementedError("packed samples have no formula of a few lines")
    group = p.heads // p.kv_heads
    share = f".repeat(1, {group}, 1, 1)" if meaning.grouping == "tiled" else f".repeat_interleave({group}, dim=1)"
    shared = share if group > 1 else ""
    usual = "1.0" if meaning.scale == "1" else "q.shape[-1] ** -0.5"
    lines = [f"s = q.double() @ k.double(){shared}.mT * {usual if a.scale is None else repr(a.scale)}"]
    if a.softcap is not None and meaning.softcap_order == "first":
        lines.append(f"s = {a.softcap} * torch.tanh(s / {a.softcap})")
    if a.mask is not None and a.mask.dtype == torch.bool:
        seen = "mask[:, None, None, :]" if a.form == "key-padding" else "mask"
        lines.append(f"s = s.masked_fill(~{seen}, -torch.inf)")
    elif a.mask is not None:
        lines.append("s = s + mask.double()")
    shift = p.kv_len - p.q_len if meaning.window_alignment == "bottom-right" else 0
    if a.alibi is not None or a.window is not None:
        lines.append(f"ahead = torch.arange({p.kv_len}) - torch.arange({p.q_len})[:, None] - {shift}")
    if a.alibi is not None:
        distance = "ahead.abs()" if meaning.alibi == "distance" else "-ahead"
        lines.append(f"s = s - alibi.double()[..., None, None] * {distance}")
    if a.softcap is not None and meaning.softcap_order != "first":
        lines.append(f"s = {a.softcap} * torch.tanh(s / {a.softcap})")
    for bound, outside in zip(a.window or (), ("ahead < -{}", "ahead > {}"), strict=False):
        if bound is not None:
            lines.append(f"s = s.masked_fill({outside.format(bound)}, -torch.inf)")
    if a.causal:
        offset = p.kv_len - p.q_len if meaning.alignment == "bottom-right" else 0
        lines.append(f"s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril({offset or ''}), -torch.inf)")
    weights = "s.softmax(-1)"
    if a.sinks is not None:
        lines.append("extra = torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)")
        weights = "extra.softmax(-1)[..., :-1]"
    elif p.mask and meaning.empty_rows != "nan":
        fill = "0.0" if meaning.empty_rows == "zero" else "1 / s.shape[-1]"
        weights = f"torch.where(s.isneginf().all(-1, keepdim=True), {fill}, s.softmax(-1))"
    return [*lines, f"expected = {weights} @ v.double(){shared}"]
