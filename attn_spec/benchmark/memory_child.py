"""The process in which the peak memory of one call is measured: `python -m attn_spec.benchmark.memory_child`.

Reads a pickled question from stdin, answers on stdout. Nothing but torch and the target is loaded before the peak is
reset, and the call is made once on a short problem first, for what is set up once.
"""

from __future__ import annotations

import contextlib
import pickle
import resource
import sys
from pathlib import Path
from typing import Any

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> int:
    question = pickle.load(sys.stdin.buffer)
    sys.path[:] = question["path"]
    answer: dict[str, Any] = {}
    try:
        answer["peaks"] = _measured(question)
    except Exception as error:
        from attn_spec.law import Unsupported

        text = " ".join(str(error).split())[:400]
        answer |= {"error": f"{type(error).__name__}: {text}", "unsupported": isinstance(error, Unsupported)}
    sys.stdout.flush()
    sys.stdout.buffer.write(b"ANSWER" + pickle.dumps(answer))
    return 0


def _measured(question: dict[str, Any]) -> list[int]:
    import torch

    from attn_spec.adapters.function import FunctionAdapter
    from attn_spec.adapters.modules.adapter import callable_of
    from attn_spec.adapters.resolve import resolve
    from attn_spec.benchmark.calls import prepared
    from attn_spec.benchmark.expected import inputs

    torch.set_num_threads(question["threads"])
    problems, conventions = question["problems"], question["conventions"]
    found = resolve(question["target"])
    function = callable_of(found.object, found.name, question["declared"])
    adapter = FunctionAdapter(function, question["signature"], conventions, question["fixed"])
    meaning = conventions.meaning
    with torch.no_grad():
        first = problems[0]
        adapter(inputs(first.replace(q_len=min(first.q_len, 64), kv_len=min(first.kv_len, 64)), meaning, 0))
        peaks = []
        for problem in problems:
            call = prepared(adapter, inputs(problem, meaning, 0))
            if RESET.exists():
                call()  # what is compiled for these sizes is compiled now
            _forget_peak()
            before = resident_peak()
            returned = call()
            peaks.append(max(resident_peak() - before, 0))
            del call, returned
    return peaks


def resident_peak() -> int:
    """Bytes: the high-water mark of this process alone; what `getrusage` says may be that of its parent."""
    if STATUS.exists():
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_peak() -> None:
    """Set the high-water mark to what is resident now, where Linux lets a process do so."""
    with contextlib.suppress(OSError):
        RESET.write_text("5")


if __name__ == "__main__":
    raise SystemExit(main())
