"""Execution: which problems each law is tried on."""

from attn_spec.invariants import execution as law
from attn_spec.masks import Causal, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=7, kv_len=7, head_dim=16, v_dim=16)
GROUPED = PLAIN.replace(heads=4, kv_heads=2, q_len=5, kv_len=9, v_dim=8)
CAUSAL = PLAIN.replace(mask=(Causal(),))
MASKED = PLAIN.replace(mask=(Visible("BHQK"),))

test_inputs_unchanged = tries(
    law.inputs_unchanged, PLAIN, GROUPED, CAUSAL, MASKED, PLAIN.replace(scale=0.3), PLAIN.replace(layout="transposed")
)
test_global_state_unchanged = tries(law.global_state_unchanged, PLAIN, GROUPED, CAUSAL, MASKED)
test_strided_inputs = tries(
    law.strided_inputs,
    both(PLAIN.replace(layout="transposed")),
    PLAIN.replace(layout="sliced"),
    GROUPED.replace(layout="transposed"),
    CAUSAL.replace(layout="sliced"),
    MASKED.replace(layout="transposed"),
)
test_calls_independent = tries(law.calls_independent, PLAIN, CAUSAL, MASKED)
test_parameters_understood = tries(law.parameters_understood, PLAIN)
