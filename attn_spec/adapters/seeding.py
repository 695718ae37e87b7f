"""Procedures that seed, where the user's callable is: calls one after the other, and a call with its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attn_spec.adapters.parcels import flat


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []


def _states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(n) for n in _devices())]


SKIPPED = 7919  # added to the seed of a call for that of the next, of a function that is handed its seed
ELSEWHERE = 314_159  # what torch is seeded with where the seed of a call is an argument of its own
Place = int | str  # of an argument: by position, or by name


def draw(
    function: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    seeds: list[int],
    seed_at: Place | None = None,
) -> tuple[list[list[Tensor]], list[bool]]:
    """What each of several calls returned, and whether it moved the generators on.

    seeds: torch is seeded with each before its call; -1: it goes on where the call before has left it. The generators
    are put back at the end.  seed_at: the argument that takes a seed of its own, where there is one: that of the call,
    or one more than in the call before; torch is then seeded with another number in each call, which is to change
    nothing.
    """
    outputs, moved_on, own = [], [], 0
    with torch.random.fork_rng(devices=_devices()), torch.no_grad():
        for number, seed in enumerate(seeds):
            if seed_at is not None:
                torch.manual_seed(ELSEWHERE + number)
            elif seed >= 0:
                torch.manual_seed(seed)
            own = seed if seed >= 0 else own + SKIPPED
            args, kwargs = _seeded(args, kwargs, seed_at, own)
            before = _states()
            outputs.append([x.clone() for x in flat(function(*args, **kwargs))])
            moved_on.append(not all(torch.equal(x, y) for x, y in zip(before, _states(), strict=True)))
    return outputs, moved_on


def reseeds(function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call sets torch's generators: two calls from different states leave them in the same one."""
    left = []
    with torch.random.fork_rng(devices=_devices()):
        for seed in (ELSEWHERE, ELSEWHERE + 1):
            torch.manual_seed(seed)
            function(*args, **kwargs)
            left.append(_states())
    return any(torch.equal(x, y) for x, y in zip(*left, strict=True))


def _seeded(
    args: list[Any], kwargs: dict[str, Any], place: Place | None, seed: int
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments with a seed in its place."""
    if isinstance(place, int):
        return [seed if n == place else x for n, x in enumerate(args)], kwargs
    return args, kwargs if place is None else {**kwargs, place: seed}


def draw_with_gradients(
    function: Callable[..., Any],
    args: list[Any],
    kwargs: dict[str, Any],
    wanted: list[Place],
    cotangent: Tensor,
    seed: int,
    seed_at: Place | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """What a call returned after a seed, and the gradients of the arguments that are wanted.

    wanted: by position or by name.  Between the passes the generators are moved elsewhere, as other layers move them.
    Returns no gradients where the output carries none.
    """
    args, kwargs = _seeded(args, kwargs, seed_at, seed)
    given: dict[Place, Any] = dict(enumerate(args))
    given.update(kwargs)
    leaves = {place: given[place].detach().clone().requires_grad_() for place in wanted}
    given |= leaves
    with torch.random.fork_rng(devices=_devices()), torch.enable_grad():
        torch.manual_seed(seed)
        positional = [given[n] for n in range(len(args))]
        returned = flat(function(*positional, **{name: given[name] for name in kwargs}))
        torch.manual_seed(seed + 1)
        if not returned or not returned[0].requires_grad:
            return [x.detach() for x in returned], []
        cotangent = cotangent.to(returned[0].dtype)
        grads = torch.autograd.grad(returned[0], list(leaves.values()), cotangent, materialize_grads=True)
    return [x.detach() for x in returned], list(grads)
