"""Faults of windows: their edges, their alignment, and how they meet causality."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

WINDOW = "A window is inclusive: p - left <= j <= p + right, itself not counted."


def _bounds(name: str, title: str, sources: tuple[str, ...], advice: str, before: int, after: int) -> Fault:
    def window(
        i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
    ) -> Tensor:
        p = i + kv_len - q_len if alignment == "bottom-right" else i
        seen = torch.ones_like(j - p, dtype=torch.bool)
        if left is not None:
            seen = seen & (j >= p - left + before)
        if right is not None:
            seen = seen & (j <= p + right + after)
        return seen

    return Fault(name, title, {"window": window}, sources, advice)


for _made in (
    ("window-one-key-more", "a window holds one key more on the left", "transformers#39408", -1, 0),
    ("window-one-key-less", "a window holds one key less on the left", "transformers#29623", 1, 0),
    ("window-one-key-more-ahead", "a window holds one key more on the right", "transformers#39408", 0, 1),
    ("window-one-key-less-ahead", "a window holds one key less on the right", "transformers#29623", 0, -1),
):
    add(_bounds(_made[0], _made[1], (f"huggingface/{_made[2]}", "ml-explore/mlx-lm#390"), WINDOW, *_made[3:]))


@fault(
    "window",
    "only the left bound of a window is applied: the future is seen in full",
    sources=("jax-ml/jax#39576",),
    advice="Apply the right bound too, whether or not the call is causal.",
)
def window_without_right(
    i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    seen = torch.ones_like(j - p, dtype=torch.bool)
    if left is not None:
        seen = seen & (j >= p - left)
    return seen


@fault(
    "window",
    "only the right bound of a window is applied: the past is seen in full",
    sources=("huggingface/transformers#29777",),
    advice="Apply the left bound too.",
)
def window_without_left(
    i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    seen = torch.ones_like(j - p, dtype=torch.bool)
    if right is not None:
        seen = seen & (j <= p + right)
    return seen


@fault(
    "window",
    "the two sides of a window are exchanged",
    sources=("jax-ml/jax#39576",),
    advice="The first number is that of the keys before.",
)
def window_sides_exchanged(
    i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
) -> Tensor:
    p = i + kv_len - q_len if alignment == "bottom-right" else i
    seen = torch.ones_like(j - p, dtype=torch.bool)
    if left is not None:
        seen = seen & (j <= p + left)
    if right is not None:
        seen = seen & (j >= p - right)
    return seen


@fault(
    "window",
    "the window is aligned to the top left: the queries' positions are not shifted by Sk - Sq",
    sources=("trymirai/lalamo#200",),
    advice="Add Sk - Sq to the position of a query.",
)
def window_top_left(
    i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
) -> Tensor:
    p = i
    seen = torch.ones_like(j - p, dtype=torch.bool)
    if left is not None:
        seen = seen & (j >= p - left)
    if right is not None:
        seen = seen & (j <= p + right)
    return seen


@fault(
    "window",
    "the window is aligned to the bottom right instead of the top left",
    sources=("trymirai/lalamo#200",),
    advice="Leave the position of a query at i, or declare `window_alignment: bottom-right`.",
)
def window_bottom_right(
    i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
) -> Tensor:
    p = i + kv_len - q_len
    seen = torch.ones_like(j - p, dtype=torch.bool)
    if left is not None:
        seen = seen & (j >= p - left)
    if right is not None:
        seen = seen & (j <= p + right)
    return seen


def _by_blocks(size: int) -> Fault:
    def window(
        i: Tensor, j: Tensor, q_len: int, kv_len: int, left: int | None, right: int | None, alignment: str
    ) -> Tensor:
        p = i + kv_len - q_len if alignment == "bottom-right" else i
        seen = torch.ones_like(j - p, dtype=torch.bool)
        if left is not None:
            seen = seen & (j >= (p - left).div(size, rounding_mode="floor") * size)
        if right is not None:
            seen = seen & (j <= p + right)
        return seen

    return Fault(
        f"window-by-blocks-{size}",
        f"the left bound of a window is rounded down to whole blocks of {size} keys",
        {"window": window},
        sources=("lucidrains/local-attention#5",),
        advice="Mask element by element in the block in which the window begins.",
    )


for _size in (16, 32, 64):
    add(_by_blocks(_size))


@fault(
    "meet",
    "the window replaces the causal mask",
    sources=("jax-ml/jax#39576", "NVIDIA/Megatron-LM#7039"),
    advice="Combine the two: past & near.",
)
def window_replaces_causal(past: Tensor | None, near: Tensor) -> Tensor:
    return near


@fault(
    "meet",
    "the window is ignored when the causal flag is set",
    sources=("huggingface/transformers#30127",),
    advice="Combine the two: past & near.",
)
def causal_replaces_window(past: Tensor | None, near: Tensor) -> Tensor:
    return near if past is None else past


@fault(
    "meet",
    "a key is seen when causality or the window lets it, instead of both",
    sources=("NVIDIA/Megatron-LM#7039",),
    advice="Combine the two: past & near.",
)
def window_or_causal(past: Tensor | None, near: Tensor) -> Tensor:
    return near if past is None else past | near
