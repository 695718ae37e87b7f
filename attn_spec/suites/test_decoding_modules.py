"""Modules with a cache: which problems each law is tried on. Collected for modules only."""

from attn_spec.invariants import decoding_modules as law
from attn_spec.masks import Causal, KeyPadding
from attn_spec.problem import Problem
from attn_spec.suites.suite import tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=7, kv_len=7, head_dim=8, v_dim=8, mask=(Causal(),))
GROUPED = PLAIN.replace(heads=4, kv_heads=2, batch=3, q_len=6, kv_len=6)
LONG = GROUPED.replace(q_len=21, kv_len=21)
PADDED = GROUPED.replace(mask=(KeyPadding((6, 3, 5), left=True), Causal()))

test_session_steps = tries(law.session_steps, PLAIN, GROUPED, ci=[LONG, GROUPED.replace(dtype="bfloat16")])
test_session_chunks = tries(law.session_chunks, GROUPED.replace(q_len=8, kv_len=8), ci=[LONG])
test_session_prefill = tries(law.session_prefill, GROUPED, ci=[LONG, PLAIN.replace(dtype="float64")])
test_session_anew = tries(law.session_anew, GROUPED, ci=[LONG])
test_cache_unasked = tries(law.cache_unasked, GROUPED, ci=[PLAIN])
test_session_batch = tries(law.session_batch, GROUPED, PADDED, ci=[LONG])
