"""A learned temperature: the number, one for each head or for all, that multiplies q.k of normalised q and k.

It is taken for one only where the logits are q.k times a known function of a parameter, whatever the parameter holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules import between, bias
from attn_spec.conventions import Finding

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

NAMED = re.compile(r"scale|temp|tau|logit|gamma|beta", re.IGNORECASE)
# what a parameter is made to a factor by; log 100 is where Swin v2 and CLIP end
WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp(min(p, log 100))": lambda p: p.clamp(max=math.log(100.0)).exp(),
    "exp(p)": torch.exp,
    "p": lambda p: p,
    "1 / p": torch.reciprocal,
    "softplus(p)": nn.functional.softplus,
}


@dataclass(frozen=True)
class Temperature:
    """Which parameter it is, and what is made of it."""

    name: str
    way: str

    def of(self, module: nn.Module) -> Tensor:
        """The factors [H] or [1], in the dtype of the parameter."""
        return WAYS[self.way](module.get_parameter(self.name).detach()).flatten()


def settle(f: ModuleFunction) -> None:
    """Find out whether the logits are the product of q and k as they arrive, times a learned temperature."""
    module = f.built(f.sizes, torch.float32)
    for name, p in module.named_parameters():
        if p.numel() not in (1, f.sizes.heads) or not NAMED.search(name):
            continue
        kept = p.detach().clone()
        g = torch.Generator().manual_seed(41)
        try:
            with torch.no_grad():
                p.copy_(kept * 0.6 + 0.2 * torch.rand(p.shape, generator=g))  # so that each head has its own
            factors = _factors(f)
            if factors is None:
                continue
            for way in WAYS:
                told = Temperature(name, way).of(module).double()
                if bool(((factors - told).abs() < 1e-3 * told.abs()).all()):
                    f.temperature = Temperature(name, way)
                    evidence = f"the logits are q.k times {way} of {name}, whatever it holds"
                    f.facts.append(("temperature", Finding(name, "measured", evidence)))
                    return
        except Exception:  # the user's own: the laws report it
            continue
        finally:
            with torch.no_grad():
                p.copy_(kept)


def _factors(f: ModuleFunction) -> Tensor | None:
    """By what each head multiplies q.k [H], float64; None where its logits are more than that."""
    s, g, n = f.sizes, torch.Generator().manual_seed(43), bias.LENGTH
    q = torch.randn(2, s.heads, n, s.head_dim, generator=g)
    k = torch.randn(2, s.kv_heads, n, s.head_dim, generator=g)
    arrive = between.arrived(f, q, k, torch.randn(2, s.kv_heads, n, s.v_dim, generator=g))
    with torch.no_grad():
        weights = bias.weights_of(f, q, k, {})
    if arrive is None or weights is None:
        return None
    group = s.heads // s.kv_heads
    product = arrive[0].double() @ arrive[1].double().repeat_interleave(group, 1).mT
    seen = torch.ones(n, n, dtype=torch.bool).tril() & (weights > 0).all(0).all(0)
    rows = [i for i in range(n) if bool(seen[i, : i + 1].all()) and i]
    logits = torch.cat([(weights[..., i, : i + 1].log() - weights[..., i, :1].log())[..., 1:] for i in rows], -1)
    differences = torch.cat([(product[..., i, : i + 1] - product[..., i, :1])[..., 1:] for i in rows], -1)
    factors = (logits * differences).sum((0, 2)) / differences.square().sum((0, 2))
    left = logits - factors[:, None] * differences
    return factors if bool((left.abs() < 1e-3 * logits.abs().amax()).all()) else None
