"""Encoding of rows, which are queries or candidates of a data set, or items of an index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from PIL import Image

from genius_search.border import as_numbers
from genius_search.data.features import ABSENT, ROW, LeftOut, Shard, to_float16
from genius_search.data.images import SHORTEST_SIDE
from genius_search.data.video import open_still
from genius_search.encoders.base import Encoder, ItemKey, reads_images
from genius_search.errors import BadImage
from genius_search.nn.codebooks import AnyArray
from genius_search.records import Modality

Element = TypeVar("Element")

ENCODE_BATCH: Final = 256
"""Batch size of encoders that run a network."""
LOOK_UP_BATCH: Final = 2048
"""Batch size of encoders that look features up; without a forward pass, it only costs memory."""


class FeatureRow(NamedTuple):
    """A query or candidate to embed."""

    id: int
    """Number of the query or candidate."""
    key: ItemKey
    """Role and id, with which some encoders look features up."""
    modality: Modality
    image: Path | None = None
    picture: Image.Image | BadImage | None = None
    """The image if it has been decoded already, or the reason why it cannot be."""
    text: str | None = None
    """Text for the encoder, including the instruction."""
    wanted: Modality | None = None
    """Modality that a query asks for; None for candidates."""
    content_key: int = 0
    """Hash of the contents, the key of saved features."""


_Encode: TypeAlias = Callable[[list[Any], list[str], list[ItemKey]], AnyArray]
"""Encodes pictures, texts and keys; pictures are None if they are not decoded."""


def chunks(items: Iterable[Element], size: int) -> Iterator[list[Element]]:
    """Yield lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def encode_rows(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> Shard:
    """Encode rows into a shard.

    With ``skip_bad_images``, rows with unreadable images are left out. An encoder of texts then
    reads the texts of images, and images without a text are left out.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    BadData
        Features are not finite.
    """
    return _ShardEncoder(rows, encoder, skip_bad_images=skip_bad_images).encode()


class _ShardEncoder:
    """Encodes rows into a shard, each distinct input once, and records unreadable images.

    A row of the shard refers to the rows of its features, by number:

        input rows              encoded features                rows of the shard (ABSENT is −1)
        a.jpg, "a dog"          image 0: a.jpg                  image 0, text 0
        b.jpg                   image 1: b.jpg                  image 1, text ABSENT
        a.jpg, "a cat"          text 0: "a dog", 1: "a cat"     image 0, text 1
    """

    def __init__(
        self, rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool
    ) -> None:
        self._rows = rows
        self._encoder = encoder
        self._skip_bad_images = skip_bad_images
        self._bad_images: dict[Path | None, BadImage] = {}
        if skip_bad_images and not reads_images(encoder):
            self._replace_images_by_texts()

    def encode(self) -> Shard:
        """Return the shard of all rows except rows with unreadable images."""
        encode_jointly = getattr(self._encoder, "joint_features", None)
        if encode_jointly is not None:
            image, image_rows = self._without_images()
            text, text_rows = self._encode_pairs(encode_jointly)
        else:
            image, image_rows = self._encode_images()
            text, text_rows = self._encode_texts()
        rows: list[tuple[int, int, int, int, int, int]] = []
        left_out: list[LeftOut] = []
        for row, image_row, text_row in zip(self._rows, image_rows, text_rows, strict=True):
            error = self._bad_images.get(row.image)
            if error is not None:
                left_out.append(LeftOut(row.id, str(error.file), error.reason))
                continue
            target = ABSENT if row.wanted is None else row.wanted.code
            rows.append((row.id, image_row, text_row, row.modality.code, target, row.content_key))
        return Shard(np.array(rows, ROW), image, text, left_out)

    def _replace_images_by_texts(self) -> None:
        """Replace images by their texts alone; images without a text count as unreadable."""
        reason = f"has no words, and {self._encoder.spec} reads texts only"
        for row in self._rows:
            if row.image and not row.text:
                self._bad_images[row.image] = BadImage(row.image, reason)
        self._rows = [
            row._replace(image=None, modality=Modality.TEXT) if row.text else row
            for row in self._rows
        ]

    # The keys of the next methods say which rows have the same input: by the item if features are
    # looked up, by the contents otherwise. A row without this input has the key None.

    def _without_images(self) -> tuple[np.ndarray, list[int]]:
        """Return no image features."""
        return np.zeros((0, self._encoder.dim), np.float16), [ABSENT] * len(self._rows)

    def _encode_pairs(self, encode: _Encode) -> tuple[np.ndarray, list[int]]:
        """Encode image and text of each row together; the vector is stored as a text's feature."""
        keys = [(row.image, row.text or "") for row in self._rows]
        return self._encode_distinct(keys, encode, decode=True)

    def _encode_images(self) -> tuple[np.ndarray, list[int]]:
        """Encode the readable images."""
        keys: list[Hashable] = []
        for row in self._rows:
            is_readable = row.image and row.image not in self._bad_images
            key = row.image if self._encoder.needs_pixels else row.key
            keys.append(key if is_readable else None)
        return self._encode_distinct(
            keys,
            lambda pictures, _, item_keys: self._encoder.image_features(pictures, item_keys),
            decode=self._encoder.needs_pixels,
        )

    def _encode_texts(self) -> tuple[np.ndarray, list[int]]:
        """Encode the texts, those of rows with unreadable images included."""
        keys: list[Hashable] = []
        for row in self._rows:
            key = row.text if self._encoder.needs_pixels else row.key
            keys.append(key if row.text else None)
        return self._encode_distinct(
            keys,
            lambda _, texts, item_keys: self._encoder.text_features(texts, item_keys),
            decode=False,
        )

    def _encode_distinct(
        self, keys: Sequence[Hashable], encode: _Encode, *, decode: bool
    ) -> tuple[np.ndarray, list[int]]:
        """Encode a row of each distinct key; return the features, and the feature row of each key.

        Parameters
        ----------
        keys
            of all rows; rows with the same key have the same input, and None has no input.
        decode
            whether images are decoded. Unreadable ones have no feature.
        """
        rows_by_key = {
            key: row for key, row in zip(keys, self._rows, strict=True) if key is not None
        }
        parts = [np.zeros((0, self._encoder.dim), dtype=np.float16)]
        feature_rows: dict[Hashable, int] = {}
        batch_size = ENCODE_BATCH if self._encoder.needs_pixels else LOOK_UP_BATCH
        for batch in chunks(rows_by_key.items(), batch_size):
            pictures: list[Image.Image | None] = [None] * len(batch)
            if decode:
                pictures = self._open_images([row for _, row in batch])
            inputs: list[tuple[Image.Image | None, str, ItemKey]] = []
            for (key, row), picture in zip(batch, pictures, strict=True):
                if decode and row.image in self._bad_images:
                    continue
                feature_rows[key] = len(feature_rows)
                inputs.append((picture, row.text or "", row.key))
            if inputs:
                features = encode(*map(list, zip(*inputs, strict=True)))
                parts.append(as_numbers(features, f"the features of {self._encoder.spec}"))
        features = to_float16(np.concatenate(parts[1:] or parts))
        return features, [feature_rows.get(key, ABSENT) for key in keys]

    def _open_images(self, rows: Sequence[FeatureRow]) -> list[Image.Image | None]:
        """Decode the images of rows in two threads; record unreadable ones, or raise for them."""

        def decode(row: FeatureRow) -> Image.Image | None:
            try:
                if isinstance(row.picture, BadImage):
                    raise row.picture
                if row.image is None or row.picture is not None:
                    return row.picture
                return open_still(row.image, shortest_side=SHORTEST_SIDE)
            except BadImage as error:
                if not self._skip_bad_images:
                    raise BadImage(
                        error.file,
                        f"{error.reason}; {row.key.role} {row.key.id} needs it. Restore it, or "
                        "find all such images with `genius data check`",
                    ) from None
                self._bad_images[row.image] = error
                return None

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(decode, rows))
