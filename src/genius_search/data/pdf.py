"""Texts of PDF files: pypdf needs about twenty milliseconds per page.

A small file can take hours: pages may share their contents, which may be compressed a thousandfold.
So reading stops at limits, and the report names the pages that were read.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from genius_search.data.limits import (
    MAX_DOCUMENT_CHARACTERS,
    MAX_DOCUMENT_SECONDS,
    run_with_timeout,
)
from genius_search.data.text_files import Document
from genius_search.errors import BadImage
from genius_search.records import composed
from genius_search.text import clean, join_divided_words

MAX_PDF_PAGES: Final = 5_000
"""Maximum number of pages that are read from a file."""


def read_pdf(path: Path) -> Document:
    """Return the text of a PDF file. If reading stops at a limit, it is that of the first pages.

    Raises
    ------
    BadImage
        The file is damaged.
    """
    from pypdf import PdfReader  # noqa: PLC0415  an extra

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it logs each oddity of a file
    pages: list[str] = []
    num_pages: int | None = None

    def read() -> None:
        # Every page is stored at once, so that the pages before a timeout remain.
        nonlocal num_pages
        reader = PdfReader(path)
        num_pages = len(reader.pages)
        length = 0
        for page in reader.pages[:MAX_PDF_PAGES]:
            pages.append(page.extract_text())
            length += len(pages[-1])
            if length > MAX_DOCUMENT_CHARACTERS:
                break

    try:
        is_complete = run_with_timeout(read, MAX_DOCUMENT_SECONDS)
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001  pypdf raises nearly anything on damaged files
        raise BadImage(path, f"cannot be read as a PDF: {error}") from None
    text = "\n\n".join(pages)
    limit = None
    if len(text) > MAX_DOCUMENT_CHARACTERS:
        limit = f"{MAX_DOCUMENT_CHARACTERS:,} characters"
    elif not is_complete:
        limit = f"{MAX_DOCUMENT_SECONDS:g} seconds"
    elif len(pages) < (num_pages or 0):
        limit = f"{MAX_PDF_PAGES:,} pages"
    message = None
    if limit is not None:
        of_all = "" if num_pages is None else f" of {num_pages:,}"
        message = (
            f"only {len(pages):,}{of_all} pages are read: the limit of a PDF is {limit}; "
            "split the file"
        )
    text = text[:MAX_DOCUMENT_CHARACTERS]
    text = text.encode(errors="replace").decode()  # replaces halves of surrogate pairs
    return Document(join_divided_words(clean(composed(text))), note=message)
