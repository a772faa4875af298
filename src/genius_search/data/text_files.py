"""Text files: their encoding, their maximum size, and documents, their texts with fields."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from genius_search.data.images import require_file
from genius_search.errors import BadImage
from genius_search.text import clean

MAX_TEXT_BYTES: Final = 1_000_000
"""Larger text files are refused, because a candidate should be a paragraph or a page."""
WESTERN: Final = "windows-1252"
"""The encoding of texts from older programs in Western Europe and America; it contains Latin-1."""
_CONTROL_BYTE: Final = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_FOREIGN_WORD: Final = re.compile(rb"[\xc0-\xff]{4}|[\x80-\xff]{5}")
"""A word in another old encoding, such as a Cyrillic one: no Western word has four accented letters
in a row."""


class Document(NamedTuple):
    """The contents of a file that is not a picture."""

    text: str
    fields: Mapping[str, Any] = {}
    """Values that conditions can compare, such as a title or a date."""
    note: str | None = None
    """A message if the text is not complete."""


def decode_file(path: Path, max_bytes: int | None = None) -> tuple[str, str]:
    """Return the text of a file, and its encoding.

    It may be UTF-8, UTF-16 with a byte order mark, or Windows-1252.

    Raises
    ------
    BadImage
        The file cannot be read, is larger than ``max_bytes``, or has another encoding.
    """
    require_file(path)
    if max_bytes is not None and path.stat().st_size > max_bytes:
        raise BadImage(path, f"is a text of more than {max_bytes:,} bytes; split it")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    is_utf16 = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if is_utf16 else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        if is_utf16:
            raise BadImage(path, "is a damaged UTF-16 text; save it as UTF-8") from None
        encoding = WESTERN
        text = _decode_western(path, raw)
    if "\0" in text:
        raise BadImage(path, "contains NUL characters, as UTF-16 and UTF-32 do; save it as UTF-8")
    return text, encoding.removesuffix("-sig")


def _decode_western(path: Path, raw: bytes) -> str:
    """Return a text in Windows-1252, unless the bytes are rather data or another encoding."""
    if _CONTROL_BYTE.search(raw):
        raise BadImage(path, "is not a text but binary data; a text is saved as UTF-8")
    if _FOREIGN_WORD.search(raw):
        raise BadImage(path, "has an unknown encoding; save it as UTF-8")
    try:
        return raw.decode(WESTERN)
    except UnicodeDecodeError:
        reason = "is neither a UTF-8 nor a Windows-1252 text; save it as UTF-8"
        raise BadImage(path, reason) from None


def decode_text(path: Path) -> str:
    """Return the text of a file; see :func:`decode_file`."""
    return decode_file(path)[0]


def read_text(path: Path) -> str:
    """Return the cleaned text of a file of at most :data:`MAX_TEXT_BYTES`.

    Raises
    ------
    BadImage
        The file is too large or has no words, or :func:`decode_file` raises it.
    """
    return read_plain(path).text


def read_plain(path: Path) -> Document:
    """Return the cleaned text of a file as a document.

    A text in an old encoding has the field ``encoding``: if letters are wrong, it says why.

    Raises
    ------
    BadImage
        The file is too large or has no words, or :func:`decode_file` raises it.
    """
    decoded, encoding = decode_file(path, MAX_TEXT_BYTES)
    text = clean(decoded).strip()
    if not text:
        raise BadImage(path, "is a text without words")
    return Document(text, {"encoding": WESTERN} if encoding == WESTERN else {})
