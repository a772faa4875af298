"""The page of results: scores and searches with pictures, codes and log-probabilities, in one HTML file.

The file fetches nothing: pictures are data URIs, style and script are inside, and a content security
policy says so to the browser. All text is escaped; a URL in a caption is shown, never linked.
"""

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
from typing import NamedTuple

from genius.artifact import write_file
from genius.errors import BadData
from genius.evaluation.tables import ResultRow
from genius.report.markup import picture, shown, task_shown
from genius.report.scores import scores_section


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
    files = resources.files("genius.report")
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
