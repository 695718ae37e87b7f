"""The door to the benchmark, for a script, a test of one's own and the pytest options alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.resolve import resolve
from attn_spec.benchmark.calls import in_this_process
from attn_spec.benchmark.cases import Grid, cases, load
from attn_spec.benchmark.clock import Clock, CpuClock
from attn_spec.benchmark.paired import Plan
from attn_spec.benchmark.roofline import ceilings
from attn_spec.benchmark.session import Results, Session

Given = Callable[..., Any] | Implementation | str


def benchmark(
    implementations: Given | Sequence[Given],
    baselines: Given | Sequence[Given] = "sdpa",
    *,
    grid: Grid | str = "quick",
    only: str = "",
    device: str = "cpu",
    threads: int = 1,
    dtypes: Sequence[str] = (),
    max_slowdown: float | None = None,
    min_speedup: float | None = None,
    inconclusive_fails: bool = False,
    seconds: float = 10.0,
    seed: int = 0,
    graphs: bool = False,
    with_memory: bool = True,
    say: Callable[[str], None] = print,
) -> Results:
    """Time implementations on a grid of cases, each against each baseline in pairs, and decide.

    implementations, baselines: functions f(q, k, v, ...), targets as on the command line, or `Implementation`s.
    grid: "quick", "full" or a YAML file; only: a part of the case names.  device: "cpu" or "cuda".  threads: of torch
    on a CPU, for all of them.  max_slowdown, min_speedup: the gate, where a case has none of its own.  seconds: for one
    comparison.  graphs: CUDA graphs.  say: takes lines of progress.
    Raises TargetError, GridError; ValueError where nothing is left to time.
    """
    loaded = load(grid) if isinstance(grid, str) else grid
    candidates, standing = (
        [_adapted(one, device) for one in _several(given)] for given in (implementations, baselines)
    )
    clock = clock_of(device, graphs=graphs)
    with pinned(threads):

        def known(dtype: str, fresh: bool) -> Any:
            return ceilings(dtype, getattr(clock, "eager", clock), device, fresh=fresh)

        usual = known("bfloat16" if device.startswith("cuda") else "float32", False)
        limits = {"max_slowdown": max_slowdown, "min_speedup": min_speedup}
        wanted = cases(loaded, device=device, flop_per_s=usual.flop_per_s, dtypes=tuple(dtypes), **limits)
        kept = [case for case in wanted if only in case.name]
        if not kept:
            names = ", ".join(dict.fromkeys(case.entry for case in wanted))
            raise ValueError(f"only: {only!r} is in no case's name; the entries of {loaded.path} are {names}")
        session = Session(
            candidates,
            standing,
            kept,
            clock,
            Plan(budget_s=seconds, seed=seed),
            known,
            say=say,
            inconclusive_fails=inconclusive_fails,
            with_memory=with_memory,
        )
        return session.run()


def clock_of(device: str, *, graphs: bool = False) -> Clock:
    """The clock of a device."""
    if not device.startswith("cuda"):
        return CpuClock()
    from attn_spec.benchmark.cuda_clock import CudaClock

    return CudaClock(graphs=graphs)


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """torch on so many threads, and on as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _several(given: Given | Sequence[Given]) -> list[Given]:
    return list(given) if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]


def _adapted(given: Given, device: str) -> Implementation:
    if isinstance(given, Implementation):
        return in_this_process(given)
    with pinned(1):  # conventions are measured by many small calls
        if not isinstance(given, str):
            return adapt(given, device=device)
        found = resolve(given)
        return adapt(found.object, name=found.name, target_name=given, import_line=found.import_line, device=device)
