"""What UniIR's encoders that are not a plain CLIP have in common: name, fingerprint, prepared pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from jaxtyping import Float
from PIL import Image
from torch import Tensor

from genius.encoders.checkpoint import check_files, contents_fingerprint

BATCH: Final = 64


class UniirFolder:
    """An imported encoder's folder, opened."""

    def __init__(self, folder: Path, *, device: str) -> None:
        check_files(folder, image_processor=True)
        self._folder = folder
        self._device = device

        from transformers import AutoImageProcessor  # noqa: PLC0415  takes seconds to import

        self._pixels: Any = AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)

    @property
    def spec(self) -> str:
        """``uniir:FOLDER``."""
        return f"uniir:{self._folder}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights."""
        return contents_fingerprint(self._folder)

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    def prepare(self, pictures: Sequence[Image.Image]) -> Float[Tensor, "items 3 side side"]:
        """Pictures as its image tower takes them."""
        pixels: Tensor = self._pixels(images=list(pictures), return_tensors="pt")["pixel_values"]
        return pixels.to(self._device)
