"""Read the bodies of requests: JSON, alone or with pictures in multipart/form-data."""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Final, TypeVar

from pydantic import ValidationError

from genius_search.serve.schemas import (
    JSON_BYTES,
    JSON_VALUES,
    MAX_ITEMS,
    SEARCH_BYTES,
    SEARCH_MEMBERS,
    SEARCH_VALUES,
    NewItems,
    Problem,
    RequestBody,
)

if TYPE_CHECKING:
    from genius_search.serve.service import Threads

Body = TypeVar("Body", bound=RequestBody)

MEMBER_STARTS: Final = (b":", b"[", b"{")
"""Characters that each field and each list or object of JSON has."""
GZIP_START: Final = b"\x1f\x8b"
"""How every gzip file begins, and no JSON or form does."""
MAX_INLINE_BYTES: Final = 16 << 10
"""Bodies up to this size are parsed on the event loop, larger ones in a thread."""
PART_NAME: Final = re.compile(
    rb'^content-disposition:.*?;[ \t]*name="?([^";\r\n]+)', re.IGNORECASE | re.MULTILINE
)
"""The header of a part of multipart/form-data; group 1 is the name of the part."""


async def read_body(
    content_type: str, body: bytes, body_type: type[Body], parsers: Threads
) -> tuple[Body, Mapping[str, memoryview]]:
    """Return the JSON of a body, and the pictures of multipart/form-data by name.

    The JSON is the whole body, or the part ``json``; all other parts are pictures.
    """
    if len(body) <= MAX_INLINE_BYTES and not body.startswith(GZIP_START):
        return parse_body(content_type, body, body_type)
    return await parsers.run(lambda: parse_body(content_type, body, body_type))


def parse_body(
    content_type: str, body: bytes, body_type: type[Body]
) -> tuple[Body, Mapping[str, memoryview]]:
    """Parse a body; see :func:`read_body`."""
    if body.startswith(GZIP_START):
        body = unzip(body)
    if content_type.lower().startswith("application/json"):
        return read_json(body_type, body), {}
    parts = split_parts(content_type, body)
    source = parts.pop("json", memoryview(b"{}"))
    return read_json(body_type, bytes(source)), parts


def unzip(body: bytes) -> bytes:
    """Decompress a body of gzip up to the maximum size of JSON.

    Raises
    ------
    Problem
        The body is damaged or too large.
    """
    unzipper = zlib.decompressobj(wbits=31)  # 16 for gzip's header, 15 for the largest window
    try:
        content = unzipper.decompress(body, JSON_BYTES + 1)
    except zlib.error as error:
        raise Problem(400, f"the body cannot be read as gzip: {error}") from None
    if len(content) > JSON_BYTES:
        raise Problem(413, f"the body has more than {JSON_BYTES:,} bytes without compression")
    if not unzipper.eof:
        raise Problem(400, "the body cannot be read as gzip: its end is missing")
    return content


def read_json(body_type: type[Body], source: bytes) -> Body:
    """Parse JSON as a body.

    Raises
    ------
    ValidationError
        It does not match the schema.
    Problem
        It is too large.
    """
    source = source.removeprefix(codecs.BOM_UTF8)
    is_items = body_type is NewItems
    max_bytes, max_values = (JSON_BYTES, JSON_VALUES) if is_items else (SEARCH_BYTES, SEARCH_VALUES)
    if len(source) > max_bytes:
        raise Problem(413, f"the JSON has more than {max_bytes:,} bytes; send less per request")
    if source.count(b",") > max_values:
        raise Problem(
            413,
            f"the JSON has more than {max_values:,} commas; send less per request, and vectors as "
            "base64 of little-endian float32",
        )
    if not is_items and sum(map(source.count, MEMBER_STARTS)) > SEARCH_MEMBERS:
        raise Problem(
            413,
            f"the JSON has more than {SEARCH_MEMBERS:,} colons and opening brackets; send less per "
            "request",
        )
    try:
        return body_type.model_validate_json(source)
    except ValidationError as error:
        if error.error_count() > 1 or error.errors()[0]["type"] != "json_invalid":
            raise
        try:
            value = json.loads(source)
        except (ValueError, RecursionError):
            raise error from None
        # Pydantic's parser refuses a lone surrogate without naming the field. Python's parser
        # accepts it, and validating its result names the field.
        body_type.model_validate(value, strict=False)
        raise


def split_parts(content_type: str, body: bytes) -> dict[str, memoryview]:
    r"""Split a body of multipart/form-data into its parts, by name (RFC 7578).

    Libraries parse hostile bodies byte by byte in Python, so the parts are found with
    ``bytes.find``::

        --BOUNDARY\r\n
        Content-Disposition: form-data; name="json"\r\n
        \r\n
        {"image": "photo"}\r\n--BOUNDARY\r\n
        ...

    Raises
    ------
    Problem
        The body is malformed, or has too many parts.
    """
    boundary = re.search(r'boundary="?([^";,\s]{1,70})', content_type, re.IGNORECASE)
    if boundary is None:
        raise Problem(400, "multipart/form-data needs a boundary")
    delimiter = b"\r\n--" + boundary[1].encode("ascii", "replace")
    # The first delimiter has no line break before it, hence -2.
    positions: list[int] = []
    position = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
    while position != -1:
        if len(positions) == MAX_ITEMS + 2:
            raise Problem(400, f"multipart/form-data may have at most {MAX_ITEMS + 1:,} parts")
        positions.append(position)
        position = body.find(delimiter, position + len(delimiter))
    parts: dict[str, memoryview] = {}
    for position, next_position in pairwise(positions):
        head_start = position + len(delimiter)
        head_end = body.find(b"\r\n\r\n", head_start, next_position)
        name = PART_NAME.search(body, head_start, min(head_end, head_start + 2_000))
        if head_end < 0 or name is None:
            raise Problem(400, "a part of multipart/form-data has no name")
        content = memoryview(body)[head_end + 4 : next_position]
        parts[name[1].decode("utf-8", "replace")] = content
    return parts
