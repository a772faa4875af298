"""Lines over a logarithmic axis; a method looks the same wherever it is drawn."""

from __future__ import annotations

import base64
import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from genius_search.errors import BadData

NOTHING: Final = "–"
"""A cell without a value."""
LATEX: Final = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "→": r"$\rightarrow$",
    "−": r"$-$",
    "≤": r"$\leq$",
    "λ": r"$\lambda$",
    "–": "--",
    "\0": "{}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "·": r"$\cdot$",
}
"""What LaTeX reads otherwise than it is written."""


class Estimate(NamedTuple):
    """A number with what is known of its uncertainty."""

    value: float
    sd: float | None = None
    """Standard deviation over seeds; nothing of a single one."""
    low: float | None = None
    high: float | None = None
    """Confidence interval over queries."""

    def shown(self, decimals: int) -> str:
        """``86.3 ± 0.4``."""
        text = f"{self.value:.{decimals}f}"
        return text if self.sd is None else f"{text} ± {self.sd:.{decimals}f}"


Cell: TypeAlias = str | int | float | Estimate | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines under headings; cells keep their full precision until they are shown."""

    name: str
    """Of its files."""
    title: str
    note: str = ""
    """How to read it."""
    headings: tuple[str, ...]
    lines: Sequence[Sequence[Cell]]
    decimals: int = 1
    """Of numbers that are no counts, where a person reads them."""
    text_columns: int = 1
    """Columns from the left that hold names."""

    def cells(self) -> list[list[str]]:
        """Every cell as a person reads it."""
        return [[_shown(cell, self.decimals) for cell in line] for line in self.lines]

    def markdown(self) -> str:
        """Title, note and table."""
        rules = ["---"] * self.text_columns + ["---:"] * (len(self.headings) - self.text_columns)
        lines = [list(self.headings), rules, *self.cells()]
        escaped_lines = ([cell.replace("|", "\\|") for cell in line] for line in lines)
        rows = "\n".join(f"| {' | '.join(line)} |" for line in escaped_lines)
        return "\n\n".join(part for part in (f"## {self.title}", self.note, rows) if part)

    def csv(self) -> str:
        """Numbers unrounded; an estimate takes a column for each thing that is known of it somewhere."""
        parts = [self._parts(column) for column in range(len(self.headings))]
        written = io.StringIO()
        writer = csv.writer(written, lineterminator="\n")
        writer.writerow(
            f"{heading} {part}".strip()
            for heading, names in zip(self.headings, parts, strict=True)
            for part in ("", *names)
        )
        for line in self.lines:
            values: list[object] = []
            for cell, names in zip(line, parts, strict=True):
                if isinstance(cell, Estimate):
                    values += [cell.value, *(getattr(cell, name) for name in names)]
                else:
                    values += [cell, *(None for _ in names)]
            writer.writerow("" if value is None else value for value in values)
        return written.getvalue()

    def latex(self) -> str:
        """A ``table`` with ``booktabs`` rules; the note is its caption."""
        columns = "l" * self.text_columns + "r" * (len(self.headings) - self.text_columns)
        body = " \\\\\n".join(" & ".join(map(escaped, line)) for line in self.cells())
        caption = escaped(". ".join(part.rstrip(".") for part in (self.title, self.note) if part) + ".")
        return (
            "% \\usepackage{booktabs}\n"
            "\\begin{table}\n\\centering\n"
            f"\\caption{{{caption}}}\n\\label{{tab:{self.name}}}\n"
            f"\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
            f"{' & '.join(map(escaped, self.headings))} \\\\\n\\midrule\n"
            f"{body} \\\\\n\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n"
        )

    def _parts(self, column: int) -> list[str]:
        """What estimates of a column say beside their value."""
        found = [line[column] for line in self.lines if isinstance(line[column], Estimate)]
        return [
            part for part in ("sd", "low", "high") if any(getattr(cell, part) is not None for cell in found)
        ]


def escaped(text: str) -> str:
    r"""Text as LaTeX prints it: ``50 % of a_b`` becomes ``50 \% of a\_b``."""
    parted = text.replace("--", "-\0-")  # flags keep both dashes
    return "".join(LATEX.get(character, character) for character in parted)


def _shown(cell: Cell, decimals: int) -> str:
    match cell:
        case None:
            return NOTHING
        case str():
            return cell
        case Estimate():
            return cell.shown(decimals)
        case int():
            return f"{cell:,}"
        case _:
            return f"{cell:,.{decimals}f}"


IMAGE_SIGNATURES: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""How the image files that a browser shows begin."""


def shown(text: str) -> str:
    """Escaped text; the colon of a URL as an entity, so that the file names no address."""
    return html.escape(text).replace("://", "&#58;//")


def task_shown(task: str) -> str:
    """``text -> image-text`` with an arrow, broken only at the arrow."""
    return " → ".join(f'<span class="word">{shown(part)}</span>' for part in task.split(" -> "))


def picture(data: bytes, alt: str) -> str:
    """An image file inside the page.

    Raises
    ------
    BadData
        the bytes are not a PNG, JPEG, GIF or WebP file.
    """
    for signature, kind in IMAGE_SIGNATURES.items():
        if data.startswith(signature):
            encoded = base64.b64encode(data).decode()
            return (
                '<div class="picture">'
                f'<img alt="{shown(alt)}" src="data:image/{kind};base64,{encoded}"></div>'
            )
    raise BadData(f"an image of the page begins with {data[:4]!r}, expected a PNG, JPEG, GIF or WebP file")


BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, BLACK, GREY, WINE = "#E69F00", "#56B4E9", "#000000", "#767676", "#882255"
"""Okabe and Ito's colours, a grey, and a dark red of Tol's: the colour-blind can tell them."""
COLOURS: Final = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, WINE, GREY)
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "h")
INK: Final = "#33302b"
PAPER: Final = "#e4e0d8"
DPI: Final = 160


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """A figure to be saved."""

    name: str
    """Of its files."""
    title: str
    alt: str
    """What it shows, for those who cannot see it."""
    figure: Figure

    def save(self, kind: Literal["png", "svg"]) -> bytes:
        """The file, without a date or a program's name."""
        written = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": self.name}):
            about = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
            self.figure.savefig(written, format=kind, metadata=about)
        return written.getvalue()


def blank(width: float = 7.0, height: float = 4.0) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def quiet(axes: Axes, *, x: str, y: str) -> None:
    """Labels, a faint grid, no frame above and right."""
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.grid(visible=True, which="major", color=PAPER, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


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
