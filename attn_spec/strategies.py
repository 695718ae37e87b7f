"""Hypothesis strategies for problems, masks and sizes, to be used in tests of your own:

    from hypothesis import given
    from attn_spec import strategies

    @given(problem=strategies.problems())
    def test_my_kernel(problem):
        a = problem.arguments()                 # q, k, v and the mask of the problem, as tensors
        out = my_kernel(a.q, a.k, a.v, a.mask)

    my = attn_spec.adapt(my_kernel)
    @given(problem=strategies.problems(for_=my))    # what `my` refuses or can't be asked for is not drawn

Sizes favour edges: 1, 2, odd numbers and primes, each tile from 8 to 256 and its neighbours, now and then 0; values
favour trouble (a sharp softmax, logits that overflow). Every field shrinks to the default of `Problem`, so that what is
left of a failing example is what matters: few heads, short sequences, no feature.

Health checks: an example draws no tensors and filters nothing out, so `too_slow`, `filter_too_much` and
`data_too_large` do not fire on account of these strategies. A function-scoped fixture beside the problem needs
`suppress_health_check=[HealthCheck.function_scoped_fixture]`, and a slow kernel `deadline=None`. In a test that is slow
for an example, lower `cost`.

All choices are among fewer than 100 alternatives: Hypothesis mixes numbers of 100 and more that stand in the modules at
hand into what it draws, and the same seed would give other examples in another project.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from attn_spec.adapters.implementation import Implementation
from attn_spec.capabilities import Capabilities, capabilities
from attn_spec.masks import AXES, Alibi, Alignment, Bias, Causal, Delivery, Form, KeyPadding, Part, Visible, Window
from attn_spec.problem import Problem

__all__ = ["masks", "problems", "shapes"]

COST = 1_000_000  # multiplications of the forward pass
SHORT = (7, 1, 2, 3, 4, 5, 6, 8, 9, 11, 13)  # of a sequence; the default of `Problem` first, here and below
LONG = (15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 97, 127, 128, 129, 191, 255, 256, 257)
CHANNELS = (8, 1, 2, 3, 4, 5, 7, 12, 16, 20, 24, 31, 32, 33, 40, 63, 64, 65, 80, 96, 128, 192, 256)
BATCHES = (2, 1, 3, 4, 5)
KV_HEADS = (2, 1, 3, 4, 5)
GROUPS = (1, 2, 3, 4)
ZEROED = ("batch", "q_len", "kv_len")
SOFTCAPS = (2.0, 1.0, 20.0, 50.0)
WINDOWS = (None, 0, 1, 3, 8, 16, 64)  # how far it reaches on one side
SCALES = (0.5, 0.1, 1.0, 0.02, 2.0)
# "deep" is for an advisory, as honest finite fills fail on it
VALUES = ("sharp", "mild", "large", "shared-key", "tiny", "huge", "flat")
MASK_AXES = ("BHQK", "QK", "BQK", "HQK", "BK", "HK", "K", "BHK")
FLIP = st.booleans()
T = TypeVar("T")


def problems(
    *,
    for_: Implementation | Capabilities | None = None,
    cost: int = COST,
    dtypes: Sequence[str] = (),
    masked: bool = False,
    device: str = "cpu",
) -> SearchStrategy[Problem]:
    """Problems of every kind.

    for_: an implementation (or its capabilities), beyond which nothing is drawn.  cost: the largest number of
    multiplications.  dtypes: of these only.  masked: each has a mask tensor.  device: where its tensors are made.
    """
    return _problems(_can(for_), cost, tuple(dtypes), masked, device)


def shapes(*, for_: Implementation | Capabilities | None = None, cost: int = COST) -> SearchStrategy[dict[str, int]]:
    """The sizes of a problem, batch, heads, kv_heads, q_len, kv_len, head_dim and v_dim: `Problem(**shape)`."""
    return _shapes(_can(for_), cost)


def masks(
    *,
    batch: int = 2,
    q_len: int = 7,
    kv_len: int = 7,
    for_: Implementation | Capabilities | None = None,
    masked: bool = False,
) -> SearchStrategy[tuple[tuple[Part, ...], Delivery]]:
    """Masks for problems of these sizes, and how they are handed over: `Problem(mask=parts, delivery=how)`.

    masked: there is a mask tensor, beside or instead of the causal flag.
    """
    return _masks(_can(for_), batch, q_len, kv_len, masked)


def _can(for_: Implementation | Capabilities | None) -> Capabilities:
    return capabilities(for_) if isinstance(for_, Implementation) else for_ or Capabilities()


@lru_cache
def _up_to(n: int) -> SearchStrategy[int]:
    return st.integers(0, n)


def _one_of(draw: DrawFn, options: Sequence[T], among: int = 0) -> T:
    """One of the options, the first being the simplest.

    among: how many there are at most. The choice is then made among that many whatever is left of them, for Hypothesis
    takes an example of fewer choices to be the simpler one, and would shrink toward sizes that leave no choice.
    """
    return options[draw(_up_to(max(among, len(options)) - 1)) % len(options)]


def _once_in(draw: DrawFn, n: int) -> bool:
    """True once in n times."""
    return draw(_up_to(n - 1)) == n - 1


def _size(draw: DrawFn, sizes: Sequence[int], at_most: int, of: int = 1) -> int:
    """One of the sizes that are a multiple and not too large; the smallest multiple where there is none."""
    scaled = sizes if of == 1 else dict.fromkeys(of * -(-n // of) for n in sizes)
    return _one_of(draw, [n for n in scaled if n <= at_most] or [of], len(sizes))


def _length(draw: DrawFn, at_most: int, of: int) -> int:
    return _size(draw, LONG if draw(FLIP) else SHORT, at_most, of)


@st.composite
def _shapes(draw: DrawFn, can: Capabilities, cost: int) -> dict[str, int]:
    left = cost // (2 * can.head_multiple)  # each size takes its share of the cost, the later ones of what is left
    of = can.length_multiple
    q_len = kv_len = _length(draw, int(left**0.5), of)
    if can.cross and draw(FLIP):
        kv_len = _length(draw, left // q_len, of)
    left = cost // (2 * q_len * kv_len)
    head_dim = v_dim = _size(draw, CHANNELS, left, can.head_multiple)
    if can.value_width and draw(FLIP):
        v_dim = _size(draw, CHANNELS, 2 * left - head_dim, can.head_multiple)
    left = cost // ((head_dim + v_dim) * q_len * kv_len)
    kv_heads = _size(draw, KV_HEADS, left)
    group = 1
    if can.grouped and draw(FLIP):
        group = _size(draw, GROUPS, left // kv_heads)
    batch = _size(draw, BATCHES, left // (kv_heads * group))
    if can.zero and _once_in(draw, 16):
        name = _one_of(draw, ZEROED if can.cross and can.empty_rows else ("batch",), 3)
        batch, q_len, kv_len = (0 if name == z else n for z, n in zip(ZEROED, (batch, q_len, kv_len), strict=True))
    return {
        "batch": batch,
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "q_len": q_len,
        "kv_len": kv_len,
        "head_dim": head_dim,
        "v_dim": v_dim,
    }


@st.composite
def _masks(
    draw: DrawFn, can: Capabilities, batch: int, q_len: int, kv_len: int, masked: bool
) -> tuple[tuple[Part, ...], Delivery]:
    flag = can.causal == "flag" and (q_len == kv_len or (can.causal_cross and (q_len <= kv_len or can.empty_rows)))
    tensor = bool(can.forms) and (masked or draw(FLIP))
    causal = can.causal == "always" or (flag and (can.with_causal or not tensor) and draw(FLIP))
    asked: tuple[Part, ...] = (Causal(),) if causal else ()
    if not tensor:
        return asked, Delivery()
    form: Form = _one_of(draw, [*(f for f in can.forms if f != "key-padding"), *can.forms])
    hidden = _one_of(draw, ("-inf", "-inf", "min")) if form == "additive" else "-inf"
    # whether a row may be left with no visible key; one that holds finite large negatives is none
    empties = can.empty_rows and hidden == "-inf"
    if form == "key-padding":
        return (*asked, draw(_paddings(batch, kv_len, causal, empties))), Delivery(form)
    in_mask = not causal and _once_in(draw, 4)
    bias = form == "additive" and can.bias and draw(FLIP)
    kinds = [Visible, Visible, KeyPadding] if empties or not (causal or in_mask) else [KeyPadding]
    kind = _one_of(draw, [None, *kinds] if bias or in_mask else kinds, 4)
    parts: list[Part] = []
    if bias:
        parts.append(Bias(_one_of(draw, MASK_AXES)))
    if kind is Visible:
        parts.append(draw(_visibles(q_len, empties)))
    elif kind is KeyPadding:
        parts.append(draw(_paddings(batch, kv_len, causal or in_mask, empties)))
    if in_mask:
        parts.append(Causal(_one_of(draw, _alignments(q_len, kv_len, empties))))
    axes = {axis for part in parts for axis in part.axes}
    shape = _one_of(draw, _mask_shapes(axes)) if can.broadcast else "BHQK"
    strided = can.strided and _once_in(draw, 4)
    how = Delivery(form, shape, flag=not in_mask, hidden=hidden, strided=strided)
    return (*asked, *parts), how


def _alignments(q_len: int, kv_len: int, empties: bool) -> tuple[Alignment | None, ...]:
    if q_len == kv_len:
        return (None,)
    return (None, "top-left", "bottom-right") if empties or q_len < kv_len else ("top-left",)


def _mask_shapes(axes: set[str]) -> list[str]:
    """Every shape that holds a mask which depends on these axes: the smallest of four axes first."""
    whole = [""]
    for axis in AXES:
        whole = [w + letter for w in whole for letter in ((axis,) if axis in axes else ("1", axis))]
    tails = [w[n:] for n in (1, 2) for w in whole if set(w[:n]) == {"1"}]
    return [whole[0], *dict.fromkeys(["BHQK", *whole, *tails])]


@st.composite
def _visibles(draw: DrawFn, q_len: int, empties: bool) -> Visible:
    axes, density = _one_of(draw, MASK_AXES), _one_of(draw, (0.7, 0.3, 0.9))
    if not (empties and "Q" in axes and q_len and _once_in(draw, 4)):
        return Visible(axes, density)
    rows = {_one_of(draw, (0, q_len - 1, q_len // 2)), _one_of(draw, (0, q_len - 1, q_len // 3))}
    return Visible(axes, density, tuple(sorted(rows)))


@st.composite
def _paddings(draw: DrawFn, batch: int, kv_len: int, causal: bool, empties: bool) -> KeyPadding:
    least = 0 if empties else min(1, kv_len)
    options = [n for n in (kv_len, kv_len - 1, kv_len // 2, 1, 0) if n >= least]
    lengths = tuple(_one_of(draw, options) for _ in range(batch))
    return KeyPadding(lengths, left=(empties or not causal) and draw(FLIP))


@st.composite
def _variants(draw: DrawFn, can: Capabilities) -> tuple[Part, ...]:
    """A window and slopes, where they are taken; a window only where rows may be left with no visible key."""
    found: list[Part] = []
    if can.window and can.empty_rows and _once_in(draw, 3):
        found.append(Window(_one_of(draw, WINDOWS), _one_of(draw, WINDOWS)))
    if can.alibi and _once_in(draw, 3):
        found.append(Alibi(draw(FLIP)))
    return tuple(found)


@st.composite
def _problems(
    draw: DrawFn, can: Capabilities, cost: int, dtypes: tuple[str, ...], masked: bool, device: str
) -> Problem:
    sizes = draw(_shapes(can, cost))
    parts, how = draw(_masks(can, sizes["batch"], sizes["q_len"], sizes["kv_len"], masked))
    dtype = _one_of(draw, [d for d in can.dtypes if not dtypes or d in dtypes] or list(dtypes))
    wider = dtype in ("bfloat16", "float16") and how.form == "additive" and how.hidden == "-inf"
    if wider and can.mask_dtype and _once_in(draw, 4):
        how = replace(how, dtype="float32")
    more: dict[str, object] = {}
    if how.hidden == "-inf":  # what is taken from a dtype's lowest number may overflow in honest code
        parts = (*parts, *draw(_variants(can)))
    if can.softcap and _once_in(draw, 3):
        more["softcap"] = _one_of(draw, SOFTCAPS)
    if can.sinks and _once_in(draw, 3):
        more["sinks"] = True
    scale = _one_of(draw, SCALES) if can.scale and _once_in(draw, 3) else None
    if scale is not None and can.scale_edges and _once_in(draw, 8):
        scale = _one_of(draw, (0.0, -0.5))
    return Problem(
        **sizes,  # type: ignore[arg-type]
        dtype=dtype,
        mask=parts,
        delivery=how,
        scale=scale,
        values=_one_of(draw, VALUES),
        layout=_one_of(draw, ("contiguous", "transposed", "sliced")) if can.strided else "contiguous",
        device=device,
        seed=draw(_up_to(3)),
        **more,  # type: ignore[arg-type]
    )
