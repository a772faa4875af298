"""`clip:NAME-or-folder`: a pretrained CLIP or SigLIP, run by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from genius.encoders.checkpoint import (
    check_files,
    contents_fingerprint,
    find_checkpoint,
    need_transformers,
    quietly,
    read_json,
)
from genius.encoders.picture import pixels_of
from genius.encoders.protocol import ImageInput, TextInput
from genius.errors import ArtifactMismatch

__all__ = ["ClipEncoder"]

_KINDS: Final = ("clip", "siglip")
_BATCH: Final = 64


class ClipEncoder:
    """Image and text features of CLIP or SigLIP: the projected ones, not normalised.

    Raises
    ------
    MissingExtra
        transformers is not installed.
    NetworkNeeded
        the model is not on this machine, and ``download`` is off or did not work.
    ArtifactMissing
        the folder lacks files.
    ArtifactMismatch
        the folder holds another kind of model.
    """

    def __init__(self, name: str, *, download: bool = False, device: str = "cpu") -> None:
        need_transformers()
        self._name = name
        self._device = device
        self._folder = find_checkpoint(name, download=download)
        check_files(self._folder, image_processor=True)
        self._kind = _kind_of(self._folder)

        from transformers import AutoImageProcessor, AutoModel  # noqa: PLC0415  takes seconds to import

        with quietly():
            self._model = AutoModel.from_pretrained(self._folder, dtype=torch.float32, local_files_only=True)
        self._model.to(device).eval()
        self._pixels = AutoImageProcessor.from_pretrained(self._folder, backend="pil", local_files_only=True)
        self._tokenizer = load_tokenizer(self._folder)

    @property
    def spec(self) -> str:
        """``clip:`` and what a person gave."""
        return f"clip:{self._name}"

    @property
    def dim(self) -> int:
        """Width of its features."""
        config = self._model.config
        width: int = config.projection_dim if self._kind == "clip" else config.text_config.projection_size
        return width

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights."""
        return contents_fingerprint(self._folder)

    @property
    def needs_pixels(self) -> bool:
        """It looks at pictures."""
        return True

    @torch.inference_mode()
    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of pictures."""
        pictures = pixels_of(images)
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(pictures), _BATCH):
            pixels = self._pixels(images=pictures[start : start + _BATCH], return_tensors="pt")
            found = self._model.get_image_features(pixel_values=pixels["pixel_values"].to(self._device))
            features.append(found.pooler_output.cpu())
        return torch.cat(features)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts, cut at the model's longest."""
        features = [torch.zeros(0, self.dim)]
        for start in range(0, len(texts), _BATCH):
            tokens = self._tokenizer(
                [text.text for text in texts[start : start + _BATCH]],
                # SigLIP was trained on texts padded to its full length, and reads the padding.
                padding="max_length" if self._kind == "siglip" else "longest",
                truncation=True,
                max_length=self._model.config.text_config.max_position_embeddings,
                return_tensors="pt",
            )
            inputs = {"input_ids": tokens["input_ids"].to(self._device)}
            if self._kind == "clip":
                inputs["attention_mask"] = tokens["attention_mask"].to(self._device)
            features.append(self._model.get_text_features(**inputs).pooler_output.cpu())
        return torch.cat(features)


def load_tokenizer(folder: Path) -> Any:
    """Open a folder's tokenizer, by ``tokenizer.json`` where it is there: that needs no other library."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415  takes seconds to import

    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    return kind.from_pretrained(folder, local_files_only=True)


def _kind_of(folder: Path) -> str:
    kind = str(read_json(folder / "config.json").get("model_type"))
    if kind not in _KINDS:
        raise ArtifactMismatch(f"{folder} holds a {kind!r} model; clip: reads {' and '.join(_KINDS)}")
    return kind
