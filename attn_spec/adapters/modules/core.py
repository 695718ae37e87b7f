"""A module as a function of q, k and v, and as a whole on hidden states; built anew for the sizes of each call."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.function import flat
from attn_spec.adapters.modules import bias, fused, layouts, variants
from attn_spec.adapters.modules.building import Building
from attn_spec.adapters.modules.construct import Sizes
from attn_spec.adapters.modules.errors import told_more
from attn_spec.adapters.modules.expected import triangle_of
from attn_spec.adapters.modules.forward import Forward, read
from attn_spec.adapters.modules.inject import (
    OPEN,
    Inject,
    NotInjected,
    marked,
    one_for_another,
    silent_biases,
    uncompiled,
)
from attn_spec.adapters.modules.projections import Projections
from attn_spec.adapters.modules.sessions import keeps_inside
from attn_spec.adapters.modules.temperature import Temperature
from attn_spec.conventions import Finding
from attn_spec.law import Unsupported, Violation


class ModuleFunction(Building):
    """An nn.Module class, instance or factory, called as `f(q, k, v, ...)` with q [B, H, S, D], k and v [B, Hkv, S, D].

    declared: as attn.yaml has it.  facts: what was found out, for `describe`.  batched: whether it takes a batch.
    Raises TargetError where it can't be built or its forward can't be read.
    """

    def __init__(self, target: Any, name: str, declared: Mapping[str, Any] | None = None) -> None:
        super().__init__(target, name, dict(declared or {}))
        self.facts: list[tuple[str, Finding]] = []
        self.grouping = str(self.declared.get("grouping") or "contiguous")
        self.between = ""  # what lies between the projections and q.k: "rotation", "norm" or nothing
        self.forward: Forward = read(self.module, name, self.declared)
        self.projections: Projections = self._projections(self.module)
        self.input, self.orders = str(self.declared.get("input") or "BSD"), fused.Orders()
        self.unbatched = False  # whether it runs on one sequence [S, D] and not on a batch
        from attn_spec.adapters.modules import settle  # which calls this

        settle.settle(self)
        self.__signature__ = self._signature()

    # the core: q, k, v in, heads out -------------------------------------------------------------------------------

    def _signature(self) -> inspect.Signature:
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        made = [inspect.Parameter(name, keyword) for name in ("query", "key", "value")]
        for role, name in self.forward.roles.items():
            if role == "weights" and self.by_mask:
                continue  # transformers' modules give weights in eager alone
            if role != "dropout" and name not in ("query", "key", "value"):
                made.append(inspect.Parameter(name, keyword, default=self.forward.defaults.get(name)))
        made += [inspect.Parameter(variants.PARAMETERS[role], keyword, default=None) for role in self.variants]
        if "dropout" in self.roles and self.instance is None:  # of the constructor: it is built with it, and trains
            made.append(inspect.Parameter("dropout", keyword, default=0.0))
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

    multihead = False  # whether it is torch's own nn.MultiheadAttention
    by_mask = False  # whether a causal triangle goes in as a mask, as transformers does
    bool_mask = ""  # what True means where its mask is bool: "hidden" or "seen"
    temperature: Temperature | None = None  # the learned number that multiplies normalised q.k
    gate = OPEN  # the logits that its gate gets between the projections
    resets = ""  # the method that empties it, where each call goes on from the one before
    biased = ""  # the bias by position of its own that it adds: "alibi" where names say so, "by position", or nothing
    softcap = 0.0  # of each call, where it is none of a call's
    variants: Mapping[str, str] = {}  # what can be asked for beside forward's arguments: role -> by which name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.pop("attn_spec_request", "core")
        if request != "core":
            asked: dict[str, Callable[..., Any]] = {
                "whole": self.whole,
                "weights": self.weights,
                "gradients": self.gradients,
                "between": self.arrived,
                "bias": self.own_bias,
            }
            return asked[request](*args, **kwargs)
        names = list(self.__signature__.parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k, v = (named.pop(name) for name in ("query", "key", "value"))
        return self.core(q, k, v, named)

    def core(self, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]) -> Any:
        """Attention on q, k, v as the module does it between its projections: output [B, H, S, Dv], and what else it
        returns; in training mode where a dropout is asked for."""
        causal, dropout = self._causal(named), named.pop("dropout", None)
        asked, sinks = variants.taken_from(named, self.variants)
        h, q_len, d = q.shape[1:]
        if q_len != k.shape[2] and not self.takes_context:
            raise Unsupported("queries and keys come from one sequence")
        cross = self.forward.context_required or (bool(self.forward.context) and q_len != k.shape[2])
        sizes = self.sizes_for(
            h, k.shape[1], d, v.shape[3], max(q_len, k.shape[2]), causal=causal, cross=cross, **asked
        )
        sizes = sizes if dropout is None else dataclasses.replace(sizes, dropout=dropout)
        module = self.built(sizes, q.dtype).train(dropout is not None)
        try:
            with variants.given_sinks(module, sinks):
                return self._between(module, sizes, q, k, v, named)
        finally:
            module.eval()

    def _between(
        self, module: nn.Module, sizes: Sizes, q: Tensor, k: Tensor, v: Tensor, named: dict[str, Any]
    ) -> list[Tensor]:
        b = len(q)
        if self.input == "SD" or not b:
            if not b:
                raise Unsupported("no sample to call it on")
            each = [
                self._once(module, sizes, q[n : n + 1], k[n : n + 1], v[n : n + 1], one_sample(named, n, b))
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
        if self.temperature is not None:
            q_seen, k_seen = found
            factor = self.temperature.of(self.built(self._sizes_like(q, k, v), q.dtype)).double()
            return [q_seen.double() * factor.reshape(-1, 1, 1) * q.shape[-1] ** 0.5, k_seen.double()]
        return list(found)

    def own_bias(self, q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Tensor:
        """What it adds to the scores of a call of these shapes by itself [1, H, Sq, Sk]."""
        flag = self.forward.roles.get("causal", "is_causal" if self.causal_by else "")
        return bias.observed(self, q, k, v, {**({flag: False} if flag else {}), **named})

    def _sizes_like(self, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
        causal = False if self._causal_of_constructor else None
        return self.sizes_for(
            q.shape[1], k.shape[1], q.shape[3], v.shape[3], max(q.shape[2], k.shape[2]), causal=causal
        )

    def _causal(self, named: dict[str, Any]) -> bool | None:
        """The causal flag that goes to the constructor; None where the constructor has none."""
        if self.causal_by == "constructor" and "causal" not in self.forward.roles:
            return bool(named.pop("is_causal", False))
        return None

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
        meeting = Inject(found, fill=fill, orders=self.orders, batch_first=self.input != "SBD", gate=self.gate)
        try:
            with silent_biases(found), uncompiled(), meeting:
                returned = self._call(module, sizes, inputs, named, q)
        except (NotInjected, Violation):
            if not meeting.stands_for_another():
                raise
        if used := meeting.stands_for_another():
            raise one_for_another(found, *used)
        if not meeting.filled:
            raise NotInjected("its projections were not used in forward")
        tensors = self.tensors(returned)
        merged = meeting.merged if meeting.merged is not None else layouts.unlaid(tensors[0], self.input)
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
        return layouts.laid(x, self.input)

    def _call(
        self, module: nn.Module, sizes: Sizes, inputs: dict[str, Tensor], named: dict[str, Any], like: Tensor
    ) -> Any:
        """Call forward with the inputs, what is asked for, and what each call gets."""
        length = layouts.length(next(iter(inputs.values())), self.input)
        zeros = self.forward.zeros(next(iter(inputs.values())), 1 if self.input == "SD" else len(like))
        given = {**self.forward.extras(like.detach(), length, sizes.head_dim, sizes.words), **zeros, **named}
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
            if self.resets:
                getattr(module, self.resets)()
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
        name, causal = self.forward.roles["mask"], given.pop("is_causal", False) or bool(triangle_of(self.module))
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
        if self.bool_mask:
            hidden = mask <= low / 2
            if bool(mask[~hidden].any()):
                raise Unsupported("its mask is bool: it takes no bias")
            return {**given, name: hidden if self.bool_mask == "hidden" else ~hidden}
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
        _, sinks = variants.taken_from(named, self.variants)
        module = self.built(sizes, x.dtype)
        module.train(train)
        try:
            with variants.given_sinks(module, sinks):
                return self._whole_batch(module, sizes, x, context, named)
        finally:
            module.eval()

    def _whole_batch(
        self, module: nn.Module, sizes: Sizes, x: Tensor, context: Tensor | None, named: dict[str, Any]
    ) -> list[Tensor]:
        if self.input == "SD":
            each = [
                self._whole(
                    module,
                    sizes,
                    x[n : n + 1],
                    context if context is None else context[n : n + 1],
                    one_sample(named, n, len(x)),
                )
                for n in range(len(x))
            ]
            return [torch.stack(parts) for parts in zip(*each, strict=True)]
        returned = self._whole(module, sizes, x, context, named)
        return [layouts.unlaid(returned[0], self.input), *returned[1:]]

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

    def forwarded(
        self, x: Tensor, context: Tensor | None = None, *, sizes: Sizes, **named: Any
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What forward is called with on hidden states: arguments and keywords, once for each call of it."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        module = self.built(sizes, x.dtype)
        hook = module.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        try:
            self.whole(x, context, sizes=sizes, **named)
        finally:
            hook.remove()
        return seen

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
                if not out.requires_grad and keeps_inside(self):
                    raise Unsupported("it writes to its own cache and gives no gradient: it is for inference alone")
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


def one_sample(named: dict[str, Any], n: int, batch: int) -> dict[str, Any]:
    """The arguments for one sample: tensors over the batch are cut, and their batch axis is taken off."""
    out = {}
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim() >= 3 and value.shape[0] in (1, batch):
            value = value[n if value.shape[0] == batch else 0]
            value = value[0] if value.dim() == 3 and value.shape[0] == 1 else value
        out[name] = value
    return out
