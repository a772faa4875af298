"""Items without a search: counted by conditions, listed page by page, and their vectors."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32

from genius_search.border import check_range
from genius_search.errors import UsageError
from genius_search.index.filters import Filter
from genius_search.index.items import Item
from genius_search.index.snapshot import Location, Snapshot, check_files_on_error
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.records import Modality

MAX_PAGE_ITEMS: Final = 100_000
"""Maximum number of items of a page."""


class Page(NamedTuple):
    """Some items of an index, in the order of their ids."""

    items: list[Item]
    cursor: str | None
    """Give it to the next call for the items that follow; None after the last item."""


def as_filter(
    where: Filter | Sequence[str] | Mapping[str, object] = (),
    match: str | None = None,
    modality: Modality | str | None = None,
) -> Filter:
    """Return conditions, as a search takes them, as one filter."""
    conditions = where if isinstance(where, Filter) else Filter.parse(where)
    if match is not None:
        conditions = dataclasses.replace(conditions, match=match)
    if modality is not None:
        conditions = dataclasses.replace(conditions, modality=Modality(Modality.parse(modality)))
    return conditions


def as_delete_filter(
    where: Filter | Sequence[str] | Mapping[str, object],
    match: str | None,
    modality: Modality | str | None,
    *,
    has_ids: bool,
) -> Filter | None:
    """Return the conditions of items to delete; None if ids are given instead.

    Raises
    ------
    UsageError
        There are neither ids nor conditions, or both.
    """
    conditions = as_filter(where, match, modality)
    if has_ids and conditions == Filter():
        return None
    if has_ids or conditions == Filter():
        raise UsageError(
            "give either the ids of the items to delete, or a condition such as "
            "where='price<10'; where='id is not missing' deletes all items"
        )
    return conditions


def item_masks(
    snapshot: Snapshot, conditions: Filter, *, deadline: float = math.inf
) -> list[Bool[np.ndarray, " items"]]:
    """Return for each segment a mask of the items that conditions allow, without passages."""
    masks = []
    if conditions == Filter():
        for segment in snapshot.segments:
            mask = segment.alive_mask()
            masks.append(np.ones(segment.num_items, dtype=bool) if mask is None else mask)
        return masks
    restriction = snapshot.restriction(conditions, deadline=deadline)
    for segment, allowed in zip(snapshot.segments, restriction, strict=True):
        if allowed is not None:
            masks.append(allowed.items[: segment.num_items])
    return masks


def count_items(snapshot: Snapshot, conditions: Filter, *, deadline: float = math.inf) -> int:
    """Return the number of items that conditions allow."""
    with check_files_on_error(snapshot):
        return sum(int(mask.sum()) for mask in item_masks(snapshot, conditions, deadline=deadline))


def list_page(
    snapshot: Snapshot,
    conditions: Filter,
    cursor: str | None,
    limit: int,
    *,
    deadline: float = math.inf,
) -> Page:
    """Return the next items that conditions allow, in the order of their ids.

    Ids are unique and never change, so that an item which exists throughout is listed exactly once,
    whatever is added, deleted, updated or compacted between two pages.

    Raises
    ------
    UsageError
        The limit is out of range.
    """
    check_range("limit", limit, 1, MAX_PAGE_ITEMS)
    with check_files_on_error(snapshot):
        masks = item_masks(snapshot, conditions, deadline=deadline)
        following = heapq.merge(
            *(
                _ids_after(snapshot, number, mask, cursor or "", limit + 1)
                for number, mask in enumerate(masks)
            )
        )
        page = [*islice(following, limit + 1)]
        locations = [location for _, location in page[:limit]]
        segments, rows = np.array(locations, dtype=np.int64).reshape(-1, 2).T
        items = snapshot.items_at(segments, rows)
    return Page(items, items[-1].id if len(page) > limit else None)


def _ids_after(
    snapshot: Snapshot, number: int, mask: Bool[np.ndarray, " items"], last_id: str, count: int
) -> Iterator[tuple[str, Location]]:
    """Yield the ids after an id that a mask of a segment allows, with their locations."""
    items = snapshot.segments[number].items
    while entries := items.ids_after(last_id, count):
        for item_id, row in entries:
            if mask[row]:
                yield item_id, Location(number, row)
        last_id = entries[-1][0]
        count = 2 * count  # conditions may allow few items


def stored_vectors(
    snapshot: Snapshot, model: Genius, ids: Sequence[str]
) -> Float32[np.ndarray, "ids dim"]:
    """Return the stored embeddings of items as unit vectors.

    Raises
    ------
    UsageError
        The index stores no embeddings.
    UnknownItem
        An item is not in the index.
    """
    with check_files_on_error(snapshot):
        locations = np.array([snapshot.locate(item_id) for item_id in ids], dtype=np.int64)
        segments, rows = locations.reshape(-1, 2).T
        vectors = np.zeros((len(ids), model.dim), dtype=np.float32)
        for number in np.unique(segments).tolist():
            positions = np.flatnonzero(segments == number)
            vectors[positions] = snapshot.segments[number].vectors(model.ranker)(rows[positions])
    return np.asarray(normalize(vectors), dtype=np.float32)
