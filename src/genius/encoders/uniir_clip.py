"""UniIR's CLIP-SF and CLIP-FF: OpenAI's CLIP with QuickGELU and its tokens (specification, 2.4 to 2.7)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from genius.artifact import Manifest
from genius.encoders.checkpoint import read_json
from genius.encoders.clip import ClipEncoder
from genius.encoders.picture import pixels_of
from genius.encoders.protocol import ImageInput, TextInput
from genius.encoders.uniir_joint import FeatureFusion
from genius.encoders.uniir_pixels import middle_square
from genius.encoders.uniir_tokens import END, token_rows

__all__ = ["ClipScoreFusion", "clip_feature_fusion"]

_BATCH: Final = 64


class ClipScoreFusion(ClipEncoder):
    """Image and text features of CLIP-SF, to be summed; unnormalised, in full precision."""

    def __init__(self, manifest: Manifest, *, device: str) -> None:
        super().__init__(str(manifest.folder), device=device)
        self._manifest = manifest

    @property
    def spec(self) -> str:
        """``uniir:FOLDER``."""
        return f"uniir:{self._name}"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its settings, tokenizer and weights, as they were when it was imported."""
        return self._manifest.fingerprint

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of the middle square of pictures."""
        side: int = self._model.config.vision_config.image_size
        pictures = zip(images, pixels_of(images), strict=True)
        squares = [ImageInput(middle_square(picture, side=side), image.key) for image, picture in pictures]
        return super().image_features(squares)

    @torch.inference_mode()
    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of texts, taken at their first end token; longer ones than 77 tokens are cut."""
        longest: int = self._model.config.text_config.max_position_embeddings
        rows = token_rows([text.text for text in texts], context=longest)
        features = [torch.zeros(0, self.dim)]
        for part in torch.split(rows, _BATCH) if texts else ():
            found = self._model.get_text_features(input_ids=_until_end(part).to(self._device))
            features.append(found.pooler_output.cpu())
        return torch.cat(features)


def clip_feature_fusion(manifest: Manifest, *, device: str) -> FeatureFusion:
    """CLIP-FF: the tokens of both towers, mixed and averaged."""
    from genius.encoders.uniir_networks import ClipFusion, filled  # noqa: PLC0415  takes seconds to import

    network = filled(ClipFusion(read_json(manifest.folder / "config.json")), manifest.folder)

    def read(texts: Sequence[str]) -> dict[str, Tensor]:
        return {"input_ids": token_rows(texts, context=network.context)}

    return FeatureFusion(manifest, network, read, device=device)


def _until_end(rows: Int[Tensor, "items tokens"]) -> Int[Tensor, "items _"]:
    """Drop what follows every row's first end: no token looks ahead, so it changes nothing."""
    ends = (rows == END).int().argmax(dim=1)
    return rows[:, : int(ends.max()) + 1]
