"""Modules with a cache: a sequence decoded in parts gives what the module gives on the whole, without a cache.

Tokens are rotated by real positions where the module takes the rotation from its caller, so a wrong one shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_spec import whole
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.hidden import HiddenCall, hidden_call
from attn_spec.adapters.modules.sessions import SHORT, decode, protocol_of
from attn_spec.invariants.comparison import difference, evidence, same
from attn_spec.invariants.decoding import chunks
from attn_spec.invariants.modules import close
from attn_spec.law import Unsupported, Violation, law
from attn_spec.masks import Causal, Delivery, KeyPadding
from attn_spec.problem import Problem

CAPACITY = 5  # positions of a cache of fixed length beyond those that are used


@dataclass(frozen=True, eq=False)
class Decoded:
    """A problem as sequences to decode. by: how causality is asked for: "itself", "flag" or "mask"."""

    implementation: Implementation
    call: HiddenCall
    by: str

    def whole(self, x: Tensor | None = None) -> dict[str, Any]:
        """One call without a cache."""
        return {"x": self.call.x if x is None else x, "named": self.call.named, **self._context}

    def parts(self, cuts: Sequence[int], x: Tensor | None = None) -> dict[str, Any]:
        """A sequence with a cache, in parts between the cuts."""
        named = [self._named(start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
        return {"x": self.call.x if x is None else x, "cuts": list(cuts), "named": named, **self._context}

    @property
    def _context(self) -> dict[str, Tensor]:
        return {} if self.call.context is None else {"context": self.call.context}

    def _named(self, start: int, stop: int) -> dict[str, Any]:
        """The arguments of forward for the tokens from `start` to `stop`: of masks, their rows and the keys so far."""
        length, out = self.call.x.shape[1], dict(self.call.named)
        padding = self.call.like.form == "key-padding"
        for name, value in out.items():
            if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[-1] == length:
                rows = value[..., start:stop, :] if not padding and value.shape[-2] == length else value
                out[name] = rows[..., :stop].contiguous()
        return out

    @cached_property
    def bound(self) -> float:
        """The largest bound of an element of the whole answer, of whatever size its logits are; 0 where it is unknown.

        For all elements alike: a rotation from the caller changes which are large, and not how large.
        """
        weights, c = self.call.weights(), self.call
        if not weights:
            return 0.0
        meaning, precision = self.implementation.conventions.meaning, self.implementation.precision_for(c.dtype)
        right = whole.answer(c.x, c.context, weights, c.like, meaning, precision)
        return float(right.bound.nan_to_num(posinf=0.0).amax())

    def run(self, *plan: Mapping[str, Any]) -> list[Tensor]:
        """The outputs of calls and sequences, one after the other with one copy of the module."""
        capacity = self.call.x.shape[1] + CAPACITY
        found = self.implementation.perform(decode, list(plan), sizes=self.call.sizes, capacity=capacity)
        return list(found)


def decoded(implementation: Implementation, problem: Problem) -> Decoded:
    """A causal problem as a sequence to decode. Raises Unsupported where the module keeps no cache or is not causal."""
    module = getattr(implementation.adapter, "module", None)
    if module is None:
        raise Unsupported("not a module")
    if protocol_of(module) is None:
        raise Unsupported("it takes no cache")
    if module.input == "SD":
        raise Unsupported("it takes no batch")
    by = {"always": "itself", "never": "mask"}.get(implementation.conventions.causal.value, "flag")
    by = "mask" if module.by_mask else by
    padded = any(isinstance(part, KeyPadding) for part in problem.mask)
    if module.forward.context_required:
        return Decoded(implementation, _of_context(implementation, problem), "itself")
    if by == "mask" or padded:
        form = "bool" if "bool" in getattr(implementation.adapter, "forms", ("bool",)) else "additive"
        shape = "B1QK" if padded else ""
        problem = problem.replace(delivery=Delivery(form, shape, flag=by != "mask", hidden="-inf"))  # type: ignore[arg-type]
    call = hidden_call(implementation, problem)
    if "window" in module.roles and not (module.constructor and module.constructor.may_be_without("window")):
        call = replace(call, sizes=replace(call.sizes, own_window=SHORT))
    return Decoded(implementation, call, by)


def _of_context(implementation: Implementation, problem: Problem) -> HiddenCall:
    """A call whose keys are all made from one context, which the first call of a sequence leaves in the cache."""
    module = implementation.adapter.module  # type: ignore[attr-defined]
    protocol = protocol_of(module)
    if implementation.conventions.causal.value != "never" or protocol is None or protocol.kind != "returned":
        raise Unsupported("its cache is one of another sequence")
    if problem.mask != (Causal(),):
        raise Unsupported("its cache is one of another sequence, of which the padding says nothing")
    return hidden_call(implementation, problem.replace(mask=(), kv_len=problem.q_len + 3), with_context=True)


def _require(made: Decoded, got: Tensor, expected: Tensor, because: str, merge: str, hint: str = "") -> None:
    worst = close(made.call, got, expected)
    if not worst.holds:
        worst = same(got, expected, torch.full_like(expected, made.bound, dtype=torch.float64))
    if not worst.holds:
        raise Violation(f"{because}: {difference(worst, 'output')}", evidence=evidence(worst), hint=hint, merge=merge)


def _as_whole(implementation: Implementation, problem: Problem, cuts: Sequence[int], what: str, merge: str) -> None:
    made = decoded(implementation, problem)
    right, parts = made.run(made.whole(), made.parts(cuts))
    hint = "compare the rows of the mask, the positions and the keys that are read with those of the whole"
    _require(made, parts, right, f"{what} (parts {_said(cuts)}) instead of without a cache", merge, hint)


def _said(cuts: Sequence[int]) -> str:
    return ", ".join(str(b - a) for a, b in zip(cuts, cuts[1:], strict=False))


@law(
    "ATN1050",
    "session-steps",
    "A sequence token by token with the cache gives what it gives whole without",
    of_modules=True,
)
def session_steps(implementation: Implementation, problem: Problem) -> None:
    """y_t = f(x_t; cache of x_0 ... x_(t-1))  =  row t of f(x), with the module's own weights, for every t

    Why: a module is trained without its cache and used with it.
    Example: a mask sliced on the wrong axis; the rotation of every new token that of position 0.
    """
    _as_whole(implementation, problem, range(problem.q_len + 1), "token by token with the cache", "session-steps")


@law(
    "ATN1051",
    "session-chunks",
    "A sequence in chunks with the cache gives what it gives whole without",
    of_modules=True,
)
def session_chunks(implementation: Implementation, problem: Problem) -> None:
    """as ATN1050, in chunks of several tokens: these too see the whole cache and of themselves only the past

    Why: long prompts, and drafts of speculative decoding, come as several tokens onto a cache.
    Example: a triangle S by S where S by S + len(cache) was meant; chunk 2 written to the slots of chunk 1.
    """
    for cuts in list(chunks(problem.q_len))[:2]:
        try:
            _as_whole(implementation, problem, cuts, "in chunks with the cache", "session-chunks")
        except Violation as error:
            if error.merge != "decoding-raises":
                raise
            session_steps(implementation, problem)  # raises there too: a failure, and not only of chunks
            raise Unsupported(f"takes one token at a time once there is a cache: {error.message}") from None


@law(
    "ATN1052", "session-prefill", "A prompt at once and then token by token gives what the whole gives", of_modules=True
)
def session_prefill(implementation: Implementation, problem: Problem) -> None:
    """f(x_0 ... x_(n-1)), then x_n, x_(n+1), ... with the cache  =  f(x)

    Why: it is what generating text does.
    Example: the padding mask given at the prompt alone; the cache of the prompt left behind.
    """
    n = max(1, problem.q_len // 2)
    cuts = [0, *range(n, problem.q_len + 1)]
    _as_whole(implementation, problem, cuts, "the prompt at once, then token by token", "session-prefill")


@law(
    "ATN1053",
    "session-anew",
    "A new sequence after a reset, or with a new cache, knows nothing of the one before",
    of_modules=True,
)
def session_anew(implementation: Implementation, problem: Problem) -> None:
    """a decoded, reset, b decoded  =  b decoded by a module that never saw a

    Why: the next request is answered from the last one's text.
    Example: a reset that forgets the keys and not the position; a cache that is a default argument.
    """
    made = decoded(implementation, problem)
    cuts = [0, max(1, problem.q_len // 2), *range(max(1, problem.q_len // 2) + 1, problem.q_len + 1)]
    other = made.call.x.flip(1) * 1.5
    (alone,) = made.run(made.parts(cuts))
    shorter = cuts[:-1] if len(cuts) > 2 else cuts
    before = {**made.parts(shorter, other[:, : shorter[-1]])}
    after = made.run(before, made.parts(cuts))[1]
    because = "after another sequence and a reset" if _resets(made) else "after another sequence, with a new cache"
    _require(made, after, alone, because, "session-not-reset", "begin with no keys and at position 0")


def _resets(made: Decoded) -> bool:
    assert made.call.adapter.module is not None
    protocol = protocol_of(made.call.adapter.module)
    return protocol is not None and bool(protocol.reset)


@law(
    "ATN1054", "cache-unasked", "A call that asks for no cache neither reads one nor leaves one behind", of_modules=True
)
def cache_unasked(implementation: Implementation, problem: Problem) -> None:
    """f(a); a session; f(a) again without a cache: the two are equal, and so is a session after a call without one

    Why: evaluation between two steps of generation, and training after it, must not depend on it.
    Example: keys appended to `self.cache` whether `use_cache` is set or not.
    """
    made = decoded(implementation, problem)
    cuts = [0, max(1, problem.q_len // 2), problem.q_len]
    first, again = made.run(made.whole(), made.parts(cuts), made.whole())[::2]
    _require(
        made, again, first, "a call without a cache, after a session", "cache-unasked", "read it only when asked to"
    )
    (alone,) = made.run(made.parts(cuts))
    after = made.run(made.whole(made.call.x.flip(1)), made.parts(cuts))[1]
    _require(
        made, after, alone, "a session, after a call without a cache", "cache-unasked", "keep only what is asked for"
    )


@law(
    "ATN1055",
    "session-batch",
    "Samples decoded together give what each gives alone, padded on the left too",
    of_modules=True,
)
def session_batch(implementation: Implementation, problem: Problem) -> None:
    """session(x)[b] = session(x[b : b + 1]) [b]; with padding on the left, hidden by the mask at every step

    Why: requests are decoded in batches, and none may notice.
    Example: the rows of the first sample read for all; the padding mask heeded at the prompt alone.
    """
    made = decoded(implementation, problem)
    n = max(1, problem.q_len // 2)
    cuts = [0, *range(n, problem.q_len + 1)]
    (together,) = made.run(made.parts(cuts))
    padding = next((part for part in problem.mask if isinstance(part, KeyPadding)), None)
    for b in range(len(made.call.x)):
        alone = Decoded(implementation, made.call.sample(b), made.by)
        (expected,) = alone.run(alone.parts(cuts))
        got = together[b : b + 1]
        if padding is not None:  # what stands in padded rows is nobody's business
            real = slice(problem.q_len - padding.lengths[b], None)
            got, expected = got[:, real], expected[:, real]
        _require(made, got, expected, f"sample {b} in a batch instead of alone", "session-batch")
    if padding is not None:
        right, parts = made.run(made.whole(), made.parts(cuts))
        for b, length in enumerate(padding.lengths):
            real = slice(problem.q_len - length, None)
            because = f"sample {b}, padded on the left, with the cache instead of without"
            hint = "hide the padding at every step: the mask has a column for each key in the cache"
            _require(made, parts[b : b + 1, real], right[b : b + 1, real], because, "session-padding", hint)
