"""Where shards begin: prefixes that cut the sorted IDs of a pool into ranges of about the same size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from jaxtyping import Bool, Int64, Integer

from genius_search.errors import UsageError
from genius_search.search.table import IdTable

SAMPLED_IDS: Final = 1 << 20
"""IDs that say where shards begin."""
SLACK: Final = 0.02
"""Share of a shard by which its size may differ from the others."""


def sample_ids(tables: Iterable[tuple[IdTable, Bool[np.ndarray, " _"] | None]], num_items: int) -> IdTable:
    """Return a table of IDs that are evenly spaced in every given one.

    Parameters
    ----------
    tables
        each with a mask of the items that count, or None if all do.
    num_items
        number of items that count in all tables.
    """
    step = 1 + num_items // SAMPLED_IDS
    sample = [np.zeros((0, 1), np.int16)]
    for table, mask in tables:
        if mask is None:
            wanted = np.arange(0, table.num_items, step)
        else:
            wanted = np.flatnonzero(mask[table.items])[::step]
        rows = np.searchsorted(table.bucket_starts, wanted, side="right") - 1
        sample.append(table.ids[rows].astype(np.int16))
    codes = np.concatenate(sample[1:] or sample)
    return IdTable.build(codes, np.zeros(len(codes)))


def place_ids(
    codes: Integer[np.ndarray, "ids columns"], cuts: Sequence[Sequence[int]]
) -> Int64[np.ndarray, " ids"]:
    """Return the shard of each ID; ``cuts`` are the prefixes at which the shards after the first begin."""
    shards = np.zeros(len(codes), dtype=np.int64)
    for cut in cuts:
        is_below = np.zeros(len(codes), dtype=bool)
        is_equal = ~is_below
        for level, code in enumerate(cut):
            is_below |= is_equal & (codes[:, level] < code)
            is_equal &= codes[:, level] == code
        shards += ~is_below
    return shards


def choose_cuts(table: IdTable, shards: int) -> list[tuple[int, ...]]:
    """Choose the prefixes at which the second shard and those after it begin.

    Shards get equally many items of the table, up to :data:`SLACK` of a shard, where the shortest prefixes
    are taken, so that the codes of the first levels need not be split. Fewer cuts are returned if there are
    fewer IDs than shards.

    Raises
    ------
    UsageError
        ``shards`` is below 1.
    """
    if shards < 1:
        raise UsageError(f"--shards is {shards}, expected 1 or more")
    share = table.num_items / shards
    cuts: list[tuple[int, ...]] = []
    last = 0
    for number in range(1, shards):
        start, prefix = _nearest_prefix(table, number * share, SLACK * share)
        if start > last:
            cuts.append(prefix)
            last = start
    return cuts


def _nearest_prefix(table: IdTable, target: float, slack: float) -> tuple[int, tuple[int, ...]]:
    """Return the shortest prefix whose items begin within ``slack`` of ``target``, and where they begin."""
    low, high = 0, len(table)
    prefix: tuple[int, ...] = ()
    best: tuple[int, tuple[int, ...]] = (0, ())
    for level in range(table.num_levels):
        children = table.children(level, np.array([low]), np.array([high]))
        starts = table.bucket_starts[children.low].astype(np.int64)
        place = int(np.searchsorted(starts, target, side="right")) - 1
        for near in range(place, min(place + 2, len(starts))):
            if abs(starts[near] - target) < abs(best[0] - target):
                best = (int(starts[near]), (*prefix, int(children.code[near])))
        if abs(best[0] - target) <= slack:
            break
        low, high = int(children.low[place]), int(children.high[place])
        prefix = (*prefix, int(children.code[place]))
    return best


def row_of(table: IdTable, prefix: Sequence[int]) -> int:
    """Return the first row of a table whose ID is not below a prefix."""
    low, high = 0, len(table)
    for level, code in enumerate(prefix):
        children = table.children(level, np.array([low]), np.array([high]))
        place = int(np.searchsorted(children.code, code))
        if place == len(children.code):
            return high
        low = int(children.low[place])
        if children.code[place] != code:
            return low
        high = int(children.high[place])
    return low
