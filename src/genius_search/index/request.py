"""Search requests, a query and the conditions that its results must meet; and the hits that answer them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypedDict

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
    """A picture: a file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3)."""

Vector: TypeAlias = np.ndarray | Sequence[float]
"""Numbers of shape (dim,)."""
Vectors: TypeAlias = np.ndarray | Sequence[Sequence[float]]
"""Numbers of shape (rows, dim)."""
ModalityName: TypeAlias = Literal["image", "text", "image-text"]
Combine: TypeAlias = Literal["sum", "any"]
MAX_HITS: Final = 10**9
"""Hits or beams that a request may ask for."""
TABLE_HEAD: Final = ("rank", "score", "id", "text or file")
MAX_TABLE_WIDTH: Final = 100
"""Characters in a line of the table that hits print as."""
MAX_ID_WIDTH: Final = 40
"""Characters of an id in that table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPart:
    """One weighted part of a query: a text, an image, both, an item of the index, or a vector."""

    text: str | None = None
    image: Picture | None = None
    id: str | int | None = None
    """An item of the index, instead of a text and an image."""
    vector: Vector | None = field(default=None, compare=False)
    """A feature of the index's encoder, of shape (dim,), instead of a text and an image."""
    weight: float = 1.0
    """Negative weights search away from this part."""

    def __post_init__(self) -> None:
        if self.text:
            object.__setattr__(self, "text", as_text(self.text, "the text of a part"))
        if self.id is not None:
            object.__setattr__(self, "id", as_id(self.id))
        if self.vector is not None:
            object.__setattr__(self, "vector", as_numbers(self.vector, "the query's vector"))


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A query and the conditions its results must meet: the options of every search.

    >>> SearchRequest(text="a red bag", modality="image", where=["price<20"], k=3)  # doctest: +SKIP

    Raises
    ------
    UsageError
        There is no query, a condition cannot be parsed, or an option is out of range or has no effect.
    """

    text: str | None = None
    image: Picture | None = None
    vector: Vector | None = field(default=None, compare=False)
    """A feature of the index's encoder, of shape (dim,), instead of a text and an image or as a part beside
    them. A trained fusion reads it as the feature of a text."""
    parts: Sequence[SearchPart] = ()
    """Texts, images and items of the index with weights, which may be negative ("this picture, in red, less
    of that"): ``[SearchPart(id="7"), SearchPart(text="in red"), SearchPart(text="a logo", weight=-0.5)]``.
    The query is the weighted sum of their embeddings, scaled to unit length. ``text`` and ``image`` form one
    more part of weight 1."""
    combine: Combine = "sum"
    """``any`` searches for each part by itself instead of their sum, and interleaves the hits: the best of
    each part, the second of each, and so on."""
    instruction: str | None = None
    """A description of the wanted results; by default the model's own for this kind of query and result."""
    modality: Modality | ModalityName | None = None
    """Return only items of this modality: ``image``, ``text`` or ``image-text``. By default the instruction
    decides. Without one too, each modality is searched, and the hits are merged by probability if the index
    is calibrated, otherwise by how far they stand out from the items of their modality."""
    where: Filter | Sequence[str] | Mapping[str, object] = ()
    """Conditions on the items' fields, all of which must hold: ``["price<20", "brand=acme"]`` or
    ``{"brand": "acme"}``; see :meth:`Filter.parse`. With conditions or a modality a search needs no query:
    it returns all that they allow, what was added last first, with a score of 0."""
    match: str | None = None
    """Words that the items' texts must contain, or must not, as in ``beach OR sea -people``; see
    :attr:`Filter.match`. Words to leave out may also be in ``text``, which loses them."""
    hybrid: bool = True
    """Raise items whose text or file name has words of the query, the more the rarer these are; a code
    (letters with digits, or four digits: IMG_2034) puts them first."""
    k: int = 10
    """Number of hits."""
    offset: int = 0
    """Number of hits before the first that is returned, for later pages."""
    beam: int | None = None
    """Beam width instead of the configured one. A search that finds too few hits is repeated with wider
    ones."""
    deadline: float = math.inf
    """Time at which looking for items that meet the conditions ends with an error, on the clock of
    :func:`time.monotonic`."""
    filter: Filter | None = field(init=False, repr=False, compare=False)
    """``where`` and ``match``, parsed; None if there are no conditions."""
    query: tuple[SearchPart, ...] = field(init=False, repr=False, compare=False)
    """Every part of the query; the request's own text and image come first, then its vector."""

    def __post_init__(self) -> None:
        for name, number, least in (
            ("k", self.k, 1),
            ("beam", self.beam, 1),
            ("offset", self.offset, 0),
        ):
            if number is not None and not least <= number <= MAX_HITS:
                raise UsageError(
                    f"{name} is {number}, it must be at least {least} and at most {MAX_HITS}"
                )
        if self.combine not in ("sum", "any"):
            raise UsageError(f"combine is {self.combine!r}, expected 'sum' or 'any'")
        for name in ("text", "instruction"):
            if not isinstance(text := getattr(self, name), str | None):
                raise UsageError(
                    f"{name} is {text!r}, expected a text; pictures are image=, vectors vector="
                )
            if text:
                object.__setattr__(self, name, as_text(text, name))
        self._leave_out_words()
        parsed = None
        if self.where or self.match is not None:
            from genius_search.index.filters import Filter  # noqa: PLC0415  most searches have no conditions

            if not isinstance(self.where, Filter):
                parsed = Filter.parse(self.where, self.match)
            else:
                parsed = (
                    self.where
                    if self.match is None
                    else dataclasses.replace(self.where, match=self.match)
                )
        if self.modality is not None and not isinstance(self.modality, Modality):
            object.__setattr__(self, "modality", Modality.parse(self.modality))
        object.__setattr__(self, "filter", parsed)
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "query", self._checked_parts())

    def _leave_out_words(self) -> None:
        """Move the words that the text leaves out to ``match``."""
        text, left_out = split_excluded(self.text or "")
        if not left_out:
            return
        match = self.match or getattr(self.where, "match", None)
        object.__setattr__(self, "text", text or None)
        object.__setattr__(self, "match", f"{match} {left_out}" if match else left_out)

    def _checked_parts(self) -> tuple[SearchPart, ...]:
        given = list(self.parts)
        if self.vector is not None:
            given.insert(0, SearchPart(vector=self.vector))
        if self.image is not None or (self.text and not self.text.isspace()):
            given.insert(0, SearchPart(text=self.text, image=self.image))
        if not given and self.filter is None and self.modality is None:
            raise UsageError(
                "a query needs a text, an image, or both; or a vector; or conditions alone (where)"
            )
        for part in given:
            has_content = part.image is not None or bool(part.text and not part.text.isspace())
            if has_content + (part.id is not None) + (part.vector is not None) != 1:
                raise UsageError(
                    "a part of a query needs a text, an image, or both; or else an item, or a vector"
                )
            if not math.isfinite(part.weight):
                raise UsageError(
                    f"the weight of a part is {part.weight}, it must be a finite number"
                )
            if part.weight != 1 and self.combine == "any":
                raise UsageError(
                    f"the weight of a part is {part.weight}, but with combine='any' each part is searched "
                    "for by itself and weights have no effect; leave the weight out"
                )
        return tuple(given)

    def alternatives(self) -> list[SearchRequest]:
        """Return the requests that are searched for by themselves: one, or each part."""
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


class SearchOptions(TypedDict, total=False):
    """Options of a search: the fields of a :class:`SearchRequest` that are no text, and ``config``."""

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
    config: SearchConfig | None
    """Settings that differ from those of the index in this search."""


def as_request(query: Any, options: Mapping[str, Any]) -> SearchRequest:
    """Return the request of a query: a text with options, or a request, which has them itself."""
    if not isinstance(query, SearchRequest):
        return SearchRequest(text=query, **options)  # which refuses other types
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


@dataclass(frozen=True, slots=True)
class SearchHit:
    """One item in the result of a search."""

    rank: int
    """From 1."""
    id: str
    score: float
    """Score that the hits are ranked by. Without re-ranking it is a log-probability. By codes it is the inner
    product with the ID's vector minus half that vector's squared norm; by embeddings it is the cosine. The
    weighted density is subtracted from both, and the weighted log-probability is added to scores by codes.
    Words of the query raise it (:func:`genius_search.index.words.find_word_matches`), and so does that the
    item was chosen for similar queries (:meth:`genius_search.Index.learn`). It is 0 without a query."""
    modality: Modality
    text: str | None
    image: str | None
    """Path of the picture."""
    fields: dict[str, Any]
    """The item's fields by name."""
    codes: tuple[int, ...]
    """The item's ID; empty without a query."""
    log_probabilities: tuple[float, ...]
    """Log-probability of each code that the generator decoded; shorter than ``codes`` if decoding stopped
    early, and empty if distances led the search (:attr:`SearchConfig.router`)."""
    probability: float | None = None
    """Probability that the hit is relevant, if `genius calibrate` calibrated the index for these settings.
    None for queries unlike those that were measured: with conditions or ``parts``, of another kind, or with
    fewer words (:attr:`Calibration.fewest_words`)."""
    passage: str | None = None
    """The passage of a long text that was found; None if it is the beginning, or the text is short."""
    least_score: float | None = None
    """What first hits usually score at least, raised as this one is by words of the query, if the index knows
    it and has no calibration. None for searches with conditions, and for hits with all words of the query."""
    excess: float | None = None
    """How far the score stands out among the best of its modality
    (:func:`genius_search.index.score.find_excess`); None if one modality was searched, or it has too few
    items to tell."""


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

    @property
    def good_match(self) -> bool | None:
        """Whether there is a good match, or None if that is unknown.

        With a calibration, the most probable hit must reach its threshold. Without one, some hit must
        reach the usual score of first hits (:attr:`SearchHit.least_score`). A search without hits has
        no good match. The answer is unknown if

        - the index cannot judge hits of these settings or of this query,
        - no threshold reaches the precision of the calibration (`genius calibrate --precision`),
        - the first hit was found by its code, such as a product's number, or
        - these are the hits of a later page.
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
        """Return a data frame with a row for each hit; an item's fields are columns ``fields.NAME``.

        Needs pandas.
        """
        import pandas as pd  # noqa: PLC0415  not needed otherwise

        if not self:
            return pd.DataFrame(columns=[spec.name for spec in dataclasses.fields(SearchHit)])
        return pd.json_normalize([dataclasses.asdict(hit) for hit in self])

    def __str__(self) -> str:
        return _format_table(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's names
        """Show the table in IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return _format_html(self)


class HitsOfQueries(list[Hits]):
    """The hits of each query of a list, which print as one table after another."""

    def __str__(self) -> str:
        return "\n\n".join(f"query {number}\n{hits}" for number, hits in enumerate(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002, FBT001  IPython's names
        """Show the tables in IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """Show the tables in a notebook."""
        return "".join(
            f"<p>query {number}</p>{_format_html(hits)}" for number, hits in enumerate(self)
        )


def _table_rows(hits: Sequence[SearchHit]) -> list[tuple[str, str, str, str]]:
    """Return rank, score, id, and passage, text or file of each hit."""
    rows = []
    for hit in hits:
        content = " ".join((hit.passage or hit.text or hit.image or "").split())
        score = f"{hit.score:.4f}" if hit.codes else ""  # hits without a query have no score
        rows.append((str(hit.rank), score, hit.id, content))
    return rows


def _format_table(hits: Sequence[SearchHit]) -> str:
    """Return an aligned table of hits, a line each, cut at :data:`MAX_TABLE_WIDTH`."""
    if not hits:
        return "no hits"
    rows = [TABLE_HEAD, *_table_rows(hits)]
    rank, score, name = (max(len(row[column]) for row in rows) for column in range(3))
    name = min(name, MAX_ID_WIDTH)
    lines = []
    for row in rows:
        line = f"{row[0]:>{rank}}  {row[1]:>{score}}  {_cut(row[2], name):<{name}}  {row[3]}"
        lines.append(_cut(line.rstrip(), MAX_TABLE_WIDTH))
    return "\n".join(lines)


def _format_html(hits: Sequence[SearchHit]) -> str:
    """Return an HTML table of hits, whose contents are escaped."""
    if not hits:
        return "<p>no hits</p>"
    lines = ["".join(f"<th>{name}</th>" for name in TABLE_HEAD)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in _table_rows(hits)]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _cut(text: str, width: int) -> str:
    """Return a text of at most ``width`` characters, with an ellipsis in place of its end."""
    return text if len(text) <= width else f"{text[: width - 1]}…"
