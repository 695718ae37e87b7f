"""The conformance cases of ONNX's Attention operator: what others wrote down, as canonical arguments.

The package `onnx` carries them, so nothing is fetched. Each is one node with stored inputs and outputs. What the node
says in its own way is said in ours: hidden sizes are split by head counts, a cache is put before the new keys, a mask
that is too short hides the keys beyond its end, and lengths become a mask. The operator's conventions are

    polarity True = attend; the default scale 1/sqrt(d_k); contiguous groups; rows with no visible key are zero;
    softcap before the mask; windows (left, right), its own key not counted, -1 for no bound;
    query i stands at key i + offset, with offset 0, or the length of the cache, or (for each sample) keys - queries

of which the last is top-left or bottom-right only in some cases; in the others it is rendered into the mask. Before
1.22 the softcap came after the mask and the intermediate outputs were numbered otherwise; 1.23 has the 93 cases.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from attn_spec import blocks, masks, oracle, tolerance, values
from attn_spec.blocks import Trace
from attn_spec.conventions import Meaning
from attn_spec.masks import Alignment, Bias, Causal, Delivery, Part, Visible, Window
from attn_spec.oracle import Answer
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import Precision, candidates

OLDEST = (1, 23)
PREFIX = "test_attention_"
ATTRIBUTES = {
    *("is_causal", "scale", "softcap", "q_num_heads", "kv_num_heads", "left_window_size", "right_window_size"),
    *("qk_matmul_output_mode", "softmax_precision"),
}
MODES = ("products", "softcapped", "biased", "weights")


class OnnxMissing(ImportError):  # noqa: N818
    """onnx is not installed, or is older than its cases; the message says what to install."""


@dataclass(frozen=True, eq=False)
class OnnxCase:
    """One case: what its node is asked, and what it stores.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv], the cache included.  mask: bool or additive, lengths
    rendered into it.  offsets [B]: the key at which query 0 of a sample stands.  output [B, H, Sq, Dv].
    present: the stored caches.  intermediate [B, H, Sq, Sk]: the stored `qk_matmul_output`, which is that of `mode` (of
    MODES).  kinds: words for what it is about.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    window: tuple[int | None, int | None] | None
    offsets: Tensor
    scale: float | None
    softcap: float | None
    output: Tensor
    present: tuple[Tensor, Tensor] | None
    intermediate: Tensor | None
    mode: str
    kinds: tuple[str, ...]

    @property
    def alignments(self) -> tuple[Alignment, ...]:
        """The alignments that put the queries where this case has them: none, one, or both where Sq = Sk."""
        shifts: dict[Alignment, int] = {"top-left": 0, "bottom-right": self.k.shape[2] - self.q.shape[2]}
        return tuple(name for name, shift in shifts.items() if bool((self.offsets == shift).all()))

    @property
    def meaning(self) -> Meaning:
        """ONNX's conventions, with the alignment of this case."""
        alignment: Alignment = next(iter(self.alignments), "top-left")
        return Meaning(alignment=alignment, window_alignment=alignment)

    @property
    def arguments(self) -> Arguments:
        """The case as it reads under `meaning`."""
        return self.asked(self.meaning)

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether a query sees no key."""
        logits = blocks.run(self.arguments.double(), self.meaning).logits
        return bool((logits == -torch.inf).all(-1).any())

    def asked(self, meaning: Meaning, *, flag: bool = True) -> Arguments:
        """The case put to an implementation of other conventions: what these would change stands in the mask.

        flag False: causality stands there too.
        """
        causal = self.causal and flag and meaning.alignment in self.alignments
        window = self.window if meaning.window_alignment in self.alignments else None
        visible = None
        if self.causal and not causal:
            visible = self._between(None, 0)
        if self.window is not None and window is None:
            near = self._between(*self.window)
            visible = near if visible is None else visible & near
        mask = hidden(self.mask, visible, self.q.dtype)
        form = None if mask is None else ("bool" if mask.dtype == torch.bool else "additive")
        scale = self.scale
        if scale is None and meaning.scale != "1/sqrt(d_k)":
            scale = 1 / math.sqrt(self.q.shape[3])
        q, k, v = (x.clone() for x in (self.q, self.k, self.v))
        mask = None if mask is None else mask.clone()
        return Arguments(q, k, v, mask, form, causal, scale, window, self.softcap)  # type: ignore[arg-type]

    def differs(self, meaning: Meaning) -> str:
        """Why the case has another right answer under these conventions however it is asked; empty: it has not."""
        biased = self.mask is not None and self.mask.dtype != torch.bool
        if self.has_empty_rows and meaning.empty_rows != "zero":
            return f"rows with no visible key are {meaning.empty_rows} by its conventions, and zero by ONNX's"
        if self.k.shape[1] not in (1, self.q.shape[1]) and meaning.grouping != "contiguous":
            return "its groups of heads are tiled, and contiguous by ONNX's conventions"
        if self.softcap is not None and biased and meaning.softcap_order != "first":
            return "its softcap comes after the mask, and before it by ONNX's conventions"
        return ""

    @cached_property
    def precision(self) -> Precision:
        """That of the numpy code that made the stored outputs: all but sums is kept in the dtype of the inputs."""
        return candidates(str(self.q.dtype).removeprefix("torch."))[:2][-1]

    @cached_property
    def answer(self) -> Answer:
        """The oracle's answer; its bounds are those of the code that made the stored output."""
        return oracle.answer(self.arguments, self.meaning, self.precision, weights=True)

    @cached_property
    def bound(self) -> Tensor:
        """How far each element of the stored output may be from the exact one [B, H, Sq, Dv]."""
        return self.answer.bounds.output + half_ulp(self.output)

    def _between(self, left: int | None, right: int | None) -> Tensor:
        """The keys within a window around each query's own position [B, 1, Sq, Sk]."""
        i = torch.arange(self.q.shape[2])[:, None]
        j = torch.arange(self.k.shape[2])[None, :]
        p = i + self.offsets[:, None, None, None]
        seen = torch.ones_like(j - p, dtype=torch.bool)
        if left is not None:
            seen = seen & (j >= p - left)
        if right is not None:
            seen = seen & (j <= p + right)
        return seen


def half_ulp(stored: Tensor) -> Tensor:
    """Half the distance between neighbours in the dtype of a stored tensor, at most; 0 where it is not finite."""
    return (
        tolerance.roundoff(str(stored.dtype).removeprefix("torch."))
        * torch.where(stored.isfinite(), stored, 0).double().abs()
    )


def hidden(mask: Tensor | None, visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask, bool or additive, that hides what `visible` does not show as well."""
    if visible is None:
        return mask
    if mask is None:
        return visible
    if mask.dtype == torch.bool:
        return mask & visible
    return torch.where(visible, mask, mask.new_full((), -torch.inf)).to(dtype)


def intermediate(steps: Trace, mode: str, precision: Precision) -> tuple[Tensor, Tensor]:
    """What `qk_matmul_output` stores in a mode, out of a run of the blocks; and the bound of its elements."""
    if mode == "weights":
        bounds = tolerance.bounds(
            *(steps.q, steps.k, steps.v, steps.scale, steps.bias, steps.logits, steps.weights, steps.output),
            *(precision, steps.softcap),
        )
        return steps.weights, bounds.weights
    softcap = None if mode == "products" else steps.softcap
    bound = tolerance.logit_errors(steps.q, steps.k, steps.scale, precision, softcap)
    value = steps.blocks.soften(steps.blocks.score(steps.q, steps.k, steps.scale), softcap)
    if mode == "biased":
        value = steps.logits
        if steps.bias is not None:
            bound = bound + 2 * precision.gamma_unit * torch.where(steps.bias.isfinite(), steps.bias, 0.0).abs()
    stored = torch.where(value.isfinite(), value, 0.0).abs()
    return value, bound + tolerance.roundoff(precision.scores) * stored


# from onnx -----------------------------------------------------------------------------------------------------------


def require() -> None:
    """Raise OnnxMissing where the cases can't be had."""
    try:
        version = metadata.version("onnx")
    except metadata.PackageNotFoundError:
        raise OnnxMissing("onnx is not installed: pip install 'attn-spec[onnx]'") from None
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise OnnxMissing(f"onnx {version} has other cases, {wanted} is needed: pip install -U 'attn-spec[onnx]'")


@lru_cache(maxsize=1)
def cases() -> tuple[OnnxCase, ...]:
    """Every case of the operator, in onnx's order; the first call takes some seconds. Raises OnnxMissing."""
    require()
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():  # every operator's cases are computed, with their overflows
        warnings.simplefilter("ignore")
        found = collect_testcases("Attention")
    return tuple(
        of_node(case.name.removeprefix(PREFIX), case.model.graph.node[0], *case.data_sets[0])
        for case in found
        if [node.op_type for node in case.model.graph.node] == ["Attention"]  # others spell the operator out
    )


def named(name: str) -> OnnxCase:
    """The case of a name, such as "4d_causal". Raises KeyError, and OnnxMissing."""
    for one in cases():
        if one.name == name:
            return one
    raise KeyError(f"{name}: onnx has no such case of Attention")


def of_node(name: str, node: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> OnnxCase:
    """A node with its stored inputs and outputs, numpy arrays in the order in which the node names those it has.

    Raises ValueError where it has an attribute that is not known here.
    """
    from onnx.helper import get_attribute_value

    said = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
    if set(said) - ATTRIBUTES:
        raise ValueError(f"{name}: {', '.join(sorted(set(said) - ATTRIBUTES))}: not a known attribute of Attention")
    given = _named(INPUTS, node.input, inputs)
    stored = _named(OUTPUTS, node.output, outputs)
    flat = given["q"].dim() == 3
    q = _split(given["q"], said.get("q_num_heads"))
    k, v = (_split(given[role], said.get("kv_num_heads")) for role in ("k", "v"))
    past = given["past_key"].shape[2] if "past_key" in given else 0
    if past:
        k, v = torch.cat([given["past_key"], k], dim=2), torch.cat([given["past_value"], v], dim=2)
    mask, lengths = _full(given.get("mask"), k.shape[2]), given.get("lengths")
    offsets = torch.full((q.shape[0],), past)
    if lengths is not None:
        offsets = lengths - q.shape[2]
        mask = hidden(mask, values.padded_keys(tuple(lengths.tolist()), k.shape[2], False)[:, None, None], q.dtype)
    left, right = (said.get(f"{side}_window_size", -1) for side in ("left", "right"))
    bounds = (left if left >= 0 else None, right if right >= 0 else None)
    causal, softcap = bool(said.get("is_causal", 0)), said.get("softcap", 0.0) or None
    expected = stored["output"]
    output = _split(expected, q.shape[1]) if flat else expected
    mode = MODES[said.get("qk_matmul_output_mode", 0)]
    kinds = {
        "3-D" if flat else "4-D": True,
        "groups": q.shape[1] != k.shape[1],
        "d_v": v.shape[3] != q.shape[3],
        "scale": "scale" in said,
        "causal": causal,
        "bool mask": "mask" in given and given["mask"].dtype == torch.bool,
        "additive mask": "mask" in given and given["mask"].dtype != torch.bool,
        "cache": past > 0,
        "lengths": lengths is not None,
        "window": bounds != (None, None),
        "softcap": softcap is not None,
        f"qk output: {mode}": "intermediate" in stored,
        str(q.dtype).removeprefix("torch."): True,
    }
    present = (stored["present_key"], stored["present_value"]) if "present_key" in stored else None
    return OnnxCase(
        *(name, q.contiguous(), k.contiguous(), v.contiguous(), mask, causal),
        *(None if bounds == (None, None) else bounds, offsets, said.get("scale"), softcap),
        *(output, present, stored.get("intermediate"), mode),
        tuple(word for word, holds in kinds.items() if holds),
    )


INPUTS = ("q", "k", "v", "mask", "past_key", "past_value", "lengths")
OUTPUTS = ("output", "present_key", "present_value", "intermediate")


def _named(roles: Sequence[str], names: Sequence[str], arrays: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors by role; a place that the node leaves empty has no array."""
    there = [role for role, name in zip(roles, names, strict=False) if name]
    return {role: _tensor(array) for role, array in zip(there, arrays, strict=True)}


def _tensor(array: Any) -> Tensor:
    """A numpy array as a tensor; numpy's bfloat16 is a type that torch does not know."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.astype("float32")).to(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _split(x: Tensor, heads: int | None) -> Tensor:
    """[B, S, H * D] as [B, H, S, D]; what has four axes as it is."""
    if x.dim() == 4:
        return x
    assert heads is not None, "the operator has head counts wherever it has three axes"
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _full(mask: Tensor | None, kv_len: int) -> Tensor | None:
    """A mask over all keys: those beyond its end are hidden."""
    if mask is None or mask.shape[-1] == kv_len:
        return mask
    beyond = False if mask.dtype == torch.bool else -torch.inf
    rest = mask.new_full((*mask.shape[:-1], kv_len - mask.shape[-1]), beyond)
    return torch.cat([mask, rest], dim=-1)


# as problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnnxProblem(Problem):
    """A case as a problem: its arguments are the case's, its other fields say of what size and kind these are."""

    case: str = ""

    def __str__(self) -> str:
        return self.case if self.device == "cpu" else f"{self.case}-{self.device}"

    def arguments(self, alignment: Alignment = "top-left") -> Arguments:
        return named(self.case).asked(Meaning(alignment=alignment, window_alignment=alignment))

    def to_dict(self) -> dict[str, Any]:
        """As a problem of this size and kind, with numbers of its own."""
        return Problem(**{f.name: getattr(self, f.name) for f in fields(Problem)}).to_dict()

    @property
    def unchanged(self) -> bool:
        """Whether it is still the case's, and not fitted to an implementation or made smaller."""
        return self.replace(device="cpu", seed=0) == problem_of(named(self.case))


def problem_of(one: OnnxCase) -> OnnxProblem:
    """A case as a problem."""
    a = one.arguments
    parts: list[Part] = []
    delivery = Delivery()
    if a.mask is not None:
        shape = (1,) * (4 - a.mask.dim()) + tuple(a.mask.shape)
        letters = "".join(c if n > 1 else "1" for c, n in zip(masks.AXES, shape, strict=True))
        axes = letters.replace("1", "") or "K"
        delivery = Delivery("bool" if a.form == "bool" else "additive", letters[4 - a.mask.dim() :])
        if a.form == "additive":
            parts.append(Bias(axes))
        if a.form == "bool" or bool((a.mask == -torch.inf).any()):
            parts.append(Visible(axes))
    parts += [Causal()] if a.causal else []
    parts += [Window(*a.window)] if a.window is not None else []
    batch, heads, q_len, kv_len = a.sizes
    return OnnxProblem(
        *(batch, heads, a.k.shape[1], q_len, kv_len, a.q.shape[3], a.v.shape[3], a.dtype, tuple(parts), delivery),
        *(a.scale, a.softcap),
        case=one.name,
    )


def problems() -> list[OnnxProblem]:
    """Every case as a problem. Raises OnnxMissing."""
    return [problem_of(one) for one in cases()]
