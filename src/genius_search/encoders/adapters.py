"""`adapters:FOLDER`: small trained networks over an image encoder and a text encoder, both frozen.

The encoders may have any architectures and widths. training/adapters.py trains the networks. This
module runs them in NumPy, so a search needs PyTorch only if one of the encoders does.
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
from genius_search.encoders.base import Encoder, Keys, reads_images
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.nn.codebooks import as_array, normalize

ADAPTERS: Final = "adapters"
CONFIG_FILE: Final = "config.json"
"""The file with the specs of the two encoders: ``{"image": SPEC, "text": SPEC}``."""
WEIGHTS_FILE: Final = "model.safetensors"
PARTS: Final = ("image", "text")
_ITEMS_AT_ONCE: Final = 1024
"""Items that pass through the network together."""


class FrozenPair:
    """One encoder for images and another one for texts; the two features may differ in width.

    Raises
    ------
    UsageError
        The image encoder reads no images.
    """

    dim = 0  # there is no common width

    def __init__(self, image: Encoder, text: Encoder, *, spec: str) -> None:
        if not reads_images(image):
            raise UsageError(
                f"{image.spec} reads only texts; the first encoder of adapters: must read images"
            )
        self.encoders = {"image": image, "text": text}
        self.spec = spec
        self.needs_pixels = image.needs_pixels

    @cached_property
    def fingerprint(self) -> str:
        """A hash of both encoders."""
        return fingerprint_of(
            {part: encoder.fingerprint for part, encoder in self.encoders.items()}
        )

    def image_features(
        self, images: Sequence[Any], keys: Keys = ()
    ) -> Float32[np.ndarray, "items image_dim"]:
        """Return the features of images by the image encoder."""
        return as_array(self.encoders["image"].image_features(images, keys))

    def text_features(
        self, texts: Sequence[str], keys: Keys = ()
    ) -> Float32[np.ndarray, "items text_dim"]:
        """Return the features of texts by the text encoder."""
        return as_array(self.encoders["text"].text_features(texts, keys))


class Adapter(NamedTuple):
    """A linear map plus a network with one hidden layer, in one or several copies (members).

    For standardised features x, and member m of M::

        y_m    = linear_m x + output_m gelu(hidden_m x + hidden_bias_m)
        result = (y_1 / |y_1|, ..., y_M / |y_M|) / sqrt(M)
    """

    is_rooted: Bool[np.ndarray, ""]
    """Whether the network reads square roots of the features, which are never negative (ReLU)."""
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
        members, dim, _ = self.output.shape
        batches = [np.zeros((0, members * dim), dtype=np.float32)]
        for start in range(0, len(features), _ITEMS_AT_ONCE):
            batch = features[start : start + _ITEMS_AT_ONCE]
            roots = np.sqrt(batch.clip(min=0)) if self.is_rooted else batch
            inputs = (roots - self.mean) * self.scale
            # Arrays of shape (members, items, width) from here on.
            hidden = gelu(inputs @ self.hidden.transpose(0, 2, 1) + self.hidden_bias[:, None])
            nonlinear = hidden @ self.output.transpose(0, 2, 1)
            linear = inputs @ self.linear.transpose(0, 2, 1)
            unit_vectors = normalize(nonlinear + linear)
            batches.append(np.concatenate(list(unit_vectors), axis=1) / math.sqrt(members))
        return np.concatenate(batches)


def gelu(values: np.ndarray) -> np.ndarray:
    """Compute the tanh approximation of GELU (Hendrycks and Gimpel, 2016)."""
    inner = math.sqrt(2 / math.pi) * (values + 0.044715 * values**3)
    result: np.ndarray = values * (1 + np.tanh(inner)) / 2
    return result


def read_specs(folder: Path) -> tuple[str, str]:
    """Return the specs of the image encoder and the text encoder of trained adapters.

    Raises
    ------
    ArtifactMissing
        The folder lacks a file.
    ArtifactMismatch
        A spec is missing.
    """
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        raise ArtifactMissing(
            f"{folder} holds no trained adapters: it lacks {', '.join(missing)}. "
            "`genius fit DATA --encoder adapters:IMAGE,TEXT --out MODEL` trains them in "
            "MODEL/encoder"
        )
    specs = read_json(folder / CONFIG_FILE)
    image, text = (specs.get(part) for part in PARTS)
    if not isinstance(image, str) or not isinstance(text, str):
        raise ArtifactMismatch(f"{folder / CONFIG_FILE} does not name an image and a text encoder")
    return image, text


class AdapterEncoder:
    """Two frozen encoders, and the networks that map their features into one space.

    Parameters
    ----------
    folder
        The trained networks.
    pair
        The encoders over which the networks were trained (:func:`read_specs`).

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        The networks are absent or damaged, or their widths are not those of the encoders.
    """

    def __init__(self, folder: Path, pair: FrozenPair) -> None:
        read_specs(folder)  # for its errors
        self.pair = pair
        self.spec = f"{ADAPTERS}:{folder}"
        self.needs_pixels = pair.needs_pixels
        for name in ("max_tokens", "num_tokens"):  # present if the text encoder may truncate texts
            if hasattr(pair.encoders["text"], name):
                setattr(self, name, getattr(pair.encoders["text"], name))
        self._weights = folder / WEIGHTS_FILE
        arrays = read_arrays(self._weights)
        try:
            self.image, self.text = (
                Adapter(*(arrays[f"{part}.{name}"] for name in Adapter._fields)) for part in PARTS
            )
            # One row of zeros through each network shows whether the shapes fit together.
            for part, encoder in pair.encoders.items():
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
