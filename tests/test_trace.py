"""A trace ends in one sentence: where it first goes wrong and why, or that nothing does."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec.command_arguments import add_trace as add
from attn_spec.trace import Expected, trace
from attn_spec.trace.command import run


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT / 8**0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def module() -> SelfAttention:
    torch.manual_seed(0)
    return SelfAttention().eval()


def qkv(dtype: torch.dtype = torch.float32, size: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (size * torch.randn(2, 2, 6, 8, generator=g) for _ in range(3))
    return q.to(dtype), k.to(dtype), v.to(dtype)


X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
PAST = torch.ones(6, 6, dtype=torch.bool).tril()
CAUSAL = Expected(causal=True)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / 8**0.5).masked_fill(~PAST, -torch.inf).softmax(-1) @ v


def test_nothing_goes_wrong() -> None:
    made = trace(module(), X, PAST, expected=CAUSAL)
    assert made.sentence == "Nothing goes wrong on this input."
    assert [block.name for block in made.blocks] == [
        *("input x", "input mask", "q projected", "k projected", "v projected", "q", "k", "v", "scores", "scaled"),
        *("mask", "masked", "weights", "mixed", "merged", "output"),
    ]


def test_each_block_says_what_it_holds_and_which_line_made_it() -> None:
    made = trace(module(), X, PAST)
    (masked,) = (block for block in made.blocks if block.name == "masked")
    assert masked.statistics is not None
    assert (masked.statistics.shape, masked.statistics.dtype, masked.statistics.minus_inf) == (
        (2, 2, 6, 6),
        "float32",
        60,
    )
    assert (masked.made_by, masked.source) == ("masked_fill", "scores = scores.masked_fill(~mask, -torch.inf)")
    (q,) = (block for block in made.blocks if block.name == "q")
    assert q.statistics is not None
    assert q.statistics.layout == "strides [96, 8, 16, 1]"
    assert "> " not in str(made)


# the NaN tree --------------------------------------------------------------------------------------------------------


def test_l1_a_projection_whose_weight_is_nan() -> None:
    broken = module()
    nn.init.constant_(broken.q_proj.weight, math.nan)
    made = trace(broken, X)
    assert "in q projected" in made.sentence
    assert "q_proj.weight holds 256 NaN" in made.sentence
    assert made.first_wrong is not None
    assert made.first_wrong.level == "L1"


def test_l2_an_initialisation_that_is_far_too_wide() -> None:
    broken = module()
    for part in (broken.q_proj, broken.k_proj):
        nn.init.normal_(part.weight, std=1e20)
    sentence = trace(broken, X).sentence
    assert sentence.startswith("It first goes wrong in scores, at test_trace.py:")
    assert "q_proj.weight has std" in sentence
    assert "of the order of 0.02" in sentence


def test_l2_unscaled_scores_overflow_in_half_precision() -> None:
    sentence = trace(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv(torch.float16, 200.0)).sentence
    assert "in scores" in sentence
    assert "float16 ends at 65504; they are not scaled (1/sqrt(d) would be 0.3536)" in sentence


def test_l3_a_row_that_is_hidden_throughout() -> None:
    mask = PAST.clone()
    mask[3] = False
    sentence = trace(module(), X, mask).sentence
    assert "in masked" in sentence
    assert "4 of 24 rows are -inf throughout" in sentence
    assert "sample 0, head 0, query 3" in sentence
    assert "mask that was asked for leaves keys" in trace(module(), X, mask, expected=CAUSAL).sentence


def test_l3_two_masks_of_the_lowest_number() -> None:
    lowest = torch.zeros(6, 6)
    lowest[3] = torch.finfo(torch.float32).min

    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 8**0.5 + lowest + lowest).softmax(-1) @ v

    assert "two masks of finfo.min add up to -inf" in trace(twice, *qkv()).sentence


def test_l4_all_weights_are_zero() -> None:
    made = trace(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) * 0 @ v, *qkv())
    assert "all weights are 0" in made.sentence


def test_l5_an_output_that_overflows() -> None:
    q, k, v = qkv()
    made = trace(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) @ v * 1e30, q, k, v * 1e30)
    assert "in output" in made.sentence
    assert made.first_wrong is not None
    assert made.first_wrong.level == "L5"


# equal weights -------------------------------------------------------------------------------------------------------


def test_a_projection_that_is_zero() -> None:
    broken = module()
    nn.init.zeros_(broken.q_proj.weight)
    sentence = trace(broken, X).sentence
    assert "in q projected" in sentence
    assert "q is 0 everywhere, so all weights are equal: q_proj.weight is 0 everywhere" in sentence


def test_q_and_k_of_the_same_weights() -> None:
    broken = module()
    broken.k_proj = broken.q_proj
    assert "in k projected" in trace(broken, X).sentence
    assert "projected by the same weights" in trace(broken, X).sentence


def test_q_and_k_that_are_given_alike_are_no_fault() -> None:
    q, _, v = qkv()
    assert trace(causal, q, q, v).sentence.startswith("Nothing goes wrong on this input; worth a look: q and k")


def test_a_small_initialisation_is_no_fault() -> None:
    small = module()
    for part in (small.q_proj, small.k_proj):
        nn.init.normal_(part.weight, std=0.002)
    assert trace(small, X).first_wrong is None
    assert any("nearly equal" in finding.text for finding in trace(small, X).findings)


# scale, axis, masks, dropout -----------------------------------------------------------------------------------------

SCALES: list[tuple[Callable[..., Tensor], str]] = [
    (lambda q, k, v: (q @ k.mT).softmax(-1) @ v, "the scale is 1, which is 1 (none); expected 1/sqrt(d) = 0.3536"),
    (lambda q, k, v: (q @ k.mT / 8).softmax(-1) @ v, "the scale is 0.125, which is 1/d"),
    (lambda q, k, v: (q @ k.mT / 16**0.5).softmax(-1) @ v, "which is 1/sqrt(hidden), hidden = heads x d"),
    (lambda q, k, v: F.scaled_dot_product_attention(q * 8**-0.5, k, v), "the scale is 0.125, which is 1/d"),
]


@pytest.mark.parametrize(("function", "text"), SCALES)
def test_the_scale_is_named(function: Callable[..., Tensor], text: str) -> None:
    assert text in trace(function, *qkv()).sentence


def test_a_scale_that_was_asked_for_is_right() -> None:
    made = trace(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv(), expected=Expected(scale=1.0))
    assert made.first_wrong is None


def test_a_softmax_over_the_queries() -> None:
    sentence = trace(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-2) @ v, *qkv()).sentence
    assert "the softmax runs over the queries, so columns sum to 1 and not rows" in sentence


def test_a_mask_after_the_softmax() -> None:
    made = trace(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1) * PAST @ v, *qkv())
    assert "in weights used" in made.sentence
    assert "the mask is applied after the softmax: a row of weights sums to 0." in made.sentence


def test_hidden_rows_that_are_made_zero_after_the_softmax_are_right() -> None:
    def honest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / 8**0.5).masked_fill(~PAST, -torch.inf)
        return scores.softmax(-1).masked_fill(~PAST, 0.0) @ v

    assert trace(honest, *qkv(), expected=CAUSAL).first_wrong is None


def test_causality_that_was_asked_for_and_is_not_there() -> None:
    sees_next = PAST.clone()
    sees_next[2, 3] = True
    no_mask = trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *qkv(), expected=CAUSAL)
    assert "no key is hidden" in no_mask.sentence
    one = trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, sees_next), *qkv(), expected=CAUSAL)
    assert "queries see the future: 4 weights above the diagonal" in one.sentence
    right = trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), *qkv(), expected=CAUSAL)
    assert "Nothing goes wrong on this input (not seen: scores, scaled, masked and weights inside" in right.sentence


def test_a_mask_that_is_inverted_or_on_the_wrong_axis() -> None:
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    expected = Expected(hidden=~real[:, None, None, :])

    def masked(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return (q @ k.mT / 8**0.5).masked_fill(hidden, -1e9).softmax(-1) @ v

    inverted = trace(masked, *qkv(), real[:, None, None, :], expected=expected)
    assert "hides what it shall show" in inverted.sentence
    rows = trace(masked, *qkv(), ~real[:, None, :, None], expected=expected)
    assert "the mask stands on the wrong axis" in rows.sentence


def test_dropout_outside_training() -> None:
    made = trace(lambda q, k, v: F.dropout((q @ k.mT / 8**0.5).softmax(-1), 0.25) @ v, *qkv())
    assert "dropout drops weights with probability 0.25, and this is no training" in made.sentence


# exceptions, and what can't be seen ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_all_axes_reversed() -> None:
    q, k, v = (torch.randn(2, 5, 8) for _ in range(3))
    sentence = trace(lambda q, k, v: (q @ k.T / 8**0.5).softmax(-1) @ v, q, k, v).sentence
    assert "in scores" in sentence
    assert "matmul of [2, 5, 8] (q) and [8, 5, 2] raises RuntimeError" in sentence
    assert "`.T` of a tensor of 3 axes, here [2, 5, 8], reverses all of them: `.mT` is meant" in sentence
    cube = [torch.randn(5, 5, 5) for _ in range(3)]
    silent = trace(lambda q, k, v: (q @ k.T / 5**0.5).softmax(-1) @ v, *cube).sentence
    assert "`.T` of k, of shape [5, 5, 5], reverses all its axes: `.mT` is meant" in silent


def test_an_exception_names_its_block() -> None:
    late = trace(lambda q, k, v: (q @ k.mT / 8**0.5).softmax(-1).matmul(v).transpose(1, 2).view(2, 6, 16), *qkv())
    assert "in merged" in late.sentence
    assert "`.reshape`" in late.sentence
    assert "in q projected" in trace(module(), torch.randn(2, 6, 15)).sentence


def test_a_split_into_heads_that_mixes_tokens() -> None:
    class Scrambled(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (p(x).view(2, 2, 6, 8) for p in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    sentence = trace(Scrambled().eval(), X).sentence
    assert sentence.startswith("It first goes wrong in q, at ")
    assert "the split into heads mixes tokens" in sentence


def test_heads_that_are_merged_without_a_transpose() -> None:
    class Scrambled(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (p(x).unflatten(-1, (2, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            return self.o_proj(((q @ k.mT / 8**0.5).softmax(-1) @ v).reshape(2, 6, 16))

    torch.manual_seed(0)
    sentence = trace(Scrambled().eval(), X).sentence
    assert sentence.startswith("It first goes wrong in merged, at ")
    assert "merging the heads mixes tokens" in sentence


def test_windows_beside_the_heads_and_projections_over_the_sequence_are_no_scramble() -> None:
    class Windows(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # two windows of three tokens
            q, k, v = (
                p(x).view(2, 2, 3, 2, 8).permute(0, 3, 1, 2, 4).reshape(2, 4, 3, 8)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            )
            mixed = F.scaled_dot_product_attention(q, k, v)
            return self.o_proj(mixed.view(2, 2, 2, 3, 8).permute(0, 2, 3, 1, 4).reshape(2, 6, 16))

    class Linformer(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.shorter = nn.Linear(6, 6)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            q, k, v = (p(x) for p in (self.q_proj, self.k_proj, self.v_proj))
            k, v = (self.shorter(y.mT).mT for y in (k, v))
            q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (q, k, v))
            return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    for kind in (Windows, Linformer):
        torch.manual_seed(0)
        assert trace(kind().eval(), X).first_wrong is None, kind


def test_a_softmax_over_a_wrong_axis_is_named_though_it_makes_nan() -> None:
    def over_queries(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        return (q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf).softmax(-2) @ v

    hidden = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    hidden[1, ..., 4:] = True
    sentence = trace(over_queries, *qkv(), hidden, expected=Expected(hidden=hidden)).sentence
    assert "the softmax runs over the queries" in sentence
    assert "it makes 24 NaN" in sentence


def test_what_is_seen_is_what_was_to_be_hidden() -> None:
    def unmasked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 8**0.5).softmax(-1) @ v

    padding = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
    padding[1, ..., 4:] = True
    assert "softmax: the future is seen." in trace(unmasked, *qkv(), expected=CAUSAL).sentence
    assert (
        "softmax: what the mask hides is seen." in trace(unmasked, *qkv(), expected=Expected(hidden=padding)).sentence
    )


def test_no_attention() -> None:
    assert trace(lambda x: x * 2, X).sentence.startswith("No attention was seen")


# the command ---------------------------------------------------------------------------------------------------------


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers())
    return run(parser.parse_args(["trace", *words]))


UNSCALED = """
def attention(q, k, v, attn_mask=None):
    scores = q @ k.mT
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return scores.softmax(-1) @ v
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unscaled.py").write_text(UNSCALED)
    assert command("unscaled.py:attention", "--mask", "padding", "--seq", "5") == 1
    printed = capsys.readouterr().out
    assert "problem: B2-H2-S5-D8-padding[5,4]-bool-mild-f32" in printed
    assert "> scores " in printed
    assert "matmul at unscaled.py:3 [B, H, Q, K]: scores = q @ k.mT" in printed
    assert command("sdpa", "--causal", "--dtype", "bfloat16") == 0
    assert "Nothing goes wrong" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("naive", "--causal"), "no causal parameter; --mask causal hands causality over in a mask"),
        (("nowhere.attention",), "no module"),
        (("naive", "--seq", "0"), "--seq: 0 is too small; give 1 or more"),
        (("naive", "--problem", "missing.yaml"), "missing.yaml"),
        (("naive", "--problem", "missing.yaml", "--seq", "4"), "--seq: the file of --problem says it"),
    ],
)
def test_what_can_not_be_traced(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*words) == 4
    assert text in capsys.readouterr().err


MODULE = """
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))
        self.num_heads = num_heads

    def forward(self, x):
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = q @ k.mT
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def test_the_command_on_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unscaled_module.py").write_text(MODULE)
    assert command(f"{tmp_path}/unscaled_module.py:SelfAttention") == 1
    printed = capsys.readouterr().out
    assert "by q_proj.weight" in printed
    assert "It first goes wrong in scores, at unscaled_module.py:16 (`scores = q @ k.mT`)" in printed
    assert command("torch.nn.MultiheadAttention", "--mask", "padding") == 0
