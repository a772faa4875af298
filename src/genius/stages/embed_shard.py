"""Encode the rows of one shard: each picture and each text once, or each pair of them for a joint encoder."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeGuard, TypeVar

import numpy as np
from jaxtyping import Shaped
from PIL import Image
from torch import Tensor

from genius.data.features import ABSENT, LeftOut, Shard
from genius.data.images import open_image
from genius.data.records import Modality
from genius.encoders.protocol import Encoder, ImageInput, ItemKey, JointEncoder, JointInput, TextInput
from genius.errors import BadImage

Item = TypeVar("Item")

ENCODE_BATCH: Final = 256
LOOK_UP_BATCH: Final = 2048
"""What is looked up needs no forward pass, only memory."""
SHORTEST_SIDE: Final = 256
"""Pictures are decoded no smaller than this; M-BEIR's are stored at it (deviation 22)."""
_CODES: Final = {modality: modality.code for modality in Modality} | {None: ABSENT}


class FeatureRow(NamedTuple):
    """One row to be embedded."""

    id: int
    key: ItemKey
    modality: Modality
    image: Path | None = None
    text: str | None = None
    """As the encoder shall read it, instruction included."""
    variant: int = ABSENT
    wanted: Modality | None = None


class EncodedShard(NamedTuple):
    """A shard to write, and the rows that are not in it."""

    shard: Shard
    left_out: list[LeftOut]


class _Encoded(NamedTuple):
    """Packed features of one modality (or of both together), and which keys have which."""

    packed: Shaped[np.ndarray, "items dim"]
    places: Mapping[Hashable, int]


def is_joint(encoder: Encoder) -> TypeGuard[JointEncoder]:
    """Whether it gives one vector for image and text together.

    Unlike ``isinstance``, this does not compute the encoder's fingerprint in passing.
    """
    return hasattr(encoder, "joint_features")


def encode_shard(rows: Sequence[FeatureRow], encoder: Encoder, *, skip_bad_images: bool) -> EncodedShard:
    """Encode rows, without those whose picture cannot be read.

    Raises
    ------
    BadImage
        the first picture that cannot be read, unless ``skip_bad_images``.
    """
    # Where the encoder looks features up, the item decides; where it computes them, the content does.
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
    lost = [bad.found.get(row.image) if bad.found else None for row in rows]
    kept = [place for place, reason in enumerate(lost) if reason is None]
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
        LeftOut(row.id, str(reason.file), reason.reason)
        for row, reason in zip(rows, lost, strict=True)
        if reason is not None
    ]
    return EncodedShard(shard, left_out)


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """So many at a time."""
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk


class _Bad:
    """Pictures that cannot be read: collected, or the first one raised."""

    def __init__(self, *, skip: bool) -> None:
        self._skip = skip
        self.found: dict[Path | None, BadImage] = {}

    def add(self, row: FeatureRow, error: BadImage) -> None:
        if not self._skip:
            raise BadImage(
                error.file,
                f"{error.reason}; {row.key.role} {row.key.id} needs it. Restore it, or look for all "
                "such with `genius data check`",
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
    """Encode what has pictures, which are decoded two at a time if the encoder looks at them."""
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
