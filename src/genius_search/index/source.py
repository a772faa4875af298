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
    KIND,
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
from genius_search.encoders.base import Encoder, ItemKey, reads_images
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
"""Number of items that are encoded together at first. Blocks double in size while they take less than
half of :data:`MAX_BLOCK_SECONDS`: an interrupted run loses at most about one block."""
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
        kind=KIND,
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


def feature_rows(items: Iterable[Item], folder: Path) -> Iterator[FeatureRow]:
    """Yield the row to encode for each item, with its position as id.

    Parameters
    ----------
    folder
        Folder of the index, which the paths of stored pictures are relative to.
    """
    for number, item in enumerate(items):
        yield FeatureRow(
            id=number,
            key=ItemKey("candidate", item.id),
            modality=item.modality,
            image=None if item.image is None else folder / item.image,
            text=format_text(item.text),
        )


class SavedFeatures:
    """Features of items, saved in ``.work/`` while they are made; a later run goes on with what is there.

    They are looked up by item, so that a run goes on also when the pool has changed meanwhile.
    """

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._folder, self._encoder = folder, encoder
        self._shards: list[Shard] = []
        self._contents: list[str | None] = []
        """Of the items of the shards that are not saved yet."""

    @cached_property
    def _place(self) -> Path:
        kind = fingerprint_of([self._encoder.fingerprint, ROW.names])
        return self._folder / WORK / f"features-{kind[:12]}"

    def encode(
        self,
        items: Iterable[Item],
        complete: Callable[[Item], Item],
        expected: int,
        progress: Progress,
    ) -> tuple[Features, list[str | None]]:
        """Return the features of items with stamps, their ids the numbers of the items; and the contents.

        What cannot be read is left out.

        Parameters
        ----------
        complete
            adds to an item what is inside its file.
        expected
            the number of items.

        Raises
        ------
        BadData
            Features are not finite.
        """
        progress.begin("encode", expected)
        saved = {one for shard in read_shards(self._place) for one in shard.rows["id"].tolist()}
        has_pixels = self._encoder.needs_pixels and reads_images(self._encoder)
        most = MAX_BLOCK_IMAGES if has_pixels else MAX_BLOCK_TEXTS
        remaining, size = iter(items), min(FIRST_BLOCK_ITEMS, most)
        keys = array("q")
        left_out: list[LeftOut] = []
        saved_at = time.monotonic()
        while block := list(islice(remaining, size)):
            began = time.monotonic()
            own = [*map(_key, block)]
            keys.extend(own)
            new = [(key, item) for key, item in zip(own, block, strict=True) if key not in saved]
            left_out += (one._replace(id=keys.index(one.id)) for one in self._encode(new, complete))
            progress.advance(len(keys), {})
            is_telling = bool(new) and (not has_pixels or all(item.image for _, item in new))
            if is_telling and time.monotonic() - began < 0.5:  # the next block takes twice as long
                size = min(2 * size, most)
            if (
                time.monotonic() - saved_at > SAVE_INTERVAL_SECONDS
                or len(self._contents) >= SHARD_ROWS
            ):
                self.save()
                saved_at = time.monotonic()
        features = Features([*read_shards(self._place), *self._shards])
        files = sorted(self._place.glob(f"shard-*/{CONTENTS}"))
        contents = [one for file in files for one in json.loads(file.read_text())] + self._contents
        if contents:
            rows, exists = rows_of_ids(features.ids, np.array(keys, dtype=np.int64))
            numbers = np.flatnonzero(exists)
            features.select(rows[numbers], numbers)
            contents = [contents[row] for row in rows[numbers].tolist()]
        features.left_out = left_out
        return features, contents

    def _encode(
        self, items: Sequence[tuple[int, Item]], complete: Callable[[Item], Item]
    ) -> Sequence[LeftOut]:
        """Encode items with their keys; return what is left out."""
        if not items:
            return ()
        contents: dict[int, str | None] = {}
        for key, item in items:  # before encoding, since a file may change meanwhile
            content = ContentHash.of(item, self._folder)
            contents[key] = None if content is None else str(content)
        rows = feature_rows((complete(item) for _, item in items), self._folder)
        keyed = [row._replace(id=key) for row, (key, _) in zip(rows, items, strict=True)]
        shard = encode_shard(keyed, self._encoder, skip_bad_images=True)
        self._shards.append(shard)
        self._contents += [contents[key] for key in shard.rows["id"].tolist()]
        names = {
            key: item.id for key, item in items if (item.image or "").startswith(f"{PICTURES}/")
        }
        return [one._replace(file=names.get(one.id, one.file)) for one in shard.left_out]

    def save(self) -> None:
        """Save what is not saved yet."""
        if self._contents:
            make_folder(self._place)
            number = sum(1 for _ in self._place.glob("shard-*"))
            shard = join_shards(self._shards)
            write_shard(self._place, number, shard, contents=self._contents)
        self._shards, self._contents = [], []


def _key(item: Item) -> int:
    """Return a number for an item as it is now."""
    digest = hashlib.blake2b(f"{item.stamp} {item.id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@contextmanager
def saved_features(folder: Path, encoder: Encoder) -> Iterator[SavedFeatures]:
    """Yield what encodes items of an index; if the block raises, what was encoded is saved."""
    work = SavedFeatures(folder, encoder)
    try:
        yield work
    except BaseException:
        work.save()
        raise
