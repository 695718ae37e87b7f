"""attn.yaml: what it may say about modules, and what it is told where it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from attn_spec.adapters.modules.construct import Sizes
from attn_spec.config import ConfigError, ImplementationConfig, _names, load
from attn_spec.config_words import CALL_WORDS, CONSTRUCT_WORDS, SIZE_WORDS

WHOLE = """
target: pkg.layers:Attention
construct: {width: $hidden, rates: [0.0, $heads], config: {class: pkg.Config, size: $head_dim, bias: true}}
call: {freqs: $identity_rotation, cache: null}
projections: {qkv: in_proj, o: out.proj}
fused: per-head
heads: 8
kv_heads: 2
input: SBD
output: 0
mask_shapes: [BHQK, BK]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "attn.yaml"
    path.write_text(text)
    return path


def test_all_that_is_declared_is_passed_on(tmp_path: Path) -> None:
    (entry,) = load(written(tmp_path, WHOLE)).implementations.values()
    assert entry.declared() == {
        "construct": {
            "width": "$hidden",
            "rates": [0.0, "$heads"],
            "config": {"class": "pkg.Config", "size": "$head_dim", "bias": True},
        },
        "call": {"freqs": "$identity_rotation", "cache": None},
        "projections": {"qkv": "in_proj", "o": "out.proj"},
        "fused": "per-head",
        "heads": 8,
        "kv_heads": 2,
        "input": "SBD",
        "output": 0,
        "mask_shapes": ["BHQK", "BK"],
    }


def test_what_is_left_out_is_not_passed_on() -> None:
    assert ImplementationConfig().declared() == {}


def test_the_words_are_those_that_modules_are_built_with() -> None:
    assert {word[1:] for word in CONSTRUCT_WORDS} == set(Sizes().words)


@pytest.mark.parametrize("word", CALL_WORDS)
def test_each_word_stands_where_it_may(word: str, tmp_path: Path) -> None:
    assert load(written(tmp_path, f"call: {{x: {word}, y: {{z: [{word}]}}}}"))
    path = written(tmp_path, f"construct: {{x: {word}}}")
    if word in SIZE_WORDS:
        assert load(path)
    else:
        with pytest.raises(ConfigError, match="is not one of"):
            load(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("constuct: {a: 1}", "attn.yaml:1: constuct: is not a key; did you mean 'construct'?"),
        ("constructor: {a: 1}", "attn.yaml:1: constructor: is not a key; did you mean 'construct'?"),
        ("construct: [a]", "attn.yaml:1: construct: ['a'] is a list; write a mapping"),
        (
            "strict: true\nconstruct:\n  dim: $hiden",
            "attn.yaml:3: construct.dim: '$hiden' is not one of $hidden, $heads, $kv_heads, $head_dim, $v_dim, "
            "$context, $kv_hidden, $softcap, $window, $alibi, $sinks; did you mean $hidden?",
        ),
        ("construct: {dim: $cos}", "attn.yaml:1: construct.dim: '$cos' is not one of $hidden"),
        (
            "construct: {config: {class: a.B, n: [$head]}}",
            "attn.yaml:1: construct.config: {'class': 'a.B', 'n': ['$head']} holds $head, which is not one of",
        ),
        (
            "construct: {config: {class: 3}}",
            "attn.yaml:1: construct.config: {'class': 3} has the class 3; write its dotted",
        ),
        ("call: {x: $position}", "attn.yaml:1: call.x: '$position' is not one of $hidden, "),
        ("projections: {w: a}", "attn.yaml:1: projections.w: 'w' is not a key; the keys here are q, k, v, o, qkv, kv"),
        ("projections:\n  q: a\n  qvk: b", "attn.yaml:3: projections.qvk: 'qvk' is not a key; did you mean 'qkv'?"),
        ("projections: {q: 1}", "attn.yaml:1: projections.q: 1 is a number of type int; write text"),
        ("parameters: {scal: t}", "attn.yaml:1: parameters.scal: 'scal' is not a key; did you mean 'scale'?"),
        ("heads: 0", "attn.yaml:1: heads: 0 is too small; write 1 or more"),
        ("kv_heads: 2.0", "attn.yaml:1: kv_heads: 2.0 is a number of type float; write a whole number"),
        ("heads: true", "attn.yaml:1: heads: True is true or false; write a whole number"),
        ("output: -1", "attn.yaml:1: output: -1 is too small; write 0 or more"),
        ("input: BDS", "attn.yaml:1: input: 'BDS' is not one of BSD, SBD or SD"),
        ("mask_shapes: [QK, KQ]", "attn.yaml:1: mask_shapes.1: 'KQ' is not one of BHQK, B1QK"),
        ("mask_shapes: QK", "attn.yaml:1: mask_shapes: 'QK' is text; write a list, [a, b]"),
        ("fused: 3", "attn.yaml:1: fused: 3 is a number of type int; write text"),
    ],
)
def test_what_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(said)


ROOT = Path(__file__).parents[1]
SHOWN = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("text", SHOWN)
def test_what_the_documentation_shows_can_be_read(tmp_path: Path, text: str) -> None:
    assert load(written(tmp_path, text)).implementations


def test_the_documentation_shows_every_key() -> None:
    shown = {key for text in SHOWN for entry in _entries(yaml.safe_load(text)) for key in entry}
    assert shown == set(_names(ImplementationConfig))


def _entries(data: dict[str, Any]) -> list[dict[str, Any]]:
    return list(data.get("implementations", {"": data}).values())


@pytest.mark.parametrize("name", ["attn.yaml", "attn-module.yaml"])
def test_the_examples_can_be_read(name: str) -> None:
    assert load(ROOT / "examples" / name).implementations
