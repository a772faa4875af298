"""Reading of pictures as upright RGB, with limits on size and time, and clear errors.

Files of users may be rotated, grey, transparent, animated, truncated, empty, enormous or hostile.
"""

from __future__ import annotations

import contextlib
import importlib.util
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
from genius_search.data.raw_photos import RAW_SUFFIXES, find_preview, with_tags
from genius_search.errors import BadImage
from genius_search.forks import free_in_children

SHORTEST_SIDE: Final = 256
"""Pixels of the shorter side of images, below which they are not reduced when they are decoded.

M-BEIR stores its images at this size (deviation 22)."""
MAX_PIXELS: Final = 50_000_000
"""Maximum number of pixels of a decoded picture (200 MB of memory)."""
MAX_RATIO: Final = 32
"""Maximum length of a reduced picture's longer side, in multiples of ``shortest_side``."""
MAX_PICTURE_READS: Final = 100_000
"""Maximum number of reads from a picture's file: hostile files have millions of parts."""
MAX_PICTURE_SECONDS: Final = 5.0
"""Maximum processor time for a picture: a JPEG can encode its pixels again and again."""
MAX_EXIF_BYTES: Final = 1 << 20
"""Maximum size of EXIF or XMP data; larger data is ignored."""
STRIP_PIXELS: Final = 1 << 20
"""Number of pixels that are converted at a time."""
_MAX_PARALLEL_PIXELS: Final = 4_000_000
"""Larger pictures are decoded one at a time, because all threads share the memory."""


def _register_heif() -> bool:
    """Register the decoder of HEIC, the format of iPhones, if the extra ``photos`` is installed."""
    try:
        from pillow_heif import register_heif_opener  # noqa: PLC0415  an extra
    except ImportError:
        return False
    register_heif_opener(thumbnails=False)  # they would be decoded before their size is checked
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
"""Formats that are decoded; Pillow's other decoders (PostScript, fonts, ...) are not needed."""
SAFE_FORMATS: Final = tuple(name for name in FORMATS if name not in ("AVIF", "TIFF"))
"""Formats accepted from untrusted clients.

Decoders of other formats may use more memory than the header's number of pixels implies."""
_DECODER_COPIES: Final = {"WEBP": 2, "AVIF": 2}
"""Number of copies of a picture that the decoder of a format makes; 1 for other formats."""

IMAGE_SUFFIXES: Final = frozenset(
    {".jpg", ".jpeg", ".jfif", ".jpe", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
    | RAW_SUFFIXES
    | ({".avif"} if "AVIF" in FORMATS else set())
    | (HEIF_SUFFIXES if "HEIF" in FORMATS else set())
)
"""Endings of the files that :func:`open_image` reads."""
VIDEO_SUFFIXES: Final = frozenset(
    {
        *(".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".3gp", ".mpg", ".mpeg"),
        *(".mts", ".m2ts", ".wmv", ".flv", ".ogv"),
    }
)
"""Endings of videos (:mod:`genius_search.data.video`)."""
NEEDS_VIDEO: Final = (
    "are videos, which need the extra video: pip install 'genius-search[video]'; subtitles next to "
    "them are read (.srt, .vtt)"
)

_UNNAMED: Final = Path("the image")
"""Name, in errors, of a picture that is not a file."""

_decoding_large = free_in_children(threading.Lock())
_changing_warnings = free_in_children(threading.Lock())


def is_image_file(path: Path) -> bool:
    """Return whether a file has an ending that :func:`open_image` supports."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def is_raw_photo(path: Path) -> bool:
    """Return whether a file has the ending of a raw photo."""
    return path.suffix.lower() in RAW_SUFFIXES


def is_video_file(path: Path) -> bool:
    """Return whether a file has an ending of videos, and videos can be read."""
    return path.suffix.lower() in VIDEO_SUFFIXES and has_opencv()


def has_opencv() -> bool:
    """Return whether the extra ``video`` is installed."""
    return importlib.util.find_spec("cv2") is not None


def open_image(
    source: Path | bytes | Image.Image,
    *,
    name: str = "the image",
    formats: tuple[str, ...] = FORMATS,
    max_pixels: int = MAX_PIXELS,
    shortest_side: int | None = None,
) -> Image.Image:
    """Read an image, or the first frame of an animation, as upright RGB on a white background.

    Parameters
    ----------
    source
        A file, the bytes of a file, or a Pillow image.
    name
        Name of the bytes or the Pillow image in errors.
    formats
        Formats to accept, as Pillow names them.
    max_pixels
        Refuse images that would decode to more pixels. Pillow's own limit (178 million pixels in
        the file) also applies.
    shortest_side
        Reduce the image to a half, a quarter or an eighth of its size, as long as its shorter side
        has at least this many pixels. JPEG files are decoded at the reduced size in a fraction of
        the time and memory, so a 100-megapixel photograph can be read although its full size would
        be refused. The longer side is reduced further, to at most :data:`MAX_RATIO` times this
        number.

    Raises
    ------
    BadImage
        The file is missing, empty, damaged, too large, or not an image.
    """
    path = source if isinstance(source, Path) else Path(name)
    if source == b"":
        raise BadImage(path, "is empty (0 bytes)")
    with open_header(source, path, formats) as image:
        return decode_image(path, image, max_pixels=max_pixels, shortest_side=shortest_side)


def as_image(source: object, *, shortest_side: int | None = None) -> Image.Image:
    """Return a picture as upright RGB, from any of the forms that Python code has pictures in.

    Parameters
    ----------
    source
        A path, the bytes of a file, a Pillow image, or an array of ``uint8`` of shape
        (height, width) or (height, width, 3 or 4).

    Raises
    ------
    BadImage
        The picture has another type or form, or cannot be read. URLs are not downloaded.
    """
    match source:
        case Image.Image():
            return open_image(source)
        case bytes():
            return open_image(source, shortest_side=shortest_side)
        case Path():
            return open_image(as_path(source), shortest_side=shortest_side)
        case str() if re.match(r"[a-z][a-z0-9+.-]+://", source, re.IGNORECASE):
            raise BadImage(
                _UNNAMED, f"is a URL, {source[:80]}; download it, and give its bytes or its path"
            )
        case str():
            return open_image(as_path(source), shortest_side=shortest_side)
        case np.ndarray():
            return open_image(_from_array(source))
    type_name = f"{type(source).__module__}.{type(source).__qualname__}"
    raise BadImage(
        _UNNAMED,
        f"is of type {type_name}; expected a path, bytes, a Pillow image or a NumPy array",
    )


def _from_array(array: np.ndarray) -> Image.Image:
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise BadImage(_UNNAMED, "is an array with masked pixels; fill them: array.filled(0)")
    channels = array.shape[2:]
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or channels not in ((), (3,), (4,)):
        raise BadImage(
            _UNNAMED,
            f"is an array of {array.dtype} of shape {array.shape}, expected uint8 of shape "
            "(height, width, 3)",
        )
    return Image.fromarray(array)


def encode_jpeg(picture: Image.Image, *, quality: int) -> bytes:
    """Encode an RGB picture as JPEG, without EXIF data."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, optimize=True, exif=b"")
    return file.getvalue()


class _PictureFile(io.BufferedReader):
    """The file of a picture, which stops decoders that read too often or for too long."""

    def __init__(self, source: Path | bytes, path: Path) -> None:
        super().__init__(io.BytesIO(source) if isinstance(source, bytes) else io.FileIO(source))
        self._path = path
        self._num_reads = 0
        self._deadline = time.thread_time() + MAX_PICTURE_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        self._num_reads += 1
        if self._num_reads > MAX_PICTURE_READS or time.thread_time() > self._deadline:
            raise BadImage(
                self._path, "has too many parts to be read; save it again with another program"
            )
        return super().read(size)


@contextmanager
def open_header(
    source: Path | bytes | Image.Image, path: Path, formats: tuple[str, ...] = FORMATS
) -> Iterator[Image.Image]:
    """Open a picture and read its header, but no pixels yet.

    Raises
    ------
    BadImage
        The file is missing, is not a picture, or a decoder raises any error, also inside the
        ``with`` block. Errors mention ``path``.
    """
    if isinstance(source, Path):
        require_file(source)
        if is_raw_photo(source):
            source = read_raw_preview(source)
    try:
        if isinstance(source, Image.Image):
            yield source
            return
        with _PictureFile(source, path) as file:
            with without_warnings():
                image = Image.open(file, formats=formats)
            with image:
                for name in ("exif", "xmp"):
                    if len(image.info.get(name) or b"") > MAX_EXIF_BYTES:
                        del image.info[name]
                yield image
    except BadImage:
        raise
    except UnidentifiedImageError:
        supported = ", ".join(formats)
        raise BadImage(
            path, f"is not a picture in a supported format ({supported}), or is damaged"
        ) from None
    except (Image.DecompressionBombError, MemoryError) as error:
        raise BadImage(path, f"is too large to be opened safely: {error}") from None
    except Exception as error:  # noqa: BLE001  decoders raise nearly anything on damaged bytes
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadImage(
            path, f"is damaged or unreadable: {reason or type(error).__name__}"
        ) from None


def read_raw_preview(path: Path) -> bytes:
    """Return the preview of a raw photo as JPEG, with the orientation and place of the photo.

    Raises
    ------
    BadImage
        The file cannot be read, or has no preview.
    """
    preview = find_preview(path)
    with without_warnings():
        return with_tags(preview)


def decode_image(
    path: Path,
    image: Image.Image,
    *,
    max_pixels: int = MAX_PIXELS,
    shortest_side: int | None = None,
) -> Image.Image:
    """Decode a picture whose header has been read, reduce it, and turn it upright.

    Parameters and errors are those of :func:`open_image`.
    """
    full_width, full_height = image.size
    full_pixels = full_width * full_height
    if not full_pixels:
        raise BadImage(path, f"has no pixels: it is {full_width} x {full_height}")
    factors = (1, 1)
    if shortest_side is not None:
        image.draft(None, (shortest_side, shortest_side))  # changes image.size of JPEG files only
        factors = _reduction_factors(image, (full_width, full_height), shortest_side)
    needs_full_size = isinstance(image, JpegImageFile) and _has_several_scans(image)
    decoded_pixels = full_pixels if needs_full_size else image.width * image.height
    pixels_in_memory = decoded_pixels * _DECODER_COPIES.get(image.format or "", 1)
    if pixels_in_memory > max_pixels:
        allowed = max_pixels * full_pixels // pixels_in_memory
        raise BadImage(
            path,
            f"is {full_width:,} x {full_height:,} = {full_pixels:,} pixels; at most {allowed:,} "
            "are allowed. Make it smaller",
        )
    is_large = pixels_in_memory > _MAX_PARALLEL_PIXELS
    with _decoding_large if is_large else contextlib.nullcontext():
        rgb = _to_rgb(image, factors)
    _turn_upright(rgb, image)
    return rgb


def _reduction_factors(
    image: Image.Image, full_size: tuple[int, int], shortest_side: int
) -> tuple[int, int]:
    """Return the divisors of width and height after decoding.

    Both are 1, 2, 4 or 8, but 1 if the decoder itself has reduced the picture. A side that would
    still be longer than ``MAX_RATIO * shortest_side`` gets a larger divisor.
    """
    is_reduced = image.size != full_size
    factor = 1
    while not is_reduced and factor < 8 and min(full_size) >= 2 * factor * shortest_side:
        factor *= 2
    longest = MAX_RATIO * shortest_side
    return max(factor, math.ceil(image.width / longest)), max(
        factor, math.ceil(image.height / longest)
    )


def _turn_upright(rgb: Image.Image, image: Image.Image) -> None:
    """Rotate and mirror decoded pixels as the EXIF data of the file says."""
    orientation = ExifTags.Base.Orientation
    with without_warnings(), contextlib.suppress(Exception):  # damaged EXIF data raises anything
        rgb.getexif()[orientation] = image.getexif()[orientation]
    ImageOps.exif_transpose(rgb, in_place=True)


def _has_several_scans(image: JpegImageFile) -> bool:
    """Return whether a JPEG's decoder holds all pixels at full size, even for a reduced picture.

    This is so for progressive files, and for files whose first scan lacks some of the colours.
    """
    num_colours = len(image.getbands())
    if "progressive" in image.info or num_colours > 3 or image.fp is None:
        return True
    # Pillow has read the header of the first scan, which ends here:
    #   size (2 bytes), number of colours n (1 byte), 2 bytes per colour, 3 bytes
    header_size = 6 + 2 * num_colours
    image.fp.seek(-header_size, io.SEEK_CUR)
    return image.fp.read(header_size)[2] != num_colours


def _to_rgb(image: Image.Image, factors: tuple[int, int]) -> Image.Image:
    """Convert a picture to RGB and divide its width and height by factors.

    The picture is converted in horizontal strips, so only the result needs additional memory.
    """
    image.load()
    width, height = image.size
    across, down = factors
    # Pillow's conversion would clip integers of 16 or 32 bits and floats to white.
    is_deep = image.mode.startswith(("I", "F"))
    low, high = 0.0, 65_535.0
    if is_deep and not image.mode.startswith("I;16"):
        low, high = cast("tuple[float, float]", image.getextrema())
        if not math.isfinite(high - low):
            raise ValueError("not all of its values are numbers")
    rgb = Image.new("RGB", (-(-width // across), -(-height // down)))
    strip_height = max(1, STRIP_PIXELS // (width * down)) * down
    for top in range(0, height, strip_height):
        strip = image.crop((0, top, width, min(height, top + strip_height)))
        if is_deep:  # low .. high becomes 0 .. 255
            values = (np.asarray(strip).astype(np.float64) - low) * (255 / ((high - low) or 1))
            strip = Image.fromarray(values.round().astype(np.uint8))
        elif image.has_transparency_data:
            strip = strip.convert("RGBA")
            strip = Image.alpha_composite(Image.new("RGBA", strip.size, "white"), strip)
        rgb.paste(strip.convert("RGB").reduce(factors), (0, top // down))
    return rgb


def image_type(path: Path) -> str:
    """Return the media type of a picture, such as ``image/jpeg``, from its header.

    Raises
    ------
    BadImage
        The file is missing or is not a picture.
    """
    with open_header(path, path) as image:
        media_type = cast("ImageFile.ImageFile", image).get_format_mimetype()
        return media_type or "application/octet-stream"


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
def without_warnings() -> Iterator[None]:
    """Silence Pillow's warnings about odd headers.

    Warning filters are global, and changing them is not thread-safe, so a lock is held. Only the
    reading of headers, which is quick, needs it; pixels are decoded in parallel.
    """
    with _changing_warnings, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
