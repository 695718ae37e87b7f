"""The two ceilings of the machine, measured once and kept: the speed of a matrix product and of copying memory.

A call can be no faster than its FLOP at the first and its least bytes at the second (Williams, Waterman and Patterson,
*Roofline*, 2009). What is faster is a fault of the measurement, or did not do the work.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attn_spec.benchmark.clock import Clock, Distrusted
from attn_spec.benchmark.work import Work
from attn_spec.problem import DTYPES

SLACK = 1.5  # how far beyond a measured ceiling a right measurement may lie: they are measured on a busy machine too
FORMAT = 1


@dataclass(frozen=True)
class Ceilings:
    """flop_per_s: the fastest matrix product in a dtype.  bytes_per_s: copying large tensors, read and write counted.
    cached_bytes_per_s: the same at the size that is fastest, which a small problem may reach."""

    flop_per_s: float
    bytes_per_s: float
    cached_bytes_per_s: float

    def attainable(self, work: Work) -> float:
        """FLOP in a second that the roofline allows."""
        return min(self.flop_per_s, work.intensity * self.bytes_per_s)

    def share(self, work: Work, seconds: float) -> float:
        """The share of the roofline that a call of so many seconds reaches."""
        return work.flop / seconds / max(self.attainable(work), 1e-300)

    def least_s(self, work: Work) -> float:
        """Seconds below which nobody can do the work, with no slack."""
        return max(work.flop / self.flop_per_s, work.bytes / self.cached_bytes_per_s)


def require_possible(ceilings: Ceilings, work: Work, seconds: float, name: str) -> None:
    """Raise Distrusted where a call took less time than its work can take on this machine."""
    least = ceilings.least_s(work)
    if seconds * SLACK < least:
        raise Distrusted(
            f"{name}: {seconds * 1e3:.4g} ms is faster than possible: {work.flop:.4g} FLOP at "
            f"{ceilings.flop_per_s / 1e9:.4g} GFLOP/s and {work.bytes:.4g} bytes at "
            f"{ceilings.cached_bytes_per_s / 1e9:.4g} GB/s take {least * 1e3:.4g} ms at least"
        )


def ceilings(dtype: str, clock: Clock, device: str = "cpu", *, fresh: bool = False) -> Ceilings:
    """The ceilings of this machine for a dtype and the current number of threads; from the cache unless `fresh`.

    On a CPU a half dtype may be computed in float32, so its ceiling is the higher of the two.
    """
    key = "|".join(map(str, (FORMAT, machine(device), dtype, torch.get_num_threads(), torch.__version__)))
    path = cache_file()
    known = _read(path)
    if key in known and not fresh:
        return Ceilings(**known[key])
    measured = _measure(dtype, clock, device)
    before = known.get(key)
    if before is not None:  # a ceiling is the best that was ever seen
        measured = Ceilings(**{name: max(value, before[name]) for name, value in asdict(measured).items()})
    known[key] = asdict(measured)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(known, indent=1), encoding="utf-8")
    except OSError:  # a read-only home: it is measured again next time
        pass
    return measured


def cache_file() -> Path:
    """Where ceilings are kept: the user's cache directory."""
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "attn-spec" / "ceilings.json"


def machine(device: str) -> str:
    """The name of what computes."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name())
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    except OSError:
        pass
    return f"{platform.node()} {model}"


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _measure(dtype: str, clock: Clock, device: str) -> Ceilings:
    cuda = device.startswith("cuda")
    kinds = {dtype} if cuda or dtype in ("float32", "float64") else {dtype, "float32"}
    flop = max(
        _matmul(DTYPES[kind], n, clock, device) for kind in kinds for n in ((2048, 8192) if cuda else (512, 1024))
    )
    large = 1 << (30 if cuda else 27)
    sizes = [1 << power for power in range(18, 27, 2)]
    speeds = {size: _copy(size, clock, device) for size in (*sizes, large)}
    return Ceilings(flop, speeds[large], max(speeds.values()))


def _matmul(dtype: torch.dtype, n: int, clock: Clock, device: str) -> float:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3 / _fastest(clock, lambda: a @ b, seconds=0.4)


def _copy(size: int, clock: Clock, device: str) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    count = max(1, (1 << 24) // size)  # small ones many times in one window, so that they are found in the cache
    call: Callable[[], Any] = lambda: target.copy_(source)  # noqa: E731
    return 2.0 * size / _fastest(clock, call, count, seconds=0.1)


def _fastest(clock: Clock, call: Callable[[], Any], count: int = 1, *, seconds: float) -> float:
    start, best = time.perf_counter(), float("inf")
    for n in range(10_000):
        best = min(best, clock.read([call] * count).seconds)
        if n >= 3 and time.perf_counter() - start > seconds:
            break
    return best
