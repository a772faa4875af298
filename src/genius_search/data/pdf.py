"""Texts of PDF files, which are kept in a cache: pypdf needs about twenty milliseconds for a page.

A small file can ask for much: pages may share their contents, and these may be compressed a
thousand times. So reading ends at limits, and what is not read is reported.
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

MAX_PAGES: Final = 5_000
MAX_CHARACTERS: Final = 2_000_000
"""Maximum length of a file's text: a thousand dense pages."""
MAX_SECONDS: Final = 20.0
"""Maximum time for a file; a thousand pages usually take as long."""
_FORMAT: Final = 2
"""Version of the texts in the cache, to be raised when other texts are extracted."""


class _TimeIsUp(BaseException):
    """Ends the reading of a file. It is no Exception, since pypdf continues after those."""


def has_pypdf() -> bool:
    """Return whether the extra ``pdf`` is installed."""
    return importlib.util.find_spec("pypdf") is not None


def read_pdf(path: Path, cache: Path, problems: list[BadImage | BadRecord]) -> str:
    """Return the text of a PDF file, or of its pages up to a limit, which is added to the problems.

    Raises
    ------
    BadImage
        It cannot be read, or has no text, as scanned pages do.
    """
    try:
        status = path.stat()
        name = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {_FORMAT}"
        cached = cache / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
        if not cached.is_file():
            cached.parent.mkdir(parents=True, exist_ok=True)
            with write_atomically(cached) as temporary:
                temporary.write_text(json.dumps(_extract(path)), encoding="utf-8")
        text, limit = json.loads(cached.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    if not text.strip():
        no_text = "is a PDF without text; scanned pages need text recognition first"
        raise BadImage(path, limit or no_text)
    if limit:
        problems.append(BadImage(path, limit))
    return str(text)


def _extract(path: Path) -> tuple[str, str | None]:
    """Return the text of a file, and what is not read because of a limit, if there is one."""
    from pypdf import PdfReader  # noqa: PLC0415  an extra

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of each oddity of a file
    pages: list[str] = []
    count: int | None = None
    has_ended = False

    def read() -> None:
        nonlocal count, has_ended
        reader = PdfReader(path)
        count = len(reader.pages)
        length = 0
        for page in reader.pages[:MAX_PAGES]:
            pages.append(page.extract_text())
            length += len(pages[-1])
            if length > MAX_CHARACTERS:
                break
        has_ended = True

    try:
        _run(read, MAX_SECONDS)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  damaged files raise whatever there is
        raise BadImage(path, f"cannot be read as a PDF: {error}") from None
    text = "\n\n".join(pages)
    limit = None
    if len(text) > MAX_CHARACTERS:
        limit = f"{MAX_CHARACTERS:,} characters"
    elif not has_ended:
        limit = f"{MAX_SECONDS:g} seconds"
    elif len(pages) < (count or 0):
        limit = f"{MAX_PAGES:,} pages"
    if limit is not None:
        of_all = "" if count is None else f" of {count:,}"
        are_read = f"only {len(pages):,}{of_all} pages are read"
        limit = f"{are_read}: the limit of a PDF is {limit}; split the file"
    text = text[:MAX_CHARACTERS].encode(errors="replace").decode()  # without halves of characters
    return join_divided_words(clean(composed(text))), limit


def _run(work: Callable[[], object], seconds: float) -> None:
    """Call a function, and end it after so many seconds, wherever it is; raise what it raises.

    It runs in a thread, in which an exception can be raised from outside.
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
        while thread.is_alive():
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TimeIsUp))
            thread.join(1.0)
    for error in errors:
        raise error
