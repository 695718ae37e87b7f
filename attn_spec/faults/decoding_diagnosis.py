"""Which fault of decoding an implementation has: the one whose blocks give what it gave, in every call that is tried.

A trial is a call, or a few, of the implementation, and the same of the blocks. A fault is named when it gives what the
implementation gave in all of them, in those that are right and in those that are wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attn_spec import tolerance
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.sessions import protocol_of
from attn_spec.decoding_blocks import RIGHT, Asked, Cache, Decoding, empty, rotate_halves, rotate_pairs, step
from attn_spec.engine import CheckResult
from attn_spec.faults.behaviour import BEHAVIOUR_FAULTS, DIAGNOSES
from attn_spec.faults.diagnosis import Diagnosis
from attn_spec.invariants import decoding as laws
from attn_spec.invariants.comparison import arguments_for
from attn_spec.invariants.decoding_caches import Calls
from attn_spec.invariants.decoding_modules import CAPACITY, Decoded, decoded
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import roundoff
from attn_spec.whole import projected

MOST = 40  # trials
SEQUENCES = 4  # problems on which a module's sequences are looked at
BUDGET_S = 4.0  # after which no further trial is begun
ROOM = 512  # roundoffs of the largest number by which the two may differ

Run = Callable[[Decoding], "list[Tensor]"]


@dataclass(frozen=True, eq=False)
class Trial:
    """What the implementation gave, and what blocks give in its place."""

    got: list[Tensor]
    run: Run

    def given_by(self, blocks: Decoding) -> bool:
        try:
            expected = self.run(blocks)
        except (RuntimeError, IndexError, ValueError):
            return False
        return all(_same(x, y) for x, y in zip(self.got, expected, strict=True))


def _same(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    dtype = str(got.dtype).removeprefix("torch.")
    size = expected.double().abs().nan_to_num(posinf=0.0, neginf=0.0)
    room = ROOM * roundoff(dtype) * (size.amax() if size.numel() else size.sum()).clamp(min=1e-3)
    return tolerance.worst(got, expected.double(), room.expand(got.shape)).holds


@torch.no_grad()
def diagnose_decoding(implementation: Implementation, results: Sequence[CheckResult]) -> list[Diagnosis]:
    """The faults of decoding that explain what failed."""
    faults = [one for one in BEHAVIOUR_FAULTS.values() if one.theme == "decoding" and not one.equivalent]
    asked: dict[tuple[str, Problem], None] = {}
    for outcome in ("failed", "passed"):
        for r in results:
            if r.outcome == outcome and r.code.startswith("ATN10"):
                asked[r.code, r.problem.replace(dtype="float32")] = None
    start, best = time.monotonic(), list[Diagnosis]()
    for readings in _readings(implementation, list(asked), start + BUDGET_S):
        wrong = [trial for trial in readings if not trial.given_by(RIGHT)]
        if not wrong:
            continue
        named = [one for one in faults if all(trial.given_by(Decoding(**one.blocks)) for trial in [*wrong, *readings])]
        best = best or [Diagnosis(one, len(readings), len(readings)) for one in named]
    return best


def _readings(
    implementation: Implementation, asked: list[tuple[str, Problem]], deadline: float
) -> Iterator[list[Trial]]:
    """The trials; of a module once for each length that its cache may have."""
    if implementation.is_module:
        for of_length in ("as long as asked", "as the module is built for"):
            yield list(_bounded(_of_module(implementation, asked, of_length), deadline))
    else:
        yield list(_bounded(_of_function(implementation, asked), deadline))


def _bounded(trials: Iterator[Trial], deadline: float) -> Iterator[Trial]:
    for place, trial in enumerate(trials):
        if place >= MOST or (place and time.monotonic() > deadline):
            return
        yield trial


# functions -----------------------------------------------------------------------------------------------------------


def _of_function(implementation: Implementation, asked: list[tuple[str, Problem]]) -> Iterator[Trial]:
    for code, problem in asked:
        if problem.sinks:
            continue
        try:
            if code in ("ATN1010", "ATN1011", "ATN1012"):
                yield from _with_caches(Calls(implementation, problem))
                continue
            for call in _calls(implementation, code, problem):
                yield _called(implementation, call)
        except (Unsupported, Refused, Violation):
            continue


def _calls(implementation: Implementation, code: str, problem: Problem) -> Iterator[Arguments]:
    """The calls that a law makes on a problem."""
    whole = arguments_for(implementation, problem)
    if code == "ATN1001":
        yield from (laws.rows_of(implementation, whole, t, t + 1) for t in range(0, problem.q_len, 2))
    elif code == "ATN1002":
        for cuts in laws.chunks(problem.q_len):
            yield from (laws.rows_of(implementation, whole, *pair) for pair in zip(cuts, cuts[1:], strict=False))
    elif code == "ATN1004":
        yield laws.with_junk(implementation, problem)[0]
    elif code == "ATN1005":
        yield from laws.uneven_parts(whole)
    else:
        yield whole


def _asked(arguments: Arguments) -> Asked:
    mask, bias, a = None, None, arguments
    if a.mask is not None and a.form == "key-padding":
        mask = a.mask[:, None, None]
    elif a.mask is not None:
        mask, bias = (a.mask, None) if a.form == "bool" else (None, a.mask)
    return Asked(a.causal, a.scale, a.window, a.alibi, a.softcap, mask, bias)


def _called(implementation: Implementation, call: Arguments) -> Trial:
    """One call of a function; of one with a cache, on the very cache that it gets."""
    if (
        call.causal
        and implementation.conventions.meaning.alignment != "bottom-right"
        and call.sizes[2] != call.sizes[3]
    ):
        raise Unsupported("aligned to the top left")
    got = [implementation(call).output.detach()]
    cached = getattr(getattr(implementation.adapter, "function", None), "of_cache", None)
    if cached is None:
        b, _, q_len, kv_len = call.sizes

        def run(blocks: Decoding) -> list[Tensor]:
            k, v = (x.transpose(1, 2) for x in (call.k, call.v))
            cache = Cache(k, v, torch.full((b,), kv_len), begun=q_len < kv_len)
            return [step(cache, call.q, None, None, _asked(call), blocks)[0]]

        return Trial(got, run)
    lengths = [call.k.shape[2]] * len(call.k) if call.lengths is None else list(call.lengths[1])
    new = call.q.shape[2] if cached.appends and min(lengths) >= call.q.shape[2] else 0
    return Trial(got, lambda blocks: _stepped(cached, call, lengths, blocks, new=new)[:1])


def _with_caches(calls: Calls) -> Iterator[Trial]:
    """Calls on caches of rows and of pages, with new keys and without: what they give, and what they leave."""
    lengths = list(calls.lengths[1])
    for paged in calls.cached.kinds:
        for new in (0, calls.arguments.q.shape[2]) if calls.cached.appends else (0,):
            laid = calls.laid(new=new, paged=paged)
            out = calls.on(laid)

            def run(blocks: Decoding, new: int = new, paged: bool = paged) -> list[Tensor]:
                return _stepped(calls.cached, calls.arguments, lengths, blocks, new=new, paged=paged)

            yield Trial([out, laid.k_cache, laid.v_cache], run)


def _stepped(cached: Any, call: Arguments, lengths: list[int], blocks: Decoding, **how: Any) -> list[Tensor]:
    """The blocks on the cache of a call: the output, and the cache afterwards in the function's layout."""
    turned = cached.layout == "BSHD"
    laid = cached.laid(*(x.transpose(1, 2) if turned else x for x in (call.k, call.v)), lengths, **how)
    k_cache, v_cache = (x if turned else x.transpose(1, 2).contiguous() for x in (laid.k_cache, laid.v_cache))
    k, v = (None if x is None else x.transpose(1, 2) if turned else x for x in (laid.k, laid.v))
    rows, table = (None if x is None else x.long() for x in (laid.rows, laid.table))
    cache = Cache(k_cache, v_cache, laid.filled.long(), rows, table)
    out = step(cache, call.q, k, v, _asked(call), blocks)[0]
    return [out, *(x if turned else x.transpose(1, 2) for x in (k_cache, v_cache))]


# modules -------------------------------------------------------------------------------------------------------------


def _of_module(implementation: Implementation, asked: list[tuple[str, Problem]], of_length: str) -> Iterator[Trial]:
    problems = list(dict.fromkeys(problem for code, problem in asked if code >= "ATN1050"))
    for problem in problems[:SEQUENCES]:
        try:
            found = Simulated.of(decoded(implementation, problem), of_length)
            if found is not None:
                yield from found.trials(problem.q_len)
        except (Unsupported, Refused, Violation):
            continue


@dataclass(frozen=True, eq=False)
class Simulated:
    """A module's sequences by blocks, with the module's own weights.

    like: how it attends without a cache, as found by trying.  slots: how long its cache is.
    """

    made: Decoded
    weights: dict[str, Tensor]
    like: Asked
    slots: int

    @classmethod
    def of(cls, made: Decoded, of_length: str) -> Simulated | None:
        """None where no weights say what the module does without a cache."""
        weights, length = made.call.weights(), made.call.x.shape[1]
        slots = (
            length + CAPACITY if of_length == "as long as asked" else max(made.call.sizes.context, length + CAPACITY)
        )
        if not weights:
            return None
        (whole,) = made.run(made.whole())
        for rotate in (None, rotate_halves, rotate_pairs):
            for left in (None, *range(length - 1)):
                like = Asked(window=None if left is None else (left, None), rotate=rotate)
                tried = cls(made, weights, like, slots)
                seen = ~tried.hidden(whole)
                if _same(whole[seen], tried.sequence([0, length], RIGHT)[seen]):
                    return tried
        return None

    def hidden(self, out: Tensor) -> Tensor:
        """The tokens [B, S] that are padding: nobody looks at what they give."""
        mask = self._mask()
        return torch.zeros(out.shape[:2], dtype=torch.bool) if mask is None else ~mask.diagonal(dim1=-2, dim2=-1)[:, 0]

    def _mask(self) -> Tensor | None:
        """The mask of the whole sequence, True = seen [B, 1, S, S]."""
        like = self.made.call.like
        if like.mask is None or like.form == "key-padding":
            return None if like.mask is None else like.mask[:, None, None].expand(-1, 1, like.q.shape[2], -1)
        mask = like.mask if like.form == "bool" else like.mask > -1
        s = self.made.call.x.shape[1]
        if mask.shape[1] > 1:
            raise Unsupported("a mask for each head")
        return mask.expand(len(self.made.call.x), 1, s, s)

    def sequence(self, cuts: Sequence[int], blocks: Decoding, before: Tensor | None = None) -> Tensor:
        """The output [B, S, width] of the sequence in parts; before: hidden states of one before it, and a reset."""
        x = self.made.call.x.double()
        cache: Cache | None = None
        if before is not None and self._one_cache:
            cache = self._decode(None, before.double(), [0, before.shape[1]], blocks)[1]
            blocks.forget(cache)
        return self._decode(cache, x, cuts, blocks)[0].to(self.made.call.x.dtype)

    @property
    def _one_cache(self) -> bool:
        """Whether one cache is emptied for the next sequence."""
        assert self.made.call.adapter.module is not None
        protocol = protocol_of(self.made.call.adapter.module)
        return protocol is not None and protocol.kind in ("inside", "positions")

    def _decode(self, cache: Cache | None, x: Tensor, cuts: Sequence[int], blocks: Decoding) -> tuple[Tensor, Cache]:
        q, k, v = (projected(x, self.weights[n], self.weights.get(f"{n}_bias"), self._heads(n)) for n in "qkv")
        cache = empty(self.slots, k, v) if cache is None else cache
        whole, outputs = self._mask(), []
        for a, b in zip(cuts, cuts[1:], strict=False):
            mask = None if whole is None else torch.nn.functional.pad(whole[:, :, a:b, :b], (0, cache.slots - b))
            part = Asked(window=self.like.window, rotate=self.like.rotate, mask=mask)
            outputs.append(step(cache, q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], part, blocks)[0])
        merged = torch.cat(outputs, dim=2).transpose(1, 2).flatten(2)
        if "o" in self.weights:
            merged = merged @ self.weights["o"]
            merged = merged if "o_bias" not in self.weights else merged + self.weights["o_bias"]
        return merged, cache

    def _heads(self, name: str) -> int:
        like = self.made.call.like
        return like.q.shape[1] if name == "q" else like.k.shape[1]

    def trials(self, length: int) -> Iterator[Trial]:
        """Token by token, in chunks, after a prompt, and after another sequence."""
        n = max(1, length // 2)
        prompt = [0, *range(n, length + 1)]
        cases: list[tuple[list[int], Tensor | None]] = [([*range(length + 1)], None), (prompt, None)]
        cases += [(next(iter(laws.chunks(length))), None), (prompt, self.made.call.x.flip(1) * 1.5)]
        for cuts, before in cases:
            first = [] if before is None else [self.made.parts([0, length], before)]
            out = self.made.run(*first, self.made.parts(cuts))[-1]
            seen = ~self.hidden(out)

            def run(
                blocks: Decoding, cuts: list[int] = cuts, before: Tensor | None = before, seen: Tensor = seen
            ) -> list[Tensor]:
                return [self.sequence(cuts, blocks, before)[seen]]

            yield Trial([out[seen]], run)


DIAGNOSES["decoding"] = diagnose_decoding
