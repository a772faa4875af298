"""From search requests to hits: requests become vectors, and the items found become hits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import chain, zip_longest
from operator import itemgetter
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64

from genius_search.border import SHORTEST_VECTOR, as_numbers
from genius_search.config import SearchConfig, SearchSettings, default_search, routed_by_generator
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.encoders.passages import query_passages
from genius_search.errors import BadData, UsageError
from genius_search.forks import free_in_children
from genius_search.index.request import Hits, SearchHit, SearchPart, SearchRequest
from genius_search.index.snapshot import Location, Snapshot, check_on_error
from genius_search.index.store import Calibration, Measured, score_settings
from genius_search.index.words import (
    MAX_NAME_WORDS,
    MAX_RAISED_ITEMS,
    NO_WORD_MATCHES,
    WordMatches,
    encode_location,
    encode_locations,
    find_word_matches,
    rows_of_segment,
)
from genius_search.model import Genius
from genius_search.nn.codebooks import as_floats, normalize
from genius_search.records import Modality, instructed
from genius_search.search.kernel import CompiledSearch, find
from genius_search.search.rank import CodeRanker, Evidence, Ranking, Wanted
from genius_search.search.table import Allowed, IdTable, Restriction

if TYPE_CHECKING:
    from PIL import Image

    from genius_search.index.learned import Choices

MIN_LENGTH: Final = 1e-4
"""A weighted sum of unit vectors shorter than this, times the largest weight, has no direction."""
DEPTH: Final = 100
"""Hits of the vectors whose range of scores is the unit by which words raise items, and above whose last
score the hits of a modality stand out."""
ROWS_EACH: Final = 4
"""Rows that are ranked for each wanted item, if items have passages; and again so many times as many, if
they belong to too few items."""
WIDER: Final = 4
"""A search that ends before there are enough hits is repeated with so many times as many candidates."""
SAMPLED: Final = 4096
"""Most IDs of a modality, in a segment, whose products with a query are measured before items are raised."""
TAIL_SHARE: Final = 5
"""Of a modality with fewer than :data:`DEPTH` times so many items, one in so many is the tail."""
MIN_TAIL: Final = 2
"""Fewest hits in a tail; a modality with fewer does not tell how much a score stands out."""
COMPARABLE: Final = 10
"""Scores of modalities are compared as they are if the best hit of each is among so many first hits."""
NEXT_HIT: Final = 0.3
"""What each further hit of a modality must stand out more than the one before, if they are not comparable.
With 0, words that look for CLIP's photos and captions find their photo in the first five less often (.64, not
.68); with more, it changes little."""
SAME: Final = 0.99
"""From this cosine on, an item is the same as the query; rounding leaves a hundredth."""
ABOVE: Final = 8.0
"""How far above the best hit an item may come, in spreads of the query's products."""
KEY: Final = ItemKey("query", "")


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
    feature: Float32[np.ndarray, " dim"] = np.zeros(0, np.float32)
    """The query as the encoder has it, by which choices are compared; training fusion does not change it."""
    words: WordMatches | None = None
    """Items that have words of the query; None if these do not count."""
    score_range: float = 0.0
    """The best score of the vectors less the hundredth, of which words raise items by a share."""
    shares: Mapping[Location, float] = MappingProxyType({})
    """Items that were chosen for similar queries (:mod:`genius_search.index.learned`)."""
    has_probability: bool = True
    """Whether a calibration knows such queries."""
    is_measured: bool = True
    """Whether the calibration was measured on such queries, so that hits show probabilities."""
    is_compared: bool = False
    """Whether scores of hits are compared with those of other queries' first hits."""
    is_part: bool = False
    """Whether the request has become several queries, for a modality each."""

    @property
    def raised(self) -> Int64[np.ndarray, " items"]:
        """Places of items with words of the query, or chosen for similar ones, ascending."""
        words = NO_WORD_MATCHES if self.words is None else self.words
        if not self.shares:
            return words.locations
        chosen = [encode_location(*place) for place in self.shares]
        return np.union1d(words.locations, np.array(chosen, dtype=np.int64))


class Moments(NamedTuple):
    """Mean and covariance of the vectors of IDs."""

    size: int
    """Number of IDs, of which some were drawn."""
    mean: Float32[np.ndarray, " dim"]
    covariance: Float32[np.ndarray, "dim dim"]


class Scored(NamedTuple):
    """A hit that is not read yet, since of several modalities' hits few are."""

    rank: int
    score: float
    raised_by: float
    """The part of the score that is due to words of the query."""
    probability: float | None
    excess: float | None
    is_measured: bool
    """Whether the probability is shown."""
    is_compared: bool
    """With the least score of its modality."""
    segment: int
    item: int
    """The row of the item, or that of its best passage."""
    row: int
    """Row of its ID in the segment's table."""
    log_probabilities: Float32[np.ndarray, " levels"]


AnyHit = TypeVar("AnyHit", SearchHit, Scored)


class Part(NamedTuple, Generic[AnyHit]):
    """The hits of one modality."""

    hits: list[AnyHit]
    """Best first."""
    num_first: int
    """Number of these that come before those of other modalities, because of their words."""
    best: Sequence[float]
    """The best scores by meaning, at most :data:`COMPARABLE`; none if they are log-probabilities."""
    scores: Sequence[float]
    """Scores of the hits that are compared with those of other modalities."""
    is_same: Sequence[bool]
    """Whether each hit is the same as the query."""


class SearchResult(NamedTuple):
    """The result of one request."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Number of items under all beams."""


def default_settings(model: Genius, snapshot: Snapshot) -> SearchSettings:
    """Return the search settings of an index; see :attr:`genius_search.index.index.Index.settings`."""
    manifest = snapshot.manifest
    usual = default_search(snapshot.num_rows)
    if manifest.measured is not None:
        usual = dataclasses.replace(
            usual, shortlist=grown_shortlist(manifest.measured, snapshot.num_rows)
        )
    if manifest.density_weight is not None:
        usual = dataclasses.replace(usual, density_weight=manifest.density_weight)
    if manifest.embeddings == "fused" and (manifest.has_own_model or not model.has_generator):
        return dataclasses.replace(usual, rerank="embeddings")
    return usual


def grown_shortlist(measured: Measured, num_rows: int) -> int:
    """Return how many items to compare, in proportion to the growth of an index since it was measured."""
    return math.ceil(measured.shortlist * max(1.0, num_rows / measured.items))


def adjust_settings(usual: SearchSettings, model: Genius, config: SearchConfig) -> SearchSettings:
    """Return an index's settings with the options of a search; a generator finds fewer candidates.

    Raises
    ------
    UsageError
        An option is out of range, the model has no generator to lead the search or to order its hits, or
        the order of the hits needs the generator while ``router="geometry"`` excludes it.
    """
    settings = (routed_by_generator(usual) if config.router == "generator" else usual).with_options(
        config
    )
    for name, value in (("router", "generator"), ("rerank", "none")):
        if getattr(settings, name) == value and not model.has_generator:
            raise UsageError(
                f"{name}: this model has no generator, which {value!r} needs; leave {name} out, or "
                "`genius fit` trains one"
            )
    is_complete = isinstance(
        config, SearchSettings
    )  # in which no option is meant to exclude another
    if config.router == "geometry" and settings.rerank == "none" and not is_complete:
        raise UsageError(
            "router: geometry does without the generator, whose log-probabilities are the scores without "
            "re-ranking (rerank none)"
        )
    return settings


class SnapshotSearcher:
    """Searches one state of an index with the same settings; what all its queries need is found out once.

    Options in ``config`` change the settings of the index.
    """

    def __init__(
        self,
        model: Genius,
        snapshot: Snapshot,
        config: SearchConfig | None = None,
        choices: Choices | None = None,
    ) -> None:
        self.model = model
        self.snapshot = snapshot
        self.choices = choices
        usual = default_settings(model, snapshot)
        self.config = usual if config is None else adjust_settings(usual, model, config)
        manifest = snapshot.manifest
        self._is_raw = manifest.embeddings == "raw" and self.config.rerank == "embeddings"
        calibration = manifest.calibration
        is_calibrated = calibration is not None and calibration.applies_to(self.config)
        self._calibration = calibration if is_calibrated else None
        is_usual = score_settings(self.config) == score_settings(usual)
        self._least = manifest.least if calibration is None and is_usual else {}
        self._decodes = model.uses_generator(self.config)
        self._splits = model.level0_is_exact
        self._num_levels = model.num_levels
        self._level0: dict[Modality, frozenset[int]] = {}
        self._moments: dict[frozenset[int], Moments] = {}
        self._measuring = free_in_children(Lock())

    @cached_property
    def _alive(self) -> Restriction:
        return tuple(segment.alive for segment in self.snapshot.search_segments)

    @cached_property
    def _evidence(self) -> Evidence:
        return self.snapshot.evidence(self.model.ranker)

    @cached_property
    def _fast(self) -> CompiledSearch | None:
        return self.model.compiled_search_for(self.config)

    @cached_property
    def _instructions(self) -> dict[tuple[Modality, Modality], str | None]:
        kinds = [(query, item) for query in Modality for item in Modality]
        return {kind: self.model.instruction_for(*kind) for kind in kinds}

    def search(self, requests: Sequence[SearchRequest]) -> list[Hits]:
        """Search for several requests in one batch, and return the hits of each."""
        alternatives: list[SearchRequest] = []
        for request in requests:
            if not request.query:
                return [
                    self.search([one])[0] if one.query else browse(self.snapshot, one)
                    for one in requests
                ]
            alternatives += request.alternatives()
        results = self.search_encoded(self.encode(alternatives))
        calibration = self.snapshot.manifest.calibration
        if len(alternatives) == len(requests):
            return [
                Hits(result.hits[one.offset :], calibration=calibration)
                for result, one in zip(results, requests, strict=True)
            ]
        in_turn = iter(results)
        several = [[next(in_turn).hits for _ in request.alternatives()] for request in requests]
        return [
            Hits(interleave(own, one.k + one.offset)[one.offset :], calibration=calibration)
            for own, one in zip(several, requests, strict=True)
        ]

    def encode(self, requests: Sequence[SearchRequest]) -> list[EncodedQuery]:
        """Encode requests without alternatives, with all images in one batch and all texts in another.

        Without modality and instruction, a request becomes a query for each modality of the index: scores of
        items of different modalities are hard to compare, because encoders place images and texts in
        different regions. Otherwise it becomes one query.

        Raises
        ------
        UsageError
            A request has no query, refers to an item or a field that is not in the index, or its parts cancel
            out. All but the last are checked before anything is encoded.
        """
        snapshot = self.snapshot
        unknown = np.zeros(0, dtype=np.float32)
        if not snapshot.segments:
            return [
                EncodedQuery(number, one.k, unknown, unknown) for number, one in enumerate(requests)
            ]
        queries, wanted = [], []
        with check_on_error(snapshot):
            for number, request in enumerate(requests):
                modalities = [None if request.modality is None else Modality(request.modality)]
                if request.modality is None and not request.instruction and self._splits:
                    modalities = [*snapshot.modalities]
                words = self._find_words(request)
                is_measured = self._calibration is not None and measures(self._calibration, request)
                is_compared = self._is_compared(request, words)
                for modality in modalities:
                    level0, conditions = frozenset[int](), request.filter
                    if modality is not None and self._splits:
                        if modality not in self._level0:
                            self._level0[modality] = self.model.level0_codes(modality)
                        level0 = self._level0[modality]
                    elif modality is not None:  # one more filter
                        from genius_search.index.filters import Filter  # noqa: PLC0415  only here

                        conditions = dataclasses.replace(conditions or Filter(), modality=modality)
                    restriction = None
                    if conditions is not None:
                        restriction = snapshot.restriction(conditions, deadline=request.deadline)
                    queries.append(
                        EncodedQuery(
                            number,
                            request.k + request.offset,
                            embedding=unknown,
                            evidence=unknown,
                            level0=level0,
                            restriction=restriction,
                            beam=request.beam,
                            words=words,
                            has_probability=not request.parts,
                            is_measured=is_measured,
                            is_compared=is_compared,
                            is_part=len(modalities) > 1,
                        )
                    )
                    wanted.append((request, modality or snapshot.modalities[0]))
        vectors = self._embed(wanted)
        return [
            query._replace(embedding=fused, evidence=evidence, feature=feature)
            for query, (fused, evidence, feature) in zip(queries, vectors, strict=True)
        ]

    def _find_words(self, request: SearchRequest) -> WordMatches | None:
        """Return the items with words of a query that is a text; None if words do not count."""
        text = request.text
        if not (request.hybrid and text and request.image is None and len(request.query) == 1):
            return None
        max_raised = DEPTH if self._decodes else MAX_RAISED_ITEMS  # the generator decodes each
        return find_word_matches(self.snapshot, text, max_raised=max_raised)

    def _is_compared(self, request: SearchRequest, words: WordMatches | None) -> bool:
        """Return whether scores of a request's hits can be compared with the index's least scores.

        These were measured with texts or vectors as queries, and without conditions.
        """
        is_name = words is not None and words.has_rare and count_words(request) <= MAX_NAME_WORDS
        is_unlike = request.parts or request.image is not None or request.filter is not None
        return not (is_name or is_unlike)

    def _embed(
        self, wanted: Sequence[tuple[SearchRequest, Modality]]
    ) -> list[Float32[np.ndarray, "3 dim"]]:
        """Return three vectors of each request: the generator's input, that for re-ranking, and the feature.

        Parameters
        ----------
        wanted
            Requests, and the modality that each looks for, by which the model's instruction is chosen.
        """
        images: dict[
            int, Image.Image
        ] = {}  # by the identity of what was given; the same is opened once
        contents: dict[tuple[int, str], int] = {}  # what is to be encoded, and its position
        encoder = self.model.encoder
        divide = cache(lambda way, text: query_passages(encoder, text, partial(instructed, way)))
        sources: list[list[list[int] | Float32[np.ndarray, "3 dim"]]] = []
        for request, modality in wanted:
            if not request.query:
                raise UsageError("this needs a query: a text, an image, or both; or a vector")
            own: list[list[int] | Float32[np.ndarray, "3 dim"]] = []
            for part in request.query:
                if part.vector is not None:
                    own.append(self._given(np.asarray(part.vector)))
                    continue
                if part.id is not None:
                    own.append(self._item_vectors(part.id))
                    continue
                if part.image is not None and id(part.image) not in images:
                    from genius_search.data.images import SHORTEST_SIDE, as_image  # noqa: PLC0415  only here

                    images[id(part.image)] = as_image(part.image, shortest_side=SHORTEST_SIDE)
                instruction = request.instruction
                if not instruction:
                    has_text = bool(part.text and not part.text.isspace())
                    kind = Modality.of(has_image=part.image is not None, has_text=has_text)
                    instruction = self._instructions[kind, modality]
                keys = [(id(part.image), text) for text in divide(instruction, part.text or "")]
                own.append([contents.setdefault(key, len(contents)) for key in keys])
            sources.append(own)
        encoded = self._encode([(images.get(image), text) for image, text in contents])
        embedded = []
        for (request, _), own in zip(wanted, sources, strict=True):
            vectors = [_mean(encoded[one]) if isinstance(one, list) else one for one in own]
            is_sum = len(vectors) > 1 or request.query[0].weight <= 0
            embedded.append(_weighted_sum(request.query, vectors) if is_sum else vectors[0])
        return embedded

    def _encode(
        self, contents: Sequence[tuple[Image.Image | None, str]]
    ) -> Float32[np.ndarray, "contents 3 dim"]:
        """Return the three vectors of images, texts, or both."""
        if not contents:
            return np.zeros((0, 3, self.model.dim), dtype=np.float32)
        image, text = features_of(self.model.encoder, contents)
        fused = self.model.fuse(image, text)
        feature = normalize(image + text)
        return np.stack([fused, feature if self._is_raw else fused, feature], axis=1)

    def _given(self, vector: np.ndarray) -> Float32[np.ndarray, "3 dim"]:
        """Return the three vectors of a vector as a query, which is read as the feature of a text."""
        dim = self.model.encoder.dim
        if vector.shape != (dim,):
            raise UsageError(
                f"the query's vector is {vector.dtype} of shape {vector.shape}; expected {dim} numbers"
            )
        wide = vector.astype(np.float64)  # in which large squares are finite
        length = math.sqrt(wide.dot(wide))
        if not SHORTEST_VECTOR < length < math.inf:  # NaN is not between them either
            raise UsageError("the query's vector has only zeros, or a number that is not finite")
        feature = (wide / length).astype(np.float32)[None]
        fused = self.model.fuse(np.zeros_like(feature), feature)
        return np.concatenate([fused, feature if self._is_raw else fused, feature])

    def _item_vectors(self, item_id: str | int) -> Float32[np.ndarray, "3 dim"]:
        """Return the three vectors of an item as a query: its stored embedding, or the vector of its ID."""
        with check_on_error(self.snapshot):
            place = self.snapshot.locate(item_id)
            of_codes = normalize(self.model.ranker.vectors(self.snapshot.id_at(place)[None]))
            if self._evidence.embeddings is None:
                return np.concatenate([of_codes, of_codes, of_codes])
            stored = normalize(
                as_floats(self._evidence.embeddings[place.segment](np.array([place.row])))
            )
        if not self._evidence.is_raw:
            return np.concatenate([stored, stored, stored])
        return np.concatenate([of_codes, stored if self._is_raw else of_codes, stored])

    def search_encoded(self, queries: Sequence[EncodedQuery]) -> list[SearchResult]:
        """Search for encoded queries in one batch, and return the result of each request.

        The hits of a request that became several queries are merged (:func:`merge`).
        """
        if not queries or not self.snapshot.segments:
            return [SearchResult([], 0) for _ in queries]
        if self.choices is not None:
            shares = self.choices.shares(np.stack([query.feature for query in queries]))
            queries = [
                query._replace(shares=own) for query, own in zip(queries, shares, strict=True)
            ]
        with check_on_error(self.snapshot):
            found = self.rank(queries, at_least=1 if self._calibration is None else 2)
            if any(query.words is not None or query.shares for query in queries):
                queries = self._measure_ranges(queries, found)
                found = self._add_raised(queries, found)
            of_requests: dict[int, list[tuple[EncodedQuery, Ranking]]] = {}
            for query, own in zip(queries, found, strict=True):
                of_requests.setdefault(query.number, []).append((query, own))
            results = []
            for several in of_requests.values():
                parts = [self._score(query, ranking) for query, ranking in several]
                touched = sum(ranking.touched for _, ranking in several)
                results.append(SearchResult(self._read(merge(parts, several[0][0].k)), touched))
            return results

    def rank(self, queries: Sequence[EncodedQuery], *, at_least: int) -> list[Ranking]:
        """Rank items for each query: ``k`` of them, or more where others are to be ranked with them.

        A search ends at its last candidate, or at the end of its shortlist. If there are too few hits then,
        it is repeated with :data:`WIDER` times as many, and what it finds in addition comes after. So the
        first hits are the same for any ``k``, and the last hit is the last item. An item with passages has
        the row of the best of them.
        """
        num_hits = [self._num_hits(query, at_least) for query in queries]
        rankings: list[Ranking] = []
        settings, pending = self.config, [*range(len(queries))]
        while True:
            some = [(queries[number], num_hits[number]) for number in pending]
            searched = self._rank_once(
                [query for query, _ in some], [count for _, count in some], settings
            )
            if not rankings:
                rankings = searched
            else:
                for number, ranking in zip(pending, searched, strict=True):
                    rankings[number] = self._append(rankings[number], ranking, queries[number])
            pending = [
                number
                for number, ranking in zip(pending, searched, strict=True)
                if len(rankings[number].items) < num_hits[number]
                and not self._has_ranked_all(queries[number], ranking, settings)
            ]
            if not pending:
                pairs = zip(rankings, num_hits, strict=True)
                return [ranking.take(slice(count)) for ranking, count in pairs]
            settings = dataclasses.replace(
                settings,
                beam=WIDER * settings.beam,
                candidates=WIDER * settings.candidates,
                shortlist=WIDER * settings.shortlist,
            )

    def _num_hits(self, query: EncodedQuery, at_least: int) -> int:
        """Return how many items to rank for a query."""
        count = max(query.k, at_least)
        if query.words is not None or query.is_part:
            count = max(count, DEPTH + 1)
        return min(count, self.snapshot.num_rows)

    def _beam(self, query: EncodedQuery, settings: SearchSettings) -> int:
        """Return the beam width of a query: its own in the first search, at least theirs in wider ones."""
        if settings is self.config:
            return query.beam or settings.beam
        return max(query.beam or 0, settings.beam)

    def _has_ranked_all(
        self, query: EncodedQuery, ranking: Ranking, settings: SearchSettings
    ) -> bool:
        """Return whether a search with these settings has ranked every item that the query may find."""
        if settings.rerank == "embeddings" and 0 < settings.shortlist < ranking.touched:
            return False
        num_rows = self.snapshot.num_rows
        are_candidates = settings.rerank != "none" and settings.candidates >= num_rows
        return (
            are_candidates
            or self._beam(query, settings) >= num_rows
            or ranking.touched >= self._num_allowed(query)
        )

    def _num_allowed(self, query: EncodedQuery) -> int:
        """Return the number of items and passages that the conditions of a query allow."""
        pairs = zip(self.snapshot.search_segments, query.restriction or self._alive, strict=True)
        return sum(
            segment.table.num_items if allowed is None else int(allowed.items.sum())
            for segment, allowed in pairs
        )

    def _rank_once(
        self, queries: Sequence[EncodedQuery], num_hits: Sequence[int], settings: SearchSettings
    ) -> list[Ranking]:
        """Rank so many items for each query, or as many as a search with these settings finds."""
        max_rows = 1 + self.snapshot.max_passages
        rows_each = min(max_rows, ROWS_EACH)
        wanted = [
            Wanted(self._beam(query, settings), count, query.level0, query.restriction)
            for query, count in zip(queries, num_hits, strict=True)
        ]
        limit = settings.shortlist if settings.rerank == "embeddings" else 0
        while True:
            counts = [min(one.k * rows_each, limit or self.snapshot.num_rows) for one in wanted]
            rankings = find(
                lambda: self.model.decoder_for(settings),
                self._fast,
                self.snapshot.search_segments,
                np.stack([query.embedding for query in queries]),
                [one._replace(k=count) for one, count in zip(wanted, counts, strict=True)],
                settings,
                evidence=self._evidence,
                embeddings=[query.evidence for query in queries],
            )
            if max_rows == 1:
                return rankings
            items = [self._keep_best(ranking) for ranking in rankings]
            enough = (
                len(best.items) >= one.k or len(rows.items) < one.k * rows_each
                for best, rows, one in zip(items, rankings, wanted, strict=True)
            )
            if rows_each == max_rows or all(enough):
                return items
            rows_each = min(max_rows, ROWS_EACH * rows_each)

    def _append(self, ranking: Ranking, wider: Ranking, query: EncodedQuery) -> Ranking:
        """Add what a wider search finds in addition; it scores no more than what was found before.

        Only items that words or choices raise keep their scores, since they may be added without this search.
        """
        new = wider.take(~np.isin(self._places(wider), self._places(ranking)))
        last = ranking.scores.min(initial=np.inf)
        limits = np.where(np.isin(self._places(new), query.raised), np.inf, last)
        new = new._replace(scores=np.minimum(new.scores, limits).astype(np.float32))
        return join_rankings(ranking, new)

    def _places(self, ranking: Ranking) -> Int64[np.ndarray, " hits"]:
        """Return the places of the items of a ranking, which may have the rows of passages."""
        return encode_locations(
            ranking.segments, self.snapshot.owner_rows(ranking.segments, ranking.items)
        )

    def _keep_best(self, found: Ranking) -> Ranking:
        """Return the best row of each item."""
        return found.take(np.sort(np.unique(self._places(found), return_index=True)[1]))

    def _measure_ranges(
        self, queries: Sequence[EncodedQuery], found: Sequence[Ranking]
    ) -> list[EncodedQuery]:
        """Return queries with the range of scores among all items, whatever conditions leave."""
        whole = [
            query._replace(k=DEPTH, restriction=None)
            for query in queries
            if query.words is not None and query.restriction is not None
        ]
        others = iter(self.rank(whole, at_least=1) if whole else ())
        measured = []
        for query, own in zip(queries, found, strict=True):
            is_limited = query.words is not None and query.restriction is not None
            scores = (next(others) if is_limited else own).scores[:DEPTH]
            score_range = float(np.ptp(scores)) if len(scores) else 0.0
            measured.append(query._replace(score_range=score_range))
        return measured

    def _add_raised(
        self, queries: Sequence[EncodedQuery], found: Sequence[Ranking]
    ) -> list[Ranking]:
        """Add the items that are raised to those found, with their own scores."""
        added = []
        for query, own in zip(queries, found, strict=True):
            others = query.raised
            if len(own.items):
                known = np.sort(self._places(own))
                others = others[known.take(known.searchsorted(others), mode="clip") != others]
            added.append(self._join(query, own, others) if len(others) else own)
        return added

    def _join(
        self, query: EncodedQuery, own: Ranking, others: Int64[np.ndarray, " items"]
    ) -> Ranking:
        """Add the items at these places that the query allows, found in a search among them."""
        restriction, num_others = [], 0
        allowed_items = query.restriction or self._alive
        for number, (one, allowed) in enumerate(
            zip(self.snapshot.segments, allowed_items, strict=True)
        ):
            rows = rows_of_segment(number, others)
            if allowed is not None:
                rows = rows[allowed.items[rows]]
            restriction.append(Allowed.of_rows(one.table, one.with_passages(rows)))
            num_others += len(rows)
        if not num_others:
            return own
        [more] = self.rank(
            [query._replace(k=num_others, restriction=tuple(restriction))], at_least=1
        )
        return join_rankings(own, more)

    def _score(self, query: EncodedQuery, ranking: Ranking) -> Part[Scored]:
        """Return the hits of a query, best first."""
        scores, order, num_first = ranking.scores, np.arange(min(query.k, len(ranking.scores))), 0
        by_meaning = compared = scores
        is_compared = np.ones(len(scores), dtype=bool)
        if query.words is not None or query.shares:
            places = self._places(ranking)
            words = (query.words or NO_WORD_MATCHES).for_locations(places)
            is_compared = ~(words.has_all | words.has_code)
            if query.shares:
                chosen = {encode_location(*place): share for place, share in query.shares.items()}
                shares = np.array(
                    [chosen.get(place, 0.0) for place in places.tolist()], dtype=np.float32
                )
                by_meaning = lift(scores, shares, math.sqrt(self._variance(query)))
            scores = by_meaning + query.score_range * words.shares
            compared = by_meaning + query.score_range * words.rare_shares
            order = np.lexsort((-words.shares, -scores, ~words.has_code))[: query.k]
            num_first = int(words.has_code[order].sum())
        count = len(order)
        probabilities: list[float | None] = [None] * count
        if self._calibration is not None and query.has_probability:  # it knows no words
            best_first = np.argsort(-ranking.scores, kind="stable")
            known = np.empty(len(scores))
            known[best_first] = probabilities_of(
                self._calibration, hit_numbers(ranking.scores[best_first])
            )
            if query.shares:  # each as if it alone was raised: the others are as likely as before
                lead = by_meaning.astype(np.float64) - ranking.scores.max(initial=-np.inf)
                numbers = np.stack([by_meaning, lead.clip(min=0), lead.clip(max=0)], axis=1)
                raised = probabilities_of(self._calibration, numbers)
                known = np.where(by_meaning > ranking.scores, np.maximum(known, raised), known)
            probabilities = [None] * num_first + known[order].tolist()[num_first:]
        excess = None
        if query.is_part and self.config.rerank != "none":
            excess = find_excess(ranking.scores, compared[order], ranking.touched)
        hits = map(
            Scored,
            range(1, count + 1),
            scores[order].tolist(),
            (scores - by_meaning)[order].tolist(),
            probabilities,
            [None] * count if excess is None else excess.tolist(),
            [query.is_measured] * count,
            (is_compared & query.is_compared)[order].tolist(),
            ranking.segments[order].tolist(),
            ranking.items[order].tolist(),
            ranking.rows[order].tolist(),
            ranking.log_probabilities[order],
        )
        best = np.sort(by_meaning)[::-1][:COMPARABLE]
        if self.config.rerank == "none":
            best = best[:0]
        is_same = compared[order] >= SAME
        if query.is_part and self.config.rerank == "codes":  # even the query's own item scores less
            is_same[:COMPARABLE] |= self._code_cosines(query, ranking, order[:COMPARABLE]) >= SAME
        return Part([*hits], num_first, best.tolist(), compared[order].tolist(), is_same.tolist())

    def _code_cosines(
        self, query: EncodedQuery, ranking: Ranking, order: Int64[np.ndarray, " hits"]
    ) -> Float32[np.ndarray, " hits"]:
        """Return the cosines of a query with the vectors of hits' IDs."""
        if not len(order):
            return np.zeros(0, dtype=np.float32)
        places = zip(ranking.segments[order].tolist(), ranking.rows[order].tolist(), strict=True)
        ids = np.stack([self.snapshot.segments[segment].table.ids[row] for segment, row in places])
        cosines = normalize(self.model.ranker.vectors(ids)) @ normalize(query.embedding)
        return np.asarray(cosines, dtype=np.float32)

    def _read(self, hits: Sequence[Scored]) -> list[SearchHit]:
        """Read the items of hits, and number them."""
        places = [(hit.segment, hit.item) for hit in hits]
        segments, rows = np.array(places, dtype=np.int64).reshape(-1, 2).T
        owners = self.snapshot.owner_rows(segments, rows)
        found = zip(hits, owners.tolist(), self.snapshot.items_at(segments, owners), strict=True)
        read = []
        for rank, (hit, owner, item) in enumerate(found, start=1):
            segment, passage = self.snapshot.segments[hit.segment], None
            if hit.item != owner and item.text is not None:
                _, start, end = segment.passages[hit.item - segment.num_items].tolist()
                passage = item.text[start:end]
            steps = hit.log_probabilities
            decoded = tuple(steps[~np.isnan(steps)].tolist()) if self._decodes else ()
            read.append(
                SearchHit(
                    rank=rank,
                    id=item.id,
                    score=hit.score,
                    modality=item.modality,
                    text=item.text,
                    image=item.image,
                    fields=item.fields,
                    codes=tuple(segment.table.ids[hit.row, : self._num_levels].tolist()),
                    log_probabilities=decoded,
                    probability=hit.probability if hit.is_measured else None,
                    passage=passage,
                    least_score=self._least_score(hit, item.modality),
                    excess=hit.excess,
                )
            )
        return read

    def _least_score(self, hit: Scored, modality: Modality) -> float | None:
        """Return the least score that a hit is compared with, raised as the hit is."""
        least = self._least.get(modality)
        return None if least is None or not hit.is_compared else least + hit.raised_by

    def _variance(self, query: EncodedQuery) -> float:
        """Return the variance of the products of a query with the items that it may find."""
        with self._measuring:
            moments = self._moments.get(query.level0) or self._moments.setdefault(
                query.level0, self._pool_moments(query.level0)
            )
        return max(0.0, float(query.embedding @ moments.covariance @ query.embedding))

    def _pool_moments(self, level0: frozenset[int]) -> Moments:
        """Pool the moments of the segments' IDs with these first codes; none means any."""
        ranker = self.model.ranker
        parts = [
            moments
            for segment in self.snapshot.segments
            for code, moments in (
                _moments.get(segment.table) or _measure(ranker, segment.table)
            ).items()
            if code in level0 or not level0
        ]
        sizes = np.array([part.size for part in parts])
        shares = (sizes / sizes.sum()).astype(np.float32)
        means = np.stack([part.mean for part in parts])
        mean = shares @ means
        covariance = (means - mean).T @ ((means - mean) * shares[:, None])
        for share, part in zip(shares, parts, strict=True):
            covariance += share * part.covariance
        return Moments(int(sizes.sum()), mean, covariance)


_moments: Final[WeakKeyDictionary[IdTable, dict[int, Moments]]] = WeakKeyDictionary()
"""The moments of tables, which outlast a change of the index."""


def _measure(ranker: CodeRanker, table: IdTable) -> dict[int, Moments]:
    """Measure drawn IDs of a table, by the code of their modality; by 0 if IDs have none."""
    groups = [(0, 0, len(table))]
    if ranker.spread.level:
        firsts = table.children(0, np.array([0]), np.array([len(table)]))
        groups = [
            *zip(firsts.code.tolist(), firsts.low.tolist(), firsts.high.tolist(), strict=True)
        ]
    measured = {}
    random = np.random.default_rng(0)
    for code, low, high in groups:
        rows = low + random.choice(
            high - low, min(high - low, SAMPLED), replace=False, shuffle=False
        )
        vectors = ranker.vectors(table.ids[rows])
        mean = vectors.mean(axis=0)
        vectors -= mean
        measured[code] = Moments(high - low, mean, vectors.T @ vectors / len(vectors))
    return _moments.setdefault(table, measured)


def find_excess(
    scores: Float32[np.ndarray, " hits"], raised: Float32[np.ndarray, " raised"], num_items: int
) -> Float64[np.ndarray, " raised"] | None:
    """Return by how much scores stand out from the tail of the best scores of a modality.

    With u the k-th best score and m the mean excess over it of the better ones, a score s has the excess
    (s - u) / m - log k. Scores by chance have an exponential tail, so that about exp(-excess) items score as
    much by chance. Modalities can be compared by it, whatever the scale of their scores.

    Parameters
    ----------
    scores
        the best scores of the modality.
    raised
        scores to judge; words and choices may have raised them.
    num_items
        number of the items of the modality.

    Returns
    -------
    None if there are too few items.
    """
    size = min(DEPTH, num_items // TAIL_SHARE)
    best = np.sort(scores)[::-1][: size + 1].astype(np.float64)
    if size < MIN_TAIL or len(best) <= size or best[0] <= best[-1]:
        return None
    mean = float((best[:-1] - best[-1])[1:].mean()) or float(best[0] - best[-1])
    return np.asarray((raised - best[-1]) / mean - math.log(size))


def lift(
    scores: Float32[np.ndarray, "*queries items"],
    shares: Float32[np.ndarray, "*queries items"],
    spread: Float32[np.ndarray, "*queries"] | float,
) -> Float32[np.ndarray, "*queries items"]:
    """Return the scores of items that move their shares of the way to above the best."""
    above = (
        scores.max(axis=-1, keepdims=True, initial=-np.inf) + ABOVE * np.asarray(spread)[..., None]
    )
    return np.asarray(scores + shares * (above - scores), dtype=np.float32)


def join_rankings(first: Ranking, second: Ranking) -> Ranking:
    """Return the hits of two rankings, with the number of candidates of the first."""
    columns = zip(first[:-1], second[:-1], strict=True)
    return Ranking._make([*map(np.concatenate, columns), first.touched])


def probabilities_of(
    calibration: Calibration, numbers: Float64[np.ndarray, "hits 3"]
) -> Float64[np.ndarray, " hits"]:
    """Return the probabilities of hits by their numbers (:func:`hit_numbers`)."""
    log_odds = calibration.intercept + numbers @ np.array(calibration.weights)
    return np.asarray(1 / (1 + np.exp(-log_odds)))


def hit_numbers(scores: Float32[np.ndarray, " hits"]) -> Float64[np.ndarray, "hits 3"]:
    """Return the score, the lead of the first hit over the second, and minus the distance to the first.

    The scores are one query's, best first; at least two if so many were found.
    """
    own = scores.astype(np.float64)
    numbers = np.zeros((len(own), 3))
    numbers[:, 0] = own
    numbers[:1, 1] = own[:1] - own[1:2] if len(own) > 1 else 0.0
    numbers[:, 2] = own - own[:1]
    return numbers


def kind_of(request: SearchRequest) -> str:
    """Return the kind of a request's query: a modality, ``vector``, or ``parts``."""
    if len(request.query) != 1 or request.parts:
        return "parts"
    [part] = request.query
    if part.vector is not None:
        return "vector"
    return Modality.of(has_image=part.image is not None, has_text=bool(part.text)).value


def count_words(request: SearchRequest) -> int:
    """Return the number of words of a request's text."""
    return len((request.text or "").split())


def measures(calibration: Calibration, request: SearchRequest) -> bool:
    """Return whether a calibration was measured on queries like a request.

    None of them had conditions, which leave out wrong answers; shorter ones have more right answers.
    """
    fewest = calibration.fewest_words.get(kind_of(request))
    return request.filter is None and fewest is not None and count_words(request) >= fewest


def browse(snapshot: Snapshot, request: SearchRequest) -> Hits:
    """Return the items that the conditions of a request without a query allow, what was added last first."""
    from genius_search.index.filters import Filter  # noqa: PLC0415  only here

    conditions = request.filter or Filter()
    if request.modality is not None:
        conditions = dataclasses.replace(conditions, modality=Modality(request.modality))
    if not snapshot.segments:
        return Hits()
    with check_on_error(snapshot):
        allowed = snapshot.restriction(conditions, deadline=request.deadline)
        page = slice(request.offset, request.offset + request.k)
        pairs = zip(reversed(snapshot.segments), reversed(allowed), strict=True)
        rows = [np.flatnonzero(one.items[: of.num_items]) for of, one in pairs if one is not None]
        segments = np.repeat(np.arange(len(rows))[::-1], [len(one) for one in rows])[page]
        items = snapshot.items_at(segments, np.concatenate(rows)[page])
    return Hits(
        SearchHit(rank, item.id, 0.0, item.modality, item.text, item.image, item.fields, (), ())
        for rank, item in enumerate(items, start=request.offset + 1)
    )


def features_of(
    encoder: Encoder, contents: Sequence[tuple[Image.Image | None, str]]
) -> Float32[np.ndarray, "2 contents dim"]:
    """Return the features of images and of texts, zero where there is none; an image is encoded once."""
    features = np.zeros((2, len(contents), encoder.dim), dtype=np.float32)
    images: dict[int, list[int]] = {}
    texts = []
    for row, (image, text) in enumerate(contents):
        if image is None and not text:
            raise UsageError("a query has neither an image nor a text; it needs one of them")
        if image is not None:
            images.setdefault(id(image), []).append(row)
        if text:
            texts.append(row)
    if hasattr(encoder, "joint_features"):
        pictures, words = zip(*contents, strict=True)
        features[1] = _read_features(encoder.joint_features(pictures, words, [KEY] * len(contents)))
        return features
    if images:
        opened = [image for rows in images.values() if (image := contents[rows[0]][0]) is not None]
        given = encoder.image_features(opened, [KEY] * len(opened))
        for rows, vector in zip(images.values(), _read_features(given), strict=True):
            features[0, rows] = vector
    if texts:
        given = encoder.text_features([contents[row][1] for row in texts], [KEY] * len(texts))
        features[1, texts] = _read_features(given)
    return features


def _read_features(features: object) -> Float[np.ndarray, "contents dim"]:
    """Return the features of queries that an encoder gave; refuse those that are not finite."""
    array = as_numbers(features, "the features of the query")
    if not np.isfinite(array).all():
        raise BadData("the encoder's features of this query are not finite; try another query")
    return array


def _mean(vectors: Float32[np.ndarray, "passages 3 dim"]) -> Float32[np.ndarray, "3 dim"]:
    """Return the normalised mean of passages' vectors; that of one is itself."""
    return vectors[0] if len(vectors) == 1 else normalize(vectors.mean(axis=0))


def _weighted_sum(
    parts: Sequence[SearchPart], vectors: Sequence[Float32[np.ndarray, "3 dim"]]
) -> Float32[np.ndarray, "3 dim"]:
    """Return the sum of the parts' vectors by their weights, scaled to unit length."""
    factors = np.array([part.weight for part in parts], dtype=np.float32)
    totals: np.ndarray = np.tensordot(factors, np.stack(vectors), axes=1)
    if not (np.linalg.norm(totals, axis=-1) > MIN_LENGTH * np.abs(factors).max()).all():
        raise UsageError("the parts of the query cancel each other out; change their weights")
    return normalize(totals)


def merge(parts: Sequence[Part[AnyHit]], k: int) -> list[AnyHit]:
    """Merge the hits of several modalities into one list of ``k``; they keep their ranks.

    Hits with a code of the query come first, and then what is the same as the query. The others are ordered

    - by probability, if the index is calibrated;
    - by score, if the best hit of each modality is among the first :data:`COMPARABLE` by score;
    - otherwise by how far they stand out among the best of their modality (:func:`find_excess`), as encoders
      such as CLIP place images and texts in different regions, and scores alone would hide a modality. Each
      further hit of a modality must stand out more, by :data:`NEXT_HIT`.

    Where that is not known, the first hit of each modality comes first, then the second of each.
    """
    if len(parts) == 1:
        return parts[0].hits
    keyed: list[tuple[tuple[float, ...], AnyHit]] = []
    by_score = are_comparable(parts)
    for part in parts:
        values = _merging_values(part, parts, by_score=by_score)
        for position, (hit, value) in enumerate(zip(part.hits, values, strict=True)):
            is_first = position < part.num_first
            keyed.append(
                ((not is_first, not part.is_same[position], -value, hit.rank, -hit.score), hit)
            )
    keyed.sort(key=itemgetter(0))
    return [hit for _, hit in keyed[:k]]


def are_comparable(parts: Sequence[Part[AnyHit]]) -> bool:
    """Return whether scores of the modalities with hits can be compared."""
    firsts = [max(part.best) for part in parts if part.best]
    scores = sorted(chain.from_iterable(part.best for part in parts), reverse=True)
    return bool(scores) and min(firsts) >= scores[:COMPARABLE][-1]


def _merging_values(
    part: Part[AnyHit], parts: Sequence[Part[AnyHit]], *, by_score: bool
) -> Sequence[float]:
    """Return the values by which hits are ordered, in descending order.

    Words have moved hits within their modality, but not the hits of the modality as a whole.
    """
    everything = [*chain.from_iterable(other.hits for other in parts)]
    if all(hit.probability is not None for hit in everything):
        return sorted((hit.probability or 0.0 for hit in part.hits), reverse=True)
    if by_score:
        return sorted(part.scores, reverse=True)
    if any(hit.excess is None for hit in everything):
        return [0.0] * len(part.hits)
    excesses = sorted((hit.excess or 0.0 for hit in part.hits), reverse=True)
    return [excess - NEXT_HIT * position for position, excess in enumerate(excesses)]


def interleave(alternatives: Sequence[Sequence[SearchHit]], k: int) -> list[SearchHit]:
    """Merge the hits of alternatives into one list of ``k``: the first of each, then the second of each.

    An item that several find has the best of its places.
    """
    best: dict[str, SearchHit] = {}
    for hits in zip_longest(*alternatives):
        for hit in hits:
            if hit is not None:
                best.setdefault(hit.id, hit)
    return numbered([*best.values()][:k])


def numbered(hits: Sequence[SearchHit]) -> list[SearchHit]:
    """Return hits with ranks from 1."""
    return [dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(hits, start=1)]
