"""One state of an index, open for reading."""

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
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, model_validator

from genius_search.artifact import FileFact, check_files, fingerprint_of, first_problem, read_json
from genius_search.config import SearchSettings
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.items import ITEMS_FILE, ItemStore
from genius_search.search.table import Allowed, IdTable, expand_ranges
from genius_search.search.vectors import (
    EmbeddingBits,
    Expected,
    Quantized,
    StoredVectors,
    is_residual,
    open_array,
    value_type,
)

if TYPE_CHECKING:
    from genius_search.search.rank import CodeRanker


REMEDY: Final = "put back a copy of it, or create the index again"
IDS: Final = "ids.npy"
CODE_COSINE: Final = "typicality.npy"
EMBEDDINGS: Final = "embeddings.npy"
SCALES: Final = "embedding_scales.npy"
DENSITIES: Final = "embedding_densities.npy"
PASSAGES: Final = "passages.npy"
"""Only in segments that have some: the row of an item, and where in its text a passage starts and ends."""

StoredEmbeddings: TypeAlias = Literal["none", "fused", "raw"]
"""Embedding stored with each item for re-ranking: none, the fused embedding that its ID was computed from, or
the sum of the encoder's features (the paper's GENIUS^R)."""


class Segment(NamedTuple):
    """A segment that is open for reading; its arrays are memory-mapped."""

    name: str
    folder: Path
    table: IdTable
    items: ItemStore
    code_cosine: Float16[np.ndarray, " items"]
    embeddings: Quantized | None
    bits: EmbeddingBits
    """Bits of a number of an embedding."""
    densities: UInt8[np.ndarray, " items"] | None
    """Densities of items; None without fused embeddings."""
    dead: Int64[np.ndarray, " rows"]
    """Rows of deleted items, ascending."""
    unchecked: dict[Path, FileFact]
    """Files that were not compared with their checksums yet."""
    passages: Int64[np.ndarray, "passages 3"]
    """Row of the item, start and end of each passage of long texts, by row and place in the text. Their own
    rows are those behind all items."""

    @property
    def num_items(self) -> int:
        """Number of items, deleted ones included."""
        return self.table.num_items - len(self.passages)

    @property
    def num_alive(self) -> int:
        """Number of items that are not deleted."""
        return self.num_items - len(self.dead)

    def alive(self) -> Bool[np.ndarray, " items"] | None:
        """Return a mask of the items that are not deleted, or None if none is deleted."""
        if not len(self.dead):
            return None
        mask = np.ones(self.num_items, dtype=bool)
        mask[self.dead] = False
        return mask

    def alive_rows(self) -> Int64[np.ndarray, " rows"]:
        """Return the rows of the items that are not deleted, ascending."""
        alive = self.alive()
        return np.arange(self.num_items) if alive is None else np.flatnonzero(alive)

    def allow(self, items: Bool[np.ndarray, " items"]) -> Allowed:
        """Return what a search may return of a mask of items: these, and their passages."""
        return Allowed.of(self.table, np.concatenate([items, items[self.passages[:, 0]]]))

    def with_passages(self, rows: Int64[np.ndarray, " items"]) -> Int64[np.ndarray, " rows"]:
        """Return rows of items, each followed by the rows of its passages."""
        if not len(self.passages):
            return rows
        owners = self.passages[:, 0]
        item, passage = expand_ranges(owners.searchsorted(rows), owners.searchsorted(rows, "right"))
        order = np.argsort(np.concatenate([np.arange(len(rows)), item]), kind="stable")
        return np.concatenate([rows, self.num_items + passage])[order]

    def vectors(self, ranker: CodeRanker) -> StoredVectors:
        """Return the stored embeddings of items; ``ranker`` has the code vectors of the index's model.

        Raises
        ------
        UsageError
            The index stores none.
        """
        if self.embeddings is None:
            raise UsageError(
                "this index keeps no embeddings to rank by; create it with `embeddings='fused'`"
            )
        return StoredVectors(self.embeddings, self.bits, ranker, self.table)


def expected_arrays(
    rows: int, manifest: IndexManifest, num_ids: int, columns: int
) -> dict[str, Expected]:
    """Return what the other arrays of a segment must be that has so many rows, different IDs, and columns."""
    expected = {
        "starts.npy": Expected("i4", (max(0, num_ids - 1),), 1, num_ids - 1),
        "level_bounds.npy": Expected("i8", (columns + 1,), 0, max(0, num_ids - 1), step=0),
        "bucket_starts.npy": Expected("i4", (num_ids + 1,), 0, rows, step=1),
        "items.npy": Expected("i4", (rows,), 0, rows - 1),
        CODE_COSINE: Expected("f2", (rows,)),  # NaN where it is unknown
    }
    if manifest.embeddings != "none":
        expected[EMBEDDINGS] = Expected(value_type(manifest.embedding_bits).name, (rows, None))
        if is_residual(manifest.embedding_bits):
            expected[SCALES] = Expected("f2", (rows,), 0)
    if manifest.embeddings == "fused":
        expected[DENSITIES] = Expected("u1", (rows,))
    return expected


def load_segment(folder: Path, entry: SegmentEntry, manifest: IndexManifest) -> Segment:
    """Open a segment of the index in a folder: its files must fit each other and the manifest.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        One of them is missing, cannot be read, or does not fit.
    """
    place = folder / SEGMENTS / entry.name
    with with_advice():
        check_files(place, entry.files, check_contents=False)
        ids = open_array(place / IDS, Expected("u1 i2", (None, None), 0))
        passages = np.zeros((0, 3), dtype=np.int64)
        if PASSAGES in entry.files:
            passages = open_array(
                place / PASSAGES, Expected("i8", (None, 3), 0, np.iinfo(np.int64).max)
            )
            owners = passages[:, 0]
            if owners.max(initial=0) >= entry.items or (owners[1:] < owners[:-1]).any():
                raise ArtifactMismatch(f"{place / PASSAGES} belongs to other items")
        expected = expected_arrays(entry.items + len(passages), manifest, *ids.shape)
        if entry.files.keys() - {PASSAGES} != {IDS, *expected, ITEMS_FILE}:
            raise ArtifactMismatch(
                f"{CURRENT} names {sorted(entry.files)} in {place}, expected "
                f"{sorted([IDS, *expected, ITEMS_FILE])}"
            )
        arrays = {name: open_array(place / name, one) for name, one in expected.items()}
        starts, bounds, bucket_starts, items, code_cosine, *_ = arrays.values()
        table = IdTable(ids, starts, np.array(bounds), bucket_starts, items)
        if not table.is_consistent():
            raise ArtifactMismatch(f"the arrays of the IDs in {place} do not belong together")
        try:
            store = ItemStore(place)
            num_rows = store.num_rows
        except sqlite3.DatabaseError as error:
            raise ArtifactMismatch(f"{place / ITEMS_FILE} is damaged ({error})") from None
        if num_rows != entry.items:
            raise ArtifactMismatch(
                f"{place / ITEMS_FILE} has {num_rows:,} items, expected {entry.items:,}"
            )
    stored = None if EMBEDDINGS not in arrays else Quantized(arrays[EMBEDDINGS], arrays.get(SCALES))
    return Segment(
        entry.name,
        place,
        table,
        store,
        code_cosine,
        stored,
        manifest.embedding_bits,
        arrays.get(DENSITIES),
        entry.dead_rows(),
        {place / name: fact for name, fact in entry.files.items()},
        passages,
    )


@contextlib.contextmanager
def with_advice() -> Iterator[None]:
    """Append advice about the index to errors about single files."""
    try:
        yield
    except ArtifactError as error:
        raise type(error)(f"{error}; {REMEDY}") from None


CURRENT: Final = "index.json"
CLUSTER: Final = "cluster.json"
"""Manifest of a cluster, whose shards are indexes."""
OWN_MODEL: Final = "./model"
"""The model of an index that was created with an encoder alone, inside the index; a refit adds a number."""
LEARNED: Final = "learned"
"""The log of choices, an index of its own inside the index."""
SEGMENTS: Final = "segments"
WORK: Final = ".work"
"""Folder inside the index for the saved work of an interrupted run."""
LOCK: Final = ".lock"
TEMPORARY: Final = "tmp"
"""Folder inside the index where a segment is written before it gets its name."""
INDEX_FORMAT: Final = 11
"""The only format that is read."""
MANIFEST_HEAD_BYTES: Final = 256
"""Length of the beginning of ``index.json`` that holds its checksum, identity and generation."""
_READ: Final = os.O_RDONLY | getattr(
    os, "O_NONBLOCK", 0
)  # which does not wait for a pipe to be filled
SEGMENT_NAME: Final = re.compile(r"[0-9]{6,}")
"""Names of segments."""
MIN_DELETED_SHARE: Final = 0.2
"""Share of a segment's items that are deleted before compaction writes it anew. Since what lies behind it is
smaller, at most ten items are written for each deleted one."""

IMPOSSIBLE_PATH_ERRORS: Final = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""Error numbers of impossible paths: below a file, too long, or a loop of links."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A logistic regression from scores to probabilities, with its measurements on other queries."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    intercept: float
    weights: tuple[float, float, float]
    """Of :func:`genius_search.index.score.hit_features` in the log-odds. None is negative, so that no hit is
    less likely than one below it."""
    threshold: float | None
    """Probability from which the first hit is a good match; None if no threshold reaches the precision."""
    search: SearchSettings
    """Search settings of the scores."""
    queries: int
    """Queries that were measured; each counts with its right answers, and without them (:data:`ABSENT`)."""
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
    """The number of words that nearly all measured queries have at least, by the kind of query: a
    modality, or ``vector``. Queries of another kind, or with fewer words, have no probabilities."""

    def applies_to(self, config: SearchSettings) -> bool:
        """Return whether searches with these settings have such scores."""
        return score_settings(config) == score_settings(self.search)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What an index keeps of exact search, measured when it was written."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    items: int
    """Items and passages at that time."""
    queries: int
    """Number of queries, near items of the index."""
    shortlist: int
    """Items that are compared by their embeddings, 0 for all."""
    kept: float
    """Share of the ten nearest of the stored embeddings that a search finds without the correction for
    hubs."""
    kept_with_densities: float
    """The same by default, with that correction, which prefers other items on purpose."""


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
    """Where it is: an absolute path."""
    name: str
    """What its items' ids begin with, before a slash and the path below the folder; empty for the first
    folder, whose ids are the paths alone."""
    captions: bool = True
    """Whether texts beside pictures are read."""
    exclude: tuple[str, ...] = ()
    """Patterns of what is left out."""


MAX_ROOTS: Final = 1_000
Roots: TypeAlias = Annotated[tuple[Root, ...], Field(max_length=MAX_ROOTS)]


class SegmentEntry(BaseModel):
    """A segment in ``index.json``. Names are generated, so that none leads out of the folder."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    name: str = Field(pattern=r"^[0-9]{6,}$")
    items: int
    """Deleted ones included."""
    files: dict[Annotated[str, Field(pattern=r"^[a-z_]+\.(npy|sqlite)$")], FileFact]
    deleted: bytes = b""
    """A bit for each item, which is set if it is deleted; empty if none is."""

    def dead_rows(self) -> Int64[np.ndarray, " rows"]:
        """Return the rows of the deleted items, ascending."""
        bits = np.frombuffer(self.deleted, dtype=np.uint8)
        return np.flatnonzero(np.unpackbits(bits)[: self.items])

    def without(self, rows: Int64[np.ndarray, " rows"]) -> SegmentEntry:
        """Return the segment with these rows as its deleted items."""
        is_dead = np.zeros(self.items, dtype=bool)
        is_dead[rows] = True
        return self.model_copy(update={"deleted": np.packbits(is_dead).tobytes()})


class IndexManifest(BaseModel):
    """The contents of ``index.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    identity: str = Field(pattern=r"^[0-9a-f]{32}$")
    """Random name of the index, which every change and every copy keeps (:func:`new_identity`)."""
    generation: int = 0
    """Number of changes so far; an index that exists has at least 1."""
    model: str
    """Folder or name of the model when the index was created; :data:`OWN_MODEL` if the index contains it."""
    model_fingerprint: str
    embeddings: StoredEmbeddings
    embedding_bits: EmbeddingBits = 16
    segments: tuple[SegmentEntry, ...] = ()
    roots: Roots = ()
    """Never fewer than before: items name theirs by its number."""
    calibration: Annotated[Calibration | None, Field(exclude_if=lambda value: value is None)] = None
    density_weight: FiniteFloat | None = None
    """What queries with answers chose; None if that is the default."""
    least: Annotated[dict[str, float], Field(exclude_if=lambda value: not value)] = {}
    """:func:`genius_search.index.measure.measure_least_scores`"""
    measured: Annotated[Measured | None, Field(exclude_if=lambda value: value is None)] = None

    @model_validator(mode="after")
    def _check_names(self) -> IndexManifest:
        names = {int(entry.name) for entry in self.segments}
        if len(names) < len(self.segments) or max(names, default=0) > self.generation:
            raise ValueError("a segment is named twice, or for a generation to come")
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
    """Return the folder of an index such that ``os.chdir`` does not change it; ``~`` is the home folder."""
    return Path(os.path.expanduser(folder)).absolute()  # noqa: PTH111  a Path raises for an unknown user


def read_head(file: str | Path) -> bytes:
    """Return the first bytes of an ``index.json``, which differ after every change: its checksum is in them.

    Return nothing if the file is missing, and the reason if it cannot be read. A search calls this each time.
    """
    try:
        descriptor = os.open(file, _READ)
        try:
            return os.read(descriptor, MANIFEST_HEAD_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        return (
            b"" if error.errno in {errno.ENOENT, *IMPOSSIBLE_PATH_ERRORS} else str(error).encode()
        )


def is_same_index(folder: Path, manifest: IndexManifest) -> bool:
    """Return whether the index in a folder is the one of a manifest, in this or another state."""
    return manifest.identity.encode() in read_head(folder / CURRENT)


def require_same_index(folder: Path, manifest: IndexManifest) -> None:
    """Raise :class:`ArtifactError` unless the index in a folder is the one of a manifest.

    Raises
    ------
    ArtifactMissing
        It has been removed.
    ArtifactMismatch
        Another one was created in its place.
    """
    if not is_same_index(folder, manifest) and read_manifest(folder).identity != manifest.identity:
        raise another_index(folder)


def another_index(folder: Path) -> ArtifactMismatch:
    """Return the error that a folder holds another index than before."""
    return ArtifactMismatch(
        f"{folder} is another index than the one that was opened (it was created again); open it again"
    )


def refuse_links(folder: Path, *, with_pictures: bool = False) -> None:
    """Raise :class:`ArtifactMismatch` if there is a symbolic link, or a pipe, in the folder of an index.

    What is read, written or removed through a link would be files elsewhere; reading a pipe does not end. The
    hub's cache consists of links to files beside the folder. There may be many pictures; they are looked at
    only ``with_pictures``.
    """
    cached = (
        (folder.parent.parent / "blobs").resolve() if folder.parent.name == "snapshots" else None
    )
    places = [folder] if folder.is_dir() else []
    while places:
        place = places.pop()
        with (
            contextlib.suppress(FileNotFoundError),
            os.scandir(place) as entries,
        ):  # a writer may remove it
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if with_pictures or place.name != PICTURES:
                        places.append(Path(entry))
                elif (
                    not entry.is_file(follow_symlinks=False)
                    and Path(entry).resolve().parent != cached
                ):
                    raise ArtifactMismatch(
                        f"{entry.path} is a symbolic link or a pipe, through which files elsewhere would be "
                        "changed; put what it stands for in its place"
                    )


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
    try:
        if (folder / "model.json").exists():
            raise ArtifactMissing(f"{folder} is a model, not an index; give the index's folder")
        if (folder / CLUSTER).exists():
            raise ArtifactMissing(
                f"{folder} is a cluster: `genius search`, `index add`, `index delete` and `index info "
                f"--check` take it, and each of its shards ({folder / 'shards' / '000000'}) is an index"
            )
        with with_advice():
            body = read_json(path)
        checksum = body.pop("checksum", None)
        is_whole, version = fingerprint_of(body) == checksum, body.pop("format")
        if version != INDEX_FORMAT and (is_whole or checksum is None):
            raise ArtifactMismatch(
                f"{folder} has format {version}, this version reads {INDEX_FORMAT}: create the index again"
            )
        if not is_whole:
            raise ValueError("its contents do not match its checksum")  # noqa: TRY301  as any other damage
        return IndexManifest.model_validate_json(json.dumps(body))
    except ArtifactError:
        raise
    except OSError as error:
        if error.errno not in {errno.ENOENT, *IMPOSSIBLE_PATH_ERRORS}:
            raise
        raise ArtifactMissing(
            f"no index at {folder}; `genius index create {folder} --pool FOLDER` makes one"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else error
        raise ArtifactMismatch(f"{path} is damaged ({problem}); {REMEDY}") from None


PICTURES: Final = "pictures"
"""Folder inside the index for pictures that came without a file, named by their SHA-256."""
PICTURE_NAME: Final = re.compile(rf"{PICTURES}/[0-9a-f]{{2}}/[0-9a-f]{{64}}")
"""Paths of such pictures in items; another path may lead out of the index."""
PENDING_PICTURES: Final = f"{PICTURES}/.unsettled"
"""Exists during a change after which pictures may be stored that no item names."""


def segment_name(generation: int) -> str:
    """Return the name of the segment that a change writes."""
    return f"{generation:06d}"


def has_lost_manifest(folder: Path) -> bool:
    """Return whether this is an index without its manifest, rather than an interrupted creation of one."""
    if not folder.is_dir():
        return False
    names = {
        path.name for path in (folder / SEGMENTS).glob("*") if SEGMENT_NAME.fullmatch(path.name)
    }
    has_pictures = any((folder / PICTURES).glob("*/*")) and not (folder / PENDING_PICTURES).exists()
    has_parts = has_pictures or (folder / LEARNED).exists() or not names <= {segment_name(1)}
    return has_parts and not (folder / CURRENT).exists()  # last, since it may be written meanwhile


MAX_READ_ATTEMPTS: Final = 10
"""Maximum number of attempts to read a whole state while writers replace it."""
T = TypeVar("T")


def read_state(folder: Path, read: Callable[[IndexManifest], T]) -> T:
    """Read the state of a manifest, and again if a writer removed its files meanwhile.

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
            now = read_manifest(folder)
            if now == manifest:  # no writer removed it meanwhile, so something is wrong
                raise
            manifest = now
    raise UsageError(
        f"{folder} changed {MAX_READ_ATTEMPTS} times while it was read; try again when it is quieter, or read a "
        "copy"
    )
