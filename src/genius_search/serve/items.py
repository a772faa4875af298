"""Items that clients update, count and list, and their vectors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, Field, JsonValue

from genius_search.index.filters import Filter
from genius_search.index.index import Index, current_state
from genius_search.index.listing import as_filter, count_items, list_page
from genius_search.records import Modality
from genius_search.serve import schemas
from genius_search.serve.describe import describe_item, written
from genius_search.serve.queries import refuse_paths
from genius_search.serve.schemas import LeftOut, RequestBody, refuse_surrogates
from genius_search.serve.service import MAX_CHANGE_WAIT_SECONDS

MAX_PAGE: Final = 1_000
"""Maximum number of items of a page."""
MAX_PAGE_BYTES: Final = 4 << 20
MAX_LISTING_SECONDS: Final = 60.0
"""Time after which conditions of a count or a page have taken too long."""


class ItemUpdate(RequestBody):
    """Changes of an item. Fields and texts that are not named stay."""

    id: schemas.ItemId
    fields: Annotated[dict[str, JsonValue] | None, AfterValidator(refuse_surrogates)] = Field(
        None, description="New values by name; null removes a field."
    )
    text: schemas.Text | None = Field(
        None,
        description="New text. An item with a vector of yours keeps it; any other one is encoded "
        "again.",
    )


class Updates(RequestBody):
    """Changes of items, made in one step."""

    updates: list[ItemUpdate] = Field(min_length=1, max_length=schemas.MAX_ITEMS)


class Updated(BaseModel):
    """Result of updating items. Updated items are on the disk and searchable."""

    updated: int
    missing: list[str] = Field(description="Ids that the index does not have.")
    left_out: list[LeftOut]


class ItemCount(BaseModel):
    """Number of items that meet conditions."""

    items: int


class ListedItem(BaseModel):
    """An item of a page."""

    id: str
    modality: Modality
    text: str | None
    image: str | None = Field(description="Path of its picture on this server.")
    fields: dict[str, JsonValue]


class ItemsPage(BaseModel):
    """Items in the order of their ids."""

    items: list[ListedItem]
    cursor: str | None = Field(description="Cursor of the next page; null after the last item.")


class Vectors(BaseModel):
    """Stored vectors of items, each of length 1."""

    vectors: list[list[float]]


def update(index: Index, updates: Sequence[ItemUpdate]) -> Updated:
    """Change fields and texts of items in one step."""
    result = index.update(
        [change.id for change in updates],
        fields=[change.fields for change in updates],
        text=[change.text for change in updates],
        wait_seconds=MAX_CHANGE_WAIT_SECONDS,
    )
    left_out = [LeftOut(id=entry.file, reason=entry.reason) for entry in result.left_out]
    return Updated(updated=result.updated, missing=result.missing, left_out=left_out)


def read_filter(
    where: Sequence[str], match: str | None = None, modality: Modality | None = None
) -> Filter:
    """Return conditions as a filter; raise :class:`Problem` if they would reveal paths."""
    conditions = as_filter(where, match, modality)
    refuse_paths(conditions)
    return conditions


def count(index: Index, conditions: Filter) -> ItemCount:
    """Return the number of items that meet conditions."""
    deadline = time.monotonic() + MAX_LISTING_SECONDS
    snapshot = current_state(index).snapshot
    return ItemCount(items=count_items(snapshot, conditions, deadline=deadline))


def write_page(
    index: Index, name: str, conditions: Filter, cursor: str | None, limit: int
) -> bytes:
    """Return a page of the items that meet conditions as JSON.

    It ends early, with a cursor, at :data:`MAX_PAGE_BYTES`.
    """
    deadline = time.monotonic() + MAX_LISTING_SECONDS
    snapshot = current_state(index).snapshot
    page = list_page(snapshot, conditions, cursor, limit, deadline=deadline)
    next_cursor = page.cursor
    encoded: list[bytes] = []
    size = 0
    for position, item in enumerate(page.items):
        encoded.append(written(describe_item(item, name) | {"fields": item.fields}))
        size += len(encoded[-1])
        if size > MAX_PAGE_BYTES and position + 1 < len(page.items):
            next_cursor = item.id
            break
    return b'{"items":[' + b",".join(encoded) + b'],"cursor":' + written(next_cursor) + b"}"
