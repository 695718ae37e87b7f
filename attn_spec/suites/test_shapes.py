"""Shapes: which problems each law is tried on."""

from attn_spec.invariants import shapes as law
from attn_spec.masks import Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

BASE = Problem(batch=2, heads=2, kv_heads=2, q_len=128, kv_len=128, head_dim=64, v_dim=64)
SMALL = Problem(batch=2, heads=3, kv_heads=3, q_len=5, kv_len=7, head_dim=8, v_dim=8)


def sized(n: int, heads: int = 2, **others: int) -> Problem:
    return Problem(batch=1, heads=heads, kv_heads=heads, q_len=n, kv_len=n, head_dim=16, v_dim=16).replace(**others)


test_output_shape = tries(law.output_shape, SMALL, SMALL.replace(v_dim=4), SMALL.replace(heads=6), BASE)
test_output_dtype = tries(law.output_dtype, both(SMALL, SMALL.replace(q_len=7, mask=(Causal(),)), BASE))
test_base_problems = tries(
    law.base_problems,
    BASE,
    BASE.replace(mask=(Causal(),)),
    BASE.replace(mask=(Causal(),), dtype="bfloat16"),
    BASE.replace(kv_len=256),
    BASE.replace(mask=(KeyPadding((128, 70)),), delivery=Delivery("key-padding")),
)
test_weights_shape = tries(law.weights_shape, SMALL, SMALL.replace(heads=6))
test_cross_lengths = tries(
    law.cross_lengths,
    both(SMALL, SMALL.replace(q_len=9, kv_len=4)),
    SMALL.replace(q_len=1, kv_len=33),
    SMALL.replace(q_len=33, kv_len=1),
    SMALL.replace(q_len=5, kv_len=130),
)
test_edge_sizes = tries(
    law.edge_sizes,
    [sized(n) for n in (1, 2, 15, 17, 31, 33, 63, 65, 127, 129)],
    sized(1, heads=1, head_dim=1, v_dim=1),
    sized(33, head_dim=20, v_dim=20),
    sized(9, head_dim=80, v_dim=80),
    sized(9, head_dim=128, v_dim=128),
    sized(65).replace(dtype="bfloat16"),
    [sized(2, kv_len=2, q_len=16).replace(dtype=dtype, values="mild") for dtype in ("bfloat16", "float16")],
    sized(65).replace(mask=(Causal(),)),
    sized(129).replace(mask=(Visible("BHQK"),)),
    sized(257, heads=1),
    ci=[sized(n) for n in (3, 47, 97, 255, 511, 513, 1025)],
)
test_zero_sizes = tries(law.zero_sizes, [SMALL.replace(batch=0), SMALL.replace(q_len=0), SMALL.replace(kv_len=0)])
test_value_width = tries(
    law.value_width,
    both(SMALL.replace(v_dim=4), SMALL.replace(v_dim=12)),
    SMALL.replace(v_dim=1),
    SMALL.replace(q_len=7, v_dim=4, mask=(Causal(),)),
)
test_mismatched_sizes = tries(law.mismatched_sizes, SMALL)
