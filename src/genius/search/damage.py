"""Damage said by name: what fails on an index is compared with its checksums before it counts as a bug."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from genius.errors import GeniusError
from genius.search.verify import verify


@contextlib.contextmanager
def naming_damage(folder: Path) -> Iterator[None]:
    """Where an index breaks what it is used for, say which file of it is damaged.

    The whole index is verified then. If it is sound the error is a bug, and goes on as it is.

    Raises
    ------
    ArtifactMismatch, ArtifactMissing
        a file is damaged or gone; the message names it.
    """
    try:
        yield
    except GeniusError:
        raise
    except (LookupError, ValueError, sqlite3.Error):
        verify(folder)
        raise
