"""From search requests to hits: the search of one snapshot of an index.

A request becomes encoded queries (``encode.py``). Each is ranked by the compiled search or PyTorch,
with a wider search if there are too few hits. The ranked items are candidates, whose scores choices
and words raise (``score.py``). The hits of several modalities are merged (``merge.py``). The items
of the hits are read last, when they are asked for (``hits.py``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.config import (
    SearchConfig,
    SearchSettings,
    default_cell_search,
    default_search,
    routed_by_generator,
)
from genius_search.errors import UsageError
from genius_search.index.encode import EncodedQuery, QueryEncoder
from genius_search.index.hits import HitSettings, make_hits
from genius_search.index.merge import (
    COMPARABLE_RANK,
    SAME_ITEM_COSINE,
    ModalityHits,
    interleave,
    merge_modalities,
)
from genius_search.index.moments import ProductSpread
from genius_search.index.request import Hits, SearchHit, SearchRequest, Vector
from genius_search.index.score import (
    RANGE_DEPTH,
    Candidates,
    add_probabilities,
    concatenate,
    find_excess,
    join_rankings,
    raise_chosen,
    raise_words,
    top_k,
)
from genius_search.index.snapshot import Snapshot, check_files_on_error
from genius_search.index.store import Measured, score_settings
from genius_search.index.words import encode_location, encode_locations, rows_of_segment
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.records import Modality
from genius_search.search.kernel import CompiledSearch, search_segments
from genius_search.search.rank import Evidence, Ranking
from genius_search.search.table import Allowed, Restriction

if TYPE_CHECKING:
    from genius_search.index.learned import Choices

ROWS_PER_HIT: Final = 4
"""Rows that are ranked for each hit if items have passages, which are rows, too. If the rows belong
to too few items, this factor is applied again."""
WIDENING_FACTOR: Final = 4
"""A search with too few hits is repeated with this many times the beam, candidates and
shortlist."""


class SearchResult(NamedTuple):
    """The result of one request."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Number of items under all beams."""


def default_settings(model: Genius, snapshot: Snapshot) -> SearchSettings:
    """Return the default settings of an index; see :attr:`~genius_search.Index.settings`."""
    manifest = snapshot.manifest
    has_fine_codes = manifest.fine_codes > 0
    settings = (default_cell_search if has_fine_codes else default_search)(snapshot.num_rows)
    weight = manifest.density_weight
    if manifest.measured is not None:
        shortlist = grow_shortlist(manifest.measured, snapshot.num_rows)
        margin = manifest.measured.margin
        settings = dataclasses.replace(
            settings, shortlist=shortlist, margin=settings.margin if margin is None else margin
        )
        if weight is None:  # otherwise calibration or training chose it
            weight = manifest.measured.density_weight
    if weight is not None:
        settings = dataclasses.replace(settings, density_weight=weight)
    if manifest.embeddings == "fused" and (manifest.has_own_model or not model.has_generator):
        settings = dataclasses.replace(settings, rerank="embeddings")
    return settings


def grow_shortlist(measured: Measured, num_rows: int) -> int:
    """Return the measured shortlist, in proportion to the growth of the index since then."""
    return math.ceil(measured.shortlist * max(1.0, num_rows / measured.items))


def adjust_settings(
    defaults: SearchSettings, model: Genius, config: SearchConfig
) -> SearchSettings:
    """Return an index's settings with the options of a search.

    If the generator leads the search, the default number of candidates is smaller.

    Raises
    ------
    UsageError
        An option is out of range, the model has no generator to lead the search or to order its
        hits, or the order of the hits needs the generator while ``router="geometry"`` excludes it.
    """
    if config.router == "generator":
        defaults = routed_by_generator(defaults)
    settings = defaults.with_options(config)
    for name, value in (("router", "generator"), ("rerank", "none")):
        if getattr(settings, name) == value and not model.has_generator:
            raise UsageError(
                f"{name}: this model has no generator, which {value!r} needs; leave {name} out, or "
                "`genius fit` trains one"
            )
    # In complete settings, no option is meant to exclude another.
    is_complete = isinstance(config, SearchSettings)
    if config.router == "geometry" and settings.rerank == "none" and not is_complete:
        raise UsageError(
            "router: geometry does without the generator, whose log-probabilities are the scores "
            "without re-ranking (rerank none)"
        )
    return settings


class SnapshotSearcher:
    """Searches a snapshot of an index, always with the same settings.

    Parameters
    ----------
    config
        options that change the settings of the index.
    choices
        the log of choices, if there is one.
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
        defaults = default_settings(model, snapshot)
        self.config = defaults if config is None else adjust_settings(defaults, model, config)
        manifest = snapshot.manifest
        calibration = manifest.calibration
        is_calibrated = calibration is not None and calibration.applies_to(self.config)
        self._calibration = calibration if is_calibrated else None
        has_default_scores = score_settings(self.config) == score_settings(defaults)
        has_least = calibration is None and has_default_scores
        self._hit_settings = HitSettings(
            model.num_levels, model.uses_generator(self.config), manifest.least if has_least else {}
        )
        self._encoder = QueryEncoder(model, snapshot, self.config, self._calibration)

    @cached_property
    def _alive(self) -> Restriction:
        return tuple(segment.alive for segment in self.snapshot.search_segments)

    @cached_property
    def _evidence(self) -> Evidence:
        return self.snapshot.evidence(self.model.ranker)

    @cached_property
    def _compiled(self) -> CompiledSearch | None:
        return self.model.compiled_search_for(self.config)

    @cached_property
    def _spread(self) -> ProductSpread:
        return ProductSpread(self.model.ranker, self.snapshot)

    def search(self, requests: Sequence[SearchRequest]) -> list[Hits]:
        """Search for several requests in one batch, and return the hits of each."""
        if any(request.is_arranged for request in requests):
            from genius_search.index.arrange import search_arranged  # noqa: PLC0415  only here

            return [
                search_arranged(self, request) if request.is_arranged else self.search([request])[0]
                for request in requests
            ]
        if not all(request.query for request in requests):
            return [
                self.search([request])[0] if request.query else browse(self.snapshot, request)
                for request in requests
            ]
        alternatives = [request.alternatives() for request in requests]
        queries = self.encode([request for group in alternatives for request in group])
        hit_lists = iter(self._find_hits(queries))
        calibration = self.snapshot.manifest.calibration
        all_hits: list[Hits] = []
        for request, group in zip(requests, alternatives, strict=True):
            hits = next(hit_lists)
            if len(group) > 1:
                later_lists = [next(hit_lists) for _ in group[1:]]
                hits = interleave([hits, *later_lists], request.k + request.offset)
            all_hits.append(Hits(hits[request.offset :], calibration=calibration))
        return all_hits

    def search_vectors(self, vectors: Iterable[Vector], k: int) -> list[Hits]:
        """Search for vectors without conditions, as :meth:`search` with a request for each."""
        queries = self.encode_vectors(vectors, k)
        hits = self._find_plain_hits(queries)
        if hits is not None:
            return [hits]
        calibration = self.snapshot.manifest.calibration
        return [Hits(hits, calibration=calibration) for hits in self._find_hits(queries)]

    def _find_plain_hits(self, queries: Sequence[EncodedQuery]) -> Hits | None:
        """Return the hits of a vector alone if the first search finds all of them, else None.

        This is :meth:`_find_hits` without what such a query does not need, which takes as long in
        Python as the search of a small pool.
        """
        if len(queries) != 1 or not self.snapshot.segments or self.snapshot.max_passages:
            return None
        [query] = queries
        if self.choices is not None or query.words is not None:
            return None
        if self.snapshot.manifest.calibration is not None:
            return None
        with check_files_on_error(self.snapshot):
            [ranking] = self._search_segments(queries, self.config)
        if len(ranking.items) < query.k:
            return None
        return Hits(make_hits(self.snapshot, self._hit_settings, query, ranking))

    def _search_segments(
        self, queries: Sequence[EncodedQuery], settings: SearchSettings
    ) -> list[Ranking]:
        """Search all segments once."""
        return search_segments(
            lambda: self.model.decoder_for(settings),
            self._compiled,
            self.snapshot.search_segments,
            queries,
            settings,
            self._evidence,
        )

    def encode(self, requests: Sequence[SearchRequest]) -> list[EncodedQuery]:
        """Encode requests without alternatives; see :meth:`QueryEncoder.encode`."""
        return self._encoder.encode(requests)

    def encode_vectors(self, vectors: Iterable[Vector], k: int) -> list[EncodedQuery]:
        """Encode requests for ``k`` hits of a vector alone, which takes less time."""
        return self._encoder.encode_vectors(vectors, k)

    def search_encoded(self, queries: Sequence[EncodedQuery]) -> list[SearchResult]:
        """Search for encoded queries in one batch, and return the result of each request.

        The hits of a request that became several queries are merged
        (:func:`~genius_search.index.merge.merge_modalities`).
        """
        if not queries or not self.snapshot.segments:
            return [SearchResult([], 0) for _ in queries]
        with check_files_on_error(self.snapshot):
            return [
                SearchResult(self._hits_of(ranked), sum(ranking.touched for _, ranking in ranked))
                for ranked in self._rank_requests(queries)
            ]

    def _find_hits(self, queries: Sequence[EncodedQuery]) -> list[list[SearchHit]]:
        """Search for encoded queries, and return the hits of each request."""
        if not queries or not self.snapshot.segments:
            return [[] for _ in queries]
        with check_files_on_error(self.snapshot):
            return [self._hits_of(ranked) for ranked in self._rank_requests(queries)]

    def _rank_requests(
        self, queries: Sequence[EncodedQuery]
    ) -> Iterable[list[tuple[EncodedQuery, Ranking]]]:
        """Return the queries of each request with their ranked items, raised ones included."""
        if self.choices is not None:
            features = np.stack([query.vectors.feature for query in queries])
            all_shares = self.choices.shares(features)
            queries = [
                query._replace(choice_shares=shares)
                for query, shares in zip(queries, all_shares, strict=True)
            ]
        # A calibration reads the lead of the first hit over the second.
        rankings = self.rank(queries, at_least=1 if self._calibration is None else 2)
        if any(query.words is not None or query.choice_shares for query in queries):
            queries = self._measure_ranges(queries, rankings)
            rankings = self._add_raised(queries, rankings)
        of_requests: dict[int, list[tuple[EncodedQuery, Ranking]]] = {}
        for query, ranking in zip(queries, rankings, strict=True):
            of_requests.setdefault(query.request_number, []).append((query, ranking))
        return of_requests.values()

    def _hits_of(self, ranked: Sequence[tuple[EncodedQuery, Ranking]]) -> list[SearchHit]:
        """Return the hits of a request: of one query, or of a query for each modality."""
        query, ranking = ranked[0]
        if len(ranked) > 1:
            candidates = self._merge([(query, self._score(query, part)) for query, part in ranked])
        elif self._needs_scores(query, ranking):
            candidates = top_k(self._score(query, ranking), query.k)
        else:
            return make_hits(self.snapshot, self._hit_settings, query, ranking)
        ranking = candidates.ranking
        return make_hits(self.snapshot, self._hit_settings, query, ranking, candidates)

    def _needs_scores(self, query: EncodedQuery, ranking: Ranking) -> bool:
        """Return whether hits are not simply the ranked items with the scores of the search."""
        is_raised = query.words is not None or bool(query.choice_shares)
        return is_raised or self._calibration is not None or len(ranking.items) > query.k

    def rank(self, queries: Sequence[EncodedQuery], *, at_least: int) -> list[Ranking]:
        """Rank ``k`` items for each query, or more where others are to be ranked with them.

        A search ends at its last candidate, or at the end of its shortlist. If there are too few
        hits then, it is repeated with :data:`WIDENING_FACTOR` times the limits, and the further
        items that it finds come after the first ones. So the first hits are the same for any ``k``,
        and the last hit is the last item. An item with passages has the row of its best passage.
        """
        num_hits = [self._num_ranked(query, at_least) for query in queries]
        settings = self.config
        rankings = [*self._rank_once(queries, num_hits, settings)]
        last_rankings = dict(enumerate(rankings))
        while True:
            pending = [
                number
                for number, last_ranking in last_rankings.items()
                if len(rankings[number].items) < num_hits[number]
                and not self._has_ranked_all(queries[number], last_ranking, settings)
            ]
            if not pending:
                break
            settings = _widen(settings)
            wider = self._rank_once(
                [queries[number] for number in pending],
                [num_hits[number] for number in pending],
                settings,
            )
            last_rankings = dict(zip(pending, wider, strict=True))
            for number, ranking in last_rankings.items():
                rankings[number] = self._append(rankings[number], ranking, queries[number])
        return [
            ranking if len(ranking.items) <= count else ranking.take(slice(count))
            for ranking, count in zip(rankings, num_hits, strict=True)
        ]

    def _num_ranked(self, query: EncodedQuery, at_least: int) -> int:
        """Return how many items to rank for a query."""
        count = max(query.k, at_least)
        if query.words is not None or query.is_modality_part:
            count = max(count, RANGE_DEPTH + 1)
        return min(count, self.snapshot.num_rows)

    def _beam(self, query: EncodedQuery, settings: SearchSettings) -> int:
        """Return the beam width of a query; wider searches only increase a requested width."""
        if settings is self.config:
            return query.beam or settings.beam
        return max(query.beam or 0, settings.beam)

    def _has_ranked_all(
        self, query: EncodedQuery, ranking: Ranking, settings: SearchSettings
    ) -> bool:
        """Return whether a search with these settings has ranked all that the query allows."""
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
        """Rank items in one search; it may find fewer than the requested numbers of hits.

        If items have passages, several rows may belong to the same item, so more rows are ranked
        than items are needed, until there are enough items.
        """
        max_rows_per_hit = 1 + self.snapshot.max_passages
        rows_per_hit = min(max_rows_per_hit, ROWS_PER_HIT)
        num_compared = settings.shortlist if settings.rerank == "embeddings" else 0
        max_rows = num_compared or self.snapshot.num_rows
        while True:
            limited = [
                self._limit(query, settings, min(count * rows_per_hit, max_rows))
                for query, count in zip(queries, num_hits, strict=True)
            ]
            rankings = self._search_segments(limited, settings)
            if max_rows_per_hit == 1:
                return rankings
            best_rows = [self._keep_best_rows(ranking) for ranking in rankings]
            is_enough = all(
                len(best.items) >= count or len(ranking.items) < count * rows_per_hit
                for best, ranking, count in zip(best_rows, rankings, num_hits, strict=True)
            )
            if rows_per_hit == max_rows_per_hit or is_enough:
                return best_rows
            rows_per_hit = min(max_rows_per_hit, ROWS_PER_HIT * rows_per_hit)

    def _limit(self, query: EncodedQuery, settings: SearchSettings, k: int) -> EncodedQuery:
        """Return a query for ``k`` rows with its beam width; most queries need no copy."""
        beam = query.beam if settings is self.config else self._beam(query, settings)
        if query.k == k and query.beam == beam:
            return query
        return query._replace(beam=beam, k=k)

    def _append(self, ranking: Ranking, wider: Ranking, query: EncodedQuery) -> Ranking:
        """Append the items that only a wider search found, with scores no higher than the last one.

        Items that words or choices raise keep their scores, since they may be added without this
        search.
        """
        new = wider.take(~np.isin(self._locations(wider), self._locations(ranking)))
        last_score = ranking.scores.min(initial=np.inf)
        is_raised = np.isin(self._locations(new), query.raised_locations)
        limits = np.where(is_raised, np.inf, last_score)
        new = new._replace(scores=np.minimum(new.scores, limits).astype(np.float32))
        return join_rankings(ranking, new)

    def _locations(self, ranking: Ranking) -> Int64[np.ndarray, " hits"]:
        """Return the encoded locations of the items of a ranking, whose rows may be passages."""
        rows = self.snapshot.owner_rows(ranking.segments, ranking.items)
        return encode_locations(ranking.segments, rows)

    def _keep_best_rows(self, ranking: Ranking) -> Ranking:
        """Return the best row of each item."""
        first_rows = np.unique(self._locations(ranking), return_index=True)[1]
        return ranking.take(np.sort(first_rows))

    def _measure_ranges(
        self, queries: Sequence[EncodedQuery], rankings: Sequence[Ranking]
    ) -> list[EncodedQuery]:
        """Return queries with their ranges of scores.

        Conditions do not change a range: it is measured among all items.
        """
        needs_search = [
            query.words is not None and query.restriction is not None for query in queries
        ]
        unrestricted = [
            query._replace(k=RANGE_DEPTH, restriction=None)
            for query, is_needed in zip(queries, needs_search, strict=True)
            if is_needed
        ]
        further = iter(self.rank(unrestricted, at_least=1) if unrestricted else ())
        measured = []
        for query, ranking, is_needed in zip(queries, rankings, needs_search, strict=True):
            scores = (next(further) if is_needed else ranking).scores[:RANGE_DEPTH]
            score_range = float(np.ptp(scores)) if len(scores) else 0.0
            measured.append(query._replace(score_range=score_range))
        return measured

    def _add_raised(
        self, queries: Sequence[EncodedQuery], rankings: Sequence[Ranking]
    ) -> list[Ranking]:
        """Add the items that words or choices raise, with their scores by meaning, to rankings."""
        extended = []
        for query, ranking in zip(queries, rankings, strict=True):
            missing = query.raised_locations
            if len(ranking.items):
                ranked = np.sort(self._locations(ranking))
                nearest = ranked.take(ranked.searchsorted(missing), mode="clip")
                missing = missing[nearest != missing]
            extended.append(self._add_items(query, ranking, missing) if len(missing) else ranking)
        return extended

    def _add_items(
        self, query: EncodedQuery, ranking: Ranking, locations: Int64[np.ndarray, " items"]
    ) -> Ranking:
        """Add the allowed items at these locations, ranked by a search restricted to them."""
        restriction = []
        num_items = 0
        allowed_items = query.restriction or self._alive
        pairs = zip(self.snapshot.segments, allowed_items, strict=True)
        for number, (segment, allowed) in enumerate(pairs):
            rows = rows_of_segment(number, locations)
            if allowed is not None:
                rows = rows[allowed.items[rows]]
            restriction.append(Allowed.of_rows(segment.table, segment.with_passages(rows)))
            num_items += len(rows)
        if not num_items:
            return ranking
        restricted = query._replace(k=num_items, restriction=tuple(restriction))
        [added] = self.rank([restricted], at_least=1)
        return join_rankings(ranking, added)

    def _score(self, query: EncodedQuery, ranking: Ranking) -> Candidates:
        """Raise the ranked items by choices and words, and add probabilities."""
        scores = ranking.scores
        candidates = Candidates(ranking, scores, scores, scores)
        if query.words is not None or query.choice_shares:
            locations = self._locations(ranking)
            if query.choice_shares:
                shares = _shares_at(query, locations)
                spread = self._spread.of_query(query.vectors.fused, query.level0)
                candidates = raise_chosen(candidates, shares, spread)
            if query.words is not None:
                words = query.words.for_locations(locations)
                candidates = raise_words(candidates, words, query.score_range)
        if self._calibration is not None and query.has_probabilities:
            candidates = add_probabilities(candidates, self._calibration)
        return candidates

    def _merge(self, parts: Sequence[tuple[EncodedQuery, Candidates]]) -> Candidates:
        """Return the best candidates of a request that became a query for each modality."""
        all_best = []
        modalities = []
        for query, candidates in parts:
            ranking = candidates.ranking
            excess = None
            if self.config.rerank != "none":
                excess = find_excess(ranking.scores, candidates.compared, ranking.touched)
            best = top_k(candidates._replace(excess=excess), query.k)
            all_best.append(best)
            modalities.append(self._modality_hits(query, candidates, best))
        counts = [len(best.scores) for best in all_best]
        first_rows = np.cumsum([0, *counts[:-1]])
        k = parts[0][0].k
        # A video may be found twice: by a frame, which is an image, and by a subtitle, a text.
        has_moments = self.snapshot.has_moments
        origins = merge_modalities(modalities, sum(counts) if has_moments else k)
        rows = [first_rows[origin.modality] + origin.position for origin in origins]
        merged = concatenate(all_best).take(np.array(rows, dtype=np.int64))
        if has_moments:
            first_rows = np.unique(self._locations(merged.ranking), return_index=True)[1]
            merged = merged.take(np.sort(first_rows)[:k])
        return merged

    def _modality_hits(
        self, query: EncodedQuery, candidates: Candidates, best: Candidates
    ) -> ModalityHits:
        """Return what decides how the best candidates of a modality are merged with others."""
        best_scores = []
        if self.config.rerank != "none":
            best_scores = np.sort(candidates.meaning)[::-1][:COMPARABLE_RANK].tolist()
        is_same = best.compared >= SAME_ITEM_COSINE
        if self.config.rerank == "codes":  # in which the query's own item scores less than 1
            cosines = self._code_cosines(query, best.ranking.take(slice(COMPARABLE_RANK)))
            is_same[:COMPARABLE_RANK] |= cosines >= SAME_ITEM_COSINE
        probabilities = best.probabilities
        if probabilities is not None and np.isnan(probabilities).any():
            probabilities = None
        return ModalityHits(
            scores=best.scores.tolist(),
            compared_scores=best.compared.tolist(),
            best_scores=best_scores,
            is_same=is_same.tolist(),
            num_pinned=best.num_pinned,
            probabilities=None if probabilities is None else probabilities.tolist(),
            excesses=None if best.excess is None else best.excess.tolist(),
        )

    def _code_cosines(self, query: EncodedQuery, ranking: Ranking) -> Float32[np.ndarray, " hits"]:
        """Return the cosines of a query with the vectors of the IDs of ranked items."""
        if not len(ranking.items):
            return np.zeros(0, dtype=np.float32)
        rows = zip(ranking.segments.tolist(), ranking.rows.tolist(), strict=True)
        ids = np.stack([self.snapshot.segments[segment].table.ids[row] for segment, row in rows])
        vectors = normalize(self.model.ranker.vectors(ids))
        return np.asarray(vectors @ normalize(query.vectors.fused), dtype=np.float32)


def _widen(settings: SearchSettings) -> SearchSettings:
    """Return settings with :data:`WIDENING_FACTOR` times the beam, candidates and shortlist."""
    return dataclasses.replace(
        settings,
        beam=WIDENING_FACTOR * settings.beam,
        candidates=WIDENING_FACTOR * settings.candidates,
        shortlist=WIDENING_FACTOR * settings.shortlist,
    )


def _shares_at(
    query: EncodedQuery, locations: Int64[np.ndarray, " hits"]
) -> Float32[np.ndarray, " hits"]:
    """Return the shares of choices of the items at encoded locations; most are 0."""
    shares = {encode_location(*location): share for location, share in query.choice_shares.items()}
    return np.array(
        [shares.get(location, 0.0) for location in locations.tolist()], dtype=np.float32
    )


def browse(snapshot: Snapshot, request: SearchRequest) -> Hits:
    """Return the items that the conditions of a request without a query allow, newest first."""
    from genius_search.index.filters import Filter  # noqa: PLC0415  only here

    conditions = request.filter or Filter()
    if request.modality is not None:
        conditions = dataclasses.replace(conditions, modality=Modality(request.modality))
    if not snapshot.segments:
        return Hits()
    page = slice(request.offset, request.offset + request.k)
    with check_files_on_error(snapshot):
        restriction = snapshot.restriction(conditions, deadline=request.deadline)
        numbers = []
        all_rows = []
        for number, allowed in reversed([*enumerate(restriction)]):
            if allowed is not None:
                is_item = allowed.items[: snapshot.segments[number].num_items]  # no passages
                rows = np.flatnonzero(is_item)
                all_rows.append(rows)
                numbers.append(np.full(len(rows), number))
        items = snapshot.items_at(np.concatenate(numbers)[page], np.concatenate(all_rows)[page])
    return Hits(
        SearchHit(rank, item.id, 0.0, item.modality, item.text, item.image, item.fields, (), ())
        for rank, item in enumerate(items, start=request.offset + 1)
    )
