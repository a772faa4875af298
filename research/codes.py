"""Encode features to IDs on disk, batch by batch, so that memory does not grow with the items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np

from genius_search.data.features import Features
from genius_search.index.build import arrays_of_features
from genius_search.index.store import StoredEmbeddings
from genius_search.index.writer import ItemArrays
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.writing import ArtifactWriter, write_json

ARTIFACT: Final = "codes"
BATCH: Final = 4096
BATCHES_PER_CHECKPOINT: Final = 64
"""An interrupted run loses at most this many batches."""
CHECKPOINT: Final = "done.json"
"""File in an unfinished folder with the number of rows that are on the disk."""


def encode_features(
    model: Genius,
    features: Features,
    folder: Path,
    *,
    embeddings: StoredEmbeddings,
    progress: Progress,
) -> ItemArrays:
    """Encode all rows of features; the result is memory-mapped.

    A finished folder of the same features and model is opened, and an interrupted run continues.
    """
    writer = ArtifactWriter(
        folder,
        kind=ARTIFACT,
        config={"embeddings": embeddings},
        inputs={"features": features.fingerprint, "model": model.fingerprint},
    )
    if writer.finished() is None:
        _write_codes(model, features, writer.path, embeddings=embeddings, progress=progress)
        writer.finish(facts={"rows": len(features)})
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    return ItemArrays(**arrays)


def _write_codes(
    model: Genius,
    features: Features,
    folder: Path,
    *,
    embeddings: StoredEmbeddings,
    progress: Progress,
) -> None:
    """Encode all rows from the last checkpoint on."""
    arrays: dict[str, np.memmap] = {}
    checkpoint = folder / CHECKPOINT
    first = 0
    if checkpoint.exists():
        first = json.loads(checkpoint.read_text(encoding="utf-8"))["rows"]
        arrays = {path.stem: np.load(path, mmap_mode="r+") for path in folder.glob("*.npy")}
    progress.begin("encode", len(features))
    for start in range(first, len(features), BATCH):
        rows = slice(start, min(start + BATCH, len(features)))
        batch = features.gather(np.arange(rows.start, rows.stop))
        encoded = arrays_of_features(model, batch, features.modality[rows], embeddings=embeddings)
        for name, values in encoded._asdict().items():
            if not isinstance(values, np.ndarray):
                continue
            if name not in arrays:
                arrays[name] = np.lib.format.open_memmap(
                    folder / f"{name}.npy",
                    mode="w+",
                    dtype=values.dtype,
                    shape=(len(features), *values.shape[1:]),
                )
            arrays[name][rows] = values
        progress.advance(rows.stop, {})
        if rows.stop % (BATCH * BATCHES_PER_CHECKPOINT) == 0:
            for array in arrays.values():
                array.flush()
            write_json(checkpoint, {"rows": rows.stop})
    for array in arrays.values():
        array.flush()
    checkpoint.unlink(missing_ok=True)
