"""Every fault of the catalogue is red on `quick`; what is found by luck, by fuzzing, does not count."""

from __future__ import annotations

import pytest
import torch

from attn_spec import kills
from attn_spec.choice.matrix import MEANINGS
from attn_spec.cli import main
from attn_spec.conventions import Meaning
from attn_spec.engine import Subject
from attn_spec.faults import CATALOGUE, Fault, behaviour, named
from attn_spec.faults.modules import MODULE_FAULTS
from attn_spec.faults.planted import planted
from attn_spec.kills import Kill, first_kill

torch.set_num_threads(1)


def test_every_fault_is_killed_on_quick() -> None:
    found = [first_kill(fault) for fault in CATALOGUE.values() if not fault.equivalent]
    errors = [f"{kill.fault.id}: {kill.error.code} on {kill.error.problem}: {kill.error.message}"
              for kill in found if kill.error is not None]  # fmt: skip
    assert not errors, f"attn-spec itself failed on {len(errors)} faults:\n" + "\n".join(errors)
    survivors = [kill.fault.id for kill in found if kill.result is None]
    assert not survivors, f"{len(survivors)} faults survive `quick`: {', '.join(survivors)}"


RIGHT = [(None, meaning) for meaning in MEANINGS]
RIGHT += [(fault, Meaning()) for fault in CATALOGUE.values() if fault.equivalent]


@pytest.mark.parametrize("fault, meaning", RIGHT)
def test_nothing_kills_what_is_right(fault: Fault | None, meaning: Meaning) -> None:
    subject = Subject(planted(fault, meaning))
    for law, problem, name in kills.checks("quick", ""):
        subject.judge(law, problem, name)
    red = [result for result in subject.results if result.red]
    if fault is not None and fault.id in ("logits-plus-one", "bias-off-by-row-constant"):
        beside = [r for r in red if r.problem.sinks or r.code in ("ATN741", "ATN742", "ATN743", "ATN744")]
        assert beside  # what cancels in the softmax shows beside a sink, and in the log-sum-exp
        red = [result for result in red if result not in beside]
    assert not [f"{result.code} on {result.problem}: {result.message}" for result in red]


def test_fuzzed_checks_do_not_count() -> None:
    assert not [law for law, _, _ in kills.checks("quick", "masking") if law.name.startswith("fuzzed")]
    assert kills.checks("quick", "masking")[0][0].theme == "masking"


def test_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = [named("scale-missing"), named("causal-one-ahead")]
    monkeypatch.setattr(kills.kills, "__defaults__", (few, "quick"))
    beside = [behaviour.load()["dropout-on-output"], MODULE_FAULTS["context-ignored"]]
    monkeypatch.setattr(kills, "all_caught", lambda: map(kills.caught, beside))
    assert main(["kills", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| fault | first killed by | on | margin | chosen problems | largest margin on them |"
    assert lines[2].startswith("| scale-missing | ATN301 default-scale | `B1-H3-S4-D4-f32` | - | ")
    assert any("2 of 2 faults are killed on `quick`" in line for line in lines)
    assert "Survivors: none." in lines
    assert lines[-4].startswith("| dropout-on-output | ATN1105 dropout-on-weights | `")
    assert lines[-3].startswith("| context-ignored | ATN650 module-answer | `")
    assert lines[-3].endswith("` | quick | yes |")
    assert lines[-1].endswith("2 are caught, 2 of them by name; survivors: none.")


def test_a_survivor_is_named_and_red(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "first_kill", lambda fault, profile: Kill(fault, None))
    monkeypatch.setattr(kills.kills, "__defaults__", ([named("scale-missing")], "quick"))
    monkeypatch.setattr(kills, "all_caught", lambda: iter([kills.Caught(MODULE_FAULTS["context-ignored"], None)]))
    assert main(["kills"]) == 1
    out = capsys.readouterr().out
    assert "scale-missing" in out
    assert "survives" in out
    assert "Survivors: scale-missing." in out
    assert "survivors: context-ignored." in out
