"""Tensors and what holds them as plain data, so that they can go to another process and come back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


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


def moved(value: Any, device: str) -> Any:
    """A structure with its tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        items = [moved(item, device) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: moved(item, device) for key, item in value.items()}
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


def refilled(returned: Any, tensors: Iterator[Tensor]) -> Any:
    """What a function returned, with other tensors in place of its own."""
    if isinstance(returned, Tensor):
        return next(tensors)
    if isinstance(returned, Mapping):
        return {key: next(tensors) if isinstance(x, Tensor) else x for key, x in returned.items()}
    if isinstance(returned, (list, tuple)):
        return [next(tensors) if isinstance(x, Tensor) else x for x in returned]
    return returned
