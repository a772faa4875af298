"""Finished folders: written beside, put in place whole, and checked when they are opened."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from filelock import FileLock, Timeout

from genius_search.errors import ArtifactMismatch, ArtifactMissing, UsageError

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Version of every folder's layout; a reader refuses a newer one."""
CHECKPOINT: Final = "checkpoint.pt"
"""Training state in an unfinished folder; removed when it is finished."""
LOCK_SECONDS: Final = 1.0
"""How long to wait for another writer: one that finds its folder finished holds it for a moment only."""
_ENTRIES: Final = {
    "config": dict,
    "inputs": dict,
    "facts": dict,
    "files": dict,
    "notes": dict,
    "fingerprint": str,
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished folder says about itself."""

    folder: Path
    kind: str
    config: Mapping[str, Any]
    """The settings it was made with."""
    inputs: Mapping[str, str]
    """Fingerprints of what it was made from."""
    facts: Mapping[str, Any]
    """Anything a reader needs beside the files: sizes, a permutation, a health report."""
    notes: Mapping[str, Any]
    """What is worth knowing and may differ between equal folders."""
    fingerprint: str
    """SHA-256 over settings, inputs, facts and the contents of all files."""


def fingerprint_of(value: object) -> str:
    """SHA-256 of a JSON-able value, key order ignored."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_fingerprint(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Replace a file in one step: a reader sees the old bytes or the new ones."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file in one step."""
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


class ArtifactWriter:
    """Fills one folder. Reopening the same plan finds what an earlier, killed run had written.

    From its making until it is finished, or dropped, no other process can write the same folder: two of them
    would fill one temporary folder and take it from under each other.

    Raises
    ------
    UsageError
        the folder holds something that genius did not make, or another process is writing it.

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
        self.path = folder.parent / f".{folder.name}.partial"
        """Where to write until it is finished."""
        plan = {"format": FORMAT, "kind": kind, "config": dict(config), "inputs": dict(inputs)}
        self.plan_fingerprint = fingerprint_of(plan)
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise UsageError(
                f"{folder} holds something that genius did not make; move it away, or choose another place"
            )
        self._release = weakref.finalize(self, _release, _acquire(folder))
        plan_file = self.path / "plan.json"
        if self.path.exists() and not _holds(plan_file, self.plan_fingerprint):
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        if not plan_file.exists():
            write_json(plan_file, {"fingerprint": self.plan_fingerprint})

    def finish(
        self,
        *,
        facts: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        scratch: tuple[str, ...] = (),
    ) -> Manifest:
        """Write the manifest, put the folder in its place, and drop ``scratch`` files.

        ``notes`` are no part of its identity: where something lay on this machine, for example.

        They go last: until the folder is in its place, a killed run needs them to go on.
        """
        temporary = ("plan.json", MANIFEST, CHECKPOINT, *scratch)
        temporary += tuple(name + ".tmp" for name in temporary)
        files = {
            path.relative_to(self.path).as_posix(): {
                "bytes": path.stat().st_size,
                "sha256": file_fingerprint(path),
            }
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and path.relative_to(self.path).parts[0] not in temporary
        }
        body = {
            "format": FORMAT,
            "kind": self.kind,
            "plan": self.plan_fingerprint,
            "config": dict(self.config),
            "inputs": dict(self.inputs),
            "facts": dict(facts or {}),
            "files": files,
        }
        signed = {**body, "fingerprint": fingerprint_of(body), "notes": dict(notes or {})}
        write_json(self.path / MANIFEST, signed)
        _recover(self.folder)
        old = _old_name(self.folder)
        if old.exists():
            shutil.rmtree(old)
        if self.folder.exists():
            self.folder.rename(old)
        self.path.rename(self.folder)
        for name in temporary:
            target = self.folder / name
            if target.is_dir():
                shutil.rmtree(target)
            elif name != MANIFEST:
                target.unlink(missing_ok=True)
        if old.exists():
            shutil.rmtree(old)
        manifest = open_artifact(self.folder, kind=self.kind)
        self._release()
        return manifest

    def finished(self) -> Manifest | None:
        """The folder's manifest when it is already complete and was made by this very plan."""
        try:
            manifest = open_artifact(self.folder, kind=self.kind)
        except (ArtifactMissing, ArtifactMismatch):
            return None
        body = json.loads((self.folder / MANIFEST).read_text())
        if body.get("plan") != self.plan_fingerprint:
            return None
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()
        return manifest


def open_artifact(folder: Path, *, kind: str, verify: bool = False) -> Manifest:
    """Read a finished folder's manifest and check that its files are there; ``verify`` rereads them all.

    Raises
    ------
    ArtifactMissing
        the folder does not exist or was never finished.
    ArtifactMismatch
        it is of another kind or version, or a file is missing or changed.
    """
    _recover(folder)
    body = _read_manifest(folder, kind)
    contents = {name: value for name, value in body.items() if name not in ("fingerprint", "notes")}
    if verify and fingerprint_of(contents) != body["fingerprint"]:
        raise ArtifactMismatch(f"{folder} is damaged: its {MANIFEST} has changed")
    for name, fact in body["files"].items():
        file = folder / name
        if not file.exists():
            raise ArtifactMissing(f"{folder} is damaged: {name} is missing")
        if file.stat().st_size != fact["bytes"]:
            raise ArtifactMismatch(
                f"{folder} is damaged: {name} has {file.stat().st_size} bytes, expected {fact['bytes']}"
            )
        if verify and file_fingerprint(file) != fact["sha256"]:
            raise ArtifactMismatch(f"{folder} is damaged: the contents of {name} have changed")
    return Manifest(
        folder=folder,
        kind=kind,
        config=body["config"],
        inputs=body["inputs"],
        facts=body["facts"],
        notes=body["notes"],
        fingerprint=body["fingerprint"],
    )


def copy_artifact(source: Path, target: Path) -> None:
    """Copy a finished folder: the files of its manifest, and no others."""
    for name in (*json.loads((source / MANIFEST).read_bytes())["files"], MANIFEST):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)


def _read_manifest(folder: Path, kind: str) -> dict[str, Any]:
    """The manifest's entries, all there and of the right kind and format."""
    path = folder / MANIFEST
    if not folder.exists():
        raise ArtifactMissing(f"no {kind} at {folder}: the folder does not exist")
    if not path.exists():
        raise ArtifactMissing(
            f"{folder} is not a finished {kind}: it has no {MANIFEST}. Run the command that makes it again"
        )
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ArtifactMismatch(f"{path} is not valid JSON ({error}); make the {kind} again") from None
    if not isinstance(body, dict):
        raise ArtifactMismatch(f"{path} is not a manifest; make the {kind} again")
    version = body.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise ArtifactMismatch(
            f"{folder} has format {version}, this version reads up to {FORMAT}: upgrade genius"
        )
    if body.get("kind") != kind:
        raise ArtifactMismatch(f"{folder} holds a {body.get('kind')!r}, not a {kind!r}")
    body.setdefault("notes", {})
    odd = [name for name, shape in _ENTRIES.items() if not isinstance(body.get(name), shape)]
    if not odd:
        odd = [f"files: {name}" for name, fact in body["files"].items() if not _is_file_fact(fact)]
    if odd or not isinstance(version, int):
        raise ArtifactMismatch(
            f"{path} is damaged: {(odd or ['format'])[0]} is missing or not what it should be; "
            f"make the {kind} again"
        )
    if any({"/", ".."} & {*PurePosixPath(name).parts} or not name for name in body["files"]):
        raise ArtifactMismatch(f"{path} names files outside its folder; do not use what came from there")
    return body


def _is_file_fact(fact: object) -> bool:
    """Whether this says how long a file is and what is in it."""
    return (
        isinstance(fact, dict) and isinstance(fact.get("bytes"), int) and isinstance(fact.get("sha256"), str)
    )


def _holds(plan_file: Path, fingerprint: str) -> bool:
    try:
        return bool(json.loads(plan_file.read_text())["fingerprint"] == fingerprint)
    except (OSError, ValueError, KeyError):
        return False


def _acquire(folder: Path) -> FileLock:
    """Hold a folder for writing. A process may hold one several times over; what dies holds nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock", thread_local=False, is_singleton=True)
    try:
        lock.acquire(timeout=LOCK_SECONDS)
    except Timeout:
        raise UsageError(f"another process is writing {folder}; wait for it") from None
    return lock


def _release(lock: FileLock) -> None:
    """Let go of a folder; the file goes first, so that nobody can have got hold of it meanwhile."""
    try:
        if lock.lock_counter == 1:
            with contextlib.suppress(OSError):
                Path(lock.lock_file).unlink(missing_ok=True)
    finally:
        lock.release()


def _old_name(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.old"


def _recover(folder: Path) -> None:
    """Put the old folder back when a writer was killed between its two renames."""
    old = _old_name(folder)
    if not folder.exists() and (old / MANIFEST).exists():
        old.rename(folder)
