"""A gate on the heads' outputs before the output projection: o * sigmoid(x W_g + b_g).

Between the projections it is held open, so that attention is judged as it is; the oracle of the whole module has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attn_spec.adapters.modules.inject import OPEN
from attn_spec.conventions import Finding

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction


def settle(f: ModuleFunction) -> None:
    """Find out whether what has the name of a gate is a sigmoid on each head's output; if not, it counts as none.

    Held shut it has to give nothing whatever q, k and v are, and open something else: what attention gives is judged.
    """
    gate = f.projections.gate
    if gate is None:
        return
    s, g = f.sizes, torch.Generator().manual_seed(37)
    q = torch.randn(2, s.heads, 5, s.head_dim, generator=g)
    k, v = (torch.randn(2, s.kv_heads, 5, n, generator=g) for n in (s.head_dim, s.v_dim))
    try:
        with torch.no_grad():
            shut, ajar, half = (_under(f, logits, q, k, v) for logits in (-OPEN, OPEN, 0.0))
        halved = bool(((2 * half - ajar).abs() <= 1e-5 * ajar.abs().max()).all())
        found = bool((shut.abs() < 1e-20).all()) and bool(ajar.abs().max() > 1e-3) and halved
    except Exception:  # the user's own: the laws report it
        found = False
    if not found:
        f.gated = False
        f.projections = f._projections(f.module)
        return
    f.facts.append(
        ("gate", Finding(gate.name, "measured", "a sigmoid on the heads' outputs: held open for q, k and v"))
    )


def _under(f: ModuleFunction, logits: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    f.gate = logits
    try:
        out: torch.Tensor = f.core(q, k, v, {})[0]
        return out
    finally:
        f.gate = OPEN
