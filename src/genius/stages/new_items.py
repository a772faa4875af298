"""Items that are in memory, on their way into an index: texts, pictures as bytes, fields."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from genius.data.features import FeatureBatch
from genius.data.records import Modality
from genius.errors import BadData
from genius.model import Genius
from genius.search.items import Item
from genius.search.live import Writer
from genius.search.opened import OpenedIndex
from genius.search.pictures import keep_pictures, picture_name
from genius.search.segment import ItemArrays
from genius.stages.embed_shard import chunks, encode_shard
from genius.stages.encode import encode_batch
from genius.stages.items import BATCH, check_characters, feature_rows, stamp_of

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
    """Encode items and add them; returns those whose picture cannot be read, with the reason.

    They are in memory already, so that nothing is kept to go on from.
    """
    stamps = [stamp_of(item) for item in items]
    parts: list[ItemArrays] = []
    left_out: dict[int, str] = {}
    for rows in chunks(feature_rows(items, writer.folder), BATCH):
        encoded = encode_shard(rows, model.encoder, skip_bad_images=True)
        left_out.update((entry.id, entry.reason) for entry in encoded.left_out)
        features, modality = FeatureBatch.of_shard(encoded.shard), encoded.shard.modality
        if len(modality):
            parts.append(encode_batch(model, features, modality, embeddings=opened.state.facts.embeddings))
    if parts:
        readable = (
            item._replace(stamp=stamps[number]) for number, item in enumerate(items) if number not in left_out
        )
        writer.add(readable, _joined(parts))
    return {items[number].item_id: reason for number, reason in left_out.items()}


def _joined(parts: Sequence[ItemArrays]) -> ItemArrays:
    vectors = [part.embeddings for part in parts if part.embeddings is not None]
    densities = [part.densities for part in parts if part.densities is not None]
    return ItemArrays(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.typicality for part in parts]),
        np.concatenate(vectors) if vectors else None,
        parts[0].stored,
        np.concatenate(densities) if densities else None,
    )
