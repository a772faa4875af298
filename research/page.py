"""One page of results for people: scores side by side, and searches with their pictures and IDs."""

from __future__ import annotations

import base64
import hashlib
import math
import mimetypes
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from markupsafe import Markup, escape

from genius_search.index.hits import SearchHit
from genius_search.writing import write_file
from research.results import FIRST, HEADLINE, ResultRow, averages, in_order

SIDE_BY_SIDE: Final = {
    "generative": "generative",
    "generative+codes": "+ codes",
    "generative+embeddings": "+ embeddings",
    "exact-fused": "exact",
}
"""The methods of the first table, and their names there; the rest unfolds below it."""
EXAMPLE: Final = [("image", 0.0), ("2817", -0.05), ("94", -0.4), ("1530", -1.6)]
"""The ID of the legend: codes, and their log-probabilities."""


class ShownSearch(NamedTuple):
    """One query and its hits, best first."""

    task: str
    """Its name, ``text -> image``; searches of one task stand together."""
    instruction: str
    query_text: str | None
    query_image: Path | None
    hits: Sequence[SearchHit]
    positives: Collection[str]
    """Ids of the right answers."""

    @property
    def right_rank(self) -> int:
        """The rank of the first right answer, 0 where none was found."""
        return next((rank for rank, hit in enumerate(self.hits, start=1) if hit.id in self.positives), 0)


def write_page(
    path: Path,
    *,
    title: str,
    subtitle: str,
    facts: Mapping[str, str],
    rows: Sequence[ResultRow],
    searches: Sequence[ShownSearch],
) -> None:
    """Write the page as one HTML file that needs nothing else.

    Parameters
    ----------
    facts
        numbers and names to know before the results.
    rows
        the results of an evaluation; none leaves the scores out.
    """
    ordered = in_order(rows)
    tasks: dict[str, list[ShownSearch]] = {}
    for search in searches:
        tasks.setdefault(search.task, []).append(search)
    pools = [[row for row in ordered if row.pool == pool] for pool in ("global", "local")]
    loader = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_hide_addresses,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"picture": _picture, "codes": _codes_of}
    style, script = (loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    text = environment.get_template("results.html").render(
        style=Markup(style),  # noqa: S704  ours
        script=Markup(script),  # noqa: S704  ours
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        page={
            "title": title,
            "subtitle": subtitle,
            "facts": facts,
            "searches": searches,
            "tasks": tasks,
            "first": FIRST,
            "headline": HEADLINE,
            "side_by_side": SIDE_BY_SIDE,
            "has_scores": bool(ordered),
            "datasets": {row.dataset for row in ordered},
            "score_tables": [_score_table(own) for own in pools if own],
            "example": [_code(level, *code) for level, code in enumerate(EXAMPLE)],
        },
    )
    write_file(path, text.encode())


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


def _codes_of(hit: SearchHit) -> list[dict[str, str]]:
    """Return a hit's ID level by level; no number stands beside codes that were not decoded."""
    levels = enumerate(zip_longest(hit.codes, hit.log_probabilities))
    return [
        _code(level, hit.modality.value if level == 0 else str(code), value, code)
        for level, (code, value) in levels
    ]


def _code(level: int, name: str, value: float | None, code: int | str = "") -> dict[str, str]:
    if value is None:
        tip = f"level {level}: code {code}, not decoded"
        return {"name": name, "number": "", "probability": "0", "tip": tip}
    probability = f"{min(1.0, math.exp(value)):.3f}"
    # A log-probability that rounds to 0 is shown without its sign.
    number = f"{value:.2f}".replace("-", "−") if value <= -0.005 else "0"
    tip = f"level {level}: code {code}, log-probability {number}, probability {probability}"
    return {"name": name, "number": number, "probability": probability, "tip": tip}


def _hide_addresses(value: Any) -> Any:
    """Write the colon of an address as an entity: the text is the same, but the file names no address."""
    if isinstance(value, str) and not isinstance(value, Markup) and "://" in value:
        return Markup(str(escape(value)).replace("://", "&#58;//"))  # noqa: S704  escaped
    return value


def _picture(file: Path | str, alt: str) -> Markup:
    data = base64.b64encode(Path(file).read_bytes()).decode()
    source = f"data:{mimetypes.guess_type(file)[0]};base64,{data}"
    alt_text = str(escape(alt)).replace("://", "&#58;//")
    return Markup(f'<div class="picture"><img alt="{alt_text}" src="{source}"></div>')  # noqa: S704  escaped
