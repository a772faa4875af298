"""Sorting hits by a field, one hit for each group, and counts of values.

Without a query, all items that meet the conditions are arranged. With one, the hits above a cut-off
are: those whose probability or score reaches the threshold of a good match, or else the first ones.
"""

from __future__ import annotations

import dataclasses
import heapq
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Bool

from genius_search.data.values import Value
from genius_search.errors import UsageError
from genius_search.index.columns import (
    CONTENT,
    FieldColumn,
    ItemField,
    SortKey,
    as_shown,
    find_field,
    read_column,
    sort_key,
)
from genius_search.index.hits import CutOff, FacetValue, Hits, SearchHit
from genius_search.index.listing import as_filter, item_masks, stored_vectors
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Location, Snapshot, check_files_on_error

if TYPE_CHECKING:
    from genius_search.index.query import SnapshotSearcher

NUM_SORTED_HITS: Final = 100
"""Number of first hits that are sorted if the index does not know which are good matches."""
MAX_SORTED_HITS: Final = 1_000
"""Maximum number of good matches that are sorted."""
HITS_PER_GROUP: Final = 4
"""Hits that are searched for each group; if they belong to too few groups, this factor is applied
again."""
MAX_GROUPED_HITS: Final = 10_000
MAX_FACET_VALUES: Final = 100
"""Maximum number of values that are counted for a field, the most frequent first."""
PERIODS: Final = {"year": 4, "month": 7, "day": 10}
"""Name of a period -> number of characters of a time that name it: 7 of ``2024-05-01T12:00``."""
MAX_PERIODS: Final = 2_400
"""Maximum number of periods that are counted for a field, the newest first."""
AUTOMATIC: Final = "ranges"
"""Name of automatic ranges of numbers."""
NUM_RANGES: Final = 5
"""Maximum number of automatic ranges."""
RANGE_BOUNDS: Final = re.compile(r"-?\d{1,15}(\.\d{1,15})?(,-?\d{1,15}(\.\d{1,15})?){0,99}")
NEAR: Final = "near"
NEAR_COSINE: Final = 0.98
"""Least cosine of near-duplicates."""
Masks = list[Bool[np.ndarray, " items"]]


def search_arranged(searcher: SnapshotSearcher, request: SearchRequest) -> Hits:
    """Return the hits of a request that sorts, groups or counts items.

    Raises
    ------
    UnknownField
        No item has the field to sort, group or count by.
    UsageError
        Items cannot be sorted, grouped or counted by it.
    DeadlinePassed
        Reading the fields took until the deadline.
    """
    snapshot = searcher.snapshot
    with check_files_on_error(snapshot):
        conditions = as_filter(request.filter or (), None, request.modality)
        masks = item_masks(snapshot, conditions, deadline=request.deadline)
        facets = {name: _count_values(snapshot, request, name, masks) for name in request.facets}
    if request.query:
        hits = _arrange_hits(searcher, request, masks)
    else:
        with check_files_on_error(snapshot):
            hits = _list_items(snapshot, request, masks)
    hits.facets = facets
    return hits


def _count_values(
    snapshot: Snapshot, request: SearchRequest, name: str, masks: Masks
) -> list[FacetValue]:
    """Return the most frequent values of a field among the items of the masks.

    The name may end with a period: ``taken:month`` counts months, the newest first. It may end with
    the bounds of ranges: ``price:0,10,50``, or ``price:ranges`` for automatic ones.
    """
    field_name, _, unit = name.rpartition(":")
    if field_name and unit in PERIODS:
        return _count_periods(snapshot, request, field_name, PERIODS[unit], masks)
    if field_name and unit == AUTOMATIC:
        return _count_ranges(snapshot, request, field_name, None, masks)
    if field_name and RANGE_BOUNDS.fullmatch(unit):
        bounds = [float(bound) for bound in unit.split(",")]
        return _count_ranges(snapshot, request, field_name, bounds, masks)
    field = find_field(snapshot, name, option="facets")
    totals = Counter[Value]()
    for segment, mask in zip(snapshot.segments, masks, strict=True):
        column = read_column(segment.items, field, deadline=request.deadline)
        counts = column.count(mask)
        for code in np.flatnonzero(counts).tolist():
            totals[column.values[code]] += int(counts[code])
    most_frequent = heapq.nsmallest(
        MAX_FACET_VALUES, totals.items(), key=lambda entry: (-entry[1], sort_key(entry[0]))
    )
    return [FacetValue(as_shown(field, value), count) for value, count in most_frequent]


def _count_periods(
    snapshot: Snapshot, request: SearchRequest, name: str, length: int, masks: Masks
) -> list[FacetValue]:
    """Return the newest periods of a field of times, with the number of items of the masks.

    A time begins with its period: the month of ``b"T2024-05-01T12:00"`` is ``2024-05``.
    """
    field = find_field(snapshot, name, option="facets")
    totals = Counter[str]()
    for segment, mask in zip(snapshot.segments, masks, strict=True):
        column = read_column(segment.items, field, deadline=request.deadline)
        # Times are the last values, since bytes come after numbers and texts.
        flags_and_times = [value for value in column.values if isinstance(value, bytes)]
        times = [value for value in flags_and_times if value.startswith(b"T")]
        first_time = len(column.values) - len(times)
        texts = [value[1 : length + 1].decode() for value in times]
        periods, period_of_time = np.unique(texts, return_inverse=True)
        is_counted = mask[column.rows] & (column.codes >= first_time)
        times_of_items = column.codes[is_counted] - first_time
        pairs = np.stack([column.rows[is_counted], period_of_time[times_of_items]])
        counts = np.bincount(np.unique(pairs, axis=1)[1], minlength=len(periods))
        totals.update(dict(zip(periods.tolist(), counts.tolist(), strict=True)))
    newest = sorted(totals.items(), reverse=True)[:MAX_PERIODS]
    return [FacetValue(period, count) for period, count in newest if count]


def _count_ranges(
    snapshot: Snapshot,
    request: SearchRequest,
    name: str,
    bounds: Sequence[float] | None,
    masks: Masks,
) -> list[FacetValue]:
    """Return the number of items of the masks with a number in each range, ascending.

    The bounds 0, 10 and 50 give the ranges ``..0``, ``0..10``, ``10..50`` and ``50..``; a range has
    its lower bound, not the upper one. Without bounds, each range gets about as many items.
    """
    field = find_field(snapshot, name, option="facets")
    numbers = []
    owners = []
    first_row = 0
    for segment, mask in zip(snapshot.segments, masks, strict=True):
        column = read_column(segment.items, field, deadline=request.deadline)
        # Numbers are the first values.
        values = np.array([value for value in column.values if isinstance(value, int | float)])
        is_counted = mask[column.rows] & (column.codes < len(values))
        numbers.append(values[column.codes[is_counted]].astype(np.float64))
        owners.append(column.rows[is_counted] + first_row)
        first_row += len(mask)
    all_numbers = np.concatenate(numbers)
    if bounds is None:
        shares = np.arange(1, NUM_RANGES) / NUM_RANGES
        quantiles = np.quantile(all_numbers, shares, method="lower") if len(all_numbers) else []
        bounds = np.unique(quantiles).tolist()
    elif bounds != sorted(set(bounds)):
        raise UsageError(f"facets: the bounds of {name!r} are not ascending; sort them")
    range_of_number = np.searchsorted(bounds, all_numbers, side="right")
    pairs = np.unique(np.stack([np.concatenate(owners), range_of_number]), axis=1)
    counts = np.bincount(pairs[1], minlength=len(bounds) + 1).tolist()
    ends = ["", *(f"{bound:.15g}" for bound in bounds), ""]
    return [
        FacetValue(f"{low}..{high}", count)
        for low, high, count in zip(ends[:-1], ends[1:], counts, strict=True)
        if count or (low and high)
    ]


class _Order:
    """The order of items by a field, ascending or, after a minus sign, descending."""

    def __init__(self, snapshot: Snapshot, request: SearchRequest, name: str) -> None:
        self.is_descending = name.startswith("-")
        field = find_field(snapshot, name.removeprefix("-"), option="order_by")
        self._columns = _columns(snapshot, field, request)
        self._codes = [
            column.sorted_codes(descending=self.is_descending) for column in self._columns
        ]

    def key(self, location: Location) -> SortKey | None:
        """Return the key that an item is sorted by; None without a value."""
        code = int(self._codes[location.segment][location.row])
        return None if code < 0 else sort_key(self._columns[location.segment].values[code])

    def sort(self, masks: Masks) -> Iterator[Location]:
        """Yield the locations of all items of the masks; those without the field come last."""
        with_value = [
            self._sort_segment(number, mask) for number, mask in reversed([*enumerate(masks)])
        ]
        merged = heapq.merge(*with_value, key=itemgetter(0), reverse=self.is_descending)
        without_value = [mask & (codes < 0) for mask, codes in zip(masks, self._codes, strict=True)]
        return chain((location for _, location in merged), _newest_first(without_value))

    def _sort_segment(
        self, number: int, mask: Bool[np.ndarray, " items"]
    ) -> Iterator[tuple[SortKey, Location]]:
        """Yield the items of a segment that have a value, in their order, with their keys."""
        codes = self._codes[number]
        rows = np.flatnonzero(mask & (codes >= 0))
        keys = -codes[rows] if self.is_descending else codes[rows]
        values = self._columns[number].values
        for row in rows[np.argsort(keys, kind="stable")].tolist():
            yield sort_key(values[codes[row]]), Location(number, row)


class _Groups:
    """Groups of items with the same value of a field, or with the same content."""

    def __init__(self, snapshot: Snapshot, request: SearchRequest, masks: Masks) -> None:
        field = find_field(snapshot, request.group_by or CONTENT, option="group_by")
        self._columns = _columns(snapshot, field, request)
        self._codes = [column.shown_codes() for column in self._columns]
        self._masks = masks

    def value(self, location: Location) -> Value:
        """Return the value of an item; None without one."""
        code = int(self._codes[location.segment][location.row])
        return None if code < 0 else self._columns[location.segment].values[code]

    def first_of_each(self, locations: Iterator[Location]) -> Iterator[Location]:
        """Yield the first item of each group, and each item without a value."""
        seen = set[Value]()
        for location in locations:
            value = self.value(location)
            if value is None or value not in seen:
                seen.add(value)
                yield location

    def count_others(self, locations: Sequence[Location]) -> list[int]:
        """Return for each item the number of others in its group that meet the conditions."""
        totals = Counter[Value]()
        values = [self.value(location) for location in locations]
        for column, codes, mask in zip(self._columns, self._codes, self._masks, strict=True):
            counts = np.bincount(codes[mask & (codes >= 0)], minlength=len(column.values))
            for value in set(values) - {None}:
                code = column.find(value)
                totals[value] += 0 if code is None else int(counts[code])
        return [0 if value is None else totals[value] - 1 for value in values]


def _columns(snapshot: Snapshot, field: ItemField, request: SearchRequest) -> list[FieldColumn]:
    """Return the column of a field in each segment."""
    return [
        read_column(segment.items, field, deadline=request.deadline)
        for segment in snapshot.segments
    ]


def _newest_first(masks: Masks) -> Iterator[Location]:
    """Yield the locations of the items of the masks, the newest segment first."""
    for number, mask in reversed([*enumerate(masks)]):
        for row in np.flatnonzero(mask).tolist():
            yield Location(number, row)


def _list_items(snapshot: Snapshot, request: SearchRequest, masks: Masks) -> Hits:
    """Return the items that the conditions of a request without a query allow, arranged."""
    locations = _newest_first(masks)
    if request.order_by is not None:
        locations = _Order(snapshot, request, request.order_by).sort(masks)
    groups = None
    if request.group_by == NEAR:
        raise UsageError("group_by='near' compares hits, so it needs a query")
    if request.group_by is not None:
        groups = _Groups(snapshot, request, masks)
        locations = groups.first_of_each(locations)
    page = [*islice(locations, request.offset, request.offset + request.k)]
    segments, rows = np.array(page, dtype=np.int64).reshape(-1, 2).T
    hits = Hits(
        SearchHit(rank, item.id, 0.0, item.modality, item.text, item.image, item.fields, (), ())
        for rank, item in enumerate(snapshot.items_at(segments, rows), request.offset + 1)
    )
    hits.more_in_group = [] if groups is None else groups.count_others(page)
    return hits


def _arrange_hits(searcher: SnapshotSearcher, request: SearchRequest, masks: Masks) -> Hits:
    """Return the hits of a query, sorted and grouped."""
    snapshot = searcher.snapshot
    plain = dataclasses.replace(request, order_by=None, facets=(), group_by=None)
    if request.order_by is None and request.group_by is None:
        return searcher.search([plain])[0]
    cut_off: CutOff | None = None
    if request.order_by is not None:
        hits, cut_off = _best_matches(searcher, plain)
        order = _Order(snapshot, request, request.order_by)
        hits = _sort_hits(hits, order, _locations(snapshot, hits))
        num_others = [0] * len(hits)
        if request.group_by is not None:
            hits, num_others = _group_hits(searcher, request, masks, hits)
    else:
        hits, num_others = _search_groups(searcher, request, plain, masks)
    page = slice(request.offset, request.offset + request.k)
    arranged = Hits(
        (
            dataclasses.replace(hit, rank=rank)
            for rank, hit in enumerate(hits[page], request.offset + 1)
        ),
        calibration=snapshot.manifest.calibration,
    )
    arranged.more_in_group = num_others[page] if request.group_by is not None else []
    arranged.cut_off = cut_off
    return arranged


def _best_matches(
    searcher: SnapshotSearcher, plain: SearchRequest
) -> tuple[list[SearchHit], CutOff]:
    """Return the hits above the cut-off, and which cut-off it is."""
    calibration = searcher.snapshot.manifest.calibration
    threshold = None if calibration is None else calibration.threshold
    hits: list[SearchHit] = []
    for count in (NUM_SORTED_HITS, MAX_SORTED_HITS):
        hits = searcher.search([dataclasses.replace(plain, k=count, offset=0)])[0]
        if threshold is not None and hits and hits[0].probability is not None:
            cut_off: CutOff = "probability"
            best = [hit for hit in hits if (hit.probability or 0.0) >= threshold]
        elif any(hit.least_score is not None for hit in hits):
            cut_off = "least score"
            best = [hit for hit in hits if hit.least_score is None or hit.score >= hit.least_score]
        else:
            return hits[:NUM_SORTED_HITS], "first hits"
        if len(best) < count:
            break
    return best, cut_off


def _locations(snapshot: Snapshot, hits: Sequence[SearchHit]) -> list[Location]:
    """Return where the items of hits are stored."""
    states = snapshot.item_states([hit.id for hit in hits])
    return [states[hit.id].location for hit in hits]


def _sort_hits(
    hits: Sequence[SearchHit], order: _Order, locations: Sequence[Location]
) -> list[SearchHit]:
    """Return hits in an order, those without the field last; equal ones stay as they are."""
    keys = [order.key(location) for location in locations]
    with_key = [(key, hit) for key, hit in zip(keys, hits, strict=True) if key is not None]
    without_key = [hit for key, hit in zip(keys, hits, strict=True) if key is None]
    ordered = sorted(with_key, key=itemgetter(0), reverse=order.is_descending)
    return [*(hit for _, hit in ordered), *without_key]


def _search_groups(
    searcher: SnapshotSearcher, request: SearchRequest, plain: SearchRequest, masks: Masks
) -> tuple[list[SearchHit], list[int]]:
    """Return the best hit of each group, with more hits until there are enough groups."""
    needed = request.offset + request.k
    count = min(HITS_PER_GROUP * needed, MAX_GROUPED_HITS)
    while True:
        hits = searcher.search([dataclasses.replace(plain, k=count, offset=0)])[0]
        first_hits, num_others = _group_hits(searcher, request, masks, hits)
        if len(first_hits) >= needed or len(hits) < count or count == MAX_GROUPED_HITS:
            return first_hits, num_others
        count = min(HITS_PER_GROUP * count, MAX_GROUPED_HITS)


def _group_hits(
    searcher: SnapshotSearcher, request: SearchRequest, masks: Masks, hits: Sequence[SearchHit]
) -> tuple[list[SearchHit], list[int]]:
    """Return the first hit of each group, and the number of others in the group."""
    if request.group_by == NEAR:
        return _group_near(searcher, hits)
    groups = _Groups(searcher.snapshot, request, masks)
    locations = _locations(searcher.snapshot, hits)
    hit_at = dict(zip(locations, hits, strict=True))
    first_locations = [*groups.first_of_each(iter(locations))]
    return [hit_at[location] for location in first_locations], groups.count_others(first_locations)


def _group_near(
    searcher: SnapshotSearcher, hits: Sequence[SearchHit]
) -> tuple[list[SearchHit], list[int]]:
    """Return the hits that are no near-duplicate of an earlier one, and how many each has."""
    vectors = stored_vectors(searcher.snapshot, searcher.model, [hit.id for hit in hits])
    first_positions: list[int] = []
    num_others: list[int] = []
    for position, vector in enumerate(vectors):
        cosines = vectors[first_positions] @ vector
        if len(cosines) and cosines.max() >= NEAR_COSINE:
            num_others[int(cosines.argmax())] += 1
        else:
            first_positions.append(position)
            num_others.append(0)
    return [hits[position] for position in first_positions], num_others
