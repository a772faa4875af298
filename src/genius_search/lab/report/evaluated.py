"""Evaluations and benchmarks as a report reads them; a system is one recipe row with all its seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

import pandas as pd

from genius_search.data.mbeir import read_qrels
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.lab.report.statistics import PerTask, estimate, interval, mean_of_seeds
from genius_search.lab.results import ResultRow, in_order
from genius_search.lab.runs import Qrels, Run, evaluate, read_run
from genius_search.lab.settings import METHODS, Pool
from genius_search.lab.sweep import EVALUATION, SWEEP_ROW, MadeRow, read_rows
from genius_search.lab.table import Estimate
from genius_search.model import MODEL_FILE

RESULTS: Final = "results.json"
SYSTEMS: Final = "systems"
"""The table that compares systems."""
COSTS: Final = "costs"
"""The table of benchmarks."""
HEADLINE: Final = "headline"
"""Stands for each row's own measure: R@10 for Fashion200K and FashionIQ, else R@5."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluated:
    """One evaluation of one model, as ``genius evaluate`` left it in a folder."""

    folder: Path
    seed: int
    data: str
    """Name of the data set."""
    split: str
    beam: int
    scores: str
    rows: tuple[ResultRow, ...]

    def run(self, pool: Pool, method: str, task: str) -> Run:
        """Return the rankings behind a line; raises ArtifactMissing where the file is not there."""
        return _read_run(self._file(f"{task}_{self.split}.{pool}.{method}.trec"))

    def qrels(self, pool: Pool, task: str) -> Qrels:
        """Return the right answers, cut to the pool."""
        return read_qrels(self._file(f"{task}_{self.split}.{pool}.qrels"), layout="trec")

    def _file(self, name: str) -> Path:
        path = self.folder / "runs" / name
        if not path.exists():
            raise ArtifactMissing(
                f"{path} is missing; evaluate again (with one instruction for each query, not all in turn)"
            )
        return path


@dataclass(frozen=True, kw_only=True)
class System:
    """One row of a recipe with all its seeds."""

    name: str
    title: str
    table: str
    """The table it stands in."""
    seeds: tuple[Evaluated, ...]
    like: str = ""
    """Name of the system that this one is a change of."""

    def methods(self, pool: Pool) -> list[str]:
        """Return the methods evaluated in this pool with every seed, in the order of tables."""
        by_seed = [{row.method for row in one.rows if row.pool == pool} for one in self.seeds]
        found = set.intersection(*by_seed) if by_seed else set()
        return [method for method in METHODS if method in found] + sorted(found.difference(METHODS))

    def tasks(self, pool: Pool) -> list[ResultRow]:
        """Return one line for each task, in the papers' order."""
        found: dict[str, ResultRow] = {}
        for row in in_order([row for row in self.seeds[0].rows if row.pool == pool]) if self.seeds else ():
            found.setdefault(row.name, row)
        return list(found.values())

    def rows(self, pool: Pool, method: str) -> list[ResultRow]:
        """Return the lines of one method: every seed and task."""
        return [row for one in self.seeds for row in one.rows if (row.pool, row.method) == (pool, method)]

    def _scores(self, pool: Pool, method: str, measure: str) -> pd.DataFrame:
        """Return a measure in percent, a line for each seed and a column for each task."""
        lines = [
            {
                row.name: row.score if measure == HEADLINE else row.measures.get(measure)
                for row in one.rows
                if (row.pool, row.method) == (pool, method)
            }
            for one in self.seeds
        ]
        return 100 * pd.DataFrame(lines, dtype=float)

    def estimate(self, pool: Pool, method: str, task: str, measure: str = HEADLINE) -> Estimate | None:
        """Return a measure in percent over seeds."""
        found = self._scores(pool, method, measure).get(task)
        return None if found is None or found.isna().any() else estimate(found.tolist())

    def average(
        self, pool: Pool, method: str, measure: str = HEADLINE, *, with_interval: bool = False
    ) -> Estimate | None:
        """Return a measure in percent over all tasks, every task counting the same."""
        tasks = [task.name for task in self.tasks(pool)]
        scores = self._scores(pool, method, measure).reindex(columns=tasks)
        if scores.empty or scores.isna().to_numpy().any():
            return None
        found = estimate(scores.mean(axis=1).tolist())
        if not with_interval:
            return found
        low, high = interval(self.per_query(pool, method, measure))
        return found._replace(low=100 * low, high=100 * high)

    def per_query(self, pool: Pool, method: str, measure: str = HEADLINE) -> PerTask:
        """Return a measure for each query, from 0 to 1, as the mean over seeds."""
        return mean_of_seeds(
            [
                {
                    task.name: {
                        qid: values[task.headline if measure == HEADLINE else measure]
                        for qid, values in _measure_queries(
                            one, pool, method, task.name, task.headline_k
                        ).items()
                    }
                    for task in self.tasks(pool)
                }
                for one in self.seeds
            ]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Benchmark:
    """The ``results.json`` of a benchmark."""

    kind: Literal["speed", "quality"]
    rows: pd.DataFrame
    """Those of quality are the means over tasks, where there are any."""
    origin: str
    """The machine and the command that measured it."""


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """All results of a report."""

    systems: Sequence[System]
    benchmarks: Sequence[Benchmark] = ()
    made: Sequence[MadeRow] = ()
    """Rows of a sweep."""
    models: Mapping[str, Path] = field(default_factory=dict)
    """Name of a system -> folder of the model of its first finished seed."""

    def in_table(self, table: str) -> list[System]:
        """Return the systems of one table."""
        return [system for system in self.systems if system.table == table and system.seeds]


def gather(sources: Sequence[str], *, model: Path | None = None) -> Gathered:  # noqa: C901  one source, one branch
    """Read sources: folders of sweeps, of evaluations or of models, or ``NAME=FOLDER,FOLDER`` (seeds).

    Raises ArtifactMissing where a folder holds none of these, UsageError for two systems of one name, and
    BadData where seeds of one system were evaluated on different queries.
    """
    systems: list[System] = []
    found: list[Benchmark | None] = []
    made: list[MadeRow] = []
    models: dict[str, Path] = {}
    for source in sources:
        name, places = _parse_source(source)
        if not name and any(places[0].glob(f"*/*/{SWEEP_ROW}")):
            rows = read_rows(places[0])
            made += [row for _, row in rows]
            done = [(folder, row) for folder, row in rows if row.state == "done"]
            for _, row in sorted(done, key=lambda one: -one[1].seed):
                if row.model:
                    models[row.name] = places[0] / row.model
            systems += _systems_of_sweep(rows)
            found += [read_benchmark(folder / EVALUATION) for folder, row in done if row.table == COSTS]
            continue
        if not (places[0] / RESULTS).exists() and (places[0] / MODEL_FILE).exists():
            places = [place / EVALUATION for place in places]
        if (places[0] / RESULTS).exists() and (benchmark := read_benchmark(places[0])) is not None:
            found.append(benchmark)
            continue
        in_model = (places[0].parent / MODEL_FILE).exists()
        title = name or (places[0].parent if in_model else places[0]).resolve().name
        seeds = tuple(read_evaluation(place, seed=seed) for seed, place in enumerate(places))
        systems.append(System(name=title, title=title, table=SYSTEMS, seeds=seeds))
        if in_model:
            models[title] = places[0].parent
    names = [system.name for system in systems]
    for system in systems:
        if names.count(system.name) > 1:
            raise UsageError(f"two systems are named {system.name!r}; give them others, as NAME=FOLDER")
        check_seeds(system)
    if model is not None and systems:
        models[systems[0].name] = model
    benchmarks = [one for one in found if one is not None]
    if not systems and not benchmarks:
        raise ArtifactMissing(f"there is nothing to report on in {', '.join(sources)}: no row is finished")
    return Gathered(systems=systems, benchmarks=benchmarks, made=made, models=models)


def _parse_source(source: str) -> tuple[str, list[Path]]:
    name, is_named, folders = source.partition("=")
    if not (name and is_named) or Path(source).exists():  # a folder's name may hold this sign itself
        return "", [Path(source)]
    return name, [Path(place) for place in folders.split(",")]


def _systems_of_sweep(rows: Sequence[tuple[Path, MadeRow]]) -> list[System]:
    by_name: dict[str, list[tuple[Path, MadeRow]]] = {row.name: [] for _, row in rows if row.table != COSTS}
    for folder, row in sorted(rows, key=lambda one: one[1].seed):
        if row.name in by_name:
            by_name[row.name].append((folder, row))
    systems = []
    for name, own in by_name.items():
        finished = [(folder / EVALUATION, row.seed) for folder, row in own if row.state == "done"]
        seeds = tuple(read_evaluation(folder, seed=seed) for folder, seed in finished)
        row = own[0][1]
        systems.append(System(name=name, title=row.title, table=row.table, seeds=seeds, like=row.like))
    return systems


def check_seeds(system: System) -> None:
    """Check that all seeds of a system answered the same queries; raises BadData where they did not."""
    queries = [{(row.pool, row.name, row.queries) for row in one.rows} for one in system.seeds]
    for one, own in zip(system.seeds[1:], queries[1:], strict=True):
        if own != queries[0]:
            pool, task, _ = min(own ^ queries[0])
            raise BadData(
                f"{system.seeds[0].folder} and {one.folder} were evaluated on different queries ({task}, "
                f"{pool} pool), so they cannot be two seeds of {system.title!r}; evaluate one of them again "
                "as the other"
            )


def read_evaluation(folder: Path, *, seed: int = 0) -> Evaluated:
    """Read what ``genius evaluate`` wrote; raises ArtifactMissing or BadData where it did not write it."""
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
            rows=tuple(_read_row(row) for row in found["rows"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path} is not what `genius evaluate` writes: {error!r}") from None


def read_benchmark(folder: Path) -> Benchmark | None:
    """Read what ``genius bench`` left in a folder; None where the file is not a benchmark's."""
    path = folder / RESULTS
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind: Literal["speed", "quality"] = "speed"
        if isinstance(found.get("queries"), list) and isinstance(found.get("builds"), list):
            rows = [row for row in found["queries"] if not row.get("calculated")]  # by earlier versions
        elif isinstance(found.get("methods"), list) and isinstance(found.get("leaves"), list):
            kind, rows = "quality", found.get("curves") or found["methods"]
        else:
            return None
        means = [row for row in rows if kind == "quality" and row["task"] == "mean"]
        origin = "{machine}; `{command}`".format_map(rows[0])
        return Benchmark(kind=kind, rows=pd.DataFrame(means or rows), origin=origin)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise BadData(f"{path} is not what `genius bench` writes: {error!r}") from None


def _read_row(found: Mapping[str, Any]) -> ResultRow:
    names = {field.name for field in fields(ResultRow)} - {"headline_k", "measures"}
    prefixes = ("R@", "recall@", "MRR", "R-precision", "nDCG@")
    return ResultRow(
        **{name: found[name] for name in names},
        headline_k=int(found["headline"].removeprefix("R@")),
        measures={name: found[name] for name in found if name.startswith(prefixes)},
    )


@lru_cache(maxsize=64)
def _read_run(path: Path) -> Run:
    # A method that found nothing for any query leaves a file without a line.
    return read_run(path) if path.stat().st_size else Run("", {})


@lru_cache(maxsize=4096)
def _measure_queries(
    one: Evaluated, pool: Pool, method: str, task: str, headline_k: int
) -> Mapping[str, Mapping[str, float]]:
    qrels, run = one.qrels(pool, task), one.run(pool, method, task)
    # TREC has no line for a query that found nothing.
    complete = Run(run.name, {**dict.fromkeys(qrels, ()), **run.hits})
    return evaluate(qrels, complete, ks=(1, 5, 10, 20, 50) if headline_k == 10 else (1, 5, 10)).per_query
