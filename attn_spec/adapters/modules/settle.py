"""What is found out about a module by running it: the layout of its input, the order of its projections' channels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attn_spec.adapters.implementation import described
from attn_spec.adapters.modules import between, bias, fused, gates, layouts, temperature, variants
from attn_spec.adapters.modules.inject import NotInjected
from attn_spec.adapters.modules.trials import BATCH, LENGTH, hidden_width, note, run_whole, runs
from attn_spec.adapters.modules.wanted import by_mask, half_rotation, mask_form, needs_context, resets, turned
from attn_spec.adapters.signature import TargetError
from attn_spec.law import Unsupported, Violation

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction


def settle(f: ModuleFunction) -> None:
    """Find out, in this order: what a call can't do without, the layout of the input, the order of the channels."""
    note(f, "module", _kind(f), "assumed", _how_built(f))
    own = f.forward.separate and "attn_mask" in f.forward.roles.values()  # and not a subclass with another forward
    f.multihead = isinstance(f.module, nn.MultiheadAttention) and own
    _check_multihead(f)
    f.by_mask = not f.multihead and by_mask(f)
    _channels_first(f)
    turned(f)
    half_rotation(f)
    mask_form(f)
    resets(f)
    needs_context(f)
    variants.keep_what_it_needs(f, runs)
    f.variants = variants.found(f)
    for role, word in f.variants.items():
        by = "the constructor" if f.constructor and f.constructor.named.get(role) == word else "its parameter"
        note(f, role, word, "assumed", f"judged with and without it, by {by}")
    _input(f)
    _check_whole(f)
    how = "declared" if f.declared.get("projections") else "assumed"
    note(f, "projections", "found" if f.projections.whole else "none", how, _about(f))
    if f.merged:
        note(f, "merged", ", ".join(f.merged), "measured", "more than one matrix: judged as the one they come to")
    if f.projections.whole:
        gates.settle(f)
        _orders(f)
        f.between = between.kind(f)
        if f.between:
            what = {"rotation": "each token's q and k are rotated by its position", "norm": "q and k are normalised"}
            what["norm over heads"] = "q and k are normalised over all heads at once"
            note(f, "between", f.between, "measured", f"{what[f.between]}: judged on q and k as they arrive")
        if f.between == "norm":
            temperature.settle(f)
    _context(f)
    if f.projections.whole and bias.is_own(f):
        word = bias.named_alibi(f)
        f.biased = "alibi" if word else "by position"
        why = f"weights under q = 0 go by distance{f', and its source says {word}' if word else ''}"
        note(f, "bias", f.biased, "measured", f"{why}: held fixed in the right answer")
    standing = variants.standing_softcap(f)
    if standing is not None:
        f.softcap = standing[0]
        note(f, "softcap", f"{f.softcap:g} in each call", "assumed", standing[1])


def _kind(f: ModuleFunction) -> str:
    return "instance" if f.instance is not None else "class" if isinstance(f.target, type) else "factory"


def _how_built(f: ModuleFunction) -> str:
    s = f.sizes
    grouped = f" on {s.kv_heads}" if s.kv_heads != s.heads else ""
    return f"first with {s.heads} heads{grouped} of {s.head_dim} channels"


def _check_multihead(f: ModuleFunction) -> None:
    """Raise TargetError where torch's nn.MultiheadAttention is built in a way that no check describes."""
    m = f.module
    if not isinstance(m, nn.MultiheadAttention):
        return
    added = "add_bias_kv" if m.bias_k is not None else "add_zero_attn" if m.add_zero_attn else ""
    if added:
        raise TargetError(
            f"{f.__name__}: it is built with {added}=True, so each row has a key more than it is given, and what a row "
            f"should give is not known: build it with {added}=False"
        )
    if m.kdim != m.vdim:
        raise TargetError(
            f"{f.__name__}: keys are made from {m.kdim} channels (kdim) and values from {m.vdim} (vdim): build it with "
            f"the same number for both, so that one context serves"
        )


def _check_whole(f: ModuleFunction) -> None:
    """Raise TargetError where some of the projections are found and others are not, by the names of the others.

    Where what is left can't be the others by its shape, keys or values are made in another way: then it is a black box.
    """
    missing = f.projections.missing
    if f.projections.of("q", "k", "v", "kv") and missing and f.declared.get("projections") != {}:
        if not f.declared.get("projections") and not _could_be(f, missing):
            left = ", ".join(name for name, p in f.module.named_parameters() if p.dim() > 1)
            f.become_black_box()
            why = f"of {left} none is as wide as the missing projections of {' and '.join(missing)}"
            note(f, "black box", "its projections are more than q, k and v", "measured", why)
            return
        lines = ", ".join(f"{role}: ..." for role in missing)
        names = ", ".join(name for name, p in f.module.named_parameters() if p.dim() > 1)
        raise TargetError(
            f"{f.__name__}: its projections are found in part: {f.projections}, and none for {', '.join(missing)}; its "
            f"parameters are {names}. Name the others in attn.yaml: `projections: {{{lines}}}`, or write "
            f"`projections: {{}}` to have it judged as a black box"
        )


def _could_be(f: ModuleFunction, missing: tuple[str, ...]) -> bool:
    """Whether parameters that have no known name are of the shapes of the projections that are missing."""
    known = {id(p.weight) for p in f.projections.found}
    left = [p for p in f.module.parameters() if id(p) not in known and p.dim() > 1]
    s, widths = f.sizes, f.widths(f.module, f.sizes)
    if "q" in missing and len(missing) < 3:  # keys and values have theirs
        return any(set(widths) & set(p.shape) for p in left)
    heads = {s.kv_heads, 1, 2, s.heads}
    one = {h * d for h in heads for d in (s.head_dim, s.v_dim)}
    fused = {2 * width for width in one} | {h * (s.head_dim + s.v_dim) for h in heads}

    def takes(p: Tensor, outs: set[int]) -> bool:
        sides = list(p.shape)
        given = [n for n in set(widths) if n in sides]
        return any(n in outs for g in given for n in [*sides[: sides.index(g)], *sides[sides.index(g) + 1 :]])

    alone = sum(takes(p, one) for p in left)
    return alone >= len(missing) or (len(missing) > 1 and any(takes(p, fused) for p in left))


def _about(f: ModuleFunction) -> str:
    if f.projections.whole:
        return str(f.projections)
    return "no parameter has a known name: judged as a black box; `projections:` in attn.yaml names them"


# what a call can't do without -----------------------------------------------------------------------------------------


# the layout of the input ---------------------------------------------------------------------------------------------


def _channels_first(f: ModuleFunction) -> None:
    """Find out whether a module whose projections are convolutions takes [B, C, S] or an image [B, C, H, W]."""
    weights = {id(p.weight) for p in f.projections.found}
    owners = [m for m in f.module.modules() if id(getattr(m, "weight", None)) in weights]
    kinds = {type(m) for m in owners}
    if f.declared.get("input") or not kinds & {nn.Conv1d, nn.Conv2d}:
        return
    x = torch.randn(BATCH, 6, hidden_width(f), generator=torch.Generator().manual_seed(2))
    for f.input in ("BCHW", "BCS") if nn.Conv2d in kinds else ("BCS", "BCHW"):
        try:
            run_whole(f, x)
        except Exception:  # of the user's own
            continue
        note(f, "input", f.input, "measured", "its projections are convolutions: channels come before tokens")
        return
    f.input = "BSD"


def _input(f: ModuleFunction) -> None:
    if f.declared.get("input"):
        note(f, "input", f.input, "declared", "attn.yaml")
        return
    if f.input in layouts.CHANNELS_FIRST:
        return
    own = getattr(f.module, "batch_first", None)
    inner = next((m.batch_first for m in f.module.modules() if hasattr(m, "batch_first")), None)
    named = inner if own is None else own
    mixed, error = (None, "") if named or own is not None else _axes_that_mix(f)
    if named is not None and (named or mixed != [1]):  # a module may swap the axes for the one inside
        f.input = "BSD" if named else "SBD"
        note(f, "input", f.input, "assumed", f"batch_first = {named}")
        return
    if mixed == [0]:
        f.input = "SBD"
    evidence = (
        "a batch of sequences"
        if mixed is None
        else f"a change at one place spreads along axis {mixed} of [{BATCH}, {LENGTH}]"
    )
    note(f, "input", f.input, "measured" if mixed in ([0], [1]) else "assumed", evidence)
    if mixed is None:
        f.input = "SD"
        try:
            run_whole(f, torch.randn(LENGTH, hidden_width(f)))
            f.unbatched = True
        except Exception:  # it takes neither: the laws say so
            pass
        f.input = "BSD"


def _axes_that_mix(f: ModuleFunction) -> tuple[list[int] | None, str]:
    """The axes along which a change of one hidden state reaches others; None where it would not run."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, hidden_width(f), generator=g)
    try:
        before = run_whole(f, x)
        changed = x.clone()
        changed[0, 0] += torch.randn(x.shape[-1], generator=g)
        moved = ((run_whole(f, changed) - before).abs() > 1e-6).flatten(2).any(-1)
    except Exception as error:
        return None, described(error)
    if tuple(moved.shape) != (BATCH, LENGTH):
        return [], ""
    return [axis for axis in (0, 1) if bool(moved.select(1 - axis, 0)[1:].any())], ""


# the order of the channels -------------------------------------------------------------------------------------------


def _orders(f: ModuleFunction) -> None:
    declared = f.declared.get("fused")
    if declared is not None:
        known = fused.QKV if any(p.role == "qkv" for p in f.projections.found) else fused.KV
        if declared not in known:
            raise TargetError(f"{f.__name__}: fused: {declared!r} is not one of {', '.join(known)}")
        f.orders = replace(f.orders, **{"qkv" if len(known) == len(fused.QKV) else "kv": declared})
        note(f, "channels", declared, "declared", "attn.yaml")
        return
    candidates = list(f.orders.candidates(f.projections))
    for orders in candidates:
        f.orders = orders
        if _fits(f):
            break
    else:
        f.orders = candidates[0]
        return
    if len(candidates) > 2 or f.orders.heads != "hd":
        shown = {"qkv": f.orders.qkv, "kv": f.orders.kv}
        parts = [shown[p.role] for p in f.projections.found if p.role in shown][:1]
        parts += ["heads one channel after the other"] if f.orders.heads == "dh" else []
        note(f, "channels", ", ".join(parts), "measured", "where changes of q and v arrive")


def _fits(f: ModuleFunction) -> bool:
    """Whether v arrives in its own channels where all values are alike, and q changes its own row and head only.

    It holds whatever the scale, and whatever is wrong between q.k and the weights but their sum.
    """
    s, g = f.sizes, torch.Generator().manual_seed(3)
    length = 6
    q = torch.randn(2, s.heads, length, s.head_dim, generator=g)
    k = torch.randn(2, s.kv_heads, length, s.head_dim, generator=g)
    v = torch.randn(1, s.kv_heads, 1, s.v_dim, generator=g).expand(2, -1, length, -1).contiguous()
    try:
        with torch.no_grad():
            flat_v = f.core(q, k, v, {})[0]
            group = s.heads // s.kv_heads
            if flat_v.shape != (2, s.heads, length, s.v_dim):
                return False
            alike = [v.repeat_interleave(group, 1), v.repeat(1, group, 1, 1)]
            if not any(bool(((flat_v - x).abs() < 1e-3).all()) for x in alike):
                return False
            v = torch.randn(2, s.kv_heads, length, s.v_dim, generator=g)
            before = f.core(q, k, v, {})[0]
            changed = q.clone()
            changed[0, 0, -1] += torch.randn(s.head_dim, generator=g)  # no shift alone, which a LayerNorm takes off
            moved = ((f.core(changed, k, v, {})[0] - before).abs() > 1e-6).any(-1)
    except (Unsupported, NotInjected, Violation, TargetError):
        return False
    except Exception:  # the user's own: the laws report it
        return False
    expected = torch.zeros_like(moved)
    expected[0, 0, -1] = True
    return bool((moved == expected).all())


def _context(f: ModuleFunction) -> None:
    if not f.forward.context or f.forward.context_required:
        return
    s = replace(f.sizes, cross="kv_hidden" in f.roles) if f.instance is None else f.sizes
    try:
        module = f.built(s, torch.float32)
    except TargetError:
        module = f.module
    width, kv_width = f.widths(module, s)
    error = ""
    for length in (LENGTH + 2, LENGTH):  # of another length, or at least of the same
        inputs = {
            f.forward.inputs[0]: torch.randn(BATCH, LENGTH, width),
            f.forward.context: torch.randn(BATCH, length, kv_width),
        }
        inputs = {name: layouts.laid(x, f.input) for name, x in inputs.items() if f.input != "SD"} or inputs
        try:
            with torch.no_grad():
                before = f.tensors(f._call(module, s, inputs, {}, inputs[f.forward.inputs[0]]))[0]
                inputs[f.forward.context] = inputs[f.forward.context] + 1.0
                after = f.tensors(f._call(module, s, inputs, {}, inputs[f.forward.inputs[0]]))[0]
            if not f.by_mask or not torch.equal(before, after):
                return
            error = "it changes nothing: the module was not built for cross-attention"
            break
        except Exception as raised:
            error = described(raised)
    f.forward = replace(f.forward, context="")
    note(f, "context", "not taken", "measured", error[:80])
