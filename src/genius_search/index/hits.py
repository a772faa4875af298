"""Hits of a search, and how a notebook shows them."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from genius_search.errors import BadImage
from genius_search.records import Modality

if TYPE_CHECKING:
    from pandas import DataFrame

SIDE: Final = 192
"""Longer side of a picture in a notebook, in pixels."""
MOST: Final = 60
"""Number of hits that are drawn."""
CHARACTERS: Final = 240
"""Characters of a text that are shown."""
QUALITY: Final = 80


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
    Rare words of the query raise it (:func:`genius_search.index.query.find_rare_words`), and so does that the
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
    None for queries with ``parts``."""
    passage: str | None = None
    """The passage of a long text that was found; None if it is the beginning, or the text is short."""
    least_score: float | None = None
    """What first hits usually score at least, if the index knows it and has no calibration."""
    standard_score: float | None = None
    """By how many standard deviations the score exceeds the mean of the items of its modality, which is how
    modalities are merged; None if one was searched, or it has too few items to tell."""

    def _repr_html_(self) -> str:
        return draw_hits([self])


class Hits(list[SearchHit]):
    """Hits of a search, best first. A notebook shows their pictures."""

    def _repr_html_(self) -> str:
        return draw_hits(self)

    def to_pandas(self) -> DataFrame:
        """Return a data frame with a row for each hit; an item's fields are columns ``fields.NAME``.

        pandas has to be installed.
        """
        import pandas as pd  # noqa: PLC0415  not needed otherwise

        if not self:
            return pd.DataFrame(columns=[field.name for field in dataclasses.fields(SearchHit)])
        return pd.json_normalize([dataclasses.asdict(hit) for hit in self])


def draw_hits(hits: Sequence[SearchHit]) -> str:
    """Return hits as a row of figures in HTML that needs no file, script or network."""
    more = f"<p>and {len(hits) - MOST:,} more</p>" if len(hits) > MOST else ""
    figures = "".join(map(_figure, hits[:MOST])) or "no hits"
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{figures}</div>{more}'


def _figure(hit: SearchHit) -> str:
    from genius_search.data.images import encode_jpeg, open_image  # noqa: PLC0415  for notebooks only

    picture = ""
    if hit.image is not None:
        try:
            opened = open_image(Path(hit.image), shortest_side=SIDE)
            opened.thumbnail((SIDE, SIDE))
            data = base64.b64encode(encode_jpeg(opened, quality=QUALITY)).decode()
            style = "display:block;margin:auto"
            picture = f'<img alt="" style="{style}" src="data:image/jpeg;base64,{data}">'
        except BadImage as error:
            picture = f"<p><i>{escape(error.reason)}</i></p>"
    known = f"score {hit.score:.3f}" if hit.probability is None else f"{hit.probability:.0%}"
    text = " ".join((hit.passage or hit.text or "").split())
    shown = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}…"
    return (
        f'<figure style="margin:0;width:{SIDE}px;overflow-wrap:anywhere">{picture}<figcaption>'
        f"<b>{hit.rank}</b> {escape(hit.id)}<br><small>{known}</small>"
        f"{'<br>' + escape(shown) if shown else ''}</figcaption></figure>"
    )
