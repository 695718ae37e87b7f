"""Metamorphic laws: two ways to ask for the same thing, or for what follows from it, answer alike on any problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from attn_spec.adapters.implementation import Implementation
from attn_spec.invariants.comparison import answer, answer_to, arguments_for, needs_plain, output, require_within, same
from attn_spec.invariants.masking import smoothing_error
from attn_spec.law import Refused, Unsupported, law
from attn_spec.masks import Causal, Delivery, Form
from attn_spec.problem import Arguments, Problem
from attn_spec.tolerance import worst


def _keys(arguments: Arguments, keys: slice) -> Arguments:
    """The arguments with some of the keys only, and the mask of those."""
    mask = arguments.mask
    if mask is not None and mask.shape[-1] == arguments.k.shape[2]:
        mask = mask[..., keys].contiguous()
    k, v = (x[:, :, keys].contiguous() for x in (arguments.k, arguments.v))
    return arguments.replace(k=k, v=v, mask=mask)


@law("ATN212", "keys-split", "Attention over some of the keys and over the others merge to attention over all")
def keys_split(implementation: Implementation, problem: Problem) -> None:
    """out = a out_1 + (1 - a) out_2, a the weight of the first keys: the output for V = 1 at these and 0 at the others

    Why: split keys, merged by their log-sum-exp, are how long sequences are decoded and how blocks are put together.
    Example: a running maximum that is not rescaled, so that a later block counts for more or for less.
    """
    needs_plain(implementation)
    if problem.causal_by_flag:
        raise Unsupported("always causal, so keys can't be split")
    if problem.kv_len < 2:
        raise Unsupported("no two keys to split")
    n = problem.kv_len // 2 + 1 if problem.kv_len > 2 else 1
    whole = arguments_for(implementation, problem)
    first, second = _keys(whole, slice(0, n)), _keys(whole, slice(n, None))
    indicator = torch.zeros_like(whole.v)
    indicator[:, :, :n] = 1
    share = whole.replace(v=indicator)
    exact, exact_1, exact_2, exact_share = (answer(implementation, a) for a in (whole, first, second, share))
    got = output(implementation, whole)
    a = output(implementation, share)[..., :1].double()
    # a half in which a row sees nothing counts for nothing, whatever it gives for such a row
    sees_1, sees_2 = (exact_.lse[..., None] > -torch.inf for exact_ in (exact_1, exact_2))
    out_1 = torch.where(sees_1, output(implementation, first).double(), 0.0)
    out_2 = torch.where(sees_2, output(implementation, second).double(), 0.0)
    merged = torch.where(sees_1 | sees_2, a * out_1 + (1 - a) * out_2, got.double())
    bound_1, bound_2 = torch.where(sees_1, exact_1.bounds.output, 0.0), torch.where(sees_2, exact_2.bounds.output, 0.0)
    bound = exact.bounds.output + a.abs() * bound_1 + (1 - a).abs() * bound_2
    bound = bound + exact_share.bounds.output[..., :1] * (exact_1.output.abs() + exact_2.output.abs()).nan_to_num()
    because = f"merged from the first {n} keys and the other {problem.kv_len - n}, the output is another"
    require_within(worst(got, merged, bound), "output", because=because)


@law("ATN520", "hidden-keys-appended", "More keys that are hidden change nothing")
def hidden_keys_appended(implementation: Implementation, problem: Problem) -> None:
    """f(q, [k, k'], [v, v'], [mask, hidden]) = f(q, k, v, mask), for one key more and for enough to fill a tile

    Why: sequences are padded to a common length, and a batch must not change what they give.
    Example: a mean over Sk keys where fewer are seen; the last tile without its mask.
    """
    one = arguments_for(implementation, problem)
    if one.causal:
        raise Unsupported("always causal, so keys can't be appended")
    if not problem.kv_len:
        raise Unsupported("no key to append to")
    got, bound = output(implementation, one), answer_to(implementation, problem).bounds.output
    seen = answer_to(implementation, problem).lse[..., None] > -torch.inf  # the mean of more values is another
    for more in (1, -problem.kv_len % 64 or 64):
        k, v = (torch.cat([x, 2 * x.flip(2)[:, :, :1].expand(-1, -1, more, -1)], dim=2) for x in (one.k, one.v))
        two = one.replace(k=k, v=v, **_longer_mask(one, more))
        honest = bound + smoothing_error(implementation, one, float(k.abs().amax()) if k.numel() else 0.0)
        longer = torch.where(seen, output(implementation, two).double(), got.double())
        require_within(same(got, longer, honest), "output", because=f"with {more} hidden keys appended")


def _longer_mask(arguments: Arguments, more: int) -> dict[str, Tensor | Form | None]:
    """The mask with `more` hidden keys at the end; a mask where there was none."""
    mask, form = arguments.mask, arguments.form
    b, h, q_len, kv_len = arguments.sizes
    if mask is None:
        mask, form = torch.ones(b, h, q_len, kv_len, dtype=torch.bool, device=arguments.k.device), "bool"
    mask = mask.expand(*mask.shape[:-1], kv_len)
    hidden: float | bool = False if mask.dtype == torch.bool else -torch.inf
    return {"mask": torch.cat([mask, mask.new_full((*mask.shape[:-1], more), hidden)], dim=-1), "form": form}


@law("ATN521", "mask-ways-agree", "However a mask is handed over, the output is the same")
def mask_ways_agree(implementation: Implementation, problem: Problem) -> None:
    """bool = additive = key padding = expanded to [B, H, Sq, Sk] = strided; causal by the flag = causal in the mask

    Why: each way in takes its own path through the code, and one of them is wrong.
    Example: a bool mask added as 0 and 1; a flag that an additive mask replaces.
    """
    if not problem.mask:
        raise Unsupported("no mask to hand over in another way")
    got, bound = output(implementation, arguments_for(implementation, problem)), None
    compared = 0
    for other in _ways(problem):
        try:
            also = output(implementation, arguments_for(implementation, other))
        except (Refused, Unsupported):
            continue
        compared += 1
        bound = answer_to(implementation, problem).bounds.output if bound is None else bound
        because = f"the same mask as {_said(other)} instead of {_said(problem)} gives another output"
        require_within(same(got, also, bound), "output", because=because)
    if not compared:
        raise Unsupported("no other way to hand over a mask")


def _said(problem: Problem) -> str:
    by_flag = " with the causal flag" if problem.causal_by_flag else ""
    return f"{problem.delivery if problem.masked else 'nothing'}{by_flag}"


def _ways(problem: Problem) -> Iterator[Problem]:
    """The same problem with its mask delivered in other ways, those that can't hold it left out."""
    how = problem.delivery
    tried = [
        Delivery("bool", flag=how.flag),
        Delivery("additive", flag=how.flag),
        Delivery("key-padding", flag=how.flag),
        Delivery("bool", "BHQK", flag=how.flag),
        Delivery("bool", "BHQK", flag=how.flag, strided=True),
        dataclasses.replace(how, shape="BHQK", strided=False),
        Delivery("bool", flag=not how.flag),
        Delivery("additive", flag=not how.flag),
    ]
    others = tuple(part for part in problem.mask if not isinstance(part, Causal))
    aligned = problem.causal is not None and problem.causal.alignment is not None
    # what is random in a mask is drawn by its place in the tensor: the causal part, last there, moves no other
    last = how.flag or isinstance(problem.mask[-1], Causal)
    for delivery in tried:
        if delivery == how or (delivery.flag != how.flag and (problem.causal is None or aligned or not last)):
            continue
        mask = problem.mask if delivery.flag == how.flag or problem.causal is None else (*others, problem.causal)
        try:
            yield problem.replace(mask=mask, delivery=delivery)
        except ValueError:  # it can't be handed over so
            continue
