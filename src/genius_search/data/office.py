"""Texts of word processors: ``.docx`` and ``.odt``, both archives of XML files.

Archives can contain a thousand times their size, and XML can be nested without an end, so both
are read in pieces and up to limits. Entities and DTDs are refused by defusedxml.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.etree.ElementTree import ParseError

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

from genius_search.data.images import require_file
from genius_search.data.limits import MAX_DOCUMENT_BYTES, MAX_DOCUMENT_CHARACTERS, shorten
from genius_search.data.markdown import with_title
from genius_search.data.text_files import Document
from genius_search.errors import BadImage

MAX_ARCHIVE_ENTRIES: Final = 10_000
MAX_UNPACKED_BYTES: Final = 64_000_000
"""Maximum size of an XML file in an archive."""
MAX_UNPACKED_RATIO: Final = 200
"""Maximum ratio of an XML file of more than :data:`FREE_UNPACKED_BYTES` to its compressed size.
Long texts have ratios of 5 to 30."""
FREE_UNPACKED_BYTES: Final = 4_000_000
MAX_XML_DEPTH: Final = 500
CHUNK_BYTES: Final = 1 << 16
"""Number of bytes that are unpacked and parsed together."""
_ENCRYPTED: Final = 0x1
"""Flag of an encrypted entry of an archive."""
_PROPERTY_FIELDS: Final = {
    "title": "title",
    "creator": "author",
    "keywords": "keywords",
    "keyword": "keywords",
    "created": "date",
    "creation-date": "date",
}
"""Local names of elements with metadata, and those of their fields."""


class _Format(NamedTuple):
    """Where a format keeps its texts."""

    contents: tuple[str, ...]
    """XML files with texts; the first one must exist."""
    metadata: str
    blocks: frozenset[str]
    """Elements that end a line."""
    texts: frozenset[str] | None
    """Elements whose text is read; None for all elements."""
    skipped: frozenset[str]
    """Elements of which nothing is read."""


_DOCX: Final = _Format(
    ("word/document.xml", "word/footnotes.xml", "word/endnotes.xml"),
    "docProps/core.xml",
    blocks=frozenset({"p", "br", "cr"}),
    texts=frozenset({"t"}),
    skipped=frozenset({"Fallback"}),  # repeats the text of an AlternateContent
)
_ODT: Final = _Format(
    ("content.xml",),
    "meta.xml",
    blocks=frozenset({"p", "h", "line-break"}),
    texts=None,
    skipped=frozenset({"tracked-changes", "annotation", "binary-data"}),
)


class _TextTarget:
    """Collects the text of an XML file while it is parsed, one line for each paragraph."""

    def __init__(self, path: Path, layout: _Format) -> None:
        self.parts: list[str] = []
        self.length = 0
        self._path = path
        self._layout = layout
        self._open_elements: list[str] = []
        self._num_skipped = 0

    def start(self, tag: str, _: Mapping[str, str]) -> None:
        """Note where an element starts; blanks and tabs are elements, too."""
        name = _local_name(tag)
        self._open_elements.append(name)
        if len(self._open_elements) > MAX_XML_DEPTH:
            raise BadImage(self._path, "contains XML that is nested too deeply; it is not read")
        self._num_skipped += name in self._layout.skipped
        if name in ("tab", "s"):
            self._add(" ")

    def end(self, _: str) -> None:
        """Note where an element ends."""
        name = self._open_elements.pop()
        if name in self._layout.blocks:
            self._add("\n")
        self._num_skipped -= name in self._layout.skipped

    def data(self, text: str) -> None:
        """Collect a piece of text."""
        texts = self._layout.texts
        if texts is None or (self._open_elements and self._open_elements[-1] in texts):
            self._add(text)

    def _add(self, text: str) -> None:
        if not self._num_skipped:
            self.parts.append(text)
            self.length += len(text)


class _FieldTarget:
    """Collects the fields in an XML file of metadata."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self._name: str | None = None

    def start(self, tag: str, _: Mapping[str, str]) -> None:
        """Note the name of an element."""
        self._name = _PROPERTY_FIELDS.get(_local_name(tag))
        if self._name is not None:
            self.values.setdefault(self._name, []).append("")

    def end(self, _: str) -> None:
        """Note the end of an element."""
        self._name = None

    def data(self, text: str) -> None:
        """Collect a value."""
        if self._name is not None:
            self.values[self._name][-1] += text


def _local_name(tag: str) -> str:
    """Return the name of an element without its namespace: ``{urn:x}p`` is ``p``."""
    return tag.rpartition("}")[2]


def read_docx(path: Path) -> Document:
    """Read a text of Word: paragraphs, tables and notes, without deleted changes.

    Raises
    ------
    BadImage
        The file is damaged, encrypted or too large.
    """
    return _read(path, _DOCX)


def read_odt(path: Path) -> Document:
    """Read a text of LibreOffice: paragraphs, tables and notes, without deleted changes.

    Raises
    ------
    BadImage
        The file is damaged, encrypted or too large.
    """
    return _read(path, _ODT)


def _read(path: Path, layout: _Format) -> Document:
    """Read the texts and the metadata in an archive."""
    require_file(path)
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise BadImage(path, f"has more than {MAX_DOCUMENT_BYTES:,} bytes; split it")
    text = _TextTarget(path, layout)
    metadata = _FieldTarget()
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            if len(entries) > MAX_ARCHIVE_ENTRIES or layout.contents[0] not in entries:
                raise BadImage(path, f"is not a {path.suffix} file of a word processor")
            for name in layout.contents:
                if name in entries:
                    _parse(archive, entries[name], path, text)
            if layout.metadata in entries:
                _parse(archive, entries[layout.metadata], path, metadata)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BadImage(path, f"is damaged or unreadable: {error}") from None
    except (ParseError, DefusedXmlException) as error:
        raise BadImage(path, f"contains XML that cannot be read: {error}") from None
    return _document(text, metadata)


def _parse(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path, target: _TextTarget | _FieldTarget
) -> None:
    """Parse an XML file in an archive, up to the limits of size."""
    if entry.flag_bits & _ENCRYPTED:
        raise BadImage(path, "is encrypted; save it without a password")
    ratio_limit = max(FREE_UNPACKED_BYTES, MAX_UNPACKED_RATIO * entry.compress_size)
    remaining = min(MAX_UNPACKED_BYTES, ratio_limit)
    parser = DefusedXMLParser(target=target, forbid_dtd=True)
    with archive.open(entry) as file:
        while chunk := file.read(CHUNK_BYTES):
            remaining -= len(chunk)
            if remaining < 0:
                raise BadImage(path, "unpacks to far more than its size, so it is not read")
            parser.feed(chunk)
            if isinstance(target, _TextTarget) and target.length > MAX_DOCUMENT_CHARACTERS:
                return
    parser.close()


def _document(text: _TextTarget, metadata: _FieldTarget) -> Document:
    """Return the collected text, beginning with its title, and the fields."""
    fields: dict[str, Any] = {}
    for name, values in metadata.values.items():
        filled = [value.strip() for value in values if value.strip()]
        if filled:
            fields[name] = filled if name == "keywords" else filled[0]
    lines = [" ".join(line.split()) for line in "".join(text.parts).split("\n")]
    body = "\n".join(line for line in lines if line)
    shortened, note = shorten(with_title(fields.get("title"), body))
    return Document(shortened, fields, note)
