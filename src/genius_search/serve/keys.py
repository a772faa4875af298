"""API keys: a file with one line per key, which holds only hashes.

A line is a name, a scope (``read``, or ``write``, which includes reading) and the SHA-256 of the key. A key
has 32 random bytes, so a slow hash would protect nothing. To revoke a key, delete its line: the file is read
for every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from filelock import FileLock

from genius_search.errors import BadData, UsageError
from genius_search.writing import write_file

Scope = Literal["read", "write"]

PREFIX: Final = "genius_"
"""Start of every key, so that leaked keys are easy to recognise."""
_NAME: Final = re.compile(r"[\w.@-]{1,64}")
_LINE: Final = re.compile(r"(\S+)\s+(read|write)\s+([0-9a-f]{64})\s*")


class Key(NamedTuple):
    """A line of the file."""

    name: str
    scope: Scope
    sha256: str


def read_keys(file: Path) -> list[Key]:
    """Read a file of keys; empty lines and lines that start with # are skipped.

    Raises
    ------
    BadData
        The file cannot be read, or a line is malformed.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadData(f"{file} cannot be read as a file of API keys ({error})") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        found: Any = _LINE.fullmatch(line)
        if found:
            keys.append(Key(*found.groups()))
        elif line.strip() and not line.startswith("#"):
            raise BadData(
                f"{file}:{number}: expected a name, read or write, and the SHA-256 of a key; `genius keys "
                f"add {file} --name NAME` writes such a line"
            )
    return keys


def find_key(file: Path, key: str) -> Key | None:
    """Return the entry of a key, or None if the key is unknown."""
    digest = _hash(key)
    return next((entry for entry in read_keys(file) if hmac.compare_digest(entry.sha256, digest)), None)


def add_key(file: Path, *, name: str, scope: Scope) -> str:
    """Create a key, store its hash in a file (created if missing) and return the key.

    Raises
    ------
    UsageError
        the name is taken or malformed.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"the key's name is {name!r}, expected 1 to 64 letters, digits or any of . _ - @")
    key = PREFIX + secrets.token_urlsafe(32)
    with FileLock(f"{file}.lock") as lock:
        try:
            if file.exists() and any(entry.name == name for entry in read_keys(file)):
                raise UsageError(
                    f"{file} already has a key named {name}; delete its line first, or choose another name"
                )
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            write_file(file, "\n".join([*lines, f"{name} {scope} {_hash(key)}", ""]).encode())
        finally:
            Path(lock.lock_file).unlink()  # whoever waits for it makes a new one
    return key


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
