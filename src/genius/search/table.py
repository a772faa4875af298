"""The ID table of a pool: sorted distinct IDs, and which items each stands for.

A prefix is a range of rows. Its children are the sub-ranges in which the next code differs, found from the
sorted list of rows where a prefix of each length begins; no pointers, no strings.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int16, Int64, Integer

from genius.errors import BadData

LARGEST_CODE = np.iinfo(np.int16).max


class Children(NamedTuple):
    """Continuations of some prefixes, those of one prefix next to one another."""

    parent: Int64[np.ndarray, " children"]
    """Which of the given prefixes it continues."""
    code: Int64[np.ndarray, " children"]
    low: Int64[np.ndarray, " children"]
    """First row of the table that begins with it."""
    high: Int64[np.ndarray, " children"]
    """One past the last."""


class IdTable:
    """All IDs that exist in a pool.

    Parameters
    ----------
    ids
        distinct, in lexicographic order.
    bucket_starts
        where the items of each ID begin in ``items``; one more entry than IDs.
    items
        item rows, by ID, the most typical of an ID first.
    """

    def __init__(
        self,
        ids: Int16[np.ndarray, "ids levels"],
        bucket_starts: Int64[np.ndarray, " bounds"],
        items: Int64[np.ndarray, " items"],
    ) -> None:
        self.ids = ids
        self.bucket_starts = bucket_starts
        self.items = items
        self._starts = _prefix_starts(ids)

    @staticmethod
    def build(codes: Integer[np.ndarray, "items levels"], typicality: Float[np.ndarray, " items"]) -> IdTable:
        """Sort items into a table; inside an ID the larger ``typicality`` comes first, then the lower row.

        Deviation 18: the released code lists the items of an ID in the pool's order.
        """
        if len(codes) and (codes.min() < 0 or codes.max() > LARGEST_CODE):
            raise BadData(f"codes must lie in 0 … {LARGEST_CODE}, these span {codes.min()} … {codes.max()}")
        order = np.lexsort([-typicality.astype(np.float32), *codes.T[::-1]])  # stable: then by row
        ordered = codes[order].astype(np.int16, copy=False)
        is_new = np.ones(len(codes), dtype=bool)
        is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
        starts = np.flatnonzero(is_new)
        return IdTable(ordered[starts], np.append(starts, len(codes)), order)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_levels(self) -> int:
        """Codes in an ID."""
        return int(self.ids.shape[1])

    @property
    def num_items(self) -> int:
        """Items under all IDs."""
        return len(self.items)

    @property
    def nbytes(self) -> int:
        """Bytes of the IDs as they are stored, two for each code."""
        return int(self.ids.nbytes)

    def children(
        self, level: int, low: Int64[np.ndarray, " prefixes"], high: Int64[np.ndarray, " prefixes"]
    ) -> Children:
        """All codes that continue these prefixes (ranges of rows) at ``level``; empty ranges have none."""
        starts = self._starts[level]
        first = np.searchsorted(starts, low)
        last = np.searchsorted(starts, high)
        counts = np.maximum(last - first, 0)
        parent = np.repeat(np.arange(len(low)), counts)
        place = np.arange(len(parent)) - np.repeat(np.cumsum(counts) - counts, counts)
        index = np.repeat(first, counts) + place
        child_low = starts[index]
        child_high = np.append(starts, len(self.ids))[index + 1]
        return Children(
            parent=parent,
            code=self.ids[child_low, level].astype(np.int64),
            low=child_low,
            high=np.minimum(child_high, high[parent]),
        )

    def bucket(self, row: int) -> Int64[np.ndarray, " items"]:
        """Items that have this ID."""
        return self.items[self.bucket_starts[row] : self.bucket_starts[row + 1]]


def _prefix_starts(ids: np.ndarray) -> list[np.ndarray]:
    """For each level, the rows where a new prefix that includes it begins."""
    is_new = np.zeros(len(ids), dtype=bool)
    is_new[:1] = True
    starts = []
    for level in range(ids.shape[1]):
        is_new[1:] |= ids[1:, level] != ids[:-1, level]
        starts.append(np.flatnonzero(is_new))
    return starts
