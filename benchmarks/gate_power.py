"""How often the speed gate is right, on this machine, with other work on it.

    python benchmarks/gate_power.py [--write docs/gate-power.md] [--quiet] [--runs 60 40 40]

Each run is one comparison with a limit of 1.10 and four seconds: SDPA against itself (no FAIL is allowed), and against
itself with a slowdown of 20 % (FAIL in 90 % at least, never PASS) and of 35 % (always FAIL) planted by spinning on for
that share of each call. The other cores are loaded by processes that multiply matrices, unless --quiet. Then the
median of a call is compared with torch.utils.benchmark on five cases, in pairs too. Exit status 1 where one of these
does not hold.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.benchmark import stats
from attn_spec.benchmark.clock import CpuClock, switches
from attn_spec.benchmark.contenders import Stage
from attn_spec.benchmark.paired import FAIL, INCONCLUSIVE, PASS, Comparison, Plan, compare
from attn_spec.masks import Causal
from attn_spec.problem import Problem

PROBLEM = Problem(batch=1, heads=4, kv_heads=4, q_len=384, kv_len=384, head_dim=64, v_dim=64, values="mild")
LIMIT, SECONDS = 1.10, 4.0
CASES = {  # of some milliseconds: a call of less finds colder caches here than in a loop of the same call
    "plain": PROBLEM.replace(q_len=512, kv_len=512),
    "causal": PROBLEM.replace(q_len=512, kv_len=512, mask=(Causal(),)),
    "grouped": PROBLEM.replace(heads=8, kv_heads=2),
    "cross": PROBLEM.replace(q_len=128, kv_len=2048),
    "wide": PROBLEM.replace(head_dim=128, v_dim=128),
}
AGREEMENT = 0.03
HEADER = (
    *("candidate", "runs", PASS, FAIL, INCONCLUSIVE, "ratio", "from run to run", "pairs"),
    *("disturbed", "own ms a pair", "s a run"),
)


def sdpa(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)


def slowed(share: float) -> Callable[..., Tensor]:
    """SDPA that spins on for a share of the time that each call took."""

    def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> Tensor:
        start = time.perf_counter_ns()
        out = sdpa(query, key, value, is_causal)
        end = start + (time.perf_counter_ns() - start) * (1 + share)
        while time.perf_counter_ns() < end:
            pass
        return out

    return attention


@contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Other work on the machine meanwhile: processes that multiply matrices."""
    work = "import torch; torch.set_num_threads(1); a = torch.randn(700, 700)\nwhile True: a @ a"
    children = [subprocess.Popen([sys.executable, "-c", work]) for _ in range(processes)]
    try:
        time.sleep(4.0 if children else 0.0)  # until they are at work
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def comparisons(candidate: Implementation, baseline: Implementation, runs: int) -> Iterator[Comparison]:
    clock = CpuClock()
    for seed in range(runs):
        stage = Stage(PROBLEM, "forward", seed=seed)
        pair = [stage.contender(one) for one in (candidate, baseline)]
        with torch.no_grad():
            yield compare(clock, *pair, Plan(limit=LIMIT, budget_s=SECONDS, seed=seed))


def row(name: str, found: list[Comparison], seconds: float) -> str:
    verdicts = [one.verdict() for one in found]
    counts = [str(verdicts.count(word)) for word in (PASS, FAIL, INCONCLUSIVE)]
    ratios = [one.ratio for one in found]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    pairs = stats.median([len(one.log_ratios) for one in found])
    own = stats.median([one.overhead_s for one in found]) * 1e3
    cut = sum(one.disturbed for one in found) / sum(2 * len(one.log_ratios) for one in found)
    cells = [name, str(len(found)), *counts, f"{stats.median(ratios):.3f}", spread, f"{pairs:.0f}"]
    return f"| {' | '.join([*cells, f'{cut:.0%}', f'{own:.1f}', f'{seconds / len(found):.1f}'])} |"


def holds(slowdown: float, verdicts: list[str]) -> bool:
    if slowdown == 0:
        return FAIL not in verdicts
    if slowdown < 0.3:
        return PASS not in verdicts and verdicts.count(FAIL) >= 0.9 * len(verdicts)
    return set(verdicts) == {FAIL}


def agreement(problem: Problem, implementation: Implementation, rounds: int = 30) -> tuple[float, float, float]:
    """The median of a call here and by torch.utils.benchmark, in seconds, and the median of their paired ratio.

    Each round reads both, in an order that alternates, on the same inputs. A window that other work cut into is taken
    again; the least of eight stands for one that was left alone.
    """
    contender, clock = Stage(problem, "forward").contender(implementation), CpuClock()
    timers = [Timer("call()", globals={"call": one.call}) for one in contender.prepared]

    def here() -> tuple[float, bool]:
        read = clock.read(contender.calls(1))
        contender.verify(read.outputs)
        return read.seconds, read.disturbed

    def there() -> tuple[float, bool]:
        before = switches()
        return timers[next(contender.order)].timeit(1).mean, switches() > before

    ours, theirs = [], []
    with torch.no_grad():
        for order in ((here, there), (there, here)) * (rounds // 2):
            for which in order:
                (ours if which is here else theirs).append(undisturbed(which))
    ratio = math.exp(stats.median([math.log(a / b) for a, b in zip(ours, theirs, strict=True)]))
    return stats.median(ours), stats.median(theirs), ratio


def undisturbed(measure: Callable[[], tuple[float, bool]], tries: int = 8) -> float:
    least = math.inf
    for _ in range(tries):
        seconds, disturbed = measure()
        if not disturbed:
            return seconds
        least = min(least, seconds)
    return least


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", type=Path)
    options.add_argument("--quiet", action="store_true", help="load no other core")
    options.add_argument("--agreement", action="store_true", help="only the comparison with torch.utils.benchmark")
    options.add_argument("--runs", type=int, nargs=3, default=[60, 40, 40], metavar="N")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    others = 0 if chosen.quiet else max(1, cores - 1)
    lines = [
        "# The power of the speed gate",
        "",
        f"By `python benchmarks/gate_power.py`, torch {torch.__version__}, {cores} cores ({platform.machine()}), "
        f"{others} of them loaded by us;",
        f"load average {os.getloadavg()[0]:.1f} at the start. Limit {LIMIT}, {SECONDS:.0f} s a run, one thread.",
        "",
        f"| {' | '.join(HEADER)} |",
        f"|{'---|' * len(HEADER)}",
    ]
    print("\n".join(lines), flush=True)
    good = True
    baseline = adapt(sdpa, name="sdpa")
    runs_of = {} if chosen.agreement else dict(zip((0.0, 0.2, 0.35), chosen.runs, strict=True))
    with loaded(others if runs_of else 0):
        for slowdown, runs in runs_of.items():
            candidate = adapt(slowed(slowdown) if slowdown else sdpa, name="candidate")
            start = time.perf_counter()
            found = list(comparisons(candidate, baseline, runs))
            name = f"{slowdown:.0%} slower" if slowdown else "itself"
            lines.append(row(name, found, time.perf_counter() - start))
            print(lines[-1], flush=True)
            good &= holds(slowdown, [one.verdict() for one in found])
    lines += ["", "| case | ms here | ms by torch.utils.benchmark | paired ratio |", "|---|---|---|---|"]
    print("\n".join(lines[-3:]), flush=True)
    for name, problem in CASES.items():
        ours, theirs, ratio = agreement(problem, baseline)
        lines.append(f"| {name} ({problem}) | {ours * 1e3:.3f} | {theirs * 1e3:.3f} | {ratio:.3f} |")
        print(lines[-1], flush=True)
        good &= abs(ratio - 1) <= AGREEMENT
    lines += ["", "All of it holds." if good else "NOT all of it holds."]
    print(lines[-1])
    if chosen.write:
        chosen.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
