"""Read manifests and artifacts: the folders of finished training stages, and their weights.

A finished folder is described by one JSON file, its manifest: ``manifest.json`` of a stage,
``model.json``, ``index.json`` or ``cluster.json``. Each begins with its checksum and the version of
its format, and only the present version is read (:class:`ManifestForm`). ::

    {"checksum": "9f2c...", "format": 13, "identity": ..., ...}

A stage (features, quantizer, generator, encoder) writes one folder. The folder's ``manifest.json``
records the settings of the stage, fingerprints of its inputs, and a checksum of every file.
:mod:`genius_search.writing` is the counterpart that writes these folders.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from genius_search.errors import ArtifactMismatch, ArtifactMissing

MANIFEST: Final = "manifest.json"
ARTIFACT_FORMAT: Final = 1
"""Version of an artifact's layout. Other versions are refused."""
MAX_JSON_BYTES: Final = 1 << 25
"""Maximum size of a manifest or settings file. The manifest of 8 million training rows takes
about 1 MB."""
MAX_UNCHECKED_SPARSE_BYTES: Final = 1 << 30
"""Files above this size are refused if they are sparse, since a hostile folder could otherwise
make us read terabytes of zeros. Smaller files are read within a second."""


def first_problem(error: ValidationError) -> str:
    """Describe the first invalid field of a JSON file, as ``field.path: message``."""
    first_error = error.errors()[0]
    field = ".".join(map(str, first_error["loc"]))
    return f"{field}: {first_error['msg'].lower()}"


def fingerprint_of(value: object) -> str:
    """Return the SHA-256 of a JSON-serialisable value. The order of keys does not matter."""
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
        The path is not a regular file, is larger than :data:`MAX_JSON_BYTES`, or is not JSON.
    """
    # Reading a pipe or a device might never end.
    if path.exists() and not path.is_file():
        raise ArtifactMismatch(f"{path} is damaged: it is not a regular file")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ArtifactMismatch(
            f"{path} has more than {MAX_JSON_BYTES:,} bytes, which is too large for settings"
        )
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactMismatch(f"{path} is damaged: it is not valid JSON ({error})") from None


class ManifestForm(NamedTuple):
    """How a kind of folder is described by its manifest."""

    name: str
    """The name of the manifest's file."""
    format: int
    """The version of the format, the only one that is read."""
    remedy: str
    """Advice for a folder of another version."""
    checksum: str = "checksum"
    """The name of the checksum of all other entries."""

    def seal(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the contents of a manifest: the checksum, the format, and the entries."""
        body = {"format": self.format, **entries}
        return {self.checksum: fingerprint_of(body), **body}

    def read(self, folder: Path) -> dict[str, Any]:
        """Read the manifest of a folder, and return its contents, the checksum included.

        Raises
        ------
        FileNotFoundError
            The folder has no manifest.
        ArtifactMismatch
            The manifest is damaged, or of another version.
        """
        try:
            body = read_json(folder / self.name)
        except ArtifactMismatch as error:
            raise ArtifactMismatch(f"{error}; {self.remedy}") from None
        if not isinstance(body, dict) or "format" not in body:
            raise self.damaged(folder, "it has no format")
        entries = {name: value for name, value in body.items() if name != self.checksum}
        try:
            is_whole = fingerprint_of(entries) == body.get(self.checksum)
        except (ValueError, RecursionError) as error:  # half a character, or endless brackets
            raise self.damaged(folder, error) from None
        if body["format"] != self.format and (is_whole or self.checksum not in body):
            raise ArtifactMismatch(
                f"{folder} has format {body['format']}, this version reads {self.format}: "
                f"{self.remedy}"
            )
        if not is_whole:
            raise self.damaged(folder, "its contents do not match its checksum")
        return body

    def damaged(self, folder: Path, problem: Exception | str) -> ArtifactMismatch:
        """Return the error for a manifest that is damaged or makes no sense."""
        if isinstance(problem, ValidationError):
            problem = first_problem(problem)
        return ArtifactMismatch(f"{folder / self.name} is damaged ({problem}); {self.remedy}")


class FileFact(BaseModel):
    """The size and checksum of a file, as its manifest records them."""

    model_config = ConfigDict(strict=True, frozen=True)

    bytes: int
    sha256: str


class Manifest(BaseModel):
    """The contents of an artifact's ``manifest.json``."""

    model_config = ConfigDict(strict=True, frozen=True)

    folder: Path = Path()
    """The artifact's folder. It is filled in on reading, and not stored in the file."""
    format: int
    """Version of the layout (:data:`ARTIFACT_FORMAT`)."""
    kind: str
    """The stage that wrote the folder: ``features``, ``quantizer``, ``generator``, ..."""
    plan: str = ""
    """Fingerprint of the kind, settings and inputs: what the stage was asked to do."""
    config: dict[str, Any]
    """The settings of the stage."""
    inputs: dict[str, str]
    """Name of each input -> its fingerprint."""
    facts: dict[str, Any]
    """Further data that a reader needs: sizes, a permutation, a health report."""
    files: dict[str, FileFact]
    """Path within the folder -> size and checksum."""
    fingerprint: str
    """SHA-256 of all other entries of the manifest, hence of the contents of all files."""


def stage_form(kind: str) -> ManifestForm:
    """Return the form of the manifest of a stage, whose checksum is the stage's fingerprint."""
    return ManifestForm(
        MANIFEST, ARTIFACT_FORMAT, f"create the {kind} again", checksum="fingerprint"
    )


def open_artifact(folder: Path, *, kind: str, check_contents: bool = False) -> Manifest:
    """Read the manifest of a finished artifact and check the sizes of its files.

    Parameters
    ----------
    kind
        the stage that is expected to have written the folder.
    check_contents
        whether to compare the contents of all files with their checksums, too.

    Raises
    ------
    ArtifactMissing
        The folder does not exist or was never finished, or a file is missing.
    ArtifactMismatch
        The artifact is of another kind or version, or one of its files has changed.
    """
    path = folder / MANIFEST
    if not path.exists():
        reason = f"it has no {MANIFEST}" if folder.exists() else "the folder does not exist"
        raise ArtifactMissing(
            f"no finished {kind} at {folder}: {reason}. Run the command that creates it"
        )
    form = stage_form(kind)
    body = form.read(folder)
    if body.get("kind") != kind:
        raise ArtifactMismatch(f"{folder} holds a {body.get('kind')!r}, not a {kind!r}")
    try:
        manifest = Manifest.model_validate({**body, "folder": folder})
    except ValidationError as error:
        raise form.damaged(folder, error) from None
    if any({"/", ".."} & {*PurePosixPath(name).parts} or not name for name in manifest.files):
        raise ArtifactMismatch(
            f"{path} names files outside its folder; do not use files from this source"
        )
    check_files(folder, manifest.files, check_contents=check_contents)
    return manifest


def check_files(folder: Path, files: Mapping[str, FileFact], *, check_contents: bool) -> None:
    """Check the sizes of a folder's files, and with ``check_contents`` also their checksums.

    Raises
    ------
    ArtifactMissing
        A file is missing.
    ArtifactMismatch
        The size or the checksum of a file differs from its manifest's.
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
        # st_blocks counts 512-byte blocks. It is 0 or absent if the file system does not report
        # it. A compressing file system stores a tenth of a file; a hundredth means holes.
        allocated_bytes = 512 * getattr(status, "st_blocks", 0)
        if size > MAX_UNCHECKED_SPARSE_BYTES and 0 < 100 * allocated_bytes < size:
            raise ArtifactMismatch(
                f"{file} is nearly all holes: it has {size:,} bytes, of which {allocated_bytes:,} "
                "are on the disk, and reading it would take long"
            )
        if check_contents and file_fingerprint(file) != fact.sha256:
            raise ArtifactMismatch(f"{folder} is damaged: the contents of {name} have changed")


def read_arrays(
    file: Path,
    shapes: Mapping[str, tuple[int | None, ...]] | None = None,
    *,
    optional: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Read weights from a safetensors file, converting floating-point numbers to float32.

    Parameters
    ----------
    shapes
        name -> expected shape of each array to read; None in a shape stands for any length. By
        default, all arrays of the file are read.
    optional
        names of the arrays that the file may lack.

    Raises
    ------
    ArtifactMismatch
        The file is damaged, lacks an array, or has one of another shape.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415  not needed for manifests

    arrays: dict[str, np.ndarray] = {}
    try:
        with safe_open(file, "np") as weights:
            stored_names = weights.keys()
            for name in stored_names if shapes is None else shapes:
                if name in optional and name not in stored_names:
                    continue
                array = weights.get_tensor(name)
                expected = array.shape if shapes is None else shapes[name]
                if not shape_matches(array.shape, expected):
                    raise ValueError(  # noqa: TRY301
                        f"{name} has the shape {array.shape}, not {expected}"
                    )
                is_float = np.issubdtype(array.dtype, np.floating)
                arrays[name] = array = array.astype(np.float32, copy=False) if is_float else array
                # A sum of squares is finite only if every number is; it needs no second array.
                if is_float and not np.isfinite(np.vdot(array, array)):
                    raise ValueError(f"{name} has infinite numbers or NaN")  # noqa: TRY301
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise mismatch_error(file, error) from None
    return arrays


def shape_matches(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Return whether a shape is the expected one, in which None stands for any length.

    >>> shape_matches((5, 3), (None, 3)), shape_matches((5, 4), (None, 3))
    (True, False)
    """
    if len(shape) != len(expected):
        return False
    return all(
        length == expected_length or expected_length is None
        for length, expected_length in zip(shape, expected, strict=True)
    )


def mismatch_error(file: Path, error: Exception) -> ArtifactMismatch:
    """Return the error for a file that is damaged or contradicts the settings of its folder."""
    reason = " ".join(str(error).split())[:200]
    return ArtifactMismatch(
        f"{file} does not match the settings of its folder ({reason}); create the folder again"
    )
