"""Weights that a module keeps in an attribute after a call, for those who want to look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction


def kept_weights(f: ModuleFunction) -> str:
    """The name of the attribute that holds the weights of the last call [..., S, S]; "" where none does."""
    from attn_spec.adapters.modules.trials import BATCH, LENGTH, run_whole

    try:
        run_whole(f, torch.randn(BATCH, LENGTH, f.widths(f.module, f.sizes)[0]))
    except Exception:  # the user's own: the laws report it
        return ""
    for owner in f.built(f.sizes, torch.float32).modules():
        for name, value in vars(owner).items():
            if isinstance(value, Tensor) and _are_weights(value, LENGTH):
                return name
    return ""


def _are_weights(x: Tensor, length: int) -> bool:
    if x.dim() < 3 or x.shape[-1] != length:
        return False
    return bool(((x.double().sum(-1) - 1).abs() < 1e-4).all() and (x >= 0).all())
