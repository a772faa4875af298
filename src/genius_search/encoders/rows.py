"""Encoding of rows, which are queries or candidates of a data set, or items of an index."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np
from PIL import Image

from genius_search.border import as_numbers
from genius_search.data.features import ABSENT, ROW, LeftOut, Shard, to_float16
from genius_search.data.images import SHORTEST_SIDE, is_video_file, open_image
from genius_search.data.video import open_still
from genius_search.encoders.base import Encoder, ItemKey, JointEncoder, reads_images
from genius_search.errors import BadImage
from genius_search.records import MODALITY_CODES, Modality

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


KeyedRow: TypeAlias = tuple[int, FeatureRow]
"""A hash of the contents of a row, with which its saved features are found, and the row."""
InputKind: TypeAlias = Literal["image", "text", "both"]
"""The inputs of an encoder: images, texts, or both together for a single vector."""
_BadImages: TypeAlias = dict[Path | None, BadImage]
"""Unreadable images, each with the reason."""


def chunks(items: Iterable[Element], size: int) -> Iterator[list[Element]]:
    """Yield lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def encode_rows(
    keyed_rows: Sequence[KeyedRow], encoder: Encoder, *, skip_bad_images: bool
) -> Shard:
    """Encode rows into a shard, each distinct input once.

    A row of the shard refers to the rows of its features, by number::

        input rows              encoded features                rows of the shard (ABSENT is −1)
        a.jpg, "a dog"          image 0: a.jpg                  image 0, text 0
        b.jpg                   image 1: b.jpg                  image 1, text ABSENT
        a.jpg, "a cat"          text 0: "a dog", 1: "a cat"     image 0, text 1

    With ``skip_bad_images``, rows with unreadable images are left out. An encoder of texts then
    reads the texts of images, and images without a text are left out.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    BadData
        Features are not finite.
    """
    bad_images: _BadImages = {}
    rows = [row for _, row in keyed_rows]
    if skip_bad_images and not reads_images(encoder):
        rows = _replace_images_by_texts(rows, encoder, bad_images)
    if hasattr(encoder, "joint_features"):
        image, image_rows = np.zeros((0, encoder.dim), np.float16), [ABSENT] * len(rows)
        text, text_rows = _encode_distinct(rows, "both", encoder, bad_images)
    else:
        image, image_rows = _encode_distinct(rows, "image", encoder, bad_images)
        text, text_rows = _encode_distinct(rows, "text", encoder, bad_images)
    shard_rows: list[tuple[int, int, int, int, int, int]] = []
    left_out: list[LeftOut] = []
    columns = zip(keyed_rows, rows, image_rows, text_rows, strict=True)
    for (key, _), row, image_row, text_row in columns:
        error = bad_images.get(row.image)
        if error is None:
            modality = MODALITY_CODES[row.modality]
            target = ABSENT if row.wanted is None else MODALITY_CODES[row.wanted]
            shard_rows.append((row.id, image_row, text_row, modality, target, key))
        elif skip_bad_images:
            left_out.append(LeftOut(row.id, str(error.file), error.reason))
        else:
            raise BadImage(
                error.file,
                f"{error.reason}; {row.key.role} {row.key.id} needs it. Restore it, or find all "
                "such images with `genius data check`",
            )
    return Shard(np.array(shard_rows, ROW), image, text, left_out)


def _replace_images_by_texts(
    rows: Sequence[FeatureRow], encoder: Encoder, bad_images: _BadImages
) -> list[FeatureRow]:
    """Replace images by their texts alone; images without a text count as unreadable."""
    reason = f"has no words, and {encoder.spec} reads texts only"
    for row in rows:
        if row.image and not row.text:
            bad_images[row.image] = BadImage(row.image, reason)
    return [row._replace(image=None, modality=Modality.TEXT) if row.text else row for row in rows]


def _encode_distinct(
    rows: Sequence[FeatureRow],
    kind: InputKind,
    encoder: Encoder,
    bad_images: _BadImages,
) -> tuple[np.ndarray, list[int]]:
    """Encode each distinct input of a kind; return the features, and the feature row of each row.

    Unreadable images are added to ``bad_images``, and have no feature.
    """
    keys = _input_keys(rows, kind, encoder, bad_images)
    rows_by_key = {key: row for key, row in zip(keys, rows, strict=True) if key is not None}
    parts = [np.zeros((0, encoder.dim), dtype=np.float16)]
    feature_rows: dict[Hashable, int] = {}
    batch_size = ENCODE_BATCH if encoder.needs_pixels else LOOK_UP_BATCH
    for batch in chunks(rows_by_key.items(), batch_size):
        pictures: list[Image.Image | BadImage | None] = [None] * len(batch)
        if kind == "both" or (kind == "image" and encoder.needs_pixels):
            with ThreadPoolExecutor(2) as threads:
                pictures = list(threads.map(_open_image, [row for _, row in batch]))
        inputs: list[tuple[Image.Image | None, str, ItemKey]] = []
        for (key, row), picture in zip(batch, pictures, strict=True):
            if isinstance(picture, BadImage):
                bad_images[row.image] = picture
            else:
                feature_rows[key] = len(feature_rows)
                inputs.append((picture, row.text or "", row.key))
        if inputs:
            images, texts, item_keys = map(list, zip(*inputs, strict=True))
            if kind == "both":
                features = cast("JointEncoder", encoder).joint_features(images, texts, item_keys)
            elif kind == "image":
                features = encoder.image_features(images, item_keys)
            else:
                features = encoder.text_features(texts, item_keys)
            parts.append(as_numbers(features, f"the features of {encoder.spec}"))
    features = to_float16(np.concatenate(parts[1:] or parts))
    return features, [feature_rows.get(key, ABSENT) for key in keys]


def _input_keys(
    rows: Sequence[FeatureRow], kind: InputKind, encoder: Encoder, bad_images: _BadImages
) -> list[Hashable]:
    """Return a key for each row, which rows with the same input share; None without an input.

    It is the key of the item if features are looked up, and the contents otherwise.
    """
    if kind == "both":
        return [(row.image, row.text or "") for row in rows]
    keys: list[Hashable] = []
    for row in rows:
        content = row.text if kind == "text" else row.image
        if not content or (kind == "image" and row.image in bad_images):
            keys.append(None)
        else:
            keys.append(content if encoder.needs_pixels else row.key)
    return keys


def _open_image(row: FeatureRow) -> Image.Image | BadImage | None:
    """Return the decoded image of a row, or why it cannot be decoded; None without an image."""
    if row.image is None or row.picture is not None:
        return row.picture
    try:
        if is_video_file(row.image):
            return open_still(row.image)
        return open_image(row.image, shortest_side=SHORTEST_SIDE)
    except BadImage as error:
        return error
