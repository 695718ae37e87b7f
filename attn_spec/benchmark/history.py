"""A session in pytest-benchmark's own storage, so that `pytest-benchmark compare` and its histograms read it.

Times of another machine are never compared: a run is stored in the folder of its kind of machine, as pytest-benchmark
does it, and the gate looks at ratios of the same run only. What is stored serves to see a trend.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from attn_spec.benchmark import stats
from attn_spec.benchmark.roofline import machine
from attn_spec.benchmark.session import CaseResult, Results
from attn_spec.report.json_report import finite

STORAGE = ".benchmarks"
VERSION = "5.3.1"  # of pytest-benchmark, whose format this is
FORMAT_OPTIONS = {
    "disable_gc": False,
    "timer": "perf_counter_ns",
    "min_rounds": 11,
    "max_time": 10.0,
    "min_time": 0.0,
    "warmup": True,
}


def document(results: Results, device: str = "cpu") -> dict[str, Any]:
    """The session in pytest-benchmark's format. `extra_info` has the ratio, its interval and the work."""
    return {
        "machine_info": machine_info(device),
        "commit_info": commit_info(),
        "benchmarks": [_benchmark(one) for one in results.timed],
        "datetime": datetime.now(timezone.utc).isoformat(),
        "version": VERSION,
    }


def save(results: Results, root: Path, name: str = "", device: str = "cpu") -> Path:
    """Write a session into the storage under a root; the file, `.benchmarks/<machine>/0001_<name>.json`.

    Raises ValueError where nothing was timed: pytest-benchmark can't read an empty run.
    """
    if not results.timed:
        raise ValueError("nothing was timed, so there is nothing to keep")
    data = document(results, device)
    folder = root / STORAGE / machine_id()
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(found[0]) for path in folder.glob("*.json") if (found := re.match(r"\d{4}(?=_)", path.name))]
    commit = data["commit_info"]["id"]
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d_%H%M%S")
    label = re.sub(r"[^\w.-]+", "-", name) or f"{commit}_{stamp}{'_uncommited-changes' * data['commit_info']['dirty']}"
    path = folder / f"{max(numbers, default=0) + 1:04}_{label}.json"
    path.write_text(json.dumps(finite(data), indent=4) + "\n", encoding="utf-8")
    return path


def machine_id() -> str:
    """pytest-benchmark's name for a kind of machine."""
    version = ".".join(platform.python_version_tuple()[:2])
    return f"{platform.system()}-{platform.python_implementation()}-{version}-{platform.architecture()[0]}"


def machine_info(device: str = "cpu") -> dict[str, Any]:
    """What computed, in pytest-benchmark's keys and two of ours."""
    return {
        "node": platform.node(),
        "processor": platform.processor(),
        "machine": platform.machine(),
        "python_implementation": platform.python_implementation(),
        "python_version": platform.python_version(),
        "system": platform.system(),
        "release": platform.release(),
        "cpu": {"brand_raw": machine("cpu")},
        "device": machine(device),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def commit_info() -> dict[str, Any]:
    """The commit of the current directory, in pytest-benchmark's keys."""
    commit, branch = _git("rev-parse", "HEAD"), _git("rev-parse", "--abbrev-ref", "HEAD")
    return {
        "id": commit or "unversioned",
        "time": _git("show", "-s", "--format=%cI") or None,
        "author_time": _git("show", "-s", "--format=%aI") or None,
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "project": Path.cwd().name,
        "branch": branch or "(unknown)",
    }


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _benchmark(one: CaseResult) -> dict[str, Any]:
    found, done = one.comparison, one.work
    assert found is not None
    assert done is not None
    low, high = found.interval
    name = f"test_speed[{one.implementation}-{one.case.name}-{one.baseline}]"
    return {
        "group": one.case.name,
        "name": name,
        "fullname": f"attn_spec/benchmark::{name}",
        "params": {"implementation": one.implementation, "case": one.case.name, "baseline": one.baseline},
        "param": f"{one.implementation}-{one.case.name}-{one.baseline}",
        "extra_info": {
            "baseline": one.baseline,
            "baseline_median": stats.median(found.baseline_s),
            "ratio": found.ratio,
            "ratio_low": low,
            "ratio_high": high,
            "pairs": len(found.log_ratios),
            "outcome": one.outcome,
            "visible_pairs": done.pairs,
            "flop": done.flop,
            "bytes": done.bytes,
            "tflop_per_s": done.flop / one.seconds / 1e12,
            "gb_per_s": done.bytes / one.seconds / 1e9,
            "roofline": None if one.ceilings is None else one.ceilings.share(done, one.seconds),
            "problem": one.case.problem.to_dict(),
            "direction": one.case.direction,
        },
        "options": FORMAT_OPTIONS,
        "stats": statistics_of(found.candidate_s, found.calls_a_reading),
    }


def statistics_of(seconds: Sequence[float], calls: int = 1) -> dict[str, Any]:
    """The statistics that pytest-benchmark keeps of the rounds of one benchmark."""
    ordered = sorted(seconds)
    n, total = len(ordered), sum(ordered)
    mean = total / n
    deviation = (sum((x - mean) ** 2 for x in ordered) / (n - 1)) ** 0.5 if n > 1 else 0.0
    q1, middle, q3 = (stats.quantile(ordered, share) for share in (0.25, 0.5, 0.75))
    low, high = q1 - 1.5 * (q3 - q1), q3 + 1.5 * (q3 - q1)
    far = sum(abs(x - mean) > deviation for x in ordered)
    outside = sum(not low <= x <= high for x in ordered)
    return {
        "min": ordered[0],
        "max": ordered[-1],
        "mean": mean,
        "stddev": deviation,
        "rounds": n,
        "median": middle,
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": outside,
        "stddev_outliers": far,
        "outliers": f"{far};{outside}",
        "ld15iqr": next(x for x in ordered if x >= low),
        "hd15iqr": next(x for x in reversed(ordered) if x <= high),
        "ops": 1 / mean,
        "total": total,
        "data": list(seconds),
        "iterations": calls,
    }
