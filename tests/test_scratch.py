"""The from-scratch modules against slow loops in float64, the golden numbers of the walk-through, and their errors."""

import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import tolerance
from attn_spec.reference.scratch.causal_self_attention import CausalSelfAttention, CausalSelfAttentionRenormalised
from attn_spec.reference.scratch.cross_attention import CrossAttention
from attn_spec.reference.scratch.multi_head import MultiHeadAttention
from attn_spec.reference.scratch.multi_head_wrapper import MultiHeadAttentionWrapper
from attn_spec.reference.scratch.self_attention import SelfAttention
from attn_spec.tolerance import Precision

EXACT = {"rtol": 1e-12, "atol": 1e-13}  # float64 against float64: some hundred roundings of 1e-16, values near 1
WALKTHROUGH = Path(__file__).parents[1] / "examples" / "walkthrough.py"


def row(q: Tensor, k: Tensor, v: Tensor, seen: list[bool] | None = None, bias: list[float] | None = None) -> Tensor:
    """One row of attention by Python's own numbers: q [D], k [S, D], v [S, Dv] -> [Dv]; zeros where nothing is seen."""
    logits = {}
    for j in range(len(k)):
        if seen is not None and not seen[j]:
            continue
        s = sum(a * b for a, b in zip(q.tolist(), k[j].tolist(), strict=True)) / math.sqrt(len(q))
        s += 0.0 if bias is None else bias[j]
        if s > -math.inf:
            logits[j] = s
    total = torch.zeros(v.shape[-1], dtype=torch.float64)
    if logits:
        highest = max(logits.values())
        sum_ = math.fsum(math.exp(s - highest) for s in logits.values())
        for j, s in logits.items():
            total += math.exp(s - highest) / sum_ * v[j].double()
    return total


def one_head(module: SelfAttention | CrossAttention, x: Tensor, context: Tensor, causal: bool = False) -> Tensor:
    """x [S, d_in], context [Sk, d_in] -> [S, d_out_v], row by row."""
    q, k, v = x @ module.W_query, context @ module.W_key, context @ module.W_value
    rows = [row(q[i], k, v, [j <= i or not causal for j in range(len(k))]) for i in range(len(q))]
    return torch.stack(rows)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def golden() -> tuple[Tensor, SelfAttention]:
    torch.manual_seed(123)
    x = torch.nn.Embedding(50_000, 3)(torch.tensor([0, 4, 5, 2, 1, 3])).detach()
    torch.manual_seed(123)
    return x, SelfAttention(3, 2, 4)


@torch.no_grad()
def test_golden_numbers() -> None:
    x, attention = golden()
    q, k, _ = attention.project(x)
    scores = q @ k.T
    weights = torch.softmax(scores / 2**0.5, dim=-1)
    for got, expected in [
        (x[1], [0.1794, 1.8951, 0.4954]),
        (scores[1], [-0.6004, 3.4707, -1.5023, 0.4991, 1.2903, -1.3374]),
        (weights[1], [0.0386, 0.6870, 0.0204, 0.0840, 0.1470, 0.0229]),
        (attention(x)[1], [0.5313, 1.3607, 0.7891, 1.3110]),
    ]:
        torch.testing.assert_close(got, torch.tensor(expected), rtol=0, atol=6e-5)


def test_walkthrough_prints_the_golden_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(WALKTHROUGH), run_name="__main__")
    printed = " ".join(capsys.readouterr().out.split())
    for line in (
        "is 0.1794 1.8951 0.4954",
        "is -0.6004 3.4707 -1.5023 0.4991 1.2903 -1.3374",
        "'is' with 'dessert': 1.2903",
        "is 0.0386 0.6870 0.0204 0.0840 0.1470 0.0229",
        "is 0.5313 1.3607 0.7891 1.3110",
        "the row adds up to 1.0000, 'is' moves by 0.0000",
        "the row adds up to 0.7256, 'is' moves by 0.1478",
        "c nan nan nan nan",
        "and is silently wrong",
    ):
        assert line in printed


@pytest.mark.parametrize(
    "kind, causal",
    [(SelfAttention, False), (CausalSelfAttention, True), (CausalSelfAttentionRenormalised, True)],
    ids=["self", "causal", "renormalised"],
)
@pytest.mark.parametrize("sizes", [(7, 3, 2, 4), (1, 2, 3, 1), (4, 4, 4, 4)], ids=str)
def test_one_head_is_the_formula(kind: type[SelfAttention], causal: bool, sizes: tuple[int, int, int, int]) -> None:
    s, d_in, d_kq, d_v = sizes
    module = kind(d_in, d_kq, d_v).double()
    x = torch.randn(4, s, d_in, dtype=torch.float64)  # with four words of width four, B == S == d: where .T would fit
    expected = torch.stack([one_head(module, x[b], x[b], causal) for b in range(4)])
    torch.testing.assert_close(module(x), expected, **EXACT)
    torch.testing.assert_close(module(x[2]), expected[2], **EXACT)


@pytest.mark.parametrize("lengths", [(3, 8), (8, 3), (1, 5), (5, 5)], ids=str)
def test_cross_attention_is_the_formula(lengths: tuple[int, int]) -> None:
    module = CrossAttention(3, 2, 4, d_context=6).double()
    x = torch.randn(2, lengths[0], 3, dtype=torch.float64)
    context = torch.randn(2, lengths[1], 6, dtype=torch.float64)
    expected = torch.stack([one_head(module, x[b], context[b]) for b in range(2)])
    torch.testing.assert_close(module(x, context), expected, **EXACT)
    torch.testing.assert_close(module(x[1], context[1]), expected[1], **EXACT)


@pytest.mark.parametrize("shape", [(6, 3), (2, 6, 3)], ids=str)
def test_wrapper_sets_heads_side_by_side(shape: tuple[int, ...]) -> None:
    module = MultiHeadAttentionWrapper(3, 2, 4, num_heads=3).double()
    x = torch.randn(shape, dtype=torch.float64)
    out = module(x)
    assert out.shape == (*shape[:-1], 12)
    for h, head in enumerate(module.heads):
        samples = x if x.dim() == 3 else x[None]
        expected = torch.stack([one_head(head, sample, sample) for sample in samples]).view(*shape[:-1], 4)
        torch.testing.assert_close(out[..., 4 * h : 4 * h + 4], expected, **EXACT)
    assert len(list(module.parameters())) == 9


@torch.no_grad()
def test_causal_before_and_after_the_softmax_are_equal_on_moderate_scores() -> None:
    before, after = CausalSelfAttention(3, 2, 4), CausalSelfAttentionRenormalised(3, 2, 4)
    after.load_state_dict(before.state_dict())
    x = torch.randn(2, 9, 3)
    torch.testing.assert_close(after(x), before(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after.double()(x.double()), before.double()(x.double()), **EXACT)


@torch.no_grad()
def test_an_outlier_in_the_future_breaks_masking_after_the_softmax_only() -> None:
    x, attention = golden()
    before, after = CausalSelfAttention(3, 2, 4), CausalSelfAttentionRenormalised(3, 2, 4)
    for module in (before, after):
        module.load_state_dict(attention.state_dict())
    outlier = x.clone()
    outlier[5] *= -200
    assert torch.equal(before(outlier)[:5], before(x)[:5])
    assert after(outlier)[1].isnan().all()


def drawn(h: int, h_kv: int, *, flash: bool = False, bias: bool = False, dropout: float = 0.0) -> MultiHeadAttention:
    """A module of width 24 whose weights are large enough for weights to differ well from their mean."""
    module = MultiHeadAttention(24, h, h_kv, dropout, bias, flash)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return module


def pair(h: int, h_kv: int, **options: bool) -> tuple[MultiHeadAttention, MultiHeadAttention]:
    """The same module computed by hand and by torch."""
    manual, fused = drawn(h, h_kv, **options), drawn(h, h_kv, flash=True, **options)
    fused.load_state_dict(manual.state_dict())
    return manual, fused


def many_heads(module: MultiHeadAttention, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """x [B, S, D] -> [B, S, D] by loops, the mask read entry by entry; projections as plain products."""
    b, s, d = x.shape
    h, group, width = module.num_heads, module.num_heads // module.num_kv_heads, module.head_dim
    q, k, v = (F.linear(x, p.weight, p.bias) for p in (module.q_proj, module.k_proj, module.v_proj))
    merged = torch.zeros(b, s, d, dtype=torch.float64)
    for n in range(b):
        for m in range(h):
            mine, theirs = slice(m * width, (m + 1) * width), slice(m // group * width, (m // group + 1) * width)
            for i in range(s):
                entries = None if mask is None else [entry(mask, n, m, i, j) for j in range(s)]
                is_bool = mask is not None and mask.dtype == torch.bool
                seen = [(not causal or j <= i) and (not is_bool or bool(entries[j])) for j in range(s)]
                merged[n, i, mine] = row(
                    q[n, i, mine], k[n, :, theirs], v[n, :, theirs], seen, None if is_bool else entries
                )
    return F.linear(merged, module.o_proj.weight, module.o_proj.bias)


def entry(mask: Tensor, n: int, m: int, i: int, j: int) -> float:
    n = n if mask.shape[0] > 1 else 0
    if mask.dim() == 2:
        return mask[n, j].item()
    if mask.dim() == 3:
        return mask[n, i, j].item()
    return mask[n, m if mask.shape[1] > 1 else 0, i, j].item()


def mask_of(kind: str, b: int, h: int, s: int) -> Tensor | None:
    """A mask by the name of its shape; `+` adds instead, `empty` has rows that see nothing."""
    if kind == "none":
        return None
    axes = kind.split()[0].rstrip("+")
    size = {"B": b, "H": h, "S": s, "1": 1}
    mask = torch.rand([size[a] for a in axes]) < 0.6
    mask[..., 0] = True
    if "empty" in kind:
        mask[-1, ..., :] = False
    if "+" not in kind:
        return mask
    return torch.randn(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)


MASKS = ("none", "BS", "BSS", "B1SS", "BHSS", "1SS", "BS+", "BSS+", "BHSS+", "BSS empty", "BHSS+ empty")


@torch.no_grad()
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (2, 4, 2, 5), (4, 4, 1, 3), (1, 1, 1, 1)], ids=str)
def test_multi_head_is_the_formula(sizes: tuple[int, int, int, int], mask: str, causal: bool) -> None:
    b, h, h_kv, s = sizes  # the first has B == H == S, where a mask can be read along the wrong axis
    manual, fused = (m.double() for m in pair(h, h_kv, bias=True))
    x = torch.randn(b, s, 24, dtype=torch.float64)
    attention_mask = mask_of(mask, b, h, s)
    expected = many_heads(manual, x, attention_mask, causal)
    torch.testing.assert_close(manual(x, attention_mask, causal), expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(fused(x, attention_mask, causal), expected, rtol=1e-11, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["none", "BS", "BHSS", "BSS+", "BSS empty"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_both_paths_stay_within_the_derived_bound(dtype: str, mask: str, causal: bool) -> None:
    """From the same q, k and v on, with scores and sums in float32, each path is within the bound of `tolerance`."""
    manual, fused = (m.to(getattr(torch, dtype)) for m in pair(4, 2))
    manual.o_proj = fused.o_proj = torch.nn.Identity()  # the result is then the heads side by side
    x = torch.randn(2, 33, 24).to(getattr(torch, dtype))
    attention_mask = mask_of(mask, 2, 4, 33)
    q, k, v = (y.double() for y in manual.project(x))
    logits = q @ k.mT / math.sqrt(6)
    bias = None
    if attention_mask is not None:
        wide = {2: lambda m: m[:, None, None], 3: lambda m: m[:, None], 4: lambda m: m}[attention_mask.dim()]
        bias = wide(attention_mask).expand_as(logits)
        bias = bias if bias.is_floating_point() else torch.zeros_like(logits).masked_fill(~bias, -math.inf)
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(torch.ones(33, 33).triu(1) > 0, -math.inf)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
    context = weights @ v
    precision = Precision("float32", dtype, "float32", dtype)
    bound = tolerance.bounds(q, k, v, 6**-0.5, bias, logits, weights, context, precision).output
    for module in (manual, fused):
        got = module(x, attention_mask, causal).unflatten(2, (4, 6)).transpose(1, 2)
        worst = tolerance.worst(got, context, bound)
        assert worst.holds, worst


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True], ids=["manual", "flash"])
def test_a_row_with_no_visible_key_is_zero(flash: bool) -> None:
    module = drawn(4, 2, flash=flash)
    x = torch.randn(2, 5, 24)
    left_padded = torch.tensor([[False, False, True, True, True], [True] * 5])
    out = module(x, left_padded, is_causal=True)  # the first two queries see padding only
    assert torch.equal(out[0, :2], torch.zeros(2, 24))
    assert (out[0, 2:].abs().sum(-1) > 0).all()
    assert (out[1].abs().sum(-1) > 0).all()
    assert torch.equal(module(x, torch.full((2, 5), -math.inf)), torch.zeros(2, 5, 24))


@torch.no_grad()
def test_a_changed_mask_block_serves_both_paths() -> None:
    class OnlyItself(MultiHeadAttention):
        def mask(self, scores: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
            others = ~torch.eye(scores.shape[-1], dtype=torch.bool)
            return super().mask(scores, attention_mask, is_causal).masked_fill(others, -math.inf)

    x, all_seen = torch.randn(2, 5, 24), torch.ones(2, 5, dtype=torch.bool)
    for flash in (False, True):
        module = OnlyItself(24, 4, flash=flash)
        torch.testing.assert_close(module(x, all_seen), module.o_proj(module.v_proj(x)))


@pytest.mark.parametrize("mask", ["none", "BS", "BSS empty", "BHSS+ empty"])
def test_gradients_are_finite_and_the_same_on_both_paths(mask: str) -> None:
    manual, fused = (m.double() for m in pair(4, 2, bias=True))
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    attention_mask = mask_of(mask, 2, 4, 5)
    grads = []
    for module in (manual, fused):
        leaf = x.clone().requires_grad_()
        (module(leaf, attention_mask, is_causal=True) * torch.linspace(-1, 1, 24)).sum().backward()
        grads.append([leaf.grad, *(p.grad for p in module.parameters())])
    for by_hand, by_torch in zip(*grads, strict=True):
        assert by_hand is not None
        assert by_hand.isfinite().all()
        torch.testing.assert_close(by_torch, by_hand, rtol=1e-10, atol=1e-11)


def test_gradients_are_those_of_finite_differences() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[False, True, True], [True, True, False]])
    many = MultiHeadAttention(8, 4, 2, bias=True).double()
    for parameter in many.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert torch.autograd.gradcheck(lambda x: many(x, mask, is_causal=True), (x,))
    assert torch.autograd.gradcheck(CausalSelfAttention(8, 2, 4).double(), (x,))


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True], ids=["manual", "flash"])
@pytest.mark.parametrize("masked", [False, True], ids=["open", "masked"])
def test_dropout_drops_its_share_in_training_only(flash: bool, masked: bool) -> None:
    """With one key the weight is 1: a context is dropped whole, or kept and divided by 1 - p."""
    module = drawn(1, 1, flash=flash, dropout=0.3)
    x = torch.randn(4000, 1, 24)
    mask = torch.ones(4000, 1, dtype=torch.bool) if masked else None
    kept = module.eval()(x, mask)
    assert torch.equal(kept, module(x, mask))
    torch.testing.assert_close(kept, module.o_proj(module.v_proj(x)))
    trained = module.train()(x, mask)
    dropped = (trained == 0).all(dim=-1)[:, 0]
    deviation = math.sqrt(4000 * 0.3 * 0.7)
    assert abs(int(dropped.sum()) - 1200) < 5 * deviation
    torch.testing.assert_close(trained[~dropped], kept[~dropped] / 0.7, rtol=1e-4, atol=1e-4)


def test_weights_are_drawn_as_llama_draws_them() -> None:
    module = MultiHeadAttention(512, 8, 2, bias=True)
    for name, std in (("q_proj", 0.02), ("k_proj", 0.02), ("v_proj", 0.02), ("o_proj", 0.01)):
        weight = getattr(module, name).weight.detach()
        # a standard deviation from n numbers is itself off by std / sqrt(2 n): five of these, and five of the mean's
        assert abs(float(weight.std()) - std) < 5 * std / math.sqrt(2 * weight.numel())
        assert abs(float(weight.mean())) < 5 * std / math.sqrt(weight.numel())
        assert not getattr(module, name).bias.any()
    assert module.k_proj.weight.shape == (128, 512)
    assert MultiHeadAttention(8, 2).q_proj.bias is None


@torch.no_grad()
@pytest.mark.parametrize("flash", [False, True], ids=["manual", "flash"])
@pytest.mark.parametrize("b, s", [(0, 3), (2, 0)], ids=["no-sample", "no-word"])
def test_nothing_in_gives_nothing_out(flash: bool, b: int, s: int) -> None:
    module = drawn(4, 2, flash=flash)
    x, mask = torch.zeros(b, s, 24), torch.ones(b, s, dtype=torch.bool)
    assert module(x).shape == (b, s, 24)
    assert module(x, mask, is_causal=True).shape == (b, s, 24)


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        (MultiHeadAttention, (24, 5), "hidden_size=24 is no multiple of num_heads=5"),
        (MultiHeadAttention, (24, 4, 3), "num_heads=4 is no multiple of num_kv_heads=3"),
        (MultiHeadAttention, (24, 4, 8), "num_heads=4 is no multiple of num_kv_heads=8"),
        (MultiHeadAttention, (24, 0), "num_heads=0"),
        (MultiHeadAttention, (24, 4, 0), "num_kv_heads=0"),
        (MultiHeadAttention, (24, 4, 4, 1.0), "dropout=1.0"),
        (SelfAttention, (3, 0, 4), "d_out_kq=0"),
        (CrossAttention, (3, 2, 4, 0), "d_context=0"),
        (MultiHeadAttentionWrapper, (3, 2, 4, 0), "num_heads=0"),
    ],
)
def test_sizes_that_can_not_be(kind: type[torch.nn.Module], arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(*arguments)


@pytest.mark.parametrize("shape", [(2, 5, 23), (5, 24), (2, 1, 5, 24)], ids=str)
def test_input_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x: shape \[.*\]; give \[B, S, 24\]"):
        MultiHeadAttention(24, 4)(torch.zeros(shape))
    with pytest.raises(ValueError, match=r"x: shape \[.*\]; give \[S, 3\] or \[B, S, 3\]"):
        CausalSelfAttention(3, 2, 4)(torch.zeros(shape))


def test_contexts_of_another_shape() -> None:
    cross = CrossAttention(3, 2, 4, d_context=5)
    with pytest.raises(ValueError, match=r"context: shape \[6, 3\]; give \[S, 5\]"):
        cross(torch.zeros(6, 3), torch.zeros(6, 3))
    with pytest.raises(ValueError, match=r"context: shape \[3, 6, 5\] beside x \[2, 6, 3\]"):
        cross(torch.zeros(2, 6, 3), torch.zeros(3, 6, 5))


WRONG_MASKS = [(5,), (5, 5), (3, 5), (2, 4), (2, 4, 5), (4, 5, 5), (2, 2, 5, 5), (2, 4, 5, 1), (1, 2, 4, 5, 5)]


@pytest.mark.parametrize("flash", [False, True], ids=["manual", "flash"])
@pytest.mark.parametrize("shape", WRONG_MASKS, ids=str)
def test_masks_that_are_refused(flash: bool, shape: tuple[int, ...]) -> None:
    module, x = MultiHeadAttention(24, 4, flash=flash), torch.zeros(2, 5, 24)
    with pytest.raises(ValueError, match=r"attention_mask: shape .* with B=2 \(or 1\), H=4, S=5"):
        module(x, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_mask: dtype .*attention_mask\.bool\(\)"):
        module(x, torch.ones(2, 5, dtype=torch.uint8))
