"""How figures look, wherever they are drawn: readable, and told apart by the colour-blind."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Final, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
