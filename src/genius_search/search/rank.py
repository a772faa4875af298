"""Answer queries: from beams to items, ordered by the chosen evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int16, Int64, Integer, UInt8
from torch import Tensor
from torch.nn import functional as F

from genius_search.config import SearchConfig
from genius_search.errors import BadData, UsageError
from genius_search.nn.density import decode_densities, decode_half_norms
from genius_search.search.beam import Beams, highest
from genius_search.search.table import Part, Restriction, expand_ranges

FEW: Final = 4
"""The vectors of IDs are summed one by one when all their codes are at most one of so many code vectors."""


class CodeRanker:
    """Scores IDs by look-ups of code-vector products, less their half norms and densities.

    Deviation 20: the paper knows no re-ranking without stored embeddings.

    IDs may come as codes alone (pools that were drawn to measure speed): then nothing is known of them but
    the inner product.

    Parameters
    ----------
    tables
        the code vectors of each level.
    """

    def __init__(self, tables: list[Float[Tensor, "_ dim"]]) -> None:
        self._vectors = torch.cat([table.detach().cpu().float() for table in tables])
        sizes = [len(table) for table in tables]
        self._offsets = np.array([0, *accumulate(sizes)][:-1], dtype=np.int64)

    def products(self, queries: Float[Tensor, "queries dim"]) -> Float32[np.ndarray, "queries codes"]:
        """Inner products with all code vectors, level after level."""
        products: np.ndarray = (queries.float().cpu() @ self._vectors.T).numpy()
        return products

    def vectors(self, ids: Integer[np.ndarray, "ids columns"]) -> Float[Tensor, "ids dim"]:
        """What IDs stand for: the sums of their code vectors."""
        return F.embedding_bag(torch.from_numpy(self._places(ids)), self._vectors, mode="sum")

    def look_up(
        self, products: Float32[np.ndarray, " codes"], ids: Integer[np.ndarray, "ids columns"]
    ) -> Float32[np.ndarray, " ids"]:
        """Inner products of one query with the vectors that IDs stand for."""
        scores: np.ndarray = products[self._places(ids)].sum(axis=1)
        return scores

    def scores(
        self,
        query: Float[Tensor, " dim"],
        ids: Integer[np.ndarray, "ids columns"],
        *,
        density_weight: float = 0.0,
    ) -> Float32[np.ndarray, " ids"]:
        """How near IDs are to a query: inner product, less half norm, less ``density_weight`` times density.

        A few IDs are not worth the products with all code vectors.
        """
        places = self._places(ids)
        if places.size * FEW > len(self._vectors):
            products = self.products(query[None])[0]
            scores: np.ndarray = products[places].sum(axis=1)
        else:
            scores = (self.vectors(ids) @ query.float().cpu()).numpy()
        scores -= self.costs(ids, density_weight=density_weight)
        return scores

    def costs(
        self, ids: Integer[np.ndarray, "ids columns"], *, density_weight: float
    ) -> Float32[np.ndarray, " ids"]:
        """What is taken from the inner products of IDs, whatever the query."""
        if not self._has_norm_and_density(ids):
            return np.zeros(len(ids), dtype=np.float32)
        kept = ids[:, len(self._offsets) :]
        return decode_half_norms(kept[:, 0]) + np.float32(density_weight) * decode_densities(kept[:, 1])

    def densities(self, ids: Integer[np.ndarray, "ids columns"]) -> Float32[np.ndarray, " ids"]:
        """How crowded it is around IDs."""
        if not self._has_norm_and_density(ids):
            return np.zeros(len(ids), dtype=np.float32)
        return decode_densities(ids[:, len(self._offsets) + 1])

    def _has_norm_and_density(self, ids: Integer[np.ndarray, "ids columns"]) -> bool:
        return bool(ids.shape[1] > len(self._offsets))

    def _places(self, ids: Integer[np.ndarray, "ids columns"]) -> Int64[np.ndarray, "ids levels"]:
        """Where the vectors of the codes are among all."""
        return np.asarray(ids[:, : len(self._offsets)] + self._offsets)


def embedding_scores(
    query: Float[Tensor, " dim"], items: Float[Tensor, "items dim"]
) -> Float32[np.ndarray, " items"]:
    """Cosine between one query and some items, all unit vectors."""
    scores: np.ndarray = (items.float() @ query.float()).numpy()
    return scores


ITEM_BLOCK: Final = 16_384
QUERY_BLOCK: Final = 2_048
"""Scores of so many items and queries are in memory at once: 128 MiB."""


class Nearest(NamedTuple):
    """The items nearest to each query, best first."""

    items: Int64[np.ndarray, "queries hits"]
    """Item rows."""
    scores: Float32[np.ndarray, "queries hits"]
    """Inner products, never rising."""


def exact_search(
    queries: Float[Tensor, "queries dim"],
    vectors: Callable[[slice], Float[Tensor, "items dim"]],
    num_items: int,
    *,
    k: int,
    device: torch.device | None = None,
) -> Nearest:
    """The ``k`` items of highest inner product (all, if there are fewer); of equal ones the first rows.

    Parameters
    ----------
    vectors
        gives the vectors of a range of item rows, so that they need not all be in memory; each range is
        asked for once.
    device
        where products are computed; default: where the queries are.

    Raises
    ------
    BadData
        a vector holds NaN or infinity, which no order can place.
    """
    device = device or queries.device
    if not bool(queries.isfinite().all()):
        raise BadData("queries have vectors with NaN or infinity; embed them again")
    blocks = [
        queries[start : start + QUERY_BLOCK].to(device) for start in range(0, len(queries), QUERY_BLOCK)
    ]
    found = [
        Nearest(np.zeros((len(block), 0), np.int64), np.zeros((len(block), 0), np.float32))
        for block in blocks
    ]
    for start in range(0, num_items, ITEM_BLOCK):
        stop = min(start + ITEM_BLOCK, num_items)
        part = vectors(slice(start, stop)).to(device).T
        if not bool(part.isfinite().all()):
            raise BadData(f"items {start} to {stop - 1} have vectors with NaN or infinity; embed them again")
        for number, block in enumerate(blocks):
            best = _best_columns(block @ part, k)
            found[number] = _merged(found[number], Nearest(best.items + start, best.scores), k)
    if not found:
        return Nearest(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))
    return Nearest(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def with_one(queries: Float[Tensor, "queries dim"]) -> Float[Tensor, "queries longer"]:
    """Queries for items that :func:`less` has made longer."""
    return F.pad(queries, (0, 1), value=1.0)


def less(
    vectors: Float[Tensor, "items dim"], costs: Float32[np.ndarray, " items"]
) -> Float[Tensor, "items longer"]:
    """Vectors whose inner products with :func:`with_one`'s are lower by what each item costs."""
    column = torch.from_numpy(costs).to(vectors)
    return torch.cat([vectors, -column[:, None]], dim=1)


def _merged(before: Nearest, here: Nearest, k: int) -> Nearest:
    """The best of two; what was found before stands first, so that of equal scores the lower row does."""
    scores = np.concatenate([before.scores, here.scores], axis=1)
    items = np.concatenate([before.items, here.items], axis=1)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return Nearest(np.take_along_axis(items, best, 1), np.take_along_axis(scores, best, 1))


def _best_columns(products: Float[Tensor, "queries items"], k: int) -> Nearest:
    """Columns of each row's ``k`` highest scores, highest first, equal ones from left to right.

    ``topk`` alone takes any of the scores that equal the lowest it takes, so rows with such ties are looked
    at again.
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
        columns[row] = enough[highest(values[enough], size)]
        scores[row] = values[columns[row]]
    return Nearest(columns, scores)


def everything(parts: Sequence[Part], queries: int) -> Beams:
    """For each query one beam that holds all IDs; nothing was decoded for it.

    Ordered by codes, this is the best that a search that routes and then orders by codes can reach.
    """
    sizes = np.array([len(part.table) for part in parts], dtype=np.int64)
    low = np.zeros((queries, 1, len(parts)), dtype=np.int64)
    return Beams(low, low + sizes, np.zeros((queries, 1, 0), dtype=np.float32))


Vectors = Callable[[Int64[np.ndarray, " items"]], Float[Tensor, "items dim"]]
"""Gives the unit embeddings of a part's item rows."""


class Answer(NamedTuple):
    """What one query found, best first."""

    parts: Int64[np.ndarray, " hits"]
    """Which part each hit is in."""
    items: Int64[np.ndarray, " hits"]
    """Item rows there."""
    rows: Int64[np.ndarray, " hits"]
    """Rows of their IDs in the part's table."""
    scores: Float32[np.ndarray, " hits"]
    """Of the evidence that ordered them, never rising."""
    beams: Int64[np.ndarray, " hits"]
    """Which beam each item came from."""
    touched: int
    """Items under all beams, before the cut."""

    def first(self, count: int) -> Answer:
        """The best of them only."""
        return self._replace(
            parts=self.parts[:count],
            items=self.items[:count],
            rows=self.rows[:count],
            scores=self.scores[:count],
            beams=self.beams[:count],
        )


class Evidence(NamedTuple):
    """What re-ranking needs; absent parts make that way of ranking an error."""

    codes: CodeRanker | None = None
    embeddings: Sequence[Vectors] | None = None
    """Of each part."""
    is_raw: bool = False
    """Whether the embeddings are the encoder's features and not the fused ones that IDs are made from."""
    densities: Sequence[UInt8[np.ndarray, " items"]] | None = None
    """How crowded it is around the items of each part, by row. Where it is not known, it is taken from their
    IDs, which know it less well."""


class _Leaves(NamedTuple):
    """IDs under the beams of one query, beam after beam."""

    part: Int64[np.ndarray, " leaves"]
    row: Int64[np.ndarray, " leaves"]
    beam: Int64[np.ndarray, " leaves"]


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
) -> Answer:
    """List the items under the beams of one query and order them.

    Without re-ranking they keep the generator's order; items that share an ID come most typical first. By
    ``codes`` and ``embeddings`` all items under all beams are ordered anew; ``embedding`` is the query's
    vector in the space of the evidence (the paper's GENIUS^R: sums of the encoder's features on both sides).
    With a ``config.shortlist`` only so many of them (at least ``k``), the best by codes, are compared by
    their embeddings; ``for_codes`` is the query's vector in the space of the codes, where the stored
    embeddings have another.

    With a ``config.generator_weight`` an ID's score by codes is raised by so many times the log-probability
    of its beam. All beams of a query were decoded equally deep, so what is added is comparable: it is that
    of the prefix where decoding stopped, and nothing for a query that was settled before the first code.

    Both orders, by codes and by fused embeddings, take ``config.density_weight`` times a density from each score,
    where it is known: that around an ID, and that around the item itself. By raw embeddings the order is
    the paper's.

    Raises
    ------
    UsageError
        the evidence that the re-ranking needs is not there.
    """
    restriction = restriction or tuple(part.alive for part in parts)
    leaves = _leaves(beams, query, restriction)
    by_leaf: np.ndarray | None = None
    match config.rerank:
        case "none":
            by_leaf = _probability(beams, query, leaves)
        case "codes":
            by_leaf = _by_codes(parts, leaves, embedding, evidence, config)
        case "embeddings":
            if evidence.embeddings is None:
                raise UsageError(
                    "this index stores no embeddings; rank by codes, or create it with --embeddings fused"
                )
            if config.shortlist:
                asked = embedding if for_codes is None else for_codes
                by_leaf = _by_codes(parts, leaves, asked, evidence, config)
    if by_leaf is not None and config.generator_weight and config.rerank != "none":
        by_leaf = by_leaf + config.generator_weight * _probability(beams, query, leaves)
    found = _items(parts, leaves, by_leaf, restriction)
    touched = len(found.items)
    if config.rerank == "embeddings":
        if config.shortlist:
            found = found.take(highest(found.scores, max(k, config.shortlist)))
        found = found._replace(scores=_by_embeddings(parts, found, embedding, evidence, config))
    best = found.take(highest(found.scores, k))
    return Answer(*best, touched)


class _Found(NamedTuple):
    """Items, before they are ordered."""

    parts: np.ndarray
    items: np.ndarray
    rows: np.ndarray
    scores: np.ndarray
    beams: np.ndarray

    def take(self, places: np.ndarray) -> _Found:
        return _Found(*(values[places] for values in self))


def _leaves(beams: Beams, query: int, restriction: Restriction) -> _Leaves:
    """All rows in the ranges of all parts under which something may be found."""
    found: list[_Leaves] = []
    for number, allowed in enumerate(restriction):
        ranges = (beams.low[query, :, number], beams.high[query, :, number])
        beam, row = expand_ranges(*ranges) if allowed is None else allowed.ids.inside(*ranges)
        found.append(_Leaves(np.full(len(row), number), row, beam))
    if len(found) == 1:
        return found[0]
    together = _Leaves(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    order = np.argsort(together.beam, kind="stable")
    return _Leaves(*(values[order] for values in together))


def _probability(beams: Beams, query: int, leaves: _Leaves) -> Float32[np.ndarray, " leaves"]:
    """Log-probability of each leaf's beam, of as many codes as were decoded."""
    of_beams = np.asarray(np.nansum(beams.log_probabilities[query], axis=1, dtype=np.float32))
    found: np.ndarray = of_beams[leaves.beam]
    return found


def _by_codes(
    parts: Sequence[Part], leaves: _Leaves, embedding: Tensor, evidence: Evidence, config: SearchConfig
) -> Float32[np.ndarray, " leaves"]:
    if evidence.codes is None:
        raise UsageError("ranking by codes needs the model's codebooks")
    ids = _ids(parts, leaves.part, leaves.row)
    return evidence.codes.scores(embedding, ids, density_weight=config.density_weight)


def _ids(
    parts: Sequence[Part], numbers: Int64[np.ndarray, " rows"], rows: Int64[np.ndarray, " rows"]
) -> Int16[np.ndarray, "rows columns"]:
    """These rows of the parts' tables: codes, and half norms and densities if there are any."""
    ids = np.empty((len(rows), parts[0].table.num_levels), dtype=np.int16)
    for number, part in enumerate(parts):
        here = numbers == number if len(parts) > 1 else slice(None)
        ids[here] = part.table.ids[rows[here]]
    return ids


def _items(
    parts: Sequence[Part], leaves: _Leaves, scores: np.ndarray | None, restriction: Restriction
) -> _Found:
    """The items of all leaves that may be found, beam after beam."""
    found: list[_Found] = []
    for number, (part, allowed) in enumerate(zip(parts, restriction, strict=True)):
        here = np.flatnonzero(leaves.part == number)
        buckets = part.table.buckets(leaves.row[here])
        owner = here[buckets.owner]
        kept = np.arange(len(owner)) if allowed is None else np.flatnonzero(allowed.items[buckets.items])
        owner = owner[kept]
        found.append(
            _Found(
                np.full(len(kept), number),
                buckets.items[kept],
                leaves.row[owner],
                np.zeros(len(kept), dtype=np.float32) if scores is None else scores[owner],
                leaves.beam[owner],
            )
        )
    if len(found) == 1:
        return found[0]
    together = _Found(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    return together.take(np.argsort(together.beams, kind="stable"))


def _by_embeddings(
    parts: Sequence[Part], found: _Found, embedding: Tensor, evidence: Evidence, config: SearchConfig
) -> Float32[np.ndarray, " items"]:
    scores = np.empty(len(found.items), dtype=np.float32)
    for number, part_vectors in enumerate(evidence.embeddings or ()):
        here = np.flatnonzero(found.parts == number)
        scores[here] = embedding_scores(embedding, part_vectors(found.items[here]))
        if config.density_weight and not evidence.is_raw:
            crowded = _densities(parts[number], number, found.take(here), evidence)
            scores[here] -= np.float32(config.density_weight) * crowded
    return scores


def _densities(
    part: Part, number: int, found: _Found, evidence: Evidence
) -> Float32[np.ndarray, " items"] | float:
    """How crowded it is around items of one part."""
    if evidence.densities is not None:
        return decode_densities(evidence.densities[number][found.items])
    return 0.0 if evidence.codes is None else evidence.codes.densities(part.table.ids[found.rows])
