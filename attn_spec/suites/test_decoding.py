"""Decoding: which problems each law is tried on."""

from attn_spec.choice.decoding import one_query_problems, one_query_three_way_problems
from attn_spec.invariants import decoding as law
from attn_spec.invariants import decoding_caches as cache_law
from attn_spec.masks import Alibi, Bias, Causal, Delivery, KeyPadding, Lengths, Part, Visible, Window
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=2, kv_heads=2, q_len=7, kv_len=7, head_dim=8, v_dim=8, mask=(Causal(),))
GROUPED = PLAIN.replace(heads=4, kv_heads=2, q_len=5, kv_len=5)
LONG = PLAIN.replace(batch=1, q_len=37, kv_len=37)
ADDED = Delivery("additive")


def causal(base: Problem, *parts: Part, **others: object) -> Problem:
    return base.replace(mask=(Causal(), *parts), **others)


test_steps_equal_prefill = tries(
    law.steps_equal_prefill,
    PLAIN,
    causal(GROUPED, Window(2, None), Alibi()),
    ci=[
        *both(GROUPED),
        LONG,
        causal(PLAIN, Visible("BHQK")),
        causal(PLAIN, Bias("HQK"), delivery=ADDED),
        causal(PLAIN, Window(3, 0), softcap=2.0),
        causal(GROUPED, Alibi(batched=True), sinks=True, scale=0.4),
    ],
)
test_chunks_equal_prefill = tries(
    law.chunks_equal_prefill,
    PLAIN,
    causal(GROUPED.replace(q_len=8, kv_len=8), Window(3, None)),
    ci=[
        *both(LONG),
        causal(PLAIN, Visible("BHQK")),
        causal(PLAIN, Bias("HQK"), delivery=ADDED),
        causal(GROUPED, Alibi(), softcap=2.0),
        causal(LONG, Window(9, 0), sinks=True),
    ],
)
test_one_query = tries(law.one_query, one_query_problems(), ci=one_query_three_way_problems)


def cached(lengths: tuple[int, ...], form: str = "bool", **others: object) -> Problem:
    """A cache of 24 keys, of which each sample has filled its own number."""
    sizes = {"batch": len(lengths), "q_len": 1, "kv_len": 24} | others
    return PLAIN.replace(mask=(KeyPadding(lengths),), delivery=Delivery(form), **sizes)  # type: ignore[arg-type]


test_unfilled_hidden = tries(
    law.unfilled_hidden,
    cached((24, 9, 1)),
    cached((17, 5), "additive", q_len=3, heads=4),
    cached((3, 20), "key-padding"),
    ci=[
        cached((24, 9, 1), dtype="bfloat16"),
        cached((17, 5), "additive", scale=0.3, sinks=True),
        cached((130, 65), kv_len=200, heads=4, softcap=3.0),
        cached((64, 128), kv_len=128, v_dim=16),
    ],
)
SPLIT = PLAIN.replace(q_len=1, kv_len=21, mask=())
test_uneven_splits_merge = tries(
    law.uneven_splits_merge,
    SPLIT,
    SPLIT.replace(mask=(KeyPadding((12, 1)),), delivery=Delivery("additive", "B11K")),
    SPLIT.replace(q_len=3, mask=(Visible("BHQK", density=0.2),), heads=4),
    ci=[
        SPLIT.replace(dtype="bfloat16"),
        SPLIT.replace(mask=(KeyPadding((9, 21)),), delivery=Delivery("additive", shape="B11K")),
        SPLIT.replace(kv_len=200, values="large"),
    ],
)
PADDED = PLAIN.replace(mask=(KeyPadding((7, 3), left=True), Causal()))
test_left_padding = tries(
    law.left_padding,
    PADDED.replace(delivery=Delivery(flag=False)),
    PADDED.replace(delivery=Delivery("key-padding")),
    PADDED.replace(delivery=Delivery("additive", "B1QK"), heads=4),
    ci=[
        PADDED.replace(delivery=Delivery("bool", "B11K")),
        PADDED.replace(delivery=Delivery("additive", "BHQK", flag=False), dtype="bfloat16"),
        PADDED.replace(mask=(*PADDED.mask, Window(2, None), Alibi()), delivery=Delivery("additive", "B1QK")),
    ],
)


def appended(lengths: tuple[int, ...], new: int = 3, **others: object) -> Problem:
    """A cache in which each sample has its own number of keys, the last of them those of its queries."""
    sizes = {"batch": len(lengths), "q_len": new, "kv_len": max(lengths)} | others
    parts = (Lengths((new,) * len(lengths), lengths),)  # one query needs no flag: every key lies in its past
    return GROUPED.replace(mask=parts if new == 1 else (Causal(), *parts), **sizes)


test_cache_written = tries(cache_law.cache_written, appended((11, 6, 3)), ci=[appended((70, 33), 1)])
test_pages_equal_rows = tries(
    cache_law.pages_equal_rows,
    appended((21, 9, 14), 1),
    ci=[appended((70, 33), 5), appended((21, 9, 14), 1, dtype="bfloat16")],
)
test_sequences_apart = tries(cache_law.sequences_apart, appended((21, 9, 14), 1), ci=[appended((17, 35), 4)])
test_cache_filled_by_itself = tries(
    cache_law.cache_filled_by_itself,
    GROUPED.replace(q_len=9, kv_len=9, batch=3),
    causal(GROUPED.replace(q_len=9, kv_len=9), Window(3, None), Alibi()),
    ci=[LONG],
)
test_unfilled_nan = tries(cache_law.unfilled_nan, appended((21, 9, 14), 1))
