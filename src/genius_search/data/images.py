"""Reading images as upright RGB at a bounded size, with clear errors for unreadable ones.

Photographs in the wild may be rotated, grey, transparent, animated, truncated, empty or enormous.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError, features
from PIL.JpegImagePlugin import JpegImageFile

from genius_search.border import as_path
from genius_search.errors import BadImage
from genius_search.forks import free_in_children

SHORTEST_SIDE: Final = 256
"""Images are decoded at no less than this size in pixels, at which M-BEIR stores them (deviation 22)."""
MAX_PIXELS: Final = 50_000_000
"""Pictures that would decode to more pixels than this are refused (200 MB as RGB)."""
MAX_RATIO: Final = 32
"""The longer side of a reduced picture is at most so many times the wanted shortest side."""
MAX_PARTS: Final = 100_000
"""Reads of a file from its head to its last pixel: hostile files have millions of parts."""
MAX_SECONDS: Final = 5.0
"""Processor time in which a picture must have been read, as a JPEG can go over its pixels again and again."""
MAX_EXIF_BYTES: Final = 1 << 20
"""Larger EXIF or XMP data is ignored."""
STRIP_PIXELS: Final = 1 << 20
"""Pixels that are converted at a time."""
_LARGE: Final = 4_000_000
"""Pictures of more pixels are decoded one at a time, since threads share the memory."""


def _register_heif() -> bool:
    """Let Pillow read HEIC, the format of iPhones, if the extra ``photos`` is installed."""
    try:
        from pillow_heif import register_heif_opener  # noqa: PLC0415  an extra
    except ImportError:
        return False
    register_heif_opener(thumbnails=False)  # they would be decoded before their size is looked at
    return True


HEIF_SUFFIXES: Final = frozenset({".heic", ".heif", ".hif"})
NEEDS_PHOTOS: Final = (
    "need the extra photos: pip install 'genius-search[photos]'; or convert it to JPEG"
)
FORMATS: Final = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    *(("AVIF",) if features.check("avif") else ()),
    *(("HEIF",) if _register_heif() else ()),
)
"""Allowed decoders; Pillow's others (PostScript, fonts, ...) are not needed."""
SAFE_FORMATS: Final = tuple(kind for kind in FORMATS if kind not in ("AVIF", "TIFF"))
"""Formats of strangers' pictures. Others may take memory for more than the pixels that their header tells."""
_COPIES: Final = {"WEBP": 2, "AVIF": 2}
"""Pixels for which one counts in formats whose decoders make several copies of a picture."""

IMAGE_SUFFIXES: Final = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
    | ({".avif"} if "AVIF" in FORMATS else set())
    | (HEIF_SUFFIXES if "HEIF" in FORMATS else set())
)
"""Usual endings of the files that :func:`open_image` reads."""

_GIVEN: Final = Path("the image")
"""What errors call an image that is not a file."""

_decoding_large = free_in_children(threading.Lock())
_changing_warnings = free_in_children(threading.Lock())


def is_image_file(path: Path) -> bool:
    """Return whether a file has an ending that :func:`open_image` supports."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def open_image(
    given: Path | bytes | Image.Image,
    *,
    name: str = "the image",
    formats: tuple[str, ...] = FORMATS,
    max_pixels: int = MAX_PIXELS,
    shortest_side: int | None = None,
) -> Image.Image:
    """Read an image as upright RGB, with transparency on white; of an animation, the first frame.

    Parameters
    ----------
    given
        the file; or its bytes or a Pillow image, which errors refer to by ``name``.
    max_pixels
        refuse images that would decode to more pixels. Pillow's limit (178 million pixels in the file)
        applies as well.
    shortest_side
        read the image at a half, a quarter or an eighth of its size if its shorter side keeps at least this
        many pixels. A JPEG is decoded so, in a fraction of the time and memory: a 100-megapixel photograph
        can be read even if its full size would be refused. The longer side is reduced further, until it has
        at most :data:`MAX_RATIO` times as many.

    Raises
    ------
    BadImage
        The file is missing, empty, damaged, too large, or not an image.
    """
    path = given if isinstance(given, Path) else Path(name)
    if given == b"":
        raise BadImage(path, "is empty (0 bytes)")
    with opened_image(given, path, formats) as opened:
        return _decode(path, opened, max_pixels, shortest_side)


def as_image(given: object, *, shortest_side: int | None = None) -> Image.Image:
    """Return a picture given as a file, its bytes, a Pillow image or an array as upright RGB.

    Parameters
    ----------
    given
        a path, the bytes of a file, a Pillow image, or an array of ``uint8`` of shape (height, width) or
        (height, width, 3 or 4).

    Raises
    ------
    BadImage
        It is none of these, or cannot be read. URLs are not fetched.
    """
    match given:
        case Image.Image():
            return open_image(given)
        case bytes():
            return open_image(given, shortest_side=shortest_side)
        case Path():
            return open_image(as_path(given), shortest_side=shortest_side)
        case str() if re.match(r"[a-z][a-z0-9+.-]+://", given, re.IGNORECASE):
            raise BadImage(
                _GIVEN, f"is a URL, {given[:80]}; download it, and give its bytes or its path"
            )
        case str():
            return open_image(as_path(given), shortest_side=shortest_side)
        case np.ma.MaskedArray() if np.ma.is_masked(given):
            raise BadImage(_GIVEN, "is an array with masked pixels; fill them: array.filled(0)")
        case np.ndarray():
            channels = given.shape[2:]
            if (
                given.dtype != np.uint8
                or given.ndim not in (2, 3)
                or channels not in ((), (3,), (4,))
            ):
                found = f"{given.dtype} of shape {given.shape}"
                raise BadImage(
                    _GIVEN, f"is an array of {found}, expected uint8 of shape (height, width, 3)"
                )
            return open_image(Image.fromarray(given))
        case _:
            kind = f"{type(given).__module__}.{type(given).__qualname__}"
            raise BadImage(
                _GIVEN,
                f"is of type {kind}; expected a path, bytes, a Pillow image or a NumPy array",
            )


def encode_jpeg(picture: Image.Image, *, quality: int) -> bytes:
    """Return an RGB picture as JPEG, without EXIF data."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, optimize=True, exif=b"")
    return file.getvalue()


class _Source(io.BufferedReader):
    """The file of a picture; reading it ends with :class:`BadImage` if that takes too long."""

    def __init__(self, given: Path | bytes, path: Path) -> None:
        super().__init__(io.BytesIO(given) if isinstance(given, bytes) else io.FileIO(given))
        self._path, self._parts, self._end = path, 0, time.thread_time() + MAX_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        self._parts += 1
        if self._parts > MAX_PARTS or time.thread_time() > self._end:
            raise BadImage(
                self._path, "has too many parts to be read; save it anew with another program"
            )
        return super().read(size)


@contextmanager
def opened_image(
    given: Path | bytes | Image.Image, path: Path, formats: tuple[str, ...] = FORMATS
) -> Iterator[Image.Image]:
    """Read the header of a picture; what decoders raise on damaged bytes, nearly anything, is BadImage."""
    if isinstance(given, Path):
        require_file(given)
    try:
        if isinstance(given, Image.Image):
            yield given
            return
        with _Source(given, path) as file:
            with quiet():
                opened = Image.open(file, formats=formats)
            with opened:
                for name in ("exif", "xmp"):
                    if len(opened.info.get(name) or b"") > MAX_EXIF_BYTES:
                        del opened.info[name]
                yield opened
    except BadImage:
        raise
    except UnidentifiedImageError:
        known = ", ".join(formats)
        raise BadImage(
            path, f"is not a picture in a supported format ({known}), or is damaged"
        ) from None
    except (Image.DecompressionBombError, MemoryError) as error:
        raise BadImage(path, f"is too large to be opened safely: {error}") from None
    except Exception as error:  # noqa: BLE001  as said above
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadImage(
            path, f"is damaged or unreadable: {reason or type(error).__name__}"
        ) from None


def _decode(
    path: Path, opened: Image.Image, max_pixels: int, shortest_side: int | None
) -> Image.Image:
    width, height = full_size = opened.size
    if not width * height:
        raise BadImage(path, f"has no pixels: it is {width} x {height}")
    factors = (1, 1)
    if shortest_side is not None:
        opened.draft(None, (shortest_side, shortest_side))
        factor = 1
        while (
            opened.size == full_size and factor < 8 and min(full_size) >= 2 * factor * shortest_side
        ):
            factor *= 2
        longest = MAX_RATIO * shortest_side
        factors = (
            max(factor, -(-opened.width // longest)),
            max(factor, -(-opened.height // longest)),
        )
    if not (isinstance(opened, JpegImageFile) and _has_several_scans(opened)):
        width, height = opened.size
    pixels = width * height * _COPIES.get(opened.format or "", 1)
    if pixels > max_pixels:
        raise BadImage(
            path,
            f"is {full_size[0]:,} x {full_size[1]:,} = {math.prod(full_size):,} pixels; at most "
            f"{max_pixels * math.prod(full_size) // pixels:,} are allowed. Make it smaller",
        )
    with _decoding_large if pixels > _LARGE else contextlib.nullcontext():
        whole = _to_rgb(opened, factors)
    with (
        quiet(),
        contextlib.suppress(Exception),
    ):  # Pillow raises nearly anything on damaged EXIF data
        whole.getexif()[ExifTags.Base.Orientation] = opened.getexif()[ExifTags.Base.Orientation]
    ImageOps.exif_transpose(whole, in_place=True)
    return whole


def _has_several_scans(opened: JpegImageFile) -> bool:
    """Return whether a JPEG's decoder holds the whole of it at full size, whatever size is wanted.

    It does for progressive ones, and for others whose first scan has only some of the colours.
    """
    bands = len(opened.getbands())
    if "progressive" in opened.info or bands > 3 or opened.fp is None:
        return True
    # Pillow stops behind the head of the first scan: its size (two bytes), its number of colours, and so on.
    opened.fp.seek(-6 - 2 * bands, io.SEEK_CUR)
    return opened.fp.read(6 + 2 * bands)[2] != bands


def _to_rgb(opened: Image.Image, factors: tuple[int, int]) -> Image.Image:
    """Convert to RGB and divide the size, strip by strip, so that only the result is added to the memory."""
    opened.load()
    width, height = opened.size
    across, down = factors
    is_deep = opened.mode.startswith(("I", "F"))  # Pillow's conversion would clip these to white
    low, high = 0.0, 65_535.0
    if is_deep and not opened.mode.startswith("I;16"):
        low, high = cast("tuple[float, float]", opened.getextrema())
        if not math.isfinite(high - low):
            raise ValueError("not all of its values are numbers")
    whole = Image.new("RGB", (-(-width // across), -(-height // down)))
    rows = max(1, STRIP_PIXELS // (width * down)) * down
    for top in range(0, height, rows):
        strip = opened.crop((0, top, width, min(height, top + rows)))
        if is_deep:
            values = (np.asarray(strip).astype(np.float64) - low) * (255 / ((high - low) or 1))
            strip = Image.fromarray(values.round().astype(np.uint8))
        elif opened.has_transparency_data:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        whole.paste(strip.convert("RGB").reduce(factors), (0, top // down))
    return whole


def image_type(path: Path) -> str:
    """Return the media type of a picture, such as ``image/jpeg``. Only its header is read.

    Raises
    ------
    BadImage
        The file is missing or no picture.
    """
    with opened_image(path, path) as opened:
        return (
            cast("ImageFile.ImageFile", opened).get_format_mimetype() or "application/octet-stream"
        )


def require_file(path: Path) -> None:
    """Raise :class:`BadImage` if a file is missing or empty."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise BadImage(path, "missing: there is no such file or folder") from None
    except (OSError, ValueError) as error:
        raise BadImage(
            path, f"cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None
    if not path.is_file():
        raise BadImage(path, "is not a file")
    if size == 0:
        raise BadImage(path, "is empty (0 bytes)")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Pillow's warnings about odd headers.

    Warning filters are global and changing them is not thread-safe, so a lock is held. Only the quick reading
    of headers needs it, so decoding still runs in parallel.
    """
    with _changing_warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
