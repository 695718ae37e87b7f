"""A trace: one attention on one input, block by block, and the sentence in which it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attn_spec.capture import Recording, capture
from attn_spec.trace import errors, judges
from attn_spec.trace.block import Block, blocks
from attn_spec.trace.core import Core
from attn_spec.trace.finding import Case, Expected, Finding


@dataclass(frozen=True, eq=False)
class Trace:
    """What an attention computed on one input. Prints as `attn-spec trace` shows it.

    name: of the target.  recording: every torch call.  blocks: those of the attention that is shown, which is the first
    in which something goes wrong.  findings: in the order of the computation.  unseen: what could not be seen.
    """

    name: str
    recording: Recording
    blocks: list[Block]
    findings: list[Finding]
    unseen: list[str]
    shown: int = 0

    @property
    def core(self) -> Core | None:
        """The attention that is shown."""
        return self.recording.cores[self.shown] if self.recording.cores else None

    @property
    def first_wrong(self) -> Finding | None:
        """Where it first goes wrong."""
        return next((finding for finding in self.findings if finding.wrong), None)

    @property
    def sentence(self) -> str:
        """Where it first goes wrong and why, or that nothing does on this input, with what could not be seen."""
        wrong = self.first_wrong
        if wrong is not None:
            head = f" of attention {wrong.core + 1}" if len(self.recording.cores) > 1 else ""
            at = f", at {wrong.where}" if wrong.where else ""
            return f"It first goes wrong in {wrong.block}{head}{at}: {wrong.text}."
        if self.core is None:
            return (
                "No attention was seen: no product of two tensors goes into a softmax, no SDPA or fused call is made."
            )
        look = next((finding for finding in self.findings if not finding.wrong), None)
        but = f"; worth a look: {look.text}" if look is not None else ""
        unseen = f" (not seen: {', '.join(self.unseen)})" if self.unseen else ""
        return f"Nothing goes wrong on this input{but}{unseen}."

    def __str__(self) -> str:
        from attn_spec.trace.rendering import lines

        return "\n".join(lines(self))


def trace(
    target: Callable[..., Any], /, *args: Any, expected: Expected | None = None, name: str = "", **kwargs: Any
) -> Trace:
    """Run a function or nn.Module on these arguments, and judge each block of each attention in it.

    expected: what was asked for (hidden keys, causal, a scale), against which masks and scale are judged; without it
    they are judged by what every attention obeys. An exception that the target raises is a finding, and is not raised.
    """
    recording = capture(target, *args, **kwargs)
    return of_recording(recording, expected, name or getattr(target, "__name__", type(target).__name__))


def of_recording(recording: Recording, expected: Expected | None = None, name: str = "") -> Trace:
    """The trace of a run that was captured."""
    cases = [Case(recording, core, expected or Expected(), n) for n, core in enumerate(recording.cores)]
    raised = errors.judge(recording)
    findings = [finding for case in cases for finding in judges.judge(case)]
    if raised is not None:  # what is noticed before may be meant, an exception is not
        findings = [raised, *findings]
    wrong = next((finding for finding in findings if finding.wrong), None)
    shown = wrong.core if wrong is not None and wrong is not raised else 0
    core = recording.cores[shown] if recording.cores else None
    unseen = [note for case in cases[:1] for note in case.notes]
    return Trace(name, recording, blocks(recording, core), findings, _unseen(core) + unseen, shown)


def _unseen(core: Core | None) -> list[str]:
    if core is None:
        return []
    if core.kind == "sdpa":
        return ["scores, scaled, masked and weights inside scaled_dot_product_attention"]
    if core.kind == "fused":
        if core.call.name in ("div", "divide"):
            return ["the weights, which no tensor holds: the softmax runs over blocks of keys"]
        return [f"the inside of {core.call.name}"]
    missing = [name for name in ("q", "k", "v", "mixed") if name not in core.seen]
    found = [" and ".join(missing)] if missing else []
    if core.scale is None:
        found.append("the scale, which is no one number")
    return found
