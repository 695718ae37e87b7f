"""Attention of released packages: what is right passes, in few lines of YAML, and what is wrong is caught."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from attn_spec import check_attention
from attn_spec.check import Report
from attn_spec.config import ImplementationConfig, load

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUDGET_S = 120.0  # of one module; they take 5 to 20
SESSIONS = tuple(f"ATN105{n}" for n in range(6))  # the laws of decoding with a module's cache
LINES = 12  # of YAML for one of them

# what tells: a law that must fail, a fault that the diagnosis must name, words that a message must hold ("": any)
WRONG = {
    "self-attention-v1": ("ATN103", "", "input: SD"),
    "self-attention-v2": ("ATN103", "", "input: SD"),
    "x-transformers-flash": ("ATN450", "causal-ignored", ""),
    "x-transformers-mask-and-causal": ("ATN510", "", ""),
    "x-transformers-flash-lengths": ("ATN404", "", ""),
    "ring-attention": ("ATN501", "mask-ignored-when-causal", ""),
    "litgpt": ("ATN507", "causal-ignored-with-mask", ""),
    "gemma3": ("ATN782", "softcap-argument-unused", "attn_logit_softcapping = 1.0 and changes nothing"),
    "vit-without-flash": ("ATN103", "", "einops.einsum"),
    "kv-cache-gpt2": ("ATN1050", "", "raises RuntimeError"),
    "megatron-bert": ("ATN650", "", ""),
    "diffusers-causal": ("ATN401", "causal-ignored", ""),
    "latent-attention": ("ATN150", "", "number of dimensions"),
}

WRONG_FUNCTIONS = {
    "attend-flash-call": ("ATN401", "causal-ignored", ""),
    "attend-flash-built": ("ATN404", "causal-offset-clamped", ""),
    "attend-l2-flash": ("ATN301", "", ""),
    "local": ("ATN201", "", "sum of its row's weights"),
    "ring-flash": ("ATN404", "", ""),
    "ring-flash-masks": ("ATN507", "mask-ignored-when-causal", ""),
    "llama-eager-bool": ("ATN501", "", ""),
    "aten-math-bool": ("ATN501", "bool-mask-added", ""),
    "diffusers-flex": ("ATN401", "", ""),
    "diffusers-flex-padding": ("ATN516", "", ""),
    "fake-flash": ("ATN404", "", ""),
    "memory-efficient-chunks": ("ATN401", "", "the output has shape"),
    "flash-reference-padding": ("ATN507", "", ""),
}
OF_FUNCTIONS = {  # the package of each function of functions.py, by the head of its name
    "attend": "x_transformers",
    "ring": "ring_attention_pytorch",
    "local": "local_attention",
    "diffusers": "diffusers",
    "memory": "memory_efficient_attention",
    "flash": "flash_attn",
    "fake": "flash_attn",  # run.sh installs the two together
    "aten": "torch",
}


def entries(file: str) -> dict[str, ImplementationConfig]:
    return dict(load(HERE / file).implementations)


HONEST = entries("honest.yaml")
HONEST_FUNCTIONS = entries("honest_functions.yaml")


def package(target: str) -> str:
    """The package that a target needs."""
    if "functions.py" in target:
        return OF_FUNCTIONS[target.partition(":")[2].partition("_")[0]]
    in_files = ("vit_pytorch", "llms_from_scratch")
    return next((name for name in in_files if name in target), target.partition(".")[0])


def judged(file: str, name: str, monkeypatch: pytest.MonkeyPatch, laws: tuple[str, ...] = ()) -> Report:
    """The report on an entry of a file, by some laws alone or all.

    Skips where the package is missing, but not in the group's own environment.
    """
    entry = entries(file)[name]
    assert entry.target is not None
    needed, command = package(entry.target), "bash tests/third_party/run.sh"
    own = bool(os.environ.get("ATTN_SPEC_THIRD_PARTY"))
    if importlib.util.find_spec(needed) is None:
        missing = f"{needed} is not installed; run: {command}"
        if own:
            pytest.fail(missing)
        pytest.skip(missing)
    monkeypatch.chdir(ROOT)  # targets in files are given from there
    declared = entry.model_dump(exclude_unset=True, by_alias=True, exclude={"target"})
    report = check_attention(entry.target, profile="quick", budget_s=BUDGET_S, laws=laws, **declared)
    assert report.counts["not-run"] == 0, f"{BUDGET_S} s were not enough"
    return report


@pytest.mark.parametrize("name", HONEST)
def test_honest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged("honest.yaml", name, monkeypatch)
    assert report.counts["not-run"] == 0, f"{BUDGET_S} s were not enough"
    assert report.passed, str(report)
    assert report.counts["passed"] > 130, str(report)


@pytest.mark.parametrize("name", entries("cached.yaml"))
def test_decoding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged("cached.yaml", name, monkeypatch, SESSIONS)
    assert report.passed, str(report)
    assert report.counts["passed"] >= 7, str(report)  # of 8, where no padding is taken


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged("wrong.yaml", name, monkeypatch)
    law, fault, words = WRONG[name]
    assert report.verdict == "failed", str(report)
    messages = [result.message for result in report.results if (result.code, result.outcome) == (law, "failed")]
    assert any(words in message for message in messages), str(report)
    assert not fault or fault in report.diagnosis, str(report)


VARIANTS = {  # laws of variants that must have held on some problem
    "gemma2-eager": ("ATN711", "ATN712", "ATN782"),
    "gpt-oss-eager": ("ATN731", "ATN732", "ATN782"),
    "local-causal": ("ATN701", "ATN702", "ATN703", "ATN782"),
    "t5-eager-bias": ("ATN103", "ATN650"),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_modules_are_judged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged("honest.yaml", name, monkeypatch, VARIANTS[name])
    assert {r.code for r in report.results if r.outcome == "passed"} == set(VARIANTS[name]), str(report)


def test_a_crash_is_no_pass() -> None:
    """Where it is measured it crashes at times, which ends the run as a whole; else a check says that it died."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--attn-impl=t5-flex", "--attn-timeout=120"]
    command += [f"--attn-config={HERE / 'crashing.yaml'}", "attn_spec/suites/test_modules.py::test_module_output"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    said = ended.stdout + ended.stderr
    failed = any(words in said for words in ("the process died", "index out of bounds"))
    assert ended.returncode < 0 or (ended.returncode == 1 and failed), said  # ended by a signal, or failed


@pytest.mark.parametrize("name", HONEST_FUNCTIONS)
def test_honest_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged("honest_functions.yaml", name, monkeypatch)
    assert report.passed, str(report)
    assert report.counts["passed"] > 120, str(report)


@pytest.mark.parametrize("name", WRONG_FUNCTIONS)
def test_wrong_function(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = judged("wrong_functions.yaml", name, monkeypatch)
    law, fault, words = WRONG_FUNCTIONS[name]
    assert report.verdict == "failed", str(report)
    messages = [result.message for result in report.results if (result.code, result.outcome) == (law, "failed")]
    assert any(words in message for message in messages), str(report)
    assert not fault or fault in report.diagnosis, str(report)


def test_every_wrong_entry_is_expected() -> None:
    assert entries("wrong.yaml").keys() == WRONG.keys()
    assert entries("wrong_functions.yaml").keys() == WRONG_FUNCTIONS.keys()


FILES = ("honest.yaml", "wrong.yaml", "cached.yaml", "crashing.yaml", "honest_functions.yaml", "wrong_functions.yaml")


@pytest.mark.parametrize("file", FILES)
def test_a_module_takes_few_lines(file: str) -> None:
    node = yaml.compose((HERE / file).read_text(encoding="utf-8"))
    ((_, implementations),) = node.value
    for name, entry in implementations.value:
        last = entry.value[-1][1]
        while last.value and not isinstance(last, yaml.ScalarNode):  # the end of a block mapping is that of the next
            last = last.value[-1][1] if isinstance(last, yaml.MappingNode) else last.value[-1]
        assert last.end_mark.line - entry.start_mark.line < LINES, name.value
