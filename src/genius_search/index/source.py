"""Features of items: encoded, given as vectors, or taken from the stored embeddings of an index.

:class:`SavedFeatures` encodes in blocks, and saves finished blocks as shards in ``.work/``, so that
an interrupted run loses little. Its rows are found by a key of each item, not by position.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float32, Int8, Int64, Shaped

from genius_search.artifact import ARTIFACT_FORMAT, Manifest, fingerprint_of
from genius_search.data.features import (
    CONTENTS,
    FEATURES_KIND,
    ROW,
    FeatureBatch,
    Features,
    LeftOut,
    Shard,
    join_shards,
    read_shards,
    rows_of_ids,
    write_shard,
)
from genius_search.data.images import image_type
from genius_search.data.video import is_video_file, probe_video
from genius_search.encoders.base import Encoder, ItemKey, reads_images
from genius_search.errors import BadImage
from genius_search.index.items import Item
from genius_search.index.roots import ContentHash
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import PICTURES, WORK
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize, sum_features
from genius_search.progress import Progress
from genius_search.records import Modality, format_text
from genius_search.training.codebooks import MAX_FIT_ITEMS
from genius_search.training.features import SHARD_ROWS, FeatureRow, encode_shard
from genius_search.writing import make_folder

FIRST_BLOCK_ITEMS: Final = 8
"""Number of items that are encoded together at first. Blocks double in size while they take less
than half of :data:`MAX_BLOCK_SECONDS`: an interrupted run loses at most about one block."""
MAX_BLOCK_SECONDS: Final = 1.0
"""Time that a block of items should take at most."""
MAX_BLOCK_IMAGES: Final = 32
MAX_BLOCK_TEXTS: Final = 1024
SAVE_INTERVAL_SECONDS: Final = 10.0
"""Time after which encoded features are saved."""
KEY_BYTES: Final = 8
"""Length of the hashes that identify items in saved features."""


class VectorFeatures(Features):
    """Vectors as the image features of images, and as the text features of other items.

    Parameters
    ----------
    read
        Returns the vectors of some rows.
    """

    def __init__(
        self,
        modality: Int8[np.ndarray, " items"],
        dim: int,
        read: Callable[[Int64[np.ndarray, " rows"]], Float32[np.ndarray, "rows dim"]],
    ) -> None:
        self.ids = np.arange(len(modality))
        self.modality = modality
        self.image_dim = self.text_dim = dim
        self._read = read

    def gather(self, rows: Int64[np.ndarray, " rows"]) -> FeatureBatch:
        """Return the vectors of rows as features."""
        is_image = self.modality[rows] == Modality.IMAGE.code
        vectors = self._read(rows)
        return FeatureBatch(
            vectors * is_image[:, None],
            vectors * ~is_image[:, None],
            is_image,
            ~is_image,
        )


def vector_features(
    vectors: Shaped[np.ndarray, "items dim"],
    rows: Int64[np.ndarray, " rows"],
    modality: Int8[np.ndarray, " rows"],
) -> VectorFeatures:
    """Return rows of vectors as features, scaled to unit length."""

    def read(numbers: Int64[np.ndarray, " numbers"]) -> Float32[np.ndarray, "numbers dim"]:
        # In 64 bits, the squares of large values are finite.
        values = np.asarray(vectors[rows[numbers]], dtype=np.float64)
        return np.asarray(normalize(values), dtype=np.float32)

    return VectorFeatures(modality, vectors.shape[1], read)


def stored_features(snapshot: Snapshot, model: Genius) -> VectorFeatures:
    """Return the stored embeddings of items and their passages as features, newest segment first.

    The rows are numbered through all segments. With 3 alive rows in the newest segment and 5 in the
    one before it, ``starts`` is 0, 3, 8, and row 4 is the second alive row of the latter.
    """
    newest_first = snapshot.segments[::-1]
    vectors = [segment.vectors(model.ranker) for segment in newest_first]
    alive_rows = [segment.with_passages(segment.alive_rows()) for segment in newest_first]
    starts = np.cumsum([0, *map(len, alive_rows)])

    def read(rows: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows dim"]:
        embeddings = np.empty((len(rows), model.dim), dtype=np.float32)
        segments = np.searchsorted(starts, rows, side="right") - 1
        for number, stored in enumerate(vectors):
            is_inside = segments == number
            segment_rows = alive_rows[number][rows[is_inside] - starts[number]]
            embeddings[is_inside] = stored(segment_rows)
        return embeddings

    # The first code of an ID is the item's modality.
    first_codes = [np.zeros(0)]
    for segment, rows in zip(newest_first, alive_rows, strict=True):
        table = segment.table
        first_codes.append(table.ids[table.rows_of_items[rows], 0])
    modality = np.concatenate(first_codes).astype(np.int8)
    features = VectorFeatures(modality, model.dim, read)
    # Only the fingerprint is used: it says whether saved work was made from the same items.
    entries = [entry.model_dump(mode="json") for entry in snapshot.manifest.segments]
    features.manifest = Manifest(
        format=ARTIFACT_FORMAT,
        kind=FEATURES_KIND,
        config={},
        inputs={},
        facts={},
        files={},
        fingerprint=fingerprint_of(entries),
    )
    return features


def draw_embeddings(
    features: Features, fuse: Callable[[np.ndarray, np.ndarray], np.ndarray] = sum_features
) -> tuple[Float32[np.ndarray, "items dim"], Int8[np.ndarray, " items"]]:
    """Return the fused features and the modalities of items, for fitting codebooks.

    All items are returned, or :data:`MAX_FIT_ITEMS` random ones, which are always the same.
    """
    rows = np.sort(np.random.default_rng(0).permutation(len(features))[:MAX_FIT_ITEMS])
    sampled = features.gather(rows)
    return fuse(sampled.image, sampled.text), features.modality[rows]


def feature_rows(
    items: Iterable[Item], folder: Path, *, with_pictures: bool = True
) -> Iterator[FeatureRow]:
    """Yield the row to encode for each item, with its position as id.

    Parameters
    ----------
    with_pictures
        Whether the encoder reads pictures; otherwise rows are texts, the items' descriptions.
    folder
        Folder of the index, which the paths of stored pictures are relative to.
    """
    for number, item in enumerate(items):
        yield FeatureRow(
            id=number,
            key=ItemKey("candidate", item.id),
            modality=item.modality if with_pictures else Modality.TEXT,
            image=folder / item.image if with_pictures and item.image is not None else None,
            text=format_text(item.text if with_pictures else item.description),
        )


class SavedFeatures:
    """Encodes items, and saves their features in ``.work/``, where a later run finds them.

    Features are found by a hash of the item's id and stamp. So an interrupted run can be continued
    even if the pool has changed, and an item that has changed is encoded again.
    """

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._folder, self._encoder = folder, encoder
        self._unsaved_shards: list[Shard] = []
        self._unsaved_contents: list[str | None] = []
        """Content hash for each row of the unsaved shards."""

    @cached_property
    def _work_folder(self) -> Path:
        """Folder of the saved shards, for one encoder and one format of rows."""
        fingerprint = fingerprint_of([self._encoder.fingerprint, ROW.names])
        return self._folder / WORK / f"features-{fingerprint[:12]}"

    def encode(
        self,
        items: Iterable[Item],
        add_file_fields: Callable[[Item], Item],
        expected: int,
        progress: Progress,
    ) -> tuple[Features, list[str | None]]:
        """Return the features of items, and the content hash of each row of the features.

        The ids of the features are the positions of the items. Items that cannot be read have no
        row, and are listed in ``left_out`` of the features.

        Parameters
        ----------
        items
            Items with stamps.
        add_file_fields
            Adds to an item the text and fields that are stored inside its file.
        expected
            The number of items.

        Raises
        ------
        BadData
            Features are not finite.
        """
        progress.begin("encode", expected)
        saved_keys: set[int] = set()
        for shard in read_shards(self._work_folder):
            saved_keys.update(shard.rows["id"].tolist())
        keys = array("q")
        left_out: list[LeftOut] = []
        remaining = iter(items)
        block_size = min(FIRST_BLOCK_ITEMS, self._max_block_size)
        last_save = time.monotonic()
        while block := list(islice(remaining, block_size)):
            block_start = time.monotonic()
            keyed = [(_key(item), item) for item in block]
            keys.extend(key for key, _ in keyed)
            new = [(key, item) for key, item in keyed if key not in saved_keys]
            problems = self._encode_block(new, add_file_fields)
            left_out += (problem._replace(id=keys.index(problem.id)) for problem in problems)
            progress.advance(len(keys), {})
            # The next block takes twice as long if it has twice the items.
            is_fast = 2 * (time.monotonic() - block_start) < MAX_BLOCK_SECONDS
            if is_fast and self._shows_speed(new):
                block_size = min(2 * block_size, self._max_block_size)
            is_save_due = time.monotonic() - last_save > SAVE_INTERVAL_SECONDS
            if is_save_due or len(self._unsaved_contents) >= SHARD_ROWS:
                self.save()
                last_save = time.monotonic()
        features, contents = self._collect(keys)
        features.left_out = left_out
        return features, contents

    def save(self) -> None:
        """Save the features that are not saved yet, as one shard."""
        if self._unsaved_contents:
            make_folder(self._work_folder)
            number = sum(1 for _ in self._work_folder.glob("shard-*"))
            shard = join_shards(self._unsaved_shards)
            write_shard(self._work_folder, number, shard, contents=self._unsaved_contents)
        self._unsaved_shards, self._unsaved_contents = [], []

    @property
    def _has_pixels(self) -> bool:
        """Whether the encoder decodes pictures, which takes longer than texts."""
        return self._encoder.needs_pixels and reads_images(self._encoder)

    @property
    def _max_block_size(self) -> int:
        """Maximum number of items that are encoded together."""
        return MAX_BLOCK_IMAGES if self._has_pixels else MAX_BLOCK_TEXTS

    def _shows_speed(self, encoded: Sequence[tuple[int, Item]]) -> bool:
        """Return whether the time of a block predicts that of the next one.

        Saved items take no time, and texts say nothing about the time of pictures.
        """
        return bool(encoded) and (not self._has_pixels or all(item.image for _, item in encoded))

    def _encode_block(
        self, keyed: Sequence[tuple[int, Item]], add_file_fields: Callable[[Item], Item]
    ) -> Sequence[LeftOut]:
        """Encode items with their keys; return the items that are left out, with keys as ids."""
        if not keyed:
            return ()
        contents: dict[int, str | None] = {}
        for key, item in keyed:  # before encoding, since a file may change meanwhile
            content = ContentHash.of(item, self._folder)
            contents[key] = None if content is None else str(content)
        has_images = reads_images(self._encoder)
        unreadable = [] if has_images else _find_unreadable(keyed, self._folder)
        bad_keys = {problem.id for problem in unreadable}
        readable = [(key, item) for key, item in keyed if key not in bad_keys]
        rows = feature_rows(
            (add_file_fields(item) for _, item in readable), self._folder, with_pictures=has_images
        )
        keyed_rows = [row._replace(id=key) for row, (key, _) in zip(rows, readable, strict=True)]
        shard = encode_shard(keyed_rows, self._encoder, skip_bad_images=True)
        self._unsaved_shards.append(shard)
        self._unsaved_contents += [contents[key] for key in shard.rows["id"].tolist()]
        # A stored picture is reported by the id of its item, since its name is a hash.
        item_ids = {
            key: item.id for key, item in keyed if (item.image or "").startswith(f"{PICTURES}/")
        }
        return [
            problem._replace(file=item_ids.get(problem.id, problem.file))
            for problem in (*unreadable, *shard.left_out)
        ]

    def _collect(self, keys: Sequence[int]) -> tuple[Features, list[str | None]]:
        """Return the features and contents of items by their keys, saved or unsaved."""
        features = Features([*read_shards(self._work_folder), *self._unsaved_shards])
        contents: list[str | None] = []
        for file in sorted(self._work_folder.glob(f"shard-*/{CONTENTS}")):
            contents += json.loads(file.read_text())
        contents += self._unsaved_contents
        if contents:
            rows, exists = rows_of_ids(features.ids, np.array(keys, dtype=np.int64))
            positions = np.flatnonzero(exists)
            features.select(rows[positions], positions)
            contents = [contents[row] for row in rows[positions].tolist()]
        return features, contents


def _find_unreadable(keyed: Sequence[tuple[int, Item]], folder: Path) -> list[LeftOut]:
    """Return the pictures that no program can open, with their keys as ids."""
    unreadable = []
    for key, item in keyed:
        if item.image is not None:
            path = folder / item.image
            try:
                probe_video(path) if is_video_file(path) else image_type(path)
            except BadImage as error:
                unreadable.append(LeftOut(key, str(error.file), error.reason))
    return unreadable


def _key(item: Item) -> int:
    """Return a hash of an item's id, stamp and picture text, as a signed number of 64 bits."""
    # Text in a picture is read after the picture was encoded, and changes its description.
    text = f"{item.stamp} {item.id} {item.picture_words or ''}".encode()
    digest = hashlib.blake2b(text, digest_size=KEY_BYTES).digest()
    return int.from_bytes(digest, "big", signed=True)


@contextmanager
def saved_features(folder: Path, encoder: Encoder) -> Iterator[SavedFeatures]:
    """Yield an encoder of items that saves its features if the block raises an error."""
    work = SavedFeatures(folder, encoder)
    try:
        yield work
    except BaseException:
        work.save()
        raise
