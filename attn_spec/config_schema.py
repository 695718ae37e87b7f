"""The JSON Schema of attn.yaml, made from the models of `attn_spec.config`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attn_spec.config import _File
from attn_spec.config_sections import CACHE_WORDS
from attn_spec.config_words import CALL_WORDS, CLAIMS, PROJECTIONS, SIZE_WORDS
from attn_spec.conventions import CHOICES, ROLES

KEYS: tuple[tuple[str, Iterable[str], str], ...] = (
    ("parameters", ROLES, "parameter"),
    ("projections", PROJECTIONS, "submodule or parameter"),
)
WORDS = {"construct": SIZE_WORDS, "call": CALL_WORDS}


def schema() -> dict[str, Any]:
    """The schema as `attn_spec/attn.schema.json` ships it (draft 7, which editors read best)."""
    parts = _File.model_json_schema(ref_template="#/definitions/{model}")
    definitions = {name: _plain(part) for name, part in parts.pop("$defs").items()}
    keys = definitions["ImplementationConfig"]["properties"]
    for name, choices in CHOICES.items():
        numbers = [int(word) for word in choices if word.isdigit()]  # YAML reads 2 as a number
        keys[name] = {"description": keys[name].get("description", ""), "enum": [*choices, *numbers]}
    for name, words, what in KEYS:
        each = {word: {"type": "string", "description": f"The name of the {what} for {word}."} for word in words}
        keys[name] |= {"properties": each, "additionalProperties": False}
    keys["claims"]["items"] = {"type": "string", "enum": list(CLAIMS)}
    made = definitions["CacheConfig"]["properties"]["arguments"]
    made["additionalProperties"] = {"anyOf": [{"enum": list(CACHE_WORDS)}, {}]}
    for name, known in WORDS.items():
        keys[name]["additionalProperties"] = {"anyOf": [{"enum": list(known)}, {}]}
    named = {"allOf": [{"$ref": "#/definitions/ImplementationConfig"}, {"required": ["target"]}]}
    by_name = _plain(parts["properties"]["implementations"]) | {"additionalProperties": named}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "attn.yaml",
        "description": parts["description"],
        "type": "object",
        "minProperties": 1,
        "properties": {"implementations": by_name},
        "if": {"required": ["implementations"]},
        "then": {"properties": {"implementations": {}}, "additionalProperties": False},
        "else": {"$ref": "#/definitions/ImplementationConfig"},
        "definitions": definitions,
    }


def _plain(part: Any) -> Any:
    """A piece of schema without the titles, the empty defaults and the null beside another type that pydantic adds."""
    if isinstance(part, list):
        return [_plain(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {key: value for key, value in part.items() if key != "title" and (key, value) != ("default", None)}
    if isinstance(kept.get("description"), str):
        kept["description"] = " ".join(kept["description"].split())
    if {"type": "null"} in kept.get("anyOf", []):
        (other,) = [choice for choice in kept.pop("anyOf") if choice != {"type": "null"}]
        kept = {**other, **kept}
    if "$ref" in kept and len(kept) > 1:  # draft 7 reads nothing beside a $ref
        kept["allOf"] = [{"$ref": kept.pop("$ref")}]
    return {key: _plain(value) for key, value in kept.items()}
