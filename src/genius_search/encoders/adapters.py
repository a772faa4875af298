"""`adapters:FOLDER`: two small trained networks over two frozen encoders, one of images and one of texts.

The encoders may be of any kinds and widths; training/adapters.py trains the networks. Here they are run in
NumPy, so that a search needs PyTorch only if one of the encoders does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32

from genius_search.artifact import (
    file_fingerprint,
    fingerprint_of,
    mismatch_error,
    read_arrays,
    read_json,
)
from genius_search.encoders.base import Keys, load_encoder, reads_images
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.nn.codebooks import as_array, normalize

KIND: Final = "adapters"
CONFIG_FILE: Final = "config.json"
"""Names the two encoders: ``{"image": SPEC, "text": SPEC}``."""
WEIGHTS_FILE: Final = "model.safetensors"
PARTS: Final = ("image", "text")
_BATCH: Final = 1024


class FrozenPair:
    """Images by one encoder and texts by another, as features of two widths.

    Raises
    ------
    UsageError
        An encoder is itself one of adapters, or the first reads no images.
    """

    dim = 0  # the two widths may differ

    def __init__(
        self, image: str, text: str, *, download: bool = False, device: str = "cpu"
    ) -> None:
        for spec in (image, text):
            if spec.startswith(f"{KIND}:"):
                raise UsageError(
                    f"{spec} cannot be inside adapters; give an encoder such as clip: or text:"
                )
        self.encoders = {
            part: load_encoder(spec, download=download, device=device)
            for part, spec in zip(PARTS, (image, text), strict=True)
        }
        if not reads_images(self.encoders["image"]):
            raise UsageError(
                f"{image} reads texts only; the first encoder of adapters: must read images"
            )
        self.spec = f"{KIND}:{image},{text}"
        self.needs_pixels = self.encoders["image"].needs_pixels

    @cached_property
    def fingerprint(self) -> str:
        """A hash of both encoders."""
        return fingerprint_of(
            {part: encoder.fingerprint for part, encoder in self.encoders.items()}
        )

    def image_features(
        self, images: Sequence[Any], keys: Keys = ()
    ) -> Float32[np.ndarray, "items image_dim"]:
        """Return the features of images, of the first encoder's width."""
        return as_array(self.encoders["image"].image_features(images, keys))

    def text_features(
        self, texts: Sequence[str], keys: Keys = ()
    ) -> Float32[np.ndarray, "items text_dim"]:
        """Return the features of texts, of the second encoder's width."""
        return as_array(self.encoders["text"].text_features(texts, keys))


class Adapter(NamedTuple):
    """The sum of a linear map and a network of one hidden layer, or several such whose outputs are joined."""

    is_rooted: Bool[np.ndarray, ""]
    """Whether roots of features are read: of those that are never negative, as behind a ReLU."""
    mean: Float32[np.ndarray, " width"]
    scale: Float32[np.ndarray, " width"]
    linear: Float32[np.ndarray, "members dim width"]
    hidden: Float32[np.ndarray, "members hidden width"]
    hidden_bias: Float32[np.ndarray, "members hidden"]
    output: Float32[np.ndarray, "members dim hidden"]

    def __call__(
        self, features: Float32[np.ndarray, "items width"]
    ) -> Float32[np.ndarray, "items dim"]:
        """Return unit vectors."""
        parts = [np.zeros((0, self.output.shape[0] * self.output.shape[1]), dtype=np.float32)]
        for start in range(0, len(features), _BATCH):
            batch = features[start : start + _BATCH]
            inputs = (
                (np.sqrt(batch.clip(min=0)) if self.is_rooted else batch) - self.mean
            ) * self.scale
            hidden = gelu(inputs @ self.hidden.transpose(0, 2, 1) + self.hidden_bias[:, None])
            outputs = hidden @ self.output.transpose(0, 2, 1) + inputs @ self.linear.transpose(
                0, 2, 1
            )
            parts.append(
                np.concatenate(list(normalize(outputs)), axis=1) / math.sqrt(len(self.output))
            )
        return np.concatenate(parts)


def gelu(values: np.ndarray) -> np.ndarray:
    """Compute GELU's approximation by the hyperbolic tangent (Hendrycks and Gimpel, 2016)."""
    result: np.ndarray = (
        values * (1 + np.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values**3))) / 2
    )
    return result


class AdapterEncoder:
    """Two frozen encoders and the networks that bring their features together, as one encoder.

    Parameters
    ----------
    folder
        the networks, with the specs of the two encoders.
    pair
        the encoders, if they are open.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        The folder lacks files, or they do not fit together or to the encoders.
    """

    def __init__(
        self,
        folder: Path,
        pair: FrozenPair | None = None,
        *,
        download: bool = False,
        device: str = "cpu",
    ) -> None:
        missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
        if missing:
            raise ArtifactMissing(
                f"{folder} holds no trained adapters: it lacks {', '.join(missing)}. "
                "`genius fit DATA --encoder adapters:IMAGE,TEXT --out MODEL` trains them in MODEL/encoder"
            )
        specs = read_json(folder / CONFIG_FILE)
        if not all(isinstance(specs.get(part), str) for part in PARTS):
            raise ArtifactMismatch(
                f"{folder / CONFIG_FILE} does not name an image and a text encoder"
            )
        self.pair = pair or FrozenPair(
            specs["image"], specs["text"], download=download, device=device
        )
        self.spec = f"{KIND}:{folder}"
        self.needs_pixels = self.pair.needs_pixels
        for name in ("max_tokens", "num_tokens"):  # which tell whether a text is cut
            if hasattr(self.pair.encoders["text"], name):
                setattr(self, name, getattr(self.pair.encoders["text"], name))
        self._weights = folder / WEIGHTS_FILE
        arrays = read_arrays(self._weights)
        try:
            self.image, self.text = (
                Adapter(*(arrays[f"{part}.{name}"] for name in Adapter._fields)) for part in PARTS
            )
            for part, encoder in self.pair.encoders.items():
                getattr(self, part)(np.zeros((1, encoder.dim), dtype=np.float32))
        except (KeyError, ValueError) as error:
            raise mismatch_error(self._weights, error) from None
        self.dim = len(self.image.output) * self.image.output.shape[1]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the networks and of both encoders."""
        return fingerprint_of([file_fingerprint(self._weights), self.pair.fingerprint])

    def image_features(
        self, images: Sequence[Any], keys: Keys = ()
    ) -> Float32[np.ndarray, "items dim"]:
        """Return the features of images."""
        return self.image(self.pair.image_features(images, keys))

    def text_features(
        self, texts: Sequence[str], keys: Keys = ()
    ) -> Float32[np.ndarray, "items dim"]:
        """Return the features of texts."""
        return self.text(self.pair.text_features(texts, keys))
