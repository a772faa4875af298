"""Folders that appear complete or not at all, and never replace other things."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from filelock import FileLock, Timeout

from genius_search.artifact import recover
from genius_search.errors import UsageError
from genius_search.hub.access import translate_os_errors
from genius_search.writing import put_in_place, sync_tree


@contextmanager
def claim_folder(place: Path) -> Iterator[Path]:
    """Hold a folder that is to be made or replaced, so that no other process writes it; yields its full name.

    Raises
    ------
    UsageError
        the name is a file's or the current folder's, or another process writes the folder.
    """
    folder = place.expanduser().resolve()
    if Path.cwd().is_relative_to(folder):
        raise UsageError(f"{place} is the folder that you are in; give the name of a new one")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{place} is a file; give the name of a new folder")
    with translate_os_errors(str(place)):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UsageError(
                f"{folder} is being written by another process; wait for it, or choose another place"
            ) from None
        try:
            yield folder
        finally:
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()


@contextmanager
def write_folder(place: Path, *, check_replaceable: Callable[[Path], None]) -> Iterator[Path]:
    """Yield an empty folder to fill; it takes its place when the block ends, and is gone if that fails.

    Parameters
    ----------
    check_replaceable
        raises :class:`UsageError` for a folder that holds what must not be replaced.
    """

    def check(folder: Path) -> None:
        if folder.exists() and any(folder.iterdir()):
            check_replaceable(folder)

    with claim_folder(place) as folder:
        old = folder.parent / f".{folder.name}.old"
        check(old)
        recover(folder)
        check(folder)
        name = f".{folder.name.removeprefix('.')}"
        for left in folder.parent.glob(f"{escape(name)}.{'[0-9a-f]' * 8}.partial"):  # by a killed process
            shutil.rmtree(left)
        partial = folder.parent / f"{name}.{uuid.uuid4().hex[:8]}.partial"
        partial.mkdir()
        try:
            yield partial
            sync_tree(partial)
            put_in_place(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
