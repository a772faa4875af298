"""Turn features into IDs on disk, a batch at a time: millions of items need as much memory as one batch.

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

from genius_search.data.features import Features
from genius_search.index.adding import encode_batch
from genius_search.index.store import ItemArrays, StoredEmbeddings
from genius_search.model import Genius
from genius_search.nn.columns import DENSITY_STEPS, HALF_NORM_STEPS
from genius_search.nn.health import Health, examine
from genius_search.progress import Progress
from genius_search.writing import ArtifactWriter, write_json

KIND: Final = "codes"
COLUMNS: Final = (
    f"codes, half norm / {HALF_NORM_STEPS}, density / {DENSITY_STEPS}; code cosines; "
    f"densities of items / {DENSITY_STEPS}"
)
"""Stored arrays and their columns; a folder with others is encoded again."""
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
        _encode(model, features, writer.path, embeddings, progress)
        writer.finish(facts={"rows": len(features)}, scratch=(DONE,))
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    return ItemArrays(**arrays, stored=embeddings)


def _encode(
    model: Genius, features: Features, folder: Path, embeddings: StoredEmbeddings, progress: Progress
) -> None:
    """Encode the rows that an earlier run has not finished."""
    try:
        done = int(json.loads((folder / DONE).read_text()))
    except (OSError, ValueError):
        done = 0
    files: dict[str, np.ndarray] = {}
    progress.begin("encode", len(features))
    starts = range(done, len(features), BATCH)
    for number, start in enumerate(starts, start=1):
        rows = slice(start, min(start + BATCH, len(features)))
        batch = features.gather(np.arange(rows.start, rows.stop))
        encoded = encode_batch(model, batch, features.modality[rows], embeddings=embeddings)
        for name, array in encoded._asdict().items():
            if isinstance(array, np.ndarray):
                if name not in files:
                    shape = (len(features), *array.shape[1:])
                    files[name] = _open(folder / f"{name}.npy", array.dtype, shape, is_new=not done)
                files[name][rows] = array
        if number % SAVED_EVERY == 0 or number == len(starts):
            for file in files.values():
                if isinstance(file, np.memmap):
                    file.flush()
            write_json(folder / DONE, rows.stop)
        progress.advance(rows.stop, {})


def _open(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...], *, is_new: bool) -> np.ndarray:
    if is_new:
        np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        _reserve(path)
    array: np.ndarray = np.load(path, mmap_mode="r+")
    return array


def _reserve(path: Path) -> None:
    """Take the room of a sparse file on the disk: writing to its map when that is full would kill us.

    Raises OSError: there is not enough.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot reserve
                raise OSError(error.errno, error.strerror, str(path)) from None


def examine_items(model: Genius, encoded: Sequence[tuple[Features, ItemArrays]]) -> Health:
    """Examine the IDs that :func:`encode_features` gave for all of these features, each item once."""
    _, first = np.unique(np.concatenate([features.ids for features, _ in encoded]), return_index=True)
    return examine(
        np.concatenate([arrays.codes[:, : model.num_levels] for _, arrays in encoded])[first],
        np.concatenate([features.modality for features, _ in encoded])[first].astype(np.int64),
        np.concatenate([arrays.code_cosine for _, arrays in encoded])[first].astype(np.float32),
        sizes=model.sizes,
        has_modality_level=model.has_modality_level,
    )
