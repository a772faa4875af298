"""The methods of the results table: exact search, and search by beams led by the generator or by geometry."""

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
"""Hits kept for each query; as deep as recall is measured."""
SEARCH_BATCH: Final = 64
BLOCK: Final = 16_384
"""Candidates that exact search reads at a time."""


class BeamMethod(NamedTuple):
    """A method that searches by beams: what leads them, and what orders the items found."""

    by: Literal["generator", "geometry"]
    rerank: Literal["none", "codes", "embeddings"]
    is_raw: bool = False
    """Whether the embeddings are the encoder's features and not the fused ones."""


BEAM_METHODS: Final = {
    "routing+codes": BeamMethod("geometry", "codes"),
    "routing+embeddings": BeamMethod("geometry", "embeddings"),
    "generative": BeamMethod("generator", "none"),
    "generative+codes": BeamMethod("generator", "codes"),
    "generative+embeddings": BeamMethod("generator", "embeddings"),
    "generative+raw": BeamMethod("generator", "embeddings", is_raw=True),
}
HUBNESS: Final = "exact-fused+hubness"
"""Exact search by fused embeddings, less what densities cost."""
FUSED: Final = frozenset({"exact-fused", HUBNESS, "routing+embeddings", "generative+embeddings"})
"""Methods that need every candidate's fused embedding."""


class PoolCandidates:
    """The candidates of one pool; features, codes and embeddings stay on disk until they are needed.

    Parameters
    ----------
    features
        features of many candidates; may be memory-mapped.
    arrays
        codes (and embeddings) of as many candidates; None for an encoder without a model.
    rows
        the rows of those in the pool, in its order; all of them by default.
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
        place = int(np.searchsorted(self._sorted_dids, number))
        return place < len(self) and int(self._sorted_dids[place]) == number

    @cached_property
    def dids(self) -> Int64[np.ndarray, " items"]:
        """Candidate ids as UniIR's integers."""
        dids: np.ndarray = self._features.ids[self._rows]
        return dids

    @cached_property
    def _sorted_dids(self) -> np.ndarray:
        return np.sort(self.dids)

    def raw(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Return unit sums of the encoder's features."""
        return F.normalize(
            torch.from_numpy(self._features.gather(self._rows[places]).total()), dim=-1
        )

    @property
    def _kept(self) -> ItemArrays:
        if self._arrays is None:
            raise ValueError("these candidates have no codes")
        return self._arrays

    @cached_property
    def codes(self) -> Int16[np.ndarray, "items columns"]:
        """Codes of the IDs, then half norms and densities."""
        codes: np.ndarray = self._kept.codes[self._rows]
        return codes

    @cached_property
    def table(self) -> IdTable:
        """The ID table."""
        return IdTable.build(self.codes, self._kept.code_cosine[self._rows])

    @property
    def id_bytes(self) -> float:
        """Bytes of the table's IDs for each candidate."""
        return self.table.nbytes / len(self)

    def fused(self, places: slice | np.ndarray) -> Float[Tensor, "items dim"]:
        """Return the unit embeddings that IDs are made from, as stored in 16 bits."""
        if self._kept.embeddings is None:
            raise ValueError("fused embeddings were not kept")
        return torch.from_numpy(self._kept.embeddings[self._rows[places]]).float()

    @cached_property
    def densities(self) -> UInt8[np.ndarray, " items"] | None:
        """Density around each candidate, where fused embeddings are kept."""
        kept = self._kept.densities
        return None if kept is None else kept[self._rows]

    def did(self, item: int) -> str:
        """Return the id of the candidate at a place of the pool."""
        return did_of(int(self.dids[item]))

    def hits(self, items: np.ndarray, scores: np.ndarray) -> list[Hit]:
        """Return items of the pool with their scores, for a run."""
        return [
            Hit(self.did(item), score)
            for item, score in zip(items.tolist(), scores.tolist(), strict=True)
        ]


class RowQueries(NamedTuple):
    """The queries of one row of the table, embedded."""

    qids: list[str]
    raw: Float[Tensor, "queries dim"]
    """Unit sums of the encoder's features."""
    fused: Float[Tensor, "queries dim"]
    """Fused embeddings; the same as ``raw`` for a rival that fuses by the sum alone."""


class MethodHits(NamedTuple):
    """Rankings of one method."""

    method: str
    hits: list[list[Hit]]
    """A ranking for each query."""
    bytes_per_item: float
    """Bytes that have to be stored of each candidate."""
    num_ranked: float
    """Candidates that were scored, on average over the queries."""


def find(
    model: Genius | Encoder,
    rows: Sequence[RowQueries],
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchSettings,
    *,
    depth: int = DEPTH,
) -> Iterator[list[MethodHits]]:
    """Answer the queries of each row by each of these methods, with ``depth`` hits each.

    An encoder alone knows ``exact-raw`` and no other method. Exact search reads the candidates once for all
    rows: with millions of them that is its cost.
    """
    vector_bytes = 2.0 * model.dim  # as they would be stored; exact search compares them in 32 bits
    nearest: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if isinstance(model, Genius) and HUBNESS in methods:
        fused = torch.cat([queries.fused for queries in rows])
        nearest[HUBNESS] = _search_less_density(model, fused, pool, settings, min(depth, len(pool)))
    nearest |= {
        method: knn_ground_truth(
            torch.cat([queries_of(queries) for queries in rows]).numpy(),
            (
                vectors_of(slice(start, start + BLOCK)).numpy()
                for start in range(0, len(pool), BLOCK)
            ),
            min(depth, len(pool)),
            faiss.METRIC_INNER_PRODUCT,
        )
        for method, (queries_of, vectors_of) in _exact_methods(model, pool, settings).items()
        if method in methods
    }
    by_beams = [method for method in BEAM_METHODS if method in methods]
    start = 0
    for queries in rows:
        own = slice(start, start + len(queries.qids))
        start = own.stop
        found = []
        for method, (scores, items) in nearest.items():
            hits = [pool.hits(*pair) for pair in zip(items[own], scores[own], strict=True)]
            size = (
                pool.id_bytes
                if method == "exact-codes"
                else vector_bytes + method.endswith("+hubness")
            )
            found.append(MethodHits(method, hits, size, float(len(pool))))
        if isinstance(model, Genius) and by_beams:
            found += _search(model, queries, pool, by_beams, settings, depth)
        yield found


def _exact_methods(
    model: Genius | Encoder, pool: PoolCandidates, settings: SearchSettings
) -> dict[str, tuple[Callable[[RowQueries], Tensor], Callable[[slice], Tensor]]]:
    """Return each method's query vectors, and its vectors of a range of candidates.

    All compare by inner product; a bias that is taken from an item's score is one more column.
    """
    if not isinstance(model, Genius):
        return {"exact-raw": (lambda queries: queries.raw, pool.raw)}
    among = model.ranker.spread.target_spread()
    density_cost = settings.density_weight

    def with_costs(queries: RowQueries) -> Tensor:
        """Costs count less for a query that is scaled up; scores stay in the units of the query."""
        products = as_floats(queries.fused) @ model.ranker.tables()[model.ranker.spread.level].T
        scales = torch.from_numpy(among.scale(products))
        return torch.cat([queries.fused, 1 / scales[:, None]], dim=1)

    def code_vectors(rows: slice) -> Tensor:
        codes = pool.codes[rows]
        vectors = torch.from_numpy(model.ranker.vectors(codes))
        return append_bias(vectors, model.ranker.costs(codes, density_cost=density_cost))

    return {
        "exact-raw": (lambda queries: queries.raw, pool.raw),
        "exact-fused": (lambda queries: queries.fused, pool.fused),
        "exact-codes": (with_costs, code_vectors),
    }


def _search_less_density(
    model: Genius,
    fused: Float[Tensor, "queries dim"],
    pool: PoolCandidates,
    settings: SearchSettings,
    depth: int,
) -> tuple[Float32[np.ndarray, "queries depth"], Int64[np.ndarray, "queries depth"]]:
    """Return scores and candidates of the best products of each query, less what densities cost.

    Densities fade near a query, so a score is no inner product. It is in the units of the query:
    costs count less for a query that is scaled up.
    """
    if pool.densities is None:
        raise ValueError("fused embeddings were not kept")
    spread = model.ranker.spread
    products = as_floats(fused) @ model.ranker.tables()[spread.level].T
    costs = np.float32(settings.density_weight) / spread.target_spread().scale(products)
    best = np.full((len(fused), depth), -np.inf, dtype=np.float32)
    items = np.zeros((len(fused), depth), dtype=np.int64)
    for start in range(0, len(pool), BLOCK):
        vectors = as_floats(pool.fused(slice(start, start + BLOCK)))
        densities = decode_densities(pool.densities[start : start + BLOCK])
        numbers = np.arange(start, start + len(vectors))
        for first in range(0, len(fused), SEARCH_BATCH):
            rows = slice(first, first + SEARCH_BATCH)
            products = as_floats(fused[rows]) @ vectors.T
            scores = products - costs[rows, None] * fade(products) * densities
            scores = np.concatenate([best[rows], scores], axis=1)
            known = np.concatenate([items[rows], np.tile(numbers, (len(products), 1))], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :depth]
            best[rows] = np.take_along_axis(scores, order, axis=1)
            items[rows] = np.take_along_axis(known, order, axis=1)
    return best, items


def append_bias(
    vectors: Float[Tensor, "items dim"], costs: Float32[np.ndarray, " items"]
) -> Float[Tensor, "items longer"]:
    """Append the negated costs to vectors, which a further number of the queries multiplies."""
    return torch.cat([vectors, -torch.from_numpy(costs).to(vectors)[:, None]], dim=1)


def _search(
    model: Genius,
    queries: RowQueries,
    pool: PoolCandidates,
    methods: Sequence[str],
    settings: SearchSettings,
    depth: int,
) -> list[MethodHits]:
    """Search by beams and order the items found by each method."""
    segments = [SearchSegment(pool.table)]
    densities = None if pool.densities is None else [pool.densities]
    evidence = {
        False: Evidence(model.ranker, [pool.fused], densities=densities),
        True: Evidence(model.ranker, [pool.raw], is_raw=True),
    }
    configs = {method: _config(BEAM_METHODS[method], settings) for method in methods}
    shared = {
        method: (BEAM_METHODS[method].by, _beam_config(config))
        for method, config in configs.items()
    }
    hits: dict[str, list[list[Hit]]] = {method: [] for method in methods}
    num_ranked = dict.fromkeys(methods, 0)
    for start in range(0, len(queries.qids), SEARCH_BATCH):
        fused = queries.fused[start : start + SEARCH_BATCH]
        beams = {
            (by, config): find_beams(
                model.router if by == "geometry" else model.decoder, segments, fused, config
            )
            for by, config in set(shared.values())
        }
        for query in range(len(fused)):
            for method in methods:
                is_raw = BEAM_METHODS[method].is_raw
                ranked = rank_items(
                    segments,
                    beams[shared[method]],
                    query,
                    queries.raw[start + query] if is_raw else fused[query],
                    config=configs[method],
                    evidence=evidence[is_raw],
                    k=depth,
                    code_vector=fused[query],
                )
                hits[method].append(pool.hits(ranked.items, ranked.scores))
                num_ranked[method] += ranked.num_ranked
    found = []
    for method in methods:
        size = pool.id_bytes
        if BEAM_METHODS[method].rerank == "embeddings":
            size += 2.0 * model.dim + (not BEAM_METHODS[method].is_raw)  # the density is a byte
        found.append(MethodHits(method, hits[method], size, num_ranked[method] / len(queries.qids)))
    return found


def _config(method: BeamMethod, settings: SearchSettings) -> SearchSettings:
    """Return the settings of one method; geometry has no probabilities to normalise."""
    own = dataclasses.replace(settings, rerank=method.rerank)
    if method.by == "generator":
        return own
    return dataclasses.replace(own, scores="level")


def _beam_config(config: SearchSettings) -> SearchSettings:
    """Return settings under which methods can share beams.

    All share one full search, unless a re-ranking depends on where its own would have stopped.
    """
    stops_early = config.rerank != "none" and bool(config.candidates)
    return dataclasses.replace(config, rerank="codes" if stops_early else "none")
