"""Scaling: which problems each law is tried on."""

from attn_spec.invariants import scaling as law
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries


def probe(head_dim: int, heads: int = 3, kv_heads: int = 3, v_dim: int = 0, **others: object) -> Problem:
    sizes = {"head_dim": head_dim, "heads": heads, "kv_heads": kv_heads, "v_dim": v_dim or head_dim}
    return Problem(batch=1, q_len=4, kv_len=4).replace(**sizes, **others)


FULL = Problem(batch=2, heads=4, kv_heads=2, q_len=6, kv_len=11, head_dim=24, v_dim=16)
SQUARE = Problem(batch=2, heads=3, kv_heads=3, q_len=6, kv_len=6, head_dim=16, v_dim=16, mask=(Causal(),))
ADDED = Delivery("additive")

test_default_scale = tries(
    law.default_scale,
    [probe(d) for d in (4, 16, 24, 64, 128)],
    probe(16, heads=6, kv_heads=2),
    probe(32, heads=4, kv_heads=1),
    probe(16, v_dim=40),
    probe(32, heads=1, kv_heads=1),
    probe(64, dtype="bfloat16"),
    probe(16, mask=(Causal(),)),
)
test_explicit_scale = tries(
    law.explicit_scale,
    [probe(16, scale=scale) for scale in (0.5, 0.1, 1.0)],
    probe(64, heads=2, kv_heads=2, scale=0.125),
    probe(16, heads=4, kv_heads=2, scale=0.5),
    probe(16, scale=0.5, mask=(Causal(),)),
    probe(16, scale=0.5, dtype="bfloat16"),
)
test_scale_and_bias = tries(
    law.scale_and_bias,
    both(FULL.replace(mask=(Bias("BHQK"),), delivery=ADDED)),
    FULL.replace(kv_heads=4, v_dim=24, mask=(Bias("QK"),), delivery=ADDED),
    FULL.replace(scale=0.5, mask=(Bias("HQK"),), delivery=ADDED),
    FULL.replace(scale=0.05, mask=(Bias("BHQK"), Visible("BHQK")), delivery=ADDED),
)
test_edge_scales = tries(
    law.edge_scales,
    SQUARE.replace(scale=0.0),
    SQUARE.replace(scale=-0.5),
)
test_zero_scale = tries(
    law.zero_scale,
    FULL.replace(scale=0.0),
    FULL.replace(kv_heads=4, v_dim=24, scale=0.0),
    FULL.replace(kv_heads=4, v_dim=24, scale=-0.5),
    FULL.replace(kv_heads=4, v_dim=24, scale=-0.5, values="large"),
)
test_scale_in_full = tries(
    law.scale_in_full,
    FULL.replace(scale=0.35, q_len=1),
    FULL.replace(kv_heads=4, v_dim=24, scale=0.35, q_len=1, kv_len=70),
    both(FULL.replace(scale=0.35)),
    FULL.replace(scale=0.35, mask=(Causal(),), kv_len=6),
    FULL.replace(scale=0.35, mask=(Visible("BHQK"),)),
    FULL.replace(kv_heads=4, v_dim=24, scale=0.02, mask=(KeyPadding((11, 4)),), delivery=Delivery("key-padding")),
    FULL.replace(kv_heads=1, scale=2.0, values="mild"),
)
