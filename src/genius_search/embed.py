"""Embedding of queries and candidates in chunks into folders of features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Shaped
from PIL import Image

from genius_search.data.features import (
    ABSENT,
    KIND,
    Features,
    LeftOut,
    Shard,
    has_shard,
    num_records,
    num_rows,
    write_shard,
)
from genius_search.data.images import SHORTEST_SIDE, open_image
from genius_search.encoders.base import (
    Encoder,
    ImageInput,
    ItemKey,
    JointEncoder,
    JointInput,
    TextInput,
    is_joint,
)
from genius_search.errors import ArtifactMismatch, BadData, BadImage
from genius_search.nn.arrays import AnyArray, as_array
from genius_search.progress import Progress
from genius_search.records import Modality
from genius_search.writing import ArtifactWriter

Item = TypeVar("Item")
AnyEncoder = TypeVar("AnyEncoder", bound=Encoder)

SHARD_ROWS: Final = 8192
ENCODE_BATCH: Final = 256
LOOK_UP_BATCH: Final = 2048
"""Batch size of encoders that look features up; without a forward pass it only takes memory."""
_CODES: Final = {modality: modality.code for modality in Modality} | {None: ABSENT}


class FeatureRow(NamedTuple):
    """A query or candidate to embed."""

    id: int
    key: ItemKey
    modality: Modality
    image: Path | None = None
    text: str | None = None
    """Text for the encoder, including the instruction."""
    variant: int = ABSENT
    wanted: Modality | None = None


class EncodedShard(NamedTuple):
    """A shard, and the rows that were left out of it."""

    shard: Shard
    left_out: list[LeftOut]


class _Encoded(NamedTuple):
    """Features of one modality (or both jointly), and the row of each key."""

    packed: Shaped[np.ndarray, "items dim"]
    places: Mapping[Hashable, int]


_Batch = list[tuple[FeatureRow, Image.Image | None]]


def encode_shard(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> EncodedShard:
    """Encode rows into a shard, leaving out those with unreadable images.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    """
    bad: dict[Path | None, BadImage] | None = {} if skip_bad_images else None
    # Encode each distinct input once: keyed by item if features are looked up, by content otherwise.
    looks_up = not encoder.needs_pixels
    if is_joint(encoder):
        image_keys: list[Hashable] = [None] * len(rows)
        text_keys: list[Hashable] = [row.key if looks_up else (row.image, row.text or "") for row in rows]
        image, text = _join([], [], encoder), _encode(rows, text_keys, encoder, _encode_both, bad)
    else:
        image_keys = [None if row.image is None else (row.key if looks_up else row.image) for row in rows]
        text_keys = [None if not row.text else (row.key if looks_up else row.text) for row in rows]
        image = _encode(rows, image_keys, encoder, _encode_images, bad)
        text = _encode(rows, text_keys, encoder, _encode_texts, bad)
    errors = [bad.get(row.image) if bad else None for row in rows]
    kept = [place for place, error in enumerate(errors) if error is None]
    chosen = rows if len(kept) == len(rows) else [rows[place] for place in kept]
    shard = Shard(
        ids=np.array([row.id for row in chosen], dtype=np.int64),
        variant=np.array([row.variant for row in chosen], dtype=np.int16),
        modality=np.array([_CODES[row.modality] for row in chosen], dtype=np.int8),
        wanted=np.array([_CODES[row.wanted] for row in chosen], dtype=np.int8),
        image_index=np.array([image.places.get(image_keys[place], ABSENT) for place in kept], dtype=np.int64),
        text_index=np.array([text.places.get(text_keys[place], ABSENT) for place in kept], dtype=np.int64),
        image=image.packed,
        text=text.packed,
    )
    left_out = [
        LeftOut(row.id, str(error.file), error.reason)
        for row, error in zip(rows, errors, strict=True)
        if error is not None
    ]
    return EncodedShard(shard, left_out)


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of ``size`` items; the last may be shorter."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


def _encode_images(encoder: Encoder, batch: _Batch) -> AnyArray:
    return encoder.image_features([ImageInput(picture, row.key) for row, picture in batch])


def _encode_texts(encoder: Encoder, batch: _Batch) -> AnyArray:
    return encoder.text_features([TextInput(row.text or "", row.key) for row, _ in batch])


def _encode_both(encoder: JointEncoder, batch: _Batch) -> AnyArray:
    return encoder.joint_features(
        [JointInput(picture, row.text or "", row.key, row.image is not None) for row, picture in batch]
    )


def _encode(
    rows: Sequence[FeatureRow],
    keys: Sequence[Hashable],
    encoder: AnyEncoder,
    encode: Callable[[AnyEncoder, _Batch], AnyArray],
    bad: dict[Path | None, BadImage] | None,
) -> _Encoded:
    """Encode a row of each key but None. Two threads decode the images that the encoder needs.

    Unreadable images are collected in ``bad``; without one, the first is an error.
    """
    distinct = {key: row for key, row in zip(keys, rows, strict=True) if key is not None}
    decodes = encoder.needs_pixels and encode is not _encode_texts
    parts: list[np.ndarray] = []
    good: list[Hashable] = []
    with ThreadPoolExecutor(2) as pool:
        for batch in chunks(distinct.items(), ENCODE_BATCH if encoder.needs_pixels else LOOK_UP_BATCH):
            opened = pool.map(_decode, [row.image for _, row in batch]) if decodes else [None] * len(batch)
            readable: _Batch = []
            for (key, row), picture in zip(batch, opened, strict=True):
                if not isinstance(picture, BadImage):
                    readable.append((row, picture))
                    good.append(key)
                elif bad is None:
                    raise BadImage(
                        picture.file,
                        f"{picture.reason}; {row.key.role} {row.key.id} needs it. Restore it, or find all "
                        "such images with `genius data check`",
                    )
                else:
                    bad[row.image] = picture
            if readable:
                parts.append(as_array(encode(encoder, readable)))
    return _join(parts, good, encoder)


def _decode(path: Path | None) -> Image.Image | BadImage | None:
    if path is None:
        return None
    try:
        return open_image(path, shortest_side=SHORTEST_SIDE)
    except BadImage as error:
        return error


def _join(parts: list[np.ndarray], keys: Iterable[Hashable], encoder: Encoder) -> _Encoded:
    packed = np.concatenate(parts) if parts else np.zeros((0, encoder.dim), dtype=np.float16)
    return _Encoded(packed, {key: place for place, key in enumerate(keys)})


def embed(
    rows: Iterable[FeatureRow],
    encoder: Encoder,
    folder: Path,
    *,
    inputs: Mapping[str, str],
    expected: int,
    progress: Progress,
    skip_bad_images: bool = False,
    shard_rows: int | None = None,
) -> Features:
    """Embed rows into ``folder``, or open it if it is already finished with the same inputs.

    Parameters
    ----------
    rows
        read as a stream. The same ``inputs`` must always give the same rows in the same order.
    expected
        approximate number of rows, for the progress display.
    skip_bad_images
        leave out rows with unreadable images, and list them in :attr:`Features.left_out`; otherwise such an
        image is an error.
    shard_rows
        rows that are finished together; an interrupted run loses at most those. Default: :data:`SHARD_ROWS`.

    Raises
    ------
    BadData
        There is nothing to embed, or features are not finite.
    BadImage
        An image cannot be read.
    ArtifactMismatch
        The records changed since an interrupted run, or another process removed shards.
    """
    shard_rows = shard_rows or SHARD_ROWS
    writer = _writer(folder, inputs, encoder, shard_rows)
    if writer.finished() is not None:
        return Features.open(folder)
    progress.begin(f"embed {folder.name}", expected)
    sizes: list[int] = []
    for number, chunk in enumerate(chunks(rows, shard_rows)):
        if not has_shard(writer.path, number):
            encoded = encode_shard(chunk, encoder, skip_bad_images=skip_bad_images)
            write_shard(writer.path, number, encoded.shard, encoded.left_out)
        sizes.append(len(chunk))
        progress.advance(min(expected - 1, number * shard_rows + len(chunk)), {})
    _finish(writer, encoder.spec, sizes)
    progress.advance(expected, {})
    return Features.open(folder)


def transform(
    source: Features,
    folder: Path,
    *,
    change: Callable[[Shard], Shard],
    inputs: Mapping[str, str],
    encoder: Encoder,
) -> Features:
    """Write the features that :func:`embed` would for ``encoder``, by changing every shard of ``source``.

    ``source`` holds features of the same records by the encoder's first half.
    """
    writer = _writer(folder, inputs, encoder, SHARD_ROWS)
    if writer.finished() is not None:
        return Features.open(folder)
    sizes: list[int] = []
    for number, shard in enumerate(source.shards()):
        sizes.append(len(shard.ids))
        if not has_shard(writer.path, number):
            write_shard(writer.path, number, change(shard), [])
    _finish(writer, encoder.spec, sizes)
    return Features.open(folder)


def _writer(folder: Path, inputs: Mapping[str, str], encoder: Encoder, shard_rows: int) -> ArtifactWriter:
    return ArtifactWriter(
        folder,
        kind=KIND,
        config={"shard_rows": shard_rows},
        inputs={**inputs, "encoder": encoder.fingerprint},
    )


def _finish(writer: ArtifactWriter, spec: str, sizes: Sequence[int]) -> None:
    """Check that all shards are present with these numbers of records, then finish the folder."""
    written = num_records(writer.path)
    if written != dict(enumerate(sizes)):
        raise ArtifactMismatch(
            f"{writer.path} holds {sum(written.values()):,} of {sum(sizes):,} records, in {len(written)} of "
            f"{len(sizes)} shards: the records changed, or another process removed shards; remove the folder "
            "and run the command again"
        )
    rows = num_rows(writer.path)
    if rows == 0:
        raise BadData(f"nothing to embed into {writer.folder}: there is no record that can be read")
    # Shards without any image (or text) have width 0 there, so take the maximum.
    widths = {
        f"{name}_dim": max(
            np.load(path, mmap_mode="r").shape[1] for path in writer.path.glob(f"shard-*/{name}.npy")
        )
        for name in ("image", "text")
    }
    writer.finish(facts={"rows": rows, **widths}, notes={"encoder": spec})
