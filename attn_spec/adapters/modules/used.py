"""A module's projections as the matrices that they are used as, read off one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules.inject import Watch, uncompiled
from attn_spec.adapters.modules.projections import BIASES, Projection

if TYPE_CHECKING:
    from attn_spec.adapters.modules.construct import Sizes
    from attn_spec.adapters.modules.core import ModuleFunction


def matrices(
    f: ModuleFunction, x: Tensor, context: Tensor | None, sizes: Sizes, named: dict[str, Any]
) -> dict[str, Tensor]:
    """ "q", "k", "v" and "o" [in, out], head after head, with "q_bias" and so on; {} where that does not say it all."""
    module = f.built(sizes, x.dtype)
    found = f._projections(module)
    watch = Watch(found)
    with torch.no_grad(), uncompiled(), watch:
        y = f.whole(x, context, sizes=sizes, **named)[0]
    normed = any("norm" in type(m).__name__.lower() for m in module.modules())
    gave = [result for which, _, _, result in watch.seen if which[0].role == "o"]
    if normed and gave and not _same_rows(y, gave[-1]):  # a norm comes after the output projection
        return {}
    sources = {"q": x, "k": x if context is None else context}
    out: dict[str, Tensor] = {}
    owners = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))}
    for p in found.found:
        runs = [(given, result) for which, given, _, result in watch.seen if p in which]
        width = sizes.heads * sizes.v_dim if p.role == "o" else sources["q" if "q" in p.role else "k"].shape[-1]
        matrix = _matrix(p, runs, id(p.weight) in owners, width)
        if matrix is None:
            return {}
        given_others = [not _same_rows(given, sources["q" if "q" in p.role else "k"]) for given, _ in runs]
        if (
            p.role != "o"
            and any(given_others)
            and not any(_same_rows(given, y) for given, _ in runs for y in sources.values())
        ):
            return {}
        _enter(out, f, p, matrix, sizes)
        if p.bias is None and len(p.role) > 1:
            _enter_parts(out, module, p)
    if found.gate is not None:
        logits_of = [given for which, given, _, _ in watch.seen if which[0].role == "g"]
        if len(logits_of) != 1 or not _same_rows(logits_of[0], x) or id(found.gate.weight) not in owners:
            return {}
        gate = found.gate.weight.detach().mT
        out["g"] = gate if gate.shape[1] != sizes.heads else gate.repeat_interleave(sizes.v_dim, 1)
        if found.gate.bias is not None:
            bias = found.gate.bias.detach()
            out["g_bias"] = bias if len(bias) != sizes.heads else bias.repeat_interleave(sizes.v_dim)
        if out["g"].shape[1] != sizes.heads * sizes.v_dim or f.orders.heads != "hd":
            return {}
    return {name: value.double() for name, value in out.items()}


def _matrix(p: Projection, runs: list[tuple[Tensor, Tensor]], linear: bool, width: int) -> Tensor | None:
    """The weight as [in, out]: that of a Linear is [out, in], of any other it is told by its use, else by its shape."""
    w = p.weight.detach()
    w = w.flatten(1) if linear and set(w.shape[2:]) == {1} else w  # of a convolution
    if w.dim() != 2:
        return None
    if linear:
        return w.mT
    ways = [m for m in (w.mT, w) if m.shape[0] == width]
    for given, result in runs if len(ways) > 1 else ():
        for m in ways:  # a square one: whichever gives what it gave, but for a bias
            y = given.double() @ m.double()
            if y.shape[-1] == result.shape[-1]:
                rest = result.double() - y
                if bool(((rest - rest.reshape(-1, rest.shape[-1])[0]).abs() < 1e-2 * y.abs().max()).all()):
                    return m
    return ways[-1] if ways else None


def _same_rows(given: Tensor, x: Tensor) -> bool:
    """Whether a projection was given the hidden states, in whatever order of rows."""
    a, b = given.detach().reshape(-1, given.shape[-1]), x.detach().reshape(-1, x.shape[-1])
    return a.shape == b.shape and torch.equal(a.double().sum(0), b.double().sum(0)) or _equal_sorted(a, b)


def _equal_sorted(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a[a[:, 0].argsort()], b[b[:, 0].argsort()])


def _enter_parts(out: dict[str, Tensor], module: nn.Module, p: Projection) -> None:
    """The biases of a fused projection where q, k and v have theirs as parameters of their own, or none."""
    place = p.name.removesuffix(".weight").rpartition(".")[0]
    for role in p.role:
        for name in BIASES[role]:
            own = dict(module.named_parameters()).get(f"{place}.{name}" if place else name)
            if own is not None and own.numel() == out[role].shape[1]:
                out[f"{role}_bias"] = own.detach().flatten()


def _enter(out: dict[str, Tensor], f: ModuleFunction, p: Projection, matrix: Tensor, s: Sizes) -> None:
    """Put a projection's columns where they belong, head after head."""
    heads, kv_heads = (1, 1) if p.head is not None else (s.heads, s.kv_heads)
    bias = None if p.bias is None else p.bias.detach()
    if p.role == "o":
        place = f.orders.columns("v", s.heads, s.heads, s.head_dim, s.v_dim)["v"]
        out["o"] = matrix[place] if f.orders.heads == "dh" else matrix
        if bias is not None:
            out["o_bias"] = bias
        return
    for role, place in f.orders.columns(p.role, heads, kv_heads, s.head_dim, s.v_dim).items():
        part = matrix[:, place]
        out[role] = torch.cat([out[role], part], -1) if p.head else part
        if bias is not None:
            own = bias[place]
            out[f"{role}_bias"] = torch.cat([out[f"{role}_bias"], own], -1) if p.head else own
