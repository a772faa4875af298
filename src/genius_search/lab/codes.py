"""Turn features into IDs, a batch at a time, on disk: as much memory for millions of items as for one batch.

A killed run goes on where it stopped.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from genius_search.artifact import ArtifactWriter, write_json
from genius_search.data.features import Features
from genius_search.index.adding import encode_batch
from genius_search.index.store import ItemArrays, StoredEmbeddings
from genius_search.model import Genius
from genius_search.nn.density import DENSITY_STEPS, HALF_NORM_STEPS, NUM_EXTRA_COLUMNS
from genius_search.nn.health import Health, examine
from genius_search.progress import Progress

KIND: Final = "codes"
COLUMNS: Final = (
    f"codes, half norm / {HALF_NORM_STEPS}, density / {DENSITY_STEPS}; densities of items / {DENSITY_STEPS}"
)
"""Stored columns; a folder with other columns is encoded again."""
BATCH: Final = 4096
SAVED_EVERY: Final = 64
"""Batches between the points from which a killed run goes on."""
DONE: Final = "done.json"


def encode_features(
    model: Genius, features: Features, folder: Path, *, embeddings: StoredEmbeddings, progress: Progress
) -> ItemArrays:
    """Encode all rows of features; the result is memory-mapped.

    A finished folder of the same features and model is opened as it is.
    """
    writer = ArtifactWriter(
        folder,
        kind=KIND,
        config={"embeddings": embeddings, "columns": COLUMNS},
        inputs={"features": features.manifest.fingerprint, "model": model.fingerprint},
    )
    if writer.finished() is None:
        _fill(model, features, writer.path, embeddings, progress)
        writer.finish(facts={"rows": len(features)}, scratch=(DONE,))
    return _open(folder, "r", embeddings)


def examine_items(model: Genius, encoded: Sequence[tuple[Features, ItemArrays]]) -> Health:
    """Examine the IDs that :func:`encode_features` gave for all of these features, each item once."""
    _, first = np.unique(np.concatenate([features.ids for features, _ in encoded]), return_index=True)
    return examine(
        np.concatenate([arrays.codes[:, : model.num_levels] for _, arrays in encoded])[first],
        np.concatenate([features.modality for features, _ in encoded])[first].astype(np.int64),
        np.concatenate([arrays.typicality for _, arrays in encoded])[first].astype(np.float32),
        sizes=model.sizes,
        has_modality_level=model.has_modality_level,
    )


def _fill(
    model: Genius, features: Features, folder: Path, embeddings: StoredEmbeddings, progress: Progress
) -> None:
    done = _done(folder)
    if not done:
        _create(model, len(features), folder, embeddings)
    arrays = _open(folder, "r+", embeddings)
    progress.begin("encode", len(features))
    starts = range(done, len(features), BATCH)
    for number, start in enumerate(starts, start=1):
        rows = np.arange(start, min(start + BATCH, len(features)))
        here = slice(start, start + len(rows))
        encoded = encode_batch(
            model,
            features.gather(rows),
            features.modality[here],
            embeddings=embeddings,
            numbers=features.ids[here],
        )
        arrays.codes[here] = encoded.codes
        arrays.typicality[here] = encoded.typicality
        if arrays.embeddings is not None:
            arrays.embeddings[here] = encoded.embeddings
        if arrays.densities is not None:
            arrays.densities[here] = encoded.densities
        if number % SAVED_EVERY == 0 or number == len(starts):
            for array in arrays:
                if isinstance(array, np.memmap):
                    array.flush()
            write_json(folder / DONE, here.stop)
        progress.advance(here.stop, {})


def _done(folder: Path) -> int:
    """Rows that an earlier run has finished."""
    try:
        return int(json.loads((folder / DONE).read_text()))
    except (OSError, ValueError):
        return 0


def _create(model: Genius, rows: int, folder: Path, embeddings: StoredEmbeddings) -> None:
    shapes: dict[str, tuple[Any, tuple[int, ...]]] = {
        "codes": (np.int16, (rows, model.num_levels + NUM_EXTRA_COLUMNS)),
        "typicality": (np.float16, (rows,)),
    }
    if embeddings != "none":
        shapes["embeddings"] = (np.float16, (rows, model.dim))
    if embeddings == "fused":
        shapes["densities"] = (np.uint8, (rows,))
    for name, (kind, shape) in shapes.items():
        path = folder / f"{name}.npy"
        np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=shape)
        _reserve(path)


def _reserve(path: Path) -> None:
    """Take the room of a sparse file on the disk: writing to its map when that is full would kill us.

    Raises
    ------
    OSError
        there is not enough.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot reserve
                raise OSError(error.errno, error.strerror, str(path)) from None


def _open(folder: Path, mode: str, embeddings: StoredEmbeddings) -> ItemArrays:
    return ItemArrays(
        np.load(folder / "codes.npy", mmap_mode=mode),  # type: ignore[arg-type]
        np.load(folder / "typicality.npy", mmap_mode=mode),  # type: ignore[arg-type]
        np.load(folder / "embeddings.npy", mmap_mode=mode) if embeddings != "none" else None,  # type: ignore[arg-type]
        embeddings,
        np.load(folder / "densities.npy", mmap_mode=mode) if embeddings == "fused" else None,  # type: ignore[arg-type]
    )
