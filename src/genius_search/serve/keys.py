"""API keys: a file with a line for each, which holds hashes only.

A line is a name, what the key may do (``read``, or ``write``, which includes reading) and the key's SHA-256.
A key is 32 random bytes, so there is nothing for a slow hash to protect. To revoke a key, delete its line:
the file is read again whenever it changes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from genius_search.artifact import write_file
from genius_search.errors import BadData, UsageError

Scope = Literal["read", "write"]

PREFIX: Final = "genius_"
"""How keys begin, so that they are recognised where they should not be."""
_NAME: Final = re.compile(r"[\w.@-]{1,64}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")


class Key(NamedTuple):
    """A key as it is known here."""

    name: str
    scope: Scope
    sha256: str

    @property
    def may_write(self) -> bool:
        """Whether it may add and delete items."""
        return self.scope == "write"


class Keys:
    """The keys of a file.

    Raises
    ------
    BadData
        the file cannot be read, or a line is no key.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._seen = _stamp(file)
        self._keys = read_keys(file)

    def find(self, given: str) -> Key | None:
        """The key that was given, if it is one.

        All of them are compared, each in constant time, so that how long it takes tells nothing.
        """
        self._refresh()
        digest = _hash(given)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _refresh(self) -> None:
        """Follow the file; while it cannot be read no key is good."""
        now = _stamp(self._file)
        if now != self._seen:
            self._keys = []
            self._keys = read_keys(self._file)
            self._seen = now


def read_keys(file: Path) -> list[Key]:
    """The keys of a file; empty lines and those that begin with # are passed over."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{file} cannot be read as a file of API keys ({error})") from None
    return [
        _key(file, number, line)
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]


def add_key(file: Path, *, name: str, scope: Scope) -> str:
    """Make a key and keep its hash in a file, which is made if it is not there; returns the key itself.

    Raises
    ------
    UsageError
        there is a key of this name, or it cannot be one.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"the key's name is {name!r}, expected 1 to 64 letters, digits or any of . _ - @")
    lines = [] if not file.exists() else file.read_text(encoding="utf-8").splitlines()
    if file.exists() and any(key.name == name for key in read_keys(file)):
        raise UsageError(
            f"{file} has a key named {name} already; delete its line first, or choose another name"
        )
    given = PREFIX + secrets.token_urlsafe(32)
    write_file(file, "\n".join([*lines, f"{name} {scope} {_hash(given)}", ""]).encode())
    return given


def _key(file: Path, number: int, line: str) -> Key:
    words = line.split()
    if len(words) == 3 and words[1] in get_args(Scope) and _HASH.fullmatch(words[2]):
        return Key(words[0], "write" if words[1] == "write" else "read", words[2])
    raise BadData(
        f"{file}:{number}: expected a name, read or write, and the SHA-256 of a key; `genius keys add {file} "
        "--name NAME` writes such a line"
    )


def _hash(given: str) -> str:
    return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)  # noqa: PTH116  once a request
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
