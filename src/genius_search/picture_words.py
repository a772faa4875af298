"""Words about a picture besides its caption: its name, keywords, people, date and place.

Without an encoder of pictures, an item is found by these words and its caption::

    rome/2019/beach-walk_2.jpg, taken 2019-05-04, city Rome    "rome, beach walk, May 2019, Rome"
    DCIM/100CANON/IMG_2031.jpg                                 nothing

Cities come from GPS coordinates if the extra ``places`` is installed.
"""

from __future__ import annotations

import importlib.util
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any, Final

from genius_search.text import clean

MAX_CITY_KILOMETRES: Final = 50.0
"""Maximum distance between a photo and the city that it is said to be taken in."""
MIN_CITY_INHABITANTS: Final = 15_000
"""Minimum population of a city that names a place: people do not search for suburbs."""
MAX_ABOUT_CHARACTERS: Final = 2_000
"""Maximum length of the words about a picture; keywords may have any length."""
EARTH_RADIUS_KILOMETRES: Final = 6371.0
MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
_CAMERA_NAME: Final = re.compile(
    r"(img|image|dsc[nf_]?|dscf|pxl|mvimg|vid|dji|gopr|gp|sam|pict?|p|cimg|imag|photo|fb_img)"
    r"?[-_ ]?e?[\d\s_().~-]*(wa\d+|burst\d*|cover|edited|portrait|night|hdr|mp|pano)*[\d\s_()~-]*"
    r"|[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}|[0-9a-f]{16,}|dcim|\d{3}[a-z_]{5}|camera",
    re.IGNORECASE,
)
"""Names that cameras, phones and programs give to all files and folders; they say nothing."""
_CAPITAL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")
"""The places where a capital follows a small letter, which divide MyDog into My Dog."""
_YEAR: Final = r"(?<!\d)(?:19|20)\d\d(?!\d)"
_WORDS: Final = re.compile(rf"[^\W\d_]{{2,}}|[\u3400-\u9fff]|{_YEAR}")
"""Words of a name: at least two letters, or one Chinese character, and years."""
_FOLDED_WORD: Final = re.compile(r"[^\W_]+")
_DATE_IN_NAME: Final = re.compile(
    r"(?<!\d)((?:19|20)\d\d)[-_. ]?(0[1-9]|1[0-2])[-_. ]?(?:0[1-9]|[12]\d|3[01])(?!\d)"
)
"""A date in a file's name, as in IMG_20240501_123000 and Screenshot 2024-05-01."""


def describe_picture(path: str, fields: Mapping[str, Any]) -> str | None:
    """Return the words about a picture, in one line; None if there are none.

    Parameters
    ----------
    path
        Path of the picture in its folder, or another name for it.
    fields
        Fields of the item.
    """
    parts = words_about(path, fields)
    words = dict.fromkeys(word for part in parts.values() for word in part)
    return clean(", ".join(words))[:MAX_ABOUT_CHARACTERS].strip() or None


def words_about(path: str, fields: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the words about a picture by their source: name, keywords, people, date, place."""
    return {
        "name": [*map(" ".join, filter(None, map(_words_of_name, _names(path))))],
        "keywords": [*_texts(fields, "title"), *_texts(fields, "keywords")],
        "people": _texts(fields, "people"),
        "date": _month(path, fields),
        "place": [*_texts(fields, "city"), *_texts(fields, "country")],
    }


def _names(path: str) -> list[str]:
    """Return the names of the folders and of the file, without its ending."""
    pure = PurePosixPath(path)
    return [*pure.parts[:-1], pure.stem]


def _words_of_name(name: str) -> list[str]:
    """Return the words of a file's or folder's name that say something.

    >>> _words_of_name("beach-rome_2019"), _words_of_name("IMG_2031"), _words_of_name("MyDog")
    (['beach', 'rome', '2019'], [], ['My', 'Dog'])
    """
    if _CAMERA_NAME.fullmatch(name) and not re.fullmatch(_YEAR, name):
        return []
    return _WORDS.findall(_CAPITAL.sub(" ", _DATE_IN_NAME.sub(" ", name)))


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return the texts of a field, which may be a list."""
    value = fields.get(name)
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text.strip()]


def _month(path: str, fields: Mapping[str, Any]) -> list[str]:
    """Return month and year of a picture in words, by its metadata or else by its name."""
    taken = fields.get("taken")
    if isinstance(taken, str):
        try:
            date = datetime.fromisoformat(taken)
        except ValueError:
            return []
        return [f"{MONTHS[date.month - 1]} {date.year}"]
    match = _DATE_IN_NAME.search(PurePosixPath(path).stem)
    return [] if match is None else [f"{MONTHS[int(match[2]) - 1]} {match[1]}"]


def has_places() -> bool:
    """Return whether the extra ``places`` is installed."""
    return importlib.util.find_spec("reverse_geocode") is not None


def find_place(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the city and country of coordinates; empty without them, and far from any city."""
    latitude, longitude = fields.get("latitude"), fields.get("longitude")
    if not (isinstance(latitude, float | int) and isinstance(longitude, float | int)):
        return {}
    if not (abs(latitude) <= 90 and abs(longitude) <= 180 and has_places()):
        return {}
    return dict(_nearest_city(round(float(latitude), 2), round(float(longitude), 2)))


@lru_cache(maxsize=4096)  # photos of one place are next to one another
def _nearest_city(latitude: float, longitude: float) -> tuple[tuple[str, str], ...]:
    """Return the fields of the nearest city; coordinates are rounded to a kilometre."""
    import reverse_geocode  # noqa: PLC0415  an extra, which loads its cities in a second

    [city] = reverse_geocode.search([(latitude, longitude)], min_population=MIN_CITY_INHABITANTS)
    distance = _distance(latitude, longitude, city["latitude"], city["longitude"])
    if distance > MAX_CITY_KILOMETRES:
        return ()
    return tuple((name, str(city[name])) for name in ("city", "country") if city.get(name))


def _distance(latitude: float, longitude: float, to_latitude: float, to_longitude: float) -> float:
    """Return the distance of two points in kilometres, by the haversine formula."""
    north, to_north = math.radians(latitude), math.radians(to_latitude)
    east = math.radians(to_longitude - longitude)
    haversine = (
        math.sin((to_north - north) / 2) ** 2
        + math.cos(north) * math.cos(to_north) * math.sin(east / 2) ** 2
    )
    return 2 * EARTH_RADIUS_KILOMETRES * math.asin(math.sqrt(haversine))


def find_sources(words: Sequence[str], sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the texts that contain one of some words or phrases.

    >>> find_sources(["Rome", "IMG 2031"], {"caption": "a dog", "place": "Rome, Italy"})
    ('place',)
    """
    folded = [fold_words(word) for word in words]
    names = []
    for name, text in sources.items():
        folded_text = fold_words(text)
        if any(word in folded_text for word in folded):
            names.append(name)
    return tuple(names)


def fold_words(text: str) -> str:
    """Return the words of a text between spaces, without case and accents.

    >>> fold_words("Café-Bar")
    ' cafe bar '
    """
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(character for character in decomposed if not unicodedata.combining(character))
    return f" {' '.join(_FOLDED_WORD.findall(plain))} "
