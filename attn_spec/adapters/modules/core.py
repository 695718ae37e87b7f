"""A module as a function of q, k and v, and as a whole on hidden states; built anew for the sizes of each call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.function import flat
from attn_spec.adapters.modules import fused, projections
from attn_spec.adapters.modules.construct import READINGS, Constructor, Sizes, sizes_of
from attn_spec.adapters.modules.errors import told_more
from attn_spec.adapters.modules.forward import Forward, read
from attn_spec.adapters.modules.inject import Inject, NotInjected, marked
from attn_spec.adapters.modules.projections import Projection, Projections
from attn_spec.adapters.signature import TargetError
from attn_spec.conventions import Finding
from attn_spec.law import Unsupported, Violation

KEPT = 24  # modules that are kept, by size


class ModuleFunction:
    """An nn.Module class, instance or factory, called as `f(q, k, v, ...)` with q [B, H, S, D], k and v [B, Hkv, S, D].

    declared: as attn.yaml has it.  facts: what was found out, for `describe`.  batched: whether it takes a batch.
    Raises TargetError where it can't be built or its forward can't be read.
    """

    def __init__(self, target: Any, name: str, declared: Mapping[str, Any] | None = None) -> None:
        self.declared = dict(declared or {})
        self.__name__ = name
        self.target = target
        self.facts: list[tuple[str, Finding]] = []
        self._built: dict[tuple[Sizes, torch.dtype], nn.Module] = {}
        kind = target if isinstance(target, type) else type(target)
        if getattr(kind, "forward", None) is nn.Module.forward:
            raise TargetError(f"{name}: has no forward")
        self.instance = target if isinstance(target, nn.Module) else None
        self.constructor = None
        if self.instance is None:
            self.constructor = Constructor(target, name, dict(self.declared.get("construct") or {}))
        self.roles = self.constructor.roles() if self.constructor is not None else set()
        if self.constructor is not None and not self.roles & {"hidden", "heads", "head_dim", "qk_out", "out"}:
            self.instance = self.constructor.build(Sizes())  # whatever it is asked for, it is one module
        self.reading, self.kv_fixed = 0, 0  # kv_fixed: how many kv heads it has, where that is not the caller's to say
        self.grouping = str(self.declared.get("grouping") or "contiguous")
        self.between = ""  # what lies between the projections and q.k: "rotation", "norm" or nothing
        self.sizes, self.module = self._first()
        self.forward: Forward = read(self.module, name, self.declared)
        self.projections: Projections = self._projections(self.module)
        self.input, self.orders = str(self.declared.get("input") or "BSD"), fused.Orders()
        self.unbatched = False  # whether it runs on one sequence [S, D] and not on a batch
        from attn_spec.adapters.modules import settle  # which calls this

        settle.settle(self)
        self.__signature__ = self._signature()

    # building ------------------------------------------------------------------------------------------------------

    def _first(self) -> tuple[Sizes, nn.Module]:
        """The first module, of sizes of which no two are alike; it tells which reading of the names fits."""
        if self.instance is not None:
            return self._sizes_of_instance(self.instance), self.instance
        assert self.constructor is not None
        grouped = "kv_heads" in self.roles
        heads = 4 if "heads" in self.roles else self._heads_unasked()
        wanted = Sizes(heads, 2 if grouped and heads > 1 else heads, 12, 10 if "v_dim" in self.roles else 12, 128)
        errors: list[TargetError] = []
        for reading in range(len(READINGS)):
            sizes = self._read(wanted, reading)
            try:
                module = self.constructor.build(sizes)
            except TargetError as error:
                errors.append(error)
                continue
            for kv_heads in (sizes.kv_heads,) if grouped else (sizes.kv_heads, 1, 2):
                sized = replace(sizes, kv_heads=kv_heads)
                if self._fits(self._projections(module), sized):
                    self.reading, self.kv_fixed = reading, 0 if kv_heads == sizes.kv_heads else kv_heads
                    return sized, module
        if errors and len(errors) == len(READINGS):
            raise errors[1]  # of the plain reading, hidden = heads * head_dim
        self.reading = next(n for n in (1, 0, 3, 2) if self._builds(self._read(wanted, n)))
        sizes = self._read(wanted, self.reading)
        return sizes, self.constructor.build(sizes)

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
        return all(width[p.role] in p.weight.shape for p in found.found if p.role != "o")

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

    def _projections(self, module: nn.Module) -> Projections:
        return projections.find(module, self.declared.get("projections"))

    def fit(self, heads: int, kv_heads: int, head_dim: int, v_dim: int) -> tuple[int, int, int, int]:
        """The nearest sizes that it can be built for."""
        if self.instance is not None:
            s = self.sizes
            return s.heads, s.kv_heads, s.head_dim, s.v_dim
        if "heads" not in self.roles:
            heads = self.sizes.heads
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
            import copy

            module = copy.deepcopy(self.instance).to(dtype)
        else:
            assert self.constructor is not None
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(sizes.heads * 1000 + sizes.head_dim)
                module = self.constructor.build(sizes)
                if self.redraws:
                    _draw(self._projections(module))
            module = module.to(dtype)
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
        if self.instance is not None:
            return self.sizes
        longest = self.longest
        if longest and length > longest:
            raise Unsupported(f"its triangle holds {longest} positions")
        context = 128 if length <= 128 else length
        others["cross"] = bool(others.get("cross")) and "kv_hidden" in self.roles
        return Sizes(heads, kv_heads, head_dim, v_dim, context, reading=self.reading, **others)

    # the core: q, k, v in, heads out -------------------------------------------------------------------------------

    def _signature(self) -> inspect.Signature:
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        made = [inspect.Parameter(name, keyword) for name in ("query", "key", "value")]
        for role, name in self.forward.roles.items():
            if role == "weights" and self.by_mask:
                continue  # transformers' modules give weights in eager alone
            if role != "dropout" and name not in ("query", "key", "value"):
                made.append(inspect.Parameter(name, keyword, default=self.forward.defaults.get(name)))
        if "causal" not in self.forward.roles and self.causal_by:
            made.append(inspect.Parameter("is_causal", keyword, default=False))
        return inspect.Signature(made)

    @property
    def causal_by(self) -> str:
        """How causality is asked for where forward has no flag: by the constructor ("constructor") or "mask"."""
        if self.by_mask:
            return "mask"
        if "causal" in self.roles and (self.constructor is None or "causal" not in self.constructor.declared):
            return "constructor"
        return ""

    redraws = True  # whether weights are drawn anew, so that they tell
    multihead = False  # whether it is torch's own nn.MultiheadAttention
    by_mask = False  # whether a causal triangle goes in as a mask, as transformers does

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.pop("attn_spec_request", "core")
        if request != "core":
            asked: dict[str, Callable[..., Any]] = {
                "whole": self.whole,
                "weights": self.weights,
                "gradients": self.gradients,
                "between": self.arrived,
            }
            return asked[request](*args, **kwargs)
        names = list(self.__signature__.parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v = (named.pop(name) for name in ("query", "key", "value"))
        return self.core(q, k, v, named)

    def core(self, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> Any:
        """Attention on q, k, v as the module does it between its projections: output [B, H, S, Dv], and what else it
        returns."""
        causal = self._causal(named)
        b, h, q_len, d = q.shape
        if q_len != k.shape[2] and not self.takes_context:
            raise Unsupported("queries and keys come from one sequence")
        cross = self.forward.context_required or (bool(self.forward.context) and q_len != k.shape[2])
        sizes = self.sizes_for(h, k.shape[1], d, v.shape[3], max(q_len, k.shape[2]), causal=causal, cross=cross)
        module = self.built(sizes, q.dtype)
        if self.input == "SD" or not b:
            if not b:
                raise Unsupported("no sample to call it on")
            each = [
                self._once(module, sizes, q[n : n + 1], k[n : n + 1], v[n : n + 1], _sample(named, n, b))
                for n in range(b)
            ]
            return [torch.cat(parts) for parts in zip(*each, strict=True)]
        return self._once(module, sizes, q, k, v, named)

    def arrived(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q and k as they arrive at q.k, [B, H, S, D], where something lies between them and their projections."""
        from attn_spec.adapters.modules.between import arrived

        found = arrived(self, q, k, v)
        if found is None:
            raise Unsupported("q and k can't be seen where they meet")
        return list(found)

    def _causal(self, named: dict[str, Any]) -> bool | None:
        """The causal flag that goes to the constructor; None where the constructor has none."""
        if self.causal_by == "constructor" and "causal" not in self.forward.roles:
            return bool(named.pop("is_causal", False))
        return None

    @property
    def longest(self) -> int:
        """The positions of a triangle that no size makes longer; 0 where there is none."""
        if "context" in self.roles and self.instance is None:
            return 0
        square = [b.shape[-1] for b in self.module.buffers() if b.dim() >= 2 and b.shape[-1] == b.shape[-2] > 3]
        return min(square, default=0)

    @property
    def takes_context(self) -> bool:
        return self.forward.separate or bool(self.forward.context)

    def _once(
        self, module: nn.Module, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]
    ) -> list[Tensor]:
        found = self._projections(module)
        if not found.whole:
            raise Unsupported("its projections were not found")
        b, h, q_len, _ = q.shape
        fill = self.orders.fill(q, k, v, found)
        inputs = self._inputs(module, sizes, b, q_len, k.shape[2], q.dtype, marked)
        meeting = Inject(found, fill=fill, orders=self.orders, batch_first=self.input != "SBD")
        with silent_biases(found), meeting:
            returned = self._call(module, sizes, inputs, named, q)
        if not meeting.filled:
            raise NotInjected("its projections were not used in forward")
        tensors = self.tensors(returned)
        merged = meeting.merged if meeting.merged is not None else tensors[0]
        return [self.orders.heads_of(merged, meeting, (b, h, q_len, v.shape[3]), self.input), *tensors[1:]]

    def tensors(self, returned: Any) -> list[Tensor]:
        tensors = flat(returned)
        if not tensors:
            raise Violation(f"returned {type(returned).__name__}, not a tensor", merge="returns")
        place = int(self.declared.get("output") or 0)
        return [tensors[place], *tensors[:place], *tensors[place + 1 :]] if place < len(tensors) else tensors

    def _inputs(
        self,
        module: nn.Module,
        sizes: Sizes,
        batch: int,
        q_len: int,
        kv_len: int,
        dtype: torch.dtype,
        make: Callable[[int, int, int, torch.dtype], Tensor],
    ) -> dict[str, Tensor]:
        """The hidden states, by argument of forward, in the layout it takes."""
        width, kv_width = self.widths(module, sizes)
        x = self._laid(make(batch, q_len, width, dtype))
        forward = self.forward
        if forward.separate:
            # three tensors, not one thrice: a module may take a shorter way for that
            y = self._laid(make(batch, kv_len, kv_width, dtype))
            return dict(zip(forward.inputs, (x, y, y.clone()), strict=True))
        if forward.context and (forward.context_required or q_len != kv_len):
            return {forward.inputs[0]: x, forward.context: self._laid(make(batch, kv_len, kv_width, dtype))}
        return {forward.inputs[0]: x}

    def _laid(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.input == "SBD" else x[0] if self.input == "SD" else x

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
        if k is not None and kv_hidden not in k.weight.shape:
            kv_hidden = hidden if hidden in k.weight.shape else _width_of(k, sizes)
        return hidden, kv_hidden

    def widths_for(self, sizes: Sizes) -> tuple[int, int]:
        """Channels of the hidden states and of the context for these sizes."""
        module = self.module if self.instance is not None else self.built(sizes, torch.float32)
        return self.widths(module, sizes)

    def _call(
        self, module: nn.Module, sizes: Sizes, inputs: dict[str, Tensor], named: dict[str, Any], like: Tensor
    ) -> Any:
        """Call forward with the inputs, what is asked for, and what each call gets."""
        length = next(iter(inputs.values())).shape[0 if self.input in ("SBD", "SD") else 1]
        given = {**self.forward.extras(like.detach(), length, sizes.head_dim, sizes.words), **named}
        if self.multihead:
            given = self._for_multihead(given, like, inputs)
        elif self.by_mask:
            given = self._causal_mask(given, like, length, next(reversed(inputs.values())).shape[1])
        for role, name in self.forward.roles.items():
            if name in given and given[name] is None and self.forward.defaults.get(name, 0) is None:
                del given[name]
            if role == "weights" and "average_attn_weights" in self.forward.left:
                given["average_attn_weights"] = False
        if self.forward.roles.get("weights") == "need_weights":
            given.setdefault("need_weights", False)
        try:
            return module(**inputs, **given)
        except (Unsupported, Violation, NotInjected):
            raise
        except Exception as error:
            told = told_more(error, unbatched=self.unbatched)
            if told is None:
                raise
            raise told from error

    def _causal_mask(self, given: dict[str, Any], like: Tensor, q_len: int, kv_len: int) -> dict[str, Any]:
        """The mask with the causal triangle in it, as transformers has it; no mask is one that hides nothing."""
        name, causal = self.forward.roles["mask"], given.pop("is_causal", False)
        mask = given.get(name)
        low = max(torch.finfo(like.dtype).min, torch.finfo(torch.float32).min)  # a softmax in float32 must hold it
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=like.dtype).masked_fill(~mask, low)
        elif mask is not None:  # transformers hands over the lowest number and never -inf
            mask = mask.clamp(min=low)
        if mask is None:
            mask = torch.zeros(like.shape[0], 1, q_len, kv_len, dtype=like.dtype)
        if causal:
            past = torch.ones(q_len, kv_len, dtype=torch.bool).tril()
            mask = mask.expand(*mask.shape[:-2], q_len, kv_len).masked_fill(~past, low)
        return {**given, name: mask.to(like.dtype)}

    def _for_multihead(self, given: dict[str, Any], like: Tensor, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """nn.MultiheadAttention takes [Sq, Sk] or [B * H, Sq, Sk], True = hidden; `is_causal` is a hint beside one."""
        mask, heads = given.get("attn_mask"), self.sizes.heads if self.instance is not None else like.shape[1]
        if isinstance(mask, Tensor) and mask.dim() > 2:
            b = like.shape[0]
            mask = mask.expand(b, heads, *mask.shape[-2:]).flatten(0, 1)
        if given.pop("is_causal", False):
            q_len, kv_len = (x.shape[1 if self.input == "BSD" else 0] for x in list(inputs.values())[:2])
            future = torch.ones(q_len, kv_len, dtype=torch.bool).triu(1)
            if mask is None:
                mask = future
            else:
                mask = mask | future if mask.dtype == torch.bool else mask.masked_fill(future, -torch.inf)
        return {**given, "attn_mask": mask}

    # the whole: hidden states in, hidden states out ----------------------------------------------------------------

    def whole(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        sizes: Sizes,
        train: bool = False,
        **named: Any,
    ) -> list[Tensor]:
        """The module as it stands on hidden states x [B, S, width] and context [B, Sk, kv_width].

        All batch first, the output too, whatever layout the module takes.  train: in training mode.
        """
        named.pop("query", None)
        if self._causal_of_constructor:
            named.pop("is_causal", None)
        module = self.built(sizes, x.dtype)
        module.train(train)
        try:
            if self.input == "SD":
                each = [
                    self._whole(
                        module,
                        sizes,
                        x[n : n + 1],
                        context if context is None else context[n : n + 1],
                        _sample(named, n, len(x)),
                    )
                    for n in range(len(x))
                ]
                return [torch.stack(parts) for parts in zip(*each, strict=True)]
            returned = self._whole(module, sizes, x, context, named)
            if self.input == "SBD":
                returned[0] = returned[0].transpose(0, 1)
            return returned
        finally:
            module.eval()

    def run_as_is(self, x: Tensor, context: Tensor | None = None, *, sizes: Sizes, **named: Any) -> Any:
        """As `whole`, and gives what the module returns as it is."""
        returned: list[Any] = []
        module = self.built(sizes, x.dtype)
        handle = module.register_forward_hook(lambda *call: returned.append(call[-1]))
        try:
            self.whole(x, context, sizes=sizes, **named)
        finally:
            handle.remove()
        return returned[0]

    def _whole(
        self, module: nn.Module, sizes: Sizes, x: Tensor, context: Tensor | None, named: dict[str, Any]
    ) -> list[Tensor]:
        forward, laid = self.forward, self._laid(x)
        inputs = {forward.inputs[0]: laid}
        if forward.separate:
            other = laid if context is None else self._laid(context)
            inputs = dict(zip(forward.inputs, (laid, other, other), strict=True))
        elif context is not None:
            inputs[forward.context] = self._laid(context)
        given = {name: value for name, value in named.items() if not (value is None and name in forward.defaults)}
        like = x.new_empty(len(x), sizes.heads, x.shape[1], sizes.head_dim)
        return self.tensors(self._call(module, sizes, inputs, given, like))

    @property
    def _causal_of_constructor(self) -> bool:
        return self.causal_by == "constructor" and "causal" not in self.forward.roles

    def gradients(self, x: Tensor, context: Tensor | None = None, *, sizes: Sizes, **named: Any) -> dict[str, Tensor]:
        """The largest gradient of each projection's weight, by its name; -1 for any parameter that is not used."""
        module = self.built(sizes, x.dtype)
        projected = {p.name: p.weight for p in self._projections(module).found}
        others = {name: p for name, p in module.named_parameters() if name not in projected}
        named_weights = {**projected, **others}
        module.requires_grad_(True)
        try:
            with torch.enable_grad():
                out = self.whole(x, context, sizes=sizes, **named)[0]
                g = torch.Generator().manual_seed(11)
                cotangent = torch.randn(out.shape, generator=g).to(out.dtype)
                wanted = list(named_weights.values())
                found: Sequence[Tensor | None] = torch.autograd.grad(out, wanted, cotangent, allow_unused=True)
        finally:
            module.requires_grad_(False)
        largest = {}
        for name, grad in zip(named_weights, found, strict=True):
            if name in projected:
                largest[name] = x.new_zeros(()) if grad is None else grad.detach().abs().max()
            elif grad is None:
                largest[name] = x.new_full((), -1.0)
        return largest

    def weights(self, x: Tensor, context: Tensor | None = None, *, sizes: Sizes, **named: Any) -> dict[str, Tensor]:
        """The matrices [in, out] of q, k, v and o, columns head after head, and their biases, as they are used.

        Empty where what a projection is given is not the hidden states, or it does more than a matrix and a bias do.
        """
        from attn_spec.adapters.modules.used import matrices

        return matrices(self, x, context, sizes, named)


def _width_of(p: Projection, sizes: Sizes) -> int:
    """How wide what a projection is given is: the side of its weight that is not what it gives."""
    h, hkv = (1, 1) if p.head is not None else (sizes.heads, sizes.kv_heads)
    parts = {"q": h * sizes.head_dim, "k": hkv * sizes.head_dim, "v": hkv * sizes.v_dim}
    sides, own = list(p.weight.shape), sum(parts[name] for name in p.role)
    if own in sides:
        sides.remove(own)
    return sides[-1]


class silent_biases:  # noqa: N801  (a context manager)
    """Biases of the projections that inject stands for are zero inside, so that q, k and v arrive as they are."""

    def __init__(self, found: Projections) -> None:
        self.biases = [p.bias for p in found.found if p.bias is not None and p.role != "o"]

    def __enter__(self) -> None:
        self.kept = [b.detach().clone() for b in self.biases]
        with torch.no_grad():
            for b in self.biases:
                b.zero_()

    def __exit__(self, *_: Any) -> None:
        with torch.no_grad():
            for b, kept in zip(self.biases, self.kept, strict=True):
                b.copy_(kept)


def _draw(found: Projections) -> None:
    """Weights of the size that keeps q.k near 1, and biases that are not zero: an initialisation may hide both."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in found.found:
            spread = max(p.weight.shape) ** -0.5
            p.weight.copy_(torch.randn(p.weight.shape, generator=g) * spread * 1.5)
            if p.bias is not None:
                p.bias.copy_(torch.randn(p.bias.shape, generator=g) * 0.5)


def _sample(named: dict[str, Any], n: int, batch: int) -> dict[str, Any]:
    """The arguments for one sample: tensors over the batch are cut, and their batch axis is taken off."""
    out = {}
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() >= 3 and value.shape[0] in (1, batch):
            value = value[n if value.shape[0] == batch else 0]
            value = value[0] if value.dim() == 3 and value.shape[0] == 1 else value
        out[name] = value
    return out
