"""Functions of Hugging Face's attention interface: told by their names, called with a module that stands in."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import TargetError, check_attention
from attn_spec.adapters import hf_interface
from attn_spec.adapters.hf_interface import declared_conventions, from_interface, is_interface


def eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Adds its mask, and returns its weights."""
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)  # type: ignore[arg-type]
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)  # type: ignore[arg-type]
    logits = query @ key.mT * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    attn_weights = F.softmax(logits, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = F.dropout(attn_weights, p=dropout, training=module.training)
    return (attn_weights @ value).transpose(1, 2).contiguous(), attn_weights


def fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hands all on to torch; a mask holds causality, and a single query sees every key."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal) and query.shape[2] > 1 and attention_mask is None
    groups = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal, scale=scaling, enable_gqa=groups
    )
    return out.transpose(1, 2).contiguous(), None


def by_module(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> Any:
    return fused(module, query, key, value, attention_mask, scaling=scaling, is_causal=module.is_causal)


def tiled_groups(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    key, value = (x.repeat(1, module.num_key_value_groups, 1, 1) for x in (key, value))
    logits = query @ key.mT * scaling
    attn_weights = (logits if attention_mask is None else logits + attention_mask).softmax(-1)
    return (attn_weights @ value).transpose(1, 2), attn_weights


def with_sinks(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Any:
    return query.transpose(1, 2) * module.sinks, None


def strict_dtype(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **_: Any) -> Any:
    return ((query @ key.mT + attention_mask).softmax(-1) @ value).transpose(1, 2), None


def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q


def drawn(heads: int = 4, kv_heads: int = 2, q_len: int = 5, kv_len: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    sizes = ((heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    q, k, v = (torch.randn(2, h, s, 8, generator=g) for h, s in sizes)
    return q, k, v


@pytest.mark.parametrize("f", [eager, fused, by_module, tiled_groups, with_sinks])
def test_it_is_told_by_its_parameters(f: Any) -> None:
    assert is_interface(f)


@pytest.mark.parametrize("f", [function, F.scaled_dot_product_attention, nn.Linear, 3, from_interface(eager)])
def test_nothing_else_is_taken_for_one(f: Any) -> None:
    assert not is_interface(f)
    with pytest.raises(TargetError, match="is not of Hugging Face's attention interface"):
        from_interface(f)


@pytest.mark.parametrize(
    ("f", "parameters"),
    [
        (eager, "query, key, value, attention_mask=None, scaling=None, dropout=0.0, *, output_attentions=False"),
        (fused, "query, key, value, attention_mask=None, scaling=None, is_causal=False, dropout=0.0"),
        (by_module, "query, key, value, attention_mask=None, scaling=None, is_causal=False"),
        (with_sinks, "query, key, value, attention_mask=None, scaling=None"),
    ],
)
def test_its_parameters(f: Any, parameters: str) -> None:
    made = from_interface(f)
    assert str(inspect.signature(made)) == f"({parameters})"
    assert (made.of_interface, made.__name__) == (f, f.__name__)  # type: ignore[attr-defined]


def test_its_conventions() -> None:
    shared = {"layout": "BHSD", "layout_out": "BSHD", "polarity": "attend", "grouping": "contiguous"}
    assert declared_conventions(eager) == {**shared, "causal": "never", "mask_form": "additive"}
    assert declared_conventions(fused) == {**shared, "causal": "flag"}
    assert declared_conventions(by_module) == {**shared, "causal": "flag"}


@pytest.mark.parametrize("f", [eager, fused, by_module])
def test_a_right_one_passes(f: Any) -> None:
    report = check_attention(from_interface(f), **declared_conventions(f))
    assert report.passed, str(report)
    assert report.counts["passed"] > 150


def test_a_wrong_one_is_named() -> None:
    report = check_attention(from_interface(tiled_groups), **declared_conventions(tiled_groups))
    assert not report.passed
    assert "measured: tiled" in str(report)


def test_the_module_has_the_attributes_of_one_that_calls() -> None:
    seen: list[Any] = []

    def f(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **named: Any
    ) -> Any:
        seen.append((module, scaling, named, attention_mask))
        return query.transpose(1, 2), None

    q, k, v = drawn()
    from_interface(f, layer_idx=3)(q, k, v, torch.ones(5, 7))
    module, scaling, named, mask = seen[0]
    assert (module.num_key_value_groups, module.head_dim, module.layer_idx) == (2, 8, 3)
    assert (module.training, module.is_causal, hasattr(module, "sinks")) == (False, False, False)
    assert scaling == 8**-0.5
    assert named == {"dropout": 0.0}
    assert mask.shape == (1, 1, 5, 7)


def test_an_attribute_that_is_missing_is_asked_for() -> None:
    q, k, v = drawn()
    with pytest.raises(
        TargetError, match=r"reads sinks of its module; give it: from_interface\(with_sinks, sinks=...\)"
    ):
        from_interface(with_sinks)(q, k, v)
    out, _ = from_interface(with_sinks, sinks=2.0)(q, k, v)
    assert torch.equal(out, 2 * q.transpose(1, 2))


def test_what_the_interface_does_not_promise_is_refused() -> None:
    q, k, v = drawn()
    with pytest.raises(NotImplementedError, match="the mask holds causality"):
        from_interface(fused)(q, k, v, torch.ones(5, 7, dtype=torch.bool), is_causal=True)
    with pytest.raises(NotImplementedError, match="it is the last, and sees every key"):
        from_interface(fused)(q[:, :, :1], k, v, is_causal=True)
    half = [x.bfloat16() for x in drawn(heads=2)]
    with pytest.raises(NotImplementedError, match=r"a mask of torch.float32 for inputs of torch.bfloat16"):
        from_interface(strict_dtype)(*half, torch.zeros(5, 7))
    with pytest.raises(RuntimeError, match="must match the size"):
        from_interface(strict_dtype)(*half, torch.zeros(5, 6, dtype=torch.bfloat16))


@pytest.mark.parametrize("f", [eager, fused, by_module])
def test_a_reproducer_calls_it_without_attn_spec(f: Any) -> None:
    source = hf_interface.import_source("impl = given", f)
    assert "attn_spec" not in source
    names: dict[str, Any] = {"torch": torch, "given": f}
    exec(source, names)
    q, k, v = drawn()
    mask = torch.zeros(5, 7)
    for more in ({}, {"scaling": 0.3}, {"attention_mask": mask}, *([{"is_causal": True}] if f is not eager else [])):
        assert torch.equal(names["impl"](q, k, v, **more)[0], from_interface(f)(q, k, v, **more)[0])
