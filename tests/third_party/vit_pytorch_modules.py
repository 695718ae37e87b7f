"""Attention modules of vit-pytorch, loaded from their files: the package's own `__init__` needs torchvision."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def _loaded(name: str) -> ModuleType:
    package = importlib.util.find_spec("vit_pytorch")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("vit_pytorch is not installed")
    spec = importlib.util.spec_from_file_location(f"vit_pytorch_{name}", Path(package.origin).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ViTAttention = _loaded("vit").Attention
SimpleFlashAttention = _loaded("simple_flash_attn_vit").Attention
