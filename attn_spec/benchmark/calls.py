"""An implementation as the engine times it: calls on rotated inputs, ready to run, and a look at what they returned.

Everything that is ours (layouts, copies, names of parameters) is done once, off the clock: the timed call is the user's
function on the tensors it takes. Between two readings V changes its sign in place, so an output that is replayed by
pointer, by shape or from an earlier call has the wrong sign.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_spec.adapters.function import BACK, FunctionAdapter, flat
from attn_spec.adapters.implementation import Implementation, Result
from attn_spec.benchmark.clock import Call, Distrusted
from attn_spec.benchmark.expected import Expected, gradient_bound, gradient_error
from attn_spec.law import Unsupported
from attn_spec.problem import Arguments

WARM_S = 0.01  # calls up to this are made once off the clock before they are timed
LATE_S = 0.25  # how long a wrong output is given to become right, to tell early returns from wrong numbers


def in_this_process(implementation: Implementation) -> Implementation:
    """The implementation with its function called here, and not in a process of its own."""
    adapter = implementation.adapter
    function = getattr(adapter, "function", None)
    own = getattr(function, "signature_of", None)
    if own is None or not isinstance(adapter, FunctionAdapter):
        return implementation
    return dataclasses.replace(implementation, adapter=dataclasses.replace(adapter, function=own))


Passed = tuple[tuple[Any, ...], dict[str, Any]]  # of one call of the user's function


def recorded(adapter: FunctionAdapter, arguments: Arguments) -> list[Passed]:
    """What an adapter calls its function with, without calling it: once, or for each head where it takes matrices.

    Raises `Unsupported` where the function has no way to be asked.
    """
    calls: list[Passed] = []

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((args, kwargs))
        given = by_name(adapter, calls[-1])
        q, v = (given[adapter.signature.roles[role]] for role in "qv")
        like: Tensor = q.new_zeros((*q.shape[:-1], v.shape[-1]))  # in any layout the channels are the last axis
        return like

    with torch.no_grad():
        dataclasses.replace(adapter, function=stand_in)(arguments)
    return calls


def by_name(adapter: FunctionAdapter, call: Passed) -> dict[str, Any]:
    """The arguments of a call by the names of their parameters."""
    args, kwargs = call
    return {**dict(zip((p.name for p in adapter.signature.parameters), args, strict=False)), **kwargs}


def prepared(adapter: FunctionAdapter, arguments: Arguments) -> Call:
    """A call of the user's function and nothing else, on what its adapter would hand it. Raises `Unsupported`."""
    return _ready(adapter, recorded(adapter, arguments))


def _ready(adapter: FunctionAdapter, calls: list[Passed]) -> Call:
    function = adapter.function
    if len(calls) > 1:
        return lambda: [function(*args, **kwargs) for args, kwargs in calls]
    ((args, kwargs),) = calls
    return lambda: function(*args, **kwargs)


class Prepared(Protocol):
    """A call that is ready to be timed, and how to read what it returns.

    inputs: what is differentiated by, by name.  length: the longest sum in it, on which rounding depends.
    """

    call: Call
    inputs: dict[str, Tensor]
    length: int

    def change_sign(self) -> None:
        """Change the inputs in place, so that the right output is another one."""

    def output(self, returned: Any) -> Tensor:
        """[B, H, S, D] from what the call returned."""

    def canonical(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient of an input in the form of the expected one."""


class PreparedCall:
    """The call of an implementation on one set of arguments, and how to read what it returns.

    call: runs the user's function, and nothing else where its adapter is ours; an adapter of one's own is timed whole.
    inputs: q, k and v as the function gets them.  Raises `Unsupported`.
    """

    def __init__(self, implementation: Implementation, arguments: Arguments, *, grad: bool) -> None:
        self.implementation, self.arguments, self.length = implementation, arguments, arguments.k.shape[2]
        adapter = implementation.adapter
        self.by_head = False
        self.inputs: dict[str, Tensor] = {name: getattr(arguments, name) for name in "qkv"}
        if not isinstance(adapter, FunctionAdapter):
            for x in self.inputs.values():
                x.requires_grad_(grad)
            self.call: Call = lambda: adapter(arguments)
            return
        calls = recorded(adapter, arguments)
        self.by_head = len(calls) > 1
        if self.by_head and grad:
            raise Unsupported("a function of [S, D] is called once for each head, and not timed backward")
        if not self.by_head:
            passed = {role: by_name(adapter, calls[0])[adapter.signature.roles[role]] for role in "qkv"}
            self.inputs = {role: x.detach().requires_grad_(grad) for role, x in passed.items()}
            own = {id(x): self.inputs[role] for role, x in passed.items()}
            args, kwargs = calls[0]
            calls = [(tuple(own.get(id(x), x) for x in args), {key: own.get(id(x), x) for key, x in kwargs.items()})]
        self.call = _ready(adapter, calls)

    def change_sign(self) -> None:
        """-V for V, in place."""
        with torch.no_grad():
            self.inputs["v"].neg_()

    def output(self, returned: Any) -> Tensor:
        """[B, H, Sq, Dv] from what the call returned, as its adapter reads it."""
        adapter = self.implementation.adapter
        if isinstance(returned, Result):
            return returned.output
        assert isinstance(adapter, FunctionAdapter)
        for x in flat(returned)[:1]:
            if type(x) is not Tensor:
                kind = type(x).__name__
                raise Distrusted(f"{self.implementation.name}: returned a {kind}, which may be computed later")
        layout = adapter.conventions.layout_out.value
        if isinstance(returned, Tensor) and returned.dim() == 4 and layout in BACK and not self.by_head:
            return returned.permute(BACK[layout])
        replies = iter(returned if self.by_head else [returned])
        return dataclasses.replace(adapter, function=lambda *args, **kwargs: next(replies))(self.arguments).output

    def canonical(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient of q, k or v as [B, H, S, D]."""
        adapter = self.implementation.adapter
        if not isinstance(adapter, FunctionAdapter):
            return gradient
        layout = adapter.conventions.layout.value
        if layout == "NSD":
            return gradient.reshape(getattr(self.arguments, name).shape)
        return gradient.permute(BACK[layout])


class TimedImplementation:
    """One contender: an implementation on several sets of inputs of one problem, in one direction.

    direction: "forward", "backward" (of a forward pass that ran off the clock) or "both".
    Raises `Unsupported` or `Refused` where it does not take the problem.
    """

    def __init__(
        self,
        implementation: Implementation,
        prepared: Sequence[Prepared],
        expected: Sequence[Expected],
        direction: str = "forward",
        *,
        name: str = "",
    ) -> None:
        self.name = name or implementation.name
        self.implementation, self.direction = implementation, direction
        self.prepared = list(prepared)
        with torch.set_grad_enabled(
            direction != "forward"
        ):  # what it refuses it refuses here; and it is compiled, where it is
            implementation.shielded(self.prepared[0].call)
        self.expected = list(expected)
        device = implementation.device
        self.rows = [one.rows.to(device) for one in self.expected]
        self.cotangents = [None if one.cotangent is None else one.cotangent.to(device) for one in self.expected]
        self.signs = [1.0] * len(self.prepared)
        self.order = itertools.cycle(range(len(self.prepared)))
        self.last: list[tuple[int, Tensor, Tensor]] = []  # input set, output, its rows when the clock had stopped
        self.handed: list[int] = []
        self.checked = 0
        self.warm_s: list[float] = []
        self.threads = torch.get_num_threads()

    def calls(self, count: int) -> list[Call]:
        """The next calls: other inputs than last time, and -V for V in each set that is used."""
        self._require_settled()
        self.handed = [next(self.order) for _ in range(count)]
        for place in set(self.handed):
            self._warm(place)
            self.prepared[place].change_sign()
            self.signs[place] *= -1
        return [self._call(place) for place in self.handed]

    def _warm(self, place: int) -> None:
        """Call it once off the clock, for what the last look at an output has pushed out of a CPU's caches.

        With the other sign of V, so that this answer is of no use for the timed call. Long calls need it not.
        """
        if (
            self.direction != "forward"
            or self.implementation.device != "cpu"
            or min(self.warm_s[-5:], default=0.0) > WARM_S
        ):
            return
        start = time.perf_counter()
        self.prepared[place].call()
        self.warm_s.append(time.perf_counter() - start)

    def _call(self, place: int) -> Call:
        prepared, cotangent = self.prepared[place], self.cotangents[place]
        if self.direction == "forward":
            return prepared.call
        leaves = list(prepared.inputs.values())
        if self.direction == "backward":
            with torch.enable_grad():
                output = prepared.output(prepared.call())
            return lambda: torch.autograd.grad(output, leaves, cotangent)

        def both() -> Any:
            output = prepared.output(prepared.call())
            return output, torch.autograd.grad(output, leaves, cotangent)

        return both

    def verify(self, outputs: list[Any]) -> None:
        """Compare every output of the last calls with the right one. Raises Distrusted."""
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
            raise Distrusted(f"{self.name}: changed the number of threads during the measurement")
        self.last = []
        for place, returned in zip(self.handed, outputs, strict=True):
            output, gradients = None, returned
            if self.direction == "forward":
                output, gradients = self.prepared[place].output(returned), None
            elif self.direction == "both":
                output, gradients = returned
            if output is not None:
                rows = output.detach()[:, :, self.rows[place]]  # at once: a copy of what is there when the clock stops
                self.last.append((place, output.detach(), rows))
                self._check(place, output, rows)
            if gradients is not None:
                self._check_gradients(place, gradients)
            self.checked += 1

    def _check(self, place: int, output: Tensor, rows: Tensor) -> None:
        right = self.expected[place]
        if right.holds(rows, self.signs[place]):
            return
        found = right.compare(rows, self.signs[place])
        time.sleep(LATE_S)
        if right.holds(output.detach()[:, :, self.rows[place]], self.signs[place]):
            raise Distrusted(
                f"{self.name}: returned before its work was done: the output was wrong when the clock stopped, and "
                f"right {LATE_S} s later"
            )
        which = "a timed" if self.checked else "the first"
        raise Distrusted(
            f"{self.name}: the output of {which} call is wrong: {found.got:.6g} at {list(found.index)} of the "
            f"rows that are compared, expected {found.expected:.6g} ({found.ratio:.3g} times the bound)"
        )

    def _check_gradients(self, place: int, gradients: Sequence[Tensor]) -> None:
        right, prepared = self.expected[place], self.prepared[place]
        for (name, _), gradient in zip(prepared.inputs.items(), gradients, strict=True):
            wanted = right.gradient(name, self.signs[place])
            if wanted is None:
                continue
            got = prepared.canonical(name, gradient)
            got = got[:, :, self.rows[place]] if name == "q" else got
            error = gradient_error(got, wanted)
            allowed = gradient_bound(str(gradient.dtype).removeprefix("torch."), prepared.length)
            if not error <= allowed:
                raise Distrusted(
                    f"{self.name}: the gradient of {name} is wrong: off by {error:.3g} of its largest element, "
                    f"{allowed:.3g} is allowed"
                )

    def _require_settled(self) -> None:
        """What was right when the clock stopped is still there: nothing went on working on it."""
        for place, output, rows in self.last:
            now = output[:, :, self.rows[place]]
            if not torch.equal(now, rows) and not torch.equal(now.nan_to_num(), rows.nan_to_num()):
                raise Distrusted(f"{self.name}: its output changed after the clock had stopped")
        self.last = []
