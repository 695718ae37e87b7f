"""Faults of scaling: what the logits are multiplied by, and when."""

import math

from torch import Tensor

from attn_spec.faults.fault import Fault, add, fault

# of every scale ------------------------------------------------------------------------------------------------------


@fault(
    "score",
    "the logits are not scaled at all",
    sources=("delzac/cntkx#10", "huggingface/blog#2893", "PAIR-code/tiny-transformers#71"),
    advice="Multiply q @ k.mT by the scale, 1 / sqrt(d_k) by default.",
)
def scale_missing(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return q @ k.mT


@fault(
    "score",
    "the logits are divided by the scale instead of multiplied",
    sources=("esceptico/perceiver-io#9", "lucidrains/x-transformers#190"),
    advice="Multiply by 1 / sqrt(d_k), or divide by sqrt(d_k), not both.",
)
def scale_divided(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return q @ k.mT / scale


@fault(
    "score",
    "the scale is applied twice",
    sources=("AI-Hypercomputer/maxtext#3138",),
    advice="Scale either q or the logits, not both.",
)
def scale_twice(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q * scale) @ k.mT * scale


@fault(
    "score",
    "only the square root of the scale is applied",
    sources=("openai/improved-diffusion#54",),
    advice="Apply sqrt(scale) to both q and k, or scale to one of them.",
)
def scale_root(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q * math.sqrt(scale)) @ k.mT


# of the default ------------------------------------------------------------------------------------------------------


@fault(
    "choose_scale",
    "the default scale is 1 instead of 1 / sqrt(d_k)",
    sources=("mlc-ai/mlc-llm#3426", "avalonstrel/GatedConvolution_pytorch#41"),
    advice="Default to 1 / sqrt(d_k).",
)
def scale_default_missing(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1.0


@fault(
    "choose_scale",
    "the default scale is 0, which makes every weight the same",
    sources=("SKaiNET-developers/SKaiNET#880",),
    advice="Default to 1 / sqrt(d_k).",
)
def scale_default_zero(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 0.0


@fault(
    "choose_scale",
    "the default scale is sqrt(d_k) instead of 1 / sqrt(d_k)",
    sources=("esceptico/perceiver-io#9",),
    advice="Default to d_k ** -0.5.",
)
def scale_default_inverse(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return math.sqrt(q.shape[-1])


@fault(
    "choose_scale",
    "the logits are divided by d_k instead of its square root",
    sources=("chelsea0x3b/dfdx#171", "charliezchen/scaling-matrix-preconditioning#2"),
    advice="Take the square root: d_k ** -0.5.",
)
def scale_without_root(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / q.shape[-1]


@fault(
    "choose_scale",
    "the default scale is d_k ** -0.25: one square root too many",
    sources=("openai/improved-diffusion#54",),
    advice="Use d_k ** -0.5, or d_k ** -0.25 on both q and k.",
)
def scale_fourth_root(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(math.sqrt(q.shape[-1]))


@fault(
    "choose_scale",
    "the square root of d_k is rounded down to an integer",
    sources=("chelsea0x3b/dfdx#171",),
    advice="Keep the square root in floating point.",
)
def scale_integer_root(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.isqrt(q.shape[-1])


@fault(
    "choose_scale",
    "the default scale is 1 / sqrt(hidden size) instead of 1 / sqrt(d_k)",
    sources=("lucidrains/vit-pytorch#65", "omihub777/ViT-CIFAR#11", "karpathy/ng-video-lecture#6"),
    advice="Take the width of one head: hidden size / number of heads.",
)
def scale_of_hidden(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.shape[1] * q.shape[-1])


@fault(
    "choose_scale",
    "the default scale takes hidden size / number of key/value heads for the width of a head",
    sources=("vllm-project/vllm#2622",),
    advice="Divide the hidden size by the number of query heads.",
)
def scale_of_hidden_over_kv_heads(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.shape[1] * q.shape[-1] / k.shape[1])


@fault(
    "choose_scale",
    "the default scale is 1 / sqrt(width of all key/value heads together)",
    sources=("vllm-project/vllm#48658", "lucidrains/vit-pytorch#65"),
    advice="Take the width of one head.",
)
def scale_of_kv_width(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(k.shape[1] * k.shape[-1])


@fault(
    "choose_scale",
    "the default scale is 1 / sqrt(d_v) instead of 1 / sqrt(d_k)",
    sources=("vllm-project/vllm#48658",),
    advice="Take the channels of q and k, not those of v.",
)
def scale_of_v(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(v.shape[-1])


@fault(
    "choose_scale",
    "the default scale is 1 / sqrt(channels of v in all heads)",
    sources=("juho-lee/set_transformer#18",),
    advice="Take the channels of q and k in one head.",
)
def scale_of_v_width(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.shape[1] * v.shape[-1])


@fault(
    "choose_scale",
    "the default scale is fixed at 1/8, right for d_k = 64 alone",
    sources=("pytorch/text#1432", "lucidrains/muse-maskgit-pytorch#40"),
    advice="Compute the scale from d_k.",
)
def scale_fixed(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 0.125


@fault(
    "choose_scale",
    "the default scale is 1 / sqrt(number of keys): the last axis of the transposed k",
    sources=("cneuralnetwork/solving-ml-papers#1",),
    advice="Take the last axis of q, or of k before it is transposed.",
)
def scale_of_kv_len(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(k.mT.shape[-1])


@fault(
    "choose_scale",
    "the default scale is 1 / sqrt(number of queries): the wrong axis of q",
    sources=("cneuralnetwork/solving-ml-papers#1",),
    advice="Take the last axis of q.",
)
def scale_of_q_len(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.shape[-2])


@fault(
    "choose_scale",
    "the default scale is 1 / sqrt(number of heads): the wrong axis of q",
    sources=("juho-lee/set_transformer#18", "lucidrains/denoising-diffusion-pytorch#265"),
    advice="Take the last axis of q.",
)
def scale_of_heads(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.shape[1])


@fault(
    "choose_scale",
    "the default scale counts the channels after padding to a multiple of 8",
    sources=("intel/ipex-llm#12619", "bytedance-iaas/sglang#485"),
    advice="Compute the scale from d_k before it is padded.",
)
def scale_of_padded_dim(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(q.shape[-1] + -q.shape[-1] % 8)


@fault(
    "choose_scale",
    "the default scale counts the channels after padding to a power of two",
    sources=("vllm-project/vllm-ascend#1958", "66RING/tiny-flash-attention#12"),
    advice="Compute the scale from d_k before it is padded.",
)
def scale_of_power_of_two(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale
    return 1 / math.sqrt(2 ** math.ceil(math.log2(q.shape[-1])))


# of the scale that is given ------------------------------------------------------------------------------------------


@fault(
    "choose_scale",
    "a scale that is given is ignored",
    sources=("NVIDIA/Megatron-LM#3698", "intel/ipex-llm#12619"),
    advice="Use the given scale in place of the default.",
)
def scale_given_ignored(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1])


@fault(
    "choose_scale",
    "a scale that is given is used as a divisor",
    sources=("lucidrains/x-transformers#190",),
    advice="Multiply the logits by the given scale.",
)
def scale_given_divides(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return 1 / scale
    return 1 / math.sqrt(q.shape[-1])


@fault(
    "choose_scale",
    "a scale that is given is multiplied with the default",
    sources=("AI-Hypercomputer/maxtext#3138", "NVIDIA/Megatron-LM#848"),
    advice="Let the given scale replace 1 / sqrt(d_k).",
)
def scale_given_times_default(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return scale / math.sqrt(q.shape[-1])
    return 1 / math.sqrt(q.shape[-1])


@fault(
    "choose_scale",
    "the default scale is applied once more, on top of a given scale and of itself",
    sources=("AI-Hypercomputer/maxtext#3138", "NVIDIA/Megatron-LM#848"),
    advice="Scale q, or let the callee scale, not both: pass scale=1.0 with a scaled q.",
)
def scale_then_default(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    return (1 / math.sqrt(q.shape[-1]) if scale is None else scale) / math.sqrt(q.shape[-1])


@fault(
    "choose_scale",
    "q is multiplied by default / scale instead of scale / default before the default scale is applied",
    sources=("lucidrains/x-transformers#190",),
    advice="To emulate a scale, multiply q by scale * sqrt(d_k).",
)
def scale_ratio_inverted(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    if scale is not None:
        return 1 / (q.shape[-1] * scale)
    return 1 / math.sqrt(q.shape[-1])


@fault(
    "choose_scale",
    "a scale of 0.0 counts as not given",
    sources=("NVIDIA/Megatron-LM#6590", "SKaiNET-developers/SKaiNET#880", "NVIDIA-NeMo/Automodel#3704"),
    advice="Ask `scale is None`, not `scale or ...`.",
)
def scale_zero_replaced(scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> float:
    return scale or 1 / math.sqrt(q.shape[-1])


# beside the softmax --------------------------------------------------------------------------------------------------


def _unscaled(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return q @ k.mT


def _values_scaled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v / math.sqrt(q.shape[-1])


add(
    Fault(
        "scale-after-softmax",
        "the weights are scaled instead of the logits",
        {"score": _unscaled, "arrange": _values_scaled},
        sources=("FrancescoSaverioZuppichini/ViT#2",),
        advice="Scale before the softmax.",
    )
)


@fault(
    "arrange",
    "the output is scaled as well as the logits",
    sources=("FrancescoSaverioZuppichini/ViT#2", "AI-Hypercomputer/maxtext#3138"),
    advice="Scale the logits alone.",
)
def scale_also_after_softmax(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v / math.sqrt(q.shape[-1])
