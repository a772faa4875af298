"""Durable writing: files and folders appear complete or not at all, also after a power failure.

:func:`write_atomically` replaces a file, :func:`new_folder` makes a folder, and :class:`ArtifactWriter` fills
or replaces the folder of a stage. Each fsyncs the files first, then what names them, then the parent folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from genius_search.artifact import (
    FORMAT,
    MANIFEST,
    Manifest,
    file_fingerprint,
    fingerprint_of,
    open_artifact,
    read_json,
)
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError

if TYPE_CHECKING:
    from filelock import FileLock

CHECKPOINT: Final = "checkpoint.pt"
"""Training state in an unfinished folder; removed when it is finished."""
DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES: Final = 1 << 20
"""A disk with less room than this is full."""
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of ``flock`` on file systems without locks, such as some network disks."""
LOCK_SECONDS: Final = 1.0
"""How long to wait for another writer: one that finds its folder finished holds it for a moment only."""


def sync(*paths: Path) -> None:
    """Wait until files, or the names that folders list, have reached the disk; skip missing ones."""
    for path in paths:
        # A folder may be writable without being readable.
        with contextlib.suppress(FileNotFoundError, PermissionError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder and everything in it have reached the disk."""
    sync(*(path for path in folder.rglob("*") if path.is_file() or path.is_dir()), folder)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents if they do not exist; their names have reached the disk on return."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    sync(*(path.parent for path in new))


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; the file written there replaces it when the block ends.

    A reader sees the old file or the new one. If the block raises, the old file stays.

    >>> with write_atomically(Path("notes.txt")) as temporary:  # doctest: +SKIP
    ...     temporary.write_text("complete or not at all")
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with translate_full_disk(path.parent):
            yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file's contents in one step."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file in one step."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``folder`` that takes its place when the block ends.

    The place must be free or an empty folder by then. If the block raises, nothing is left.
    """
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        with translate_full_disk(partial):
            yield partial
        sync_tree(partial)
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync(folder.parent)


@contextmanager
def translate_full_disk(folder: Path) -> Iterator[None]:
    """Raise :class:`OSError` (ENOSPC) that names the folder, whatever a library raises on a full disk."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        is_full = "disk is full" in str(error) or shutil.disk_usage(folder).free < FULL_BYTES
        if number in DISK_FULL or (number is None and is_full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


class ArtifactWriter:
    """Fills the folder of a stage; opened again with the same plan, it finds what a killed run had written.

    From its creation until it is finished or garbage collected, no other process can write the same folder.

    Raises
    ------
    UsageError
        the folder holds something that GENIUS did not make, or another process is writing it.

    >>> writer = ArtifactWriter(Path("quantizer"), kind="quantizer", config={}, inputs={})  # doctest: +SKIP
    >>> (writer.path / "weights.safetensors").write_bytes(...)  # doctest: +SKIP
    >>> writer.finish()  # doctest: +SKIP
    """

    def __init__(
        self, folder: Path, *, kind: str, config: Mapping[str, Any], inputs: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.kind = kind
        self.config = config
        self.inputs = inputs
        plan = {"format": FORMAT, "kind": kind, "config": dict(config), "inputs": dict(inputs)}
        self.plan_fingerprint = fingerprint_of(plan)
        self.path = folder.parent / f".{folder.name}.{self.plan_fingerprint[:12]}.partial"
        """Folder to write to until the artifact is finished."""
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise UsageError(
                f"{folder} holds something that genius did not make; move it away, or choose another place"
            )
        make_folder(folder.parent)
        self._release = weakref.finalize(self, release, acquire(folder))
        left = re.compile(rf"\.{re.escape(folder.name)}\.([0-9a-f]{{12}}\.partial|old)")
        for path in folder.parent.iterdir():
            if left.fullmatch(path.name) and path != self.path:
                shutil.rmtree(path)
        self.path.mkdir(exist_ok=True)

    def finish(self, *, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Write the manifest, put the folder in its place, and remove checkpoints.

        Checkpoints go last: until the folder is in its place, a killed run needs them to go on.

        Parameters
        ----------
        facts
            anything a reader needs beside the files.
        """
        scratch = {CHECKPOINT, f"{CHECKPOINT}.tmp"}
        files = {
            path.relative_to(self.path): path
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }
        sync_tree(self.path)
        body = {
            "format": FORMAT,
            "kind": self.kind,
            "plan": self.plan_fingerprint,
            "config": dict(self.config),
            "inputs": dict(self.inputs),
            "facts": dict(facts or {}),
            "files": {
                name.as_posix(): {"bytes": path.stat().st_size, "sha256": file_fingerprint(path)}
                for name, path in files.items()
                if name.parts[0] not in (*scratch, MANIFEST, f"{MANIFEST}.tmp")
            },
        }
        write_json(self.path / MANIFEST, {**body, "fingerprint": fingerprint_of(body)})
        old = self.folder.with_name(f".{self.folder.name}.old")
        if self.folder.exists():
            self.folder.rename(old)
        self.path.rename(self.folder)
        sync(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        for name in scratch:
            (self.folder / name).unlink(missing_ok=True)
        manifest = open_artifact(self.folder, kind=self.kind)
        self._release()
        return manifest

    def finished(self) -> Manifest | None:
        """Return the folder's manifest if the folder is complete and was made by this very plan."""
        try:
            manifest = open_artifact(self.folder, kind=self.kind)
        except (ArtifactMissing, ArtifactMismatch):
            return None
        if manifest.plan != self.plan_fingerprint:
            return None
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        return manifest


def copy_artifact(source: Path, target: Path) -> None:
    """Copy a finished folder: the files that its manifest names, and no others."""
    for name in (*read_json(source / MANIFEST)["files"], MANIFEST):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def check_locks(file: Path) -> None:
    """Raise :class:`UsageError` if the file system of a lock's file has no locks.

    There, filelock waits as if another process held the lock, raises, or makes a file that a killed process
    leaves behind, depending on its version and the file system.
    """
    if sys.platform == "win32":
        return
    import fcntl  # noqa: PLC0415  not there on Windows

    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing releases it
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise UsageError(
                f"the disk of {file.parent} does not support file locks ({error.strerror}), without which "
                "two processes could destroy each other's changes; use a folder on another disk, or mount "
                "this one with locks"
            ) from None
    finally:
        os.close(descriptor)


def acquire(folder: Path) -> FileLock:
    """Lock a folder for writing. A process may hold one several times; a killed process holds none."""
    from filelock import FileLock, Timeout  # noqa: PLC0415  readers need none

    lock = FileLock(folder.parent / f".{folder.name}.lock", thread_local=False, is_singleton=True)
    check_locks(Path(lock.lock_file))
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise UsageError(f"another process is writing {folder}; wait for it") from None
    return lock


def release(lock: FileLock) -> None:
    """Unlock a folder; the lock file is removed first, while no other process can have acquired it."""
    try:
        if lock.lock_counter == 1:
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
    finally:
        lock.release()
