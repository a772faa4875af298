"""Durable writing: files and folders appear complete or not at all, even after a power failure.

:func:`write_atomically` replaces a file, :func:`new_folder` creates a folder, and
:class:`ArtifactWriter` fills or replaces the folder of a training stage. All three follow the same
order, so that a name never reaches the disk before the data it stands for:

1. write to a temporary path and fsync the files,
2. fsync the folders that list the files,
3. rename the temporary path to its final name,
4. fsync the parent folder, which makes the rename durable.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from genius_search.artifact import (
    ARTIFACT_FORMAT,
    MANIFEST,
    Manifest,
    file_fingerprint,
    fingerprint_of,
    open_artifact,
    read_json,
    stage_form,
)
from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError

if TYPE_CHECKING:
    from filelock import FileLock

CHECKPOINT: Final = "checkpoint.pt"
"""Training state in an unfinished folder. It is removed once the stage is finished."""
DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exceeded quota."""
MIN_FREE_BYTES: Final = 1 << 20
"""A disk with less free space than this counts as full."""
NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of ``flock`` on file systems without locks, such as some network file systems."""
SYNC_THREADS: Final = 4
"""Number of threads that wait for the disk."""
MAX_LOCK_SECONDS: Final = 1.0
"""Maximum wait for another writer. A writer that finds its folder finished holds the lock only
for a moment, which this wait bridges."""


def sync(*paths: Path) -> None:
    """Flush files, or the directory entries of folders, to the disk; skip missing paths.

    Several paths are flushed at the same time, since a disk often writes them in one step: 15 small
    files take a fifth of the time.
    """
    if len(paths) == 1:
        _flush(paths[0])
        return
    with ThreadPoolExecutor(SYNC_THREADS) as threads:
        list(threads.map(_flush, paths))  # raises the error of a path


def _flush(path: Path) -> None:
    # A folder can be writable without being readable.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk."""
    sync(*(path for path in folder.rglob("*") if path.is_file() or path.is_dir()), folder)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and flush their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    sync(*(path.parent for path in missing))


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; its file replaces ``path`` when the block ends.

    A reader sees either the old file or the new one. If the block raises, the old file stays.

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
    """Replace the contents of a file atomically."""
    with write_atomically(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file atomically."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder that is renamed to ``folder`` when the block ends.

    At that time, ``folder`` must not exist or must be empty. If the block raises, the temporary
    folder is removed.
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
    """Turn any exception of a library on a full disk into an :class:`OSError` (ENOSPC).

    SQLite, NumPy and safetensors each report a full disk differently, some without an ``errno``.
    The new error names the folder.
    """
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        is_full = "disk is full" in str(error) or shutil.disk_usage(folder).free < MIN_FREE_BYTES
        if number in DISK_FULL or (number is None and is_full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


class ArtifactWriter:
    """Write the folder of a training stage.

    Files go to a partial folder, ``.NAME.PLAN.partial``, whose name contains a fingerprint of the
    plan: the kind, settings and inputs. A run that continues after a crash has the same plan and
    therefore finds the files of the killed run; another plan starts with an empty folder.

    A writer holds a lock until it is finished or garbage collected, so that no other process can
    write the same folder.

    Raises
    ------
    UsageError
        The folder contains files that GENIUS did not write, or another process is writing it.

    >>> writer = ArtifactWriter(  # doctest: +SKIP
    ...     Path("quantizer"), kind="quantizer", config={}, inputs={}
    ... )
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
        plan = {
            "format": ARTIFACT_FORMAT,
            "kind": kind,
            "config": dict(config),
            "inputs": dict(inputs),
        }
        self.plan_fingerprint = fingerprint_of(plan)
        self.path = folder.parent / f".{folder.name}.{self.plan_fingerprint[:12]}.partial"
        """The partial folder to write to."""
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise UsageError(
                f"{folder} contains files that genius did not write; move them away, or choose "
                "another folder"
            )
        make_folder(folder.parent)
        self._release = weakref.finalize(self, release, acquire(folder))
        self._remove_stale_folders()
        self.path.mkdir(exist_ok=True)

    def _remove_stale_folders(self) -> None:
        """Remove the partial folders of other plans, and a replaced folder that a crash left."""
        stale_name = re.compile(rf"\.{re.escape(self.folder.name)}\.([0-9a-f]{{12}}\.partial|old)")
        for path in self.folder.parent.iterdir():
            if stale_name.fullmatch(path.name) and path != self.path:
                shutil.rmtree(path)

    def finish(self, *, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Write the manifest, move the partial folder to its final name, and remove checkpoints.

        Checkpoints are removed last: until the folder has its final name, a killed run needs them
        to continue.

        Parameters
        ----------
        facts
            further data for readers, stored in the manifest.
        """
        scratch_names = {CHECKPOINT, f"{CHECKPOINT}.tmp"}
        sync_tree(self.path)
        entries = self._manifest_entries(facts or {}, excluded=scratch_names)
        write_json(self.path / MANIFEST, stage_form(self.kind).seal(entries))
        old = self.folder.with_name(f".{self.folder.name}.old")
        if self.folder.exists():
            self.folder.rename(old)
        self.path.rename(self.folder)
        sync(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        for name in scratch_names:
            (self.folder / name).unlink(missing_ok=True)
        manifest = open_artifact(self.folder, kind=self.kind)
        self._release()
        return manifest

    def _manifest_entries(self, facts: Mapping[str, Any], *, excluded: set[str]) -> dict[str, Any]:
        """Return the entries of the manifest; it lists all files but the excluded ones."""
        files = {
            path.relative_to(self.path): path
            for path in sorted(self.path.rglob("*"))
            if path.is_file()
        }
        return {
            "kind": self.kind,
            "plan": self.plan_fingerprint,
            "config": dict(self.config),
            "inputs": dict(self.inputs),
            "facts": dict(facts),
            "files": {
                name.as_posix(): {"bytes": path.stat().st_size, "sha256": file_fingerprint(path)}
                for name, path in files.items()
                if name.parts[0] not in (*excluded, MANIFEST, f"{MANIFEST}.tmp")
            },
        }

    def finished(self) -> Manifest | None:
        """Return the manifest if the folder is already complete and has the same plan.

        In that case the writer is done: its lock is released and its partial folder removed.
        """
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
    """Copy a finished artifact: its manifest and only the files that the manifest lists."""
    for name in (*read_json(source / MANIFEST)["files"], MANIFEST):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def check_locks(file: Path) -> None:
    """Raise :class:`UsageError` if the file system of a lock file does not support locks.

    Without this check, filelock would wait as if another process held the lock, raise an error, or
    fall back to a lock file that survives a killed process, depending on its version.
    """
    if sys.platform == "win32":
        return
    import fcntl  # noqa: PLC0415  Windows has no such module

    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing releases it
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise UsageError(
                f"the file system of {file.parent} does not support file locks ({error.strerror}), "
                "without which two processes could overwrite each other's changes; use a folder on "
                "another file system, or mount this one with locks"
            ) from None
    finally:
        os.close(descriptor)


def acquire(folder: Path) -> FileLock:
    """Lock a folder for writing.

    A process may acquire the same lock repeatedly. The lock of a killed process is released.
    """
    from filelock import FileLock, Timeout  # noqa: PLC0415  not needed for reading

    lock = FileLock(folder.parent / f".{folder.name}.lock", thread_local=False, is_singleton=True)
    check_locks(Path(lock.lock_file))
    try:
        lock.acquire(timeout=MAX_LOCK_SECONDS)
    except Timeout:
        raise UsageError(
            f"another process is writing {folder}; wait until it has finished"
        ) from None
    return lock


def release(lock: FileLock) -> None:
    """Unlock a folder, removing its lock file first, while no other process can hold the lock."""
    try:
        if lock.lock_counter == 1:
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
    finally:
        lock.release()
