"""The user's function in a process of its own: what crashes, hangs or eats the memory there is one failed check.

`Apart` is called as the function itself: tensors go over with their strides and whatever lies around them in their
storage, results come back, and so does what the call did to its inputs and to the global state of torch. A process that
dies or does not answer in time is a `Violation` that says so; the next call starts another.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from attn_spec.adapters.parcels import flat, packed, refilled, tensors_of, unpacked
from attn_spec.law import NotRun, Violation

START_S = 120.0  # for the process to start and import torch and the target, on a busy machine
DEATHS = 5  # one after the other, and it is not started again


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

    def perform(self, procedure: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run a procedure of ours, "module:function", beside the function in its process.

        It gets the function first; see `Implementation.perform`.
        """
        question = {"perform": procedure, "call": (packed(list(args)), packed(kwargs)), "grad": torch.is_grad_enabled()}
        reply = self._ask(question, timeout_s)
        self.disturbed |= reply["disturbed"]
        return unpacked(reply["returned"])

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
        return refilled(returned[0], iter(found))

    def _ask(self, question: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        timeout_s = timeout_s or self.timeout_s
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(pickle.dumps(question, pickle.HIGHEST_PROTOCOL))
            if not self._pipe.poll(timeout_s):
                self.close()
                self._died()
                raise Violation(
                    f"no answer within {timeout_s:g} s; the process was ended", merge="hangs",
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
        code = f"from attn_spec.adapters.serving import serve; serve({theirs.fileno()})"
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
