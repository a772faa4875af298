"""The papers' tables of recall: a line for each system, a column for each task; and R@1, R@5, R@10."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from genius.evaluation.published import CAPTION_RESULTS, COMPARABLE, RESULTS
from genius.evaluation.tables import ResultRow, published_beside
from genius.report.evaluated import Pool, System
from genius.report.table import Cell, Table

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
