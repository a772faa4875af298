"""Lines over a logarithmic axis; a method looks the same wherever it is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from genius.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    WINE,
    blank,
    quiet,
)

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
    "numbers as IDs (GRACE)": Style(PURPLE, "v"),
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
    """The same as a PNG file."""
    written = io.BytesIO()
    curves(lines, x=x, y=y, log_y=log_y).savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def curves(lines: Sequence[Line], *, x: str, y: str, log_y: bool = True) -> Figure:
    """Lines over a logarithmic axis; their names stand beside it, the highest line's first."""
    figure = blank(10.0, 5.0)
    axes: Axes = figure.add_subplot()
    for line in sorted(lines, key=_end, reverse=True):
        _draw_line(axes, line)
    axes.set_xscale("log")
    _label(axes.xaxis, axes.get_xlim())
    if log_y:
        axes.set_yscale("log")
        _label(axes.yaxis, axes.get_ylim())
    quiet(axes, x=x, y=y)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    return figure


def best_points(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Of pairs of cost and recall: those whose recall nothing of the same cost or less reaches."""
    kept: list[tuple[float, float]] = []
    for cost, recall in sorted(points, key=lambda point: (point[0], -point[1])):
        if not kept or recall > kept[-1][1]:
            kept.append((cost, recall))
    return tuple(kept)


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
