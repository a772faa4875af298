"""The search of one snapshot, step by step: encode, find candidates, score, merge, make hits.

::

    SearchRequest --encode.py-----> EncodedQuery: vectors, limits, and the items with its words
                                    (words.py); one for each modality
                  --candidates.py-> Candidates: ranked rows with the scores of the search; items
                                    with words of the query, which it missed, are searched again
                  --score.py------> Candidates raised by choices and words
                  --merge.py------> Candidates of all modalities in one order
                  --hits.py-------> Hits, whose items are read when they are asked for
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.border import check_range
from genius_search.config import SearchConfig
from genius_search.index.candidates import CandidateSearch
from genius_search.index.encode import EncodedQuery, QueryEncoder
from genius_search.index.hits import Hits, HitSettings, SearchHit, make_hits
from genius_search.index.merge import (
    COMPARABLE_RANK,
    SAME_ITEM_COSINE,
    ModalityHits,
    interleave,
    merge_modalities,
)
from genius_search.index.moments import ProductSpread
from genius_search.index.request import SearchRequest, Vector
from genius_search.index.score import (
    RANGE_DEPTH,
    add_probabilities,
    comparable_scores,
    concatenate,
    find_excess,
    raise_chosen,
    raise_words,
    scores_by_meaning,
    top_k,
)
from genius_search.index.settings import adjust_settings, default_settings
from genius_search.index.snapshot import Snapshot, check_files_on_error
from genius_search.index.store import score_settings
from genius_search.index.words import WordMatches, pack_location
from genius_search.model import Genius
from genius_search.nn.codebooks import normalize
from genius_search.search.kernel import PreparedSearch
from genius_search.search.rank import Candidates

if TYPE_CHECKING:
    from genius_search.index.learned import Choices


class SearchResult(NamedTuple):
    """The result of one request."""

    hits: list[SearchHit]
    """Best first."""
    num_ranked: int
    """Number of items that were ranked by codes."""


class PlainSearch(NamedTuple):
    """A search for a vector alone that finds all hits at once."""

    query: EncodedQuery
    """The query without its vectors."""
    prepared: PreparedSearch


RankedQuery: TypeAlias = tuple[EncodedQuery, Candidates, float]
"""A query, its candidates, and the best score minus the hundredth. Words raise items by shares of
this range; it is 0 if no query of the batch has words or choices."""


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
        self._candidates = CandidateSearch(model, snapshot, self.config)
        self._plain_search: PlainSearch | None = None

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
            from genius_search.index.browse import browse  # noqa: PLC0415  only here

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
        queries = self._encoder.encode_vectors(vectors, k)
        calibration = self.snapshot.manifest.calibration
        return [Hits(hits, calibration=calibration) for hits in self._find_hits(queries)]

    def search_vector(self, vector: Vector, k: int) -> Hits:
        """Search for a vector without conditions.

        Later searches repeat nothing that is the same for every vector, since that would take half
        as long in Python as the search of a small pool.
        """
        check_range("k", k, 1)
        plain = self._plain_search  # another thread may replace it
        if plain is None or plain.query.k != k:
            plain = self._plain_search = self._prepare_plain_search(k)
        if plain is not None and self.choices is None:
            query, prepared = plain
            vectors = self._encoder.encode_vector(vector)
            with check_files_on_error(self.snapshot):
                candidates = prepared.search(*vectors)
            if len(candidates.items) >= k:
                return Hits(make_hits(self.snapshot, self._hit_settings, query, candidates))
        return self.search_vectors([vector], k)[0]

    def _prepare_plain_search(self, k: int) -> PlainSearch | None:
        """Return the search for ``k`` hits of a vector; None if it takes further steps."""
        snapshot = self.snapshot
        is_plain = snapshot.segments and not snapshot.max_passages
        if not is_plain or snapshot.manifest.calibration is not None:
            return None
        if len(self._encoder.limits_of_vectors) != 1:
            return None
        query = dataclasses.replace(self._encoder.limits_of_vectors[0], k=k)
        with check_files_on_error(snapshot):
            prepared = self._candidates.prepare(query)
        return None if prepared is None else PlainSearch(query, prepared)

    def encode(self, requests: Sequence[SearchRequest]) -> list[list[EncodedQuery]]:
        """Encode requests without alternatives; see :meth:`QueryEncoder.encode`."""
        return self._encoder.encode(requests)

    def encode_vectors(self, vectors: Iterable[Vector], k: int) -> list[list[EncodedQuery]]:
        """Encode requests for ``k`` hits of a vector alone, which takes less time."""
        return self._encoder.encode_vectors(vectors, k)

    def rank(
        self, queries: Sequence[EncodedQuery], at_least: Sequence[int] | int = 1
    ) -> list[Candidates]:
        """Return the candidates of queries; see :meth:`CandidateSearch.rank`."""
        return self._candidates.rank(queries, at_least)

    def search_encoded(self, queries: Sequence[Sequence[EncodedQuery]]) -> list[SearchResult]:
        """Search for the queries of several requests in one batch; return the result of each.

        The hits of a request that became several queries are merged
        (:func:`~genius_search.index.merge.merge_modalities`).
        """
        if not queries or not self.snapshot.segments:
            return [SearchResult([], 0) for _ in queries]
        with check_files_on_error(self.snapshot):
            return [
                SearchResult(
                    self._hits_of(ranked),
                    sum(candidates.num_ranked for _, candidates, _ in ranked),
                )
                for ranked in self._rank(queries)
            ]

    def _find_hits(self, queries: Sequence[Sequence[EncodedQuery]]) -> list[list[SearchHit]]:
        """Search for the queries of several requests, and return the hits of each request."""
        if not queries or not self.snapshot.segments:
            return [[] for _ in queries]
        with check_files_on_error(self.snapshot):
            return [self._hits_of(ranked) for ranked in self._rank(queries)]

    def _rank(
        self, queries_of_requests: Sequence[Sequence[EncodedQuery]]
    ) -> Iterator[list[RankedQuery]]:
        """Yield the queries of each request, one for each modality, with their candidates."""
        queries = [*chain.from_iterable(queries_of_requests)]
        if self.choices is not None:
            all_shares = self.choices.shares(np.stack([query.feature for query in queries]))
            queries = [
                dataclasses.replace(query, choice_shares=shares)
                for query, shares in zip(queries, all_shares, strict=True)
            ]
        # A calibration reads the lead of the first hit over the second; merging, the excess.
        minimum = 1 if self._calibration is None else 2
        at_least = [
            minimum if len(of_request) == 1 else RANGE_DEPTH + 1
            for of_request in queries_of_requests
            for _ in of_request
        ]
        candidates = self._candidates.rank(queries, at_least)
        ranges = [0.0] * len(queries)
        if any(query.words is not None or query.choice_shares for query in queries):
            ranges = self._candidates.measure_ranges(queries, candidates)
            candidates = self._candidates.add_raised(queries, candidates, ranges)
        ranked = zip(queries, candidates, ranges, strict=True)
        for of_request in queries_of_requests:
            yield [*islice(ranked, len(of_request))]

    def _hits_of(self, ranked: Sequence[RankedQuery]) -> list[SearchHit]:
        """Return the hits of a request: of one query, or of a query for each modality."""
        query, candidates, score_range = ranked[0]
        if len(ranked) > 1:
            candidates = self._merge(ranked)
        elif self._needs_scores(query, candidates):
            matches = self._match_words(query, candidates)
            candidates = self._score(query, candidates, matches, score_range)
            candidates = top_k(candidates, query.k, matches)
        return make_hits(self.snapshot, self._hit_settings, query, candidates)

    def _needs_scores(self, query: EncodedQuery, candidates: Candidates) -> bool:
        """Return whether hits are not simply the candidates with the scores of the search."""
        is_raised = query.words is not None or bool(query.choice_shares)
        return is_raised or self._calibration is not None or len(candidates.items) > query.k

    def _match_words(self, query: EncodedQuery, candidates: Candidates) -> WordMatches | None:
        """Return the words of a query in its candidates; None if words do not count."""
        if query.words is None:
            return None
        return query.words.for_locations(self._candidates.locations(candidates))

    def _score(
        self,
        query: EncodedQuery,
        candidates: Candidates,
        matches: WordMatches | None,
        score_range: float,
    ) -> Candidates:
        """Raise candidates by choices and words, and add probabilities."""
        search_scores = candidates.scores
        if query.choice_shares:
            shares = _shares_at(query, self._candidates.locations(candidates))
            spread = self._spread.of_query(query.fused, query.level0)
            candidates = raise_chosen(candidates, shares, spread)
        if matches is not None:
            candidates = raise_words(candidates, matches, score_range)
        if self._calibration is not None and not query.has_parts:
            return add_probabilities(candidates, search_scores, self._calibration, matches)
        return candidates

    def _merge(self, ranked: Sequence[RankedQuery]) -> Candidates:
        """Return the best candidates of a request that became a query for each modality."""
        all_best = []
        modalities = []
        for query, candidates, score_range in ranked:
            matches = self._match_words(query, candidates)
            scored = self._score(query, candidates, matches, score_range)
            if self.config.rerank != "none":
                compared = comparable_scores(scored)
                excess = find_excess(candidates.scores, compared, candidates.num_ranked)
                scored = scored._replace(excess=excess)
            best = top_k(scored, query.k, matches)
            all_best.append(best)
            num_pinned = 0 if matches is None else min(query.k, int(matches.has_code.sum()))
            modalities.append(self._modality_hits(query, scored, best, num_pinned))
        best_of_all = concatenate(all_best)
        k = ranked[0][0].k
        # A video may be found twice: by a frame, which is an image, and by a subtitle, a text.
        has_moments = self.snapshot.has_moments
        rows = merge_modalities(modalities, len(best_of_all.items) if has_moments else k)
        merged = best_of_all.take(np.array(rows, dtype=np.int64))
        if has_moments:
            first_rows = np.unique(self._candidates.locations(merged), return_index=True)[1]
            merged = merged.take(np.sort(first_rows)[:k])
        return merged

    def _modality_hits(
        self, query: EncodedQuery, candidates: Candidates, best: Candidates, num_pinned: int
    ) -> ModalityHits:
        """Return the columns of the best candidates that decide how they are merged with others."""
        best_scores = []
        if self.config.rerank != "none":
            meaning = scores_by_meaning(candidates)
            best_scores = np.sort(meaning)[::-1][:COMPARABLE_RANK].tolist()
        compared = comparable_scores(best)
        is_same = compared >= SAME_ITEM_COSINE
        if self.config.rerank == "codes":  # in which the query's own item scores less than 1
            cosines = self._code_cosines(query, best.take(slice(COMPARABLE_RANK)))
            is_same[:COMPARABLE_RANK] |= cosines >= SAME_ITEM_COSINE
        probabilities = best.probabilities
        if probabilities is not None and np.isnan(probabilities).any():
            probabilities = None
        return ModalityHits(
            scores=best.scores.tolist(),
            comparable_scores=compared.tolist(),
            best_scores=best_scores,
            is_same=is_same.tolist(),
            num_pinned=num_pinned,
            probabilities=None if probabilities is None else probabilities.tolist(),
            excesses=None if best.excess is None else best.excess.tolist(),
        )

    def _code_cosines(
        self, query: EncodedQuery, candidates: Candidates
    ) -> Float32[np.ndarray, " hits"]:
        """Return the cosines of a query with the vectors of the IDs of candidates."""
        if not len(candidates.items):
            return np.zeros(0, dtype=np.float32)
        rows = zip(candidates.segments.tolist(), candidates.id_rows.tolist(), strict=True)
        ids = np.stack([self.snapshot.segments[segment].table.ids[row] for segment, row in rows])
        vectors = normalize(self.model.ranker.vectors(ids))
        return np.asarray(vectors @ normalize(query.fused), dtype=np.float32)


def _shares_at(
    query: EncodedQuery, locations: Int64[np.ndarray, " hits"]
) -> Float32[np.ndarray, " hits"]:
    """Return the shares of choices of the items at packed locations; most are 0."""
    shares = {pack_location(*location): share for location, share in query.choice_shares.items()}
    return np.array(
        [shares.get(location, 0.0) for location in locations.tolist()], dtype=np.float32
    )
