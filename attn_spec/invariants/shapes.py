"""Shapes: what comes out has the sizes, the dtype and the device that an attention's output has, at every size."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import agrees, arguments_for, output
from attn_spec.law import Advisory, Refused, Unsupported, Violation, law
from attn_spec.problem import Arguments, Problem


@law("ATN101", "output-shape", "The output is [B, H, Sq, d_v]")
def output_shape(implementation: Implementation, problem: Problem) -> None:
    """out.shape == (B, H, Sq, d_v)

    Why: an output in another order of axes often fits what comes next all the same, and trains on scrambled tokens.
    Example: returning [B, Sq, H, d_v] from a function that took [B, H, Sq, d_k].
    """
    output(implementation, arguments_for(implementation, problem))


@law("ATN102", "output-dtype", "The output has the dtype and the device of q")
def output_dtype(implementation: Implementation, problem: Problem) -> None:
    """out.dtype == q.dtype, and out on the device of q (`Implementation` sees to that at every call)

    Why: a softmax done in float32 and not cast back silently turns everything after it into float32.
    Example: `F.softmax(s, -1, dtype=torch.float32) @ v.float()` returned as it is.
    """
    output(implementation, arguments_for(implementation, problem))


@law("ATN103", "base-problems", "The plain problems, which every attention must take, are answered right")
def base_problems(implementation: Implementation, problem: Problem) -> None:
    """out = softmax(q k' / sqrt(d_k)) v, at sizes that any kernel takes

    Why: a refusal of something special is honest; one that covers everything hides that nothing works.
    Example: a kernel that raises for every input but the one it was written for.
    """
    agrees(implementation, problem)


@law("ATN104", "weights-shape", "Weights that are returned are [B, H, Sq, Sk]")
def weights_shape(implementation: Implementation, problem: Problem) -> None:
    """weights.shape == (B, H, Sq, Sk), where the signature can ask for them

    Why: averaged or transposed weights are plotted as heat maps that mislead.
    Example: weights averaged over the heads when per-head ones are promised.
    """
    arguments = arguments_for(implementation, problem).replace(returns="weights")
    result = implementation(arguments)
    if result.weights is None:
        raise Violation(
            f"asked for the weights, it returned no tensor of shape [B, H, Sq, Sk] = {list(arguments.sizes)}",
            merge="weights-shape",
        )


@law("ATN105", "cross-lengths", "Queries and keys may differ in number")
def cross_lengths(implementation: Implementation, problem: Problem) -> None:
    """Sq != Sk: out [B, H, Sq, d_v], each row a softmax over all Sk keys

    Why: cross-attention and decoding have Sq != Sk; code tried at Sq == Sk alone often mixes the two up.
    Example: a buffer of [Sq, Sq], or the number of keys taken from q.
    """
    agrees(implementation, problem)


@law("ATN106", "edge-sizes", "Sizes of one, odd sizes and sizes around a block are answered right")
def edge_sizes(implementation: Implementation, problem: Problem) -> None:
    """S = 1, odd, block - 1 and block + 1

    Why: the last, partial block is where kernels forget a key or attend to padding.
    Example: `for j in range(S // block)`, which drops the remainder.
    """
    agrees(implementation, problem)


@law("ATN107", "zero-sizes", "An empty batch, no queries or no keys give an empty output or empty rows")
def zero_sizes(implementation: Implementation, problem: Problem) -> None:
    """B = 0 or Sq = 0: an empty output. Sk = 0: rows without a visible key.

    Why: the last shard of a batch may be empty; a crash or a NaN there ends a long run.
    Example: dividing by a row sum of 0.
    """
    agrees(implementation, problem)


@law("ATN108", "value-width", "Values may be wider or narrower than keys")
def value_width(implementation: Implementation, problem: Problem) -> None:
    """d_v != d_k: out [B, H, Sq, d_v], scale 1/sqrt(d_k)

    Why: latent attention has d_v != d_k; `torch.empty_like(q)` for the output or a scale from d_v is wrong there.
    Example: a scale taken from v.shape[-1].
    """
    agrees(implementation, problem)


def _cut(name: str, x: Tensor) -> Tensor:
    return {"k": x[..., :-1, :], "v": x[..., :-1, :], "batch": x[:1], "head_dim": x[..., :-1]}[name].contiguous()


MISMATCHES = ("k", "v", "batch", "head_dim")


def mismatched(arguments: Arguments, what: str) -> Arguments:
    """Arguments whose sizes do not fit: v or k with a key too few, k and v of one sample, k with a channel too few."""
    if what == "batch":
        return arguments.replace(k=_cut("batch", arguments.k), v=_cut("batch", arguments.v))
    if what == "head_dim":
        return arguments.replace(k=_cut("head_dim", arguments.k))
    return arguments.replace(**{what: _cut(what, getattr(arguments, what))})


def _accepts(what: str) -> str:
    return {
        "k": "k with one key fewer than v",
        "v": "v with one key fewer than k",
        "batch": "k and v of one sample beside q of several",
        "head_dim": "k with one channel fewer than q",
    }[what]


@law("ATN109", "mismatched-sizes", "Sizes that do not fit together are refused", advisory=True)
def mismatched_sizes(implementation: Implementation, problem: Problem) -> None:
    """k, v of different lengths, of one sample or of another head_dim: a clear exception (advisory, red when strict)

    Why: silently broadcasting or reading past the end turns a caller's mistake into wrong numbers.
    Example: torch's own SDPA on the CPU takes k and v of different lengths (pytorch/pytorch#193728).
    """
    arguments = arguments_for(implementation, problem)
    taken = []
    for what in MISMATCHES:
        wrong = mismatched(arguments, what)
        try:
            implementation(wrong)
        except (Refused, Unsupported, Violation, torch.OutOfMemoryError):
            continue
        taken.append(_accepts(what))
    if taken:
        raise Advisory(
            f"takes without complaint: {'; '.join(taken)}",
            hint="check the sizes at the top and raise ValueError naming them",
            merge="mismatched-sizes",
        )
