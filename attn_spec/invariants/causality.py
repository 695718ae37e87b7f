"""Causality: a query sees its own position and the past, all of it, and nothing of the future."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import agrees, answer, arguments_for, output, recovered, same
from attn_spec.law import Refused, Unsupported, Violation, law
from attn_spec.problem import Arguments, Problem


def last_seen(implementation: Implementation, problem: Problem) -> Tensor:
    """For each query the number of keys that causality lets it see [Sq]."""
    alignment = problem.causal.alignment if problem.causal else None
    offset = problem.kv_len - problem.q_len
    if (alignment or implementation.conventions.meaning.alignment) == "top-left":
        offset = 0
    return (torch.arange(problem.q_len) + offset + 1).clamp(0, problem.kv_len)


def _cuts(problem: Problem) -> list[int]:
    n = problem.kv_len
    return sorted({1, n // 2, n - 1} - {0})


def _future_changed(arguments: Arguments, cut: int) -> Arguments:
    k, v = arguments.k.clone(), arguments.v.clone()
    k[:, :, cut:] = -3.0 * k[:, :, cut:] + 1.0
    v[:, :, cut:] = v[:, :, cut:] + 100.0
    return arguments.replace(k=k, v=v)


@law("ATN401", "no-future-leak", "A change in the future changes no earlier output")
def no_future_leak(implementation: Implementation, problem: Problem) -> None:
    """k_j, v_j changed for all j >= c  =>  out_i unchanged for every i that sees only keys below c

    Why: a model that sees the answer has a wonderful training loss and is useless.
    Example: `is_causal` accepted and never read; a triangle shifted by one.
    """
    arguments = arguments_for(implementation, problem)
    before = output(implementation, arguments)
    right = answer(implementation, arguments)
    bound = right.bounds.output
    seen = last_seen(implementation, problem)
    averaged = right.lse == -torch.inf  # where it is declared, a row without a key is the mean of all values, later too
    averaged &= implementation.conventions.meaning.empty_rows == "mean"
    for cut in _cuts(problem):
        rows = torch.nonzero(seen <= cut).flatten()
        after = output(implementation, _future_changed(arguments, cut))
        after = torch.where(averaged[..., None], before, after)
        if not len(rows):
            continue
        worst = same(after[:, :, rows], before[:, :, rows], bound[:, :, rows])
        if not worst.holds:
            query = int(rows[worst.index[2]])
            raise Violation(
                f"changing the keys and values from {cut} on moves the output of query {query}, which may see keys up "
                f"to {int(seen[query]) - 1} only, from {worst.expected:.6g} to {worst.got:.6g}",
                evidence={"query": query, "changed_from": cut, "expected": worst.expected, "received": worst.got},
                hint="hide the keys after the query's own position before the softmax",
                merge="future-leak",
            )


@law("ATN402", "no-gradient-from-the-future", "No gradient flows from an output to a later key or value")
def no_gradient_from_the_future(implementation: Implementation, problem: Problem) -> None:
    """d out_i / d k_j = d out_i / d v_j = 0 for hidden j

    Why: a leak in the backward pass alone trains on the future and passes every forward test.
    Example: a custom backward that does not mask again.
    """
    arguments = arguments_for(implementation, problem)
    k, v = arguments.k.requires_grad_(), arguments.v.requires_grad_()
    out = implementation(arguments).output
    if not out.requires_grad:
        raise Unsupported("the output carries no gradient")
    if tuple(out.shape[:3]) != arguments.sizes[:3]:
        raise Violation(f"the output has shape {list(out.shape)}", merge="output-shape")
    seen = last_seen(implementation, problem)
    for query in sorted({0, problem.q_len // 2, max(problem.q_len - 2, 0)}):
        n = int(seen[query])
        if n >= problem.kv_len:
            continue
        try:
            grads = torch.autograd.grad(
                out[:, :, query].float().square().sum(), (k, v), retain_graph=True, materialize_grads=True
            )
        except Exception as error:
            raise Refused(f"backward: {type(error).__name__}: {error}", error) from error
        for name, grad in zip("kv", grads, strict=True):
            hidden, size = grad[:, :, n:].double().abs(), float(grad.double().abs().max())
            if not bool((hidden <= 1e-3 * size).all()):
                raise Violation(
                    f"output {query} has a gradient of {float(hidden.max()):.3g} to {name} beyond key {n - 1}, the "
                    "last that it may see; expected 0",
                    evidence={"query": query, "received": float(hidden.max()), "expected": 0.0},
                    merge="future-gradient",
                )


@law("ATN403", "past-and-present-seen", "Every query sees its own position and all of the past")
def past_and_present_seen(implementation: Implementation, problem: Problem) -> None:
    """p_ij > 0 for every visible j, read off with a one-hot V

    Why: a triangle that leaves out the diagonal or the first key loses a token in every row, and nothing leaks.
    Example: `i > j` for `i >= j`.
    """
    weights, exact = recovered(implementation, arguments_for(implementation, problem))
    expected = exact.output[..., : problem.kv_len]
    seen = expected > 4 * exact.bounds.output[..., : problem.kv_len]
    missing = seen & ~(weights.double() > 0.25 * expected)
    if bool(missing.any()):
        sample, head, query, key = (int(n) for n in torch.nonzero(missing)[0])
        itself = ", itself" if problem.q_len == problem.kv_len and query == key else ""
        raise Violation(
            f"query {query} gives key {key}{itself} the weight {float(weights[sample, head, query, key]):.4g}, "
            f"expected {float(expected[sample, head, query, key]):.4g} ({int(missing.sum())} weights are missing)",
            evidence={"query": query, "key": key},
            setup="v = one_hot(v)",
            merge="past-unseen",
        )


@law("ATN404", "causal-alignment", "With Sq != Sk the causal triangle is aligned as declared")
def causal_alignment(implementation: Implementation, problem: Problem) -> None:
    """top-left: query i sees j <= i.  bottom-right: j <= i + Sk - Sq.

    Why: torch's is_causal is top-left, flash-attn's causal bottom-right; with a cache the wrong one sees one key.
    Example: `tril(ones(Sq, Sk))` under flash-attn's name.
    """
    agrees(implementation, problem)


@law("ATN405", "causal-with-features", "Causality holds together with every other feature")
def causal_with_features(implementation: Implementation, problem: Problem) -> None:
    """the output of the oracle under causal with grouped heads, scale, values of another width, ...

    Why: flags that are dropped in combination are the commonest hard bug.
    Example: a causal flag that is read only when a mask is given too.
    """
    agrees(implementation, problem)


@law("ATN406", "future-seen-unasked", "Without causality, the future is seen")
def future_seen_unasked(implementation: Implementation, problem: Problem) -> None:
    """p_ij > 0 for j > i when causality is not asked for

    Why: an encoder that turned causal sees half of its input.
    Example: a mask of None taken to mean causal.
    """
    if problem.causal_by_flag:
        raise Unsupported("always causal")
    weights, exact = recovered(implementation, arguments_for(implementation, problem))
    expected = exact.output[..., : problem.kv_len]
    future = torch.ones(problem.q_len, problem.kv_len, dtype=torch.bool).triu(1)
    missing = (
        (expected > 4 * exact.bounds.output[..., : problem.kv_len]) & ~(weights.double() > 0.25 * expected) & future
    )
    if bool(missing.any()):
        sample, head, query, key = (int(n) for n in torch.nonzero(missing)[0])
        raise Violation(
            f"causality was not asked for, and query {query} gives the later key {key} the weight "
            f"{float(weights[sample, head, query, key]):.4g}, expected {float(expected[sample, head, query, key]):.4g}",
            hint="if it is meant to be causal always, declare `causal: always` in attn.yaml",
            setup="v = one_hot(v)",
            merge="unasked-causal",
        )
