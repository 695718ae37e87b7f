"""One check: a law on a problem for an implementation, and what came of it. Every door goes through `Subject.judge`."""

from __future__ import annotations

import copy
import fnmatch
import re
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from attn_spec.adapters.implementation import Implementation, described, is_clear
from attn_spec.conventions import Finding
from attn_spec.law import LAWS, Advisory, Law, NotRun, Refused, Unsupported, Violation
from attn_spec.masks import Alibi, Causal, Lengths, Window
from attn_spec.problem import Problem

OUTCOMES = ("passed", "failed", "refused", "unsupported", "known-failure", "not-run", "error")
RED = ("failed", "error")
RAN = ("passed", "failed", "known-failure", "error")

# which law a convention belongs to: a contradiction there is that law's failure
FIELD_LAWS = {
    "layout_out": "ATN101",
    "alignment": "ATN404",
    "causal": "ATN406",
    "polarity": "ATN501",
    "padding_polarity": "ATN516",
    "empty_rows": "ATN510",
    "grouping": "ATN601",
    "window": "ATN702",
    "window_alignment": "ATN704",
    "alibi": "ATN721",
    "softcap_order": "ATN712",
    "lse_base": "ATN741",
}


@dataclass(frozen=True)
class KnownFailure:
    """An entry of the ledger: a check that is known to fail, and why. An entry that holds is red.

    check: the code or the name of a law.  problem: a pattern over the one-line form of problems (fnmatch).
    """

    check: str
    reason: str
    problem: str = "*"
    link: str = ""

    def covers(self, law: Law, problem: Problem) -> bool:
        return self.check in (law.code, law.name) and fnmatch.fnmatchcase(
            str(problem), self.problem.replace("[", "[[]")
        )


@dataclass(frozen=True)
class Policy:
    """How strictly an implementation is judged.

    strict: advisory laws are red.  require: optional axes (see `optional_axes`), laws or parameters whose refusal or
    absence is red.
    """

    strict: bool = False
    require: tuple[str, ...] = ()
    known_failures: tuple[KnownFailure, ...] = ()


@dataclass
class CheckResult:
    """What came of one check. `message` says what was expected and what was received, or why it did not run."""

    code: str
    name: str
    title: str
    outcome: str
    problem: Problem
    message: str = ""
    test: str = ""
    hint: str = ""
    merge: str = ""
    setup: str = ""
    reproducer: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        data = {key: value for key, value in asdict(self).items() if key != "problem"}
        return {**data, "problem": self.problem.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CheckResult:
        known = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        return cls(**{**known, "problem": Problem.from_dict(data["problem"])})

    @property
    def red(self) -> bool:
        return self.outcome in RED


AXES = (
    *("zero-size", "gqa", "d_v", "head_dim", "tile", "float64", "float32", "bfloat16", "float16", "mask-dtype"),
    *("mask-rank", "mask-with-causal", "causal-cross", "strides", "scale-value"),
    *("window", "softcap", "alibi", "sinks", "lengths", "dropout"),
)


def optional_axes(problem: Problem) -> list[str]:
    """The axes of a problem on which an implementation may refuse with a clear exception."""
    p, axes = problem, []
    masked, causal = p.masked, p.causal is not None
    for name, present in (
        ("zero-size", not (p.batch and p.q_len and p.kv_len)),
        ("gqa", p.heads != p.kv_heads),
        ("d_v", p.v_dim != p.head_dim),
        ("head_dim", p.head_dim not in (64, 128)),
        ("tile", bool(p.q_len % 128 or p.kv_len % 128)),
        (p.dtype, p.dtype != "float32"),
        ("mask-dtype", masked and p.delivery.form == "additive"),
        ("mask-rank", masked and p.delivery.form != "key-padding" and p.delivery.shape != "BHQK"),
        ("mask-with-causal", masked and causal and p.delivery.flag),
        ("causal-cross", causal and p.q_len != p.kv_len),
        ("strides", p.layout != "contiguous" or p.delivery.strided),
        ("scale-value", p.scale is not None and p.scale <= 0),
        ("window", p.window is not None),
        ("softcap", p.softcap is not None),
        ("alibi", p.alibi is not None),
        ("sinks", p.sinks),
        ("lengths", p.lengths is not None),
        ("dropout", p.dropout > 0),
    ):
        if present:
            axes.append(name)
    return axes


def axes_alone(problem: Problem, axes: list[str]) -> list[Problem]:
    """For each optional axis of a problem, a plain problem that has that axis only."""
    p, plain = problem, Problem(batch=problem.batch or 2, q_len=128, kv_len=128, head_dim=64, v_dim=64)
    tensor = tuple(part for part in p.mask if not isinstance(part, (Window, Alibi, Lengths)))
    masked = plain.replace(heads=p.heads, kv_heads=p.heads, mask=tensor, delivery=p.delivery)
    alone = {
        "zero-size": lambda: plain.replace(batch=p.batch, q_len=min(p.q_len, 1) * 128, kv_len=min(p.kv_len, 1) * 128),
        "gqa": lambda: plain.replace(heads=p.heads, kv_heads=p.kv_heads),
        "d_v": lambda: plain.replace(v_dim=p.v_dim, head_dim=p.head_dim),
        "head_dim": lambda: plain.replace(v_dim=p.head_dim, head_dim=p.head_dim),
        "tile": lambda: plain.replace(q_len=p.q_len or 1, kv_len=p.kv_len or 1),
        "mask-dtype": lambda: masked,
        "mask-rank": lambda: masked,
        "causal-cross": lambda: plain.replace(q_len=p.q_len, kv_len=p.kv_len, mask=(p.causal or Causal(),)),
        "strides": lambda: plain.replace(layout=p.layout),
        "scale-value": lambda: plain.replace(scale=p.scale),
        "window": lambda: plain.replace(mask=tuple(part for part in p.mask if part is p.window)),
        "softcap": lambda: plain.replace(softcap=p.softcap),
        "alibi": lambda: plain.replace(mask=tuple(part for part in p.mask if part is p.alibi)),
        "sinks": lambda: plain.replace(sinks=True),
        "lengths": lambda: p.replace(
            mask=tuple(part for part in p.mask if part is p.lengths), softcap=None, dropout=0.0
        ),
        "dropout": lambda: plain.replace(dropout=p.dropout),
        p.dtype: lambda: plain.replace(dtype=p.dtype),
    }
    return [alone[axis]() for axis in axes]


def _deliberate(error: Refused) -> bool:
    """Whether the message reads as a decision of the author, and not as an accident of shapes or dtypes."""
    words = r"support|implement|not allowed|without overflow"
    return isinstance(error.error, NotImplementedError) or bool(re.search(words, str(error)))


def as_asked(implementation: Implementation, problem: Problem) -> Problem:
    """The problem as the implementation understands it: of sizes it can have, causal where it always is."""
    return implementation.as_asked(problem)


class Subject:
    """One implementation under test: judged law by law, problem by problem; keeps every result."""

    def __init__(self, implementation: Implementation, policy: Policy | None = None) -> None:
        self.implementation = implementation
        self.policy = policy or Policy()
        self.results: list[CheckResult] = []
        self.deadline = float("inf")  # by time.perf_counter(); what has not started by then is not run
        self._taken: dict[Problem, bool] = {}
        self._judged: set[tuple[str, Problem]] = set()

    @property
    def name(self) -> str:
        return self.implementation.name

    def takes(self, law: Law) -> bool:
        """Whether a law is about this kind of implementation."""
        return not law.of_modules or self.implementation.is_module

    def judge(self, law: Law, problem: Problem, test: str = "", *, started: bool = False) -> CheckResult:
        """Try one law on one problem. Never raises on account of the implementation.

        started: the check began before the budget ended, so it is finished.
        """
        start = time.perf_counter()
        asked, problem = problem, as_asked(self.implementation, problem)
        if problem.sizes_in_full != asked.sizes_in_full and (law.code, problem) in self._judged:
            return self._same_again(law, problem, test)
        self._judged.add((law.code, problem))
        if start > self.deadline and not started:
            return self.not_run(law, problem, test)
        outcome, violation = self._outcome(law, problem)
        known = self.known(law, problem)
        message = str(violation) if violation is not None else ""
        if known is not None and outcome == "failed":
            link = f" ({known.link})" if known.link else ""
            outcome, message = "known-failure", f"{known.reason}{link}: {message}"
        elif known is not None and outcome == "passed":
            outcome = "failed"
            violation = Violation(
                f"the ledger says that this fails ({known.reason}), and it holds",
                hint=f"take the entry for {known.check} on {known.problem!r} out of known_failures",
                merge=f"stale:{known.check}",
            )
            message = violation.message
        elif isinstance(violation, Advisory) and outcome == "failed" and not self.policy.strict:
            outcome, message = "known-failure", f"advisory (red under `strict: true`): {message}"
        result = CheckResult(law.code, law.name, law.title, outcome, problem, message, test)
        if isinstance(violation, Violation) and outcome == "failed":
            self._explain(result, law, problem, violation)
        result.duration_s = time.perf_counter() - start
        self.results.append(result)
        return result

    def not_run(self, law: Law, problem: Problem, test: str = "") -> CheckResult:
        """A check that did not start before the budget ended."""
        result = CheckResult(law.code, law.name, law.title, "not-run", problem, "the budget ended first", test)
        self.results.append(result)
        return result

    def _same_again(self, law: Law, problem: Problem, test: str) -> CheckResult:
        """A check that, made to fit the sizes a module can have, is one that was judged before."""
        said = "with the sizes it can be built for, the same as another check"
        result = CheckResult(law.code, law.name, law.title, "unsupported", problem, said, test)
        self.results.append(result)
        return result

    def known(self, law: Law, problem: Problem) -> KnownFailure | None:
        """The entry of the ledger for a check."""
        problem = as_asked(self.implementation, problem)
        return next((k for k in self.policy.known_failures if k.covers(law, problem)), None)

    def attempt(self, law: Law, problem: Problem) -> tuple[str, Violation | None]:
        """The outcome of a check that is not kept among the results, with the violation where it is red.

        A known failure that holds has passed.
        """
        problem = as_asked(self.implementation, problem)
        outcome, violation = self._outcome(law, problem)
        if outcome not in RED or not isinstance(violation, Violation):
            return outcome, None
        if self.known(law, problem) or (isinstance(violation, Advisory) and not self.policy.strict):
            return "known-failure", None
        return outcome, violation

    def _outcome(self, law: Law, problem: Problem) -> tuple[str, Exception | None]:
        required = self.policy.require
        try:
            law(self.implementation, problem)
        except NotRun as error:
            return "not-run", error
        except Unsupported as error:
            if {law.code, law.name} & set(required) or _names_parameter(str(error), required):
                why = Violation(f"required, but {error}", merge="required", hint="`require:` in attn.yaml asks for it")
                return "failed", why
            return "unsupported", error
        except Refused as error:
            axes = optional_axes(problem)
            if law.of_modules:  # hidden states are of any size
                axes = [axis for axis in axes if axis not in ("head_dim", "tile")]
            demanded = sorted({*axes, law.code, law.name} & set(required))
            if not axes:
                why = Violation(f"raised on a problem that it must support: {error}", merge="raises")
            elif not is_clear(error.error):
                why = Violation(f"crashed inside, where a refusal would say what is not taken: {error}", merge="raises")
            elif self._taken_alone(problem, axes) and not _deliberate(error):
                alone = ", ".join(a for a in axes if a not in ("tile", "head_dim"))
                why = Violation(f"takes each of {alone} alone and raises on them together: {error}", merge="raises")
            elif axes == ["gqa"] and self.implementation.promises_groups and not _deliberate(error):
                groups = f"{problem.heads} heads and {problem.kv_heads} key/value heads"
                why = Violation(f"raises with {groups}, which its constructor takes: {error}", merge="raises")
            elif demanded:
                why = Violation(f"refused {', '.join(demanded)}, which `require:` asks for: {error}", merge="required")
            else:
                return "refused", Refused(f"{', '.join(axes)}: {error}", error.error)
            why.evidence["raised"] = str(error)
            return "failed", why
        except Violation as error:
            return "failed", error
        except Exception as error:  # an error of ours must not pass for one of theirs
            return "error", Violation(f"attn-spec itself failed: {described(error)}")
        return "passed", None

    def _taken_alone(self, problem: Problem, axes: list[str]) -> bool:
        """Whether several axes that it refuses together are each taken by themselves: then it is no refusal of one."""
        mixed = problem.masked and problem.delivery.dtype not in ("", problem.dtype)  # a mask of another dtype than q
        if mixed or ("zero-size" in axes and self.implementation.is_module):
            return False
        if "mask-with-causal" in axes or len(set(axes) - {"tile", "head_dim", "mask-rank"}) < 2:
            return False
        lengths = Problem(q_len=problem.q_len, kv_len=problem.kv_len, head_dim=64, v_dim=64)
        return self._takes(lengths) and all(self._takes(alone) for alone in axes_alone(problem, axes))

    def _takes(self, problem: Problem) -> bool:
        problem = as_asked(self.implementation, problem)
        if problem not in self._taken:
            try:
                self.implementation(problem.arguments(self.implementation.conventions.meaning.alignment))
                self._taken[problem] = True
            except (Unsupported, Refused, Violation):
                self._taken[problem] = False
        return self._taken[problem]

    def _explain(self, result: CheckResult, law: Law, problem: Problem, violation: Violation) -> None:
        result.hint, result.merge = violation.hint, violation.merge
        result.setup, result.reproducer, result.evidence = violation.setup, violation.reproducer, violation.evidence
        for contradiction in self.implementation.contradictions:
            field_ = contradiction.field
            own = FIELD_LAWS.get(field_) == law.code and (
                field_ != "causal" or contradiction.measured.value == "always"
            )
            if own or self._holds_with(law, problem, field_, contradiction.measured):
                result.merge = f"convention:{field_}"
                result.hint = (
                    f"measured: {contradiction.measured.value} ({contradiction.measured.evidence}); expected: "
                    f"{contradiction.expected.value} ({contradiction.expected.evidence}). If it is meant, declare "
                    f"`{contradiction.line}` in attn.yaml"
                )
                return

    def _holds_with(self, law: Law, problem: Problem, field_: str, measured: Finding) -> bool:
        """Whether the law holds once a convention is taken as it was measured."""
        other = copy.copy(self.implementation)
        other.conventions = other.conventions.replace(**{field_: measured})
        other.adapter = copy.copy(other.adapter)
        if hasattr(other.adapter, "conventions"):
            other.adapter.conventions = other.conventions
        try:
            law(other, as_asked(other, problem))
        except Exception:  # whatever it is, it does not hold
            return False
        return True


def _names_parameter(reason: str, required: tuple[str, ...]) -> bool:
    """Whether "no scale parameter" is about something required."""
    return any(f"no {word} " in reason or reason == f"no {word}" for word in required)


def stale(policy: Policy, results: list[CheckResult]) -> list[KnownFailure]:
    """Entries of the ledger that no check met; only meaningful after a whole run.

    An entry for a law that is tried on random problems may wait for a longer search.
    """
    met = {
        known
        for result in results
        for known in policy.known_failures
        if result.code in LAWS
        and (
            known.covers(LAWS[result.code], result.problem)
            or (known.check in (result.code, result.name) and "random_problems" in result.evidence)
        )
    }
    return [known for known in policy.known_failures if known not in met]


def counts(results: list[CheckResult]) -> dict[str, int]:
    """How many checks had each outcome, all seven named."""
    return {outcome: sum(r.outcome == outcome for r in results) for outcome in OUTCOMES}


def verdict(results: list[CheckResult]) -> str:
    """ "passed", "failed" or "error" (nothing was checked, or an error of ours)."""
    if any(r.outcome == "failed" for r in results):
        return "failed"
    if any(r.outcome == "error" for r in results) or not any(r.outcome in RAN for r in results):
        return "error"
    return "passed"
