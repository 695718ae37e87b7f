"""Which masks a module takes, and whether it returns weights: told by calls on sizes of which no two are alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from attn_spec import masks
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.adapter import SHAPES, ModuleAdapter
from attn_spec.adapters.modules.expected import source_of
from attn_spec.adapters.modules.padding import PADDED, settle_padding
from attn_spec.conventions import Finding
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.masks import Delivery, KeyPadding, Visible
from attn_spec.problem import Problem

SIZED = Problem(batch=5, heads=4, kv_heads=4, q_len=3, kv_len=3, head_dim=8, v_dim=8, values="mild")


def settle_weights(implementation: Implementation) -> None:
    """Find out whether weights are returned unasked."""
    adapter = implementation.adapter
    assert isinstance(adapter, ModuleAdapter)
    try:
        arguments = implementation.fit(SIZED).arguments()
        arguments = arguments.replace(causal=implementation.conventions.causal.value == "always")
        adapter.gives_weights = implementation(arguments).weights is not None
    except (Unsupported, Refused, Violation):
        return


def settle_masks(implementation: Implementation, declared: Mapping[str, Any]) -> None:
    """Find out which shapes and forms of a mask the module takes, on sizes of which no two are alike.

    A shape is taken where it hides what it says, or the very opposite. In a form that is taken in some shape, a mask of
    four axes that is taken without complaint is taken: what it does wrong there is wrong.
    """
    adapter = implementation.adapter
    assert isinstance(adapter, ModuleAdapter)
    assert adapter.module is not None
    facts = adapter.module.facts
    if "key_padding" in adapter.signature.roles:
        settle_padding(implementation, _padding_effect)
    if "mask" not in adapter.signature.roles:
        return
    if declared.get("mask_shapes"):
        shapes = tuple(declared["mask_shapes"])
        adapter.shapes, adapter.padding = tuple(s for s in shapes if s != "BK"), "BK" in shapes
        facts.append(("masks", Finding(" ".join(shapes), "declared", "attn.yaml")))
        return
    found: dict[tuple[str, str], str] = {}
    for form in ("bool", "additive"):
        for shape in SHAPES:
            found[form, shape] = _mask_effect(implementation, form, shape)
    four = [effect for (_, shape), effect in found.items() if len(shape) == 4]
    if not {"right", "inverted"} & set(four):
        adapter.three_axes = True
        batch = {
            (form, shape): _mask_effect(implementation, form, shape)
            for form in ("bool", "additive")
            for shape in SHAPES[1:3]
        }
        runs = {effect for effect in batch.values() if effect != "raises"}
        only = set(four) <= {"raises"} and bool(runs)  # what is taken at all has three axes, whatever it hides
        adapter.three_axes = only or bool({"right", "inverted"} & runs)
        found |= batch if adapter.three_axes else {}
    source = source_of(adapter.module.module)
    claimed = "bool" if re.search(r"mask[^\n:]*\bbool\b|mask: *[^\n]*\bbool\b|\bbool\b[^\n]*mask", source, re.I) else ""
    right = {key for key, effect in found.items() if effect == "right" or (effect == "inverted" and key[0] == "bool")}
    padding = "raises"
    for dtype in (torch.bool, torch.long, torch.float32):
        adapter.padding_dtype = dtype
        padding = _padding_effect(implementation)
        if padding in ("right", "inverted"):
            break
    else:
        adapter.padding_dtype = torch.bool
        padding = _padding_effect(implementation)
    forms = tuple(form for form in ("bool", "additive") if form == claimed or any(f == form for f, _ in right))
    silent = {key for key, effect in found.items() if key[0] in forms and effect == "other" and len(key[1]) == 4}
    if not right and padding not in ("right", "inverted"):
        if any(effect == "other" for effect in [*found.values(), padding]):
            adapter.padding = padding == "other"
            neutral = {
                form for form, shape in found if found[form, shape] == "other" and _leaves(implementation, form, shape)
            }
            adapter.forms = tuple(form for form in adapter.forms if form in neutral) or adapter.forms
            return  # it takes masks and hides otherwise: the laws say what is wrong
        adapter.shapes = ()
        facts.append(("masks", Finding("none", "measured", "no mask of q by k and no key padding runs")))
        return
    adapter.forms = forms or adapter.forms
    adapter.shapes = tuple(shape for shape in SHAPES if any((form, shape) in right | silent for form in forms))
    if "key_padding" not in adapter.signature.roles:
        adapter.padding = padding in ("right", "inverted")
        polarity = implementation.conventions.polarity
        implementation.conventions = adapter.conventions = implementation.conventions.replace(padding_polarity=polarity)
    if adapter.three_axes:
        facts.append(("mask axes", Finding("[B, Sq, Sk]", "measured", "four axes are not taken")))
    if adapter.padding_dtype != torch.bool:
        facts.append(("padding", Finding(f"{adapter.padding_dtype}, 1 = real".removeprefix("torch."), "measured", "")))
    words = [*adapter.shapes, *(["BK"] if adapter.padding else [])]
    evidence = f"{' and '.join(adapter.forms)}; what it hides in each shape"
    facts.append(("masks", Finding(" ".join(words) or "none", "measured", evidence)))


def _mask_effect(implementation: Implementation, form: str, shape: str) -> str:
    """What a mask of a shape and form does, as `_effect` says it."""
    axes = "".join(a for a in shape if a != "1")
    how = Delivery(form, shape=shape, hidden="-1e9" if form == "additive" else "-inf")  # type: ignore[arg-type]
    problem = implementation.fit(SIZED.replace(mask=(Visible(axes, density=0.5),), delivery=how))
    return _effect(implementation, problem)


def _leaves(implementation: Implementation, form: str, shape: str) -> bool:
    """Whether a mask of a shape and form that hides nothing changes nothing."""
    how = Delivery(form, shape=shape)  # type: ignore[arg-type]
    problem = implementation.fit(SIZED.replace(mask=(Visible("K", density=1.0),), delivery=how))
    adapter = implementation.adapter
    assert isinstance(adapter, ModuleAdapter)
    always = implementation.conventions.causal.value == "always"
    arguments = problem.arguments().replace(causal=always)
    try:
        masked = implementation(arguments).output
        plain = implementation(arguments.replace(mask=None, form=None)).output
    except (Unsupported, Refused, Violation):
        return False
    return bool(torch.allclose(masked, plain, atol=1e-4))


def _padding_effect(implementation: Implementation) -> str:
    adapter = implementation.adapter
    assert isinstance(adapter, ModuleAdapter)
    adapter.padding = True
    try:
        problem = implementation.fit(PADDED)
        declared = implementation.conventions
        if "key_padding" not in adapter.signature.roles:
            implementation.conventions = adapter.conventions = declared.replace(padding_polarity=declared.polarity)
        try:
            return _effect(implementation, problem)
        finally:
            implementation.conventions = adapter.conventions = declared
    finally:
        adapter.padding = False


def _effect(implementation: Implementation, problem: Problem) -> str:
    """ "right", "inverted", "other", or "raises"; "own rows" where a padding is right but in rows that are padding."""
    from attn_spec.invariants.comparison import recovered

    adapter = implementation.adapter
    assert isinstance(adapter, ModuleAdapter)
    try:
        adapter.settling = True
        arguments = problem.arguments()
        if implementation.conventions.causal.value == "always":
            arguments = arguments.replace(causal=True)
        weights, _ = recovered(implementation, arguments)
    except (Unsupported, Refused, Violation):
        return "raises"
    finally:
        adapter.settling = False
    visible, _ = masks.combined(problem.mask, problem.sizes, problem.seed, "top-left")
    if visible is None:
        return "other"
    seen, visible = weights.abs() > 1e-9, visible.expand(weights.shape)
    possible = torch.ones_like(visible)
    if arguments.causal:
        possible = possible.tril()
    told = (visible & possible).any(-1, keepdim=True) & (~visible & possible).any(-1, keepdim=True)
    told = (told & possible).expand_as(seen)
    if bool((seen == visible)[told].all()):
        return "right"
    if bool((seen == ~visible)[told].all()):
        return "inverted"
    if isinstance(problem.mask[0], KeyPadding) and problem.q_len == problem.kv_len and bool(weights.isfinite().all()):
        real = visible[:, :, :1].mT
        if bool((seen == (visible & possible & real)).all()):
            return "own rows"
    return "other"
