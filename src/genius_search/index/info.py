"""Numbers that describe an index (items, IDs, collisions, bytes), and the check of its files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from genius_search.artifact import MANIFEST, check_files, file_fingerprint, open_artifact
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, plural
from genius_search.index.learned import has_log, reading_log
from genius_search.index.picture_text import unread_pictures
from genius_search.index.roots import MAX_PICTURE_BYTES
from genius_search.index.snapshot import Snapshot, check_files_on_error
from genius_search.index.store import (
    LEARNED,
    REMEDY,
    SEGMENTS,
    IndexManifest,
    Measured,
    read_manifest,
    read_state,
    refuse_links,
    with_advice,
)
from genius_search.index.writer import stored_pictures
from genius_search.model import MODEL_FILE, read_model_file
from genius_search.nn.codebooks import METRIC, QUANTIZER_KIND, StoredQuantizer


class CheckReport(NamedTuple):
    """The size of an index whose files are all intact."""

    segments: int
    items: int
    """Number of items, without deleted ones."""
    deleted: int
    """Deleted items that still take up space."""


def check(
    folder: Path,
    snapshot: Snapshot | None = None,
    *,
    model_folder: Path | None = None,
    with_pictures: bool = True,
) -> CheckReport:
    """Check every file of an index and of its model against its checksum, and open the index.

    Another process may change the index meanwhile.

    Parameters
    ----------
    snapshot
        A snapshot in use. If the index is damaged, its searches raise an error from then on.
    model_folder
        The folder of the model; by default the folder that the index names.
    with_pictures
        Whether the pictures that are stored in the index are checked, too.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing or damaged. The message names the file and says what to do.
    UsageError
        The index changes faster than it can be read.
    """
    refuse_links(folder, with_pictures=with_pictures)

    def check_state(manifest: IndexManifest) -> CheckReport:
        return _check_state(
            folder, manifest, snapshot, model_folder=model_folder, with_pictures=with_pictures
        )

    return read_state(folder, check_state)


def _check_state(
    folder: Path,
    manifest: IndexManifest,
    snapshot_in_use: Snapshot | None,
    *,
    model_folder: Path | None,
    with_pictures: bool,
) -> CheckReport:
    """Check one generation of an index: segments, model, pictures and the log of choices.

    The manifest needs no check: it contains a checksum, which was compared when it was read.
    """
    try:
        for entry in manifest.segments:
            with with_advice():
                check_files(folder / SEGMENTS / entry.name, entry.files, check_contents=True)
        snapshot = Snapshot.load(folder, manifest)
        _check_model(folder, snapshot, model_folder)
    except ArtifactError as error:
        if snapshot_in_use is not None and snapshot_in_use.manifest == read_manifest(folder):
            snapshot_in_use.damage = str(error)
            snapshot_in_use.needs_check = True
        raise
    if with_pictures:
        for picture in sorted(stored_pictures(folder, snapshot.segments)):
            _check_picture(picture)
    if has_log(folder):
        with reading_log(folder):
            check(folder / LEARNED)
    num_deleted = sum(len(segment.dead) for segment in snapshot.segments)
    return CheckReport(len(snapshot.segments), snapshot.num_alive, num_deleted)


def _check_picture(picture: Path) -> None:
    """Check a stored picture, whose file name is the hash of its contents."""
    if not picture.is_file():
        raise ArtifactMissing(f"{picture} is missing; {REMEDY}")
    if picture.stat().st_size > MAX_PICTURE_BYTES or file_fingerprint(picture) != picture.name:
        raise ArtifactMismatch(f"{picture} is damaged; {REMEDY}")


def _check_model(index: Path, snapshot: Snapshot, model_folder: Path | None) -> None:
    """Check the files of an index's model, if the model is a folder on this machine."""
    manifest = snapshot.manifest
    folder = Path(manifest.locate_model(index))
    if not manifest.has_own_model:
        folder = model_folder or folder
        has_location = bool(model_folder or manifest.model)
        if not (has_location and (folder / MODEL_FILE).exists()):
            return
    model = read_model_file(folder)
    if model.fingerprint != manifest.model_fingerprint:
        if model_folder is None and not manifest.has_own_model:
            return  # the index is opened with another folder, which is compared then
        raise ArtifactMismatch(
            f"{folder / MODEL_FILE} is not the model that assigned the IDs; {REMEDY}"
        )
    for name in model.parts.keys() - {"encoder"}:
        part = open_artifact(folder / name, kind=name, check_contents=True)
        if part.fingerprint != model.parts[name].fingerprint:
            raise ArtifactMismatch(f"{folder / name} is not part of this model; {REMEDY}")
    encoder = Path(model.encoder.spec_in(folder).partition(":")[2])
    if (encoder / MANIFEST).is_file():  # an encoder that was trained here
        open_artifact(encoder, kind="encoder", check_contents=True)
    snapshot.check_arrays(StoredQuantizer(folder / "quantizer").codebooks, {})


@dataclass(frozen=True, slots=True)
class IndexInfo:
    """A description of an index."""

    folder: str
    model: str
    model_fingerprint: str
    generation: int
    """Number of changes so far."""
    items: int
    unread_pictures: int
    """Number of pictures whose text has not been read (extra ``ocr``)."""
    passages: int
    """Number of passages after the first one, of texts that are longer than the encoder reads."""
    by_modality: dict[str, int]
    distinct_ids: int
    collision_rate: float
    """Share of the items that share their ID with another."""
    bytes_per_item: dict[str, float]
    """Bytes on disk by file name, divided by the number of items."""
    embeddings: str
    """Type of the stored embeddings and bits of each number."""
    knows_queries: bool
    """Whether query vectors were used to fit the codebooks (:meth:`genius_search.Index.create`)."""
    density_weight: float | None
    """The density weight that was chosen with known answers; None if it is the default."""
    measured: Measured | None
    """Measured agreement with exact search; None if it was not measured."""
    segments: int
    deleted: int
    """Number of deleted items, which take up space until the index is compacted."""


def describe_index(folder: Path, snapshot: Snapshot) -> IndexInfo:
    """Describe an index.

    Raises
    ------
    ArtifactMismatch
        The index is damaged.
    """
    manifest = snapshot.manifest
    num_items = snapshot.num_alive
    with check_files_on_error(snapshot):
        items_per_id = _count_items_per_id(snapshot)
        num_rows = sum(
            len(segment.with_passages(segment.alive_rows())) for segment in snapshot.segments
        )
        modalities = snapshot.count_by_modality()
        return IndexInfo(
            folder=str(folder),
            model=manifest.model,
            model_fingerprint=manifest.model_fingerprint,
            generation=manifest.generation,
            items=num_items,
            unread_pictures=sum(1 for _ in unread_pictures(snapshot)),
            passages=num_rows - num_items,
            by_modality={modality.value: count for modality, count in modalities.items()},
            distinct_ids=len(items_per_id),
            collision_rate=float(items_per_id[items_per_id > 1].sum() / max(1, num_items)),
            bytes_per_item=_bytes_per_item(manifest, num_items),
            embeddings=_describe_embeddings(manifest),
            knows_queries=_knows_queries(folder, manifest),
            density_weight=manifest.density_weight,
            measured=manifest.measured,
            segments=len(snapshot.segments),
            deleted=sum(len(segment.dead) for segment in snapshot.segments),
        )


def _count_items_per_id(snapshot: Snapshot) -> Int64[np.ndarray, " ids"]:
    """Return how many items have each ID that occurs."""
    if not snapshot.num_alive:
        return np.zeros(0, np.int64)
    ids = []
    for segment in snapshot.segments:
        table_rows = segment.table.rows_of_items[segment.alive_rows()]
        ids.append(segment.table.ids[table_rows])
    _, counts = np.unique(np.concatenate(ids), axis=0, return_counts=True)
    return np.asarray(counts)


def _bytes_per_item(manifest: IndexManifest, num_items: int) -> dict[str, float]:
    sizes: Counter[str] = Counter()
    for segment in manifest.segments:
        sizes.update({Path(name).stem: file.bytes for name, file in segment.files.items()})
    return {name: size / max(1, num_items) for name, size in sizes.items()}


def _describe_embeddings(manifest: IndexManifest) -> str:
    """Return the type and size of the stored embeddings, such as "fused, 4 bits a number"."""
    if manifest.embeddings == "none":
        return "none"
    return f"{manifest.embeddings}, {plural(manifest.embedding_bits, 'bit')} a number"


def _knows_queries(folder: Path, manifest: IndexManifest) -> bool:
    if not manifest.has_own_model:
        return False
    return (
        METRIC in open_artifact(folder / manifest.model / "quantizer", kind=QUANTIZER_KIND).inputs
    )
