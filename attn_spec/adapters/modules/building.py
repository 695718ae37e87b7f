"""A module for the sizes of a problem: built, kept, and with weights that tell."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from attn_spec.adapters.modules import projections
from attn_spec.adapters.modules.construct import READINGS, Constructor, Sizes, sizes_of
from attn_spec.adapters.modules.merged import merge
from attn_spec.adapters.modules.projections import Projection, Projections, is_pointwise
from attn_spec.adapters.modules.usable import require_usable
from attn_spec.adapters.modules.variants import without_sinks
from attn_spec.adapters.signature import TargetError
from attn_spec.law import Unsupported

HEAD_DIMS = (12, 16, 32, 64)  # channels of a head to build the first one with; some take powers of two alone
KEPT = 24  # modules that are kept, by size


class Building:
    """Modules of a class or a factory by their sizes, or the one instance that there is.

    declared: as attn.yaml has it.  redraws: whether weights are drawn anew, so that they tell.
    Raises TargetError where none can be built.
    """

    redraws = True
    gated = True  # whether what has the name of a gate may be one
    step = 1  # what the channels of a head are a multiple of

    def __init__(self, target: Any, name: str, declared: Mapping[str, Any]) -> None:
        self.declared, self.__name__, self.target = dict(declared), name, target
        self._built: dict[tuple[Sizes, torch.dtype], nn.Module] = {}
        if isinstance(target, nn.Module):
            require_usable(target, name)
        kind = target if isinstance(target, type) else type(target)
        if getattr(kind, "forward", None) is nn.Module.forward:
            raise TargetError(f"{name}: has no forward")
        self.instance = _copied(target, name) if isinstance(target, nn.Module) else None
        self.merged = merge(self.instance) if self.instance is not None else []
        self.constructor = None
        if self.instance is None:
            self.constructor = Constructor(target, name, dict(self.declared.get("construct") or {}))
        self.roles = self.constructor.roles() if self.constructor is not None else set()
        if self.constructor is not None and not self.roles & {"hidden", "heads", "head_dim", "qk_out", "out"}:
            self.instance = self._make_new(Sizes())  # whatever it is asked for, it is one module
        self.reading, self.kv_fixed = 0, 0  # kv_fixed: how many kv heads it has, where that is not the caller's to say
        self.sizes, self.module = self._first()

    def _first(self) -> tuple[Sizes, nn.Module]:
        """The first module, of sizes of which no two are alike; it tells which reading of the names fits."""
        if self.instance is not None:
            return self._sizes_of_instance(self.instance), self.instance
        assert self.constructor is not None
        grouped = "kv_heads" in self.roles
        heads = 4 if "heads" in self.roles else self._heads_unasked()
        first: TargetError | None = None
        for head_dim in HEAD_DIMS:
            v_dim = 10 if "v_dim" in self.roles and head_dim == HEAD_DIMS[0] else head_dim
            wanted = Sizes(heads, 2 if grouped and heads > 1 else heads, head_dim, v_dim, 128)
            if head_dim != HEAD_DIMS[0] and self._builds_somehow(wanted):
                self.step = self._smallest_step(wanted)
            errors: list[TargetError] = []
            for reading in range(len(READINGS)):
                sizes = self._read(wanted, reading)
                try:
                    module = self._make_new(sizes)
                except TargetError as error:
                    errors.append(error)
                    continue
                for kv_heads in (sizes.kv_heads, 1) if grouped else (sizes.kv_heads, 1, 2):  # whatever it is told
                    sized = replace(sizes, kv_heads=kv_heads)
                    if self._fits(self._projections(module), sized):
                        self.reading, self.kv_fixed = reading, 0 if kv_heads == sizes.kv_heads else kv_heads
                        return sized, module
            if len(errors) < len(READINGS):
                break
            first = first or errors[1]  # of the plain reading, hidden = heads * head_dim
        else:
            if self.constructor.keeps("softcap"):  # it may be one that can't be without
                self.constructor.kept.add("softcap")
                return self._first()
            assert first is not None
            raise first
        self.reading = next(n for n in (1, 0, 3, 2) if self._builds(self._read(wanted, n)))
        sizes = self._read(wanted, self.reading)
        return sizes, self._make_new(sizes)

    def _smallest_step(self, sizes: Sizes) -> int:
        """Of which number of channels a head must have a multiple: some norms take groups of 8 or 32 alone."""
        one = replace(sizes, heads=1, kv_heads=1) if "heads" in self.roles else sizes
        steps = (n for n in (2, 4, 8, 16, 32) if self._builds_somehow(replace(one, head_dim=n, v_dim=n)))
        return next(steps, sizes.head_dim)

    def _builds_somehow(self, sizes: Sizes) -> bool:
        return any(self._builds(self._read(sizes, reading)) for reading in range(len(READINGS)))

    def _heads_unasked(self) -> int:
        """How many heads it has where nothing asks how many: by its attributes, or by how many have projections."""
        assert self.constructor is not None
        for reading in range(len(READINGS)):
            try:
                module = self.constructor.build(replace(Sizes(heads=12, kv_heads=12), reading=reading))
            except TargetError:
                continue
            known = {role: value for role, value, _ in sizes_of(module, {})}
            return known.get("heads") or self._projections(module).single_heads or 1
        return 1

    def _builds(self, sizes: Sizes) -> bool:
        assert self.constructor is not None
        try:
            self.constructor.build(sizes)
        except TargetError:
            return False
        return True

    def _read(self, sizes: Sizes, reading: int) -> Sizes:
        return replace(sizes, reading=reading)

    def _fits(self, found: Projections, sizes: Sizes) -> bool:
        """Whether the weights are of the size that the heads ask for."""
        if not found.whole:
            return False
        h, hkv, d, dv = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.v_dim
        width = {"q": h * d, "k": hkv * d, "v": hkv * dv, "qkv": h * d + hkv * (d + dv), "kv": hkv * (d + dv)}
        if found.single_heads:
            width = {"q": d, "k": d, "v": dv, "qkv": 2 * d + dv, "kv": d + dv}
        if found.single_heads not in (0, h):
            return False
        width["o"] = h * dv
        return all(width[p.role] in p.weight.shape for p in found.found if p.role != "o" or p.head is None)

    def _sizes_of_instance(self, module: nn.Module) -> Sizes:
        names = {key: int(self.declared[key]) for key in ("heads", "kv_heads") if self.declared.get(key)}
        known = {role: (value, where) for role, value, where in sizes_of(module, names)}
        found = self._projections(module)
        heads = known.get("heads", (found.single_heads or 0, ""))[0]
        if not heads:
            raise TargetError(
                f"{self.__name__}: none of its attributes says how many heads it has; `heads: ...` in attn.yaml does"
            )
        kv_heads = known.get("kv_heads", (heads, ""))[0]
        hidden = known.get("hidden", (0, ""))[0]
        head_dim = known.get("head_dim", (0, ""))[0]
        if not head_dim:
            (q,) = found.of("q")[:1] or (None,)
            sides = [n for n in q.weight.shape if n != hidden] or [hidden] if q is not None else [hidden]
            head_dim = sides[0] // (1 if found.single_heads else heads)
        if not head_dim:
            raise TargetError(f"{self.__name__}: the channels of a head are said by none of its attributes or weights")
        for q in found.of("q"):
            if not found.single_heads and all(side % heads for side in q.weight.shape):
                raise TargetError(f"{self.__name__}: {heads} heads do not divide {q.name} {list(q.weight.shape)}")
        if heads % kv_heads:
            raise TargetError(f"{self.__name__}: {heads} heads can't share {kv_heads} kv heads evenly; see `kv_heads:`")
        return Sizes(heads, kv_heads, head_dim, head_dim)

    def _make_new(self, sizes: Sizes) -> nn.Module:
        """A new module by the constructor, each projection one matrix. Raises TargetError."""
        assert self.constructor is not None
        module = self.constructor.build(sizes)
        self.merged = merge(module)
        return module

    def _projections(self, module: nn.Module) -> Projections:
        found = projections.find(module, self.declared.get("projections"))
        return found if self.gated else replace(found, gate=None)

    def become_black_box(self) -> None:
        """Judge it on hidden states alone from now on: none of its parameters counts as a projection."""
        self.declared["projections"] = {}
        self.projections = Projections()
        self.forget()

    def fit(self, heads: int, kv_heads: int, head_dim: int, v_dim: int) -> tuple[int, int, int, int]:
        """The nearest sizes that it can be built for."""
        if self.instance is not None:
            s = self.sizes
            return s.heads, s.kv_heads, s.head_dim, s.v_dim
        if "heads" not in self.roles:
            heads = self.sizes.heads
        if "v_dim" not in self.roles:
            head_dim = -(-head_dim // self.step) * self.step
        kv_heads = self.kv_fixed or (kv_heads if "kv_heads" in self.roles and heads % kv_heads == 0 else heads)
        return heads, kv_heads, head_dim, v_dim if "v_dim" in self.roles else head_dim

    def forget(self) -> None:
        """Build every module anew from now on."""
        self._built.clear()

    def built(self, sizes: Sizes, dtype: torch.dtype) -> nn.Module:
        """The module of these sizes, in eval mode, its weights drawn so that they tell (an instance keeps its own)."""
        key = (sizes, dtype)
        if key not in self._built:
            if len(self._built) >= KEPT:
                del self._built[next(iter(self._built))]
            try:
                self._built[key] = self._make(sizes, dtype)
            except TargetError as error:
                if not self._built:
                    raise
                raise Unsupported(f"can't be built for these sizes: {error}") from None
        return self._built[key]

    def _make(self, sizes: Sizes, dtype: torch.dtype) -> nn.Module:
        if self.instance is not None:
            module = copy.deepcopy(self.instance).to(dtype)
        else:
            assert self.constructor is not None
            with torch.random.fork_rng(devices=[]):
                _seed(sizes.heads * 1000 + sizes.head_dim)
                module = self._make_new(sizes)
                if self.redraws:
                    draw_weights(self._projections(module))
            if any(p.dtype != dtype for p in module.parameters()):  # else a buffer of another dtype is one by design
                module = module.to(dtype)
        without_sinks(module, sizes.heads)
        return module.eval().requires_grad_(False)

    def sizes_for(self, heads: int, kv_heads: int, head_dim: int, v_dim: int, length: int, **others: Any) -> Sizes:
        """The sizes to build for. Raises Unsupported where it can't be built so."""
        fitting = self.fit(heads, kv_heads, head_dim, v_dim)
        for name, wanted, can in zip(
            ("heads", "kv heads", "channels of a head", "channels of values"),
            (heads, kv_heads, head_dim, v_dim),
            fitting,
            strict=True,
        ):
            if wanted != can:
                raise Unsupported(f"no {wanted} {name}: it can be built for {can}")
        longest = self.longest
        if longest and length > longest:
            raise Unsupported(f"its triangle holds {longest} positions")
        if self.instance is not None:
            return self.sizes
        context = 128 if length <= 128 else length
        others["cross"] = bool(others.get("cross")) and "kv_hidden" in self.roles
        return Sizes(heads, kv_heads, head_dim, v_dim, context, reading=self.reading, **others)

    @property
    def longest(self) -> int:
        """The positions of a triangle that no size makes longer; 0 where there is none."""
        if "context" in self.roles and self.instance is None:
            return 0
        square = [b for b in self.module.buffers() if b.dim() >= 2 and b.shape[-1] == b.shape[-2] > 3]
        if self.instance is not None:  # which may also keep a square matrix of numbers
            square = [b for b in square if len(torch.unique(b)) == 2]
        return min((b.shape[-1] for b in square), default=0)

    def widths(self, module: nn.Module, sizes: Sizes) -> tuple[int, int]:
        """Channels of the hidden states and of what the keys are made from."""
        found = self._projections(module)
        hidden = sizes.hidden if self.instance is None else 0
        (q,) = found.of("q", "qkv")[:1] or (None,)
        (k,) = found.of("k", "kv")[:1] or (None,)
        if self.instance is not None and q is not None:
            hidden = _width_of(q, sizes)
        elif self.instance is not None:
            known = {role: value for role, value, _ in sizes_of(module, {})}
            hidden = known.get("hidden", sizes.heads * sizes.head_dim)
        kv_hidden = sizes.kv_hidden if self.instance is None else hidden
        if k is not None and (self.instance is not None or kv_hidden not in k.weight.shape):
            sides = _given_sides(k, sizes)
            kv_hidden = hidden if hidden in sides else sides[-1]
        return hidden, kv_hidden

    def widths_for(self, sizes: Sizes) -> tuple[int, int]:
        """Channels of the hidden states and of the context for these sizes."""
        module = self.module if self.instance is not None else self.built(sizes, torch.float32)
        return self.widths(module, sizes)


def _seed(seed: int) -> None:
    """As torch.manual_seed, which without a GPU notes for each kind of GPU that it should, with a stack trace."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _copied(module: nn.Module, name: str) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # of torch, or of the user's own
        raise TargetError(f"{name}: can't be copied ({error}): give its class, or a function that makes it") from None


def _width_of(p: Projection, sizes: Sizes) -> int:
    """How wide what a projection is given is: the side of its weight that is not what it gives."""
    return _given_sides(p, sizes)[-1]


def _given_sides(p: Projection, sizes: Sizes) -> list[int]:
    """The sides of a projection's weight that may be what it is given: both, where neither is what it gives."""
    h, hkv = (1, 1) if p.head is not None else (sizes.heads, sizes.kv_heads)
    parts = {"q": h * sizes.head_dim, "k": hkv * sizes.head_dim, "v": hkv * sizes.v_dim}
    sides, own = (
        list(p.weight.shape[:2] if is_pointwise(p.weight) else p.weight.shape),
        sum(parts[name] for name in p.role),
    )
    if own in sides:
        sides.remove(own)
    return sides


def draw_weights(found: Projections) -> None:
    """Weights of the size that keeps q.k near 1, and biases that are not zero: an initialisation may hide both."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in found.found:
            spread = max(p.weight.shape) ** -0.5
            p.weight.copy_(torch.randn(p.weight.shape, generator=g) * spread * 1.5)
            if p.bias is not None:
                p.bias.copy_(torch.randn(p.bias.shape, generator=g) * 0.5)
