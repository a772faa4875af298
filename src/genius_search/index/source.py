"""Features of items: encoded, given as vectors, or taken from the stored embeddings of an index.

:class:`ItemEncoder` puts items into the store of features of :mod:`genius_search.encoders.store`,
in ``.work/``, so that an interrupted run loses little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int8, Int64, Shaped

from genius_search.artifact import fingerprint_of
from genius_search.data.features import FeatureBatch, Features, LeftOut, Shard
from genius_search.encoders.base import Encoder, ItemKey, reads_images
from genius_search.encoders.rows import FeatureRow, encode_rows
from genius_search.encoders.store import FeatureStore, GrowingBlocks, key_of
from genius_search.errors import BadData, plural
from genius_search.index.items import Item
from genius_search.index.pictures import PictureFile, read_picture
from genius_search.index.pool import MAX_SHOWN_REASONS, Pool
from genius_search.index.roots import ContentHash
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import PICTURES, WORK
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize, sum_features
from genius_search.progress import Progress
from genius_search.records import Modality, format_text
from genius_search.training.codebooks import MAX_FIT_ITEMS

MAX_BLOCK_IMAGES: Final = 32
"""Maximum number of pictures that are encoded together."""
MAX_BLOCK_TEXTS: Final = 1024


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
    # It says whether saved work was made from the same items.
    entries = [entry.model_dump(mode="json") for entry in snapshot.manifest.segments]
    features.fingerprint = fingerprint_of(entries)
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


class ItemEncoder:
    """Encodes items, and saves their features in ``.work/``, where a later run finds them.

    Features are found by an item's id and stamp. So an interrupted run can be continued even if the
    pool has changed, and an item that has changed is encoded again.
    """

    def __init__(self, folder: Path, encoder: Encoder) -> None:
        self._folder, self._encoder = folder, encoder
        self._store: FeatureStore[_NumberedItem] | None = None

    def encode(
        self,
        items: Iterable[Item],
        expected: int,
        progress: Progress,
        *,
        pool: Pool | None = None,
        has_contents: bool = True,
    ) -> Features:
        """Return the features of items; their ids are the positions of the items.

        Items that cannot be read have no row, and are listed in ``left_out`` of the features.

        Parameters
        ----------
        items
            Items with stamps.
        expected
            The number of items.
        pool
            Pool that the items are from, which adds the texts and fields inside their files.
        has_contents
            Whether to read the files for their content hashes, too.

        Raises
        ------
        BadData
            Features are not finite.
        """
        progress.begin("encode", expected)
        self._store = FeatureStore(
            self._folder / WORK,
            self._encoder,
            partial(
                self._encode_block, pool=pool or Pool(lambda: iter(())), has_contents=has_contents
            ),
        )
        features, positions = self._store.encode(
            _number_items(items),
            GrowingBlocks(
                MAX_BLOCK_IMAGES if self._has_pixels else MAX_BLOCK_TEXTS, self._shows_speed
            ),
            lambda count: progress.advance(count, {}),
        )
        features.ids = positions
        return features

    def save(self) -> None:
        """Save the features that are not saved yet."""
        if self._store is not None:
            self._store.save()

    @property
    def _has_pixels(self) -> bool:
        """Whether the encoder decodes pictures, which takes longer than texts."""
        return self._encoder.needs_pixels and reads_images(self._encoder)

    def _shows_speed(self, encoded: Sequence[_NumberedItem]) -> bool:
        """Return whether the time of a block predicts that of the next one.

        Texts say nothing about the time of pictures.
        """
        return not self._has_pixels or all(entry.item.image for entry in encoded)

    def _encode_block(
        self, block: Sequence[_NumberedItem], *, pool: Pool, has_contents: bool
    ) -> Shard:
        """Encode items into a shard with their content hashes."""
        pictures = self._read_pictures(block, pool)
        contents: dict[int, str | None] = {}
        if has_contents:
            digests = {path: picture.digest for path, picture in pictures.items()}
            for number, _, item in block:
                content = ContentHash.of(item, self._folder, digests.get if digests else None)
                contents[number] = None if content is None else str(content)
        unreadable = [] if reads_images(self._encoder) else self._find_unreadable(block, pictures)
        bad_numbers = {problem.id for problem in unreadable}
        rows = [
            self._row(entry._replace(item=pool.with_fields(entry.item)), pictures)
            for entry in block
            if entry.number not in bad_numbers
        ]
        shard = encode_rows(rows, self._encoder, skip_bad_images=True)
        # A stored picture is reported by the id of its item, since its name is a hash.
        item_ids = {
            entry.number: entry.item.id
            for entry in block
            if (entry.item.image or "").startswith(f"{PICTURES}/")
        }
        return shard._replace(
            contents=[contents[number] for number in shard.rows["id"].tolist()] if contents else (),
            left_out=[
                problem._replace(file=item_ids.get(problem.id, problem.file))
                for problem in (*unreadable, *shard.left_out)
            ],
        )

    def _read_pictures(self, block: Sequence[_NumberedItem], pool: Pool) -> dict[Path, PictureFile]:
        """Read the files of a block's pictures, each once, in two threads.

        Pictures whose features are looked up are not opened.
        """
        if not self._has_pixels and reads_images(self._encoder):
            return {}
        paths = {self._folder / entry.item.image: None for entry in block if entry.item.image}
        read: Callable[[Path], PictureFile] = partial(read_picture, decodes=self._has_pixels)
        if pool.has_files:  # their metadata is used again when the items are written
            read = pool.pictures.open if self._has_pixels else pool.pictures.get
        with ThreadPoolExecutor(2) as threads:
            return dict(zip(paths, threads.map(read, paths), strict=True))

    def _find_unreadable(
        self, block: Sequence[_NumberedItem], pictures: Mapping[Path, PictureFile]
    ) -> list[LeftOut]:
        """Return the pictures that no program can open."""
        unreadable = []
        for number, _, item in block:
            problem = pictures[self._folder / item.image].problem if item.image else None
            if problem is not None:
                unreadable.append(LeftOut(number, str(problem.file), problem.reason))
        return unreadable

    def _row(self, entry: _NumberedItem, pictures: Mapping[Path, PictureFile]) -> FeatureRow:
        """Return the row of an item; without pictures, it is a text, the item's description."""
        item = entry.item
        row = FeatureRow(
            id=entry.number,
            key=ItemKey("candidate", item.id),
            modality=Modality.TEXT,
            text=format_text(item.description),
            content_key=entry.key,
        )
        if not reads_images(self._encoder):
            return row
        row = row._replace(modality=item.modality, text=format_text(item.text))
        if item.image is None:
            return row
        path = self._folder / item.image
        picture = pictures.get(path, PictureFile())
        return row._replace(image=path, picture=picture.problem or picture.pixels)


class _NumberedItem(NamedTuple):
    """An item to encode, with its position and the key of its contents."""

    number: int
    key: int
    item: Item


def _number_items(items: Iterable[Item]) -> Iterator[tuple[int, _NumberedItem]]:
    """Yield the key of each item, and the item with its position."""
    for number, item in enumerate(items):
        # Text in a picture is read after the picture was encoded, and changes its description.
        key = key_of(item.stamp, item.id, item.picture_words or "")
        yield key, _NumberedItem(number, key, item)


@contextmanager
def item_encoder(folder: Path, encoder: Encoder) -> Iterator[ItemEncoder]:
    """Yield an encoder of items that saves its features if the block raises an error."""
    work = ItemEncoder(folder, encoder)
    try:
        yield work
    except BaseException:
        work.save()
        raise


def refuse_left_out(left_out: Sequence[LeftOut], encoder: Encoder) -> None:
    """Raise :class:`BadData` if items could not be encoded, since none shall be lost."""
    if left_out:
        shown = "; ".join(f"{entry.file}: {entry.reason}" for entry in left_out[:MAX_SHOWN_REASONS])
        raise BadData(
            f"{encoder.spec} cannot encode {plural(len(left_out), 'item')}, and nothing is "
            f"changed: {shown}. Restore these files, or delete the items with `genius index delete`"
        )
