"""From search requests to hits: requests become vectors, and the items found become hits."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from jaxtyping import Float, Float32, Float64

from genius_search.config import SearchConfig, checked, led_by_generator, usual_search
from genius_search.encoders.base import Encoder, ItemKey
from genius_search.errors import UsageError
from genius_search.forks import freed_in_children
from genius_search.index.request import Hits, SearchHit, SearchPart, SearchRequest
from genius_search.index.snapshot import Snapshot, diagnose_corruption
from genius_search.index.store import Calibration, score_settings
from genius_search.model import Genius
from genius_search.nn.codebooks import as_floats, normalize
from genius_search.records import Modality, instructed
from genius_search.search.kernel import CompiledSearch, find
from genius_search.search.rank import CodeRanker, Evidence, Ranking, Wanted
from genius_search.search.table import Allowed, IdTable, Restriction

if TYPE_CHECKING:
    from PIL import Image

    from genius_search.index.learned import Choices

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
NAME_WORDS: Final = 2
"""Most words of a query that is a name, if one of them is rare."""
CODE: Final = re.compile(r".*\d{4}|(?![\d ]*[a-z]{0,2}$)(?=.*\d)", re.IGNORECASE)
"""A word with digits that names something. Short numbers, also with an ending (2nd, 80s, 5km), count it."""
ROWS_EACH: Final = 4
"""Rows that are ranked for each wanted item, if items have passages; and again so many times as many, if
they belong to too few items."""
KNOWN_WORDS: Final = 10_000
"""Frequent words that are not looked up again, which takes most of the time of looking for rare ones."""
SAMPLED: Final = 4096
"""Most IDs of a modality, in a segment, that scores are compared with before modalities are merged."""
ENOUGH: Final = 50
"""Fewer items of a modality do not tell by how much a score stands out: one in n is at most √n deviations
above the mean of all."""
ABOVE: Final = 8.0
"""How far above the best hit an item may come, in spreads of the query's products."""
KEY: Final = ItemKey("query", "")

Place: TypeAlias = tuple[int, int]
"""Segment and row of an item."""


class RareWords(NamedTuple):
    """Items that have rare words of a query in their text, or as their name."""

    weights: Mapping[Place, float]
    """The sum of an item's words' inverse document frequencies, log(N/n) / log(N)."""
    first: frozenset[Place]
    """Those that have a rare code, such as IMG_2034 or a product's number."""


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
    rare: RareWords | None = None
    shares: Mapping[Place, float] = MappingProxyType({})
    """Items that were chosen for similar queries (:mod:`genius_search.index.learned`)."""
    has_probability: bool = True
    """Whether a calibration knows such queries."""
    is_text: bool = False
    """Whether the query is a text or a vector, whose first hits are compared with those of others."""

    @property
    def raised(self) -> set[Place]:
        """Items with rare words of the query, and those that were chosen for similar ones."""
        return {*self.shares, *(() if self.rare is None else self.rare.weights)}


class Bulk(NamedTuple):
    """The vectors of the IDs of a modality, as far as scores are compared with them."""

    size: int
    mean: Float32[np.ndarray, " dim"]
    covariance: Float32[np.ndarray, "dim dim"]
    cost: float
    """Mean of what is subtracted from the products of a scaled query (:mod:`genius_search.nn.spread`)."""
    scaling: Float32[np.ndarray, "dim dim"]
    """By which a query is scaled: to the power of −½ of its product with itself by this matrix."""


class Moments(NamedTuple):
    """What drawn IDs of a table measure."""

    size: int
    """Number of IDs that they were drawn from."""
    mean: Float32[np.ndarray, " dim"]
    covariance: Float32[np.ndarray, "dim dim"]
    half_norm: float
    density: float


class Scored(NamedTuple):
    """A hit that is not read yet, since of several modalities' hits few are."""

    rank: int
    score: float
    probability: float | None
    standard_score: float | None
    is_compared: bool
    """With the least score of its modality."""
    segment: int
    item: int
    """The row of the item, or that of its best passage."""
    row: int
    """Row of its ID in the segment's table."""
    log_probabilities: Float32[np.ndarray, " levels"]


AnyHit = TypeVar("AnyHit", SearchHit, Scored)


class SearchResult(NamedTuple):
    """The result of one request."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Number of items under all beams."""


def default_settings(model: Genius, snapshot: Snapshot) -> SearchConfig:
    """Return the search settings of an index; see :attr:`genius_search.index.index.Index.settings`."""
    manifest = snapshot.manifest
    usual = usual_search(snapshot.num_rows)
    if manifest.density_weight is not None:
        usual = dataclasses.replace(usual, density_weight=manifest.density_weight)
    if manifest.embeddings == "fused" and (manifest.has_own_model or not model.has_generator):
        return dataclasses.replace(usual, rerank="embeddings")
    return usual


def adjust_settings(usual: SearchConfig, model: Genius, **changes: Any) -> SearchConfig:
    """Return search settings with those changes that are not None; a generator finds fewer candidates.

    Raises
    ------
    UsageError
        The model has no generator to lead the search, or the order of the hits needs it and it may not.
    """
    router = changes.get("router")
    if router == "generator" and not model.has_generator:
        raise UsageError("router: this model has no generator; leave router out, or `genius fit` trains one")
    usual = led_by_generator(usual) if router == "generator" else usual
    given = {name: value for name, value in changes.items() if value is not None}
    config = checked(dataclasses.replace(usual, **given)) if given else usual
    if router == "geometry" and model.uses_generator(config):
        raise UsageError(
            "router: geometry does without the generator, whose log-probabilities are the scores without "
            "re-ranking (rerank none)"
        )
    return config


class SnapshotSearcher:
    """Searches one state of an index with the same settings; what all its queries need is found out once."""

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
        self.config = config or default_settings(model, snapshot)
        manifest = snapshot.manifest
        self._is_raw = manifest.embeddings == "raw" and self.config.rerank == "embeddings"
        calibration = manifest.calibration
        is_calibrated = calibration is not None and calibration.applies_to(self.config)
        self._calibration = calibration if is_calibrated else None
        is_usual = score_settings(self.config) == score_settings(default_settings(model, snapshot))
        self._least = manifest.least if calibration is None and is_usual else {}
        self._decodes = model.uses_generator(self.config)
        self._splits = model.level0_is_exact
        self._num_levels = model.num_levels
        self._level0: dict[Modality, frozenset[int]] = {}
        self._bulks: dict[frozenset[int], Bulk] = {}
        self._measuring = freed_in_children(Lock())

    @cached_property
    def _alive(self) -> Restriction:
        return tuple(segment.alive for segment in self.snapshot.search_segments)

    @cached_property
    def _evidence(self) -> Evidence:
        return self.snapshot.evidence(self.model.ranker)

    @cached_property
    def _fast(self) -> CompiledSearch | None:
        return self.model.fast_for(self.config)

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
                    self.search([one])[0] if one.query else browse(self.snapshot, one) for one in requests
                ]
            alternatives += request.alternatives()
        results = self.search_encoded(self.encode(alternatives))
        if len(alternatives) == len(requests):
            return [Hits(result.hits[one.offset :]) for result, one in zip(results, requests, strict=True)]
        in_turn = iter(results)
        several = [[next(in_turn).hits for _ in request.alternatives()] for request in requests]
        return [
            Hits(interleave(own, one.k + one.offset)[one.offset :])
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
            return [EncodedQuery(number, one.k, unknown, unknown) for number, one in enumerate(requests)]
        queries, wanted = [], []
        with diagnose_corruption(snapshot):
            for number, request in enumerate(requests):
                modalities = [None if request.modality is None else Modality(request.modality)]
                if request.modality is None and not request.instruction and self._splits:
                    modalities = [*snapshot.modalities]
                rare = None
                if request.hybrid and request.text and request.image is None and len(request.query) == 1:
                    rare = find_rare_words(snapshot, request.text)
                is_name = rare is not None and len((request.text or "").split()) <= NAME_WORDS
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
                            rare=rare,
                            has_probability=not request.parts,
                            is_text=not (is_name or request.parts or request.image is not None),
                        )
                    )
                    wanted.append((request, modality or snapshot.modalities[0]))
        vectors = self._embed(wanted)
        return [
            query._replace(embedding=fused, evidence=evidence, feature=feature)
            for query, (fused, evidence, feature) in zip(queries, vectors, strict=True)
        ]

    def _embed(self, wanted: Sequence[tuple[SearchRequest, Modality]]) -> list[Float32[np.ndarray, "3 dim"]]:
        """Return three vectors of each request: the generator's input, that for re-ranking, and the feature.

        Parameters
        ----------
        wanted
            Requests, and the modality that each looks for, by which the model's instruction is chosen.
        """
        images: dict[int, Image.Image] = {}  # by the identity of what was given; the same is opened once
        contents: dict[tuple[int, str], int] = {}  # what is to be encoded, and its position
        sources: list[list[int | Float32[np.ndarray, "3 dim"]]] = []
        for request, modality in wanted:
            if not request.query:
                raise UsageError("this needs a query: a text, an image, or both; or a vector")
            own: list[int | Float32[np.ndarray, "3 dim"]] = []
            for part in request.query:
                if part.vector is not None:
                    own.append(self._given(part.vector))
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
                content = (id(part.image), instructed(instruction, part.text))
                own.append(contents.setdefault(content, len(contents)))
            sources.append(own)
        encoded = self._encode([(images.get(image), text) for image, text in contents])
        embedded = []
        for (request, _), own in zip(wanted, sources, strict=True):
            vectors = [encoded[source] if isinstance(source, int) else source for source in own]
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

    def _given(self, vector: object) -> Float32[np.ndarray, "3 dim"]:
        """Return the three vectors of a vector as a query, which is read as the feature of a text."""
        array, dim = np.asarray(vector), self.model.encoder.dim
        if array.shape != (dim,) or array.dtype.kind not in "fiu":
            raise UsageError(
                f"the query's vector is {array.dtype} of shape {array.shape}; expected {dim} numbers"
            )
        length = np.linalg.norm(array.astype(np.float64))
        if not np.isfinite(length) or length <= SHORTEST_VECTOR:
            raise UsageError("the query's vector has only zeros, or a number that is not finite")
        feature = np.asarray(array / length, dtype=np.float32)[None]
        fused = self.model.fuse(np.zeros_like(feature), feature)
        return np.concatenate([fused, feature if self._is_raw else fused, feature])

    def _item_vectors(self, item_id: str) -> Float32[np.ndarray, "3 dim"]:
        """Return the three vectors of an item as a query: its stored embedding, or the vector of its ID."""
        with diagnose_corruption(self.snapshot):
            place = self.snapshot.locate(item_id)
            of_codes = normalize(self.model.ranker.vectors(self.snapshot.id_at(place)[None]))
            if self._evidence.embeddings is None:
                return np.concatenate([of_codes, of_codes, of_codes])
            stored = normalize(as_floats(self._evidence.embeddings[place.segment](np.array([place.row]))))
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
            queries = [query._replace(shares=own) for query, own in zip(queries, shares, strict=True)]
        with diagnose_corruption(self.snapshot):
            found = self.rank(queries, at_least=1 if self._calibration is None else 2)
            if any(map(attrgetter("raised"), queries)):
                found = self._add_raised(queries, found)
            of_requests: dict[int, list[tuple[EncodedQuery, Ranking]]] = {}
            for query, own in zip(queries, found, strict=True):
                of_requests.setdefault(query.number, []).append((query, own))
            results = []
            for several in of_requests.values():
                parts, touched = [], 0
                for query, own in several:
                    parts.append(self._score(query, own, is_part=len(several) > 1))
                    touched += own.touched
                results.append(SearchResult(self._read(merge(parts, several[0][0].k)), touched))
            return results

    def rank(self, queries: Sequence[EncodedQuery], *, at_least: int) -> list[Ranking]:
        """Rank items for each query: ``k`` of them, or more to be ranked with those that have rare words.

        A beam is at least as wide. An item with passages has the row of the best of them.
        """
        wanted = []
        for query in queries:
            k = query.k if query.rare is None else max(query.k, DEPTH)
            width = max(query.beam or self.config.beam, k)
            wanted.append(Wanted(width, max(k, at_least), query.level0, query.restriction))
        most = 1 + self.snapshot.most_passages
        rows_each = min(most, ROWS_EACH)
        while True:
            found = find(
                lambda: self.model.decoder_for(self.config),
                self._fast,
                self.snapshot.search_segments,
                np.stack([*map(attrgetter("embedding"), queries)]),
                [one._replace(k=one.k * rows_each) for one in wanted],
                self.config,
                evidence=self._evidence,
                embeddings=[*map(attrgetter("evidence"), queries)],
            )
            if most == 1:
                return found
            kept = [*map(self._keep_best, found)]
            enough = (
                len(best.items) >= one.k or len(all_rows.items) < one.k * rows_each
                for best, all_rows, one in zip(kept, found, wanted, strict=True)
            )
            if rows_each == most or all(enough):
                return kept
            rows_each = min(most, ROWS_EACH * rows_each)

    def _places(self, ranking: Ranking) -> list[Place]:
        """Return the items of a ranking, in which they may have the rows of passages."""
        rows = self.snapshot.items_of(ranking.segments, ranking.items)
        return [*zip(ranking.segments.tolist(), rows.tolist(), strict=True)]

    def _keep_best(self, found: Ranking) -> Ranking:
        """Return the best row of each item."""
        first: dict[Place, int] = {}
        for at, place in enumerate(self._places(found)):
            first.setdefault(place, at)
        return found.take(np.array([*first.values()], dtype=np.int64))

    def _add_raised(self, queries: Sequence[EncodedQuery], found: Sequence[Ranking]) -> list[Ranking]:
        """Add the items that are raised to those found, with their own scores."""
        added = []
        for query, own in zip(queries, found, strict=True):
            known = self._places(own)
            restriction = query.restriction or self._alive
            others = [
                (segment, row)
                for segment, row in query.raised.difference(known)
                if (allowed := restriction[segment]) is None or allowed.items[row]
            ]
            added.append(self._join(query, own, others) if others else own)
        return added

    def _join(self, query: EncodedQuery, own: Ranking, others: Sequence[Place]) -> Ranking:
        """Add items to those found for a query; they are searched for among themselves."""
        places, segments = np.array(others), self.snapshot.segments
        restriction = tuple(
            Allowed.few(one.table, one.with_passages(np.sort(places[places[:, 0] == number, 1])))
            for number, one in enumerate(segments)
        )
        [more] = self.rank([query._replace(k=len(others), restriction=restriction)], at_least=1)
        columns = zip(own[:-1], more[:-1], strict=True)
        return Ranking._make([*map(np.concatenate, columns), own.touched])

    def _score(self, query: EncodedQuery, ranking: Ranking, *, is_part: bool) -> tuple[list[Scored], int]:
        """Return the hits of a query, best first, and how many of them come first because of their words."""
        scores, order, num_first = ranking.scores, np.arange(min(query.k, len(ranking.scores))), 0
        by_meaning = scores
        if query.raised:
            places = self._places(ranking)
            rare = query.rare or RareWords({}, frozenset())
            weights = np.array([rare.weights.get(place, 0.0) for place in places])
            best = np.sort(scores)[::-1][: max(query.k, DEPTH)]
            extent = float(best[0] - best[-1]) if len(best) else 0.0
            if query.shares:
                bulk = self._bulk(query.level0)
                variance = float(query.embedding @ bulk.covariance @ query.embedding)
                shares = np.array([query.shares.get(place, 0.0) for place in places], dtype=np.float32)
                by_meaning = lift(scores, shares, math.sqrt(max(0.0, variance)))
            scores = by_meaning + WORD_WEIGHT * extent * weights
            is_first = np.array([place in rare.first for place in places], dtype=bool)
            order = np.lexsort((-weights, -scores, ~is_first))[: query.k]
            num_first = int(is_first[order].sum())
        count = len(order)
        probabilities: list[float | None] = [None] * count
        if self._calibration is not None and query.has_probability:  # it knows no words
            best_first = np.argsort(-ranking.scores, kind="stable")
            known = np.empty(len(scores))
            known[best_first] = probabilities_of(self._calibration, hit_numbers(ranking.scores[best_first]))
            if query.shares:  # each as if it alone was raised: the others are as likely as before
                lead = by_meaning.astype(np.float64) - ranking.scores.max(initial=-np.inf)
                numbers = np.stack([by_meaning, lead.clip(min=0), lead.clip(max=0)], axis=1)
                raised = probabilities_of(self._calibration, numbers)
                known = np.where(by_meaning > ranking.scores, np.maximum(known, raised), known)
            probabilities = [None] * num_first + known[order].tolist()[num_first:]
        hits = map(
            Scored,
            range(1, count + 1),
            scores[order].tolist(),
            probabilities,
            self._standardize(query, scores[order]) if is_part else [None] * count,
            [False] * num_first + [query.is_text] * (count - num_first),
            ranking.segments[order].tolist(),
            ranking.items[order].tolist(),
            ranking.rows[order].tolist(),
            ranking.log_probabilities[order],
        )
        return [*hits], num_first

    def _read(self, hits: Sequence[Scored]) -> list[SearchHit]:
        """Read the items of hits, and number them."""
        places = [(hit.segment, hit.item) for hit in hits]
        segments, rows = np.array(places, dtype=np.int64).reshape(-1, 2).T
        owners = self.snapshot.items_of(segments, rows)
        found = zip(hits, owners.tolist(), self.snapshot.items(segments, owners), strict=True)
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
                    probability=hit.probability,
                    passage=passage,
                    least_score=self._least.get(item.modality) if hit.is_compared else None,
                    standard_score=hit.standard_score,
                )
            )
        return read

    def _standardize(self, query: EncodedQuery, scores: Float[np.ndarray, " hits"]) -> Sequence[float | None]:
        """Return by how many standard deviations scores exceed those of a sample of the query's modality.

        Scores of the generator, or by the encoder's own vectors, cannot be compared with such a sample, and
        neither can those of less than :data:`ENOUGH` items; then they are None.
        """
        if self.config.rerank == "none" or self._is_raw:
            return [None] * len(scores)
        bulk, vector = self._bulk(query.level0), query.evidence
        deviation = math.sqrt(max(0.0, float(vector @ bulk.covariance @ vector)))
        if bulk.size < ENOUGH or not deviation:
            return [None] * len(scores)
        cost = bulk.cost * math.sqrt(max(0.0, float(vector @ bulk.scaling @ vector)))
        return [*((scores - bulk.mean @ vector + cost) / deviation).tolist()]

    def _bulk(self, level0: frozenset[int]) -> Bulk:
        """Return what drawn IDs with these first codes measure, by one thread; none means any."""
        with self._measuring:
            return self._bulks.get(level0) or self._bulks.setdefault(level0, self._pool(level0))

    def _pool(self, level0: frozenset[int]) -> Bulk:
        """Pool what is known of the segments, which outlasts a change of the index."""
        ranker = self.model.ranker
        drawn = [
            one
            for segment in self.snapshot.segments
            for code, one in (_moments.get(segment.table) or _measure(ranker, segment.table)).items()
            if code in level0 or not level0
        ]
        sizes = np.array([one.size for one in drawn])
        shares = (sizes / sizes.sum()).astype(np.float32)
        means = np.stack([one.mean for one in drawn])
        mean = shares @ means
        covariance = (means - mean).T @ ((means - mean) * shares[:, None])
        for share, one in zip(shares, drawn, strict=True):
            covariance += share * one.covariance
        among = ranker.spread.among(level0)
        half_norm, density = shares @ np.array([(one.half_norm, one.density) for one in drawn])
        cost = self.config.density_weight * among.density_unit * density
        if self.config.rerank == "codes":
            cost += half_norm
        first = ranker.tables()[ranker.spread.level]
        first = (first - among.usage @ first) * np.sqrt(among.usage)[:, None]
        scaling = first.T @ first / max(among.first, MIN_LENGTH) ** 2
        return Bulk(int(sizes.sum()), mean, covariance, float(cost), scaling)


_moments: Final[WeakKeyDictionary[IdTable, dict[int, Moments]]] = WeakKeyDictionary()


def _measure(ranker: CodeRanker, table: IdTable) -> dict[int, Moments]:
    """Measure drawn IDs of a table, by the code of their modality; by 0 if IDs have none."""
    groups = [(0, 0, len(table))]
    if ranker.spread.level:
        firsts = table.children(0, np.array([0]), np.array([len(table)]))
        groups = [*zip(firsts.code.tolist(), firsts.low.tolist(), firsts.high.tolist(), strict=True)]
    measured = {}
    random = np.random.default_rng(0)
    for code, low, high in groups:
        rows = low + random.choice(high - low, min(high - low, SAMPLED), replace=False, shuffle=False)
        ids = table.ids[rows]
        vectors = ranker.vectors(ids)
        mean = vectors.mean(axis=0)
        vectors -= mean
        covariance = vectors.T @ vectors / len(vectors)
        half_norm, density = ranker.costs(ids, density_cost=0.0).mean(), ranker.densities(ids).mean()
        measured[code] = Moments(high - low, mean, covariance, float(half_norm), float(density))
    return _moments.setdefault(table, measured)


def lift(
    scores: Float32[np.ndarray, "*queries items"],
    shares: Float32[np.ndarray, "*queries items"],
    spread: Float32[np.ndarray, "*queries"] | float,
) -> Float32[np.ndarray, "*queries items"]:
    """Return the scores of items that move their shares of the way to above the best."""
    above = scores.max(axis=-1, keepdims=True, initial=-np.inf) + ABOVE * np.asarray(spread)[..., None]
    return np.asarray(scores + shares * (above - scores), dtype=np.float32)


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


def browse(snapshot: Snapshot, request: SearchRequest) -> Hits:
    """Return the items that the conditions of a request without a query allow, what was added last first."""
    from genius_search.index.filters import Filter  # noqa: PLC0415  only here

    conditions = request.filter or Filter()
    if request.modality is not None:
        conditions = dataclasses.replace(conditions, modality=Modality(request.modality))
    if not snapshot.segments:
        return Hits()
    with diagnose_corruption(snapshot):
        allowed = snapshot.restriction(conditions, deadline=request.deadline)
        page = slice(request.offset, request.offset + request.k)
        pairs = zip(reversed(snapshot.segments), reversed(allowed), strict=True)
        rows = [np.flatnonzero(one.items[: of.num_items]) for of, one in pairs if one is not None]
        segments = np.repeat(np.arange(len(rows))[::-1], [len(one) for one in rows])[page]
        items = snapshot.items(segments, np.concatenate(rows)[page])
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
        features[1] = as_floats(encoder.joint_features(pictures, words, [KEY] * len(contents)))
        return features
    if images:
        opened = [image for rows in images.values() if (image := contents[rows[0]][0]) is not None]
        given = encoder.image_features(opened, [KEY] * len(opened))
        for rows, vector in zip(images.values(), as_floats(given), strict=True):
            features[0, rows] = vector
    if texts:
        given = encoder.text_features([contents[row][1] for row in texts], [KEY] * len(texts))
        features[1, texts] = given if isinstance(given, np.ndarray) else as_floats(given)
    return features


def _weighted_sum(
    parts: Sequence[SearchPart], vectors: Sequence[Float32[np.ndarray, "3 dim"]]
) -> Float32[np.ndarray, "3 dim"]:
    """Return the sum of the parts' vectors by their weights, scaled to unit length."""
    factors = np.array([part.weight for part in parts], dtype=np.float32)
    totals: np.ndarray = np.tensordot(factors, np.stack(vectors), axes=1)
    if not (np.linalg.norm(totals, axis=-1) > MIN_LENGTH * np.abs(factors).max()).all():
        raise UsageError("the parts of the query cancel each other out; change their weights")
    return normalize(totals)


def find_rare_words(snapshot: Snapshot, text: str) -> RareWords | None:
    """Look up the items that have a rare word of a text; None if there are none."""
    num_items = max(2, snapshot.num_alive)
    frequent = snapshot.frequent_words
    places: dict[str, list[Place]] = {word: [] for word in split_words(text) if word not in frequent}
    for number, segment in enumerate(snapshot.segments):
        words = list(places)
        for word, rows in zip(words, segment.items.rows_of_words(words, FEW), strict=True):
            if rows is None:
                del places[word]
                if len(frequent) < KNOWN_WORDS:
                    frequent.add(word)
            else:
                places[word] += [(number, row) for row in rows]
    weights: dict[Place, float] = defaultdict(float)
    first: set[Place] = set()
    for word, own in places.items():
        is_code = CODE.match(word) is not None
        most = FEW if is_code else min(FEW, max(1, num_items // RARE))
        if 0 < len(own) <= most:
            for place in own:
                weights[place] += math.log(max(num_items / len(own), 1)) / math.log(num_items)
            if is_code:
                first.update(own)
    return RareWords(weights, frozenset(first)) if weights else None


def split_words(text: str) -> list[str]:
    """Return the letters and digits of each word, once, without folders and a file's ending.

    >>> split_words("trips/IMG_2034.png of a red kite, 24/7")
    ['IMG 2034', 'of', 'a', 'red', 'kite', '24 7']
    """
    words: dict[str, str] = {}
    for word in text.split():
        if not word.isalnum():
            stem = re.sub(r".*/(?!\d+$)|.*[^\d/]/|\.[^\W\d]\w{1,4}$", "", word)
            word = " ".join(re.findall(r"[^\W_]+", stem))  # noqa: PLW2901
        if word:
            words.setdefault(word.lower(), word)
    return [*words.values()]


def merge(parts: Sequence[tuple[list[AnyHit], int]], k: int) -> list[AnyHit]:
    """Merge the hits of several modalities into one list of ``k``; they keep their ranks.

    With the hits of each part comes how many are the first of their modality because of their words: those
    come first. The others are ordered by probability if the index is calibrated, otherwise by how far they
    stand out from the items of their modality. Where that is not known, the first hit of each modality comes
    first, then the second of each.
    """
    if len(parts) == 1:
        return parts[0][0]
    hits: list[AnyHit] = []
    first: set[int] = set()
    for own, num_first in parts:
        hits += own
        first.update(map(id, own[:num_first]))
    known = ""
    for name in ("standard_score", "probability"):
        if None not in map(attrgetter(name), hits):
            known = name

    def order(hit: AnyHit) -> tuple[bool, float, int, float]:
        return id(hit) not in first, -getattr(hit, known) if known else 0.0, hit.rank, -hit.score

    return sorted(hits, key=order)[:k]


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
