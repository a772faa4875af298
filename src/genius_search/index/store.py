"""The files of an index: its manifest, its segments, and how they are opened and checked.

::

    photos.index/
        index.json              the manifest: identity, generation, segments, deleted items
        model/                  the model, if the index was created with an encoder alone
        segments/000001/        items.sqlite, and arrays by row
        segments/000007/
        pictures/ab/abcd...     pictures that were added without a file

The rows of a segment are its items, and then the passages of long texts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Bool, Float16, Int64, UInt8
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

from genius_search.artifact import FileFact, ManifestForm, check_files
from genius_search.config import SearchSettings
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.items import ITEMS_FILE, ItemStore
from genius_search.search.table import Allowed, IdTable, expand_ranges
from genius_search.search.vectors import (
    FINE_ROWS,
    EmbeddingBits,
    Expected,
    Quantized,
    StoredFineCodes,
    StoredVectors,
    is_residual,
    open_array,
    value_type,
)

if TYPE_CHECKING:
    from genius_search.search.rank import CodeRanker


REMEDY: Final = "restore it from a backup, or create the index again"

# Files and folders of an index.
CURRENT: Final = "index.json"
INDEX_FORM: Final = ManifestForm(CURRENT, 15, REMEDY)
CLUSTER: Final = "cluster.json"
"""Manifest of a cluster, whose shards are indexes."""
OWN_MODEL: Final = "./model"
"""The model of an index that was created with an encoder alone. A refit appends the generation, as
in ``./model-7``."""
LEARNED: Final = "learned"
"""The log of choices: an index inside the index."""
SEGMENTS: Final = "segments"
SEGMENT_NAME: Final = re.compile(r"[0-9]{6,}")
"""Names of segments: the generation that wrote them."""
WORK: Final = ".work"
"""Folder for the saved work of an interrupted run."""
LOCK: Final = ".lock"
TEMPORARY: Final = "tmp"
"""Folder where a segment is written before it is renamed."""
PICTURES: Final = "pictures"
"""Folder for pictures that were added without a file, named by their SHA-256."""
PICTURE_NAME: Final = re.compile(rf"{PICTURES}/[0-9a-f]{{2}}/[0-9a-f]{{64}}")
"""Paths of stored pictures in items; another path may lead out of the index."""
PENDING_PICTURES: Final = f"{PICTURES}/.unsettled"
"""Exists during a change that may leave pictures which no item names."""

# Files of a segment, apart from those of the ID table.
IDS: Final = "ids.npy"
CODE_COSINES: Final = "code_cosines.npy"
EMBEDDINGS: Final = "embeddings.npy"
SCALES: Final = "embedding_scales.npy"
DENSITIES: Final = "embedding_densities.npy"
LENGTHS: Final = "embedding_lengths.npy"
FINE: Final = "fine_codes.npy"
PASSAGES: Final = "passages.npy"
"""Row of the item, and start and end in its text, for each passage; only in segments with
passages."""
MOMENTS: Final = "moments.npy"
"""The time of each passage in milliseconds; only in segments with videos."""
ITEM_IDS: Final = "item_ids.npy"
"""The ids of all items in UTF-8, row after row, so that hits need no look-up for them."""
ITEM_ID_ENDS: Final = "item_id_ends.npy"
"""The end of each row's id."""

MANIFEST_HEAD_BYTES: Final = 256
"""Length of the beginning of ``index.json`` that holds its checksum, identity and generation."""
MIN_DELETED_SHARE: Final = 0.2
"""Share of deleted items from which on compaction rewrites a segment. Since all segments after it
are smaller, at most ten items are written for each deleted one."""
MAX_ROOTS: Final = 1_000
MAX_READ_ATTEMPTS: Final = 10
"""Maximum number of attempts to read a whole state while writers replace it."""
IMPOSSIBLE_PATH_ERRORS: Final = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""Error numbers of paths that cannot exist: below a file, too long, or a loop of links."""
# Opening a pipe without this flag would wait for a writer.
_READ_FLAGS: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)

StoredEmbeddings: TypeAlias = Literal["none", "fused", "raw"]
"""Embedding stored with each item for re-ranking: none, the fused embedding that its ID was
computed from, or the sum of the encoder's features (the paper's GENIUS^R)."""
T = TypeVar("T")


class ItemIds(NamedTuple):
    """The ids of a segment's items, memory-mapped.

    The ids bag.jpg and kite are stored as::

    characters   b a g . j p g k i t e
    ends         7 11
    """

    characters: memoryview
    """In UTF-8."""
    ends: memoryview
    """End of each item's id, as 64-bit integers."""

    def at(self, row: int) -> str:
        """Return the id of the item in a row."""
        start = self.ends[row - 1] if row else 0
        return str(self.characters[start : self.ends[row]], "utf-8")


class Segment(NamedTuple):
    """A segment that is open for reading; its arrays are memory-mapped."""

    name: str
    folder: Path
    table: IdTable
    items: ItemStore
    code_cosine: Float16[np.ndarray, " items"]
    embeddings: Quantized | None
    bits: EmbeddingBits
    """Bits per number of the embeddings."""
    densities: UInt8[np.ndarray, " items"] | None
    """Densities of items and passages; None without fused embeddings."""
    fine: StoredFineCodes | None
    """Fine codes of items and passages; None if IDs are whole."""
    dead: Int64[np.ndarray, " rows"]
    """Rows of deleted items, ascending."""
    unchecked: dict[Path, FileFact]
    """Files that have not been compared with their checksums yet."""
    passages: Int64[np.ndarray, "passages 3"]
    """Row of the item, and start and end in its text, for each passage, in the order of the items.
    Passage i has row ``num_items + i``."""
    moments: Int64[np.ndarray, " passages"] | None
    """Time of each passage in milliseconds, −1 for one of a text; None without videos."""
    item_ids: ItemIds

    @property
    def num_items(self) -> int:
        """Number of items, deleted ones included."""
        return self.table.num_items - len(self.passages)

    @property
    def num_alive(self) -> int:
        """Number of items that are not deleted."""
        return self.num_items - len(self.dead)

    def alive_mask(self) -> Bool[np.ndarray, " items"] | None:
        """Return a mask of the items that are not deleted, or None if none is deleted."""
        if not len(self.dead):
            return None
        mask = np.ones(self.num_items, dtype=bool)
        mask[self.dead] = False
        return mask

    def alive_rows(self) -> Int64[np.ndarray, " rows"]:
        """Return the rows of the items that are not deleted, ascending."""
        mask = self.alive_mask()
        return np.arange(self.num_items) if mask is None else np.flatnonzero(mask)

    def allow(self, items: Bool[np.ndarray, " items"]) -> Allowed:
        """Return the rows that a search may return: the items of a mask, and their passages."""
        return Allowed.of(self.table, np.concatenate([items, items[self.passages[:, 0]]]))

    def with_passages(self, rows: Int64[np.ndarray, " items"]) -> Int64[np.ndarray, " rows"]:
        """Return rows of items, each followed by the rows of its passages.

        With 10 items, of which item 3 has passages 0 and 1, rows 2, 3 and 5 become 2, 3, 10, 11, 5.
        """
        if not len(self.passages):
            return rows
        owners = self.passages[:, 0]
        # Passage passages[j] belongs to rows[positions[j]].
        positions, passages = expand_ranges(
            owners.searchsorted(rows), owners.searchsorted(rows, "right")
        )
        order = np.argsort(np.concatenate([np.arange(len(rows)), positions]), kind="stable")
        return np.concatenate([rows, self.num_items + passages])[order]

    def vectors(self, ranker: CodeRanker) -> StoredVectors:
        """Return the stored embeddings.

        Parameters
        ----------
        ranker
            Holds the code vectors of the index's model, which residuals are added to.

        Raises
        ------
        UsageError
            The index stores no embeddings.
        """
        if self.embeddings is None:
            raise UsageError(
                "this index keeps no embeddings to rank by; create it with `embeddings='fused'`"
            )
        return StoredVectors(self.embeddings, self.bits, ranker, self.table, self.fine)


def expected_arrays(
    rows: int, manifest: IndexManifest, num_ids: int, columns: int
) -> dict[str, Expected]:
    """Return types, shapes and limits of the arrays of a segment, apart from its IDs and passages.

    Parameters
    ----------
    rows
        Number of items and passages.
    num_ids, columns
        Shape of the array of different IDs.
    """
    expected = {
        "starts.npy": Expected("i4", (max(0, num_ids - 1),), 1, num_ids - 1),
        "level_bounds.npy": Expected("i8", (columns + 1,), 0, max(0, num_ids - 1), step=0),
        "bucket_starts.npy": Expected("i4", (num_ids + 1,), 0, rows, step=1),
        "items.npy": Expected("i4", (rows,), 0, rows - 1),
        CODE_COSINES: Expected("f2", (rows,)),  # NaN where it is unknown
    }
    if manifest.embeddings != "none":
        expected[EMBEDDINGS] = Expected(value_type(manifest.embedding_bits).name, (rows, None))
        if is_residual(manifest.embedding_bits):
            expected[SCALES] = Expected("f2", (rows,), 0)
    if manifest.embeddings == "fused":
        expected[DENSITIES] = Expected("u1", (rows,))
    if manifest.fine_codes:
        num_blocks = -(-rows // FINE_ROWS)
        expected[FINE] = Expected("u1", (num_blocks, manifest.fine_codes // 2, FINE_ROWS))
        if is_residual(manifest.embedding_bits):
            expected[LENGTHS] = Expected("u1", (rows,))
    return expected


def load_segment(folder: Path, entry: SegmentEntry, manifest: IndexManifest) -> Segment:
    """Open a segment of the index in a folder, and check that its files fit together.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        A file is missing, cannot be read, or does not fit the others or the manifest.
    """
    segment_folder = folder / SEGMENTS / entry.name
    with with_advice():
        check_files(segment_folder, entry.files, check_contents=False)
        ids = open_array(segment_folder / IDS, Expected("u1 i2", (None, None), 0))
        passages = _open_passages(segment_folder, entry)
        expected = expected_arrays(entry.items + len(passages), manifest, *ids.shape)
        moments = None
        if MOMENTS in entry.files:
            form = Expected("i8", (len(passages),), -1, np.iinfo(np.int64).max)
            moments = open_array(segment_folder / MOMENTS, form)
        optional = {PASSAGES, MOMENTS}
        required = {IDS, ITEM_IDS, ITEM_ID_ENDS, ITEMS_FILE, *expected}
        if entry.files.keys() - optional != required:
            raise ArtifactMismatch(
                f"{CURRENT} names {sorted(entry.files)} in {segment_folder}, expected "
                f"{sorted(required)}"
            )
        arrays = {name: open_array(segment_folder / name, form) for name, form in expected.items()}
        table = IdTable(
            ids,
            arrays["starts.npy"],
            np.array(arrays["level_bounds.npy"]),
            arrays["bucket_starts.npy"],
            arrays["items.npy"],
        )
        if not table.is_consistent():
            raise ArtifactMismatch(
                f"the arrays of the IDs in {segment_folder} do not belong together"
            )
        items = _open_items(segment_folder, entry)
        item_ids = _open_item_ids(segment_folder, entry)
    embeddings = None
    if EMBEDDINGS in arrays:
        embeddings = Quantized(arrays[EMBEDDINGS], arrays.get(SCALES))
    return Segment(
        entry.name,
        segment_folder,
        table,
        items,
        arrays[CODE_COSINES],
        embeddings,
        manifest.embedding_bits,
        arrays.get(DENSITIES),
        StoredFineCodes(arrays[FINE], arrays.get(LENGTHS), table) if FINE in arrays else None,
        entry.dead_rows(),
        {segment_folder / name: fact for name, fact in entry.files.items()},
        passages,
        moments,
        item_ids,
    )


def _open_item_ids(segment_folder: Path, entry: SegmentEntry) -> ItemIds:
    """Open the ids of the items of a segment."""
    path = segment_folder / ITEM_IDS
    characters = open_array(path, Expected("u1", (None,)))
    ends = open_array(segment_folder / ITEM_ID_ENDS, Expected("i8", (entry.items,)))
    if len(characters) != (ends[-1] if entry.items else 0):
        raise ArtifactMismatch(f"{path} does not fit {ITEM_ID_ENDS}")
    return ItemIds(characters.data, ends.data)


def _open_passages(segment_folder: Path, entry: SegmentEntry) -> Int64[np.ndarray, "passages 3"]:
    """Open the passages of a segment, whose first column is the rows of items, ascending."""
    if PASSAGES not in entry.files:
        return np.zeros((0, 3), dtype=np.int64)
    path = segment_folder / PASSAGES
    passages = open_array(path, Expected("i8", (None, 3), 0, np.iinfo(np.int64).max))
    owners = passages[:, 0]
    if owners.max(initial=0) >= entry.items or (owners[1:] < owners[:-1]).any():
        raise ArtifactMismatch(f"{path} belongs to other items")
    return passages


def _open_items(segment_folder: Path, entry: SegmentEntry) -> ItemStore:
    """Open the items of a segment, and check their number."""
    path = segment_folder / ITEMS_FILE
    try:
        items = ItemStore(segment_folder)
        num_rows = items.num_rows
    except sqlite3.DatabaseError as error:
        raise ArtifactMismatch(f"{path} is damaged ({error})") from None
    if num_rows != entry.items:
        raise ArtifactMismatch(f"{path} has {num_rows:,} items, expected {entry.items:,}")
    return items


@contextlib.contextmanager
def with_advice() -> Iterator[None]:
    """Append advice about the index to errors about single files."""
    try:
        yield
    except ArtifactError as error:
        raise type(error)(f"{error}; {REMEDY}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A logistic regression from scores to probabilities, measured on held-out queries."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    intercept: float
    weights: tuple[float, float, float]
    """Weights of :func:`genius_search.index.score.hit_features` in the log-odds. None is negative,
    so that no hit is less likely than a lower one."""
    threshold: float | None
    """Least probability of a first hit that is a good match; None if no threshold is precise
    enough."""
    search: SearchSettings
    """Settings of the searches whose scores were measured."""
    queries: int
    """Number of measured queries; each counts with its right answers, and without them."""
    promised: float
    """Mean probability of the first hits."""
    right: float
    """Share of the first hits that are right."""
    good: float
    """Share of the queries with a good match."""
    good_and_right: float
    """Share of the good matches that are right."""
    refused: float
    """Share of the queries without right answers that have no good match."""
    fewest_words: dict[str, int] = field(default_factory=dict)
    """Minimum number of words of nearly all measured queries, by modality, or ``vector``. Queries
    of another modality, or with fewer words, have no probabilities."""

    def applies_to(self, config: SearchSettings) -> bool:
        """Return whether searches with these settings have scores like the measured ones."""
        return score_settings(config) == score_settings(self.search)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Recall of exact search, measured when the index was written."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    items: int
    """Items and passages at that time."""
    queries: int
    """Number of queries, which are vectors near items of the index."""
    shortlist: int
    """Number of items that are compared by their embeddings; 0 stands for all."""
    kept: float
    """Share of the ten nearest items that a search finds without the correction for hubs."""
    kept_with_densities: float
    """That share with the correction for hubs, the default, which prefers other items on
    purpose."""
    margin: float | None = None
    """Margin of the search of cells, if the default one would find too few."""
    density_weight: float | None = None
    """Weight of densities, if the default weight would keep too few of the nearest ten items."""


def score_settings(config: SearchSettings) -> tuple[object, ...]:
    """Return the settings that the scores of hits depend on."""
    is_generated = config.rerank == "none"
    return (
        config.rerank,
        0.0 if is_generated else config.density_weight,
        config.scores if is_generated else None,
    )


class Root(BaseModel):
    """A folder, or a single file, that an index follows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    folder: str
    """Absolute path of the folder or file."""
    name: str
    """Beginning of the ids of its items, before a slash and the path below the folder; empty for
    the first folder, whose ids are the paths alone."""
    captions: bool = True
    """Whether texts next to and inside pictures are read."""
    exclude: tuple[str, ...] = ()
    """Patterns of files and folders to leave out."""


Roots: TypeAlias = Annotated[tuple[Root, ...], Field(max_length=MAX_ROOTS)]


class SegmentEntry(BaseModel):
    """A segment in ``index.json``. Names are checked, so that none leads out of the folder."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    name: str = Field(pattern=r"^[0-9]{6,}$")
    items: int
    """Number of items, deleted ones included."""
    files: dict[Annotated[str, Field(pattern=r"^[a-z_]+\.(npy|sqlite)$")], FileFact]
    deleted: bytes = b""
    """One bit per item, set if the item is deleted; empty if no item is deleted."""

    def dead_rows(self) -> Int64[np.ndarray, " rows"]:
        """Return the rows of the deleted items, ascending."""
        bits = np.frombuffer(self.deleted, dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits)[: self.items])

    def without(self, rows: Int64[np.ndarray, " rows"]) -> SegmentEntry:
        """Return the entry with these rows as its deleted items, and no others."""
        is_dead = np.zeros(self.items, dtype=bool)
        is_dead[rows] = True
        return self.model_copy(update={"deleted": np.packbits(is_dead).tobytes()})


class IndexManifest(BaseModel):
    """The contents of ``index.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    identity: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Random name of the index, which changes and copies keep (:func:`new_identity`)."""
    generation: int = 0
    """Number of changes so far; 0 only before the first commit."""
    model: str
    """Folder or name of the model; begins with :data:`OWN_MODEL` if the index contains its
    model."""
    model_fingerprint: str
    embeddings: StoredEmbeddings
    embedding_bits: EmbeddingBits = 16
    reads_images: bool = True
    """Whether the encoder reads pictures. Otherwise the level-0 code of every item is that of
    texts, and only the store of items knows which of them are pictures."""
    fine_codes: Annotated[int, Field(exclude_if=lambda value: not value)] = 0
    """Number of fine codes of each item; 0 if IDs are whole."""
    segments: tuple[SegmentEntry, ...] = ()
    roots: Roots = ()
    """Roots by number. None is ever removed, because items store the numbers."""
    calibration: Annotated[Calibration | None, Field(exclude_if=lambda value: value is None)] = None
    density_weight: FiniteFloat | None = None
    """Weight of densities, measured with known answers; None for the default."""
    least: Annotated[dict[str, float], Field(exclude_if=lambda value: not value)] = {}
    """Least scores of good first hits, by modality; see
    :func:`genius_search.index.measure.measure_least_scores`."""
    recall: Annotated[FiniteFloat | None, Field(exclude_if=lambda value: value is None)] = None
    """Share of exact search's first ten that searches shall find; None for the default."""
    kept_by_bits: Annotated[FiniteFloat, Field(ge=0, le=1, exclude_if=lambda value: value == 1)] = (
        1.0
    )
    """Share of the ten nearest items that exact search over the stored embeddings finds, measured
    when their bits were chosen."""
    measured: Annotated[Measured | None, Field(exclude_if=lambda value: value is None)] = None

    @model_validator(mode="after")
    def _check_names(self) -> IndexManifest:
        """Check that segments are named by different generations, none later than the index's."""
        names = {int(entry.name) for entry in self.segments}
        if len(names) < len(self.segments) or max(names, default=0) > self.generation:
            raise ValueError("a segment is named twice, or after a later generation")
        return self

    @property
    def has_own_model(self) -> bool:
        """Whether the index contains its model."""
        return re.fullmatch(rf"{re.escape(OWN_MODEL)}(-\d+)?", self.model) is not None

    def locate_model(self, folder: Path) -> str:
        """Return the folder or name of the model of the index in this folder."""
        return str(folder / self.model) if self.has_own_model else self.model

    def replace(self, **changes: Any) -> IndexManifest:
        """Return a copy with some entries changed."""
        return self.model_copy(update=changes)


def new_identity() -> str:
    """Return the identity of a new index."""
    return secrets.token_hex(16)


def absolute_folder(folder: str | Path) -> Path:
    """Return the absolute path of an index's folder, so that ``os.chdir`` does not change it.

    ``~`` is the home folder.

    Raises
    ------
    UsageError
        No folder can have this name.
    """
    expanded = os.path.expanduser(folder)  # noqa: PTH111  a Path raises for an unknown user
    try:
        is_possible = b"\0" not in os.fsencode(expanded)
    except UnicodeEncodeError:  # half a character
        is_possible = False
    if not is_possible:
        raise UsageError(f"{str(expanded)!r} cannot be the name of a folder; choose another one")
    return Path(expanded).absolute()


def read_head(file: str | Path) -> bytes:
    """Return the first bytes of an ``index.json``: its checksum differs after every change.

    Every search calls this. A missing file has no bytes; for one that cannot be read, the error
    message is returned.
    """
    try:
        descriptor = os.open(file, _READ_FLAGS)
        try:
            return os.read(descriptor, MANIFEST_HEAD_BYTES)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return b""
    except OSError as error:
        return b"" if error.errno in IMPOSSIBLE_PATH_ERRORS else str(error).encode()


def is_same_index(folder: Path, manifest: IndexManifest) -> bool:
    """Return whether a folder holds the index of a manifest, in any state."""
    return manifest.identity.encode() in read_head(folder / CURRENT)


def require_same_index(folder: Path, manifest: IndexManifest) -> None:
    """Raise :class:`ArtifactError` unless a folder holds the index of a manifest.

    Raises
    ------
    ArtifactMissing
        The index has been removed.
    ArtifactMismatch
        Another index was created in its place.
    """
    if not is_same_index(folder, manifest) and read_manifest(folder).identity != manifest.identity:
        raise another_index(folder)


def another_index(folder: Path) -> ArtifactMismatch:
    """Return the error for a folder that holds another index than before."""
    return ArtifactMismatch(
        f"{folder} is another index than the one that was opened (it was created again); "
        "open it again"
    )


def refuse_links(folder: Path, *, with_pictures: bool = False) -> None:
    """Raise :class:`ArtifactMismatch` if the folder of an index contains a symbolic link or a pipe.

    A link could make files elsewhere be read, overwritten or removed, and reading a pipe does not
    end. Only links into the hub's cache are accepted, whose snapshots consist of them::

        models--owner--name/snapshots/REVISION/index.json -> ../../blobs/5f3a...

    There may be many pictures; they are checked only ``with_pictures``.
    """
    blobs = None
    if folder.parent.name == "snapshots":
        blobs = (folder.parent.parent / "blobs").resolve()
    unvisited = [folder] if folder.is_dir() else []
    while unvisited:
        visited = unvisited.pop()
        # A writer may remove the folder meanwhile.
        with contextlib.suppress(FileNotFoundError), os.scandir(visited) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if with_pictures or visited.name != PICTURES:
                        unvisited.append(Path(entry))
                elif (
                    not entry.is_file(follow_symlinks=False)
                    and Path(entry).resolve().parent != blobs
                ):
                    raise ArtifactMismatch(
                        f"{entry.path} is a symbolic link or a pipe, through which files "
                        "elsewhere would be changed; replace it by the file it stands for"
                    )


def read_manifest(folder: Path) -> IndexManifest:
    """Read the manifest of an index, and check it.

    Raises
    ------
    ArtifactMissing
        There is no index in this folder.
    ArtifactMismatch
        The index has the format of another version, or its manifest is damaged.
    """
    try:
        if (folder / "model.json").exists():
            raise ArtifactMissing(f"{folder} is a model, not an index; give the index's folder")
        if (folder / CLUSTER).exists():
            raise ArtifactMissing(
                f"{folder} is a cluster: `genius search`, `index add`, `index delete` and "
                f"`index info --check` take it, and each of its shards "
                f"({folder / 'shards' / '000000'}) is an index"
            )
        body = INDEX_FORM.read(folder)
        del body["checksum"], body["format"]
        return IndexManifest.model_validate_json(json.dumps(body))
    except ArtifactError:
        raise
    except OSError as error:
        if error.errno not in {errno.ENOENT, *IMPOSSIBLE_PATH_ERRORS}:
            raise
        raise ArtifactMissing(
            f"no index at {folder}; `genius index create {folder} --pool FOLDER` makes one"
        ) from None
    except (ValueError, RecursionError) as error:
        raise INDEX_FORM.damaged(folder, error) from None


def segment_name(generation: int) -> str:
    """Return the name of the segment that the change to a generation writes."""
    return f"{generation:06d}"


def has_lost_manifest(folder: Path) -> bool:
    """Return whether a folder holds an index without its manifest.

    An interrupted creation is not one: it has at most the first segment, and pending pictures.
    """
    if not folder.is_dir():
        return False
    names = {
        path.name for path in (folder / SEGMENTS).glob("*") if SEGMENT_NAME.fullmatch(path.name)
    }
    has_pictures = any((folder / PICTURES).glob("*/*")) and not (folder / PENDING_PICTURES).exists()
    has_parts = has_pictures or (folder / LEARNED).exists() or not names <= {segment_name(1)}
    # Checked last, since another process may write the manifest meanwhile.
    return has_parts and not (folder / CURRENT).exists()


def read_state(folder: Path, read: Callable[[IndexManifest], T]) -> T:
    """Read the current state; if a writer removes its files meanwhile, read the next one.

    Raises
    ------
    UsageError
        The index changes faster than it can be read.
    """
    manifest = read_manifest(folder)
    for _ in range(MAX_READ_ATTEMPTS):
        try:
            return read(manifest)
        except (ArtifactError, OSError, sqlite3.Error):
            current = read_manifest(folder)
            if current == manifest:  # no writer removed the files, so they are damaged
                raise
            manifest = current
    raise UsageError(
        f"{folder} changed {MAX_READ_ATTEMPTS} times while it was read; try again later, "
        "or read a copy"
    )
