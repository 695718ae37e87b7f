"""A session: the control, every case against every baseline, the correction for how many there are, the exit status."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from attn_spec.adapters.implementation import Implementation, described
from attn_spec.benchmark import memory, stats
from attn_spec.benchmark.calls import TimedImplementation
from attn_spec.benchmark.cases import Case
from attn_spec.benchmark.clock import Clock, Distrusted
from attn_spec.benchmark.contenders import Stage, same_work
from attn_spec.benchmark.memory import Scaling
from attn_spec.benchmark.modules import module_work
from attn_spec.benchmark.overheads import Overheads, overheads
from attn_spec.benchmark.paired import FAIL, INCONCLUSIVE, LOOKS, MEASURED, Comparison, Plan, compare
from attn_spec.benchmark.roofline import Ceilings, require_possible
from attn_spec.benchmark.work import Work
from attn_spec.law import Refused, Unsupported, Violation

DISTRUSTED, NOT_TIMED, NOT_RUN = "DISTRUSTED", "not timed", "not run"
MOVED = 0.02  # an A/A interval that lies wholly further than this from 1 voids the session
OK, FAILED, INTERRUPTED, NOTHING = 0, 1, 2, 5  # pytest's


@dataclass(eq=False)
class CaseResult:
    """What came of one implementation on one case against one baseline.

    outcome: PASS, FAIL or INCONCLUSIVE against the limit, "measured" without one, DISTRUSTED where the measurement or
    the output is wrong (red), "not timed" where the implementation does not take the case, "not run" after Ctrl-C.
    """

    case: Case
    implementation: str
    baseline: str
    outcome: str
    reason: str = ""
    comparison: Comparison | None = None
    work: Work | None = None
    ceilings: Ceilings | None = None
    overheads: Overheads | None = None

    @property
    def seconds(self) -> float:
        """The median of a call. Raises ValueError where nothing was timed."""
        return stats.median([] if self.comparison is None else self.comparison.candidate_s)


@dataclass(eq=False)
class MemoryResult:
    """The peak memory of one implementation over the lengths of an entry. linear: whether that is asked for."""

    entry: str
    implementation: str
    scaling: Scaling | None
    reason: str = ""
    must_be_linear: bool = False

    @property
    def failed(self) -> bool:
        if not self.must_be_linear:
            return False
        return self.scaling is None or not self.scaling.linear


@dataclass(eq=False)
class Results:
    """Everything that a session found, whether or not it came to its end."""

    cases: list[CaseResult] = field(default_factory=list)
    memory: list[MemoryResult] = field(default_factory=list)
    control: Comparison | None = None
    void: str = ""
    interrupted: bool = False
    inconclusive_fails: bool = False

    @property
    def timed(self) -> list[CaseResult]:
        return [one for one in self.cases if one.comparison is not None]

    def ratios(self) -> dict[tuple[str, str], list[float]]:
        """The ratios of each implementation to each baseline."""
        out: dict[tuple[str, str], list[float]] = {}
        for one in self.timed:
            if one.comparison is not None and one.outcome != DISTRUSTED:
                out.setdefault((one.implementation, one.baseline), []).append(one.comparison.ratio)
        return out

    @property
    def exit_status(self) -> int:
        """pytest's: 0 nothing failed, 1 something did, 2 interrupted, 5 nothing was timed."""
        red = {FAIL, DISTRUSTED} | ({INCONCLUSIVE} if self.inconclusive_fails else set())
        if self.interrupted:
            return INTERRUPTED
        if any(one.outcome in red for one in self.cases) or any(one.failed for one in self.memory):
            return FAILED
        return OK if self.timed else NOTHING


@dataclass(eq=False)
class Session:
    """Times implementations on cases against baselines.

    ceilings: those of the machine for a dtype; `fresh` measures them again.  say: takes a line of progress.
    """

    implementations: Sequence[Implementation]
    baselines: Sequence[Implementation]
    cases: Sequence[Case]
    clock: Clock
    plan: Plan
    ceilings: Callable[[str, bool], Ceilings]
    say: Callable[[str], None] = print
    inconclusive_fails: bool = False
    with_memory: bool = True

    def run(self) -> Results:
        """All of it; Ctrl-C ends it early and keeps what is done."""
        self.results = results = Results(inconclusive_fails=self.inconclusive_fails)
        wanted = [case for case in self.cases if not case.skipped]
        self.total = len(wanted) * self._comparisons_each
        gates = sum(case.limit is not None for case in wanted) * self._comparisons_each
        self.plan = dataclasses.replace(self.plan, cases=max(1, gates))
        self.start, self.done = self.clock.now(), 0
        try:
            self._control(wanted)
            for case in self.cases:
                results.cases += self._case(case)
            if self.with_memory:
                results.memory += self._memory()
        except KeyboardInterrupt:
            results.interrupted = True
            over = {(one.case.name, one.implementation, one.baseline) for one in results.cases}
            for case, implementation, baseline in self._every():
                if (case.name, implementation.name, baseline.name) not in over:
                    reason = "the run was interrupted"
                    results.cases.append(CaseResult(case, implementation.name, baseline.name, NOT_RUN, reason))
        settle(results)
        return results

    @property
    def _comparisons_each(self) -> int:
        return len(self.implementations) * len(self.baselines)

    def _every(self) -> Iterator[tuple[Case, Implementation, Implementation]]:
        for case in self.cases:
            for implementation in self.implementations:
                for baseline in self.baselines:
                    yield case, implementation, baseline

    # the control ---------------------------------------------------------------------------------------------------

    def _control(self, cases: Sequence[Case]) -> None:
        """A baseline against itself: where that moves, nothing else that is measured now means anything."""
        for case in sorted(cases, key=lambda c: (c.direction != "forward", c.problem.cost)):
            for baseline in self.baselines:
                try:
                    stage = Stage(case.problem, case.direction, seed=self.plan.seed)
                    one, other = (stage.contender(baseline, name) for name in (f"{baseline.name} again", baseline.name))
                    plan = dataclasses.replace(self.plan, limit=None, precision=MOVED / 2, looks=LOOKS[:3], cases=1)
                    with torch.set_grad_enabled(case.direction != "forward"):
                        found = compare(self._clock_for(case), one, other, plan)
                except (Unsupported, Refused, Violation, Distrusted):
                    continue
                low, high = found.interval
                self.results.control = found
                if low > 1 + MOVED or high < 1 / (1 + MOVED):
                    self.results.void = (
                        f"the control moved: {baseline.name} against itself gave {found.ratio:.3f} ({low:.3f} to "
                        f"{high:.3f}) on {case.name}; run again on a quieter machine"
                    )
                moved = f": {self.results.void}" if self.results.void else ""
                self.say(f"control: {baseline.name} against itself {found.ratio:.3f} ({low:.3f} to {high:.3f}){moved}")
                return

    # the cases -----------------------------------------------------------------------------------------------------

    def _case(self, case: Case) -> Iterator[CaseResult]:
        """Results one by one, so that those before an interruption are kept."""
        if case.skipped:
            for implementation in self.implementations:
                for baseline in self.baselines:
                    yield CaseResult(case, implementation.name, baseline.name, NOT_TIMED, case.skipped)
            return
        stage = Stage(case.problem, case.direction, seed=self.plan.seed)
        standing: dict[str, TimedImplementation | CaseResult] = {}
        for baseline in self.baselines:
            standing[baseline.name] = self._contender(stage, case, baseline, f"{baseline.name} (baseline)")
        for implementation in self.implementations:
            candidate = self._contender(stage, case, implementation, implementation.name)
            extra = self._overheads(candidate)
            for baseline in self.baselines:
                other = self._beside(stage, case, implementation, baseline, standing[baseline.name])
                result = self._against(stage, case, candidate, other, implementation, baseline)
                result.overheads = extra
                self.done += 1
                self.say(f"[{self.done}/{self.total}] {progress(result)}{self._left()}")
                yield result

    def _beside(
        self,
        stage: Stage,
        case: Case,
        implementation: Implementation,
        baseline: Implementation,
        standing: TimedImplementation | CaseResult,
    ) -> TimedImplementation | CaseResult:
        """The baseline as an implementation is compared with it: beside a module, between the module's projections."""
        if not implementation.is_module or baseline.is_module:
            return standing
        return self._made(lambda: stage.of_module(implementation).around(baseline, baseline.name), case, baseline)

    def _contender(
        self, stage: Stage, case: Case, implementation: Implementation, name: str
    ) -> TimedImplementation | CaseResult:
        """The contender, or why there is none."""
        return self._made(lambda: stage.contender(implementation, name), case, implementation)

    def _made(
        self, make: Callable[[], TimedImplementation], case: Case, implementation: Implementation
    ) -> TimedImplementation | CaseResult:
        try:
            return make()
        except (Unsupported, Refused) as error:
            return CaseResult(case, implementation.name, "", NOT_TIMED, str(error))
        except (Violation, Distrusted) as error:
            return CaseResult(case, implementation.name, "", DISTRUSTED, str(error))

    def _against(
        self,
        stage: Stage,
        case: Case,
        candidate: TimedImplementation | CaseResult,
        standing: TimedImplementation | CaseResult,
        implementation: Implementation,
        baseline: Implementation,
    ) -> CaseResult:
        result = CaseResult(case, implementation.name, baseline.name, NOT_TIMED)
        if isinstance(candidate, CaseResult):
            result.outcome, result.reason = candidate.outcome, candidate.reason
            return result
        if isinstance(standing, CaseResult):
            result.reason = f"the baseline: {standing.reason}"
            return result
        sets = stage.of_module(implementation) if implementation.is_module else None
        problem = case.problem if sets is None else sets.problem
        result.reason = same_work(implementation, baseline, problem)
        if result.reason:
            return result
        weights = {} if sets is None else sets.weights
        result.work = module_work(problem, case.direction, weights, implementation.conventions.meaning.alignment)
        plan = dataclasses.replace(self.plan, limit=case.limit)
        try:
            with torch.set_grad_enabled(case.direction != "forward"):
                found = compare(self._clock_for(case), candidate, standing, plan)
            for name, times in ((candidate.name, found.candidate_s), (standing.name, found.baseline_s)):
                result.ceilings = self._possible(case, result.work, stats.median(times), name)
        except Distrusted as error:
            of_baseline = str(error).startswith(f"{standing.name}: ")
            result.outcome = NOT_TIMED if of_baseline else DISTRUSTED
            result.reason = str(error)
        except Exception as error:
            result.outcome, result.reason = DISTRUSTED, f"raised while it was timed: {described(error)}"
        else:
            result.comparison = found
            result.outcome = found.verdict(min(1.0, found.p_fail * plan.cases))  # Holm may settle it for FAIL later
        return result

    def _clock_for(self, case: Case) -> Clock:
        """A backward pass is another call each time, which no CUDA graph can hold."""
        return self.clock if case.direction == "forward" else getattr(self.clock, "eager", self.clock)

    def _possible(self, case: Case, done: Work, seconds: float, name: str) -> Ceilings:
        """The ceilings. Raises Distrusted for a time below them, once they were measured again."""
        known = self.ceilings(case.problem.dtype, False)
        try:
            require_possible(known, done, seconds, name)
        except Distrusted:
            known = self.ceilings(case.problem.dtype, True)
            require_possible(known, done, seconds, name)
        return known

    def _overheads(self, candidate: TimedImplementation | CaseResult) -> Overheads | None:
        if isinstance(candidate, CaseResult) or candidate.direction != "forward":
            return None
        try:
            with torch.no_grad():
                return overheads(candidate.prepared[0].call)
        except Exception:  # a profiler that fails says nothing about the implementation
            return None

    def _left(self) -> str:
        left = (self.clock.now() - self.start) / self.done * (self.total - self.done)
        return f"; about {math.ceil(left)} s left" if self.done < self.total else ""

    # memory --------------------------------------------------------------------------------------------------------

    def _memory(self) -> Iterator[MemoryResult]:
        entries = {case.entry: case.memory for case in self.cases if case.memory != "no" and not case.skipped}
        for entry, asked in entries.items():
            problems = {c.problem.kv_len: c.problem for c in self.cases if c.entry == entry and not c.skipped}
            if len(problems) < 2:
                continue
            longest = sorted(problems.values(), key=lambda p: p.kv_len)[-3:]
            for implementation in unique([*self.implementations, *self.baselines]):
                result = MemoryResult(entry, implementation.name, None, must_be_linear=asked == "linear")
                result.must_be_linear &= implementation in self.implementations
                try:
                    result.scaling = memory.scaling(implementation, longest)
                except (Unsupported, Refused) as error:
                    result.reason, result.must_be_linear = str(error), False
                except Violation as error:
                    result.reason = str(error)
                self.say(f"memory: {entry}: {implementation.name}: {result.scaling or result.reason}")
                yield result


def unique(implementations: Sequence[Implementation]) -> list[Implementation]:
    """Each name once, the first of it."""
    return list({one.name: one for one in reversed(implementations)}.values())[::-1]


def settle(results: Results) -> None:
    """The final verdicts: corrected by Holm for how many cases can fail, and none in a void session."""
    gated = [one for one in results.timed if one.comparison is not None and one.case.limit is not None]
    p = {str(n): one.comparison.p_fail for n, one in enumerate(gated) if one.comparison is not None}
    corrected = stats.holm(p)
    for n, one in enumerate(gated):
        assert one.comparison is not None
        one.outcome = one.comparison.verdict(corrected[str(n)])
        if one.outcome == INCONCLUSIVE and one.comparison.verdict() == FAIL:
            one.reason = f"beyond the limit alone, but not as one of {len(gated)} cases (Holm's correction)"
        if results.void:
            one.outcome, one.reason = INCONCLUSIVE, results.void


def progress(result: CaseResult) -> str:
    """One line on a case that is done."""
    found = result.comparison
    head = f"{result.case.name} {result.implementation}"
    if found is None:
        return f"{head}: {result.outcome}: {result.reason}"
    low, high = found.interval
    verdict = "" if result.outcome == MEASURED else f" {result.outcome}"
    against = f"{found.ratio:.3f} ({low:.3f} to {high:.3f}) of {result.baseline}"
    return f"{head}: {result.seconds * 1e3:.4g} ms, {against}, {len(found.log_ratios)} pairs{verdict}"
