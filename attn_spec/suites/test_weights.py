"""Weights: which problems each law is tried on."""

from attn_spec.invariants import weights as law
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=9, kv_len=9, head_dim=16, v_dim=16)
CROSS = Problem(batch=3, heads=4, kv_heads=2, q_len=5, kv_len=18, head_dim=8, v_dim=6)
CAUSAL = PLAIN.replace(mask=(Causal(),))
MASKED = PLAIN.replace(mask=(Visible("BHQK"),))
PADDED = CROSS.replace(kv_heads=4, v_dim=8, mask=(KeyPadding((18, 7, 11)),))
BIASED = PLAIN.replace(mask=(Bias("BHQK"),), delivery=Delivery("additive"))

test_rows_sum_to_one = tries(law.rows_sum_to_one, both(PLAIN, CAUSAL, MASKED), CROSS, PADDED, BIASED)
test_weights_not_negative = tries(law.weights_not_negative, PLAIN, MASKED, BIASED)
test_weights_agree = tries(
    law.weights_agree, both(PLAIN, CAUSAL), PLAIN.replace(values="repeated"), CROSS, MASKED, PADDED, BIASED
)
test_linear_in_values = tries(law.linear_in_values, PLAIN, CROSS, MASKED)
test_inside_the_hull = tries(law.inside_the_hull, PLAIN.replace(q_len=65, kv_len=65), CAUSAL, MASKED)
test_key_order = tries(
    law.key_order, PLAIN, CROSS, MASKED, PADDED.replace(delivery=Delivery("key-padding")), PLAIN.replace(kv_len=70)
)
test_query_order = tries(law.query_order, PLAIN, CROSS, MASKED)
test_head_order = tries(law.head_order, PLAIN, CROSS, MASKED)
test_batch_order = tries(law.batch_order, CROSS, MASKED.replace(batch=3), PADDED)
test_row_shift = tries(law.row_shift, PLAIN, PLAIN.replace(batch=1, q_len=12, kv_len=20))
test_returned_weights = tries(law.returned_weights, PLAIN, CROSS, CAUSAL, MASKED)
test_weights_of_empty_rows = tries(
    law.weights_of_empty_rows, PLAIN.replace(mask=(Visible("BHQK", empty_rows=(2,)),))
)
