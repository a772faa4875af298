"""The tables of a report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import mean
from typing import Final

import pandas as pd

from genius_search.lab.published.numbers import CAPTION_RESULTS, COMPARABLE, RESULTS
from genius_search.lab.report.analysis import FirstHits, Group, Item, accuracy_of_surest, separation
from genius_search.lab.report.evaluated import HEADLINE, Benchmark, System
from genius_search.lab.report.reliability import calibration_error, reliability
from genius_search.lab.report.statistics import Comparison, Pair, compare_all, mean_of_tasks
from genius_search.lab.results import ResultRow, published_beside
from genius_search.lab.settings import Pool
from genius_search.lab.sweep import MadeRow
from genius_search.lab.table import Cell, Table, find_best, pareto_front

SETTINGS: Final[dict[Pool, str]] = {
    "local": "Task-specific retrieval: every task in its own pool",
    "global": "Universal retrieval: every task in the union of all pools",
}
TEXT_TO_IMAGE: Final = 0
FIRST_HITS: Final = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")
SIGNIFICANT: Final = 0.05
"""Largest p, corrected for the number of comparisons, of a difference that counts."""
ABLATIONS: Final = {
    "ablations": "Ablations",
    "decoder": "The decoder's size",
    "codes": "Codebooks: codes of a level × levels",
}
ABLATION_COLUMNS: Final = (
    ("generative", "R@1"),
    ("generative", "R@5"),
    ("generative+raw", "R@5"),
    ("exact-codes", "R@1"),
    ("exact-codes", "R@5"),
    ("exact-fused", "R@5"),
)
TESTED: Final = ("generative", "R@5")
"""Ablations are tested on the paper's measure of the paper's search."""
PUBLISHED_BYTES: Final = (
    ("GENIUS, published (supplement, table 2)", "generative", 12.25),
    ("CLIP, published (supplement, table 2)", "exact-raw", 3072.0),
)
LATENCIES: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
"""CPU-milliseconds that a query may take."""


def task_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """Return recall by task for all systems and methods of one pool; None where none was evaluated in it."""
    systems = [system for system in systems if system.methods(pool)]
    if not systems:
        return None
    tasks = systems[0].tasks(pool)
    incomparable = _on_other_queries(systems, pool)
    several = len({task.dataset for task in tasks}) > 1
    headings = [f"{f'{task.dataset} ' if several else ''}{task.task} {task.headline}" for task in tasks]
    measured = list(_methods(systems, pool))
    lines: list[tuple[Cell, ...]] = []
    for system, method in measured:
        estimates = [system.estimate(pool, method, task.name) for task in tasks]
        average = None if system in incomparable else system.average(pool, method, with_interval=True)
        bounds = None if average is None else f"{average.low:.1f} to {average.high:.1f}"
        lines.append((system.title, method, *estimates, *([average] if len(tasks) > 1 else []), bounds))
    bold = find_best(lines, range(2, 2 + len(tasks)))
    compared = [(row, *one) for row, one in enumerate(measured) if one[0] not in incomparable]
    bold |= (
        {(row, len(headings) + 2) for row in _not_worse_than_best(compared, pool)}
        if len(tasks) > 1
        else set()
    )
    published = list(_published_lines(tasks))
    beside = "Published numbers stand below ours."
    if not published:
        beside = "No published numbers: they were measured on other data."
    sizes = sorted({task.pool_size for task in tasks})
    candidates = f"{sizes[0]:,}" + (f" to {sizes[-1]:,}" if len(sizes) > 1 else "")
    return Table(
        name=f"recall-{pool}",
        title=SETTINGS[pool],
        note=f"Share of queries with a right answer among the first hits, percent; {candidates} candidates, "
        f"{sum(task.queries for task in tasks):,} queries. {_seeds_note(systems)}. The interval is a "
        "bootstrap over queries (95 %). Bold: the best of a task; of the averages, the best and all that are "
        "not significantly below it (paired randomisation over queries, Holm, p < 0.05). "
        f"{beside}{_incomparable_note(incomparable)}",
        headings=("system", "method", *headings, *(["average"] if len(tasks) > 1 else []), "95 % interval"),
        lines=[*lines, *published],
        text_columns=2,
        bold=bold,
    )


def _not_worse_than_best(lines: Sequence[tuple[int, System, str]], pool: Pool) -> set[int]:
    """Return the numbers of the line with the best average and of those not significantly below it."""
    values = {row: system.per_query(pool, method) for row, system, method in lines}
    if not values:
        return set()
    best = max(values, key=lambda row: mean_of_tasks(values[row]))
    pairs = [Pair("", "", HEADLINE, (own, values[best])) for own in values.values()]
    tests = zip(values, compare_all(pairs), strict=True)
    return {row for row, test in tests if test is not None and test.p >= SIGNIFICANT}


def first_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """Return R@1, R@5 and R@10: means over tasks, then text to image, or all tasks where it is missing."""
    systems = [system for system in systems if system.methods(pool)]
    if not systems:
        return None
    all_tasks = systems[0].tasks(pool)
    incomparable = _on_other_queries(systems, pool)
    tasks = [task for task in all_tasks if task.task_id == TEXT_TO_IMAGE] or all_tasks
    lines: list[tuple[Cell, ...]] = []
    bold: set[tuple[int, int]] = set()

    parts = [(f"{task.dataset}, {task.task}", systems, task.name) for task in tasks]
    if len(all_tasks) > 1:
        comparable = [system for system in systems if system not in incomparable]
        parts.insert(0, (f"mean of {len(all_tasks)} tasks", comparable, ""))
    for name, some, task in parts:
        group: list[tuple[Cell, ...]] = []
        for system, method in _methods(some, pool):
            estimates = (
                system.estimate(pool, method, task, one) if task else system.average(pool, method, one)
                for one in FIRST_HITS
            )
            group.append((name, system.title, method, *estimates))
        best = find_best(group, range(3, 3 + len(FIRST_HITS)))
        bold |= {(len(lines) + row, column) for row, column in best}
        lines += group
    lines += [
        (
            f"{one.dataset}, published",
            one.system,
            f"trained on {one.trained_on} ({one.source})",
            *one.recalls,
            None,
            None,
        )
        for one in CAPTION_RESULTS
        if any((one.dataset, TEXT_TO_IMAGE) == (task.dataset, task.task_id) for task in tasks)
    ]
    return Table(
        name=f"first-hits-{pool}",
        title=f"The first hits, {pool} pool",
        note=f"In percent; bold: the best. {_seeds_note(systems)}. Published numbers are shown for Flickr30K "
        "and COCO only." + _incomparable_note(incomparable),
        headings=("task", "system", "method", *FIRST_HITS),
        lines=lines,
        text_columns=3,
        bold=frozenset(bold),
    )


def kept_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """Return how much of its own encoder's recall each method keeps: the one figure that data sets share."""
    lines: list[tuple[Cell, ...]] = []
    for system, method in _methods(systems, pool):
        exact, found = system.average(pool, "exact-raw"), system.average(pool, method)
        if exact is not None and found is not None and exact.value > 0 and method != "exact-raw":
            lines.append((system.title, method, found, exact, 100 * found.value / exact.value))
    if not lines:
        return None
    averages = {one.system: one.average for one in RESULTS if (one.pool, one.weights) == (pool, "paper")}
    published_exact = averages[COMPARABLE["exact-raw"]]
    for method, name in COMPARABLE.items():
        if method != "exact-raw":
            kept = 100 * averages[name] / published_exact
            lines.append((f"{name} on M-BEIR, published", method, averages[name], published_exact, kept))
    return Table(
        name=f"kept-{pool}",
        title=f"What is kept of the encoder's own recall, {pool} pool",
        note="Average over tasks in percent, that of exact search over the encoder's summed features "
        "(CLIP-SF's way), and their ratio in percent.",
        headings=("system", "method", "average", "exact-raw", "kept"),
        lines=lines,
        text_columns=2,
    )


def significance_table(
    pairs: Sequence[Pair], *, name: str, title: str, advance: Callable[[int], None] | None = None
) -> Table | None:
    """Return a line for each pair that answered the same queries; None without any pair."""
    if not pairs:
        return None
    tested = list(zip(pairs, compare_all(pairs, advance), strict=True))
    untested = sorted({f"{pair.first} against {pair.second}" for pair, found in tested if found is None})
    note = (
        "Difference in points; queries that the first answers better and worse (the mean over seeds); "
        "p of the paired randomisation test over queries, two-sided, corrected by Holm for all lines of this "
        "table. It says nothing of other seeds: their spread stands beside the means."
    )
    if untested:
        note += f" Not tested, since they answered different queries: {'; '.join(untested)}."
    lines = [
        (*pair[:3], _format_points(found.difference), found.better, found.worse, _format_p(found.p),
         "yes" if found.p < SIGNIFICANT else "no")
        for pair, found in tested
        if found is not None
    ]  # fmt: skip
    headings = ("system", "against", "measure", "difference", "better", "worse", "p", "below 0.05")
    return Table(name=name, title=title, note=note, headings=headings, lines=lines, text_columns=3)


def ablation_table(kind: str, base: System | None, changed: Sequence[System]) -> Table | None:
    """Return the base system and each one with a single change; None where nothing was changed.

    Without the base, which failed or was not made, there is nothing to compare with.
    """
    method, measure = TESTED
    changed = [system for system in changed if method in system.methods("global")]
    if not changed:
        return None
    rows: list[tuple[System, Comparison | None]] = [(system, None) for system in changed]
    note = "The row that these are changes of is missing, so nothing is compared."
    if base is not None:
        before = base.per_query("global", method, measure)
        pairs = [
            Pair(system.title, base.title, measure, (system.per_query("global", method, measure), before))
            for system in changed
        ]
        rows = [(base, None), *zip(changed, compare_all(pairs), strict=True)]
        note = (
            f"Difference: {measure} of {method} against the first line, in points; p of the paired "
            "randomisation test, corrected by Holm for the lines of this table; – where other queries were "
            "answered."
        )
    lines: list[tuple[Cell, ...]] = []
    for system, test in rows:
        averages = [system.average("global", *column) for column in ABLATION_COLUMNS]
        tested = (None, None) if test is None else (_format_points(test.difference), _format_p(test.p))
        lines.append((system.title, len(system.seeds), *averages, *tested))
    return Table(
        name=kind,
        title=ABLATIONS[kind],
        note="Mean over the tasks of the global pool, in percent, ± standard deviation of seeds. " + note,
        headings=("system", "seeds", *map(" ".join, ABLATION_COLUMNS), "difference", "p"),
        lines=lines,
    )


def beam_methods(beams: Sequence[System]) -> list[str]:
    """Return the methods that depend on a beam and that all of these were evaluated with."""
    return [
        method
        for method in (beams[0].methods("global") if beams else ())
        if method.startswith(("generative", "routing"))
        and all(method in system.methods("global") for system in beams)
    ]


def sort_by_beam(beams: Sequence[System]) -> list[System]:
    """Return the systems that were evaluated in the global pool, the narrowest beam first."""
    found = [system for system in beams if system.methods("global")]
    return sorted(found, key=lambda system: system.seeds[0].beam)


def beam_table(beams: Sequence[System]) -> Table | None:
    """Return recall by the beam's width."""
    beams = sort_by_beam(beams)
    methods = beam_methods(beams)
    if not methods:
        return None
    columns = [(method, measure) for method in methods for measure in ("R@1", "R@5")]
    lines: list[tuple[Cell, ...]] = []
    for system in beams:
        averages = [system.average("global", *column) for column in columns]
        touched = mean(row.candidates_touched for row in system.rows("global", methods[-1]))
        lines.append((str(system.seeds[0].beam), *averages, touched))
    return Table(
        name="beam",
        title="The beam's width",
        note="Mean over all tasks of the global pool, in percent. Re-ranking compares the items under the "
        "beam's IDs, so its number of candidates grows with the beam.",
        headings=("beam", *map(" ".join, columns), "touched"),
        lines=lines,
    )


def storage_table(systems: Sequence[System], pool: Pool) -> Table | None:
    """Return the bytes of an item for each way of searching."""
    lines: list[tuple[Cell, ...]] = []
    for system, method in _methods(systems, pool):
        rows = system.rows(pool, method)
        touched = 100 * mean(row.candidates_touched / row.pool_size for row in rows)
        lines.append((system.title, method, mean(row.bytes_per_item for row in rows), touched))
    if not lines:
        return None
    return Table(
        name="storage",
        title="Storage",
        note=f"Bytes kept of an item in the {pool} pool (codes and where each ID's items begin; their "
        "numbers, eight bytes each, are apart; vectors in 16 bits), and candidates scored for a query, in "
        "percent of the pool. The published count the bits of an ID, and a vector of 768 numbers in 32 bits.",
        headings=("system", "method", "bytes an item", "touched, %"),
        lines=[*lines, *((*published, None) for published in PUBLISHED_BYTES)],
        decimals=2,
        text_columns=2,
    )


def speed_table(benchmark: Benchmark) -> Table:
    """Return queries per second as the pool grows: the paper's figure 4 as numbers."""
    return Table(
        name="speed",
        title="Queries per second against the size of the pool",
        note="Queries a second of CPU time on one core, one by one (batch 1) or together. Weights are "
        "drawn and pools invented: this is speed, not recall; the encoder is not in it. "
        f"{benchmark.origin}",
        headings=("method", "batch", "items", "queries a second", "bytes an item"),
        lines=[
            (row["method"], row["batch"], row["items"], 1000.0 / row["cpu_ms"], row["bytes_per_item"])
            for row in benchmark.rows.sort_values(["method", "batch", "items"]).to_dict("records")
        ],
        decimals=2,
    )  # fmt: skip


def quality_table(benchmark: Benchmark) -> Table:
    """Return, for each kind of search, the settings that no cheaper one of it reaches."""
    lines: list[tuple[Cell, ...]] = []
    for _, own in benchmark.rows.groupby(["task", "line"], sort=False):
        best = set(pareto_front(list(zip(own["cpu_ms"], own["recall_5"], strict=True))))
        lines += [
            (row["task"], row["method"], 100 * row["recall_1"], 100 * row["recall_5"], row["code_bytes"],
             row["stored_bytes"], 100 * row["touched_share"], row["cpu_ms"])
            for row in own.sort_values("cpu_ms", kind="stable").to_dict("records")
            if (row["cpu_ms"], row["recall_5"]) in best
        ]  # fmt: skip
    return Table(
        name="quality",
        title="Recall against cost",
        note="Of each kind of search, settings whose R@5 no cheaper one of it reaches. CPU-milliseconds of "
        f"a query among 64, one core, without the encoder. {benchmark.origin}",
        headings=("task", "method", "R@1", "R@5", "bytes of the ID", "bytes stored", "touched, %", "CPU-ms"),
        lines=lines,
        decimals=2,
        text_columns=2,
    )


def latency_table(benchmark: Benchmark) -> Table | None:
    """Return the best R@5 of each kind of search within a time, side by side."""
    frame = benchmark.rows
    kinds = [kind for kind in frame["line"].unique() if kind]
    if not kinds:
        return None
    lines: list[tuple[Cell, ...]] = []
    for task, own in frame.groupby("task", sort=False):
        for limit in LATENCIES:
            best = 100 * own[own["cpu_ms"] <= limit].groupby("line")["recall_5"].max().reindex(kinds)
            if best.notna().any():
                lines.append((str(task), limit, *(None if math.isnan(one) else one for one in best)))
    return Table(
        name="latency",
        title="Recall at equal time",
        note="The best R@5, in percent, of the settings that take at most so many CPU-milliseconds a query "
        f"(among 64, one core, without the encoder); nothing where none does. {benchmark.origin}",
        headings=("task", "CPU-ms", *kinds),
        lines=lines,
        decimals=2,
    )


def misses_table(shares: pd.DataFrame) -> Table:
    """Return what the first hits of each system are; a line for each, a column for each kind."""
    return Table(
        name="misses",
        title="What stands at rank 1",
        note="Global pool; share of queries in percent, every task counting the same. A wrong first hit is "
        "counted once: of another modality than the wanted one; else of another data set than every right "
        "answer; else with a right answer among the other hits that were kept (50); else another item.",
        headings=("system", *shares.columns),
        lines=[(str(label), *(100 * own)) for label, own in shares.iterrows()],
    )


def reliability_table(found: Sequence[FirstHits]) -> Table:
    """Return how far the scores of first hits can be believed."""
    lines: list[tuple[Cell, ...]] = []
    for one in found:
        area = separation(one.sureness, one.right)
        promised, error = None, None
        if one.promised is not None:
            promised = 100 * float(one.promised.mean())
            error = 100 * calibration_error(reliability(one.cases()))
        right, surest = 100 * float(one.right.mean()), 100 * accuracy_of_surest(one, 0.5)
        separated = None if area is None else 100 * area
        lines.append((one.label, one.method, right, promised, error, separated, surest))
    return Table(
        name="reliability",
        title="Reliability of scores",
        note="Of first hits, in percent. Promised: the mean probability of the first hit among those that "
        "were kept (50). Calibration error: mean distance between promise and share of right answers, by "
        "tenths of the promise. Separation: how often a right first hit has a higher promise (or score) than "
        "a wrong one (the area under the ROC curve; 50 is chance). Only sums of log-probabilities promise "
        "anything.",
        headings=(
            "system", "method", "right", "promised", "calibration error", "separation",
            "right among the surest half",
        ),
        lines=lines,
        text_columns=2,
    )  # fmt: skip


def codes_table(groups: Sequence[Group], items: Sequence[Sequence[Item]]) -> Table:
    """Return items that share their first codes, in words."""
    lines = []
    for group, shown in zip(groups, items, strict=True):
        words = "; ".join(textwrap.shorten(item.text, 60, placeholder=" …") for item in shown[:4])
        lines.append((str(group.level), ".".join(map(str, group.prefix)), words, group.size))
    return Table(
        name="codes-by-level",
        title="Codes by level",
        note="The fullest codes of each level, under the fullest code of the level before; level 0 is the "
        "modality where the model has such a code. Some of the items under each.",
        headings=("level", "codes", "some of the items", "items"),
        lines=lines,
        text_columns=3,
    )


def rows_table(made: Sequence[MadeRow]) -> Table:
    """Return every row of a sweep with the commands that made it."""
    lines = []
    for row in made:
        state = row.state if row.state == "done" else f"failed: {row.error}"
        lines.append((row.title, str(row.seed), state, f"{row.seconds:.0f}", "; ".join(row.commands)))
    headings = ("row", "seed", "state", "seconds", "commands")
    return Table(name="rows", title="What made each row", headings=headings, lines=lines, text_columns=5)


def _methods(systems: Sequence[System], pool: Pool) -> Iterator[tuple[System, str]]:
    for system in systems:
        for method in system.methods(pool):
            yield system, method


def _published_lines(tasks: Sequence[ResultRow]) -> Iterator[tuple[Cell, ...]]:
    """Yield lines of published numbers where every task has as many queries and candidates as theirs."""
    for method, system in COMPARABLE.items():
        beside = [published_beside(replace(task, method=method)) for task in tasks]
        for weights in ("released", "paper"):
            found = [next((one.value for one in own if one.weights == weights), None) for own in beside]
            values = [value for value in found if value is not None]
            if values and len(values) == len(tasks):
                average = [sum(values) / len(values)] if len(values) > 1 else []
                yield (f"{system}, published ({weights})", method, *values, *average, None)


def _on_other_queries(systems: Sequence[System], pool: Pool) -> list[System]:
    """Return the systems that answered other queries than the first, whose averages cannot be compared."""
    counts = [{row.name: row.queries for row in system.tasks(pool)} for system in systems]
    return [system for system, own in zip(systems, counts, strict=True) if own != counts[0]]


def _incomparable_note(systems: Sequence[System]) -> str:
    if not systems:
        return ""
    titles = ", ".join(system.title for system in systems)
    return f" Evaluated on other tasks or queries than the first, so not to be compared with it: {titles}."


def _seeds_note(systems: Sequence[System]) -> str:
    counts = sorted({len(system.seeds) for system in systems})
    if counts == [1]:
        return "One seed, so that nothing is known of the spread"
    return f"Mean ± standard deviation over {' or '.join(map(str, counts))} seeds"


def _format_points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _format_p(p: float) -> str:
    """Return p, not smaller than the number of resamples can tell."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
