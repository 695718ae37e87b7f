"""What a diagnosis names is what failed: in the dtype in which it failed, and not dropout where it is no matter."""

import torch
import torch.nn.functional as F

from attn_spec import check_attention


def masked_by_the_lowest(q, k, v, attn_mask=None, is_causal=False):
    """Hidden by a finite number and the future by -inf; its softmax in float32 makes NaN of empty rows in float64."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, torch.finfo(scores.dtype).min)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype) @ v


def causality_unheard(q, k, v, is_causal=False, dropout_p=0.0):
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return F.dropout(weights, dropout_p) @ v


def test_what_float64_alone_shows_is_not_named():
    report = check_attention(masked_by_the_lowest, laws=["masking"])
    assert report.verdict == "failed"
    assert any(name.startswith("hidden-by-") and name.endswith("-by-mask") for name in report.diagnosis)
    assert "empty-rows-nan" not in report.diagnosis


def test_what_is_wrong_without_dropout_is_no_fault_of_dropout():
    report = check_attention(causality_unheard, laws=["causality", "ATN1106", "ATN1110"])
    assert report.verdict == "failed"
    assert "causal-ignored" in report.diagnosis
    assert not {"hidden-keys-seen-under-dropout", "dropout-on-at-zero"} & set(report.diagnosis)
