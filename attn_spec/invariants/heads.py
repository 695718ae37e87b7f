"""Heads: each query head reads its own kv head, and no head sees another."""

from __future__ import annotations

import torch

from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.measure import read_heads
from attn_spec.invariants.comparison import (
    agrees,
    alike,
    answer_to,
    arguments_for,
    needs_heads_alike,
    output,
    require_within,
    same,
)
from attn_spec.law import Advisory, Refused, Unsupported, Violation, law
from attn_spec.problem import Problem


@law("ATN601", "kv-head-of-each-query-head", "Query head h reads kv head h // (H / Hkv)")
def kv_head_of_each_query_head(implementation: Implementation, problem: Problem) -> None:
    """V constant in each kv head: the output of query head h names the kv head that it read

    Why: checkpoints are trained with contiguous groups; tiled ones run, and are another model.
    Example: `k.repeat(1, g, 1, 1)` for `k.repeat_interleave(g, 1)`; the kv head as h // Hkv.
    """
    arguments = arguments_for(implementation, problem)
    group = problem.heads // problem.kv_heads
    if implementation.conventions.grouping.value == "tiled":
        expected = [h % problem.kv_heads for h in range(problem.heads)]
    else:
        expected = [h // group for h in range(problem.heads)]
    output(implementation, arguments)  # refusals and shapes first
    got = read_heads(implementation, arguments)
    if got != expected:
        received = f"read kv heads {got}" if got else "mix kv heads"
        raise Violation(
            f"the {problem.heads} query heads {received}, expected {expected}",
            evidence={"expected": expected, "received": got},
            hint="share k and v out with `repeat_interleave(H // Hkv, dim=1)`",
            merge="grouping",
        )


@law("ATN602", "multi-query", "One kv head serves every query head")
def multi_query(implementation: Implementation, problem: Problem) -> None:
    """Hkv = 1

    Why: the extreme case of groups, where an index that is off has nowhere to go.
    Example: kv head h // Hkv, which is h for Hkv = 1.
    """
    agrees(implementation, problem)


@law("ATN603", "grouped-equals-expanded", "Grouped heads give what their expansion gives")
def grouped_equals_expanded(implementation: Implementation, problem: Problem) -> None:
    """f(q, k, v) = f(q, k repeated, v repeated)

    Why: the group is a saving of memory and nothing else.
    Example: logits averaged over a group before the softmax.
    """
    needs_heads_alike(implementation)
    arguments = arguments_for(implementation, problem)
    group = problem.heads // problem.kv_heads
    if implementation.conventions.grouping.value == "tiled":
        k, v = (x.repeat(1, group, 1, 1) for x in (arguments.k, arguments.v))
    else:
        k, v = (x.repeat_interleave(group, dim=1) for x in (arguments.k, arguments.v))
    exact = answer_to(implementation, problem)
    got = output(implementation, arguments)
    require_within(exact.compare(got), "output")
    because = "k and v repeated for every query head give another output"
    expanded = arguments.replace(k=k, v=v)
    worst = alike(implementation, output(implementation, expanded), got, expanded, exact.bounds.output)
    require_within(worst, "output", because=because)


@law("ATN604", "heads-apart", "A head depends on its own q, k and v only")
def heads_apart(implementation: Implementation, problem: Problem) -> None:
    """q, k, v of one kv head changed  =>  the output of the other groups unchanged

    Why: heads scrambled on the way in or out still give plausible numbers, and train.
    Example: `view(B, H, S, D)` of a [B, S, H D] tensor.
    """
    if implementation.between == "norm over heads":
        raise Unsupported("its q and k are normalised over all heads at once")
    arguments = arguments_for(implementation, problem)
    group = problem.heads // problem.kv_heads
    q, k, v = arguments.q.clone(), arguments.k.clone(), arguments.v.clone()
    heads = [h for h in range(problem.heads) if h // group == 0]
    if implementation.conventions.grouping.value == "tiled":
        heads = [h for h in range(problem.heads) if h % problem.kv_heads == 0]
    q[:, heads], k[:, 0], v[:, 0] = q[:, heads].flip(2) * 2, -k[:, 0], v[:, 0] + 100.0
    bound = answer_to(implementation, problem).bounds.output
    before = output(implementation, arguments)
    after = output(implementation, arguments.replace(q=q, k=k, v=v))
    others = [h for h in range(problem.heads) if h not in heads]
    worst = same(after[:, others], before[:, others], bound[:, others])
    if not worst.holds:
        raise Violation(
            f"changing q, k and v of kv head 0 moves the output of query head {others[worst.index[1]]} from "
            f"{worst.expected:.6g} to {worst.got:.6g}",
            hint="split with `view(B, S, H, D).transpose(1, 2)`, merge with `transpose(1, 2).reshape(B, S, H * D)`",
            merge="heads-mixed",
        )


@law("ATN605", "grouped-with-features", "Grouped heads hold together with every other feature")
def grouped_with_features(implementation: Implementation, problem: Problem) -> None:
    """the output of the oracle with groups, causal, a mask for each query head, a scale, ...

    Why: a per-head mask under groups is easily indexed by the kv head.
    Example: `mask[:, h // group]`.
    """
    agrees(implementation, problem)


@law("ATN606", "indivisible-heads", "Head counts that do not divide are refused", advisory=True)
def indivisible_heads(implementation: Implementation, problem: Problem) -> None:
    """H = 3 query heads on 2 kv heads: a clear exception (advisory, red when strict)

    Why: H // Hkv rounds down, and some heads are left out or read out of bounds.
    Example: an output whose last heads were never written.
    """
    arguments = arguments_for(implementation, problem)
    wrong = arguments.replace(q=torch.cat([arguments.q, arguments.q[:, :1]], dim=1))
    try:
        implementation(wrong)
    except (Refused, Unsupported, Violation):
        return
    raise Advisory(
        f"takes {wrong.q.shape[1]} query heads on {wrong.k.shape[1]} kv heads without complaint",
        hint="raise ValueError unless H is a multiple of Hkv",
        merge="indivisible-heads",
    )
