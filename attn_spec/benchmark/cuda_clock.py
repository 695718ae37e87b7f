"""The clock of a CUDA device: events around each window, the L2 cache flushed before it, a synchronised host clock.

As in Triton's `do_bench`, the flush is enqueued before the first event and nothing waits between them, so the launch of
a call is hidden behind the flush, as it is behind other work in a model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from attn_spec.benchmark.clock import Call, Reading


class CudaClock:
    """Times calls on the current CUDA device.

    graphs: replay each call as a CUDA graph, for calls that are shorter than their launch. A call is captured once and
    its output is the graph's own buffer, so only a call of fixed inputs may be captured; `eager` is for all others.
    """

    name = "cuda"

    def __init__(self, *, graphs: bool = False) -> None:
        self.eager: CudaClock = CudaClock() if graphs else self
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = 2 * int(getattr(properties, "L2_cache_size", 0) or 128 << 20)
        self.flush = torch.empty(size // 4, dtype=torch.int32, device="cuda")
        self.graphs = graphs
        self._captured: dict[int, tuple[Call, Any, Any]] = {}

    def read(self, calls: Sequence[Call]) -> Reading:
        replays = [self._capture(call) for call in calls] if self.graphs else []
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self.flush.zero_()
        start.record()
        if replays:
            for graph, _ in replays:
                graph.replay()
            outputs = [output for _, output in replays]
        else:
            outputs = [call() for call in calls]
        end.record()
        end.synchronize()  # of this stream only: what a call left on another is still at work, and is found out
        return Reading(start.elapsed_time(end) / 1e3 / len(calls), outputs)

    def synchronised(self, call: Call) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter_ns() - start) / 1e9

    def now(self) -> float:
        return time.perf_counter()

    def _capture(self, call: Call) -> tuple[Any, Any]:
        known = self._captured.get(id(call))
        if known is None or known[0] is not call:
            for _ in range(2):
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                output = call()
            known = self._captured[id(call)] = (call, graph, output)
        return known[1], known[2]


def sm_clock_mhz() -> int | None:
    """The clock of the multiprocessors now, in MHz; None where the driver's library does not say."""
    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # it needs pynvml, a driver that answers, and permission
        return None
