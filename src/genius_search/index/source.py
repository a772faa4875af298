"""Features of items: encoded, given as vectors, or taken from the stored embeddings of an index."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, Int8, Int64, Shaped
from torch import Tensor, nn

from genius_search.artifact import FORMAT, Manifest, fingerprint_of
from genius_search.data.features import KIND, FeatureBatch, Features
from genius_search.encoders.base import ItemKey
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.records import Modality, format_text
from genius_search.training.codebooks import MAX_SAMPLE
from genius_search.training.features import FeatureRow


class VectorFeatures(Features):
    """Vectors as the image features of images, and as the text features of other items.

    Parameters
    ----------
    read
        returns the vectors of some rows.
    """

    def __init__(
        self,
        modality: Int8[np.ndarray, " items"],
        dim: int,
        read: Callable[[Int64[np.ndarray, " rows"]], Float32[np.ndarray, "rows dim"]],
    ) -> None:
        self.ids = np.arange(len(modality))
        self.modality = modality
        self.image_dim = self.text_dim = dim
        self.left_out = []
        self._read = read

    def gather(self, rows: Int64[np.ndarray, " rows"]) -> FeatureBatch:
        """Return the vectors of rows as features."""
        is_image = torch.from_numpy(self.modality[rows] == Modality.IMAGE.code)
        vectors = torch.from_numpy(self._read(rows))
        return FeatureBatch(
            torch.where(is_image[:, None], vectors, 0),
            torch.where(is_image[:, None], 0, vectors),
            is_image,
            ~is_image,
        )


def given_features(
    vectors: Shaped[np.ndarray, "items dim"],
    rows: Int64[np.ndarray, " rows"],
    modality: Int8[np.ndarray, " rows"],
) -> VectorFeatures:
    """Return some rows of given vectors as features, at unit length."""

    def read(some: Int64[np.ndarray, " some"]) -> Float32[np.ndarray, "some dim"]:
        chosen = np.asarray(vectors[rows[some]], dtype=np.float64)  # in which large squares are finite
        return np.asarray(normalize(chosen), dtype=np.float32)

    return VectorFeatures(modality, vectors.shape[1], read)


def stored_features(snapshot: Snapshot, model: Genius) -> VectorFeatures:
    """Return the stored embeddings of an index's items as features."""
    vectors = [segment.vectors(model.ranker) for segment in snapshot.segments]
    alive = [segment.alive_rows() for segment in snapshot.segments]
    starts = np.cumsum([0, *map(len, alive)])

    def read(rows: Int64[np.ndarray, " rows"]) -> Float32[np.ndarray, "rows dim"]:
        found = np.empty((len(rows), model.dim), dtype=np.float32)
        segments = np.searchsorted(starts, rows, side="right") - 1
        for number, stored in enumerate(vectors):
            inside = segments == number
            found[inside] = stored(alive[number][rows[inside] - starts[number]])
        return found

    # The first code of an ID is the item's modality.
    tables = [segment.table for segment in snapshot.segments]
    firsts = [table.ids[table.rows()[rows], 0] for table, rows in zip(tables, alive, strict=True)]
    modality = np.concatenate([np.zeros(0), *firsts]).astype(np.int8)
    features = VectorFeatures(modality, model.dim, read)
    features.manifest = Manifest(
        format=FORMAT,
        kind=KIND,
        config={},
        inputs={},
        facts={},
        files={},
        fingerprint=fingerprint_of([entry.model_dump() for entry in snapshot.manifest.segments]),
    )
    return features


@torch.no_grad()
def draw_embeddings(
    features: Features, fusion: nn.Module
) -> tuple[Float[Tensor, "items dim"], Int8[np.ndarray, " items"]]:
    """Return the fused features and the modalities of all items, or of :data:`MAX_SAMPLE` drawn ones."""
    rows = np.sort(np.random.default_rng(0).permutation(len(features))[:MAX_SAMPLE])
    sampled = features.gather(rows)
    return fusion(sampled.image, sampled.text), features.modality[rows]


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
