"""What the importers of UniIR's four encoders share: the result, and reading sizes off shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from genius.errors import ArtifactMismatch
from genius.published.encoder_kind import EncoderKind

HEAD: Final = 64
"""Numbers per attention head, in all of them."""
MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
BICUBIC: Final = 3


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """An encoder taken from a checkpoint: weights in single precision, under transformers' names."""

    kind: EncoderKind
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """Architecture, as ``config.json`` tells it."""
    pixels: Mapping[str, Any]
    """How pictures are prepared, as ``preprocessor_config.json`` tells it."""
    tokens: int
    """Rows of the table of tokens."""
    used: int
    """Tensors of the checkpoint that were needed."""
    left_out: tuple[str, ...]
    """Names of those that were not: momentum copies, queues, buffers."""
    remarks: tuple[str, ...] = ()
    """What a person should know before trusting it."""


def sizes(tensors: Mapping[str, Tensor], name: str, *, rank: int, what: str) -> tuple[int, ...]:
    """Shape of the tensor that tells a size; raises :class:`ArtifactMismatch` where it is not there."""
    found = tensors.get(name)
    if found is None or found.dim() != rank:
        shape = "it is missing" if found is None else f"its shape is {tuple(found.shape)}"
        raise ArtifactMismatch(
            f"{what} needs a tensor {name} with {rank} dimensions, and {shape}; this is another model"
        )
    return tuple(found.shape)


def depth(names: Iterable[str], prefix: str) -> int:
    """Layers of an image tower: 24 (ViT-L) where a name speaks of layer 12 or above, else 12 (ViT-B)."""
    starts = tuple(f"{prefix}{layer}." for layer in range(12, 24))
    return 24 if any(name.startswith(starts) for name in names) else 12


def heads(width: int, *, what: str) -> int:
    """Attention heads of a tower of this width."""
    if width % HEAD:
        raise ArtifactMismatch(f"{what} has layers {width} wide, expected a multiple of {HEAD}")
    return width // HEAD


def grid(positions: int, *, what: str) -> int:
    """Patches along one side, from the number of positions: the patches and one for the class."""
    side = math.isqrt(max(positions - 1, 0))
    if side * side + 1 != positions:
        raise ArtifactMismatch(f"{what} has {positions} image positions, expected a square number and one")
    return side


def pixel_settings(processor: str, *, side: int, squash: bool) -> dict[str, Any]:
    """``preprocessor_config.json``: bicubic to ``side``, squashed or cropped, CLIP's mean and deviation."""
    square = {"height": side, "width": side}
    crop = {"size": square} if squash else {"size": {"shortest_edge": side}, "crop_size": square}
    return {
        "image_processor_type": processor,
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": BICUBIC,
        **crop,
        "do_center_crop": not squash,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(MEAN),
        "image_std": list(DEVIATION),
    }
