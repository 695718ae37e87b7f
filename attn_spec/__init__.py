"""attn-spec: checks any attention implementation against a specification and says what is wrong, by name.

Everything is imported when it is first asked for, so that a pytest run without our options pays nothing.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_spec.adapters.adapt import adapt as adapt
    from attn_spec.adapters.implementation import Adapter as Adapter
    from attn_spec.adapters.implementation import Implementation as Implementation
    from attn_spec.adapters.implementation import Result as Result
    from attn_spec.adapters.resolve import resolve as resolve
    from attn_spec.adapters.signature import TargetError as TargetError
    from attn_spec.check import Report as Report
    from attn_spec.check import check_attention as check_attention
    from attn_spec.config import ConfigError as ConfigError
    from attn_spec.conventions import Conventions as Conventions
    from attn_spec.engine import CheckResult as CheckResult
    from attn_spec.engine import KnownFailure as KnownFailure
    from attn_spec.engine import Policy as Policy
    from attn_spec.law import Law as Law
    from attn_spec.law import Refused as Refused
    from attn_spec.law import Unsupported as Unsupported
    from attn_spec.law import Violation as Violation
    from attn_spec.problem import Arguments as Arguments
    from attn_spec.problem import Problem as Problem
    from attn_spec.tolerance import Precision as Precision

__version__ = "0.1.0"

_HOMES = {
    "Adapter": "attn_spec.adapters.implementation",
    "Arguments": "attn_spec.problem",
    "CheckResult": "attn_spec.engine",
    "ConfigError": "attn_spec.config",
    "Conventions": "attn_spec.conventions",
    "Implementation": "attn_spec.adapters.implementation",
    "KnownFailure": "attn_spec.engine",
    "Law": "attn_spec.law",
    "Policy": "attn_spec.engine",
    "Precision": "attn_spec.tolerance",
    "Problem": "attn_spec.problem",
    "Refused": "attn_spec.law",
    "Report": "attn_spec.check",
    "Result": "attn_spec.adapters.implementation",
    "TargetError": "attn_spec.adapters.signature",
    "Unsupported": "attn_spec.law",
    "Violation": "attn_spec.law",
    "adapt": "attn_spec.adapters.adapt",
    "check_attention": "attn_spec.check",
    "resolve": "attn_spec.adapters.resolve",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604  (names of `_HOMES`, imported when asked for)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with warnings.catch_warnings():  # torch warns when it is imported beside no NumPy, which nothing here needs
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attn_spec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
