"""Every fault around the attention of a module is caught, most are named; so are faults of attention in a module."""

import pytest

from attn_spec import check_attention
from attn_spec.faults import CATALOGUE
from attn_spec.faults.modules import MODULE_FAULTS
from attn_spec.faults.planted import planted_class
from attn_spec.invariants import load
from attn_spec.law import LAWS
from attn_spec.module_blocks import BLOCKS

load()
ABOUT_MODULES = [code for code, law in LAWS.items() if law.of_modules]
TELLING = ["ATN103", "ATN105", "ATN203", "ATN502", "ATN503", "ATN601", "ATN211", *ABOUT_MODULES]
# what attention itself gives is the same: the fault of the catalogue of attention says it as well
SAME = {
    "values-by-key-projection": "values-are-keys",
    "queries-and-keys-swapped": "scores-transposed",
    "mask-in-training-only": "mask-ignored",
}
# faults of attention, planted in a module: each is the changed block that a module's author would write
IN_MODULES = [
    *("scale-missing", "scale-of-hidden", "scale-of-hidden-over-kv-heads", "kv-heads-tiled", "heads-split-by-view"),
    *("heads-merged-by-view", "heads-interleaved", "mask-after-softmax", "mask-after-softmax-renormalised"),
    *("causal-ignored", "causal-one-ahead", "causal-ignored-with-mask", "masks-inverted", "mask-ignored"),
    *("softmax-over-queries", "softmax-over-heads", "values-are-keys", "masks-added"),
]


@pytest.mark.parametrize("fault", MODULE_FAULTS.values(), ids=lambda f: f.id)
def test_caught_and_named(fault):
    report = check_attention(planted_class(fault), laws=TELLING)
    assert report.verdict == "failed", f"{fault.id} gets through"
    named = report.diagnosis[:2]
    assert fault.id in named or SAME.get(fault.id) in named, (named, report.judgement.headline)


@pytest.mark.parametrize("fault", [CATALOGUE[name] for name in IN_MODULES], ids=lambda f: f.id)
def test_caught_in_a_module(fault):
    report = check_attention(planted_class(fault), exitfirst=True)
    assert report.verdict == "failed", f"{fault.id} gets through in a module"


def test_there_are_enough():
    assert len(MODULE_FAULTS) >= 25
    assert not set(MODULE_FAULTS) & set(CATALOGUE)


@pytest.mark.parametrize("fault", MODULE_FAULTS.values(), ids=lambda f: f.id)
def test_explains_itself(fault):
    assert fault.title[0].islower()
    assert not fault.title.endswith(".")
    assert fault.advice.endswith(".")
    assert set(fault.blocks) <= set(BLOCKS)
    lines = fault.diff.splitlines()
    assert any(line.startswith("-") for line in lines) or any(line.startswith("+") for line in lines)


def test_the_right_module_holds():
    report = check_attention(planted_class(None), laws=TELLING)
    assert report.passed, str(report)
