"""Settings of the `small` encoder. Kept apart from the network so that reading settings needs no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from genius.errors import UsageError
from genius.published.encoder_kind import EncoderKind

__all__ = ["SmallEncoderConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallEncoderConfig:
    """How large the encoder that is trained from scratch is (paper, Eq. 2, with a light network)."""

    kind: EncoderKind = "clip-sf"
    """Which of UniIR's four it is in small. -sf gives image and text features, to be summed; -ff one vector
    from layers over the tokens of both, which is a baseline. blip- is trained with a slow copy of itself."""

    count_padding: bool = False
    """Of -ff: let padding, a missing picture and a missing text count, as the authors' code does (of blip-ff
    padding counts in neither)."""

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
            value = getattr(self, field.name)
            if type(value) is int and value < 1:
                raise UsageError(f"{field.name} is {value}; it must be at least 1")
        if self.vocabulary < 257:
            raise UsageError(
                f"vocabulary is {self.vocabulary}; it must be at least 257: all bytes and padding"
            )

        if self.count_padding and not self.is_joint:
            raise UsageError(f"count_padding is for clip-ff and blip-ff; {self.kind} has nothing to count")

    @property
    def is_joint(self) -> bool:
        """Whether image and text become one vector (feature fusion)."""
        return self.kind in ("clip-ff", "blip-ff")

    @property
    def has_momentum(self) -> bool:
        """Whether it is trained as BLIP is."""
        return self.kind in ("blip-sf", "blip-ff")

    def to_json(self) -> dict[str, Any]:
        """As it is saved. What only other kinds know is left out, so that an encoder stays the one it was."""
        told = asdict(self)
        if self.kind == "clip-sf":
            del told["kind"]
        if not self.count_padding:
            del told["count_padding"]
        return told
