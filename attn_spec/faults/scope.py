"""Where a fault is confined to: on calls of one kind the fault, on all others the right answer.

The commonest hard bug is a right implementation with one branch that is wrong: only with shared heads, only for one
query, only with a mask and the causal flag together. Any fault of the catalogue can be confined so; what is found is
named "causal-one-ahead@across".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from attn_spec.faults.fault import FAULTS, Fault
from attn_spec.problem import Arguments


@dataclass(frozen=True)
class Scope:
    """Calls of one kind. words: as a clause that stands before a fault's title.  code: the condition in plain torch."""

    id: str
    words: str
    code: str
    holds: Callable[[Arguments], bool]


def _many_keys(size: int) -> Scope:
    return Scope(f"{size}-keys", f"with {size} keys or more", f"k.shape[2] >= {size}", lambda a: a.k.shape[2] >= size)


def _many_queries(size: int) -> Scope:
    code = f"q.shape[2] >= {size}"
    return Scope(f"{size}-queries", f"with {size} queries or more", code, lambda a: a.q.shape[2] >= size)


# the more common first
SIMPLE = (
    Scope("causal", "when the causal flag is set", "is_causal", lambda a: a.causal),
    Scope("not-causal", "without the causal flag", "not is_causal", lambda a: not a.causal),
    Scope("masked", "when a mask is given", "mask is not None", lambda a: a.mask is not None),
    Scope("unmasked", "without a mask", "mask is None", lambda a: a.mask is None),
    Scope("bool", "with a bool mask", "mask.dtype == torch.bool", lambda a: a.form == "bool"),
    Scope("additive", "with an additive mask or a bias", "mask.is_floating_point()", lambda a: a.form == "additive"),
    Scope("padding", "with a key padding", "key_padding is not None", lambda a: a.form == "key-padding"),
    Scope(
        "grouped",
        "where query heads share key/value heads",
        "q.shape[1] != k.shape[1]",
        lambda a: a.q.shape[1] != a.k.shape[1],
    ),
    Scope(
        "ungrouped",
        "where each query head has its own key/value head",
        "q.shape[1] == k.shape[1]",
        lambda a: a.q.shape[1] == a.k.shape[1],
    ),
    Scope(
        "across",
        "where queries and keys differ in number",
        "q.shape[2] != k.shape[2]",
        lambda a: a.q.shape[2] != a.k.shape[2],
    ),
    Scope(
        "square",
        "where queries and keys are equal in number",
        "q.shape[2] == k.shape[2]",
        lambda a: a.q.shape[2] == a.k.shape[2],
    ),
    Scope("one-query", "for a single query", "q.shape[2] == 1", lambda a: a.q.shape[2] == 1),
    Scope("queries", "for more than one query", "q.shape[2] > 1", lambda a: a.q.shape[2] > 1),
    Scope(
        "more-queries",
        "with more queries than keys",
        "q.shape[2] > k.shape[2]",
        lambda a: a.q.shape[2] > a.k.shape[2],
    ),
    Scope(
        "fewer-queries",
        "with fewer queries than keys",
        "q.shape[2] < k.shape[2]",
        lambda a: a.q.shape[2] < a.k.shape[2],
    ),
    Scope("scaled", "when a scale is given", "scale is not None", lambda a: a.scale is not None),
    Scope("unscaled", "without a given scale", "scale is None", lambda a: a.scale is None),
    Scope("wide-v", "where d_v differs from d_k", "v.shape[3] != q.shape[3]", lambda a: a.v.shape[3] != a.q.shape[3]),
    Scope("windowed", "when a window is given", "window is not None", lambda a: a.window is not None),
    Scope("capped", "when a softcap is given", "softcap is not None", lambda a: a.softcap is not None),
    Scope("sloped", "when slopes are given", "alibi_slopes is not None", lambda a: a.alibi is not None),
    Scope("sunk", "when there are sinks", "sinks is not None", lambda a: a.sinks is not None),
    *(_many_keys(size) for size in (16, 32, 64, 128)),
    *(_many_queries(size) for size in (16, 32, 64, 128)),
)
TWO = " and "


def _both(one: Scope, other: Scope) -> Scope:
    return Scope(
        f"{one.id}@{other.id}",
        f"{one.words}{TWO}{other.words}",
        f"{one.code}{TWO}{other.code}",
        lambda a: one.holds(a) and other.holds(a),
    )


ALL: dict[str, Scope] = {scope.id: scope for scope in SIMPLE}
ALL |= {both.id: both for both in (_both(one, other) for one, other in combinations(SIMPLE, 2))}


def confined(fault: Fault, scope: Scope) -> Fault:
    """The fault where the scope holds, the right answer elsewhere."""
    return dataclasses.replace(
        fault,
        id=f"{fault.id}@{scope.id}",
        title=f"{scope.words}, {fault.title}",
        where=scope.holds,
        condition=scope.code,
    )


def scopes_that(inside: list[Arguments], outside: list[Arguments]) -> Iterator[Scope]:
    """The scopes that hold on all of the first calls and on none of the second; two at once where no one does."""
    found = False
    for scope in ALL.values():
        if found and TWO in scope.words:
            return
        if all(scope.holds(a) for a in inside) and not any(scope.holds(a) for a in outside):
            found = True
            yield scope


def named(name: str) -> Fault:
    """The fault of an id, of an id confined by @, or of two ids joined by +; raises KeyError where there is none."""
    from attn_spec.faults.fault import both

    if "+" in name:
        first, second = name.split("+")
        return both(named(first), named(second))
    base, _, scope = name.partition("@")
    return confined(FAULTS[base], ALL[scope]) if scope else FAULTS[base]
