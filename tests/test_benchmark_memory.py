"""Peak memory: what it measures is right, what is quadratic is caught, and what is linear passes."""

from pathlib import Path

import pytest

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.resolve import resolve
from attn_spec.benchmark import memory
from attn_spec.benchmark.memory import Scaling, memory_linear, peak_bytes, sweep
from attn_spec.benchmark.memory_child import resident_peak
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import Problem

PROBLEM = Problem(
    batch=1, heads=2, kv_heads=2, q_len=2048, kv_len=2048, head_dim=64, v_dim=64, values="mild", dtype="float32"
)

QUADRATIC = """
import os
import signal
import torch

def quadratic(q, k, v):
    mask = torch.zeros(q.shape[2], k.shape[2])  # which nobody needs
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

def ten_mib(q, k, v):
    kept = torch.ones(10 * 2**18)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v) + 0 * kept[0]

def killed(q, k, v):
    if q.shape[2] > 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "attention_of_mine.py"
    path.write_text(QUADRATIC)
    return path


def adapted(target: str) -> Implementation:
    found = resolve(target)
    return adapt(found.object, name=found.name, target_name=target)


def test_a_quadratic_implementation_is_caught(own: Path) -> None:
    with pytest.raises(Violation, match="memory grows faster than the length") as caught:
        memory_linear(adapted(f"{own}:quadratic"), PROBLEM)
    assert caught.value.evidence["slope"] > 1.6
    assert caught.value.evidence["lengths"] == [512, 1024, 2048]


def test_the_tiled_implementation_passes() -> None:
    memory_linear(adapted("tiled"), PROBLEM)


def test_the_peak_is_what_was_in_use(own: Path) -> None:
    (peak,) = peak_bytes(adapted(f"{own}:ten_mib"), [PROBLEM])
    output = 2 * 2048 * 64 * 4
    assert 10 * 2**20 + output <= peak <= 13 * 2**20 + output


def test_a_process_that_is_killed_is_a_violation(own: Path) -> None:
    with pytest.raises(Violation, match="ended by signal 9"):
        peak_bytes(adapted(f"{own}:killed"), [PROBLEM])


def test_a_function_without_a_target_can_not_be_called_elsewhere() -> None:
    implementation = adapted("tiled")
    implementation.target = "no_such_module.attention"
    with pytest.raises(Refused, match="no module 'no_such_module'"):
        peak_bytes(implementation, [PROBLEM])
    implementation.adapter = lambda arguments: None
    with pytest.raises(Unsupported, match="an adapter of its own"):
        peak_bytes(implementation, [PROBLEM])


def test_each_length_gets_a_process_where_the_peak_can_not_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(memory, "RESET", Path("/no/such/file"))
    monkeypatch.setattr(memory, "_apart", lambda implementation, problems: asked.append(problems) or [len(asked)])
    assert peak_bytes(adapted("tiled"), sweep(PROBLEM)) == [1, 2, 3]
    assert [len(problems) for problems in asked] == [1, 1, 1]


def test_scaling_tells_linear_from_quadratic() -> None:
    mib = 2**20
    assert Scaling((512, 1024, 2048), (2 * mib, 4 * mib, 8 * mib)).linear
    assert not Scaling((512, 1024, 2048), (2 * mib, 8 * mib, 32 * mib)).linear
    assert not Scaling((512, 1024, 2048), (8 * mib, 9 * mib, 32 * mib)).linear, "hidden under what is constant"
    assert Scaling((512, 1024, 2048), (0, 100, 100_000)).linear, "noise"
    assert "slope 2.00 (1 = linear in S, 2 = quadratic)" in str(Scaling((1, 2), (mib, 4 * mib)))


def test_the_high_water_mark_is_that_of_this_process() -> None:
    assert 2**20 < resident_peak() < 2**36
