"""Embedding of queries and candidates, in chunks, into folders of features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Shaped
from PIL import Image
from torch import Tensor

from genius_search.artifact import ArtifactWriter
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
from genius_search.data.images import open_image
from genius_search.encoders.base import (
    Encoder,
    ImageInput,
    ItemKey,
    JointEncoder,
    JointInput,
    TextInput,
    is_joint,
)
from genius_search.encoders.content import SHORTEST_SIDE
from genius_search.errors import ArtifactMismatch, BadData, BadImage
from genius_search.progress import Progress
from genius_search.records import Modality

Item = TypeVar("Item")

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


def encode_shard(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> EncodedShard:
    """Encode rows into a shard, leaving out those with unreadable images.

    Raises
    ------
    BadImage
        An image cannot be read, and ``skip_bad_images`` is false.
    """
    # Encode each distinct input once: keyed by item if features are looked up, by content otherwise.
    looks_up = not encoder.needs_pixels
    bad = _Bad(skip=skip_bad_images)
    image_keys: list[Hashable]
    if is_joint(encoder):
        image_keys = [None] * len(rows)
        text_keys: list[Hashable] = [row.key if looks_up else (row.image, row.text or "") for row in rows]
        image, text = _nothing(encoder), _encode_together(rows, text_keys, encoder, bad)
    else:
        image_keys = [None if row.image is None else (row.key if looks_up else row.image) for row in rows]
        text_keys = [None if not row.text else (row.key if looks_up else row.text) for row in rows]
        image, text = (
            _encode_images(rows, image_keys, encoder, bad),
            _encode_texts(rows, text_keys, encoder),
        )
    errors = [bad.found.get(row.image) if bad.found else None for row in rows]
    kept = [place for place, error in enumerate(errors) if error is None]
    chosen = rows if len(kept) == len(rows) else [rows[place] for place in kept]
    shard = Shard(
        ids=np.array([row.id for row in chosen], dtype=np.int64),
        variant=np.array([row.variant for row in chosen], dtype=np.int16),
        modality=np.array([_CODES[row.modality] for row in chosen], dtype=np.int8),
        wanted=np.array([_CODES[row.wanted] for row in chosen], dtype=np.int8),
        image_index=_places(image_keys, image.places, kept),
        text_index=_places(text_keys, text.places, kept),
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


class _Bad:
    """Collector of unreadable images, or with ``skip`` false, raiser of the first."""

    def __init__(self, *, skip: bool) -> None:
        self._skip = skip
        self.found: dict[Path | None, BadImage] = {}

    def add(self, row: FeatureRow, error: BadImage) -> None:
        if not self._skip:
            raise BadImage(
                error.file,
                f"{error.reason}; {row.key.role} {row.key.id} needs it. Restore it, or find all such images "
                "with `genius data check`",
            )
        self.found[row.image] = error


def _encode_images(
    rows: Sequence[FeatureRow], keys: Sequence[Hashable], encoder: Encoder, bad: _Bad
) -> _Encoded:
    def encode(batch: list[tuple[FeatureRow, Image.Image | None]]) -> Tensor:
        return encoder.image_features([ImageInput(picture, row.key) for row, picture in batch])

    return _encode(_distinct(rows, keys), encoder, encode, bad)


def _encode_texts(rows: Sequence[FeatureRow], keys: Sequence[Hashable], encoder: Encoder) -> _Encoded:
    distinct = _distinct(rows, keys)
    parts = [
        encoder.text_features([TextInput(row.text or "", row.key) for row in batch]).cpu().numpy()
        for batch in chunks(distinct.values(), _batch_size(encoder))
    ]
    return _join(parts, distinct, encoder)


def _encode_together(
    rows: Sequence[FeatureRow], keys: Sequence[Hashable], encoder: JointEncoder, bad: _Bad
) -> _Encoded:
    def encode(batch: list[tuple[FeatureRow, Image.Image | None]]) -> Tensor:
        return encoder.joint_features(
            [JointInput(picture, row.text or "", row.key, row.image is not None) for row, picture in batch]
        )

    return _encode(_distinct(rows, keys), encoder, encode, bad)


def _encode(
    distinct: dict[Hashable, FeatureRow],
    encoder: Encoder,
    encode: Callable[[list[tuple[FeatureRow, Image.Image | None]]], Tensor],
    bad: _Bad,
) -> _Encoded:
    """Encode rows with images, which two threads decode if the encoder needs pixels."""
    parts: list[np.ndarray] = []
    good: list[Hashable] = []
    with ThreadPoolExecutor(2) as pool:
        for batch in chunks(distinct.items(), _batch_size(encoder)):
            opened = pool.map(_decode, [row.image for _, row in batch]) if encoder.needs_pixels else None
            readable: list[tuple[FeatureRow, Image.Image | None]] = []
            for key, row in batch:
                picture = None if opened is None else next(opened)
                if isinstance(picture, BadImage):
                    bad.add(row, picture)
                else:
                    readable.append((row, picture))
                    good.append(key)
            if readable:
                parts.append(encode(readable).cpu().numpy())
    return _join(parts, good, encoder)


def _decode(path: Path | None) -> Image.Image | BadImage | None:
    if path is None:
        return None
    try:
        return open_image(path, shortest_side=SHORTEST_SIDE)
    except BadImage as error:
        return error


def _distinct(rows: Sequence[FeatureRow], keys: Sequence[Hashable]) -> dict[Hashable, FeatureRow]:
    return {key: row for key, row in zip(keys, rows, strict=True) if key is not None}


def _batch_size(encoder: Encoder) -> int:
    return ENCODE_BATCH if encoder.needs_pixels else LOOK_UP_BATCH


def _join(parts: list[np.ndarray], keys: Iterable[Hashable], encoder: Encoder) -> _Encoded:
    if not parts:
        return _nothing(encoder)
    packed = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return _Encoded(packed, {key: place for place, key in enumerate(keys)})


def _nothing(encoder: Encoder) -> _Encoded:
    return _Encoded(np.zeros((0, encoder.dim), dtype=np.float16), {})


def _places(keys: Sequence[Hashable], places: Mapping[Hashable, int], kept: Sequence[int]) -> np.ndarray:
    return np.array([places.get(keys[index], ABSENT) for index in kept], dtype=np.int64)


SHARD_ROWS: Final = 8192


def embed(
    rows: Iterable[FeatureRow],
    encoder: Encoder,
    folder: Path,
    *,
    inputs: Mapping[str, str],
    expected: int,
    progress: Progress,
    skip_bad_images: bool = False,
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

    Raises
    ------
    BadData
        There is nothing to embed, or features are not finite.
    BadImage
        An image cannot be read.
    ArtifactMismatch
        The records changed since an interrupted run, or another process removed shards.
    """
    writer = _writer(folder, inputs, encoder)
    if writer.finished() is not None:
        return Features.open(folder)
    progress.begin(f"embed {folder.name}", expected)
    sizes: list[int] = []
    for number, chunk in enumerate(chunks(rows, SHARD_ROWS)):
        if not has_shard(writer.path, number):
            encoded = encode_shard(chunk, encoder, skip_bad_images=skip_bad_images)
            write_shard(writer.path, number, encoded.shard, encoded.left_out)
        sizes.append(len(chunk))
        progress.advance(min(expected - 1, number * SHARD_ROWS + len(chunk)), {})
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
    writer = _writer(folder, inputs, encoder)
    if writer.finished() is not None:
        return Features.open(folder)
    sizes: list[int] = []
    for number, shard in enumerate(source.shards()):
        sizes.append(len(shard.ids))
        if not has_shard(writer.path, number):
            write_shard(writer.path, number, change(shard), [])
    _finish(writer, encoder.spec, sizes)
    return Features.open(folder)


def _writer(folder: Path, inputs: Mapping[str, str], encoder: Encoder) -> ArtifactWriter:
    return ArtifactWriter(
        folder,
        kind=KIND,
        config={"shard_rows": SHARD_ROWS},
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
        name: max(np.load(path, mmap_mode="r").shape[1] for path in writer.path.glob(f"shard-*/{name}.npy"))
        for name in ("image", "text")
    }
    writer.finish(
        facts={
            "rows": rows,
            "image_dim": widths["image"],
            "text_dim": widths["text"],
        },
        notes={"encoder": spec},
    )
