"""The towers of a pretrained CLIP or SigLIP as graphs, by PyTorch's own exporter.

These networks belong to transformers, so they are traced and not written down; it takes a minute.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import onnx
import torch
from torch import Tensor, nn

from genius.encoders.clip import ClipEncoder
from genius.encoders.uniir_clip import ClipScoreFusion
from genius.errors import MissingExtra, UsageError
from genius.export.graph import MOST_BYTES, OPSET
from genius.export.places import IMAGE, TEXT

__all__ = ["copy_reader", "write_towers"]

_SETTINGS: Final = ("*.json", "*.txt", "*.model")
"""Of a folder in Hugging Face's layout: everything but weights."""
_TOKENS: Final = 9
"""Length of the text that is traced; any other does as well."""


def write_towers(encoder: ClipEncoder, folder: Path) -> None:
    """Write the image and the text tower of a CLIP or SigLIP.

    Raises
    ------
    MissingExtra
        onnxscript is not installed.
    UsageError
        a tower is too large for one file.
    """
    if importlib.util.find_spec("onnxscript") is None:
        raise MissingExtra(
            f"exporting {encoder.spec} needs onnxscript, which is not installed: "
            "pip install genius-retrieval[onnx]"
        )
    model = encoder._model  # noqa: SLF001
    config = model.config
    side = config.vision_config.image_size
    _trace(_Images(model), (torch.zeros(2, 3, side, side),), ({0: "items"},), folder / IMAGE)
    is_padded = config.model_type == "siglip"
    length = config.text_config.max_position_embeddings if is_padded else _TOKENS
    tokens = torch.full((2, length), config.text_config.eos_token_id)
    reads_mask = not is_padded and not isinstance(encoder, ClipScoreFusion)
    given = (tokens, torch.ones_like(tokens)) if reads_mask else (tokens,)
    varies = {0: "items"} if is_padded else {0: "items", 1: "tokens"}
    _trace(_Texts(model), given, (varies,) * len(given), folder / TEXT)


def copy_reader(encoder: ClipEncoder, folder: Path) -> None:
    """Copy what makes numbers of texts and pictures into an empty folder."""
    folder.mkdir(exist_ok=True)
    for pattern in _SETTINGS:
        for path in encoder._folder.glob(pattern):  # noqa: SLF001
            if not path.name.endswith(".index.json"):
                shutil.copy(path, folder / path.name)


class _Images(nn.Module):
    """Pixels to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Features of pictures."""
        features: Tensor = self.model.get_image_features(pixel_values=pixel_values).pooler_output
        return features


class _Texts(nn.Module):
    """Token numbers to features."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Features of texts."""
        given = {} if attention_mask is None else {"attention_mask": attention_mask}
        features: Tensor = self.model.get_text_features(input_ids=input_ids, **given).pooler_output
        return features


def _trace(
    tower: nn.Module, given: tuple[Tensor, ...], varies: tuple[dict[int, str], ...], path: Path
) -> None:
    size = sum(weight.nbytes for weight in tower.parameters())
    if size > MOST_BYTES:
        raise UsageError(f"{path.stem} tower: {size / 1e9:.1f} GB of weights, and an ONNX file holds 2.1 GB")
    names = ["pixel_values"] if path.name == IMAGE else ["input_ids", "attention_mask"][: len(given)]
    shapes = tuple(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) for axes in varies)
    with _quiet():
        torch.onnx.export(
            tower.eval(),
            given,
            path,
            input_names=names,
            output_names=["features"],
            dynamic_shapes=shapes,
            dynamo=True,
            opset_version=OPSET,
            external_data=False,
            verbose=False,
        )
    onnx.checker.check_model(path, full_check=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's talk: deprecations inside PyTorch, and libraries it would also know."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
