"""The blocks of an attention as they are shown: what each tensor holds, which call made it, and at which line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from attn_spec.capture import Call, Recording, Seen
from attn_spec.trace import axes, flow
from attn_spec.trace.core import Core

# in the order of the computation; a finding that stands earlier here went wrong earlier
STAGES = (
    "input",
    "q projected",
    "k projected",
    "v projected",
    "q",
    "k",
    "v",
    "scores",
    "scaled",
    "mask",
    "masked",
    "weights",
    "weights used",
    "mixed",
    "merged",
    "output",
)
NAMES = {"logits": "scores", "applied": "weights used"}  # fields of a core by the name of their block
INSIDE = ("scores", "scaled", "masked", "weights")  # what a fused call holds


@dataclass(frozen=True)
class Statistics:
    """What a tensor holds: extremes, mean and standard deviation of its finite numbers, and how many are not."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    minimum: float
    maximum: float
    mean: float
    std: float
    nan: int
    inf: int
    minus_inf: int


@dataclass(frozen=True, eq=False)
class Block:
    """One step: its tensor (None: not seen), the call that made it, its source line, and what else is to be said."""

    name: str
    seen: Seen | None
    statistics: Statistics | None
    made_by: str = ""
    where: str = ""
    source: str = ""
    note: str = ""


def statistics(seen: Seen) -> Statistics:
    """Shape, dtype, layout and numbers of a tensor."""
    x: Tensor = seen.value
    numbers = x.double().flatten()
    finite = numbers[numbers.isfinite()]
    empty = finite.numel() == 0
    return Statistics(
        shape=seen.shape,
        dtype=str(x.dtype).removeprefix("torch."),
        layout="contiguous" if seen.contiguous else f"strides {list(seen.stride)}",
        minimum=float("nan") if empty else float(finite.min()),
        maximum=float("nan") if empty else float(finite.max()),
        mean=float("nan") if empty else float(finite.mean()),
        std=float("nan") if empty else float(finite.std(correction=0)),
        nan=int(numbers.isnan().sum()),
        inf=int((numbers == float("inf")).sum()),
        minus_inf=int((numbers == -float("inf")).sum()),
    )


def blocks(recording: Recording, core: Core | None) -> list[Block]:
    """The blocks of one attention in order; what lies inside a fused call stands there without a tensor."""
    found = [_block(f"input {name}", seen) for name, seen in recording.arguments.items() if seen.shape]
    shown = {id(seen) for seen in recording.arguments.values()}
    if core is None:
        made = [call for call in recording.calls if flow.weight_of(call) is not None and call.given]
        found += [_block("projected", call.given[0], note=_by(call)) for call in made]
        return found
    for name, seen in _projections(core):
        shown.add(id(seen))
        found.append(_block(f"{name} projected", seen, note=_by(seen.made_by)))
    blocked = core.call.name in ("div", "divide")
    inside = "by blocks of keys: no tensor holds them" if blocked else f"inside {core.call.name}, not seen"
    for field in (
        "q",
        "k",
        "v",
        "logits",
        "scaled",
        "mask",
        "masked",
        "weights",
        "applied",
        "mixed",
        "merged",
        "output",
    ):
        seen_ = core.seen.get(field)
        if field == "masked" and core.kind != "softmax":
            found += [Block(name, None, None, note=inside) for name in INSIDE]
        if seen_ is None or id(seen_) in shown:
            continue
        shown.add(id(seen_))
        found.append(_block(NAMES.get(field, field), seen_, axes.named(core.letters.get(field, ""))))
    return found


def _projections(core: Core) -> Iterator[tuple[str, Seen]]:
    """Each product with a parameter, with all that comes from it: "q", or "q, k, v" of one matrix."""
    together: dict[int, tuple[list[str], Seen]] = {}
    for name, seen in core.projections.items():
        together.setdefault(id(seen), ([], seen))[0].append(name)
    yield from ((", ".join(names), seen) for names, seen in together.values())


def _by(call: Call | None) -> str:
    weight = flow.weight_of(call) if call is not None else None
    return f"by {weight.name}" if weight is not None and weight.name else ""


def _block(name: str, seen: Seen, note: str = "") -> Block:
    call = seen.made_by
    if call is None:
        return Block(name, seen, statistics(seen), note=note)
    return Block(name, seen, statistics(seen), call.name, str(call.where), call.where.text, note)
