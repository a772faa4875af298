"""Half norm and density of an ID: two corrections to scores by codes.

**Half norm.** The vector v of an ID is the sum of its code vectors. Since v is not a unit vector,
ranking by the inner product q·v favours long vectors; q·v − |v|²/2 ranks by the distance between q
and v, which the quantizer minimises, too. An item whose codes explain it badly has a short vector,
though, and distance favours it: the missing part of it resembles the query no more than partly.
Without training, half of the correction (``norm_weight``) agrees better with exact search (``python
-m research.bench``).

**Density.** Some items are near almost every query (hubs; Radovanović et al., "Hubs in space",
2010) and displace better ones. Cross-domain similarity local scaling (CSLS; Conneau et al., "Word
translation without parallel data", 2018) subtracts an item's mean similarity r to its nearest
neighbours from its score. Here

    score(q, x) = s(q) q·x − w ρ fade(q·x) (r(x) − mean r)

- r(x) is the mean cosine of an item to the nearest :data:`DENSITY_NEIGHBOURS` vectors of a sample
  of the pool's IDs. A trained model has no sample; the vectors of the first semantic codes replace
  it, since they are spread like the items.
- w is the setting ``density_weight`` of a search.
- ρ is the reliability of r: the agreement of two estimates of it, from two samples of items
  (Spearman–Brown). Where no item is a hub, as among random vectors, both estimates are noise and ρ
  is 0.
- s(q) makes the products of a query spread as an item's do (:mod:`genius_search.nn.spread`).
- fade falls from 1 to 0 over the last part of the cosine
  (:func:`~genius_search.nn.spread.fade_width`), with its third power. So an item that almost equals
  the query comes first, however dense its neighbourhood is.

An index stores ρ (r − mean r), called the density: of an ID in a byte after its codes and half
norm, and of an item in a byte next to its embedding. Computing it during a search would take
thousands of products. A search limits the densities of items by the size of the pool
(:func:`~genius_search.nn.spread.limit_densities`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from jaxtyping import Float, Float32, Int16, Int64, Integer, UInt8

from genius_search.nn.codebooks import normalize, sum_codes
from genius_search.nn.fine import FineCodes
from genius_search.nn.spread import HALF_NORM_STEPS, MAX_BYTE, encode_densities

DENSITY_NEIGHBOURS: Final = 1
"""Number of nearest vectors whose mean cosine is r."""
MAX_ID_SAMPLE: Final = 512
"""Number of vectors that IDs are compared with. The densities of IDs matter only in rankings by
codes alone, so a small sample is enough."""
NUM_SPARE_NEIGHBOURS: Final = 1
"""Number of further vectors whose cosines are computed, in case a matrix product confuses near
ones."""
HASH_BASE: Final = 0x9E3779B97F4A7C15
"""2⁶⁴ / golden ratio: odd and with irregular bits, as multiplicative hashing requires."""
MAX_COMPARED_SAMPLE: Final = 2048
"""Items are compared with all vectors of a sample up to this size."""
NUM_COMPARED: Final = 512
"""In a larger sample, they are compared with this many vectors that are near their first code's."""
COSINES_PER_BLOCK: Final = 1 << 22
"""Number of cosines that are in memory at the same time: 16 MiB."""


class NormAndDensity:
    """Computes half norms and densities of one quantizer's IDs; its code vectors must not change.

    Parameters
    ----------
    tables
        the code vectors of each level.
    has_modality_level
        whether IDs begin with a modality code. If so, IDs are compared only with IDs of the same
        modality, and the modality's vector is added to the vectors of the first semantic codes.
    norm_weight
        factor of the stored half norms.
    sample
        distinct IDs of a pool. If absent, or if too few of them have an ID's modality, the vectors
        of the first semantic codes replace it.
    baseline
        mean and reliability of the densities of each modality's items; if absent, all stored
        densities are 0.
    fine
        the fine codes that follow the IDs of the sample and of measured items, if they have any.
    """

    def __init__(
        self,
        tables: Sequence[Float[np.ndarray, "_ dim"]],
        *,
        has_modality_level: bool,
        norm_weight: float = 1.0,
        sample: Integer[np.ndarray, "sampled levels"] | None = None,
        baseline: Float[np.ndarray, "modalities 2"] | None = None,
        fine: FineCodes | None = None,
    ) -> None:
        self._tables = [table.astype(np.float32) for table in tables]
        self._has_modality_level = has_modality_level
        self._norm_weight = norm_weight
        self._fine = fine
        self._sample = np.empty((0, len(tables)), dtype=np.int64) if sample is None else sample
        self._baseline = np.zeros((1, 2)) if baseline is None else baseline
        self._near: dict[tuple[int, int, int], Int64[np.ndarray, " near"]] = {}
        self._references: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        """For each modality code the unit vectors that its IDs are compared with, and the hashes of
        the IDs that these vectors belong to, if any. Cached, since summing the sample takes longer
        than measuring a few new IDs."""

    def columns(
        self, vectors: Float32[np.ndarray, "ids dim"], codes: Integer[np.ndarray, "ids levels"]
    ) -> Int16[np.ndarray, "ids columns"]:
        """Return the weighted half norm and the density of IDs, as the bytes that an index stores.

        ``vectors`` are the sums of the IDs' code vectors. Values beyond 0 to 255 are clipped.
        """
        costs = self._norm_weight * np.square(vectors).sum(axis=1) / 2
        half_norms = np.rint(costs * HALF_NORM_STEPS).clip(0, MAX_BYTE).astype(np.int16)
        densities = self.densities(vectors, codes, max_vectors=MAX_ID_SAMPLE)
        densities = encode_densities(self._relative(densities, codes))
        return np.stack([half_norms, densities.astype(np.int16)], axis=1)

    def item_density(
        self, embeddings: Float[np.ndarray, "items dim"], codes: Integer[np.ndarray, "items levels"]
    ) -> UInt8[np.ndarray, " items"]:
        """Return the densities of items' embeddings as stored in an index, 0 to 255.

        An embedding is compared with the same vectors as its ID. ``codes`` are those of its ID,
        followed by its fine codes.
        """
        densities = self.densities(np.asarray(embeddings, dtype=np.float32), codes)
        return encode_densities(self._relative(densities, codes))

    def _relative(
        self, densities: Float32[np.ndarray, " items"], codes: Integer[np.ndarray, "items levels"]
    ) -> Float32[np.ndarray, " items"]:
        """Return ρ (r − mean r) of each item, with ρ and the mean of its modality."""
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
        max_vectors: int | None = None,
    ) -> Float32[np.ndarray, " items"]:
        """Return r of each vector, its mean cosine to the nearest vectors of the sample.

        Parameters
        ----------
        codes
            the IDs of the vectors.
        max_vectors
            approximate number of vectors of the sample to use; by default all of them.
        """
        densities = np.zeros(len(codes), dtype=np.float32)
        groups = codes[:, 0] if self._has_modality_level else np.zeros_like(codes[:, 0])
        for code in np.unique(groups).tolist():
            directions, hashes = self._reference(code)
            if max_vectors is not None:
                step = max(1, len(directions) // max_vectors)
                directions, hashes = directions[::step], None if hashes is None else hashes[::step]
            members = np.flatnonzero(groups == code)
            for rows, near in self._batches(code, codes, members, directions):
                densities[rows] = _density(
                    vectors[rows],
                    codes[rows],
                    directions[near],
                    None if hashes is None else hashes[near],
                )
        return densities

    def _batches(
        self,
        code: int,
        codes: Integer[np.ndarray, "items levels"],
        members: Int64[np.ndarray, " members"],
        directions: Float32[np.ndarray, "references dim"],
    ) -> Iterator[tuple[np.ndarray, np.ndarray | slice]]:
        """Yield rows of items that are measured together, and the directions to compare them with.

        The items of a large sample are compared with the directions that are nearest to the vector
        of their first semantic code.
        """
        if len(directions) <= MAX_COMPARED_SAMPLE:
            block = max(1, COSINES_PER_BLOCK // len(directions))
            for start in range(0, len(members), block):
                yield members[start : start + block], slice(None)
            return
        level = int(self._has_modality_level)
        first_codes = codes[members, level]
        order = np.argsort(first_codes, kind="stable")
        bounds = np.flatnonzero(np.diff(first_codes[order], prepend=-1)).tolist()
        for low, high in zip(bounds, [*bounds[1:], len(members)], strict=True):
            rows = members[order[low:high]]
            yield rows, self._near_directions(code, int(codes[rows[0], level]), directions)

    def _near_directions(
        self, code: int, first_code: int, directions: Float32[np.ndarray, "references dim"]
    ) -> Int64[np.ndarray, " near"]:
        """Return the directions nearest to the vector of a first semantic code; cached."""
        key = code, first_code, len(directions)
        if key not in self._near:
            centre = self._tables[int(self._has_modality_level)][first_code]
            if self._has_modality_level:
                centre = centre + self._tables[0][code]
            products = directions @ centre
            self._near[key] = np.sort(np.argpartition(products, -NUM_COMPARED)[-NUM_COMPARED:])
        return self._near[key]

    def _reference(self, code: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the unit vectors to compare IDs of a modality code with, and their IDs' hashes."""
        if code not in self._references:
            sample = self._sample
            if self._has_modality_level:
                sample = sample[sample[:, 0] == code]
            hashes = None
            if len(sample) > DENSITY_NEIGHBOURS:
                vectors = sum_codes(self._tables, sample, self._fine)
                hashes = _hashes(sample)
            elif self._has_modality_level:
                vectors = self._tables[0][code] + self._tables[1]
            else:
                vectors = self._tables[0]
            self._references[code] = normalize(vectors), hashes
        return self._references[code]


def _density(
    vectors: Float32[np.ndarray, "items dim"],
    codes: Integer[np.ndarray, "items levels"],
    directions: Float32[np.ndarray, "references dim"],
    hashes: Int64[np.ndarray, " references"] | None,
) -> Float32[np.ndarray, " items"]:
    """Return the mean cosine of each item to the nearest directions, except that of its ID.

    The rounding of a matrix product depends on the batch. So the product only selects the nearest
    directions; their cosines are computed one by one, and do not depend on the batch.
    """
    units = normalize(vectors)
    approximate = units @ directions.T
    if hashes is not None:
        approximate[_hashes(codes)[:, None] == hashes] = -np.inf
    rows = np.arange(len(approximate))
    nearest: list[np.ndarray] = []
    # Taking the maximum a few times is quicker than a partial sort.
    for _ in range(min(DENSITY_NEIGHBOURS + NUM_SPARE_NEIGHBOURS, approximate.shape[1])):
        column = approximate.argmax(axis=1)
        cosines = np.vecdot(directions[column], units)
        nearest.append(np.where(approximate[rows, column] > -np.inf, cosines, -1))
        approximate[rows, column] = -np.inf
    ascending = np.sort(np.stack(nearest, axis=1), axis=1)
    return np.asarray(ascending[:, -DENSITY_NEIGHBOURS:].mean(axis=1))


def _hashes(codes: Integer[np.ndarray, "ids levels"]) -> Int64[np.ndarray, " ids"]:
    """Return a 64-bit hash of each ID: Σ_l c_l · BASEˡ⁺¹ in wrapping integers."""
    powers = np.array([pow(HASH_BASE, level, 1 << 63) for level in range(1, codes.shape[1] + 1)])
    return np.asarray((codes.astype(np.int64) * powers).sum(axis=1))
