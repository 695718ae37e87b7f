"""What is measured about an implementation, by small probe calls: how it behaves, never what it should do.

Each probe answers None where the implementation would not run it or the answer is no clear one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_spec import masks, oracle
from attn_spec.adapters.function import flat
from attn_spec.adapters.implementation import Implementation, described
from attn_spec.adapters.signature import Signature, TargetError
from attn_spec.conventions import Finding
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import Precision, candidates

# batch, heads and sequence lengths of the raw probes: small first, then sizes that a tiled kernel takes
RAW_SHAPES = ((3, 4, 5, 8), (2, 4, 128, 64), (3, 5, 8), (2, 128, 64), (5, 8))


class NoTensor(Exception):  # noqa: N818
    """A probe ran and returned no tensor."""


def raw_call(
    function: Callable[..., Any], signature: Signature, values: dict[str, Any], extra: dict[str, Any]
) -> Tensor:
    """One call with q, k and v as they are, in no particular layout. Raises NoTensor."""
    named = {signature.roles[role]: x for role, x in values.items()}
    args, kwargs = signature.call({**extra, **named})
    returned = function(*args, **kwargs)
    tensors = flat(returned)
    if not tensors:
        raise NoTensor(type(returned).__name__)
    return tensors[0]


def layout_by_influence(
    function: Callable[..., Any], signature: Signature, extra: dict[str, Any]
) -> tuple[str | None, str | None, str]:
    """The layout of the inputs and that of the output, and the evidence.

    One slot of v is changed along each axis. Along the sequence axis other slots of the output change too; along the
    sample and the head axis only the same slot does. The scale does not matter for it. Raises NoTensor.
    """
    errors: list[str] = []
    for shape in RAW_SHAPES:
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(shape, generator=g) for _ in range(3))
        try:
            base = raw_call(function, signature, {"q": q, "k": k, "v": v}, extra)
            mixed = [t for t in range(len(shape) - 1) if _mixes(function, signature, extra, (q, k, v), base, t)]
        except (NoTensor, TargetError):
            raise
        except Exception as error:  # the user's own, whatever it is: the next shape may suit it
            errors.append(described(error))
            continue
        layouts = {4: {2: "BHSD", 1: "BSHD", 0: "SBHD"}, 3: {1: "NSD"}, 2: {0: "SD"}}
        if len(mixed) != 1:
            reached = _axis_that_reaches_all(function, signature, extra, (q, k, v), base)
            if reached in layouts[len(shape)]:
                evidence = (
                    f"a change in v at one place of axis {reached} reaches all of the output, of another axis a part"
                )
                return layouts[len(shape)][reached], None, evidence
            axes = "no axis" if not mixed else f"axes {mixed}"
            return None, None, f"changing v mixes {axes} of {list(shape)}, so the layout can't be read off"
        layout = layouts[len(shape)].get(mixed[0])
        evidence = f"a change in v spreads along axis {mixed[0]} of {len(shape)} only"
        return layout, _layout_out(layout, shape, tuple(base.shape)), evidence
    return None, None, f"no probe ran: {errors[0] if errors else 'nothing tried'}"


def _mixes(
    function: Callable[..., Any],
    signature: Signature,
    extra: dict[str, Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    base: Tensor,
    axis: int,
) -> bool:
    q, k, v = qkv
    n = v.shape[axis]
    for slot in (0, n - 1):
        changed = v.clone()
        changed.select(axis, slot).add_(
            torch.randn(v.select(axis, slot).shape, generator=torch.Generator().manual_seed(1))
        )
        out = raw_call(function, signature, {"q": q, "k": k, "v": changed}, extra)
        moved = (out - base).abs() > 1e-4 * base.abs().mean()
        if out.shape != v.shape:  # look for the axis of this size in the output
            places = [t for t, size in enumerate(out.shape) if size == n]
            if len(places) != 1:
                continue
            moved = moved.movedim(places[0], 0)
        else:
            moved = moved.movedim(axis, 0)
        others = torch.cat([moved[:slot], moved[slot + 1 :]])
        if bool(others.any()):
            return True
    return False


def _axis_that_reaches_all(
    function: Callable[..., Any],
    signature: Signature,
    extra: dict[str, Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    base: Tensor,
) -> int:
    """The one axis of v of which a single place reaches the whole output, -1 where there is none.

    It is the sequence axis wherever the output ends up: heads merged in disorder do not hide it.
    """
    q, k, v = qkv
    whole, parts = [], 0
    for axis in range(v.dim() - 1):
        changed = v.clone()
        changed.select(axis, 0).add_(1.0)
        out = raw_call(function, signature, {"q": q, "k": k, "v": changed}, extra)
        share = float(((out - base).abs() > 1e-6 * base.abs().mean()).double().mean())
        whole += [axis] if share > 0.9 else []
        parts += abs(share - 1 / v.shape[axis]) < 0.05
    return whole[0] if len(whole) == 1 and parts == v.dim() - 2 else -1


def _layout_out(layout: str | None, shape: tuple[int, ...], out: tuple[int, ...]) -> str | None:
    if layout is None or len(out) != len(shape):
        return None
    if out == shape:
        return layout
    if layout in ("BHSD", "BSHD", "SBHD"):
        size = dict(zip(layout, shape, strict=True))
        for other in ("BHSD", "BSHD", "SBHD"):
            if tuple(size[a] for a in other) == out:
                return other
    return None


# the probes that run on canonical arguments --------------------------------------------------------------------------


def recovered_weights(implementation: Implementation, arguments: Arguments) -> Tensor | None:
    """The weights recovered by a one-hot V; None where the implementation would not run it."""
    try:
        out = implementation(one_hot(arguments)).output
    except (Unsupported, Refused, Violation):
        return None
    b, h, q_len, _ = arguments.sizes
    return out[..., : arguments.k.shape[2]] if out.shape[:3] == (b, h, q_len) else None


def one_hot(arguments: Arguments) -> Arguments:
    """The arguments with V = the identity, padded to the width of V: the output is then the weights."""
    v = arguments.v
    kv_len = v.shape[2]
    eye = torch.zeros(kv_len, max(v.shape[3], kv_len), dtype=v.dtype, device=v.device)
    eye[:, :kv_len] = torch.eye(kv_len, dtype=v.dtype, device=v.device)
    return arguments.replace(v=eye.expand(*v.shape[:2], *eye.shape).contiguous())


BASE = Problem(q_len=4, kv_len=4, heads=2, kv_heads=2, head_dim=8, v_dim=8, values="mild")
TILED = Problem(q_len=128, kv_len=128, heads=2, kv_heads=2, head_dim=64, v_dim=64, values="mild")


def causality(implementation: Implementation, flag: bool) -> bool | None:
    """Whether the future is hidden, with or without the flag."""
    for problem in (BASE, TILED):
        arguments = implementation.fit(problem).arguments().replace(causal=flag)
        w = recovered_weights(implementation, arguments)
        if w is not None and not bool(w.isnan().any()):
            future = w.triu(1)[..., :-1, :]
            return bool((future.abs() < 1e-6).all())
    return None


def alignment(implementation: Implementation, causal: bool = True) -> str | None:
    """top-left or bottom-right, from which keys are seen with Sq = 3, Sk = 5."""
    for problem in (BASE.replace(q_len=3, kv_len=5), TILED.replace(kv_len=256)):
        w = recovered_weights(implementation, problem.arguments().replace(causal=causal))
        if w is None:
            continue
        seen = w.abs() > 1e-9
        for name in ("top-left", "bottom-right"):
            expected = masks.Causal(name).visible(problem.sizes, 0, name)
            if bool((seen == expected).all()):
                return name
    return None


def polarity(implementation: Implementation, form: str) -> str | None:
    """Whether True in a mask that is passed on as it is means attend or masked; as seen through the conventions."""
    part = masks.KeyPadding((3, 2)) if form == "key-padding" else masks.Visible("QK")
    shown = BASE.replace(mask=(part,), delivery=masks.Delivery(form, shape="" if form == "key-padding" else "BHQK"))  # type: ignore[arg-type]
    shown = implementation.fit(shown)
    arguments = shown.arguments()
    visible, _ = masks.combined(shown.mask, shown.sizes, shown.seed, "top-left")
    w = recovered_weights(implementation, arguments)
    if w is None or visible is None:
        return None
    seen, visible = w.abs() > 1e-9, visible.expand(w.shape)
    some = visible.any(-1, keepdim=True) & (~visible).any(-1, keepdim=True)  # rows in which the two readings differ
    if bool((seen == visible)[some.expand_as(seen)].all()):
        return "as declared"
    if bool((seen == ~visible)[some.expand_as(seen)].all()):
        return "inverted"
    return None


def reads_additive_as_bool(implementation: Implementation) -> bool:
    """Whether an additive mask hides where it is 0: `masked_fill(mask == 0, ...)`, which is meant for 0 and 1."""
    part = masks.Visible("QK")
    shown = BASE.replace(mask=(part,), delivery=masks.Delivery("additive", shape="BHQK", hidden="-1e9"))
    shown = implementation.fit(shown)
    visible, _ = masks.combined(shown.mask, shown.sizes, shown.seed, "top-left")
    w = recovered_weights(implementation, shown.arguments())
    if w is None or visible is None:
        return False
    visible = visible.expand(w.shape)
    some = visible.any(-1, keepdim=True) & (~visible).any(-1, keepdim=True)
    return bool(((w.abs() > 1e-9) == ~visible)[some.expand_as(visible)].all())


def empty_rows(implementation: Implementation) -> str | None:
    """What a row with no visible key gives: zero, mean (of V), nan, or None for anything else."""
    masked = BASE.replace(mask=(masks.Visible("QK", empty_rows=(2,)),), delivery=masks.Delivery(shape="BHQK"))
    longer = BASE.replace(q_len=6, mask=(masks.Causal("bottom-right"),))
    padded = BASE.replace(mask=(masks.KeyPadding((0, 4)),), delivery=masks.Delivery("key-padding"))
    ways = (
        *((masked, 2), (masked.replace(delivery=masks.Delivery("additive", "BHQK")), 2), (longer, 0)),
        *((masked.replace(delivery=masks.Delivery(form, "B1QK")), 2) for form in ("bool", "additive")),
        *((p, 0) for p in (padded, padded.replace(delivery=masks.Delivery(shape="B11K")))),
    )
    for problem, row in ways:
        if problem is longer and implementation.conventions.alignment.value != "bottom-right":
            continue
        always = implementation.conventions.causal.value == "always"
        arguments = implementation.fit(problem).arguments()
        arguments = arguments.replace(causal=arguments.causal or always)
        try:
            out = implementation(arguments).output[:1, :, row]
        except (Unsupported, Refused, Violation, IndexError):
            continue
        if bool(out.isnan().all()):
            return "nan"
        if bool((out == 0).all()):
            return "zero"
        mean = arguments.v[:1].mean(2)
        shared = out.shape[1] // mean.shape[1]  # query heads on a kv head
        for each in (mean.repeat_interleave(shared, 1), mean.repeat(1, shared, 1)):
            if out.shape == each.shape and bool(((out - each).abs() < 1e-4).all()):
                return "mean"
        return None
    return None


def grouping(implementation: Implementation) -> str | None:
    """contiguous or tiled, from which kv head each query head reads."""
    read = read_heads(implementation, BASE.replace(heads=4, kv_heads=2).arguments())
    return "contiguous" if read == [0, 0, 1, 1] else "tiled" if read == [0, 1, 0, 1] else None


def read_heads(implementation: Implementation, arguments: Arguments) -> list[int] | None:
    """The kv head that each query head reads, V being constant in each head; None where that is not clear."""
    numbers = torch.arange(arguments.k.shape[1], dtype=arguments.v.dtype, device=arguments.v.device)
    v = numbers[None, :, None, None].expand_as(arguments.v).contiguous()
    try:
        out = implementation(arguments.replace(v=v)).output
    except (Unsupported, Refused, Violation):
        return None
    per_head = out.double().transpose(0, 1).flatten(1)
    if out.dim() != 4 or not out.numel() or not bool(((per_head - per_head[:, :1]).abs() <= 1e-2).all()):
        return None
    return [int(n) for n in per_head[:, 0].round()]


def assuming(implementation: Implementation, **fields: str) -> Implementation:
    """The implementation under other conventions, which are passed on to its adapter."""
    other = copy.copy(implementation)
    changes = {name: Finding(value, "assumed", "to measure by") for name, value in fields.items()}
    other.conventions = other.conventions.replace(**changes)
    other.adapter = copy.copy(other.adapter)
    if hasattr(other.adapter, "conventions"):
        other.adapter.conventions = other.conventions
    return other


PRECISION_PROBES = tuple(
    Problem(q_len=s, kv_len=s, heads=2, kv_heads=2, head_dim=d, v_dim=d, values=values, seed=seed)
    for values in ("sharp", "large")
    for s, d, seed in ((33, 16, 1), (64, 64, 2))
)


SHORT_PROBES = tuple(
    Problem(q_len=s, kv_len=s, heads=2, kv_heads=2, head_dim=d, v_dim=d, values=values, seed=seed)
    for values in ("sharp", "large")
    for s, d, seed in ((8, 16, 1), (7, 64, 2), (4, 64, 3))
)


def precision(implementation: Implementation, dtype: str) -> tuple[Precision | None, str]:
    """The finest honest precision whose bound holds all probes, and the evidence; None where it takes no such dtype.

    Short probes are for what takes no longer ones.
    """
    found, evidence = _precision(implementation, dtype, (*PRECISION_PROBES, TILED))
    if found is None:
        short, said = _precision(implementation, dtype, SHORT_PROBES)
        found, evidence = (short, said) if short is not None else (found, evidence)
    if found is not None and "softcap" in getattr(getattr(implementation.adapter, "signature", None), "roles", {}):
        return _capped(implementation, dtype, found, evidence)
    return found, evidence


def _capped(
    implementation: Implementation, dtype: str, found: Precision, evidence: str
) -> tuple[Precision | None, str]:
    """The precision of what takes another way through its code where there is a softcap: the coarser of both."""
    probes = tuple(p.replace(softcap=5.0) for p in (*PRECISION_PROBES[:1], SHORT_PROBES[0]))
    capped, said = _precision(implementation, dtype, probes)
    choices = candidates(dtype)
    if capped is None or said.startswith("beyond") or choices.index(capped) <= choices.index(found):
        return found, evidence
    return capped, f"with a softcap: {said}"


def _precision(implementation: Implementation, dtype: str, probes: tuple[Problem, ...]) -> tuple[Precision | None, str]:
    choices = candidates(dtype)
    worst = [0.0] * len(choices)
    ran = 0
    for problem in (implementation.fit(p).replace(dtype=dtype) for p in probes):
        causal = implementation.conventions.causal.value == "always"
        arguments = problem.arguments().replace(causal=causal)
        if problem.q_len != TILED.q_len and ran == len(PRECISION_PROBES):
            break
        try:
            out = implementation(arguments).output
        except (Unsupported, Refused, Violation) as error:
            reason = str(error)
            continue
        ran += 1
        meaning, as_it_stands = implementation.conventions.meaning, not (causal or implementation.positional)
        seen = arguments if as_it_stands else implementation.effective(arguments)
        for n, choice in enumerate(choices):
            if as_it_stands:
                right = oracle.known_answer(problem, meaning, choice)
            else:
                right = oracle.answer(seen, meaning, choice)
            ratio = right.compare(out).ratio if out.shape == right.output.shape else float("inf")
            worst[n] = max(worst[n], ratio)
    if not ran:
        return None, reason
    for choice, ratio in zip(choices, worst, strict=True):
        if ratio <= 1:
            return choice, f"{ran} probes, largest error {ratio:.2f} of the bound"
    return choices[0], "beyond every honest precision on the probes"
