"""A session as JSON, for programs to read: everything that the tables say, and the readings they rest on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attn_spec
from attn_spec.benchmark import stats
from attn_spec.benchmark.paired import Comparison
from attn_spec.benchmark.session import CaseResult, MemoryResult, Results
from attn_spec.report.json_report import environment, finite

SCHEMA_VERSION = 1


def document(results: Results, device: str = "cpu") -> dict[str, Any]:
    """The whole session as plain data."""
    told = environment()
    if device.startswith("cuda"):
        from attn_spec.benchmark.cuda_clock import sm_clock_mhz

        told["sm_clock_mhz"] = sm_clock_mhz()
    return {
        "schema_version": SCHEMA_VERSION,
        "attn_spec_version": attn_spec.__version__,
        "environment": told,
        "exit_status": results.exit_status,
        "interrupted": results.interrupted,
        "void": results.void,
        "control": None if results.control is None else _comparison(results.control),
        "cases": [_case(one) for one in results.cases],
        "memory": [_memory(one) for one in results.memory],
        "geometric_means": [
            {"implementation": name, "baseline": other, "ratio": stats.geometric_mean(ratios), "cases": len(ratios)}
            for (name, other), ratios in results.ratios().items()
        ],
    }


def write(path: Path, results: Results, device: str = "cpu") -> None:
    path.write_text(json.dumps(finite(document(results, device)), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _case(one: CaseResult) -> dict[str, Any]:
    out: dict[str, Any] = {
        "case": one.case.name,
        "entry": one.case.entry,
        "problem": one.case.problem.to_dict(),
        "direction": one.case.direction,
        "limit": one.case.limit,
        "note": one.case.note,
        "implementation": one.implementation,
        "baseline": one.baseline,
        "outcome": one.outcome,
        "reason": one.reason,
    }
    if one.comparison is not None and one.work is not None:
        seconds = one.seconds
        out |= {"comparison": _comparison(one.comparison), "median_s": seconds}
        out |= {"visible_pairs": one.work.pairs, "flop": one.work.flop, "bytes": one.work.bytes}
        out |= {"tflop_per_s": one.work.flop / seconds / 1e12, "gb_per_s": one.work.bytes / seconds / 1e9}
        out["roofline"] = None if one.ceilings is None else one.ceilings.share(one.work, seconds)
    if one.overheads is not None:
        out["overheads"] = vars(one.overheads)
    return out


def _comparison(found: Comparison) -> dict[str, Any]:
    low, high = found.interval
    return {
        "candidate": found.candidate,
        "baseline": found.baseline,
        "ratio": found.ratio,
        "low": low,
        "high": high,
        "confidence": found.plan.confidence,
        "pairs": len(found.log_ratios),
        "stopped": found.stopped,
        "calls_a_reading": found.calls_a_reading,
        "overhead_s": found.overhead_s,
        "disturbed": found.disturbed,
        "log_ratios": found.log_ratios,
        "candidate_s": found.candidate_s,
        "baseline_s": found.baseline_s,
    }


def _memory(one: MemoryResult) -> dict[str, Any]:
    out: dict[str, Any] = {"entry": one.entry, "implementation": one.implementation, "reason": one.reason}
    if one.scaling is not None:
        out |= {"lengths": list(one.scaling.lengths), "peaks": list(one.scaling.peaks), "slope": one.scaling.slope}
    return out | {"failed": one.failed}
