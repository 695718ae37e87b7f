"""Attention as tutorials print it, judged without any configuration: each mistake is caught, and said."""

import importlib.util
from pathlib import Path

import pytest

from attn_spec import check_attention

spec = importlib.util.spec_from_file_location(
    "seed_listings", Path(__file__).parent.parent / "examples/seed_listings.py"
)
assert spec is not None
assert spec.loader is not None
listings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(listings)

SAID = {
    "SelfAttention": "`.T` reverses all axes",
    "MultiHeadAttentionWrapper": "`.T` reverses all axes",
    "CrossAttention": "`.T` reverses all axes",
    "ListingAsWritten": "bmm and baddbmm take three axes",
}
NAMED = {
    "ListingBaddbmmMended": ("causal-ignored",),
    "ScaleFromKvHeads": ("scale-of-hidden-over-kv-heads",),
    "CausalAfterSoftmax": ("mask-after-softmax", "mask-after-softmax-by-causality"),
}


@pytest.mark.parametrize("name", SAID)
def test_said(name):
    report = check_attention(getattr(listings, name), laws=["ATN103"])
    assert report.verdict == "failed"
    assert SAID[name] in " ".join(str(report).split())


@pytest.mark.parametrize("name", NAMED)
def test_named(name):
    report = check_attention(getattr(listings, name), laws=["shapes", "causality", "scaling", "heads", "numerics"])
    assert report.verdict == "failed"
    found = {part for fault in report.diagnosis for part in fault.split("+")}  # with what else it does, said too
    assert set(NAMED[name]) & found, report.judgement.headline


@pytest.mark.parametrize(
    "name", ["CausalAfterSoftmaxRenormalised", "ListingFused", "SharedQueryKey", "LowestMasksSummed"]
)
def test_caught(name):
    report = check_attention(getattr(listings, name), exitfirst=True)
    assert report.verdict == "failed"


def test_mended():
    report = check_attention(listings.ListingMended)
    assert report.passed, str(report)
    assert report.counts["passed"] > 200
