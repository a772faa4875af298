"""From an embedding to its ID: the codes whose vectors sum to the nearest approximation.

:class:`Coder` assigns IDs to items. The compiled library finds the codes or, without it, NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int16, Int64, Integer, UInt8

from genius_search.native.build import CODES, NO_MEMORY, open_library
from genius_search.nn.codebooks import POOL_SAMPLE, Codebooks, normalize, sum_codes
from genius_search.nn.density import NormAndDensity
from genius_search.nn.kmeans import VECTORS_PER_BLOCK, assign

ERRORS_PER_BLOCK: Final = 1 << 20
"""Number of errors of sums per block: 4 MiB, which stay in a processor's cache."""


class NearestSums:
    """Approximates vectors by sums of code vectors, one from each level's table.

    A beam search over the levels keeps the ``beam`` partial sums with the smallest errors; 1 is the
    greedy choice of the paper (equations 4 to 6).
    """

    def __init__(self, tables: Sequence[Float32[np.ndarray, "_ dim"]], *, beam: int) -> None:
        self._tables = [np.asarray(table, dtype=np.float32) for table in tables]
        self._beam = beam
        self._is_compiled = max(map(len, tables)) <= CODES and open_library() is not None

    def __call__(
        self, vectors: Float32[np.ndarray, "items dim"]
    ) -> Int64[np.ndarray, "items levels"]:
        """Return the codes of vectors."""
        if self._is_compiled:
            return self._compiled(vectors)
        errors_per_vector = self._beam * max(map(len, self._tables))
        block = max(1, ERRORS_PER_BLOCK // errors_per_vector)
        codes = np.empty((len(vectors), len(self._tables)), dtype=np.int64)
        for start in range(0, len(vectors), block):
            codes[start : start + block] = self.in_numpy(vectors[start : start + block])
        return codes

    def in_numpy(
        self, vectors: Float32[np.ndarray, "items dim"]
    ) -> Int64[np.ndarray, "items levels"]:
        """Return the codes of a few vectors, computed in NumPy."""
        items, dim = vectors.shape
        rows = np.arange(items)[:, None]
        # For each item and beam: codes, the residual r they leave, and the error |r|²/2.
        codes = np.zeros((items, 1, 0), dtype=np.int64)
        residuals = vectors[:, None]
        errors = np.square(residuals).sum(axis=2) / 2
        for table in self._tables:
            products = (residuals.reshape(-1, dim) @ table.T).reshape(*errors.shape, len(table))
            # |r − e|²/2 = |r|²/2 + |e|²/2 − r·e, for every beam b and code c of an item.
            extended = errors[..., None] + np.square(table).sum(axis=1) / 2 - products
            # Column b · len(table) + c extends beam b by code c.
            flat = extended.reshape(items, errors.shape[1] * len(table))
            width = min(self._beam, flat.shape[1])
            best = np.argpartition(flat, width - 1, axis=1)[:, :width]
            parents = best // len(table)
            chosen = best % len(table)
            errors = flat[rows, best]
            residuals = residuals[rows, parents] - table[chosen]
            codes = np.concatenate([codes[rows, parents], chosen[..., None]], axis=2)
        return np.asarray(codes[rows[:, 0], errors.argmin(axis=1)])

    @cached_property
    def _packed(self) -> list[Float32[np.ndarray, ...]]:
        """The library's tables: code vectors, their half norms, and their products between levels.

        They give the error of a sum of code vectors without the residual of the vector x:
        |x − Σ e_l|²/2 − |x|²/2 = Σ_l (|e_l|²/2 − x·e_l) + Σ_{k<l} e_k·e_l
        """
        # Every level has CODES rows here. Rows that the table does not have are zeros with an
        # infinite half norm, so that no search chooses them.
        levels, dim = len(self._tables), self._tables[0].shape[1]
        wide = np.zeros((levels, CODES, dim), np.float32)
        halves = np.full((levels, CODES), np.inf, np.float32)
        for level, table in enumerate(self._tables):
            wide[level, : len(table)] = table
            halves[level, : len(table)] = np.square(table).sum(axis=1) / 2
        flat = wide.reshape(-1, dim)
        crossed = np.concatenate([flat[: CODES * level] @ wide[level].T for level in range(levels)])
        return [flat, halves, crossed]

    def _compiled(
        self, vectors: Float32[np.ndarray, "items dim"]
    ) -> Int64[np.ndarray, "items levels"]:
        """Return the codes of vectors, computed by the library."""
        library = open_library()
        code_vectors, halves, crossed = self._packed
        codes = np.empty((len(vectors), len(self._tables)), np.uint8)
        for start in range(0, len(vectors), VECTORS_PER_BLOCK):
            products = vectors[start : start + VECTORS_PER_BLOCK] @ code_vectors.T
            block = codes[start : start + VECTORS_PER_BLOCK]  # the library fills it in place
            arrays = [array.ctypes.data for array in (products, halves, crossed)]
            status = library.nearest_sums(  # type: ignore[union-attr]
                *arrays, *block.shape, self._beam, block.ctypes.data
            )
            if status == NO_MEMORY:
                raise MemoryError
        return codes.astype(np.int64)


class EncodedItems(NamedTuple):
    """Items as an index stores them."""

    embeddings: Float32[np.ndarray, "items dim"]
    """Fused embeddings, from which the IDs are computed; unit vectors."""
    codes: Int64[np.ndarray, "items levels"]
    code_cosine: Float32[np.ndarray, " items"]
    """Cosine between an item's embedding and the vector of its ID; ranks the items that share an
    ID."""
    columns: Int16[np.ndarray, "items columns"]
    """Rows of an ID table: codes, and of whole IDs half norm and density
    (:mod:`genius_search.nn.density`)."""
    fine: UInt8[np.ndarray, "items fine"]
    """Fine codes (:mod:`genius_search.nn.fine`); none if IDs are whole."""

    @property
    def all_codes(self) -> Int64[np.ndarray, "items codes"]:
        """The codes of the IDs, followed by the fine codes."""
        return np.concatenate([self.codes, self.fine], axis=1)


class Coder:
    """Assigns IDs to items with finished codebooks."""

    def __init__(self, codebooks: Codebooks) -> None:
        self._codebooks = codebooks
        self._tables = codebooks.tables()

    def assign_ids(
        self,
        embeddings: Float32[np.ndarray, "items dim"],
        modalities: Integer[np.ndarray, " items"],
    ) -> Int64[np.ndarray, "items levels"]:
        """Return the IDs of unit embeddings.

        Semantic codes are chosen by beam search (deviation 30). ``modalities`` are those of the
        items: 0 image, 1 text, 2 image-text.
        """
        codebooks = self._codebooks
        level0 = codebooks.config.level0
        if not codebooks.has_modality_level:
            return self._nearest_sums(embeddings)
        first = modalities.astype(np.int64)
        if level0 == "classifier":
            weight = codebooks.weights["classifier.weight"]
            bias = codebooks.weights["classifier.bias"]
            first = (embeddings @ weight.T + bias).argmax(axis=1)
        elif level0 == "learned":
            first = assign(embeddings, self._tables[0])
        # With a metric A, codes minimise |A (r − Σ e)|² = |A r − Σ A e|²; A is symmetric.
        residuals = embeddings - self._tables[0][first]
        if codebooks.metric is not None:
            residuals = residuals @ codebooks.metric
        semantic = self._nearest_sums(residuals)
        return np.concatenate([first[:, None], semantic], axis=1)

    @cached_property
    def _nearest_sums(self) -> NearestSums:
        """The choice of semantic codes, under the metric if there is one."""
        tables = self._tables[int(self._codebooks.has_modality_level) :]
        if self._codebooks.metric is not None:
            tables = [table @ self._codebooks.metric for table in tables]
        return NearestSums(tables, beam=self._codebooks.config.encoding_beam)

    @cached_property
    def norm_and_density(self) -> NormAndDensity:
        """The measurement of half norms and densities of IDs."""
        return NormAndDensity(
            self._tables,
            has_modality_level=self._codebooks.has_modality_level,
            norm_weight=self._codebooks.config.norm_weight,
            sample=self._codebooks.weights.get(POOL_SAMPLE),
            baseline=self._codebooks.weights["spreads"][:, 1:],
            fine=self._codebooks.fine,
        )

    def encode_items(
        self,
        embeddings: Float32[np.ndarray, "items dim"],
        modalities: Integer[np.ndarray, " items"],
    ) -> EncodedItems:
        """Return the IDs of items, their cosines, columns and fine codes, from their embeddings."""
        codes = self.assign_ids(embeddings, modalities)
        vectors = sum_codes(self._tables, codes)
        cosine = np.vecdot(embeddings, normalize(vectors))
        columns = codes.astype(np.int16)
        fine = np.zeros((len(codes), 0), np.uint8)
        if self._codebooks.fine is None:
            costs = self.norm_and_density.columns(vectors, codes)
            columns = np.concatenate([columns, costs], axis=1)
        else:
            norm_weight = self._codebooks.config.norm_weight
            fine = self._codebooks.fine.encode(embeddings, vectors, norm_weight)
        return EncodedItems(embeddings, codes, cosine, columns, fine)
