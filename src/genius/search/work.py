"""What a killed writer goes on from: a folder inside the index, there only while somebody fills the index."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Final

WORK: Final = ".work"
"""Folder inside the index for what has to survive a kill."""


def remove_work(folder: Path) -> None:
    """Take away what was kept for the case of a kill; only for whoever holds the index for writing."""
    shutil.rmtree(folder / WORK, ignore_errors=True)


def work_bytes(folder: Path) -> int:
    """What is left of a writer that was killed, or is being written now."""
    found = 0
    for path in (folder / WORK).rglob("*"):
        with contextlib.suppress(OSError):  # a writer removed it meanwhile
            found += path.stat().st_size if path.is_file() else 0
    return found
