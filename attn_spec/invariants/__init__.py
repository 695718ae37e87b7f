"""The laws that every attention obeys, one theme a file. No pytest in here.

A law takes an implementation and a problem, and returns None or raises a `Violation`. Importing a theme registers its
laws in `attn_spec.law.LAWS`.
"""

import importlib

THEMES = (
    *("shapes", "weights", "scaling", "causality", "masking", "heads", "variants", "numerics", "gradients"),
    *("execution", "metamorphic", "modules", "conformance", "forward_mode"),
)


def load() -> None:
    """Import every theme, so that `attn_spec.law.LAWS` is whole."""
    for theme in THEMES:
        importlib.import_module(f"attn_spec.invariants.{theme}")
