"""Causality: which problems each law is tried on."""

from attn_spec.invariants import causality as law
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=9, kv_len=9, head_dim=16, v_dim=16)
SQUARE = PLAIN.replace(mask=(Causal(),))
LONGER = SQUARE.replace(q_len=5, kv_len=8)  # more keys than queries
SHORTER = SQUARE.replace(q_len=8, kv_len=5)
IN_MASK = Delivery("bool", flag=False)

test_no_future_leak = tries(
    law.no_future_leak,
    both(SQUARE),
    SQUARE.replace(q_len=33, kv_len=33),
    SQUARE.replace(q_len=130, kv_len=130, batch=1, heads=2, kv_heads=1),
    LONGER,
    SHORTER,
    SQUARE.replace(mask=(Causal(), Visible("BHQK"))),
    SQUARE.replace(mask=(Causal(), Bias("HQK")), delivery=Delivery("additive")),
    SQUARE.replace(heads=6, kv_heads=2, scale=0.4),
    SQUARE.replace(delivery=IN_MASK),
)
test_no_gradient_from_the_future = tries(law.no_gradient_from_the_future, SQUARE, LONGER)
test_past_and_present_seen = tries(
    law.past_and_present_seen,
    SQUARE.replace(values="mild"),
    SQUARE.replace(q_len=17, kv_len=17, values="mild"),
    LONGER.replace(values="mild"),
    SQUARE.replace(delivery=IN_MASK, values="mild"),
)
test_causal_alignment = tries(
    law.causal_alignment,
    both(LONGER, SHORTER),
    LONGER.replace(q_len=1),
    SHORTER.replace(kv_len=1),
    SHORTER.replace(q_len=70, kv_len=33),
    [LONGER.replace(q_len=n, kv_len=n + shift, batch=1) for n in (17, 33) for shift in (1, 5, 70)],
    LONGER.replace(q_len=2, kv_len=67),
    LONGER.replace(mask=(Causal("top-left"),), delivery=IN_MASK),
    LONGER.replace(mask=(Causal("bottom-right"),), delivery=IN_MASK),
)
test_causal_with_features = tries(
    law.causal_with_features,
    both(SQUARE.replace(heads=6, kv_heads=2)),
    SQUARE.replace(scale=0.4),
    SQUARE.replace(v_dim=12),
    LONGER.replace(heads=4, kv_heads=1, scale=0.1, v_dim=8),
    SQUARE.replace(q_len=1, kv_len=1),
    SQUARE.replace(q_len=64, kv_len=64, batch=1, dtype="bfloat16"),
    SQUARE.replace(heads=6, kv_heads=3, mask=(Causal(), KeyPadding((9, 4))), delivery=Delivery("key-padding")),
    SQUARE.replace(layout="transposed"),
    ci=[SQUARE.replace(q_len=257, kv_len=257, batch=1)],
)
test_future_seen_unasked = tries(
    law.future_seen_unasked,
    PLAIN.replace(values="mild"),
    PLAIN.replace(values="mild", q_len=5, kv_len=8),
    PLAIN.replace(values="mild", mask=(Visible("QK"),)),
)
