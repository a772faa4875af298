"""Search requests: a query, and the conditions that its results must meet."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from genius_search.errors import UsageError
from genius_search.index.filters import Filter
from genius_search.records import Modality

if TYPE_CHECKING:
    from PIL import Image

    Picture: TypeAlias = str | Path | bytes | Image.Image | np.ndarray
    """A picture: a file, its bytes, a Pillow image, or an array of uint8 of shape (height, width, 3)."""


MAX_HITS: Final = 10**9
"""Hits or beams that a request may ask for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchPart:
    """One weighted part of a query: a text, an image, both, an item of the index, or a vector."""

    text: str | None = None
    image: Picture | None = None
    id: str | None = None
    """An item of the index, instead of a text and an image."""
    vector: np.ndarray | None = field(default=None, compare=False)
    """A feature of the index's encoder, of shape (dim,), instead of a text and an image."""
    weight: float = 1.0
    """Negative weights search away from this part."""

    def check(self, combine: Literal["sum", "any"]) -> None:
        """Check the part of a request; see :meth:`SearchRequest.check`."""
        if has_content(self) + (self.id is not None) + (self.vector is not None) != 1:
            raise UsageError(
                "a part of a query needs a text, an image, or both; or else an item, or a vector"
            )
        if not math.isfinite(self.weight):
            raise UsageError(f"the weight of a part is {self.weight}, it must be a finite number")
        if combine == "any" and self.weight != 1:
            raise UsageError(
                f"the weight of a part is {self.weight}, but with combine='any' each part is searched for by "
                "itself and weights have no effect; leave the weight out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRequest:
    """A query and the conditions its results must meet.

    >>> SearchRequest(text="a red bag", modality="image", where=["price<20"], k=3)  # doctest: +SKIP

    Raises
    ------
    UsageError
        The modality is unknown, or a condition cannot be parsed.
    """

    text: str | None = None
    image: Picture | None = None
    vector: np.ndarray | None = field(default=None, compare=False)
    """A feature of the index's encoder, of shape (dim,), instead of a text and an image or as a part beside
    them. A trained fusion reads it as the feature of a text."""
    parts: tuple[SearchPart, ...] = ()
    """Weighted parts ("this picture, in red, less of that"). The query is the weighted sum of their
    embeddings, scaled to unit length. ``text`` and ``image`` form one more part of weight 1."""
    combine: Literal["sum", "any"] = "sum"
    """``any`` searches for each part by itself instead of their sum, and interleaves the hits: the best of
    each part, the second of each, and so on."""
    instruction: str | None = None
    """A description of the wanted results; by default the model's own for this kind of query and result."""
    modality: Modality | str | None = None
    """Return only items of this modality. Strings are converted to :class:`Modality`. Without a modality and
    an instruction, each modality is searched and the hits are merged (:func:`merge`)."""
    where: Filter | Sequence[str] | Mapping[str, object] = ()
    """Conditions on the items' fields, as :meth:`Filter.parse` takes them."""
    match: str | None = None
    """Words that the items' texts must contain."""
    hybrid: bool = True
    """Raise items whose text or file name has a word of the query that few items have, such as a
    name; a word with digits (IMG_2034, a product code) puts them first (:mod:`genius_search.index.words`)."""
    k: int = 10
    """Number of hits."""
    beam: int | None = None
    """Beam width for this request instead of the configured one."""
    deadline: float = math.inf
    """Time at which looking for items that meet the conditions ends with an error, on the clock of
    :func:`time.monotonic`."""
    filter: Filter = field(init=False, repr=False, compare=False)
    """``where`` and ``match``, parsed."""

    def __post_init__(self) -> None:
        if isinstance(self.modality, str):
            object.__setattr__(self, "modality", Modality.parse(self.modality))
        object.__setattr__(self, "parts", tuple(self.parts))
        if isinstance(self.where, Filter):
            parsed = self.where if self.match is None else dataclasses.replace(self.where, match=self.match)
        else:
            parsed = Filter.parse(self.where, self.match)
        object.__setattr__(self, "filter", parsed)

    def all_parts(self) -> tuple[SearchPart, ...]:
        """Return every part of the query; the request's own text and image come first."""
        own = SearchPart(text=self.text, image=self.image)
        given = SearchPart(vector=self.vector)
        return (
            *([own] if has_content(own) else []),
            *([] if self.vector is None else [given]),
            *self.parts,
        )

    def alternatives(self) -> list[SearchRequest]:
        """Return the requests that are searched for by themselves: one, or each part."""
        if self.combine == "any":
            return [
                dataclasses.replace(
                    self,
                    text=one.text,
                    image=one.image,
                    vector=one.vector,
                    parts=() if one.id is None else (one,),
                )
                for one in self.all_parts()
            ]
        return [self]

    def check(self) -> None:
        """Check everything that can be checked without the index.

        Raises
        ------
        UsageError
            The request is empty, ``k`` or ``beam`` is below 1 or above a billion, a weight is not finite or
            has no effect, or a text contains invalid Unicode.
        """
        for name, number in (("k", self.k), ("beam", self.beam)):
            if number is not None and not 1 <= number <= MAX_HITS:
                raise UsageError(f"{name} is {number}, it must be at least 1 and at most {MAX_HITS}")
        if self.combine not in ("sum", "any"):
            raise UsageError(f"combine is {self.combine!r}, expected 'sum' or 'any'")
        parts = self.all_parts()
        texts = [*(("text", part.text) for part in parts), ("instruction", self.instruction)]
        for name, words in texts:
            try:
                (words or "").encode()
            except UnicodeEncodeError:
                raise UsageError(
                    f"the {name} {words!r} contains a lone surrogate (half a character)"
                ) from None
        if not parts:
            raise UsageError("a query needs a text, an image, or both; or a vector")
        for part in parts:
            part.check(self.combine)


def has_content(part: SearchPart) -> bool:
    """Return whether a part has a text or an image."""
    return part.image is not None or bool(part.text and part.text.strip())
