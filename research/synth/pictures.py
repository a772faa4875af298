"""Pictures of products: a pictograph in a colour and a fill, on a background, in a frame."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8
from numpy import ndarray
from PIL import Image, ImageDraw, ImageFont

from research.synth.world import SHAPES, VALUES, WORDS, Product

PIXELS: Final = 64
"""Width and height of every picture."""
_OVER: Final = 4
"""Supersampling of patterns and frames: drawn this much larger and averaged down."""
_GLYPH_OVER: Final = 2
"""Supersampling of glyphs, whose edges the font renderer has smoothed already."""
_SIZES: Final = (39.0, 43.0, 47.0)
"""Longer side of the glyph's ink, in pixels; nearly square glyphs get less, so that they fit rotated."""
_ANGLES: Final = (-20, -10, 0, 10, 20)
SHIFT: Final = 3
"""Largest displacement from the centre, in pixels."""
_RIM: Final = 2.2
"""Width of the rim of an outlined shape, in pixels."""
_EDGE: Final = 1.0
"""Width of the edge of a patterned shape, in pixels. The pale parts of a pattern resemble pale
backgrounds: without an edge, a checkered disc looks like a checkered hexagon."""
_STROKE: Final = 4.6
"""Strokes thinner than this are thickened, so that fills can be seen in them."""
NUM_LOOKS: Final = len(_SIZES) * len(_ANGLES)


class Pose(NamedTuple):
    """Size, rotation and position of a drawing."""

    look: int
    """One of the ``NUM_LOOKS`` pairs of size and rotation."""
    right: int = 0
    down: int = 0


class _Masks(NamedTuple):
    body: Float32[ndarray, "pixels pixels 1"]
    edge: Float32[ndarray, "pixels pixels 1"]
    rim: Float32[ndarray, "pixels pixels 1"]


def font_file() -> Path:
    """Return matplotlib's DejaVu Sans; matplotlib itself is not imported."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the catalogue is drawn with a font of matplotlib", name="matplotlib"
        )
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"


def draw(product: Product, pose: Pose) -> UInt8[ndarray, "pixels pixels 3"]:
    """Draw a product in a pose."""
    masks = _masks(product.shape, pose.look)
    down, right = SHIFT - pose.down, SHIFT - pose.right
    place = slice(down, down + PIXELS), slice(right, right + PIXELS)
    canvas = _canvas(product.background, product.frame)
    first, second = _pair(product.colour)
    fill = VALUES["fill"][product.fill]
    alpha = {"outlined": masks.rim, "solid": masks.body}.get(fill, masks.edge)[place]
    paint = first + (second - first) * _pattern(fill) * masks.body[place]
    picture: UInt8[ndarray, "pixels pixels 3"] = (canvas + (paint - canvas) * alpha + 0.5).astype(
        np.uint8
    )
    return picture


def save(picture: UInt8[ndarray, "pixels pixels 3"], path: Path) -> None:
    """Write a picture as JPEG with fixed settings."""
    Image.fromarray(picture).save(path, "JPEG", quality=92, subsampling=0)


@cache
def _masks(shape: int, look: int) -> _Masks:
    """Return a shape's ink, without and with a rim, at a size and angle, with a margin for shifts."""
    size, angle = _SIZES[look // len(_ANGLES)], _ANGLES[look % len(_ANGLES)]
    glyph = SHAPES[shape][0]
    stroke = _extra_stroke(glyph)
    font = _font_for(glyph, size - 2 * stroke)
    return _Masks(
        *(_ink(glyph, font, angle, stroke=stroke + width) for width in (0.0, _EDGE, _RIM))
    )


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(font_file()), size, layout_engine=ImageFont.Layout.BASIC)


def _font_for(glyph: str, pixels: float) -> ImageFont.FreeTypeFont:
    """Return the font at the size that gives a glyph this extent."""
    left, top, right, bottom = _font(200).getbbox(glyph)
    width, height = right - left, bottom - top
    extent = max(width, height, 0.8 * math.hypot(width, height))
    return _font(round(200 * pixels * _GLYPH_OVER / extent))


@cache
def _extra_stroke(glyph: str) -> float:
    """Return how much to thicken a glyph on each side, in pixels: mean stroke = 2 area / outline."""
    font = _font_for(glyph, _SIZES[1])
    thin, thick = (float(_ink(glyph, font, 0, stroke=stroke).sum()) for stroke in (0.0, 1.0))
    outline = max(thick - thin, 1.0)
    return float(np.clip((_STROKE - 2 * thin / outline) / 2, 0.0, 0.8))


def _ink(
    glyph: str, font: ImageFont.FreeTypeFont, angle: int, *, stroke: float
) -> Float32[ndarray, "pixels pixels 1"]:
    """Draw a glyph centred and rotated; ``stroke`` thickens it on each side, in pixels."""
    stroke *= _GLYPH_OVER
    side = (PIXELS + 2 * SHIFT) * _GLYPH_OVER
    left, top, right, bottom = font.getbbox(glyph, stroke_width=stroke)
    picture = Image.new("L", (side, side))
    corner = ((side - left - right) / 2, (side - top - bottom) / 2)
    ImageDraw.Draw(picture).text(corner, glyph, fill=255, font=font, stroke_width=stroke)
    turned = picture.rotate(angle, Image.Resampling.BILINEAR).reduce(_GLYPH_OVER)
    return (np.asarray(turned, dtype=np.float32) / 255)[..., None]


@cache
def _pair(colour: int) -> tuple[Float32[ndarray, 3], Float32[ndarray, 3]]:
    """Return a colour and the pale one that patterns use beside it."""
    first = np.array(WORDS["colours"][VALUES["colour"][colour]]["rgb"], dtype=np.float32)
    return first, first + (np.float32(255) - first) * np.float32(0.82)


@cache
def _pattern(fill: str) -> Float32[ndarray, "pixels pixels 1"]:
    """Return where a fill shows the pale colour, from 0 to 1."""
    side = PIXELS * _OVER
    y, x = (np.mgrid[0:side, 0:side] + 0.5) / _OVER
    match fill:
        case "striped":
            pale = y % 6 < 2.6
        case "dotted":
            row = y // 4
            pale = ((x + 4 * (row % 2)) % 8 - 4) ** 2 + (y % 4 - 2) ** 2 < 1.7**2
        case "checkered":
            pale = (x // 5 + y // 5) % 2 == 0
        case "two-tone":
            pale = x >= PIXELS / 2
        case "outlined":
            pale = np.ones_like(x, dtype=bool)
        case _:
            pale = np.zeros_like(x, dtype=bool)
    cells = pale.reshape(PIXELS, _OVER, PIXELS, _OVER).mean(axis=(1, 3))
    pattern: Float32[ndarray, "pixels pixels 1"] = cells.astype(np.float32)[..., None]
    return pattern


@cache
def _canvas(background: int, frame: int) -> Float32[ndarray, "pixels pixels 3"]:
    top, bottom = np.array(
        WORDS["backgrounds"][VALUES["background"][background]]["rgb"], dtype=np.float32
    )
    slope = np.linspace(0, 1, PIXELS, dtype=np.float32)[:, None, None]
    canvas = np.broadcast_to(top + (bottom - top) * slope, (PIXELS, PIXELS, 3))
    ink = np.array((70, 70, 78) if canvas.mean() > 128 else (215, 215, 220), dtype=np.float32)
    framed: Float32[ndarray, "pixels pixels 3"] = canvas + (ink - canvas) * _frame(
        VALUES["frame"][frame]
    )
    return framed


def _frame(frame: str) -> Float32[ndarray, "pixels pixels 1"]:
    side = PIXELS * _OVER
    picture = Image.new("L", (side, side))
    pen = ImageDraw.Draw(picture)
    near, far, width = 2 * _OVER, (PIXELS - 2) * _OVER - 1, 2 * _OVER
    match frame:
        case "ring":
            pen.ellipse((near, near, far, far), outline=255, width=width)
        case "box" | "corners":
            pen.rectangle((near, near, far, far), outline=255, width=width)
            if frame == "corners":
                reach = 14 * _OVER
                pen.rectangle((reach, 0, side - 1 - reach, side), fill=0)
                pen.rectangle((0, reach, side, side - 1 - reach), fill=0)
        case "bars":
            pen.rectangle((near, near, far, near + width * 3 // 2), fill=255)
            pen.rectangle((near, far - width * 3 // 2, far, far), fill=255)
    return (np.asarray(picture.reduce(_OVER), dtype=np.float32) / 255)[..., None]
