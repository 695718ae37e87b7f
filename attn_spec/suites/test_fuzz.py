"""Fuzzing: each law on random problems, within what the implementation takes."""

from attn_spec.invariants import execution, metamorphic, numerics, weights
from attn_spec.suites.suite import fuzzes

test_fuzzed = fuzzes(numerics.fuzzed)
test_fuzzed_key_order = fuzzes(weights.key_order, causal="never", window=False, alibi=False)
test_fuzzed_keys_split = fuzzes(metamorphic.keys_split, causal="never", window=False, alibi=False, sinks=False)
test_fuzzed_hidden_keys = fuzzes(
    metamorphic.hidden_keys_appended, causal="never", masked=True, window=False, alibi=False, sinks=False
)
test_fuzzed_batch_of_one = fuzzes(execution.batch_of_one)
test_fuzzed_mask_ways = fuzzes(metamorphic.mask_ways_agree, masked=True)
