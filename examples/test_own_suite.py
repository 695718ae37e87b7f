"""An attention judged inside a test file of one's own: `pytest examples/test_own_suite.py`.

The tests come from a suite of attn-spec; the fixture says what is judged.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attn_spec.suites.test_causality import *  # noqa: F403


def my_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if is_causal:
        past = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~past, -torch.inf)
    return scores.softmax(dim=-1) @ v


@pytest.fixture
def attention() -> Callable[..., Tensor]:
    return my_attention
