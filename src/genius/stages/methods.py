"""What each method of the results table finds: exact search, and generation with its ways of re-ranking."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius.config import SearchConfig
from genius.data.records import did_of
from genius.evaluation.runs import Hit
from genius.model import Genius
from genius.search.beam import search
from genius.search.exact import exact_search
from genius.search.rank import CodeRanker
from genius.search.searcher import Evidence, rank_items
from genius.search.table import IdTable

DEPTH: Final = 50
"""Hits kept for each query."""
SEARCH_BATCH: Final = 64
RERANK: Final = {"generative": "none", "generative+codes": "codes", "generative+embeddings": "embeddings"}
"""What orders the items that were generated."""


class PoolCandidates(NamedTuple):
    """The candidates of one pool, encoded."""

    dids: Int64[np.ndarray, " items"]
    raw: Float[Tensor, "items dim"]
    """Unit sums of the encoder's features."""
    fused: Float[Tensor, "items dim"]
    codes: Int64[np.ndarray, "items levels"]
    typicality: Float[np.ndarray, " items"]
    modality: Int64[np.ndarray, " items"]

    def part(self, rows: np.ndarray) -> PoolCandidates:
        """Some of them, in this order."""
        chosen = torch.from_numpy(rows)
        return PoolCandidates(
            self.dids[rows],
            self.raw[chosen],
            self.fused[chosen],
            self.codes[rows],
            self.typicality[rows],
            self.modality[rows],
        )


class RowQueries(NamedTuple):
    """The queries of one row of the table, embedded."""

    qids: list[str]
    raw: Float[Tensor, "queries dim"]
    """Unit sums of the encoder's features."""
    fused: Float[Tensor, "queries dim"]


class Found(NamedTuple):
    """What one method found."""

    method: str
    hits: list[list[Hit]]
    """A ranking for each query."""
    bytes_per_item: float
    """What has to be stored."""
    touched: float
    """Candidates that were scored, on average over the queries."""


def find(
    model: Genius,
    queries: RowQueries,
    candidates: PoolCandidates,
    methods: Sequence[str],
    settings: SearchConfig,
) -> Iterator[Found]:
    """Answer all queries by each of these methods."""
    table = IdTable.build(candidates.codes, candidates.typicality)
    num_items = len(candidates.dids)
    vector_bytes = 2.0 * model.dim  # as they would be stored; exact search compares them in 32 bits
    id_bytes = table.nbytes / num_items
    for rival in _exact(model, queries, candidates):
        if rival.method in methods:
            nearest = exact_search(rival.queries, rival.vectors, num_items, k=DEPTH)
            hits = [
                _hits(candidates, items, scores)
                for items, scores in zip(nearest.items, nearest.scores, strict=True)
            ]
            size = id_bytes if rival.method == "exact-codes" else vector_bytes
            yield Found(rival.method, hits, size, float(num_items))
    wanted = [method for method in RERANK if method in methods]
    if wanted:
        generated = _generate(model, queries, candidates, table, wanted, settings)
        for method in wanted:
            size = id_bytes + (vector_bytes if method == "generative+embeddings" else 0.0)
            yield Found(method, generated.hits[method], size, generated.touched)


class _Rival(NamedTuple):
    method: str
    queries: Float[Tensor, "queries dim"]
    vectors: Callable[[slice], Tensor]
    """Of a range of the pool's candidates."""


def _exact(model: Genius, queries: RowQueries, candidates: PoolCandidates) -> list[_Rival]:
    return [
        _Rival("exact-raw", queries.raw, lambda rows: candidates.raw[rows]),
        _Rival("exact-fused", queries.fused, lambda rows: candidates.fused[rows]),
        _Rival(
            "exact-codes",
            queries.fused,
            lambda rows: model.quantizer.decode(torch.from_numpy(candidates.codes[rows])).cpu(),
        ),
    ]


class _Generated(NamedTuple):
    hits: dict[str, list[list[Hit]]]
    touched: float


def _generate(
    model: Genius,
    queries: RowQueries,
    candidates: PoolCandidates,
    table: IdTable,
    methods: Sequence[str],
    settings: SearchConfig,
) -> _Generated:
    """Generate once, and order what was found in each way."""
    evidence = Evidence(CodeRanker(model.quantizer.tables()), candidates.fused.half().numpy())
    hits: dict[str, list[list[Hit]]] = {method: [] for method in methods}
    touched = 0
    for start in range(0, len(queries.qids), SEARCH_BATCH):
        asked = queries.fused[start : start + SEARCH_BATCH]
        beams = search(model.generator, table, asked, settings)
        for query in range(len(asked)):
            for method in methods:
                answer = rank_items(
                    table, beams, query, asked[query], rerank=RERANK[method], evidence=evidence, k=DEPTH
                )
                hits[method].append(_hits(candidates, answer.items, answer.scores))
            touched += answer.touched
    return _Generated(hits, touched / len(queries.qids))


def _hits(candidates: PoolCandidates, items: np.ndarray, scores: np.ndarray) -> list[Hit]:
    return [
        Hit(did_of(int(candidates.dids[item])), float(score))
        for item, score in zip(items, scores, strict=True)
    ]
