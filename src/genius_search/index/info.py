"""Verification of an index's files, and a description of its contents."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from genius_search.artifact import MANIFEST, check_files, file_fingerprint, open_artifact
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, plural
from genius_search.index.learned import has_log, reading_log
from genius_search.index.roots import MAX_BYTES
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.index.store import (
    LEARNED,
    REMEDY,
    SEGMENTS,
    IndexManifest,
    Measured,
    read_manifest,
    read_state,
    refuse_links,
    with_hint,
)
from genius_search.index.writer import stored_pictures
from genius_search.model import MODEL_FILE, read_model_file
from genius_search.nn.codebooks import KIND, METRIC, StoredQuantizer


class Verified(NamedTuple):
    """The size of an index whose files are all intact."""

    segments: int
    items: int
    """Without deleted ones."""
    deleted: int
    """Deleted items that still take up space."""


def verify(
    folder: Path,
    opened: Snapshot | None = None,
    *,
    model_folder: Path | None = None,
    with_pictures: bool = True,
) -> Verified:
    """Compare every file of an index, which may be in use, and of its model with its checksum; open it.

    If damage is found, searches of ``opened``, a state that is in use, raise an error from then on. Its model
    lies in ``model_folder``, by default where the index says.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing or damaged. The message names it and says what to do.
    UsageError
        The index changes faster than it can be read.
    """
    refuse_links(folder, with_pictures=with_pictures)
    check = partial(_verify, folder, opened, model_folder=model_folder, with_pictures=with_pictures)
    return read_state(folder, check)


def _verify(
    folder: Path,
    opened: Snapshot | None,
    manifest: IndexManifest,
    *,
    model_folder: Path | None,
    with_pictures: bool,
) -> Verified:
    try:  # reading the manifest has compared it with its own checksum
        for entry in manifest.segments:
            with with_hint():
                check_files(folder / SEGMENTS / entry.name, entry.files, check_contents=True)
        snapshot = Snapshot.load(folder, manifest)
        _verify_model(folder, snapshot, model_folder)
    except ArtifactError as error:
        if opened is not None and opened.manifest == read_manifest(folder):
            opened.damage, opened.needs_check = str(error), True
        raise
    for picture in sorted(stored_pictures(folder, snapshot.segments)) if with_pictures else ():
        if not picture.is_file():
            raise ArtifactMissing(f"{picture} is missing; {REMEDY}")
        if picture.stat().st_size > MAX_BYTES or file_fingerprint(picture) != picture.name:
            raise ArtifactMismatch(f"{picture} is damaged; {REMEDY}")
    if has_log(folder):
        with reading_log(folder):
            verify(folder / LEARNED)
    deleted = sum(len(segment.dead) for segment in snapshot.segments)
    return Verified(len(snapshot.segments), snapshot.num_alive, deleted)


def _verify_model(index: Path, snapshot: Snapshot, model_folder: Path | None) -> None:
    """Compare an index with its model, if that is a folder here."""
    manifest = snapshot.manifest
    folder = Path(manifest.locate_model(index))
    if not manifest.has_own_model:
        folder = model_folder or folder
        if not ((model_folder or manifest.model) and (folder / MODEL_FILE).exists()):
            return
    model = read_model_file(folder)
    if model.fingerprint != manifest.model_fingerprint:
        if model_folder is None and not manifest.has_own_model:
            return  # it is opened with another folder, which is compared then
        raise ArtifactMismatch(
            f"{folder / MODEL_FILE} is not the model that assigned the IDs; {REMEDY}"
        )
    for name in model.parts.keys() - {"encoder"}:
        if (
            open_artifact(folder / name, kind=name, check_contents=True).fingerprint
            != model.parts[name].fingerprint
        ):
            raise ArtifactMismatch(f"{folder / name} is not part of this model; {REMEDY}")
    encoder = Path(model.encoder.spec_in(folder).partition(":")[2])
    if (encoder / MANIFEST).is_file():  # it was trained here
        open_artifact(encoder, kind="encoder", check_contents=True)
    snapshot.fit(StoredQuantizer(folder / "quantizer").codebooks, {})


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """A description of an index."""

    folder: str
    model: str
    model_fingerprint: str
    generation: int
    """Number of changes so far."""
    items: int
    passages: int
    """Of texts that are longer than the encoder reads, beside their beginnings."""
    by_modality: dict[str, int]
    distinct_ids: int
    collision_rate: float
    """Share of the items that share their ID with another."""
    bytes_per_item: dict[str, float]
    """On disk, by the name of the file."""
    embeddings: str
    """The stored embeddings and their type."""
    knows_queries: bool
    """Whether codebooks were fitted with vectors of queries; see :meth:`genius_search.Index.create`."""
    density_weight: float | None
    """The weight of densities, if queries with answers chose it; None if it is the default."""
    measured: Measured | None
    """What a search keeps of exact search, if it was measured."""
    segments: int
    deleted: int
    """Deleted items, which take up space until the index is compacted."""


def describe(folder: Path, snapshot: Snapshot) -> IndexInfo:
    """Describe an open index.

    Raises
    ------
    ArtifactMismatch
        The index is damaged.
    """
    with diagnose_corruption(snapshot):
        manifest, count = snapshot.manifest, snapshot.num_alive
        segments = snapshot.segments
        shared = np.zeros(0, np.int64)
        if count:  # how many items that are not deleted have each ID that occurs
            ids = [one.table.ids[one.table.rows_of_items[one.alive_rows()]] for one in segments]
            shared = np.unique(np.concatenate(ids), axis=0, return_counts=True)[1]
        sizes: Counter[str] = Counter()
        for entry in manifest.segments:
            sizes.update({Path(name).stem: fact.bytes for name, fact in entry.files.items()})
        bits = (
            ""
            if manifest.embeddings == "none"
            else f", {plural(manifest.embedding_bits, 'bit')} a number"
        )
        return IndexInfo(
            folder=str(folder),
            model=manifest.model,
            model_fingerprint=manifest.model_fingerprint,
            generation=manifest.generation,
            items=count,
            passages=sum(len(segment.with_passages(segment.alive_rows())) for segment in segments)
            - count,
            by_modality={
                kind.value: number for kind, number in snapshot.count_by_modality().items()
            },
            distinct_ids=len(shared),
            collision_rate=float(shared[shared > 1].sum() / max(1, count)),
            bytes_per_item={name: size / max(1, count) for name, size in sizes.items()},
            embeddings=f"{manifest.embeddings}{bits}",
            knows_queries=manifest.has_own_model
            and METRIC in open_artifact(folder / manifest.model / "quantizer", kind=KIND).inputs,
            density_weight=manifest.density_weight,
            measured=manifest.measured,
            segments=len(segments),
            deleted=sum(len(segment.dead) for segment in segments),
        )
