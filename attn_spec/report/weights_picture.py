"""The picture that `--attn-heatmap=FILE` draws: the weights of an implementation beside the oracle's."""

from __future__ import annotations

from pathlib import Path

import torch

from attn_spec import masks
from attn_spec.engine import as_asked
from attn_spec.invariants.comparison import arguments_for, recovered
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.masks import Causal
from attn_spec.problem import Problem
from attn_spec.report.heatmap import heatmap, save
from attn_spec.report.judgement import Judgement

PLAIN = Problem(batch=1, heads=2, kv_heads=2, q_len=9, kv_len=9, head_dim=16, v_dim=16)
LARGEST = 64  # keys that can be told apart in a picture


def draw(judgement: Judgement, path: Path) -> str:
    """Draw the weights on the problem of the most telling violation, else on a plain one; a line that says so.

    The weights are read off with a one-hot V, and so are those of a function whose inside can't be seen.
    """
    implementation, first = judgement.implementation, judgement.telling
    asked = [first.first.problem] if first is not None else []
    plain = [PLAIN.replace(mask=(Causal(),)), PLAIN]
    for problem in [*(p for p in asked if 0 < p.q_len <= LARGEST and 0 < p.kv_len <= LARGEST and p.batch), *plain]:
        problem = as_asked(implementation, problem)
        try:
            weights, right = recovered(implementation, arguments_for(implementation, problem))
        except (Unsupported, Refused, Violation):
            continue
        expected = right.output[..., : problem.kv_len]
        alignment = implementation.conventions.meaning.alignment
        visible, _ = masks.combined(problem.mask, problem.sizes, problem.seed, alignment)
        hidden = None if visible is None else ~visible.expand(problem.sizes)[0]
        figure = heatmap(
            weights[0].double(),
            expected=expected[0],
            hidden=hidden,
            title=f"{implementation.name}, {problem}, sample 0",
        )
        save(figure, path)
        largest = float((weights[0].double() - expected[0]).abs().nan_to_num(nan=torch.inf).max())
        return f"weights on {problem} drawn in {path}: largest difference from the oracle {largest:.3g}"
    return f"{path} not drawn: no weights could be read off"


def own_path(path: Path, name: str, several: bool) -> Path:
    """The file for one of several implementations: heat.png, heat-fast.png."""
    return path.with_name(f"{path.stem}-{name}{path.suffix}") if several else path
