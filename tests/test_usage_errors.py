"""Bad input is a clear usage error with exit status 4, and never a traceback of ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attn_spec import cli

pytest_plugins = ["pytester"]

ATTENTIONS = """
import torch

number = 3

def attn(q, k, v):
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v

def no_qkv(x, y):
    return x

def no_tensor(q, k, v):
    return "done"

class Attention:
    pass

class Module(torch.nn.Module):
    pass
"""
TARGETS = {
    "attentions.atn": "did you mean attn?",
    "attentoins.attn": "did you mean attentions?",
    "attentoins.py:attn": "did you mean attentions.py?",
    "attentions": "name a function in it, such as attn",
    "sdap": "did you mean sdpa",
    "torch.nn.functional.scaled_dot_product_atention": "did you mean scaled_dot_product_attention?",
    "attentions.number": "is a int, which can't be called",
    "attentions.Attention": "is a class and no nn.Module",
    "attentions.Module": "has no forward",
    "attentions.no_qkv": "takes no q, k, v",
    "attentions.no_tensor": "returned str, not a tensor",
    "raises.attn": "ZeroDivisionError: division by zero",
    "exits.attn": "SystemExit: 3",
    "broken.attn": "SyntaxError",
    "a b": "is no target",
}
OPTIONS = {
    "--attn-profile=quik": "did you mean quick?",
    "--attn-device=tpu": "is not one of auto, cpu, cuda",
    "--attn-dtype=float31": "did you mean float32?",
    "--attn-seed=one": "is not a whole number",
    "--attn-seed=-1": "is negative",
    "--attn-json=nowhere/out.json": "there is no folder",
    "--attn-config=nowhere.yaml": "can't be read",
}
FILES = {
    "implementations: [": "is no YAML",
    "implementations:\n  a:\n    target: attentions.attn\n    layuot: BSHD\n": "attn.yaml:4: implementations.a.layuot",
    "implementations:\n  a:\n    target: attentions.attn\n    layout: BDSH\n": "did you mean BSHD?",
    "target: attentions.attn\nknown_failures: [{check: ATN301}]\n": "known_failures.0.reason: is missing",
    "target: attentions.attn\nknown_failures: [{check: ATN310, reason: x}]\n": "is the code or name of no law; did",
    "target: attentions.attn\nfixed: {scal: 2.0}\nparameters: {scale: scal}\n": "'scal' is no parameter",
}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--attn-timeout=0")  # no process for each: it would import torch
    pytester.makepyfile(
        attentions=ATTENTIONS, raises="1 / 0\n", exits="import sys\nsys.exit(3)\n", broken="def attn(:\n"
    )
    return pytester


def is_usage_error(result: pytest.RunResult, words: str) -> bool:
    text = result.stderr.str()
    assert result.ret == 4, text + result.stdout.str()
    assert "attn_spec/" not in text.replace("attn_spec/suites", "")
    assert "INTERNALERROR" not in result.stdout.str()
    return text.startswith("ERROR: ") and words in text


@pytest.mark.parametrize("target", TARGETS)
def test_targets(project: pytest.Pytester, target: str) -> None:
    assert is_usage_error(project.runpytest_inprocess(f"--attn-impl={target}"), TARGETS[target])


@pytest.mark.parametrize("option", OPTIONS)
def test_options(project: pytest.Pytester, option: str) -> None:
    assert is_usage_error(project.runpytest_inprocess("--attn-impl=attentions.attn", option), OPTIONS[option])


@pytest.mark.parametrize("text", FILES)
def test_files(project: pytest.Pytester, text: str) -> None:
    (project.path / "attn.yaml").write_text(text)
    assert is_usage_error(project.runpytest_inprocess("--attn-impl=attentions.attn"), FILES[text])


def test_a_file_that_was_asked_for_must_name_the_target(project: pytest.Pytester) -> None:
    (project.path / "mine.yaml").write_text("implementations: {a: {target: other.attn}}\n")
    result = project.runpytest_inprocess("--attn-impl=attentions.attn", "--attn-config=mine.yaml")
    assert is_usage_error(result, "names a, and nothing for attentions.attn")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["describe", "attentions.atn"], "did you mean attn?"),
        (["explain", "ATN3011"], "did you mean ATN301"),
        (["explain", "scale-mising"], "did you mean scale-missing"),
        (["expalin"], "invalid choice"),
        (["describe"], "TARGET"),
    ],
)
def test_commands(
    project: pytest.Pytester, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 4
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out


def test_no_traceback_from_a_process_of_its_own(tmp_path: Path) -> None:
    """The same from a shell: one line on standard error, exit status 4."""
    command = [sys.executable, "-m", "pytest", "--attn-impl=nowhere.attn"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 4
    assert result.stderr.strip() == f"ERROR: nowhere.attn: no module 'nowhere' on the path or in {tmp_path}"


def test_an_output_that_is_a_folder(pytester: pytest.Pytester) -> None:
    pytester.mkdir("out")
    result = pytester.runpytest_subprocess("--attn-impl=naive", "--attn-json=out")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*--attn-json: out is a folder; name a file in it*"])


def test_a_positional_argument_that_is_nothing(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--attn-impl=naive", "nosuch.py")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*nosuch.py: no such file*"])


def test_a_requirement_that_names_nothing(pytester: pytest.Pytester) -> None:
    pytester.makefile(".yaml", attn="implementations:\n  mine: {target: naive, require: [gqaa]}\n")
    result = pytester.runpytest_subprocess("--attn-impl=mine")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["*require: 'gqaa' names nothing; did you mean gqa?*"])
