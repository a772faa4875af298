"""Drawings for the page: logarithmic axes, and a method looks the same wherever it is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY, WINE = "#E69F00", "#56B4E9", "#000000", "#767676", "#882255"
"""Okabe and Ito's colours, a grey, and a dark red of Tol's: the colour-blind can tell them."""
INK: Final = "#33302b"
DPI: Final = 160
FEW_DECADES: Final = 3
"""An axis of fewer powers of ten has labels at 2 and 5 too."""
MILLION: Final = 1e6


class Style(NamedTuple):
    """How a method looks."""

    colour: str
    marker: str


STYLES: Final = {
    "exact search": Style(BLACK, "o"),
    "HNSW": Style(VERMILION, "s"),
    "IVF": Style(ORANGE, "D"),
    "IVF-PQ": Style(PURPLE, "v"),
    "IVF-PQ refined": Style(WINE, "h"),
    "residual codes": Style(GREY, "P"),
    "nearest code vectors, by codes": Style(SKY, "^"),
    "nearest code vectors, by vectors": Style(SKY, "X"),
    "ours, by probability": Style(BLUE, "*"),
    "ours, by codes": Style(BLUE, "o"),
    "ours, by vectors": Style(GREEN, "o"),
    "exact search (32-bit vectors)": Style(BLACK, "o"),
    "full search": Style(VERMILION, "s"),
    "leaf stop": Style(BLUE, "^"),
    "small decoder, leaf budget": Style(GREEN, "D"),
    "IDs alone": Style(ORANGE, "v"),
    "IDs and items": Style(PURPLE, "h"),
}
OTHER: Final = Style(INK, ".")


class Line(NamedTuple):
    """What is drawn under one name."""

    name: str
    points: tuple[tuple[float, float], ...]
    calculated: tuple[tuple[float, float], ...]
    """Points that were not measured: dashed and hollow."""


def draw(lines: Sequence[Line], *, x: str, y: str, log_y: bool = True) -> bytes:
    """A PNG of lines over a logarithmic axis; their names stand beside it, the highest line's first."""
    figure = Figure(figsize=(10, 5), dpi=DPI, layout="constrained")
    axes: Axes = figure.add_subplot()
    for line in sorted(lines, key=_end, reverse=True):
        _draw_line(axes, line)
    axes.set_xscale("log")
    _label(axes.xaxis, axes.get_xlim())
    if log_y:
        axes.set_yscale("log")
        _label(axes.yaxis, axes.get_ylim())
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(visible=True, which="major", color="#e4e0d8", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    written = io.BytesIO()
    figure.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _draw_line(axes: Axes, line: Line) -> None:
    style = STYLES.get(line.name, OTHER)
    points, calculated = sorted(line.points), sorted(line.calculated)
    if points:
        axes.plot(
            *zip(*points, strict=True),
            color=style.colour,
            marker=style.marker,
            linewidth=2,
            markersize=6,
            label=line.name,
        )
    if calculated:
        axes.plot(
            *zip(*[*points[-1:], *calculated], strict=True),
            color=style.colour,
            linestyle="--",
            linewidth=1.5,
        )
        axes.plot(
            *zip(*calculated, strict=True),
            color=style.colour,
            marker=style.marker,
            markerfacecolor="white",
            linestyle="none",
            markersize=6,
            label=f"{line.name}, calculated",
        )


def _end(line: Line) -> float:
    """Height of the last point."""
    return max((*line.points, *line.calculated), default=(0.0, 0.0))[1]


def _label(axis: Axis, limits: tuple[float, float]) -> None:
    """Write plain numbers, enough of them."""
    decades = math.log10(limits[1] / limits[0])
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < FEW_DECADES else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    axis.set_minor_formatter(NullFormatter())


def tick(value: float) -> str:
    """A number on an axis: 0.5, 20, 1,000, 100M."""
    if value >= MILLION:
        return f"{value / MILLION:,.0f}M"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
