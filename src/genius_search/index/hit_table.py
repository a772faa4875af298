"""The tables that hits print as, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from genius_search.index.hits import SearchHit

TABLE_HEAD: Final = ("rank", "score", "id", "text or file")
"""Column names of printed hits."""
MAX_TABLE_WIDTH: Final = 100
"""Maximum number of characters in a line of printed hits."""
MAX_ID_WIDTH: Final = 40
"""Maximum number of characters of an id in printed hits."""


def _table_rows(hits: Sequence[SearchHit]) -> list[tuple[str, str, str, str]]:
    """Return a row of cells for each hit: rank, score, id, and the passage, text or file."""
    rows = []
    for hit in hits:
        content = hit.passage or hit.text or hit.image or ""
        score = f"{hit.score:.4f}" if hit.codes else ""  # a search without a query has no scores
        rows.append((str(hit.rank), score, _one_line(hit.id), _one_line(content)))
    return rows


def _one_line(text: str) -> str:
    """Return a text in one line, without characters that control a terminal."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "�" for character in line)


def format_table(hits: Sequence[SearchHit]) -> str:
    """Return an aligned table with one line per hit, at most :data:`MAX_TABLE_WIDTH` wide."""
    if not hits:
        return "no hits"
    rows = [TABLE_HEAD, *_table_rows(hits)]
    rank, score, name = (max(len(row[column]) for row in rows) for column in range(3))
    name = min(name, MAX_ID_WIDTH)
    lines = []
    for row in rows:
        line = f"{row[0]:>{rank}}  {row[1]:>{score}}  {_shorten(row[2], name):<{name}}  {row[3]}"
        lines.append(_shorten(line.rstrip(), MAX_TABLE_WIDTH))
    return "\n".join(lines)


def format_html(hits: Sequence[SearchHit]) -> str:
    """Return an HTML table of hits, with escaped contents."""
    if not hits:
        return "<p>no hits</p>"
    lines = ["".join(f"<th>{name}</th>" for name in TABLE_HEAD)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in _table_rows(hits)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _shorten(text: str, width: int) -> str:
    """Return a text cut to ``width`` characters; an ellipsis marks the cut."""
    return text if len(text) <= width else f"{text[: width - 1]}…"
