"""Documents: the registry of readers of files that are not pictures, by ending.

A new kind of text is one more :class:`Reader` in :data:`READERS`; a kind that is not read is one
more line in :data:`UNREAD_KINDS`, so that the reason fits the file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.data.cache import user_cache
from genius_search.data.captions import Problem
from genius_search.data.images import (
    HEIF_SUFFIXES,
    NEEDS_PHOTOS,
    NEEDS_VIDEO,
    VIDEO_SUFFIXES,
)
from genius_search.data.limits import MAX_DOCUMENT_SECONDS, run_with_timeout
from genius_search.data.mail import read_mail
from genius_search.data.markdown import read_markdown, read_org
from genius_search.data.notebooks import read_notebook
from genius_search.data.office import read_docx, read_odt
from genius_search.data.pdf import read_pdf
from genius_search.data.source_code import CODE_SUFFIXES, read_code
from genius_search.data.subtitles import SUBTITLE_SUFFIXES, join_cues, read_cues
from genius_search.data.text_files import Document, read_plain
from genius_search.data.values import fields_to_json
from genius_search.data.web_pages import read_web_page
from genius_search.errors import BadImage
from genius_search.writing import write_atomically

UNREAD_ENDING: Final = "files with the ending"
"""Prefix of the reasons for leaving out files that are neither pictures nor texts."""
CACHE_VERSION: Final = 3
"""Version of the cached texts; to be increased when a reader changes."""


class Reader(NamedTuple):
    """A reader of files with some endings."""

    noun: str
    suffixes: tuple[str, ...]
    """Endings, in lower case."""
    read: Callable[[Path], Document]
    """Function that reads a file, and raises :class:`BadImage` if it cannot."""
    is_slow: bool = False
    """Whether texts are cached, and reading stops after :data:`MAX_DOCUMENT_SECONDS`."""
    package: str | None = None
    """Import name of the package that the reader needs."""
    extra: str | None = None
    """The extra that installs the package."""

    def is_installed(self) -> bool:
        """Return whether the package that the reader needs is installed."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


def read_subtitles(path: Path) -> Document:
    """Read subtitles as a text with marks of time.

    Raises
    ------
    BadImage
        The file cannot be read, or has no subtitles.
    """
    cues = read_cues(path)
    return Document(
        join_cues(cues), {"kind": "subtitles", "seconds": round(max(cue.end for cue in cues))}
    )


READERS: Final = (
    Reader("a text", (".txt", ".text", ".rst", ".adoc", ".asciidoc", ".tex"), read_plain),
    Reader("a Markdown text", (".md", ".markdown", ".mdx", ".qmd", ".rmd"), read_markdown),
    Reader("an Org text", (".org",), read_org),
    Reader("source code", CODE_SUFFIXES, read_code),
    Reader("subtitles", SUBTITLE_SUFFIXES, read_subtitles),
    Reader("a web page", (".html", ".htm", ".xhtml"), read_web_page, is_slow=True),
    Reader("an e-mail", (".eml",), read_mail, is_slow=True),
    Reader("a notebook", (".ipynb",), read_notebook, is_slow=True),
    Reader("a Word text", (".docx",), read_docx, is_slow=True),
    Reader("an OpenDocument text", (".odt",), read_odt, is_slow=True),
    Reader("a PDF", (".pdf",), read_pdf, is_slow=True, package="pypdf", extra="pdf"),
)
"""All readers."""
READERS_BY_SUFFIX: Final = {suffix: reader for reader in READERS for suffix in reader.suffixes}
PLAIN_NAMES: Final = (
    "readme license licence copying notice authors contributors contributing changelog changes "
    "news history install todo makefile dockerfile containerfile"
)
"""Names, in lower case, of texts without an ending."""
UNREAD_KINDS: Final = {
    (*HEIF_SUFFIXES,): NEEDS_PHOTOS,
    (".json", ".xmp"): "describe pictures, and no picture in the same folder has this name",
    (".csv", ".tsv", ".jsonl", ".parquet"): "are read if they are named metadata or captions",
    (".tar", ".zip", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"): "are archives; unpack them into "
    "a folder (tar -xf FILE -C FOLDER) and give that",
    (*VIDEO_SUFFIXES,): NEEDS_VIDEO,
    (".mp3", ".m4a", ".wav", ".flac", ".ogg", ".opus", ".aac", ".wma"): (
        "are sounds, which are not read; write down what is said as .srt, .vtt or .txt"
    ),
    (".doc", ".rtf", ".pages", ".wpd"): "are texts in an old or closed format; save as .docx",
    (".xls", ".xlsx", ".ods", ".numbers"): "are spreadsheets; save what matters as PDF",
    (".ppt", ".pptx", ".odp", ".key"): "are presentations; save them as PDF",
    (".epub", ".mobi", ".azw3"): "are electronic books; convert them to PDF or HTML",
    (".psd", ".xcf", ".kra", ".ai", ".eps", ".svg", ".sketch", ".fig", ".ico"): (
        "are drawings in the format of a program; export them as PNG or JPEG"
    ),
    (".jxl", ".jp2", ".j2k", ".tga", ".exr", ".hdr", ".ppm", ".pgm", ".pcx"): (
        "are pictures in a format that is not read; convert them to JPEG or PNG"
    ),
    (".yaml", ".yml", ".toml", ".ini", ".cfg", ".conf", ".xml", ".plist", ".log"): (
        "are data or settings of programs, which are not read"
    ),
}
"""Reasons for leaving out files, by ending, each with the remedy."""
UNKNOWN_KIND: Final = "are not known as pictures or texts"


def _reader_of(path: Path) -> Reader | None:
    """Return the reader of a file, by its ending or, without one, by its name."""
    reader = READERS_BY_SUFFIX.get(path.suffix.lower())
    if reader is None and path.name.lower() in PLAIN_NAMES.split():
        return READERS[0]
    return reader


def read_document(path: Path, problems: list[Problem]) -> Document:
    """Return the text and fields of a file, from the user's cache if its reader is slow.

    If reading stops at a limit, the beginning of the text is returned, and ``problems`` gets a
    message.

    Raises
    ------
    BadImage
        The file has another type, cannot be read, or has no text, such as a scanned page.
    """
    reader = _reader_of(path)
    if reader is None or not reader.is_installed():
        raise BadImage(path, f"{UNREAD_ENDING} {path.suffix!r} {_why_unread(path, reader)}")
    try:
        document = _read_slowly(reader, path) if reader.is_slow else reader.read(path)
    except OSError as error:
        raise BadImage(path, f"cannot be read: {error.strerror}") from None
    if not document.text.strip():
        scanned = "; scanned pages need text recognition first" if reader.extra == "pdf" else ""
        raise BadImage(path, document.note or f"is {reader.noun} without text{scanned}")
    if document.note:
        problems.append(BadImage(path, document.note))
    return document


def _why_unread(path: Path, reader: Reader | None) -> str:
    """Return the end of the sentence "files with the ending '.x' …"."""
    if reader is not None:
        return f"need the extra {reader.extra}: pip install 'genius-search[{reader.extra}]'"
    suffix = path.suffix.lower()
    return next((why for kinds, why in UNREAD_KINDS.items() if suffix in kinds), UNKNOWN_KIND)


def _read_slowly(reader: Reader, path: Path) -> Document:
    """Return the document of a file from the cache, or read it and store it there."""
    status = path.stat()
    name = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {reader.noun} {CACHE_VERSION}"
    cached = user_cache() / "documents" / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"
    if not cached.is_file():
        document = _read_in_time(reader, path)
        fields = json.loads(fields_to_json(document.fields)[0] or "{}")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(cached) as temporary:
            temporary.write_text(json.dumps([document.text, fields, document.note]), "utf-8")
    return Document(*json.loads(cached.read_text(encoding="utf-8")))


def _read_in_time(reader: Reader, path: Path) -> Document:
    """Read a file, and raise :class:`BadImage` if it takes too long."""
    if reader.extra == "pdf":  # it returns the pages that it read in time
        return reader.read(path)
    documents: list[Document] = []
    try:
        run_with_timeout(lambda: documents.append(reader.read(path)), MAX_DOCUMENT_SECONDS)
    except (BadImage, OSError):
        raise
    except Exception as error:  # noqa: BLE001  parsers raise nearly anything on damaged files
        raise BadImage(path, f"cannot be read as {reader.noun}: {error}") from None
    if not documents:
        raise BadImage(path, f"takes more than {MAX_DOCUMENT_SECONDS:g} seconds to read; split it")
    return documents[0]
