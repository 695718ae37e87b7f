"""Attention weights as a picture: each head, and beside it the difference from the right weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADS = 8  # shown; a picture of more can't be read
LABELS = 16  # along one axis
MANY = 16  # keys from which on most weights are small: colours then follow the square root
FAINT = 1e-3  # differences are shown on a scale of at least this, so that rounding stays white
SUFFIXES = (".png", ".svg")
MISSING = "matplotlib is not installed: pip install 'attn-spec[report]'"


def heatmap(
    weights: Tensor,
    *,
    labels: Sequence[str] | None = None,
    hidden: Tensor | None = None,
    expected: Tensor | None = None,
    title: str = "",
    first_head: int = 0,
) -> Figure:
    """A row of panels for each head: its weights, and their difference from the expected ones.

    weights, expected: [H, Sq, Sk].  labels: one for each token, where Sq = Sk.  hidden: bool, True = hidden,
    broadcastable to [H, Sq, Sk], shown hatched.  At most 8 heads are shown; the title says of how many.
    first_head: the number of the first.
    Raises ValueError, naming the argument, where a shape does not fit, and ImportError without matplotlib.
    """
    weights, hidden, expected = _checked(weights, labels, hidden, expected)
    try:
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(MISSING) from None
    heads = min(len(weights), HEADS)
    columns = 1 if expected is None else 2
    size = 2.6 if weights.shape[1] <= 12 else 3.6
    figure = Figure(figsize=(columns * (size + 0.9) + 0.4, heads * (size + 0.25) + 1.3), layout="constrained")
    axes = figure.subplots(heads, columns, squeeze=False)
    shown = weights[:heads].double()
    top = float(shown[shown.isfinite()].max()) if shown.isfinite().any() else 1.0
    root = weights.shape[2] > MANY
    norm = PowerNorm(0.5 if root else 1.0, vmin=0.0, vmax=top or 1.0)
    for n in range(heads):
        image = axes[n][0].imshow(shown[n].tolist(), cmap="cividis", norm=norm, interpolation="nearest")
        _finish(
            axes[n][0],
            f"head {first_head + n}",
            labels,
            None if hidden is None else hidden[n],
            first=True,
            last=n == heads - 1,
        )
    label = "attention weight (colours by the square root)" if root else "attention weight"
    bar = figure.colorbar(image, ax=list(axes[:, 0]), location="top", label=label, **_bar(heads))
    if root:  # even steps of the weight crowd at one end
        places = [(norm.vmax or 0.0) * part**2 for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
        bar.set_ticks(places, labels=[f"{place:.2g}" for place in places])
    if expected is not None:
        _differences(figure, axes, shown - expected[:heads].double(), labels, hidden, first_head)
    cut = f" (the first {heads} of {len(weights)} heads)" if heads < len(weights) else ""
    if title or cut:
        figure.suptitle(f"{title}{cut}".strip(), fontsize=9, wrap=True)
    return figure


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG or SVG, by the suffix of the path. Raises ValueError for another suffix."""
    check_path(path)
    figure.savefig(path, dpi=110)


def check_path(path: str | Path) -> None:
    """Raise ValueError where a picture can't be written under this name."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a picture is written as {' or '.join(SUFFIXES)}; end the name in one of them")
    if not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {Path(path).parent}; make it first")


def _checked(
    weights: Tensor, labels: Sequence[str] | None, hidden: Tensor | None, expected: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if weights.dim() != 3 or not weights.numel():
        raise ValueError(f"weights: the shape is {list(weights.shape)}; give [H, Sq, Sk] of one sample, none of them 0")
    shape = weights.shape
    if expected is not None and expected.shape != shape:
        raise ValueError(f"expected: the shape is {list(expected.shape)}; give that of weights, {list(shape)}")
    if labels is not None and (len(labels) != shape[1] or len(labels) != shape[2]):
        raise ValueError(f"labels: {len(labels)} for {shape[1]} queries and {shape[2]} keys; give one for each token")
    if hidden is not None:
        try:
            hidden = hidden.to("cpu", torch.bool).expand(shape)
        except RuntimeError:
            raise ValueError(f"hidden: the shape {list(hidden.shape)} does not broadcast to {list(shape)}") from None
    return weights.detach().cpu(), hidden, None if expected is None else expected.detach().cpu()


def _differences(
    figure: Figure, axes: Any, difference: Tensor, labels: Sequence[str] | None, hidden: Tensor | None, first_head: int
) -> None:
    """The second column: one scale for all heads, centred at 0."""
    finite = difference[difference.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    reach = max(largest, FAINT)
    heads = len(difference)
    for n in range(heads):
        image = axes[n][1].imshow(
            difference[n].tolist(), cmap="RdBu_r", vmin=-reach, vmax=reach, interpolation="nearest"
        )
        here = None if hidden is None else hidden[n]
        _finish(axes[n][1], f"head {first_head + n}: seen - right", labels, here, first=False, last=n == heads - 1)
    label = f"difference from the oracle (at most {largest:.2g})"
    bar = figure.colorbar(image, ax=list(axes[:, 1]), location="top", label=label, **_bar(heads))
    bar.set_ticks([-reach, 0.0, reach], labels=[f"{-reach:.2g}", "0", f"{reach:.2g}"])


def _bar(heads: int) -> dict[str, Any]:
    """How a colour bar lies over its column: as thick over one panel as over eight."""
    return {"aspect": 22, "shrink": 0.9, "fraction": 0.15 / heads, "pad": 0.03 / heads}


def _finish(
    ax: Axes, title: str, labels: Sequence[str] | None, hidden: Tensor | None, *, first: bool, last: bool
) -> None:
    """Labels and hatching of one panel."""
    ax.set_title(title, fontsize=9)
    q_len, kv_len = (int(round(abs(a - b))) for a, b in (ax.get_ylim(), ax.get_xlim()))
    for axis, n in ((ax.xaxis, kv_len), (ax.yaxis, q_len)):
        step = -(-n // LABELS)
        places = list(range(0, n, step))
        axis.set_ticks(places, [labels[p] if labels is not None else str(p) for p in places], fontsize=7)
    if labels is not None and max(len(label) for label in labels) > 2:
        ax.tick_params(axis="x", rotation=90)
    if first:
        ax.set_ylabel("query", fontsize=8)
    if last:
        ax.set_xlabel("key", fontsize=8)
    if hidden is not None:
        _hatch(ax, hidden)


def _hatch(ax: Axes, hidden: Tensor) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    cells = [Rectangle((j - 0.5, i - 0.5), width, 1) for i, j, width in _runs(hidden)]
    patches = PatchCollection(cells, facecolor="none", edgecolor="#9a9a9a", linewidth=0.0, hatch="////")
    ax.add_collection(patches)


def _runs(hidden: Tensor) -> Iterator[tuple[int, int, int]]:
    """The hidden keys of each row as runs: row, first key, how many."""
    for i, row in enumerate(hidden.tolist()):
        start = None
        for j, cell in enumerate([*row, False]):
            if cell and start is None:
                start = j
            elif not cell and start is not None:
                yield i, start, j - start
                start = None
