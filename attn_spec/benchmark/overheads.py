"""What a call does beside the arithmetic: kernel launches, copies of layout, casts, counted by torch.profiler."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attn_spec.benchmark.clock import Call


@dataclass(frozen=True)
class Overheads:
    """For one call. launches: kernels on a GPU, on a CPU the operators that call no other.  copies: tensors copied to
    another layout or place.  casts: tensors converted to another dtype.  copied_elements: in both."""

    launches: int
    copies: int
    casts: int
    copied_elements: int

    def __str__(self) -> str:
        return f"{self.launches} launches, {self.copies} copies, {self.casts} casts"


def overheads(call: Call) -> Overheads:
    """Profile one call; it is run once before, so that what is done once only is not counted."""
    from torch.profiler import ProfilerActivity, profile

    call()
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with _quiet_stderr(), profile(activities=activities, record_shapes=True) as profiled:
        call()
        if cuda:
            torch.cuda.synchronize()
    events: list[Any] = list(profiled.events())
    kernels = [e for e in events if "CUDA" in str(e.device_type) and not re.match("memcpy|memset", e.name, re.I)]
    leaves = [e for e in events if _works(e) and not any(_works(below) for below in _below(e))]
    casts = [e for e in events if e.name == "aten::_to_copy" and _names_dtype(e)]
    within = {id(child) for e in casts for child in e.cpu_children}
    copies = [e for e in events if e.name == "aten::copy_" and id(e) not in within]
    large = [e for e in copies if _elements(e) > 1]
    elements = sum(map(_elements, large)) + sum(map(_elements, casts))
    return Overheads(len(kernels) if kernels else len(leaves), len(large), len(casts), elements)


# operators for which no kernel runs: views, allocations, and those that only call others
IDLE = """
as_strided view transpose permute expand select slice unsqueeze squeeze detach _unsafe_view t empty empty_strided
empty_like resize_ alias lift_fresh item _reshape_alias is_nonzero _local_scalar_dense numpy_T mT adjoint unfold reshape
narrow chunk split unbind diagonal expand_as view_as movedim resolve_conj resolve_neg contiguous to
"""
NO_WORK = frozenset(IDLE.split())


def _works(event: Any) -> bool:
    """Whether an event is an operator that computes or moves something."""
    return bool(event.name.startswith("aten::") and event.name.removeprefix("aten::") not in NO_WORK)


def _below(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _below(child)


def _names_dtype(event: Any) -> bool:
    given = list(event.concrete_inputs or [])
    return len(given) > 1 and given[1] is not None and _elements(event) > 1


def _elements(event: Any) -> int:
    shapes = event.input_shapes or [[]]
    count = 1
    for size in shapes[0]:
        count *= int(size)
    return count


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """The profiler of torch writes lines about itself to the file descriptor of stderr."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
