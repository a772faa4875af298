"""Explanations: why a search finds an item, or does not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from jaxtyping import Float32

from genius_search.index.items import Item
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import SearchRequest
from genius_search.index.snapshot import Location, check_on_error
from genius_search.nn.codebooks import as_floats
from genius_search.search.table import Restriction, SearchSegment, children_in_segments, count_ids

if TYPE_CHECKING:
    from genius_search.index.learned import Choice
    from genius_search.search.beam import Decoder

MAX_SIBLINGS: Final = 8
"""Codes listed at each level."""


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
    """One code of an item's ID among those that a search could choose instead."""

    level: int
    rank: int
    """Among them, from 1: by probability, or by distance from the query. Ties are sorted by code."""
    num_siblings: int
    """Number of these codes, its own included."""
    siblings: list[Sibling]
    """The most probable, or nearest, codes, which may include the item's own."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a search finds an item, or does not."""

    item: Item
    codes: tuple[int, ...]
    is_allowed: bool
    """True if the modality and conditions of the request allow the item."""
    rank: int | None
    """Rank among all items under the beams, before any are raised; None if the item was not reached."""
    score: float | None
    touched: int
    """Number of items under the beams."""
    beam: int
    """Beam width."""
    levels: list[LevelStep]
    raised_by: list[Choice]
    """Similar queries for which the item was chosen, most similar first."""


def explain(searcher: SnapshotSearcher, request: SearchRequest, item_id: str | int) -> Explanation:
    """Follow an item's ID through the levels of a search.

    If the request has alternatives, the one that ranks the item best is explained.

    Raises
    ------
    UnknownItem
        The item is not in the index.
    """
    model, snapshot, config = searcher.model, searcher.snapshot, searcher.config
    place = snapshot.locate(item_id)  # an unknown item is an error before anything is encoded
    item = snapshot.item_at(place)
    codes = _codes_at(searcher, place)
    if request.modality is None and not request.instruction and model.level0_is_exact:
        request = dataclasses.replace(request, modality=item.modality)  # the others cannot find it
    queries = searcher.encode(dataclasses.replace(request, hybrid=False).alternatives())
    queries = [query for query in queries if codes[0] in query.level0] or queries[:1]
    with check_on_error(snapshot):
        rankings = searcher.rank(queries, at_least=max(1, snapshot.num_alive))
        found = []
        for ranking in rankings:
            rows = snapshot.owner_rows(ranking.segments, ranking.items)
            found.append(np.flatnonzero((ranking.segments == place.segment) & (rows == place.row)))
        best = min(range(len(found)), key=lambda at: found[at][0] if len(found[at]) else math.inf)
        query, ranking = queries[best], rankings[best]
        rank = int(found[best][0]) if len(found[best]) else None
        if rank is not None:  # the item's best passage
            codes = _codes_at(searcher, Location(place.segment, int(ranking.items[rank])))
        near = []
        if searcher.choices and place in searcher.choices.shares(query.feature[None])[0]:
            near = searcher.choices.nearest(query.feature[None])[0]
        allowed = None if query.restriction is None else query.restriction[place.segment]
        return Explanation(
            item=item,
            codes=codes,
            is_allowed=(allowed is None or bool(allowed.items[place.row]))
            and (not query.level0 or codes[0] in query.level0),
            rank=None if rank is None else 1 + rank,
            score=None if rank is None else float(ranking.scores[rank]),
            touched=ranking.touched,
            beam=max(query.beam or config.beam, query.k),
            levels=follow_id(
                snapshot.search_segments,
                codes,
                score_codes(searcher, query.embedding, codes, query.level0),
                level0=query.level0,
                restriction=query.restriction,
                has_probabilities=model.uses_generator(config),
            ),
            raised_by=[choice for choice in near if choice.chosen == item.id],
        )


def _codes_at(searcher: SnapshotSearcher, place: Location) -> tuple[int, ...]:
    return tuple(searcher.snapshot.id_at(place)[: searcher.model.num_levels].tolist())


def score_codes(
    searcher: SnapshotSearcher,
    embedding: Float32[np.ndarray, " dim"],
    codes: Sequence[int],
    level0: frozenset[int],
) -> list[Float32[np.ndarray, " _"]]:
    """Return the scores of all codes of each level after those of an ID, as a beam search has them.

    They are log-probabilities where the generator leads the search, and products less half norms otherwise.
    """
    model, config = searcher.model, searcher.config
    if model.uses_generator(config):
        return decoded_scores(model.decoder, embedding, codes, config.scores, level0)
    residual = embedding * model.ranker.scale(embedding, model.ranker.spread.target_spread(level0))
    scores = []
    for table, code in zip(model.ranker.tables(), codes, strict=True):
        scores.append(np.vecdot(table, residual) - np.square(table).sum(axis=1) / 2)
        residual = residual - table[code]
    return scores


def decoded_scores(
    decoder: Decoder,
    embedding: Float32[np.ndarray, " dim"],
    codes: Sequence[int],
    scores: Literal["level", "vocabulary"],
    level0: frozenset[int],
) -> list[Float32[np.ndarray, " _"]]:
    """Return what a decoder says of all codes of each level after those of an ID, in one pass."""
    import torch  # noqa: PLC0415  only here

    with torch.inference_mode():
        read = torch.tensor([codes[:-1]], dtype=torch.int64, device=decoder.device)
        start = decoder.start(torch.from_numpy(embedding[None]).to(read.device), [level0])
        hidden = decoder.advance(start, read).hidden[0]
        rows = (decoder.log_probabilities(hidden[[at]], at, scores)[0] for at in range(len(codes)))
        return [as_floats(row) for row in rows]


def follow_id(
    segments: Sequence[SearchSegment],
    codes: Sequence[int],
    scores: Sequence[Float32[np.ndarray, " _"]],
    *,
    level0: frozenset[int] = frozenset(),
    restriction: Restriction | None = None,
    has_probabilities: bool = True,
) -> list[LevelStep]:
    """Return the codes of an ID among their alternatives at each level.

    The ID's own codes are included even if no item below them is allowed.

    Parameters
    ----------
    scores
        of all codes of each level (:func:`score_codes`).
    level0
        allowed level-0 codes; empty means any.
    restriction
        allowed items; None means all that are not deleted.
    has_probabilities
        whether the scores are log-probabilities rather than distances.
    """
    living_before = []
    for segment in segments:  # items, without deleted ones, before each row of the table
        fences = segment.table.bucket_starts
        if segment.alive is not None:
            fences = np.append(0, segment.alive.items[segment.table.items].cumsum())[fences]
        living_before.append(fences)
    high = np.array([[len(segment.table) for segment in segments]], dtype=np.int64)
    low = np.zeros_like(high)
    steps = []
    for level, own in enumerate(codes):
        children = children_in_segments(segments, level, low, high)
        items = np.zeros(len(children.code), dtype=np.int64)
        for number, before in enumerate(living_before):
            items += before[children.high[:, number]] - before[children.low[:, number]]
        is_allowed = items > 0
        if restriction is not None:
            owner = np.zeros(len(items), dtype=np.int64)
            is_allowed &= count_ids(children.low, children.high, [restriction], owner) > 0
        if level == 0 and level0:
            is_allowed &= np.isin(children.code, list(level0))
        kept = np.flatnonzero(is_allowed | (children.code == own))
        children, items = children.take(kept), items[kept]
        gained = scores[level][children.code]
        unknown = [None] * len(items)
        log_probabilities = gained.tolist() if has_probabilities else unknown
        shares = np.exp(gained - gained.max())
        probabilities = (shares / shares.sum()).tolist() if has_probabilities else unknown
        columns = (children.code.tolist(), log_probabilities, probabilities, items.tolist())
        rows = [*zip(*columns, strict=True)]
        best = np.argsort(-gained, kind="stable").tolist()
        (at,) = np.flatnonzero(children.code == own).tolist()
        steps.append(
            LevelStep(
                *rows[at],
                level=level,
                rank=1 + best.index(at),
                num_siblings=len(rows),
                siblings=[Sibling(*rows[one]) for one in best[:MAX_SIBLINGS]],
            )
        )
        low, high = children.low[[at]], children.high[[at]]
    return steps
