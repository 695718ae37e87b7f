"""Choose the problems of `attn_spec/suites/chosen.yaml`, and write the arrays of three features to `three_way.yaml`.

    python benchmarks/choose_problems.py

Takes some minutes on one core. Running it twice gives the same files. To be run when a fault, a factor of
`attn_spec.choice.features` or the bound has changed; tests/test_choice.py tells when the file is no longer true.
"""

from __future__ import annotations

import time

import torch

from attn_spec.choice import chosen as file
from attn_spec.choice import selection
from attn_spec.choice.matrix import CLEAR, Margins, matrix
from attn_spec.faults import CATALOGUE

HEADER = """Written by `python benchmarks/choose_problems.py`; not to be edited.

The fewest problems found in which every pair of features stands together and every fault of the catalogue that a
comparison of outputs can see is caught by two problems, its error at least 10 bounds.
covers: how many faults a problem catches.  only_here: how many pairs of features no other has.  needed_by: the faults
that it and at most one other catch, or that it alone does of the problems that most implementations take (float32, no
key padding, no mask beside the causal flag).  weak: faults that no two candidates catch by 10 bounds, and what counts
for them.
"""
THREE = """Written by `python benchmarks/choose_problems.py`; not to be edited.

Every three features that can stand together do so in one of these problems.
"""


def said(text: str) -> None:
    print(f"{time.process_time():6.1f} s: {text}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    arrays = [selection.array(2, seed=seed) for seed in range(6)]
    said(f"arrays of pairs: {', '.join(str(len(problems)) for problems in arrays)} problems")
    three = selection.array(3, draws=12_000, starts=2)
    said(f"array of threes: {len(three)} problems")
    candidates = list(dict.fromkeys(problem for problems in (*arrays, three) for problem in problems))
    of_plain_calls = [fault for fault in CATALOGUE.values() if fault.theme not in ("variants", "gradients")]
    lines = matrix(of_plain_calls, candidates, lambda done: None if done % 50 else said(f"{done} faults"))
    seen = [line for line in lines if line.catchers(1.0)]
    weak = {line.fault.id: line.enough for line in seen if line.enough < CLEAR}
    chosen = selection.choose(seen, candidates, arrays)
    on_chosen = [Margins(line.fault, line.meaning, {p: line.on[p] for p in chosen}) for line in seen]
    entries = selection.reasons(chosen, on_chosen, weak)
    unseen = [line.fault.id for line in lines if not line.catchers(1.0)]
    header = f"{HEADER}\n{len(candidates)} candidates, {len(chosen)} chosen, {len(seen)} faults."
    header += f" Left to other laws: {', '.join(unseen)}." if unseen else ""
    file.CHOSEN.write_text(file.text_of(entries, weak, header))
    rest = [problem for problem in three if problem not in set(chosen)]
    file.THREE_WAY.write_text(file.listed(rest, THREE))
    said(f"{len(candidates)} candidates, {len(chosen)} chosen; {len(rest)} more in the array of threes")
    twice = sum(len(line.catchers(CLEAR)) >= 2 for line in on_chosen)
    said(f"of {len(lines)} faults {len(seen)} are seen, {twice} by two problems and 10 bounds; not seen: {unseen}")
    for line in sorted(on_chosen, key=lambda line: sorted(line.on.values())[-2])[:12]:
        best = sorted(line.on.items(), key=lambda item: -item[1])[:2]
        said(f"{line.fault.id}: {', '.join(f'{margin:.3g} on {problem}' for problem, margin in best)}")


if __name__ == "__main__":
    main()
