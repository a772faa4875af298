"""Make a folder of an index that others can use, with its card; what was deleted stays behind."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Literal

from genius.errors import ArtifactError, UsageError
from genius.hub.card import IndexCard, index_card
from genius.hub.listing import written
from genius.hub.place import alone, new_folder
from genius.search.described import count_by_modality
from genius.search.items import ITEMS_FILE
from genius.search.live import LOCK, one_writer
from genius.search.manifest import DELETED, SEGMENTS, read_manifest, write_manifest
from genius.search.segment import Segment
from genius.search.state import MOST_ATTEMPTS, IndexState, open_current
from genius.stages.replace import filling
from genius.stages.save import CARD, About, check_license, copy_artifact

__all__ = ["save_index"]


def save_index(source: Path, target: Path, about: About) -> Path:
    """Write an index as a folder of its own, without the place of its model on this machine.

    It is one state of the index, also while somebody changes that. Deleted items stay behind.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        there is no whole index in the folder.
    UsageError
        something is in the target's place, or the licence cannot be one.
    """
    check_license(about.license)
    read_manifest(source)
    folder = new_folder(target)
    with written(str(target)), alone(folder), filling(folder) as partial:
        if folder.exists():
            raise UsageError(f"{target} is there already; choose another place")
        state = _without_deleted(partial, _copy(source, partial, model=about.model or ""))
        card = IndexCard(
            name=about.name or folder.name,
            license=about.license,
            model=about.model,
            model_fingerprint=state.facts.model_fingerprint,
            by_modality={kind.label: count for kind, count in count_by_modality(state.segments).items()},
            has_texts=_any_has(state.segments, "text"),
            has_images=_any_has(state.segments, "image"),
            has_embeddings=state.facts.embeddings != "none",
            has_fields=_any_has(state.segments, "source"),
        )
        (partial / CARD).write_text(index_card(card), encoding="utf-8")
        partial.rename(folder)
    return target.expanduser()


def _copy(source: Path, target: Path, *, model: str) -> IndexState:
    """Copy the current state of an index; anew when a writer took a file of it away meanwhile."""
    for _ in range(MOST_ATTEMPTS):
        state = open_current(source)
        facts = state.facts._replace(model=model)
        try:
            for entry in state.manifest.segments:
                copy_artifact(source / SEGMENTS / entry.name, target / SEGMENTS / entry.name)
                if entry.deleted is not None:
                    (target / DELETED).mkdir(exist_ok=True)
                    shutil.copyfile(source / DELETED / entry.deleted, target / DELETED / entry.deleted)
            write_manifest(target, state.manifest._replace(facts=facts))
            return open_current(target)
        except (ArtifactError, OSError, sqlite3.Error):
            if read_manifest(source) == state.manifest:  # it was no writer: something is wrong
                raise
            for name in (SEGMENTS, DELETED):
                shutil.rmtree(target / name, ignore_errors=True)
    raise UsageError(
        f"{source} changed {MOST_ATTEMPTS} times while it was copied; try again when it is quieter"
    )


def _without_deleted(folder: Path, state: IndexState) -> IndexState:
    """Compact a copy that lists deleted items, for their texts are still in it."""
    if any(len(segment.dead) for segment in state.segments):
        with one_writer(folder) as writer:
            writer.compact()
        (folder / LOCK).unlink(missing_ok=True)
        shutil.rmtree(folder / DELETED, ignore_errors=True)
    return open_current(folder)


def _any_has(segments: tuple[Segment, ...], column: Literal["text", "image", "source"]) -> bool:
    """Whether something is told of any item in this column."""
    for segment in segments:
        uri = f"{(segment.folder / ITEMS_FILE).resolve().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as items:
            query = f"SELECT EXISTS (SELECT 1 FROM items WHERE {column} <> '')"  # noqa: S608  ours
            if items.execute(query).fetchone()[0]:
                return True
    return False
