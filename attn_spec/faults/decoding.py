"""Faults of decoding: where a new token stands, where its keys are put and read, what it sees, how parts are merged.

Each is one changed block of `attn_spec.decoding_blocks`; `attn_spec.faults.decoding_diagnosis` tells them apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attn_spec.decoding_blocks import BLOCKS, FAR, Cache
from attn_spec.faults.behaviour import catalogue

fault = catalogue("decoding", BLOCKS)


# what a query sees ---------------------------------------------------------------------------------------------------


@fault(
    "visible",
    "the triangle stands at the top left of the cache: one query sees its first key alone",
    sources=("lucidrains/x-transformers#187",),
    advice="Count a query's position from the start of the cache: key j is seen if j <= len(cache) + i.",
)
def decoding_causal_top_left(at: Tensor, filled: Tensor, slots: int, causal: bool) -> Tensor:
    j = torch.arange(slots)
    seen = j < filled[:, None, None]
    return seen & (j <= torch.arange(at.shape[1])[:, None]) if causal else seen.expand(*at.shape, slots)


@fault(
    "visible",
    "slots of the cache that are not filled yet are seen",
    sources=("huggingface/transformers#30414", "huggingface/transformers#45940"),
    advice="Hide the slots from the filled length on.",
)
def unfilled_slots_seen(at: Tensor, filled: Tensor, slots: int, causal: bool) -> Tensor:
    j = torch.arange(slots)
    everything = torch.ones(*at.shape, slots, dtype=torch.bool)
    return j <= at[..., None] if causal and at.shape[1] > 1 else everything


@fault(
    "visible",
    "the filled length of one sample is taken for all: the shortest one's",
    sources=("tenstorrent/tt-xla#4190",),
    advice="Hide by the filled length of each sample.",
)
def shortest_length_for_all(at: Tensor, filled: Tensor, slots: int, causal: bool) -> Tensor:
    j = torch.arange(slots)
    seen = j < filled.amin()
    return seen & (j <= at[..., None]) if causal else seen.expand(*at.shape, slots)


@fault(
    "visible",
    "what was in the cache before the call is not seen",
    sources=("Wenyueh/MinivLLM#98",),
    advice="Attend to the keys in the cache too, not only to those of the call.",
)
def cached_keys_unseen(at: Tensor, filled: Tensor, slots: int, causal: bool) -> Tensor:
    j = torch.arange(slots)
    seen = (j < filled[:, None, None]) & (j >= filled[:, None, None] - at.shape[1])
    return seen & (j <= at[..., None]) if causal else seen.expand(*at.shape, slots)


@fault(
    "near",
    "the window is ignored at one query",
    sources=("karpathy/nanochat#456", "rajveer43/VeloxQuant-MLX#463"),
    advice="Apply the window at one query as well: it needs no triangle, but it needs the window.",
)
def window_ignored_at_one_query(at: Tensor, slots: int, left: int | None, right: int | None) -> Tensor:
    gap = at[..., None] - torch.arange(slots)
    seen = (gap <= (FAR if left is None else left)) & (-gap <= (FAR if right is None else right))
    return seen | (at.shape[1] == 1)


@fault(
    "near",
    "the window is counted from the start of the chunk and not of the sequence",
    sources=("trymirai/lalamo#200",),
    advice="Count positions from the start of the cache.",
)
def window_from_chunk(at: Tensor, slots: int, left: int | None, right: int | None) -> Tensor:
    gap = torch.arange(at.shape[1])[:, None] - torch.arange(slots)
    near = (gap <= (FAR if left is None else left)) & (-gap <= (FAR if right is None else right))
    return near.expand(*at.shape, slots)


@fault(
    "near",
    "the window holds one key more when there is one query",
    sources=("ml-explore/mlx-lm#390",),
    advice="Let prefill and decoding see the same keys: those of p - left to p.",
)
def window_wider_at_one_query(at: Tensor, slots: int, left: int | None, right: int | None) -> Tensor:
    gap = at[..., None] - torch.arange(slots)
    left = left if left is None or at.shape[1] > 1 else left + 1
    return (gap <= (FAR if left is None else left)) & (-gap <= (FAR if right is None else right))


@fault(
    "heed",
    "the mask is heeded at the first call alone",
    sources=("OpenNMT/OpenNMT-py#2532",),
    advice="Give the mask of all keys in the cache to every call.",
)
def mask_at_first_call_only(mask: Tensor | None, begun: bool) -> Tensor | None:
    return None if begun else mask


# where a token stands ------------------------------------------------------------------------------------------------


@fault(
    "turned_by",
    "new tokens are rotated as if they stood at the start of the sequence",
    sources=("pytorch/executorch#2010",),
    advice="Take the rows of the rotation from len(cache) on.",
)
def rotation_from_zero(at: Tensor) -> Tensor:
    return torch.arange(at.shape[1]).expand_as(at)


@fault(
    "distance",
    "distances of ALiBi are from the start of the chunk and not from the query's position",
    sources=("lucidrains/x-transformers#103",),
    advice="Count a query's position from the start of the cache: len(cache) + i.",
)
def alibi_from_chunk(at: Tensor, slots: int) -> Tensor:
    return (torch.arange(at.shape[1])[:, None] - torch.arange(slots)).abs().expand(*at.shape, slots)


@fault(
    "positions",
    "new tokens stand one position too late",
    sources=("huggingface/transformers#30312",),
    advice="The first new token stands at len(cache).",
)
def positions_one_late(filled: Tensor, new: int) -> Tensor:
    return filled[:, None] + torch.arange(new) + (filled > 0).long()[:, None]


@fault(
    "positions",
    "the position of one sample is taken for all: the longest one's",
    sources=("scouzi1966/maclocal-api#92",),
    advice="Let each sample go on from its own length.",
)
def longest_position_for_all(filled: Tensor, new: int) -> Tensor:
    return (filled.amax() + torch.arange(new)).expand(len(filled), new)


# where keys and values are put and read ------------------------------------------------------------------------------


@fault(
    "slot",
    "pages are read and written in the order of memory, the block table is ignored",
    sources=("tanishqkumar/ssd#23", "golang-design/accel#10"),
    advice="Look the page of a position up in the block table.",
)
def block_table_ignored(cache: Cache, at: Tensor) -> tuple[Tensor, Tensor]:
    size = cache.k.shape[1]
    if cache.table is not None:
        return torch.arange(len(at))[:, None] * cache.table.shape[1] + at // size, at % size
    rows = torch.arange(len(at)) if cache.rows is None else cache.rows
    return rows[:, None].expand_as(at), at


@fault(
    "slot",
    "pages are taken for half as long as they are",
    sources=("vllm-project/vllm-gaudi#1323",),
    advice="Use one page size for writing and for reading.",
)
def page_size_of_another(cache: Cache, at: Tensor) -> tuple[Tensor, Tensor]:
    size = cache.k.shape[1]
    if cache.table is not None:
        half = max(1, size // 2)
        return cache.table.gather(1, (at // half) % cache.table.shape[1]), at % half
    rows = torch.arange(len(at)) if cache.rows is None else cache.rows
    return rows[:, None].expand_as(at), at


@fault(
    "slot",
    "the index that says which row of the cache a sample has is ignored",
    sources=("vllm-project/flash-attention#176",),
    advice="Take row cache_batch_idx[b] for sample b.",
)
def batch_index_ignored(cache: Cache, at: Tensor) -> tuple[Tensor, Tensor]:
    size = cache.k.shape[1]
    if cache.table is not None:
        return cache.table.gather(1, at // size), at % size
    return torch.arange(len(at))[:, None].expand_as(at), at


@fault(
    "read",
    "keys and values of the first sample are read for all",
    sources=("vllm-project/flash-attention#176",),
    advice="Multiply the index of the sample by the stride of the cache's rows.",
)
def cache_of_first_sample(store: Tensor, row: Tensor, place: Tensor) -> Tensor:
    return store[row[:1].expand_as(row), place[:1].expand_as(place)].transpose(1, 2)


@fault(
    "write",
    "each chunk is written where the first one was",
    sources=("tenstorrent/tt-metal#55630",),
    advice="Write from len(cache) on.",
)
def chunk_on_first_slots(store: Tensor, new: Tensor, row: Tensor, place: Tensor) -> None:
    first = place - place[:, :1]
    store[row[:, :1].expand_as(row), first] = new.transpose(1, 2)


@fault(
    "write",
    "the last slot is overwritten by every new token",
    sources=("huggingface/transformers#37574",),
    advice="Append new keys; where the cache is full, shift or refuse.",
)
def last_slot_overwritten(store: Tensor, new: Tensor, row: Tensor, place: Tensor) -> None:
    place = (place - 1).clamp(min=0) if place.shape[1] == 1 else place
    store[row, place] = new.transpose(1, 2)


@fault(
    "write",
    "new keys and values are written over their neighbours too",
    sources=("Dao-AILab/flash-attention#638",),
    advice="Guard every store by the number of new tokens and by the end of the cache.",
)
def neighbours_overwritten(store: Tensor, new: Tensor, row: Tensor, place: Tensor) -> None:
    flat = (row * store.shape[1] + place + 1).flatten().clamp(max=store.shape[0] * store.shape[1] - 1)
    store.view(-1, *store.shape[2:])[flat] = new.transpose(1, 2).flatten(0, 1)
    store[row, place] = new.transpose(1, 2)


@fault(
    "forget",
    "the cache is not emptied between two sequences",
    sources=("huggingface/transformers#30312",),
    advice="Set the filled length to 0 at a reset.",
)
def cache_not_reset(cache: Cache) -> None:
    cache.begun = False


# parts and their merging ---------------------------------------------------------------------------------------------


@fault(
    "part",
    "a part in which no key is seen gives NaN, and poisons the row",
    sources=("ROCm/aiter#4420", "tile-ai/tilelang#328"),
    advice="Let a part without a visible key give 0 and a log-sum-exp of -inf.",
)
def empty_part_nan(s: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return torch.softmax(s, dim=-1) @ v, torch.logsumexp(s, dim=-1)


@fault(
    "merge",
    "parts are merged by natural log-sum-exps with powers of two",
    sources=("sgl-project/sglang#40903", "vllm-project/vllm#28840"),
    advice="Merge with the base that the log-sum-exp has.",
)
def merge_to_base_two(outs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    shares = torch.exp2(sums - sums.amax(0).clamp(min=torch.finfo(sums.dtype).min))
    lse = torch.logsumexp(sums, dim=0)
    return (shares[..., None] * outs).sum(0) / shares.sum(0).clamp(min=1.0)[..., None], lse


@fault(
    "merge",
    "parts are averaged, whatever their log-sum-exps are",
    sources=("flashinfer-ai/flashinfer#50",),
    advice="Weigh each part by exp(lse_n - lse).",
)
def parts_averaged(outs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    full = (sums > -torch.inf).to(outs.dtype)
    return (full[..., None] * outs).sum(0) / full.sum(0).clamp(min=1.0)[..., None], torch.logsumexp(sums, dim=0)


@fault(
    "merge",
    "merged parts are not divided by the sum of their shares",
    sources=("pytorch/pytorch#174861",),
    advice="Take the shares from the log-sum-exp of all parts, not from the largest.",
)
def merge_not_normalised(outs: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    shares = torch.exp(sums - sums.amax(0).clamp(min=torch.finfo(sums.dtype).min))
    return (shares[..., None] * outs).sum(0), torch.logsumexp(sums, dim=0)
