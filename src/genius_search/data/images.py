"""Reading images as upright RGB at a bounded size, with clear errors for unreadable ones.

Photographs in the wild may be rotated, grey, transparent, animated, truncated, empty or enormous.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import (
    BITSPERSAMPLE,
    IMAGELENGTH,
    IMAGEWIDTH,
    ROWSPERSTRIP,
    TILELENGTH,
    TILEWIDTH,
    TiffImageFile,
)
from PIL.WebPImagePlugin import WebPImageFile

from genius_search.errors import BadImage

SHORTEST_SIDE: Final = 256
"""Images are decoded at no less than this size in pixels, at which M-BEIR stores them (deviation 22)."""
MAX_PIXELS: Final = 50_000_000
"""Pictures that would decode to more pixels than this are refused (200 MB as RGB)."""
MAX_SIDE: Final = 100_000
"""Longer pictures are refused."""
MAX_RATIO: Final = 32
"""The longer side of a reduced picture is at most so many times the wanted shortest side."""
MOST_BYTES_PER_PIXEL: Final = 7
"""Pictures are refused whose decoding takes more than so many bytes for each pixel that is allowed."""
MAX_TAG_VALUES: Final = 200_000
"""Numbers in the tags of a TIFF, such as the places of its strips, of which Pillow makes Python objects."""
MAX_EXIF_BYTES: Final = 1 << 20
"""Larger EXIF data is ignored."""
STRIP_PIXELS: Final = 1 << 20
"""Pixels that are converted at a time."""


def _register_heif() -> bool:
    """Let Pillow read HEIC, the format of iPhones, if the extra ``photos`` is installed."""
    try:
        from pillow_heif import register_heif_opener  # noqa: PLC0415  an extra
    except ImportError:
        return False
    register_heif_opener(thumbnails=False)  # they would be decoded before their size is looked at
    return True


HEIF_SUFFIXES: Final = frozenset({".heic", ".heif", ".hif"})
NEEDS_PHOTOS: Final = "needs the extra photos: pip install 'genius-search[photos]'; or convert it to JPEG"
_FORMATS: Final = (
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

IMAGE_SUFFIXES: Final = frozenset(
    {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"}
    | ({".avif"} if "AVIF" in _FORMATS else set())
    | (HEIF_SUFFIXES if "HEIF" in _FORMATS else set())
)
"""Usual endings of the files that :func:`open_image` reads."""

_DECODER_BYTES: Final = {"WEBP": 12, "AVIF": 13, "HEIF": 7}
"""Bytes per pixel of decoders that make several copies of a picture; measured with Pillow 13."""

_BYTES_IN_TIFF: Final = frozenset({1, 2, 6, 7})
"""Types of tags that are not lists of numbers: bytes, text, signed bytes and anything else."""
_MORE_TAGS: Final = frozenset({ExifTags.IFD.Exif, ExifTags.IFD.GPSInfo, ExifTags.IFD.Interop})

_GIVEN: Final = Path("the image")
"""What errors call an image that is not a file."""

_WARNINGS_LOCK = threading.Lock()


class _Budget:
    """An amount of memory that threads share. Who wants more than is left waits, and the next behind him.

    Who wants more than all of it gets it alone.
    """

    def __init__(self, size: int) -> None:
        self._size = self._left = size
        self._turn = threading.Lock()
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, wanted: int) -> Iterator[None]:
        wanted = min(wanted, self._size)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._left >= wanted)
            self._left -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._left += wanted
                self._changed.notify_all()


DECODING: Final = _Budget(100 << 20)
"""Memory of pictures that are decoded at the same time."""


class TooManyPixels(BadImage):
    """The image has more pixels than allowed."""


def is_image_file(path: Path) -> bool:
    """Return whether a file has an ending that :func:`open_image` supports."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def open_image(path: Path, *, max_pixels: int = MAX_PIXELS, shortest_side: int | None = None) -> Image.Image:
    """Read an image as upright RGB, with transparency on white; of an animation, the first frame.

    Parameters
    ----------
    max_pixels
        refuse images that would decode to more pixels. Pillow's limit (178 million pixels in the file)
        applies as well.
    shortest_side
        read the image at a half, a quarter or an eighth of its size if its shorter side keeps at least this
        many pixels. A JPEG is decoded so, in a fraction of the time and memory: a 100-megapixel photograph
        can be read even if its full size would be refused. The longer side is halved further, until it has at
        most :data:`MAX_RATIO` times as many.

    Raises
    ------
    TooManyPixels
        The image has more than ``max_pixels``.
    BadImage
        The file is missing, empty, damaged, or not an image.
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
    """Read an image from bytes like :func:`open_image`; errors refer to it by ``name``."""
    if not data:
        raise BadImage(Path(name), "is empty (0 bytes)")
    return _read(Path(name), io.BytesIO(data), max_pixels, shortest_side)


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
            return _upright(given)
        case bytes():
            return read_image(given, name=_GIVEN.name, shortest_side=shortest_side)
        case str() if re.match(r"[a-z][a-z0-9+.-]+://", given, re.IGNORECASE):
            raise BadImage(_GIVEN, f"is a URL, {given[:80]}; download it, and give its bytes or its path")
        case str() | Path():
            return open_image(Path(given), shortest_side=shortest_side)
        case np.ndarray():
            channels = given.shape[2:]
            if given.dtype != np.uint8 or given.ndim not in (2, 3) or channels not in ((), (3,), (4,)):
                found = f"{given.dtype} of shape {given.shape}"
                raise BadImage(_GIVEN, f"is an array of {found}, expected uint8 of shape (height, width, 3)")
            return _upright(Image.fromarray(given))
        case _:
            kind = f"{type(given).__module__}.{type(given).__qualname__}"
            raise BadImage(
                _GIVEN, f"is of type {kind}; expected a path, bytes, a Pillow image or a NumPy array"
            )


def _upright(given: Image.Image) -> Image.Image:
    """Return an image of Pillow, which may not have been read yet, as upright RGB."""
    if not math.prod(given.size):
        raise BadImage(_GIVEN, f"has no pixels: it is {given.width} x {given.height}")
    if math.prod(given.size) > MAX_PIXELS:
        raise TooManyPixels(_GIVEN, _too_large(given.size, MAX_PIXELS))
    try:
        return _to_rgb(ImageOps.exif_transpose(given))
    except Exception as error:  # noqa: BLE001  as in _read
        raise BadImage(_GIVEN, f"cannot be read: {_describe(error)}") from None


def encode_jpeg(picture: Image.Image, *, quality: int) -> bytes:
    """Return an RGB picture as JPEG, without EXIF data."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, optimize=True, exif=b"")
    return file.getvalue()


def _read(
    path: Path, file: io.BufferedReader | io.BytesIO, max_pixels: int, shortest_side: int | None
) -> Image.Image:
    try:
        _check_tags(path, file)
        with _quiet():
            opened = Image.open(file, formats=_FORMATS)
        with opened:
            return _decode(path, opened, max_pixels, shortest_side)
    except BadImage:
        raise
    except Image.DecompressionBombError:
        raise TooManyPixels(path, _too_large(None, max_pixels)) from None
    except Exception as error:  # noqa: BLE001  (decoders raise nearly anything on hostile bytes)
        raise BadImage(path, _reason(error)) from None


def _check_tags(path: Path, file: io.BufferedReader | io.BytesIO) -> None:
    """Raise :class:`BadImage` for a TIFF with more than :data:`MAX_TAG_VALUES` numbers in its tags."""
    start = file.read(16)
    file.seek(0)
    if start[:2] not in (b"II", b"MM"):
        return
    order = "<" if start[:2] == b"II" else ">"
    entry, address = ("HHQQ", "Q") if 43 in start[2:4] else ("HHII", "I")
    count = "Q" if address == "Q" else "H"

    total = 0

    def check(place: int, *, is_first: bool) -> None:
        nonlocal total
        file.seek(place)
        (entries,) = struct.unpack(order + count, file.read(struct.calcsize(order + count)))
        size = struct.calcsize(order + entry)
        for tag, kind, values, value in struct.iter_unpack(order + entry, file.read(entries * size)):
            total += 0 if kind in _BYTES_IN_TIFF else values
            if total > MAX_TAG_VALUES:
                most = f"at most {MAX_TAG_VALUES:,} are allowed"
                raise BadImage(path, f"the tags of this TIFF have {total:,} values; {most}. Save it again")
            if tag in _MORE_TAGS and is_first:
                check(value, is_first=False)

    with contextlib.suppress(struct.error, OverflowError):  # damaged: Pillow will say what is wrong
        check(*struct.unpack_from(order + address, start, struct.calcsize(address)), is_first=True)
    file.seek(0)


def _read_exif(opened: Image.Image) -> Image.Exif:
    return Image.Exif() if len(opened.info.get("exif", b"")) > MAX_EXIF_BYTES else opened.getexif()


def _decode(path: Path, opened: Image.Image, max_pixels: int, shortest_side: int | None) -> Image.Image:
    full_size = opened.size
    if shortest_side is not None:
        opened.draft(None, (shortest_side, shortest_side))
    factor = 1
    if shortest_side is not None and opened.size == full_size:
        while factor < 8 and min(full_size) >= 2 * factor * shortest_side:
            factor *= 2
    factors = factor, factor
    if shortest_side is not None:
        factors = (
            _at_most(opened.width, factor, shortest_side),
            _at_most(opened.height, factor, shortest_side),
        )
    # A JPEG in several scans is held in memory at full size before it can be reduced.
    in_scans = isinstance(opened, JpegImageFile) and _has_several_scans(opened)
    width, height = full_size if in_scans else opened.size
    if width * height > max_pixels:
        raise TooManyPixels(path, _too_large(full_size, max_pixels))
    if max(full_size) > MAX_SIDE:
        raise TooManyPixels(path, f"is {max(full_size):,} pixels long; at most {MAX_SIDE:,} are allowed")
    needed = _decoding_bytes(opened, full_size if in_scans else (0, 0))
    if needed > MOST_BYTES_PER_PIXEL * max_pixels:
        raise TooManyPixels(path, _takes_too_much(opened, full_size, needed, max_pixels))
    with DECODING.hold(needed + 4 * math.prod(opened.size) // math.prod(factors)):
        whole = _to_rgb(_load(opened), factors)
        with _quiet(), contextlib.suppress(Exception):  # Pillow raises nearly anything on damaged EXIF data
            whole.getexif()[ExifTags.Base.Orientation] = _read_exif(opened)[ExifTags.Base.Orientation]
        opened.close()  # frees its pixels
    ImageOps.exif_transpose(whole, in_place=True)
    return whole


def _load(opened: Image.Image) -> Image.Image:
    """Return an image with its pixels."""
    if opened.format == "TIFF":
        with _quiet():  # its decoder reads tags while it decodes, and warns about them
            opened.load()
    elif isinstance(opened, WebPImageFile):  # load() would keep the decoder's two copies, and make another
        pixels = opened._get_next()[0]  # noqa: SLF001
        opened._decoder = None  # noqa: SLF001
        return Image.frombuffer(opened.rawmode, opened.size, pixels, "raw", opened.rawmode, 0, 1)
    else:
        opened.load()
    return opened


def _at_most(side: int, factor: int, shortest_side: int) -> int:
    """Double a factor until a side divided by it is at most :data:`MAX_RATIO` times the shortest."""
    while side > MAX_RATIO * shortest_side * factor:
        factor *= 2
    return factor


def _has_several_scans(opened: JpegImageFile) -> bool:
    """Return whether a JPEG is progressive, or its first scan has only some of its colours."""
    file = opened.fp
    if "progressive" in opened.info or file is None:
        return True
    before = file.tell()
    try:
        file.seek(2)
        while True:
            while file.read(1) not in (b"\xff", b""):
                pass
            kind = b"\xff"
            while kind == b"\xff":
                kind = file.read(1)
            if not kind:
                return True
            if kind[0] in (0x00, 0x01, *range(0xD0, 0xD9)):  # without a length
                continue
            length = int.from_bytes(file.read(2))
            if kind[0] == 0xDA:  # start of scan
                return file.read(1)[:1] != bytes([len(opened.getbands())])
            file.seek(max(0, length - 2), io.SEEK_CUR)
    finally:
        file.seek(before)


def _decoding_bytes(opened: Image.Image, in_scans: tuple[int, int]) -> int:
    """Estimate the memory that decoding takes; ``in_scans`` is the full size of a JPEG in several scans."""
    width, height = opened.size
    each = 1 if opened.mode in ("1", "L", "P") else 2 if opened.mode.startswith("I;16") else 4
    each = _DECODER_BYTES.get(opened.format or "", each)
    total = width * height * each
    total += 2 * len(opened.getbands()) * in_scans[0] * in_scans[1]  # coefficients
    if isinstance(opened, TiffImageFile):  # read by tiles or strips, of which one is in memory; then turned
        tags = opened.tag_v2
        width, height = tags[IMAGEWIDTH], tags[IMAGELENGTH]
        area = width * min(height, tags.get(ROWSPERSTRIP, height))
        if TILEWIDTH in tags:
            area = tags[TILEWIDTH] * tags[TILELENGTH]
        total += area * sum(tags.get(BITSPERSAMPLE, (1,))) // 8
        total += 4 * width * height if tags.get(ExifTags.Base.Orientation, 1) != 1 else 0
    return total


def _to_rgb(opened: Image.Image, factors: tuple[int, int] = (1, 1)) -> Image.Image:
    """Convert to RGB and divide the size, strip by strip, so that only the result is added to the memory."""
    convert = _converter(opened)
    width, height = opened.size
    across, down = factors
    whole = Image.new("RGB", (-(-width // across), -(-height // down)))
    rows = max(1, STRIP_PIXELS // (width * down)) * down
    for top in range(0, height, rows):
        strip = opened.crop((0, top, width, min(height, top + rows)))
        whole.paste(convert(strip).reduce(factors), (0, top // down))
    return whole


def _converter(opened: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """Return a function that converts strips of an image to RGB."""
    if opened.mode.startswith(("I", "F")):
        return _grey_converter(opened)
    if opened.has_transparency_data:

        def on_white(strip: Image.Image) -> Image.Image:
            layer = strip.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")

        return on_white
    return lambda strip: strip.convert("RGB")


def _grey_converter(opened: Image.Image) -> Callable[[Image.Image], Image.Image]:
    """Scale 16-bit, 32-bit or float greyscale to 8 bits; Pillow's conversion would clip to white."""
    start, full = 0.0, 65535.0
    if not opened.mode.startswith("I;16"):
        low, high = cast("tuple[float, float]", opened.getextrema())
        if not math.isfinite(high - low):
            raise ValueError("not all of its values are numbers")
        usual = (1.0, 255.0) if opened.mode == "F" else (255.0, 65535.0)
        full = next((most for most in usual if high <= most), high)
        if low < 0 or full == high:  # unknown scale: stretch the actual range
            start, full = low, high - low

    def convert(strip: Image.Image) -> Image.Image:
        values = np.asarray(strip).astype(np.float64)
        return Image.fromarray(((values - start) * (255.0 / full)).round().astype(np.uint8)).convert("RGB")

    return convert


def image_type(path: Path) -> str:
    """Return the media type of a picture, such as ``image/jpeg``. Only its header is read.

    Raises
    ------
    BadImage
        The file is missing or no picture.
    """
    require_file(path)
    with path.open("rb") as file:
        _check_tags(path, file)
        try:
            with _quiet():
                kind = Image.open(file, formats=_FORMATS).get_format_mimetype()
        except Exception as error:  # noqa: BLE001  as in _read
            raise BadImage(path, _reason(error)) from None
    return kind or "application/octet-stream"


def read_photo_fields(path: Path) -> dict[str, str | float]:
    """Read when, with which camera and where a picture was taken. Only its header is read.

    Returns
    -------
    Those of ``taken`` (``2024-05-01T12:30:00``, local time), ``camera``, ``latitude`` and ``longitude``
    (degrees) that its EXIF data contain; nothing if they are damaged.
    """
    fields: dict[str, str | float | None] = {}
    with contextlib.suppress(Exception), path.open("rb") as file, _quiet():
        _check_tags(path, file)
        opened = Image.open(file, formats=_FORMATS)
        if opened.format == "PNG" and "exif" not in opened.info:
            return {}  # Pillow would decode the picture to look behind it
        exif = _read_exif(opened)
        fields["camera"] = _camera(exif)
        fields["taken"] = _taken(exif.get_ifd(ExifTags.IFD.Exif))
        place = exif.get_ifd(ExifTags.IFD.GPSInfo)
        fields["latitude"] = _degrees(place, ExifTags.GPS.GPSLatitude, 90)
        fields["longitude"] = _degrees(place, ExifTags.GPS.GPSLongitude, 180)
    return {name: value for name, value in fields.items() if value is not None}


def _camera(exif: Mapping[int, Any]) -> str | None:
    make, model = (
        " ".join(str(exif.get(tag, "")).replace("\0", " ").split())[:80]
        for tag in (ExifTags.Base.Make, ExifTags.Base.Model)
    )
    if model.lower().startswith(make.lower()):
        return model or None
    return f"{make} {model}".strip()


def _taken(details: Mapping[int, Any]) -> str | None:
    for tag in (ExifTags.Base.DateTimeOriginal, ExifTags.Base.DateTimeDigitized):
        with contextlib.suppress(ValueError):  # some cameras write blanks or zeros
            return datetime.strptime(str(details.get(tag))[:19], "%Y:%m:%d %H:%M:%S").isoformat()  # noqa: DTZ007
    return None


def _degrees(place: Mapping[int, Any], tag: ExifTags.GPS, most: int) -> float | None:
    """Return a latitude or longitude in degrees; its direction has the tag before."""
    if tag not in place:
        return None
    degrees, minutes, seconds = map(float, place[tag])
    value = degrees + minutes / 60 + seconds / 3600
    if not abs(value) <= most:  # nor NaN
        return None
    return round(-value if str(place.get(tag - 1)).upper() in ("S", "W") else value, 6)


def require_file(path: Path) -> None:
    """Raise :class:`BadImage` if a file is missing or empty."""
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


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return f"is not a picture in a supported format ({', '.join(_FORMATS)}), or is damaged"
    if isinstance(error, MemoryError):
        return "is too large for this machine's memory"
    return f"is damaged: {_describe(error)}"


def _too_large(size: tuple[int, int] | None, max_pixels: int) -> str:
    if size is None:
        return f"has too many pixels to be opened safely; at most {max_pixels:,} are allowed"
    width, height = size
    return (
        f"is {width:,} x {height:,} = {width * height:,} pixels; at most {max_pixels:,} are allowed. "
        "Make it smaller"
    )


def _takes_too_much(opened: Image.Image, size: tuple[int, int], needed: int, max_pixels: int) -> str:
    most = f"at most {MOST_BYTES_PER_PIXEL * max_pixels / 1e6:,.0f} MB are allowed"
    return (
        f"is {size[0]:,} x {size[1]:,} pixels, and decoding this {opened.format} takes "
        f"{needed / 1e6:,.0f} MB; {most}. Make it smaller, or save it as JPEG"
    )


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Pillow's warnings about odd headers.

    Warning filters are global and changing them is not thread-safe, so a lock is held. Only the quick reading
    of headers needs it, so decoding still runs in parallel.
    """
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
