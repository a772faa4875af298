"""One state of an index, open for reading."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from genius.artifact import file_fingerprint
from genius.errors import ArtifactError, ArtifactMismatch
from genius.search.arrays import open_array
from genius.search.calibration import Calibration
from genius.search.manifest import (
    CURRENT,
    DELETED,
    SEGMENTS,
    IndexFacts,
    IndexManifest,
    SegmentEntry,
    read_manifest,
)
from genius.search.segment import REMEDY, Segment, open_segment, saying_remedy
from genius.search.tuned import Tuned

NOTHING: Final = np.empty(0, dtype=np.int64)
MOST_ATTEMPTS: Final = 10
"""How often what reads a whole state begins anew when a writer takes it away meanwhile."""


class IndexState(NamedTuple):
    """One state of an index, open for reading for as long as one likes."""

    manifest: IndexManifest
    """What to compare with :func:`read_manifest` to see whether the index has changed."""
    segments: tuple[Segment, ...]

    @property
    def facts(self) -> IndexFacts:
        """Its model, and which embeddings it keeps."""
        return self.manifest.facts

    @property
    def tuned(self) -> Tuned | None:
        """How it is searched unless one says otherwise."""
        return self.manifest.tuned

    @property
    def calibration(self) -> Calibration | None:
        """What its scores are worth, if that was ever measured."""
        return self.manifest.calibration

    @property
    def generation(self) -> int:
        """How often the index has changed, from 1."""
        return self.manifest.generation

    @property
    def num_alive(self) -> int:
        """Items that are not deleted."""
        return sum(segment.num_alive for segment in self.segments)


def open_current(folder: Path) -> IndexState:
    """Open the current state of an index, also while somebody changes it. Nothing is read through.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        there is no index, or it is damaged, or was made by another version.
    """
    manifest = read_manifest(folder)
    while True:
        try:
            return open_state(folder, manifest)
        except (ArtifactError, OSError, sqlite3.Error):
            now = read_manifest(folder)
            if now == manifest:  # it is not that a writer removed it meanwhile: something is wrong
                raise
            manifest = now


def open_state(folder: Path, manifest: IndexManifest) -> IndexState:
    """Open the state that a manifest describes, while its files are there."""
    segments = tuple(
        open_segment(
            folder / SEGMENTS / entry.name, manifest=entry.manifest, dead=read_deleted(folder, entry)
        )
        for entry in manifest.segments
    )
    for segment, entry in zip(segments, manifest.segments, strict=True):
        if segment.table.num_items != entry.items:
            raise ArtifactMismatch(
                f"{segment.folder} has {segment.table.num_items} items, not the {entry.items} of {CURRENT}; "
                f"{REMEDY}"
            )
        if (segment.embeddings is None) is not (manifest.facts.embeddings == "none"):
            raise ArtifactMismatch(
                f"{segment.folder} does not keep the embeddings ({manifest.facts.embeddings}) that {CURRENT} "
                f"says; {REMEDY}"
            )
    return IndexState(manifest, segments)


def read_deleted(folder: Path, entry: SegmentEntry) -> Int64[np.ndarray, " rows"]:
    """Rows of a segment's deleted items, ascending.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        there is no such list, or it is none of rows of this segment.
    """
    if entry.deleted is None:
        return NOTHING
    path = folder / DELETED / entry.deleted
    if path.is_dir():
        raise ArtifactMismatch(f"{path} is a folder, expected a list of deleted items; {REMEDY}")
    with saying_remedy():
        dead = open_array(path, np.int64)
    if len(dead) != entry.num_deleted:
        raise ArtifactMismatch(
            f"{path} is damaged: it lists {len(dead)} items, expected {entry.num_deleted}; {REMEDY}"
        )
    if len(dead) and (dead[0] < 0 or dead[-1] >= entry.items or not (dead[1:] > dead[:-1]).all()):
        raise ArtifactMismatch(
            f"{path} is damaged: it is no ascending list of rows below {entry.items}; {REMEDY}"
        )
    return dead


def check_deleted(folder: Path, entry: SegmentEntry) -> list[Path]:
    """Compare a list of deleted items with what was noted when it was written; returns it if there is one.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        it is missing, or is not the one that was written.
    """
    if entry.deleted is None:
        return []
    read_deleted(folder, entry)
    path = folder / DELETED / entry.deleted
    if file_fingerprint(path) != entry.deleted_sha256:
        raise ArtifactMismatch(f"{path} is damaged or belongs to another index; {REMEDY}")
    return [path]
