"""Masking: a key that is hidden has no influence at all, one that is visible has its own, however the mask comes in."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn_spec import masks, tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import (
    agrees,
    answer,
    answer_to,
    arguments_for,
    difference,
    evidence,
    output,
    recovered,
    require_within,
    same,
)
from attn_spec.law import Advisory, Refused, Violation, law
from attn_spec.problem import Arguments, Problem


def visible_keys(implementation: Implementation, problem: Problem) -> Tensor:
    """Which key each query may see, all parts of the mask together [B, H, Sq, Sk]."""
    alignment = implementation.conventions.meaning.alignment
    visible, _ = masks.combined(problem.mask, problem.sizes, problem.seed, alignment)
    full = torch.ones((), dtype=torch.bool) if visible is None else visible
    return full.expand(problem.sizes)


@law("ATN501", "mask-polarity", "True in a bool mask means what the conventions say, and hides nothing else")
def mask_polarity(implementation: Implementation, problem: Problem) -> None:
    """p_ij = 0 exactly where the mask hides j, read off with a one-hot V

    Why: torch's SDPA takes True = attend, its MultiheadAttention True = hidden; the wrong one attends to padding alone.
    Example: `masked_fill(mask, -inf)` for `masked_fill(~mask, -inf)`.
    """
    weights, exact = recovered(implementation, arguments_for(implementation, problem))
    expected = exact.output[..., : problem.kv_len]
    clear = expected > 4 * exact.bounds.output[..., : problem.kv_len]
    visible = visible_keys(implementation, problem)
    got = weights.double() > 0.25 * torch.where(clear, expected, 1e-6)
    wrong = (visible & clear & ~got) | (~visible & (weights.double().abs() > 1e-6))
    if bool(wrong.any()):
        sample, head, query, key = (int(n) for n in torch.nonzero(wrong)[0])
        hidden = "visible" if bool(visible[sample, head, query, key]) else "hidden"
        inverted = bool((got == ~visible)[visible.any(-1) & ~visible.all(-1)].float().mean() > 0.95)
        raise Violation(
            f"key {key} is {hidden} for query {query} (sample {sample}, head {head}) and has the weight "
            f"{float(weights[sample, head, query, key]):.4g}, expected {float(expected[sample, head, query, key]):.4g}"
            + ("; the mask is read the other way round" if inverted else ""),
            evidence={"inverted": inverted, "wrong_weights": int(wrong.sum())},
            hint="True means that the key may be seen: hide with `masked_fill(~mask, -inf)`" if inverted else "",
            setup="v = one_hot(v)",
            merge="polarity" if inverted else "",
        )


@law("ATN502", "bool-mask", "A bool mask hides its keys from the softmax")
def bool_mask(implementation: Implementation, problem: Problem) -> None:
    """s_ij = -inf for hidden j, before the softmax

    Why: hidden after the softmax, the weights no longer sum to 1; multiplied in before, a hidden logit becomes 0.
    Example: `softmax(s) * mask`; `softmax(s * mask)`.
    """
    agrees(implementation, problem)


@law("ATN503", "additive-mask", "A float mask is added to the scaled logits")
def additive_mask(implementation: Implementation, problem: Problem) -> None:
    """s_ij = scale q_i.k_j + mask_ij

    Why: a float mask may hold any numbers; one read as 0 and not 0 loses a position bias.
    Example: `masked_fill(mask == 0, -inf)` on an additive mask.
    """
    agrees(implementation, problem)


@law("ATN504", "mask-forms-agree", "A bool mask and its additive form give the same output")
def mask_forms_agree(implementation: Implementation, problem: Problem) -> None:
    """f(mask) = f(0 where visible, -inf where hidden)

    Why: the two forms often take two paths in the code, and one of them is wrong.
    Example: a bool mask cast to float and added as 0 and 1.
    """
    arguments = arguments_for(implementation, problem)
    additive = dataclasses.replace(problem.delivery, form="additive")
    other = arguments_for(implementation, problem.replace(delivery=additive))
    got, expected = output(implementation, arguments), output(implementation, other)
    bound = answer_to(implementation, problem).bounds.output
    require_within(
        same(got, expected, bound), "output", because="the additive form of the same mask gives another output"
    )


@law("ATN505", "mask-broadcasts", "A mask that broadcasts equals its expansion to [B, H, Sq, Sk]")
def mask_broadcasts(implementation: Implementation, problem: Problem) -> None:
    """f(mask) = f(mask.expand(B, H, Sq, Sk))

    Why: a mask of [B, 1, 1, Sk] read with the strides of a full one hides other keys than it says.
    Example: the offset into the mask taken as (b H + h) whatever its shape.
    """
    arguments = arguments_for(implementation, problem)
    assert arguments.mask is not None
    full = arguments.replace(mask=arguments.mask.expand(problem.sizes).contiguous())
    exact = answer_to(implementation, problem)
    got = output(implementation, arguments)
    require_within(exact.compare(got), "output", because=f"a mask of shape {list(arguments.mask.shape)}")
    because = "the mask expanded to [B, H, Sq, Sk] gives another output"
    require_within(same(got, output(implementation, full), exact.bounds.output), "output", because=because)


@law("ATN506", "mask-per-head", "Each sample and each head has its own mask")
def mask_per_head(implementation: Implementation, problem: Problem) -> None:
    """mask [B, H, Sq, Sk] with nothing shared; [B, 1, ..] and [1, H, ..] where B == H too

    Why: where B equals H a mask broadcast along the wrong axis fits, and is wrong without a word.
    Example: a mask of [B, Sq, Sk] that broadcasts over heads as if its first axis were H.
    """
    agrees(implementation, problem)


@law("ATN507", "mask-with-causal", "A mask and the causal flag both hold")
def mask_with_causal(implementation: Implementation, problem: Problem) -> None:
    """visible = mask AND causal

    Why: one of the two replaces the other in many a fast path.
    Example: `mask = causal_mask if is_causal else attn_mask`.
    """
    agrees(implementation, problem)


def _poisoned(arguments: Arguments, visible: Tensor, value: float) -> Arguments:
    """The arguments with the keys and values that no query sees replaced."""
    b, _, _, kv_len = arguments.sizes
    kv_heads = arguments.k.shape[1]
    seen = visible.any(2).reshape(b, kv_heads, -1, kv_len).any(2)  # [B, Hkv, Sk]
    hidden = ~seen.expand(b, kv_heads, kv_len)[..., None]
    k, v = arguments.k.masked_fill(hidden, value), arguments.v.masked_fill(hidden, value)
    return arguments.replace(k=k, v=v)


def smoothing_error(implementation: Implementation, arguments: Arguments, value: float) -> Tensor:
    """What honest K-smoothing loses, which takes the mean of all keys off first, hidden ones of this size included.

    A logit is then a difference of numbers of size |scale| |q|_1 value; a leak moves the output by `value` itself.
    """
    u = implementation.precision_for(arguments.dtype).gamma_unit
    scale = arguments.q.shape[-1] ** -0.5 if arguments.scale is None else abs(arguments.scale)
    on_logits = 4 * u * scale * value * arguments.q.double().abs().sum(-1, keepdim=True)
    v = arguments.v.double().abs().amax((2, 3), keepdim=True)
    return torch.expm1(on_logits.clamp(max=1.0)) * v.repeat_interleave(on_logits.shape[1] // v.shape[1], dim=1)


@law("ATN508", "hidden-keys-have-no-influence", "What stands at a hidden key does not matter, however large")
def hidden_keys_have_no_influence(implementation: Implementation, problem: Problem) -> None:
    """k_j = v_j = 1e4 at every hidden j  =>  out unchanged

    Why: padding holds whatever was left there; a finite fill that is too small lets large logits through.
    Example: hidden logits set to -10, or masked after a softmax that the hidden ones dominate.
    """
    arguments = arguments_for(implementation, problem)
    visible = visible_keys(implementation, problem)
    bound = answer_to(implementation, problem).bounds.output + smoothing_error(implementation, arguments, 1e4)
    before = output(implementation, arguments)
    for value in (1e4, -1e4):
        after = output(implementation, _poisoned(arguments, visible, value))
        because = f"hidden keys and values set to {value:g}"
        require_within(same(after, before, bound), "output", because=because, merge="hidden-influence")


@law("ATN509", "hidden-nan-stays-hidden", "A NaN at a hidden key stays there", advisory=True)
def hidden_nan_stays_hidden(implementation: Implementation, problem: Problem) -> None:
    """k_j = v_j = NaN at every hidden j  =>  out unchanged (advisory, red when strict)

    Why: uninitialised padding may hold NaN, and 0 times NaN is NaN. Most libraries leak here, torch's CPU kernels too.
    Example: `p @ v` with p = 0 at the hidden key.
    """
    arguments = arguments_for(implementation, problem)
    poisoned = _poisoned(arguments, visible_keys(implementation, problem), torch.nan)
    got = output(implementation, poisoned)
    try:
        require_within(answer_to(implementation, problem).compare(got), "output", because="NaN at the hidden keys")
    except Violation as violation:
        raise Advisory(violation.message, evidence=violation.evidence, merge="hidden-nan") from None


@law("ATN510", "empty-rows", "A row with no visible key gives what the conventions declare")
def empty_rows(implementation: Implementation, problem: Problem) -> None:
    """out_i = 0 (or the mean of V, or NaN, as declared) where every key is hidden

    Why: -inf minus -inf is NaN, and one NaN row poisons the whole batch in the next layer.
    Example: `softmax(masked_fill(~mask, -inf))` without a guard.
    """
    arguments = arguments_for(implementation, problem)
    empty = ~visible_keys(implementation, problem).any(-1)
    got = output(implementation, arguments)
    exact = answer_to(implementation, problem)
    declared = implementation.conventions.empty_rows.value
    worst = exact.compare(torch.where(empty[..., None], got.double(), exact.output))
    require_within(
        worst, "output", because=f"a row with no visible key gives {declared} by the conventions", merge="empty-rows"
    )


@law("ATN511", "empty-rows-harm-no-other", "A row with no visible key harms no other row")
def empty_rows_harm_no_other(implementation: Implementation, problem: Problem) -> None:
    """every row that sees a key is as the oracle's, whatever stands in the empty ones

    Why: a shared maximum or sum over a block carries the NaN of one row into its neighbours.
    Example: `nan_to_num` over the whole output, which hides a wrong row as zeros.
    """
    arguments = arguments_for(implementation, problem)
    some = visible_keys(implementation, problem).any(-1)
    got = output(implementation, arguments)
    exact = answer_to(implementation, problem)
    require_within(exact.compare(torch.where(some[..., None], got.double(), exact.output)), "output")


@law("ATN512", "finite-sentinels", "A large negative number in an additive mask hides as -inf does")
def finite_sentinels(implementation: Implementation, problem: Problem) -> None:
    """mask_ij = finfo.min or -1e9 where hidden, with the causal flag too: no overflow, no NaN

    Why: Hugging Face masks hold finfo.min; added to a second one it is -inf, scaled by log2 e it overflows.
    Example: `(s + mask) * log2e` in a base-2 softmax.
    """
    agrees(implementation, problem)


@law("ATN513", "mask-dtypes", "A bool mask and a float32 mask work with inputs of every dtype")
def mask_dtypes(implementation: Implementation, problem: Problem) -> None:
    """mask of float32 with q of bfloat16: added as it is, or refused

    Why: a mask reinterpreted in another dtype hides arbitrary keys.
    Example: `mask.view(q.dtype)`.
    """
    agrees(implementation, problem)


@law("ATN514", "mask-strides", "A mask that is not contiguous is read right")
def mask_strides(implementation: Implementation, problem: Problem) -> None:
    """the same mask behind transposed strides gives the same output

    Why: a kernel that takes the storage for the tensor reads the transpose.
    Example: a pointer to the data with strides taken from the shape.
    """
    agrees(implementation, problem)


@law("ATN515", "mask-unchanged", "The mask is not modified")
def mask_unchanged(implementation: Implementation, problem: Problem) -> None:
    """mask after the call = mask before it

    Why: a mask is shared by all layers; one that a layer changes is wrong in the next.
    Example: `mask.logical_and_(causal)`, `mask += bias`.
    """
    arguments = arguments_for(implementation, problem)
    assert arguments.mask is not None
    before = arguments.mask.clone()
    implementation(arguments)
    if not torch.equal(before, arguments.mask):
        changed = int((before != arguments.mask).sum())
        raise Violation(
            f"the mask was modified in place: {changed} of {before.numel()} elements differ after the call",
            hint="work on a copy, or with operations that are not in place",
            setup="mask_before = mask.clone()",
            merge="mask-modified",
        )


@law("ATN516", "key-padding", "A key padding hides the padded keys of its own sample")
def key_padding(implementation: Implementation, problem: Problem) -> None:
    """mask [B, Sk]: key j of sample b is hidden from every query and head of that sample

    Why: padding that is seen makes an output depend on the batch it came in.
    Example: the padding applied to queries, or that of the first sample to all.
    """
    agrees(implementation, problem)


@law("ATN517", "mask-taken", "A parameter for a mask takes a mask")
def mask_taken(implementation: Implementation, problem: Problem) -> None:
    """a full mask [B, H, Sq, Sk], bool or additive, is answered right in one of the two forms at least

    Why: refusing one form is honest; refusing both is a parameter that does not work.
    Example: a mask that always raises on a shape it computed itself.
    """
    bool_form = problem.delivery
    refusal: Refused | None = None
    for form in ("bool", "additive"):
        tried = problem.replace(delivery=dataclasses.replace(bool_form, form=form))
        arguments = arguments_for(implementation, tried)
        try:
            got = output(implementation, arguments)
        except Refused as error:
            refusal = error
            continue
        require_within(answer(implementation, arguments).compare(got), "output", because=f"a full {form} mask")
        return
    raise Violation(f"refuses a full mask in the bool and in the additive form: {refusal}", merge="raises")


@law("ATN518", "sentinel-rows", "A row of equal finite large negatives averages the keys it holds; it gives no NaN")
def sentinel_rows(implementation: Implementation, problem: Problem) -> None:
    """mask_ij = finfo.min for all j of a row: every logit is absorbed, so out_i is the mean of the values

    Why: two such masks added are -inf, and scaled by log2 e one is: -inf minus -inf is NaN in the whole row.
    Example: padded queries under a Hugging Face mask in a base-2 online softmax.
    """
    arguments = arguments_for(implementation, problem)
    exact = answer_to(implementation, problem)
    # where the fill is not quite absorbed (-1e9 beside float32 logits) only the range of the values is known
    v = arguments.v.double().abs().amax((2, 3)).repeat_interleave(problem.heads // problem.kv_heads, dim=1)
    known = visible_keys(implementation, problem).any(-1)[..., None] | (problem.delivery.hidden == "min")
    got = output(implementation, arguments)
    uniform = 8 * tolerance.roundoff(problem.dtype) * v[:, :, None, None]
    bound = torch.minimum(exact.bounds.output, torch.where(known, uniform, v[:, :, None, None]) + uniform)
    some = visible_keys(implementation, problem).any(-1)[..., None]
    bound = torch.where(some, exact.bounds.output, bound)
    expected = torch.where(known, exact.output, 0.0)
    hint = "take the row maximum off before anything else is multiplied in, and guard a maximum of -inf"
    worst = tolerance.worst(got, expected, bound)
    if not worst.holds:
        # exp(s - lse) with an lse that absorbed log n: such a row is the sum of its values, and is thrown away later
        weights = answer(implementation, arguments, weights=True).weights
        assert weights is not None
        count = torch.where(some, 1, (weights > 0).sum(-1, keepdim=True))
        if tolerance.worst(got, expected * count, bound * count).holds:
            said = f"a row that the mask hides whole is the sum of its values: {difference(worst, 'output')}"
            raise Advisory(said, evidence=evidence(worst), hint=hint)
    require_within(worst, "output", hint=hint)


@law("ATN519", "fill-low-enough", "Hidden logits lie below every visible one, however low those are", advisory=True)
def fill_low_enough(implementation: Implementation, problem: Problem) -> None:
    """all logits lowered by 30,000, which cancels: hidden keys are still hidden (advisory, red when strict)

    Why: a finite fill such as -1e4 stands above very low logits, and the hidden keys take the whole weight.
    Example: `masked_fill(~mask, -1e4)`.
    """
    try:
        agrees(implementation, problem)
    except Violation as violation:
        raise Advisory(violation.message, evidence=violation.evidence, merge="fill-low-enough") from None
