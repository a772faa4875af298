"""API keys: a text file with one key per line, as ``NAME read KEY`` or ``NAME write KEY``.

A write key may also read. The file contains the keys in plain text, so only its owner may read it.
To revoke a key, delete its line: the file is read again when it has changed.
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
    """A line of the file of keys."""

    name: str
    """The name of the client."""
    scope: str
    """``read`` or ``write``."""
    key: str
    """The secret."""


def read_keys(file: Path) -> list[Key]:
    """Read a file of keys, ignoring empty lines and lines that start with #.

    Raises
    ------
    BadData
        The file cannot be read, can be read by other users, or has a malformed line.
    """
    try:
        with file.open(encoding="utf-8-sig") as key_file:
            status = os.fstat(key_file.fileno())
            lines = key_file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{file} cannot be read as a file of API keys ({error})") from None
    # Only the owner can change the mode. In a container, the mounted file often has another owner.
    if sys.platform != "win32" and status.st_uid == os.geteuid() and status.st_mode & 0o077:
        raise BadData(
            f"{file} contains API keys and can be read by other users; run "
            f"`chmod 600 {shlex.quote(str(file))}`"
        )
    keys = []
    for number, line in enumerate(map(str.strip, lines), start=1):
        if match := _LINE.fullmatch(line):
            keys.append(Key(match[1], match[2], match[3]))
        elif line and not line.startswith("#"):
            raise BadData(
                f"{file}:{number}: expected `NAME read KEY` or `NAME write KEY`, with a key of at "
                "least 20 letters, digits, - and _; create one with `openssl rand -hex 32`"
            )
    return keys


class KeyFile:
    """A file of keys, which is read again when it has changed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._version: tuple[int, ...] = ()
        """Number, size, mode and times of the file when it was read."""
        self._keys: list[Key] = []

    def find(self, secret: str) -> Key | None:
        """Return the line of a key, or None if it is unknown, in constant time.

        Raises
        ------
        BadData
            The file cannot be read; see :func:`read_keys`.
        """
        try:
            status = self._file.stat()
            names = ("st_ino", "st_size", "st_mode", "st_uid", "st_mtime_ns", "st_ctime_ns")
            version = tuple(getattr(status, name) for name in names)
        except OSError:
            version = ()  # reading it fails with a message
        if not version or version != self._version:
            self._version = ()
            self._keys = read_keys(self._file)
            self._version = version
        secret_bytes = secret.encode("utf-8", "surrogatepass")
        # All lines are compared, so that the time does not reveal which line or prefix matched.
        matches = [key for key in self._keys if hmac.compare_digest(key.key.encode(), secret_bytes)]
        return matches[0] if matches else None
