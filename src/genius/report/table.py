"""One table, however it is shown: Markdown for reading, CSV for scripts, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

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
