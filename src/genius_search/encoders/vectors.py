"""The encoder of an index of a user's own vectors: it encodes nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NoReturn

from genius_search.encoders.base import ImageInput, TextInput
from genius_search.errors import UsageError


class VectorEncoder:
    """Stands for the encoder that a user's vectors come from, and that only the user has.

    Parameters
    ----------
    width
        numbers of a vector, as a text: what follows the colon of ``vectors:512``.
    """

    needs_pixels = False

    def __init__(self, width: str) -> None:
        if not width.isdecimal() or not int(width):
            raise UsageError(
                f"encoder 'vectors:{width}' is not known; give the numbers of a vector: vectors:512"
            )
        self.dim = int(width)
        self.spec = f"vectors:{self.dim}"
        self.fingerprint = hashlib.sha256(self.spec.encode()).hexdigest()

    def image_features(self, images: Sequence[ImageInput]) -> NoReturn:
        """Refuse to encode."""
        self._refuse(f"{len(images)} pictures")

    def text_features(self, texts: Sequence[TextInput]) -> NoReturn:
        """Refuse to encode."""
        self._refuse(f"the text {texts[0].text[:40]!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            "this index was made of vectors, and does not know the encoder that they come from, so it cannot "
            f"read {what}; search with vector= and add items with vectors=, each of {self.dim} numbers"
        )
