"""Execution: a call reads its inputs, writes its output, and leaves the rest of the world alone."""

from __future__ import annotations

from typing import Any

import torch

from attn_spec.adapters.function import FunctionAdapter
from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import agrees, alike, answer_to, arguments_for, output, require_within, same
from attn_spec.invariants.drawing import reseeding
from attn_spec.law import Advisory, Unsupported, Violation, law
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

    Why: it changes results far away, and nobody looks for it in an attention. A generator that is only moved on, by a
    seed drawn in each call, is an advisory.
    Example: `torch.manual_seed(0)` or `torch.set_default_dtype(...)` inside forward.
    """
    implementation.disturbed.clear()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(problem.seed + 271828)  # a state that no call reseeds to
        implementation(arguments_for(implementation, problem))
        with torch.no_grad():
            implementation(arguments_for(implementation, problem))
    disturbed = dict(implementation.disturbed)
    if disturbed:
        advanced = "random generator" in disturbed and not _reseeds(implementation, problem)
        if "random generator" in disturbed:
            disturbed["random generator"] = "advanced" if advanced else "reseeded"
        changes = "; ".join(f"{name}: {how}" for name, how in disturbed.items())
        raise (Advisory if advanced and len(disturbed) == 1 else Violation)(
            f"the call changed global state ({changes})",
            evidence={"changed": disturbed},
            hint="keep to the inputs: set nothing globally, or put it back in a `finally`",
            merge="global-state",
        )


def _reseeds(implementation: Implementation, problem: Problem) -> bool:
    """Whether a call sets torch's generator; True where that can't be told from moving it on."""
    try:
        return reseeding(implementation, arguments_for(implementation, problem))
    except Unsupported:
        return True


@law("ATN1203", "strided-inputs", "Inputs that are slices or transposed views are read right")
def strided_inputs(implementation: Implementation, problem: Problem) -> None:
    """the same numbers behind other strides give the same output

    Why: q, k and v come out of a projection as views; code that takes the storage for the tensor scrambles them.
    Example: `as_strided` by shape, or a raw pointer without strides.
    """
    agrees(implementation, problem)


@law("ATN1204", "calls-independent", "A second call is independent of the first")
def calls_independent(implementation: Implementation, problem: Problem) -> None:
    """f(a), f(b), f(a): all right, the first and the third the same, and the first result still what it was

    Why: a buffer or a cached mask kept between calls answers the second question with the first one's data.
    Example: a causal mask cached by the first length seen.
    """
    arguments = arguments_for(implementation, problem)
    first = output(implementation, arguments)
    kept = first.clone()
    other = problem.replace(seed=problem.seed + 1)
    second = output(implementation, arguments_for(implementation, other))
    if answer_to(implementation, problem).compare(first).holds:  # else it is wrong by itself, and that is another law's
        worst = answer_to(implementation, other).compare(second)
        require_within(worst, "output", because="right at first, and after a call with other inputs", merge="stateful")
    again = output(implementation, arguments_for(implementation, problem))
    overwritten = implementation.disturbed.pop("the output of an earlier call", "")
    if overwritten or not torch.equal(first.nan_to_num(), kept.nan_to_num()):
        raise Violation("a later call wrote into the output of an earlier one", merge="aliasing")
    worst = same(again, kept, answer_to(implementation, problem).bounds.output)
    because = "the same inputs give another output after a call with other inputs"
    require_within(worst, "output", because=because, merge="stateful")


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


@law("ATN1206", "deterministic", "The same call gives the same output")
def deterministic(implementation: Implementation, problem: Problem) -> None:
    """f(a) = f(a) = f(a), within the bound; the bits may differ

    Why: what differs from call to call can't be debugged, and a race shows now and then only.
    Example: dropout that is on by default; blocks that are merged before all are done.
    """
    arguments = arguments_for(implementation, problem)
    bound = answer_to(implementation, problem).bounds.output
    first = output(implementation, arguments)
    for _ in range(2):
        worst = same(output(implementation, arguments), first, bound)
        require_within(worst, "output", because="the same call again gives another output", merge="random")


@law("ATN1207", "batch-of-one", "A sample alone gives what it gives in a batch")
def batch_of_one(implementation: Implementation, problem: Problem) -> None:
    """f(q[b:b+1], k[b:b+1], v[b:b+1], mask of b) = f(q, k, v, mask)[b], within the bound

    Why: what a sample's output is must not depend on the company it came in.
    Example: a maximum or a mask taken over the whole batch; an index that is right for b = 0 only.
    """
    arguments = arguments_for(implementation, problem)
    whole = output(implementation, arguments)
    bound = answer_to(implementation, problem).bounds.output
    mask = arguments.mask
    by_sample = mask is not None and (arguments.form == "key-padding" or (mask.dim() == 4 and mask.shape[0] > 1))
    for b in range(problem.batch):
        q, k, v = (x[b : b + 1] for x in (arguments.q, arguments.k, arguments.v))
        part = mask[b : b + 1] if mask is not None and by_sample else mask
        slopes = arguments.alibi
        slopes = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        alone = arguments.replace(q=q, k=k, v=v, mask=part, alibi=slopes)
        worst = alike(implementation, output(implementation, alone), whole[b : b + 1], alone, bound[b : b + 1])
        require_within(worst, "output", because=f"sample {b} alone gives another output than in the batch")


@law("ATN1208", "reads-inside", "Nothing outside of the inputs is read, nor memory that was never written")
def reads_inside(implementation: Implementation, problem: Problem) -> None:
    """q, k, v stand between guards of NaN, and freed memory holds NaN: no NaN comes out

    Why: a load past the end of a block is harmless until other data lies there.
    Example: a tail that is loaded whole and multiplied by a mask of 0; `torch.empty` for rows that are never written.
    """
    agrees(implementation, problem)


@law("ATN1209", "operator-registration", "A registered operator is registered right")
def operator_registration(implementation: Implementation, problem: Problem) -> None:
    """torch.library.opcheck: schema, autograd registration, fake tensors

    Why: an operator whose schema or fake kernel is wrong breaks under torch.compile, far from here.
    Example: a kernel that mutates an input its schema calls read-only.
    """
    adapter = implementation.adapter
    function = getattr(adapter, "function", None)
    operator: Any = getattr(function, "signature_of", function)
    custom = isinstance(operator, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    if not isinstance(adapter, FunctionAdapter) or not custom or "aten::" in str(operator._qualified_op_name):
        raise Unsupported("not a registered operator")
    args, kwargs = adapter.call_arguments(arguments_for(implementation, problem))
    try:
        torch.library.opcheck(operator, tuple(args), kwargs)
    except Exception as error:
        reason = " ".join(str(error).split())[:400]
        raise Violation(f"torch.library.opcheck: {reason}", merge="opcheck") from error


@law("ATN1210", "output-apart", "The output shares no memory with an input")
def output_apart(implementation: Implementation, problem: Problem) -> None:
    """the storage of out is none of those of q, k, v

    Why: writing into the output, as dropout in place does, would change the input.
    Example: `v.expand(...)` returned for a single key; q returned as it is.
    """
    implementation.disturbed.clear()
    arguments = arguments_for(implementation, problem)
    out = implementation(arguments).output
    shared = [name for name in "qkv" if _same_storage(out, getattr(arguments, name))]
    elsewhere = implementation.disturbed.pop("the output", "")
    if shared or elsewhere:
        raise Violation(
            f"the output shares memory with {', '.join(shared) or 'an input'}",
            hint="return a tensor of its own: `.clone()`",
            merge="output-aliases-input",
        )


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.numel()) and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@law("ATN1211", "memory-linear", "Memory grows with the length, not with its square", advisory=True)
def memory_linear(implementation: Implementation, problem: Problem) -> None:
    """the peak over the inputs grows as S^a with a < 1.5, measured at three lengths in a process of its own

    Why: all S^2 logits of a long sequence at once are more than the machine has.
    Example: scores kept as one tensor; a mask that is expanded to [B, H, S, S].
    """
    from attn_spec.benchmark.memory import memory_linear as holds

    try:
        holds(implementation, problem)
    except Violation as error:  # most plain code keeps its logits, and is right none the less
        raise Advisory(error.message, evidence=error.evidence, hint=error.hint, merge=error.merge) from None
