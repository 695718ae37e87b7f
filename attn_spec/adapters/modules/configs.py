"""Which class the config of a module is of: the one that an annotation names, or that stands beside the module."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin


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
