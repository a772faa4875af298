"""Figures: colours that the colour-blind can tell apart, and lines over logarithmic axes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from genius_search.lab.table import pareto_front

# Okabe and Ito's colours, a grey, and a dark red of Tol's.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY, WINE = "#E69F00", "#56B4E9", "#000000", "#767676", "#882255"
COLOURS: Final = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, WINE, GREY)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "h")
INK: Final = "#33302b"
GRID: Final = "#e4e0d8"
STYLES: Final = {
    "exact search": (BLACK, "o"),
    "HNSW": (VERMILION, "s"),
    "IVF": (ORANGE, "D"),
    "IVF-PQ": (PURPLE, "v"),
    "IVF-PQ refined": (WINE, "h"),
    "residual codes": (GREY, "P"),
    "nearest code vectors, by codes": (SKY, "^"),
    "nearest code vectors, by vectors": (SKY, "X"),
    "ours, by probability": (BLUE, "*"),
    "ours, by codes": (BLUE, "o"),
    "ours, by vectors": (GREEN, "o"),
    "exact search (32-bit vectors)": (BLACK, "o"),
    "full search": (VERMILION, "s"),
    "leaf stop": (BLUE, "^"),
    "small decoder, leaf budget": (GREEN, "D"),
    "numbers as IDs (GRACE)": (PURPLE, "v"),
    "our IDs": (BLUE, "o"),
}
"""Colour and marker of a method, the same wherever it is drawn."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure with its title and its description."""

    name: str
    """Of its files."""
    title: str
    alt: str
    """A description for those who cannot see it."""
    figure: Figure

    def save(self, kind: Literal["png", "svg"]) -> bytes:
        """Return the file, without a date or a program's name, so that equal figures are equal files."""
        buffer = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": self.name}):
            metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
            self.figure.savefig(buffer, format=kind, metadata=metadata)
        return buffer.getvalue()


class Line(NamedTuple):
    """The points drawn under one name."""

    name: str
    points: tuple[tuple[float, float], ...]
    calculated: tuple[tuple[float, float], ...] = ()
    """Points that were not measured: dashed and hollow."""


def new_figure(width: float = 7.0, height: float = 4.0) -> Figure:
    """Return an empty figure of a size in inches."""
    return Figure(figsize=(width, height), dpi=160, layout="constrained")


def label_axes(axes: Axes, *, x: str, y: str) -> None:
    """Set labels and a faint grid; remove the frame above and on the right."""
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_lines(lines: Sequence[Line], *, x: str, y: str, log_y: bool = True) -> Figure:
    """Draw lines over a logarithmic axis, their names beside it, the highest line's first."""
    figure = new_figure(10.0, 5.0)
    axes: Axes = figure.add_subplot()
    for line in sorted(lines, key=lambda one: -max((*one.points, *one.calculated), default=(0, 0))[1]):
        colour, marker = STYLES.get(line.name, (INK, "."))
        points, calculated = sorted(line.points), sorted(line.calculated)
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, linewidth=2, label=line.name)
        if calculated:
            joined = zip(*[*points[-1:], *calculated], strict=True)
            axes.plot(*joined, color=colour, linestyle="--", linewidth=1.5)
            hollow: dict[str, Any] = {"marker": marker, "markerfacecolor": "white", "linestyle": "none"}
            x_y = zip(*calculated, strict=True)
            axes.plot(*x_y, color=colour, label=f"{line.name}, calculated", **hollow)
    axes.set_xscale("log")
    _label_decades(axes.xaxis, axes.get_xlim())
    if log_y:
        axes.set_yscale("log")
        _label_decades(axes.yaxis, axes.get_ylim())
    label_axes(axes, x=x, y=y)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    return figure


def lines_by_size(
    rows: Sequence[Mapping[str, Any]], column: str, convert: Callable[[float], float] = float
) -> list[Line]:
    """Return a column of a speed benchmark against the size of the pool, one query at a time."""
    single = [row for row in rows if row["batch"] == 1]

    def points(method: str, *, calculated: bool) -> tuple[tuple[float, float], ...]:
        own = [row for row in single if row["method"] == method and bool(row.get("calculated")) is calculated]
        return tuple((float(row["items"]), convert(row[column])) for row in own)

    return [
        Line(method, points(method, calculated=False), points(method, calculated=True))
        for method in dict.fromkeys(str(row["method"]) for row in single)
    ]


def draw_fronts(
    settings: Iterable[tuple[str, float, float]], *, name: str, title: str, x: str, y: str = "R@5"
) -> Drawing:
    """Draw, of settings (kind, cost, recall), those whose recall no cheaper one of their kind reaches."""
    points: dict[str, list[tuple[float, float]]] = {}
    for kind, cost, recall in settings:
        points.setdefault(kind, []).append((float(cost), float(recall)))
    lines = [Line(kind, pareto_front(found)) for kind, found in points.items()]
    figure = draw_lines(lines, x=x, y=y, log_y=False)
    return Drawing(name=name, title=title, alt=f"R@5 of {', '.join(points)} against {x}", figure=figure)


def format_tick(value: float) -> str:
    """Return a number for an axis: 0.5, 20, 1,000, 100M."""
    if value >= 1e6:
        return f"{value / 1e6:,.0f}M"
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _label_decades(axis: Axis, limits: tuple[float, float]) -> None:
    """Label powers of ten, and 2 and 5 as well where the axis spans fewer than three of them."""
    spans_few = math.log10(limits[1] / limits[0]) < 3
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if spans_few else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axis.set_minor_formatter(NullFormatter())
