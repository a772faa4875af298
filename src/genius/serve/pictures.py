"""Pictures in and out: what is sent is decoded within limits, what is shown is drawn anew and small.

A picture of the index never leaves it as the file it is: a thumbnail has no EXIF, and nothing else that the
file may hide.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from PIL import Image

from genius.data.images import open_image, read_image
from genius.errors import BadImage
from genius.serve import limits
from genius.serve.problems import Problem
from genius.serve.refused import Overloaded
from genius.stages.embed import SHORTEST_SIDE

T = TypeVar("T")

THREADS: Final = 2
"""Pictures that are decoded at a time: each may take 100 MB."""
WAITING: Final = 256
CACHE_BYTES: Final = 64 << 20
"""Of thumbnails."""
QUALITY: Final = 85
_DATA_URL: Final = re.compile(r"data:[\w.+-]*/?[\w.+-]*(;[\w.+=-]+)*;base64,", re.ASCII | re.IGNORECASE)
_OTHER_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.ASCII | re.IGNORECASE)


class Thumbnail(NamedTuple):
    """A small JPEG."""

    data: bytes
    tag: str
    """Its ETag."""


class Pictures:
    """Decodes and draws, a few pictures at a time, beside the event loop."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pictures")
        self._waiting = 0
        self._cache: OrderedDict[tuple[Path, int, int, int], Thumbnail] = OrderedDict()
        self._cached_bytes = 0

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def decode(self, data: bytes) -> Image.Image:
        """A picture that somebody sent, no larger than an encoder wants it.

        Raises
        ------
        BadImage
            it is none, or it would have too many pixels.
        """
        return await self._run(lambda: _decode(data))

    async def thumbnail(self, path: Path, size: int) -> Thumbnail:
        """A picture of the index; its longer side is ``size`` at most.

        Raises
        ------
        Problem
            it cannot be read any more.
        """
        try:
            status = await self._run(path.stat)
        except OSError:
            raise _gone() from None
        key = (path, status.st_size, status.st_mtime_ns, size)
        found = self._cache.get(key)
        if found is None:
            found = await self._run(lambda: _draw(path, size))
            self._keep(key, found)
        self._cache.move_to_end(key)
        return found

    def _keep(self, key: tuple[Path, int, int, int], found: Thumbnail) -> None:
        if key not in self._cache:
            self._cache[key] = found
            self._cached_bytes += len(found.data)
        while self._cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self._cached_bytes -= len(self._cache.popitem(last=False)[1].data)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= WAITING:
            raise Overloaded("too many pictures are being read; try again", retry_after_seconds=1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1


def from_base64(text: str) -> bytes:
    """The bytes of a picture in base64, or in a data: URL.

    Raises
    ------
    Problem
        it is neither, or too large.
    """
    url = _DATA_URL.match(text[:200])
    if url is None and _OTHER_URL.match(text[:200]):
        raise Problem(
            422, "image: URLs are not fetched; send the picture itself, in base64 or as a data: URL"
        )
    try:
        data = base64.b64decode(text[url.end() if url else 0 :], validate=True)
    except (binascii.Error, ValueError):
        raise Problem(
            422, "image: it is not base64; send the picture's bytes in base64, or use multipart"
        ) from None
    if len(data) > limits.PICTURE_BYTES:
        raise too_large()
    return data


def too_large() -> Problem:
    """A picture has too many bytes."""
    return Problem(413, f"image: it has more than {limits.PICTURE_BYTES:,} bytes; send a smaller one")


def _decode(data: bytes) -> Image.Image:
    return read_image(data, name="image", max_pixels=limits.PICTURE_PIXELS, shortest_side=SHORTEST_SIDE)


def _draw(path: Path, size: int) -> Thumbnail:
    try:
        picture = open_image(path, shortest_side=size)
    except BadImage:
        raise _gone() from None
    picture.thumbnail((size, size))
    kept = io.BytesIO()
    picture.save(kept, "JPEG", quality=QUALITY, optimize=True)
    data = kept.getvalue()
    return Thumbnail(data, f'"{hashlib.sha256(data).hexdigest()[:32]}"')


def _gone() -> Problem:
    return Problem(404, "the picture of this item is not there any more, or cannot be read")
