"""The attention inside a recording: the softmax or the call that holds one, and the tensors around it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec.capture import Call, Seen
from attn_spec.trace import axes
from attn_spec.trace.flow import Step

HIDDEN = -9e3  # what is below this before a softmax is hidden: -1e4 is the smallest fill that people use


@dataclass(eq=False)
class Core:
    """One attention as the code computes it; what was not seen is None.

    kind: "softmax" (the code's own), "sdpa" (F.scaled_dot_product_attention) or "fused" (a call that takes q, k and v
    and whose inside can't be seen).  call: the softmax, SDPA or fused call.
    q, k, v: the factors of the two products, as the code has them; `letters` says what each axis is, `canonical` turns
    them to [B, H, S, D].  logits: q k' before scaling; scaled; masked: what goes into the softmax; weights: what comes
    out of it; applied: what V is multiplied with; mixed: that product; mask: as it is applied, or as SDPA got it;
    merged: the heads side by side; output: after the output projection.
    causal: SDPA's flag.  scale: the factor on q k', wherever the code multiplies it in; None where it is no one number.
    before: the part of the scale that q and k hold already.  softmax_axis: its letter.  summed_axis: the letter of the
    axis of the weights that the product with V sums over.  projections: the products with parameters from which q, k
    and v come.  deferred: the weights are normalised after the product with V.
    """

    kind: Literal["softmax", "sdpa", "fused"]
    call: Call
    seen: dict[str, Seen] = field(default_factory=dict)
    letters: dict[str, str] = field(default_factory=dict)
    projections: dict[str, Seen] = field(default_factory=dict)
    causal: bool | None = None
    scale: float | None = None
    before: float = 1.0
    softmax_axis: str = ""
    summed_axis: str = ""
    steps_to_softmax: list[Step] = field(default_factory=list)
    steps_to_mix: list[Step] = field(default_factory=list)
    deferred: bool = False

    def tensor(self, name: str) -> Tensor | None:
        return self.seen[name].value if name in self.seen else None

    def canonical(self, name: str, batch: int | None = None) -> Tensor | None:
        """A tensor as [B, H, S, D], weights and logits as [B, H, Sq, Sk]; None where it or its axes were not seen."""
        x = self.tensor(name)
        return None if x is None else axes.canonical(x, self.letters.get(name, ""), batch)

    @property
    def q(self) -> Tensor | None:
        return self.tensor("q")

    @property
    def k(self) -> Tensor | None:
        return self.tensor("k")

    @property
    def v(self) -> Tensor | None:
        return self.tensor("v")

    @property
    def logits(self) -> Tensor | None:
        return self.tensor("logits")

    @property
    def scaled(self) -> Tensor | None:
        return self.tensor("scaled")

    @property
    def masked(self) -> Tensor | None:
        return self.tensor("masked")

    @property
    def weights(self) -> Tensor | None:
        return self.tensor("weights")

    @property
    def applied(self) -> Tensor | None:
        return self.tensor("applied")

    @property
    def mixed(self) -> Tensor | None:
        return self.tensor("mixed")

    @property
    def mask(self) -> Tensor | None:
        return self.tensor("mask")

    @property
    def merged(self) -> Tensor | None:
        return self.tensor("merged")

    @property
    def output(self) -> Tensor | None:
        return self.tensor("output")

    def hidden(self, batch: int | None = None) -> Tensor | None:
        """The keys that the code hides before the softmax, bool [B, H, Sq, Sk]; None where that can't be seen."""
        masked = self.canonical("masked", batch)
        if masked is not None:
            low = masked <= HIDDEN
            scaled = self.canonical("scaled", batch)
            if scaled is not None and scaled.shape == masked.shape:  # what is as low without a mask is not hidden
                low &= (scaled > HIDDEN) | (masked == -torch.inf)
            return low
        q, k = self.canonical("q"), self.canonical("k")
        if self.kind != "sdpa" or q is None or k is None:
            return None
        hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool, device=q.device)
        if (mask := self._mask_of_sdpa()) is not None:
            hidden = hidden | (~mask if mask.dtype == torch.bool else mask <= HIDDEN)
        if self.causal:
            hidden |= torch.ones(hidden.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return self._split(hidden, batch)

    def _mask_of_sdpa(self) -> Tensor | None:
        """The mask that SDPA got, for q as [N, 1, S, D] where samples and heads are one axis."""
        folded = self.mask is not None and self.mask.dim() == 3 and "N" in self.letters["q"]
        return self.mask[:, None] if folded and self.mask is not None else self.mask

    def _split(self, x: Tensor, batch: int | None) -> Tensor:
        """[N, 1, Sq, Sk] with samples and heads apart."""
        if "N" not in self.letters["q"]:
            return x
        return axes.canonical(x[:, 0], "NQK", batch) if batch else x  # type: ignore[return-value]

    @torch.no_grad()
    def used_weights(self, batch: int | None = None) -> Tensor | None:
        """The weights that V is multiplied with, [B, H, Sq, Sk]; SDPA's are read off by a one-hot V; else None."""
        if self.kind == "softmax":
            used = self.canonical("applied" if "applied" in self.seen else "weights", batch)
            return used / used.sum(-1, keepdim=True) if used is not None and self.deferred else used
        q, k = self.canonical("q"), self.canonical("k")
        if self.kind != "sdpa" or q is None or k is None:
            return None
        n = k.shape[2]
        one_hot = torch.eye(n, dtype=k.dtype, device=k.device).expand(*k.shape[:2], n, n)
        grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        scale = bound(self.call)["scale"]
        mask = self._mask_of_sdpa()
        read = F.scaled_dot_product_attention(q, k, one_hot, mask, 0.0, bool(self.causal), scale=scale, **grouped)
        return self._split(read, batch)


def bound(call: Call) -> dict[str, Any]:
    """The arguments of an SDPA call by name."""
    names = {"query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False}
    names |= {"scale": None, "enable_gqa": False}
    return names | dict(zip(names, call.args, strict=False)) | call.kwargs


def is_dropout(call: Call) -> float:
    """The probability with which a call drops numbers now; 0 where it does not."""
    if call.name == "scaled_dot_product_attention":
        return float(bound(call)["dropout_p"] or 0.0)
    if call.name not in ("dropout", "alpha_dropout", "feature_dropout"):
        return 0.0
    try:
        given = inspect.signature(F.dropout).bind(*call.args, **call.kwargs)
    except TypeError:
        return float(call.argument(1, "p", 0.5)) if call.argument(2, "train", True) else 0.0
    given.apply_defaults()
    return float(given.arguments["p"]) if given.arguments["training"] else 0.0
