"""Heat maps: what a figure holds, what is written, and what is refused."""

import argparse
import sys
from pathlib import Path

import pytest
import torch

from attn_spec.command_arguments import add_heatmap
from attn_spec.report.heatmap import heatmap, save
from attn_spec.trace.command import run_heatmap

pytest.importorskip("matplotlib", reason="heat maps need the extra `report`")

WEIGHTS = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)


def test_a_row_of_panels_for_each_head() -> None:
    figure = heatmap(WEIGHTS, labels=list("abcd"), expected=WEIGHTS.flip(0), hidden=torch.eye(4).bool(), title="mine")
    panels = [ax for ax in figure.axes if ax.get_images()]
    assert [ax.get_title() for ax in panels] == [f"head {n}{more}" for n in range(3) for more in ("", ": seen - right")]
    assert [label.get_text() for label in panels[0].get_xticklabels()] == list("abcd")
    assert panels[0].get_ylabel() == "query"
    assert panels[4].get_xlabel() == "key"
    shown = torch.tensor(panels[0].get_images()[0].get_array().tolist())
    torch.testing.assert_close(shown, WEIGHTS[0])
    (limits,) = {ax.get_images()[0].get_clim() for ax in panels[1::2]}
    largest = float((WEIGHTS - WEIGHTS.flip(0)).abs().max())
    assert limits == pytest.approx((-largest, largest))
    assert all(collection.get_hatch() for collection in panels[0].collections)
    assert "attention weight" in [ax.get_xlabel() for ax in figure.axes]


def test_rounding_stays_white() -> None:
    figure = heatmap(WEIGHTS, expected=WEIGHTS + 1e-8)
    assert figure.axes[1].get_images()[0].get_clim() == (-1e-3, 1e-3)


def test_at_most_eight_heads() -> None:
    figure = heatmap(WEIGHTS[:1].expand(11, 4, 4), title="many")
    assert len([ax for ax in figure.axes if ax.get_images()]) == 8
    assert figure.get_suptitle() == "many (the first 8 of 11 heads)"


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_it_is_written(suffix: str, start: bytes, tmp_path: Path) -> None:
    save(heatmap(WEIGHTS), tmp_path / f"map.{suffix}")
    assert (tmp_path / f"map.{suffix}").read_bytes().startswith(start)


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"weights: the shape is \[4, 4\]"):
        heatmap(WEIGHTS[0])
    with pytest.raises(ValueError, match="labels: 3 for 4 queries"):
        heatmap(WEIGHTS, labels=list("abc"))
    with pytest.raises(ValueError, match="expected: the shape"):
        heatmap(WEIGHTS, expected=WEIGHTS[0])
    with pytest.raises(ValueError, match="hidden: the shape"):
        heatmap(WEIGHTS, hidden=torch.zeros(5).bool())
    with pytest.raises(ValueError, match=r"written as \.png or \.svg"):
        save(heatmap(WEIGHTS), tmp_path / "map.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'attn-spec\[report\]'"):
        heatmap(WEIGHTS)


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    add_heatmap(parser.add_subparsers())
    return run_heatmap(parser.parse_args(["heatmap", *words]))


@pytest.mark.parametrize("target", ["naive", "sdpa", "tiled"])
def test_the_command(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "map.svg"
    length = ["--seq", "70"] if target == "tiled" else ["--tokens", "the cat sat"]
    assert command(target, "--out", str(out), *length, "--heads", "3", "--head", "1") == 0
    printed = capsys.readouterr().out
    assert "1 head, largest difference from the oracle" in printed
    assert float(printed.split()[-1]) < 1e-6
    assert out.is_file()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--out", "map.gif"), "written as .png or .svg"),
        (("--out", "nowhere/map.png"), "no folder nowhere"),
        (("--out", "map.png", "--head", "2"), "--head: 2 is not one of the heads 0 to 1"),
        (("--out", "map.png", "--tokens", "a b", "--seq", "3"), "--tokens: 2 words for 3 tokens"),
        (("--out", "map.png", "--tokens", " "), "--tokens: is empty"),
    ],
)
def test_what_can_not_be_drawn(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("naive", *words) == 4
    assert text in capsys.readouterr().err
