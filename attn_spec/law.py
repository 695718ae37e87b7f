"""What an invariant is: a law with a stable code, which holds on a problem or raises a `Violation`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.problem import Problem

THEMES = {
    1: "shapes",
    2: "weights",
    3: "scaling",
    4: "causality",
    5: "masking",
    6: "heads",
    7: "variants",
    8: "numerics",
    9: "gradients",
    10: "decoding",
    11: "randomness",
    12: "execution",
}


class Violation(AssertionError):  # noqa: N818  (the word of the vocabulary)
    """A law that does not hold on a problem, with the evidence.

    message: what was expected and what was received, in one or two sentences.
    evidence: plain data: "expected", "received", "index", "bound", "ratio", or what the law measured.
    hint: what to change, or the line to declare if it is meant; may be empty.
    merge: violations with the same key are one fact seen twice, and are reported once.
    setup: plain torch that changes q, k, v, mask (or `call`) before the comparison, for the reproducer.
    reproducer: a whole script of plain torch, where comparing with the formula is not what fails.
    """

    def __init__(
        self,
        message: str,
        *,
        evidence: dict[str, Any] | None = None,
        hint: str = "",
        merge: str = "",
        setup: str = "",
        reproducer: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.evidence = evidence or {}
        self.hint = hint
        self.merge = merge
        self.setup = setup
        self.reproducer = reproducer


class Advisory(Violation):
    """A violation that is reported, but red only under `strict: true`: bad input taken without complaint."""


class Unsupported(Exception):  # noqa: N818
    """The implementation's signature has no way to ask for what the problem asks."""


class NotRun(Unsupported):  # noqa: N818
    """The check did not run: a budget ended, or the process of the implementation was given up."""


class Refused(Exception):  # noqa: N818
    """The implementation raised a clear exception; `error` is that exception."""

    def __init__(self, message: str, error: BaseException) -> None:
        super().__init__(message)
        self.error = error


@dataclass(frozen=True)
class Law:
    """One invariant. `function(implementation, problem)` returns None or raises a `Violation`.

    code: "ATN301", for ever.  name: "default-scale".  title: the law in one sentence.  advisory: red under `strict`
    only.  of_modules: it is about hidden states, and tried on modules only.
    """

    code: str
    name: str
    title: str
    function: Callable[[Implementation, Problem], None] = field(repr=False)
    advisory: bool = False
    of_modules: bool = False

    @property
    def theme(self) -> str:
        return THEMES[int(self.code[3:]) // 100]

    @property
    def doc(self) -> str:
        """What `attn-spec explain` prints below the title."""
        return inspect.getdoc(self.function) or ""

    def __call__(self, implementation: Implementation, problem: Problem) -> None:
        self.function(implementation, problem)

    def __str__(self) -> str:
        return f"{self.code} {self.name}"


LAWS: dict[str, Law] = {}


def law(
    code: str, name: str, title: str, *, advisory: bool = False, of_modules: bool = False
) -> Callable[[Callable[[Implementation, Problem], None]], Law]:
    """Register a function as the law of a code; raises ValueError where the code or the name is taken."""

    def register(function: Callable[[Implementation, Problem], None]) -> Law:
        own = function.__module__, function.__qualname__  # a module may be imported anew
        for other in LAWS.values():
            if (other.code == code or other.name == name) and own != (
                other.function.__module__,
                getattr(other.function, "__qualname__", ""),
            ):
                raise ValueError(f"law: {code} {name} is taken")
        LAWS[code] = Law(code, name, title, function, advisory, of_modules)
        return LAWS[code]

    return register
