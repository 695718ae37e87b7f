"""Modules that can't be looked into as they are, and what to hand over in their place."""

from __future__ import annotations

import torch
from torch import nn

from attn_spec.adapters.signature import TargetError

WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}


def require_usable(module: nn.Module, name: str) -> None:
    """Raise TargetError for a module whose inside can't be seen, or whose parameters hold no numbers."""
    kind = type(module).__name__
    if kind in WRAPPERS and hasattr(module, WRAPPERS[kind]):
        also = "; whether it can be compiled is judged too" if kind == "OptimizedModule" else ""
        raise TargetError(f"{name}: wraps a module ({kind}): name its `.{WRAPPERS[kind]}` instead{also}")
    if isinstance(module, torch.jit.ScriptModule):
        raise TargetError(f"{name}: is TorchScript, whose inside can't be seen: give the module that was scripted")
    for called, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TargetError(
                f"{name}: {called} is lazy and has no shape yet: give an instance that was called once, or a class "
                f"whose constructor is told the width of its input"
            )
        if parameter.is_meta:
            raise TargetError(
                f"{name}: {called} is on the meta device and holds no numbers: give a module that was built on the "
                f"CPU, or filled in after `to_empty`"
            )
