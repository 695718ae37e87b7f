"""Peak memory above the inputs, at several lengths, and whether it grows with S or with S^2.

On a GPU the allocator says it. On a CPU the calls run in a process of their own, which reports how far its resident
peak rose: torch keeps no count there. Where a process can't reset that peak (not on Linux), each length gets its own.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_spec.adapters.function import FunctionAdapter
from attn_spec.adapters.implementation import Implementation
from attn_spec.benchmark import stats
from attn_spec.benchmark.contenders import asked_for
from attn_spec.benchmark.expected import inputs
from attn_spec.benchmark.memory_child import RESET
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import Problem

STEEPEST = 1.5  # between O(S) and O(S^2) on a log-log fit
NOISE_BYTES = 1 << 20  # what an allocator or a first call adds, whatever the length
WAIT_S = 300.0


@dataclass(frozen=True)
class Scaling:
    """lengths: Sq and Sk.  peaks: bytes above the inputs.  slope: of a log-log fit, 1 = linear, 2 = quadratic."""

    lengths: tuple[int, ...]
    peaks: tuple[int, ...]

    @property
    def slope(self) -> float:
        return stats.slope([float(n) for n in self.lengths], [float(max(p, 1)) for p in self.peaks])

    @property
    def steepest(self) -> float:
        """The slope between the two longest, where what does not depend on the length weighs least."""
        return stats.slope([float(n) for n in self.lengths[-2:]], [float(max(p, 1)) for p in self.peaks[-2:]])

    @property
    def linear(self) -> bool:
        """Whether it grows with S: both slopes are below 1.5, or it never rises above what is noise."""
        return max(self.peaks) < NOISE_BYTES or max(self.slope, self.steepest) < STEEPEST

    def __str__(self) -> str:
        peaks = ", ".join(f"{p / 2**20:.1f} MiB at S = {n}" for n, p in zip(self.lengths, self.peaks, strict=True))
        return f"peak above the inputs {peaks}: slope {self.slope:.2f} (1 = linear in S, 2 = quadratic)"


def memory_linear(implementation: Implementation, problem: Problem) -> None:
    """peak above the inputs at S/4, S/2, S: the slope of the log-log fit is below 1.5

    Why: a fused attention exists so that the S x S logits do not; code that makes them runs out of memory at lengths
    that others take.
    Example: a mask of [Sq, Sk] in float32 beside a kernel that needs none; logits kept for the backward pass.
    """
    found = scaling(implementation, sweep(problem))
    if not found.linear:
        raise Violation(
            f"memory grows faster than the length: {found}",
            evidence={"lengths": list(found.lengths), "peaks": list(found.peaks), "slope": found.slope},
            hint="keep one block of logits at a time, and make no tensor of [Sq, Sk]",
            merge="memory",
        )


def sweep(problem: Problem) -> list[Problem]:
    """The problem at a quarter, a half and all of its length."""
    return [problem.replace(q_len=problem.q_len // n, kv_len=problem.kv_len // n) for n in (4, 2, 1)]


def scaling(implementation: Implementation, problems: Sequence[Problem]) -> Scaling:
    """The peak memory of one forward call on each of the problems, shortest first.

    Raises Unsupported where the function can't be found from another process, Refused where it raises, Violation where
    the process is killed, as it is when it takes more memory than there is.
    """
    ordered = sorted((asked_for(implementation, p) for p in problems), key=lambda p: p.kv_len)
    return Scaling(tuple(p.kv_len for p in ordered), tuple(peak_bytes(implementation, ordered)))


def peak_bytes(implementation: Implementation, problems: Sequence[Problem]) -> list[int]:
    """Bytes that a forward call on each problem takes above its inputs, its output among them. Raises as `scaling`."""
    if implementation.device != "cpu":
        return [_on_gpu(implementation, problem) for problem in problems]
    groups = [list(problems)] if RESET.exists() else [[problem] for problem in problems]
    return [peak for group in groups for peak in _apart(implementation, group)]


def _apart(implementation: Implementation, problems: list[Problem]) -> list[int]:
    adapter = implementation.adapter
    if not isinstance(adapter, FunctionAdapter):
        raise Unsupported("an adapter of its own can't be called in another process to measure its memory")
    question = pickle.dumps(
        {
            "target": implementation.target,
            "signature": adapter.signature,
            "conventions": adapter.conventions,
            "fixed": dict(adapter.fixed),
            "declared": dict(getattr(getattr(adapter, "module", None), "declared", {})),
            "problems": problems,
            "path": [os.getcwd(), *sys.path],
            "threads": torch.get_num_threads(),
        }
    )
    # memory that is freed goes back to the system at once, so that the resident peak is what was in use
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
    try:
        child = subprocess.run(
            [sys.executable, "-m", "attn_spec.benchmark.memory_child"],
            input=question,
            capture_output=True,
            env=env,
            timeout=WAIT_S,
        )
    except subprocess.TimeoutExpired:
        raise Violation(f"did not end within {WAIT_S:.0f} s while its memory was measured") from None
    if child.returncode < 0:
        raise Violation(
            f"the process was ended by signal {-child.returncode} by {problems[-1]}, as it is when memory runs out",
            merge="memory",
        )
    return _answer(child.stdout, child.stderr)


def _answer(stdout: bytes, stderr: bytes) -> list[int]:
    answer: dict[str, Any] = {}
    _, _, last = stdout.rpartition(b"ANSWER")
    if last:
        answer = pickle.loads(last)
    if "peaks" in answer:
        return [int(peak) for peak in answer["peaks"]]
    message = answer.get("error") or " ".join(stderr.decode(errors="replace").split()[-40:])
    if answer.get("unsupported"):
        raise Unsupported(message)
    raise Refused(message, RuntimeError(message))


def _on_gpu(implementation: Implementation, problem: Problem) -> int:
    arguments = inputs(problem, implementation.conventions.meaning, 0).to(implementation.device)
    with torch.no_grad():
        for _ in range(2):  # what the first call keeps for good is not counted
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = implementation.shielded(implementation.adapter, arguments)
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            del result
    return int(peak)
