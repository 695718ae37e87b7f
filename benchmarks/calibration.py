"""The calibration of the bound: the largest error in units of the bound, for honest implementations in every dtype.

    python benchmarks/calibration.py [--write docs/calibration.md]

For each implementation and dtype: all problems of the `quick` suites in that dtype, and the same problems in other
dtypes cast to it, compared with the oracle under the precision that was measured for it. A figure of 1 or more would be
a false alarm; a figure that is near 0 everywhere would mean a bound that catches nothing. Exit status 1 above 0.95.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import attn_spec
from attn_spec import tolerance
from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.resolve import resolve
from attn_spec.engine import as_asked
from attn_spec.fuzzing import Search
from attn_spec.invariants.comparison import answer_to, arguments_for, output
from attn_spec.invariants.differentiation import gradients
from attn_spec.invariants.variants import lse_bound
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import Problem
from attn_spec.suites import all_tests

ROOT = Path(__file__).parent.parent
DTYPES = ("float64", "float32", "bfloat16", "float16")
ADVISORY_VALUES = ("deep",)  # logits of -30,000, which half types can't tell apart


BUILTINS = ("naive", "tiled", "sdpa", "sdpa-math", "sdpa-flash", "variants")
# what a user would declare of some of them
DECLARED: dict[str, dict[str, str]] = {
    "torch_names_bottom_right": {"alignment": "bottom-right", "window_alignment": "bottom-right"},
    "sdpa_sliding_window": {"causal": "always", "alignment": "bottom-right", "window": "count"},
}


def implementations() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The built-in ones, and those of tests/blind."""
    for name in BUILTINS:
        yield name, resolve(name).object
    yield from of_files("honest", "honest_more", "flash_honest", "flash_honest_more")


def of_files(*files: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    for file in files:
        path = ROOT / "tests" / "blind" / f"{file}.py"
        spec = importlib.util.spec_from_file_location(file, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for group in ("HONEST", "HONEST_SMALL"):
            yield from getattr(module, group, {}).items()


def adapted(function: Callable[..., Any], name: str) -> Implementation:
    return adapt(function, name=name, declared=DECLARED.get(name, {}))


def problems() -> list[Problem]:
    found = [p for _, _, test in all_tests() for p in test.problems("quick") if p.values not in ADVISORY_VALUES]
    plain = [p.replace(dtype="float32") for p in found if (p.scale is None or p.scale > 0) and not p.dropout]
    return list(dict.fromkeys(p for p in plain if p.cost <= 2e6 and not p.delivery.dtype))


def largest(function: Callable[..., Any], name: str, dtype: str, tried: list[Problem]) -> tuple[float, int, str] | None:
    """The largest error / bound, how many problems were compared, and the problem it was largest on."""
    made = adapted(function, name)
    if dtype not in made.precision:
        return None
    worst, compared, where = 0.0, 0, ""
    for problem in tried:
        asked = as_asked(made, problem.replace(dtype=dtype))
        try:
            out = output(made, arguments_for(made, asked))
        except (Refused, Unsupported, Violation):
            continue
        ratio = answer_to(made, asked).compare(out).ratio
        if ratio == float("inf") and dtype == "float16":  # a product beyond 65,504: law ATN806 is about these
            continue
        compared += 1
        if ratio > worst:
            worst, where = ratio, str(asked)
    return worst, compared, where


GRADIENTS = ("q", "k", "v", "bias", "sinks")
RESULTS = (*(f"d{name}" for name in GRADIENTS), "lse")


def of_gradients(function: Callable[..., Any], name: str, dtype: str) -> dict[str, tuple[float, int]]:
    """For each gradient, and for the log-sum-exp, the largest error / bound and how many problems were compared."""
    made = adapted(function, name)
    found: dict[str, tuple[float, int]] = {}

    def enter(result: str, ratio: float) -> None:
        worst, compared = found.get(result, (0.0, 0))
        found[result] = max(worst, ratio), compared + 1

    for problem in gradient_problems():
        asked = as_asked(made, problem.replace(dtype=dtype))
        try:
            one = gradients(made, asked)
            for field in GRADIENTS:
                if getattr(one.gradients, field) is not None:
                    enter(f"d{field}", one.right.compare(field, getattr(one.gradients, field)).ratio)
        except (Refused, Unsupported, Violation):
            pass
        try:
            lse = made(arguments_for(made, asked).replace(returns="lse")).lse
        except (Refused, Unsupported, Violation):
            continue
        if lse is not None:
            right = answer_to(made, asked)
            enter("lse", tolerance.worst(lse, right.lse, lse_bound(lse, right.bounds.lse, right.lse)).ratio)
    return found


def gradient_problems() -> list[Problem]:
    """Those of the gradient suite, empty rows apart, whose log-sum-exp is an infinity."""
    tests = [t for _, _, t in all_tests() if t.law.theme == "gradients" and t.law.code not in ("ATN908", "ATN912")]
    plain = [p.replace(dtype="float32") for t in tests for p in t.problems("quick") if not isinstance(p, Search)]
    return list(dict.fromkeys(plain))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", type=Path)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    tried = problems()
    lines = [
        "# Calibration of the error bound",
        "",
        f"Largest error / bound over the problems of the `quick` suites ({len(tried)}, each in every dtype), by",
        f"`python benchmarks/calibration.py`, attn-spec {attn_spec.__version__}, torch {torch.__version__}, on a CPU.",
        "In brackets: how many problems the implementation takes. Below 1 there is no false alarm.",
        "",
        f"| implementation | {' | '.join(DTYPES)} |",
        f"|---|{'---|' * len(DTYPES)}",
    ]
    overall = dict.fromkeys(DTYPES, 0.0)
    for name, function in implementations():
        cells = []
        for dtype in DTYPES:
            found = largest(function, name, dtype, tried)
            cells.append("not taken" if found is None else f"{found[0]:.3f} ({found[1]})")
            if found is not None:
                overall[dtype] = max(overall[dtype], found[0])
                if found[0] > 0.95:
                    print(f"{name} in {dtype}: {found[0]:.3f} on {found[2]}", file=sys.stderr)
        lines.append(f"| {name} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    lines.append(f"| **largest** | {' | '.join(f'**{overall[dtype]:.3f}**' for dtype in DTYPES)} |")
    print(lines[-1])
    lines += [
        "",
        "Gradients with random cotangents, and the log-sum-exp, over the problems of its suite, with their masks,",
        "windows, caps, slopes and sinks that these hold:",
        "",
        f"| implementation, dtype | {' | '.join(RESULTS)} |",
        f"|---|{'---|' * len(RESULTS)}",
    ]
    worst, largest_of = 0.0, dict.fromkeys(RESULTS, 0.0)
    for name, function in implementations():
        for dtype in DTYPES:
            results = of_gradients(function, name, dtype)
            if not results:
                continue
            cells = [f"{results[r][0]:.3f} ({results[r][1]})" if r in results else "" for r in RESULTS]
            worst = max(worst, *(ratio for ratio, _ in results.values()))
            largest_of.update({r: max(largest_of[r], ratio) for r, (ratio, _) in results.items()})
            lines.append(f"| {name}, {dtype} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    lines.append(f"| **largest** | {' | '.join(f'**{largest_of[r]:.3f}**' for r in RESULTS)} |")
    overall["gradients"] = worst
    if chosen.write:
        chosen.write.write_text("\n".join(lines) + "\n")
    return int(max(overall.values()) > 0.95)


if __name__ == "__main__":
    raise SystemExit(main())
