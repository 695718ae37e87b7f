"""Faults of hiding: with what hidden keys are filled, and when; all of them, those of the mask, or those of the future.

A mask that is added brings its own -inf and counts as no hiding here, but for the faults that say so.
"""

import torch
from torch import Tensor

from attn_spec.faults.fault import Block, Fault, add, fault

# each fault in three scopes: the suffix of the id, what is hidden so, whether the mask and whether causality hides so
SCOPES = (
    ("", "hidden logits", True, True),
    ("-by-mask", "logits that a mask hides", True, False),
    ("-by-causality", "logits of the future", False, True),
)
LEFT = {"": "V", "-by-mask": "V over what causality leaves", "-by-causality": "V over what the mask leaves"}

# a number in the place of -inf ---------------------------------------------------------------------------------------


def _filled(masked: float, future: float) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, low in ((visible, masked), (past, future)):
            if seen is not None:
                s = s.masked_fill(~seen, low)
        return s

    return hide


def _added(masked: float, future: float) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, low in ((visible, masked), (past, future)):
            if seen is not None:
                s = s + torch.zeros_like(s).masked_fill(~seen, low)
        return s

    return hide


FILL_ADVICE = "Fill hidden logits with -inf before the softmax, and settle empty rows."
FILLS = (
    (
        "hidden-by-zero",
        "{} are set to 0, where the softmax still gives them weight",
        _filled,
        0.0,
        ("georg-wolflein/good-features#1", "pytorch/pytorch#159247", "rasbt/LLMs-from-scratch#279"),
    ),
    (
        "hidden-by-1e-9",
        "{} are set to 1e-9, which was meant to be -1e9: the softmax gives them weight",
        _filled,
        1e-9,
        ("georg-wolflein/good-features#1",),
    ),
    (
        "hidden-by-minus-ten",
        "{} are set to -10, where the softmax still gives them weight",
        _filled,
        -10.0,
        ("huggingface/transformers#17306",),
    ),
    (
        "hidden-by-minus-1e4",
        "{} are set to -1e4: where the visible ones lie about as low they are seen, in an empty row they all are",
        _filled,
        -1e4,
        ("bentrevett/pytorch-seq2seq#191", "huggingface/transformers#17306"),
    ),
    (
        "hidden-by-minus-1e9",
        "{} are set to -1e9: an empty row gives the mean of V",
        _filled,
        -1e9,
        ("pytorch/benchmark#794", "ml-explore/mlx#2395"),
    ),
    (
        "hidden-by-adding-1e4",
        "-1e4 is added to {}: with large logits they are seen, and an empty row sees all keys",
        _added,
        -1e4,
        ("huggingface/transformers#17306", "microsoft/onnxruntime#14363"),
    ),
    (
        "hidden-by-adding-1e9",
        "-1e9 is added to {}: an empty row sees all keys",
        _added,
        -1e9,
        ("lsdefine/attention-is-all-you-need-keras#6", "NVIDIA/apex#1105"),
    ),
)
for _suffix, _what, _mask, _causal in SCOPES:
    for _id, _title, _made, _low, _sources in FILLS:
        _hide = _made(_low if _mask else -torch.inf, _low if _causal else -torch.inf)
        _title = _title.format(_what).replace("mean of V", f"mean of {LEFT[_suffix]}")
        add(Fault(_id + _suffix, _title, {"hide": _hide}, _sources, FILL_ADVICE))


# the lowest finite number, and the highest ---------------------------------------------------------------------------


def _lowest(masked: bool, future: bool) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, finite in ((visible, masked), (past, future)):
            if seen is not None:
                s = s.masked_fill(~seen, torch.finfo(s.dtype).min if finite else -torch.inf)
        return s

    return hide


def _lowest_added(masked: bool, future: bool) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, finite in ((visible, masked), (past, future)):
            if seen is not None:
                s = s + torch.zeros_like(s).masked_fill(~seen, torch.finfo(s.dtype).min if finite else -torch.inf)
        return s

    return hide


def _half_lowest_added(masked: bool, future: bool) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, finite in ((visible, masked), (past, future)):
            if seen is not None:
                s = s + torch.zeros_like(s).masked_fill(~seen, torch.finfo(s.dtype).min / 2 if finite else -torch.inf)
        return s

    return hide


def _highest(masked: bool, future: bool) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, positive in ((visible, masked), (past, future)):
            if seen is not None:
                s = s + torch.zeros_like(s).masked_fill(~seen, torch.finfo(s.dtype).max if positive else -torch.inf)
        return s

    return hide


def _multiplied(masked: bool, future: bool) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, product in ((past, future), (visible, masked)):
            if seen is not None:
                s = s + ~seen * -torch.inf if product else s.masked_fill(~seen, -torch.inf)
        return s

    return hide


EXTREMES = (
    (
        "hidden-by-lowest",
        "{} are set to the lowest finite number: an empty row gives the mean of V",
        _lowest,
        ("pytorch/pytorch#103749", "espnet/espnet#4584", "huggingface/lerobot#710"),
        "Fill hidden logits with -inf and settle empty rows, or declare `empty_rows: mean`.",
    ),
    (
        "hidden-by-adding-lowest",
        "the lowest finite number is added to {}: a row that mask and causality empty only together sees keys",
        _lowest_added,
        ("microsoft/onnxruntime#14363", "huggingface/transformers#18185"),
        "Combine the masks and fill with -inf.",
    ),
    (
        "hidden-by-adding-half-lowest",
        "half the lowest finite number is added to {}: a row that mask and causality empty only together sees keys",
        _half_lowest_added,
        ("microsoft/onnxruntime#14363",),
        "Combine the masks and fill with -inf.",
    ),
    (
        "hidden-by-highest",
        "{} get a huge positive number instead of a negative one, and nothing else is seen",
        _highest,
        ("lucidrains/memory-compressed-attention#2",),
        "Fill with -inf.",
    ),
    (
        "hidden-by-product",
        "the mask times -inf is added to {}, and 0 * inf makes NaN of what is visible",
        _multiplied,
        ("pytorch/tutorials#2250", "deepbeepmeep/Wan2GP#1628"),
        "Select with where or masked_fill, don't multiply by -inf.",
    ),
)
for _suffix, _what, _mask, _causal in SCOPES:
    for _id, _title, _pick, _sources, _advice in EXTREMES:
        _title = _title.format(_what).replace("mean of V", f"mean of {LEFT[_suffix]}")
        add(Fault(_id + _suffix, _title, {"hide": _pick(_mask, _causal)}, _sources, _advice))


@fault(
    "hide",
    "every hidden logit, an additive -inf too, is the lowest finite number: an empty row gives the mean of V",
    sources=("pytorch/pytorch#103749", "ml-explore/mlx#2395"),
    advice="Keep -inf and settle empty rows, or declare `empty_rows: mean`.",
)
def logits_clamped_to_lowest(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    for seen in (visible, past):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    return s.clamp(min=torch.finfo(s.dtype).min)


@fault(
    "read_mask",
    "a mask becomes a bias of -1e4, which the causal mask outweighs: a row that both empty sees padding",
    sources=("microsoft/onnxruntime#14363", "huggingface/transformers#18185"),
    advice="Turn a mask into -inf, and combine masks before the softmax.",
)
def mask_as_bias_of_1e4(mask: Tensor | None, form: str | None) -> tuple[Tensor | None, Tensor | None]:
    if mask is None:
        return None, None
    if form == "key-padding":
        return None, torch.where(mask[:, None, None, :], 0.0, -1e4)
    if form == "bool":
        return None, torch.where(mask, 0.0, -1e4)
    return None, mask


@fault(
    "arrange_mask",
    "-inf in an additive mask is replaced by the lowest finite number: an empty row gives the mean of V",
    sources=("huggingface/transformers#18185", "pytorch/pytorch#109517"),
    advice="Keep -inf, and settle empty rows.",
)
def additive_mask_clamped(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
    return mask.clamp(min=torch.finfo(mask.dtype).min) if form == "additive" else mask


# when keys are hidden ------------------------------------------------------------------------------------------------


def _hide_early(masked: bool, future: bool) -> Block:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        for seen, late in ((visible, masked), (past, future)):
            if seen is not None and not late:
                s = s.masked_fill(~seen, -torch.inf)
        return s

    return hide


def _zero_late(masked: bool, future: bool) -> Block:
    def settle(p: Tensor, s: Tensor, visible: Tensor | None, past: Tensor | None, empty_rows: str) -> Tensor:
        for seen, late in ((visible, masked), (past, future)):
            p = p.masked_fill(~seen, 0.0) if late and seen is not None else p
        if empty_rows == "zero" or not p.shape[-1]:
            return p
        value = 1 / p.shape[-1] if empty_rows == "mean" else torch.nan
        return torch.where((s > -torch.inf).any(dim=-1, keepdim=True), p, value)

    return settle


def _zero_late_and_divide(masked: bool, future: bool) -> Block:
    def settle(p: Tensor, s: Tensor, visible: Tensor | None, past: Tensor | None, empty_rows: str) -> Tensor:
        for seen, late in ((visible, masked), (past, future)):
            p = p.masked_fill(~seen, 0.0) if late and seen is not None else p
        p = p / p.sum(dim=-1, keepdim=True)
        if empty_rows == "zero" or not p.shape[-1]:
            return p
        value = 1 / p.shape[-1] if empty_rows == "mean" else torch.nan
        return torch.where((s > -torch.inf).any(dim=-1, keepdim=True), p, value)

    return settle


LATE = (
    (
        "mask-after-softmax",
        "{} are hidden after the softmax, and the rest is not normalised again",
        _zero_late,
        ("huggingface/pytorch-image-models#2236", "ruotianluo/self-critical.pytorch#89"),
    ),
    (
        "mask-after-softmax-renormalised",
        "{} are hidden after the softmax, which a large hidden one has emptied by then",
        _zero_late_and_divide,
        ("abisee/pointer-generator#88", "ruotianluo/self-critical.pytorch#89"),
    ),
)
for _suffix, _what, _mask, _causal in SCOPES:
    for _id, _title, _settle, _sources in LATE:
        _title = _title.format(_what.replace("hidden logits", "keys").replace("logits", "keys"))
        _blocks = {"hide": _hide_early(_mask, _causal), "settle": _settle(_mask, _causal)}
        add(Fault(_id + _suffix, _title, _blocks, _sources, "Hide keys before the softmax."))
