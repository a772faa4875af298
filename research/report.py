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
from research.statistics import Pair, compare_all
from research.systems import SYSTEMS, System, gather
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
"""Ablations are tested on the paper's measure of the paper's search."""
WITHIN: Final = (
    ("generative", "exact-fused"),
    ("generative+codes", "exact-fused"),
    ("generative+codes", "routing+codes"),
    ("generative+raw", "exact-raw"),
)
"""Methods of one system that are tested against each other."""
SIGNIFICANT: Final = 0.05
RUN_MEASURES: Final = ("R@1", "R@5", "R@10", "MRR", "nDCG@10")


def recall_table(systems: Sequence[System], pool: Pool) -> Table:
    """Return recall by task for all systems and methods of one pool, published numbers below."""
    tasks = systems[0].tasks(pool)
    first = (
        systems[0].rows[systems[0].rows["pool"] == pool].drop_duplicates("name").set_index("name")
    )
    lines: list[tuple[Cell, ...]] = []
    for system in systems:
        for method in system.methods(pool):
            values = [system.task(pool, method, task) for task in tasks]
            average = system.average(pool, method) if system.tasks(pool) == tasks else None
            exact = system.average(pool, "exact-raw")
            kept = (
                100 * average.value / exact.value if average and exact and exact.value > 0 else None
            )
            lines.append((system.title, method, *values, average, kept))
    bold = find_best(lines, range(2, 3 + len(tasks)))
    is_comparable = "published" in first.columns and bool(first["published"].map(bool).all())
    for method, name in COMPARABLE.items() if is_comparable else ():
        numbers = [
            next((one.value for one in references(task, pool, method)), None) for task in tasks
        ]
        lines.append((f"{name}, published", method, *numbers, None, None))
    seeds = sorted({len(system.folders) for system in systems})
    return Table(
        name=f"recall-{pool}",
        title=f"Recall, {pool} pool",
        note="Share of queries with a right answer among the first hits, percent, mean ± standard deviation "
        f"over {' or '.join(map(str, seeds))} seeds. Bold: the best of a column. Kept: of the average of "
        "exact search over the encoder's summed features (CLIP-SF's way), percent.",
        headings=(
            "system",
            "method",
            *(f"{task} {first.loc[task, 'headline']}" for task in tasks),
            "average",
            "kept",
        ),
        lines=lines,
        text_columns=2,
        bold=bold,
    )


def significance_table(pairs: Sequence[Pair], *, title: str) -> Table:
    """Return a line for each pair that answered the same queries."""
    lines: list[tuple[Cell, ...]] = [
        (*pair[:3], _points(found.difference), found.better, found.worse, _p(found.p),
         found.p < SIGNIFICANT)
        for pair, found in zip(pairs, compare_all(pairs), strict=True)
        if found is not None
    ]  # fmt: skip
    return Table(
        name="significance",
        title=title,
        note="Difference in points; queries that the first answers better and worse (the mean over seeds); "
        "p of the paired randomisation test over queries, two-sided, corrected by Holm for all lines.",
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


def tested_pairs(systems: Sequence[System], pool: Pool) -> list[Pair]:
    """Return the methods of each system, and the systems after the first with the first, to be compared."""
    compared = [
        ((system, a), (system, b))
        for system in systems
        for a, b in WITHIN
        if {a, b} <= set(system.methods(pool))
    ]
    base = next((one for one in systems if "generative" in one.methods(pool)), None)
    for other in systems if base is not None else ():
        own = [one for one in other.methods(pool) if one == "generative" or one not in METHODS]
        if base is not None and other is not base and own:
            compared.append(((base, "generative"), (other, own[0])))
    return [
        Pair(
            f"{one.title}: {a}",
            f"{other.title}: {b}",
            name,
            (one.per_query(pool, a, name), other.per_query(pool, b, name)),
        )
        for (one, a), (other, b) in compared
        for name in ("R@1", "R@5")
    ]


def ablation_table(kind: str, base: System | None, changed: Sequence[System]) -> Table:
    """Return the base system and each one with a single change, tested against the base."""
    method, name = TESTED
    everyone = [*([base] if base else []), *changed]
    values = [system.per_query("global", method, name) for system in everyone] if base else []
    tests = compare_all(
        [Pair(one.title, everyone[0].title, name, (own, values[0]))
         for one, own in zip(everyone[1:], values[1:], strict=True)] if base else []
    )  # fmt: skip
    lines: list[tuple[Cell, ...]] = []
    for place, system in enumerate(everyone):
        test = tests[place - 1] if base and place else None
        columns = [system.average("global", *column) for column in ABLATION_COLUMNS]
        tested = (None, None) if test is None else (_points(test.difference), _p(test.p))
        lines.append((system.title, len(system.folders), *columns, *tested))
    return Table(
        name=kind,
        title=ABLATIONS[kind],
        note="Mean over the tasks of the global pool, in percent, ± standard deviation of seeds. Difference: "
        f"{name} of {method} against the first line, in points; p corrected by Holm.",
        headings=("system", "seeds", *map(" ".join, ABLATION_COLUMNS), "difference", "p"),
        lines=lines,
    )


def report(systems: Sequence[System], data: MBeir | None) -> list[Table | Drawing]:
    """Return every table and figure that there is enough evidence for; items are shown only with ``data``."""
    main = [one for one in systems if one.table == SYSTEMS]
    parts: list[Table | Drawing] = []
    pools = [pool for pool in POOLS if any(one.methods(pool) for one in main)]
    for pool in pools:
        own = [one for one in main if one.methods(pool)]
        parts.append(recall_table(own, pool))
    if pools:
        pool = pools[-1]
        own = [one for one in main if one.methods(pool)]
        parts.append(
            significance_table(tested_pairs(own, pool), title=f"Paired tests, {pool} pool")
        )
    by_name = {one.name: one for one in systems}
    for kind in ABLATIONS:
        changed = [
            one for one in systems if one.table == kind and TESTED[0] in one.methods("global")
        ]
        if changed:
            parts.append(ablation_table(kind, by_name.get(changed[0].like), changed))
    beams = sorted(
        (one for one in systems if one.table == "beam"), key=lambda one: one.rows["beam"].iloc[0]
    )
    if len(beams) > 1:
        parts.append(figures.beam_figure([(int(one.rows["beam"].iloc[0]), one) for one in beams]))
    for system in main:
        if system.model is not None:
            drawn = figures.code_figures(system.model, system.folders[0], data, title=system.title)
            if drawn:
                return [*parts, *drawn]
    return parts


def report_runs(runs: Sequence[Path], qrels: Path) -> list[Table | Drawing]:
    """Measure TREC runs of any system over one qrels file, and test each against the first.

    Raises
    ------
    BadData
        A run answers none of the queries.
    """
    judged = {
        qid: answers for qid, answers in read_qrels(qrels).items() if max(answers.values()) > 0
    }
    lines: list[tuple[Cell, ...]] = []
    values: dict[str, pd.DataFrame] = {}
    for path in runs:
        found = read_run(path)
        if not judged.keys() & found.keys():
            raise BadData(
                f"{path} answers none of the {len(judged)} queries of {qrels}; take its own qrels"
            )
        measured = measure_run(judged, {qid: found.get(qid, ()) for qid in judged})
        values[path.stem] = pd.concat(
            {"": pd.DataFrame.from_dict(measured.per_query, orient="index")}
        )
        lines.append((path.stem, *(100 * measured.means[name] for name in RUN_MEASURES)))
    first, *others = values
    pairs = [
        Pair(first, other, name, (values[first][name], values[other][name]))
        for other in others
        for name in ("R@5", "nDCG@10")
    ]
    table = Table(
        name="runs",
        title="Runs",
        note=f"{len(judged)} queries of {qrels.name}, in percent. Unanswered queries count 0.",
        headings=("run", *RUN_MEASURES),
        lines=lines,
    )
    return [table, significance_table(pairs, title="Paired tests")] if pairs else [table]


def write(folder: Path, parts: Sequence[Table | Drawing]) -> Path:
    """Write ``report.md``, ``tables/`` and ``figures/``; return the first."""
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


def _points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def _p(value: float) -> str:
    """Return p, not smaller than the number of resamples can tell."""
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


@command
class Report:
    """Make the paper's tables and figures from runs on disk, with paired tests.

    Writes report.md, tables/ (CSV) and figures/ (PNG). Or give --runs and --qrels: anybody's TREC files.
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Folders of sweeps or of evaluations, or NAME=FOLDER,FOLDER: evaluations that differ in their seed."""

    out: Path
    """Folder of the report."""

    data: OptionalFolder = None
    """The data set, for pictures of the items that share codes."""

    runs: tuple[Path, ...] = ()
    """TREC runs, in place of sources."""

    qrels: OptionalFile = None
    """Right answers of the runs."""

    def run(self) -> None:
        """Gather, measure and write."""
        if bool(self.runs) != (self.qrels is not None):
            raise UsageError("give --runs together with --qrels")
        parts: list[Table | Drawing] = []
        if self.sources:
            parts += report(gather(self.sources), None if self.data is None else MBeir(self.data))
        if self.qrels is not None:
            parts += report_runs(self.runs, self.qrels)
        if not parts:
            raise UsageError("give folders to report on, or --runs together with --qrels")
        print_text(f"begin with {write(self.out, parts)}")


main = partial(run, Report, "report")


if __name__ == "__main__":
    sys.exit(main())
