"""`attn-spec trace TARGET` and `attn-spec heatmap TARGET --out FILE`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_spec.masks import Causal, Delivery, KeyPadding, Part
from attn_spec.problem import Arguments, Problem

WRONG, USAGE_ERROR = 1, 4  # as the other commands'


class _UsageError(ValueError):
    """What was typed does not go together."""


def run(arguments: argparse.Namespace) -> int:
    """Print the trace: 0 where nothing goes wrong, 1 where something does, 4 (message on stderr) where it can't run."""
    return _guarded(_trace, arguments)


def run_heatmap(arguments: argparse.Namespace) -> int:
    """Write the picture: 0, or 4 with a message on stderr where the target, a token count or the file can't be used."""
    return _guarded(_heatmap, arguments)


def _guarded(command: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            return command(arguments)
    except (ValueError, OSError, ImportError) as error:  # TargetError and ConfigError are ValueErrors
        print(f"attn-spec: {error}", file=sys.stderr)
        return USAGE_ERROR
    except SystemExit as stop:
        print(f"attn-spec: {arguments.target}: called sys.exit({stop.code!r})", file=sys.stderr)
        return WRONG


def _trace(arguments: argparse.Namespace) -> int:
    from attn_spec.trace.tracing import of_recording

    problem = _problem(arguments, batch=2)
    ran = _ran(arguments, problem)
    made = of_recording(ran.recording, ran.expected, ran.name)
    print(f"problem: {problem}")
    print(made)
    return WRONG if made.first_wrong is not None else 0


def _heatmap(arguments: argparse.Namespace) -> int:
    from attn_spec.report.heatmap import check_path, heatmap, save
    from attn_spec.trace.weights import seen_and_right

    check_path(arguments.out)
    labels = arguments.tokens.split() if arguments.tokens is not None else None
    if labels is not None and not labels:
        raise _UsageError("--tokens: is empty; give the words that stand at the axes")
    problem = _problem(arguments, batch=1, seq=len(labels) if labels else None)
    if labels and problem.q_len != problem.kv_len:
        raise _UsageError("--tokens: one list of words labels both axes; the problem has other queries than keys")
    if labels and len(labels) != problem.q_len:
        raise _UsageError(f"--tokens: {len(labels)} words for {problem.q_len} tokens; leave --seq out, or give as many")
    ran = _ran(arguments, problem)
    if ran.recording.error is not None:
        raise _UsageError(f"{arguments.target}: raises {type(ran.recording.error).__name__}: {ran.recording.error}")
    found = seen_and_right(ran.recording, ran.expected) or ran.recovered()
    if found is None:
        raise _UsageError(f"{arguments.target}: no weights were seen, and they can't be read off by a one-hot V")
    weights, right = (x[0].cpu() for x in found)
    hidden = None if ran.expected.hidden is None else ran.expected.hidden[0].expand(weights.shape)
    title = f"{ran.name}, {problem}"
    if arguments.head is not None:
        if not 0 <= arguments.head < len(weights):
            raise _UsageError(f"--head: {arguments.head} is not one of the heads 0 to {len(weights) - 1}")
        one = slice(arguments.head, arguments.head + 1)
        weights, right, hidden = weights[one], right[one], None if hidden is None else hidden[one]
    first = arguments.head or 0
    save(heatmap(weights, labels=labels, hidden=hidden, expected=right, title=title, first_head=first), arguments.out)
    count = f"{len(weights)} head{'s' * (len(weights) > 1)}"
    print(f"{arguments.out}: {count}, largest difference from the oracle {(weights - right).abs().max():.3g}")
    return 0


# what is run ---------------------------------------------------------------------------------------------------------


def _problem(arguments: argparse.Namespace, batch: int, seq: int | None = None) -> Problem:
    """The problem of the file, or of the sizes that were given."""
    if arguments.problem is not None:
        sizes = ("batch", "seq", "heads", "head_dim", "dtype")
        given = next((name for name in sizes if getattr(arguments, name) is not None), None)
        if given is not None or arguments.causal or arguments.mask != "none":
            option = given.replace("_", "-") if given else "causal" if arguments.causal else "mask"
            raise _UsageError(f"--{option}: the file of --problem says it; leave one of the two out")
        return Problem.from_yaml(Path(arguments.problem).read_text(encoding="utf-8"))
    for name in ("batch", "seq", "heads", "head_dim"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise _UsageError(f"--{name.replace('_', '-')}: {value} is too small; give 1 or more")
    batch, length = arguments.batch or batch, arguments.seq or seq or 6
    heads, head_dim = arguments.heads or 2, arguments.head_dim or 8
    parts: list[Part] = []
    if arguments.causal or arguments.mask == "causal":
        parts.append(Causal())
    if arguments.mask == "padding":  # the last sample is padded, and the first where it is alone
        parts.append(KeyPadding((*[length] * (batch - 1), max(1, length - max(1, length // 3)))))
    sizes_ = {"batch": batch, "heads": heads, "kv_heads": heads, "q_len": length, "kv_len": length}
    delivery = Delivery(flag=arguments.mask != "causal")
    return Problem(
        **sizes_,  # type: ignore[arg-type]
        head_dim=head_dim,
        v_dim=head_dim,
        dtype=arguments.dtype or "float32",
        mask=tuple(parts),
        delivery=delivery,
        values="mild",
    )


@dataclass(frozen=True, eq=False)
class _Ran:
    """What was run: its recording, what was asked for, and how its weights can be read off otherwise."""

    name: str
    recording: Any
    expected: Any
    implementation: Any = None
    arguments: Arguments | None = None

    def recovered(self) -> tuple[Any, Any] | None:
        """The weights read off by a one-hot V, and the oracle's, for a function of q, k and v."""
        if self.implementation is None or self.arguments is None:
            return None
        from attn_spec.invariants.comparison import recovered

        weights, answer = recovered(self.implementation, self.arguments)
        return weights.double(), answer.output


def _ran(arguments: argparse.Namespace, problem: Problem) -> _Ran:
    """Find the target, and run it once on the problem under capture."""
    from torch import nn

    from attn_spec.adapters.resolve import resolve
    from attn_spec.adapters.signature import TargetError
    from attn_spec.subjects import find_config

    config = find_config(arguments.attn_config, Path.cwd())
    entry = config.find(arguments.target, only=True) if config is not None else None
    declared = entry[1].declared() if entry is not None else {}
    found = resolve((entry[1].target if entry is not None else None) or arguments.target)
    if isinstance(found.object, nn.Module) or inspect.isclass(found.object):
        return _ran_module(found.object, found.name, problem, declared)
    try:
        return _ran_function(found, problem, declared)
    except TargetError as error:
        try:  # a function that makes a module
            return _ran_module(found.object, found.name, problem, declared)
        except (TargetError, ImportError, TypeError):
            raise error from None


def _ran_module(found: Any, name: str, problem: Problem, declared: dict[str, Any]) -> _Ran:
    from attn_spec.adapters.modules import for_trace
    from attn_spec.capture import capture
    from attn_spec.law import Unsupported

    refused: Unsupported | None = None
    for delivered in _deliveries(problem):
        try:
            function, args, kwargs = for_trace(found, delivered, declared)
            break
        except Unsupported as why:
            refused = refused or why
    else:
        raise _UsageError(f"{name}: {refused}{_instead(str(refused))}")
    return _Ran(name, capture(function, *args, **kwargs), _expected(problem, "top-left"))


def _ran_function(found: Any, problem: Problem, declared: dict[str, Any]) -> _Ran:
    from attn_spec.adapters.adapt import adapt
    from attn_spec.adapters.function import FunctionAdapter
    from attn_spec.capture import Recording, capture
    from attn_spec.law import Unsupported, Violation

    implementation = adapt(found.object, name=found.name, target_name=found.target, declared=declared)
    recordings: list[Recording] = []
    own = implementation.adapter
    assert isinstance(own, FunctionAdapter)

    def captured(*args: Any, **kwargs: Any) -> Any:
        recordings.append(capture(own.function, *args, **kwargs))
        if recordings[-1].error is not None:
            raise recordings[-1].error
        return recordings[-1].returned

    meaning = implementation.conventions.meaning
    given = _deliverable(problem, own, meaning.alignment)
    try:
        dataclasses.replace(own, function=captured)(given)
    except Unsupported as why:
        raise _UsageError(f"{found.target}: {why}{_instead(str(why))}") from None
    except Violation as why:  # it returned no tensor: what it computed is there all the same
        if not recordings:
            raise _UsageError(f"{found.target}: {why}") from None
    except Exception as error:
        if not recordings or recordings[-1].error is not error:
            raise
    expected = _expected(problem, meaning.alignment)
    if implementation.conventions.layout.value == "SD":  # called for each sample and head: the first is shown
        hidden = expected.hidden[:1, :1] if expected.hidden is not None else None
        expected = dataclasses.replace(expected, hidden=hidden, batch=1)
    return _Ran(found.name, recordings[0], expected, implementation, given)


def _deliveries(problem: Problem) -> Iterator[Problem]:
    """The problem, and where it hands over a bool mask, the same mask in the other forms."""
    yield problem
    if problem.masked and problem.delivery == Delivery(flag=problem.delivery.flag):
        for form, shape in (("key-padding", ""), ("bool", "BHQK"), ("additive", ""), ("additive", "BHQK")):
            with contextlib.suppress(ValueError):  # no key padding holds a causal mask
                yield problem.replace(delivery=Delivery(form, shape, flag=problem.delivery.flag))  # type: ignore[arg-type]


def _deliverable(problem: Problem, adapter: Any, alignment: Any) -> Arguments:
    """The arguments with the mask in the first form that the function takes."""
    from attn_spec.law import Unsupported

    for delivered in _deliveries(problem):
        arguments = delivered.arguments(alignment)
        try:
            adapter._values(arguments)
            return arguments
        except Unsupported:
            continue
    return problem.arguments(alignment)


def _instead(why: str) -> str:
    hints = {
        "no causal parameter": "; --mask causal hands causality over in a mask",
        "always causal": "; give --causal",
    }
    return hints.get(why, "; leave --mask out" if "mask" in why or "padding" in why else "")


def _expected(problem: Problem, alignment: Any) -> Any:
    from attn_spec import masks
    from attn_spec.trace.finding import Expected

    visible, _ = masks.combined(problem.mask, problem.sizes, problem.seed, alignment)
    b, h, q_len, kv_len = problem.sizes
    hidden = None if visible is None else ~visible.expand(b, h, q_len, kv_len)
    causal = problem.causal is not None and q_len == kv_len
    return Expected(hidden, causal, problem.scale, b)
