"""What a fault around the attention of a module is, and how one is entered."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from attn_spec.faults.fault import statements
from attn_spec.module_blocks import BLOCKS, ModulePipeline

Block = TypeVar("Block", bound=Callable[..., Any])


@dataclass(frozen=True, eq=False)
class ModuleFault:
    """A known way to get the surroundings of attention wrong; the fields are those of `attn_spec.faults.Fault`.

    told_by: the key under which the violations that it makes are merged, where no output shows it.
    """

    id: str
    title: str
    blocks: dict[str, Callable[..., Any]] = field(repr=False)
    sources: tuple[str, ...] = field(repr=False)
    advice: str = field(repr=False)
    told_by: str = field(default="", repr=False)
    equivalent: str = ""
    theme: str = "modules"

    @cached_property
    def pipeline(self) -> ModulePipeline:
        return ModulePipeline(**self.blocks)  # type: ignore[arg-type]

    @cached_property
    def diff(self) -> str:
        """What to mend, from the fault to the right block."""
        lines = []
        for name, changed in self.blocks.items():
            compared = difflib.ndiff(statements(changed), statements(BLOCKS[name]))
            lines += [line.rstrip() for line in compared if line[0] in "-+"]
        return "\n".join(lines)


MODULE_FAULTS: dict[str, ModuleFault] = {}


def fault(
    block: str, title: str, *, advice: str, sources: tuple[str, ...] = (), told_by: str = ""
) -> Callable[[Block], Block]:
    """Enter a function as a fault that changes one block; its name is the id."""
    if block not in BLOCKS:
        raise ValueError(f"block: {block!r} is not one of {', '.join(BLOCKS)}")

    def register(function: Block) -> Block:
        name = function.__name__.replace("_", "-")
        MODULE_FAULTS[name] = ModuleFault(name, title, {block: function}, sources, advice, told_by)
        return function

    return register
