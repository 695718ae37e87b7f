"""Modules as people have them: wrapped, adapted, tied, short, particular about sizes, or not to be looked into."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from attn_spec import check_attention
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.signature import TargetError


class Plain(nn.Module):
    """Right, by torch's own attention."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads, self.d = n_heads, d_model // n_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.view(*x.shape[:2], self.n_heads, self.d).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LowRank(nn.Module):
    """As peft's: the Linear, and a low-rank update beside it."""

    def __init__(self, base_layer, rank=4):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B(self.lora_A(x))


class LowRankLinear(nn.Linear):
    """As loralib's: a Linear that holds its update itself."""

    def __init__(self, width, out):
        super().__init__(width, out)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(4, width)), nn.Parameter(torch.randn(out, 4))

    def forward(self, x):
        return super().forward(x) + x @ self.lora_A.mT @ self.lora_B.mT


class Adapted(Plain):
    def __init__(self, d_model=32, n_heads=4):
        super().__init__(d_model, n_heads)
        self.q_proj, self.v_proj = LowRank(self.q_proj), LowRankLinear(d_model, d_model)


class WeightNormed(Plain):
    def __init__(self, d_model=32, n_heads=4):
        super().__init__(d_model, n_heads)
        weight_norm(self.q_proj)
        spectral_norm(self.k_proj)
        nn.utils.weight_norm(self.v_proj)


class TiedOutput(Plain):
    def __init__(self, d_model=32, n_heads=4):
        super().__init__(d_model, n_heads)
        self.out_proj.weight = self.v_proj.weight


class PowersOfTwo(Plain):
    def __init__(self, d_model=32, n_heads=4):
        assert d_model // n_heads in (16, 32, 64), "head_dim must be 16, 32 or 64"
        super().__init__(d_model, n_heads)


def adapted():
    return Adapted()


def in_a_row():
    return nn.Sequential(Plain(), nn.Identity())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("made", [Adapted, WeightNormed, TiedOutput, PowersOfTwo, adapted, in_a_row])
def test_projections_are_found_as_a_whole(made):
    f = ModuleFunction(made, "made")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, f.sizes.heads, 5, f.sizes.head_dim, generator=g) for _ in "qkv")
    assert torch.allclose(f.core(q, k, v, {})[0], F.scaled_dot_product_attention(q, k, v), atol=1e-5)


def test_an_adapter_that_is_not_linear_is_left():
    module = Adapted()
    module.q_proj.lora_A = nn.Sequential(nn.Linear(32, 4), nn.GELU())
    with pytest.raises(TargetError, match="in part"):
        ModuleFunction(module, "module")


def test_instance_is_not_changed():
    module = Adapted()
    ModuleFunction(module, "module")
    assert isinstance(module.q_proj, LowRank)


@pytest.mark.parametrize(
    "options", [{"batch_first": True}, {"kdim": 24, "vdim": 24}, {"kdim": 24, "vdim": 24, "batch_first": True}]
)
def test_multihead_instances_with_two_lengths(options):
    f = ModuleFunction(nn.MultiheadAttention(32, 4, **options), "multihead")
    g = torch.Generator().manual_seed(0)
    for q_len, kv_len in ((5, 3), (33, 1), (1, 4)):
        q, k, v = (torch.randn(2, 4, n, 8, generator=g) for n in (q_len, kv_len, kv_len))
        assert torch.allclose(f.core(q, k, v, {})[0], F.scaled_dot_product_attention(q, k, v), atol=1e-5)


def test_a_multihead_whose_keys_are_of_another_width():
    report = check_attention(
        nn.MultiheadAttention(32, 4, kdim=24, vdim=24, batch_first=True), laws=["ATN150", "ATN650"]
    )
    assert report.passed, str(report)


class FromMultihead(nn.MultiheadAttention):
    """A forward of its own, for one input."""

    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads, batch_first=True)

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


def test_a_subclass_of_multihead_with_another_forward():
    report = check_attention(FromMultihead, laws=["ATN103", "ATN150"])
    assert report.passed, str(report)


def lazy():
    module = Plain()
    module.q_proj = nn.LazyLinear(32)
    return module


REFUSED = {
    "add_bias_kv": lambda: nn.MultiheadAttention(32, 4, add_bias_kv=True),
    "add_zero_attn": lambda: nn.MultiheadAttention(32, 4, add_zero_attn=True),
    "vdim": lambda: nn.MultiheadAttention(32, 4, kdim=24, vdim=20),
    "._orig_mod": lambda: torch.compile(Plain(), backend="eager"),
    ".module": lambda: nn.DataParallel(Plain()),
    "meta": lambda: Plain().to("meta"),
    "lazy": lazy,
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused_with_what_to_do(said):
    with pytest.raises(TargetError) as caught:
        ModuleFunction(REFUSED[said](), "mine")
    assert str(caught.value).startswith("mine: ")
    assert said in str(caught.value)


def test_keyword_arguments_alone():
    class Gathered(Plain):
        def forward(self, **kwargs):
            return super().forward(kwargs["x"])

    with pytest.raises(TargetError, match=r"name them in its signature"):
        ModuleFunction(Gathered(), "gathered")


class Short(Plain):
    """Causal, by a triangle of eight positions."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__(d_model, n_heads)
        self.register_buffer("future", torch.ones(8, 8, dtype=torch.bool).triu(1))

    def forward(self, x):
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = q @ k.mT / self.d**0.5
        scores = scores.masked_fill(self.future[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("target", [Short, Short()])
def test_a_short_triangle_is_judged_as_far_as_it_reaches(target):
    report = check_attention(target, laws=["causality", "shapes"])
    assert report.passed, str(report)
    assert report.counts["passed"] > 10


def test_fixed_is_for_functions():
    with pytest.raises(ValueError, match="call:"):
        check_attention(Plain, fixed={"nope": 1})
    with pytest.raises(ValueError, match="is for modules"):
        check_attention(F.scaled_dot_product_attention, heads=4)
