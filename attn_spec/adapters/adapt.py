"""From a callable to an `Implementation`: signature, conventions (declared, named, measured) and precision."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from attn_spec.adapters import cached, hf_interface, measure, packed
from attn_spec.adapters import measure_variants as variants
from attn_spec.adapters.function import FunctionAdapter, at_rest, flat
from attn_spec.adapters.implementation import Contradiction, Implementation, import_source
from attn_spec.adapters.modules import sessions
from attn_spec.adapters.modules.adapter import ModuleAdapter, callable_of
from attn_spec.adapters.modules.core import ModuleFunction
from attn_spec.adapters.modules.expected import expectations
from attn_spec.adapters.modules.forward import MORE
from attn_spec.adapters.modules.plain import PlainModule
from attn_spec.adapters.modules.settled_masks import settle_masks, settle_weights
from attn_spec.adapters.signature import Signature, TargetError, read
from attn_spec.conventions import CHOICES, NAMED, Conventions, Finding
from attn_spec.tolerance import Precision

PROBED_DTYPES = ("float32", "bfloat16", "float16", "float64")
OF_MODULES = ("construct", "call", "projections", "fused", "heads", "kv_heads", "input", "output", "mask_shapes")
NEVER_FROM_MEASUREMENT = ("polarity", "padding_polarity", "grouping")


def adapt(
    target: Callable[..., Any] | Implementation,
    *,
    name: str = "",
    target_name: str = "",
    import_line: str = "",
    declared: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> Implementation:
    """An implementation from a function of q, k, v; nothing needs to be declared where names and measurement suffice.

    declared: conventions by field (`layout`, `polarity`, `alignment`, ...), `fixed` (arguments of each call),
    `parameters` (role to parameter name), `precision` (scores, weights, accumulate), `claims`; as attn.yaml has them.
    device: where it is called, "cpu" or "cuda".
    Raises TargetError where the target takes no q, k, v or returns no tensor; ValueError names a declared value that
    is not one of its field's choices.
    """
    if isinstance(target, Implementation):
        return target
    declared = dict(declared or {})
    _check_declared(declared)
    name = name or getattr(target, "__name__", type(target).__name__)
    target = callable_of(target, name, declared)
    if not callable(target):
        raise TargetError(f"{name}: a {type(target).__name__} is not callable; give a function f(q, k, v, ...)")
    module = getattr(target, "signature_of", target)
    interface = getattr(module, "of_interface", None)
    if interface is not None:
        declared = {**hf_interface.declared_conventions(interface), **declared}
        line = import_line or import_source(interface)
        import_line = hf_interface.import_source(line, interface) if line else ""
    if isinstance(module, PlainModule):
        line, made = import_line or import_source(module.target), module.source()
        import_line = f"{line}\n\n{made}" if line else ""
    fixed = dict(declared.get("fixed") or {})
    if isinstance(module, ModuleFunction) and fixed:
        raise ValueError(
            "fixed: is for the parameters of a function; a module's forward is given its arguments by `call:`, its "
            "constructor by `construct:`"
        )
    if isinstance(module, ModuleFunction):
        return _adapted_module(target, module, name, target_name, import_line, declared, device)
    for key in OF_MODULES:
        if declared.get(key) is not None:
            raise ValueError(f"{key}: is for modules, and {name} is a function; leave it out")
    known: dict[str, Finding] = {}
    if packed.is_packed(target):
        import_line = f"{import_line or import_source(target)}\n{packed.source_of_dense()}"
        target = packed.unpacked(target)
    elif cached.is_cached(target):
        layout = str(declared.get("layout") or "BSHD")
        import_line = f"{import_line or import_source(target)}\n{cached.source_of_uncached(layout)}"
        target = cached.uncached(target, layout)
        if target.of_cache.single:  # type: ignore[attr-defined]
            known["layout"] = Finding(layout, "assumed", "as the cache; one query has no axis of its own")
    signature = read(_without(target, fixed), name, declared.get("parameters"))
    conventions, expected = _from_names(signature, name, declared, known)
    adapter = FunctionAdapter(target, signature, conventions, fixed)
    implementation = Implementation(
        name, target_name or name, adapter, conventions, import_line=import_line or import_source(target), device=device
    )
    implementation.claims = tuple(declared.get("claims") or ())
    _measure(implementation, adapter, expected, declared)
    implementation.notes += _notes(signature)
    return implementation


def _adapted_module(
    target: Callable[..., Any],
    module: ModuleFunction,
    name: str,
    target_name: str,
    import_line: str,
    declared: dict[str, Any],
    device: str,
) -> Implementation:
    renamed = {role: p for role, p in (declared.get("parameters") or {}).items() if role not in ("q", "k", "v")}
    renamed = {**{role: p for role, p in module.forward.roles.items() if p in MORE.get(role, ())}, **renamed}
    signature = read(module, name, {role: p for role, p in renamed.items() if p in module.__signature__.parameters})
    conventions, expected = _from_names(signature, name, declared, expectations(module))
    if declared.get("empty_rows") is None:
        expected.discard("empty_rows")  # the name of a mask speaks of functions
    if module.causal_by == "constructor" and declared.get("alignment") is None:
        expected.discard("alignment")  # no name of forward speaks of it
    module.facts += sessions.facts(module)
    adapter = ModuleAdapter(target, signature, conventions, module=module)
    made = Implementation(
        name, target_name or name, adapter, conventions, import_line=import_line, device=device, facts=module.facts
    )
    made.claims = tuple(declared.get("claims") or ())
    if not module.projections.whole:
        made.notes.append("its projections were not found: judged as a black box, by laws on hidden states only")
        return made
    _measure(made, adapter, expected | {"layout", "layout_out"}, {**declared, "layout": "BHSD", "layout_out": "BHSD"})
    made.notes += _notes(signature)
    given = [name for name in ("cos", "sin") if name in module.forward.required]
    if module.forward.rotations or given:
        names = ", ".join([*module.forward.rotations, *given])
        made.notes.append(f"{names}: given as the rotation that changes nothing; what is done with it is not judged")
    left = [name for name in module.forward.left if name not in sessions.names_of(module)]
    if left:
        made.notes.append(f"arguments of forward that are left at their defaults: {', '.join(left)}")
    return made


def _without(target: Callable[..., Any], fixed: Mapping[str, Any]) -> Callable[..., Any]:
    """The target with the fixed parameters filled in, so that they are not asked for again."""
    if not fixed:
        return target
    import inspect

    own = getattr(target, "signature_of", target)
    try:
        every = inspect.signature(own).parameters.values()
    except (TypeError, ValueError):
        raise ValueError("fixed: the signature can't be read; wrap the call in a Python function instead") from None
    unknown = sorted(set(fixed) - {p.name for p in every})
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in every):
        raise ValueError(f"fixed: {unknown[0]!r} is no parameter; they are {', '.join(p.name for p in every)}")
    parameters = [p for p in every if p.name not in fixed]

    def partial(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **{**fixed, **kwargs})

    partial.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return partial


def _check_declared(declared: Mapping[str, Any]) -> None:
    for name, choices in CHOICES.items():
        value = declared.get(name)
        if value is not None and str(value) not in choices:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(choices)}")


def _from_names(
    signature: Signature, name: str, declared: Mapping[str, Any], known: Mapping[str, Finding] | None = None
) -> tuple[Conventions, set[str]]:
    """What is declared, else what is `known`, else what the parameter names stand for; and the fields for which one of
    them speaks."""
    found: dict[str, Finding] = {}
    flash = any(signature.roles.get(role) in ("softmax_scale", "window_size") for role in ("scale", "window"))
    if flash:
        found["layout"] = Finding("BSHD", "assumed", "flash-attn's parameter names")
    for parameter in signature.roles.values():
        for field_, value, why in NAMED.get(parameter, ()):
            found[field_] = Finding(value, "assumed", why)
    if "causal" in signature.roles:
        found["causal"] = Finding("flag", "assumed", f"parameter {signature.roles['causal']}")
    elif re.search(r"causal|decoder", name, re.IGNORECASE) and "non" not in name.lower():
        found["causal"] = Finding("always", "assumed", f"the name {name} says so")
    found |= known or {}
    for field_ in CHOICES:
        if declared.get(field_) is not None:
            found[field_] = Finding(str(declared[field_]), "declared", "attn.yaml")
    if "layout" in found and "layout_out" not in found:
        found["layout_out"] = Finding(found["layout"].value, "assumed", "as the input")
    expected = set(found)
    named, causal = found.get("window_alignment"), found.get("alignment")
    if causal is not None and (named is None or (named.how != "declared" and named.value != causal.value)):
        found["window_alignment"] = Finding(causal.value, "assumed", "as the causal mask")
        expected = expected - {"window_alignment"} if named is not None else expected | {"window_alignment"}
    if "lse_base" not in found and (signature.has("lse") or signature.has("probs")):
        found["lse_base"] = Finding("e", "assumed", "the natural logarithm")  # where it is another, that is taken
    return Conventions(**found), expected


def _measure(
    implementation: Implementation, adapter: FunctionAdapter, expected: set[str], declared: Mapping[str, Any]
) -> None:
    signature = adapter.signature
    extra = at_rest(signature, adapter.fixed, head_dim=8)
    if signature.required("causal") or signature.default("causal"):
        extra.setdefault(signature.roles["causal"], False)

    def settle(field_: str, value: str | None, evidence: str, accept: bool) -> None:
        """Take a measurement over where nothing else speaks, or note that it contradicts what does."""
        finding: Finding = getattr(implementation.conventions, field_)
        if value is None:
            return
        measured = Finding(value, "measured", evidence)
        if value == finding.value:
            how = finding.how if finding.how == "declared" else "measured"
            changes = {
                field_: Finding(value, how, f"{evidence}; {finding.evidence}" if field_ in expected else evidence)
            }
        elif accept and field_ not in expected:
            changes = {field_: measured}
        else:
            implementation.contradictions.append(Contradiction(field_, finding, measured))
            return
        implementation.conventions = adapter.conventions = implementation.conventions.replace(**changes)

    def guarded_layout() -> tuple[str | None, str | None, str]:
        device = implementation.device

        def call(*args: Any, **kwargs: Any) -> Any:
            there = [x.to(device) if isinstance(x, Tensor) else x for x in args]
            named = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in kwargs.items()}
            returned = implementation.shielded(adapter.function, *there, **named)
            return [x.cpu() for x in flat(returned)] or returned

        return measure.layout_by_influence(call, signature, extra)

    try:
        between = isinstance(adapter, ModuleAdapter)  # a module's core is [B, H, S, D] on both sides
        layout, layout_out, evidence = (None, None, "") if between else guarded_layout()
    except measure.NoTensor as error:
        raise TargetError(
            f"{implementation.name}: returned {error}, not a tensor; an attention returns its output, or a tuple that "
            f"begins with it"
        ) from None
    if layout is not None and declared.get("layout") is None:
        expected.discard("layout")  # a name only breaks ties
    settle("layout", layout, evidence, accept=True)
    if layout is None and declared.get("layout") is None:
        assumed = implementation.conventions.layout.value
        implementation.notes.append(f"{assumed} is assumed: {evidence}; `layout:` in attn.yaml declares it")
    if declared.get("layout_out") is None:
        same = Finding(implementation.conventions.layout.value, "assumed", "as the input")
        implementation.conventions = adapter.conventions = implementation.conventions.replace(layout_out=same)
    settle("layout_out", layout_out, "the shape of the output", accept=False)
    _measure_causal(implementation, settle, expected)
    if isinstance(adapter, ModuleAdapter):
        settle_masks(implementation, declared)
        settle_weights(implementation)
    if signature.has("mask") or signature.has("key_padding"):
        for field_, form, role in (("polarity", "bool", "mask"), ("padding_polarity", "key-padding", "key_padding")):
            if signature.has(role):
                seen = measure.polarity(implementation, form)
                finding: Finding = getattr(implementation.conventions, field_)
                other = "masked" if finding.value == "attend" else "attend"
                value = {"as declared": finding.value, "inverted": other}.get(seen or "")
                settle(field_, value, "the weights recovered under a random mask", accept=False)
    named = signature.roles.get("mask") not in (None, "attn_mask")  # torch's name promises both forms
    if named and declared.get("mask_form") is None and measure.reads_additive_as_bool(implementation):
        finding = Finding("bool", "measured", "an additive mask hides where it is 0, as one of 0 and 1 is read")
        implementation.conventions = adapter.conventions = implementation.conventions.replace(mask_form=finding)
    rows = measure.empty_rows(implementation)
    settle("empty_rows", rows, "the output of a row with no visible key", accept=True)
    if rows == "nan" and implementation.conventions.empty_rows.how == "measured":
        implementation.notes.append(
            "rows with no visible key give NaN, taken as meant; `empty_rows: zero` makes it red"
        )
    settle("grouping", measure.grouping(implementation), "V constant in each kv head, 4 query heads on 2", accept=False)
    _measure_variants(implementation, settle, signature, expected, declared)
    _measure_precision(implementation, declared.get("precision") or {})


def _measure_causal(implementation: Implementation, settle: Callable[..., None], expected: set[str]) -> None:
    conventions = implementation.conventions
    by_flag = conventions.causal.value == "flag"
    without = measure.causality(implementation, False) if conventions.causal.value != "always" else None
    with_flag = measure.causality(implementation, True) if conventions.causal.value != "never" else None
    if by_flag and without is not None and with_flag is not None:
        value = {(False, True): "flag", (True, True): "always", (False, False): "never"}.get((without, with_flag))
        settle("causal", value, "whether the last key reaches the first query, without and with the flag", False)
    elif conventions.causal.value == "always" and with_flag is not None:
        settle("causal", "always" if with_flag else "never", "whether the last key reaches the first query", False)
    elif conventions.causal.value == "never" and without is not None:
        settle("causal", "always" if without else "never", "whether the last key reaches the first query", False)
    if conventions.causal.value != "never" and with_flag:
        settle("alignment", measure.alignment(implementation), "the keys seen with Sq = 3, Sk = 5", True)
        if "alignment" not in expected and implementation.conventions.alignment.how == "measured":
            value = implementation.conventions.alignment.value
            implementation.notes.append(f"alignment taken from measurement; `alignment: {value}` in attn.yaml holds it")


def _measure_variants(
    implementation: Implementation,
    settle: Callable[..., None],
    signature: Signature,
    expected: set[str],
    declared: Mapping[str, Any],
) -> None:
    if signature.has("window"):
        kind = variants.window(implementation)
        both = kind == "count-both" and implementation.is_module and implementation.conventions.window.value == "count"
        if both:  # the name says what is counted, and not to which sides
            expected.discard("window")
        settle("window", kind, "the keys seen under (2, 1), or under 3", accept=True)
        if kind is None and "window" in implementation.built_with and declared.get("window") is None:
            _window_of_module(implementation, signature, expected)
    if signature.has("alibi"):
        settle("alibi", variants.alibi(implementation), "the output without causality", accept=True)
    if signature.has("window") or signature.has("alibi"):
        aligned = variants.window_alignment(implementation)
        settle("window_alignment", aligned, "the output with Sq = 3, Sk = 6", accept=True)
    if signature.has("softcap"):
        settle("softcap_order", variants.softcap_order(implementation), "the output under softcap 2", accept=True)
    if signature.has("lse") or signature.has("probs"):
        settle("lse_base", variants.lse_base(implementation), "the log-sum-exp beside the exact one", accept=True)
        settle("lse_empty", variants.lse_empty(implementation), "that of a row with no visible key", accept=True)
        if signature.has("sinks"):
            settle(
                "lse_sinks",
                variants.lse_sinks(implementation),
                "with a sink, beside the exact one",
                accept=True,
            )


def _window_of_module(implementation: Implementation, signature: Signature, expected: set[str]) -> None:
    """A window of which no convention is clear: one number of keys where they go by distance or all are seen."""
    if variants.goes_by_distance(implementation):
        if "window" not in expected:
            finding = Finding("count", "assumed", "one number, of keys with the query's own")
            implementation.conventions = implementation.conventions.replace(window=finding)
            implementation.adapter.conventions = implementation.conventions  # type: ignore[attr-defined]
        return
    del signature.roles["window"]
    name = implementation.built_with["window"]
    implementation.notes.append(f"{name}: the keys that it leaves visible do not go by distance; it is not judged")


def _measure_precision(implementation: Implementation, declared: Mapping[str, str]) -> None:
    for dtype in PROBED_DTYPES:
        found, evidence = measure.precision(implementation, dtype)
        if found is None:
            implementation.notes.append(f"{dtype} not taken: {evidence}")
            continue
        if declared:
            fields = {"scores": found.scores, "weights": found.weights, "accumulate": found.accumulate}
            fields |= {key: str(value) for key, value in declared.items() if dtype != "float64"}
            found, evidence = Precision(**fields, output=dtype), "declared"
        implementation.precision[dtype] = found
        implementation.precision_evidence[dtype] = evidence


def _notes(signature: Signature) -> list[str]:
    notes = []
    if signature.not_understood:
        notes.append(f"parameters not understood, left at their defaults: {', '.join(signature.not_understood)}")
    return notes
