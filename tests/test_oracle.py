"""The oracle against plain formulas, in blocks and whole; its bound against honest code and against mistakes."""

import math

import pytest
import torch
import torch.nn.functional as F

from attn_spec import oracle, tolerance
from attn_spec.blocks import Pipeline
from attn_spec.conventions import Meaning
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.tolerance import Precision, candidates

FINE = candidates("float64")[0]
PROBLEMS = [
    Problem(q_len=5, kv_len=9, v_dim=4),
    Problem(heads=6, kv_heads=2, q_len=9, kv_len=5),
    Problem(q_len=9, kv_len=9, mask=(Causal(),)),
    Problem(q_len=4, kv_len=9, mask=(Causal(), Visible("BHQK")), scale=0.3),
    Problem(q_len=9, kv_len=9, mask=(Visible("HQK", empty_rows=(2,)),)),
    Problem(q_len=9, kv_len=9, mask=(Bias("BHQK"), Visible("QK")), delivery=Delivery("additive")),
    Problem(q_len=9, kv_len=9, mask=(KeyPadding((9, 4)),), delivery=Delivery("key-padding")),
]


def plain(problem: Problem, alignment: str) -> torch.Tensor:
    """softmax(scale q k' + bias) v by loops over samples, heads and queries."""
    a = problem.replace(dtype="float64").arguments(alignment)  # type: ignore[arg-type]
    b, h, q_len, kv_len = a.sizes
    out = torch.zeros(b, h, q_len, a.v.shape[-1], dtype=torch.float64)
    for n in range(b):
        for m in range(h):
            g = m // (h // a.k.shape[1])
            for i in range(q_len):
                logits = {}
                for j in range(kv_len):
                    offset = kv_len - q_len if alignment == "bottom-right" else 0
                    if a.causal and j > i + offset:
                        continue
                    s = float(a.q[n, m, i] @ a.k[n, g, j]) * (a.scale or a.q.shape[-1] ** -0.5)
                    if a.mask is not None and a.form == "key-padding":
                        if not a.mask[n, j]:
                            continue
                    elif a.mask is not None:
                        entry = a.mask.expand(b, h, q_len, kv_len)[n, m, i, j]
                        if a.form == "bool" and not entry:
                            continue
                        s += float(entry) if a.form == "additive" else 0.0
                    logits[j] = s
                finite = {j: s for j, s in logits.items() if s > -torch.inf}
                total = sum(math.exp(s) for s in finite.values())
                for j, s in finite.items():
                    out[n, m, i] += math.exp(s) / total * a.v[n, g, j]
    return out


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("alignment", ["top-left", "bottom-right"])
def test_it_is_the_formula(problem: Problem, alignment: str) -> None:
    arguments = problem.replace(dtype="float64").arguments(alignment)  # type: ignore[arg-type]
    exact = oracle.answer(arguments, Meaning(alignment=alignment), FINE)  # type: ignore[arg-type]
    assert torch.allclose(exact.output, plain(problem, alignment), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_blocks_of_rows_give_the_whole(problem: Problem) -> None:
    arguments = problem.arguments()
    whole = oracle.answer(arguments, Meaning(), FINE, weights=True)
    rows = oracle.answer(arguments, Meaning(), FINE, weights=True, chunk=40)
    for name in ("output", "lse", "weights"):
        torch.testing.assert_close(getattr(rows, name), getattr(whole, name), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(rows.bounds.output, whole.bounds.output, rtol=1e-9, atol=1e-16)


def test_a_changed_pipeline_is_not_cut_into_rows() -> None:
    with pytest.raises(ValueError, match="chunk"):
        oracle.answer(PROBLEMS[0].arguments(), Meaning(), FINE, pipeline=Pipeline(), chunk=8)


def test_lse_and_empty_rows() -> None:
    problem = Problem(q_len=4, kv_len=4, dtype="float64", mask=(Visible("QK", empty_rows=(1,)),))
    arguments = problem.arguments()
    for meaning, check in (
        (Meaning(empty_rows="zero"), lambda o: bool((o == 0).all())),
        (Meaning(empty_rows="nan"), lambda o: bool(o.isnan().all())),
    ):
        exact = oracle.answer(arguments, meaning, FINE)
        assert check(exact.output[:, :, 1])
        assert bool((exact.lse[:, :, 1] == -torch.inf).all())
        assert not bool(exact.output[:, :, 0].isnan().any())
    mean = oracle.answer(arguments, Meaning(empty_rows="mean"), FINE).output[:, :, 1]
    torch.testing.assert_close(mean, arguments.v.mean(2))


def test_no_keys_at_all() -> None:
    exact = oracle.answer(Problem(kv_len=0).arguments(), Meaning(), FINE)
    assert bool((exact.output == 0).all())
    assert exact.output.shape == (2, 2, 7, 8)


# the bound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("values", ["sharp", "mild", "shared-key"])
@pytest.mark.parametrize(("length", "width"), [(7, 8), (65, 64), (257, 16)])
def test_honest_is_within_and_wrong_is_far_beyond(dtype: str, values: str, length: int, width: int) -> None:
    problem = Problem(q_len=length, kv_len=length, head_dim=width, v_dim=width, dtype=dtype, values=values)
    a = problem.arguments()
    exact = oracle.answer(a, Meaning(), candidates(dtype)[0])
    honest = exact.compare(F.scaled_dot_product_attention(a.q, a.k, a.v))
    assert 0.001 < honest.ratio < 0.95
    dropped = exact.compare(F.scaled_dot_product_attention(a.q, a.k[:, :, :-1], a.v[:, :, :-1]))
    scaled = exact.compare(F.scaled_dot_product_attention(a.q, a.k, a.v, scale=1.05 * width**-0.5))
    zeros = exact.compare(torch.zeros_like(exact.output))
    assert min(dropped.ratio, scaled.ratio, zeros.ratio) > 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_scores_rounded_to_the_input_dtype_stand_apart(dtype: str) -> None:
    a = Problem(q_len=64, kv_len=64, head_dim=64, v_dim=64, dtype=dtype, values="large").arguments()
    rounded = (a.q @ a.k.mT * 64**-0.5).softmax(-1) @ a.v
    fine, coarse = (oracle.answer(a, Meaning(), choice).compare(rounded).ratio for choice in candidates(dtype)[:2])
    assert fine > 4
    assert coarse < 0.95


def test_all_zeros_fail_under_finite_sentinels() -> None:
    problem = Problem(q_len=33, kv_len=33, mask=(Visible("QK"),), delivery=Delivery("additive", hidden="min"))
    exact = oracle.answer(problem.arguments(), Meaning(), candidates("float32")[0])
    assert bool(exact.bounds.output.isfinite().all())
    assert exact.compare(torch.zeros_like(exact.output)).ratio > 1000


def test_a_large_constant_bias_is_allowed_for() -> None:
    a = Problem(q_len=33, kv_len=33, head_dim=64, v_dim=64).arguments()
    bias = torch.full((33, 33), 1000.0)
    exact = oracle.answer(a.replace(mask=bias, form="additive"), Meaning(), candidates("float32")[0])
    got = exact.compare(F.scaled_dot_product_attention(a.q, a.k, a.v, attn_mask=bias))
    assert got.ratio < 0.95


def test_nan_and_infinity_never_pass() -> None:
    one, bound = torch.ones(2, dtype=torch.float64), torch.full((2,), 1e-3, dtype=torch.float64)
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert not tolerance.worst(torch.tensor([1.0, bad]), one, bound).holds
        assert not tolerance.worst(one, torch.tensor([1.0, bad], dtype=torch.float64), bound).holds
        assert not tolerance.worst(one, one + 1, torch.tensor([2.0, bad], dtype=torch.float64)).holds
    assert tolerance.worst(torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.0]).double(), bound).holds
    both = torch.tensor([torch.nan, 1.0], dtype=torch.float64)
    assert tolerance.worst(both, both, bound).holds  # where NaN is what the conventions declare


def test_flat_float16_rows_have_room_for_subnormal_weights() -> None:
    a = Problem(batch=1, q_len=4, kv_len=4096, dtype="float16", values="mild").arguments()
    flat = a.replace(q=a.q * 0.01, v=torch.ones_like(a.v))
    exact = oracle.answer(flat, Meaning(), Precision("float16", "float16", "float32", "float16"))
    honest = (flat.q.float() @ flat.k.float().mT * 8**-0.5).softmax(-1).half().float() @ flat.v.float()
    assert exact.compare(honest.half()).ratio < 0.95
