"""What each method of the results table finds: exact search, and generation with its ways of re-ranking."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float16, Int8, Int16, Int64
from torch import Tensor
from torch.nn import functional as F

from genius.config import SearchConfig
from genius.data.features import Features
from genius.data.records import candidate_number, did_of
from genius.evaluation.runs import Hit
from genius.model import Genius
from genius.search.allowed import Part
from genius.search.beam import search
from genius.search.exact import exact_search
from genius.search.searcher import Evidence, rank_items
from genius.search.segment import ItemArrays
from genius.search.table import IdTable

DEPTH: Final = 50
"""Hits kept for each query."""
SEARCH_BATCH: Final = 64
RERANK: Final[dict[str, Literal["none", "codes", "embeddings"]]] = {
    "generative": "none",
    "generative+codes": "codes",
    "generative+embeddings": "embeddings",
    "generative+raw": "embeddings",
}
"""What orders the items that were generated."""
FUSED: Final = frozenset({"exact-fused", "generative+embeddings"})
"""Methods that need every candidate's fused embedding."""


class PoolCandidates:
    """The candidates of one pool; vectors are read from disk when they are asked for.

    Parameters
    ----------
    features, arrays
        of many candidates; both may be memory-mapped.
    rows
        which of them are in the pool, in its order.
    """

    def __init__(self, features: Features, arrays: ItemArrays, rows: Int64[np.ndarray, " items"]) -> None:
        self._features = features
        self._arrays = arrays
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, did: object) -> bool:
        if not isinstance(did, str):
            return False
        number = candidate_number(did)
        place = int(np.searchsorted(self._sorted_dids, number))
        return place < len(self) and int(self._sorted_dids[place]) == number

    @cached_property
    def dids(self) -> Int64[np.ndarray, " items"]:
        """Candidate ids as UniIR's integers."""
        numbers: np.ndarray = self._features.ids[self._rows]
        return numbers

    @cached_property
    def _sorted_dids(self) -> np.ndarray:
        return np.sort(self.dids)

    @cached_property
    def codes(self) -> Int16[np.ndarray, "items levels"]:
        """IDs."""
        codes: np.ndarray = self._arrays.codes[self._rows]
        return codes

    @property
    def typicality(self) -> Float16[np.ndarray, " items"]:
        """Cosine between a candidate's embedding and the vector of its ID."""
        cosines: np.ndarray = self._arrays.typicality[self._rows]
        return cosines

    @property
    def modality(self) -> Int8[np.ndarray, " items"]:
        """Codes of the candidates' modalities."""
        modality: np.ndarray = self._features.modality[self._rows]
        return modality

    @cached_property
    def table(self) -> IdTable:
        """The ID table."""
        return IdTable.build(self.codes, self.typicality)

    @property
    def id_bytes(self) -> float:
        """Bytes of the table's IDs for each candidate."""
        return self.table.nbytes / len(self)

    def raw(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Unit sums of the encoder's features."""
        return F.normalize(self._features.gather(self._rows[places]).total(), dim=-1)

    def fused(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """The unit embeddings that IDs are made from, as stored in 16 bits."""
        if self._arrays.embeddings is None:
            raise ValueError("fused embeddings were not kept")
        return torch.from_numpy(self._arrays.embeddings[self._rows[places]]).float()


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
    rows: Sequence[RowQueries],
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchConfig,
) -> Iterator[list[Found]]:
    """Answer the queries of each row by each of these methods.

    Exact search goes through the candidates once, whichever the row: at millions of them that is what it
    costs.
    """
    vector_bytes = 2.0 * model.dim  # as they would be stored; exact search compares them in 32 bits
    nearest = {
        rival.method: exact_search(
            torch.cat([rival.queries(queries) for queries in rows]),
            rival.vectors,
            len(pool),
            k=DEPTH,
            device=model.quantizer.device,
        )
        for rival in _exact(model, pool)
        if rival.method in methods
    }
    generating = [method for method in RERANK if method in methods]
    start = 0
    for queries in rows:
        here = slice(start, start + len(queries.qids))
        start = here.stop
        found = []
        for method, everything in nearest.items():
            hits = [
                _hits(pool, items, scores)
                for items, scores in zip(everything.items[here], everything.scores[here], strict=True)
            ]
            size = pool.id_bytes if method == "exact-codes" else vector_bytes
            found.append(Found(method, hits, size, float(len(pool))))
        if generating:
            generated = _generate(model, queries, pool, generating, settings)
            for method in generating:
                size = pool.id_bytes + (vector_bytes if RERANK[method] == "embeddings" else 0.0)
                found.append(Found(method, generated[method].hits, size, generated[method].touched))
        yield found


class _Rival(NamedTuple):
    method: str
    queries: Callable[[RowQueries], Tensor]
    """The vectors it compares with."""
    vectors: Callable[[slice], Tensor]
    """Of a range of the pool's candidates."""


def _exact(model: Genius, pool: PoolCandidates) -> list[_Rival]:
    return [
        _Rival("exact-raw", lambda queries: queries.raw, pool.raw),
        _Rival("exact-fused", lambda queries: queries.fused, pool.fused),
        _Rival(
            "exact-codes",
            lambda queries: queries.fused,
            lambda rows: model.quantizer.decode(torch.from_numpy(pool.codes[rows].astype(np.int64))),
        ),
    ]


class _Generated(NamedTuple):
    hits: list[list[Hit]]
    touched: float


def _generate(
    model: Genius,
    queries: RowQueries,
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchConfig,
) -> dict[str, _Generated]:
    """Generate, and order what was found in each way.

    Once for all ways; twice with a leaf budget, which stops earlier where hits are ordered anew.
    """
    parts = [Part(pool.table)]
    evidence = {False: Evidence(model.ranker, [pool.fused]), True: Evidence(model.ranker, [pool.raw])}
    configs = {method: dataclasses.replace(settings, rerank=RERANK[method]) for method in methods}
    stops = {method: bool(settings.leaves) and RERANK[method] != "none" for method in methods}
    hits: dict[str, list[list[Hit]]] = {method: [] for method in methods}
    touched = dict.fromkeys(methods, 0)
    for start in range(0, len(queries.qids), SEARCH_BATCH):
        asked = queries.fused[start : start + SEARCH_BATCH]
        beams = {
            stop: search(
                model.decoder, parts, asked, dataclasses.replace(settings, rerank="codes" if stop else "none")
            )
            for stop in set(stops.values())
        }
        for query in range(len(asked)):
            for method in methods:
                is_raw = method == "generative+raw"
                answer = rank_items(
                    parts,
                    beams[stops[method]],
                    query,
                    queries.raw[start + query] if is_raw else asked[query],
                    config=configs[method],
                    evidence=evidence[is_raw],
                    k=DEPTH,
                    for_codes=asked[query],
                )
                hits[method].append(_hits(pool, answer.items, answer.scores))
                touched[method] += answer.touched
    return {method: _Generated(hits[method], touched[method] / len(queries.qids)) for method in methods}


def _hits(pool: PoolCandidates, items: np.ndarray, scores: np.ndarray) -> list[Hit]:
    return [
        Hit(did_of(int(pool.dids[item])), float(score)) for item, score in zip(items, scores, strict=True)
    ]
