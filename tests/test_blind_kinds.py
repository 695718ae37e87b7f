"""Honest modules that are more than attention between four Linears, each beside a wrong one of the same look."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import adapt, check_attention
from attn_spec.adapters.function import flat
from attn_spec.adapters.modules import layouts
from attn_spec.adapters.modules.expected import documented

torch.set_num_threads(1)

ALL = [
    *("ATN103", "ATN105", "ATN106", "ATN150", "ATN152", "ATN203", "ATN211", "ATN250", "ATN501", "ATN510", "ATN521"),
    *("ATN601", "ATN650", "ATN658", "ATN951", "ATN1150", "ATN1250"),
]


def green(target: Any, *, ran: tuple[str, ...] = (), laws: list[str] = ALL) -> None:
    """It is not accused, and these laws were not left out."""
    report = check_attention(target, laws=laws, exitfirst=False)
    assert report.verdict == "passed", report.judgement.headline
    passed = {result.code for result in report.results if result.outcome == "passed"}
    assert set(ran) <= passed, sorted(passed)


def red(target: Any, *codes: str, laws: list[str] = ALL) -> None:
    report = check_attention(target, laws=laws, exitfirst=False)
    failed = {result.code for result in report.results if result.outcome == "failed"}
    assert set(codes) <= failed, (failed, report.verdict)


def heads_of(y: Tensor, heads: int) -> Tensor:
    return y.reshape(*y.shape[:-1], heads, -1).transpose(1, 2)


# what is returned ----------------------------------------------------------------------------------------------------


@dataclass
class Returned:
    weights: Tensor
    output: Tensor


class Named(NamedTuple):
    first: Tensor
    second: Tensor


def test_tensors_of_what_is_returned_by_name() -> None:
    one, two = torch.zeros(1), torch.ones(2)
    assert [x is y for x, y in zip(flat(Returned(one, two)), (two, one), strict=True)] == [True, True]
    assert [x is y for x, y in zip(flat({"attention": one, "output": two}), (two, one), strict=True)] == [True, True]
    assert [x is y for x, y in zip(flat(Named(one, two)), (one, two), strict=True)] == [True, True]
    assert flat(Returned) == []
    assert flat(Returned(None, two))[0] is two  # type: ignore[arg-type]


class Plain(nn.Module):
    """What the imitations share: projections, weights and the way out."""

    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.out_proj = nn.Linear(dim, dim)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (heads_of(f(x), self.num_heads) for f in (self.to_q, self.to_k, self.to_v))
        return q, k, v

    def out(self, o: Tensor) -> Tensor:
        y: Tensor = self.out_proj(o.transpose(1, 2).flatten(2))
        return y


class InDataclass(Plain):
    def forward(self, x: Tensor) -> Returned:
        q, k, v = self.parts(x)
        p = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return Returned(p, self.out(p @ v))


class WithLogits(Plain):
    shift = 0.0

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.parts(x)
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        return self.out(logits.softmax(-1) @ v), logits.detach() + self.shift * torch.eye(x.shape[1], dtype=x.dtype)


class WithOtherLogits(WithLogits):
    shift = 3.0


def test_a_dataclass_of_tensors_is_read() -> None:
    green(InDataclass, ran=("ATN103", "ATN152", "ATN650"))


def test_logits_beside_the_output_are_no_weights() -> None:
    green(WithLogits, ran=("ATN103", "ATN650"))
    red(WithOtherLogits, "ATN152")


# masks ---------------------------------------------------------------------------------------------------------------


class TrueHides(Plain):
    """Attention whose attn_mask is True where hidden, or added where it is a float."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            s = s.masked_fill(attn_mask, torch.finfo(s.dtype).min)
        elif attn_mask is not None:
            s = s + attn_mask
        return self.out(s.softmax(-1) @ v)


class SaysTrueHides(Plain):
    """Attention whose attn_mask is True where hidden."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask))


def test_a_docstring_says_what_true_means() -> None:
    assert documented(TrueHides())["polarity"].value == "masked"
    assert not documented(Plain())
    green(TrueHides, ran=("ATN103", "ATN501"))  # rows of -inf alone are NaN, as they were given
    red(SaysTrueHides, "ATN501")


# channels first ------------------------------------------------------------------------------------------------------


class Pixels(nn.Module):
    def __init__(self, in_channels: int = 64, num_groups: int = 32) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(num_groups, in_channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(in_channels, in_channels, 1) for _ in range(4))

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.mT @ k / math.sqrt(q.shape[1])).softmax(-1) @ v.mT

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        o = self.mixed(*(f(y).flatten(2) for f in (self.q, self.k, self.v)))
        out: Tensor = x + self.proj_out(o.mT.reshape(x.shape))
        return out


class PixelsByQuery(Pixels):
    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q.mT @ k / math.sqrt(q.shape[1])).softmax(-2) @ v.mT


class Frames(nn.Module):
    def __init__(self, channels: int = 32, out_channels: int = 32, n_heads: int = 4) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.conv_q, self.conv_k, self.conv_v = (nn.Conv1d(channels, channels, 1) for _ in range(3))
        self.conv_o = nn.Conv1d(channels, out_channels, 1)

    def cut(self, y: Tensor) -> Tensor:
        return y.reshape(len(y), self.n_heads, -1, y.shape[2]).mT

    def forward(self, x: Tensor, c: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.cut(self.conv_q(x)), self.cut(self.conv_k(c)), self.cut(self.conv_v(c))
        s = q @ k.mT / math.sqrt(q.shape[-1])
        s = s if attn_mask is None else s.masked_fill(attn_mask == 0, -1e9)
        out: Tensor = self.conv_o((s.softmax(-1) @ v).mT.flatten(1, 2))
        return out


class FramesByView(Frames):
    def cut(self, y: Tensor) -> Tensor:
        return y.reshape(len(y), self.n_heads, y.shape[2], -1)


def test_layouts_go_there_and_back() -> None:
    x = torch.arange(2 * 6 * 3.0).reshape(2, 6, 3)
    for layout in ("BSD", "SBD", "BCS", "BCHW"):
        y = layouts.laid(x, layout)
        assert torch.equal(layouts.unlaid(y, layout), x)
        assert layouts.length(y, layout) == 6
    assert layouts.laid(x, "BCHW").shape == (2, 3, 2, 3)


def test_convolutions_are_projections() -> None:
    assert dict(adapt(Frames).facts)["input"].value == "BCS"
    assert dict(adapt(Pixels).facts)["input"].value == "BCHW"
    green(Frames, ran=("ATN103", "ATN501", "ATN650"))
    green(Pixels, ran=("ATN103", "ATN250"))  # its channels divide by 32 only
    red(FramesByView, "ATN103")
    red(PixelsByQuery, "ATN103")


# more than projections -----------------------------------------------------------------------------------------------


class Latent(nn.Module):
    def __init__(self, dim: int = 32, n_heads: int = 4, rank: int = 10) -> None:
        super().__init__()
        self.h = n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, 2 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.up(self.down(x)).chunk(2, -1)
        s = heads_of(self.wq(x), self.h) @ heads_of(k, self.h).mT / math.sqrt(x.shape[-1] // self.h)
        s = s + torch.full_like(s, -math.inf).triu_(1)
        out: Tensor = self.wo((s.softmax(-1) @ heads_of(v, self.h)).transpose(1, 2).flatten(2))
        return out


class LatentThatLooksAhead(Latent):
    def forward(self, x: Tensor) -> Tensor:
        k, v = self.up(self.down(x)).chunk(2, -1)
        s = heads_of(self.wq(x), self.h) @ heads_of(k, self.h).mT / math.sqrt(x.shape[-1] // self.h)
        s = s + torch.full_like(s, -math.inf).triu_(2)
        out: Tensor = self.wo((s.softmax(-1) @ heads_of(v, self.h)).transpose(1, 2).flatten(2))
        return out


class Misnamed(nn.Module):
    def __init__(self, dim: int = 32, n_heads: int = 4) -> None:
        super().__init__()
        self.h = n_heads
        self.wq, self.alpha, self.omega, self.wo = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(f(x), self.h) for f in (self.wq, self.alpha, self.omega))
        out: Tensor = self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return out


def test_compressed_keys_make_a_black_box() -> None:
    implementation = adapt(Latent)
    assert any("black box" in note for note in implementation.notes)
    assert "black box" in dict(implementation.facts)
    laws = ["ATN150", "ATN450", "ATN1150", "ATN1151", "ATN1250", "ATN250"]
    green(Latent, ran=("ATN150", "ATN450"), laws=laws)
    red(LatentThatLooksAhead, "ATN450", laws=laws)


def test_what_is_only_named_otherwise_is_asked_for() -> None:
    with pytest.raises(Exception, match="found in part"):
        adapt(Misnamed)


class Gated(Plain):
    def __init__(self, dim: int = 32, num_heads: int = 4, c_pair: int = 6) -> None:
        super().__init__(dim, num_heads)
        self.linear_g, self.linear_b = nn.Linear(dim, dim), nn.Linear(c_pair, num_heads)

    def bias(self, z: Tensor) -> Tensor:
        return z.permute(0, 3, 1, 2)

    def gate(self, x: Tensor) -> Tensor:
        g: Tensor = self.linear_g(x)
        return torch.sigmoid(g)

    def weights(self, s: Tensor) -> Tensor:
        return s.softmax(-1)

    def forward(self, x: Tensor, pair_rep: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if pair_rep is not None:
            s = s + self.bias(self.linear_b(pair_rep))
        y: Tensor = self.out_proj((self.weights(s) @ v).transpose(1, 2).flatten(2) * self.gate(x))
        return y


class GatedByOthers(Gated):
    def gate(self, x: Tensor) -> Tensor:
        return super().gate(x).roll(1, -1)


class GatedUnnormalised(Gated):
    def weights(self, s: Tensor) -> Tensor:
        return torch.sigmoid(s)


class GatedTransposed(Gated):
    def bias(self, z: Tensor) -> Tensor:
        return z.permute(0, 3, 2, 1)


def test_a_gate_is_held_open_and_the_whole_has_it() -> None:
    assert "gate" in dict(adapt(Gated).facts)
    green(Gated, ran=("ATN103", "ATN650", "ATN658", "ATN951"))
    red(GatedByOthers, "ATN650")
    red(GatedUnnormalised, "ATN103")


def test_a_pair_biases_its_own_query() -> None:
    red(GatedTransposed, "ATN658")


class Cosine(nn.Module):
    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.q_bias, self.v_bias = (nn.Parameter(0.1 * torch.randn(dim)) for _ in range(2))
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))

    def factor(self) -> Tensor:
        return self.logit_scale.clamp(max=math.log(100.0)).exp()

    def forward(self, x: Tensor) -> Tensor:
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        q, k, v = (heads_of(y, self.num_heads) for y in F.linear(x, self.qkv.weight, bias).chunk(3, -1))
        s = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.factor()
        out: Tensor = self.proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class CosineOfAnotherHead(Cosine):
    def factor(self) -> Tensor:
        return super().factor().roll(1, 0)


class CosineOfNoParameter(Cosine):
    def factor(self) -> Tensor:
        return super().factor() * 0.37


def test_a_learned_temperature_is_in_the_oracle() -> None:
    assert dict(adapt(Cosine).facts)["temperature"].value == "logit_scale"
    green(Cosine, ran=("ATN103", "ATN650"))
    red(CosineOfAnotherHead, "ATN103")
    red(CosineOfNoParameter, "ATN103")


class OneHead(nn.Module):
    def __init__(self, d_in: int = 32, d_kq: int = 16, d_v: int = 24) -> None:
        super().__init__()
        self.W_query, self.W_key = (nn.Parameter(torch.randn(d_in, d_kq) * 0.2) for _ in range(2))
        self.W_value = nn.Parameter(torch.randn(d_in, d_v) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        s = (x @ self.W_query) @ (x @ self.W_key).mT / math.sqrt(self.W_key.shape[1])
        return s.softmax(-1) @ (x @ self.W_value)


def test_one_head_with_widths_of_its_own() -> None:
    green(OneHead, ran=("ATN103", "ATN650"))


# threads -------------------------------------------------------------------------------------------------------------


class KeepsWeights(Plain):
    def __init__(self, dim: int = 32, num_heads: int = 4) -> None:
        super().__init__(dim, num_heads)
        self.attn: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        self.attn = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.out(self.attn @ v)


class KeepsQueries(Plain):
    def forward(self, x: Tensor) -> Tensor:
        self.kept, k, v = self.parts(x)
        p = (self.kept @ k.mT / math.sqrt(k.shape[-1])).softmax(-1)
        return self.out(p @ v)


def test_weights_kept_for_lookers_on_are_an_advisory_in_threads() -> None:
    report = check_attention(KeepsWeights, laws=["ATN1227"], exitfirst=False)
    assert report.verdict == "passed"
    assert report.counts["known-failure"] == 1
    red(KeepsQueries, "ATN1227", laws=["ATN1227"])
