"""keras.ops.dot_product_attention on the backend that KERAS_BACKEND names: `pytest ... --attn-impl=keras`."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch

from attn_spec.adapters.bridge import bridged


def to(x):
    """A tensor of the backend, to which float64 is float32."""
    if x.dtype == torch.float64:
        raise TypeError("float64 is not supported")
    return keras.ops.convert_to_tensor(x)


def back(x):
    """A tensor of torch."""
    return torch.utils.dlpack.from_dlpack(x)


attention = bridged(keras.ops.dot_product_attention, to, back)
