"""Items that are in memory, on their way into an index: texts, pictures as bytes, fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from genius.data.records import Modality
from genius.errors import BadData
from genius.model import Genius
from genius.search.items import Item
from genius.search.live import Writer
from genius.search.opened import OpenedIndex
from genius.search.pictures import keep_pictures, picture_name
from genius.search.work import remove_work
from genius.stages.items import NothingReadable, PoolItems, check_characters, encode_items, stamp_of
from genius.stages.progress import Silent

LONGEST_ID: Final = 500
"""Characters of an id that is given and not found."""


class NewItem(NamedTuple):
    """An item to be added that is no file: a text, a picture as it was sent, or both."""

    item_id: str
    text: str | None = None
    image: bytes | None = None
    fields: Mapping[str, object] | None = None
    """What to filter by."""


class Outcome(NamedTuple):
    """What became of an item that was to be added."""

    item_id: str
    became: Literal["added", "replaced", "unchanged", "left out"]
    reason: str | None = None
    """Why it was left out."""


def add_new_items(
    writer: Writer, model: Genius, opened: OpenedIndex, items: Sequence[NewItem]
) -> list[Outcome]:
    """Write items into an index that is held for writing and was opened since; what became of each, in order.

    The pictures are on the disk before the index names them.
    """
    stored: dict[str, Item] = {}
    pictures: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    for new in items:  # of two with one id the last is meant
        stored.pop(new.item_id, None)
        left_out.pop(new.item_id, None)
        try:
            item = stored[new.item_id] = _item_of(new)
        except BadData as error:
            left_out[new.item_id] = str(error)
            continue
        if new.image is not None and item.image is not None:
            pictures[item.image] = new.image
    known = opened.stamps(list(stored))
    changed = [item for name, item in stored.items() if known.get(name) != stamp_of(item)]
    if changed:
        keep_pictures(writer.folder, [pictures[item.image] for item in changed if item.image])
        left_out |= _write(writer, model, opened, changed)
    is_new = {item.item_id for item in changed}

    def outcome(name: str) -> Outcome:
        if name in left_out:
            return Outcome(name, "left out", left_out[name])
        if name not in is_new:
            return Outcome(name, "unchanged")
        return Outcome(name, "replaced" if name in known else "added")

    return [outcome(new.item_id) for new in items]


def _item_of(new: NewItem) -> Item:
    """An item as it will be stored; its picture is named by its contents.

    Raises
    ------
    BadData
        it cannot be stored; says why.
    """
    if not new.item_id or len(new.item_id) > LONGEST_ID or "\0" in new.item_id:
        raise BadData(f"an id has 1 to {LONGEST_ID} characters, none of them NUL")
    text = new.text if new.text and new.text.strip() else None
    if text is None and new.image is None:
        raise BadData("an item needs a text, an image, or both")
    try:
        source = None if not new.fields else json.dumps(new.fields, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadData(f"its fields are not JSON: {error}") from None
    modality = Modality.of(has_image=new.image is not None, has_text=text is not None)
    image = None if new.image is None else picture_name(new.image)
    item = Item(new.item_id, modality, text, image, source)
    check_characters(item)
    return item


def _write(writer: Writer, model: Genius, opened: OpenedIndex, items: Sequence[Item]) -> dict[str, str]:
    """Encode items and add them; returns those whose picture cannot be read, with the reason."""
    pool = PoolItems(len(items), (), lambda: iter(items))
    kept = opened.state.facts.embeddings
    try:
        new = encode_items(model, pool, writer.folder, embeddings=kept, progress=Silent())
    except NothingReadable as nothing:
        return {items[entry.id].item_id: entry.reason for entry in nothing.left_out}
    writer.add(new, new.arrays)
    remove_work(writer.folder)
    return {items[entry.id].item_id: entry.reason for entry in new.left_out}
