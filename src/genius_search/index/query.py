"""From search requests to hits: requests become vectors, and the items found become hits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32

from genius_search.config import SearchConfig, usual_search
from genius_search.encoders.base import Content, ItemKey, features_of
from genius_search.errors import UsageError
from genius_search.index.filters import Filter
from genius_search.index.hits import SearchHit, SearchResult, interleave, merge
from genius_search.index.requests import SearchPart, SearchRequest
from genius_search.index.snapshot import Location, Snapshot, diagnose_corruption
from genius_search.index.words import DEPTH, NO_WORDS, RareWords, find_rare_words, raise_hits
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.records import Modality, instructed
from genius_search.search.find import find
from genius_search.search.rank import Evidence, Wanted, table_rows
from genius_search.search.table import Restriction

if TYPE_CHECKING:
    from PIL import Image

SHORTEST_VECTOR: Final = 1e-12
"""A vector that is not longer has no direction."""
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
        if part.id is None and part.vector is None
    ]
    encoded = iter(_encode(model, contents, is_raw=is_raw))
    queries = []
    for number, alternative, request, (level0, restriction) in single:
        vectors = [
            _given(model, part.vector)
            if part.vector is not None
            else next(encoded if part.id is None else from_items)
            for part in request.all_parts()
        ]
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
    merged: those of its modalities (:func:`merge`), then those of its parts (:func:`interleave`).
    """
    if not queries or not snapshot.segments:
        return [SearchResult([], 0) for _ in queries]
    with diagnose_corruption(snapshot):
        rare = [_rare_words(snapshot, query.request) for query in queries]
        found = zip(queries, _search_with_words(model, snapshot, queries, rare, config), rare, strict=True)
        results = []
        for _, group in groupby(found, key=lambda one: one[0].number):
            alternatives = []
            for (_, k), one in groupby(group, key=lambda one: (one[0].alternative, one[0].request.k)):
                _, by_modality, words = zip(*one, strict=True)
                first = frozenset().union(*(own.first for own in words))
                alternatives.append(merge(by_modality, k, first=first))
            results.append(interleave(alternatives, k))
        return results


def _rare_words(snapshot: Snapshot, request: SearchRequest) -> RareWords:
    if not (request.hybrid and request.text) or len(request.all_parts()) > 1 or request.image is not None:
        return NO_WORDS
    return find_rare_words(snapshot, request.text)


def _search_with_words(
    model: Genius,
    snapshot: Snapshot,
    queries: Sequence[EncodedQuery],
    rare: Sequence[RareWords],
    config: SearchConfig,
) -> list[SearchResult]:
    """Search for queries; for those with rare words, also among the items that have them."""
    deep = [
        query._replace(request=dataclasses.replace(query.request, k=max(query.request.k, DEPTH)))
        if words.weights
        else query
        for query, words in zip(queries, rare, strict=True)
    ]
    results = _search(model, snapshot, deep, config)
    for number, (query, own, words) in enumerate(zip(queries, deep, rare, strict=True)):
        if words.weights:
            having = dataclasses.replace(query.request.filter, item_ids=frozenset(words.weights))
            asked = dataclasses.replace(own.request, where=having, match=None)
            level0, restriction = _constraint(model, snapshot, asked)
            among = own._replace(request=asked, level0=level0, restriction=restriction)
            others = _search(model, snapshot, [among], config)[0].hits
            results[number] = raise_hits(results[number], others, words, query.request.k)
    return results


def _search(
    model: Genius, snapshot: Snapshot, queries: Sequence[EncodedQuery], config: SearchConfig
) -> list[SearchResult]:
    calibration = snapshot.manifest.calibration
    if calibration is not None and not calibration.applies_to(config):
        calibration = None
    wanted = [
        Wanted(
            width=max(query.request.beam or config.beam, query.request.k),
            k=query.request.k if calibration is None else max(query.request.k, 2),
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
        if calibration is not None and not request.parts:
            probabilities = calibration.probabilities(found.scores).tolist()
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
            )
            for number, item in enumerate(items)
        ]
        results.append(SearchResult(hits, ranking.touched))
    return results


def default_settings(model: Genius, snapshot: Snapshot) -> SearchConfig:
    """Return the search settings of an index; see :attr:`genius_search.index.index.Index.settings`."""
    manifest = snapshot.manifest
    usual = usual_search(snapshot.num_alive)
    if manifest.hubness is not None:
        usual = dataclasses.replace(usual, density_weight=manifest.hubness.weight)
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
    features = features_of(model.encoder, contents)
    fused = model.fuse(features.image, features.text)
    return np.stack([fused, normalize(features.total()) if is_raw else fused], axis=1)


def _check_vector(vector: object, dim: int) -> Float32[np.ndarray, " dim"]:
    """Return a query's vector at unit length; raise :class:`UsageError` unless it can be searched with."""
    array = np.asarray(vector)
    if array.shape != (dim,) or array.dtype.kind not in "fiu":
        raise UsageError(
            f"the query's vector is {array.dtype} of shape {array.shape}; expected {dim} numbers"
        )
    length = np.linalg.norm(array.astype(np.float64))
    if not np.isfinite(length) or length <= SHORTEST_VECTOR:
        raise UsageError("the query's vector has only zeros, or a number that is not finite")
    return np.asarray(array / length, dtype=np.float32)


def _given(model: Genius, vector: np.ndarray) -> Float32[np.ndarray, "2 dim"]:
    """Return the two vectors of a vector as a query, which is read as the feature of a text."""
    feature = _check_vector(vector, model.encoder.dim)[None]
    return np.concatenate([model.fuse(np.zeros_like(feature), feature), feature])


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
