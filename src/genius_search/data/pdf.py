"""Texts of PDF files, read by pypdf once: they are kept in the user's cache."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from pathlib import Path
from unicodedata import normalize

from genius_search.errors import BadImage
from genius_search.writing import write_atomically


def user_cache() -> Path:
    """Return the folder for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "genius-search"


def has_pypdf() -> bool:
    """Return whether the extra ``pdf`` is installed."""
    return importlib.util.find_spec("pypdf") is not None


def read_pdf(path: Path) -> str:
    """Return the text of all pages of a PDF file.

    Raises
    ------
    BadImage
        It cannot be read, or has no text, as scanned pages do.
    """
    try:
        known = path.stat()
        key = hashlib.sha256(f"{path.resolve()} {known.st_size} {known.st_mtime_ns}".encode()).hexdigest()
        cached = user_cache() / "pdf" / f"{key[:24]}.txt"
        if not cached.is_file():
            text = _extract(path)
            cached.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(cached) as temporary:
                temporary.write_text(text, encoding="utf-8", errors="replace")
        text = cached.read_text(encoding="utf-8")
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    if not text.strip():
        raise BadImage(path, "is a PDF without text; scanned pages need text recognition first")
    return text


def _extract(path: Path) -> str:
    from pypdf import PdfReader  # noqa: PLC0415  an extra

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of each oddity of a file
    try:
        text = "\n\n".join(page.extract_text() for page in PdfReader(path).pages)
        return normalize("NFKC", text)  # without ligatures
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  damaged files raise whatever there is
        raise BadImage(path, f"cannot be read as a PDF: {error}") from None
