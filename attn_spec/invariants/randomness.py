"""Randomness: dropout drops weights, each by itself, at its rate; the seed says which; and the way back knows it.

Nothing is hooked: with V = identity the output is the dropped weights, so each is seen to be dropped or kept. Counts
are judged by exact tails (`attn_spec.chance`).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from attn_spec import oracle, tolerance
from attn_spec.adapters.implementation import Implementation, is_clear
from attn_spec.backward import Backward, Cotangents
from attn_spec.chance import Tests, Unlikely
from attn_spec.invariants.comparison import answer_to, arguments_for, evidence, needs_plain, require_within, same
from attn_spec.invariants.differentiation import precision_of
from attn_spec.invariants.drawing import (
    Drawn,
    beside,
    called,
    called_with_gradients,
    copies,
    drawn,
    forgotten,
    has_own_seed,
    require_on_weights,
    reseeding,
    right_weights,
    seed_of,
    wrong_without,
)
from attn_spec.invariants.dropout_alike import TILES, across, within
from attn_spec.invariants.dropout_causes import CAUSES, factor_in_words, factor_of, scale_cause, share_cause
from attn_spec.law import Advisory, Refused, Unsupported, Violation, law
from attn_spec.problem import Problem

COUNTING = ("ATN1101", "ATN1104", "ATN1108", "ATN1109")  # the laws whose checks have a share of false alarms
UNHEEDED = "dropout-not-applied"
HEED = "heed the rate, or refuse it: `raise NotImplementedError`; `fixed:` in attn.yaml takes it off the parameters"
HINT = "F.dropout(weights, p, training=True), between the softmax and the product with V"


def _too(anyway: bool) -> str:
    return ", as without dropout" if anyway else ""


def _counted(one: Unlikely) -> str:
    chance = f"in {one.p:.2g} of all runs" if one.p else "never"
    return f"{one.what}: {one.count} of {one.n}, expected {one.expected:.1f} (by chance {chance})"


@law("ATN1101", "dropout-rate", "Dropout drops each weight with the probability that it is given")
def dropout_rate(implementation: Implementation, problem: Problem) -> None:
    """#dropped ~ Binomial(n, p): of all weights, of each head, query, key, diagonal and tile of keys

    Why: a rate that is not the one that was chosen regularises too much or not at all, and trains on.
    Example: `F.dropout(w, keep_prob)`; a kernel that draws for the first block of keys only.
    """
    found = drawn(implementation, problem)
    dropped, tells, tests = found.dropped(found.first).double(), found.tells.double(), Tests()
    b, h, q_len, kv_len = dropped.shape
    tests.rates("all", ["dropped weights"], dropped.sum(), tells.sum(), found.rate)
    heads = [f"dropped weights of sample {n}, head {m}" for n in range(b) for m in range(h)]
    tests.rates("heads", heads, dropped.sum((2, 3)), tells.sum((2, 3)), found.rate)
    queries = [f"dropped weights of query {i}" for i in range(q_len)]
    tests.rates("queries", queries, dropped.sum((0, 1, 3)), tells.sum((0, 1, 3)), found.rate)
    keys = [f"dropped weights of key {j}" for j in range(kv_len)]
    tests.rates("keys", keys, dropped.sum((0, 1, 2)), tells.sum((0, 1, 2)), found.rate)
    for offset in sorted({0, kv_len - q_len}):
        name = f"dropped weights of the diagonal key = query{f' {offset:+d}' if offset else ''}"
        count, n = (x.diagonal(offset, 2, 3).sum() for x in (dropped, tells))
        tests.rates("diagonals", [name], count, n, found.rate)
    for size in (x for x in TILES if x < kv_len):
        names = [f"dropped weights of keys {j} to {min(j + size, kv_len) - 1}" for j in range(0, kv_len, size)]
        count, n = (torch.stack([y.sum() for y in torch.split(x, size, -1)]) for x in (dropped, tells))
        tests.rates("tiles", names, count, n, found.rate)
    unlikely = tests.unlikely()
    if unlikely:
        cause = share_cause(found)
        if cause in ("dropout-rate", "dropout-first-tile", "dropout-tail") and within(found, problem.kv_heads):
            cause = ""  # of draws that hang together a share tells nothing
        said = f"{CAUSES[cause]}: " if cause in CAUSES else ""
        unheeded = cause == UNHEEDED  # as of many a kernel whose author says that the rate must stay 0
        if unheeded:
            _forbid_forgetting(implementation, problem)
        raise (Advisory if unheeded else Violation)(
            f"dropout = {found.rate:g}: {said}{_counted(unlikely[0])}",
            evidence=unlikely[0].evidence,
            hint=HEED if unheeded else HINT,
            merge=cause or "dropout-uneven",
        )


def _forbid_forgetting(implementation: Implementation, problem: Problem) -> None:
    """Raise Violation where nothing is dropped in this call, and something is in a plain one."""
    when = forgotten(implementation, problem)
    if when:
        raise Violation(
            f"dropout = {problem.dropout:g}: nothing is dropped {when}, though something is in a plain call",
            evidence={"received": 0.0, "expected": problem.dropout},
            hint="hand the rate on, on every way through the code",
            merge="dropout-forgotten",
        )


@law("ATN1102", "dropout-scale", "A weight that dropout keeps is divided by 1 - p")
def dropout_scale(implementation: Implementation, problem: Problem) -> None:
    """w_ij = 0, or w_ij = softmax(s)_ij / (1 - p), within the oracle's bound

    Why: only then is the mean over draws what evaluation computes without dropout.
    Example: kept weights left as they are; divided by p; made to sum to 1 again.
    """
    found = drawn(implementation, problem)
    seen = found.right != 0
    expected = torch.where(found.gone(found.first), 0.0, found.kept)
    got = torch.where(seen, found.first, 0.0)
    worst = tolerance.worst(got, torch.where(seen, expected, 0.0), found.bound)
    if worst.holds:
        return
    cause, factor = scale_cause(found), factor_of(found)
    said = f"{CAUSES[cause]}; " if cause in CAUSES else ""
    if cause == UNHEEDED:
        _forbid_forgetting(implementation, problem)
    raise (Advisory if cause == UNHEEDED else Violation)(
        f"dropout = {found.rate:g}: {said}kept weights are {factor_in_words(factor, found.rate)} times what they are "
        f"without dropout (median), expected {1 / (1 - found.rate):.4g} = 1 / (1 - p): weight{list(worst.index)} is "
        f"{worst.got:.6g}, expected {worst.expected:.6g}",
        evidence={**evidence(worst), "factor": factor},
        hint=HINT,
        merge=cause,
    )


@law("ATN1104", "dropout-independent", "Dropout draws for each weight by itself")
def dropout_independent(implementation: Implementation, problem: Problem) -> None:
    """what two heads, samples, queries, keys, tiles or shifted lines drop in common is hypergeometric

    Why: one mask for all heads or all rows is another and much stronger noise, and its mean shows nothing.
    Example: a mask [B, 1, S, S] that is broadcast; random numbers that begin anew in each tile.
    """
    found = drawn(implementation, problem)
    before = ("dropout-queries-alike", "dropout-keys-alike", "dropout-shifted-alike", "dropout-heads-alike")
    unlikely = within(found, problem.kv_heads)
    _require(found, min(unlikely, key=lambda one: (one.group not in before, one.p), default=None))


ALIKE = {
    "dropout-queries-alike": "queries share what is dropped",
    "dropout-keys-alike": "keys share what is dropped",
    "dropout-heads-alike": "heads share what is dropped",
    "dropout-group-alike": "query heads that share a key/value head share what is dropped",
    "dropout-samples-alike": "samples share what is dropped",
    "dropout-tiles-alike": "what is dropped repeats itself",
    "dropout-shifted-alike": "what is dropped of one query or key is dropped of the next, moved",
    "dropout-not-advanced": "the next call drops the same weights",
    "dropout-same-always": "the same weights are dropped whatever the seed",
    "dropout-calls-alike": "two calls have more or less in common than chance gives",
}


def _require(found: Drawn, one: Unlikely | None) -> None:
    if one is not None:
        raise Violation(
            f"dropout = {found.rate:g}: {ALIKE[one.group]}: dropped in common by {_counted(one)}",
            evidence=one.evidence,
            hint="draw a number for each element of the weights [B, H, Sq, Sk], in each call anew",
            merge=one.group,
        )


@law("ATN1105", "dropout-on-weights", "Dropout is on the weights: what is dropped is dropped for all channels of V")
def dropout_on_weights(implementation: Implementation, problem: Problem) -> None:
    """V = [I, I]: the output is [w, w], both halves with the same weights dropped

    Why: dropout on the output or on V drops channels, which other layers do already, and leaves every key in.
    Example: `F.dropout(weights @ v, p)`.
    """
    one, other, bound = copies(implementation, problem)
    worst = same(one, other, bound)
    if worst.holds:
        _require_returned_alike(implementation, problem)
        drawn(implementation, problem)  # which says where no dropout lies between the projections of a module
        return
    split = (one == 0) != (other == 0)
    by_row = bool((split == split[:, :, :1]).all()) and bool(split.any())
    where, merge = ("values", "dropout-on-values") if by_row else ("output", "dropout-on-output")
    raise (Advisory if implementation.is_module else Violation)(
        f"dropout = {problem.dropout:g} is on the {where} and not on the weights: with every channel of V twice, "
        f"weight{list(worst.index)} is {worst.got:.6g} in one and {worst.expected:.6g} in the other",
        evidence=evidence(worst),
        hint=HINT,
        merge=merge,
    )


def _require_returned_alike(implementation: Implementation, problem: Problem) -> None:
    """Raise Violation where weights are returned that lack others than the output does. They may lack none at all."""
    found = beside(implementation, problem)
    if found is None or not bool(found[1].any()) or torch.equal(*found):
        return
    output, weights = found
    index = (output != weights).nonzero()[0].tolist()
    raise Violation(
        f"dropout = {problem.dropout:g}: {int(weights.sum())} of the weights that are returned are dropped, and of "
        f"those that the output shows {int(output.sum())}: they differ at weight{index}",
        evidence={"index": index, "received": int(output.sum()), "expected": int(weights.sum())},
        hint="multiply V by the weights that dropout returns",
        merge="dropout-returned-only",
    )


@law("ATN1106", "dropout-off", "A dropout of 0 changes nothing and draws nothing")
def dropout_off(implementation: Implementation, problem: Problem) -> None:
    """dropout = 0, a module in training mode: the output is that without dropout, the generators stay where they are

    Why: evaluation asks for 0; and what draws there moves every later draw of a run that is to be repeated. Moving on
    is an advisory, as many a kernel takes its seed first; setting the generator anew is none.
    Example: `dropout_p or 0.1`; numbers that are drawn and then all kept.
    """
    arguments = arguments_for(implementation, problem).replace(dropout=0.0)
    (output,), (moved_on,) = called(implementation, arguments, [seed_of(problem)])
    worst = answer_to(implementation, problem).compare(output)
    if not worst.holds:
        anyway = wrong_without(implementation, problem)
        hint = "" if anyway else "drop nothing at 0: a module passes `self.dropout if self.training else 0.0`"
        merge = "" if anyway else "dropout-at-zero"
        require_within(worst, "output", because="with dropout = 0" + _too(anyway), hint=hint, merge=merge)
    if moved_on and reseeding(implementation, arguments):
        raise Violation(
            "with dropout = 0 the call sets torch's generator: from two states it leaves the same one",
            evidence={"expected": "as before the call", "received": "set anew"},
            hint="seed a torch.Generator of your own, and draw only where the rate is above 0",
            merge="dropout-reseeds",
        )
    if moved_on:
        raise Advisory(
            "with dropout = 0 the call moves torch's generator on",
            evidence={"expected": "as before the call", "received": "moved on"},
            hint="draw only where the rate is above 0",
            merge="dropout-draws-at-zero",
        )


@law("ATN1107", "dropout-backward", "The way back has the mask of the way there")
def dropout_backward(implementation: Implementation, problem: Problem) -> None:
    """V = I, O = M o P / (1 - p) as it came out:  dV = O' dO,  dS = P o (M o dO / (1 - p) - rowsum(dO o O))

    Why: with another mask the gradient is that of another function, and training merely looks noisy.
    Example: numbers that are drawn anew in the backward pass, where the seed was not kept.
    """
    needs_plain(implementation)
    require_on_weights(implementation, problem)
    arguments = arguments_for(implementation, problem)
    if problem.kv_len > problem.v_dim:
        raise Unsupported("V can't be the identity")
    v = torch.zeros_like(arguments.v)
    v[:, :, : problem.kv_len, : problem.kv_len] = torch.eye(problem.kv_len, dtype=v.dtype)
    arguments = arguments.replace(v=v)
    g = torch.Generator().manual_seed(problem.seed + 611953)
    do = torch.randn(*arguments.sizes[:3], problem.v_dim, generator=g, dtype=torch.float64).to(v.dtype)
    output, grads = called_with_gradients(implementation, arguments, do, seed_of(problem))
    weights = output[..., : problem.kv_len]
    right, bound = right_weights(implementation, arguments)
    precision, rate = precision_of(implementation, problem.dtype), problem.dropout
    kept = (weights.abs() > bound) | ((weights != 0) & (right != 0))
    if not tolerance.worst(weights, torch.where(kept, right / (1 - rate), 0.0), bound).holds:
        raise Unsupported("its output is not that of weights that were dropped, so there is no mask to go by")
    meaning, given = implementation.conventions.meaning, Cotangents(do)
    expected = oracle.derivative(arguments, meaning, precision, given, changed=_through(kept / (1 - rate)))
    for name, got in zip("qkv", grads, strict=True):
        # V has no sign, so what the bound holds for P holds for M o P / (1 - p) with that factor; 2 for its rounding
        room = getattr(expected.bounds, name) * 2 / (1 - rate)
        worst = tolerance.worst(got, getattr(expected.gradients, name), room)
        if worst.holds:
            continue
        merge = "dropout-backward-mask"
        for key, factor in (("without", torch.ones_like(weights)), ("scale", kept.double())):
            other = oracle.derivative(arguments, meaning, precision, given, changed=_through(factor))
            if all(other.compare(x, y).ratio <= 2 / (1 - rate) for x, y in zip("qkv", grads, strict=True)):
                merge = f"dropout-backward-{key}"
        said = {
            "dropout-backward-mask": "the backward pass drops other weights than the forward pass",
            "dropout-backward-without": "the backward pass drops nothing",
            "dropout-backward-scale": "the backward pass does not divide by 1 - p",
        }
        raise Violation(
            f"dropout = {rate:g}: {said[merge]}: d{name.upper()}{list(worst.index)} is {worst.got:.6g}, expected "
            f"{worst.expected:.6g} by the mask that the output shows",
            evidence=evidence(worst),
            hint="keep the mask, or the seed and offset that it was drawn with, for the backward pass",
            merge=merge,
        )


def _through(factor: Tensor) -> Backward:
    """The backward pass of weights that were multiplied by a factor [B, H, Sq, Sk]."""
    return Backward(
        to_values=lambda p, do: (p * factor).mT @ do,
        to_weights=lambda do, v: do @ v.mT * factor,
        row_term=lambda do, o, dp, p: (p * dp).sum(-1, keepdim=True),
    )


@law("ATN1108", "dropout-seeded", "The seed of torch says what is dropped")
def dropout_seeded(implementation: Implementation, problem: Problem) -> None:
    """torch.manual_seed(s), or a seed that is an argument: the same weights are dropped; another seed: others, apart

    Why: a run can't be repeated, and a checkpointed forward pass recomputes another function.
    Example: a kernel that takes the address of the seed for the seed; a generator of its own.
    """
    found = drawn(implementation, problem)
    changed = found.dropped(found.first) != found.dropped(found.again)
    if bool(changed.any()):
        index, own = changed.nonzero()[0].tolist(), has_own_seed(implementation)
        seed = "with the same seed for an argument" if own else "after the same seed of torch"
        source = "a generator with that seed" if own else "torch's default generator, or take seed and offset from it"
        raise Violation(
            f"dropout = {found.rate:g}: {seed} {int(changed.sum())} of {int(found.tells.sum())} "
            f"weights are dropped in one call and not in the other, the first of them weight{index}",
            evidence={"index": index, "received": int(changed.sum()), "expected": 0},
            hint=f"draw from {source}",
            merge="dropout-argument-ignored" if own else "dropout-seed-ignored",
        )
    _across(found, found.other, "dropout-same-always", problem.kv_heads)


@law("ATN1109", "dropout-advances", "The next call drops other weights")
def dropout_advances(implementation: Implementation, problem: Problem) -> None:
    """two calls after one seed: what they drop in common is what two draws have in common

    Why: one mask for all layers and steps removes connections for good, and nothing is regularised.
    Example: a seed that is set in each call; an offset that is never moved on.
    """
    found = drawn(implementation, problem)
    always = torch.equal(found.dropped(found.first), found.dropped(found.other))
    _across(found, found.second, "dropout-same-always" if always else "dropout-not-advanced", problem.kv_heads)


def _across(found: Drawn, call: Tensor, key: str, kv_heads: int) -> None:
    """Each head of the first call beside each head of another."""
    unlikely, same_mask = across(found, call, key)
    if unlikely and not same_mask and within(found, kv_heads):
        raise Unsupported("weights are not drawn each by itself within one call (ATN1104 tells)")
    for one in unlikely[:1]:
        _require(found, one if same_mask else dataclasses.replace(one, group="dropout-calls-alike"))


@law("ATN1110", "dropout-hides", "What a mask hides stays hidden under dropout")
def dropout_hides(implementation: Implementation, problem: Problem) -> None:
    """w_ij = 0 for a key j that query i may not see, dropped or not; a row without keys is as declared

    Why: code takes another way where a rate is given, and the mask is lost there.
    Example: a fallback without the causal flag; a kept weight filled in after hiding.
    """
    found = drawn(implementation, problem)
    hidden = (found.right == 0) | found.right.isnan()
    if not bool(hidden.any()):
        raise Unsupported("nothing is hidden")
    for call in (found.first, found.second):
        got, expected = (torch.where(hidden, x, 0.0) for x in (call, found.right))
        worst = tolerance.worst(got, expected, torch.where(hidden, found.bound, 0.0).nan_to_num())
        if worst.holds:
            continue
        anyway = wrong_without(implementation, problem)
        because = f"a key that is hidden, under dropout = {found.rate:g}{_too(anyway)}"
        hint, merge = ("", "") if anyway else ("hide keys on every way through the code", "dropout-reveals")
        require_within(worst, "weight", because=because, hint=hint, merge=merge)


@law("ATN1111", "dropout-all", "A dropout of 1 gives zeros", advisory=True)
def dropout_all(implementation: Implementation, problem: Problem) -> None:
    """p = 1: every weight is dropped, and the output is 0, not 0 / 0

    Why: 1 / (1 - p) is infinite there, and 0 times that is NaN.
    Example: `w * mask / (1 - p)` without a case for 1.
    """
    try:
        (output,), _ = called(implementation, arguments_for(implementation, problem), [seed_of(problem)])
    except Refused as error:
        if is_clear(error.error):
            raise
        raise Advisory(
            f"dropout = 1: raised {error}", hint="return zeros at 1, or refuse it", merge="dropout-of-one"
        ) from None
    if bool((output == 0).all()):
        return
    if implementation.is_module and answer_to(implementation, problem).compare(output).holds:
        raise Unsupported("no dropout lies between its projections")
    wrong = int((output != 0).sum())
    raise Advisory(
        f"dropout = 1: {wrong} of {output.numel()} elements of the output are not 0, "
        f"{int(output.isnan().sum())} of them NaN",
        evidence={"received": wrong, "expected": 0},
        hint="return zeros at 1, or refuse it",
        merge="dropout-of-one",
    )
