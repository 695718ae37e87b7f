"""The words that attn.yaml knows beside its own keys: roles, projections, and what stands for a size in use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from attn_spec.conventions import ROLES

# what stands for a value in use, in `construct:` and in `call:`
SIZE_WORDS = ("$hidden", "$heads", "$kv_heads", "$head_dim", "$v_dim", "$context", "$kv_hidden")
CONSTRUCT_WORDS = (*SIZE_WORDS, "$softcap", "$window", "$alibi", "$sinks")
CALL_WORDS = (*SIZE_WORDS, "$positions", "$cos", "$sin", "$identity_rotation")
CLAIMS = ("autocast", "batch-invariant", "deterministic", "export", "fake-tensors", "fullgraph", "threads", "vmap")
PROJECTIONS = ("q", "k", "v", "o", "qkv", "kv")


def _one_of(word: str, known: Iterable[str]) -> str:
    """A key that is known. Raises ValueError with the nearest one."""
    if word in known:
        return word
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys here are {', '.join(known)}"
    raise ValueError(f"is not a key; {hint}")


def words_known(value: Any, known: tuple[str, ...], nested: bool = False) -> Any:
    """A value of `construct:` or `call:` in which every `$word` stands for something, and every `class:` is a name."""
    if isinstance(value, str) and value.startswith("$") and value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        what = f"holds {value}, which is" if nested else "is"
        raise ValueError(f"{what} not one of {', '.join(known)}{hint}")
    if isinstance(value, Mapping):
        name = value.get("class", "some.Class")
        if not isinstance(name, str) or not name:
            raise ValueError(f"has the class {name!r}; write its dotted name, as in {{class: mypkg.Config}}")
    if isinstance(value, (Mapping, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            words_known(item, known, nested=True)
    return value


def _claimed(word: str) -> str:
    """A claim that is known. Raises ValueError with the nearest one."""
    if word in CLAIMS:
        return word
    near = difflib.get_close_matches(word, CLAIMS, n=1)
    raise ValueError(f"is not one of {', '.join(CLAIMS)}{f'; did you mean {near[0]}?' if near else ''}")


Role = Annotated[str, AfterValidator(lambda word: _one_of(word, ROLES))]
Claim = Annotated[str, AfterValidator(_claimed)]
Projection = Annotated[str, AfterValidator(lambda word: _one_of(word, PROJECTIONS))]
Constructed = Annotated[Any, AfterValidator(lambda value: words_known(value, CONSTRUCT_WORDS))]
Called = Annotated[Any, AfterValidator(lambda value: words_known(value, CALL_WORDS))]
