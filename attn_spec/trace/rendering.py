"""A trace for the terminal: a table of the blocks, what was noticed, and the sentence."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

from attn_spec.trace.block import Block, Statistics
from attn_spec.trace.core import Core
from attn_spec.trace.finding import Finding
from attn_spec.trace.tracing import Trace

WIDTH = 118
HEADER = ("block", "shape", "dtype", "min", "max", "mean", "std", "NaN", "+inf", "-inf", "layout")
TO_THE_RIGHT = range(3, 10)  # the numbers


def lines(trace: Trace) -> Iterator[str]:
    """The trace, line by line."""
    yield f"{trace.name}: {_how(trace)}"
    yield ""
    rows = [HEADER, *(_cells(block) for block in trace.blocks)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(HEADER))]
    first = trace.first_wrong
    for row, block in zip(rows, [None, *trace.blocks], strict=True):
        marked = block is not None and first is not None and _stands_for(block, first)
        cells = [
            c.rjust(w) if n in TO_THE_RIGHT else c.ljust(w) for n, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        if block is not None and block.statistics is None:
            cells = [row[0].ljust(widths[0]), block.note]
        yield f"{'>' if marked else ' '} {'  '.join(cells)}".rstrip()
        if block is not None and block.made_by:
            yield _cut(f"      {_made(block)}")
    yield ""
    for finding in trace.findings:
        if finding is not first:
            yield from _wrapped(_said(finding, len(trace.recording.cores)), "  ")
    yield from _wrapped(trace.sentence, "")


def _how(trace: Trace) -> str:
    cores = trace.recording.cores
    core = trace.core
    if core is None:
        return (
            "no attention was seen" if trace.recording.error is None else "it raised before any attention was complete"
        )
    text = _kind(core)
    if len(cores) > 1:
        text += f"; {len(cores)} attentions, of which number {trace.shown + 1} is shown"
    if core.scale is not None and core.kind != "fused":
        text += f"; scale {core.scale:.4g}"
    return text


def _kind(core: Core) -> str:
    if core.kind == "sdpa":
        return "F.scaled_dot_product_attention, whose inside can't be seen"
    if core.kind == "fused" and core.call.name in ("div", "divide"):
        return "a softmax over blocks of keys, of which no tensor holds the weights"
    if core.kind == "fused":
        what = f"the fused call {core.call.function}" if core.call.function else core.call.name
        return f"{what}, whose inside can't be seen"
    if core.call.name in ("div", "exp", "exp2"):
        late = ", normalised after the product with V" * core.deferred
        return f"matmul and a softmax written out{late}"
    return "matmul and softmax of its own"


def _cells(block: Block) -> tuple[str, ...]:
    s = block.statistics
    if s is None:
        return (block.name, *[""] * (len(HEADER) - 1))
    numbers = (number(x) for x in (s.minimum, s.maximum, s.mean, s.std))
    return (block.name, str(list(s.shape)), s.dtype, *numbers, *_counts(s), s.layout)


def _counts(s: Statistics) -> tuple[str, str, str]:
    return str(s.nan), str(s.inf), str(s.minus_inf)


def number(x: float) -> str:
    """A number in at most ten characters; "" where there is none."""
    return "" if math.isnan(x) else f"{x:.4g}"


def _made(block: Block) -> str:
    note = f" {block.note}" if block.note else ""
    return f"{block.made_by} at {block.where}{note}: {block.source}" if block.where else f"{block.made_by}{note}"


def _stands_for(block: Block, finding: Finding) -> bool:
    """Whether a finding is about a block, which may be that of several projections: "q, k, v projected"."""
    if block.name.endswith("projected") and finding.block.endswith("projected"):
        return finding.block.partition(" ")[0] in block.name.removesuffix(" projected").split(", ")
    return block.name == finding.block or (finding.block == "input" and block.name.startswith("input"))


def _said(finding: Finding, attentions: int) -> str:
    level = f" ({finding.level})" if finding.level else ""
    which = f"attention {finding.core + 1}, " if attentions > 1 else ""
    return f"{'also wrong' if finding.wrong else 'worth a look'}: {which}{finding.block}{level}: {finding.text}"


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _wrapped(text: str, indent: str) -> list[str]:
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
    wrapper.break_on_hyphens = wrapper.break_long_words = False
    return wrapper.wrap(text)
