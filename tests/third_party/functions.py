"""Attention functions of released packages, as functions of q, k and v; each package is imported when it is called.

What is no function of q, k and v as it comes (an nn.Module without projections, a backend that is chosen by name) is
called here with its own names; nothing else is changed.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    """x-transformers, without flash."""
    from x_transformers.attend import Attend

    return Attend()(q, k, v, mask=mask, attn_bias=attn_bias, causal=causal)[0]


def attend_flash(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    """x-transformers, with flash, causal by the call."""
    from x_transformers.attend import Attend

    return Attend(heads=q.shape[1], flash=True)(q, k, v, mask=mask, attn_bias=attn_bias, causal=causal)[0]


def attend_flash_built(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, attn_bias: Tensor | None = None, causal: bool = False
) -> Tensor:
    """x-transformers, with flash, causal by the constructor."""
    from x_transformers.attend import Attend

    return Attend(heads=q.shape[1], flash=True, causal=causal)(q, k, v, mask=mask, attn_bias=attn_bias)[0]


def attend_l2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """x-transformers, of distances, on keys of one length: -|q - k|^2 is then 2 q.k and what every key has."""
    return _by_distance(q, k, v, flash=False)


def attend_l2_flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same with flash."""
    return _by_distance(q, k, v, flash=True)


def _by_distance(q: Tensor, k: Tensor, v: Tensor, flash: bool) -> Tensor:
    from x_transformers.attend import Attend

    dtype, width = q.dtype, q.shape[-1]
    q, k, v = q.double(), k.double(), v.double()  # the squares are far larger than what they differ by
    lengths = k.square().sum(-1, keepdim=True)
    k = torch.cat((k, (lengths.amax() + 1 - lengths).sqrt()), dim=-1)
    q = torch.cat((q, torch.zeros_like(q[..., :1])), dim=-1) * ((width + 1) / width) ** 0.5 / 2
    return Attend(heads=q.shape[1], flash=flash, l2_distance=True)(q, k, v)[0].to(dtype)


def aten_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The operator behind SDPA on a CPU; with no queries, keys or samples it ends the process (SIGFPE)."""
    if not query.numel() or not key.numel():
        raise NotImplementedError("empty tensors end the process")
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]


def local(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """local-attention over buckets that are wide enough for all keys of a short sequence; mask: [B, Sk]."""
    from local_attention import LocalAttention

    if q.shape != k.shape:
        raise NotImplementedError("self-attention only, without groups")
    return LocalAttention(window_size=16, autopad=True)(q, k, v, mask=mask)


def local_causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The same, causal."""
    from local_attention import LocalAttention

    if q.shape != k.shape:
        raise NotImplementedError("self-attention only, without groups")
    return LocalAttention(window_size=max(16, q.shape[2]), causal=True, autopad=True)(q, k, v, mask=mask)


def ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """ring-attention-pytorch, plain, on one process; mask: [B, Sk]."""
    from ring_attention_pytorch.ring_attention import default_attention

    return default_attention(q, k, v, mask, causal)


def ring_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """ring-attention-pytorch, in buckets of four keys, on one process; mask: [B, Sk]."""
    from ring_attention_pytorch import ring_flash_attn

    return ring_flash_attn(q, k, v, mask, causal, 4)


def diffusers_native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """diffusers, the backend of torch's SDPA."""
    return _dispatched("native", query, key, value, attn_mask, is_causal, scale, enable_gqa)


def diffusers_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """diffusers, the backend of torch's flex_attention."""
    return _dispatched("flex", query, key, value, attn_mask, is_causal, scale, enable_gqa)


def diffusers_flex_padding(query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
    """The same with a mask [B, Sk], which the dispatch takes as attn_mask."""
    return _dispatched("flex", query, key, value, key_padding_mask, False, None, query.shape[2] != key.shape[2])


def _dispatched(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    name = AttentionBackendName(backend)
    return dispatch_attention_fn(q, k, v, mask, 0.0, is_causal, scale, enable_gqa, backend=name)


def memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """memory-efficient-attention, in its own sizes of chunks."""
    from memory_efficient_attention import efficient_dot_product_attention_pt

    return efficient_dot_product_attention_pt(query, key, value, mask, bias)


def memory_efficient_chunks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """memory-efficient-attention, in chunks of four."""
    from memory_efficient_attention import efficient_dot_product_attention_pt

    return efficient_dot_product_attention_pt(query, key, value, mask, bias, query_chunk_size=4, key_chunk_size=4)


def _without_extension() -> None:
    """Let flash-attn be imported without its CUDA extension, which nothing here calls."""
    sys.modules.setdefault("flash_attn_2_cuda", ModuleType("flash_attn_2_cuda"))


def flash_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """flash-attn's own reference for its tests."""
    _without_extension()
    from flash_attn.utils.testing import attention_ref

    return attention_ref(
        q,
        k,
        v,
        key_padding_mask=key_padding_mask,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        learnable_sink=learnable_sink,
    )[0]


def flash_self(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """flash-attn's SelfAttention, of qkv [B, S, 3, H, D]."""
    _without_extension()
    from flash_attn.modules.mha import SelfAttention

    if q.shape != k.shape or k.shape != v.shape:
        raise NotImplementedError("q, k and v are one tensor")
    packed = torch.stack((q, k, v), dim=2)
    return SelfAttention(softmax_scale=softmax_scale)(packed, causal=causal, key_padding_mask=key_padding_mask)


def flash_cross(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:
    """flash-attn's CrossAttention, of q and kv [B, Sk, 2, H, D]."""
    _without_extension()
    from flash_attn.modules.mha import CrossAttention

    if k.shape != v.shape:
        raise NotImplementedError("k and v are one tensor")
    packed = torch.stack((k, v), dim=2)
    return CrossAttention(softmax_scale=softmax_scale)(q, packed, causal=causal, key_padding_mask=key_padding_mask)


def fake_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """fake-flash-attention, which has flash-attn's names and imports, and so stands in a folder of its own."""
    return _fake_flash_attn().flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, alibi_slopes=alibi_slopes
    )


@lru_cache(maxsize=1)
def _fake_flash_attn() -> Any:
    path = Path(sys.prefix) / "fake" / "flash_attn" / "__init__.py"
    if not path.is_file():
        raise ModuleNotFoundError("fake-flash-attention is not installed; run.sh does so")
    spec = importlib.util.spec_from_file_location(
        "fake_flash_attn", path, submodule_search_locations=[str(path.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_flash_attn"] = module
    spec.loader.exec_module(module)
    return module
