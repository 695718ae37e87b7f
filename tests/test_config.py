"""attn.yaml: what it may say, and what it is told where it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_spec import config
from attn_spec.config import ConfigError, ImplementationConfig, load
from attn_spec.conventions import CHOICES

WHOLE = """
implementations:
  mine:
    target: pkg.mod:attn
    layout: BSHD
    alignment: bottom-right
    lse_base: 2
    parameters: {scale: temperature}
    fixed: {deterministic: true}
    precision: {scores: float32}
    require: [gqa, bfloat16]
    strict: true
    known_failures:
      - {check: ATN510, problem: "*bf16", reason: gives NaN, link: "https://example.org"}
  other: {target: kernels/other.py:attn}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "attn.yaml"
    path.write_text(text)
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    found = load(written(tmp_path, WHOLE))
    mine = found.implementations["mine"]
    assert mine.declared() == {
        "layout": "BSHD",
        "alignment": "bottom-right",
        "lse_base": "2",
        "parameters": {"scale": "temperature"},
        "fixed": {"deterministic": True},
        "precision": {"scores": "float32"},
    }
    policy = mine.policy()
    assert policy.strict
    assert policy.require == ("gqa", "bfloat16")
    assert (policy.known_failures[0].check, policy.known_failures[0].reason) == ("ATN510", "gives NaN")


def test_an_implementation_is_found_by_name_and_by_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = load(written(tmp_path, WHOLE))
    for target in ("mine", "pkg.mod:attn", "pkg.mod.attn"):
        assert found.find(target) == ("mine", found.implementations["mine"])
    assert found.find("./kernels/../kernels/other.py:attn") == ("other", found.implementations["other"])
    assert found.find("pkg.mod.other") is None


def test_a_flat_file_is_for_the_only_implementation(tmp_path: Path) -> None:
    found = load(written(tmp_path, "layout: BSHD\n"))
    entry = found.find("anything.at.all")
    assert entry is not None
    assert entry[1].declared() == {"layout": "BSHD"}
    assert found.find("anything.at.all", only=False) is None
    named = load(written(tmp_path, "target: pkg.mod.attn\nlayout: BSHD\n"))
    assert named.find("pkg.mod:attn") is not None
    assert named.find("pkg.mod:other") is None


def test_every_convention_can_be_declared() -> None:
    assert set(CHOICES) <= set(ImplementationConfig.model_fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "attn.yaml: holds nothing; write a mapping that begins with `implementations:`"),
        ("- a", "attn.yaml: holds a list; write a mapping"),
        ("a: [1\nb: 2", "attn.yaml:2: is no YAML"),
        (
            "implementation: {a: {target: b.c}}",
            "attn.yaml:1: implementation: is not a key; did you mean 'implementations'?",
        ),
        ("layot: BSHD", "attn.yaml:1: layot: is not a key; did you mean 'layout'?"),
        ("strict: 1", "attn.yaml:1: strict: 1 is a number of type int; write true or false"),
        ("causal: true", "attn.yaml:1: causal: True is not one of flag, always, never"),
        ("require: gqa", "attn.yaml:1: require: 'gqa' is text; write a list, [a, b]"),
        ("a: &a [*a]", "attn.yaml:1: a: is not a key"),
        ("[" * 3000 + "]" * 3000, "attn.yaml: is nested too deeply"),
        ("layout: BSHD\nlayout: BHSD", "attn.yaml:2: layout: is written twice in one mapping"),
        ("implementations:\n  a:\n    layout: BSHD", "attn.yaml:2: implementations.a: has no target"),
        ("implementations:\n  a: 3", "attn.yaml:2: implementations.a: 3 is a number"),
        (
            "strict: true\nprecision:\n  scores: fp32",
            "attn.yaml:3: precision.scores: 'fp32' is not one of float64, float32",
        ),
        (
            "known_failures:\n- check: ATN301\n  reason: ' '",
            "attn.yaml:3: known_failures.0.reason: is empty; say in a few",
        ),
        ("a: !!python/object/apply:os.getcwd []", "attn.yaml:1: is no YAML"),
    ],
)
def test_what_is_said(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert str(caught.value).replace(f"{tmp_path}/", "").startswith(said)


def test_the_shipped_ledger_goes_by_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "implementations:\n  s:\n    target: sdpa\n    known_failures: [{check: ATN304, reason: scale 0}]\n"
    monkeypatch.setattr(config, "LEDGER", written(tmp_path, text))
    config._shipped.cache_clear()
    try:
        for target in ("sdpa", "torch.nn.functional.scaled_dot_product_attention"):
            assert [known.check for known in config.shipped_ledger(target)] == ["ATN304"]
        assert config.shipped_ledger("sdpa-math") == ()
    finally:
        config._shipped.cache_clear()
