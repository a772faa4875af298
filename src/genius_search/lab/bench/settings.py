"""Settings of the benchmarks; light enough to be imported for ``--help``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from genius_search.config import Count, Natural
from genius_search.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class SpeedSettings:
    """Settings of ``genius bench speed``."""

    sizes: str = "1e4,1e5,1e6,1e7,1e8"
    """Items in the pools, with commas between."""

    methods: str = "all"
    """ours, numbers (as IDs, as GRACE's), exact, generate (Hugging Face's, and its pointer trie); commas
    between."""

    rival_items: Natural = 1_000_000
    """Exact search and generate are measured up to so many items, and left out beyond."""

    beam: Count = 50
    """IDs kept at each level."""

    small_beam: Count = 10
    """IDs kept at each level within a leaf budget."""

    small_candidates: Count = 1000
    """The leaf budget, of a small decoder where no model is given."""

    timed: Count = 20
    """Queries timed one by one; within a leaf budget ten times as many."""

    batch: Count = 64
    """Queries timed together."""

    rounds: Count = 3
    """Times that a batch is timed."""

    compared: Natural = 40
    """Queries whose rankings are compared with those of generate."""

    seed: Natural = 0
    """Seed of weights, pools and queries."""


@dataclass(frozen=True, kw_only=True)
class QualitySettings:
    """Settings of ``genius bench quality``."""

    split: str = "test"
    """Split of the data set."""

    row: str = ""
    """Rows of the data set, as in its file names; commas between. Left out: all of them."""

    pool: Literal["global", "local"] = "global"
    """Search the union of all pools, or each row's own."""

    queries: Natural = 0
    """Queries of each row at most, spread evenly; 0 means all."""

    seed: Natural = 0
    """Seed of faiss's training samples, and of the choice of instructions."""

    beam: Count = 50
    """IDs kept at each level of the search within a leaf budget."""

    candidates: Count = 500
    """The leaf budget."""

    budgets: str = "150,300,600,1200,2000"
    """Leaf budgets at which the generator and geometry are compared; commas between."""

    grid_beams: str = "1,2,5,10,20,50,100"
    """Beams of the curves; commas between."""

    grid_candidates: str = "0,150,500,1500,5000"
    """Leaf budgets of the curves; 0 decodes all levels, and keeps the generator's order."""

    grid_queries: Natural = 200
    """Queries of each row at most for the curves; 0 leaves the curves out."""


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Settings of ``genius bench search``."""

    items: str = "1e6"
    """Sizes of further pools, with commas between: the data set's items, and more that are invented. The data
    set's own pool always comes first; smaller sizes, such as 0, are ignored."""

    parts: str = "all"
    """plain, candidates, filtered, bytes, updates; commas between."""

    rival_items: Count = 1_000_000
    """Pools of up to so many items have vectors, of which all methods make their indexes. Of larger ones the
    codes alone are invented."""

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

    shares: str = "50,10,1,0.1"
    """Percent of the items that filters allow; commas between."""

    levels: str = "12"
    """Codes of an ID, a byte each, at which faiss's codes of as many bytes stand beside ours."""

    steps: Count = 10
    """Steps in which 1 % of the items are replaced."""

    quick: bool = False
    """Try the command in a minute or two: at most 2,000 real items, 200 queries, few rounds."""

    seed: Natural = 0
    """Seed of what is invented and drawn."""


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Return numbers with commas between, such as ``1e4,1e6``; raises UsageError where they are none."""
    try:
        return tuple(int(float(number)) for number in text.split(","))
    except (ValueError, OverflowError):
        raise UsageError(f"{flag} {text!r}: expected numbers with commas between, such as 1e4,1e6") from None
