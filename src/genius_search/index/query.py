"""From search requests to hits: requests become vectors, and the items found become hits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32

from genius_search.config import SearchConfig
from genius_search.encoders.base import ItemKey, knows_words, pair_odds
from genius_search.encoders.content import Content, features_of
from genius_search.errors import UsageError
from genius_search.index.filters import Filter
from genius_search.index.hits import SearchHit, SearchResult, interleave, merge
from genius_search.index.items import Item
from genius_search.index.requests import SearchPart, SearchRequest
from genius_search.index.settings import DEPTH
from genius_search.index.snapshot import Location, Snapshot, diagnose_corruption
from genius_search.model import Genius
from genius_search.nn.arrays import normalize
from genius_search.records import Modality, instructed
from genius_search.search.fast import Wanted
from genius_search.search.find import find
from genius_search.search.rank import Evidence, Ranking, table_rows
from genius_search.search.table import Restriction

if TYPE_CHECKING:
    from PIL import Image

MOST_EXACT: Final = 10
"""Numbers that more items contain do not single one out."""
EXACT_WORD: Final = re.compile(r"\S*\d\S*")
MIN_LENGTH: Final = 1e-4
"""A weighted sum of unit vectors shorter than this, times the largest weight, has no direction."""


class EncodedQuery(NamedTuple):
    """A request, or its part for one modality, ready for beam search."""

    request: SearchRequest
    number: int
    """Position of the request; the queries of one request follow one another."""
    alternative: int
    """Position of the alternative in its request; its queries, one a modality, follow one another."""
    level0: frozenset[int]
    """Allowed codes at level 0; empty means any."""
    restriction: Restriction | None
    """Allowed items; None means all."""
    embedding: Float32[np.ndarray, " dim"]
    """The generator's input."""
    evidence: Float32[np.ndarray, " dim"]
    """The query in the space of the vectors that hits are re-ranked by."""


Constraint: TypeAlias = tuple[frozenset[int], Restriction | None]
"""Allowed codes at level 0, of which none means any, and allowed items, of which None means all."""


def has_conditions(model: Genius, request: SearchRequest) -> bool:
    """Return whether the items that a request allows have to be looked up, which may take long."""
    return request.filter != Filter() or (request.modality is not None and not model.level0_is_exact)


def find_constraints(model: Genius, snapshot: Snapshot, request: SearchRequest) -> list[Constraint]:
    """Return the constraint of each query that a request becomes."""
    if not snapshot.segments:
        return []
    with diagnose_corruption(snapshot):
        return [_constraint(model, snapshot, one) for one in split_by_modality(model, snapshot, request)]


def encode_queries(
    model: Genius,
    snapshot: Snapshot,
    requests: Sequence[SearchRequest],
    config: SearchConfig,
    constraints: Sequence[list[Constraint]] | None = None,
) -> list[EncodedQuery]:
    """Encode requests, with all images in one batch and all texts in another.

    A request becomes a query for each of its alternatives (:meth:`SearchRequest.alternatives`), and without
    modality and instruction for each modality of the index.

    Parameters
    ----------
    constraints
        of each request, if they are known (:func:`find_constraints`).

    Raises
    ------
    UsageError
        A request is invalid (:meth:`SearchRequest.check`), refers to an item that is not in the index, or its
        parts cancel out. All but the last are checked before anything is encoded.
    """
    for request in requests:
        request.check()
    if not snapshot.segments:
        nothing = np.zeros(model.dim, dtype=np.float32)
        return [
            EncodedQuery(request, number, 0, frozenset(), None, nothing, nothing)
            for number, request in enumerate(requests)
        ]
    constraints = constraints or [find_constraints(model, snapshot, request) for request in requests]
    single = [
        (number, alternative, one, constraint)
        for number, request in enumerate(requests)
        for alternative, asked in enumerate(request.alternatives())
        for one, constraint in zip(
            split_by_modality(model, snapshot, asked), constraints[number], strict=True
        )
    ]
    requests = [request for _, _, request, _ in single]
    is_raw = snapshot.manifest.embeddings == "raw" and config.rerank == "embeddings"
    parts = [(request, part) for request in requests for part in request.all_parts()]
    with diagnose_corruption(snapshot):
        from_items = iter(
            [
                _item_vectors(model, snapshot, part.id, is_raw=is_raw)
                for _, part in parts
                if part.id is not None
            ]
        )
    images = _open_images([part for _, part in parts])
    contents = [
        Content(images.get(id(part.image)), _text(model, snapshot, request, part), ItemKey("query", ""))
        for request, part in parts
        if part.id is None
    ]
    encoded = iter(_encode(model, contents, is_raw=is_raw))
    queries = []
    for number, alternative, request, (level0, restriction) in single:
        vectors = [next(encoded if part.id is None else from_items) for part in request.all_parts()]
        fused, evidence = _weighted_sum([part.weight for part in request.all_parts()], vectors)
        queries.append(EncodedQuery(request, number, alternative, level0, restriction, fused, evidence))
    return queries


def split_by_modality(model: Genius, snapshot: Snapshot, request: SearchRequest) -> list[SearchRequest]:
    """Return the request for each modality of the index, if it names neither modality nor instruction.

    Scores of items of different modalities are hard to compare, because encoders place images and texts in
    different regions; so each modality is searched by itself.
    """
    if request.modality is not None or request.instruction or not model.level0_is_exact:
        return [request]
    return [dataclasses.replace(request, modality=modality) for modality in snapshot.modalities]


def search_encoded(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    """Search for encoded queries in one batch, and return the result of each request.

    A query's beam is at least as wide as its ``k``. The hits of a request that became several queries are
    merged: those of its modalities (:func:`merge`), then those of its alternatives (:func:`interleave`).
    Items that contain the query's numbers come first (:func:`_put_exact_first`).
    """
    if not queries or not snapshot.segments:
        return [SearchResult([], 0) for _ in queries]
    with diagnose_corruption(snapshot):
        found = zip(queries, _search_with_words(model, snapshot, queries, config), strict=True)
        results = []
        for _, group in groupby(found, key=lambda pair: pair[0].number):
            alternatives = []
            for (_, k), pairs in groupby(group, key=lambda pair: (pair[0].alternative, pair[0].request.k)):
                own, by_modality = zip(*pairs, strict=True)
                merged = merge(by_modality, k)
                alternatives.append(_put_exact_first(model, snapshot, own, merged, config))
            results.append(interleave(alternatives, k))
        return results


def _search_with_words(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    """Search for queries; for those with ``hybrid="words"``, also for items that have their rare words."""
    if not any(_wants_words(query.request) for query in queries):
        return _search(model, snapshot, queries, config)
    from genius_search.index import words  # noqa: PLC0415  for these only

    if config.rerank == "none":
        raise UsageError("hybrid words needs hits ranked by codes or embeddings; rerank is none")
    deep = [
        query._replace(request=dataclasses.replace(query.request, k=max(query.request.k, words.DEPTH)))
        if _wants_words(query.request)
        else query
        for query in queries
    ]
    results = _search(model, snapshot, deep, config)
    for number, (query, own) in enumerate(zip(queries, deep, strict=True)):
        if _wants_words(query.request):
            rare = words.find_rare_words(snapshot, query.request.text or "", query.restriction)
            others: list[SearchHit] = []
            if rare.item_ids:
                having = dataclasses.replace(query.request.filter, item_ids=rare.item_ids)
                asked = dataclasses.replace(own.request, where=having, match=None)
                level0, restriction = _constraint(model, snapshot, asked)
                among = own._replace(request=asked, level0=level0, restriction=restriction)
                others = _search(model, snapshot, [among], config)[0].hits
            results[number] = words.raise_hits(results[number], others, rare.weights, query.request.k)
    return results


def _wants_words(request: SearchRequest) -> bool:
    return request.hybrid == "words" and _has_plain_text(request)


def _has_plain_text(request: SearchRequest) -> bool:
    return bool(request.text) and request.image is None and not request.parts


def _put_exact_first(
    model: Genius,
    snapshot: Snapshot,
    queries: Sequence[EncodedQuery],
    result: SearchResult,
    config: SearchConfig,
) -> SearchResult:
    """Put items whose text contains the query's words with digits first, or files of that name.

    Encoders hardly tell numbers, codes and names like IMG_2034 apart. If more than :data:`MOST_EXACT` items
    contain them, or none does, nothing changes.

    Parameters
    ----------
    queries
        one for each modality that is searched.
    """
    request = queries[0].request
    for filter_ in _exact_filters(request):
        own = []
        try:
            kinds = [one.request.modality for one in queries]
            wanted = [
                filter_ if kind is None else dataclasses.replace(filter_, modality=Modality(kind))
                for kind in kinds
            ]
            if not 0 < sum(map(snapshot.count_matching, wanted)) <= MOST_EXACT:
                continue
            for query in queries:
                asked = dataclasses.replace(query.request, where=filter_, match=None, k=MOST_EXACT)
                level0, restriction = _constraint(model, snapshot, asked)
                own.append(query._replace(request=asked, level0=level0, restriction=restriction))
            exact = merge(_search(model, snapshot, own, config), MOST_EXACT).hits
        except UsageError:  # without full-text search, or names of files
            continue
        if len(EXACT_WORD.findall(request.text or "")) == len((request.text or "").split()):
            exact = [dataclasses.replace(hit, probability=None, relevance=1.0) for hit in exact]
        ids = {hit.id for hit in exact}
        hits = [*exact, *(hit for hit in result.hits if hit.id not in ids)][: request.k]
        ranked = [dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(hits, start=1)]
        return SearchResult(ranked, result.touched)
    return result


def _exact_filters(request: SearchRequest) -> Iterator[Filter]:
    """Yield filters for the words with digits of a request: texts that have all of them, files so named."""
    words = EXACT_WORD.findall(request.text or "")
    if request.hybrid == "off" or not _has_plain_text(request):
        return
    if not 1 <= len(words) <= MOST_EXACT:
        return
    phrases = " ".join('"{}"'.format(word.replace('"', " ")) for word in words)
    yield dataclasses.replace(request.filter, match=f"{request.filter.match or ''} {phrases}".strip())
    stems = [re.sub(r"\.[^\W\d]\w{1,4}$", "", word.rpartition("/")[2]) for word in words]
    names = {" ".join(re.findall(r"[^\W_]+", stem)) for stem in stems}
    spelled = {form for name in names for form in (name, name.upper(), name.lower())}
    named = Filter.parse({"name": sorted(spelled)}).conditions
    yield dataclasses.replace(request.filter, conditions=(*request.filter.conditions, *named))


def _search(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    """Search for queries, each with the settings of its kind."""
    settings = [settings_of_kind(snapshot, query.request, config) for query in queries]
    results: dict[int, SearchResult] = {}
    for setting in dict.fromkeys(settings):
        own = [number for number, one in enumerate(settings) if one == setting]
        found = _search_alike(model, snapshot, [queries[number] for number in own], setting)
        results |= zip(own, found, strict=True)
    return [results[number] for number in range(len(queries))]


def settings_of_kind(snapshot: Snapshot, request: SearchRequest, config: SearchConfig) -> SearchConfig:
    """Return what was tuned for queries of this kind, if the search has the index's own settings."""
    tuned = snapshot.manifest.tuned
    if tuned is None or config != tuned.search or request.beam is not None or request.parts:
        return config
    has_text = bool((request.text or "").strip())
    return tuned.of_kind(
        Modality.of(has_image=request.image is not None, has_text=has_text), request.modality
    )


def _search_alike(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    calibration = snapshot.manifest.calibration
    if calibration is not None and not calibration.applies_to(config):
        calibration = None
    wanted = [
        Wanted(
            width=max(query.request.beam or config.beam, query.request.k),
            k=query.request.k if calibration is None else max(query.request.k, DEPTH),
            level0=query.level0,
            restriction=query.restriction,
        )
        for query in queries
    ]
    embeddings = np.stack([query.embedding for query in queries])
    evidence = [query.evidence for query in queries]
    answers = find(
        lambda: model.decoder_for(config),
        model.fast_for(config),
        snapshot.search_segments,
        embeddings,
        wanted,
        config,
        evidence=evidence_of(model, snapshot),
        embeddings=evidence,
    )
    results = []
    is_generated = model.uses_generator(config)
    num_levels = model.num_levels  # hits show the codes without the columns stored after them
    for query, (found, log_probabilities) in zip(queries, answers, strict=True):
        request = query.request
        ranking = found.take(slice(request.k))
        codes = table_rows(snapshot.search_segments, ranking.segments, ranking.rows)[:, :num_levels].tolist()
        scores = ranking.scores.tolist()
        decoded = log_probabilities.tolist() if is_generated else [()] * len(scores)
        items = snapshot.items(ranking.segments, ranking.items)
        probabilities: list[float] | None = None
        if calibration is None or request.parts or not items:
            relevance = _rate(model, snapshot, query, ranking, items)
        else:
            has_image, modality = request.image is not None, items[0].modality
            scale = calibration.scale(request.text, has_image=has_image, item=modality)
            likely = scale.probabilities(found.scores)
            probabilities, relevance = likely.tolist(), scale.relevance(likely).tolist()
        if not _is_understood(model, request):
            probabilities = probabilities and [0.0] * len(items)
            relevance = [0.0] * len(items)
        hits = [
            SearchHit(
                rank=number + 1,
                id=item.id,
                score=scores[number],
                modality=item.modality,
                text=item.text,
                image=item.image,
                fields=item.fields,
                codes=tuple(codes[number]),
                log_probabilities=tuple(one for one in decoded[number] if not math.isnan(one)),
                probability=None if probabilities is None else probabilities[number],
                relevance=relevance[number],
            )
            for number, item in enumerate(items)
        ]
        results.append(SearchResult(hits, ranking.touched))
    return results


def _is_understood(model: Genius, request: SearchRequest) -> bool:
    """Return whether the encoder knows any word of a request that is a text alone."""
    if request.image is not None or request.parts or not request.text:
        return True
    return knows_words(model.encoder, request.text)


def _rate(
    model: Genius, snapshot: Snapshot, query: EncodedQuery, ranking: Ranking, items: Sequence[Item]
) -> Sequence[float | None]:
    """Return the relevance of hits of an index that is not calibrated; None where it is not known.

    Texts found by a text have one if the index has a scale, images found by a text and texts found by an
    image if the encoder rates such pairs and the embeddings are sums of its features.
    """
    request, manifest = query.request, snapshot.manifest
    if request.parts or (request.image is not None and (request.text or request.instruction)):
        return [None] * len(items)
    of_texts = manifest.relevance if request.image is None else None
    is_features = manifest.embeddings == "fused" and model.sums_features
    of_pairs = pair_odds(model.encoder) if is_features else None
    if of_texts is None and of_pairs is None:
        return [None] * len(items)
    cosines = np.zeros(len(ranking.items), dtype=np.float32)
    stored = snapshot.vectors(model.ranker)
    for segment in set(ranking.segments.tolist()):
        own = ranking.segments == segment
        if stored is None:
            vectors = model.ranker.vectors(snapshot.search_segments[segment].table.ids[ranking.rows[own]])
        else:
            vectors = stored[segment](ranking.items[own])
        cosines[own] = normalize(vectors) @ query.embedding
    across = Modality.IMAGE if request.image is None else Modality.TEXT
    rated = np.full(len(items), np.nan)
    for scale, modality in ((of_texts, Modality.TEXT), (of_pairs, across)):
        if scale is not None:
            hits = np.array([item.modality is modality for item in items], dtype=bool)
            rated[hits] = scale.rate(cosines[hits], snapshot.num_alive)
    return [None if math.isnan(one) else one for one in rated.tolist()]


def default_settings(model: Genius, snapshot: Snapshot) -> SearchConfig:
    """Return the search settings of an index; see :attr:`genius_search.index.index.Index.settings`."""
    manifest = snapshot.manifest
    if manifest.tuned is not None:
        return manifest.tuned.search
    usual = model.usual_search(snapshot.num_alive)
    if manifest.embeddings == "fused" and (manifest.has_own_model or not model.has_generator):
        return dataclasses.replace(usual, rerank="embeddings")
    return usual


def evidence_of(model: Genius, snapshot: Snapshot) -> Evidence:
    """Return the data that the hits of this index can be re-ranked by."""
    vectors = snapshot.vectors(model.ranker)
    return Evidence(model.ranker, vectors, snapshot.manifest.embeddings == "raw", snapshot.densities)


def _constraint(model: Genius, snapshot: Snapshot, request: SearchRequest) -> Constraint:
    """Return the allowed level-0 codes and items.

    If the level-0 code determines the modality, it restricts decoding; otherwise it is one more filter.
    """
    conditions = request.filter
    level0: frozenset[int] = frozenset()
    if request.modality is not None:
        modality = Modality(request.modality)
        if model.level0_is_exact:
            level0 = model.level0_codes(modality)
        else:
            conditions = dataclasses.replace(conditions, modality=modality)
    return level0, None if conditions == Filter() else snapshot.restriction(
        conditions, deadline=request.deadline
    )


def _open_images(parts: Sequence[SearchPart]) -> dict[int, Image.Image]:
    """Open the image of each part, by the identity of what was given; the same is opened once."""
    given = {id(part.image): part.image for part in parts if part.image is not None}
    if not given:
        return {}
    from genius_search.data.images import SHORTEST_SIDE, as_image  # noqa: PLC0415  for images only

    return {key: as_image(image, shortest_side=SHORTEST_SIDE) for key, image in given.items()}


def _text(model: Genius, snapshot: Snapshot, request: SearchRequest, part: SearchPart) -> str:
    """Return the instruction and text of one part, as the encoder reads them."""
    instruction = request.instruction
    if not instruction:
        has_text = bool(part.text and part.text.strip())
        query = Modality.of(has_image=part.image is not None, has_text=has_text)
        wanted = snapshot.modalities[0] if request.modality is None else Modality(request.modality)
        instruction = model.instruction_for(query, wanted)
    return instructed(instruction, part.text)


def _encode(
    model: Genius, contents: Sequence[Content], *, is_raw: bool
) -> Float32[np.ndarray, "contents 2 dim"]:
    """Return two vectors of each content: the generator's input, and the one that hits are re-ranked by."""
    if not contents:
        return np.zeros((0, 2, model.dim), dtype=np.float32)
    if model.reader is not None and all(content.image is None and content.text for content in contents):
        return model.reader.read([content.text for content in contents], with_features=is_raw)
    features = features_of(model.encoder, contents)
    fused = model.fuse(features.image, features.text)
    return np.stack([fused, normalize(features.total()) if is_raw else fused], axis=1)


def _item_vectors(
    model: Genius, snapshot: Snapshot, item_id: str, *, is_raw: bool
) -> Float32[np.ndarray, "2 dim"]:
    return np.asarray(vectors_at(model, snapshot, [snapshot.locate(item_id)], is_raw=is_raw)[0])


def vectors_at(
    model: Genius, snapshot: Snapshot, places: Sequence[Location], *, is_raw: bool
) -> Float32[np.ndarray, "places 2 dim"]:
    """Return the two vectors of items as queries: their stored embeddings, or the vectors of their IDs."""
    kept = snapshot.vectors(model.ranker)
    if kept is not None:
        stored = normalize(np.stack([kept[place.segment](np.array([place.row]))[0] for place in places]))
        if snapshot.manifest.embeddings == "fused":
            return np.stack([stored, stored], axis=1)
    of_codes = normalize(model.ranker.vectors(np.stack([snapshot.id_at(place) for place in places])))
    return np.stack([of_codes, of_codes if kept is None or not is_raw else stored], axis=1)


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
