"""Variants inside modules: which problems each law is tried on. Collected for modules only."""

from attn_spec.invariants import module_variants as law
from attn_spec.masks import Alibi, Causal, Window
from attn_spec.problem import Problem
from attn_spec.suites.suite import tries

PLAIN = Problem(batch=2, heads=4, kv_heads=4, q_len=9, kv_len=9, head_dim=16, v_dim=16)

test_variant_used = tries(
    law.variant_used,
    PLAIN.replace(softcap=1.0),
    PLAIN.replace(mask=(Window(2, 2),)),
    PLAIN.replace(mask=(Causal(), Window(2))),
    PLAIN.replace(mask=(Alibi(),)),
    PLAIN.replace(sinks=True),
)
test_alibi_inside = tries(
    law.alibi_inside,
    PLAIN,
    PLAIN.replace(heads=8, kv_heads=8),
    PLAIN.replace(heads=6, kv_heads=6),
)
