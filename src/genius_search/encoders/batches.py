"""What encoders share that run a network in PyTorch: batches, and tokenizers from their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from genius_search.encoders.base import ImageInput
from genius_search.errors import ArtifactMismatch, UsageError

Input = TypeVar("Input")


def decoded_images(images: Sequence[ImageInput]) -> list[Image.Image]:
    """Return the images themselves; raise :class:`UsageError` where one was not decoded."""
    for image in images:
        if image.image is None:
            raise UsageError(f"{image.key.role} {image.key.id}: this encoder needs the image itself, decoded")
    return [image.image for image in images if image.image is not None]


def in_batches(
    encode: Callable[[Sequence[Input]], Tensor], items: Sequence[Input], *, size: int, dim: int
) -> Float[Tensor, "items dim"]:
    """Encode ``size`` items at a time, and return the features on the CPU."""
    parts = [encode(items[start : start + size]).cpu() for start in range(0, len(items), size)]
    return torch.cat([torch.zeros(0, dim), *parts])


def read_tokenizer(file: Path) -> Tokenizer:
    """Open a ``tokenizer.json``, without the truncation and padding that it may ask for.

    Raises
    ------
    ArtifactMismatch
        It is damaged.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  tokenizers raises plain Exception for a damaged file
        raise ArtifactMismatch(f"{file} cannot be read as a tokenizer ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
