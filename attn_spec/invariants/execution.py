"""Execution: a call reads its inputs, writes its output, and leaves the rest of the world alone."""

from __future__ import annotations

import torch

from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import agrees, arguments_for, output
from attn_spec.law import Unsupported, Violation, law
from attn_spec.problem import Problem


@law("ATN1201", "inputs-unchanged", "q, k and v are not modified")
def inputs_unchanged(implementation: Implementation, problem: Problem) -> None:
    """q, k, v after the call = q, k, v before it

    Why: the caller still needs them, for the backward pass and for the next call.
    Example: `q *= scale`.
    """
    arguments = arguments_for(implementation, problem)
    before = {name: getattr(arguments, name).clone() for name in "qkv"}
    implementation(arguments)
    for name, was in before.items():
        now = getattr(arguments, name)
        if not torch.equal(was, now):
            raise Violation(
                f"{name} was modified in place: {int((was != now).sum())} of {was.numel()} elements differ afterwards",
                hint=f"`{name} = {name} * scale` makes a new tensor, `{name} *= scale` does not",
                merge="inputs-modified",
            )


@law("ATN1202", "global-state-unchanged", "No global state of torch is changed")
def global_state_unchanged(implementation: Implementation, problem: Problem) -> None:
    """default dtype, random generator, grad mode, number of threads and deterministic mode: as before the call

    Why: it changes results far away, and nobody looks for it in an attention.
    Example: `torch.manual_seed(0)` or `torch.set_default_dtype(...)` inside forward.
    """
    implementation.disturbed.clear()
    implementation(arguments_for(implementation, problem))
    if implementation.disturbed:
        changes = "; ".join(f"{name}: {how}" for name, how in implementation.disturbed.items())
        raise Violation(
            f"the call changed global state ({changes})",
            evidence={"changed": dict(implementation.disturbed)},
            hint="keep to the inputs: set nothing globally, or put it back in a `finally`",
            merge="global-state",
        )


@law("ATN1203", "strided-inputs", "Inputs that are slices or transposed views are read right")
def strided_inputs(implementation: Implementation, problem: Problem) -> None:
    """the same numbers behind other strides give the same output

    Why: q, k and v come out of a projection as views; code that takes the storage for the tensor scrambles them.
    Example: `as_strided` by shape, or a raw pointer without strides.
    """
    agrees(implementation, problem)


@law("ATN1204", "calls-independent", "A second call is independent of the first")
def calls_independent(implementation: Implementation, problem: Problem) -> None:
    """f(a), f(b), f(a): the first and the third are the same, and the first result is still what it was

    Why: a buffer or a cached mask kept between calls answers the second question with the first one's data.
    Example: a causal mask cached by the first length seen.
    """
    arguments = arguments_for(implementation, problem)
    first = output(implementation, arguments)
    kept = first.clone()
    other = arguments_for(implementation, problem.replace(seed=problem.seed + 1))
    output(implementation, other)
    again = output(implementation, arguments_for(implementation, problem))
    overwritten = implementation.disturbed.pop("the output of an earlier call", "")
    if overwritten or not torch.equal(first, kept):
        raise Violation("a later call wrote into the output of an earlier one", merge="aliasing")
    close = (again.double() - kept.double()).abs() <= 1e-2 * (1 + kept.double().abs())
    if not bool((close | (again.isnan() & kept.isnan())).all()):
        raise Violation("the same inputs give another output after a call with other inputs", merge="stateful")


@law("ATN1205", "parameters-understood", "No parameter's name is nearly, but not quite, one that is known")
def parameters_understood(implementation: Implementation, problem: Problem) -> None:
    """is_casual, atn_mask, sofmax_scale, ...: a misspelt parameter is never passed, and what it does never judged

    Why: callers pass the name they know; `**kwargs` swallows it, and the flag has no effect.
    Example: `is_casual=False` beside callers that pass `is_causal=True`.
    """
    signature = getattr(implementation.adapter, "signature", None)
    if signature is None:
        raise Unsupported("an adapter of its own")
    if signature.near_misses:
        given = "; ".join(f"{name!r} is nearly {known!r}" for name, known in signature.near_misses)
        raise Violation(
            f"parameters that were not passed, for their names are not known: {given}",
            hint="rename them, or say under `parameters:` in attn.yaml what they are",
            merge="near-miss",
        )
    if signature.not_understood:
        raise Unsupported(f"no {signature.not_understood[0]} parameter is known by that name")
