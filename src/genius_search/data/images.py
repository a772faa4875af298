"""Reads pictures: upright, RGB, no larger than needed, or refused by name with the reason.

People's photographs are rotated, grey, transparent, animated, cut off, empty or enormous.
"""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, UnidentifiedImageError, features

from genius_search.errors import BadImage

MAX_PIXELS: Final = 50_000_000
"""Pictures that would decode to more pixels than this are refused (150 MB as RGB)."""

_FORMATS: Final = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    *(("AVIF",) if features.check("avif") else ()),
)
"""Decoders that may run; Pillow's others (PostScript, fonts, ...) are of no use to a photo search."""

IMAGE_SUFFIXES: Final = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
    | ({".avif"} if "AVIF" in _FORMATS else set())
)
"""Usual endings of the files that :func:`open_image` reads."""

_SIGNATURES: Final = {
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"GIF8": "GIF",
    b"RIFF": "WebP",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
}

_UPRIGHT: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> the operation that turns the picture upright."""
_EXIF_ORIENTATION: Final = 0x0112

_WARNINGS_LOCK = threading.Lock()


class TooManyPixels(BadImage):
    """The picture seems undamaged, but is larger than allowed."""


def is_image_file(path: Path) -> bool:
    """Return whether a file has the name of a picture that :func:`open_image` can read."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def open_image(path: Path, *, max_pixels: int = MAX_PIXELS, shortest_side: int | None = None) -> Image.Image:
    """Read a picture: upright, RGB, transparency on white, the first frame of an animation.

    Parameters
    ----------
    max_pixels
        refuse pictures that would decode to more. Pillow's own limit (178 million pixels in the file)
        stays in force.
    shortest_side
        a JPEG may then be decoded at a half, a quarter or an eighth of its size, as long as its shorter
        side keeps at least this many pixels. That costs a fraction of the time and memory, so a
        100-megapixel photograph is welcome where its full size would be refused.

    Raises
    ------
    TooManyPixels
        it is larger than ``max_pixels``.
    BadImage
        it is missing, empty, not a picture, or damaged.
    """
    require_file(path)
    try:
        with path.open("rb") as file:
            return _read(path, file, max_pixels, shortest_side)
    except OSError as error:
        raise BadImage(path, f"cannot be read: {_describe(error)}") from None


def read_image(
    data: bytes, *, name: str, max_pixels: int = MAX_PIXELS, shortest_side: int | None = None
) -> Image.Image:
    """Read a picture from bytes, as :func:`open_image` reads a file; errors call it ``name``."""
    if not data:
        raise BadImage(Path(name), "is empty (0 bytes)")
    return _read(Path(name), io.BytesIO(data), max_pixels, shortest_side)


def _read(
    path: Path, file: io.BufferedReader | io.BytesIO, max_pixels: int, shortest_side: int | None
) -> Image.Image:
    try:
        with _quiet():
            opened = Image.open(file, formats=_FORMATS)
        with opened:
            return _decode(path, opened, max_pixels, shortest_side)
    except BadImage:
        raise
    except Image.DecompressionBombError:
        raise TooManyPixels(path, _too_large(None, max_pixels)) from None
    except Exception as error:  # noqa: BLE001  (decoders raise nearly anything on hostile bytes)
        raise BadImage(path, _reason(file, error)) from None


def _decode(path: Path, opened: Image.Image, max_pixels: int, shortest_side: int | None) -> Image.Image:
    full_size = opened.size
    if shortest_side is not None:
        opened.draft(None, (shortest_side, shortest_side))
    # A progressive JPEG is held in memory at full size before it can be reduced.
    width, height = full_size if "progressive" in opened.info else opened.size
    if width * height > max_pixels:
        raise TooManyPixels(path, _too_large(full_size, max_pixels))
    if opened.mode == "LAB":
        raise BadImage(path, "its colours are stored as Lab, which is not supported; save it as RGB")
    if opened.format == "TIFF":
        with _quiet():  # its decoder reads tags while it decodes, and warns about them
            opened.load()
    else:
        opened.load()
    with _quiet():
        turn = _UPRIGHT.get(_orientation(opened))
    image = _to_rgb(opened)
    return image if turn is None else image.transpose(turn)


def _orientation(opened: Image.Image) -> int:
    """Return EXIF's orientation; damaged EXIF is no reason to refuse a picture that decodes."""
    try:
        orientation = opened.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:  # noqa: BLE001  (Pillow's EXIF parser raises nearly anything on damaged tags)
        return 1
    return orientation if isinstance(orientation, int) else 1


def _to_rgb(opened: Image.Image) -> Image.Image:
    if opened.mode.startswith(("I", "F")):
        return _eight_bits(opened).convert("RGB")
    if opened.has_transparency_data:
        layer = opened.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return opened.convert("RGB")


def _eight_bits(opened: Image.Image) -> Image.Image:
    """Scale grey of 16 bits, 32 bits or floats; Pillow's own conversion clips to white."""
    values = np.asarray(opened).astype(np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if opened.mode.startswith("F"):
        full = 1.0 if high <= 1 else 255.0
    else:
        full = 65535.0 if opened.mode.startswith("I;16") or high > 255 else 255.0
    if low < 0 or high > full:  # no known scale: stretch what is there
        values, full = values - low, high - low
    return Image.fromarray((values * (255.0 / full)).round().astype(np.uint8))


def require_file(path: Path) -> None:
    """Raise :class:`BadImage` unless there is a file with something in it."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise BadImage(path, "missing: there is no such file") from None
    except (OSError, ValueError) as error:
        raise BadImage(path, f"cannot be read: {_describe(error)}") from None
    if not path.is_file():
        raise BadImage(path, "is not a file")
    if size == 0:
        raise BadImage(path, "is empty (0 bytes)")


def _reason(file: io.BufferedReader | io.BytesIO, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError) and not file.closed:
        file.seek(0)
        start = file.read(16)
        for signature, name in _SIGNATURES.items():
            if start.startswith(signature):
                return f"starts like a {name} picture but is damaged or cut off"
        return f"is not a picture in a supported format ({', '.join(_FORMATS)})"
    if isinstance(error, MemoryError):
        return "is too large for this machine's memory"
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return "is cut off: the file ends before the picture does"
    return f"is damaged: {_describe(error)}"


def _too_large(size: tuple[int, int] | None, max_pixels: int) -> str:
    if size is None:
        return f"has too many pixels to be opened safely; at most {max_pixels:,} are allowed"
    width, height = size
    return (
        f"is {width:,} x {height:,} = {width * height:,} pixels; at most {max_pixels:,} are allowed. "
        "Make it smaller"
    )


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings about odd headers.

    Python's filters belong to the process and swapping them is not thread-safe, so threads take turns. Only
    the quick reading of headers is inside, so that decoding runs in parallel.
    """
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
