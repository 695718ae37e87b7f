"""The user's function in a process of its own: what crashes, hangs or eats the memory there is one failed check.

`Apart` is called as the function itself: tensors go over with their strides and whatever lies around them in their
storage, results come back, and so does what the call did to its inputs and to the global state of torch. A process that
dies or does not answer in time is a `Violation` that says so; the next call starts another.
"""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_spec.law import NotRun, Violation

START_S = 120.0  # for the process to start and import torch and the target, on a busy machine
DEATHS = 5  # one after the other, and it is not started again

# tensors as bytes ----------------------------------------------------------------------------------------------------


class Packed:
    """A tensor as plain data: its whole storage, and how the tensor lies in it."""

    def __init__(self, x: Tensor) -> None:
        storage = x.detach().untyped_storage()
        self.bytes = ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""
        self.dtype, self.size, self.stride = x.dtype, tuple(x.shape), x.stride()
        self.offset, self.grad = x.storage_offset(), x.requires_grad

    def tensor(self) -> Tensor:
        if not self.bytes:
            return torch.empty(self.size, dtype=self.dtype).requires_grad_(self.grad)
        whole = torch.frombuffer(bytearray(self.bytes), dtype=torch.uint8)
        whole = whole[: len(whole) // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        x = whole.as_strided(self.size, self.stride, self.offset)
        return x.requires_grad_() if self.grad else x


def packed(value: Any) -> Any:
    """A structure with its tensors packed; what can't go over is left out of a returned structure."""
    if isinstance(value, Tensor):
        return Packed(value.cpu() if value.is_cuda else value)
    if isinstance(value, (list, tuple)):
        items = [packed(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {key: packed(item) for key, item in value.items()}
    return value


def unpacked(value: Any) -> Any:
    if isinstance(value, Packed):
        return value.tensor()
    if isinstance(value, (list, tuple)):
        items = [unpacked(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: unpacked(item) for key, item in value.items()}
    return value


def hand_written(output: Tensor) -> bool:
    """Whether a backward pass that somebody wrote (`torch.autograd.Function`) lies behind an output."""
    ahead, met = [output.grad_fn], set()
    while ahead:
        node = ahead.pop()
        if node is None or node in met:
            continue
        if "BackwardCFunction" in {kind.__name__ for kind in type(node).__mro__}:
            return True
        met.add(node)
        ahead += [other for other, _ in node.next_functions]
    return False


def tensors_of(args: list[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]


def flat(returned: Any) -> list[Tensor]:
    """The tensors of what a function returned, in order."""
    if isinstance(returned, Tensor):
        return [returned]
    if isinstance(returned, Mapping):
        returned = returned.values()
    return [x for x in returned if isinstance(x, Tensor)] if isinstance(returned, Iterable) else []


def _refilled(returned: Any, tensors: Iterator[Tensor]) -> Any:
    """What a function returned, with other tensors in place of its own."""
    if isinstance(returned, Tensor):
        return next(tensors)
    if isinstance(returned, Mapping):
        return {key: next(tensors) if isinstance(x, Tensor) else x for key, x in returned.items()}
    if isinstance(returned, (list, tuple)):
        return [next(tensors) if isinstance(x, Tensor) else x for x in returned]
    return returned


# this side -----------------------------------------------------------------------------------------------------------


class FromApart(Exception):  # noqa: N818
    """An exception of the user's, raised in the other process."""


class Apart:
    """A target's function, called in a process of its own.

    target: as on the command line; the process resolves it anew.  function: what it is here, for its signature.
    timeout_s: for one call.  declared: what attn.yaml says, by which a module is built.
    disturbed: what the last calls changed of torch's global state.
    """

    def __init__(
        self,
        target: str,
        function: Callable[..., Any],
        timeout_s: float,
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        self.target, self.timeout_s, self.declared = target, timeout_s, dict(declared or {})
        self.disturbed: dict[str, str] = {}
        self.hand_written = False  # whether the backward pass of the last call is one of its own
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: multiprocessing.connection.Connection | None = None
        self._deaths = 0
        self.signature_of = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = tensors_of(list(args), kwargs)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self._with_gradient(args, kwargs, tensors)
        return unpacked(self._called(args, kwargs, tensors, torch.is_grad_enabled())["returned"])

    def _called(self, args: Any, kwargs: Any, tensors: list[Tensor], grad: bool) -> dict[str, Any]:
        reply = self._ask({"call": (packed(list(args)), packed(kwargs)), "grad": grad})
        for place, changed in reply["changed"].items():
            with torch.no_grad():
                tensors[place].copy_(changed.tensor())
        self.disturbed |= reply["disturbed"]
        self.hand_written = bool(reply["hand_written"])
        return reply

    def _with_gradient(self, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """The call, with a backward pass that asks the other process for its gradients, once and twice."""
        apart, returned = self, []
        leaves = [x for x in tensors if x.requires_grad]

        class Twice(torch.autograd.Function):
            """The gradients, as a function of the cotangents and of what was given."""

            @staticmethod
            def forward(ctx: Any, call: int, number: int, *given: Any) -> Any:
                ctx.call, ctx.number, cotangents = call, number, given[:number]
                ctx.save_for_backward(*(x for x in cotangents if x is not None))
                ctx.known = [x is not None for x in cotangents]
                return tuple(
                    unpacked(apart._ask({"backward": call, "cotangents": packed(list(cotangents))})["returned"])
                )

            @staticmethod
            def backward(ctx: Any, *directions: Any) -> Any:
                saved = iter(ctx.saved_tensors)
                cotangents = [next(saved) if known else None for known in ctx.known]
                question = {
                    "backward": ctx.call,
                    "cotangents": packed(cotangents),
                    "directions": packed(list(directions)),
                }
                return (None, None, *unpacked(apart._ask(question)["returned"]))

        class Through(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Tensor) -> Any:
                ctx.set_materialize_grads(False)
                reply = apart._called(args, kwargs, tensors, True)
                returned.append(unpacked(reply["returned"]))
                out = flat(returned[0])
                ctx.call = reply["number"]
                ctx.save_for_backward(*given)
                ctx.mark_non_differentiable(
                    *(x for x, can in zip(out, reply["differentiable"], strict=True) if not can)
                )
                return tuple(out)

            @staticmethod
            def backward(ctx: Any, *cotangents: Any) -> Any:
                return Twice.apply(ctx.call, len(cotangents), *cotangents, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

        found = Through.apply(*leaves)  # type: ignore[no-untyped-call]
        return _refilled(returned[0], iter(found))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(pickle.dumps(question, pickle.HIGHEST_PROTOCOL))
            if not self._pipe.poll(self.timeout_s):
                self.close()
                self._died()
                raise Violation(
                    f"no answer within {self.timeout_s:g} s; the process was ended", merge="hangs",
                    hint="--attn-timeout=SECONDS allows more",
                )  # fmt: skip
            reply: dict[str, Any] = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            raise Violation(f"the process {self._end()} in this call", merge="process-died") from None
        if "raised" in reply:
            self._deaths = 0
            raise reply["raised"]
        self._deaths = 0
        return reply

    def _died(self) -> None:
        self._deaths += 1

    def _end(self) -> str:
        """How the process came to its end."""
        assert self._process is not None
        status = self._process.wait(5)
        self.close()
        self._died()
        if status < 0:
            return f"died of {signal.Signals(-status).name}"
        return f"ended itself with exit status {status}"

    def _start(self) -> None:
        if self._deaths >= DEATHS:
            raise NotRun(f"the process crashed or hung in each of the last {DEATHS} calls and was not started again")
        ours, theirs = multiprocessing.Pipe()
        code = f"from attn_spec.adapters.apart import serve; serve({theirs.fileno()})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.DEVNULL,  # with --attn-timeout=0 what the function prints is seen
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        theirs.close()
        self._pipe = ours
        first = {"target": self.target, "path": sys.path, "threads": torch.get_num_threads(), "declared": self.declared}
        ours.send_bytes(pickle.dumps(first))
        if not ours.poll(START_S) or not ours.recv_bytes():
            raise Violation(f"the process for {self.target} did not start within {START_S:g} s", merge="process-died")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None

    def __del__(self) -> None:
        self.close()


# the other side ------------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """Answer calls until the pipe is closed. Runs in the process of its own."""
    from attn_spec.adapters.modules.adapter import callable_of
    from attn_spec.adapters.resolve import resolve

    pipe = multiprocessing.connection.Connection(descriptor)
    first = pickle.loads(pipe.recv_bytes())
    sys.path[:] = first["path"]
    torch.set_num_threads(first["threads"])
    _limit_memory()
    torch.manual_seed(271828)  # a state that no call reseeds to
    found = resolve(first["target"])
    serving = Serving(callable_of(found.object, found.name, first["declared"]))
    pipe.send_bytes(b"ready")
    while True:
        try:
            question = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            reply = serving.answer(question)
        except BaseException as error:  # whatever the user's code raises is the answer
            reply = {"raised": portable(error)}
        pipe.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))


def _limit_memory() -> None:
    """Let an allocation that the machine does not have fail here, before the system starts to kill processes."""
    try:
        import resource

        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (int(pages * 0.8), resource.RLIM_INFINITY))
    except (ImportError, ValueError, OSError):  # no such limit on this system
        return


def portable(error: BaseException) -> BaseException:
    """An exception that can go over: itself, or one of its kind with its text."""
    from attn_spec.adapters.implementation import described

    text = described(error)
    try:
        again = pickle.loads(pickle.dumps(error))
        if described(again) == text:
            return error
    except Exception:  # it holds what can't be pickled, or is built in another way
        pass
    for known in type(error).__mro__:
        if known.__module__ == "builtins" and issubclass(known, BaseException):
            words = text.removeprefix(f"{type(error).__name__}: ")
            return SystemExit(words) if known is SystemExit else known(words)
    return FromApart(text)


class Serving:
    """The function, its calls that may be differentiated, and the output of the call before."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.calls: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.number = 0
        self.earlier: tuple[Tensor, Tensor] | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if "backward" in question:
            outputs, leaves = self.calls[question["backward"]]
            given = unpacked(question["cotangents"])
            pairs = [(x, g) for x, g in zip(outputs, given, strict=True) if g is not None and x.requires_grad]
            return {"returned": packed(_gradients(pairs, leaves, given, unpacked(question.get("directions"))))}
        args, kwargs = question["call"]
        return self.call(args, kwargs, question["grad"])

    def call(self, args: list[Any], kwargs: dict[str, Any], grad: bool) -> dict[str, Any]:
        from attn_spec.adapters.implementation import GlobalState

        args, kwargs = unpacked(args), unpacked(kwargs)
        tensors = tensors_of(args, kwargs)
        versions = [x._version for x in tensors]
        for x in tensors:  # leave NaN in the memory that is likely to be handed out next
            if x.is_floating_point():
                torch.full((x.numel(),), torch.nan, dtype=x.dtype)
        usual = torch.is_grad_enabled()
        torch.set_grad_enabled(grad)
        before = GlobalState()
        try:
            returned = self.function(*args, **kwargs)
        finally:
            disturbed = before.put_back()
            torch.set_grad_enabled(usual)
        if self.earlier is not None and not torch.equal(self.earlier[0].nan_to_num(), self.earlier[1].nan_to_num()):
            disturbed["the output of an earlier call"] = "overwritten"
        found = flat(returned)
        output = found[0] if found else None
        self.earlier = None if output is None else (output.detach(), output.detach().clone())
        storages = {x.untyped_storage().data_ptr() for x in tensors if x.numel()}
        if output is not None and output.numel() and output.untyped_storage().data_ptr() in storages:
            disturbed["the output"] = "shares memory with an input"
        differentiable = [x.requires_grad for x in found]
        if any(differentiable):
            self.number += 1
            self.calls = {self.number: (found, [x for x in tensors if x.requires_grad])}
        changed = {n: Packed(x) for n, x in enumerate(tensors) if x._version != versions[n]}
        return {
            "returned": packed(_sendable(returned)),
            "changed": changed,
            "disturbed": disturbed,
            "differentiable": differentiable,
            "hand_written": any(hand_written(x) for x in found),
            "number": self.number,
        }


def _gradients(
    pairs: list[tuple[Tensor, Tensor]], leaves: list[Tensor], given: list[Tensor | None], directions: Any
) -> list[Tensor | None]:
    """The gradients of outputs with their cotangents; with directions, those of the gradients in turn.

    In turn: for each of the given cotangents (None where there was none), then for each of the leaves.
    """
    outputs, cotangents = [x for x, _ in pairs], [g for _, g in pairs]
    if directions is None:
        grads = torch.autograd.grad(outputs, leaves, cotangents, retain_graph=True, materialize_grads=True)
        return list(grads)
    cotangents = [g.requires_grad_() for g in cotangents]
    grads = torch.autograd.grad(outputs, leaves, cotangents, create_graph=True, materialize_grads=True)
    again = [(g, d) for g, d in zip(grads, directions, strict=True) if d is not None and g.requires_grad]
    if not again:
        raise RuntimeError("the gradients carry no gradient of their own")
    sources = [*cotangents, *leaves]
    second = torch.autograd.grad(
        [g for g, _ in again], sources, [d for _, d in again], retain_graph=True, materialize_grads=True
    )
    known = iter(second[: len(cotangents)])
    used = {id(g) for g in cotangents}
    return [next(known) if g is not None and id(g) in used else None for g in given] + list(second[len(cotangents) :])


def _sendable(returned: Any) -> Any:
    """What can go over: tensors and structures of them; of anything else its type's name is enough."""
    if isinstance(returned, (Tensor, int, float, str, bool, type(None))):
        return returned
    if isinstance(returned, (list, tuple)):
        items = [_sendable(item) for item in returned]
        return tuple(items) if isinstance(returned, tuple) else items
    if isinstance(returned, Mapping):
        return {str(key): _sendable(item) for key, item in returned.items()}
    return None
