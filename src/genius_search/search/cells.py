"""Search of cells: the items of an ID with one or two semantic codes are scanned by fine codes.

:func:`rank_cells` is the plain search, in NumPy. ``native/cells.c`` takes a small part of its time;
:class:`CellGrid` arranges the code vectors for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float32, Int32, Int64

from genius_search.config import SearchSettings, narrow_search
from genius_search.nn.codebooks import as_floats
from genius_search.nn.fine import FineCodes, unpack_fine_codes
from genius_search.nn.spread import decode_densities, fade
from genius_search.search.rank import Candidates, CodeRanker, Evidence, SearchQuery
from genius_search.search.table import (
    Allowed,
    IdTable,
    Restriction,
    SearchSegment,
    count_allowed,
)
from genius_search.search.vectors import StoredVectors

MIN_CELLS_PER_ITEM: Final = 4
"""If a condition allows fewer items than a quarter of the cells, the cells with such items are
listed, and the others are not looked at."""
MAX_SAMPLED_CELLS: Final = 2048
"""Number of cells whose items estimate how many items the better cells have."""
COST_STEPS: Final = 32_767
"""Integer that stands for the largest weighted half norm of a cell."""
BYTE_STEPS: Final = 127
"""Largest integer of a code vector, as :func:`genius_search.nn.fine.round_to_bytes` rounds it."""


class CellGrid:
    """All combinations of codes, as an array of modality, first and second semantic code.

    Cell ``(modality * first_codes + first) * second_codes + second`` has these codes. Without a
    modality level, or a second level, there is one code with a vector of zeros.

    Parameters
    ----------
    tables
        the code vectors of each level.
    norm_weight
        factor of half norms.
    """

    def __init__(
        self,
        tables: Sequence[Float32[np.ndarray, "_ dim"]],
        norm_weight: float,
        *,
        has_modality_level: bool,
    ) -> None:
        self._has_modality_level = has_modality_level
        nothing = np.zeros((1, tables[0].shape[1]), np.float32)
        levels = [*([] if has_modality_level else [nothing]), *tables]
        levels += [nothing] * (3 - len(levels))
        self.sizes = tuple(len(level) for level in levels)
        """Number of modalities, of first and of second codes."""
        self._starts: WeakKeyDictionary[IdTable, Int32[np.ndarray, " fences"]] = WeakKeyDictionary()
        self._sampled_ranges: WeakKeyDictionary[IdTable, Int64[np.ndarray, "2 sampled"]] = (
            WeakKeyDictionary()
        )
        vectors = np.concatenate(levels)
        self.dim = -(-vectors.shape[1] // 16) * 16
        """Number of dimensions in ``cell_vectors``."""
        steps = np.abs(vectors).max(axis=1) / np.float32(BYTE_STEPS)
        integers = np.rint(vectors / np.where(steps > 0, steps, 1)[:, None]).astype(np.int8)
        padding = (0, -len(vectors) % 4), (0, self.dim - vectors.shape[1])
        costs = np.ravel(_half_norms(levels)) * np.float32(norm_weight)
        self.largest_cost = float(costs.max())
        """The cost of a cell with the longest vector."""
        num_cells = self.sizes[1] * self.sizes[2]
        sampled = np.random.default_rng(0).permutation(num_cells)[:MAX_SAMPLED_CELLS]
        self._sampled = np.sort(sampled)
        cell_costs = np.rint(costs / (self.largest_cost or 1) * COST_STEPS).astype(np.int16)
        self.arrays = {
            "cell_vectors": np.ascontiguousarray(np.pad(integers, padding)),
            "cell_steps": np.pad(steps, padding[0]).astype(np.float32),
            "cell_costs": cell_costs,
            "least_costs": cell_costs.reshape(-1, self.sizes[2]).min(axis=1),
            "sampled_cells": np.stack(np.divmod(self._sampled, self.sizes[2]), axis=1).astype(
                np.int32
            ),
        }
        """Arrays of search.c's Model, by the names of its fields."""

    def starts(self, table: IdTable) -> Int32[np.ndarray, " fences"]:
        """Return the position of the first item of each cell in a table, and the end; cached."""
        starts = self._starts.get(table)
        if starts is None:
            codes = table.ids.astype(np.int64)
            cells = codes[:, 0] * 0 if not self._has_modality_level else codes[:, 0]
            for level, size in enumerate(self.sizes[1:], start=int(self._has_modality_level)):
                cells = cells * size + (codes[:, level] if level < codes.shape[1] else 0)
            counts = np.zeros(int(np.prod(self.sizes)) + 1, np.int32)
            counts[cells + 1] = np.diff(table.bucket_starts)
            starts = self._starts.setdefault(table, counts.cumsum(dtype=np.int32))
        return starts

    def sampled_ranges(self, table: IdTable) -> Int64[np.ndarray, "2 sampled"]:
        """Return the positions of the first item of each sampled cell, and those after its last.

        They are ascending. Cached.
        """
        ranges = self._sampled_ranges.get(table)
        if ranges is None:
            starts = self.starts(table)
            num_cells = self.sizes[1] * self.sizes[2]
            cells = (np.arange(self.sizes[0])[:, None] * num_cells + self._sampled).ravel()
            ranges = np.stack([starts[cells], starts[cells + 1]]).astype(np.int64)
            ranges = self._sampled_ranges.setdefault(table, ranges)
        return ranges

    def counts(
        self, table: IdTable, allowed: Allowed | None
    ) -> tuple[Int32[np.ndarray, " sampled"], Int64[np.ndarray, " modalities"]]:
        """Return the number of allowed items in the sampled cells, and of each modality."""
        low, high = self.sampled_ranges(table)
        fences = self.starts(table)[:: self.sizes[1] * self.sizes[2]].astype(np.int64)
        if allowed is None:
            return (high - low).astype(np.int32), np.diff(fences)
        if allowed.rows is None:
            counts = allowed.positions.count(low, high).astype(np.int32)
            return counts, allowed.positions.count(fences[:-1], fences[1:])
        # An empty cell starts where the next one does, so that the last of them has the item.
        positions = table.positions_of_items[allowed.rows]
        cells = low.searchsorted(positions, side="right") - 1
        cells = cells[(cells >= 0) & (positions < high[cells])]
        modalities = fences.searchsorted(positions, side="right") - 1
        return (
            np.bincount(cells, minlength=len(low)).astype(np.int32),
            np.bincount(modalities, minlength=len(fences) - 1).astype(np.int64),
        )

    def occupied(
        self, segments: Sequence[SearchSegment], restriction: Restriction
    ) -> Int32[np.ndarray, " cells"] | None:
        """Return the cells with allowed items in any segment, ascending; None if there are many."""
        most_items = int(np.prod(self.sizes)) // MIN_CELLS_PER_ITEM
        cells = []
        for segment, allowed in zip(segments, restriction, strict=True):
            if allowed is None:
                return None
            positions = allowed.positions.rows()
            most_items -= len(positions)
            if most_items < 0:
                return None
            cells.append(self.starts(segment.table).searchsorted(positions, side="right") - 1)
        return np.unique(np.concatenate(cells)).astype(np.int32)


def _half_norms(
    levels: Sequence[Float32[np.ndarray, "_ dim"]],
) -> Float32[np.ndarray, "modalities first second"]:
    """Return half the squared norm of the sum of three code vectors, for all combinations.

    |a + b + c|² = |a|² + |b|² + |c|² + 2 (a·b + a·c + b·c)
    """
    modality, first, second = levels
    squares = [np.square(level).sum(axis=1) for level in levels]
    total = squares[0][:, None, None] + squares[1][None, :, None] + squares[2][None, None]
    total = total + 2 * (modality @ first.T)[:, :, None]
    total = total + 2 * (modality @ second.T)[:, None]
    total = total + 2 * (first @ second.T)[None]
    return np.asarray(total / 2, dtype=np.float32)


def pack_fine_vectors(fine: FineCodes) -> dict[str, np.ndarray]:
    """Return the arrays of fine codes, by the names of the fields of search.c's Model."""
    return {
        "fine_vectors": np.ascontiguousarray(fine.vectors, dtype=np.float32),
        "fine_ends": np.ascontiguousarray(fine.ends, dtype=np.int32),
        "fine_norms": np.ascontiguousarray(fine.half_norms, dtype=np.float32),
    }


def rank_cells(
    ranker: CodeRanker,
    segments: Sequence[SearchSegment],
    query: SearchQuery,
    config: SearchSettings,
    evidence: Evidence,
) -> Candidates:
    """Rank the allowed items by the codes of their cells and their fine codes, then by embeddings.

    No cell is left out, whatever ``config.candidates`` is.
    """
    target_spread = ranker.spread.target_spread(query.level0)
    if query.restriction is not None:
        num_items = sum(segment.table.num_items for segment in segments)
        config = narrow_search(config, num_items, count_allowed(segments, query.restriction))
    factor = ranker.scale(query.fused, target_spread)
    scaled = np.asarray(query.fused * np.float32(factor), dtype=np.float32)
    parts = [
        _score_segment(ranker, segment, allowed, query.level0, scaled)
        for segment, allowed in zip(
            segments, query.restriction or [segment.alive for segment in segments], strict=True
        )
    ]
    numbers = np.arange(len(parts)).repeat([len(part.items) for part in parts])
    items, rows, scores = (np.concatenate(column) for column in zip(*parts, strict=True))
    num_ranked = len(items)
    is_compared = config.rerank == "embeddings"
    if is_compared and config.shortlist:
        best = np.argsort(-scores, kind="stable")[: max(query.k, config.shortlist)]
        numbers, items = numbers[best], items[best]
        rows, scores = rows[best], scores[best]
    for number, densities in enumerate(evidence.densities or ()):
        of_segment = np.flatnonzero(numbers == number)
        costs = np.float32(config.density_weight) * decode_densities(densities[items[of_segment]])
        if is_compared and evidence.embeddings is not None:
            read_vectors = evidence.embeddings[number]
            vectors = as_floats(read_vectors(items[of_segment]))
            is_residual = isinstance(read_vectors, StoredVectors) and read_vectors.bits < 16
            compared = query.fused if is_residual else query.compared
            products = np.vecdot(vectors, compared)
            scores[of_segment] = products * factor
            costs *= 0 if evidence.is_raw else fade(products, evidence.fade_width)
        scores[of_segment] -= costs
    best = np.argsort(-scores, kind="stable")[: query.k]
    return Candidates(
        segments=numbers[best],
        items=items[best],
        id_rows=rows[best],
        scores=scores[best] / np.float32(factor),
        beams=np.zeros(len(best), dtype=np.int64),
        log_probabilities=np.full((len(best), len(ranker.tables())), np.nan, dtype=np.float32),
        num_ranked=num_ranked,
    )


class _ScoredItems(NamedTuple):
    """The allowed items of a segment."""

    items: Int64[np.ndarray, " items"]
    rows: Int64[np.ndarray, " items"]
    """Row of each item's ID."""
    scores: Float32[np.ndarray, " items"]
    """Products with the vectors that codes stand for, minus half norms."""


def _score_segment(
    ranker: CodeRanker,
    segment: SearchSegment,
    allowed: Allowed | None,
    level0: frozenset[int],
    query: Float32[np.ndarray, " dim"],
) -> _ScoredItems:
    """Score the allowed items of a segment by their codes."""
    table, fine = segment.table, segment.fine
    if ranker.fine is None or fine is None:
        raise ValueError("the segment has no fine codes")
    rows = np.arange(len(table)).repeat(np.diff(table.bucket_starts))
    is_allowed = np.ones(len(rows), bool) if allowed is None else allowed.items[table.items]
    if level0 and ranker.spread.level:
        is_allowed &= np.isin(table.ids[rows, 0], list(level0))
    positions = np.flatnonzero(is_allowed)
    items, rows = table.items[positions].astype(np.int64), rows[positions]
    codes = unpack_fine_codes(fine.packed_codes(items))
    cells = ranker.vectors(table.ids)
    cell_scores = np.vecdot(cells, query) - np.square(cells).sum(axis=1) * ranker.norm_weight / 2
    scores = cell_scores[rows] - ranker.fine.half_norms[codes[:, -1]]
    for number, products in enumerate(ranker.fine.products(query)):
        scores += products[codes[:, number]]
    return _ScoredItems(items, rows, scores.astype(np.float32))
