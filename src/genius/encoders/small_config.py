"""Settings of the `small` encoder. Kept apart from the network so that reading settings needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from genius.errors import UsageError

__all__ = ["SmallEncoderConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallEncoderConfig:
    """How large the encoder that is trained from scratch is (paper, Eq. 2, with a light network)."""

    dim: int = 128
    """Width of the features."""

    vocabulary: int = 8192
    """Most words and word pieces learnt from the training texts; at least 257."""

    max_tokens: int = 64
    """Longer texts are cut here."""

    pair_buckets: int = 8192
    """Rows of the table that tells apart pairs of neighbouring words, and so their order."""

    text_width: int = 256
    """Width of a word's vector and of the layers that read texts."""

    image_width: int = 512
    """Width of the layers that read pictures."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise UsageError(f"{field.name} is {getattr(self, field.name)}; it must be at least 1")
        if self.vocabulary < 257:
            raise UsageError(
                f"vocabulary is {self.vocabulary}; it must be at least 257: all bytes and padding"
            )
