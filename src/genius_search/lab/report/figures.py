"""The figures of a report: colours that the colour-blind can tell apart, and lines over logarithmic axes."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from scipy import stats

from genius_search.lab.report.analysis import ITEMS_SHOWN, OUTCOMES, FirstHits, Group, Item, project
from genius_search.lab.report.evaluated import Benchmark, System
from genius_search.lab.report.reliability import reliability
from genius_search.lab.report.tables import beam_methods, sort_by_beam
from genius_search.lab.table import pareto_front
from genius_search.records import Modality

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
    "IVF-PQ": (PURPLE, "v"),
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
}
"""Colour and marker of a method, the same wherever it is drawn."""


OUTCOME_COLOURS: Final = dict(zip(OUTCOMES, (BLUE, VERMILION, PURPLE, SKY, ORANGE, GREY), strict=True))
FEW: Final = 20
"""A bin with fewer queries is drawn hollow."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure with its title and its description."""

    name: str
    """The name of its files."""
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


def draw_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, log_y: bool = True
) -> Figure:
    """Draw lines over a logarithmic axis, their names beside it, the highest line's first."""
    figure = new_figure(10.0, 5.0)
    axes: Axes = figure.add_subplot()
    for name in sorted(lines, key=lambda name: -max(lines[name])[1]):
        colour, marker = STYLES.get(name, (INK, "."))
        x_y = zip(*sorted(lines[name]), strict=True)
        axes.plot(*x_y, color=colour, marker=marker, linewidth=2, label=name)
    axes.set_xscale("log")
    _label_decades(axes.xaxis, axes.get_xlim())
    if log_y:
        axes.set_yscale("log")
        _label_decades(axes.yaxis, axes.get_ylim())
    label_axes(axes, x=x, y=y)
    figure.legend(loc="outside right upper", frameon=False, fontsize=10)
    return figure


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


def beam_figure(beams: Sequence[System]) -> Drawing | None:
    """Draw recall by the beam's width, the spread of seeds as bars; None without two widths."""
    beams = sort_by_beam(beams)
    columns = [(method, measure) for method in beam_methods(beams) for measure in ("R@1", "R@5")]
    if len(beams) < 2 or not columns:
        return None
    figure = new_figure()
    axes = figure.add_subplot()
    widths = [system.seeds[0].beam for system in beams]
    for number, (method, measure) in enumerate(columns):
        averages = [system.average("global", method, measure) for system in beams]
        found = [(width, one) for width, one in zip(widths, averages, strict=True) if one is not None]
        axes.errorbar(
            [width for width, _ in found],
            [one.value for _, one in found],
            yerr=[one.sd or 0.0 for _, one in found],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],
            capsize=3,
            label=f"{method}, {measure}",
        )
    axes.set_xscale("log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    label_axes(axes, x="beam: IDs kept at each level", y="mean over tasks, %")
    axes.legend(frameon=False, loc="best")
    return Drawing(
        name="beam",
        title="Recall and the beam's width",
        alt="R@1 and R@5 against the beam's width, with and without re-ranking",
        figure=figure,
    )


def speed_figure(benchmark: Benchmark) -> Drawing:
    """Draw queries per second against the size of the pool, one query at a time."""
    alone = benchmark.rows[benchmark.rows["batch"] == 1]
    lines = {
        str(method): list(zip(own["items"].astype(float), 1000.0 / own["cpu_ms"], strict=True))
        for method, own in alone.groupby("method", sort=False)
    }
    return Drawing(
        name="speed",
        title="Queries per second against the size of the pool",
        alt=f"Queries per second of {', '.join(lines)} against pool size on logarithmic axes",
        figure=draw_lines(lines, x="items in the pool", y="queries a second, one at a time, one core"),
    )


def quality_figure(benchmark: Benchmark) -> Drawing:
    """Draw, of each kind of search, recall of the settings that no cheaper one of it reaches.

    It is the mean of the tasks, or the first task where there is none.
    """
    frame = benchmark.rows
    task, x = frame["task"].iloc[0], "CPU-milliseconds of a query among 64"
    shown = frame[(frame["task"] == task) & (frame["line"] != "")]
    lines = {
        str(kind): pareto_front(list(zip(own["cpu_ms"], 100 * own["recall_5"], strict=True)))
        for kind, own in shown.groupby("line", sort=False)
    }
    return Drawing(
        name="quality",
        title=f"Recall against cost ({task})",
        alt=f"R@5 of {', '.join(lines)} against {x}",
        figure=draw_lines(lines, x=x, y="R@5, %", log_y=False),
    )


def misses_figure(shares: pd.DataFrame) -> Drawing:
    """Draw what the first hits of each system are, as stacked bars."""
    kinds = [kind for kind in shares if shares[kind].any()]
    figure = new_figure(9.0, 1.6 + 0.36 * len(shares))
    axes = figure.add_subplot()
    left = np.zeros(len(shares))
    places = range(len(shares))
    for kind in kinds:
        widths = 100 * shares[kind].to_numpy()
        axes.barh(
            places, widths, left=left, color=OUTCOME_COLOURS[kind], edgecolor="white", height=0.72, label=kind
        )
        left += widths
    axes.set_yticks(places, shares.index)
    axes.set_ylim(len(shares) - 0.5, -0.5)  # the first on top
    axes.set_xlim(0, 100)
    label_axes(axes, x="queries, %", y="")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return Drawing(
        name="misses",
        title="What stands at rank 1",
        alt=f"Shares of {', '.join(kinds)} among the first hits of {len(shares)} systems",
        figure=figure,
    )


def reliability_figure(found: Sequence[FirstHits]) -> Drawing:
    """Draw promise against truth, and how many answers are right among the surest."""
    figure = new_figure(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    left.plot([0, 100], [0, 100], color=GREY, linestyle="--", linewidth=1)
    for colour, one in zip(COLOURS, found, strict=False):
        if one.promised is not None:
            _draw_promises(left, one, colour)
        order = np.argsort(-one.sureness, kind="stable")
        answered = np.arange(1, len(order) + 1)
        share = np.cumsum(one.right[order]) / answered
        begin = max(1, len(order) // 20)  # the first few are noise
        x, y = 100 * answered[begin:] / len(order), 100 * share[begin:]
        right.plot(x, y, color=colour, label=f"{one.label}, {one.method}")
    for axes, title, x_label, corner in (
        (left, "What is promised", "promised probability, %", "upper left"),
        (right, "Answering only when sure", "queries answered, the surest first, %", "lower left"),
    ):
        label_axes(axes, x=x_label, y="right first hits, %")
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend(frameon=False, loc=corner, fontsize=9)
    return Drawing(
        name="reliability",
        title="Reliability of scores",
        alt="Share of right first hits against the promised probability, and against the share of queries "
        "that are answered",
        figure=figure,
    )


def _draw_promises(axes: Axes, found: FirstHits, colour: str) -> None:
    """Draw a point for each bin, with the interval of its share (Wilson's, 95 %)."""
    x, y, sizes = map(np.array, zip(*reliability(found.cases()), strict=True))
    bounds = [
        stats.binomtest(round(share * size), round(size)).proportion_ci(method="wilson")
        for share, size in zip(y, sizes, strict=True)
    ]
    errors = np.abs([[bound.low, bound.high] for bound in bounds] - y[:, None]).T
    axes.errorbar(100 * x, 100 * y, yerr=100 * errors, color=colour, marker="o", capsize=2, label=found.label)
    few = sizes < FEW
    hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "linestyle": "none", "zorder": 5}
    axes.plot(100 * x[few], 100 * y[few], color=colour, **hollow)


def codes_figure(groups: Sequence[Group], items: Sequence[Sequence[Item]], *, title: str) -> Drawing:
    """Draw a row for each group with its items beside each other; ``items`` has as many as the group rows."""
    figure = new_figure(1.15 * (ITEMS_SHOWN + 2), 1.18 * len(groups) + 0.3)
    panels = figure.subplots(
        len(groups), ITEMS_SHOWN + 1, width_ratios=[1.9, *[1.0] * ITEMS_SHOWN], squeeze=False
    )
    for row, group, shown in zip(panels, groups, items, strict=True):
        count = f"{group.size:,} {'item' if group.size == 1 else 'items'}"
        _write(row[0], f"level {group.level}\n{'.'.join(map(str, group.prefix))}\n{count}", size=9.0)
        for number, axes in enumerate(row[1:]):
            if number >= len(shown):
                axes.axis("off")
            elif (image := shown[number].image) is not None:
                axes.imshow(image)
                axes.set_xticks([])
                axes.set_yticks([])
                axes.spines[:].set_color(GRID)
            else:
                text = textwrap.fill(shown[number].text, 15, max_lines=5, placeholder=" …")
                _write(axes, text, size=6.5)
    return Drawing(
        name="codes",
        title=title,
        alt="Rows of items that share their first codes; each level's rows are under the first row before",
        figure=figure,
    )


def _write(axes: Axes, text: str, *, size: float) -> None:
    axes.axis("off")
    style: dict[str, Any] = {"fontsize": size, "color": INK, "ha": "left", "va": "center"}
    # Two dollars in a caption are prices, not a formula.
    axes.text(0.0, 0.5, text, transform=axes.transAxes, parse_math=False, **style)


class Cloud(NamedTuple):
    """The vectors of one model's IDs."""

    title: str
    vectors: Float[np.ndarray, "items dim"]
    modalities: Int[np.ndarray, " items"]


def clouds_figure(clouds: Sequence[Cloud]) -> Drawing:
    """Draw a panel for each model, with axes of its own, since nothing makes their lengths comparable."""
    figure = new_figure(4.6 * len(clouds), 4.6)
    panels = figure.subplots(1, len(clouds), squeeze=False)[0]
    for axes, cloud in zip(panels, clouds, strict=True):
        found = project(cloud.vectors)
        for modality, colour in zip(Modality, (BLUE, VERMILION, GREEN), strict=True):
            own = cloud.modalities == modality.code
            if own.any():
                x, y = found.places[own].T
                axes.scatter(x, y, s=7, alpha=0.55, linewidths=0, color=colour, label=modality.value)
        axes.set_title(cloud.title, loc="left", fontsize=11)
        axes.set_xlabel(
            f"{found.distinct:,} different IDs of {len(cloud.vectors):,} items;\n"
            f"{found.kept:.0%} of the variance is shown",
            color=INK,
        )
        axes.set_xticks([])
        axes.set_yticks([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, markerscale=2.5)
    return Drawing(
        name="embeddings",
        title="Vectors of the IDs, by modality (principal components)",
        alt=f"Scatter of ID vectors for {', '.join(cloud.title for cloud in clouds)}, coloured by modality",
        figure=figure,
    )
