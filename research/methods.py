"""The methods of the results table: exact search, and beam search by generator or by geometry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

import faiss
import numpy as np
import torch
from faiss.contrib.exhaustive_search import knn_ground_truth
from jaxtyping import Float, Float32, Int16, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchSettings
from genius_search.data.features import Features
from genius_search.encoders.base import Encoder
from genius_search.index.writer import ItemArrays
from genius_search.model import Genius
from genius_search.nn.codebooks import as_floats
from genius_search.nn.spread import decode_densities, fade
from genius_search.records import candidate_number, did_of
from genius_search.search.beam import find_beams, rank_items
from genius_search.search.rank import Evidence
from genius_search.search.table import IdTable, SearchSegment
from research.runs import Hit

DEPTH: Final = 100
"""Hits of each query; as deep as recall is measured."""
SEARCH_BATCH: Final = 64
CANDIDATE_BLOCK: Final = 16_384
"""Candidates that exact search reads at a time."""


class BeamMethod(NamedTuple):
    """A method of beam search."""

    router: Literal["generator", "geometry"]
    """Model that scores the beams."""
    rerank: Literal["none", "codes", "embeddings"]
    """Representation of the items that ranks them; ``none``: the router's scores."""
    is_raw: bool = False
    """Whether the embeddings are the encoder's features instead of fused embeddings."""


BEAM_METHODS: Final = {
    "routing+codes": BeamMethod("geometry", "codes"),
    "routing+embeddings": BeamMethod("geometry", "embeddings"),
    "generative": BeamMethod("generator", "none"),
    "generative+codes": BeamMethod("generator", "codes"),
    "generative+embeddings": BeamMethod("generator", "embeddings"),
    "generative+raw": BeamMethod("generator", "embeddings", is_raw=True),
}
HUBNESS: Final = "exact-fused+hubness"
"""Exact search by fused embeddings, with densities subtracted from scores."""
FUSED: Final = frozenset({"exact-fused", HUBNESS, "routing+embeddings", "generative+embeddings"})
"""Methods that need every candidate's fused embedding."""


class PoolCandidates:
    """The candidates of one pool; features, codes and embeddings are read when they are needed.

    Parameters
    ----------
    features
        features of candidates of this pool and of other pools; may be memory-mapped.
    arrays
        codes and, possibly, embeddings of the same candidates; None for an encoder alone.
    rows
        rows of this pool's candidates, in order; default: all.
    """

    def __init__(
        self,
        features: Features,
        arrays: ItemArrays | None = None,
        rows: Int64[np.ndarray, " items"] | None = None,
    ) -> None:
        self._features = features
        self._arrays = arrays
        self._rows = np.arange(len(features)) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, did: object) -> bool:
        if not isinstance(did, str):
            return False
        number = candidate_number(did)
        position = int(np.searchsorted(self._sorted_dids, number))
        return position < len(self) and int(self._sorted_dids[position]) == number

    @cached_property
    def dids(self) -> Int64[np.ndarray, " items"]:
        """Candidate ids as UniIR's integers."""
        dids: np.ndarray = self._features.ids[self._rows]
        return dids

    @cached_property
    def _sorted_dids(self) -> np.ndarray:
        return np.sort(self.dids)

    def raw(self, positions: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Return normalised sums of the encoder's features."""
        features = self._features.gather(self._rows[positions])
        return F.normalize(torch.from_numpy(features.total()), dim=-1)

    @property
    def _encoded(self) -> ItemArrays:
        if self._arrays is None:
            raise ValueError("these candidates have no codes")
        return self._arrays

    @cached_property
    def codes(self) -> Int16[np.ndarray, "items columns"]:
        """Codes of the IDs, then half norms and densities."""
        codes: np.ndarray = self._encoded.codes[self._rows]
        return codes

    @cached_property
    def table(self) -> IdTable:
        """The ID table."""
        return IdTable.build(self.codes, self._encoded.code_cosine[self._rows])

    @property
    def id_bytes(self) -> float:
        """Bytes of the table's IDs for each candidate."""
        return self.table.nbytes / len(self)

    def fused(self, positions: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Return the normalised embeddings that IDs are made from, as stored in 16 bits."""
        if self._encoded.embeddings is None:
            raise ValueError("fused embeddings were not stored")
        return torch.from_numpy(self._encoded.embeddings[self._rows[positions]]).float()

    @cached_property
    def densities(self) -> UInt8[np.ndarray, " items"] | None:
        """Density around each candidate, if fused embeddings are stored."""
        densities = self._encoded.densities
        return None if densities is None else densities[self._rows]

    def did(self, item: int) -> str:
        """Return the id of the candidate at a position of the pool."""
        return did_of(int(self.dids[item]))

    def hits(self, items: np.ndarray, scores: np.ndarray) -> list[Hit]:
        """Return the ranking of items of the pool, for a run."""
        pairs = zip(items.tolist(), scores.tolist(), strict=True)
        return [Hit(self.did(item), score) for item, score in pairs]


class RowQueries(NamedTuple):
    """The embedded queries of one row of the table."""

    qids: list[str]
    raw: Float[Tensor, "queries dim"]
    """Normalised sums of the encoder's features."""
    fused: Float[Tensor, "queries dim"]
    """Fused embeddings; ``raw`` if the sum is the only fusion."""


class MethodHits(NamedTuple):
    """Rankings of one method."""

    method: str
    hits: list[list[Hit]]
    """A ranking for each query."""
    bytes_per_item: float
    """Bytes that the method stores for each candidate."""
    num_ranked: float
    """Mean number of candidates that were scored for a query."""


def find(
    model: Genius | Encoder,
    rows: Sequence[RowQueries],
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchSettings,
    *,
    depth: int = DEPTH,
) -> Iterator[list[MethodHits]]:
    """Yield the hits of each row's queries by each method, with ``depth`` hits for each query.

    An encoder alone has only the method ``exact-raw``. Exact search reads the candidates once for
    all rows, as this is its main cost.
    """
    num_hits = min(depth, len(pool))
    exact: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if isinstance(model, Genius) and HUBNESS in methods:
        fused = torch.cat([queries.fused for queries in rows])
        exact[HUBNESS] = _search_with_densities(model, fused, pool, settings, num_hits)
    for method, vectors in _exact_methods(model, pool, settings).items():
        if method in methods:
            query_vectors = torch.cat([vectors.of_queries(queries) for queries in rows])
            blocks = (
                vectors.of_candidates(slice(start, start + CANDIDATE_BLOCK)).numpy()
                for start in range(0, len(pool), CANDIDATE_BLOCK)
            )
            exact[method] = knn_ground_truth(
                query_vectors.numpy(), blocks, num_hits, faiss.METRIC_INNER_PRODUCT
            )
    beam_methods = [method for method in BEAM_METHODS if method in methods]
    start = 0
    for queries in rows:
        row_queries = slice(start, start + len(queries.qids))
        start = row_queries.stop
        results = []
        for method, (scores, items) in exact.items():
            pairs = zip(items[row_queries], scores[row_queries], strict=True)
            hits = [pool.hits(*pair) for pair in pairs]
            size = _exact_bytes(method, model, pool)
            results.append(MethodHits(method, hits, size, float(len(pool))))
        if isinstance(model, Genius) and beam_methods:
            results += _search_by_beams(model, queries, pool, beam_methods, settings, depth)
        yield results


def _exact_bytes(method: str, model: Genius | Encoder, pool: PoolCandidates) -> float:
    """Return the bytes that exact search stores for each candidate."""
    if method == "exact-codes":
        return pool.id_bytes
    # Vectors would be stored in 16 bits, though they are compared in 32; a density is a byte.
    return 2.0 * model.dim + (method == HUBNESS)


class _ExactVectors(NamedTuple):
    """Vectors whose inner products are the scores of exact search."""

    of_queries: Callable[[RowQueries], Tensor]
    of_candidates: Callable[[slice], Tensor]


def _exact_methods(
    model: Genius | Encoder, pool: PoolCandidates, settings: SearchSettings
) -> dict[str, _ExactVectors]:
    """Return the vectors of each method; a bias of a candidate is another column."""
    raw = _ExactVectors(lambda queries: queries.raw, pool.raw)
    if not isinstance(model, Genius):
        return {"exact-raw": raw}
    ranker = model.ranker
    spread = ranker.spread.target_spread()

    def append_bias_scale(queries: RowQueries) -> Tensor:
        """Append the factor of candidates' costs, which is lower if a query is scaled up."""
        products = as_floats(queries.fused) @ ranker.tables()[ranker.spread.level].T
        scales = torch.from_numpy(spread.scale(products))
        return torch.cat([queries.fused, 1 / scales[:, None]], dim=1)

    def make_code_vectors(rows: slice) -> Tensor:
        codes = pool.codes[rows]
        vectors = torch.from_numpy(ranker.vectors(codes))
        return append_bias(vectors, ranker.costs(codes, density_cost=settings.density_weight))

    return {
        "exact-raw": raw,
        "exact-fused": _ExactVectors(lambda queries: queries.fused, pool.fused),
        "exact-codes": _ExactVectors(append_bias_scale, make_code_vectors),
    }


def append_bias(
    vectors: Float[Tensor, "items dim"], costs: Float32[np.ndarray, " items"]
) -> Float[Tensor, "items longer"]:
    """Append the negated costs to vectors; queries have a factor at this position."""
    return torch.cat([vectors, -torch.from_numpy(costs).to(vectors)[:, None]], dim=1)


def _search_with_densities(
    model: Genius,
    fused: Float[Tensor, "queries dim"],
    pool: PoolCandidates,
    settings: SearchSettings,
    depth: int,
) -> tuple[Float32[np.ndarray, "queries depth"], Int64[np.ndarray, "queries depth"]]:
    """Return scores and positions of the best candidates, with densities subtracted from scores.

    The score of item x is q·x − w · fade(q·x) · density(x), where w is the density weight divided
    by the scale of query q. It is not an inner product, as the effect of a density fades near a
    query.
    """
    if pool.densities is None:
        raise ValueError("fused embeddings were not stored")
    spread = model.ranker.spread
    products = as_floats(fused) @ model.ranker.tables()[spread.level].T
    weights = np.float32(settings.density_weight) / spread.target_spread().scale(products)
    best_scores = np.full((len(fused), depth), -np.inf, dtype=np.float32)
    best_items = np.zeros((len(fused), depth), dtype=np.int64)
    for start in range(0, len(pool), CANDIDATE_BLOCK):
        vectors = as_floats(pool.fused(slice(start, start + CANDIDATE_BLOCK)))
        densities = decode_densities(pool.densities[start : start + CANDIDATE_BLOCK])
        block = np.arange(start, start + len(vectors))
        for first in range(0, len(fused), SEARCH_BATCH):
            rows = slice(first, first + SEARCH_BATCH)
            products = as_floats(fused[rows]) @ vectors.T
            scores = products - weights[rows, None] * fade(products) * densities
            scores = np.concatenate([best_scores[rows], scores], axis=1)
            block_items = np.tile(block, (len(products), 1))
            items = np.concatenate([best_items[rows], block_items], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
            best_scores[rows] = np.take_along_axis(scores, order, axis=1)
            best_items[rows] = np.take_along_axis(items, order, axis=1)
    return best_scores, best_items


def _search_by_beams(
    model: Genius,
    queries: RowQueries,
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchSettings,
    depth: int,
) -> list[MethodHits]:
    """Search by beams and rank the items by each method."""
    segments = [SearchSegment(pool.table)]
    densities = None if pool.densities is None else [pool.densities]
    evidence = {
        False: Evidence(model.ranker, [pool.fused], densities=densities),
        True: Evidence(model.ranker, [pool.raw], is_raw=True),
    }
    configs = {method: _method_config(BEAM_METHODS[method], settings) for method in methods}
    beam_keys = {
        method: (BEAM_METHODS[method].router, _beam_config(config))
        for method, config in configs.items()
    }
    hits: dict[str, list[list[Hit]]] = {method: [] for method in methods}
    num_ranked = dict.fromkeys(methods, 0)
    for start in range(0, len(queries.qids), SEARCH_BATCH):
        fused = queries.fused[start : start + SEARCH_BATCH]
        beams = {
            (router, config): find_beams(
                model.router if router == "geometry" else model.decoder, segments, fused, config
            )
            for router, config in set(beam_keys.values())
        }
        for query in range(len(fused)):
            for method in methods:
                is_raw = BEAM_METHODS[method].is_raw
                ranked = rank_items(
                    segments,
                    beams[beam_keys[method]],
                    query,
                    queries.raw[start + query] if is_raw else fused[query],
                    config=configs[method],
                    evidence=evidence[is_raw],
                    k=depth,
                    code_vector=fused[query],
                )
                hits[method].append(pool.hits(ranked.items, ranked.scores))
                num_ranked[method] += ranked.num_ranked
    results = []
    for method in methods:
        size = pool.id_bytes
        if BEAM_METHODS[method].rerank == "embeddings":
            size += 2.0 * model.dim + (not BEAM_METHODS[method].is_raw)  # the density is a byte
        mean_ranked = num_ranked[method] / len(queries.qids)
        results.append(MethodHits(method, hits[method], size, mean_ranked))
    return results


def _method_config(method: BeamMethod, settings: SearchSettings) -> SearchSettings:
    """Return the settings of one method; geometry has no probabilities to normalise."""
    config = dataclasses.replace(settings, rerank=method.rerank)
    if method.router == "generator":
        return config
    return dataclasses.replace(config, scores="level")


def _beam_config(config: SearchSettings) -> SearchSettings:
    """Return the settings of the beams; methods with equal ones share their beams.

    All methods share a complete beam search, except for re-rankings whose search stops early.
    """
    stops_early = config.rerank != "none" and bool(config.candidates)
    return dataclasses.replace(config, rerank="codes" if stops_early else "none")
