"""Artifacts: the folders of finished stages (features, quantizer, generator, codes) and weights, for reading.

The manifest of an artifact records its settings, its inputs and a checksum of every file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from genius_search.errors import ArtifactMismatch, ArtifactMissing

MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
"""Version of every folder's layout; newer ones are refused."""
MAX_JSON_BYTES: Final = 1 << 25
"""Largest manifest or settings file that is read; one of 8 million training rows takes about 1 MB."""

HOLE_BYTES: Final = 1 << 30
"""Larger files must be on the disk, not holes; others are read in a second."""


def first_problem(error: ValidationError) -> str:
    """Return which field of a JSON file is wrong first, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"


def fingerprint_of(value: object) -> str:
    """Return the SHA-256 of a JSON-able value; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """Read a manifest or a settings file.

    Raises
    ------
    ArtifactMismatch
        It is not JSON, not a file, or larger than :data:`MAX_JSON_BYTES`.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise ArtifactMismatch(f"{path} is damaged: it is not a file")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ArtifactMismatch(
            f"{path} has more than {MAX_JSON_BYTES:,} bytes, too many for settings"
        )
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactMismatch(f"{path} is damaged: it is not valid JSON ({error})") from None


class FileFact(BaseModel):
    """Size and checksum of a file."""

    model_config = ConfigDict(strict=True, frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """Contents of a finished folder's manifest."""

    model_config = ConfigDict(strict=True, frozen=True)

    folder: Path = Path()
    """The folder; not part of the file."""
    format: int
    kind: str
    plan: str = ""
    """Fingerprint of kind, settings and inputs."""
    config: dict[str, Any]
    """The settings it was made with."""
    inputs: dict[str, str]
    """Fingerprints of what it was made from."""
    facts: dict[str, Any]
    """Anything a reader needs beside the files: sizes, a permutation, a health report."""
    files: dict[str, FileFact]
    fingerprint: str
    """SHA-256 over settings, inputs, facts and the contents of all files."""


def open_artifact(folder: Path, *, kind: str, check_contents: bool = False) -> Manifest:
    """Read a finished folder's manifest and check its files: their sizes, with ``check_contents`` their contents.

    Raises
    ------
    ArtifactMissing
        the folder does not exist or was never finished, or a file is missing.
    ArtifactMismatch
        it is of another kind or version, or a file has changed.
    """
    path = folder / MANIFEST
    if not path.exists():
        why = f"it has no {MANIFEST}" if folder.exists() else "the folder does not exist"
        raise ArtifactMissing(
            f"no finished {kind} at {folder}: {why}. Run the command that makes it"
        )
    body = read_json(path)
    try:
        if body["format"] != FORMAT:
            raise ArtifactMismatch(
                f"{folder} has format {body['format']}, this version reads {FORMAT}; make the {kind} again"
            )
        if body["kind"] != kind:
            raise ArtifactMismatch(f"{folder} holds a {body['kind']!r}, not a {kind!r}")
        manifest = Manifest.model_validate({**body, "folder": folder})
    except (ValidationError, KeyError, TypeError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else repr(error)
        raise ArtifactMismatch(f"{path} is damaged ({problem}); make the {kind} again") from None
    if any({"/", ".."} & {*PurePosixPath(name).parts} or not name for name in manifest.files):
        raise ArtifactMismatch(
            f"{path} names files outside its folder; do not use what came from there"
        )
    signed = {name: value for name, value in body.items() if name != "fingerprint"}
    if fingerprint_of(signed) != manifest.fingerprint:
        raise ArtifactMismatch(f"{folder} is damaged: its {MANIFEST} has changed")
    check_files(folder, manifest.files, check_contents=check_contents)
    return manifest


def check_files(folder: Path, files: Mapping[str, FileFact], *, check_contents: bool) -> None:
    """Check the sizes of a folder's files, or with ``check_contents`` their checksums, too.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing, or is not the one that was written.
    """
    for name, fact in files.items():
        file = folder / name
        if not file.is_file():
            raise ArtifactMissing(f"{folder} is damaged: {name} is missing")
        status = file.stat()
        if (size := status.st_size) != fact.bytes:
            raise ArtifactMismatch(
                f"{folder} is damaged: {name} has {size} bytes, expected {fact.bytes}"
            )
        on_disk = 512 * getattr(
            status, "st_blocks", 0
        )  # 0 where the disk, or Windows, does not tell
        if size > HOLE_BYTES and 0 < 100 * on_disk < size:  # compression reaches a tenth
            raise ArtifactMismatch(
                f"{file} is nearly all holes: it has {size:,} bytes, {on_disk:,} of them on the disk, and "
                "reading it would take long"
            )
        if check_contents and file_fingerprint(file) != fact.sha256:
            raise ArtifactMismatch(f"{folder} is damaged: the contents of {name} have changed")


def read_arrays(
    file: Path,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
    *,
    optional: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Read weights from a file, floating point as 32 bits.

    Parameters
    ----------
    shapes
        names and shapes of the weights that are read, None for any length; by default all are read.
    optional
        those that may be absent.

    Raises
    ------
    ArtifactMismatch
        The file is damaged, or lacks weights of these names and shapes.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  not for manifests

    arrays: dict[str, np.ndarray] = {}
    try:
        with safe_open(file, "np") as opened:
            there = opened.keys()
            for name in there if shapes is None else shapes:
                if name in optional and name not in there:
                    continue
                array = opened.get_tensor(name)
                wanted = array.shape if shapes is None else shapes[name]
                if not shape_matches(array.shape, wanted):
                    raise ValueError(f"{name} has the shape {array.shape}, not {wanted}")  # noqa: TRY301
                is_float = np.issubdtype(array.dtype, np.floating)
                arrays[name] = array = array.astype(np.float32, copy=False) if is_float else array
                if is_float and not np.isfinite(np.vdot(array, array)):
                    raise ValueError(f"{name} has numbers that are infinite, or NaN")  # noqa: TRY301
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise mismatch_error(file, error) from None
    return arrays


def shape_matches(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Return whether a shape is the wanted one, in which None stands for any length."""
    return len(shape) == len(wanted) and all(
        map(lambda one, other: other in (None, one), shape, wanted)
    )


def mismatch_error(file: Path, error: Exception) -> ArtifactMismatch:
    """Return the error for a file that is damaged or does not fit the settings beside it."""
    reason = " ".join(str(error).split())[:200]
    return ArtifactMismatch(
        f"{file} does not hold what the settings beside it say ({reason}); make its folder again"
    )
