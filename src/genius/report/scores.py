"""The page's tables of scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from genius.evaluation.tables import FIRST, HEADLINE, ResultRow, averages, in_order
from genius.report.markup import shown, task_shown

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
