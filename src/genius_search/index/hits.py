"""Hits of a search, and how the hits of several searches become one list."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from genius_search.records import Modality

if TYPE_CHECKING:
    from pandas import DataFrame


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
    Rare words of the query raise it (:mod:`genius_search.index.words`)."""
    modality: Modality
    text: str | None
    image: str | None
    """Path of the picture."""
    fields: dict[str, Any]
    """The item's fields by name."""
    codes: tuple[int, ...]
    """The item's ID."""
    log_probabilities: tuple[float, ...]
    """Log-probability of each code that the generator decoded; shorter than ``codes`` if decoding stopped
    early, and empty if distances led the search (:attr:`SearchConfig.router`)."""
    probability: float | None = None
    """Probability that the hit is relevant, if `genius calibrate` calibrated the index for these settings.
    None for queries with ``parts``."""

    def _repr_html_(self) -> str:
        """Show the hit with its picture in a notebook."""
        from genius_search.index.html import draw_hits  # noqa: PLC0415  for notebooks only

        return draw_hits([self])


class Hits(list[SearchHit]):
    """Hits of a search, best first. A notebook shows their pictures."""

    def _repr_html_(self) -> str:
        from genius_search.index.html import draw_hits  # noqa: PLC0415  for notebooks only

        return draw_hits(self)

    def to_pandas(self) -> DataFrame:
        """Return a data frame with a row for each hit; an item's fields are columns ``fields.NAME``.

        pandas has to be installed.
        """
        import pandas as pd  # noqa: PLC0415  not needed otherwise

        names = [field.name for field in dataclasses.fields(SearchHit) if field.name != "fields"]
        rows = [
            {
                **{name: getattr(hit, name) for name in names},
                **{f"fields.{name}": value for name, value in hit.fields.items()},
            }
            for hit in self
        ]
        return pd.DataFrame(rows, columns=None if rows else names)


class SearchResult(NamedTuple):
    """The result of one request."""

    hits: list[SearchHit]
    """Best first."""
    touched: int
    """Number of items under all beams."""


def merge(results: Sequence[SearchResult], k: int, *, first: Collection[str] = ()) -> SearchResult:
    """Merge the hits of several modalities into one list of ``k``.

    They are ordered by probability if the index is calibrated, otherwise by reciprocal rank: the first hit of
    each modality, the second of each, and so on, in the order of their scores. Items of ``first`` come first.
    """
    if len(results) == 1:
        return results[0]
    hits = [hit for result in results for hit in result.hits]
    if all(hit.probability is not None for hit in hits):
        hits.sort(key=lambda hit: (hit.id not in first, -(hit.probability or 0), hit.rank, -hit.score))
    else:
        hits.sort(key=lambda hit: (hit.id not in first, hit.rank, -hit.score))
    ranked = [dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(hits[:k], start=1)]
    return SearchResult(ranked, sum(result.touched for result in results))


def interleave(results: Sequence[SearchResult], k: int) -> SearchResult:
    """Merge the hits of alternatives into one list of ``k``: the first of each, then the second of each.

    An item that several find has the best of its places.
    """
    if len(results) == 1:
        return results[0]
    in_turn = (hit for hits in zip_longest(*(one.hits for one in results)) for hit in hits if hit is not None)
    best: dict[str, SearchHit] = {}
    for hit in in_turn:
        best.setdefault(hit.id, hit)
    ranked = [
        dataclasses.replace(hit, rank=rank) for rank, hit in enumerate(list(best.values())[:k], start=1)
    ]
    return SearchResult(ranked, sum(result.touched for result in results))
