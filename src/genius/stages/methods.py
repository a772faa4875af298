"""What each method of the results table finds: exact search, and beams with their ways of re-ranking."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float16, Int8, Int16, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from genius.config import SearchConfig
from genius.data.features import Features
from genius.data.records import candidate_number, did_of
from genius.evaluation.runs import Hit
from genius.model import Genius
from genius.models.marks import measured
from genius.search.allowed import Part
from genius.search.beam import search
from genius.search.exact import exact_search, less, with_one
from genius.search.searcher import Evidence, rank_items
from genius.search.segment import ItemArrays
from genius.search.table import IdTable

DEPTH: Final = 50
"""Hits kept for each query."""
SEARCH_BATCH: Final = 64


class Way(NamedTuple):
    """How a method that searches by beams finds items, and what orders them."""

    by: Literal["generator", "geometry"]
    """What leads the beams."""
    rerank: Literal["none", "codes", "embeddings"]
    is_raw: bool = False
    """Whether the embeddings are the encoder's features and not the fused ones."""


WAYS: Final = {
    "routing+codes": Way("geometry", "codes"),
    "routing+embeddings": Way("geometry", "embeddings"),
    "generative": Way("generator", "none"),
    "generative+codes": Way("generator", "codes"),
    "generative+embeddings": Way("generator", "embeddings"),
    "generative+raw": Way("generator", "embeddings", is_raw=True),
}
"""The methods that touch only a part of the pool."""
FUSED: Final = frozenset(
    {"exact-fused", "exact-fused+hubness", "routing+embeddings", "generative+embeddings"}
)
"""Methods that need every candidate's fused embedding."""


class PoolItems:
    """The candidates of one pool and their features, which are read from disk when they are asked for.

    Parameters
    ----------
    features
        of many candidates; may be memory-mapped.
    rows
        which of them are in the pool, in its order.
    """

    def __init__(self, features: Features, rows: Int64[np.ndarray, " items"]) -> None:
        self._features = features
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

    @property
    def modality(self) -> Int8[np.ndarray, " items"]:
        """Codes of the candidates' modalities."""
        modality: np.ndarray = self._features.modality[self._rows]
        return modality

    def raw(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Unit sums of the encoder's features."""
        return F.normalize(self._features.gather(self._rows[places]).total(), dim=-1)


class PoolCandidates(PoolItems):
    """The same with their IDs.

    Parameters
    ----------
    arrays
        of as many candidates as there are features; may be memory-mapped.
    """

    def __init__(self, features: Features, arrays: ItemArrays, rows: Int64[np.ndarray, " items"]) -> None:
        super().__init__(features, rows)
        self._arrays = arrays

    @cached_property
    def codes(self) -> Int16[np.ndarray, "items columns"]:
        """Codes of the IDs, then their marks."""
        codes: np.ndarray = self._arrays.codes[self._rows]
        return codes

    @property
    def typicality(self) -> Float16[np.ndarray, " items"]:
        """Cosine between a candidate's embedding and the vector of its ID."""
        cosines: np.ndarray = self._arrays.typicality[self._rows]
        return cosines

    @cached_property
    def table(self) -> IdTable:
        """The ID table."""
        return IdTable.build(self.codes, self.typicality)

    @property
    def id_bytes(self) -> float:
        """Bytes of the table's IDs for each candidate."""
        return self.table.nbytes / len(self)

    def fused(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """The unit embeddings that IDs are made from, as stored in 16 bits."""
        if self._arrays.embeddings is None:
            raise ValueError("fused embeddings were not kept")
        return torch.from_numpy(self._arrays.embeddings[self._rows[places]]).float()

    @cached_property
    def densities(self) -> UInt8[np.ndarray, " items"] | None:
        """How crowded it is around candidates, where their fused embeddings are kept."""
        kept = self._arrays.densities
        return None if kept is None else kept[self._rows]


class RowQueries(NamedTuple):
    """The queries of one row of the table, embedded."""

    qids: list[str]
    raw: Float[Tensor, "queries dim"]
    """Unit sums of the encoder's features."""
    fused: Float[Tensor, "queries dim"]
    """What GENIUS searches with; the same for a rival that fuses by the sum alone."""


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
        for rival in _exact(model, pool, settings)
        if rival.method in methods
    }
    crowded_bytes = vector_bytes + 1  # the density around it is a byte
    sizes = {"exact-codes": pool.id_bytes, "exact-fused+hubness": crowded_bytes}
    searching = [method for method in WAYS if method in methods]
    start = 0
    for queries in rows:
        here = slice(start, start + len(queries.qids))
        start = here.stop
        found = []
        for method, everything in nearest.items():
            hits = [
                hits_of(pool, items, scores)
                for items, scores in zip(everything.items[here], everything.scores[here], strict=True)
            ]
            found.append(Found(method, hits, sizes.get(method, vector_bytes), float(len(pool))))
        if searching:
            searched = _search(model, queries, pool, searching, settings)
            for method in searching:
                size = pool.id_bytes
                if WAYS[method].rerank == "embeddings":
                    size += vector_bytes if WAYS[method].is_raw else crowded_bytes
                found.append(Found(method, searched[method].hits, size, searched[method].touched))
        yield found


class _Rival(NamedTuple):
    method: str
    queries: Callable[[RowQueries], Tensor]
    """The vectors it compares with."""
    vectors: Callable[[slice], Tensor]
    """Of a range of the pool's candidates."""


def _exact(model: Genius, pool: PoolCandidates, settings: SearchConfig) -> list[_Rival]:
    """Inner products, and less what the ranking by codes and by embeddings takes from an item's score."""

    def crowded(rows: slice) -> Tensor:
        if pool.densities is None:
            raise ValueError("fused embeddings were not kept")
        return less(pool.fused(rows), np.float32(settings.hubness) * measured(pool.densities[rows]))

    def of_codes(rows: slice) -> Tensor:
        codes = pool.codes[rows]
        vectors = model.quantizer.decode(torch.from_numpy(codes.astype(np.int64)))
        return less(vectors, model.ranker.costs(codes, hubness=settings.hubness))

    return [
        _Rival("exact-raw", lambda queries: queries.raw, pool.raw),
        _Rival("exact-fused", lambda queries: queries.fused, pool.fused),
        _Rival("exact-fused+hubness", lambda queries: with_one(queries.fused), crowded),
        _Rival("exact-codes", lambda queries: with_one(queries.fused), of_codes),
    ]


class _Searched(NamedTuple):
    hits: list[list[Hit]]
    touched: float


class _Beams(NamedTuple):
    """What methods that share their beams have in common."""

    by: Literal["generator", "geometry"]
    config: SearchConfig


def _search(
    model: Genius,
    queries: RowQueries,
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchConfig,
) -> dict[str, _Searched]:
    """Search, and order what was found in each way."""
    parts = [Part(pool.table)]
    evidence = {
        False: Evidence(
            model.ranker, [pool.fused], densities=None if pool.densities is None else [pool.densities]
        ),
        True: Evidence(model.ranker, [pool.raw], is_raw=True),
    }
    configs = {method: _config(WAYS[method], settings) for method in methods}
    shared = {method: _beams(WAYS[method].by, config) for method, config in configs.items()}
    hits: dict[str, list[list[Hit]]] = {method: [] for method in methods}
    touched = dict.fromkeys(methods, 0)
    for start in range(0, len(queries.qids), SEARCH_BATCH):
        asked = queries.fused[start : start + SEARCH_BATCH]
        beams = {
            one: search(model.router if one.by == "geometry" else model.decoder, parts, asked, one.config)
            for one in set(shared.values())
        }
        for query in range(len(asked)):
            for method in methods:
                is_raw = WAYS[method].is_raw
                answer = rank_items(
                    parts,
                    beams[shared[method]],
                    query,
                    queries.raw[start + query] if is_raw else asked[query],
                    config=configs[method],
                    evidence=evidence[is_raw],
                    k=DEPTH,
                    for_codes=asked[query],
                )
                hits[method].append(hits_of(pool, answer.items, answer.scores))
                touched[method] += answer.touched
    return {method: _Searched(hits[method], touched[method] / len(queries.qids)) for method in methods}


def _config(way: Way, settings: SearchConfig) -> SearchConfig:
    """Geometry has no probabilities: none to normalise, and none to mix in."""
    own = dataclasses.replace(settings, rerank=way.rerank)
    return own if way.by == "generator" else dataclasses.replace(own, scores="level", mix=0.0)


def _beams(by: Literal["generator", "geometry"], config: SearchConfig) -> _Beams:
    """All ways share one full search, unless a re-ranking depends on where its own would have stopped.

    So it does with a leaf budget, and where the beams' probabilities are mixed in.
    """
    stops_early = config.rerank != "none" and bool(config.leaves or config.mix)
    return _Beams(by, dataclasses.replace(config, rerank="codes" if stops_early else "none"))


def hits_of(pool: PoolItems, items: np.ndarray, scores: np.ndarray) -> list[Hit]:
    """Items of a pool with their scores, for a run."""
    return [
        Hit(did_of(int(pool.dids[item])), float(score)) for item, score in zip(items, scores, strict=True)
    ]
