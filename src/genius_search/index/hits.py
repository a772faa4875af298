"""The hits of a search: a list that prints as a table, whose values are read when asked for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from genius_search.index.encode import EncodedQuery
from genius_search.index.hit_table import format_html, format_table
from genius_search.index.items import ITEM_COLUMNS, SHOWN_COLUMNS, Item
from genius_search.index.snapshot import Snapshot, check_files_on_error
from genius_search.index.store import Segment
from genius_search.index.words import WordMatches, pack_locations, split_words
from genius_search.picture_words import find_sources, words_about
from genius_search.records import Modality
from genius_search.search.rank import Candidates
from genius_search.text import second_at

if TYPE_CHECKING:
    from pandas import DataFrame

    from genius_search.index.store import Calibration


class _Unread:
    """Where a hit reads its values from: the reader of its query's hits, and its position there."""

    __slots__ = ("_position", "_reader")
    _position: int
    _reader: HitReader


@dataclass(frozen=True, slots=True)
class SearchHit(_Unread):
    """An item in the result of a search.

    Its values are read when they are asked for, rank, id and score before the others, from the
    index as it was when it was searched: later changes of the index do not change a hit. Until all
    are read, it holds files of the index open. Copies and pickled hits have all values.
    """

    rank: int
    """1 for the best hit."""
    id: str
    score: float
    """The score that ranks the hits:

    - by embeddings, the cosine of query and item, minus the weighted density of the item;
    - by codes, the inner product with the vector of the item's ID, minus half of that vector's
      squared norm and the weighted density, plus the weighted log-probability of the generator;
    - without re-ranking, the log-probability of the ID;
    - without a query, 0.

    Words of the query (:func:`genius_search.index.words.find_word_matches`) and earlier choices of
    the item (:meth:`genius_search.Index.learn`) raise the score."""
    modality: Modality
    text: str | None
    image: str | None
    """Path of the picture."""
    fields: dict[str, Any]
    """Name of each field -> value."""
    codes: tuple[int, ...]
    """The item's ID; empty without a query."""
    log_probabilities: tuple[float, ...]
    """Log-probability of each code that the generator decoded. There are fewer than ``codes`` if
    decoding stopped early, and none if distances led the search (:attr:`SearchConfig.router`)."""
    probability: float | None = None
    """Probability that the hit is relevant, if the index was calibrated for these settings
    (:meth:`genius_search.Index.calibrate`). None for queries that the calibration did not measure:
    with conditions or ``parts``, of another kind, or with fewer words
    (:attr:`Calibration.fewest_words`)."""
    passage: str | None = None
    """The matching passage of a long text; None for its beginning, and for short texts."""
    least_score: float | None = None
    """The usual minimum score of first hits, raised by words of the query like the score of this
    hit. None if the index does not know it or is calibrated, for searches with conditions, and for
    hits that contain all words of the query."""
    excess: float | None = None
    """How far the score stands out among the best of its modality
    (:func:`genius_search.index.score.find_excess`). None if one modality was searched, or the
    modality has too few items for a comparison."""

    moment: float | None = None
    """Second at which the best frame of a video, or the passage of subtitles, is shown; None for
    other items."""
    matched: tuple[str, ...] = ()
    """Parts of a picture's description with words of the query that few items contain: ``caption``,
    ``picture text``, ``name`` (and folders), ``keywords``, ``people``, ``date`` or ``place``."""


_set_reader: Final = vars(_Unread)["_reader"].__set__
_set_position: Final = vars(_Unread)["_position"].__set__


def _read_when_asked(number: int, slot: Any) -> property:
    """Return a property that reads a value of a hit from the reader's column with this number.

    ``slot`` has the value of a hit without a reader.
    """

    def read(hit: SearchHit) -> Any:
        try:
            reader = hit._reader  # noqa: SLF001  of this module
        except AttributeError:  # the hit was made with its values
            return slot.__get__(hit)
        try:
            column = reader.columns[number]
        except IndexError:
            column = reader.read_until(number)[number]
        return column[hit._position]  # noqa: SLF001

    return property(read, slot.__set__)


for _number, _name in enumerate(SearchHit.__match_args__):
    setattr(SearchHit, _name, _read_when_asked(_number, vars(SearchHit)[_name]))


def reader_of(hit: SearchHit) -> HitReader | None:
    """Return what reads the values of a hit; None if it was made with its values."""
    reader: HitReader | None = getattr(hit, "_reader", None)
    return reader


def values_of(hit: SearchHit) -> Sequence[Any]:
    """Return the values of a hit, in the order of the fields of :class:`SearchHit`.

    This takes less time than to ask for one after the other.
    """
    reader = reader_of(hit)
    if reader is None:
        return [getattr(hit, name) for name in SearchHit.__match_args__]
    position = hit._position  # noqa: SLF001  of this module
    last = len(SearchHit.__match_args__) - 1
    return [column[position] for column in reader.read_until(last)]


class FacetValue(NamedTuple):
    """A value of a field, and the number of items that have it."""

    value: str | int | float | bool
    items: int


CutOff: TypeAlias = Literal["probability", "least score", "first hits"]


class Hits(list[SearchHit]):
    """Hits of a search, best first: a list that prints as a table.

    >>> hits = index.search("a red bag")  # doctest: +SKIP
    >>> print(hits)  # doctest: +SKIP
    rank   score  id              text or file
       1  0.3127  bags/red.jpg    Pictures/bags/red.jpg
       2  0.2981  bags/scarf.txt  a scarf that matches a red bag
    """

    def __init__(
        self, hits: Iterable[SearchHit] = (), *, calibration: Calibration | None = None
    ) -> None:
        super().__init__(hits)
        self._calibration = calibration
        self.facets: dict[str, list[FacetValue]] = {}
        """Up to 100 values of each field that was counted, the most frequent first."""
        self.more_in_group: list[int] = []
        """For each hit of ``group_by``, the number of other items in its group that meet the
        conditions; with ``near``, the number of its near-duplicates (cosine of at least .98) among
        the hits that were compared. Empty without ``group_by``."""
        self.cut_off: CutOff | None = None
        """Which hits ``order_by`` sorted: those whose ``probability`` reaches the calibration's
        threshold; those whose score reaches their ``least score``; or, if the index has neither for
        this search, the 100 ``first hits``. None without a query."""

    @property
    def good_match(self) -> bool | None:
        """Whether there is a good match; None if the index cannot judge.

        With a calibration, a good match is a hit whose probability reaches the threshold. Without
        one, it is a hit whose score reaches the usual minimum of first hits
        (:attr:`SearchHit.least_score`). An empty result has no good match. The index cannot judge

        - hits of settings or queries that were not measured,
        - hits if no threshold reaches the precision of the calibration
          (:meth:`genius_search.Index.calibrate`),
        - results whose first hit was found by its code, such as a product number,
        - later pages.
        """
        if not self:
            return False
        if self[0].rank > 1:
            return None
        if self._calibration is None:
            if any(hit.least_score is not None and hit.score >= hit.least_score for hit in self):
                return True
            return None if any(hit.least_score is None for hit in self) else False
        if self._calibration.threshold is None or self[0].probability is None:
            return None
        return max(hit.probability or 0.0 for hit in self) >= self._calibration.threshold

    def to_pandas(self) -> DataFrame:
        """Return a data frame with one row per hit, and fields as columns ``fields.NAME``.

        Needs pandas.
        """
        import pandas as pd  # noqa: PLC0415  not needed otherwise

        if not self:
            return pd.DataFrame(columns=[spec.name for spec in dataclasses.fields(SearchHit)])
        return pd.json_normalize([dataclasses.asdict(hit) for hit in self])

    def __str__(self) -> str:
        return format_table(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's
        """Show the table in IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return format_html(self)


class HitsOfQueries(list[Hits]):
    """The hits of each query of a list; it prints one table per query."""

    def __str__(self) -> str:
        return "\n\n".join(f"query {number}\n{hits}" for number, hits in enumerate(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's
        """Show the tables in IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the tables in a notebook."""
        return "".join(
            f"<p>query {number}</p>{format_html(hits)}" for number, hits in enumerate(self)
        )


class HitSettings(NamedTuple):
    """Settings that the values of hits depend on."""

    num_levels: int
    """Number of codes in an ID."""
    decodes: bool
    """Whether a generator computed log-probabilities."""
    least_scores: dict[str, float]
    """Least scores of good first hits, by modality; empty if hits have none."""


NUM_HEAD_COLUMNS: Final = 3
"""Rank, id and score are read before the other values."""


class HitReader:
    """Reads the values of one query's hits.

    Ranks, ids and scores of all hits are read together, when the first one is asked for, and so are
    all values. Until then the reader holds the snapshot that was searched, whose files stay
    readable.
    """

    __slots__ = ("_source", "columns")

    def __init__(
        self,
        snapshot: Snapshot,
        settings: HitSettings,
        query: EncodedQuery,
        candidates: Candidates,
    ) -> None:
        self._source: tuple[Any, ...] | None = (snapshot, settings, query, candidates)
        self.columns: list[Sequence[Any]] = []
        """The values that have been read: ranks, ids and scores, or those of all fields of
        :class:`SearchHit`, in their order."""

    def read_until(self, number: int) -> list[Sequence[Any]]:
        """Return at least the first columns, up to this number."""
        source, columns = self._source, self.columns
        if source is not None and number >= len(columns):
            with check_files_on_error(source[0]):
                if number < NUM_HEAD_COLUMNS:
                    columns[:] = _read_heads(*source)
                else:  # a new list, since another thread may fill the other one later
                    self.columns = _read_columns(None, *source)
                    self._source = None
        return self.columns

    @staticmethod
    def read_all(readers: Sequence[HitReader]) -> None:
        """Read the values of several queries' hits, which is faster than one after the other."""
        sources = [reader._source for reader in readers]  # noqa: SLF001  of this class
        unread = [
            (reader, source) for reader, source in zip(readers, sources, strict=True) if source
        ]
        if len({id(source[0]) for _, source in unread}) != 1:
            return  # there are none, or the index has changed between them; they are read later
        snapshot: Snapshot = unread[0][1][0]
        all_candidates: list[Candidates] = [source[3] for _, source in unread]
        segments = np.concatenate([candidates.segments for candidates in all_candidates])
        all_rows = np.concatenate([candidates.items for candidates in all_candidates])
        with check_files_on_error(snapshot):
            items = snapshot.items_at(segments, snapshot.owner_rows(segments, all_rows))
            start = 0
            for (reader, source), candidates in zip(unread, all_candidates, strict=True):
                end = start + len(candidates.items)
                reader.columns = _read_columns(items[start:end], *source)
                reader._source = None  # noqa: SLF001
                start = end


def read_hits(hit_lists: Iterable[Sequence[SearchHit]]) -> None:
    """Read the values of the hits of several queries, with one statement for each segment."""
    readers = {}
    for hits in hit_lists:
        for hit in hits:
            reader = reader_of(hit)
            if reader is not None:
                readers[id(reader)] = reader
    HitReader.read_all([*readers.values()])


def make_hits(
    snapshot: Snapshot,
    settings: HitSettings,
    query: EncodedQuery,
    candidates: Candidates,
) -> list[SearchHit]:
    """Return hits of candidates; see :class:`HitReader`."""
    reader = HitReader(snapshot, settings, query, candidates)
    hits = []
    new_hit = SearchHit.__new__
    for position in range(len(candidates.items)):
        hit = new_hit(SearchHit)
        _set_reader(hit, reader)
        _set_position(hit, position)
        hits.append(hit)
    return hits


def _read_heads(
    snapshot: Snapshot,
    _: HitSettings,
    __: EncodedQuery,
    candidates: Candidates,
) -> list[Sequence[Any]]:
    """Return ranks, ids and scores of hits."""
    rows = snapshot.owner_rows(candidates.segments, candidates.items).tolist()
    ids = snapshot.ids_at(candidates.segments.tolist(), rows)
    return [range(1, len(ids) + 1), ids, candidates.scores.tolist()]


def _read_columns(
    items: Sequence[Item] | None,
    snapshot: Snapshot,
    settings: HitSettings,
    query: EncodedQuery,
    candidates: Candidates,
) -> list[Sequence[Any]]:
    """Return the values of hits: a column for each field of :class:`SearchHit`, in their order.

    ``items`` are the items of the hits, if they have been read.
    """
    count = len(candidates.items)
    owner_rows = snapshot.owner_rows(candidates.segments, candidates.items)
    if items is None:
        # Descriptions are read for the words of a query, and to show passages.
        reads_descriptions = query.words is not None or snapshot.max_passages
        columns = ITEM_COLUMNS if reads_descriptions else SHOWN_COLUMNS
        items = snapshot.items_at(candidates.segments, owner_rows, columns=columns)
    segments = [snapshot.segments[number] for number in candidates.segments.tolist()]
    item_rows = candidates.items.tolist()
    id_rows = candidates.id_rows.tolist()
    words = () if query.words is None else query.words.words
    if query.words is not None and snapshot.has_moments:
        item_rows = [
            row if segment.moments is None else _row_of_words(item, segment, row, owner, words)
            for item, segment, row, owner in zip(
                items, segments, item_rows, owner_rows.tolist(), strict=True
            )
        ]
    least_scores: list[float | None] = [None] * count
    if query.is_measured and settings.least_scores:
        locations = pack_locations(candidates.segments, owner_rows)
        matches = None if query.words is None else query.words.for_locations(locations)
        least_scores = _least_scores_of(settings.least_scores, candidates, items, matches)
    decoded: list[tuple[float, ...]] = [()] * count
    if settings.decodes:
        decoded = [tuple(row[~np.isnan(row)].tolist()) for row in candidates.log_probabilities]
    fields = [item.fields for item in items]
    passages = [*map(_passage_of, items, fields, segments, item_rows)]
    num_levels = settings.num_levels
    return [
        range(1, count + 1),
        [item.id for item in items],
        candidates.scores.tolist(),
        [item.modality for item in items],
        [item.text for item in items],
        [item.image for item in items],
        fields,
        [
            tuple(segment.table.ids[row, :num_levels].tolist())
            for segment, row in zip(segments, id_rows, strict=True)
        ],
        decoded,
        _with_none(candidates.probabilities if query.is_measured else None, count),
        [passage for passage, _ in passages],
        least_scores,
        _with_none(candidates.excess, count),
        [moment for _, moment in passages],
        [_matched_sources(item, words) for item in items] if words else [()] * count,
    ]


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
    if item.image is None:
        return ()
    fields = item.fields
    about = words_about(item.id, fields)
    about["name"].append(str(fields.get("name", "")))
    sources = {"caption": item.text or "", "picture text": item.picture_words or ""}
    sources |= {name: " ".join(texts) for name, texts in about.items()}
    return find_sources(words, sources)


def _passage_of(
    item: Item, fields: dict[str, Any], segment: Segment, row: int
) -> tuple[str | None, float | None]:
    """Return the text of the passage in a row, if it has one, and the second in its video.

    The row of a video itself stands for its first frame, whose second is a field. The text of
    subtitles without a video has marks of time.
    """
    item_kind = fields.get("kind")
    number = row - segment.num_items  # rows of passages follow the rows of all items
    if number < 0:
        seconds = fields.get("poster") if item_kind == "video" else None
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
    candidates: Candidates,
    items: Sequence[Item],
    matches: WordMatches | None,
) -> list[float | None]:
    """Return the least score that each hit is compared with, raised as the hit is by words.

    A hit with all words of the query, or with a code, may be good whatever its score, so it has no
    least score.
    """
    least_scores = [by_modality.get(item.modality) for item in items]
    if matches is None or candidates.meaning is None:
        return least_scores
    has_words = matches.has_all | matches.has_code
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
