"""What an index keeps of exact search, measured with its items; and settings that follow from it.

Codes and few bits a number say much of the embeddings of texts and pictures, whose numbers depend on each
other, and little of others: of random vectors of 1,024 numbers the nearest ten are not among the hundred with
the nearest codes. So an index is tried with queries near some of its items. Where too few of the nearest ten
are kept, embeddings get more bits, and more of them are compared.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np
from jaxtyping import Float32, Int8

from genius_search.config import MAX_EXHAUSTIVE_POOL, SearchSettings
from genius_search.index.query import EncodedQuery, SnapshotSearcher, default_settings
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import Measured
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.nn.kmeans import Coder
from genius_search.search.vectors import EmbeddingBits, dequantize, quantize

NUM_NEAREST_ITEMS: Final = 10
QUERY_NOISE: Final = 0.3
"""Length of what is added to an item to make a query of it; an item itself is found too easily."""
NUM_RECALL_QUERIES: Final = 200
NUM_RECALL_QUERIES_OF_LARGE: Final = 50
"""In an index of more than :data:`~genius_search.config.MAX_EXHAUSTIVE_POOL` items, in which they take longer."""
MIN_MEASURED_ITEMS: Final = 50
"""Of fewer items all are compared anyway."""
MAX_BITS_SAMPLE: Final = 8192
"""Most items that numbers of bits are tried with."""
MORE_BITS: Final[dict[EmbeddingBits, EmbeddingBits]] = {2: 4, 4: 8}
SAME_TOLERANCE: Final = 1e-5
"""Items whose cosine is within this of 1 are the same."""
MIN_KEPT_BY_BITS: Final[dict[EmbeddingBits, float]] = {2: 0.8, 4: 0.96}
"""Share of the nearest ten that stored embeddings keep; below it they get more bits. Two bits, of an index
with a million items, keep .89 of real texts and .7 to .8 of random vectors."""
MIN_KEPT: Final = 0.975
"""Share of the nearest ten of stored embeddings that a search keeps; below it more are compared. The default
of pools with more than :data:`~genius_search.config.MAX_EXHAUSTIVE_POOL` items leaves out candidates, and is
:data:`MIN_KEPT_OF_LARGE`."""
MIN_KEPT_OF_LARGE: Final = 0.9
TOLERANCE: Final = 1e-6
"""Products that differ less are equal."""
SHORTLIST_GROWTH: Final = 4
"""Each shortlist that is tried is so many times as long as the one before."""


def blur(items: Float32[np.ndarray, "items dim"]) -> Float32[np.ndarray, "items dim"]:
    """Return queries near items: unit vectors at a cosine of .96 from them."""
    noise = np.random.default_rng(0).standard_normal(items.shape)
    return np.asarray(normalize(items + QUERY_NOISE * normalize(noise)), dtype=np.float32)


def choose_embedding_bits(
    model: Genius,
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    usual: EmbeddingBits,
) -> EmbeddingBits:
    """Return the bits of a number of stored embeddings: the usual 2 or 4, or twice as many.

    Four keep enough if they keep the nearest ten, and an item is the first hit of its own vector.

    Parameters
    ----------
    embeddings, modalities
        unit vectors of the pool's items, or of a sample.
    """
    drawn = np.random.default_rng(0).permutation(len(embeddings))[:MAX_BITS_SAMPLE]
    if len(drawn) < MIN_MEASURED_ITEMS:
        return usual
    items = np.asarray(embeddings[drawn], dtype=np.float32)
    vectors = model.ranker.vectors(Coder(model.codebooks).assign_ids(items, modalities[drawn]))
    stored = dequantize(quantize(items - vectors, usual), usual, items.shape[1])
    measured = model.ranker.spread.residuals
    rounded = vectors + (stored if measured is None else measured.apply(stored, usual))
    queries = blur(items[:NUM_RECALL_QUERIES])
    products = queries @ items.T
    least = np.partition(products, -NUM_NEAREST_ITEMS, axis=1)[:, -NUM_NEAREST_ITEMS, None]
    nearest = np.argpartition(queries @ rounded.T, -NUM_NEAREST_ITEMS, axis=1)[
        :, -NUM_NEAREST_ITEMS:
    ]
    is_kept = np.take_along_axis(products, nearest, axis=1) >= least - TOLERANCE
    if is_kept.mean() < MIN_KEPT_BY_BITS[usual]:
        return MORE_BITS[usual]
    first = (items[:NUM_RECALL_QUERIES] @ rounded.T).argmax(axis=1)
    is_itself = np.vecdot(items[:NUM_RECALL_QUERIES], items[first]) > 1 - SAME_TOLERANCE
    return usual if usual == 2 or is_itself.all() else MORE_BITS[usual]


def measure_recall(model: Genius, snapshot: Snapshot) -> Measured | None:
    """Choose how many embeddings a search compares, and measure what it keeps of the nearest ten.

    None if the index compares no fused embeddings, or has few items.
    """
    settings = default_settings(model, snapshot)
    num_rows = snapshot.num_rows
    if (
        settings.rerank != "embeddings"
        or snapshot.manifest.embeddings != "fused"
        or num_rows < MIN_MEASURED_ITEMS
    ):
        return None
    trial = _Trial(model, snapshot, settings)
    plain = dataclasses.replace(settings, density_weight=0.0)
    kept = trial.share(plain)
    target = MIN_KEPT if num_rows <= MAX_EXHAUSTIVE_POOL else MIN_KEPT_OF_LARGE
    while kept < target and settings.shortlist:
        longer = SHORTLIST_GROWTH * settings.shortlist
        settings = dataclasses.replace(settings, shortlist=0 if longer >= num_rows else longer)
        plain = dataclasses.replace(settings, density_weight=0.0)
        kept = trial.share(plain)
    return Measured(
        items=num_rows,
        queries=len(trial.queries),
        shortlist=settings.shortlist,
        kept=kept,
        kept_with_densities=trial.share(settings),
    )


class _Trial:
    """Queries near items of an index, and the least product of the nearest ten of each."""

    def __init__(self, model: Genius, snapshot: Snapshot, settings: SearchSettings) -> None:
        self._model, self._snapshot = model, snapshot
        count = (
            NUM_RECALL_QUERIES
            if snapshot.num_rows <= MAX_EXHAUSTIVE_POOL
            else NUM_RECALL_QUERIES_OF_LARGE
        )
        segment = snapshot.segments[0]
        rows = np.random.default_rng(0).permutation(segment.table.num_items)[:count]
        self.queries = blur(normalize(segment.vectors(model.ranker)(np.sort(rows))))
        everything = dataclasses.replace(
            settings, candidates=snapshot.num_rows, shortlist=0, density_weight=0.0
        )
        self._least = [products[-1] - TOLERANCE for products in self._products(everything)]

    def share(self, settings: SearchSettings) -> float:
        """Return the share of the nearest ten that a search with these settings finds."""
        pairs = zip(self._products(settings), self._least, strict=True)
        return float(np.mean([np.mean(products >= least) for products, least in pairs]))

    def _products(self, settings: SearchSettings) -> list[Float32[np.ndarray, " hits"]]:
        """Return the products of the queries and their first ten hits, without costs of densities."""
        searcher = SnapshotSearcher(self._model, self._snapshot, settings)
        encoded = [
            EncodedQuery(number, NUM_NEAREST_ITEMS, embedding=query, evidence=query)
            for number, query in enumerate(self.queries)
        ]
        ranker, segments = self._model.ranker, self._snapshot.segments
        products = []
        for query, ranking in zip(
            self.queries, searcher.rank(encoded, at_least=NUM_NEAREST_ITEMS), strict=True
        ):
            vectors = np.concatenate(
                [
                    segment.vectors(ranker)(ranking.items[ranking.segments == number])
                    for number, segment in enumerate(segments)
                ]
            )
            products.append(np.sort(vectors @ query)[::-1])
        return products
