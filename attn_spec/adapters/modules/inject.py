"""The run in which a module's projections give way: what they give is replaced by the q, k and v of a problem.

Every call of torch that takes a projection's weight, or a view of it, is met on its way (`TorchFunctionMode`), whether
it is a Linear, a bare parameter in a product, a Conv1D or a slice of a packed matrix. So the code between the
projections and the output projection becomes a function of q, k and v, and nothing of the module is changed.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attn_spec.adapters.modules.fused import Orders
from attn_spec.adapters.modules.projections import Projection, Projections
from attn_spec.law import Unsupported, Violation


class NotInjected(Exception):  # noqa: N818
    """What a projection gives does not fit the q, k or v that is to stand for it."""


def unguarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch written in Python, without its own look for overrides: its inner calls are met one by one."""
    assert isinstance(function, types.FunctionType)
    inner = {**function.__globals__, "has_torch_function": lambda *_: False}
    made = types.FunctionType(function.__code__, inner, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


COMPOSITES = {F.multi_head_attention_forward: unguarded(F.multi_head_attention_forward)}
# calls that hand a weight on as it is, or a view of it
HANDS_ON = {
    *("t", "T", "mT", "H", "transpose", "permute", "view", "reshape", "chunk", "split", "narrow", "__getitem__", "to"),
    *("unsqueeze", "squeeze", "contiguous", "unbind", "detach", "expand", "__get__", "type", "float", "flatten", "dim"),
    *("unflatten", "size", "is_floating_point", "stride", "movedim", "select", "swapaxes", "data_ptr", "numel"),
    *("shape", "dtype", "device", "is_nested", "requires_grad", "ndim", "is_cuda", "layout", "is_quantized", "grad_fn"),
}


def _place(x: Tensor) -> int:
    """Where a tensor's numbers lie; 0 for one that has no numbers of its own, as inside vmap."""
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")  # of kernel 1: projections of [B, C, S] or [B, C, H, W]


def tokens(x: Tensor) -> Tensor:
    """[B, C, S], [B, C, H, W] -> [B, S, C], H * W tokens row by row."""
    return x.flatten(2).mT


@dataclass(eq=False)
class Met(TorchFunctionMode):
    """Meets the projections of a module. Subclasses say what becomes of what they give."""

    projections: Projections
    places: dict[int, list[Projection]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        gate = self.projections.gate
        for p in (*self.projections.found, *([] if gate is None else [gate])):
            self.places.setdefault(p.weight.untyped_storage().data_ptr(), []).append(p)

    def __torch_function__(
        self, func: Callable[..., Any], types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSITES:
            with self:
                return COMPOSITES[func](*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in HANDS_ON:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():  # what is looked at here is no call of the module's, to a recorder around
            used = next((x for x in (*args, *kwargs.values()) if self._is_weight(x)), None)
            given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and self._is_input(x)), None)
        if used is None:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if given is None or not isinstance(result, Tensor):
            return result
        if name in CONVOLUTIONS and result.dim() > 2:
            rows = self.met(self._which(used), used, tokens(given), tokens(result))
            return rows.mT.reshape(result.shape).contiguous()
        return self.met(self._which(used), used, given, result)

    def _is_weight(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.dim() >= 2 and _place(x) in self.places

    def _is_input(self, x: Tensor) -> bool:
        return x.dim() >= 2 and _place(x) not in self.places

    def _which(self, used: Tensor) -> list[Projection]:
        """The projections whose weight this is; where several share one storage, those that lie in it."""
        shared = self.places[used.untyped_storage().data_ptr()]
        exact = [p for p in shared if p.weight.storage_offset() == used.storage_offset()]
        return exact or shared

    def met(self, which: list[Projection], used: Tensor, given: Tensor, result: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(eq=False)
class Watch(Met):
    """Notes what each projection is given and does with it: matrix [in, out] and bias, whatever call it is made by."""

    seen: list[tuple[list[Projection], Tensor, Tensor, Tensor]] = field(
        default_factory=list
    )  # which, input, used, result

    def met(self, which: list[Projection], used: Tensor, given: Tensor, result: Tensor) -> Tensor:
        self.seen.append((which, given, used, result))
        return result


def order_of(given: Tensor) -> tuple[Tensor, Tensor] | None:
    """For each row of a projection's input the sample and the position that `marked` wrote there; None where lost."""
    rows = given.detach().reshape(-1, given.shape[-1]) if given.dim() != 2 else given.detach()
    if rows.shape[-1] < 2:
        return None
    b, s = rows[:, 0].round().long(), rows[:, 1].round().long()
    exact = bool(((rows[:, 0] - b).abs() < 1e-3).all()) and bool(((rows[:, 1] - s).abs() < 1e-3).all())
    return (b, s) if exact else None


def marked(batch: int, length: int, width: int, dtype: torch.dtype) -> Tensor:
    """Hidden states [B, S, width] of which each row says its own sample and position in the first two channels."""
    x = torch.zeros(batch, length, width, dtype=dtype)
    x[..., 0] = torch.arange(batch)[:, None]
    if width > 1:
        x[..., 1] = torch.arange(length)[None]
    return x


OPEN = 100.0  # whose sigmoid is 1 in every dtype, and that of its opposite 0


@dataclass(eq=False)
class Inject(Met):
    """Puts q, k and v in the place of what the projections give, and keeps what reaches the output projection.

    fill: role -> [B, S, width], what stands for a projection's result; "q0", "k0", ... where each head has its own.
    batch_first: whether unmarked rows run over samples first.  gate: the logits of a gate, which lets all through.
    order: that of the rows from which queries are made, by how many they are: a packed matrix makes keys too, and those
    of another sequence say nothing of the output.
    """

    fill: dict[str, Tensor] = field(default_factory=dict)
    orders: Orders = field(default_factory=Orders)
    batch_first: bool = True
    gate: float = OPEN
    order: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    merged: Tensor | None = None
    filled: set[str] = field(default_factory=set)
    read: tuple[Tensor, int, tuple[Tensor, Tensor] | None] | None = None  # the last input, as it was, and its order
    times: dict[str, int] = field(default_factory=dict)

    def stands_for_another(self) -> str:
        """Which projection was used in the place of which that was not: "qk", "qv" or "kv"; "" where each was used."""
        if len({id(p.weight) for p in self.projections.found}) < len(self.projections.found):
            return ""  # one parameter under two names, which is said elsewhere
        own = {p.role: self.times.get(p.name, 0) for p in self.projections.found if p.head is None}
        return next((a + b for a, b in ("qk", "qv", "kv") if own.get(a, 0) > 1 and own.get(b) == 0), "")

    def met(self, which: list[Projection], used: Tensor, given: Tensor, result: Tensor) -> Tensor:
        p = which[0]
        self.times[p.name] = self.times.get(p.name, 0) + 1
        if p.role == "o":
            self.merged = given if self.merged is None else self.merged
            return result
        if p.role == "g":
            return torch.full_like(result, self.gate)
        part = self._part(p, used, result)
        key = p.role if p.head is None else f"{p.role}{p.head}"
        wanted = part if part is not None else self.fill.get(key)
        if wanted is None:
            return result
        if result.shape[-1] == wanted.shape[-1] and wanted.numel() != result.numel():
            given_rows, expected = result.numel() // result.shape[-1], wanted.shape[0] * wanted.shape[1]
            raise Violation(
                f"{p.name}, which makes {' and '.join(p.role)}, is given {given_rows} rows of hidden states, "
                f"expected {expected}: "
                f"it reads another sequence than it should",
                hint="queries are made from the hidden states, keys and values from the context",
                merge="wrong-sequence",
            )
        if wanted.numel() != result.numel() or (wanted.shape[-1] != result.shape[-1] and result.dim() != 4):
            raise NotInjected(f"{p.name} gives {list(result.shape)}, where {key} is {list(wanted.shape)}")
        self.filled.add(key)
        with torch._C.DisableTorchFunction():
            order = self._order_of(given)
            whole = order is not None and self._covers(order, wanted)
        if order is not None and whole:
            if p.role == "q":
                self.order[len(order[0])] = order
            elif p.role == "qkv":  # used in parts, that of q is the first
                self.order.setdefault(len(order[0]), order)
            rows = wanted[order]
        else:
            first = wanted if self.batch_first or result.dim() == 2 else wanted.transpose(0, 1)
            rows = first.reshape(-1, wanted.shape[-1])
        if rows.shape[-1] != result.shape[-1] and result.shape[:2] != given.shape[:2]:  # [B, H, S, D]
            b, h, n, d = result.shape
            return rows.reshape(b, n, h, d).transpose(1, 2).to(result.dtype)
        return rows.reshape(result.shape).to(result.dtype)

    def _order_of(self, given: Tensor) -> tuple[Tensor, Tensor] | None:
        """The order of the rows of a projection's input, which most modules give to all three."""
        if given.is_inference():  # has no version, and may have been changed
            return order_of(given)
        if self.read is None or self.read[0] is not given or self.read[1] != given._version:
            self.read = given, given._version, order_of(given)
        return self.read[2]

    @staticmethod
    def _covers(order: tuple[Tensor, Tensor], wanted: Tensor) -> bool:
        """Whether the rows are those of every sample and position, each once."""
        b, s = wanted.shape[:2]
        places = order[0] * s + order[1]
        return len(places) == b * s and bool((places.sort().values == torch.arange(b * s)).all())

    def _part(self, p: Projection, used: Tensor, result: Tensor) -> Tensor | None:
        """What stands for a part of a packed matrix, by where in it the part lies; None where it is used as a whole."""
        whole = self.fill.get(p.role)
        if len(p.role) == 1 or p.head is not None or (whole is not None and result.shape[-1] == whole.shape[-1]):
            return None
        out_first = p.weight.shape[0] != used.shape[-1] or used.shape[0] != p.weight.shape[0]
        stride = p.weight.stride(0) if out_first else p.weight.stride(1)
        start = (used.storage_offset() - p.weight.storage_offset()) // max(stride, 1)
        return self.orders.part(p.role, self.fill, start, result.shape[-1])


def one_for_another(found: Projections, used: str, lost: str) -> Violation:
    """What says that one projection is used in the place of another, and that one nowhere; roles of the two."""
    words = {"q": "queries", "k": "keys", "v": "values"}
    kind = {"q": "query", "k": "key"}[used]
    (own,), (other,) = found.of(used), found.of(lost)
    return Violation(
        f"{own.name}, which makes the {words[used]}, makes the {words[lost]} too, and {other.name} is not used",
        hint=f"project the {words[lost]} with {other.name}",
        merge=f"{words[lost]}-by-{kind}-projection",
    )


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


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Say so where a compiler inside the module can't take what meets its projections, which is no fault of it."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("torch._dynamo"):
            raise Unsupported("its attention is compiled inside, where its projections can't give way") from error
        raise
