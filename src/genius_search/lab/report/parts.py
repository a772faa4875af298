"""Whether scores can be trusted: is 0.8 right 8 times of 10, and are sure answers right more often."""

from __future__ import annotations

import json
import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64, UInt8
from matplotlib.axes import Axes
from scipy import special, stats

from genius_search.calibrate import Told, calibration_error, reliability
from genius_search.errors import BadData
from genius_search.lab.published_numbers import CAPTION_RESULTS, COMPARABLE, RESULTS
from genius_search.lab.report.evaluated import Evaluated, Pool, System
from genius_search.lab.report.statistics import Pair, Tested, compared, shown_p
from genius_search.lab.report.table import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MARKERS,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILION,
    Cell,
    Drawing,
    Line,
    Table,
    best_points,
    blank,
    curves,
    quiet,
)
from genius_search.lab.report.table import COLOURS as AblationsCOLOURS
from genius_search.lab.report.table import COLOURS as ReliabilityCOLOURS
from genius_search.lab.results import ResultRow, published_beside
from genius_search.lab.runs import Qrels, Run
from genius_search.records import TASKS, Modality, parse_id

POOL: Final[Pool] = "global"
TITLES: Final = {
    "ablations": "Ablations",
    "decoder": "The decoder's size",
    "codes": "Codebooks: codes of a level × levels",
}
SHOWN: Final = (
    ("generative", "R@1"),
    ("generative", "R@5"),
    ("generative+raw", "R@5"),
    ("exact-codes", "R@1"),
    ("exact-codes", "R@5"),
    ("exact-fused", "R@5"),
)
TESTED: Final = ("generative", "R@5")
"""What differences are tested on: the paper's measure of the paper's search."""


def ablation_table(kind: str, whole: System | None, changed: Sequence[System]) -> Table | None:
    """The whole system, and each with one change; nothing where nothing was changed.

    Without the whole system, which failed or was not made, there is nothing to compare with.
    """
    changed = [system for system in changed if TESTED[0] in system.methods(POOL)]
    if not changed:
        return None
    method, measure = TESTED
    rows: list[tuple[System, Tested | None]] = [(system, None) for system in changed]
    if whole is not None:
        before = whole.per_query(POOL, method, measure)
        pairs = [
            Pair(system.title, whole.title, measure, (system.per_query(POOL, method, measure), before))
            for system in changed
        ]
        rows = [(whole, None), *zip(changed, compared(pairs), strict=True)]
    lines: list[tuple[Cell, ...]] = []
    for system, test in rows:
        difference = None if test is None else f"{100 * test.found.difference:+.1f}".replace("-", "−")
        lines.append(
            (
                system.title,
                len(system.seeds),
                *(system.average(POOL, *one) for one in SHOWN),
                difference,
                None if test is None else shown_p(test.p),
            )
        )
    return Table(
        name=kind,
        title=TITLES[kind],
        note="Mean over the tasks of the global pool, in percent, ± standard deviation of seeds. "
        + (
            "The row that these are changes of is not there, so nothing is compared."
            if whole is None
            else f"Difference: {measure} of {method} against the first line, in points; p of the paired "
            "randomisation test, corrected by Holm for the lines of this table; – where other queries were "
            "answered."
        ),
        headings=(
            "system",
            "seeds",
            *(f"{method} {measure}" for method, measure in SHOWN),
            "difference",
            "p",
        ),
        lines=lines,
    )


def beam_table(beams: Sequence[System]) -> Table | None:
    """Recall by the beam's width."""
    beams = _in_order(beams)
    methods = _by_beam(beams)
    if not methods:
        return None
    return Table(
        name="beam",
        title="The beam's width",
        note="Mean over all tasks of the global pool, in percent. Re-ranking compares the items under the "
        "beam's IDs, so its number of candidates grows with the beam.",
        headings=(
            "beam",
            *(f"{method} {measure}" for method in methods for measure in ("R@1", "R@5")),
            "touched",
        ),
        lines=[
            (
                str(system.seeds[0].beam),
                *(system.average(POOL, method, measure) for method in methods for measure in ("R@1", "R@5")),
                _touched(system, methods[-1]),
            )
            for system in beams
        ],
    )


def beam_figure(beams: Sequence[System]) -> Drawing | None:
    """The same drawn, the seeds' spread as bars."""
    beams = _in_order(beams)
    shown = [(method, measure) for method in _by_beam(beams) for measure in ("R@1", "R@5")]
    if len(beams) < 2 or not shown:
        return None
    figure = blank()
    axes = figure.add_subplot()
    widths = [system.seeds[0].beam for system in beams]
    for number, (method, measure) in enumerate(shown):
        found = [
            (width, estimate)
            for width, system in zip(widths, beams, strict=True)
            if (estimate := system.average(POOL, method, measure)) is not None
        ]
        axes.errorbar(
            [width for width, _ in found],
            [one.value for _, one in found],
            yerr=[one.sd or 0.0 for _, one in found],
            color=AblationsCOLOURS[number % len(AblationsCOLOURS)],
            marker=MARKERS[(number + number // len(AblationsCOLOURS)) % len(MARKERS)],
            capsize=3,
            label=f"{method}, {measure}",
        )
    axes.set_xscale("log")
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.minorticks_off()
    quiet(axes, x="beam: IDs kept at each level", y="mean over tasks, %")
    axes.legend(frameon=False, loc="best")
    return Drawing(
        name="beam",
        title="Recall and the beam's width",
        alt="R@1 and R@5 against the beam's width, with and without re-ranking",
        figure=figure,
    )


def _in_order(beams: Sequence[System]) -> list[System]:
    found = [system for system in beams if system.methods(POOL)]
    return sorted(found, key=lambda system: system.seeds[0].beam)


def _by_beam(beams: Sequence[System]) -> list[str]:
    """Methods that a beam decides, and that all of these were evaluated with."""
    return [
        method
        for method in (beams[0].methods(POOL) if beams else ())
        if method.startswith(("generative", "routing"))
        and all(method in system.methods(POOL) for system in beams)
    ]


def _touched(system: System, method: str) -> float:
    rows = [row for one in system.seeds for row in one.rows if (row.pool, row.method) == (POOL, method)]
    return sum(row.candidates_touched for row in rows) / len(rows)


CODES_SHOWN: Final = 8
"""Items of a code."""
GROUPS: Final = 3
"""Codes of a level."""
LEVELS: Final = 3
"""Semantic levels."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """One item as it is drawn."""

    image: UInt8[np.ndarray, "rows columns 3"] | None
    text: str


class Group(NamedTuple):
    """The items under one prefix."""

    level: int
    """Of the last code."""
    prefix: tuple[int, ...]
    size: int
    rows: Int64[np.ndarray, " items"]
    """Some of them, spread evenly."""


def groups_of(
    codes: Int[np.ndarray, "items levels"],
    has_picture: Bool[np.ndarray, " items"],
    *,
    first: int,
    seed: int = 0,
) -> list[Group]:
    """The fullest codes of each level; each level's under the fullest of the level before.

    Codes of a single item show nothing and are left out.

    Parameters
    ----------
    codes, has_picture
        of a pool's items. Behind the modality only items with a picture are shown, if there are any.
    first
        the first semantic level: 1 behind a modality code.
    """
    random = np.random.default_rng(seed)
    inside = np.arange(len(codes))
    prefix: tuple[int, ...] = ()
    found: list[Group] = []
    for level in range(min(first + LEVELS, codes.shape[1])):
        if level == first and has_picture[inside].any():
            inside = inside[has_picture[inside]]
        values, counts = np.unique(codes[inside, level], return_counts=True)
        order = np.argsort(-counts, kind="stable")[:GROUPS]
        order = order[counts[order] > 1]
        for place in order:
            members = inside[codes[inside, level] == values[place]]
            some = np.sort(random.choice(members, size=min(CODES_SHOWN, len(members)), replace=False))
            found.append(Group(level, (*prefix, int(values[place])), len(members), some))
        if not len(order):
            break
        onward = int(order[0])
        if level < first:  # the way leads on where the most pictures are
            onward = int(max(order, key=lambda place: has_picture[codes[:, level] == values[place]].sum()))
        prefix = (*prefix, int(values[onward]))
        inside = inside[codes[inside, level] == values[onward]]
    return found


def codes_figure(groups: Sequence[Group], items: Sequence[Sequence[Shown]], *, title: str) -> Drawing:
    """A row for each group, its items beside each other.

    Parameters
    ----------
    items
        of each group, as many as it has rows.
    """
    figure = blank(1.15 * (CODES_SHOWN + 2), 1.18 * len(groups) + 0.3)
    axes = figure.subplots(
        len(groups), CODES_SHOWN + 1, width_ratios=[1.9, *[1.0] * CODES_SHOWN], squeeze=False
    )
    for line, (group, shown) in enumerate(zip(groups, items, strict=True)):
        named = ".".join(map(str, group.prefix))
        count = f"{group.size:,} {'item' if group.size == 1 else 'items'}"
        _words(axes[line, 0], f"level {group.level}\n{named}\n{count}", size=9.0)
        for place in range(CODES_SHOWN):
            panel = axes[line, place + 1]
            if place >= len(shown):
                panel.axis("off")
            else:
                _draw(panel, shown[place])
    return Drawing(
        name="codes",
        title=title,
        alt="Rows of items that share their first codes; each level's rows are under the first row before",
        figure=figure,
    )


def codes_table(groups: Sequence[Group], items: Sequence[Sequence[Shown]]) -> Table:
    """The same in words."""
    lines: list[tuple[Cell, ...]] = [
        (
            str(group.level),
            ".".join(map(str, group.prefix)),
            "; ".join(textwrap.shorten(one.text, 60, placeholder=" …") for one in shown[:4]),
            group.size,
        )
        for group, shown in zip(groups, items, strict=True)
    ]
    return Table(
        name="codes-by-level",
        title="Codes by level",
        note="The fullest codes of each level, under the fullest code of the level before; level 0 is the "
        "modality where the model has such a code. Some of the items under each.",
        headings=("level", "codes", "some of the items", "items"),
        lines=lines,
        text_columns=3,
    )


def _draw(axes: Axes, shown: Shown) -> None:
    if shown.image is None:
        _words(axes, textwrap.fill(shown.text, 15, max_lines=5, placeholder=" …"), size=6.5)
        return
    axes.imshow(shown.image)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_color(PAPER)


def _words(axes: Axes, text: str, *, size: float) -> None:
    axes.axis("off")
    # Two dollars in a caption are prices, not a formula.
    axes.text(
        0.0, 0.5, text, fontsize=size, color=INK, ha="left", va="center", transform=axes.transAxes,
        parse_math=False,
    )  # fmt: skip


PUBLISHED_BYTES: Final = (("GENIUS, published (supplement, table 2)", "generative", 12.25),
                          ("CLIP, published (supplement, table 2)", "exact-raw", 3072.0))  # fmt: skip

LATENCIES: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""CPU-milliseconds that a query may take."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark's ``results.json``."""

    kind: str
    """``scale`` or ``quality``."""
    rows: Sequence[Mapping[str, Any]]
    machine: str
    command: str


def read_benchmark(folder: Path) -> Benchmark | None:
    """What a benchmark left in a folder; nothing where it is another than these two.

    Raises
    ------
    BadData
        the file cannot be read.
    """
    path = folder / "results.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kinds = {"scale": ("builds", "queries"), "quality": ("methods", "leaves")}
        for kind, names in kinds.items():
            if all(isinstance(found.get(name), list) for name in names):
                rows = found["queries"] if kind == "scale" else found.get("curves") or found["methods"]
                return Benchmark(kind=kind, rows=rows, machine=rows[0]["machine"], command=rows[0]["command"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadData(f"{path} is not what `genius bench` writes: {error!r}") from None
    return None


def storage_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """Bytes of an item, for each way of searching."""
    lines: list[tuple[Cell, ...]] = []
    for system in systems:
        for method in system.methods(pool):
            rows = [
                row for one in system.seeds for row in one.rows if (row.pool, row.method) == (pool, method)
            ]
            size = sum(row.bytes_per_item for row in rows) / len(rows)
            touched = sum(row.candidates_touched / row.pool_size for row in rows) / len(rows)
            lines.append((system.title, method, size, 100 * touched))
    if not lines:
        return None
    lines += [(title, method, size, None) for title, method, size in PUBLISHED_BYTES]
    return Table(
        name="storage",
        title="Storage",
        note=f"Bytes kept of an item in the {pool} pool (codes and where each ID's items begin; their "
        "numbers, eight bytes each, are apart; vectors in 16 bits), and candidates scored for a query, in "
        "percent of the pool. The published count the bits of an ID, and a vector of 768 numbers in 32 bits.",
        headings=("system", "method", "bytes an item", "touched, %"),
        lines=lines,
        decimals=2,
        text_columns=2,
    )


def speed_table(benchmark: Benchmark) -> Table:
    """Queries per second as the pool grows: the paper's figure 4 as numbers."""
    rows = sorted(benchmark.rows, key=lambda row: (row["method"], row["batch"], row["items"]))
    return Table(
        name="speed",
        title="Queries per second against the size of the pool",
        note="Queries a second of CPU time on one core, asked one by one (batch 1) or together. Weights are "
        "drawn and pools invented: this is speed, not recall; the encoder is not in it. Calculated: in "
        f"proportion to the largest pool that was measured. {benchmark.machine}; `{benchmark.command}`",
        headings=("method", "batch", "items", "queries a second", "bytes an item", "calculated"),
        lines=[
            (
                row["method"],
                row["batch"],
                row["items"],
                1000.0 / row["cpu_ms"],
                row["bytes_per_item"],
                "yes" if row["calculated"] else "no",
            )
            for row in rows
        ],
        decimals=2,
    )


def speed_figure(benchmark: Benchmark) -> Drawing:
    """The same drawn, one query at a time."""
    single = [row for row in benchmark.rows if row["batch"] == 1]

    def points(method: str, *, calculated: bool) -> tuple[tuple[float, float], ...]:
        return tuple(
            (float(row["items"]), 1000.0 / row["cpu_ms"])
            for row in single
            if row["method"] == method and bool(row["calculated"]) is calculated
        )

    methods = list(dict.fromkeys(str(row["method"]) for row in single))
    lines = [
        Line(method, points(method, calculated=False), points(method, calculated=True)) for method in methods
    ]
    return Drawing(
        name="speed",
        title="Queries per second against the size of the pool",
        alt=f"Queries per second of {', '.join(methods)} against pool size on logarithmic axes",
        figure=curves(lines, x="items in the pool", y="queries a second, one at a time, one core"),
    )


def quality_table(benchmark: Benchmark) -> Table:
    """Of each kind of search the settings that nothing cheaper of it reaches."""
    lines: list[tuple[Cell, ...]] = []
    for task, line in _kinds(benchmark):
        own = [row for row in benchmark.rows if (row["task"], row["line"]) == (task, line)]
        best = set(best_points([(_milliseconds(row), row["recall_5"]) for row in own]))
        lines += [
            (task, row["method"], 100 * row["recall_1"], 100 * row["recall_5"], row["code_bytes"],
             row["stored_bytes"], 100 * row["touched_share"], _milliseconds(row))
            for row in sorted(own, key=_milliseconds)
            if (_milliseconds(row), row["recall_5"]) in best
        ]  # fmt: skip
    return Table(
        name="quality",
        title="Recall against cost",
        note="Of each kind of search, settings whose R@5 no cheaper one of it reaches. CPU-milliseconds of "
        f"a query among 64, one core, without the encoder. {benchmark.machine}; `{benchmark.command}`",
        headings=("task", "method", "R@1", "R@5", "bytes of the ID", "bytes stored", "touched, %", "CPU-ms"),
        lines=lines,
        decimals=2,
        text_columns=2,
    )


def latency_table(benchmark: Benchmark) -> Table | None:
    """Of each kind of search the best R@5 that so much time buys, side by side."""
    kinds = list(dict.fromkeys(line for _, line in _kinds(benchmark) if line))
    if not kinds:
        return None
    tasks = dict.fromkeys(task for task, _ in _kinds(benchmark))
    found = [
        (
            task,
            limit,
            *(
                max((100 * row["recall_5"] for row in benchmark.rows
                     if (row["task"], row["line"]) == (task, kind) and _milliseconds(row) <= limit),
                    default=None)
                for kind in kinds
            ),
        )
        for task in tasks
        for limit in LATENCIES
    ]  # fmt: skip
    return Table(
        name="latency",
        title="Recall at equal time",
        note="The best R@5, in percent, of the settings that take at most so many CPU-milliseconds a query "
        "(among 64, one core, without the encoder); nothing where none does. "
        f"{benchmark.machine}; `{benchmark.command}`",
        headings=("task", "CPU-ms", *kinds),
        lines=[line for line in found if any(cell is not None for cell in line[2:])],
        decimals=2,
        text_columns=1,
    )


def quality_figure(benchmark: Benchmark) -> Drawing:
    """The same drawn, the mean of the tasks where there is one."""
    tasks = list(dict.fromkeys(str(row["task"]) for row in benchmark.rows))
    task = "mean" if "mean" in tasks else tasks[0]
    points = {
        line: [
            (_milliseconds(row), 100 * row["recall_5"])
            for row in benchmark.rows
            if (row["task"], row["line"]) == (task, line)
        ]
        for _, line in _kinds(benchmark)
        if line
    }
    lines = [Line(line, best_points(found), ()) for line, found in points.items() if found]
    return Drawing(
        name="quality",
        title=f"Recall against cost ({task})",
        alt=f"R@5 of {', '.join(line.name for line in lines)} against CPU-milliseconds of a query",
        figure=curves(lines, x="CPU-milliseconds of a query among 64", y="R@5, %", log_y=False),
    )


def _kinds(benchmark: Benchmark) -> list[tuple[str, str]]:
    """Tasks and kinds of search, as drawings name them; a mean over tasks stands for the tasks."""
    found = list(dict.fromkeys((str(row["task"]), str(row["line"])) for row in benchmark.rows))
    means = [one for one in found if one[0] == "mean"]
    return means or found


def _milliseconds(row: Mapping[str, Any]) -> float:
    return float(row["route_ms"] + row["rank_ms"])


COLOURS: Final = (BLUE, VERMILION, GREEN)
"""Of images, texts, and both."""


class Cloud(NamedTuple):
    """The vectors of one model's IDs."""

    title: str
    vectors: Float[np.ndarray, "items dim"]
    modalities: Int[np.ndarray, " items"]


class Projection(NamedTuple):
    """Vectors in two dimensions."""

    places: Float64[np.ndarray, "items 2"]
    kept: float
    """Share of the variance that the two dimensions hold."""
    distinct: int
    """Different vectors."""


def principal(vectors: Float[np.ndarray, "items dim"]) -> Projection:
    """The two directions of most variance."""
    distinct = len(np.unique(np.round(vectors, 6), axis=0))
    centred = vectors.astype(np.float64) - vectors.mean(axis=0)
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    total = float(np.sum(sizes**2))
    kept = float(np.sum(sizes[:2] ** 2)) / total if total > 0 else 0.0
    places: Float64[np.ndarray, "items 2"] = left[:, :2] * sizes[:2]
    return Projection(places, kept, distinct)


def clouds_figure(clouds: Sequence[Cloud]) -> Drawing:
    """A panel for each model; each has axes of its own, since nothing makes their lengths comparable."""
    figure = blank(4.6 * len(clouds), 4.6)
    panels = figure.subplots(1, len(clouds), squeeze=False)[0]
    for axes, cloud in zip(panels, clouds, strict=True):
        found = principal(cloud.vectors)
        for modality in Modality:
            own = cloud.modalities == modality.code
            if own.any():
                axes.scatter(
                    found.places[own, 0],
                    found.places[own, 1],
                    s=7,
                    alpha=0.55,
                    linewidths=0,
                    color=COLOURS[modality.code],
                    label=modality.value,
                )
        axes.set_title(cloud.title, loc="left", fontsize=11)
        axes.set_xlabel(
            f"{found.distinct:,} different IDs of {len(cloud.vectors):,} items;\n"
            f"{found.kept:.0%} of the variance is shown",
            color=INK,
        )
        axes.set_xticks([])
        axes.set_yticks([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, markerscale=2.5)
    return Drawing(
        name="embeddings",
        title="Vectors of the IDs, by modality (principal components)",
        alt=f"Scatter of ID vectors for {', '.join(cloud.title for cloud in clouds)}, coloured by modality",
        figure=figure,
    )


KINDS: Final = {
    "right": BLUE,
    "wrong modality": VERMILION,
    "wrong data set": PURPLE,
    "right item further down": SKY,
    "another item": ORANGE,
    "nothing found": GREY,
}
"""What the first hit of a query can be, in the order in which it is asked, with its colour."""


class Misses(NamedTuple):
    """One system: what its first hits are, in shares of all queries, every task counting the same."""

    label: str
    shares: Mapping[str, float]


def misses_of(
    system: System, pool: Pool, method: str, modalities: Mapping[str, int], *, label: str
) -> Misses:
    """The mean over seeds and tasks.

    Parameters
    ----------
    modalities
        candidate id -> code of its modality.
    """
    tasks = system.tasks(pool)
    counted = [_shares(one, pool, method, task.name, task.task_id, modalities)
               for one in system.seeds for task in tasks]  # fmt: skip
    return Misses(label, {kind: sum(one[kind] for one in counted) / len(counted) for kind in KINDS})


def misses_table(found: Sequence[Misses]) -> Table:
    """A line for each system."""
    lines: list[tuple[Cell, ...]] = [
        (one.label, *(100 * one.shares[kind] for kind in KINDS)) for one in found
    ]
    return Table(
        name="misses",
        title="What stands at rank 1",
        note="Global pool; share of queries in percent, every task counting the same. A wrong first hit is "
        "counted once: of another modality than the one that is asked for; else of another data set than "
        "every right answer; else with a right answer among the other hits that were kept (50); else another "
        "item.",
        headings=("system", *KINDS),
        lines=lines,
        decimals=1,
    )


def misses_figure(found: Sequence[Misses]) -> Drawing:
    """The same as bars."""
    kinds = [kind for kind in KINDS if any(one.shares[kind] > 0 for one in found)]
    figure = blank(9.0, 1.6 + 0.36 * len(found))
    axes = figure.add_subplot()
    left = [0.0] * len(found)
    places = range(len(found))
    for kind in kinds:
        widths = [100 * one.shares[kind] for one in found]
        axes.barh(places, widths, left=left, color=KINDS[kind], edgecolor="white", height=0.72, label=kind)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [one.label for one in found])
    axes.set_ylim(len(found) - 0.5, -0.5)  # the first on top, no room above or below
    axes.set_xlim(0, 100)
    quiet(axes, x="queries, %", y="")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return Drawing(
        name="misses",
        title="What stands at rank 1",
        alt=f"Shares of {', '.join(kinds)} among the first hits of {len(found)} systems",
        figure=figure,
    )


def kind_of(run: Run, qrels: Qrels, qid: str, *, wanted: int, modalities: Mapping[str, int]) -> str:
    """What one query's first hit is."""
    ranking = run.hits.get(qid, ())
    if not ranking:
        return "nothing found"
    right = {did for did, relevance in qrels[qid].items() if relevance > 0}
    first = ranking[0].did
    if first in right:
        return "right"
    if modalities[first] != wanted:
        return "wrong modality"
    if parse_id(first)[0] not in {parse_id(did)[0] for did in right}:
        return "wrong data set"
    return "right item further down" if any(hit.did in right for hit in ranking) else "another item"


def _shares(
    one: Evaluated, pool: Pool, method: str, task: str, task_id: int, modalities: Mapping[str, int]
) -> dict[str, float]:
    qrels, run = one.qrels(pool, task), one.run(pool, method, task)
    wanted = TASKS[task_id][1].code
    counts = Counter(kind_of(run, qrels, qid, wanted=wanted, modalities=modalities) for qid in qrels)
    return {kind: counts[kind] / len(qrels) for kind in KINDS}


SETTINGS: Final[dict[Pool, str]] = {
    "local": "Task-specific retrieval: every task in its own pool",
    "global": "Universal retrieval: every task in the union of all pools",
}
TEXT_TO_IMAGE: Final = 0
MEASURES: Final = ("R@1", "R@5", "R@10")


def task_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """All systems and methods of one pool; nothing where none was evaluated in it."""
    systems = [system for system in systems if system.methods(pool)]
    if not systems:
        return None
    tasks = systems[0].tasks(pool)
    apart = _asked_otherwise(systems, pool)
    headings = [f"{task.task} {task.headline}" for task in tasks]
    if len({task.dataset for task in tasks}) > 1:
        headings = [f"{task.dataset} {heading}" for task, heading in zip(tasks, headings, strict=True)]
    lines = [
        (
            system.title,
            method,
            *(system.estimate(pool, method, task.name) for task in tasks),
            average := (system.average(pool, method, with_interval=True) if system not in apart else None),
            None if average is None else f"{average.low:.1f} to {average.high:.1f}",
        )
        for system in systems
        for method in system.methods(pool)
    ]
    published = list(_published(tasks))
    sizes = sorted({task.pool_size for task in tasks})
    candidates = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    beside = (
        "Published numbers stand below ours."
        if published
        else "No published numbers: they were measured on other data."
    )
    return Table(
        name=f"recall-{pool}",
        title=SETTINGS[pool],
        note=f"Share of queries with a right answer among the first hits, percent; {candidates} candidates, "
        f"{sum(task.queries for task in tasks):,} queries. "
        f"{_seeds(systems)}. The interval is a bootstrap over queries (95 %). {beside}{_warning(apart)}",
        headings=("system", "method", *headings, "average", "95 % interval"),
        lines=[*lines, *published],
        text_columns=2,
    )


def first_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """R@1, R@5 and R@10: means over all tasks, then text to image; every task where there is no such task."""
    systems = [system for system in systems if system.methods(pool)]
    if not systems:
        return None
    every = systems[0].tasks(pool)
    apart = _asked_otherwise(systems, pool)
    tasks = [task for task in every if task.task_id == TEXT_TO_IMAGE] or every
    lines: list[tuple[Cell, ...]] = []
    if len(every) > 1:
        lines += [
            (
                f"mean of {len(every)} tasks",
                system.title,
                method,
                *(system.average(pool, method, measure) for measure in MEASURES),
            )
            for system in systems
            if system not in apart
            for method in system.methods(pool)
        ]
    lines += [
        (
            f"{task.dataset}, {task.task}",
            system.title,
            method,
            *(system.estimate(pool, method, task.name, measure) for measure in MEASURES),
        )
        for task in tasks
        for system in systems
        for method in system.methods(pool)
    ]
    lines += [
        (f"{one.dataset}, published", one.system, f"trained on {one.trained_on} ({one.source})", *one.recalls)
        for one in CAPTION_RESULTS
        if any((one.dataset, TEXT_TO_IMAGE) == (task.dataset, task.task_id) for task in tasks)
    ]
    return Table(
        name=f"first-hits-{pool}",
        title=f"The first 1, 5 and 10 hits, {pool} pool",
        note=f"In percent. {_seeds(systems)}. Published numbers stand here for Flickr30K and COCO only."
        + _warning(apart),
        headings=("task", "system", "method", *MEASURES),
        lines=lines,
        text_columns=3,
    )


def kept_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """How much of its own encoder's recall each way of searching keeps: the one figure that data share."""
    lines: list[tuple[Cell, ...]] = []
    for system in systems:
        exact = system.average(pool, "exact-raw")
        for method in system.methods(pool):
            found = system.average(pool, method)
            if exact is not None and found is not None and exact.value > 0 and method != "exact-raw":
                lines.append((system.title, method, found, exact, 100 * found.value / exact.value))
    if not lines:
        return None
    theirs = {method: _paper_average(name, pool) for method, name in COMPARABLE.items()}
    lines += [
        (
            f"{COMPARABLE[method]} on M-BEIR, published",
            method,
            theirs[method],
            theirs["exact-raw"],
            100 * theirs[method] / theirs["exact-raw"],
        )
        for method in theirs
        if method != "exact-raw"
    ]
    return Table(
        name=f"kept-{pool}",
        title=f"What is kept of the encoder's own recall, {pool} pool",
        note="Average over tasks in percent, that of exact search over the encoder's summed features "
        "(CLIP-SF's way), and their ratio in percent.",
        headings=("system", "method", "average", "exact-raw", "kept"),
        lines=lines,
        text_columns=2,
    )


def _paper_average(system: str, pool: Pool) -> float:
    return next(
        one.average for one in RESULTS if (one.system, one.pool, one.weights) == (system, pool, "paper")
    )


def _published(tasks: Sequence[ResultRow]) -> Iterator[tuple[Cell, ...]]:
    """Lines of published numbers, where every task has as many queries and candidates as theirs."""
    for method, system in COMPARABLE.items():
        for weights in ("released", "paper"):
            found = [
                next((one for one in published_beside(row) if one.weights == weights), None)
                for row in (_with(task, method) for task in tasks)
            ]
            values = [one.value for one in found if one is not None]
            if values and len(values) == len(tasks):
                average = sum(values) / len(values)
                yield (f"{system}, published ({weights})", method, *values, average, None)


def _with(task: ResultRow, method: str) -> ResultRow:
    return replace(task, method=method)


def _asked_otherwise(systems: Sequence[System], pool: Pool) -> list[System]:
    """Those that answered other queries than the first: their averages are not of the same tasks."""
    return [system for system in systems if system.questions(pool) != systems[0].questions(pool)]


def _warning(apart: Sequence[System]) -> str:
    if not apart:
        return ""
    titles = ", ".join(system.title for system in apart)
    return f" Evaluated on other tasks or queries than the first, so not to be compared with it: {titles}."


def _seeds(systems: Sequence[System]) -> str:
    counts = sorted({len(system.seeds) for system in systems})
    if counts == [1]:
        return "One seed, so that nothing is known of the spread"
    return f"Mean ± standard deviation over {' or '.join(map(str, counts))} seeds"


FEW: Final = 20
"""A bin with fewer queries is drawn without a claim: hollow."""
PROBABILITIES: Final = ("generative",)
"""Methods whose scores are sums of log-probabilities, if they were normalised over a level."""


class Answers(NamedTuple):
    """The first hits of one system: how sure it was, and whether they are right."""

    label: str
    method: str
    scores: Float64[np.ndarray, " queries"]
    right: Bool[np.ndarray, " queries"]
    promised: Float64[np.ndarray, " queries"] | None
    """Probability of the first hit among the hits that were kept, where scores are log-probabilities."""

    @property
    def sureness(self) -> Float64[np.ndarray, " queries"]:
        """What says how sure an answer is: the promise, or else the score."""
        return self.scores if self.promised is None else self.promised


def answers_of(system: System, pool: Pool, method: str, *, label: str) -> Answers:
    """Of all seeds and tasks together; queries without any hit are left out."""
    scores, right, promised = [], [], []
    for one in system.seeds:
        for task in system.tasks(pool):
            qrels = one.qrels(pool, task.name)
            for qid, ranking in one.run(pool, method, task.name).hits.items():
                if ranking:
                    scores.append(ranking[0].score)
                    right.append(qrels[qid].get(ranking[0].did, 0) > 0)
                    promised.append(first_among([hit.score for hit in ranking]))
    return Answers(
        label,
        method,
        np.array(scores, dtype=np.float64),
        np.array(right, dtype=bool),
        np.array(promised, dtype=np.float64) if method in PROBABILITIES else None,
    )


def first_among(scores: Sequence[float]) -> float:
    """The first of some log-probabilities as a share of all of them.

    A sum over levels by itself is next to nothing: most IDs that could be written do not exist.
    """
    return math.exp(scores[0] - float(special.logsumexp(scores)))


def reliability_table(found: Sequence[Answers]) -> Table:
    """Figures of each."""
    lines: list[tuple[Cell, ...]] = []
    for one in found:
        promised = one.promised
        lines.append(
            (
                one.label,
                one.method,
                100 * float(one.right.mean()),
                None if promised is None else 100 * float(promised.mean()),
                None
                if promised is None
                else 100 * calibration_error(reliability(_told(promised, one.right))),
                None if (area := separation(one.sureness, one.right)) is None else 100 * area,
                100 * accuracy_of_surest(one, 0.5),
            )
        )
    return Table(
        name="reliability",
        title="Reliability of scores",
        note="Of first hits, in percent. Promised: the mean probability of the first hit among those that "
        "were kept (50). Calibration error: "
        "mean distance between promise and share of right answers, by tenths of the promise. "
        "Separation: how often a right first hit has a higher promise (or score) than a wrong one (the area "
        "under the ROC curve; 50 is chance). Only sums of log-probabilities promise anything.",
        headings=("system", "method", "right", "promised", "calibration error", "separation",
                  "right among the surest half"),
        lines=lines,
        text_columns=2,
    )  # fmt: skip


def reliability_figure(found: Sequence[Answers]) -> Drawing:
    """Promise against truth, and how many answers are right among the surest."""
    figure = blank(10.0, 4.4)
    left, right = figure.subplots(1, 2)
    left.plot([0, 100], [0, 100], color=GREY, linestyle="--", linewidth=1)
    for number, one in enumerate(found):
        promised = one.promised
        if promised is not None:
            _draw_promises(left, promised, one.right, ReliabilityCOLOURS[number], one.label)
        order = np.argsort(-one.sureness, kind="stable")
        kept = np.arange(1, len(order) + 1)
        share = np.cumsum(one.right[order]) / kept
        begin = max(1, len(order) // 20)  # the first few are noise
        right.plot(
            100 * kept[begin:] / len(order),
            100 * share[begin:],
            color=ReliabilityCOLOURS[number],
            label=f"{one.label}, {one.method}",
        )
    quiet(left, x="promised probability, %", y="right first hits, %")
    left.set_title("What is promised", loc="left", fontsize=11)
    quiet(right, x="queries answered, the surest first, %", y="right first hits, %")
    right.set_title("Answering only when sure", loc="left", fontsize=11)
    right.legend(frameon=False, loc="lower left", fontsize=9)
    left.legend(frameon=False, loc="upper left", fontsize=9)
    return Drawing(
        name="reliability",
        title="Reliability of scores",
        alt="Share of right first hits against the promised probability, and against the share of queries "
        "that are answered",
        figure=figure,
    )


def separation(scores: Float64[np.ndarray, " queries"], right: Bool[np.ndarray, " queries"]) -> float | None:
    """Mann and Whitney's statistic (scipy's) as a share of the pairs; nothing without both kinds."""
    if right.all() or not right.any():
        return None
    statistic = stats.mannwhitneyu(scores[right], scores[~right]).statistic
    return float(statistic) / (int(right.sum()) * int((~right).sum()))


def accuracy_of_surest(answers: Answers, share: float) -> float:
    """Right answers among the surest so many."""
    order = np.argsort(-answers.sureness, kind="stable")
    return float(answers.right[order[: max(1, round(share * len(order)))]].mean())


def _told(promised: Float64[np.ndarray, " queries"], right: Bool[np.ndarray, " queries"]) -> Told:
    return Told(promised, right, np.ones(len(promised)))


def _draw_promises(
    axes: Axes,
    promised: Float64[np.ndarray, " queries"],
    right: Bool[np.ndarray, " queries"],
    colour: str,
    label: str,
) -> None:
    """A point for each bin, with the interval of its share (Wilson's, 95 %)."""
    x, y, sizes = map(np.array, zip(*reliability(_told(promised, right)), strict=True))
    bounds = [
        stats.binomtest(round(share * size), round(size)).proportion_ci(method="wilson")
        for share, size in zip(y, sizes, strict=True)
    ]
    errors = np.abs([[bound.low, bound.high] for bound in bounds] - y[:, None]).T
    axes.errorbar(100 * x, 100 * y, yerr=100 * errors, color=colour, marker="o", capsize=2, label=label)
    few = sizes < FEW
    axes.plot(
        100 * x[few],
        100 * y[few],
        color=colour,
        marker="o",
        markerfacecolor="white",
        linestyle="none",
        zorder=5,
    )
