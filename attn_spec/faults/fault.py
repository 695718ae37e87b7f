"""What a fault is: a known way to get attention wrong, as a changed block of the reference pipeline.

A fault is written as the changed block, under the name of the fault, with the parameters of the right block:

    @fault("score", "the logits are not scaled", sources=("owner/repository#1",), advice="Multiply by the scale.")
    def scale_missing(q: Tensor, k: Tensor, scale: float) -> Tensor:
        return q @ k.mT

That one function is the mutant, the entry of the dictionary for the diagnosis, and, beside the right block, the
explanation. Where a fault changes two blocks, or is one of a family, it is given to `add`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from attn_spec import backward
from attn_spec.backward import Backward
from attn_spec.blocks import BLOCKS as FORWARD
from attn_spec.blocks import RIGHT, Pipeline

if TYPE_CHECKING:
    from attn_spec.problem import Arguments

BLOCKS = {**FORWARD, **backward.BLOCKS}
Block = Callable[..., Any]
F = TypeVar("F", bound=Block)

FAULTS: dict[str, Fault] = {}
THEMES = {  # of a module
    "biases": "scaling",
    "hiding": "masking",
    "broadcasting": "masking",
    "blockwise": "numerics",
    "tiles": "numerics",
    **dict.fromkeys(("windows", "unheeded", "slopes", "sums"), "variants"),
    "recomputing": "gradients",
}


@dataclass(frozen=True, eq=False)
class Fault:
    """A known way to get attention wrong.

    id: "scale-missing", for ever.  title: what is wrong, in one plain sentence.  blocks: the changed blocks by name.
    sources: public reports of it.  advice: what to change.  equivalent: why the output is none the less right, for a
    change that no comparison of outputs can see; empty for a fault that must be caught.  where: on which calls it
    shows, all if None; condition: the same in code (see `attn_spec.faults.scope`).
    """

    id: str
    title: str
    blocks: dict[str, Block] = field(repr=False)
    sources: tuple[str, ...] = field(repr=False)
    advice: str = field(repr=False)
    equivalent: str = field(default="", repr=False)
    where: Callable[[Arguments], bool] | None = field(default=None, repr=False)
    condition: str = field(default="", repr=False)

    @property
    def theme(self) -> str:
        """The theme of the laws that it breaks first."""
        first = next(iter(self.blocks.values()))
        module = (first.parts[0] if isinstance(first, Chain) else first).__module__.rpartition(".")[2]
        return THEMES.get(module, module)

    @cached_property
    def pipeline(self) -> Pipeline:
        return Pipeline(**{name: block for name, block in self.blocks.items() if name in FORWARD})

    @cached_property
    def backward(self) -> Backward:
        return Backward(**{name: block for name, block in self.blocks.items() if name not in FORWARD})

    @property
    def shows(self) -> str:
        """Where it shows first: in the "output", in the "lse" alone, or in the "gradients" alone."""
        names = self.blocks.keys() & FORWARD.keys()
        return "gradients" if not names else "lse" if names == {"log_sum"} else "output"

    def pipeline_for(self, arguments: Arguments) -> Pipeline:
        """The pipeline that a call runs: the right one outside the calls on which the fault shows."""
        return self.pipeline if self.where is None or self.where(arguments) else RIGHT

    def backward_for(self, arguments: Arguments) -> Backward:
        """The backward pass of a call."""
        return self.backward if self.where is None or self.where(arguments) else backward.RIGHT

    @cached_property
    def diff(self) -> str:
        """What to mend, from the fault to the right block: `- return q @ k.mT`, `+ return q @ k.mT * scale`."""
        lines = [f"- # only if {self.condition}"] if self.condition else []
        for name, changed in self.blocks.items():
            for part in changed.parts if isinstance(changed, Chain) else (changed,):
                compared = difflib.ndiff(statements(part), statements(BLOCKS[name]))
                lines += [line.rstrip() for line in compared if line[0] in "-+"]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Callable[[str], Fault], tuple[str]]:
        from attn_spec.faults.scope import named

        return named, (self.id,)  # a block made by a factory can't be pickled; its name can


def statements(function: Block) -> list[str]:
    """The lines of a function below its docstring, without comments; what a factory closed over is filled in."""
    source = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body[1:] if ast.get_docstring(definition) is not None else definition.body
    lines = textwrap.dedent("\n".join(source.splitlines()[body[0].lineno - 1 :])).splitlines()
    for name, value in inspect.getclosurevars(function).nonlocals.items():
        shown = repr(value).replace("inf", "torch.inf")
        lines = [re.sub(rf"\b{name}\b", lambda _, shown=shown: shown, line) for line in lines]  # type: ignore[misc]
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def add(found: Fault) -> Fault:
    """Enter a fault in the catalogue; raises ValueError where the id is taken or a block does not exist."""
    if found.id in FAULTS:
        raise ValueError(f"fault: {found.id} is taken")
    for name in found.blocks:
        if name not in BLOCKS:
            raise ValueError(f"block: {name!r} is not one of {', '.join(BLOCKS)}")
    FAULTS[found.id] = found
    return found


def fault(block: str, title: str, *, sources: tuple[str, ...], advice: str, equivalent: str = "") -> Callable[[F], F]:
    """Enter a function as a fault that changes one block; its name is the id."""

    def register(function: F) -> F:
        name = function.__name__.replace("_", "-")
        add(Fault(name, title, {block: function}, sources, advice, equivalent))
        return function

    return register


CHAINED = ("heed",)  # blocks of which two can be had at once, one after the other


@dataclass(frozen=True)
class Chain:
    """Two changed blocks in the place of one, the second on what the first gives."""

    parts: tuple[Block, Block]

    def __call__(self, a: Any) -> Any:
        first, second = self.parts
        return second(first(a))


def joinable(first: Fault, second: Fault) -> bool:
    """Whether two faults can be had at once."""
    return all(name in CHAINED for name in first.blocks.keys() & second.blocks.keys())


def both(first: Fault, second: Fault) -> Fault:
    """Two faults at once; raises ValueError where they change the same block and it can't be changed twice."""
    if not joinable(first, second):
        shared = sorted(first.blocks.keys() & second.blocks.keys())
        raise ValueError(f"blocks: {first.id} and {second.id} both change {', '.join(shared)}")
    chained = {name: Chain((first.blocks[name], second.blocks[name])) for name in first.blocks.keys() & second.blocks}
    return Fault(
        f"{first.id}+{second.id}",
        f"{first.title}, and {second.title}",
        first.blocks | second.blocks | chained,
        first.sources + second.sources,
        f"{first.advice} {second.advice}",
    )
