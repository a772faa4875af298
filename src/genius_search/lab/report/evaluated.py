"""Evaluations on disk as a report reads them: a system is one recipe row with all its seeds.

What ``genius evaluate`` wrote is enough: ``results.json``, and ``runs/`` with a TREC run and qrels for each
row, pool and method.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from genius_search.data.mbeir import read_qrels
from genius_search.errors import ArtifactMissing, BadData
from genius_search.lab.report.statistics import PerTask, interval, mean_of_seeds, over_seeds
from genius_search.lab.report.table import Estimate
from genius_search.lab.results import METHODS, ResultRow, in_order
from genius_search.lab.runs import Measures, Qrels, Run, read_run
from genius_search.lab.runs import evaluate as measure

Pool = Literal["local", "global"]
RESULTS: Final = "results.json"
KS: Final = (1, 5, 10)
KS_LONG: Final = (1, 5, 10, 20, 50)
HEADLINE: Final = "headline"
"""Stands for each row's own measure: R@10 for Fashion200K and FashionIQ, else R@5."""
_FIELDS: Final = (
    "name", "dataset", "task", "task_id", "pool", "method", "queries", "pool_size", "bytes_per_item",
    "candidates_touched",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """One evaluation of one model: what ``genius evaluate`` left in a folder."""

    folder: Path
    seed: int
    data: str
    """Name of the data set."""
    split: str
    beam: int
    scores: str
    rows: tuple[ResultRow, ...]

    def row(self, pool: Pool, method: str, task: str) -> ResultRow | None:
        """One line of its table."""
        return next(
            (row for row in self.rows if (row.pool, row.method, row.name) == (pool, method, task)), None
        )

    def run(self, pool: Pool, method: str, task: str) -> Run:
        """The rankings behind it.

        Raises
        ------
        ArtifactMissing
            the file is not there.
        """
        return _read_run(self._file(f"{task}_{self.split}.{pool}.{method}.trec"), task)

    def qrels(self, pool: Pool, task: str) -> Qrels:
        """Right answers, cut to the pool."""
        return read_qrels(self._file(f"{task}_{self.split}.{pool}.qrels"), layout="trec")

    def _file(self, name: str) -> Path:
        path = self.folder / "runs" / name
        if not path.exists():
            raise ArtifactMissing(
                f"{path} is missing; evaluate again (with one instruction for each query, not all in turn)"
            )
        return path

    def measures(self, pool: Pool, method: str, task: str) -> Measures:
        """Measured anew, query by query."""
        return _measured(self, pool, method, task)

    def __hash__(self) -> int:
        return hash(self.folder)


@dataclass(frozen=True, kw_only=True)
class System:
    """One row of a recipe with all its seeds."""

    name: str
    title: str
    table: str
    """Which table it stands in."""
    seeds: tuple[Evaluated, ...]
    failed: Mapping[int, str] = field(default_factory=dict)
    """Seed -> why there is no evaluation."""
    like: str = ""
    """Name of the system that this one is a change of."""

    def methods(self, pool: Pool) -> list[str]:
        """Evaluated in this pool with every seed, in the order of tables."""
        by_seed = [{row.method for row in one.rows if row.pool == pool} for one in self.seeds]
        found = set.intersection(*by_seed) if by_seed else set()
        known = [method for method in METHODS if method in found]
        return known + sorted(found - set(known))

    def tasks(self, pool: Pool) -> list[ResultRow]:
        """A line of each task, in the papers' order."""
        found: dict[str, ResultRow] = {}
        for row in in_order([row for row in self.seeds[0].rows if row.pool == pool]) if self.seeds else ():
            found.setdefault(row.name, row)
        return list(found.values())

    def questions(self, pool: Pool) -> dict[str, int]:
        """How many queries of each task were asked: systems of others cannot be laid beside this one."""
        return {row.name: row.queries for row in self.tasks(pool)}

    def estimate(self, pool: Pool, method: str, task: str, measure: str = HEADLINE) -> Estimate | None:
        """Percent, over seeds."""
        values = [_value(one.row(pool, method, task), measure) for one in self.seeds]
        known = [100 * value for value in values if value is not None]
        return over_seeds(known) if known and len(known) == len(self.seeds) else None

    def average(
        self, pool: Pool, method: str, measure: str = HEADLINE, *, with_interval: bool = False
    ) -> Estimate | None:
        """Percent over all tasks, every task counting the same."""
        tasks = self.tasks(pool)
        by_seed = [
            [_value(one.row(pool, method, task.name), measure) for task in tasks] for one in self.seeds
        ]
        if not tasks or not by_seed or any(value is None for values in by_seed for value in values):
            return None
        found = over_seeds(
            [100 * sum(value for value in values if value is not None) / len(values) for values in by_seed]
        )
        if not with_interval:
            return found
        bounds = interval(self.per_query(pool, method, measure))
        return found._replace(low=100 * bounds.low, high=100 * bounds.high)

    def per_query(self, pool: Pool, method: str, measure: str = HEADLINE) -> PerTask:
        """Of each query, from 0 to 1, the mean over seeds."""
        return mean_of_seeds(
            [
                {
                    task.name: {
                        qid: values[task.headline if measure == HEADLINE else measure]
                        for qid, values in one.measures(pool, method, task.name).per_query.items()
                    }
                    for task in self.tasks(pool)
                }
                for one in self.seeds
            ]
        )


def check_seeds(system: System) -> None:
    """Seeds of one system must have answered the same.

    Raises
    ------
    BadData
        they have not.
    """

    def asked(one: Evaluated) -> set[tuple[str, str, int]]:
        return {(row.pool, row.name, row.queries) for row in one.rows}

    for other in system.seeds[1:]:
        first = system.seeds[0]
        if asked(first) != asked(other):
            task = min(asked(first) ^ asked(other))
            raise BadData(
                f"{first.folder} and {other.folder} were evaluated on different queries ({task[1]}, "
                f"{task[0]} pool), so they cannot be two seeds of {system.title!r}; evaluate one of them "
                "again as the other"
            )


def read_evaluation(folder: Path, *, seed: int = 0) -> Evaluated:
    """What ``genius evaluate`` wrote.

    Raises
    ------
    ArtifactMissing
        there is no ``results.json``.
    BadData
        it is not an evaluation's.
    """
    path = folder / RESULTS
    if not path.exists():
        raise ArtifactMissing(f"{folder} holds no {RESULTS}; run `genius evaluate` with --out {folder.name}")
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Evaluated(
            folder=folder,
            seed=seed,
            data=found["data"],
            split=found["split"],
            beam=found["config"]["beam"],
            scores=found["config"]["scores"],
            rows=tuple(_row(row) for row in found["rows"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path} is not what `genius evaluate` writes: {error!r}") from None


def _row(found: Mapping[str, Any]) -> ResultRow:
    measures = {
        name: value
        for name, value in found.items()
        if name == "MRR" or name.partition("@")[0] in ("R", "recall", "nDCG")
    }
    return ResultRow(
        **{name: found[name] for name in _FIELDS},
        headline_k=int(found["headline"].removeprefix("R@")),
        measures=measures,
    )


def _value(row: ResultRow | None, measure: str) -> float | None:
    if row is None:
        return None
    return row.score if measure == HEADLINE else row.measures.get(measure)


@lru_cache(maxsize=64)
def _read_run(path: Path, _task: str) -> Run:
    # A method that found nothing for any query leaves a file without a line.
    return read_run(path) if path.stat().st_size else Run("", {})


@lru_cache(maxsize=4096)
def _measured(one: Evaluated, pool: Pool, method: str, task: str) -> Measures:
    qrels, run = one.qrels(pool, task), one.run(pool, method, task)
    # TREC has no line for a query that found nothing.
    whole = Run(run.name, {**dict.fromkeys(qrels, ()), **run.hits})
    row = one.row(pool, method, task)
    return measure(qrels, whole, ks=KS_LONG if row is not None and row.headline_k == 10 else KS)
