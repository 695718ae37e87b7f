"""The reference pipeline: attention as a row of small pure functions, each of which can be changed on its own.

    arrange -> choose_scale -> share_heads -> arrange_mask -> read_mask -> use_causal -> causal -> combine
            -> score -> add_bias -> hide -> normalise -> settle -> mix -> merge

With every block right this is the answer (`attn_spec.oracle` runs it in float64, a few query rows at a time). With one
block changed it is a fault: what an implementation computes that gets just this wrong. The source of the right block
and of the changed one, side by side, is the explanation.

Shapes: q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; logits and weights [B, H, Sq, Sk]; i [Sq, 1] and
j [1, Sk] are the positions of the queries and keys at hand.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_spec.conventions import Meaning
from attn_spec.problem import Arguments

# the blocks ----------------------------------------------------------------------------------------------------------


def arrange(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What is done to q, k and v on the way in: nothing."""
    return q, k, v


def choose_scale(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The scale that was given, else 1 / sqrt(d_k), d_k the channels of one head."""
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.shape[-1])


def share_heads(x: Tensor, heads: int, grouping: str) -> Tensor:
    """Key/value heads repeated so that query head h reads kv head h // group."""
    group = heads // x.shape[1]
    if group == 1:
        return x
    if grouping == "tiled":
        return x.repeat(1, group, 1, 1)
    return x.repeat_interleave(group, dim=1)


def arrange_mask(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    """What is done to a mask on the way in: nothing."""
    return mask


def read_mask(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    """The visible keys and the bias that a mask tensor stands for; an additive one hides with its own -inf."""
    if mask is None:
        return None, None
    if form == "key-padding":
        return mask[:, None, None, :], None
    if form == "bool":
        return mask, None
    return None, mask


def use_causal(flag: bool, mask: Tensor | None, form: str | None, q: Tensor, k: Tensor, scale: float | None) -> bool:
    """Whether the causal mask is applied: when asked, whatever else is asked."""
    return flag


def causal(i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, heads: int) -> Tensor:
    """Query i sees the keys up to its own position."""
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    return j <= i + offset


def combine(visible: Tensor | None, past: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A key is seen when the mask lets it (`visible`) and causality does (`past`)."""
    return visible, past


def score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled dot products."""
    return q @ k.mT * scale


def add_bias(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The bias is added to the scaled logits."""
    return s if bias is None else s + bias


def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    """Keys that the mask or causality hides get -inf before the softmax."""
    for seen in (visible, past):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    return s


def normalise(s: Tensor) -> Tensor:
    """Softmax over the keys, the row maximum taken off first."""
    m = s.amax(dim=-1, keepdim=True) if s.shape[-1] else s.new_zeros(())
    e = torch.exp(s - m.clamp(min=torch.finfo(s.dtype).min))
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)


def settle(p: Tensor, s: Tensor, visible: Tensor | None, past: Tensor | None, empty_rows: str) -> Tensor:
    """A row with no visible key gets what the conventions declare; the normalised row is zero there already."""
    if empty_rows == "zero" or not p.shape[-1]:
        return p
    value = 1 / p.shape[-1] if empty_rows == "mean" else torch.nan
    return torch.where((s > -torch.inf).any(dim=-1, keepdim=True), p, value)


def mix(p: Tensor, v: Tensor) -> Tensor:
    """The weighted sum of the values."""
    return p @ v


def merge(o: Tensor, q: Tensor) -> Tensor:
    """What is done to the output on the way out: nothing."""
    return o


# the pipeline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pipeline:
    """The blocks of one computation; `Pipeline()` is right, `Pipeline(score=...)` has that block changed."""

    arrange: Callable[..., Any] = arrange
    choose_scale: Callable[..., Any] = choose_scale
    share_heads: Callable[..., Any] = share_heads
    arrange_mask: Callable[..., Any] = arrange_mask
    read_mask: Callable[..., Any] = read_mask
    use_causal: Callable[..., Any] = use_causal
    causal: Callable[..., Any] = causal
    combine: Callable[..., Any] = combine
    score: Callable[..., Any] = score
    add_bias: Callable[..., Any] = add_bias
    hide: Callable[..., Any] = hide
    normalise: Callable[..., Any] = normalise
    settle: Callable[..., Any] = settle
    mix: Callable[..., Any] = mix
    merge: Callable[..., Any] = merge


BLOCKS: dict[str, Callable[..., Any]] = {f.name: f.default for f in dataclasses.fields(Pipeline)}  # type: ignore[misc]
RIGHT = Pipeline()


@dataclass(frozen=True, eq=False)
class Trace:
    """Every tensor of one run: k and v with their heads shared out, logits after hiding, weights, output."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    bias: Tensor | None
    logits: Tensor
    weights: Tensor
    output: Tensor


def run(arguments: Arguments, meaning: Meaning, pipeline: Pipeline = RIGHT, rows: slice | None = None) -> Trace:
    """Run a pipeline on the arguments, in their dtype; with `rows`, on these query rows only."""
    if arguments.scale is None and meaning.scale == "1":
        arguments = arguments.replace(scale=1.0)
    blocks, mask = pipeline, arguments.mask
    q, k, v = blocks.arrange(arguments.q, arguments.k, arguments.v)
    heads, q_len, kv_len = q.shape[1], q.shape[2], k.shape[2]
    scale = blocks.choose_scale(arguments.scale, q, k, v)
    if mask is not None:
        mask = blocks.arrange_mask(mask, arguments.form, arguments.q, arguments.k, arguments.causal)
    k, v = (blocks.share_heads(x, heads, meaning.grouping) for x in (k, v))
    i = torch.arange(q_len, device=q.device)[:, None]
    j = torch.arange(kv_len, device=q.device)[None, :]
    if rows is not None:
        q, i = q[:, :, rows], i[rows]
        if mask is not None and arguments.form != "key-padding" and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask[..., rows, :]
    visible, bias = blocks.read_mask(mask, arguments.form)
    past = None
    if blocks.use_causal(arguments.causal, arguments.mask, arguments.form, arguments.q, arguments.k, arguments.scale):
        visible, past = blocks.combine(visible, blocks.causal(i, j, q_len, kv_len, meaning.alignment, heads))
    logits = blocks.hide(blocks.add_bias(blocks.score(q, k, scale), bias, scale), visible, past)
    weights = blocks.settle(blocks.normalise(logits), logits, visible, past, meaning.empty_rows)
    output = blocks.merge(blocks.mix(weights, v), q)
    return Trace(q, k, v, scale, bias, logits, weights, output)
