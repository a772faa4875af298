"""The figure of ``genius calibrate``: predicted against observed, and what answering only when sure costs."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from genius_search.artifact import write_file
from genius_search.calibrate import Predictions, accept, calibration_error, reliability
from genius_search.errors import MissingExtra, UsageError

INK, BLUE, VERMILION, GRID = "#33302b", "#0072B2", "#D55E00", "#e4e0d8"
LARGEST_MARK = 260.0
"""Area of the mark of a bin that holds all queries."""


def check_figure_path(path: Path) -> None:
    """Check that a figure can be written, before any work is done.

    Raises
    ------
    UsageError
        The suffix is not one of a figure, or the folder does not exist.
    MissingExtra
        Matplotlib is not installed.
    """
    if path.suffix not in (".svg", ".png") or not path.parent.is_dir():
        raise UsageError(
            f"--figure {path}: expected a name that ends in .svg or .png, in a folder that exists"
        )
    _matplotlib()


def reliability_facts(cases: Predictions) -> dict[str, Any]:
    """Return the numbers behind the figure."""
    curve = accept(cases)
    return {
        "bins": [one._asdict() for one in reliability(cases)],
        "acceptance": {
            name: [round(value, 6) for value in getattr(curve, name).tolist()]
            for name in ("threshold", "coverage", "precision")
        },
    }


def draw_reliability(cases: Predictions, path: Path, *, threshold: float | None) -> None:
    """Write the figure as SVG or PNG, by the suffix of its name; raises as :func:`check_figure_path`."""
    check_figure_path(path)
    mpl = _matplotlib()
    figure = mpl.figure.Figure(figsize=(10, 4.6), dpi=160, layout="constrained")
    left, right = figure.subplots(1, 2)
    bins = reliability(cases)
    total = sum(one.weight for one in bins)
    left.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":")
    left.scatter(
        [one.predicted for one in bins],
        [one.observed for one in bins],
        s=[20 + LARGEST_MARK * one.weight / total for one in bins],
        color=BLUE,
        zorder=3,
    )
    left.set_xlabel("probability of the first hit", color=INK)
    left.set_ylabel("share that is right", color=INK)
    left.set_title(f"error {calibration_error(bins):.3f}; a mark's area: how many queries", fontsize=10)

    curve = accept(cases)
    right.plot(curve.coverage, curve.precision, color=BLUE, linewidth=2)
    if threshold is not None and (curve.threshold >= threshold).any():
        place = int(np.flatnonzero(curve.threshold >= threshold)[-1])
        point = (curve.coverage[place], curve.precision[place])
        right.plot([point[0]], [point[1]], "o", color=VERMILION, markersize=9)
        right.annotate(
            f"good match from {threshold:.2f} on",
            point,
            xytext=(-8, -22),
            textcoords="offset points",
            ha="right",
            color=VERMILION,
        )
    right.set_xlabel("share of the queries that are answered", color=INK)
    right.set_ylabel("share of those that is right", color=INK)
    right.set_title("answering only from a probability on", fontsize=10)
    for axes in (left, right):
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.grid(visible=True, color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)

    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {"Software": None}
    with mpl.rc_context({"svg.hashsalt": "genius", "svg.fonttype": "none"}):  # equal figures, equal bytes
        figure.savefig(buffer, format=path.suffix[1:], metadata=metadata)
    write_file(path, buffer.getvalue())


def _matplotlib() -> Any:
    try:
        importlib.import_module("matplotlib.figure")
        return importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingExtra(
            f"--figure needs matplotlib, which cannot be imported ({error}): pip install 'genius-search[lab]'"
        ) from error
