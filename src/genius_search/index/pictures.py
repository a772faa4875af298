"""Reading the files of pictures on their way into an index, each once.

One reading gives everything that an index needs::

    file --> bytes --> hash
    bytes --> header --> metadata: caption and fields
    header --> pixels, if the encoder reads pictures
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from PIL import Image

from genius_search.data.captions import Caption
from genius_search.data.images import (
    SHORTEST_SIDE,
    decode_image,
    is_raw_photo,
    is_video_file,
    open_header,
    require_file,
)
from genius_search.data.photo_metadata import read_metadata
from genius_search.data.video import open_still, probe_video, video_fields
from genius_search.errors import BadImage
from genius_search.index.items import Item
from genius_search.index.roots import hash_bytes, hash_picture

MAX_WHOLE_BYTES: Final = 64 << 20
"""Larger files are hashed and decoded in pieces, which opens them twice."""


class PictureFile(NamedTuple):
    """The hash, metadata and pixels of a picture, or of a video the frame that stands for it."""

    digest: str | None = None
    """Hash of the contents; None if the file cannot be read."""
    caption: Caption = Caption()
    pixels: Image.Image | None = None
    problem: BadImage | None = None
    """Why it is not a picture that can be opened, or decoded if its pixels were asked for."""


class PictureFiles:
    """Reads pictures, and remembers their hashes and metadata, but not their pixels."""

    def __init__(self) -> None:
        self._read: dict[Path, PictureFile] = {}

    def get(self, path: Path) -> PictureFile:
        """Return a picture without pixels; its file is read if it has not been read yet."""
        return self._read.get(path) or self.open(path, decodes=False)

    def digest(self, path: Path) -> str | None:
        """Return the hash of a picture's file."""
        return self.get(path).digest

    def open(self, path: Path, *, decodes: bool = True) -> PictureFile:
        """Read the file of a picture, with its pixels by default."""
        picture = read_picture(path, decodes=decodes)
        if not is_video_file(path):  # it gets another field once its frames are read
            self._read[path] = picture._replace(pixels=None)
        return picture


def is_video(item: Item) -> bool:
    """Return whether an item is a video that can be read."""
    return item.image is not None and is_video_file(Path(item.image))


def read_picture(path: Path, *, decodes: bool) -> PictureFile:
    """Read the file of a picture or video, with its pixels if ``decodes``."""
    if is_video_file(path):
        return _read_video(path, decodes=decodes)
    picture = PictureFile()
    try:
        require_file(path)
        if is_raw_photo(path) or path.stat().st_size > MAX_WHOLE_BYTES:
            source: Path | bytes = path
            picture = picture._replace(digest=hash_picture(path))
        else:
            source = path.read_bytes()
            picture = picture._replace(digest=hash_bytes(source))
        with open_header(source, path) as image:
            picture = picture._replace(caption=read_metadata(image))
            if decodes:
                pixels = decode_image(path, image, shortest_side=SHORTEST_SIDE)
                picture = picture._replace(pixels=pixels)
    except BadImage as error:
        return picture._replace(problem=error)
    except OSError as error:
        reason = f"is damaged or unreadable: {error.strerror or error}"
        return picture._replace(problem=BadImage(path, reason))
    return picture


def _read_video(path: Path, *, decodes: bool) -> PictureFile:
    """Read a video; its frames come from the cache of videos."""
    picture = PictureFile(hash_picture(path), Caption((), video_fields(path)))
    try:
        if decodes:
            return picture._replace(pixels=open_still(path, shortest_side=SHORTEST_SIDE))
        probe_video(path)
    except BadImage as error:
        return picture._replace(problem=error)
    return picture
