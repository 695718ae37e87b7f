"""The weights of every head in a recording, beside those that the oracle gives for the same q and k."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec import oracle
from attn_spec.capture import Recording
from attn_spec.conventions import Meaning
from attn_spec.problem import DTYPES, Arguments
from attn_spec.tolerance import candidates
from attn_spec.trace.core import Core
from attn_spec.trace.finding import Case, Expected


def seen_and_right(recording: Recording, expected: Expected) -> tuple[Tensor, Tensor] | None:
    """The weights that V was multiplied with and the right ones, [B, H, Sq, Sk], the heads of all attentions in order.

    Right is softmax(scale q k') under the mask and scale that were asked for, on the q and k of the code. None where
    the weights of an attention, or its q and k, can't be seen.
    """
    pairs = [_pair(Case(recording, core, expected, n)) for n, core in enumerate(recording.cores)]
    found = [pair for pair in pairs if pair is not None]
    if not found or len(found) < len(pairs) or len({pair[0].shape[2:] for pair in found}) > 1:
        return None
    return torch.cat([used for used, _ in found], 1), torch.cat([right for _, right in found], 1)


def _pair(case: Case) -> tuple[Tensor, Tensor] | None:
    core = case.core
    used = case.used
    q, k = core.canonical("q", case.batch), core.canonical("k", case.batch)
    if used is None or q is None or k is None or used.shape[2:] != (q.shape[2], k.shape[2]):
        return None
    return used.double(), right_weights(core, q, k, case.hidden_asked, case.expected.scale)


def right_weights(core: Core, q: Tensor, k: Tensor, hidden: Tensor | None, scale: float | None) -> Tensor:
    """The oracle's weights on q [B, H, Sq, D] and k [B, Hkv, Sk, D], which may hold a part of the scale already."""
    asked = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = str(q.dtype).removeprefix("torch.")
    precision = candidates(dtype if dtype in DTYPES else "float32")[0]
    mask = None if hidden is None else ~hidden
    form = None if hidden is None else "bool"
    arguments = Arguments(q, k, k, mask, form, scale=asked / core.before if core.before else asked)  # type: ignore[arg-type]
    answer = oracle.answer(arguments, Meaning(), precision, weights=True)
    assert answer.weights is not None
    return answer.weights
