"""Triton kernels without a GPU: ours are right, faults planted in them are caught and named, the option says its terms.

What interprets kernels runs in processes of its own: triton reads the environment when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_mutants import MUTANTS, Mutant

from attn_spec import costs, plugin
from attn_spec.adapters.signature import TargetError
from attn_spec.faults import CATALOGUE
from attn_spec.interpreter import VARIABLE
from attn_spec.kills import checks
from attn_spec.law import LAWS
from attn_spec.problem import Problem
from attn_spec.reference.fused.triton import triton_attention

pytest.importorskip("triton", reason="the extra `triton`")
pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]


def run(*arguments: str, interpret: bool = False, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, which has imported nothing yet."""
    environment = {key: value for key, value in os.environ.items() if key not in (VARIABLE, "PYTEST_ADDOPTS")}
    environment |= {"PYTHONPATH": str(ROOT), **({VARIABLE: "1"} if interpret else {})}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd, env=environment)


def judged(target: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    options = ("-m", "pytest", f"--attn-impl={target}", "--attn-triton-interpret", "-p", "no:cacheprovider", *arguments)
    return run(*options, cwd=cwd)


# our kernels ---------------------------------------------------------------------------------------------------------

ALIKE = """
import itertools
import torch
from attn_spec.reference.fused.triton import triton_attention
from attn_spec.reference.scratch.variants import variants

torch.set_num_threads(1)
torch.manual_seed(0)
SIZES = ((2, 4, 2, 5, 37, 20, 12), (1, 2, 1, 40, 24, 16, 16), (1, 3, 3, 18, 33, 7, 33))
WAYS = ({}, {"causal": True}, {"window_size": (9, 2), "softcap": 3.0}, {"causal": True, "window_size": (4, -1)})
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-3}
for (b, h, hkv, sq, sk, d, dv), way, dtype in itertools.product(SIZES, WAYS, TOLERANCE):
    q, k, v = torch.randn(b, sq, h, d), torch.randn(b, hkv, d, sk), torch.randn(b, sk, hkv, dv)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q.transpose(1, 2), k.transpose(2, 3), v.transpose(1, 2)))
    assert not k.is_contiguous()
    got = triton_attention(q, k, v, return_lse=True, **way)
    exact = [x.transpose(1, 2).double() for x in (q, k, v)]
    out, lse, _ = variants(*exact, return_attn_probs=True, **way)
    seen = lse.isfinite()
    assert torch.equal(got[1].isfinite(), seen)
    do, dlse = torch.randn_like(got[0]), torch.randn_like(got[1]) * seen
    pairs = [(got[0], out.transpose(1, 2)), (got[1][seen], lse[seen])]
    grads = torch.autograd.grad(got, [q, k, v], [do, dlse])
    right = torch.autograd.grad([out.transpose(1, 2), lse], [q, k, v], [do.double(), dlse.double()])
    for one, other in [*pairs, *zip(grads, right)]:
        assert one.isfinite().all()
        assert (one.double() - other).abs().max() < TOLERANCE[dtype], (b, h, sq, sk, way, dtype)
print("alike")
"""


def test_kernels_give_what_attention_is_forwards_and_backwards() -> None:
    found = run("-c", ALIKE, interpret=True)
    assert found.stdout.strip() == "alike", found.stderr


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
def test_both_alignments_are_judged_green(tmp_path: Path, alignment: str) -> None:
    name = "mine"
    (tmp_path / "attn.yaml").write_text(
        f"implementations: {{{name}: {{target: triton, fixed: {{alignment: {alignment}}}, alignment: {alignment}}}}}\n"
    )
    found = judged("triton", "-k", "causal_alignment or cross", f"--attn-json={tmp_path / 'out.json'}", cwd=tmp_path)
    assert found.returncode == 0, found.stdout
    (one,) = json.loads((tmp_path / "out.json").read_text())["implementations"]
    assert one["counts"]["passed"] > 10
    assert one["conventions"]["alignment"]["value"] == alignment


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attn_spec.reference.fused.triton_backward import keys_kernel, queries_kernel
from attn_spec.reference.fused.triton_forward import forward_kernel

known = {"SOFTCAP": True, "BLOCK_D": 64, "BLOCK_DV": 32, "BLOCK_M": 64, "BLOCK_N": 32}
for kernel in (forward_kernel, queries_kernel, keys_kernel):
    types = {}
    for name in kernel.fn.arg_names:
        types[name] = "constexpr" if name in known else "fp32" if name in ("scale", "softcap") else "i32"
        if name.endswith("_ptr"):
            types[name] = "*fp32" if name in ("lse_ptr", "delta_ptr") else "*bf16"
    for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)):
        made = triton.compile(ASTSource(kernel.fn, types, constexprs=known), target=target)
        print(kernel.fn.__name__, target.arch, "cubin" in made.asm)
"""


def test_kernels_compile_for_a_gpu() -> None:
    """No more than that: they have not run on one."""
    found = run("-c", COMPILED)
    assert found.stdout.count("True") == 6, found.stderr


# what the interpreter can't do ---------------------------------------------------------------------------------------

BFLOAT16 = """
import torch, triton, triton.language as tl

@triton.jit
def product(a, b, c):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def cast(a, b):
    i = tl.arange(0, 16)
    tl.store(b + i, tl.load(a + i).to(tl.bfloat16))

a = torch.randn(16, 16).bfloat16()
c = torch.zeros(16, 16)
product[(1,)](a, a, c)
print((c - a.float() @ a.float()).abs().max().item() > 1e3)
x, y = torch.full((16,), 1.0 + 2**-8 + 2**-12), torch.zeros(16, dtype=torch.bfloat16)
cast[(1,)](x, y)
print(y[0].item() == 1.0, x.bfloat16()[0].item() > 1.0)
"""


def test_bfloat16_is_refused_for_the_interpreter_gets_it_wrong() -> None:
    """Where this fails, the interpreter has learnt it: the refusal and a line of docs/triton.md can go."""
    assert run("-c", BFLOAT16, interpret=True).stdout.split() == ["True"] * 3


def test_what_cannot_be_done_is_refused_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 4, 16)
    for dtype in (torch.float64, torch.int32):
        with pytest.raises(TypeError, match="is not supported"):
            triton_attention(q.to(dtype), q.to(dtype), q.to(dtype))
    with pytest.raises(TypeError, match="of one dtype"):
        triton_attention(q, q.half(), q)
    with pytest.raises(ValueError, match="do not divide"):
        triton_attention(q, q[:, :1].expand(1, 3, 4, 16), q[:, :1].expand(1, 3, 4, 16))
    with pytest.raises(ValueError, match="fits neither"):
        triton_attention(q, q[..., :8], q)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(TargetError, match="--attn-triton-interpret"):
        triton_attention(q, q, q)
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(TypeError, match="bfloat16 is not supported under Triton's interpreter"):
        triton_attention(*(x.bfloat16() for x in (q, q, q)))


# the option ----------------------------------------------------------------------------------------------------------

TUNED = """
import torch, triton, triton.language as tl

@triton.autotune([triton.Config({"N": 16}), triton.Config({"N": 32})], key=["n"])
@triton.jit
def copy(x, y, n, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y + i, tl.load(x + i, i < n), i < n)

def attention(q, k, v):
    out = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1) @ v
    copied = torch.empty_like(out)
    if out.numel():
        copy[lambda meta: (triton.cdiv(out.numel(), meta["N"]),)](out, copied, out.numel())
    return copied
"""


def test_a_tuned_kernel_of_a_user_is_judged(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TUNED)
    found = judged("mine.attention", "--attn-dtype=float32", "-k", "hull or returned", cwd=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "attention under Triton's interpreter: a call takes" in found.stdout
    assert "what has not begun after 240 s is not run" in found.stdout


def test_the_example_is_judged() -> None:
    found = judged("examples/triton_kernel.py:attention", "--attn-dtype=float32", "-k", "base_problems or hull")
    assert found.returncode == 0, found.stdout
    assert "attention passed" in found.stdout


def test_the_environment_does_as_well() -> None:
    found = run("-m", "attn_spec.cli", "describe", "triton", interpret=True)
    assert found.returncode == 0
    assert "bfloat16 not taken" in found.stdout
    assert "alignment" in found.stdout


def test_usage_errors(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    early = pytester.makepyfile(early="import triton\n")
    common = ("--attn-impl=triton", "--attn-triton-interpret")
    found = run("-m", "pytest", "-p", "early", *common, cwd=early.parent)
    assert (found.returncode, "triton is imported already" in found.stderr) == (4, True), found.stderr
    alone = run("-m", "pytest", "--attn-triton-interpret", cwd=early.parent)
    assert (alone.returncode, "nothing is judged without" in alone.stderr) == (4, True)
    without = run("-m", "pytest", "--attn-impl=triton", cwd=early.parent)
    assert (without.returncode, "`pytest --attn-triton-interpret`" in without.stderr) == (4, True)
    (early.parent / "absent.py").write_text("import sys\nsys.modules['triton'] = None\nimport importlib.machinery\n")
    hidden = textwrap.dedent(
        """
        import importlib.util
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real(name, *rest)
        """
    )
    (early.parent / "absent.py").write_text(hidden)
    absent = run("-m", "pytest", "-p", "absent", *common, cwd=early.parent)
    assert (absent.returncode, "pip install 'attn-spec[triton]'" in absent.stderr) == (4, True), absent.stderr


# order and cost ------------------------------------------------------------------------------------------------------


def test_every_law_comes_before_any_law_comes_thrice() -> None:
    tried = checks("quick", "")
    ordered = costs.in_rounds(tried, lambda check: check[:2])
    assert sorted(map(id, ordered)) == sorted(map(id, tried))
    codes = [law.code for law, _, _ in ordered]
    every = len(set(codes))
    assert len(set(codes[:every])) == every
    assert costs.in_rounds(tried[::-1], lambda check: check[:2])[:every] != ordered[:every]  # files in their order
    for code in ("ATN106", "ATN401"):
        first = next(problem for law, problem, _ in ordered if law.code == code)
        assert costs.tiles(first) == min(costs.tiles(p) for law, p, _ in tried if law.code == code)


def test_costs_grow_with_tiles_and_backward_passes() -> None:
    small, large = Problem(q_len=16, kv_len=16, batch=1, heads=2, kv_heads=2), Problem(q_len=33, kv_len=129, batch=1)
    assert costs.tiles(small) == 2
    assert costs.tiles(large) == large.heads * 3 * 9
    assert costs.weight(LAWS["ATN901"], small) == costs.BACKWARD * costs.weight(LAWS["ATN106"], small)
    progress = costs.Progress([1.0] * 100, seconds=2.0, budget_s=1000.0, start=0.0, said=0.0)
    assert progress.left_s(0.0) == 200.0
    progress.done = 50
    assert progress.left_s(25.0) == 25.0
    assert progress.line(10.0) == ""
    assert "50 of 100 checks in 40 s, about 40 s left" in progress.line(40.0)
    progress.budget_s = 45.0
    assert progress.left_s(40.0) == 5.0


def test_a_call_may_take_longer_under_the_interpreter(pytester: pytest.Pytester, monkeypatch: Any) -> None:
    for value, seconds in (("0", 60.0), ("1", 600.0)):
        monkeypatch.setenv(VARIABLE, value)
        config = pytester.parseconfig("--attn-impl=sdpa")
        plugin.check_options(config)
        assert config.option.attn_timeout == seconds


# faults planted in the kernels ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What is said of every mutant, judged until five checks have failed."""
    script = str(Path(__file__).parent / "triton_mutants.py")
    found = run(script, str(tmp_path_factory.mktemp("mutants")))
    assert found.returncode == 0, found.stderr
    return {one.pop("mutant"): one for one in map(json.loads, found.stdout.splitlines())}


@pytest.mark.xdist_group("triton-mutants")  # one worker judges them all
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught_and_named(verdicts: dict[str, dict[str, Any]], mutant: Mutant) -> None:
    said = verdicts[mutant.name]
    assert len(said["failed"]) >= 3
    assert set(mutant.named) <= set(CATALOGUE)
    assert not mutant.named or set(mutant.named) & set(said["named"]), said


def test_nearly_all_mutants_are_named() -> None:
    assert len(MUTANTS) == 10
    assert sum(bool(mutant.named) for mutant in MUTANTS) >= 8


def test_a_mutant_that_fits_no_line_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no line 'nothing'"):
        Mutant("none", "triton_forward", "nothing", "").plant(tmp_path)
