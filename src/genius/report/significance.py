"""Which differences are more than chance: paired tests between systems, corrected for how many there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from genius.report.statistics import Comparison, PerTask, compare, holm
from genius.report.table import Cell, Table


class Pair(NamedTuple):
    """Two systems on the same queries."""

    first: str
    second: str
    measure: str
    values: tuple[PerTask, PerTask]


class Tested(NamedTuple):
    """A pair with its test."""

    pair: Pair
    found: Comparison
    p: float
    """Corrected for all pairs that were tested together."""


def tested(pairs: Sequence[Pair]) -> list[Tested]:
    """Every pair, Holm's correction over all of them."""
    found = [compare(*pair.values) for pair in pairs]
    corrected = holm([one.p for one in found])
    return [Tested(*parts) for parts in zip(pairs, found, corrected, strict=True)]


def significance_table(pairs: Sequence[Pair], *, name: str, title: str) -> Table | None:
    """A line for each pair; nothing without any."""
    if not pairs:
        return None
    lines: list[tuple[Cell, ...]] = [
        (
            one.pair.first,
            one.pair.second,
            one.pair.measure,
            f"{100 * one.found.difference:+.1f}".replace("-", "−"),
            one.found.better,
            one.found.worse,
            shown_p(one.p),
            "yes" if one.p < 0.05 else "no",
        )
        for one in tested(pairs)
    ]
    return Table(
        name=name,
        title=title,
        note="Difference in points; queries that the first answers better and worse (the mean over seeds); "
        "p of the paired randomisation test over queries, two-sided, corrected by Holm for all lines of this "
        "table. It says nothing of other seeds: their spread stands beside the means.",
        headings=("system", "against", "measure", "difference", "better", "worse", "p", "below 0.05"),
        lines=lines,
        text_columns=3,
    )


def shown_p(p: float) -> str:
    """Not smaller than the number of resamples can tell."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
