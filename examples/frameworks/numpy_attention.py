"""An attention in numpy: `pytest --attn-config=examples/frameworks/attn.yaml --attn-impl=numpy`."""

import numpy as np
import torch

from attn_spec.adapters.bridge import bridged


def softmax_attention(q, k, v, mask=None, is_causal=False, scale=None):
    """q [B, H, Sq, D], k, v [B, H, Sk, D] -> [B, H, Sq, D], in float32 at least; mask: True = may be seen."""
    own, wide = q.dtype, np.promote_types(q.dtype, np.float32)
    q, k, v = q.astype(wide), k.astype(wide), v.astype(wide)
    logits = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        logits = np.where(np.tri(*logits.shape[-2:], dtype=bool), logits, -np.inf)
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True, initial=np.finfo(wide).min)
    weights = np.exp(logits - top)
    return (weights @ v / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)).astype(own)


attention = bridged(softmax_attention, torch.Tensor.numpy, torch.from_numpy)
