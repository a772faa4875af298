"""Half norm and density of an ID: two corrections to scores by codes.

**Half norm.** The vector v of an ID is the sum of its code vectors. Since v is not a unit vector, ranking by
the inner product q·v favours long vectors; q·v − |v|²/2 ranks by the distance between q and v, which is also
what the quantizer minimises. An item that its codes explain badly has a short vector, though, and distance
favours it: what is missing of it is no more than partly like the query. Without training, half of the
correction (``norm_weight``) agrees better with exact search (``python -m research.bench``).

**Density.** Some items are near almost every query (hubs; Radovanović et al., "Hubs in space", 2010) and
displace better ones. Cross-domain similarity local scaling (CSLS; Conneau et al., "Word translation without
parallel data", 2018) subtracts an item's mean similarity r to its nearest neighbours from its score. Here

    score(q, x) = s(q) q·x − w ρ fade(q·x) (r(x) − mean r)

- r(x) is the mean cosine of an item to the nearest :data:`DENSITY_NEIGHBOURS` vectors of a sample of the pool's
  IDs. A trained model has no sample; the vectors of the first semantic codes replace it, since they are
  spread like the items.
- ρ is the reliability of r: how two estimates of it agree, by two samples of items (Spearman–Brown). Where
  no item is a hub, as among random vectors, both are noise and ρ is 0.
- s(q) makes the products of a query spread as an item's do (:mod:`genius_search.nn.spread`).
- fade falls from 1 to 0 over the last part of the cosine (:func:`~genius_search.nn.spread.fade_width`), with
  its third power. So what is almost equal to the query comes first, however dense its neighbourhood is.

What is stored is ρ (r − mean r), called the density: of an ID in a byte behind its codes and half norm, and
of an item in a byte next to its embedding. Computing it during a search would take thousands of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float, Float32, Int16, Int64, Integer, UInt8

from genius_search.nn.codebooks import normalize, sum_codes
from genius_search.nn.spread import HALF_NORM_STEPS, MAX_BYTE, encode_densities

DENSITY_NEIGHBOURS: Final = 1
"""Number of nearest vectors whose mean cosine is the density."""
ID_SAMPLE: Final = 512
"""Vectors that IDs are compared with: their densities only matter where nothing but codes is ranked by."""
SPARE: Final = 1
"""Vectors beyond the nearest whose cosines are computed, in case a matrix product confuses near ones."""
HASH_BASE: Final = 0x9E3779B97F4A7C15
"""Odd and with irregular bits, as multiplicative hashing requires."""
SCORES_AT_ONCE: Final = 1 << 22
"""Cosines in memory at once: 32 MiB."""


class NormAndDensity:
    """Computes half norms and densities of one quantizer's IDs; its code vectors must not change.

    Parameters
    ----------
    tables
        the code vectors of each level.
    has_modality_level
        whether IDs begin with a modality code. If so, IDs are compared only with those of their own modality,
        and the modality's vector is added to those of the first semantic codes.
    norm_weight
        factor of the half norms that are stored.
    sample
        distinct IDs of a pool. If absent, or if too few have an ID's modality, the vectors of the first
        semantic codes are used instead.
    baseline
        mean and reliability of the densities of each modality's items; if absent, all stored densities are 0.
    """

    def __init__(
        self,
        tables: Sequence[Float[np.ndarray, "_ dim"]],
        *,
        has_modality_level: bool,
        norm_weight: float = 1.0,
        sample: Integer[np.ndarray, "sampled levels"] | None = None,
        baseline: Float[np.ndarray, "modalities 2"] | None = None,
    ) -> None:
        self._tables = [table.astype(np.float32) for table in tables]
        self._has_modality_level = has_modality_level
        self._norm_weight = norm_weight
        self._sample = np.empty((0, len(tables)), dtype=np.int64) if sample is None else sample
        self._baseline = np.zeros((1, 2)) if baseline is None else baseline
        self._references: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        """Unit vectors that IDs of a modality code are compared with, and hashes of the vectors' own IDs, if
        they have any; cached, since summing the sample takes longer than measuring a few new IDs."""

    def columns(
        self, vectors: Float32[np.ndarray, "ids dim"], codes: Integer[np.ndarray, "ids levels"]
    ) -> Int16[np.ndarray, "ids columns"]:
        """Return weighted half norm and density as an index stores them, 0 to 255; more is clipped.

        ``vectors`` are the sums of the IDs' code vectors.
        """
        costs = self._norm_weight * np.square(vectors).sum(axis=1) / 2
        half_norms = np.rint(costs * HALF_NORM_STEPS).clip(0, MAX_BYTE).astype(np.int16)
        densities = self.densities(vectors, codes, most=ID_SAMPLE)
        densities = encode_densities(self._relative(densities, codes))
        return np.stack([half_norms, densities.astype(np.int16)], axis=1)

    def item_density(
        self, embeddings: Float[np.ndarray, "items dim"], codes: Integer[np.ndarray, "items levels"]
    ) -> UInt8[np.ndarray, " items"]:
        """Return the densities of items' embeddings as stored in an index, 0 to 255.

        An embedding is compared with the same vectors as its ID.
        """
        densities = self.densities(np.asarray(embeddings, dtype=np.float32), codes)
        return encode_densities(self._relative(densities, codes))

    def _relative(
        self, densities: Float32[np.ndarray, " items"], codes: Integer[np.ndarray, "items levels"]
    ) -> Float32[np.ndarray, " items"]:
        """Return reliability times the difference to the mean of the items' modality."""
        groups = (
            codes[:, 0].astype(np.int64)
            if self._has_modality_level
            else np.zeros(len(codes), np.int64)
        )
        mean, reliability = self._baseline[groups.clip(max=len(self._baseline) - 1)].T
        return np.asarray(reliability * (densities - mean), dtype=np.float32)

    def densities(
        self,
        vectors: Float32[np.ndarray, "items dim"],
        codes: Integer[np.ndarray, "items levels"],
        *,
        most: int | None = None,
    ) -> Float32[np.ndarray, " items"]:
        """Return r of each vector, by all vectors of the sample or about ``most`` of them.

        ``codes`` are those of the vectors' IDs.
        """
        densities = np.zeros(len(codes), dtype=np.float32)
        groups = codes[:, 0] if self._has_modality_level else np.zeros_like(codes[:, 0])
        for code in np.unique(groups).tolist():
            directions, hashes = self._reference(code)
            if most is not None:
                step = max(1, len(directions) // most)
                directions, hashes = directions[::step], None if hashes is None else hashes[::step]
            size = max(1, SCORES_AT_ONCE // len(directions))
            members = np.flatnonzero(groups == code)
            for rows in (members[start : start + size] for start in range(0, len(members), size)):
                densities[rows] = _density(vectors[rows], codes[rows], directions, hashes)
        return densities

    def _reference(self, code: int) -> tuple[np.ndarray, np.ndarray | None]:
        if code not in self._references:
            sample = self._sample
            if self._has_modality_level:
                sample = sample[sample[:, 0] == code]
            if len(sample) > DENSITY_NEIGHBOURS:
                vectors, hashes = sum_codes(self._tables, sample), _hashes(sample)
            elif self._has_modality_level:
                vectors, hashes = self._tables[0][code] + self._tables[1], None
            else:
                vectors, hashes = self._tables[0], None
            self._references[code] = normalize(vectors), hashes
        return self._references[code]


def _density(
    vectors: Float32[np.ndarray, "items dim"],
    codes: Integer[np.ndarray, "items levels"],
    directions: Float32[np.ndarray, "others dim"],
    hashes: Int64[np.ndarray, " others"] | None,
) -> Float32[np.ndarray, " items"]:
    """Return the mean cosine to the nearest directions, excluding an item's own ID.

    A matrix product, which depends on the batch, tells which are nearest; their cosines are computed singly.
    """
    units = normalize(vectors)
    rough = units @ directions.T
    if hashes is not None:
        rough[_hashes(codes)[:, None] == hashes] = -np.inf
    rows, nearest = np.arange(len(rough)), []
    for _ in range(
        min(DENSITY_NEIGHBOURS + SPARE, rough.shape[1])
    ):  # for so few, quicker than a partial sort
        best = rough.argmax(axis=1)
        cosines = np.vecdot(directions[best], units)
        nearest.append(np.where(rough[rows, best] > -np.inf, cosines, -1))
        rough[rows, best] = -np.inf
    return np.asarray(
        np.sort(np.stack(nearest, axis=1), axis=1)[:, -DENSITY_NEIGHBOURS:].mean(axis=1)
    )


def _hashes(codes: Integer[np.ndarray, "ids levels"]) -> Int64[np.ndarray, " ids"]:
    """Return a 64-bit hash of each ID."""
    powers = np.array([pow(HASH_BASE, level, 1 << 63) for level in range(1, codes.shape[1] + 1)])
    return np.asarray((codes.astype(np.int64) * powers).sum(axis=1))
