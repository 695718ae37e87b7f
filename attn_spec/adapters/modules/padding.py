"""Key paddings of modules: as a mask or as lengths, and whether what they do can be judged."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.forward import LENGTHS
from attn_spec.conventions import Finding
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.masks import Delivery, KeyPadding
from attn_spec.problem import Problem

PADDED = Problem(
    batch=5, heads=4, kv_heads=4, q_len=3, kv_len=3, head_dim=8, v_dim=8, values="mild",
    mask=(KeyPadding((3, 2, 1, 3, 2)),), delivery=Delivery("key-padding"),
)  # fmt: skip


def lengths_of(mask: Tensor) -> Tensor:
    """How many keys of each sample a key padding [B, Sk] lets through; Unsupported where they are not the first."""
    lengths = mask.sum(-1)
    if not bool((mask == (torch.arange(mask.shape[-1], device=mask.device) < lengths[:, None])).all()):
        raise Unsupported("it takes lengths, so padding at the end alone")
    return lengths


def settle_padding(implementation: Implementation, effect_of: Callable[[Implementation], str]) -> None:
    """Find out whether a key padding or lengths can be judged, and as numbers of which kind they go in.

    What runs is judged, whatever it hides, but for lengths that empty the rows of padding too.
    effect_of: "right", "inverted", "other", "raises" or "own rows", as the adapter finds it out.
    """
    from attn_spec.adapters.modules.adapter import ModuleAdapter

    adapter = implementation.adapter
    assert isinstance(adapter, ModuleAdapter)
    assert adapter.module is not None
    facts = adapter.module.facts
    name = adapter.signature.roles["key_padding"]
    effect = effect_of(implementation)
    if effect == "raises":
        for adapter.padding_dtype in (torch.long, torch.float32) if name not in LENGTHS else ():
            effect = effect_of(implementation)
            if effect != "raises":
                facts.append(("padding", Finding(str(adapter.padding_dtype)[6:], "measured", "of bools it raises")))
                break
        else:
            adapter.padding_dtype = torch.bool
    if effect == "raises" and name in LENGTHS:
        adapter.no_padding = f"{name}: one number for each sample is not taken"
    elif name in LENGTHS and (effect == "own rows" or _empties_padding(implementation)):
        adapter.no_padding = f"{name} empties the rows of padding too"
    if adapter.no_padding:
        facts.append(("padding", Finding("not judged", "measured", adapter.no_padding)))


def _empties_padding(implementation: Implementation) -> bool:
    """Whether the output of a whole module is zero in all rows of padding, and in those alone."""
    from attn_spec.adapters.modules.hidden import hidden_call

    problem = implementation.fit(PADDED)
    try:
        call = hidden_call(implementation, problem)
        empty = (call.run()[0] == 0).all(-1)
        return call.context is None and torch.equal(empty, call.hidden_tokens(problem))
    except (Unsupported, Refused, Violation):
        return False
