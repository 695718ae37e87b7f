"""Gradients: each is that of the function, and honours every flag that the function honours.

An implementation whose output carries no gradient is not asked: `Unsupported`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec import oracle
from attn_spec.adapters.implementation import Implementation
from attn_spec.backward import Cotangents
from attn_spec.invariants.comparison import arguments_for, needs_given, require_within
from attn_spec.invariants.differentiation import (
    FIELDS,
    cotangents_for,
    differentiate,
    gradients,
    hand_written_backward,
    names_of,
    precision_of,
    right_for,
    slope_at_zero,
)
from attn_spec.invariants.variants import returned_lse
from attn_spec.law import Advisory, Refused, Unsupported, Violation, law
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import worst

WORDS = {"q": "dQ", "k": "dK", "v": "dV", "bias": "dBias", "sinks": "dSink"}


def _agree(implementation: Implementation, problem: Problem, names: tuple[str, ...], *, lse: bool = False) -> None:
    found = gradients(implementation, problem, lse=lse)
    for name in names:
        got = getattr(found.gradients, name)
        if got is None and len(names) == 1:
            raise Unsupported(f"no gradient of a {name}")
        if got is None:
            continue
        require_within(found.right.compare(name, got), WORDS[name], merge=f"gradient-{name}")


# each alone ----------------------------------------------------------------------------------------------------------


@law("ATN901", "query-gradient", "The gradient of the queries is that of the function")
def query_gradient(implementation: Implementation, problem: Problem) -> None:
    """dQ = scale dS K, dS = P o (dP - rowsum(dO o O)), for random cotangents dO

    Why: with a sum of the output as loss dO is 1 everywhere, and half of what can be wrong cancels.
    Example: the scale left out of dQ.
    """
    _agree(implementation, problem, ("q",))


@law("ATN902", "key-gradient", "The gradient of the keys is that of the function, summed over their query heads")
def key_gradient(implementation: Implementation, problem: Problem) -> None:
    """dK = scale dS' Q, summed over the query heads that read a key/value head

    Why: keys of grouped heads collect gradients of several heads; one that is dropped trains on, a little worse.
    Example: dK of the first head of each group only.
    """
    _agree(implementation, problem, ("k",))


@law("ATN903", "value-gradient", "The gradient of the values is that of the function")
def value_gradient(implementation: Implementation, problem: Problem) -> None:
    """dV = P' dO, summed over the query heads that read a key/value head

    Why: dV needs the weights themselves, so it shows what the backward pass took them to be.
    Example: weights worked out anew without the mask.
    """
    _agree(implementation, problem, ("v",))


@law("ATN904", "bias-gradient", "The gradient of a bias has its shape, summed over what it was broadcast along")
def bias_gradient(implementation: Implementation, problem: Problem) -> None:
    """dBias = sum of dS over samples, heads or queries, as the bias was broadcast

    Why: learned position biases are shared by samples; the gradient of the first one alone looks plausible.
    Example: dBias of sample 0; dBias multiplied by the scale.
    """
    _agree(implementation, problem, ("bias",))


@law("ATN905", "sink-gradient", "The gradient of the sinks is that of the function, for each head")
def sink_gradient(implementation: Implementation, problem: Problem) -> None:
    """dSink_h = - sum over samples and queries of p_sink rowsum(dO o O)

    Why: a sink is learned; with a gradient of zero it stays where it was initialised and nothing breaks.
    Example: a kernel that takes sinks forwards and returns None for them backwards.
    """
    _agree(implementation, problem, ("sinks",))


@law("ATN906", "lse-gradient", "What comes back to the log-sum-exp reaches queries and keys")
def lse_gradient(implementation: Implementation, problem: Problem) -> None:
    """dS = P o (dP - rowsum(dO o O) + dL): a cotangent of the log-sum-exp adds P dL to the gradient of the logits

    Why: merged parts (ring attention, cascades) are differentiated through the log-sum-exp; without it they are off.
    Example: the cotangent of the log-sum-exp dropped.
    """
    returned_lse(implementation, arguments_for(implementation, problem))
    names = names_of(arguments_for(implementation, problem))
    _agree(implementation, problem, names, lse=True)


# of the function as it is --------------------------------------------------------------------------------------------


def _directions(problem: Problem, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    g = torch.Generator().manual_seed(problem.seed + 821641)
    return [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in leaves]


def _with(arguments: Arguments, names: tuple[str, ...], values: list[Tensor]) -> Arguments:
    return arguments.replace(**{FIELDS.get(n, n): x for n, x in zip(names, values, strict=True)})


@law("ATN907", "finite-differences", "The gradient is the slope of what was computed, in float64")
def finite_differences(implementation: Implementation, problem: Problem) -> None:
    """(f(x + h d) - f(x - h d)) / 2h = grad . d along random directions d, of the implementation's own f

    Why: it needs no formula: whatever the forward pass does, the backward pass must be its derivative.
    Example: a backward pass that forgets the softcap, the mask or the scale of the forward one.
    """
    if implementation.precision_for("float64").scores != "float64":
        raise Unsupported("float64 is computed in a coarser type")
    arguments, given = arguments_for(implementation, problem), cotangents_for(problem)
    names = names_of(arguments)
    if arguments.mask is not None and bool(arguments.mask.isinf().any()):
        names = tuple(n for n in names if n != "bias")  # a step away from -inf is none
    if "bias" in names and gradients(implementation, problem).gradients.bias is None:
        names = tuple(n for n in names if n != "bias")
    grads, leaves = differentiate(implementation, arguments, given, names)
    for name, grad, leaf, d in zip(names, grads, leaves, _directions(problem, leaves), strict=True):
        leaf = leaf.detach()

        def along(step: float, name: str = name, leaf: Tensor = leaf, d: Tensor = d) -> float:
            moved = _with(arguments, (name,), [leaf + step * d])
            with torch.no_grad():
                return float((implementation(moved).output.double() * given.output.double()).sum())

        slope, apart = slope_at_zero(along, 1e-4)
        received = float((grad.double() * d).sum())
        size = float((grad.double() * d).abs().sum()) + 1e-6
        if not abs(received - slope) <= 1e-6 * size + apart:
            raise Violation(
                f"along a random direction of {name} the gradient gives {received:.8g}, and the output changes by "
                f"{slope:.8g}",
                evidence={"received": received, "expected": slope},
                merge=f"gradient-{name}",
            )


@law("ATN908", "empty-row-gradients", "A row with no visible key has a gradient of zero, and spoils no other")
def empty_row_gradients(implementation: Implementation, problem: Problem) -> None:
    """dQ_i = 0 and finite where every key is hidden; dK and dV as if that row were not there

    Why: a row that a guard turned into zeros on the way there is 0/0 on the way back, and NaN in dK is in every key.
    Example: `nan_to_num` after the softmax, whose gradient is NaN. Where torch differentiates the code, that is an
    advisory; in a backward pass of one's own it is a failure.
    """
    if implementation.conventions.meaning.empty_rows != "zero":
        raise Unsupported("rows with no visible key are not zero, so they have a gradient")
    merge = "empty-row-gradients" if problem.lengths is None else "packed-empty-gradients"
    found = gradients(implementation, problem)
    for name in ("q", "k", "v"):
        got = getattr(found.gradients, name)
        if not bool(got.isfinite().all()):
            excused = found.right.empty and not hand_written_backward(implementation, problem)
            kind = Advisory if excused else Violation
            raise kind(
                f"{WORDS[name]} holds {int((~got.isfinite()).sum())} numbers that are not finite",
                evidence={"not_finite": int((~got.isfinite()).sum())},
                hint="replace the logits of an empty row before the softmax, and its weights after it",
                merge=merge,
            )
        require_within(found.right.compare(name, got), WORDS[name], merge=merge)


@law("ATN909", "hidden-gradients", "No gradient reaches a key or value that is hidden from every query")
def hidden_gradients(implementation: Implementation, problem: Problem) -> None:
    """dK_j = dV_j = 0 where key j is hidden from every query, by the mask, the window or causality

    Why: a backward pass that masks less than the forward one trains on padding, or on the future.
    Example: the mask left out where weights are worked out anew.
    """
    arguments = arguments_for(implementation, problem)
    meaning = implementation.conventions.meaning
    weights = oracle.answer(arguments, meaning, implementation.precision_for(problem.dtype), weights=True).weights
    assert weights is not None
    seen = (weights > 0).any(2)
    tiled = meaning.grouping == "tiled"
    groups = (-1, problem.kv_heads) if tiled else (problem.kv_heads, -1)
    seen = seen.reshape(problem.batch, *groups, problem.kv_len).any(1 if tiled else 2)
    found = gradients(implementation, problem)
    for name in ("k", "v"):
        got = getattr(found.gradients, name).double()
        hidden = torch.where(seen[..., None], 0.0, got)
        bound = torch.full_like(got, 1e-6 * float(got.nan_to_num().abs().max()))
        require_within(
            worst(hidden, torch.zeros_like(got), bound), f"{WORDS[name]} of a hidden key", merge="hidden-gradients"
        )


@law("ATN910", "strided-cotangents", "A cotangent that is not contiguous gives the same gradients")
def strided_cotangents(implementation: Implementation, problem: Problem) -> None:
    """dO as [B, S, H, D] seen as [B, H, S, D], sliced from a wider tensor, or one number behind strides of 0

    Why: what comes back from a projection is transposed, and from a sum expanded; a kernel reads it by its strides.
    Example: dO taken for contiguous; a sum as loss gives NaN.
    """
    needs_given(implementation)
    arguments, given = arguments_for(implementation, problem), cotangents_for(problem)
    do, meaning = given.output, implementation.conventions.meaning
    precision = precision_of(implementation, problem.dtype)
    wide = torch.full((*do.shape[:-1], do.shape[-1] + 3), 1e4, dtype=do.dtype)
    wide[..., 1:-2] = do
    ways = {
        "transposed": do.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": wide[..., 1:-2],
        "of a sum (one number behind strides of 0)": torch.ones((), dtype=do.dtype).expand(do.shape),
    }
    for way, cotangent in ways.items():
        grads, _ = differentiate(implementation, arguments, Cotangents(cotangent))
        right = oracle.derivative(implementation.effective(arguments), meaning, precision, Cotangents(cotangent))
        for name, got in zip(("q", "k", "v"), grads, strict=True):
            because = f"with a cotangent that is {way}"
            require_within(right.compare(name, got), WORDS[name], because=because, merge="strided-cotangents")


@law("ATN911", "gradients-together", "Gradients honour what the output honours, in every combination")
def gradients_together(implementation: Implementation, problem: Problem) -> None:
    """dQ, dK, dV, dBias and dSink with causal, masks, windows, cap, slopes, sinks, scale and grouped heads

    Why: a backward kernel is written apart from the forward one, and flags are handed to it one by one.
    Example: a causal flag that is saved and never read.
    """
    _agree(implementation, problem, names_of(arguments_for(implementation, problem)))


@law("ATN912", "second-order", "Where gradients can be differentiated again, they are right", advisory=True)
def second_order(implementation: Implementation, problem: Problem) -> None:
    """d/dx (grad . w) . d by a second backward pass = the slope of grad . w along d, in float64 (advisory)

    Why: gradient penalties and meta-learning differentiate twice; a graph that is cut gives zeros without complaint.
    Example: saved tensors that are detached.
    """
    if implementation.precision_for("float64").scores != "float64":
        raise Unsupported("float64 is computed in a coarser type")
    arguments, given = arguments_for(implementation, problem), cotangents_for(problem)
    names = ("q", "k", "v")
    try:
        grads, leaves = differentiate(implementation, arguments, given, names, graph=True)
        weights = _directions(problem, grads)
        total = sum(((g * w).sum() for g, w in zip(grads, weights, strict=True)), torch.zeros((), dtype=torch.float64))
        if not total.requires_grad:
            raise Unsupported("the gradients carry no gradient")
        second = implementation.shielded(torch.autograd.grad, total, leaves, materialize_grads=True)
    except Refused as error:
        raise Unsupported(f"not differentiable twice: {error}") from None
    for place, name in enumerate(names):
        d = _directions(problem.replace(seed=problem.seed + 1), leaves)[place]

        def along(step: float, place: int = place, d: Tensor = d) -> float:
            moved = [x.detach() + step * d if n == place else x.detach() for n, x in enumerate(leaves)]
            again, _ = differentiate(implementation, _with(arguments, names, moved), given, names)
            return sum(float((g.double() * w).sum()) for g, w in zip(again, weights, strict=True))

        slope, apart = slope_at_zero(along, 1e-4)
        received = float((second[place].double() * d).sum())
        size = float((second[place].double() * d).abs().sum()) + abs(slope) + 1e-6
        if not abs(received - slope) <= 1e-6 * size + apart:
            raise Advisory(
                f"along a random direction of {name} the second derivative is {received:.8g}, and the gradients change "
                f"by {slope:.8g}",
                evidence={"received": received, "expected": slope},
                merge="second-order",
            )


@law("ATN913", "gradient-for-some", "A gradient is the same, whichever of the inputs need one")
def gradient_for_some(implementation: Implementation, problem: Problem) -> None:
    """with q alone, k alone, v alone, or the bias or sinks alone requiring a gradient: what it is with all of them

    Why: frozen layers and learned biases ask for one gradient only, and another path is chosen for it.
    Example: a bias that is the only input to need a gradient, and gets none.
    """
    needs_given(implementation)
    arguments, given = arguments_for(implementation, problem), cotangents_for(problem)
    precision = precision_of(implementation, problem.dtype)
    right = right_for(implementation, problem, precision)
    known = gradients(implementation, problem).gradients
    for name in (name for name in names_of(arguments) if getattr(known, name) is not None):
        (grad,), _ = differentiate(implementation, arguments, given, (name,))
        because = f"with {name} alone requiring a gradient"
        require_within(right.compare(name, grad), WORDS[name], because=because, merge=f"gradient-{name}")
