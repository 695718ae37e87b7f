"""How modules plug in: what is read from constructors, forwards, parameters and buffers; what is said of bad ones."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import TargetError, check_attention
from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.reference.scratch.cross_attention import CrossAttention
from attn_spec.reference.scratch.multi_head import MultiHeadAttention
from attn_spec.reference.scratch.multi_head_wrapper import MultiHeadAttentionWrapper
from attn_spec.reference.scratch.self_attention import SelfAttention


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return s.softmax(-1) @ v


class Gpt(nn.Module):
    """Fused q, k and v from a config, a triangular buffer."""

    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.register_buffer("bias", torch.tril(torch.ones(config.block_size, config.block_size))[None, None])

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in self.c_attn(x).split(self.n_embd, dim=2))
        s = (q @ k.mT * k.shape[-1] ** -0.5).masked_fill(self.bias[:, :, :t, :t] == 0, -torch.inf)
        return self.c_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))


class Interleaved(nn.Module):
    """q, k and v of a head side by side; sequences first."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.qkv, self.proj = num_heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        s, b, c = x.shape
        q, k, v = self.qkv(x).view(s, b, self.num_heads, -1).permute(1, 2, 0, 3).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).reshape(s, b, c))


class Rotated(nn.Module):
    """Rotary positions between projections and product, grouped heads."""

    def __init__(self, hidden_size, num_heads, num_kv_heads):
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)

    def rotated(self, x):
        half = x.shape[-1] // 2
        rates = 10_000 ** (-torch.arange(half, dtype=torch.float32) / half)
        angle = (torch.arange(x.shape[2], dtype=torch.float32)[:, None] * rates).to(x.dtype)
        one, other = x[..., :half], x[..., half : 2 * half]
        turned = torch.cat([one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], -1)
        return torch.cat([turned, x[..., 2 * half :]], -1)

    def forward(self, hidden_states, is_causal=False):
        b, s, _ = hidden_states.shape
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(hidden_states).view(b, s, -1, self.head_dim).transpose(1, 2) for f in projections)
        o = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=is_causal, enable_gqa=True)
        return self.o_proj(o.transpose(1, 2).reshape(b, s, -1))


@pytest.mark.parametrize(
    "make, causal",
    [(Gpt, True), (Interleaved, False), (SelfAttention, False), (MultiHeadAttentionWrapper, False),
     (nn.MultiheadAttention, False), (MultiHeadAttention, False)],
)  # fmt: skip
def test_between_its_projections_a_module_is_a_function(make, causal):
    f = ModuleFunction(make, make.__name__)
    h, hkv, d, dv = f.fit(6, 2, 4, 5)
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, 7, w, generator=g) for n, w in ((h, d), (hkv, d), (hkv, dv)))
    out = f(q, k, v)[0]
    assert torch.allclose(out, attended(q, k, v, causal), atol=1e-5)


def test_queries_and_keys_of_two_sequences():
    f = ModuleFunction(CrossAttention, "CrossAttention")
    g = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, 1, 5, 4, generator=g),
        torch.randn(2, 1, 9, 4, generator=g),
        torch.randn(2, 1, 9, 6, generator=g),
    )
    assert torch.allclose(f(q, k, v)[0], attended(q, k, v), atol=1e-5)


def facts(target, **declared):
    return {name: finding.value for name, finding in adapt(target, declared=declared).facts}


def test_what_is_found_out():
    assert facts(Gpt)["channels"] == "q|k|v"
    assert adapt(Gpt).conventions.causal.value == "always"
    found = facts(Interleaved)
    assert (found["channels"], found["input"]) == ("per-head", "SBD")
    assert facts(Rotated)["between"] == "rotation"
    assert ModuleFunction(nn.MultiheadAttention, "mha").projections.found[0].name == "in_proj_weight"


@pytest.mark.parametrize("make", [Gpt, Interleaved, Rotated, MultiHeadAttention])
def test_honest_modules_are_left_alone(make):
    report = check_attention(make)
    assert report.passed, str(report)


def test_an_instance_and_a_factory():
    torch.manual_seed(0)
    module = MultiHeadAttention(24, 4, num_kv_heads=2)
    report = check_attention(module, laws=["shapes", "heads", "modules", "ATN650", "ATN151"])
    assert report.passed, str(report)

    def make_attention(hidden_size: int = 24) -> nn.Module:
        return MultiHeadAttention(hidden_size, 4)

    assert check_attention(make_attention, laws=["ATN650", "ATN203"]).passed


def test_positions_that_are_rotated_apart_are_seen():
    class Shifted(Rotated):
        def forward(self, hidden_states, is_causal=False):
            b, s, _ = hidden_states.shape
            q, k, v = (
                f(hidden_states).view(b, s, -1, self.head_dim).transpose(1, 2)
                for f in (self.q_proj, self.k_proj, self.v_proj)
            )
            q = self.rotated(F.pad(q, (0, 0, 1, 0)))[:, :, 1:]
            o = F.scaled_dot_product_attention(q, self.rotated(k), v, is_causal=is_causal, enable_gqa=True)
            return self.o_proj(o.transpose(1, 2).reshape(b, s, -1))

    report = check_attention(Shifted, laws=["ATN653"])
    assert report.verdict == "failed"
    assert "same position" in str(report)


# what is said of a module that can't be judged -----------------------------------------------------------------------


class Strange(nn.Module):
    def __init__(self, dim, num_heads, rank):
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(dim, 3 * dim), num_heads

    def forward(self, x):
        return self.qkv(x)


class Asking(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.qkv = nn.Linear(config.n_embd, config.rank)

    def forward(self, x):
        return self.qkv(x)


class Needing(Interleaved):
    def forward(self, x, phase):
        return super().forward(x)


def test_a_constructor_that_names_can_not_fill():
    with pytest.raises(TargetError, match=r"requires 'rank'.*`construct: \{rank: \.\.\.\}`"):
        adapt(Strange)
    with pytest.raises(TargetError, match=r"asks config for 'rank'.*`construct: \{config: \{rank: \.\.\.\}\}`"):
        adapt(Asking)
    with pytest.raises(TargetError, match=r"forward requires 'phase'.*`call: \{phase: \.\.\.\}`"):
        adapt(Needing)


def test_declared_arguments_that_do_not_exist():
    with pytest.raises(TargetError, match="'num_head' is no argument of its constructor; did you mean num_heads"):
        adapt(Interleaved, declared={"construct": {"num_head": 3}})
    with pytest.raises(TargetError, match="has no parameter 'qvk'; did you mean qkv"):
        adapt(Interleaved, declared={"projections": {"qkv": "qvk"}})


def test_sizes_that_do_not_divide_are_the_constructors_to_refuse():
    class Never(nn.Module):
        def __init__(self, hidden_size, num_heads):
            super().__init__()
            raise ValueError("hidden_size must be a multiple of 7919")

        def forward(self, x):
            return x

    with pytest.raises(TargetError, match="raises ValueError: hidden_size must be a multiple of 7919"):
        adapt(Never)


def test_projections_that_are_found_in_part():
    class Odd(nn.Module):
        def __init__(self, dim, num_heads):
            super().__init__()
            self.num_heads = num_heads
            self.q_proj, self.lookup, self.content, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))

        def forward(self, x):
            b, s, dim = x.shape
            made = (
                f(x).view(b, s, self.num_heads, -1).transpose(1, 2) for f in (self.q_proj, self.lookup, self.content)
            )
            return self.o_proj(F.scaled_dot_product_attention(*made).transpose(1, 2).reshape(b, s, dim))

    with pytest.raises(
        TargetError, match=r"found in part: q = q_proj.weight.*none for k, v.*`projections: \{k: \.\.\., v"
    ):
        adapt(Odd)
    assert facts(Odd, projections={"k": "lookup", "v": "content"})["projections"] == "found"
    report = check_attention(Odd, projections={})
    assert report.passed, str(report)
    assert "black box" in " ".join(report.judgement.implementation.notes)


def test_heads_that_do_not_divide():
    with pytest.raises(TargetError, match=r"5 heads do not divide q_proj.weight \[24, 24\]"):
        adapt(MultiHeadAttention(24, 4), declared={"heads": 5})


def test_an_instance_without_heads():
    module = nn.Sequential()
    module.qkv = nn.Linear(12, 36)
    with pytest.raises(TargetError, match="none of its attributes says how many heads"):
        adapt(module)


def test_one_sequence_only():
    class Transposed(SelfAttention):
        def forward(self, x):
            q, k, v = x @ self.W_query, x @ self.W_key, x @ self.W_value
            return torch.softmax(q @ k.T / q.shape[-1] ** 0.5, -1) @ v

    report = check_attention(Transposed, laws=["ATN103"])
    assert report.verdict == "failed"
    assert "`.T` reverses all axes" in str(report)
    assert "declare `input: SD`" in str(report)
    assert check_attention(Transposed, laws=["ATN103", "ATN203", "ATN650"], input="SD").passed


# what is named, and what is not ---------------------------------------------------------------------------------------


def test_a_triangle_that_is_shifted_is_meant_as_one():
    class Ahead(Gpt):
        def __init__(self, config):
            super().__init__(config)
            n = config.block_size
            self.bias = torch.tril(torch.ones(n, n), diagonal=1)[None, None]

    report = check_attention(Ahead, laws=["shapes", "causality", "weights"])
    assert report.judgement.implementation.conventions.causal.value == "always"
    assert report.diagnosis == ["causal-one-ahead"]


def test_what_is_wrong_around_attention_is_no_fault_of_attention():
    class Dropping(Gpt):
        def __init__(self, config):
            super().__init__(config)
            self.dropout = config.dropout

        def forward(self, x):
            return F.dropout(super().forward(x), self.dropout)

    report = check_attention(Dropping, laws=["shapes", "numerics", "randomness"])
    assert {result.code for result in report.results if result.red} == {"ATN1150"}
    assert report.diagnosis == ["dropout-in-eval"]


def test_names_of_torchs_module_stand_for_its_masks():
    class Named(nn.MultiheadAttention):
        def forward(self, query, key, value, key_padding_mask=None, need_weights=False, attn_mask=None):
            return super().forward(query, key, value, key_padding_mask, need_weights, attn_mask)

    conventions = adapt(Named).conventions
    assert (conventions.polarity.value, conventions.padding_polarity.value) == ("masked", "masked")
