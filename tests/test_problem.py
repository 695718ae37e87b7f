"""Problems and masks: data that makes its own tensors, the same ones everywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_spec import masks
from attn_spec.masks import Bias, Causal, Delivery, KeyPadding, Visible
from attn_spec.problem import DTYPES, Problem

PARTS = st.one_of(
    st.builds(Causal, alignment=st.sampled_from([None, "top-left", "bottom-right"])),
    st.builds(KeyPadding, lengths=st.tuples(st.integers(0, 5), st.integers(0, 5)), left=st.booleans()),
    st.builds(Visible, axes=st.sampled_from(["BHQK", "QK", "BK", "HQK"]), empty_rows=st.sampled_from([(), (1,)])),
    st.builds(Bias, axes=st.sampled_from(["BHQK", "HQK", "K"])),
)
PROBLEMS = st.builds(
    Problem,
    heads=st.sampled_from([2, 4]),
    kv_heads=st.sampled_from([1, 2]),
    q_len=st.integers(0, 6),
    kv_len=st.integers(0, 6),
    dtype=st.sampled_from(sorted(DTYPES)),
    mask=st.lists(PARTS, max_size=3).map(tuple),
    delivery=st.just(Delivery("additive")),
    scale=st.sampled_from([None, 0.5]),
    seed=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(PROBLEMS)
def test_yaml_both_ways(problem: Problem) -> None:
    again = Problem.from_yaml(problem.to_yaml())
    assert again == problem
    assert hash(again) == hash(problem)
    assert "\n" not in str(problem)


def test_the_same_tensors_each_time_and_in_each_dtype() -> None:
    problem = Problem(mask=(Visible("BHQK"),))
    one, two = problem.arguments(), problem.arguments()
    assert torch.equal(one.q, two.q)
    assert one.q.data_ptr() != two.q.data_ptr()
    assert one.mask is not None
    assert two.mask is not None
    assert torch.equal(one.mask, two.mask)
    half = problem.replace(dtype="bfloat16").arguments()
    assert torch.equal(half.q, problem.replace(dtype="float64").arguments().q.bfloat16())
    assert problem.fingerprint() == problem.fingerprint() != problem.replace(seed=1).fingerprint()
    assert problem.fingerprint() == "783b37e1669e44cd"  # the same numbers on every machine, or a replay is no replay


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"heads": 3, "kv_heads": 2}, "kv_heads"),
        ({"q_len": -1}, "q_len"),
        ({"dtype": "float8"}, "dtype"),
        ({"values": "nice"}, "values"),
        ({"layout": "packed"}, "layout"),
        ({"mask": (Bias("K"),)}, "bias"),
        ({"mask": (Visible("BHQK"),), "delivery": Delivery("key-padding")}, "key padding"),
        ({"mask": (Visible("BHQK"),), "delivery": Delivery("bool", "11QK")}, "shape"),
        ({"mask": (KeyPadding((3,)),)}, "lengths"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Problem(**change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["[1, 2]", "batch: 2\nhedas: 3", "mask: [{kind: diagonal}]", "mask: [{kind: bias, hue: 1}]"]
)
def test_yaml_that_is_no_problem(text: str) -> None:
    with pytest.raises(ValueError, match="problem|hedas|diagonal|hue"):
        Problem.from_yaml(text)


MASKS = [
    (Visible("QK"),),
    (Visible("BK"),),
    (Visible("HQK"),),
    (KeyPadding((5, 2)),),
    (KeyPadding((5, 2), left=True), Visible("HQK")),
    (Causal("top-left"), KeyPadding((5, 2))),
    (Causal("bottom-right"), Visible("BHQK", empty_rows=(1,))),
]


@pytest.mark.parametrize("parts", MASKS, ids=str)
@pytest.mark.parametrize("form", ["bool", "additive"])
def test_every_broadcast_shape_means_the_same(parts: tuple[masks.Part, ...], form: str) -> None:
    sizes = (2, 3, 4, 5)
    full, _ = masks.combined(parts, sizes, 0, "top-left")
    assert full is not None
    needed = {axis for part in parts for axis in part.axes}
    tried = 0
    for shape in ("BHQK", "1HQK", "B1QK", "11QK", "B11K", "HQK", "QK", "1H1K"):
        if needed - set(shape):
            continue
        how = Delivery(form, shape, flag=False)  # type: ignore[arg-type]
        tensor = masks.delivered(parts, how, sizes, 0, "top-left", torch.float32)
        assert tensor is not None
        assert tensor.dim() == len(shape)
        seen = tensor if form == "bool" else tensor == 0
        assert torch.equal(seen.expand(sizes), full.expand(sizes))
        tried += 1
    assert tried


def test_key_padding_form_and_strided_masks() -> None:
    problem = Problem(kv_len=5, mask=(KeyPadding((5, 2)),), delivery=Delivery("key-padding"))
    mask = problem.arguments().mask
    assert mask is not None
    assert mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    plain = Problem(mask=(Visible("BHQK"),)).arguments().mask
    strided = Problem(mask=(Visible("BHQK"),), delivery=Delivery(strided=True)).arguments().mask
    assert plain is not None
    assert strided is not None
    assert not strided.is_contiguous()
    assert torch.equal(plain, strided)


def test_values_tell_right_from_wrong() -> None:
    """Sharp logits, rows of V of different magnitude, a decisive key in each block."""
    problem = Problem(batch=1, heads=1, kv_heads=1, q_len=64, kv_len=64, head_dim=32, v_dim=32, dtype="float64")
    a = problem.arguments()
    weights = (a.q @ a.k.mT * 32**-0.5).softmax(-1)[0, 0]
    assert weights.amax(-1).median() > 0.3
    for key in (0, 15, 31, 47, 63):
        assert weights[:, key].max() > 0.45, f"no query is decided by key {key}"
    magnitudes = a.v[0, 0].std(-1)
    assert magnitudes.max() / magnitudes.min() > 8
