"""The chosen problems: every pair of features, every fault twice, and each problem for a reason that is true."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from attn_spec import oracle
from attn_spec.choice import selection
from attn_spec.choice.chosen import (
    CHOSEN,
    Chosen,
    chosen_problems,
    listed,
    read,
    text_of,
    three_way_problems,
    weak_faults,
)
from attn_spec.choice.covering import covered, covering_array, interactions
from attn_spec.choice.features import FACTORS, Row, features, problem_of
from attn_spec.choice.matrix import CLEAR, Bench, matrix
from attn_spec.conventions import Meaning
from attn_spec.faults import CATALOGUE, named
from attn_spec.invariants import numerics
from attn_spec.problem import Problem
from attn_spec.suites.test_combinations import test_features_together as combined
from attn_spec.tolerance import candidates

torch.set_num_threads(1)


def drawn(count: int, seed: int = 1) -> list[tuple[Row, Problem]]:
    """Random rows that make a problem."""
    by = random.Random(seed)
    rows = [{name: by.choice(levels) for name, levels in FACTORS.items()} for _ in range(count)]
    return [(row, problem) for row in rows if (problem := problem_of(row)) is not None]


# features and arrays


def test_a_problem_has_the_features_it_was_made_of() -> None:
    for row, problem in drawn(600):
        assert features(problem).items() <= row.items(), problem
        assert Problem.from_dict(problem.to_dict()) == problem


def test_every_level_can_be_had() -> None:
    met = {level for _, problem in drawn(600) for level in features(problem).items()}
    assert met == {(name, level) for name, levels in FACTORS.items() for level in levels}


def test_the_oracle_has_an_answer_to_each() -> None:
    for _, problem in drawn(200):
        right = oracle.answer(problem.arguments(), Meaning(), candidates(problem.dtype)[0])
        assert right.output.isfinite().all(), problem


SMALL = {"size": ("1", "2", "3"), "mask": ("none", "some"), "over": ("Q", "K"), "dtype": ("f", "b")}


def applies(row: Row) -> Row | None:
    """A size of 3 has no mask, and no mask is over nothing."""
    if row["mask"] == "some":
        return None if row["size"] == "3" else row
    return {name: level for name, level in row.items() if name != "over"}


@pytest.mark.parametrize("strength", [2, 3])
def test_array_is_complete_small_and_the_same_twice(strength: int) -> None:
    rows = covering_array(SMALL, strength, applies, seed=5)
    assert rows == covering_array(SMALL, strength, applies, seed=5)
    met = covered([applies(row) or {} for row in rows], strength)
    assert (("mask", "some"), ("size", "3"), ("dtype", "f"))[:strength] not in met
    if strength == 2:
        assert (("mask", "some"), ("over", "K")) in met
        assert len(met) == 2 * 3 - 1 + 2 * 2 + 2 + 2 * 3 + 2 * 2 + 2 * 2  # of size, over and dtype with each other
        assert len(rows) <= 8
    assert all(applies(row) is not None for row in rows)


def test_cover_is_few_and_drops_what_is_superfluous() -> None:
    offers = {"a": {1, 2}, "b": {3, 4}, "c": {1, 2, 3}, "d": {4, 5}, "e": {9}}
    assert sorted(selection.cover(offers, {1: 1, 2: 1, 3: 1, 4: 1, 5: 1})) == ["c", "d"]
    assert sorted(selection.cover(offers, {1: 1, 2: 1, 3: 1, 4: 1, 5: 1}, start=["a", "b"])) == ["a", "b", "d"]
    assert sorted(selection.cover(offers, {1: 2, 5: 2})) == ["a", "c", "d"]  # 5 is there once


def test_choice_is_the_same_twice() -> None:
    faults = [named(name) for name in ("scale-missing", "causal-one-ahead", "tail-keys-dropped-16", "kv-heads-tiled")]
    problems = [problem for _, problem in drawn(160)]
    chosen = [selection.choose(matrix(faults, problems), problems, []) for _ in range(2)]
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) < len(problems)
    for line in matrix(faults, chosen[0]):
        assert len(line.catchers(CLEAR)) >= 2, line.fault.id
    assert covered(map(features, chosen[0]), 2) == covered(map(features, problems), 2)


# the file


def test_every_pair_of_features_is_among_the_chosen() -> None:
    missing = covered((features(problem) for _, problem in drawn(3000)), 2) - covered(
        map(features, chosen_problems()), 2
    )
    assert not missing, f"{sorted(missing)[:5]}: run `python benchmarks/choose_problems.py`"


def test_every_three_features_are_in_ci() -> None:
    have = covered(map(features, combined.problems("ci")), 3)
    missing = covered((features(problem) for _, problem in drawn(1000)), 3) - have
    assert not missing, f"{sorted(missing)[:5]}: run `python benchmarks/choose_problems.py`"


def test_the_suite_tries_them() -> None:
    assert combined.law is numerics.features_together
    assert combined.problems("quick") == chosen_problems()
    assert {*chosen_problems(), *three_way_problems()} <= set(combined.problems("ci"))
    for profile in ("quick", "ci", "deep"):
        often = Counter(map(str, combined.problems(profile)))
        assert max(often.values()) == 1, often.most_common(1)
    assert len(chosen_problems()) <= 70


@cache
def bench() -> Bench:
    return Bench(chosen_problems())


def test_what_the_file_says_of_the_faults_is_true() -> None:
    """For some faults, others each time that the catalogue grows: caught twice, and needing what it says they need."""
    of_plain_calls = [f for f in CATALOGUE.values() if not f.equivalent and f.theme not in ("variants", "gradients")]
    faults = sorted(of_plain_calls, key=lambda fault: fault.id)
    header = CHOSEN.read_text().partition("\nweak:")[0]
    weak = weak_faults()
    for fault in random.Random(len(faults)).sample(faults, 24):
        line = bench().best_margins(fault)
        catchers = line.catchers(weak.get(fault.id, CLEAR))
        if fault.id in header:
            assert not line.catchers(1.0), f"{fault.id} is said to be left to other laws"
            continue
        assert len(catchers) >= 2, f"{fault.id}: run `python benchmarks/choose_problems.py`"
        by_most = [problem for problem in catchers if selection.taken_by_most(problem)]
        needs = set(catchers if len(catchers) <= 2 else by_most if len(by_most) == 1 else ())
        said = {entry.problem for entry in read() if fault.id in entry.needed_by}
        assert said == needs, f"{fault.id}: run `python benchmarks/choose_problems.py`"


def test_every_problem_earns_its_place() -> None:
    entries = read()
    often = Counter(pair for entry in entries for pair in selection.pairs(entry.problem))
    for entry in entries:
        assert entry.only_here == sum(often[pair] == 1 for pair in selection.pairs(entry.problem)), entry.problem
        assert entry.covers > 0, f"{entry.problem} catches nothing"
        assert entry.only_here or entry.needed_by, f"{entry.problem} could go"
        assert set(entry.needed_by) <= set(CATALOGUE), f"{entry.problem}: a fault that there is not"


def test_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    entries = [Chosen(problem, 3, 1, ("scale-missing",)) for problem in chosen_problems()[:3]] + [Chosen(Problem(), 1)]
    path = tmp_path / "chosen.yaml"
    path.write_text(text_of(entries, {"scale-missing": 2.0}, "of\n\ntwo lines"))
    assert read(path) == entries
    assert weak_faults(path) == {"scale-missing": 2.0}
    path.write_text(listed([Problem(), Problem(batch=3)], "plain"))
    assert three_way_problems(path) == [Problem(), Problem(batch=3)]


@pytest.mark.parametrize(
    "text, message",
    [
        ("problems:\n  - {problem: {batch: 2}, coverz: 3}", "entry 0: coverz: not one of problem, covers"),
        (
            "problems:\n  - {problem: {batch: 2}}\n  - {problem: {batchs: 2}}",
            "entry 1: batchs: not a field",
        ),
        ("problems:\n  - {problem: {dtype: float8}}", "entry 0: dtype: 'float8' is not one of"),
        ("problems:\n  - {covers: 3}", "entry 0: problem: missing"),
        ("- {covers: 3}", "expected a mapping with a list of problems"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "chosen.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_interactions() -> None:
    assert interactions({"b": "1", "a": "2", "c": "3"}, 2) == {
        (("a", "2"), ("b", "1")),
        (("a", "2"), ("c", "3")),
        (("b", "1"), ("c", "3")),
    }
