"""Metadata inside a picture file: EXIF, XMP and IPTC, which Pillow reads.

If several of the three contain a field, the first of them in this order is used.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

from PIL import ExifTags, Image, ImageFile, IptcImagePlugin

from genius_search.data.captions import Caption
from genius_search.data.images import open_header, without_warnings

_TAG: Final = ExifTags.Base


class _Tags(NamedTuple):
    """The names of a field in the three standards; earlier ones take precedence."""

    exif: tuple[int, ...] = ()
    xmp: tuple[str, ...] = ()
    iptc: int | None = None
    """Number of a data set in IPTC's record 2."""


_FIELDS: Final[dict[str, _Tags]] = {
    "description": _Tags(
        (_TAG.ImageDescription, _TAG.XPComment, _TAG.UserComment), ("description",), 120
    ),
    "title": _Tags((_TAG.XPTitle, _TAG.XPSubject), ("title", "Headline"), 5),
    "keywords": _Tags((_TAG.XPKeywords,), ("subject",), 25),
    "people": _Tags(xmp=("PersonInImage",)),
    "rating": _Tags((_TAG.Rating,), ("Rating",)),
    "city": _Tags(xmp=("City",), iptc=90),
    "country": _Tags(xmp=("Country",), iptc=101),
    "taken": _Tags(
        (_TAG.DateTimeOriginal, _TAG.DateTimeDigitized, _TAG.DateTime),
        ("DateTimeOriginal", "DateCreated", "CreateDate"),
        55,
    ),
    "latitude": _Tags(xmp=("GPSLatitude",)),
    "longitude": _Tags(xmp=("GPSLongitude",)),
}
_LIST_FIELDS: Final = ("keywords", "people")
_GPS_TAGS: Final = {"latitude": ExifTags.GPS.GPSLatitude, "longitude": ExifTags.GPS.GPSLongitude}
_CAMERA_DESCRIPTION: Final = re.compile(
    r"(?i).*digital camera|sony dsc|dcim\S*|exif_jpeg_picture|hdrpl|oznor\w*|[a-z]?dav|[srh]dr"
    r"|untitled"
)
"""Descriptions that cameras write into every photo."""
_Values: TypeAlias = Iterator[tuple[str, Iterable[str]]]
"""Names of fields, each with texts that may hold its value."""


def read_photo(path: Path) -> Caption:
    """Read the metadata of a photo from its header, without decoding its pixels.

    Returns
    -------
    Texts: the description (or else the title), and the keywords. Fields, if present: ``taken``
    (``2024-05-01T12:30:00``, local time), ``camera``, ``latitude`` and ``longitude`` (degrees),
    ``title``, ``keywords``, ``people``, ``rating``, ``city``, ``country``. Damaged metadata is
    ignored.
    """
    with contextlib.suppress(Exception), open_header(path, path) as image:
        return read_metadata(image)
    return Caption()


def read_metadata(image: Image.Image) -> Caption:
    """Read the metadata of a picture whose header has been read, as :func:`read_photo` does.

    The file stays at its position, where a decoder continues.
    """
    fields: dict[str, Any] = {}
    file = getattr(image, "fp", None)
    position = None if file is None else file.tell()
    for read in (_exif_values, _xmp_values, _iptc_values):
        with contextlib.suppress(Exception), without_warnings():
            _add_missing_fields(fields, read(image))
    if file is not None:
        file.seek(position)
    return _caption_from_fields(fields)


def read_xmp(data: bytes) -> Caption:
    """Read the contents of an XMP file.

    Raises
    ------
    ValueError, SyntaxError, LookupError, TypeError
        The data is not XMP.
    """
    fields: dict[str, Any] = {}
    image = Image.new("1", (1, 1))
    image.info["xmp"] = data
    _add_missing_fields(fields, _xmp_values(image))
    return _caption_from_fields(fields)


def _caption_from_fields(fields: dict[str, Any]) -> Caption:
    main_text = fields.pop("description", None) or fields.get("title")
    keywords = ", ".join(fields.get("keywords", ()))
    return Caption(tuple(filter(None, (main_text, keywords))), fields)


def _add_missing_fields(fields: dict[str, Any], values: _Values) -> None:
    """Add the values of fields that have no value yet."""
    for name, texts in values:
        parsed_values: list[Hashable] = []
        for text in texts:
            with contextlib.suppress(ValueError):  # some cameras write blanks or zeros
                value = _parse(name, text.replace("\0", " ").strip("\ufeff \t\r\n"))
                if value not in ("", None) and value not in parsed_values:
                    parsed_values.append(value)
        if parsed_values:
            fields.setdefault(name, parsed_values if name in _LIST_FIELDS else parsed_values[0])


def _parse(name: str, text: str) -> Hashable:
    """Return the value of a field, or None if the text means "unknown".

    Raises
    ------
    ValueError
        The text is not a value of this field.
    """
    match name:
        case "taken":  # 2024:05:01 12:30:00 in EXIF -> 2024-05-01T12:30:00
            iso = re.sub(r"^(\d{4}):(\d\d):(\d\d) (\S{8}).*", r"\1-\2-\3T\4", text, flags=re.DOTALL)
            return datetime.fromisoformat(iso).isoformat()
        case "rating":
            return int(float(text)) or None
        case "latitude" | "longitude":
            return _parse_degrees(text, limit=90 if name == "latitude" else 180)
        case "description" if _CAMERA_DESCRIPTION.fullmatch(text):
            return None
    return text


def _parse_degrees(text: str, *, limit: int) -> float | None:
    """Parse degrees, minutes and seconds: ``33,51.5S`` and ``33,51,30S`` are −33.858333."""
    degrees: float = 0
    for power, part in enumerate(text[:-1].split(",")):
        degrees += float(part) / 60**power
    if not abs(degrees) <= limit:  # too large, or NaN
        return None
    return round(-degrees if text[-1].upper() in "SW" else degrees, 6)


# EXIF: numbered tags, whose texts have a different encoding for each tag.


def _exif_values(image: Image.Image) -> _Values:
    if image.format == "PNG" and "exif" not in image.info:
        return  # Pillow would decode all pixels to look for EXIF data after them
    exif = image.getexif()
    yield "camera", [_camera(exif)]
    tags = {**exif, **exif.get_ifd(ExifTags.IFD.Exif)}
    byte_order = "be" if exif.endian == ">" else "le"
    for name, names in _FIELDS.items():
        for tag in names.exif:
            text = _exif_text(tag, tags.get(tag), byte_order)
            yield name, text.split(";") if name in _LIST_FIELDS else [text]
    gps = exif.get_ifd(ExifTags.IFD.GPSInfo)
    for name, tag in _GPS_TAGS.items():
        if tag in gps:
            # Tag 2 holds (33, 51, 30), and tag 1 "S"; together they are "33.0,51.0,30.0S".
            numbers = ",".join(str(float(part)) for part in gps[tag])
            direction = str(gps.get(tag - 1, "N"))[:1]
            yield name, [numbers + direction]


def _exif_text(tag: int, value: object, byte_order: str) -> str:
    match value:
        case str():  # Pillow decodes as Latin-1, but most programs write UTF-8
            return _decode(value.encode("latin-1", errors="ignore"))
        case bytes() if tag == _TAG.UserComment:  # the first 8 bytes name the encoding
            match value[:8].rstrip(b"\0 ").upper():
                case b"UNICODE":
                    return _decode_utf16(value[8:], byte_order)
                case b"ASCII" | b"":
                    return _decode(value[8:])
        case bytes():  # the tags XPTitle, XPComment and so on of Windows
            return _decode_utf16(value, "le")
        case int() if tag == _TAG.Rating:
            return str(value)
    return ""


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def _decode_utf16(data: bytes, byte_order: str) -> str:
    """Decode UTF-16, in a byte order that the data itself may contradict.

    Programs disagree about the byte order. Most characters of European languages have a zero byte:
    "ab" is ``00 61 00 62`` in big-endian order and ``61 00 62 00`` in little-endian order. So the
    side with more zeros decides. Padding is removed: NULs, or pairs of blanks, which are daggers
    (U+2020) in UTF-16.
    """
    data = data[: len(data) // 2 * 2]
    first_zeros, second_zeros = data[::2].count(0), data[1::2].count(0)
    if first_zeros != second_zeros:
        byte_order = "be" if first_zeros > second_zeros else "le"
    has_mark = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    encoding = "utf-16" if has_mark else f"utf-16-{byte_order}"
    return data.decode(encoding, errors="ignore").rstrip("\0 \u2020")


def _camera(exif: Mapping[int, Any]) -> str:
    """Return maker and model; "Canon" and "Canon EOS R5" are "Canon EOS R5"."""
    maker, model = (
        " ".join(str(exif.get(tag, "")).replace("\0", " ").split())[:80]
        for tag in (_TAG.Make, _TAG.Model)
    )
    return model if model.lower().startswith(maker.lower()) else f"{maker} {model}"


# XMP: a tree, in which texts are wrapped in lists and translations.


def _xmp_values(image: Image.Image) -> _Values:
    tree = image.getxmp()
    descriptions = tree.get("xmpmeta", tree)["RDF"]["Description"] if tree else []
    if not isinstance(descriptions, list):
        descriptions = [descriptions]
    for description in descriptions:
        for name, names in _FIELDS.items():
            for key in names.xmp:
                value = description.get(key) if isinstance(description, dict) else None
                yield name, _xmp_texts(value)


def _xmp_texts(value: object) -> list[str]:
    """Return the texts in a value of XMP, and only the first one of translations.

    ::

        {"Bag": {"li": ["kite", "beach"]}}                              -> ["kite", "beach"]
        {"Alt": {"li": [{"lang": "en", "text": "kite"}, {"text": …}]}}  -> ["kite"]
    """
    match value:
        case str():
            return [value]
        case list():
            texts: list[str] = []
            for element in value:
                texts += _xmp_texts(element)
            return texts
        case {"Alt": inner}:
            return _xmp_texts(inner)[:1]
        case {"Bag": inner} | {"Seq": inner} | {"li": inner} | {"text": inner}:
            return _xmp_texts(inner)
    return []


# IPTC: numbered data sets of bytes, which may occur repeatedly.


def _iptc_values(image: Image.Image) -> _Values:
    values = IptcImagePlugin.getiptcinfo(cast("ImageFile.ImageFile", image)) or {}
    for name, names in _FIELDS.items():
        if names.iptc is not None:
            data = values.get((2, names.iptc), [])
            yield name, map(_decode, data if isinstance(data, list) else [data])
