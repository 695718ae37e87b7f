"""The adapter of a function `f(q, k, v, ...)`: layout, names and polarity on the way in, layout on the way out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from attn_spec.adapters.implementation import Result
from attn_spec.adapters.signature import Signature
from attn_spec.conventions import Conventions
from attn_spec.law import Unsupported, Violation
from attn_spec.problem import Arguments

# canonical [B, H, S, D] -> the layout, as a permutation and as plain torch
PERMUTED = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "SBHD": (2, 0, 1, 3)}
BACK = {"BHSD": (0, 1, 2, 3), "BSHD": (0, 2, 1, 3), "SBHD": (1, 2, 0, 3)}


def into_layout(x: Tensor, layout: str) -> Tensor:
    """A canonical tensor in the layout; contiguous where it was, a view where it was one."""
    if layout == "NSD":
        return x.flatten(0, 1)
    moved = x.permute(PERMUTED[layout])
    return moved.contiguous() if x.is_contiguous() else moved


def _carry_back(passed: Tensor, x: Tensor, layout: str) -> None:
    """What the call did in place to the copy that it got is done to the argument too, so that it is seen."""
    if passed.data_ptr() != x.data_ptr() and passed._version:
        with torch.no_grad():
            x.copy_(passed.reshape(x.shape) if layout == "NSD" else passed.permute(BACK[layout]))


def poison_free_memory(arguments: Arguments) -> None:
    """Leave NaN in the memory that is likely to be handed out next, so that what is read unwritten shows."""
    b, h, q_len, kv_len = arguments.sizes
    for n in {b * h * q_len * arguments.v.shape[-1], min(b * h * q_len * kv_len, 1 << 16)}:
        arguments.q.new_full((n,), torch.nan)


@dataclass(eq=False)
class FunctionAdapter:
    """Calls `function` by its signature and conventions.

    fixed: arguments passed on each call. Parameters that are required but neutral here (a dropout of 0, no mask) are
    filled in.
    """

    takes_variants: ClassVar[bool] = True
    function: Callable[..., Any]
    signature: Signature
    conventions: Conventions = field(default_factory=Conventions)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, arguments: Arguments) -> Result:
        layout = self.conventions.layout.value
        poison_free_memory(arguments)
        if layout == "SD":
            return self._head_by_head(arguments)
        values = self._laid(arguments)
        args, kwargs = self.signature.call(values)
        returned = self.function(*args, **kwargs)
        for role, x in (("q", arguments.q), ("k", arguments.k), ("v", arguments.v)):
            _carry_back(values[self.signature.roles[role]], x, layout)
        return self.result(returned, arguments)

    def call_arguments(self, arguments: Arguments) -> tuple[list[Any], dict[str, Any]]:
        """What the function is called with, where that is one call. Raises Unsupported."""
        return self.signature.call(self._laid(arguments))

    def _laid(self, arguments: Arguments) -> dict[str, Any]:
        """The arguments of one call by parameter name, in the function's layout. Raises Unsupported."""
        layout = self.conventions.layout.value
        if layout == "SD":
            raise Unsupported("it is called once for each head")
        values = self._values(arguments)
        q, k, v, mask = arguments.q, arguments.k, arguments.v, values.get(self._mask_name(arguments))
        if layout == "NSD":
            if q.shape[1] != k.shape[1]:
                raise Unsupported("no grouped heads: q, k and v are [N, S, D]")
            if isinstance(mask, Tensor) and arguments.form != "key-padding" and mask.dim() == 4:
                b, h, _, _ = arguments.sizes
                values[self._mask_name(arguments)] = mask.expand(b, h, *mask.shape[2:]).flatten(0, 1)
        for role, x in (("q", q), ("k", k), ("v", v)):
            values[self.signature.roles[role]] = into_layout(x, layout)
        return values

    def _mask_name(self, arguments: Arguments) -> str:
        """The parameter that takes the mask of these arguments; "" where there is none."""
        roles = self.signature.roles
        if arguments.mask is None:
            return ""
        if arguments.form == "key-padding":
            return roles.get("key_padding", "")
        if arguments.form == "additive" and ("mask" not in roles or self._bias_apart(arguments)):
            return roles.get("bias", "")
        return roles.get("mask", "")

    def _bias_apart(self, arguments: Arguments) -> bool:
        """Whether what is added has a parameter of its own, beside one for bool masks, which says what is hidden."""
        apart = "bias" in self.signature.roles and self.conventions.mask_form.value == "bool"
        return apart and arguments.form == "additive"

    def _values(self, arguments: Arguments) -> dict[str, Any]:
        """Everything but q, k and v, by parameter name. Raises Unsupported where something can't be asked for."""
        roles, signature, conventions = self.signature.roles, self.signature, self.conventions
        values = at_rest(signature, self.fixed, arguments.q.shape[-1])
        always = conventions.causal.value == "always"
        if arguments.causal and not always:
            if "causal" not in roles:
                raise Unsupported("no causal parameter")
            values[roles["causal"]] = True
        elif always and not arguments.causal:
            raise Unsupported("always causal")
        elif (
            always and arguments.q.shape[2] != arguments.k.shape[2] and conventions.alignment == Conventions().alignment
        ):
            raise Unsupported("always causal, and the alignment for Sq != Sk is not declared")
        elif "causal" in roles and (signature.required("causal") or signature.default("causal")):
            values.setdefault(roles["causal"], False)
        if getattr(self.function, "one_offset", False):  # of packed samples: `attn_spec.adapters.packed`
            n_q, n_k = arguments.lengths or ((arguments.q.shape[2],), (arguments.k.shape[2],))
            if list(n_q) != list(n_k):
                raise Unsupported("as many keys as queries: one cu_seqlens is for both")
        if arguments.scale is not None:
            if "scale" not in roles:
                raise Unsupported("no scale parameter")
            values[roles["scale"]] = arguments.scale
        if arguments.mask is not None:
            values.update(self._mask_values(arguments))
        if "gqa" in roles and arguments.q.shape[1] != arguments.k.shape[1]:
            values[roles["gqa"]] = True
        if arguments.returns:
            role = arguments.returns if arguments.returns in roles else "probs"
            if role not in roles:
                raise Unsupported(f"no parameter that returns the {arguments.returns}")
            values[roles[role]] = True
        if arguments.dropout is not None:
            if "dropout" not in roles:
                raise Unsupported("no dropout parameter")
            values[roles["dropout"]] = arguments.dropout
            values |= {p.name: TRAINING[p.name] for p in signature.parameters if p.name in TRAINING}
            if "seed" in roles:
                values[roles["seed"]] = 0  # which who makes several calls changes from one to the next
        for role in ("window", "softcap", "alibi", "sinks", "lengths"):
            asked = getattr(arguments, role)
            if role == "alibi" and asked is None and signature.required(role):
                asked = arguments.q.new_zeros(arguments.q.shape[1], dtype=torch.float32)  # no slope, no bias
            if role == "alibi" and asked is not None and asked.dim() > 1 and roles.get(role) == "slopes":
                raise Unsupported("slopes [B, H], which are flash-attn's `alibi_slopes`")
            if asked is not None and role not in roles:
                raise Unsupported("no packed sequences" if role == "lengths" else f"no {role} parameter")
            if asked is not None:
                values[roles[role]] = self._window(arguments) if role == "window" else asked
        return values

    def _mask_values(self, arguments: Arguments) -> dict[str, Any]:
        """The mask, by parameter name. Raises Unsupported."""
        assert arguments.mask is not None
        name, mask, conventions = self._mask_name(arguments), arguments.mask, self.conventions
        if not name:
            form = {"key-padding": "key padding", "additive": "mask or bias", "bool": "mask"}[arguments.form or ""]
            raise Unsupported(f"no {form} parameter")
        if self._bias_apart(arguments):
            hidden = mask == -torch.inf
            if bool(((mask <= torch.finfo(mask.dtype).min / 2) & ~hidden).any()):
                raise Unsupported("a finite number for hidden keys, where a bool mask says which are hidden")
            if not bool(hidden.any()):
                return {name: mask}
            if conventions.layout.value in ("NSD", "SD"):
                raise Unsupported("a bool mask and a bias in one call, for q, k and v of fewer than four axes")
            shown = hidden if conventions.polarity.value == "masked" else ~hidden
            added = mask.masked_fill(hidden, 0.0)
            return {self.signature.roles["mask"]: shown} | ({name: added} if bool(added.any()) else {})
        takes = conventions.mask_form.value
        if arguments.form != "key-padding" and takes not in ("both", arguments.form):
            raise Unsupported(f"the mask is {takes} only")
        polarity = conventions.padding_polarity if arguments.form == "key-padding" else conventions.polarity
        inverted = mask.dtype == torch.bool and polarity.value == "masked"
        return {name: ~mask if inverted else mask}

    def _window(self, arguments: Arguments) -> Any:
        """A window as the implementation takes it. Raises Unsupported where it can't be said so."""
        assert arguments.window is not None
        (left, right), kind = arguments.window, self.conventions.window.value
        if kind == "pair":
            usual = self.signature.default("window")
            none = usual[0] if isinstance(usual, (tuple, list)) and usual else -1
            if self.signature.roles["window"] == "local_window_size":  # jax's, to which a negative number is a number
                none = arguments.q.shape[2] + arguments.k.shape[2]
            return tuple(none if n is None else n for n in (left, right))
        one_sided = right is None or arguments.causal or self.conventions.causal.value == "always"
        if left is None or (right != left if kind.endswith("both") and not arguments.causal else not one_sided):
            raise Unsupported(f"the window ({left}, {right}) can't be said by one number")
        return left if kind.startswith("left") else left + 1

    def result(self, returned: Any, arguments: Arguments) -> Result:
        """What one call returned, as [B, H, Sq, Dv] and what comes beside it. Raises Violation, Unsupported."""
        tensors = [returned] if isinstance(returned, Tensor) else flat(returned)
        if not tensors:
            raise Violation(f"returned {type(returned).__name__}, not a tensor", merge="returns")
        output, rest = tensors[0], tensors[1:]
        b, h, q_len, kv_len = arguments.sizes
        layout_out = self.conventions.layout_out.value
        if layout_out == "NSD":
            output = output.reshape(b, h, *output.shape[1:]) if output.dim() == 3 and len(output) == b * h else output
        elif output.dim() == 4:
            output = output.permute(BACK[layout_out])
        weights = next((t for t in rest if t.shape == (b, h, q_len, kv_len)), None)
        lse = next((t for t in rest if t.shape == (b, h, q_len)), None)
        if lse is None and arguments.returns == "lse":
            turned = next((t for t in rest if t.shape == (b, q_len, h)), None)
            if turned is not None and self.conventions.lse_layout.value != "BSH":
                raise Violation(
                    f"the log-sum-exp has shape [B, Sq, H] = {list(turned.shape)}, expected [B, H, Sq]",
                    hint="if it is meant, declare `lse_layout: BSH` in attn.yaml",
                    merge="lse-shape",
                )
            flat_heads = next((t for t in rest if t.shape == (b * h, q_len)), None)
            lse = turned.mT if turned is not None else flat_heads
            lse = lse if lse is None or lse.dim() == 3 else lse.reshape(b, h, q_len)
        if weights is None and arguments.returns == "weights" and "weights" not in self.signature.roles:
            raise Unsupported("the parameter is flash-attn's, which returns weights for its own tests only")
        if lse is not None and natural(self.conventions) != 1:
            lse = lse * natural(self.conventions)
        return Result(output, weights if arguments.returns != "lse" else None, lse)

    def _head_by_head(self, arguments: Arguments) -> Result:
        """A function of [S, D] matrices, called once for each sample and head."""
        b, h, _, _ = arguments.sizes
        if h != arguments.k.shape[1]:
            raise Unsupported("no grouped heads: q, k and v are [S, D]")
        values = self._values(arguments)
        name, mask = self._mask_name(arguments), arguments.mask
        outputs = []
        for n in range(b):
            for m in range(h):
                for role, x in (("q", arguments.q), ("k", arguments.k), ("v", arguments.v)):
                    values[self.signature.roles[role]] = x[n, m]
                if isinstance(mask, Tensor) and arguments.form != "key-padding":
                    full = mask.expand(b, h, *mask.shape[-2:]) if mask.dim() > 2 else mask.expand(b, h, *mask.shape)
                    values[name] = full[n, m]
                elif isinstance(mask, Tensor):
                    values[name] = values[name][n] if values[name].dim() > 1 else values[name]
                args, kwargs = self.signature.call(values)
                tensors = flat(self.function(*args, **kwargs))
                if not tensors:
                    raise Violation("returned no tensor", merge="returns")
                outputs.append(tensors[0])
        if not outputs:
            raise Unsupported("no sample to call a function of [S, D] on")
        return Result(torch.stack(outputs).reshape(b, h, *outputs[0].shape))

    def source(self, arguments: Arguments) -> str:
        """The call as a line of plain torch over impl, q, k, v, mask, alibi and sinks."""
        layout, layout_out = self.conventions.layout.value, self.conventions.layout_out.value
        moved = {"BHSD": "{}", "NSD": "{}.flatten(0, 1)", "SD": "{}[b, h]"}.get(layout)
        if moved is None:
            moved = f"{{}}.permute{PERMUTED[layout]}.contiguous()"
        values = self._values(arguments)
        for role in ("q", "k", "v"):
            values[self.signature.roles[role]] = Code(moved.format(role))
        name = self._mask_name(arguments)
        if name:
            text = "mask" if values.get(name) is arguments.mask else "~mask"
            by_head = arguments.form != "key-padding"
            if layout == "NSD" and by_head and arguments.mask is not None and arguments.mask.dim() == 4:
                text = f"({text}).expand(*q.shape[:2], -1, -1).flatten(0, 1)"
            elif layout == "SD":
                text = f"({text}).expand(*q.shape[:2], -1, -1)[b, h]" if by_head else f"({text})[b]"
            if self._bias_apart(arguments) and self.signature.roles["mask"] in values:
                shown = "==" if self.conventions.polarity.value == "masked" else "!="
                text = "mask.masked_fill(mask == -torch.inf, 0.0)" if name in values else ""
                values[self.signature.roles["mask"]] = Code(f"mask {shown} -torch.inf")
            if text:
                values[name] = Code(text)
        for role in ("alibi", "sinks"):
            if getattr(arguments, role) is not None:
                values[self.signature.roles[role]] = Code(role)
            elif role == "alibi" and self.signature.required(role):
                values[self.signature.roles[role]] = Code("torch.zeros(q.shape[1], device=q.device)")
        args, kwargs = self.signature.call(values)
        call = f"impl({', '.join([repr(a) for a in args] + [f'{key}={value!r}' for key, value in kwargs.items()])})"
        if layout == "SD":
            return f"torch.stack([torch.stack([{call} for h in range(q.shape[1])]) for b in range(len(q))])"
        if layout_out == "NSD":
            return f"{call}.unflatten(0, q.shape[:2])"
        return call if layout_out == "BHSD" else f"{call}.permute{BACK[layout_out]}"


def natural(conventions: Conventions) -> float:
    """What a returned log-sum-exp is multiplied by to be a natural logarithm."""
    return {"2": math.log(2), "10": math.log(10)}.get(conventions.lse_base.value, 1.0)


class Code(str):
    """A piece of source that prints as it is."""

    def __repr__(self) -> str:
        return str(self)


# what is passed for a parameter that is required but that the problem does not use
NEUTRAL: dict[str, Any] = {
    "mask": None,
    "key_padding": None,
    "bias": None,
    "dropout": 0.0,
    "seed": 0,
    "window": None,
    "softcap": None,
    "alibi": None,
    "sinks": None,
    "gqa": False,
    "lse": False,
    "weights": False,
    "probs": False,
    "ignored": False,
}


# what says, beside a rate, that it is to be heeded
TRAINING = {"training": True, "train": True, "is_training": True, "deterministic": False}


def at_rest(signature: Signature, fixed: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """What is passed whatever is asked, by parameter name: the fixed arguments, no dropout, and what is required."""
    roles = signature.roles
    values = {roles[role]: neutral for role, neutral in NEUTRAL.items() if signature.required(role)}
    if signature.default("dropout"):
        values[roles["dropout"]] = 0.0
    if signature.required("scale"):
        values[roles["scale"]] = head_dim**-0.5
    return {**values, **fixed}


# what the output is called among other things that are returned by name
OUTPUTS = ("output", "attn_output", "attention_output", "out", "hidden_states", "last_hidden_state", "hidden", "y")


def flat(returned: Any) -> list[Tensor]:
    """The tensors of a returned tuple, list, mapping or dataclass, in order; what is named as the output first."""
    if isinstance(returned, Tensor):
        return [returned]
    if dataclasses.is_dataclass(returned) and not isinstance(returned, (type, Mapping)):
        returned = {f.name: getattr(returned, f.name, None) for f in dataclasses.fields(returned)}
    elif hasattr(returned, "_asdict"):  # a named tuple
        returned = returned._asdict()
    if isinstance(returned, Mapping):
        named = next((name for name in OUTPUTS if isinstance(returned.get(name), Tensor)), None)
        returned = [*([] if named is None else [returned[named]]), *(x for n, x in returned.items() if n != named)]
    if isinstance(returned, (tuple, list)):
        return [t for t in returned if isinstance(t, Tensor)]
    return []
