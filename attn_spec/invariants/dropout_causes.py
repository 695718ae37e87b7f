"""What dropped weights look like: one key for one mistake, so that a share and a factor that it makes are one fact."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.chance import rate_p
from attn_spec.invariants.drawing import Drawn

TILE = 64  # keys that a kernel takes at once, at most, in what is called its first tile
SURE = 1e-6  # a share this unlikely is not that of a rate, when a mistake is to be named
CAUSES = {
    "dropout-not-applied": "the weights are those without dropout",
    "dropout-on-logits": "no weight is dropped, the rows still sum to 1, and the weights are others",
    "dropout-everything": "every weight is dropped",
    "dropout-keep-probability": "the rate is used as the probability of keeping a weight",
    "dropout-first-tile": "keys beyond the first tile are never dropped",
    "dropout-tail": "the keys of the last tile, which is not full, are never dropped",
    "dropout-renormalised": "the weights that are kept are made to sum to 1 again",
    "dropout-not-rescaled": "the weights that are kept are not divided by 1 - rate",
    "dropout-rescaled-by-rate": "the weights that are kept are divided by the rate, not by 1 - rate",
}


def share_cause(found: Drawn) -> str:
    """The mistake that the share of dropped weights tells; "" where the share is that of the rate."""
    dropped = found.dropped(found.first)
    n, count, p = int(found.tells.sum()), int(dropped.sum()), found.rate
    if not n or p in (0.0, 1.0):
        return ""
    if count == n:
        return "dropout-everything"
    if not count and rate_p(count, n, p) < SURE:
        off = (found.first - found.right).abs() > found.bound
        if not bool(off[found.tells].any()):
            return "dropout-not-applied"
        return "dropout-on-logits" if _sum_to_one(found.first, found) else "dropout-rate"
    if rate_p(count, n, p) < SURE and rate_p(count, n, 1 - p) >= SURE:
        return "dropout-keep-probability"
    return _by_keys(found, dropped) or ("dropout-rate" if rate_p(count, n, p) < SURE else "")


def _by_keys(found: Drawn, dropped: Tensor) -> str:
    """Whether keys from some place on are never dropped, and those before it as they should be."""
    count, n = dropped.sum((0, 1, 2)), found.tells.sum((0, 1, 2))
    keys = count.nonzero().flatten()
    if not len(keys):
        return ""
    end, p = int(keys[-1]) + 1, found.rate
    rest = int(n[end:].sum())
    if rate_p(0, rest, p) >= SURE or rate_p(int(count[:end].sum()), int(n[:end].sum()), p) < SURE:
        return ""
    return "dropout-first-tile" if end <= TILE else "dropout-tail"


def scale_cause(found: Drawn) -> str:
    """The mistake that the weights which are kept tell."""
    share = share_cause(found)
    if share in ("dropout-not-applied", "dropout-on-logits", "dropout-everything", "dropout-keep-probability"):
        return share
    if _sum_to_one(found.first, found):
        return "dropout-renormalised"
    factor, p = factor_of(found), found.rate
    for key, known in (("dropout-not-rescaled", 1.0), ("dropout-rescaled-by-rate", 1 / p)):
        if abs(factor / known - 1) < 0.02:
            return key
    return "dropout-scale"


def factor_of(found: Drawn) -> float:
    """What kept weights are multiplied by: the median of their quotients by the right ones; NaN where none is kept."""
    kept = found.tells & ~found.gone(found.first)
    return float((found.first / found.right)[kept].median()) if bool(kept.any()) else float("nan")


def factor_in_words(factor: float, rate: float) -> str:
    """ "1.43 = 1 / (1 - p)": a factor, and what it equals."""
    known = {"1": 1.0, "1 / p": 1 / rate, "1 / (1 - p)": 1 / (1 - rate), "1 - p": 1 - rate, "p": rate}
    equal = next((name for name, value in known.items() if abs(factor / value - 1) < 0.02), "")
    return f"{factor:.4g}{f' = {equal}' if equal and equal != '1' else ''}"


def _sum_to_one(call: Tensor, found: Drawn) -> bool:
    """Whether rows that are not all dropped sum to 1 while their dropped right weights would not."""
    rows = found.tells.any(-1) & (call.abs().sum(-1) > 0)
    expected = torch.where(found.gone(call), 0.0, found.kept).sum(-1)
    slack = found.bound.sum(-1)
    one, other = (call.sum(-1) - 1).abs() <= slack, (expected - 1).abs() > 4 * slack
    return bool(rows.any()) and bool(one[rows].all()) and bool(other[rows].any())
