"""Modules as they are run: in training and in eval mode, one sample alone, one call after another, in every way."""

from __future__ import annotations

import torch

from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.hidden import hidden_call
from attn_spec.invariants.comparison import require_within
from attn_spec.invariants.modules import close, run
from attn_spec.law import Refused, Unsupported, Violation, law
from attn_spec.problem import Problem


@law("ATN1150", "dropout-off-in-eval", "In eval mode there is no dropout", of_modules=True)
def dropout_off_in_eval(implementation: Implementation, problem: Problem) -> None:
    """built with dropout = 0.5 and put in eval mode, a module gives what it gives with dropout = 0

    Why: answers that differ from call to call, and a loss of evaluation that is too high.
    Example: `F.dropout(p, self.dropout)` without `training=self.training`.
    """
    call = hidden_call(implementation, problem)
    plain, dropping = run(call), call.with_dropout(0.5)
    if dropping is None:
        raise Unsupported("its constructor takes no dropout")
    worst = close(dropping, run(dropping), plain)
    require_within(
        worst, "output", because="with dropout = 0.5 in eval mode", merge="dropout-in-eval",
        hint="`F.dropout(p, self.dropout, training=self.training)`, or nn.Dropout",
    )  # fmt: skip


@law("ATN1151", "train-equals-eval", "Without dropout, training mode gives what eval mode gives", of_modules=True)
def train_equals_eval(implementation: Implementation, problem: Problem) -> None:
    """dropout = 0  =>  f.train()(x) = f.eval()(x)

    Why: the two modes must differ by dropout alone.
    Example: the causal mask applied in one of the branches only.
    """
    call = hidden_call(implementation, problem)
    if call.always_drops:
        raise Unsupported("its dropout can't be set to 0")
    worst = close(call, run(call, train=True), run(call))
    require_within(worst, "output", because="in training mode", merge="training-differs")


@law("ATN1250", "module-batch-of-one", "A sample alone gives what it gives in a batch", of_modules=True)
def module_batch_of_one(implementation: Implementation, problem: Problem) -> None:
    """f(x[b : b + 1]) = f(x)[b]

    Why: what stands in one sample is no business of another.
    Example: a softmax over the batch; the first sample's mask for all.
    """
    call = hidden_call(implementation, problem)
    together = run(call)
    for n in range(len(call.x)):
        alone = call.sample(n)
        worst = close(call, run(alone), together[n : n + 1])
        require_within(worst, "output", because=f"sample {n} alone", merge="batch-of-one")


@law("ATN1251", "module-calls-independent", "A call leaves nothing behind for the next", of_modules=True)
def module_calls_independent(implementation: Implementation, problem: Problem) -> None:
    """f(a); f(b); f(a) again: the two outputs of a are equal, and x is not changed

    Why: a mask or a key kept from an earlier call is read by the next.
    Example: `if self.mask is None: self.mask = ...` built for the first length.
    """
    call = hidden_call(implementation, problem)
    x = call.x.clone()
    first = run(call)
    if not torch.equal(x, call.x):
        raise Violation("the hidden states are changed in place", merge="inputs-changed")
    for length in (max(1, problem.q_len - 2), problem.q_len + 3):
        other = problem.replace(q_len=length, kv_len=length, mask=(), delivery=type(problem.delivery)())
        try:
            run(hidden_call(implementation, implementation.fit(other)))
        except (Unsupported, Refused):
            continue
    worst = close(call, run(call), first)
    require_within(
        worst, "output", because="the same call after calls of other lengths", merge="state-kept",
        hint="keep nothing of a call but a cache that is asked for",
    )  # fmt: skip


@law(
    "ATN1252",
    "ways-of-running-agree",
    "With and without gradients, with and without weights, the output is one",
    of_modules=True,
)
def ways_of_running_agree(implementation: Implementation, problem: Problem) -> None:
    """f(x) under no_grad = f(x) with gradients = f(x) asked for its weights too

    Why: modules take a shorter way where nothing needs a gradient, and it is another code.
    Example: a fast path that forgets the mask.
    """
    call = hidden_call(implementation, problem)
    with torch.no_grad():
        fast = run(call)
    x = call.x.clone().requires_grad_()
    out = call.run(x)[0].detach()
    require_within(close(call, fast, out), "output", because="without gradients", merge="ways-differ")
    asked = call.asking_for_weights()
    if asked is not None:
        because = "when its weights are asked for"
        require_within(close(call, run(asked), out), "output", because=because, merge="ways-differ")
