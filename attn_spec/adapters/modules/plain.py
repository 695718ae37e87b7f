"""A module without projections is a function of q, k and v: ScaledDotProductAttention(dropout)(q, k, v, mask)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from attn_spec.adapters.modules.construct import Constructor, Sizes
from attn_spec.adapters.modules.forward import tensor_role
from attn_spec.adapters.signature import TargetError

WRITTEN = (bool, int, float, str, type(None))  # arguments of a constructor that a line of source can hold


class _Kept(Constructor):
    """A constructor that keeps what it was last called with."""

    values: dict[str, Any]

    def _call(self, values: dict[str, Any], sizes: Sizes, asked: dict[str, str]) -> nn.Module:
        object.__setattr__(self, "values", dict(values))
        return super()._call(values, sizes, asked)


class PlainModule:
    """Calls a module of the channels of q on q, k and v; `source` binds it to `impl` where `impl` is the module's name.

    Raises TargetError where the constructor needs what names can't give.
    """

    def __init__(self, target: Any, name: str, declared: Mapping[str, Any]) -> None:
        self.__name__, self.target = name, target
        self.instance = target if isinstance(target, nn.Module) else None
        self.constructor = None
        if self.instance is None:
            self.constructor = _Kept(target, name, dict(declared.get("construct") or {}))
        self.made = functools.cache(self._made)
        self.__signature__ = inspect.signature(self.made(8).forward)

    def __call__(self, q: Any, *args: Any, **kwargs: Any) -> Any:
        return self.made(q.shape[-1])(q, *args, **kwargs)

    def _made(self, channels: int) -> nn.Module:
        if self.constructor is None:
            assert self.instance is not None
            return self.instance.eval()
        return self.constructor.build(Sizes(1, 1, channels, channels, reading=1)).eval()

    def source(self) -> str:
        """Lines of Python; "" where an argument of the constructor can't be written."""
        if self.constructor is None:
            return ""
        given = []
        for channels in (8, 16):
            self._made(channels)
            given.append(self.constructor.values)
        if any(not isinstance(x, WRITTEN) for x in given[0].values()):
            return ""
        fixed = given[0] == given[1]
        words = {n: repr(x) if x == given[1][n] else "q.shape[-1]" for n, x in given[0].items()}
        call = f"({', '.join(f'{n}={x}' for n, x in words.items())}).eval()"
        if fixed:
            return f"impl = impl{call}"
        return f"made = impl\n\n\ndef impl(q, *args, **kwargs):\n    return made{call}(q, *args, **kwargs)"


def as_function(target: Any, name: str, declared: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A module whose forward takes q, k and v first and that has no weights, as a function of them; else None."""
    kind: Any = target if isinstance(target, type) else type(target)
    if declared.get("projections") is not None or declared.get("input"):
        return None
    try:
        names = [n for n in inspect.signature(kind.forward).parameters if n != "self"][:3]
    except (TypeError, ValueError):
        return None
    if [tensor_role(n) for n in names] != ["q", "k", "v"]:
        return None
    try:
        made = PlainModule(target, name, declared)
    except TargetError:  # what reads it as a module says what is missing
        return None
    module = made.made(8)
    if any(p.dim() > 1 for p in module.parameters()) or any(
        isinstance(m, nn.MultiheadAttention) for m in module.modules()
    ):
        return None
    return made
