"""Modules as a whole, on hidden states: what holds for any attention module, whatever its projections are.

Between its projections a module is judged as any function of q, k and v is. These laws look at what stands around that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attn_spec import tolerance, whole
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.hidden import HiddenCall, hidden_call
from attn_spec.invariants.comparison import LOGITS, are_logits, difference, evidence, needs_plain, require_within, same
from attn_spec.law import Advisory, Refused, Unsupported, Violation, law
from attn_spec.problem import Problem
from attn_spec.tolerance import roundoff


def run(call: HiddenCall, x: Tensor | None = None, context: Tensor | None = None, **others: Any) -> Tensor:
    """The output [B, S, width]; a Violation where samples or tokens are lost."""
    out = call.run(x, context, **others)[0]
    expected = call.x.shape[:2] if x is None else x.shape[:2]
    if out.dim() != 3 or out.shape[:2] != expected:
        flat = out.dim() == 2 and len(out) == expected.numel()
        raise Violation(
            f"the output has shape {list(out.shape)}, expected [B, S, width] = {[*expected, 'width']}",
            evidence={"expected": list(expected), "received": list(out.shape)},
            hint="merge the heads as [B, S, H * d]: `o.transpose(1, 2).reshape(B, S, -1)`",
            merge="output-shape-flat" if flat else "output-shape",
        )
    return out.detach()


def close(call: HiddenCall, got: Tensor, expected: Tensor) -> tolerance.Worst:
    """Two outputs that should be equal but for rounding, of which no oracle says how large it may be.

    Each element is a sum over the channels and tokens of the hidden states; 32 roundoffs of the largest are allowed.
    """
    size = expected.double().abs().max().clamp(min=1e-6) if expected.numel() else expected.double().sum()
    bound = 16 * roundoff(call.dtype) * size * torch.ones_like(expected, dtype=torch.float64)
    return same(got, expected, bound)


@law("ATN150", "module-output", "A module gives [B, S, width], fit for its residual", of_modules=True)
def module_output(implementation: Implementation, problem: Problem) -> None:
    """y [B, S, hidden] for x [B, S, hidden], in the dtype of x, where there is an output projection

    Why: `x + attention(x)` broadcasts a wrong width without a word, or dies far from here.
    Example: the heads merged as [B, H, S, d]; the last token dropped; float32 out of a bfloat16 module.
    """
    call = hidden_call(implementation, problem)
    out = run(call)
    if out.dtype != call.x.dtype:
        raise Violation(f"the output is {out.dtype}, the hidden states {call.x.dtype}", merge="output-dtype")
    if call.residual and out.shape[-1] != call.x.shape[-1]:
        raise Violation(
            f"the output is {out.shape[-1]} wide, the hidden states {call.x.shape[-1]}: no residual can be added",
            evidence={"expected": call.x.shape[-1], "received": out.shape[-1]},
            merge="output-width",
        )


@law("ATN650", "module-answer", "A module gives what attention gives through its own weights", of_modules=True)
def module_answer(implementation: Implementation, problem: Problem) -> None:
    """y = concat_h(softmax(scale q_h k_h' + mask) v_h) W_o + b_o,  q, k, v = x W + b, all with the module's own weights

    Why: an output projection that is skipped, keys made from the wrong input or a bias that is lost train on.
    Example: `return context` before `self.out_proj`; `k = self.W_key(x)` where the context was meant.
    """
    _answers(implementation, problem, hidden_call(implementation, problem))


def _answers(implementation: Implementation, problem: Problem, call: HiddenCall) -> None:
    right, out = _right(implementation, problem, call), run(call)
    if out.shape != right.output.shape:
        raise Violation(
            f"the output has shape {list(out.shape)}, expected {list(right.output.shape)}", merge="output-shape"
        )
    require_within(tolerance.worst(out, right.output, right.bound), "output")


def _right(implementation: Implementation, problem: Problem, call: HiddenCall) -> whole.Whole:
    weights = call.weights()
    if not weights:
        raise Unsupported("what its projections are given or do is more than a matrix and a bias")
    meaning, precision = implementation.conventions.meaning, implementation.precision_for(problem.dtype)
    arrive = implementation.effective if implementation.positional else None
    return whole.answer(call.x, call.context, weights, call.like, meaning, precision, arrive)


@law(
    "ATN152",
    "module-weights",
    "Weights that a module returns beside its output are those that made it",
    of_modules=True,
)
def module_weights(implementation: Implementation, problem: Problem) -> None:
    """[B, H, S, Sk], or their average over the heads [B, S, Sk]

    Why: what is looked at, plotted or distilled is not what the model does.
    Example: weights from before the mask; an average over the samples.
    """
    call = hidden_call(implementation, problem)
    call = call.asking_for_weights() or call
    right = _right(implementation, problem, call)
    s, kv_len = right.weights.shape[-2:]
    returned = [x.detach() for x in call.run()[1:] if x.shape[-2:] == (s, kv_len)]
    extras = [x for x in returned if x.dim() == 3 or x.shape == right.weights.shape]  # a bias may be [1, H, S, Sk]
    if not extras:
        raise Unsupported("returns no weights")
    for x in extras:
        if x.dim() == 4:
            expected, bound, what = right.weights, right.weights_bound, "[B, H, S, Sk]"
        else:
            expected, bound, what = (
                right.weights.mean(1),
                right.weights_bound.mean(1),
                "[B, S, Sk], averaged over heads",
            )
        if x.shape != expected.shape:
            raise Violation(
                f"the weights have shape {list(x.shape)}, expected {what} = {list(expected.shape)}",
                evidence={"expected": list(expected.shape), "received": list(x.shape)},
                merge="weights-shape",
            )
        if are_logits(x, expected):
            raise Unsupported(LOGITS)
        require_within(tolerance.worst(x, expected, bound), "weights", merge="returned-weights")


@law("ATN551", "batch-mask", "A mask [B, S, S] is one for each sample, not for each head", of_modules=True)
def batch_mask(implementation: Implementation, problem: Problem) -> None:
    """y for mask [B, S, S] = y for mask[:, None] [B, 1, S, S], where there are as many samples as heads

    Why: without an axis for the heads it is broadcast over them, and no shape says so where B = H.
    Example: `scores.masked_fill(~mask, -inf)` with scores [B, H, S, S].
    """
    call = hidden_call(implementation, problem)
    if call.like.mask is None or call.like.mask.dim() != 4:
        raise Unsupported("no mask parameter")
    right = _right(implementation, problem, call)
    try:
        out = run(call.with_three_axes())
    except Refused as error:
        raise Unsupported(f"a mask of three axes is not taken: {error}") from None
    worst = tolerance.worst(out, right.output, right.bound)
    if not worst.holds:
        raise (Violation if call.documents_three_axes else Advisory)(
            f"a mask [B, S, S] is taken without complaint and read as one for each head: {difference(worst, 'output')}",
            evidence=evidence(worst),
            hint="give it an axis for the heads: `mask[:, None]`, or refuse it",
            merge="batch-mask",
        )


@law(
    "ATN652",
    "context-read",
    "Keys and values are made from the context, queries from the hidden states",
    of_modules=True,
)
def context_read(implementation: Implementation, problem: Problem) -> None:
    """as ATN650, with a context that is as long as the hidden states, where no shape tells the two apart

    Why: cross-attention that reads its own sequence is self-attention with another name.
    Example: `k = self.to_k(x)` where the context was meant.
    """
    _answers(implementation, problem, hidden_call(implementation, problem, with_context=True))


@law("ATN651", "projections-apart", "q, k and v have projections of their own", of_modules=True)
def projections_apart(implementation: Implementation, problem: Problem) -> None:
    """W_q, W_k and W_v are three parameters, not one under several names; each head has its own part of them

    Why: with q and k the same, q.k is symmetric and every token looks at itself first; heads that share are one head.
    Example: `self.W_key = self.W_query`; hidden states cut into heads before one nn.Linear(head_dim, head_dim).
    """
    call = hidden_call(implementation, problem)
    shared = call.shared_projections
    if shared:
        raise Violation(
            f"{' and '.join(shared)} are one and the same parameter",
            hint="give each its own; `nn.Parameter(w.clone())`",
            merge="projections-shared",
        )
    if call.shared_by_heads:
        raise Violation(
            f"{call.shared_by_heads} takes one head's slice of the hidden states, and all heads share it: no head sees "
            "the channels of another",
            hint="project all channels, to all heads at once: nn.Linear(hidden, heads * head_dim)",
            merge="projections-shared-by-heads",
        )


@law("ATN653", "rotated-alike", "Where positions rotate q and k, one position rotates both alike", of_modules=True)
def rotated_alike(implementation: Implementation, problem: Problem) -> None:
    """R_i q = R_i k for q = k at position i, so that q.k depends on the distance alone

    Why: positions that are off by one for queries only move every distance by one.
    Example: `positions + 1` for q; q rotated, k not.
    """
    if implementation.between != "rotation":
        raise Unsupported("no rotation by position")
    arguments = problem.arguments()
    group = arguments.q.shape[1] // arguments.k.shape[1]
    seen = implementation.effective(arguments.replace(q=arguments.k.repeat_interleave(group, 1)))
    bound = 64 * roundoff(problem.dtype) * seen.k.double().norm(dim=-1, keepdim=True).expand_as(seen.k)
    worst = same(seen.q[:, ::group], seen.k, bound)
    require_within(worst, "q", because="a query and a key that are the same, at the same position", merge="rotation")


@law(
    "ATN250",
    "token-order",
    "Without positions and masks, tokens in another order give outputs in that order",
    of_modules=True,
)
def token_order(implementation: Implementation, problem: Problem) -> None:
    """f(x[perm]) = f(x)[perm]

    Why: nothing in attention knows of positions but what is added to it.
    Example: heads scrambled by a `view` mix the channels of different tokens.
    """
    needs_plain(implementation)
    call = hidden_call(implementation, problem)
    if implementation.conventions.causal.value == "always" or call.positional:
        raise Unsupported("it knows of positions")
    if call.positions_unseen:
        raise Unsupported("a black box whose source speaks of positions")
    perm = torch.randperm(call.x.shape[1], generator=torch.Generator().manual_seed(problem.seed + 5))
    worst = close(call, run(call, call.x[:, perm]), run(call)[:, perm])
    require_within(worst, "output", because="the tokens in another order")


@law("ATN450", "module-no-future-leak", "A change of later hidden states changes no earlier output", of_modules=True)
def module_no_future_leak(implementation: Implementation, problem: Problem) -> None:
    """x_j changed for all j >= c  =>  y_i unchanged for i < c, where the module is causal or asked to be

    Why: a model that sees the answer has a wonderful training loss and is useless.
    Example: a triangle that is built for other sizes; the mask applied after the softmax.
    """
    call = hidden_call(implementation, problem)
    if not call.like.causal and implementation.conventions.causal.value != "always":
        raise Unsupported("not causal")
    before, length = run(call), call.x.shape[1]
    for cut in sorted({1, length // 2, length - 1} - {0}):
        x = call.x.clone()
        x[:, cut:] = 3.0 - 2.0 * x[:, cut:]
        context = x if call.context is not None else None
        worst = close(call, run(call, x, context)[:, :cut], before[:, :cut])
        if not worst.holds:
            raise Violation(
                f"changing the hidden states from {cut} on moves output {worst.index[1]} from {worst.expected:.6g} to "
                f"{worst.got:.6g}",
                evidence=evidence(worst),
                hint="hide the keys after the query's own position before the softmax",
                merge="future-leak",
            )


@law("ATN550", "padding-invisible", "Hidden states that are padding reach no other output", of_modules=True)
def padding_invisible(implementation: Implementation, problem: Problem) -> None:
    """x_j changed at every padded j  =>  y_i unchanged at every real i

    Why: what a batch is padded with is no part of the text.
    Example: the padding mask taken the wrong way round, or along the queries.
    """
    call = hidden_call(implementation, problem)
    hidden = call.hidden_tokens(problem)
    before = run(call)
    x, context = call.x.clone(), None if call.context is None else call.context.clone()
    (x if context is None else context)[hidden] += 50.0
    after = run(call, x, context)
    real = ~hidden if context is None else torch.ones(after.shape[:2], dtype=torch.bool)
    worst = close(call, after[real], before[real])
    require_within(worst, "output", because="other numbers at the padded tokens", merge="padding-leak")


@law(
    "ATN950", "no-gradient-to-padding", "No gradient flows from a real output to a padded hidden state", of_modules=True
)
def no_gradient_to_padding(implementation: Implementation, problem: Problem) -> None:
    """d y_i / d x_j = 0 for real i and padded j

    Why: a leak in the backward pass alone trains on padding and passes every forward test.
    Example: a mask that multiplies weights after the softmax of detached logits.
    """
    call = hidden_call(implementation, problem)
    hidden = call.hidden_tokens(problem)
    x = call.x.clone().requires_grad_()
    if call.context is not None:
        raise Unsupported("padding is judged where keys and queries come from one sequence")
    run(call)
    out = call.run(x)[0]
    if not out.requires_grad:
        raise Unsupported("the output carries no gradient")
    (grad,) = torch.autograd.grad(out[~hidden].float().square().sum(), x)
    leaked, size = float(grad[hidden].double().abs().max()), float(grad.double().abs().max())
    if not leaked <= 1e-3 * size:
        raise Violation(
            f"a padded hidden state gets a gradient of {leaked:.3g} from real outputs, expected 0",
            evidence={"received": leaked, "expected": 0.0},
            merge="padding-gradient",
        )


@law("ATN951", "gradients-reach-weights", "Every projection gets a gradient", of_modules=True)
def gradients_reach_weights(implementation: Implementation, problem: Problem) -> None:
    """d loss / d W != 0 for W_q, W_k, W_v and W_o, and no other parameter is without use

    Why: a projection without a gradient never learns, and nothing says so.
    Example: `k.detach()`; an output projection or a norm that is made and never called.
    """
    call = hidden_call(implementation, problem)
    grads = call.gradients()
    unused = {name for name, grad in grads.items() if float(grad) < 0 and not call.optional_context}
    dead = [name for name, grad in grads.items() if float(grad) == 0 or (name in unused and not call.waits(name))]
    if dead:
        raise Violation(
            f"{' and '.join(dead)} {'gets' if len(dead) == 1 else 'get'} no gradient from the output",
            hint="look for `detach()`, `no_grad`, `.data`, or a projection that is never used",
            merge="dead-weights",
        )
