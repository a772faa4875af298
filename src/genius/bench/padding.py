"""A real pool, padded with invented neighbours, so that speed can be measured at sizes that nobody labelled.

A neighbour is a real embedding with noise, encoded by the model's own quantizer. It is never a right answer:
recall on a padded pool says how well a method finds the same answers among more that look like them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float16, Float32, Int16
from torch.nn import functional as F

from genius.errors import UsageError
from genius.model import Genius
from genius.search.table import IdTable

BLOCK: Final = 8_192
"""Neighbours encoded at a time."""
LEAST_NOISE: Final = 0.5
MOST_NOISE: Final = 1.0
"""Length of the noise added to a unit vector: cosines to the real one from 0.89 down to 0.71."""


class PaddedPool(NamedTuple):
    """Real candidates first, then their invented neighbours."""

    names: Sequence[str]
    """Candidate ids of the real ones; the others have none."""
    vectors: Float32[np.ndarray, "items dim"]
    """Fused unit embeddings."""
    codes: Int16[np.ndarray, "items columns"]
    """Of the IDs, then their marks."""
    table: IdTable

    def __len__(self) -> int:
        return len(self.vectors)

    def name(self, item: int) -> str:
        """Of a candidate, or one that no candidate has."""
        return self.names[item] if item < len(self.names) else f"padding {item}"


def padded(
    model: Genius,
    names: Sequence[str],
    vectors: Float32[np.ndarray, "items dim"],
    codes: Int16[np.ndarray, "items columns"],
    typicality: Float16[np.ndarray, " items"],
    modalities: np.ndarray,
    *,
    items: int,
    seed: int,
) -> PaddedPool:
    """A pool of so many items; with 0, or as many as there are, the real one.

    Parameters
    ----------
    modalities
        of the real candidates; a neighbour has that of the candidate it was made from.
    """
    real = len(vectors)
    if items and items < real:
        raise UsageError(f"the pool has {real:,} candidates already; it cannot be padded to {items:,}")
    size = max(items, real)
    all_vectors = np.empty((size, vectors.shape[1]), dtype=np.float32)
    all_codes = np.empty((size, codes.shape[1]), dtype=np.int16)
    all_typicality = np.empty(size, dtype=np.float16)
    all_vectors[:real], all_codes[:real], all_typicality[:real] = vectors, codes, typicality
    for number, start in enumerate(range(real, size, BLOCK)):
        here = slice(start, min(start + BLOCK, size))
        random = np.random.default_rng([seed, number])
        source = random.integers(real, size=here.stop - here.start)
        noise = random.standard_normal((len(source), vectors.shape[1]), dtype=np.float32)
        length = random.uniform(LEAST_NOISE, MOST_NOISE, size=(len(source), 1)).astype(np.float32)
        noise *= length / np.linalg.norm(noise, axis=1, keepdims=True)
        made = F.normalize(torch.from_numpy(vectors[source] + noise), dim=1)
        with torch.no_grad():
            own = torch.from_numpy(modalities[source].astype(np.int64)).to(model.quantizer.device)
            found = model.quantizer.quantize(made.to(model.quantizer.device), own)
            stands_for = model.quantizer.decode(found.codes).cpu()
            marks = model.quantizer.marks(found.codes)
        all_vectors[here] = made.numpy()
        all_codes[here] = torch.cat([found.codes, marks], dim=1).cpu().numpy()
        all_typicality[here] = F.cosine_similarity(made, stands_for).numpy()
    return PaddedPool(names, all_vectors, all_codes, IdTable.build(all_codes, all_typicality))
