"""A part of an index that never changes: an ID table, the items it is about, optionally their embeddings.

Items that are deleted stay in their segment and are named in a list beside it, so adding and deleting write
little however large the index is.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float16, Float32, Int8, Int16, Int64, UInt8

from genius.artifact import MANIFEST, file_fingerprint, open_artifact
from genius.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError
from genius.search.arrays import open_array, save_array
from genius.search.embedding_file import EmbeddingType, EmbeddingWriter
from genius.search.items import ITEMS_FILE, ItemStore
from genius.search.merge import TableWriter
from genius.search.table import IdTable

KIND: Final = "segment"
REMEDY: Final = "put back a copy of it, or create the index again"
TYPICALITY: Final = "typicality.npy"
EMBEDDINGS: Final = "embeddings.npy"
SCALES: Final = "embedding_scales.npy"
DENSITIES: Final = "embedding_densities.npy"

MEMORY_BYTES: Final = 1 << 30
"""What sorting and merging tables may take unless told."""

StoredEmbeddings: TypeAlias = Literal["none", "fused", "raw"]
"""What is kept of each item beside its ID for re-ranking: nothing, the embedding that the ID was made from,
or the sum of the encoder's features (the paper's GENIUS^R)."""


class ItemArrays(NamedTuple):
    """What a model says of items, by row; may be memory-mapped."""

    codes: Int16[np.ndarray, "items columns"]
    """Of the IDs, then what follows from them: their marks (:mod:`genius.models.marks`)."""
    typicality: Float16[np.ndarray, " items"]
    embeddings: Float16[np.ndarray, "items dim"] | None
    """Unit vectors, only when they are stored."""
    stored: StoredEmbeddings
    """What they are."""
    densities: UInt8[np.ndarray, " items"] | None = None
    """How crowded it is around each, with fused embeddings (:meth:`genius.models.marks.Marker.crowding`)."""


class Segment(NamedTuple):
    """A segment that is open for reading; its arrays are memory-mapped."""

    name: str
    folder: Path
    table: IdTable
    items: ItemStore
    typicality: Float16[np.ndarray, " items"]
    embeddings: Float16[np.ndarray, "items dim"] | Int8[np.ndarray, "items dim"] | None
    scales: Float16[np.ndarray, " items"] | None
    """What to multiply each embedding with, where they are stored as 8-bit integers."""
    densities: UInt8[np.ndarray, " items"] | None
    """How crowded it is around items; None also where an earlier version, which kept none, wrote them."""
    dead: Int64[np.ndarray, " rows"]
    """Deleted items' rows, ascending."""

    @property
    def num_alive(self) -> int:
        """Items that are not deleted."""
        return self.table.num_items - len(self.dead)

    def alive(self) -> Bool[np.ndarray, " items"] | None:
        """Which items are not deleted; None when none is."""
        if not len(self.dead):
            return None
        mask = np.ones(self.table.num_items, dtype=bool)
        mask[self.dead] = False
        return mask

    def is_dead(self, rows: Int64[np.ndarray, " rows"]) -> Bool[np.ndarray, " rows"]:
        """Whether these items are deleted."""
        if not len(self.dead):
            return np.zeros(len(rows), dtype=bool)
        place = np.searchsorted(self.dead, rows)
        return np.asarray(self.dead[np.minimum(place, len(self.dead) - 1)] == rows)

    def vectors(self, rows: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows dim"]:
        """Stored embeddings of item rows.

        Raises
        ------
        UsageError
            the index keeps none.
        """
        if self.embeddings is None:
            raise UsageError(
                "this index keeps no embeddings to rank by; create it with --embeddings fused (or raw)"
            )
        found: np.ndarray = self.embeddings[rows].astype(np.float32)
        if self.scales is not None:
            found *= self.scales[rows, None].astype(np.float32)
        return found


def fill_arrays(folder: Path, arrays: ItemArrays, kind: EmbeddingType) -> None:
    """Write the files of a new segment, all but the item store."""
    writer = TableWriter(folder, levels=arrays.codes.shape[1], memory_bytes=MEMORY_BYTES)
    writer.add(arrays.codes, arrays.typicality)
    writer.finish()
    save_array(folder / TYPICALITY, arrays.typicality)
    if arrays.embeddings is not None:
        dim = arrays.embeddings.shape[1]
        with contextlib.closing(
            EmbeddingWriter(folder / EMBEDDINGS, folder / SCALES, dim=dim, kind=kind)
        ) as out:
            out.append(arrays.embeddings)
    if arrays.densities is not None:
        save_array(folder / DENSITIES, arrays.densities)


def load_segment(folder: Path, name: str, dead: Int64[np.ndarray, " rows"]) -> Segment:
    """Open the files of a segment.

    Raises
    ------
    ArtifactMismatch
        one of them cannot be read, or does not fit the others.
    """
    with saying_remedy():
        table = IdTable.open(folder)
        typicality = open_array(folder / TYPICALITY, np.float16)
        embeddings = scales = None
        if (folder / SCALES).exists():
            scales = open_array(folder / SCALES, np.float16)
            embeddings = open_array(folder / EMBEDDINGS, np.int8, dimensions=2)
        elif (folder / EMBEDDINGS).exists():
            embeddings = open_array(folder / EMBEDDINGS, np.float16, dimensions=2)
        has_densities = (folder / DENSITIES).exists()
        densities = open_array(folder / DENSITIES, np.uint8) if has_densities else None
    arrays = {TYPICALITY: typicality, EMBEDDINGS: embeddings, SCALES: scales, DENSITIES: densities}
    for file, array in arrays.items():
        if array is not None and len(array) != table.num_items:
            raise ArtifactMismatch(
                f"{folder / file} has {len(array)} rows, the table beside it {table.num_items} items; "
                f"{REMEDY}"
            )
    try:
        store = ItemStore(folder)
    except sqlite3.DatabaseError as error:
        if not (folder / ITEMS_FILE).exists():
            raise ArtifactMissing(f"{folder / ITEMS_FILE} is missing; {REMEDY}") from None
        raise ArtifactMismatch(f"{folder / ITEMS_FILE} is damaged ({error}); {REMEDY}") from None
    return Segment(name, folder, table, store, typicality, embeddings, scales, densities, dead)


@contextlib.contextmanager
def saying_remedy() -> Iterator[None]:
    """Let the errors of what reads single files say what to do about an index."""
    try:
        yield
    except ArtifactError as error:
        raise type(error)(f"{error}; {REMEDY}") from None


def open_segment(
    folder: Path, *, manifest: str, dead: Int64[np.ndarray, " rows"], verify: bool = False
) -> Segment:
    """Open a finished segment; ``manifest`` is the SHA-256 that the file of that name must have.

    Files' sizes are checked, and with ``verify`` their contents.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        a file is missing, or is not the one that was written.
    """
    check_segment(folder, manifest=manifest, verify=verify)
    return load_segment(folder, folder.name, dead)


def check_segment(folder: Path, *, manifest: str, verify: bool) -> list[Path]:
    """Compare a segment's files with what was noted when they were written; returns them."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ArtifactMissing(f"{path} is missing; {REMEDY}")
    if file_fingerprint(path) != manifest:
        raise ArtifactMismatch(f"{path} is damaged or belongs to another index; {REMEDY}")
    with saying_remedy():
        open_artifact(folder, kind=KIND, verify=verify)
    return [path, *(folder / name for name in json.loads(path.read_bytes())["files"])]
