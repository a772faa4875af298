"""What a photo says of itself: captions, keywords, when, where and with what it was taken.

EXIF, XMP and IPTC are read by Pillow, in this order: the first that has a value counts. An XMP file beside a
photo is read like the XMP inside.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

from PIL import ExifTags, Image, ImageFile, IptcImagePlugin

from genius_search.data.images import opened_image, quiet


class Caption(NamedTuple):
    """The texts and the fields of an image."""

    texts: tuple[str, ...] = ()
    fields: Mapping[str, Any] = {}

    @property
    def text(self) -> str | None:
        """All texts, a line each: of five captions, any finds the image."""
        return "\n".join(dict.fromkeys(self.texts)) or None


_TAG: Final = ExifTags.Base
_FIELDS: Final[dict[str, tuple[tuple[int, ...], tuple[str, ...], int]]] = {
    "description": ((_TAG.ImageDescription, _TAG.XPComment, _TAG.UserComment), ("description",), 120),
    "title": ((_TAG.XPTitle, _TAG.XPSubject), ("title", "Headline"), 5),
    "keywords": ((_TAG.XPKeywords,), ("subject",), 25),
    "people": ((), ("PersonInImage",), -1),
    "rating": ((_TAG.Rating,), ("Rating",), -1),
    "city": ((), ("City",), 90),
    "country": ((), ("Country",), 101),
    "taken": (
        (_TAG.DateTimeOriginal, _TAG.DateTimeDigitized, _TAG.DateTime),
        ("DateTimeOriginal", "DateCreated", "CreateDate"),
        55,
    ),
    "latitude": ((), ("GPSLatitude",), -1),
    "longitude": ((), ("GPSLongitude",), -1),
}
"""Fields with their tags in EXIF, their names in XMP, and their number in IPTC."""
_LISTS: Final = ("keywords", "people")
_PLACE: Final = {"latitude": ExifTags.GPS.GPSLatitude, "longitude": ExifTags.GPS.GPSLongitude}
_BY_CAMERAS: Final = re.compile(
    r"(?i).*digital camera|sony dsc|dcim\S*|exif_jpeg_picture|hdrpl|oznor\w*|[a-z]?dav|[srh]dr|untitled"
)
"""Descriptions that cameras write into every photo."""

_Values: TypeAlias = Iterator[tuple[str, Iterable[str]]]


def read_photo(path: Path) -> Caption:
    """Read what a photo says of itself. Only its header is read.

    Returns
    -------
    Its texts: the description, else the title, and the keywords. Of the fields those that it has:
    ``taken`` (``2024-05-01T12:30:00``, local time), ``camera``, ``latitude`` and ``longitude`` (degrees),
    ``title``, ``keywords``, ``people``, ``rating``, ``city``, ``country``. What is damaged is left out.
    """
    fields: dict[str, Any] = {}
    with contextlib.suppress(Exception), opened_image(path, path) as opened:
        for read in (_exif_values, _xmp_values, _iptc_values):
            with contextlib.suppress(Exception), quiet():
                _collect(fields, read(opened))
    return _caption(fields)


def read_xmp(data: bytes) -> Caption:
    """Read the contents of an XMP file.

    Raises
    ------
    ValueError, SyntaxError, LookupError, TypeError
        It is no XMP.
    """
    fields: dict[str, Any] = {}
    image = Image.new("1", (1, 1))
    image.info["xmp"] = data
    _collect(fields, _xmp_values(image))
    return _caption(fields)


def _caption(fields: dict[str, Any]) -> Caption:
    main = fields.pop("description", None) or fields.get("title")
    return Caption(tuple(filter(None, (main, ", ".join(fields.get("keywords", ()))))), fields)


def _collect(fields: dict[str, Any], values: _Values) -> None:
    """Add the values of fields that have none yet."""
    for name, texts in values:
        usable = []
        for text in texts:
            with contextlib.suppress(ValueError):  # some cameras write blanks or zeros
                usable.append(_parse(name, text.replace("\0", " ").strip("\ufeff \t\r\n")))
        usable = [value for value in dict.fromkeys(usable) if value not in ("", None)]
        if usable:
            fields.setdefault(name, usable if name in _LISTS else usable[0])


def _parse(name: str, text: str) -> Hashable:
    """Return the value of a field, None if it means that there is none; raise ValueError for nonsense."""
    match name:
        case "taken":
            iso = re.sub(r"^(\d{4}):(\d\d):(\d\d) (\S{8}).*", r"\1-\2-\3T\4", text, flags=re.DOTALL)
            return datetime.fromisoformat(iso).isoformat()
        case "rating":
            return int(float(text)) or None
        case "latitude" | "longitude":  # 33,51.5S or 33,51,30S
            value: float = sum(float(part) / 60**power for power, part in enumerate(text[:-1].split(",")))
            is_known = abs(value) <= (90 if name == "latitude" else 180)  # nor NaN
            return round(-value if text[-1].upper() in "SW" else value, 6) if is_known else None
        case "description" if _BY_CAMERAS.fullmatch(text):
            return None
    return text


def _exif_values(opened: Image.Image) -> _Values:
    if opened.format == "PNG" and "exif" not in opened.info:
        return  # Pillow would decode the picture to look behind it
    exif = opened.getexif()
    yield "camera", [_camera(exif)]
    tags = {**exif, **exif.get_ifd(ExifTags.IFD.Exif)}
    for name, (numbers, _, _) in _FIELDS.items():
        for tag in numbers:
            text = _exif_text(tag, tags.get(tag), "be" if exif.endian == ">" else "le")
            yield name, text.split(";") if name in _LISTS else [text]
    place = exif.get_ifd(ExifTags.IFD.GPSInfo)
    for name, tag in _PLACE.items():
        if tag in place:  # its direction has the tag before
            yield name, [",".join(str(float(part)) for part in place[tag]) + str(place.get(tag - 1, "N"))[:1]]


def _exif_text(tag: int, value: object, order: str) -> str:
    match value:
        case str():  # Pillow reads Latin-1, and most programs write UTF-8
            return _decode(value.encode("latin-1", errors="ignore"))
        case bytes() if tag == _TAG.UserComment:
            match value[:8].rstrip(b"\0 ").upper():
                case b"UNICODE":
                    return _decode_wide(value[8:], order)
                case b"ASCII" | b"":
                    return _decode(value[8:])
        case bytes():
            return _decode_wide(value, "le")
        case int() if tag == _TAG.Rating:
            return str(value)
    return ""


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def _decode_wide(data: bytes, order: str) -> str:
    """Decode UTF-16, probably in this order, which may be filled up with blanks: two make a dagger."""
    data = data[: len(data) // 2 * 2]
    first, second = data[::2].count(0), data[1::2].count(0)
    if first != second:
        order = "be" if first > second else "le"
    is_marked = data.startswith((b"\xff\xfe", b"\xfe\xff"))
    return data.decode("utf-16" if is_marked else f"utf-16-{order}", errors="ignore").rstrip("\0 \u2020")


def _camera(exif: Mapping[int, Any]) -> str:
    make, model = (
        " ".join(str(exif.get(tag, "")).replace("\0", " ").split())[:80] for tag in (_TAG.Make, _TAG.Model)
    )
    return model if model.lower().startswith(make.lower()) else f"{make} {model}"


def _xmp_values(image: Image.Image) -> _Values:
    tree = image.getxmp()
    described = tree.get("xmpmeta", tree)["RDF"]["Description"] if tree else []
    for part in described if isinstance(described, list) else [described]:
        for name, (_, keys, _) in _FIELDS.items():
            for key in keys:
                yield name, _leaves(part.get(key) if isinstance(part, dict) else None)


def _leaves(value: object) -> list[str]:
    """Return the texts in a value of XMP; of translations the first."""
    match value:
        case str():
            return [value]
        case list():
            return [leaf for inner in value for leaf in _leaves(inner)]
        case {"Alt": inner}:
            return _leaves(inner)[:1]
        case {"Bag": inner} | {"Seq": inner} | {"li": inner} | {"text": inner}:
            return _leaves(inner)
    return []


def _iptc_values(image: Image.Image) -> _Values:
    values = IptcImagePlugin.getiptcinfo(cast("ImageFile.ImageFile", image)) or {}
    for name, (_, _, number) in _FIELDS.items():
        given = values.get((2, number), [])
        yield name, map(_decode, given if isinstance(given, list) else [given])
