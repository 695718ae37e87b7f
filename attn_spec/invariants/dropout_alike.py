"""What draws have in common: heads, samples, queries, keys and tiles of one call, and the heads of two calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attn_spec.chance import Tests, Unlikely
from attn_spec.invariants.drawing import Drawn

TILES = (16, 32, 64)  # queries and keys of a block that a kernel may draw at once


def within(found: Drawn, kv_heads: int) -> list[Unlikely]:
    """What parts of one call drop in common and chance does not give."""
    dropped, tells = (found.dropped(found.first) & found.drawn_on).double(), found.drawn_on.double()
    b, h, q_len, kv_len = dropped.shape
    tests = Tests()
    heads = [(n, m) for n in range(b) for m in range(h)]
    group = h // kv_heads

    def kind(one: int, other: int) -> str:
        (n, m), (n2, m2) = heads[one], heads[other]
        if n != n2:
            return "dropout-samples-alike" if m == m2 else "dropout-heads-alike"
        return "dropout-group-alike" if group > 1 and m // group == m2 // group else "dropout-heads-alike"

    names = [f"sample {n}, head {m}" for n, m in heads]
    _pairs(tests, kind, names, dropped.flatten(2).flatten(0, 1), tells.flatten(2).flatten(0, 1))
    for axis, word, key in ((2, "query", "dropout-queries-alike"), (3, "key", "dropout-keys-alike")):
        lines, seen = (x.movedim(axis, 0).flatten(1) for x in (dropped, tells))
        _neighbours(tests, key, word, lines, seen)
        _pairs(tests, "dropout-tiles-alike", [f"{word} {n}" for n in range(len(lines))], lines, seen)
    for size in (x for x in TILES if x <= min(q_len, kv_len) and (q_len // x) * (kv_len // x) > 1):
        lines, seen = (_tiles(x, size) for x in (dropped, tells))
        columns = kv_len // size
        names = [
            f"the tiles of {size} x {size} at (0, 0) and ({n // columns}, {n % columns})" for n in range(len(lines))
        ]
        both, n, a, c = (x[0, 1:] for x in _shared(lines, lines, seen, seen))
        tests.overlaps("dropout-tiles-alike", names[1:], both, n, a, c)
    for axis, word, along in ((2, "query", "keys"), (3, "key", "queries")):
        _shifted(tests, word, along, *(x.movedim(axis, 0).flatten(1, 2) for x in (dropped, tells)))
    return tests.unlikely()


def across(found: Drawn, call: Tensor, key: str) -> tuple[list[Unlikely], bool]:
    """What each head of the first call has in common with each of another that chance does not give.

    And whether two of them are the very same.  key: the group of these tests.
    """
    drawn_on = found.drawn_on
    lines, others = ((found.dropped(x) & drawn_on).double().flatten(2).flatten(0, 1) for x in (found.first, call))
    seen, tests, h = drawn_on.double().flatten(2).flatten(0, 1), Tests(), found.tells.shape[1]
    names = [f"sample {n // h}, head {n % h}" for n in range(len(lines))]
    words = [f"{one} of one call and {other} of the other" for one in names for other in names]
    tests.overlaps(key, words, *_shared(lines, others, seen, seen))
    return tests.unlikely(), bool((lines[:, None] == others[None]).all(-1).any())


def _shared(one: Tensor, other: Tensor, seen: Tensor, seen_other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each line of one and of the other: dropped in both, seen in both, and what each drops where both are seen."""
    return one @ other.mT, seen @ seen_other.mT, one @ seen_other.mT, seen @ other.mT


def _pairs(tests: Tests, key: str | Callable[[int, int], str], names: list[str], lines: Tensor, seen: Tensor) -> None:
    """Every pair of lines [N, places], each drawn apart."""
    if len(lines) < 2:
        return
    upper = torch.triu_indices(len(lines), len(lines), 1)
    found = [x[upper[0], upper[1]] for x in _shared(lines, lines, seen, seen)]
    words = [f"{names[i]} and {names[j]}" for i, j in upper.T.tolist()]
    if isinstance(key, str):
        tests.overlaps(key, words, *found)
        return
    kinds = [key(i, j) for i, j in upper.T.tolist()]
    for one in sorted(set(kinds)):
        places = [n for n, kind in enumerate(kinds) if kind == one]
        tests.overlaps(one, [words[n] for n in places], *(x[places] for x in found))


def _neighbours(tests: Tests, key: str, word: str, lines: Tensor, seen: Tensor) -> None:
    """Lines 0 and 1, 2 and 3, ... all at once."""
    even = len(lines) // 2 * 2
    pairs = (lines[:even:2], lines[1:even:2], seen[:even:2], seen[1:even:2])
    _one(tests, key, f"each even {word} and the next", *(x.flatten() for x in pairs))


def _shifted(tests: Tests, word: str, along: str, lines: Tensor, seen: Tensor) -> None:
    """Lines [N, B * H, places] 0 and 1, 2 and 3, ... all at once, the second moved by each number of places but 0.

    A counter of line * stride + place with a small stride gives one number to a place of a line and to that `stride`
    places before it in the next.
    """
    even, size = len(lines) // 2 * 2, lines.shape[-1]
    pairs = (lines[:even:2], lines[1:even:2], seen[:even:2], seen[1:even:2])
    one, other, tells, tells_other = (x.flatten(0, 1) for x in pairs)
    place = torch.arange(size)
    shift = (place[:, None] - place[None, :]).flatten() + size - 1

    def by_shift(x: Tensor, y: Tensor) -> Tensor:
        found = torch.zeros(2 * size - 1, dtype=x.dtype).index_add_(0, shift, (x.mT @ y).flatten())
        return torch.cat((found[: size - 1], found[size:]))

    shifts = [*range(1 - size, 0), *range(1, size)]
    names = [f"each even {word} and the next, moved by {s} {along}" for s in shifts]
    shared = ((one, other), (tells, tells_other), (one, tells_other), (tells, other))
    tests.overlaps("dropout-shifted-alike", names, *(by_shift(x, y) for x, y in shared))


def _one(tests: Tests, key: str, name: str, one: Tensor, other: Tensor, seen: Tensor, seen_other: Tensor) -> None:
    found = _shared(one[None], other[None], seen[None], seen_other[None])
    tests.overlaps(key, [name], *found)


def _tiles(x: Tensor, size: int) -> Tensor:
    """The whole tiles of [B, H, Sq, Sk], row by row, as lines [N, B * H * size * size]."""
    b, h, q_len, kv_len = x.shape
    rows, columns = q_len // size, kv_len // size
    cut = x[:, :, : rows * size, : columns * size].reshape(b, h, rows, size, columns, size)
    return cut.permute(2, 4, 0, 1, 3, 5).reshape(rows * columns, -1)
