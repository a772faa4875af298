"""A folder that appears when it is complete: where it may be, and that one process at a time fills it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from genius.errors import UsageError

__all__ = ["alone", "new_folder"]


def new_folder(place: Path) -> Path:
    """The full name of a folder that is to be made, or made anew.

    Raises
    ------
    UsageError
        one is in it now, so it cannot be put there under its name; or a file has this name.
    """
    folder = place.expanduser().resolve()
    if Path.cwd().is_relative_to(folder):
        raise UsageError(f"{place} is the folder that you are in; give the name of a new one")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{place} is a file; give the name of a new folder")
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Fill a folder while nobody else does.

    Raises
    ------
    UsageError
        another process is at it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    try:
        with FileLock(lock, timeout=0):
            try:
                yield
            finally:
                lock.unlink(missing_ok=True)
    except Timeout:
        raise UsageError(
            f"{folder} is being written by another process; wait for it, or choose another place"
        ) from None
