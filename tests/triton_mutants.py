"""Faults planted in the Triton kernels by changing one line of their source, each with the names that it deserves."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import attn_spec.reference.fused as fused
from attn_spec.adapters.function import FunctionAdapter
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.resolve import resolve
from attn_spec.adapters.signature import read
from attn_spec.conventions import Conventions, Finding
from attn_spec.costs import in_rounds
from attn_spec.engine import RAN, Subject
from attn_spec.interpreter import turn_on
from attn_spec.kills import checks
from attn_spec.report.judgement import Judgement

FILES = ("triton_forward", "triton_backward", "triton")  # in the order in which they import each other
PACKAGE = "attn_spec.reference.fused"


@dataclass(frozen=True)
class Mutant:
    """One changed line.

    file: the module of the kernel.  right, wrong: the line as it is and as it becomes, both without indentation.
    named: the faults of the catalogue of which the diagnosis names one; () where it names none.  laws: those that are
    tried before the others, where what a judged run tries first is long in catching it.
    """

    name: str
    file: str
    right: str
    wrong: str
    named: tuple[str, ...] = ()
    laws: tuple[str, ...] = ()

    def plant(self, folder: Path) -> str:
        """Write the changed kernels to a folder; the target that runs them. Raises ValueError where no line fits."""
        short = self.name.replace("-", "_")
        for file in FILES:
            text = (Path(fused.__path__[0]) / f"{file}.py").read_text()
            if file == self.file:
                lines = text.splitlines(keepends=True)
                places = [n for n, line in enumerate(lines) if line.strip() == self.right]
                if not places:
                    raise ValueError(f"{self.name}: no line {self.right!r} in {file}.py")
                for n in places:
                    lines[n] = lines[n].replace(self.right, self.wrong)
                text = "".join(lines)
            for other in FILES:
                text = text.replace(f"from {PACKAGE}.{other} import", f"from {short}_{other} import")
            (folder / f"{short}_{file}.py").write_text(text)
        return f"{folder / f'{short}_triton.py'}:triton_attention"


MUTANTS = (
    Mutant(
        "tail-mask-missing",
        "triton_forward",
        "seen = (j < kv_len)[None, :] & (ahead >= -left) & (ahead <= right)",
        "seen = (ahead >= -left) & (ahead <= right)",
        ("tail-keys-unmasked-16",),
    ),
    Mutant(
        "rescale-missing",
        "triton_forward",
        'o = rescale[:, None] * o + tl.dot(p.to(v.dtype), v, input_precision="ieee")',
        'o = o + tl.dot(p.to(v.dtype), v, input_precision="ieee")',
        ("online-softmax-output-unrescaled-16",),
        laws=("ATN804", "ATN805"),
    ),
    Mutant(
        "exp2-without-log2e",
        "triton_forward",
        's = tl.where(seen, s * LOG2E, float("-inf"))',
        's = tl.where(seen, s, float("-inf"))',
        ("softmax-in-base-two",),
    ),
    Mutant(
        "v-read-with-strides-of-k",
        "triton_forward",
        "v_at = places(v_ptr + b * v_b + kv_head * v_h, j, e, v_j, v_d)",
        "v_at = places(v_ptr + b * v_b + kv_head * v_h, j, e, k_j, k_d)",
        (),  # what lies beyond the end of v is read too, and no fault can tell what that was
        laws=("ATN603", "ATN306", "ATN305"),
    ),
    Mutant(
        "accumulator-in-float16",
        "triton_forward",
        "m = m_new",
        "m, o = m_new, o.to(tl.float16).to(tl.float32)",
        ("output-summed-in-float16-16",),
    ),
    Mutant(
        "last-block-skipped",
        "triton_forward",
        "last = tl.minimum(block + BLOCK_M + offset + right, kv_len)",
        "last = tl.minimum(block + BLOCK_M + offset + right, kv_len // BLOCK_N * BLOCK_N)",
        ("short-and-tail-keys-dropped-16",),
    ),
    Mutant(
        "window-edge-off-by-one",
        "triton_forward",
        "seen = (j < kv_len)[None, :] & (ahead >= -left) & (ahead <= right)",
        "seen = (j < kv_len)[None, :] & (ahead > -left) & (ahead <= right)",
        ("window-one-key-less",),
        laws=("ATN701", "ATN702", "ATN703"),
    ),
    Mutant(
        "lse-in-base-two",
        "triton_forward",
        "lse = (m + tl.log2(tl.where(l == 0.0, 1.0, l))) / LOG2E",
        "lse = m + tl.log2(tl.where(l == 0.0, 1.0, l))",
        ("lse-in-base-two", "recompute-in-base-two"),
    ),
    Mutant(
        "dk-without-scale",
        "triton_backward",
        "store(dk_ptr + b * dk_b + kv_head * dk_h, dk * scale, j, d, dk_j, dk_d, kv_len, head_dim)",
        "store(dk_ptr + b * dk_b + kv_head * dk_h, dk, j, d, dk_j, dk_d, kv_len, head_dim)",
        ("key-gradient-unscaled",),
        laws=("ATN902", "ATN906", "ATN910"),
    ),
    Mutant(
        "kv-head-modulo",
        "triton_forward",
        "kv_head = h // group",
        "kv_head = h % (heads // group)",
        ("kv-heads-tiled",),
        laws=("ATN603", "ATN605", "ATN306", "ATN305"),
    ),
)


# judged in a process of its own, where nothing has imported triton before ---------------------------------------------

FAILURES = 5  # after which a mutant is caught beyond doubt, and the diagnosis has something to go by


def judged(target: str, laws: tuple[str, ...] = ()) -> dict[str, object]:
    """What the checks of `quick` in float32 say of a target, in the order in which a judged run tries them.

    laws: of which all checks come first.

    Conventions are those of the names, not measured ones: a second for each target less.
    """
    start = time.process_time()
    function = resolve(target).object
    names = {"causal": "flag", "alignment": "bottom-right", "window_alignment": "bottom-right", "lse_base": "e"}
    conventions = Conventions().replace(**{name: Finding(value, "assumed", "") for name, value in names.items()})
    adapter = FunctionAdapter(function, read(function, target), conventions)
    implementation = Implementation("mutant", target, adapter, conventions)
    subject, failed = Subject(implementation), []
    tried = [check for check in checks("quick", "") if check[1].dtype == "float32"]
    ordered = in_rounds(tried, lambda check: check[:2])
    for law, problem, name in sorted(ordered, key=lambda check: check[0].code not in laws):
        result = subject.judge(law, problem, name)
        if result.red:
            failed.append(result.code)
        if len(failed) >= FAILURES:
            break
    judgement = Judgement(implementation, subject.results)
    judgement.diagnose()
    return {
        "failed": failed,
        "ran": sum(result.outcome in RAN for result in subject.results),
        "named": [found.fault.id for found in judgement.diagnosis],
        "seconds": time.process_time() - start,
    }


if __name__ == "__main__":
    turn_on()
    torch.set_num_threads(1)
    wanted = sys.argv[2:]
    for mutant in MUTANTS:
        if not wanted or mutant.name in wanted:
            said = judged(mutant.plant(Path(sys.argv[1])), mutant.laws)
            print(json.dumps({"mutant": mutant.name, **said}), flush=True)
