"""Features of texts and pictures from memory, for :meth:`genius_search.Genius.embed`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from PIL import Image

from genius_search.border import as_text
from genius_search.data.features import FeatureBatch, to_float16
from genius_search.data.images import SHORTEST_SIDE, as_image
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.encoders.contents import encode_contents
from genius_search.errors import UsageError
from genius_search.records import Modality, format_text

Picture: TypeAlias = Path | bytes | Image.Image | np.ndarray
"""A file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3)."""
ModelInput: TypeAlias = str | Picture | tuple[str, Picture]
"""A text, a picture, or a pair of both."""
KEY: Final = ItemKey("candidate", "")
"""Key of an input without an id; only encoders that look features up read keys."""


class ReadInput(NamedTuple):
    """An input whose picture is open; at least one part is present."""

    text: str
    """The text as the encoder reads it; empty if absent."""
    image: Image.Image | None


def read_input(model_input: ModelInput) -> ReadInput:
    """Open the picture of an input, and format its text.

    Raises
    ------
    UsageError
        The text is empty, or the input is neither a text, a picture nor a pair.
    BadImage
        The picture cannot be read.
    """
    if isinstance(model_input, str):
        text, picture = model_input, None
    elif isinstance(model_input, tuple):
        if len(model_input) != 2 or not isinstance(model_input[0], str):
            raise UsageError("a pair is a text and a picture: (\"a dog\", Path('dog.jpg'))")
        text, picture = model_input
    else:
        text, picture = "", model_input
    text = format_text(as_text(text, "a text"))
    if picture is None:
        if not text:
            raise UsageError("an input is an empty text; give texts, pictures, or pairs of both")
        return ReadInput(text, None)
    return ReadInput(text, as_image(picture, shortest_side=SHORTEST_SIDE))


def encode_inputs(encoder: Encoder, inputs: Sequence[ReadInput]) -> FeatureBatch:
    """Return the features of inputs, rounded to 16 bits as those of an index's items are."""
    contents = [(item.image, item.text) for item in inputs]
    image, text = to_float16(encode_contents(encoder, contents, KEY)).astype(np.float32)
    is_joint = hasattr(encoder, "joint_features")  # one vector for both, as the text's feature
    has_image = [item.image is not None and not is_joint for item in inputs]
    has_text = [bool(item.text) or is_joint for item in inputs]
    return FeatureBatch(image, text, np.array(has_image), np.array(has_text))


def modality_codes(inputs: Sequence[ReadInput]) -> np.ndarray:
    """Return the number of the modality of each input, of shape (inputs,)."""
    modalities = [
        Modality.of(has_image=item.image is not None, has_text=bool(item.text)) for item in inputs
    ]
    return np.array([modality.code for modality in modalities], dtype=np.int8)
