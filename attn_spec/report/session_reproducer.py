"""The script for a sequence that is decoded in parts: the module called part by part, beside one call on the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from attn_spec.adapters.modules.sessions import protocol_of
from attn_spec.report.snippets import Lines

if TYPE_CHECKING:
    from attn_spec.report.hidden_reproducer import HiddenScript


def in_parts(script: HiddenScript, cuts: Sequence[int]) -> Iterator[Lines]:
    """The body of a script, for modules that need nothing but hidden states and the cache that they hand back."""
    protocol, f = protocol_of(script.f), script.f
    if protocol is None or protocol.kind not in ("returned", "inside") or f.input != "BSD" or len(f.forward.inputs) > 1:
        return
    if script._given(script.hidden)[1]:
        return
    switches = "".join(f", {name}=True" for name in protocol.switches)
    if protocol.kind == "returned":
        call, before = f"y, cache = module(x[:, a:b], {protocol.parameter}=cache{switches})[:2]", ["cache = None"]
    else:
        call, before = f"y = {script.output.format(f'module(x[:, a:b]{switches})')}", []
    yield [
        "whole = run(x)",
        *before,
        "parts = []",
        f"for a, b in {list(zip(cuts, cuts[1:], strict=False))}:",
        f"    {call}",
        "    parts.append(y)",
        *script._same("torch.cat(parts, dim=1)", "whole", "in parts, with the cache, it gives something else"),
    ]
