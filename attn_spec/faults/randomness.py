"""Faults of dropout: how much is dropped and what becomes of the rest, where, by which numbers, and on the way back.

Each is one changed block of `attn_spec.dropout_blocks`; those that explain what others make come first, and the first
whose violation there is, is the diagnosis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from attn_spec.dropout_blocks import BLOCKS
from attn_spec.faults.behaviour import BEHAVIOUR_FAULTS, DIAGNOSES, catalogue

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.engine import CheckResult
    from attn_spec.faults.diagnosis import Diagnosis

fault = catalogue("randomness", BLOCKS)


# where ---------------------------------------------------------------------------------------------------------------


@fault(
    "attend",
    "dropout is on the logits, before the softmax",
    sources=("PaddlePaddle/Parakeet#74", "arghosh/AKT#11"),
    advice="Drop weights, after the softmax: a logit of 0 is not a weight of 0.",
    told_by="dropout-on-logits",
)
def dropout_on_logits(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    s = torch.where(kept, s / (1 - rate), 0.0 * s)
    p = torch.softmax(s, dim=-1)
    return p @ v


@fault(
    "attend",
    "dropout is on the values, not on the weights",
    sources=("rasbt/LLMs-from-scratch#280",),
    advice="Drop elements of the weights [B, H, Sq, Sk].",
    told_by="dropout-on-values",
)
def dropout_on_values(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    p = torch.softmax(s, dim=-1)
    return p @ F.dropout(v, rate)


@fault(
    "attend",
    "dropout is on the output, not on the weights",
    sources=("nikhilbarhate99/min-decision-transformer#2", "facebookresearch/xformers#301"),
    advice="Drop elements of the weights [B, H, Sq, Sk], before they are multiplied by V.",
    told_by="dropout-on-output",
)
def dropout_on_output(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    p = torch.softmax(s, dim=-1)
    return F.dropout(p @ v, rate)


@fault(
    "heed",
    "hidden keys are seen under dropout",
    sources=("keras-team/keras#23038",),
    advice="Hide keys on every way through the code, with dropout and without.",
    told_by="dropout-reveals",
)
def hidden_keys_seen_under_dropout(visible: Tensor | None, rate: float) -> Tensor | None:
    return visible if not rate else None


# how much ------------------------------------------------------------------------------------------------------------


@fault(
    "choose_rate",
    "the rate is used as the probability of keeping a weight",
    sources=("titu1994/Inception-v4#5", "clab/dynet#186", "kbreininger/tutorial-dlframework#3"),
    advice="Drop with probability p, and divide by 1 - p.",
    told_by="dropout-keep-probability",
)
def rate_is_keep_probability(rate: float) -> float:
    return 1 - rate if rate else 0.0


@fault(
    "keep",
    "weights are kept with the probability that they should be dropped with",
    sources=("v-iashin/CS231n#8",),
    advice="Keep where the number drawn is at least the rate.",
    told_by="dropout-keep-probability",
)
def kept_where_dropped(u: Tensor, rate: float) -> Tensor:
    return u < rate


@fault(
    "keep",
    "every weight is dropped",
    sources=("ooples/AiDotNet.Tensors#732",),
    advice="Draw the mask before it is used.",
    told_by="dropout-everything",
)
def everything_dropped(u: Tensor, rate: float) -> Tensor:
    return u < 0


@fault(
    "choose_rate",
    "the rate is ignored, and nothing is dropped",
    sources=("zhouhaoyi/Informer2020#97", "jenkspt/gpt-jax#1"),
    advice="Use what dropout returns, or refuse a rate.",
    told_by="dropout-not-applied",
    equivalent="it is right without dropout, as kernels are whose rate must stay 0: an advisory, red under strict",
)
def dropout_never_applied(rate: float) -> float:
    return 0.0


@fault(
    "attend",
    "the way that hides keys drops nothing",
    sources=("zhouhaoyi/Informer2020#97",),
    advice="Drop on every way through the code, with a mask and without.",
    told_by="dropout-forgotten",
)
def nothing_dropped_where_keys_are_hidden(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    p = torch.softmax(s, dim=-1)
    if not bool((s == -torch.inf).any()):
        p = torch.where(kept, p / (1 - rate), 0.0)
    return p @ v


@fault(
    "choose_rate",
    "another rate than the one given is used",
    sources=("facebookresearch/vjepa2#160",),
    advice="Pass the rate on that is asked for.",
    told_by="dropout-rate",
)
def rate_fixed(rate: float) -> float:
    return 0.1 if rate else 0.0


@fault(
    "choose_rate",
    "dropout is on where the rate is 0",
    sources=("meta-pytorch/torchtune#1803", "pytorch/pytorch#124464"),
    advice="Drop nothing at a rate of 0; `rate or default` takes 0 for none given.",
    told_by="dropout-at-zero",
)
def dropout_on_at_zero(rate: float) -> float:
    return rate or 0.1


@fault(
    "keep",
    "only the first tile of keys is dropped from",
    sources=("xlite-dev/ffpa-attn#166",),
    advice="Draw for every block of keys, with the block's own offset.",
    told_by="dropout-first-tile",
)
def first_tile_only(u: Tensor, rate: float) -> Tensor:
    kept = u >= rate
    kept[..., 64:] = True
    return kept


@fault(
    "keep",
    "keys of a last tile that is not full are never dropped",
    sources=("xlite-dev/ffpa-attn#166",),
    advice="Draw for the tail of the keys too.",
    told_by="dropout-tail",
)
def tail_never_dropped(u: Tensor, rate: float) -> Tensor:
    kept = u >= rate
    full = kept.shape[-1] // 64 * 64
    kept[..., full:] |= full > 0
    return kept


# what becomes of the rest --------------------------------------------------------------------------------------------


@fault(
    "attend",
    "the weights that are kept are not divided by 1 - rate",
    sources=("pytorch/pytorch#5752",),
    advice="Divide the weights that are kept by 1 - rate.",
    told_by="dropout-not-rescaled",
)
def kept_not_rescaled(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    p = torch.softmax(s, dim=-1)
    p = torch.where(kept, p, 0.0)
    return p @ v


@fault(
    "attend",
    "the weights that are kept are divided by the rate",
    sources=("lmjohns3/theanets#123", "kaldi-asr/kaldi#2814", "rasbt/LLMs-from-scratch#431"),
    advice="Divide by 1 - rate: that share is what remains.",
    told_by="dropout-rescaled-by-rate",
)
def rescaled_by_rate(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    p = torch.softmax(s, dim=-1)
    p = torch.where(kept, p / rate, 0.0)
    return p @ v


@fault(
    "attend",
    "the weights that are kept are made to sum to 1 again",
    sources=("facebookresearch/fairseq#351",),
    advice="Divide by 1 - rate, whatever the row then sums to.",
    told_by="dropout-renormalised",
)
def rows_renormalised(s: Tensor, v: Tensor, kept: Tensor, rate: float) -> Tensor:
    p = torch.softmax(s, dim=-1)
    p = torch.where(kept, p, 0.0)
    p = p / p.sum(dim=-1, keepdim=True).clamp(min=1e-9)
    return p @ v


# by which numbers ----------------------------------------------------------------------------------------------------


@fault(
    "draw",
    "one mask for all queries",
    sources=("NVIDIA/TransformerEngine#227",),
    advice="Draw [B, H, Sq, Sk] numbers.",
    told_by="dropout-queries-alike",
)
def one_mask_for_all_queries(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(b, h, 1, kv_len).expand(b, h, q_len, kv_len)


@fault(
    "draw",
    "keys of a query are dropped together",
    sources=("pytorch/pytorch#198333",),
    advice="Draw [B, H, Sq, Sk] numbers.",
    told_by="dropout-keys-alike",
)
def keys_dropped_together(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(b, h, q_len, -(-kv_len // 4)).repeat_interleave(4, dim=-1)[..., :kv_len]


@fault(
    "draw",
    "one mask for all heads",
    sources=("pytorch/pytorch#198333",),
    advice="Draw [B, H, Sq, Sk] numbers, or give the counter the head.",
    told_by="dropout-heads-alike",
)
def one_mask_for_all_heads(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(b, 1, q_len, kv_len).expand(b, h, q_len, kv_len)


@fault(
    "draw",
    "one mask for the query heads that share a key/value head",
    sources=("pytorch/pytorch#198333",),
    advice="Draw for each query head; it has weights of its own.",
    told_by="dropout-group-alike",
)
def one_mask_for_a_group(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(b, kv_heads, q_len, kv_len).repeat_interleave(h // kv_heads, dim=1)


@fault(
    "draw",
    "one mask for the whole batch",
    sources=("keras-team/keras#217",),
    advice="Draw [B, H, Sq, Sk] numbers, or give the counter the sample.",
    told_by="dropout-samples-alike",
)
def one_mask_for_the_batch(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(1, h, q_len, kv_len).expand(b, h, q_len, kv_len)


@fault(
    "draw",
    "each tile of keys has the mask of the first",
    sources=("pytorch/pytorch#198333", "xlite-dev/ffpa-attn#352"),
    advice="Give the counter the place of the tile.",
    told_by="dropout-tiles-alike",
)
def mask_repeated_by_tile(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(b, h, q_len, 64).repeat(1, 1, 1, -(-kv_len // 64))[..., :kv_len]


@fault(
    "draw",
    "a query begins its numbers before those of the query before it have ended",
    sources=("xlite-dev/ffpa-attn#352",),
    advice="Count the numbers of a query by the number of its keys: row * Sk + column.",
    told_by="dropout-shifted-alike",
)
def numbers_of_rows_overlap(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(b, h, 16 * q_len + kv_len).unfold(-1, kv_len, 16)[:, :, :q_len]


@fault(
    "draw",
    "the same weights are dropped in every call, whatever the seed",
    sources=("Dao-AILab/flash-attention#2088", "PaddlePaddle/Paddle#7796", "NervanaSystems/ngraph#3006"),
    advice="Take seed and offset from torch's generator.",
    told_by="dropout-same-always",
)
def seed_fixed(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    return torch.rand(b, h, q_len, kv_len, generator=torch.Generator().manual_seed(0))


@fault(
    "draw",
    "the next call drops the same weights, for the generator is not moved on",
    sources=("Dao-AILab/flash-attention#314",),
    advice="Move the generator's offset on by as many numbers as the call draws.",
    told_by="dropout-not-advanced",
)
def offset_not_advanced(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    seed = torch.initial_seed()
    return torch.rand(b, h, q_len, kv_len, generator=torch.Generator().manual_seed(seed))


@fault(
    "draw",
    "torch's seed is ignored",
    sources=("facebookresearch/xformers#173", "flagos-ai/FlagGems#6217"),
    advice="Draw from torch's generator.",
    told_by="dropout-seed-ignored",
)
def seed_ignored(b: int, h: int, kv_heads: int, q_len: int, kv_len: int) -> Tensor:
    generator = torch.Generator()
    generator.seed()
    return torch.rand(b, h, q_len, kv_len, generator=generator)


# on the way back -----------------------------------------------------------------------------------------------------


@fault(
    "recall",
    "the backward pass draws a mask of its own",
    sources=("Dao-AILab/flash-attention#1251",),
    advice="Keep the mask, or the seed and offset that it was drawn with.",
    told_by="dropout-backward-mask",
)
def mask_drawn_anew_backwards(kept: Tensor, rate: float) -> tuple[Tensor, float]:
    return torch.rand(kept.shape) >= rate, rate


@fault(
    "recall",
    "the backward pass knows nothing of dropout",
    sources=("aws-neuron/nki-samples#81",),
    advice="Drop from the weights, and from their gradient, what the forward pass dropped.",
    told_by="dropout-backward-without",
)
def no_mask_backwards(kept: Tensor, rate: float) -> tuple[Tensor, float]:
    return torch.ones_like(kept), 0.0


@fault(
    "recall",
    "the backward pass does not divide by 1 - rate",
    sources=("NVIDIA/apex#816",),
    advice="Divide by 1 - rate on the way back too.",
    told_by="dropout-backward-scale",
)
def not_rescaled_backwards(kept: Tensor, rate: float) -> tuple[Tensor, float]:
    return kept, 0.0


def diagnose_dropout(implementation: Implementation, results: Sequence[CheckResult]) -> list[Diagnosis]:
    """The faults that tell the violation which explains the others."""
    from attn_spec.faults.diagnosis import Diagnosis

    broken = [r.merge for r in results if r.outcome == "failed"]
    own = [one for one in BEHAVIOUR_FAULTS.values() if one.theme == "randomness" and one.told_by in broken]
    same = [one for one in own if one.told_by == own[0].told_by]
    return [Diagnosis(one, broken.count(one.told_by), broken.count(one.told_by)) for one in same]


DIAGNOSES["randomness"] = diagnose_dropout
