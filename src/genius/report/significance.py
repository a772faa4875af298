"""Which differences are more than chance: paired tests between systems, corrected for how many there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from genius.report.statistics import Comparison, PerTask, compare, holm, same_queries
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


def compared(pairs: Sequence[Pair], advance: Callable[[int], None] | None = None) -> list[Tested | None]:
    """Every pair, Holm's correction over all of them; nothing where the two answered different queries.

    ``advance`` is told how many are done.
    """
    found: list[Comparison | None] = []
    for pair in pairs:
        found.append(compare(*pair.values) if same_queries(*pair.values) else None)
        if advance is not None:
            advance(len(found))
    corrected = iter(holm([one.p for one in found if one is not None]))
    return [
        None if one is None else Tested(pair, one, next(corrected))
        for pair, one in zip(pairs, found, strict=True)
    ]


def significance_table(
    pairs: Sequence[Pair], *, name: str, title: str, advance: Callable[[int], None] | None = None
) -> Table | None:
    """A line for each pair that answered the same queries; nothing without any pair."""
    if not pairs:
        return None
    found = compared(pairs, advance)
    apart = sorted(
        {f"{pair.first} against {pair.second}" for pair, one in zip(pairs, found, strict=True) if one is None}
    )
    left_out = f" Not tested, since they answered different queries: {'; '.join(apart)}." if apart else ""
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
        for one in found
        if one is not None
    ]
    return Table(
        name=name,
        title=title,
        note="Difference in points; queries that the first answers better and worse (the mean over seeds); "
        "p of the paired randomisation test over queries, two-sided, corrected by Holm for all lines of this "
        "table. It says nothing of other seeds: their spread stands beside the means." + left_out,
        headings=("system", "against", "measure", "difference", "better", "worse", "p", "below 0.05"),
        lines=lines,
        text_columns=3,
    )


def shown_p(p: float) -> str:
    """Not smaller than the number of resamples can tell."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
