"""Kinds of wrong modules that once got through or were named after a symptom; each stands here as a small imitation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attn_spec import adapt, check_attention

TELLING = [
    *("ATN103", "ATN203", "ATN501", "ATN516", "ATN550", "ATN650", "ATN652", "ATN654", "ATN655", "ATN656", "ATN657"),
    *("ATN951", "ATN952", "ATN1250", "ATN1251", "ATN1253", "ATN1254"),
]


class Base(nn.Module):
    """Self-attention on x [B, S, hidden]; what differs is in the methods."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size) for _ in range(4))

    def turned(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v

    def attend(self, x: Tensor, hidden: Tensor | None, context: Tensor | None = None, **others: Any) -> Tensor:
        context = x if context is None else context
        q, k, v = (
            f(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f, y in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        q, k, v = self.turned(q, k, v, **others)
        s = q @ k.mT / math.sqrt(q.shape[-1])
        s = s if hidden is None else s.masked_fill(hidden, torch.finfo(s.dtype).min)
        out: Tensor = self.o_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


def beyond(lengths: Tensor, n: int) -> Tensor:
    return (torch.arange(n) >= lengths[:, None])[:, None, None]


class Lengths(Base):
    """Right: lengths [B]."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.attend(x, None if lengths is None else beyond(lengths, x.shape[1]))


class LengthsNotRead(Base):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.attend(x, None)


class LengthsOneMore(Base):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.attend(x, None if lengths is None else beyond(lengths + 1, x.shape[1]))


class LengthsZeroInPlace(Base):
    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = None if lengths is None else beyond(lengths, x.shape[1])
        if hidden is not None:
            x.data[hidden[:, 0, 0]] = 0.0
        return self.attend(x, hidden)


class MaskKept(Base):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        self.kept: dict[Any, Tensor] = {}

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.attend(x, None)
        return self.attend(x, self.kept.setdefault(x.shape[:2], beyond(lengths, x.shape[1])))


class EmptiesPadding(Base):
    """Right: rows of padding are zero."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.attend(x, None)
        hidden = beyond(lengths, x.shape[1])
        return self.attend(x, hidden).masked_fill(hidden[:, 0, 0, :, None], 0.0)


class PaddingOnQueries(Base):
    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        mask = src_key_padding_mask
        return self.attend(src, None if mask is None else mask[:, None, :, None])


class PaddingOfKeys(Base):
    """Right: the mask that torch's encoder layer takes."""

    def forward(self, src: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        mask = src_key_padding_mask
        return self.attend(src, None if mask is None else mask[:, None, None])


class HidesNothing(Base):
    """Takes masks [B, S, S] alone."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            assert mask.shape == (len(x), x.shape[1], x.shape[1])
        return self.attend(x, None)


class Prefix(Base):
    def forward(self, x: Tensor, prefix_len: Tensor) -> Tensor:
        i = torch.arange(x.shape[1])
        seen = (i <= i[:, None]) | (i < self.of(prefix_len))
        return self.attend(x, ~seen)

    def of(self, prefix_len: Tensor) -> Tensor:
        return prefix_len[:, None, None, None]


class PrefixOfAll(Prefix):
    def of(self, prefix_len: Tensor) -> Tensor:
        return prefix_len.max()


class Rotary(Base):
    """Right: rotations by halves."""

    def __init__(self, hidden_size: int, num_heads: int, max_position_embeddings: int = 64) -> None:
        super().__init__(hidden_size, num_heads)
        self.longest = max_position_embeddings

    def angles(self, positions: Tensor, width: int) -> Tensor:
        a = positions[..., None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
        return torch.cat([a, a], -1)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        a = self.angles(positions, x.shape[-1]).to(x)
        one, other = x.chunk(2, -1)
        return x * a.cos() + torch.cat([-other, one], -1) * a.sin()

    def turned(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        positions = torch.arange(q.shape[2]) if positions is None else positions[:, None]
        return self.rotated(q, positions), self.rotated(k, positions), v

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return self.attend(x, future, positions=position_ids)


class RotaryMixed(Rotary):
    def angles(self, positions: Tensor, width: int) -> Tensor:
        return (positions[..., None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)).repeat_interleave(2, -1)


class RotaryClamped(Rotary):
    def angles(self, positions: Tensor, width: int) -> Tensor:
        return super().angles(positions.clamp(max=self.longest - 1), width)


class RotaryForKeysAlone(Rotary):
    def turned(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.arange(q.shape[2])
        return self.rotated(q, own), self.rotated(k, own if positions is None else positions[:, None]), v


class RotaryOfValues(Rotary):
    def turned(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.arange(q.shape[2])
        return self.rotated(q, own), self.rotated(k, own), self.rotated(v, own)


class Logn(Rotary):
    """Right: queries of later positions are longer."""

    def turned(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().turned(q, k, v, positions)
        return q * (2 + torch.arange(q.shape[2])).log()[:, None].to(q), k, v


class KeysCut(Base):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.attend(x, None, context)

    def attend(self, x: Tensor, hidden: Tensor | None, context: Tensor | None = None, **others: Any) -> Tensor:
        assert context is not None
        q, k, v = (
            f(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f, y in ((self.q_proj, x), (self.k_proj, context.detach()), (self.v_proj, context))
        )
        s = q @ k.mT / math.sqrt(q.shape[-1])
        out: Tensor = self.o_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class KeysByQueries(Base):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        self.used = [self.q_proj, self.q_proj, self.v_proj]

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            f(y).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f, y in zip(self.used, (x, context, context), strict=True)
        )
        s = q @ k.mT / math.sqrt(q.shape[-1])
        out: Tensor = self.o_proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


RED = {  # with the fault that names it; "": none does
    LengthsNotRead: "",
    LengthsOneMore: "",
    LengthsZeroInPlace: "inputs-changed-in-place",
    MaskKept: "mask-kept-between-calls",
    PaddingOnQueries: "padding-on-queries",
    HidesNothing: "mask-ignored",
    PrefixOfAll: "",
    RotaryMixed: "",
    RotaryClamped: "",
    RotaryForKeysAlone: "",
    RotaryOfValues: "values-rotated",
    KeysCut: "gradient-cut-before-projection",
    KeysByQueries: "keys-by-query-projection",
}


@pytest.mark.parametrize("kind", RED, ids=lambda kind: kind.__name__)
def test_red_and_named(kind: type[nn.Module]) -> None:
    report = check_attention(kind, laws=TELLING)
    assert report.verdict == "failed", f"{kind.__name__} gets through"
    assert not RED[kind] or RED[kind] in report.diagnosis[:2], (report.diagnosis, report.judgement.headline)


@pytest.mark.parametrize(
    "kind", [Lengths, EmptiesPadding, PaddingOfKeys, Prefix, Rotary, Logn], ids=lambda k: k.__name__
)
def test_left_alone(kind: type[nn.Module]) -> None:
    report = check_attention(kind, laws=TELLING)
    assert report.passed, str(report)


def test_what_is_taken_is_judged() -> None:
    assert adapt(Lengths).adapter.signature.roles["key_padding"] == "lengths"
    assert adapt(PaddingOfKeys).adapter.signature.roles["key_padding"] == "src_key_padding_mask"
    assert adapt(HidesNothing).adapter.three_axes
    assert "padding" in adapt(EmptiesPadding).adapter.no_padding
