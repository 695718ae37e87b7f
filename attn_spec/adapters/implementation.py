"""An implementation as the rest of the package sees it: one callable on canonical arguments."""

from __future__ import annotations

import inspect
import random
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from attn_spec.adapters.parcels import moved
from attn_spec.adapters.signature import TargetError
from attn_spec.conventions import Conventions, Finding
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.masks import Causal
from attn_spec.problem import TENSORS, Arguments, Problem
from attn_spec.tolerance import Precision, candidates

# what an adapter of one's own is not asked for unless it says that it looks at it
VARIANTS = ("window", "softcap", "alibi", "sinks", "lengths", "dropout")


@dataclass(frozen=True, eq=False)
class Result:
    """What one call gave: output [B, H, Sq, Dv]; weights [B, H, Sq, Sk] and log-sum-exp [B, H, Sq] if returned."""

    output: Tensor
    weights: Tensor | None = None
    lse: Tensor | None = None

    def to(self, device: str) -> Result:
        weights, lse = (None if x is None else x.to(device) for x in (self.weights, self.lse))
        return Result(self.output.to(device), weights, lse)


class Adapter(Protocol):
    """How a user's object is called on canonical arguments. Ten lines of Python are enough for one of your own."""

    def __call__(self, arguments: Arguments) -> Result:
        """Call the object. Raises `Unsupported` where it has no way to be asked; lets its own exceptions through."""

    def source(self, arguments: Arguments) -> str:
        """The call as a line of plain torch: an expression over `impl`, q, k, v and mask that gives [B, H, Sq, Dv]."""


@dataclass(eq=False)
class Implementation:
    """What a user plugged in, with its conventions, capabilities and precision.

    It is only ever reached through `__call__`, so that it can be moved to another process.
    """

    name: str
    target: str
    adapter: Adapter
    conventions: Conventions = field(default_factory=Conventions)
    precision: dict[str, Precision] = field(default_factory=dict)
    precision_evidence: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    contradictions: list[Contradiction] = field(default_factory=list)
    import_line: str = ""
    device: str = "cpu"
    claims: tuple[str, ...] = ()  # what it promises beyond what every attention must do (`claims:` in attn.yaml)

    facts: list[tuple[str, Finding]] = field(default_factory=list)  # what else was found out, for the table

    disturbed: dict[str, str] = field(default_factory=dict)

    def __call__(self, arguments: Arguments) -> Result:
        """Run on the arguments. Raises `Unsupported`, `Refused` with the exception it raised, or `Violation`.

        Arguments and result are on the CPU, whatever `device` the call runs on. What the call does to its inputs in
        place is done to the arguments; whatever global state it changes is noted in `disturbed` and put back.
        """
        if not getattr(self.adapter, "takes_variants", False):
            for name in VARIANTS:
                if getattr(arguments, name) is not None:
                    raise Unsupported(f"the adapter says nothing of {name}: `takes_variants = True` says that it does")
        if self.device == "cpu":
            result: Result = self.shielded(self.adapter, arguments)
            return result
        moved = arguments.to(self.device)
        result = self.shielded(self.adapter, moved)
        if result.output.device.type != torch.device(self.device).type:
            raise Violation(f"the output is on {result.output.device}, the inputs on {self.device}", merge="device")
        for name in TENSORS:
            there, here = getattr(moved, name), getattr(arguments, name)
            if there is not None and there._version:
                with torch.no_grad():
                    here.copy_(there)
        return result.to("cpu")

    def perform(self, procedure: Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Run `procedure(callable, *args, **kwargs)` in the process where the user's callable is, on its device.

        procedure: a function of a module of ours, for what a single call can't show: a session with a cache, a compiled
        call, seeds, threads.  It gets the callable of the adapter: a function, or a `ModuleFunction`.  Arguments and
        what is returned: tensors, numbers, strings, and lists, tuples and mappings of them.
        timeout_s: longer than for one call.  Raises as `__call__` does.
        """
        function = getattr(self.adapter, "function", None)
        if function is None:
            raise Unsupported("an adapter of its own")
        args, kwargs = moved(args, self.device), moved(kwargs, self.device)
        there = getattr(function, "perform", None)
        if there is None:
            return moved(self.shielded(procedure, function, *args, **kwargs), "cpu")
        name = f"{procedure.__module__}:{procedure.__qualname__}"
        return moved(self.shielded(there, name, *args, timeout_s=timeout_s, **kwargs), "cpu")

    def shielded(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into the user's code: no warning, no changed state and no exit gets through to the run."""
        before = GlobalState()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return function(*args, **kwargs)
        except (Violation, Unsupported, TargetError):
            raise
        except SystemExit as error:
            raise Violation(f"the implementation called sys.exit({error.code!r})", merge="sys.exit") from error
        except Exception as error:
            raise Refused(described(error), error) from error
        finally:
            self.disturbed |= before.put_back()
            self.disturbed |= self._disturbed_elsewhere()

    def _disturbed_elsewhere(self) -> dict[str, str]:
        """What the calls changed in a process of their own (`attn_spec.adapters.apart`)."""
        elsewhere = getattr(getattr(self.adapter, "function", None), "disturbed", {})
        found = dict(elsewhere)
        elsewhere.clear()
        return found

    def close(self) -> None:
        """End the process of its own in which the function runs, where it has one."""
        close = getattr(getattr(self.adapter, "function", None), "close", None)
        if close is not None:
            close()

    @property
    def is_module(self) -> bool:
        """Whether it is judged on hidden states too."""
        return hasattr(self.adapter, "module")

    @property
    def promises_groups(self) -> bool:
        """Whether it is a module whose constructor asks how many key/value heads it should have."""
        return "kv_heads" in getattr(getattr(self.adapter, "module", None), "roles", ())

    @property
    def between(self) -> str:
        """What a module does to q and k on the way to their product: "rotation", "norm", or nothing."""
        return str(getattr(getattr(self.adapter, "module", None), "between", ""))

    @property
    def built_with(self) -> Mapping[str, str]:
        """The variants that a module is built with or has as a parameter: role -> the name it is asked for by."""
        return dict(getattr(getattr(self.adapter, "module", None), "variants", {}))

    @property
    def positional(self) -> bool:
        """Whether q and k arrive at their product as something else than what the projections give, or a module adds to
        or caps the logits of each call."""
        return bool(self.between or self.biased or self.capped)

    @property
    def capped(self) -> float:
        """The softcap that a module has in each call; 0 where there is none."""
        return float(getattr(getattr(self.adapter, "module", None), "softcap", 0.0))

    @property
    def biased(self) -> str:
        """The bias by position that a module adds to the logits of each call: "alibi", "by position", or nothing."""
        return str(getattr(getattr(self.adapter, "module", None), "biased", ""))

    def effective(self, arguments: Arguments) -> Arguments:
        """The arguments as they arrive at q.k and at the softmax; as they are but where `positional`."""
        if not self.positional:
            return arguments
        seen: Arguments = self.shielded(self.adapter.effective, arguments)  # type: ignore[attr-defined]
        return seen

    def fit(self, problem: Problem) -> Problem:
        """The problem as this implementation can take it: a module is built for some sizes only."""
        fit = getattr(self.adapter, "fit", None)
        fitted: Problem = problem if fit is None else fit(problem)
        return fitted

    def as_asked(self, problem: Problem) -> Problem:
        """The problem as it is understood here: of sizes that it can have, causal where it always is."""
        problem = self.fit(problem)
        if self.conventions.causal.value == "always" and problem.causal is None:
            return problem.replace(mask=(*problem.mask, Causal()))
        return problem

    def output(self, arguments: Arguments) -> Tensor:
        return self(arguments).output

    def precision_for(self, dtype: str) -> Precision:
        """The measured or declared precision on inputs of this dtype; the finest where it was not measured."""
        return self.precision.get(dtype) or candidates(dtype)[0]


class GlobalState:
    """The global state of torch that an attention has no business with."""

    def __init__(self) -> None:
        self.dtype = torch.get_default_dtype()
        self.grad = torch.is_grad_enabled()
        self.threads = torch.get_num_threads()
        self.rng = torch.get_rng_state()
        self.random = random.getstate()
        self.deterministic = torch.are_deterministic_algorithms_enabled()

    def put_back(self) -> dict[str, str]:
        """Restore it; what had changed, by name, as "before -> after"."""
        changed: dict[str, str] = {}
        if torch.get_default_dtype() != self.dtype:
            changed["default dtype"] = f"{self.dtype} -> {torch.get_default_dtype()}"
            torch.set_default_dtype(self.dtype)
        if torch.is_grad_enabled() != self.grad:
            changed["grad mode"] = f"{self.grad} -> {torch.is_grad_enabled()}"
            torch.set_grad_enabled(self.grad)
        if torch.get_num_threads() != self.threads:
            changed["number of threads"] = f"{self.threads} -> {torch.get_num_threads()}"
            torch.set_num_threads(self.threads)
        if not torch.equal(torch.get_rng_state(), self.rng):
            changed["random generator"] = "advanced or reseeded"
            torch.set_rng_state(self.rng)
        if random.getstate() != self.random:
            changed["Python's random generator"] = "advanced or reseeded"
            random.setstate(self.random)
        if torch.are_deterministic_algorithms_enabled() != self.deterministic:
            changed["deterministic mode"] = f"{self.deterministic} -> {not self.deterministic}"
            torch.use_deterministic_algorithms(self.deterministic)
        return changed


@dataclass(frozen=True)
class Contradiction:
    """A measured convention that contradicts the declared one, or the meaning of a parameter's name."""

    field: str
    expected: Finding
    measured: Finding

    @property
    def line(self) -> str:
        """The line of attn.yaml to write if it is meant."""
        return f"{self.field}: {self.measured.value}"


def described(error: BaseException) -> str:
    """An exception as one line; a bare assert is named by its source line."""
    text = " ".join(str(error).split())
    if not text and error.__traceback__ is not None:
        frames = inspect.getinnerframes(error.__traceback__)
        text = (frames[-1].code_context or [""])[0].strip()
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def is_clear(error: BaseException) -> bool:
    """Whether an exception reads as a refusal, and not as a crash inside."""
    crashes = (AttributeError, NameError, KeyError, ZeroDivisionError, RecursionError, MemoryError)
    if isinstance(error, NotImplementedError):
        return True
    if re.search(r"can't allocate memory|out of memory", str(error), re.IGNORECASE):
        return False
    return not isinstance(error, crashes) and described(error) != type(error).__name__


def import_source(target: Callable[..., Any]) -> str:
    """A line of Python that imports the callable as `impl`; empty where it has no module and name of its own."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if not module or module == "__main__" or "<" in name or "." in name:
        return ""
    return f"from {module} import {name} as impl"
