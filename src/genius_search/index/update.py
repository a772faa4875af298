"""Changing the fields and texts of stored items without their vectors.

A changed item is written to a new segment, as an added one is. Its ID and embedding are copied,
unless its text was encoded and changes: then it is encoded again::

    item                                   fields change    text changes
    added as a vector                      copied           copied
    added as a text, a picture or both     copied           encoded again
    a file of a folder                     copied           refused: change the file
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from genius_search.border import as_column, as_id_list, as_text
from genius_search.data.features import LeftOut
from genius_search.data.values import fields_to_json
from genius_search.errors import UsageError
from genius_search.index.build import find_changes
from genius_search.index.items import Item
from genius_search.index.pool import STAMP_LENGTH, Pool, check_item, stamp_of
from genius_search.index.snapshot import Location, Snapshot, check_files_on_error
from genius_search.index.source import item_encoder
from genius_search.index.writer import Batch, Writer, remove_work, stored_batches
from genius_search.model import Genius
from genius_search.picture_words import describe_picture
from genius_search.progress import Progress
from genius_search.records import Modality

UpdatedFields: TypeAlias = Mapping[str, object] | Sequence[Mapping[str, object] | None] | None
UpdatedText: TypeAlias = str | Sequence[str | None] | None


class Updated(NamedTuple):
    """The result of updating items."""

    updated: int
    """Number of items that were written; an item that stays the same is not."""
    missing: list[str]
    """Ids that are not in the index."""
    left_out: list[LeftOut]
    """Items that stay unchanged, because the encoder cannot read them, with the reasons."""


class ItemUpdate(NamedTuple):
    """The changes of one item."""

    fields: Mapping[str, object] | None
    """Values by name; None removes a field. Other fields stay."""
    text: str | None
    """The new text; an empty one removes the text, and None leaves it."""


@dataclass(slots=True)
class _Plan:
    """Items to write, as they are stored."""

    copied: list[Item] = field(default_factory=list)
    """Items whose IDs and embeddings stay."""
    locations: list[Location] = field(default_factory=list)
    """Where the copied items are stored now."""
    encoded: list[Item] = field(default_factory=list)
    """Items to encode again."""


def read_updates(ids: object, fields: UpdatedFields, text: UpdatedText) -> dict[str, ItemUpdate]:
    """Return the update of each item by its id.

    Raises
    ------
    UsageError
        There is nothing to update, the number of fields or texts is not that of the ids, or fields
        are not a mapping.
    """
    item_ids = as_id_list(ids)
    if fields is None and text is None:
        raise UsageError("nothing to update; give fields=, text=, or both")
    all_fields = _one_for_each(item_ids, fields, "fields", Mapping)
    all_texts = _one_for_each(item_ids, text, "text", str)
    updates = {}
    for item_id, item_fields, item_text in zip(item_ids, all_fields, all_texts, strict=True):
        if item_fields is not None and not isinstance(item_fields, Mapping):
            type_name = type(item_fields).__qualname__
            raise UsageError(f"item {item_id!r}: fields is of type {type_name}, expected a mapping")
        new_text = item_text and as_text(item_text, f"the text of item {item_id!r}")
        updates[item_id] = ItemUpdate(item_fields, new_text)
    return updates


def _one_for_each(ids: Sequence[str], values: Any, name: str, single: type) -> list[Any]:
    """Return a value for each id: a single one for all, or a list."""
    if values is None or isinstance(values, single):
        return [values] * len(ids)
    column = as_column(values, name)
    if len(column) != len(ids):
        raise UsageError(
            f"there are {len(ids)} ids and {len(column)} {name}; give one for each, or one for all"
        )
    return column


def update_items(
    writer: Writer, model: Genius, updates: Mapping[str, ItemUpdate], progress: Progress
) -> Updated:
    """Update items in one commit.

    Raises
    ------
    UsageError
        A field cannot be stored, or the text of a file would change; nothing is changed.
    """
    snapshot = writer.snapshot
    plan = _Plan()
    with check_files_on_error(snapshot):
        stored = stored_items(snapshot, [*updates])
    for item_id, (item, location) in stored.items():
        _plan_update(plan, item, location, updates[item_id])
    missing = [item_id for item_id in updates if item_id not in stored]
    left_out: list[LeftOut] = []
    copied = stored_batches(snapshot.segments, plan.copied, plan.locations)
    encoded: Iterator[Batch] = iter(())
    if plan.encoded:
        divides = snapshot.manifest.has_own_model
        pool = Pool(lambda: iter(plan.encoded))
        pool_changes = find_changes(writer.folder, pool, model.encoder, snapshot, divides=divides)
        with item_encoder(writer.folder, model.encoder) as work:
            pool_changes.compute_features(work, progress)
        left_out = pool_changes.left_out
        encoded = pool_changes.batches(model, snapshot, progress)
    num_written = 0
    if plan.copied or plan.encoded:
        num_written, _ = writer.add(chain(copied, encoded))
    if plan.encoded:
        remove_work(writer.folder)
    return Updated(num_written, missing, left_out)


def stored_items(snapshot: Snapshot, ids: Sequence[str]) -> dict[str, tuple[Item, Location]]:
    """Return items with their locations by their ids; unknown ids are left out.

    Paths of stored pictures are relative to the folder of the index.
    """
    locations = [state.location for state in snapshot.item_states(ids).values()]
    stored = {}
    for number, segment in enumerate(snapshot.segments):
        rows = [location.row for location in locations if location.segment == number]
        for row, item in zip(rows, segment.items.get(rows), strict=True):
            stored[item.id] = (item, Location(number, row))
    return stored


def _plan_update(plan: _Plan, item: Item, location: Location, update: ItemUpdate) -> None:
    """Add an item to the plan, unless it stays the same."""
    source = item.source if update.fields is None else _merge_fields(item, update.fields)
    text = item.text if update.text is None else update.text or None
    changed = check_item(item._replace(text=text, source=source))
    if changed.image is not None:
        changed = changed._replace(about=describe_picture(changed.id, changed.fields))
    if (changed.text, changed.source) == (item.text, item.source):
        return
    is_encoded = item.content is not None and changed.text != item.text
    if is_encoded:
        plan.encoded.append(_as_new_item(changed))
    else:
        plan.copied.append(changed._replace(stamp=_new_stamp(changed)))
        plan.locations.append(location)


def _merge_fields(item: Item, fields: Mapping[str, object]) -> str | None:
    """Return the fields of an item as JSON, after a change of some of them."""
    source, problems = fields_to_json(fields)
    if problems:
        raise UsageError(f"item {item.id!r}: {problems[0].replace('is left out', 'cannot be set')}")
    merged = {**item.fields, **Item(item.id, item.modality, source=source).fields}
    # None is also the form of NaN and of other missing values.
    return fields_to_json({name: value for name, value in merged.items() if value is not None})[0]


def _as_new_item(item: Item) -> Item:
    """Return an item with a changed text as it is encoded again.

    Raises
    ------
    UsageError
        The text is that of a file, or it would leave an item without text and picture.
    """
    if item.root is not None:
        raise UsageError(
            f"item {item.id!r} is a file, whose text stays that of the file; change the file or "
            "its caption and call index.sync(), or update its fields"
        )
    if item.text is None and item.image is None:
        raise UsageError(f"item {item.id!r} needs a text, since it has no picture")
    modality = Modality.of(has_image=item.image is not None, has_text=item.text is not None)
    return item._replace(modality=modality, stamp=None, content=None)


def _new_stamp(item: Item) -> str | None:
    """Return the stamp of an item whose ID is copied, so that adding the old item changes it back.

    A file keeps its stamp, so that its fields stay until the file changes.
    """
    if item.root is not None:
        return item.stamp
    if item.content is not None:
        return stamp_of(item._replace(stamp=None))
    contents = repr((item.stamp, item.text, item.source)).encode()  # of a vector
    return hashlib.sha256(contents).hexdigest()[:STAMP_LENGTH]
