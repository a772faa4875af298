"""Hits as HTML for notebooks: their pictures, names and texts."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from genius_search.data.images import encode_jpeg, open_image
from genius_search.errors import BadImage

if TYPE_CHECKING:
    from genius_search.index.hits import SearchHit

SIDE: Final = 192
"""Longer side of a picture in pixels."""
MOST: Final = 60
"""Number of hits that are drawn."""
CHARACTERS: Final = 240
"""Characters of a text that are shown."""
QUALITY: Final = 80


def draw_hits(hits: Sequence[SearchHit]) -> str:
    """Return a row of figures that needs no file, script or network."""
    more = f"<p>and {len(hits) - MOST:,} more</p>" if len(hits) > MOST else ""
    figures = "".join(map(_figure, hits[:MOST])) or "no hits"
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{figures}</div>{more}'


def _figure(hit: SearchHit) -> str:
    known = f"score {hit.score:.3f}" if hit.probability is None else f"{hit.probability:.0%}"
    text = " ".join((hit.text or "").split())
    shown = text if len(text) <= CHARACTERS else f"{text[:CHARACTERS]}…"
    return (
        f'<figure style="margin:0;width:{SIDE}px;overflow-wrap:anywhere">{_picture(hit)}<figcaption>'
        f"<b>{hit.rank}</b> {escape(hit.id)}<br><small>{known}</small>"
        f"{'<br>' + escape(shown) if shown else ''}</figcaption></figure>"
    )


def _picture(hit: SearchHit) -> str:
    if hit.image is None:
        return ""
    try:
        picture = open_image(Path(hit.image), shortest_side=SIDE)
    except BadImage as error:
        return f"<p><i>{escape(error.reason)}</i></p>"
    picture.thumbnail((SIDE, SIDE))
    data = base64.b64encode(encode_jpeg(picture, quality=QUALITY)).decode()
    return f'<img alt="" style="display:block;margin:auto" src="data:image/jpeg;base64,{data}">'
