"""One state of an index on disk: the ID table, the items, optionally their embeddings.

A snapshot never changes once it is finished. Changing an index writes a new one and then names it in the
index's manifest, so readers see the old state or the new one, and a killed writer leaves the old.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from filelock import FileLock, Timeout
from jaxtyping import Float, Float16, Int16
from torch import Tensor

from genius.artifact import ArtifactWriter, fingerprint_of, open_artifact, write_json
from genius.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, BadData, UsageError
from genius.search.items import Item, ItemStore, write_items
from genius.search.table import IdTable

KIND: Final = "snapshot"
CURRENT: Final = "index.json"
FORMAT: Final = 2
LOCK: Final = ".lock"
SNAPSHOT: Final = re.compile(r"snapshot-[0-9]{6}")
"""Names of the folders of states."""


StoredEmbeddings: TypeAlias = Literal["none", "fused", "raw"]
"""What is kept of each item beside its ID for re-ranking: nothing, the embedding that the ID was made from,
or the sum of the encoder's features (the paper's GENIUS^R)."""


class ItemArrays(NamedTuple):
    """What a model says of items, by row; may be memory-mapped."""

    codes: Int16[np.ndarray, "items levels"]
    typicality: Float16[np.ndarray, " items"]
    embeddings: Float16[np.ndarray, "items dim"] | None
    """Unit vectors, only when they are stored."""
    stored: StoredEmbeddings
    """What they are."""


class IndexFacts(NamedTuple):
    """What an index's manifest says."""

    snapshot: str
    model: str
    """Folder of the model when the index was created."""
    model_fingerprint: str
    embeddings: StoredEmbeddings


class Snapshot(NamedTuple):
    """A state of an index, open for reading; arrays are memory-mapped."""

    folder: Path
    table: IdTable
    items: ItemStore
    typicality: Float[np.ndarray, " items"]
    embeddings: np.ndarray | None
    stored: StoredEmbeddings

    def vectors(self) -> Callable[[np.ndarray], Tensor] | None:
        """Gives the stored embeddings of item rows, if there are any."""
        stored = self.embeddings
        return None if stored is None else lambda rows: torch.from_numpy(stored[rows]).float()

    def arrays(self) -> ItemArrays:
        """Codes and the rest by item row, as they were given."""
        counts = np.diff(self.table.bucket_starts)
        codes = np.empty((self.table.num_items, self.table.num_levels), dtype=np.int16)
        codes[self.table.items] = np.repeat(self.table.ids, counts, axis=0)
        return ItemArrays(codes, np.asarray(self.typicality), self.embeddings, self.stored)


def read_facts(folder: Path) -> IndexFacts:
    """Read an index's manifest.

    Raises
    ------
    ArtifactMissing
        there is no index in this folder.
    ArtifactMismatch
        it was made by a newer version, or the manifest is damaged.
    """
    path = folder / CURRENT
    if (folder / "model.json").exists():
        raise ArtifactMissing(f"{folder} is a model, not an index; give the index's folder")
    if not path.exists():
        raise ArtifactMissing(f"no index at {folder}; `genius index create {folder} --model …` makes one")
    try:
        body = json.loads(path.read_text())
        if body["format"] > FORMAT:
            raise ArtifactMismatch(f"{folder} was made by a newer version: upgrade genius")
        if body["format"] < FORMAT:
            raise ArtifactMismatch(f"{folder} was made by an older version: create the index again")
        _ = get_args(StoredEmbeddings).index(body["embeddings"])
        return IndexFacts(**{name: body[name] for name in IndexFacts._fields})
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ArtifactMismatch):
            raise
        raise ArtifactMismatch(f"{path} is damaged ({error}); create the index again") from None


class Current(NamedTuple):
    """The state of an index now."""

    facts: IndexFacts
    snapshot: Snapshot


def open_current(folder: Path) -> Current:
    """Open the current state of an index, also while somebody writes a new one."""
    facts = read_facts(folder)
    while True:
        try:
            return Current(facts, open_snapshot(folder, facts))
        except (ArtifactError, OSError, sqlite3.OperationalError):
            now = read_facts(folder)
            if now == facts:  # it is not that a writer removed it meanwhile: something is wrong
                raise
            facts = now


@contextlib.contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold an index for writing; readers are not kept out.

    Raises
    ------
    UsageError
        another process is writing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, timeout=0):
            yield
    except Timeout:
        raise UsageError(f"{folder} is being changed by another process; try again when it is done") from None


def open_snapshot(folder: Path, facts: IndexFacts) -> Snapshot:
    """Open one state of an index."""
    place = folder / facts.snapshot
    open_artifact(place, kind=KIND)
    embeddings = place / "embeddings.npy"
    return Snapshot(
        place,
        IdTable(
            np.load(place / "ids.npy", mmap_mode="r"),
            np.load(place / "bucket_starts.npy", mmap_mode="r"),
            np.load(place / "items.npy", mmap_mode="r"),
        ),
        ItemStore(place),
        np.load(place / "typicality.npy", mmap_mode="r"),
        np.load(embeddings, mmap_mode="r") if facts.embeddings != "none" else None,
        facts.embeddings,
    )


def commit_snapshot(
    folder: Path,
    facts: IndexFacts | None,
    items: Iterable[Item],
    arrays: ItemArrays,
    *,
    model: tuple[str, str],
) -> IndexFacts:
    """Write a new state and make it the current one, in one step; all other states are removed.

    Raises
    ------
    ArtifactMismatch
        ``facts`` are not the current state any more: somebody else wrote one meanwhile.
    """
    if facts != (read_facts(folder) if (folder / CURRENT).exists() else None):
        raise ArtifactMismatch(f"{folder} was changed by another writer meanwhile; run the same again")
    number = 1 if facts is None else int(facts.snapshot.rpartition("-")[2]) + 1
    name = f"snapshot-{number:06d}"
    place = folder / name
    for left in (place, folder / f".{name}.partial"):  # of a writer that was killed before naming it
        shutil.rmtree(left, ignore_errors=True)
    writer = ArtifactWriter(
        place, kind=KIND, config={}, inputs={"model": model[1], "before": fingerprint_of(facts)}
    )
    table = IdTable.build(arrays.codes, arrays.typicality)
    np.save(writer.path / "ids.npy", table.ids)
    np.save(writer.path / "bucket_starts.npy", table.bucket_starts)
    np.save(writer.path / "items.npy", table.items)
    np.save(writer.path / "typicality.npy", arrays.typicality)
    if arrays.embeddings is not None:
        np.save(writer.path / "embeddings.npy", arrays.embeddings)
    written = write_items(writer.path, items)
    if written != table.num_items:
        raise BadData(f"{written} items were given with IDs for {table.num_items}; run the same again")
    writer.finish(facts={"items": table.num_items, "ids": len(table)})
    now = IndexFacts(name, *model, arrays.stored)
    write_json(folder / CURRENT, {"format": FORMAT, **now._asdict()})
    for other in folder.iterdir():
        if SNAPSHOT.fullmatch(other.name) and other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    return now
