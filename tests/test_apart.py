"""An implementation that crashes, hangs or eats memory: each is one failed check, and the rest runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attn_spec import adapt
from attn_spec.adapters.apart import Apart
from attn_spec.adapters.serving import portable
from attn_spec.law import Violation
from attn_spec.problem import Problem

HOSTILE = """
import ctypes, os, time, torch

def plain(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

def hostile(q, k, v):
    if q.shape[:3] == (1, 2, 17):
        ctypes.string_at(0)
    if q.shape[:3] == (1, 2, 31):
        time.sleep(600)
    if q.shape[:3] == (1, 2, 33):
        os._exit(3)
    if q.shape[:3] == (1, 2, 63):
        torch.empty(10**14)
    return plain(q, k, v) * (1.01 if q.shape[2] == 65 else 1.0)

def rude(q, k, v):
    q *= 2
    torch.set_default_dtype(torch.float64)
    return plain(q / 2, k, v)

def in_turn(function, q, k, v, times):
    torch.set_default_dtype(torch.float64)
    return {"outputs": [function(q, k, v) for _ in range(times)], "process": os.getpid()}

kept = torch.zeros(2, 2, 7, 8)

def reuses(q, k, v):
    return kept.copy_(plain(q, k, v)) if q.shape == kept.shape else plain(q, k, v)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "hostile_attention.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import hostile_attention  # type: ignore[import-not-found]

    yield hostile_attention
    del sys.modules["hostile_attention"]


def apart(module: Any, name: str, timeout_s: float = 60.0) -> Apart:
    return Apart(f"hostile_attention.{name}", getattr(module, name), timeout_s)


def test_the_same_numbers_strides_and_gradients(module: Any) -> None:
    function = apart(module, "plain")
    for layout in ("contiguous", "transposed", "sliced"):
        a = Problem(layout=layout).arguments()
        assert torch.equal(function(a.q, a.k, a.v), module.plain(a.q, a.k, a.v))
    q, k, v = (x.requires_grad_() for x in (a.q.clone(), a.k.clone(), a.v.clone()))
    cotangent = torch.randn(2, 2, 7, 8)
    got = torch.autograd.grad(function(q, k, v), (q, k, v), cotangent)
    expected = torch.autograd.grad(module.plain(q, k, v), (q, k, v), cotangent)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    function.close()


def test_what_a_call_does_to_its_inputs_and_to_torch_comes_back(module: Any) -> None:
    made = adapt(apart(module, "rude"), name="rude")
    a = Problem().arguments()
    before = a.q.clone()
    made(a)
    assert torch.equal(a.q, before * 2)
    assert "default dtype" in made.disturbed
    assert torch.get_default_dtype() == torch.float32
    made.close()


def test_an_output_that_is_written_again(module: Any) -> None:
    made = adapt(apart(module, "reuses"), name="reuses")
    for seed in (0, 1):
        made(Problem(seed=seed).arguments())
    assert made.disturbed.get("the output of an earlier call") == "overwritten"
    made.close()


@pytest.mark.parametrize(
    ("length", "said"), [(17, "died of SIGSEGV"), (31, "no answer within 2 s"), (33, "exit status 3")]
)
def test_death_is_a_violation_and_the_next_call_starts_anew(module: Any, length: int, said: str) -> None:
    function = apart(module, "hostile", timeout_s=2.0)
    bad = Problem(batch=1, q_len=length, kv_len=length).arguments()
    good = Problem().arguments()
    function(good.q, good.k, good.v)
    with pytest.raises(Violation, match=said):
        function(bad.q, bad.k, bad.v)
    assert function(good.q, good.k, good.v).shape == good.q.shape
    function.close()


def test_exceptions_keep_their_kind() -> None:
    class OddError(ValueError):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    assert isinstance(portable(OddError(1, 2)), ValueError)
    assert "1 and 2" in str(portable(OddError(1, 2)))
    assert isinstance(portable(NotImplementedError("no")), NotImplementedError)
    assert isinstance(portable(SystemExit(3)), SystemExit)


def test_one_run_reports_each(tmp_path: Path, module: Any) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "--attn-impl=hostile_attention.hostile", "--attn-timeout=2",
        "--attn-json=out.json", "-k", "edge_sizes",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    [judged] = json.loads((tmp_path / "out.json").read_text())["implementations"]
    failed = {check["problem"]["q_len"]: check["message"] for check in judged["checks"] if check["outcome"] == "failed"}
    assert set(failed) == {17, 31, 33, 63, 65}
    for length, said in ((17, "SIGSEGV"), (31, "within 2 s"), (33, "exit status 3"), (63, "allocate"), (65, "output")):
        assert said in failed[length]
    assert judged["counts"]["passed"] >= 6


def test_tensors_of_every_kind_go_over(module: Any) -> None:
    from attn_spec.adapters.parcels import packed, unpacked

    whole = torch.arange(24.0).reshape(2, 3, 4)
    cases: list[Tensor] = [whole, whole.mT, whole[:, 1:, ::2], whole[:1].expand(5, 3, 4), whole[:0], torch.tensor(True)]
    for x in (*cases, whole.bfloat16(), whole.half().mT, whole.double()[..., 1]):
        again = unpacked(packed(x))
        assert again.dtype == x.dtype
        assert again.stride() == x.stride() or not x.numel()
        assert torch.equal(again, x)


def test_a_procedure_runs_where_the_function_is(module: Any) -> None:
    made = adapt(apart(module, "plain"), name="plain")
    a = Problem().arguments()
    found = made.perform(module.in_turn, a.q, a.k, a.v, times=2)
    assert found["process"] != os.getpid()
    assert "default dtype" in made.disturbed
    assert torch.get_default_dtype() == torch.float32
    for out in found["outputs"]:
        assert torch.equal(out, made(a).output)
    made.close()
    here = adapt(module.plain, name="plain").perform(module.in_turn, a.q, a.k, a.v, times=1)
    assert here["process"] == os.getpid()
    assert torch.equal(here["outputs"][0], found["outputs"][0])


def test_a_changed_grad_mode_is_seen_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mode_attention.py").write_text(
        "import random, torch\n"
        "def off(q, k, v):\n"
        "    torch.set_grad_enabled(False)\n"
        "    random.seed(0)\n"
        "    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import mode_attention  # type: ignore[import-not-found]

    made = adapt(Apart("mode_attention.off", mode_attention.off, 60.0), name="off")
    made(Problem().arguments())
    assert {"grad mode", "Python's random generator"} <= set(made.disturbed)
    assert torch.is_grad_enabled()
    made.close()


def test_after_several_deaths_the_rest_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dead_attention.py").write_text("import os\ndef dead(q, k, v):\n    os._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import dead_attention  # type: ignore[import-not-found]

    from attn_spec.adapters.function import FunctionAdapter
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.adapters.signature import read
    from attn_spec.engine import Subject
    from attn_spec.invariants.shapes import edge_sizes

    function = Apart("dead_attention.dead", dead_attention.dead, 60.0)
    made = Implementation("dead", "dead", FunctionAdapter(function, read(function, "dead")))
    outcomes = [Subject(made).judge(edge_sizes, Problem()).outcome for _ in range(6)]
    assert outcomes == ["failed"] * 5 + ["not-run"]
