"""flash-attn's `flash_attn_func` under the name `flash-attn`: imported when it is first called for, not before.

On a GPU it is the package as installed (extra `flash`). On a CPU its AMD Triton backend runs under Triton's
interpreter, where the environment says so *before* anything imports triton:

    FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE TRITON_INTERPRET=1 pytest --attn-impl=flash-attn
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_spec.adapters.signature import TargetError
from attn_spec.interpreter import prepare


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q [B, Sq, H, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, D] -> [B, Sq, H, D]; causal is aligned to the bottom right.

    return_attn_probs: the log-sum-exp [B, H, Sq] comes too, and weights that are for its own tests.
    Raises TargetError, saying what is missing, where flash-attn can't be used.
    """
    return _installed()(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


@lru_cache(maxsize=1)
def _installed() -> Callable[..., Any]:
    if not torch.cuda.is_available():
        _interpret()
    try:
        module = importlib.import_module("flash_attn")
    except ImportError as error:
        raise TargetError(
            f"flash-attn: can't be imported ({error}); install it with `pip install attn-spec[flash]` on a machine with "
            f"CUDA, or without its extension as docs/flash-attn.md says"
        ) from None
    if not torch.cuda.is_available():
        _register_on_cpu()
    function: Callable[..., Any] = module.flash_attn_func
    return function


def _register_on_cpu() -> None:
    """flash-attn registers its operators for CUDA only; what they call runs under the interpreter just as well."""
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        operator = getattr(interface, name)
        operator.register_kernel("cpu")(operator._init_fn)


def _interpret() -> None:
    """Let flash-attn's Triton backend run on a CPU, under the interpreter. Raises TargetError where it can't."""
    wanted = {"FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE", "TRITON_INTERPRET": "1"}
    unset = [f"{name}={value}" for name, value in wanted.items() if os.environ.get(name, "").upper() != value]
    if unset:
        raise TargetError(
            f"flash-attn: there is no CUDA device; on a CPU it runs under Triton's interpreter when the environment has "
            f"{' '.join(unset)} before pytest starts"
        )
    try:
        prepare("hip", "gfx942", 64)
    except ImportError as error:
        raise TargetError(f"flash-attn: the interpreter needs triton ({error}); install attn-spec[triton]") from None
