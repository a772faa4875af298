"""Read evaluations for a report; a system is one recipe row with all its seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pandas as pd

from genius_search.data.mbeir import read_qrels
from genius_search.errors import ArtifactMissing, BadData, UsageError
from research.evaluate import RESULTS
from research.runs import measure_run, read_run
from research.settings import METHODS, Pool
from research.statistics import PerQuery, estimate
from research.sweep import EVALUATION, MODEL, ROW_FILE
from research.table import Estimate

SYSTEMS: Final = "systems"
"""Name of the table that compares systems."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One row of a recipe with all its seeds."""

    name: str
    title: str
    table: str
    like: str
    """Name of the system that this one is compared with; may be empty."""
    folders: tuple[Path, ...]
    """Folder of `research.evaluate` for each seed."""
    model: Path | None
    """Model of the first seed."""
    split: str
    rows: pd.DataFrame
    """A line for each seed, pool, task and method, as in results.json."""

    def methods(self, pool: Pool) -> list[str]:
        """Return the methods that were evaluated in a pool, in the order of tables."""
        evaluated = set(self.rows[self.rows["pool"] == pool]["method"])
        standard = [method for method in METHODS if method in evaluated]
        return standard + sorted(evaluated.difference(METHODS))

    def tasks(self, pool: Pool) -> list[str]:
        """Return the names of the tasks of a pool."""
        return list(self.rows[self.rows["pool"] == pool]["name"].unique())

    def score(self, pool: Pool, method: str, task: str) -> Estimate | None:
        """Return the headline measure of a task in percent, over seeds."""
        rows = self._select_rows(pool, method)
        scores = rows[rows["name"] == task]["score"]
        return estimate((100 * scores).tolist()) if len(scores) else None

    def average(self, pool: Pool, method: str, measure: str = "score") -> Estimate | None:
        """Return the unweighted mean of a measure over all tasks in percent, over seeds."""
        rows = self._select_rows(pool, method)
        if rows.empty or rows[measure].isna().any():
            return None
        return estimate((100 * rows.groupby("seed")[measure].mean()).tolist())

    def _select_rows(self, pool: Pool, method: str) -> pd.DataFrame:
        return self.rows[(self.rows["pool"] == pool) & (self.rows["method"] == method)]

    def per_query(self, pool: Pool, method: str, measure: str) -> PerQuery:
        """Return a measure for each query, from 0 to 1, as the mean over seeds.

        Raises
        ------
        BadData
            The seeds answered different queries.
        """
        seeds = []
        for folder in self.folders:
            tasks = {}
            for task in self.tasks(pool):
                tasks[task] = _measure_queries(folder, f"{task}_{self.split}.{pool}", method)
            seeds.append(pd.concat(tasks)[measure])
        if any(set(values.index) != set(seeds[0].index) for values in seeds):
            raise BadData(
                f"the seeds of {self.title!r} answered different queries; evaluate one again"
            )
        return sum(seeds[1:], seeds[0]) / len(seeds)


@lru_cache(maxsize=4096)
def _measure_queries(folder: Path, stem: str, method: str) -> pd.DataFrame:
    """Return the measures of each query of a run, a line for each query."""
    qrels_file = folder / "runs" / f"{stem}.qrels"
    run_file = folder / "runs" / f"{stem}.{method}.trec"
    for file in (qrels_file, run_file):
        if not file.exists():
            raise ArtifactMissing(f"{file} is missing; evaluate again")
    qrels = read_qrels(qrels_file)
    # The run file is empty if the method found nothing for any query.
    run = read_run(run_file) if run_file.stat().st_size else {}
    per_query = measure_run(qrels, {**dict.fromkeys(qrels, ()), **run}).per_query
    return pd.DataFrame.from_dict(per_query, orient="index")


def read_systems(sources: Sequence[str]) -> list[System]:
    """Read folders of sweeps and of evaluations, or ``NAME=FOLDER,FOLDER``: one for each seed.

    Raises
    ------
    ArtifactMissing
        A folder holds neither.
    UsageError
        Two systems have the same name.
    """
    systems: list[System] = []
    for source in sources:
        name, is_named, names = source.partition("=")
        folders = [Path(folder) for folder in (names if is_named else source).split(",")]
        row_files = sorted(folders[0].glob(f"*/*/{ROW_FILE}"))
        if row_files and not is_named:
            systems += _read_sweep(row_files)
            continue
        title = name if is_named else folders[0].resolve().name
        systems.append(_read_system(title, title, SYSTEMS, "", folders, folders[0].parent))
    if len({system.name for system in systems}) < len(systems):
        raise UsageError("two systems have the same name; give different names as NAME=FOLDER")
    return systems


def _read_sweep(files: Sequence[Path]) -> Iterator[System]:
    """Yield the systems of a sweep from its row files, in the order of its recipe."""
    rows: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for file in files:
        row = json.loads(file.read_text(encoding="utf-8"))
        rows.setdefault(row["name"], []).append((file.parent, row))
    for name, seeds in sorted(rows.items(), key=lambda item: int(item[1][0][1]["place"])):
        folder, row = seeds[0]
        base = folder.parent.parent / row["model"] / folder.name if row["model"] else folder
        evaluations = [seed_folder / EVALUATION for seed_folder, _ in seeds]
        title = row["title"] or name
        yield _read_system(name, title, row["table"], row["like"], evaluations, base / MODEL)


def _read_system(
    name: str, title: str, table: str, like: str, folders: Sequence[Path], model: Path
) -> System:
    """Read the results of a system's seeds."""
    frames = []
    for seed, folder in enumerate(folders):
        file = folder / RESULTS
        if not file.exists():
            raise ArtifactMissing(f"{folder} holds no {RESULTS}; evaluate with --out {folder.name}")
        results = json.loads(file.read_text(encoding="utf-8"))
        frame = pd.DataFrame(results["rows"])
        frame["score"] = [row[row["headline"]] for row in results["rows"]]
        frames.append(frame.assign(seed=seed, beam=results["config"]["beam"]))
    rows = pd.concat(frames, ignore_index=True)
    sizes = rows.groupby(["pool", "name"])["queries"].nunique()
    if (sizes > 1).any():
        raise BadData(
            f"the seeds of {title!r} were evaluated on different queries; evaluate one again"
        )
    return System(
        name=name,
        title=title,
        table=table,
        like=like,
        folders=tuple(folders),
        model=model if (model / "model.json").exists() else None,
        split=results["split"],
        rows=rows,
    )
