"""``genius report --runs``: somebody else's TREC runs over one qrels file."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Final

from genius.data.qrels import read_qrels
from genius.errors import BadData, UsageError
from genius.evaluation.measures import evaluate as measure
from genius.evaluation.runs import Run, read_run
from genius.report.document import Report
from genius.report.significance import Pair, significance_table
from genius.report.statistics import interval
from genius.report.table import Cell, Estimate, Table
from genius.stages.progress import Progress

MOST_RUNS: Final = 30
"""Of somebody else's: pairs grow with the square."""


def report_runs(runs: Sequence[Path], qrels: Path, *, progress: Progress) -> Report:
    """Somebody else's TREC runs over one qrels file: measures, intervals, all pairs tested.

    Raises
    ------
    UsageError
        no run, two of one name, or too many.
    BadData
        the qrels have no right answer, or a run answers none of their queries.
    """
    if not 0 < len(runs) <= MOST_RUNS:
        raise UsageError(f"{len(runs)} runs; expected between 1 and {MOST_RUNS}")
    judged = read_qrels(qrels, layout="trec")
    judged = {qid: answers for qid, answers in judged.items() if any(value > 0 for value in answers.values())}
    if not judged:
        raise BadData(
            f"{qrels} has no query with a right answer (a relevance above 0), so nothing can be measured"
        )
    names = [path.stem for path in runs]
    if len(set(names)) < len(names):
        raise UsageError("two runs have the same file name, which is their name in tables; rename one")
    values: dict[str, dict[str, dict[str, float]]] = {}
    lines: list[tuple[Cell, ...]] = []
    progress.begin("runs", len(runs))
    for number, (name, path) in enumerate(zip(names, runs, strict=True), start=1):
        run = read_run(path, order="scores")
        lost = sum(qid not in run.hits for qid in judged)
        if lost == len(judged):
            raise BadData(f"{path} answers none of the {len(judged)} queries of {qrels}; take its own qrels")
        whole = Run(run.name, {qid: run.hits.get(qid, ()) for qid in judged})
        measures = measure(judged, whole)
        shown = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")
        values[name] = {one: {qid: own[one] for qid, own in measures.per_query.items()} for one in shown}
        bounds = {one: interval({"": values[name][one]}) for one in shown}
        flat = measures.flat()
        lines.append(
            (
                name,
                lost,
                *(
                    Estimate(100 * flat[one], None, 100 * bounds[one].low, 100 * bounds[one].high)
                    for one in shown
                ),
                f"{100 * bounds['R@5'].low:.1f} to {100 * bounds['R@5'].high:.1f}",
            )
        )
        progress.advance(number, {})
    table = Table(
        name="runs",
        title="Runs",
        note=f"{len(judged)} queries of {qrels.name}, in percent. R@k: share of queries with a right answer "
        "among the first k (M-BEIR's). Runs are read as trec_eval orders them. Unanswered queries count 0. "
        "The interval is a bootstrap over queries (95 %) of R@5; the CSV has those of all measures.",
        headings=("run", "unanswered", "R@1", "R@5", "R@10", "MRR", "nDCG@10", "95 % interval of R@5"),
        lines=lines,
    )
    pairs = [
        Pair(first, second, one, ({"": values[first][one]}, {"": values[second][one]}))
        for one in ("R@5", "nDCG@10")
        for first, second in combinations(names, 2)
    ]
    progress.begin("tests", len(pairs))
    tests = significance_table(
        pairs,
        name="significance",
        title="Paired tests",
        advance=lambda done: progress.advance(done, {}),
    )
    parts = (table, tests) if tests is not None else (table,)
    return Report(title="Report of runs", about=(), parts=parts)
