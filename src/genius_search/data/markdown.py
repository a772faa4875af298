"""Texts with markup whose first lines have fields: Markdown with front matter, and Org.

Front matter is YAML between lines of ``---``, or TOML between lines of ``+++``::

    ---
    title: The kite          text    The kite, and the text after the second line
    tags: [wind, red]        fields  {"title": "The kite", "tags": ["wind", "red"]}
    ---

An Org file has ``#+TITLE: The kite`` and ``#+FILETAGS: :wind:red:`` instead.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from genius_search.data.text_files import Document, read_plain

MAX_FRONT_MATTER: Final = 10_000
"""Maximum number of characters of front matter; longer text is not front matter."""
MAX_BRACKETS: Final = 200
"""Maximum number of brackets in YAML, since the time for nested lists grows with their square."""
_FRONT_MATTER: Final = re.compile(r"(---|\+\+\+)[ \t]*\r?\n")
_ORG_KEYWORD: Final = re.compile(r"#\+(\w+):[ \t]*(.*)")
_ORG_FIELDS: Final = {
    "title": "title",
    "date": "date",
    "author": "author",
    "filetags": "tags",
    "description": "description",
}
"""Keywords of Org, and the names of their fields."""
_ORG_DATE: Final = re.compile(r"[\[<](\d{4}-\d\d-\d\d)[^\]>]*[\]>]")


def read_markdown(path: Path) -> Document:
    """Read a Markdown text: the keys of its front matter become fields.

    Front matter that is not valid stays in the text.

    Raises
    ------
    BadImage
        The file cannot be read, or has no words.
    """
    document = read_plain(path)
    fields, body = split_front_matter(document.text)
    return Document(with_title(fields.get("title"), body), {**document.fields, **fields})


def with_title(title: object, body: str) -> str:
    """Return a text that starts with its title, unless its first line contains it."""
    first_line = body.partition("\n")[0]
    if not isinstance(title, str) or not title.strip() or title.strip() in first_line:
        return body
    return f"{title.strip()}\n\n{body}".strip()


def split_front_matter(text: str) -> tuple[Mapping[str, Any], str]:
    """Return the fields of front matter, and the text after it."""
    start = _FRONT_MATTER.match(text)
    if start is None:
        return {}, text
    fence = start[1]
    close = re.compile(rf"^{re.escape(fence)}[ \t]*\r?$", re.MULTILINE)
    end = close.search(text, start.end(), start.end() + MAX_FRONT_MATTER)
    if end is None:
        return {}, text
    try:
        fields = _parse(fence, text[start.end() : end.start()])
    except (yaml.YAMLError, ValueError, RecursionError, TypeError, AttributeError):
        return {}, text
    if not isinstance(fields, dict):
        return {}, text
    return {str(name): value for name, value in fields.items()}, text[end.end() :].strip()


def _parse(fence: str, source: str) -> object:
    if fence == "+++":
        return tomllib.loads(source.replace("\r\n", "\n"))
    if source.count("[") + source.count("{") > MAX_BRACKETS:
        return None
    # A few aliases can stand for gigabytes: a: [x, x], b: [*a, *a], c: [*b, *b] and so on.
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(source, yaml.SafeLoader)):
        return None
    return yaml.safe_load(source) or {}


def read_org(path: Path) -> Document:
    """Read an Org text: its title, date, author, tags and description become fields.

    Raises
    ------
    BadImage
        The file cannot be read, or has no words.
    """
    document = read_plain(path)
    fields: dict[str, Any] = {}
    lines = document.text.splitlines()
    body: list[str] = []
    for line in lines:
        keyword = _ORG_KEYWORD.fullmatch(line.strip())
        name = None if keyword is None else _ORG_FIELDS.get(keyword[1].lower())
        if keyword is None or name is None:
            body.append(line)
        elif keyword[2].strip():
            fields[name] = _org_value(name, keyword[2].strip())
    text = with_title(fields.get("title"), "\n".join(body).strip())
    return Document(text, {**document.fields, **fields})


def _org_value(name: str, text: str) -> object:
    """Return the value of a keyword: ``<2024-05-01 Wed>`` is a date, ``:wind:red:`` two tags."""
    match name:
        case "tags":
            return [tag for tag in re.split(r"[:\s]+", text) if tag]
        case "date":
            return _ORG_DATE.sub(r"\1", text)
    return text
