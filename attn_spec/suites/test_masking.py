"""Masking: which problems each law is tried on."""

from attn_spec.invariants import masking as law
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import Problem
from attn_spec.suites.suite import both, tries

PLAIN = Problem(batch=2, heads=3, kv_heads=3, q_len=9, kv_len=9, head_dim=16, v_dim=16)
MASKED = PLAIN.replace(mask=(Visible("BHQK"),))
CROSS = PLAIN.replace(batch=3, heads=4, kv_heads=2, q_len=5, kv_len=12, v_dim=8)
CUBE = PLAIN.replace(batch=3)  # B == H: a mask on the wrong axis fits
ADDED, PADDING = Delivery("additive"), Delivery("key-padding")


def shaped(axes: str, shape: str, form: str = "bool", base: Problem = MASKED) -> Problem:
    return base.replace(mask=(Visible(axes),), delivery=Delivery(form, shape))  # type: ignore[arg-type]


SHAPES = [
    shaped("QK", "QK"),
    shaped("QK", "11QK"),
    shaped("HQK", "HQK"),
    shaped("HQK", "1HQK"),
    shaped("BQK", "B1QK"),
    shaped("BK", "B11K"),
    shaped("HK", "1H1K"),
    shaped("K", "1K"),
    MASKED.replace(mask=(Visible("HQ", empty_rows=(2, 5)),), delivery=Delivery("bool", "1HQ1")),
    shaped("BHK", "BH1K", base=CROSS),
]

test_mask_taken = tries(
    law.mask_taken,
    Problem(q_len=128, kv_len=128, head_dim=64, v_dim=64, mask=(Visible("BHQK"),), delivery=Delivery(shape="BHQK")),
)
test_mask_polarity = tries(
    law.mask_polarity,
    MASKED.replace(values="mild"),
    CROSS.replace(values="mild", mask=(Visible("BQK"),)),
    CROSS.replace(values="mild", kv_heads=4, mask=(KeyPadding((12, 5, 9)),), delivery=PADDING),
)
test_bool_mask = tries(
    law.bool_mask,
    both(MASKED),
    CROSS.replace(mask=(Visible("BHQK"),)),
    MASKED.replace(q_len=65, kv_len=65, batch=1),
    MASKED.replace(mask=(KeyPadding((9, 4)),)),
    MASKED.replace(mask=(KeyPadding((9, 4), left=True),)),
    [MASKED.replace(kv_len=150, q_len=5, mask=(KeyPadding((100, 9), left=left),)) for left in (True, False)],
    CROSS.replace(mask=(Visible("BHQK", density=0.15),), kv_len=70),
    MASKED.replace(q_len=1),
    CROSS.replace(q_len=1, kv_len=70, mask=(Visible("BHQK"),)),
)
test_additive_mask = tries(
    law.additive_mask,
    both(PLAIN.replace(mask=(Bias("BHQK"), Visible("BHQK")), delivery=ADDED)),
    MASKED.replace(delivery=ADDED),
    CROSS.replace(mask=(Bias("BHQK"),), delivery=ADDED),
    PLAIN.replace(mask=(Bias("HQK"),), delivery=ADDED),
    PLAIN.replace(mask=(Bias("K"),), delivery=Delivery("additive", "111K")),
    PLAIN.replace(mask=(Bias("BQK"), Causal()), delivery=ADDED),
)
test_mask_forms_agree = tries(law.mask_forms_agree, MASKED, CROSS.replace(mask=(Visible("BQK"),)))
test_mask_broadcasts = tries(
    law.mask_broadcasts,
    SHAPES,
    shaped("HQK", "1HQK", "additive"),
    shaped("BQK", "B1QK", "additive"),
    shaped("BK", "B11K", "additive"),
    ci=[p.replace(dtype="bfloat16") for p in SHAPES],
)
test_mask_per_head = tries(
    law.mask_per_head,
    both(CUBE.replace(mask=(Visible("BHQK"),))),
    shaped("BQK", "B1QK", base=CUBE),
    shaped("HQK", "1HQK", base=CUBE),
    shaped("BK", "B11K", base=CUBE.replace(q_len=3, kv_len=3)),
    shaped("HQK", "HQK", base=CUBE.replace(q_len=3, kv_len=3)),
    CUBE.replace(mask=(Bias("HQK"),), delivery=ADDED),
)
test_mask_with_causal = tries(
    law.mask_with_causal,
    both(MASKED.replace(mask=(Causal(), Visible("BHQK")))),
    MASKED.replace(mask=(Causal(), Visible("BHQK"), Bias("BHQK")), delivery=ADDED),
    MASKED.replace(mask=(Causal(), KeyPadding((9, 4)))),
    MASKED.replace(mask=(Causal(), KeyPadding((9, 4))), delivery=PADDING),
    CROSS.replace(q_len=12, mask=(Causal(), Visible("HQK"))),
    MASKED.replace(mask=(Causal(), Visible("BHQK")), delivery=Delivery("bool", flag=False)),
)
test_hidden_keys_have_no_influence = tries(
    law.hidden_keys_have_no_influence,
    both(PLAIN.replace(mask=(KeyPadding((6, 4)),))),
    PLAIN.replace(mask=(KeyPadding((6, 4), left=True),), delivery=ADDED),
    CROSS.replace(kv_heads=4, mask=(KeyPadding((12, 5, 9)),), delivery=PADDING),
    PLAIN.replace(mask=(KeyPadding((6, 4)),), delivery=Delivery("additive", hidden="min")),
)
test_hidden_nan_stays_hidden = tries(law.hidden_nan_stays_hidden, PLAIN.replace(mask=(KeyPadding((6, 4)),)))
test_empty_rows = tries(
    law.empty_rows,
    both(PLAIN.replace(mask=(Visible("BHQK", empty_rows=(0, 5)),))),
    PLAIN.replace(mask=(Visible("BHQK", empty_rows=(0, 5)),), delivery=ADDED),
    PLAIN.replace(mask=(Causal(), KeyPadding((9, 4), left=True))),
    PLAIN.replace(mask=(KeyPadding((9, 0)),)),
    PLAIN.replace(mask=(KeyPadding((9, 0)),), delivery=PADDING),
    PLAIN.replace(q_len=8, kv_len=5, mask=(Causal("bottom-right"),), delivery=Delivery("bool", flag=False)),
    PLAIN.replace(q_len=40, kv_len=40, batch=1, mask=(Visible("QK", empty_rows=(3, 30)),)),
)
test_empty_rows_harm_no_other = tries(
    law.empty_rows_harm_no_other,
    PLAIN.replace(mask=(Visible("BHQK", empty_rows=(0, 5)),)),
    PLAIN.replace(q_len=70, kv_len=70, batch=1, mask=(Visible("QK", empty_rows=(3, 66)),)),
)
test_finite_sentinels = tries(
    law.finite_sentinels,
    both(MASKED.replace(delivery=Delivery("additive", hidden="min"))),
    MASKED.replace(delivery=Delivery("additive", hidden="-1e9")),
    MASKED.replace(mask=(Causal(), KeyPadding((9, 4))), delivery=Delivery("additive", hidden="min")),
    MASKED.replace(
        q_len=40, kv_len=40, mask=(KeyPadding((40, 9), left=True),), delivery=Delivery("additive", hidden="min")
    ),
)
test_mask_dtypes = tries(
    law.mask_dtypes,
    PLAIN.replace(dtype="bfloat16", mask=(Bias("BHQK"),), delivery=Delivery("additive", dtype="float32")),
    PLAIN.replace(dtype="bfloat16", mask=(Visible("QK"),), delivery=Delivery("bool", "QK")),
)
test_mask_strides = tries(
    law.mask_strides,
    MASKED.replace(delivery=Delivery(strided=True)),
    MASKED.replace(mask=(Bias("BHQK"),), delivery=Delivery("additive", strided=True)),
)
test_mask_unchanged = tries(
    law.mask_unchanged,
    MASKED,
    MASKED.replace(mask=(Causal(), Visible("BHQK"))),
    MASKED.replace(mask=(Bias("BHQK"),), delivery=ADDED),
    MASKED.replace(mask=(Causal(), Bias("BHQK")), delivery=ADDED),
    MASKED.replace(mask=(Visible("BHQK"),), delivery=Delivery(shape="BHQK"), scale=0.3),
)
test_key_padding = tries(
    law.key_padding,
    both(PLAIN.replace(mask=(KeyPadding((9, 4)),), delivery=PADDING)),
    PLAIN.replace(mask=(KeyPadding((9, 4), left=True),), delivery=PADDING),
    CROSS.replace(mask=(KeyPadding((12, 5, 9)),), delivery=PADDING),
    CUBE.replace(q_len=3, kv_len=3, mask=(KeyPadding((3, 1, 2)),), delivery=PADDING),
)
test_sentinel_rows = tries(
    law.sentinel_rows,
    [
        PLAIN.replace(
            q_len=n, kv_len=n, mask=(Visible("QK", empty_rows=(2, 5)),), delivery=Delivery("additive", hidden=low)
        )
        for n, low in ((9, "min"), (40, "min"), (9, "-1e9"))
    ],
    PLAIN.replace(mask=(Causal(), KeyPadding((9, 4), left=True)), delivery=Delivery("additive", hidden="min")),
)
test_fill_low_enough = tries(
    law.fill_low_enough, MASKED.replace(values="deep"), MASKED.replace(values="deep", delivery=ADDED)
)
