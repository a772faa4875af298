"""Publishing: a copy of an index without deleted items or local paths, and checks of downloaded ones."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from genius_search.errors import ArtifactError, ArtifactMismatch, UsageError
from genius_search.hub.access import is_repository_name
from genius_search.hub.card import index_card
from genius_search.hub.folder import write_folder
from genius_search.hub.push import check_license
from genius_search.index.items import ITEMS_FILE, Item
from genius_search.index.segment_writer import write_manifest
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import (
    CURRENT,
    DELETED,
    LOCK,
    MOST_ATTEMPTS,
    OWN_MODEL,
    SEGMENTS,
    check_segment,
    read_deleted,
    read_manifest,
)
from genius_search.index.verify import verify
from genius_search.index.writer import PICTURES, RESERVE, one_writer
from genius_search.model.publish import check_model, save_model
from genius_search.writing import copy_artifact

OBSOLETE: Final = (f"{SEGMENTS}/*", f"{DELETED}/*")
"""Files of a repository that are obsolete when an index is published again."""

_STORED: Final = re.compile(rf"{PICTURES}/[0-9a-f]{{2}}/[0-9a-f]{{64}}")
_COLUMNS: Final = {
    "text": "texts of the items",
    "source": "their other fields, as JSON",
}


def check_index(folder: Path, read_all: bool = False) -> None:  # noqa: FBT001, FBT002  a callback of hub.pull
    """Check that a downloaded index is complete and stays inside its folder; ``read_all`` verifies all files.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing or damaged, or the index refers to a local folder as its model.
    """
    manifest = read_manifest(folder)
    model = manifest.model
    if manifest.has_own_model:
        check_model(folder / model, verify=read_all)
    elif model and not is_repository_name(model):
        raise ArtifactMismatch(
            f"{folder}: {CURRENT} says that its model is {model!r}, expected owner/name or nothing; an "
            "index that points elsewhere on this machine is not opened"
        )
    for entry in manifest.segments:
        check_segment(folder / SEGMENTS / entry.name, manifest=entry.manifest, verify=False)
        read_deleted(folder, entry)
    if read_all:
        verify(folder)
        for path in _outside(Snapshot.open(folder)):
            raise ArtifactMismatch(
                f"{folder}: the picture of an item is {path!r} on the machine that published it, expected "
                "none; have it published again"
            )


def save_index(
    source: Path,
    target: Path,
    *,
    name: str | None = None,
    license: str = "unknown",  # noqa: A002  the hub's word
    model: str | None = None,
) -> Path:
    """Save the current state of an index as a self-contained folder with a card.

    Other processes may change the index during the copy.

    Parameters
    ----------
    name
        name of the repository, for the card; by default the folder's name.
    model
        name of the model on the hub; by default none, or the model inside the index.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        The source contains no complete index.
    UsageError
        The target exists, the licence is invalid, or the model's name is not of the form owner/name.
    """
    check_license(license)
    if model is not None and not is_repository_name(model):
        raise UsageError(
            f"the model is {model!r}, expected its name on the hub, as owner/name, because others cannot "
            "access your folders"
        )
    read_manifest(source)
    if target.expanduser().exists():
        raise UsageError(f"{target} is there already; choose another place")
    with write_folder(target, check_replaceable=_refuse) as folder:
        state = _clean(folder, _copy(source, folder, model=model or ""))
        contents = [label for column, label in _COLUMNS.items() if _has(state, column)]
        if state.manifest.embeddings != "none":
            contents.append("an embedding of each item")
        card = index_card(
            name or target.expanduser().resolve().name,
            license=license,
            model=model,
            model_fingerprint=state.manifest.model_fingerprint,
            by_modality={kind.value: count for kind, count in state.count_by_modality().items()},
            contents=tuple(contents),
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    return target.expanduser()


def _refuse(folder: Path) -> None:
    raise UsageError(f"{folder} is in the way; move it away, or choose another place")


def _copy(source: Path, target: Path, *, model: str) -> Snapshot:
    """Copy the current state of an index, retrying if a writer removes a file during the copy."""
    for _ in range(MOST_ATTEMPTS):
        state = Snapshot.open(source)
        try:
            for entry in state.manifest.segments:
                copy_artifact(source / SEGMENTS / entry.name, target / SEGMENTS / entry.name)
                if entry.deleted is not None:
                    (target / DELETED).mkdir(exist_ok=True)
                    shutil.copyfile(source / DELETED / entry.deleted, target / DELETED / entry.deleted)
            if not model and state.manifest.has_own_model:
                model = OWN_MODEL
                save_model(source / state.manifest.model, target / OWN_MODEL)
            write_manifest(target, state.manifest.replace(model=model))
            return Snapshot.open(target)
        except (ArtifactError, OSError, sqlite3.Error):
            if read_manifest(source) == state.manifest:  # no writer was at work: something is wrong
                raise
            for name in (SEGMENTS, DELETED):
                shutil.rmtree(target / name, ignore_errors=True)
    raise UsageError(
        f"{source} changed {MOST_ATTEMPTS} times while it was copied; try again when it is quieter"
    )


def _outside(state: Snapshot) -> Iterator[str]:
    """Yield the paths of images that are not stored in the index, such as those of a folder of pictures."""
    for segment in state.segments:
        yield from (path for path in segment.items.images() if not _STORED.fullmatch(path))


def _without_path(item: Item) -> Item:
    return item if item.image is None or _STORED.fullmatch(item.image) else item._replace(image=None)


def _clean(folder: Path, state: Snapshot) -> Snapshot:
    """Compact a copy that still has deleted items' texts or paths of this machine in its files."""
    if any(len(segment.dead) for segment in state.segments) or any(_outside(state)):
        with one_writer(folder) as writer:
            writer.compact(_without_path)
        for name in (LOCK, RESERVE):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / DELETED, ignore_errors=True)
    return Snapshot.open(folder)


def _has(state: Snapshot, column: str) -> bool:
    """Return whether any item has a value in this column."""
    for segment in state.segments:
        uri = f"{(segment.folder / ITEMS_FILE).resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as items:
            query = f"SELECT EXISTS (SELECT 1 FROM items WHERE {column} <> '')"  # noqa: S608  one of ours
            if items.execute(query).fetchone()[0]:
                return True
    return False
