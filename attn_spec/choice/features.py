"""The features of a problem, as levels of factors: what combines, and so what must be tried in combination."""

from __future__ import annotations

from attn_spec.masks import Bias, Causal, Delivery, Form, KeyPadding, Part, Visible, by_parameter
from attn_spec.problem import Problem

Row = dict[str, str]  # a level for each factor

FACTORS: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "float64", "bfloat16", "float16"),
    "heads": ("own", "pairs", "threes", "one"),  # how many query heads read one key/value head
    "batch": ("two", "one", "as-heads"),
    "lengths": ("square", "fewer", "more", "one-query"),  # queries, beside keys
    "tail": ("short", "16", "64", "128"),  # the tile that the longer side just misses
    "side": ("over", "under"),
    "width": ("equal", "odd", "wide-v", "narrow-v", "wide"),  # d_k and d_v
    "causal": ("none", "flag", "in-mask"),
    "mask": ("none", "bool", "additive", "bias", "bias-and-hidden", "padding", "padding-left"),
    "over": ("BHQK", "QK", "HQK", "BQK", "BK"),  # the axes that the mask depends on
    "shape": ("smallest", "tail", "full"),  # that of the mask tensor: 1 where it broadcasts, axes left out, or BHQK
    "hidden": ("-inf", "min"),
    "empty": ("no", "yes"),  # whether a row has no visible key
    "mask-strides": ("contiguous", "strided"),
    "scale": ("none", "0.3", "1"),
    "values": ("sharp", "mild", "large", "shared-key", "tiny"),
    "layout": ("contiguous", "transposed", "sliced"),
}

HEADS = {"own": (3, 3), "pairs": (4, 2), "threes": (6, 2), "one": (4, 1)}
WIDTHS = {"equal": (16, 16), "odd": (7, 7), "wide-v": (8, 20), "narrow-v": (20, 9), "wide": (36, 36)}
AROUND = {"short": (9, 6), "16": (17, 15), "64": (65, 63), "128": (129, 127)}  # over and under
ADDITIVE = ("additive", "bias", "bias-and-hidden")
CAP = 24_000  # logits of one problem: what is long is narrow in all else


def problem_of(row: Row) -> Problem | None:
    """The problem that has these levels, as far as they apply; None where they contradict each other or cost much."""
    q_len, kv_len = _lengths(row)
    heads, kv_heads = HEADS[row["heads"]]
    if q_len * kv_len > 100 * 100:  # the longest squares: one sample, two heads, narrow
        if row["batch"] != "one" or row["heads"] not in ("own", "one") or row["width"] == "wide":
            return None
        heads, kv_heads = 2, (2 if row["heads"] == "own" else 1)
    batch = {"two": 2, "one": 1, "as-heads": heads}[row["batch"]]
    if batch * heads * q_len * kv_len > CAP and q_len * kv_len <= 100 * 100:
        return None
    parts = _parts(row, batch, q_len, kv_len)
    if parts is None:
        return None
    masked = row["mask"] != "none" or row["causal"] == "in-mask"
    if masked and row["shape"] == "tail" and not _axes(parts, row["causal"] != "in-mask").startswith("1"):
        return None  # no leading axis to leave out
    head_dim, v_dim = WIDTHS[row["width"]]
    problem = Problem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        v_dim=v_dim,
        dtype=row["dtype"],
        mask=parts,
        delivery=_delivery(row, parts) if masked else Delivery(),
        scale=None if row["scale"] == "none" else float(row["scale"]),
        values=row["values"],
        layout=row["layout"],
    )
    return None if _beyond_honest(problem) else problem


def _lengths(row: Row) -> tuple[int, int]:
    long = AROUND[row["tail"]][row["side"] == "under"]
    other = {"short": 5, "16": 11, "64": 21, "128": 19}[row["tail"]]
    return {"square": (long, long), "fewer": (other, long), "more": (long, other), "one-query": (1, long)}[
        row["lengths"]
    ]


def _parts(row: Row, batch: int, q_len: int, kv_len: int) -> tuple[Part, ...] | None:
    kind, over, empty = row["mask"], row["over"], row["empty"] == "yes"
    parts: list[Part] = []
    if kind.startswith("padding"):
        lengths = [max(1, kv_len - 2 - 3 * sample) for sample in range(batch)]
        if empty:
            lengths[-1] = 0
        parts.append(KeyPadding(tuple(lengths), left=kind == "padding-left"))
    if kind.startswith("bias"):
        parts.append(Bias(over))
    if kind in ("bool", "additive", "bias-and-hidden"):
        if empty and ("Q" not in over or q_len == 1):
            return None  # not one row without a key, but all
        parts.append(Visible(over, empty_rows=(q_len // 2,) if empty else ()))
    if row["causal"] != "none":
        parts.append(Causal())
    return tuple(parts)


def _delivery(row: Row, parts: tuple[Part, ...]) -> Delivery:
    flag = row["causal"] != "in-mask"
    if row["mask"].startswith("padding") and flag:
        return Delivery("key-padding")
    form: Form = "additive" if row["mask"] in ADDITIVE else "bool"
    hides = row["mask"] in ("additive", "bias-and-hidden") or (row["mask"] == "bias" and not flag)
    axes = _axes(parts, flag)
    shape = {"smallest": "", "tail": axes.lstrip("1"), "full": "BHQK"}[row["shape"]] if axes != "BHQK" else ""
    hidden = row["hidden"] if form == "additive" and hides else "-inf"
    return Delivery(form, shape, flag=flag, hidden=hidden, strided=row["mask-strides"] == "strided")


def _axes(parts: tuple[Part, ...], flag: bool) -> str:
    given = [part for part in parts if not by_parameter(part, Delivery(flag=flag))]
    return "".join(axis if any(axis in part.axes for part in given) else "1" for axis in "BHQK")


def _beyond_honest(problem: Problem) -> bool:
    """Whether honest code in the dtype may overflow: what is added to float16's lowest number."""
    lowest = problem.masked and problem.delivery.hidden == "min"
    hollow = any(isinstance(part, Visible) and part.empty_rows for part in problem.mask)
    return lowest and (hollow or (problem.dtype == "float16" and problem.causal is not None))


def features(problem: Problem) -> Row:
    """The level of every factor that applies to a problem: the shape of a mask only where there is one."""
    p, longer = problem, max(problem.q_len, problem.kv_len)
    tail = min(AROUND, key=lambda name: min(abs(longer - size) for size in AROUND[name]))
    group = p.heads // p.kv_heads
    found = {
        "dtype": p.dtype,
        "heads": "own" if group == 1 else "one" if p.kv_heads == 1 else {2: "pairs", 3: "threes"}[group],
        "batch": "one" if p.batch == 1 else "as-heads" if p.batch == p.heads else "two",
        "lengths": _compared(p),
        "tail": tail,
        "side": "over" if longer >= AROUND[tail][0] else "under",
        "width": next(name for name, width in WIDTHS.items() if width == (p.head_dim, p.v_dim)),
        "causal": "none" if p.causal is None else "flag" if p.delivery.flag else "in-mask",
        "mask": _mask(p),
        "scale": "none" if p.scale is None else f"{p.scale:g}",
        "values": p.values,
        "layout": p.layout,
    }
    return found | (_of_the_tensor(p) if p.masked else {})


def _compared(p: Problem) -> str:
    if p.q_len == 1:
        return "one-query"
    return "square" if p.q_len == p.kv_len else "fewer" if p.q_len < p.kv_len else "more"


def _mask(p: Problem) -> str:
    kinds = {type(part): part for part in p.mask}
    padding = kinds.get(KeyPadding)
    if isinstance(padding, KeyPadding):
        return "padding-left" if padding.left else "padding"
    if Bias in kinds:
        return "bias-and-hidden" if Visible in kinds else "bias"
    return "none" if Visible not in kinds else "bool" if p.delivery.form == "bool" else "additive"


def _of_the_tensor(p: Problem) -> Row:
    """The factors of a mask tensor."""
    found, flag, how = {}, p.delivery.flag, p.delivery
    over = next((part.axes for part in p.mask if isinstance(part, (Visible, Bias))), "")
    hiding = [part for part in p.mask if isinstance(part, (Visible, KeyPadding))]
    if over:
        found["over"] = over
    if how.form != "key-padding":
        axes = _axes(p.mask, flag)
        if axes != "BHQK":
            found["shape"] = {"": "smallest", "BHQK": "full"}.get(how.shape, "tail")
        found["mask-strides"] = "strided" if how.strided else "contiguous"
    if how.form == "additive" and (hiding or not flag):
        found["hidden"] = how.hidden
    if hiding:
        found["empty"] = "yes" if any(_empties(part) for part in hiding) else "no"
    return found


def _empties(part: Part) -> bool:
    return isinstance(part, Visible) and bool(part.empty_rows) or isinstance(part, KeyPadding) and 0 in part.lengths
