"""How hidden states [B, S, D] are laid out for a module, and its output back: by the letters of `ModuleFunction.input`.

BSD as they are; SBD the sequence first; SD one sample alone; BCS and BCHW channels first, as convolutions take them.
"""

from __future__ import annotations

from torch import Tensor

CHANNELS_FIRST = ("BCS", "BCHW")


def laid(x: Tensor, layout: str) -> Tensor:
    """Hidden states [B, S, D] as the module takes them; an image has as many rows as divide its pixels, at most S^0.5.

    So it is no square, but for S that is one: rows and columns that are mixed up show.
    """
    if layout == "SBD":
        return x.transpose(0, 1)
    if layout == "SD":
        return x[0]
    if layout == "BCS":
        return x.mT.contiguous()
    if layout == "BCHW":
        pixels = x.mT.contiguous()  # as images are; torch 2.13 dies in the backward pass of a GroupNorm on others
        return pixels.reshape(*pixels.shape[:2], rows_of(x.shape[1]), -1) if x.shape[1] else pixels[:, :, None]
    return x


def rows_of(pixels: int) -> int:
    """The largest number of rows that divides the pixels and is no more than the columns."""
    return next(n for n in range(int(pixels**0.5), 0, -1) if pixels % n == 0)


def unlaid(y: Tensor, layout: str) -> Tensor:
    """The output of the module as [B, S, D]; as it is where it has other axes than the input."""
    if layout == "SBD":
        return y.transpose(0, 1)
    axes = {"BCS": 3, "BCHW": 4}.get(layout)
    return y.flatten(2).mT if axes == y.dim() else y


def length(x: Tensor, layout: str) -> int:
    """The number of tokens of an input as the module takes it."""
    if layout in CHANNELS_FIRST:
        return x.shape[2:].numel()
    return x.shape[0 if layout in ("SBD", "SD") else 1]
