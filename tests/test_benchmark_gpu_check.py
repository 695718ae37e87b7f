"""The script for a GPU machine: the parts of it that a CPU can run, and what it says where there is no GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", BENCHMARKS / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_parts_run_on_a_cpu(gpu_check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "grid.yaml").write_text("cases: {small: {heads: 2, head_dim: 16, length: 64}}")
    out = tmp_path / "check.json"
    arguments = ["--device=cpu", "--implementations=naive,flash-attn", f"--grid={tmp_path / 'grid.yaml'}"]
    status = gpu_check.main([*arguments, f"--out={out}", "--seconds=6"])
    data = json.loads(out.read_text())
    assert set(data["unavailable"]) == {"flash-attn"}
    assert data["verified"]["naive"]["counts"]["passed"] > 0
    assert data["verified"]["naive"]["red"] == []
    assert [one["outcome"] for one in data["timed"]["cases"]] == ["measured"]
    assert data["clocks"]["short"]["ours_s"] > 0
    assert status == 0
    assert not gpu_check.failed(data)
    data["clocks"]["short"]["agrees"] = False
    assert gpu_check.failed(data)
    data["clocks"] = {"error": "raised"}
    assert gpu_check.failed(data)


def test_without_a_gpu_the_script_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU, so the script would run for minutes; benchmarks/gpu_check.sh is for that")
    done = subprocess.run(
        [str(BENCHMARKS / "gpu_check.sh"), str(tmp_path / "check.json")],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5
    assert "this torch sees no CUDA device" in done.stdout
    assert (tmp_path / "check.log").read_text() == done.stdout
