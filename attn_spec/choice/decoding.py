"""One query as factors: problems in which every two of what a decoding step can meet do meet.

Two arrays, as with variants: one of what every function with a mask can be asked for, and one of everything.
"""

from __future__ import annotations

from functools import cache

from attn_spec.choice.chosen import SUITES, three_way_problems
from attn_spec.choice.covering import covering_array
from attn_spec.choice.features import Row
from attn_spec.masks import Alibi, Bias, Delivery, KeyPadding, Part, Visible, Window
from attn_spec.problem import Problem

QUICK, THREE_WAY = SUITES / "one_query.yaml", SUITES / "one_query_three_way.yaml"

PLAIN: dict[str, tuple[str, ...]] = {
    "heads": ("own", "pairs", "one"),
    "mask": ("none", "bool", "bias", "padding", "left", "key-padding"),
    "width": ("equal", "wide-v"),
    "length": ("21", "67"),
    "scale": ("none", "0.3"),
    "dtype": ("float32", "bfloat16"),
    "layout": ("contiguous", "transposed"),
}
EVERYTHING = PLAIN | {
    "window": ("none", "4", "0"),
    "softcap": ("none", "2"),
    "alibi": ("none", "H", "BH"),
    "sinks": ("no", "yes"),
}
HEADS = {"own": (3, 3), "pairs": (4, 2), "one": (5, 1)}


def problem_of(row: Row) -> Problem:
    """The problem that has these levels."""
    heads, kv_heads = HEADS[row["heads"]]
    length, mask, parts = int(row["length"]), row["mask"], list[Part]()
    how = Delivery()
    if mask == "bool":
        parts.append(Visible("BHQK"))
    elif mask == "bias":
        parts, how = [Bias("BHQK")], Delivery("additive")
    elif mask != "none":
        parts.append(KeyPadding((length - 5, length), left=mask == "left"))
        how = Delivery("key-padding") if mask == "key-padding" else Delivery("bool", "B11K")
    if row.get("window", "none") != "none":
        parts.append(Window(int(row["window"]) * (1 if length < 64 else 9), None))
    if row.get("alibi", "none") != "none":
        parts.append(Alibi(batched=row["alibi"] == "BH"))
    return Problem(
        batch=2,
        heads=heads,
        kv_heads=kv_heads,
        q_len=1,
        kv_len=length,
        head_dim=8,
        v_dim=8 if row["width"] == "equal" else 12,
        dtype=row["dtype"],
        mask=tuple(parts),
        delivery=how,
        scale=None if row["scale"] == "none" else float(row["scale"]),
        softcap=None if row.get("softcap", "none") == "none" else float(row["softcap"]),
        sinks=row.get("sinks") == "yes",
        layout=row["layout"],
    )


def array(strength: int, *, seed: int = 0, **effort: int) -> list[Problem]:
    """Problems in which all that can stand together, `strength` levels at a time, does."""
    rows = [
        row for factors in (PLAIN, EVERYTHING) for row in covering_array(factors, strength, dict, seed=seed, **effort)
    ]
    return list(dict.fromkeys(problem_of(row) for row in rows))


@cache
def one_query_problems() -> tuple[Problem, ...]:
    """The problems that every profile tries."""
    return tuple(three_way_problems(QUICK))


def one_query_three_way_problems() -> list[Problem]:
    """The problems that `ci` and `deep` add: every three levels together."""
    return three_way_problems(THREE_WAY)
