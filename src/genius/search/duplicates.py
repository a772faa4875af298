"""Items whose IDs begin alike: collisions where all of the ID is shared, near-duplicates where most is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int16, Int64

from genius.errors import UsageError
from genius.search.prefixes import continuations
from genius.search.table import IdTable
from genius.search.tree import CodeTree, Ranges


class Shared(NamedTuple):
    """Prefixes that several items share, those of most items first."""

    ranges: Ranges
    items: Int64[np.ndarray, " prefixes"]
    """How many share each."""


def shared(tree: CodeTree, depth: int) -> Shared:
    """All prefixes of so many codes with at least two items; equally large ones in order of their codes.

    Inside a part they are read off the table, which knows where prefixes begin. Only those that are in
    several parts are looked for level by level; where one part is large and the others are what was added
    lately, they are few.

    Raises
    ------
    UsageError
        a prefix needs a code at least.
    """
    if depth < 1:
        raise UsageError(f"prefixes of {depth} codes are asked for; they need one at least")
    several = _in_several_parts(tree, depth)
    found = [several, *(_in_one_part(tree, number, depth, several) for number in range(len(tree.parts)))]
    ranges = Ranges(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    counts = tree.count(ranges)
    kept = np.flatnonzero(counts > 1)
    ranges, counts = Ranges(ranges.low[kept], ranges.high[kept]), counts[kept]
    codes = first_codes(tree, ranges, depth)
    order = np.lexsort([*codes.T[::-1], -counts])
    return Shared(Ranges(ranges.low[order], ranges.high[order]), counts[order])


def first_codes(tree: CodeTree, ranges: Ranges, depth: int) -> Int16[np.ndarray, "prefixes depth"]:
    """The codes of prefixes, none of which is empty in all parts."""
    codes = np.zeros((len(ranges.low), depth), dtype=np.int16)
    for number, part in enumerate(tree.parts):
        here = np.flatnonzero(ranges.high[:, number] > ranges.low[:, number])
        codes[here] = part.table.ids[ranges.low[here, number], :depth]
    return codes


def _in_several_parts(tree: CodeTree, depth: int) -> Ranges:
    """Prefixes that more than one part has."""
    ranges = tree.root()
    if len(tree.parts) < 2:
        return Ranges(ranges.low[:0], ranges.high[:0])
    for level in range(depth):
        children = continuations(tree.parts, level, *ranges)
        chosen = np.flatnonzero((children.high > children.low).sum(axis=1) > 1)
        ranges = Ranges(children.low[chosen], children.high[chosen])
    return ranges


def _in_one_part(tree: CodeTree, number: int, depth: int, several: Ranges) -> Ranges:
    """Prefixes with at least two items, deleted or not, that no other part has."""
    table = tree.parts[number].table
    begins = _begins(table, depth)
    ends = np.append(begins[1:], len(table))
    items = table.bucket_starts[ends].astype(np.int64) - table.bucket_starts[begins]
    elsewhere = several.low[several.high[:, number] > several.low[:, number], number]
    chosen = np.flatnonzero(items > 1)
    chosen = chosen[~np.isin(begins[chosen], elsewhere)]
    low = np.zeros((len(chosen), len(tree.parts)), dtype=np.int64)
    high = np.zeros_like(low)
    low[:, number], high[:, number] = begins[chosen], ends[chosen]
    return Ranges(low, high)


def _begins(table: IdTable, depth: int) -> Int64[np.ndarray, " prefixes"]:
    """The row at which each prefix of so many codes begins."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    later = np.sort(table.starts[: table.level_bounds[depth]], kind="stable")  # a few ascending runs
    return np.concatenate([np.zeros(1, dtype=np.int64), later])
