"""The encoder that is used where none is named."""

from __future__ import annotations

from typing import Final, NamedTuple

from genius_search.encoders.base import need_transformers
from genius_search.encoders.pretrained import find_checkpoint
from genius_search.errors import NetworkNeeded


class Suggestion(NamedTuple):
    """A pretrained encoder on the Hugging Face hub."""

    spec: str
    megabytes: int
    """Size of the download."""
    license: str

    @property
    def description(self) -> str:
        """Spec, size and licence in one line."""
        return f"{self.spec} ({self.megabytes:,} MB, licence {self.license})"

    def is_downloaded(self) -> bool:
        """Return whether the encoder is on this machine.

        Raises
        ------
        MissingExtra
            transformers, which runs it, is not installed.
        """
        need_transformers()
        try:
            find_checkpoint(self.spec.partition(":")[2], download=False)
        except NetworkNeeded:
            return False
        return True


IMAGES_AND_TEXTS: Final = Suggestion("siglip:google/siglip2-base-patch16-224", 1_540, "Apache-2.0")
TEXTS_ONLY: Final = Suggestion("text:sentence-transformers/all-MiniLM-L6-v2", 91, "Apache-2.0")


def suggest_encoder(*, has_images: bool) -> Suggestion:
    """Return the encoder for a pool of texts, or of anything else."""
    return IMAGES_AND_TEXTS if has_images else TEXTS_ONLY
