"""Search a new index for some of its items, to choose bits, shortlist and least scores.

The first measurement is agreement with exact search. Codes and embeddings of few bits per number
represent the embeddings of texts and pictures well, because their numbers depend on one another.
They represent other vectors poorly: the nearest ten of random vectors of 1,024 numbers are
not among the hundred with the nearest codes. An index is therefore searched for vectors near some
of its items. If too few of the nearest ten are found, embeddings get more bits, and more of them
are compared.

The second is the least score that first hits usually have (:func:`measure_least_scores`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int8, Shaped

from genius_search.border import as_numbers
from genius_search.config import MAX_EXHAUSTIVE_POOL, SearchSettings
from genius_search.index.candidates import CandidateSearch
from genius_search.index.encode import EncodedQuery, QueryEncoder
from genius_search.index.items import Item
from genius_search.index.request import SearchRequest
from genius_search.index.settings import default_settings
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import Measured
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.nn.coder import Coder
from genius_search.records import Modality
from genius_search.search.vectors import (
    EmbeddingBits,
    decode_lengths,
    dequantize,
    is_residual,
    quantize,
    quantize_with_lengths,
    restore_lengths,
)

NUM_NEAREST_ITEMS: Final = 10
"""Agreement is the share of this many nearest items that are found."""
QUERY_NOISE: Final = 0.3
"""Length of the noise that turns an item into a query, which itself would be found too easily."""
NUM_RECALL_QUERIES: Final = 200
RESTORED_ITEMS: Final = 16_384
"""Number of items whose embeddings are restored together for an exact search."""
MIN_MEASURED_ITEMS: Final = 50
"""A smaller index is not measured: a search compares all of its items anyway."""
MAX_BITS_SAMPLE: Final = 32_768
"""Maximum number of items that numbers of bits are tried with."""
MORE_BITS: Final[dict[EmbeddingBits, EmbeddingBits]] = {2: 4, 4: 8, 8: 16}
MAX_COSINE_GAP: Final = 1e-5
"""Items whose cosine is within this of 1 are equal."""
MIN_KEPT_BY_BITS: Final[dict[EmbeddingBits, float]] = {2: 0.8, 4: 0.96, 8: 0.975}
"""Minimum agreement of stored embeddings, by their bits; below it they get more bits. In an index
of a million items, two bits keep .89 of the nearest ten real texts, and .7 to .8 of random ones.
Eight bits keep .996 of pictures by CLIP; of the unit vectors of 1,024 axes .84, since the largest
number of a residual sets the step of all."""
MIN_GAIN: Final = 0.01
"""Minimum gain in agreement for which eight bits become sixteen."""
PRECISE_BITS: Final = 8
"""Fewer bits save memory at the expense of nearest items."""
FEW_NUMBERS: Final = 64
MIN_KEPT_OF_FEW_NUMBERS: Final = 0.98
"""Minimum agreement of four bits where an embedding has at most :data:`FEW_NUMBERS` numbers: more
bits then take at most 32 bytes an item, and embeddings that the codes explain poorly, such as
random ones of 16 numbers, keep .99 instead of .96."""
MIN_KEPT: Final = 0.975
"""Minimum agreement of a search with exact search over the stored embeddings; below it the search
compares more of them."""
MIN_KEPT_OF_LARGE: Final = 0.9
"""The same for pools of more than :data:`~genius_search.config.MAX_EXHAUSTIVE_POOL` items, where
the default search leaves out candidates."""
MIN_KEPT_WITH_DENSITIES: Final = 0.91
"""Minimum agreement with the correction for hubs, in pools of the same size; below it densities
weigh less. CLIP's photos and texts keep about this share with the default weight."""
WEIGHT_STEP: Final = 0.9
"""Each weight that is tried is this many times the previous one."""
MIN_DENSITY_WEIGHT: Final = 0.02
"""Smaller weights have no effect worth its time, and become 0."""
PRODUCT_TOLERANCE: Final = 1e-6
"""Inner products that differ by less are equal."""
SHORTLIST_GROWTH: Final = 4
"""Each shortlist that is tried is this many times as long as the previous one."""
FINE_SHORTLIST_GROWTH: Final = 2
"""The same in an index with fine codes, which distinguish items better."""
MARGIN_STEP: Final = 0.5
"""Difference between each margin that is tried and the previous one."""
PHRASE_WORDS: Final = 3
"""Number of words in a phrase. With two words, fewer queries about other things are refused; with
five, more queries that have answers are refused."""
MAX_LEAST_SCORE_QUERIES: Final = 300
"""Maximum number of items that phrases are drawn from, or of query vectors: a new index waits until
they are encoded."""
MIN_LEAST_SCORE_QUERIES: Final = 40
"""Least scores are not measured with fewer queries."""
NO_ROW: Final = -1
LEAST_SCORE_QUANTILE: Final = 0.03
"""Share of the searches whose first hits score below the least score."""


def blur(items: Float32[np.ndarray, "items dim"]) -> Float32[np.ndarray, "items dim"]:
    """Return queries near items: unit vectors at a cosine of about .96 = 1 / √(1 + .3²)."""
    noise = np.random.default_rng(0).standard_normal(items.shape)
    return np.asarray(normalize(items + QUERY_NOISE * normalize(noise)), dtype=np.float32)


class MeasuredBits(NamedTuple):
    """Agreement of stored embeddings with true ones, for a number of bits."""

    bits: EmbeddingBits
    kept: float = 1.0
    """Share of the nearest ten items that exact search over the stored embeddings finds."""
    finds_items: bool = True
    """Whether each item is the first hit for its vector; with one or two bits it need not be."""


def choose_embedding_bits(
    model: Genius,
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    default: EmbeddingBits,
    recall: float | None = None,
) -> MeasuredBits:
    """Choose the bits of each number of stored embeddings: the default of 2, 4 or 8, or more.

    Two bits are enough if they keep enough of the nearest ten items; with more, each item must
    also be the first hit for its vector. Eight become sixteen only if these mend it, or keep
    clearly more.

    Parameters
    ----------
    embeddings, modalities
        Unit vectors of the pool's items, or of a sample.
    recall
        Minimum share of the nearest ten items that searches shall find, of which bits may lose
        half of the rest; by default :data:`MIN_KEPT_BY_BITS`, or :data:`MIN_KEPT_OF_FEW_NUMBERS`.
    """
    measure = partial(measure_bits, model, embeddings, modalities)
    chosen = measure(default)
    while chosen.bits in MORE_BITS:
        least = _min_agreement(chosen.bits, embeddings.shape[1])
        if recall is not None:
            least = halve_loss(recall)
        if chosen.kept >= least and chosen.finds_items:
            break
        more = measure(MORE_BITS[chosen.bits])
        finds_more = more.finds_items > chosen.finds_items
        if more.bits == 16 and not finds_more and more.kept < chosen.kept + MIN_GAIN:
            break
        chosen = more
    return chosen


def measure_bits(
    model: Genius,
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    bits: EmbeddingBits,
) -> MeasuredBits:
    """Measure what a sample of the embeddings keeps with these bits; few items are not measured."""
    sample = np.random.default_rng(0).permutation(len(embeddings))[:MAX_BITS_SAMPLE]
    if len(sample) < MIN_MEASURED_ITEMS:
        return MeasuredBits(bits)
    items = np.asarray(embeddings[sample], dtype=np.float32)
    rounded = _round_embeddings(model, items, modalities[sample], bits)
    agreement = _measure_agreement(items, rounded)
    return MeasuredBits(bits, agreement, bits < 4 or _find_themselves(items, rounded))


def halve_loss(recall: float) -> float:
    """Return the recall of an index that loses half as much: (1 + recall) / 2."""
    return (1 + recall) / 2


def _min_agreement(bits: EmbeddingBits, dim: int) -> float:
    """Return the share of the nearest ten items that must be kept, unless the caller names one."""
    if bits == 4 and dim <= FEW_NUMBERS:
        return MIN_KEPT_OF_FEW_NUMBERS
    return MIN_KEPT_BY_BITS[bits]


def _measure_agreement(
    items: Float32[np.ndarray, "items dim"], rounded: Float32[np.ndarray, "items dim"]
) -> float:
    """Return the share of the nearest ten items that rounded embeddings keep."""
    queries = blur(items[:NUM_RECALL_QUERIES])
    products = queries @ items.T
    # Of items as near as the tenth, any may be found.
    tenth = np.partition(products, -NUM_NEAREST_ITEMS, axis=1)[:, -NUM_NEAREST_ITEMS, None]
    nearest = np.argpartition(queries @ rounded.T, -NUM_NEAREST_ITEMS, axis=1)
    hits = nearest[:, -NUM_NEAREST_ITEMS:]
    is_kept = np.take_along_axis(products, hits, axis=1) >= tenth - PRODUCT_TOLERANCE
    return float(is_kept.mean())


def _find_themselves(
    items: Float32[np.ndarray, "items dim"], rounded: Float32[np.ndarray, "items dim"]
) -> bool:
    """Return whether each item is the first hit for its vector."""
    first_hits = (items[:NUM_RECALL_QUERIES] @ rounded.T).argmax(axis=1)
    cosines = np.vecdot(items[:NUM_RECALL_QUERIES], items[first_hits])
    return bool((cosines > 1 - MAX_COSINE_GAP).all())


def _round_embeddings(
    model: Genius,
    embeddings: Float32[np.ndarray, "items dim"],
    modalities: Int8[np.ndarray, " items"],
    bits: EmbeddingBits,
) -> Float32[np.ndarray, "items dim"]:
    """Return embeddings as an index restores them: the ID's vector plus the stored residual."""
    if not is_residual(bits):
        return restore_lengths(quantize(embeddings, bits).values)
    encoded = Coder(model.codebooks).encode_items(embeddings, modalities)
    vectors = model.codebooks.vectors(encoded.all_codes)
    correction = model.ranker.spread.residuals
    if model.codebooks.fine is None:
        quantized = quantize(embeddings - vectors, bits)
    else:
        quantized, lengths = quantize_with_lengths(embeddings, vectors, bits, correction)
        vectors *= decode_lengths(lengths)[:, None]
    rounded = dequantize(quantized, bits, embeddings.shape[1])
    if correction is not None:
        rounded = correction.apply(rounded, bits)
    return np.asarray(vectors + rounded)


def measure_recall(model: Genius, snapshot: Snapshot) -> Measured | None:
    """Choose how many embeddings a search compares, and measure its agreement with exact search.

    The true embeddings may be gone, so the agreement with the stored ones is multiplied by the
    share that their bits kept when they were chosen.

    Unless the caller chose an agreement, the vector of each item must also find it, which fails in
    dense clusters of small pools if too few are compared.

    Return None if the index compares no fused embeddings, or has few items.
    """
    settings = default_settings(model, snapshot)
    num_rows = snapshot.num_rows
    compares_embeddings = (
        settings.rerank == "embeddings" and snapshot.manifest.embeddings == "fused"
    )
    if not compares_embeddings or num_rows < MIN_MEASURED_ITEMS:
        return None
    trial = _Trial(model, snapshot)
    kept_by_bits = snapshot.manifest.kept_by_bits
    target = MIN_KEPT if num_rows <= MAX_EXHAUSTIVE_POOL else MIN_KEPT_OF_LARGE
    if snapshot.manifest.recall is not None:
        recall = snapshot.manifest.recall
        target = min(recall / max(kept_by_bits, recall), halve_loss(recall))
    must_find_items = snapshot.manifest.recall is None and num_rows <= MAX_EXHAUSTIVE_POOL
    uncorrected = dataclasses.replace(settings, density_weight=0.0)
    agreement = trial.measure(uncorrected)
    default_margin = settings.margin
    # A shortlist of 0 contains all items.
    while settings.shortlist and (
        agreement < target or (must_find_items and not trial.finds_items(uncorrected))
    ):
        settings = _widen_search(settings, num_rows)
        uncorrected = dataclasses.replace(settings, density_weight=0.0)
        agreement = trial.measure(uncorrected)
    default_weight = settings.density_weight
    corrected = trial.measure(settings)
    # A smaller weight does not undo the loss of few bits, and finds fewer right answers.
    is_precise = snapshot.manifest.embedding_bits >= PRECISE_BITS
    counted = kept_by_bits if is_precise else 1.0
    if num_rows <= MAX_EXHAUSTIVE_POOL:
        while counted * corrected < MIN_KEPT_WITH_DENSITIES and settings.density_weight:
            settings = _reduce_density_weight(settings)
            corrected = trial.measure(settings)
    return Measured(
        items=num_rows,
        queries=len(trial.queries),
        shortlist=settings.shortlist,
        kept=kept_by_bits * agreement,
        kept_with_densities=kept_by_bits * corrected,
        margin=None if settings.margin == default_margin else settings.margin,
        density_weight=None
        if settings.density_weight == default_weight
        else settings.density_weight,
    )


def _widen_search(settings: SearchSettings, num_rows: int) -> SearchSettings:
    """Return settings with a longer shortlist and, where cells are left out, a larger margin."""
    growth = FINE_SHORTLIST_GROWTH if settings.margin else SHORTLIST_GROWTH
    shortlist = growth * settings.shortlist
    return dataclasses.replace(
        settings,
        shortlist=0 if shortlist >= num_rows else shortlist,
        margin=settings.margin + MARGIN_STEP if settings.margin else 0.0,
    )


def _reduce_density_weight(settings: SearchSettings) -> SearchSettings:
    """Return settings with a tenth less weight of densities, or none if little is left."""
    weight = round(WEIGHT_STEP * settings.density_weight, 3)
    return dataclasses.replace(
        settings, density_weight=weight if weight > MIN_DENSITY_WEIGHT else 0.0
    )


class _Trial:
    """Queries near items of an index, with the inner product of the tenth nearest item of each."""

    def __init__(self, model: Genius, snapshot: Snapshot) -> None:
        self._model = model
        self._snapshot = snapshot
        segment = snapshot.segments[0]
        rows = np.random.default_rng(0).permutation(segment.table.num_items)[:NUM_RECALL_QUERIES]
        stored = segment.vectors(model.ranker)(np.sort(rows))
        self._items = np.asarray(normalize(stored), dtype=np.float32)
        self._item_products = np.vecdot(self._items, stored) - PRODUCT_TOLERANCE
        self.queries = blur(self._items)
        self._tenth_nearest_products = self._find_tenth_products() - PRODUCT_TOLERANCE

    def _find_tenth_products(self) -> Float32[np.ndarray, " queries"]:
        """Return the product of each query and its tenth nearest item, by exact search."""
        best = np.full((len(self.queries), NUM_NEAREST_ITEMS), -np.inf, np.float32)
        for segment in self._snapshot.segments:
            read_vectors = segment.vectors(self._model.ranker)
            rows = segment.with_passages(segment.alive_rows())
            for start in range(0, len(rows), RESTORED_ITEMS):
                vectors = read_vectors(np.sort(rows[start : start + RESTORED_ITEMS]))
                products = np.concatenate([best, self.queries @ vectors.T], axis=1)
                best = np.partition(products, -NUM_NEAREST_ITEMS, axis=1)[:, -NUM_NEAREST_ITEMS:]
        return np.asarray(best.min(axis=1))

    def measure(self, settings: SearchSettings) -> float:
        """Return the share of the nearest ten items that a search with these settings finds."""
        products_of_queries = self._products(self.queries, settings)
        pairs = zip(products_of_queries, self._tenth_nearest_products, strict=True)
        return float(np.mean([np.mean(products >= tenth) for products, tenth in pairs]))

    def finds_items(self, settings: SearchSettings) -> bool:
        """Return whether the vector of each item finds it, or another one as near."""
        pairs = zip(self._products(self._items, settings), self._item_products, strict=True)
        return all(products[0] >= product for products, product in pairs)

    def _products(
        self, queries: Float32[np.ndarray, "queries dim"], settings: SearchSettings
    ) -> list[Float32[np.ndarray, " hits"]]:
        """Return the products of each query and its first ten hits, largest first.

        The products do not contain the correction for densities.
        """
        search = CandidateSearch(self._model, self._snapshot, settings)
        rankings = search.rank(
            [EncodedQuery.of_vector(query, NUM_NEAREST_ITEMS) for query in queries]
        )
        rows = np.concatenate([ranking.items for ranking in rankings])
        segments = np.concatenate([ranking.segments for ranking in rankings])
        vectors = np.empty((len(rows), self._model.dim), dtype=np.float32)
        for number, segment in enumerate(self._snapshot.segments):
            is_inside = segments == number
            vectors[is_inside] = segment.vectors(self._model.ranker)(rows[is_inside])
        ends = np.cumsum([len(ranking.items) for ranking in rankings])
        products = []
        for query, of_query in zip(queries, np.split(vectors, ends[:-1]), strict=True):
            products.append(np.sort(of_query @ query)[::-1])
        return products


def measure_least_scores(
    model: Genius, snapshot: Snapshot, query_vectors: Shaped[np.ndarray, ...] | None
) -> dict[str, float]:
    """Return the score that all but a few in a hundred first hits reach, by their modality.

    A search whose first hits score less has no good match. The queries are phrases of the items'
    texts, each of which must find another item, or ``query_vectors``, which are features of texts.
    Some of the queries may have no answer in the index: those with an answer score more.
    """
    random = np.random.default_rng(0)
    rows = random.permutation(snapshot.segments[0].num_items)[:MAX_LEAST_SCORE_QUERIES]
    vectors: Iterable[np.ndarray] = ()
    items: Sequence[Item] = ()
    if query_vectors is None:
        items = snapshot.items_at(np.zeros_like(rows), rows)
    else:
        vectors = random.permutation(as_numbers(query_vectors, "the query vectors"))
        vectors = vectors[:MAX_LEAST_SCORE_QUERIES]
    least = {}
    for modality in snapshot.modalities:
        request = partial(SearchRequest, modality=modality, hybrid=False, k=2)
        requests = [request(vector=vector) for vector in vectors]
        own_rows = [NO_ROW] * len(requests)
        for item, row in zip(items, rows.tolist(), strict=False):
            phrase = _draw_phrase(item, modality, random)
            if phrase is not None:
                requests.append(request(text=phrase))
                own_rows.append(row)
        if len(requests) >= MIN_LEAST_SCORE_QUERIES:
            first_scores = _first_scores(model, snapshot, requests, own_rows)
            least[modality.value] = float(np.quantile(first_scores, LEAST_SCORE_QUANTILE))
    return least


def _draw_phrase(item: Item, modality: Modality, random: np.random.Generator) -> str | None:
    """Draw a few consecutive words of an item; None if it has too few, or another modality."""
    words = (item.text or "").split()
    if item.modality is not modality or len(words) < PHRASE_WORDS:
        return None
    start = int(random.integers(len(words) - PHRASE_WORDS + 1))
    return " ".join(words[start : start + PHRASE_WORDS])


def _first_scores(
    model: Genius, snapshot: Snapshot, requests: Sequence[SearchRequest], own_rows: Sequence[int]
) -> list[float]:
    """Return the score of the first hit of each request that is not in the request's own row."""
    settings = default_settings(model, snapshot)
    search = CandidateSearch(model, snapshot, settings)
    encoded = QueryEncoder(model, snapshot, settings, None).encode(requests)
    rankings = search.rank([query for [query] in encoded])
    first_scores: list[float] = []
    for ranking, own_row in zip(rankings, own_rows, strict=True):
        # A new index has a single segment.
        is_other = snapshot.owner_rows(ranking.segments, ranking.items) != own_row
        first_scores += ranking.scores[is_other][:1].tolist()
    return first_scores
