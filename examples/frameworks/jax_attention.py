"""jax.nn.dot_product_attention: `pytest --attn-config=examples/frameworks/attn.yaml --attn-impl=jax`."""

import jax
import torch

from attn_spec.adapters.bridge import bridged

jax.config.update("jax_enable_x64", True)  # float64 is float32 in jax otherwise

static = ("is_causal", "local_window_size", "implementation", "return_residual")
attention = jax.jit(jax.nn.dot_product_attention, static_argnames=static)
attention = bridged(attention, jax.dlpack.from_dlpack, torch.utils.dlpack.from_dlpack)
