"""One table for the terminal, Markdown and CSV; cells keep full precision until shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from tabulate import tabulate

MISSING: Final = "–"


class Estimate(NamedTuple):
    """A number with its uncertainty."""

    value: float
    sd: float | None = None
    """Standard deviation over seeds; None for a single seed."""


Cell: TypeAlias = str | int | float | Estimate | None


def format_cell(cell: Any, decimals: int | None) -> str:  # noqa: PLR0911  one type, one return
    """Return a cell as text: ``86.3 ± 0.4``, ``1,200``, ``–``.

    Parameters
    ----------
    decimals
        decimals of numbers that are not counts; None: three significant digits, at most four
        decimals.
    """
    match cell:
        case str():
            return cell
        case Estimate():
            text = format_cell(cell.value, decimals)
            return text if cell.sd is None else f"{text} ± {format_cell(cell.sd, decimals)}"
        case bool():
            return "yes" if cell else "no"
        case Integral():
            return f"{cell:,}"
        case float() if not math.isnan(cell):
            if decimals is None:
                digits = 2 - math.floor(math.log10(abs(cell))) if cell else 0
                return f"{round(cell, digits):,.{min(max(digits, 0), 4)}f}"
            return f"{cell:,.{decimals}f}"
        case _:
            return MISSING


@dataclass(frozen=True, kw_only=True)
class Table:
    """Lines of cells under headings."""

    name: str
    """Name of the table's files."""
    title: str
    note: str = ""
    """Explanation for the reader."""
    headings: tuple[str, ...]
    lines: Sequence[Sequence[Cell]]
    decimals: int | None = 1
    """Decimals of numbers that are not counts; None means three significant digits."""
    text_columns: int = 1
    """Columns from the left that hold names."""
    bold: frozenset[tuple[int, int]] = frozenset()
    """Line and column of the cells that Markdown sets in bold."""

    def cells(self) -> list[list[str]]:
        """Return every cell as text."""
        return [[format_cell(cell, self.decimals) for cell in line] for line in self.lines]

    def text(self, width: int) -> str:
        """Return title, table and note for a terminal, with the columns that fit in its width."""
        for count in range(len(self.headings), self.text_columns, -1):
            lines = [line[:count] for line in self.lines]
            table = replace(self, headings=self.headings[:count], lines=lines).format_lines(
                "simple"
            )
            if table.find("\n") <= width:
                break
        return f"{self.title}\n{table}\n{self.note}\n"

    def markdown(self) -> str:
        """Return title, note and table."""
        table = self.format_lines("pipe", lambda text: text.replace("|", "\\|"), bold="**{}**")
        return "\n\n".join(part for part in (f"## {self.title}", self.note, table) if part)

    def csv(self) -> str:
        """Return unrounded numbers; a column "HEADING sd" has the standard deviations, if any."""
        columns = []
        values_by_column = list(zip(*self.lines, strict=True)) or [()] * len(self.headings)
        for heading, values in zip(self.headings, values_by_column, strict=True):
            numbers = [cell.value if isinstance(cell, Estimate) else cell for cell in values]
            columns.append(pd.Series(numbers, name=heading, dtype=object))
            deviations = [cell.sd if isinstance(cell, Estimate) else None for cell in values]
            if any(deviation is not None for deviation in deviations):
                columns.append(pd.Series(deviations, name=f"{heading} sd", dtype=object))
        text: str = pd.concat(columns, axis=1).to_csv(index=False, lineterminator="\n")
        return text

    def format_lines(
        self, layout: str, escape: Callable[[str], str] = str, bold: str = "{}"
    ) -> str:
        """Return the cells in one of tabulate's layouts; ``bold`` is the format of bold cells."""
        number_columns = len(self.headings) - self.text_columns
        alignment = ["left"] * self.text_columns + ["right"] * number_columns
        lines = [
            [
                (bold if (row, column) in self.bold else "{}").format(escape(cell))
                for column, cell in enumerate(line)
            ]
            for row, line in enumerate(self.cells())
        ]
        text = tabulate(
            lines,
            [escape(heading) for heading in self.headings],
            tablefmt=layout,
            disable_numparse=True,
            colalign=alignment if lines else None,
        )
        return str(text)


def find_best(
    lines: Sequence[Sequence[Cell]], columns: Sequence[int]
) -> frozenset[tuple[int, int]]:
    """Return line and column of the highest numbers of columns; only one decimal is compared.

    >>> sorted(find_best([("a", 1.0), ("b", 2.04), ("c", 2.0)], [1]))
    [(1, 1), (2, 1)]
    """
    cells = pd.DataFrame(list(lines))[list(columns)]
    numbers = cells.map(lambda cell: cell.value if isinstance(cell, Estimate) else cell)
    rounded = numbers.astype(float).round(1)
    best = np.argwhere(rounded.eq(rounded.max()))
    return frozenset((line, columns[position]) for line, position in best.tolist())
