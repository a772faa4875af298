"""Texts of PDF files, which are cached: pypdf needs about twenty milliseconds per page.

A small file can take hours: pages may share their contents, which may be compressed a thousandfold.
So reading stops at limits, and the report names the pages that were read.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from genius_search.errors import BadImage, BadRecord
from genius_search.records import composed
from genius_search.text import clean, join_divided_words
from genius_search.writing import write_atomically

MAX_PDF_PAGES: Final = 5_000
"""Maximum number of pages that are read from a file."""
MAX_PDF_CHARACTERS: Final = 2_000_000
"""Maximum length of a file's text: a thousand dense pages."""
MAX_PDF_SECONDS: Final = 20.0
"""Maximum time for a file: a thousand pages typically take this long."""
_CACHE_VERSION: Final = 2
"""Version of the cached texts; to be increased when the extraction changes."""


class _TimeIsUp(BaseException):
    """Stops the reading of a file. It is not an Exception, because pypdf catches those."""


def has_pypdf() -> bool:
    """Return whether the extra ``pdf`` is installed."""
    return importlib.util.find_spec("pypdf") is not None


def read_pdf(path: Path, cache: Path, problems: list[BadImage | BadRecord]) -> str:
    """Return the text of a PDF file, from the cache if possible.

    If reading stops at a limit, the text of the first pages is returned, and ``problems`` gets a
    message.

    Raises
    ------
    BadImage
        The file cannot be read, or has no text, as is the case with scanned pages.
    """
    try:
        status = path.stat()
        name = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {_CACHE_VERSION}"
        cached = cache / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
        if not cached.is_file():
            cached.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(cached) as temporary:
                temporary.write_text(json.dumps(_extract(path)), encoding="utf-8")
        text, limit_message = json.loads(cached.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    if not text.strip():
        no_text = "is a PDF without text; scanned pages need text recognition first"
        raise BadImage(path, limit_message or no_text)
    if limit_message:
        problems.append(BadImage(path, limit_message))
    return str(text)


def _extract(path: Path) -> tuple[str, str | None]:
    """Return the text of a file, and a message if a limit was reached.

    Raises
    ------
    BadImage
        The file is damaged.
    """
    from pypdf import PdfReader  # noqa: PLC0415  an extra

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it logs each oddity of a file
    pages: list[str] = []
    num_pages: int | None = None
    is_complete = False

    def read() -> None:
        # Every page is stored at once, so that the pages before a timeout remain.
        nonlocal num_pages, is_complete
        reader = PdfReader(path)
        num_pages = len(reader.pages)
        length = 0
        for page in reader.pages[:MAX_PDF_PAGES]:
            pages.append(page.extract_text())
            length += len(pages[-1])
            if length > MAX_PDF_CHARACTERS:
                break
        is_complete = True

    try:
        _run_with_timeout(read, MAX_PDF_SECONDS)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  pypdf raises nearly anything on damaged files
        raise BadImage(path, f"cannot be read as a PDF: {error}") from None
    text = "\n\n".join(pages)
    limit = None
    if len(text) > MAX_PDF_CHARACTERS:
        limit = f"{MAX_PDF_CHARACTERS:,} characters"
    elif not is_complete:
        limit = f"{MAX_PDF_SECONDS:g} seconds"
    elif len(pages) < (num_pages or 0):
        limit = f"{MAX_PDF_PAGES:,} pages"
    message = None
    if limit is not None:
        of_all = "" if num_pages is None else f" of {num_pages:,}"
        message = (
            f"only {len(pages):,}{of_all} pages are read: the limit of a PDF is {limit}; "
            "split the file"
        )
    text = text[:MAX_PDF_CHARACTERS]
    text = text.encode(errors="replace").decode()  # replaces halves of surrogate pairs
    return join_divided_words(clean(composed(text))), message


def _run_with_timeout(work: Callable[[], object], seconds: float) -> None:
    """Call a function, stop it after a time, and raise the exception that it raised.

    The function runs in a thread, into which CPython can raise an exception from outside.
    """
    errors: list[Exception] = []

    def run() -> None:
        with contextlib.suppress(_TimeIsUp):
            try:
                work()
            except Exception as error:  # noqa: BLE001  raised again below
                errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    finally:
        while thread.is_alive():  # again and again: a bare "except:" in pypdf may catch it
            raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in_thread(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TimeIsUp))
            thread.join(1.0)
    for error in errors:
        raise error
