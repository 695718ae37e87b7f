"""Execution: which problems each law is tried on."""

from attn_spec.invariants import execution as law
from attn_spec.masks import Bias, Causal, Delivery, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=7, kv_len=7, head_dim=16, v_dim=16)
GROUPED = PLAIN.replace(heads=4, kv_heads=2, q_len=5, kv_len=9, v_dim=8)
CAUSAL = PLAIN.replace(mask=(Causal(),))
MASKED = PLAIN.replace(mask=(Visible("BHQK"),))

test_inputs_unchanged = tries(
    law.inputs_unchanged, PLAIN, GROUPED, CAUSAL, MASKED, PLAIN.replace(scale=0.3), PLAIN.replace(layout="transposed")
)
test_global_state_unchanged = tries(
    law.global_state_unchanged, both(PLAIN, GROUPED, CAUSAL, MASKED), PLAIN.replace(scale=0.3)
)
test_strided_inputs = tries(
    law.strided_inputs,
    both(PLAIN.replace(layout="transposed")),
    PLAIN.replace(layout="sliced"),
    GROUPED.replace(layout="transposed"),
    CAUSAL.replace(layout="sliced"),
    [PLAIN.replace(layout=layout) for layout in ("expanded", "stepped")],
    GROUPED.replace(layout="expanded"),
    MASKED.replace(layout="transposed"),
    MASKED.replace(layout="one-key"),
)
test_calls_independent = tries(
    law.calls_independent,
    PLAIN,
    CAUSAL,
    MASKED,
    [CAUSAL.replace(mask=(Causal(), Visible(axes)), delivery=Delivery("bool", axes)) for axes in ("QK", "BHQK")],
    MASKED.replace(mask=(Bias("QK"),), delivery=Delivery("additive", "QK")),
)
test_parameters_understood = tries(law.parameters_understood, PLAIN)
test_deterministic = tries(law.deterministic, PLAIN, CAUSAL.replace(q_len=40, kv_len=40))
test_batch_of_one = tries(law.batch_of_one, PLAIN, GROUPED.replace(batch=3), CAUSAL, MASKED)
test_reads_inside = tries(
    law.reads_inside,
    both(PLAIN.replace(layout="guarded")),
    PLAIN.replace(layout="guarded", q_len=17, kv_len=33),
    CAUSAL.replace(layout="guarded", q_len=70, kv_len=70),
    MASKED.replace(mask=(Visible("BHQK", empty_rows=(2,)),), layout="guarded"),
)
test_operator_registration = tries(law.operator_registration, PLAIN)
test_output_apart = tries(law.output_apart, PLAIN, PLAIN.replace(q_len=1, kv_len=1), PLAIN.replace(kv_len=1))

test_memory_linear = tries(
    law.memory_linear, ci=[Problem(batch=1, heads=4, kv_heads=4, q_len=2048, kv_len=2048, head_dim=32, v_dim=32)]
)
