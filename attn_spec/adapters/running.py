"""Other ways to run a call: compiled, exported, on fake tensors, mapped, under autocast, in threads.

Each is a procedure (`Implementation.perform`), and runs where the user's callable is. A call comes as plain data, its
"question": "args" and "kwargs" of a function, or "x", "context", "sizes" and "named" of a module as a whole, of which
the nn.Module itself is run. Gradients are taken with respect to the tensors that come requiring one.
"""

from __future__ import annotations

import copy
import logging
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from attn_spec.adapters.implementation import described
from attn_spec.adapters.parcels import flat
from attn_spec.law import Unsupported, Violation

Question = Mapping[str, Any]
RECOMPILES = 64  # more than any procedure asks for: beyond the limit nothing is compiled any more, without a word
SWITCH_S = 1e-6  # how long one thread runs before another may
TORCH = str(Path(torch.__file__).parent)
COMPILER = tuple(str(Path(TORCH, name)) for name in ("_dynamo", "_functorch", "_higher_order_ops", "_inductor", "fx"))


@dataclass(frozen=True, eq=False)
class Call:
    """A call that can be made again: `run(*args, **kwargs)`, whose output is `output(returned)`."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Callable[[Any], Tensor]

    def __call__(self, run: Callable[..., Any] | None = None) -> Tensor:
        return self.output((self.run if run is None else run)(*self.args, **self.kwargs))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors it is made with, each once."""
        leaves, _ = tree_flatten((self.args, self.kwargs))
        return list({id(x): x for x in leaves if isinstance(x, Tensor)}.values())

    def on(self, tensors: Sequence[Tensor]) -> Call:
        """The same call on other tensors, in the order of `tensors`."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        other = {id(x): y for x, y in zip(self.tensors, tensors, strict=True)}
        args, kwargs = tree_unflatten([other.get(id(x), x) for x in leaves], spec)
        return Call(self.run, args, kwargs, self.output)

    def afresh(self, *, grad: bool = False) -> Call:
        """The same call on copies that lie in memory as the originals do; with their `requires_grad` where `grad`."""
        return self.on([_copied(x).requires_grad_(grad and x.requires_grad) for x in self.tensors])


def _copied(x: Tensor) -> Tensor:
    x = x.detach()
    storage: torch.UntypedStorage = x.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return x.new_empty(0).set_(storage, x.storage_offset(), x.shape, x.stride())


def first(returned: Any) -> Tensor:
    """The output of a function: its first tensor. Raises Violation where there is none."""
    tensors = flat(returned)
    if not tensors:
        raise Violation(f"returned {type(returned).__name__}, not a tensor", merge="returns")
    return tensors[0]


def call_of(function: Callable[..., Any], question: Question) -> Call:
    """A question as a call: of the function, or of the nn.Module with what its forward gets. Raises Unsupported."""
    if "x" not in question:
        return Call(function, tuple(question["args"]), dict(question["kwargs"]), first)
    of: Any = function
    x, sizes = question["x"], question["sizes"]
    module: nn.Module = of.built(sizes, x.dtype)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = of.forwarded(
        x, question["context"], sizes=sizes, **question["named"]
    )
    if len(seen) != 1:
        raise Unsupported("it runs sample by sample")
    return Call(module, *seen[0], lambda returned: of.tensors(returned)[0])


def differentiated(call: Call, run: Callable[..., Any] | None = None) -> list[Tensor]:
    """The output, and the gradients of what requires one; for a cotangent that is the same each time."""
    leaves = [x for x in call.tensors if x.requires_grad]
    with torch.set_grad_enabled(bool(leaves)):
        out = call(run)
        if not out.requires_grad:
            return [out.detach()]
        g = torch.Generator().manual_seed(611953)
        cotangent = torch.randn(out.shape, generator=g).to(out)
        return [out.detach(), *torch.autograd.grad(out, leaves, cotangent, materialize_grads=True)]


# compiled and exported -----------------------------------------------------------------------------------------------


@contextmanager
def _fresh_compiler() -> Iterator[None]:
    """Nothing that was compiled before is known, whatever is asked for is compiled, and no warning is logged."""
    import torch._dynamo as dynamo

    usual = logging.root.manager.disable
    limit = "recompile_limit" if hasattr(dynamo.config, "recompile_limit") else "cache_size_limit"
    dynamo.reset()
    dynamo.utils.counters.clear()
    logging.disable(max(usual, logging.WARNING))
    try:
        with dynamo.config.patch({limit: RECOMPILES}):
            yield
    finally:
        logging.disable(usual)
        dynamo.reset()


def compiled(function: Callable[..., Any], questions: Sequence[Question], backend: str) -> list[dict[str, Any]]:
    """Each call as it is, and all of them in turn through one compiled callable.

    -> for each "eager" and "compiled", the output and the gradients; "changed", whether the compiled call changed its
    inputs. "refused" is there instead where the call raises as it is, "raised" where it does so compiled.
    """
    if backend == "inductor" and not any(map(shutil.which, ("g++", "clang++", "cl"))):
        raise Unsupported("no C++ compiler")
    made: dict[nn.Module | Callable[..., Any], Callable[..., Any]] = {}
    found: list[dict[str, Any]] = []
    with _fresh_compiler():
        for question in questions:
            try:
                call = call_of(function, question)
                eager = differentiated(call.afresh(grad=True))
            except Exception as error:  # the user's own
                found.append({"refused": described(error)})
                continue
            if call.run not in made:
                made[call.run] = torch.compile(call.run, backend=backend)
            given = call.afresh(grad=True)
            try:
                answer = differentiated(given, made[call.run])
            except Exception as error:
                found.append({"raised": described(error)})
                continue
            changed = any(not _same_bits(x, y) for x, y in zip(given.tensors, call.tensors, strict=True))
            found.append({"eager": eager, "compiled": answer, "changed": changed})
    return found


def _same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.detach().nan_to_num(), y.detach().nan_to_num())


def graph_breaks(function: Callable[..., Any], questions: Sequence[Question]) -> list[dict[str, Any]]:
    """For each call into how many graphs it is traced, and why they are apart: "graphs", "reasons"."""
    found: list[dict[str, Any]] = []
    for question in questions:
        with _fresh_compiler():
            from torch._dynamo.utils import counters

            call = call_of(function, question).afresh()
            try:
                with torch.no_grad():
                    call(torch.compile(call.run, backend="eager"))
            except Exception as error:
                found.append({"raised": described(error)})
                continue
            reasons = [" ".join(str(reason).split())[:200] for reason in counters["graph_break"]]
            found.append({"graphs": int(counters["stats"]["unique_graphs"]), "reasons": reasons})
    return found


class _Exportable(nn.Module):
    """A call as a module of its tensors."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call, self.run = call, call.run  # a module is registered, and so are its parameters

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.call.on(tensors)(self.run)


def exported(function: Callable[..., Any], one: Question, other: Question) -> dict[str, Any]:
    """A call through torch.export, with every size left open in which the other call differs; and the other call.

    -> "eager" and "exported" of both calls. "raised" where it is not exported; "specialised" where the program takes
    only the sizes it was exported with.
    """
    calls = [call_of(function, q).afresh() for q in (one, other)]
    with torch.no_grad():
        eager = [call.afresh()() for call in calls]
        pairs = zip(*(call.tensors for call in calls), strict=True)
        open_sizes = tuple(_open_sizes(x, y) for x, y in pairs)
        with _fresh_compiler():
            try:
                program = torch.export.export(
                    _Exportable(calls[0]), tuple(calls[0].tensors), dynamic_shapes=(open_sizes,), strict=False
                ).module()
            except Exception as error:
                return {"eager": eager, "raised": described(error)}
            answers = [program(*calls[0].tensors)]
            try:
                answers.append(program(*calls[1].tensors))
            except Exception as error:
                return {"eager": eager, "exported": answers, "specialised": described(error)}
    return {"eager": eager, "exported": answers}


def _open_sizes(x: Tensor, y: Tensor) -> dict[int, Any]:
    sizes = enumerate(zip(x.shape, y.shape, strict=True))
    return {axis: torch.export.Dim.AUTO for axis, (one, other) in sizes if one != other}


# without data, and mapped --------------------------------------------------------------------------------------------


def without_data(function: Callable[..., Any], question: Question) -> dict[str, Any]:
    """A call as it is, on fake tensors and on the device meta.

    -> "eager", "fake" and "meta", each the shape and the name of the dtype; or what was raised, as text.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = call_of(function, question).afresh()
    eager = call.afresh()()
    found: dict[str, Any] = {"eager": [list(eager.shape), str(eager.dtype)]}

    def fake() -> Tensor:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return call.on([mode.from_tensor(x) for x in call.tensors])()

    def meta() -> Tensor:
        run = copy.deepcopy(call.run).to("meta") if isinstance(call.run, nn.Module) else call.run
        return call.on([x.to("meta") for x in call.tensors])(run)

    for name, way in (("fake", fake), ("meta", meta)):
        try:
            with torch.no_grad():
                out = way()
            found[name] = [list(out.shape), str(out.dtype)]
        except Exception as error:
            found[name] = described(error)
    return found


def mapped(function: Callable[..., Any], questions: Sequence[Question]) -> dict[str, Any]:
    """Calls that differ in their tensors only, one by one and mapped over by torch.func.vmap: "eager" and "mapped".

    "raised" is there instead of "mapped" where vmap does not go through.
    """
    calls = [call_of(function, q).afresh() for q in questions]
    with torch.no_grad():
        eager = [call.afresh()() for call in calls]
        stacks = [torch.stack(each) for each in zip(*(call.tensors for call in calls), strict=True)]
        try:
            answer: Tensor = torch.func.vmap(lambda *tensors: calls[0].on(tensors)())(*stacks)
        except Exception as error:
            return {"eager": eager, "raised": described(error)}
    return {"eager": eager, "mapped": list(answer)}


# under another state of the process ----------------------------------------------------------------------------------


def autocast(function: Callable[..., Any], question: Question, dtype: str) -> dict[str, Any]:
    """A call under torch.autocast of this dtype, and its backward pass outside, as training does it.

    The question holds the "cotangent" of the output too, in the layout of the output.
    -> "returned", the tensors that it returned; "gradients"; "state": what the call left of autocast, "" as it was.
    "raised" is there instead where it raises, with "deliberate", whether as not implemented; "backward" where the
    backward pass raises.
    """
    call = call_of(function, question).afresh(grad=True)
    leaves = [x for x in call.tensors if x.requires_grad]
    device = call.tensors[0].device.type
    with torch.set_grad_enabled(bool(leaves)):
        try:
            with torch.autocast(device, dtype=getattr(torch, dtype)):
                before = _autocast_state(device)
                returned = flat(call.run(*call.args, **call.kwargs))
                after = _autocast_state(device)
        except Exception as error:
            return _raised(error)
    changed = [f"{name}: {was} -> {after[name]}" for name, was in before.items() if was != after[name]]
    found: dict[str, Any] = {"returned": [x.detach() for x in returned], "state": "; ".join(changed), "gradients": []}
    if returned and returned[0].requires_grad:
        try:
            cotangent = question["cotangent"].to(returned[0].dtype)
            found["gradients"] = list(torch.autograd.grad(returned[0], leaves, cotangent, materialize_grads=True))
        except Exception as error:
            found["backward"] = described(error)
    return found


def _raised(error: Exception) -> dict[str, Any]:
    return {"raised": described(error), "deliberate": isinstance(error, NotImplementedError)}


def _autocast_state(device: str) -> dict[str, str]:
    return {"enabled": str(torch.is_autocast_enabled(device)), "dtype": str(torch.get_autocast_dtype(device))}


def deterministically(function: Callable[..., Any], question: Question, times: int) -> dict[str, Any]:
    """A call and its backward pass, several times under torch.use_deterministic_algorithms(True): "answers" of each.

    "raised" is there instead where it raises, with "deliberate", whether as not implemented.
    """
    call = call_of(function, question)
    usual = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # the other way to say it imports the compiler
    try:
        return {"answers": [differentiated(call.afresh(grad=True)) for _ in range(times)]}
    except Exception as error:
        return _raised(error)
    finally:
        torch.set_deterministic_debug_mode(usual)


def in_threads(function: Callable[..., Any], questions: Sequence[Question], rounds: int) -> dict[str, Any]:
    """Each call alone, then again and again in a thread of its own beside the others.

    In every other round a thread gives way to the others at each line of Python that it runs, so that what lies between
    two lines is not left to luck.

    -> "alone" and "beside": for each call its output, and of those in the thread the one that is furthest from it;
    "raised", what a thread raised, or "".
    """
    calls = [call_of(function, q).afresh() for q in questions]
    with torch.no_grad():
        alone = [call.afresh()().clone() for call in calls]
    furthest, raised = [x.clone() for x in alone], [""] * len(calls)
    together = threading.Barrier(len(calls))
    compiles: list[traceback.FrameSummary] = []

    def repeat(n: int) -> None:
        try:
            with torch.no_grad():
                for turn in range(rounds):
                    together.wait()
                    sys.settrace(_gives_way if turn % 2 else None)
                    out = calls[n]().clone()
                    sys.settrace(None)
                    if not torch.equal(out, alone[n]) and _apart(out, alone[n]) > _apart(furthest[n], alone[n]):
                        furthest[n] = out
        except threading.BrokenBarrierError:
            pass  # another thread raised, and says so
        except Exception as error:
            raised[n] = described(error)
            compiles.extend(f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(COMPILER))
            together.abort()

    usual = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        threads = [threading.Thread(target=repeat, args=(n,), daemon=True) for n in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    if compiles:
        raise Unsupported("it is traced while it is called, and torch's compiler is not one for several threads")
    return {"alone": alone, "beside": furthest, "raised": next(filter(None, raised), "")}


def _gives_way(frame: Any, event: str, arg: Any) -> Any:
    """A trace function that lets other threads run, line by line; not in torch itself, which is not judged."""
    if frame.f_code.co_filename.startswith(TORCH):
        return None
    if event == "line":
        time.sleep(0)
    return _gives_way


def _apart(x: Tensor, y: Tensor) -> float:
    """How far two outputs are apart; infinitely where their shapes differ, or one is no number where the other is."""
    if x.shape != y.shape:
        return float("inf")
    far = (x.double() - y.double()).abs()
    far = torch.where(x.isnan() & y.isnan(), 0.0, far)
    return float(far.nan_to_num(nan=float("inf")).max()) if far.numel() else 0.0
