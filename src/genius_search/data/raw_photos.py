"""Raw photos: the JPEG preview that cameras store in each raw file.

Raw data itself is not developed. A file of any camera contains JPEG pictures of several sizes,
wherever its format puts them; the largest one is the preview::

    IMG_1.CR2   header, EXIF   thumbnail 160 x 120   preview 5472 x 3648   raw data

Orientation, time, camera and place are in the header (TIFF, or boxes of TIFF in ``.cr3``). They are
copied into the preview, which is then read like any photo.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from PIL import ExifTags, Image

from genius_search.errors import BadImage

RAW_SUFFIXES: Final = frozenset(
    {".cr2", ".cr3", ".nef", ".nrw", ".arw", ".dng", ".orf", ".rw2", ".raf", ".pef", ".srw"}
)
"""Endings of raw photos."""
MIN_PREVIEW_SIDE: Final = 256
"""Minimum length of a preview's shorter side; smaller pictures are thumbnails."""
MAX_RAW_BYTES: Final = 1 << 30
MAX_PREVIEW_BYTES: Final = 1 << 26
MAX_JPEG_STARTS: Final = 10_000
"""Maximum number of places that are looked at, since raw data may look like the start of a JPEG."""
MAX_JPEG_SEGMENTS: Final = 200
"""Maximum number of segments before the pixels of a JPEG."""
MAX_SEGMENT_BYTES: Final = 0xFFFD
"""Maximum size of a segment's contents, whose length with its two bytes is stored in two bytes."""
_HEADER_BYTES: Final = 1 << 18
"""Size of the beginning of a raw file in which EXIF data is looked for."""
_JPEG_START: Final = b"\xff\xd8\xff"
_TIFF_STARTS: Final = {
    b"II*\0": b"II*\0",
    b"MM\0*": b"MM\0*",
    b"IIRO": b"II*\0",  # Olympus
    b"IIRS": b"II*\0",
    b"MMOR": b"MM\0*",
    b"IIU\0": b"II*\0",  # Panasonic
}
"""The first bytes of headers, and those of TIFF for which they stand."""
_CANON_BOXES: Final = (b"CMT1", b"CMT2", b"CMT4")
"""Boxes of ``.cr3`` files with the main, EXIF and GPS tags, each as TIFF."""
_FRAME_MARKERS: Final = (0xC0, 0xC1, 0xC2)
"""Markers of JPEG frames that Pillow decodes; raw data may be in a lossless frame (0xC3)."""
_MAIN_TAGS: Final = (
    ExifTags.Base.Orientation,
    ExifTags.Base.Make,
    ExifTags.Base.Model,
    ExifTags.Base.DateTime,
    ExifTags.Base.ImageDescription,
)
_EXIF_TAGS: Final = (ExifTags.Base.DateTimeOriginal, ExifTags.Base.DateTimeDigitized)


class Preview(NamedTuple):
    """The preview of a raw photo."""

    jpeg: bytes
    header: bytes
    """The beginning of the raw file, if the preview has no EXIF data."""


class _Jpeg(NamedTuple):
    """A JPEG inside another file."""

    start: int
    pixels_start: int
    """Position after the header of the first scan."""
    num_pixels: int
    has_exif: bool


def find_preview(path: Path) -> Preview:
    """Return the largest JPEG in a raw photo.

    Raises
    ------
    BadImage
        The file cannot be read, or has no preview.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if len(data) > MAX_RAW_BYTES:
                raise BadImage(path, f"has more than {MAX_RAW_BYTES:,} bytes")
            largest = max(_jpegs(data), key=lambda jpeg: jpeg.num_pixels, default=None)
            if largest is None:
                raise BadImage(
                    path, "is a raw photo without a preview; develop it, and export it as JPEG"
                )
            end = data.find(b"\xff\xd9", largest.pixels_start) + 2
            end = min(end if end > 1 else len(data), largest.start + MAX_PREVIEW_BYTES)
            header = b"" if largest.has_exif else data[:_HEADER_BYTES]
            return Preview(data[largest.start : end], header)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadImage(path, f"cannot be read: {reason}") from None


def _jpegs(data: mmap.mmap) -> Iterator[_Jpeg]:
    """Yield the JPEG pictures in a file that are large enough for a preview."""
    position = data.find(_JPEG_START)
    for _ in range(MAX_JPEG_STARTS):
        if position < 0:
            return
        jpeg = _read_jpeg_header(data, position)
        if jpeg is not None:
            yield jpeg
        position = data.find(_JPEG_START, position + 1)


def _read_jpeg_header(data: mmap.mmap, start: int) -> _Jpeg | None:
    """Return a JPEG by its segments up to the pixels; None if it is none, or a thumbnail."""
    position = start + 2
    num_pixels = 0
    has_exif = False
    for _ in range(MAX_JPEG_SEGMENTS):
        # A segment: 0xFF, its marker, the length of the remainder in two bytes, contents
        header = data[position : position + 4]
        if len(header) < 4 or header[0] != 0xFF or header[1] < 0xC0:
            return None
        marker, length = struct.unpack(">xBH", header)
        if marker in _FRAME_MARKERS and data[position + 4 : position + 5] == b"\x08":  # bits
            height, width = struct.unpack(">HH", data[position + 5 : position + 9])
            num_pixels = height * width if min(height, width) >= MIN_PREVIEW_SIDE else 0
        has_exif = has_exif or data[position + 4 : position + 10] == b"Exif\0\0"
        position += 2 + length
        if marker == 0xDA:  # the header of a scan
            return _Jpeg(start, position, num_pixels, has_exif) if num_pixels else None
    return None


def with_tags(preview: Preview) -> bytes:
    """Return a JPEG with the tags in the header of its raw file, as its first segment.

    Damaged tags are left out; Pillow may warn of them.
    """
    jpeg = preview.jpeg
    tags = Image.Exif()
    for block in _tiff_blocks(preview.header):
        source = Image.Exif()
        with contextlib.suppress(Exception):  # damaged tags raise anything
            source.load(b"Exif\0\0" + block)
            _copy_tags(source, tags)
    try:
        segment = tags.tobytes()
    except Exception:  # noqa: BLE001  tags of wrong types raise anything
        return jpeg
    if not preview.header or len(segment) > MAX_SEGMENT_BYTES:
        return jpeg
    return jpeg[:2] + struct.pack(">HH", 0xFFE1, len(segment) + 2) + segment + jpeg[2:]


def _tiff_blocks(header: bytes) -> Iterator[bytes]:
    """Yield the TIFF data in a header, with the first bytes that Pillow expects."""
    if header[:4] in _TIFF_STARTS:
        yield _TIFF_STARTS[header[:4]] + header[4:]
    elif header[4:8] == b"ftyp":
        for name in _CANON_BOXES:
            position = header.find(name)
            if position >= 0:
                yield header[position + 4 :]


def _copy_tags(source: Image.Exif, target: Image.Exif) -> None:
    """Copy orientation, time, camera, description and place."""
    exif = source.get_ifd(ExifTags.IFD.Exif)
    for tag in _MAIN_TAGS:
        if tag in source:
            target.setdefault(tag, source[tag])
    for tag in _EXIF_TAGS:
        value = exif.get(tag, source.get(tag))  # in .cr3 files, in a block without a directory
        if value is not None:
            target.get_ifd(ExifTags.IFD.Exif)[tag] = value
    gps = source.get_ifd(ExifTags.IFD.GPSInfo)
    if not gps and {ExifTags.GPS.GPSLatitude, ExifTags.GPS.GPSLongitude} <= set(source):
        gps = dict(source)
    if gps:
        target.get_ifd(ExifTags.IFD.GPSInfo).update(gps)
