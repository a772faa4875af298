"""Settings of the benchmarks; light enough to be imported for ``--help``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from annotated_types import Gt, Le

from genius_search.config import Count, Natural, checked

Part = Literal["plain", "filtered"]
Percent = Annotated[float, Gt(0), Le(100)]


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of ``python -m research.bench``."""

    items: tuple[float, ...] = (1e6,)
    """Sizes of further pools: the data set's items, and more that are invented. The data set's own pool
    always comes first; smaller sizes, such as 0, are ignored."""

    parts: tuple[Part, ...] = ("plain", "filtered")
    """What is measured."""

    graph_items: Natural = 300_000
    """Graphs are built in pools of up to so many items. A million of 384 numbers take half an hour."""

    split: str = "test"
    """Split of a data set in M-BEIR's layout."""

    queries: Count = 1000
    """Queries at most, of all rows together."""

    timed: Count = 100
    """Queries timed one by one."""

    batch: Count = 64
    """Queries timed together."""

    rounds: Count = 3
    """Times that a batch is timed."""

    shares: tuple[Percent, ...] = (50.0, 10.0, 1.0, 0.1)
    """Percent of the items that filters allow."""

    quick: bool = False
    """Try the command in a minute or two: at most 2,000 real items, 200 queries, few rounds."""

    seed: Natural = 0
    """Seed of what is invented and drawn."""

    def resolved(self) -> SearchSettings:
        """Return the settings of a run, quick or not; raises UsageError where one is out of range."""
        quick = replace(self, items=(4e3,), queries=200, timed=20, rounds=1) if self.quick else self
        return checked(quick)
