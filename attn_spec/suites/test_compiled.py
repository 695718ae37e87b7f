"""Execution in other ways: which problems each law is tried on. What compiles, or runs without data, is in `ci` only."""

from attn_spec.invariants import compiled as law
from attn_spec.invariants.autocast import autocast
from attn_spec.masks import Causal, Delivery, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import tries

PLAIN = Problem(batch=2, heads=2, kv_heads=2, q_len=7, kv_len=7, head_dim=16, v_dim=16)
WIDE = PLAIN.replace(q_len=5, kv_len=9, v_dim=8)
MILD = PLAIN.replace(values="mild")
MASKED = MILD.replace(mask=(Visible("BQK"),))
ADDITIVE = MASKED.replace(delivery=Delivery("additive", hidden="min"))

test_compiled_equals_eager = tries(law.compiled_equals_eager, ci=[PLAIN])
test_compiled_other_shapes = tries(law.compiled_other_shapes, ci=[PLAIN])
test_no_graph_break = tries(law.no_graph_break, ci=[PLAIN])
test_exported = tries(law.exported, ci=[PLAIN])
test_fake_tensors = tries(law.fake_tensors, ci=[PLAIN, WIDE])
test_autocast = tries(
    autocast,
    MILD,
    MASKED,
    ADDITIVE,
    MILD.replace(mask=(Causal(),)),
    MILD.replace(heads=4),
    PLAIN.replace(batch=3, heads=4, kv_heads=4, q_len=20, kv_len=20),  # scores beyond the logarithm of what float16 holds
)
test_deterministic_mode = tries(law.deterministic_mode, PLAIN.replace(q_len=17, kv_len=17))
test_threads = tries(law.threads, PLAIN)
test_batch_invariant = tries(law.batch_invariant, PLAIN.replace(batch=3, q_len=16, kv_len=64))
test_vmapped = tries(law.vmapped, PLAIN)
