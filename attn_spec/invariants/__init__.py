"""The laws that every attention obeys, one theme a file. No pytest in here.

A law takes an implementation and a problem, and returns None or raises a `Violation`. Importing a theme registers its
laws in `attn_spec.law.LAWS`.
"""

import importlib

THEMES = (
    *("shapes", "weights", "scaling", "causality", "masking", "heads", "variants", "numerics", "gradients"),
    *("forward_mode", "decoding", "decoding_caches", "decoding_modules", "randomness", "execution", "compiled"),
    *("autocast", "metamorphic", "modules", "module_running", "module_variants", "pairs", "around", "conformance"),
)


def load() -> None:
    """Import every theme, so that `attn_spec.law.LAWS` is whole."""
    for theme in THEMES:
        importlib.import_module(f"attn_spec.invariants.{theme}")
