"""Tables and figures of the benchmark of search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from genius_search.writing import write_file, write_json
from research.bench.rivals import describe_packages
from research.bench.search import EXACT, NUM_CHANGED, OURS, Row
from research.figures import COLOURS, GRID, INK, new_figure
from research.table import Table

TITLES: Final = {
    "curves": "Search by effort",
    "limits": "The physical limit",
    "filtered": "Filters",
    "built": "Building",
    "changes": f"{NUM_CHANGED:,} items added, {NUM_CHANGED:,} deleted",
    "distances": "Median distance to the tenth nearest item, by the number of items",
}
NOTES: Final = {
    "curves": "of the ten: share of exact search's first ten, by kind of query. us: "
    "CPU-microseconds of a single query; of ours, up to the rows of the hits, as of the others.",
    "limits": "from memory: at the bandwidth shown, which a buffer of 1 GiB has. Again and again: "
    "a buffer of this size is read repeatedly, from caches if it is small. A search that leaves "
    "items out can be quicker.",
    "filtered": "draw is a random number, source is the item's file. First time: with the look-up "
    "of the condition.",
}
LIBRARIES: Final = (
    *(OURS, "rabitqlib", "faiss", "hnswlib", "usearch", "scann"),
    *("turbovec", "scalable-vs", "zvec", "lancedb"),
)
CURVE_COLOURS: Final = (*COLOURS, "#8c510a", "#5e3c99", "#878787")
"""Colours of the libraries."""
MARKERS: Final = "osD^vP*X"
MAX_LABEL_DISTANCE: Final = 0.045
"""Distance between two labels, as a share of the panel's height; less if there are many labels."""
LABEL_INCHES: Final = 0.19
"""Height of a label, with the space below it."""


class CurveEnd(NamedTuple):
    """Last point and colour of a curve."""

    x: float
    y: float
    colour: str


def write_report(
    rows: Mapping[str, Sequence[Row]], folder: Path, pictures: Path, facts: Mapping[str, Any]
) -> list[Table]:
    """Write ``results.json``, ``results.md`` and the figures; return the tables.

    Parameters
    ----------
    rows
        rows of each part of the benchmark.
    pictures
        folder of the figures.
    facts
        machine, date and command.
    """
    tables = list(make_tables(rows, facts["command"]))
    write_json(folder / "results.json", {**rows, **facts})
    footer = "{machine}; {date}; `{command}`".format_map(facts)
    blocks = [*(table.markdown() for table in tables), describe_packages(), footer]
    write_file(folder / "results.md", ("\n\n".join(blocks) + "\n").encode())
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "0"}):
        for name, figure in draw_figures(rows["curves"]):
            source = describe_source("curves", facts["command"])
            figure.supxlabel(source, x=0.01, ha="left", color=INK, fontsize=7)
            figure.savefig(pictures / f"{name}.svg", metadata={"Date": None})
    return tables


def make_tables(rows: Mapping[str, Sequence[Row]], command: str) -> Iterator[Table]:
    """Yield a table of each part; its note names the part's list in ``results.json``."""
    for part, part_rows in rows.items():
        headings = list(dict.fromkeys(name for row in part_rows for name in row))
        yield Table(
            name=part,
            title=TITLES[part],
            note=f"{NOTES.get(part, '')} {describe_source(part, command)}".strip(),
            headings=tuple(headings),
            lines=[[row.get(name) for name in headings] for row in part_rows],
            decimals=None,
        )


def describe_source(part: str, command: str) -> str:
    """Return the source of the figures in a table or a picture."""
    return f"From results.json, {part}: {command}"


def draw_figures(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """Yield name and figure: the share of exact search's first ten hits by time, and by bytes.

    The figure by bytes shows each method's best share in at most the time of the default search.
    """
    methods: dict[str, list[Row]] = {}
    for row in rows:
        if row["method"] != EXACT:
            methods.setdefault(row["method"], []).append(row)
    max_time = next(row["us"] for row in rows if row["default"])
    in_time = {}
    for method, method_rows in methods.items():
        in_time[method] = [row for row in method_rows if row["us"] <= max_time]
    shares = [name for name in rows[0] if name.startswith("of the ten")]
    label = f"bytes an item, searched in at most {max_time:,.0f} CPU-µs"
    yield "recall-time", _draw_figure(methods, shares, "us", "CPU-µs of a query")
    yield "recall-bytes", _draw_figure(in_time, shares, "bytes", label, only_best=True)


def _draw_figure(
    methods: Mapping[str, Sequence[Row]],
    shares: Sequence[str],
    x: str,
    label: str,
    *,
    only_best: bool = False,
) -> Figure:
    """Draw a panel for each share, with a curve for each method or only its best point."""
    figure = new_figure(8.0, max(4.2, LABEL_INCHES * len(methods)) * len(shares))
    panels = figure.subplots(len(shares), 1, squeeze=False)[:, 0]
    for axes, share in zip(panels, shares, strict=True):
        ends = {}
        for number, (method, rows) in enumerate(methods.items()):
            points = [(row[x], row[share]) for row in rows]
            if only_best:
                points = sorted(points, key=lambda point: point[1])[-1:]
            if points:
                ends[method] = _draw_curve(axes, method, number, points)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(label, color=INK)
        axes.set_ylabel(share.replace("of the ten", "share of exact search's ten"), color=INK)
        axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        _draw_labels(axes, ends)
    return figure


def _draw_curve(
    axes: Axes, method: str, number: int, points: Sequence[tuple[float, float]]
) -> CurveEnd:
    """Draw a method in the colour of its library."""
    library = method.split(maxsplit=1)[0].rstrip(",")
    colour = CURVE_COLOURS[LIBRARIES.index(library)]
    axes.plot(
        *zip(*points, strict=True),
        color=colour,
        marker=MARKERS[number % len(MARKERS)],
        markersize=4.5,
        linewidth=2.4 if library == OURS else 1.2,
        linestyle="-" if library == OURS else "--",
    )
    return CurveEnd(*points[-1], colour)


def _draw_labels(axes: Axes, ends: Mapping[str, CurveEnd]) -> None:
    """Write the name of each curve to the right of its end, without overlaps."""
    low, high = axes.get_ylim()
    distance = min(MAX_LABEL_DISTANCE, 1 / len(ends))
    height = 1.0
    for method, end in sorted(ends.items(), key=lambda item: -item[1].y):
        height = min(height - distance, (end.y - low) / (high - low))
        axes.annotate(
            method,
            (end.x, end.y),
            (1.01, height),
            textcoords="axes fraction",
            color=end.colour,
            fontsize=8,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": end.colour,
                "linewidth": 0.4,
                "relpos": (0, 0.5),
            },
        )
