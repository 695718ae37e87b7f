"""Functions of other frameworks as functions of torch tensors: jax, keras, MLX, ONNX Runtime, NumPy.

    import jax.dlpack, jax.nn, torch.utils.dlpack
    from attn_spec.adapters.bridge import bridged

    attention = bridged(jax.nn.dot_product_attention, jax.dlpack.from_dlpack, torch.utils.dlpack.from_dlpack)

and `pytest --attn-impl=path/file.py:attention` judges it, with the names, layout and flags of the original.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def bridged(
    function: Callable[..., Any], to: Callable[[Tensor], Any], back: Callable[[Any], Tensor]
) -> Callable[..., Any]:
    """A function of torch tensors that calls one of another framework's arrays.

    to: one of its arrays from a torch tensor, which is contiguous, on the CPU and carries no gradient.  back: a torch
    tensor from one of its arrays; what is no array is handed on.  The result carries no gradient, so gradients are not
    judged. Whatever `function`, `to` or `back` raise gets through: it is a refusal of that dtype or shape.
    """

    def over(value: Any) -> Any:
        return to(value.detach().contiguous()) if isinstance(value, Tensor) else value

    def home(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(home, value)) if type(value) in (tuple, list) else tuple(map(home, value))
        if isinstance(value, Mapping):
            return {key: home(one) for key, one in value.items()}
        return back(value) if hasattr(value, "shape") and not isinstance(value, Tensor) else value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return home(function(*map(over, args), **{name: over(value) for name, value in kwargs.items()}))

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call
