"""One state of an index, open for reading."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
from jaxtyping import Bool, Float16, Float32, Float64, Int8, Int16, Int64, Shaped, UInt8

from genius_search.artifact import MANIFEST, file_fingerprint, fingerprint_of, open_artifact, write_json
from genius_search.config import SearchConfig, from_json, to_json
from genius_search.errors import ArtifactError, ArtifactMismatch, ArtifactMissing, UsageError
from genius_search.index.items import ITEMS_FILE, ItemStore
from genius_search.search.arrays import GrowingArray, open_array, save_array
from genius_search.search.table import IdTable

EmbeddingType: TypeAlias = Literal["float16", "int8"]
"""How stored embeddings are kept."""
BLOCK_BYTES: Final = 16 << 20
LARGEST: Final = 127


class Quantized(NamedTuple):
    """Vectors as integers: a vector is ``values`` times its ``scales``."""

    values: Int8[np.ndarray, "rows dim"]
    scales: Float16[np.ndarray, " rows"]


def quantize(embeddings: Float16[np.ndarray, "rows dim"]) -> Quantized:
    """Round vectors to integers, the largest component of each to ±127."""
    vectors = embeddings.astype(np.float32)
    largest = np.abs(vectors).max(axis=1, initial=0)
    scales = (largest / LARGEST).astype(np.float16)
    divisor = np.where(scales > 0, scales, 1).astype(np.float32)
    values = np.rint(vectors / divisor[:, None]).clip(-LARGEST, LARGEST)
    return Quantized(values.astype(np.int8), scales)


class EmbeddingWriter:
    """Writes embeddings, block by block.

    >>> with closing(EmbeddingWriter(file, scales, dim=768, kind="int8")) as out:  # doctest: +SKIP
    ...     out.append(embeddings)
    """

    def __init__(self, path: Path, scales: Path, *, dim: int, kind: EmbeddingType) -> None:
        self._rows = GrowingArray(path, np.dtype(kind), dim)
        self._scales = GrowingArray(scales, np.float16) if kind == "int8" else None

    def append(self, embeddings: Float16[np.ndarray, "rows dim"]) -> None:
        """Add embeddings as they are; they are rounded if they are to be integers."""
        rows_at_once = max(1, BLOCK_BYTES // (4 * max(1, embeddings.shape[1])))
        for start in range(0, len(embeddings), rows_at_once):
            block = embeddings[start : start + rows_at_once]
            self.append_stored(*((block, None) if self._scales is None else quantize(block)))

    def append_stored(
        self, values: Shaped[np.ndarray, "rows dim"], scales: Float16[np.ndarray, " rows"] | None
    ) -> None:
        """Add embeddings as another file keeps them."""
        self._rows.append(values)
        if self._scales is not None and scales is not None:
            self._scales.append(scales)

    def close(self) -> None:
        """Finish the files."""
        self._rows.close()
        if self._scales is not None:
            self._scales.close()


def read_blocks(path: Path) -> Iterator[Shaped[np.ndarray, "rows dim"]]:
    """The rows of an ``.npy`` file in order, a block at a time; nothing is mapped into memory."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        (rows, dim), _, dtype = np.lib.format.read_array_header_1_0(file)
        rows_at_once = max(1, BLOCK_BYTES // (dtype.itemsize * max(1, dim)))
        for start in range(0, rows, rows_at_once):
            count = min(rows_at_once, rows - start)
            yield np.fromfile(file, dtype, count * dim).reshape(count, dim)


KIND: Final = "segment"
REMEDY: Final = "put back a copy of it, or create the index again"
TYPICALITY: Final = "typicality.npy"
EMBEDDINGS: Final = "embeddings.npy"
SCALES: Final = "embedding_scales.npy"
DENSITIES: Final = "embedding_densities.npy"

StoredEmbeddings: TypeAlias = Literal["none", "fused", "raw"]
"""What is kept of each item beside its ID for re-ranking: nothing, the embedding that the ID was made from,
or the sum of the encoder's features (the paper's GENIUS^R)."""


class ItemArrays(NamedTuple):
    """What a model says of items, by row; may be memory-mapped."""

    codes: Int16[np.ndarray, "items columns"]
    """Codes of the IDs, then half norms and densities (:mod:`genius_search.nn.density`)."""
    typicality: Float16[np.ndarray, " items"]
    embeddings: Float16[np.ndarray, "items dim"] | None
    """Unit vectors, only when they are stored."""
    stored: StoredEmbeddings
    """What they are."""
    densities: UInt8[np.ndarray, " items"] | None = None
    """Density around each item (:meth:`~genius_search.nn.density.NormAndDensity.item_density`), with fused
    embeddings."""


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
    IdTable.build(arrays.codes, arrays.typicality).save(folder)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What ``genius tune`` chose, and what it measured."""

    search: SearchConfig
    wish: str
    """What was asked for, in words."""
    data: str
    """Which queries it was measured with."""
    queries: int
    items: int
    """In the index at that time."""
    recall: float
    """Share of queries with a right answer among the first five hits."""
    share: float
    """Of what ordering all items by the same evidence finds."""
    cpu_ms: float
    """CPU-milliseconds of a query, without the encoder."""


def tuned_to_json(tuned: Tuned) -> dict[str, Any]:
    """As ``index.json`` keeps it; of the settings only those that are not the usual ones."""
    usual = to_json(SearchConfig())
    chosen = {name: value for name, value in to_json(tuned.search).items() if value != usual[name]}
    return {**dataclasses.asdict(tuned), "search": chosen}


def tuned_from_json(told: object) -> Tuned:
    """What :func:`tuned_to_json` wrote.

    Raises
    ------
    UsageError, TypeError, ValueError
        it is something else.
    """
    if not isinstance(told, Mapping) or not isinstance(told.get("search"), Mapping):
        raise TypeError(f"{told!r} are no settings for a search")
    names = {field.name for field in dataclasses.fields(Tuned)}
    if set(told) != names:
        raise ValueError(f"settings of a search have {sorted(told)}, expected {sorted(names)}")
    texts, counts, numbers = ("wish", "data"), ("queries", "items"), ("recall", "share", "cpu_ms")
    kinds = {**dict.fromkeys(texts, str), **dict.fromkeys(counts, int), **dict.fromkeys(numbers, float)}
    odd = [name for name, kind in kinds.items() if type(told[name]) is not kind]
    if odd:
        raise ValueError(f"{odd[0]} of the settings is {told[odd[0]]!r}")
    return Tuned(**{**told, "search": from_json(SearchConfig, told["search"])})


DEPTH: Final = 10
"""A hit is seen beside the best others: so many of them, itself included."""


class Weights(NamedTuple):
    """What a unit of each number adds to the log-odds."""

    score: float
    ahead: float
    """Of the lead over the next hit; for the first hit only."""
    behind: float
    """Of the distance to the first hit, which is negative; for all others."""
    contrast: float
    """Of the distance to the mean of the other hits."""


class Bin(NamedTuple):
    """Hits whose probabilities are about the same."""

    predicted: float
    """Their mean probability."""
    observed: float
    """The share of them that are right."""
    queries: float
    """How many there are; weighted, so no whole number."""


class Outcome(NamedTuple):
    """What was measured on the first hits of queries that were not fitted on."""

    queries: int
    error: float
    """Expected calibration error: how far probability and share of right ones lie apart, on average."""
    brier: float
    """Mean squared distance of the probabilities from what is so."""
    base_brier: float
    """The same of always saying the share that is right."""
    coverage: float
    """Share of the queries that are said to have a good match."""
    precision: float
    """Share of those whose first hit is right."""
    refused: float
    """Share of the queries without their right answers that are said to have no good match."""
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What turns the scores of hits into probabilities, and what it was fitted and measured on."""

    search: SearchConfig
    """How the hits were found and ordered."""
    intercept: float
    weights: Weights
    alone: tuple[float, float]
    """What stands for lead and contrast where nothing else is found: the largest that were seen."""
    lowest: float
    highest: float
    """The smallest and largest log-odds that were seen; no hit gets less or more."""
    threshold: float | None
    """From this probability of the first hit on there is a good match; None: no threshold was good enough."""
    wanted_precision: float
    """The share of right first hits that was asked of the threshold."""
    absent: float
    """Share of queries without any answer in the index that it assumes."""
    data: str
    queries: int
    """That it was fitted on; others were measured on."""
    items: int
    """In the index at that time."""
    held_out: Outcome

    def applies_to(self, config: SearchConfig) -> bool:
        """Whether hits that are ordered so have scores of the same kind."""
        return _ranking(config) == _ranking(self.search)

    def probabilities(self, scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, " hits"]:
        """Of the hits of one query, best first; at least :data:`DEPTH` of them if so many were found."""
        return np.asarray(1 / (1 + np.exp(-self.log_odds(numbers(scores, self.alone)))))

    def log_odds(self, found: Float64[np.ndarray, "hits 4"]) -> Float64[np.ndarray, " hits"]:
        """Of hits by their numbers."""
        said = self.intercept + found @ np.array(self.weights)
        return np.asarray(np.clip(said, self.lowest, self.highest))

    def is_good(self, probability: float) -> bool:
        """Whether a first hit of this probability is a good match."""
        return self.threshold is not None and probability >= self.threshold


def numbers(
    scores: Float32[np.ndarray, " hits"], alone: tuple[float, float]
) -> Float64[np.ndarray, "hits 4"]:
    """Of each hit: score, lead, distance behind the first, and contrast (:class:`Weights`).

    Parameters
    ----------
    alone
        lead and contrast of a hit beside which there is none.
    """
    own = scores.astype(np.float64)
    found = np.zeros((len(own), len(Weights._fields)))
    found[:, 0] = own
    if len(own) < 2:
        found[:, 1], found[:, 3] = alone
        return found
    found[0, 1] = own[0] - own[1]
    found[1:, 2] = own[1:] - own[0]
    best = own[:DEPTH]
    others = np.full(len(own), best[: DEPTH - 1].mean())
    others[: len(best)] = (best.sum() - best) / (len(best) - 1)
    found[:, 3] = own - others
    return found


def _ranking(config: SearchConfig) -> tuple[object, ...]:
    """What the scores of hits depend on."""
    is_generated = config.rerank == "none"
    return (
        config.rerank,
        0.0 if is_generated else config.generator_weight,
        0.0 if is_generated else config.density_weight,
        config.scores if is_generated or config.generator_weight else None,
    )


def calibration_to_json(calibration: Calibration) -> dict[str, Any]:
    """As ``index.json`` keeps it; of the settings only those that are not the usual ones."""
    usual = to_json(SearchConfig())
    chosen = {name: value for name, value in to_json(calibration.search).items() if value != usual[name]}
    held_out = {
        **calibration.held_out._asdict(),
        "bins": [one._asdict() for one in calibration.held_out.bins],
    }
    plain = {field.name: getattr(calibration, field.name) for field in dataclasses.fields(calibration)}
    return {
        **plain,
        "search": chosen,
        "weights": calibration.weights._asdict(),
        "alone": list(calibration.alone),
        "held_out": held_out,
    }


def calibration_from_json(told: object) -> Calibration:
    """What :func:`calibration_to_json` wrote.

    Raises
    ------
    UsageError, TypeError, ValueError, KeyError
        it is something else.
    """
    names = {field.name for field in dataclasses.fields(Calibration)}
    if not isinstance(told, Mapping) or set(told) != names:
        raise ValueError("a calibration is told that has other parts than ours")
    held_out = dict(told["held_out"])
    bins = tuple(Bin(**{name: float(value) for name, value in one.items()}) for one in held_out.pop("bins"))
    rest = {name: float(value) for name, value in held_out.items() if name != "queries"}
    ahead, contrast = map(float, told["alone"])
    read = Calibration(
        search=from_json(SearchConfig, told["search"]),
        intercept=float(told["intercept"]),
        weights=Weights(**{name: float(value) for name, value in told["weights"].items()}),
        alone=(ahead, contrast),
        lowest=float(told["lowest"]),
        highest=float(told["highest"]),
        threshold=None if told["threshold"] is None else float(told["threshold"]),
        wanted_precision=float(told["wanted_precision"]),
        absent=float(told["absent"]),
        data=str(told["data"]),
        queries=int(told["queries"]),
        items=int(told["items"]),
        held_out=Outcome(queries=int(held_out["queries"]), **rest, bins=bins),
    )
    said = (read.intercept, read.lowest, read.highest, *read.weights, *read.alone)
    if not np.isfinite(said).all():
        raise ValueError("a calibration holds a number that is not finite")
    return read


CURRENT: Final = "index.json"
SEGMENTS: Final = "segments"
DELETED: Final = "deleted"
FORMAT: Final = 4
"""Since 4 half norm and density stand behind an ID's codes."""
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
