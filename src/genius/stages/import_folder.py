"""Whose folder is it? An import writes into its own and into empty ones, and takes away only its own work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final, NamedTuple

from genius.artifact import file_fingerprint, open_artifact, write_json
from genius.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius.published.container import Checkpoint

WORK: Final = ".import"
"""Folder inside the model's folder while an import is under way."""
SOURCES: Final = "sources.json"


class Sources(NamedTuple):
    """SHA-256 of the two published files."""

    quantizer: str
    generator: str

    @staticmethod
    def of(quantizer: Checkpoint, generator: Checkpoint) -> Sources:
        """Read both files to the end."""
        return Sources(file_fingerprint(quantizer.path), file_fingerprint(generator.path))

    def made(self, folder: Path, part: str) -> bool:
        """Whether a finished part of a model was imported from its file."""
        try:
            manifest = open_artifact(folder / part, kind=part)
        except (ArtifactMissing, ArtifactMismatch):
            return False
        return bool(manifest.inputs.get("published") == self._asdict()[part])


def begin_import(folder: Path, sources: Sources) -> Path:
    """Declare that an import of these files goes on in a folder; gives the folder for its own work.

    Raises
    ------
    UsageError
        the folder holds anything but an import of the same two files, finished or not.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; a model needs a folder")
    work = folder / WORK
    if folder.is_dir() and any(folder.iterdir()):
        unfinished = _read(work / SOURCES) == sources._asdict()
        finished = not work.exists() and all(sources.made(folder, part) for part in Sources._fields)
        if not (unfinished or finished):
            raise UsageError(
                f"{folder} holds something else than an import of these two files; expected an empty folder "
                "or none. Move it away, or choose another place"
            )
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / SOURCES, sources._asdict())
    return work


def end_import(folder: Path) -> None:
    """Take the import's own work away."""
    shutil.rmtree(folder / WORK)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
