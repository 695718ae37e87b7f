"""What a run found about one implementation, in the form that every report is written from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attn_spec import engine
from attn_spec.adapters.implementation import Implementation, described
from attn_spec.engine import CheckResult, KnownFailure
from attn_spec.interpreter import interpreted
from attn_spec.law import LAWS, THEMES
from attn_spec.problem import Problem
from attn_spec.report.reproducer import reproducer

if TYPE_CHECKING:
    from attn_spec.faults.diagnosis import Diagnosis

DIAGNOSED_S = 3.0  # for the diagnosis
PATIENT_S = 60.0  # where the answers that it asks for take long, under Triton's interpreter
SLOW_S = 1.0  # a check that takes longer is not repeated for the sake of its reproducer

# violations that are not about the numbers of an output, which is all that a diagnosis explains
APART = {
    "aliasing",
    "future-gradient",
    "global-state",
    "hangs",
    "inputs-modified",
    "mask-modified",
    "output-dtype",
    "process-died",
    "raises",
    "required",
    "returns",
    "stateful",
    "sys.exit",
}
# laws of everything at once and of two answers that should agree, which say least about a cause
BROAD = ("ATN106", "ATN206", "ATN212", "ATN213", "ATN520", "ATN521", "ATN803", "ATN807")
# laws of extreme inputs, which say little where plain ones are answered wrongly
EXTREME = ("ATN304", "ATN306", "ATN512", "ATN518", "ATN802", "ATN804")
# laws of what is returned beside the output, and of the gradients
BESIDE = ("ATN741", "ATN742", "ATN743", *(f"ATN{n}" for n in range(901, 914)))
RETURNED = ("ATN104", "ATN211")  # laws of the weights that are returned beside an output
AGAIN = ("ATN1204", "ATN1206")  # laws of the same call once more, which say best that a call leaves something behind
ALONE = ("execution", "gradients")  # themes of behaviour faults that leave a plain call's output as it is
# of the violations apart, the ones from which wrong numbers follow; they come before any diagnosis
FIRST = ("process-died", "hangs", "sys.exit", "returns", "inputs-modified", "mask-modified", "global-state")


@dataclass
class Merged:
    """Violations that are one fact seen several times: the same `merge` key, else the same law.

    first: the one on the smallest problem.  failed: how many failed.  tried: how many checks of these laws ran.
    """

    first: CheckResult
    results: list[CheckResult]
    tried: int
    nodeid: str = ""

    @property
    def failed(self) -> int:
        return len(self.results)

    @property
    def codes(self) -> list[str]:
        return sorted({result.code for result in self.results})


@dataclass
class Judgement:
    """Everything that is said about one implementation.

    results: one for each check.  nodeids: theirs, in the same order ("" where there is none).  diagnosis: the faults
    that give what it gave.  stale: entries of its own ledger that no check met.  outdated: the same of our ledger.
    command: what to type before a node id to run that check again.  undiagnosed: why there is no diagnosis.
    """

    implementation: Implementation
    results: list[CheckResult]
    nodeids: list[str] = field(default_factory=list)
    diagnosis: Sequence[Diagnosis] = ()
    stale: list[KnownFailure] = field(default_factory=list)
    outdated: list[KnownFailure] = field(default_factory=list)
    command: str = ""
    undiagnosed: str = "no fault of the catalogue gives what it gave on all problems alike"
    _scripts: dict[int, str] = field(default_factory=dict, repr=False)
    _smallest: dict[int, CheckResult] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.nodeids = self.nodeids or [""] * len(self.results)

    @property
    def name(self) -> str:
        return self.implementation.name

    @property
    def counts(self) -> dict[str, int]:
        return engine.counts(self.results)

    @property
    def verdict(self) -> str:
        verdict = engine.verdict(self.results)
        return "failed" if self.stale and verdict == "passed" else verdict

    @property
    def nothing_ran(self) -> bool:
        return not any(result.outcome in engine.RAN for result in self.results)

    def with_outcome(self, *outcomes: str) -> list[CheckResult]:
        return [result for result in self.results if result.outcome in outcomes]

    def reproducer(self, result: CheckResult) -> str:
        """A script that shows a violation; tried out where people see it, unless the implementation is slow."""
        if id(result) not in self._scripts:
            people_see = any(result in (merged.first, self._smallest.get(id(merged.first))) for merged in self.merged())
            shown = result.duration_s < SLOW_S and people_see
            self._scripts[id(result)] = reproducer(self.implementation, result.problem, result, check=shown)
        return self._scripts[id(result)]

    def smallest(self, one: Merged) -> CheckResult:
        """A violation on the smallest problem that shows it, sought within half a second; `one.first` where none is."""
        first = one.first
        if id(first) not in self._smallest:
            self._smallest[id(first)] = first
            if first.duration_s < SLOW_S / 4 and first.merge not in (*FIRST, "required") and first.code in LAWS:
                from attn_spec.shrink import smaller

                subject, law = engine.Subject(self.implementation), LAWS[first.code]
                problem = smaller(subject, law, first.problem, budget_s=SLOW_S / 2)
                if problem != first.problem:
                    again = subject.judge(law, problem, first.test)
                    same = again.outcome == "failed" and again.merge == first.merge
                    self._smallest[id(first)] = again if same else first
        return self._smallest[id(first)]

    def merged(self) -> list[Merged]:
        """The violations, each fact once; in the order of their codes."""
        groups: dict[str, list[int]] = {}
        for place, result in enumerate(self.results):
            if result.outcome == "failed":
                groups.setdefault(result.merge or result.code, []).append(place)
        ran = Counter(result.code for result in self.results if result.outcome in engine.RAN)
        out = []
        for places in groups.values():
            plain = [n for n in places if self.results[n].merge == "raises" and self.results[n].code == "ATN103"]
            plain = plain or [n for n in places if self.results[n].code in AGAIN]
            smallest = min(plain or places, key=lambda n: _size(self.results[n].problem))
            results = [self.results[n] for n in places]
            tried = sum(ran[code] for code in {result.code for result in results})
            out.append(Merged(self.results[smallest], results, tried, self.nodeids[smallest]))
        return sorted(out, key=lambda merged: int(merged.first.code[3:]))

    def diagnose(self) -> None:
        """Look for the faults that give what the implementation gave. A failure of ours to do so is said."""
        try:
            from attn_spec.faults.diagnosis import diagnose

            failed = self.with_outcome("failed")
            budget_s = PATIENT_S if interpreted() else DIAGNOSED_S
            if any(result.problem.lengths is not None for result in failed):  # what packing explains, nothing else does
                from attn_spec.faults.packing import diagnose as diagnose_packing

                self.diagnosis = diagnose_packing(self.implementation, self.results)
            if not self.diagnosis and any(_about_outputs(result) for result in failed):
                advised = any(is_advisory(result) for result in self.results)
                otherwise = self.problems_to_diagnose(advisories=True) if advised else []
                problems = self.problems_to_diagnose()
                self.diagnosis = diagnose(self.implementation, problems, otherwise=otherwise, budget_s=budget_s)
            if not self.diagnosis and any(result.code in BESIDE for result in failed):
                from attn_spec.faults.beside import diagnose_beside

                problems = self.problems_to_diagnose()
                self.diagnosis = diagnose_beside(self.implementation, problems, budget_s=budget_s)
            unexplained = 0 if self.diagnosis else sum(map(_about_outputs, failed))
            if self.implementation.is_module and not self.diagnosis:
                from attn_spec.faults.module_diagnosis import diagnose_module

                self.diagnosis = diagnose_module(self.implementation, self.results)
            if failed:
                from attn_spec.faults.behaviour import diagnose_behaviour, told

                beside = told(self.results) if self.diagnosis else diagnose_behaviour(self.implementation, self.results)
                themes = {found.fault.theme for found in self.diagnosis}  # which has told its own faults apart
                # what shows in threads or in forward mode alone is not what is wrong with the outputs of all calls
                enough = 0 if self.diagnosis else unexplained
                beside = [
                    found
                    for found in beside
                    if found.fault.theme not in themes
                    and (found.fault.theme not in ALONE or found.reproduces >= enough)
                ]
                self.diagnosis = [*self.diagnosis, *beside]
        except Exception as error:  # the verdict stands without it
            self.undiagnosed = f"there is no diagnosis, for attn-spec itself failed at it: {described(error)}"

    @property
    def telling(self) -> Merged | None:
        """The violation to show first: what others follow from, of the diagnosed theme, one that knows its cause.

        Without a diagnosis, a law that fails more often than not comes before one that fails here and there.
        """
        themes = {found.fault.theme for found in self.diagnosis}
        plain = not themes and any(result.code == "ATN103" for result in self.with_outcome("failed"))

        def rank(one: Merged) -> tuple[bool | float, ...]:
            result = one.first
            conventional, specific = result.merge.startswith("convention:"), bool(result.merge or result.hint)
            theme = THEMES.get(int(result.code[3:]) // 100, "")
            often = one.failed if themes else one.failed / max(one.tried, 1)
            broad = not specific and result.code in BROAD
            extreme = plain and result.code in EXTREME
            first = result.merge in FIRST or (result.merge == "stateful" and not themes)
            return not first, theme not in themes, extreme, not conventional, not specific, broad, -often

        return min(self.merged(), key=rank, default=None)

    @property
    def headline(self) -> str:
        """What is wrong, in one sentence: the diagnosis, else a convention, else the most telling violation."""
        first = self.telling
        if first is None:
            return ""
        if self.diagnosis and first.first.merge not in FIRST:
            return self.diagnosis[0].fault.title
        return f"{first.first.title}: {' '.join(first.first.message.split())}"

    @property
    def explained(self) -> list[str]:
        """The codes of the violations that the diagnosis explains."""
        if not self.diagnosis:
            return []
        about_numbers = [r for r in self.with_outcome("failed") if r.merge not in APART and "stale:" not in r.merge]
        return sorted({r.code for r in about_numbers}, key=lambda code: int(code[3:]))

    def problems_to_diagnose(self, limit: int = 72, *, advisories: bool = False) -> list[Problem]:
        """Problems that a check failed on, then problems on which all held; the smallest of each kind first.

        advisories: with those on which only an advisory failed.
        """
        fatal = {r.problem for r in self.results if r.merge in ("hangs", "process-died")}  # not to be run again
        wrong = [r for r in self.results if r.outcome == "failed" and "stale:" not in r.merge]
        failing = {r.problem for r in [*wrong, *(r for r in self.results if advisories and is_advisory(r))]} - fatal
        passing = {r.problem for r in self.results if r.outcome == "passed"} - failing - fatal
        failing, passing = ({p for p in found if not p.dropout} for found in (failing, passing))  # drawn by chance
        room = max(limit - len(failing), limit // 3)
        return [*_varied(failing)[: limit - room], *_varied(passing)[:room]]


def _about_outputs(result: CheckResult) -> bool:
    """Whether a failed check is about what attention gives for q, k and v, which is what its faults explain."""
    law = LAWS.get(result.code)
    whole = law is not None and law.of_modules
    number = int(result.code[3:])
    return (
        not whole
        and not (1000 <= number < 1200 or number >= 1220)  # more than one call, chance, or other ways to run it
        and result.merge not in APART
        and result.code not in (*BESIDE, *RETURNED)
        and "stale:" not in result.merge
    )


def _varied(problems: set[Problem]) -> list[Problem]:
    """The smallest of each kind, then the second smallest of each, and so on."""
    met: Counter[object] = Counter()
    places: dict[Problem, int] = {}
    for p in sorted(problems, key=_size):
        grouped, length = p.heads != p.kv_heads, (p.q_len > 1) * (1 + (p.kv_len > p.q_len) - (p.kv_len < p.q_len))
        size = next(n for n, most in enumerate((16, 32, 64, 128, p.kv_len)) if p.kv_len <= most)
        kind: tuple[object, ...] = (*(part.kind for part in p.mask), p.delivery, p.values, grouped, length, size)
        kind = (*kind, p.scale is None, p.softcap is None, p.sinks)
        places[p], met[kind] = met[kind], met[kind] + 1
    return sorted(problems, key=lambda p: (places[p], _size(p)))


def _size(problem: Problem) -> tuple[bool, int, str]:
    """Small problems first, empty ones after all others: they show least."""
    return not problem.cost, problem.cost, str(problem)


def is_advisory(result: CheckResult) -> bool:
    """Whether a check failed that is only red under `strict: true`."""
    return result.outcome == "known-failure" and result.message.startswith("advisory")


def count_line(results: list[CheckResult]) -> str:
    """ "212 of 230 checks ran: 12 not supported (no mask parameter), 6 known failures"."""
    ran = sum(result.outcome in ("passed", "failed", "error") for result in results)
    rest = []
    for words, chosen in (
        ("refused", [r for r in results if r.outcome == "refused"]),
        ("not supported", [r for r in results if r.outcome == "unsupported"]),
        ("known failures", [r for r in results if r.outcome == "known-failure" and not is_advisory(r)]),
        ("advisories", [r for r in results if is_advisory(r)]),
        ("not run", [r for r in results if r.outcome == "not-run"]),
    ):
        if chosen:
            noun = {"known failures": "known failure", "advisories": "advisory"}.get(words, words)
            reasons = _reasons(chosen) if words == "not supported" else ""
            rest.append(f"{len(chosen)} {noun if len(chosen) == 1 else words}{reasons}")
    return f"{ran} of {len(results)} checks ran{': ' if rest else ''}{', '.join(rest)}"


def _reasons(results: list[CheckResult]) -> str:
    common = Counter(result.message for result in results if result.message).most_common()
    shown = [message for message, _ in common[:3]] + (["..."] if len(common) > 3 else [])
    return f" ({', '.join(shown)})" if shown else ""
