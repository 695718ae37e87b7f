"""What is found out about a module by running it: the layout of its input, the order of its projections' channels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.implementation import described
from attn_spec.adapters.modules import between, bias, fused, gates, layouts, sessions, temperature, variants
from attn_spec.adapters.modules.inject import NotInjected
from attn_spec.adapters.signature import TargetError
from attn_spec.conventions import Finding
from attn_spec.law import Unsupported, Violation

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

BATCH, LENGTH = 3, 5


def settle(f: ModuleFunction) -> None:
    """Find out, in this order: what a call can't do without, the layout of the input, the order of the channels."""
    _note(f, "module", _kind(f), "assumed", _how_built(f))
    own = f.forward.separate and "attn_mask" in f.forward.roles.values()  # and not a subclass with another forward
    f.multihead = isinstance(f.module, nn.MultiheadAttention) and own
    _check_multihead(f)
    f.by_mask = not f.multihead and _by_mask(f)
    _channels_first(f)
    _turned(f)
    _half_rotation(f)
    _mask_form(f)
    _resets(f)
    _needs_context(f)
    variants.keep_what_it_needs(f, _runs)
    f.variants = variants.found(f)
    for role, word in f.variants.items():
        by = "the constructor" if f.constructor and f.constructor.named.get(role) == word else "its parameter"
        _note(f, role, word, "assumed", f"judged with and without it, by {by}")
    _input(f)
    _check_whole(f)
    how = "declared" if f.declared.get("projections") else "assumed"
    _note(f, "projections", "found" if f.projections.whole else "none", how, _about(f))
    if f.merged:
        _note(f, "merged", ", ".join(f.merged), "measured", "more than one matrix: judged as the one they come to")
    if f.projections.whole:
        gates.settle(f)
        _orders(f)
        f.between = between.kind(f)
        if f.between:
            what = {"rotation": "each token's q and k are rotated by its position", "norm": "q and k are normalised"}
            what["norm over heads"] = "q and k are normalised over all heads at once"
            _note(f, "between", f.between, "measured", f"{what[f.between]}: judged on q and k as they arrive")
        if f.between == "norm":
            temperature.settle(f)
    _context(f)
    if f.projections.whole and bias.is_own(f):
        word = bias.named_alibi(f)
        f.biased = "alibi" if word else "by position"
        why = f"weights under q = 0 go by distance{f', and its source says {word}' if word else ''}"
        _note(f, "bias", f.biased, "measured", f"{why}: held fixed in the right answer")
    standing = variants.standing_softcap(f)
    if standing is not None:
        f.softcap = standing[0]
        _note(f, "softcap", f"{f.softcap:g} in each call", "assumed", standing[1])


def _note(f: ModuleFunction, name: str, value: str, how: Any, evidence: str) -> None:
    f.facts.append((name, Finding(value, how, evidence)))


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
            _note(f, "black box", "its projections are more than q, k and v", "measured", why)
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


def _by_mask(f: ModuleFunction) -> bool:
    """Whether causality goes in by the mask, as in transformers: its modules leave it to their caller."""
    if "mask" not in f.forward.roles or "causal" in f.forward.roles:
        return False
    return any(owner.__module__.startswith("transformers.") for owner in type(f.module).__mro__)


# what a call can't do without -----------------------------------------------------------------------------------------


def _turned(f: ModuleFunction) -> None:
    """Find out for which share of a head's channels the module wants its rotations; all where it runs on none.

    Where it runs on none, but without what may be left out, that is no rotation.
    """
    given = f.forward
    if not given.rotations and not {"cos", "sin"} & set(given.required):
        return
    x = torch.randn(BATCH, LENGTH, _width(f), generator=torch.Generator().manual_seed(2))
    needed = tuple(name for name in given.rotations if name in given.required)
    without = replace(given, rotations=needed, left=(*given.left, *(set(given.rotations) - set(needed))))
    shares = (1.0, 0.5, 0.25, 0.75)
    ways = [*((n, replace(given, turned=n)) for n in shares), (1.0, replace(given, complex=True)), (1.0, without)]
    for share, f.forward in ways:
        try:
            run_whole(f, x)
        except Exception:  # of the user's own
            continue
        if share != 1.0:
            _note(f, "rotation", f"{share:g} of a head", "measured", "with rotations of more channels it raises")
        return
    f.forward = given


def _mask_form(f: ModuleFunction) -> None:
    """Find out whether a module of transformers wants its mask bool, and what True means: what hides the last key."""
    if not f.by_mask:
        return
    x = torch.randn(BATCH, LENGTH, _width(f), generator=torch.Generator().manual_seed(2))
    changed = x.clone()
    changed[:, -1] += 1.0
    whole = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    last = whole.clone()
    last[..., -1] = False
    name = f.forward.roles["mask"]
    for form in ("", "hidden", "seen"):
        f.bool_mask = form
        try:
            seen, hidden = ([run_whole(f, y, {name: m})[:, 0] for y in (x, changed)] for m in (whole, last))
        except Exception:  # of the user's own
            continue
        if torch.equal(*hidden) and not torch.equal(*seen):
            if form:
                _note(f, "mask", f"bool, True = {form}", "measured", "what hides the last key")
            return
    f.bool_mask = ""
    runs = []
    for f.by_mask in (True, False):
        try:
            run_whole(f, x)
            runs.append(f.by_mask)
        except Exception:  # of the user's own
            continue
    f.by_mask = runs != [False]  # one that takes no mask of q by k is called without


def _resets(f: ModuleFunction) -> None:
    """Find out whether every call goes on from the one before, until a method of its own empties the module."""
    name = sessions.reset_of(f)
    if not name or sessions.has_switch(f):
        return
    module = f.built(f.sizes, torch.float32)
    x = torch.randn(BATCH, LENGTH, _width(f), generator=torch.Generator().manual_seed(2))
    try:
        outs = []
        for emptied in (True, False, True):
            if emptied:
                getattr(module, name)()
            outs.append(run_whole(f, x))
    except Exception:  # a module that runs on none of these: others find out why
        f.forget()
        return
    if torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1]):
        f.resets = name
        _note(f, "state", f"{name}()", "measured", "a second call goes on from the first: called before each")
    f.forget()


def _half_rotation(f: ModuleFunction) -> None:
    """Find out whether rotations are to hold one number for each pair of channels, where it does not run otherwise."""
    if not f.forward.rotations or _runs(f):
        return
    given = f.forward
    f.forward = replace(given, half=True)
    if _runs(f):
        _note(f, "rotation", "by pairs", "measured", "cos and sin of half the channels; with all of them it raises")
    else:
        f.forward = given


def _runs(f: ModuleFunction) -> bool:
    try:
        run_whole(f, torch.randn(BATCH, LENGTH, _width(f), generator=torch.Generator().manual_seed(2)))
    except Exception:  # of the user's own
        return False
    return True


def _needs_context(f: ModuleFunction) -> None:
    """Find out whether a call without a context, whose default is None, raises where one with it does not."""
    if not f.forward.context or f.forward.context_required:
        return
    x = torch.randn(BATCH, LENGTH, _width(f), generator=torch.Generator().manual_seed(2))
    given = f.forward
    for required in (False, True):
        f.forward = replace(given, context_required=required)
        try:
            run_whole(f, x)
        except Exception:  # of the user's own
            continue
        if required:
            _note(f, "context", "required", "measured", f"without {given.context} it raises")
        return
    f.forward = given


# the layout of the input ---------------------------------------------------------------------------------------------


def _channels_first(f: ModuleFunction) -> None:
    """Find out whether a module whose projections are convolutions takes [B, C, S] or an image [B, C, H, W]."""
    weights = {id(p.weight) for p in f.projections.found}
    owners = [m for m in f.module.modules() if id(getattr(m, "weight", None)) in weights]
    kinds = {type(m) for m in owners}
    if f.declared.get("input") or not kinds & {nn.Conv1d, nn.Conv2d}:
        return
    x = torch.randn(BATCH, 6, _width(f), generator=torch.Generator().manual_seed(2))
    for f.input in ("BCHW", "BCS") if nn.Conv2d in kinds else ("BCS", "BCHW"):
        try:
            run_whole(f, x)
        except Exception:  # of the user's own
            continue
        _note(f, "input", f.input, "measured", "its projections are convolutions: channels come before tokens")
        return
    f.input = "BSD"


def _input(f: ModuleFunction) -> None:
    if f.declared.get("input"):
        _note(f, "input", f.input, "declared", "attn.yaml")
        return
    if f.input in layouts.CHANNELS_FIRST:
        return
    own = getattr(f.module, "batch_first", None)
    inner = next((m.batch_first for m in f.module.modules() if hasattr(m, "batch_first")), None)
    named = inner if own is None else own
    mixed, error = (None, "") if named or own is not None else _axes_that_mix(f)
    if named is not None and (named or mixed != [1]):  # a module may swap the axes for the one inside
        f.input = "BSD" if named else "SBD"
        _note(f, "input", f.input, "assumed", f"batch_first = {named}")
        return
    if mixed == [0]:
        f.input = "SBD"
    evidence = (
        "a batch of sequences"
        if mixed is None
        else f"a change at one place spreads along axis {mixed} of [{BATCH}, {LENGTH}]"
    )
    _note(f, "input", f.input, "measured" if mixed in ([0], [1]) else "assumed", evidence)
    if mixed is None:
        f.input = "SD"
        try:
            run_whole(f, torch.randn(LENGTH, _width(f)))
            f.unbatched = True
        except Exception:  # it takes neither: the laws say so
            pass
        f.input = "BSD"


def _width(f: ModuleFunction) -> int:
    return f.widths(f.module, f.sizes)[0]


def _axes_that_mix(f: ModuleFunction) -> tuple[list[int] | None, str]:
    """The axes along which a change of one hidden state reaches others; None where it would not run."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, LENGTH, _width(f), generator=g)
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


def run_whole(f: ModuleFunction, x: Tensor, named: dict[str, Any] | None = None) -> Tensor:
    """One run of the first module on hidden states as they are, no gradient, in eval mode; named: what is asked for."""
    module = f.built(f.sizes, torch.float32)
    channels_first = f.input in layouts.CHANNELS_FIRST
    inputs: dict[str, Tensor] = dict.fromkeys(f.forward.inputs, x)
    if f.forward.context_required:
        inputs[f.forward.context] = torch.randn(*x.shape[:-1], f.widths(module, f.sizes)[1])
    if f.forward.separate:
        width = f.widths(module, f.sizes)[1]
        y = x if width == x.shape[-1] else torch.randn(*x.shape[:-1], width, generator=torch.Generator().manual_seed(1))
        inputs = dict(zip(f.forward.inputs, (x, y, y), strict=True))
    inputs = {name: layouts.laid(y, f.input) if channels_first else y for name, y in inputs.items()}
    with torch.no_grad():
        tensors = f.tensors(f._call(module, f.sizes, inputs, dict(named or {}), x))
    return layouts.unlaid(tensors[0], f.input) if channels_first else tensors[0]


# the order of the channels -------------------------------------------------------------------------------------------


def _orders(f: ModuleFunction) -> None:
    declared = f.declared.get("fused")
    if declared is not None:
        known = fused.QKV if any(p.role == "qkv" for p in f.projections.found) else fused.KV
        if declared not in known:
            raise TargetError(f"{f.__name__}: fused: {declared!r} is not one of {', '.join(known)}")
        f.orders = replace(f.orders, **{"qkv" if len(known) == len(fused.QKV) else "kv": declared})
        _note(f, "channels", declared, "declared", "attn.yaml")
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
        _note(f, "channels", ", ".join(parts), "measured", "where changes of q and v arrive")


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
    _note(f, "context", "not taken", "measured", error[:80])
