"""FLOP and bytes against a count of the mask by hand, and the ceilings that no call can beat."""

import json
import random

import pytest
import torch

from attn_spec.benchmark import roofline
from attn_spec.benchmark.clock import CpuClock, Distrusted, Reading
from attn_spec.benchmark.roofline import Ceilings, ceilings, require_possible
from attn_spec.benchmark.work import Work, visible_pairs, work
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import DTYPES, Problem


def a_problem(draw: random.Random) -> Problem:
    batch, kv_heads = draw.randint(1, 3), draw.randint(1, 3)
    q_len, kv_len = draw.randint(1, 12), draw.randint(1, 12)
    parts = []
    if draw.random() < 0.5:
        parts.append(Causal(draw.choice([None, "top-left", "bottom-right"])))
    if draw.random() < 0.5:
        parts.append(KeyPadding(tuple(draw.randint(0, kv_len) for _ in range(batch)), draw.random() < 0.5))
    if draw.random() < 0.4:
        parts.append(Visible(draw.choice(["BHQK", "HQK", "QK", "BK"]), empty_rows=draw.choice([(), (0,)])))
    form = "bool"
    if draw.random() < 0.3:
        parts.append(Bias("QK"))
        form = "additive"
    return Problem(
        batch=batch,
        heads=kv_heads * draw.randint(1, 3),
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=draw.choice([4, 8]),
        v_dim=draw.choice([4, 6]),
        dtype=draw.choice(list(DTYPES)),
        mask=tuple(parts),
        delivery=Delivery(form, flag=draw.random() < 0.5),
        seed=draw.randint(0, 99),
    )


def counted(problem: Problem, alignment: str) -> int:
    """The visible pairs, one by one, from the tensors that an implementation is handed and the flag."""
    arguments = problem.arguments(alignment)
    b, h, q_len, kv_len = problem.sizes
    mask = torch.ones(b, h, q_len, kv_len, dtype=torch.bool)
    if arguments.mask is not None:
        mask &= arguments.mask if arguments.mask.dtype == torch.bool else arguments.mask > -torch.inf
    offset = kv_len - q_len if alignment == "bottom-right" else 0
    pairs = 0
    for row in mask.flatten(0, 1).tolist():
        for i, keys in enumerate(row):
            pairs += sum(seen and not (arguments.causal and j > i + offset) for j, seen in enumerate(keys))
    return pairs


def test_flop_and_bytes_equal_a_count_by_hand_on_200_random_problems() -> None:
    draw = random.Random(5)
    kinds = set()
    for _ in range(200):
        problem = a_problem(draw)
        alignment = draw.choice(["top-left", "bottom-right"])
        pairs = counted(problem, alignment)
        arguments = problem.arguments(alignment)
        output = problem.batch * problem.heads * problem.q_len * problem.v_dim * problem.torch_dtype.itemsize
        once = arguments.q.nbytes + arguments.k.nbytes + arguments.v.nbytes + output
        flop = 2.0 * pairs * (problem.head_dim + problem.v_dim)
        assert work(problem, "forward", alignment) == Work(pairs, flop, once)
        assert work(problem, "backward", alignment) == Work(pairs, 2.5 * flop, 2 * once)
        assert work(problem, "both", alignment) == Work(pairs, 3.5 * flop, 3 * once)
        kinds |= {part.kind for part in problem.mask}
    assert kinds == {"causal", "key-padding", "visible", "bias"}


def test_causal_is_not_half_where_the_lengths_differ() -> None:
    problem = Problem(batch=1, heads=1, kv_heads=1, q_len=2, kv_len=6, mask=(Causal(),))
    assert visible_pairs(problem, "top-left") == 1 + 2
    assert visible_pairs(problem, "bottom-right") == 5 + 6


def test_grouped_heads_count_as_query_heads_in_flop_and_as_kv_heads_in_bytes() -> None:
    one, grouped = (Problem(batch=1, heads=4, kv_heads=n, q_len=8, kv_len=8) for n in (4, 1))
    assert work(grouped).flop == work(one).flop
    assert work(grouped).bytes == work(one).bytes - 2 * 3 * 8 * 8 * 4


def test_another_direction_is_an_error() -> None:
    with pytest.raises(ValueError, match="direction: 'sideways' is not one of forward, backward, both"):
        work(Problem(), "sideways")


# the ceilings --------------------------------------------------------------------------------------------------------

MACHINE = Ceilings(flop_per_s=1e11, bytes_per_s=2e10, cached_bytes_per_s=1e11)


def test_the_roofline_is_the_lower_of_the_two_ceilings() -> None:
    busy, streaming = Work(0, 1e9, 1_000_000), Work(0, 1e9, 1_000_000_000)
    assert MACHINE.attainable(busy) == 1e11
    assert MACHINE.attainable(streaming) == pytest.approx(2e10)
    assert MACHINE.share(busy, 0.02) == pytest.approx(0.5)


def test_a_time_below_the_ceilings_is_not_believed() -> None:
    require_possible(MACHINE, Work(0, 1e9, 1000), 0.01, "honest")
    with pytest.raises(Distrusted, match=r"cheat: 1 ms is faster than possible: 1e\+09 FLOP at 100 GFLOP/s"):
        require_possible(MACHINE, Work(0, 1e9, 1000), 0.001, "cheat")
    with pytest.raises(Distrusted, match="faster than possible"):
        require_possible(MACHINE, Work(0, 1.0, 1_000_000_000), 0.001, "cheat")


class Counted(CpuClock):
    """Says that everything takes a millisecond, and counts how often it was asked."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, calls) -> Reading:
        self.reads += 1
        return Reading(1e-3, [call() for call in calls[:1]])


def test_ceilings_are_measured_once_and_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(roofline.time, "perf_counter", iter(range(10**6)).__next__)  # every try is the last
    monkeypatch.setattr(roofline, "_matmul", lambda dtype, n, clock, device: clock.read([int]).seconds * 1e14)
    clock = Counted()
    first = ceilings("float32", clock)
    assert first.flop_per_s == pytest.approx(1e11)
    assert first.cached_bytes_per_s >= first.bytes_per_s > 0
    asked = clock.reads
    assert ceilings("float32", clock) == first
    assert clock.reads == asked
    kept = json.loads((tmp_path / "attn-spec" / "ceilings.json").read_text())
    assert list(kept.values()) == [vars(first)]
    ceilings("float32", clock, fresh=True)
    assert clock.reads > asked


def test_a_damaged_cache_is_measured_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(roofline, "_measure", lambda dtype, clock, device: MACHINE)
    roofline.cache_file().parent.mkdir()
    roofline.cache_file().write_text("{")
    assert ceilings("float32", CpuClock()) == MACHINE
    assert list(json.loads(roofline.cache_file().read_text()).values()) == [vars(MACHINE)]
