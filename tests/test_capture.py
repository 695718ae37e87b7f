"""Capture: every call is seen, results are those of a run without it, and the attention is found by its data flow."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec.capture import Recording, capture
from attn_spec.reference.fused.tiled import tiled


class SelfAttention(nn.Module):
    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.heads = heads
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        b, s, width = x.shape
        q, k, v = (p(x).view(b, s, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-2, -1)
        scores /= (width // self.heads) ** 0.5
        if causal:
            scores[..., torch.ones(s, s, dtype=torch.bool).triu(1)] = -torch.inf
        weights = self.drop(scores.softmax(-1))
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, s, width))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.query(x) @ self.key(x).transpose(1, 2) / 8**0.5, -1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([Head(), Head(), Head()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], -1)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhij,bhjd->bhid", F.softmax(scores, dim=3), v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    e = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (e / e.sum(-1, keepdim=True)) @ v


def by_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def normalised_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(q @ k.mT / q.shape[-1] ** 0.5)
    return e @ v / e.sum(-1, keepdim=True)


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 8**-0.25) @ (k / 8**0.25).transpose(2, 3)).softmax(-1) @ v


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(q.new_empty(b * h, q.shape[1], k.shape[1]), q, k.mT, beta=0, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (b, h))


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT / q.shape[-1] ** 0.5).softmax(-2).mT @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


STYLES = [plain, by_einsum, by_hand, by_logsumexp, normalised_late, scaled_before, folded, keys_first, sdpa]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=g).to(dtype) for n in (5, 6, 6))
    return q, k, v


@pytest.mark.parametrize("function", STYLES)
def test_the_attention_is_found_in_every_style(function: Callable[..., Tensor]) -> None:
    q, k, v = inputs()
    recording = capture(function, q, k, v)
    core = recording.core
    assert core is not None
    assert core.scale == pytest.approx(8**-0.5)
    assert (core.softmax_axis, core.summed_axis) == ("K", "K")
    for name, given in (("q", q), ("k", k), ("v", v)):
        seen = core.canonical(name, batch=2)
        assert seen is not None
        if function is not scaled_before:
            assert torch.equal(seen, given), name
    used = core.used_weights(batch=2)
    assert used is not None
    torch.testing.assert_close(used, (q @ k.mT * 8**-0.5).softmax(-1))
    torch.testing.assert_close(recording.returned, used @ v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [*STYLES, tiled])
def test_results_are_those_of_a_run_without_it(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    assert torch.equal(capture(function, q, k, v).returned, function(q, k, v))


def test_gradients_are_those_of_a_run_without_it() -> None:
    module, x = SelfAttention().eval(), torch.randn(2, 5, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x, causal=True).square().sum(), x)
    (seen,) = torch.autograd.grad(capture(module, x, causal=True).returned.square().sum(), x)
    assert torch.equal(seen, expected)


def test_dropout_draws_the_same_numbers() -> None:
    module, x = SelfAttention().train(), torch.randn(2, 5, 16)
    torch.manual_seed(0)
    expected = module(x)
    torch.manual_seed(0)
    assert torch.equal(capture(module, x).returned, expected)


def test_a_module_in_full() -> None:
    torch.manual_seed(0)
    module, x = SelfAttention().eval(), torch.randn(2, 5, 16)
    recording = capture(module, x, causal=True)
    core = recording.core
    assert core is not None
    assert core.kind == "softmax"
    assert set(core.projections) == {"q", "k", "v"}
    assert torch.equal(core.projections["q"].value, module.q_proj(x))
    softmax = core.call
    assert softmax.where.text == "weights = self.drop(scores.softmax(-1))"
    assert softmax.where.file == __file__
    assert recording.calls[0].where.module == "q_proj"
    assert core.letters["q"] == "BHQD"
    assert core.mask is not None
    assert core.merged is not None
    assert core.merged.shape == (2, 5, 16)
    assert core.output is not None
    assert torch.equal(core.output, recording.returned)


def test_tensors_are_as_they_were_before_a_change_in_place() -> None:
    core = capture(SelfAttention().eval(), torch.randn(2, 5, 16), causal=True).core
    assert core is not None
    assert core.logits is not None
    assert core.scaled is not None
    assert core.masked is not None
    torch.testing.assert_close(core.logits / 8**0.5, core.scaled)
    assert not core.scaled.isinf().any()
    assert int(core.masked.isinf().sum()) == 2 * 2 * 10


def test_a_change_in_place_to_one_part_leaves_the_others() -> None:
    def chunked(qkv: Tensor) -> Tensor:
        q, k, v = qkv.clone().chunk(3, -1)
        q *= 8**-0.5
        return (q @ k.mT).softmax(-1) @ v

    core = capture(chunked, torch.randn(2, 3, 5, 24)).core
    assert core is not None
    assert core.scale == pytest.approx(8**-0.5)
    assert core.before == pytest.approx(8**-0.5)


def test_each_head_of_a_list_is_an_attention() -> None:
    cores = capture(Heads(), torch.randn(2, 5, 16)).cores
    assert [core.call.where.module for core in cores] == ["heads.0", "heads.1", "heads.2"]


def test_multihead_attention_is_opened() -> None:
    module, x = nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(2, 5, 16)
    core = capture(module, x, x, x).core
    assert core is not None
    assert core.kind == "softmax"
    assert core.used_weights(batch=2) is not None
    expected, weights = module(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(core.used_weights(batch=2), weights)
    torch.testing.assert_close(capture(module, x, x, x).returned[0], expected)


def test_a_router_is_no_attention() -> None:
    gate = nn.Linear(16, 4)
    assert capture(lambda x: torch.einsum("bse,bsd->bsd", gate(x).softmax(-1), x), torch.randn(2, 5, 16)).core is None


@torch.library.custom_op("attn_spec_test::attention", mutates_args=())
def custom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q, k, v)


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.zeros(q.shape)  # memory that was freed may hold the right numbers
        with torch._C.DisableTorchFunction():
            out.copy_(plain(q, k, v))
        return out


@pytest.mark.parametrize("function", [custom, Kernel.apply])
def test_what_can_not_be_seen_is_fused(function: Callable[..., Tensor]) -> None:
    core = capture(function, *inputs()).core
    assert core is not None
    assert core.kind == "fused"
    assert core.weights is None
    torch.testing.assert_close(core.mixed, plain(*inputs()))
    assert torch.equal(core.q, inputs()[0])  # type: ignore[arg-type]


def test_an_online_softmax_has_no_weights() -> None:
    core = capture(tiled, *(torch.randn(1, 2, 100, 8) for _ in range(3))).core
    assert core is not None
    assert (core.kind, core.weights) == ("fused", None)


def test_an_exception_is_kept_with_the_call_that_raised() -> None:
    recording: Recording = capture(lambda q, k, v: q @ k, *inputs())
    assert isinstance(recording.error, RuntimeError)
    assert recording.calls[-1].error is recording.error
    assert recording.returned is None
