"""What UniIR's encoders that are not a plain CLIP have in common: name, fingerprint, prepared pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from genius.artifact import Manifest
from genius.encoders.uniir_pixels import middle_square

BATCH: Final = 64


class UniirFolder:
    """An imported encoder's folder, opened."""

    def __init__(self, manifest: Manifest, *, device: str) -> None:
        self._manifest = manifest
        self._device = device

        from transformers import AutoImageProcessor  # noqa: PLC0415  takes seconds to import

        self._pixels: Any = AutoImageProcessor.from_pretrained(
            manifest.folder, backend="pil", local_files_only=True
        )

    @property
    def spec(self) -> str:
        """``uniir:FOLDER``."""
        return f"uniir:{self._manifest.folder}"

    @property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights, as they were when it was imported."""
        return self._manifest.fingerprint

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    def prepare(self, pictures: Sequence[Image.Image]) -> Float[Tensor, "items 3 side side"]:
        """Pictures as its image tower takes them: the middle square for CLIP, squashed for BLIP."""
        if self._pixels.do_center_crop:
            side = self._pixels.crop_size["height"]
            pictures = [middle_square(picture, side=side) for picture in pictures]
        pixels: Tensor = self._pixels(images=list(pictures), return_tensors="pt")["pixel_values"]
        return pixels.to(self._device)
