"""Modules beside their attention: how positions turn q and k, what the hidden states get back, what a call is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from attn_spec import module_blocks, tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.modules.forward import BATCHED
from attn_spec.adapters.modules.hidden import HiddenCall, hidden_call
from attn_spec.invariants.comparison import same
from attn_spec.law import Refused, Unsupported, Violation, law
from attn_spec.masks import KeyPadding, Part
from attn_spec.problem import Problem

PLAINLY = 1e-3  # a share of the largest element: what is wrong here is wrong by more, and tables are rounded by less
TURNED = 2e-2  # the same for rotations, whose tables may be of a half type


def near(got: Tensor, expected: Tensor, share: float = PLAINLY) -> tolerance.Worst:
    """Two tensors that are equal but for a share of the largest element."""
    size = expected.double().abs().max().clamp(min=1e-6)
    return same(got, expected, share * size * torch.ones_like(expected, dtype=torch.float64))


@law(
    "ATN654", "rotation-whole", "What turns q and k by position is a rotation, or depends on distance", of_modules=True
)
def rotation_whole(implementation: Implementation, problem: Problem) -> None:
    """|R_i x| / |x| = |R_i y| / |y|,  or  (R_i x).(R_j y) depends on i - j alone

    Why: angles laid out for pairs of neighbours and halves that are turned against each other make no rotation; the
    model trains on a distance that means something else at every position.
    Example: `freqs.repeat_interleave(2, -1)` with `rotate_half`.
    """
    if not implementation.positional:
        raise Unsupported("nothing between projections and product")
    a, g = problem.arguments(), torch.Generator().manual_seed(problem.seed + 3)

    def standing(x: Tensor) -> Tensor:  # one vector at all positions; in the next sample another, then the first twice
        of = torch.randn(2, x.shape[1], 1, x.shape[3], generator=g, dtype=torch.float64)
        return torch.cat([of, 2 * of[:1]]).expand(-1, -1, x.shape[2], -1).to(x.dtype).contiguous()

    given = a.replace(q=standing(a.q), k=standing(a.k))
    seen = implementation.effective(given)
    for given_x, x in ((given.q.double(), seen.q.double()), (given.k.double(), seen.k.double())):
        if near(x, x[:, :, :1].expand_as(x), TURNED).holds:
            raise Unsupported("q and k are the same at every position")
        if not near(x[2], 2 * x[0], TURNED).holds:
            raise Unsupported("what lies between is more than a turn")
        turned = x.norm(dim=-1) / given_x.norm(dim=-1)
        if near(turned[1], turned[0], TURNED).holds:
            continue
        group = seen.q.shape[1] // seen.k.shape[1]
        scores = seen.q[0].double() @ seen.k[1].double().repeat_interleave(group, 0).mT
        if near(scores[:, 1:, 1:], scores[:, :-1, :-1], TURNED).holds:
            return
        n = int((turned[1] - turned[0]).abs().amax(0).argmax())
        raise Violation(
            f"position {n} makes one vector {float(turned[0, 0, n]):.4g} times as long and another "
            f"{float(turned[1, 0, n]):.4g} times, and q.k depends on more than the distance: no rotation does so",
            hint="`rotate_half` turns channel c with c + d/2 and needs angles `cat([a, a])`; pairs of neighbours need "
            "`repeat_interleave(2)`",
            merge="rotation-mixed",
        )


@law("ATN655", "past-the-table", "Positions beyond the table that a module was built for are not one", of_modules=True)
def past_the_table(implementation: Implementation, problem: Problem) -> None:
    """a causal module built for fewer positions refuses more of them, or gives what one built for all of them gives

    Why: where later positions share the last row of the table, far tokens lose their order and nothing is raised.
    Example: `positions.clamp(max=len(table) - 1)`.
    """
    call = hidden_call(implementation, problem)
    f = call.adapter.module
    if f is None or f.between != "rotation" or "context" not in f.roles or f.instance is not None:
        raise Unsupported("no rotation whose table has a length")
    if implementation.conventions.causal.value != "always" and not call.like.causal:
        raise Unsupported("not causal: what is beyond the table reaches all rows")
    built = problem.q_len // 2
    expected = call.run()[0].detach()
    try:
        got = dataclasses.replace(call, sizes=dataclasses.replace(call.sizes, context=built)).run()[0].detach()
    except (Refused, Unsupported, Violation) as error:
        raise Unsupported(f"more positions are refused: {error}") from None
    if got.shape != expected.shape or not near(got[:, :built], expected[:, :built]).holds:
        raise Unsupported("it is another module that is built for fewer positions")
    worst = near(got, expected)
    if not worst.holds:
        raise Violation(
            f"built for {built} positions and given {problem.q_len}, output {worst.index[1]} is {worst.got:.6g}, "
            f"expected {worst.expected:.6g}: nothing is raised, and positions from {built} on are not their own",
            hint="make the table longer, or raise",
            merge="positions-clamped",
        )


@law("ATN656", "positions-given", "Positions that all move by one number change nothing", of_modules=True)
def positions_given(implementation: Implementation, problem: Problem) -> None:
    """f(x, position_ids = 0 ... S - 1) = f(x) = f(x, position_ids = 3 ... S + 2), where positions rotate q and k

    Why: packed and left-padded batches give their positions; what reads them for keys alone moves every distance.
    Example: queries rotated by `arange(S)`, keys by `position_ids`.
    """
    call = hidden_call(implementation, problem)
    f = call.adapter.module
    if f is None or f.between != "rotation":
        raise Unsupported("no rotation by position")
    name = next((name for name in BATCHED if name in (*f.forward.left, *f.forward.required)), "")
    if not name:
        raise Unsupported("no parameter for positions")
    batch, length = call.x.shape[:2]
    ids = torch.arange(length).expand(batch, length).contiguous()
    runs = []
    for shift in (0, 3):
        try:
            moved = dataclasses.replace(call, named={**call.named, name: ids + shift})
            runs.append(moved.run()[0].detach())
        except Refused as error:
            raise Unsupported(f"{name} [B, S] is not taken: {error}") from None
    for shift, out in zip((0, 3), runs, strict=True):
        worst = near(out, call.run()[0].detach())
        if not worst.holds:
            raise Violation(
                f"with {name} from {shift} on, output {list(worst.index)} is {worst.got:.6g}, expected "
                f"{worst.expected:.6g}: distances are the same",
                hint=f"rotate q and k by the same {name}",
                merge="positions-on-one-side",
            )


@law("ATN952", "hidden-state-gradients", "Hidden states and context get the gradient that is theirs", of_modules=True)
def hidden_gradients(implementation: Implementation, problem: Problem) -> None:
    """dx and dcontext of a module = those of attention through its own weights

    Why: a path that is cut before a projection trains every weight of the module, and starves what stands below it.
    Example: `self.to_k(context.detach())`.
    """
    call = hidden_call(implementation, problem)
    if implementation.positional:
        raise Unsupported("q and k change on the way to their product, or the scores after it")
    weights = call.weights()
    if not weights:
        raise Unsupported("what its projections are given or do is more than a matrix and a bias")
    given = [x.clone().requires_grad_() for x in call.inputs]
    exact = [x.detach().double().requires_grad_() for x in given]
    with torch.enable_grad():
        out = call.run(*given)[0]
        right, _ = module_blocks.run(
            exact[0], exact[1] if len(exact) > 1 else None,
            weights, call.like.double(), implementation.conventions.meaning,
        )  # fmt: skip
    if not out.requires_grad:
        raise Unsupported("the output carries no gradient")
    if out.shape != right.shape or not near(out.detach(), right.detach()).holds:
        raise Unsupported("the output is another, which other laws report")
    if any(float(grad) == 0 for grad in call.gradients().values()):
        raise Unsupported("a projection gets no gradient, which another law reports")
    cotangent = torch.randn(right.shape, generator=torch.Generator().manual_seed(11), dtype=torch.float64)
    got = torch.autograd.grad(out, given, cotangent.to(out.dtype), allow_unused=True)
    expected = torch.autograd.grad(right, exact, cotangent)
    for name, one, other in zip(("hidden states", "context"), got, expected, strict=False):
        worst = near(torch.zeros_like(other) if one is None else one.detach(), other)
        if not worst.holds:
            raise Violation(
                f"the gradient of the {name} at {list(worst.index)} is {worst.got:.6g}, expected {worst.expected:.6g}: "
                "part of what flows back is lost before a projection",
                hint="look for `detach()`, `no_grad` and `.data` on what q, k and v are made from",
                merge="hidden-gradients",
            )


@law("ATN1253", "told-by-sample", "What a call is told of each sample is read for that sample", of_modules=True)
def told_by_sample(implementation: Implementation, problem: Problem) -> None:
    """f(x, n)[b] = f(x[b : b + 1], n[b : b + 1]) for a length n of each sample's own

    Why: the longest prefix of a batch lets the others see their future.
    Example: `j < prefix_len.max()`.
    """
    call = hidden_call(implementation, problem)
    f = call.adapter.module
    name = f.forward.prefix if f is not None else ""
    if not name:
        raise Unsupported("nothing is told of each sample")
    length = call.x.shape[1]
    told = torch.arange(len(call.x)) % (length - 1) + 1

    def run(asked: HiddenCall, n: Tensor) -> Tensor:
        return dataclasses.replace(asked, named={**asked.named, name: n}).run()[0].detach()

    try:
        together = run(call, told)
    except Refused as error:
        raise Unsupported(f"{name} [B] is not taken: {error}") from None
    for n in range(len(call.x)):
        worst = near(run(call.sample(n), told[n : n + 1]), together[n : n + 1])
        if not worst.holds:
            raise Violation(
                f"sample {n} alone, with its own {name}, gives {worst.got:.6g} at {list(worst.index)}, in the batch "
                f"{worst.expected:.6g}",
                hint=f"compare positions with {name}[:, None], not with its largest",
                merge="told-of-another",
            )


def anew(f: ModuleFunction, x: Tensor, context: Tensor | None = None, **named: Any) -> list[Tensor]:
    """The same as a whole call, by a module that has never been called."""
    f.forget()
    return f.whole(x, context, **named)


@law("ATN1254", "masks-independent", "A mask is read in every call, not in the first alone", of_modules=True)
def masks_independent(implementation: Implementation, problem: Problem) -> None:
    """f(x, m); f(x, n) = f(x, n) of a module that was never called, for masks m and n of one shape

    Why: a mask that is kept by its shape hides the first batch's padding in every later batch.
    Example: `if self._mask is None: self._mask = ...`.
    """
    call = hidden_call(implementation, problem)
    if call.like.mask is None:
        raise Unsupported("no mask parameter")
    call.run()
    other = problem.replace(mask=tuple(_rolled(part) for part in problem.mask))
    later = hidden_call(implementation, other)
    got = later.run()[0].detach()
    inputs = later.inputs
    fresh = implementation.perform(anew, *inputs, sizes=later.sizes, **later.named)[0].detach()
    worst = near(got, fresh)
    if not worst.holds:
        raise Violation(
            f"after a call with another mask of the same shape, output {list(worst.index)} is {worst.got:.6g}, "
            f"expected {worst.expected:.6g}, which a module as new gives",
            hint="keep no mask from one call to the next",
            merge="mask-kept",
        )


def _rolled(part: Part) -> Part:
    """A key padding whose lengths are those of the next sample."""
    if not isinstance(part, KeyPadding):
        raise Unsupported("not a padding")
    return KeyPadding((*part.lengths[1:], part.lengths[0]), part.left)


@law("ATN657", "values-unmoved", "Positions turn q and k, and leave the values as they are", of_modules=True)
def values_unmoved(implementation: Implementation, problem: Problem) -> None:
    """q = k = 0, v = c at key j alone  =>  the last output is c / S, whatever j

    Why: values that are rotated come out turned by their own positions, which nothing turns back.
    Example: q, k and v rotated in one call on the fused projection.
    """
    if not implementation.positional:
        raise Unsupported("nothing between projections and product")
    length = problem.kv_len
    a = problem.replace(batch=length).arguments()
    c = a.v[:1, :, :1]
    v = torch.zeros_like(a.v)
    for j in range(length):
        v[j, :, j] = c[0, :, 0]
    always = implementation.conventions.causal.value == "always"
    asked = a.replace(q=torch.zeros_like(a.q), k=torch.zeros_like(a.k), v=v, causal=a.causal or always)
    last = implementation(asked).output.detach()[:, :, -1].double() * length
    expected = c[:, :, 0].double().repeat_interleave(a.q.shape[1] // a.k.shape[1], 1).expand_as(last)
    if not near(last.norm(dim=-1), expected.norm(dim=-1), TURNED).holds:
        raise Unsupported("the output is another in more than its direction, which other laws report")
    worst = near(last, expected, TURNED)
    if not worst.holds:
        raise Violation(
            f"the value of key {worst.index[0]} reaches the last output as {worst.got:.4g} in channel "
            f"{worst.index[2]}, expected {worst.expected:.4g}: as long, but turned",
            hint="rotate q and k alone",
            merge="values-rotated",
        )
