"""Variants as factors: problems in which every two of windows, caps, slopes, sinks and what else there is meet.

Two arrays: one of what flash-attn's signature can say, so that no pair stands only where a mask or a sink does, and one
of everything.
"""

from __future__ import annotations

from functools import cache

from attn_spec.choice.chosen import SUITES, three_way_problems
from attn_spec.choice.covering import covering_array
from attn_spec.choice.features import Row
from attn_spec.masks import Alibi, Bias, Causal, Delivery, Part, Visible, Window
from attn_spec.problem import Problem

QUICK, THREE_WAY = SUITES / "variants.yaml", SUITES / "variants_three_way.yaml"

SAID_BY_FLASH: dict[str, tuple[str, ...]] = {
    "window": ("none", "left", "past", "both", "right"),
    "softcap": ("none", "1", "20"),
    "alibi": ("none", "H", "BH"),
    "causal": ("none", "flag"),
    "heads": ("own", "pairs", "one"),  # how many query heads read one key/value head
    "lengths": ("square", "fewer", "one-query", "more"),  # queries, beside keys
    "tail": ("short", "64"),  # the tile that the longer side just exceeds
    "scale": ("none", "0.3"),
    "dtype": ("float32", "bfloat16"),
    "width": ("equal", "narrow-v"),
    "layout": ("contiguous", "transposed"),
}
EVERYTHING = SAID_BY_FLASH | {
    "sinks": ("no", "yes"),
    "mask": ("none", "bool", "bias"),
    "over": ("BHQK", "QK", "HQK", "BQK", "BK", "1HQK"),  # the axes that the mask depends on, or its whole shape
    "dtype": ("float32", "bfloat16", "float16"),
}

HEADS = {"own": (3, 3), "pairs": (4, 2), "one": (5, 1)}
WINDOWS = {"left": (3, None), "past": (4, 0), "both": (2, 3), "right": (None, 2)}


def applies(row: Row) -> Row | None:
    """The levels that mean something in a row; None where they contradict each other."""
    if row.get("mask", "none") == "none":
        row = {name: level for name, level in row.items() if name != "over"}
    if row["lengths"] == "one-query" and row.get("mask", "none") != "none" and "Q" not in row["over"]:
        return None
    return row


def problem_of(row: Row) -> Problem:
    """The problem that has these levels."""
    heads, kv_heads = HEADS[row["heads"]]
    long, other = (67, 21) if row["tail"] == "64" else (11, 6)
    q_len, kv_len = {
        "square": (long, long),
        "fewer": (other, long),
        "one-query": (1, long),
        "more": (long, other),
    }[row["lengths"]]
    parts: list[Part] = []
    mask = row.get("mask", "none")
    axes = row.get("over", "").lstrip("1")
    if mask == "bool":
        parts.append(Visible(axes))
    elif mask == "bias":
        parts.append(Bias(axes))
    if row["causal"] == "flag":
        parts.append(Causal())
    if row["window"] != "none":
        left, right = WINDOWS[row["window"]]
        parts.append(Window(left and left * (6 if long > 64 else 1), right))
    if row["alibi"] != "none":
        parts.append(Alibi(batched=row["alibi"] == "BH"))
    return Problem(
        batch=2 if long < 64 else 1 + (row["alibi"] == "BH"),
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=16,
        v_dim=16 if row["width"] == "equal" else 8,
        dtype=row["dtype"],
        mask=tuple(parts),
        delivery=Delivery("additive" if mask == "bias" else "bool", axes if row.get("over") == "HQK" else ""),
        scale=None if row["scale"] == "none" else float(row["scale"]),
        softcap=None if row["softcap"] == "none" else float(row["softcap"]),
        sinks=row.get("sinks") == "yes",
        layout=row["layout"],
    )


def array(strength: int, *, seed: int = 0, **effort: int) -> list[Problem]:
    """Problems in which all that can stand together, `strength` levels at a time, does."""
    rows = [
        row
        for factors in (SAID_BY_FLASH, EVERYTHING)
        for row in covering_array(factors, strength, applies, seed=seed, **effort)
    ]
    return list(dict.fromkeys(problem_of(row) for row in rows))


@cache
def variant_problems() -> tuple[Problem, ...]:
    """The problems that every profile tries."""
    return tuple(three_way_problems(QUICK))


def variant_three_way_problems() -> list[Problem]:
    """The problems that `ci` and `deep` add: every three levels together."""
    return three_way_problems(THREE_WAY)


def features(problem: Problem) -> Row:
    """The levels that a problem of these arrays has, as far as they apply."""
    p, longer = problem, max(problem.q_len, problem.kv_len)
    bounds = (p.window.left, p.window.right) if p.window else None
    wide = 6 if longer > 64 else 1
    windows = {(left and left * wide, right): name for name, (left, right) in WINDOWS.items()}
    tensor = next((part for part in p.mask if isinstance(part, (Visible, Bias))), None)
    found = {
        "window": windows[bounds] if bounds else "none",
        "softcap": "none" if p.softcap is None else f"{p.softcap:g}",
        "alibi": "none" if p.alibi is None else "BH" if p.alibi.batched else "H",
        "causal": "none" if p.causal is None else "flag",
        "heads": next(name for name, heads in HEADS.items() if heads == (p.heads, p.kv_heads)),
        "lengths": "one-query" if p.q_len == 1 else {0: "square", 1: "fewer", -1: "more"}[sign(p.kv_len - p.q_len)],
        "tail": "64" if longer > 64 else "short",
        "scale": "none" if p.scale is None else f"{p.scale:g}",
        "dtype": p.dtype,
        "width": "equal" if p.v_dim == p.head_dim else "narrow-v",
        "layout": p.layout,
        "sinks": "yes" if p.sinks else "no",
        "mask": "none" if tensor is None else "bias" if isinstance(tensor, Bias) else "bool",
    }
    return found if tensor is None else found | {"over": tensor.axes}


def sign(n: int) -> int:
    """-1, 0 or 1."""
    return (n > 0) - (n < 0)
