"""The smallest problem that still shows a failure: each field toward the default of `Problem`, each feature dropped."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from attn_spec import values
from attn_spec.adapters.implementation import Implementation
from attn_spec.engine import Subject, as_asked
from attn_spec.faults.planted import planted
from attn_spec.law import Law, Unsupported, Violation
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Part, Visible
from attn_spec.problem import DTYPES, SIZES, Problem

Changes = dict[str, Any]
SLOW_S = 0.25  # a law that takes longer on the problem is not tried again and again
LENGTHS = (7, 1, 2, 3, 4, 5, 6, 8, 9, 11, 13, 15, 16, 17, 24, 31, 32, 33, 47, 63, 64, 65, 97, 127, 128, 129, 192, 255)
CHANNELS = (8, 1, 2, 4, 16, 20, 32, 40, 64, 65, 80, 96, 128)


class Clock:
    """CPU seconds spent so far, or a fifth of the others: a busy machine changes nothing, a slow call does."""

    def __init__(self) -> None:
        self._start = time.process_time(), time.perf_counter()

    @property
    def spent(self) -> float:
        return max(time.process_time() - self._start[0], (time.perf_counter() - self._start[1]) / 5)


def smaller(subject: Subject, law: Law, problem: Problem, *, budget_s: float = 1.0, tries: int = 400) -> Problem:
    """A problem as small and plain as can be found that fails the same law in the same way; else the problem itself.

    The same way: with the same `merge` key. A problem on which the law would accuse a right implementation too is none,
    for there the law does not apply. Known failures are none either. After `budget_s` seconds (see `Clock`), or as many
    tries, the smallest found so far is given.
    """
    clock = Clock()
    outcome, violation = subject.attempt(law, problem)
    if violation is None or outcome == "error" or clock.spent > SLOW_S:
        return problem
    wanted = _kind(law, violation)
    right = planted(None, subject.implementation.conventions.meaning)
    seen = {problem}

    def fails_too(candidate: Problem) -> bool:
        seen.add(candidate)
        outcome, found = subject.attempt(law, candidate)
        same = found is not None and outcome == "failed" and _kind(law, found) == wanted
        return same and _applies(law, right, candidate, violation)

    again = True
    while again:
        again = False
        for step in STEPS:
            simpler: Problem | None = problem
            while simpler is not None:
                simpler = None
                for candidate in _fitted(problem, step(problem)):
                    if candidate in seen or rank(candidate) >= rank(problem):
                        continue
                    if len(seen) > tries or clock.spent > budget_s:
                        return problem
                    if fails_too(candidate):
                        problem, simpler, again = candidate, candidate, True
                        break
    return problem


def rank(p: Problem) -> tuple[int, int, int, int]:
    """How far from plain: fields that are not the default, details of the mask, trouble in the values, cost."""
    plain, how = Problem(device=p.device), dataclasses.fields(Delivery)
    fields = sum(getattr(p, field.name) != getattr(plain, field.name) for field in dataclasses.fields(Problem))
    details = sum(getattr(p.delivery, field.name) != field.default for field in how)
    for part in p.mask:
        details += 1 + sum(getattr(part, field.name) != field.default for field in dataclasses.fields(part))
        details += len(set(part.empty_rows)) if isinstance(part, Visible) else 0
        details += sum(n != p.kv_len for n in part.lengths) if isinstance(part, KeyPadding) else 0
    return fields, details, values.VALUES.index(p.values) + list(DTYPES).index(p.dtype), p.cost


def _kind(law: Law, violation: Violation) -> str:
    return violation.merge or law.code


def _applies(law: Law, right: Implementation, problem: Problem, violation: Violation) -> bool:
    """Whether a right implementation holds the law there."""
    try:
        law(right, as_asked(right, problem))
    except Unsupported:
        return violation.merge in ("raises", "required")
    except Exception:  # whatever it is, the law is not meant for this problem
        return False
    return True


def _fitted(p: Problem, steps: Iterator[Changes]) -> Iterator[Problem]:
    """The problem with each of the changes, where that is a problem."""
    for changes in steps:
        with suppress(ValueError):  # the sizes do not fit together, or the mask can't be delivered so
            yield _fitting(p, changes)


def _at_once(p: Problem) -> Iterator[Changes]:
    """Everything the default; then all sizes, then some of them: what is tried later then costs less."""
    plain = Problem(device=p.device)
    yield {f.name: getattr(plain, f.name) for f in dataclasses.fields(Problem)}
    for names in (SIZES, ("q_len", "kv_len"), ("head_dim", "v_dim"), ("batch", "heads", "kv_heads")):
        yield {name: getattr(plain, name) for name in names}


def _features(p: Problem) -> Iterator[Changes]:
    """One feature less."""
    plain = Problem(device=p.device)
    yield {"mask": (), "delivery": Delivery()}
    if p.causal and p.masked:
        yield {"mask": (Causal(),), "delivery": Delivery()}
    for part in p.mask:
        yield {"mask": tuple(other for other in p.mask if other is not part)}
    for name in ("dtype", "layout", "scale", "softcap", "sinks", "values", "seed"):
        yield {name: getattr(plain, name)}
    yield {"values": "mild"}
    yield {"delivery": Delivery()}
    for field in dataclasses.fields(Delivery):
        usual: dict[str, Any] = {field.name: field.default}
        yield {"delivery": dataclasses.replace(p.delivery, **usual)}
    for place, part in enumerate(p.mask):
        for simpler in _simpler(part, p):
            yield {"mask": (*p.mask[:place], simpler, *p.mask[place + 1 :])}


def _heads(p: Problem) -> Iterator[Changes]:
    """Fewer heads and samples."""
    yield {"kv_heads": p.heads}
    for n in _below(p.heads, (2, 1, 3, 4)):
        yield {"heads": n, "kv_heads": n if p.heads == p.kv_heads else 1}
        yield {"heads": n}
    for n in _below(p.kv_heads, (2, 1)):
        yield {"kv_heads": n, "heads": n * (p.heads // p.kv_heads)}
    for n in _below(p.batch, (2, 1, 3)):
        yield {"batch": n}


def _lengths_and_channels(p: Problem) -> Iterator[Changes]:
    """Shorter sequences, fewer channels."""
    for names, sizes in ((("q_len", "kv_len"), LENGTHS), (("head_dim", "v_dim"), CHANNELS)):
        one, other = (getattr(p, name) for name in names)
        yield from (dict.fromkeys(names, n) for n in _below(max(one, other), sizes))
        for name in names:
            yield from ({name: n} for n in _below(getattr(p, name), sizes))
        yield dict.fromkeys(names, max(one, other))


STEPS = (_at_once, _features, _heads, _lengths_and_channels)


def _below(n: int, sizes: tuple[int, ...]) -> list[int]:
    """The sizes that come before n, the default (first of them) being the simplest; none for the default itself."""
    if n == sizes[0] or not n:
        return []
    return [sizes[0], *(size for size in sizes[1:] if size < n)]


def _simpler(part: Part, p: Problem) -> Iterator[Part]:
    if isinstance(part, Visible):
        yield Visible()
        yield dataclasses.replace(part, axes="BHQK")
        yield dataclasses.replace(part, empty_rows=())
        yield dataclasses.replace(part, empty_rows=part.empty_rows[:1])
        yield dataclasses.replace(part, density=0.7)
    elif isinstance(part, Bias):
        yield Bias()
    elif isinstance(part, Causal):
        yield Causal()
    elif isinstance(part, KeyPadding):
        yield dataclasses.replace(part, left=False)
        for n in range(len(part.lengths)):
            yield dataclasses.replace(part, lengths=(*part.lengths[:n], p.kv_len, *part.lengths[n + 1 :]))


def _fitting(p: Problem, changes: Changes) -> Problem:
    """The problem with the changes, its mask cut to the new sizes. Raises ValueError where that is no problem."""
    sizes = {name: changes.get(name, getattr(p, name)) for name in ("batch", "q_len", "kv_len")}
    batch, q_len, kv_len = (int(n) for n in sizes.values())
    parts: list[Part] = []
    mask: tuple[Part, ...] = changes.get("mask", p.mask)
    for part in mask:
        if isinstance(part, KeyPadding):
            lengths = tuple(kv_len if n >= p.kv_len else min(n, kv_len) for n in part.lengths)
            lengths = (*lengths, *([kv_len] * (batch - len(lengths))))[:batch]
            part = dataclasses.replace(part, lengths=lengths)
        elif isinstance(part, Visible) and part.empty_rows:
            rows = {min(n, q_len - 1) for n in part.empty_rows if q_len}
            part = dataclasses.replace(part, empty_rows=tuple(sorted(rows)))
        parts.append(part)
    return p.replace(**{**changes, "mask": tuple(parts)})
