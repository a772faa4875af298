"""Turn features into IDs on disk, a batch at a time: millions of items need as much memory as one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from genius_search.artifact import ArtifactWriter
from genius_search.data.features import Features
from genius_search.index.adding import encode_batch
from genius_search.index.store import ItemArrays, StoredEmbeddings
from genius_search.model import Genius
from genius_search.nn.density import DENSITY_STEPS, HALF_NORM_STEPS
from genius_search.nn.health import Health, examine
from genius_search.progress import Progress
from genius_search.search.arrays import GrowingArray

KIND: Final = "codes"
COLUMNS: Final = (
    f"codes, half norm / {HALF_NORM_STEPS}, density / {DENSITY_STEPS}; code cosines; "
    f"densities of items / {DENSITY_STEPS}"
)
"""Stored arrays and their columns; a folder with others is encoded again."""
BATCH: Final = 4096


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
        writer.finish(facts={"rows": len(features)})
    arrays = {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}
    return ItemArrays(**arrays, stored=embeddings)


def _encode(
    model: Genius, features: Features, folder: Path, embeddings: StoredEmbeddings, progress: Progress
) -> None:
    progress.begin("encode", len(features))
    files: dict[str, GrowingArray] = {}
    with contextlib.ExitStack() as stack:
        for rows, batch in features.batches(BATCH):
            encoded = encode_batch(
                model, batch, features.modality[rows], embeddings=embeddings, numbers=features.ids[rows]
            )
            for name, array in encoded._asdict().items():
                if isinstance(array, np.ndarray):
                    if name not in files:
                        file = GrowingArray(folder / f"{name}.npy", array.dtype, *array.shape[1:])
                        files[name] = stack.enter_context(contextlib.closing(file))
                    files[name].append(array)
            progress.advance(rows.stop, {})


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
