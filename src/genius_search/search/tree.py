"""The IDs of a pool as a tree of codes: items below a prefix, shared prefixes, and the way to one ID."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Float32, Int16, Int64

from genius_search.errors import UsageError
from genius_search.search.table import (
    Children,
    Restriction,
    SearchSegment,
    children_in_segments,
    count_ids,
)

if TYPE_CHECKING:
    from torch import Tensor

    from genius_search.search.decoder import Decoder


class UnknownPrefix(UsageError, LookupError):
    """No ID begins with these codes."""


class Ranges(NamedTuple):
    """Prefixes, each a range of rows in the table of every segment."""

    low: Int64[np.ndarray, "prefixes segments"]
    high: Int64[np.ndarray, "prefixes segments"]

    def take(self, chosen: Int64[np.ndarray, " kept"]) -> Ranges:
        """Return the chosen prefixes."""
        return Ranges(self.low[chosen], self.high[chosen])


class Picked(NamedTuple):
    """A sample of the items below prefixes, prefix after prefix."""

    owner: Int64[np.ndarray, " picked"]
    """Index of each item's prefix."""
    segments: Int64[np.ndarray, " picked"]
    rows: Int64[np.ndarray, " picked"]
    """Row of each item in its segment."""


class SharedPrefixes(NamedTuple):
    """Prefixes shared by several items, in descending order of their number of items."""

    ranges: Ranges
    items: Int64[np.ndarray, " prefixes"]
    """Number of items below each prefix."""


class Step(NamedTuple):
    """One level of an ID: its code among the allowed codes after the same prefix."""

    children: Children
    items: Int64[np.ndarray, " children"]
    """Number of items below each child."""
    log_probabilities: Float32[np.ndarray, " children"]
    """Log-probability of each child, as added to the score of a beam."""
    probabilities: Float32[np.ndarray, " children"]
    """Probabilities normalised over the children; they sum to 1."""
    own: int
    """Position of the ID's code among the children."""

    @property
    def rank(self) -> int:
        """Rank of the ID's code, from 1. Ties are sorted by code."""
        values = self.log_probabilities
        return 1 + int((values > values[self.own]).sum() + (values[: self.own] == values[self.own]).sum())


class CodeTree:
    """Tree view of the ID tables of a pool. Deleted items do not count.

    A table stores its items in the order of their IDs, so the items below a prefix are a range, with or
    without the deleted ones. Counting is a subtraction and picking a look-up; only the positions of deleted
    items are computed in advance.
    """

    def __init__(self, segments: Sequence[SearchSegment]) -> None:
        self.segments = segments

    def root(self) -> Ranges:
        """Return the empty prefix."""
        high = np.array([[len(segment.table) for segment in self.segments]], dtype=np.int64)
        return Ranges(np.zeros_like(high), high)

    def find(self, prefix: Sequence[int]) -> Ranges:
        """Return the ranges of the IDs that begin with these codes.

        Raises
        ------
        UnknownPrefix
            No ID does.
        """
        ranges = self.root()
        for level, code in enumerate(prefix):
            children, _ = self.children(ranges, level)
            ranges = _ranges_of(children).take(np.flatnonzero(children.code == code))
            if not len(ranges.low):
                shown = " ".join(map(str, prefix[: level + 1]))
                raise UnknownPrefix(f"no item of this index has an ID that begins with {shown}")
        return ranges

    def children(self, ranges: Ranges, level: int) -> tuple[Children, Int64[np.ndarray, " children"]]:
        """Return the codes that continue prefixes at a level, and the number of items below each (not 0)."""
        if not self.segments:
            nothing = np.zeros(0, dtype=np.int64)
            return Children(nothing, nothing, *ranges.take(nothing)), nothing
        children = children_in_segments(self.segments, level, *ranges)
        counts = self.count(_ranges_of(children))
        alive = np.flatnonzero(counts)
        return children.take(alive), counts[alive]

    def count(self, ranges: Ranges) -> Int64[np.ndarray, " prefixes"]:
        """Count the items below each prefix."""
        return np.asarray((self._items_before(ranges.high) - self._items_before(ranges.low)).sum(axis=1))

    def pick(self, ranges: Ranges, most: int) -> Picked:
        """Pick up to ``most`` items below each prefix, evenly spaced."""
        first = self._items_before(ranges.low)
        below = np.pad((self._items_before(ranges.high) - first).cumsum(axis=1), ((0, 0), (1, 0)))
        total = below[:, -1]
        taken = np.minimum(total, most)
        owner = np.arange(len(taken)).repeat(taken)
        turn = np.arange(len(owner)) - (taken.cumsum() - taken)[owner]
        position = (2 * turn + 1) * total[owner] // (2 * taken[owner])
        segments = (below[owner, 1:] <= position[:, None]).sum(axis=1)
        position += first[owner, segments] - below[owner, segments] if len(owner) else 0
        rows = np.empty_like(position)
        for number, (segment, deleted) in enumerate(zip(self.segments, self._deleted, strict=True)):
            mine = np.flatnonzero(segments == number)
            alive_before = deleted - np.arange(len(deleted))
            rows[mine] = segment.table.items[
                position[mine] + alive_before.searchsorted(position[mine], "right")
            ]
        return Picked(owner, segments, rows)

    def first_codes(self, ranges: Ranges, depth: int) -> Int16[np.ndarray, "prefixes depth"]:
        """Return the first ``depth`` codes of prefixes, each of which occurs in some segment."""
        codes = np.zeros((len(ranges.low), depth), dtype=np.int16)
        for number, segment in enumerate(self.segments):
            in_segment = np.flatnonzero(ranges.high[:, number] > ranges.low[:, number])
            codes[in_segment] = segment.table.ids[ranges.low[in_segment, number], :depth]
        return codes

    def shared_prefixes(self, depth: int) -> SharedPrefixes:
        """Return all prefixes of ``depth`` codes with at least two items. Ties are sorted by their codes.

        Raises
        ------
        UsageError
            ``depth`` is below 1.
        """
        if depth < 1:
            raise UsageError(f"depth is {depth}, it must be at least 1")
        ranges, counts = self.root(), np.zeros(0, dtype=np.int64)
        for level in range(depth):
            children, counts = self.children(ranges, level)
            kept = np.flatnonzero(counts > 1)
            ranges, counts = _ranges_of(children).take(kept), counts[kept]
        order = np.lexsort([*self.first_codes(ranges, depth).T[::-1], -counts])
        return SharedPrefixes(ranges.take(order), counts[order])

    @cached_property
    def _deleted(self) -> list[Int64[np.ndarray, " deleted"]]:
        """Positions of each segment's deleted items in the order of their IDs."""
        return [
            np.zeros(0, dtype=np.int64)
            if segment.alive is None
            else np.flatnonzero(~segment.alive.items[segment.table.items])
            for segment in self.segments
        ]

    def _items_before(
        self, rows: Int64[np.ndarray, "prefixes segments"]
    ) -> Int64[np.ndarray, "prefixes segments"]:
        """Count the items, without deleted ones, before each row of the tables."""
        positions = np.empty_like(rows)
        for number, (segment, deleted) in enumerate(zip(self.segments, self._deleted, strict=True)):
            before = segment.table.bucket_starts[rows[:, number]].astype(np.int64)
            positions[:, number] = before - deleted.searchsorted(before)
        return positions


def _ranges_of(children: Children) -> Ranges:
    return Ranges(children.low, children.high)


def score_path(
    tree: CodeTree,
    decoder: Decoder,
    embedding: Float[Tensor, "1 dim"],
    codes: Sequence[int],
    scores: Literal["level", "vocabulary"],
    *,
    level0: frozenset[int] = frozenset(),
    restriction: Restriction | None = None,
) -> list[Step]:
    """Return the probabilities of an ID's codes and their alternatives at each level, in one pass.

    Log-probabilities equal those of beam search with the same settings, for the query with this embedding.
    The ID's own codes are included even if no item below them is allowed.

    Parameters
    ----------
    level0
        allowed level-0 codes; empty means any.
    restriction
        allowed items; None means all that are not deleted.
    """
    import torch  # noqa: PLC0415  the tree needs none

    with torch.inference_mode():
        read = torch.tensor([codes[:-1]], dtype=torch.int64, device=decoder.device)
        start = decoder.start(embedding.to(decoder.device), [level0])
        hidden = decoder.advance(start, read).hidden[0]
        steps = []
        ranges = tree.root()
        for level, code in enumerate(codes):
            children, items = tree.children(ranges, level)
            is_allowed = np.ones(len(items), dtype=bool)
            if restriction is not None:
                owner = np.zeros(len(items), dtype=np.int64)
                is_allowed = count_ids(children.low, children.high, [restriction], owner) > 0
            if level == 0 and level0:
                is_allowed &= np.isin(children.code, list(level0))
            kept = np.flatnonzero(is_allowed | (children.code == code))
            children, items = children.take(kept), items[kept]
            values = decoder.log_probabilities(hidden[level : level + 1], level, scores)[0]
            gained = values.float().cpu()[torch.from_numpy(children.code)]
            own = int(np.flatnonzero(children.code == code)[0])
            steps.append(Step(children, items, gained.numpy(), gained.softmax(dim=0).numpy(), own))
            ranges = _ranges_of(children).take(np.array([own]))
    return steps
