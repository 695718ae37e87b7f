"""The report for people: what is wrong first, then the evidence, then how much was looked at."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from attn_spec.adapters.implementation import Implementation
from attn_spec.conventions import OF_ROLES
from attn_spec.engine import CheckResult, KnownFailure
from attn_spec.report.judgement import Judgement, Merged, count_line, is_advisory

WIDTH = 118
IN_FULL = 3  # violations shown with all they say, of those that the diagnosis does not explain
LISTED = 6  # refusals and known failures that are listed


@dataclass(frozen=True)
class Line:
    """A line of text and how it is shown: the markup of pytest's terminal."""

    text: str = ""
    markup: dict[str, bool] = field(default_factory=dict)


def lines(judgement: Judgement, *, verbose: bool = False) -> Iterator[Line]:
    """The report on one implementation, line by line."""
    yield from _diagnosis(judgement)
    yield from _violations(judgement, verbose)
    yield from _errors(judgement.with_outcome("error"))
    yield from _ledger(judgement.stale, judgement.outdated)
    known = judgement.with_outcome("known-failure")
    yield from _listed("known failures", [r for r in known if not is_advisory(r)], verbose)
    yield from _listed("advisories", [r for r in known if is_advisory(r)], verbose)
    yield from _listed("refused", judgement.with_outcome("refused"), verbose)
    yield from _conventions(judgement.implementation, verbose)
    yield Line(count_line(judgement.results), {"bold": True})
    yield _verdict(judgement)


def _diagnosis(judgement: Judgement) -> Iterator[Line]:
    found = list(judgement.diagnosis)
    headline = judgement.headline
    if headline and not (found and headline == found[0].fault.title):
        yield from _wrapped(headline, "")
        yield Line()
    if not found and judgement.with_outcome("failed"):
        yield Line(judgement.undiagnosed)
        yield Line()
    if len(found) > 1:
        yield Line("DIAGNOSIS: each of these gives what it gave", {"bold": True, "red": True})
    for one in found:
        head = "" if len(found) > 1 else "DIAGNOSIS: "
        yield Line(f"{head}{one.fault.title}", {"bold": True, "red": True})
        yield Line(f"  {one.fault.id}: reproduces {one.reproduces}/{one.of}")
        for text in one.fault.diff.splitlines():
            yield Line(f"    {text}", {"red": text.startswith("-"), "green": text.startswith("+")})
        yield from _wrapped(one.fault.advice, "  ")
        yield Line()


def _violations(judgement: Judgement, verbose: bool) -> Iterator[Line]:
    merged, telling = judgement.merged(), judgement.telling
    explained = set(judgement.explained)
    first = next((one for one in merged if telling and one.first is telling.first), None)
    in_full: list[Merged] = []
    briefly: list[Merged] = []
    for one in sorted(merged, key=lambda m: (m is not first, set(m.codes) <= explained)):
        room = IN_FULL if not set(one.codes) <= explained else 1
        (in_full if verbose or len(in_full) < room else briefly).append(one)
    for one in in_full:
        yield from _violation(judgement, one, with_reproducer=verbose or one is in_full[0])
    if briefly:
        yield Line("also failed (-v shows them in full):", {"bold": True})
        for one in briefly:
            what = " ".join(one.first.message.split())
            yield Line(_cut(f"  {_name(one)}: {one.failed} of {one.tried}: {what}"))
        yield Line()


def _name(one: Merged) -> str:
    more = [code for code in one.codes if code != one.first.code]
    also = f" (and {', '.join(more)})" if more else ""
    if len(more) > 4:
        also = f" (and {len(more)} other laws)"
    return f"{one.first.code} {one.first.name}{also}"


def _violation(judgement: Judgement, one: Merged, *, with_reproducer: bool) -> Iterator[Line]:
    result = judgement.smallest(one) if with_reproducer else one.first
    yield Line(f"{_name(one)}: {result.title}", {"bold": True, "red": True})
    yield from _wrapped(result.message, "  ")
    if result.evidence.get("bound_from"):
        yield Line(f"  bound: {result.evidence['bound_from']}")
    yield Line(f"  fails {one.failed} of {one.tried}; the smallest problem: {result.problem}")
    if result.hint:
        yield from _wrapped(f"what to change: {result.hint}", "  ")
    if with_reproducer:
        yield Line("  reproducer:")
        for text in judgement.reproducer(result).splitlines():
            yield Line(f"      {text}".rstrip())
    if one.nodeid:
        yield Line(f"  again: {judgement.command} {shlex.quote(one.nodeid)}")
    yield Line()


def _errors(results: list[CheckResult]) -> Iterator[Line]:
    for message, count in Counter(result.message for result in results).most_common(LISTED):
        yield Line(f"ERROR, which is no verdict ({count} checks): {message}", {"red": True, "bold": True})


def _ledger(stale: list[KnownFailure], outdated: list[KnownFailure]) -> Iterator[Line]:
    for known in stale:
        text = f"known_failures: the entry {known.check} on {known.problem!r} meets no check; take it out"
        yield Line(text, {"red": True})
    for known in outdated:
        yield Line(f"note: the ledger that ships with attn-spec lists {known.check} on {known.problem!r}: met no check")


def _listed(title: str, results: list[CheckResult], verbose: bool) -> Iterator[Line]:
    """What did not fail and yet did not pass, each reason once, with the laws and the number of checks."""
    groups: dict[str, list[CheckResult]] = {}
    for result in results:
        groups.setdefault(_reason(result), []).append(result)
    if groups:
        yield Line(f"{title}:")
    ordered = sorted(groups.values(), key=len, reverse=True)
    for group in ordered if verbose else ordered[:LISTED]:
        codes = list(dict.fromkeys(result.code for result in group))
        laws = (
            f"{codes[0]} {group[0].name}" if len(codes) == 1 else f"{', '.join(codes[:3])}{', ...' * (len(codes) > 3)}"
        )
        text = f"{len(group):4} {laws}: {_reason(group[0], exact=True)}"
        yield Line(text if verbose else _cut(text))
    if len(groups) > LISTED and not verbose:
        yield Line(f"     and {sum(len(g) for g in ordered[LISTED:])} more (-v shows them)")


def _reason(result: CheckResult, *, exact: bool = False) -> str:
    """Why a check is as it is: the exception without the axes it was refused on; numbers apart unless exact."""
    text = " ".join(result.message.split()).removeprefix("advisory (red under `strict: true`): ")
    if result.outcome == "refused":
        text = text.partition(": ")[2] or text
    return text if exact else re.sub(r"[\d.e+-]+", "#", text)


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def _conventions(implementation: Implementation, verbose: bool) -> Iterator[Line]:
    if verbose:
        yield Line("conventions:")
        for text in table(implementation):
            yield Line(f"  {text}")
    else:
        conventions = implementation.conventions
        parts = [f"{name} {finding.value}" for name, finding in conventions.rows() if finding.how != "assumed"]
        if parts:
            yield from _wrapped(f"conventions: {', '.join(parts)} (`attn-spec describe` says how each is known)", "")
    for text in implementation.notes:
        yield Line(f"note: {text}")


def table(implementation: Implementation) -> list[str]:
    """The conventions as a table: field, value, measured / declared / assumed, evidence."""
    rows = [("field", "value", "known by", "evidence")]
    rows += [(name, f.value, f.how, f.evidence) for name, f in implementation.facts]
    roles = getattr(getattr(implementation.adapter, "signature", None), "roles", {})
    for name, found in implementation.conventions.rows():
        if name not in OF_ROLES or found.how != "assumed" or any(role in roles for role in OF_ROLES[name]):
            rows.append((name, found.value, found.how, found.evidence))
    widths = [max(len(row[n]) for row in rows) for n in range(3)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]]) for row in rows]


def _verdict(judgement: Judgement) -> Line:
    if judgement.verdict == "passed":
        return Line(f"{judgement.name} passed", {"bold": True, "green": True})
    if judgement.verdict == "error":
        why = "nothing was checked" if judgement.nothing_ran else "attn-spec or another plugin failed, see above"
        return Line(f"{judgement.name}: no verdict: {why}", {"bold": True, "red": True})
    return Line(f"{judgement.name} failed", {"bold": True, "red": True})


def _wrapped(text: Any, indent: str) -> Iterator[Line]:
    for paragraph in str(text).splitlines():
        wrapper = textwrap.TextWrapper(WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ")
        wrapper.break_on_hyphens = wrapper.break_long_words = False
        yield from (Line(part) for part in wrapper.wrap(paragraph))
