"""Projections that are more than one matrix (adapters, normalised weights), as the one matrix that they come to.

What stands in the place of a projection's result must stand in the place of all of it. In eval mode a Linear with a
low-rank update, or whose weight is worked out from other parameters, is affine: what it gives tells its matrix.
"""

from __future__ import annotations

import copy
import re

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules.projections import ROLE_OF

WRAPPED = ("base_layer", "original_layer", "base")  # the Linear inside an adapter, by its usual names


def merge(module: nn.Module) -> list[str]:
    """Put a plain Linear in the place of each such projection, in place; the names of those that were replaced."""
    found = [
        name
        for name, child in module.named_modules()
        if ROLE_OF.get(name.rpartition(".")[2].lower()) and _is_more(child)
    ]
    replaced = []
    for name in found:
        plain = _as_linear(module.get_submodule(name))
        if plain is not None:
            place, _, own = name.rpartition(".")
            setattr(module.get_submodule(place), own, plain)
            replaced.append(name)
    _untie_output(module)
    return replaced


def _is_more(child: nn.Module) -> bool:
    names = {name for name, _ in child.named_parameters()}
    if isinstance(child, nn.Linear):
        return not names <= {"weight", "bias"}
    inside = [getattr(child, name, None) for name in WRAPPED]
    return any(isinstance(x, nn.Linear) for x in inside) or any(re.search(r"\blora_", name) for name in names)


@torch.no_grad()
def _as_linear(child: nn.Module) -> nn.Linear | None:
    """The Linear that a module is in eval mode; None where it is none."""
    linears = [x for x in child.modules() if isinstance(x, nn.Linear)]
    first = next(child.parameters(), None)
    if not linears or first is None or not first.is_floating_point():
        return None
    inside = next((x for x in (getattr(child, name, None) for name in WRAPPED) if isinstance(x, nn.Linear)), linears[0])
    try:
        exact = copy.deepcopy(child).double().eval()
    except RuntimeError:  # nn.utils.weight_norm keeps a weight that can't be copied
        exact = child.eval()
    width, dtype = inside.in_features, next(exact.parameters()).dtype
    near = 1e-9 if dtype == torch.float64 else 1e-4
    try:
        bias: Tensor = exact(torch.zeros(1, width, dtype=dtype))[0]
        weight: Tensor = exact(torch.eye(width, dtype=dtype)) - bias  # [in, out]
        x = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
        if not torch.allclose(exact(x), x @ weight + bias, rtol=near, atol=near):
            return None
    except Exception:  # the user's own: it is judged as it stands
        return None
    made = nn.Linear(width, len(bias), dtype=first.dtype)
    made.weight.copy_(weight.mT)
    made.bias.copy_(bias)
    return made


def _untie_output(module: nn.Module) -> None:
    """Give an output projection that shares its weight with another one of its own, so that they are told apart."""
    owners: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(p), []).append(name)
    for names in owners.values():
        for name in names if len(names) > 1 else ():
            place, _, own = name.rpartition(".")
            owner = module.get_submodule(place)
            if own == "weight" and ROLE_OF.get(place.rpartition(".")[2].lower()) == "o":
                setattr(owner, own, nn.Parameter(getattr(owner, own).detach().clone()))
