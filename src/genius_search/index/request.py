"""The input of a search: parts of a query, conditions on its hits, and how they are arranged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np

from genius_search.border import as_id, as_numbers, as_text, check_range
from genius_search.errors import UsageError
from genius_search.index.match import split_excluded
from genius_search.records import Modality

if TYPE_CHECKING:
    from PIL import Image

    from genius_search.config import SearchConfig
    from genius_search.index.filters import Filter

    Picture: TypeAlias = str | Path | bytes | Image.Image | np.ndarray
    """A file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3)."""

Vector: TypeAlias = np.ndarray | Sequence[float]
"""Numbers of shape (dim,)."""
Vectors: TypeAlias = np.ndarray | Sequence[Sequence[float]]
"""Numbers of shape (rows, dim)."""
ModalityName: TypeAlias = Literal["image", "text", "image-text"]
Combine: TypeAlias = Literal["sum", "any"]


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
    order_by: str | None = None
    """Sort by a field: ``price`` ascends, ``-price`` descends; items without the field come last.
    Without a query, all items that meet the conditions are sorted. With one, the hits above a
    cut-off are (:attr:`Hits.cut_off`): "best matches by date"."""
    facets: Sequence[str] | Mapping[str, Sequence[float]] = ()
    """Fields whose values are counted among all items that meet the conditions; ``price:0,10,50``
    or ``{"price": [0, 10, 50]}`` counts ranges, ``price:ranges`` automatic ones
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
        object.__setattr__(self, "facets", _facet_names(self.facets))
        object.__setattr__(self, "query", self._collect_parts())
        self._check_parts()

    @property
    def query_type(self) -> str:
        """The type of the query: a modality, ``vector``, or ``parts``."""
        if len(self.query) != 1 or self.parts:
            return "parts"
        [part] = self.query
        if part.vector is not None:
            return "vector"
        return Modality.of(has_image=part.image is not None, has_text=bool(part.text)).value

    @property
    def num_words(self) -> int:
        """Number of words of the text."""
        return len((self.text or "").split())

    def _check_ranges(self) -> None:
        """Refuse numbers that are out of range, and unknown ways to combine parts."""
        check_range("k", self.k, 1)
        check_range("offset", self.offset, 0)
        if self.combine not in ("sum", "any"):
            raise UsageError(f"combine is {self.combine!r}, expected 'sum' or 'any'")

    def _clean_texts(self) -> None:
        """Clean text and instruction; refuse other types, such as a picture instead of a text."""
        for name in ("order_by", "group_by"):
            field_name = getattr(self, name)
            if not isinstance(field_name, str | None):
                raise UsageError(f"{name} is {field_name!r}, expected the name of a field")
        for name in ("text", "instruction"):
            text = getattr(self, name)
            if not isinstance(text, str | None):
                raise UsageError(
                    f"{name} is {text!r:.90}, expected a text; pictures are image=, vectors vector="
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


def _facet_names(facets: str | Sequence[str] | Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    """Return facets by their names, such as ``brand`` and ``price:0,10,50``."""
    if isinstance(facets, str):
        return (facets,)
    if not isinstance(facets, Mapping):
        names = tuple(facets)
        if any(not isinstance(name, str) for name in names):
            raise UsageError(f"facets are {names}, expected the names of fields")
        return names
    return tuple(_facet_name(name, bounds) for name, bounds in facets.items())


def _facet_name(name: str, bounds: Sequence[float]) -> str:
    """Return a facet with the bounds of its ranges as one name: ``price:0,10,50``."""
    numbers = np.atleast_1d(as_numbers(bounds, f"the bounds of {name}"))
    return f"{name}:{','.join(f'{bound:.15g}' for bound in numbers)}" if len(numbers) else name


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
    order_by: str | None
    facets: Sequence[str] | Mapping[str, Sequence[float]]
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
