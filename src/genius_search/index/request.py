"""The input and the output of a search: a request with its query and conditions, and the hits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypedDict

import numpy as np

from genius_search.border import as_id, as_numbers, as_text
from genius_search.errors import UsageError
from genius_search.index.match import split_excluded
from genius_search.records import Modality

if TYPE_CHECKING:
    from pandas import DataFrame
    from PIL import Image

    from genius_search.config import SearchConfig
    from genius_search.index.filters import Filter
    from genius_search.index.store import Calibration

    Picture: TypeAlias = str | Path | bytes | Image.Image | np.ndarray
    """A file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3)."""

Vector: TypeAlias = np.ndarray | Sequence[float]
"""Numbers of shape (dim,)."""
Vectors: TypeAlias = np.ndarray | Sequence[Sequence[float]]
"""Numbers of shape (rows, dim)."""
ModalityName: TypeAlias = Literal["image", "text", "image-text"]
Combine: TypeAlias = Literal["sum", "any"]
MAX_HITS: Final = 10**9
"""Maximum of ``k``, ``offset`` and ``beam`` in a request."""
TABLE_HEAD: Final = ("rank", "score", "id", "text or file")
"""Column names of printed hits."""
MAX_TABLE_WIDTH: Final = 100
"""Maximum number of characters in a line of printed hits."""
MAX_ID_WIDTH: Final = 40
"""Maximum number of characters of an id in printed hits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPart:
    """A weighted part of a query: a text, an image or both; an item of the index; or a vector."""

    text: str | None = None
    image: Picture | None = None
    id: str | int | None = None
    """Id of an item of the index, instead of a text and an image."""
    vector: Vector | None = field(default=None, compare=False)
    """A feature of the index's encoder, of shape (dim,), instead of a text and an image."""
    weight: float = 1.0
    """Weight of the part in the sum; a negative weight moves the query away from the part."""

    def __post_init__(self) -> None:
        if self.text:
            object.__setattr__(self, "text", as_text(self.text, "the text of a part"))
        if self.id is not None:
            object.__setattr__(self, "id", as_id(self.id))
        if self.vector is not None:
            object.__setattr__(self, "vector", as_numbers(self.vector, "the query's vector"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A query, the conditions that its hits must meet, and the options of the search.

    >>> SearchRequest(text="a red bag", modality="image", where=["price<20"], k=3)  # doctest: +SKIP

    Raises
    ------
    UsageError
        There is neither a query nor a condition, a condition cannot be parsed, or an option is out
        of range or has no effect.
    """

    text: str | None = None
    image: Picture | None = None
    vector: Vector | None = field(default=None, compare=False)
    """A feature of the index's encoder, of shape (dim,), alone or as a further part of the query. A
    trained fusion reads it as the feature of a text."""
    parts: Sequence[SearchPart] = ()
    """Weighted texts, images and items. "This picture, in red, less of a logo" is
    ``[SearchPart(id="7"), SearchPart(text="in red"), SearchPart(text="a logo", weight=-0.5)]``. The
    query is the weighted sum of the parts' embeddings, scaled to unit length. ``text`` and
    ``image`` together are another part, of weight 1."""
    combine: Combine = "sum"
    """``sum`` searches for the sum of the parts. ``any`` searches for each part separately and
    interleaves the hits: the best of each part, the second of each, and so on."""
    instruction: str | None = None
    """A description of the kind of result, such as "Find a photo of this product." Default: the
    model's instruction for this kind of query and result."""
    modality: Modality | ModalityName | None = None
    """Return only items of this modality: ``image``, ``text`` or ``image-text``. By default the
    instruction decides. Without an instruction, each modality is searched and the hits are merged:
    by probability if the index is calibrated, otherwise by how far they stand out from the other
    items of their modality."""
    where: Filter | Sequence[str] | Mapping[str, object] = ()
    """Conditions on the items' fields, which must all hold: ``["price<20", "brand=acme"]`` or
    ``{"price": {"<": 20}, "brand": "acme"}``; see :meth:`Filter.parse`. With a condition or a
    modality, the query may be left out: the search then lists the matching items, newest first,
    with a score of 0."""
    match: str | None = None
    """Words that the items' texts must contain or must not contain, as in ``beach OR sea -people``;
    see :attr:`Filter.match`. Excluded words in ``text`` (``-people``) are moved here."""
    hybrid: bool = True
    """Raise items whose text or file name contains words of the query; rare words raise them more.
    An item that contains a code of the query, such as ``IMG_2034``, is pinned: it comes first."""
    k: int = 10
    """Maximum number of hits."""
    offset: int = 0
    """Number of hits to skip, for later pages."""
    beam: int | None = None
    """Beam width. Default: that of the settings. A search that finds too few hits is repeated with
    a wider beam."""
    order_by: str | None = None
    """Sort by a field: ``price`` ascends, ``-price`` descends; items without the field come last.
    Without a query, all items that meet the conditions are sorted. With one, the hits above a
    cut-off are (:attr:`Hits.cut_off`): "best matches by date"."""
    facets: Sequence[str] = ()
    """Fields whose values are counted among all items that meet the conditions
    (:attr:`Hits.facets`)."""
    group_by: str | None = None
    """Return the first hit of each value of a field; of each content with ``content``, for copies
    of a file; or of near-duplicates among the hits with ``near``. :attr:`Hits.more_in_group` counts
    the others. An item without a value is a hit by itself."""
    deadline: float = math.inf
    """Time, on the clock of :func:`time.monotonic`, after which a search for items that meet the
    conditions fails."""
    filter: Filter | None = field(init=False, repr=False, compare=False)
    """``where`` and ``match``, parsed; None without conditions."""
    query: tuple[SearchPart, ...] = field(init=False, repr=False, compare=False)
    """All parts of the query: ``text`` and ``image`` first, then ``vector``, then ``parts``."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._clean_texts()
        self._move_excluded_words()
        if self.modality is not None and not isinstance(self.modality, Modality):
            object.__setattr__(self, "modality", Modality.parse(self.modality))
        object.__setattr__(self, "filter", self._parse_conditions())
        object.__setattr__(self, "parts", tuple(self.parts))
        facets = (self.facets,) if isinstance(self.facets, str) else tuple(self.facets)
        object.__setattr__(self, "facets", facets)
        object.__setattr__(self, "query", self._collect_parts())
        self._check_parts()

    def _check_ranges(self) -> None:
        """Refuse numbers that are out of range, and unknown ways to combine parts."""
        for name, number, minimum in (
            ("k", self.k, 1),
            ("beam", self.beam, 1),
            ("offset", self.offset, 0),
        ):
            if number is not None:
                check_range(name, number, minimum)
        if self.combine not in ("sum", "any"):
            raise UsageError(f"combine is {self.combine!r}, expected 'sum' or 'any'")

    def _clean_texts(self) -> None:
        """Clean text and instruction; refuse other types, such as a picture instead of a text."""
        for name in ("text", "instruction"):
            text = getattr(self, name)
            if not isinstance(text, str | None):
                raise UsageError(
                    f"{name} is {text!r}, expected a text; pictures are image=, vectors vector="
                )
            if text:
                object.__setattr__(self, name, as_text(text, name))

    def _move_excluded_words(self) -> None:
        """Move excluded words of the text to ``match``: "beach -people" becomes "beach"."""
        text, excluded = split_excluded(self.text or "")
        if not excluded:
            return
        match = self.match or getattr(self.where, "match", None)
        object.__setattr__(self, "text", text or None)
        object.__setattr__(self, "match", f"{match} {excluded}" if match else excluded)

    def _parse_conditions(self) -> Filter | None:
        """Return ``where`` and ``match`` as one filter; None without conditions."""
        if not self.where and self.match is None:
            return None
        from genius_search.index.filters import Filter  # noqa: PLC0415  rarely needed

        if not isinstance(self.where, Filter):
            return Filter.parse(self.where, self.match)
        if self.match is None:
            return self.where
        return dataclasses.replace(self.where, match=self.match)

    def _collect_parts(self) -> tuple[SearchPart, ...]:
        """Return all parts of the query."""
        parts = list(self.parts)
        if self.vector is not None:
            parts.insert(0, SearchPart(vector=self.vector))
        if self.image is not None or (self.text and not self.text.isspace()):
            parts.insert(0, SearchPart(text=self.text, image=self.image))
        return tuple(parts)

    def _check_parts(self) -> None:
        """Refuse a request that asks for nothing, and parts that mean nothing."""
        has_conditions = self.filter is not None or self.modality is not None
        if not (self.query or has_conditions or self.is_arranged):
            raise UsageError(
                "a query needs a text, an image, or both; or a vector; or conditions alone (where)"
            )
        for part in self.query:
            has_content = part.image is not None or bool(part.text and not part.text.isspace())
            if has_content + (part.id is not None) + (part.vector is not None) != 1:
                raise UsageError(
                    "a part of a query needs a text, an image, or both; or else an item, or a "
                    "vector"
                )
            if not math.isfinite(part.weight):
                raise UsageError(
                    f"the weight of a part is {part.weight}, it must be a finite number"
                )
            if part.weight != 1 and self.combine == "any":
                raise UsageError(
                    f"the weight of a part is {part.weight}, but combine='any' searches for each "
                    "part separately, where weights have no effect; leave the weight out"
                )

    @property
    def is_arranged(self) -> bool:
        """Whether items are sorted, counted or grouped."""
        return bool(self.order_by is not None or self.facets or self.group_by is not None)

    def alternatives(self) -> list[SearchRequest]:
        """Return the requests to search for: one for each part with ``combine="any"``, else one."""
        if self.combine != "any" or not self.query:
            return [self]
        return [
            dataclasses.replace(
                self,
                text=part.text,
                image=part.image,
                vector=part.vector,
                parts=() if part.id is None else (part,),
                combine="sum",
            )
            for part in self.query
        ]


def check_range(name: str, number: int, minimum: int) -> None:
    """Raise :class:`UsageError` unless a number is between its minimum and :data:`MAX_HITS`."""
    if not minimum <= number <= MAX_HITS:
        raise UsageError(
            f"{name} is {number}, it must be at least {minimum} and at most {MAX_HITS}"
        )


class SearchOptions(TypedDict, total=False):
    """Options of a search: the fields of :class:`SearchRequest` except the text, and ``config``."""

    image: Picture | None
    vector: Vector | None
    parts: Sequence[SearchPart]
    combine: Combine
    instruction: str | None
    modality: Modality | ModalityName | None
    where: Filter | Sequence[str] | Mapping[str, object]
    match: str | None
    hybrid: bool
    k: int
    offset: int
    beam: int | None
    order_by: str | None
    facets: Sequence[str]
    group_by: str | None
    config: SearchConfig | None
    """Settings that differ from those of the index in this search."""


def as_request(query: Any, options: Mapping[str, Any]) -> SearchRequest:
    """Return a request made of a text and options, or a request as it is.

    Raises
    ------
    UsageError
        There are options besides a request.
    """
    if not isinstance(query, SearchRequest):
        return SearchRequest(text=query, **options)  # a query that is no text is refused there
    if options := _without_defaults(options):
        raise UsageError(
            f"a SearchRequest comes with {', '.join(options)}=; set these options in the request"
        )
    return query


def _without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from the defaults of :class:`SearchRequest`."""
    defaults = {spec.name: spec.default for spec in dataclasses.fields(SearchRequest)}
    changed = {}
    for name, value in options.items():
        default = defaults.get(name)
        if value is default or (not isinstance(value, np.ndarray) and value == default):
            continue
        changed[name] = value
    return changed


class HitSource(Protocol):
    """Reads the values of hits that a search has found."""

    def head(self, position: int) -> tuple[Any, ...]:
        """Return the first values of a hit, at least rank, id and score."""

    def all_values(self, position: int) -> tuple[Any, ...]:
        """Return the values of a hit, in the order of the fields of :class:`SearchHit`."""


class _Unread:
    """Where a hit reads its values from: a source, and the position of the hit in it."""

    __slots__ = ("_position", "_source")
    _position: int
    _source: HitSource


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

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Read the values; called only for a value that has not been read yet."""
            if name not in SearchHit.__match_args__:
                raise AttributeError(f"a SearchHit has no {name!r}", name=name, obj=self)
            source = self._source
            read = source.head if name in _HEAD else source.all_values
            for set_value, value in zip(_SETTERS, read(self._position), strict=False):
                set_value(self, value)
            return getattr(self, name)


_HEAD: Final = frozenset({"rank", "id", "score"})
"""Values that are read before the others."""
_SETTERS: Final = [vars(SearchHit)[name].__set__ for name in SearchHit.__match_args__]
"""Functions that set the values of a hit, in the order of its fields."""
_set_source: Final = vars(_Unread)["_source"].__set__
_set_position: Final = vars(_Unread)["_position"].__set__


def unread_hits(source: HitSource, count: int) -> list[SearchHit]:
    """Return hits that read their values when the first is asked for."""
    hits = [SearchHit.__new__(SearchHit) for _ in range(count)]
    for position, hit in enumerate(hits):
        _set_source(hit, source)
        _set_position(hit, position)
    return hits


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
        return _format_table(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's
        """Show the table in IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return _format_html(self)


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
            f"<p>query {number}</p>{_format_html(hits)}" for number, hits in enumerate(self)
        )


def _table_rows(hits: Sequence[SearchHit]) -> list[tuple[str, str, str, str]]:
    """Return a row of cells for each hit: rank, score, id, and the passage, text or file."""
    rows = []
    for hit in hits:
        content = hit.passage or hit.text or hit.image or ""
        score = f"{hit.score:.4f}" if hit.codes else ""  # a search without a query has no scores
        rows.append((str(hit.rank), score, _one_line(hit.id), _one_line(content)))
    return rows


def _one_line(text: str) -> str:
    """Return a text in one line, without characters that control a terminal."""
    line = " ".join(text.split())
    return "".join(character if character.isprintable() else "�" for character in line)


def _format_table(hits: Sequence[SearchHit]) -> str:
    """Return an aligned table with one line per hit, at most :data:`MAX_TABLE_WIDTH` wide."""
    if not hits:
        return "no hits"
    rows = [TABLE_HEAD, *_table_rows(hits)]
    rank, score, name = (max(len(row[column]) for row in rows) for column in range(3))
    name = min(name, MAX_ID_WIDTH)
    lines = []
    for row in rows:
        line = f"{row[0]:>{rank}}  {row[1]:>{score}}  {_shorten(row[2], name):<{name}}  {row[3]}"
        lines.append(_shorten(line.rstrip(), MAX_TABLE_WIDTH))
    return "\n".join(lines)


def _format_html(hits: Sequence[SearchHit]) -> str:
    """Return an HTML table of hits, with escaped contents."""
    if not hits:
        return "<p>no hits</p>"
    lines = ["".join(f"<th>{name}</th>" for name in TABLE_HEAD)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in _table_rows(hits)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _shorten(text: str, width: int) -> str:
    """Return a text cut to ``width`` characters; an ellipsis marks the cut."""
    return text if len(text) <= width else f"{text[: width - 1]}…"
