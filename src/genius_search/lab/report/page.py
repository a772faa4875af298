"""A figure of probabilities and what they are worth: as much as is said, and what refusing costs."""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from string import Template
from typing import Final, NamedTuple

from genius_search.artifact import write_file
from genius_search.errors import BadData
from genius_search.lab.report.table import picture, shown, task_shown
from genius_search.lab.results import FIRST, HEADLINE, ResultRow, averages, in_order

SIDE_BY_SIDE: Final = {
    "generative": "generative",
    "generative+codes": "+ codes",
    "generative+embeddings": "+ embeddings",
    "exact-fused": "exact",
}
"""The methods of the table that opens the page, and their names there; the rest unfolds below it."""
NO_VALUE: Final = "&ndash;"


def scores_section(rows: Sequence[ResultRow]) -> str:
    """The page's scores; nothing when there are none."""
    if not rows:
        return ""
    first, *others = [pool for pool in ("global", "local") if any(row.pool == pool for row in rows)]
    more = "".join(
        f"<details><summary>The same in the {pool} pool</summary>{_score_table(rows, pool)}</details>"
        for pool in others
    )
    return f"""<section aria-labelledby="scores-title">
<div class="heading"><h2 id="scores-title">Scores</h2>
<p>The share of queries with a right answer among the first 1, 5 and 10 hits.</p></div>
{_score_table(rows, first)}
{more}
<details><summary>All methods, measures and costs</summary>{_cost_table(rows)}</details>
</section>"""


def _score_table(rows: Sequence[ResultRow], pool: str) -> str:
    """One pool: a line for each task, methods side by side."""
    rows = [row for row in rows if row.pool == pool]
    methods = [method for method in SIDE_BY_SIDE if any(row.method == method for row in rows)]
    datasets = {row.dataset for row in rows}
    lines: dict[tuple[str, str], dict[str, Mapping[str, float]]] = {}
    for row in in_order(rows):
        lines.setdefault((row.task, row.dataset), {})[row.method] = row.measures
    body = "".join(
        f"<tr>{_row_head(task, dataset, datasets)}" + _score_cells(found, methods) + "</tr>"
        for (task, dataset), found in lines.items()
    )
    means: dict[str, Mapping[str, float]] = {row.method: row.measures for row in averages(rows)}
    if means:
        body += f'<tr class="average"><th scope="row">average</th>{_score_cells(means, methods)}</tr>'
    sizes = sorted({row.pool_size for row in rows})
    size = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    groups = "".join(f'<th scope="colgroup" colspan="{len(FIRST)}">{SIDE_BY_SIDE[m]}</th>' for m in methods)
    names = "".join(
        f'<th scope="col"{_edge(place)}>{name}</th>' for _ in methods for place, name in enumerate(FIRST)
    )
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="Scores, {pool} pool"><table>
<caption>{pool.capitalize()} pool <small>{size} candidates</small></caption>
<thead><tr><td></td>{groups}</tr><tr><th scope="col">task</th>{names}</tr></thead>
<tbody>{body}</tbody></table></div>"""


def _score_cells(found: Mapping[str, Mapping[str, float]], methods: Sequence[str]) -> str:
    cells = []
    for method in methods:
        for place, name in enumerate(FIRST):
            value = found.get(method, {}).get(name)
            if value is None:
                cells.append(f"<td{_edge(place)}>{NO_VALUE}</td>")
            elif name == HEADLINE:
                cells.append(f'<td class="key" style="--v:{value:.3f}"><span>{value:.3f}</span></td>')
            else:
                cells.append(f"<td{_edge(place)}>{value:.3f}</td>")
    return "".join(cells)


def _edge(place: int) -> str:
    return ' class="first"' if place == 0 else ""


def _cost_table(rows: Sequence[ResultRow]) -> str:
    """Every row, with what a method keeps of an item and how many it scores for a query."""
    measures = list(dict.fromkeys(name for row in rows for name in row.measures))
    columns = ("task", "method", "pool", "queries", "bytes per item", "scored", *measures)
    head = "".join(f'<th scope="col">{shown(name)}</th>' for name in columns)
    datasets = {row.dataset for row in rows}
    body = "".join(
        f'<tr>{_row_head(row.task, row.dataset, datasets)}<td class="text">{shown(row.method)}</td>'
        f"<td>{row.pool}</td><td>{row.queries:,}</td>"
        f"<td>{row.bytes_per_item:,.2f}</td><td>{row.candidates_touched:,.0f}</td>"
        + "".join(
            f"<td>{row.measures[name]:.3f}</td>" if name in row.measures else f"<td>{NO_VALUE}</td>"
            for name in measures
        )
        + "</tr>"
        for row in in_order(rows)
    )
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="All methods"><table class="all">
<caption>All methods <small>with the bytes kept of an item and the candidates scored for a query</small>
</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"""


def _row_head(task: str, dataset: str, datasets: set[str]) -> str:
    """The task, and its data set where there are several."""
    name = f"<small>{shown(dataset)}</small>" if len(datasets) > 1 else ""
    return f'<th scope="row">{task_shown(task)}{name}</th>'


class Fact(NamedTuple):
    """A number or name worth knowing before the results."""

    label: str
    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HitShown:
    """One candidate that was found, with its ID as the generator saw it."""

    item_id: str
    modality: str
    """``image``, ``text`` or ``image-text``: how level 0 is shown."""
    score: float
    text: str | None = None
    image: bytes | None = None
    """An image file's bytes: PNG, JPEG, GIF or WebP."""
    is_relevant: bool | None = None
    """Whether it is a right answer; nothing where that is not known."""
    codes: tuple[int, ...] = ()
    """The ID, level 0 first; empty when not shown."""
    log_probabilities: tuple[float, ...] = ()
    """Of the codes that the generator decoded, which are the first ones; natural logarithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchShown:
    """One query and what was found, best first."""

    task: str
    """Its name: ``text -> image``. Searches of one task stand together."""
    instruction: str
    query_text: str | None = None
    query_image: bytes | None = None
    """An image file's bytes."""
    hits: tuple[HitShown, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultsPage:
    """What the page shows."""

    title: str
    subtitle: str
    facts: tuple[Fact, ...] = ()
    rows: tuple[ResultRow, ...] = ()
    searches: tuple[SearchShown, ...] = ()


def write_page(path: Path, page: ResultsPage) -> None:
    """Write the page as one HTML file that needs nothing else, in one step.

    Raises
    ------
    BadData
        bytes that are not a PNG, JPEG, GIF or WebP file, or codes without a log-probability each.
    """
    files = resources.files("genius_search.lab.report")
    script = files.joinpath("page.js").read_text(encoding="utf-8")
    by_task: dict[str, list[SearchShown]] = {}
    for search in page.searches:
        by_task.setdefault(search.task, []).append(search)
    text = Template(files.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=shown(page.title),
        subtitle=shown(page.subtitle),
        facts=_facts(page.facts),
        scores=scores_section(page.rows),
        searches_intro=_intro(page.searches),
        filter=_filter(by_task),
        legend=_legend() if any(hit.codes for search in page.searches for hit in search.hits) else "",
        searches="\n".join(_task(number, *item) for number, item in enumerate(by_task.items())),
        style=files.joinpath("page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )
    write_file(path, text.encode())


def _facts(facts: Sequence[Fact]) -> str:
    if not facts:
        return ""
    items = "".join(f"<div><dt>{shown(label)}</dt><dd>{shown(value)}</dd></div>" for label, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _filter(by_task: Mapping[str, Sequence[SearchShown]]) -> str:
    """Buttons that need the script, so it is the script that shows them."""
    if len(by_task) < 2:
        return ""
    count = sum(map(len, by_task.values()))
    buttons = [f'<button type="button" aria-pressed="true" data-task="">all <small>{count}</small></button>']
    buttons += [
        f'<button type="button" aria-pressed="false" data-task="task-{number}">'
        f"{task_shown(task)} <small>{len(searches)}</small></button>"
        for number, (task, searches) in enumerate(by_task.items())
    ]
    return (
        '<div class="filter" id="filter" role="group" aria-label="Show one task" hidden>'
        + "".join(buttons)
        + "</div>"
    )


def _intro(searches: Sequence[SearchShown]) -> str:
    count = f"{len(searches)} {'query' if len(searches) == 1 else 'queries'}, best hit first."
    known = any(hit.is_relevant is not None for search in searches for hit in search.hits)
    return f"{count} Right answers are marked." if known else count


def _legend() -> str:
    example = _codes("image", (0, 2817, 94, 1530), (0.0, -0.05, -0.4, -1.6))
    return f"""<div class="legend" aria-hidden="true">{example}
<p>An ID: the modality, then numbers from coarse to fine. Under each that the model wrote is its
log-probability; the more colour, the surer it was. A dot: not needed to find the item.</p></div>"""


def _task(number: int, task: str, searches: Sequence[SearchShown]) -> str:
    articles = "\n".join(map(_search, searches))
    return f"""<section class="task" id="task-{number}" aria-labelledby="task-{number}-title">
<h3 id="task-{number}-title"><span>{task_shown(task)}</span></h3>
{articles}
</section>"""


def _search(search: SearchShown) -> str:
    image = picture(search.query_image, "The image of the query") if search.query_image else ""
    title = shown(search.query_text) if search.query_text else "This image"
    hits = "\n".join(_hit(rank, hit) for rank, hit in enumerate(search.hits, start=1))
    found = f'<ol class="hits">\n{hits}\n</ol>' if hits else '<p class="nothing">Nothing was found.</p>'
    return f"""<article class="search"><div class="query"><p class="role">Query</p>
<h4>{title}</h4>{image}
<p class="instruction">{shown(search.instruction)}</p>
{_verdict(search.hits)}</div>
{found}</article>"""


def _verdict(hits: Sequence[HitShown]) -> str:
    if all(hit.is_relevant is None for hit in hits):
        return ""
    for rank, hit in enumerate(hits, start=1):
        if hit.is_relevant:
            return f'<p class="verdict found">✓ right answer at rank {rank}</p>'
    return f'<p class="verdict">No right answer in the first {len(hits)}</p>'


def _hit(rank: int, hit: HitShown) -> str:
    mark = '<span class="mark">✓ right</span>' if hit.is_relevant else ""
    image = picture(hit.image, hit.text or f"Item {hit.item_id}") if hit.image else ""
    text = f'<div class="body"><p>{shown(hit.text)}</p></div>' if hit.text else ""
    return f"""<li class="hit{" right" if hit.is_relevant else ""}">
<div class="bar"><span class="rank"><span class="unseen">rank </span>{rank}</span>{mark}\
<span class="score" title="score"><span class="unseen">score </span>{hit.score:.3f}</span></div>
{image}{text}<p class="item">{shown(hit.item_id)}</p>
{_codes(hit.modality, hit.codes, hit.log_probabilities)}</li>"""


def _codes(modality: str, codes: Sequence[int], log_probabilities: Sequence[float]) -> str:
    """The ID level by level, shaded by probability; codes that were not decoded have none."""
    if len(codes) < len(log_probabilities):
        raise BadData(
            f"{len(codes)} codes with {len(log_probabilities)} log-probabilities, expected at most one for "
            "each code"
        )
    if not codes:
        return ""
    items = []
    for level, (code, value) in enumerate(zip_longest(codes, log_probabilities)):
        name = shown(modality) if level == 0 else str(code)
        if value is None:
            tip = f"level {level}: code {code}, not decoded"
            items.append(f'<li title="{tip}" style="--p:0"><b>{name}</b><small>·</small></li>')
            continue
        probability = min(1.0, math.exp(value))
        # A log-probability so near 0 that it rounds to it is shown without its sign.
        number = f"{value:.2f}".replace("-", "−") if value <= -0.005 else "0"
        tip = f"level {level}: code {code}, log-probability {number}, probability {probability:.3f}"
        kind = ' class="modality"' if level == 0 else ""
        items.append(
            f'<li{kind} title="{tip}" style="--p:{probability:.3f}"><b>{name}</b><small>{number}</small></li>'
        )
    return f'<ol class="codes" aria-label="ID, level by level">{"".join(items)}</ol>'
