"""Building a cluster: plain functions over folders, run here or by Ray Data.

Every shard is created as an ordinary index of the items of the pool whose ids have its hash. A killed build
does not repeat what is finished; ``cluster.json`` is written last.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from genius_search.artifact import fingerprint_of, read_json
from genius_search.border import as_path
from genius_search.cluster.searcher import (
    MODEL,
    WAIT_SECONDS,
    ClusterManifest,
    read_cluster,
    shard_folder,
    shard_of,
)
from genius_search.encoders.open import absolute_spec, load_encoder
from genius_search.errors import BadData, UsageError
from genius_search.index.build import add_pool, find_changes, fit_model, new_manifest
from genius_search.index.items import Item
from genius_search.index.pool import Pool, open_pool
from genius_search.index.snapshot import Snapshot
from genius_search.index.source import saved_features
from genius_search.index.store import (
    CLUSTER,
    CURRENT,
    IndexManifest,
    StoredEmbeddings,
    new_identity,
)
from genius_search.index.writer import open_writer, writing_lock
from genius_search.model import Genius
from genius_search.progress import Progress, Silent
from genius_search.training.codebooks import MAX_FIT_ITEMS
from genius_search.writing import write_file, write_json

MAX_SHARDS: Final = 64
"""More would open too many files at once; and the call of a shard costs more than the search it carries."""
BUILD: Final = ".build"
"""Folder inside the cluster for the work of a build."""
PLAN: Final = "plan.json"
_open_model = cache(Genius.open)

Work: TypeAlias = Callable[[Path, int], None]
Runner: TypeAlias = Callable[[Work, Path, Sequence[int]], Iterable[int]]
"""Runs a function for a cluster's folder and each of some numbers; yields the numbers as they are done."""


class Settings(NamedTuple):
    """How a cluster is built."""

    pool: str
    model: str | None = None
    encoder: str | None = None
    """Instead of a model: codebooks are fitted to a sample of the pool."""
    shards: int = 2
    embeddings: StoredEmbeddings | None = None
    device: str = "cpu"
    download: bool = False


def build_cluster(
    folder: Path, settings: Settings, *, run: Runner | None = None, progress: Progress | None = None
) -> ClusterManifest:
    """Build a cluster, or go on with an interrupted build of the same pool.

    All machines that work on it see its folder, the pool and the model under the same paths. Shards are
    created in this process, unless ``run`` says where else.

    Raises
    ------
    UsageError
        The settings are impossible, or the folder holds a cluster, another build, or other things.
    BadData
        There is nothing to index in the pool, or in a shard.
    """
    folder = as_path(folder).resolve()
    settings = settings._replace(pool=str(as_path(settings.pool)))
    if (settings.model is None) is (settings.encoder is None):
        raise UsageError("give either a model, or the encoder of a cluster that needs no training")
    if not 1 <= settings.shards <= MAX_SHARDS:
        raise UsageError(f"--shards is {settings.shards}, expected 1 to {MAX_SHARDS}")
    if not (folder / BUILD).exists() and folder.exists() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} holds a cluster or other things already; choose another folder, or add to the cluster "
            "with `genius index add`"
        )
    with writing_lock(folder / BUILD, wait_seconds=1.0):
        if not (folder / CLUSTER).exists():
            _build(folder, settings, run or run_here, progress or Silent())
    shutil.rmtree(folder / BUILD)
    return read_cluster(folder)


def _build(folder: Path, settings: Settings, run: Runner, progress: Progress) -> None:
    manifest = _prepare(folder, settings, progress)
    numbers = range(settings.shards)
    missing = [
        number for number in numbers if not (shard_folder(folder, number) / CURRENT).exists()
    ]
    progress.begin("create shards", len(missing))
    for done, _ in enumerate(run(create_shard, folder, missing), start=1):
        progress.advance(done, {})
    lists = [read_json(file) for file in sorted((folder / BUILD).glob("left-out-*.json"))]
    left_out = [{"file": file, "reason": reason} for listed in lists for file, reason in listed]
    lines = (f"{json.dumps(one, ensure_ascii=False)}\n" for one in left_out)
    write_file(folder / "left-out.jsonl", "".join(lines).encode())
    cluster = ClusterManifest(
        model=MODEL if settings.encoder else manifest.model,
        model_fingerprint=manifest.model_fingerprint,
        pool=settings.pool,
        shards=settings.shards,
        items=sum(Snapshot.open(shard_folder(folder, number)).num_alive for number in numbers),
        left_out=len(left_out),
        roots=manifest.roots,
    )
    write_json(folder / CLUSTER, cluster.model_dump(mode="json"))


def run_here(work: Work, folder: Path, numbers: Sequence[int]) -> Iterator[int]:
    """Run a function in this process."""
    for number in numbers:
        work(folder, number)
        yield number


def run_on_ray(work: Work, folder: Path, numbers: Sequence[int]) -> Iterator[int]:
    """Run a function on the Ray cluster that is connected, with a core for each number.

    Ray repeats what a lost process or machine was doing. The function's own errors are results instead, so
    that they are not repeated, and the first one ends the build.
    """
    import ray.data  # noqa: PLC0415  an extra

    if not numbers:
        return
    tasks = ray.data.from_items(list(numbers), override_num_blocks=len(numbers))
    for done in tasks.map(_run_row, fn_args=(work, folder), num_cpus=1).iter_rows():
        if done["error"]:
            raise BadData(done["error"])
        yield int(done["item"])


def _run_row(row: dict[str, Any], work: Work, folder: Path) -> dict[str, Any]:
    try:
        work(folder, int(row["item"]))
    except (BadData, UsageError) as error:
        return {**row, "error": str(error)}
    return {**row, "error": ""}


def _prepare(folder: Path, settings: Settings, progress: Progress) -> IndexManifest:
    """Open or fit the model; return the manifest that all shards begin with, and the pool's folders in it."""
    plan, place = folder / BUILD / PLAN, folder / BUILD / CURRENT
    known = settings._replace(download=False)._asdict()
    if plan.exists() and read_json(plan) != known:
        raise UsageError(
            f"{folder} holds an interrupted build with other settings, {read_json(plan)}; give the same "
            "again, or choose another folder"
        )
    if not place.exists():
        pool = open_pool(Path(settings.pool), captions=True)
        rows = sum(1 for _ in pool.items())
        write_json(plan, known)
        write_json(
            folder / BUILD / "left-out-pool.json", [[one.file, one.reason] for one in pool.left_out]
        )
        if settings.model is not None:
            model = Genius.open(settings.model, device=settings.device, download=settings.download)
        else:
            model = _fit_model(folder, settings, pool, rows, progress)
        fitted_to = None if settings.model is not None else rows
        manifest = new_manifest(model, settings.embeddings, None, fitted_to=fitted_to)
        write_json(place, manifest.replace(roots=pool.roots).model_dump(mode="json"))
    return IndexManifest.model_validate_json(place.read_bytes())


def _fit_model(
    folder: Path, settings: Settings, pool: Pool, rows: int, progress: Progress
) -> Genius:
    """Fit codebooks to items from all over the pool."""
    spec = absolute_spec(settings.encoder or "")
    encoder = load_encoder(spec, download=settings.download, device=settings.device)
    step = max(1, rows // MAX_FIT_ITEMS)
    sample = dataclasses.replace(pool, items=lambda: itertools.islice(pool.items(), 0, None, step))
    with saved_features(folder / BUILD, encoder) as work:
        changes = find_changes(folder / BUILD, sample, encoder, None, divides=False)
        changes.encode(work, progress)
    return fit_model(
        folder / MODEL,
        encoder,
        changes.features,
        items=rows,
        fingerprint=fingerprint_of(changes.stamps),
        progress=progress,
    )


def create_shard(folder: Path, number: int) -> None:
    """Create a shard as an index of its items; a killed run goes on where it was."""
    settings = Settings(**read_json(folder / BUILD / PLAN))
    manifest = IndexManifest.model_validate_json((folder / BUILD / CURRENT).read_bytes())
    pool = open_pool(Path(settings.pool), captions=True)

    def items() -> Iterator[Item]:
        of_shard = (item for item in pool.items() if shard_of(item.id, settings.shards) == number)
        return (item._replace(root=None) for item in of_shard)

    with open_writer(shard_folder(folder, number), wait_seconds=WAIT_SECONDS) as writer:
        if (writer.folder / CURRENT).exists():  # another process has created it meanwhile
            return
        writer.begin(manifest.replace(identity=new_identity(), roots=()))
        added = add_pool(
            writer,
            _open_model(manifest.model, device=settings.device),
            Pool(items, has_files=pool.has_files),
            may_be_none=True,
            progress=Silent(),
        )
        reasons = [[one.file, one.reason] for one in added.left_out]
        write_json(folder / BUILD / f"left-out-{number:06d}.json", reasons)
