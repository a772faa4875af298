"""A state of an index, ready to be searched: its tables, what was deleted, what earlier filters allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64, Integer, UInt8
from torch import Tensor

from genius_search.errors import UsageError
from genius_search.index.filters import Filter
from genius_search.index.items import Item
from genius_search.index.store import IndexState, Segment
from genius_search.records import Modality
from genius_search.search.rank import Vectors
from genius_search.search.table import Allowed, Part, Restriction
from genius_search.search.tree import CodeTree, Shared, shared

FILTERS_KEPT: Final = 16
"""What so many filters allow is kept: about 1.2 bytes an item each."""


class UnknownItem(UsageError, LookupError):
    """An item that is named is not in the index."""


class Place(NamedTuple):
    """Where an item is in a state of an index."""

    part: int
    """Which segment."""
    row: int
    """Which item of it."""


class OpenedIndex:
    """What a search needs of an index; the state it was opened in, for as long as it is held."""

    def __init__(self, state: IndexState) -> None:
        self.state = state
        self._restrictions: dict[Filter, Restriction] = {}
        self._shared: dict[int, Shared] = {}

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Its segments, which are searched as parts of one pool."""
        return self.state.segments

    @cached_property
    def parts(self) -> list[Part]:
        """The segments' tables, with what is alive in them."""
        alive = [(segment.table, segment.alive()) for segment in self.segments]
        return [Part(table, None if mask is None else Allowed.of(table, mask)) for table, mask in alive]

    @cached_property
    def tree(self) -> CodeTree:
        """The tree of its codes."""
        return CodeTree(self.parts)

    def shared(self, depth: int) -> Shared:
        """Prefixes of so many codes that several items share; kept once found."""
        found = self._shared.get(depth)
        if found is None:
            found = self._shared[depth] = shared(self.tree, depth)
        return found

    @property
    def vectors(self) -> list[Vectors] | None:
        """Gives stored embeddings, part by part; None when there are none."""
        if self.state.facts.embeddings == "none":
            return None
        return [_vectors(segment) for segment in self.segments]

    @property
    def densities(self) -> list[UInt8[np.ndarray, " items"]] | None:
        """How crowded it is around items, part by part; None where that of some was not kept.

        Around IDs it is more crowded, so scores of parts that know one or the other would not compare.
        """
        known = [segment.densities for segment in self.segments if segment.densities is not None]
        return known if len(known) == len(self.segments) else None

    @cached_property
    def usual_modality(self) -> Modality:
        """The most frequent modality.

        Deleted items count until they are compacted away: to subtract them each would have to be read.
        """
        counts: Counter[Modality] = Counter()
        for segment in self.segments:
            counts.update(segment.items.count_by_modality())
        return counts.most_common(1)[0][0]

    def restriction(self, wanted: Filter) -> Restriction:
        """Which items a filter allows, of those that are alive."""
        known = self._restrictions.get(wanted)
        if known is None:
            known = tuple(_allowed(segment, wanted) for segment in self.segments)
            while len(self._restrictions) >= FILTERS_KEPT:
                self._restrictions.pop(next(iter(self._restrictions)), None)
            self._restrictions[wanted] = known
        return known

    def items(self, parts: Int64[np.ndarray, " hits"], rows: Int64[np.ndarray, " hits"]) -> list[Item]:
        """Items by part and row, in this order."""
        found: dict[tuple[int, int], Item] = {}
        for number, segment in enumerate(self.segments):
            here = rows[parts == number].tolist()
            found.update(
                ((number, row), _located(segment, item))
                for row, item in zip(here, segment.items.get(here), strict=True)
            )
        return [found[part, row] for part, row in zip(parts.tolist(), rows.tolist(), strict=True)]

    def place_of(self, item_id: str) -> Place:
        """Where an item is.

        Raises
        ------
        UsageError
            it is not there.
        """
        for number, segment in enumerate(self.segments):
            for row in segment.items.rows_by_id([item_id]).values():
                if not segment.is_dead(np.array([row])).any():
                    return Place(number, row)
        raise UnknownItem(f"there is no item {item_id!r} in this index")

    def item_at(self, place: Place) -> Item:
        """The item at a place."""
        return self.items(np.array([place.part]), np.array([place.row]))[0]

    def id_at(self, place: Place) -> Integer[np.ndarray, " columns"]:
        """The ID of the item at a place: codes, then half norm and density."""
        table = self.segments[place.part].table
        (listed,) = np.flatnonzero(table.items == place.row)
        return np.asarray(table.ids[np.searchsorted(table.bucket_starts, listed, side="right") - 1])

    def stamps(self, item_ids: Sequence[str]) -> dict[str, str | None]:
        """Stamps of those of these items that are alive."""
        stamps: dict[str, str | None] = {}
        for segment in self.segments:
            rows = segment.items.rows_by_id(item_ids)
            if not rows:
                continue
            names = list(rows)
            is_dead = segment.is_dead(np.array([rows[name] for name in names], dtype=np.int64))
            here = segment.items.stamps(names)
            stamps |= {name: here[name] for name, dead in zip(names, is_dead, strict=True) if not dead}
        return stamps


def _located(segment: Segment, item: Item) -> Item:
    """Its picture's path from wherever one is: one that is kept in the index is named from there."""
    if item.image is None:
        return item
    return item._replace(image=str(segment.folder.parents[1] / item.image))


def _allowed(segment: Segment, wanted: Filter) -> Allowed:
    mask = np.zeros(segment.table.num_items, dtype=bool)
    mask[segment.items.matching(wanted)] = True
    mask[segment.dead] = False
    return Allowed.of(segment.table, mask)


def _vectors(segment: Segment) -> Vectors:
    def vectors(rows: Int64[np.ndarray, " items"]) -> Float[Tensor, "items dim"]:
        return torch.from_numpy(segment.vectors(rows))

    return vectors
