"""A figure of probabilities and what they are worth: as much as is said, and what refusing costs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from genius.errors import UsageError
from genius.evaluation.reliability import Told, accept, calibration_error, reliability

INK, BLUE, VERMILION, PAPER = "#33302b", "#0072B2", "#D55E00", "#e4e0d8"
DPI: Final = 160
KINDS: Final = (".svg", ".png")
LARGEST_MARK: Final = 260.0
"""Area of the mark of a tenth that holds all queries."""


def check_name(path: Path) -> None:
    """Refuse what no figure can be written to.

    Raises
    ------
    UsageError
        the name ends otherwise than a figure's, or its folder is not there.
    """
    if path.suffix not in KINDS or not path.parent.is_dir():
        raise UsageError(
            f"{path} is no place for a figure: its name ends in {' or '.join(KINDS)}, its folder is there"
        )


def draw_reliability(told: Told, path: Path, *, threshold: float | None) -> None:
    """Write the figure, an SVG or a PNG by the ending of its name; raises as :func:`check_name`."""
    check_name(path)
    figure = Figure(figsize=(10, 4.6), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    _reliability(left, told)
    _coverage(right, told, threshold)
    for axes in (left, right):
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(visible=True, color=PAPER, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    written = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "genius", "svg.fonttype": "none"}):  # equal figures, equal bytes
        figure.savefig(written, format=path.suffix[1:], metadata=metadata)
    path.write_bytes(written.getvalue())


def reliability_facts(told: Told) -> dict[str, Any]:
    """What the figure shows, for scripts."""
    found = accept(told)
    return {
        "bins": [one._asdict() for one in reliability(told)],
        "acceptance": {
            name: [round(value, 6) for value in values.tolist()]
            for name, values in found._asdict().items()
            if name != "cases"
        },
    }


def _reliability(axes: Axes, told: Told) -> None:
    bins = reliability(told)
    total = sum(one.weight for one in bins)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":")
    axes.scatter(
        [one.predicted for one in bins],
        [one.observed for one in bins],
        s=[20 + LARGEST_MARK * one.weight / total for one in bins],
        color=BLUE,
        zorder=3,
    )
    axes.set_xlabel("probability of the first hit", color=INK)
    axes.set_ylabel("share that is right", color=INK)
    axes.set_title(f"error {calibration_error(bins):.3f}; a mark's area: how many queries", fontsize=10)


def _coverage(axes: Axes, told: Told, threshold: float | None) -> None:
    found = accept(told)
    axes.plot(found.coverage, found.precision, color=BLUE, linewidth=2)
    if threshold is not None and (found.threshold >= threshold).any():
        place = int(np.flatnonzero(found.threshold >= threshold)[-1])
        axes.plot([found.coverage[place]], [found.precision[place]], "o", color=VERMILION, markersize=9)
        axes.annotate(
            f"good match from {threshold:.2f} on",
            (found.coverage[place], found.precision[place]),
            xytext=(-8, -22),
            textcoords="offset points",
            ha="right",
            color=VERMILION,
        )
    axes.set_xlabel("share of the queries that are answered", color=INK)
    axes.set_ylabel("share of those that is right", color=INK)
    axes.set_title("answering only from a probability on", fontsize=10)
