"""API keys: a text file with a line for each, ``NAME read KEY`` or ``NAME write KEY``.

Keys stand in it as they are, so only its owner may read it. Who may write may also read. To revoke a key,
delete its line: the file is read for every request.
"""

from __future__ import annotations

import hmac
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Final, NamedTuple

from genius_search.errors import BadData

_LINE: Final = re.compile(r"([\w.@-]{1,64})\s+(read|write)\s+([A-Za-z0-9_-]{20,})")


class Key(NamedTuple):
    """A line of the file."""

    name: str
    scope: str
    """``read`` or ``write``."""
    key: str


def read_keys(file: Path) -> list[Key]:
    """Read a file of keys; empty lines and lines that start with # are skipped.

    Raises
    ------
    BadData
        The file cannot be read, or can be by others, or a line is malformed.
    """
    try:
        with file.open(encoding="utf-8-sig") as opened:
            status, lines = os.fstat(opened.fileno()), opened.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{file} cannot be read as a file of API keys ({error})") from None
    # Who does not own it cannot mend this, as in a container that is given the file.
    if sys.platform != "win32" and status.st_uid == os.geteuid() and status.st_mode & 0o077:
        raise BadData(
            f"{file} has API keys that others may read; `chmod 600 {shlex.quote(str(file))}` ends this"
        )
    keys = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if found := _LINE.fullmatch(line):
            keys.append(Key(found[1], found[2], found[3]))
        elif line and not line.startswith("#"):
            raise BadData(
                f"{file}:{number}: expected `NAME read KEY` or `NAME write KEY`, the key of at least 20 "
                "letters, digits, - and _; `openssl rand -hex 32` makes one"
            )
    return keys


def find_key(file: Path, key: str) -> Key | None:
    """Return the line of a key, or None if the key is unknown; it takes as long for each."""
    given = key.encode("utf-8", "surrogatepass")
    found = [line for line in read_keys(file) if hmac.compare_digest(line.key.encode(), given)]
    return found[0] if found else None
