"""Turn features into IDs on disk; millions of items need as much memory as one batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import numpy as np

from genius_search.data.features import Features
from genius_search.index.build import encode_batch
from genius_search.index.store import StoredEmbeddings
from genius_search.index.writer import ItemArrays
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.writing import ArtifactWriter, write_json

KIND: Final = "codes"
BATCH: Final = 4096
BATCHES_PER_CHECKPOINT: Final = 64
"""An interrupted run loses at most this many batches."""
DONE: Final = "done.json"
"""Number of rows that are on the disk, in an unfinished folder."""


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
        kind=KIND,
        config={"embeddings": embeddings},
        inputs={"features": features.fingerprint, "model": model.fingerprint},
    )
    if writer.finished() is None:
        files: dict[str, np.memmap] = {}
        progress.begin("encode", len(features))
        done_file = writer.path / DONE
        first = 0
        if done_file.exists():
            first = json.loads(done_file.read_text())["rows"]
            files = {path.stem: np.load(path, mmap_mode="r+") for path in writer.path.glob("*.npy")}
        for start in range(first, len(features), BATCH):
            rows = slice(start, min(start + BATCH, len(features)))
            batch = features.gather(np.arange(rows.start, rows.stop))
            encoded = encode_batch(model, batch, features.modality[rows], embeddings=embeddings)
            for name, array in encoded._asdict().items():
                if isinstance(array, np.ndarray):
                    if name not in files:
                        files[name] = np.lib.format.open_memmap(
                            writer.path / f"{name}.npy",
                            mode="w+",
                            dtype=array.dtype,
                            shape=(len(features), *array.shape[1:]),
                        )
                    files[name][rows] = array
            progress.advance(rows.stop, {})
            if rows.stop % (BATCH * BATCHES_PER_CHECKPOINT) == 0:
                for file in files.values():
                    file.flush()
                write_json(done_file, {"rows": rows.stop})
        for file in files.values():
            file.flush()
        done_file.unlink(missing_ok=True)
        writer.finish(facts={"rows": len(features)})
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    return ItemArrays(**arrays)
