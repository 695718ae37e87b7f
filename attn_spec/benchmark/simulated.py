"""A device whose true times are known, to test the engine and one's gates on without waiting.

It has a host and one or more queues. A call takes `host_s` to launch and puts `work_s` on a queue; the time it really
takes is `work_s` times what the noise says. Nothing waits: time is a number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attn_spec.benchmark.clock import Call, Distrusted, Reading

Noise = Callable[[random.Random, float], float]  # (generator, time now) -> a factor on the true time


def quiet(generator: random.Random, now: float) -> float:
    """A machine on which every call takes its true time."""
    return 1.0


def busy(spread: float = 0.05, bursts: float = 0.1, drift: float = 0.3, period_s: float = 3.0) -> Noise:
    """A machine with other work on it: log-normal spread, now and then a burst, and a slow drift of its speed."""

    def noise(generator: random.Random, now: float) -> float:
        factor = math.exp(generator.gauss(0.0, spread))
        if generator.random() < bursts:
            factor *= 1 + generator.expovariate(1.0)
        return factor * (1 + drift * (1 + math.sin(2 * math.pi * now / period_s)) / 2)

    return noise


@dataclass(eq=False)
class SimulatedClock:
    """The clock of a simulated device. queues[0] is the one that its events see."""

    noise: Noise = quiet
    seed: int = 0
    name: str = "simulated"
    host: float = 0.0
    queues: list[float] = field(default_factory=lambda: [0.0, 0.0])  # when each has done all that is on it

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def launch(self, work_s: float, host_s: float = 0.0, queue: int = 0) -> None:
        """What a simulated call does."""
        self.host += host_s
        begin = max(self.queues[queue], self.host)
        self.queues[queue] = begin + work_s * self.noise(self.random, begin)

    def read(self, calls: Sequence[Call]) -> Reading:
        self.host = max(self.host, *self.queues)
        start = self.host
        outputs = [call() for call in calls]
        self.host = end = max(self.host, self.queues[0])  # an event is recorded when the host gets there
        return Reading((end - start) / len(calls), outputs)

    def synchronised(self, call: Call) -> float:
        start = self.host = max(self.host, *self.queues)
        call()
        self.host = max(self.host, *self.queues)
        return self.host - start

    def now(self) -> float:
        return self.host


@dataclass(eq=False)
class SimulatedContender:
    """What the engine times, with a true time in seconds; `wrong_after`: the outputs of later calls are wrong."""

    name: str
    clock: SimulatedClock
    work_s: float
    host_s: float = 0.0
    queue: int = 0
    wrong_after: float = math.inf
    made: int = 0

    def calls(self, count: int) -> list[Call]:
        return [self._call] * count

    def _call(self) -> bool:
        self.clock.launch(self.work_s, self.host_s, self.queue)
        self.made += 1
        return self.made <= self.wrong_after

    def verify(self, outputs: list[Any]) -> None:
        if not all(outputs):
            raise Distrusted(f"{self.name}: the output of a timed call is wrong")
