"""Functions with a cache in their signature (as flash_attn_with_kvcache) as functions of q, k and v.

The cache is made of the problem's keys and values: longer than what is filled, with junk behind, of each sample its own
length where the problem has lengths, in rows or shuffled pages where the function takes an index or a table of them.
The keys of the queries themselves are given as new ones where the function appends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attn_spec.conventions import ROLES
from attn_spec.law import Unsupported

CACHE = ("k_cache", "v_cache", "cache_lengths", "block_table", "cache_rows")
NEW = {"k": (*ROLES["k"], "k_new", "new_k"), "v": (*ROLES["v"], "v_new", "new_v")}
PAGES = (4, 16, 64, 128, 256)  # sizes of a page, of which the first that runs is taken
BEHIND = 5  # slots behind what is filled
JUNK = 30.0, 1e3  # what stands in keys and values that nobody may see


@dataclass(eq=False)
class Laid:
    """A cache, [R, N, Hkv, D] in the function's layout, and what says where each sample's keys are.

    k, v: the new keys and values, None where the cache holds all.  filled: keys of each sample in the cache [B].
    rows: of each sample [B].  table: the pages of each sample [B, pages], int32.
    """

    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    filled: Tensor
    rows: Tensor | None = None
    table: Tensor | None = None


@dataclass(eq=False)
class Cached:
    """A function with a cache, the parameter of each role, its layout (BSHD or BHSD) and the size of its pages.

    rows: whether it takes a cache of rows, and not of pages alone.  single: whether it takes one query of each sample,
    without an axis for them.
    """

    function: Callable[..., Any]
    names: dict[str, str]
    layout: str = "BSHD"
    page: int = 16
    rows: bool = True
    single: bool = False

    @property
    def appends(self) -> bool:
        return "k" in self.names and "v" in self.names and "cache_lengths" in self.names

    @property
    def pages(self) -> bool:
        return "block_table" in self.names

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The caches that it takes: of rows (False), of pages (True), or both."""
        return (False,) * self.rows + (True,) * self.pages

    def dense(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, packed_lengths: Any = None, **others: Any) -> Any:
        """f(q, k, v) in the function's layout. packed_lengths: queries and keys of each sample, all queries or none."""
        q_len, kv_len = (x.shape[self._axis] for x in (q, k))
        n_q, n_k = packed_lengths or ([q_len] * len(q), [kv_len] * len(k))
        if any(n != q_len for n in n_q):
            raise Unsupported("each sample has as many queries as the others")
        new = q_len if self.appends and q_len and min(n_k, default=0) >= q_len else 0
        return self.call(q, self.laid(k, v, n_k, new=new), *args, **others)

    def call(self, q: Tensor, laid: Laid, *args: Any, **others: Any) -> Any:
        """Call the function on a cache. Raises Unsupported where it does not take so many queries."""
        if self.single:
            if q.shape[self._axis] != 1:
                raise Unsupported("takes one query of each sample, without an axis for them")
            q = q.squeeze(self._axis)
        given: dict[str, Any] = {"k_cache": laid.k_cache, "v_cache": laid.v_cache, "block_table": laid.table}
        given |= {"cache_lengths": laid.filled, "cache_rows": laid.rows, "k": laid.k, "v": laid.v}
        named = {self.names[role]: value for role, value in given.items() if role in self.names and value is not None}
        returned = self.function(**{self.names["q"]: q}, **named, **others)
        return self._with_queries(returned) if self.single else returned

    def _with_queries(self, returned: Any) -> Any:
        """What was returned, the output with its axis for the queries."""
        if isinstance(returned, Tensor):
            return returned.unsqueeze(self._axis)
        if isinstance(returned, (tuple, list)) and returned and isinstance(returned[0], Tensor):
            return type(returned)([returned[0].unsqueeze(self._axis), *returned[1:]])
        return returned

    @property
    def _axis(self) -> int:
        return 1 if self.layout == "BSHD" else 2

    def laid(
        self,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int],
        *,
        new: int = 0,
        paged: bool | None = None,
        behind: int = BEHIND,
    ) -> Laid:
        """A cache that holds the first `lengths[b]` keys of each sample but the last `new`, which are given apart.

        paged: whether it is one of pages; None: if it can be.  behind: how many slots are free when all is written.
        Raises Unsupported where the function can't be told.
        """
        k, v = (x if self.layout == "BSHD" else x.transpose(1, 2) for x in (k, v))
        b, longest = len(k), max(lengths, default=0)
        if "cache_lengths" not in self.names:
            if any(n != longest for n in lengths) or new:
                raise Unsupported("no parameter says how much of the cache is filled")
            behind = 0
        held = [n - new for n in lengths]
        paged = self.pages if paged is None else paged
        rows = table = None
        if paged:
            each = -(-(longest + behind) // self.page) or 1
            g = torch.Generator().manual_seed(b * 31 + longest)
            table = torch.randperm(b * each + 2, generator=g)[: b * each].view(b, each)
            caches = [self._junk(x, b * each + 2, self.page, of) for x, of in zip((k, v), JUNK, strict=True)]
        else:
            rows = torch.arange(b).flip(0) + 1 if "cache_rows" in self.names else None
            size = b if rows is None else b + 2
            caches = [self._junk(x, size, longest + behind, of) for x, of in zip((k, v), JUNK, strict=True)]
        for n, length in enumerate(held):
            at = torch.arange(length)
            row = (
                torch.full_like(at, n if rows is None else int(rows[n])) if table is None else table[n, at // self.page]
            )
            place = at if table is None else at % self.page
            for cache, x in zip(caches, (k, v), strict=True):
                cache[row.to(x.device), place.to(x.device)] = x[n, :length]
        apart: list[Tensor | None] = [None, None]
        if new:
            apart = [torch.stack([x[n, length : length + new] for n, length in enumerate(held)]) for x in (k, v)]
        k_cache, v_cache, k_new, v_new = (None if x is None else self._own(x) for x in (*caches, *apart))
        assert k_cache is not None
        assert v_cache is not None
        filled = torch.tensor(held, dtype=torch.int32, device=k.device)
        rows, table = (None if x is None else x.int().to(k.device) for x in (rows, table))
        return Laid(k_cache, v_cache, k_new, v_new, filled, rows, table)

    def _junk(self, x: Tensor, rows: int, slots: int, size: float) -> Tensor:
        signs = 1 - 2 * (torch.arange(rows * slots, device=x.device) % 2)
        return (signs.view(rows, slots, 1, 1) * size).to(x.dtype).repeat(1, 1, *x.shape[2:])

    def _own(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.layout == "BSHD" else x.transpose(1, 2).contiguous()


def is_cached(function: Callable[..., Any]) -> bool:
    """Whether a function takes a cache of keys and one of values."""
    try:
        names = set(inspect.signature(getattr(function, "signature_of", function)).parameters)
    except (TypeError, ValueError):
        return False
    return all(names & set(ROLES[role]) for role in ("q", "k_cache", "v_cache"))


def uncached(function: Callable[..., Any], layout: str = "BSHD") -> Callable[..., Any]:
    """A function with a cache as a function of q, k and v, with the signature of the original but for the cache.

    layout: of q and of the cache, BSHD as flash-attn's or BHSD. What it was made of is its attribute `of_cache`.
    """
    parameters = inspect.signature(getattr(function, "signature_of", function)).parameters
    roles: dict[str, tuple[str, ...]] = {role: ROLES[role] for role in ("q", *CACHE)} | NEW
    names = {
        role: next(n for n in parameters if n in known) for role, known in roles.items() if set(known) & set(parameters)
    }
    table = parameters.get(names.get("block_table", ""))
    cached = Cached(function, names, layout, rows=table is None or table.default is not table.empty)
    cached.page = _page(cached)
    if not cached.page and not cached.appends:
        cached.page = _page(replace(cached, single=True))
        cached.single = cached.page > 0
    cached.page = cached.page or 16

    def attention(q: Any, k: Any, v: Any, *args: Any, packed_lengths: Any = None, **others: Any) -> Any:
        return cached.dense(q, k, v, *args, packed_lengths=packed_lengths, **others)

    keyword, either = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    made = [inspect.Parameter(name, either) for name in ("q", "k", "v")]
    made += [
        p.replace(kind=keyword)
        for p in parameters.values()
        if p.name not in names.values() and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if "cache_lengths" in names:
        made.append(inspect.Parameter("packed_lengths", keyword, default=None))
    attention.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    attention.__name__ = getattr(function, "__name__", type(function).__name__)
    attention.of_cache = cached  # type: ignore[attr-defined]
    for name in ("disturbed", "close"):
        if hasattr(function, name):
            setattr(attention, name, getattr(function, name))
    return attention


def source_of_uncached(layout: str) -> str:
    """The lines that make `impl` a function of q, k and v, for a reproducer."""
    return f"from attn_spec.adapters.cached import uncached\nimpl = uncached(impl, {layout!r})"


def _page(cached: Cached) -> int:
    """The smallest size of pages on which the function runs, 16 where it has none; 0 where it does not run."""
    g = torch.Generator().manual_seed(0)
    for size in PAGES if cached.pages else (16,):
        tried = replace(cached, page=size)
        q, k, v = (torch.randn(2, 3, 3, 16, generator=g) for _ in range(3))
        q = q.narrow(cached._axis, 0, 1).contiguous() if cached.single else q
        try:
            tried.dense(q, k, v)
        except Exception:  # whatever it says, another size is tried
            continue
        return size
    return 0
