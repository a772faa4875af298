"""Features of queries and candidates in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float32

from genius_search.encoders.base import Encoder, ImageInput, ItemKey, JointInput, TextInput, is_joint
from genius_search.errors import BadData
from genius_search.nn.codebooks import as_floats

if TYPE_CHECKING:
    from PIL import Image


class Content(NamedTuple):
    """Image, text or both of one query or candidate, for the encoder."""

    image: Image.Image | None
    text: str
    """Text for the encoder; empty if there is none."""
    key: ItemKey


class ContentFeatures(NamedTuple):
    """Features of contents; zero for absent modalities. A joint encoder's are those of the text."""

    image: Float32[np.ndarray, "items dim"]
    text: Float32[np.ndarray, "items dim"]

    def total(self) -> Float32[np.ndarray, "items dim"]:
        """Return the unnormalised sum of image and text features (score fusion, UniIR's CLIP-SF)."""
        return np.asarray(self.image + self.text)


def features_of(encoder: Encoder, contents: Sequence[Content]) -> ContentFeatures:
    """Compute features of queries or candidates in memory, all images and all texts in one batch each.

    An image or a text that several of them have is encoded once.

    Raises
    ------
    BadData
        One of them has neither an image nor a text.
    """
    for image, text, key in contents:
        if image is None and not text:
            raise BadData(f"{key.role} {key.id!r} has neither an image nor a text; it needs one of them")
    features = ContentFeatures(*np.zeros((2, len(contents), encoder.dim), dtype=np.float32))
    if is_joint(encoder):
        both = [JointInput(image, text, key, image is not None) for image, text, key in contents]
        features.text[:] = as_floats(encoder.joint_features(both))
        return features
    pictures = {(id(image), key): ImageInput(image, key) for image, _, key in contents if image is not None}
    words = {(text, key): TextInput(text, key) for _, text, key in contents if text}
    if pictures:
        vectors = dict(zip(pictures, as_floats(encoder.image_features([*pictures.values()])), strict=True))
        for own, (image, _, key) in zip(features.image, contents, strict=True):
            own[:] = vectors.get((id(image), key), 0)
    if words:
        found = dict(zip(words, as_floats(encoder.text_features([*words.values()])), strict=True))
        for own, (_, text, key) in zip(features.text, contents, strict=True):
            own[:] = found.get((text, key), 0)
    return features
