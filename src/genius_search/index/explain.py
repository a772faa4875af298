"""Explanations: why a search finds an item, or does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64

from genius_search.index.encode import EncodedQuery
from genius_search.index.items import Item
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Location, check_files_on_error
from genius_search.nn.codebooks import as_floats
from genius_search.search.rank import Candidates
from genius_search.search.table import (
    Children,
    Restriction,
    SearchSegment,
    children_in_segments,
    count_ids,
)

if TYPE_CHECKING:
    from genius_search.index.learned import Choice
    from genius_search.search.beam import Decoder

MAX_SIBLINGS: Final = 8
"""Maximum number of codes that are listed at each level."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """A code that a search could choose."""

    code: int
    log_probability: float | None
    """The code's contribution to the score of a beam; None if distances lead the search."""
    probability: float | None
    """Probability among the allowed codes after this prefix; None if distances lead the search."""
    items: int
    """Number of items whose IDs share the codes up to this one."""


@dataclass(frozen=True, slots=True)
class LevelStep(Sibling):
    """One code of an item's ID, compared with the codes that a search could choose instead."""

    level: int
    rank: int
    """Rank of the code from 1, by probability or by distance from the query; ties by code."""
    num_siblings: int
    """Number of codes that a search could choose, including the item's."""
    siblings: list[Sibling]
    """The most probable, or nearest, codes, which may include the item's."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a search finds an item, or does not."""

    item: Item
    codes: tuple[int, ...]
    is_allowed: bool
    """True if the modality and conditions of the request allow the item."""
    rank: int | None
    """Rank among all items under the beams, before any is raised; None if it was not reached."""
    score: float | None
    num_ranked: int
    """Number of items under the beams."""
    beam: int
    """Beam width."""
    levels: list[LevelStep]
    raised_by: list[Choice]
    """Similar queries for which the item was chosen, most similar first."""


class _ItemRanking(NamedTuple):
    """A query's ranking, and the position of an item in it."""

    query: EncodedQuery
    ranking: Candidates
    position: int | None
    """None if the item was not reached."""


def explain(searcher: SnapshotSearcher, request: SearchRequest, item_id: str | int) -> Explanation:
    """Follow an item's ID through the levels of a search.

    If the request has alternatives, the one that ranks the item best is explained.

    Raises
    ------
    UnknownItem
        The item is not in the index.
    """
    snapshot = searcher.snapshot
    location = snapshot.locate(item_id)  # raises before anything is encoded
    item = snapshot.item_at(location)
    codes = _codes_at(searcher, location)
    queries = _encode_alternatives(searcher, request, item, codes[0])
    with check_files_on_error(snapshot):
        query, ranking, position = _best_ranking(searcher, queries, location)
        if position is not None:  # explain the passage of the item that was found
            passage = Location(location.segment, int(ranking.items[position]))
            codes = _codes_at(searcher, passage)
        levels = follow_id(
            snapshot.searched_segments,
            codes,
            score_codes(searcher, query.fused, codes, query.level0),
            level0=query.level0,
            restriction=query.restriction,
            has_probabilities=searcher.model.uses_generator(searcher.config),
        )
        return Explanation(
            item=item,
            codes=codes,
            is_allowed=_is_allowed(query, location, codes[0]),
            rank=None if position is None else 1 + position,
            score=None if position is None else float(ranking.scores[position]),
            num_ranked=ranking.num_ranked,
            beam=max(query.beam or searcher.config.beam, query.k),
            levels=levels,
            raised_by=_choices_of_item(searcher, query, item, location),
        )


def _codes_at(searcher: SnapshotSearcher, location: Location) -> tuple[int, ...]:
    """Return the ID at a location without its two columns after the codes."""
    return tuple(searcher.snapshot.id_at(location)[: searcher.model.num_levels].tolist())


def _encode_alternatives(
    searcher: SnapshotSearcher, request: SearchRequest, item: Item, level0_code: int
) -> list[EncodedQuery]:
    """Encode the alternatives of a request that can find an item; at least one query."""
    is_open = request.modality is None and not request.instruction
    splits_modalities = searcher.model.level0_is_exact and searcher.snapshot.manifest.reads_images
    if is_open and splits_modalities:
        # The queries for other modalities cannot find the item.
        request = dataclasses.replace(request, modality=item.modality)
    encoded = searcher.encode(dataclasses.replace(request, hybrid=False).alternatives())
    queries = [*chain.from_iterable(encoded)]
    return [query for query in queries if level0_code in query.level0] or queries[:1]


def _best_ranking(
    searcher: SnapshotSearcher, queries: Sequence[EncodedQuery], location: Location
) -> _ItemRanking:
    """Search for each query, and return the ranking in which an item comes first."""
    snapshot = searcher.snapshot
    rankings = searcher.rank(queries, at_least=max(1, snapshot.num_alive))
    item_rankings = []
    for query, ranking in zip(queries, rankings, strict=True):
        rows = snapshot.owner_rows(ranking.segments, ranking.items)
        is_item = (ranking.segments == location.segment) & (rows == location.row)
        positions = np.flatnonzero(is_item)  # several if passages of the item were found
        position = int(positions[0]) if len(positions) else None
        item_rankings.append(_ItemRanking(query, ranking, position))
    return min(item_rankings, key=_position_or_infinity)


def _position_or_infinity(item_ranking: _ItemRanking) -> float:
    return math.inf if item_ranking.position is None else item_ranking.position


def _is_allowed(query: EncodedQuery, location: Location, level0_code: int) -> bool:
    """Return whether a query's modality and conditions allow an item."""
    allowed = None if query.restriction is None else query.restriction[location.segment]
    meets_conditions = allowed is None or bool(allowed.items[location.row])
    return meets_conditions and (not query.level0 or level0_code in query.level0)


def _choices_of_item(
    searcher: SnapshotSearcher, query: EncodedQuery, item: Item, location: Location
) -> list[Choice]:
    """Return the similar logged queries that raise an item."""
    choices = searcher.choices
    if not choices or location not in choices.shares(query.feature[None])[0]:
        return []
    [nearest] = choices.nearest(query.feature[None])
    return [choice for choice in nearest if choice.chosen == item.id]


def score_codes(
    searcher: SnapshotSearcher,
    embedding: Float32[np.ndarray, " dim"],
    codes: Sequence[int],
    level0: frozenset[int],
) -> list[Float32[np.ndarray, " _"]]:
    """Score all codes of each level after the first codes of an ID, as a beam search does.

    Scores are log-probabilities if the generator leads the search, and otherwise products less half
    squared norms: with r the query less the vectors of the codes so far, code c of a level scores::

        r @ c - |c|^2 / 2  =  |r|^2 / 2 - |r - c|^2 / 2
    """
    model = searcher.model
    config = searcher.config
    if model.uses_generator(config):
        return decode_scores(model.decoder, embedding, codes, config.scores, level0)
    residual = embedding * model.ranker.scale(embedding, model.ranker.spread.target_spread(level0))
    scores = []
    for codebook, code in zip(model.ranker.tables(), codes, strict=True):
        scores.append(np.vecdot(codebook, residual) - np.square(codebook).sum(axis=1) / 2)
        residual = residual - codebook[code]
    return scores


def decode_scores(
    decoder: Decoder,
    embedding: Float32[np.ndarray, " dim"],
    codes: Sequence[int],
    scores: Literal["level", "vocabulary"],
    level0: frozenset[int],
) -> list[Float32[np.ndarray, " _"]]:
    """Return a decoder's log-probabilities of all codes after each prefix of an ID, in one pass.

    Row i of the hidden states has read the first i codes, and predicts the codes of level i.
    """
    import torch  # noqa: PLC0415  only here

    with torch.inference_mode():
        prefix = torch.tensor([codes[:-1]], dtype=torch.int64, device=decoder.device)
        query = torch.from_numpy(embedding[None]).to(prefix.device)
        start = decoder.start(query, [level0])
        hidden = decoder.advance(start, prefix).hidden[0]
        return [
            as_floats(decoder.log_probabilities(hidden[[level]], level, scores)[0])
            for level in range(len(codes))
        ]


def follow_id(
    segments: Sequence[SearchSegment],
    codes: Sequence[int],
    scores: Sequence[Float32[np.ndarray, " _"]],
    *,
    level0: frozenset[int] = frozenset(),
    restriction: Restriction | None = None,
    has_probabilities: bool = True,
) -> list[LevelStep]:
    """Compare the codes of an ID with their alternatives at each level.

    The codes of the ID are included even if no item below them is allowed.

    Parameters
    ----------
    scores
        Scores of all codes of each level (:func:`score_codes`).
    level0
        Allowed level-0 codes; empty means any.
    restriction
        Allowed items; None means all that are not deleted.
    has_probabilities
        Whether the scores are log-probabilities rather than distances.
    """
    items_before = [_count_items_before_rows(segment) for segment in segments]
    # The prefix so far is the rows from low to high of each segment's table; first, all rows.
    high = np.array([[len(segment.table) for segment in segments]], dtype=np.int64)
    low = np.zeros_like(high)
    steps = []
    for level, code in enumerate(codes):
        children = children_in_segments(segments, level, low, high)
        num_items = np.zeros(len(children.code), dtype=np.int64)
        for number, before in enumerate(items_before):
            num_items += before[children.high[:, number]] - before[children.low[:, number]]
        is_allowed = _are_allowed(children, num_items, restriction)
        if level == 0 and level0:
            is_allowed &= np.isin(children.code, list(level0))
        siblings = np.flatnonzero(is_allowed | (children.code == code))
        children = children.take(siblings)
        steps.append(
            _describe_level(
                level,
                code,
                children.code,
                scores[level][children.code],
                num_items[siblings],
                has_probabilities=has_probabilities,
            )
        )
        [child] = np.flatnonzero(children.code == code).tolist()
        low = children.low[[child]]
        high = children.high[[child]]
    return steps


def _count_items_before_rows(segment: SearchSegment) -> Int64[np.ndarray, " fences"]:
    """Return the number of items before each row of a segment's table, without deleted ones.

    With one entry more than rows, the items of the rows [low, high) are before[high] - before[low].
    """
    bucket_starts = segment.table.bucket_starts
    if segment.alive is None:
        return bucket_starts
    num_alive_before = np.append(0, segment.alive.items[segment.table.items].cumsum())
    return np.asarray(num_alive_before[bucket_starts])


def _are_allowed(
    children: Children, num_items: Int64[np.ndarray, " children"], restriction: Restriction | None
) -> Bool[np.ndarray, " children"]:
    """Return whether each prefix has an item that is not deleted, and one that is allowed."""
    is_allowed = num_items > 0
    if restriction is not None:
        owner = np.zeros(len(num_items), dtype=np.int64)
        is_allowed &= count_ids(children.low, children.high, [restriction], owner) > 0
    return is_allowed


def _describe_level(
    level: int,
    code: int,
    siblings: Int64[np.ndarray, " siblings"],
    scores: Float32[np.ndarray, " siblings"],
    num_items: Int64[np.ndarray, " siblings"],
    *,
    has_probabilities: bool,
) -> LevelStep:
    """Describe a code among its siblings, with the scores and numbers of items of all."""
    log_probabilities: list[float | None] = [None] * len(siblings)
    probabilities: list[float | None] = [None] * len(siblings)
    if has_probabilities:
        shares = np.exp(scores - scores.max())
        log_probabilities = scores.tolist()
        probabilities = (shares / shares.sum()).tolist()
    rows = [
        *zip(siblings.tolist(), log_probabilities, probabilities, num_items.tolist(), strict=True)
    ]
    best_first = np.argsort(-scores, kind="stable").tolist()
    [position] = np.flatnonzero(siblings == code).tolist()
    return LevelStep(
        *rows[position],
        level=level,
        rank=1 + best_first.index(position),
        num_siblings=len(rows),
        siblings=[Sibling(*rows[sibling]) for sibling in best_first[:MAX_SIBLINGS]],
    )
