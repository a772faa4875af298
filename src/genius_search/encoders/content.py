"""Features of queries and items in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64
from PIL import Image

from genius_search.data.features import ABSENT, FeatureBatch
from genius_search.encoders.base import Encoder, ImageInput, ItemKey, JointInput, TextInput, is_joint
from genius_search.errors import BadData

SHORTEST_SIDE: Final = 256
"""Images are decoded at no less than this size in pixels, at which M-BEIR stores them (deviation 22)."""


class Content(NamedTuple):
    """Image, text or both of one query or candidate, for the encoder."""

    image: Image.Image | None
    text: str
    """Text for the encoder; empty if there is none."""
    key: ItemKey


def features_of(encoder: Encoder, contents: Sequence[Content]) -> FeatureBatch:
    """Compute features of queries or candidates in memory, all images and all texts in one batch each.

    Raises
    ------
    BadData
        One of them has neither an image nor a text.
    """
    for image, text, key in contents:
        if image is None and not text:
            raise BadData(f"{key.role} {key.id!r} has neither an image nor a text; it needs one of them")
    if is_joint(encoder):
        both = encoder.joint_features(
            [JointInput(image, text, key, image is not None) for image, text, key in contents]
        )
        absent = np.full(len(contents), ABSENT)
        return FeatureBatch.of(both[:0], both, absent, np.arange(len(contents)))
    pictures = [ImageInput(image, key) for image, _, key in contents if image is not None]
    words = [TextInput(text, key) for _, text, key in contents if text]
    image_features = encoder.image_features(pictures) if pictures else None
    text_features = encoder.text_features(words) if words else None
    nothing = (text_features if image_features is None else image_features)[:0]  # type: ignore[index]  # one is there
    return FeatureBatch.of(
        nothing if image_features is None else image_features,
        nothing if text_features is None else text_features,
        _rows_of([image is not None for image, _, _ in contents]),
        _rows_of([bool(text) for _, text, _ in contents]),
    )


def _rows_of(present: Sequence[bool]) -> Int64[np.ndarray, " items"]:
    """Number the present items from 0; absent ones get ``ABSENT``."""
    mask = np.array(present)
    return np.where(mask, np.cumsum(mask) - 1, ABSENT).astype(np.int64)
