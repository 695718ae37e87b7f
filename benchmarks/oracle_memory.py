"""The peak memory of the oracle against the sequence length: the slope on a log-log fit must be near 1, not 2.

    python benchmarks/oracle_memory.py

Each length runs in a child process of its own, which reports how far its resident peak rose above what it held with the
inputs in place. Ends with exit status 1 where the slope is above 1.25.
"""

import math
import os
import resource
import subprocess
import sys

LENGTHS = (2048, 4096, 8192)


def measure(length: int) -> int:
    """Bytes that the oracle takes beyond the inputs, for causal attention with key padding at this length."""
    import torch

    from attn_spec import oracle, tolerance
    from attn_spec.conventions import Meaning
    from attn_spec.masks import Causal, Delivery, KeyPadding
    from attn_spec.problem import Problem

    torch.set_num_threads(1)
    precision = tolerance.candidates("float32")[0]
    mask = (Causal(), KeyPadding((length - 100,)))
    small = Problem(
        batch=1, heads=2, kv_heads=1, q_len=64, kv_len=64, head_dim=64, v_dim=64, mask=(Causal(),), values="mild"
    )
    oracle.answer(small.arguments(), Meaning(), precision)  # what torch allocates once, whatever the length
    problem = small.replace(q_len=length, kv_len=length, mask=mask, delivery=Delivery("key-padding"))
    arguments = problem.arguments()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    oracle.answer(arguments, Meaning(), precision)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main() -> int:
    peaks = []
    for length in LENGTHS:
        # memory that is freed goes back to the system at once, so that the resident peak is what was in use
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
        command = [sys.executable, __file__, str(length)]
        out = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
        peaks.append(int(out))
        full = 8 * 2 * length * length
        print(
            f"S = {length:5}: peak above the inputs {peaks[-1] / 2**20:7.1f} MiB (all logits: {full / 2**20:6.0f} MiB)"
        )
    x, y = [math.log(n) for n in LENGTHS], [math.log(p) for p in peaks]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
    print(f"slope on a log-log fit: {slope:.2f} (1 = linear in S, 2 = quadratic)")
    return int(slope > 1.25)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(measure(int(sys.argv[1])))
    else:
        raise SystemExit(main())
