"""Trial calls of a module, from which it is told what it takes and does, and notes of what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attn_spec.adapters.modules import layouts
from attn_spec.conventions import Finding

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

BATCH, LENGTH = 3, 5


def note(f: ModuleFunction, name: str, value: str, how: Any, evidence: str) -> None:
    f.facts.append((name, Finding(value, how, evidence)))


def hidden_width(f: ModuleFunction) -> int:
    return f.widths(f.module, f.sizes)[0]


def hidden_states(f: ModuleFunction) -> Tensor:
    """What trials are made on [B, S, width], the same each time."""
    return torch.randn(BATCH, LENGTH, hidden_width(f), generator=torch.Generator().manual_seed(2))


def run_whole(f: ModuleFunction, x: Tensor, named: dict[str, Any] | None = None) -> Tensor:
    """One run of the first module on hidden states as they are, no gradient, in eval mode; named: what is asked for."""
    module = f.built(f.sizes, torch.float32)
    channels_first = f.input in layouts.CHANNELS_FIRST
    inputs: dict[str, Tensor] = dict.fromkeys(f.forward.inputs, x)
    if f.forward.context_required:
        inputs[f.forward.context] = torch.randn(*x.shape[:-1], f.widths(module, f.sizes)[1])
    if f.forward.separate:
        width = f.widths(module, f.sizes)[1]
        y = x if width == x.shape[-1] else torch.randn(*x.shape[:-1], width, generator=torch.Generator().manual_seed(1))
        inputs = dict(zip(f.forward.inputs, (x, y, y), strict=True))
    inputs = {name: layouts.laid(y, f.input) if channels_first else y for name, y in inputs.items()}
    with torch.no_grad():
        tensors = f.tensors(f._call(module, f.sizes, inputs, dict(named or {}), x))
    return layouts.unlaid(tensors[0], f.input) if channels_first else tensors[0]


def runs(f: ModuleFunction) -> bool:
    try:
        run_whole(f, hidden_states(f))
    except Exception:  # of the user's own
        return False
    return True
