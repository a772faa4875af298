"""Features of texts and pictures in memory: those of queries, and of inputs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from jaxtyping import Float, Float32

from genius_search.border import as_numbers
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.errors import BadData, UsageError

if TYPE_CHECKING:
    from PIL import Image

    Content: TypeAlias = tuple[Image.Image | None, str]
    """An image, a text, or both, as an encoder reads them."""


def encode_contents(
    encoder: Encoder, contents: Sequence[Content], key: ItemKey
) -> Float32[np.ndarray, "2 contents dim"]:
    """Return the features of images and of texts, zero where there is none.

    An image that occurs repeatedly is encoded once. An encoder with one vector for image and text
    gives it as the feature of the text. All contents get the same ``key``, which only encoders that
    look features up read.

    Raises
    ------
    UsageError
        A content has neither an image nor a text.
    BadData
        A feature is not finite.
    """
    features = np.zeros((2, len(contents), encoder.dim), dtype=np.float32)
    rows_of_images: dict[int, list[int]] = {}
    text_rows = []
    for row, (image, text) in enumerate(contents):
        if image is None and not text:
            raise UsageError("a query has neither an image nor a text; it needs one of them")
        if image is not None:
            rows_of_images.setdefault(id(image), []).append(row)
        if text:
            text_rows.append(row)
    if hasattr(encoder, "joint_features"):
        images, image_texts = zip(*contents, strict=True)
        joint = encoder.joint_features(images, image_texts, [key] * len(contents))
        features[1] = _check_features(joint)
        return features
    if rows_of_images:
        image_rows = [rows[0] for rows in rows_of_images.values()]
        distinct = [image for row in image_rows if (image := contents[row][0]) is not None]
        encoded = encoder.image_features(distinct, [key] * len(distinct))
        for rows, vector in zip(rows_of_images.values(), _check_features(encoded), strict=True):
            features[0, rows] = vector
    if text_rows:
        texts = [contents[row][1] for row in text_rows]
        encoded = encoder.text_features(texts, [key] * len(texts))
        features[1, text_rows] = _check_features(encoded)
    return features


def _check_features(features: object) -> Float[np.ndarray, "contents dim"]:
    """Return features as an array; raise an error if a number is not finite."""
    array = as_numbers(features, "the features of the encoder")
    if not np.isfinite(array).all():
        raise BadData("the encoder's features are not finite; try another text or picture")
    return array
