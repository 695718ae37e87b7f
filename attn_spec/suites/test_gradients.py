"""Gradients: which problems each law is tried on."""

from attn_spec.invariants import forward_mode
from attn_spec.invariants import gradients as law
from attn_spec.masks import Alibi, Bias, Causal, Delivery, KeyPadding, Lengths, Visible, Window
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=9, kv_len=9, head_dim=16, v_dim=16)
GROUPED = PLAIN.replace(heads=6, kv_heads=2)
CAUSAL = PLAIN.replace(mask=(Causal(),))
LONGER = PLAIN.replace(q_len=5, kv_len=12)
LONG = PLAIN.replace(batch=1, heads=2, kv_heads=1, q_len=70, kv_len=70)
ADDED = Delivery("additive")
PACKED = PLAIN.replace(batch=3, q_len=9, kv_len=12, mask=(Causal(), Lengths((2, 9, 5), (9, 12, 5))))

EACH = [
    *both(PLAIN, CAUSAL),
    GROUPED,
    LONGER.replace(v_dim=8),
    PLAIN.replace(v_dim=24),
    LONG.replace(mask=(Causal(),)),
    PLAIN.replace(q_len=1, kv_len=20),
    PLAIN.replace(mask=(Visible("BHQK"),)),
    PACKED,
]
test_query_gradient = tries(law.query_gradient, EACH, PLAIN.replace(scale=0.3))
test_key_gradient = tries(law.key_gradient, EACH, PLAIN.replace(scale=0.3))
test_value_gradient = tries(law.value_gradient, EACH)
test_bias_gradient = tries(
    law.bias_gradient,
    [PLAIN.replace(mask=(Bias(axes),), delivery=ADDED) for axes in ("BHQK", "HQK", "QK", "BK")],
    PLAIN.replace(mask=(Bias("HQK"),), delivery=Delivery("additive", "HQK"), scale=0.3),
    GROUPED.replace(mask=(Causal(), Bias("BQK")), delivery=ADDED),
)
test_sink_gradient = tries(
    law.sink_gradient,
    both(PLAIN.replace(sinks=True)),
    GROUPED.replace(sinks=True, mask=(Causal(),), values="mild"),
    PLAIN.replace(sinks=True, mask=(Window(2, 1),)),
)
test_lse_gradient = tries(
    law.lse_gradient,
    both(PLAIN),
    GROUPED.replace(mask=(Causal(),)),
    LONGER.replace(softcap=2.0),
    PLAIN.replace(mask=(Window(3, 1),)),
    PLAIN.replace(sinks=True),
    LONG,
)
DOUBLE = PLAIN.replace(dtype="float64", q_len=5, kv_len=5, head_dim=8, v_dim=8)
test_finite_differences = tries(
    law.finite_differences,
    DOUBLE,
    DOUBLE.replace(mask=(Causal(),), heads=6),
    DOUBLE.replace(kv_len=8, mask=(Bias("HQK"),), delivery=ADDED, scale=0.4),
    DOUBLE.replace(softcap=2.0, mask=(Window(2, 1),)),
    DOUBLE.replace(mask=(Alibi(), Causal()), sinks=True),
    DOUBLE.replace(softcap=2.0),
    DOUBLE.replace(mask=(Causal(), Lengths((5, 2), (5, 4)))),
)
test_empty_row_gradients = tries(
    law.empty_row_gradients,
    PLAIN.replace(mask=(Visible("BHQK", empty_rows=(2, 8)),)),
    PLAIN.replace(mask=(Visible("BHQK", empty_rows=(2,)),), delivery=Delivery("additive", "BHQK")),
    PLAIN.replace(q_len=8, kv_len=5, mask=(Causal(),)),
    PLAIN.replace(mask=(KeyPadding((0, 6)),), delivery=Delivery("key-padding")),
    PLAIN.replace(q_len=12, kv_len=5, mask=(Window(1, 1),)),
    PACKED.replace(mask=(Lengths((9, 0, 4), (5, 7, 12)),)),
    PACKED.replace(mask=(Causal(), Lengths((9, 3, 0), (5, 0, 12)))),
)
test_hidden_gradients = tries(
    law.hidden_gradients,
    PLAIN.replace(mask=(Visible("BK"),)),
    PLAIN.replace(mask=(KeyPadding((9, 4)),), delivery=Delivery("key-padding")),
    PLAIN.replace(q_len=3, kv_len=12, mask=(Window(2, 1),)),
)
test_strided_cotangents = tries(law.strided_cotangents, PLAIN, GROUPED.replace(mask=(Causal(),)), LONG)
test_gradients_together = tries(
    law.gradients_together,
    both(GROUPED.replace(mask=(Causal(), KeyPadding((9, 5))))),
    GROUPED.replace(mask=(Bias("HQK"),), delivery=ADDED, scale=0.4, layout="transposed"),
    both(PLAIN.replace(mask=(Window(3, 1),)), PLAIN.replace(softcap=2.0)),
    GROUPED.replace(mask=(Causal(), Window(3, None))),
    GROUPED.replace(softcap=2.0, mask=(Causal(),), scale=0.4),
    LONGER.replace(softcap=20.0, values="large"),
    PLAIN.replace(mask=(Alibi(),)),
    GROUPED.replace(mask=(Causal(), Alibi(batched=True)), softcap=3.0),
    LONGER.replace(mask=(Alibi(), Window(4, 2))),
    PLAIN.replace(mask=(Causal(), Window(3, None)), sinks=True),
    LONG.replace(mask=(Window(17, 5),)),
    PLAIN.replace(q_len=1, kv_len=20, mask=(Window(6, 0),), softcap=2.0),
    GROUPED.replace(q_len=1, kv_len=70, mask=(Causal(),)),
    PLAIN.replace(dtype="float16"),
    both(PACKED.replace(heads=6, kv_heads=2)),
    PACKED.replace(softcap=3.0),
)
test_second_order = tries(law.second_order, DOUBLE, DOUBLE.replace(kv_heads=1, mask=(Causal(),)))
test_gradient_for_some = tries(
    law.gradient_for_some, PLAIN, PLAIN.replace(mask=(Bias("HQK"),), delivery=ADDED), PLAIN.replace(sinks=True)
)
test_forward_mode = tries(
    forward_mode.forward_mode, DOUBLE, DOUBLE.replace(mask=(Causal(),), scale=0.4), DOUBLE.replace(heads=6, kv_len=8)
)
