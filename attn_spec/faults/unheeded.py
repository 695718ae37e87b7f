"""Variants that are asked for and not heeded: at all, for one query, or once another variant is asked for too."""

from __future__ import annotations

from attn_spec.faults.fault import fault
from attn_spec.problem import Arguments


@fault("heed", "a window is ignored", sources=("huggingface/transformers#29777",), advice="Apply the window.")
def window_ignored(a: Arguments) -> Arguments:
    return a.replace(window=None)


@fault(
    "heed",
    "the window is ignored for a single query",
    sources=("karpathy/nanochat#456", "rajveer43/VeloxQuant-MLX#463"),
    advice="For one query too, hide the keys that lie outside the window.",
)
def window_ignored_for_one_query(a: Arguments) -> Arguments:
    return a.replace(window=None) if a.q.shape[2] == 1 else a


@fault(
    "heed",
    "the window is ignored where no mask is given",
    sources=("jax-ml/jax#32300",),
    advice="Apply the window with and without a mask.",
)
def window_ignored_without_mask(a: Arguments) -> Arguments:
    return a.replace(window=None) if a.mask is None else a


@fault(
    "heed",
    "a mask is ignored once a window is given",
    sources=("NVIDIA/Megatron-LM#7039",),
    advice="Combine the window with the mask.",
)
def mask_ignored_with_window(a: Arguments) -> Arguments:
    return a.replace(mask=None, form=None) if a.window is not None else a


@fault(
    "heed",
    "the window is ignored where query heads share key/value heads",
    sources=("huggingface/transformers#30127",),
    advice="Apply the window on the grouped path too.",
)
def window_ignored_with_groups(a: Arguments) -> Arguments:
    return a.replace(window=None) if a.q.shape[1] != a.k.shape[1] else a


@fault(
    "heed",
    "the window is ignored once there are slopes",
    sources=("NVIDIA/Megatron-LM#7039",),
    advice="Apply the window on the path with slopes too.",
)
def window_ignored_with_alibi(a: Arguments) -> Arguments:
    return a.replace(window=None) if a.alibi is not None else a


@fault("heed", "the softcap is ignored", sources=("sgl-project/sglang#33915",), advice="Apply the softcap.")
def softcap_ignored(a: Arguments) -> Arguments:
    return a.replace(softcap=None)


@fault(
    "heed",
    "the softcap is ignored once a window is given",
    sources=("sgl-project/sglang#33915",),
    advice="Apply the softcap on the path with a window too.",
)
def softcap_ignored_with_window(a: Arguments) -> Arguments:
    return a.replace(softcap=None) if a.window is not None else a


@fault(
    "heed",
    "the softcap is ignored when the causal flag is set",
    sources=("sgl-project/sglang#33915",),
    advice="Apply the softcap on the causal path too.",
)
def softcap_ignored_when_causal(a: Arguments) -> Arguments:
    return a.replace(softcap=None) if a.causal else a


@fault(
    "heed",
    "the softcap is ignored for a single query",
    sources=("sgl-project/sglang#33915",),
    advice="Apply the softcap in decoding too.",
)
def softcap_ignored_for_one_query(a: Arguments) -> Arguments:
    return a.replace(softcap=None) if a.q.shape[2] == 1 else a


@fault("heed", "slopes are ignored", sources=("ml-explore/mlx#3071",), advice="Add the slopes' bias.")
def alibi_ignored(a: Arguments) -> Arguments:
    return a.replace(alibi=None)


@fault(
    "heed",
    "slopes are ignored for a single query",
    sources=("NVIDIA/TensorRT-LLM#1611",),
    advice="Add the slopes' bias in decoding too.",
)
def alibi_ignored_for_one_query(a: Arguments) -> Arguments:
    return a.replace(alibi=None) if a.q.shape[2] == 1 else a


@fault(
    "heed",
    "slopes are ignored once there is a softcap",
    sources=("Dao-AILab/flash-attention#1025",),
    advice="Add the slopes' bias after the cap.",
)
def alibi_ignored_with_softcap(a: Arguments) -> Arguments:
    return a.replace(alibi=None) if a.softcap is not None else a


@fault("heed", "sinks are ignored", sources=("NVIDIA/TransformerEngine#2541",), advice="Add exp(sink) to the sum.")
def sinks_ignored(a: Arguments) -> Arguments:
    return a.replace(sinks=None)


@fault(
    "heed",
    "sinks are ignored once a window is given",
    sources=("NVIDIA/TransformerEngine#2541",),
    advice="Add exp(sink) to the sum in windowed layers too.",
)
def sinks_ignored_with_window(a: Arguments) -> Arguments:
    return a.replace(sinks=None) if a.window is not None else a


@fault(
    "heed",
    "sinks are ignored for a single query",
    sources=("NVIDIA/TransformerEngine#2541",),
    advice="Add exp(sink) to the sum in decoding too.",
)
def sinks_ignored_for_one_query(a: Arguments) -> Arguments:
    return a.replace(sinks=None) if a.q.shape[2] == 1 else a


@fault(
    "heed",
    "the scale is ignored once there is a softcap",
    sources=("Dao-AILab/flash-attention#1033",),
    advice="Scale the logits before they are capped.",
)
def scale_ignored_with_softcap(a: Arguments) -> Arguments:
    return a.replace(scale=None) if a.softcap is not None else a
