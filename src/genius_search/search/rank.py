"""From beams to ranked items: scores by codes and by embeddings, and exact search to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Integer, UInt8
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchConfig
from genius_search.errors import BadData, UsageError
from genius_search.nn.density import decode_densities, decode_half_norms
from genius_search.search.beam import Beams, topk
from genius_search.search.table import Part, Restriction, expand_ranges

FEW: Final = 4
"""Vectors of IDs are summed one by one if they have at most one code for this many code vectors."""


class CodeRanker:
    """Scores IDs against query embeddings by their code vectors, their norm and the density around them.

    Deviation 20: the paper knows no re-ranking without stored embeddings.

    Norm and density stand behind the codes of an ID (:mod:`genius_search.nn.density`). IDs may come as codes
    alone (pools that were drawn to measure speed): then they are scored by the inner product alone.

    Parameters
    ----------
    tables
        the code vectors of each level.
    """

    def __init__(self, tables: list[Float[Tensor, "_ dim"]]) -> None:
        self._vectors = torch.cat([table.detach().cpu().float() for table in tables])
        sizes = [len(table) for table in tables]
        self._offsets = np.array([0, *accumulate(sizes)][:-1], dtype=np.int64)

    def vectors(self, ids: Integer[np.ndarray, "ids columns"]) -> Float[Tensor, "ids dim"]:
        """Return the vectors that IDs stand for: the sums of their code vectors."""
        return F.embedding_bag(torch.from_numpy(self._places(ids)), self._vectors, mode="sum")

    def scores(
        self,
        query: Float[Tensor, " dim"],
        ids: Integer[np.ndarray, "ids columns"],
        *,
        density_weight: float = 0.0,
    ) -> Float32[np.ndarray, " ids"]:
        """Return how near IDs are to a query.

        That is the inner product minus half the squared norm, which orders IDs as their distance does, minus
        ``density_weight`` times the density.
        """
        places = self._places(ids)
        if places.size * FEW > len(self._vectors):
            products = (query[None].float().cpu() @ self._vectors.T)[0].numpy()
            scores: np.ndarray = products[places].sum(axis=1)
        else:  # a few IDs are not worth the products with all code vectors
            scores = (self.vectors(ids) @ query.float().cpu()).numpy()
        scores -= self.costs(ids, density_weight=density_weight)
        return scores

    def costs(
        self, ids: Integer[np.ndarray, "ids columns"], *, density_weight: float
    ) -> Float32[np.ndarray, " ids"]:
        """Return what is subtracted from the inner products of IDs, whatever the query."""
        num_levels = len(self._offsets)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        return decode_half_norms(ids[:, num_levels]) + np.float32(density_weight) * self.densities(ids)

    def densities(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, " ids"]:
        """Return the density around IDs."""
        num_levels = len(self._offsets)
        if ids.shape[1] == num_levels:
            return np.zeros(len(ids), dtype=np.float32)
        return decode_densities(ids[:, num_levels + 1])

    def _places(self, ids: Integer[np.ndarray, "ids columns"]) -> Int64[np.ndarray, "ids levels"]:
        """Return the places of the codes among the vectors of all levels."""
        return np.asarray(ids[:, : len(self._offsets)] + self._offsets)


class Ranking(NamedTuple):
    """The items that one query found, best first."""

    parts: Int64[np.ndarray, " hits"]
    """The part that each hit is in."""
    items: Int64[np.ndarray, " hits"]
    """Item rows there."""
    rows: Int64[np.ndarray, " hits"]
    """Rows of their IDs in the part's table."""
    scores: Float32[np.ndarray, " hits"]
    """Never increasing."""
    beams: Int64[np.ndarray, " hits"]
    """The beam that each item came from."""
    touched: int
    """Items under all beams, before the cut."""

    def take(self, chosen: Int64[np.ndarray, " kept"] | slice) -> Ranking:
        """Return some of the hits."""
        return Ranking(
            self.parts[chosen],
            self.items[chosen],
            self.rows[chosen],
            self.scores[chosen],
            self.beams[chosen],
            self.touched,
        )


Vectors = Callable[[Int64[np.ndarray, " items"]], Float[Tensor, "items dim"]]
"""Returns the unit embeddings of a part's item rows."""


class Evidence(NamedTuple):
    """What re-ranking compares queries with; ranking by what is None is an error."""

    codes: CodeRanker | None = None
    embeddings: Sequence[Vectors] | None = None
    """For each part."""
    is_raw: bool = False
    """Whether the embeddings are the encoder's features and not the fused ones that IDs are made from."""
    densities: Sequence[UInt8[np.ndarray, " items"]] | None = None
    """Density around the items of each part, by row. Where it is not known, that around their IDs is taken,
    which is less exact."""


def rank_items(
    parts: Sequence[Part],
    beams: Beams,
    query: int,
    embedding: Float[Tensor, " dim"],
    *,
    config: SearchConfig,
    evidence: Evidence,
    k: int,
    restriction: Restriction | None = None,
    for_codes: Float[Tensor, " dim"] | None = None,
) -> Ranking:
    """Rank the items under the beams of one query.

    Without re-ranking they keep the generator's order; items that share an ID come most typical first. By
    ``codes`` and ``embeddings`` all items under all beams are ordered anew; ``embedding`` is the query's
    vector in the space of what they are compared with (the paper's GENIUS^R: sums of the encoder's features
    on both sides). With a ``config.shortlist`` only so many of them (at least ``k``), the best by codes, are
    compared by their embeddings; ``for_codes`` is the query's vector in the space of the codes, where the
    stored embeddings have another.

    With a ``config.generator_weight`` an ID's score by codes is raised by so many times the log-probability
    of its beam. All beams of a query were decoded equally deep, so what is added is comparable: it is that
    of the prefix where decoding stopped, and nothing for a query that was finished before the first code.

    Scores by codes and by fused embeddings are lowered by ``config.density_weight`` times the density around
    the ID or the item, where it is known. By raw embeddings the order is the paper's.

    Raises
    ------
    UsageError
        The evidence that the re-ranking needs is not there.
    """
    if config.rerank == "embeddings" and evidence.embeddings is None:
        raise UsageError(
            "this index stores no embeddings; rank by codes, or create it with --embeddings fused"
        )
    restriction = restriction or tuple(part.alive for part in parts)
    ids = _ids_under(beams, query, restriction)
    scores: np.ndarray = np.zeros(len(ids.row), dtype=np.float32)
    if config.rerank == "none":
        scores = _log_probabilities(beams, query)[ids.beam]
    elif config.rerank == "codes" or config.shortlist:
        if evidence.codes is None:
            raise UsageError("ranking by codes needs the model's codebooks")
        own = embedding if config.rerank == "codes" or for_codes is None else for_codes
        rows = _table_rows(parts, ids)
        scores = evidence.codes.scores(own, rows, density_weight=config.density_weight)
        if config.generator_weight:
            scores = scores + config.generator_weight * _log_probabilities(beams, query)[ids.beam]
    found = _items_of(parts, ids, scores, restriction)
    if config.rerank == "embeddings":
        if config.shortlist:
            found = found.take(topk(found.scores, max(k, config.shortlist)))
        found = found._replace(scores=_by_embeddings(parts, found, embedding, evidence, config))
    return found.take(topk(found.scores, k))


class _Ids(NamedTuple):
    """IDs under the beams of one query, beam after beam."""

    part: Int64[np.ndarray, " ids"]
    row: Int64[np.ndarray, " ids"]
    beam: Int64[np.ndarray, " ids"]


def _log_probabilities(beams: Beams, query: int) -> Float32[np.ndarray, " beams"]:
    """Return the log-probability of each beam, for the levels that were decoded."""
    return np.asarray(np.nansum(beams.log_probabilities[query], axis=1, dtype=np.float32))


def _ids_under(beams: Beams, query: int, restriction: Restriction) -> _Ids:
    """List the IDs under which something may be found."""
    found = []
    for number, allowed in enumerate(restriction):
        low, high = beams.low[query, :, number], beams.high[query, :, number]
        beam, row = expand_ranges(low, high) if allowed is None else allowed.ids.inside(low, high)
        found.append(_Ids(np.full(len(row), number), row, beam))
    if len(found) == 1:
        return found[0]
    together = _Ids(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    order = together.beam.argsort(kind="stable")
    return _Ids(*(values[order] for values in together))


def _table_rows(parts: Sequence[Part], ids: _Ids) -> Integer[np.ndarray, "ids columns"]:
    """Read the IDs from their tables: codes, then norm and density if they are kept."""
    rows = np.empty((len(ids.row), parts[0].table.num_levels), dtype=np.int16)
    for number, part in enumerate(parts):
        here = ids.part == number if len(parts) > 1 else slice(None)
        rows[here] = part.table.ids[ids.row[here]]
    return rows


def _items_of(parts: Sequence[Part], ids: _Ids, scores: np.ndarray, restriction: Restriction) -> Ranking:
    """List the items of all IDs that may be found, beam after beam, with the scores of their IDs."""
    found = []
    for number, (part, allowed) in enumerate(zip(parts, restriction, strict=True)):
        here = np.flatnonzero(ids.part == number)
        items, owner = part.table.buckets(ids.row[here])
        owner = here[owner]
        if allowed is not None:
            kept = np.flatnonzero(allowed.items[items])
            items, owner = items[kept], owner[kept]
        found.append((np.full(len(items), number), items, ids.row[owner], scores[owner], ids.beam[owner]))
    part_of, items, rows, item_scores, beams = (np.concatenate(column) for column in zip(*found, strict=True))
    ranking = Ranking(part_of, items, rows, item_scores, beams, touched=len(items))
    return ranking if len(parts) == 1 else ranking.take(ranking.beams.argsort(kind="stable"))


def _by_embeddings(
    parts: Sequence[Part], found: Ranking, embedding: Tensor, evidence: Evidence, config: SearchConfig
) -> Float32[np.ndarray, " hits"]:
    """Return the cosines of the items' embeddings with the query's, minus what their density costs."""
    scores = np.empty(len(found.items), dtype=np.float32)
    for number, vectors in enumerate(evidence.embeddings or ()):
        here = np.flatnonzero(found.parts == number)
        items = found.items[here]
        scores[here] = (vectors(items).float() @ embedding.float()).numpy()
        if config.density_weight and not evidence.is_raw:
            crowded: Float32[np.ndarray, " items"] | float = 0.0
            if evidence.densities is not None:
                crowded = decode_densities(evidence.densities[number][items])
            elif evidence.codes is not None:
                crowded = evidence.codes.densities(parts[number].table.ids[found.rows[here]])
            scores[here] -= np.float32(config.density_weight) * crowded
    return scores


def all_ids(parts: Sequence[Part], num_queries: int) -> Beams:
    """Return one beam for each query that holds all IDs, and for which nothing was decoded.

    Ordered by codes, this is the best that a search that decodes and then orders by codes can reach.
    """
    sizes = np.array([len(part.table) for part in parts], dtype=np.int64)
    low = np.zeros((num_queries, 1, len(parts)), dtype=np.int64)
    return Beams(low, low + sizes, np.zeros((num_queries, 1, 0), dtype=np.float32))


ITEM_BLOCK: Final = 16_384
QUERY_BLOCK: Final = 2_048
"""Scores of so many items and queries are in memory at once: 128 MiB."""


class Nearest(NamedTuple):
    """The items nearest to each query, best first."""

    items: Int64[np.ndarray, "queries hits"]
    """Item rows."""
    scores: Float32[np.ndarray, "queries hits"]
    """Inner products, never increasing."""


def exact_search(
    queries: Float[Tensor, "queries dim"],
    vectors: Callable[[slice], Float[Tensor, "items dim"]],
    num_items: int,
    *,
    k: int,
    device: torch.device | None = None,
) -> Nearest:
    """Return the ``k`` items of highest inner product (all, if there are fewer); equal ones by row.

    Parameters
    ----------
    vectors
        returns the vectors of a range of item rows, so that they need not all be in memory; it is called
        once for each range.
    device
        where products are computed; by default where the queries are.

    Raises
    ------
    BadData
        A vector holds NaN or infinity, which no order can place.
    """
    device = device or queries.device
    if not bool(queries.isfinite().all()):
        raise BadData("queries have vectors with NaN or infinity; embed them again")
    blocks = [block.to(device) for block in queries.split(QUERY_BLOCK)]
    found = [
        Nearest(np.zeros((len(block), 0), np.int64), np.zeros((len(block), 0), np.float32))
        for block in blocks
    ]
    for start in range(0, num_items, ITEM_BLOCK):
        stop = min(start + ITEM_BLOCK, num_items)
        items = vectors(slice(start, stop)).to(device).T
        if not bool(items.isfinite().all()):
            raise BadData(f"items {start} to {stop - 1} have vectors with NaN or infinity; embed them again")
        for number, block in enumerate(blocks):
            best = _best_columns(block @ items, k)
            # Earlier items stand first, so that the lower row comes first of equal scores.
            scores = np.concatenate([found[number].scores, best.scores], axis=1)
            rows = np.concatenate([found[number].items, best.items + start], axis=1)
            order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
            found[number] = Nearest(np.take_along_axis(rows, order, 1), np.take_along_axis(scores, order, 1))
    return Nearest(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


def _best_columns(products: Float[Tensor, "queries items"], k: int) -> Nearest:
    """Return the columns of each row's ``k`` highest scores, highest first, equal ones from left to right.

    ``Tensor.topk`` alone takes any of the scores that equal the lowest it takes, so rows with such ties are
    looked at again.
    """
    size = min(k, products.shape[1])
    top = products.topk(size, dim=1)
    lowest = top.values[:, -1:]
    tied = ((products >= lowest).sum(dim=1) > size).cpu().numpy()
    columns, scores = top.indices.cpu().numpy(), top.values.cpu().numpy()
    order = np.lexsort((columns, -scores), axis=1)
    columns, scores = np.take_along_axis(columns, order, 1), np.take_along_axis(scores, order, 1)
    for row in np.flatnonzero(tied):
        values = products[int(row)].cpu().numpy()
        enough = np.flatnonzero(values >= scores[row, -1])
        columns[row] = enough[topk(values[enough], size)]
        scores[row] = values[columns[row]]
    return Nearest(columns, scores)


def append_one(queries: Float[Tensor, "queries dim"]) -> Float[Tensor, "queries longer"]:
    """Return queries for vectors that :func:`append_bias` has made longer."""
    return F.pad(queries, (0, 1), value=1.0)


def append_bias(
    vectors: Float[Tensor, "items dim"], costs: Float32[np.ndarray, " items"]
) -> Float[Tensor, "items longer"]:
    """Return vectors whose inner products with :func:`append_one`'s are lower by the cost of each item."""
    column = torch.from_numpy(costs).to(vectors)
    return torch.cat([vectors, -column[:, None]], dim=1)
