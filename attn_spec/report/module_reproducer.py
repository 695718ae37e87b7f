"""Reproducers for modules: the module is built with its sizes as numbers, and plain torch stands where ours stood.

Between the projections: hooks (or a mode of torch) let the projections give q, k and v, and keep what reaches the
output projection; the rest of the script is that of a function. Which of these ways fits a module is tried out: the
script's own output has to be that of the judged module. On hidden states: the call, and what the law says of it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
from collections.abc import Mapping
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from attn_spec import invariants
from attn_spec.adapters.implementation import GlobalState, Implementation
from attn_spec.adapters.modules.adapter import ModuleAdapter
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.modules.inject import NotInjected
from attn_spec.adapters.modules.projections import Projection
from attn_spec.adapters.modules.written import Making, NotWritten, Written
from attn_spec.engine import CheckResult
from attn_spec.law import LAWS, Unsupported, Violation
from attn_spec.problem import Problem
from attn_spec.report.reproducer import Script
from attn_spec.report.snippets import Lines

NOT_RUN = ("hangs", "process-died", "sys.exit")  # a script that shows these is not tried out in this process


def picked(f: ModuleFunction, returned: Any) -> str:
    """What takes the output out of what forward returned, as a suffix; "{}" stands for the call."""
    if isinstance(returned, Tensor) or not isinstance(returned, (tuple, list, Mapping)):
        return "{}"
    output = f.tensors(returned)[0]
    items = list(returned.values()) if isinstance(returned, Mapping) else list(returned)
    place = next(n for n, item in enumerate(items) if item is output)
    return f"list({{}}.values())[{place}]" if isinstance(returned, Mapping) else f"{{}}[{place}]"


def in_order(module: nn.Module, inputs: list[str]) -> int:
    """How many of the inputs are the first parameters of forward, and so need no name: one, or all three."""
    names = list(inspect.signature(module.forward).parameters)
    count = next((n for n, name in enumerate(inputs) if names[n : n + 1] != [name]), len(inputs))
    return count if len(inputs) == 3 else min(count, 1)


def bias_name(module: nn.Module, p: Projection) -> str:
    named = module.named_parameters(remove_duplicate=False)
    return next((name for name, x in named if x is p.bias), "") if p.bias is not None else ""


class ModuleScript(Script):
    """What the scripts on q, k, v and on hidden states have in common: the module is built, and code is run on it."""

    def __init__(
        self,
        implementation: Implementation,
        problem: Problem,
        violation: CheckResult | Violation,
        *,
        check: bool = True,
    ) -> None:
        adapter = implementation.adapter
        assert isinstance(adapter, ModuleAdapter)
        assert adapter.module is not None
        self.adapter: ModuleAdapter = adapter
        self.f: ModuleFunction = adapter.module
        super().__init__(implementation, problem, violation, check=check)

    @property
    def making(self) -> Making:
        raise NotImplementedError

    @cached_property
    def written(self) -> Written:
        raise NotImplementedError

    @property
    def built(self) -> str:
        """The module as an expression: built, cast, in eval mode."""
        cast = "" if self.problem.dtype == "float32" else f".to(torch.{self.problem.dtype})"
        return f"{self.written.module}{cast}.eval()"

    @property
    def seeded(self) -> Lines:
        return [] if self.making.constructor is None else [f"torch.manual_seed({self.making.seed})"]

    def imported(self) -> Lines:
        return list(self.written.imports)

    def error_of(self, code: Lines) -> BaseException | None:
        """What the code raises on the judged module; None where it runs through."""
        return self._run(code)[1]

    def _run(self, code: Lines) -> tuple[dict[str, Any], BaseException | None]:
        standard = {"torch": torch, "Tensor": Tensor, "mock": mock, "TorchFunctionMode": TorchFunctionMode}
        names = {**standard, **self.written.names}
        if self.f.instance is not None:
            names[self.written.module] = self.making.module()
        before = GlobalState()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec("\n".join(code), names)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an assertion of the script, or whatever the module raises
            return names, error
        finally:
            before.put_back()
        return names, None

    def fails(self, body: Lines) -> bool:
        """Whether the script fails by its assertion, or by the exception that was reported."""
        if self.violation.merge in NOT_RUN:
            return True
        error = self.error_of([*self.code(body), *body])
        if error is None:
            return False
        said = f"{self.violation.message} {self.violation.evidence.get('raised', '')}"
        return isinstance(error, AssertionError) or self.violation.merge == "returns" or type(error).__name__ in said


def module_reproducer(
    implementation: Implementation, problem: Problem, violation: CheckResult | Violation, *, check: bool = True
) -> str:
    """The script for a violation of a module; where none shows it, one that builds the module and makes the call."""
    from attn_spec.report.core_reproducer import CoreScript
    from attn_spec.report.hidden_reproducer import HiddenScript

    invariants.load()
    law = LAWS.get(getattr(violation, "code", ""))
    try:
        if law is None or not law.of_modules:
            return CoreScript(implementation, problem, violation, check=check).shortest()
        script = HiddenScript(implementation, problem, violation, check=check)
        if not check or violation.merge in NOT_RUN or script.agrees():
            return script.shortest()
    except (NotWritten, NotInjected, Unsupported) as error:
        reason = str(error)
    else:
        reason = "what the module is given"
    try:
        script = HiddenScript(implementation, problem, violation, check=False)
        return script.text(script.call_only())
    except (NotWritten, Unsupported):
        return f"# no short script shows this: {reason} can't be written in plain torch\n"
