"""What a call of a module can't do without, found by trial: a context, rotations, a mask of some form, a reset."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attn_spec.adapters.modules import sessions
from attn_spec.adapters.modules.trials import BATCH, LENGTH, hidden_states, note, run_whole, runs

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction


def by_mask(f: ModuleFunction) -> bool:
    """Whether causality goes in by the mask, as in transformers: its modules leave it to their caller."""
    if "mask" not in f.forward.roles or "causal" in f.forward.roles:
        return False
    return any(owner.__module__.startswith("transformers.") for owner in type(f.module).__mro__)


def turned(f: ModuleFunction) -> None:
    """Find out for which share of a head's channels the module wants its rotations; all where it runs on none.

    Where it runs on none, but without what may be left out, that is no rotation.
    """
    given = f.forward
    if not given.rotations and not {"cos", "sin"} & set(given.required):
        return
    x = hidden_states(f)
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
            note(f, "rotation", f"{share:g} of a head", "measured", "with rotations of more channels it raises")
        return
    f.forward = given


def mask_form(f: ModuleFunction) -> None:
    """Find out whether a module of transformers wants its mask bool, and what True means: what hides the last key."""
    kernel = getattr(getattr(f.module, "config", None), "_attn_implementation", "")
    if not f.by_mask or "flex" in str(kernel):  # which takes a BlockMask alone, and reads what it likes for another
        return
    x = hidden_states(f)
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
                note(f, "mask", f"bool, True = {form}", "measured", "what hides the last key")
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


def resets(f: ModuleFunction) -> None:
    """Find out whether every call goes on from the one before, until a method of its own empties the module."""
    name = sessions.reset_of(f)
    if not name or sessions.has_switch(f):
        return
    module = f.built(f.sizes, torch.float32)
    x = hidden_states(f)
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
        note(f, "state", f"{name}()", "measured", "a second call goes on from the first: called before each")
    f.forget()


def half_rotation(f: ModuleFunction) -> None:
    """Find out whether rotations are to hold one number for each pair of channels, where it does not run otherwise."""
    if not f.forward.rotations or runs(f):
        return
    given = f.forward
    f.forward = replace(given, half=True)
    if runs(f):
        note(f, "rotation", "by pairs", "measured", "cos and sin of half the channels; with all of them it raises")
    else:
        f.forward = given


def needs_context(f: ModuleFunction) -> None:
    """Find out whether a call without a context, whose default is None, raises where one with it does not."""
    if not f.forward.context or f.forward.context_required:
        return
    x = hidden_states(f)
    given = f.forward
    for required in (False, True):
        f.forward = replace(given, context_required=required)
        try:
            run_whole(f, x)
        except Exception:  # of the user's own
            continue
        if required:
            note(f, "context", "required", "measured", f"without {given.context} it raises")
        return
    f.forward = given
