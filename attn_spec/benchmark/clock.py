"""The clock of a device: the one seam between the measuring engine and the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

try:
    import resource

    RUSAGE_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)
except ImportError:  # Windows
    RUSAGE_THREAD = None

Call = Callable[[], Any]


class Distrusted(Exception):  # noqa: N818
    """A measurement that is not to be believed, with the reason: the implementation is not timed."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One window of the clock: seconds for each of its calls, and what they returned.

    disturbed: other work was let in meanwhile, so the seconds are not those of the calls alone.
    """

    seconds: float
    outputs: list[Any]
    disturbed: bool = False


class Clock(Protocol):
    """Times calls on a device. Everything that takes time in the engine goes through these three."""

    name: str

    def read(self, calls: Sequence[Call]) -> Reading:
        """Run the calls, one after the other, in one window of the device's own clock."""

    def synchronised(self, call: Call) -> float:
        """Host seconds from the start of a call until nothing that it began is still running on the device."""

    def now(self) -> float:
        """Seconds of the host's clock, for warm-up and budgets."""


def switches() -> int:
    """How often this thread was made to give up its core; always 0 where the system does not say."""
    if RUSAGE_THREAD is None:
        return 0
    return resource.getrusage(RUSAGE_THREAD).ru_nivcsw


class CpuClock:
    """Wall time of the calling thread; a call is over when it returns.

    Where the system counts it (Linux), a window in which the thread was taken off its core for another is disturbed.
    """

    name = "cpu"

    def read(self, calls: Sequence[Call]) -> Reading:
        outputs: list[Any] = []
        keep, tick = outputs.append, time.perf_counter_ns
        before = switches()
        start = tick()
        for call in calls:
            keep(call())
        end = tick()
        return Reading((end - start) / 1e9 / len(calls), outputs, switches() > before)

    def synchronised(self, call: Call) -> float:
        return self.read([call]).seconds

    def now(self) -> float:
        return time.perf_counter()
