"""Faults of what the backward pass starts from: what it forgets of the call, the weights again, the cotangent."""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault
from attn_spec.problem import Arguments

# what the backward pass forgets --------------------------------------------------------------------------------------

FORGOTTEN = (
    ("causal", "the causal flag is not heeded", "triton-lang/triton#4541", "Save the flag and mask dS with it."),
    ("window", "the window is not heeded", "Dao-AILab/flash-attention#1033", "Hand the window to the backward kernel."),
    (
        "softcap",
        "the softcap is not heeded",
        "Dao-AILab/flash-attention#1033",
        "Cap the logits as the forward pass does.",
    ),
    ("alibi", "slopes are not heeded", "Dao-AILab/flash-attention#1033", "Add the slopes' bias before exp(s - lse)."),
    ("mask", "the mask is not heeded", "triton-lang/triton#7216", "Mask the logits as the forward pass does."),
    (
        "scale",
        "the scale that was given is not heeded",
        "Dao-AILab/flash-attention#1033",
        "Save the scale for the backward.",
    ),
)
NOTHING = {"causal": False}


def _forgets(name: str, title: str, source: str, advice: str) -> Fault:
    nothing = NOTHING.get(name)

    def recall(a: Arguments) -> Arguments:
        return a.replace(**{name: nothing})

    return Fault(
        f"backward-without-{name}",
        f"in the backward pass {title}",
        {"recall": recall},
        sources=(source,),
        advice=advice,
    )


for _forgotten in FORGOTTEN:
    add(_forgets(*_forgotten))


def _of_another(name: str, title: str, source: str, advice: str) -> Fault:
    nothing = NOTHING.get(name)

    def recall(a: Arguments) -> Arguments:
        return a.replace(**{name: nothing})

    def recompute(s: Tensor, lse: Tensor) -> Tensor:
        lse = torch.logsumexp(s, dim=-1)
        return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])

    def row_term(do: Tensor, o: Tensor, dp: Tensor, p: Tensor) -> Tensor:
        return (p * dp).sum(dim=-1, keepdim=True)

    return Fault(
        f"gradient-of-one-without-{name}",
        f"the forward pass that is run again for the backward pass is another one: {title}",
        {"recall": recall, "recompute": recompute, "row_term": row_term},
        sources=(source,),
        advice=advice,
    )


for _forgotten in FORGOTTEN:
    add(_of_another(*_forgotten))


@fault(
    "recall",
    "in the backward pass the window is not heeded when the causal flag is set",
    sources=("Dao-AILab/flash-attention#1033", "jax-ml/jax#39576"),
    advice="Hand both bounds to the backward kernel.",
)
def backward_window_ignored_when_causal(a: Arguments) -> Arguments:
    return a.replace(window=None) if a.causal else a


@fault(
    "recall",
    "in the backward pass the causal flag is not heeded for a window",
    sources=("triton-lang/triton#4541",),
    advice="Combine causality and window in the backward pass too.",
)
def backward_causal_ignored_with_window(a: Arguments) -> Arguments:
    return a.replace(causal=False) if a.window is not None else a


@fault(
    "recall",
    "in the backward pass the softcap is not heeded when the causal flag is set",
    sources=("Dao-AILab/flash-attention#1033",),
    advice="Cap the logits on the causal path too.",
)
def backward_softcap_ignored_when_causal(a: Arguments) -> Arguments:
    return a.replace(softcap=None) if a.causal else a


@fault(
    "recall",
    "in the backward pass slopes are not heeded where queries and keys differ in number",
    sources=("lucidrains/x-transformers#103",),
    advice="Shift the positions of the queries in the backward pass too.",
)
def backward_alibi_ignored_across(a: Arguments) -> Arguments:
    return a.replace(alibi=None) if a.q.shape[2] != a.k.shape[2] else a


# the weights again ---------------------------------------------------------------------------------------------------


@fault(
    "recompute",
    "the weights are worked out anew with a log-sum-exp in base 2",
    sources=("tile-ai/tilelang#2461", "flashinfer-ai/flashinfer#2113"),
    advice="Bring logits and log-sum-exp to one base.",
)
def recompute_in_base_two(s: Tensor, lse: Tensor) -> Tensor:
    return torch.exp2(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])


@fault(
    "recompute",
    "the log-sum-exp was saved in half precision: the weights worked out anew do not sum to 1",
    sources=("pytorch/pytorch#119320",),
    advice="Save the log-sum-exp in float32.",
)
def recompute_from_rounded_lse(s: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None].half().to(s))


@fault(
    "recompute",
    "the weights are worked out anew without the sink",
    sources=("NVIDIA/cudnn-frontend#676",),
    advice="Use the log-sum-exp of the forward pass, which holds the sink.",
)
def recompute_without_sink(s: Tensor, lse: Tensor) -> Tensor:
    own = torch.logsumexp(s, dim=-1)
    return torch.exp(s - own.masked_fill(own == -torch.inf, 0.0)[..., None])


def _tail(size: int) -> Fault:
    def recompute(s: Tensor, lse: Tensor) -> Tensor:
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        whole = max(s.shape[-2] // size, 1) * size
        return p * (torch.arange(s.shape[-2]) < whole)[:, None]

    return Fault(
        f"backward-tail-queries-dropped-{size}",
        f"in the backward pass the queries after the last whole block of {size} are left out",
        {"recompute": recompute},
        sources=("triton-lang/triton#1975",),
        advice="Round the number of blocks up in the backward grid.",
    )


def _tail_keys(size: int) -> Fault:
    def recompute(s: Tensor, lse: Tensor) -> Tensor:
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        whole = max(s.shape[-1] // size, 1) * size
        return p * (torch.arange(s.shape[-1]) < whole)

    return Fault(
        f"backward-tail-keys-dropped-{size}",
        f"in the backward pass the keys after the last whole block of {size} are left out",
        {"recompute": recompute},
        sources=("triton-lang/triton#1975",),
        advice="Round the number of blocks up in the backward grid.",
    )


for _size in (16, 64):
    add(_tail(_size))
    add(_tail_keys(_size))


def _half_visited(size: int) -> Fault:
    def recompute(s: Tensor, lse: Tensor) -> Tensor:
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        return p * (torch.arange(s.shape[-2]) < -(-s.shape[-2] // (2 * size)) * size)[:, None]

    return Fault(
        f"backward-half-the-queries-visited-{size}",
        f"the backward pass goes over blocks of {size} queries, and takes their number from blocks of {2 * size}",
        {"recompute": recompute},
        sources=("triton-lang/triton#1975",),
        advice="Work the backward grid out from the block sizes of the backward kernels.",
    )


def _half_visited_keys(size: int) -> Fault:
    def recompute(s: Tensor, lse: Tensor) -> Tensor:
        p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        return p * (torch.arange(s.shape[-1]) < -(-s.shape[-1] // (2 * size)) * size)

    return Fault(
        f"backward-half-the-keys-visited-{size}",
        f"the backward pass goes over blocks of {size} keys, and takes their number from blocks of {2 * size}",
        {"recompute": recompute},
        sources=("triton-lang/triton#1975",),
        advice="Work the backward grid out from the block sizes of the backward kernels.",
    )


for _size in (16, 64):
    add(_half_visited(_size))
    add(_half_visited_keys(_size))


def _padding_poisons(size: int) -> Fault:
    def to_keys(dx: Tensor, q: Tensor, scale: float) -> Tensor:
        return dx.mT @ q * (scale if q.shape[-2] % size == 0 else torch.nan)

    return Fault(
        f"padding-rows-poison-key-gradient-{size}",
        f"queries beyond the last whole block of {size} have no log-sum-exp: 0 times what lies there is in every dK",
        {"to_keys": to_keys},
        sources=("tile-ai/tilelang#2461",),
        advice="Write a finite log-sum-exp for padding rows, or select the weights there instead of multiplying.",
    )


def _bias_beyond_the_end(size: int) -> Fault:
    def recall(a: Arguments) -> Arguments:
        return a.replace(scale=torch.nan) if a.mask is not None and a.k.shape[2] % size else a

    return Fault(
        f"backward-bias-beyond-the-end-{size}",
        f"the backward pass reads a mask beyond keys that are no whole blocks of {size}, where inf times 0 is NaN",
        {"recall": recall},
        sources=("pytorch/pytorch#153799",),
        advice="Hide the tail before anything is evaluated there.",
    )


for _size in (16, 64):
    add(_padding_poisons(_size))
    add(_bias_beyond_the_end(_size))

# the cotangent -------------------------------------------------------------------------------------------------------


@fault(
    "receive",
    "the cotangent is read as if it were contiguous",
    sources=("huggingface/diffusers#9768",),
    advice="Use its strides, or make it contiguous first.",
)
def cotangent_taken_for_contiguous(do: Tensor) -> Tensor:
    flat = do.as_strided((do.untyped_storage().nbytes() // do.element_size(),), (1,), 0)
    return flat.expand(do.numel()).view(do.shape) if len(flat) == 1 else flat[: do.numel()].view(do.shape)


@fault(
    "receive",
    "the cotangent is taken to be 1 everywhere",
    sources=("paiml/aprender#2203",),
    advice="Use the cotangent that comes back.",
)
def cotangent_ignored(do: Tensor) -> Tensor:
    return torch.ones_like(do)


# right none the less ---------------------------------------------------------------------------------------------


@fault(
    "recompute",
    "the weights are clamped at 1 where they are worked out anew",
    sources=("pytorch/pytorch#119320",),
    advice="Nothing: exp(s - lse) does not pass 1.",
    equivalent="s - lse is at most 0, up to rounding that the bound has room for",
)
def recompute_clamped(s: Tensor, lse: Tensor) -> Tensor:
    return torch.exp((s - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).clamp(max=0.0))
