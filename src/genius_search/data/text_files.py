"""Text files: their encoding and their maximum size."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Final

from genius_search.data.images import require_file
from genius_search.errors import BadImage
from genius_search.text import clean

MAX_TEXT_BYTES: Final = 1_000_000
"""Larger text files are refused, because a candidate should be a paragraph or a page."""


def decode_text(path: Path) -> str:
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark.

    Raises
    ------
    BadImage
        The file cannot be read, or has another encoding.
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
        raise BadImage(path, "contains NUL characters, as UTF-16 and UTF-32 do; save it as UTF-8")
    return text


def read_text(path: Path) -> str:
    """Return the cleaned text of a file of at most :data:`MAX_TEXT_BYTES`.

    Raises
    ------
    BadImage
        The file is too large or has no words, or :func:`decode_text` raises it.
    """
    require_file(path)
    if path.stat().st_size > MAX_TEXT_BYTES:
        raise BadImage(path, f"is a text of more than {MAX_TEXT_BYTES:,} bytes; split it")
    text = clean(decode_text(path)).strip()
    if not text:
        raise BadImage(path, "is a text without words")
    return text
