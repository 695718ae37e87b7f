"""attn-spec on the command line, for what is not a test: `describe`, `trace`, `init`, `list`, `explain` and more."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attn_spec
from attn_spec import command_arguments

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation
    from attn_spec.faults import Fault
    from attn_spec.faults.behaviour import BehaviourFault
    from attn_spec.faults.modules import ModuleFault
    from attn_spec.law import Law

FAILED, USAGE_ERROR = 1, 4  # as pytest's


class Failed(Exception):  # noqa: N818
    """What was run did not hold; all that is to be said has been said."""


class UsageError(Exception):
    """Something that was typed can't be used."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command; 0, 1 where what it ran failed, or 4 with one clear message where what was typed can't be used."""
    parser = _parser()
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:
        return 0 if stop.code in (0, None) else USAGE_ERROR
    commands = {
        "describe": _describe,
        "init": _init,
        "list": _list,
        "explain": _explain,
        "replay": _replay,
        "kills": _kills,
    }
    if options.command is None:
        parser.print_help()
        return USAGE_ERROR
    if options.command in ("trace", "heatmap"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            from attn_spec.trace import command as trace_command

        return trace_command.run(options) if options.command == "trace" else trace_command.run_heatmap(options)
    try:
        with warnings.catch_warnings():  # torch warns when it is imported beside no NumPy, which nothing here needs
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            for line in commands[options.command](options):
                print(line)
    except (UsageError, ValueError) as error:  # TargetError and ConfigError are ValueErrors
        print(f"attn-spec: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
    except Failed:
        return FAILED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("attn-spec", description="Verify an attention: pytest --attn-impl=TARGET.")
    parser.add_argument("--version", action="version", version=f"attn-spec {attn_spec.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    describe = commands.add_parser("describe", help="what is measured, declared and assumed about an implementation")
    describe.add_argument("target", metavar="TARGET", help="as for pytest --attn-impl")
    describe.add_argument("--attn-config", metavar="FILE", help="declarations (default: attn.yaml, where it stands)")
    command_arguments.add_init(commands)
    command_arguments.add_trace(commands)
    command_arguments.add_heatmap(commands)
    commands.add_parser("list", help="every law and every fault")
    explain = commands.add_parser("explain", help="one law or fault: what, why, example")
    explain.add_argument("code", metavar="CODE", help="ATN301, default-scale, scale-missing")
    replay = commands.add_parser("replay", help="print what fuzzing found, and run it again")
    replay.add_argument("file", metavar="FILE", help="a file that a judged run has kept")
    replay.add_argument("--attn-impl", metavar="TARGET", help="judge this (default: what it was found in)")
    replay.add_argument("--attn-config", metavar="FILE", help="declarations (default: attn.yaml, where it stands)")
    kills = commands.add_parser("kills", help="which check catches each fault of the catalogue first, by how much")
    kills.add_argument("--profile", choices=("quick", "ci", "deep"), default="quick", help="whose checks (quick)")
    kills.add_argument("--markdown", action="store_true", help="as the table of docs/kills.md")
    return parser


def _init(options: argparse.Namespace) -> Iterator[str]:
    from attn_spec import init_command

    return init_command.run(options)


# describe ------------------------------------------------------------------------------------------------------------


def _describe(options: argparse.Namespace) -> Iterator[str]:
    from attn_spec.report.terminal import table
    from attn_spec.subjects import choose, find_config

    config = find_config(options.attn_config, Path.cwd())
    (chosen,) = choose([options.target], config, named=options.attn_config is not None)
    implementation = chosen.subject.implementation
    yield f"{implementation.name} ({implementation.target})"
    if chosen.source:
        yield f"declarations of {chosen.source}"
    yield ""
    yield from table(implementation)
    yield ""
    yield from _parameters(implementation)
    for dtype, precision in implementation.precision.items():
        evidence = implementation.precision_evidence.get(dtype, "")
        yield f"precision on {dtype}: {precision}{f' ({evidence})' if evidence else ''}"
    for text in implementation.notes:
        yield f"note: {text}"
    for found in implementation.contradictions:
        yield ""
        yield f"{found.field} contradicts what is expected:"
        yield f"  measured: {found.measured.value} ({found.measured.evidence})"
        yield f"  expected: {found.expected.value} ({found.expected.evidence})"
        yield f"  if it is meant, declare in attn.yaml: {found.line}"


def _parameters(implementation: Implementation) -> Iterator[str]:
    signature = getattr(implementation.adapter, "signature", None)
    if signature is None:
        return
    yield f"signature: {signature} (from {signature.source})"
    yield f"understood: {', '.join(f'{parameter} = {role}' for role, parameter in signature.roles.items())}"
    if signature.not_understood:
        yield f"not understood: {', '.join(signature.not_understood)}"
    for given, known in signature.near_misses:
        yield f"  {given} is nearly {known}, and means nothing"


# list and explain ----------------------------------------------------------------------------------------------------


def _laws() -> dict[str, Law]:
    from attn_spec.invariants import load
    from attn_spec.law import LAWS

    load()
    return dict(sorted(LAWS.items(), key=lambda item: int(item[0][3:])))


def _faults() -> dict[str, Fault | ModuleFault | BehaviourFault]:
    from attn_spec.faults import CATALOGUE, behaviour
    from attn_spec.faults.modules import MODULE_FAULTS

    return {**CATALOGUE, **MODULE_FAULTS, **behaviour.load()}


def _list(options: argparse.Namespace) -> Iterator[str]:
    theme = ""
    for law in _laws().values():
        if law.theme != theme:
            theme = law.theme
            yield f"{theme}:"
        yield f"  {law.code:8} {law.name:32} {law.title}{' (advisory)' if law.advisory else ''}"
    yield ""
    theme = ""
    for fault in _faults().values():
        if fault.theme != theme:
            theme = fault.theme
            yield f"faults of {theme}:"
        yield f"  {fault.id:41} {fault.title}"
    yield ""
    yield "`attn-spec explain CODE` tells more about each."


def _explain(options: argparse.Namespace) -> Iterator[str]:
    laws, faults = _laws(), _faults()
    asked = options.code
    law = laws.get(asked.upper()) or next((law for law in laws.values() if law.name == asked.lower()), None)
    if law is not None:
        yield from _explained_law(law)
    elif asked.lower() in faults:
        yield from _explained_fault(faults[asked.lower()])
    else:
        known = [*laws, *(law.name for law in laws.values()), *faults]
        near = difflib.get_close_matches(asked, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "`attn-spec list` shows them all"
        raise UsageError(f"{asked!r} is no law and no fault; {hint}")


def _explained_law(law: Law) -> Iterator[str]:
    yield f"{law.code} {law.name} ({law.theme}{', advisory: red under `strict: true`' if law.advisory else ''})"
    yield f"{law.title}."
    yield ""
    yield textwrap.indent(law.doc, "  ")


def _explained_fault(fault: Fault | ModuleFault | BehaviourFault) -> Iterator[str]:
    yield f"{fault.id} (a fault of {fault.theme})"
    yield f"{fault.title[:1].upper()}{fault.title[1:]}."
    yield ""
    yield textwrap.indent(fault.diff, "  ")
    yield ""
    yield fault.advice
    if fault.equivalent:
        yield f"No comparison of outputs can see it: {fault.equivalent}"
    if fault.sources:
        yield f"Seen in: {', '.join(fault.sources)}"


# replay --------------------------------------------------------------------------------------------------------------


def _replay(options: argparse.Namespace) -> Iterator[str]:
    from attn_spec import finds
    from attn_spec.report.reproducer import reproducer
    from attn_spec.subjects import choose, find_config

    find = finds.read(Path(options.file))
    target = options.attn_impl or find.found_in
    if not target:
        raise UsageError(f"{options.file}: found_in: missing; say what is judged by --attn-impl=TARGET")
    config = find_config(options.attn_config, Path.cwd())
    (chosen,) = choose([target], config, named=options.attn_config is not None)
    yield f"{find.law}: {find.law.title}"
    yield from textwrap.indent(find.problem.to_yaml(), "  ").splitlines()
    if find.changed:
        yield "note: the inputs are not those it was found on: torch draws other numbers here"
    result = chosen.subject.judge(find.law, find.problem)
    yield f"{chosen.name}: {result.outcome}{': ' * bool(result.message)}{result.message}"
    if result.red:
        yield ""
        yield from reproducer(chosen.subject.implementation, result.problem, result).splitlines()
        raise Failed


# kills ---------------------------------------------------------------------------------------------------------------


def _kills(options: argparse.Namespace) -> Iterator[str]:
    from attn_spec import kills
    from attn_spec.check import one_thread

    found: list[kills.Kill] = []
    if options.markdown:
        yield from (f"| {' | '.join(kills.HEADER)} |", f"|{'---|' * len(kills.HEADER)}")
    with one_thread():
        for kill in kills.kills(profile=options.profile):
            found.append(kill)
            fault, law, problem, margin, chosen, best = kills.row(kill)
            if options.markdown:
                yield f"| {fault} | {law} | {f'`{problem}`' if problem else ''} | {margin} | {chosen} | {best} |"
            else:
                yield f"{fault:41} {law:36} {margin:>9}  {chosen:>3} {best:>9}  {problem}"
    yield ""
    yield from kills.summary(found, options.profile)
    yield ""
    beside: list[kills.Caught] = []
    if options.markdown:
        yield from (f"| {' | '.join(kills.CAUGHT_HEADER)} |", f"|{'---|' * len(kills.CAUGHT_HEADER)}")
    for one in kills.all_caught():
        beside.append(one)
        name, law, problem, profile, named = kills.caught_row(one)
        if options.markdown:
            yield f"| {name} | {law} | {f'`{problem}`' if problem else ''} | {profile} | {named} |"
        else:
            yield f"{name:41} {law:36} {profile:>5} {named:>3}  {problem}"
    yield ""
    yield kills.caught_summary(beside)
    if any(kill.result is None for kill in found) or any(one.result is None for one in beside):
        raise Failed


if __name__ == "__main__":
    raise SystemExit(main())
