"""Numerics: which problems each law is tried on."""

from attn_spec.invariants import numerics as law
from attn_spec.masks import Bias, Causal, Delivery, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=33, kv_len=33, head_dim=32, v_dim=32)
LONG = Problem(batch=1, heads=1, kv_heads=1, q_len=5, kv_len=2001, head_dim=16, v_dim=16)

test_within_the_bound = tries(
    law.within_the_bound,
    both(PLAIN, PLAIN.replace(values="mild"), PLAIN.replace(values="shared-key")),
    [PLAIN.replace(dtype=dtype, values=values) for dtype in ("float64", "float16") for values in ("sharp", "mild")],
    PLAIN.replace(batch=1, q_len=6, kv_len=300, dtype="bfloat16"),
    PLAIN.replace(batch=1, q_len=6, kv_len=300, dtype="float16", mask=(Visible("QK"),)),
    Problem(
        batch=3, heads=4, kv_heads=2, q_len=6, kv_len=19, head_dim=24, v_dim=40, mask=(Visible("BHQK"),), scale=0.3
    ),
    Problem(
        batch=3, heads=4, kv_heads=2, q_len=11, kv_len=11, head_dim=24, v_dim=40, mask=(Causal(), Bias("BHQK")),
        delivery=Delivery("additive"), layout="transposed", dtype="bfloat16",
    ),
)  # fmt: skip
test_large_logits = tries(
    law.large_logits,
    PLAIN.replace(values="large"),
    PLAIN.replace(values="large", mask=(Causal(),)),
    PLAIN.replace(values="large", q_len=5, kv_len=9, mask=(Visible("BHQK"),)),
)
test_value_sizes = tries(
    law.value_sizes,
    [
        PLAIN.replace(values=values, dtype=dtype)
        for values in ("tiny", "huge")
        for dtype in ("float32", "bfloat16", "float16")
    ],
)
test_long_rows = tries(
    law.long_rows,
    [LONG.replace(values=values) for values in ("flat", "sharp")],
    [LONG.replace(values="flat", dtype=dtype) for dtype in ("bfloat16", "float16")],
)
test_half_range = tries(law.half_range, PLAIN.replace(values="deep", dtype="float16"))
