"""Randomness: which problems each law is tried on."""

from attn_spec.invariants import randomness as law
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import tries

PLAIN = Problem(
    batch=2, heads=4, kv_heads=4, q_len=64, kv_len=64, head_dim=64, v_dim=64, dropout=0.3, values="mild"
)  # fmt: skip
# blocks of 16, 32, 64 and 128 keys all end in one that is not full
TAIL = PLAIN.replace(batch=1, q_len=32, kv_len=173, dropout=0.2)
GROUPED = PLAIN.replace(batch=1, kv_heads=2)
CAUSAL = PLAIN.replace(batch=1, heads=2, kv_heads=2, mask=(Causal(),))
HIGH = PLAIN.replace(dropout=0.9)
LOW = PLAIN.replace(dropout=0.05)
HALF = PLAIN.replace(dtype="bfloat16", dropout=0.1)
SMALL = Problem(batch=2, heads=2, kv_heads=2, q_len=16, kv_len=16, head_dim=32, v_dim=32, dropout=0.3, values="mild")
MASKED = SMALL.replace(mask=(Visible("BHQK", empty_rows=(3,)),))
PADDED = SMALL.replace(mask=(KeyPadding((11, 16)),))
BIASED = SMALL.replace(mask=(Bias("BHQK"),), delivery=Delivery("additive"))
OFF = SMALL.replace(dropout=0.0)

MORE = [HIGH, LOW, HALF, PLAIN.replace(batch=1, q_len=128, kv_len=128), PLAIN.replace(dropout=0.5)]
test_dropout_rate = tries(
    law.dropout_rate,
    PLAIN,
    TAIL,
    CAUSAL,
    MASKED,
    PADDED,
    ci=[*MORE, GROUPED, BIASED],
)
test_dropout_scale = tries(law.dropout_scale, PLAIN, TAIL, CAUSAL, ci=[*MORE, GROUPED])
test_dropout_independent = tries(law.dropout_independent, PLAIN, TAIL, GROUPED, ci=[*MORE, CAUSAL])
test_dropout_on_weights = tries(law.dropout_on_weights, SMALL, ci=[PLAIN, HALF])
test_dropout_off = tries(law.dropout_off, OFF, OFF.replace(mask=(Causal(),)), ci=[OFF.replace(dtype="bfloat16")])
test_dropout_backward = tries(
    law.dropout_backward,
    SMALL,
    SMALL.replace(heads=4, mask=(Causal(),)),
    ci=[SMALL.replace(dtype="bfloat16"), SMALL.replace(dropout=0.7), PLAIN],
)
test_dropout_seeded = tries(law.dropout_seeded, PLAIN, TAIL, ci=[HIGH, HALF])
test_dropout_advances = tries(law.dropout_advances, PLAIN, TAIL, ci=[HIGH, HALF])
test_dropout_hides = tries(law.dropout_hides, CAUSAL, MASKED, PADDED, ci=[MASKED.replace(dtype="bfloat16")])
test_dropout_all = tries(law.dropout_all, SMALL.replace(dropout=1.0))
