"""Build a cluster with functions over folders, which run in this process or on Ray.

Each shard is created as an ordinary index, of the items whose ids hash to its number. A build that
was killed continues without repeating finished shards. ``cluster.json`` is written last, so that a
folder with this file is complete.
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

from genius_search.artifact import read_json
from genius_search.border import as_path
from genius_search.cluster.searcher import (
    MAX_WRITER_WAIT_SECONDS,
    MODEL,
    ClusterManifest,
    read_cluster,
    shard_folder,
    shard_of,
    write_cluster,
)
from genius_search.encoders.open import absolute_spec, load_encoder
from genius_search.errors import BadData, UsageError
from genius_search.index.build import (
    add_pool,
    default_levels,
    find_changes,
    fit_model,
    new_manifest,
)
from genius_search.index.items import Item
from genius_search.index.pool import Pool, open_pool
from genius_search.index.snapshot import Snapshot
from genius_search.index.source import item_encoder
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
"""More shards would have too many open files, and with smaller shards, the overhead of a call
exceeds the time of its search."""
BUILD: Final = ".build"
"""Folder inside the cluster for intermediate results of the build."""
PLAN: Final = "plan.json"
"""File of the settings in the folder of the build."""
_open_model = cache(Genius.open)

Work: TypeAlias = Callable[[Path, int], None]
"""A function of a cluster's folder and the number of a shard."""
Runner: TypeAlias = Callable[[Work, Path, Sequence[int]], Iterable[int]]
"""Call a function for each shard of a list, and yield their numbers as they are finished."""


class Settings(NamedTuple):
    """The settings of a build."""

    pool: str
    """Path of the pool."""
    model: str | None = None
    """Folder of a trained model."""
    encoder: str | None = None
    """An encoder, instead of a model; codebooks are fitted to a sample of the pool."""
    shards: int = 2
    """Number of shards."""
    embeddings: StoredEmbeddings | None = None
    device: str = "cpu"
    download: bool = False


def build_cluster(
    folder: Path, settings: Settings, *, run: Runner | None = None, progress: Progress | None = None
) -> ClusterManifest:
    """Build a cluster, or continue an interrupted build with the same settings.

    All machines must see the folder, the pool and the model under the same paths.

    Parameters
    ----------
    run
        where to create the shards: :func:`run_here` (the default) or :func:`run_on_ray`.

    Raises
    ------
    UsageError
        The settings are invalid, or the folder contains a cluster, a build with other settings, or
        other files.
    BadData
        The pool has nothing to index.
    """
    folder = as_path(folder).resolve()
    settings = settings._replace(pool=str(as_path(settings.pool)))
    if (settings.model is None) is (settings.encoder is None):
        raise UsageError("give exactly one of a model and an encoder")
    if not 1 <= settings.shards <= MAX_SHARDS:
        raise UsageError(f"--shards is {settings.shards}, expected 1 to {MAX_SHARDS}")
    if not (folder / BUILD).exists() and folder.exists() and any(folder.iterdir()):
        raise UsageError(
            f"{folder} already contains a cluster or other files; choose another folder, or add to "
            "the cluster with `genius index add`"
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
    for num_finished, _ in enumerate(run(create_shard, folder, missing), start=1):
        progress.advance(num_finished, {})
    num_left_out = _collect_left_out(folder)
    cluster = ClusterManifest(
        model=MODEL if settings.encoder else manifest.model,
        model_fingerprint=manifest.model_fingerprint,
        pool=settings.pool,
        shards=settings.shards,
        items=sum(Snapshot.open(shard_folder(folder, number)).num_alive for number in numbers),
        left_out=num_left_out,
        roots=manifest.roots,
    )
    write_cluster(folder, cluster)


def _collect_left_out(folder: Path) -> int:
    """Write ``left-out.jsonl`` from the lists of the pool and all shards; return its length."""
    lines = []
    for part in sorted((folder / BUILD).glob("left-out-*.json")):
        for file, reason in read_json(part):
            entry = json.dumps({"file": file, "reason": reason}, ensure_ascii=False)
            lines.append(f"{entry}\n")
    write_file(folder / "left-out.jsonl", "".join(lines).encode())
    return len(lines)


def run_here(work: Work, folder: Path, numbers: Sequence[int]) -> Iterator[int]:
    """Call a function for each shard in this process, one after the other."""
    for number in numbers:
        work(folder, number)
        yield number


def run_on_ray(work: Work, folder: Path, numbers: Sequence[int]) -> Iterator[int]:
    """Call a function for each shard on the connected Ray cluster, with one core each.

    Ray repeats the work of lost processes and machines. Errors of the function are returned as
    results, so that they are not repeated; the first error ends the build.
    """
    import ray.data  # noqa: PLC0415  an extra

    if not numbers:
        return
    tasks = ray.data.from_items(list(numbers), override_num_blocks=len(numbers))
    for row in tasks.map(_run_row, fn_args=(work, folder), num_cpus=1).iter_rows():
        if row["error"]:
            raise BadData(row["error"])
        yield int(row["item"])


def _run_row(row: dict[str, Any], work: Work, folder: Path) -> dict[str, Any]:
    # Ray's rows: {"item": 3} -> {"item": 3, "error": ""}
    try:
        work(folder, int(row["item"]))
    except (BadData, UsageError) as error:
        return {**row, "error": str(error)}
    return {**row, "error": ""}


def _prepare(folder: Path, settings: Settings, progress: Progress) -> IndexManifest:
    """Open or fit the model, and return the manifest with which every shard begins.

    The manifest has the roots of the pool. It is stored in the folder of the build, and read again
    if the build continues.
    """
    plan_file = folder / BUILD / PLAN
    manifest_file = folder / BUILD / CURRENT
    plan = settings._replace(download=False)._asdict()
    if plan_file.exists() and read_json(plan_file) != plan:
        raise UsageError(
            f"{folder} contains an interrupted build with other settings, {read_json(plan_file)}; "
            "give the same settings again, or choose another folder"
        )
    if not manifest_file.exists():
        pool = open_pool(Path(settings.pool), captions=True)
        num_items = sum(1 for _ in pool.items())
        write_json(plan_file, plan)
        reasons = [[left_out.file, left_out.reason] for left_out in pool.left_out]
        write_json(folder / BUILD / "left-out-pool.json", reasons)
        if settings.model is not None:
            model = Genius.open(settings.model, device=settings.device, download=settings.download)
        else:
            model = _fit_model(folder, settings, pool, num_items, progress)
        fitted_to = None if settings.model is not None else num_items
        manifest = new_manifest(model, settings.embeddings, None, fitted_to=fitted_to)
        write_json(manifest_file, manifest.replace(roots=pool.roots).model_dump(mode="json"))
    return IndexManifest.model_validate_json(manifest_file.read_bytes())


def _fit_model(
    folder: Path, settings: Settings, pool: Pool, num_items: int, progress: Progress
) -> Genius:
    """Fit codebooks to a sample of items, evenly spaced in the pool."""
    spec = absolute_spec(settings.encoder or "")
    encoder = load_encoder(spec, download=settings.download, device=settings.device)
    step = max(1, num_items // MAX_FIT_ITEMS)
    sample = dataclasses.replace(pool, items=lambda: itertools.islice(pool.items(), 0, None, step))
    with item_encoder(folder / BUILD, encoder) as work:
        changes = find_changes(folder / BUILD, sample, encoder, None, divides=False)
        changes.compute_features(work, progress)
    return fit_model(
        folder / MODEL,
        encoder,
        changes.features,
        items=num_items,
        fingerprint=changes.fingerprint,
        levels=default_levels(settings.embeddings),
        progress=progress,
    )


def create_shard(folder: Path, number: int) -> None:
    """Create a shard as an index of its items, or continue after a killed run."""
    settings = Settings(**read_json(folder / BUILD / PLAN))
    manifest = IndexManifest.model_validate_json((folder / BUILD / CURRENT).read_bytes())
    pool = open_pool(Path(settings.pool), captions=True)

    def items() -> Iterator[Item]:
        for item in pool.items():
            if shard_of(item.id, settings.shards) == number:
                yield item._replace(root=None)

    with open_writer(shard_folder(folder, number), wait_seconds=MAX_WRITER_WAIT_SECONDS) as writer:
        if (writer.folder / CURRENT).exists():  # another process has created the shard meanwhile
            return
        writer.begin(manifest.replace(identity=new_identity(), roots=()))
        added = add_pool(
            writer,
            _open_model(manifest.model, device=settings.device),
            Pool(items, has_files=pool.has_files),
            may_be_empty=True,
            progress=Silent(),
        )
        reasons = [[left_out.file, left_out.reason] for left_out in added.left_out]
        write_json(folder / BUILD / f"left-out-{number:06d}.json", reasons)
