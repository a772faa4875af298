"""Where the microseconds of a search go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from genius.bench.stopwatch import Stopwatch, Watched
from genius.bench.timing import latencies
from genius.search import beam, searcher
from genius.search.frontier import Frontier
from genius.search.rank import CodeRanker
from genius.search.table import IdTable

CONSTRAINT: Final = ("children", "leaves")
"""Parts that keep to IDs that exist."""
WATCHED: Final = (
    Watched(beam, "continuations", "children"),
    Watched(beam, "count_ids", "leaves"),
    Watched(beam, "best", "best"),
    Watched(beam, "_picked", "scores picked"),
    Watched(Frontier, "grown", "beams grown"),
    Watched(Frontier, "take", "beams taken"),
    Watched(beam.Run, "__init__", "set-up"),
    Watched(beam.Run, "decode", "the loop over levels"),
    Watched(beam.Run, "_begin", "root"),
    Watched(beam.Run, "_continue", "children"),
    Watched(beam.Run, "_gained", "scores picked"),
    Watched(beam.Run, "_leaves", "leaves"),
    Watched(beam.Run, "_finish", "beams finished"),
    Watched(beam.Run, "beams", "beams returned"),
    Watched(IdTable, "children", "children"),
    Watched(IdTable, "buckets", "items of leaves"),
    Watched(searcher, "_leaves", "rows of leaves"),
    Watched(CodeRanker, "scores", "look-ups"),
    Watched(searcher, "_by_codes", "IDs of leaves"),
    Watched(searcher, "_items", "items of leaves"),
    Watched(searcher, "highest", "ordering"),
)


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """One part of a search."""

    part: str
    calls: float
    """A query, on average."""
    cpu_us: float
    """CPU-microseconds a query; parts inside it not included, but for watching them."""
    share: float
    """Of all."""


def profile(
    plain: Callable[[int], object],
    watched: Callable[[int], object],
    watch: Stopwatch,
    num_queries: int,
) -> list[ProfileRow]:
    """The parts of a search, the largest first; then the whole, watched and not.

    Parameters
    ----------
    plain, watched
        answer one query; the second with a decoder that ``watch`` looks at.
    """
    unwatched = latencies({"plain": plain}, num_queries)["plain"]
    with watch.watching(WATCHED):
        watched(0)
        watch.clear()
        began = time.process_time()
        for query in range(num_queries):
            watched(query)
        whole = time.process_time() - began
    parts = [
        ProfileRow(
            part=part,
            calls=watch.calls[part] / num_queries,
            cpu_us=1e6 * seconds / num_queries,
            share=seconds / whole,
        )
        for part, seconds in watch.seconds.items()
    ]
    rest = whole - sum(watch.seconds.values())
    parts.append(
        ProfileRow(part="everything between", calls=1.0, cpu_us=1e6 * rest / num_queries, share=rest / whole)
    )
    parts.sort(key=lambda row: -row.cpu_us)
    parts.append(ProfileRow(part="all, watched", calls=1.0, cpu_us=1e6 * whole / num_queries, share=1.0))
    plain_us = 1000 * unwatched.mean_cpu_ms
    parts.append(
        ProfileRow(
            part="all, not watched", calls=1.0, cpu_us=plain_us, share=plain_us / (1e6 * whole / num_queries)
        )
    )
    return parts
