"""Everything that needs a GPU, in one run of at most eight minutes, into one JSON file.

    python benchmarks/gpu_check.py --out gpu_check.json

Verifies every fused implementation on the device (flash-attn where it is installed), times them all against SDPA on the
`quick` grid, and compares our clock with Triton's do_bench and with the synchronised host clock. A part that fails is
recorded and the next one runs. Exit status 1 where a part failed, an implementation has a red check, or a clock is off
by more than 5 %; 5 where there is no such device.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import attn_spec
from attn_spec import check_attention
from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.resolve import resolve
from attn_spec.benchmark import document, stats, tables
from attn_spec.benchmark.contenders import Stage
from attn_spec.benchmark.paired import reading, warm_up
from attn_spec.benchmark.run import benchmark, clock_of
from attn_spec.masks import Causal
from attn_spec.problem import Problem
from attn_spec.report.json_report import environment, finite

FUSED = ("sdpa", "sdpa-math", "sdpa-flash", "flex", "flex-compiled", "tiled", "flash-attn")
SECONDS = 450.0
AGREEMENT = 0.05
PROBLEMS = {
    "short": Problem(batch=1, heads=8, kv_heads=8, q_len=512, kv_len=512, head_dim=64, v_dim=64),
    "prefill": Problem(batch=1, heads=32, kv_heads=8, q_len=4096, kv_len=4096, head_dim=128, v_dim=128),
    "causal": Problem(batch=2, heads=16, kv_heads=16, q_len=2048, kv_len=2048, head_dim=64, v_dim=64, mask=(Causal(),)),
    "decode": Problem(batch=16, heads=32, kv_heads=8, q_len=1, kv_len=8192, head_dim=128, v_dim=128),
    "long": Problem(batch=1, heads=8, kv_heads=8, q_len=8192, kv_len=8192, head_dim=128, v_dim=128),
}


class Budget:
    """Seconds that are left of all."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())


def available(names: Sequence[str], device: str) -> dict[str, str]:
    """Each implementation with why it can't be used here; "" where it can."""
    out = {}
    for name in names:
        try:
            adapt(resolve(name).object, name=name, target_name=name, device=device)
            out[name] = ""
        except Exception as error:
            out[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return out


def verified(names: Sequence[str], device: str, budget: Budget, share: float) -> dict[str, Any]:
    """The verdict of the quick suites on each implementation, each within an equal part of a share of what is left,
    three seconds at least."""
    each = max(3.0, budget.left * share / max(len(names), 1))
    out: dict[str, Any] = {}
    for name in names:
        start = time.monotonic()
        report = check_attention(name, device=device, budget_s=each)
        red = [f"{one.code} {one.problem}: {one.message}" for one in report.results if one.red]
        out[name] = {"verdict": report.verdict, "counts": report.counts, "red": red[:20]}
        out[name]["duration_s"] = time.monotonic() - start
        print(f"{name}: {report.verdict}, {report.counts}", flush=True)
    return out


def timed(names: Sequence[str], device: str, grid: str, budget: Budget) -> dict[str, Any]:
    """The benchmark of them all against SDPA."""
    seconds = max(0.2, min(3.0, budget.left * 0.5 / (9 * max(len(names), 1))))
    say = functools.partial(print, flush=True)
    results = benchmark(names, "sdpa", grid=grid, device=device, seconds=seconds, say=say)
    print("\n".join(tables.lines(results)), flush=True)
    return document.document(results, device)


def clocks(device: str, budget: Budget, problems: dict[str, Problem]) -> dict[str, Any]:
    """The median of a call by our clock, by the synchronised host clock and by Triton's do_bench, in seconds."""
    clock = clock_of(device)
    implementation = adapt(resolve("sdpa").object, name="sdpa", target_name="sdpa", device=device)
    out: dict[str, Any] = {}
    for name, problem in problems.items():
        if budget.left < 5:
            out[name] = {"skipped": "no time left"}
            continue
        asked = problem.replace(dtype="bfloat16" if device == "cuda" else "float32", values="mild")
        contender = Stage(asked, "forward").contender(implementation)
        with torch.no_grad():
            warm_up(clock, contender, 0.05)
            ours = stats.median([reading(clock, contender, 1).seconds for _ in range(50)])
            host = stats.median([clock.synchronised(contender.calls(1)[0]) for _ in range(20)])
            theirs = do_bench(contender.prepared[0].call) if device == "cuda" else None
        out[name] = {"problem": asked.to_dict(), "ours_s": ours, "host_s": host, "do_bench_s": theirs}
        out[name]["agrees"] = None if theirs is None else abs(ours / theirs - 1) <= AGREEMENT
        print(f"{name}: ours {ours * 1e3:.4f} ms, host {host * 1e3:.4f} ms, do_bench {theirs}", flush=True)
    return out


def do_bench(call: Callable[[], Any]) -> float | None:
    """Triton's median, in seconds; None where there is no Triton."""
    try:
        from triton.testing import do_bench as measure
    except ImportError:
        return None
    return float(measure(call, warmup=50, rep=200, return_mode="median")) / 1e3


def failed(data: dict[str, Any]) -> bool:
    """Whether something is wrong: a part that raised, a red check, a clock that is off."""
    parts = [data[name] for name in ("verified", "timed", "clocks")]
    if any("error" in part for part in parts):
        return True
    red = any(one["verdict"] == "failed" for one in data["verified"].values())
    off = any(one.get("agrees") is False for one in data["clocks"].values())
    return red or off or data["timed"]["exit_status"] not in (0, 5)


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script itself")
    options.add_argument("--implementations", default=",".join(FUSED))
    options.add_argument("--grid", default="quick")
    options.add_argument("--seconds", type=float, default=SECONDS)
    chosen = options.parse_args(arguments)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: this torch sees no CUDA device")
        return 5
    budget, wanted = Budget(chosen.seconds), chosen.implementations.split(",")
    data: dict[str, Any] = {"attn_spec_version": attn_spec.__version__, "environment": environment()}
    data["environment"]["node"] = platform.node()
    data["unavailable"] = {name: why for name, why in available(wanted, chosen.device).items() if why}
    names = [name for name in wanted if name not in data["unavailable"]]
    problems = PROBLEMS if chosen.device == "cuda" else {"short": PROBLEMS["short"]}
    parts: dict[str, Callable[[], Any]] = {
        "clocks": lambda: clocks(chosen.device, budget, problems),
        "verified": lambda: verified(names, chosen.device, budget, 0.45),
        "timed": lambda: timed(names, chosen.device, chosen.grid, budget),
    }
    for part, run in parts.items():
        print(f"== {part} ({budget.left:.0f} s left)", flush=True)
        try:
            data[part] = run()
        except Exception:
            data[part] = {"error": traceback.format_exc()}
            print(data[part]["error"], flush=True)
        chosen.out.write_text(json.dumps(finite(data), indent=1) + "\n", encoding="utf-8")  # whatever comes after
    data["duration_s"] = chosen.seconds - budget.left
    chosen.out.write_text(json.dumps(finite(data), indent=1) + "\n", encoding="utf-8")
    print(f"written: {chosen.out}")
    return int(failed(data))


if __name__ == "__main__":
    raise SystemExit(main())
