"""The work of an attention, exact: counted on the mask itself, not by a formula for each kind of mask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attn_spec import masks
from attn_spec.masks import Alignment
from attn_spec.problem import Problem

DIRECTIONS = ("forward", "backward", "both")
BACKWARD = 2.5  # five matrix products of the size of the forward pass's two


@dataclass(frozen=True)
class Work:
    """pairs: visible (query, key) pairs over all samples and query heads.  flop: multiplications and additions of the
    matrix products.  bytes: the least that is moved, each tensor once."""

    pairs: int
    flop: float
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOP for each byte."""
        return self.flop / max(self.bytes, 1)


def visible_pairs(problem: Problem, alignment: Alignment = "top-left") -> int:
    """How many keys the queries see, over all samples and query heads.

    alignment: the implementation's, for a causal part that has none of its own or goes in by the flag.
    """
    return _visible_pairs(problem.replace(dtype="float32", values="mild", layout="contiguous"), alignment)


@lru_cache(maxsize=256)
def _visible_pairs(problem: Problem, alignment: Alignment) -> int:
    flag = problem.causal_by_flag
    parts = tuple(part for part in problem.mask if not (flag and isinstance(part, masks.Causal)))  # as it is delivered
    visible, _ = masks.combined(parts, problem.sizes, problem.seed, alignment)
    if flag:
        past = masks.Causal().visible(problem.sizes, problem.seed, alignment)
        visible = past if visible is None else visible & past
    b, h, q_len, kv_len = problem.sizes
    every = b * h * q_len * kv_len
    if visible is None or not every:
        return every
    return int(visible.sum()) * (every // visible.numel())


def work(problem: Problem, direction: str = "forward", alignment: Alignment = "top-left") -> Work:
    """The work of one call: forward FLOP = 2 pairs (d_qk + d_v), backward 2.5 times that, `both` their sum.

    Grouped heads count as query heads in FLOP and as kv heads in bytes. Least bytes: q, k, v and the output; backward
    also their gradients. Raises ValueError for another direction.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: {direction!r} is not one of {', '.join(DIRECTIONS)}")
    pairs = visible_pairs(problem, alignment)
    forward = 2.0 * pairs * (problem.head_dim + problem.v_dim)
    share = {"forward": 1.0, "backward": BACKWARD, "both": 1.0 + BACKWARD}[direction]
    q = problem.batch * problem.heads * problem.q_len
    kv = problem.batch * problem.kv_heads * problem.kv_len
    once = (q + kv) * (problem.head_dim + problem.v_dim) * problem.torch_dtype.itemsize
    times = {"forward": 1, "backward": 2, "both": 3}[direction]
    return Work(pairs, share * forward, once * times)
