"""Random problems in a property of one's own: `pytest examples/test_fuzz_your_own.py`."""

import torch.nn.functional as F
from hypothesis import given, settings

from attn_spec import strategies
from attn_spec.problem import Problem


@settings(max_examples=50, deadline=None)
@given(strategies.problems(dtypes=("float32",)))
def test_output_has_the_sizes_of_an_attention(problem: Problem) -> None:
    a = problem.arguments()
    k, v = (x.repeat_interleave(problem.heads // problem.kv_heads, dim=1) for x in (a.k, a.v))
    out = F.scaled_dot_product_attention(a.q, k, v)
    assert out.shape == (problem.batch, problem.heads, problem.q_len, problem.v_dim)
