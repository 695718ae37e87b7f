"""Faults around the attention of a module: what its projections are given, how heads are told apart, what is done last.

Each is one changed block of `attn_spec.module_blocks`. Those that change the output are named by giving it again from
the module's own weights; those that show in how a module behaves (`told_by`) by the law that they break.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec.faults.module_fault import MODULE_FAULTS, ModuleFault, fault
from attn_spec.module_blocks import Weights

__all__ = ["MODULE_FAULTS", "ModuleFault", "fault"]

# what the projections are given --------------------------------------------------------------------------------------


@fault(
    "take",
    "keys and values are made from the queries' own sequence, the context is not read",
    sources=("zomux/lanmt#11",),
    advice="Project k and v from the context.",
)
def context_ignored(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


@fault(
    "take",
    "keys are made from the queries' own sequence, values from the context",
    advice="Project k from the context too.",
)
def keys_from_queries_sequence(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, context


@fault(
    "take",
    "values are made from the queries' own sequence, keys from the context",
    advice="Project v from the context too.",
)
def values_from_queries_sequence(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, context, x


@fault(
    "take",
    "values are made from the queries' own sequence wherever a context has its shape",
    advice="Project v from the context whenever there is one; no shape tells the two apart.",
)
def values_from_queries_sequence_of_that_shape(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, context, x if context.shape == x.shape else context


@fault(
    "take",
    "part of the gradient of the hidden states is cut off before a projection",
    advice="Take out the `detach`.",
    told_by="hidden-gradients",
)
def gradient_cut_before_projection(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, context.detach(), context


@fault(
    "take",
    "queries and keys change places: queries are made from the context",
    sources=("rexrex9/nlp_torchtext#2",),
    advice="Project q from x, k and v from the context.",
)
def queries_from_context(x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return context, x, x


# which weights -------------------------------------------------------------------------------------------------------


@fault(
    "assign",
    "keys are made by the projection of the queries",
    advice="Use the key projection for k.",
)
def keys_by_query_projection(w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    return w["q"], w["q"], w["v"]


@fault(
    "assign",
    "values are made by the projection of the keys",
    advice="Use the value projection for v.",
)
def values_by_key_projection(w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    return w["q"], w["k"], w["k"]


@fault(
    "assign",
    "values are made by the projection of the queries",
    advice="Use the value projection for v.",
)
def values_by_query_projection(w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    return w["q"], w["k"], w["q"]


@fault(
    "assign",
    "the projections of queries and keys change places",
    advice="q = x W_q and k = x W_k; check the order in which a fused projection is split.",
)
def queries_and_keys_swapped(w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    return w["k"], w["q"], w["v"]


@fault(
    "project",
    "the biases of the projections are left out",
    advice="Add the bias: `F.linear(x, w, b)`.",
)
def projection_biases_lost(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x @ w


@fault(
    "project",
    "the biases of the projections are added twice",
    advice="Add the bias once.",
)
def projection_biases_twice(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return x @ w if b is None else x @ w + 2 * b


@fault(
    "turn",
    "values are rotated by their positions, as q and k are",
    advice="Rotate q and k alone.",
    told_by="values-rotated",
)
def values_rotated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[-2]).to(x)[:, None] * 10_000.0 ** (-torch.arange(half).to(x) / max(half, 1))
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest], -1)

    return rotated(q), rotated(k), rotated(v)


# heads in and out ----------------------------------------------------------------------------------------------------


@fault(
    "join",
    "heads are averaged, and the average stands for each of them",
    advice="Concatenate the heads.",
)
def heads_averaged(o: Tensor) -> Tensor:
    o = o.mean(1, keepdim=True).expand_as(o)
    return o.transpose(1, 2).flatten(2)


@fault(
    "weigh",
    "the weights are averaged over the heads before they meet the values",
    advice="Let each head use its own weights; average those that are returned alone.",
)
def weights_averaged_over_heads(p: Tensor) -> Tensor:
    return p.mean(1, keepdim=True).expand_as(p)


# the output ----------------------------------------------------------------------------------------------------------


@fault(
    "emerge",
    "the output projection is skipped",
    advice="Return `self.out_proj(y)`.",
)
def output_projection_skipped(y: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return y


@fault(
    "emerge",
    "the bias of the output projection is left out",
    advice="Add the bias of the output projection.",
)
def output_bias_lost(y: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return y @ w


@fault(
    "emerge",
    "the output projection is applied transposed",
    sources=("rasbt/LLMs-from-scratch#857",),
    advice="nn.Linear stores [out, in]; a Conv1D or a parameter of one's own may store [in, out].",
)
def output_projection_transposed(y: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return y @ w.mT if b is None else y @ w.mT + b


@fault(
    "emerge",
    "the output projection is applied twice",
    advice="Apply it once.",
)
def output_projection_twice(y: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    y = y @ w if b is None else y @ w + b
    return y @ w if b is None else y @ w + b


@fault(
    "finish",
    "the residual is added inside the module, which its caller adds again",
    advice="Return the attention's output alone.",
)
def residual_inside(y: Tensor, x: Tensor) -> Tensor:
    return y + x


@fault(
    "finish",
    "the output passes through a nonlinearity",
    advice="Return the output projection's result as it is.",
)
def output_activated(y: Tensor, x: Tensor) -> Tensor:
    return torch.relu(y)


@fault(
    "finish",
    "the output is divided by the square root of the width",
    advice="Return the output projection's result as it is; the scale belongs to the logits.",
)
def output_scaled(y: Tensor, x: Tensor) -> Tensor:
    return y / math.sqrt(x.shape[-1])


@fault(
    "finish",
    "the last token is left out",
    advice="Return an output for every token.",
    told_by="output-shape",
)
def last_token_lost(y: Tensor, x: Tensor) -> Tensor:
    return y[:, :-1]


@fault(
    "finish",
    "samples and tokens leave as one axis",
    advice="Return [B, S, width]: `y.view(B, S, -1)`.",
    sources=("vllm-project/vllm#32274",),
    told_by="output-shape-flat",
)
def tokens_flattened(y: Tensor, x: Tensor) -> Tensor:
    return y.flatten(0, 1)


@fault(
    "finish",
    "the output is float32 whatever comes in",
    advice="Cast back: `y.to(x.dtype)`.",
    told_by="output-dtype",
)
def output_in_float32(y: Tensor, x: Tensor) -> Tensor:
    return y if y.dtype == torch.float64 else y.float()


# how it behaves ------------------------------------------------------------------------------------------------------


@fault(
    "receive",
    "the hidden states are changed in place",
    advice="Work on a copy.",
    told_by="inputs-changed",
)
def inputs_changed_in_place(x: Tensor) -> Tensor:
    return x.sub_(x.mean(-1, keepdim=True)) if not x.requires_grad else x


@fault(
    "keep",
    "keys and values of earlier calls are kept and read again",
    sources=("gpu-mode/kernelbot#501", "tensara/tensara#238"),
    advice="Keep nothing but a cache that the caller asks for, and reset it.",
    told_by="state-kept",
)
def keys_kept_between_calls(kept: dict[str, Tensor], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    if "k" in kept and kept["k"].shape == k.shape:
        k, v = kept["k"], kept["v"]
    kept["k"], kept["v"] = k.detach().roll(1, 2), v.detach().roll(1, 2)
    return k, v


@fault(
    "drop",
    "dropout is on in eval mode",
    sources=("meta-pytorch/torchtune#1803", "facebookresearch/vjepa2#160", "huggingface/pytorch-image-models#1978"),
    advice="`F.dropout(p, self.dropout, training=self.training)`, or nn.Dropout.",
    told_by="dropout-in-eval",
)
def dropout_in_eval(p: Tensor, rate: float, training: bool) -> Tensor:
    return F.dropout(p, rate, True)


@fault(
    "reach",
    "no gradient reaches the keys",
    advice="Take out the `detach`.",
    told_by="dead-weights",
)
def keys_detached(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k.detach(), v


@fault(
    "use_mask",
    "the mask is used in training only",
    advice="Use the mask in eval mode too.",
)
def mask_in_training_only(mask: Tensor | None, training: bool, asked: bool, kept: dict[str, Tensor]) -> Tensor | None:
    return mask if training else None


@fault(
    "use_mask",
    "the mask is used in eval mode only",
    advice="Use the mask in training mode too.",
    told_by="training-differs",
)
def mask_in_eval_only(mask: Tensor | None, training: bool, asked: bool, kept: dict[str, Tensor]) -> Tensor | None:
    return None if training else mask


@fault(
    "use_mask",
    "the mask is forgotten when weights are asked for",
    sources=("pytorch/pytorch#99282",),
    advice="Use the mask on every way through the module.",
    told_by="ways-differ",
)
def mask_forgotten_with_weights(
    mask: Tensor | None, training: bool, asked: bool, kept: dict[str, Tensor]
) -> Tensor | None:
    return None if asked else mask


@fault(
    "use_mask",
    "the mask of the first call is kept, and read in later calls of its shape",
    advice="Build the mask of each call from what that call is given.",
    told_by="mask-kept",
)
def mask_kept_between_calls(mask: Tensor | None, training: bool, asked: bool, kept: dict[str, Tensor]) -> Tensor | None:
    return mask if mask is None else kept.setdefault(str((mask.shape, mask.dtype)), mask)
