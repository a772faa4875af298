"""Items whose IDs begin alike: collisions where all of the ID is shared, near-duplicates where most is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from genius.errors import UsageError
from genius.search.prefixes import Continuations
from genius.search.tree import CodeTree, Ranges


class Shared(NamedTuple):
    """Prefixes that several items share, those of most items first."""

    ranges: Ranges
    items: Int64[np.ndarray, " prefixes"]
    """How many share each."""


def shared(tree: CodeTree, depth: int) -> Shared:
    """All prefixes of so many codes with at least two items; equally large ones in order of their codes.

    What has a single item is left behind level by level, so little is left after a few.

    Raises
    ------
    UsageError
        a prefix needs a code at least.
    """
    if depth < 1:
        raise UsageError(f"prefixes of {depth} codes are asked for; they need one at least")
    ranges, counts = tree.root(), np.zeros(1, dtype=np.int64)
    for level in range(depth):
        children, counts = tree.children(ranges, level)
        several = np.flatnonzero(counts > 1)
        ranges, counts = _ranges(children, several), counts[several]
    order = np.argsort(-counts, kind="stable")
    return Shared(Ranges(ranges.low[order], ranges.high[order]), counts[order])


def _ranges(children: Continuations, chosen: Int64[np.ndarray, " chosen"]) -> Ranges:
    return Ranges(children.low[chosen], children.high[chosen])
