"""Execution in other ways: compiled, exported, on fake tensors, mapped, in threads, and bit for bit.

Some of it is promised by few: `claims:` in attn.yaml says by whom, and what is claimed and does not hold is red.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_spec.adapters import running
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.modules.kept import kept_weights
from attn_spec.adapters.modules.sessions import keeps_inside
from attn_spec.interpreter import interpreted
from attn_spec.invariants.asked import Asked, ask
from attn_spec.invariants.comparison import arguments_for, output, require_within
from attn_spec.law import Advisory, Refused, Unsupported, Violation, law
from attn_spec.masks import Bias, Causal, Delivery, Visible
from attn_spec.problem import Arguments, Problem

COMPILE_S = 300.0  # for a procedure that compiles
TIMES = 4  # of the same call, under the deterministic mode
ROUNDS = 25  # of each thread

WORDS = {
    "plain": "",
    "mask": ", with a mask",
    "bias": ", with an additive mask",
    "causal": ", causal",
    "grouped": ", with grouped heads",
    "scale": ", with another scale",
    "strides": ", on transposed views",
    "gradient": ", with its backward pass",
    "batch": ", with another batch size than at first",
    "length": ", with other lengths than at first",
    "again": ", as at first after other calls",
}


def _needs_compiled_kernels() -> None:
    """Raise Unsupported under Triton's interpreter: it changes its language for each call, in one thread at a time."""
    if interpreted():
        raise Unsupported("not under Triton's interpreter, which serves one thread and is not traced")


def _ways(problem: Problem) -> dict[str, Problem]:
    """The problem plainly, and with one thing more each."""
    plain = problem.replace(mask=(), delivery=Delivery(), scale=None, kv_heads=problem.heads)
    return {
        "plain": plain,
        "mask": plain.replace(mask=(Visible("BQK"),)),
        "bias": plain.replace(mask=(Bias("BQK"),), delivery=Delivery("additive")),
        "causal": plain.replace(mask=(Causal(),)),
        "grouped": plain.replace(heads=2 * problem.heads),
        "scale": plain.replace(scale=0.3),
        "strides": plain.replace(layout="transposed"),
    }


def _asked(
    implementation: Implementation, calls: Sequence[tuple[str, Problem]], *, gradients: bool = False
) -> list[tuple[str, Asked]]:
    """The calls that there is a way to ask for; those that, made to fit, are one and the same only once."""
    found: list[tuple[str, Asked]] = []
    met = set()
    for label, problem in calls:
        problem = implementation.as_asked(problem)
        if label != "again" and (problem, label == "gradient") in met:
            continue
        met.add((problem, label == "gradient"))
        try:
            found.append((label, ask(implementation, problem, gradients=gradients or label == "gradient")))
        except Unsupported:
            if label == "plain":
                raise
    return found


# compiled and exported -----------------------------------------------------------------------------------------------


def _compiled_agrees(implementation: Implementation, calls: list[tuple[str, Problem]], backend: str) -> None:
    """What one compiled callable gives for each call is what the call gives as it is."""
    _needs_compiled_kernels()
    asked = _asked(implementation, calls)
    if not asked:
        return
    questions = [one.question for _, one in asked]
    answers = implementation.perform(running.compiled, questions, backend, timeout_s=COMPILE_S)
    if "refused" in answers[0] and asked[0][0] == "plain":
        raise Unsupported(f"as it is it raises: {answers[0]['refused']}")
    raised = ""
    for (label, one), answer in zip(asked, answers, strict=True):
        how = f"compiled ({backend}){WORDS[label]}"
        if "raised" in answer:
            raised = raised or f"{how}: raises {answer['raised']}"
        if "compiled" not in answer:
            continue
        _require_equal(one, answer["compiled"], answer["eager"], how, f"compiled-{label}")
        if answer["changed"]:
            raise Violation(f"{how}: its inputs are changed in place", merge="compiled-inputs-changed")
    if raised:
        _unpromised(implementation, "fullgraph", raised, "compile-raises", Advisory)


def _require_equal(asked: Asked, got: list[Tensor], expected: list[Tensor], how: str, merge: str) -> None:
    """Raise a Violation where an output or a gradient is another than that of the call as it is."""
    hint = "it must not look at how it is run, nor keep what it saw when it was traced"
    require_within(asked.compare(got[0], expected[0]), "output", because=how, merge=merge, hint=hint)
    if len(got) != len(expected):
        raise Violation(f"{how}: the output carries {'no' if len(got) < 2 else 'a'} gradient", merge=merge, hint=hint)
    for name, worst in asked.compare_gradients(got[1:], expected[1:]) if len(got) > 1 else ():
        require_within(worst, name, because=how, merge=merge, hint=hint)


def _performed(implementation: Implementation, label: str, procedure: Callable[..., Any], *args: Any) -> Any:
    """What a procedure gives; None where the call with one thing more is refused as it is. Raises as `perform`."""
    try:
        return implementation.perform(procedure, *args, timeout_s=COMPILE_S)
    except Refused:
        if label == "plain":
            raise
        return None


def _unpromised(
    implementation: Implementation, claim: str, message: str, merge: str, otherwise: type[Exception]
) -> None:
    """Raise what does not hold: a Violation where it is claimed, else what it is for those who promise nothing."""
    if claim in implementation.claims:
        raise Violation(f"{message}; `claims:` says {claim}", merge=merge)
    raise otherwise(f"{message}; `claims: [{claim}]` makes this red")


@law("ATN1220", "compiled-equals-eager", "Compiled, it gives what it gives as it is")
def compiled_equals_eager(implementation: Implementation, problem: Problem) -> None:
    """torch.compile(f)(a) = f(a), and so are the gradients: plain, masked, causal, grouped, scaled, on views

    Why: code that is traced may take another path, and a compiler rewrites attention where it finds it.
    Example: a branch on `torch.compiler.is_compiling()` that leaves the mask out. A module is compiled as a whole.
    """
    ways = _ways(problem)
    backwards = [("gradient", ways["plain"]), ("gradient", ways["mask"])]
    _compiled_agrees(implementation, list(ways.items()), "eager")  # traced, and run as it was traced
    _compiled_agrees(implementation, backwards, "aot_eager")
    generated = [("mask", ways["mask"].replace(layout="transposed")), ("plain", ways["plain"])]
    _compiled_agrees(implementation, generated, "inductor")


@law("ATN1221", "compiled-other-shapes", "Compiled once, it is right for other sizes and flags")
def compiled_other_shapes(implementation: Implementation, problem: Problem) -> None:
    """g = torch.compile(f): g(a) = f(a), and then g(b) = f(b) with another batch, other lengths, flags and scales

    Why: what is looked up while a call is traced is a constant afterwards; the first shape is right for ever.
    Example: the number of keys of the first call; a scale that was read once.
    """
    plain = _ways(problem)["plain"]
    longer, shorter = (plain.replace(q_len=n, kv_len=n) for n in (problem.kv_len + 6, problem.kv_len - 2))
    calls = [
        ("plain", plain),
        ("length", longer),
        ("length", shorter),
        ("batch", plain.replace(batch=problem.batch + 1)),
        ("causal", longer.replace(mask=(Causal(),))),
        ("scale", plain.replace(scale=0.3)),
        ("scale", plain.replace(scale=1.7)),
        ("again", plain),
    ]
    _compiled_agrees(implementation, calls, "eager")


@law("ATN1222", "no-graph-break", "It is traced into one graph (where that is claimed)")
def no_graph_break(implementation: Implementation, problem: Problem) -> None:
    """torch.compile(f, fullgraph=True) takes it: plain, masked, causal

    Why: at every break the compiler gives up and starts anew, and nothing is fused across it.
    Example: `if mask.all():`, which has to look at the data.
    """
    _needs_compiled_kernels()
    ways = _ways(problem)
    asked = _asked(implementation, [(label, ways[label]) for label in ("plain", "mask", "causal")])
    found = implementation.perform(
        running.graph_breaks, [one.question for _, one in asked], timeout_s=COMPILE_S
    )  # fmt: skip
    for (label, _), answer in zip(asked, found, strict=True):
        breaks = max(len(answer.get("reasons", ())), answer.get("graphs", 1) - 1)
        said = f"traced{WORDS[label]}: "
        if "raised" in answer:
            _unpromised(implementation, "fullgraph", f"{said}raises {answer['raised']}", "graph-break", Unsupported)
        if breaks or not answer["graphs"]:
            number = f"{breaks} graph break{'s' * (breaks != 1)}" if breaks else "nothing of it is traced"
            why = f" ({answer['reasons'][0]})" if answer["reasons"] else ""
            _unpromised(implementation, "fullgraph", f"{said}{number}{why}", "graph-break", Unsupported)


@law("ATN1223", "exported", "Exported, it gives what it gives as it is")
def exported(implementation: Implementation, problem: Problem) -> None:
    """torch.export.export(f, a): the program gives f(a) for a, and f(b) for another batch and other lengths

    Why: an exported program runs where nobody can look: on a server, on a phone.
    Example: a length that becomes a constant. That it can't be exported is red where `export` is claimed.
    """
    _needs_compiled_kernels()
    ways = _ways(problem)
    missing = ""
    for label in ("plain", "mask"):
        one = ways[label]
        other = one.replace(batch=one.batch + 1, q_len=one.q_len + 4, kv_len=one.kv_len + 4)
        asked = [each for _, each in _asked(implementation, [(label, one), (label, other)])]
        if len(asked) < 2:
            continue
        found = _performed(implementation, label, running.exported, *(each.question for each in asked))
        if found is None:
            continue
        how = f"exported{WORDS[label]}"
        for n, (each, got) in enumerate(zip(asked, found.get("exported", ()), strict=False)):
            size = ", on other sizes" if n else ""
            merge = "exported-sizes" if n else f"compiled-{label}"
            _require_equal(each, [got], [found["eager"][n]], f"{how}{size}", merge)
        if "raised" in found:
            missing = missing or f"{how}: raises {found['raised']}"
        if "specialised" in found:
            missing = missing or f"{how}, it takes no other batch and lengths: {found['specialised']}"
    if missing:
        _unpromised(implementation, "export", missing, "export-raises", Advisory)


# without data, and mapped --------------------------------------------------------------------------------------------


@law("ATN1224", "fake-tensors", "On tensors without data it gives the shape and dtype of its output")
def fake_tensors(implementation: Implementation, problem: Problem) -> None:
    """the shape and dtype of f(a) on fake tensors and on the device meta, with a mask too

    Why: compilers, exporters and planners of memory run it so, and believe the shape that comes out.
    Example: an output made like q where v is of another width; `.item()`, which has nothing to read.
    """
    ways = _ways(problem.replace(heads=problem.kv_heads))
    raised = ""
    for label, asked in _asked(implementation, [(label, ways[label]) for label in ("plain", "mask", "causal")]):
        found = _performed(implementation, label, running.without_data, asked.question)
        if found is None:
            continue
        expected = found["eager"]
        for name, what in (("fake", "fake tensors"), ("meta", "the device meta")):
            if isinstance(found[name], str):
                raised = raised or f"on {what}{WORDS[label]}: raises {found[name]}"
            elif found[name] != expected:
                raise Violation(
                    f"on {what}{WORDS[label]} the output is {found[name][0]} of {found[name][1]}, and on data "
                    f"{expected[0]} of {expected[1]}",
                    evidence={"expected": expected, "received": found[name]},
                    merge="fake-shape",
                )
    if raised:
        _unpromised(implementation, "fake-tensors", raised, "fake-raises", Advisory)


@law("ATN1229", "vmap", "Mapped over by torch.func.vmap it gives what it gives one by one")
def vmapped(implementation: Implementation, problem: Problem) -> None:
    """vmap(f)(stack(a, b)) = stack(f(a), f(b))

    Why: gradients for each sample and ensembles are written with it.
    Example: writing into a buffer that is not mapped over. That it raises is red where `vmap` is claimed.
    """
    ways = _ways(problem)
    raised = ""
    for label in ("plain", "mask", "grouped"):
        each = [ways[label].replace(seed=problem.seed + n) for n in range(2)]
        asked = [one for _, one in _asked(implementation, [(label, one) for one in each])]
        if len(asked) < 2:
            continue
        found = _performed(implementation, label, running.mapped, [one.question for one in asked])
        if found is None:
            continue
        how = f"mapped over{WORDS[label]}"
        for one, got, expected in zip(asked, found.get("mapped", ()), found["eager"], strict=False):
            require_within(one.compare(got, expected), "output", because=how, merge="vmap")
        raised = raised or (f"{how}: raises {found['raised']}" if "raised" in found else "")
    if raised:
        _unpromised(implementation, "vmap", raised, "vmap-raises", Advisory)


# beside other calls, and to the bit ----------------------------------------------------------------------------------


@law("ATN1226", "deterministic-mode", "Under the deterministic mode of torch the same call gives the same bits")
def deterministic_mode(implementation: Implementation, problem: Problem) -> None:
    """torch.use_deterministic_algorithms(True): output and gradients of equal calls are equal to the bit

    Why: who asks for it compares checkpoints; sums in the order in which blocks happen to end are no help.
    Example: dQ added up by atomics. A clear refusal is an advisory, and red where `deterministic` is claimed.
    """
    found: dict[str, Any] = {"deliberate": True}
    for gradients in (True, False):
        if found.get("deliberate"):  # it has perhaps no backward pass
            asked = ask(implementation, problem, gradients=gradients, core=True)
            found = implementation.perform(running.deterministically, asked.question, TIMES)
    if "raised" in found:
        said = f"under the deterministic mode: raises {found['raised']}"
        _unpromised(implementation, "deterministic", said, "deterministic-raises", Advisory)
    for again in found["answers"][1:]:
        for place, (one, other) in enumerate(zip(found["answers"][0], again, strict=True)):
            apart = int((one.nan_to_num() != other.nan_to_num()).sum())
            if apart:
                what = f"gradient {place}" if place else "output"
                said = f"{apart} of {one.numel()} elements of its {what} have other bits in the same call again"
                raise Violation(f"under the deterministic mode {said}", merge="not-deterministic")


@law("ATN1227", "threads", "Called by several threads at once it answers each")
def threads(implementation: Implementation, problem: Problem) -> None:
    """f(a), f(b), ... in threads of their own, again and again: what each gives alone

    Why: servers and data loaders call one model from many threads; what is kept on it is shared by all.
    Example: one buffer for the scores; the mask of the call left in a global for another function to read. That a
    module keeps its weights for the looker-on is an advisory, and red where `threads` is claimed.
    """
    _needs_compiled_kernels()
    module = getattr(implementation.adapter, "module", None)
    if module is not None and keeps_inside(module):
        raise Unsupported("every call writes to a cache in the module: it is for one sequence at a time")
    ways = _ways(problem)
    longer = ways["plain"].replace(q_len=problem.q_len + 6, kv_len=problem.kv_len + 6, seed=problem.seed + 1)
    unmasked = [("plain", ways["plain"]), ("batch", ways["plain"].replace(seed=problem.seed + 2)), ("length", longer)]
    masked = [("plain", ways["plain"]), *((label, ways[label]) for label in ("mask", "causal"))]
    for calls, merge in ((unmasked, "threads-buffer"), (masked, "threads-mask")):
        asked = [one for _, one in _asked(implementation, calls)]
        if len(asked) < 2:
            continue
        label = "plain" if calls is unmasked else "mask"
        found = _performed(implementation, label, running.in_threads, [one.question for one in asked], ROUNDS)
        if found is None:
            continue
        because = f"called by {len(asked)} threads at once"
        kept = kept_weights(module) if module is not None and calls is unmasked and _apart(asked, found) else ""
        if kept:
            said = f"{because} it reads back what other calls left in self.{kept}, which is kept to be looked at"
            _unpromised(implementation, "threads", said, merge, Advisory)
        if found["raised"]:
            raise Violation(f"{because}: raises {found['raised']}", merge=merge)
        for one, got, expected in zip(asked, found["beside"], found["alone"], strict=True):
            hint = "keep nothing of a call outside of it: no buffer, no attribute, no global"
            require_within(one.compare(got, expected), "output", because=because, merge=merge, hint=hint)


def _apart(asked: list[Any], found: dict[str, Any]) -> bool:
    """Whether a call in company raised, or gave what it does not give alone."""
    rows = zip(asked, found["beside"], found["alone"], strict=False)
    return bool(found["raised"]) or not all(one.compare(got, expected).holds for one, got, expected in rows)


@law("ATN1228", "batch-invariant", "What a sample or a query gives alone it gives in company, to the bit (if claimed)")
def batch_invariant(implementation: Implementation, problem: Problem) -> None:
    """f(q[b], k[b], v[b]) = f(q, k, v)[b] and f(q[:, :, i]) = f(q)[:, :, i], to the bit

    Why: a server that batches what comes in gives each user other tokens with each neighbour.
    Example: a number of splits of the keys that is chosen by the batch size.
    """
    arguments = arguments_for(implementation, problem)
    whole = output(implementation, arguments)
    if not torch.equal(output(implementation, arguments), whole):
        said = "the same call again gives other bits"
        _unpromised(implementation, "batch-invariant", said, "not-deterministic", Unsupported)
    apart = list(_alone_apart(implementation, arguments, whole))
    if any(apart):
        share = f"{sum(apart)} of {len(apart)} samples and queries alone give other bits than in company"
        _unpromised(implementation, "batch-invariant", share, "batch-invariance", Unsupported)


def _alone_apart(implementation: Implementation, arguments: Arguments, whole: Tensor) -> Iterator[bool]:
    """For each sample, and for some queries, whether alone it gives other bits."""
    for b in range(len(whole)):
        q, k, v = (x[b : b + 1].clone() for x in (arguments.q, arguments.k, arguments.v))
        out = output(implementation, arguments.replace(q=q, k=k, v=v))
        yield not torch.equal(out, whole[b : b + 1])
    if arguments.mask is not None or arguments.causal or implementation.conventions.causal.value == "always":
        return
    for i in (0, whole.shape[2] - 1):
        try:
            out = output(implementation, arguments.replace(q=arguments.q[:, :, i : i + 1].clone()))
        except (Unsupported, Refused):
            return
        yield not torch.equal(out, whole[:, :, i : i + 1])
