"""From search requests to hits: requests become vectors, and the items found become hits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32

from genius_search.config import SearchConfig, usual_search
from genius_search.encoders.base import ImageInput, ItemKey, JointInput, TextInput, is_joint
from genius_search.errors import UsageError
from genius_search.index.hits import SearchHit
from genius_search.index.request import EVERYTHING, SearchPart, SearchRequest
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.model import Genius
from genius_search.nn.codebooks import as_floats, normalize
from genius_search.records import Modality, instructed
from genius_search.search.kernel import find
from genius_search.search.rank import Found, Ranking, Wanted, table_rows
from genius_search.search.table import Restriction

if TYPE_CHECKING:
    from PIL import Image

    from genius_search.index.calibrate import Calibration

SHORTEST_VECTOR: Final = 1e-12
"""A vector that is not longer has no direction."""
MIN_LENGTH: Final = 1e-4
"""A weighted sum of unit vectors shorter than this, times the largest weight, has no direction."""
DEPTH: Final = 100
"""Hits of the vectors that are ranked together with the items that have rare words."""
FEW: Final = 10
"""A word that more items have is not rare."""
RARE: Final = 100
"""Nor is a word without digits that more than one in so many items have, unless only one has it."""
WORD_WEIGHT: Final = 0.3
"""The weight of a word that one item has, as a share of the scores' range among the hits of the vectors.
Chosen on names and captions: more finds more names and fewer captions."""
KEY: Final = ItemKey("query", "")

Place: TypeAlias = tuple[int, int]
"""Segment and row of an item."""


class RareWords(NamedTuple):
    """Items that have rare words of a query in their text, or as their name."""

    weights: Mapping[Place, float]
    """The sum of an item's words' inverse document frequencies, log(N/n) / log(N)."""
    first: frozenset[Place]
    """Those that have a rare word with a digit, such as IMG_2034 or a product code."""


class EncodedQuery(NamedTuple):
    """A request, or its part for one modality, ready for beam search."""

    number: int
    """Position of the request; the queries of one request follow one another."""
    k: int
    embedding: Float32[np.ndarray, " dim"]
    """The generator's input."""
    evidence: Float32[np.ndarray, " dim"]
    """The query in the space of the vectors that hits are re-ranked by."""
    level0: frozenset[int] = frozenset()
    """Allowed codes at level 0; empty means any."""
    restriction: Restriction | None = None
    """Allowed items; None means all."""
    beam: int | None = None
    """Beam width instead of the configured one."""
    rare: RareWords | None = None
    has_probability: bool = True
    """Whether a calibration knows such queries."""


class SearchResult(NamedTuple):
    """The result of one request."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Number of items under all beams."""


def default_settings(model: Genius, snapshot: Snapshot) -> SearchConfig:
    """Return the search settings of an index; see :attr:`genius_search.index.index.Index.settings`."""
    manifest = snapshot.manifest
    usual = usual_search(snapshot.num_alive)
    if manifest.hubness is not None:
        usual = dataclasses.replace(usual, density_weight=manifest.hubness.weight)
    if manifest.embeddings == "fused" and (manifest.has_own_model or not model.has_generator):
        return dataclasses.replace(usual, rerank="embeddings")
    return usual


def search(
    model: Genius, snapshot: Snapshot, requests: Sequence[SearchRequest], config: SearchConfig
) -> list[SearchResult]:
    """Search for several requests in one batch, and return the result of each."""
    alternatives = [one for request in requests for one in request.alternatives()]
    queries = encode_queries(model, snapshot, alternatives, config)
    results = search_encoded(model, snapshot, queries, config)
    if len(results) == len(requests):
        return results
    in_turn = iter(results)
    return [interleave([next(in_turn) for _ in request.alternatives()], request.k) for request in requests]


def encode_queries(
    model: Genius, snapshot: Snapshot, requests: Sequence[SearchRequest], config: SearchConfig
) -> list[EncodedQuery]:
    """Encode requests, with all images in one batch and all texts in another.

    Without modality and instruction, a request becomes a query for each modality of the index: scores of
    items of different modalities are hard to compare, because encoders place images and texts in different
    regions. Otherwise it becomes one query.

    Raises
    ------
    UsageError
        A request refers to an item or a field that is not in the index, or its parts cancel out. All but the
        last are checked before anything is encoded.
    """
    if not snapshot.segments:
        nothing = np.zeros(model.dim, dtype=np.float32)
        return [EncodedQuery(number, one.k, nothing, nothing) for number, one in enumerate(requests)]
    unknown = np.zeros(0, dtype=np.float32)
    queries, wanted = [], []
    with diagnose_corruption(snapshot):
        for number, request in enumerate(requests):
            modalities = [None if request.modality is None else Modality(request.modality)]
            if request.modality is None and not request.instruction and model.level0_is_exact:
                modalities = [*snapshot.modalities]
            rare = None
            if request.hybrid and request.text and request.image is None and len(request.query) == 1:
                rare = find_rare_words(snapshot, request.text)
            for modality in modalities:
                level0, conditions = frozenset[int](), request.filter
                if modality is not None and model.level0_is_exact:
                    level0 = model.level0_codes(modality)
                elif modality is not None:  # one more filter
                    conditions = dataclasses.replace(conditions, modality=modality)
                restriction = None
                if conditions != EVERYTHING:
                    restriction = snapshot.restriction(conditions, deadline=request.deadline)
                queries.append(
                    EncodedQuery(
                        number,
                        request.k,
                        embedding=unknown,
                        evidence=unknown,
                        level0=level0,
                        restriction=restriction,
                        beam=request.beam,
                        rare=rare,
                        has_probability=not request.parts,
                    )
                )
                wanted.append((request, modality or snapshot.modalities[0]))
    is_raw = snapshot.manifest.embeddings == "raw" and config.rerank == "embeddings"
    vectors = _embed(model, snapshot, wanted, is_raw=is_raw)
    return [
        query._replace(embedding=fused, evidence=evidence)
        for query, (fused, evidence) in zip(queries, vectors, strict=True)
    ]


def _embed(
    model: Genius, snapshot: Snapshot, wanted: Sequence[tuple[SearchRequest, Modality]], *, is_raw: bool
) -> list[Float32[np.ndarray, "2 dim"]]:
    """Return two vectors of each request: the generator's input, and the one that hits are re-ranked by.

    Parameters
    ----------
    wanted
        Requests, and the modality of what each looks for, by which the model's instruction is chosen.
    """
    images = _open_images([part for request, _ in wanted for part in request.query])
    contents: dict[tuple[int, str], int] = {}  # what is to be encoded, and its position: each once
    sources: list[list[int | Float32[np.ndarray, "2 dim"]]] = []
    for request, modality in wanted:
        own: list[int | Float32[np.ndarray, "2 dim"]] = []
        for part in request.query:
            if part.vector is not None:
                own.append(_given(model, part.vector, is_raw=is_raw))
            elif part.id is not None:
                with diagnose_corruption(snapshot):
                    own.append(_item_vectors(model, snapshot, part.id, is_raw=is_raw))
            else:
                instruction = request.instruction
                if not instruction:
                    has_text = bool(part.text and not part.text.isspace())
                    kind = Modality.of(has_image=part.image is not None, has_text=has_text)
                    instruction = model.instruction_for(kind, modality)
                content = (id(part.image), instructed(instruction, part.text))
                own.append(contents.setdefault(content, len(contents)))
        sources.append(own)
    encoded = _encode(model, [(images.get(image), text) for image, text in contents], is_raw=is_raw)
    return [
        _weighted_sum(
            [part.weight for part in request.query],
            [encoded[source] if isinstance(source, int) else source for source in own],
        )
        for (request, _), own in zip(wanted, sources, strict=True)
    ]


def _open_images(parts: Sequence[SearchPart]) -> dict[int, Image.Image]:
    """Open the image of each part, by the identity of what was given; the same is opened once."""
    given = {id(part.image): part.image for part in parts if part.image is not None}
    if not given:
        return {}
    from genius_search.data.images import SHORTEST_SIDE, as_image  # noqa: PLC0415  for images only

    return {key: as_image(image, shortest_side=SHORTEST_SIDE) for key, image in given.items()}


def _encode(
    model: Genius, contents: Sequence[tuple[Image.Image | None, str]], *, is_raw: bool
) -> Float32[np.ndarray, "contents 2 dim"]:
    """Return the two vectors of images, texts, or both; an image that several have is encoded once."""
    if not contents:
        return np.zeros((0, 2, model.dim), dtype=np.float32)
    if any(image is None and not text for image, text in contents):
        raise UsageError("a query has neither an image nor a text; it needs one of them")
    encoder = model.encoder
    image_features, text_features = np.zeros((2, len(contents), encoder.dim), dtype=np.float32)
    if is_joint(encoder):
        both = [JointInput(image, text, KEY, image is not None) for image, text in contents]
        text_features[:] = as_floats(encoder.joint_features(both))
    else:
        images = {id(image): image for image, _ in contents if image is not None}
        if images:
            found = as_floats(encoder.image_features([ImageInput(one, KEY) for one in images.values()]))
            places = {key: place for place, key in enumerate(images)}
            rows = [row for row, (image, _) in enumerate(contents) if image is not None]
            image_features[rows] = found[[places[id(contents[row][0])] for row in rows]]
        rows = [row for row, (_, text) in enumerate(contents) if text]
        if rows:
            texts = [TextInput(contents[row][1], KEY) for row in rows]
            text_features[rows] = as_floats(encoder.text_features(texts))
    fused = model.fuse(image_features, text_features)
    return np.stack([fused, normalize(image_features + text_features) if is_raw else fused], axis=1)


def _given(model: Genius, vector: object, *, is_raw: bool) -> Float32[np.ndarray, "2 dim"]:
    """Return the two vectors of a vector as a query, which is read as the feature of a text."""
    array, dim = np.asarray(vector), model.encoder.dim
    if array.shape != (dim,) or array.dtype.kind not in "fiu":
        raise UsageError(
            f"the query's vector is {array.dtype} of shape {array.shape}; expected {dim} numbers"
        )
    length = np.linalg.norm(array.astype(np.float64))
    if not np.isfinite(length) or length <= SHORTEST_VECTOR:
        raise UsageError("the query's vector has only zeros, or a number that is not finite")
    feature = np.asarray(array / length, dtype=np.float32)[None]
    fused = model.fuse(np.zeros_like(feature), feature)
    return np.concatenate([fused, feature if is_raw else fused])


def _item_vectors(
    model: Genius, snapshot: Snapshot, item_id: str, *, is_raw: bool
) -> Float32[np.ndarray, "2 dim"]:
    """Return the two vectors of an item as a query: its stored embedding, or the vector of its ID."""
    place = snapshot.locate(item_id)
    of_codes = normalize(model.ranker.vectors(snapshot.id_at(place)[None]))
    vectors = snapshot.evidence(model.ranker).embeddings
    if vectors is None:
        return np.concatenate([of_codes, of_codes])
    stored = normalize(as_floats(vectors[place.segment](np.array([place.row]))))
    if snapshot.manifest.embeddings == "fused":
        return np.concatenate([stored, stored])
    return np.concatenate([of_codes, stored if is_raw else of_codes])


def _weighted_sum(
    weights: Sequence[float], vectors: Sequence[Float32[np.ndarray, "2 dim"]]
) -> Float32[np.ndarray, "2 dim"]:
    """Return the weighted sum of the parts, scaled to unit length. A single part is returned unchanged."""
    if len(weights) == 1 and weights[0] > 0:
        return vectors[0]
    factors = np.array(weights, dtype=np.float32)
    totals: np.ndarray = np.tensordot(factors, np.stack(vectors), axes=1)
    if not (np.linalg.norm(totals, axis=-1) > MIN_LENGTH * np.abs(factors).max()).all():
        raise UsageError("the parts of the query cancel each other out; change their weights")
    return normalize(totals)


def search_encoded(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    """Search for encoded queries in one batch, and return the result of each request.

    A query's beam is at least as wide as its ``k``. The hits of a request that became several queries are
    merged (:func:`merge`).
    """
    if not queries or not snapshot.segments:
        return [SearchResult([], 0) for _ in queries]
    calibration = snapshot.manifest.calibration
    if calibration is not None and not calibration.applies_to(config):
        calibration = None
    with diagnose_corruption(snapshot):
        # Queries with rare words go deeper, and once more among the items that have these words.
        among = [_among_rare(snapshot, query) for query in queries if query.rare]
        asked = [*queries, *among]
        wanted = []
        for query in asked:
            k = max(query.k, DEPTH) if query.rare else query.k
            least = k if calibration is None else max(k, 2)
            wanted.append(Wanted(max(query.beam or config.beam, k), least, query.level0, query.restriction))
        found = find(
            lambda: model.decoder_for(config),
            model.fast_for(config),
            snapshot.search_segments,
            np.stack([query.embedding for query in asked]),
            wanted,
            config,
            evidence=snapshot.evidence(model.ranker),
            embeddings=[query.evidence for query in asked],
        )
        answers = zip(queries, found, strict=False)
        further = iter(found[len(queries) :])
        results = []
        for _, group in groupby(answers, key=lambda answer: answer[0].number):
            merged, first = [], set[str]()
            for query, own in group:
                others = next(further) if query.rare else None
                hits, num_first = _make_hits(model, snapshot, query, own, others, calibration, config)
                first.update(hit.id for hit in hits[:num_first])
                merged.append(SearchResult(hits, own.ranking.touched))
            results.append(merge(merged, query.k, first=first))
        return results


def _make_hits(
    model: Genius,
    snapshot: Snapshot,
    query: EncodedQuery,
    own: Found,
    among_rare: Found | None,
    calibration: Calibration | None,
    config: SearchConfig,
) -> tuple[list[SearchHit], int]:
    """Return the hits of a query, and how many of them come first because of their words."""
    ranking, log_probabilities = own
    scores = ranking.scores
    weights, is_first = np.zeros(len(scores)), np.zeros(len(scores), dtype=bool)
    if query.rare is not None and among_rare is not None:
        ranking, log_probabilities = own = _join(own, among_rare)
        places = list(zip(ranking.segments.tolist(), ranking.items.tolist(), strict=True))
        weights = np.array([query.rare.weights.get(place, 0.0) for place in places])
        spread = float(scores[0] - scores[-1]) if len(scores) else 0.0
        scores = ranking.scores + WORD_WEIGHT * spread * weights
        is_first = np.array([place in query.rare.first for place in places], dtype=bool)
    probabilities: list[float | None] = [None] * len(scores)
    if calibration is not None and query.has_probability:
        probabilities = [*calibration.probabilities(ranking.scores).tolist()]
    order = np.lexsort((-weights, -scores, ~is_first))[: query.k]
    segments, rows = ranking.segments[order], ranking.rows[order]
    # Without the columns stored after the codes.
    codes = table_rows(snapshot.search_segments, segments, rows)[:, : model.num_levels].tolist()
    decodes = model.uses_generator(config)
    hits = []
    for place, (item, position) in enumerate(
        zip(snapshot.items(segments, ranking.items[order]), order.tolist(), strict=True)
    ):
        decoded = log_probabilities[position].tolist() if decodes else ()
        hits.append(
            SearchHit(
                rank=place + 1,
                id=item.id,
                score=float(scores[position]),
                modality=item.modality,
                text=item.text,
                image=item.image,
                fields=item.fields,
                codes=tuple(codes[place]),
                log_probabilities=tuple(one for one in decoded if not math.isnan(one)),
                # A calibration knows scores of vectors alone.
                probability=None if is_first[position] else probabilities[position],
            )
        )
    return hits, int(is_first[order].sum())


def _join(own: Found, others: Found) -> Found:
    """Return the items of two rankings for the same query; both have the scores of its vector."""
    known = set(zip(own.ranking.segments.tolist(), own.ranking.items.tolist(), strict=True))
    places = zip(others.ranking.segments.tolist(), others.ranking.items.tolist(), strict=True)
    is_new = np.array([place not in known for place in places], dtype=bool)
    columns = zip(own.ranking[:-1], others.ranking[:-1], strict=True)
    joined = [np.concatenate([mine, their[is_new]]) for mine, their in columns]
    ranking = Ranking._make([*joined, own.ranking.touched])
    decoded = np.concatenate([own.log_probabilities, others.log_probabilities[is_new]])
    return Found(ranking, decoded)


def find_rare_words(snapshot: Snapshot, text: str) -> RareWords | None:
    """Look up the items that have a rare word of a text; None if there are none."""
    num_items = max(2, snapshot.num_alive)
    words = list({word.lower(): word for word in split_words(text)}.values())
    places: list[list[Place]] = [[] for _ in words]
    for number, segment in enumerate(snapshot.segments):
        for own, rows in zip(places, segment.items.rows_of_words(words, FEW + 1), strict=True):
            own += [(number, row) for row in rows]
    weights: dict[Place, float] = defaultdict(float)
    first: set[Place] = set()
    for word, own in zip(words, places, strict=True):
        has_digit = any(character.isdigit() for character in word)
        most = FEW if has_digit else min(FEW, max(1, num_items // RARE))
        if 0 < len(own) <= most:
            for place in own:
                weights[place] += math.log(max(num_items / len(own), 1)) / math.log(num_items)
            if has_digit:
                first.update(own)
    return RareWords(weights, frozenset(first)) if weights else None


def split_words(text: str) -> Iterator[str]:
    """Yield the letters and digits of each word, without folders and a file's ending.

    >>> list(split_words("trips/IMG_2034.png of a red kite"))
    ['IMG 2034', 'of', 'a', 'red', 'kite']
    """
    for word in text.split():
        stem = re.sub(r"\.[^\W\d]\w{1,4}$", "", word.rpartition("/")[2])
        if parts := re.findall(r"[^\W_]+", stem):
            yield " ".join(parts)


def _among_rare(snapshot: Snapshot, query: EncodedQuery) -> EncodedQuery:
    """Return the query for those of its allowed items alone that have rare words."""
    masks = [np.zeros(segment.table.num_items, dtype=bool) for segment in snapshot.segments]
    for segment, row in query.rare.weights if query.rare else ():
        allowed = None if query.restriction is None else query.restriction[segment]
        masks[segment][row] = allowed is None or allowed.items[row]
    return query._replace(restriction=snapshot.restrict(masks))


def merge(results: Sequence[SearchResult], k: int, *, first: Collection[str] = ()) -> SearchResult:
    """Merge the hits of several modalities into one list of ``k``.

    They are ordered by probability if the index is calibrated, otherwise by reciprocal rank: the first hit of
    each modality, the second of each, and so on, in the order of their scores. Items of ``first`` come first.
    """
    if len(results) == 1:
        return results[0]
    hits = [hit for result in results for hit in result.hits]
    is_calibrated = all(hit.probability is not None for hit in hits)
    hits.sort(
        key=lambda hit: (
            hit.id not in first,
            -(hit.probability or 0) if is_calibrated else 0,
            hit.rank,
            -hit.score,
        )
    )
    return SearchResult(_rank(hits[:k]), sum(result.touched for result in results))


def interleave(results: Sequence[SearchResult], k: int) -> SearchResult:
    """Merge the hits of alternatives into one list of ``k``: the first of each, then the second of each.

    An item that several find has the best of its places.
    """
    if len(results) == 1:
        return results[0]
    best: dict[str, SearchHit] = {}
    for hits in zip_longest(*(result.hits for result in results)):
        for hit in hits:
            if hit is not None:
                best.setdefault(hit.id, hit)
    return SearchResult(_rank([*best.values()][:k]), sum(result.touched for result in results))


def _rank(hits: Sequence[SearchHit]) -> list[SearchHit]:
    """Number hits from 1."""
    return [dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(hits, start=1)]
