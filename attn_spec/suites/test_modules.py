"""Modules on hidden states: which problems each law is tried on. Collected for modules only."""

from attn_spec.invariants import around, module_running
from attn_spec.invariants import modules as law
from attn_spec.invariants.pairs import pair_bias
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=7, kv_len=7, head_dim=8, v_dim=8)
SQUARE = PLAIN.replace(batch=3, q_len=3, kv_len=3)  # as many samples as tokens and heads
GROUPED = PLAIN.replace(heads=4, kv_heads=2, q_len=5, kv_len=5)
ACROSS = PLAIN.replace(q_len=5, kv_len=9)
CAUSAL = PLAIN.replace(mask=(Causal(),))
PADDED = PLAIN.replace(mask=(KeyPadding((7, 4)),), delivery=Delivery(shape="B11K"))
PADDED_KEYS = PLAIN.replace(mask=(KeyPadding((4, 7)),), delivery=Delivery("key-padding"))
PADDED_BOTH = PLAIN.replace(mask=(KeyPadding((5, 7)),), delivery=Delivery(shape="B1QK"))
PADDED_BIAS = PLAIN.replace(mask=(KeyPadding((7, 3)),), delivery=Delivery("additive", shape="B11K", hidden="-1e9"))
EVERY = (PLAIN, SQUARE, GROUPED, ACROSS, CAUSAL, PADDED, PADDED_KEYS, PADDED_BOTH, PADDED_BIAS)
PADDINGS = (PADDED, PADDED_KEYS, PADDED_BOTH, PADDED_BIAS)

test_module_output = tries(law.module_output, both(PLAIN, ACROSS), SQUARE, PLAIN.replace(q_len=1, kv_len=1))
test_module_answer = tries(
    law.module_answer,
    EVERY,
    PLAIN.replace(dtype="float64"),
    PLAIN.replace(dtype="bfloat16"),
    PLAIN.replace(q_len=65, kv_len=65),
)
test_module_weights = tries(law.module_weights, PLAIN, CAUSAL, ACROSS, PADDED, PADDED_KEYS, PADDED_BOTH)
test_batch_mask = tries(
    law.batch_mask,
    SQUARE.replace(mask=(Visible("BQK"),), delivery=Delivery(shape="B1QK")),
    SQUARE.replace(mask=(Bias("BQK"),), delivery=Delivery("additive", shape="B1QK")),
)
test_context_read = tries(law.context_read, PLAIN, SQUARE, GROUPED)
test_projections_apart = tries(law.projections_apart, PLAIN)
test_rotated_alike = tries(law.rotated_alike, PLAIN, GROUPED)
test_pair_bias = tries(pair_bias, PLAIN)
test_token_order = tries(law.token_order, PLAIN, SQUARE)
test_module_no_future_leak = tries(
    law.module_no_future_leak, CAUSAL, CAUSAL.replace(q_len=33, kv_len=33), CAUSAL.replace(batch=3, q_len=3, kv_len=3)
)
test_padding_invisible = tries(law.padding_invisible, PADDINGS)
test_no_gradient_to_padding = tries(law.no_gradient_to_padding, PADDED, PADDED_KEYS)
test_gradients_reach_weights = tries(law.gradients_reach_weights, PLAIN, ACROSS)
test_dropout_off_in_eval = tries(module_running.dropout_off_in_eval, PLAIN, CAUSAL)
test_train_equals_eval = tries(module_running.train_equals_eval, PLAIN, CAUSAL, PADDED, PADDED_KEYS)
test_module_batch_of_one = tries(module_running.module_batch_of_one, PLAIN, SQUARE, PADDED, PADDED_KEYS)
test_module_calls_independent = tries(module_running.module_calls_independent, PLAIN, CAUSAL, PADDED, PADDED_KEYS)
test_ways_of_running_agree = tries(module_running.ways_of_running_agree, PLAIN, CAUSAL, PADDED, PADDED_KEYS)

test_rotation_whole = tries(around.rotation_whole, PLAIN.replace(batch=3, head_dim=16, v_dim=16))
test_past_the_table = tries(around.past_the_table, CAUSAL.replace(q_len=16, kv_len=16))
test_positions_given = tries(around.positions_given, PLAIN, CAUSAL)
test_hidden_gradients = tries(around.hidden_gradients, PLAIN, ACROSS, CAUSAL)
test_told_by_sample = tries(around.told_by_sample, PLAIN, CAUSAL)
test_masks_independent = tries(around.masks_independent, PADDED, PADDED_KEYS)
test_values_unmoved = tries(around.values_unmoved, PLAIN)
