"""What an eager module or function computes on the way: every torch call with what it took and gave.

A `TorchFunctionMode` sees each call into torch that Python makes, and the code is not changed for it. Tensors are
copied as they are at that moment, so what is later changed in place shows as it was. What no Python call makes, the
inside of a fused kernel, is not seen.
"""

from __future__ import annotations

import contextlib
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

if TYPE_CHECKING:
    from attn_spec.trace.core import Core

TORCH = str(Path(torch.__file__).parent)
ADAPTERS = str(Path(__file__).parent / "adapters")  # between a target and the command that runs it
OWN_NAMESPACES = ("aten", "prims", "prim")
# kernels of torch that hold a whole attention
OPAQUE = ("_flash_attention", "_efficient_attention", "_scaled_dot_product", "_native_multi_head", "_cudnn_attention")
BLANK = ("empty", "new_empty", "zeros", "new_zeros")  # calls that make room for a result


@dataclass(frozen=True)
class Where:
    """The line of the user's code that made a call: file, line number, source text, and the module that was running."""

    file: str
    line: int
    text: str
    module: str = ""

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    @property
    def quoted(self) -> str:
        """The line with its source, for a sentence; "" where there is none."""
        text = f"{self.text[:57]}..." if len(self.text) > 60 else self.text
        return f"{self} (`{text}`)" if text else str(self) if self.line else ""


@dataclass(eq=False)
class Seen:
    """A tensor as it was when a call took or gave it.

    value: a detached copy.  stride, contiguous: of the original.  made_by: the call that gave it, None for what came
    from outside.  name: of the argument, parameter or buffer that it is; "" for others.
    """

    value: Tensor
    stride: tuple[int, ...]
    contiguous: bool
    made_by: Call | None = None
    name: str = ""
    parameter: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


@dataclass(eq=False)
class Call:
    """One call into torch: its name, arguments with `Seen` for each tensor, results, source line; `error` if it raised.

    name: without module and underscores, as in "matmul", "masked_fill", "softmax", "T".  function: the whole name.
    opaque: the inside of it can't be seen.
    """

    name: str
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: Where
    taken: list[Seen]
    given: list[Seen] = field(default_factory=list)
    error: BaseException | None = None
    opaque: bool = False

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that it took, in order, as they were."""
        return [seen.value for seen in self.taken]

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that it gave, or changed in place, as they were."""
        return [seen.value for seen in self.given]

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument by its place or name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


@dataclass(eq=False)
class Recording:
    """One run: its calls in order, what it returned, or the error it raised.

    arguments: the tensors that it was called with, by name.  training: whether it ran as a module in training mode.
    """

    calls: list[Call]
    returned: Any = None
    error: BaseException | None = None
    error_where: Where | None = None
    arguments: dict[str, Seen] = field(default_factory=dict)
    given_back: list[Seen] = field(default_factory=list)  # the tensors of `returned`
    training: bool = False

    @cached_property
    def cores(self) -> list[Core]:
        """Each attention in it, in order: softmax, SDPA or fused call with the tensors around it."""
        from attn_spec.trace.search import cores

        return cores(self)

    @property
    def core(self) -> Core | None:
        """The first attention in it; None where there is none."""
        return self.cores[0] if self.cores else None


def capture(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Recording:
    """Run a function or nn.Module and record every torch call; an exception of its own ends up in `.error`.

    Results are those of a run without it, bit for bit, with two exceptions: what torch.compile has compiled is run as
    written, and nn.MultiheadAttention and nn.TransformerEncoderLayer, which have a fused path for inference, take the
    one that they take in training.
    """
    recorder = _Recorder()
    recorder.know(function if isinstance(function, nn.Module) else getattr(function, "__self__", None))
    arguments = {name: recorder.argument(x, name) for name, x in _named(function, args, kwargs)}
    recording = Recording(recorder.calls, arguments=arguments, training=getattr(function, "training", False) is True)
    with _as_written():
        try:
            with recorder:
                recording.returned = function(*args, **kwargs)
        except Exception as error:
            recording.error = error
            recording.error_where = _raised_at(error)
    recording.given_back = [recorder.seen(x) for x in tensors_in(recording.returned)]
    return recording


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (t for item in value.values() for t in tensors_in(item))
    elif isinstance(value, (tuple, list)):
        yield from (t for item in value for t in tensors_in(item))


# the recorder --------------------------------------------------------------------------------------------------------


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.names: dict[int, str] = {}  # of modules, parameters and buffers, by id
        self._known: dict[int, tuple[Tensor, int | None, Seen]] = {}  # holds the tensor, so that its id stays its own
        self._sharing: dict[int, list[int]] = {}  # storage -> the ids of tensors in it

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # composite: its softmax and matmuls are what is wanted
            with self:
                return _opened(func)(*args, **kwargs)
        if any(_is_mapped(x) for x in tensors_in((args, kwargs))):  # inside vmap: it can't be kept
            return func(*args, **kwargs)
        where = self._where()
        before = [(x, _version(x), self.seen(x)) for x in tensors_in((args, kwargs))]
        name = _name(func)
        call = Call(name.short, name.whole, self._tree(args), self._tree(kwargs), where, [seen for *_, seen in before])
        call.opaque = name.opaque
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            call.error = error
            self.calls.append(call)
            raise
        for x, version, seen in before:
            if _version(x) != version or (version is None and name.in_place):
                self._changed(x, seen, call)
        for x in tensors_in(result):
            known = self._known.get(id(x))
            if known is None or known[2].made_by is not call:
                same = known is not None and known[1] == _version(x)  # `contiguous` gives what it got
                call.given.append(known[2] if known is not None and same else self._keep(x, call))
        if call.given:
            self.calls.append(call)
        return result

    def know(self, module: Any) -> None:
        """Learn the names of a module's parts."""
        if isinstance(module, nn.Module):
            for name, part in module.named_modules():
                self.names.setdefault(id(part), name or type(module).__name__)
            for name, x in [*module.named_parameters(), *module.named_buffers()]:
                self.names.setdefault(id(x), name)

    def argument(self, x: Tensor, name: str) -> Seen:
        self.names.setdefault(id(x), name)
        return self.seen(x)

    def seen(self, x: Tensor) -> Seen:
        """The record of a tensor as it is now."""
        known = self._known.get(id(x))
        if known is None:
            return self._keep(x, None)
        known[2].name = known[2].name or self.names.get(id(x), "")  # met before its module ran
        made = known[2].made_by
        if made is not None and made.name.startswith(BLANK):  # a kernel may fill it, and no call shows that
            return known[2] if _equal(known[2].value, x.detach()) else self._keep(x, None)
        return known[2] if known[1] == _version(x) and known[1] is not None else self._keep(x, made)

    def _keep(self, x: Tensor, made_by: Call | None) -> Seen:
        parameter = isinstance(x, nn.Parameter)
        with torch.no_grad():
            value = x.detach() if parameter else x.detach().clone()  # a forward pass leaves parameters alone
        dense = x.layout == torch.strided
        name = self.names.get(id(x), "")
        seen = Seen(value, x.stride() if dense else (), dense and x.is_contiguous(), made_by, name, parameter)
        if id(x) not in self._known and (storage := _storage(x)):
            self._sharing.setdefault(storage, []).append(id(x))
        self._known[id(x)] = (x, _version(x), seen)
        return seen

    def _changed(self, x: Tensor, was: Seen, call: Call) -> None:
        """Take note of a change in place, of the tensor and of all that lie in the same memory."""
        if (known := self._known.get(id(x))) is None or known[2].made_by is not call:
            call.given.append(self._keep(x, call))
        for other in self._sharing.get(_storage(x), []):
            y, _, seen = self._known[other]
            if y is x or seen.made_by is call:
                continue
            if _equal(seen.value, y.detach()):  # another part of the memory
                self._known[other] = (y, _version(y), seen)
            else:
                self._keep(y, call)

    def _tree(self, value: Any) -> Any:
        """Arguments with the record of each tensor in its place."""
        if isinstance(value, Tensor):
            return self.seen(value)
        if isinstance(value, dict):
            return {key: self._tree(item) for key, item in value.items()}
        return tuple(self._tree(item) for item in value) if isinstance(value, (tuple, list)) else value

    def _where(self) -> Where:
        """The innermost line outside torch, and the innermost module whose forward is running."""
        frame: types.FrameType | None = sys._getframe(2)
        line: tuple[str, int] | None = None
        inside: tuple[str, int] | None = None  # torch's own, where the whole target is torch's
        running, outermost = None, None
        while frame is not None and frame.f_code is not capture.__code__:
            file = frame.f_code.co_filename
            if line is None and file != __file__:
                if not file.startswith((TORCH, ADAPTERS)):
                    line = (file, frame.f_lineno)
                elif inside is None and not file.endswith("overrides.py"):
                    inside = (file, frame.f_lineno)
            if frame.f_code.co_name == "forward" and isinstance(module := frame.f_locals.get("self"), nn.Module):
                running, outermost = running or module, module
            frame = frame.f_back
        if outermost is not None and id(outermost) not in self.names:
            self.know(outermost)
        file, number = line or inside or ("", 0)
        return Where(file, number, linecache.getline(file, number).strip(), self.names.get(id(running), ""))


def _named(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, by parameter name."""
    try:
        own = function.forward if isinstance(function, nn.Module) else function
        bound: Mapping[str, Any] = inspect.signature(own).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # torch's own functions have no signature
        bound = {**{f"argument {n}": x for n, x in enumerate(args)}, **kwargs}
    for name, value in bound.items():
        found = list(tensors_in(value))
        yield from ((name if len(found) == 1 else f"{name}[{n}]", x) for n, x in enumerate(found))


def _as_written() -> contextlib.AbstractContextManager[Any]:
    """Run compiled code as it was written: torch.compile would trace the recorder with it."""
    set_stance = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on
    compiles = {"torch._dynamo", "torch.nn.attention.flex_attention"} & sys.modules.keys()
    if set_stance is None or not compiles:  # it would import the compiler, which is slow
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = set_stance("force_eager")
    return context


@lru_cache(maxsize=4)
def _opened(function: Any) -> Callable[..., Any]:
    """A copy of a composite of torch that does not hand itself over again, so that its inner calls are seen."""
    inner = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, inner, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@dataclass(frozen=True)
class _Name:
    short: str
    whole: str
    opaque: bool
    in_place: bool


@lru_cache(maxsize=1024)
def _name(function: Any) -> _Name:
    whole = resolve_name(function) or getattr(function, "__name__", None) or str(function)
    opaque = isinstance(function, torch._ops.HigherOrderOperator)
    parts = whole.split(".")
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        space, parts = parts[0], parts[:2]  # namespace.name, then the overload
        opaque = space not in OWN_NAMESPACES or parts[-1].startswith(OPAQUE)
    accessor = parts[-1] in ("__get__", "__set__")
    raw = parts[-2] if accessor else parts[-1]
    in_place = raw == "__setitem__" or parts[-1] == "__set__" or (raw.endswith("_") and not raw.endswith("__"))
    return _Name(raw.strip("_") if not opaque else raw, whole, opaque, in_place)


def _version(x: Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not count (inference mode)."""
    return None if x.is_inference() else x._version


def _is_mapped(x: Tensor) -> bool:
    """Whether a tensor stands for one sample of a vmap or for a transformed one, and is gone after it."""
    known = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", None)
    return known is not None and bool(known(x))


def _storage(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse, and others that have none
        return 0


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN like NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _raised_at(error: BaseException) -> Where | None:
    """The innermost line outside torch that an exception passed; torch's own where there is none."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if (
            file != __file__
            and not file.startswith(ADAPTERS)
            and not (file.startswith(TORCH) and found is not None and not found.file.startswith(TORCH))
        ):
            found = Where(file, line, linecache.getline(file, line).strip())
        trace = trace.tb_next
    return found
