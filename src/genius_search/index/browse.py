"""A search without a query: the items that meet its conditions, newest first."""

from __future__ import annotations

import dataclasses

import numpy as np

from genius_search.index.filters import Filter
from genius_search.index.hits import Hits, SearchHit
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Snapshot, check_files_on_error
from genius_search.records import Modality


def browse(snapshot: Snapshot, request: SearchRequest) -> Hits:
    """Return the items that the conditions of a request without a query allow, newest first."""
    conditions = request.filter or Filter()
    if request.modality is not None:
        conditions = dataclasses.replace(conditions, modality=Modality(request.modality))
    if not snapshot.segments:
        return Hits()
    page = slice(request.offset, request.offset + request.k)
    with check_files_on_error(snapshot):
        restriction = snapshot.restriction(conditions, deadline=request.deadline)
        numbers = []
        all_rows = []
        for number, allowed in reversed([*enumerate(restriction)]):
            if allowed is not None:
                is_item = allowed.items[: snapshot.segments[number].num_items]  # no passages
                rows = np.flatnonzero(is_item)
                all_rows.append(rows)
                numbers.append(np.full(len(rows), number))
        items = snapshot.items_at(np.concatenate(numbers)[page], np.concatenate(all_rows)[page])
    return Hits(
        SearchHit(rank, item.id, 0.0, item.modality, item.text, item.image, item.fields, (), ())
        for rank, item in enumerate(items, start=request.offset + 1)
    )
