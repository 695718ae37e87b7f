"""How soon fuzzing alone, without one chosen problem, finds the faults of the catalogue, and how small it makes them.

    python benchmarks/fuzz_faults.py [--count 40] [--seed 0] [--seconds 60]

For each of `count` faults drawn with the seed: the fuzz suite is run on it with as many problems as `quick` draws, then
as `ci` and as `deep` do, until a check fails. A fault that shows under some conventions only (alignment, the value of
empty rows, grouping) is searched for under each in turn, all within the same seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from dataclasses import dataclass

import torch

from attn_spec import fuzzing
from attn_spec.choice.matrix import MEANINGS
from attn_spec.engine import CheckResult, Subject
from attn_spec.faults import CATALOGUE, Fault
from attn_spec.faults.planted import planted
from attn_spec.problem import Problem
from attn_spec.suites import Test, all_tests


@dataclass(frozen=True)
class Found:
    """What fuzzing found of a fault (None: nothing), and the CPU seconds it took, making it small included."""

    fault: Fault
    result: CheckResult | None
    seconds: float


def fuzz_tests() -> list[Test]:
    return [test for module, _, test in all_tests() if module == "test_fuzz"]


def found(fault: Fault, *, seconds: float = 60.0, seed: int = 0) -> Found:
    """Fuzz one fault until a check fails."""
    start = time.process_time()
    subjects = [Subject(planted(fault, meaning)) for meaning in MEANINGS]
    for profile in ("quick", "ci", "deep"):
        for subject in subjects:
            for test in fuzz_tests():
                spent = time.process_time() - start
                if spent > seconds:
                    return Found(fault, None, spent)
                subject.deadline = time.perf_counter() + 2 * (seconds - spent)
                search = fuzzing.Search(examples=fuzzing.EXAMPLES[profile], seed=seed)
                result = test.judge(subject, search, "")
                if result.outcome == "failed":
                    return Found(fault, result, time.process_time() - start)
    return Found(fault, None, time.process_time() - start)


def not_default(problem: Problem) -> list[str]:
    """The fields of a problem that differ from the defaults."""
    return [f.name for f in dataclasses.fields(Problem) if getattr(problem, f.name) != getattr(Problem(), f.name)]


def main() -> None:
    parser = argparse.ArgumentParser(description="how soon fuzzing alone finds the faults of the catalogue")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    faults = sorted((fault for fault in CATALOGUE.values() if not fault.equivalent), key=lambda fault: fault.id)
    chosen = random.Random(options.seed).sample(faults, min(options.count, len(faults)))
    print(f"{len(chosen)} of {len(faults)} faults, seed {options.seed}, {options.seconds:g} CPU seconds each\n")
    print("| fault | CPU s | law | smallest problem | fields that are not the default |")
    print("|---|---|---|---|---|")
    rows = []
    for fault in chosen:
        row = found(fault, seconds=options.seconds, seed=options.seed)
        rows.append(row)
        law, problem, fields = "-", "not found", ""
        if row.result is not None:
            law, problem, fields = row.result.code, str(row.result.problem), ", ".join(not_default(row.result.problem))
        print(f"| {fault.id} | {row.seconds:.2f} | {law} | `{problem}` | {fields} |", flush=True)
    hits = [row for row in rows if row.result is not None]
    sizes = [len(not_default(row.result.problem)) for row in hits if row.result is not None]
    spent = [row.seconds for row in rows]
    print(f"\nfound {len(hits)} of {len(rows)}")
    print(f"CPU seconds: median {statistics.median(spent):.2f}, largest {max(spent):.2f}")
    print(f"fields that are not the default: median {statistics.median(sizes):g}, largest {max(sizes)}")


if __name__ == "__main__":
    main()
