"""Faults of packed sequences: where a sample begins and ends, how its causality stands, where its rows go.

Each is one changed block of `attn_spec.packing_blocks`. They are told apart by running the blocks on the problems that
a packed function failed on and on those that it passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_spec import oracle, tolerance
from attn_spec.faults.behaviour import BEHAVIOUR_FAULTS, DIAGNOSES, BehaviourFault, catalogue
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.packing_blocks import BLOCKS, Offsets, packed_attention

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.engine import CheckResult
    from attn_spec.faults.diagnosis import Diagnosis
    from attn_spec.problem import Arguments

SLACK = 4.0  # times the bound: a fault's answer is worked out in float64, what is compared with it was not
MOST = 24  # problems that are looked at

fault = catalogue("variants", BLOCKS)


@fault(
    "keys",
    "packed samples see each other's keys",
    sources=("Tencent-Hunyuan/HunyuanVideo#310", "axolotl-ai-cloud/axolotl#3796"),
    advice="Let each sample see the keys between its own two offsets, on every path.",
)
def samples_see_each_other(at: Offsets, n: int) -> slice:
    return slice(0, at.k[-1])


@fault(
    "keys",
    "the offsets of packed samples are read up to the first only; what follows it is one sample",
    sources=("Tencent-Hunyuan/HunyuanVideo#310",),
    advice="Go through all the offsets.",
)
def samples_split_once(at: Offsets, n: int) -> slice:
    return slice(0, at.k[1]) if n == 0 else slice(at.k[1], at.k[-1])


@fault(
    "keys",
    "the keys of a packed sample are sought at multiples of the longest length",
    sources=("NVIDIA/FasterTransformer#270",),
    advice="Begin at the sample's own offset: what is packed has no padding.",
)
def samples_at_multiples_of_longest(at: Offsets, n: int) -> slice:
    return slice(n * at.longest_k, n * at.longest_k + at.k[n + 1] - at.k[n])


@fault(
    "keys",
    "the length of a packed sample is measured from the first offset, and not from its own",
    sources=("zhuzilin/ring-flash-attention#78",),
    advice="Take the difference of neighbouring offsets: cu_seqlens[1:] - cu_seqlens[:-1].",
)
def sample_length_from_first_offset(at: Offsets, n: int) -> slice:
    return slice(at.k[n], at.k[n] + at.k[n + 1] - at.k[0])


@fault(
    "queries",
    "with one query each, packed samples are taken for as many queries as samples, whichever are empty",
    sources=("Dao-AILab/flash-attention#1537",),
    advice="Read where a sample begins from its offset; the longest may have one query and others none.",
)
def empty_sample_shifts_the_rest(at: Offsets, n: int) -> slice:
    return slice(n, n + 1) if at.longest_q == 1 else slice(at.q[n], at.q[n + 1])


@fault(
    "shift",
    "causality in a packed sample is aligned by the longest lengths, and not by its own",
    sources=("scouzi1966/maclocal-api#92",),
    advice="Align by the sample's own numbers of queries and keys.",
)
def causal_by_longest_sample(at: Offsets, n: int) -> int:
    return at.longest_k - at.longest_q


@fault(
    "shift",
    "causality in every packed sample is aligned by the sample with the fewest keys before its queries",
    sources=("tenstorrent/tt-xla#4190",),
    advice="Align by the sample's own numbers of queries and keys.",
)
def causal_by_least_sample(at: Offsets, n: int) -> int:
    return min(at.k[m + 1] - at.k[m] - at.q[m + 1] + at.q[m] for m in range(len(at.q) - 1))


@fault(
    "place",
    "the output of every packed sample is written over that of the first",
    sources=("vllm-project/flash-attention#176",),
    advice="Write at the sample's own offset: the stride of samples is not 0.",
)
def samples_written_over_the_first(rows: slice) -> slice:
    return slice(0, rows.stop - rows.start)


@fault(
    "handed_back",
    "the gradient of the keys of a packed sample without queries is never written",
    sources=("Dao-AILab/flash-attention#2421",),
    advice="Write zeros there, or begin with zeros.",
    told_by="packed-empty-gradients",
)
def gradient_of_empty_sample_unwritten(dk: Tensor, at: Offsets) -> Tensor:
    for n in range(len(at.q) - 1):
        if at.q[n] == at.q[n + 1]:
            dk = dk.index_fill(0, torch.arange(at.k[n], at.k[n + 1]), torch.nan)
    return dk


FAULTS = [one for one in BEHAVIOUR_FAULTS.values() if one.right is BLOCKS]


@torch.no_grad()
def diagnose(implementation: Implementation, results: Sequence[CheckResult]) -> list[Diagnosis]:
    """The faults of packing whose blocks give what a packed function gave, on what it failed and on what it passed."""
    from attn_spec.faults.diagnosis import Diagnosis

    wrong = {r.problem for r in results if r.outcome == "failed" and r.problem.lengths is not None}
    right = {r.problem for r in results if r.outcome == "passed" and r.problem.lengths is not None} - wrong
    plain = [p for p in (*sorted(wrong, key=str), *sorted(right, key=str)) if not (p.window or p.alibi or p.softcap)]
    meaning = implementation.conventions.meaning
    seen: list[tuple[Arguments, Tensor, Tensor]] = []
    differs = False
    for problem in plain[:MOST]:
        arguments = problem.arguments(meaning.alignment)
        try:
            output = implementation(arguments).output.double()
        except (Unsupported, Refused, Violation):
            continue
        answer = oracle.answer(arguments, meaning, implementation.precision_for(problem.dtype))
        room = answer.bounds.output.amax() + tolerance.roundoff(problem.dtype) * output.abs().nan_to_num()
        differs = differs or not tolerance.worst(output, answer.output, answer.bounds.output).holds
        seen.append((arguments.double(), output, SLACK * room))
    if not differs or meaning.alignment != "bottom-right":
        return []
    found = [one for one in FAULTS if not one.told_by and _gives(one, seen)]
    return [Diagnosis(one, len(seen), len(seen)) for one in found]


def _gives(one: BehaviourFault, seen: list[tuple[Arguments, Tensor, Tensor]]) -> bool:
    """Whether a changed block gives what was seen on every problem."""
    from attn_spec.adapters.packed import dense

    attention = dense(packed_attention(one.blocks))
    for arguments, output, room in seen:
        q, k, v = (x.transpose(1, 2) for x in (arguments.q, arguments.k, arguments.v))
        given = attention(
            q, k, v, softmax_scale=arguments.scale, causal=arguments.causal, packed_lengths=arguments.lengths
        )
        if not tolerance.worst(output, given.transpose(1, 2), room).holds:
            return False
    return True


DIAGNOSES["variants"] = diagnose
