"""The reference pipeline: attention as a row of small pure functions, each of which can be changed on its own.

    heed -> arrange -> choose_scale -> share_heads -> arrange_mask -> read_mask
         -> use_causal -> causal -> window -> meet -> combine
         -> score -> soften -> add_bias -> alibi -> hide -> finish
         -> normalise -> drain -> settle -> mix -> merge, and log_sum

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
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_spec.conventions import Meaning
from attn_spec.problem import Arguments

# the blocks ----------------------------------------------------------------------------------------------------------


def heed(a: Arguments) -> Arguments:
    """What is heeded of what is asked: all of it, in every combination."""
    return a


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


def window(
    i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
) -> Tensor:
    """Query i sees the `left` keys before its own position, that one, and the `right` keys after it."""
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    seen = torch.ones_like(j - p, dtype=torch.bool)
    if left is not None:
        seen = seen & (j >= p - left)
    if right is not None:
        seen = seen & (j <= p + right)
    return seen


def meet(past: Tensor | None, near: Tensor) -> Tensor:
    """A key is seen when causality lets it (`past`) and the window does (`near`)."""
    return near if past is None else past & near


def combine(visible: Tensor | None, past: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A key is seen when the mask lets it (`visible`) and causality does (`past`)."""
    return visible, past


def score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled dot products."""
    return q @ k.mT * scale


def soften(s: Tensor, softcap: float | None) -> Tensor:
    """Logits are brought between -softcap and softcap, before anything is added or hidden."""
    return s if softcap is None else softcap * torch.tanh(s / softcap)


def add_bias(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """The bias is added to the scaled logits."""
    return s if bias is None else s + bias


def alibi(
    slopes: Tensor, i: Tensor, j: Tensor, q_len: int, kv_len: int, alignment: str, form: str, scale: float
) -> Tensor:
    """What the slopes [H] or [B, H] add to the logits: less, the further a key is from the query's own position."""
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    distance = (p - j).abs() if form == "distance" else p - j
    return -slopes[..., None, None] * distance


def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    """Keys that the mask or causality hides get -inf before the softmax."""
    for seen in (visible, past):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    return s


def finish(s: Tensor, softcap: float | None) -> Tensor:
    """What is done to the logits once keys are hidden: nothing."""
    return s


def normalise(s: Tensor) -> Tensor:
    """Softmax over the keys, the row maximum taken off first."""
    m = s.amax(dim=-1, keepdim=True) if s.shape[-1] else s.new_zeros(())
    e = torch.exp(s - m.clamp(min=torch.finfo(s.dtype).min))
    return e / e.sum(dim=-1, keepdim=True).clamp(min=1.0)


def drain(p: Tensor, s: Tensor, sinks: Tensor | None) -> Tensor:
    """A sink [H] is one more logit in the denominator alone: what it takes, the keys of the row lose."""
    if sinks is None or not s.shape[-1]:
        return p
    return p * torch.sigmoid(torch.logsumexp(s, dim=-1, keepdim=True) - sinks[:, None, None])


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


def log_sum(s: Tensor, sinks: Tensor | None) -> Tensor:
    """The natural logarithm of the denominator [B, H, Sq]; -inf where there is nothing to sum."""
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], dim=-1)
    return torch.logsumexp(s, dim=-1) if s.shape[-1] else s.new_full(s.shape[:-1], -torch.inf)


# the pipeline --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pipeline:
    """The blocks of one computation; `Pipeline()` is right, `Pipeline(score=...)` has that block changed."""

    heed: Callable[..., Any] = heed
    arrange: Callable[..., Any] = arrange
    choose_scale: Callable[..., Any] = choose_scale
    share_heads: Callable[..., Any] = share_heads
    arrange_mask: Callable[..., Any] = arrange_mask
    read_mask: Callable[..., Any] = read_mask
    use_causal: Callable[..., Any] = use_causal
    causal: Callable[..., Any] = causal
    window: Callable[..., Any] = window
    meet: Callable[..., Any] = meet
    combine: Callable[..., Any] = combine
    score: Callable[..., Any] = score
    soften: Callable[..., Any] = soften
    add_bias: Callable[..., Any] = add_bias
    alibi: Callable[..., Any] = alibi
    hide: Callable[..., Any] = hide
    finish: Callable[..., Any] = finish
    normalise: Callable[..., Any] = normalise
    drain: Callable[..., Any] = drain
    settle: Callable[..., Any] = settle
    mix: Callable[..., Any] = mix
    merge: Callable[..., Any] = merge
    log_sum: Callable[..., Any] = log_sum


BLOCKS: dict[str, Callable[..., Any]] = {f.name: f.default for f in dataclasses.fields(Pipeline)}  # type: ignore[misc]
RIGHT = Pipeline()


@dataclass(frozen=True, eq=False)
class Trace:
    """Every tensor of one run: k and v with their heads shared out, logits after hiding, weights, output.

    bias: what a mask adds.  slopes: what ALiBi adds.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    bias: Tensor | None
    logits: Tensor
    weights: Tensor
    output: Tensor
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    blocks: Pipeline = RIGHT
    lse_sinks: str = "included"

    @cached_property
    def lse(self) -> Tensor:
        """The log-sum-exp [B, H, Sq] of the logits and, where it counts, the sink."""
        lse: Tensor = self.blocks.log_sum(self.logits, self.sinks if self.lse_sinks == "included" else None)
        return lse


def run(arguments: Arguments, meaning: Meaning, pipeline: Pipeline = RIGHT, rows: slice | None = None) -> Trace:
    """Run a pipeline on the arguments, in their dtype; with `rows`, on these query rows only."""
    if arguments.scale is None and meaning.scale == "1":
        arguments = arguments.replace(scale=1.0)
    blocks, arguments = pipeline, pipeline.heed(arguments)
    mask, softcap, slopes = arguments.mask, arguments.softcap, None
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
        past = blocks.causal(i, j, q_len, kv_len, meaning.alignment, heads)
    if arguments.window is not None:
        near = blocks.window(i, j, q_len, kv_len, *arguments.window, meaning.window_alignment)
        past = blocks.meet(past, near)
    if past is not None:
        visible, past = blocks.combine(visible, past)
    logits = blocks.score(q, k, scale)
    if meaning.softcap_order == "first":
        logits = blocks.soften(logits, softcap)
    logits = blocks.add_bias(logits, bias, scale)
    if arguments.alibi is not None:
        slopes = blocks.alibi(arguments.alibi, i, j, q_len, kv_len, meaning.window_alignment, meaning.alibi, scale)
        logits = logits + slopes
    if meaning.softcap_order == "after-bias":
        logits = blocks.soften(logits, softcap)
    logits = blocks.finish(blocks.hide(logits, visible, past), softcap)
    weights = blocks.drain(blocks.normalise(logits), logits, arguments.sinks)
    taken = meaning.empty_rows == "mean" and arguments.sinks is not None  # beside low numbers the sink takes all
    weights = blocks.settle(weights, logits, visible, past, "zero" if taken else meaning.empty_rows)
    output = blocks.merge(blocks.mix(weights, v), q)
    others = softcap, slopes, arguments.sinks, blocks, meaning.lse_sinks
    return Trace(q, k, v, scale, bias, logits, weights, output, *others)
