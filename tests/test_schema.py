"""attn.schema.json: it is that of the models, is shipped, and explains every key."""

from __future__ import annotations

import argparse
import json
from importlib import resources
from typing import Any

import pytest

from attn_spec import command_arguments, config, init_command
from attn_spec.config import ImplementationConfig, KnownFailureConfig, PrecisionConfig, json_schema
from attn_spec.config_words import CALL_WORDS, SIZE_WORDS
from attn_spec.conventions import CHOICES, ROLES


def definition(section: type[config._Section]) -> dict[str, Any]:
    found: dict[str, Any] = json_schema()["definitions"][section.__name__]
    return found


def test_the_shipped_file_is_current() -> None:
    shipped = resources.files("attn_spec").joinpath("attn.schema.json").read_text(encoding="utf-8")
    assert json.loads(shipped) == json_schema(), "run `attn-spec init --schema > attn_spec/attn.schema.json`"


def test_it_is_printed() -> None:
    parser = argparse.ArgumentParser()
    command_arguments.add_init(parser.add_subparsers(dest="command"))
    lines = init_command.run(parser.parse_args(["init", "--schema"]))
    assert json.loads("\n".join(lines)) == json_schema()


@pytest.mark.parametrize("section", [ImplementationConfig, KnownFailureConfig, PrecisionConfig])
def test_every_key_is_known_and_explained(section: type[config._Section]) -> None:
    properties = definition(section)["properties"]
    assert list(properties) == config._names(section)
    assert [key for key, about in properties.items() if not about.get("description")] == []
    assert definition(section)["additionalProperties"] is False


def test_every_choice_is_an_enum() -> None:
    keys = definition(ImplementationConfig)["properties"]
    for name, choices in CHOICES.items():
        assert keys[name]["enum"][: len(choices)] == list(choices)
    assert 2 in keys["lse_base"]["enum"]
    assert list(keys["parameters"]["properties"]) == list(ROLES)
    assert keys["construct"]["additionalProperties"]["anyOf"][0]["enum"] == list(SIZE_WORDS)
    assert keys["call"]["additionalProperties"]["anyOf"][0]["enum"] == list(CALL_WORDS)
    assert "BHQK" in keys["mask_shapes"]["items"]["enum"]


def test_every_reference_leads_somewhere() -> None:
    schema = json_schema()

    def references(part: Any) -> list[str]:
        if isinstance(part, list):
            return [name for item in part for name in references(item)]
        if not isinstance(part, dict):
            return []
        own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
        return own + [name for value in part.values() for name in references(value)]

    found = set(references(schema))
    assert found == {f"#/definitions/{name}" for name in schema["definitions"]}
