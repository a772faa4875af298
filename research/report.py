"""``python -m research.report``: the paper's tables and figures from evaluations on disk."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import pandas as pd
import tyro

from genius_search.cli.options import OptionalFile, OptionalFolder, command
from genius_search.cli.terminal import print_text
from genius_search.data.mbeir import MBeir, read_qrels
from genius_search.errors import BadData, UsageError
from genius_search.writing import write_file
from research import figures
from research.command import run
from research.figures import Drawing
from research.published.numbers import COMPARABLE, references
from research.runs import measure_run, read_run
from research.settings import METHODS, POOLS, Pool
from research.statistics import Comparison, Pair, compare_all
from research.systems import SYSTEMS, System, read_systems
from research.table import Cell, Table, find_best

ABLATIONS: Final = {
    "ablations": "Ablations",
    "decoder": "The decoder's size",
    "codes": "Codebooks: codes of a level × levels",
}
ABLATION_COLUMNS: Final = (
    ("generative", "R@1"),
    ("generative", "R@5"),
    ("generative+raw", "R@5"),
    ("exact-codes", "R@5"),
    ("exact-fused", "R@5"),
)
TESTED: Final = ("generative", "R@5")
"""Method and measure of the tests of ablations: the paper's."""
METHOD_PAIRS: Final = (
    ("generative", "exact-fused"),
    ("generative+codes", "exact-fused"),
    ("generative+codes", "routing+codes"),
    ("generative+raw", "exact-raw"),
)
"""Methods of one system that are tested against each other."""
MAX_P: Final = 0.05
"""A difference is significant if its p is below."""
RUN_MEASURES: Final = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")


def recall_table(systems: Sequence[System], pool: Pool) -> Table:
    """Return recall by task for all systems and methods of one pool, then published numbers."""
    tasks = systems[0].tasks(pool)
    rows = systems[0].rows
    task_rows = rows[rows["pool"] == pool].drop_duplicates("name").set_index("name")
    lines: list[tuple[Cell, ...]] = []
    for system in systems:
        for method in system.methods(pool):
            scores = [system.score(pool, method, task) for task in tasks]
            average = system.average(pool, method) if system.tasks(pool) == tasks else None
            exact = system.average(pool, "exact-raw")
            of_exact_raw = None
            if average is not None and exact is not None and exact.value > 0:
                of_exact_raw = 100 * average.value / exact.value
            lines.append((system.title, method, *scores, average, of_exact_raw))
    bold = find_best(lines, range(2, 3 + len(tasks)))
    is_published = "published" in task_rows and bool(task_rows["published"].map(bool).all())
    for method, name in COMPARABLE.items() if is_published else ():
        numbers = []
        for task in tasks:
            published = references(task, pool, method)
            numbers.append(published[0].value if published else None)
        lines.append((f"{name}, published", method, *numbers, None, None))
    counts = sorted({len(system.folders) for system in systems})
    seeds = f"{' or '.join(map(str, counts))} seed{'s' * (counts != [1])}"
    task_headings = [f"{task} {task_rows.loc[task, 'headline']}" for task in tasks]
    return Table(
        name=f"recall-{pool}",
        title=f"Recall, {pool} pool",
        note="Share of queries with a right answer among the first hits, percent, mean ± standard "
        f"deviation over {seeds}. Bold: the best of a column. Of "
        "exact-raw: percent of the average of exact search over the encoder's summed features, as "
        "in CLIP-SF.",
        headings=("system", "method", *task_headings, "average", "of exact-raw"),
        lines=lines,
        text_columns=2,
        bold=bold,
    )


def significance_table(pairs: Sequence[Pair], *, title: str) -> Table:
    """Return a line for each pair that answered the same queries."""
    lines: list[tuple[Cell, ...]] = []
    for pair, test in zip(pairs, compare_all(pairs), strict=True):
        if test is not None:
            names = (pair.first, pair.second, pair.measure)
            difference, p = _format_points(test.difference), _format_p(test.p)
            lines.append((*names, difference, test.better, test.worse, p, test.p < MAX_P))
    return Table(
        name="significance",
        title=title,
        note="Difference in points; number of queries that the first answers better and worse (by "
        "the mean over seeds); p of the paired randomisation test over queries, two-sided, "
        "corrected by Holm for all lines.",
        headings=(
            "system",
            "against",
            "measure",
            "difference",
            "better",
            "worse",
            "p",
            "below 0.05",
        ),
        lines=lines,
        text_columns=3,
    )


def method_pairs(systems: Sequence[System], pool: Pool) -> list[Pair]:
    """Return the pairs to test: methods of the same system, and each system with the first one."""
    compared: list[tuple[System, str, System, str]] = []
    for system in systems:
        methods = set(system.methods(pool))
        compared += [(system, a, system, b) for a, b in METHOD_PAIRS if {a, b} <= methods]
    generative = [system for system in systems if "generative" in system.methods(pool)]
    for system in systems if generative else ():
        rivals = [
            method
            for method in system.methods(pool)
            if method == "generative" or method not in METHODS
        ]
        if system is not generative[0] and rivals:
            compared.append((generative[0], "generative", system, rivals[0]))
    return [
        Pair(
            f"{first.title}: {first_method}",
            f"{second.title}: {second_method}",
            measure,
            (
                first.per_query(pool, first_method, measure),
                second.per_query(pool, second_method, measure),
            ),
        )
        for first, first_method, second, second_method in compared
        for measure in ("R@1", "R@5")
    ]


def ablation_table(name: str, base: System | None, changed: Sequence[System]) -> Table:
    """Return the base system and each system with a single change, tested against the base."""
    method, measure = TESTED
    lines: list[tuple[Cell, ...]] = []
    pairs = []
    if base is not None:
        lines.append((*_ablation_cells(base), None, None))
        base_values = base.per_query("global", method, measure)
        for system in changed:
            values = system.per_query("global", method, measure)
            pairs.append(Pair(system.title, base.title, measure, (values, base_values)))
    tests: list[Comparison | None] = compare_all(pairs) if pairs else [None] * len(changed)
    for system, test in zip(changed, tests, strict=True):
        cells = (
            (None, None) if test is None else (_format_points(test.difference), _format_p(test.p))
        )
        lines.append((*_ablation_cells(system), *cells))
    return Table(
        name=name,
        title=ABLATIONS[name],
        note="Mean over the tasks of the global pool, in percent, ± standard deviation of seeds. "
        f"Difference: {measure} of {method}, minus that of the first line, in points; p corrected "
        "by Holm.",
        headings=("system", "seeds", *map(" ".join, ABLATION_COLUMNS), "difference", "p"),
        lines=lines,
    )


def _ablation_cells(system: System) -> tuple[Cell, ...]:
    averages = [system.average("global", method, name) for method, name in ABLATION_COLUMNS]
    return (system.title, len(system.folders), *averages)


def report_systems(systems: Sequence[System], data: MBeir | None) -> list[Table | Drawing]:
    """Return every table and figure that can be made; pictures of items only with ``data``."""
    main_systems = [system for system in systems if system.table == SYSTEMS]
    parts: list[Table | Drawing] = []
    pairs: list[Pair] = []
    last_pool = ""
    for pool in POOLS:
        evaluated = [system for system in main_systems if system.methods(pool)]
        if evaluated:
            parts.append(recall_table(evaluated, pool))
            pairs, last_pool = method_pairs(evaluated, pool), pool
    if last_pool:
        parts.append(significance_table(pairs, title=f"Paired tests, {last_pool} pool"))
    by_name = {system.name: system for system in systems}
    for table in ABLATIONS:
        changed = [
            system
            for system in systems
            if system.table == table and TESTED[0] in system.methods("global")
        ]
        if changed:
            parts.append(ablation_table(table, by_name.get(changed[0].like), changed))
    beams = [
        (int(system.rows["beam"].iloc[0]), system) for system in systems if system.table == "beam"
    ]
    if len(beams) > 1:
        parts.append(figures.beam_figure(sorted(beams, key=lambda item: item[0])))
    for system in main_systems:
        if system.model is not None:
            drawings = figures.code_figures(
                system.model, system.folders[0], data, title=system.title
            )
            if drawings:
                return [*parts, *drawings]
    return parts


def report_runs(runs: Sequence[Path], qrels: Path) -> list[Table | Drawing]:
    """Measure TREC runs of any system over one qrels file, and test each against the first.

    Raises
    ------
    BadData
        A run answers none of the queries.
    UsageError
        Two runs have the same file name.
    """
    judged = {
        qid: answers for qid, answers in read_qrels(qrels).items() if max(answers.values()) > 0
    }
    lines: list[tuple[Cell, ...]] = []
    frames: dict[str, pd.DataFrame] = {}
    for path in runs:
        if path.stem in frames:
            raise UsageError(f"two runs have the name {path.stem}; rename one of the files")
        run = read_run(path)
        if not judged.keys() & run.keys():
            raise BadData(
                f"{path} answers none of the {len(judged)} queries of {qrels}; give the qrels of "
                "its queries"
            )
        measures = measure_run(judged, {qid: run.get(qid, ()) for qid in judged})
        per_query = pd.DataFrame.from_dict(measures.per_query, orient="index")
        frames[path.stem] = pd.concat({"": per_query})
        lines.append((path.stem, *(100 * measures.means[name] for name in RUN_MEASURES)))
    first, *following = frames
    pairs = [
        Pair(first, name, measure, (frames[first][measure], frames[name][measure]))
        for name in following
        for measure in ("R@5", "nDCG@10")
    ]
    table = Table(
        name="runs",
        title="Runs",
        note=f"{len(judged)} queries of {qrels.name}, in percent. Unanswered queries count 0.",
        headings=("run", *RUN_MEASURES),
        lines=lines,
    )
    return [table, significance_table(pairs, title="Paired tests")] if pairs else [table]


def write_report(folder: Path, parts: Sequence[Table | Drawing]) -> Path:
    """Write ``report.md``, ``tables/`` and ``figures/``; return the path of ``report.md``."""
    blocks = ["# Report"]
    for name in ("tables", "figures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for part in parts:
        if isinstance(part, Table):
            write_file(folder / "tables" / f"{part.name}.csv", part.csv().encode())
            blocks.append(part.markdown())
        else:
            part.figure.savefig(
                folder / "figures" / f"{part.name}.png", metadata={"Software": None}
            )
            blocks += [f"![{part.alt}](figures/{part.name}.png)", f"*{part.title}.*"]
    write_file(folder / "report.md", ("\n\n".join(blocks) + "\n").encode())
    return folder / "report.md"


def _format_points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _format_p(value: float) -> str:
    """Return p, but not below the precision of the resamples."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


@command
class Report:
    """Make the paper's tables and figures from runs on disk, with paired tests.

    Writes report.md, tables/ (CSV) and figures/ (PNG). With --runs and --qrels, it reports on TREC
    files of any system.
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Folders of sweeps or of evaluations, or NAME=FOLDER,FOLDER: evaluations that differ in their
    seed."""

    out: Path
    """Folder of the report."""

    data: OptionalFolder = None
    """The data set, for pictures of the items that share codes."""

    runs: tuple[Path, ...] = ()
    """TREC runs, instead of or in addition to folders."""

    qrels: OptionalFile = None
    """Right answers of the runs."""

    def run(self) -> None:
        """Read, measure and write."""
        if bool(self.runs) != (self.qrels is not None):
            raise UsageError("give --runs together with --qrels")
        parts: list[Table | Drawing] = []
        if self.sources:
            data = None if self.data is None else MBeir(self.data)
            parts += report_systems(read_systems(self.sources), data)
        if self.qrels is not None:
            parts += report_runs(self.runs, self.qrels)
        if not parts:
            raise UsageError("give folders to report on, or --runs together with --qrels")
        print_text(f"begin with {write_report(self.out, parts)}")


main = partial(run, Report, "report")


if __name__ == "__main__":
    sys.exit(main())
