"""What a judge of a trace says."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attn_spec.capture import Recording, Seen
from attn_spec.trace import flow
from attn_spec.trace.block import STAGES
from attn_spec.trace.core import Core


@dataclass(frozen=True)
class Finding:
    """One thing that was noticed in a block.

    wrong: something goes wrong there; else it is worth a look and may be meant.  level: that of the NaN tree, L1 to L5,
    or "".  where: the line of the user's code.
    """

    block: str
    text: str
    wrong: bool = True
    level: str = ""
    where: str = ""
    core: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Attentions in order, and in each of them the blocks in order."""
        return self.core, STAGES.index(self.block) if self.block in STAGES else len(STAGES)


@dataclass(frozen=True, eq=False)
class Expected:
    """What was asked for, where the arguments do not say it.

    hidden: bool, True = hidden, broadcastable to [B, H, Sq, Sk].  causal: query i may see key j <= i.  scale: the
    factor on q k' (default 1/sqrt(d)).  batch: samples, for code that keeps samples and heads in one axis.
    """

    hidden: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    batch: int | None = None


@dataclass(eq=False)
class Case:
    """One attention of a recording, with what was asked for, as the judges get it."""

    recording: Recording
    core: Core
    expected: Expected
    index: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def batch(self) -> int | None:
        if self.expected.batch is None and self.expected.hidden is not None and self.expected.hidden.dim() == 4:
            return self.expected.hidden.shape[0] if self.expected.hidden.shape[0] > 1 else None
        return self.expected.batch

    def get(self, name: str) -> Tensor | None:
        """A tensor as [B, H, S, D] or [B, H, Sq, Sk], in float64."""
        x = self.core.canonical(name, self.batch)
        return None if x is None else x.double().cpu()

    @cached_property
    def used(self) -> Tensor | None:
        """The weights that V is multiplied with, [B, H, Sq, Sk], on the CPU; None where they can't be seen."""
        used = self.core.used_weights(self.batch)
        return None if used is None else used.cpu()

    @cached_property
    def hidden(self) -> Tensor | None:
        """The keys that the code hides before the softmax, as `used`; None where that can't be seen."""
        hidden, used = self.core.hidden(self.batch), self.used
        if hidden is None or used is None or hidden.shape == used.shape:
            return None if hidden is None else hidden.cpu()
        try:
            return hidden.cpu().expand(used.shape)
        except RuntimeError:  # the scores lie otherwise than the weights
            return None

    def finding(self, block: str, text: str, seen: str = "", *, wrong: bool = True, level: str = "") -> Finding:
        """A finding about a block, at the line that made the tensor `seen` of the core."""
        name, _, projected = seen.partition(" ")
        record: Seen | None = (self.core.projections if projected else self.core.seen).get(name)
        call = record.made_by if record is not None else None
        where = call.where.quoted if call is not None else ""
        return Finding(block, text, wrong, level, where, self.index)

    @cached_property
    def hidden_asked(self) -> Tensor | None:
        """The keys that shall be hidden, bool [B, H, Sq, Sk]; None where nothing was asked for."""
        q, k = self.get("q"), self.get("k")
        if q is None or k is None or (self.expected.hidden is None and not self.expected.causal):
            return None
        if any(flow.is_reordered(self.core.seen[name]) for name in "qk"):
            self.notes.append("whether the mask is right: the code puts queries or keys into another order")
            return None
        shape = (*q.shape[:3], k.shape[2])
        hidden = torch.zeros(shape, dtype=torch.bool)
        if self.expected.causal:
            hidden |= torch.ones(shape[-2:], dtype=torch.bool).triu(1)
        if self.expected.hidden is None:
            return hidden
        asked = self.expected.hidden.cpu()
        if asked.dim() == 4 and asked.shape[1] > 1 and shape[1] == 1:  # a head for each attention, or one for all
            one = self.index if len(self.recording.cores) == asked.shape[1] else 0
            asked = asked[:, one : one + 1]
        try:
            return hidden | asked.expand(shape)
        except RuntimeError:
            self.notes.append(f"whether the mask is right: {list(asked.shape)} was asked for, {list(shape)} is there")
            return None
