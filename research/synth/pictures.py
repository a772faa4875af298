"""Pictures of products: pictographs with a colour and a fill, on a background, in a frame."""

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
_SUPERSAMPLING: Final = 4
"""Patterns and frames are drawn larger by this factor, and then averaged."""
_GLYPH_SUPERSAMPLING: Final = 2
"""The factor for glyphs, whose edges the font renderer smooths, too."""
_SIZES: Final = (39.0, 43.0, 47.0)
"""Longer side of the glyph's ink, in pixels; nearly square glyphs are smaller, so that they fit
when rotated."""
_ANGLES: Final = (-20, -10, 0, 10, 20)
SHIFT: Final = 3
"""Largest displacement from the centre, in pixels."""
_RIM: Final = 2.2
"""Width of the rim of an outlined shape, in pixels."""
_EDGE: Final = 1.0
"""Width of the edge of a patterned shape, in pixels. Pale parts of a pattern resemble pale
backgrounds: without an edge, a checkered disc looks like a checkered hexagon."""
_MIN_STROKE: Final = 4.6
"""Thinner strokes are thickened, so that fills are visible in them, in pixels."""
NUM_LOOKS: Final = len(_SIZES) * len(_ANGLES)


class Pose(NamedTuple):
    """Size, rotation and position of a drawing."""

    look: int
    """Number of one of the ``NUM_LOOKS`` pairs of size and rotation."""
    right: int = 0
    down: int = 0


class _Masks(NamedTuple):
    """A shape's ink without an edge, with an edge, and with a rim."""

    body: Float32[ndarray, "pixels pixels 1"]
    edge: Float32[ndarray, "pixels pixels 1"]
    rim: Float32[ndarray, "pixels pixels 1"]


def font_file() -> Path:
    """Return the file of matplotlib's DejaVu Sans; matplotlib is not imported."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "the catalogue is drawn with a font of matplotlib; install matplotlib",
            name="matplotlib",
        )
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"


def draw(product: Product, pose: Pose) -> UInt8[ndarray, "pixels pixels 3"]:
    """Draw a product in a pose."""
    masks = _masks(product.shape, pose.look)
    top, left = SHIFT - pose.down, SHIFT - pose.right
    window = slice(top, top + PIXELS), slice(left, left + PIXELS)
    canvas = _canvas(product.background, product.frame)
    colour, pale_colour = _colours(product.colour)
    fill = VALUES["fill"][product.fill]
    alpha = {"outlined": masks.rim, "solid": masks.body}.get(fill, masks.edge)[window]
    paint = colour + (pale_colour - colour) * _pattern(fill) * masks.body[window]
    pixels = canvas + (paint - canvas) * alpha + 0.5
    picture: UInt8[ndarray, "pixels pixels 3"] = pixels.astype(np.uint8)
    return picture


def save(picture: UInt8[ndarray, "pixels pixels 3"], path: Path) -> None:
    """Write a picture as JPEG with fixed settings."""
    Image.fromarray(picture).save(path, "JPEG", quality=92, subsampling=0)


@cache
def _masks(shape: int, look: int) -> _Masks:
    """Return a shape's masks at a size and angle, with a margin for shifts."""
    size, angle = _SIZES[look // len(_ANGLES)], _ANGLES[look % len(_ANGLES)]
    glyph = SHAPES[shape][0]
    stroke = _extra_stroke(glyph)
    font = _font_for(glyph, size - 2 * stroke)
    return _Masks(
        body=_ink(glyph, font, angle, stroke=stroke),
        edge=_ink(glyph, font, angle, stroke=stroke + _EDGE),
        rim=_ink(glyph, font, angle, stroke=stroke + _RIM),
    )


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(font_file()), size, layout_engine=ImageFont.Layout.BASIC)


def _font_for(glyph: str, pixels: float) -> ImageFont.FreeTypeFont:
    """Return the font at the size at which a glyph has the given extent."""
    left, top, right, bottom = _font(200).getbbox(glyph)
    width, height = right - left, bottom - top
    extent = max(width, height, 0.8 * math.hypot(width, height))
    return _font(round(200 * pixels * _GLYPH_SUPERSAMPLING / extent))


@cache
def _extra_stroke(glyph: str) -> float:
    """Return by how many pixels a glyph is thickened on each side."""
    font = _font_for(glyph, _SIZES[1])
    area = float(_ink(glyph, font, 0, stroke=0.0).sum())
    outline = max(float(_ink(glyph, font, 0, stroke=1.0).sum()) - area, 1.0)
    mean_stroke = 2 * area / outline
    return float(np.clip((_MIN_STROKE - mean_stroke) / 2, 0.0, 0.8))


def _ink(
    glyph: str, font: ImageFont.FreeTypeFont, angle: int, *, stroke: float
) -> Float32[ndarray, "pixels pixels 1"]:
    """Draw a glyph centred and rotated; ``stroke`` thickens it on each side, in pixels."""
    stroke *= _GLYPH_SUPERSAMPLING
    side = (PIXELS + 2 * SHIFT) * _GLYPH_SUPERSAMPLING
    left, top, right, bottom = font.getbbox(glyph, stroke_width=stroke)
    picture = Image.new("L", (side, side))
    corner = ((side - left - right) / 2, (side - top - bottom) / 2)
    ImageDraw.Draw(picture).text(corner, glyph, fill=255, font=font, stroke_width=stroke)
    rotated = picture.rotate(angle, Image.Resampling.BILINEAR).reduce(_GLYPH_SUPERSAMPLING)
    return (np.asarray(rotated, dtype=np.float32) / 255)[..., None]


@cache
def _colours(colour: int) -> tuple[Float32[ndarray, 3], Float32[ndarray, 3]]:
    """Return a colour, and its pale variant in patterns."""
    rgb = np.array(WORDS["colours"][VALUES["colour"][colour]]["rgb"], dtype=np.float32)
    return rgb, rgb + (np.float32(255) - rgb) * np.float32(0.82)


@cache
def _pattern(fill: str) -> Float32[ndarray, "pixels pixels 1"]:
    """Return the share of the pale colour in each pixel of a fill."""
    side = PIXELS * _SUPERSAMPLING
    y, x = (np.mgrid[0:side, 0:side] + 0.5) / _SUPERSAMPLING
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
    cells = pale.reshape(PIXELS, _SUPERSAMPLING, PIXELS, _SUPERSAMPLING).mean(axis=(1, 3))
    pattern: Float32[ndarray, "pixels pixels 1"] = cells.astype(np.float32)[..., None]
    return pattern


@cache
def _canvas(background: int, frame: int) -> Float32[ndarray, "pixels pixels 3"]:
    """Return a background, a vertical gradient, with a frame that stands out from it."""
    rgb = WORDS["backgrounds"][VALUES["background"][background]]["rgb"]
    top, bottom = np.array(rgb, dtype=np.float32)
    slope = np.linspace(0, 1, PIXELS, dtype=np.float32)[:, None, None]
    canvas = np.broadcast_to(top + (bottom - top) * slope, (PIXELS, PIXELS, 3))
    ink = np.array((70, 70, 78) if canvas.mean() > 128 else (215, 215, 220), dtype=np.float32)
    mask = _frame_mask(VALUES["frame"][frame])
    framed: Float32[ndarray, "pixels pixels 3"] = canvas + (ink - canvas) * mask
    return framed


def _frame_mask(frame: str) -> Float32[ndarray, "pixels pixels 1"]:
    side = PIXELS * _SUPERSAMPLING
    width = 2 * _SUPERSAMPLING
    near, far = width, side - width - 1
    picture = Image.new("L", (side, side))
    pen = ImageDraw.Draw(picture)
    match frame:
        case "ring":
            pen.ellipse((near, near, far, far), outline=255, width=width)
        case "box":
            pen.rectangle((near, near, far, far), outline=255, width=width)
        case "corners":
            pen.rectangle((near, near, far, far), outline=255, width=width)
            corner = 14 * _SUPERSAMPLING
            pen.rectangle((corner, 0, side - 1 - corner, side), fill=0)
            pen.rectangle((0, corner, side, side - 1 - corner), fill=0)
        case "bars":
            pen.rectangle((near, near, far, near + width * 3 // 2), fill=255)
            pen.rectangle((near, far - width * 3 // 2, far, far), fill=255)
    return (np.asarray(picture.reduce(_SUPERSAMPLING), dtype=np.float32) / 255)[..., None]
