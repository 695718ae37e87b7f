"""Attention implementations that come with attn-spec: to learn from, and to judge by their short names."""

from __future__ import annotations

# name -> "module:attribute"; `pytest --attn-impl=NAME` takes each
BUILTINS: dict[str, str] = {
    "flash-attn": "attn_spec.reference.fused.flash_attn:flash_attn_func",
    "flex": "attn_spec.reference.fused.flex:flex",
    "flex-compiled": "attn_spec.reference.fused.flex:flex_compiled",
    "multihead": "attn_spec.reference.scratch.multi_head:MultiHeadAttention",
    "naive": "attn_spec.reference.scratch.naive:naive",
    "sdpa": "torch.nn.functional:scaled_dot_product_attention",
    "sdpa-flash": "attn_spec.reference.fused.sdpa:sdpa_flash",
    "sdpa-math": "attn_spec.reference.fused.sdpa:sdpa_math",
    "tiled": "attn_spec.reference.fused.tiled:tiled",
    "triton": "attn_spec.reference.fused.triton:triton_attention",
    "variants": "attn_spec.reference.scratch.variants:variants",
}
