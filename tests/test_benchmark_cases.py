"""The grid: what it says, what it is scaled to, and what is said about one that can't be used."""

from pathlib import Path

import pytest

from attn_spec.benchmark.cases import GRIDS, Grid, GridError, cases, limit_of, load
from attn_spec.masks import Causal, KeyPadding


def grid(tmp_path: Path, text: str) -> Grid:
    (tmp_path / "grid.yaml").write_text(text)
    return load("grid.yaml", tmp_path)


@pytest.mark.parametrize("name", GRIDS)
def test_shipped_grids_make_problems_of_every_direction(name: str) -> None:
    found = cases(load(name))
    assert {case.direction for case in found} == {"forward", "backward", "both"}
    assert len({case.name for case in found}) == len(found)
    assert any(case.problem.causal for case in found)
    assert any(case.problem.q_len == 1 for case in found), "decode"
    assert any(case.problem.heads != case.problem.kv_heads for case in found), "grouped heads"


def test_models_have_the_sizes_of_their_configuration() -> None:
    models = load("quick").models
    assert (models["llama-3-8b"].heads, models["llama-3-8b"].kv_heads, models["llama-3-8b"].head_dim) == (32, 8, 128)
    assert (models["qwen2.5-7b"].heads, models["qwen2.5-7b"].kv_heads, models["qwen2.5-7b"].head_dim) == (28, 4, 128)


def test_an_entry_says_what_is_timed(tmp_path: Path) -> None:
    text = """
models:
  mine: {heads: 6, kv_heads: 2, head_dim: 32}
cases:
  a: {model: mine, batch: 2, length: [64, 128], causal: true, mask: [{kind: key-padding, lengths: [64, 40]}],
      directions: [forward, both], dtype: float64, max_slowdown: 1.05, memory: linear}
  b: {q_len: 1, kv_len: 100, v_dim: 16, min_speedup: 2.0}
"""
    found = cases(grid(tmp_path, text), max_slowdown=1.5)
    assert [(c.problem.q_len, c.direction) for c in found[:4]] == [
        (64, "forward"),
        (64, "both"),
        (128, "forward"),
        (128, "both"),
    ]
    problem = found[0].problem
    assert (problem.heads, problem.kv_heads, problem.head_dim, problem.dtype) == (6, 2, 32, "float64")
    assert problem.mask == (Causal(), KeyPadding((64, 40)))
    assert (found[0].limit, found[0].memory) == (1.05, "linear")
    assert (found[4].limit, found[4].problem.v_dim, found[4].problem.dtype) == (0.5, 16, "float32")


def test_the_options_gate_what_has_no_gate_of_its_own(tmp_path: Path) -> None:
    (case,) = cases(grid(tmp_path, "cases: {a: {length: 8}}"), max_slowdown=1.1)
    assert case.limit == 1.1
    assert limit_of(1.1, 1.25) == 0.8
    assert limit_of(None, None) is None


def test_on_a_gpu_the_dtype_is_bfloat16(tmp_path: Path) -> None:
    (case,) = cases(grid(tmp_path, "cases: {a: {length: 8}}"), device="cuda")
    assert case.problem.dtype == "bfloat16"
    both = cases(grid(tmp_path, "cases: {a: {length: 8}}"), dtypes=("float32", "float16"))
    assert [case.problem.dtype for case in both] == ["float32", "float16"]


def test_heads_are_cut_in_their_groups_until_it_fits_the_device(tmp_path: Path) -> None:
    one = grid(tmp_path, "cases: {a: {model: llama-3-8b, length: 1024}}")
    (case,) = cases(one, flop_per_s=1e11)
    assert (case.problem.heads, case.problem.kv_heads, case.problem.q_len) == (4, 1, 1024)
    assert case.note == "scaled to the device from B1-H32:8-Sq1024-Sk1024"
    (case,) = cases(one, flop_per_s=1e15)
    assert case.problem.heads == 32
    assert case.note == ""
    (case,) = cases(one)
    assert case.problem.heads == 32


def test_a_sweep_is_cut_alike_and_one_problem_alone_is_shortened(tmp_path: Path) -> None:
    sweep = cases(grid(tmp_path, "cases: {a: {heads: 8, length: [256, 4096]}}"), flop_per_s=1e11)
    assert [case.problem.heads for case in sweep] == [1, 1]
    assert [case.problem.q_len for case in sweep] == [256, 4096]
    (case,) = cases(grid(tmp_path, "cases: {a: {model: llama-3-8b, length: 16384}}"), flop_per_s=1e11)
    assert (case.problem.heads, case.problem.q_len) == (4, 2048)
    sweep = cases(grid(tmp_path, "cases: {a: {heads: 1, length: [256, 65536]}}"), flop_per_s=1e11)
    assert [bool(case.skipped) for case in sweep] == [False, True]
    assert "too large for this device" in sweep[1].skipped
    (case,) = cases(grid(tmp_path, "cases: {a: {heads: 8, length: 4096, scale: false}}"), flop_per_s=1e11)
    assert (case.problem.heads, case.skipped) == (8, "")


def test_a_mask_that_this_version_does_not_know_is_said_and_not_timed(tmp_path: Path) -> None:
    (case,) = cases(grid(tmp_path, "cases: {a: {length: 8, mask: [{kind: spiral}]}}"))
    assert "masks of kind 'spiral' are not known; there are causal, " in case.skipped


@pytest.mark.parametrize(
    "text, said",
    [
        ("cases: {a: {lenght: 8}}", "cases.a.lenght: is not a key; did you mean length?"),
        (
            "cases: {a: {length: 8, model: lama-3-8b}}",
            "cases.a.model: 'lama-3-8b' is not known; did you mean llama-3-8b",
        ),
        ("cases: {a: {q_len: 8}}", "cases.a: has no length; write `length: 1024`, or both q_len and kv_len"),
        ("cases: {a: {length: 8, q_len: 8}}", "write it or them, not both"),
        ("cases: {a: {length: 8, heads: 0}}", "cases.a.heads: Input should be greater than or equal to 1, and 0 was"),
        ("cases: {a: {length: 8, directions: [sideways]}}", "cases.a.directions.0: Input should be 'forward'"),
        ("cases: {}", "has no cases"),
        ("- a", "holds no mapping"),
        ("a: [", "can't be read as YAML"),
    ],
)
def test_a_grid_that_cannot_be_used_is_explained(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(GridError) as caught:
        grid(tmp_path, text)
    assert said in str(caught.value)
    assert "grid.yaml" in str(caught.value)


def test_sizes_that_do_not_fit_are_explained(tmp_path: Path) -> None:
    with pytest.raises(GridError, match=r"cases\.a: kv_heads: 3 does not divide heads = 4"):
        cases(grid(tmp_path, "cases: {a: {length: 8, heads: 4, kv_heads: 3}}"))
    with pytest.raises(GridError, match=r"cases\.a: lengths: .* for a batch of 1"):
        cases(grid(tmp_path, "cases: {a: {length: 8, mask: [{kind: key-padding, lengths: [8, 4]}]}}"))


def test_a_grid_that_is_not_there() -> None:
    with pytest.raises(GridError, match="quik: no such grid; did you mean quick"):
        load("quik")
