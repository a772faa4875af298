"""One page of results for people: scores side by side, and searches with their pictures and IDs."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from markupsafe import Markup, escape

from genius_search.artifact import write_file
from genius_search.errors import BadData
from genius_search.lab.results import FIRST, HEADLINE, ResultRow, averages, in_order

IMAGE_SIGNATURES: Final = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
"""How the image files that a browser shows begin."""
SIDE_BY_SIDE: Final = {
    "generative": "generative",
    "generative+codes": "+ codes",
    "generative+embeddings": "+ embeddings",
    "exact-fused": "exact",
}
"""The methods of the first table, and their names there; the rest unfolds below it."""


class Fact(NamedTuple):
    """A number or name to know before the results."""

    label: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownHit:
    """One hit, with its ID as the generator wrote it."""

    item_id: str
    modality: str
    """``image``, ``text`` or ``image-text``: how level 0 is shown."""
    score: float
    text: str | None = None
    image: bytes | None = None
    """The bytes of a PNG, JPEG, GIF or WebP file."""
    is_relevant: bool | None = None
    """True for a right answer; None where that is not known."""
    codes: tuple[int, ...] = ()
    """The ID, level 0 first; empty when not shown."""
    log_probabilities: tuple[float, ...] = ()
    """Natural logarithms for the codes that were decoded, which are the first ones."""

    @property
    def shown_codes(self) -> list[dict[str, str]]:
        """The ID level by level, with log-probabilities as numbers; none for codes that were not decoded."""
        if len(self.codes) < len(self.log_probabilities):
            raise BadData(
                f"{len(self.codes)} codes with {len(self.log_probabilities)} log-probabilities, expected at "
                "most one for each code"
            )
        found = []
        for level, (code, value) in enumerate(zip_longest(self.codes, self.log_probabilities)):
            name = self.modality if level == 0 else str(code)
            if value is None:
                tip = f"level {level}: code {code}, not decoded"
                found.append({"name": name, "number": "", "probability": "0", "tip": tip})
                continue
            probability = f"{min(1.0, math.exp(value)):.3f}"
            # A log-probability that rounds to 0 is shown without its sign.
            number = f"{value:.2f}".replace("-", "−") if value <= -0.005 else "0"
            tip = f"level {level}: code {code}, log-probability {number}, probability {probability}"
            found.append({"name": name, "number": number, "probability": probability, "tip": tip})
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSearch:
    """One query and its hits, best first."""

    task: str
    """Its name, ``text -> image``; searches of one task stand together."""
    instruction: str
    query_text: str | None = None
    query_image: bytes | None = None
    hits: tuple[ShownHit, ...] = ()

    @property
    def right_rank(self) -> int | None:
        """The rank of the first right answer, 0 where none was found, None where that is not known."""
        if all(hit.is_relevant is None for hit in self.hits):
            return None
        return next((rank for rank, hit in enumerate(self.hits, start=1) if hit.is_relevant), 0)


@dataclass(frozen=True, kw_only=True)
class ResultsPage:
    """The contents of the page."""

    title: str
    subtitle: str
    facts: tuple[Fact, ...] = ()
    rows: tuple[ResultRow, ...] = ()
    searches: tuple[ShownSearch, ...] = ()


def _score_table(rows: Sequence[ResultRow]) -> dict[str, Any]:
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault((row.task, row.dataset), {"row": row, "measures": {}})
        line["measures"][row.method] = row.measures
    sizes = sorted({row.pool_size for row in rows})
    return {
        "pool": rows[0].pool,
        "sizes": f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else ""),
        "methods": [method for method in SIDE_BY_SIDE if any(row.method == method for row in rows)],
        "lines": list(lines.values()),
        "means": {row.method: row.measures for row in averages(rows)},
    }


def write_page(path: Path, page: ResultsPage) -> None:
    """Write the page as one HTML file that needs nothing else; raises BadData for bytes that are no image."""
    rows = in_order(page.rows)
    tasks: dict[str, list[ShownSearch]] = {}
    for search in page.searches:
        tasks.setdefault(search.task, []).append(search)
    pools = [[row for row in rows if row.pool == pool] for pool in ("global", "local")]
    hits = [hit for search in page.searches for hit in search.hits]
    example = ShownHit(
        item_id="", modality="image", score=0.0, codes=(0, 2817, 94, 1530),
        log_probabilities=(0.0, -0.05, -0.4, -1.6),
    )  # fmt: skip
    view = {
        "title": page.title,
        "subtitle": page.subtitle,
        "facts": page.facts,
        "searches": page.searches,
        "tasks": tasks,
        "first": FIRST,
        "headline": HEADLINE,
        "side_by_side": SIDE_BY_SIDE,
        "rows": rows,
        "datasets": {row.dataset for row in rows},
        "measures": list(dict.fromkeys(name for row in page.rows for name in row.measures)),
        "score_tables": [_score_table(own) for own in pools if own],
        "answers_known": any(hit.is_relevant is not None for hit in hits),
        "codes_shown": any(hit.codes for hit in hits),
        "example": example.shown_codes,
    }
    _render(path, view)


def _render(path: Path, page: Any) -> None:
    """Write the page as one file that fetches nothing; raises BadData for bytes that are no image."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("genius_search.lab"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_hide_addresses,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["picture"] = _picture
    style, script = (environment.loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    text = environment.get_template("results.html").render(
        page=page,
        style=Markup(style),  # noqa: S704  ours, or escaped
        script=Markup(script),  # noqa: S704  ours, or escaped
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_file(path, text.encode())


def _hide_addresses(value: Any) -> Any:
    """Write the colon of an address as an entity: the text is the same, but the file names no address."""
    if isinstance(value, str) and not isinstance(value, Markup) and "://" in value:
        return Markup(str(escape(value)).replace("://", "&#58;//"))  # noqa: S704  ours, or escaped
    return value


def _picture(data: bytes, alt: str) -> Markup:
    for signature, kind in IMAGE_SIGNATURES.items():
        if data.startswith(signature):
            source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
            alt_text = str(escape(alt)).replace("://", "&#58;//")
            return Markup(f'<div class="picture"><img alt="{alt_text}" src="{source}"></div>')  # noqa: S704  ours, or escaped
    raise BadData(f"an image of the page begins with {data[:4]!r}, expected a PNG, JPEG, GIF or WebP file")
