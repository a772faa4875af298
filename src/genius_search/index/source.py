"""Features of items: encoded, given as vectors, or taken from the stored embeddings of an index.

:class:`ItemEncoder` puts items into the store of features of :mod:`genius_search.encoders.store`,
in ``.work/``, so that an interrupted run loses little.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from jaxtyping import Float32, Int8, Int64, Shaped

from genius_search.artifact import fingerprint_of
from genius_search.data.features import FeatureBatch, Features, LeftOut, Shard
from genius_search.encoders.base import Encoder, ItemKey, reads_images
from genius_search.encoders.rows import FeatureRow, KeyedRow, encode_rows
from genius_search.encoders.store import FeatureStore, GrowingBlocks, key_of
from genius_search.errors import BadData, plural
from genius_search.index.items import Item
from genius_search.index.pictures import PictureFile, read_picture
from genius_search.index.pool import MAX_SHOWN_REASONS, Pool
from genius_search.index.roots import ContentHash
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import PICTURES, WORK
from genius_search.index.writer import Entry
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize, sum_features
from genius_search.progress import Progress
from genius_search.records import Modality, format_text
from genius_search.training.codebooks import MAX_FIT_ITEMS

MAX_BLOCK_IMAGES: Final = 32
"""Maximum number of pictures that are encoded together."""
MAX_BLOCK_TEXTS: Final = 1024
SCALED_ROWS: Final = 1024
"""Number of vectors per block that stay in a core's cache while they are scaled to unit length."""
STORED_ITEMS: Final = Pool(lambda: iter(()))
"""A pool that adds nothing to items, for the items of an index."""
_KeyedItem: TypeAlias = tuple[int, tuple[int, Item]]
"""The key of an item's saved features, its position, and the item."""


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
        scaled = np.empty((len(numbers), vectors.shape[1]), dtype=np.float32)
        for start in range(0, len(numbers), SCALED_ROWS):
            block = slice(start, start + SCALED_ROWS)
            # In 64 bits, the squares of large values are finite.
            scaled[block] = normalize(vectors[rows[numbers[block]]].astype(np.float64))
        return scaled

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
        self._store: FeatureStore[tuple[int, Item]] | None = None

    def features_of(
        self,
        entries: Iterable[Entry],
        expected: int,
        progress: Progress,
        *,
        pool: Pool = STORED_ITEMS,
        has_contents: bool = True,
        share: tuple[int, int] = (0, 1),
    ) -> Features:
        """Return the features of items and passages; their ids are the positions of the entries.

        Those that cannot be read have no row, and are listed in ``left_out`` of the features.

        Parameters
        ----------
        entries
            Items with stamps, and their passages.
        expected
            The number of entries.
        pool
            Pool that the items are from, which adds the texts and fields inside their files.
        has_contents
            Whether to read the files for their content hashes, too.
        share
            The entries to encode: with (i, n), every n-th, from number i on.

        Raises
        ------
        BadData
            Features are not finite.
        """
        progress.begin("encode", expected)
        self._store = FeatureStore(
            self._folder / WORK,
            self._encoder,
            partial(self._encode_block, pool=pool, has_contents=has_contents),
        )
        features, positions = self._store.features_of(
            itertools.islice(_keyed_items(entries, pool), share[0], None, share[1]),
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

    def _shows_speed(self, encoded: Sequence[_KeyedItem]) -> bool:
        """Return whether the time of a block predicts that of the next one.

        Texts say nothing about the time of pictures.
        """
        return not self._has_pixels or all(item.image for _, (_, item) in encoded)

    def _encode_block(
        self, block: Sequence[_KeyedItem], *, pool: Pool, has_contents: bool
    ) -> Shard:
        """Encode items into a shard with their content hashes."""
        pictures = self._read_pictures(block, pool)
        digests = {path: picture.digest for path, picture in pictures.items()}
        contents: dict[int, str | None] = {}
        names: dict[int, str] = {}
        rows: list[KeyedRow] = []
        left_out: list[LeftOut] = []
        for key, (number, item) in block:
            if has_contents:
                content = ContentHash.of(item, self._folder, digests.get if digests else None)
                contents[number] = None if content is None else str(content)
            if item.image is not None and item.image.startswith(f"{PICTURES}/"):
                names[number] = item.id  # its file's name is a hash
            path = None if item.image is None else self._folder / item.image
            picture = PictureFile() if path is None else pictures.get(path, PictureFile())
            if picture.problem is not None and not reads_images(self._encoder):
                left_out.append(LeftOut(number, str(picture.problem.file), picture.problem.reason))
            else:
                rows.append((key, self._row(number, pool.with_caption(item), path, picture)))
        shard = encode_rows(rows, self._encoder, skip_bad_images=True)
        left_out += shard.left_out
        return shard._replace(
            contents=[contents[number] for number in shard.rows["id"].tolist()] if contents else (),
            left_out=[
                problem._replace(file=names.get(problem.id, problem.file)) for problem in left_out
            ],
        )

    def _read_pictures(self, block: Sequence[_KeyedItem], pool: Pool) -> dict[Path, PictureFile]:
        """Read the files of a block's pictures, each once, in two threads.

        Pictures whose features are looked up are not opened.
        """
        if not self._has_pixels and reads_images(self._encoder):
            return {}
        paths = {self._folder / item.image: None for _, (_, item) in block if item.image}
        read: Callable[[Path], PictureFile] = partial(read_picture, decodes=self._has_pixels)
        if pool.has_files:  # their metadata is used again when the items are written
            read = pool.pictures.open if self._has_pixels else pool.pictures.get
        with ThreadPoolExecutor(2) as threads:
            return dict(zip(paths, threads.map(read, paths), strict=True))

    def _row(self, number: int, item: Item, path: Path | None, picture: PictureFile) -> FeatureRow:
        """Return the row of an item; without pictures, it is a text, the item's description."""
        is_text = not reads_images(self._encoder)
        return FeatureRow(
            id=number,
            key=ItemKey("candidate", item.id),
            modality=Modality.TEXT if is_text else item.modality,
            image=None if is_text else path,
            picture=None if is_text else picture.problem or picture.pixels,
            text=format_text(item.description if is_text else item.text),
        )


def _keyed_items(entries: Iterable[Entry], pool: Pool) -> Iterator[_KeyedItem]:
    """Yield each item, and each passage as an item, as an encoder reads them.

    A passage is a text, or a frame of a video.
    """
    for number, entry in enumerate(entries):
        if isinstance(entry, Item):
            item = encoded = entry
        elif entry.is_frame:
            from genius_search.data.video import frame_file  # noqa: PLC0415  few items are videos

            frame = frame_file(Path(item.image or ""), entry.moment or 0)
            frame_id = f"{item.id}\n@{entry.moment}"
            encoded = Item(frame_id, Modality.IMAGE, None, str(frame), stamp=item.stamp)
        else:
            text = pool.with_caption(item).description[entry.start : entry.end]
            encoded = Item(f"{item.id}\n{entry.start}", Modality.TEXT, text, stamp=item.stamp)
        # Text in a picture is read after the picture was encoded, and changes its description.
        key = key_of(encoded.stamp, encoded.id, encoded.picture_words or "")
        yield key, (number, encoded)


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
