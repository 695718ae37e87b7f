"""Triton's interpreter, which runs kernels on a CPU: how it is turned on, and what it lacks where there is no GPU.

`@triton.jit` and triton's own library read TRITON_INTERPRET when they are imported, so it has to stand in the
environment before that; processes that are started later inherit it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

VARIABLE = "TRITON_INTERPRET"


class InterpreterError(ValueError):
    """The interpreter can't be turned on, and why."""


def interpreted() -> bool:
    """Whether kernels run under the interpreter in this process and in those that it starts."""
    return os.environ.get(VARIABLE) == "1"


def turn_on() -> None:
    """Let kernels run under the interpreter from here on. Raises InterpreterError where that can't be."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("numpy") is None:
        raise InterpreterError("the interpreter needs triton and numpy: pip install 'attn-spec[triton]'")
    if "triton" in sys.modules and not interpreted():
        raise InterpreterError(
            f"triton is imported already, and would compile its kernels; set {VARIABLE}=1 before pytest starts"
        )
    os.environ[VARIABLE] = "1"


@lru_cache
def prepare(backend: str = "cuda", arch: int | str = 80, warp: int = 32) -> None:
    """Give kernels what they ask for where there is no GPU: a driver that names a target, and no tuning by time.

    Raises ImportError where triton is not installed.
    """
    import torch

    _tune_nothing()
    if not torch.cuda.is_available():
        _stand_in(backend, arch, warp)


def _stand_in(backend: str, arch: int | str, warp: int) -> None:
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class Interpreted(DriverBase):  # type: ignore[misc]
        """A driver that is asked for its target, and never launches anything."""

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget(backend, arch, warp)

        def get_active_torch_device(self) -> Any:
            return torch.device("cpu")

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Any:
            return lambda call, **_: call()

    driver.set_active(Interpreted())


@lru_cache(maxsize=1)
def _tune_nothing() -> None:
    """Take the first configuration of every kernel: under the interpreter there is nothing to choose by time.

    Keys that name no argument of the kernel are left out; flash-attn 2.8 has such, and triton 3.9 refuses them.
    """
    import triton

    tuned = triton.autotune

    def autotune(configs: list[Any], key: list[str], **others: Any) -> Callable[[Any], Any]:
        def decorate(kernel: Any) -> Any:
            names = [name for name in key if name in kernel.arg_names]
            return tuned(configs[:1], names, **others)(kernel)

        return decorate

    triton.autotune = autotune
