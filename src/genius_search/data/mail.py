"""E-mails in files (``.eml``), by the standard library's package email."""

from __future__ import annotations

import contextlib
import email
import email.policy
import email.utils
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import Any, Final, cast

from genius_search.data.limits import MAX_DOCUMENT_CHARACTERS, read_bytes, shorten
from genius_search.data.markdown import with_title
from genius_search.data.text_files import WESTERN, Document
from genius_search.data.web_pages import parse_html

MAX_PARTS: Final = 1_000
"""Maximum number of parts of a message that are looked at."""
MAX_HEADER_CHARACTERS: Final = 50_000
"""Maximum length of a header. Time and memory to decode one grow with the square of its length."""
_PEOPLE: Final = ("from", "to", "cc")


class _Policy(email.policy.EmailPolicy):
    """Reads the beginning of long headers."""

    def header_source_parse(self, sourcelines: list[str]) -> tuple[str, str]:
        """Return the name and the value of a header that was read as these lines."""
        name, value = super().header_source_parse(sourcelines)
        return name, value[:MAX_HEADER_CHARACTERS]


def read_mail(path: Path) -> Document:
    """Read a message: subject and body are its text, attachments are only named.

    Fields are ``title`` (the subject), ``from``, ``to``, ``cc``, ``date`` and ``attachments``.

    Raises
    ------
    BadImage
        The file cannot be read, or is too large.
    """
    parsed = email.message_from_bytes(read_bytes(path), policy=_Policy())
    message = cast("EmailMessage", parsed)  # the class that the policy makes
    fields = _fields_of(message)
    texts: dict[str, list[str]] = {"plain": [], "html": []}
    attachments: list[str] = []
    for part in _parts_of(message):
        name = part.get_filename()
        if name or part.get_content_disposition() == "attachment":
            attachments.append(name or part.get_content_type())
        elif part.get_content_type() == "text/plain":
            texts["plain"].append(_text_of(part))
        elif part.get_content_type() == "text/html":
            texts["html"].append(parse_html(_text_of(part)).text)
    if attachments:
        fields["attachments"] = attachments
    body = "\n\n".join(texts["plain"]) or "\n\n".join(texts["html"])
    text, note = shorten(with_title(fields.get("title"), body))
    if any(len(value) == MAX_HEADER_CHARACTERS for _, value in message.raw_items()):
        note = note or f"only the first {MAX_HEADER_CHARACTERS:,} characters of a header are read"
    return Document(text, fields, note)


def _parts_of(message: EmailMessage) -> Iterator[EmailMessage]:
    """Yield the parts of a message that have no parts themselves."""
    for number, part in enumerate(message.walk()):
        if number >= MAX_PARTS:
            return
        if not part.is_multipart():
            yield part


def _text_of(part: EmailMessage) -> str:
    """Return the text of a part, in its encoding or, if that is wrong, in Windows-1252."""
    try:
        return str(part.get_content())[:MAX_DOCUMENT_CHARACTERS]
    except (LookupError, ValueError, AttributeError):
        payload = part.get_payload(decode=True)
        raw = payload if isinstance(payload, bytes) else b""
        return raw[:MAX_DOCUMENT_CHARACTERS].decode(WESTERN, errors="replace")


def _fields_of(message: EmailMessage) -> dict[str, Any]:
    """Return the fields of a message's header."""
    fields: dict[str, Any] = {}
    if subject := _header(message, "subject"):
        fields["title"] = subject
    for name in _PEOPLE:
        people = [
            f"{person} <{address}>" if person else address
            for person, address in email.utils.getaddresses([_header(message, name)])
            if person or address
        ]
        if people:
            fields[name] = people[0] if name == "from" else people
    with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
        fields["date"] = email.utils.parsedate_to_datetime(_header(message, "date")).isoformat()
    return fields


def _header(message: EmailMessage, name: str) -> str:
    """Return a header in one line; empty if it is missing or damaged."""
    try:
        return " ".join(str(message.get(name, "")).split())
    except (ValueError, LookupError, AttributeError, TypeError, IndexError):
        return ""
