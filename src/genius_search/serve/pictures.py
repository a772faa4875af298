"""Decoding of images in requests and thumbnails of items, in a few threads."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
import re
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, TypeVar

import anyio.to_thread
from PIL import Image, PngImagePlugin

from genius_search.data.images import (
    DECODING,
    MAX_EXIF_BYTES,
    MOST_BYTES_PER_PIXEL,
    SHORTEST_SIDE,
    encode_jpeg,
    open_image,
    read_image,
)
from genius_search.errors import BadImage
from genius_search.serve import apart, limits
from genius_search.serve.engine import Overloaded
from genius_search.serve.guard import Problem

PngImagePlugin.MAX_TEXT_MEMORY = (
    4 << 20
)  # of texts in a picture; 64 MB by default, each up to four times in memory


def _load_small_exif(
    exif: Image.Exif, data: bytes, load: Callable[[Image.Exif, bytes], None] = Image.Exif.load
) -> None:
    load(exif, data if len(data) <= MAX_EXIF_BYTES else b"")


# Pillow reads some tags already when it opens a JPEG or AVIF.
Image.Exif.load = _load_small_exif  # type: ignore[assignment, method-assign]

Result = TypeVar("Result")

THREADS: Final = 2
"""Images decoded at a time, as far as their memory allows it (:mod:`genius_search.data.images`)."""
MAX_WAITING: Final = 256
APART_SECONDS: Final = 30.0
THUMBNAILS_KEPT: Final = 1024
QUALITY: Final = 85
_DATA_URL: Final = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w.+=-]+)*;base64,", re.ASCII | re.IGNORECASE)
_OTHER_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.ASCII | re.IGNORECASE)


class Pictures:
    """Decodes images and draws thumbnails outside the event loop."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(THREADS)

    async def decode(self, data: bytes) -> Image.Image:
        """Decode an image of a request, no larger than the encoder needs.

        Raises
        ------
        BadImage
            The data is no image, is damaged, or has too many pixels.
        """
        read = partial(
            read_image, name="image", max_pixels=limits.PICTURE_PIXELS, shortest_side=SHORTEST_SIDE
        )
        return await self._run(lambda: read(decode_apart(data) if is_avif(data) else data))

    async def thumbnail(self, path: Path, size: int, known_tag: str = "") -> tuple[str, bytes]:
        """Return the ETag and the JPEG of a picture, at most ``size`` pixels on its longer side.

        It is re-encoded and has no EXIF data. The bytes are empty if ``known_tag`` contains the tag.
        """

        def draw() -> tuple[str, bytes]:
            status = path.stat()
            version = (str(path), status.st_size, status.st_mtime_ns, size)
            tag = f'"{hashlib.sha256(repr(version).encode()).hexdigest()[:32]}"'
            return tag, b"" if tag in known_tag else _draw(*version)

        try:
            return await self._run(draw)
        except (OSError, BadImage):
            raise Problem(404, "the picture of this item is gone or cannot be read") from None

    async def _run(self, work: Callable[[], Result]) -> Result:
        if self._limiter.statistics().tasks_waiting >= MAX_WAITING:
            raise Overloaded("too many pictures are being read; try again", retry_after_seconds=1.0)
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._limiter)
        except BadImage as error:  # its traceback leads back to it, and would keep the picture in memory
            raise error.with_traceback(None) from None


def is_avif(data: bytes) -> bool:
    """Return whether this is an AVIF picture. Only its header is read."""
    if data[4:8] == b"ftyp":
        with contextlib.suppress(Exception), Image.open(io.BytesIO(data), formats=["AVIF"]):
            return True
    return False


def decode_apart(data: bytes) -> bytes:
    """Return an AVIF picture as a smaller PNG, made by :mod:`genius_search.serve.apart`.

    Raises
    ------
    BadImage
        It is damaged, or decoding it takes too much memory or time.
    """
    most = MOST_BYTES_PER_PIXEL * limits.PICTURE_PIXELS
    command = [sys.executable, "-P", apart.__file__, str(most), str(SHORTEST_SIDE)]
    with contextlib.suppress(subprocess.TimeoutExpired), DECODING.hold(most):
        done = subprocess.run(command, input=data, capture_output=True, timeout=APART_SECONDS, check=False)  # noqa: S603
        if done.returncode == 0:
            return done.stdout
    reason = f"is damaged, or decoding this AVIF takes more than {most / 1e6:,.0f} MB"
    raise BadImage(Path("image"), f"{reason}; make it smaller, or save it as JPEG")


def decode_base64(text: str) -> bytes:
    """Decode a picture given as base64 or as a ``data:`` URL.

    Raises
    ------
    Problem
        The text is neither, or too long.
    """
    url = _DATA_URL.match(text[:200])
    if url is None and _OTHER_URL.match(text[:200]):
        raise Problem(
            422, "image: URLs are not fetched; send the picture itself, in base64 or as a data: URL"
        )
    try:
        data = base64.b64decode(text[url.end() if url else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise Problem(422, "image: it is not base64; send the bytes of the picture in base64") from None
    if len(data) > limits.PICTURE_BYTES:
        raise Problem(413, f"image: it has more than {limits.PICTURE_BYTES:,} bytes; send a smaller one")
    return data


@lru_cache(THUMBNAILS_KEPT)
def _draw(path: str, _bytes: int, _mtime_ns: int, size: int) -> bytes:
    picture = open_image(Path(path), shortest_side=size)
    picture.thumbnail((size, size))
    return encode_jpeg(picture, quality=QUALITY)
