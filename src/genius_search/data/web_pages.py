"""Web pages: the texts of HTML files, by the parser of the standard library.

If a page has an element ``main`` or ``article``, its text is that element's, without menus.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

from genius_search.data.limits import MAX_DOCUMENT_CHARACTERS, read_bytes, shorten
from genius_search.data.markdown import with_title
from genius_search.data.text_files import WESTERN, Document

MIN_MAIN_SHARE: Final = 0.1
"""Minimum share of a page's text that its main element needs to stand for the page."""
_HIDDEN: Final = frozenset(
    ("script", "style", "noscript", "template", "svg", "math", "head", "select", "iframe")
)
"""Elements without text to read; they may be nested in one another."""
_BLOCK_NAMES: Final = (
    "address article aside blockquote br caption dd div dl dt fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol option p pre section table tr ul"
)
_BLOCKS: Final = frozenset(_BLOCK_NAMES.split())
"""Elements that start and end a line."""
_META_FIELDS: Final = {
    "author": "author",
    "description": "description",
    "keywords": "keywords",
    "date": "date",
    "article:published_time": "date",
    "dcterms.date": "date",
}
"""Names in ``meta`` elements, and those of their fields."""
_CHARSET: Final = re.compile(
    rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE
)


class _TextParser(HTMLParser):
    """Collects the text of a page, of its main element, and its fields."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.fields: dict[str, Any] = {}
        self.parts: list[str] = []
        self.main_parts: list[str] = []
        self._hidden: list[str] = []
        self._main_depth = 0
        self._num_pre = 0  # open elements whose line breaks count
        self._is_in_title = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note where a hidden or main element starts, and read fields of the page."""
        values = dict(attrs)
        if tag == "body" or (tag in _BLOCKS and self._hidden == ["head"]):
            self._hidden.clear()  # the end of the head may be left out
        elif tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag == "title":
            self._is_in_title = not self.title and "svg" not in self._hidden
        elif tag == "meta":
            name = _META_FIELDS.get((values.get("name") or values.get("property") or "").lower())
            if name and values.get("content"):
                self.fields.setdefault(name, str(values["content"]).strip())
        elif tag == "html" and values.get("lang"):
            self.fields["language"] = values["lang"]
        self._main_depth += tag in ("main", "article")
        self._num_pre += tag == "pre"
        if tag in _BLOCKS:
            self._add("\n")

    def handle_endtag(self, tag: str) -> None:
        """Note where a hidden or main element ends."""
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        self._is_in_title = self._is_in_title and tag != "title"
        if tag in _BLOCKS:
            self._add("\n")
        if tag in ("main", "article"):
            self._main_depth = max(0, self._main_depth - 1)
        elif tag == "pre":
            self._num_pre = max(0, self._num_pre - 1)
        elif tag in ("td", "th"):
            self._add(" ")

    def handle_data(self, data: str) -> None:
        """Collect a piece of text."""
        if self._is_in_title:
            self.title += data
        else:
            self._add(data if self._num_pre else data.replace("\n", " "))

    def _add(self, text: str) -> None:
        if self._hidden:
            return
        self.parts.append(text)
        if self._main_depth:
            self.main_parts.append(text)


def read_web_page(path: Path) -> Document:
    """Read an HTML file: its text begins with its title.

    Raises
    ------
    BadImage
        The file cannot be read, or is too large.
    """
    return parse_html(_decode(read_bytes(path)))


def parse_html(source: str) -> Document:
    """Return the text and the fields of a page."""
    parser = _TextParser()
    parser.feed(source[: 8 * MAX_DOCUMENT_CHARACTERS])
    parser.close()
    text, main_text = (_join_lines(parts) for parts in (parser.parts, parser.main_parts))
    if len(main_text) > MIN_MAIN_SHARE * len(text):
        text = main_text
    title = " ".join(parser.title.split())
    fields = {"title": title, **parser.fields} if title else parser.fields
    text, note = shorten(with_title(title, text))
    return Document(text, fields, note)


def _join_lines(parts: list[str]) -> str:
    lines = [" ".join(line.split()) for line in "".join(parts).split("\n")]
    return "\n".join(line for line in lines if line)


def _decode(raw: bytes) -> str:
    """Return a page as text, in the encoding that it names, UTF-8 or Windows-1252."""
    charset = _CHARSET.search(raw[:4096])
    encodings = ["utf-8-sig", WESTERN]
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        encodings.insert(0, "utf-16")
    elif charset is not None:
        encodings.insert(0, charset[1].decode("ascii", "replace"))
    for encoding in encodings:
        try:
            return raw.decode(encoding)
        except (LookupError, ValueError):
            continue
    return raw.decode("utf-8", errors="replace")
