"""Pictures of requests and thumbnails of items. All of this runs in threads."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final

from PIL import Image, PngImagePlugin

from genius_search.data.images import MAX_EXIF_BYTES, SHORTEST_SIDE, encode_jpeg, open_image, read_image
from genius_search.errors import BadImage
from genius_search.serve.problems import Problem
from genius_search.serve.schemas import PICTURE_BYTES, PICTURE_PIXELS

# Of texts in a picture; 64 MB by default, each up to four times in memory.
PngImagePlugin.MAX_TEXT_MEMORY = 4 << 20


def _load_small_exif(
    exif: Image.Exif, data: bytes, load: Callable[[Image.Exif, bytes], None] = Image.Exif.load
) -> None:
    load(exif, data if len(data) <= MAX_EXIF_BYTES else b"")


# Pillow reads some tags already when it opens a JPEG.
Image.Exif.load = _load_small_exif  # type: ignore[assignment, method-assign]

THUMBNAILS_KEPT: Final = 512
QUALITY: Final = 85


def decode(data: bytes) -> Image.Image:
    """Decode a picture of a request, no larger than the encoder needs.

    Raises
    ------
    Problem
        It has too many bytes, or is an AVIF: such a file may contain pictures of any size, whatever its
        header says, and their decoder cannot be told a limit.
    BadImage
        It is no picture, is damaged, or has too many pixels.
    """
    if len(data) > PICTURE_BYTES:
        raise Problem(413, f"image: it has more than {PICTURE_BYTES:,} bytes; send a smaller one")
    if _is_avif(data):
        raise Problem(422, "image: AVIF is not accepted here; save the picture as JPEG")
    try:
        return read_image(data, name="image", max_pixels=PICTURE_PIXELS, shortest_side=SHORTEST_SIDE)
    except BadImage as error:  # its traceback leads back to it, and would keep the picture in memory
        raise error.with_traceback(None) from None


def _is_avif(data: bytes) -> bool:
    if data[4:8] == b"ftyp":
        with contextlib.suppress(Exception), Image.open(io.BytesIO(data), formats=["AVIF"]):
            return True  # only its header was read
    return False


def draw_thumbnail(path: Path, size: int, known_tag: str = "") -> tuple[str, bytes]:
    """Return the ETag and the JPEG of a picture, at most ``size`` pixels on its longer side.

    It is re-encoded and has no EXIF data. The bytes are empty if ``known_tag`` contains the tag.
    """
    try:
        status = path.stat()
        version = (str(path), status.st_size, status.st_mtime_ns, size)
        tag = f'"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}"'
        return tag, b"" if tag in known_tag else _draw(*version)
    except (OSError, BadImage):
        raise Problem(404, "the picture of this item is gone or cannot be read") from None


@lru_cache(THUMBNAILS_KEPT)
def _draw(path: str, _bytes: int, _mtime_ns: int, size: int) -> bytes:
    picture = open_image(Path(path), shortest_side=size)
    picture.thumbnail((size, size))
    return encode_jpeg(picture, quality=QUALITY)
