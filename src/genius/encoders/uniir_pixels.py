"""The square that UniIR's CLIP looks at, to the pixel (specification, section 2.5)."""

from __future__ import annotations

from PIL import Image


def middle_square(picture: Image.Image, *, side: int) -> Image.Image:
    """The shorter side to ``side``, bicubic, then the middle.

    Where an odd number of pixels is to go, half of it is rounded to an even number, as torchvision does and
    so UniIR; transformers rounds down, and looks one pixel aside in a quarter of all pictures.
    """
    width, height = picture.size
    shorter = min(width, height)
    size = (side * width // shorter, side * height // shorter)
    resized = picture.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    left, top = (round((length - side) / 2) for length in size)
    return resized.crop((left, top, left + side, top + side))
