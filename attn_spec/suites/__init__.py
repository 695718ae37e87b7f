"""The suites: which laws are tried on which problems, one theme a module, as pytest tests that anyone can reuse.

With `pytest --attn-impl=TARGET` they are collected by themselves. To verify something inside a test run of your own,
import the tests of a theme and override the fixture that says what is judged:

    import pytest
    from attn_spec.suites.test_causality import *

    @pytest.fixture
    def attention():
        return my_attention          # a function f(q, k, v, ...), or what `attn_spec.adapt` made of it

The fixture's contract: `attention` is a callable or an `attn_spec.Implementation`, the same for every test of a module.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from attn_spec.suites.suite import Suite, Test

__all__ = ["Suite", "Test", "all_tests", "modules"]


def modules(suite: str = "") -> list[str]:
    """The names of the suites' modules, in order; of one apart with its folder: "onnx.test_onnx"."""
    found = sorted(m.name for m in pkgutil.iter_modules([str(Path(__path__[0], suite))]) if m.name.startswith("test_"))
    return [f"{suite}.{name}" if suite else name for name in found]


def all_tests(suite: str = "") -> Iterator[tuple[str, str, Test]]:
    """Every (module, test name, test) of every suite, or of one that is tried with --attn-suite alone."""
    for module in modules(suite):
        for name, value in vars(importlib.import_module(f"{__name__}.{module}")).items():
            if name.startswith("test_") and hasattr(value, "law"):
                yield module, name, value
