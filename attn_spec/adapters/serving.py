"""The side of the user's function in a process of its own: it answers the calls of `attn_spec.adapters.apart`."""

from __future__ import annotations

import importlib
import multiprocessing.connection
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_spec.adapters.parcels import Packed, flat, hand_written, packed, tensors_of, unpacked


class FromApart(Exception):  # noqa: N818
    """An exception of the user's, raised in the other process."""


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
        if "perform" in question:
            return self.perform(question["perform"], args, kwargs, question["grad"])
        return self.call(args, kwargs, question["grad"])

    def perform(self, procedure: str, args: list[Any], kwargs: dict[str, Any], grad: bool) -> dict[str, Any]:
        """Run a procedure of ours, "module:function", on the function and what else it takes."""
        from attn_spec.adapters.implementation import GlobalState

        module, _, name = procedure.partition(":")
        function = getattr(importlib.import_module(module), name)
        usual = torch.is_grad_enabled()
        torch.set_grad_enabled(grad)
        before = GlobalState()
        try:
            returned = function(self.function, *unpacked(args), **unpacked(kwargs))
        finally:
            disturbed = before.put_back()
            torch.set_grad_enabled(usual)
        return {"returned": packed(_sendable(returned)), "disturbed": disturbed}

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
