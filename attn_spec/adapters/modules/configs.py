"""Which class the config of a module is of: the one that an annotation names, or that stands beside the module."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

from attn_spec.adapters.signature import TargetError


def annotated(annotation: Any, known: Mapping[str, Any]) -> Iterator[type]:
    """The classes that an annotation names, in a string, an Optional or a union too. known: the names in its file."""
    if isinstance(annotation, str):
        for word in re.findall(r"[A-Za-z_][\w.]*", annotation):
            yield from annotated(known.get(word), known)
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from annotated(one, known)
    elif inspect.isclass(annotation) and annotation.__module__ != "builtins":
        yield annotation


def beside(name: str, known: Mapping[str, Any]) -> Iterator[type]:
    """The config classes under a class's own name, the likeliest first: BertConfig for BertSelfAttention.

    known: the names in its file.  After them come those of the parts of that model, SamVisionConfig for SamAttention,
    and any of transformers' that is in the file, DebertaV2Config for DisentangledSelfAttention.
    """
    stems = {key.removesuffix("Config"): kind for key, kind in known.items() if key.endswith("Config")}
    stems = {stem: kind for stem, kind in stems.items() if stem and inspect.isclass(kind)}
    own = sorted(filter(name.startswith, stems), key=len, reverse=True)
    parts = [stem for stem in stems if own and stem.startswith(own[0]) and stem not in own]
    others = [stem for stem, kind in stems.items() if getattr(kind, "model_type", "") and stem not in (*own, *parts)]
    yield from (stems[stem] for stem in [*own, *parts, *others])


def field_names(kind: type) -> list[str]:
    """The names that the constructor of a config class takes."""
    names: list[str] = []
    for owner in kind.__mro__:
        names += [n for n in getattr(owner, "__annotations__", {}) if n not in names]
    with contextlib.suppress(TypeError, ValueError):
        names += [n for n in inspect.signature(kind).parameters if n not in names]
    names += [n for n in getattr(kind, "attribute_map", {}) if n not in names]
    taken = getattr(kind, "attribute_map", {})  # transformers: a general name for the config's own
    return [n for n in names if not (n in taken and taken[n] in names)]


def imported(name: str, where: str) -> type:
    """The class of a dotted name; TargetError, which begins with `where`, where there is none."""
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TargetError(f"{where}: {name!r} can't be imported: {error}") from None
    if not inspect.isclass(found):
        raise TargetError(f"{where}: {name!r} is a {type(found).__name__}, not a class")
    return found
