"""Signatures, conventions and precision: read from names, measured, declared; and what they contradict."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec import adapt, check_attention
from attn_spec.adapters.signature import TargetError, read
from attn_spec.law import Violation
from attn_spec.problem import Problem


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, scale: float | None = None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if visible is None else s.masked_fill(~visible, -torch.inf)
    return s.softmax(-1).nan_to_num(0.0) @ v


def bshd(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) if causal else None
    return attend(q, k, v, visible, softmax_scale).transpose(1, 2)


def sbhd(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value))).permute(2, 0, 1, 3)


def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert q.dim() == 3
    return attend(q[:, None], k[:, None], v[:, None])[:, 0]


def matrix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T * q.shape[-1] ** -0.5).softmax(-1) @ v


@pytest.mark.parametrize(
    ("function", "layout"),
    [(attend, "BHSD"), (bshd, "BSHD"), (sbhd, "SBHD"), (folded, "NSD"), (matrix, "SD")],
)
def test_layout_by_influence(function: Callable[..., Tensor], layout: str) -> None:
    finding = adapt(function, declared={"fixed": {}}).conventions.layout
    assert (finding.value, finding.how) == (layout, "measured")


def test_layout_survives_a_missing_scale() -> None:
    def unscaled(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Any = None) -> Tensor:
        return torch.einsum("bhij,bjhd->bihd", torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1), v)

    assert adapt(unscaled).conventions.layout.value == "BSHD"


def test_sdpa_needs_no_configuration() -> None:
    made = adapt(F.scaled_dot_product_attention)
    found = {name: finding.value for name, finding in made.conventions.rows()}
    expected = {"layout": "BHSD", "causal": "flag", "alignment": "top-left", "polarity": "attend", "empty_rows": "zero"}
    assert expected.items() <= found.items()
    assert not made.contradictions
    assert made.precision["bfloat16"].scores == "float32"


def test_rounded_scores_are_measured() -> None:
    assert adapt(attend).precision["bfloat16"].scores == "bfloat16"


def test_tiled_groups_contradict() -> None:
    def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, *(x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v)))

    [contradiction] = adapt(tiled).contradictions
    assert contradiction.line == "grouping: tiled"
    assert not adapt(tiled, declared={"grouping": "tiled"}).contradictions


@pytest.mark.parametrize("name", ["is_causal", "causal"])
def test_alignment_is_what_the_name_means_and_not_what_is_measured(name: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, flag: bool = False) -> Tensor:
        shift = 0 if name == "causal" else k.shape[2] - q.shape[2]  # the other library's
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(shift) if flag else None
        return attend(q, k, v, visible)

    renamed: Any = {"parameters": {"causal": "flag"}}
    namespace: dict[str, Any] = {"function": function, "Tensor": Tensor}
    exec(f"def renamed(q, k, v, {name}=False): return function(q, k, v, {name})", namespace)
    contradictions = [c for c in adapt(namespace["renamed"]).contradictions if c.field == "alignment"]
    assert [c.measured.value for c in contradictions] == ["top-left" if name == "causal" else "bottom-right"]
    assert adapt(function, declared=renamed).conventions.causal.value == "flag"


def test_inverted_polarity_contradicts() -> None:
    def inverted(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return attend(query, key, value, None if attn_mask is None else ~attn_mask)

    assert [c.line for c in adapt(inverted).contradictions] == ["polarity: masked"]
    assert not adapt(inverted, declared={"polarity": "masked"}).contradictions


@pytest.mark.parametrize(("base", "factor"), [("e", 1.0), ("2", 1.442695)])
def test_lse_base_is_measured(base: str, factor: float) -> None:
    def with_lse(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False) -> Any:
        out = attend(q, k, v)
        lse = (q @ k.mT * q.shape[-1] ** -0.5).logsumexp(-1) * factor
        return (out, lse) if return_lse else out

    assert adapt(with_lse).conventions.lse_base.value == base


def test_autograd_function_and_operator_schema() -> None:
    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
            return attend(q, k, v, scale=scale)

    made = adapt(Attend.apply, name="Attend")
    assert made.conventions.layout.value == "BHSD"
    signature = read(Attend.apply, "Attend")
    assert signature.has("scale")
    assert signature.positional_only
    operator = torch.ops.aten.scaled_dot_product_attention
    assert read(operator, "op").roles["causal"] == "is_causal"
    assert adapt(operator, name="op").conventions.alignment.value == "top-left"


def test_signatures_that_can_not_be_judged() -> None:
    with pytest.raises(TargetError, match=r"takes no q, k, v.*\(x, y\)"):
        adapt(lambda x, y: x + y, name="add")
    with pytest.raises(TargetError, match="requires temperature"):
        adapt(lambda q, k, v, temperature: q, name="hot")
    with pytest.raises(TargetError, match="not a tensor"):
        adapt(lambda q, k, v: "out", name="words")
    with pytest.raises(TargetError, match="not callable"):
        adapt(3, name="three")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout: 'HSBD' is not one of"):
        adapt(attend, declared={"layout": "HSBD"})


def test_near_misses_and_unknown_parameters_are_noted() -> None:
    def typo(q: Tensor, k: Tensor, v: Tensor, is_casual: bool = False, colour: str = "") -> Tensor:
        return attend(q, k, v)

    signature = read(typo, "typo")
    assert signature.near_misses == (("is_casual", "is_causal"),)
    assert "colour" in " ".join(adapt(typo).notes)


def test_fixed_arguments_and_renamed_parameters() -> None:
    def custom(q: Tensor, k: Tensor, v: Tensor, temperature: float, mode: str) -> Tensor:
        assert mode == "fast"
        return attend(q, k, v, scale=temperature)

    made = adapt(custom, declared={"parameters": {"scale": "temperature"}, "fixed": {"mode": "fast"}})
    assert made.conventions.layout.value == "BHSD"
    assert made.precision["float32"].scores == "float32"


def test_global_state_is_put_back_and_noted() -> None:
    def rude(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return attend(q, k, v)

    made = adapt(rude)
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()
    assert {"default dtype", "grad mode", "random generator"} <= set(made.disturbed)


def test_the_call_runs_on_its_device_and_everything_else_on_the_cpu() -> None:
    devices = []

    def located(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        devices.append(q.device.type)
        return attend(q, k, v, attn_mask)

    made = adapt(located, device="cpu:0")  # as any other device: arguments are moved there, results moved back
    assert made.conventions.layout.value == "BHSD"
    assert made.output(Problem().arguments()).device.type == "cpu"

    def elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v).to("meta")

    made = adapt(attend, device="cpu:0")
    made.adapter.function = elsewhere  # type: ignore[attr-defined]
    with pytest.raises(Violation, match="on meta"):
        made(Problem().arguments())


def test_a_flag_and_a_dropout_that_are_on_by_default_are_switched_off() -> None:
    def eager(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = True, dropout_p: float = 0.5) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, None, dropout_p, is_causal)

    made = adapt(eager)
    assert made.conventions.causal.value == "flag"
    assert not made.contradictions
    assert not made.disturbed


def test_a_mask_of_zeros_and_ones_is_judged_as_a_bool_one() -> None:
    def annotated(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        s = query @ key.mT * query.shape[-1] ** -0.5
        return (s if mask is None else s.masked_fill(mask == 0, -1e9)).softmax(-1) @ value

    found = adapt(annotated).conventions
    assert (found.mask_form.value, found.mask_form.how) == ("bool", "measured")
    assert found.empty_rows.value == "mean"
    assert check_attention(annotated).passed


def test_nan_rows_are_a_finding_unless_a_name_says_otherwise() -> None:
    def textbook(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        s = q @ k.mT * q.shape[-1] ** -0.5
        return (s if mask is None else s.masked_fill(~mask, -torch.inf)).softmax(-1) @ v

    report = check_attention(textbook)
    assert report.passed, str(report)
    assert "give NaN" in str(report)

    def torchs(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return textbook(q, k, v, attn_mask)

    assert [c.line for c in adapt(torchs).contradictions] == ["empty_rows: nan"]
    assert check_attention(torchs, empty_rows="nan").passed


def test_a_fixed_argument_must_be_a_parameter() -> None:
    with pytest.raises(ValueError, match="fixed: 'foo' is no parameter"):
        adapt(attend, declared={"fixed": {"foo": 1}})


@pytest.mark.parametrize("required", [True, False])
def test_slopes_are_those_of_alibi(required: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, causal: bool = False) -> Tensor:
        distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
        s = q.double() @ k.double().mT / q.shape[-1] ** 0.5 - slopes.double().view(-1, 1, 1) * distance.abs()
        s = s.masked_fill(distance < 0, -torch.inf) if causal else s
        p = torch.softmax(s, -1).nan_to_num()
        return (p @ v.double()).to(q.dtype)

    def optional(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None = None, causal: bool = False) -> Tensor:
        return attend(q, k, v, torch.zeros(q.shape[1]) if slopes is None else slopes, causal)

    report = check_attention(attend if required else optional, laws=["ATN101", "ATN404", "variants"])
    assert report.passed, str(report)
    passed = {r.code for r in report.results if r.outcome == "passed"}
    assert passed >= {"ATN101", "ATN404"}
    assert any("alibi" in str(r.problem) for r in report.results if r.outcome == "passed")
