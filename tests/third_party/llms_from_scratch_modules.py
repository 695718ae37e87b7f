"""Attention modules of llms-from-scratch with a cache; their files import a tokenizer that no attention needs."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

if importlib.util.find_spec("tiktoken") is None:
    for name in ("tiktoken", "tiktoken.load"):
        sys.modules[name] = ModuleType(name)
    sys.modules["tiktoken"].__path__ = []
    sys.modules["tiktoken.load"].load_tiktoken_bpe = None  # type: ignore[attr-defined]

from llms_from_scratch.kv_cache.llama3 import GroupedQueryAttention as Llama3Attention
from llms_from_scratch.kv_cache.qwen3 import GroupedQueryAttention as Qwen3Attention

__all__ = ["Llama3Attention", "Qwen3Attention"]
