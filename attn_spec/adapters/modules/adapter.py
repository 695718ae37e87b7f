"""The adapter of a module: what its names and buffers let expect, which masks it takes, and problems made to fit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.function import FunctionAdapter, flat
from attn_spec.adapters.hf_interface import from_interface, is_interface
from attn_spec.adapters.implementation import Result
from attn_spec.adapters.modules.bias import added_to
from attn_spec.adapters.modules.construct import is_factory
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.modules.expected import triangle_of
from attn_spec.adapters.modules.forward import LENGTHS
from attn_spec.adapters.modules.padding import lengths_of
from attn_spec.adapters.modules.plain import as_function
from attn_spec.law import Unsupported
from attn_spec.masks import Alibi, Documents, Lengths, Part
from attn_spec.problem import Arguments, Problem

SHAPES = ("BHQK", "B1QK", "B11K", "HQK", "QK")  # of a mask; BK, a key padding, is tried apart
KEPT = 64  # q and k whose arrival is remembered


def callable_of(target: Any, name: str, declared: Mapping[str, Any] | None = None) -> Any:
    """A module class, instance or factory as a function of q, k and v; anything else as it is. Raises TargetError."""
    if isinstance(target, nn.Module) or (isinstance(target, type) and issubclass(target, nn.Module)):
        name = name or _name(target)
        return as_function(target, name, declared or {}) or ModuleFunction(target, name, declared)
    if is_interface(target):
        return from_interface(target)
    if is_factory(target):
        return ModuleFunction(target, name or _name(target), declared)
    return target


def _name(target: Any) -> str:
    return type(target).__name__ if isinstance(target, nn.Module) else str(getattr(target, "__name__", "module"))


@dataclass(eq=False)
class ModuleAdapter(FunctionAdapter):
    """Calls a `ModuleFunction` on q, k and v.

    module: what was found out about it, on this side.  shapes: of the masks that it takes; None: whatever it is given.
    forms: in which.  padding: whether the mask parameter takes a key padding [B, Sk].  three_axes: whether a mask that
    is the same for all heads goes in as [B, Sq, Sk].  padding_dtype: of that key padding, 1 for a real key where it is
    no bool.  no_padding: why its key padding is not judged.  gives_weights: whether weights are returned unasked.
    settling: while what it takes is found out.
    """

    module: ModuleFunction | None = None
    shapes: tuple[str, ...] | None = None
    forms: tuple[str, ...] = ("bool", "additive")
    padding: bool = False
    three_axes: bool = False
    padding_dtype: torch.dtype = torch.bool
    no_padding: str = ""
    gives_weights: bool = False
    settling: bool = False
    _arrived: dict[tuple[Any, ...], Any] = field(default_factory=dict, repr=False)

    def fit(self, problem: Problem) -> Problem:
        """The problem with the sizes that the module can be built for."""
        assert self.module is not None
        p, f = problem, self.module
        heads, kv_heads, head_dim, v_dim = f.fit(p.heads, p.kv_heads, p.head_dim, p.v_dim)
        if f.between == "rotation" and head_dim % 2 and f.instance is None:  # channels are rotated in pairs
            head_dim, v_dim = head_dim + 1, v_dim + (v_dim == head_dim)
        changes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "v_dim": v_dim}
        if not f.takes_context and p.q_len != p.kv_len:
            changes["q_len"] = changes["kv_len"] = max(p.q_len, p.kv_len)
            changes["mask"] = tuple(_square(part, p.q_len > p.kv_len) for part in p.mask)
        if "alibi" in f.variants and p.alibi is not None and not p.alibi.batched:
            if "heads" in f.roles and f.instance is None:  # where H is no power of two, rules for slopes differ
                changes["heads"] = 1 << (heads - 1).bit_length()
                changes["kv_heads"] = changes["heads"] if kv_heads == heads else 1 << (kv_heads.bit_length() - 1)
            changes["mask"] = tuple(
                Alibi(standard=True) if isinstance(part, Alibi) else part for part in changes.get("mask", p.mask)
            )
        changes = {name: value for name, value in changes.items() if value != getattr(p, name)}
        return p.replace(**changes) if changes else p

    def why_not(self, role: str) -> str:
        """Why a variant can't be asked for."""
        if role == "window" and self.module is not None and self.module.by_mask:
            return "no window parameter: its window lies in the mask that its model builds"
        if role == "window" and self.module is not None and "window" in self.module.variants:
            return "its window is none of so many keys by distance, so nothing says which keys it should hold"
        return f"no {role} parameter"

    def _window(self, arguments: Arguments) -> Any:
        said = super()._window(arguments)
        if said == 0 and self.module is not None and "window" in self.module.variants:
            raise Unsupported("a window of 0 before the query's own, which a constructor may read as none")
        return said

    def result(self, returned: Any, arguments: Arguments) -> Result:
        result = super().result(returned, arguments)
        b, _, q_len, kv_len = arguments.sizes
        if (
            self.conventions.empty_rows.value != "nan"
            and "bool" in self.forms
            and _nan_as_given(result, arguments, self.three_axes)
        ):
            raise Unsupported("a row of its additive mask that is -inf throughout gives NaN, as it was given")
        averaged = any(x.shape == (b, q_len, kv_len) for x in flat(returned)[1:])
        if arguments.returns == "weights" and result.weights is None and averaged:
            raise Unsupported("weights are returned as their average over the heads")
        return result

    def asked(self, arguments: Arguments) -> dict[str, Any]:
        """What forward gets beside its inputs, by name. Raises Unsupported where something can't be asked for."""
        values = self._values(arguments)
        tensors = {self.signature.roles[role] for role in "qkv"}
        return {name: value for name, value in values.items() if name not in tensors}

    def effective(self, arguments: Arguments) -> Arguments:
        """The arguments as they arrive at q.k, rotated or normalised, and with what the module adds to each call."""
        if self.module is None:
            return arguments
        arrived = self._arriving(arguments) if self.module.between else arguments
        if self.module.biased and arguments.alibi is None:
            arrived = added_to(arrived, self._own_bias(arguments))
        if self.module.softcap and arguments.softcap is None:
            arrived = arrived.replace(softcap=self.module.softcap)
        return arrived

    def own_bias(self, arguments: Arguments, **named: Any) -> Tensor:
        """What the module adds to the scores of a call of these shapes by itself [1, H, Sq, Sk]. Raises Unsupported."""
        assert self.module is not None
        q, k = (x.detach().contiguous() for x in (arguments.q, arguments.k))
        width = self.module.fit(q.shape[1], k.shape[1], q.shape[3], q.shape[3])[3]
        v = k.new_zeros(*k.shape[:3], width)
        seen: Tensor = self.function(q, k, v, attn_spec_request="bias", **named)
        return seen

    def _own_bias(self, arguments: Arguments) -> Tensor:
        key = ("bias", arguments.q.dtype, arguments.sizes[1:], arguments.k.shape[1], arguments.q.shape[3])
        if key not in self._arrived:
            self._keep(key, self.own_bias(arguments))
        found: Tensor = self._arrived[key]
        return found

    def _keep(self, key: tuple[Any, ...], value: Any) -> None:
        if len(self._arrived) >= KEPT:
            del self._arrived[next(iter(self._arrived))]
        self._arrived[key] = value

    def _arriving(self, arguments: Arguments) -> Arguments:
        q, k = (x.detach().contiguous() for x in (arguments.q, arguments.k))
        key = (q.dtype, q.shape, k.shape, *_mark(q), *_mark(k))
        if key not in self._arrived:
            self._keep(key, self.function(q, k, k, attn_spec_request="between"))
        q, k = self._arrived[key]
        return arguments.replace(q=q, k=k)

    def _mask_name(self, arguments: Arguments) -> str:
        if arguments.form == "key-padding" and self.no_padding:
            raise Unsupported(self.no_padding)
        name = super()._mask_name(arguments)
        if not name and self.padding and arguments.form == "key-padding":
            return self.signature.roles["mask"]
        return name

    def _values(self, arguments: Arguments) -> dict[str, Any]:
        mask = arguments.mask
        if arguments.returns == "weights" and self.gives_weights and "weights" not in self.signature.roles:
            arguments = arguments.replace(returns="")
        if self.three_axes and mask is not None and mask.dim() == 4 and arguments.form != "key-padding":
            if mask.shape[1] > 1:
                raise Unsupported("its mask is [B, Sq, Sk], the same for all heads")
            arguments = arguments.replace(mask=mask[:, 0].expand(-1, arguments.q.shape[2], -1))
        if arguments.causal and self.module is not None and self.module.by_mask and _holds_the_lowest(mask):
            raise Unsupported("the triangle goes in with the mask, whose lowest number stands for it too")
        if self.module is not None and self.module.by_mask and not self.settling and _empties(arguments):
            if arguments.q.dtype == torch.float16:
                raise Unsupported("float16's lowest number, -65504, leaves the logits of a row that it hides whole in")
            if triangle_of(self.module.module):
                raise Unsupported(
                    "its own triangle and the lowest number in a mask add up in a row that is hidden whole"
                )
        if arguments.window is not None and "window" not in self.signature.roles:
            raise Unsupported(self.why_not("window"))
        values = super()._values(arguments)
        if mask is not None and arguments.form != "key-padding" and self.shapes is not None:
            shape = shape_of(mask, arguments.q.shape[1], arguments.q.shape[2])
            if shape not in self.shapes:
                raise Unsupported(f"its mask takes {', '.join(self.shapes) or 'no mask of q by k'}, not {shape}")
            if arguments.form not in self.forms:
                raise Unsupported(f"its mask is {' or '.join(self.forms)}, not {arguments.form}")
        if arguments.form == "key-padding" and mask is not None and self._mask_name(arguments) in LENGTHS:
            values[self._mask_name(arguments)] = lengths_of(mask)
        elif arguments.form == "key-padding" and self.padding_dtype != torch.bool:
            name = self._mask_name(arguments)
            values[name] = values[name].to(self.padding_dtype)
        return values


def _square(part: Part, queries: bool) -> Part:
    """A part of a mask with as many queries as keys: those of the longer side."""
    if isinstance(part, Documents) and part.q_lengths:
        return Documents(part.q_lengths if queries else part.lengths)
    if isinstance(part, Lengths):
        return Lengths(*(part.q_lengths if queries else part.kv_lengths,) * 2)
    return part


def _holds_the_lowest(mask: Tensor | None) -> bool:
    if mask is None or not mask.is_floating_point() or not bool(mask.isfinite().all()):
        return False
    return bool((mask <= torch.finfo(mask.dtype).min).any())


def _nan_as_given(result: Result, arguments: Arguments, three_axes: bool) -> bool:
    """Whether the output is NaN in the rows alone whose additive mask is -inf throughout, and there are some."""
    mask, (b, h, q_len, kv_len) = arguments.mask, arguments.sizes
    if arguments.form != "additive" or mask is None or result.output.shape[:3] != (b, h, q_len):
        return False
    if mask.dim() == 3:
        mask = mask[:, None] if three_axes else mask[None]
    if mask.dim() not in (2, 4) or not kv_len:
        return False
    empty = (mask == -torch.inf).all(-1).expand(b, h, q_len)
    broken = result.output.detach().isnan()
    return bool(empty.any()) and torch.equal(broken.any(-1), empty) and torch.equal(broken.all(-1), empty)


def _empties(arguments: Arguments) -> bool:
    """Whether a mask and causality hide all keys of a row."""
    mask, (_, _, q_len, kv_len) = arguments.mask, arguments.sizes
    if mask is None:
        return False
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min / 2
    if arguments.form == "key-padding":
        seen = seen[:, None, None]
    if arguments.causal:
        seen = seen & torch.ones(q_len, kv_len, dtype=torch.bool).tril()
    return not bool(seen.any(-1).all())


def _mark(x: Tensor) -> tuple[float, float]:
    """Two numbers by which one tensor is told from another."""
    flat = x.double().flatten()
    step = torch.arange(1, len(flat) + 1, dtype=torch.float64)
    return float(flat @ torch.cos(step)), float(flat @ torch.sin(0.7 * step))


def shape_of(mask: Tensor, heads: int, q_len: int) -> str:
    """The shape of a mask in letters, in which an axis of size 1 broadcasts."""
    if mask.dim() == 4:
        per_head, per_query = mask.shape[1] > 1 or heads == 1, mask.shape[2] > 1 or q_len == 1
        if mask.shape[1] == 1:
            return "B1QK" if per_query and mask.shape[2] == q_len and q_len > 1 else "B11K"
        return "BHQK" if per_head else "B1QK"
    return {3: "HQK", 2: "QK"}.get(mask.dim(), f"{mask.dim()} axes")


# which masks it takes ------------------------------------------------------------------------------------------------
