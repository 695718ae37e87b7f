"""Variants: which problems each law is tried on."""

from attn_spec.choice.variants import variant_problems, variant_three_way_problems
from attn_spec.invariants import variants as law
from attn_spec.masks import Alibi, Bias, Causal, Delivery, Documents, Lengths, Part, Visible, Window
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=9, kv_len=9, head_dim=16, v_dim=16)
GROUPED = PLAIN.replace(heads=6, kv_heads=2)
LONGER = PLAIN.replace(q_len=5, kv_len=12)
LONG = PLAIN.replace(batch=1, heads=2, kv_heads=1, q_len=70, kv_len=70)
ONE_QUERY = PLAIN.replace(q_len=1, kv_len=20)
ADDED = Delivery("additive")


def windowed(base: Problem, left: int | None, right: int | None, *, causal: bool = False) -> Problem:
    return base.replace(mask=((Causal(),) if causal else ()) + (Window(left, right),))


def sloped(base: Problem, *, batched: bool = False, causal: bool = False) -> Problem:
    return base.replace(mask=((Causal(),) if causal else ()) + (Alibi(batched),))


test_window = tries(
    law.window,
    both(windowed(PLAIN, 3, 2), windowed(PLAIN, 2, None)),
    [windowed(PLAIN, left, right) for left, right in ((None, 1), (0, 0), (3, 0), (0, 3), (2, 2))],
    windowed(GROUPED, 2, 1),
    windowed(LONG, 17, 40),
    windowed(LONG, 64, None),
)
test_window_edges = tries(
    law.window_edges,
    [windowed(PLAIN.replace(values="mild"), left, right) for left, right in ((3, 2), (2, None), (None, 1))],
    windowed(PLAIN.replace(values="mild"), 3, None, causal=True),
    windowed(PLAIN.replace(values="mild", q_len=33, kv_len=33), 16, None, causal=True),
)
test_window_with_causal = tries(
    law.window_with_causal,
    both(windowed(PLAIN, 3, None, causal=True), windowed(PLAIN, 3, 2, causal=True)),
    windowed(PLAIN, 0, 0, causal=True),
    windowed(GROUPED, 4, 0, causal=True),
    windowed(LONG, 33, None, causal=True),
    windowed(PLAIN.replace(scale=0.4), 2, 0, causal=True),
    windowed(PLAIN, 4, 1).replace(mask=(Window(4, 1), Visible("BHQK"))),
    windowed(PLAIN, 4, 1).replace(mask=(Window(4, 1), Bias("HQK")), delivery=ADDED),
)
test_window_across = tries(
    law.window_across,
    both(windowed(LONGER, 3, 1)),
    windowed(LONGER, 4, None, causal=True),
    windowed(ONE_QUERY, 6, 0),
    windowed(ONE_QUERY, 6, None, causal=True),
    windowed(ONE_QUERY.replace(heads=4, kv_heads=2, kv_len=131), 64, None, causal=True),
    windowed(PLAIN.replace(q_len=12, kv_len=7), 3, 2),
    windowed(LONGER.replace(q_len=20, kv_len=70), 16, 3),
)
test_window_unbounded = tries(
    law.window_unbounded,
    windowed(PLAIN, None, None),
    windowed(PLAIN, 20, 20),
    windowed(LONGER, 20, None, causal=True),
    windowed(ONE_QUERY, None, None),
)
test_softcap = tries(
    law.softcap,
    both(PLAIN.replace(softcap=1.0), PLAIN.replace(softcap=5.0)),
    PLAIN.replace(softcap=50.0, values="large"),
    PLAIN.replace(softcap=1e4),
    PLAIN.replace(softcap=5.0, scale=0.7),
    GROUPED.replace(softcap=5.0),
    LONG.replace(softcap=5.0, dtype="float16"),
    ONE_QUERY.replace(softcap=2.0),
)
test_softcap_order = tries(
    law.softcap_order,
    PLAIN.replace(softcap=1.0, mask=(Causal(),)),
    PLAIN.replace(softcap=1.0, mask=(Visible("BHQK"),)),
    PLAIN.replace(softcap=2.0, mask=(Bias("HQK"),), delivery=ADDED),
    PLAIN.replace(softcap=1.0, mask=(Window(2, 1),)),
    sloped(PLAIN.replace(softcap=2.0)),
)
test_alibi = tries(
    law.alibi,
    both(sloped(PLAIN), sloped(PLAIN, causal=True)),
    sloped(LONG, causal=True),
    sloped(PLAIN.replace(scale=0.4)),
    sloped(LONG.replace(dtype="bfloat16")),
)
test_alibi_slopes = tries(
    law.alibi_slopes,
    sloped(PLAIN, batched=True),
    sloped(GROUPED),
    sloped(GROUPED, batched=True, causal=True),
    sloped(PLAIN.replace(heads=5, kv_heads=5, batch=3), batched=True),
)
test_alibi_across = tries(
    law.alibi_across,
    both(sloped(LONGER)),
    sloped(LONGER, causal=True),
    sloped(ONE_QUERY),
    sloped(ONE_QUERY, causal=True, batched=True),
    sloped(PLAIN.replace(q_len=12, kv_len=7)),
)
test_sinks = tries(
    law.sinks,
    both(PLAIN.replace(sinks=True)),
    PLAIN.replace(sinks=True, values="mild"),
    GROUPED.replace(sinks=True, mask=(Causal(),)),
    ONE_QUERY.replace(sinks=True, batch=3),
    PLAIN.replace(sinks=True, scale=0.2),
    PLAIN.replace(sinks=True, softcap=2.0),
    LONG.replace(sinks=True, values="mild"),
    PLAIN.replace(sinks=True, mask=(Visible("BHQK", empty_rows=(2,)),)),
)
test_sink_share = tries(law.sink_share, PLAIN.replace(sinks=True), GROUPED.replace(sinks=True, values="mild"))
test_lse = tries(
    law.lse,
    both(PLAIN),
    PLAIN.replace(values="large"),
    GROUPED.replace(mask=(Causal(),)),
    PLAIN.replace(scale=0.3),
    LONGER,
    ONE_QUERY,
    LONG.replace(dtype="float16"),
    PLAIN.replace(mask=(Bias("HQK"),), delivery=ADDED),
    PLAIN.replace(mask=(Visible("BHQK"),)),
    PLAIN.replace(softcap=2.0),
    windowed(PLAIN, 3, 1),
    sloped(PLAIN, causal=True),
    PLAIN.replace(sinks=True),
)
test_lse_of_empty_rows = tries(
    law.lse_of_empty_rows,
    PLAIN.replace(mask=(Visible("BHQK", empty_rows=(2,)),)),
    PLAIN.replace(q_len=8, kv_len=5, mask=(Causal(),)),
    windowed(PLAIN.replace(q_len=12, kv_len=5), 1, 1),
)
test_lse_merges = tries(
    law.lse_merges, both(PLAIN), GROUPED, LONG.replace(values="mild"), PLAIN.replace(mask=(Visible("BHQK"),)), ONE_QUERY
)
test_lse_changes_no_output = tries(
    law.lse_changes_no_output, PLAIN, GROUPED.replace(mask=(Causal(),)), windowed(PLAIN, 3, 1), PLAIN.replace(scale=0.3)
)
DOCUMENTS = PLAIN.replace(q_len=12, kv_len=12, mask=(Documents((5, 1, 6)),))
test_documents = tries(
    law.documents,
    DOCUMENTS,
    DOCUMENTS.replace(mask=(Documents((5, 1, 6)), Causal()), delivery=Delivery("bool", flag=False)),
    DOCUMENTS.replace(mask=(Documents((4, 8)), Causal())),
    DOCUMENTS.replace(q_len=6, mask=(Documents((5, 7), (4, 2)),), delivery=Delivery("additive", "QK")),
    DOCUMENTS.replace(mask=(Documents((5, 7)),), delivery=Delivery("bool", "BHQK"), heads=6, kv_heads=2),
)
def packed(q_lengths: tuple[int, ...], kv_lengths: tuple[int, ...], *parts: Part, **others: object) -> Problem:
    sizes = {"batch": len(q_lengths), "q_len": max(q_lengths), "kv_len": max(kv_lengths)}
    return PLAIN.replace(mask=(*parts, Lengths(q_lengths, kv_lengths)), **sizes, **others)


test_packed_lengths = tries(
    law.packed_lengths,
    both(packed((9, 1, 5), (9, 1, 5))),
    packed((9, 1, 5), (9, 1, 5), Causal()),
    packed((2, 5, 1), (9, 5, 12), Causal()),
    packed((3, 7, 4), (12, 7, 5), heads=6, kv_heads=2),
    packed((1, 1, 1, 1), (20, 7, 1, 64), Causal()),
    packed((70, 33), (70, 33), Causal(), kv_heads=1, heads=2),
    packed((9, 4, 6), (9, 4, 6), Window(3, 1)),
    packed((2, 5, 3), (9, 5, 12), Causal(), Alibi(batched=True), softcap=3.0),
)
test_packed_empty = tries(
    law.packed_empty,
    packed((5, 0, 4), (5, 0, 4), Causal()),
    packed((0, 5, 4), (3, 5, 4)),
    packed((5, 2, 4), (5, 0, 4)),
    packed((1, 0, 1), (9, 0, 4), Causal()),
)
test_variants_together = tries(law.variants_together, variant_problems(), ci=variant_three_way_problems)
