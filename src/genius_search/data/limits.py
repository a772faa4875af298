"""Limits for the reading of documents, since a small file can take hours or all memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from genius_search.data.images import require_file
from genius_search.errors import BadImage
from genius_search.records import composed
from genius_search.text import clean

MAX_DOCUMENT_BYTES: Final = 64_000_000
"""Maximum size of a file that holds a text and more, such as pictures in a notebook."""
MAX_DOCUMENT_CHARACTERS: Final = 2_000_000
"""Maximum length of a document's text: a thousand dense pages."""
MAX_DOCUMENT_SECONDS: Final = 20.0
"""Maximum time for a document: a PDF of a thousand pages typically takes this long."""


class _TimeIsUp(BaseException):
    """Stops the reading of a file. It is not an Exception, because readers catch those."""


def read_bytes(path: Path) -> bytes:
    """Return the contents of a file of at most :data:`MAX_DOCUMENT_BYTES`.

    Raises
    ------
    BadImage
        The file is missing, empty or too large.
    """
    require_file(path)
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise BadImage(path, f"has more than {MAX_DOCUMENT_BYTES:,} bytes; split it")
    return path.read_bytes()


def shorten(text: str, limit: int = MAX_DOCUMENT_CHARACTERS) -> tuple[str, str | None]:
    """Return the cleaned beginning of a text, and a message if it is longer than the limit."""
    note = None
    if len(text) > limit:
        note = f"only the first {limit:,} characters of {len(text):,} are read; split the file"
    text = text[:limit].encode(errors="replace").decode()  # replaces halves of surrogate pairs
    return clean(composed(text)).strip(), note


def run_with_timeout(work: Callable[[], object], seconds: float) -> bool:
    """Call a function, and stop it after a time; return whether it came to its end.

    The function runs in a thread, into which CPython can raise an exception from outside. An
    exception of the function is raised again here.
    """
    errors: list[Exception] = []
    is_complete = False
    is_ending = False

    def run() -> None:
        nonlocal is_complete, is_ending
        with contextlib.suppress(_TimeIsUp):  # a second one may come after the first
            with contextlib.suppress(_TimeIsUp):
                try:
                    work()
                    is_complete = True
                except Exception as error:  # noqa: BLE001  raised again below
                    errors.append(error)
            is_ending = True

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    finally:
        while thread.is_alive() and not is_ending:  # again: a bare "except:" may catch it
            raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in_thread(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TimeIsUp))
            thread.join(1.0)
        thread.join()
    for error in errors:
        raise error
    return is_complete
