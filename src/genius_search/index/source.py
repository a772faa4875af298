"""Features of items: encoded, given as vectors, or taken from the stored embeddings of an index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float32, Int8, Int64

from genius_search.artifact import FORMAT, Manifest, fingerprint_of
from genius_search.data.features import KIND, FeatureBatch, Features, LeftOut
from genius_search.encoders.base import ItemKey
from genius_search.index.items import Item
from genius_search.index.pool import GivenVectors
from genius_search.index.snapshot import Snapshot
from genius_search.model import Genius
from genius_search.records import Modality, format_text
from genius_search.training.codebooks import MAX_SAMPLE
from genius_search.training.features import FeatureRow


class FromVectors:
    """Given vectors as features."""

    def __init__(self, given: GivenVectors, rows: Int64[np.ndarray, " rows"]) -> None:
        self.ids = np.arange(len(rows))
        self.modality = given.modality[rows]
        self.left_out: list[LeftOut] = []
        self._given, self._rows = given, rows

    def gather(self, rows: Int64[np.ndarray, " some"]) -> FeatureBatch:
        """Return the features of some rows."""
        return _one_each(self._given.units(self._rows[rows]), self.modality[rows])


class StoredFeatures(Features):
    """The stored embeddings of an index's items as features."""

    def __init__(self, snapshot: Snapshot, model: Genius) -> None:
        contents = [entry.model_dump() for entry in snapshot.manifest.segments]
        self.manifest = Manifest(
            format=FORMAT,
            kind=KIND,
            config={},
            inputs={},
            facts={},
            files={},
            fingerprint=fingerprint_of(contents),
        )
        self.image_dim = self.text_dim = model.dim
        self.left_out = []
        self._vectors = [segment.vectors(model.ranker) for segment in snapshot.segments]
        self._alive = [segment.alive_rows() for segment in snapshot.segments]
        self._starts = np.cumsum([0, *map(len, self._alive)])
        self.ids = np.arange(self._starts[-1])
        # The first code of an ID is the item's modality.
        firsts = [
            segment.table.ids[segment.table.rows()[rows], 0]
            for segment, rows in zip(snapshot.segments, self._alive, strict=True)
        ]
        self.modality = np.concatenate([np.zeros(0), *firsts]).astype(np.int8)

    def gather(self, rows: Int64[np.ndarray, " items"]) -> FeatureBatch:
        """Return the embeddings of rows, in the place of the features of their modality."""
        found = np.empty((len(rows), self.dim), dtype=np.float32)
        segments = np.searchsorted(self._starts, rows, side="right") - 1
        for number, vectors in enumerate(self._vectors):
            inside = segments == number
            found[inside] = vectors(self._alive[number][rows[inside] - self._starts[number]])
        return _one_each(found, self.modality[rows])


Source: TypeAlias = Features | FromVectors
"""Features of items. ``ids`` are the numbers of the items, ascending; those that cannot be read have none."""


def _one_each(
    vectors: Float32[np.ndarray, "items dim"], modality: Int8[np.ndarray, " items"]
) -> FeatureBatch:
    """Return vectors as the image features of images, and as the text features of other items."""
    is_image = torch.from_numpy(modality == Modality.IMAGE.code)
    features = torch.from_numpy(vectors)
    return FeatureBatch(
        torch.where(is_image[:, None], features, 0),
        torch.where(is_image[:, None], 0, features),
        is_image,
        ~is_image,
    )


def draw_sample(features: Source) -> Int64[np.ndarray, " rows"]:
    """Return the rows of all items, or of :data:`MAX_SAMPLE` drawn ones, ascending."""
    return np.sort(np.random.default_rng(0).permutation(len(features.ids))[:MAX_SAMPLE])


def feature_rows(items: Iterable[Item], folder: Path) -> Iterator[FeatureRow]:
    """Yield the feature row of each item; paths of stored images are relative to the index's folder."""
    for number, item in enumerate(items):
        yield FeatureRow(
            id=number,
            key=ItemKey("candidate", item.id),
            modality=item.modality,
            image=None if item.image is None else folder / item.image,
            text=format_text(item.text),
        )
