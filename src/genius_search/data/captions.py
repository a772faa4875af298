"""Captions of pictures: in files beside them, in lists, and in the pictures themselves.

A side-car has the picture's whole name or its stem: ``photo.jpg.txt``, ``photo.txt``, likewise ``.json`` and
``.xmp``; or the name that Google Takeout gives it: ``photo.jpg.supplemental-metadata(1).json`` for
``photo(1).jpg``. A list is a file ``metadata`` or ``captions`` with one of several endings, in the same
folder or one above it. Inside a picture, EXIF, XMP and IPTC are read by Pillow, in this order: the first that
has a value counts; an XMP file beside it is read like the XMP inside.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, cast

from PIL import ExifTags, Image, ImageFile, IptcImagePlugin

from genius_search.data.images import (
    HEIF_SUFFIXES,
    is_image_file,
    opened_image,
    quiet,
    require_file,
)
from genius_search.data.mbeir import read_json_lines
from genius_search.errors import BadData, BadImage, BadRecord
from genius_search.records import composed
from genius_search.text import clean

_TAG: Final = ExifTags.Base
_FIELDS: Final[dict[str, tuple[tuple[int, ...], tuple[str, ...], int]]] = {
    "description": (
        (_TAG.ImageDescription, _TAG.XPComment, _TAG.UserComment),
        ("description",),
        120,
    ),
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
_SEVERAL: Final = ("keywords", "people")
_PLACE: Final = {"latitude": ExifTags.GPS.GPSLatitude, "longitude": ExifTags.GPS.GPSLongitude}
_BY_CAMERAS: Final = re.compile(
    r"(?i).*digital camera|sony dsc|dcim\S*|exif_jpeg_picture|hdrpl|oznor\w*|[a-z]?dav|[srh]dr|untitled"
)
"""Descriptions that cameras write into every photo."""
_Values: TypeAlias = Iterator[tuple[str, Iterable[str]]]
MAX_TEXT_BYTES: Final = 1_000_000
"""Larger text files are refused, because a candidate should be a paragraph or a page."""
SIDE_CARS: Final = (".txt", ".json", ".xmp")
"""Endings; the text of an earlier one counts."""
FILE_KEYS: Final = ("file_name", "image", "filename", "image_name", "file", "path", "sourcefile")
TEXT_KEYS: Final = ("caption", "text", "title", "description", "captions", "comment")
"""Names of columns and keys, in lower case and without a prefix such as exiftool's ``XMP:``."""
_LISTS: Final = re.compile(r"(metadata|captions)\.(jsonl|csv|tsv|txt|parquet)", re.IGNORECASE)
_ONE_OF_SEVERAL: Final = re.compile(
    r"(caption|text|description|comment|sentence)[ _.]?\d+", re.IGNORECASE
)
"""Names of columns that have a caption each."""
_NUMBERED: Final = re.compile(r"#\d+$")
"""Behind the name of a file: which of its captions this is."""
_NO_VALUE: Final = ("", "nan", "NaN", "NaT", "<NA>", "NULL", "null")
"""What programs write into a cell without a value."""
_EDITED: Final = re.compile(
    r"-(edit\w{2,3}|bearbeitet|modifi(é|cato)|edyt\w+|bewerkt|redigeret|編集済み)"
)
"""What Google Takeout adds to the name of a photo that was changed; it has the side-car of the other."""
_TAKEOUT: Final = "supplemental-metadata"
_TAKEOUT_LENGTH: Final = 46
"""Characters at which Google Takeout cuts the name of a side-car, without its ending."""
Problem: TypeAlias = BadImage | BadRecord
Rows: TypeAlias = Iterator[tuple[int, dict[str, Any]]]


class Caption(NamedTuple):
    """The texts and the fields of an image."""

    texts: tuple[str, ...] = ()
    fields: Mapping[str, Any] = {}

    @property
    def text(self) -> str | None:
        """All texts, a line each: of five captions, any finds the image."""
        return "\n".join(dict.fromkeys(self.texts)) or None


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
            fields.setdefault(name, usable if name in _SEVERAL else usable[0])


def _parse(name: str, text: str) -> Hashable:
    """Return the value of a field, None if it means that there is none; raise ValueError for nonsense."""
    match name:
        case "taken":
            iso = re.sub(r"^(\d{4}):(\d\d):(\d\d) (\S{8}).*", r"\1-\2-\3T\4", text, flags=re.DOTALL)
            return datetime.fromisoformat(iso).isoformat()
        case "rating":
            return int(float(text)) or None
        case "latitude" | "longitude":  # 33,51.5S or 33,51,30S
            value: float = sum(
                float(part) / 60**power for power, part in enumerate(text[:-1].split(","))
            )
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
            yield name, text.split(";") if name in _SEVERAL else [text]
    place = exif.get_ifd(ExifTags.IFD.GPSInfo)
    for name, tag in _PLACE.items():
        if tag in place:  # its direction has the tag before
            yield (
                name,
                [
                    ",".join(str(float(part)) for part in place[tag])
                    + str(place.get(tag - 1, "N"))[:1]
                ],
            )


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
    return data.decode("utf-16" if is_marked else f"utf-16-{order}", errors="ignore").rstrip(
        "\0 \u2020"
    )


def _camera(exif: Mapping[int, Any]) -> str:
    make, model = (
        " ".join(str(exif.get(tag, "")).replace("\0", " ").split())[:80]
        for tag in (_TAG.Make, _TAG.Model)
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


def side_cars(files: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return the pictures among some files, each with the files that belong to it, the best first."""
    found: dict[Path, list[Path]] = {}
    names: dict[str, list[Path]] = {}
    """Pictures by what a side-car may be called, without its ending."""
    for path in files:
        if is_image_file(path) or path.suffix.lower() in HEIF_SUFFIXES:
            found[path] = []
            for called in _names(path) | _names(_original(path)):
                names.setdefault(called, []).append(path)
    for path in files:
        if path.suffix.lower() in SIDE_CARS:
            whole = path.with_suffix("")
            owners = names.get(key(whole).lower(), [])
            if not owners and path.suffix.lower() == ".json":
                name, count = _split_count(whole.name)
                photo, _, rest = name.rpartition(".")
                if photo and _TAKEOUT.startswith(rest):
                    owners = names.get(key(path.with_name(photo + count)).lower(), [])
            same_name = [one for one in owners if whole.name in (one.name, _original(one).name)]
            same_case = [one for one in owners if one.name.startswith(whole.name)]
            for owner in same_name or same_case or owners:
                found[owner].append(path)
    for beside in found.values():
        beside.sort(key=lambda path: (SIDE_CARS.index(path.suffix.lower()), -len(path.name)))
    return found


def _names(path: Path) -> set[str]:
    """Return the keys of what a side-car of a picture may be called, without its ending."""
    stem, count = _split_count(path.stem)
    takeout = path.with_name((stem + path.suffix)[:_TAKEOUT_LENGTH] + count)
    return {key(called).lower() for called in (path, path.with_suffix(""), takeout)}


def _original(path: Path) -> Path:
    """Return the photo that Google Takeout's ``IMG_1-edited.jpg`` is a version of, else the path."""
    return path.with_name(_EDITED.sub("", composed(path.name)))


def _split_count(name: str) -> tuple[str, str]:
    """Split ``photo(1)`` into ``photo`` and ``(1)``."""
    stem = re.sub(r"\(\d+\)$", "", name)
    return stem, name[len(stem) :]


def key(path: Path) -> str:
    """Return a path in one spelling: macOS decomposes accents."""
    return composed(os.path.normpath(path))


def decode_text(path: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark.

    Raises
    ------
    BadImage
        It is in another encoding, or cannot be read.
    """
    require_file(path)
    try:
        raw = path.read_bytes()
        is_utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = raw.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise BadImage(path, "is not a UTF-8 text; save it as UTF-8") from None
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise BadImage(path, "has characters of zero, as UTF-16 and UTF-32 have; save it as UTF-8")
    return text


def read_text(path: Path) -> str:
    """Return a text of at most :data:`MAX_TEXT_BYTES`, cleaned; raises like :func:`decode_text`."""
    require_file(path)
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise BadImage(path, f"is a text of more than {MAX_TEXT_BYTES:,} bytes; split it")
    if not (text := clean(decode_text(path)).strip()):
        raise BadImage(path, "is a text without words")
    return text


def read_side_cars(files: Iterable[Path], problems: list[Problem]) -> Iterator[Caption]:
    """Yield what lies beside a picture; report files that cannot be read."""
    for file in files:
        try:
            text = read_text(file)
            match file.suffix.lower():
                case ".txt":
                    yield Caption((text,))
                case ".xmp":
                    yield read_xmp(text.encode())
                case _:
                    row = json.loads(text)
                    if isinstance(row, list) and len(row) == 1:  # as exiftool writes it
                        row = row[0]
                    if not isinstance(row, dict):
                        raise BadData(
                            f"it is a JSON {type(row).__name__}, expected an object with a caption"
                        )
                    json.dumps(row, ensure_ascii=False).encode()  # fails for half a character
                    yield _caption_of(row)
        except BadImage as error:
            problems.append(error)
        except (ValueError, SyntaxError, LookupError, TypeError, RecursionError) as error:
            problems.append(
                BadRecord(file, getattr(error, "lineno", None) or 1, f"cannot be used: {error}")
            )


def _keys(row: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the keys of a row that have one of some names, in the order of the names."""
    own = {one.rpartition(":")[2].strip().lower(): one for one in row}
    return [own[name] for name in names if name in own]


def _caption_of(row: Mapping[str, Any]) -> Caption:
    """Return the texts and the fields of an object; those of Google Takeout get the names of ours."""
    files = _keys(row, FILE_KEYS)
    fields = {name: value for name, value in row.items() if name not in files}
    if numbered := [name for name in fields if _ONE_OF_SEVERAL.fullmatch(name)]:
        values = [fields.pop(name) for name in (*_keys(fields, TEXT_KEYS)[:1], *numbered)]
        fields["captions"] = [
            text for one in values for text in (one if isinstance(one, list) else [one])
        ]
    match row:
        case {"photoTakenTime": {"timestamp": str() | int() as seconds}}:
            with contextlib.suppress(ValueError, OverflowError, OSError):
                fields["taken"] = datetime.fromtimestamp(int(seconds), UTC).isoformat()
                del fields["photoTakenTime"]
            fields.pop("title", None)  # the name of the file
        case {"title": str() as title} if is_image_file(Path(title)):
            del fields["title"]
    match row:
        case {
            "geoData": {"latitude": float() | int() as north, "longitude": float() | int() as east}
        }:
            fields |= {"latitude": north, "longitude": east} if north or east else {}
            del fields["geoData"]
    people = row.get("people")
    if isinstance(people, list) and all(
        isinstance(one, dict) and [*one] == ["name"] for one in people
    ):
        fields["people"] = [person["name"] for person in people]
    for name in _keys(fields, TEXT_KEYS):
        value = fields[name]
        values = value if isinstance(value, list) else [value]
        inner = (
            _caption_of(one).texts if isinstance(one, dict) else [one] for one in values
        )  # COCO's
        texts = tuple(
            one.strip() for one in itertools.chain(*inner) if isinstance(one, str) and one.strip()
        )
        if texts:
            if all(one is None or isinstance(one, str) for one in values):
                del fields[name]
            return Caption(texts, fields)
    return Caption((), fields)


def is_list(path: Path) -> bool:
    """Return whether a file has the name of a list of captions."""
    return _LISTS.fullmatch(path.name) is not None


def read_lists(
    files: Iterable[Path], pictures: Iterable[Path], problems: list[Problem]
) -> tuple[dict[Path, Caption], set[Path]]:
    """Return the captions of pictures in the lists among some files, and the lists."""
    known = {key(path).lower(): path for path in pictures} | {key(path): path for path in pictures}
    captions: dict[Path, Caption] = {}
    lists = set(filter(is_list, files))
    for path in sorted(lists):
        try:
            require_file(path)
            rows: Rows | None
            match path.suffix.lower():
                case ".jsonl":
                    rows = read_json_lines(path, dict, problems.append)
                case ".parquet":
                    rows = _parquet_rows(path)
                case _:
                    rows = _csv_rows(path)
            if rows is None:
                lists.remove(path)
            else:
                _read_list(path, rows, known, captions, problems)
        except BadImage as error:
            problems.append(error)
        except Exception as error:  # noqa: BLE001  pyarrow's are of many kinds
            problems.append(BadImage(path, f"cannot be read: {error}"))
    return captions, lists


def _csv_rows(path: Path) -> Rows | None:
    """Return the rows of a table, whatever is between its columns; None for a text file that is none.

    A table without names of columns has file names and texts.
    """
    file = io.StringIO(decode_text(path), newline="")
    csv.field_size_limit(MAX_TEXT_BYTES)
    header = file.readline()
    names = {
        mark: [cell.strip() for cell in next(csv.reader([header], delimiter=mark), [])]
        for mark in ",;\t|"
    }
    for mark, cells in names.items():
        if _keys(cells, FILE_KEYS):
            unique = [
                one if one not in cells[:n] else one and f"{one} {n}" for n, one in enumerate(cells)
            ]
            return _cells(csv.DictReader(file, unique, delimiter=mark), mark, 1)
        if len(cells) > 1 and is_image_file(Path(_NUMBERED.sub("", cells[0]))):
            lines, columns = itertools.chain([header], file), (FILE_KEYS[0], TEXT_KEYS[0])
            return _cells(csv.DictReader(lines, columns, delimiter=mark), mark, 0)
    if path.suffix.lower() == ".txt":
        return None
    raise BadImage(path, _wanted(max(names.values(), key=len)))


def _cells(reader: csv.DictReader[str], mark: str, skipped: int) -> Rows:
    for row in reader:
        if rest := row.pop(None, None):  # a text with commas and without quotes
            row[[*row][-1]] += mark + mark.join(rest)
        # A column without a name numbers the rows: pandas writes it.
        cells = {column: (cell or "").strip() for column, cell in row.items() if column}
        inner = itertools.chain.from_iterable(cell.split("\n")[1:] for cell in cells.values())
        if any(is_image_file(Path(line.partition(mark)[0])) for line in inner):
            raise ValueError(
                f"the row that ends in line {reader.line_num + skipped} has a quote without end"
            )
        yield (
            reader.line_num + skipped,
            {name: cell for name, cell in cells.items() if cell not in _NO_VALUE},
        )


def _parquet_rows(path: Path) -> Rows:
    try:
        from pyarrow import parquet  # noqa: PLC0415  optional
    except ImportError:
        needs = "needs the extra parquet: pip install 'genius-search[parquet]'"
        raise BadImage(path, f"is Parquet, which {needs}") from None
    batches = parquet.ParquetFile(path).iter_batches(1024)
    for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), start=1):
        yield number, {column: value for column, value in row.items() if value is not None}


def _wanted(columns: Collection[str]) -> str:
    expected = (
        f"{' or '.join(FILE_KEYS[:2])} with the name of a file, and {' or '.join(TEXT_KEYS[:2])}"
    )
    return f"has the columns {', '.join(columns)}; expected {expected}"


def _file_name(row: Mapping[str, Any]) -> str | None:
    names = (row[column] for column in _keys(row, FILE_KEYS) if isinstance(row[column], str))
    return next((_NUMBERED.sub("", name) for name in names), None)


def _finder(
    folder: Path, names: Iterable[str], known: Mapping[str, Path]
) -> Callable[[str], Path | None]:
    """Return what finds the picture that a list in a folder means by a name.

    If no name is a path from there, the list was made elsewhere: then the ends of paths count, if they are
    those of one picture alone.
    """

    def find(name: str) -> Path | None:
        place = folder / name
        return known.get(key(place)) or known.get(key(Path(str(place).replace("\\", "/"))).lower())

    def find_by_end(name: str) -> Path | None:
        end = "/" + key(Path(name.replace("\\", "/"))).lower()
        fits = [
            one
            for own, one in below[end.rpartition("/")[2]]
            if own.endswith(end) or end.endswith(own)
        ]
        return fits[0] if len(fits) == 1 and "/../" not in end else None

    if any(find(name) or os.path.isfile(folder / name) for name in names):  # noqa: PTH113  never raises
        return find
    below: defaultdict[str, list[tuple[str, Path]]] = defaultdict(list)
    for one in {one for one in known.values() if one.is_relative_to(folder)}:
        own = "/" + key(one.relative_to(folder)).lower()
        below[own.rpartition("/")[2]].append((own, one))
    return find_by_end


def _read_list(
    path: Path,
    rows: Rows,
    known: Mapping[str, Path],
    captions: dict[Path, Caption],
    problems: list[Problem],
) -> None:
    """Read the captions in a list; all those of a picture count."""
    without_text: dict[str, Any] = {}
    without_name: set[Sequence[str]] = set()
    has_texts = False
    rows, ahead = itertools.tee(rows)
    find = _finder(path.parent, filter(None, (_file_name(row) for _, row in ahead)), known)
    for line, row in rows:
        name = _file_name(row)
        picture = find(name or "")
        if name is None:
            if (columns := tuple(row)) not in without_name:  # one message for all such rows
                problems.append(BadRecord(path, line, _wanted(columns)))
            without_name.add(columns)
        elif picture is None:
            problems.append(BadRecord(path, line, f"there is no picture {name!r} in this folder"))
        else:
            new, earlier = _caption_of(row), captions.get(picture, Caption())
            has_texts = has_texts or bool(new.texts)
            without_text = row
            captions[picture] = Caption(
                (*earlier.texts, *new.texts), {**new.fields, **earlier.fields}
            )
    if without_text and not has_texts:
        problems.append(BadImage(path, f"gives no picture a text: it {_wanted(without_text)}"))
