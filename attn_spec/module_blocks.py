"""A whole attention module as a row of small functions around attention itself, each of which can be changed alone.

    receive -> take -> assign -> project -> split -> turn -> [attention, attn_spec.blocks] -> join -> emerge -> finish

those that say when something is done: keep (what a call leaves to the next), use_mask, reach (where gradients go) and
drop; and weigh, between the weights and the values. With every one right this is the module that `attn_spec.whole`
answers for; with one changed it is a fault.

Shapes: x [B, S, width], context [B, Sk, width]; weights [in, out]; y [B, S, H * D]; q, k, v and o [B, H, S, D].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import blocks
from attn_spec.conventions import Meaning
from attn_spec.problem import Arguments

Weights = Mapping[str, Tensor]


def receive(x: Tensor) -> Tensor:
    """What is done to the hidden states: nothing."""
    return x


def take(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What queries, keys and values are made from."""
    return x, context, context


def assign(w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Which weights make the queries, the keys and the values."""
    return w["q"], w["k"], w["v"]


def project(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """One projection."""
    return x @ w if b is None else x @ w + b


def split(y: Tensor, heads: int) -> Tensor:
    """Channels to heads: [B, S, H * D] -> [B, H, S, D]."""
    return y.reshape(*y.shape[:-1], heads, -1).transpose(1, 2)


def join(o: Tensor) -> Tensor:
    """Heads to channels: [B, H, S, D] -> [B, S, H * D]."""
    return o.transpose(1, 2).flatten(2)


def emerge(y: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The output projection."""
    return y @ w if b is None else y @ w + b


def finish(y: Tensor, x: Tensor) -> Tensor:
    """What is done to the output: nothing; the residual is added outside."""
    return y


def keep(kept: dict[str, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What is left for the next call: nothing."""
    return k, v


def use_mask(mask: Tensor | None, training: bool, asked: bool, kept: dict[str, Tensor]) -> Tensor | None:
    """When the mask is used: always, in training, whether weights are asked for or not, and that of this call."""
    return mask


def turn(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the positions of q, k and v [B, H, S, D] do to them: nothing."""
    return q, k, v


def reach(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where gradients go: everywhere."""
    return q, k, v


def drop(p: Tensor, rate: float, training: bool) -> Tensor:
    """Dropout, in training only."""
    return F.dropout(p, rate, training)


def weigh(p: Tensor) -> Tensor:
    """What becomes of the weights [B, H, S, Sk] before they meet the values: nothing."""
    return p


@dataclass(frozen=True)
class ModulePipeline:
    """The blocks of one module; `ModulePipeline()` is right. core: those of attention itself."""

    receive: Callable[..., Any] = receive
    take: Callable[..., Any] = take
    assign: Callable[..., Any] = assign
    project: Callable[..., Any] = project
    split: Callable[..., Any] = split
    join: Callable[..., Any] = join
    emerge: Callable[..., Any] = emerge
    finish: Callable[..., Any] = finish
    keep: Callable[..., Any] = keep
    use_mask: Callable[..., Any] = use_mask
    turn: Callable[..., Any] = turn
    reach: Callable[..., Any] = reach
    drop: Callable[..., Any] = drop
    weigh: Callable[..., Any] = weigh
    core: blocks.Pipeline = blocks.RIGHT


RIGHT = ModulePipeline()
BLOCKS: dict[str, Callable[..., Any]] = {
    f.name: getattr(RIGHT, f.name) for f in dataclasses.fields(ModulePipeline) if f.name != "core"
}


@dataclass(frozen=True)
class Mode:
    """How a module is run: training, dropout, whether weights are asked for, and what earlier calls have left."""

    training: bool = False
    dropout: float = 0.0
    asked: bool = False
    kept: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def run(
    x: Tensor,
    context: Tensor | None,
    weights: Weights,
    like: Arguments,
    meaning: Meaning,
    pipeline: ModulePipeline = RIGHT,
    mode: Mode | None = None,
) -> tuple[Tensor, Tensor]:
    """Run a module on hidden states, in their dtype: output [B, S, width] and weights [B, H, S, Sk].

    weights: "q", "k", "v" and "o" [in, out], "q_bias" and so on.  like: its mask, causal flag, scale and head counts.
    """
    f, mode = pipeline, mode or Mode()
    heads, kv_heads = like.q.shape[1], like.k.shape[1]
    x = f.receive(x)
    sources = f.take(x, x if context is None else context)
    made = [
        f.split(f.project(source, w, weights.get(f"{name}_bias")), kv_heads if name in "kv" else heads)
        for name, source, w in zip("qkv", sources, f.assign(weights), strict=True)
    ]
    q, k, v = f.reach(*f.turn(*made))
    k, v = f.keep(mode.kept, k, v)
    mask = f.use_mask(like.mask, mode.training, mode.asked, mode.kept)
    form = like.form if mask is not None else None
    arguments = like.replace(q=q, k=k, v=v, mask=mask, form=form)
    core = f.core
    if mode.dropout or f.weigh is not weigh:
        settle = core.settle

        def settled(p: Tensor, *others: Any) -> Tensor:
            weighed: Tensor = f.weigh(settle(p, *others))
            return f.drop(weighed, mode.dropout, mode.training) if mode.dropout else weighed

        core = dataclasses.replace(core, settle=settled)
    trace = blocks.run(arguments, meaning, core)
    y = f.join(trace.output)
    if "g" in weights:
        y = y * torch.sigmoid(project(x, weights["g"], weights.get("g_bias")))
    if "o" in weights:
        y = f.emerge(y, weights["o"], weights.get("o_bias"))
    return f.finish(y, x), trace.weights
