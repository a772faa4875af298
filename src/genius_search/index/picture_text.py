"""The second pass over pictures: their texts are read after the first search is possible.

Pictures are read without a lock, and their texts are written in batches. A pass that is killed
loses nothing: what is written stays, and what was read is in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Final

from genius_search.data.cache import user_cache
from genius_search.data.picture_text import PictureReader, PictureText
from genius_search.index.build import all_changes
from genius_search.index.items import Item
from genius_search.index.pictures import is_video
from genius_search.index.pool import Pool
from genius_search.index.roots import ContentHash, hash_picture
from genius_search.index.snapshot import Location, Snapshot
from genius_search.index.source import item_encoder
from genius_search.index.update import stored_items
from genius_search.index.writer import Batch, Writer, remove_work, stored_batches
from genius_search.model import Genius
from genius_search.progress import Progress, Silent

MAX_UNWRITTEN_SECONDS: Final = 20.0
"""Time after which texts that were read are written to the index."""


def unread_pictures(snapshot: Snapshot) -> Iterator[Item]:
    """Yield the pictures whose texts have not been read, with full paths, newest first."""
    for number in reversed(range(len(snapshot.segments))):
        segment = snapshot.segments[number]
        dead = set(segment.dead.tolist())
        rows = [row for row in segment.items.rows_of_unread_pictures() if row not in dead]
        for item in segment.items.get(rows):
            if not is_video(item):
                yield item._replace(image=str(snapshot.folder / (item.image or "")))


def read_pictures(
    snapshot: Snapshot,
    model: Genius,
    open_writer: Callable[[], AbstractContextManager[Writer]],
    progress: Progress,
) -> int:
    """Read the texts of all unread pictures into an index; return the number of pictures.

    A picture that takes too long stays unread.

    Parameters
    ----------
    open_writer
        Locks the index for each batch of texts.
    """
    reader = PictureReader(user_cache() / "picture-text")
    pictures = list(unread_pictures(snapshot))
    progress.begin("read text in pictures", len(pictures))
    texts: dict[str, PictureText] = {}
    num_read = 0
    last_write = time.monotonic()
    for number, item in enumerate(pictures, start=1):
        content, path = ContentHash.parse(item.content), Path(item.image or "")
        digest = hash_picture(path)
        # A file that has changed is read after `genius index sync` has encoded it again.
        if digest is not None and (content is None or content.picture == digest):
            text = reader.read(path, digest)
            if text is not None:
                texts[item.id] = text
        if texts and (
            number == len(pictures) or time.monotonic() - last_write > MAX_UNWRITTEN_SECONDS
        ):
            with open_writer() as writer:
                num_read += write_texts(writer, model, texts)
            texts, last_write = {}, time.monotonic()
        progress.advance(number, {})
    return num_read


def write_texts(writer: Writer, model: Genius, texts: Mapping[str, PictureText]) -> int:
    """Store the texts of pictures in one commit, and return the number of pictures.

    An encoder of texts encodes pictures with a text again. Other vectors are copied.
    """
    snapshot = writer.snapshot
    copied: list[Item] = []
    locations: list[Location] = []
    described: list[Item] = []
    for item_id, (item, location) in stored_items(snapshot, [*texts]).items():
        if item.picture_words is not None:  # another process was faster
            continue
        words, boxes = texts[item_id]
        with_text = item._replace(picture_words=words, boxes=boxes)
        if words and not snapshot.manifest.reads_images:
            described.append(with_text)
        else:
            copied.append(with_text)
            locations.append(location)
    if not copied and not described:
        return 0
    batches = stored_batches(snapshot.segments, copied, locations)
    num_written, _ = writer.add(chain(batches, _encode(writer, model, described)))
    if described:
        remove_work(writer.folder)
    return num_written


def _encode(writer: Writer, model: Genius, items: Sequence[Item]) -> Iterator[Batch]:
    """Yield items with vectors of their descriptions."""
    if not items:
        return
    pool_changes = all_changes(Pool(lambda: iter(items)), model.encoder)
    pool_changes.divides = writer.snapshot.manifest.has_own_model
    with item_encoder(writer.folder, model.encoder) as work:
        pool_changes.compute_features(work, Silent())
    pool_changes.keep_contents()
    yield from pool_changes.batches(model, writer.snapshot, Silent())
