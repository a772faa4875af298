"""Turn features into IDs on disk, a batch at a time: millions of items need as much memory as one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from genius_search.data.features import Features
from genius_search.index.build import encode_batch
from genius_search.index.store import StoredEmbeddings
from genius_search.index.writer import ItemArrays
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.writing import ArtifactWriter

KIND: Final = "codes"
BATCH: Final = 4096


def encode_features(
    model: Genius,
    features: Features,
    folder: Path,
    *,
    embeddings: StoredEmbeddings,
    progress: Progress,
) -> ItemArrays:
    """Encode all rows of features; the result is memory-mapped.

    A finished folder of the same features and model is opened as it is.
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
        for start in range(0, len(features), BATCH):
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
        for file in files.values():
            file.flush()
        writer.finish(facts={"rows": len(features)})
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    return ItemArrays(**arrays)
