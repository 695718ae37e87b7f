"""Masks as data: which key each query may see, in parts that compose.

A mask is a tuple of parts. Each part says on which of the axes B (sample), H (head), Q (query) and K (key) it depends,
and gives itself as a bool tensor (True = may be seen) or, for a bias, as numbers to add to the logits. What a mask
means and how it is handed over (`Delivery`) are two things: the same mask can go in as a bool tensor, as an additive
one, as a key padding or as a flag, in every shape that broadcasts to [B, H, Sq, Sk].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from attn_spec import values

Alignment = Literal["top-left", "bottom-right"]
Sizes = tuple[int, int, int, int]  # B, H, Sq, Sk
AXES = "BHQK"


def shape_over(axes: str, sizes: Sizes) -> tuple[int, int, int, int]:
    """The 4-D shape that has the full size on `axes` and 1 elsewhere."""
    b, h, q, k = (n if axis in axes else 1 for axis, n in zip(AXES, sizes, strict=True))
    return b, h, q, k


@dataclass(frozen=True)
class Causal:
    """Query i sees key j <= i (top-left) or j <= i + Sk - Sq (bottom-right).

    Without an alignment it is the one that the implementation declares; the two agree where Sq = Sk.
    """

    alignment: Alignment | None = None
    kind: ClassVar[str] = "causal"
    axes: ClassVar[str] = "QK"

    def visible(self, sizes: Sizes, seed: int, alignment: Alignment) -> Tensor:
        _, _, q_len, kv_len = sizes
        offset = kv_len - q_len if (self.alignment or alignment) == "bottom-right" else 0
        return torch.ones(q_len, kv_len, dtype=torch.bool).tril(offset)[None, None]

    def __str__(self) -> str:
        return f"causal({self.alignment})" if self.alignment else "causal"


@dataclass(frozen=True)
class KeyPadding:
    """Sample b has `lengths[b]` real keys, on the left unless `left` pads there."""

    lengths: tuple[int, ...]
    left: bool = False
    kind: ClassVar[str] = "key-padding"
    axes: ClassVar[str] = "BK"

    def visible(self, sizes: Sizes, seed: int, alignment: Alignment) -> Tensor:
        return values.padded_keys(self.lengths, sizes[3], self.left)[:, None, None, :]

    def __str__(self) -> str:
        return f"padding{'-left' if self.left else ''}{list(self.lengths)}".replace(" ", "")


@dataclass(frozen=True)
class Visible:
    """An arbitrary bool mask, random but for its empty rows; `axes` says what it depends on ("HQK": not on B)."""

    axes: str = "BHQK"
    density: float = 0.7
    empty_rows: tuple[int, ...] = ()
    kind: ClassVar[str] = "visible"

    def visible(self, sizes: Sizes, seed: int, alignment: Alignment) -> Tensor:
        return values.random_visible(shape_over(self.axes, sizes), seed, self.density, self.empty_rows)

    def __str__(self) -> str:
        return f"visible({self.axes}{f',empty={list(self.empty_rows)}' if self.empty_rows else ''})"


@dataclass(frozen=True)
class Bias:
    """Numbers added to the scaled logits; `axes` says what they depend on."""

    axes: str = "BHQK"
    spread: float = 2.0
    kind: ClassVar[str] = "bias"

    def bias(self, sizes: Sizes, seed: int) -> Tensor:
        return values.random_bias(shape_over(self.axes, sizes), seed, self.spread)

    def __str__(self) -> str:
        return f"bias({self.axes})"


@dataclass(frozen=True)
class Documents:
    """Keys of `lengths`, one document after the other: a query sees the keys of its own document alone.

    q_lengths: how many queries each document has, where that is another number than its keys.
    """

    lengths: tuple[int, ...]
    q_lengths: tuple[int, ...] = ()
    kind: ClassVar[str] = "documents"
    axes: ClassVar[str] = "QK"

    def visible(self, sizes: Sizes, seed: int, alignment: Alignment) -> Tensor:
        return values.same_document(self.q_lengths or self.lengths, self.lengths)[None, None]

    def __str__(self) -> str:
        asked = f"{list(self.q_lengths)}x" if self.q_lengths else ""
        return f"documents{asked}{list(self.lengths)}".replace(" ", "")


@dataclass(frozen=True)
class Window:
    """Query i, at position p among the keys, sees p - left <= j <= p + right; None is no bound. Goes by a parameter.

    p = i (top-left) or i + Sk - Sq (bottom-right), as the implementation declares.
    """

    left: int | None = None
    right: int | None = None
    kind: ClassVar[str] = "window"
    axes: ClassVar[str] = "QK"

    def __str__(self) -> str:
        return f"window({self.left},{self.right})".replace("None", "inf")


@dataclass(frozen=True)
class Alibi:
    """A slope for each head, or for each sample and head: -slope * |p - j| is added. Goes by a parameter.

    standard: the slopes are 2^(-8 h / H) of Press et al., which a module works out by itself, and not random ones.
    """

    batched: bool = False
    standard: bool = False
    kind: ClassVar[str] = "alibi"
    axes: ClassVar[str] = "HQK"

    def __str__(self) -> str:
        return "alibi" if self.standard else f"alibi({'BH' if self.batched else 'H'})"


@dataclass(frozen=True)
class Lengths:
    """Sample b has `q_lengths[b]` queries and `kv_lengths[b]` keys, packed end to end. Goes by a parameter."""

    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    kind: ClassVar[str] = "lengths"
    axes: ClassVar[str] = "BQK"

    def __str__(self) -> str:
        return f"packed{list(self.q_lengths)}x{list(self.kv_lengths)}".replace(" ", "")


Part = Causal | KeyPadding | Visible | Bias | Documents | Window | Alibi | Lengths
KINDS = (Causal, KeyPadding, Visible, Bias, Documents, Window, Alibi, Lengths)
PARTS: dict[str, type] = {kind.kind: kind for kind in KINDS}

Form = Literal["bool", "additive", "key-padding"]


@dataclass(frozen=True)
class Delivery:
    """How a mask is handed over.

    form: a bool tensor, an additive one, or a key padding [B, Sk].
    shape: one character for each axis, a letter where the tensor has the full size and 1 where it broadcasts:
        "BHQK", "B11K", "HQK", "QK", ... Empty: the smallest 4-D shape that holds the mask.
    flag: whether causality goes in by the implementation's flag (else inside the tensor). Windows and slopes always go
        in by a parameter.
    hidden: what stands for a hidden key in an additive tensor: "-inf", "min" (the dtype's lowest) or a number.
    strided: the tensor is handed over expanded or transposed, not contiguous.
    dtype: the dtype of an additive tensor; empty: that of q.
    """

    form: Form = "bool"
    shape: str = ""
    flag: bool = True
    hidden: str = "-inf"
    strided: bool = False
    dtype: str = ""

    def __str__(self) -> str:
        words = [self.form, self.shape, "" if self.hidden == "-inf" else self.hidden, self.dtype]
        return "-".join([w for w in words if w] + (["strided"] if self.strided else []))


def by_parameter(part: Part, how: Delivery) -> bool:
    """Whether a part goes in by a parameter of its own, and not inside the mask tensor."""
    return isinstance(part, (Window, Alibi, Lengths)) or (isinstance(part, Causal) and how.flag)


def combined(
    parts: tuple[Part, ...], sizes: Sizes, seed: int, alignment: Alignment
) -> tuple[Tensor | None, Tensor | None]:
    """The visible keys (bool) and the bias (float64) that the parts amount to, each broadcastable to [B, H, Sq, Sk].

    Windows and slopes are left out: they never stand in a tensor.
    """
    visible: Tensor | None = None
    bias: Tensor | None = None
    for place, part in enumerate(parts):
        if isinstance(part, Bias):
            more = part.bias(sizes, seed + place)
            bias = more if bias is None else bias + more
        elif not isinstance(part, (Window, Alibi, Lengths)):
            seen = part.visible(sizes, seed + place, alignment)
            visible = seen if visible is None else visible & seen
    return visible, bias


def delivered(
    parts: tuple[Part, ...],
    how: Delivery,
    sizes: Sizes,
    seed: int,
    alignment: Alignment,
    dtype: torch.dtype,
    exact_in: torch.dtype | None = None,
) -> Tensor | None:
    """The mask tensor as it is handed over: bool (True = may be seen), additive, or key padding [B, Sk].

    exact_in: a dtype in which the numbers shall be exact too (that of q, where the mask has another), so that casting
    the mask loses nothing.
    """
    tensor_parts = tuple(p for p in parts if not by_parameter(p, how))
    if not tensor_parts:
        return None
    visible, bias = combined(tensor_parts, sizes, seed, alignment)
    if how.form == "key-padding":
        assert visible is not None
        return visible.expand(sizes[0], 1, 1, sizes[3])[:, 0, 0].contiguous()
    axes = how.shape or "".join(a if any(a in p.axes for p in tensor_parts) else "1" for a in AXES)
    shape = shape_over(axes, sizes)
    if how.form == "bool":
        assert visible is not None
        tensor = visible.expand(shape)
    else:
        tensor = torch.zeros(shape, dtype=torch.float64) if bias is None else bias.expand(shape)
        tensor = tensor if exact_in is None else tensor.to(exact_in).double()
        if visible is not None:
            low = {"-inf": -torch.inf, "min": torch.finfo(dtype).min}.get(how.hidden)
            tensor = tensor.masked_fill(~visible, float(how.hidden) if low is None else low)
        tensor = tensor.to(dtype)
    tensor = tensor.reshape(shape[4 - len(axes) :])
    if how.strided:  # the same numbers behind other strides: the last two axes stored transposed
        return tensor.mT.contiguous().mT
    return tensor.contiguous()


def check(parts: tuple[Part, ...], how: Delivery, sizes: Sizes) -> None:
    """Raise ValueError where the parts cannot be delivered so."""
    tensor_parts = [p for p in parts if not by_parameter(p, how)]
    batch, _, q_len, kv_len = sizes
    axes = {a for p in tensor_parts for a in p.axes}
    if how.form != "additive" and any(isinstance(p, Bias) for p in tensor_parts):
        raise ValueError(f"mask: a bias can only be delivered in the additive form, not as {how.form!r}")
    if how.form == "key-padding" and axes - {"B", "K"}:
        raise ValueError(f"mask: a key padding can't hold a mask that depends on {sorted(axes)}")
    for place, letter in enumerate(how.shape[::-1]):
        if letter not in (AXES[::-1][place], "1") or place > 3:
            raise ValueError(f"shape: {how.shape!r} is not a tail of 'BHQK' with 1 where an axis broadcasts")
    if how.shape and tensor_parts and axes - set(how.shape):
        raise ValueError(f"shape: {how.shape!r} can't hold a mask that depends on {sorted(axes)}")
    for part in parts:
        if isinstance(part, KeyPadding) and len(part.lengths) != batch:
            raise ValueError(f"lengths: {part.lengths} has {len(part.lengths)} entries for a batch of {batch}")
        if isinstance(part, Documents):
            asked = part.q_lengths or part.lengths
            if sum(part.lengths) != kv_len or sum(asked) != q_len or len(asked) != len(part.lengths):
                raise ValueError(f"lengths: {part} does not add up to {q_len} queries and {kv_len} keys")
        if isinstance(part, Window):
            for name, bound in (("left", part.left), ("right", part.right)):
                if bound is not None and bound < 0:
                    raise ValueError(f"{name}: {bound} is negative; give 0 or more, or None for no bound")
        if isinstance(part, Lengths):
            for name, lengths, most in (("q_lengths", part.q_lengths, q_len), ("kv_lengths", part.kv_lengths, kv_len)):
                if len(lengths) != batch or not all(0 <= n <= most for n in lengths):
                    raise ValueError(f"{name}: {lengths} are not {batch} lengths of at most {most}")
            if tensor_parts:
                raise ValueError("mask: packed sequences take no mask tensor")
    for kind in (Window, Alibi, Lengths):
        if sum(isinstance(part, kind) for part in parts) > 1:
            raise ValueError(f"mask: more than one {kind.kind}; a parameter takes one")
