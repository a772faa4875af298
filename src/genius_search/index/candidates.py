"""Find enough candidates for each encoded query, every item once, and all that words raise.

The search of segments ends at its limits, returns passages as items, and does not know words.
:class:`CandidateSearch` repeats it with wider limits while there are too few hits, keeps the best
row of each item, and adds the items that words or choices raise from a search among them alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Int64

from genius_search.config import SearchSettings, decades_above_small
from genius_search.index.encode import EncodedQuery
from genius_search.index.score import RANGE_DEPTH, append_candidates
from genius_search.index.snapshot import Snapshot
from genius_search.index.words import WordMatches, pack_locations, rows_of_segment
from genius_search.model import Genius
from genius_search.search.kernel import CompiledSearch, PreparedSearch, search_segments
from genius_search.search.rank import Candidates, Evidence
from genius_search.search.table import Allowed, Restriction

ROWS_PER_HIT: Final = 4
"""Rows that are ranked for each hit if items have passages, which are rows, too. If the rows belong
to too few items, this factor is applied again."""
WIDENING_FACTOR: Final = 4
"""A search with too few hits is repeated with this many times the beam, candidates and
shortlist."""
MISSED_DEPTH: Final = 5
"""A search by meaning misses no item that would be ranked above this. Of 500 captions as queries,
the hits of none changed by this assumption; with 10, those of four did."""


class CandidateSearch:
    """Finds candidates in a snapshot of an index, always with the same settings."""

    def __init__(self, model: Genius, snapshot: Snapshot, settings: SearchSettings) -> None:
        self._model = model
        self._snapshot = snapshot
        self._settings = settings

    @cached_property
    def _alive(self) -> Restriction:
        return tuple(segment.alive for segment in self._snapshot.searched_segments)

    @cached_property
    def _evidence(self) -> Evidence:
        return self._snapshot.evidence(self._model.ranker)

    @cached_property
    def _compiled(self) -> CompiledSearch | None:
        return self._model.compiled_search_for(self._settings)

    def search_once(
        self, queries: Sequence[EncodedQuery], settings: SearchSettings | None = None
    ) -> list[Candidates]:
        """Search all segments once, by default with the settings of this search."""
        settings = settings or self._settings
        return search_segments(
            lambda: self._model.decoder_for(settings),
            self._compiled,
            self._snapshot.searched_segments,
            queries,
            settings,
            self._evidence,
        )

    def prepare(self, query: EncodedQuery) -> PreparedSearch | None:
        """Return a search for queries that differ from one in their vectors alone.

        If it finds ``k`` items, they are those of :meth:`rank`. None if there is no such search.
        """
        segments, evidence = self._snapshot.searched_segments, self._evidence
        settings, compiled = self._settings, self._compiled
        if compiled is None or not compiled.supports(segments, settings, evidence.embeddings):
            return None
        lacks_embeddings = settings.rerank == "embeddings" and evidence.embeddings is None
        if lacks_embeddings or query.k > self._max_rows(settings):
            return None
        return compiled.prepare(segments, query, settings, evidence)

    def rank(
        self,
        queries: Sequence[EncodedQuery],
        at_least: Sequence[int] | int = 1,
        settings: SearchSettings | None = None,
    ) -> list[Candidates]:
        """Rank ``k`` items for each query, or more: ``at_least`` for all or for each query.

        A search ends at its last candidate, or at the end of its shortlist. If there are too few
        hits then, it is repeated with :data:`WIDENING_FACTOR` times the limits, and the further
        items that it finds come after the first ones. So the first hits are the same for any ``k``,
        and the last hit is the last item. An item with passages has the row of its best passage.

        ``settings`` are those of the first search, by default those of this object.
        """
        minimums = [at_least] * len(queries) if isinstance(at_least, int) else at_least
        num_hits = [*map(self._num_candidates, queries, minimums)]
        settings = settings or self._settings
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

    def _num_candidates(self, query: EncodedQuery, at_least: int) -> int:
        """Return how many items to rank for a query."""
        depth = 0 if query.words is None else RANGE_DEPTH + 1
        return min(max(query.k, at_least, depth), self._snapshot.num_rows)

    def _beam(self, query: EncodedQuery, settings: SearchSettings) -> int:
        """Return the beam width of a query; wider searches only increase a requested width."""
        if settings is self._settings:
            return query.beam or settings.beam
        return max(query.beam or 0, settings.beam)

    def _has_ranked_all(
        self, query: EncodedQuery, ranking: Candidates, settings: SearchSettings
    ) -> bool:
        """Return whether a search with these settings has ranked all that the query allows."""
        if settings.rerank == "embeddings" and 0 < settings.shortlist < ranking.num_ranked:
            return False
        num_rows = self._snapshot.num_rows
        are_candidates = settings.rerank != "none" and settings.candidates >= num_rows
        return (
            are_candidates
            or self._beam(query, settings) >= num_rows
            or ranking.num_ranked >= self._num_allowed(query)
        )

    def _num_allowed(self, query: EncodedQuery) -> int:
        """Return the number of items and passages that the conditions of a query allow."""
        pairs = zip(self._snapshot.searched_segments, query.restriction or self._alive, strict=True)
        return sum(
            segment.table.num_items if allowed is None else int(allowed.items.sum())
            for segment, allowed in pairs
        )

    def _rank_once(
        self, queries: Sequence[EncodedQuery], num_hits: Sequence[int], settings: SearchSettings
    ) -> list[Candidates]:
        """Rank items in one search; it may find fewer than the requested numbers of hits.

        If items have passages, several rows may belong to the same item, so more rows are ranked
        than items are needed, until there are enough items.
        """
        max_rows_per_hit = 1 + self._snapshot.max_passages
        rows_per_hit = min(max_rows_per_hit, ROWS_PER_HIT)
        while True:
            limited = [
                self._limit(
                    query,
                    settings,
                    min(
                        count * rows_per_hit,
                        self._max_rows(settings, is_restricted=query.restriction is not None),
                    ),
                )
                for query, count in zip(queries, num_hits, strict=True)
            ]
            rankings = self.search_once(limited, settings)
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

    def _max_rows(self, settings: SearchSettings, *, is_restricted: bool = False) -> int:
        """Return the number of rows that one search compares at least: its shortlist, or all.

        Conditions may halve the shortlist (:func:`~genius_search.config.narrow_search`).
        """
        num_rows = self._snapshot.num_rows
        if settings.rerank != "embeddings" or settings.shortlist == 0:
            return num_rows
        is_narrowed = is_restricted and decades_above_small(num_rows) > 0
        return max(1, settings.shortlist // 2) if is_narrowed else settings.shortlist

    def _limit(self, query: EncodedQuery, settings: SearchSettings, k: int) -> EncodedQuery:
        """Return a query for ``k`` rows with its beam width; most queries need no copy."""
        beam = query.beam if settings is self._settings else self._beam(query, settings)
        if query.k == k and query.beam == beam:
            return query
        return dataclasses.replace(query, beam=beam, k=k)

    def _append(self, ranking: Candidates, wider: Candidates, query: EncodedQuery) -> Candidates:
        """Append the items that only a wider search found, with scores no higher than the last one.

        Items that words or choices raise keep their scores, since they may be added without this
        search.
        """
        new = wider.take(~np.isin(self.locations(wider), self.locations(ranking)))
        last_score = ranking.scores.min(initial=np.inf)
        is_raised = np.isin(self.locations(new), query.raised_locations)
        limits = np.where(is_raised, np.inf, last_score)
        new = new._replace(scores=np.minimum(new.scores, limits).astype(np.float32))
        return append_candidates(ranking, new)

    def locations(self, candidates: Candidates) -> Int64[np.ndarray, " hits"]:
        """Return the packed locations of items, whose rows may be those of passages."""
        rows = self._snapshot.owner_rows(candidates.segments, candidates.items)
        return pack_locations(candidates.segments, rows)

    def _keep_best_rows(self, ranking: Candidates) -> Candidates:
        """Return the best row of each item."""
        first_rows = np.unique(self.locations(ranking), return_index=True)[1]
        return ranking.take(np.sort(first_rows))

    def measure_ranges(
        self, queries: Sequence[EncodedQuery], rankings: Sequence[Candidates]
    ) -> list[float]:
        """Return the range of scores of each query: the best score minus the hundredth.

        Words raise items by shares of it. Conditions do not change a range: it is measured among
        all items.
        """
        needs_search = [
            query.words is not None and query.restriction is not None for query in queries
        ]
        unrestricted = [
            dataclasses.replace(query, k=RANGE_DEPTH, restriction=None)
            for query, is_needed in zip(queries, needs_search, strict=True)
            if is_needed
        ]
        further = iter(self.rank(unrestricted) if unrestricted else ())
        ranges = []
        for ranking, is_needed in zip(rankings, needs_search, strict=True):
            scores = (next(further) if is_needed else ranking).scores[:RANGE_DEPTH]
            ranges.append(float(np.ptp(scores)) if len(scores) else 0.0)
        return ranges

    def add_raised(
        self,
        queries: Sequence[EncodedQuery],
        rankings: Sequence[Candidates],
        ranges: Sequence[float],
    ) -> list[Candidates]:
        """Add the items that words or choices raise, with their scores in a search.

        Items that words cannot raise to the hits are left out.
        """
        extended = []
        for query, ranking, score_range in zip(queries, rankings, ranges, strict=True):
            missing = query.raised_locations
            if len(ranking.items):
                locations = self.locations(ranking)
                ranked = np.sort(locations)
                nearest = ranked.take(ranked.searchsorted(missing), mode="clip")
                missing = missing[nearest != missing]
                if len(missing) and query.words is not None and not query.choice_shares:
                    matches = query.words.for_locations(locations)
                    least_share = _least_share(ranking, matches, query.k, score_range)
                    missing = missing[query.words.reach(missing, least_share)]
            extended.append(self._add_items(query, ranking, missing) if len(missing) else ranking)
        return extended

    def _add_items(
        self, query: EncodedQuery, ranking: Candidates, locations: Int64[np.ndarray, " items"]
    ) -> Candidates:
        """Add the allowed items at these locations, ranked by a search restricted to them."""
        restriction = []
        num_items = num_rows = 0
        allowed_items = query.restriction or self._alive
        pairs = zip(self._snapshot.segments, allowed_items, strict=True)
        for number, (segment, allowed) in enumerate(pairs):
            rows = rows_of_segment(number, locations)
            if allowed is not None:
                rows = rows[allowed.items[rows]]
            all_rows = segment.with_passages(rows)
            restriction.append(Allowed.of_rows(segment.table, all_rows))
            num_items += len(rows)
            num_rows += len(all_rows)
        if not num_items:
            return ranking
        restricted = dataclasses.replace(query, k=num_items, restriction=tuple(restriction))
        settings = self._settings
        if settings.rerank == "embeddings" and 0 < settings.shortlist < 2 * num_rows:
            settings = dataclasses.replace(settings, shortlist=2 * num_rows)  # one search is enough
        [added] = self.rank([restricted], settings=settings)
        return append_candidates(ranking, added)


def _least_share(
    ranking: Candidates, matches: WordMatches, num_hits: int, score_range: float
) -> float:
    """Return the least share of the range with which an item that was not ranked becomes a hit.

    Such an item is taken to score no more than the ranked item at :data:`MISSED_DEPTH`, m, since
    the search may have missed some. With the score t of the last hit, raised by words::

        least share = (t − m) / range
    """
    if len(ranking.items) < num_hits or score_range <= 0:
        return 0.0
    raised = ranking.scores + score_range * matches.shares
    last_hit = len(raised) - num_hits
    return float(np.partition(raised, last_hit)[last_hit] - ranking.scores[:MISSED_DEPTH][-1]) / (
        score_range
    )


def _widen(settings: SearchSettings) -> SearchSettings:
    """Return settings with :data:`WIDENING_FACTOR` times the beam, candidates and shortlist."""
    return dataclasses.replace(
        settings,
        beam=WIDENING_FACTOR * settings.beam,
        candidates=WIDENING_FACTOR * settings.candidates,
        shortlist=WIDENING_FACTOR * settings.shortlist,
    )
