"""Wrong attentions written without sight of the catalogue are named rightly: the planted fault, or the fact itself."""

from __future__ import annotations

import fnmatch
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from attn_spec.adapters.adapt import adapt
from attn_spec.engine import Subject
from attn_spec.report.judgement import Judgement
from attn_spec.suites import all_tests

torch.set_num_threads(1)

# What may be named first, from what each mutant says of itself: ids of faults (patterns), or "code merge" of a fact.
# Near relatives that nothing distinguishes on any input the mutant takes stand beside each other.
ACCEPTED: dict[str, tuple[str, ...]] = {
    "empty_rows_nan": ("empty-rows-nan",),
    "empty_rows_mean": ("empty-rows-mean", "hidden-by-lowest", "logits-clamped-to-lowest"),
    "bool_mask_added": ("bool-mask-added", "masks-added"),
    "mask_polarity": ("bool-mask-inverted", "masks-inverted"),
    "mask_first_batch": ("mask-of-first-sample", "masks-of-first-sample"),
    "mask_tiled_over_folded_heads": ("mask-repeated-in-wrong-order",),
    "mask_after_softmax": ("mask-after-softmax-by-mask",),
    "mask_multiplied": ("hidden-by-zero-by-mask",),
    "causal_fill_sign": ("hidden-by-highest-by-causality",),
    "float_mask_subtracted": ("additive-sign-flipped",),
    "causal_lost_with_bias": ("causal-ignored-with-bias",),
    "causal_needs_mask": ("causal-only-with-mask",),
    "mask_needs_causal": ("mask-only-when-causal",),
    "causal_replaces_mask": ("mask-ignored-when-causal", "causal-replaces-mask"),
    "combined_empty_row": ("hidden-by-adding-*", "mask-as-bias-of-1e4"),
    "causal_lost_with_gqa": ("causal-ignored-with-groups",),
    "causal_times_infinity": ("hidden-by-product-by-causality",),
    "causal_bottom_right": ("causal-bottom-right",),
    "always_causal": ("causal-always",),
    "scale_inverted": ("scale-default-inverse",),
    "scale_twice": ("scale-then-default", "scale-twice"),
    "custom_scale_divides": ("scale-ratio-inverted", "scale-given-divides"),
    "scale_hits_mask": ("bias-scaled",),
    "softmax_over_queries": ("softmax-over-queries",),
    "late_mask_renormalised": ("mask-after-softmax-renormalised",),
    "fill_too_small": ("hidden-by-minus-1e4",),
    "mask_3d_as_batch": ("mask-heads-as-samples",),
    "mask_by_kv_head": ("mask-by-kv-head",),
    "grouped_mask_raises": ("* raises",),
    "mask_must_be_full": ("* raises",),
    "mask_rows_wrap": ("mask-rows-wrapped-16",),
    "square_mask_transposed": ("mask-transposed-when-square",),
    "mask_changed_in_place": ("* mask-modified",),
    "heads_tiled": ("kv-heads-tiled",),
    "no_empty_batch": ("* raises",),
    "head_slices_floor": ("head-slices-dropped-2",),
    "base_two_overflow": ("base-two-overflow*",),
    "scores_rounded": ("scores-in-bfloat16",),
    "mask_bytes_reread": ("ATN513 *",),
    "mask_lost_for_one_query": ("mask-ignored-for-one-query",),
    "mask_all_ones": ("bool-mask-ignored", "masks-of-bools-ignored"),
    "wide_fill_constant": ("* raises",),
    "causal_ignored": ("causal-ignored", "causal-only-with-mask"),  # it takes no mask
    "causal_sees_next": ("causal-one-ahead",),
    "causal_without_diagonal": ("causal-without-diagonal",),
    "causal_top_left": ("causal-top-left",),
    "causal_off_when_rectangular": ("causal-one-ahead@across",),
    "cross_is_causal": ("causal-always@across",),
    "causal_drifts_over_heads": ("causal-one-ahead-in-upper-heads",),
    "full_keeps_causal_bound": ("causal-block-bound-16*",),
    "scale_from_model_width": ("scale-of-hidden",),
    "scale_without_root": ("scale-without-root",),
    "scale_fixed": ("scale-fixed",),
    "custom_scale_ignored": ("scale-given-ignored",),
    "scale_from_value_width": ("scale-of-v",),
    "softmax_over_heads": ("softmax-over-heads",),
    "softmax_over_heads_and_keys": ("softmax-over-heads-and-keys",),
    "softmax_over_single": ("softmax-over-single-axis",),
    "softmax_without_max": ("softmax-without-max*",),
    "group_logits_averaged": ("queries-averaged-over-group",),
    "kv_head_divisor": ("kv-heads-divided-by-count",),
    "heads_split_by_view": ("heads-split-by-view", "heads-split-and-merged-by-view"),
    "heads_merged_by_view": ("heads-merged-by-view",),
    "batch_and_heads_swapped": ("heads-and-samples-mixed",),
    "output_flattened": ("* output-shape",),
    "output_like_query": ("* output-shape", "* raises"),
    "zero_keys_raise": ("* raises",),
    "key_tail_dropped": ("tail-keys-dropped-16",),
    "padded_keys_attended": ("tail-keys-padded-16@*", "tail-keys-padded-unless-*-16*"),
    "channel_tail_dropped": ("tail-channels-dropped-8",),
    "query_tail_bound": ("tail-queries-without-diagonal-16",),
    "empty_split_poisons": ("empty-split-poisons-2",),
    "missing_rescale": ("online-softmax-unrescaled-16",),
    "split_decode_wrong_head": ("kv-heads-tiled-in-second-half@*",),
    "softmax_in_bfloat16": ("softmax-in-bfloat16",),
    "value_strides_ignored": ("ATN1203 *",),
    "query_changed_in_place": ("* inputs-modified",),
    "scores_never_stored": ("scores-zero", "weights-uniform"),
    "key_used_as_value": ("values-are-keys",),
}


def blind_mutants() -> ModuleType:
    path = Path(__file__).parent / "blind" / "mutants.py"
    spec = importlib.util.spec_from_file_location("blind_mutants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def judged(function: Callable[..., torch.Tensor]) -> Judgement:
    """What `check_attention` finds, without the drawn problems of test_fuzz, which take as long as all others."""
    subject = Subject(adapt(function, name=function.__name__, target_name=""))
    for module, name, test in all_tests():
        if "fuzz" not in module + name:
            for problem in test.problems("quick"):
                test.judge(subject, problem, name)
    judgement = Judgement(subject.implementation, subject.results)
    judgement.diagnose()
    return judgement


def named_first(judgement: Judgement) -> str:
    """The fault that the headline names, or "code merge" of the violation that it tells."""
    first = judgement.telling
    assert first is not None
    if judgement.diagnosis and judgement.headline == judgement.diagnosis[0].fault.title:
        return judgement.diagnosis[0].fault.id
    return f"{first.first.code} {first.first.merge}"


def test_blind_mutants_are_named() -> None:
    """At least nine in ten of those that are caught; the fault that is named first counts."""
    mutants = blind_mutants().MUTANTS
    assert set(ACCEPTED) == set(mutants)
    caught, amiss = 0, []
    for name, mutant in mutants.items():
        judgement = judged(mutant.function)
        if judgement.counts["failed"]:
            caught += 1
            named = named_first(judgement)
            if not any(fnmatch.fnmatchcase(named, pattern) for pattern in ACCEPTED[name]):
                amiss.append(f"{name} ({mutant.says}): {named}: {judgement.headline}")
    print(f"{caught - len(amiss)} of {caught} named rightly; not so:", *amiss, sep="\n  ")
    assert len(amiss) <= caught / 10, "\n".join(amiss)
