"""The results as JSON: the contract that other programs parse. Its meaning changes only with `schema_version`."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import attn_spec
from attn_spec.engine import CheckResult
from attn_spec.report.judgement import Judgement

if TYPE_CHECKING:
    from attn_spec.faults.diagnosis import Diagnosis

SCHEMA_VERSION = 1


def document(judgements: Sequence[Judgement], *, profile: str, seed: int, duration_s: float) -> dict[str, Any]:
    """The whole document, as plain data."""
    return {
        "schema_version": SCHEMA_VERSION,
        "attn_spec_version": attn_spec.__version__,
        "profile": profile,
        "seed": seed,
        "duration_s": round(duration_s, 3),
        "environment": environment(),
        "implementations": [_implementation(judgement) for judgement in judgements],
    }


def write(path: Path, judgements: Sequence[Judgement], *, profile: str, seed: int, duration_s: float) -> None:
    data = document(judgements, profile=profile, seed=seed, duration_s=duration_s)
    path.write_text(json.dumps(finite(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def environment() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "pytest": pytest.__version__,
        "platform": platform.platform(),
        "cuda": torch.version.cuda if cuda else None,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
    }


def _implementation(judgement: Judgement) -> dict[str, Any]:
    implementation = judgement.implementation
    return {
        "name": judgement.name,
        "target": implementation.target,
        "verdict": judgement.verdict,
        "conventions": implementation.conventions.to_dict(),
        "precision": {
            dtype: {"scores": p.scores, "weights": p.weights, "accumulate": p.accumulate}
            for dtype, p in implementation.precision.items()
        },
        "counts": judgement.counts,
        "checks": [_check(judgement, r, n) for r, n in zip(judgement.results, judgement.nodeids, strict=True)],
        "diagnosis": [_diagnosed(judgement, found) for found in judgement.diagnosis],
        "stale_known_failures": [{"check": k.check, "problem": k.problem} for k in judgement.stale],
        "notes": list(implementation.notes),
    }


def _check(judgement: Judgement, result: CheckResult, nodeid: str) -> dict[str, Any]:
    failed = result.outcome == "failed"
    return {
        "code": result.code,
        "name": result.name,
        "outcome": result.outcome,
        "nodeid": nodeid,
        "message": result.message,
        "problem": result.problem.to_dict(),
        "reproducer": judgement.reproducer(result) if failed else "",
        "duration_s": round(result.duration_s, 5),
        "hint": result.hint,
        "evidence": result.evidence,
    }


def _diagnosed(judgement: Judgement, found: Diagnosis) -> dict[str, Any]:
    return {
        "fault": found.fault.id,
        "title": found.fault.title,
        "explains": judgement.explained,
        "reproduces": f"{found.reproduces}/{found.of}",
        "diff": found.fault.diff,
        "advice": found.fault.advice,
    }


def finite(data: Any) -> Any:
    """The same data with NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data
