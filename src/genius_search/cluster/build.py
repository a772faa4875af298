"""Building an index in shards: functions over folders, each of which a killed build need not repeat.

Each partition of the pool becomes an index (:func:`encode_partition`), its rows in the order of their IDs. A
sample of the IDs says where shards begin, and each shard (:func:`write_shard`) takes one range of rows from
every part. A folder is committed by renaming it, so that two attempts at the same one do no harm, and the
manifest is written last. A :data:`Runner` says where the functions run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import fsspec
import numpy as np
from filelock import FileLock, Timeout
from jaxtyping import Int64, UInt64
from pydantic import BaseModel, ConfigDict

from genius_search.artifact import fingerprint_of, read_json
from genius_search.cluster.cuts import choose_cuts, sample_ids
from genius_search.cluster.folder import (
    LEFT_OUT,
    MODEL,
    PARTS,
    SHARDS,
    ClusterManifest,
    ShardEntry,
    attempt,
    numbered,
    read_cluster,
    write_cluster,
    write_range,
)
from genius_search.cluster.pool import LEFT_OUT_OF_FOLDER, Partition, open_partition, split_pool
from genius_search.data.features import LeftOut
from genius_search.data.mbeir import write_json_lines
from genius_search.encoders.base import load_encoder
from genius_search.errors import UsageError
from genius_search.index.adding import Added, Pool, encode_items, feature_rows, stamp_of
from genius_search.index.create import fit_model, usual_bits
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import (
    CLUSTER,
    CURRENT,
    IndexManifest,
    ItemArrays,
    Segment,
    StoredEmbeddings,
    check_bits,
)
from genius_search.index.writer import one_writer
from genius_search.model import Genius
from genius_search.progress import Progress, Silent
from genius_search.search.vectors import EmbeddingBits
from genius_search.training.codebooks import MAX_SAMPLE
from genius_search.training.features import embed
from genius_search.training.fit import absolute_spec
from genius_search.writing import make_folder, write_atomically, write_json

BUILD: Final = ".build"
PLAN: Final = "plan.json"
CUTS: Final = "cuts.json"
DUPLICATES: Final = "duplicates.npy"
HASHES: Final = "id-hashes.npy"
"""In the folder of a part: a hash of each item's id, by row."""
ROWS: Final = 100_000
"""Rows of a partition, unless another number is given."""
ROWS_OF_TAR: Final = 10_000
"""Guess of the samples in a tar file, which would have to be read to count them."""
SAMPLED_PARTITIONS: Final = 256
"""Most partitions that codebooks are fitted to items of."""
HASHES_AT_ONCE: Final = 50_000_000
"""Hashes of ids that are compared together, to find ids that occur twice."""

Work: TypeAlias = Callable[[Path, int], None]
Runner: TypeAlias = Callable[[Work, Path, Sequence[int]], Iterator[int]]
"""Runs a function for a cluster's folder and each of some numbers; yields the numbers as they are done."""


class Settings(NamedTuple):
    """How a cluster is built."""

    pool: str
    model: str | None = None
    encoder: str | None = None
    """Instead of a model: codebooks are fitted to a sample of the pool."""
    shards: int = 1
    rows: int = ROWS
    embeddings: StoredEmbeddings | None = None
    embedding_bits: EmbeddingBits | None = None
    captions: bool = True
    device: str = "cpu"
    download: bool = False


class Plan(BaseModel):
    """What a build is to do; written first."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    settings: Settings
    files: dict[str, int]
    """Size of each file of the pool."""
    partitions: tuple[Partition, ...]


def build_cluster(
    folder: Path, settings: Settings, *, run: Runner | None = None, progress: Progress | None = None
) -> ClusterManifest:
    """Build an index in shards, or go on with an interrupted build of the same pool.

    Raises
    ------
    UsageError
        The folder holds a finished cluster, a build of something else, or other things.
    BadData
        The pool has no items.
    """
    check_bits(settings.embedding_bits, settings.embeddings)
    run, progress = run or run_here, progress or Silent()
    if (settings.model is None) is (settings.encoder is None):
        raise UsageError("give either a model, or the encoder of a cluster that needs no training")
    if min(settings.shards, settings.rows) < 1:
        raise UsageError("the numbers of shards, and of rows in a partition, are at least 1")
    _check_place(folder)
    make_folder(folder / BUILD)
    lock = FileLock(folder / BUILD / "lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        raise UsageError(f"another process is building {folder}; wait for it") from None
    with lock:
        if not (folder / CLUSTER).exists():
            _build(folder, settings, run, progress)
        shutil.rmtree(folder / PARTS, ignore_errors=True)
    shutil.rmtree(folder / BUILD, ignore_errors=True)
    return read_cluster(folder)


def _check_place(folder: Path) -> None:
    if (folder / BUILD).exists():
        return
    if (folder / CLUSTER).exists():
        raise UsageError(f"{folder} holds a finished cluster already; choose another folder, or remove it")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds other things; a cluster needs a folder of its own")


def _build(folder: Path, settings: Settings, run: Runner, progress: Progress) -> None:
    plan = _plan(folder, settings, progress)
    if not (folder / BUILD / CURRENT).exists():
        _prepare_model(folder, settings, plan, progress)
    _run_missing(folder, PARTS, len(plan.partitions), encode_partition, "encode partitions", run, progress)
    if not (folder / BUILD / CUTS).exists():
        progress.say("looking for ids that occur twice, and for where shards begin")
        with write_atomically(folder / BUILD / DUPLICATES) as temporary, temporary.open("wb") as file:
            np.save(file, find_duplicates(folder, len(plan.partitions)))
        write_json(folder / BUILD / CUTS, _sample_cuts(folder, plan))
    cuts = read_json(folder / BUILD / CUTS)
    _run_missing(folder, SHARDS, len(cuts) + 1, write_shard, "write shards", run, progress)
    left_out = write_json_lines(folder / LEFT_OUT, _left_out(folder, len(plan.partitions)))
    index = _read_index(folder)
    entries = []
    for number, first in enumerate([(), *cuts]):
        entries.append(ShardEntry.of(folder / SHARDS / numbered(number), first))
    write_cluster(
        folder,
        ClusterManifest(
            model=MODEL if settings.encoder is not None else index.model,
            model_fingerprint=index.model_fingerprint,
            pool=settings.pool,
            partitions=len(plan.partitions),
            left_out=left_out,
            shards=tuple(entries),
        ),
    )


def _run_missing(
    folder: Path, kind: str, count: int, work: Work, stage: str, run: Runner, progress: Progress
) -> None:
    """Run a function for each of the numbered folders that is not there yet."""
    make_folder(folder / kind)
    missing = [number for number in range(count) if not (folder / kind / numbered(number)).exists()]
    if len(missing) < count:
        progress.say(f"{stage}: {count - len(missing)} of {count} are there already")
    progress.begin(stage, len(missing))
    for done, _ in enumerate(run(work, folder, missing), start=1):
        progress.advance(done, {})
    for killed in (folder / kind).glob(".*"):  # of processes that were killed
        shutil.rmtree(killed)


def run_here(work: Work, folder: Path, numbers: Sequence[int]) -> Iterator[int]:
    """Run a function in this process."""
    for number in numbers:
        work(folder, number)
        yield number


def _plan(folder: Path, settings: Settings, progress: Progress) -> Plan:
    """Return the plan of a build: a new one, or that of the interrupted build.

    Raises
    ------
    UsageError
        The interrupted build was of something else, or a file has changed since.
    """
    if (folder / BUILD / PLAN).exists():
        plan = _read_plan(folder)
        for name, old, new in zip(Settings._fields, plan.settings, settings, strict=True):
            if old != new and name != "download":
                raise UsageError(
                    f"{folder} holds an interrupted build with {name} {old!r}, not {new!r}; give the "
                    "same again, or choose another folder"
                )
        if plan.files != _sizes(plan.partitions):
            raise UsageError(
                f"files of {settings.pool} have changed since the build began; choose another folder"
            )
        return plan
    progress.say(f"splitting {settings.pool} into partitions of {settings.rows:,} rows")
    partitions = split_pool(settings.pool, settings.rows, folder / BUILD, captions=settings.captions)
    plan = Plan(settings=settings, files=_sizes(partitions), partitions=tuple(partitions))
    write_json(folder / BUILD / PLAN, plan.model_dump(mode="json"))
    return plan


def _sizes(partitions: Iterable[Partition]) -> dict[str, int]:
    sizes = {}
    for file in {partition.file for partition in partitions}:
        files, path = fsspec.core.url_to_fs(file)
        with contextlib.suppress(FileNotFoundError):
            sizes[file] = int(files.size(path))
    return sizes


def _prepare_model(folder: Path, settings: Settings, plan: Plan, progress: Progress) -> None:
    """Open or fit the model, and write the manifest that all parts begin with."""
    expected = sum(ROWS_OF_TAR if one.rows is None else one.rows for one in plan.partitions)
    embeddings, bits = settings.embeddings, settings.embedding_bits
    if settings.encoder is None:
        model = Genius.open(settings.model or "", device=settings.device, download=settings.download)
    else:
        encoder = load_encoder(
            absolute_spec(settings.encoder), download=settings.download, device=settings.device
        )
        sample = list(_sample_items(folder, plan, expected))
        features = embed(
            feature_rows(sample, folder / BUILD / "sample"),
            encoder,
            folder / BUILD / "features",
            inputs={"items": fingerprint_of([stamp_of(item) for item in sample])},
            expected=len(sample),
            progress=progress,
            skip_bad_images=True,
        )
        model = fit_model(
            folder / MODEL, encoder, features, items=max(expected, len(features)), progress=progress
        )
        bits = bits or (8 if embeddings == "raw" else usual_bits(expected))
        embeddings = embeddings or "fused"
    index = IndexManifest(
        model=str(model.folder.resolve()),
        model_fingerprint=model.fingerprint,
        embeddings=embeddings or "none",
        embedding_bits=bits or 16,
    )
    write_json(folder / BUILD / CURRENT, index.model_dump(mode="json"))


def _sample_items(folder: Path, plan: Plan, expected: int) -> Iterator[Item]:
    """Yield items from all over the pool, about as many as codebooks are fitted to."""
    make_folder(folder / BUILD / "sample")
    every = -(-len(plan.partitions) // SAMPLED_PARTITIONS)
    chosen = plan.partitions[::every]
    step = max(1, expected // every // MAX_SAMPLE)
    for partition in chosen:
        yield from itertools.islice(open_partition(partition, folder).items(), 0, None, step)


def _read_plan(folder: Path) -> Plan:
    return Plan.model_validate_json(json.dumps(read_json(folder / BUILD / PLAN)))


def _read_index(folder: Path) -> IndexManifest:
    return IndexManifest.model_validate_json(json.dumps(read_json(folder / BUILD / CURRENT)))


@cache
def _open_model(folder: str, device: str) -> Genius:
    """Open a model once in each process."""
    return Genius.open(folder, device=device)


def encode_partition(folder: Path, number: int) -> None:
    """Encode a partition, and write it as an index whose rows are in the order of their IDs."""
    plan, manifest = _read_plan(folder), _read_index(folder)
    model = _open_model(manifest.model, plan.settings.device)
    pool = open_partition(plan.partitions[number], folder)
    with attempt(folder / PARTS / numbered(number)) as draft, one_writer(draft) as writer:
        result = Added()
        items: list[Item] = []
        arrays: list[ItemArrays] = []
        distinct = dataclasses.replace(pool, items=lambda: _distinct(pool, plan.partitions[number].file))
        for chunk, encoded in encode_items(writer, model, distinct, result, manifest=manifest, save=False):
            items += chunk
            arrays.append(encoded)
        if items:
            joined = ItemArrays.join(arrays)
            order = np.lexsort((-joined.code_cosine, *joined.codes.T[::-1]))
            items = [items[row] for row in order.tolist()]
            writer.create(manifest, items, joined.take(order))
        else:
            writer.create_batches(manifest, [])
        np.save(draft / HASHES, _hash([item.id for item in items]))
        write_json(draft / LEFT_OUT, [[one.file, one.reason] for one in [*pool.left_out, *result.left_out]])


def _distinct(pool: Pool, file: str) -> Iterator[Item]:
    """Yield the first item of each id; list the others as left out."""
    seen: set[str] = set()
    for item in pool.items():
        if item.id in seen:
            pool.left_out.append(LeftOut(-1, f"{file}: {item.id}", "its id occurred before"))
        else:
            seen.add(item.id)
            yield item


def _hash(ids: Sequence[str]) -> UInt64[np.ndarray, " ids"]:
    digests = b"".join(hashlib.blake2b(one.encode(), digest_size=8).digest() for one in ids)
    return np.frombuffer(digests, dtype=np.uint64)


def find_duplicates(folder: Path, parts: int) -> Int64[np.ndarray, "found 2"]:
    """Return part and row of every item whose id occurs in an earlier part too.

    Hashes of ids are compared, some at a time; the ids themselves where hashes are equal.
    """
    hashes = [np.load(folder / PARTS / numbered(part) / HASHES, mmap_mode="r") for part in range(parts)]
    rounds = 1 + sum(map(len, hashes)) // HASHES_AT_ONCE
    found = [np.zeros((0, 2), dtype=np.int64)]
    for number in range(rounds):
        rows = [np.flatnonzero(one % np.uint64(rounds) == number) for one in hashes]
        values = np.concatenate([one[own] for one, own in zip(hashes, rows, strict=True)])
        part = np.repeat(np.arange(parts), [len(own) for own in rows])
        row = np.concatenate(rows)
        order = values.argsort(kind="stable")
        values = values[order]
        is_twice = np.zeros(len(values) + 1, dtype=bool)
        is_twice[1:-1] = values[1:] == values[:-1]
        among = order[is_twice[1:] | is_twice[:-1]]  # both of each pair
        found.append(_repeated(folder, np.stack([part[among], row[among]], axis=1)))
    return np.concatenate(found)


def _repeated(folder: Path, places: Int64[np.ndarray, "places 2"]) -> Int64[np.ndarray, "found 2"]:
    """Return those of the places, in the order of parts, whose id is that of an earlier place."""
    seen: set[str] = set()
    repeated = []
    for part in np.unique(places[:, 0]).tolist():
        rows = np.sort(places[places[:, 0] == part, 1])
        segment = _part(folder, part)
        if segment is None:
            continue
        for row, item in zip(rows.tolist(), segment.items.get(rows.tolist()), strict=True):
            if item.id in seen:
                repeated.append((part, row))
            seen.add(item.id)
    return np.array(repeated, dtype=np.int64).reshape(-1, 2)


def _part(folder: Path, number: int) -> Segment | None:
    """Open a part; None if it has no items."""
    segments = Snapshot.open(folder / PARTS / numbered(number)).segments
    return segments[0] if segments else None


def _sample_cuts(folder: Path, plan: Plan) -> list[list[int]]:
    """Choose where shards begin, by IDs that are evenly spaced in every part."""
    opened = [_part(folder, part) for part in range(len(plan.partitions))]
    tables = [(segment.table, None) for segment in opened if segment is not None]
    sample = sample_ids(tables, sum(table.num_items for table, _ in tables))
    return [list(cut) for cut in choose_cuts(sample, plan.settings.shards)]


def write_shard(folder: Path, number: int) -> None:
    """Write the items of all parts whose IDs lie in a shard's range as an index."""
    cuts = read_json(folder / BUILD / CUTS)
    duplicates = np.load(folder / BUILD / DUPLICATES)
    first = cuts[number - 1] if number else []
    stop = cuts[number] if number < len(cuts) else None

    def segments() -> Iterator[Segment]:
        for part in range(len(_read_plan(folder).partitions)):
            segment = _part(folder, part)
            if segment is not None:
                yield segment._replace(dead=np.sort(duplicates[duplicates[:, 0] == part, 1]))

    write_range(folder / SHARDS / numbered(number), _read_index(folder), segments(), first, stop)


def _left_out(folder: Path, parts: int) -> Iterator[dict[str, str]]:
    """Yield what was left out, with its reason."""
    of_folder = folder / BUILD / LEFT_OUT_OF_FOLDER
    places = [of_folder] if of_folder.exists() else []
    places += [folder / PARTS / numbered(part) / LEFT_OUT for part in range(parts)]
    for place in places:
        yield from ({"file": file, "reason": reason} for file, reason in read_json(place))
    duplicates = np.load(folder / BUILD / DUPLICATES)
    for part in np.unique(duplicates[:, 0]).tolist():
        segment = _part(folder, part)
        if segment is not None:
            found = segment.items.get(duplicates[duplicates[:, 0] == part, 1].tolist())
            yield from ({"file": item.id, "reason": "its id occurred before"} for item in found)
