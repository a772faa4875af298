"""The values of hits, which are read when they are first asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from genius_search.index.encode import EncodedQuery
from genius_search.index.items import Item
from genius_search.index.request import SearchHit, unread_hits
from genius_search.index.score import Candidates
from genius_search.index.snapshot import Snapshot, check_files_on_error
from genius_search.index.store import Segment
from genius_search.index.words import split_words
from genius_search.picture_words import find_sources, words_about
from genius_search.search.rank import Ranking
from genius_search.text import second_at


class HitSettings(NamedTuple):
    """Settings that the values of hits depend on."""

    num_levels: int
    """Number of semantic codes in an ID."""
    decodes: bool
    """Whether a generator computed log-probabilities."""
    least_scores: dict[str, float]
    """Least scores of good first hits, by modality; empty if hits have none."""


class HitReader:
    """Reads the values of one query's hits: a :class:`genius_search.index.request.HitSource`.

    Ranks, ids and scores of all hits are read together, when the first one is asked for, and so are
    all values. Until then the reader holds the snapshot that was searched, whose files stay
    readable.

    Parameters
    ----------
    candidates
        The ranked items with raised scores. Without them, hits have the scores of the ranking.
    """

    __slots__ = ("_heads", "_source", "_values")

    def __init__(
        self,
        snapshot: Snapshot,
        settings: HitSettings,
        query: EncodedQuery,
        ranking: Ranking,
        candidates: Candidates | None = None,
    ) -> None:
        self._source: tuple[Any, ...] | None = (snapshot, settings, query, ranking, candidates)
        self._values: list[tuple[Any, ...]] = []
        self._heads: list[tuple[int, str, float]] = []

    def head(self, position: int) -> tuple[Any, ...]:
        """Return rank, id and score of a hit, or all its values if they have been read."""
        source = self._source  # another thread may read the values, too
        if source is None:
            return self._values[position]
        if not self._heads:
            with check_files_on_error(source[0]):
                self._heads = _read_heads(*source)
        return self._heads[position]

    def all_values(self, position: int) -> tuple[Any, ...]:
        """Return the values of a hit, in the order of the fields of :class:`SearchHit`."""
        source = self._source
        if source is not None:
            with check_files_on_error(source[0]):
                self._values = _read_values(*source)
            self._source = None
        return self._values[position]


def make_hits(
    snapshot: Snapshot,
    settings: HitSettings,
    query: EncodedQuery,
    ranking: Ranking,
    candidates: Candidates | None = None,
) -> list[SearchHit]:
    """Return hits of ranked items; see :class:`HitReader`."""
    reader = HitReader(snapshot, settings, query, ranking, candidates)
    return unread_hits(reader, len(ranking.items))


def _read_heads(
    snapshot: Snapshot,
    _: HitSettings,
    __: EncodedQuery,
    ranking: Ranking,
    candidates: Candidates | None,
) -> list[tuple[int, str, float]]:
    """Return rank, id and score of each hit."""
    rows = snapshot.owner_rows(ranking.segments, ranking.items).tolist()
    ids = snapshot.ids_at(ranking.segments.tolist(), rows)
    scores = (ranking if candidates is None else candidates).scores.tolist()
    return [*zip(range(1, len(ids) + 1), ids, scores, strict=True)]


def _read_values(
    snapshot: Snapshot,
    settings: HitSettings,
    query: EncodedQuery,
    ranking: Ranking,
    candidates: Candidates | None,
) -> list[tuple[Any, ...]]:
    """Return the values of hits, in the order of the fields of :class:`SearchHit`."""
    count = len(ranking.items)
    owner_rows = snapshot.owner_rows(ranking.segments, ranking.items)
    items = snapshot.items_at(ranking.segments, owner_rows)
    segments = [snapshot.segments[number] for number in ranking.segments.tolist()]
    item_rows = ranking.items.tolist()
    id_rows = ranking.rows.tolist()
    scores = (ranking if candidates is None else candidates).scores.tolist()
    probabilities: list[float | None] = [None] * count
    excesses: list[float | None] = [None] * count
    if candidates is not None and query.shows_probabilities:
        probabilities = _with_none(candidates.probabilities, count)
    if candidates is not None:
        excesses = _with_none(candidates.excess, count)
    least_scores = _least_scores_of(settings.least_scores, query, candidates, items)
    values = []
    for position, (item, segment) in enumerate(zip(items, segments, strict=True)):
        row = item_rows[position]
        if segment.moments is not None and query.words is not None:
            row = _row_of_words(item, segment, row, int(owner_rows[position]), query.words.words)
        passage, moment = _passage_of(item, segment, row)
        decoded: tuple[float, ...] = ()
        if settings.decodes:
            log_probabilities = ranking.log_probabilities[position]
            decoded = tuple(log_probabilities[~np.isnan(log_probabilities)].tolist())
        values.append(
            (
                position + 1,
                item.id,
                scores[position],
                item.modality,
                item.text,
                item.image,
                item.fields,
                tuple(segment.table.ids[id_rows[position], : settings.num_levels].tolist()),
                decoded,
                probabilities[position],
                passage,
                least_scores[position],
                excesses[position],
                moment,
                _matched_sources(item, () if query.words is None else query.words.words),
            )
        )
    return values


def _row_of_words(item: Item, segment: Segment, row: int, owner: int, words: Sequence[str]) -> int:
    """Return the row of the subtitle with the most words of a query; else the given row.

    Words raise a video as a whole, so that its best row by meaning may be another moment.
    """
    rows = segment.with_passages(np.array([owner]))
    spelt = [word.casefold() for word in words]

    def count_words(number: int) -> int:
        if number < segment.num_items:
            return 0
        _, start, end = segment.passages[number - segment.num_items].tolist()
        text = " ".join(split_words(item.description[start:end])).casefold()
        return sum(f" {word} " in f" {text} " for word in spelt)

    best = max(rows.tolist(), key=lambda number: (count_words(number), number == row))
    return int(best) if count_words(best) else row


def _matched_sources(item: Item, words: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the parts of a picture's description that contain words of the query."""
    if item.image is None or not words:
        return ()
    fields = item.fields
    about = words_about(item.id, fields)
    about["name"].append(str(fields.get("name", "")))
    sources = {"caption": item.text or "", "picture text": item.picture_words or ""}
    sources |= {name: " ".join(texts) for name, texts in about.items()}
    return find_sources(words, sources)


def _passage_of(item: Item, segment: Segment, row: int) -> tuple[str | None, float | None]:
    """Return the text of the passage in a row, if it has one, and the second in its video.

    The row of a video itself stands for its first frame, whose second is a field. The text of
    subtitles without a video has marks of time.
    """
    item_kind = item.fields.get("kind")
    number = row - segment.num_items  # rows of passages follow the rows of all items
    if number < 0:
        seconds = item.fields.get("poster") if item_kind == "video" else None
        if item_kind == "subtitles":
            seconds = second_at(item.text or "", 0)
        return None, seconds if isinstance(seconds, (int, float)) else None
    _, start, end = segment.passages[number].tolist()
    passage = item.description[start:end] or None
    if item_kind == "subtitles":
        return passage, second_at(item.description, start)
    if segment.moments is None or segment.moments[number] < 0:
        return passage, None
    return passage, int(segment.moments[number]) / 1000


def _least_scores_of(
    by_modality: dict[str, float],
    query: EncodedQuery,
    candidates: Candidates | None,
    items: Sequence[Item],
) -> list[float | None]:
    """Return the least score that each hit is compared with, raised as the hit is by words.

    A hit with all words of the query, or with a code, may be good whatever its score, so it has no
    least score.
    """
    if not (query.has_least_scores and by_modality):
        return [None] * len(items)
    least_scores = [by_modality.get(item.modality) for item in items]
    if candidates is None or candidates.words is None:
        return least_scores
    has_words = candidates.words.has_all | candidates.words.has_code
    raised_by = candidates.scores - candidates.meaning
    return [
        None if least is None or excepted else least + raised
        for least, excepted, raised in zip(
            least_scores, has_words.tolist(), raised_by.tolist(), strict=True
        )
    ]


def _with_none(column: np.ndarray | None, count: int) -> list[float | None]:
    """Return a column as a list, with None in place of NaN or of a missing column."""
    if column is None:
        return [None] * count
    return [None if math.isnan(value) else value for value in column.tolist()]
