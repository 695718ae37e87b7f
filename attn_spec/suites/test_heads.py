"""Heads: which problems each law is tried on."""

from attn_spec.invariants import heads as law
from attn_spec.masks import Bias, Causal, Delivery, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

GROUPED = Problem(batch=2, heads=6, kv_heads=2, q_len=5, kv_len=7, head_dim=16, v_dim=16)
SQUARE = GROUPED.replace(q_len=7)

test_kv_head_of_each_query_head = tries(
    law.kv_head_of_each_query_head,
    GROUPED,
    GROUPED.replace(heads=4),
    GROUPED.replace(heads=6, kv_heads=3),
    GROUPED.replace(heads=8, kv_heads=2),
    GROUPED.replace(heads=3, kv_heads=3),
)
test_multi_query = tries(
    law.multi_query, both(GROUPED.replace(kv_heads=1)), SQUARE.replace(kv_heads=1, mask=(Causal(),))
)
test_grouped_equals_expanded = tries(
    law.grouped_equals_expanded, both(GROUPED), GROUPED.replace(heads=4, v_dim=8), GROUPED.replace(heads=6, kv_heads=3)
)
test_heads_apart = tries(
    law.heads_apart, GROUPED.replace(kv_heads=6), GROUPED, GROUPED.replace(heads=4, kv_heads=4, q_len=4, kv_len=4)
)
test_grouped_with_features = tries(
    law.grouped_with_features,
    both(GROUPED.replace(mask=(Visible("BHQK"),))),
    GROUPED.replace(mask=(Bias("HQK"),), delivery=Delivery("additive")),
    GROUPED.replace(mask=(Visible("BQK"),), scale=0.4, v_dim=8),
    SQUARE.replace(heads=9, kv_heads=3, mask=(Causal(), Visible("HQK"))),
    SQUARE.replace(heads=4, kv_heads=2, layout="transposed"),
    GROUPED.replace(heads=6, kv_heads=2, q_len=1, kv_len=131),
    GROUPED.replace(heads=6, kv_heads=3, q_len=1, kv_len=70, mask=(Causal(),)),
)
test_indivisible_heads = tries(law.indivisible_heads, GROUPED.replace(heads=2))
