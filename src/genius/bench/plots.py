"""Drawings for the page: logarithmic axes, names beside the lines, colours that the colour-blind can tell."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS: Final = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#767676",
    "#882255",
)
"""Okabe and Ito's, a grey, and a dark red of Tol's."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
INK: Final = "#33302b"
DPI: Final = 160
NAME_WIDTH: Final = 320
NAME_HEIGHT: Final = 26
"""Dots that a name takes."""


class Line(NamedTuple):
    """What is drawn under one name."""

    name: str
    points: tuple[tuple[float, float], ...]
    calculated: tuple[tuple[float, float], ...]
    """Points that were not measured: dashed and hollow."""


def draw(lines: Sequence[Line], *, x: str, y: str, log_y: bool = True) -> bytes:
    """A PNG of lines over a logarithmic axis."""
    figure = Figure(figsize=(9, 5), dpi=DPI, layout="constrained")
    axes: Axes = figure.add_subplot()
    ends: list[tuple[float, float, str, str]] = []
    for number, line in enumerate(lines):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        points = sorted(line.points)
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                marker=marker,
                linewidth=2,
                markersize=6,
            )
        if line.calculated:
            beyond = [*points[-1:], *sorted(line.calculated)]
            axes.plot(*zip(*beyond, strict=True), color=colour, linestyle="--", linewidth=1.5)
            axes.plot(
                *zip(*sorted(line.calculated), strict=True),
                color=colour,
                marker=marker,
                markerfacecolor="white",
                linestyle="none",
                markersize=6,
            )
        last = (sorted(line.calculated) or points)[-1:]
        ends += [(*point, line.name + (" (calculated)" if line.calculated else ""), colour) for point in last]
    axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    axes.margins(x=0.06)
    _name(axes, ends)
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(visible=True, which="major", color="#e4e0d8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    written = io.BytesIO()
    figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _name(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name at the end of its line, moved up where it would lie over another."""
    placed: list[tuple[float, float]] = []
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        across, height = (float(value) for value in axes.transData.transform((x, y)))
        low = height
        for other_across, other in placed:
            if abs(across - other_across) < NAME_WIDTH:
                low = max(low, other + NAME_HEIGHT)
        placed.append((across, low))
        axes.annotate(
            name,
            (x, y),
            xytext=(10, (low - height) * 72 / DPI),
            textcoords="offset points",
            color=colour,
            fontsize=10,
            fontweight="bold",
            va="center",
            annotation_clip=False,
        )
