"""``index.json``: what an index consists of now. It is the only file of an index that ever changes."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

from genius.artifact import fingerprint_of, write_json
from genius.errors import ArtifactMismatch, ArtifactMissing, UsageError
from genius.search.calibration import Calibration, calibration_from_json, calibration_to_json
from genius.search.embedding_file import EmbeddingType
from genius.search.segment import REMEDY, StoredEmbeddings
from genius.search.tuned import Tuned, tuned_from_json, tuned_to_json

CURRENT: Final = "index.json"
SEGMENTS: Final = "segments"
DELETED: Final = "deleted"
FORMAT: Final = 4
"""Since 4 an ID's marks stand behind its codes."""
NAME: Final = re.compile(r"[0-9]{6,}")
"""Names of segments."""
DELETED_NAME: Final = re.compile(r"[0-9]{6,}-[0-9]{6,}\.npy")
"""Names of lists of deleted items: since which generation, and of which segment."""

NO_PLACE: Final = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""What a system says of a path at which nothing can be: too long, a loop of links, or below a file."""

_FORMS: Final = {
    "name": str,
    "items": int,
    "manifest": str,
    "deleted": str | None,
    "num_deleted": int,
    "deleted_sha256": str | None,
}
"""What the facts about a segment are."""


class IndexFacts(NamedTuple):
    """What is true of an index as long as it lives."""

    model: str
    """Folder or name of the model when the index was created."""
    model_fingerprint: str
    embeddings: StoredEmbeddings
    embedding_type: EmbeddingType = "float16"


class SegmentEntry(NamedTuple):
    """A segment as the index knows it."""

    name: str
    items: int
    """Deleted ones included."""
    manifest: str
    """SHA-256 of its manifest, which has those of its files."""
    deleted: str | None = None
    """File that lists the deleted items."""
    num_deleted: int = 0
    deleted_sha256: str | None = None


class IndexManifest(NamedTuple):
    """Everything that ``index.json`` says."""

    facts: IndexFacts
    generation: int
    """How often the index has changed, from 1."""
    segments: tuple[SegmentEntry, ...]
    tuned: Tuned | None = None
    """How it is searched unless one says otherwise; None: as any index."""
    calibration: Calibration | None = None
    """What its scores are worth, if that was ever measured."""

    @property
    def body(self) -> dict[str, Any]:
        """As it is written, without the checksum."""
        return {
            "format": FORMAT,
            "generation": self.generation,
            **self.facts._asdict(),
            "segments": [entry._asdict() for entry in self.segments],
            **({} if self.tuned is None else {"tuned": tuned_to_json(self.tuned)}),
            **({} if self.calibration is None else {"calibration": calibration_to_json(self.calibration)}),
        }


def write_manifest(folder: Path, manifest: IndexManifest) -> None:
    """Make this the state of the index, in one step."""
    write_json(folder / CURRENT, {**manifest.body, "checksum": fingerprint_of(manifest.body)})


def read_facts(folder: Path) -> IndexFacts:
    """What is true of an index as long as it lives; raises as :func:`read_manifest`."""
    return read_manifest(folder).facts


def read_manifest(folder: Path) -> IndexManifest:
    """Read an index's manifest: cheap, and enough to see whether anything has changed.

    Raises
    ------
    ArtifactMissing
        there is no index in this folder.
    ArtifactMismatch
        it was made by another version, or the manifest is damaged.
    """
    path = folder / CURRENT
    body = _read(folder)
    checksum = body.pop("checksum", None)
    if body["format"] != FORMAT and not _fits({**body, "format": FORMAT}, checksum):
        if body["format"] > FORMAT:
            raise ArtifactMismatch(f"{folder} was made by a newer version: upgrade genius")
        if checksum is None or _fits(body, checksum):
            raise ArtifactMismatch(f"{folder} was made by an older version: create the index again")
    if not _fits(body, checksum):
        raise _damaged(path, "its contents do not match its checksum")
    try:
        return _parse(body)
    except (KeyError, TypeError, ValueError, UsageError) as error:
        raise _damaged(path, str(error)) from None


def _read(folder: Path) -> dict[str, Any]:
    """What the file says, when it says it in our words."""
    path = folder / CURRENT
    try:
        text = None if (folder / "model.json").exists() else path.read_bytes()
    except IsADirectoryError:
        raise _damaged(path, "it is a folder") from None
    except OSError as error:
        if error.errno not in {errno.ENOENT, *NO_PLACE}:
            raise
        raise ArtifactMissing(
            f"no index at {folder}; `genius index create {folder} --model …` makes one"
        ) from None
    if text is None:
        raise ArtifactMissing(f"{folder} is a model, not an index; give the index's folder")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(body, dict) or not isinstance(body.get("format"), int):
        raise _damaged(path, "it names no format")
    return body


def _fits(body: dict[str, Any], checksum: object) -> bool:
    try:
        return fingerprint_of(body) == checksum
    except (UnicodeEncodeError, RecursionError):  # nothing that we have written
        return False


def _parse(body: dict[str, Any]) -> IndexManifest:
    texts = {name: body[name] for name in IndexFacts._fields}
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("the model or the embeddings are not told in words")
    _ = get_args(StoredEmbeddings).index(texts["embeddings"])
    _ = get_args(EmbeddingType).index(texts["embedding_type"])
    entries = tuple(_entry(told) for told in body["segments"])
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError("a segment is named twice")
    tuned = tuned_from_json(body["tuned"]) if "tuned" in body else None
    calibration = calibration_from_json(body["calibration"]) if "calibration" in body else None
    return IndexManifest(IndexFacts(**texts), int(body["generation"]), entries, tuned, calibration)


def _entry(told: Any) -> SegmentEntry:
    """A segment as it was told of; its names are ours, so that none leads out of the folder."""
    if not isinstance(told, dict):
        raise TypeError(f"{told!r} is no segment")
    odd = [name for name in told if not isinstance(told[name], _FORMS[name])]
    if odd:
        raise ValueError(f"{odd[0]} of a segment is {told[odd[0]]!r}")
    entry = SegmentEntry(**told)
    if not NAME.fullmatch(entry.name):
        raise ValueError(f"{entry.name!r} is no name of a segment")
    if entry.deleted is not None and not DELETED_NAME.fullmatch(entry.deleted):
        raise ValueError(f"{entry.deleted!r} is no name of a list of deleted items")
    return entry


def _damaged(path: Path, why: str) -> ArtifactMismatch:
    return ArtifactMismatch(f"{path} is damaged ({why}); {REMEDY}")
