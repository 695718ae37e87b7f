"""Kinds of modules that released packages have: their configs, sizes, rotations, masks, norms and layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import adapt, check_attention
from attn_spec.adapters.modules.configs import annotated, beside
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.modules.plain import PlainModule
from attn_spec.law import Unsupported
from attn_spec.masks import Causal, Delivery, Visible
from attn_spec.problem import Problem

SMALL = Problem(batch=2, heads=4, kv_heads=4, q_len=5, kv_len=5, head_dim=8, v_dim=8)


def of_transformers(kind: type[nn.Module]) -> type[nn.Module]:
    """The class as if it were one of transformers': its caller hands causality over in the mask."""
    kind.__module__ = "transformers.models.imitation"
    return kind


def right(target: Any, problem: Problem = SMALL, **declared: Any) -> bool:
    """Whether the attention between the projections is torch's, on the sizes that the module takes."""
    implementation = adapt(target, declared=declared)
    arguments = implementation.fit(problem).arguments()
    got = implementation(arguments).output
    expected = F.scaled_dot_product_attention(arguments.q, arguments.k, arguments.v, enable_gqa=True)
    return torch.allclose(got, expected, atol=1e-5)


# configs -------------------------------------------------------------------------------------------------------------


@dataclass
class ImitationConfig:
    hidden_size: int = 64
    num_attention_heads: int = 4
    attention_multiplier: float = 1.0


@dataclass
class ImitationVisionConfig:
    hidden_size: int = 64
    num_attention_heads: int = 4


@dataclass
class PartedConfig:
    vision: dict[str, int] | None = None


@dataclass
class PartedVisionConfig:
    hidden_size: int = 64
    num_attention_heads: int = 4


class ImitationSelfAttention(nn.Module):
    """Its config is not annotated; its scale is a number of that config."""

    def __init__(self, config) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        super().__init__()
        self.heads, self.scale = config.num_attention_heads, config.attention_multiplier
        self.kind = type(config)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = (self.split(p(hidden_states)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class PartedAttention(ImitationSelfAttention):
    """Its config stands beside one of the whole model, which has no sizes of its own."""

    def __init__(self, config) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        assert isinstance(config, PartedVisionConfig)
        config.attention_multiplier = (config.hidden_size // config.num_attention_heads) ** -0.5  # type: ignore[attr-defined]
        super().__init__(config)


@pytest.mark.parametrize(
    "annotation", [ImitationConfig | None, "ImitationConfig | None", "Optional[ImitationConfig]", ImitationConfig]
)
def test_a_config_class_is_read_off_any_annotation(annotation: Any) -> None:
    assert list(annotated(annotation, globals())) == [ImitationConfig]


def test_no_config_class_is_read_off_what_names_none() -> None:
    assert list(annotated("dict[str, int] | None", globals())) == list(annotated(int | None, {})) == []


def test_a_config_class_stands_beside_its_module() -> None:
    assert ModuleFunction(ImitationSelfAttention, "x").module.kind is ImitationConfig
    names = {"ImitationConfig": ImitationConfig, "ImitationVisionConfig": ImitationVisionConfig, "Other": int}
    assert list(beside("ImitationAttention", names)) == [ImitationConfig, ImitationVisionConfig]


def test_a_scale_of_the_config_is_the_usual_one() -> None:
    assert right(ImitationSelfAttention)


def test_a_config_of_parts_is_not_taken_for_one_of_the_module() -> None:
    assert right(PartedAttention)


# sizes ---------------------------------------------------------------------------------------------------------------


class Heads(nn.Module):
    """q, k and v of their own; subclasses say what lies between them and the output."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, num_heads * head_dim) for _ in range(3))
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size)

    def heads_of(self, x: Tensor, projection: nn.Module) -> Tensor:
        return projection(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # type: ignore[no-any-return]

    def merged(self, out: Tensor) -> Tensor:
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.heads_of(x, self.q_proj), self.heads_of(x, self.k_proj), self.heads_of(x, self.v_proj)


class Eights(Heads):
    """As kernels with tensor cores want it."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        if head_dim % 8:
            raise ValueError("head_dim must be a multiple of 8")
        super().__init__(hidden_size, num_heads, head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.merged(F.scaled_dot_product_attention(*self.qkv(x)))


class SquareOutput(Heads):
    """Built as if its hidden states had any width, which only its output projection contradicts."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__(hidden_size, num_heads, head_dim)
        self.o_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.merged(F.scaled_dot_product_attention(*self.qkv(x)))


class OneKeyHead(nn.Module):
    """One kv head, whatever it is told; a row that sees no key is the mean of the values."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.d = num_heads, head_dim
        self.qkv = nn.Linear(hidden_size, (num_heads + 2) * head_dim)
        self.proj = nn.Linear(num_heads * head_dim, hidden_size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).split([self.num_heads * self.d, self.d, self.d], -1)
        scores = q.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) @ k[:, None].mT * self.d**-0.5
        scores = scores if mask is None else scores.masked_fill(~mask, -1e9)
        return self.proj((scores.softmax(-1) @ v[:, None]).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("module", [Eights, SquareOutput, OneKeyHead])
def test_sizes_that_a_module_can_have_are_found(module: type[nn.Module]) -> None:
    assert right(module)


def test_empty_rows_are_measured_where_heads_share_one_kv_head() -> None:
    assert adapt(OneKeyHead).conventions.empty_rows.value == "mean"


# what lies between ---------------------------------------------------------------------------------------------------


class NormOverHeads(Heads):
    """q and k are normalised over all heads at once."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        q, k = (F.rms_norm(y.transpose(1, 2).flatten(2), (y.shape[1] * y.shape[3],)) for y in (q, k))
        q, k = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (q, k))
        return self.merged(F.scaled_dot_product_attention(q, k, v))


class MixesHeads(Heads):
    """The heads of a token are summed up, which is no norm."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return self.merged(F.scaled_dot_product_attention(q.cumsum(1), k, v))


class PerHead(nn.Module):
    """Fused head by head, with a LayerNorm on q, which a shift of all channels does not reach."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, 3, -1)).transpose(1, 2).unbind(-2)
        q = F.layer_norm(q, q.shape[-1:])
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.proj(out)  # type: ignore[no-any-return]


def test_a_norm_over_all_heads_is_a_norm() -> None:
    assert ModuleFunction(NormOverHeads, "x").between == "norm over heads"
    report = check_attention(NormOverHeads, laws=["ATN103", "ATN301", "ATN604", "ATN650"], dtypes=["float32"])
    assert report.passed, str(report)


class NormInFloat32(NormOverHeads):
    """What meets in q.k is float32 whatever goes in."""

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().qkv(x)
        return q.float(), k.float(), v.float()

    def merged(self, out: Tensor) -> Tensor:
        return super().merged(out.to(self.o_proj.weight.dtype))


def test_what_arrives_in_another_dtype_is_judged() -> None:
    report = check_attention(NormInFloat32, laws=["ATN650"], dtypes=["float64"])
    assert report.counts["error"] == 0
    assert report.counts["passed"] > 0, str(report)


def test_heads_that_are_mixed_are_no_norm() -> None:
    assert ModuleFunction(MixesHeads, "x").between == ""
    assert not check_attention(MixesHeads, laws=["ATN103"], dtypes=["float32"]).passed


def test_the_order_of_channels_is_found_behind_a_layer_norm() -> None:
    assert ModuleFunction(PerHead, "x").orders.qkv == "per-head"


# rotations, and what is added ----------------------------------------------------------------------------------------


class TurnsPart(Heads):
    """Rotations of half of a head's channels; the rest goes on as it is."""

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(x)
        cos, sin = position_embeddings
        turned = q.shape[-1] // 2
        q, k = (torch.cat((y[..., :turned] * cos + y[..., :turned] * sin, y[..., turned:]), -1) for y in (q, k))
        return self.merged(F.scaled_dot_product_attention(q, k, v))


class TurnsComplex(Heads):
    def forward(self, x: Tensor, position_embeddings: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        pairs = [torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) for y in (q, k)]
        q, k = (torch.view_as_real(y * position_embeddings[:, None]).flatten(3) for y in pairs)
        return self.merged(F.scaled_dot_product_attention(q, k, v))


class AddsPositions(Heads):
    """What has the name of a rotation is added to the hidden states."""

    def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        moved = x if position_embeddings is None else x + position_embeddings
        return self.merged(
            F.scaled_dot_product_attention(
                self.heads_of(moved, self.q_proj), self.heads_of(moved, self.k_proj), self.heads_of(x, self.v_proj)
            )
        )


class AddsResidual(Heads):
    """Adds what it is given, and asks for one more thing that may be None."""

    def forward(self, x: Tensor, residual: Tensor, alibi: Tensor, flags: Tensor | None) -> Tensor:
        assert flags is None
        q, k, v = self.qkv(x)
        bias = alibi.expand(len(x) * self.num_heads, 1, x.shape[1]).unflatten(0, (len(x), -1))
        return residual + self.merged(F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


@pytest.mark.parametrize(
    ("module", "turned"), [(TurnsPart, 0.5), (TurnsComplex, 1.0), (AddsPositions, 1.0), (AddsResidual, 1.0)]
)
def test_what_forward_wants_is_given_as_what_changes_nothing(module: type[nn.Module], turned: float) -> None:
    assert right(module)
    assert ModuleFunction(module, "x").forward.turned == turned


# masks of transformers' modules --------------------------------------------------------------------------------------


@of_transformers
class BoolMask(Heads):
    """True = hidden; a number is no mask."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(hidden_states)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, torch.finfo(scores.dtype).min)
        return self.merged(scores.softmax(-1) @ v)


@of_transformers
class Padding(Heads):
    """Takes no mask of q by k."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError("a padding [B, S] is taken")
        mask = None if attention_mask is None else attention_mask[:, None, None].bool()
        return self.merged(F.scaled_dot_product_attention(*self.qkv(hidden_states), attn_mask=mask))


@of_transformers
class OwnTriangle(Heads):
    """Has a triangle of its own beside the mask of its caller."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, max_position_embeddings: int) -> None:
        super().__init__(hidden_size, num_heads, head_dim)
        self.register_buffer("bias", torch.ones(max_position_embeddings, max_position_embeddings).tril().bool())

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(hidden_states)
        n, low = q.shape[2], torch.finfo(q.dtype).min
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~self.bias[:n, :n], low)
        scores = scores if attention_mask is None else scores + attention_mask
        return self.merged(scores.softmax(-1) @ v)


@of_transformers
class Adds(Heads):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(hidden_states)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return self.merged((scores if attention_mask is None else scores + attention_mask).softmax(-1) @ v)


MASKS = ["ATN103", "ATN401", "ATN404", "ATN502", "ATN505"]


@pytest.mark.parametrize("module", [BoolMask, Padding, OwnTriangle, Adds])
def test_masks_of_modules_of_transformers(module: type[nn.Module]) -> None:
    report = check_attention(module, laws=MASKS, dtypes=["float32"])
    assert report.passed, str(report)
    assert report.counts["passed"] >= (3 if module is Padding else 20), str(report)


def test_what_a_bool_mask_means_is_what_hides() -> None:
    assert ModuleFunction(BoolMask, "x").bool_mask == "hidden"
    assert (ModuleFunction(Adds, "x").bool_mask, ModuleFunction(Adds, "x").by_mask) == ("", True)
    assert not ModuleFunction(Padding, "x").by_mask
    assert adapt(OwnTriangle).conventions.causal.value == "always"


def test_a_bool_mask_takes_no_bias() -> None:
    f = ModuleFunction(BoolMask, "x")
    f.bool_mask = "hidden"
    x = torch.zeros(1, 4, 3, 8)
    with pytest.raises(Unsupported, match="no bias"):
        f._causal_mask({"attention_mask": torch.tensor([[0.0, 1.0, 2.0]])}, x, 3, 3)


@pytest.mark.parametrize(
    ("module", "dtype", "said"), [(Adds, "float16", "-65504"), (OwnTriangle, "float32", "its own triangle")]
)
def test_a_row_that_no_finite_fill_empties_is_not_asked_for(module: type[nn.Module], dtype: Any, said: str) -> None:
    implementation = adapt(module)
    problem = SMALL.replace(
        dtype=dtype, mask=(Visible("QK", empty_rows=(2,)), Causal()), delivery=Delivery("bool", "B1QK")
    )
    with pytest.raises(Unsupported, match=said):
        implementation(implementation.fit(problem).arguments())
    filled = problem.replace(mask=(Visible("QK", density=1.0), Causal()))
    assert implementation(implementation.fit(filled).arguments()).output.isfinite().all()


# a module inside, and no module at all -------------------------------------------------------------------------------


class SwapsAxes(nn.Module):
    """Batch first around one that is not; keys of another length are projected by the same matrix."""

    def __init__(self, d_model: int, nhead: int) -> None:
        super().__init__()
        self.att = nn.MultiheadAttention(d_model, nhead)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, key_padding_mask: Any = None
    ) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        out, _ = self.att(q, k, v, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=False)
        return out.transpose(0, 1)  # type: ignore[no-any-return]


def test_a_module_may_swap_the_axes_for_the_one_inside() -> None:
    f = ModuleFunction(SwapsAxes, "x")
    assert f.input == "BSD"
    assert right(SwapsAxes)
    assert right(SwapsAxes, SMALL.replace(kv_len=3))
    assert adapt(SwapsAxes).conventions.polarity.value == "masked"


class Product(nn.Module):
    def __init__(self, d_k: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.root, self.dropout = d_k**0.5, nn.Dropout(dropout)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = queries @ keys.mT / self.root
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        return self.dropout(scores.softmax(-1)) @ values  # type: ignore[no-any-return]


class Unscaled(nn.Module):
    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return (queries @ keys.mT).softmax(-1) @ values


@pytest.mark.parametrize("target", [Product, Product(8)], ids=["class", "instance"])
def test_a_module_without_weights_is_a_function(target: Any) -> None:
    implementation = adapt(target)
    assert isinstance(implementation.adapter.function, PlainModule)  # type: ignore[attr-defined]
    assert right(target)


def test_what_is_wrong_in_a_module_without_weights_is_seen() -> None:
    report = check_attention(Unscaled, laws=["ATN103", "ATN301"], dtypes=["float32"])
    assert not report.passed
    assert "scale-missing" in report.diagnosis


def test_the_reproducer_of_a_module_without_weights_builds_it() -> None:
    assert "made(d_k=q.shape[-1], dropout=0.0).eval()(q, *args, **kwargs)" in adapt(Product).import_line
    assert adapt(Unscaled).import_line.endswith("impl = impl().eval()")
