"""attn-spec init: the file it writes loads, says what was understood, and changes no verdict."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml

from attn_spec import check_attention, command_arguments, init_command
from attn_spec.adapters.signature import TargetError
from attn_spec.config import ConfigError, load
from attn_spec.init_command import _scalar

ATTENTIONS = """
import torch

def right(q, k, v, temprature=None, return_lse=False):
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    out = s.softmax(-1) @ v
    return (out, torch.logsumexp(s, -1)) if return_lse else out

def top_left(q, k, v, causal=False):
    s = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return s.softmax(-1) @ v

def no(q, k, v):
    return q
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("written.py").write_text(ATTENTIONS)


def said(*words: str) -> list[str]:
    parser = argparse.ArgumentParser()
    command_arguments.add_init(parser.add_subparsers(dest="command"))
    return list(init_command.run(parser.parse_args(["init", *words])))


def test_it_tells_what_it_wrote() -> None:
    lines = said("written.py:right")
    assert lines[0] == "wrote attn.yaml: what was understood of written.py:right"
    assert lines[-1] == "judge it: pytest --attn-impl=written.py:right"
    assert said("sdpa", "--out=other.yaml")[-1] == "judge it: pytest --attn-impl=sdpa --attn-config=other.yaml"


def test_the_file_says_what_was_understood() -> None:
    said("written.py:right")
    text = Path("attn.yaml").read_text()
    first, *rest = text.splitlines()
    assert first.startswith("# yaml-language-server: $schema=")
    assert (Path.cwd() / first.partition("=")[2]).is_file()
    assert any("# layout: BHSD " in line and "# measured: a change in v spreads" in line for line in rest)
    assert any("# lse_base: e " in line and "# measured: " in line for line in rest)
    assert any("# polarity: attend " in line and "# assumed: " in line for line in rest)
    assert "    # fixed: {temprature: null}" in rest
    for key in ("require", "strict", "known_failures"):
        assert any(line.startswith(f"    # {key}: ") for line in rest)
    assert max(map(len, first.splitlines())) < 200


def test_a_contradiction_is_left_to_decide() -> None:
    lines = said("written.py:top_left")
    assert "decide on alignment: top-left is measured, bottom-right is expected" in lines
    (entry,) = load("attn.yaml").implementations.values()
    assert entry.declared() == {"alignment": "bottom-right"}
    assert "# To decide: alignment is measured as top-left" in Path("attn.yaml").read_text()


@pytest.mark.parametrize("name", ["right", "top_left", "no"])
def test_the_verdict_stays(name: str) -> None:
    said(f"written.py:{name}")
    target, (entry,) = f"written.py:{name}", load("attn.yaml").implementations.values()
    assert entry.target == target
    without, with_it = check_attention(target), check_attention(target, **entry.declared())
    assert with_it.counts == without.counts
    assert (with_it.verdict, with_it.diagnosis) == (without.verdict, without.diagnosis)


def test_what_is_in_comments_may_be_declared() -> None:
    """Each line without its # is one that loads, and that what is measured agrees with."""
    said("written.py:right")
    text = Path("attn.yaml").read_text()
    Path("attn.yaml").write_text(re.sub(r"(?m)^    # (\w+: .*  # (measured|assumed): )", r"    \1", text))
    (entry,) = load("attn.yaml").implementations.values()
    assert {"layout", "causal", "grouping", "lse_base", "polarity"} <= set(entry.declared())
    assert check_attention("written.py:right", **entry.declared()).passed


def test_a_file_that_is_there_stays() -> None:
    Path("attn.yaml").write_text("target: mine\n")
    with pytest.raises(ConfigError, match=r"attn.yaml is there already; name another file, or give --force"):
        said("sdpa")
    with pytest.raises(TargetError, match="did you mean sdpa"):
        said("sdap", "--force")
    assert Path("attn.yaml").read_text() == "target: mine\n"
    said("sdpa", "--force")
    assert load("attn.yaml").find("sdpa") is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "names no target"),
        (["sdpa", "--out=nowhere/attn.yaml"], "there is no folder nowhere"),
        (["sdpa", "--out=."], "is a folder; name a file in it"),
    ],
)
def test_what_is_said(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        said(*words)


@pytest.mark.parametrize("text", ["no", "1e3", "2", "a.b:c", "path/to.py:f", "a: b", "~", "é", "x:", "nan", "null"])
def test_names_are_read_back_as_they_were(text: str) -> None:
    assert yaml.safe_load(f"{_scalar(text)}: {_scalar(text)}") == {text: text}
