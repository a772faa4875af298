"""`uniir:FOLDER`: UniIR's CLIP-SF, which GENIUS was trained on, as research/published writes it.

Texts arrive formatted and with their instruction (:mod:`genius_search.records`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import unescape
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from genius_search.artifact import open_artifact
from genius_search.encoders.base import cut_texts, read_tokenizer
from genius_search.encoders.pretrained import PretrainedEncoder, open_model
from genius_search.errors import need_packages
from genius_search.nn.weights import in_batches

ARTIFACT: Final = "uniir"
"""The folder's kind in its manifest."""
CLIP_END: Final = 49407
"""The token behind a text, whose vector CLIP-SF takes."""

_BATCH: Final = 64


def clip_reader(folder: Path, context: int) -> Callable[[Sequence[str]], Int64[Tensor, "texts context"]]:
    """Number texts as OpenAI's code does: start, tokens, end, then zeros up to ``context`` tokens.

    The name of a start or end token within a text is read as that token.
    """
    import ftfy  # noqa: PLC0415  optional

    tokenizer = read_tokenizer(folder / "tokenizer.json")
    tokenizer.normalizer = None  # it does a part of what ``clean`` does
    tokenizer.enable_truncation(context)
    tokenizer.enable_padding(length=context)

    def clean(text: str) -> str:
        return " ".join(unescape(unescape(ftfy.fix_text(text))).split()).lower()

    def read(texts: Sequence[str]) -> Tensor:
        encoded = tokenizer.encode_batch([clean(text) for text in cut_texts(texts, max_tokens=context)])
        return torch.tensor([encoding.ids for encoding in encoded])

    return read


def middle_square(image: Image.Image, *, side: int) -> Image.Image:
    """Resize the shorter side to ``side``, bicubic, and crop the middle.

    Where an odd number of pixels is cut, half of it is rounded to an even number, as torchvision does and so
    UniIR; transformers rounds down, which shifts a quarter of all images by one pixel.
    """
    width, height = image.size
    shorter = min(width, height)
    size = (side * width // shorter, side * height // shorter)
    resized = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    return resized.crop((left, top, left + side, top + side))


class ClipScoreFusion(PretrainedEncoder):
    """CLIP-SF: image and text features, to be summed; unnormalised, in single precision.

    Raises
    ------
    MissingExtra
        sentence-transformers or ftfy is not installed.
    ArtifactMissing
        The folder does not exist or was never finished.
    ArtifactMismatch
        The folder is of another kind, or damaged.
    """

    def __init__(self, folder: Path, *, device: str = "cpu") -> None:
        need_packages("pretrained encoders need", "sentence_transformers", "ftfy")
        manifest = open_artifact(folder, kind=ARTIFACT)
        model = open_model(manifest.folder, device=device)
        self._clip = model[0].model
        self._read = clip_reader(manifest.folder, self._clip.config.text_config.max_position_embeddings)
        super().__init__(f"uniir:{manifest.folder}", manifest.folder, model)
        self.fingerprint = manifest.fingerprint

    @torch.inference_mode()
    def _encode(self, inputs: list[dict[str, Any]], role: str) -> Float[Tensor, "items dim"]:
        """Encode the middle squares of images, or texts by their first end token."""
        if inputs and "image" in inputs[0]:
            side: int = self._clip.config.vision_config.image_size
            squares = [{"image": middle_square(content["image"], side=side)} for content in inputs]
            return super()._encode(squares, role)

        def encode(texts: Sequence[str]) -> Tensor:
            rows = self._read(texts)
            # Nothing after the first end token counts: no token looks ahead.
            last = int((rows == CLIP_END).int().argmax(dim=1).max())
            inside = rows[:, : last + 1].to(self._clip.device)
            features: Tensor = self._clip.get_text_features(input_ids=inside).pooler_output
            return features

        return in_batches(encode, [content["text"] for content in inputs], size=_BATCH, dim=self.dim)
