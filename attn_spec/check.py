"""Check an attention from a notebook or a script: the laws, problems and reports of `pytest --attn-impl`, as a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.implementation import Implementation
from attn_spec.adapters.resolve import Target, resolve
from attn_spec.config import ConfigError, ImplementationConfig, said, shipped_ledger
from attn_spec.engine import CheckResult, Subject, stale
from attn_spec.plugin import problems_left
from attn_spec.report import json_report, terminal
from attn_spec.report.judgement import Judgement
from attn_spec.suites import all_tests


@dataclass(frozen=True, eq=False)
class Report:
    """What came of checking one implementation. Prints as the report of `pytest --attn-impl`."""

    judgement: Judgement
    profile: str
    seed: int
    duration_s: float

    @property
    def verdict(self) -> str:
        """ "passed", "failed", or "error" where nothing was checked."""
        return self.judgement.verdict

    @property
    def passed(self) -> bool:
        return self.verdict == "passed"

    @property
    def results(self) -> list[CheckResult]:
        return self.judgement.results

    @property
    def counts(self) -> dict[str, int]:
        return self.judgement.counts

    @property
    def diagnosis(self) -> list[str]:
        """The ids of the faults that give what the implementation gave."""
        return [found.fault.id for found in self.judgement.diagnosis]

    def to_dict(self) -> dict[str, Any]:
        """The document that `--attn-json` writes."""
        made = json_report.document([self.judgement], profile=self.profile, seed=self.seed, duration_s=self.duration_s)
        return dict(json_report.finite(made))

    def __str__(self) -> str:
        return "\n".join(line.text for line in terminal.lines(self.judgement))

    def __repr__(self) -> str:
        return f"<Report: {self.judgement.name} {self.verdict}, {self.counts}>"


def check_attention(
    impl: Callable[..., Any] | Implementation | str,
    *,
    name: str = "",
    profile: str = "quick",
    seed: int = 0,
    dtypes: Collection[str] = (),
    laws: Collection[str] = (),
    budget_s: float = float("inf"),
    exitfirst: bool = False,
    device: str = "cpu",
    **declared: Any,
) -> Report:
    """Judge an attention: a function f(q, k, v, ...), a module, a target as on the command line, or `Implementation`.

    dtypes: of these only.  laws: codes, names or themes, of these only.  budget_s: seconds, after which no check is
    begun.  exitfirst: end with the first check that fails, as pytest's -x, random problems last.  device: where it is
    called, "cpu" or "cuda".  declared: the keys of attn.yaml, such as `layout="BSHD"`, `strict=True`,
    `known_failures=[...]`.
    Raises TargetError where it takes no q, k, v or returns no tensor, ConfigError for a declaration that does not fit.
    """
    start = time.perf_counter()
    try:
        entry = ImplementationConfig.model_validate(declared)
    except ValidationError as error:
        raise ConfigError("; ".join(said(error))) from None
    target = impl if isinstance(impl, str) else ""
    found = resolve(impl) if isinstance(impl, str) else Target(name, "", impl, "")
    with one_thread():
        implementation = adapt(
            found.object,
            name=name or found.name,
            target_name=target,
            import_line=found.import_line,
            declared=entry.declared(),
            device=device,
        )
        subject = Subject(implementation, entry.policy(shipped_ledger(target)))
        subject.deadline = start + budget_s
        tests = list(all_tests())
        if exitfirst:  # random problems take longest, and catch little that no chosen one does
            tests.sort(key=lambda found: found[0] == "test_fuzz")
        for _, test_name, test in tests:
            if not subject.takes(test.law):
                continue
            if laws and not {test.law.code, test.law.name, test.law.theme} & set(laws):
                continue
            for problem in problems_left(test, profile=profile, dtypes=dtypes, seed=seed, device=device):
                test.judge(subject, problem, test_name)
                if exitfirst and subject.results[-1].outcome == "failed":
                    subject.deadline = 0.0
        judgement = Judgement(implementation, subject.results)
        if not laws and not dtypes and not judgement.with_outcome("not-run"):
            judgement.stale = [known for known in stale(subject.policy, subject.results) if known in entry.ledger()]
        if judgement.with_outcome("failed"):
            judgement.diagnose()
    return Report(judgement, profile, seed, time.perf_counter() - start)


@contextmanager
def one_thread() -> Iterator[None]:
    """Problems are small: with two threads on a busy machine a check took fifty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
